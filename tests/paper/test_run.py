"""The paper's experiments: run, stopped, resumed and side by side; their committed ledgers."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paper.cli import FLEETS_ON_A_GPU, _print_status, fleets_at_once, main
from paper.rows import Experiment, Row, experiments, rows
from paper.run import _epochs, folder_of, run, status, study_of
from pseudograd.cli.place import Place
from pseudograd.data import Dataset, Encoder
from pseudograd.files import locked
from pseudograd.fleet import Fleet, MLPRecipe, Outcome, Stop, Trial
from pseudograd.fleet.ramp import level
from pseudograd.search import Progress, Study
from pseudograd.search.ledger import outcome_to_json

pytestmark = pytest.mark.usefixtures("one_thread", "in_an_empty_folder")

ROOT = Path(__file__).parents[2]
HERE = Path("here")
PAIR = experiments(rows("table1", "svhn 1x?00*"))
PATIENCE = 60  # seconds: the timeout of a thread that waits for another


def made_up(trial: Trial) -> Outcome:
    """The best rate is 0.1 at k = 1/2."""
    distance = abs(trial.learning_rate / 0.1 - 1) + abs(level(trial.k) - 0.5)
    error = 0.02 + 0.01 * min(distance, 10) + 0.001 * trial.split.repetition
    wrong = (1, 2) if trial.split.retrain else None
    curve = (0.9, 0.8, 0.7, 0.6, 0.123456789)
    return Outcome(trial, error, 5, error, 2 * error, 20, "patience", curve, wrong)


def world(trials: deque[Trial], stop: Stop) -> Iterator[Outcome]:
    while trials and not stop():
        yield made_up(trials.popleft())


def no_data(name: str) -> Dataset:
    return Dataset(name, torch.zeros(6, 1), torch.tensor([0, 1] * 3), 5)


def other_data(name: str) -> Dataset:
    return replace(no_data(name), features=torch.ones(6, 1))


def run_made_up(
    some: list[Experiment] = PAIR, runner: Callable[..., Any] = world, **options: Any
) -> bool:
    return run(some, HERE, no_data, lambda data: runner, **options)


# --- the committed ledgers ---------------------------------------------------------------------


def test_no_outcome_was_lost_when_the_ledgers_were_converted() -> None:
    """Their old form, with all settings in every line, is compared by its hash."""
    total = count = 0
    for folder in sorted((ROOT / "paper" / "results").glob("*/")):
        protocol = json.loads((folder / "run.json").read_text("utf-8"))
        recipes = {}
        for line in (folder / "ledger.jsonl").read_text("utf-8").splitlines():
            fields = json.loads(line)
            if "recipe" in fields:
                recipes[fields["fingerprint"]] = fields["recipe"]
                continue
            recipe = dict(recipes[fields["trial"].pop("recipe")])
            assert recipe.pop("kind") == "mlp"
            fields["data_hash"] = recipe.pop("data_hash")
            assert protocol["data"]["sha256"].startswith(fields["data_hash"])
            fields["trial"] |= recipe
            digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
            total, count = (total + int(digest, 16)) % 2**128, count + 1
    assert count == 23_459
    assert f"{total:032x}" == "69a6d16f5e5ed41159fe1b9ff933f4ad"


def test_committed_studies_are_finished_and_nothing_is_set_aside() -> None:
    every = experiments(rows())
    assert len(every) == len(list((ROOT / "paper" / "results").glob("*/"))) == 90
    for experiment in every[::9]:
        study = study_of(experiment, ROOT / "paper" / "results")
        assert study.finished
        assert not study.ledger.set_aside
        assert sum(session["trials"] for session in study.sessions) == len(study.ledger)


# --- running -----------------------------------------------------------------------------------


def test_experiments_are_run_to_their_end_and_not_again() -> None:
    assert run_made_up(command="python -m paper run table1", devices=("cpu",))
    ledgers = {one: folder_of(one, HERE) / "ledger.jsonl" for one in PAIR}
    before = {one: path.read_bytes() for one, path in ledgers.items()}
    for one in PAIR:
        study = study_of(one, HERE)
        assert study.result.chosen.k == 0.5
        assert study.data["sha256"] == no_data("svhn").sha256
        (session,) = study.sessions
        assert session["command"] == "python -m paper run table1"
        assert session["trials"] == len(study.ledger)

    def missing(name: str) -> Dataset:
        raise FileNotFoundError(name)

    assert run(PAIR, HERE, missing, lambda data: world)  # the data may be on another machine
    assert {one: path.read_bytes() for one, path in ledgers.items()} == before


def test_the_papers_rows_are_run_before_the_variants() -> None:
    begun: list[Experiment] = []

    def watch(experiment: Experiment, study: Study) -> Callable[[Progress], None]:
        begun.append(experiment)
        return lambda _: None

    some = experiments(rows("table1", "mnist 1x?00 m0.5"))
    assert run_made_up(some, smoke=True, watch=watch)
    assert [one.as_printed for one in begun] == [True, True, False, False, False]
    assert set(begun) == set(some)


def test_a_user_defined_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    own = [Experiment(Row("mine", "fashion-mnist", 2, 400, 0.5))]
    (state,) = status(own, HERE)
    assert (state.done, state.seconds) == (0, None)
    run_made_up(own)
    _print_status(own, HERE, smoke=False)
    _, line, last = capsys.readouterr().out.splitlines()
    assert line.split()[-1] == "1/2"  # and none of the paper's
    assert last == "1 of 1 rows done, about 0 trials left"


def test_ledgers_are_small() -> None:
    run_made_up(PAIR[:1])
    for trial, outcome in study_of(PAIR[0], HERE).ledger.items():
        whole = (0.9, 0.8, 0.7, 0.6, 0.12346)
        assert outcome.curve == (whole if trial.split.retrain else (0.9, 0.8, 0.6))
        assert len(json.dumps(outcome_to_json(outcome))) < 350


def test_other_data_are_refused() -> None:
    seen: list[Progress] = []
    run_made_up(PAIR[:1], stop=lambda: bool(seen), watch=lambda *_: seen.append)
    path = folder_of(PAIR[0], HERE) / "ledger.jsonl"
    before = path.read_bytes()
    hashes = [data("svhn").sha256[:16] for data in (no_data, other_data)]
    with pytest.raises(ValueError, match=f"{hashes[0]} and not with {hashes[1]}: use that data"):
        run(PAIR[:1], HERE, other_data, lambda data: world)
    assert path.read_bytes() == before


def test_lines_on_other_data_are_set_aside(capsys: pytest.CaptureFixture[str]) -> None:
    run_made_up(PAIR[:1])
    run(PAIR[:1], Path("there"), other_data, lambda data: world)
    ours, theirs = (folder_of(PAIR[0], at) / "ledger.jsonl" for at in (HERE, Path("there")))
    ours.write_bytes(ours.read_bytes() + theirs.read_bytes())
    assert main(["status", "--rows", PAIR[0].name, "--out", "here"]) == 0
    captured = capsys.readouterr()
    assert "1 of 1 rows done" in captured.out
    (line,) = captured.err.splitlines()
    assert "is the outcome of a trial with another recipe" in line
    assert int(line.split(": ")[1].split()[0]) > 100


def test_trials_left_by_a_time_limit_run_later() -> None:
    done: list[Progress] = []
    assert not run_made_up(stop=lambda: len(done) >= 30, watch=lambda *_: done.append)
    assert len(study_of(PAIR[0], HERE).ledger) == 30
    assert not (folder_of(PAIR[1], HERE)).exists()
    assert run_made_up()


def test_several_are_under_way_at_once_and_end_as_one_by_one() -> None:
    both = threading.Barrier(2)

    def sweeps_together(trials: deque[Trial], stop: Stop) -> Iterator[Outcome]:
        if isinstance(trials[0].recipe, MLPRecipe) and trials[0].recipe.max_epochs == 5:
            both.wait(PATIENCE)
        yield from world(trials, stop)

    assert run_made_up(runner=sweeps_together, at_once=2)
    found = [dict(study_of(one, HERE).ledger) for one in PAIR]
    assert all(study_of(one, HERE).sessions[0]["share"] == 0.5 for one in PAIR)
    run(PAIR, Path("alone"), no_data, lambda data: world)
    assert found == [dict(study_of(one, Path("alone")).ledger) for one in PAIR]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_failure_ends_all_studies(error: type[BaseException]) -> None:
    """Both if a runner fails and if Ctrl-C arrives in a thread."""
    both, closed = threading.Barrier(2), []

    def runner(trials: deque[Trial], stop: Stop) -> Iterator[Outcome]:
        try:
            yield made_up(trials.popleft())
            if both.wait(PATIENCE) == 0:
                raise error("the machine is gone")
            deadline = time.monotonic() + PATIENCE
            while not stop():
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            closed.append(threading.current_thread().name)

    with pytest.raises(error):
        run_made_up(runner=runner, at_once=2)
    assert len(set(closed)) == 2
    for one in PAIR:
        study = study_of(one, HERE)
        assert len(study.ledger) == study.sessions[0]["trials"] == 1
        with locked(folder_of(one, HERE) / "ledger.jsonl"):  # no one else holds the lock
            pass


def test_ctrl_c_while_threads_work() -> None:
    begun = threading.Event()

    @contextmanager
    def workplace() -> Iterator[None]:
        begun.set()
        yield

    def runner(trials: deque[Trial], stop: Stop) -> Iterator[Outcome]:
        assert begun.wait(PATIENCE)
        yield made_up(trials.popleft())
        os.kill(os.getpid(), signal.SIGINT)
        deadline = time.monotonic() + PATIENCE
        while not stop():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt):
        run_made_up(PAIR[:1], runner, at_once=2, workplace=workplace)
    assert len(study_of(PAIR[0], HERE).ledger) == 1


def test_fleets_side_by_side_give_what_they_give_one_by_one() -> None:
    some = experiments(rows("table1", "mnist 1x400 m0.5"))[:2]
    data = small("mnist")[0]
    found = []
    for at_once in (1, 2):
        folder = Path(f"results-{at_once}")
        run(some, folder, lambda _: data, lambda d: Fleet(d).run, smoke=True, at_once=at_once)
        found.append([dict(study_of(one, folder, smoke=True).ledger) for one in some])
    assert found[0] == found[1]


def test_none_at_once() -> None:
    with pytest.raises(ValueError, match="at_once must be 1 or more, not 0"):
        run_made_up(at_once=0)


@pytest.mark.parametrize(
    ("devices", "at_once"),
    [
        (["cuda"], FLEETS_ON_A_GPU),
        (["cuda:1"], FLEETS_ON_A_GPU),
        (["cuda:0", "cuda:1"], 1),
        (["cpu"], 1),
    ],
)
def test_several_at_once_on_one_gpu(
    devices: list[str], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pseudograd.fleet.devices.check_device", str)
    assert fleets_at_once(Place(argparse.Namespace(device=devices, ray=None)).devices) == at_once


# --- the command -------------------------------------------------------------------------------


def small(name: str, **_: object) -> tuple[Dataset, Encoder]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (1600,), generator=generator)
    noise = torch.randint(0, 60, (1600, 20), generator=generator)
    pixels = (noise + 9 * labels[:, None] * (torch.arange(20) % 3)).byte()
    data = Dataset(name, pixels, labels, 1050)
    return data, Encoder("y", tuple(range(10)), (), (4, 5), (0.0, 255.0))


def test_a_small_run_from_start_to_report(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pseudograd.data.open_data", small)
    command = ["run", "table1", "--rows", "mnist 1x400 m0.5*", "--smoke"]
    assert main(command) == 0
    captured = capsys.readouterr()
    assert "3 of 3 rows done, about 0 trials left" in captured.out
    assert captured.out.endswith("studies: runs/smoke\n")
    assert "mnist 1x400 m0.5 [0,1], retraining: " in captured.err
    names = {"mnist-1x400-m0.5", "mnist-1x400-m0.5-0-1", "mnist-1x400-m0.5-tanh"}
    assert {path.name for path in Path("runs/smoke").iterdir()} == names
    (experiment, *_) = experiments(rows("table1", "mnist 1x400 m0.5"))
    study = study_of(experiment, Path("runs/smoke"), smoke=True)
    assert {trial.split.test for trial in study.ledger} == {True, False}
    assert len(study.result.comparison.chosen) == 2
    with pytest.raises(ValueError, match=r"holds a run with other settings .* --smoke"):
        study_of(experiment, Path("runs/smoke"))  # of the whole protocol
    files = [path for path in Path("runs/smoke").rglob("*") if path.is_file()]
    before = {path: path.read_bytes() for path in files}
    assert main(command) == 0  # again: there is nothing left
    assert {path: path.read_bytes() for path in files} == before


def test_rows_on_a_cluster(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="needs Ray")
    monkeypatch.setattr("pseudograd.data.open_data", small)
    command = ["run", "table1", "--rows", "mnist 1x?00 m0.5", "--as-printed", "--smoke"]
    assert main([*command, "--out", "alone"]) == 0
    assert main([*command, "--ray", "local", "--out", "cluster"]) == 0
    assert "2 of 2 rows done, about 0 trials left" in capsys.readouterr().out
    for name in ("mnist-1x400-m0.5", "mnist-1x800-m0.5"):
        alone, cluster = (
            json.loads(Path(where, name, "run.json").read_text()) for where in ("alone", "cluster")
        )
        assert alone["sessions"][0]["trials"] == cluster["sessions"][0]["trials"]
        assert cluster["sessions"][0]["hardware"].startswith("Ray cluster: 1 × node, ")
        lines = [
            sorted(Path(where, name, "ledger.jsonl").read_text().splitlines())
            for where in ("alone", "cluster")
        ]
        assert lines[0] == lines[1]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (["--rows", "mnist 1x400 m0.5*", "--as-printed"], "mnist-1x400-m0.5"),
        (["--rows", "mnist 1x400 m0.5"], "mnist-1x400-m0.5"),
        (["--rows", "mnist 1x400 m0.5 [0,1]"], "mnist-1x400-m0.5-0-1"),
        (["--rows", "mnist 1x400 m0.5 tanh"], "mnist-1x400-m0.5-tanh"),
    ],
)
def test_one_row_alone(
    options: list[str],
    name: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pseudograd.data.open_data", small)
    command = ["run", "table1", *options, "--smoke", "--out", "here"]
    assert main([*command, "--time-limit", "0.000001"]) == 0
    assert "time limit reached; the same command resumes" in capsys.readouterr().err
    assert main(command) == 0
    assert [path.name for path in HERE.iterdir()] == [name]
    session = json.loads((HERE / name / "run.json").read_text())["sessions"][-1]
    assert session["command"].startswith("python -m paper run table1 --rows 'mnist 1x400 m0.5")


def test_lower_rates_are_expected_to_take_longer() -> None:
    trial = Trial(MLPRecipe("svhn", (400,)), k=1.0, learning_rate=0.5)
    done = [replace(made_up(trial), stopped_by="patience", epochs=epochs) for epochs in (40, 60)]
    short = replace(done[0], trial=replace(trial, learning_rate=0.1), stopped_by="limit", epochs=5)
    wanted = [replace(trial, learning_rate=rate) for rate in (1.0, 0.5, 0.25, 0.1)]
    assert _epochs(wanted, [*done, short]) == 50 + 50 + 100 + 250


def test_the_status_of_some_rows(capsys: pytest.CaptureFixture[str]) -> None:
    run_made_up()
    assert main(["status", "--rows", "svhn 1x*", "--out", "here"]) == 0
    heading, *lines, last = capsys.readouterr().out.splitlines()
    assert heading.split()[:3] == ["row", "done", "left"]
    assert len(lines) == 9
    assert lines[0].startswith("svhn 1x400 m0.5")
    assert lines[0].endswith("1/2 (1/4)")
    assert last.startswith("2 of 9 rows done, about ")


def test_rows_that_are_not_printed_are_seen_once_begun(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--out", "nowhere"]) == 1
    assert "nowhere is not a folder: name one that holds studies" in capsys.readouterr().err
    assert main(["status", "--rows", "svhn 1x200*"]) == 1
    assert "match no row" in capsys.readouterr().err
    unprinted = [Experiment(row) for row in rows("unprinted", "svhn 1x200 m0.5")]
    run(unprinted, Path("paper/results"), no_data, lambda data: world)
    assert main(["status", "--rows", "svhn 1x200 m0.5"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("1 of 1 rows done")
    assert main(["report"]) == 0
    text = Path("RESULTS.md").read_text("utf-8")
    assert "0 of 67 rows are finished" in text
    assert "| svhn 1x200 m0.5 | 1/2 (1/4) | " in text
    assert "not confirmed" not in text.split("## What was run")[0]  # no claim is judged by it


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["table2"], "invalid choice: 'table2'"),
        (["table1", "--rows", "imagenet*"], "match no row"),
        (["table1", "--time-limit", "soon"], "invalid minutes value: 'soon'"),
        (["table1", "--device", "cuda:99"], "--device cuda:99 cannot be used here"),
        (["table1", "--rows", "svhn*", "--data-dir", "nowhere"], "pseudograd data fetch svhn"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(["run", *arguments])
    except SystemExit as exit_:
        code = exit_.code
    assert code in (1, 2)
    assert said in capsys.readouterr().err
