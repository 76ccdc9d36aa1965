"""RESULTS.md, its page and its figures: the template filled with numbers from the ledgers."""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from paper import PROGRAM, claims, effort, questions, tables, verdicts
from paper.figures import Picture, draw
from paper.findings import Reproduction, read
from paper.rows import UNPRINTED, Experiment
from paper.toy import Spread
from pseudograd import words
from pseudograd.search.paper import CLIP

_HERE = Path(__file__).parent


def is_committed(folder: Path) -> bool:
    """Return whether a folder is a clone's ``paper/results``; its RESULTS.md is in the root."""
    return folder.resolve().parts[-2:] == ("paper", "results")


def documents(
    experiments: Sequence[Experiment],
    folder: Path,
    *,
    smoke: bool = False,
    selected_by: Sequence[str] = (),
) -> dict[Path, str]:
    """Return the text of RESULTS.md, the page and the figures, by path.

    All are in the folder, except that the RESULTS.md of ``paper/results`` is in the clone's root.

    Args:
        experiments: The planned experiments.
        folder: The folder of their studies.
        smoke: Whether it was a smoke test.
        selected_by: The options of the command that selected the experiments.

    """
    if not folder.is_dir():
        raise ValueError(f"{folder} holds no ledgers: run `{PROGRAM} run all` first")
    committed = is_committed(folder)
    root = Path(os.path.normpath(folder / "../..")) if committed else folder
    name = "paper/results" if committed else Path(os.path.relpath(folder)).as_posix()
    options = [*selected_by, *["--smoke"] * smoke, *["--out", name] * (smoke or not committed)]
    command = shlex.join([*PROGRAM.split(), "report", *options])
    if not all(experiment.row.of_paper for experiment in experiments):
        command = "paper.report.documents"  # the command knows only the paper's rows
    found = read(experiments, folder, smoke=smoke)
    numbers = _numbers(found, root, smoke)
    pictures = draw(numbers)
    text = _markdown(
        **numbers,
        folder=name,
        command=command,
        beside="paper/results/" * committed,
        pictures=pictures,
        toy_csv=shlex.quote(f"{name}/toy.csv"),
        smoke=smoke,
        protocol=experiments[0].protocol(),
    )
    return {
        root / "RESULTS.md": text,
        folder / "results.html": _page(text, pictures),
        **{folder / name: picture.svg for name, picture in pictures.items()},
    }


def same(one: str, other: str) -> bool:
    """Return whether two versions of a file have the same content; for figures, the same data.

    Another version of matplotlib draws the same data with other bytes.
    """

    def data_of(text: str) -> str:
        drawn = r"(<\?xml.*?)?<svg\b.*?<dc:description>(.*?)</dc:description>.*?</svg>"
        return re.sub(drawn, r"\2", text, flags=re.DOTALL)

    return data_of(one) == data_of(other)


def _numbers(found: Reproduction, root: Path, smoke: bool) -> dict[str, Any]:
    """Return all numbers of the document; claims are judged by the rows that the paper prints."""
    printed = replace(found, found={e: f for e, f in found.found.items() if e.row.printed})
    readings = verdicts.readings(printed)
    judged = verdicts.judged_claims(printed, readings)
    return {
        "lead": _lead(found),
        "answer": verdicts.answer(printed, readings[0]),
        "depths": verdicts.by_depth(printed, readings[0]),
        "kinds": [reading.kind for reading in readings],
        "points": readings[0].points,
        "toy": claims.judge_toy(found.toy),
        "toy_lines": verdicts.toy_table(found),
        "has_toy": bool(found.toy),
        "claims": judged,
        "too_few": any(
            each["judgement"].verdict == verdicts.TOO_FEW
            for claim in judged
            for each in claim["judged"]
        ),
        "data_lines": verdicts.by_data_and_depth(printed),
        "run": effort.what_was_run(found, root, smoke),
        "tables": tables.tables(found),
        "retrainings": sorted({len(f.result.comparison.chosen) for f in found.finished} or {5}),
        "nearer": tables.nearer_to_three_fifths(found),
        "deviations": tables.relative_deviations(found.finished),
        "curves": questions.curves(found),
        "controls": questions.controls(found),
        "early": questions.taken_early(found),
        "selection": questions.selection(found),
        "selected": questions.selected_rates(found),
        "scalings": questions.scalings(found),
        "activations": tables.other_activations(found),
    }


