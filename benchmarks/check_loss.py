"""Check the kernels of the loss on this machine; write one line per check to a CSV file.

    python -m benchmarks.check_loss --workers 12
    python -m benchmarks.check_loss --workers 12 --seconds 400    # start no section after that
    python -m benchmarks.check_loss --workers 12 --rest           # continue a run that was cut off

The cases are random, and new in each run: ``--seed`` repeats those of another. The reference is the
rule in float64 by PyTorch operations, which the tests compare with 50 digits. Errors are relative,
for every component of at least 1e-20; smaller components need the same absolute accuracy, or count
as completely wrong. In half precision, errors are in units in the last place (ULP) of the rounded
reference. With ``--device cpu``, Triton's interpreter runs the same
checks on few rows and classes. The file is written after each section, so that a run that is cut
off keeps what it has. A section that raises is a check that does not hold; the others go on. One
that runs out of memory beside the others runs again, by itself, and so does the last section.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import pickle
import secrets
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F

if any(word.split("=")[-1] == "cpu" for word in sys.argv):  # workers inherit it
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are loaded

from benchmarks.environment import RESULTS, earlier, environment, write
from pseudograd.loss import (
    TunableCrossEntropyLoss,
    tunable_binary_cross_entropy_with_logits,
    tunable_cross_entropy,
    tunable_linear_cross_entropy,
)
from pseudograd.loss.triton import launch, node, operators, plans
from pseudograd.loss.triton.binary import fused_binary
from pseudograd.loss.triton.scaled import ScaledBefore
from pseudograd.rules import soft_tunable, tunable
from pseudograd.rules.paper import binary_push, cross_entropy, top_and_margin

NEGLIGIBLE = 1e-20
KINDS = 5
IGNORED = -100
TOO_LARGE = "ended for lack of memory"
SLEEP = 10**9  # GPU cycles, about half a second: far longer than the launches of a step
NODE_SHAPES = ((128, 10), (5000, 10), (4096, 1000), (256, 32000))
USUAL = (10, 100, 1000, 32000, 131072)  # classes
# Classes for soft targets in half precision: compiling the kernels for all shapes takes too long.
SOFT_IN_HALF = (10, 33, 257, 1000, 8193)


class Check(NamedTuple):
    """A line of the file: the check, the worst error found and the error allowed."""

    check: str
    kernel: str
    dtype: str
    rows: int
    classes: int
    k: str
    worst: float
    allowed: float

    @property
    def holds(self) -> bool:
        return self.worst <= self.allowed  # False for NaN


def battery(rows: int, classes: int, device: str, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return float32 logits with gaps of 1e-6 to 1e4, right, wrong and tied labels, k up to 64."""
    generator = torch.Generator(device).manual_seed(seed)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(rows, 1, generator=generator, device=device)

    gap, k = 10 ** uniform(-6, 4), 2 ** uniform(-6, 6).squeeze(1)
    k[::5], k[1::5] = 1 / 64, 64
    z = torch.randn(rows, classes, generator=generator, device=device) * gap / 3
    label = torch.randint(classes, (rows, 1), generator=generator, device=device)
    others = z.scatter(1, label, -torch.inf)
    top, total = others.amax(1, keepdim=True), others.logsumexp(1, keepdim=True)
    kind = torch.arange(rows, device=device).unsqueeze(1) % KINDS
    of_label = torch.where(kind == 1, top + gap, torch.where(kind == 2, top - gap, total + gap / 9))
    z = torch.where(kind > 0, z.scatter(1, label, of_label), z)
    masked = torch.rand(z.shape, generator=generator, device=device) < 0.5
    z = z.masked_fill(masked.scatter(1, label, False) & (kind == 4), -torch.inf)
    return z + 10 * gap * (kind % 2), label.squeeze(1), k


def error(computed: Tensor, true: Tensor) -> float:
    """Return the largest relative error; in half precision, in units in the last place."""
    off = (computed.double() - true).abs()
    negligible = true.abs() < NEGLIGIBLE
    single = computed.dtype == torch.float32
    if not bool((off[negligible] <= NEGLIGIBLE * (1e-5 if single else 1)).all()):
        return 1e9
    if single:
        return float(torch.where(negligible, 0, off / true.abs()).amax())
    rounded = true.to(computed.dtype)
    steps = [half.view(torch.int16).int() for half in (computed, rounded)]
    steps = [torch.where(number < 0, -(number & 0x7FFF), number) for number in steps]
    return float(torch.where(negligible, 0, (steps[0] - steps[1]).abs()).amax())


def off_the_norm(computed: Tensor, true: Tensor) -> float:
    return float((computed.double() - true).norm() / true.norm())


def in_parts(function: Callable[..., Tensor], rows: int, *tensors: Tensor) -> Tensor:
    return torch.cat(
        [function(*part) for part in zip(*(t.split(rows) for t in tensors), strict=True)]
    )


def true_gradient(z: Tensor, label: Tensor, k: Tensor) -> Tensor:
    return in_parts(lambda z, y, k: tunable(z.double(), y, k.double()), 2048, z, label, k)


def true_value(z: Tensor, label: Tensor) -> Tensor:
    def value(z: Tensor, label: Tensor) -> Tensor:
        return cross_entropy(top_and_margin(z.double(), label)[1]).squeeze(1)

    return in_parts(value, 2048, z, label)


