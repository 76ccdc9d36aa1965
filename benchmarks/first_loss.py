"""Measure the first loss of a process on a GPU, beside that of PyTorch's cross-entropy.

    python -m benchmarks.first_loss           # about 90 seconds

Each process imports PyTorch, starts CUDA, and then times the import of the loss, and the forward
and backward pass of a loss of 128×10 logits, twice. "Cold" is a process without any cache on
disk: Triton compiles the kernels, and the C++ node is compiled in the background, as on a
machine's first day. "Warm" processes find both. "Cold, no compiler" cannot compile the node, so
that nothing runs in the background. The cold process with a compiler is the last, so that what it
compiles does not disturb the others. `python -m pseudograd.loss.triton.node` has to come first.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.environment import RESULTS, environment, write
from pseudograd.loss.triton.node import library_path

FILE = RESULTS / "first_loss_cuda.csv"
WARM = 3  # processes
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

    node = library_path()
    if not node.exists():
        raise SystemExit("first compile the node: python -m pseudograd.loss.triton.node")
    seconds("cross_entropy", {})  # writes bytecode caches, and reads PyTorch from the disk
    add("cross_entropy", "", [seconds("cross_entropy", {}) for _ in range(WARM)])
    with tempfile.TemporaryDirectory() as folder:
        variables = caches(Path(folder))
        add("ours", "cold, no compiler", [seconds("ours", {**variables, "CXX": "no-compiler"})])
        cache = Path(variables["XDG_CACHE_HOME"]) / "pseudograd"
        cache.mkdir(parents=True, exist_ok=True)
        shutil.copy(node, cache)
        seconds("ours", variables)  # the node's plans need kernels that the process before did not
        add("ours", "warm", [seconds("ours", variables) for _ in range(WARM)])
    # The compiler that it starts may still write to the folder afterwards.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        add("ours", "cold", [seconds("ours", caches(Path(folder)))])
    print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
