"""The numbers of "Follow-up questions"."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Any

from paper.findings import (
    Finding,
    Reproduction,
    agreeing,
    apart_from_1,
    beside_the_papers,
    error_against_k,
    errors_pct,
    may_be_the_rate,
    rates_tried,
    stability,
    untried_rates,
)
from paper.rows import Experiment, rows
from paper.verdicts import OTHER, STATED
from pseudograd.search import Comparison, Difference, paired_difference

ALL, ALL_BUT_MNIST = "all", "all but mnist"  # rows as the paper has them
EARLY = 15  # epochs: the patience of early stopping
# Whether k = 1 and the selected k were taken from the first epochs.
PAIRS = ((True, False), (False, True), (True, True), (False, False))
_PAPER_RATES = {"mnist": (0.1, 10.0)} | dict.fromkeys(("svhn", "cifar10", "cifar100"), (1e-4, 1.0))

Curves = dict[tuple[int, str], dict[float, Difference]]


def curves(found: Reproduction) -> dict[str, Any]:
    """Return the validation error against k, relative to k = 1, by depth and data set."""
    groups: dict[tuple[int, str], list[Finding]] = {}
    for finding in sorted(found.finished, key=lambda f: f.experiment.row.hidden_layers):
        experiment, row = finding.experiment, finding.experiment.row
        names = [experiment.data]
        if experiment.as_printed and row.printed:
            names = [ALL, *[ALL_BUT_MNIST] * (row.data != "mnist"), experiment.data]
        for name in names:
            groups.setdefault((row.hidden_layers, name), []).append(finding)
    of_group = {group: error_against_k(findings) for group, findings in groups.items()}
    return {
        "ks": sorted({k for curve in of_group.values() for k in curve}),
        "lines": [
            {"depth": depth, "data": data, "rows": len(groups[depth, data]), "curve": curve}
            for (depth, data), curve in of_group.items()
        ],
        "best": _best_ks(of_group),
        "drawn": {
            depth: {
                name: of_group[depth, name]
                for name in (ALL, ALL_BUT_MNIST)
                if (depth, name) in of_group
            }
            for depth, data in of_group
            if data == ALL
        },
    }


def _best_ks(curves: Curves) -> list[dict[str, Any]]:
    """Return the best k on average, for all rows of a depth and for each data set as printed."""
    printed = {row.data for row in rows()}
    lines = []
    for depth in [depth for depth, data in curves if data == ALL]:
        best = {
            data: min(curve, key=lambda k: curve[k].mean)
            for (at, data), curve in curves.items()
            if at == depth
        }
        lines.append({
            "depth": depth,
            "all": best[ALL],
            "each": {data: k for data, k in best.items() if data in printed},
            "without_mnist": best.get(ALL_BUT_MNIST) if "mnist" in best else None,
        })  # fmt: skip
    return lines


def controls(found: Reproduction) -> list[dict[str, Any]]:
    """Return the rows whose search did not try k = 1 at the selected k's rate."""
    lines = []
    for finding in found.finished:
        if not apart_from_1(finding):
            continue
        chosen = finding.result.comparison.chosen
        control = None
        if finding.control:
            cell, outcomes = finding.control
            ours = [outcome.error for outcome in chosen]
            control = {
                "validation": cell.error,
                "test": errors_pct(outcomes),
                "change": paired_difference(ours, [outcome.error for outcome in outcomes]),
            }
        lines.append({
            "name": finding.experiment.name,
            "marked": may_be_the_rate(finding),
            "chosen": finding.result.chosen,
            "plain": finding.result.plain,
            "tests": (finding.error_pct, finding.error_k1_pct),
            "control": control,
        })  # fmt: skip
    return lines


def taken_early(found: Reproduction) -> list[dict[str, Any]]:
    """Return how many final networks early stopping took from few epochs, with their errors."""
    groups: dict[tuple[str, int], list[Finding]] = {}
    for finding in found.finished:
        row = finding.experiment.row
        if finding.experiment.as_printed and row.printed:
            groups.setdefault((row.data, row.hidden_layers), []).append(finding)
    lines = []
    for (data, depth), findings in groups.items():
        counts = []
        compared = [finding.result.comparison for finding in findings]
        for outcomes in (
            [outcome for each in compared for outcome in each.plain],
            [outcome for each in compared for outcome in each.chosen],
        ):
            early = [outcome for outcome in outcomes if outcome.best_epoch <= EARLY]
            later = [outcome for outcome in outcomes if outcome.best_epoch > EARLY]
            errors = [errors_pct(some).mean if some else None for some in (early, later)]
            counts.append({"early": len(early), "of": len(outcomes), "errors": errors})
        lines.append({"data": data, "depth": depth, "counts": counts, **_early_pairs(compared)})
    return lines


