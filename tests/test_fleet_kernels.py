"""The fleet's kernels, each alone against its formula in float64 and together against `Stack`.

On a GPU if there is one; else in Triton's interpreter, on the CPU.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from covering import covering
from pseudograd.data import Dataset
from pseudograd.fleet import Fleet, MLPRecipe, Ramp, Split, Trial, never
from pseudograd.fleet.mlp.stack import Examples, Settings, Stack, launching
from pseudograd.fleet.mlp.worker import StackWorker
from pseudograd.rules import tunable
from trials import a_trial, recipe_of, replace

triton = pytest.importorskip("triton", reason="Triton is not installed")

from pseudograd.fleet.mlp import kernels  # noqa: E402
from pseudograd.fleet.mlp.fused import FusedStack  # noqa: E402
from pseudograd.fleet.mlp.kernels import PANEL  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # Overflow and NaN are as on a GPU, where nothing warns of them.
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = 2.0**-11  # the largest relative rounding error of float16


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def assert_close(ours: Tensor, theirs: Tensor, rtol: float, atol: float = 0.0) -> None:
    torch.testing.assert_close(ours.double().cpu(), theirs.double().cpu(), rtol=rtol, atol=atol)


def noise(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.half) -> Tensor:
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def unwritten(*shape: int, dtype: torch.dtype = torch.half) -> Tensor:
    return torch.full(shape, math.nan, dtype=dtype, device=DEVICE)


def live(models: int) -> Tensor:
    """Return the error units of networks that are all in training."""
    return torch.ones(models, device=DEVICE)


def clock(batch: int = 0) -> Tensor:
    return torch.tensor([batch], dtype=torch.int32, device=DEVICE)


SLOPES = {
    "relu": lambda h: (h > 0).double(),
    "tanh": lambda h: 1 - h * h,
    "sigmoid": lambda h: h * (1 - h),
}
ACTIVATIONS = {"none": lambda z: z, "relu": torch.relu, "tanh": torch.tanh}
ACTIVATIONS["sigmoid"] = torch.sigmoid


@covering(
    shape=[(128, 64), (1, 1), (70, 70), (300, 130)],
    dtype=[torch.uint8, torch.float32, torch.float64],
    index_dtype=[torch.int32, torch.int64],
)
def test_gather(
    shape: tuple[int, int],
    index_dtype: torch.dtype,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> None:
    size, width = shape
    models, tiles = 2, triton.cdiv(size, PANEL)
    features = torch.randint(256, (50, width), generator=generator).to(DEVICE, dtype)
    order = torch.randint(50, (models, 2 * size + 1), generator=generator).to(DEVICE, index_dtype)
    for batch, there in enumerate(order.split(size, 1)):
        out = unwritten(models * tiles, width, PANEL)
        kernels.gather[(triton.cdiv(width, 64), models * tiles)](
            features, order, live(models), clock(1), batch - 1, size, order.shape[1], out, None, 0,
            2 / 255, -1.0, tiles, width, block=64,
        )  # fmt: skip
        panels = out.reshape(models, tiles, width, PANEL).transpose(2, 3).flatten(1, 2)
        expected = features.double()[there.long()] * (2 / 255) - 1
        assert_close(panels[:, : there.shape[1]], expected, rtol=HALF, atol=1e-7)
        assert (panels[:, there.shape[1] :] == 0).all()


@covering(1, activation=ACTIVATIONS, shape=[(64, 128, 1), (70, 33, 2), (3, 2, 1), (130, 150, 1)])
def test_layer(shape: tuple[int, int, int], activation: str, generator: torch.Generator) -> None:
    width, outputs, tiles = shape
    models = 2
    x = noise(generator, models * tiles, width, PANEL)
    weight = noise(generator, models, width, outputs) * width**-0.5
    bias = noise(generator, models, 1, outputs, dtype=torch.float32)
    dtype = torch.float32 if activation == "none" else torch.half
    out = unwritten(models * tiles, outputs, PANEL, dtype=dtype)
    kernels.layer[(triton.cdiv(outputs, 32), models * tiles)](
        x, weight, bias, outputs, live(models), out, None, 0, tiles, width, outputs, outputs,
        activation, block_out=32, block_in=16,
    )  # fmt: skip
    inputs = x.double().reshape(models, tiles, width, PANEL)
    total = weight.double().mT.unsqueeze(1) @ inputs + bias.double().mT.unsqueeze(1)
    expected = ACTIVATIONS[activation](total).flatten(0, 1)
    rounding = 1e-6 if activation == "none" else HALF
    assert_close(out, expected, rtol=rounding, atol=1e-5)


def test_activations_of_extreme_inputs(generator: torch.Generator) -> None:
    """An overflowing exponential does not give NaN."""
    x = torch.tensor([-1e4, -200, -90, -20, 0, 20, 90, 200, 1e4], device=DEVICE)
    panel = torch.zeros(1, 1, PANEL, dtype=torch.half, device=DEVICE)
    panel[0, 0, : len(x)] = x.half()
    one, zero = torch.ones(1, 1, 1, device=DEVICE).half(), torch.zeros(1, 1, 1, device=DEVICE)
    for activation, function in ACTIVATIONS.items():
        out = unwritten(1, 1, PANEL, dtype=torch.float32)
        kernels.layer[(1, 1)](
            panel, one, zero, 1, live(1), out, None, 0, 1, 1, 1, 1, activation,
            block_out=16, block_in=16,
        )  # fmt: skip
        assert_close(out[0, 0, : len(x)], function(x.half().double()), rtol=1e-6, atol=1e-6)


# One panel's logits, (classes, PANEL), from samples of N(0, 1) and a mask of the label's logit.
LOGITS = {
    "ordinary": lambda z, _: 3 * z,
    "zero": lambda z, _: 0 * z,
    "large": lambda z, _: 60 * z,
    "extreme": lambda z, _: 3000 * z,
    "confident": lambda z, on_label: z + 20 * on_label,
    "all tiny": lambda z, on_label: 0.2 * z + 40 * on_label,
    "wrong": lambda z, on_label: z - 40 * on_label,
    "one of them wrong": lambda z, on_label: z + 30 * on_label * (torch.arange(PANEL) > 3),
}


@covering(size=[PANEL, 70, 1], classes=[2, 10, 100], kind=LOGITS)
def test_pseudo_gradient(kind: str, classes: int, size: int, generator: torch.Generator) -> None:
    k = torch.tensor([1 / 16, 0.25, 0.5, 1, 2, 4], device=DEVICE)
    models = len(k)
    labels = torch.randint(classes, (300,), generator=generator)
    index = torch.randint(300, (models, PANEL), generator=generator)
    on_label = torch.nn.functional.one_hot(labels[index], classes).mT
    z = torch.randn(models, classes, PANEL, generator=generator)
    z = LOGITS[kind](z, on_label).to(DEVICE, torch.float32)
    index, labels = index.to(DEVICE)[:, :size], labels.to(DEVICE)
    order = torch.cat((index.new_zeros(models, PANEL), index), 1)  # the second batch is the last
    delta, unit = unwritten(models, classes, PANEL), live(models)
    pulls = unwritten(models, classes, dtype=torch.float32)
    kernels.pseudo_gradient[(models,)](
        z, order, unit, clock(), 1, PANEL, PANEL + size, labels, k, delta, pulls, classes,
        None, 0, classes,
        block=triton.next_power_of_2(classes),
    )  # fmt: skip
    rows = z[:, :, :size].mT.double()
    expected = tunable(rows, labels[index], k.double()[:, None].expand(models, size)).mT / size
    ours = delta.double() * unit.double()[:, None, None]
    assert (ours[:, :, size:] == 0).all()
    assert_close(pulls, delta.double().sum(2), rtol=1e-5, atol=1e-3)
    # Errors of float16, down to its smallest number in units of the panel's largest, and of k times
    # a margin in float32.
    rounding = 2 * HALF + 4 * 2.0**-23 * z.abs().max().item()
    for one, other in zip(ours[:, :, :size], expected, strict=True):
        assert_close(one, other, rtol=rounding, atol=2.0**-28 * other.abs().max().item() + 1e-38)


def test_pseudo_gradients_too_small_for_float32() -> None:
    """At k = 4 strengths are exp(-4 gap): they underflow float32, and results stay finite."""
    gaps = torch.tensor([15.0, 21.5, 22.0, 22.5, 24.0, 25.0, 40.0, 300.0])
    models = len(gaps)
    z = torch.zeros(models, 2, PANEL, device=DEVICE)
    z[:, 0] = gaps[:, None]
    index = torch.zeros(models, PANEL, dtype=torch.int32, device=DEVICE)
    labels, k = torch.zeros(1, dtype=torch.int64, device=DEVICE), torch.full((models,), 4.0)
    delta, unit = unwritten(models, 2, PANEL), live(models)
    kernels.pseudo_gradient[(models,)](
        z, index, unit, clock(), 0, PANEL, PANEL, labels, k.to(DEVICE), delta,
        unwritten(models, 2, dtype=torch.float32), 2, None, 0, 2, block=2,
    )  # fmt: skip
    assert delta.isfinite().all()
    assert unit.isfinite().all()
    ours = delta.double() * unit.double()[:, None, None]
    expected = (-4 * gaps.double()).exp()[:, None].expand(models, PANEL) / PANEL
    assert_close(ours[:, 1], expected, rtol=1e-3, atol=1e-38)
    assert torch.equal(ours[:, 0], -ours[:, 1])


@pytest.mark.parametrize("classes", [2, 10, 100])
def test_judge(classes: int, generator: torch.Generator) -> None:
    """Two models, each with two panels of a second batch; the last panel is partial."""
    size, limit, panels = 2 * PANEL, 3 * PANEL + 50, 4
    labels = torch.randint(classes, (300,), generator=generator).to(DEVICE)
    order = torch.randint(300, (2, limit), generator=generator).to(DEVICE)
    z = torch.randn(2, 2, classes, PANEL, generator=generator).round(decimals=1)  # has ties
    z[0, 0, 0, 0], z[0, 0, 1, 1], z[0, 1, 0, 2] = math.nan, math.inf, -math.inf
    z = z.to(DEVICE)
    sums = torch.full((2, 2, panels), -1.0, device=DEVICE)
    kernels.judge[(4,)](
        z, order, live(2), clock(), 1, size, limit, labels, *sums, 2, panels, classes,
        block=triton.next_power_of_2(classes),
    )  # fmt: skip
    rows = z.mT.flatten(1, 2)[:, : limit - size].cpu()
    target = labels[order][:, size:].cpu()
    value = torch.nn.functional.cross_entropy(rows.mT.double(), target, reduction="none")
    wrong = (rows.argmax(-1) != target) | ~value.isfinite()
    expected = torch.stack((wrong.double(), value))
    ours = sums[:, :, 2:].cpu()
    assert (sums[:, :, :2] == -1).all()
    for at, part in enumerate(expected.split(PANEL, 2)):
        assert_close(ours[0, :, at], part[0].sum(1), rtol=0)
        lost = ~part[1].sum(1).isfinite()
        assert torch.equal(~ours[1, :, at].isfinite(), lost)
        assert_close(ours[1, :, at][~lost], part[1].sum(1)[~lost], rtol=1e-5)


@covering(1, shape=[(128, 64), (70, 33), (3, 2), (150, 130)], activation=SLOPES)
def test_errors_before(shape: tuple[int, int], activation: str, generator: torch.Generator) -> None:
    width, outputs = shape
    models = 2
    delta = noise(generator, models, outputs, PANEL)
    weight = noise(generator, models, width, outputs)
    h = ACTIVATIONS[activation](noise(generator, models, width, PANEL))
    out, parts = unwritten(models, width, PANEL), triton.cdiv(width, 32)
    pulls = unwritten(models, width + 3, dtype=torch.float32)
    squares = unwritten(models, parts + 2, dtype=torch.float32)
    kernels.errors_before[(parts, models)](
        delta, weight, h, live(models), out, pulls, width + 3, squares, parts + 2, width, outputs,
        outputs, activation, block_in=32, block_out=16,
    )  # fmt: skip
    expected = weight.double() @ delta.double() * SLOPES[activation](h.double())
    assert_close(out, expected, rtol=HALF, atol=1e-4)
    assert_close(pulls[:, :width], out.double().sum(2), rtol=1e-5, atol=1e-3)
    assert_close(squares[:, :parts].sum(1), out.double().square().sum((1, 2)), rtol=1e-5)


def bounds(x: Tensor, delta: Tensor) -> Tensor:
    """Return ‖x‖² and ‖delta‖² of a layer in two parts; there is room for two layers and four."""
    squares = torch.zeros(len(x), 2, 2, 4, device=DEVICE)
    for of, numbers in enumerate((x, delta)):
        both = numbers.float().square().sum((1, 2))
        squares[:, of, 1, 0], squares[:, of, 1, 3] = 0.25 * both, 0.75 * both
    return squares


@covering(
    1,
    shape=[(128, 128, 128), (70, 33, 1024), (300, 150, 128), (3, 2, 128)],
    unit=[1.0, 1e-9],
)
def test_squared_norm(shape: tuple[int, int, int], unit: float, generator: torch.Generator) -> None:
    width, outputs, part = shape
    models, parts = 3, triton.cdiv(width, part)
    x = noise(generator, models, width, PANEL) + 0.5
    delta = noise(generator, models, outputs, PANEL)
    delta[:, :, 100:] = 0
    units = torch.tensor([unit, 2 * unit, 3 * unit], device=DEVICE)
    norms, squares = unwritten(parts, models, dtype=torch.float32), bounds(x, delta)
    limits = torch.zeros(models, device=DEVICE)
    kernels.squared_norm[(models, parts)](
        x, delta, units, limits, squares, norms, models, 2, 4, width, outputs, part=part, block=64
    )
    gradient = x.double() @ delta.double().mT
    bias_gradient = delta.double().sum(2)
    squares = gradient.square().sum((1, 2)) + bias_gradient.square().sum(1)
    assert_close(norms.sum(0), squares * units.double() ** 2, rtol=1e-4)


@pytest.mark.parametrize("parts", [1, 3])
def test_clip_unit(parts: int, generator: torch.Generator) -> None:
    norms = noise(generator, parts, 4, dtype=torch.float32).square()
    norms[:, 3] = 0
    norm = norms.double().sum(0).sqrt()
    clip = (norm * torch.tensor([0.1, 0.999, 1.001, 1.0]).to(DEVICE)).float() + 1e-9
    before = torch.tensor([1.0, 1e-3, 1e3, 1.0], device=DEVICE)
    unit, squares = before.clone(), torch.full((4, 2, 1, 1), math.inf, device=DEVICE)
    kernels.clip_unit[(4,)](unit, clip, squares, norms, 4, parts, 1, 1)
    expected = before.double() * (clip.double() / (norm + 1e-6)).clamp(max=1)
    assert_close(unit, expected, rtol=1e-6)
    assert torch.equal(unit == before, torch.tensor([False, False, True, False]).to(DEVICE))


MOMENTUM, RATE, UNIT = (0.0, 0.5, 0.9), (0.1, 0.2, 0.3), (1.0, 1e-3, 1e-2)
CLOSE: dict[str, float] = {"rtol": 1e-5, "atol": 1e-4}


@pytest.mark.parametrize(("width", "outputs"), [(64, 64), (70, 33), (3, 2), (130, 150)])
def test_update(width: int, outputs: int, generator: torch.Generator) -> None:
    unit, rate, momentum = (torch.tensor(own, device=DEVICE) for own in (UNIT, RATE, MOMENTUM))
    x, delta = noise(generator, 3, width, PANEL), noise(generator, 3, outputs, PANEL)
    weight, velocity = (noise(generator, 3, width, outputs).float() for _ in range(2))
    shadow = unwritten(3, width, outputs)
    w, v = weight.double(), velocity.double()
    grid = triton.cdiv(outputs, 32), triton.cdiv(width, 16), 3
    kernels.update[grid](
        x, delta, unit, rate, momentum, weight, velocity, shadow, width, outputs, outputs,
        block_in=16, block_out=32,
    )  # fmt: skip
    scale, eta, mu = (own.double().reshape(-1, 1, 1) for own in (unit, rate, momentum))
    v_new = mu * v + scale * (x.double() @ delta.double().mT)
    assert_close(weight, w - eta * v_new, **CLOSE)
    assert_close(velocity[1:], v_new[1:], **CLOSE)
    assert torch.equal(velocity[0].double(), v[0])  # without momentum, velocity is not stored
    assert torch.equal(shadow, weight.half())


@covering(1, activation=ACTIVATIONS, size=[(64, 64), (70, 33), (3, 2), (130, 150)])
def test_update_and_next(
    size: tuple[int, int], activation: str, generator: torch.Generator
) -> None:
    """Equals `update`, then `layer`."""
    width, outputs = size
    own = [torch.tensor(own, device=DEVICE) for own in (UNIT, RATE, MOMENTUM)]
    x, following = (noise(generator, 3, width, PANEL) for _ in range(2))
    following[:, :, 100:] = 0
    delta = noise(generator, 3, outputs, PANEL)
    weight, velocity = (noise(generator, 3, width, outputs).float() for _ in range(2))
    bias = noise(generator, 3, 1, outputs, dtype=torch.float32)
    w, v, shadow = weight.clone(), velocity.clone(), unwritten(3, width, outputs)
    out = unwritten(3, outputs, PANEL, dtype=torch.float32 if activation == "none" else torch.half)
    expected = torch.empty_like(out)
    blocks = {"block_in": 16, "block_out": 32}
    columns, rows = triton.cdiv(outputs, 32), triton.cdiv(width, 16)
    kernels.update[columns, rows, 3](
        x, delta, *own, w, v, shadow, width, outputs, outputs, **blocks
    )
    kernels.layer[columns, 3](
        following,
        shadow,
        bias,
        outputs,
        live(3),
        expected,
        None,
        0,
        1,
        width,
        outputs,
        outputs,
        activation,
        **blocks,
    )
    kernels.update_and_next[columns, 3](
        x, following, delta, *own, weight, velocity, bias, outputs, out, None, 0, width, outputs,
        outputs, activation, **blocks,
    )  # fmt: skip
    assert_close(weight, w, **CLOSE)
    assert_close(velocity, v, **CLOSE)
    assert_close(out, expected, rtol=2 * HALF, atol=4 * HALF)


@pytest.mark.parametrize("count", [64, 150, 2])
def test_update_biases(count: int, generator: torch.Generator) -> None:
    unit, rate, momentum = (torch.tensor(own, device=DEVICE) for own in (UNIT, RATE, MOMENTUM))
    pulls, bias, velocity = (noise(generator, 3, count).float() for _ in range(3))
    b, v = bias.double(), velocity.double()
    kernels.update_biases[(triton.cdiv(count, 64), 3)](
        pulls, unit, rate, momentum, bias, velocity, count, block=64
    )
    scale, eta, mu = (own.double().unsqueeze(-1) for own in (unit, rate, momentum))
    v_new = mu * v + scale * pulls.double()
    assert_close(velocity, v_new, **CLOSE)
    assert_close(bias, b - eta * v_new, **CLOSE)


@pytest.mark.parametrize("slack", [0.9, 1.2])
def test_small_gradients_need_no_norm(slack: float, generator: torch.Generator) -> None:
    """The norm is skipped only if its bound, the product of two norms, is within the limit."""
    x, delta = noise(generator, 3, 30, PANEL), noise(generator, 3, 20, PANEL)
    unit = torch.tensor([0.01, 0.2, -1.0], device=DEVICE)
    norm_of = [numbers.double().square().sum((1, 2)) for numbers in (x, delta)]
    bound = ((norm_of[0] + PANEL) * norm_of[1]).sqrt() * unit.abs()
    clip, squares = (slack * bound).float(), bounds(x, delta)
    norms, before = torch.zeros(1, 3, device=DEVICE), unit.clone()
    kernels.squared_norm[(3, 1)](
        x, delta, unit, clip, squares, norms, 3, 2, 4, 30, 20, part=128, block=64
    )
    norms *= 1e6  # so that clipping shows
    kernels.clip_unit[(3,)](unit, clip, squares, norms, 3, 1, 2, 4)
    clipped = torch.tensor([slack < 1, slack < 1, False], device=DEVICE)  # the last is idle
    assert torch.equal(unit != before, clipped)


# Whole stacks


SIZES = {
    "small": (70, 40, 10),
    "deep": (33, 65, 20, 129, 3),
    "linear": (20, 4),
    "wide": (1030, 20, 5),
}
OWN: list[dict[str, float]] = [
    {"k": 0.25, "learning_rate": 0.1, "momentum": 0.0},
    {"k": 1.0, "learning_rate": 0.2, "momentum": 0.5},
    {"k": 3.0, "learning_rate": 0.05, "momentum": 0.9},
]


def settings(clip: float | None, dtype: torch.dtype, own: list[dict[str, float]]) -> Settings:
    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=DEVICE).unsqueeze(-1)

    columns = {name: column([one[name] for one in own]) for name in own[0]}
    columns["k"] = columns["k"].unsqueeze(-1)
    return Settings(**columns, clip=None if clip is None else column([clip] * len(own)))


class Pair:
    """A fused stack and a plain one in float64, given the same calls."""

    def __init__(self, sizes: tuple[int, ...], activation: str, clip: float | None = None) -> None:
        generator = torch.Generator().manual_seed(1)
        features = torch.randint(256, (200, sizes[0]), generator=generator).byte().to(DEVICE)
        labels = torch.randint(sizes[-1], (200,), generator=generator).to(DEVICE)
        examples = Examples(features, labels, 2 / 255, -1.0)
        self.plain = Stack(examples, sizes, activation, "sgd", 3, torch.float64)
        self.fused = FusedStack(examples, sizes, activation, 3)
        self.clip, self.own, self.generator = clip, OWN, generator
        self.start([0, 1, 2], [5, 6, 7])

    def start(self, models: list[int], seeds: list[int]) -> None:
        """Start new networks with a nonzero output layer, so that all layers learn."""
        at, generator = torch.tensor(models).to(DEVICE), torch.Generator().manual_seed(sum(seeds))
        shape = (len(models), *self.plain.weights[-1].shape[1:])
        outputs = 0.3 * torch.randn(shape, generator=generator).to(DEVICE)
        for stack in (self.plain, self.fused):
            stack.start(at, torch.tensor(seeds).to(DEVICE))
            stack.weights[-1][at] = outputs.to(stack.dtype)
        self.fused.shadows[-1][at] = outputs.half()

    def train(self, size: int = 40, batch_size: int = 32, epochs: int = 1) -> None:
        for _ in range(epochs):
            order = torch.stack(
                [torch.randperm(200, generator=self.generator)[:size] for _ in self.own]
            ).to(DEVICE)
            for stack in (self.plain, self.fused):
                stack.train(order, batch_size, settings(self.clip, stack.dtype, self.own))

    def select(self, models: list[int]) -> None:
        for stack in (self.plain, self.fused):
            stack.select(torch.tensor(models).to(DEVICE))
        self.own = [self.own[model] for model in models]

    def assert_alike(self, tolerance: float = 4e-3) -> None:
        """Compare parameters, velocities and outputs."""
        shadows = [weight.half() for weight in self.fused.weights]
        assert all(map(torch.equal, self.fused.shadows, shadows))
        moments = zip(self.plain.moments[0].tensors, self.fused.moments[0].tensors, strict=True)
        for at, (theirs, ours) in enumerate(moments):
            for model, own in enumerate(self.own):
                if own["momentum"] or at % 2:
                    self._assert_near(ours[model], theirs[model], tolerance)
        for theirs, ours in zip(self.plain.parameters, self.fused.parameters, strict=True):
            self._assert_near(ours, theirs, tolerance)

    def _assert_near(self, ours: Tensor, theirs: Tensor, tolerance: float) -> None:
        distance = (ours.double() - theirs).norm().item()
        assert distance <= tolerance * theirs.norm().item()


@pytest.mark.parametrize(
    ("sizes", "activation", "clip"),
    [
        ("small", "sigmoid", 0.1),
        ("deep", "tanh", 0.1),
        ("deep", "tanh", 100.0),
        ("deep", "sigmoid", None),
        ("linear", "tanh", 0.1),
        ("wide", "tanh", 0.1),
    ],
)
def test_whole_epochs(sizes: str, activation: str, clip: float | None) -> None:
    pair = Pair(SIZES[sizes], activation, clip)
    start = [weight.clone() for weight in pair.plain.weights]
    pair.train(epochs=2)
    pair.assert_alike()
    for before, weight in zip(start, pair.plain.weights, strict=True):
        assert not torch.allclose(before, weight, rtol=1e-3)


@pytest.mark.parametrize("clip", [None, 0.1])
def test_relu(clip: float | None) -> None:
    """One step: later ones diverge if a unit is active in only one of the two."""
    pair = Pair(SIZES["small"], "relu", clip)
    pair.train(size=32)
    pair.assert_alike(0.02)


@covering(
    1, sizes=[(20, 9, 8, 4), (20, 4)], epoch=[(128, 128), (130, 128), (6, 1), (5, 100), (70, 32)]
)
def test_batches_of_any_size(epoch: tuple[int, int], sizes: tuple[int, ...]) -> None:
    """Epochs of one step, and of even and odd numbers of steps, the last of them smaller."""
    size, batch_size = epoch
    pair = Pair(sizes, "tanh", clip=0.5)
    pair.train(size, batch_size, epochs=2)
    pair.assert_alike()


def test_a_network_is_the_same_alone() -> None:
    together, alone = (Pair(SIZES["deep"], "tanh", clip=0.1) for _ in range(2))
    alone.select([2])
    order = torch.stack([torch.randperm(200, generator=together.generator)[:70] for _ in OWN])
    for pair, models in ((together, [0, 1, 2]), (alone, [2])):
        own = settings(0.1, torch.float32, pair.own)
        pair.fused.train(order[models].to(DEVICE), 32, own)
    for ours, theirs in zip(together.fused.parameters, alone.fused.parameters, strict=True):
        assert torch.equal(ours[2], theirs[0])


def test_a_network_that_need_not_be_trained_stands_still() -> None:
    pair = Pair(SIZES["deep"], "tanh", clip=0.1)
    before = [parameter[1].clone() for parameter in pair.fused.parameters]
    order = torch.stack([torch.randperm(200, generator=pair.generator)[:70] for _ in OWN])
    own = settings(0.1, torch.float32, OWN)
    live = torch.tensor([[1.0], [-1.0], [1.0]], device=DEVICE)
    for _ in range(2):
        pair.fused.train(order.to(DEVICE), 32, replace(own, live=live))
        pair.plain.train(order.to(DEVICE), 32, settings(0.1, torch.float64, OWN))
    assert all(map(torch.equal, before, (parameter[1] for parameter in pair.fused.parameters)))
    pair.select([0, 2])
    pair.assert_alike()


def test_a_refilled_slot_knows_nothing_of_the_last_trial() -> None:
    pair = Pair(SIZES["small"], "tanh")
    pair.train()
    pair.fused.weights[0][1] = math.nan
    pair.fused.shadows[0][1] = math.nan
    pair.train()  # one of them has diverged now
    pair.start([1], [9])
    pair.assert_alike()
    pair.train()
    pair.assert_alike()


@pytest.mark.parametrize("models", [[2], [2, 0]])
def test_select(models: list[int]) -> None:
    pair = Pair(SIZES["small"], "tanh", clip=0.1)
    pair.train()
    pair.select(models)
    pair.assert_alike()
    pair.train(epochs=2)
    pair.assert_alike()


@pytest.mark.parametrize(("sizes", "rows"), [("small", 1), ("small", 128), ("deep", 150)])
def test_evaluate(sizes: str, rows: int) -> None:
    pair = Pair(SIZES[sizes], "tanh")
    pair.train()
    for stack in (pair.plain, pair.fused):
        stack.keep(torch.tensor([0, 2]).to(DEVICE))
    pair.train()
    generator = torch.Generator().manual_seed(2)
    index = torch.stack([torch.randperm(200, generator=generator)[:rows] for _ in range(3)])
    for which in (None, [0, 2], [2]):
        models = None if which is None else torch.tensor(which).to(DEVICE)
        at = index[which or slice(None)].to(DEVICE)
        (error, value), (their_error, their_value) = (
            stack.evaluate(at, models) for stack in (pair.fused, pair.plain)
        )
        assert_close(value, their_value, rtol=2e-3)
        assert_close(error, their_error, rtol=0, atol=1.5 / rows)  # one may be a tie
    now, best = pair.fused.evaluate(index.to(DEVICE))[1], pair.fused.best_of(2)
    assert not torch.equal(now[[2]], value)  # the best version is not the last
    assert [weight.shape for weight, _ in best] == [w.shape[1:] for w in pair.fused.weights]


def test_evaluation_continues_while_another_thread_loads_or_captures() -> None:
    pair = Pair(SIZES["small"], "tanh")
    index = torch.arange(90).reshape(3, 30).to(DEVICE)
    before = pair.fused.evaluate(index)
    during: list[Tensor] = []
    thread = threading.Thread(target=lambda: during.extend(pair.fused.evaluate(index)), daemon=True)
    with launching:
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
    assert all(map(torch.equal, before, during))


def test_a_diverged_network_does_not_affect_others() -> None:
    pair = Pair(SIZES["small"], "tanh")
    pair.own = [OWN[0], {**OWN[1], "learning_rate": 1e30}, OWN[2]]
    pair.train(epochs=2)
    assert not pair.fused.weights[0][1].isfinite().all()
    pair.select([0, 2])
    pair.assert_alike()


# The whole fleet


def blobs() -> Dataset:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(4, (263,), generator=generator)
    centres = torch.rand(4, 12, generator=generator)
    noise = torch.randn(263, 12, generator=generator)
    unit = (centres[labels] + 0.3 * noise).clamp(0, 1)
    return Dataset("blobs", (255 * unit).byte(), labels, 213)


def test_the_fleet_on_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """More trials than slots, some of which diverge: outcomes equal plain ones up to rounding."""

    def fused(examples: Examples, fleet: Fleet, recipe: MLPRecipe, slots: int) -> Stack:
        return FusedStack(examples, fleet.layer_sizes(recipe), recipe.activation, slots)

    base = a_trial("blobs", (9,), k=1, learning_rate=0.3, batch_size=50, max_epochs=3, clip=0.5)
    trials = [
        replace(base, k=k, seed=seed, momentum=momentum, split=Split(0, seed), max_epochs=limit)
        for seed, (k, momentum, limit) in enumerate([(1, 0.9, 4), (0.5, 0.5, 2), (2, 0.9, 3)])
    ]
    lost = replace(base, learning_rate=1e30, k=0.25)
    run = [trials[0], lost, *trials[1:]]
    plain = {o.trial: o for o in Fleet(blobs(), DEVICE, precision="float64").run(run)}
    monkeypatch.setattr("pseudograd.fleet.mlp.worker._stack", fused)
    ours = {o.trial: o for o in Fleet(blobs(), DEVICE, slots=2, keep_parameters=True).run(run)}
    assert ours.keys() == set(run)
    assert ours[lost].stopped_by == "diverged"
    assert 0 <= ours[lost].error <= 1
    for trial in trials:
        assert ours[trial].stopped_by == "limit"
        assert ours[trial].epochs == recipe_of(trial).max_epochs
        assert ours[trial].curve == pytest.approx(plain[trial].curve, abs=0.05)
        assert ours[trial].cross_entropy == pytest.approx(plain[trial].cross_entropy, rel=0.05)
        assert ours[trial].parameters is not None


def test_ramps_on_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU all epochs but the first two replay one graph, which must read the new k."""

    def fused(examples: Examples, fleet: Fleet, recipe: MLPRecipe, slots: int) -> Stack:
        return FusedStack(examples, fleet.layer_sizes(recipe), recipe.activation, slots)

    base = a_trial("blobs", (9,), k=1, learning_rate=0.5, batch_size=50, max_epochs=6)
    base = replace(base, stop_by="error and cross-entropy")  # so that the last epoch is the best
    ramps, starts = [Ramp(4, 0.25), Ramp(0.25, 4)], [4.0, 0.25]
    trials = [replace(base, k=k) for k in (*ramps, *starts)]
    plain = {o.trial: o for o in Fleet(blobs(), DEVICE, precision="float64").run(trials)}
    monkeypatch.setattr("pseudograd.fleet.mlp.worker._stack", fused)
    ours = {o.trial: o for o in Fleet(blobs(), DEVICE).run(trials)}
    for trial in trials:
        assert ours[trial].cross_entropy == pytest.approx(plain[trial].cross_entropy, rel=0.02)
    for ramp, start in zip(trials[:2], trials[2:], strict=True):
        assert abs(plain[ramp].cross_entropy / plain[start].cross_entropy - 1) > 0.1


