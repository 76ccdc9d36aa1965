"""Measure microseconds per model and step of any network: our graphs against alternatives.

    python -m benchmarks.modules --compile-only
    python -m benchmarks.modules --out benchmarks/results/modules_cuda.csv

All figures cover whole trainings: shuffling, gathering batches on the device, training, and an
evaluation after every epoch. Images are in the channels-last layout. The contenders:

- eager: a PyTorch loop, one training at a time;
- compiled: the same with torch.compile(mode="reduce-overhead"), whose steps are CUDA graphs;
- 4 and 8 trials of Ray Tune: the eager loop, each trial on a quarter or an eighth of the GPU;
- graphs: `ModuleFleet`, 8 trials at once, compiled or not.

`microseconds` is the time of `models` trainings of `steps` steps each, divided by both. For us it
includes the creation of slots, weights and graphs. For all others it begins after an epoch of each
model, when all of them are ready. `first_seconds` is what comes before:

- eager, compiled: the first epoch, with compilation;
- Ray Tune: all of `Tuner.fit` but the time above, so the start of the trials (without that of Ray)
  and their first epoch;
- graphs: a whole training, with compilation.

So, all in, a model and step takes `microseconds` + `first_seconds` / (`models` × `steps`).

The first command fills the caches of compiled kernels for the second one, whose `first_seconds` are
then shorter; it may run beside other programs. The second one takes about five minutes, and needs
Ray and the GPU for itself. The file is written after each contender.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks import ray_tune
from benchmarks.eager import MOMENTUM, RATE, VALIDATION, Loop, noise
from benchmarks.environment import RESULTS, environment, write
from benchmarks.networks import CASES, EXAMPLES, Case
from pseudograd.fleet.modules.examples import Examples
from pseudograd.fleet.modules.fleet import ModuleFleet
from pseudograd.fleet.modules.training import Training
from pseudograd.fleet.trial import Split, Trial

SHARES = (4, 8)  # trials of others on the GPU
TRIALS = 16  # graphs that are not compiled get half as many, half as long

Figures = dict[str, float]


def speed(seconds: float, models: int, steps: int, **more: float) -> Figures:
    return {
        "microseconds": seconds / (models * steps) * 1e6, "models": models, "steps": steps, **more
    }  # fmt: skip


def loop(name: str, compiled: bool, epochs: int | None = None) -> Figures:
    """Train one network in the eager loop."""
    case = CASES[name]
    epochs = epochs or max(1, case.epochs // 2)
    one = Loop(case, compiled)
    first = one.seconds(1)
    return speed(one.seconds(epochs), 1, epochs * one.steps, first_seconds=first)


def ray(name: str, count: int) -> Figures:
    """Train networks with Ray Tune."""
    epochs = max(1, CASES[name].epochs // 2)
    trained, rest = ray_tune.seconds(name, count, epochs)
    return speed(trained, count, epochs * steps_of(CASES[name]), first_seconds=rest)


def steps_of(case: Case) -> int:
    """Return the number of steps of an epoch."""
    return (EXAMPLES - int(EXAMPLES * VALIDATION)) // case.batch_size


def prepared(case: Case, epochs: int, compiled: bool) -> tuple[Training, Examples]:
    """Return the training and the data for our fleet."""
    x, y = noise(case.shape)
    training = Training(
        case.network,
        torch.optim.SGD,
        {"momentum": MOMENTUM},
        epochs=epochs,
        batch_size=case.batch_size,
        validation=VALIDATION,
        precision=case.precision,
        compile=compiled,
    )
    return training, Examples.of((x, y), (x[:1000], y[:1000]))


def graphs(name: str, compiled: bool) -> Figures:
    """Train networks in our fleet."""
    case = CASES[name]
    epochs = case.epochs if compiled else case.epochs // 2
    count = TRIALS if compiled else TRIALS // 2
    fleet, trials = made(case, compiled, epochs, count)
    began = time.perf_counter()
    list(fleet.run(trials[:1]))
    first = time.perf_counter() - began
    torch.cuda.synchronize()
    with watched() as busy:
        began = time.perf_counter()
        done = list(fleet.run(trials))
        torch.cuda.synchronize()
        passed = time.perf_counter() - began
    assert len(done) == count, fleet.notes
    print("   ", fleet.notes, flush=True)
    return speed(
        passed, count, epochs * steps_of(case),
        first_seconds=first, busy=sum(busy) / max(1, len(busy)),
    )  # fmt: skip


def made(case: Case, compiled: bool, epochs: int, count: int) -> tuple[ModuleFleet, list[Trial]]:
    """Return our fleet and its trials."""
    training, examples = prepared(case, epochs, compiled)
    recipe = training.recipe("noise")
    trials = [Trial(recipe, 0.5, RATE, Split(0, at), seed=at) for at in range(count)]
    return ModuleFleet(training, examples, "cuda"), trials


@contextmanager
def watched() -> Iterator[list[float]]:
    """Sample the GPU utilization that the driver reports."""
    samples: list[float] = []
    command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms",
               "100"]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as smi:

        def read() -> None:
            samples.extend(float(line) / 100 for line in smi.stdout)  # type: ignore[union-attr]

        reader = threading.Thread(target=read)
        reader.start()
        try:
            yield samples
        finally:
            smi.terminate()
            reader.join()


WAYS: dict[str, Callable[[str], Figures]] = {
    "eager": functools.partial(loop, compiled=False),
    "compiled, reduce-overhead": functools.partial(loop, compiled=True),
    **{f"{count} trials of Ray Tune": functools.partial(ray, count=count) for count in SHARES},
    "graphs": functools.partial(graphs, compiled=False),
    "graphs, compiled": functools.partial(graphs, compiled=True),
}


def jobs(names: list[str]) -> Iterator[tuple[str, str]]:
    """Yield networks and ways to train them, in the order in which they are measured."""
    for name in names:
        for way in ("eager", "compiled, reduce-overhead", "graphs, compiled"):
            yield name, way
    for count in reversed(SHARES):
        for name in names:
            yield name, f"{count} trials of Ray Tune"
    for name in names:
        yield name, "graphs"


def compile_all(names: list[str]) -> None:
    """Train for an epoch all that is compiled."""
    for name in names:
        torch.compiler.reset()
        print(name, loop(name, compiled=True, epochs=1), flush=True)
        torch.compiler.reset()
        fleet, trials = made(CASES[name], compiled=True, epochs=1, count=1)
        began = time.perf_counter()
        list(fleet.run(trials))
        print(name, f"graphs: {time.perf_counter() - began:.1f} s", fleet.notes, flush=True)


def table(found: dict[tuple[str, str], Figures], about: dict[str, Any]) -> list[dict[str, object]]:
    """Return the lines of the file, by network."""
    rows: list[dict[str, object]] = []
    for name, case in CASES.items():
        eager = found.get((name, "eager"), {}).get("microseconds")
        for way in WAYS:
            if figures := found.get((name, way)):
                spent = figures["microseconds"]
                rows.append({
                    "network": name,
                    "batch_size": case.batch_size,
                    "precision": case.precision,
                    "way": way,
                    "microseconds": round(spent, 1),
                    "models": figures["models"],
                    "steps": figures["steps"],
                    **{
                        more: round(figures[more], 3) if more in figures else ""
                        for more in ("first_seconds", "busy")
                    },
                    "times_eager": round(eager / spent, 2) if eager else "",
                    **about,
                })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "modules_cuda.csv")
    parser.add_argument("--networks", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--compile-only", action="store_true", help="only fill the caches")
    parser.add_argument("--time-limit", type=float, default=600, metavar="SECONDS",
                        help="after which no contender is started")  # fmt: skip
    options = parser.parse_args()
    # As in a program whose first work on the GPU is our fleet, which sets it.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if options.compile_only:
        compile_all(options.networks)
        return
    began = time.monotonic()
    found: dict[tuple[str, str], Figures] = {}
    missing: list[str] = []
    about = environment("cuda")
    has_ray = importlib.util.find_spec("ray") is not None
    if not has_ray:
        print("Ray is not installed, so it is left out", flush=True)
    for name, way in jobs(options.networks):
        if way not in options.ways or ("Ray" in way and not has_ray):
            continue
        label = f"{time.monotonic() - began:5.0f} s: {name}: {way}"
        if time.monotonic() - began > options.time_limit:
            missing.append(f"{label}: no time left")
            continue
        try:
            torch.compiler.reset()
            figures = found[name, way] = WAYS[way](name)
        except Exception as problem:
            traceback.print_exc()
            missing.append(f"{label}: {problem!r}")
            continue
        finally:
            torch.cuda.empty_cache()
        print(label, {key: round(value, 2) for key, value in figures.items()}, flush=True)
        write(table(found, about), options.out, quiet=True)
    print(f"{len(found)} contenders in {time.monotonic() - began:.0f} s, written to {options.out}")
    print("\n".join(missing))
    raise SystemExit(bool(missing))


if __name__ == "__main__":
    main()
