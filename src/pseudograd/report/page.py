"""The page of a search: one self-contained file, generated from the run folder.

The sentences are in the templates; this module supplies numbers, conditions and figures.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pseudograd.files import write_whole, writing
from pseudograd.fleet import Outcome, Ramp, Trial, k_at
from pseudograd.fleet.ramp import by_level
from pseudograd.fleet.recipe import ModuleRecipe
from pseudograd.report import figures
from pseudograd.report.combined import combined_section
from pseudograd.report.described import Parameter, described, shapes_in_words
from pseudograd.report.drawing import image
from pseudograd.report.quality import (
    against_plain,
    assessed,
    column_notes,
    quality_section,
)
from pseudograd.report.template import render
from pseudograd.report.verdict import diverged, error_interval, possible, unfinished, verdict
from pseudograd.search import (
    Cell,
    Comparison,
    Protocol,
    Study,
    compare,
    paired_difference,
    read_assessment,
    read_examples,
)
from pseudograd.search.bagging import Bagging
from pseudograd.words import DASH, fraction, interval, percent

Outcomes = Mapping[Trial, Outcome]

_DATA: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("name", "sha256", "target"), str),
    **dict.fromkeys(("train_size", "test_size", "features", "classes"), int),
    "labels": list,
    "pixels": lambda shape: shape and [int(size) for size in shape],
}
# The facts about the data that a page needs, by the kind of recipe.
_NEEDED: dict[str, dict[str, Callable[[Any], Any]]] = {
    "mlp": _DATA,
    "module": {**_DATA, "shapes": lambda shapes: [list(map(int, shape)) for shape in shapes]},
    "own": {},
}


def write_page(study: Study) -> Path:
    """Write the page of a study into its folder, and return its path."""
    if study.folder is None:
        raise ValueError("study must have a folder, for its page to be written there")
    kind = study.protocol.recipe.kind
    try:
        facts = {name: read(study.data[name]) for name, read in _NEEDED[kind].items()}
    except (KeyError, TypeError, ValueError) as problem:
        made = "pseudograd.Study" if kind == "module" else "pseudograd tune"
        raise ValueError(
            f"{study.folder / 'run.json'} lacks facts about the data that the page needs "
            f"({problem!r}): name a run of {made}, or read study.result"
        ) from problem
    path = study.folder / "report.html"
    with writing(path):
        write_whole(
            path,
            page(
                {**study.about, "data": {**study.data, **facts}},
                study.protocol,
                study.ledger,
                read_examples(study),
                read_assessment(study),
            ),
        )
    return path


def page(
    about: Mapping[str, Any],
    protocol: Protocol,
    ledger: Outcomes,
    examples: Mapping[str, Any] | None,
    assessment: Mapping[str, Any] | None = None,
) -> str:
    """Return the page of a search, finished or not, as HTML.

    Args:
        about: How the search was run: command, versions, commit, hardware, devices, started,
            seconds, seed, and data (name, sha256, train_size, test_size, features, classes, labels,
            pixels, target; for a study of any network also the shapes of its inputs; for one of a
            user's own training loop nothing).
        protocol: The protocol of the search.
        ledger: The outcomes so far.
        examples: The training examples with the largest gradients (networks, edges, hardest);
            None if the search is unfinished.
        assessment: The assessment of the model from `pseudograd.search.assess` or
            `assess_networks`; without it, or if it is {}, the page uses the outcomes only.

    """
    recipe = described(protocol.recipe)
    wanted = protocol.wanted(ledger)
    chosen = plain = None
    if any(cell.k == protocol.baseline for cell in protocol.cells(ledger)):
        chosen, plain = protocol.chosen(ledger)
    selected = not wanted or wanted[0].split.retrain
    k = chosen.k if chosen else protocol.baseline
    parameter = Parameter.of(protocol.recipe, protocol.parameter, protocol.baseline)
    slider_k = k_at(k, 1) if parameter.is_k else 1.0
    pairs: dict[str, Cell] = {}
    if chosen and plain and selected:
        pairs = {"chosen": chosen} | ({} if plain == chosen else {"plain": plain})
    bagged = isinstance(protocol, Bagging)
    # Bagging has no final networks; those of its folds are the model.
    groups = _trained(ledger, pairs, protocol.trials_of if bagged else _finals_of(protocol))
    compared = groups and protocol.retrainings and not wanted
    positions = about["data"].get("positions", 1)
    comparison = _comparison(groups, positions) if compared else None
    module, own = recipe["kind"] == "module", recipe["kind"] == "own"
    unassessed = module and assessment is None
    if wanted:
        assessment = None
    elif comparison and not assessment and not own:  # that has no model to assess
        # With a ModuleRecipe, an example may have several labels, or only ignored ones.
        assessment = assessed(comparison, None if module else about["data"]["test_size"])
    finished = comparison if own else assessment
    state = "finished" if finished else "selected" if selected else "searching"
    return render(
        "page.html",
        "page.js",
        about=about,
        recipe=recipe,
        parameter=parameter,
        folds=recipe.get("validation") is None and not own,
        shapes=shapes_in_words(about["data"]["shapes"]) if module else None,
        unassessed=unassessed,
        protocol=protocol,
        trials=len(ledger),
        wanted=len(wanted),
        state=state if chosen else "empty",
        k=k,
        chosen=chosen,
        plain=plain,
        key=figures.key,
        hatch=figures.HATCH,
        ramp=isinstance(k, Ramp),
        ramps=any(isinstance(k, Ramp) for k in protocol.ks),
        slider=_slider(slider_k),
        pull_curve=figures.pull_curve(slider_k),
        bagged=bagged,
        **_curves(protocol, ledger, groups, pairs, parameter),
        ensembles=None if comparison else against_plain(assessment),
        column_notes=column_notes(about["data"].get("notes")),
        **quality_section(assessment, about["data"].get("pixels"), parameter.plain),
        **combined_section(assessment, k, parameter),
        **_answer(protocol, ledger, chosen, comparison),
        **_search(protocol, ledger, chosen, plain, parameter),
        **_driving(about["data"], examples),
    )


def _finals_of(protocol: Protocol) -> Callable[[Cell], list[Trial]]:
    return lambda cell: protocol.retrainings_of(cell.k, cell.learning_rate)


def _trained(
    ledger: Outcomes, pairs: Mapping[str, Cell], trials_of: Callable[[Cell], list[Trial]]
) -> dict[str, list[Outcome]]:
    """Return the finished networks of each pair, without pairs that have none."""
    groups = {
        kind: [ledger[trial] for trial in trials_of(cell) if trial in ledger]
        for kind, cell in pairs.items()
    }
    return {kind: outcomes for kind, outcomes in groups.items() if outcomes}


def _curves(
    protocol: Protocol,
    ledger: Outcomes,
    groups: Mapping[str, list[Outcome]],
    pairs: Mapping[str, Cell],
    parameter: Parameter,
) -> dict[str, Any]:
    """Return the learning curves, and the mean best epoch of each k.

    They are those of the final networks; or of the search, if training has no early stopping.
    """
    recipe = protocol.recipe
    searched = isinstance(recipe, ModuleRecipe) and recipe.patience is None
    if searched:
        groups = _trained(ledger, pairs, protocol.trials_of)
    groups = {
        kind: curved
        for kind, outcomes in groups.items()
        if (curved := [outcome for outcome in outcomes if outcome.curve])
    }
    if not groups:
        return {"curves": None}
    kept = {
        outcomes[0].trial.k: statistics.fmean(outcome.best_epoch for outcome in outcomes)
        for outcomes in groups.values()
    }
    bagged = isinstance(protocol, Bagging)
    fold = "validation" if searched else "held-out" if bagged else "early-stopping"
    return {
        "curves": figures.learning_curves(groups, fold, parameter),
        "searched": searched,
        "epochs_kept": kept.items(),
    }


def _comparison(groups: Mapping[str, list[Outcome]], positions: int) -> Comparison:
    """Return the comparison of the final networks."""
    found = compare(groups["chosen"], groups.get("plain", groups["chosen"]), positions)
    return replace(found, error=possible(found.error))


def _answer(
    protocol: Protocol, ledger: Outcomes, chosen: Cell | None, comparison: Comparison | None
) -> dict[str, Any]:
    """Return the evidence on k from the test set, and its caveats."""
    open_ks = protocol.open_ks(ledger)
    if not comparison:
        return {"verdict": None, "open_ks": open_ks}
    found = verdict(comparison)
    others = [cell for cell in protocol.best_of_each_k(ledger) if cell.k != protocol.baseline]
    second = protocol.best(others, protocol.baseline) if found.kind == "same" and others else None
    return {
        "verdict": found,
        "comparison": comparison,
        "unfinished": unfinished(comparison),
        "diverged": diverged(comparison),
        "differences": None if found.kind == "same" else figures.differences(comparison),
        "second": second,
        "behind": second and _against(second, chosen),
        "ties": [
            f"{protocol.parameter} = {fraction(cell.k)} (rate {cell.learning_rate:.3g})"
            for cell in protocol.ties(ledger)
        ],
        "open_ks": open_ks,
    }


def _search(
    protocol: Protocol,
    ledger: Outcomes,
    chosen: Cell | None,
    plain: Cell | None,
    parameter: Parameter,
) -> dict[str, Any]:
    """Return the plot of error against k, and the heat map."""
    cells, best = protocol.cells(ledger), protocol.best_of_each_k(ledger)
    if not cells:
        return {"error_by_k": None}
    first = protocol.first_rates(ledger)
    errors, palest = [cell.error for cell in cells], figures.palest(cells)
    return {
        "error_by_k": figures.error_by_k(best, chosen, parameter),
        "k_rows": [
            (*_row(cell), _against(cell, plain))
            for cell in sorted(best, key=lambda cell: by_level(cell.k))
        ],
        "heat_map": figures.heat_map(cells, best, chosen, first[len(first) // 2], parameter),
        "heat_range": (min(errors), palest, max(errors) > palest),
        "first_rates": [f"{rate:.3g}" for rate in first],
        "cell_rows": [
            _row(cell) for cell in sorted(cells, key=lambda c: (by_level(c.k), c.learning_rate))
        ],
    }


def _row(cell: Cell) -> tuple[str, ...]:
    ends = error_interval(cell.errors)
    spread = " to ".join(map(percent, ends)) if ends else DASH
    return fraction(cell.k), f"{cell.learning_rate:.3g}", percent(cell.error), spread


def _against(cell: Cell, plain: Cell | None) -> str:
    """Return the paired difference in validation error, in percentage points."""
    if plain is None or cell == plain:
        return DASH
    difference = paired_difference(list(cell.errors), list(plain.errors))
    return interval(possible(difference), times=100)


def _driving(data: Mapping[str, Any], examples: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the examples that dominate the gradient, and the hardest of them."""
    if examples is None:
        return {"shares": None, "hardest": []}
    networks = dict(examples["networks"])
    if networks["chosen"]["k"] == networks["plain"]["k"]:
        del networks["plain"]
    return {
        "shares": figures.pull_shares(examples["edges"], networks),
        "hard_edge": examples["edges"][-2],
        "hard_shares": [
            (network["k"], network["bins"][-1]["count"],
             sum(found["count"] for found in network["bins"]), network["bins"][-1]["mass"])
            for network in networks.values()
        ],
        "hardest": [
            {
                **example,
                "row_number": example.get("row_number"),  # missing in runs of earlier versions
                "image": image(example["pixels"], data["pixels"]) if example["pixels"] else None,
            }
            for example in examples["hardest"]
        ],
    }  # fmt: skip


def _slider(k: float) -> dict[str, float]:
    """Return the slider's initial state, computed as in page.js.

    Its range is 1/16 to 4, or wider if k is outside.
    """
    at = math.log2(k)
    ends = {"low": min(-4, math.floor(at)), "high": max(2, math.ceil(at))}
    pulls = {"ratio": 9 ** min(k, 300), "easy": 0.1 ** (k - 1), "hard": 0.9 ** (k - 1)}
    return {"k": k, "at": at, **ends, **pulls}
