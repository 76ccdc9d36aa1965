"""Measure microseconds per model and training step: the fleet against alternatives, in one run.

    python -m benchmarks.fleet --device cuda --out benchmarks/results/fleet_cuda.csv

The fleet's figure covers whole trials (twice as many as slots): shuffling, gathering, training,
evaluation after every epoch, early stopping and refilling of slots. The figures of the others cover
only the training step, with batches gathered on the device, which favours them. On a CPU, where
other processes disturb the timing, all take turns, and figures are medians over the turns.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.environment import environment, write
from pseudograd import tunable_cross_entropy
from pseudograd.data import Dataset, digits
from pseudograd.fleet import Fleet, MLPRecipe, Split, Trial

BATCH, K, RATE, MOMENTUM = 128, 0.5, 0.01, 0.5
ROUNDS = 5
BYTES = 20  # per parameter and step: weight read twice and written, momentum read and written


def pixels(name: str, examples: int, features: int) -> Dataset:
    """Return random images in the shape of a real set; speed does not depend on the content."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (examples, features), generator=generator, dtype=torch.uint8)
    return Dataset(name, images, torch.randint(10, (examples,), generator=generator), examples)


# Network, data set, hidden layers, slots, epochs per trial.
Case = tuple[str, Dataset, tuple[int, ...], int, int]


def cases(device: str) -> Iterator[Case]:
    if device == "cpu":
        yield "64-400-10", digits(), (400,), 8, 20
        return
    mnist, cifar = pixels("mnist", 60_000, 784), pixels("cifar", 50_000, 3072)
    yield "784-400-10", mnist, (400,), 256, 15
    yield "3072-800-10", cifar, (800,), 256, 5
    yield "3072-5x800-10", cifar, (800,) * 5, 256, 4
    yield "784-1100-10", mnist, (1100,), 256, 8


