"""The quality of the model: its error compared with baselines, and figures for the page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pseudograd.fleet import Outcome
from pseudograd.report import charts
from pseudograd.report.drawing import image
from pseudograd.search import Comparison, Difference
from pseudograd.search.assessment import share
from pseudograd.search.comparison import best_stopped
from pseudograd.words import DASH, percent

Assessment = Mapping[str, Any]

_WEAK = 0.2  # above this error, few suspects are wrong labels (docs/page.md)
_NEARLY_PERFECT = 0.1  # share of the majority's errors
_NEARLY_NOTHING = 0.05  # share of another column's importance


def assessed(comparison: Comparison, count: int | None = None) -> Assessment:
    """Return an assessment of the selected network from outcomes alone, in the form of `assess`.

    Args:
        comparison: The final networks.
        count: The number of test examples, if it is known.

    """
    kept, plain = comparison.kept, best_stopped(comparison.plain)
    return {
        "classes": [],
        "model": _own(kept, count),
        "uncalibrated": None,
        "plain": None if kept in comparison.plain else _own(plain, count),
        "baselines": [],
        "unequal": False,
        "by_class": [],
        "confusion": None,
        "confused": [],
        "reliability": {},
        "comparison": None,
        "importance": None,
        "suspects": None,
        "members": None,
    }


def _own(outcome: Outcome, count: int | None) -> dict[str, Any]:
    """Return the error of one network, with its interval if the test set's size is known."""
    known: dict[str, Any] = {"error": outcome.error, "wrong": None, "count": count}
    known |= {"low": None, "high": None}
    if count:
        known = share(round(outcome.error * count), count)
    return {**known, "log_loss": outcome.cross_entropy, "balanced_error": None, "ece": None}


@dataclass(frozen=True)
class Standing:
    """The model's rank among the baselines.

    Attributes:
        majority: Always predicting the most common label; None if the labels are unknown.
        no_better: Whether the model has at least as many test errors as that.
        unclear: Whether it has fewer, but not significantly.
        rivals: The other baselines, the best first.
        only_right: The only label that the model ever predicts correctly, if there is just one.
        untested: Labels without a test example.
        plain_no_better: Whether the model of k = 1, unlike the chosen one, is no better than the
            majority, and the assessment's comparison, if there is one, is not "noise".
        leak: The column that nearly all of a nearly perfect model's accuracy comes from.

    """

    majority: Mapping[str, Any] | None
    no_better: bool
    unclear: bool
    rivals: tuple[Mapping[str, Any], ...]
    only_right: tuple[object, ...]
    untested: tuple[object, ...]
    plain_no_better: bool
    leak: str | None

    def those(self, verdict: str) -> list[Mapping[str, Any]]:
        """Return the rivals that the model is "better" than, "level" with or "worse" than."""
        return [rival for rival in self.rivals if rival["against"]["verdict"] == verdict]


def standing(assessment: Assessment) -> Standing:
    """Compare the model with the baselines."""
    majority = next((one for one in assessment["baselines"] if one["name"] == "majority"), None)
    rivals = [one for one in assessment["baselines"] if one is not majority]
    error, plain = assessment["model"]["error"], assessment["plain"]
    useless = majority is not None and error >= majority["error"] > 0
    classes = assessment["by_class"]
    right = tuple(one["label"] for one in classes if one["wrong"] < one["count"])
    return Standing(
        majority=majority,
        no_better=useless,
        unclear=majority is not None
        and not useless
        and majority["error"] > 0
        and majority["against"]["verdict"] != "better",
        rivals=tuple(sorted(rivals, key=lambda one: one["error"])),
        only_right=right if len(right) == 1 else (),
        untested=tuple(one["label"] for one in classes if not one["count"]),
        plain_no_better=bool(
            majority and plain and not useless and 0 < majority["error"] <= plain["error"]
        )
        and (assessment["comparison"] or {}).get("kind") != "noise",
        leak=_leak(assessment, majority["error"] if majority else 0.0),
    )


def _leak(assessment: Assessment, majority: float) -> str | None:
    """Return the column that may give the label away, such as a date of cancellation, or None."""
    columns = (assessment["importance"] or {"columns": ()})["columns"]
    if len(columns) < 2 or assessment["model"]["error"] > _NEARLY_PERFECT * majority:
        return None
    first, second = columns[0]["increase"], columns[1]["increase"]
    alone = first > majority / 2 and second < _NEARLY_NOTHING * first
    return str(columns[0]["column"]) if alone else None


