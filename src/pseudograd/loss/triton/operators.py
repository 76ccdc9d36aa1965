"""PyTorch bindings of the kernels: an autograd function, and custom ops for graphs.

There are three entry points:

- `fused_cross_entropy` is the whole loss, reduction included, for eager calls. While training it
  computes the gradient together with the value, while the logits are on-chip or cached. If the
  upstream gradient is 1, as it usually is, the backward pass then has nothing to do; a kernel
  checks that on the device, since checking it on the host would need a sync. Otherwise that kernel
  recomputes the gradient from the logits, so that it is rounded only once.
- `loss_in_graph` and `gradient_in_graph` are the two passes of the whole loss for graphs of
  `torch.compile`, as `pseudograd.loss.graph` defines them.
- `value_of_rows` and `gradient_of_rows` are custom ops that `torch.compile`, `torch.export` and
  `torch.func` can hold in a graph; `gpu_rows` is the row function made of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd import Function

from pseudograd.loss.autograd import (
    are_hooked,
    final,
    graph_is_kept,
    is_batch,
    number_or_tensor,
    refuse_forward_mode,
    row_values,
    times_each,
    without_symbol,
)
from pseudograd.loss.modes import keep_whole
from pseudograd.loss.triton import PARTS
from pseudograd.loss.triton.launch import (
    Launch,
    Rows,
    are_few,
    count_labels,
    launch,
    programs,
    rows_of_loss,
    sum_values,
)
from pseudograd.loss.triton.scaled import ScaledBefore
from pseudograd.rules.paper import Sensitivity


def fused_cross_entropy(
    z: Tensor,
    target: Tensor,
    k: Sensitivity,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    dtype: torch.dtype,
    scaled: ScaledBefore | None = None,
) -> Tensor:
    """Return the loss of rows ``z`` (R, C): reduced in ``dtype``, or for each row in float64.

    Targets are labels (R) or probabilities (R, C). If ``scaled`` says that the last loss was
    scaled, the gradient is left to the backward pass.
    """
    if z.is_neg() or z.stride(1) != 1:  # kernels need contiguous classes and ignore the neg bit
        z = z.resolve_neg().contiguous()  # here, so that autograd tracks the copy
    rows = rows_of_loss(z.detach(), target, k, weight, ignore_index, label_smoothing)
    value: Tensor = _Fused.apply(z, rows, reduction, dtype, torch.is_grad_enabled(), scaled)
    return value


def always_left(rows: Rows) -> bool:
    """Return whether the gradient is always left to the backward pass.

    Long rows of soft targets do not stay on-chip, so the forward pass would have to read them again
    as well.
    """
    return rows.soft and rows.long


def is_watched() -> bool:
    """Return whether saved-tensor hooks or deterministic algorithms are active.

    Checkpointing runs a forward pass twice and expects the same saved tensors both times.
    Deterministic mode should not rely on the compiler rounding alike in both passes.
    """
    if torch.are_deterministic_algorithms_enabled():
        return True
    return are_hooked()


class Room(NamedTuple):
    """Buffers for the results of a forward pass."""

    value: Tensor  # reduced, or one for each row in float64
    gradient: Tensor | None
    parts: Tensor | None  # partial sums of the divisor of a mean
    values: Tensor | None  # partial sums of the values
    found: Tensor | None  # numbers of each row, for a backward pass


def room_for(
    rows: Rows, reduction: str, dtype: torch.dtype, gradient: torch.dtype | None, found: bool
) -> Room:
    """Allocate the buffers of a forward pass, with a gradient if its dtype is given."""
    z, empty = rows.z, rows.z.new_empty
    numbers = room_for_numbers(z) if found else None
    if reduction == "none":
        return Room(empty(len(z), dtype=torch.float64), None, None, None, numbers)
    f = None if gradient is None else empty(z.shape, dtype=gradient)
    parts = values = None
    if not are_few(rows):
        parts = empty(PARTS, dtype=torch.float64) if reduction == "mean" else None
        values = empty(programs(rows), dtype=torch.float64)
    return Room(empty((), dtype=dtype), f, parts, values, numbers)


def launch_forward(rows: Rows, room: Room, reduction: str) -> list[Launch | None]:
    """Launch the kernels of a forward pass."""
    value, gradient, parts, values, found = room
    if reduction == "none":
        return [launch(rows, value, None, found=found)]
    if values is None:
        return [launch(rows, value, gradient, reduced=True, mean=reduction == "mean")]
    return [
        None if parts is None else count_labels(rows, parts),
        launch(rows, values, gradient, reduced=True, parts=parts, found=found),
        sum_values(values, parts, value),
    ]


class _Fused(Function):
    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        rows: Rows,
        reduction: str,
        dtype: torch.dtype,
        training: bool,
        scaled: ScaledBefore | None,
    ) -> Tensor:
        each = reduction == "none"
        training = training and z.requires_grad
        at_once = training and not each and not always_left(rows)
        if at_once and scaled is not None and not is_watched():
            at_once = not scaled.flag().item()
        # A backward pass that computes the gradient can use the numbers of each row: always
        # without a reduction, else if the loss is scaled. Summing short rows again is faster.
        found = training and (each or rows.long) and keeps_numbers(rows)
        room = room_for(rows, reduction, dtype, z.dtype if at_once else None, found)
        with torch.cuda.device_of(z):
            launch_forward(rows, room, reduction)
        # Saving the logits themselves lets autograd detect in-place changes.
        tensors = rows.target, rows.ks, rows.weight, room.parts, room.gradient, room.found
        ctx.save_for_backward(z, *tensors)
        ctx.settings = rows.k, rows.ignore_index, rows.smoothing
        ctx.mean = reduction == "mean" and room.values is None
        ctx.scaled = scaled
        return room.value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        z, target, ks, weight, parts, gradient, found = ctx.saved_tensors
        k, ignore_index, smoothing = ctx.settings
        rows = Rows(z.detach(), target, k, ks, weight, ignore_index, smoothing)
        several = is_batch(grads[0])  # kernels cannot read a vmapped batch
        # Reuse the saved gradient as the result only if nothing needs it again.
        once = not graph_is_kept() and not several
        reuse = once and gradient is not None
        out = gradient if reuse else z.new_empty(z.shape)
        grad = None if several else grads[0]
        tells = ctx.scaled is not None and once and not grads[0].dim() and not always_left(rows)
        with torch.cuda.device_of(z):
            launch(
                rows, None, out, mean=ctx.mean, parts=parts, grad=grad,
                scaled=ctx.scaled.flag() if tells else None, skip=reuse, given=found,
            )  # fmt: skip
        if several:
            out = times_each(out, grads[0])
        return final(out, z), *[None] * 5

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        refuse_forward_mode()


def keeps_numbers(rows: Rows) -> bool:
    """Return whether the forward pass keeps numbers of each row for the backward pass.

    For short rows of soft targets or of float32, summing again is faster.
    """
    return rows.long or not (rows.soft or rows.z.element_size() == 4)


def numbers_in_graph(rows: Rows, reduction: str) -> bool:
    """Return whether `loss_in_graph` keeps numbers of each row for `gradient_in_graph`."""
    return keeps_numbers(rows) and (reduction == "none" or not are_few(rows))


def sizes_in_graph(z: Tensor, training: bool) -> tuple[int, int]:
    """Return the sizes of ``parts`` and ``found`` of `loss_in_graph`, for any number of rows."""
    return (PARTS, 3 * z.shape[0]) if training else (0, 0)


def loss_in_graph(rows: Rows, reduction: str, training: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss in float32 and, if training, what `gradient_in_graph` needs."""
    found = training and numbers_in_graph(rows, reduction)
    room = room_for(rows, reduction, torch.float32, None, found)
    with torch.cuda.device_of(rows.z):
        launch_forward(rows, room, reduction)
    of_parts, of_found = sizes_in_graph(rows.z, training)
    parts = room.parts if training else None
    if parts is None:
        parts = rows.z.new_empty(of_parts, dtype=torch.float64)
    kept = room.found
    if kept is None:
        kept = rows.z.new_empty(of_found, dtype=torch.float32)
    return room.value.float(), parts, kept.flatten()


