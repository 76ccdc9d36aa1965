"""Time the loss on a GPU beside other implementations of cross-entropy; see `benchmarks.loss`.

A turn is a forward and a backward pass on logits that are not in the L2 cache, timed by CUDA
events. The GPU is kept busy beforehand, so that all kernels of the turn are queued when it reaches
them, as in the training of a network: this times the GPU, not Python. The table also has the host
time to queue them, and the wall-clock time of a step with an empty queue, from the call until the
GPU is done. For implementations that synchronize in between (Liger reads a number back), the wait
is included.

Contenders take turns in a random order, so that disturbances affect all alike. For layer and loss,
those close to the fastest get more turns. The table shows medians with 20th and 80th percentiles,
peak memory beyond the inputs, and the time of a copy of the logits as a fraction of the total: a
loss that reads them once and writes their gradient once has 1, one that reads them twice 2/3.

Peers that are not installed are listed and left out.
"""

from __future__ import annotations

import functools
import importlib
import random
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.environment import environment, write
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
LINEAR = ((torch.bfloat16, 8192, 4096, 131072), (torch.bfloat16, 8192, 2048, 32000))
KS = ("1", "0.5", "2", "per row")
PEERS = {"liger": "liger-kernel", "cut": "cut-cross-entropy", "quack": "quack-kernels"}
CUTE = "liger_kernel.ops.cutedsl.ops"  # for Hopper GPUs; opt-in in Liger
TURNS = {"logits": 60, "probabilities": 30, "binary": 30, "linear": 20}
# Most of the time goes to the same matrix products, so the best need more turns to separate.
MORE_TURNS = {"linear": 40}
CLOSE = 1.05
# Our module remembers whether its loss was scaled, and matrix products hit the GPU's power limit,
# which lowers its clock. So each contender is timed after calls of its own.
CALLS_BEFORE = {"logits": 1, "probabilities": 1, "binary": 1, "linear": 2}
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
    peak_bytes: int
    turns: int


def percentiles(values: list[float]) -> Spread:
    fifths = statistics.quantiles(values, n=5, method="inclusive")
    return Spread(statistics.median(values), fifths[0], fifths[-1])


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
    contenders["ours k=0.5, none"] = lambda z, y, ks: loss(z, y, k=0.5, reduction="none").mean()
    return contenders


def of_probabilities() -> dict[str, Loss]:
    """Return contenders for class probabilities, which the peers' kernels do not support."""
    contenders = of_pytorch() | of_ourselves()
    contenders["ours k=0.5, plain"] = lambda z, q, ks: loss(z, q, k=0.5, implementation="torch")
    return contenders


def of_binary() -> dict[str, Loss]:
    """Return contenders for binary labels of the same shape as the logits."""
    theirs = F.binary_cross_entropy_with_logits
    compiled_theirs = torch.compile(theirs, dynamic=False)
    compiled_ours = torch.compile(binary_loss, fullgraph=True, dynamic=False)
    contenders: dict[str, Loss] = {
        "binary_cross_entropy": lambda z, t, soft: theirs(z, t),
        "torch.compile": lambda z, t, soft: compiled_theirs(z, t),
        "ours k=0.5, compiled": lambda z, t, soft: compiled_ours(z, t, k=0.5),
        "ours k=0.5, scaled": lambda z, t, soft: 1.005 * binary_loss(z, t, k=0.5),
    }
    for k in (1.0, 0.5):
        contenders[f"ours k={k:g}"] = partial(ours_binary, k=k)
    contenders["ours k=0.5, probabilities"] = lambda z, t, soft: binary_loss(z, soft, k=0.5)
    return contenders


def ours_binary(z: Tensor, t: Tensor, soft: Tensor, k: float) -> Tensor:
    return binary_loss(z, t, k=k)


def of_pytorch() -> dict[str, Loss]:
    return {
        "cross_entropy": lambda z, y, ks: F.cross_entropy(z, y),
        "torch.compile": lambda z, y, ks: compiled_cross_entropy()(z, y),
    }


