"""Rows of logits in, their cross-entropy out; backward, a rule in place of the derivative.

PyTorch learns of the substitution through `torch.autograd.Function`. Three facts shape this file:

- `torch.compile` of a `vmap` looks through such a function and differentiates its forward pass,
  which would silently be plain cross-entropy. `allow_in_graph` keeps the function whole; see
  `prepare_tracing` for when.
- A pseudo-gradient is no function's gradient (Lemma 1), so a second derivative has no meaning. The
  backward pass is therefore a function of its own, whose derivative raises.
- `torch.export` keeps what such a function computes, and forgets its backward pass: differentiated,
  the graph would silently be plain cross-entropy. Operators it keeps whole, with their derivative,
  so there the two passes are operators.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any, NoReturn, Protocol, cast
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd import Function

from pseudograd.rules import paper
from pseudograd.rules.framework import Rule, checked
from pseudograd.rules.paper import Sensitivity

RowFunction = Callable[[Tensor, Tensor, Sensitivity], Tensor]

_PROXY = torch._C._TorchDispatchModeKey.PROXY
# Functions that `torch.compile` must not look into.
whole_functions: WeakSet[Callable[..., Any]] = WeakSet()


class RowLoss(Protocol):
    """The two passes over rows ``z`` (R, C) of any dtype; k is a number, or a column (R, 1).

    Attributes:
        exported_as: Its name among operators; None for one that cannot leave Python.

    """

    exported_as: str | None

    def forward(self, z: Tensor, target: Tensor, k: Sensitivity) -> tuple[Tensor, ...]:
        """Give the value of each row, then what the backward pass should keep."""

    def backward(
        self, z: Tensor, target: Tensor, k: Sensitivity, grad: Tensor, *kept: Tensor
    ) -> Tensor:
        """Give the pseudo-gradient of each row times its ``grad``, a column, in the dtype of ``z``.

        It is 0 where ``grad`` is, whatever the row holds.
        """


def _of_ignored_rows_zero(f: Tensor, grad: Tensor, z: Tensor) -> Tensor:
    """Ignored rows may hold anything; NaN times 0 would be NaN."""
    return torch.where(grad == 0, 0, f).to(z.dtype)


class ClassIndex:
    """Eq. 5 for labels. Keeps two numbers a row; cross-entropy keeps all log-probabilities."""

    exported_as: str | None = "class indices"

    def forward(self, z: Tensor, target: Tensor, k: Sensitivity) -> tuple[Tensor, ...]:
        """Give -log p_y, and keep the top and the margin."""
        top, margin = paper.top_and_margin(paper.in_working_precision(z), target)
        return paper.cross_entropy(margin).squeeze(-1), top, margin

    def backward(
        self, z: Tensor, target: Tensor, k: Sensitivity, grad: Tensor, *kept: Tensor
    ) -> Tensor:
        """Give Eq. 5."""
        top, margin = kept
        logits = paper.in_working_precision(z)
        f = paper.push(logits, target, k, top, paper.strength(margin, k) * grad)
        return _of_ignored_rows_zero(f, grad, z)


class ClassProbabilities:
    """The rule for soft targets."""

    def __init__(self, classes: paper.Classes = paper.ALL_CLASSES) -> None:
        self.classes = classes
        whole = classes is paper.ALL_CLASSES
        self.exported_as: str | None = "class probabilities" if whole else None

    def forward(self, z: Tensor, target: Tensor, k: Sensitivity) -> tuple[Tensor, ...]:
        """Give -Σ q log p, where 0 · log 0 is 0."""
        log_p = self.classes.log_softmax(paper.wide(paper.in_working_precision(z)))
        terms = torch.where(target == 0, 0, target * log_p)
        return (-self.classes.total(terms).squeeze(-1),)

    def backward(
        self, z: Tensor, target: Tensor, k: Sensitivity, grad: Tensor, *kept: Tensor
    ) -> Tensor:
        """Give the soft rule."""
        f = paper.soft_push(paper.in_working_precision(z), target, k, self.classes) * grad
        return _of_ignored_rows_zero(f, grad, z)


class ByRule:
    """Any rule for labels (Eq. 3); its sensitivity, if it has one, is its own."""

    exported_as: str | None = None

    def __init__(self, rule: Rule) -> None:
        self.rule = rule

    def forward(self, z: Tensor, target: Tensor, k: Sensitivity) -> tuple[Tensor, ...]:
        """Give -log p_y."""
        _, margin = paper.top_and_margin(paper.in_working_precision(z), target)
        return (paper.cross_entropy(margin).squeeze(-1),)

    def backward(
        self, z: Tensor, target: Tensor, k: Sensitivity, grad: Tensor, *kept: Tensor
    ) -> Tensor:
        """Give the rule."""
        f = checked(self.rule, paper.in_working_precision(z), target)
        return _of_ignored_rows_zero(f * grad, grad, z)


def rows_of(loss: RowLoss) -> RowFunction:
    """Make the function (z, target, k) → value of each row, with the backward pass of ``loss``."""

    def rows(z: Tensor, target: Tensor, k: Sensitivity) -> Tensor:
        return row_values(loss, z, target, k)

    keep_whole(rows)
    return rows


def row_values(loss: RowLoss, z: Tensor, target: Tensor, k: Sensitivity) -> Tensor:
    """Give the value of each row, with the backward pass of ``loss``.

    Who calls it has to be given to `keep_whole`, or else `torch.compile` looks into it.
    """
    if is_exporting():
        return _exported(loss, z, target, k)
    value: Tensor = _Forward.apply(z, target, k, loss)[0]
    return value


def number_or_tensor(k: Sensitivity) -> tuple[float, Tensor | None]:
    """A sensitivity as operators take it: a number, or a tensor beside one that does not count."""
    return (1.0, k.reshape(-1)) if isinstance(k, Tensor) else (k, None)


def without_symbol(k: Sensitivity, rows: Tensor) -> Sensitivity:
    """A number that changes from call to call of a graph, as a column; others as they are.

    Operators take numbers, but would need a graph for each. It comes from a product, since there
    are few operations of which the compiler knows how to keep a symbol.
    """
    symbol: Any = k
    if isinstance(symbol, torch.SymFloat):
        ones = rows.new_ones((rows.shape[0], 1), dtype=paper.working_dtype(rows))
        return torch.mul(ones, cast(float, symbol))
    return k


def keep_whole(function: Callable[..., Any]) -> None:
    """Have `torch.compile` not look into a function, now or when it is first at work."""
    whole_functions.add(function)
    if "pseudograd.loss.tracing" in sys.modules:
        torch.compiler.allow_in_graph(function)


def prepare_tracing() -> None:
    """Have `torch.compile` keep such functions whole; where it is not at work, do nothing.

    To register them beforehand would take the second that its own import takes. But it runs import
    statements as it traces them, so the module of this one is run when it first gets here.
    """
    if torch.compiler.is_compiling():
        import pseudograd.loss.tracing  # noqa: F401


def is_traced() -> bool:
    """Whether a graph is being made of what runs now, by `torch.compile`, export or `make_fx`."""
    if torch.compiler.is_compiling():  # which could not look into what follows
        return True
    return torch._C._get_dispatch_mode(_PROXY) is not None


def is_jit_traced() -> bool:
    """Whether `torch.jit.trace` is at work."""
    if torch.compiler.is_compiling():  # as above
        return False
    return torch._C._is_tracing()


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
    """A function whose derivative is refused, of both kinds."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing but what it takes to refuse later."""
        numbers = [isinstance(value, Tensor) and value.is_floating_point() for value in inputs]
        ctx.are_numbers = numbers
        if is_traced():
            ctx.save_for_backward(*itertools.compress(inputs, numbers))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Refuse; of a graph that is compiled, when it is run, since often it never is."""
        if not is_traced() or torch._C._are_functorch_transforms_active():
            refuse_second_derivative()
        tensors = iter(ctx.saved_tensors)
        return tuple(
            _refused(next(tensors), grads[0]) if numbers else None for numbers in ctx.are_numbers
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        """Refuse."""
        refuse_forward_mode()


@torch.library.custom_op(
    "pseudograd::refused", mutates_args=(), schema="(Tensor like, Tensor grad) -> Tensor"
)
def _refused(like: Tensor, grad: Tensor) -> Tensor:
    """Stand in a graph for a derivative that there is not.

    With the gradient from above it is of the graph's backward pass, and not run before.
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