def test_slots_of_the_kernels_follow_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """They grow while the queue does and shrink once it is empty; networks keep their state."""

    def fused(examples: Examples, fleet: Fleet, recipe: MLPRecipe, slots: int) -> Stack:
        return FusedStack(examples, fleet.layer_sizes(recipe), recipe.activation, slots)

    base = a_trial("blobs", (9,), k=0.5, learning_rate=0.3, momentum=0.9, batch_size=120)
    trials = [replace(base, seed=seed, max_epochs=1 + seed % 4) for seed in range(9)]
    plain = {o.trial: o for o in Fleet(blobs(), DEVICE, precision="float64").run(trials)}
    monkeypatch.setattr("pseudograd.fleet.mlp.worker._stack", fused)
    queue, later = deque(trials[:1]), trials[1:]
    worker = StackWorker(Fleet(blobs(), DEVICE), base, torch.device(DEVICE), 1, 4)
    ours, slots = {}, []
    for outcome in worker.through(queue, never):
        ours[outcome.trial] = outcome
        slots.append(len(worker.runs))
        queue.extend(later)
        later = []
    assert ours.keys() == plain.keys()
    assert slots[0] == 1
    assert max(slots) == 4
    assert slots[-1] < 4
    for trial, outcome in ours.items():
        assert outcome.curve == pytest.approx(plain[trial].curve, abs=0.05)
        assert outcome.cross_entropy == pytest.approx(plain[trial].cross_entropy, rel=0.05)


