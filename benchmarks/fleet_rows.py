"""Estimate how long the paper's 67 rows take on one GPU, from measured epochs of every network.

    python -m benchmarks.fleet_rows --measure                   # on a GPU: measure, estimate
    python -m benchmarks.fleet_rows --measure --at-once 6 3     # with 6 fleets, and then with 3
    python -m benchmarks.fleet_rows                             # anywhere: estimate from the file

All rows would take more than an hour, so this measures some epochs of their networks, for several
numbers of trials, in fleets side by side, as in ``python -m paper run``. An epoch counts if all
fleets were past their second one, which ends the captures of graphs, until the first fleet
stopped. It includes shuffling, training, evaluation and early stopping. If a fleet waits for the
others all the time, they stop after some seconds. Then all epochs count, over the time from the
first start to the last end, which is an upper bound. SVHN's networks are CIFAR-10's; CIFAR-100's
have some more weights, and their steps count as that much longer.

All points are measured in turn, several times if the limit allows, and their medians count. The
estimate then replays the trials of the committed ledgers epoch by epoch, as a fleet would train
them, and prints whether the rows reach the goal: 75% of the speed that memory bandwidth allows.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import faulthandler
import functools
import heapq
import itertools
import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.environment import environment, write
from benchmarks.fleet import BYTES, copy_bandwidth
from paper.cli import FLEETS_ON_A_GPU
from pseudograd.data import Dataset
from pseudograd.fleet import Fleet, MLPRecipe, Outcome, Split, Stop, Trial

if TYPE_CHECKING:
    from paper.rows import Row

FILE = Path("benchmarks/results/fleet_rows_cuda.csv")
GOAL = 0.75  # of the speed that memory bandwidth allows, over all rows
MOST_SLOTS = 256  # as in `pseudograd.fleet.mlp.fleet`
# Trials per fleet. The most informative come first, so that a run that is cut short still has
# figures for every network.
POINTS = (8, 32, 2, 128, 16, 1, 4)
SHARES = (1.0, 0.5, 0.25, 0.125)  # of the examples
LONGEST = 0.05  # seconds of an epoch at the memory floor; for longer ones, examples are left out
LEAST = 0.3  # seconds to measure; a longer epoch is measured once
WARM = 2  # epochs before that
PATIENCE = 3.0  # seconds, and ten epochs at the memory floor: fleets stop then in any case
SLOW = 12.0  # seconds of a point after which all threads' tracebacks are written
HUNG = 45.0  # seconds after which the process ends
BEFORE = 2  # calls of `stop` before the first epoch
MOST_TURNS = 4
SETS = {  # features, classes, training examples
    "mnist": (784, 10, 60_000),
    "cifar10": (3072, 10, 50_000),
    "svhn": (3072, 10, 73_257),
    "cifar100": (3072, 100, 50_000),
}
MEASURED = ("mnist", "cifar10")
ALIKE = {"svhn": "cifar10", "cifar100": "cifar10"}  # sets of as many inputs
Network = tuple[str, int, int]  # data, hidden layers, width
Point = tuple[int, int, Network]  # fleets at once, trials of each
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


def trials_of(recipe: MLPRecipe, count: int) -> list[Trial]:
    """Return trials with various k, splits and seeds."""
    return [
        Trial(recipe, 2.0 ** (at % 7 - 4), 0.002, Split(0, at % 10), seed=at) for at in range(count)
    ]


def side_by_side(work: Callable[[int], object], at_once: int) -> float:
    """Return the seconds of work that runs in several threads, each on its own CUDA stream."""

    def on_own_stream(at: int) -> None:
        threading.current_thread().name = f"fleet {at}"
        with torch.cuda.stream(stream(at)):
            work(at)

    torch.cuda.synchronize()
    start = time.perf_counter()
    with ThreadPoolExecutor(at_once) as threads:
        list(threads.map(on_own_stream, range(at_once)))
    torch.cuda.synchronize()
    return time.perf_counter() - start


@functools.cache
def stream(at: int) -> torch.cuda.Stream:
    """Return the stream of the fleet number ``at``, which keeps its cached memory."""
    return torch.cuda.Stream()


def seconds_of_one_epoch(fleet: Fleet, recipe: MLPRecipe, trials: int, at_once: int) -> float:
    """Return the seconds that fleets take from start to end for trials of one epoch."""
    asked = trials_of(replace(recipe, max_epochs=1), trials)
    return side_by_side(lambda _: deque(fleet.run(asked), maxlen=0), at_once)


@dataclass(frozen=True)
class Turn:
    """A measurement of several fleets that train the same network.

    Attributes:
        epoch: The seconds of an epoch of one of the fleets, divided by their number.
        begin: The seconds to start a stack, captures of graphs included, without its epochs.
        epochs: How many epochs each fleet trained.
        together: The seconds for which all fleets trained at once, or 0 if a fleet waited.

    """

    epoch: float
    begin: float
    epochs: tuple[int, ...]
    together: float


class Pace:
    """Records when each of several fleets ends its epochs, and says when they should stop.

    They stop when all have trained for ``LEAST`` seconds past their first epochs, when one fails,
    or when ``most`` seconds have passed: a fleet may wait as long as the others train.
    """

    def __init__(self, at_once: int, most: float) -> None:
        self.calls: list[list[float]] = [[] for _ in range(at_once)]
        self.start = time.perf_counter()
        self.most = most
        self.over: float | None = None
        self.told: set[int] = set()  # fleets that know that they should stop
        self.lock = threading.Lock()

    def stop(self, at: int) -> bool:
        """Return whether a fleet should stop; it calls this after every epoch."""
        with self.lock:
            if at in self.told:
                return True
            now = time.perf_counter()
            self.calls[at].append(now)
            if self.over is None and (now >= self.start + self.most or self._is_enough(now)):
                self.over = now
            if self.over is not None:
                self.told.add(at)
            return self.over is not None

    def fail(self) -> None:
        """Stop all fleets."""
        with self.lock:
            self.over = self.over or time.perf_counter()

    def _since(self) -> float | None:
        """Return when the last fleet had ended its first epochs."""
        if any(len(times) < BEFORE + WARM for times in self.calls):
            return None
        return max(times[BEFORE + WARM - 1] for times in self.calls)

    def _is_enough(self, now: float) -> bool:
        since = self._since()
        return since is not None and now >= since + LEAST and bool(self._together(since, now))

    def _together(self, since: float, until: float) -> list[list[float]]:
        """Return when each fleet ended epochs while all trained, if each trained a whole one."""
        inside = [[time for time in times if since <= time <= until] for times in self.calls]
        return inside if all(len(times) > 1 for times in inside) else []

    @property
    def epochs(self) -> tuple[int, ...]:
        """How many epochs each fleet has trained."""
        return tuple(max(0, len(times) - BEFORE) for times in self.calls)

    def result(self, seconds: float) -> Turn:
        """Return what was measured in fleets that took ``seconds`` from start to end."""
        assert self.over is not None
        since = self._since()
        together = [] if since is None else self._together(since, self.over)
        if since is None or not together:
            if not any(self.epochs):
                raise RuntimeError("no fleet ended an epoch")
            return Turn(seconds / sum(self.epochs), 0.0, self.epochs, 0.0)
        epoch = 1 / sum((len(times) - 1) / (times[-1] - times[0]) for times in together)
        before = sum(epochs_by(since, times) for times in self.calls)
        begin = max(0.0, since - self.start - before * epoch) / len(self.calls)
        return Turn(epoch, begin, self.epochs, self.over - since)


def epochs_by(moment: float, times: Sequence[float]) -> float:
    """Return how many epochs a fleet had trained by a moment, with the part of the latest."""
    times = times[BEFORE - 1 :]
    done = sum(time <= moment for time in times)
    if done == len(times):
        return done - 1.0
    return done - 1 + (moment - times[done - 1]) / (times[done] - times[done - 1])


def turn_of(fleet: Fleet, recipe: MLPRecipe, trials: int, at_once: int, most: float) -> Turn:
    """Measure fleets that train for ``most`` seconds at most, and then end their epoch."""
    asked = trials_of(replace(recipe, max_epochs=10**6), trials)
    pace = Pace(at_once, most)

    def train(at: int) -> None:
        try:
            if list(fleet.run(asked, functools.partial(pace.stop, at))):
                raise RuntimeError("a trial ended, so fewer were trained")
        except BaseException:
            pace.fail()  # the others would wait for this fleet
            raise

    def describe() -> str:
        return f"epochs of the fleets so far: {pace.epochs}"

    with watched(describe):
        return pace.result(side_by_side(train, at_once))


@contextlib.contextmanager
def watched(describe: Callable[[], str]) -> Iterator[None]:
    """Write where all threads are if this takes long, and end the process if it does not end."""

    def look() -> None:
        print(f"after {SLOW:.0f} s, {describe()}; threads and their CPU time:", file=sys.stderr)
        for thread in threading.enumerate():
            if thread.ident is not None:
                used = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
                print(f"  {thread.ident:#018x} {thread.name}: {used:.1f} s", file=sys.stderr)
        sys.stderr.flush()
        faulthandler.dump_traceback(sys.stderr)

    watch = threading.Timer(SLOW, look)
    watch.daemon = True
    watch.start()
    # In C, so that it also works if a thread waits for the GPU and holds the interpreter's lock.
    faulthandler.dump_traceback_later(HUNG, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        watch.cancel()


def compile_kernels(network: tuple[str, tuple[int, int]]) -> None:
    """Train a network for an epoch, which compiles its kernels into Triton's cache."""
    data, (depth, width) = network
    fleet = Fleet(noise(data, 0.02), "cuda", slots=32)
    seconds_of_one_epoch(fleet, recipe_of(data, depth, width), 32, 1)


