"""Ledgers of experiments that were never run, with the answers one would like to see."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from pathlib import Path

from paper.rows import Experiment, by_network
from paper.run import ledger_of
from pseudograd.data.registry import BENCHMARKS
from pseudograd.fleet import Outcome, Trial
from pseudograd.search import Protocol
from pseudograd.search.ledger import _without_defaults, to_line

BEST_K = {1: 0.25, 2: 2.0, 3: 1.0, 5: 4.0}
BEST_RATE = 0.125


def made_up(trial: Trial) -> Outcome:
    """An error that grows with the distance from the best k and rate; cross-entropy falls with k.

    Some of it is chance, which depends on the trial alone.
    """
    best = BEST_K[len(trial.hidden_layer_sizes)]
    distance = abs(math.log2(trial.k / best)) + abs(math.log2(trial.learning_rate / BEST_RATE))
    chance = random.Random(repr(_without_defaults(trial))).random()
    error = 0.1 + 0.01 * distance + 0.001 * chance
    final = trial.split.retrain
    return Outcome(
        trial,
        stop_error=error,
        best_epoch=1,
        error=error,
        cross_entropy=(1 + 0.01 * chance) / trial.k,
        epochs=2,
        stopped_by="patience",
        curve=(error, error) if final else (),
        wrong=(1, 2) if final else None,
    )


def search(protocol: Protocol, outcomes: dict[Trial, Outcome]) -> None:
    """Answer until nothing is wanted any more."""
    while wanted := protocol.wanted(outcomes):
        outcomes |= {trial: made_up(trial) for trial in wanted}


def write(folder: Path, experiments: Iterable[Experiment], smoke: bool = False) -> None:
    """Write the ledgers of some experiments, and a manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    networks = {}
    for network, group in by_network(list(experiments)).items():
        outcomes: dict[Trial, Outcome] = {}
        for experiment in group:
            search(experiment.smoke() if smoke else experiment.protocol(), outcomes)
        lines = [to_line(outcome) for outcome in outcomes.values()]
        ledger_of(folder, network).path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        networks[network] = {"trials": len(lines), "epochs": 2 * len(lines), "seconds": 36.0}
    session = {
        "command": "python -m paper run all",
        "smoke": smoke,
        "started": "2026-01-01T12:00:00+00:00",
        "seconds": 36.0 * len(networks) + 24,
        "hardware": "a <GPU> & more",
        "versions": {"pseudograd": "0.1.0", "python": "3.12.3", "torch": "2.11.0", "triton": ""},
        "commit": "0123456789ab",
        "data": {
            data: next(iter(BENCHMARKS[data].contents), "0" * 64)
            for data in dict.fromkeys(network.split()[0] for network in networks)
        },
        "networks": networks,
    }
    text = json.dumps([session], indent=1) + "\n"
    (folder / "manifest.json").write_text(text, encoding="utf-8")
