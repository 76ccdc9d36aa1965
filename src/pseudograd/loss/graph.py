"""The whole loss as one operator, for graphs of `torch.compile`.

It computes the gradient together with the value; in the backward pass the compiler has only to
multiply it by the upstream gradient, which it does in a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import Function

from pseudograd.loss import cpu
from pseudograd.loss.autograd import Underivable, number_or_tensor, refuse_forward_mode
from pseudograd.rules.paper import Sensitivity, working_dtype

# Up to this many logits on a GPU, to write a gradient and read it again takes no longer than the
# compiler's own cross-entropy; above, `triton.operators` recomputes it in the backward pass.
_MOST_ON_GPU = 1 << 27
# Below this many logits on a CPU, the compiler's code for PyTorch operations is faster.
_WORTH_A_KERNEL = 1 << 10


def takes(z: Tensor, target: Tensor, weight: Tensor | None, reduction: str, triton: bool) -> bool:
    """Return whether the operator is the fastest way to compute a loss."""
    size = z.numel()
    if triton:
        is_small = isinstance(size, int) and size <= _MOST_ON_GPU
        return is_small and z.dim() == 2 and weight is None and reduction != "none"
    few = isinstance(size, int) and size < _WORTH_A_KERNEL and not target.is_floating_point()
    return cpu.kernels() is not None and not few


def loss_in_graph(
    z: Tensor,
    target: Tensor,
    k: Sensitivity,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    triton: bool,
) -> Tensor:
    """Return the loss of logits (C), (N, C) or (N, C, d1, ...) in full precision."""
    symbol: Any = k
    if isinstance(symbol, torch.SymFloat):  # a k that may differ at each call of the graph
        k = torch.mul(z.new_ones((), dtype=torch.float64), k)
    settings = (*number_or_tensor(k), weight, ignore_index, reduction, label_smoothing)
    value: Tensor = _InGraph.apply(triton, z, target, *settings, torch.is_grad_enabled())[0]
    return value


# Not by `torch.library.custom_op`, whose Python takes longer than a small loss.
_library = torch.library.Library("pseudograd", "FRAGMENT")


def _define(name: str, run: Callable[..., tuple[Tensor, Tensor]]) -> None:
    _library.define(
        f"""{name}(
            Tensor z, Tensor target, float k, Tensor? ks, Tensor? weight, int ignore_index,
            str reduction, float smoothing, bool training
        ) -> (Tensor, Tensor)""",
        tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
    )
    _library.impl(name, run, "CompositeExplicitAutograd")
    for key in ("Autograd", "ADInplaceOrView"):  # `_InGraph` differentiates
        _library.impl(name, torch.library.fallthrough_kernel, key)
    fake = partial(_fake, is_dense=name == "loss_on_gpu")
    torch.library.register_fake(f"pseudograd::{name}", fake, lib=_library)


def _on_cpu(
    z: Tensor, target: Tensor, k: float, ks: Tensor | None, weight: Tensor | None,
    ignore_index: int, reduction: str, smoothing: float, training: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    call = (target, k if ks is None else ks, weight, ignore_index, reduction, smoothing)
    return cpu.loss_and_gradient(z, call, training)


def _on_gpu(
    z: Tensor, target: Tensor, k: float, ks: Tensor | None, weight: Tensor | None, *settings: Any
) -> tuple[Tensor, Tensor]:
    from pseudograd.loss.triton.node import loss_and_gradient

    return loss_and_gradient(z, target, k if ks is None else ks, *settings)


def _fake(z: Tensor, target: Tensor, *settings: Any, is_dense: bool) -> tuple[Tensor, Tensor]:
    *_, reduction, _, training = settings
    z = z.to(working_dtype(z))
    examples = z.shape[:1] + z.shape[2:] if z.dim() > 1 else ()
    value = z.new_empty(examples if reduction == "none" else ())
    if not training:
        return value, z.new_empty(0)
    return value, z.new_empty(z.shape) if is_dense else torch.empty_like(z)


_define("loss_on_cpu", _on_cpu)
_define("loss_on_gpu", _on_gpu)


class _InGraph(Function):
    @staticmethod
    def forward(on_gpu: bool, *inputs: Any) -> tuple[Tensor, Tensor]:
        operators = torch.ops.pseudograd
        value, gradient = (operators.loss_on_gpu if on_gpu else operators.loss_on_cpu)(*inputs)
        return value, gradient

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        z, (_, gradient) = inputs[1], output
        ctx.mark_non_differentiable(gradient)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(z, gradient)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        (z, gradient), grad = ctx.saved_tensors, grads[0]
        f = None if grad is None else _Scaled.apply(z, gradient, grad)
        return None, f, *[None] * 8

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        refuse_forward_mode()


class _Scaled(Underivable):
    @staticmethod
    def forward(z: Tensor, gradient: Tensor, grad: Tensor) -> Tensor:
        grad = grad.unsqueeze(1) if grad.dim() else grad
        return torch.where((gradient == 0) | (grad == 0), 0, gradient * grad).to(z.dtype)
