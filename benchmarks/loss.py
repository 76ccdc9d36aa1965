"""Time forward and backward of the tunable loss and of PyTorch's cross-entropy, in one run.

    python -m benchmarks.loss
    python -m benchmarks.loss --device cuda --only-compile     # may run beside other programs
    python -m benchmarks.loss --device cuda --compiled         # 5 minutes; both without options
    python -m benchmarks.loss --device cuda --compiled --rest  # continue a run that was cut off

On a GPU, `benchmarks.loss_cuda` measures GPU time, host time and wall-clock time, and compares the
kernels of other libraries too.

In every round each contender has one turn, in a new random order, so that disturbances affect all
alike. The table shows medians over the rounds, and the 20th and 80th percentiles. From a million
logits on, it also shows the peak memory of a step on a CPU, above that of logits and target.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.environment import RESULTS, environment, write
from pseudograd import tunable_binary_cross_entropy_with_logits, tunable_cross_entropy
from pseudograd.loss import cpu

KS = ("1", "0.5", "2", "per example")
ROUNDS = 30
TURN = 0.01  # seconds per turn; short calls are repeated, and their mean is taken

Step = Callable[[], None]
Spread = tuple[float, float, float]

# Views of a larger tensor, or of one with its dimensions in another order.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda z: z,
    "channels last": lambda z: z.to(memory_format=torch.channels_last),
    "cropped": lambda z: F.pad(z, (5, 7, 4, 4))[..., 4:-4, 5:-7],
    "H and W swapped": lambda z: z.transpose(2, 3).contiguous().transpose(2, 3),
}


class Case(NamedTuple):
    """The shape and dtype of the logits, the kind of target, and how the loss is run."""

    shape: tuple[int, ...]
    target: str = "labels"
    dtype: str = "float32"
    layout: str = ""
    way: str = "eager"


def cases() -> Iterator[Case]:
    rows = ((32, 10), (128, 10), (512, 100), (4096, 1000), (1024, 32000), (131072, 100))
    images = ((8, 19, 64, 64), (2, 21, 256, 256))
    few = ((4, 2, 256, 256), (1, 4, 64, 64, 64))  # classes
    yield from map(Case, (*rows, (262144, 10), (1_000_000, 2), *images, *few))
    yield from (Case(images[1], layout=layout) for layout in LAYOUTS if layout)
    for shape in ((128, 10), (512, 100), (4096, 1000)):
        yield Case(shape, dtype="float64")
    yield Case((4096, 1000), dtype="bfloat16")
    for target in ("smoothed labels", "probabilities"):
        yield from (Case(shape, target) for shape in ((128, 10), (512, 100), (4096, 1000)))
    yield Case(images[1], "probabilities")
    for target in ("yes or no", "probabilities of yes"):
        yield from (Case(shape, target) for shape in ((32, 1), (128, 10), (4096, 1000)))
    yield Case(rows[0], way="compiled")
    for target in ("labels", "probabilities"):
        yield from (Case(shape, target, way="compiled") for shape in (*rows[1:4], images[1]))
    yield from (Case(shape, "smoothed labels", way="compiled") for shape in (*rows[1:4], images[1]))


def without_kernels() -> AbstractContextManager[object]:
    """Disable the compiled kernels, so that the loss falls back to PyTorch operations."""
    return mock.patch.object(cpu, "kernels", return_value=None)


def compiled(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compile the loss in a function with its own code object.

    Contenders that differ only in k would otherwise share a code object, and the compiler would
    treat k as dynamic.
    """

    def call(logits: Tensor, target: Tensor) -> Tensor:
        return loss(logits, target)

    call.__code__ = call.__code__.replace(co_name=f"call_{next(_NUMBERS)}")
    return torch.compile(call)


_NUMBERS = itertools.count()


def steps(case: Case) -> tuple[Tensor, dict[tuple[str, str], Step]]:
    """Return logits, and by (whose, k) the forward and backward step of each contender on them."""
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(case.shape, generator=generator).to(getattr(torch, case.dtype))
    logits = LAYOUTS[case.layout](logits)
    examples = case.shape[:1] + case.shape[2:]
    target = torch.randint(case.shape[1], examples, generator=generator)
    if case.target == "probabilities":
        target = torch.randn(case.shape, generator=generator).softmax(1)
    if "yes" in case.target:
        examples = case.shape
        target = torch.rand(case.shape, generator=generator)
        target = target.round() if case.target == "yes or no" else target
    smoothing = {"label_smoothing": 0.1} if case.target == "smoothed labels" else {}
    per_example = torch.linspace(0.25, 4, math.prod(examples)).reshape(examples)
    logits.requires_grad_()

    def step(loss: Callable[..., Tensor]) -> Step:
        loss = partial(loss, **smoothing)
        loss = compiled(loss) if case.way == "compiled" else loss

        def run() -> None:
            logits.grad = None
            loss(logits, target).backward()

        return run

    def tunable(k: str) -> Step:
        value = per_example if k == "per example" else float(k)
        return step(partial(ours, k=value))

    theirs: Callable[..., Tensor] = F.cross_entropy
    ours: Callable[..., Tensor] = tunable_cross_entropy
    if "yes" in case.target:
        theirs = F.binary_cross_entropy_with_logits
        ours = tunable_binary_cross_entropy_with_logits
    contenders = {("cross_entropy", ""): step(theirs)}
    contenders |= {("ours", k): tunable(k) for k in KS}
    if case.way == "eager" and logits.numel() < 1e6:
        contenders[("without kernels", "0.5")] = tunable("0.5")
    return logits, contenders


