"""The results of the reproduction as a document, RESULTS.md, and as a page with the same content.

Both are made from the ledgers and the manifest; nothing is computed here but means and intervals.
"""

from __future__ import annotations

import csv
import math
import os
import re
import shlex
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from markupsafe import Markup, escape

from pseudograd.data import variant
from pseudograd.data.registry import BENCHMARKS
from pseudograd.fleet import Outcome
from pseudograd.report import results_figures
from pseudograd.report.figures import signed
from pseudograd.report.page import render
from pseudograd.report.summary import counted, fraction, p_value, percent
from pseudograd.reproduce import claims
from pseudograd.reproduce.claims import (
    CLAIMS,
    Claim,
    Judgement,
    Point,
    can_be_confirmed,
    judge,
    our_points,
    paper_points,
)
from pseudograd.reproduce.findings import (
    Effort,
    Finding,
    Reproduction,
    Stability,
    apart_from_1,
    cross_entropies,
    error_against_k,
    errors_pct,
    read,
    side,
    stability,
    untried_rates,
)
from pseudograd.reproduce.rows import UNPRINTED, Experiment, Row, paper_rows
from pseudograd.reproduce.toy import Spread
from pseudograd.search import Comparison, Difference
from pseudograd.search.protocol import CLIP

BESIDE = "results"  # RESULTS.md lies beside a folder of this name, and in any other
_STATED, _OTHER = (-1.0, 1.0), (0.0, 1.0)  # MNIST as the paper says, and as fits its rates
_GOAL_HARDWARE = "NVIDIA H200"
_COMPARED = "selected k minus k = 1 (95% interval)"
_DASH = "–"
_TOO_FEW = "open (too few rows)"
_TITLES = {
    "table1": "Table 1: one hidden layer, momentum 0.5",
    "table3": "Table 3: three hidden layers, momentum 0.5",
    "table4": "Table 4: five hidden layers",
    "supplement": "Supplement: one and three hidden layers, other momenta",
    "unprinted": "Rows that stand in the paper’s source as comments",
}


# --- a document ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Text:
    kind: ClassVar[str] = "text"
    text: str


@dataclass(frozen=True)
class _Title:
    kind: ClassVar[str] = "title"
    text: str


@dataclass(frozen=True)
class _Bullets:
    kind: ClassVar[str] = "bullets"
    items: Sequence[str]


@dataclass(frozen=True)
class _Table:
    kind: ClassVar[str] = "table"
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    fold: str = ""  # what is seen of it before it is opened


@dataclass(frozen=True)
class _Figure:
    kind: ClassVar[str] = "figure"
    name: str
    svg: Markup


_Block = _Text | _Title | _Bullets | _Table | _Figure


@dataclass(frozen=True)
class _Part:
    title: str
    blocks: Sequence[_Block]


def documents(
    experiments: Sequence[Experiment], folder: Path, *, smoke: bool = False
) -> dict[Path, str]:
    """Give the files of the results: RESULTS.md, a page and figures.

    All lie in the folder, but RESULTS.md lies beside it if it is called "results".

    Args:
        experiments: What was to be run.
        folder: Of the ledgers and the manifest.
        smoke: Whether they were run in small.

    Returns:
        The content of each file, by its path.

    Example:
        >>> import tempfile
        >>> from pseudograd.reproduce.rows import experiments, rows
        >>> folder = Path(tempfile.mkdtemp()) / "results"
        >>> folder.mkdir()
        >>> files = documents(experiments(rows("table1", "svhn 1x400*")), folder)
        >>> [path.name for path in files]
        ['RESULTS.md', 'results.html']
        >>> "not run yet" in files[folder.parent / "RESULTS.md"]
        True

    """
    if not folder.is_dir():
        raise ValueError(f"{folder} holds no ledgers: run `pseudograd reproduce all` first")
    found = read(experiments, folder, smoke=smoke)
    # What the paper claims, it claims of what it prints.
    of_paper = {e: finding for e, finding in found.found.items() if e.row.printed}
    printed = replace(found, found=of_paper)
    beside = folder.resolve().name == BESIDE
    said = BESIDE if beside else Path(os.path.relpath(folder)).as_posix()
    title, lead = "Results", _lead(found, smoke)
    parts = [
        _in_short(printed),
        _what_was_run(found, None if smoke else _plain_loop(folder.parent), smoke),
        _the_claims(printed, said),
        _the_tables(found),
        _asked_next(printed),
        _choices(found),
    ]
    figures = [block for part in parts for block in part.blocks if isinstance(block, _Figure)]
    command = "pseudograd reproduce report" + " --smoke" * smoke
    if smoke or not beside:
        command += f" --out {shlex.quote(said)}"
    if not all(experiment.row.of_paper for experiment in experiments):
        command = f"{__name__}.documents"  # the command knows the paper's rows only
    made = f"*Made from the ledgers in `{said}` by `{command}`. Change that, not this file.*"
    return {
        (folder.parent if beside else folder) / "RESULTS.md": _markdown(
            title, made, lead, parts, f"{BESIDE}/" * beside
        ),
        folder / "results.html": _page(title, lead, parts),
        **{folder / figure.name: results_figures.standalone(figure.svg) for figure in figures},
    }


def _markdown(title: str, made: str, lead: str, parts: Sequence[_Part], path: str) -> str:
    def cell(text: str) -> str:
        return text.replace("|", "\\|")

    def text_of(block: _Block) -> str:
        match block:
            case _Text(text):
                return text
            case _Title(text):
                return f"### {text}"
            case _Bullets(items):
                return "\n".join(f"- {item}" for item in items)
            case _Figure(name, svg):
                about = re.findall(r'aria-label="([^".]*)', svg)[0]  # its first sentence
                return f"![{Markup(about).unescape()}]({path}{name})"
            case _Table(head, rows, fold):
                lines = [head, ["---"] * len(head), *rows]
                table = "\n".join(f"| {' | '.join(map(cell, line))} |" for line in lines)
                if not fold:
                    return table
                return f"<details><summary>{escape(fold)}</summary>\n\n{table}\n\n</details>"

    blocks = [f"# {title}", made, lead]
    for part in parts:
        blocks += [f"## {part.title}", *map(text_of, part.blocks)]
    return "\n\n".join(blocks) + "\n"


