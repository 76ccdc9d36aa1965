"""Write the Python code of each document to a file, for type checkers.

    python -m tools.document_code build/documents

All blocks of a document form one program, at their original line numbers, as in the tests.
"""

from __future__ import annotations

import doctest
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SETTINGS = {
    "typeCheckingMode": "basic",
    "extraPaths": [str(ROOT / "src"), str(ROOT)],
    # Examples show values as bare expressions.
    "reportUnusedExpression": False,
    "reportMissingImports": "error",
}


def documents() -> list[Path]:
    """Return the documents whose code is run: README and others beside it, and docs/."""
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("docs/*.ipynb")])


def code_blocks(document: Path) -> list[tuple[int, str]]:
    """Return the Python blocks of a document or notebook with their line numbers."""
    text = document.read_text("utf-8")
    if document.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        sources = ["".join(cell["source"]) for cell in cells]
        return [(1 + at, source) for at, source in enumerate(sources)]
    return [(text.count("\n", 0, block.start(1)) + 1, block[1]) for block in BLOCK.finditer(text)]


def program_of(document: Path) -> str:
    """Return a document's code as one program."""
    lines: list[str] = []
    for line, code in code_blocks(document):
        lines += [""] * (line - 1 - len(lines))
        if ">>>" in code:
            code = doctest.script_from_examples(code)
        lines += code.splitlines()
    return "\n".join(lines) + "\n"


def main(folder: Path) -> None:
    """Write the programs and pyright's settings."""
    folder.mkdir(parents=True, exist_ok=True)
    for document in documents():
        name = "_".join(document.relative_to(ROOT).with_suffix("").parts).replace("-", "_")
        (folder / f"{name.lower()}.py").write_text(program_of(document), "utf-8")
    (folder / "pyrightconfig.json").write_text(json.dumps(SETTINGS, indent=1), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
