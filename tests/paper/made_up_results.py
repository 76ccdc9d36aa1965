"""Made-up studies of experiments, with the outcomes that a test needs."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from paper.rows import Experiment
from paper.run import folder_of
from pseudograd.data.benchmarks import BENCHMARKS
from pseudograd.fleet import Outcome, Trial
from pseudograd.fleet.ramp import level
from pseudograd.search.ledger import outcome_to_json, trial_to_json
from trials import recipe_of

BEST_K = {1: 0.25, 2: 2.0, 3: 1.0, 5: 4.0}
BEST_RATE = 0.125
SECONDS = 36.0  # of each study; reading the data takes 2 more


def made_up(trial: Trial) -> Outcome:
    """An error that grows with the distance from the best k and rate; cross-entropy falls with k.

    Some of it is noise, which depends only on the trial.
    """
    best = BEST_K[len(recipe_of(trial).hidden_layer_sizes)]
    k = level(trial.k)
    distance = abs(math.log2(k / best)) + abs(math.log2(trial.learning_rate / BEST_RATE))
    chance = random.Random(repr(trial_to_json(trial))).random()
    error = 0.1 + 0.01 * distance + 0.001 * chance
    final = trial.split.retrain
    return Outcome(
        trial,
        stop_error=error,
        best_epoch=1,
        error=error,
        cross_entropy=(1 + 0.01 * chance) / k,
        epochs=2,
        stopped_by="patience",
        curve=(error, error) if final else (),
        wrong=(1, 2) if final else None,
    )


def write(
    folder: Path,
    experiments: Iterable[Experiment],
    smoke: bool = False,
    outcome_of: Callable[[Trial], Outcome] = made_up,
) -> None:
    """Write the studies of some experiments, run one after another by one call."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, experiment in enumerate(experiments):
        name = experiment.row.data
        sha256 = next(iter(BENCHMARKS[name].contents), "0" * 64)
        protocol = (experiment.smoke if smoke else experiment.protocol)(sha256[:16])
        outcomes: dict[Trial, Outcome] = {}
        while wanted := protocol.wanted(outcomes):
            outcomes |= {trial: outcome_of(trial) for trial in wanted}
        started = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=(SECONDS + 2) * number)
        session = {
            "command": "python -m paper run all",
            "started": started.isoformat(),
            "seconds": SECONDS,
            "hardware": "a <GPU> & more",
            "versions": {"pseudograd": "0.1.0", "python": "3.12.3", "torch": "2.11.0"},
            "commit": "0123456789ab",
            "devices": ["cuda"],
            "trials": len(outcomes),
        }
        description = {
            "recipe": protocol.recipe.to_json(),
            "protocol": protocol.settings(),
            "data": {"name": name, "sha256": sha256},
            "sessions": [session],
        }
        own = folder_of(experiment, folder)
        own.mkdir()
        (own / "run.json").write_text(json.dumps(description), "utf-8")
        lines = [json.dumps(outcome_to_json(outcome)) + "\n" for outcome in outcomes.values()]
        (own / "ledger.jsonl").write_text("".join(lines), "utf-8")


def change_sessions(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change what the studies of a folder record about their data and sessions."""
    for path in folder.glob("*/run.json"):
        described = json.loads(path.read_text("utf-8"))
        change(described)
        path.write_text(json.dumps(described), "utf-8")