def _page(title: str, lead: str, parts: Sequence[_Part]) -> str:
    def marked(text: str) -> Markup:
        html = re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text)))
        return Markup(re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", html))

    def values_of(block: _Block) -> dict[str, object]:
        match block:
            case _Figure(_, svg):
                return {"kind": block.kind, "svg": svg}
            case _Bullets(items):
                return {"kind": block.kind, "texts": list(map(marked, items))}
            case _Table(head, rows, fold):
                cells = [list(map(marked, row)) for row in rows]
                return {"kind": block.kind, "head": head, "rows": cells, "fold": fold}
            case _:
                return {"kind": block.kind, "text": marked(block.text)}

    filled = [
        {"title": part.title, "blocks": [values_of(block) for block in part.blocks]}
        for part in parts
    ]
    return render("results.html", title=title, lead=marked(lead), parts=filled)


# --- in short ------------------------------------------------------------------------------------


def _lead(found: Reproduction, smoke: bool) -> str:
    unprinted = [e for e in found.found if e.row.table == UNPRINTED]
    own = [e for e in found.found if not e.row.of_paper]
    printed = [e for e in found.found if e.row.printed]
    as_printed = [e for e in printed if e.as_printed]
    others = [e for e in printed if not e.as_printed]

    def finished(some: Sequence[Experiment]) -> str:
        return f"{sum(found.found[e] is not None for e in some)} of {len(some)}"

    text = (
        "The paper’s experiments, run again with its whole protocol: "
        f"{finished(as_printed)} rows are finished"
    )
    if others:
        text += (
            f", and {finished(others)} that are run beside them (MNIST in [0, 1], and some rows "
            "with tanh)"
        )
    if unprinted:
        text += f", and {finished(unprinted)} that stand in its source as comments"
    if own:
        text += f", and {finished(own)} that are not the paper’s"
    if unprinted or own:
        text += "; these are in the tables alone, and no claim is judged by them"
    if smoke:
        text = f"Run in small, to see that all works: the figures mean nothing. {text}"
    text = f"{text}. What contradicts the paper stands beside what confirms it."
    if missing := Counter(_data_of(e) for e in (*as_printed, *others) if found.found[e] is None):
        rows = ", ".join(f"{number} of {data}" for data, number in missing.items())
        text += (
            f" **Rows that are not finished yet: {rows}.** Until they are, verdicts, means and "
            "intervals are of the finished rows alone."
        )
    return text


def _rows(found: Reproduction) -> list[Row]:
    return list(dict.fromkeys(experiment.row for experiment in found.found))


@dataclass(frozen=True)
class _Reading:
    """Rows that claims are judged by, and whether their figures are the paper’s."""

    short: str
    name: str
    points: Sequence[Point]
    unmarked: Sequence[Point] = ()  # those of ours that are not marked §
    of_paper: bool = False


def _readings(found: Reproduction) -> list[_Reading]:
    def ours(short: str, name: str, mnist: tuple[float, float]) -> _Reading:
        unmarked = [finding for finding in found.finished if not apart_from_1(finding)]
        return _Reading(short, name, our_points(found.finished, mnist), our_points(unmarked, mnist))

    readings = [ours("ours", "Ours, MNIST in [−1, 1] as the paper says", _STATED)]
    stated, paper = readings[0].points, paper_points(_rows(found))
    if any(finding.experiment.feature_range == _OTHER for finding in found.finished):
        readings.append(ours("ours, MNIST in [0, 1]", "Ours, MNIST in [0, 1]", _OTHER))
    if 0 < len(stated) < len(paper):
        readings.append(
            _Reading(
                "the paper’s figures, same rows",
                "The paper’s own figures, same rows",
                paper_points(point.row for point in stated),
                of_paper=True,
            )
        )
    whole = _Reading("the paper’s figures", "The paper’s own figures", paper, of_paper=True)
    return [*readings, whole]


def _judge(claim: Claim, reading: _Reading, found: Reproduction) -> tuple[Judgement, int]:
    """What the rule says, and of how many rows it will; what cannot be told yet is left open."""
    judgement, total = judge(claim, reading.points), _total(claim, found)
    missed = judgement.verdict == claims.NOT and judgement.rows < total
    if missed and not can_be_confirmed(claim, reading.points):
        judgement = replace(judgement, verdict=_TOO_FEW)
    return judgement, judgement.rows if reading.of_paper else total


def _in_short(found: Reproduction) -> _Part:
    readings = _readings(found)
    of_same = ""
    if sum(reading.of_paper for reading in readings) > 1:
        of_same = " (while rows are missing, also to those of the finished rows alone)"
    toy = claims.judge_toy(found.toy).verdict
    lines = [["1", claims.TOY_STATEMENT, toy, *[_DASH] * (len(readings) - 1)]]
    lines += [
        [claim.name, claim.statement, *(_verdict(claim, each, found) for each in readings)]
        for claim in CLAIMS
    ]
    return _Part(
        "In short",
        [
            *_does_k_matter(found, readings[0]),
            _Text(
                "Each claim with its verdict, and what the same rule says to the paper’s own "
                f"figures{of_same}, which tells how far its tables carry its claims:"
            ),
            _Table(["", "claim", *(reading.short for reading in readings)], lines),
            _Text(
                "For claims 2a, 2c, 2d, 3, 4 and 6 “partly” means the right direction, within "
                "noise; for 2a and 2c it can also mean beyond noise, but in no more than half of "
                "the rows, and for 3 lower in more rows, but not on average. In a row marked § "
                "k = 1 was never tried at the selected k’s rate, so that part of the difference "
                "may be the rate’s. The rules, tests and figures are below."
            ),
            *_selected_figure(found),
        ],
    )


def _does_k_matter(found: Reproduction, reading: _Reading) -> list[_Block]:
    """The answer to the first question, in a few sentences."""
    if not reading.points:
        return []

    def mean(points: Sequence[Point]) -> str:
        return _interval(claims.pooled_by_architecture(points), ".2f")

    whole = mean(reading.points).replace("(", "(95% interval over architectures ")
    text = (
        "**Does k matter?** Compared with k = 1, the selected k changes the test error by "
        f"{whole} percentage points on average."
    )
    if 0 < len(reading.unmarked) < len(reading.points):
        marked = counted(len(reading.points) - len(reading.unmarked), "row")
        text += f" Without the {marked} marked § (explained below the table) it is "
        text += f"{mean(reading.unmarked)}."
    differences = [
        finding.result.comparison.error
        for finding in found.finished
        if finding.experiment.as_printed and finding.k != 1
    ]
    lower = sum(difference.high < 0 for difference in differences)
    higher = sum(difference.low > 0 for difference in differences)
    text += (
        f" In {len(differences)} of {counted(len(reading.points), 'row')} the selected k is not 1; "
        "by the 95% interval over seeds that each of them has, the error is lower in "
        f"{lower}, higher in {higher}, and the same within noise in "
        f"{len(differences) - lower - higher}."
    )
    of_data: dict[str, list[int]] = {}
    for point in reading.points:
        if point.row.hidden_layers > 1:
            of_data.setdefault(point.row.data, []).append(side(point.k))
    if of_data:
        selected = "; ".join(
            f"{data} ({counted(len(sides), 'row')}) selected {_selected(sides)}"
            for data, sides in of_data.items()
        )
        text += f" With several hidden layers, {selected}."
    return [_Text(text)]


def _selected(sides: Sequence[int]) -> str:
    """On which side of 1 rows selected their k, in words."""
    words = {-1: "a k below 1", 0: "k = 1", 1: "a k above 1"}
    return ", ".join(f"{word} in {sides.count(at)}" for at, word in words.items() if at in sides)


def _verdict(claim: Claim, reading: _Reading, found: Reproduction) -> str:
    """The verdict, and what it is without rows marked § if that is another."""
    judgement, total = _judge(claim, reading, found)
    text, without = _so_far(judgement, total), _without_marked(claim, reading, found)
    if without and without.verdict != judgement.verdict:
        text += f"; without rows marked § {without.verdict}"
    return text


def _without_marked(claim: Claim, reading: _Reading, found: Reproduction) -> Judgement | None:
    """What the rule says without rows marked §; None if it is judged by none of them."""
    marked = {point.row for point in reading.points} - {point.row for point in reading.unmarked}
    if reading.of_paper or not any(row.hidden_layers in claim.depths for row in marked):
        return None
    if not any(point.row.hidden_layers in claim.depths for point in reading.unmarked):
        return Judgement(claims.OPEN, 0, "no row is left")
    return _judge(claim, replace(reading, points=reading.unmarked), found)[0]


def _total(claim: Claim, found: Reproduction) -> int:
    return sum(row.hidden_layers in claim.depths for row in _rows(found))


def _so_far(judgement: Judgement, total: int) -> str:
    """The verdict, and from how many rows if more are to come."""
    if judgement.rows in (0, total) or judgement.verdict == _TOO_FEW:
        return judgement.verdict
    return f"{judgement.verdict} so far ({judgement.rows} of {total} rows)"


def _selected_figure(found: Reproduction) -> list[_Block]:
    ours = our_points(found.finished, _STATED)
    if not ours:
        return []

    def counts(points: Iterable[Point]) -> dict[int, Counter[float]]:
        by_depth: dict[int, Counter[float]] = {}
        for point in sorted(points, key=lambda point: point.row.hidden_layers):
            by_depth.setdefault(point.row.hidden_layers, Counter())[point.k] += 1
        return by_depth

    paper = paper_points(point.row for point in ours)
    return [_Figure("selected-k.svg", results_figures.selected_k(counts(ours), counts(paper)))]


# --- what was run --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _PlainLoop:
    """Measured times of a loop over single networks."""

    hardware: str
    microseconds: Mapping[int, float]  # by the number of weights
    as_graph: Sequence[float]  # microseconds of single networks whose steps are CUDA graphs

    def seconds(self, effort: Effort) -> float:
        """About how long a row's steps would have taken, by the nearest one measured."""
        row = effort.experiment.row
        inputs = math.prod(BENCHMARKS[row.data].shape)
        classes = 100 if row.data == "cifar100" else 10
        weights = _weights(inputs, row.hidden_layers, row.width, classes)
        nearest = min(self.microseconds, key=lambda other: abs(math.log(other / weights)))
        return 1e-6 * self.microseconds[nearest] * effort.steps


def _weights(inputs: int, depth: int, width: int, classes: int) -> int:
    return inputs * width + (depth - 1) * width**2 + width * classes


def _plain_loop(root: Path) -> _PlainLoop | None:
    """The measurement of the fleet's benchmark, if it is there."""
    path = root / "benchmarks" / "results" / "fleet_cuda.csv"
    if not path.exists():
        return None
    measured, as_graph, hardware = {}, [], ""
    with path.open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            if line["way"] == "plain loop":
                inputs, hidden, classes = line["network"].split("-")
                depth, width = f"1x{hidden}".split("x")[-2:]
                weights = _weights(int(inputs), int(depth), int(width), int(classes))
                measured[weights] = float(line["us_per_model_step"])
                hardware = line["hardware"]
            elif line["way"] == "one model, CUDA graph":
                as_graph.append(float(line["us_per_model_step"]))
    return _PlainLoop(hardware, measured, as_graph) if measured else None


def _what_was_run(found: Reproduction, plain: _PlainLoop | None, smoke: bool) -> _Part:
    if not found.efforts:
        return _Part("What was run", [_Text("Nothing yet.")])
    trials = sum(effort.trials for effort in found.efforts)
    epochs = sum(effort.epochs for effort in found.efforts)
    seconds = sum(effort.seconds for effort in found.efforts)
    facts = [f"{trials:,} networks were trained, in {epochs:,} epochs."]
    if seconds:
        in_all = _minutes(sum(session["seconds"] for session in found.sessions))
        facts.append(
            f"Time: {_minutes(seconds)} minutes, {3600 * trials / seconds:,.0f} networks an hour; "
            f"{in_all} minutes with reading the data, in {counted(len(found.sessions), 'call')}."
        )
    if unknown := _unknown(found):
        facts.append(
            f"Of {counted(unknown, 'network')} no manifest says where and how long they were "
            f"trained{', so this time is too short' * bool(seconds)}."
        )
    elif seconds and not smoke:
        facts += _of_the_paper(found)
    for name, key in (("Hardware", "hardware"), ("Commit", "commit")):
        told = list(dict.fromkeys(session[key] for session in found.sessions))
        facts += [f"{name}: {', '.join(told)}."] if told else []
    versions = dict.fromkeys(
        ", ".join(f"{name} {version}" for name, version in session["versions"].items() if version)
        for session in found.sessions
    )
    facts += [f"Versions: {'; '.join(versions)}."] if versions else []
    data = dict.fromkeys(item for session in found.sessions for item in session["data"].items())
    for name, sha256 in data:
        called = "a part of it" if smoke else variant(name, sha256) or "official"
        if called == "re-cropped":
            called += ": cut again from the official pictures of whole numbers"
        facts.append(f"{name}: `{sha256}`, {called}.")
    if found.unread:
        facts.append(f"{counted(found.unread, 'line')} of the ledgers cannot be read: left out.")
    blocks: list[_Block] = [_Bullets(facts)]
    head = ["row", "networks trained", "epochs", "minutes", "networks an hour"]
    lines = [
        [effort.experiment.name + " (not finished)" * (found.found[effort.experiment] is None),
         f"{effort.trials:,}", f"{effort.epochs:,}",
         _minutes(effort.seconds) if effort.seconds else _DASH,
         f"{effort.trials_per_hour:,.0f}" if effort.seconds else _DASH]
        for effort in found.efforts
    ]  # fmt: skip
    if plain:
        head.append("plain loop, hours")
        hours = [plain.seconds(effort) / 3600 for effort in found.efforts]
        for line, estimate in zip(lines, hours, strict=True):
            line.append(f"{estimate:,.1f}")
        low, high = min(plain.microseconds.values()), max(plain.microseconds.values())
        text = (
            "A plain loop, which trains one network after the other, takes "
            f"{low:,.0f} to {high:,.0f} µs a step on one {plain.hardware} "
            "(`benchmarks/results/fleet_cuda.csv`). At the speed of the measured architecture "
            "whose number of weights is nearest, the same steps would have taken about "
            f"{sum(hours):,.0f} hours. This is an estimate, and of training steps alone."
        )
        if seconds:
            text += f" It is {3600 * sum(hours) / seconds:,.0f} times the time above."
        if plain.as_graph:
            low, high = min(plain.as_graph), max(plain.as_graph)
            text += (
                " Most of a plain loop’s time is that of the processor, which is slow there: as a "
                f"CUDA graph, a single network takes {low:,.0f} to {high:,.0f} µs a step on that "
                "machine (`docs/fleet.md` tells of another run)."
            )
        blocks.append(_Text(text))
    shared = (
        "Rows that differ in the momentum alone are trained together; of their time each row has "
        "its share by steps."
    )
    if any(session.get("at_once", 1) > 1 for session in found.sessions):
        shared += " Architectures that were trained side by side on one GPU share its time equally."
    blocks += [
        _Text(shared),
        _Table(head, lines, fold="Time of each row"),
    ]
    return _Part("What was run", blocks)


def _unknown(found: Reproduction) -> int:
    """How many networks are in the ledgers, but in no manifest."""
    missing: Counter[str] = Counter()
    for effort in found.efforts:
        missing[effort.experiment.network] += effort.trials
    for session in found.sessions:
        for network, log in session["networks"].items():
            missing[network] -= log["trials"]
    return sum(number for number in missing.values() if number > 0)


def _of_the_paper(found: Reproduction) -> list[str]:
    """What the paper's own rows took if others were run, too, and whether the goal was met."""
    printed = {Experiment(row) for row in paper_rows() if row.printed}
    own = [effort for effort in found.efforts if effort.experiment in printed]
    seconds, facts = sum(effort.seconds for effort in own), []
    if 0 < len(own) < len(found.efforts):
        trials = sum(effort.trials for effort in own)
        facts.append(
            f"Of these, {_minutes(seconds)} minutes and {trials:,} networks are of the paper’s own "
            "rows."
        )
    whole = printed <= {finding.experiment for finding in found.finished}
    hardware = {session["hardware"] for session in found.sessions}
    if whole and hardware == {_GOAL_HARDWARE} and all(effort.seconds for effort in own):
        facts.append(
            f"The goal was an hour of one {_GOAL_HARDWARE} for all {len(printed)} rows of the "
            f"paper; it took {_minutes(seconds)} minutes, so the goal was "
            f"{'met' if seconds <= 3600 else 'missed'}."
        )
    return facts


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:,.1f}"


