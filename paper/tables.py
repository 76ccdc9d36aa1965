"""The numbers of "The tables": each row beside the paper's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from paper.findings import (
    Finding,
    Reproduction,
    agreeing,
    beside_the_papers,
    cross_entropies,
    errors_pct,
    may_be_the_rate,
    rates_tried,
)
from paper.rows import TABLES, UNPRINTED, Experiment
from paper.toy import Spread
from pseudograd.fleet import Outcome
from pseudograd.fleet.ramp import level
from pseudograd.search import Comparison, Difference

_WIDE = 1.0  # errors are listed from this spread, in percentage points


@dataclass(frozen=True)
class Measure:
    """A measure of a table: errors in percent, or cross-entropies.

    Attributes:
        name: Its name in the tables.
        form: How its numbers are formatted.
        times: The factor of a difference of outcomes.
        paper: The fields of a `Row` that hold it at k = 1 and at the selected k.
        spread: Returns its mean and standard deviation over outcomes.

    """

    name: str
    form: str
    times: float
    paper: tuple[str, str]
    spread: Callable[[Iterable[Outcome]], Spread]

    def change(self, comparison: Comparison) -> Difference:
        """Return the selected k minus k = 1."""
        return comparison.error if self.name == "error" else comparison.cross_entropy


MEASURES = (
    Measure("error", ".2f", 100, ("error_k1_pct", "error_selected_pct"), errors_pct),
    Measure("cross-entropy", ".3f", 1, ("ce_k1", "ce_selected"), cross_entropies),
)


def tables(found: Reproduction) -> list[dict[str, Any]]:
    """Return the paper's tables with their planned rows.

    The paper's rows with another activation are left to `other_activations`.
    """
    own = [e.row.table for e in found.found if not e.row.of_paper]
    shown = []
    for table in dict.fromkeys((*TABLES, UNPRINTED, *own)):
        experiments = [
            e
            for e in found.found
            if e.row.table == table and (e.activation == "relu" or not e.row.of_paper)
        ]
        if experiments:
            finished = [finding for e in experiments if (finding := found.found[e])]
            shown.append({
                "name": table,
                "of_paper": table not in own,
                "lines": [line(e, found) for e in experiments],
                "notes": [note for finding in finished if (note := _notes(finding))],
            })  # fmt: skip
    return shown


def line(experiment: Experiment, found: Reproduction) -> dict[str, Any]:
    """Return one row: its state, its k and, for each measure, our figures and the paper's."""
    finding = found.found.get(experiment)
    measures = []
    for measure in MEASURES:
        numbers: dict[str, Any] = {
            "paper": [getattr(experiment.row, name) for name in measure.paper]
        }
        if finding:
            comparison, (chosen, plain) = finding.result.comparison, finding.tested
            numbers |= {
                "ours": [measure.spread(o) for o in (comparison.plain, comparison.chosen)],
                "change": measure.change(comparison) if finding.k != 1 else None,
                "three_fifths": [measure.spread(outcomes) for outcomes in (plain, chosen)],
            }
        measures.append(numbers)
    return {
        "name": experiment.name,
        "relu_name": replace(experiment, activation="relu").name,
        "activation": experiment.activation,
        "row": experiment.row,
        "k": finding and finding.k,
        "marks": _marks(finding) if finding else "",
        "begun": experiment in found.begun,
        "measures": measures,
    }


def _marks(finding: Finding) -> str:
    result = finding.result
    return (
        "†" * bool(_tied_ks(finding)) + "‡" * bool(result.open_ks) + "§" * may_be_the_rate(finding)
    )


def _tied_ks(finding: Finding) -> list[float]:
    tied = (level(cell.k) for cell in finding.result.ties)
    return [k for k in dict.fromkeys(tied) if k != finding.k]


