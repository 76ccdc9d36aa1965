"""Compare the time of the tuner's search with the same search by other means, in one run.

    python -m benchmarks.tune

The search has seven k, three learning rates and ten repetitions on scikit-learn's digits, with a
hidden layer of 400 and the paper's training: 210 networks, each trained on three folds, stopped
early by a fourth and validated on the fifth. It is run by the tuner, including its ledger on disk;
by a plain PyTorch loop over the same trials; and by scikit-learn's GridSearchCV over MLPClassifier
on the same folds, with one process per core. MLPClassifier has no k, so its penalty ``alpha``, with
as many values, is the second axis of the grid.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.environment import RESULTS, environment, write
from pseudograd import TunableCrossEntropyLoss
from pseudograd.data import Dataset, digits
from pseudograd.environment import version
from pseudograd.fleet import Fleet, MLPRecipe, Split, Trial, parts, randomness
from pseudograd.fleet.ramp import level
from pseudograd.search import Protocol, Study, ks_for

RATES = (0.25, 0.5, 1.0)
HIDDEN, MOMENTUM, PATIENCE = 400, 0.5, 15
PENALTIES = (0.0, 1e-5, 1e-4, 1e-3, 1e-2, 0.03, 0.1)


# As in `pseudograd tune`.
RECIPE = MLPRecipe("digits", (HIDDEN,), momentum=MOMENTUM, patience=PATIENCE, ties="last")


def search(repetitions: int) -> Protocol:
    """Return a protocol for the grid alone: no added rates, no retraining."""
    return Protocol(RECIPE, ks_for(1), None, RATES, repetitions, retrainings=0, most_extensions=0)


def by_the_tuner(protocol: Protocol) -> tuple[float, float]:
    """Return the seconds and the lowest mean validation error."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        study = Study(Path(folder, "run"), protocol)
        study.run(Fleet(digits()).run)
        best, _ = protocol.chosen(study.ledger)
    return time.perf_counter() - start, best.error


def by_a_plain_loop(trials: list[Trial]) -> tuple[float, float]:
    """Train one network after another in a plain PyTorch loop.

    It uses the tuner's initial weights and shuffles, so it trains the same networks. Drawing the
    shuffles is not timed, since PyTorch's own generator is faster.
    """
    start = time.perf_counter()
    drawing = 0.0
    data = digits()
    features = data.features.float() / 8 - 1
    errors = defaultdict(list)
    for trial in trials:
        error, seconds = train(trial, data, features)
        errors[trial.k, trial.learning_rate].append(error)
        drawing += seconds
    seconds = time.perf_counter() - start - drawing
    return seconds, min(map(statistics.fmean, errors.values()))


def train(trial: Trial, data: Dataset, features: Tensor) -> tuple[float, float]:
    """Return the validation error and the seconds spent drawing shuffles."""
    cut, seed, labels = parts(data, trial.split), torch.tensor([trial.seed]), data.labels
    hidden, last = nn.Linear(64, HIDDEN), nn.Linear(HIDDEN, 10)
    with torch.no_grad():
        # The same initial weights as the tuner's.
        hidden.weight.copy_(randomness.glorot_uniform(seed, 0, 64, HIDDEN)[0].T)
    for parameter in (hidden.bias, last.weight, last.bias):
        nn.init.zeros_(parameter)
    network = nn.Sequential(hidden, nn.ReLU(), last)
    optimizer = torch.optim.SGD(network.parameters(), trial.learning_rate, MOMENTUM)
    criterion = TunableCrossEntropyLoss(k=level(trial.k))

    @torch.no_grad()
    def error(index: Tensor) -> float:
        wrong = network(features[index]).argmax(1) != labels[index]
        return float(wrong.float().mean())

    best, judged, since, epoch, drawing = 2.0, 1.0, 0, 0, 0.0
    while since < PATIENCE:
        start = time.perf_counter()
        order = randomness.order(seed, torch.tensor([epoch]), len(cut.train))[0]
        drawing += time.perf_counter() - start
        for index in cut.train[order].split(RECIPE.batch_size):
            optimizer.zero_grad()
            criterion(network(features[index]), labels[index]).backward()
            optimizer.step()
        now = error(cut.stop)
        since, epoch = since + 1, epoch + 1
        if now < best:
            best, since = now, 0
        if now == best:
            judged = error(cut.judge)
    return judged, drawing


def by_scikit_learn(repetitions: int) -> tuple[float, float]:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.model_selection import GridSearchCV
    from sklearn.neural_network import MLPClassifier

    data = digits()
    features = (data.features.float() / 8 - 1).numpy()
    labels = data.labels.numpy()
    folds = []
    for repetition in range(repetitions):
        cut = parts(data, Split(0, repetition))
        # MLPClassifier holds out its own early-stopping set: a quarter of four folds.
        folds.append((torch.cat((cut.train, cut.stop)).numpy(), cut.judge.numpy()))
    network = MLPClassifier(
        (HIDDEN,),
        solver="sgd",
        batch_size=128,
        momentum=MOMENTUM,
        nesterovs_momentum=False,
        early_stopping=True,
        validation_fraction=0.25,
        n_iter_no_change=PATIENCE,
        tol=0.0,
        max_iter=1000,
        random_state=0,
    )
    grid = {"alpha": PENALTIES, "learning_rate_init": RATES}
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        found = GridSearchCV(network, grid, cv=folds, n_jobs=os.cpu_count(), refit=False)
        found.fit(features, labels)
    return time.perf_counter() - start, 1 - found.best_score_


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--out", type=Path, default=RESULTS / "tune_cpu.csv")
    options = parser.parse_args()
    protocol = search(options.repetitions)
    trials = protocol.wanted({})
    assert len(trials) == len(list(itertools.product(PENALTIES, RATES))) * options.repetitions
    facts = {**environment("cpu"), "scikit-learn": version("scikit-learn")}
    by_the_tuner(search(1))  # warm up
    rows: list[dict[str, object]] = []
    for way, (seconds, error) in (
        ("pseudograd tune", by_the_tuner(protocol)),
        ("plain PyTorch loop", by_a_plain_loop(trials)),
        ("GridSearchCV over MLPClassifier", by_scikit_learn(options.repetitions)),
    ):
        ratio = seconds / float(str(rows[0]["seconds"])) if rows else 1.0
        print(f"{way:<32} {seconds:7.1f} s  {ratio:5.2f}x  best validation error {error:.2%}")
        rows.append(
            {
                "way": way,
                "networks": len(trials),
                "seconds": f"{seconds:.1f}",
                "times_as_long": f"{ratio:.2f}",
                "best_validation_error": f"{error:.4f}",
                **facts,
            }
        )
    write(rows, options.out)


if __name__ == "__main__":
    main()