def recipe_of(data: str, depth: int, width: int) -> MLPRecipe:
    clip = 100.0 if depth > 1 else None
    return MLPRecipe(data, (width,) * depth, momentum=0.9, clip=clip, patience=10**6)


def share_of(network: Network, trials: int, bandwidth: float) -> float:
    """Return the largest share of the examples with which an epoch is not too long."""
    step = weights_of(*network) * BYTES * trials / bandwidth
    examples = SETS[network[0]][2]
    short = (share for share in SHARES if steps_of(int(share * examples)) * step <= LONGEST)
    return next(short, SHARES[-1])


def compile_all() -> None:
    """Compile the kernels of all networks in processes side by side, those with most first."""
    begun = time.monotonic()
    networks = sorted(itertools.product(MEASURED, HIDDEN), key=lambda one: one[1], reverse=True)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), spawn) as pool:
        list(pool.map(compile_kernels, networks))
    print(f"compiling took {time.monotonic() - begun:.0f} s", flush=True)


def out_of_memory() -> int:
    """Return how often memory ran out."""
    return int(torch.cuda.memory_stats()["num_ooms"])


def measure(several: Sequence[int], seconds: float) -> Iterator[list[dict[str, object]]]:
    """Yield the lines of all points measured so far, again and again until the time limit."""
    began = time.monotonic()
    compile_all()
    bandwidth, facts = copy_bandwidth(), environment()
    found: dict[Point, list[tuple[Turn, float, float]]] = defaultdict(list)
    fleets: dict[tuple[str, float, int], Fleet] = {}
    loaded: set[tuple[Network, int]] = set()  # stacks whose kernels this process has loaded

    def line(point: Point) -> dict[str, object]:
        at_once, trials, (data, depth, width) = point
        # If a fleet waited in some turns only, the others count.
        turns = [one for one in found[point] if one[0].together] or found[point]
        each = [per_step for _, per_step, _ in turns]
        per_step = statistics.median(each)
        floor = weights_of(data, depth, width) * BYTES / bandwidth
        return {
            "data": data,
            "depth": depth,
            "width": width,
            "trials": trials,
            "fleets_at_once": at_once,
            "us_per_model_step": round(1e6 * per_step, 3),
            "share_of_memory_floor": round(floor / per_step, 3),
            "seconds_to_begin": round(statistics.median(turn.begin for turn, _, _ in turns), 4),
            "turns": len(found[point]),
            "turns_together": sum(one[0].together > 0 for one in found[point]),
            "spread": round(max(each) / min(each), 3),
            "peak_gb": round(max(peak for _, _, peak in turns), 2),
            "copy_tb_per_s": round(bandwidth / 1e12, 2),
            **facts,
        }

    def measured(point: Point) -> tuple[Turn, float, float]:
        """Return a turn, its seconds of a step of one network, and the peak memory in GB."""
        at_once, trials, (data, depth, width) = point
        share, recipe = share_of(point[2], trials, bandwidth), recipe_of(data, depth, width)
        key = data, share, at_once
        if key not in fleets:
            fleets[key] = Fleet(noise(data, share), "cuda", memory=1 / at_once)
        fleet = fleets[key]
        if torch.cuda.memory_reserved() > torch.cuda.mem_get_info()[1] / 2:
            torch.cuda.empty_cache()  # now, not in the middle of a turn
        if (point[2], trials) not in loaded:
            seconds_of_one_epoch(fleet, recipe, trials, 1)
            loaded.add((point[2], trials))
        failures = out_of_memory()
        torch.cuda.reset_peak_memory_stats()
        steps = steps_of(fleet.data.train_size)
        floor = steps * trials * weights_of(data, depth, width) * BYTES / bandwidth
        turn = turn_of(fleet, recipe, trials, at_once, PATIENCE + 10 * at_once * floor)
        if out_of_memory() > failures:
            raise RuntimeError("out of memory, so fewer slots")
        peak = torch.cuda.max_memory_allocated() / 1e9
        return turn, turn.epoch / (steps * trials), peak

    networks = [(data, depth, width) for data in MEASURED for depth, width in HIDDEN]
    for _, point in itertools.product(
        range(MOST_TURNS), itertools.product(several, POINTS, networks)
    ):
        start = time.monotonic()
        if start - began > seconds:
            return
        at_once, trials, (data, depth, width) = point
        name = f"{at_once} fleets of {trials} trials, {data} {depth}x{width}"
        try:
            found[point].append(measured(point))
        except Exception as problem:  # the other points count without this one
            print(f"{name} failed after {time.monotonic() - start:.1f} s: {problem!r}", flush=True)
            continue
        turn, per_step, _ = found[point][-1]
        floor = weights_of(data, depth, width) * BYTES / bandwidth
        print(
            f"{name}: {1e6 * per_step:.2f} µs, a share of {floor / per_step:.2f}, in "
            f"{time.monotonic() - start:.1f} s; epochs {turn.epochs}, "
            + (f"{turn.together:.2f} s together" if turn.together else "A FLEET WAITED"),
            flush=True,
        )
        yield [line(point) for point in found if found[point]]


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


