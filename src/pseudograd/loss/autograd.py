"""Cross-entropy of rows of logits, with a rule instead of the derivative as its backward pass.

A `torch.autograd.Function` makes the substitution. Three facts shape this file:

- `torch.compile` of a `vmap` traces through such a function and differentiates its forward pass,
  which silently gives plain cross-entropy. `allow_in_graph` prevents that; `prepare_tracing`
  registers our functions there.
- A pseudo-gradient is not the gradient of any function (Lemma 1), so a second derivative has no
  meaning. The backward pass is a function of its own whose derivative raises.
- `torch.export` and `make_fx` keep the forward pass of such a function and drop its backward pass,
  which again gives plain cross-entropy. They keep custom ops with their derivatives, so exported
  graphs use those.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NoReturn, Protocol, cast

import torch
from torch import Tensor
from torch.autograd import Function

from pseudograd.loss.modes import is_kept_as_graph, is_traced, keep_whole
from pseudograd.rules import paper
from pseudograd.rules.paper import Sensitivity

RowFunction = Callable[[Tensor, Tensor, Sensitivity], Tensor]


class RowLoss(Protocol):
    """Both passes over rows ``z`` (R, C) of any dtype; k is a number or a column (R, 1).

    Attributes:
        exported_as: The name by which an exported graph finds it; None if it cannot be exported.

    """

    exported_as: str | None

    def forward(self, z: Tensor, target: Tensor, k: Sensitivity) -> tuple[Tensor, ...]:
        """Return the value of each row, then the tensors to keep for the backward pass."""

    def backward(
        self, z: Tensor, target: Tensor, k: Sensitivity, grad: Tensor, *kept: Tensor
    ) -> Tensor:
        """Return each row's pseudo-gradient times ``grad``, a column, in the dtype of ``z``.

        It is 0 where ``grad`` is 0, even if the row holds NaN.
        """


def rows_of(loss: RowLoss) -> RowFunction:
    """Return the function (z, target, k) → value of each row with the backward pass of ``loss``."""

    def rows(z: Tensor, target: Tensor, k: Sensitivity) -> Tensor:
        return row_values(loss, z, target, k)

    keep_whole(rows)
    return rows


def row_values(loss: RowLoss, z: Tensor, target: Tensor, k: Sensitivity) -> Tensor:
    """Return the value of each row, with the backward pass of ``loss``.

    Register callers with `keep_whole`, or `torch.compile` traces into them.
    """
    if is_kept_as_graph():
        return _exported(loss, z, target, k)
    value: Tensor = _Forward.apply(z, target, k, loss)[0]
    return value


def number_or_tensor(k: Sensitivity) -> tuple[float, Tensor | None]:
    """Return k as custom ops take it: a number and None, or a placeholder and a tensor."""
    return (1.0, k.reshape(-1)) if isinstance(k, Tensor) else (k, None)


def without_symbol(k: Sensitivity, rows: Tensor) -> Sensitivity:
    """Return a symbolic k (one that may differ between calls of a graph) as a column.

    A custom op that takes a number would recompile for each value. Multiplication is one of the few
    operations that keep a number symbolic.
    """
    symbol: Any = k
    if isinstance(symbol, torch.SymFloat):
        ones = rows.new_ones((rows.shape[0], 1), dtype=paper.working_dtype(rows))
        return torch.mul(ones, cast(float, symbol))
    return k


class _Forward(Function):
    @staticmethod
    def forward(z: Tensor, target: Tensor, k: Sensitivity, loss: RowLoss) -> tuple[Tensor, ...]:
        return loss.forward(z, target, k)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        z, target, k, ctx.loss = inputs
        _, *kept = output
        ctx.mark_non_differentiable(*kept)
        ctx.set_materialize_grads(False)
        ctx.k = None if isinstance(k, Tensor) else k
        ctx.save_for_backward(z, target, k if ctx.k is None else None, *kept)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> Any:
        if grad is None:
            return None, None, None, None
        z, target, k, *kept = ctx.saved_tensors
        k = k if ctx.k is None else ctx.k
        result = _Backward.apply(ctx.loss, z, target, k, grad.unsqueeze(-1), *kept)
        return result, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        refuse_forward_mode()

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        outputs = _Forward.apply(*_fold(info, in_dims, inputs))
        return tuple(_unfold(info, output) for output in outputs), (0,) * len(outputs)


class Underivable(Function):
    """A function whose derivatives raise, in reverse and forward mode."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save tensors only while tracing, for the operator that will raise."""
        floats = [isinstance(value, Tensor) and value.is_floating_point() for value in inputs]
        ctx.are_floats = floats
        if is_traced():
            ctx.save_for_backward(*itertools.compress(inputs, floats))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Raise; a compiled graph raises only when this part runs, which it often never does."""
        if not is_traced() or torch._C._are_functorch_transforms_active():
            refuse_second_derivative()
        tensors = iter(ctx.saved_tensors)
        return tuple(
            _refused(next(tensors), grads[0]) if is_float else None for is_float in ctx.are_floats
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        """Raise."""
        refuse_forward_mode()


@torch.library.custom_op(
    "pseudograd::refused", mutates_args=(), schema="(Tensor like, Tensor grad) -> Tensor"
)
def _refused(like: Tensor, grad: Tensor) -> Tensor:
    """Raise when a compiled graph asks for a derivative that does not exist.

    It takes the upstream gradient so that it becomes part of the backward graph.
    """
    refuse_second_derivative()


@_refused.register_fake
def _(like: Tensor, grad: Tensor) -> Tensor:
    return torch.empty_like(like)


class _Backward(Underivable):
    @staticmethod
    def forward(
        loss: RowLoss, z: Tensor, target: Tensor, k: Sensitivity, grad: Tensor, *kept: Tensor
    ) -> Tensor:
        return loss.backward(z, target, k, grad, *kept)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        return _unfold(info, _Backward.apply(*_fold(info, in_dims, inputs))), 0


# --- zero with a gradient -------------------------------------------------------------------------


def zero_with_gradient(x: Tensor, gradient: Tensor, source: Tensor) -> Tensor:
    """Return a zero for each row of ``x`` (R, n) whose derivative at ``x`` is ``gradient`` (R, n).

    Adding it to a value, even an infinite one, changes its gradient but not the value. ``gradient``
    was computed from ``source``; differentiating once more raises.
    """
    if is_kept_as_graph():
        in_onnx = torch.onnx.is_in_onnx_export()
        zero: Tensor = (_zeros if in_onnx else _exported_zero)(x, gradient.detach(), source)
    else:
        zero = _Zero.apply(x, gradient.detach(), source)
    return zero


keep_whole(zero_with_gradient)


def _zeros(x: Tensor, gradient: Tensor, source: Tensor) -> Tensor:
    return torch.zeros_like(x[..., 0])


def _keep_gradient(ctx: Any, inputs: Any, output: Any) -> None:
    x, gradient, source = inputs
    ctx.dtype = x.dtype
    ctx.save_for_backward(gradient, source)


def _times_gradient(ctx: Any, grad: Tensor) -> Any:
    gradient, source = ctx.saved_tensors
    grad = grad.unsqueeze(-1)
    return final(zero_if_ignored(grad * gradient, grad, ctx.dtype), source), None, None


class _Zero(Function):
    generate_vmap_rule = True
    forward = staticmethod(_zeros)
    setup_context = staticmethod(_keep_gradient)
    backward = staticmethod(_times_gradient)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        refuse_forward_mode()


_exported_zero = torch.library.custom_op(
    "pseudograd::zero_with_gradient",
    _zeros,
    mutates_args=(),
    schema="(Tensor x, Tensor gradient, Tensor source) -> Tensor",
)
_exported_zero.register_fake(_zeros)
_exported_zero.register_autograd(_times_gradient, setup_context=_keep_gradient)


# --- export ---------------------------------------------------------------------------------------


def _exported(loss: RowLoss, z: Tensor, target: Tensor, k: Sensitivity) -> Tensor:
    if torch.onnx.is_in_onnx_export():  # ONNX has no derivatives and lacks our custom ops
        return loss.forward(z, target, k)[0]
    if loss.exported_as is None:
        underivable: Tensor = _without_derivative(loss.forward(z, target, k)[0])
        return underivable
    value: Tensor = _exported_values(z, target, *number_or_tensor(k), loss.exported_as)
    return value


def _of_name(name: str) -> RowLoss:
    if name.startswith("kernels"):
        from pseudograd.loss.triton.operators import OnGpu

        return OnGpu(float(name.rpartition(" ")[2]))
    if name == "binary":
        from pseudograd.loss.binary import Binary

        return Binary()
    from pseudograd.loss.rows import ClassIndex, ClassProbabilities

    return ClassIndex() if name == "class indices" else ClassProbabilities()


def _sensitivity(k: float, ks: Tensor | None) -> Sensitivity:
    return k if ks is None else ks.unsqueeze(-1)


def _values(z: Tensor, target: Tensor, k: float, ks: Tensor | None, loss: str) -> Tensor:
    return _of_name(loss).forward(z, target, _sensitivity(k, ks))[0]


def _gradients(
    z: Tensor, target: Tensor, k: float, ks: Tensor | None, grad: Tensor, loss: str
) -> Tensor:
    passes, sensitivity = _of_name(loss), _sensitivity(k, ks)
    _, *kept = passes.forward(z, target, sensitivity)
    return passes.backward(z, target, sensitivity, grad.unsqueeze(-1), *kept).contiguous()


_exported_values = torch.library.custom_op(
    "pseudograd::exported_values",
    _values,
    mutates_args=(),
    schema="(Tensor z, Tensor target, float k, Tensor? ks, str loss) -> Tensor",
)
_exported_values.register_fake(_values)
_exported_gradients = torch.library.custom_op(
    "pseudograd::exported_gradients",
    _gradients,
    mutates_args=(),
    schema="(Tensor z, Tensor target, float k, Tensor? ks, Tensor grad, str loss) -> Tensor",
)
_exported_gradients.register_fake(_gradients)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    z, target, ctx.k, ks, ctx.loss = inputs
    ctx.save_for_backward(z, target, ks)


def _differentiate(ctx: Any, grad: Tensor) -> Any:
    z, target, ks = ctx.saved_tensors
    return _exported_gradients(z, target, ctx.k, ks, grad, ctx.loss), None, None, None, None


def _refuse_derivative(ctx: Any, *grads: Any) -> NoReturn:
    refuse_second_derivative()


_exported_values.register_autograd(_differentiate, setup_context=_keep)
_exported_gradients.register_autograd(_refuse_derivative)


@torch.library.custom_op(
    "pseudograd::without_derivative", mutates_args=(), schema="(Tensor value) -> Tensor"
)
def _without_derivative(value: Tensor) -> Tensor:
    """Return a value whose derivative cannot be exported."""
    return value.clone()


@_without_derivative.register_fake
def _(value: Tensor) -> Tensor:
    return torch.empty_like(value)


def constant(value: Tensor) -> Tensor:
    """Detach a value, by a custom op where an exported graph may drop `detach`."""
    if is_kept_as_graph() and not torch.onnx.is_in_onnx_export():
        result: Tensor = _exported_constant(value)
        return result
    return value.detach()


@torch.library.custom_op("pseudograd::constant", mutates_args=(), schema="(Tensor value) -> Tensor")
def _exported_constant(value: Tensor) -> Tensor:
    return value.clone()


@_exported_constant.register_fake
def _(value: Tensor) -> Tensor:
    return torch.empty_like(value)


_exported_constant.register_autograd(lambda ctx, grad: None)


def _refuse_exported(ctx: Any, grad: Tensor) -> NoReturn:
    raise RuntimeError(
        "pseudograd: this exported loss has no backward pass, because it is Python code that a "
        "graph cannot hold; export the model without the loss, and compute the loss in Python"
    )


_without_derivative.register_autograd(_refuse_exported)


# --- backward passes ------------------------------------------------------------------------------


def is_batch(tensor: Tensor) -> bool:
    """Return whether a tensor is a vmapped batch, as with ``is_grads_batched``."""
    return not torch._C._has_storage(tensor)


def graph_is_kept() -> bool:
    """Return whether the current backward pass may be repeated or differentiated."""
    kept: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return kept or torch.is_grad_enabled()


def are_hooked() -> bool:
    """Return whether saved-tensor hooks are active."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def zero_if_ignored(f: Tensor, grad: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``f``, with 0 where ``grad`` is 0: ignored rows may hold NaN, and NaN · 0 is NaN."""
    return torch.where(grad == 0, 0, f).to(dtype)


