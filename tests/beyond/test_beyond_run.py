"""Small runs of the studies: run, resume and report; the committed BEYOND.md is current."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from beyond.cli import main
from beyond.data import Place, named
from beyond.questions import experiments
from beyond.report import COMMITTED, documents
from beyond.run import opened
from pseudograd.fleet.recipe import ModuleRecipe

ROOT = Path(__file__).parents[2]
# Enough of each question to show that it runs; `python -m beyond run QUESTION --smoke` runs all.
SOME = {
    "5": ("5/cifar10-worst/ce", "5/cifar10-worst/bi-tempered", "5/anchor/ce"),
    "1": ("1/depth-0/tunable",),
    "7": ("7/resnet/*",),
    "3": ("3/1x800/*",),
    "6": ("6/cifar10-worst/*",),
    "4": ("4/cifar10/*",),
    "2": ("2/text-transformer/ce", "2/speech-0/ce"),
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("beyond")
    for question, patterns in SOME.items():
        for pattern in patterns:
            options = ["--smoke", "--out", str(folder), "--only", pattern, "--device", "cpu"]
            assert main(["run", question, *options]) == 0
    return folder


def test_every_final_network_is_measured_at_both_epochs(ran: Path) -> None:
    for question in SOME:
        for experiment in experiments(question, smoke=True):
            study = opened(experiment, ran)
            if study is None:
                continue
            assert study.finished
            assert study.about["command"].startswith("python -m beyond run")
            for trial, outcome in study.ledger.items():
                measured = trial.split.retrain and experiment.spec.kind != "row"
                assert bool(outcome.measures) == measured
                if outcome.measures:
                    assert outcome.measures["error"] == pytest.approx(outcome.error, abs=1e-6)
                    assert {"ece", "last_error", "cross_entropy_scaled"} <= outcome.measures.keys()


def test_a_finished_study_is_not_run_again_and_a_stopped_one_resumes(
    ran: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--smoke", "--only", "5/cifar10-worst/ce", "--device", "cpu"]
    before = (ran / "5/cifar10-worst/ce/ledger.jsonl").read_text()
    assert main(["run", "5", *options, "--out", str(ran)]) == 0
    assert (ran / "5/cifar10-worst/ce/ledger.jsonl").read_text() == before
    # A copy without its last trainings, as if the run had been stopped.
    copy = tmp_path / "5/cifar10-worst/ce"
    copy.mkdir(parents=True)
    for name in ("run.json", "ledger.jsonl"):
        (copy / name).write_text((ran / "5/cifar10-worst/ce" / name).read_text())
    lines = before.splitlines(keepends=True)
    (copy / "ledger.jsonl").write_text("".join(lines[:-2]))
    assert main(["status", "5", *options[:3], "--out", str(tmp_path)]) == 0
    assert "2 of about 4 trainings" in capsys.readouterr().out
    assert main(["run", "5", *options, "--out", str(tmp_path)]) == 0
    again = [json.loads(line) for line in (copy / "ledger.jsonl").read_text().splitlines()]
    assert again == [json.loads(line) for line in lines]  # to the last bit


def test_the_report_of_a_small_run_has_its_figures(ran: Path) -> None:
    files = documents(ran, smoke=True)
    text = files[ran / "BEYOND.md"]
    assert "the figures mean nothing" in text
    assert "| cross-entropy | – |" in text
    assert "| bi-tempered | δ = " in text
    assert "40.00%" in text  # the actual noise
    drawn = {"5.svg", "1-depth.svg", "7.svg", "3.svg", "6.svg", "4.svg"}
    assert {path.name for path in files} == {"BEYOND.md"} | drawn
    assert all("<svg " in text for path, text in files.items() if path.suffix == ".svg")


def test_the_report_says_what_is_missing_and_what_ran_where(ran: Path, tmp_path: Path) -> None:
    shutil.copytree(ran, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "5/cifar10-worst/bi-tempered/run.json"
    written = json.loads(path.read_text())
    here = written["sessions"][0]["hardware"]
    written["sessions"].append(written["sessions"][0] | {"hardware": "Other"})
    path.write_text(json.dumps(written))
    text = documents(tmp_path, smoke=True)[tmp_path / "BEYOND.md"]
    assert f"\n{here} (cross-entropy, bi-tempered), Other (bi-tempered), PyTorch " in text
    assert f"\n{here}, PyTorch " in text  # of tables whose methods ran on one machine
    assert "| an ensemble (1 of 2 settings not finished) |" in text
    assert "Not run yet: depth-1, depth-3." in text
    assert "Not finished: generalized cross-entropy, symmetric cross-entropy, NCE + RCE" in text


def test_studies_that_are_not_in_the_report_are_named(
    ran: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("5/cifar10-worst/ce", "mine/noise-40/ce"):
        shutil.copytree(ran / "5/cifar10-worst/ce", tmp_path / name)
    assert main(["report", "--smoke", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().err == "not in the report: mine/noise-40/ce\n"


def test_lost_probabilities_are_computed_again(ran: Path, tmp_path: Path) -> None:
    """A fresh clone has the ledger but not the arrays, which are not committed."""
    (experiment,) = experiments("6", "6/cifar10-worst/*", smoke=True)
    own = experiment.folder(tmp_path)
    own.mkdir(parents=True)
    for name in ("run.json", "ledger.jsonl"):
        (own / name).write_text((experiment.folder(ran) / name).read_text())
    options = ["--smoke", "--only", experiment.name, "--device", "cpu", "--out", str(tmp_path)]
    assert main(["run", "6", *options]) == 0
    assert (own / "found.json").read_text() == (experiment.folder(ran) / "found.json").read_text()


def test_the_committed_report_is_what_the_ledgers_give() -> None:
    assert main(["report", "--check", "--out", str(COMMITTED)]) == 0


def test_committed_studies_are_those_of_the_plan() -> None:
    """If a search changed, for example to more seeds, the report would be wrong about it."""
    begun = [(one, study) for one in experiments() if (study := opened(one, COMMITTED)) is not None]
    assert begun
    for experiment, study in begun:
        recipe = study.protocol.recipe
        assert experiment.protocol(recipe) == study.protocol, experiment.name
        if isinstance(recipe, ModuleRecipe):  # can be resumed with another Python or PyTorch
            classes = 100 if recipe.data.startswith("cifar100") else 10
            again = experiment.training(classes).recipe(recipe.data, recipe.data_hash)
            assert again == recipe, experiment.name


def test_a_run_needs_pytorch_and_numpy_alone(tmp_path: Path) -> None:
    hidden = ("jinja2", "loky", "matplotlib", "pandas", "pooch", "rich", "safetensors", "scipy")
    code = (
        "import sys, torch._dynamo\n"
        f"sys.modules.update(dict.fromkeys({(*hidden, 'sklearn', 'tqdm')}))\n"
        "from beyond.cli import main\n"
        f"raise SystemExit(main(['run', '7', '--smoke', '--out', {str(tmp_path)!r},"
        " '--only', '7/1x800/*', '--device', 'cpu']))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(ROOT)])}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_wrong_names_and_missing_labels_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "5", "--only", "5/cifar11/*"]) == 1
    assert "no study is called '5/cifar11/*'" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"^data has no noise called 'pink'"):
        named("cifar10-pink", Place(smoke=True))
