"""One study in several processes: every trial runs once, even if processes join late or die."""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import cast

import pytest
from torch import distributed

from pseudograd.files import Lock, guarded, locked
from pseudograd.fleet import OwnRecipe, Trial
from pseudograd.fleet.ramp import level
from pseudograd.search import Protocol, Study
from pseudograd.search.folder import Claims
from pseudograd.search.ledger import trial_name

pytest.importorskip("fcntl", reason="needs POSIX's locks")

PROTOCOL = Protocol(
    OwnRecipe("a formula"), ks=(2.0, 1.0, 0.5), initial_rate=0.1, repetitions=2, retrainings=2
)
# While one trial is running: 18 first ones less that, and 2 more rates for the other two k.
WITHOUT_ONE = 18 - 1 + 2 * 2 * 2
LONG = 120.0  # seconds: to wait for another process, however busy the machine is


def error_of(trial: Trial) -> float:
    """An error that is lowest at k = 1/2 and rate 0.4, so that the rates are extended."""
    distance = abs(math.log2(2 * level(trial.k))) + abs(math.log2(trial.learning_rate / 0.4))
    return 0.02 + 0.01 * distance + 0.001 * trial.split.repetition


def alone() -> Study:
    study = Study(None, PROTOCOL)
    for trial in study:
        study.tell(trial, error=error_of(trial))
    return study


# --- processes --------------------------------------------------------------------------------

# Fork them from one that has done the imports, which take seconds.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["pseudograd.search", "pytest"])


def work(folder: str, name: str, mood: str, count: int) -> None:
    """Run a study in a process.

    Processes signal each other by files, so that tests do not depend on timing. In its first trial,
    each waits until all are in theirs.
    """
    os.chdir(folder)
    study = Study("run", PROTOCOL)
    Path(f"signs/{name} is ready").touch()
    until(seen("go"))
    for done, trial in enumerate(study):
        Path(f"signs/{name} is in trial {done}").touch()
        until(lambda: len(list(Path("signs").glob("* is in trial 0"))) >= count)
        if mood == "stays" and done == 1:
            time.sleep(10 * LONG)
        if mood == "fails" and done == 1:
            sys.stderr = None
            raise ArithmeticError("the loss is NaN")
        if mood == "is slow":
            time.sleep(0.02)
        study.tell(trial, error=error_of(trial))
    Path(f"signs/{name} has {len(study.ledger)} outcomes").touch()


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("signs").mkdir()


@contextlib.contextmanager
def processes(**moods: str) -> Iterator[dict[str, ForkServerProcess]]:
    """Create processes by name, each with its own behaviour; kill them at the end."""
    started = {
        name: CONTEXT.Process(target=work, args=(os.getcwd(), name, mood, len(moods)), daemon=True)
        for name, mood in moods.items()
    }
    try:
        for process in started.values():
            process.start()
        yield started
    finally:
        for process in started.values():
            process.kill()
            process.join()


def status(process: ForkServerProcess) -> int | None:
    """Wait for a process and return its exit status."""
    process.join(LONG)
    return process.exitcode


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG
    while not is_so():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


def seen(sign: str) -> Callable[[], bool]:
    return Path("signs", sign).exists


def start(*names: str) -> None:
    """Start processes together, once all are ready."""
    for name in names:
        until(seen(f"{name} is ready"))
    Path("signs/go").touch()


def told() -> Counter[str]:
    """Count each trial in the ledger, which must hold complete lines and one recipe."""
    lines = [json.loads(line) for line in Path("run/ledger.jsonl").read_text().splitlines()]
    assert sum("fingerprint" in line for line in lines) == 1
    return Counter(json.dumps(line["trial"]) for line in lines if "trial" in line)


def check_as_alone(*trials: int) -> None:
    """Check that each trial is in the ledger once, and that the result is that of one process.

    Args:
        trials: How many trials the sessions ran, in any order, if that is certain.

    """
    study, expected = Study.open("run"), alone()
    assert set(told().values()) == {1}
    assert dict(study.ledger) == dict(expected.ledger)
    assert study.result == expected.result
    assert not study.ledger.set_aside
    if trials:
        assert sorted(one["trials"] for one in study.sessions) == sorted(trials)
    assert sorted(os.listdir("run")) == [".lock", "ledger.jsonl", "run.json"]


def test_three_processes_share_the_work() -> None:
    """They also create the folder at the same time; all finish and have the result."""
    with processes(a="", b="", c="") as started:
        start(*started)
        assert [status(process) for process in started.values()] == [0, 0, 0]
    check_as_alone()
    study = Study.open("run")
    shares = [one["trials"] for one in study.sessions]
    assert len(shares) == 3
    assert sum(shares) == len(study.ledger)
    assert min(shares) > 0
    for name in started:
        assert seen(f"{name} has {len(study.ledger)} outcomes")()


