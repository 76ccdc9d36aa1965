"""The paper's rows: what they ask for, and that they can be run, stopped and gone on with."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, MutableSequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paper.cli import _Lines, _print_status, main
from paper.rows import (
    Experiment,
    Row,
    by_network,
    experiments,
    paper_rows,
    rows,
    select,
)
from paper.run import (
    Clock,
    Step,
    TimeIsUp,
    _epochs,
    _Notes,
    ledger_of,
    reproduce,
    run_network,
    sessions,
    status,
)
from pseudograd import environment
from pseudograd.cli.place import Place
from pseudograd.data import Dataset, Encoder
from pseudograd.files import locked
from pseudograd.fleet import Fleet, Outcome, Trial
from pseudograd.search import DEEP_KS, SHALLOW_KS, result

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def made_up(trial: Trial) -> Outcome:
    """The best rate is 0.1 at k = 1/2, and more momentum wants less."""
    best = 0.1 * (1 - trial.momentum)
    distance = abs(trial.learning_rate / best - 1) + abs(trial.k - 0.5)
    error = 0.02 + 0.01 * min(distance, 10) + 0.001 * trial.split.repetition
    wrong = (1, 2) if trial.split.retrain else None
    curve = (0.9, 0.8, 0.7, 0.6, 0.123456789)
    return Outcome(trial, error, 5, error, 2 * error, 20, "patience", curve, wrong)


def world(trials: MutableSequence[Trial]) -> Iterator[Outcome]:
    """Two slots: the later of two trials ends first."""
    assert isinstance(trials, deque)
    while trials:
        pair = [trials.popleft() for _ in range(min(2, len(trials)))]
        yield from map(made_up, reversed(pair))


def no_data(name: str) -> Dataset:
    return Dataset(name, torch.zeros(6, 1), torch.tensor([0, 1] * 3), 5)


# --- the rows --------------------------------------------------------------------------------


def test_the_papers_rows_are_all_there() -> None:
    printed = rows()
    assert len(printed) == 67
    assert len({row.name for row in paper_rows()}) == len(paper_rows()) == 94
    by_data = {data: sum(row.data == data for row in printed) for data in ("mnist", "cifar10")}
    assert by_data == {"mnist": 19, "cifar10": 17}
    assert {row.hidden_layers: row for row in printed}.keys() == {1, 3, 5}
    # Where the paper selects 1 it prints no figures, and only there.
    assert all((row.selected_k == 1) == (row.error_k1_pct is None) for row in printed)


def test_protocols_are_the_papers() -> None:
    (shallow,) = [Experiment(row) for row in rows("table1", "mnist 1x400*")]
    (deep,) = [Experiment(row) for row in rows("table4", "cifar100 5x800 m0.9")]
    protocol = shallow.protocol()
    assert (protocol.ks, protocol.repetitions, protocol.retrainings) == (SHALLOW_KS, 10, 5)
    assert protocol.trial == Trial("mnist", (400,), k=1, learning_rate=1, momentum=0.5)
    assert (protocol.trial.batch_size, protocol.trial.patience) == (128, 15)
    protocol = deep.protocol()
    assert (protocol.ks, protocol.repetitions, protocol.three_fifths) == (DEEP_KS, 7, True)
    assert protocol.trial.hidden_layer_sizes == (800,) * 5
    assert (protocol.trial.clip, protocol.trial.momentum) == (100.0, 0.9)


def test_what_is_run_beside_the_rows() -> None:
    everything = experiments(rows())
    assert len({experiment.name for experiment in everything}) == len(everything) == 67 + 19 + 4
    for experiment in everything:
        trial = experiment.protocol().trial
        assert trial.feature_range[0] == (0 if "[0,1]" in experiment.name else -1)
        assert trial.activation == ("tanh" if "tanh" in experiment.name else "relu")
    groups = by_network(everything).values()
    assert all(len({e.row.momentum for e in group}) == len(group) for group in groups)
    turns = [(group[0].row.data, group[0].name != group[0].row.name) for group in groups]
    assert list(dict.fromkeys(turns)) == [
        ("mnist", False), ("cifar10", False), ("svhn", False), ("cifar100", False),
        ("mnist", True), ("cifar10", True),
    ]  # fmt: skip


@pytest.mark.parametrize(("table", "pattern"), [("table2", "*"), ("table1", "mnist 7x7*")])
def test_rows_that_are_not_there(table: str, pattern: str) -> None:
    with pytest.raises(ValueError, match=r"table must be one of|match no row"):
        rows(table, pattern)


def test_names_as_they_are_printed_select_one_experiment() -> None:
    everything = experiments(rows())
    for experiment in everything:
        assert select(everything, experiment.name) == [experiment]
    assert len(select(everything, "mnist 1x400 m0.5*")) == 3
    assert len(select(everything, "mnist*")) == 2 * 19 + 1
    with pytest.raises(ValueError, match=r"rows 'mnist 1x400 m0.5 sigmoid' match no row"):
        select(everything, "mnist 1x400 m0.5 sigmoid")


def test_patterns_of_what_is_run_beside() -> None:
    everything = experiments(rows())
    tanh, scaled = select(everything, "* tanh"), select(everything, "*[0,1]")
    assert (len(tanh), {experiment.activation for experiment in tanh}) == (4, {"tanh"})
    assert (len(scaled), {experiment.feature_range for experiment in scaled}) == (19, {(0, 1)})
    assert [e.name for e in select(everything, "mnist 1x400 m0.5 [0,1]*")] == [
        "mnist 1x400 m0.5 [0,1]"
    ]


@pytest.mark.parametrize("pattern", ["MNIST*", "mnist 1x400"])
def test_a_refusal_names_what_is_near(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"match no row .*: names are like 'mnist .* m0.*', and"):
        select(experiments(rows()), pattern)


def test_rows_of_ones_own() -> None:
    own = Experiment(Row("mine", "fashion-mnist", 2, 400, 0.5))
    assert (own.name, own.protocol().ks) == ("fashion-mnist 2x400 m0.5", DEEP_KS)
    groups = by_network([own, *experiments(rows())])
    of_paper = [network for network, group in groups.items() if group[0].name == group[0].row.name]
    assert of_paper.index(own.network) == len(of_paper) - 1  # what is run beside comes after it
    with pytest.raises(ValueError, match=r"data must be one of mnist, .*, not 'iris'"):
        Row("mine", "iris", 1, 400, 0.5)


def test_a_row_of_ones_own_is_run(capsys: pytest.CaptureFixture[str]) -> None:
    own = [Experiment(Row("mine", "fashion-mnist", 2, 400, 0.5))]
    (state,) = status(own, Path("paper/results"))
    assert (state.done, state.seconds) == (0, None)
    reproduce(own, Path("paper/results"), no_data, lambda _: world)
    _print_status(own, Path("paper/results"), smoke=False)
    _, line, last = capsys.readouterr().out.splitlines()
    assert line.split()[-1] == "1/2"  # and none of the paper's
    assert last == "1 of 1 rows done, about 0 trials left"


# --- running them ------------------------------------------------------------------------------


def test_rows_of_one_network_are_run_together_and_end_as_alone() -> None:
    group = experiments(rows("all", "svhn 1x400*"))
    assert len(group) == 3
    together = ledger_of(Path("together"), group[0].network)
    steps = list(run_network({e: e.protocol() for e in group}, together, world))
    assert len(steps) == len(together)
    assert steps[-1].left == 0
    for experiment in group:
        protocol = experiment.protocol()
        alone = ledger_of(Path("alone"), experiment.name)
        for _ in run_network({experiment: protocol}, alone, world):
            pass
        assert result(protocol, together) == result(protocol, alone)
        chosen, plain = protocol.chosen(together)
        assert (chosen.k, plain.k) == (0.5, 1)
        for cell in (chosen, plain):
            for trials in (protocol.retrainings_of, protocol.tested_of):
                assert all(trial in together for trial in trials(cell.k, cell.learning_rate))


def test_more_trials_join_while_others_run() -> None:
    """So no device waits for the last network of a round."""
    calls = 0

    def counted(trials: MutableSequence[Trial]) -> Iterator[Outcome]:
        nonlocal calls
        calls += 1
        yield from world(trials)

    group = experiments(rows("all", "svhn 1x400*"))
    ledger = ledger_of(Path("paper/results"), group[0].network)
    for _ in run_network({e: e.protocol() for e in group}, ledger, counted):
        pass
    assert calls == 2  # on three fifths, judged on the test set too, and retraining


def test_rows_end_one_after_the_other() -> None:
    """What a row asks for goes before what waits of other rows."""
    group = experiments(rows("all", "svhn 1x400*"))
    ledger = ledger_of(Path("paper/results"), group[0].network)
    steps = list(run_network({e: e.protocol() for e in group}, ledger, world))
    searched = [step for step in steps if not step.outcome.trial.split.retrain]
    grids = [step.experiment for step in searched[8 * len(group) :]]
    changes = sum(one is not other for one, other in itertools.pairwise(grids))
    # Alone, the last trial of a row makes its way past one or two of the next.
    assert changes <= 4 * len(group)


def test_ledgers_are_small() -> None:
    group = experiments(rows("table1", "svhn 1x400*"))
    ledger = ledger_of(Path("paper/results"), group[0].network)
    for _ in run_network({e: e.protocol() for e in group}, ledger, world):
        pass
    curves = {trial.split.retrain: outcome.curve for trial, outcome in ledger.items()}
    assert curves == {False: (0.9, 0.8, 0.6), True: (0.9, 0.8, 0.7, 0.6, 0.12346)}
    assert max(map(len, ledger.path.read_text().splitlines())) < 420


def run_all(*, time_limit: float | None = None, runner: Callable[..., object] = world) -> None:
    reproduce(
        experiments(rows("table1", "svhn*")),
        Path("paper/results"),
        no_data,
        lambda data: runner,  # type: ignore[arg-type, return-value]
        command="python -m paper run table1",
        time_limit=time_limit,
    )


def test_it_stops_when_the_time_is_up_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time()
    monkeypatch.setattr("paper.run.time", time)
    with pytest.raises(TimeIsUp):
        run_all(time_limit=7, runner=Slots(1, time))  # the second trial would take until 10
    assert time.now == Time.now + 8
    (first,) = sessions(Path("paper/results"))
    assert {network: log["trials"] for network, log in first["networks"].items()} == {
        "svhn 1x400": 1
    }
    states = status(experiments(rows("table1", "svhn*")), Path("paper/results"))
    assert [(state.done, state.selected_k) for state in states] == [(1, None), (0, None), (0, None)]
    assert all(state.left > 200 and state.seconds is not None for state in states)
    run_all()
    second = sessions(Path("paper/results"))[1]
    assert second["command"] == "python -m paper run table1"
    assert second["data"] == {"svhn": no_data("svhn").sha256}
    assert set(second["networks"]) == {"svhn 1x400", "svhn 1x800", "svhn 1x1100"}
    states = status(experiments(rows("table1", "svhn*")), Path("paper/results"))
    assert [(state.left, state.selected_k) for state in states] == [(0, 0.5)] * 3
    done = [
        log["trials"] for s in sessions(Path("paper/results")) for log in s["networks"].values()
    ]
    assert sum(done) == sum(state.done for state in states)
    run_all()  # nothing to do, nothing to note
    assert len(sessions(Path("paper/results"))) == 2
    run_all(time_limit=0)  # which takes no time
    with pytest.raises(TimeIsUp):
        reproduce(PAIR, Path("other"), no_data, lambda _: world, time_limit=-1)
    assert list(Path("other").iterdir()) == []


def test_what_ends_together_as_the_time_does_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time()
    monkeypatch.setattr("paper.run.time", time)
    with pytest.raises(TimeIsUp):
        run_all(time_limit=4.5, runner=Slots(10, time))  # the sweep's 8 trials end after 5 s
    assert len(ledger_of(Path("paper/results"), "svhn 1x400")) == 8


def test_several_processes_note_what_they_do_in_one_manifest() -> None:
    """Each reads what is there and writes it with its own; none may come between."""
    pytest.importorskip("fcntl", reason="needs POSIX's locks")
    folder = Path("paper/results")
    folder.mkdir(parents=True)
    session = {"hardware": "", "versions": {}, "commit": ""}
    sides = [_Notes(folder, {**session, "started": f"{at}"}, 0.0) for at in range(4)]

    def write(side: _Notes) -> None:
        for _ in range(25):
            side.write()

    threads = [threading.Thread(target=write, args=(side,)) for side in sides]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(session["started"] for session in sessions(folder)) == ["0", "1", "2", "3"]


class Time:
    """A clock that goes on when it is told to."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Slots:
    """Some slots and a clock; a trial takes 20 s, and what was under way at the end is lost."""

    def __init__(self, slots: int, time: Time) -> None:
        self.slots, self.time = slots, time
        self.begun = set[Trial]()

    def __call__(self, trials: MutableSequence[Trial]) -> Iterator[Outcome]:
        assert isinstance(trials, deque)
        under_way = dict[Trial, int]()
        while trials or under_way:
            while trials and len(under_way) < self.slots:
                under_way[trials.popleft()] = 0
            self.begun |= under_way.keys()
            self.time.now += 1
            for trial in list(under_way):
                under_way[trial] += 1
                short = trial.max_epochs < 1000
                if under_way[trial] == (5 if short else 20):
                    del under_way[trial]
                    yield replace(made_up(trial), stopped_by="limit" if short else "patience")