def seconds(step: Step, calls: int) -> float:
    """Return the mean time of a call."""
    start = time.perf_counter()
    for _ in range(calls):
        step()
    return (time.perf_counter() - start) / calls


def peak_memory(logits: Tensor, step: Step) -> float:
    """Return by how many MB a step raises the memory of the process, at its peak (Linux)."""
    logits.grad = None
    step()
    logits.grad = None
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets the peak
    before = _status("VmRSS")
    step()
    return (_status("VmHWM") - before) / 1024


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def race(case: Case) -> tuple[dict[tuple[str, str], Spread], dict[tuple[str, str], float]]:
    """Time all contenders in turns.

    Return the median, 20th and 80th percentiles in seconds, and the peak memory in MB.
    """
    logits, contenders = steps(case)
    times: dict[tuple[str, str], list[float]] = {name: [] for name in contenders}
    calls: dict[tuple[str, str], int] = {}
    shuffle = random.Random(0).shuffle
    for turn in range(-1, ROUNDS):
        order = list(contenders)
        shuffle(order)
        for name in order:
            step = contenders[name]
            with without_kernels() if name[0] == "without kernels" else nullcontext():
                if turn < 0:
                    seconds(step, 3)  # warm up
                    calls[name] = max(1, round(TURN / seconds(step, 3)))
                else:
                    times[name].append(seconds(step, calls[name]))
    large = logits.numel() >= 1e6 and sys.platform == "linux"
    memory = {name: peak_memory(logits, step) for name, step in contenders.items() if large}
    return {name: percentiles(turns) for name, turns in times.items()}, memory


def percentiles(values: list[float]) -> Spread:
    fifths = statistics.quantiles(values, n=5, method="inclusive")
    return statistics.median(values), fifths[0], fifths[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", default="", help="on a GPU: names of cases, or parts of them")
    parser.add_argument("--rest", action="store_true", help="on a GPU: keep what the file has")
    parser.add_argument("--seconds", type=float, default=math.inf, help="on a GPU: start no case"
                        " that would end later than this")  # fmt: skip
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--only-compile", action="store_true", help="on a GPU: fill the caches only")
    parts.add_argument("--compiled", action="store_true", help="on a GPU: the caches are filled")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.only and not arguments.out and not arguments.only_compile:
        parser.error("--only would overwrite the full table: name another file with --out")
    out = arguments.out or RESULTS / f"loss_{arguments.device}.csv"
    if arguments.device == "cuda":
        from benchmarks import loss_cuda

        loss_cuda.main(
            out, arguments.only, arguments.rest, arguments.seconds,
            compiles=not arguments.compiled, measures=not arguments.only_compile,
        )  # fmt: skip
    else:
        on_cpu(out)


def on_cpu(out: Path) -> None:
    facts = environment("cpu")
    print(f"{facts['hardware']}, {torch.get_num_threads()} threads, torch {facts['torch']}")
    print("microseconds, forward + backward: median (20th to 80th percentile)")
    rows = []
    for case in cases():
        results, memory = race(case)
        reference = results[("cross_entropy", "")]
        for (whose, k), spread in results.items():
            median, low, high = (round(value * 1e6, 1) for value in spread)
            ratio = round(spread[0] / reference[0], 2)
            shape = "x".join(map(str, case.shape))
            about = {**case._asdict(), "shape": shape}
            name = " ".join(filter(None, about.values()))
            peak = round(memory[whose, k], 1) if memory else ""
            print(f"{name:<53}{whose:<16}{k:<12}{median:>11,.1f}  ({low:,.1f} to {high:,.1f})  "
                  f"{ratio:.2f} times" + f", {peak} MB" * bool(memory), flush=True)  # fmt: skip
            row = {**about, "whose": whose, "k": k, "us_median": median, "us_p20": low,
                   "us_p80": high, "times_cross_entropy": ratio, "mb_peak": peak,
                   "rounds": ROUNDS, "threads": torch.get_num_threads(), **facts}  # fmt: skip
            rows.append(row)
    write(rows, out)


if __name__ == "__main__":
    main()