def _notes(finding: Finding) -> dict[str, Any]:
    """Explain the marks of a row, and list networks that did not end as planned."""
    comparison = finding.result.comparison
    final = {*comparison.chosen, *comparison.plain}
    note = {
        "tied": _tied_ks(finding),
        "open": finding.result.open_ks,
        "rates": (rates_tried(finding, 1.0), finding.result.chosen.learning_rate)
        if may_be_the_rate(finding)
        else None,
        "spread": {
            kind: [(o.error, o.best_epoch) for o in outcomes]
            for kind, outcomes in (("chosen", comparison.chosen), ("plain", comparison.plain))
            if errors_pct(outcomes).sd >= _WIDE and (kind == "plain" or finding.k != 1)
        },
        "cut": sum(outcome.stopped_by != "patience" for outcome in final),
    }
    if not any(note.values()):
        return {}
    return {"name": finding.experiment.name, "final": len(final), **note}


def nearer_to_three_fifths(found: Reproduction) -> dict[str, tuple[int, int]]:
    """Count the paper's errors that are nearer to our networks trained on three fifths."""
    nearer: dict[str, list[bool]] = {"plain": [], "chosen": []}
    for finding in found.finished:
        if finding.experiment.as_printed and finding.experiment.row.printed:
            for kind, whole, part, theirs in beside_the_papers(finding):
                nearer[kind].append(abs(part.mean - theirs) < abs(whole.mean - theirs))
    return {kind: (sum(of), len(of)) for kind, of in nearer.items()} if nearer["plain"] else {}


def relative_deviations(findings: Iterable[Finding]) -> dict[str, dict[str, list[float]]]:
    """Return by data set, at k = 1 and at the selected k, ours over the paper's - 1, in percent."""
    groups: dict[str, dict[str, list[float]]] = {}
    for finding in findings:
        if finding.experiment.activation == "relu":
            for kind, ours, _, theirs in beside_the_papers(finding):
                group = groups.setdefault(finding.experiment.data, {}).setdefault(kind, [])
                group.append(100 * (ours.mean / theirs - 1))
    return groups


def _beside_relu(relu: Finding, other: Finding) -> dict[str, Any]:
    """Return a row with ReLU and with another activation, in this order, beside the paper's."""
    row, both = relu.experiment.row, (relu, other)
    of_paper = None
    if row.error_selected_pct is not None and row.error_k1_pct is not None:
        of_paper = row.error_selected_pct - row.error_k1_pct
    changes = [finding.result.comparison.error for finding in both]
    return {
        "name": relu.experiment.name,
        "depth": row.hidden_layers,
        "more": other.error_k1_pct.mean - relu.error_k1_pct.mean,
        "changes": changes,
        "paper": of_paper,
        # From the paper's figures: the error at k = 1, and the change.
        "distances": [finding.error_k1_pct.mean - row.error_k1_pct for finding in both]
        if row.error_k1_pct is not None
        else None,
        "off": [100 * change.mean - of_paper for change in changes]
        if of_paper is not None
        else None,
    }


def _nearer(pairs: Iterable[dict[str, Any]], what: str) -> tuple[int, int, int]:
    """Count the rows in which ReLU or the other is nearer to the paper, and those compared."""
    far = [[abs(distance) for distance in pair[what]] for pair in pairs if pair[what] is not None]
    return sum(a < b for a, b in far), sum(b < a for a, b in far), len(far)


def other_activations(found: Reproduction) -> dict[str, Any]:
    """Return the rows run with another activation than ReLU, each below the same row with ReLU."""
    others = [e for e in found.found if e.activation != "relu"]
    kinds = []
    for name in dict.fromkeys(other.activation for other in others):
        pairs = [
            (relu, finding)
            for other in others
            if other.activation == name
            and (relu := found.found.get(replace(other, activation="relu")))
            and (finding := found.found[other])
        ]
        beside = [_beside_relu(relu, finding) for relu, finding in pairs]
        kinds.append({
            "name": name,
            "rows": len(pairs),
            "same": agreeing((relu.k, finding.k) for relu, finding in pairs),
            "pairs": beside,
            "nearer": {what: _nearer(beside, what) for what in ("distances", "off")},
        })  # fmt: skip
    lines = [
        line(experiment, found)
        for other in others
        for experiment in (replace(other, activation="relu"), other)
    ]
    return {"kinds": kinds, "lines": lines}