def quality_section(
    assessment: Assessment | None, pixels: Sequence[int] | None, plain: str = "k = 1"
) -> dict[str, Any]:
    """Return the values and figures of the template's section on the model."""
    if assessment is None:
        return {"quality": None, "standing": None, "suspects": None}
    after = assessment["reliability"].get("model")
    return {
        "quality": assessment,
        "standing": standing(assessment),
        "errors": _errors(assessment, plain),
        "confusion": assessment["confusion"]
        and charts.confusion_map(assessment["confusion"], assessment["classes"]),
        "errors_by_class": assessment["by_class"]
        and charts.errors_by_class(assessment["by_class"]),
        "class_rows": [
            (one["label"], f"{one['count']:,}", f"{one['wrong']:,}",
             percent(one["error"]) if one["count"] else DASH)
            for one in assessment["by_class"]
        ],
        "calibration": after
        and charts.calibration(after, assessment["reliability"].get("uncalibrated")),
        "columns": assessment["importance"]
        and charts.importance(assessment["importance"]["columns"]),
        "column_rows": [
            (one["column"], percent(one["increase"]), percent(one["spread"]),
             f"{one['log_loss_increase']:.3f}")
            for one in (assessment["importance"] or {"columns": ()})["columns"]
        ],
        "suspects": assessment["suspects"] and _suspects(assessment, pixels),
    }  # fmt: skip


def column_notes(notes: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return how the columns of a table were used; "told" has those worth a note."""
    if not notes or not notes.get("columns"):
        return None
    columns = notes["columns"]
    return {
        "told": [one for one in columns if one.get("why") or one["used_as"] == "left out"],
        "rows": [f"{count:,} {what}" for what, count in notes.get("rows", {}).items()],
        "table": [(one["name"], one["used_as"], one.get("features", DASH)) for one in columns],
    }


def _suspects(assessment: Assessment, pixels: Sequence[int] | None) -> dict[str, Any]:
    """Return the suspects with their images, and whether the model is too weak to find any."""
    found = assessment["suspects"]
    first = [
        {**one, "image": image(one["pixels"], pixels or ()) if one["pixels"] else None}
        for one in found["first"]
    ]
    return {**found, "first": first, "weak": weak(assessment)}


def weak(assessment: Assessment) -> dict[str, Any] | None:
    """Return where the model is so weak that most suspects are its own mistakes, or None.

    That is the whole test set (label None), or the label of most suspects, with the error there.
    """
    found = assessment["suspects"]
    if not found or not found["first"]:
        return None
    if assessment["model"]["error"] > _WEAK:
        return {"label": None, "error": assessment["model"]["error"]}
    label, count = Counter(one["label"] for one in found["first"]).most_common(1)[0]
    error = assessment["by_class"][label]["error"] or 0.0
    if error <= _WEAK or count <= len(found["first"]) / 2:
        return None
    return {"label": assessment["classes"][label], "error": error}


def against_plain(assessment: Assessment | None) -> dict[str, Any] | None:
    """Return the comparison with the model of k = 1, as differences with intervals."""
    if not assessment or not assessment["comparison"]:
        return None
    found = assessment["comparison"]
    difference = Difference(found["difference"], found["low"], found["high"])
    loss = {end: math.nan if at is None else at for end, at in found["log_loss"].items()}
    return {**found, "difference": difference, "log_loss": Difference(**loss)}


def _errors(assessment: Assessment, plain: str) -> Any:
    """Return the chart of errors: the model, the ``plain`` one, and the baselines, best first."""
    if assessment["model"]["low"] is None:
        return None
    rows = [{"name": "this model", "kind": "chosen", **assessment["model"]}]
    if assessment["plain"]:
        rows.append({"name": f"the same with {plain}", "kind": "plain", **assessment["plain"]})
    names = {"majority": "always the most common label"}
    rows += [
        {**one, "kind": "other", "name": names.get(one["name"], one["name"])}
        for one in sorted(assessment["baselines"], key=lambda one: one["error"])
    ]
    return charts.errors(rows)
