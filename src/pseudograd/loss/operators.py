"""The kernels as PyTorch sees them: launched, told to autograd, and registered as operators.

Two ways lead to the kernels:

- `fused_cross_entropy` is the whole loss, reduction included. While training it computes the
  gradient together with the value, when the logits are on the chip or in the cache anyway. The
  backward pass then has nothing left to do if the gradient from above is 1, as it mostly is; a
  kernel finds that out on the device, since to ask for it here would be to wait. Else it computes
  the gradient anew from the logits, so that it is rounded once only, and from then on leaves it to
  the backward pass (`scaled_before`). Of long rows of soft targets it always is left.
- `value_of_rows` and `gradient_of_rows` are operators, which `torch.compile`, `torch.export` and
  `torch.func` can hold in a graph; `gpu_rows` is the row function that is made of them.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils._python_dispatch import _disable_current_modes

from pseudograd.loss import kernels
from pseudograd.loss.autograd import (
    final,
    graph_is_kept,
    is_batch,
    keep_whole,
    number_or_tensor,
    refuse_forward_mode,
    row_values,
    times_each,
    without_symbol,
)
from pseudograd.rules.paper import Sensitivity

INTERPRETED = kernels.INTERPRETED

# Rows of up to so many classes are kept on the chip.
LONGEST_TILE = 8192
# So many elements in all are one program's: it needs no other kernels to count and to sum.
FEW = 16384
# How many elements a program takes at a time: of several short rows, or of a long one.
TILE_BLOCK, ROW_BLOCK = 1024, 8192
# How many elements of short rows a warp takes, and of one of them a thread.
WARP_BLOCK, THREAD_BLOCK = 1024, 32
# So many programs find out that there is nothing to do, or else keep all multiprocessors busy.
SKIPPING = 2048
# Rows that are longer have more threads, so that fewer rows are under way and all of them stay in
# the L2 cache between their two passes.
LONG_ROW_BYTES = 64 << 10
# How many registers a thread may have. Left alone, the compiler takes up to 1.6 times as many, most
# of all for k other than 1/2, 1 and 2; then half as many programs are at work, and a fifth slower.
TILE_REGISTERS, ROW_REGISTERS = 96, 64
SOFT_TILE_REGISTERS, SOFT_ROW_REGISTERS = 128, 96
_VECTOR_BYTES = 16
_SPECIAL = {1.0: "1", 0.5: "1/2", 2.0: "2"}


class Rows(NamedTuple):
    """Rows of logits (R, C) with all that their loss depends on, in a form that kernels read."""

    z: Tensor
    target: Tensor  # labels (R) or probabilities (R, C)
    k: float
    ks: Tensor | None = None
    weight: Tensor | None = None
    ignore_index: int = -100
    smoothing: float = 0.0

    @property
    def soft(self) -> bool:
        """Whether the target is not a label alone."""
        return self.smoothing > 0 or self.target.dim() > 1

    @property
    def long(self) -> bool:
        """Whether they are too long to be kept on the chip."""
        return self.z.shape[1] > LONGEST_TILE


def rows_of_loss(
    z: Tensor,
    target: Tensor,
    k: Sensitivity,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    smoothing: float = 0.0,
) -> Rows:
    """Bring the arguments of a loss to that form; logits are copied only if classes are apart."""
    z, target = with_classes_together(z), with_classes_together(target)
    ks = None
    if isinstance(k, Tensor) and (k.dim() > 0 or not k.is_cpu):
        ks, k = k.to(z.device).reshape(-1), 1.0
    weight = None if weight is None else weight.contiguous()
    return Rows(z, target, float(k), ks, weight, ignore_index, float(smoothing))


def with_classes_together(rows: Tensor) -> Tensor:
    """Logits or probabilities as kernels can read them, and labels as int64 in a row."""
    if rows.dim() == 1:
        return rows.long().contiguous()
    return rows if rows.stride(1) == 1 else rows.contiguous()


def are_few(rows: Rows) -> bool:
    """Whether one program takes all rows."""
    count, classes = rows.z.shape
    return not rows.long and count * _block(classes) <= FEW and not rows.soft


def programs(rows: Rows) -> int:
    """How many programs work on the rows: so many partial sums there are."""
    count, classes = rows.z.shape
    return count if rows.long else -(-count // _tile_rows(classes))


def launch(
    rows: Rows,
    values: Tensor | None,
    out: Tensor | None,
    *,
    reduced: bool = False,
    mean: bool = False,
    parts: Tensor | None = None,
    grad: Tensor | None = None,
    scaled: Tensor | None = None,
    skip: bool = False,
    found: Tensor | None = None,
    given: Tensor | None = None,
    statistics: Tensor | None = None,
) -> None:
    """Run the kernel that suits the rows. It is chosen by their length alone, and never by timing.

    Their device must be the current one. Of soft targets, long rows do not look at ``scaled`` and
    ``skip``, and short ones not at ``found`` and ``given``.

    Args:
        rows: The rows.
        values: Where values go: one for each row, in float64; or with ``reduced`` their sum, one
            part for each of `programs` in float64, or all of it if rows `are_few`.
        out: Where pseudo-gradients go, contiguous. It may be the logits themselves.
        reduced: Whether to sum the values.
        mean: Divide by the weights of rows that `are_few`.
        parts: From `count_labels`, to divide pseudo-gradients by, of others.
        grad: The gradient from above: one number, or one for each row.
        scaled: See `scaled_before`; it is kept up to date by what ``grad`` is.
        skip: Leave ``out`` as it is where ``grad`` is 1.
        found: Where the numbers of each row go that a later call will be ``given``, (R, 3) in
            float32.
        given: These numbers, contiguous, or those that follow from the statistics of all parts of
            the classes. For labels they have weights and a mean in them, for soft targets not.
        statistics: Where the numbers of a part of the classes go; see `kernels.row`.

    """
    z, target, k, ks, weight, ignore_index, smoothing = rows
    count, classes = z.shape
    if count == 0:
        return
    # The numbers of labels have these in them, and else there would be a kernel for each.
    if given is not None and not rows.soft:
        weight = parts = None
        mean = False
    special = _SPECIAL.get(k, "any") if ks is None else "any"
    k_stride = ks.stride(0) if ks is not None and len(ks) > 1 else 0
    grad_stride = grad.stride(0) if grad is not None and grad.dim() else 0
    inputs = (z, target, ks, k, weight, parts, grad)
    probabilities = target.dim() > 1
    target_stride = target.stride(0) if probabilities else 0
    if not rows.long and statistics is None:
        block = _block(classes)
        alone = (reduced or mean) and are_few(rows)
        tile_rows = _tile_rows(classes)
        if alone:
            tile_rows = max(tile_rows, _power_of_2(count))
        warp_block, thread_block, registers = _tile_settings(rows)
        warps = max(1, min(32, tile_rows * block // warp_block))
        units = (z.stride(0), target_stride, classes)
        vector = _vector(z, out, lambda v: all(size % v == 0 for size in units))
        strides = (z.stride(0) // vector, classes // vector, k_stride, grad_stride)
        inner = min(block, max(1, block // thread_block) * max(2, vector))
        tiles = -(-count // tile_rows)
        programs_of_tiles = (min(tiles, SKIPPING) if skip else tiles,)
        if rows.soft:
            # Products and sums are not fused as it comes, which would be another way in each pass.
            kernels.soft_tile[programs_of_tiles](
                *inputs, scaled, values, out, count, *strides, ignore_index,
                target_stride // vector, smoothing or None,
                special=special, probabilities=probabilities, reduced=reduced, skip=skip,
                vector=vector, tile_rows=tile_rows, outer=block // inner, inner=inner,
                num_warps=warps, enable_fp_fusion=False, **_at_most(registers),
            )  # fmt: skip
        else:
            kernels.tile[programs_of_tiles](
                *inputs, scaled, values, out, found, given, count, *strides, ignore_index,
                special=special, reduced=reduced, mean=mean, skip=skip, vector=vector,
                tile_rows=tile_rows, outer=block // inner, inner=inner, num_warps=warps,
                **_at_most(registers),
            )  # fmt: skip
        return
    strides = (z.stride(0), classes, k_stride, grad_stride)
    if rows.soft:
        aligned = all(size % 16 == 0 for size in (z.stride(0), target_stride, classes))
        block, warps, registers = _soft_row_settings(aligned, out is not None, special)
        kernels.soft_row[(count,)](
            *inputs, values, out, found, given, *strides, ignore_index, target_stride,
            smoothing or None, special=special, probabilities=probabilities, vector=8,
            lanes=block // 8, num_warps=warps, **_at_most(registers),
        )  # fmt: skip
    else:
        long = classes * z.element_size() > LONG_ROW_BYTES
        block, warps = (ROW_BLOCK, 16) if long else (ROW_BLOCK // 2, 8)
        vector = _vector(z, out, lambda v: (z.stride(0) - classes) % v == 0 and classes >= 2 * v)
        kernels.row[(count,)](
            *inputs, scaled, values, out, found, given, statistics, *strides, ignore_index,
            special=special, skip=skip, vector=vector, lanes=block // vector, num_warps=warps,
            **_at_most(ROW_REGISTERS),
        )  # fmt: skip


def _tile_settings(rows: Rows) -> tuple[int, int, int | None]:
    """How many elements a warp takes, and of a row a thread, and how many registers it may have.

    Of soft targets there is more to hold, so that threads take less of a row each.
    """
    block = _block(rows.z.shape[1])
    if not rows.soft:
        return WARP_BLOCK, THREAD_BLOCK, TILE_REGISTERS
    if block * 4 <= WARP_BLOCK * rows.z.element_size():
        return WARP_BLOCK // 2, THREAD_BLOCK // 2, None
    registers = TILE_REGISTERS if block == WARP_BLOCK else SOFT_TILE_REGISTERS
    return WARP_BLOCK, THREAD_BLOCK // 4, registers


def _soft_row_settings(aligned: bool, backward: bool, special: str) -> tuple[int, int, int | None]:
    """How many elements are taken at a time, by how many warps, with how many registers."""
    if not aligned:  # elements are loaded one by one
        return ROW_BLOCK // 4, 8, ROW_REGISTERS
    if not backward:
        return ROW_BLOCK // 2, 8, ROW_REGISTERS
    if special == "any":
        return ROW_BLOCK // 2, 8, None
    return ROW_BLOCK, 16, SOFT_ROW_REGISTERS


def _at_most(registers: int | None) -> dict[str, int]:
    if registers is None or torch.version.hip:  # AMD's compiler has no such option
        return {}
    return {"maxnreg": registers}


def _block(classes: int) -> int:
    return max(16, _power_of_2(classes))


def _tile_rows(classes: int) -> int:
    block = _block(classes)
    # Of the shortest rows a thread has several, each with numbers of its own to hold.
    return max(1, (TILE_BLOCK if block >= 64 else TILE_BLOCK // 2) // block)


def _power_of_2(size: int) -> int:
    """The least one that is not below ``size``; Triton's own takes a microsecond."""
    return 1 << max(0, size - 1).bit_length()