def of_ourselves() -> dict[str, Loss]:
    contenders: dict[str, Loss] = {f"ours k={k}": partial(ours, k=k) for k in KS}
    contenders["ours k=0.5, compiled"] = lambda z, y, ks: compiled_ours()(z, y, k=0.5)
    # As with gradient accumulation or a GradScaler: the upstream gradient is not 1, and the module
    # remembers that from one step to the next.
    criterion = TunableCrossEntropyLoss(k=0.5)
    contenders["ours k=0.5, scaled"] = lambda z, y, ks: 1.005 * criterion(z, y)
    return contenders


def ours(z: Tensor, y: Tensor, ks: Tensor, k: str) -> Tensor:
    return loss(z, y, k=ks if k == "per row" else float(k))


@functools.cache
def compiled_cross_entropy() -> Loss:
    return torch.compile(F.cross_entropy, dynamic=False)


@functools.cache
def compiled_ours() -> Loss:
    return torch.compile(loss, fullgraph=True, dynamic=False)


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
    for k in KS:
        contenders[f"ours k={k}"] = partial(ours_linear, k=k)
    for rows in (256, 512, 1024, 2048, 8192):
        contenders[f"ours k=0.5, {rows} rows"] = partial(ours_linear, k="0.5", rows=rows)
    return {name: loss for name, loss in contenders.items() if loss}


def quack_linear(quack: Loss, h: Tensor, w: Tensor, y: Tensor, ks: Tensor, rows: int) -> Tensor:
    return quack(h, w, y, chunk_size=rows)


def ours_linear(
    h: Tensor, w: Tensor, y: Tensor, ks: Tensor, k: str, rows: int | None = None
) -> Tensor:
    return linear_loss(h, w, y, k=ks if k == "per row" else float(k), chunk_rows=rows)


