"""The CPU kernels: for every kind of processor, layout and dtype, the same as PyTorch operations.

The contract of the loss, which runs on these kernels by default, is in test_loss_contract.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

import reference
from covering import covering
from pseudograd import tunable_binary_cross_entropy_with_logits, tunable_cross_entropy
from pseudograd.loss import cpu

PROCESSORS = ("DEFAULT", "AVX2", "AVX512")
TOLERANCE = {torch.float32: 3e-6, torch.float64: 1e-12, torch.bfloat16: 8e-3, torch.float16: 1e-3}
# Few classes go by column, many by row; some fill whole vectors, some leave a tail.
SHAPES = ((5,), (7, 3), (33, 10), (40, 64), (5, 131), (2, 21, 5, 7), (2, 70, 9), (3, 5, 4, 4, 2))


@pytest.fixture(autouse=True, params=PROCESSORS)
def _processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use the kernels for this kind of processor."""
    here = torch.backends.cpu.get_cpu_capability()
    able = PROCESSORS[: PROCESSORS.index(here) + 1] if here in PROCESSORS else ("DEFAULT",)
    if request.param not in able or not cpu.library_path(request.param).exists():
        pytest.skip(f"no kernels for {request.param} on this machine")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: request.param)
    cpu.kernels.cache_clear()
    yield
    cpu.kernels.cache_clear()


def value_and_gradient(
    logits: Tensor, target: Tensor, implementation: str, **settings: object
) -> tuple[Tensor, Tensor]:
    value = tunable_cross_entropy(logits, target, implementation=implementation, **settings)  # type: ignore[arg-type]
    upstream = torch.linspace(0.5, 2, value.numel(), dtype=value.dtype).reshape(value.shape)
    (gradient,) = torch.autograd.grad(value, logits, upstream)
    return value.detach(), gradient


def assert_same(logits: Tensor, target: Tensor, **settings: object) -> Tensor:
    ours = value_and_gradient(logits, target, "auto", **settings)
    theirs = value_and_gradient(logits, target, "torch", **settings)
    for our, their in zip(ours, theirs, strict=True):
        largest = their.abs().max().item()
        tolerance = TOLERANCE[logits.dtype] * largest
        torch.testing.assert_close(our, their, rtol=0, atol=tolerance)
    return ours[1]


def examples(shape: tuple[int, ...], kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(shape, generator=generator)).to(dtype)
    dim = min(len(shape) - 1, 1)
    if kind == "probabilities":
        return logits, torch.randn(shape, generator=generator).softmax(dim).to(dtype)
    labels = shape[:1] + shape[2:] if dim else ()
    target = torch.randint(shape[dim], labels, generator=generator)
    if target.numel() > 3:
        target.view(-1)[2] = -100
    return logits, target