class Peak(TorchDispatchMode):
    """Counts the bytes of all tensors that are allocated meanwhile, now and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.most = 0, 0
        self.held: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        storages = [
            one.untyped_storage() for one in tree_leaves(out) if isinstance(one, torch.Tensor)
        ]
        for storage in storages:
            key, size = storage._cdata, storage.nbytes()
            if key not in self.held:
                self.held.add(key)
                self.now += size
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.free, key, size)
        return out

    def free(self, key: int, size: int) -> None:
        self.held.discard(key)
        self.now -= size


@pytest.mark.parametrize("hidden", [(400,), (200, 200, 200)])
def test_a_slot_needs_no_more_memory_than_planned(
    hidden: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While weights are drawn, slots become more and fewer, and ended trials are evaluated."""
    monkeypatch.setattr("pseudograd.fleet.mlp.stack._DRAWN_AT_ONCE", 1 << 16)
    data = Dataset("wide", torch.zeros(50, 784), torch.arange(50) % 10, 40)
    recipe = recipe_of(a_trial("wide", hidden, 1, 0.1, batch_size=128))
    planned = Fleet(data)._bytes_of_a_slot(recipe)
    examples = Examples(data.features.to(DEVICE), data.labels.to(DEVICE), 1.0, 0.0)
    few, many = torch.arange(3, device=DEVICE), torch.arange(6, device=DEVICE)

    def panels(models: int) -> int:  # of an evaluation, where there are many slots
        return models * 2 * 256 * (784 + sum(hidden) + 2 * 10)

    with Peak() as bytes_used:
        stack = FusedStack(examples, (784, *hidden, 10), "relu", 3)
        stack.start(few, few)
        assert bytes_used.most + panels(3) <= 3 * planned
        stack.select(many % 3)
        assert bytes_used.most + panels(6) <= 6 * planned
        stack.start(many, many)
        stack.largest_weight()
        stack.keep(many)
        stack.evaluated(many)
        stack.select(few)
        assert bytes_used.most + panels(6) <= 6 * planned


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize(
    ("changes", "precision", "kind"),
    [
        ({}, "tf32", FusedStack),
        ({"clip": 1.0, "hidden_layer_sizes": (9, 8, 7)}, "tf32", FusedStack),
        ({}, "float32", Stack),
        ({}, "float64", Stack),
        ({"optimizer": "adam"}, "tf32", Stack),
        ({"batch_size": 129}, "tf32", Stack),
    ],
)
def test_what_runs_on_a_gpu(changes: dict[str, Any], precision: str, kind: type[Stack]) -> None:
    trial = replace(a_trial("blobs", (9,), 1, 0.1, momentum=0.9, max_epochs=5), **changes)
    fleet = Fleet(blobs(), "cuda", precision=precision)
    assert type(StackWorker(fleet, trial, torch.device("cuda"), 2, 2).stack) is kind
    trials = [replace(trial, seed=seed) for seed in range(5)]
    ours = {o.trial: o for o in Fleet(blobs(), "cuda", 2, precision=precision).run(trials)}
    for outcome in Fleet(blobs(), precision="float64").run(trials):
        assert ours[outcome.trial].curve == pytest.approx(outcome.curve, abs=0.1)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_two_fleets_at_once_on_a_gpu() -> None:
    """Each on its own stream, with a varying number of slots: outcomes are bitwise as alone."""
    first = a_trial("blobs", (9,), k=0.5, learning_rate=0.1, momentum=0.9, batch_size=16)
    second = replace(first, hidden_layer_sizes=(24, 17), clip=0.5)
    queues = [
        [replace(base, seed=seed, split=Split(0, seed), max_epochs=2 + seed) for seed in range(40)]
        for base in (first, second)
    ]

    def run(trials: list[Trial]) -> dict[Trial, Any]:
        with torch.cuda.stream(torch.cuda.Stream()):
            return {o.trial: o for o in Fleet(blobs(), "cuda", 32).run(trials)}

    alone = [run(trials) for trials in queues]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            assert list(pool.map(run, queues)) == alone