# --- the claims ----------------------------------------------------------------------------------


def _the_claims(found: Reproduction, folder: str) -> _Part:
    toy = claims.judge_toy(found.toy)
    text = (
        "The rules were written down in `pseudograd.reproduce.claims` before any row was run in "
        "full, but after sketches of four architectures. Only that claim 3 needs a mean below 0 "
        "was added later, and changed no verdict. All p-values but the first are two-sided. Rows "
        "share data sets, and those that differ in the momentum alone share folds and initial "
        "weights too, so they are not independent, and p-values are rather too small than too "
        "large. Where k = 1 was selected there is nothing to compare, and the difference is 0."
    )
    if len(found.finished) < len(found.found):
        text += (
            f" A claim that is not confirmed is {_TOO_FEW} while so few are finished that they "
            "could not confirm it even if all were as claimed."
        )
    run_toy = f"`pseudograd toy --csv {shlex.quote(f'{folder}/toy.csv')}` runs it"
    run_toy += " again" * bool(found.toy)
    blocks: list[_Block] = [
        _Text(text),
        _Title(f"1. {claims.TOY_STATEMENT}"),
        _Bullets([
            f"Test: {claims.TOY_TEST}.",
            claims.TOY_RULE,
            _judged("Ours", toy, toy.rows, "run")
            + f" `docs/toy.md` has the paper’s figures and the theory, and {run_toy}.",
        ]),
    ]  # fmt: skip
    readings = _readings(found)
    for claim in CLAIMS:
        blocks += [
            _Title(f"{claim.name}. {claim.statement}"),
            _Bullets(
                [f"Test: {claim.test}.", claim.rule]
                + [_judged(each.name, *_judge(claim, each, found)) for each in readings]
                + _marked(claim, readings, found)
            ),
        ]
    blocks += [_Title("By data set and depth"), *_by_data_and_depth(found)]
    return _Part("The claims", blocks)


