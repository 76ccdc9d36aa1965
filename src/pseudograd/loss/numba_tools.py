"""How the loops in `cpu` and `cpu_soft` are compiled, and the little that both need.

numba keeps compiled passes on disk and checks only the file of the pass for changes: after a change
here, touch `cpu.py` and `cpu_soft.py`.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

f32, f64, i32, u64 = np.float32, np.float64, np.int32, np.uint64

# Reordering sums lets loops run on vector registers; NaN and infinity keep their meaning.
FLAGS = {"contract", "nsz", "reassoc"}
# For loops over a row. numba's own checks for division by 0 would prevent vector code.
loop = numba.njit(fastmath=FLAGS, error_model="numpy")
# For functions whose sums must not be reordered; otherwise they inherit the caller's flags.
in_order = numba.njit(fastmath=FLAGS - {"reassoc"}, error_model="numpy")
# For a pass over all rows, run by several threads.
over_rows = numba.njit(fastmath=FLAGS, nogil=True, cache=True, error_model="numpy")


def _bitcast(source: Any, destination: Any, llvm_type: Any) -> Any:
    @intrinsic
    def cast(typing_context: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], llvm_type)

        return destination(source), generate

    return cast


bits_of = _bitcast(types.float32, types.int32, ir.IntType(32))
from_bits = _bitcast(types.int32, types.float32, ir.FloatType())
wide_bits_of = _bitcast(types.float64, types.uint64, ir.IntType(64))
from_wide_bits = _bitcast(types.uint64, types.float64, ir.DoubleType())


@numba.njit
def from_ordered(bits):  # type: ignore[no-untyped-def]
    """Return the float of `highest`'s integer."""
    return from_bits(_flipped(bits))


@numba.njit
def _flipped(bits):  # type: ignore[no-untyped-def]
    return i32(bits ^ (i32(bits >> i32(31)) & i32(0x7FFFFFFF)))


@numba.njit
def _ordered(x):  # type: ignore[no-untyped-def]
    """Return a float as an integer of the same order: integers, unlike floats, vectorize max."""
    return _flipped(bits_of(x))


# Loops run over whole slices: only then does the compiler know that no index is negative, and
# vectorizes them.
@loop
def highest(row):  # type: ignore[no-untyped-def]
    """Return the largest element as an ordered integer; the lowest integer for an empty row."""
    largest = i32(-0x7FFFFFFF - 1)
    for j in range(len(row)):
        largest = max(largest, _ordered(row[j]))
    return largest
