"""Estimate how long the paper's 67 rows take on one GPU, from measured epochs of every network.

    python -m benchmarks.fleet_rows --measure       # on a GPU, about 7 minutes: measure, estimate
    python -m benchmarks.fleet_rows                 # anywhere: estimate from the measured file
    python -m benchmarks.fleet_rows --measure --at-once 6 --file fleet_rows_6_cuda.csv

All rows would take more than an hour, so this measures a few epochs of each of their networks, for
several numbers of trials, in fleets side by side, as in ``python -m paper run``. The times include
shuffling, training, evaluation and early stopping. All points are measured in turn, several times
if the limit allows, and their medians count. The estimate then replays the trials of the
committed ledgers epoch by epoch, as a fleet would train them, and prints whether the rows reach the
goal: 75% of the speed that memory bandwidth allows.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import multiprocessing
import os
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.environment import environment, write
from benchmarks.fleet import BYTES, copy_bandwidth
from pseudograd.cli.place import FLEETS_ON_A_GPU
from pseudograd.data import Dataset
from pseudograd.fleet import Fleet, MLPRecipe, Outcome, Split, Stop, Trial

if TYPE_CHECKING:
    from paper.rows import Row

FILE = Path("benchmarks/results/fleet_rows_cuda.csv")
GOAL = 0.75  # of the speed that memory bandwidth allows, over all rows
MOST_SLOTS = 256  # as in `pseudograd.fleet.mlp.fleet`
# Trials per fleet, epochs to time, and the fraction of the examples per epoch: with many trials,
# epochs are long and the time between them matters little. The most informative point comes first,
# so that a run that is cut short still has a figure for every network.
POINTS = (
    (32, 3, 0.4),
    (4, 4, 0.4),
    (128, 3, 0.25),
    (16, 3, 0.4),
    (1, 4, 0.4),
    (8, 4, 0.4),
    (2, 4, 0.4),
)
MOST_TURNS = 4
SETS = {  # features, classes, training examples
    "mnist": (784, 10, 60_000),
    "cifar10": (3072, 10, 50_000),
    "svhn": (3072, 10, 73_257),
    "cifar100": (3072, 100, 50_000),
}
MEASURED = ("mnist", "cifar10", "cifar100")  # SVHN's networks are those of CIFAR-10
HIDDEN = [(1, 400), (1, 800), (1, 1100), (3, 400), (3, 800), (5, 400), (5, 800)]


def steps_of(examples: int) -> int:
    """Return the steps of an epoch on three fifths of the examples."""
    return -(-(examples // 5 * 3) // 128)


def weights_of(data: str, depth: int, width: int) -> int:
    inputs, classes, _ = SETS[data]
    sizes = (inputs, *[width] * depth, classes)
    return sum((before + 1) * after for before, after in itertools.pairwise(sizes))


# --- measuring ------------------------------------------------------------------------------------


def noise(data: str, share: float) -> Dataset:
    """Return random pixels in the shape of a real set, with labels by a linear teacher."""
    inputs, classes, examples = SETS[data]
    examples = int(share * examples) // 5 * 5
    generator = torch.Generator(device="cuda").manual_seed(0)
    shape = (examples, inputs)
    pixels = torch.randint(256, shape, generator=generator, dtype=torch.uint8, device="cuda")
    teacher = torch.randn(inputs, classes, generator=generator, device="cuda")
    labels = (pixels.float().sub_(127.5) @ teacher).argmax(1)
    return Dataset(data, pixels.cpu(), labels.cpu(), examples)


def seconds_of(fleet: Fleet, recipe: MLPRecipe, trials: int, epochs: int, at_once: int) -> float:
    """Return the seconds that ``at_once`` fleets take for the given trials and epochs each."""
    recipe = replace(recipe, max_epochs=epochs)

    def work(_: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            asked = [
                Trial(recipe, 2.0 ** (at % 7 - 4), 0.002, Split(0, at % 10), seed=at)
                for at in range(trials)
            ]
            for _outcome in fleet.run(asked):
                pass

    torch.cuda.synchronize()
    start = time.perf_counter()
    with ThreadPoolExecutor(at_once) as threads:
        list(threads.map(work, range(at_once)))
    torch.cuda.synchronize()
    return time.perf_counter() - start


def compile_kernels(network: tuple[str, tuple[int, int]]) -> None:
    """Train a network for an epoch, which compiles its kernels into Triton's cache."""
    data, (depth, width) = network
    fleet = Fleet(noise(data, 0.02), "cuda", slots=MOST_SLOTS)
    seconds_of(fleet, recipe_of(data, depth, width), POINTS[0][0], 1, 1)