def test_no_trial_is_begun_that_could_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time()
    monkeypatch.setattr("paper.run.time", time)
    folder, some = Path("paper/results"), experiments(rows("table1", "svhn*"))

    def known() -> set[Trial]:
        return {trial for e in some for trial in ledger_of(folder, e.network)}

    slots = Slots(10, time)
    for calls in range(1, 100):  # noqa: B007, it is asked for below
        began, before = time.now, len(known())
        try:
            run_all(time_limit=200, runner=slots)
        except TimeIsUp:
            assert time.now - began <= 200
            # In 200 s each slot has time for 10 trials, or for 9 if they are not in step.
            assert len(known()) - before >= 80
            assert slots.begun == known()  # nothing is lost
        else:
            break
    assert calls > 3
    assert [state.left for state in status(some, folder)] == [0, 0, 0]


def test_little_time_is_for_rows_whose_search_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time()
    monkeypatch.setattr("paper.run.time", time)
    group = experiments(rows("all", "svhn 1x400*"))
    ledger = ledger_of(Path("paper/results"), group[0].network)
    protocols = {e: e.protocol() for e in group}
    clock, first = Clock(), protocols[group[0]]
    steps = run_network(protocols, ledger, Slots(10, time), clock)
    while any(not trial.split.retrain for trial in first.wanted(ledger)):
        next(steps)
    clock.end = time.now + 100
    clock.note(group[0].network, 1e6)  # as if that were too short for one more trial
    with pytest.raises(TimeIsUp):
        list(steps)
    assert [bool(protocol.wanted(ledger)) for protocol in protocols.values()] == [False, True, True]


