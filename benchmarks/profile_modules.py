"""Profile the CUDA graphs of any network: replay times by the number of slots, and kernels.

    python -m benchmarks.profile_modules --out benchmarks/results/profile_modules_cuda.csv

A replay needs nothing from the host. If the time per step does not fall with more slots, the GPU is
the bottleneck, and the kernels show why.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.environment import RESULTS, environment, write
from benchmarks.modules import prepared
from benchmarks.networks import CASES
from pseudograd.fleet.modules.graphs import Slot
from pseudograd.fleet.modules.worker import GraphWorker
from pseudograd.fleet.precision import precision
from pseudograd.fleet.trial import Split

SLOTS, EPOCHS, PROFILED = (1, 2, 4, 8), 3, 5


def made(name: str, count: int, compiled: bool) -> Iterator[Slot]:
    training, examples = prepared(CASES[name], EPOCHS, compiled)
    recipe = training.recipe("noise")
    worker = GraphWorker(
        training, examples, recipe, torch.device("cuda", 0), count, keep_parameters=False
    )
    source, cut = worker._source(), examples.parts(recipe, Split(0, 0))
    for at in range(count):
        yield Slot(training, source, recipe, cut, worker.device, compiled, lean=at == 0)


def replayed(slots: list[Slot], epochs: int, steps: int) -> float:
    """Replay the steps of all slots in turn; return the microseconds per model and step."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(epochs):
        for step in range(steps):
            for slot in slots:
                with torch.cuda.stream(slot.stream):
                    if step == 0:
                        slot._shuffling.replay()
                    slot._graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / (epochs * steps * len(slots)) * 1e6


def measured(name: str, compiled: bool) -> Iterator[dict[str, object]]:
    with precision(tf32=CASES[name].precision != "float32"):
        slots = list(made(name, max(SLOTS), compiled))
        for count in SLOTS:
            for slot in slots:
                slot.counters.zero_()
            torch.cuda.synchronize()
            spent = replayed(slots[:count], EPOCHS, slots[0].steps)
            print(f"{name}: replays alone in {count} slots: {spent:.1f} µs", flush=True)
            yield {"what": "replay", "slots": count, "count": 1, "microseconds": round(spent, 1)}
        slots[0].counters.zero_()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
            replayed(slots[:1], 1, PROFILED)
        for event in sorted(found.key_averages(), key=lambda one: -one.self_device_time_total):
            if event.self_device_time_total > 0 and event.count >= PROFILED:
                spent = event.self_device_time_total / PROFILED
                count = event.count // PROFILED
                print(f"   {spent:7.1f} µs in {count} × {event.key[:100]}")
                yield {"what": event.key[:200], "slots": 1, "count": count,
                       "microseconds": round(spent, 1)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "profile_modules_cuda.csv")
    parser.add_argument("--networks", nargs="+", choices=CASES, default=["GRU 128"])
    parser.add_argument("--compile", action="store_true", help="compile the networks")
    options = parser.parse_args()
    about = environment("cuda")
    rows: list[dict[str, object]] = [
        {"network": name, **row, **about}
        for name in options.networks
        for row in measured(name, options.compile)
    ]
    write(rows, options.out)


if __name__ == "__main__":
    main()
