"""The paper's claims: the verdicts in short, and each claim with its rule and its figures."""

from __future__ import annotations

import shlex
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from paper import claims
from paper.claims import (
    CLAIMS,
    Claim,
    Judgement,
    Point,
    can_be_confirmed,
    judge,
    our_points,
    paper_points,
)
from paper.findings import (
    Finding,
    Reproduction,
    agreeing,
    beside_the_papers,
    may_be_the_rate,
    side,
)
from paper.report.document import Block, Bullets, Figure, Part, Table, Text, Title
from paper.report.figures import selected_k
from paper.report.wording import (
    DASH,
    MARKED,
    OTHER,
    STATED,
    data_of,
    interval,
    mean_and_sd,
)
from paper.rows import Experiment, Row
from paper.toy import ToyRun, paper_row, summarize
from pseudograd.report.figures import signed
from pseudograd.report.summary import counted, fraction, p_value

_TOO_FEW = "open (too few rows)"


def in_short(found: Reproduction) -> Part:
    """Answer whether k matters, and give the verdict of each claim.

    Args:
        found: What came of the rows that the paper prints.

    Example:
        >>> from pathlib import Path
        >>> from paper.findings import read
        >>> from paper.rows import experiments, rows
        >>> table = in_short(read(experiments(rows()), Path("nowhere"))).blocks[1]
        >>> table.head, table.rows[1][2:]
        (['', 'claim', 'ours', 'the paper’s figures'], ['open', 'confirmed'])

    """
    readings = _readings(found)
    of_same = ""
    if sum(reading.of_paper for reading in readings) > 1:
        of_same = " (while rows are missing, also of those of the finished rows alone)"
    toy = claims.judge_toy(found.toy).verdict
    lines = [["1", claims.TOY_STATEMENT, toy, *[DASH] * (len(readings) - 1)]]
    lines += [
        [claim.name, claim.statement, *(_verdict(claim, each) for each in readings)]
        for claim in CLAIMS
    ]
    return Part(
        "In short",
        [
            *_does_k_matter(found, readings[0]),
            *_by_depth(found, readings[0]),
            Text(
                "Each claim with its verdict, and what the same rule says of the paper’s own "
                f"figures{of_same}, which tells how far its tables support its claims:"
            ),
            Table(["", "claim", *(reading.short for reading in readings)], lines),
            Text(
                "For claims 2a, 2c, 2d, 3, 4 and 6 “partly” means the right direction, within "
                "noise; for 2a and 2c it can also mean beyond noise, but in no more than half of "
                "the rows, and for 3 lower in more rows, but not on average. For 2b it means that "
                "one of its two conditions holds, for 5 that it holds where k > 1. In a row marked "
                f"§ {MARKED}, so that part of the difference may be the rate’s. "
                f"{_of_architectures(readings[0])}The rules, tests and figures are below."
            ),
            *_selected_figure(readings[0].points),
        ],
    )


def _of_architectures(reading: _Reading) -> str:
    """How claims that count rows fare if rows that differ in the momentum count as one."""
    ps = {claim.name: _judge(claim, reading)[0].p_of_architectures for claim in CLAIMS}
    tested = {name: p_value(p) for name, p in ps.items() if p is not None}
    if not tested:
        return ""
    told = " and ".join(f"{name} has {p}" for name, p in tested.items())
    return (
        "Rows that differ in the momentum alone are not independent: where each architecture "
        f"counts once, which is tested for {' and '.join(tested)}, {told}. "
    )


def _does_k_matter(found: Reproduction, reading: _Reading) -> list[Block]:
    """The answer to the first question, in a few sentences."""
    if not reading.points:
        return []

    def mean(points: Sequence[Point]) -> str:
        return interval(claims.pooled_by_architecture(points), ".2f")

    whole = mean(reading.points).replace("(", "(95% interval over architectures ")
    text = (
        "**Does k matter?** Compared with k = 1, the selected k changes the test error by "
        f"{whole} percentage points on average."
    )
    if 0 < len(reading.unmarked) < len(reading.points):
        marked = counted(len(reading.points) - len(reading.unmarked), "row")
        text += f" Without the {marked} marked § (explained below the table) it is "
        text += f"{mean(reading.unmarked)}."
    papers = paper_points(point.row for point in reading.points)
    text += f" The paper’s figures for the same rows give {mean(papers)}."
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
        f"{lower}, higher in {higher}, and not told apart in {len(differences) - lower - higher}."
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
    return [Text(text)]


