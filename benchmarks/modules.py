"""Measure microseconds per model and step of any network: our graphs against alternatives.

    python -m benchmarks.modules --out benchmarks/results/modules_cuda.csv

All figures cover whole trainings: shuffling, gathering batches on the device, training, and an
evaluation after every epoch. Ours also include the creation of slots, weights and graphs, for 16
trainings. Compilation is measured separately, for us and for others. The run takes about three
minutes. The contenders:

- eager: a PyTorch loop, one training at a time;
- compiled: the same with torch.compile(mode="reduce-overhead"), whose steps are CUDA graphs;
- 4 and 8 processes: the eager loop in processes that share the GPU, as when Ray Tune gives each
  trial a fraction of a GPU (without Ray's own overhead);
- graphs: `ModuleFleet`, 8 trials at once, compiled or not.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.environment import RESULTS, environment, write
from benchmarks.networks import CASES, EXAMPLES, Case
from pseudograd.fleet.modules.examples import Examples
from pseudograd.fleet.modules.fleet import ModuleFleet
from pseudograd.fleet.modules.training import Training
from pseudograd.fleet.trial import Split, Trial

RATE, MOMENTUM, VALIDATION = 0.01, 0.9, 0.1
SHARES = (4, 8)  # processes on the GPU
TRIALS = 16  # graphs that are not compiled get half as many, half as long


def noise(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return random inputs and labels in the shape of a real set; speed does not depend on them."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (EXAMPLES,), generator=generator)
    return torch.rand(EXAMPLES, *shape, generator=generator), labels


class Loop:
    """A well-written eager loop: data on the device, no synchronization within an epoch."""

    def __init__(self, case: Case, compiled: bool) -> None:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        x, y = noise(case.shape)
        held = int(EXAMPLES * VALIDATION)
        self.x, self.y, self.case = x.cuda(), y.cuda(), case
        self.held = torch.arange(held, device="cuda")
        self.trained = torch.arange(held, EXAMPLES, device="cuda")
        self.module = case.network().cuda()
        self.forward: Any = self.module
        if compiled:
            self.forward = torch.compile(self.module, mode="reduce-overhead")
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=RATE, momentum=MOMENTUM)
        self.steps = len(self.trained) // case.batch_size

    def autocast(self) -> torch.autocast:
        return torch.autocast("cuda", torch.bfloat16, enabled=self.case.precision == "bf16")

    def epoch(self) -> None:
        self.module.train()
        order = self.trained[torch.randperm(len(self.trained), device="cuda")]
        for rows in order[: self.steps * self.case.batch_size].split(self.case.batch_size):
            x, y = self.x[rows], self.y[rows]
            with self.autocast():
                logits = self.forward(x)
            loss = F.cross_entropy(logits.float(), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        self.module.eval()
        wrong = torch.zeros((), device="cuda")
        with torch.no_grad(), self.autocast():
            for rows in self.held.split(4 * self.case.batch_size):
                wrong += (self.module(self.x[rows]).argmax(1) != self.y[rows]).sum()
        wrong.item()

    def microseconds(self, epochs: int) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(epochs):
            self.epoch()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / (epochs * self.steps) * 1e6


class Processes:
    """Processes that share the GPU, each running an eager loop."""

    def __init__(self, count: int) -> None:
        command = [sys.executable, "-m", "benchmarks.modules", "--child"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.children = [subprocess.Popen(command, **pipes) for _ in range(count)]

    def microseconds(self, name: str, count: int, epochs: int) -> float:
        """Train in ``count`` processes; return the microseconds per model and step."""
        children = self.children[:count]
        self._tell(children, name)
        steps = [int(child.stdout.readline()) for child in children]  # type: ignore[union-attr]
        began = time.perf_counter()
        self._tell(children, str(epochs))
        for child in children:
            child.stdout.readline()  # type: ignore[union-attr]
        return (time.perf_counter() - began) / (epochs * sum(steps)) * 1e6

    def _tell(self, children: list[Any], line: str) -> None:
        for child in children:
            child.stdin.write(line + "\n")
            child.stdin.flush()

    def close(self) -> None:
        for child in self.children:
            child.communicate()


def child() -> None:
    """Train networks on commands from standard input: a name, then the number of epochs."""
    for line in sys.stdin:
        loop = Loop(CASES[line.strip()], compiled=False)
        loop.epoch()
        torch.cuda.synchronize()
        print(loop.steps, flush=True)
        loop.microseconds(int(sys.stdin.readline()))
        print("done", flush=True)
        del loop
        torch.cuda.empty_cache()


def prepared(case: Case, epochs: int, compiled: bool) -> tuple[Training, Examples]:
    """Return the training and the data for our fleet."""
    x, y = noise(case.shape)
    training = Training(
        case.network,
        torch.optim.SGD,
        {"momentum": MOMENTUM},
        epochs=epochs,
        batch_size=case.batch_size,
        validation=VALIDATION,
        precision=case.precision,
        compile=compiled,
    )
    return training, Examples.of((x, y), (x[:1000], y[:1000]))


def graphs(case: Case, compiled: bool) -> dict[str, float]:
    """Return our fleet's microseconds per model and step, and the GPU utilization."""
    epochs = case.epochs if compiled else case.epochs // 2
    training, examples = prepared(case, epochs, compiled)
    recipe = training.recipe("noise")
    count = TRIALS if compiled else TRIALS // 2
    trials = [Trial(recipe, 0.5, RATE, Split(0, at), seed=at) for at in range(count)]
    fleet = ModuleFleet(training, examples, "cuda")
    began = time.perf_counter()
    done = list(fleet.run(trials[:1]))
    first = time.perf_counter() - began
    steps = (EXAMPLES - round(EXAMPLES * VALIDATION)) // case.batch_size * epochs
    torch.cuda.synchronize()
    with watched() as busy:
        began = time.perf_counter()
        done = list(fleet.run(trials))
        torch.cuda.synchronize()
        passed = time.perf_counter() - began
    assert len(done) == count, fleet.notes
    print("   ", fleet.notes, flush=True)
    return {
        "microseconds": passed / (count * steps) * 1e6,
        "first_seconds": first,
        "busy": sum(busy) / max(1, len(busy)),
    }


