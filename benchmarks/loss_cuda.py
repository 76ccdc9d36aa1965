"""Time the loss on a GPU beside other implementations of cross-entropy; see `benchmarks.loss`.

A turn is a forward and a backward pass on logits that are not in the L2 cache, timed by CUDA
events. The GPU is kept busy beforehand, so that all kernels of the turn are queued when it reaches
them, as in the training of a network: this times the GPU, not Python. The table also has the host
time to queue them, and the wall-clock time of a step with an empty queue, from the call until the
GPU is done. For implementations that synchronize in between (Liger reads a number back), the wait
is included.

Contenders take turns in a random order, so that disturbances affect all alike. Losses with few
logits have more turns, in which only the wall-clock time is measured, since it varies most there.
For layer and loss, those close to the fastest get more turns. The table shows medians with 20th and
80th percentiles, peak memory beyond the inputs, and the time of a copy of the logits as a fraction
of the total: a loss that reads them once and writes their gradient once has 1, one that reads them
twice 2/3.

All kernels are compiled beforehand, by several processes: ``--only-compile`` does only that, beside
other programs, and ``--compiled`` leaves it out. The file is written after each shape. With
``--seconds``, no shape starts that would end too late; with ``--rest``, a later run of the same
commit keeps the file's shapes and measures the others. Layer and loss are measured only if named by
``--only``. Peers that are not installed are listed and left out.
"""

from __future__ import annotations

import functools
import gc
import importlib
import itertools
import math
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.environment import earlier, environment, write
from pseudograd.environment import version
from pseudograd.loss import TunableCrossEntropyLoss
from pseudograd.loss import tunable_binary_cross_entropy_with_logits as binary_loss
from pseudograd.loss import tunable_cross_entropy as loss
from pseudograd.loss import tunable_linear_cross_entropy as linear_loss

LOGITS = (
    (torch.bfloat16, 8192, 131072),
    (torch.bfloat16, 4096, 262144),
    (torch.bfloat16, 8192, 50257),
    (torch.bfloat16, 8192, 32000),
    (torch.bfloat16, 65536, 1000),
    (torch.bfloat16, 131072, 100),
    (torch.bfloat16, 262144, 10),
    (torch.float32, 4096, 131072),
    (torch.float32, 8192, 32000),
    (torch.float32, 65536, 1000),
    (torch.float32, 131072, 100),
    (torch.float32, 262144, 10),
    (torch.float16, 8192, 32000),
    (torch.float32, 128, 10),
)
PROBABILITIES = (
    (torch.bfloat16, 8192, 131072),
    (torch.bfloat16, 8192, 50257),
    (torch.bfloat16, 8192, 32000),
    (torch.bfloat16, 65536, 1000),
    (torch.float32, 65536, 1000),
    (torch.float32, 131072, 100),
    (torch.float32, 262144, 10),
)
BINARY = (
    (torch.bfloat16, 65536, 1000),
    (torch.float32, 65536, 1000),
    (torch.float32, 4096, 1),
)
# In this order before the others: where the wall clock is closest to PyTorch's.
TELLING = (
    "logits float32 128x10",
    "logits bfloat16 262144x10",
    "logits bfloat16 131072x100",
    "logits bfloat16 65536x1000",
    "binary float32 4096x1",
    "binary bfloat16 65536x1000",
    "logits bfloat16 8192x32000",
)
LINEAR = ((torch.bfloat16, 8192, 4096, 131072), (torch.bfloat16, 8192, 2048, 32000))
KS: dict[str, float | None] = {"1": 1.0, "0.5": 0.5, "2": 2.0, "per row": None}
PEERS = {"liger": "liger-kernel", "cut": "cut-cross-entropy", "quack": "quack-kernels"}
CUTE = "liger_kernel.ops.cutedsl.ops"  # for Hopper GPUs; opt-in in Liger
TURNS = {"logits": 40, "probabilities": 25, "binary": 30, "linear": 20}
SLOW, FEW_TURNS = 0.02, 5  # contenders that take longer, in seconds, have so many turns
# Losses of more logits than this are long for the GPU, and vary little: they have fewer turns.
LARGE, LARGE_TURNS = 1 << 27, 20
# The largest number of logits, and how many more turns measure the wall-clock time alone.
WALL_TURNS = ((1 << 20, 800), (1 << 25, 200), (LARGE, 100))
# Most of the time goes to the same matrix products, so the best need more turns to separate.
MORE_TURNS = {"linear": 40}
CLOSE = 1.05
# Our module remembers whether its loss was scaled, and matrix products hit the GPU's power limit,
# which lowers its clock. So each contender is timed after calls of its own.
CALLS_BEFORE = {"logits": 1, "probabilities": 1, "binary": 1, "linear": 2}
# PyTorch's contender that one of ours is compared with, by what its name ends in.
REFERENCES = {"compiled": "torch.compile", "scaled": "{}, scaled", "none": "{}, none"}
WORKERS = 12  # processes that compile
# Zeroing this much memory takes 2 ms, longer than all launches, and flushes the L2 cache.
BUSY_BYTES = 8 << 30

