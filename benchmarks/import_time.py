"""Measure the time that `import pseudograd` adds to `import torch`, in new processes.

    python -m benchmarks.import_time

The first call of the loss, which loads its kernels, is measured too.
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
pseudograd.tunable_cross_entropy(torch.zeros(2, 3), torch.tensor([0, 1]))
clock.append(perf_counter())
print(*(1e3 * (stop - start) for start, stop in zip(clock, clock[1:])))
"""


def milliseconds() -> list[float]:
    """Return the time of each stage in a new process."""
    command = [sys.executable, "-c", PROGRAM]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [float(number) for number in run.stdout.split()]


def main() -> None:
    milliseconds()  # writes bytecode caches
    runs = [milliseconds() for _ in range(PROCESSES)]
    rows = []
    for stage, times in zip(STAGES, zip(*runs, strict=True), strict=True):
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
        print("{stage:<20}{ms_median:>8.1f} ms  ({ms_p20} to {ms_p80})".format(**row))
    write(rows, RESULTS / "import_time.csv")


if __name__ == "__main__":
    main()
