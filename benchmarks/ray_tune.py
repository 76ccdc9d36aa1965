"""Ray Tune as a contender of `benchmarks.modules`: eager loops that share a GPU."""

from __future__ import annotations

import functools
import logging
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.eager import Loop
from benchmarks.networks import CASES

PATIENCE = 120.0  # seconds for a run


def trial(config: dict[str, Any]) -> None:
    """Train one network as a trial of Ray Tune, which gets the error of every epoch."""
    from ray import tune

    loop = Loop(CASES[config["network"]])
    tune.report({"error": loop.epoch()})
    _meet(Path(config["folder"]), config["trials"])
    began = time.monotonic()
    for epoch in range(1, config["epochs"] + 1):
        error = loop.epoch()
        tune.report({"error": error, "epoch": epoch, "began": began, "ended": time.monotonic()})


def _meet(folder: Path, trials: int) -> None:
    """Wait until all trials have got here."""
    (folder / str(os.getpid())).touch()
    deadline = time.monotonic() + PATIENCE
    while len(list(folder.iterdir())) < trials:
        if time.monotonic() > deadline:
            raise TimeoutError("the other trials do not start")
        time.sleep(0.002)


@functools.cache
def _start(least: int = 8) -> None:
    """Start Ray on this machine, with one GPU."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    ray.init(
        num_cpus=max(least, os.cpu_count() or 1),
        num_gpus=1,
        object_store_memory=500_000_000,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )


def seconds(network: str, trials: int, epochs: int) -> tuple[float, float]:
    """Train networks with Ray Tune, each on a fraction of the GPU.

    Args:
        network: The name of the case.
        trials: The number of networks, all trained at once.
        epochs: The number of epochs after the first.

    Returns:
        The seconds of these epochs, and the other seconds of `Tuner.fit`: to start the trials,
        to train the first epoch, and to end.

    """
    _start()
    from ray import tune

    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder) / "meeting"
        meeting.mkdir()
        settings = {
            "network": network,
            "trials": trials,
            "epochs": epochs,
            "folder": str(meeting),
            "at": tune.grid_search(list(range(trials))),
        }
        tuner = tune.Tuner(
            tune.with_resources(trial, {"cpu": 1, "gpu": 1 / trials}),
            param_space=settings,
            tune_config=tune.TuneConfig(time_budget_s=PATIENCE),
            run_config=tune.RunConfig(storage_path=folder, verbose=0),
        )
        began = time.monotonic()
        found = tuner.fit()
        whole = time.monotonic() - began
    if found.errors:
        raise RuntimeError(f"{len(found.errors)} trials failed: {found.errors[0]}")
    last = [found[at].metrics or {} for at in range(len(found))]
    if len(last) < trials or any(one.get("epoch") != epochs for one in last):
        raise TimeoutError(f"the trials did not end within {PATIENCE:g} seconds")
    trained = max(one["ended"] for one in last) - min(one["began"] for one in last)
    return trained, whole - trained