Loss = Callable[..., Tensor]


class Spread(NamedTuple):
    """Median, 20th and 80th percentile in milliseconds."""

    median: float
    low: float
    high: float


class Result(NamedTuple):
    """The measurements of a contender."""

    forward: Spread
    backward: Spread
    both: Spread
    host: Spread
    wall: Spread
    wall_error: float
    peak_bytes: int
    turns: int
    wall_turns: int


def percentiles(values: list[float]) -> Spread:
    fifths = statistics.quantiles(values, n=5, method="inclusive")
    return Spread(statistics.median(values), fifths[0], fifths[-1])


def error_of_median(values: Sequence[float]) -> float:
    """Return about the standard error of the median, whatever the distribution."""
    ordered, reach = sorted(values), math.sqrt(len(values)) / 2
    middle = (len(values) - 1) / 2
    low, high = (
        ordered[min(len(values) - 1, max(0, round(middle + part)))] for part in (-reach, reach)
    )
    return (high - low) / 2


def imported(module: str, name: str) -> Any:
    """Return a peer's function, or print a message and return None."""
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # not installed, or not for this machine
        print(f"left out: {module}.{name} ({type(error).__name__}: {error})")
        return None


def of_logits() -> dict[str, Loss]:
    """Return contenders as functions of logits, labels and per-row k."""
    contenders = of_pytorch()
    if liger := imported("liger_kernel.transformers.functional", "liger_cross_entropy"):
        contenders["liger"] = lambda z, y, ks: liger(z, y)
    if cute := imported(f"{CUTE}.cross_entropy", "LigerCrossEntropyFunction"):
        contenders["liger, CuTe"] = lambda z, y, ks: cute.apply(z, y, None)[0]
    if quack := imported("quack.cross_entropy", "cross_entropy"):
        contenders["quack"] = lambda z, y, ks: quack(z, y)
    contenders |= of_ourselves()
    contenders["cross_entropy, none"] = lambda z, y, ks: F.cross_entropy(
        z, y, reduction="none"
    ).mean()
    contenders["ours k=0.5, none"] = lambda z, y, ks: loss(z, y, k=0.5, reduction="none").mean()
    return contenders


def of_probabilities() -> dict[str, Loss]:
    """Return contenders for class probabilities, which the peers' kernels do not support."""
    return of_pytorch() | of_ourselves() | {"ours k=0.5, plain": plain}


def plain(z: Tensor, q: Tensor, ks: Tensor) -> Tensor:
    return loss(z, q, k=0.5, implementation="torch")


def of_binary(probabilities: Tensor) -> dict[str, Loss]:
    """Return contenders for binary labels of the shape of the logits, and for probabilities."""
    theirs = F.binary_cross_entropy_with_logits
    contenders = of_pytorch(theirs, "binary_cross_entropy") | of_ourselves(binary_loss)
    contenders["binary_cross_entropy, probabilities"] = lambda z, t, ks: theirs(z, probabilities)
    contenders["ours k=0.5, probabilities"] = lambda z, t, ks: binary_loss(z, probabilities, k=0.5)
    return contenders


def of_pytorch(theirs: Loss = F.cross_entropy, name: str = "cross_entropy") -> dict[str, Loss]:
    return {
        name: lambda z, y, ks: theirs(z, y),
        "torch.compile": compiled(lambda z, y, ks: theirs(z, y)),
        f"{name}, scaled": lambda z, y, ks: 1.005 * theirs(z, y),
    }