def test_the_time_ends_trials_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner looks at its queue again and again, once it has given out what has ended."""
    time = Time()
    monkeypatch.setattr("paper.run.time", time)

    def runner(trials: MutableSequence[Trial]) -> Iterator[Outcome]:
        assert isinstance(trials, deque)
        yield made_up(trials.popleft())
        under_way = trials.popleft()
        time.now += 101
        until_stopped(trials)
        yield made_up(under_way)
        raise AssertionError("nothing has stopped this")

    with pytest.raises(TimeIsUp):
        run_all(time_limit=100, runner=runner)
    assert len(ledger_of(Path("paper/results"), "svhn 1x400")) == 1


def test_a_fleet_ends_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many epochs its trials still had."""

    class Hurrying(Time):
        def monotonic(self) -> float:
            self.now += 1
            return self.now

    monkeypatch.setattr("paper.run.time", Hurrying())
    some, data = experiments(rows("table1", "mnist 1x800*"))[:1], small("mnist")[0]
    long = replace(some[0].smoke(), initial_rate=0.1)
    long = replace(long, trial=replace(long.trial, max_epochs=1000, patience=1000))
    ledger = ledger_of(Path("paper/results"), some[0].network)
    with pytest.raises(TimeIsUp):
        list(run_network({some[0]: long}, ledger, Fleet(data).run, Clock(50)))
    assert len(ledger) == 0