def _by_depth(found: Reproduction, reading: _Reading) -> list[Block]:
    """What k changes, ours and the paper's, and how far our networks are from the paper's."""
    points = reading.points
    if not points:
        return []
    findings = {f.experiment.row: f for f in found.finished if f.experiment.as_printed}
    lines, without = [], []
    for depth in (None, *sorted({point.row.hidden_layers for point in points})):
        group = [point for point in points if depth in (None, point.row.hidden_layers)]
        off: dict[str, list[float]] = {"plain": [], "chosen": []}
        for point in group:
            for kind, ours, _, theirs in beside_the_papers(findings[point.row]):
                off[kind].append(ours.mean - theirs)
        lines.append([
            "all" if depth is None else str(depth), str(len(group)),
            interval(claims.pooled_by_architecture(group), ".2f"),
            interval(claims.pooled_by_architecture(paper_points(p.row for p in group)), ".2f"),
            _mean_deviation(off["plain"]), _mean_deviation(off["chosen"]),
            *map(str, agreeing((point.k, point.row.selected_k) for point in group)),
        ])  # fmt: skip
        unmarked = [point for point in reading.unmarked if point.row.hidden_layers == depth]
        if 0 < len(unmarked) < len(group) and depth is not None:
            change = interval(claims.pooled_by_architecture(unmarked), ".2f")
            without.append(f"{change} with {counted(depth, 'hidden layer')}")
    head = ["layers", "rows", "change, ours", "change, paper", "distance, k = 1",
            "distance, selected k", "same k", "same side"]  # fmt: skip
    return [
        Text(
            "By hidden layers and beside the paper’s figures, in percentage points of test error. "
            "Change: selected k minus k = 1, the mean over architectures with its 95% interval. "
            "Distance: our error minus the paper’s, the mean over the rows whose errors it prints. "
            "The last two columns count the rows that select the paper’s k, or one on the same "
            "side of 1. Where we are further below the paper at k = 1 than at the selected k, part "
            "of what the paper’s k gains is what its k = 1 lacked."
        ),
        Table(head, lines),
        *([Text(f"Without the rows marked § the change is {' and '.join(without)}.")]
          if without else []),
    ]  # fmt: skip


def _mean_deviation(deviations: Sequence[float]) -> str:
    if not deviations:
        return DASH
    lower = sum(deviation < 0 for deviation in deviations)
    return f"{signed(statistics.fmean(deviations), '.2f')} ({lower} of {len(deviations)} lower)"


def _selected(sides: Sequence[int]) -> str:
    """On which side of 1 rows selected their k, in words."""
    words = {-1: "a k below 1", 0: "k = 1", 1: "a k above 1"}
    return ", ".join(f"{word} in {sides.count(at)}" for at, word in words.items() if at in sides)


def _verdict(claim: Claim, reading: _Reading) -> str:
    """The verdict, and what it is without rows marked § if that is another."""
    judgement, total = _judge(claim, reading)
    text, without = _so_far(judgement, total), _without_marked(claim, reading)
    if without and without.verdict != judgement.verdict:
        text += f"; without rows marked § {without.verdict}"
    return text


def _so_far(judgement: Judgement, total: int) -> str:
    """The verdict, and from how many rows if more are to come."""
    if judgement.rows in (0, total) or judgement.verdict == _TOO_FEW:
        return judgement.verdict
    return f"{judgement.verdict} so far ({judgement.rows} of {total} rows)"


def _selected_figure(ours: Sequence[Point]) -> list[Block]:
    """How often each k was selected, beside the paper's choices for the same rows."""
    if not ours:
        return []

    def counts(points: Iterable[Point]) -> dict[int, Counter[float]]:
        by_depth: dict[int, Counter[float]] = {}
        for point in sorted(points, key=lambda point: point.row.hidden_layers):
            by_depth.setdefault(point.row.hidden_layers, Counter())[point.k] += 1
        return by_depth

    paper = paper_points(point.row for point in ours)
    return [Figure("selected-k.svg", selected_k(counts(ours), counts(paper)))]