def of_ourselves(loss: Loss = loss) -> dict[str, Loss]:
    contenders: dict[str, Loss] = {
        f"ours k={name}": partial(ours, loss, k) for name, k in KS.items()
    }
    for name, k in KS.items():
        contenders[f"ours k={name}, compiled"] = compiled(partial(ours, loss, k))
    # As with gradient accumulation or a GradScaler: the upstream gradient is not 1, and a module
    # remembers that from one step to the next.
    if loss is binary_loss:
        contenders["ours k=0.5, scaled"] = lambda z, y, ks: 1.005 * loss(z, y, k=0.5)
    else:
        criterion = TunableCrossEntropyLoss(k=0.5)
        contenders["ours k=0.5, scaled"] = lambda z, y, ks: 1.005 * criterion(z, y)
    return contenders


def ours(loss: Loss, k: float | None, z: Tensor, y: Tensor, ks: Tensor) -> Tensor:
    return loss(z, y, k=ks if k is None else k)


def compiled(loss: Loss) -> Loss:
    """Compile a loss as a function with code of its own, as `benchmarks.loss` does."""

    def call(z: Tensor, y: Tensor, ks: Tensor) -> Tensor:
        return loss(z, y, ks)

    call.__code__ = call.__code__.replace(co_name=f"call_{next(_NUMBERS)}")
    return torch.compile(call, fullgraph=True, dynamic=False)


_NUMBERS = itertools.count()


def of_linear() -> dict[str, Loss]:
    """Return contenders as functions of hidden states, weight, labels and per-row k."""

    def two_steps(h: Tensor, w: Tensor, y: Tensor, ks: Tensor) -> Tensor:
        return F.cross_entropy(h @ w.T, y)

    in_one_graph = torch.compile(two_steps, dynamic=False)
    contenders: dict[str, Loss | None] = {
        "linear, cross_entropy": two_steps,
        "torch.compile": in_one_graph,
        "linear, ours k=0.5": lambda h, w, y, ks: loss(h @ w.T, y, k=0.5),
    }
    if hasattr(F, "linear_cross_entropy"):
        options = torch.nn.LinearCrossEntropyOptions()
        contenders["F.linear_cross_entropy"] = lambda h, w, y, ks: F.linear_cross_entropy(
            h, w, y, options=options
        )
    else:
        print(f"left out: F.linear_cross_entropy (torch {torch.__version__} has none)")
    liger = imported("liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy")
    if liger:
        contenders["liger"] = lambda h, w, y, ks: liger(h, w, y)
    whole = "liger_fused_linear_cross_entropy_sm90"
    if cute := imported(f"{CUTE}.fused_linear_cross_entropy_sm90", whole):
        contenders["liger, CuTe"] = lambda h, w, y, ks: cute(h, w, y)
    twice = "LigerFusedScaledCrossEntropySM90Function"
    if again := imported(f"{CUTE}.fused_scaled_cross_entropy_sm90", twice):
        contenders["liger, CuTe, logits twice"] = lambda h, w, y, ks: again.apply(h, w, y).mean()
    if cut := imported("cut_cross_entropy", "linear_cross_entropy"):
        contenders["cut"] = lambda h, w, y, ks: cut(h, w, y)
        contenders["cut, exact"] = lambda h, w, y, ks: cut(h, w, y, filter_eps=None)
    if quack := imported("quack.linear_cross_entropy", "chunked_linear_cross_entropy"):
        contenders["quack"] = lambda h, w, y, ks: quack(h, w, y)
        # Its default of 4,096 rows fails if the width is 4,096 too.
        for rows in (2048, 8192):
            contenders[f"quack, {rows} rows"] = partial(quack_linear, quack, rows=rows)
    if of_rows := imported("quack.cross_entropy", "cross_entropy"):
        contenders["linear, quack"] = lambda h, w, y, ks: of_rows(h @ w.T, y)
    for name, k in KS.items():
        contenders[f"ours k={name}"] = partial(ours_linear, k=k)
    for rows in (256, 512, 1024, 2048, 8192):
        contenders[f"ours k=0.5, {rows} rows"] = partial(ours_linear, k=0.5, rows=rows)
    return {name: loss for name, loss in contenders.items() if loss}


def quack_linear(quack: Loss, h: Tensor, w: Tensor, y: Tensor, ks: Tensor, rows: int) -> Tensor:
    return quack(h, w, y, chunk_size=rows)


