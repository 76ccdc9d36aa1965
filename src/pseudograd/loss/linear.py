"""A linear layer and the tunable loss in one, without holding all logits at once.

With a vocabulary of 131,072 the logits of 8,192 tokens take 2 GB in bfloat16, and their gradient
another 2 GB. Here one buffer holds the logits of some tokens at a time. They are overwritten by
their pseudo-gradient, of which only the products with the layer's weight and input are kept. For a
mean or a sum, the backward pass only multiplies these products by a number, so the forward pass
computes them. Without a reduction, the backward pass computes everything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from pseudograd.loss.autograd import (
    RowLoss,
    Underivable,
    final,
    graph_is_kept,
    is_batch,
    is_eager,
    is_jit_traced,
    is_kept_as_graph,
    keep_whole,
    number_or_tensor,
    prepare_tracing,
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
from pseudograd.loss.functional import (
    as_column,
    checked_weights,
    chosen_route,
    k_of_examples,
    known_labels,
    refuse_split_probabilities,
    smoothed,
    smoothed_labels,
    times_weights,
    tunable_cross_entropy,
    weighted,
)
from pseudograd.loss.rows import ClassIndex, ClassProbabilities
from pseudograd.rules.checks import holds_numbers
from pseudograd.rules.paper import (
    ALL_CLASSES,
    Classes,
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

Products = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


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
        hidden: The last layer's input, shape (..., H), such as a language model's tokens.
        weight: The last layer's weight, shape (C, H).
        target: Class indices of shape (...), or class probabilities of shape (..., C), which get
            no gradient and must not require one.
        bias: The last layer's bias, shape (C).
        k: The sensitivity to large errors, above 0: a number, or one per example.
        class_k: A sensitivity for each class, shape (C), chosen by an example's label; a number k
            multiplies it.
        sample_weight: A factor of 0 or more for each example, shape (...). A mean is divided by the
            sum of the factors, or with ``class_weight`` by the sum of the products of both.
        class_weight: A factor for each class, shape (C).
        ignore_index: Examples with this class index contribute nothing.
        reduction: "mean", "sum" or "none".
        label_smoothing: The share of each target that is spread evenly over all classes, in [0, 1].
        softcap: If given, logits z become softcap · tanh(z / softcap) before the loss, as in
            Gemma 2.
        z_loss: If above 0, an example's loss also has z_loss · L², with L the log-sum-exp of its
            logits, as in PaLM. k and ``class_weight`` do not change this part.
        implementation: "auto", "triton" or "torch", as in `tunable_cross_entropy`.
        process_group: The ranks that share the classes: ``weight``, ``bias`` and ``class_weight``
            are this rank's part of them. Every rank gets the whole loss, the gradients of its part,
            and the whole gradient of ``hidden``.
        chunk_rows: How many examples to hold the logits of. By default half to a quarter of them,
            or all if their logits take at most 512 MiB.

    Returns:
        The loss: one number, or one per example if ``reduction`` is "none".

    With a ``process_group``, targets must be class indices.

    Example:
        >>> hidden = torch.tensor([[1.0, 0.0], [0.0, 1.0]], requires_grad=True)
        >>> weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> loss = tunable_linear_cross_entropy(hidden, weight, torch.tensor([0, 1]), k=0.5)
        >>> loss.backward()
        >>> loss, hidden.grad
        (tensor(0.8620, grad_fn=...), tensor([[-0.1435,  0.3800],
            [ 0.3800, -0.1435]]))

        As for a language model, with capped logits and a z-loss:

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
    # As bytes, 300 classes would be 44.
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
    # Export would lose the backward pass (see `loss.autograd`), and jit.trace takes no lists.
    if is_kept_as_graph() or is_jit_traced():
        logits = functional.linear(hidden, weight, bias).reshape(-1, weight.shape[0])
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        value = tunable_cross_entropy(
            logits, target,
            k=k.flatten() if isinstance(k, Tensor) and k.dim() else k,
            sample_weight=per_example, weight=class_weight, ignore_index=ignore_index,
            reduction=reduction, label_smoothing=label_smoothing, implementation=implementation,
            process_group=process_group,
        )  # fmt: skip
        if z_loss:
            if group:
                raise NotImplementedError("an exported loss has no z_loss with a process_group")
            counted = _counted(target, logits.shape[0], ignore_index)
            squares = _squares(logits, counted, per_example, reduction)
            value = (value + z_loss * squares).to(value.dtype)
        return value.reshape(examples) if reduction == "none" else value
    dtype = hidden.dtype
    if autocast_is_on(hidden):
        dtype = working_dtype(hidden)
        inner = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(inner), weight.to(inner)
        bias = None if bias is None else bias.to(inner)
    dtype = torch.promote_types(dtype, target.dtype) if soft else dtype
    rows = hidden.reshape(-1, hidden.shape[-1])
    route = chosen_route(rows, target, implementation)
    tensors = (rows, weight, bias)
    training = torch.is_grad_enabled()
    wanted = [training and t is not None and t.requires_grad for t in tensors]
    row_bytes = len(weight) * rows.element_size()
    value = _linear(
        *tensors, target, as_column(k, rows), class_weight, per_example, ignore_index,
        reduction, label_smoothing, softcap or 0.0, float(z_loss), route, group,
        chunk_rows or _chunk_rows(len(rows), rows.shape[1], row_bytes), wanted,
    )  # fmt: skip
    return (value.reshape(examples) if reduction == "none" else value).to(dtype)


def _chunk_rows(rows: int, width: int, row_bytes: int) -> int:
    """Return how many rows to hold the logits of, in multiples that suit matrix products.

    The logits of as many rows as the layer is wide take as much memory as its weight, whose
    gradient is held in any case.
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
        if mean:  # NaN if all weights are 0, although smoothed labels have a value
            total = torch.where(divisors[0] == 0, torch.nan, total / divisors[0])
        return total, divisors, *products

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        hidden, weight, bias, target, k, ks, class_weight, per_example, *settings = inputs
        _, *products = output
        ctx.mark_non_differentiable(*products)
        ctx.set_materialize_grads(False)
        ctx.settings = (k, *settings)
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
        k, ignore_index, reduction, smoothing, softcap, z_loss, *places, wanted = ctx.settings
        route, group, chunk_rows = places
        if reduction == "none":
            _, _, *products = _Late.apply(
                hidden, weight, bias, target, k, ks, class_weight, per_example, grad, ignore_index,
                smoothing, softcap, z_loss, False, False, route, group, chunk_rows, wanted,
            )  # fmt: skip
        else:
            by = grad
            if _is_divided_later(hidden, reduction == "mean"):
                by = torch.where(divisors[1] == 0, 0, grad / divisors[1]).to(grad.dtype)
            keep = graph_is_kept() or is_batch(grad) or not is_eager()
            products = [_scaled(product, by, route == "triton", keep) for product in products]
        results = (
            final(product, hidden, weight, bias) if wants else None
            for product, wants in zip(products, wanted, strict=True)
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
    """Map over a batch: each problem has a mean and gradients of its own."""

    def problem(i: int) -> list[Any]:
        return [
            value.select(dim, i) if isinstance(value, Tensor) and dim is not None else value
            for value, dim in zip(inputs, in_dims, strict=True)
        ]

    # Within vmap, requires_grad says nothing, so compute all gradients.
    inputs = (*inputs[:-1], [tensor is not None for tensor in inputs[:3]])
    outputs = [function.apply(*problem(i)) for i in range(info.batch_size)]
    stacked = tuple(torch.stack(parts) for parts in zip(*outputs, strict=True))
    return stacked, (0,) * len(stacked)


def _is_divided_later(hidden: Tensor, mean: bool) -> bool:
    """Return whether to divide the products, not the pseudo-gradients: for means in float16.

    A row's share of a mean may underflow float16, and a sum may overflow it. So the products are
    divided by about the square root of the number of rows, and by the rest in the backward pass.
    """
    return mean and hidden.dtype == torch.half


def _scaled(product: Tensor, by: Tensor, triton: bool, keep: bool) -> Tensor:
    """Multiply, in place unless the product is needed again."""
    if keep:
        return product * by
    if triton and type(product) is Tensor:
        from pseudograd.loss.triton.launch import rescale

        rescale(product, by)
        return product
    return product.mul_(by)


_SCHEMA = """(
    Tensor hidden, Tensor weight, Tensor? bias, Tensor target, float k, Tensor? ks,
    Tensor? class_weight, Tensor? per_example, Tensor? factor, int ignore_index, float smoothing,
    float softcap, float z_loss, bool mean, bool later, str route, str group, SymInt chunk_rows,
    bool[] wanted
) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"""


@torch.library.custom_op("pseudograd::linear_products", mutates_args=(), schema=_SCHEMA)
def linear_products(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, k: float,
    ks: Tensor | None, class_weight: Tensor | None, per_example: Tensor | None,
    factor: Tensor | None, ignore_index: int, smoothing: float, softcap: float, z_loss: float,
    mean: bool, later: bool, route: str, group: str, chunk_rows: int, wanted: list[bool],
) -> Products:  # fmt: skip
    """Return the values of rows, two divisors, and the gradients of hidden, weight and bias.

    Each gradient is computed if it is wanted, from the pseudo-gradients times ``factor`` (one
    number, or one per row) and ``per_example``, of the mean or the sum. The divisors are the sum of
    the weights, and what is left to divide the gradients by if the mean is divided ``later``.
    """
    unit = 2.0 ** -(len(hidden).bit_length() // 2) if later else 1.0
    counted = _counted(target, len(hidden), ignore_index)
    column, example_weight, classes = target, counted.double(), ALL_CLASSES
    if group:
        from pseudograd.loss.parallel import SplitClasses, label_weights, own_labels, ranks_of

        classes = SplitClasses(group)
        column = own_labels(torch.where(counted, target, 0), len(weight), group)
        if class_weight is not None:
            example_weight = example_weight * label_weights(class_weight, column, group)
    elif class_weight is not None and not target.is_floating_point():
        _, y, known = known_labels(target, len(weight), ignore_index)
        example_weight = example_weight * known * class_weight[y]
    divisor = (example_weight if per_example is None else example_weight * per_example).sum()
    z_factor: float | Tensor = z_loss
    if z_loss and class_weight is not None and (mean or later):
        # Divided by the sum of the weights like all else, it is a mean without class weights.
        count = (counted if per_example is None else counted * per_example).sum()
        z_factor = torch.where(divisor == 0, 0, z_loss * divisor / count)
    if factor is not None and per_example is not None:
        factor = factor * per_example
    if factor is not None and mean:
        factor = torch.where(divisor == 0, 0, factor / divisor)
    values = torch.empty(len(hidden), dtype=torch.float64, device=hidden.device)
    of_hidden, of_weight, of_bias = _buffers(hidden, weight, bias, factor, wanted)
    buffer = hidden.new_empty((min(chunk_rows, len(hidden)), len(weight)))
    if not len(hidden):
        of_weight.zero_()
    for start in range(0, len(hidden), chunk_rows):
        part = slice(start, min(start + chunk_rows, len(hidden)))
        x, logits = hidden[part], buffer[: part.stop - start]
        if bias is None:
            torch.mm(x, weight.t(), out=logits)
        else:
            torch.addmm(bias, x, weight.t(), out=logits)
        slope = _cap(logits, softcap, factor is not None) if softcap else None
        k_part: Sensitivity = k if ks is None else ks[part].unsqueeze(-1)
        factor_part = None
        if factor is not None:
            factor_part = (factor if len(factor) == 1 else factor[part]).expand(len(x))
        of_z_loss = None
        if z_loss:
            squares, of_z_loss = _z_loss(logits, counted[part], factor_part, z_factor, classes)
        if group and smoothing:
            values[part] = _split_smoothed(
                logits, column[part], counted[part], k_part, class_weight, smoothing, factor_part,
                group,
            )  # fmt: skip
        elif group:
            values[part] = _split(
                logits, column[part], k_part, example_weight[part], factor_part, group,
                route == "triton",
            )  # fmt: skip
        else:
            values[part] = _ROUTES[route](
                logits, target[part], k_part, class_weight, ignore_index, smoothing, factor_part
            )
        if z_loss:
            values[part] += squares
        if factor is None:
            continue
        if of_z_loss is not None:
            logits.add_(of_z_loss)
        if slope is not None:
            logits.mul_(slope)
        if wanted[0]:
            of_hidden[part].addmm_(logits, weight, beta=0.0, alpha=unit)
        if wanted[1]:
            of_weight.addmm_(logits.t(), x, beta=float(start > 0), alpha=unit)
        if wanted[2]:
            of_bias += unit * logits.sum(0, dtype=of_bias.dtype)
    if group and wanted[0] and factor is not None:
        torch.distributed.all_reduce(of_hidden, group=ranks_of(group))
    if per_example is not None:
        values = times_weights(values, per_example)
    divisors = torch.stack((divisor, unit * divisor))
    return values, divisors, of_hidden, of_weight, of_bias.to(hidden.dtype)


@linear_products.register_fake
def _(hidden: Tensor, *arguments: Any) -> Products:
    weight, bias, wanted, factor = arguments[0], arguments[1], arguments[-1], arguments[7]
    values = hidden.new_empty(hidden.shape[0], dtype=torch.float64)  # len would fix the size
    of_hidden, of_weight, of_bias = _buffers(hidden, weight, bias, factor, wanted)
    return values, values.new_empty(2), of_hidden, of_weight, of_bias.to(hidden.dtype)


def _buffers(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, factor: Tensor | None, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return buffers for the products, empty for those that are not wanted."""

    def buffer(like: Tensor | None, wants: bool) -> Tensor:
        return hidden.new_empty(like.shape if wants and like is not None else 0)

    here = [wants and factor is not None for wants in wanted]
    of_bias = buffer(bias, here[2])
    # A sum over all rows, and small: in float32.
    of_bias = torch.zeros_like(of_bias, dtype=working_dtype(hidden))
    return buffer(hidden, here[0]), buffer(weight, here[1]), of_bias


def _cap(logits: Tensor, softcap: float, slope: bool) -> Tensor | None:
    """Overwrite logits z with softcap · tanh(z / softcap); return the derivative if it is asked."""
    z = logits.to(working_dtype(logits)) / softcap
    # Not 1 - tanh², which cancels.
    derivative = z.cosh().pow_(-2).to(logits.dtype) if slope else None
    logits.copy_(z.tanh_().mul_(softcap))
    return derivative


def _counted(target: Tensor, rows: int, ignore_index: int) -> Tensor:
    """Return which rows are not ignored."""
    if target.is_floating_point():
        return target.new_ones(rows, dtype=torch.bool)
    return target != ignore_index


def _z_loss(
    logits: Tensor, counted: Tensor, factor: Tensor | None, z_factor: float | Tensor,
    classes: Classes,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return ``z_factor`` · L² of each row and, if there is a factor, its gradient times that.

    L is the log-sum-exp of the row's logits, and the gradient 2 · z_factor · L · softmax.
    """
    top = classes.largest(in_working_precision(logits.amax(-1, keepdim=True)))
    powers = (logits - top).exp_()  # in half types in the top's dtype, float32
    total = wide(classes.total(powers))
    log_sum = wide(top) + total.log()
    values = torch.where(counted, z_factor * log_sum.square().squeeze(-1), 0)
    if factor is None:
        return values, None
    factor = (factor * counted).unsqueeze(-1)
    scale = (2 * z_factor * factor * log_sum / total).to(powers.dtype)
    # An infinite scale times a power of 0 would be NaN.
    greatest = torch.finfo(powers.dtype).max
    # What is ignored may hold NaN, and NaN · 0 is NaN.
    return values, powers.mul_(scale.clamp_(-greatest, greatest)).masked_fill_(factor == 0, 0)


def _squares(logits: Tensor, counted: Tensor, per_example: Tensor | None, reduction: str) -> Tensor:
    """Return the square of each row's log-sum-exp, or their mean or sum, for graphs."""
    weights = counted.double() if per_example is None else counted * per_example
    z = torch.where((weights != 0).unsqueeze(-1), in_working_precision(logits), 0)
    squares = weights * wide(z.logsumexp(-1)).square()
    if reduction == "none":
        return squares
    return squares.sum() / weights.sum() if reduction == "mean" else squares.sum()


# Each returns the values of a chunk's rows and, if there is a factor, overwrites the logits with
# the pseudo-gradients.


def _by_triton(
    logits: Tensor, target: Tensor, k: Sensitivity, class_weight: Tensor | None, ignore_index: int,
    smoothing: float, factor: Tensor | None,
) -> Tensor:  # fmt: skip
    from pseudograd.loss.triton.launch import launch, rows_of_loss

    values = logits.new_empty(len(logits), dtype=torch.float64)
    rows = rows_of_loss(logits, target, k, class_weight, ignore_index, smoothing)
    with torch.cuda.device_of(logits):
        launch(rows, values, None if factor is None else logits, grad=factor)
    return values


def _by_cpu(
    logits: Tensor, target: Tensor, k: Sensitivity, class_weight: Tensor | None, ignore_index: int,
    smoothing: float, factor: Tensor | None,
) -> Tensor:  # fmt: skip
    from pseudograd.loss.cpu import values_and_gradients

    return values_and_gradients(logits, target, k, class_weight, ignore_index, smoothing, factor)


def _by_torch(
    logits: Tensor, target: Tensor, k: Sensitivity, class_weight: Tensor | None, ignore_index: int,
    smoothing: float, factor: Tensor | None,
) -> Tensor:  # fmt: skip
    if target.is_floating_point():
        q = weighted(smoothed(target.to(working_dtype(logits)), smoothing), class_weight)
        ones = torch.ones_like(q[:, 0], dtype=working_dtype(logits))
        return _by_rows(ClassProbabilities(), logits, q, k, ones, factor)
    counted, y, known = known_labels(target, logits.shape[1], ignore_index)
    loss: RowLoss = ClassIndex()
    row_weight = (counted * known).to(working_dtype(logits))
    if smoothing:
        y = smoothed_labels(logits, y, smoothing, class_weight)
        loss = ClassProbabilities()
    elif class_weight is not None:
        row_weight = row_weight * class_weight[y]
    return _by_rows(loss, logits, y, k, row_weight, factor)


_ROUTES = {"triton": _by_triton, "cpu": _by_cpu, "torch": _by_torch}


def _by_rows(
    loss: RowLoss, logits: Tensor, y: Tensor, k: Sensitivity, row_weight: Tensor,
    factor: Tensor | None,
) -> Tensor:  # fmt: skip
    values, *kept = loss.forward(logits, y, k)
    if factor is not None:
        grad = (factor * row_weight).unsqueeze(-1)
        logits.copy_(loss.backward(logits, y, k, grad, *kept))
    return torch.where(row_weight == 0, 0, values * row_weight)


def _split_smoothed(
    logits: Tensor, column: Tensor, counted: Tensor, k: Sensitivity, class_weight: Tensor | None,
    smoothing: float, factor: Tensor | None, group: str,
) -> Tensor:  # fmt: skip
    from pseudograd.loss.parallel import SplitClasses, smoothed_target

    q = smoothed_target(column, logits.shape[1], class_weight, smoothing, group)
    row_weight = counted.to(working_dtype(logits))
    return _by_rows(ClassProbabilities(SplitClasses(group)), logits, q, k, row_weight, factor)


def _split(
    logits: Tensor, column: Tensor, k: Sensitivity, row_weight: Tensor, factor: Tensor | None,
    group: str, triton: bool,
) -> Tensor:  # fmt: skip
    from pseudograd.loss.parallel import push, whole_rows
    from pseudograd.rules import paper

    whole = whole_rows(logits, column, k, group, triton)
    if factor is not None:
        push(logits, column, k, whole, (factor * row_weight).unsqueeze(-1), triton, out=logits)
    value = paper.cross_entropy(whole.margin).squeeze(-1)
    return torch.where(row_weight == 0, 0, value * row_weight)