def rests() -> bool:
    """Return whether all trials are done but one, which is running."""
    done = len(Study.open("run").ledger)
    time.sleep(1.0)
    return WITHOUT_ONE <= done == len(Study.open("run").ledger)


def test_the_trial_of_a_killed_process_is_taken_over() -> None:
    with processes(killed="stays", other="") as started:
        start(*started)
        until(seen("killed is in trial 1"))
        until(rests)  # now the other process waits
        assert started["other"].is_alive()
        started["killed"].kill()
        assert status(started["killed"]) == -signal.SIGKILL
        assert status(started["other"]) == 0
    check_as_alone(1, len(alone().ledger) - 1)


def test_repeated_kills() -> None:
    """At any moment: during training, while a trial is claimed, or while a line is written."""
    chance = random.Random(0)
    Path("signs/go").touch()
    with contextlib.ExitStack() as stack:
        alive: list[ForkServerProcess] = []
        for number in range(30):
            if len(alive) == 3:
                one = alive.pop(chance.randrange(3))
                one.kill()
            one = stack.enter_context(processes(**{f"p{number}": "is slow"}))[f"p{number}"]
            alive.append(one)
            one.join(0.1 * chance.random())
        assert [status(process) for process in alive] == [0, 0, 0]
    check_as_alone()


def test_an_exception_in_one_process_costs_the_others_nothing() -> None:
    with processes(failing="fails", other="") as started:
        start(*started)
        assert status(started["failing"]) == 1
        assert status(started["other"]) == 0
    check_as_alone(1, len(alone().ledger) - 1)


def test_a_process_joins_late() -> None:
    """The first stays in the middle of a trial; the late one does all the others."""
    Path("signs/go").touch()
    with processes(first="stays") as started:
        until(seen("first is in trial 1"))
        study = Study("run", PROTOCOL)
        asked = []
        for trial in study:
            asked.append(trial)
            study.tell(trial, error=error_of(trial))
            if len(study.ledger) == WITHOUT_ONE:
                started["first"].kill()
    check_as_alone(1, len(asked))
    assert study.result == alone().result


def rank(folder: str, own: int, place: str | None) -> None:
    """Run a study as a rank of a torch.distributed job; it forgets to tell the first trial."""
    os.chdir(folder)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    meet = f"file://{folder}/meet"
    distributed.init_process_group("gloo", init_method=meet, rank=own, world_size=2)
    study, names = Study(place, PROTOCOL), list[str]()
    with contextlib.suppress(RuntimeError):  # in both ranks, so that none waits for the other
        for trial in study:
            if names:
                study.tell(trial, error=error_of(trial))
            names.append(trial_name(trial))
    for trial in study:
        names.append(trial_name(trial))
        study.tell(trial, error=error_of(trial) if own == 0 else 1.0)  # only rank 0's counts
    found = [names, study.finished, study.comparison.error == alone().comparison.error]
    Path(f"signs/{own}").write_text(json.dumps(found))
    distributed.barrier()
    os._exit(0)  # at a normal exit, the interpreter and PyTorch's threads can deadlock


@pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()),
    reason="this PyTorch has no gloo",
)
@pytest.mark.parametrize("place", ["run", None])
def test_ranks_train_the_same_trials(place: str | None) -> None:
    started = [CONTEXT.Process(target=rank, args=(os.getcwd(), own, place)) for own in range(2)]
    try:
        for process in started:
            process.start()
        assert [status(process) for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()
    first, second = (json.loads(Path(f"signs/{own}").read_text()) for own in range(2))
    assert first == second
    names, *ends = first
    assert ends == [True, True]
    assert names.count(names[0]) == 2  # untold, and offered again
    assert len(names) == len({*names}) + 1 == len(alone().ledger) + 1
    if place:
        check_as_alone(WITHOUT_ONE, len(alone().ledger) - WITHOUT_ONE)


# --- in one process: two studies stand in for two processes --------------------------------------


def two() -> tuple[Study, Study]:
    return Study("run", PROTOCOL), Study("run", PROTOCOL)


def tell(study: Study, trial: Trial | None) -> None:
    assert trial is not None
    study.tell(trial, error=error_of(trial))


def test_loops_in_threads_share_the_work() -> None:
    """Whether or not each has its own study."""
    one, another = two()
    studies = [one, one, another]

    def work(study: Study) -> None:
        for trial in study:
            tell(study, trial)

    threads = [threading.Thread(target=work, args=[study]) for study in studies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive()
    check_as_alone()


def test_asked_trials_are_different_until_they_are_released() -> None:
    one, another = two()
    first, second = one.ask(), another.ask()
    assert first is not None
    assert first != second
    with pytest.raises(BlockingIOError, match=r"another process is running Trial.*has asked for"):
        tell(another, first)
    one.release(first)
    assert another.ask() == first
    tell(another, first)
    tell(another, second)
    assert one.ask() not in (first, second)
    assert first in one.ledger


def test_ask_returns_none_if_all_trials_are_claimed() -> None:
    one, another = two()
    asked = [one.ask() for _ in range(18)]
    assert another.ask() is None
    assert not another.finished
    tell(one, asked[0])
    assert another.ask() is None
    one.release()
    assert another.ask() == asked[1]


@pytest.mark.parametrize("end", [KeyboardInterrupt, ValueError, None])
def test_a_loop_that_ends_gives_its_trial_back(end: type[BaseException] | None) -> None:
    one, another = two()
    with contextlib.suppress(KeyboardInterrupt, ValueError):
        for trial in one:
            left = trial
            assert another.ask() != left
            another.release()
            if end is None:
                break
            raise end
    assert another.ask() == left
    assert [session["trials"] for session in Study.open("run").sessions] == [0, 0]


def test_two_loops_that_forget_to_tell_do_not_wait_for_each_other() -> None:
    one, another = two()
    loops = iter(one), iter(another)
    for _ in range(9):
        next(loops[0]), next(loops[1])
    with pytest.raises(RuntimeError, match="9 trials ended without an outcome"):
        next(loops[0])
    assert next(loops[1])


def test_fleets_and_loops_exclude_each_other() -> None:
    one, another = two()
    busy = pytest.raises(BlockingIOError, match=r"another process is using run/ledger.jsonl")
    trial = one.ask()
    with busy:
        another.run(lambda trials, stop: [])
    tell(one, trial)
    with another.session("a fleet", []):
        with busy:
            one.ask()
        with busy:
            list(one)
        assert trial is not None
        with busy:
            one.tell(trial, error=0.5)
        following = another.ask()
        tell(another, following)  # a session has exclusive use of the folder, and claims nothing
        assert not Path("run/claims").exists()
    assert one.ask() not in (trial, following)
    one.release()
    commands = [(noted["command"], noted["trials"]) for noted in Study.open("run").sessions]
    assert commands == [("", 1), ("a fleet", 1), ("", 0)]


def test_the_session_of_a_loop_after_a_fleets_is_noted_as_its_own() -> None:
    study = Study("run", PROTOCOL)
    tell(study, study.ask())
    with study.session("a fleet", []):
        tell(study, study.ask())
    for trial in study:
        tell(study, trial)
    told = [(one["command"], one["trials"]) for one in Study.open("run").sessions]
    assert told == [("", 1), ("a fleet", 1), ("", len(study.ledger) - 2)]


@pytest.mark.parametrize("rest", [b'{"trial": {"recipe": "ab', b"\x00\x00\xff"])
def test_a_line_that_was_cut_off_is_removed_while_others_are_at_work(rest: bytes) -> None:
    one, another = two()
    tell(one, one.ask())
    trial, other_trial = one.ask(), another.ask()
    with Path("run/ledger.jsonl").open("ab") as file:  # a process was killed while it wrote this
        file.write(rest)
    assert len(Study.open("run").ledger) == 1
    tell(another, other_trial)
    tell(one, trial)
    assert len(told()) == 3
    for study in (one, another):
        for trial in study:
            tell(study, trial)
        assert not study.ledger.set_aside
    check_as_alone()


def test_an_outcome_without_its_line_end_counts() -> None:
    one, another = two()
    tell(one, one.ask())
    path = Path("run/ledger.jsonl")
    path.write_bytes(path.read_bytes()[:-1])
    for trial in another:
        tell(another, trial)
    check_as_alone()


def test_what_killed_processes_leave_is_removed_by_the_next() -> None:
    study = Study("run", PROTOCOL)
    Path("run/claims").mkdir()
    Path("run/claims/0123456789abcdef").touch()
    for trial in study:
        tell(study, trial)
    check_as_alone()


def test_a_lost_lock_costs_a_training_and_no_more() -> None:
    """A network file system may lose a lock when its server fails."""
    one, another = two()
    trial = one.ask()
    assert trial is not None
    for path in Path("run/claims").iterdir():
        path.unlink()
    assert another.ask() == trial
    tell(another, trial)
    one.tell(trial, error=0.9)
    assert set(told().values()) == {1}
    assert one.ledger[trial].error == error_of(trial)


def test_the_first_process_decides_the_settings() -> None:
    """Both studies were opened before either was started."""
    study = Study("run", PROTOCOL)
    Study("run", Protocol(OwnRecipe("another formula"), initial_rate=0.1))
    tell(study, study.ask())
    again = Study("run", PROTOCOL)
    assert len(again.ledger) == 1
    with pytest.raises(ValueError, match="holds a run with other settings"):
        Study("run", Protocol(OwnRecipe("another formula"), initial_rate=0.1))


def test_a_study_that_was_opened_too_early_is_refused() -> None:
    early = Study("run", Protocol(OwnRecipe("another formula"), initial_rate=0.1))
    study = Study("run", PROTOCOL)
    tell(study, study.ask())
    with pytest.raises(ValueError, match="holds a run with other settings"):
        early.ask()
    tell(study, study.ask())


def test_the_range_changes_only_while_no_other_process_is_at_work() -> None:
    study, wider = Study("run", PROTOCOL), replace(PROTOCOL, ks=(*PROTOCOL.ks, 4.0))
    trial = study.ask()
    early = Study("run", wider)
    with pytest.raises(BlockingIOError, match=r"other values of k, learning .*: give the same"):
        early.ask()
    assert trial is not None
    tell(study, trial)
    assert Study.open("run").protocol == PROTOCOL
    later = early.ask()
    assert later is not None
    assert Study.open("run").protocol == wider
    assert trial in early.ledger
    tell(early, later)
    # The first continues with its own range, and does not change the folder's.
    tell(study, study.ask())
    assert Study.open("run").protocol == wider
    assert len(Study.open("run").ledger) == 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_neither_claims_nor_locks() -> None:
    """A DataLoader worker, for example, may outlive its parent by some seconds."""
    study = Study("run", PROTOCOL)
    loop = cast("Generator[Trial]", iter(study))
    trial = next(loop)
    context = multiprocessing.get_context("fork")
    go = context.Event()
    child = context.Process(target=ends_a_loop_of_its_parent, args=(loop,), daemon=True)
    child.start()
    child.join(LONG)
    assert child.exitcode == 0
    assert Study("run", PROTOCOL).ask() != trial  # it is still claimed
    other = context.Process(target=go.wait, daemon=True)
    other.start()
    study.release()
    assert Study("run", PROTOCOL).ask() == trial  # although the child inherited the open file
    go.set()
    other.join(LONG)


def ends_a_loop_of_its_parent(loop: Generator[Trial]) -> None:
    loop.close()
    study = Study("run", PROTOCOL)
    tell(study, study.ask())


@pytest.mark.parametrize("system", ["without locks", "whose files have none"])
def test_one_process_needs_no_locks(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    if system == "without locks":
        monkeypatch.setattr("pseudograd.files.fcntl", None)
    else:
        monkeypatch.setattr("pseudograd.files.fcntl.flock", refusing)
    study = Study("run", PROTOCOL)
    first, second = study.ask(), study.ask()
    assert first != second
    tell(study, second)
    for trial in study:
        tell(study, trial)
    check_as_alone()


def test_locks(tmp_path: Path) -> None:
    path = tmp_path / "file"
    one = Lock.on(path)
    assert one is not None
    assert Lock.on(path) is None
    one.release()
    one.release()
    assert not one.held
    another = Lock.on(path)
    assert another is not None
    del another
    with locked(path):
        assert Lock.on(path) is None


def test_a_guard_admits_one_thread_at_a_time(tmp_path: Path) -> None:
    order = []

    def work() -> None:
        with guarded(tmp_path / ".lock"):
            order.append("thread")

    thread = threading.Thread(target=work)
    with guarded(tmp_path / ".lock"), guarded(tmp_path / ".lock"):
        thread.start()
        thread.join(0.1)
        order.append("main")
    thread.join(LONG)
    assert order == ["main", "thread"]


def test_claims_are_kept_by_the_trial(tmp_path: Path) -> None:
    ours, theirs = Claims(tmp_path), Claims(tmp_path)
    trials = [Trial(OwnRecipe("mine"), k, 0.1) for k in (1.0, 0.5)]
    assert ours.take(trials[0])
    assert not ours.take(trials[0])
    assert theirs.take(trials[1])
    assert (ours.trials, theirs.trials) == (trials[:1], trials[1:])
    theirs.release(trials[0])  # not theirs
    assert theirs.others()
    assert not theirs.take(trials[0])
    ours.release(trials[0])
    assert theirs.take(trials[0])