def gradient_in_graph(
    rows: Rows, parts: Tensor, found: Tensor, grad: Tensor, reduction: str
) -> Tensor:
    """Return the gradient of `loss_in_graph`, times the upstream gradient."""
    out, alone = rows.z.new_empty(rows.z.shape), are_few(rows)
    with torch.cuda.device_of(rows.z):
        launch(
            rows, None, out, mean=reduction == "mean" and alone,
            parts=parts if reduction == "mean" and not alone else None, grad=grad.contiguous(),
            given=found if numbers_in_graph(rows, reduction) else None,
        )  # fmt: skip
    return out


def room_for_numbers(z: Tensor) -> Tensor:
    """Allocate these numbers. Graphs always have them, as they may serve any row length."""
    return z.new_empty((z.shape[0], 3), dtype=torch.float32)


# --- custom ops for graphs; the row function around them has their derivative ---------------------


@torch.library.custom_op(
    "pseudograd::value_of_rows",
    mutates_args=(),
    schema="(Tensor z, Tensor target, float k, Tensor? ks, float smoothing) -> (Tensor, Tensor)",
)
def value_of_rows(
    z: Tensor, target: Tensor, k: float, ks: Tensor | None, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Return each row's cross-entropy in float64, and the numbers for `gradient_of_rows`."""
    rows = rows_of_loss(z, target, k if ks is None else ks, smoothing=smoothing)
    values, found = z.new_empty(len(z), dtype=torch.float64), room_for_numbers(z)
    with torch.cuda.device_of(z):
        launch(rows, values, None, found=found if keeps_numbers(rows) else None)
    return values, found


@value_of_rows.register_fake
def _(
    z: Tensor, target: Tensor, k: float, ks: Tensor | None, smoothing: float
) -> tuple[Tensor, Tensor]:
    return z.new_empty(z.shape[0], dtype=torch.float64), room_for_numbers(z)


@torch.library.custom_op(
    "pseudograd::gradient_of_rows",
    mutates_args=(),
    schema="""(
        Tensor z, Tensor target, float k, Tensor? ks, Tensor? grad, Tensor given, float smoothing
    ) -> Tensor""",
)
def gradient_of_rows(
    z: Tensor,
    target: Tensor,
    k: float,
    ks: Tensor | None,
    grad: Tensor | None,
    given: Tensor,
    smoothing: float,
) -> Tensor:
    """Return Eq. 5 of each row, or the rule for soft targets, times its ``grad``.

    Without ``grad``, for classes split over devices, return this device's columns, scaled as in
    ``given``; labels are then columns of this device.
    """
    rows = rows_of_loss(z, target, k if ks is None else ks, smoothing=smoothing)
    out = z.new_empty(z.shape)
    kept = given if grad is None or keeps_numbers(rows) else None
    with torch.cuda.device_of(z):
        launch(rows, None, out, grad=grad, given=kept)
    return out


@gradient_of_rows.register_fake
def _(z: Tensor, *arguments: Any) -> Tensor:
    return z.new_empty(z.shape)


@torch.library.custom_op(
    "pseudograd::statistics_of_part",
    mutates_args=(),
    schema="(Tensor z, Tensor column, float k, Tensor? ks) -> Tensor",
)
def statistics_of_part(z: Tensor, column: Tensor, k: float, ks: Tensor | None) -> Tensor:
    """Return the top, both sums and the label's logit of a shard of each row: (4, R), float64."""
    statistics = z.new_empty((4, len(z)), dtype=torch.float64)
    with torch.cuda.device_of(z):
        launch(rows_of_loss(z, column, k if ks is None else ks), None, None, statistics=statistics)
    return statistics


@statistics_of_part.register_fake
def _(z: Tensor, column: Tensor, k: float, ks: Tensor | None) -> Tensor:
    return z.new_empty((4, z.shape[0]), dtype=torch.float64)


class OnGpu:
    """Both rules, computed by the kernels, as a `pseudograd.loss.autograd.RowLoss`."""

    def __init__(self, smoothing: float = 0.0) -> None:
        self.smoothing = smoothing
        self.exported_as: str | None = f"kernels, smoothing {smoothing}"

    def __repr__(self) -> str:
        return f"OnGpu({self.smoothing})"  # `torch.jit.trace` compares graphs by it

    def forward(self, z: Tensor, target: Tensor, k: Sensitivity) -> tuple[Tensor, ...]:
        """Return the cross-entropy of each row, and the numbers to keep."""
        values, found = value_of_rows(z, target, *number_or_tensor(k), self.smoothing)
        return values, found

    def backward(
        self, z: Tensor, target: Tensor, k: Sensitivity, grad: Tensor, *kept: Tensor
    ) -> Tensor:
        """Return Eq. 5, or the rule for soft targets."""
        f: Tensor = gradient_of_rows(
            z, target, *number_or_tensor(k), grad.squeeze(-1), *kept, self.smoothing
        )
        return f


def gpu_rows(z: Tensor, target: Tensor, k: Sensitivity, smoothing: float = 0.0) -> Tensor:
    """Return the value of each row, with the kernels' backward pass."""
    return row_values(OnGpu(smoothing), z, target, without_symbol(k, z))


keep_whole(gpu_rows)
