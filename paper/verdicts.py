"""The numbers of "In short" and "The claims": verdicts, changes by depth, the selected k."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paper.claims import (
    CLAIMS,
    NOT,
    OPEN,
    Claim,
    Judgement,
    Point,
    can_be_confirmed,
    judge,
    our_points,
    paper_points,
    pooled,
    pooled_by_architecture,
    pooled_by_data_set,
    sides,
)
from paper.findings import Finding, Reproduction, agreeing, beside_the_papers, may_be_the_rate
from paper.rows import Experiment, Row
from paper.toy import paper_row, summarize
from pseudograd.search import Difference

TOO_FEW = "open (too few rows)"
STATED, OTHER = (-1.0, 1.0), (0.0, 1.0)  # of MNIST; OTHER fits the paper's rates


# --- the figures that claims are judged by -------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """The figures that claims are judged by: ours, or the paper's own.

    Attributes:
        kind: "stated" or "other", by MNIST's scaling; "same rows" or "paper" for the paper's own.
        rows: All rows, finished or not.
        points: The rows that claims are judged by.
        unmarked: Our rows that are not marked §.

    """

    kind: str
    rows: Sequence[Row]
    points: Sequence[Point]
    unmarked: Sequence[Point] = ()

    @property
    def of_paper(self) -> bool:
        """Whether these are the paper's own figures."""
        return self.kind in ("same rows", "paper")


def readings(found: Reproduction) -> list[Reading]:
    """Return ours (one or both scalings of MNIST) and the paper's (the same rows, and all rows)."""
    rows = list(dict.fromkeys(experiment.row for experiment in found.found))
    unmarked = [finding for finding in found.finished if not may_be_the_rate(finding)]

    def ours(kind: str, mnist: tuple[float, float]) -> Reading:
        return Reading(kind, rows, our_points(found.finished, mnist), our_points(unmarked, mnist))

    stated, other = ours("stated", STATED), ours("other", OTHER)
    finished = [point.row for point in stated.points]
    all_readings = [stated]
    # Only once it has the same rows: until then, its verdicts would rest on the other data sets.
    in_other_range = any(f.experiment.feature_range == OTHER for f in found.finished)
    if in_other_range and {*finished} <= {point.row for point in other.points}:
        all_readings.append(other)
    if 0 < len(finished) < len(rows):
        all_readings.append(Reading("same rows", rows, paper_points(finished)))
    return [*all_readings, Reading("paper", rows, paper_points(rows))]


def _judge(claim: Claim, reading: Reading) -> tuple[Judgement, int]:
    """Return the verdict and the number of rows it will rest on; open if there are too few rows."""
    judgement = judge(claim, reading.points)
    total = sum(row.hidden_layers in claim.depths for row in reading.rows)
    if judgement.verdict == NOT and not can_be_confirmed(claim, reading.points):
        judgement = replace(judgement, verdict=TOO_FEW, by_row=None)
    return judgement, judgement.rows if reading.of_paper else total


def _without_marked(claim: Claim, reading: Reading) -> Judgement | None:
    """Return the verdict without rows marked §; None if the claim rests on none of them."""
    marked = {point.row for point in reading.points} - {point.row for point in reading.unmarked}
    if reading.of_paper or not any(row.hidden_layers in claim.depths for row in marked):
        return None
    if not any(point.row.hidden_layers in claim.depths for point in reading.unmarked):
        return Judgement(OPEN, 0, reason="no row is left")
    return _judge(claim, replace(reading, points=reading.unmarked))[0]


def judged_claims(found: Reproduction, read: Sequence[Reading]) -> list[dict[str, Any]]:
    """Return each claim with its judgement by each reading, and without rows marked §."""
    lines = []
    for claim in CLAIMS:
        judged = []
        for reading in read:
            judgement, total = _judge(claim, reading)
            without = _without_marked(claim, reading)
            judged.append({
                "kind": reading.kind, "judgement": judgement, "total": total, "without": without,
                "partial": judgement.rows not in (0, total) and judgement.verdict != TOO_FEW,
            })  # fmt: skip
        lines.append({"name": claim.name, "judged": judged, "marked": _marked(claim, found)})
    return lines


def _marked(claim: Claim, found: Reproduction) -> list[dict[str, Any]]:
    """Return the rows, by MNIST's scaling, in which the rate may explain part of k's effect."""
    marked = []
    for kind, feature_range in (("stated", STATED), ("other", OTHER)):
        rows = [
            finding
            for finding in found.finished
            if finding.experiment == Experiment(finding.experiment.row, feature_range)
            and finding.experiment.row.hidden_layers in claim.depths
        ]
        if names := [finding.experiment.name for finding in rows if may_be_the_rate(finding)]:
            marked.append({"kind": kind, "names": names, "rows": len(rows)})
    return marked