@pytest.mark.parametrize("kind", ["labels", "smoothed", "probabilities"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_shape_and_setting(kind: str, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        logits, target = examples(shape, kind, dtype)
        weight = torch.linspace(0.5, 2, logits.shape[min(logits.dim() - 1, 1)]).to(dtype)
        per_example = torch.full(shape[:1] + shape[2:] if len(shape) > 1 else (), 0.7)
        for k in (1.0, 0.5, 2.0, 3.0, per_example):
            for reduction in ("mean", "sum", "none"):
                smoothing = 0.1 if kind == "smoothed" else 0.0
                settings = {"k": k, "reduction": reduction, "label_smoothing": smoothing}
                assert_same(logits.requires_grad_(), target, weight=weight, **settings)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda z: z.contiguous(),
    "channels last": lambda z: z.contiguous(memory_format=torch.channels_last),
    "a part of a larger one": lambda z: torch.cat([z, z], 3).contiguous()[..., ::2][..., :7],
    "dimensions swapped": lambda z: z.transpose(2, 3).contiguous().transpose(2, 3),
    "classes last, reversed": lambda z: z.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0),
    "one row, repeated": lambda z: z[:, :, :1].expand(z.shape),
    "cropped": lambda z: torch.nn.functional.pad(z, (2, 3, 1, 4))[:, :, 1:-4, 2:-3],
    "images last": lambda z: z.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    "classes between": lambda z: z.repeat(2, 1, 1, 1).as_strided(z.shape, (40, 3, 14, 2)),
    "negated by a flag": lambda z: torch.complex(z, -z).conj().imag,
}


@pytest.mark.parametrize("kind", ["labels", "probabilities"])
@pytest.mark.parametrize("classes", [6, 70])
def test_every_layout(classes: int, kind: str, subtests: pytest.Subtests) -> None:
    shape = (3, classes, 5, 7)
    given = examples(shape, kind, torch.float32)
    ks, weight = torch.linspace(0.3, 3, 3 * 5 * 7).reshape(3, 5, 7), torch.linspace(0.5, 2, classes)
    for layout, laid_out in LAYOUTS.items():
        with subtests.test(layout):
            logits = laid_out(given[0]).requires_grad_()
            target = laid_out(given[1]) if kind == "probabilities" else given[1]
            gradient = assert_same(logits, target, k=0.5)
            assert_same(logits, target, k=ks, weight=weight, reduction="none")
            if layout in ("contiguous", "channels last"):
                assert gradient.stride() == logits.stride()


@covering(kind=["labels", "probabilities"], size=[37, 70], swapped=[False, True])
def test_whole_vectors_and_parts_of_images(size: int, kind: str, swapped: bool) -> None:
    """Rows of a cropped image are a few vectors and a rest."""
    logits, target = examples((2, 3, size, size + 2), kind, torch.float32)

    def within(z: Tensor) -> Tensor:
        z = torch.nn.functional.pad(z, (1, 2))
        z = z.transpose(2, 3).contiguous().transpose(2, 3) if swapped else z
        return z[..., 1:-2]

    logits, target = within(logits), target if kind == "labels" else within(target)
    assert_same(logits.requires_grad_(), target, k=2.0, reduction="none")


def test_many_dimensions() -> None:
    for dims in ((0, 1, 2, 3, 4, 5, 6), (6, 4, 2, 1, 3, 5, 0)):
        shape = (2, 3, 2, 3, 1, 2, 4)
        logits, target = examples(shape, "labels", torch.float32)
        back = sorted(range(7), key=dims.__getitem__)
        logits = logits.permute(dims).contiguous().permute(back)
        assert_same(logits.requires_grad_(), target, k=0.5, reduction="none")


def test_a_graph_expects_the_strides_of_the_gradient(subtests: pytest.Subtests) -> None:
    logits, target = examples((3, 6, 5, 7), "labels", torch.float32)
    operator = torch.ops.pseudograd.loss_on_cpu.default
    for name, laid_out in LAYOUTS.items():
        with subtests.test(name):
            given = (laid_out(logits), target, 0.5, None, None, -100, "mean", 0.0, True)
            torch.library.opcheck(operator, given, test_utils="test_faketensor")


@pytest.mark.parametrize("classes", [3, 70])
def test_a_certain_class_with_the_whole_target(classes: int, subtests: pytest.Subtests) -> None:
    """The rounding residue of its p - q, up to 1e-16, must not enter the strength, 1e-22."""
    logits = torch.zeros(50, classes, dtype=torch.float64)
    logits[:, 1] = 50 + math.log(classes)
    labels, wholes = torch.ones(50, dtype=torch.long), torch.linspace(0.1, 3, 50).double()
    target = wholes.unsqueeze(1) * torch.nn.functional.one_hot(labels, classes)
    for k in (0.1, 0.5, 1.0, 2.0):
        with subtests.test(k=k):
            settings = {"k": k, "reduction": "sum"}
            _, soft = value_and_gradient(logits.requires_grad_(), target, "auto", **settings)
            _, hard = value_and_gradient(logits, labels, "auto", **settings)
            torch.testing.assert_close(soft, wholes.unsqueeze(1) * hard, rtol=1e-9, atol=0)


@covering(dtype=[torch.float32, torch.float64], classes=[1, 2, 40, 66])
def test_labels_of_every_size(dtype: torch.dtype, classes: int, subtests: pytest.Subtests) -> None:
    """Gaps that underflow, subnormal logits, masked classes, infinity and NaN; against float64."""
    generator = torch.Generator().manual_seed(classes)
    rows = []
    for scale in (1e-40, 1e-6, 1.0, 30.0, 100.0, 800.0, 1e4, 1e38):
        rows += [scale * torch.randn(classes, generator=generator, dtype=dtype) for _ in range(4)]
        rows += [torch.where(torch.arange(classes) % 2 == 0, row, -torch.inf) for row in rows[-4:]]
    rest = torch.randn(classes, generator=generator, dtype=dtype)
    first = torch.arange(classes) == 0
    rows += [torch.where(first, gap, rest) for gap in torch.linspace(-800, 800, 3201, dtype=dtype)]
    for special in (torch.nan, torch.inf, -torch.inf):
        for at in (0, classes - 1):
            rows.append(torch.where(torch.arange(classes) == at, special, rows[16]))
    rows.append(torch.full((classes,), -torch.inf, dtype=dtype))
    logits, target = torch.stack(rows), torch.zeros(len(rows), dtype=torch.long)
    target[::7] = -100
    wide = logits.double().requires_grad_()
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    same = partial(torch.testing.assert_close, rtol=tolerance, atol=1e-25, equal_nan=True)
    for k in (2.0**-100, 2.0**-6, 0.5, 1.0, 2.0, 7.0, 2.0**6, 2.0**100):
        value, f = value_and_gradient(wide, target, "torch", k=k, reduction="none")
        for sensitivity in (k, torch.full(target.shape, k, dtype=dtype)):
            with subtests.test(k=k, tensor=not isinstance(sensitivity, float)):
                settings = {"k": sensitivity, "reduction": "none"}
                ours, mine = value_and_gradient(logits.requires_grad_(), target, "auto", **settings)
                same(ours.double(), value.to(dtype).double())
                same(mine.double(), f)


@pytest.mark.parametrize("classes", [4, 66])
def test_soft_targets_of_every_size(classes: int, subtests: pytest.Subtests) -> None:
    """Targets of 0, masked classes, gaps that underflow, p near q; against float64."""
    generator = torch.Generator().manual_seed(classes)
    rows = []
    for scale in (1e-6, 1.0, 30.0, 100.0, 800.0, 1e4):
        z = scale * torch.randn(classes, generator=generator)
        q = torch.randn(classes, generator=generator).softmax(0)
        sparse = torch.where(torch.arange(classes) % 2 == 0, q, 0)
        rows += [(z, q), (z, 1e-30 * sparse), (z, z.softmax(0))]
        rows += [(z, torch.nn.functional.one_hot(z.argmax(), classes).float())]
        rows += [(torch.where(torch.arange(classes) == 1, -torch.inf, z), sparse)]
    logits, target = (torch.stack(column) for column in zip(*rows, strict=True))
    wide = logits.double().requires_grad_()
    bias = (logits.double().softmax(1) - target / target.double().sum(1, True)).abs()
    for k in (2.0**-6, 0.5, 1.0, 7.0, 2.0**6):
        settings: dict[str, object] = {"k": k, "reduction": "sum"}
        value, true = value_and_gradient(wide, target.double(), "torch", **settings)
        for sensitivity in (k, torch.full((len(logits),), k)):
            settings["k"] = sensitivity
            with subtests.test(k=k, tensor=not isinstance(sensitivity, float)):
                ours, f = value_and_gradient(logits.requires_grad_(), target, "auto", **settings)
                torch.testing.assert_close(ours.double(), value, rtol=1e-5, atol=0)
                # The bias is right to 1e-15, and k multiplies its relative error.
                allowed = true.abs() * (1e-5 + max(k, 1) * 1e-15 / bias.clamp(min=1e-300)) + 1e-25
                assert ((f.double() - true).abs() <= allowed).all()


@pytest.mark.parametrize("classes", [3, 66])
def test_the_largest_bias_of_a_side_has_all_its_strength_at_a_large_k(classes: int) -> None:
    """Rounding errors of log |e|, times k, must not make the largest one vanish."""
    share = torch.linspace(0.51, 0.99, 300).mul(2**20).round().div(2**20)
    logits, target = torch.zeros(300, classes), torch.zeros(300, classes)
    logits[:, 0] = 400
    target[:, 1], target[:, 2] = share, 1 - share
    expected = torch.zeros(classes)
    expected[:2] = torch.tensor([1.0, -1.0])
    for k in (1e9, 1e13, 2.0**100):
        value = tunable_cross_entropy(logits.requires_grad_(), target, k=k, reduction="sum")
        (f,) = torch.autograd.grad(value, logits)
        torch.testing.assert_close(f, expected.expand(300, classes), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["labels", "soft", "both"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_binary_losses_in_whole_vectors_and_parts(dtype: torch.dtype, kind: str) -> None:
    """Sizes around those of vectors and blocks; one soft target makes its block soft."""
    for count in (1, 7, 8, 9, 513):
        generator = torch.Generator().manual_seed(count)
        z = (20 * torch.randn(count, generator=generator)).to(dtype).requires_grad_()
        t = torch.rand(count, generator=generator).to(dtype)
        t = t if kind == "soft" else t.round()
        if kind == "both":
            t[-1] = 0.25
        ks = torch.logspace(-6, 6, count, 2).to(dtype)
        for k in (0.5, ks):
            value = tunable_binary_cross_entropy_with_logits(z, t, k=k, reduction="none")
            (f,) = torch.autograd.grad(value.sum(), z)
            each = zip(z.tolist(), t.tolist(), (k + 0 * ks).tolist(), strict=True)
            both = [reference.binary(*one) for one in each]
            true = torch.tensor(both, dtype=torch.float64)
            rtol = 1e-5 if dtype == torch.float32 else 1e-10
            torch.testing.assert_close(value.detach().double(), true[:, 0], rtol=rtol, atol=1e-25)
            torch.testing.assert_close(f.double(), true[:, 1], rtol=rtol, atol=1e-25)
            mean = tunable_binary_cross_entropy_with_logits(z, t, k=k)
            torch.testing.assert_close(mean, value.mean(), rtol=rtol, atol=0)
    with pytest.raises(ValueError, match="k must be finite and above 0"):
        tunable_binary_cross_entropy_with_logits(z, t, k=ks - 1)


@pytest.mark.parametrize("target", [1.0, 0.25])
def test_binary_losses_of_nan(target: float) -> None:
    for z in (math.nan, math.inf, -math.inf):
        logit = torch.tensor([z, 1.0], requires_grad=True)
        value = tunable_binary_cross_entropy_with_logits(
            logit, torch.full((2,), target), k=0.5, reduction="none"
        )
        (f,) = torch.autograd.grad(value.sum(), logit)
        assert value[0].isnan() == f[0].isnan() == math.isnan(z)
        assert f[1].isfinite()


@pytest.mark.parametrize("kind", ["labels", "probabilities"])
def test_many_examples_on_several_threads(kind: str) -> None:
    """The sums of threads are added in order, so a loss does not depend on their timing."""
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    logits, target = examples((1200, 40), kind, torch.float32)
    try:
        assert_same(logits.requires_grad_(), target, k=0.5)
        values = {tunable_cross_entropy(logits, target, k=0.5).item() for _ in range(20)}
        assert len(values) == 1
        if kind == "labels":
            target[1000] = 40
            with pytest.raises(IndexError, match="class index 40, which is out of range"):
                tunable_cross_entropy(logits, target, k=0.5)
            with pytest.raises(ValueError, match="k must be finite and above 0"):
                tunable_cross_entropy(logits, target.clamp(max=39), k=torch.arange(-2.0, 1198))
    finally:
        torch.set_num_threads(threads)


def test_the_gradient_belongs_to_one_backward_pass() -> None:
    """It is handed over once it is no longer needed, and copied before that."""
    logits, target = examples((9, 4), "labels", torch.float32)
    loss = tunable_cross_entropy(logits.requires_grad_(), target, k=0.5)
    (first,) = torch.autograd.grad(loss, logits, retain_graph=True)
    kept = first.clone()
    first.zero_()
    (second,) = torch.autograd.grad(3 * loss, logits, retain_graph=True)
    torch.testing.assert_close(second, 3 * kept)
    (third,) = torch.autograd.grad(loss, logits)
    assert torch.equal(third, kept)
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(loss, logits)


def test_without_grad_mode_there_is_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, target = examples((9, 4), "labels", torch.float32)
    monkeypatch.setattr(cpu, "_writable", None)
    with torch.no_grad():
        tunable_cross_entropy(logits.requires_grad_(), target, k=0.5)