def _lead(found: Reproduction) -> dict[str, Any]:
    """Return the number of finished rows of each kind, and of missing rows by data set."""
    kinds = {
        "printed": [e for e in found.found if e.row.printed and e.as_printed],
        "beside": [e for e in found.found if e.row.printed and not e.as_printed],
        "comments": [e for e in found.found if e.row.table == UNPRINTED],
        "own": [e for e in found.found if not e.row.of_paper],
    }
    return {
        "kinds": [
            {"name": name, "finished": sum(found.found[e] is not None for e in some),
             "total": len(some)}
            for name, some in kinds.items() if some
        ],
        "unjudged": bool(kinds["comments"] or kinds["own"]),
        "missing": Counter(
            e.data for e in (*kinds["printed"], *kinds["beside"]) if found.found[e] is None
        ),
        "printed_finished": all(found.found[e] for e in kinds["printed"]),
    }  # fmt: skip


# --- rendering -----------------------------------------------------------------------------------


def _markdown(**numbers: Any) -> str:
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["fraction"] = words.fraction
    environment.globals |= {
        name: getattr(words, name)
        for name in ("counted", "fraction", "interval", "p_value", "percent", "signed")
    }
    template = environment.get_template("RESULTS.md.jinja")
    return _unwrapped(
        template.render(
            numbers,
            program=PROGRAM,
            level=claims.LEVEL,
            permutations=claims.PERMUTATIONS,
            goal_hardware=effort.GOAL_HARDWARE,
            early_epochs=questions.EARLY,
            measures=tables.MEASURES,
            clip=CLIP,
            minutes=lambda seconds: f"{seconds / 60:,.1f}",
            printed=_printed,
            rates=rates,
            spread=Spread.shown,
            votes=_votes,
        )
    )


def rates(*values: float) -> str:
    """Return a learning rate, or the range of several; exact if that is short, else rounded.

    >>> rates(0.0625), rates(0.5, 0.0625, 0.25), rates(2.0**-14)
    ('1/16', '1/16 to 1/2', '6.104e-05')
    """

    def rate(value: float) -> str:
        text = words.fraction(value)
        return text if sum(map(str.isdigit, text.removeprefix("1/"))) <= 4 else f"{value:.4g}"

    return " to ".join(dict.fromkeys(rate(end) for end in (min(values), max(values))))


def _votes(count: Fraction) -> str:
    """Format a number of votes, of which rows have shares."""
    return f"{float(count):.1f}".removesuffix(".0")


def _printed(figure: float | None, form: str) -> str:
    """Format a figure of the paper; some have more digits."""
    if figure is None:
        return words.DASH
    text = format(figure, form)
    return text if float(text) == figure else f"{figure:g}"


def _unwrapped(text: str) -> str:
    """Join the lines of each paragraph, item and table row, which the template wraps."""
    lines: list[str] = []
    for line in (" ".join(line.split()) for line in text.splitlines()):
        begins = not line or line.startswith(("|", "- ", "#", "<", "!["))
        if begins or not lines or not lines[-1] or lines[-1].startswith(("#", "<")):
            lines.append(line)
        else:
            lines[-1] += f" {line}"
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines).strip())
    # Remove blank lines between the rows of a table.
    return re.sub(r"(?<=\|)\n\n(?=\|)", "\n", text) + "\n"


def _page(text: str, pictures: dict[str, Picture]) -> str:
    """Return the same document as a self-contained HTML page."""
    try:
        from markdown_it import MarkdownIt
    except ImportError as problem:
        raise ImportError(
            "the page needs markdown-it-py: run `pip install --group paper` in the clone"
        ) from problem
    from markupsafe import Markup, escape

    # Whole lines may be HTML (<details>); HTML inside a line is escaped.
    html = MarkdownIt("commonmark", {"html": True}).enable("table").disable("html_inline")
    body = html.render(text.partition("\n\n")[2].partition("\n\n")[2])  # without title and origin
    body = body.replace("<table>", '<div class="scroll"><table>').replace(
        "</table>", "</table></div>"
    )
    for name, picture in pictures.items():
        image = re.search(rf'<p><img src="[^"]*{re.escape(name)}"[^>]*></p>', body)
        assert image is not None
        svg = picture.svg[picture.svg.index("<svg") :]
        figure = f'<figure role="img" aria-label="{escape(picture.about)}">{svg}</figure>'
        body = body.replace(image[0], figure)
    environment = Environment(loader=FileSystemLoader(_HERE), autoescape=True)
    return environment.get_template("results.html.jinja").render(body=Markup(body)) + "\n"