def _judged(name: str, judgement: Judgement, total: int, unit: str = "row") -> str:
    if judgement.verdict == claims.OPEN:
        return f"{name}: {judgement.figures}."
    count = counted(judgement.rows, unit)
    if total != judgement.rows:
        count = f"so far, {judgement.rows} of {counted(total, unit)}"
    facts = [count, *([] if judgement.p is None else [p_value(judgement.p)])]
    return f"{name}: **{judgement.verdict}** ({', '.join(facts)}): {judgement.figures}."


def _marked(claim: Claim, readings: Sequence[_Reading], found: Reproduction) -> list[str]:
    """Which rows have a rate that may have part in what looks like the effect of k."""
    told = []
    for feature_range, of in ((_STATED, ""), (_OTHER, " of MNIST in [0, 1]")):
        rows = [
            finding
            for finding in found.finished
            if finding.experiment == Experiment(finding.experiment.row, feature_range)
            and finding.experiment.row.hidden_layers in claim.depths
        ]
        if names := [finding.experiment.name for finding in rows if apart_from_1(finding)]:
            number = f"{len(names)} of {counted(len(rows), 'row')}{of}"
            told.append(f"So it is in {number}: {', '.join(names)}.")
    for reading in readings:
        if without := _without_marked(claim, reading, found):
            name = "Without them" + reading.short.removeprefix("ours")
            told.append(_judged(name, without, without.rows))
    why = (
        "§ Where k = 1 was never tried at the selected k’s rate, what looks like the effect of k "
        "may in part be that of the rate."
    )
    return [" ".join([why, *told])] if told else []