class Arena:
    """Contenders that take turns on the same inputs."""

    def __init__(
        self, form: str, contenders: dict[str, Loss], leaves: list[Tensor], *others: Tensor
    ) -> None:
        self.form, self.contenders, self.leaves, self.others = form, contenders, leaves, others
        self.turns, self.more_turns = TURNS[form], MORE_TURNS.get(form, 0)
        self.calls_before = CALLS_BEFORE[form]
        self.original = leaves[0].detach().clone()
        self.busy = torch.empty(BUSY_BYTES, dtype=torch.int8, device="cuda")

    def turn(self, loss: Loss, overwrites: bool) -> tuple[float, float, float, float]:
        """Return the milliseconds of forward, backward, host time and wall-clock time."""
        for _ in range(self.calls_before):
            self.clear()
            loss(*self.leaves, *self.others).backward()
        if self.form != "linear":  # its many launches are queued during the preceding calls
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
        self.clear()
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss(*self.leaves, *self.others).backward()
        torch.cuda.synchronize()
        wall = time.perf_counter() - start
        if overwrites:
            self.restore()
        return begin.elapsed_time(middle), middle.elapsed_time(end), 1000 * host, 1000 * wall

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
        ready: list[str] = []
        expected = None
        for name, contender in self.contenders.items():
            try:
                for _ in range(3):
                    self.turn(contender, overwrites(name))
                value = contender(*self.leaves, *self.others).item()
                self.restore()
                expected = value if expected is None else expected
                if abs(value - expected) > 0.01 * expected:
                    raise ValueError(f"its value is {value}, but others have {expected}")
                ready.append(name)
            except Exception as error:
                print(f"left out here: {name} ({type(error).__name__}: {str(error)[:200]})")
        times: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in ready}
        shuffle = random.Random(0).shuffle

        def rounds(names: list[str], count: int) -> None:
            for _ in range(count):
                shuffle(names)
                for name in names:
                    times[name].append(self.turn(self.contenders[name], overwrites(name)))

        rounds(ready, self.turns)
        median = {name: statistics.median(a + b for a, b, *_ in times[name]) for name in ready}
        fastest = min(median.values())
        rounds([name for name in ready if median[name] < CLOSE * fastest], self.more_turns)
        for name in (name for name in self.contenders if name in times):
            forward, backward, host, wall = (list(part) for part in zip(*times[name], strict=True))
            both = [a + b for a, b, *_ in times[name]]
            yield name, Result(
                percentiles(forward), percentiles(backward), percentiles(both), percentiles(host),
                percentiles(wall), self.peak(self.contenders[name], overwrites(name)), len(both),
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


def logits_arena(dtype: torch.dtype, rows: int, classes: int) -> tuple[float, Arena]:
    logits, target, ks = inputs(dtype, (rows, classes))
    return copy_ms(logits.detach()), Arena("logits", of_logits(), [logits], target, ks)


def probabilities_arena(dtype: torch.dtype, rows: int, classes: int) -> tuple[float, Arena]:
    logits, _, ks = inputs(dtype, (rows, classes))
    target = logits.detach().roll(1, 0).softmax(1)
    arena = Arena("probabilities", of_probabilities(), [logits], target, ks)
    return copy_ms(logits.detach()), arena


def binary_arena(dtype: torch.dtype, rows: int, classes: int) -> tuple[float, Arena]:
    logits, *_ = inputs(dtype, (rows, classes))
    labels = (logits.detach().roll(1, 0) > 0).to(dtype)
    smoothed = 0.99 * labels + 0.005  # close enough for nearly the same loss
    return copy_ms(logits.detach()), Arena("binary", of_binary(), [logits], labels, smoothed)


def linear_inputs(dtype: torch.dtype, rows: int, width: int, classes: int) -> list[Tensor]:
    """Return random hidden states, a weight scaled for logits of unit size, labels and k."""
    hidden, weight, target, ks = inputs(dtype, (rows, width), (classes, width))
    with torch.no_grad():
        weight /= width**0.5
    return [hidden, weight, target, ks]


def linear_arena(dtype: torch.dtype, rows: int, width: int, classes: int) -> tuple[float, Arena]:
    hidden, weight, target, ks = linear_inputs(dtype, rows, width, classes)
    return 0.0, Arena("linear", of_linear(), [hidden, weight], target, ks)


def peer_versions() -> dict[str, str]:
    return {f"{name}_version": version(package) for name, package in PEERS.items()}


def cases() -> Iterator[tuple[str, str, str, Callable[[], tuple[float, Arena]]]]:
    """Yield form, shape, dtype and a function that returns the arena."""
    forms = (
        ("logits", LOGITS, logits_arena),
        ("probabilities", PROBABILITIES, probabilities_arena),
        ("binary", BINARY, binary_arena),
        ("linear", LINEAR, linear_arena),
    )
    for form, shapes, arena in forms:
        for dtype, *shape in shapes:
            name = "x".join(map(str, shape))
            yield form, name, str(dtype).removeprefix("torch."), partial(arena, dtype, *shape)


def main(out: Path, only: str) -> None:
    """Measure, and print and write the table."""
    facts = environment("cuda")
    peers = peer_versions()
    print(f"{facts['hardware']}, torch {facts['torch']}, triton {facts['triton']}, peers {peers}")
    lines = []
    for form, shape, dtype, prepare in cases():
        if not any(text in f"{form} {dtype} {shape}" for text in only.split(",")):
            continue
        # Compile each shape from scratch, as for a program with only this shape.
        torch._dynamo.reset()
        compiled_cross_entropy.cache_clear()
        compiled_ours.cache_clear()
        copied, arena = prepare()
        print(
            f"{form} {dtype} {shape}: milliseconds, "
            "forward / backward / both (20% to 80%) / host / wall"
        )
        for name, result in arena.race():
            share = copied / result.both.median
            megabytes = result.peak_bytes / 1e6
            low, high = result.both.low, result.both.high
            print(
                f"  {name:<26}{result.forward.median:>9.3f}{result.backward.median:>9.3f}"
                f"{result.both.median:>9.3f} ({low:.3f} to {high:.3f})"
                f"{result.host.median:>8.3f}{result.wall.median:>8.3f}"
                f"{megabytes:>10.1f} MB{share:>7.2f}",
                flush=True,
            )
            line = {"form": form, "shape": shape, "dtype": dtype, "way": name}
            for part in ("forward", "backward", "both", "host", "wall"):
                spread: Spread = getattr(result, part)
                line |= {f"{part}_ms_{at}": f"{ms:.4f}" for at, ms in spread._asdict().items()}
            line |= {"peak_bytes": str(result.peak_bytes), "copy_ms": f"{copied:.4f}",
                     "copy_share": f"{share:.3f}", "turns": str(result.turns)}  # fmt: skip
            lines.append({**line, **peers, **facts})
        write(lines, out)
