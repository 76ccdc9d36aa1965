"""A linear layer and the tunable loss in one, without holding all logits at once.

With a vocabulary of 131,072 the logits of 8,192 tokens take 2 GB in bfloat16, and their gradient
another 2 GB. Here one buffer holds the logits of a chunk of tokens at a time. Their pseudo-gradient
overwrites them, and only its products with the layer's weight and input are kept. For a mean or a
sum, the forward pass computes these products, and the backward pass only multiplies them by the
upstream gradient. Without a reduction, the backward pass computes everything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from pseudograd.loss.autograd import (
    Underivable,
    final,
    graph_is_kept,
    is_batch,
    number_or_tensor,
    refuse_forward_mode,
    without_symbol,
)
from pseudograd.loss.checks import (
    autocast_is_on,
    check_class_indices,
    check_linear,
    check_nothing_ignored,
    check_settings,
    check_softcap,
    check_z_loss,
    checked_k,
    name_of_group,
    python_number,
)
from pseudograd.loss.chunks import Products, counted_rows, linear_products
from pseudograd.loss.functional import (
    as_column,
    chosen_route,
    refuse_split_probabilities,
    tunable_cross_entropy,
)
from pseudograd.loss.modes import is_jit_traced, is_kept_as_graph, keep_whole, prepare_tracing
from pseudograd.loss.targets import checked_weights, k_of_examples
from pseudograd.rules.checks import holds_numbers, is_eager
from pseudograd.rules.paper import (
    Sensitivity,
    in_working_precision,
    wide,
    working_dtype,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Each chunk is added to the weight's gradient in the weight's dtype, so we want few of them.
FEWEST_CHUNKS, MOST_CHUNKS = 2, 4
SMALL_BYTES = 512 << 20  # up to this many bytes of logits form one chunk


def tunable_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    k: Sensitivity = 1.0,
    class_k: Tensor | None = None,
    sample_weight: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    implementation: str = "auto",
    process_group: ProcessGroup | None = None,
    chunk_rows: int | None = None,
) -> Tensor:
    """Return `tunable_cross_entropy` of the logits ``hidden @ weight.T + bias``, in chunks.

    Args:
        hidden: The last layer's input, shape (..., H), such as a language model's hidden states.
        weight: The last layer's weight, shape (C, H).
        target: Class indices of shape (...), or class probabilities of shape (..., C), which
            must not require a gradient.
        bias: The last layer's bias, shape (C).
        k: The sensitivity to large errors, above 0: a number, or one per example.
        class_k: A sensitivity for each class, shape (C); each example uses that of its label, times
            the number k.
        sample_weight: A weight of 0 or more for each example, shape (...). The mean divides by the
            sum of these weights or, with ``class_weight``, by the sum of the products of the two.
        class_weight: A weight for each class, shape (C).
        ignore_index: Examples with this class index contribute nothing.
        reduction: "mean", "sum" or "none".
        label_smoothing: The share of each target that is spread evenly over all classes, in [0, 1].
        softcap: If given, logits z become softcap · tanh(z / softcap) before the loss, as in
            Gemma 2.
        z_loss: If above 0, adds z_loss · L² to each example's loss, with L the log-sum-exp of its
            logits, as in PaLM. k and ``class_weight`` do not affect this term.
        implementation: "auto", "triton" or "torch", as in `tunable_cross_entropy`.
        process_group: The ranks that the classes are split over: ``weight``, ``bias`` and
            ``class_weight`` hold this rank's shard. Every rank gets the full loss, the gradients of
            its shard, and the full gradient of ``hidden``. Targets must be class indices.
        chunk_rows: The number of examples whose logits are held at a time. By default a half to a
            quarter of them, or all if their logits take at most 512 MiB.

    Returns:
        The loss: one number, or one per example if ``reduction`` is "none".

    Example:
        >>> hidden = torch.tensor([[1.0, 0.0], [0.0, 1.0]], requires_grad=True)
        >>> weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> loss = tunable_linear_cross_entropy(hidden, weight, torch.tensor([0, 1]), k=0.5)
        >>> loss.backward()
        >>> loss, hidden.grad
        (tensor(0.8620, grad_fn=...), tensor([[-0.1435,  0.3800],
            [ 0.3800, -0.1435]]))

        With capped logits and a z-loss, as in some language models:

        >>> settings = {"softcap": 30.0, "z_loss": 1e-4}
        >>> tunable_linear_cross_entropy(hidden, weight, torch.tensor([0, 1]), k=0.5, **settings)
        tensor(0.8624, grad_fn=...)

    """
    prepare_tracing()
    check_linear(hidden, weight, target, bias, class_weight, chunk_rows)
    check_settings(ignore_index, reduction, label_smoothing)
    check_softcap(softcap)
    check_z_loss(z_loss)
    ignore_index, label_smoothing = python_number(ignore_index), python_number(label_smoothing)
    softcap, chunk_rows = python_number(softcap), python_number(chunk_rows)
    soft, examples = target.is_floating_point(), hidden.shape[:-1]
    if soft:
        check_nothing_ignored(ignore_index)
    k = checked_k(k, examples)
    # In uint8, 300 classes would wrap to 44.
    target = target.reshape(-1, weight.shape[0]) if soft else target.long().flatten()
    group = ""
    if process_group is not None:
        if soft:
            refuse_split_probabilities()
        group = name_of_group(process_group)
    elif not soft and holds_numbers(target):
        check_class_indices(target, len(weight), ignore_index)
    if class_k is not None:
        k = k_of_examples(k, class_k, target, len(weight), process_group)
    per_example = None
    if sample_weight is not None:
        per_example = checked_weights(sample_weight, examples, hidden.device)
    given = _Given(
        hidden, weight, bias, target, k, class_weight, per_example, ignore_index, reduction,
        label_smoothing, softcap, float(z_loss), implementation,
    )  # fmt: skip
    # Export would drop the backward pass (see `loss.autograd`), and `jit.trace` accepts no lists.
    if is_kept_as_graph() or is_jit_traced():
        value = _in_two_steps(given, process_group)
    else:
        value = _in_chunks(given, group, chunk_rows)
    return value.reshape(examples) if reduction == "none" else value


class _Given(NamedTuple):
    """Checked arguments of `tunable_linear_cross_entropy`, with a row for each target."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    k: Sensitivity
    class_weight: Tensor | None
    per_example: Tensor | None
    ignore_index: int
    reduction: str
    smoothing: float
    softcap: float | None
    z_loss: float
    implementation: str


