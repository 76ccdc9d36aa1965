"""Classes split over two processes: the loss and the gradient are those of one process."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.spawn import spawn

import reference
from pseudograd import tunable_cross_entropy
from pseudograd.loss import tunable_linear_cross_entropy

PARTS = (5, 2)  # classes per rank
CLASSES = sum(PARTS)
Z_LOSS = 0.1
# The processes are on the CPU, where kernels run only if Triton interprets them.
INTERPRETED = importlib.util.find_spec("triton") and not torch.cuda.is_available()
IMPLEMENTATIONS = ("torch", "triton") if INTERPRETED else ("torch",)
needs_gloo = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="this PyTorch has no gloo",
)


def examples() -> tuple[Tensor, Tensor]:
    """Labels on both ranks, an ignored row of NaN, small and large gaps."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, CLASSES, generator=generator) * torch.logspace(-2, 2, 8).unsqueeze(1)
    target = torch.tensor([0, 6, 4, 5, -100, 2, 6, 1])
    logits[4] = torch.nan
    logits[2, 5:] = -torch.inf  # all classes of a rank are masked
    return logits, target


def last_layer(classes: slice = slice(None)) -> tuple[Tensor, Tensor, Tensor]:
    """Return its input, and some rows of its weight and bias."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((8, 3), (CLASSES, 3), (CLASSES,))
    hidden, weight, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    return hidden, weight[classes].clone(), bias[classes].clone()


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    weight = torch.linspace(0.5, 2, CLASSES)
    per_example = torch.linspace(0.25, 4, 8)
    for implementation in IMPLEMENTATIONS:
        for reduction in ("mean", "sum", "none"):
            name = f"{implementation} {reduction}"
            yield name, {"k": 0.5, "reduction": reduction, "implementation": implementation}
        yield f"{implementation} weighted", {
            "k": per_example, "weight": weight, "implementation": implementation
        }  # fmt: skip
        yield f"{implementation} k=1", {"k": 1.0, "implementation": implementation}
    for reduction in ("mean", "none"):
        yield f"smoothed {reduction}", {
            "k": per_example, "weight": weight, "label_smoothing": 0.1, "reduction": reduction
        }  # fmt: skip
        yield f"sample weights {reduction}", {
            "k": 0.5, "weight": weight, "sample_weight": per_example, "reduction": reduction
        }  # fmt: skip
    yield "smoothed k=1", {"k": 1.0, "label_smoothing": 0.3}


CASES = dict(cases())
# Cases that are also tested under `torch.compile`.
COMPILED = [name for name in CASES if name.endswith(" weighted")] + ["smoothed mean"]


def on_this_rank(arguments: dict[str, Any], mine: slice) -> dict[str, Any]:
    here = {**arguments, "process_group": torch.distributed.group.WORLD}
    return {**here, "weight": here["weight"][mine]} if "weight" in here else here


def for_a_layer(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"class_weight" if key == "weight" else key: a for key, a in arguments.items()}


def compiled(
    arguments: dict[str, Any], logits: Tensor, target: Tensor, mine: slice
) -> tuple[Tensor, ...]:
    """Return the gradient of the loss in one graph, which includes reductions over the ranks."""
    here = on_this_rank(arguments, mine)

    def loss(part: Tensor) -> Tensor:
        return 2 * tunable_cross_entropy(part, target, **here)

    torch.compiler.reset()
    part = logits[:, mine].clone().requires_grad_()
    value = torch.compile(loss, fullgraph=True, backend="aot_eager")(part)
    return value.detach() / 2, *torch.autograd.grad(value, part)


def wrong_labels(arguments: dict[str, Any], mine: slice) -> tuple[Tensor, ...]:
    """Return which values and rows of the gradients are NaN if two of the labels are invalid."""
    here = {**on_this_rank(arguments, mine), "reduction": "none", "k": 0.5}
    here.pop("sample_weight", None)  # it is for more examples
    target = torch.tensor([0, CLASSES, 6, -1])
    part = torch.ones(4, CLASSES)[:, mine].clone().requires_grad_()
    value = tunable_cross_entropy(part, target, **here)
    (gradient,) = torch.autograd.grad(value.sum(), part)
    hidden, weight, _ = last_layer(mine)
    hidden = hidden[:4].clone().requires_grad_()
    of_layer = tunable_linear_cross_entropy(hidden, weight, target, **for_a_layer(here))
    (at_hidden,) = torch.autograd.grad(of_layer.sum(), hidden)
    rows = (value, gradient.sum(1), of_layer, at_hidden.sum(1))
    return tuple(row.isnan() for row in rows)


class Criterion(torch.nn.Module):
    """A criterion to export."""

    def forward(self, part: Tensor, target: Tensor) -> Tensor:
        return tunable_cross_entropy(
            part, target, k=0.5, process_group=torch.distributed.group.WORLD
        )


class WithZLoss(torch.nn.Module):
    def forward(self, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return tunable_linear_cross_entropy(
            hidden, weight, target, z_loss=Z_LOSS, process_group=torch.distributed.group.WORLD
        )


def exported(logits: Tensor, target: Tensor, mine: slice) -> tuple[Tensor, ...]:
    """Return the value of an exported loss, and check that its derivative is refused."""
    part = logits[:, mine].clone().requires_grad_()
    value = torch.export.export(Criterion(), (part, target)).module()(part, target)
    with pytest.raises(RuntimeError, match="is Python code that a graph"):
        value.backward()
    with pytest.raises(NotImplementedError, match="z_loss with a process_group cannot be exported"):
        torch.export.export(WithZLoss(), (*last_layer(mine)[:2], target))
    return (value.detach(),)


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2
    )
    if INTERPRETED and rank == 1:  # so that its rows use the other kernel
        from pseudograd.loss.triton import launch

        launch.LONGEST_TILE = 0
    logits, target = examples()
    begin = sum(PARTS[:rank])
    mine = slice(begin, begin + PARTS[rank])
    results: dict[str, tuple[Tensor, ...]] = {}
    for name, arguments in CASES.items():
        here = on_this_rank(arguments, mine)
        part = logits[:, mine].clone().requires_grad_()
        value = tunable_cross_entropy(part, target, **here)
        (gradient,) = torch.autograd.grad((2 * value).sum(), part)
        results[name] = value.detach(), gradient
        hidden, *layer = (tensor.requires_grad_() for tensor in last_layer(mine))
        value = tunable_linear_cross_entropy(
            hidden, layer[0], target, bias=layer[1], chunk_rows=3, **for_a_layer(here)
        )
        gradients = torch.autograd.grad((2 * value).sum(), (hidden, *layer))
        results[f"{name}, linear"] = value.detach(), *gradients
        value = tunable_linear_cross_entropy(
            hidden, layer[0], target, bias=layer[1], chunk_rows=3, z_loss=Z_LOSS,
            **for_a_layer(here),
        )  # fmt: skip
        gradients = torch.autograd.grad((2 * value).sum(), (hidden, *layer))
        results[f"{name}, z-loss"] = value.detach(), *gradients
    for name in COMPILED:
        results[f"{name}, compiled"] = compiled(CASES[name], logits, target, mine)
    for name, arguments in CASES.items():
        results[f"{name}, wrong"] = wrong_labels(arguments, mine)
    results["exported"] = exported(logits, target, mine)
    torch.save(results, f"{folder}/results{rank}.pt")
    torch.distributed.destroy_process_group()
    # At a normal exit, the interpreter and PyTorch's threads can deadlock.
    os._exit(0)


@pytest.fixture(scope="module")
def results() -> Iterator[list[dict[str, tuple[Tensor, ...]]]]:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        spawn(worker, (folder,), nprocs=2)
        yield [torch.load(f"{folder}/results{rank}.pt") for rank in range(2)]


def expected(name: str) -> dict[str, Any]:
    return {key: value for key, value in CASES[name].items() if key != "implementation"}


@needs_gloo
def test_it_is_the_loss_of_one_process(
    results: list[dict[str, tuple[Tensor, ...]]], subtests: pytest.Subtests
) -> None:
    for name in CASES:
        with subtests.test(name=name):
            logits, target = examples()
            value, gradient = reference.loss(logits, target, **expected(name))
            parts = [rank[name] for rank in results]
            for part_value, _ in parts:
                torch.testing.assert_close(part_value.double(), value, rtol=1e-5, atol=1e-7)
            joined = torch.cat([part for _, part in parts], 1).double()
            torch.testing.assert_close(joined, 2 * gradient, rtol=1e-5, atol=1e-20)


@needs_gloo
def test_the_linear_form_too(
    results: list[dict[str, tuple[Tensor, ...]]], subtests: pytest.Subtests
) -> None:
    """Each rank has the gradients of its classes, and the whole gradient of the shared input."""
    for name in CASES:
        with subtests.test(name=name):
            _, target = examples()
            hidden, weight, bias = (tensor.double() for tensor in last_layer())
            logits = hidden @ weight.T + bias
            value, at_logits = reference.loss(logits, target, **expected(name))
            parts = [rank[f"{name}, linear"] for rank in results]
            for part_value, of_hidden, _, _ in parts:
                torch.testing.assert_close(part_value.double(), value, rtol=1e-5, atol=1e-7)
                torch.testing.assert_close(
                    of_hidden.double(), 2 * at_logits @ weight, rtol=1e-4, atol=1e-6
                )
            of_weight, of_bias = (torch.cat([part[i] for part in parts]).double() for i in (2, 3))
            torch.testing.assert_close(of_weight, 2 * at_logits.T @ hidden, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(of_bias, 2 * at_logits.sum(0), rtol=1e-4, atol=1e-6)


@needs_gloo
def test_z_loss(results: list[dict[str, tuple[Tensor, ...]]], subtests: pytest.Subtests) -> None:
    """It adds the same to the linear form as in one process."""
    for name in CASES:
        with subtests.test(name=name):
            _, target = examples()
            whole = [tensor.requires_grad_() for tensor in last_layer()]
            given = (*whole[:2], target, whole[2])
            plain, more = (
                tunable_linear_cross_entropy(*given, z_loss=factor, **for_a_layer(expected(name)))
                for factor in (0.0, Z_LOSS)
            )
            gradients = torch.autograd.grad((2 * (more - plain)).sum(), whole)
            parts = [
                [
                    a - b
                    for a, b in zip(rank[f"{name}, z-loss"], rank[f"{name}, linear"], strict=True)
                ]
                for rank in results
            ]
            for value, of_hidden, _, _ in parts:
                torch.testing.assert_close(value, (more - plain).detach(), rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(of_hidden, gradients[0], rtol=1e-4, atol=1e-5)
            for i in (1, 2):
                joined = torch.cat([part[1 + i] for part in parts])
                torch.testing.assert_close(joined, gradients[i], rtol=1e-4, atol=1e-5)


@needs_gloo
def test_compiled_it_is_the_same(
    results: list[dict[str, tuple[Tensor, ...]]], subtests: pytest.Subtests
) -> None:
    for name in COMPILED:
        with subtests.test(name=name):
            for rank in results:
                for eager, graph in zip(rank[name], rank[f"{name}, compiled"], strict=True):
                    torch.testing.assert_close(graph, eager, rtol=1e-6, atol=1e-12)


@needs_gloo
def test_wrong_labels_give_nan_on_all_ranks(
    results: list[dict[str, tuple[Tensor, ...]]], subtests: pytest.Subtests
) -> None:
    for name in CASES:
        with subtests.test(name=name):
            for rank in results:
                for found in rank[f"{name}, wrong"]:
                    assert found.tolist() == [False, True, False, True]


@needs_gloo
def test_an_exported_graph_has_the_value(results: list[dict[str, tuple[Tensor, ...]]]) -> None:
    """Its derivative was refused."""
    value, _ = reference.loss(*examples(), 0.5)
    for rank in results:
        torch.testing.assert_close(rank["exported"][0].double(), value, rtol=1e-5, atol=0)


@pytest.mark.parametrize("group", ["model", object()], ids=["a name", "an object"])
def test_an_invalid_process_group_is_named(group: Any) -> None:
    """A DeviceMesh is not one either."""
    logits, target = examples()
    with pytest.raises(TypeError, match=r"process_group must be .* mesh\.get_group\(\)"):
        tunable_cross_entropy(logits, target, process_group=group)
    hidden, weight, _ = last_layer()
    with pytest.raises(TypeError, match=r"process_group must be .* mesh\.get_group\(\)"):
        tunable_linear_cross_entropy(hidden, weight, target, process_group=group)


def test_unsupported_combinations_are_refused() -> None:
    logits, _ = examples()
    group: Any = object()
    with pytest.raises(ValueError, match="target must hold class indices, not probabilities"):
        tunable_cross_entropy(logits, logits.softmax(-1), process_group=group)