def _by_data_and_depth(found: Reproduction) -> list[_Block]:
    groups: dict[tuple[str, int], list[Finding]] = {}
    for finding in found.finished:
        experiment = finding.experiment
        if experiment.activation == "relu":
            depth = experiment.row.hidden_layers
            groups.setdefault((_data_of(experiment), depth), []).append(finding)
    if not groups:
        return [_Text("No row is finished.")]
    lines = []
    for (data, depth), findings in sorted(groups.items(), key=lambda item: item[0][1]):
        points = our_points(findings, findings[0].experiment.feature_range)
        sides = Counter(side(finding.k) for finding in findings)
        worse = sum(point.cross_entropy > 0 for point in points)
        better = sum(point.cross_entropy < 0 for point in points)
        lines.append([
            str(depth), data, str(len(points)),
            f"{sides[-1]} / {sides[0]} / {sides[1]}",
            _interval(claims.pooled(points), ".2f"),
            f"{better} / {worse}",
        ])  # fmt: skip
    head = ["hidden layers", "data", "rows", "k below 1 / 1 / above", "error, selected k minus "
            "k = 1, points (95% interval over rows)", "cross-entropy better / worse"]  # fmt: skip
    return [_Table(head, lines)]


def _data_of(experiment: Experiment) -> str:
    """The data set, and how it is scaled if otherwise than the paper says."""
    data, _, *changes = experiment.network.split()
    return " ".join([data, *changes])


# --- the tables ----------------------------------------------------------------------------------


def _the_tables(found: Reproduction) -> _Part:
    retrainings = {len(f.result.comparison.chosen) for f in found.finished} or {5}
    blocks: list[_Block] = [
        _Text(
            "Ours beside the paper’s. Ours are means ± standard deviations over "
            f"{'/'.join(map(str, sorted(retrainings)))} networks, retrained with one fifth of the "
            "examples for early stopping; the interval of a difference is Student’s over pairs of "
            "networks with the same seed, so it tells of seeds and folds, and not of how the test "
            "set was drawn. Beside them stand the networks of cross-validation, "
            "trained on three fifths (means ± standard deviations over the repetitions), since "
            "several of the paper’s figures lie nearer to these. † marks a k that others equalled "
            "in cross-validation, ‡ a row with a k whose best rate may lie beyond those tried, § a "
            "row in which k = 1 was never tried at the selected k’s rate, so that part of the "
            "difference may be the rate’s. The last column is the command that runs this row "
            "again, and nothing else. It needs the data (`pseudograd data fetch mnist`, or "
            "whichever set it is), and `pseudograd reproduce report --out again`, with the same "
            "`--rows`, shows what came of it."
        )
    ]
    own = [e.row.table for e in found.found if not e.row.of_paper]
    titles = _TITLES | {table: f"Not of the paper: {table}" for table in own}
    for table, title in titles.items():
        # The paper's rows with another activation have a table further below.
        experiments = [
            e
            for e in found.found
            if e.row.table == table and (e.activation == "relu" or not e.row.of_paper)
        ]
        if not experiments:
            continue
        blocks += [
            _Title(title),
            _Text("Test error, %:"),
            _Table(
                [*_head(_ERROR), "run it again"],
                [[*_line(e, found, _ERROR), _command(e)] for e in experiments],
            ),
            _Text("Test cross-entropy:"),
            _Table(_head(_CROSS_ENTROPY), [_line(e, found, _CROSS_ENTROPY) for e in experiments]),
        ]
        notes = [note for e in experiments if (f := found.found[e]) for note in _notes(f)]
        blocks += [_Bullets(notes)] if notes else []
    groups = _relative_deviations(found.finished)
    if groups:
        blocks += [
            _Title("How far from the paper"),
            _Text(
                "Test errors of the retrained networks over those that the paper prints. A row "
                "whose selected k is not the paper’s is among them."
            ),
            _Figure("deviations.svg", results_figures.deviations(groups)),
        ]
    return _Part("The tables", blocks)


def _command(experiment: Experiment) -> str:
    if not experiment.row.of_paper:
        return _DASH
    table = experiment.row.table
    return f'`pseudograd reproduce {table} --rows "{experiment.name}" --out again`'


def _paper_k(row: Row) -> str:
    return f"({fraction(row.selected_k) if row.of_paper else _DASH})"


@dataclass(frozen=True)
class _Measure:
    """What a table shows: errors or cross-entropies."""

    name: str
    form: str
    times: float  # from what an outcome has to what is shown
    paper: Callable[[Row], tuple[float | None, float | None]]
    spread: Callable[[Sequence[Outcome]], Spread]
    difference: Callable[[Comparison], Difference]