# --- for graphs that leave Python -----------------------------------------------------------------


def is_exporting() -> bool:
    """Whether `torch.export` is at work; before PyTorch 2.7 that cannot be told."""
    told = getattr(torch.compiler, "is_exporting", None)
    return told is not None and bool(told())


def _exported(loss: RowLoss, z: Tensor, target: Tensor, k: Sensitivity) -> Tensor:
    if loss.exported_as is None:
        underivable: Tensor = _without_derivative(loss.forward(z, target, k)[0])
        return underivable
    value: Tensor = _exported_values(z, target, *number_or_tensor(k), loss.exported_as)
    return value


def _of_name(name: str) -> RowLoss:
    if name.startswith("kernels"):
        from pseudograd.loss.triton.operators import OnGpu

        return OnGpu(float(name.rpartition(" ")[2]))
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
    """Give a value whose derivative could not be exported."""
    return value.clone()


@_without_derivative.register_fake
def _(value: Tensor) -> Tensor:
    return torch.empty_like(value)


def _refuse_exported(ctx: Any, grad: Tensor) -> NoReturn:
    raise RuntimeError(
        "pseudograd: this loss was exported, and its backward pass is Python that an exported "
        "graph cannot hold; export the model alone, and compute the loss of its logits in Python"
    )


_without_derivative.register_autograd(_refuse_exported)