# --- in short ------------------------------------------------------------------------------------


def answer(found: Reproduction, reading: Reading) -> dict[str, Any] | None:
    """Return how the selected k changes the test error, in all and row by row."""
    points = reading.points
    if not points:
        return None
    differences = [
        finding.result.comparison.error
        for finding in found.finished
        if finding.experiment.as_printed and finding.k != 1
    ]
    lower = sum(difference.high < 0 for difference in differences)
    higher = sum(difference.low > 0 for difference in differences)
    deep: dict[str, list[float]] = {}
    for point in points:
        if point.row.hidden_layers > 1:
            deep.setdefault(point.row.data, []).append(point.k)
    marked = len(points) - len(reading.unmarked)
    return {
        "change": _pooled(points),
        "sets": len({point.row.data for point in points}),
        "marked": marked,
        "unmarked": _pooled(reading.unmarked) if 0 < marked < len(points) else None,
        "paper": _pooled(paper_points(point.row for point in points)),
        "rows": len(points),
        "differ": len(differences),
        "lower": lower,
        "higher": higher,
        "noise": len(differences) - lower - higher,
        "deep": {data: sides(ks) for data, ks in deep.items()},
    }


def _pooled(points: Iterable[Point]) -> tuple[Difference, Difference]:
    """Return the mean change over architectures, and over data sets."""
    points = list(points)
    return pooled_by_architecture(points), pooled_by_data_set(points)


def by_depth(found: Reproduction, reading: Reading) -> list[dict[str, Any]]:
    """Return k's effect and the distance from the paper, for all rows and for each depth."""
    findings = {f.experiment.row: f for f in found.finished if f.experiment.as_printed}
    lines = []
    for depth in (None, *sorted({point.row.hidden_layers for point in reading.points})):
        group = [point for point in reading.points if depth in (None, point.row.hidden_layers)]
        if not group:
            continue
        unmarked = [point for point in reading.unmarked if point.row.hidden_layers == depth]
        off: dict[str, list[float]] = {"plain": [], "chosen": []}
        for point in group:
            for kind, ours, _, theirs in beside_the_papers(findings[point.row]):
                off[kind].append(ours.mean - theirs)
        lines.append({
            "depth": depth,
            "rows": len(group),
            "change": _pooled(group),
            "paper": _pooled(paper_points(point.row for point in group)),
            "distances": [_distance(far) for far in off.values()],
            "same": agreeing((point.k, point.row.selected_k) for point in group),
            "unmarked": _pooled(unmarked) if depth and 0 < len(unmarked) < len(group) else None,
        })  # fmt: skip
    return lines


def _distance(deviations: Sequence[float]) -> dict[str, Any] | None:
    if not deviations:
        return None
    lower = sum(deviation < 0 for deviation in deviations)
    return {"mean": statistics.fmean(deviations), "lower": lower, "of": len(deviations)}


def by_data_and_depth(found: Reproduction) -> list[dict[str, Any]]:
    """Return the selected k and its effect for each data set and depth with ReLU."""
    groups: dict[tuple[str, int], list[Finding]] = {}
    for finding in found.finished:
        experiment = finding.experiment
        if experiment.activation == "relu":
            depth = experiment.row.hidden_layers
            groups.setdefault((experiment.data, depth), []).append(finding)
    lines = []
    for (data, depth), findings in sorted(groups.items(), key=lambda item: item[0][1]):
        points = our_points(findings, findings[0].experiment.feature_range)
        lines.append({
            "depth": depth,
            "data": data,
            "rows": len(points),
            "sides": sides(finding.k for finding in findings),
            "change": pooled(points),
            "paper": pooled(paper_points(point.row for point in points)),
            "better": sum(point.cross_entropy < 0 for point in points),
            "worse": sum(point.cross_entropy > 0 for point in points),
        })  # fmt: skip
    return lines


def selected_counts(points: Iterable[Point]) -> dict[int, Counter[float]]:
    """Return how often each k was selected, by depth."""
    found: dict[int, Counter[float]] = {}
    for point in sorted(points, key=lambda point: point.row.hidden_layers):
        found.setdefault(point.row.hidden_layers, Counter())[point.k] += 1
    return found


def toy_table(found: Reproduction) -> list[dict[str, Any]]:
    """Return the paper's Table 2 with ours beside it."""
    return [
        {"k": ours.k, "ours": ours, "paper": paper}
        for ours in summarize(found.toy)
        if (paper := paper_row(ours))
    ]