def recipe_of(data: str, depth: int, width: int) -> MLPRecipe:
    clip = 100.0 if depth > 1 else None
    return MLPRecipe(data, (width,) * depth, momentum=0.9, clip=clip, patience=10**6)


def measure(at_once: int, seconds: float) -> Iterator[list[dict[str, object]]]:
    """Yield the lines of all points measured so far, again and again until the time limit."""
    spawn = multiprocessing.get_context("spawn")
    begun = time.monotonic()
    with ProcessPoolExecutor(os.cpu_count(), spawn) as pool:
        list(pool.map(compile_kernels, itertools.product(MEASURED, HIDDEN)))
    print(f"compiling took {time.monotonic() - begun:.0f} s", flush=True)
    bandwidth, facts, began = copy_bandwidth(), environment(), time.monotonic()
    found: dict[tuple[str, int, int, int], list[tuple[float, float, float]]] = defaultdict(list)

    def line(point: tuple[str, int, int, int]) -> dict[str, object]:
        data, depth, width, trials = point
        turns, begins, peaks = zip(*found[point], strict=True)
        per_step = statistics.median(turns)
        floor = weights_of(data, depth, width) * BYTES / bandwidth
        return {
            "data": data,
            "depth": depth,
            "width": width,
            "trials": trials,
            "fleets_at_once": at_once,
            "us_per_model_step": round(1e6 * per_step, 3),
            "share_of_memory_floor": round(floor / per_step, 3),
            "seconds_to_begin": round(statistics.median(begins), 4),
            "turns": len(turns),
            "spread": round(max(turns) / min(turns), 3),
            "peak_gb": round(max(peaks), 2),
            "copy_tb_per_s": round(bandwidth / 1e12, 2),
            **facts,
        }

    sets: dict[tuple[str, float], Fleet] = {}
    for _, (trials, epochs, share), data in itertools.product(range(MOST_TURNS), POINTS, MEASURED):
        if (data, share) not in sets:
            sets[data, share] = Fleet(noise(data, share), "cuda", slots=MOST_SLOTS)
        fleet = sets[data, share]
        steps = steps_of(fleet.data.train_size)
        for depth, width in HIDDEN:
            if time.monotonic() - began > seconds:
                return
            recipe, point = recipe_of(data, depth, width), (data, depth, width, trials)
            if not found[point]:
                seconds_of(fleet, recipe, trials, 1, 1)  # warm up
            torch.cuda.reset_peak_memory_stats()
            first = seconds_of(fleet, recipe, trials, 1, at_once)
            more = seconds_of(fleet, recipe, trials, 1 + epochs, at_once)
            epoch = (more - first) / (epochs * at_once)
            peak = torch.cuda.max_memory_allocated() / 1e9
            to_begin = max(0.0, first / at_once - epoch)
            found[point].append((epoch / (steps * trials), to_begin, peak))
            yield [line(point) for point in found]


# --- estimating -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Costs:
    """The costs of one network in a fleet that shares the GPU.

    Attributes:
        trials: The numbers of trials trained together, ascending.
        step: The seconds of a step of all of them.
        begin: The seconds to start a stack of that size.

    """

    trials: Sequence[int]
    step: Sequence[float]
    begin: Sequence[float]

    def of_step(self, trials: int) -> float:
        """Return the seconds of a step, interpolated; above the measured range, proportional."""
        low, high = self.trials[0], self.trials[-1]
        if trials <= low:
            return self.step[0]
        if trials >= high:
            return self.step[-1] * trials / high
        at = next(at for at, there in enumerate(self.trials) if there >= trials)
        (a, b), (s, t) = self.trials[at - 1 : at + 1], self.step[at - 1 : at + 1]
        return s + (t - s) * (trials - a) / (b - a)

    def of_begin(self, trials: int) -> float:
        return min(zip(self.trials, self.begin, strict=True), key=lambda b: abs(b[0] - trials))[1]


def costs_in(path: Path) -> tuple[dict[tuple[str, int, int], Costs], float]:
    """Return the measured costs by network, and the memory bandwidth of that GPU."""
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    found: dict[tuple[str, int, int], list[dict[str, str]]] = defaultdict(list)
    for line in lines:
        found[line["data"], int(line["depth"]), int(line["width"])].append(line)
    costs = {}
    for network, points in found.items():
        points.sort(key=lambda line: int(line["trials"]))
        trials = [int(line["trials"]) for line in points]
        each = [1e-6 * float(line["us_per_model_step"]) for line in points]
        begin = [float(line["seconds_to_begin"]) for line in points]
        costs[network] = Costs(
            trials, [one * n for one, n in zip(each, trials, strict=True)], begin
        )
    return costs, 1e12 * float(lines[0]["copy_tb_per_s"])