_ERROR = _Measure(
    "error",
    ".2f",
    100,
    lambda row: (row.error_k1_pct, row.error_selected_pct),
    errors_pct,
    lambda comparison: comparison.error,
)
_CROSS_ENTROPY = _Measure(
    "cross-entropy",
    ".3f",
    1,
    lambda row: (row.ce_k1, row.ce_selected),
    cross_entropies,
    lambda comparison: comparison.cross_entropy,
)


def _head(measure: _Measure) -> list[str]:
    both = [f"{measure.name} at k = 1", f"{measure.name} at selected k"]
    beside = ["paper", "deviation"]
    three_fifths = ["three fifths, k = 1", "three fifths, selected k"]
    return ["row", "k (paper)", both[0], *beside, both[1], *beside, _COMPARED, *three_fifths]


def _line(experiment: Experiment, found: Reproduction, measure: _Measure) -> list[str]:
    finding, form = found.found[experiment], measure.form
    paper = measure.paper(experiment.row)
    printed = [_DASH if figure is None else _printed(figure, form) for figure in paper]
    k = _paper_k(experiment.row)
    if finding is None:
        state = "not finished" if experiment in found.begun else "not run yet"
        return [experiment.name, k, state, printed[0], _DASH, state, printed[1], *[_DASH] * 4]
    marks = "†" * bool(_tied_ks(finding)) + "‡" * bool(finding.result.open_ks)
    marks += "§" * apart_from_1(finding)
    comparison = finding.result.comparison
    cells = [experiment.name, f"{fraction(finding.k)}{marks} {k}"]
    for outcomes, theirs, words in zip(
        (comparison.plain, comparison.chosen), paper, printed, strict=True
    ):
        ours = measure.spread(outcomes)
        deviation = _DASH if theirs is None else signed(ours.mean - theirs, form)
        cells += [_spread(ours, form), words, deviation]
    cells.append(_change(finding, measure))
    chosen, plain = finding.tested
    return [*cells, *(_spread(measure.spread(group), form) for group in (plain, chosen))]


def _printed(figure: float, form: str) -> str:
    """A figure of the paper, which has more digits here and there."""
    text = format(figure, form)
    return text if float(text) == figure else f"{figure:g}"


def _change(finding: Finding, measure: _Measure) -> str:
    """The selected k minus k = 1."""
    difference = measure.difference(finding.result.comparison)
    return _interval(difference, measure.form, measure.times) if finding.k != 1 else "0"


def _spread(spread: Spread, form: str) -> str:
    if not math.isfinite(spread.mean):
        return "infinite"
    sd = "" if math.isnan(spread.sd) else f" ± {spread.sd:{form}}"
    return f"{spread.mean:{form}}{sd}"


def _interval(difference: Difference, form: str, times: float = 1) -> str:
    if not math.isfinite(difference.mean):
        return _DASH
    mean = signed(times * difference.mean, form)
    if math.isnan(difference.low):
        return mean
    low, high = signed(times * difference.low, form), signed(times * difference.high, form)
    return f"{mean} ({low} to {high})"


def _tied_ks(finding: Finding) -> list[float]:
    return [cell.k for cell in finding.result.ties if cell.k != finding.k]


def _notes(finding: Finding) -> list[str]:
    name, notes = finding.experiment.name, []
    if tied := _tied_ks(finding):
        ks = ", ".join(map(fraction, tied))
        notes.append(f"† {name}: k = {ks} did as well; of equals the k nearest 1 is taken.")
    if finding.result.open_ks:
        ks = ", ".join(map(fraction, finding.result.open_ks))
        notes.append(f"‡ {name}: the best rate of k = {ks} may lie beyond those tried.")
    if apart_from_1(finding):
        tried, rate = _tried(finding, 1.0), finding.result.chosen.learning_rate
        notes.append(f"§ {name}: k = 1 was tried at rates of {tried}, not at {_rate(rate)}.")
    comparison = finding.result.comparison
    final = {*comparison.chosen, *comparison.plain}
    if cut := sum(outcome.stopped_by != "patience" for outcome in final):
        notes.append(f"{name}: {cut} of {len(final)} final networks did not end by patience.")
    return notes


def _tried(finding: Finding, k: float) -> str:
    """The lowest and the highest rate that a k was tried at."""
    return _span(cell.learning_rate for cell in finding.result.cells if cell.k == k)


def _span(values: Iterable[float]) -> str:
    ordered = sorted(values)
    ends = dict.fromkeys(_rate(end) for end in (ordered[0], ordered[-1]))
    return " to ".join(ends)  # one if both are written alike


def _rate(rate: float) -> str:
    """A learning rate, exactly where that is short: most are powers of two."""
    text = fraction(rate)
    digits = sum(map(str.isdigit, text.removeprefix("1/")))
    return text if digits <= 4 else f"{rate:.4g}"


def _relative_deviations(findings: Iterable[Finding]) -> dict[str, dict[str, list[float]]]:
    groups: dict[str, dict[str, list[float]]] = {}
    for finding in findings:
        row, experiment = finding.experiment.row, finding.experiment
        if experiment.activation != "relu":
            continue
        for kind, ours, theirs in (
            ("plain", finding.error_k1_pct, row.error_k1_pct),
            ("chosen", finding.error_pct, row.error_selected_pct),
        ):
            if theirs is not None:
                group = groups.setdefault(_data_of(experiment), {}).setdefault(kind, [])
                group.append(100 * (ours.mean / theirs - 1))
    return groups


# --- what a reader would ask next ----------------------------------------------------------------


def _asked_next(found: Reproduction) -> _Part:
    stated = [finding for finding in found.finished if finding.experiment.as_printed]
    if not stated:
        return _Part("What a reader would ask next", [_Text("No row is finished.")])
    blocks: list[_Block] = [
        _Title("How much does k matter?"),
        _Text(
            "Validation error of each k at its best rate, relative to that of k = 1 in the same "
            "row, averaged over the rows of a depth, in percent; the interval is Student’s over "
            "rows. Data sets may differ in what suits them, so each stands for itself, too. MNIST "
            "is in [−1, 1]."
        ),
        *_curves(stated),
        _Title("Is it k, or the learning rate?"),
        *_controls(found),
        _Title("How sure is the selection?"),
        *_selection(found),
        _Title("Which learning rates are selected?"),
        *_rates(found),
        _Title("What does the activation change?"),
        *_activations(found),
    ]
    return _Part("What a reader would ask next", blocks)


