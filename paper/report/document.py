"""A document, made of blocks: as Markdown, and as a page with the same content."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from pseudograd.report.page import render


@dataclass(frozen=True)
class Text:
    """A paragraph, in which `code` and **bold** are marked as in Markdown.

    Attributes:
        text: Its words.

    Example:
        >>> Text("**Does k matter?** See `docs/toy.md`.").text[:18]
        '**Does k matter?**'

    """

    text: str


@dataclass(frozen=True)
class Title:
    """A title within a part.

    Attributes:
        text: Its words.

    Example:
        >>> Title("Is it k, or the learning rate?").text
        'Is it k, or the learning rate?'

    """

    text: str


@dataclass(frozen=True)
class Bullets:
    """A list.

    Attributes:
        items: Each a text.

    Example:
        >>> Bullets(["**Activation**: ReLU.", "**Ties**: the k nearest 1."]).items[0]
        '**Activation**: ReLU.'

    """

    items: Sequence[str]


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        head: The titles of its columns.
        rows: Its cells, each a text.
        fold: What is seen of it before it is opened; it stands open if this is empty.

    Example:
        >>> Table(["k", "error, %"], [["1", "1.76"], ["1/2", "1.74"]], fold="Row by row").fold
        'Row by row'

    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    fold: str = ""


@dataclass(frozen=True)
class Figure:
    """A figure, which stands in the page and in a file beside it.

    Attributes:
        name: Of the file.
        svg: The figure; what it shows is its ``aria-label``.

    Example:
        >>> Figure("deviations.svg", Markup('<svg aria-label="How far."></svg>')).name
        'deviations.svg'

    """

    name: str
    svg: Markup


Block = Text | Title | Bullets | Table | Figure


@dataclass(frozen=True)
class Part:
    """A part of a document.

    Attributes:
        title: What it is called.
        blocks: What stands in it.

    Example:
        >>> Part("What was run", [Text("Nothing yet.")]).title
        'What was run'

    """

    title: str
    blocks: Sequence[Block]


def markdown(title: str, made: str, lead: str, parts: Sequence[Part], path: str) -> str:
    """Write a document in Markdown.

    Args:
        title: Of the document.
        made: What it was made from.
        lead: The sentences before all parts.
        parts: The parts.
        path: What stands before the names of figures' files.

    Example:
        >>> part = Part("The tables", [Table(["k", "error"], [["1/4", "1.8"]])])
        >>> print(markdown("Results", "*Made by hand.*", "All rows.", [part], "results/"))
        # Results
        <BLANKLINE>
        *Made by hand.*
        <BLANKLINE>
        All rows.
        <BLANKLINE>
        ## The tables
        <BLANKLINE>
        | k | error |
        | --- | --- |
        | 1/4 | 1.8 |
        <BLANKLINE>

    """

    def cell(text: str) -> str:
        return text.replace("|", "\\|")

    def text_of(block: Block) -> str:
        match block:
            case Text(text):
                return text
            case Title(text):
                return f"### {text}"
            case Bullets(items):
                return "\n".join(f"- {item}" for item in items)
            case Figure(name, svg):
                about = re.findall(r'aria-label="([^".]*)', svg)[0]  # its first sentence
                return f"![{Markup(about).unescape()}]({path}{name})"
            case Table(head, rows, fold):
                lines = [head, ["---"] * len(head), *rows]
                table = "\n".join(f"| {' | '.join(map(cell, line))} |" for line in lines)
                if not fold:
                    return table
                return f"<details><summary>{escape(fold)}</summary>\n\n{table}\n\n</details>"

    blocks = [f"# {title}", made, lead]
    for part in parts:
        blocks += [f"## {part.title}", *map(text_of, part.blocks)]
    return "\n\n".join(blocks) + "\n"


def page(title: str, lead: str, parts: Sequence[Part]) -> str:
    """Write a document as a page, which needs nothing else.

    Args:
        title: Of the document.
        lead: The sentences before all parts.
        parts: The parts.

    Example:
        >>> "<p>1 &lt; <b>2</b></p>" in page("Results", "", [Part("Sums", [Text("1 < **2**")])])
        True

    """

    def marked(text: str) -> Markup:
        html = re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text)))
        return Markup(re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", html))

    def values_of(block: Block) -> dict[str, object]:
        match block:
            case Text(text):
                return {"kind": "text", "text": marked(text)}
            case Title(text):
                return {"kind": "title", "text": marked(text)}
            case Bullets(items):
                return {"kind": "bullets", "texts": list(map(marked, items))}
            case Figure(_, svg):
                return {"kind": "figure", "svg": svg}
            case Table(head, rows, fold):
                cells = [list(map(marked, row)) for row in rows]
                return {"kind": "table", "head": head, "rows": cells, "fold": fold}

    filled = [
        {"title": part.title, "blocks": [values_of(block) for block in part.blocks]}
        for part in parts
    ]
    return render("results.html", title=title, lead=marked(lead), parts=filled)
