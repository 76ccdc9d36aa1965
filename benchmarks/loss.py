"""Forward and backward of the tunable loss beside PyTorch's cross-entropy, in one run.

    python -m benchmarks.loss
    python -m benchmarks.loss --device cuda

On a GPU it is the work of `benchmarks.loss_cuda`, beside others' kernels too.

In every round each contender has one turn, in an order drawn anew, so that what disturbs the
machine meets all alike. The table shows medians over the rounds, and the 20th and 80th percentile.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.environment import RESULTS, environment, write
from pseudograd import tunable_cross_entropy
from pseudograd.loss import functional

SHAPES = ((4096, 1000), (1024, 32000), (128, 10))
TARGETS = ("labels", "smoothed labels", "probabilities")
KS = ("1", "0.5", "2", "per example")
ROUNDS = 40
TURN = 0.01  # seconds; short calls are repeated for so long, and their mean is taken

Step = Callable[[], None]
Spread = tuple[float, float, float]


def compiled() -> AbstractContextManager[object]:
    """The loss as it comes with numba."""
    return nullcontext()


def plain() -> AbstractContextManager[object]:
    """The loss as it comes without numba: PyTorch's operations."""
    return mock.patch.object(functional, "_compiled_by_numba", return_value=None)


WAYS = {"compiled": compiled, "plain": plain}


def steps(shape: tuple[int, int], kind: str) -> dict[tuple[str, str], Step]:
    """Forward and backward of each contender, on the same logits: (way, k) to step."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(shape, generator=generator).requires_grad_()
    target = torch.randint(shape[1], shape[:1], generator=generator)
    if kind == "probabilities":
        target = torch.randn(shape, generator=generator).softmax(1)
    smoothing = 0.1 if kind == "smoothed labels" else 0.0
    per_example = torch.linspace(0.25, 4, len(logits))

    def step(loss: Callable[..., Tensor]) -> Step:
        def run() -> None:
            logits.grad = None
            loss(logits, target, label_smoothing=smoothing).backward()

        return run

    def tunable(k: str) -> Step:
        value = per_example if k == "per example" else float(k)
        return step(partial(tunable_cross_entropy, k=value))

    contenders = {("cross_entropy", ""): step(F.cross_entropy)}
    contenders |= {("compiled", k): tunable(k) for k in KS}
    # For soft targets, PyTorch ops take seconds on large shapes: time one k, and only small shapes.
    if kind == "labels":
        contenders |= {("plain", k): tunable(k) for k in KS}
    elif logits.numel() < 1e7:
        contenders |= {("plain", "0.5"): tunable("0.5")}
    return contenders


def seconds(step: Step, calls: int) -> float:
    """The mean time of a call. The one place that looks at a clock."""
    start = time.perf_counter()
    for _ in range(calls):
        step()
    return (time.perf_counter() - start) / calls


def race(shape: tuple[int, int], kind: str) -> dict[tuple[str, str], Spread]:
    """Time all contenders in turns; give percentiles 50, 20 and 80 in seconds."""
    contenders = steps(shape, kind)
    times: dict[tuple[str, str], list[float]] = {name: [] for name in contenders}
    calls: dict[tuple[str, str], int] = {}
    shuffle = random.Random(0).shuffle
    for turn in range(-1, ROUNDS):
        order = list(contenders)
        shuffle(order)
        for name in order:
            step = contenders[name]
            with WAYS.get(name[0], nullcontext)():
                if turn < 0:
                    seconds(step, 3)  # warm up
                    calls[name] = max(1, round(TURN / seconds(step, 3)))
                else:
                    times[name].append(seconds(step, calls[name]))
    return {name: percentiles(turns) for name, turns in times.items()}


def percentiles(values: list[float]) -> Spread:
    fifths = statistics.quantiles(values, n=5, method="inclusive")
    return statistics.median(values), fifths[0], fifths[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", default="", help="on a GPU: cases whose name holds this text")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.only and not arguments.out:
        parser.error("--only leaves cases out of the whole table: name another file by --out")
    out = arguments.out or RESULTS / f"loss_{arguments.device}.csv"
    if arguments.device == "cuda":
        from benchmarks import loss_cuda

        loss_cuda.main(out, arguments.only)
    else:
        on_cpu(out)


def on_cpu(out: Path) -> None:
    facts = environment("cpu")
    print(
        f"{facts['hardware']}, {torch.get_num_threads()} threads, torch {facts['torch']}, float32"
    )
    print("microseconds, forward + backward: median (20th to 80th percentile)")
    rows = []
    for kind, shape in itertools.product(TARGETS, SHAPES):
        results = race(shape, kind)
        reference = results[("cross_entropy", "")]
        for (way, k), spread in results.items():
            median, low, high = (round(value * 1e6, 1) for value in spread)
            ratio = round(spread[0] / reference[0], 2)
            name = "x".join(map(str, shape))
            print(f"{kind:<15} {name:>10}  {way:<14}{k:<12}{median:>11,.1f}  ({low:,.1f} to "
                  f"{high:,.1f})  {ratio:.2f} times", flush=True)  # fmt: skip
            row = {"target": kind, "shape": name, "dtype": "float32", "way": way, "k": k,
                   "us_median": median, "us_p20": low, "us_p80": high,
                   "times_cross_entropy": ratio, "rounds": ROUNDS,
                   "threads": torch.get_num_threads(), **facts}  # fmt: skip
            rows.append(row)
    write(rows, out)


if __name__ == "__main__":
    main()
