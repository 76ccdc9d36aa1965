"""Ensembles of a study's final networks, compared with the selected single network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from pseudograd.fleet.ramp import as_k
from pseudograd.report import charts
from pseudograd.report.described import K, Parameter
from pseudograd.words import fraction, joined, p_value, percent, spelled

Found = Mapping[str, Any]


@dataclass(frozen=True)
class Ensembles:
    """The ensembles of a study.

    Attributes:
        size: The number of networks in each, spelled out.
        ensembles: The assessment of each: the chosen k first, then k = 1, then mixed k.
        told: The one to report: the first that is significantly better than one network, or else
            the first. The order does not depend on the test set.
        of: The k of its networks, such as "k = 1/2".
        which: Its name for `Study.ensemble`: "chosen", "mixed" or "plain".
        one: The error of the selected single network.
        plain: The error of the ensemble of k = 1; None if that is the reported one.

    """

    size: str
    ensembles: tuple[Found, ...]
    told: Found
    of: str
    which: str
    one: float
    plain: float | None

    @property
    def better(self) -> bool:
        """Whether an ensemble is significantly better than one network."""
        return bool(self.told["against_one"]["verdict"] == "better")


def combined(assessment: Found, parameter: Parameter = K) -> Ensembles | None:
    """Return the ensembles of an assessment; None if there are fewer than two networks."""
    found = {one["name"]: one for one in assessment.get("combined") or ()}
    if "plain" not in found or len(found["plain"]["ks"]) < 2:
        return None
    # If k = 1 was chosen, its ensemble comes first. Mixed k needs the most explanation.
    names = [name for name in ("chosen", "plain", "mixed") if name in found]
    told = next((n for n in names if found[n]["against_one"]["verdict"] == "better"), names[0])
    return Ensembles(
        size=spelled(len(found["plain"]["ks"])),
        ensembles=tuple(found[name] for name in names),
        told=found[told],
        of=_of(found[told], parameter),
        which="chosen" if told == names[0] else told,
        one=assessment["model"]["error"],
        plain=None if told == "plain" else found["plain"]["error"],
    )


def combined_section(assessment: Found | None, k: object, parameter: Parameter) -> dict[str, Any]:
    """Return the values, the table and the figure of the page's section on ensembles.

    Args:
        assessment: The assessment, if there is one.
        k: The k of the selected network.
        parameter: The name of k.

    """
    found = None if assessment is None else combined(assessment, parameter)
    if assessment is None or found is None:
        return {"combined": None}
    one = {**assessment["model"], "name": f"one network of {parameter.at(k)}"}
    rows = [(one["name"], *_numbers(one), "", "")]
    for each in found.ensembles:
        plain = "" if each["name"] == "plain" else _verdict(each["against_plain"])
        name = f"{found.size} of {_of(each, parameter, exactly=True)}"
        rows.append((name, *_numbers(each), _verdict(each["against_one"]), plain))
    figure = _figure(found, one, parameter)
    return {"combined": found, "combined_rows": rows, "combined_errors": figure}


def _figure(found: Ensembles, one: Found, parameter: Parameter) -> Markup:
    kinds = {"chosen": "chosen", "plain": "plain", "mixed": "other"}
    mixed = f"mixed {parameter.name}"
    several = [
        {
            **each,
            "name": f"{found.size} of {mixed if each['name'] == 'mixed' else _of(each, parameter)}",
            "kind": kinds[each["name"]],
        }
        for each in found.ensembles
    ]
    return charts.errors([{**one, "kind": "other"}, *several])


def _numbers(row: Found) -> Sequence[str]:
    interval = f"{percent(row['low'])} to {percent(row['high'])}"
    return percent(row["error"]), interval, f"{row['log_loss']:.3f}"


def _verdict(against: Found) -> str:
    return f"{against['verdict']} ({p_value(against['p'])})"


def _of(ensemble: Found, parameter: Parameter = K, *, exactly: bool = False) -> str:
    """Return the k of an ensemble's networks in words; ``exactly`` adds how many have each.

    >>> _of({"ks": [0.5, 0.5]}), _of({"ks": [0.5, 1.0, "0.5→2"]})
    ('k = 1/2', 'mixed k (1/2, 1 and 1/2→2)')
    >>> _of({"ks": [0.5, 1.0, 0.5]}, exactly=True)
    'mixed k (two of 1/2 and one of 1)'
    """
    counts = Counter(as_k(k) for k in ensemble["ks"])
    if len(counts) == 1:
        return parameter.at(next(iter(counts)))
    each = [fraction(k) for k in counts]
    if exactly and max(counts.values()) > 1:
        each = [f"{spelled(count)} of {k}" for k, count in zip(each, counts.values(), strict=True)]
    return f"mixed {parameter.name} ({joined(each)})"