class Bench:
    """One network on one device, timed in several ways."""

    def __init__(self, case: Case, device: str) -> None:
        self.name, self.data, self.hidden, self.slots, self.epochs = case
        self.device = torch.device(device)
        self.sizes = (self.data.features.shape[1], *self.hidden, self.data.classes)
        self.parameters = sum((i + 1) * o for i, o in itertools.pairwise(self.sizes))
        self.features = self.data.features.to(self.device)
        self.labels = self.data.labels.to(self.device)
        self.clip = 100.0 if len(self.hidden) > 1 else None
        self.steps = -(-(self.data.train_size // 5 * 3) // BATCH)  # of an epoch

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def timed(self, step: Callable[[], Any], steps: int, repeats: int = 5) -> float:
        """Return the median microseconds of a step."""
        for _ in range(3):
            step()
        times = []
        for _ in range(repeats):
            self.sync()
            start = time.perf_counter()
            for _ in range(steps):
                step()
            self.sync()
            times.append((time.perf_counter() - start) / steps)
        return statistics.median(times) * 1e6

    def batch(self, *models: int) -> tuple[Tensor, Tensor]:
        index = torch.randint(len(self.labels), (*models, BATCH), device=self.device)
        low, high = self.data.value_range
        x = self.features[index].float().mul_(2 / (high - low)).sub_(1)
        return x, self.labels[index]

    def network(self) -> nn.Sequential:
        layers: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise(self.sizes):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*layers[:-1]).to(self.device)

    def plain_step(self) -> Callable[[], None]:
        network = self.network()
        optimizer = torch.optim.SGD(network.parameters(), RATE, MOMENTUM)

        def step() -> None:
            x, y = self.batch()
            optimizer.zero_grad()
            tunable_cross_entropy(network(x), y, k=K).backward()
            if self.clip:
                nn.utils.clip_grad_norm_(network.parameters(), self.clip)
            optimizer.step()

        return step

    def plain_loop(self) -> float:
        return self.timed(self.plain_step(), steps=100)

    def compiled(self) -> float:
        network = self.network()
        optimizer = torch.optim.SGD(network.parameters(), RATE, MOMENTUM)

        def step(x: Tensor, y: Tensor) -> None:
            tunable_cross_entropy(network(x), y, k=K).backward()
            if self.clip:
                nn.utils.clip_grad_norm_(network.parameters(), self.clip)
            optimizer.step()
            optimizer.zero_grad()

        fast = torch.compile(step)
        return self.timed(lambda: fast(*self.batch()), steps=100)

    def graphed(self) -> float:
        """Time the plain step, captured as a CUDA graph."""
        step = self.plain_step()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return self.timed(graph.replay, steps=100)

    def ensemble(self, models: int) -> float:
        """Time an ensemble by torch.func: stack_module_state and vmap."""
        networks = [self.network() for _ in range(models)]
        parameters, _ = torch.func.stack_module_state(networks)
        momenta = {name: torch.zeros_like(value) for name, value in parameters.items()}
        skeleton = self.network().to("meta")

        def loss(own: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return tunable_cross_entropy(torch.func.functional_call(skeleton, own, (x,)), y, k=K)

        gradients_of = torch.func.vmap(torch.func.grad(loss))

        @torch.no_grad()
        def step() -> None:
            gradients = gradients_of(parameters, *self.batch(models))
            for name, gradient in gradients.items():
                momenta[name].mul_(MOMENTUM).add_(gradient.detach())
                parameters[name].sub_(momenta[name], alpha=RATE)

        return self.timed(step, steps=10) / models

    def fleet(self) -> float:
        """Time whole trials of the fleet."""
        recipe = MLPRecipe(
            self.data.name, self.hidden, momentum=MOMENTUM, clip=self.clip, patience=10**6,
            max_epochs=self.epochs,
        )  # fmt: skip
        trials = [
            Trial(recipe, 2.0 ** (at % 7 - 4), RATE, Split(0, at % 10), seed=at)
            for at in range(280 if self.device.type == "cpu" else 2 * self.slots)
        ]
        fleet = Fleet(self.data, self.device, slots=self.slots)
        warm_up = [replace(trial, recipe=recipe.shortened(2)) for trial in trials[: self.slots]]
        for _ in fleet.run(warm_up):  # warm up and compile
            pass
        self.sync()
        start = time.perf_counter()
        epochs = sum(outcome.epochs for outcome in fleet.run(trials))
        self.sync()
        return (time.perf_counter() - start) / (epochs * self.steps) * 1e6


def copy_bandwidth() -> float:
    """Return the bytes per second that a large copy on the GPU reads and writes."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(20):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return float(2 * source.numel() / (statistics.median(times) / 1e3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path, required=True, help="the CSV file to write")
    parser.add_argument("--network", help="only this one, for example 784-400-10")
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    if on_gpu:
        torch.set_float32_matmul_precision("high")  # TF32 for all contenders
    bandwidth = copy_bandwidth() if on_gpu else None
    facts = environment()
    rows = []
    for case in cases(arguments.device):
        bench = Bench(case, arguments.device)
        if arguments.network not in (None, bench.name):
            continue
        ways = {"fleet, all in": bench.fleet, "plain loop": bench.plain_loop}
        if on_gpu:
            ways["one model, CUDA graph"] = bench.graphed
        else:
            ways["one model, torch.compile"] = bench.compiled
        models = min(bench.slots, 64)
        ways[f"torch.func ensemble of {models}"] = functools.partial(bench.ensemble, models)
        taken: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(1 if on_gpu else ROUNDS):
            for way, measure in ways.items():
                taken[way].append(measure())
        plain = statistics.median(taken["plain loop"])
        floor = bench.parameters * BYTES / bandwidth * 1e6 if bandwidth else None
        for way, turns in taken.items():
            microseconds = statistics.median(turns)
            trials = 3.6e9 / (microseconds * bench.steps * bench.epochs)
            row = {
                "network": bench.name,
                "way": way,
                "us_per_model_step": round(microseconds, 2),
                "times_plain_loop": round(plain / microseconds, 2),
                "share_of_memory_floor": round(floor / microseconds, 3) if floor else "",
                "trials_per_hour": round(trials) if way == "fleet, all in" else "",
                "slots": bench.slots,
                "epochs_a_trial": bench.epochs,
                "rounds": len(turns),
                "copy_tb_per_s": round(bandwidth / 1e12, 2) if bandwidth else "",
                **facts,
            }
            rows.append(row)
            print(" | ".join(str(value) for value in list(row.values())[:6]), flush=True)
        write(rows, arguments.out)


if __name__ == "__main__":
    main()