def _in_chunks(given: _Given, group: str, chunk_rows: int | None) -> Tensor:
    """Return the loss, holding the logits of one chunk at a time."""
    hidden, weight, bias, target = given.hidden, given.weight, given.bias, given.target
    dtype = hidden.dtype
    if autocast_is_on(hidden):
        dtype = working_dtype(hidden)
        inner = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(inner), weight.to(inner)
        bias = None if bias is None else bias.to(inner)
    if target.is_floating_point():
        dtype = torch.promote_types(dtype, target.dtype)
    rows = hidden.reshape(-1, hidden.shape[-1])
    route = chosen_route(rows, target, given.implementation)
    tensors = (rows, weight, bias)
    training = torch.is_grad_enabled()
    wanted = [training and t is not None and t.requires_grad for t in tensors]
    row_bytes = len(weight) * rows.element_size()
    value = _linear(
        *tensors, target, as_column(given.k, rows), given.class_weight, given.per_example,
        given.ignore_index, given.reduction, given.smoothing, given.softcap or 0.0, given.z_loss,
        route, group, chunk_rows or _chunk_rows(len(rows), rows.shape[1], row_bytes), wanted,
    )  # fmt: skip
    return value.to(dtype)


def _in_two_steps(given: _Given, process_group: ProcessGroup | None) -> Tensor:
    """Return the loss from all logits at once, for exported graphs."""
    weight, target, k, softcap = given.weight, given.target, given.k, given.softcap
    logits = functional.linear(given.hidden, weight, given.bias).reshape(-1, weight.shape[0])
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    value = tunable_cross_entropy(
        logits,
        target,
        given.class_weight,
        ignore_index=given.ignore_index,
        reduction=given.reduction,
        label_smoothing=given.smoothing,
        k=k.flatten() if isinstance(k, Tensor) and k.dim() else k,
        sample_weight=given.per_example,
        implementation=given.implementation,
        process_group=process_group,
    )
    if not given.z_loss:
        return value
    if process_group is not None:
        raise NotImplementedError("z_loss with a process_group cannot be exported; use z_loss=0")
    counted = counted_rows(target, logits.shape[0], given.ignore_index)
    squares = _squares(logits, counted, given.per_example, given.reduction)
    return (value + given.z_loss * squares).to(value.dtype)


def _squares(logits: Tensor, counted: Tensor, per_example: Tensor | None, reduction: str) -> Tensor:
    """Return the square of each row's log-sum-exp, or their weighted mean or sum."""
    weights = counted.double() if per_example is None else counted * per_example
    z = torch.where((weights != 0).unsqueeze(-1), in_working_precision(logits), 0)
    squares = weights * wide(z.logsumexp(-1)).square()
    if reduction == "none":
        return squares
    return squares.sum() / weights.sum() if reduction == "mean" else squares.sum()


