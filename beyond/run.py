"""Run the studies one after the other: trials on a fleet, then measures on the test set."""

from __future__ import annotations

import functools
import gc
import json
import subprocess
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from beyond import arrays
from beyond.data import Named, Place, classes_of, named
from beyond.measures import all_measures, log_probabilities, logits_of
from beyond.protocol import MethodProtocol
from beyond.questions import Experiment
from pseudograd import environment
from pseudograd.fleet import Fleet, Outcome, Recipe, Stop, Trial, never
from pseudograd.fleet.modules.fleet import ModuleFleet
from pseudograd.fleet.modules.training import Training
from pseudograd.fleet.recipe import ModuleRecipe, recipe_from_json
from pseudograd.fleet.trial import recipe_of
from pseudograd.search.folder import read_run
from pseudograd.search.study import Runner, Study

SESSIONS = "sessions.jsonl"
_SAMPLE = 0.5  # seconds between samples of the GPU's utilization


def opened(experiment: Experiment, results: Path) -> Study | None:
    """Return the study of an experiment for reading; None if it has not begun."""
    folder = experiment.folder(results)
    if not (folder / "run.json").exists():
        return None
    written = read_run(folder)
    settings: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in written["protocol"].items()
        if name != "kind"
    }
    recipe = recipe_from_json(written["recipe"])
    return Study(folder, MethodProtocol(recipe, **settings), written["data"])


def run(
    experiments: Sequence[Experiment],
    results: Path,
    place: Place,
    *,
    device: str,
    slots: int | None = None,
    stop: Stop = never,
    command: str = "",
    tell: Callable[[str], None] = print,
) -> bool:
    """Run or resume studies in order; return whether all are finished.

    Args:
        experiments: The studies.
        results: The folder of all studies.
        place: The folders of the data.
        device: Where to train.
        slots: The number of trainings at once; by default the network's.
        stop: Returns True when time is up. Unfinished trainings are dropped.
        command: The command line to record.
        tell: Called with lines of progress.

    Raises:
        ValueError: If studies failed; the others still run.

    """
    failed: list[str] = []
    with _session(results, command, device) as count:
        for experiment in experiments:
            study = opened(experiment, results)
            if study is not None and study.finished and not _is_open(experiment, results):
                continue
            if stop():
                return False
            began = time.monotonic()
            try:
                done = _run_one(
                    experiment, results, place, device, slots, stop, command, tell, count
                )
            except (RuntimeError, ValueError, OSError):  # go on with the others
                tell(f"{experiment.name} failed:\n{traceback.format_exc()}")
                failed.append(experiment.name)
                continue
            finally:
                gc.collect()  # frees the GPU's memory
            tell(f"{experiment.name}: {time.monotonic() - began:.1f} s" + " so far" * (not done))
            if not done:
                return False
    if failed:
        raise ValueError(f"failed, for the reasons above: {', '.join(failed)}")
    return True


def _is_open(experiment: Experiment, results: Path) -> bool:
    """Return whether a finished study still needs its found.json."""
    folder = experiment.folder(results)
    return experiment.setting.keeps and arrays.read_found(folder) is None


@dataclass
class _Count:
    trainings: int = 0


def _run_one(
    experiment: Experiment,
    results: Path,
    place: Place,
    device: str,
    slots: int | None,
    stop: Stop,
    command: str,
    tell: Callable[[str], None],
    count: _Count,
) -> bool:
    data = named(experiment.setting.data, place)
    several = 1 if device == "cpu" else slots or experiment.spec.slots
    recipe: Recipe
    kept: list[Callable[[Trial, Tensor], None]] = []
    if experiment.spec.kind == "row":
        flat = data.dataset()
        recipe = experiment.row(flat.name, flat.sha256[:16])
        runner: Runner = Fleet(flat, device).run
    else:
        training = experiment.training(classes_of(experiment.setting.data, place))
        recipe = training.recipe(data.examples.name, data.examples.sha256[:16])
        fleet = ModuleFleet(training, data.examples, device, several, keep_parameters=True)
        fleet.tell = tell
        runner = measuring(fleet.run, experiment, training, data, torch.device(device), kept)
    study = Study(experiment.folder(results), experiment.protocol(recipe), data.facts())

    def watch(progress: Any) -> None:
        count.trainings += 1
        tell(_line(experiment, progress.outcome))

    if experiment.setting.keeps:
        kept.append(functools.partial(arrays.keep, study))
    finished = study.run(runner, stop=stop, command=command, devices=(device,), watch=watch)
    if finished and experiment.setting.keeps:
        for _ in runner(deque(arrays.lost(study)), stop):  # trained on another machine
            pass
        finished = not arrays.lost(study)
        if finished:
            arrays.sum_up(study, data)
    return finished


