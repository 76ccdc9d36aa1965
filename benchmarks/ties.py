"""Of equally good epochs, the first or the last: test accuracy of the classifier on small data.

    python -m benchmarks.ties

Every classifier is fitted twice to the same rows, with the same folds, weights and orders, and its
search goes on by what it finds. Rows are cut into five parts for testing, several times.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

from sklearn import datasets
from sklearn.model_selection import StratifiedKFold

from benchmarks.environment import RESULTS, environment, write
from pseudograd import TunableMLPClassifier, estimator
from pseudograd.fleet import MLPRecipe
from pseudograd.fleet.recipe import TIES
from pseudograd.search import paired_difference

SETS = {"iris": 6, "wine": 6, "breast_cancer": 6, "digits": 3}  # how often each is cut
MOST_ROWS = 600
HIDDEN = (100,)


def accuracy(ties: str, seed: int, train: Any, test: Any) -> float:
    """Of a classifier that is fitted so."""

    def recipe(*arguments: Any, **settings: Any) -> MLPRecipe:
        return MLPRecipe(*arguments, **(settings | {"ties": ties}))

    with mock.patch.object(estimator, "MLPRecipe", recipe), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of networks that might have learned on
        model = TunableMLPClassifier(HIDDEN, random_state=seed).fit(*train)
    return float(model.score(*test))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=RESULTS / "ties.csv")
    out = parser.parse_args().out
    facts, lines = environment("cpu"), []
    for name, cuts in SETS.items():
        features, labels = getattr(datasets, f"load_{name}")(return_X_y=True)
        features, labels = features[:MOST_ROWS], labels[:MOST_ROWS]
        found: dict[str, list[float]] = {ties: [] for ties in TIES}
        for seed in range(cuts):
            folds = StratifiedKFold(5, shuffle=True, random_state=seed).split(features, labels)
            for train, test in folds:
                for ties in TIES:
                    parts = [(features[part], labels[part]) for part in (train, test)]
                    found[ties].append(accuracy(ties, seed, *parts))
        gain = paired_difference(found["last"], found["first"])
        means = {ties: statistics.fmean(found[ties]) for ties in TIES}
        print(f"{name}: {len(labels)} rows, {len(found['first'])} fits, first {means['first']:.4f},"
              f" last {means['last']:.4f}, gain {gain.mean:+.4f} ({gain.low:+.4f} to"
              f" {gain.high:+.4f})", flush=True)  # fmt: skip
        lines.append(
            {"data": name, "rows": len(labels), "fits": len(found["first"]),
             "accuracy_first": f"{means['first']:.4f}", "accuracy_last": f"{means['last']:.4f}",
             "gain": f"{gain.mean:.4f}", "gain_low": f"{gain.low:.4f}",
             "gain_high": f"{gain.high:.4f}", **facts}
        )  # fmt: skip
    write(lines, out)


if __name__ == "__main__":
    main()