def _chunk_rows(rows: int, width: int, row_bytes: int) -> int:
    """Return the number of rows in a chunk, a multiple of 128 for fast matrix products.

    A chunk of as many rows as the layer is wide takes as much memory as the layer's weight, whose
    gradient is held anyway.
    """
    chunks = min(max(rows // max(width, 1), FEWEST_CHUNKS), MOST_CHUNKS)
    chunks = min(chunks, -(-rows * row_bytes // SMALL_BYTES))
    chunk = -(-rows // max(chunks, 1))
    return max(-(-chunk // 128), 1) * 128


def _linear(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, k: Sensitivity, *rest: Any
) -> Tensor:
    number, ks = number_or_tensor(without_symbol(k, hidden))
    value: Tensor = _Linear.apply(hidden, weight, bias, target, number, ks, *rest)[0]
    return value


keep_whole(_linear)


class _Settings(NamedTuple):
    """The arguments of `_Linear` that are not tensors; its backward pass needs them, too."""

    k: float
    ignore_index: int
    reduction: str
    smoothing: float
    softcap: float
    z_loss: float
    route: str
    group: str
    chunk_rows: int
    wanted: list[bool]


class _Linear(Function):
    @staticmethod
    def forward(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, k: float,
        ks: Tensor | None, class_weight: Tensor | None, per_example: Tensor | None,
        ignore_index: int, reduction: str, smoothing: float, softcap: float, z_loss: float,
        route: str, group: str, chunk_rows: int, wanted: list[bool],
    ) -> tuple[Tensor, ...]:  # fmt: skip
        mean = reduction == "mean"
        ahead = reduction != "none" and any(wanted)
        factor = hidden.new_ones(1, dtype=working_dtype(hidden)) if ahead else None
        later = _is_divided_later(hidden, mean)
        values, divisors, *products = linear_products(
            hidden, weight, bias, target, k, ks, class_weight, per_example, factor, ignore_index,
            smoothing, softcap, z_loss, mean and not later, later, route, group, chunk_rows,
            wanted,
        )  # fmt: skip
        if reduction == "none":
            return values, divisors, *products
        total = values.sum()
        if mean:  # NaN if all weights are 0, even if smoothed labels have a value
            total = torch.where(divisors[0] == 0, torch.nan, total / divisors[0])
        return total, divisors, *products

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        hidden, weight, bias, target, k, ks, class_weight, per_example, *settings = inputs
        _, *products = output
        ctx.mark_non_differentiable(*products)
        ctx.set_materialize_grads(False)
        ctx.settings = _Settings(k, *settings)
        ctx.save_for_backward(
            hidden, weight, bias, target, ks, class_weight, per_example, *products
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> Any:
        nothing = (None,) * 14
        if grad is None:
            return None, None, None, *nothing
        hidden, weight, bias, target, ks, class_weight, per_example, divisors, *products = (
            ctx.saved_tensors
        )
        own: _Settings = ctx.settings
        if own.reduction == "none":
            mean = later = False
            _, _, *products = _Late.apply(
                hidden, weight, bias, target, own.k, ks, class_weight, per_example, grad,
                own.ignore_index, own.smoothing, own.softcap, own.z_loss, mean, later, own.route,
                own.group, own.chunk_rows, own.wanted,
            )  # fmt: skip
        else:
            by = grad
            if _is_divided_later(hidden, own.reduction == "mean"):
                by = torch.where(divisors[1] == 0, 0, grad / divisors[1]).to(grad.dtype)
            keep = graph_is_kept() or is_batch(grad) or not is_eager()
            products = [_scaled(product, by, own.route == "triton", keep) for product in products]
        results = (
            final(product, hidden, weight, bias) if wants else None
            for product, wants in zip(products, own.wanted, strict=True)
        )
        return *results, *nothing

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        refuse_forward_mode()

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        return _one_by_one(_Linear, info, in_dims, inputs)


class _Late(Underivable):
    """The products as a function whose derivative raises."""

    @staticmethod
    def forward(*arguments: Any) -> Products:
        products: Products = linear_products(*arguments)
        return products

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        return _one_by_one(_Late, info, in_dims, inputs)


def _one_by_one(function: type[Function], info: Any, in_dims: Any, inputs: Any) -> Any:
    """Apply a function to each element of a vmapped batch; each has its own mean and gradients."""

    def problem(i: int) -> list[Any]:
        return [
            value.select(dim, i) if isinstance(value, Tensor) and dim is not None else value
            for value, dim in zip(inputs, in_dims, strict=True)
        ]

    # Inside vmap, `requires_grad` is not reliable, so compute all gradients.
    inputs = (*inputs[:-1], [tensor is not None for tensor in inputs[:3]])
    outputs = [function.apply(*problem(i)) for i in range(info.batch_size)]
    stacked = tuple(torch.stack(parts) for parts in zip(*outputs, strict=True))
    return stacked, (0,) * len(stacked)


def _is_divided_later(hidden: Tensor, mean: bool) -> bool:
    """Return whether to divide the products instead of the pseudo-gradients: for float16 means.

    A row's share of a mean may underflow float16, and a sum may overflow it. So the products are
    divided by about the square root of the number of rows, and by the rest in the backward pass.
    """
    return mean and hidden.dtype == torch.half


def _scaled(product: Tensor, by: Tensor, triton: bool, keep: bool) -> Tensor:
    """Return a product times ``by``, in place unless the product is needed again."""
    if keep:
        return product * by
    if triton and type(product) is Tensor:
        from pseudograd.loss.triton.launch import rescale

        rescale(product, by)
        return product
    return product.mul_(by)
