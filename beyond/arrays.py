"""Questions 4 and 6: probabilities of networks, kept as arrays and summarized in found.json."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from beyond.data import Named
from beyond.protocol import MethodProtocol
from pseudograd.files import write_whole
from pseudograd.fleet import Trial
from pseudograd.fleet.recipe import ModuleRecipe
from pseudograd.fleet.trial import recipe_of
from pseudograd.search.ledger import trial_name
from pseudograd.search.study import Study

Floats = NDArray[np.float64]
FOUND, _ARRAYS = "found.json", "arrays"
ENSEMBLE = 5


def path_of(study: Study, trial: Trial) -> Path:
    """Return the path of the log-probabilities of a trial's network; they are not committed."""
    assert study.folder is not None
    return study.folder / _ARRAYS / f"{trial_name(trial)}.npy"


def keep(study: Study, trial: Trial, log_p: Tensor) -> None:
    """Save the log-probabilities of the examples that a trial is evaluated on."""
    path = path_of(study, trial)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, log_p.clamp(min=-60).cpu().numpy().astype(np.float16))


def lost(study: Study) -> list[Trial]:
    """Return the final trials whose probabilities are missing."""
    wanted = study.protocol.final_trials(study.ledger)
    return [trial for trial in wanted if not path_of(study, trial).exists()]


def sum_up(study: Study, data: Named) -> None:
    """Write found.json from the arrays."""
    protocol = study.protocol
    assert isinstance(protocol, MethodProtocol)
    assert study.folder is not None
    found = suspects_found(study, data) if protocol.folds else ensembles_found(study, data)
    write_whole(study.folder / FOUND, json.dumps(found, indent=1) + "\n")


def read_found(folder: Path) -> dict[str, Any] | None:
    """Return the content of found.json; None if it does not exist."""
    path = folder / FOUND
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _by_k(study: Study) -> dict[float, list[Trial]]:
    found: dict[float, list[Trial]] = {}
    for trial in study.protocol.final_trials(study.ledger):
        found.setdefault(float(trial.k), []).append(trial)  # type: ignore[arg-type]
    return found


def _probabilities(study: Study, trial: Trial, scaled: bool = False) -> Floats:
    log_p: Floats = np.load(path_of(study, trial)).astype(np.float64)
    if scaled:
        log_p = log_p / (study.ledger[trial].measures or {})["temperature"]
        log_p = log_p - log_p.max(1, keepdims=True)
    p: Floats = np.exp(log_p)
    p /= p.sum(1, keepdims=True)
    return p


# --- question 4: ensembles -----------------------------------------------------------------------


def ensembles_found(study: Study, data: Named) -> dict[str, Any]:
    """Return the errors of ensembles of one k and of mixed k, raw and after scaling.

    Every subset of five seeds makes an ensemble of each kind; a mixed one has one network of each
    k. For the jackknife, the result also has the means without each seed.
    """
    labels = data.examples.labels[data.examples.train_size :].numpy()
    by_k = _by_k(study)
    found: dict[str, Any] = {}
    for way in ("raw", "scaled"):
        p = {
            k: [_probabilities(study, trial, way == "scaled") for trial in trials]
            for k, trials in by_k.items()
        }
        kinds = {f"k = {k:g}": [p[k]] * ENSEMBLE for k in p}
        kinds["mixed"] = [p[k] for k in itertools.islice(itertools.cycle(p), ENSEMBLE)]
        for kind, members in kinds.items():
            found[f"{kind}, {way}"] = ensemble_errors(members, labels)
    return found


def ensemble_errors(
    members: Sequence[Sequence[Floats]], labels: NDArray[np.integer[Any]]
) -> dict[str, Any]:
    """Return the mean error of ensembles over subsets of the seeds, also without each seed.

    Seeds rotate within a subset, so that each takes every position equally often.

    Args:
        members: For each position in the ensemble, the probabilities of the networks by seed.
        labels: The true classes.

    """
    seeds = len(members[0])
    size = min(len(members), seeds - 1)
    turns = size if any(one is not members[0] for one in members) else 1
    errors = {}
    for subset in itertools.combinations(range(seeds), size):
        found = []
        for turn in range(turns):
            total = sum(members[(at + turn) % size][seed] for at, seed in enumerate(subset))
            found.append(float((np.asarray(total).argmax(1) != labels).mean()))
        errors[subset] = float(np.mean(found))
    without = [
        float(np.mean([error for subset, error in errors.items() if seed not in subset]))
        for seed in range(seeds)
    ]
    return {"error": float(np.mean([*errors.values()])), "without": without}


