"""Measure the time that `import pseudograd` adds to `import torch`, in new processes.

    python -m benchmarks.import_time

The first forward and backward pass of the loss, which loads its kernels, is measured too, and that
of PyTorch's cross-entropy in a process of its own.
"""

from __future__ import annotations

import statistics
import subprocess
import sys

from benchmarks.environment import RESULTS, environment, write

PROCESSES = 15

STAGES = ("import torch", "import pseudograd", "first call")
PROGRAM = """
from time import perf_counter
clock = [perf_counter()]
import torch
clock.append(perf_counter())
import pseudograd
clock.append(perf_counter())
logits = torch.zeros(2, 3, requires_grad=True)
{loss}(logits, torch.tensor([0, 1])).backward()
clock.append(perf_counter())
print(*(1e3 * (stop - start) for start, stop in zip(clock, clock[1:])))
"""
OURS, THEIRS = "pseudograd.tunable_cross_entropy", "torch.nn.functional.cross_entropy"


def milliseconds(loss: str) -> list[float]:
    """Return the time of each stage in a new process."""
    command = [sys.executable, "-c", PROGRAM.format(loss=loss)]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [float(number) for number in run.stdout.split()]


def main() -> None:
    milliseconds(OURS)  # writes bytecode caches
    runs = [milliseconds(OURS) + milliseconds(THEIRS)[2:] for _ in range(PROCESSES)]
    rows = []
    stages = (*STAGES, "first call of F.cross_entropy")
    for stage, times in zip(stages, zip(*runs, strict=True), strict=True):
        fifths = statistics.quantiles(times, n=5, method="inclusive")
        row = {
            "stage": stage,
            "ms_median": round(statistics.median(times), 1),
            "ms_p20": round(fifths[0], 1),
            "ms_p80": round(fifths[-1], 1),
            "processes": PROCESSES,
            **environment("cpu"),
        }
        rows.append(row)
        print("{stage:<32}{ms_median:>8.1f} ms  ({ms_p20} to {ms_p80})".format(**row))
    write(rows, RESULTS / "import_time.csv")


if __name__ == "__main__":
    main()
