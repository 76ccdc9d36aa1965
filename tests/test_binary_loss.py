"""Binary cross-entropy with k: PyTorch's contract, and Eq. 5 for two classes on every route."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.func import grad, hessian, jacfwd, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.testing import assert_close

import reference
from covering import covering
from covering import rows as covering_rows
from kernels import needs
from pseudograd import (
    TunableBCEWithLogitsLoss,
    schedules,
    tunable_cross_entropy,
)
from pseudograd import tunable_binary_cross_entropy_with_logits as tunable_bce
from pseudograd.loss import cpu, functional
from test_paper_rule import assert_within_an_ulp
from test_transforms import COMPILED, DIRECT, compiled, differentiate, on_compilers

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # Overflow and NaN are as on a GPU, where nothing warns of them.
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
]

PATHS = ("fused", "plain", "triton")


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the CPU's kernel, PyTorch operations, and the GPU's kernel in Triton's interpreter."""
    chosen: str = request.param
    needs("auto" if chosen == "fused" else chosen)
    if chosen != "fused":
        monkeypatch.setattr(cpu, "kernels", lambda: None)
    if chosen == "triton":
        monkeypatch.setattr(functional, "_is_for_kernels", lambda input: True)
        monkeypatch.setattr(functional, "kernels_run", lambda: True)
    return chosen


EXTREME_K = (2.0**-99, 1 / 64, 0.5, 1.0, 2.0, 64.0, 2.0**99)
SIZES = (0.0, 1e-6, 0.1, 1.0, 5.0, 17.0, 40.0, 68.6, 90.0, 750.0, 1e4, 3e38)
LOGITS = tuple(sign * size for size in SIZES for sign in (1.0, -1.0))