def _vector(z: Tensor, out: Tensor | None, suits: Any) -> int:
    """How many elements can be loaded and stored as one."""
    address = z.data_ptr() | (0 if out is None else out.data_ptr())
    size = z.element_size()
    vector = _VECTOR_BYTES // size
    while vector > 1 and (address % (vector * size) or not suits(vector)):
        vector //= 2
    return vector


def count_labels(rows: Rows) -> Tensor:
    """Give what the mean is divided by, in parts."""
    parts = torch.empty(kernels.PARTS, dtype=torch.float64, device=rows.z.device)
    if rows.target.dim() > 1:  # each row of probabilities counts as one, whatever its weights
        return parts.fill_(len(rows.z) / kernels.PARTS)
    # All labels of a part at once, if they are not too many: to wait for memory takes longest.
    block = max(1024, min(8192, _power_of_2(-(-len(rows.z) // kernels.PARTS))))
    kernels.count_labels[(kernels.PARTS,)](
        rows.target, rows.weight, parts, *rows.z.shape, rows.ignore_index, block=block,
        num_warps=block // 512,
    )  # fmt: skip
    return parts


def sum_values(values: Tensor, parts: Tensor | None, result: Tensor) -> None:
    """Write the sum of the values, divided by ``parts``, into ``result``."""
    kernels.sum_values[(1,)](
        values, parts, result, len(values),
        block=min(8192, _power_of_2(len(values))), num_warps=16,
    )  # fmt: skip


def rescale(x: Tensor, factor: Tensor) -> None:
    """Multiply a contiguous tensor by a number in place, at no cost if that is 1."""
    block = 4096
    with torch.cuda.device_of(x):
        kernels.rescale[(min(1024, x.numel() // block + 1),)](
            x, factor, x.numel(), block=block, num_warps=8
        )


def fused_cross_entropy(
    z: Tensor,
    target: Tensor,
    k: Sensitivity,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    dtype: torch.dtype,
) -> Tensor:
    """Give the loss of rows ``z`` (R, C): in ``dtype``, or for each row in float64.

    Targets are labels (R) or probabilities (R, C).
    """
    z = z if z.stride(1) == 1 else z.contiguous()  # so that autograd knows of the copy
    rows = rows_of_loss(z.detach(), target, k, weight, ignore_index, label_smoothing)
    value: Tensor = _Fused.apply(z, rows, reduction, dtype, torch.is_grad_enabled())
    return value


def always_left(rows: Rows) -> bool:
    """Whether the gradient is always left to the backward pass.

    Such rows do not stay on the chip, so that it takes as many passes over them in either.
    """
    return rows.soft and rows.long


@functools.cache
def scaled_before() -> Tensor:
    """Tell whether the last loss was multiplied, so that the gradient from above was not 1.

    Then it most likely will not be 1 again, and a gradient that the forward pass computed would be
    of no use. A kernel finds it out, too late for this step but in time for another: this number
    is in memory of the processor that the GPU can write to, so that no one waits. There is one for
    all losses of a process. It has a say in when gradients are computed, and none in what they are.
    """
    with _disable_current_modes():  # or a fake tensor might stay for good
        pinned = torch.cuda.is_available()
        return torch.zeros((), dtype=torch.int32, device="cpu", pin_memory=pinned)


_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def is_watched() -> bool:
    """Whether someone may look at what is saved, and before PyTorch 2.8, where no one can tell.

    Checkpointing has a forward pass run twice, and wants the same to be saved both times. And who
    wants all to be deterministic need not trust the compiler to round alike in both places.
    """
    if torch.are_deterministic_algorithms_enabled():
        return True
    return _top_hooks is None or _top_hooks(False) is not None


class _Fused(Function):
    @staticmethod
    def forward(
        ctx: Any, z: Tensor, rows: Rows, reduction: str, dtype: torch.dtype, training: bool
    ) -> Tensor:
        empty = rows.z.new_empty
        parts = gradient = found = None
        mean = reduction == "mean"
        training = training and z.requires_grad
        # A backward pass that computes the gradient can use these numbers: always without a
        # reduction, else if the loss is scaled. Short rows take longer to keep them than to sum.
        later = reduction == "none" or rows.long
        at_once = training and not always_left(rows)
        at_once = at_once and (is_watched() or not scaled_before().item())
        if training and later and keeps_numbers(rows):
            found = room_for_numbers(z)
        # One guard for all kernels, since it takes longer than to launch one should.
        with torch.cuda.device_of(z):
            if reduction == "none":
                value = empty(len(z), dtype=torch.float64)
                launch(rows, value, None, found=found)
            else:
                value = empty((), dtype=dtype)
                gradient = empty(z.shape) if at_once else None
                if are_few(rows) and len(z):
                    launch(rows, value, gradient, reduced=True, mean=mean)
                else:
                    parts = count_labels(rows) if mean else None
                    values = empty(programs(rows), dtype=torch.float64)
                    launch(rows, values, gradient, reduced=True, parts=parts, found=found)
                    sum_values(values, parts, value)
        # With the logits themselves autograd sees if someone writes to them.
        ctx.save_for_backward(z, rows.target, rows.ks, rows.weight, parts, gradient, found)
        ctx.settings = rows.k, rows.ignore_index, rows.smoothing
        ctx.mean = mean and parts is None
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        z, target, ks, weight, parts, gradient, found = ctx.saved_tensors
        k, ignore_index, smoothing = ctx.settings
        rows = Rows(z.detach(), target, k, ks, weight, ignore_index, smoothing)
        several = is_batch(grads[0])  # which no kernel can read
        # What is handed over must not be needed again.
        once = not graph_is_kept() and not several
        reuse = once and gradient is not None
        out = gradient if reuse else z.new_empty(z.shape)
        grad = None if several else grads[0]
        scaled = None if always_left(rows) or grads[0].dim() or not once else scaled_before()
        with torch.cuda.device_of(z):
            launch(
                rows, None, out, mean=ctx.mean, parts=parts, grad=grad, scaled=scaled, skip=reuse,
                given=found,
            )  # fmt: skip
        if several:
            out = times_each(out, grads[0])
        return final(out, z), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        refuse_forward_mode()


# The operators have no derivative of their own: the row function around them brings it.
@torch.library.custom_op(
    "pseudograd::value_of_rows",
    mutates_args=(),
    schema="(Tensor z, Tensor target, float k, Tensor? ks, float smoothing) -> (Tensor, Tensor)",
)
def value_of_rows(
    z: Tensor, target: Tensor, k: float, ks: Tensor | None, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Give -log p_y of each row, or its mean over a soft target, in float64.

    Beside it stands what `gradient_of_rows` is to be given.
    """
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


def keeps_numbers(rows: Rows) -> bool:
    """Whether rows keep numbers for the backward pass.

    Short rows of soft targets, or of float32, are sooner summed again.
    """
    return rows.long or not (rows.soft or rows.z.element_size() == 4)


def room_for_numbers(z: Tensor) -> Tensor:
    """Room for these numbers. In a graph it is there in any case: it may be for any length."""
    return z.new_empty((z.shape[0], 3), dtype=torch.float32)


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
    """Give Eq. 5 of each row, or the rule for soft targets, times its ``grad``.

    Without it, of classes that are split among devices, give this part, as ``given`` says: labels
    are then columns of this device.
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
    """Give the top, both sums and the label's logit of a part of each row: (4, R) in float64."""
    statistics = z.new_empty((4, len(z)), dtype=torch.float64)
    with torch.cuda.device_of(z):
        launch(rows_of_loss(z, column, k if ks is None else ks), None, None, statistics=statistics)
    return statistics


@statistics_of_part.register_fake
def _(z: Tensor, column: Tensor, k: float, ks: Tensor | None) -> Tensor:
    return z.new_empty((4, z.shape[0]), dtype=torch.float64)


class OnGpu:
    """Both rules by the kernels, for labels, smoothed or not, and for probabilities."""

    def __init__(self, smoothing: float = 0.0) -> None:
        self.smoothing = smoothing
        self.exported_as: str | None = f"kernels, smoothing {smoothing}"

    def __repr__(self) -> str:
        return f"OnGpu({self.smoothing})"  # by which `torch.jit.trace` compares graphs

    def forward(self, z: Tensor, target: Tensor, k: Sensitivity) -> tuple[Tensor, ...]:
        """Give -log p_y, or its mean over a soft target, and keep what the kernels found."""
        values, found = value_of_rows(z, target, *number_or_tensor(k), self.smoothing)
        return values, found

    def backward(
        self, z: Tensor, target: Tensor, k: Sensitivity, grad: Tensor, *kept: Tensor
    ) -> Tensor:
        """Give Eq. 5, or the rule for soft targets."""
        f: Tensor = gradient_of_rows(
            z, target, *number_or_tensor(k), grad.squeeze(-1), *kept, self.smoothing
        )
        return f


def gpu_rows(z: Tensor, target: Tensor, k: Sensitivity, smoothing: float = 0.0) -> Tensor:
    """Give the value of each row, with the kernels' backward pass."""
    return row_values(OnGpu(smoothing), z, target, without_symbol(k, z))


keep_whole(gpu_rows)
