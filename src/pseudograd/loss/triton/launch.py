"""Kernel selection and launch settings, from the arguments of a loss.

The settings were measured on an H200 (docs/notes/kernels.md); `benchmarks.sweep_loss` times the
values around them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pseudograd.loss.triton import PARTS, labels, reduction, soft
from pseudograd.rules.paper import Sensitivity

# Rows of up to this many classes are kept on-chip.
LONGEST_TILE = 8192
# Up to this many elements in total run in one program, which also computes the reduction.
FEW = 16384
# Elements that a program computes at a time, of several short rows or of a long one.
TILE_BLOCK, ROW_BLOCK = 1024, 8192
# Elements of short rows per warp, and elements of one row per thread.
WARP_BLOCK, THREAD_BLOCK = 1024, 32
# Programs launched with ``skip``: few enough to exit quickly, enough to occupy the GPU.
SKIPPING = 2048
# Longer rows get more threads: then fewer rows are in flight, and they stay in the L2 cache between
# their two passes.
LONG_ROW_BYTES = 64 << 10
# Register limits per thread. Without them the compiler takes up to 1.6 times as many, mostly
# for k other than 1/2, 1 and 2, which halves the occupancy and costs a fifth of the speed.
TILE_REGISTERS, ROW_REGISTERS = 96, 64
SOFT_TILE_REGISTERS, SOFT_ROW_REGISTERS = 128, 96
_VECTOR_BYTES = 16
_SPECIAL = {1.0: "1", 0.5: "1/2", 2.0: "2"}


class Launch(NamedTuple):
    """A launched kernel, with all that `node` needs to launch it again."""

    compiled: Any  # None in Triton's interpreter
    grid: tuple[int]
    arguments: tuple[Any, ...]


def start_kernel(kernel: Any, grid: tuple[int], *arguments: Any, **settings: Any) -> Launch:
    """Launch a kernel, and return the launch."""
    return Launch(kernel[grid](*arguments, **settings), grid, arguments)


class Rows(NamedTuple):
    """Rows of logits (R, C) and all that their loss depends on, in the form that kernels read."""

    z: Tensor
    target: Tensor  # labels (R) or probabilities (R, C)
    k: float
    ks: Tensor | None = None
    weight: Tensor | None = None
    ignore_index: int = -100
    smoothing: float = 0.0

    @property
    def soft(self) -> bool:
        """Whether the targets are soft: probabilities or smoothed labels."""
        return self.smoothing > 0 or self.target.dim() > 1

    @property
    def long(self) -> bool:
        """Whether a row is too long to be kept on-chip."""
        return self.z.shape[1] > LONGEST_TILE

    @property
    def special(self) -> str:
        """The k if the kernels are specialized for it, or "any"."""
        return _SPECIAL.get(self.k, "any") if self.ks is None else "any"

    @property
    def target_stride(self) -> int:
        """The stride between rows of probabilities."""
        return self.target.stride(0) if self.target.dim() > 1 else 0


def rows_of_loss(
    z: Tensor,
    target: Tensor,
    k: Sensitivity,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    smoothing: float = 0.0,
) -> Rows:
    """Return the arguments of a loss as `Rows`; copy logits only if classes are not contiguous."""
    z, target = _with_dense_classes(z), _with_dense_classes(target)
    ks = None
    if isinstance(k, Tensor) and (k.dim() > 0 or not k.is_cpu):
        ks, k = k.to(z.device).reshape(-1), 1.0
    weight = None if weight is None else weight.contiguous()
    return Rows(z, target, float(k), ks, weight, ignore_index, float(smoothing))


def _with_dense_classes(rows: Tensor) -> Tensor:
    """Return logits or probabilities with contiguous classes, and labels as contiguous int64."""
    if rows.dim() == 1:
        return rows.long().contiguous()
    return rows if rows.stride(1) == 1 else rows.contiguous()


def are_few(rows: Rows) -> bool:
    """Return whether one program computes all rows."""
    count, classes = rows.z.shape
    return not (rows.long or rows.soft) and 0 < count * _block(classes) <= FEW


def programs(rows: Rows) -> int:
    """Return the number of programs for the rows, each of which writes a partial sum."""
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
) -> Launch | None:
    """Launch the kernel for the rows, chosen only by their length and never by timing.

    Their device must be the current one. For soft targets, long rows ignore ``scaled`` and
    ``skip``, and short rows ignore ``found`` and ``given``.

    Args:
        rows: The rows.
        values: Receives the values in float64, one per row; or with ``reduced`` a partial sum in
            float64 from each of the `programs`, or the whole sum if the rows `are_few`.
        out: Receives the pseudo-gradients, contiguous. It may be the logits themselves.
        reduced: Sum the values.
        mean: Divide by the sum of the weights, for rows that `are_few`.
        parts: For other rows, the result of `count_labels`, to divide pseudo-gradients by.
        grad: The upstream gradient: one number, or one per row.
        scaled: Receives whether ``grad`` is not 1; see `scaled.ScaledBefore`.
        skip: Leave ``out`` as it is if ``grad`` is 1.
        found: Receives three numbers per row, (R, 3) in float32, which a later call takes as
            ``given``.
        given: Those numbers, contiguous, or for split classes those derived from the ``statistics``
            of all shards. They include weights and the mean for labels, but not for soft targets.
        statistics: Receives the numbers of a shard of the classes; see `labels.row`.

    """
    if not len(rows.z):
        return None
    if given is not None and not rows.soft:
        # The numbers include these; passing them again would only compile more kernels.
        rows, parts, mean = rows._replace(weight=None), None, False
    inputs = (rows.z, rows.target, rows.ks, rows.k, rows.weight, parts, grad)
    if rows.long or statistics is not None:
        if rows.soft:
            return _launch_soft_row(rows, inputs, values, out, found, given)
        outputs = (scaled, values, out, found, given, statistics)
        return _launch_row(rows, inputs, outputs, skip)
    if rows.soft:
        return _launch_soft_tile(rows, inputs, (scaled, values, out), reduced, skip)
    return _launch_tile(rows, inputs, (scaled, values, out, found, given), reduced, mean, skip)


def _launch_tile(
    rows: Rows, inputs: Any, outputs: Any, reduced: bool, mean: bool, skip: bool
) -> Launch:
    alone = (reduced or mean) and are_few(rows)
    grid, strides, settings = _tiling(rows, outputs[2], alone, skip)
    return start_kernel(
        labels.tile, grid,
        *inputs, *outputs, len(rows.z), *strides, *_row_strides(inputs), rows.ignore_index,
        reduced=reduced, mean=mean, skip=skip, **settings,
    )  # fmt: skip


def _launch_soft_tile(rows: Rows, inputs: Any, outputs: Any, reduced: bool, skip: bool) -> Launch:
    grid, strides, settings = _tiling(rows, outputs[2], False, skip)
    # Without FMA contraction, which the compiler would do differently in the two passes.
    return start_kernel(
        soft.soft_tile, grid,
        *inputs, *outputs, len(rows.z), *strides, *_row_strides(inputs), rows.ignore_index,
        rows.target_stride // settings["vector"], rows.smoothing or None,
        probabilities=rows.target.dim() > 1, reduced=reduced, skip=skip,
        enable_fp_fusion=False, **settings,
    )  # fmt: skip


def _launch_row(rows: Rows, inputs: Any, outputs: Any, skip: bool) -> Launch:
    z, classes = rows.z, rows.z.shape[1]
    long = classes * z.element_size() > LONG_ROW_BYTES
    block, warps = (ROW_BLOCK, 16) if long else (ROW_BLOCK // 2, 8)
    vector = _vector(z, outputs[2], lambda v: (z.stride(0) - classes) % v == 0 and classes >= 2 * v)
    return start_kernel(
        labels.row, (len(z),),
        *inputs, *outputs, z.stride(0), classes, *_row_strides(inputs), rows.ignore_index,
        special=rows.special, skip=skip, vector=vector, lanes=block // vector, num_warps=warps,
        **_at_most(ROW_REGISTERS),
    )  # fmt: skip


def _launch_soft_row(
    rows: Rows,
    inputs: Any,
    values: Tensor | None,
    out: Tensor | None,
    found: Tensor | None,
    given: Tensor | None,
) -> Launch:
    sizes = (rows.z.stride(0), rows.target_stride, rows.z.shape[1])
    aligned = all(size % 16 == 0 for size in sizes)
    block, warps, registers = _soft_row_settings(aligned, out is not None, rows.special)
    return start_kernel(
        soft.soft_row, (len(rows.z),),
        *inputs, values, out, found, given, rows.z.stride(0), rows.z.shape[1],
        *_row_strides(inputs), rows.ignore_index, rows.target_stride, rows.smoothing or None,
        special=rows.special, probabilities=rows.target.dim() > 1, vector=8, lanes=block // 8,
        num_warps=warps, **_at_most(registers),
    )  # fmt: skip


def _row_strides(inputs: Any) -> tuple[int, int]:
    """Return the strides of k and of the upstream gradient; 0 if all rows share one number."""
    ks, grad = inputs[2], inputs[6]
    k_stride = ks.stride(0) if ks is not None and len(ks) > 1 else 0
    return k_stride, grad.stride(0) if grad is not None and grad.dim() else 0


def _tiling(
    rows: Rows, out: Tensor | None, alone: bool, skip: bool
) -> tuple[tuple[int], tuple[int, int], dict[str, Any]]:
    """Return a tile kernel's grid, row stride and classes in vectors, and compile-time settings."""
    z, (count, classes) = rows.z, rows.z.shape
    block, tile_rows = _block(classes), _tile_rows(classes)
    if alone:
        tile_rows = max(tile_rows, _power_of_2(count))
    warp_block, thread_block, registers = _tile_settings(rows)
    sizes = (z.stride(0), rows.target_stride, classes)
    vector = _vector(z, out, lambda v: all(size % v == 0 for size in sizes))
    inner = min(block, max(1, block // thread_block) * max(2, vector))
    tiles = -(-count // tile_rows)
    settings = {
        "special": rows.special,
        "vector": vector,
        "tile_rows": tile_rows,
        "outer": block // inner,
        "inner": inner,
        "num_warps": max(1, min(32, tile_rows * block // warp_block)),
        **_at_most(registers),
    }
    grid = (min(tiles, SKIPPING) if skip else tiles,)
    return grid, (z.stride(0) // vector, classes // vector), settings


def _tile_settings(rows: Rows) -> tuple[int, int, int | None]:
    """Return elements per warp, elements of a row per thread, and the register limit.

    Soft targets need more registers per element, so a thread takes less of a row.
    """
    block = _block(rows.z.shape[1])
    if not rows.soft:
        return WARP_BLOCK, THREAD_BLOCK, TILE_REGISTERS
    if block * 4 <= WARP_BLOCK * rows.z.element_size():
        return WARP_BLOCK // 2, THREAD_BLOCK // 2, None
    registers = TILE_REGISTERS if block == WARP_BLOCK else SOFT_TILE_REGISTERS
    return WARP_BLOCK, THREAD_BLOCK // 4, registers


def _soft_row_settings(aligned: bool, backward: bool, special: str) -> tuple[int, int, int | None]:
    """Return the elements computed at a time, the warps, and the register limit."""
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
    # A thread holds several of the shortest rows, and the numbers of each take registers.
    return max(1, (TILE_BLOCK if block >= 64 else TILE_BLOCK // 2) // block)


def _power_of_2(size: int) -> int:
    """Return the least power of 2 that is not below ``size``; Triton's own takes 1 µs."""
    return 1 << max(0, size - 1).bit_length()


def _vector(z: Tensor, out: Tensor | None, suits: Any) -> int:
    """Return the number of elements that can be loaded and stored as one vector."""
    address = z.data_ptr() | (0 if out is None else out.data_ptr())
    size = z.element_size()
    vector = _VECTOR_BYTES // size
    while vector > 1 and (address % (vector * size) or not suits(vector)):
        vector //= 2
    return vector


def count_labels(rows: Rows, parts: Tensor) -> Launch:
    """Write partial sums of the divisor of a mean: the weights of labels that are not ignored.

    Each row of probabilities counts as one, whatever its weights.
    """
    target = None if rows.target.dim() > 1 else rows.target
    # All labels of a part at once, up to 8,192, because memory latency dominates.
    block = max(1024, min(8192, _power_of_2(-(-len(rows.z) // PARTS))))
    return start_kernel(
        reduction.count_labels, (PARTS,), target, rows.weight, parts, *rows.z.shape,
        rows.ignore_index, block=block, num_warps=block // 512,
    )  # fmt: skip


def sum_values(values: Tensor, parts: Tensor | None, result: Tensor) -> Launch:
    """Write the sum of the values, divided by ``parts`` if given, into ``result``."""
    return start_kernel(
        reduction.sum_values, (1,), values, parts, result, len(values),
        block=min(8192, _power_of_2(len(values))), num_warps=16,
    )  # fmt: skip


def rescale(x: Tensor, factor: Tensor) -> None:
    """Multiply a contiguous tensor by a number in place; a factor of 1 returns at once."""
    block = 4096
    with torch.cuda.device_of(x):
        reduction.rescale[(min(1024, x.numel() // block + 1),)](
            x, factor, x.numel(), block=block, num_warps=8
        )