def ours_linear(
    h: Tensor, w: Tensor, y: Tensor, ks: Tensor, k: float | None, rows: int | None = None
) -> Tensor:
    return linear_loss(h, w, y, k=ks if k is None else k, chunk_rows=rows)


class Arena:
    """Contenders that take turns on the same inputs."""

    def __init__(
        self, form: str, contenders: dict[str, Loss], leaves: list[Tensor], *others: Tensor
    ) -> None:
        self.form, self.contenders, self.leaves, self.others = form, contenders, leaves, others
        size, self.calls_before = leaves[0].numel(), CALLS_BEFORE[form]
        self.turns, self.more_turns = TURNS[form], MORE_TURNS.get(form, 0)
        if form != "linear" and size > LARGE:
            self.turns = LARGE_TURNS
            contenders.pop("ours k=0.5, plain", None)  # up to a quarter of a second each
        self.wall_turns = next((turns for most, turns in WALL_TURNS if size <= most), 0)
        self.original = leaves[0].detach().clone()

    @functools.cached_property
    def busy(self) -> Tensor:
        return torch.empty(BUSY_BYTES, dtype=torch.int8, device="cuda")

    def step(self, loss: Loss) -> None:
        self.clear()
        loss(*self.leaves, *self.others).backward()

    def turn(self, loss: Loss, overwrites: bool) -> tuple[float, float, float, float]:
        """Return the milliseconds of forward, backward, host time and wall-clock time."""
        for _ in range(self.calls_before):
            self.step(loss)
        if self.form != "linear":  # its many launches are queued during the calls before
            torch.cuda.synchronize()
        self.clear()
        begin, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        self.busy.zero_()
        start = time.perf_counter()
        begin.record()
        value = loss(*self.leaves, *self.others)
        middle.record()
        value.backward()
        end.record()
        host = time.perf_counter() - start
        torch.cuda.synchronize()
        if overwrites:
            self.restore()
        wall = self.wall(loss, overwrites)
        return begin.elapsed_time(middle), middle.elapsed_time(end), 1000 * host, wall

    def wall(self, loss: Loss, overwrites: bool) -> float:
        """Return the milliseconds of a step, from the call until the GPU is done."""
        self.clear()
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss(*self.leaves, *self.others).backward()
        torch.cuda.synchronize()
        wall = time.perf_counter() - start
        if overwrites:
            self.restore()
        return 1000 * wall

    def wall_turn(self, loss: Loss, overwrites: bool) -> float:
        for _ in range(self.calls_before):
            self.step(loss)
        if overwrites:
            self.restore()
        return self.wall(loss, overwrites)

    def compile(self) -> None:
        """Run every contender that is compiled, so that its kernels are in the caches on disk."""
        for name, contender in self.contenders.items():
            if name.endswith("plain") or ("cross_entropy" in name and self.form != "linear"):
                continue  # PyTorch's own operations
            try:
                for _ in range(2):
                    self.step(contender)
                self.restore()
            except Exception as error:  # `race` reports it
                print(f"not compiled: {name} ({type(error).__name__})")
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def clear(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None

    def restore(self) -> None:
        with torch.no_grad():
            self.leaves[0].copy_(self.original)

    def peak(self, loss: Loss, overwrites: bool) -> int:
        """Return the peak memory in bytes, beyond the inputs."""
        self.clear()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.turn(loss, overwrites)
        return torch.cuda.max_memory_allocated() - before

    def race(self) -> Iterator[tuple[str, Result]]:
        turns: dict[str, int] = {}
        expected = None
        for name, contender in self.contenders.items():
            try:
                for _ in range(3):
                    _, _, _, wall = self.turn(contender, overwrites(name))
                value = contender(*self.leaves, *self.others).item()
                self.restore()
                expected = value if expected is None else expected
                if abs(value - expected) > 0.01 * expected:
                    raise ValueError(f"its value is {value}, but others have {expected}")
                slow = wall > 1000 * SLOW and self.form != "linear"
                turns[name] = FEW_TURNS if slow else self.turns
            except Exception as error:
                print(f"left out here: {name} ({type(error).__name__}: {str(error)[:200]})")
        times: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in turns}
        walls: dict[str, list[float]] = {name: [] for name in turns}
        shuffle = random.Random(0).shuffle

        def rounds(names: list[str], count: int) -> None:
            for turn in range(count):
                shuffle(names)
                for name in names:
                    if turn < turns[name] or count != self.turns:
                        times[name].append(self.turn(self.contenders[name], overwrites(name)))

        def wall_rounds(names: list[str], count: int) -> None:
            for _ in range(count):
                shuffle(names)
                for name in names:
                    step = self.contenders[name]
                    walls[name].append(self.wall_turn(step, overwrites(name)))

        gc.collect()
        gc.disable()
        try:
            rounds(list(turns), self.turns)
            wall_rounds([name for name in turns if turns[name] > FEW_TURNS], self.wall_turns)
            median = {name: statistics.median(a + b for a, b, *_ in times[name]) for name in turns}
            fastest = min(median.values())
            rounds([name for name in turns if median[name] < CLOSE * fastest], self.more_turns)
        finally:
            gc.enable()
        for name in (name for name in self.contenders if name in times):
            forward, backward, host, short = (list(part) for part in zip(*times[name], strict=True))
            both, alone = [a + b for a, b, *_ in times[name]], short + walls[name]
            yield name, Result(
                percentiles(forward), percentiles(backward), percentiles(both), percentiles(host),
                percentiles(alone), error_of_median(alone),
                self.peak(self.contenders[name], overwrites(name)), len(both), len(alone),
            )  # fmt: skip