# --- each claim ----------------------------------------------------------------------------------


def the_claims(found: Reproduction, folder: str) -> Part:
    """Show each claim with its test, its rule and what came of it.

    Args:
        found: What came of the rows that the paper prints.
        folder: Of the ledgers, as it is called in commands.

    Example:
        >>> blocks = the_claims(Reproduction({}, (), [], [], 0), "results").blocks
        >>> blocks[1].text
        '1. Toy example: the test error falls as k does.'

    """
    toy, readings = claims.judge_toy(found.toy), _readings(found)
    each_claim: list[Block] = []
    too_few = ""
    for claim in CLAIMS:
        judged = [_judged(each.name, *_judge(claim, each)) for each in readings]
        if any(_TOO_FEW in text for text in judged):
            too_few = f" (“{_TOO_FEW}”)"
        each_claim += [
            Title(f"{claim.name}. {claim.statement}"),
            Bullets(
                [f"Test: {claim.test}.", claim.rule, *judged, *_marked(claim, readings, found)]
            ),
        ]
    text = (
        "The rules were written down in `paper.claims` before any row was run in "
        "full, but after sketches of four architectures. Added later: claim 3 also needs a mean "
        "below 0, claims 2a and 2c a share above chance, which changed no verdict; and a claim "
        "that is not confirmed by so few rows that they could not confirm it even if all were "
        "as claimed is left open"
        f"{too_few}. All p-values but the first are two-sided. "
        "Rows share data sets, and those that differ in the momentum alone share folds and initial "
        "weights too, so they are not independent, and p-values are too small rather than too "
        "large. Where k = 1 was selected there is nothing to compare, and the difference is 0. A "
        "claim whose rows are in part marked § is judged without these, too."
    )
    run_toy = f"`python -m paper toy --csv {shlex.quote(f'{folder}/toy.csv')}` runs it"
    run_toy += " again" * bool(found.toy)
    blocks: list[Block] = [
        Text(text),
        Title(f"1. {claims.TOY_STATEMENT}"),
        Bullets([
            f"Test: {claims.TOY_TEST}.",
            claims.TOY_RULE,
            _judged("Ours", toy, toy.rows, "run")
            + " `docs/toy.md` has the theory and says where we do not reproduce the paper’s "
            f"figures; {run_toy}.",
        ]),
        *_toy_table(found.toy),
        *each_claim,
        Title("By data set and depth"),
        *_by_data_and_depth(found),
    ]  # fmt: skip
    return Part("The claims", blocks)


def _toy_table(runs: Sequence[ToyRun]) -> list[Block]:
    """The paper's Table 2, ours beside it."""
    if not runs:
        return []
    lines = [
        [fraction(ours.k), mean_and_sd(ours.error_pct, ".2f"), f"{paper.error_pct:.2f}",
         mean_and_sd(ours.cross_entropy, ".3f"), f"{paper.cross_entropy:.3f}"]
        for ours in summarize(runs) if (paper := paper_row(ours))
    ]  # fmt: skip
    return [Table(["k", "test error, %", "paper", "test cross-entropy", "paper"], lines)]


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
    for feature_range, of in ((STATED, ""), (OTHER, " of MNIST in [0, 1]")):
        rows = [
            finding
            for finding in found.finished
            if finding.experiment == Experiment(finding.experiment.row, feature_range)
            and finding.experiment.row.hidden_layers in claim.depths
        ]
        if names := [finding.experiment.name for finding in rows if may_be_the_rate(finding)]:
            number = f"{len(names)} of {counted(len(rows), 'row')}{of}"
            told.append(f"§ marks {number}: {', '.join(names)}.")
    for reading in readings:
        if without := _without_marked(claim, reading):
            name = "Without them" + reading.short.removeprefix("ours")
            told.append(_judged(name, without, without.rows))
    return [" ".join(told)] if told else []