# --- backward passes ------------------------------------------------------------------------------


def is_batch(tensor: Tensor) -> bool:
    """Whether a tensor is several, as gradients from above are with ``is_grads_batched``."""
    return not torch._C._has_storage(tensor)


def graph_is_kept() -> bool:
    """Whether the backward pass under way may be asked for again, or for its own derivative."""
    kept: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return kept or torch.is_grad_enabled()


def times_each(f: Tensor, grad: Tensor) -> Tensor:
    """Rows ``f`` times the gradient from above, one number or one for each row; 0 stays 0."""
    grad = grad.unsqueeze(-1) if grad.dim() else grad
    return torch.where(f == 0, 0, f * grad).to(f.dtype)


def final(result: Tensor, *sources: Tensor | None) -> Tensor:
    """``result``, computed from ``sources`` in a way that may not be differentiated."""
    # Grad mode is on in a backward pass only where someone wants to differentiate once more.
    return _Final.apply(result, *sources) if torch.is_grad_enabled() else result


class _Final(Underivable):
    generate_vmap_rule = True

    @staticmethod
    def forward(result: Tensor, *sources: Tensor | None) -> Tensor:
        return result.clone()


def refuse_second_derivative() -> NoReturn:
    """Raise, and say why."""
    _refuse("a second derivative")


def refuse_forward_mode() -> NoReturn:
    """Raise, and say why."""
    _refuse("a forward-mode derivative (jvp, jacfwd, hessian)")


def _refuse(what: str) -> NoReturn:
    raise RuntimeError(
        f"pseudograd: {what} of a tunable loss was asked for, and there is none: its backward pass "
        "is a pseudo-gradient, which is no function's gradient (Lemma 1 of the paper). Use "
        "torch.nn.functional.cross_entropy where you need one."
    )


def _fold(info: Any, in_dims: tuple[int | None, ...], inputs: tuple[Any, ...]) -> list[Any]:
    """A batch of problems is one problem with more rows."""

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