def seconds_of_row(row: Row, costs: Costs, floor: float) -> tuple[float, float]:
    """Return a row's seconds, estimated and at the memory floor.

    The row's study is replayed with outcomes from its ledger and slots as in `Crew`. ``floor`` is
    the least possible time of a step of one model.
    """
    from paper.rows import Experiment
    from paper.run import study_of
    from pseudograd.search import Study

    study, seconds, least = study_of(Experiment(row), Path("paper/results")), 0.0, 0.0

    def runner(queue: deque[Trial], stop: Stop) -> Iterator[Outcome]:
        nonlocal seconds, least
        examples = SETS[row.data][2]
        trained = examples - examples // 5 if queue[0].split.retrain else examples // 5 * 3
        steps, slots = -(-trained // 128), min(MOST_SLOTS, len(queue))
        seconds += costs.of_begin(slots)
        left: dict[Trial, int] = {}  # remaining epochs of the trials in training
        while queue or left:
            while queue and len(left) < slots:
                trial = queue.popleft()
                left[trial] = study.ledger[trial].epochs
            seconds += steps * costs.of_step(len(left))
            least += steps * floor * len(left)
            left = {trial: epochs - 1 for trial, epochs in left.items()}
            for trial in [trial for trial, epochs in left.items() if not epochs]:
                del left[trial]
                yield study.ledger[trial]
            wanted = min(MOST_SLOTS, len(left) + len(queue))
            more = wanted > slots and wanted >= min(2 * slots, MOST_SLOTS)
            if more or (not queue and 0 < len(left) <= slots // 2):
                slots = wanted
                seconds += costs.of_begin(slots)

    Study(None, study.protocol).run(runner)
    return seconds, least


def estimate(path: Path) -> Iterator[tuple[Row, float, float]]:
    """Yield the paper's rows, each with its seconds, estimated and at the memory floor."""
    from paper.rows import paper_rows

    measured, bandwidth = costs_in(path)
    for row in (row for row in paper_rows() if row.printed):
        alike = "cifar10" if row.data == "svhn" else row.data
        costs = measured.get((alike, row.hidden_layers, row.width))
        if costs is None:
            raise SystemExit(f"{path} has no epochs of {row.name}: measure with a longer limit")
        floor = weights_of(row.data, row.hidden_layers, row.width) * BYTES / bandwidth
        yield row, *seconds_of_row(row, costs, floor)


def estimate_of(path: Path) -> Path:
    """Return the file for the estimate from measured epochs: beside them, of a similar name."""
    return path.with_name(f"{path.stem.removesuffix('_cuda')}_estimate.csv")


def show(path: Path) -> None:
    """Print and write the estimate for each network and in total, and compare it with the goal."""
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for row, seconds, least in estimate(path):
        for name in (f"{row.data} {row.hidden_layers}x{row.width}", "all rows"):
            for at, number in enumerate((1, seconds, least)):
                totals[name][at] += number
    lines = [
        {
            "network": name,
            "rows": rows,
            "minutes": round(seconds / 60, 1),
            "memory_floor_minutes": round(least / 60, 1),
            "share_of_memory_floor": round(least / seconds, 3),
        }
        for name, (rows, seconds, least) in sorted(totals.items(), key=lambda one: one[1][1])
    ]
    for line in lines:
        print("{:<18}{:>5}{:>9}{:>8}{:>7}".format(*line.values()))
    write(lines, estimate_of(path))
    _, seconds, least = totals["all rows"]
    reached = "reached" if least / seconds >= GOAL else "missed"
    print(f"goal of {GOAL} over all rows: {reached}, at {least / seconds:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--measure", action="store_true", help="measure first, on a GPU")
    parser.add_argument(
        "--at-once", type=int, default=FLEETS_ON_A_GPU, metavar="N",
        help=f"fleets to run at once ({FLEETS_ON_A_GPU}, as in paper run)",
    )  # fmt: skip
    parser.add_argument("--file", type=Path, default=FILE, help="the measured epochs")
    parser.add_argument(
        "--time-limit", type=float, default=5.5, metavar="MINUTES", help="stop measuring then (5.5)"
    )
    arguments = parser.parse_args()
    if arguments.measure:
        lines: list[dict[str, object]] = []
        for lines in measure(arguments.at_once, 60 * arguments.time_limit):
            write(lines, arguments.file, quiet=True)
        for line in lines:
            print(*list(line.values())[:11], flush=True)
    if not arguments.file.exists():
        parser.error(f"{arguments.file} does not exist: measure first, with --measure on a GPU")
    show(arguments.file)


if __name__ == "__main__":
    main()