def costs_in(path: Path) -> tuple[dict[int, dict[Network, Costs]], float]:
    """Return the costs by fleets at once and network, and the memory bandwidth of that GPU."""
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    lines.sort(key=lambda line: int(line["trials"]))
    found: dict[int, dict[Network, list[dict[str, str]]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        network = line["data"], int(line["depth"]), int(line["width"])
        found[int(line["fleets_at_once"])][network].append(line)
    costs = {
        at_once: {network: costs_of(points) for network, points in networks.items()}
        for at_once, networks in found.items()
    }
    return costs, 1e12 * float(lines[0]["copy_tb_per_s"])


def costs_for(measured: Mapping[Network, Costs], network: Network) -> Costs | None:
    """Return a network's costs, or else those of a set of as many inputs, by numbers of weights."""
    data, depth, width = network
    if network in measured or data not in ALIKE:
        return measured.get(network)
    alike = ALIKE[data], depth, width
    if alike not in measured:
        return None
    costs, more = measured[alike], weights_of(*network) / weights_of(*alike)
    return replace(costs, step=[more * seconds for seconds in costs.step])


def costs_of(points: Sequence[Mapping[str, str]]) -> Costs:
    """Return the costs of a network from its measured points, by ascending trials."""
    trials = [int(point["trials"]) for point in points]
    each = [1e-6 * float(point["us_per_model_step"]) for point in points]
    step = [one * count for one, count in zip(each, trials, strict=True)]
    return Costs(trials, step, [float(point["seconds_to_begin"]) for point in points])


def seconds_of_row(row: Row, costs: Costs, floor: float) -> tuple[float, float]:
    """Return a row's seconds, estimated and at the memory floor.

    The row's study is replayed with outcomes from its ledger and slots as in `StackWorker`.
    ``floor`` is the least possible time of a step of one model.
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


def estimate(
    measured: Mapping[Network, Costs], bandwidth: float
) -> Iterator[tuple[Row, float, float]]:
    """Yield the paper's rows in turn, each with its seconds, estimated and at the memory floor."""
    from paper.rows import Experiment, in_turn, paper_rows

    for one in in_turn(Experiment(row) for row in paper_rows() if row.printed):
        row = one.row
        costs = costs_for(measured, (row.data, row.hidden_layers, row.width))
        if costs is None:
            raise ValueError(f"there are no epochs of {row.name}: measure with a longer limit")
        floor = weights_of(row.data, row.hidden_layers, row.width) * BYTES / bandwidth
        yield row, *seconds_of_row(row, costs, floor)


def seconds_at_most(rows: Iterable[float], at_once: int) -> float:
    """Return how long the rows take in turn if each has 1 / ``at_once`` of the GPU to itself.

    So the share of the GPU that finished rows free is lost while the last rows run.
    """
    lanes = [0.0] * at_once
    for seconds in rows:
        heapq.heapreplace(lanes, lanes[0] + at_once * seconds)
    return max(lanes)


def estimate_of(path: Path) -> Path:
    """Return the file for the estimate from measured epochs: beside them, of a similar name."""
    return path.with_name(f"{path.stem.removesuffix('_cuda')}_estimate.csv")


def points_that_waited(path: Path) -> Counter[int]:
    """Return by fleets at once how many points have no turn in which all fleets trained."""
    with path.open(newline="", encoding="utf-8") as file:
        return Counter(
            int(line["fleets_at_once"])
            for line in csv.DictReader(file)
            if line.get("turns_together") == "0"
        )


def show(path: Path) -> None:
    """Print and write the estimates by network and in total, and compare them with the goal."""
    measured, bandwidth = costs_in(path)
    waited = points_that_waited(path)
    lines: list[dict[str, object]] = []
    verdicts = []
    for at_once, networks in measured.items():
        totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
        try:
            rows = list(estimate(networks, bandwidth))
        except ValueError as problem:
            verdicts.append(f"{at_once} fleets at once: no estimate, since {problem}")
            continue
        for row, seconds, least in rows:
            for name in (f"{row.data} {row.hidden_layers}x{row.width}", "all rows"):
                for at, number in enumerate((1, seconds, least)):
                    totals[name][at] += number
        for name, (count, seconds, least) in sorted(totals.items(), key=lambda one: one[1][1]):
            line = {
                "network": name,
                "fleets_at_once": at_once,
                "rows": count,
                "minutes": round(seconds / 60, 1),
                "memory_floor_minutes": round(least / 60, 1),
                "share_of_memory_floor": round(least / seconds, 3),
            }
            lines.append(line)
            print("{:<18}{:>3}{:>5}{:>9}{:>8}{:>7}".format(*line.values()))
        _, seconds, least = totals["all rows"]
        reached = "reached" if least / seconds >= GOAL else "missed"
        most = seconds_at_most((seconds for _, seconds, _ in rows), at_once)
        verdicts.append(
            f"{at_once} fleets at once: goal of {GOAL} over all rows {reached}, at "
            f"{least / seconds:.3f}: {seconds / 60:.1f} minutes, and {most / 60:.1f} if nothing "
            "uses the share of the GPU that finished rows free"
        )
        if waited[at_once]:
            verdicts.append(
                f"{at_once} fleets at once: a fleet waited for the others in every turn of "
                f"{waited[at_once]} points, whose times are upper bounds"
            )
    if lines:
        write(lines, estimate_of(path))
    print(*verdicts, sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--measure", action="store_true", help="measure first, on a GPU")
    parser.add_argument(
        "--at-once", type=int, nargs="+", default=[FLEETS_ON_A_GPU], metavar="N",
        help=f"fleets to run at once; several are measured in turn ({FLEETS_ON_A_GPU}, as in paper "
        "run)",
    )  # fmt: skip
    parser.add_argument("--file", type=Path, default=FILE, help="the measured epochs")
    parser.add_argument(
        "--time-limit", type=float, default=5.5, metavar="MINUTES", help="stop measuring then (5.5)"
    )
    arguments = parser.parse_args()
    if arguments.measure:
        for lines in measure(arguments.at_once, 60 * arguments.time_limit):
            write(lines, arguments.file, quiet=True)
    if not arguments.file.exists():
        parser.error(f"{arguments.file} does not exist: measure first, with --measure on a GPU")
    show(arguments.file)


if __name__ == "__main__":
    main()