def _line(experiment: Experiment, outcome: Outcome) -> str:
    trial = outcome.trial
    kind = "test" if trial.split.retrain else "validation"
    return (
        f"  {experiment.name} {experiment.method.parameter}={trial.k} "
        f"rate={trial.learning_rate:g} seed={trial.seed}: {kind} error {100 * outcome.error:.2f}%"
    )


def measuring(
    runner: Runner,
    experiment: Experiment,
    training: Training,
    data: Named,
    device: torch.device,
    kept: Sequence[Callable[[Trial, Tensor], None]] = (),
) -> Runner:
    """Return a runner that also measures final networks on the test set.

    The functions in ``kept`` are called with the log-probabilities of the examples that each
    network is evaluated on.
    """
    module: list[torch.nn.Module] = []
    method, examples = experiment.method, data.examples

    def log_p(state: Any, rows: Tensor, k: Any) -> tuple[Tensor, Tensor]:
        logits = logits_of(training, module[0], state, examples, rows, device)
        if method.link is None:
            found = logits.double().log_softmax(1)
        else:
            found = log_probabilities(method.link(logits.double(), k))
        return found, examples.labels[rows].flatten().to(device)

    def measure(outcome: Outcome) -> dict[str, float] | None:
        if not module:
            module.append(training.module(0).to(device))
        trial, measures = outcome.trial, dict[str, float]()
        cut = examples.parts(recipe_of(trial, ModuleRecipe), trial.split)
        for keep in kept:
            keep(trial, log_p(outcome.state, cut.judge, trial.k)[0])
        if not trial.split.retrain:
            return None
        for prefix, state in (("", outcome.state), ("last_", outcome.last_state)):
            validation = log_p(state, cut.stop, trial.k)
            found = all_measures(*log_p(state, cut.judge, trial.k), validation)
            measures |= {f"{prefix}{name}": round(value, 6) for name, value in found.items()}
        return measures

    def run(trials: deque[Trial], stop: Stop) -> Iterator[Outcome]:
        for outcome in runner(trials, stop):
            needed = outcome.trial.split.retrain or kept
            if outcome.state is not None and needed and outcome.stopped_by != "diverged":
                yield replace(outcome, measures=measure(outcome))
            else:
                yield outcome

    return run


@contextmanager
def _session(results: Path, command: str, device: str) -> Iterator[_Count]:
    """Record the command, its duration and the GPU utilization."""
    record, count = environment.session(command, device), _Count()
    began = time.monotonic()
    with _watched(device) as busy:
        try:
            yield count
        finally:
            record["seconds"] = round(time.monotonic() - began, 1)
            record["trainings"] = count.trainings
            if busy:
                record["busy"] = round(sum(busy) / len(busy) / 100, 3)
            if count.trainings:
                results.mkdir(parents=True, exist_ok=True)
                with (results / SESSIONS).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")


@contextmanager
def _watched(device: str) -> Iterator[list[float]]:
    """Sample the GPU utilization that the driver reports."""
    samples: list[float] = []
    if not device.startswith("cuda"):
        yield samples
        return
    command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    command += ["-lms", str(int(1000 * _SAMPLE))]
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    except FileNotFoundError:
        yield samples
        return

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with suppress(ValueError):
                samples.append(float(line))

    threading.Thread(target=read, daemon=True).start()
    try:
        yield samples
    finally:
        process.terminate()
        process.wait()
