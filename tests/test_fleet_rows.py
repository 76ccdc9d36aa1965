"""The benchmark of the paper's rows, with fleets that only sleep."""

from __future__ import annotations

import contextlib
import csv
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from benchmarks import fleet_rows
from pseudograd.fleet import Outcome, Stop, Trial

EPOCH = 0.01  # seconds


@dataclass
class Sleeper:
    """Stands for a fleet, in threads that are told apart by the order in which they start."""

    waits: bool = False  # whether the last one to start waits for the others
    fails: bool = False
    started: int = 0
    at_work: int = 0

    def __post_init__(self) -> None:
        self.changed = threading.Condition()

    def run(self, trials: Sequence[Trial], stop: Stop) -> Iterator[Outcome]:
        yield from ()
        with self.changed:
            self.started += 1
            number = self.started
            self.at_work += 1
        try:
            if stop() or stop():
                return
            if self.fails and number == 2:
                raise ValueError("this fleet fails")
            if self.waits and number == 3:
                with self.changed:
                    self.changed.wait_for(lambda: self.at_work == 1)
            while True:
                time.sleep(EPOCH)
                if stop():
                    return
        finally:
            with self.changed:
                self.at_work -= 1
                self.changed.notify_all()


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(fleet_rows, "stream", lambda at: at)


def turn_of(fleet: Sleeper, most: float) -> fleet_rows.Turn:
    recipe = fleet_rows.recipe_of("mnist", 1, 400)
    return fleet_rows.turn_of(fleet, recipe, 2, 3, most)  # type: ignore[arg-type]


def test_fleets_that_train_at_once() -> None:
    turn = turn_of(Sleeper(), most=5)
    assert turn.together >= fleet_rows.LEAST
    assert EPOCH / 3 <= turn.epoch < EPOCH
    assert turn.begin < EPOCH
    assert min(turn.epochs) >= fleet_rows.WARM + 2


def test_a_fleet_that_waits_for_the_others_gets_its_turn() -> None:
    start = time.perf_counter()
    turn = turn_of(Sleeper(waits=True), most=0.4)
    assert time.perf_counter() - start < 5
    assert turn.together == 0
    assert min(turn.epochs) == 1
    assert turn.epoch >= 0.4 / sum(turn.epochs)


def test_a_fleet_that_fails_stops_the_others() -> None:
    with pytest.raises(ValueError, match="this fleet fails"):
        turn_of(Sleeper(fails=True), most=60)


def test_tracebacks_of_a_slow_turn(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fleet_rows, "SLOW", 0.2)
    turn_of(Sleeper(waits=True), most=0.6)
    written = capfd.readouterr().err
    assert "epochs of the fleets so far: (" in written
    assert "fleet 2: " in written
    assert written.count("in run") >= 3


def test_epochs_by_a_moment() -> None:
    calls = [0.0, 1.0, 2.0, 4.0]  # the second one begins the first epoch
    assert [fleet_rows.epochs_by(t, calls) for t in (1.0, 2.0, 3.0, 4.0)] == [0, 1, 1.5, 2]


def test_an_estimate_without_some_points(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fleet_rows_cuda.csv"
    lines = []
    for data in fleet_rows.MEASURED:
        for at, (depth, width) in enumerate(fleet_rows.HIDDEN):
            micros = 1.25e6 * fleet_rows.weights_of(data, depth, width) * 20 / 4e12
            rest = 6, micros, 0.0, 4.0, int(at > 0)
            lines += [[data, depth, width, trials, *rest] for trials in (8, 32, 2)[: 1 + at % 3]]
    names = ["data", "depth", "width", "trials", "fleets_at_once", "us_per_model_step"]
    more = ["seconds_to_begin", "copy_tb_per_s", "turns_together"]
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([[*names, *more], *lines])
    fleet_rows.show(path)
    printed = capsys.readouterr().out
    assert "cifar100 5x800" in printed
    assert "6 fleets at once: goal of 0.75 over all rows" in printed
    assert "in every turn of 2 points" in printed
    costs = fleet_rows.costs_in(path)[0][6]
    ours = fleet_rows.costs_for(costs, ("cifar100", 1, 400))
    assert ours
    weights = fleet_rows.weights_of("cifar100", 1, 400)
    assert ours.of_step(8) == pytest.approx(8 * 1.25 * weights * 20 / 4e12)
