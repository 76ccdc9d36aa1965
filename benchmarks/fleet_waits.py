"""Find out why some of six fleets on one GPU wait for the others, and what ends it.

    python -m benchmarks.fleet_waits          # on a GPU, about a minute and a half

Each variant trains six fleets in a process of its own, and prints how many epochs each fleet ended.
While they train, it prints what each fleet's thread does: R if it runs, so spins in the driver, or
S if it sleeps, so waits for a lock or for the GPU. docs/notes/fleet.md has the question.
"""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.fleet_rows import (
    Pace,
    noise,
    recipe_of,
    seconds_of_one_epoch,
    side_by_side,
    trials_of,
    watched,
)
from pseudograd.fleet import Fleet, Trial

AT_ONCE, SECONDS, LOOK = 6, 3.5, 2.5
NETWORKS = [("mnist", 1, 400, 8), ("cifar10", 1, 800, 8)]
# Variants: environment variables, and names of the changes below.
VARIANTS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "as it is": ({}, ()),
    "threads sleep while they wait for results": ({}, ("asleep",)),
    "few graphs are queued ahead": ({}, ("few_ahead",)),
    "both": ({}, ("asleep", "few_ahead")),
    "32 hardware queues": ({"CUDA_DEVICE_MAX_CONNECTIONS": "32"}, ()),
    "kernels are loaded at once": ({"CUDA_MODULE_LOADING": "EAGER"}, ()),
}
QUEUED = 4  # graphs that are queued ahead at most, by "few_ahead"


def asleep() -> None:
    """Let a thread sleep until the results of its epoch are there."""
    from pseudograd.fleet.mlp.fused import FusedStack

    largest_weight = FusedStack.largest_weight

    def after_waiting(self: FusedStack) -> torch.Tensor:
        result = largest_weight(self)
        event().synchronize()
        return result

    FusedStack.largest_weight = after_waiting  # type: ignore[assignment, method-assign]


def few_ahead() -> None:
    """Let a thread sleep while several of its graphs are queued."""
    from pseudograd.fleet.mlp.fused import _Repeated

    call = _Repeated.__call__
    queued = threading.local()

    def then_wait(self: _Repeated, work: Callable[[], None]) -> None:
        call(self, work)
        events = queued.__dict__.setdefault("events", deque())
        events.append(event())
        if len(events) > QUEUED:
            events.popleft().synchronize()

    _Repeated.__call__ = then_wait  # type: ignore[method-assign]


CHANGES = {"asleep": asleep, "few_ahead": few_ahead}


def event() -> torch.cuda.Event:
    recorded = torch.cuda.Event(blocking=True)
    recorded.record()
    return recorded


def look(pace: Pace) -> None:
    """Print how far each fleet is, and what its thread does."""
    print(f"   after {LOOK} s, epochs {pace.epochs}")
    for thread in threading.enumerate():
        if thread.name.startswith("fleet"):
            stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
            state, *numbers = stat.rsplit(")", 1)[1].split()
            print(f"   {thread.name}: {state}, user and system time {numbers[10:12]} ticks")
    sys.stdout.flush()


def train() -> None:
    """Train six fleets of each network side by side, and print their epochs."""
    for data, depth, width, count in NETWORKS:
        fleet = Fleet(noise(data, 1.0), "cuda", memory=1 / AT_ONCE)
        recipe = replace(recipe_of(data, depth, width), max_epochs=10**6)
        seconds_of_one_epoch(fleet, recipe, count, 1)  # compiles and loads the kernels
        seconds, pace = trained(fleet, trials_of(recipe, count))
        print(f"  {data} {depth}x{width}: epochs {pace.epochs} in {seconds:.2f} s", flush=True)


def trained(fleet: Fleet, trials: list[Trial]) -> tuple[float, Pace]:
    pace = Pace(AT_ONCE, SECONDS)
    timer = threading.Timer(LOOK, look, [pace])
    timer.start()
    with watched(lambda: f"epochs {pace.epochs}"):
        seconds = side_by_side(
            lambda at: list(fleet.run(trials, functools.partial(pace.stop, at))), AT_ONCE
        )
    timer.cancel()
    return seconds, pace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--changes", nargs="*", help=argparse.SUPPRESS)
    changes = parser.parse_args().changes
    if changes is not None:
        for name in changes:
            CHANGES[name]()
        train()
        return
    for title, (variables, names) in VARIANTS.items():
        print(title, flush=True)
        began = time.monotonic()
        command = [sys.executable, "-m", "benchmarks.fleet_waits", "--changes", *names]
        subprocess.run(command, env=os.environ | variables, timeout=90, check=False)
        print(f"  ({time.monotonic() - began:.0f} s in all)", flush=True)


if __name__ == "__main__":
    main()