def _curves(stated: Sequence[Finding]) -> list[_Block]:
    """Of each depth, and of each data set for itself, since they may want opposite k."""
    groups: dict[tuple[int, str], list[Finding]] = {}
    for finding in sorted(stated, key=lambda finding: finding.experiment.row.hidden_layers):
        row = finding.experiment.row
        for data in ("all", row.data):
            groups.setdefault((row.hidden_layers, data), []).append(finding)
    curves = {group: error_against_k(findings) for group, findings in groups.items()}
    ks = sorted({k for curve in curves.values() for k in curve})
    lines = [
        [str(depth), data, str(len(groups[depth, data]))]
        + [_interval(curve[k], ".2f") if k in curve and k != 1 else "0" if k == 1 else _DASH
           for k in ks]
        for (depth, data), curve in curves.items()
    ]  # fmt: skip
    head = ["hidden layers", "data", "rows", *(f"k = {fraction(k)}" for k in ks)]
    of_depth = {depth: curve for (depth, data), curve in curves.items() if data == "all"}
    figure = results_figures.error_against_k(of_depth)
    return [_Figure("error-against-k.svg", figure), _Table(head, lines)]


def _controls(found: Reproduction) -> list[_Block]:
    """Of rows marked §: k = 1 at the selected k's rate beside the two that the search found."""
    marked = [finding for finding in found.finished if apart_from_1(finding)]
    if not marked:
        return [_Text("In every finished row k = 1 was tried at the selected k’s rate.")]
    lines, better, lower, run = [], 0, 0, 0
    for finding in marked:
        chosen, plain = finding.result.chosen, finding.result.plain
        validated, tested = _DASH, _DASH
        if finding.control:
            cell, spread = finding.control[0], errors_pct(finding.control[1])
            validated, tested = percent(cell.error), _spread(spread, ".2f")
            better += chosen.error < cell.error
            lower += finding.error_pct.mean < spread.mean
            run += 1
        lines.append(
            [finding.experiment.name, f"{fraction(chosen.k)}: {_rate(chosen.learning_rate)}",
             _rate(plain.learning_rate), percent(chosen.error), percent(plain.error), validated,
             _spread(finding.error_pct, ".2f"), _spread(finding.error_k1_pct, ".2f"), tested]
        )  # fmt: skip
    text = (
        "The search for a k’s rate stops in the first valley that it finds, so the selected k and "
        "k = 1 may be compared at rates far apart. In the rows marked § k = 1 is trained at the "
        "selected k’s rate, too, after the search and without a part in it."
    )
    if run:
        text += (
            f" At one and the same rate the selected k has the lower validation error in {better} "
            f"of {counted(run, 'row')}, and the lower test error in {lower}."
        )
    if run < len(marked):
        text += f" This has yet to be run for {counted(len(marked) - run, 'row')}."
    head = ["row", "selected k: its rate", "k = 1’s rate", "validation error, selected k, %",
            "k = 1", "k = 1 at the selected k’s rate", "test error, selected k, %", "k = 1",
            "k = 1 at the selected k’s rate"]  # fmt: skip
    return [_Text(text), _Table(head, lines)]


def _selection(found: Reproduction) -> list[_Block]:
    tried = {finding.experiment: stability(finding) for finding in found.finished}
    by_depth: dict[int, list[Stability]] = {}
    for experiment, shares in tried.items():
        if experiment.as_printed:
            by_depth.setdefault(experiment.row.hidden_layers, []).append(shares)
    head = ["hidden layers", "rows", "same k, %", "same side of 1, %"]
    lines = [
        [str(depth), str(len(group)),
         _percent(statistics.fmean(shares.same_k for shares in group)),
         _percent(statistics.fmean(shares.same_side for shares in group))]
        for depth, group in sorted(by_depth.items())
    ]  # fmt: skip
    each = [
        [experiment.name, fraction(finding.k), _percent(shares.same_k), _percent(shares.same_side),
         ", ".join(f"{fraction(k)}: {_percent(share)}" for k, share in shares.shares.items())]
        for experiment, shares in tried.items()
        if (finding := found.found[experiment])
    ]  # fmt: skip
    return [
        _Text(
            "The repetitions of each row were drawn anew 10,000 times, with replacement and the "
            "same ones for all k and rates that had been tried (bootstrap, fixed seed), and k was "
            "selected again. The table has the mean share of resamples that select the same k, and "
            "a k on the same side of 1, over rows as the paper has them."
        ),
        _Table(head, lines),
        _Table(
            ["row", "selected k", "same k, %", "same side of 1, %", "k selected in resamples, %"],
            each,
            fold="Row by row",
        ),
    ]


def _rates(found: Reproduction) -> list[_Block]:
    untried = {finding.experiment: untried_rates(finding) for finding in found.finished}
    of_data: dict[str, list[Finding]] = {}
    for finding in found.finished:
        of_data.setdefault(_data_of(finding.experiment), []).append(finding)
    lines = []
    for data, findings in of_data.items():
        searches = sum(len(finding.result.best_of_each_k) for finding in findings)
        lines.append([
            data, str(len(findings)),
            _span(finding.result.plain.learning_rate for finding in findings),
            _span(finding.result.chosen.learning_rate for finding in findings),
            "0.1 to 10" if data.startswith("mnist") else "0.0001 to 1",
            f"{sum(len(untried[finding.experiment]) for finding in findings)} of {searches}",
            f"{sum(map(apart_from_1, findings))} of {len(findings)}",
        ])  # fmt: skip
    each = [
        [finding.experiment.name,
         ", ".join(
             f"k = {fraction(cell.k)}: {_rate(cell.learning_rate)}"
             + "*" * (cell.k in untried[finding.experiment])
             + "§" * (cell.k == 1 and apart_from_1(finding))
             + f" ({_tried(finding, cell.k)})"
             for cell in finding.result.best_of_each_k
         )]
        for finding in found.finished
    ]  # fmt: skip
    return [
        _Table(
            ["data", "rows", "at k = 1", "at selected k", "paper", "searches apart", "rows apart"],
            lines,
        ),
        _Text(
            "The paper’s search adds rates for a k only while the best one is at an end of those "
            "tried. Where the error has two valleys along the rates, it finds the one where it "
            "begins, and not the same one for all k. The last two columns count the searches (of "
            "one k in one row) that never tried the rate that was best for a k next to theirs, and "
            "the rows in which k = 1, which the selected k is compared with, was never tried at "
            "the selected k’s rate (§): there, part of what looks like the effect of k may be that "
            "of the rate."
        ),
        _Table(["row", "best rate of each k, and in brackets the lowest and highest tried (*: a "
                "neighbour’s best was not tried; §: that of the selected k was not)"], each,
               fold="Row by row"),
    ]  # fmt: skip