def times_each(f: Tensor, grad: Tensor) -> Tensor:
    """Return rows ``f`` times the upstream gradient, a number or one per row; 0 stays 0."""
    grad = grad.unsqueeze(-1) if grad.dim() else grad
    return torch.where(f == 0, 0, f * grad).to(f.dtype)


def final(result: Tensor, *sources: Tensor | None) -> Tensor:
    """Return ``result``, whose derivative with respect to ``sources`` raises."""
    # Grad mode is on in a backward pass only if it may be differentiated.
    return _Final.apply(result, *sources) if torch.is_grad_enabled() else result


class _Final(Underivable):
    generate_vmap_rule = True

    @staticmethod
    def forward(result: Tensor, *sources: Tensor | None) -> Tensor:
        return result.clone()


def _refusal(what: str) -> str:
    return (
        f"pseudograd: {what} of a tunable loss does not exist: its backward pass is a "
        "pseudo-gradient, which is not the derivative of the value; use PyTorch's cross-entropy "
        "where you need one"
    )


NO_SECOND_DERIVATIVE = _refusal("a second derivative")
NO_FORWARD_MODE = _refusal("a forward-mode derivative (jvp, jacfwd, hessian)")


def refuse_second_derivative() -> NoReturn:
    """Raise, because a pseudo-gradient has no derivative."""
    raise RuntimeError(NO_SECOND_DERIVATIVE)


def refuse_forward_mode() -> NoReturn:
    """Raise, because a pseudo-gradient exists only in reverse mode."""
    raise RuntimeError(NO_FORWARD_MODE)


def _fold(info: Any, in_dims: tuple[int | None, ...], inputs: tuple[Any, ...]) -> list[Any]:
    """Fold the batch dimension into the rows: a batch of problems is one with more rows."""

    def fold(value: Any, dim: int | None) -> Any:
        if not isinstance(value, Tensor) or (value.dim() == 0 and dim is None):
            return value
        size = info.batch_size
        return (value.expand(size, *value.shape) if dim is None else value.movedim(dim, 0)).flatten(
            0, 1
        )

    return [fold(value, dim) for value, dim in zip(inputs, in_dims, strict=True)]


def _unfold(info: Any, output: Tensor) -> Tensor:
    return output.reshape(info.batch_size, len(output) // info.batch_size, *output.shape[1:])
