"""The run folder: damaged or lost files are noticed and repaired, foreign files refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from covering import covering
from pseudograd.cli import main
from pseudograd.data import open_data
from pseudograd.fleet.ramp import level
from pseudograd.search import Bagging, Study, load_model, study_of, table_recipe
from pseudograd.search.protocol import RANGE
from run_folders import (
    BAGGING,
    OPTIONS,
    PAPER,
    changed,
    content,
    cut,
    flip,
    make_runs,
    places,
    stop_after,
    trained,
    tune,
    use,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    make_runs(folder)
    return folder


@pytest.fixture(autouse=True)
def _in_an_empty_folder(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(finished / "pets.csv", "pets.csv")


def said_by(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the one error line of a command that exits with status 1."""
    capsys.readouterr()
    assert main(arguments) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("pseudograd: ")
    return lines[0]


# --- damage -----------------------------------------------------------------------------------


MODELS = [
    *((protocol, f"{name}.safetensors") for protocol in OPTIONS for name in ("model", "plain")),
    ("paper", "ensemble.safetensors"),
    ("paper", "plain_ensemble.safetensors"),
]


@covering(1, damage=[cut, flip, Path.unlink], model=MODELS)
def test_a_damaged_model_is_noticed_and_repaired(
    model: tuple[str, str],
    damage: Callable[[Path], None],
    finished: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    protocol, name = model
    before = use(finished, protocol)
    damage(Path("run", name))
    k = ["--k", "1"] if name.startswith("plain") else []
    k += ["--ensemble"] if "ensemble" in name else []
    said = said_by(capsys, "predict", "run", "pets.csv", *k)
    assert f"run/{name} is " in said
    assert said.endswith("run the search's command again, which repairs it")
    noted = trained(monkeypatch)
    assert tune(*OPTIONS[protocol]) == 0
    assert content() == before
    assert not noted
    assert main(["predict", "run", "pets.csv", *k]) == 0


@covering(
    damage=[cut, Path.unlink],
    name=["model.json", "assessment.json", "examples.json", "suspects.csv"],
    protocol=OPTIONS,
)
def test_documents_of_the_model_are_restored(
    protocol: str,
    name: str,
    damage: Callable[[Path], None],
    finished: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = use(finished, protocol)
    if protocol == "paper" and name not in before:
        assert name in ("assessment.json", "suspects.csv")
        return
    damage(Path("run", name))
    noted = trained(monkeypatch)
    assert tune(*OPTIONS[protocol]) == 0
    after = content()
    if name == "suspects.csv" and damage is cut:  # the user may have added to it
        assert after.pop(name) != before.pop(name)
    assert after == before
    assert not noted


def test_the_final_networks_of_the_paper_can_be_averaged(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use(finished, "paper")
    for k in (None, 1.0):
        one, _ = load_model("run", k)
        several, _ = load_model("run", k, ensemble=True)
        assert (len(one.networks), len(several.networks)) == (1, 2)
        assert several.weights == (0.5, 0.5)
        kept = [network.parameters[0][0] for network in several.networks]
        assert any(torch.equal(one.networks[0].parameters[0][0], first) for first in kept)
    told = []
    for extra in ([], ["--ensemble"], ["--ensemble", "--k", "1"]):
        assert main(["predict", "run", "pets.csv", *extra]) == 0
        told.append(capsys.readouterr().out)
    assert len({*told}) == 3

    use(finished, "bagging")
    assert main(["predict", "run", "pets.csv"]) == 0
    alone = capsys.readouterr()
    assert main(["predict", "run", "pets.csv", "--ensemble"]) == 0
    captured = capsys.readouterr()
    assert captured.out == alone.out
    assert captured.err.startswith("the model of this run is already an ensemble\n")
    said = said_by(capsys, "predict", "run", "pets.csv", "--network", "nets:net")
    assert "--network must be left out" in said


def test_a_single_final_network_is_no_ensemble(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune(*PAPER, "--retrainings", "1") == 0
    capsys.readouterr()
    said = said_by(capsys, "predict", "run", "pets.csv", "--ensemble")
    assert "run has no ensemble.safetensors: it needs two final networks or more" in said


def test_only_lost_networks_are_trained_again(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = use(finished, "bagging")
    networks = sorted(Path("run/networks").iterdir())
    assert len(networks) == len(Study.open("run").ledger)
    noted = trained(monkeypatch)
    networks[0].unlink()
    cut(networks[1])
    flip(networks[2])
    assert tune(*BAGGING) == 0
    assert not noted  # the model is as it was
    Path("run/model.json").unlink()
    assert tune(*BAGGING) == 0
    assert len(noted) == 3
    assert content() == before
    networks[0].unlink()
    networks[0].mkdir()
    Path("run/model.json").unlink()
    capsys.readouterr()
    assert tune(*BAGGING) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"pseudograd: {networks[0]} cannot be written (is a directory): ")


# --- foreign JSON -----------------------------------------------------------------------------

READ_BY = {
    "run.json": ("tune", "predict", "report", "runs"),
    "model.json": ("predict", "report", "runs"),
    "assessment.json": ("report", "runs"),
    "examples.json": ("report",),
}
COMMANDS = {
    "tune": ["tune", "pets.csv", "--target", "pet", *BAGGING],
    "predict": ["predict", "run", "pets.csv"],
    "report": ["report", "run"],
    "runs": ["runs", "."],
}
RAW = {
    "cut": b'{"recipe": {',
    "list": b"[]",
    "object": b"{}",
    "nan": b'{"k": NaN}',
    "endless": b'{"k": 1' + b"0" * 5000 + b"}",
    "deep": b"[" * 100_000,
    "half a character": b'{"k": "\\ud800"}',
    "binary": bytes(range(256)),
}


def check(
    capsys: pytest.CaptureFixture[str], command: str, name: str, how: tuple[Any, ...] = ()
) -> None:
    """Check that the command ends with one sentence about the file, if it reads it."""
    capsys.readouterr()
    status = main(COMMANDS[command])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    if status == 0 and (how or command not in READ_BY[name]):  # perhaps a harmless change
        return
    assert status == 1, (command, how)
    lines = [line for line in captured.err.splitlines() if " set aside" not in line]
    assert len(lines) == 1, (command, how, lines)
    assert lines[0].startswith("pseudograd: ")
    assert "run/" in lines[0] or "run holds" in lines[0]
    if command == "runs":
        assert len(captured.out.splitlines()) == 2  # the other run is listed


@pytest.mark.parametrize(
    ("name", "raw"),
    # The others are read in the same way.
    [(name, raw) for name in READ_BY for raw in (RAW if name == "run.json" else ("cut", "deep"))],
)
def test_foreign_files_are_refused_in_a_sentence(
    name: str, raw: str, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use(finished, "bagging")
    shutil.copytree("run", "other")
    for command in ("predict", "report", "runs", "tune"):
        if command != "tune" or name == "run.json" or raw == "cut":
            Path("run", name).write_bytes(RAW[raw])
            check(capsys, command, name)


@pytest.mark.parametrize("name", READ_BY)
def test_a_folder_in_place_of_a_file(
    name: str, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use(finished, "bagging")
    shutil.copytree("run", "other")
    Path("run", name).unlink()
    Path("run", name).mkdir()
    for command in ("predict", "report", "runs"):
        check(capsys, command, name)
    assert main(COMMANDS["tune"]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"pseudograd: run/{name} cannot be ")
    assert "(is a directory): " in last


STRANGE: list[Any] = [..., None, [], {}, "x", -1, 1e300, 0.5]


@pytest.mark.parametrize("new", STRANGE, ids=repr)
@pytest.mark.parametrize("name", ["run.json", "model.json"])
def test_changed_values_are_refused_in_a_sentence(
    name: str, new: Any, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use(finished, "bagging")
    shutil.copytree("run", "other")
    path = Path("run", name)
    right = json.loads(path.read_text())
    known = list(places(right)) if name == "run.json" else [(field,) for field in right]
    for turn, at in enumerate(known):
        path.write_text(json.dumps(changed(right, at, new)))
        # Every place meets every value and every command, and so does every value.
        commands = [command for command in READ_BY[name] if command != "tune"]
        check(capsys, commands[(turn + STRANGE.index(new)) % len(commands)], name, at)
        if at[0] in ("recipe", "protocol") and at[-1] not in RANGE and new == "x":
            check(capsys, "tune", name, at)


@pytest.mark.parametrize("new", STRANGE, ids=repr)
def test_facts_about_the_data_are_checked_before_there_is_a_model(
    new: Any, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use(finished, "bagging")
    stop_after(7)
    path = Path("run/run.json")
    right = json.loads(path.read_text())
    for name in ("name", "train_size", "test_size", "labels", "pixels", "target"):
        path.write_text(json.dumps(changed(right, ("data", name), new)))
        capsys.readouterr()
        status = main(["report", "run"])
        assert status or new not in (..., None) or name in ("name", "pixels", "target")
        said = "pseudograd: run/run.json lacks facts about the data that the page needs ("
        assert capsys.readouterr().err.startswith(said if status else "")


def test_ledger_lines_that_are_not_outcomes_are_set_aside(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use(finished, "bagging")
    path = Path("run/ledger.jsonl")
    right = json.loads(path.read_text().splitlines()[-1])
    for at in places(right):
        for new in STRANGE:
            with path.open("a") as file:
                file.write(json.dumps(changed(right, at, new)) + "\n")
    capsys.readouterr()
    assert main(COMMANDS["report"]) == 0
    lines = capsys.readouterr().err.splitlines()
    count = len(Study.open("run").ledger.set_aside)
    assert count > 30
    said = "set aside, the first because it is JSON, but not the outcome of a trial of this version"
    assert lines == [f"run/ledger.jsonl: {count:,} lines {said}"]
    for command in ("runs", "predict"):
        assert main(COMMANDS[command]) == 0


def test_a_model_of_another_version_is_refused(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use(finished, "bagging")
    path = Path("run/model.json")
    fields = json.loads(path.read_text())
    del fields["made_from"]
    path.write_text(json.dumps(fields))
    said = "run/model.json is damaged, or from another version (KeyError('made_from')): run the"
    assert said in said_by(capsys, "predict", "run", "pets.csv")


# --- a list of runs ---------------------------------------------------------------------------


def test_runs_tells_the_models_own_errors(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for protocol in OPTIONS:
        shutil.copytree(finished / protocol, Path("runs", protocol))
    use(finished, "bagging")
    stop_after(5)
    Path("run").rename("runs/cut")
    capsys.readouterr()
    assert main(["runs"]) == 0
    head, bagging, cut_off, paper = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["started", "trials"]
    told = json.loads(Path("runs/bagging/assessment.json").read_text())
    ks = "+".join("1/2" if k == 0.5 else "1" for k in sorted(k for k, _ in told["members"]["ks"]))
    errors = [f"{100 * told[name]['error']:.2f}" for name in ("model", "plain")]
    assert bagging.split()[2:] == ["20", ks, *errors, "runs/bagging"]
    assert cut_off.split()[2:] == ["4", "unfinished", "runs/cut"]
    error = json.loads(Path("runs/paper/model.json").read_text())["test_error"]
    assert paper.split()[3:5] == ["1/2", f"{100 * error:.2f}"]


def test_unreadable_runs_do_not_end_the_list(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "abcde":
        shutil.copytree(finished / "bagging", Path("runs", name))
    Path("runs/a/run.json").write_text("[]")
    Path("runs/b/ledger.jsonl").unlink()
    Path("runs/b/ledger.jsonl").mkdir()
    cut(Path("runs/c/assessment.json"))
    Path("runs/d/model.json").unlink()
    capsys.readouterr()
    assert main(["runs"]) == 1
    captured = capsys.readouterr()
    listed = [line.split() for line in captured.out.splitlines()[1:]]
    assert [(line[3] == "unfinished", line[-1]) for line in listed] == [
        (True, "runs/d"),
        (False, "runs/e"),
    ]
    for line, file in zip(
        captured.err.splitlines(),
        ["a/run.json is damaged", "b/ledger.jsonl cannot be read", "c/assessment.json is damaged"],
        strict=True,
    ):
        assert line.startswith(f"pseudograd: runs/{file}")


# --- unfinished runs --------------------------------------------------------------------------


@pytest.mark.parametrize("lines", [0, 1, 2, 6, 7, 16, 20])
def test_the_page_of_an_unfinished_run(
    lines: int, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use(finished, "bagging")
    stop_after(lines)
    Path("run/report.html").unlink()
    assert main(["report", "run"]) == 0
    page = Path("run/report.html").read_text()
    assert "None" not in page
    assert "nan" not in page
    assert ("so far" in page) or ("yet" in page)


@pytest.mark.parametrize("sample", [0, 20])
def test_the_page_while_pairs_are_first_looked_at(
    sample: int, capsys: pytest.CaptureFixture[str]
) -> None:
    data, encoder = open_data("pets.csv", target="pet")
    recipe = table_recipe("pets.csv", data.train_size)
    protocol = Bagging(recipe, ks=(2.0, 1.0), finalists=2, sample=sample)
    study = study_of(data, encoder, protocol, "run")
    with study.session("", ["cpu"]):
        while (trial := study.ask()) is not None:
            k = level(trial.k)
            study.tell(trial, error=0.1 * k + trial.learning_rate, cross_entropy=k)
            assert main(["report", "run"]) == 0
            page = Path("run/report.html").read_text()
            assert "Not finished yet" in page
            assert "nan" not in page
            assert main(["runs", "."]) == 0
            assert "unfinished" in capsys.readouterr().out
    # Six first looks (part of the five folds if at the whole table), and two pairs of five folds.
    assert len(study.ledger) == (6 + 10 if sample else 4 + 10)


# --- stopped in the middle --------------------------------------------------------------------

KILLED = """
import os, signal, sys
import torch
from pseudograd.cli import main
from pseudograd.search import ledger

torch.set_num_threads(1)
append = ledger.Ledger.append

def killing(self, outcome):
    if len(self) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    append(self, outcome)

ledger.Ledger.append = killing
main(sys.argv[1:])
"""


def test_a_kill_costs_no_finished_training(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kill it with the fourth network on disk, but not its outcome."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, "-c", KILLED, *COMMANDS["tune"]], env=environment, capture_output=True
    )
    assert process.returncode == -signal.SIGKILL
    assert len(Study.open("run").ledger) == 3
    assert main(["report", "run"]) == 0
    resumes(finished, monkeypatch, capsys)


def resumes(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check that the same command trains only missing trials, and ends as if undisturbed."""
    kept = set(Study.open("run").ledger)
    noted = trained(monkeypatch)
    assert tune(*BAGGING) == 0
    assert f"resuming run: {len(kept)} trials are done" in capsys.readouterr().err
    after, right = content(), use(finished, "bagging")
    del after["ledger.jsonl"], right["ledger.jsonl"]  # in another order
    assert after == right
    assert kept.isdisjoint(noted)
    assert len(kept) + len(noted) == 20


@pytest.mark.parametrize("moment", ["search.display.Display.show", "search.tuning.save_model"])
def test_ctrl_c_costs_no_finished_training(
    moment: str,
    finished: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as patch:

        def stopping(*_: object, **__: object) -> None:
            if len(Study.open("run").ledger) in (3, 20):
                raise KeyboardInterrupt

        patch.setattr(f"pseudograd.{moment}", stopping)
        assert tune(*BAGGING) == 130
    assert "and the same command resumes from there" in capsys.readouterr().err
    resumes(finished, monkeypatch, capsys)