def _early_pairs(compared: Iterable[Comparison]) -> dict[str, Any]:
    """Return the change of the test error by which networks of a pair were taken early.

    ``pairs`` has the number of pairs and their mean change, in percentage points, for each of
    `PAIRS`. ``outweighed`` says whether the pairs in which only k = 1 was taken early lower the
    error by more than all pairs together, so that the others raise it on balance.
    """
    groups: dict[tuple[bool, bool], list[float]] = {early: [] for early in PAIRS}
    for comparison in compared:
        for plain, chosen in zip(comparison.plain, comparison.chosen, strict=True):
            early = plain.best_epoch <= EARLY, chosen.best_epoch <= EARLY
            groups[early].append(100 * (chosen.error - plain.error))
    changes = [change for group in groups.values() for change in group]
    return {
        "change": statistics.fmean(changes),
        "pairs": [(len(group), statistics.fmean(group) if group else None)
                  for group in groups.values()],
        "outweighed": sum(groups[PAIRS[0]]) < sum(changes) < 0,
    }  # fmt: skip


def selection(found: Reproduction) -> dict[str, Any]:
    """Return how often resampled repetitions select the same k, by depth and row by row."""
    resampled = [(finding, stability(finding)) for finding in found.finished]
    by_depth: dict[int, list[Any]] = {}
    for finding, shares in resampled:
        if finding.experiment.as_printed and finding.experiment.row.printed:
            by_depth.setdefault(finding.experiment.row.hidden_layers, []).append(shares)
    return {
        "depths": [
            {
                "depth": depth,
                "rows": len(group),
                "same_k": statistics.fmean(shares.same_k for shares in group),
                "same_side": statistics.fmean(shares.same_side for shares in group),
            }
            for depth, group in sorted(by_depth.items())
        ],
        "rows": [
            {"name": finding.experiment.name, "k": finding.k, "stability": shares}
            for finding, shares in resampled
        ],
    }


def selected_rates(found: Reproduction) -> dict[str, Any]:
    """Return the best rates, and where a search did not try those of its neighbours."""
    untried = {finding.experiment: untried_rates(finding) for finding in found.finished}
    of_data: dict[str, list[Finding]] = {}
    for finding in found.finished:
        of_data.setdefault(finding.experiment.data, []).append(finding)
    sets = [
        {
            "data": data,
            "rows": len(findings),
            "plain": [finding.result.plain.learning_rate for finding in findings],
            "chosen": [finding.result.chosen.learning_rate for finding in findings],
            "paper": _PAPER_RATES.get(findings[0].experiment.row.data),
            "untried": sum(len(untried[finding.experiment]) for finding in findings),
            "searches": sum(len(finding.result.best_of_each_k) for finding in findings),
            "apart": sum(map(apart_from_1, findings)),
        }
        for data, findings in of_data.items()
    ]
    each = [
        {
            "name": finding.experiment.name,
            "best": [
                {
                    "k": cell.k,
                    "rate": cell.learning_rate,
                    "untried": cell.k in untried[finding.experiment],
                    "tried": rates_tried(finding, cell.k),
                }
                for cell in finding.result.best_of_each_k
            ],
        }
        for finding in found.finished
    ]
    return {"sets": sets, "rows": each}


def scalings(found: Reproduction) -> dict[str, Any] | None:
    """Return how well MNIST in [-1, 1] and in [0, 1] fits the paper's figures."""
    stated, other = (
        {
            finding.experiment.row: finding
            for finding in found.finished
            if finding.experiment.row.data == "mnist"
            and finding.experiment == Experiment(finding.experiment.row, feature_range)
        }
        for feature_range in (STATED, OTHER)
    )
    both = stated.keys() & other.keys()
    if not both:
        return None
    low, high = _PAPER_RATES["mnist"]
    lines: list[dict[str, Any]] = []
    for findings in (stated, other):
        chosen = [finding for row, finding in findings.items() if row in both]
        within = [
            sum(low <= cell.learning_rate <= high for cell in cells)
            for cells in zip(*((f.result.plain, f.result.chosen) for f in chosen), strict=True)
        ]
        off: dict[str, list[float]] = {"plain": [], "chosen": []}
        for finding in chosen:
            for kind, ours, _, theirs in beside_the_papers(finding):
                off[kind].append(abs(ours.mean - theirs))
        lines.append({
            "rows": len(chosen),
            "within": within,
            "distances": [statistics.fmean(far) if far else math.nan for far in off.values()],
            "same": agreeing((finding.k, finding.experiment.row.selected_k) for finding in chosen),
        })  # fmt: skip

    def fits_better(measure: str, sign: int) -> int:
        """Return -1 for the scaling that the paper states, 1 for the other, 0 for neither."""
        first, second = (sign * sum(line[measure]) for line in lines)
        return int(second > first) - int(second < first)

    fits = [fits_better("within", 1), fits_better("distances", -1), fits_better("same", 1)]
    return {"paper": (low, high), "lines": lines, "fits": fits}
