"""Count lines of code per package, without blank lines, comments and docstrings.

python tools/sizes.py            # the working tree
python tools/sizes.py HEAD~20    # a commit and the working tree
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tarfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOPS = ("src", "paper", "beyond", "benchmarks", "tools", "tests")
_LAYOUT = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENCODING, tokenize.ENDMARKER,
)  # fmt: skip


def code_lines(source: str) -> int:
    """Return the number of lines of code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                lines.difference_update(range(first.lineno, (first.end_lineno or 0) + 1))
    return len(lines)


def part_of(path: str) -> str:
    """Return the subpackage or module of a file in the wheel, or the top-level folder of others."""
    parts = Path(path).parts
    if parts[0] == "src":
        return "/".join(parts[1:3]).removesuffix(".py")
    return parts[0]


def files_now() -> Iterator[tuple[str, str]]:
    """Yield the Python files of the working tree."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in listed.stdout.split():
        if (ROOT / name).exists():
            yield name, (ROOT / name).read_text("utf-8")


def files_at(commit: str) -> Iterator[tuple[str, str]]:
    """Yield the Python files of a commit."""
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        for member in tar:
            if member.name.endswith(".py") and (file := tar.extractfile(member)):
                yield member.name, file.read().decode()


def sizes(files: Iterator[tuple[str, str]]) -> tuple[Counter[str], Counter[str]]:
    """Return the numbers of all lines and of lines of code, by package."""
    whole: Counter[str] = Counter()
    code: Counter[str] = Counter()
    for name, source in files:
        if name.split("/")[0] in TOPS:
            for part in {part_of(name), "the wheel"} if name.startswith("src") else {part_of(name)}:
                whole[part] += source.count("\n")
                code[part] += code_lines(source)
    return whole, code


def main() -> None:
    """Print the table."""
    columns = [*map(files_at, sys.argv[1:]), files_now()]
    names = [*sys.argv[1:], "now"]
    counted = [sizes(files) for files in columns]
    parts = sorted({part for _, code in counted for part in code}, key=lambda r: ("/" not in r, r))
    print(f"{'lines of code (all lines)':<28}" + "".join(f"{name:>20}" for name in names))
    for part in parts:
        cells = [
            f"{code[part]:,} ({whole[part]:,})" if code[part] else "" for whole, code in counted
        ]
        print(f"{part:<28}" + "".join(f"{cell:>20}" for cell in cells))


if __name__ == "__main__":
    main()