def overwrites(name: str) -> bool:
    """Return whether a contender overwrites the logits, which others still need."""
    return name.startswith("liger")


def copy_ms(tensor: Tensor) -> float:
    """Return the milliseconds to copy a tensor."""
    other = torch.empty_like(tensor)
    busy = torch.empty(BUSY_BYTES, dtype=torch.int8, device="cuda")
    times: list[float] = []
    for _ in range(20):
        busy.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        other.copy_(tensor)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def inputs(dtype: torch.dtype, *shapes: tuple[int, int]) -> list[Tensor]:
    """Return random tensors of these shapes, labels and per-row k."""
    generator = torch.Generator("cuda").manual_seed(0)
    noise = [torch.randn(shape, generator=generator, device="cuda") for shape in shapes]
    rows, classes = len(noise[0]), shapes[-1][0 if len(shapes) > 1 else 1]
    target = torch.randint(classes, (rows,), generator=generator, device="cuda")
    leaves = [tensor.to(dtype).requires_grad_() for tensor in noise]
    return [*leaves, target, torch.linspace(0.25, 4, rows, device="cuda")]


def logits_arena(dtype: torch.dtype, rows: int, classes: int) -> Arena:
    logits, target, ks = inputs(dtype, (rows, classes))
    return Arena("logits", of_logits(), [logits], target, ks)


def probabilities_arena(dtype: torch.dtype, rows: int, classes: int) -> Arena:
    logits, _, ks = inputs(dtype, (rows, classes))
    target = logits.detach().roll(1, 0).softmax(1)
    return Arena("probabilities", of_probabilities(), [logits], target, ks)


def binary_arena(dtype: torch.dtype, rows: int, classes: int) -> Arena:
    logits, *_ = inputs(dtype, (rows, classes))
    labels = (logits.detach().roll(1, 0) > 0).to(dtype)
    ks = torch.linspace(0.25, 4, logits.numel(), device="cuda").reshape(logits.shape)
    smoothed = 0.99 * labels + 0.005  # close enough to have nearly the same loss
    return Arena("binary", of_binary(smoothed), [logits], labels, ks)


def linear_inputs(dtype: torch.dtype, rows: int, width: int, classes: int) -> list[Tensor]:
    """Return random hidden states, a weight scaled for logits of unit size, labels and k."""
    hidden, weight, target, ks = inputs(dtype, (rows, width), (classes, width))
    with torch.no_grad():
        weight /= width**0.5
    return [hidden, weight, target, ks]


def linear_arena(dtype: torch.dtype, rows: int, width: int, classes: int) -> Arena:
    hidden, weight, target, ks = linear_inputs(dtype, rows, width, classes)
    return Arena("linear", of_linear(), [hidden, weight], target, ks)


def peer_versions() -> dict[str, str]:
    return {f"{name}_version": version(package) for name, package in PEERS.items()}


class Case(NamedTuple):
    """A shape to measure, and a function that returns its arena."""

    form: str
    shape: str
    dtype: str
    prepare: Callable[[], Arena]

    @property
    def name(self) -> str:
        return f"{self.form} {self.dtype} {self.shape}"

    @property
    def size(self) -> int:
        return math.prod(map(int, self.shape.split("x")))


