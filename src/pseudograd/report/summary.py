"""The result of a search in a few lines of text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from pseudograd.fleet import OwnRecipe, Recipe
from pseudograd.fleet.ramp import as_k, by_level
from pseudograd.report.combined import combined
from pseudograd.report.described import K, Parameter, described
from pseudograd.report.quality import (
    Assessment,
    against_plain,
    assessed,
    standing,
    weak,
)
from pseudograd.report.template import fill
from pseudograd.report.verdict import diverged, unfinished, verdict
from pseudograd.search import Bagging, Cell, Result, Study, read_assessment
from pseudograd.words import counted, fraction, percent


def summary(
    found: Result,
    assessment: Assessment | None = None,
    *,
    compared_before: int = 0,
) -> str:
    """Return a summary of a search: the model's error, the baselines, whether k matters.

    The search, the choice and the tests follow.

    Args:
        found: The result of the search.
        assessment: The assessment from `pseudograd.search.assess`; without it, the summary uses
            the outcomes only.
        compared_before: The number of final networks first compared, if more were added later.

    Example:
        >>> from pseudograd.fleet import MLPRecipe, Outcome, Trial
        >>> from pseudograd.search import compare
        >>> trial = Trial(MLPRecipe("digits", (4,)), k=1, learning_rate=0.1)
        >>> outcome = Outcome(trial, 0.1, 1, 0.50, 0.3, 16, "patience", (), wrong=(0, 1))
        >>> cell, same = Cell(1.0, 0.1, (0.02, 0.04)), compare([outcome], [outcome])
        >>> print(summary(Result((cell,), (cell,), cell, cell, (), (), same)))
        the model has a test error of 50.00%
        does k matter? k = 1, plain cross-entropy, was chosen, so there is nothing to compare
             k   best rate   validation error, % (± standard error)
             1         0.1   3.00 ± 1.00   chosen
        chosen: k = 1, learning rate 0.1

    """
    comparison = found.comparison
    recipe = comparison.chosen[0].trial.recipe
    parameter = Parameter.of(recipe, found.parameter, found.plain.k)
    told: dict[str, Any] = {
        "ties": [f"{parameter.at(cell.k)} at {cell.learning_rate:.4g}" for cell in found.ties],
        "open_ks": found.open_ks,
        "comparison": comparison,
        "verdict": verdict(comparison),
        "unfinished": unfinished(comparison),
        "diverged": diverged(comparison),
        "ensembles": None,
        "compared_before": compared_before,
    }
    known = assessment or assessed(comparison)
    return _filled(found.best_of_each_k, found.chosen, known, told, recipe, parameter)


def ensemble_summary(cells: tuple[Cell, ...], chosen: Cell, assessment: Assessment) -> str:
    """Return the summary for an ensemble, compared with an ensemble of k = 1.

    Args:
        cells: The best rate of each k.
        chosen: The best single pair of k and rate, to mark.
        assessment: The assessment of the ensemble from `pseudograd.search.assess`.

    """
    told: dict[str, Any] = dict.fromkeys(
        ("ties", "open_ks", "comparison", "verdict", "unfinished", "diverged", "compared_before")
    )
    told["ensembles"] = against_plain(assessment)
    return _filled(cells, chosen, assessment, told)


def study_summary(study: Study) -> str:
    """Return the summary of a study, from its ledger and, if it has a folder, the files there."""
    known = None if study.folder is None else read_assessment(study)
    if isinstance(study.protocol, Bagging):
        if known is None:
            raise ValueError("the study has no model yet: run the search's command again")
        cells, chosen = study.protocol.best_of_each_k(study.ledger), study.best
        return ensemble_summary(tuple(cells), chosen, known)
    return so_far(study) or summary(
        study.result, known or None, compared_before=study.compared_before
    )


def so_far(study: Study) -> str:
    """Return what is known of a study that compares nothing, or not yet; "" for any other."""
    trials, protocol = counted(len(study.ledger), "trial"), study.protocol
    if study.finished and protocol.retrainings:
        return ""
    state = "finished" if study.finished else "not finished yet"
    cells = protocol.best_of_each_k(study.ledger)
    plain = f"{protocol.parameter} = {fraction(protocol.baseline)}"
    why = " (retrainings=0)" * (not protocol.retrainings)
    lines = [f"{state}, {trials} done: nothing is compared with {plain}{why}"]
    if cells:
        best = protocol.best(cells, protocol.baseline)
        lines.append(table_of_k(tuple(cells), best, "best so far", protocol.parameter))
    return "\n".join(lines)


def _filled(
    cells: tuple[Cell, ...],
    chosen: Cell,
    assessment: Assessment,
    told: Mapping[str, Any],
    recipe: Recipe | None = None,
    parameter: Parameter = K,
) -> str:
    mark = "best pair" if told["ensembles"] else "chosen"
    text = fill(
        "summary.txt",
        recipe={"kind": "mlp"} if recipe is None else described(recipe),
        parameter=parameter,
        combined=combined(assessment, parameter),
        table=table_of_k(cells, chosen, mark, parameter.name),
        chosen=chosen,
        quality=assessment,
        standing=standing(assessment),
        weak=weak(assessment),
        **told,
    )
    return _typed(text.strip())


def table_of_k(
    cells: tuple[Cell, ...], chosen: Cell | None = None, mark: str = "chosen", name: str = "k"
) -> str:
    """Return a line for each k: its best rate, validation error and standard error.

    Args:
        cells: The best rate of each k.
        chosen: The one to mark.
        mark: The word that marks it.
        name: The name of k.

    Example:
        >>> print(table_of_k((Cell(1.0, 0.2, (0.02, 0.03)), Cell(0.5, 0.1, (0.01, 0.02)))))
             k   best rate   validation error, % (± standard error)
             1         0.2   2.50 ± 0.50
           1/2         0.1   1.50 ± 0.50

    """
    names = {cell.k: _typed(fraction(cell.k)) for cell in cells}
    width = max(6, len(name), *map(len, names.values()))
    spread = " (± standard error)" if any(len(cell.errors) > 1 for cell in cells) else ""
    lines = [f"{name:>{width}}   {'best rate':>9}   validation error, %{spread}"]
    for cell in sorted(cells, key=lambda cell: by_level(cell.k), reverse=True):
        error = percent(cell.error)
        if len(cell.errors) > 1:
            error += f" ± {percent(cell.standard_error)}"
        marked = f"   {mark}" if cell == chosen else ""
        lines.append(f"{names[cell.k]:>{width}}   {cell.learning_rate:>9.4g}   {error}{marked}")
    return "\n".join(lines)


def _typed(text: str) -> str:
    """Return text with ASCII minus signs and arrows, which every terminal can show."""
    return text.replace("−", "-").replace("→", "->")


RUNS_HEAD = "started            trials   k         test error, %   with k = 1   folder"


def line_of_run(run: Study) -> str:
    """Return the progress and the result of a run, as a line below `RUNS_HEAD`."""
    started = run.sessions[0]["started"][:16].replace("T", " ") if run.sessions else ""
    found = _found(run)
    told = "unfinished"
    if found:
        ks, error, plain = found
        against, named = percent(plain), ""
        if run.protocol.parameter != "k" or run.protocol.baseline != 1:
            named = f"{run.protocol.parameter} = "
            against += f" at {fraction(run.protocol.baseline)}"
        told = f"{_typed(named + ks):<9} {percent(error):>13}   {against:>10}"
    return f"{started:<16} {len(run.ledger):>8}   {told:<36}   {run.folder}"


def _found(run: Study) -> tuple[str, float, float] | None:
    """Return the values of k, the test error and that with k = 1; None if unfinished.

    If an ensemble of a `ModuleRecipe` is significantly better than one network, the values are
    those of that ensemble and of the ensemble of k = 1. For a training loop of the user's own, they
    are means over the final networks.
    """
    if not run.finished:
        return None
    if isinstance(run.protocol, Bagging):
        known = read_assessment(run)
        if known is None:
            return None
        ks = [k for k, _ in known["members"]["ks"]]
        return _joined(ks), known["model"]["error"], known["plain"]["error"]
    if not run.protocol.retrainings:
        return fraction(run.best.k), math.nan, math.nan
    if isinstance(run.protocol.recipe, OwnRecipe):  # no network is the model: the means
        return fraction(run.result.chosen.k), *verdict(run.result.comparison).errors
    told = read_assessment(run) or {}
    several = combined(told)
    if several and several.better:
        ks, error = several.told["ks"], several.told["error"]
        plain = error if several.plain is None else several.plain
        return f"{_joined(ks)} x{len(ks)}", error, plain
    own = told or assessed(run.result.comparison)
    model = own["model"]["error"]
    return fraction(run.result.chosen.k), model, own["plain"]["error"] if own["plain"] else model


def _joined(ks: Iterable[float | str]) -> str:
    return "+".join(map(fraction, sorted({as_k(k) for k in ks}, key=by_level)))