def true(
    z: Tensor, t: Tensor, k: float | Tensor, pos_weight: float | Tensor = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the value and pseudo-gradient of each logit, in float64."""
    parts = (x.double().expand(z.shape).flatten().tolist() for x in (
        z.detach(), t.detach(), torch.as_tensor(k, dtype=torch.float64), torch.as_tensor(pos_weight)
    ))  # fmt: skip
    both = [reference.binary(*each) for each in zip(*parts, strict=True)]
    values, gradients = torch.tensor(both, dtype=torch.float64).reshape(-1, 2).unbind(1)
    return values.reshape(z.shape), gradients.reshape(z.shape)


def examples() -> tuple[Tensor, Tensor]:
    """Four examples with three outputs each; hard and soft targets."""
    generator = torch.Generator().manual_seed(0)
    z = 3 * torch.randn(4, 3, generator=generator)
    t = torch.tensor([[1, 0, 0.3], [0, 1, 1], [0.9, 0, 1], [1, 0.5, 0]])
    return z, t


def assert_right(gradient: Tensor, k: float | Tensor) -> None:
    """Assert the pseudo-gradient of the sum over `examples`, not cross-entropy's gradient."""
    z, t = examples()
    assert_close(gradient.double(), true(z, t, k)[1], rtol=1e-5, atol=1e-8)
    plain = torch.sigmoid(z) - t
    assert not torch.allclose(gradient, plain, rtol=0.1, atol=0.01)


summed = partial(tunable_bce, reduction="sum")


def of_k(z: Tensor, t: Tensor, k: float | Tensor) -> Tensor:
    return summed(z, t, k=k)


def of_half(z: Tensor, t: Tensor) -> Tensor:
    return summed(z, t, k=0.5)


# --- the rule -------------------------------------------------------------------------------------


@covering(
    alone=[True, False], pos_weight=[None, 0.3], dtype=[torch.float32, torch.float64], path=PATHS
)
@pytest.mark.usefixtures("path")
def test_the_rule_of_labels(
    dtype: torch.dtype, pos_weight: float | None, alone: bool, subtests: pytest.Subtests
) -> None:
    """Accurate to a few units in the last place for logits of every size, with soft targets too."""
    z = torch.tensor(LOGITS, dtype=dtype).repeat(2)
    t = torch.tensor([0.0, 1.0], dtype=dtype).repeat_interleave(len(LOGITS))
    if not alone:
        z, t = torch.cat((z, z.new_ones(1))), torch.cat((t, t.new_full((1,), 0.25)))
    w = None if pos_weight is None else torch.tensor(pos_weight, dtype=dtype)
    rtol = 1e-5 if dtype == torch.float32 else 1e-12
    for k in EXTREME_K:
        with subtests.test(k=k):
            assert_true(z, t, k, w, rtol)


def assert_true(z: Tensor, t: Tensor, k: float, w: Tensor | None, rtol: float) -> None:
    value, gradient = true(z, t, k, 1.0 if w is None else w)
    close = partial(assert_close, rtol=rtol, atol=1e-25, check_dtype=False)
    close(tunable_bce(z, t, pos_weight=w, reduction="none", k=k), value.to(z.dtype))
    close(differentiate(partial(summed, k=k, pos_weight=w), z, t), gradient.to(z.dtype))


@covering(pos_weight=[None, 100.0], dtype=[torch.float32, torch.float64], path=PATHS)
@pytest.mark.usefixtures("path")
def test_the_rule_of_soft_targets(
    dtype: torch.dtype, pos_weight: float | None, subtests: pytest.Subtests
) -> None:
    """Near 0 and 1 too, and where the logit nearly agrees with the target."""
    soft = torch.tensor([1e-30, 1e-9, 0.1, 0.3, 0.5, 0.75, 0.999, 1 - 1e-7], dtype=dtype)
    z, t = (
        x.flatten() for x in torch.meshgrid(torch.tensor(LOGITS).to(dtype), soft, indexing="ij")
    )
    gaps = 1e-3 * torch.tensor([[-1.0], [1.0], [5.0]], dtype=torch.float64)
    near = (torch.logit(soft[1:].double()) + gaps).flatten()
    z, t = torch.cat((z, near.to(dtype))), torch.cat((t, soft[1:].repeat(3)))
    w = None if pos_weight is None else torch.tensor(pos_weight, dtype=dtype)
    for k in EXTREME_K:
        with subtests.test(k=k):
            assert_true(z, t, k, w, rtol=1e-5 if dtype == torch.float32 else 1e-10)


@covering(k=[0.25, 1.0, 3.0], soft=[False, True], path=PATHS)
@pytest.mark.usefixtures("path")
def test_it_is_the_loss_of_two_classes(k: float, soft: bool) -> None:
    """With the logits (0, z); ``pos_weight`` is the weight of the second class."""
    generator = torch.Generator().manual_seed(1)
    z = 5 * torch.randn(50, generator=generator, dtype=torch.float64)
    t = torch.rand(50, generator=generator, dtype=torch.float64)
    t = t if soft else t.round()
    target = torch.stack((1 - t, t), -1) if soft else t.long()

    def two_columns(z: Tensor, target: Tensor) -> Tensor:
        columns = torch.stack((torch.zeros_like(z), z), -1)
        weight = torch.tensor([1.0, 3.0], dtype=z.dtype)
        return tunable_cross_entropy(columns, target, weight=weight, reduction="sum", k=k)

    binary = partial(summed, pos_weight=torch.tensor(3.0, dtype=z.dtype), k=k)
    assert_close(binary(z, t), two_columns(z, target))
    assert_close(
        differentiate(binary, z, t), differentiate(two_columns, z, target), rtol=1e-10, atol=0
    )


@pytest.mark.usefixtures("path")
def test_zero_weight_and_zero_bias_give_no_gradient() -> None:
    """For a positive of weight 0, and for a logit whose probability is the target."""
    zero = torch.tensor(0.0)
    z, t = torch.tensor([3.0, 0.0]), torch.tensor([1.0, 0.5])
    gradient = differentiate(partial(summed, k=0.5), z, t)
    assert gradient[1] == 0
    gradient = differentiate(partial(summed, pos_weight=zero, k=0.5), z, t)
    assert gradient[0] == 0
    assert gradient[1] > 0


@pytest.mark.usefixtures("path")
def test_infinite_logits_have_the_limit() -> None:
    inf = math.inf
    z, t = torch.tensor([inf, inf, -inf, -inf]), torch.tensor([1.0, 0.0, 0.0, 1.0])
    assert tunable_bce(z, t, reduction="none", k=0.5).tolist() == [0, inf, 0, inf]
    assert differentiate(partial(summed, k=0.5), z, t).tolist() == [0, 1, 0, -1]
    no_positives = tunable_bce(z, t, pos_weight=torch.tensor(0.0), reduction="none", k=0.5)
    assert no_positives.tolist() == [0, inf, 0, 0]
    nan = torch.tensor([math.nan])
    assert differentiate(partial(summed, k=0.5), nan, nan.new_ones(1)).isnan().all()


# --- the contract ---------------------------------------------------------------------------------

SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (5,), (4, 3), (2, 3, 2, 2))