def cases() -> Iterator[Case]:
    forms = (
        ("logits", LOGITS, logits_arena),
        ("probabilities", PROBABILITIES, probabilities_arena),
        ("binary", BINARY, binary_arena),
        ("linear", LINEAR, linear_arena),
    )
    for form, shapes, arena in forms:
        for dtype, *shape in shapes:
            name = "x".join(map(str, shape))
            kind = str(dtype).removeprefix("torch.")
            yield Case(form, name, kind, partial(arena, dtype, *shape))


def prepare_compiler() -> None:
    """Make all processes share the same caches on disk; forget what was compiled before."""
    # Inductor would choose another folder in the processes that it runs in.
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path.home() / ".triton/cache"))
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1  # `WORKERS` processes compile at once
    torch._dynamo.reset()


def compile_case(name: str) -> str:
    """Compile all kernels of a case; return its name and the seconds."""
    begun = time.monotonic()
    prepare_compiler()
    (case,) = (case for case in cases() if case.name == name)
    try:
        case.prepare().compile()
    except Exception as error:  # such as too little memory beside the others
        return f"{name}: {type(error).__name__}"
    gc.collect()
    torch.cuda.empty_cache()
    return f"{name}: {time.monotonic() - begun:.0f} s"


def compile_all(names: Sequence[str]) -> None:
    """Compile the C++ node, and the kernels of all cases, in several processes."""
    begun = time.monotonic()
    subprocess.run([sys.executable, "-m", "pseudograd.loss.triton.node"], check=True)
    print(f"the node: {time.monotonic() - begun:.0f} s", flush=True)
    spawn = multiprocessing.get_context("spawn")
    workers = max(1, min(WORKERS, len(names), (os.cpu_count() or 1) - 1))
    with ProcessPoolExecutor(workers, spawn) as pool:
        for done in as_completed([pool.submit(compile_case, name) for name in names]):
            print(f"compiled {done.result()}", flush=True)
    print(f"compiling took {time.monotonic() - begun:.0f} s", flush=True)


def line_of(case: Case, name: str, result: Result, copied: float) -> dict[str, str]:
    line = {"form": case.form, "shape": case.shape, "dtype": case.dtype, "way": name}
    for part in ("forward", "backward", "both", "host", "wall"):
        spread: Spread = getattr(result, part)
        line |= {f"{part}_ms_{at}": f"{ms:.4f}" for at, ms in spread._asdict().items()}
    return line | {
        "wall_ms_error": f"{result.wall_error:.4f}",
        "peak_bytes": str(result.peak_bytes),
        "copy_ms": f"{copied:.4f}",
        "copy_share": f"{copied / result.both.median:.3f}",
        "turns": str(result.turns),
        "wall_turns": str(result.wall_turns),
    }


def order(case: Case) -> tuple[bool, int, int]:
    """Return a key that sorts cases: the telling ones, then from small to large, layers last."""
    place = TELLING.index(case.name) if case.name in TELLING else len(TELLING)
    return case.form == "linear", place, case.size


