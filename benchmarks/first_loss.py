"""Measure the first loss of a process on a GPU, beside that of PyTorch's cross-entropy.

    python -m benchmarks.first_loss           # about 3 minutes

Each process imports PyTorch, starts CUDA, and then times the import of the loss, and the forward
and backward pass of a loss of 128×10 logits, twice. "Cold" is a process without any cache on
disk: Triton compiles the kernels, and the C++ node is compiled in the background, as on a
machine's first day. "Warm" processes find both. "Cold, no compiler" cannot compile the node, so
that nothing runs in the background.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.environment import RESULTS, environment, write

FILE = RESULTS / "first_loss_cuda.csv"
PROCESSES = {"cold": 1, "cold, no compiler": 1, "warm": 3}
NODE_SECONDS = 180.0  # to wait for the compilation of the node
STAGES = ("import", "first", "second")
PROGRAM = """
import sys
from time import perf_counter
import torch
from torch.nn import functional as F
z = torch.randn(128, 10, device="cuda", requires_grad=True)
y = torch.randint(10, (128,), device="cuda")
(z * 2).sum().backward()  # starts CUDA, and the thread of the backward pass
torch.cuda.synchronize()
clock = [perf_counter()]
loss = F.cross_entropy
if sys.argv[1] == "ours":
    from pseudograd.loss import tunable_cross_entropy as loss
clock.append(perf_counter())
for _ in range(2):
    loss(z, y).backward()
    torch.cuda.synchronize()
    clock.append(perf_counter())
print(*(stop - start for start, stop in zip(clock, clock[1:])))
"""


def seconds(whose: str, variables: Mapping[str, str]) -> list[float]:
    """Return the seconds of each stage in a new process."""
    command = [sys.executable, "-c", PROGRAM, whose]
    run = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **variables}
    )
    return [float(number) for number in run.stdout.split()]


def caches(folder: Path) -> dict[str, str]:
    """Return the variables that make a process keep its caches in a folder."""
    return {"XDG_CACHE_HOME": str(folder / "cache"), "TRITON_CACHE_DIR": str(folder / "triton")}


def node_is_ready(folder: Path) -> float:
    """Wait for the node that a process compiles in the background; return the seconds."""
    begun = time.monotonic()
    while not list((folder / "cache/pseudograd").glob("*.so")):
        if time.monotonic() - begun > NODE_SECONDS:
            raise SystemExit("the node was not compiled: python -m pseudograd.loss.triton.node")
        time.sleep(0.2)
    return time.monotonic() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=FILE)
    arguments = parser.parse_args()
    facts, lines = environment("cuda"), []

    def add(whose: str, cache: str, runs: list[list[float]]) -> None:
        line = {"whose": whose, "cache": cache, "processes": len(runs)}
        for stage, times in zip(STAGES, zip(*runs, strict=True), strict=True):
            line |= {f"{stage}_seconds": f"{statistics.median(times):.4f}",
                     f"{stage}_seconds_most": f"{max(times):.4f}"}  # fmt: skip
        print(line, flush=True)
        lines.append({**line, **facts})
        write(lines, arguments.out, quiet=True)

    seconds("cross_entropy", {})  # writes bytecode caches, and reads PyTorch from the disk
    add("cross_entropy", "", [seconds("cross_entropy", {}) for _ in range(PROCESSES["warm"])])
    with tempfile.TemporaryDirectory() as folder:
        variables = caches(Path(folder))
        add("ours", "cold", [seconds("ours", variables) for _ in range(PROCESSES["cold"])])
        waited = node_is_ready(Path(folder))
        print(f"the node was compiled {waited:.0f} seconds later", flush=True)
        seconds("ours", variables)  # the node compiles its plans' kernels, if others than before
        add("ours", "warm", [seconds("ours", variables) for _ in range(PROCESSES["warm"])])
    runs = []
    for _ in range(PROCESSES["cold, no compiler"]):
        with tempfile.TemporaryDirectory() as folder:
            runs.append(seconds("ours", {**caches(Path(folder)), "CXX": "no-compiler"}))
    add("ours", "cold, no compiler", runs)
    print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