def test_short_trials_of_the_sweep_do_not_tell_how_long_others_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    time = Time()
    monkeypatch.setattr("paper.run.time", time)
    clock, group = Clock(20), experiments(rows("table1", "svhn 1x400*"))
    ledger = ledger_of(Path("paper/results"), group[0].network)
    steps = run_network({e: e.protocol() for e in group}, ledger, Slots(8, time), clock)
    for _ in range(8):
        next(steps)
    assert time.now == Time.now + 5
    assert clock._took == {}


def test_a_failure_keeps_what_is_finished() -> None:
    def failing(trials: MutableSequence[Trial]) -> Iterator[Outcome]:
        for number, outcome in enumerate(world(trials)):
            if number == 30:
                raise OSError("the machine is gone")
            yield outcome

    with pytest.raises(OSError, match="gone"):
        run_all(runner=failing)
    assert len(ledger_of(Path("paper/results"), "svhn 1x400")) == 30
    assert sessions(Path("paper/results"))[0]["networks"]["svhn 1x400"]["trials"] == 30


@pytest.mark.parametrize("name", ["manifest.json", "manifest-2.json"])
@pytest.mark.parametrize("text", ["[", "{}", "7", "[7]", '[{"networks": {}}]'])
def test_a_broken_manifest_is_not_overwritten(text: str, name: str) -> None:
    Path("paper/results").mkdir(parents=True)
    Path("paper/results", name).write_text(text)
    with pytest.raises(ValueError, match=rf"{name} is not a manifest"):
        run_all()
    assert Path("paper/results", name).read_text() == text
    assert len(list(Path("paper/results").iterdir())) == 1


