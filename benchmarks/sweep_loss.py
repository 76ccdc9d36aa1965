"""Sweep block sizes and numbers of warps for the kernels of the loss on this GPU.

    python -m benchmarks.sweep_loss --only 32000

This times the kernel that computes values and gradients, without its launch from Python, for
settings around those in `pseudograd.loss.triton.launch`, and prints the best first. Change the
settings there.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import torch

from pseudograd.loss import tunable_cross_entropy
from pseudograd.loss.triton import PARTS, launch
from pseudograd.loss.triton.launch import Rows

ROWS = (
    (torch.bfloat16, 8192, 131072),
    (torch.bfloat16, 4096, 262144),
    (torch.bfloat16, 8192, 50257),
    (torch.bfloat16, 8192, 32000),
    (torch.float32, 4096, 131072),
    (torch.float32, 8192, 32000),
)
TILES = (
    (torch.bfloat16, 65536, 1000),
    (torch.bfloat16, 131072, 100),
    (torch.bfloat16, 262144, 10),
    (torch.float32, 65536, 1000),
)
KS = (1.0, 0.5, 3.0)
BUSY_BYTES = 4 << 30


def milliseconds(run: Callable[[], Any], cache: torch.Tensor, turns: int = 15) -> float:
    times: list[float] = []
    for turn in range(turns + 3):
        cache.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        if turn >= 3:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def row_settings() -> Iterator[dict[str, Any]]:
    for block, longest in itertools.product((4096, 8192, 16384), (0, 1 << 30)):
        half = longest > 0  # as for shorter rows: half the block, half the warps
        name = f"row {block // 2}, 8 warps" if half else f"row {block}, 16 warps"
        yield {"ROW_BLOCK": block, "LONG_ROW_BYTES": longest, "name": name}


def tile_settings(classes: int) -> Iterator[dict[str, Any]]:
    for warp, thread, warps in itertools.product((512, 1024, 2048), (16, 32, 64), (1, 2)):
        if max(classes, thread) <= warp * warps:
            name = f"{warps} x {warp} elements, {thread} of a row a thread"
            yield {"TILE_BLOCK": warp * warps, "WARP_BLOCK": warp, "THREAD_BLOCK": thread,
                   "name": name}  # fmt: skip


def measure(
    rows: Rows, settings: Iterator[dict[str, Any]], cache: torch.Tensor
) -> Iterator[tuple[float, str]]:
    out = torch.empty_like(rows.z)
    for setting in settings:
        name = setting.pop("name")
        with ExitStack() as stack:
            for key, value in setting.items():
                stack.enter_context(mock.patch.object(launch, key, value))
            values = rows.z.new_empty(launch.programs(rows), dtype=torch.float64)
            parts = parts_of(rows)
            run = partial(launch.launch, rows, values, out, reduced=True, parts=parts)
            try:
                yield milliseconds(run, cache), name
            except Exception as error:
                print(f"  left out: {name} ({type(error).__name__}: {str(error)[:100]})")


def parts_of(rows: Rows) -> torch.Tensor:
    parts = rows.z.new_empty(PARTS, dtype=torch.float64)
    launch.count_labels(rows, parts)
    return parts


def overheads(cache: torch.Tensor) -> None:
    """Print the overheads besides memory traffic: an empty launch, the sums, and Python."""
    for dtype, count, classes in (ROWS[0], TILES[0], TILES[-2]):
        z = torch.randn(count, classes, device="cuda").to(dtype)
        target = torch.randint(classes, (count,), device="cuda")
        rows = launch.rows_of_loss(z, target, 0.5)
        out, one = torch.empty_like(z), torch.ones((), device="cuda")
        values = z.new_empty(launch.programs(rows), dtype=torch.float64)
        parts = parts_of(rows)
        again = partial(launch.launch, rows, None, out, parts=parts, grad=one, skip=True)
        nothing = milliseconds(again, cache)
        sums = milliseconds(partial(launch.sum_values, values, parts, z.new_empty(())), cache)
        counting = milliseconds(partial(launch.count_labels, rows, parts), cache)
        print(f"{count}x{classes}: nothing to do {nothing * 1e3:.1f}, sum {sums * 1e3:.1f}, count "
              f"{counting * 1e3:.1f} microseconds")  # fmt: skip
    small = torch.randn(64, 10, device="cuda", requires_grad=True)
    label = torch.zeros(64, dtype=torch.long, device="cuda")
    for _ in range(100):
        tunable_cross_entropy(small, label, k=0.5, implementation="triton").backward()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(500):
        tunable_cross_entropy(small, label, k=0.5, implementation="triton").backward()
    torch.cuda.synchronize()
    print(f"64x10, forward and backward: {(time.perf_counter() - start) / 500 * 1e6:.0f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="only cases whose name contains this text")
    arguments = parser.parse_args()
    cache = torch.empty(BUSY_BYTES, dtype=torch.int8, device="cuda")
    overheads(cache)
    for (dtype, count, classes), k in itertools.product((*ROWS, *TILES), KS):
        name = f"{str(dtype).removeprefix('torch.')} {count}x{classes} k={k}"
        if arguments.only not in name:
            continue
        z = torch.randn(count, classes, device="cuda").to(dtype)
        target = torch.randint(classes, (count,), device="cuda")
        rows = launch.rows_of_loss(z, target, k)
        tiled = classes <= launch.LONGEST_TILE
        settings = tile_settings(classes) if tiled else row_settings()
        out = torch.empty_like(z)
        copied = milliseconds(partial(out.copy_, z), cache)
        print(f"{name}: a copy takes {copied:.4f} ms")
        for ms, setting in sorted(measure(rows, settings, cache))[:8]:
            print(f"  {ms:.4f} ms  {setting}", flush=True)


if __name__ == "__main__":
    main()