def jackknife(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[float, float]:
    """Return the mean difference of two kinds of ensembles and its standard error over seeds."""
    differences = np.subtract(first["without"], second["without"])
    share = (len(differences) - 1) / len(differences)
    error = math.sqrt(share * float(((differences - differences.mean()) ** 2).sum()))
    return first["error"] - second["error"], error


# --- question 6: wrong labels --------------------------------------------------------------------

SCORES = ("self-confidence", "margin", "adjusted self-confidence", "adjusted margin")


def suspects_found(study: Study, data: Named) -> dict[str, Any]:
    """Return how well each k finds wrong labels from out-of-fold probabilities."""
    given = data.examples.labels[: data.examples.train_size].numpy()
    wrong = given != data.clean
    found: dict[str, Any] = {}
    for k, trials in _by_k(study).items():
        p = np.full((len(given), int(data.clean.max()) + 1), np.nan)
        by_fold = []
        for trial in trials:
            recipe = recipe_of(trial, ModuleRecipe)
            judge = data.examples.parts(recipe, trial.split).judge.numpy()
            p[judge] = _probabilities(study, trial)
            own = p[judge, given[judge]]
            by_fold.append(round(auroc(-own, wrong[judge]), 6))
        known = ~np.isnan(p[:, 0])  # folds have equal sizes, so a few examples may be in none
        found[f"{k:g}"] = {
            name: {
                "auroc": round(auroc(-score, wrong[known]), 6),
                "average_precision": round(average_precision(-score, wrong[known]), 6),
            }
            for name, score in label_scores(p[known], given[known]).items()
        } | {"by fold": by_fold}
    return found


def label_scores(p: Floats, labels: NDArray[np.integer[Any]]) -> dict[str, Floats]:
    """Return scores of labels by the names in `SCORES`; a low score suggests a wrong label.

    The adjusted scores are those of confident learning (Northcutt et al., 2021) as in cleanlab:
    each class's probability minus its mean over the examples with that label.

    Example:
        >>> p = np.array([[0.9, 0.1], [0.6, 0.4]])
        >>> scores = label_scores(p, np.array([0, 1]))
        >>> scores["self-confidence"].tolist(), scores["margin"].round(2).tolist()
        ([0.9, 0.4], [0.8, -0.2])

    """
    classes = p.shape[1]
    thresholds = np.array(
        [p[labels == at, at].mean() if (labels == at).any() else 1.0 for at in range(classes)]
    )
    adjusted = p - thresholds + thresholds.max()
    adjusted /= adjusted.sum(1, keepdims=True)
    return dict(zip(SCORES, (*_scores(p, labels), *_scores(adjusted, labels)), strict=True))


def _scores(p: Floats, labels: NDArray[np.integer[Any]]) -> tuple[Floats, Floats]:
    rows = np.arange(len(labels))
    own = p[rows, labels]
    others = p.copy()
    others[rows, labels] = -np.inf
    return own, own - others.max(1)


def auroc(score: Floats, positive: NDArray[np.bool_]) -> float:
    """Return the probability that a positive example has a higher score than a negative one.

    Example:
        >>> auroc(np.array([0.1, 0.4, 0.35, 0.8]), np.array([False, False, True, True]))
        0.75

    """
    high, low = score[positive], np.sort(score[~positive])
    below, up_to = (np.searchsorted(low, high, side) for side in ("left", "right"))
    return float((below + up_to).mean() / (2 * len(low)))  # ties count half


def average_precision(score: Floats, positive: NDArray[np.bool_]) -> float:
    """Return the mean precision at each positive example, as in scikit-learn.

    Example:
        >>> found = average_precision(np.array([0.1, 0.4, 0.35, 0.8]), np.array([0, 0, 1, 1]) > 0)
        >>> round(found, 4)
        0.8333

    """
    order = np.argsort(-score, kind="stable")
    hits = positive[order]
    precision = np.cumsum(hits) / np.arange(1, len(hits) + 1)
    return float(precision[hits].mean())