def _percent(share: float) -> str:
    return f"{100 * share:.0f}"


def _activations(found: Reproduction) -> list[_Block]:
    others = [e for e in found.found if e.activation != "relu"]
    if not others:
        return [_Text("No row was to be run with another activation than ReLU.")]
    lines = []
    for other in others:
        for experiment in (Experiment(other.row), other):
            finding, command = found.found.get(experiment), _command(experiment)
            if finding is None:
                state = "not finished" if experiment in found.begun else "not run yet"
                lines.append([
                    other.row.name, experiment.activation, state, *[_DASH] * 5, command,
                ])  # fmt: skip
                continue
            lines.append([
                other.row.name, experiment.activation,
                f"{fraction(finding.k)} {_paper_k(other.row)}",
                _spread(finding.error_k1_pct, ".2f"), _spread(finding.error_pct, ".2f"),
                _change(finding, _ERROR),
                _spread(finding.cross_entropy_k1, ".3f"), _spread(finding.cross_entropy, ".3f"),
                command,
            ])  # fmt: skip
    head = ["row", "activation", "k (paper)", "error at k = 1, %", "at selected k, %",
            _COMPARED, "cross-entropy at k = 1", "at selected k", "run it again"]  # fmt: skip
    return [
        _Text("The paper does not name its activation. Some rows are run with tanh, too."),
        _Table(head, lines),
    ]


# --- choices -------------------------------------------------------------------------------------


def _choices(found: Reproduction) -> _Part:
    """What the paper leaves open or what we do otherwise; sizes are taken from the protocol."""
    protocol = Experiment(_rows(found)[0]).protocol()
    trial = protocol.trial
    sweep = [swept.learning_rate for swept in protocol.sweep({})]
    return _Part("Choices and deviations", [
        _Text(
            "What the paper leaves open, and what is done otherwise, each with the reason. The k, "
            "the repetitions (10 for MNIST, 7 for the rest), the batches of "
            f"{trial.batch_size}, the patience of {trial.patience} epochs and the extension of "
            "rates are the paper’s."
        ),
        _Bullets([
            "**Activation** (open): ReLU. In first measurements on CIFAR-10, tanh and sigmoid were "
            "3 to 4 points of test error off the paper at k = 1, and ReLU was near it. Four rows "
            "are run with tanh as well.",
            "**Form of the momentum** (open): v ← μ v + g, w ← w − η v, as in `torch.optim.SGD`. "
            "With a constant rate this is the classical form of Sutskever et al. (2013), whom the "
            "paper cites; it is not Nesterov’s.",
            "**Mean or sum over the batch** (open): the mean, also for the last, smaller batch of "
            "an epoch. With a sum the same steps would have rates 128 times smaller, and the "
            "clipping another meaning.",
            f"**Gradient clipping**: the norm over all parameters, {CLIP:g} at most, before the "
            "momentum, with several hidden layers only. That the norm is over all parameters is "
            "our reading.",
            "**Initial weights**: Glorot’s uniform distribution in hidden layers (the paper names "
            "the scheme, not the distribution); biases and softmax layer are 0, as in the paper.",
            "**Initial rate** (open): the paper speaks of preliminary experiments. Here it is the "
            f"best of {len(sweep)} rates from 4⁻⁶ to 4, a factor of 4 apart, at k = 1 after "
            "5 epochs, by the error on the early-stopping part of the first repetition.",
            "**Extension of rates**: rates are added while the one at an end is better than "
            "all others; one that only equals another is not taken for the best. Where nothing was "
            f"learned at any rate, lower ones are added. At most {protocol.most_extensions} are "
            "added for each k; a k that would need more is marked by ‡.",
            "**Ties** (open): of equal validation errors the k nearest 1 is taken, then the "
            "smaller rate.",
            "**What a repetition permutes** (open): the examples are cut into five parts once, and "
            "the roles of the parts go round; each repetition has initial weights and orders of "
            "its own. They are the same for all k and rates, so that differences are paired.",
            "**Equal parts**: up to four examples (two of SVHN) have no role in cross-validation; "
            "in the final training they are trained on.",
            "**MNIST’s scaling**: the paper says [−1, 1] for all sets. Its final rates for MNIST "
            "(0.1 to 10) fit [0, 1] better: in first measurements of 1x400 in [−1, 1], training "
            "diverged above a rate of 0.2. Both are run, both are shown.",
            "**Which models the tables show**: the paper says, those retrained with one fifth for "
            "early stopping. Several of its figures lie nearer to models trained on three fifths. "
            "Both are shown; claims are judged by the retrained ones.",
            f"**Number of retrainings**: {protocol.retrainings} for each of the two k, where the "
            "paper has one, each stopped early by another fifth and with weights and orders of its "
            "own: without a spread, a difference cannot be told from chance.",
            f"**Limit of epochs**: {trial.max_epochs:,}, where the paper names none; a final "
            "network that ends by it is named below its table.",
            "**Divergence** (open): a network whose weights or whose cross-entropy are not finite, "
            "or whose weights exceed 10,000 while it does no better than naming the most frequent "
            "class, is stopped; its best epoch counts.",
            "**Precision**: on a GPU, products are of float16 numbers, which have the precision of "
            "TF32, summed in float32; weights, momentum and sums are float32. On a CPU all is "
            "float32.",
            "**SVHN**: where it is said to be re-cropped (see “What was run”), the digits were cut "
            "again from the official pictures of whole numbers. All 1,083 official digits at hand "
            "are identical, but some pixels of others may differ by 1.",
            "**Rows**: the 67 that the paper prints. The 27 that its source has as comments can be "
            "run by `pseudograd reproduce unprinted`.",
        ]),
    ])  # fmt: skip