def factors(shape: tuple[int, ...], kind: str, dtype: torch.dtype) -> Tensor | None:
    if kind == "none":
        return None
    wanted = {"scalar": (), "last": shape[-1:], "one": (1,) * len(shape), "full": shape}[kind]
    return (torch.rand(wanted, generator=torch.Generator().manual_seed(2)) + 0.5).to(dtype)


@covering(reduction=["mean", "sum", "none"], shape=SHAPES, path=PATHS)
@pytest.mark.usefixtures("path")
def test_at_k_1_it_equals_pytorch(shape: tuple[int, ...], reduction: str) -> None:
    """Value, gradient, and the target's gradient; the value for every k."""
    kinds = ("none", "scalar", "last", "one", "full")
    dtypes = (torch.float32, torch.float64)
    generator = torch.Generator().manual_seed(3)
    for w, p, dtype in covering_rows(2, {"w": kinds, "p": kinds, "dtype": dtypes}):
        z = torch.randn(shape, generator=generator).to(dtype)
        t = torch.rand(shape, generator=generator).to(dtype)
        leaves = z.requires_grad_(), t.requires_grad_()
        arguments: Any = factors(shape, w, dtype), None, None, reduction, factors(shape, p, dtype)
        ours, theirs = tunable_bce(*leaves, *arguments), F.binary_cross_entropy_with_logits(
            *leaves, *arguments
        )  # fmt: skip
        eps = 20 * torch.finfo(dtype).eps
        close = partial(assert_close, rtol=eps, atol=eps, equal_nan=True)
        close(ours, theirs)
        close(tunable_bce(*leaves, *arguments, k=0.3), theirs)
        upstream = torch.rand(theirs.shape, generator=generator).to(dtype)
        for mine, own in zip(
            torch.autograd.grad(ours, leaves, upstream),
            torch.autograd.grad(theirs, leaves, upstream),
            strict=True,
        ):
            close(mine, own)


@covering(k=[0.5, torch.tensor([0.25, 1.0, 4.0])], reduction=["mean", "sum", "none"], path=PATHS)
@pytest.mark.usefixtures("path")
def test_weights_multiply_the_pseudo_gradient(k: float | Tensor, reduction: str) -> None:
    """k may also have one value per class."""
    z, t = (x.double() for x in examples())
    weight, pos_weight = torch.rand(4, 1).double(), torch.tensor([2.0, 0.5, 3.0]).double()
    _, gradient = true(z, t, k, pos_weight)
    leaf = z.clone().requires_grad_()
    loss = tunable_bce(leaf, t, weight, reduction=reduction, pos_weight=pos_weight, k=k)
    upstream = torch.rand(loss.shape, dtype=torch.float64)
    loss.backward(upstream)
    expected = weight * gradient * upstream / (z.numel() if reduction == "mean" else 1)
    assert leaf.grad is not None
    assert_close(leaf.grad, expected, rtol=1e-6, atol=0)  # k of float32


@pytest.mark.usefixtures("path")
def test_exact_where_the_bias_cancels() -> None:
    """σ(z) nearly equals 3t / (3t + 1 - t), so rounding 3t would give a wrong gradient."""
    t, pos_weight = torch.linspace(0.1, 0.9, 9), torch.tensor(3.0)
    z = (3 * t.double() / (1 - t.double())).log().float() + 1e-5
    _, gradient = true(z, t, 4.0, pos_weight)
    f = differentiate(partial(summed, k=4.0, pos_weight=pos_weight), z, t)
    assert_close(f.double(), gradient, rtol=1e-5, atol=0)


@pytest.mark.usefixtures("path")
def test_k_broadcasts(subtests: pytest.Subtests) -> None:
    z, t = examples()
    for shape in ((), (1,), (3,), (4, 1), (4, 3)):
        with subtests.test(shape=shape):
            k = torch.rand(shape, generator=torch.Generator().manual_seed(4)) + 0.1
            assert_right(differentiate(partial(summed, k=k), z, t), k)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_float32_rounded_once(dtype: torch.dtype, path: str) -> None:
    z, t = (x.to(dtype) for x in examples())
    for k in (0.25, 1.0, 2.0):
        value, gradient = true(z, t, k)
        f, ours = differentiate(partial(summed, k=k), z, t), tunable_bce(z, t, k=k)
        # Triton's interpreter truncates where a GPU rounds.
        close = assert_within_an_ulp if path == "triton" else partial(assert_close, rtol=0, atol=0)
        close(f, gradient.float().to(dtype))
        close(ours, value.mean().float().to(dtype))


