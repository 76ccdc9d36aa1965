"""MkDocs hooks that give the site the layout of the repository.

The documents are in several folders and link to each other, to sources and to results by relative
paths, which work on GitHub. So every file of the site keeps its path in the repository, and linked
files become part of the site.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from griffe import Extension, Function, Object, Parameter, Parameters
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# Pages outside docs/, and their paths in the site.
PAGES = {
    "README.md": "",
    "RESULTS.md": "results/",
    "BEYOND.md": "beyond/",
    "CONTRIBUTING.md": "contributing/",
    "CHANGELOG.md": "changelog/",
    "SECURITY.md": "security/",
    "beyond/PLAN.md": "beyond/plan/",
    "beyond/README.md": "beyond/run/",
    "benchmarks/results/tables.md": "benchmarks/tables/",
    "docs/index.md": "contents/",
}
LINK = re.compile(r"\]\(([^)#\s:]+)")
CELL = re.compile(r"<td([^>]*)>(.*?)</td>", re.DOTALL)
TAG = re.compile("<[^>]+>")
CODE = re.compile("(<pre.*?</pre>|<code.*?</code>)", re.DOTALL)
UNBROKEN = re.compile(r"\bk = (?=[¼½⅛\d])")
OPTION = re.compile(r"<code>(?=--[^<]{1,24}</code>)")
FENCE = re.compile(r"^```python\n(?=>>>)", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the files at their paths in the repository, with all files that documents link to."""
    places = {path: f"{place}index.html" for path, place in PAGES.items()}
    for file in files:
        if file.src_dir == config.docs_dir:
            places.setdefault(f"docs/{file.src_uri}", file.dest_uri)
    for document in [path for path in places if path.endswith(".md")]:
        for target in LINK.findall((ROOT / document).read_text("utf-8")):
            path = os.path.normpath(os.path.join(os.path.dirname(document), target))
            if (ROOT / path).is_file():
                places.setdefault(path, path if path.endswith((".png", ".svg")) else f"{path}.txt")
    found = [file for file in files if file.src_dir != config.docs_dir]  # files of the theme
    for path, place in places.items():
        found.append(File(path, str(ROOT), config.site_dir, True, dest_uri=place))
        if path.endswith(".ipynb"):
            page = File.generated(config, f"{path[:-6]}.md", content=notebook(ROOT / path))
            page.dest_uri = f"{place[:-6]}/index.html"
            found.append(page)
    return Files(found)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page converted from GitHub's Markdown to Python-Markdown."""
    markdown = FENCE.sub("```pycon\n", markdown)
    markdown = markdown.replace("<details>", '<details markdown="1">')
    return markdown.replace(".ipynb)", ".md)")


def on_page_content(html: str, **_: Any) -> str:
    """Return a page with CSS classes on table cells and options, and "k = 1" kept on one line."""

    def widened(cell: re.Match[str]) -> str:
        attributes, content = cell.groups()
        length = len(TAG.sub("", content))
        is_code = re.fullmatch("(<strong>)?<code>[^<]*</code>(</strong>)?", content)
        sizes = (("short", 16), ("brief", 28), ("medium", 80))
        kind = "short" if is_code else next((name for name, most in sizes if length < most), "long")
        return f'<td{attributes} class="{kind}">{content}</td>'

    parts = CODE.split(CELL.sub(widened, html))
    parts[::2] = [UNBROKEN.sub("k\u00a0=\u00a0", text) for text in parts[::2]]
    parts[1::2] = [OPTION.sub('<code class="option">', code) for code in parts[1::2]]
    return "".join(parts)


def notebook(path: Path) -> str:
    """Return a notebook as Markdown, with its outputs."""
    name = path.name
    parts = []
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                image = "".join(data["image/png"]).replace("\n", "")
                parts.append(f'<img alt="figure" src="data:image/png;base64,{image}">')
            else:
                text = "".join(output.get("text") or data["text/plain"])
                parts.append(f"```text {{ .output }}\n{text.rstrip()}\n```")
    parts.insert(1, f'<a href="../{name}" download>Download this notebook</a>')
    return "\n\n".join(parts)


class Reading(Extension):
    """Adapts docstrings and signatures for the reference."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rename the section "Example:" to "Examples:", whose code is highlighted."""
        if obj.docstring is not None:
            said = obj.docstring.value
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", said, flags=re.MULTILINE)

    def on_function(self, *, func: Function, **_: Any) -> None:
        """Hide private parameters, and give a `Reweighted` function its rule's signature."""
        parameters = [each for each in func.parameters if not each.name.startswith("_")]
        if any(str(decorator.value) == "Reweighted" for decorator in func.decorators):
            kind, of_tensor = parameters[0].kind, parameters[0].annotation
            parameters[:1] = [
                Parameter(name, annotation=of_tensor, kind=kind) for name in ("logits", "target")
            ]
        func.parameters = Parameters(*parameters)
