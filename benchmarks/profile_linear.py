"""Profile the linear layer with its loss, kernel by kernel, for us and the fastest peers.

    python -m benchmarks.profile_linear

For comparison, it also times the three matrix products alone, as PyTorch (cuBLAS) computes them for
chunks of rows. Their sum is a lower bound for every implementation that uses them, except that
products alone lower the GPU's clock most.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.environment import RESULTS, environment, write
from benchmarks.loss_cuda import LINEAR, Loss, linear_inputs, of_linear, peer_versions

WAYS = (
    "torch.compile",
    "linear, quack",
    "liger, CuTe",
    "liger, CuTe, logits twice",
    "quack, 2048 rows",
    "quack, 8192 rows",
    "ours k=1",
    "ours k=0.5",
    "ours k=2",
    "ours k=per row",
    "ours k=0.5, 2048 rows",
    "ours k=0.5, 8192 rows",
)
CALLS = 10
CHUNKS = (2048, 4096, 8192)

Run = Callable[[], None]


def products(hidden: Tensor, weight: Tensor, rows: int) -> dict[str, Run]:
    """Return the three matrix products for chunks of rows, as functions without arguments."""
    logits = torch.empty(len(hidden), len(weight), dtype=hidden.dtype, device="cuda")
    of_hidden, of_weight = torch.empty_like(hidden), torch.empty_like(weight)
    chunks = [slice(start, start + rows) for start in range(0, len(hidden), rows)]

    def forward() -> None:
        for part in chunks:
            torch.mm(hidden[part], weight.t(), out=logits[part])

    def to_hidden() -> None:
        for part in chunks:
            torch.mm(logits[part], weight, out=of_hidden[part])

    def to_weight() -> None:
        for part in chunks:
            of_weight.addmm_(logits[part].t(), hidden[part], beta=float(part.start > 0))

    def all_three() -> None:
        forward()
        to_hidden()
        to_weight()

    return {
        f"{name}, {rows} rows": run
        for name, run in (
            ("logits", forward),
            ("gradient of hidden", to_hidden),
            ("gradient of weight", to_weight),
            ("all three products", all_three),
        )
    }


def kernels(run: Run) -> dict[str, tuple[int, float]]:
    """Return the launches and milliseconds of each kernel per call, the slowest first."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(CALLS):
            run()
        torch.cuda.synchronize()
    found: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for event in seen.key_averages():
        launches, ms = found[event.key]
        found[event.key] = launches + event.count, ms + event.self_device_time_total / 1000
    per_call = {name: (launches // CALLS, ms / CALLS) for name, (launches, ms) in found.items()}
    used = {name: both for name, both in per_call.items() if both[1] > 0}
    return dict(sorted(used.items(), key=lambda item: -item[1][1]))


def step(loss: Loss, leaves: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> Run:
    """Return a function that runs a forward and a backward pass."""

    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        loss(*leaves, *others).backward()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=RESULTS / "profile_linear_cuda.csv")
    out = parser.parse_args().out
    facts = environment("cuda")
    peers, lines = peer_versions(), []
    for dtype, rows, width, classes in LINEAR:
        hidden, weight, target, ks = linear_inputs(dtype, rows, width, classes)
        shape = f"{rows}x{width}x{classes}"
        contenders = of_linear()
        runs = {name: step(contenders[name], (hidden, weight), (target, ks)) for name in WAYS
                if name in contenders}  # fmt: skip
        for chunk in CHUNKS:
            runs |= products(hidden.detach(), weight.detach(), chunk)
        for name, run in runs.items():
            try:
                found = kernels(run)
            except Exception as error:  # quack fails if chunks have as many rows as the width
                print(f"left out here: {name} ({str(error)[:100]})")
                continue
            total = sum(ms for _, ms in found.values())
            print(f"{shape} {name}: {total:.2f} ms", flush=True)
            for kernel, (launches, ms) in found.items():
                if ms > 0.005 * total:
                    print(f"  {ms:8.3f} ms  {launches:3d}  {kernel[:100]}", flush=True)
                    lines.append(
                        {"shape": shape, "dtype": str(dtype).removeprefix("torch."), "way": name,
                         "kernel": kernel[:120], "launches": launches, "ms": f"{ms:.4f}",
                         "ms_of_all": f"{total:.4f}", "calls": CALLS, **peers, **facts}
                    )  # fmt: skip
        write(lines, out)
        del runs, hidden, weight
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
