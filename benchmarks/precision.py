"""Compare training in the fleet's reduced precision with float32, on experiments of the paper.

    python -m benchmarks.precision --out benchmarks/results/precision.csv

The data is MNIST (`pseudograd data fetch mnist`). Each trial is run twice, with the same initial
weights and order of examples. Training is chaotic, so the two diverge even if both precisions are
equally good, but neither should be better on average. The spread over seeds is the yardstick.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from pathlib import Path

from benchmarks.environment import environment, write
from pseudograd.data import Dataset, load
from pseudograd.fleet import Fleet, MLPRecipe, Outcome, Split, Trial

SEEDS = 4


def rows() -> dict[str, list[Trial]]:
    """Return trials at good learning rates, with and without clipping."""
    shallow = Trial(MLPRecipe("mnist", (400,), momentum=0.5), k=0.5, learning_rate=0.1)
    deep_recipe = MLPRecipe("mnist", (400,) * 3, momentum=0.5, clip=100.0)
    deep = Trial(deep_recipe, k=1.0, learning_rate=0.05)
    return {
        name: [
            replace(trial, split=Split(0, repetition), seed=seed)
            for repetition in range(10)
            for seed in range(SEEDS)
        ]
        for name, trial in (("mnist 1x400 k=1/2", shallow), ("mnist 3x400 k=1", deep))
    }


def outcomes(data: Dataset, trials: list[Trial], precision: str) -> list[Outcome]:
    fleet = Fleet(data, "cuda", precision=precision)
    found = {outcome.trial: outcome for outcome in fleet.run(trials)}
    return [found[trial] for trial in trials]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    data = load("mnist")
    facts = {**environment(), "data_sha256": data.sha256}
    lines = []
    for name, trials in rows().items():
        fast = [100 * outcome.error for outcome in outcomes(data, trials, "tf32")]
        full = [100 * outcome.error for outcome in outcomes(data, trials, "float32")]
        differences = [a - b for a, b in zip(fast, full, strict=True)]
        standard_error = statistics.stdev(differences) / len(differences) ** 0.5
        between_seeds = statistics.mean(
            statistics.stdev(full[at : at + SEEDS]) for at in range(0, len(full), SEEDS)
        )
        line = {
            "row": name,
            "trials": len(trials),
            "error_tf32_pct": round(statistics.mean(fast), 4),
            "error_float32_pct": round(statistics.mean(full), 4),
            "difference_pct": round(statistics.mean(differences), 4),
            "standard_error_pct": round(standard_error, 4),
            "sd_between_seeds_pct": round(between_seeds, 4),
            **facts,
        }
        lines.append(line)
        print(line, flush=True)
        write(lines, arguments.out)


if __name__ == "__main__":
    main()