@pytest.mark.usefixtures("path")
def test_autocast() -> None:
    z, t = examples()
    with torch.autocast("cpu", torch.bfloat16):
        loss = tunable_bce(z.bfloat16().requires_grad_(), t, k=0.5)
    assert loss.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert tunable_bce(z.bfloat16(), t.bfloat16(), k=0.5).dtype == torch.float32


@pytest.mark.parametrize("upstream", [1.0, 3.0])
@pytest.mark.parametrize("soft", [False, True])
def test_blocks_of_the_gpus_kernel(
    upstream: float, soft: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several per program, the last one partial; some have only hard labels."""
    needs("triton")
    from pseudograd.loss.triton import binary

    monkeypatch.setattr(binary, "BLOCK", 16)
    monkeypatch.setattr(binary, "MOST_PROGRAMS", 2)
    generator = torch.Generator().manual_seed(5)
    z, t = torch.randn(33, 3, generator=generator), torch.rand(33, 3, generator=generator).round()
    t = torch.where(torch.arange(33)[:, None] % 11 == 7, 0.3, t) if soft else t
    factors = torch.rand(33, 1, generator=generator), torch.rand(3, generator=generator)
    k = torch.rand(3, generator=generator) + 0.2

    def loss(z: Tensor, reduction: str, dtype: torch.dtype) -> Tensor:
        target, each_k, weight, pos_weight = (x.to(dtype) for x in (t, k, *factors))
        if dtype == torch.float32:
            return binary.fused_binary(z, target, each_k, weight, pos_weight, reduction, dtype)
        settings: dict[str, Any] = {"weight": weight, "pos_weight": pos_weight, "k": each_k}
        return tunable_bce(z, target, reduction=reduction, **settings)

    for reduction in ("mean", "sum", "none"):
        leaf, exact = z.clone().requires_grad_(), z.double().requires_grad_()
        ours, theirs = loss(leaf, reduction, z.dtype), loss(exact, reduction, exact.dtype)
        assert_close(ours.double(), theirs, rtol=1e-5, atol=0)
        (f,) = torch.autograd.grad(ours, leaf, torch.full_like(ours, upstream), retain_graph=True)
        (g,) = torch.autograd.grad(theirs, exact, torch.full_like(theirs, upstream))
        assert_close(f.double(), g, rtol=1e-5, atol=0)
        (again,) = torch.autograd.grad(ours, leaf, torch.full_like(ours, upstream))
        assert torch.equal(again, f)


@pytest.mark.usefixtures("path")
def test_strides_do_not_matter() -> None:
    z, t = torch.randn(2, 3, 4, 5), torch.rand(2, 3, 4, 5)
    last = z.contiguous(memory_format=torch.channels_last)
    loss = partial(summed, k=0.5)
    assert torch.equal(differentiate(loss, last, t), differentiate(loss, z, t))
    turned = differentiate(loss, z.transpose(1, 3), t.transpose(1, 3))
    assert torch.equal(turned.transpose(1, 3), differentiate(loss, z, t))


def test_in_place_changes_of_logits_are_detected(path: str) -> None:
    z, t = examples()
    z.requires_grad_()
    hidden = z * 1
    loss = tunable_bce(hidden, t, k=0.5)
    with torch.no_grad():
        hidden.zero_()
    if path != "fused":
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        return
    loss.backward()  # the gradient was computed together with the value
    assert z.grad is not None
    assert torch.equal(z.grad, torch.autograd.grad(tunable_bce(z * 1, t, k=0.5), z)[0])


@pytest.mark.usefixtures("path")
def test_one_graph_serves_several_backward_passes() -> None:
    z, t = examples()
    loss = tunable_bce(z.requires_grad_(), t, k=0.5, reduction="none")
    (first,) = torch.autograd.grad(loss, z, torch.ones_like(loss), retain_graph=True)
    (second,) = torch.autograd.grad(loss, z, 3 * loss.detach(), retain_graph=True)
    assert_close(second, 3 * loss.detach() * first)
    both = torch.stack([torch.ones_like(loss), torch.zeros_like(loss)])
    (batch,) = torch.autograd.grad(loss, z, both, is_grads_batched=True)
    assert torch.equal(batch[0], first)
    assert not batch[1].any()
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(loss, z, torch.ones_like(loss))


# --- transforms -----------------------------------------------------------------------------------

K: dict[str, float | Tensor] = {"k=0.5": 0.5, "k per output": torch.rand(4, 3) + 0.1}


@pytest.mark.parametrize("route", DIRECT)
def test_transforms(route: str) -> None:
    z, t = examples()
    for k in K.values():
        assert_right(DIRECT[route](of_k, (t, k), z), k)


@on_compilers
def test_compiled(route: str, backend: str) -> None:
    z, t = examples()
    for k in list(K.values())[: 1 if backend == "inductor" else None]:
        assert_right(COMPILED[route](of_k, (t, k), z, backend), k)


def test_vmap_over_single_numbers() -> None:
    """0-dimensional logits, each with its own k."""
    z, t = (x.flatten() for x in examples())
    k = torch.linspace(0.2, 3, len(z))
    gradient = vmap(grad(lambda z, t, k: tunable_bce(z, t, k=k)))(z, t, k)
    assert_close(gradient.double(), true(z, t, k)[1], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("numbers", [(1, 2, 3, 4, 5, 6, 7, 8, 9, 10), (0.5, 2, 0.25, 1, 3.5)])
def test_a_changing_k_does_not_recompile(numbers: tuple[float, ...]) -> None:
    z, t = examples()
    criterion = TunableBCEWithLogitsLoss(reduction="sum", pos_weight=torch.ones(3))
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(criterion, fullgraph=True, backend=counter)
    for k in numbers:
        criterion.k = k
        gradient = differentiate(step, z, t)
        assert_close(gradient.double(), true(z, t, k)[1], rtol=1e-5, atol=1e-8)
    assert counter.frame_count == 1


def test_compiled_with_every_argument() -> None:
    z, t = examples()
    weight, pos_weight = torch.rand(3), torch.rand(4, 1) + 0.5
    loss = partial(tunable_bce, weight=weight, pos_weight=pos_weight, k=torch.rand(3) + 0.2)
    step = compiled(loss, "aot_eager")
    assert_close(differentiate(step, z, t), differentiate(loss, z, t))
    learned = t.clone().requires_grad_()
    ours, plain = (torch.autograd.grad(f(z, learned), learned)[0] for f in (step, loss))
    assert_close(ours, plain)


@pytest.mark.parametrize("k", [0.5, torch.tensor([0.25, 0.5, 2.0])])
@pytest.mark.parametrize("weighted", [False, True])
def test_export(k: float | Tensor, weighted: bool) -> None:
    z, t = examples()
    pos_weight = torch.tensor([2.0, 1.0, 0.5]) if weighted else None
    criterion = TunableBCEWithLogitsLoss(reduction="sum", pos_weight=pos_weight, k=k)
    program = torch.export.export(criterion, (z, t))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for module in (program.module(), torch.export.load(file).module()):
        assert_close(module(z, t), criterion(z, t))
        expected = differentiate(criterion, z, t)
        assert_close(differentiate(module, z, t), expected)


def test_a_graph_of_make_fx() -> None:
    z, t = examples()
    graph = make_fx(partial(summed, pos_weight=torch.ones(3), k=0.5))(z, t)
    assert_right(differentiate(graph, z, t), 0.5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("loss", [of_half, tunable_cross_entropy])
def test_jit_trace(loss: Callable[..., Tensor]) -> None:
    """With soft targets: its check compares graphs with and without gradients."""
    z, t = examples()
    traced = torch.jit.trace(loss, (z, t))
    assert_close(differentiate(traced, z, t), differentiate(loss, z, t))


def test_fake_tensors() -> None:
    with FakeTensorMode():
        z, t = torch.empty(4, 3, requires_grad=True), torch.empty(4, 3)
        loss = tunable_bce(z, t, reduction="none", k=torch.empty(3))
        assert loss.shape == (4, 3)
        loss.sum().backward()


SECOND: dict[str, Callable[[Callable[..., Tensor], Tensor], Any]] = {
    "jvp": lambda loss, z: jvp(loss, (z,), (z,)),
    "jacfwd": lambda loss, z: jacfwd(loss)(z),
    "hessian": lambda loss, z: hessian(loss)(z),
    "grad(grad)": lambda loss, z: grad(lambda x: grad(loss)(x).sum())(z),
}


@pytest.mark.parametrize("how", SECOND)
def test_second_derivatives_are_refused(how: str) -> None:
    z, t = examples()
    with pytest.raises(RuntimeError, match="pseudograd"):
        SECOND[how](lambda x: tunable_bce(x, t, k=0.5), z)


@pytest.mark.usefixtures("path")
def test_double_backward_is_refused() -> None:
    z, t = examples()
    z.requires_grad_()
    (first,) = torch.autograd.grad(tunable_bce(z, t, k=0.5), z, create_graph=True)
    with pytest.raises(RuntimeError, match="pseudograd: a second derivative"):
        first.sum().backward()


# --- the module -----------------------------------------------------------------------------------


def test_module() -> None:
    z, t = examples()
    criterion = TunableBCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0]), k=0.5)
    assert isinstance(criterion, nn.BCEWithLogitsLoss)
    assert repr(criterion) == "TunableBCEWithLogitsLoss(k=0.5, reduction='mean')"
    assert list(criterion.state_dict()) == ["pos_weight"]
    direct = partial(tunable_bce, pos_weight=criterion.pos_weight, k=0.5)
    for other in (criterion, copy.deepcopy(criterion), pickle.loads(pickle.dumps(criterion))):
        assert torch.equal(differentiate(other, z, t), differentiate(direct, z, t))
    criterion.k = 2
    assert torch.equal(
        differentiate(criterion, z, t),
        differentiate(partial(direct, k=2.0), z, t),
    )
    schedule = schedules.LinearK(criterion, 1.0, 2.0, total_steps=2)
    schedule.step()
    assert criterion.k == 1.5


def test_an_existing_loss_is_converted() -> None:
    z, t = examples()
    plain = nn.BCEWithLogitsLoss(torch.rand(3), reduction="sum", pos_weight=torch.rand(3)).eval()
    converted = TunableBCEWithLogitsLoss.from_bce_with_logits(plain, k=0.5)
    assert converted.k == 0.5
    assert not converted.training
    assert converted.pos_weight is plain.pos_weight
    assert_close(converted(z, t), plain(z, t))
    with pytest.raises(TypeError, match=r"must be a torch.nn.BCEWithLogitsLoss, not Tunable"):
        TunableBCEWithLogitsLoss.from_bce_with_logits(converted)


def test_persistent_k() -> None:
    criterion = TunableBCEWithLogitsLoss(k=0.5, persistent=True)
    other = TunableBCEWithLogitsLoss(persistent=True)
    other.load_state_dict(criterion.state_dict())
    assert other.k == 0.5


def test_pytorchs_deprecated_arguments() -> None:
    z, t = examples()
    with pytest.warns(UserWarning, match="size_average and reduce"):
        assert torch.equal(tunable_bce(z, t, None, False), summed(z, t))
    with pytest.warns(UserWarning, match="size_average and reduce"):
        assert TunableBCEWithLogitsLoss(None, None, False).reduction == "none"


def test_errors(subtests: pytest.Subtests) -> None:
    z, t = examples()
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"input": [1.0]}, TypeError, "input must be a tensor, not list"),
        ({"target": torch.ones(4, 3).long()}, TypeError, r"target must hold floating.*int64; use"),
        ({"input": torch.ones(4, 3).to(torch.float8_e5m2)}, TypeError, "input must be .*float8"),
        ({"target": torch.ones(4)}, ValueError, r"target must have the shape of input, \(4, 3\)"),
        ({"reduction": "max"}, ValueError, "reduction must be 'mean', 'sum' or 'none', not 'max'"),
        ({"weight": 0.5}, TypeError, r"weight must be a floating-point tensor; pass k by keyword"),
        ({"weight": torch.ones(4)}, ValueError, r"weight must have a shape that broadcasts"),
        ({"pos_weight": torch.ones(2, 4, 3)}, ValueError, r"pos_weight must have a shape that"),
        ({"pos_weight": torch.ones(3).requires_grad_()}, ValueError, r"use pos_weight.detach\(\)"),
        ({"k": torch.ones(4)}, ValueError, r"k must have a shape that broadcasts to that of input"),
        ({"k": torch.zeros(3)}, ValueError, "k must be finite and above 0"),
        ({"k": 0.0}, ValueError, "k must be a finite number above 0"),
        ({"k": torch.ones(3).requires_grad_()}, ValueError, "k must not require a gradient"),
    ]
    for change, error, message in cases:
        with subtests.test(message), pytest.raises(error, match=message):
            tunable_bce(**{"input": z, "target": t, **change})