@contextmanager
def watched() -> Iterator[list[float]]:
    """Sample the GPU utilization that the driver reports."""
    samples: list[float] = []
    command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms",
               "100"]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as smi:

        def read() -> None:
            samples.extend(float(line) / 100 for line in smi.stdout)  # type: ignore[union-attr]

        reader = threading.Thread(target=read)
        reader.start()
        try:
            yield samples
        finally:
            smi.terminate()
            reader.join()


def measured(name: str, case: Case, shared: dict[int, float]) -> Iterator[dict[str, object]]:
    def row(way: str, microseconds: float, **more: float) -> dict[str, object]:
        figures: dict[str, Any] = {"first_seconds": "", "busy": "", **more}
        print(f"{name}: {way}: {microseconds:.0f} µs", figures, flush=True)
        return {
            "network": name,
            "batch_size": case.batch_size,
            "precision": case.precision,
            "way": way,
            "microseconds": round(microseconds, 1),
            **{k: v if v == "" else round(float(v), 3) for k, v in figures.items()},
        }

    epochs = max(1, case.epochs // 4)
    for way, compiled in (("eager", False), ("compiled, reduce-overhead", True)):
        loop = Loop(case, compiled)
        began = time.perf_counter()
        loop.epoch()
        torch.cuda.synchronize()
        first = time.perf_counter() - began
        yield row(way, loop.microseconds(epochs), first_seconds=first)
        del loop
        torch.cuda.empty_cache()
    for count, microseconds in shared.items():
        yield row(f"{count} processes", microseconds)
    for way, compiled in (("graphs", False), ("graphs, compiled", True)):
        found = graphs(case, compiled)
        yield row(way, found.pop("microseconds"), **found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "modules_cuda.csv")
    parser.add_argument("--networks", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child()
        return
    processes = Processes(max(SHARES))
    shared = {
        name: {
            count: processes.microseconds(name, count, max(1, CASES[name].epochs // 10))
            for count in SHARES
        }
        for name in options.networks
    }
    processes.close()
    rows: list[dict[str, object]] = []
    about = environment("cuda")
    for name in options.networks:
        found = list(measured(name, CASES[name], shared[name]))
        eager = float(str(found[0]["microseconds"]))
        for row in found:
            speedup = eager / float(str(row["microseconds"]))
            rows.append({**row, "times_eager": round(speedup, 2), **about})
        write(rows, options.out)


if __name__ == "__main__":
    main()