def _by_data_and_depth(found: Reproduction) -> list[Block]:
    groups: dict[tuple[str, int], list[Finding]] = {}
    for finding in found.finished:
        experiment = finding.experiment
        if experiment.activation == "relu":
            depth = experiment.row.hidden_layers
            groups.setdefault((data_of(experiment), depth), []).append(finding)
    if not groups:
        return [Text("No row is finished.")]
    lines = []
    for (data, depth), findings in sorted(groups.items(), key=lambda item: item[0][1]):
        points = our_points(findings, findings[0].experiment.feature_range)
        sides = Counter(side(finding.k) for finding in findings)
        worse = sum(point.cross_entropy > 0 for point in points)
        better = sum(point.cross_entropy < 0 for point in points)
        lines.append([
            str(depth), data, str(len(points)),
            f"{sides[-1]} / {sides[0]} / {sides[1]}",
            interval(claims.pooled(points), ".2f"),
            interval(claims.pooled(paper_points(point.row for point in points)), ".2f"),
            f"{better} / {worse}",
        ])  # fmt: skip
    head = ["hidden layers", "data", "rows", "k below 1 / 1 / above", "error, selected k minus "
            "k = 1, points (95% interval over rows)", "the paper’s",
            "cross-entropy better / worse"]  # fmt: skip
    return [Table(head, lines)]


# --- what claims are judged by -------------------------------------------------------------------


@dataclass(frozen=True)
class _Reading:
    """The figures that claims are judged by: ours, or the paper’s own."""

    short: str
    name: str
    rows: Sequence[Row]  # all, finished or not
    points: Sequence[Point]  # those that claims are judged by
    unmarked: Sequence[Point] = ()  # those of ours that are not marked §
    of_paper: bool = False


def _readings(found: Reproduction) -> list[_Reading]:
    rows = list(dict.fromkeys(experiment.row for experiment in found.found))
    unmarked = [finding for finding in found.finished if not may_be_the_rate(finding)]

    def ours(short: str, name: str, mnist: tuple[float, float]) -> _Reading:
        points = our_points(found.finished, mnist)
        return _Reading(short, name, rows, points, our_points(unmarked, mnist))

    def papers(points: Sequence[Point], which: str = "") -> _Reading:
        short, name = f"the paper’s figures{which}", f"The paper’s own figures{which}"
        return _Reading(short, name, rows, points, of_paper=True)

    readings = [ours("ours", "Ours, MNIST in [−1, 1] as the paper says", STATED)]
    stated = [point.row for point in readings[0].points]
    other = ours("ours, MNIST in [0, 1]", "Ours, MNIST in [0, 1]", OTHER)
    # Only once it is of the same rows: without them it would tell of the other data sets.
    in_other_range = [f for f in found.finished if f.experiment.feature_range == OTHER]
    if in_other_range and {*stated} <= {point.row for point in other.points}:
        readings.append(other)
    if 0 < len(stated) < len(rows):
        readings.append(papers(paper_points(stated), ", same rows"))
    return [*readings, papers(paper_points(rows))]


def _judge(claim: Claim, reading: _Reading) -> tuple[Judgement, int]:
    """What the rule says, and of how many rows it will; what cannot be told yet is left open."""
    judgement = judge(claim, reading.points)
    total = sum(row.hidden_layers in claim.depths for row in reading.rows)
    if judgement.verdict == claims.NOT and not can_be_confirmed(claim, reading.points):
        judgement = replace(judgement, verdict=_TOO_FEW)
    return judgement, judgement.rows if reading.of_paper else total


def _without_marked(claim: Claim, reading: _Reading) -> Judgement | None:
    """What the rule says without rows marked §; None if it is judged by none of them."""
    marked = {point.row for point in reading.points} - {point.row for point in reading.unmarked}
    if reading.of_paper or not any(row.hidden_layers in claim.depths for row in marked):
        return None
    if not any(point.row.hidden_layers in claim.depths for point in reading.unmarked):
        return Judgement(claims.OPEN, 0, "no row is left")
    return _judge(claim, replace(reading, points=reading.unmarked))[0]
