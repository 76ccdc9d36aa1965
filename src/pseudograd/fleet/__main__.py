"""``python -m pseudograd.fleet``: a hundred networks trained on the digits, and a table of them."""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence

import torch
from tqdm import tqdm

from pseudograd.data import digits
from pseudograd.fleet import Fleet, Split, Trial

KS = (2.0, 1.0, 0.5, 0.25)
RATES = (0.05, 0.1, 0.2, 0.4, 0.8)
REPETITIONS = 5


def main(arguments: Sequence[str] | None = None) -> None:
    """Train for every k, learning rate and repetition; print the best rate of each k."""
    argparse.ArgumentParser(
        prog="python -m pseudograd.fleet",
        description="Train a hundred networks on the digits, which takes seconds, and print the "
        "best learning rate of each k. There is nothing to choose; pseudograd tune has options.",
    ).parse_args(arguments)
    trials = [
        Trial("digits", (32,), k, rate, momentum=0.5, split=Split(repetition=run), seed=run)
        for k, rate, run in itertools.product(KS, RATES, range(REPETITIONS))
    ]
    torch.set_num_threads(1)  # networks this small are done before a second thread wakes up
    started = time.perf_counter()
    errors = defaultdict(list)
    running = Fleet(digits()).run(trials)
    # On a terminal only: tqdm looks for one if ``disable`` is None.
    for outcome in tqdm(running, "fleet", len(trials), unit="network", leave=False, disable=None):
        errors[outcome.trial.k, outcome.trial.learning_rate].append(100 * outcome.error)
    seconds = time.perf_counter() - started

    print(f"{'k':>5} {'best rate':>10}   validation error, %")
    for k in KS:
        rate = min(RATES, key=lambda rate: statistics.mean(errors[k, rate]))
        mean, spread = statistics.mean(errors[k, rate]), statistics.stdev(errors[k, rate])
        print(f"{k:5g} {rate:10g}   {mean:.2f} ± {spread / REPETITIONS**0.5:.2f}")
    print(f"{len(trials)} networks in {seconds:.1f} seconds, ± of the mean of {REPETITIONS} runs")


if __name__ == "__main__":
    main()