def main(out: Path, only: str, rest: bool, seconds: float, compiles: bool, measures: bool) -> None:
    """Measure, and print and write the table.

    Args:
        out: The file to write.
        only: Parts of names of cases, separated by commas.
        rest: Keep the cases that the file has.
        seconds: No case starts that would end later than this.
        compiles: Whether to fill the caches first.
        measures: Whether to measure.

    """
    begun = time.monotonic()
    facts, peers = environment("cuda"), peer_versions()
    print(f"{facts['hardware']}, torch {facts['torch']}, triton {facts['triton']}, peers {peers}")
    kept = earlier(out, facts) if rest else []
    lines: dict[str, list[dict[str, Any]]] = {case.name: [] for case in cases()}
    for line in kept:
        lines["{form} {dtype} {shape}".format(**line)].append(line)
    chosen = [
        case
        for case in cases()
        if any(text in case.name for text in only.split(","))
        and not lines[case.name]
        and (case.form != "linear" or "linear" in only)
    ]
    prepare_compiler()
    if compiles:
        compile_all([case.name for case in sorted(chosen, key=lambda case: -case.size)])
    left = sorted(chosen, key=order) if measures else []
    longest = 0.0
    while left and time.monotonic() - begun + longest < seconds:
        case, start = left.pop(0), time.monotonic()
        lines[case.name] = [{**line, **peers, **facts} for line in measured(case)]
        write([line for found in lines.values() for line in found], out, quiet=True)
        longest = max(longest, time.monotonic() - start)
        print(f"  {time.monotonic() - start:.0f} s", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    if measures:
        show([line for found in lines.values() for line in found])
        print(f"written to {out} after {time.monotonic() - begun:.0f} s")
    if left:
        print("not measured, see --rest:", *(case.name for case in left), sep="\n  ")


def measured(case: Case) -> Iterator[dict[str, str]]:
    """Measure a case; print and yield a line for each contender."""
    torch._dynamo.reset()  # compile each shape as for a program with only this shape
    arena = case.prepare()
    copied = 0.0 if case.form == "linear" else copy_ms(arena.leaves[0].detach())
    print(f"{case.name}: milliseconds, forward / backward / both (20% to 80%) / host / wall")
    for name, result in arena.race():
        low, high = result.both.low, result.both.high
        print(
            f"  {name:<36}{result.forward.median:>9.4f}{result.backward.median:>9.4f}"
            f"{result.both.median:>9.4f} ({low:.4f} to {high:.4f})"
            f"{result.host.median:>8.3f}{result.wall.median:>8.3f} ± {result.wall_error:.3f}"
            f"{result.peak_bytes / 1e6:>10.1f} MB{copied / result.both.median:>7.2f}",
            flush=True,
        )
        yield line_of(case, name, result, copied)


def reference_of(way: str, theirs: str) -> str:
    """Return the contender of PyTorch that one of ours is compared with."""
    mode = way.partition(", ")[2]
    if mode == "probabilities":
        return f"{theirs}, probabilities"
    return REFERENCES.get(mode, "{}").format(theirs)


def show(lines: Sequence[Mapping[str, str]]) -> None:
    """Print every ratio to PyTorch's loss run in the same way: wall clock, GPU time and memory.

    A ratio above 1 is marked: with "?" if it is less than two standard errors above. The second
    memory is relative to PyTorch's loss without a graph.
    """
    shapes: dict[str, dict[str, Mapping[str, str]]] = defaultdict(dict)
    for line in lines:
        shapes["{form} {dtype} {shape}".format(**line)][line["way"]] = line
    print("ours / PyTorch's loss, run in the same way: wall clock, GPU time, memory, and memory to"
          " PyTorch's without a graph")  # fmt: skip
    slower, longer, larger = [], [], []
    for shape, ways in shapes.items():
        theirs = "binary_cross_entropy" if shape.startswith("binary") else "cross_entropy"
        for way, line in ways.items():
            base, plainly = ways.get(reference_of(way, theirs)), ways.get(theirs)
            if not way.startswith("ours") or way.endswith("plain") or not (base and plainly):
                continue
            wall, other = (float(one["wall_ms_median"]) for one in (line, base))
            errors = (float(line["wall_ms_error"]) / wall, float(base["wall_ms_error"]) / other)
            ratio, error = wall / other, wall / other * math.hypot(*errors)
            gpu = float(line["both_ms_median"]) / float(base["both_ms_median"])
            memories = [int(line["peak_bytes"]) / int(one["peak_bytes"]) for one in (base, plainly)]
            mark = "" if ratio <= 1 else "?" if ratio < 1 + 2 * error else "SLOWER"
            print(f"{shape:<38}{way:<26}{ratio:>7.3f} ± {error:.3f} {mark:<7}{gpu:>7.3f}"
                  f"{memories[0]:>7.3f}{memories[1]:>7.3f}")  # fmt: skip
            if mark == "SLOWER":
                slower.append(f"{shape}, {way}: {ratio:.3f} ± {error:.3f}")
            if gpu > 1:
                longer.append(f"{shape}, {way}: {gpu:.3f}")
            if memories[1] > 1:
                larger.append(f"{shape}, {way}: {memories[1]:.3f}")
    print(f"{len(longer)} longer on the GPU", *longer, sep="\n  ")
    print(f"{len(larger)} with more memory than PyTorch's", *larger, sep="\n  ")
    print(f"{len(slower)} slower by the wall clock", *slower, sep="\n  ")