def gradient(
    z: Tensor,
    target: Tensor,
    k: Any,
    upstream: float | Tensor = 1.0,
    at_once: bool = True,
    **settings: Any,
) -> Tensor:
    """Compute the gradient in the forward pass if the reduction allows it, else in the backward."""
    scaled = ScaledBefore()
    scaled.flag().fill_(not at_once)
    leaf = z.detach().requires_grad_()
    settings = {"implementation": "triton", "_scaled": scaled, **settings}
    loss = tunable_cross_entropy(leaf, target, k=k, **settings)
    return torch.autograd.grad(loss, leaf, torch.as_tensor(upstream).to(loss).expand_as(loss))[0]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Bench:
    """All checks, at sizes suited to the device, of random cases that depend on the seed."""

    def __init__(self, device: str, seed: int) -> None:
        self.device, self.seed, self.small = device, seed, device == "cpu"
        torch.manual_seed(seed)  # for cases without a generator

    def generator(self, number: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(self.seed + number)

    def rows(self, classes: int) -> int:
        return 10 if self.small else min(200_000, max(1000, 200_000_000 // classes))

    def shapes(self) -> Iterator[tuple[str, int]]:
        """Yield kernels and numbers of classes, multiples of the block size and others."""
        small, large = ((2, 3, 10, 33), (100,)) if self.small else (
            (2, 3, 10, 100, 257, 1000, 4096, 8192), (8193, 32000, 32001, 50257, 131072, 262144)
        )  # fmt: skip
        for classes in small:
            yield "tile", classes
        for classes in (*large, *small[-2:]):
            yield "row", classes

    def sections(self) -> dict[str, Callable[[], Iterator[Check]]]:
        """Return the checks that run independently; the last section must run alone."""
        found: dict[str, Callable[[], Iterator[Check]]] = {}
        if not self.small:
            for dtype, shape in product(operators_dtypes(), NODE_SHAPES):
                name = "node {}x{} {}".format(*shape, name_of(dtype))
                found[name] = partial(self.of_node, shape, dtype)
        found |= {
            "graphs": self.of_graphs,
            "binary": self.of_binary,
            "transforms": self.of_transforms,
            "split": self.of_split,
            "linear": self.of_linear,
            "size": self.of_size,
        }
        for kernel in ("tile", "row"):
            found[f"corners {kernel}"] = partial(self.of_corners, kernel)
        # Long before short, but the usual numbers of classes first.
        shapes = reversed(list(self.shapes()))
        for kernel, classes in sorted(shapes, key=lambda shape: shape[1] not in USUAL):
            found[f"shape {kernel} {classes}"] = partial(self.of_shape, kernel, classes)
        return {**found, "waiting": self.of_waiting}

    def of_shape(self, kernel: str, classes: int) -> Iterator[Check]:
        longest = classes if kernel == "tile" else 0
        with mock.patch.object(launch, "LONGEST_TILE", longest):
            yield from self.of_rule(kernel, classes)
            yield from self.of_equal_logits(kernel, classes)
            yield from self.of_reduction(kernel, classes)
            yield from self.of_soft_targets(kernel, classes)
            yield from self.of_layout(kernel, classes)

    def of_rule(self, kernel: str, classes: int) -> Iterator[Check]:
        rows = self.rows(classes)
        for dtype in operators_dtypes():
            name = name_of(dtype)
            z, label, k = battery(rows, classes, self.device, self.seed + classes)
            z = z.clamp(max=torch.finfo(dtype).max).to(dtype)
            allowed = 1e-5 if dtype == torch.float32 else 1.0
            sensitivities = {"each row": k} | {
                str(n): torch.full_like(k, n) for n in (0.5, 1, 2, 7)
            }
            value = tunable_cross_entropy(z, label, k=k, reduction="none", implementation="triton")
            off = error(value, true_value(z, label))
            yield Check("value", kernel, name, rows, classes, "", off, allowed)
            for text, ks in sensitivities.items():
                true = true_gradient(z, label, ks)
                given: Any = ks if text == "each row" else float(text)
                f = gradient(z, label, given, reduction="sum")
                yield Check("gradient", kernel, name, rows, classes, text, error(f, true), allowed)
                left = gradient(z, label, given, at_once=False, reduction="sum")
                yield Check("gradients left to the backward pass that differ", kernel, name, rows,
                            classes, text, float((left != f).sum()), 0.0)  # fmt: skip
                if text in ("each row", "1"):
                    scaled = gradient(z, label, given, 3.0, reduction="sum")
                    yield Check("gradient times 3", kernel, name, rows, classes, text,
                                error(scaled, 3 * true), allowed)  # fmt: skip
                if text in ("each row", "1", "0.5"):
                    later = gradient(z, label, given, 3.0, reduction="none")
                    yield Check("gradient of each times 3", kernel, name, rows, classes, text,
                                error(later, 3 * true), allowed)  # fmt: skip
            again = gradient(z, label, k, reduction="sum")
            first = gradient(z, label, k, reduction="sum")
            yield Check("runs that differ", kernel, name, rows, classes, "each row",
                        float((again != first).sum()), 0.0)  # fmt: skip

    def of_equal_logits(self, kernel: str, classes: int) -> Iterator[Check]:
        """Check equal logits, whose rounding errors add up and are multiplied by k."""
        rows = min(self.rows(classes), 1000)
        generator = self.generator(classes)
        d = -12 * torch.rand(rows, 1, generator=generator, device=self.device)
        z = d.repeat(1, classes)
        z[:, 1:2] = 0
        z[:, 0] = z[:, 1:].logsumexp(1) + 0.7 * d[:, 0] / 12
        label = torch.zeros(rows, dtype=torch.long, device=self.device)
        k = torch.full((rows,), 64.0, device=self.device)
        off = error(gradient(z, label, 64.0, reduction="sum"), true_gradient(z, label, k))
        yield Check("equal logits", kernel, "float32", rows, classes, "64", off, 1e-5)

    def of_reduction(self, kernel: str, classes: int) -> Iterator[Check]:
        """Check the weighted mean with ignored rows, for few rows and for many."""
        for rows in {128, self.rows(classes)} if classes <= 128 else {128}:
            z, label, k = battery(rows, classes, self.device, self.seed + rows)
            label[::7] = IGNORED
            weight = torch.linspace(0.5, 2, classes, device=self.device)
            w = torch.where(label == IGNORED, 0, weight.double()[label.clamp(min=0)])
            f = gradient(z, label, k, weight=weight)
            true = true_gradient(z, label.clamp(min=0), k) * (w / w.sum()).unsqueeze(1)
            kind = (kernel, "float32", rows, classes, "each row")
            yield Check("weighted mean", *kind, error(f, true), 1e-5)
            for reduction in ("mean", "sum"):
                at_once, left = (
                    gradient(z, label, k, at_once=now, weight=weight, reduction=reduction)
                    for now in (True, False)
                )
                yield Check(f"gradients of the {reduction} left to the backward pass that differ",
                            *kind, float((at_once != left).sum()), 0.0)  # fmt: skip

    def of_soft_targets(self, kernel: str, classes: int) -> Iterator[Check]:
        """Check weighted and smoothed labels, and weighted probabilities."""
        rows = min(self.rows(classes), 2000)
        generator = self.generator(classes)
        z = 3 * torch.randn(rows, classes, generator=generator, device=self.device)
        label = torch.randint(classes, (rows,), generator=generator, device=self.device)
        weight = torch.rand(classes, generator=generator, device=self.device) + 0.1
        q = torch.full_like(z, 0.1 / classes, dtype=torch.float64)
        q = q.scatter_add(1, label.unsqueeze(1), torch.full((rows, 1), 0.9).to(q))
        # One-hot, nearly one-hot, two classes as in mixup, and random; sums other than 1 too.
        given = torch.randn(z.shape, generator=generator, device=self.device).mul(3).softmax(1)
        pair = torch.zeros_like(given).scatter(1, label.unsqueeze(1), 0.7)
        pair.scatter_add_(1, label.flip(0).unsqueeze(1), torch.full((rows, 1), 0.3).to(pair))
        kind = torch.arange(rows, device=self.device).unsqueeze(1) % 5
        confident = (30 * torch.randn(z.shape, generator=generator, device=self.device)).softmax(1)
        given = torch.where(kind == 0, pair, torch.where(kind == 1, pair.round(), given))
        given = torch.where(kind == 3, 2 * given, torch.where(kind == 4, confident, given))
        targets: dict[str, tuple[Tensor, Tensor, dict[str, Any]]] = {
            "smoothed": (label, q, {"label_smoothing": 0.1}),
            "probabilities": (given, given.double(), {}),
        }
        half = (torch.bfloat16, torch.float16) if classes in SOFT_IN_HALF else ()
        each_row = torch.linspace(0.4, 3, rows, device=self.device)
        ks: dict[str, Any] = {"1": 1.0, "0.5": 0.5, "2": 2.0, "each row": each_row}
        dtypes = (*product((torch.float32,), ks), *product(half, ("1", "0.5", "each row")))
        for (text, (target, q, settings)), (dtype, k_text) in product(targets.items(), dtypes):
            x, kind_of = z.to(dtype), (kernel, name_of(dtype), rows, classes, k_text)
            settings = {"weight": weight, **settings}
            q = q * weight.double()
            k = ks[k_text]
            true = in_parts(
                lambda x, q, k: soft_tunable(x.double(), q, k), 256, x, q,
                k if isinstance(k, Tensor) else torch.full_like(each_row, k),
            )  # fmt: skip
            f = gradient(x, target, k, reduction="sum", **settings)
            off = (f.double() - true).abs() - self.rounding(dtype, true)
            off = off.clamp(min=0) / true.abs().amax(1, keepdim=True)
            # Where p nearly equals q, their difference is mostly the rounding error of p: of all
            # classes, or of one, whose |ε|^k is steep at 0 for k below 1.
            p = x.double().softmax(1)
            apart = (p - q / q.sum(1, keepdim=True)).abs()
            bias, power = apart.amax(1, keepdim=True), k if isinstance(k, float) else k[:, None]
            steep = ((apart + 2.0**-23 * p) ** power - apart**power) / bias.clamp(min=1e-9) ** power
            off = (off - steep).clamp(min=0)
            worst = float(torch.where(bias > 0.01, off, 0).amax())
            yield Check(f"{text}, of the row's largest", *kind_of, worst, 1e-4)
            if kernel == "tile":  # other kernels always leave it to the backward pass
                left = gradient(x, target, k, at_once=False, reduction="sum", **settings)
                yield Check(f"{text}, left to the backward pass, that differ", *kind_of,
                            float((left != f).sum()), 0.0)  # fmt: skip
            if k_text == "1":
                true_value = -(q * x.double().log_softmax(1)).sum(1)
                value = tunable_cross_entropy(
                    x, target, reduction="none", implementation="triton", **settings
                )
                # Confident correct predictions have values near 0, as accurate as PyTorch's.
                off = (value.double() - true_value).abs() - self.rounding(dtype, true_value)
                worst = float((off.clamp(min=0) / true_value.clamp(min=0.1)).amax())
                yield Check(f"{text}, value", *kind_of, worst, 1e-5)
            if classes in SOFT_IN_HALF and k_text in ("0.5", "each row"):
                upstream = (1 + torch.arange(rows, device=self.device) % 5) / 2  # exact in all
                f = gradient(x, target, k, upstream, reduction="none", **settings)
                true = true * upstream.double().unsqueeze(1)
                off = (f.double() - true).abs() - self.rounding(dtype, true)
                off = (off.clamp(min=0) / true.abs().amax(1, keepdim=True) - steep).clamp(min=0)
                worst = float(torch.where(bias > 0.01, off, 0).amax())
                yield Check(f"{text}, not reduced, of the row's largest", *kind_of, worst, 1e-4)

    def rounding(self, dtype: torch.dtype, true: Tensor) -> Tensor | float:
        """Return the rounding error in half precision: half a unit in the last place."""
        if dtype == torch.float32:
            return 0.0
        limits = torch.finfo(dtype)
        unit = limits.eps * true.abs().clamp(min=limits.smallest_normal)
        return unit if self.small else unit / 2  # the interpreter truncates where GPUs round

    def of_layout(self, kernel: str, classes: int) -> Iterator[Check]:
        rows = min(self.rows(classes), 500)
        z, label, _ = battery(rows, classes + 11, self.device, self.seed + 1)
        strided, label = z.half()[:, 3:-8], label % classes
        label[::7] = IGNORED
        before = strided.clone()
        f = gradient(strided, label, 0.5)
        expected = gradient(strided.contiguous(), label, 0.5)
        # Vectorized loads change the order of summation, so the last bit may differ.
        apart = (f.float() - expected.float()).abs() > 2**-10 * expected.float().abs() + 6e-8
        different = torch.where(f.isnan() & expected.isnan(), False, apart)
        yield Check("strided rows that differ", kernel, "float16", rows, classes, "0.5",
                    float(different.sum()), 0.0)  # fmt: skip
        changed = torch.where(before.isnan(), False, before != strided)
        yield Check("logits written to", kernel, "float16", rows, classes, "0.5",
                    float(changed.sum() + f[::7].count_nonzero()), 0.0)  # fmt: skip

    def of_size(self) -> Iterator[Check]:
        """Check more elements than 32 bits can index."""
        if self.small:
            return
        for kernel, classes in (("tile", 1000), ("row", 131072)):
            rows = 2**31 // classes + 500
            z = torch.randn(rows, classes, dtype=torch.bfloat16, device=self.device)
            label = torch.arange(rows, device=self.device) % classes
            f = gradient(z, label, 0.5, reduction="sum")[-400:]
            true = tunable(z[-400:].double(), label[-400:], 0.5)
            kind = (kernel, "bfloat16", rows, classes, "0.5")
            yield Check("beyond 2^31", *kind, error(f, true), 1.0)
            q = z.roll(1, 0).softmax(1)
            f = gradient(z, q, 0.5, reduction="sum")[-400:]
            true = soft_tunable(z[-400:].double(), q[-400:].double(), 0.5)
            worst = off_the_norm(f, true)  # up to bfloat16 rounding
            yield Check("probabilities beyond 2^31, of the norm", *kind, worst, 4e-3)

    def of_binary(self) -> Iterator[Check]:
        """Check labels and probabilities, with logits of 1e-6 to 1e4 and k of 1/64 to 64."""
        count = 2000 if self.small else 10_000_001
        generator = self.generator(0)

        def uniform(low: float, high: float) -> Tensor:
            return low + (high - low) * torch.rand(count, generator=generator, device=self.device)

        k, size = 2 ** uniform(-6, 6), 10 ** uniform(-6, 4)
        label, pos_weight = uniform(0, 1).round(), torch.tensor(3.0, device=self.device)
        among = torch.where(torch.arange(count, device=self.device) % 2000 < 700, size % 1, label)
        targets = {"labels": label, "probabilities": among}
        for dtype, (text, target) in product(operators_dtypes(), targets.items()):
            z = (size * torch.where(uniform(0, 1) > 0.5, 1, -1)).to(dtype)
            yes, no = 3 * target.double(), 1 - target.double()
            true = binary_push(z, yes, no, k.double())
            value = F.binary_cross_entropy_with_logits(
                z.double(), target.double(), pos_weight=pos_weight, reduction="none"
            )
            kind = ("binary", name_of(dtype), count, 1, "each")
            allowed = 1e-5 if dtype == torch.float32 else 1.0
            for reduction, upstream in product(("sum", "none"), (1.0, 3.0)):
                leaf = z.detach().requires_grad_()
                loss = fused_binary(leaf, target, k, None, pos_weight, reduction, dtype)
                (f,) = torch.autograd.grad(loss, leaf, torch.full_like(loss, upstream))
                yield Check(f"{text}, {reduction}, gradient times {upstream}", *kind,
                            error(f, upstream * true), allowed)  # fmt: skip
            near = value.abs() > 1e-6  # below, the reference is not exact
            off = error(loss.detach()[near], value[near])
            yield Check(f"{text}, value", *kind, off, allowed)
        if not self.small:
            z = torch.randn(2**31 + 500, dtype=torch.bfloat16, device=self.device).requires_grad_()
            fused_binary(z, torch.ones_like(z), 0.5, None, None, "sum", torch.float32).backward()
            assert z.grad is not None
            one = torch.ones(400, device=self.device)
            true = binary_push(z.detach()[-400:], one, 0 * one, 0.5)
            kind = ("binary", "bfloat16", len(z), 1, "0.5")
            yield Check("beyond 2^31", *kind, error(z.grad[-400:], true), 1.0)

    def of_node(self, shape: tuple[int, int], dtype: torch.dtype) -> Iterator[Check]:
        """Check that the usual call, through the C++ node, equals the operators bit for bit."""
        if not node.library_path().exists():  # `main` has compiled it, unless that failed
            subprocess.run([sys.executable, "-m", node.__name__], check=True)
        assert node.compiled_node() is not None
        plans._MOST_SAVED = 10**6  # this process has more layouts than a program should
        rows, classes = shape
        kernel = "row" if classes > launch.LONGEST_TILE else "tile"
        z, label, each_row = battery(rows, classes, self.device, self.seed + 4)
        label[::7] = IGNORED
        x = z.clamp(max=torch.finfo(dtype).max).to(dtype)
        targets = {
            "labels": (label, 0.0),
            "smoothed labels": (label, 0.1),
            "probabilities": (x.clamp(-10, 10).softmax(1), 0.0),
        }
        for text, (target, smoothing) in targets.items():
            ks = {"0.5": 0.5, "1": 1, "2": 2.0, "7": 7.0, "0.3": 0.3, "each row": each_row}
            soft = text != "labels"  # their kernels take long to compile
            for k_text, k in ks.items():
                if soft and k_text not in ("0.5", "7", "each row"):
                    continue
                kind = (kernel, name_of(dtype), rows, classes, k_text)
                differ = self.differences(x, target, k, smoothing)
                yield Check(f"{text}, node and operators that differ", *kind, differ, 0.0)
        for k_text, k in {"0.5": 0.5, "each": each_row[:, None].expand_as(x).clone()}.items():
            differ = self.binary_differences(x, (z > 1).to(dtype), k)
            kind = ("binary", name_of(dtype), rows, classes, k_text)
            yield Check("binary, node and operators that differ", *kind, differ, 0.0)
        for text, (target, smoothing) in targets.items():
            for k_text, k in {"0.5": 0.5, "3": 3.0, "each row": each_row}.items():
                differ = self.operator_differences(x, target, k, smoothing)
                kind = (kernel, name_of(dtype), rows, classes, k_text)
                yield Check(f"{text}, operators of graphs in C++ and in Python that differ", *kind,
                            differ, 0.0)  # fmt: skip
        if dtype == torch.float32:
            yield self.of_captured_node(kernel, z, label)
        # Those of another process: the plans of this one have been saved.
        node._plans.clear()
        with mock.patch.object(node, "_make_plan", side_effect=AssertionError("no saved plan")):
            for text, (target, smoothing) in targets.items():
                for k_text, k in {"0.5": 0.5, "7": 7.0, "each row": each_row}.items():
                    kind = (kernel, name_of(dtype), rows, classes, k_text)
                    differ = self.differences(x, target, k, smoothing)
                    yield Check(f"{text}, node with saved plans and operators that differ", *kind,
                                differ, 0.0)  # fmt: skip

    def operator_differences(self, z: Tensor, target: Tensor, k: Any, smoothing: float) -> float:
        """Count differences between the operators of graphs in node.cpp and in Python."""
        operators, key = torch.ops.pseudograd, "CUDA"
        for name in ("loss_on_gpu", "gradient_on_gpu"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"pseudograd::{name}", key)
        number, ks = (1.0, k) if isinstance(k, Tensor) else (k, None)
        differ = 0
        for reduction, training in product(("mean", "sum", "none"), (True, False)):
            settings = (IGNORED, reduction, smoothing)
            for _ in range(2):  # it asks Python for a plan, then finds it
                theirs = node.loss_in_graph(z, target, k, *settings, training)
                mine = operators.loss_on_gpu(z, target, number, ks, *settings, training)
                for one, other in zip(mine, theirs, strict=True):
                    assert (one.dtype, one.shape) == (other.dtype, other.shape)
                compared = [(mine[0], theirs[0])]
                if training:
                    grad = torch.full_like(mine[0], 3.0)
                    compared += [
                        (
                            operators.gradient_on_gpu(
                                z, target, number, ks, *mine[1:], grad, *settings
                            ),
                            node.gradient_in_graph(
                                z, target, k, theirs[1], theirs[2], grad, *settings
                            ),
                        )
                    ]
                for one, other in compared:
                    differ += int(((one != other) & ~(one.isnan() & other.isnan())).sum())
        return float(differ)

    def binary_differences(self, z: Tensor, target: Tensor, k: Any) -> float:
        """Count differences of values and gradients of the binary loss, scaled or not."""
        differ = 0
        for reduction, upstream in product(("mean", "sum", "none"), (1.0, 3.0)):
            leaf = z.detach().requires_grad_()
            mine = tunable_binary_cross_entropy_with_logits(leaf, target, reduction=reduction, k=k)
            assert mine.grad_fn is not None
            assert "TunableCrossEntropy" in mine.grad_fn.name(), mine.grad_fn.name()
            theirs = fused_binary(leaf, target, k, None, None, reduction, z.dtype)
            for one, other in (
                (mine.detach(), theirs.detach()),
                *zip(
                    torch.autograd.grad(mine, leaf, torch.full_like(mine, upstream)),
                    torch.autograd.grad(theirs, leaf, torch.full_like(theirs, upstream)),
                    strict=True,
                ),
            ):
                differ += int(((one != other) & ~(one.isnan() & other.isnan())).sum())
        return float(differ)

    def differences(self, z: Tensor, target: Tensor, k: Any, smoothing: float) -> float:
        """Count differences of values and gradients: scaled or not, on a side stream or not."""
        differ, scaled, other = 0, ScaledBefore(), torch.cuda.Stream()
        reductions = ("mean", "sum", "none")
        for reduction, upstream, at_once in product(reductions, (1.0, 3.0), (True, False)):
            found = []
            for implementation in ("auto", "triton"):
                scaled.flag().fill_(not at_once)
                leaf = z.detach().requires_grad_()
                settings: dict[str, Any] = {"reduction": reduction, "_scaled": scaled}
                settings |= {"label_smoothing": smoothing, "implementation": implementation}
                stream = other if reduction == "sum" else torch.cuda.current_stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    loss = tunable_cross_entropy(leaf, target, k=k, **settings)
                    assert loss.grad_fn is not None
                    is_node = "TunableCrossEntropy" in loss.grad_fn.name()
                    assert is_node == (implementation == "auto"), loss.grad_fn.name()
                    (f,) = torch.autograd.grad(loss, leaf, torch.full_like(loss, upstream))
                torch.cuda.synchronize()
                found.append((loss.detach(), f, scaled.flag().clone()))
            for mine, theirs in zip(*found, strict=True):
                apart = mine != theirs
                if mine.is_floating_point():
                    apart &= ~(mine.isnan() & theirs.isnan())
                differ += int(apart.sum())
        return float(differ)

    def of_captured_node(self, kernel: str, z: Tensor, label: Tensor) -> Check:
        """Check a step in a CUDA graph whose logits change between replays."""
        leaf = z.clone().requires_grad_()

        def step() -> Tensor:
            (f,) = torch.autograd.grad(tunable_cross_entropy(leaf, label, k=0.5), leaf)
            return f

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            f = step()
        differ = 0
        for scale in (1.0, 0.5, 0.1):
            with torch.no_grad():
                leaf.copy_(z * scale)
            graph.replay()
            apart = f != gradient(z * scale, label, 0.5)
            differ += int((apart & ~f.isnan()).sum())
        rows, classes = z.shape
        text = "node in a CUDA graph, that differ"
        return Check(text, kernel, "float32", rows, classes, "0.5", float(differ), 0.0)

    def of_graphs(self) -> Iterator[Check]:
        """Check compiled losses of few logits, as they are and in CUDA graphs."""
        modes = (None,) if self.small else (None, "reduce-overhead")
        rows, classes = (10, 10) if self.small else (1000, 100)
        z, label, each_row = battery(rows, classes, self.device, self.seed + 6)
        label[::7] = IGNORED
        q = torch.rand(z.shape, generator=self.generator(6), device=self.device)
        for mode, dtype, (text, k) in product(
            modes, operators_dtypes(), {"0.5": 0.5, "each row": each_row}.items()
        ):
            x = z.clamp(max=torch.finfo(dtype).max).to(dtype)
            kind = ("tile", name_of(dtype), rows, classes, text)
            of = f", {mode}" if mode else ""
            yield Check(f"compiled and eager that differ{of}", *kind,
                        self.graph_differences(tunable_cross_entropy, x, label, k, mode), 0.0
                        )  # fmt: skip
            binary = tunable_binary_cross_entropy_with_logits
            k = k if text == "0.5" else each_row[:, None].expand_as(x).clone()
            off = self.graph_differences(binary, x, q.round().to(dtype), k, mode)
            yield Check(f"binary, compiled and eager that differ{of}", *kind, off, 0.0)

    def graph_differences(
        self, loss: Callable[..., Tensor], z: Tensor, target: Tensor, k: Any, mode: str | None
    ) -> float:
        """Count gradients of a compiled loss that are more than roundings from the eager ones.

        The logits change from step to step, as a CUDA graph has to see.
        """
        torch._dynamo.reset()

        def twice(z: Tensor, y: Tensor) -> Tensor:
            return 2 * loss(z, y, k=k)

        backend = "aot_eager" if self.small else "inductor"
        options: dict[str, Any] = {"backend": backend} if mode is None else {"mode": mode}
        compiled = torch.compile(twice, fullgraph=True, dynamic=False, **options)
        apart = 0.0
        for step in range(4):
            x = z * (1 - step / 8)
            found = []
            for run in (compiled, twice):
                leaf = x.detach().clone().requires_grad_()
                value = run(leaf, target)
                value.backward()
                assert leaf.grad is not None
                found.append((value.detach().clone(), leaf.grad.clone()))
            for mine, theirs in zip(*found, strict=True):
                limits, largest = torch.finfo(mine.dtype), float(theirs.nan_to_num().abs().amax())
                mine, theirs = mine.double(), theirs.double()
                # Half types are rounded in another place, or below their normal numbers.
                allowed = 2 * max(limits.eps, 1e-5) * theirs.abs() + 1e-6 * largest
                allowed += 2 * limits.eps * limits.smallest_normal
                right = (mine - theirs).abs() <= allowed
                right |= (mine == theirs) | (mine.isnan() & theirs.isnan())
                apart += float((~right).sum())
        return apart

    def of_transforms(self) -> Iterator[Check]:
        rows, classes = (4, 20) if self.small else (512, 1000)
        z, label, k = battery(rows, classes, self.device, self.seed + 5)
        true = true_gradient(z, label, k)

        def loss(z: Tensor, label: Tensor, k: Tensor) -> Tensor:
            return tunable_cross_entropy(z, label, k=k, reduction="sum", implementation="triton")

        backend = "aot_eager" if self.small else "inductor"
        routes: dict[str, Callable[..., Tensor]] = {
            "compiled": torch.compile(torch.func.grad(loss), fullgraph=True, backend=backend),
            "vmap(grad)": torch.func.vmap(torch.func.grad(loss)),
            "compiled vmap(grad)": torch.compile(
                torch.func.vmap(torch.func.grad(loss)), fullgraph=True, backend=backend
            ),
        }
        for name, route in routes.items():
            f = route(z, label, k)
            yield Check(name, "tile", "float32", rows, classes, "each row", error(f, true), 1e-5)
        criterion = TunableCrossEntropyLoss(k=k, reduction="sum", implementation="triton")
        program = torch.export.export(criterion, (z, label))
        leaf = z.clone().requires_grad_()
        program.module()(leaf, label).backward()
        assert leaf.grad is not None
        off = error(leaf.grad, true)
        yield Check("exported", "tile", "float32", rows, classes, "each row", off, 1e-5)
        q = F.one_hot(label, classes).float()
        z = z.clamp(-20, 20)
        true = true_gradient(z, label, torch.ones_like(k))
        whole = torch.compile(torch.func.grad(loss), fullgraph=True, backend=backend)
        worst = off_the_norm(whole(z, q, torch.ones_like(k)), true)
        yield Check("compiled, probabilities, of the norm", "tile", "float32", rows, classes, "1",
                    worst, 1e-5)  # fmt: skip

    def of_linear(self) -> Iterator[Check]:
        """Check all dtypes, and every setting in one of them."""
        tokens, width, classes = (6, 8, 20) if self.small else (3000, 512, 32001)
        hidden, weight, label = self.last_layer(tokens, width, classes)
        bias = weight.sum(1)
        settings: dict[str, dict[str, Any]] = {
            "linear with weights and bias": {"class_weight": torch.linspace(0.5, 2, classes)},
            "linear, smoothed": {"label_smoothing": 0.1},
            "linear, reduction none": {"reduction": "none"},
        }
        plain: list[tuple[str, torch.dtype, dict[str, Any]]]
        plain = [("linear", dtype, {}) for dtype in operators_dtypes()]
        for text, dtype, given in plain + [(t, torch.float32, s) for t, s in settings.items()]:
            leaves = [tensor.to(dtype).requires_grad_() for tensor in (hidden, weight, bias)]
            leaves = leaves if "class_weight" in given else leaves[:2]
            given = {key: a.to(self.device) if isinstance(a, Tensor) else a
                     for key, a in given.items()}  # fmt: skip
            runs = []
            for _ in range(2):
                loss = tunable_linear_cross_entropy(
                    leaves[0], leaves[1], label, *leaves[2:], k=0.5, implementation="triton",
                    chunk_rows=tokens // 3, **given,
                )  # fmt: skip
                upstream = torch.linspace(0.5, 2, loss.numel()).to(loss).reshape(loss.shape)
                runs.append(torch.autograd.grad(loss, leaves, upstream))
            found, again = runs
            differ = sum(float((a != b).sum()) for a, b in zip(found, again, strict=True))
            yield Check(f"{text}, runs that differ", "row", name_of(dtype), tokens, classes, "0.5",
                        differ, 0.0)  # fmt: skip
            true = self.true_linear(leaves, label, upstream, **given)
            for name, f, expected in zip(("hidden", "weight", "bias"), found, true, strict=False):
                worst = off_the_norm(f, expected)
                # TF32 products, or the rounding of logits and of their gradient.
                allowed = {torch.float32: 1e-3, torch.half: 3e-3, torch.bfloat16: 2e-2}[dtype]
                yield Check(f"{text}, {name}, of the norm", "row", name_of(dtype), tokens, classes,
                            "0.5", worst, allowed)  # fmt: skip

    def of_waiting(self) -> Iterator[Check]:
        """Count steps that synchronize with the GPU, which is kept busy meanwhile."""
        if self.small:
            return
        for kernel, rows, classes in (("tile", 4096, 1000), ("row", 512, 32000)):
            for text, step in self.steps(rows, classes):
                kind = (kernel, "float32", rows, classes, "")
                waited = waits_for_the_gpu(step)
                yield Check(f"{text}, steps that wait for the GPU", *kind, float(waited), 0.0)
            yield from self.of_telling(kernel, rows, classes)
        one = torch.ones(1, device=self.device)
        missed = not waits_for_the_gpu(lambda: print("waited for", one.item()))
        yield Check("steps that wait unseen", "", "float32", 1, 1, "", float(missed), 0.0)

    def of_telling(self, kernel: str, rows: int, classes: int) -> Iterator[Check]:
        """Check that a module records after each step whether its loss was scaled."""
        z, label, _ = battery(rows, classes, self.device, self.seed + 3)
        kinds = {"labels": 0.0}
        if kernel == "tile":  # other kernels always leave the gradient to the backward pass
            kinds["smoothed labels"] = 0.1
        for text, smoothing in kinds.items():
            criterion = TunableCrossEntropyLoss(
                k=0.5, label_smoothing=smoothing, implementation="triton"
            )
            wrong = 0
            for upstream in (1.0, 3.0, 3.0, 1.0, 1.0):
                leaf = z.detach().requires_grad_()
                (upstream * criterion(leaf, label)).backward()
                torch.cuda.synchronize()
                wrong += criterion._scaled.flag().item() != (upstream != 1)
            yield Check(f"{text}, scaled and not known to be", kernel, "float32", rows, classes,
                        "0.5", float(wrong), 0.0)  # fmt: skip

    def steps(self, rows: int, classes: int) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yield forward and backward passes of all special cases."""
        z, label, k = battery(rows, classes, self.device, self.seed + 2)
        hidden, weight, _ = self.last_layer(rows, 64, classes)
        label[::7] = IGNORED
        triton: dict[str, Any] = {"implementation": "triton"}
        class_weight = torch.linspace(0.5, 2, classes, device=self.device)
        probabilities = z.clamp(-10, 10).softmax(1)
        leaf, hidden, weight = (tensor.requires_grad_() for tensor in (z, hidden, weight))
        compiled = torch.compile(tunable_cross_entropy, fullgraph=True)
        losses: dict[str, Callable[[], Tensor]] = {
            "mean": lambda: tunable_cross_entropy(leaf, label, k=0.5, **triton),
            "times 3": lambda: 3 * tunable_cross_entropy(leaf, label, k=k, **triton),
            "weighted": lambda: tunable_cross_entropy(leaf, label, class_weight, k=k, **triton),
            "smoothed": lambda: tunable_cross_entropy(
                leaf, label, k=0.5, label_smoothing=0.1, **triton
            ),
            "none": lambda: tunable_cross_entropy(
                leaf, label, k=k, reduction="none", **triton
            ).sum(),
            "compiled": lambda: compiled(leaf, label, k=0.5, **triton),
            "probabilities": lambda: tunable_cross_entropy(leaf, probabilities, k=0.5),
            "linear": lambda: tunable_linear_cross_entropy(hidden, weight, label, k=0.5, **triton),
            "linear, weighted, times 3": lambda: 3 * tunable_linear_cross_entropy(
                hidden, weight, label, k=k, class_weight=class_weight, chunk_rows=rows // 2,
                **triton
            ),
        }  # fmt: skip

        def step(loss: Callable[[], Tensor]) -> None:
            for tensor in (leaf, hidden, weight):
                tensor.grad = None
            loss().backward()

        for text, loss in losses.items():
            yield text, partial(step, loss)

    def last_layer(self, tokens: int, width: int, classes: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the input of a layer, its weight, and labels."""
        generator = self.generator(0)
        shapes = ((tokens, width), (classes, width))
        hidden, weight = (torch.randn(s, generator=generator, device=self.device) for s in shapes)
        label = torch.randint(classes, (tokens,), generator=generator, device=self.device)
        return hidden, weight / width**0.5, label

    def true_linear(
        self,
        leaves: list[Tensor],
        label: Tensor,
        upstream: Tensor,
        class_weight: Tensor | None = None,
        **settings: Any,
    ) -> tuple[Tensor, ...]:
        """Return the gradients of a layer and its loss at k = 1/2 in float64."""
        exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
        weight = None if class_weight is None else class_weight.double()
        loss = tunable_cross_entropy(
            F.linear(*exact), label, k=0.5, weight=weight, implementation="torch", **settings
        )
        return torch.autograd.grad(loss, exact, upstream.double())

    def of_corners(self, kernel: str) -> Iterator[Check]:
        """Check extreme and NaN logits, wrong labels, wrong k, and ignored rows."""
        each_row = ("each row",)
        for classes, ks in ((20, (*each_row, "1", "0.5")), (1, each_row)):
            with mock.patch.object(launch, "LONGEST_TILE", classes if kernel == "tile" else 0):
                for dtype, k, smoothing in product(operators_dtypes(), ks, (0.0, 0.1)):
                    rows, differ = self.corners(classes, dtype, k, smoothing)
                    text = "smoothed corners that differ" if smoothing else "corners that differ"
                    yield Check(text, kernel, name_of(dtype), rows, classes, k, differ, 0.0)

    def corners(
        self, classes: int, dtype: torch.dtype, k_text: str, smoothing: float
    ) -> tuple[int, float]:
        """Return the number of corner cases, and of those with a wrong value or gradient."""
        inf, nan = torch.inf, torch.nan
        most = torch.finfo(dtype).max
        kinds = list(product((nan, -inf, -most, 0, 1, most, inf), repeat=min(3, classes)))
        kinds = kinds[:: 5 if self.small and classes > 1 else 1]
        wrong_k, wrong_label = [-1.0, 0.0, inf, nan], [classes, -1, 2**40]
        usual = [(1.0, 0.5, 2.0)[: len(kinds[0])]] * (len(wrong_k) + len(wrong_label))
        ignored = [(nan,) * len(kinds[0])]
        few = torch.tensor([*kinds, *usual, *ignored], dtype=torch.float64).to(self.device, dtype)
        rows = len(few)
        # The first value goes to the label's logit, the others alternate; labels vary by row.
        label = torch.arange(rows, device=self.device) * 7 % classes
        column = (torch.arange(classes, device=self.device) - label.unsqueeze(1)) % classes
        z = few.gather(1, torch.where(column == 0, 0, 2 - column % 2))
        k: Any = float(k_text) if k_text != "each row" else (
            torch.tensor([0.5, 1, 3, 64], device=self.device).repeat(rows)[:rows]
        )  # fmt: skip

        leaf = z.double().requires_grad_()
        settings: dict[str, Any] = {"reduction": "none", "label_smoothing": smoothing}
        loss = tunable_cross_entropy(leaf, label, k=k, implementation="torch", **settings)
        (true,) = torch.autograd.grad(loss.sum(), leaf)
        true_value = F.cross_entropy(z.double(), label, **settings)
        true[true_value.isnan()] = nan  # divergence must propagate
        begin, middle = len(kinds), len(kinds) + len(wrong_k)
        if k_text == "each row":
            k[begin:middle] = torch.tensor(wrong_k)
            true[begin:middle] = nan
        label[middle:-1] = torch.tensor(wrong_label)
        true[middle:-1], true_value[middle:-1] = nan, nan
        label[-1], true[-1], true_value[-1] = IGNORED, 0, 0

        value, f, later = torch.empty_like(true_value), torch.empty_like(z), torch.empty_like(z)
        case = launch.rows_of_loss(z, label, k, None, IGNORED, smoothing)
        keeps = not smoothing or operators.keeps_numbers(case)
        found = operators.room_for_numbers(z) if keeps else None
        launch.launch(case, None, f)
        launch.launch(case, value, None, found=found)
        launch.launch(case, None, later, grad=torch.ones_like(value), given=found)
        # Compare in float32, where the difference of two logits can overflow.
        value_is_right = torch.isclose(value.float(), true_value.float(), 1e-5, 1e-6, True)
        allowed = self.rounding(dtype, true) + 1e-5 * true.abs() + NEGLIGIBLE
        if smoothing:
            allowed = allowed + 1e-4 * true.abs().amax(1, keepdim=True)
        right = [value_is_right]
        for result in (f, later):
            is_right = ((result.double() - true).abs() <= allowed).all(1)
            right.append(is_right | (result.isnan().any(1) & true.isnan().any(1)))
        return rows, float((~torch.stack(right).all(0)).sum())

    def of_split(self) -> Iterator[Check]:
        """Check two processes that each hold a part of the classes, or of the rows."""
        with tempfile.TemporaryDirectory() as folder:
            spawn(as_rank, (self.device, self.seed, folder), nprocs=2)
            for rank in range(2):
                yield from pickle.loads(Path(folder, str(rank)).read_bytes())

    def of_rank(self, rank: int) -> Iterator[Check]:
        """Yield this process's checks of the loss and its gradient, for long and short rows."""
        rows, classes, width = (10, 43, 8) if self.small else (1000, 32001, 512)
        with mock.patch.object(launch, "LONGEST_TILE", 0 if self.small else 8192):
            yield from self.of_part(rank, "row", rows, classes, width)
        yield from self.of_part(rank, "tile", rows, 43, width)
        hidden, _, label = self.last_layer(rows, width, classes)
        yield self.of_replicas(rank, hidden, label)

    def of_part(
        self, rank: int, kernel: str, rows: int, classes: int, width: int
    ) -> Iterator[Check]:
        """Check rows whose classes are split after the first third."""
        begin = classes // 3
        own = slice(0, begin) if rank == 0 else slice(begin, classes)
        split: dict[str, Any] = {"process_group": dist.group.WORLD}
        of = f", rank {rank} of 2"
        for dtype in operators_dtypes():
            z, label, ks = battery(rows, classes, self.device, self.seed + classes)
            z = z.clamp(max=torch.finfo(dtype).max).to(dtype)
            allowed = 1e-5 if dtype == torch.float32 else 1.0
            kind = (name_of(dtype), rows, classes)
            settings: dict[str, Any] = {"reduction": "none", "implementation": "triton"}
            value = tunable_cross_entropy(z[:, own], label, k=ks, **settings, **split)
            off = error(value, true_value(z, label))
            yield Check(f"value{of}", kernel, *kind, "", off, allowed)
            for text in ("each row", "1", "0.5"):
                k: Any = ks if text == "each row" else float(text)
                f = gradient(z[:, own], label, k, reduction="sum", **split)
                true = true_gradient(z, label, k if text == "each row" else torch.full_like(ks, k))
                yield Check(f"gradient{of}", kernel, *kind, text, error(f, true[:, own]), allowed)
        hidden, weight, label = self.last_layer(rows, width, classes)
        leaves = [hidden.requires_grad_(), weight[own].requires_grad_()]
        loss = tunable_linear_cross_entropy(
            leaves[0],
            leaves[1],
            label,
            k=0.5,
            implementation="triton",
            chunk_rows=rows // 3,
            **split,
        )
        found = torch.autograd.grad(loss, leaves)
        true_hidden, true_weight = self.true_linear([hidden, weight], label, torch.ones_like(loss))
        for name, f, true in zip(
            ("hidden", "weight"), found, (true_hidden, true_weight[own]), strict=True
        ):
            worst = off_the_norm(f, true)
            yield Check(f"linear, {name}, of the norm{of}", kernel, "float32", rows, classes, "0.5",
                        worst, 1e-3)  # fmt: skip

    def of_replicas(self, rank: int, hidden: Tensor, label: Tensor) -> Check:
        """Check the gradient under DistributedDataParallel, with half of the rows per process."""
        rows, width = hidden.shape
        layer = nn.Linear(width, 10, bias=False, device=self.device)
        model, own = nn.parallel.DistributedDataParallel(layer), slice(rank, None, 2)
        criterion = TunableCrossEntropyLoss(k=0.5, implementation="triton")
        criterion(model(hidden[own]), label[own] % 10).backward()
        assert layer.weight.grad is not None
        leaves = [hidden, layer.weight.detach()]
        _, true = self.true_linear(leaves, label % 10, torch.ones((), device=self.device))
        worst = off_the_norm(layer.weight.grad, true)
        text = f"replicas, weight, of the norm, rank {rank} of 2"
        return Check(text, "tile", "float32", rows, 10, "0.5", worst, 1e-3)


def waits_for_the_gpu(step: Callable[[], None]) -> bool:
    for _ in range(3):  # compile, and fill the allocator's cache, since cudaMalloc synchronizes
        step()
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP)
    woken = torch.cuda.Event()
    woken.record()
    step()
    waited = bool(woken.query())
    torch.cuda.synchronize()
    return waited


def as_rank(rank: int, device: str, seed: int, folder: str) -> None:
    """Run one of two processes, which writes its results to a file."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    Path(folder, str(rank)).write_bytes(pickle.dumps(list(Bench(device, seed).of_rank(rank))))
    dist.destroy_process_group()
    # A normal exit can deadlock with PyTorch's threads.
    os._exit(0)


def operators_dtypes() -> tuple[torch.dtype, ...]:
    return (torch.float32, torch.bfloat16, torch.float16)


def checks(device: str, seed: int, section: str) -> list[Check]:
    """Return the checks of a section; an error is a check that does not hold."""
    found: list[Check] = []
    try:
        found.extend(Bench(device, seed).sections()[section]())
    except torch.OutOfMemoryError:
        found.append(crash(TOO_LARGE))
    except Exception as error:
        traceback.print_exc()
        found.append(crash(f"ended by {type(error).__name__}"))
    return found


def in_processes(
    device: str, seed: int, sections: list[str], workers: int, until: float
) -> Iterator[tuple[str, list[Check]]]:
    """Yield sections and their checks, as they end; start none after a time.

    Each has a process of its own, so that an illegal memory access in one does not end the others.
    """
    if not sections:
        return
    context = multiprocessing.get_context("spawn")

    def run(name: str) -> tuple[str, list[Check]]:
        if time.monotonic() > until:
            return name, []
        # A pool for each: when a process dies, its pool ends.
        with ProcessPoolExecutor(1, context) as pool:
            try:
                return name, pool.submit(checks, device, seed, name).result()
            except BrokenProcessPool:
                return name, [crash("ended by a signal")]

    with ThreadPoolExecutor(workers) as threads:
        for future in as_completed([threads.submit(run, name) for name in sections]):
            yield future.result()


def crash(text: str) -> Check:
    """Return a check that does not hold."""
    return Check(text, "", "", 0, 0, "", float("inf"), 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--workers", type=int, default=1, help="processes that share the checks")
    parser.add_argument("--seed", type=int, help="of the random cases (another in each run)")
    parser.add_argument("--only", default="", help="names of sections, or parts of them")
    parser.add_argument("--rest", action="store_true", help="keep the sections that the file has")
    parser.add_argument("--beside", action="store_true", help="other programs run meanwhile: leave"
                        " out the section that must run alone")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no section later")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = arguments.device
    out = arguments.out or RESULTS / f"check_loss_{device}.csv"
    if arguments.only and not arguments.out:
        parser.error("--only would overwrite the full table: name another file with --out")
    begun, facts = time.monotonic(), environment(device)
    kept = earlier(out, facts) if arguments.rest else []
    seed = arguments.seed
    if seed is None:
        seed = int(kept[0]["seed"]) if kept else secrets.randbelow(1 << 31)
    print(f"seed {seed}", flush=True)
    names = list(Bench(device, seed).sections())
    done = {line["section"] for line in kept}
    chosen = [
        name
        for name in names
        if name not in done and any(text in name for text in arguments.only.split(","))
    ]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for line in kept:
        found[line["section"]].append(line)

    def keep(name: str, checked: list[Check]) -> None:
        for check in checked:
            line = {"section": name, **check._asdict(), "holds": check.holds, "seed": seed}
            found[name].append({**line, **facts})
            if not check.holds:
                print("WRONG", *check, flush=True)
        missing = "" if checked else " (not started)"
        print(
            f"{name}: {len(checked)} checks, {time.monotonic() - begun:.0f} s{missing}", flush=True
        )
        save()

    def save(quiet: bool = True) -> list[dict[str, Any]]:
        lines = [line for name in names for line in found[name]]
        if lines:
            write(lines, out, quiet)
        return lines

    if any(name.startswith("node") for name in chosen):
        subprocess.run([sys.executable, "-m", node.__name__], check=False)  # sections report it
    until = begun + arguments.seconds
    together = [name for name in chosen if name != names[-1]]
    alone = [] if arguments.beside else chosen[len(together) :]
    for name, checked in in_processes(device, seed, together, arguments.workers, until):
        if any(check.check == TOO_LARGE for check in checked):
            print(f"{name}: again later, for lack of memory", flush=True)
            alone.append(name)
        else:
            keep(name, checked)
    for name, checked in in_processes(device, seed, alone, 1, until):
        keep(name, checked)
    lines = save(quiet=False)
    failed = [line for line in lines if str(line["holds"]) != "True"]
    missing = [name for name in names if not found[name]]
    print(f"{len(lines)} checks, {len(failed)} wrong, seed {seed}; without", *missing, sep=" ")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