def test_results_of_several_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ledgers are concatenated, manifests lie side by side, and each is written by its machine."""
    seconds, session = itertools.count(), environment.session

    def begun(command: str, *devices: str) -> dict[str, object]:
        started = f"2026-01-01T12:00:{next(seconds):02}.000+00:00"
        return session(command, *devices) | {"started": started}

    monkeypatch.setattr(environment, "session", begun)

    def some_of(queue: MutableSequence[Trial]) -> Iterator[Outcome]:
        for _, outcome in zip(range(9), world(queue), strict=False):
            yield outcome
        raise KeyboardInterrupt

    here, there = Path("paper/results"), Path("there")
    for folder, experiment in ((there, PAIR[1]), (here, PAIR[0]), (there, PAIR[0])):
        with pytest.raises(KeyboardInterrupt):
            reproduce([experiment], folder, no_data, lambda _: some_of)
    others = sessions(there)
    for experiment in PAIR:
        path = ledger_of(there, experiment.network).path
        with (here / path.name).open("ab") as file:
            file.write(path.read_bytes())
    manifest = (there / "manifest.json").read_bytes()
    (here / "manifest-2.json").write_bytes(manifest)
    (own,) = json.loads((here / "manifest.json").read_text())
    # By the time they began.
    assert sessions(here) == [others[0], own, others[1]]
    assert [len(ledger_of(here, experiment.network)) for experiment in PAIR] == [9, 9]
    reproduce(PAIR, here, no_data, lambda _: world)
    assert (here / "manifest-2.json").read_bytes() == manifest
    written = json.loads((here / "manifest.json").read_text())
    assert (len(written), written[0]) == (2, own)
    assert sessions(here) == [others[0], own, others[1], written[1]]
    # A session that both have is one.
    (here / "manifest-3.json").write_text(json.dumps(written))
    assert len(sessions(here)) == 4


def other_data(name: str) -> Dataset:
    return replace(no_data(name), features=torch.ones(6, 1))


def test_other_data_are_refused() -> None:
    def one_of(queue: MutableSequence[Trial]) -> Iterator[Outcome]:
        yield next(world(queue))
        raise KeyboardInterrupt

    one, folder = PAIR[:1], Path("paper/results")
    with pytest.raises(KeyboardInterrupt):
        reproduce(one, folder, no_data, lambda _: one_of)
    path = ledger_of(folder, one[0].network).path
    before = path.read_bytes()
    hashes = [data("svhn").sha256[:16] for data in (no_data, other_data)]
    with pytest.raises(ValueError, match=f"{hashes[0]}, and not with {hashes[1]}: use that data"):
        reproduce(one, folder, other_data, lambda _: world)
    assert path.read_bytes() == before


def test_finished_rows_need_no_data() -> None:
    """They may have been run on another machine."""

    def missing(name: str) -> Dataset:
        raise FileNotFoundError(name)

    reproduce(PAIR[:1], Path("paper/results"), no_data, lambda _: world)
    reproduce(PAIR[:1], Path("paper/results"), missing, lambda _: world)
    with pytest.raises(FileNotFoundError, match="svhn"):
        reproduce(PAIR, Path("paper/results"), missing, lambda _: world)


def test_a_ledger_of_different_data_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for folder, data in (("paper/results", no_data), ("other", other_data)):
        reproduce(PAIR[:1], Path(folder), data, lambda _: world)
    here, there = (ledger_of(Path(f), PAIR[0].network).path for f in ("paper/results", "other"))
    here.write_bytes(here.read_bytes() + there.read_bytes())
    for command in (["status"], ["report", "--out", "paper/results"]):
        assert main([*command]) == 1
        said = capsys.readouterr().err
        assert said.startswith(
            f"python -m paper: {here} has outcomes on different data, whose hashes"
        )
        assert all(data("svhn").sha256[:16] in said for data in (no_data, other_data))


# --- several networks side by side -------------------------------------------------------------

PAIR = experiments(rows("table1", "svhn 1x?00*"))
PATIENCE = 60  # seconds until a thread that waits for another in vain gives up


def run_two(
    runner: Callable[[MutableSequence[Trial]], Iterator[Outcome]],
    some: list[Experiment] = PAIR,
    folder: str = "paper/results",
    at_once: int = 2,
    **options: object,
) -> None:
    reproduce(
        some,
        Path(folder),
        no_data,
        lambda data: runner,
        at_once=at_once,
        **options,  # type: ignore[arg-type]
    )


def until_stopped(trials: MutableSequence[Trial]) -> None:
    """Epochs in which no trial ends; a fleet looks at its queue after each."""
    for _ in range(10_000_000):
        len(trials)
    raise AssertionError("nothing has stopped this")


def test_two_networks_are_under_way_at_once_and_end_as_one_by_one() -> None:
    both = threading.Barrier(2)

    def meeting(trials: MutableSequence[Trial]) -> Iterator[Outcome]:
        both.wait(PATIENCE)
        yield from world(trials)

    run_two(meeting)
    run_two(world, folder="alone", at_once=1)
    for experiment in PAIR:
        paths = [
            ledger_of(Path(folder), experiment.network).path
            for folder in ("paper/results", "alone")
        ]
        assert paths[0].read_bytes() == paths[1].read_bytes()


def test_networks_are_begun_in_their_order_and_no_more_at_once() -> None:
    some = [Experiment(row) for row in rows("table1", "*1x400*")]
    opened, ended = list[str](), list[str]()

    def open_data(name: str) -> Dataset:
        opened.append(name)
        assert len(opened) - len(ended) <= 2
        return no_data(name)

    def counted(trials: MutableSequence[Trial]) -> Iterator[Outcome]:
        first = trials[0]
        yield from world(trials)
        if first.split.retrain:
            ended.append(first.data)

    reproduce(some, Path("paper/results"), open_data, lambda data: counted, at_once=2)
    assert opened == [group[0].row.data for group in by_network(some).values()]
    assert sorted(ended) == sorted(opened)


@pytest.mark.parametrize("in_caller", [True, False])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_what_ends_one_network_ends_the_others(in_caller: bool, error: type[BaseException]) -> None:
    """Whichever thread it happens in: a runner that fails, or Ctrl-C."""
    caller, both = threading.current_thread(), threading.Barrier(2)
    closed, seen = list[str](), list[str]()

    def runner(trials: MutableSequence[Trial]) -> Iterator[Outcome]:
        assert isinstance(trials, deque)
        try:
            yield made_up(trials.popleft())
            both.wait(PATIENCE)
            if (threading.current_thread() is caller) == in_caller:
                if error is OSError:
                    raise OSError("the machine is gone")
                yield made_up(trials.popleft())
            until_stopped(trials)
        finally:
            closed.append(threading.current_thread().name)

    def watch(step: Step) -> None:
        if step.experiment.network in seen:
            raise KeyboardInterrupt
        seen.append(step.experiment.network)

    with pytest.raises(error):
        run_two(runner, watch=watch)
    assert len(set(closed)) == 2
    finished = 1 if error is OSError else 2
    ledgers = [ledger_of(Path("paper/results"), experiment.network) for experiment in PAIR]
    assert sorted(map(len, ledgers)) == [1, finished]
    logs = sessions(Path("paper/results"))[0]["networks"]
    assert [logs[e.network]["trials"] for e in PAIR] == list(map(len, ledgers))
    for ledger in ledgers:
        with locked(ledger.path):  # nobody else has it
            pass


def test_ctrl_c_while_only_the_other_thread_works() -> None:
    caller, begun = threading.current_thread(), threading.Event()

    @contextmanager
    def workplace() -> Iterator[None]:
        if threading.current_thread() is caller:
            assert begun.wait(PATIENCE)
        yield

    def runner(trials: MutableSequence[Trial]) -> Iterator[Outcome]:
        assert isinstance(trials, deque)
        begun.set()
        yield made_up(trials.popleft())
        os.kill(os.getpid(), signal.SIGINT)
        until_stopped(trials)

    with pytest.raises(KeyboardInterrupt):
        run_two(runner, PAIR[:1], workplace=workplace)
    assert len(ledger_of(Path("paper/results"), PAIR[0].network)) == 1


def test_the_time_is_up_for_each_network_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """One has long trials and ends early, one has short trials and ends, a third is not begun."""
    time = Time()
    monkeypatch.setattr("paper.run.time", time)
    short_begun, time_passed = threading.Event(), threading.Event()
    short, long, _ = some = experiments(rows("table1", "svhn*"))

    def runner(trials: MutableSequence[Trial]) -> Iterator[Outcome]:
        assert isinstance(trials, deque)
        if trials[0].hidden_layer_sizes == short.protocol().trial.hidden_layer_sizes:
            short_begun.set()
            assert time_passed.wait(PATIENCE)
            yield from world(trials)
        else:
            assert short_begun.wait(PATIENCE)
            trial = trials.popleft()
            time.now += 90
            yield made_up(trial)
            assert not trials

    def watch(step: Step) -> None:
        if step.experiment == long:
            time_passed.set()

    with pytest.raises(TimeIsUp):
        run_two(runner, some, time_limit=100, watch=watch)
    ledgers = [ledger_of(Path("paper/results"), experiment.network) for experiment in some]
    assert short.protocol().wanted(ledgers[0]) == []
    assert [len(ledger) for ledger in ledgers[1:]] == [1, 0]
    assert set(sessions(Path("paper/results"))[0]["networks"]) == {short.network, long.network}


def test_an_error_is_told_rather_than_that_the_time_is_up() -> None:
    both = threading.Barrier(2)

    def runner(trials: MutableSequence[Trial]) -> Iterator[Outcome]:
        both.wait(PATIENCE)
        if trials[0].hidden_layer_sizes == (400,):
            raise TimeIsUp
        raise OSError("the machine is gone")

    with pytest.raises(OSError, match="gone"):
        run_two(runner)


def test_networks_side_by_side_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time()
    monkeypatch.setattr("paper.run.time", time)

    def later() -> None:
        time.now += 10

    both = threading.Barrier(2, later)

    def meeting(trials: MutableSequence[Trial]) -> Iterator[Outcome]:
        both.wait(PATIENCE)  # before the search, and before retraining
        yield from world(trials)

    run_two(meeting)
    (session,) = sessions(Path("paper/results"))
    assert [log["seconds"] for log in session["networks"].values()] == [10, 10]
    assert (session["seconds"], session["at_once"]) == (20, 2)


def test_fleets_side_by_side_give_what_they_give_one_by_one() -> None:
    some = experiments(rows("table1", "mnist 1x400 m0.5"))[:2]
    data = small("mnist")[0]
    found = []
    for at_once in (1, 2):
        folder = Path(f"results-{at_once}")
        reproduce(some, folder, lambda _: data, lambda d: Fleet(d).run, smoke=True, at_once=at_once)
        found.append([dict(ledger_of(folder, experiment.network)) for experiment in some])
    assert found[0] == found[1]


def test_none_at_once() -> None:
    with pytest.raises(ValueError, match="at_once must be 1 or more, not 0"):
        run_two(world, at_once=0)


@pytest.mark.parametrize(
    ("devices", "at_once"),
    [(["cuda"], 3), (["cuda:1"], 3), (["cuda:0", "cuda:1"], 1), (["cpu"], 1)],
)
def test_three_at_once_on_one_gpu(
    devices: list[str], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pseudograd.cli.place._checked", str)
    assert Place(argparse.Namespace(device=devices, ray=None)).at_once == at_once


def test_lines_of_networks_side_by_side(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = Time()
    monkeypatch.setattr(sys.modules[_Lines.__module__], "time", now)
    lines, outcome = _Lines(), made_up(PAIR[0].protocol().trial)
    ledger = ledger_of(Path("paper/results"), PAIR[0].network)
    for experiment in PAIR:
        lines.begin(experiment.network, ledger, 8)
    assert capsys.readouterr().err.splitlines() == [
        f"{experiment.network}: begun, 8 trials asked for" for experiment in PAIR
    ]
    now.now += 9
    for left in ((5, 9), (0, 8)):
        for experiment, trials in zip(PAIR, left, strict=True):
            lines.show(Step(experiment, outcome, trials))
    done = capsys.readouterr().err.splitlines()
    lines.close()
    under_way = capsys.readouterr().err.splitlines()
    assert done == ["svhn 1x400: 2 trials in 9 s, 0 asked for"]
    assert under_way == ["svhn 1x800: 2 trials in 9 s, 8 asked for"]


def test_the_first_line_counts_from_the_beginning(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = Time()
    monkeypatch.setattr(sys.modules[_Lines.__module__], "time", now)
    ledger = ledger_of(Path("."), PAIR[0].network)
    ledger.path.write_text("cut off")
    lines = _Lines()
    lines.begin(PAIR[0].network, ledger_of(Path("."), PAIR[0].network), 1)
    now.now += 39
    lines.show(Step(PAIR[0], made_up(PAIR[0].protocol().trial), 0))
    assert capsys.readouterr().err.splitlines() == [
        "svhn-1x400.jsonl: line 1 is set aside: it is not JSON, or cut off",
        "svhn 1x400: begun, 1 trial asked for",
        "svhn 1x400: 1 trial in 39 s, 0 asked for",
    ]


# --- the command -------------------------------------------------------------------------------


def small(name: str, **_: object) -> tuple[Dataset, Encoder]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (1600,), generator=generator)
    noise = torch.randint(0, 60, (1600, 20), generator=generator)
    pixels = (noise + 9 * labels[:, None] * (torch.arange(20) % 3)).byte()
    data = Dataset(name, pixels, labels, 1050)
    return data, Encoder("y", tuple(range(10)), (), (4, 5), (0.0, 255.0))


def test_the_whole_path_in_small(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pseudograd.data.open_data", small)
    command = ["run", "table1", "--rows", "mnist 1x400 m0.5*", "--smoke"]
    assert main(command) == 0
    captured = capsys.readouterr()
    assert "3 of 3 rows done, about 0 trials left" in captured.out
    assert captured.out.endswith("ledgers: runs/smoke\n")
    assert "mnist 1x400 [0,1]: " in captured.err
    names = {"mnist-1x400.jsonl", "mnist-1x400-0-1.jsonl", "mnist-1x400-tanh.jsonl"}
    assert {path.name for path in Path("runs/smoke").iterdir()} == names | {"manifest.json"}
    ledger = ledger_of(Path("runs/smoke"), "mnist 1x400")
    assert {trial.split.test for trial in ledger} == {True, False}
    (experiment, *_) = experiments(rows("table1", "mnist 1x400 m0.5"))
    found = result(experiment.smoke(), ledger)
    assert len(found.comparison.chosen) == 2
    (state,) = status([experiment], Path("runs/smoke"), smoke=False)
    assert state.done == 0  # of the whole protocol
    assert state.seconds is None  # of which this tells nothing
    (state,) = status([experiment], Path("runs/smoke"), smoke=True)
    assert state.seconds == 0
    before = {path: path.read_bytes() for path in Path("runs/smoke").iterdir()}
    assert main(command) == 0  # again: there is nothing left
    assert {path: path.read_bytes() for path in Path("runs/smoke").iterdir()} == before


def test_a_runner_without_outcomes_is_no_endless_loop(tmp_path: Path) -> None:
    some = experiments(rows("all", "svhn 1x400 m0"))
    protocols = {experiment: experiment.smoke() for experiment in some}
    ledger = ledger_of(tmp_path, "svhn 1x400")
    with pytest.raises(RuntimeError, match="run gave no outcome of the trials of svhn 1x400"):
        list(run_network(protocols, ledger, lambda trials: iter(())))


def test_rows_on_a_cluster(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="needs Ray")
    monkeypatch.setattr("pseudograd.data.open_data", small)
    command = ["run", "table1", "--rows", "mnist 1x*00 m0.5", "--as-printed", "--smoke"]
    assert main([*command, "--out", "alone"]) == 0
    assert main([*command, "--ray", "local", "--out", "cluster"]) == 0
    assert "3 of 3 rows done, about 0 trials left" in capsys.readouterr().out
    for network in ("mnist 1x400", "mnist 1x800", "mnist 1x1100"):
        alone, cluster = (ledger_of(Path(where), network) for where in ("alone", "cluster"))
        assert {*cluster} == {*alone}
        assert all(cluster[trial] == alone[trial] for trial in alone)
    (session,) = sessions(Path("cluster"), smoke=True)
    assert session["hardware"].startswith("Ray cluster: 1 × node, ")


@pytest.mark.parametrize(
    ("options", "ledger"),
    [
        (["--rows", "mnist 1x400 m0.5*", "--as-printed"], "mnist-1x400.jsonl"),
        (["--rows", "mnist 1x400 m0.5"], "mnist-1x400.jsonl"),
        (["--rows", "mnist 1x400 m0.5 [0,1]"], "mnist-1x400-0-1.jsonl"),
        (["--rows", "mnist 1x400 m0.5 tanh"], "mnist-1x400-tanh.jsonl"),
    ],
)
def test_one_row_alone(
    options: list[str],
    ledger: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pseudograd.data.open_data", small)
    command = ["run", "table1", *options, "--smoke", "--out", "here"]
    assert main([*command, "--time-limit", "0.000001"]) == 0
    assert "the time is up; no trial has ended in it: give more" in capsys.readouterr().err
    assert main(command) == 0
    assert {path.name for path in Path("here").iterdir()} == {ledger, "manifest.json"}
    manifest = json.loads(Path("here/manifest.json").read_text())
    assert manifest[0]["command"].startswith("python -m paper run table1 --rows 'mnist 1x400 m0.5")


def test_the_time_is_up_after_some_trials(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_trial(*arguments: object, **options: Callable[..., None]) -> None:
        ledger = ledger_of(Path("here"), PAIR[0].network)
        options["begin"](PAIR[0].network, ledger, 8)
        options["watch"](Step(PAIR[0], made_up(PAIR[0].protocol().trial), 7))
        raise TimeIsUp

    monkeypatch.setattr("paper.run.reproduce", one_trial)
    assert main(["run", "table1", "--time-limit", "1", "--out", "here"]) == 0
    assert "the time is up; the same command goes on from here\n" in capsys.readouterr().err


def test_lower_rates_are_expected_to_take_longer() -> None:
    trial = Trial("svhn", (400,), k=1.0, learning_rate=0.5)
    done = [replace(made_up(trial), stopped_by="patience", epochs=epochs) for epochs in (40, 60)]
    short = replace(done[0], trial=replace(trial, learning_rate=0.1), stopped_by="limit", epochs=5)
    wanted = [replace(trial, learning_rate=rate) for rate in (1.0, 0.5, 0.25, 0.1)]
    assert _epochs(wanted, [*done, short]) == 50 + 50 + 100 + 250
    assert _epochs([replace(trial, max_epochs=5)], []) == 5


def test_the_status_of_all_rows(capsys: pytest.CaptureFixture[str]) -> None:
    run_all()
    capsys.readouterr()
    assert main(["status", "--rows", "svhn 1x*"]) == 0
    heading, *lines, last = capsys.readouterr().out.splitlines()
    assert heading.split()[:3] == ["row", "done", "left"]
    assert len(lines) == 9
    assert lines[0].startswith("svhn 1x400 m0.5")
    assert lines[0].endswith("1/2 (1/4)")
    assert last.startswith("3 of 9 rows done, about ")


def test_the_status_tells_of_lines_that_cannot_be_used(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ledger = ledger_of(Path("paper/results"), "svhn 1x400")
    ledger.path.parent.mkdir(parents=True)
    ledger.path.write_text("cut off\n")
    assert main(["status", "--rows", "svhn 1x400*"]) == 0  # three rows of one ledger
    assert capsys.readouterr().err == (
        "paper/results/svhn-1x400.jsonl: line 1 is set aside: it is not JSON, or cut off\n"
    )


def test_rows_that_are_not_printed_are_seen_once_begun(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--out", "nowhere"]) == 1
    assert "nowhere is not a folder: name one that holds ledgers" in capsys.readouterr().err
    assert main(["status", "--rows", "svhn 1x200*"]) == 1
    assert "match no row" in capsys.readouterr().err
    unprinted = [Experiment(row) for row in rows("unprinted", "svhn 1x200 m0.5")]
    reproduce(unprinted, Path("paper/results"), no_data, lambda _: world)
    assert main(["status", "--rows", "svhn 1x200 m0.5"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("1 of 1 rows done")
    assert main(["report"]) == 0
    text = Path("RESULTS.md").read_text("utf-8")
    assert "0 of 67 rows are finished" in text
    assert "1 of 3 that are comments in its source" in text
    assert "| svhn 1x200 m0.5 | 1/2 (1/4) | " in text
    assert "not confirmed" not in text.split("## What was run")[0]  # no claim is judged by it


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["table2"], "invalid choice: 'table2'"),
        (["table1", "--rows", "imagenet*"], "match no row"),
        (["table1", "--time-limit", "0"], "must be a number above 0"),
        (["table1", "--device", "cuda:99"], "--device cuda:99 cannot be used here"),
        (["table1", "--rows", "svhn*", "--data-dir", "nowhere"], "pseudograd data fetch svhn"),
    ],
)
def test_refusals(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(["run", *arguments])
    except SystemExit as exit_:
        code = exit_.code
    assert code in (1, 2)
    assert said in capsys.readouterr().err


def test_smoke_is_small() -> None:
    for experiment in experiments(rows()):
        full, small_ = experiment.protocol(), experiment.smoke()
        assert replace(small_.trial, hidden_layer_sizes=(), max_epochs=1, patience=1) == replace(
            full.trial, hidden_layer_sizes=(), max_epochs=1, patience=1
        )
        assert len(small_.trial.hidden_layer_sizes) == experiment.row.hidden_layers
