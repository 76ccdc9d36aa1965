"""``pseudograd tune``: output, files, resuming and errors."""

from __future__ import annotations

import argparse
import csv
import html
import io
import json
import math
import multiprocessing
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pseudograd.cli import main, protocols
from pseudograd.cli.protocols import add_network, add_search, protocol_of
from pseudograd.data import Dataset, digits, open_data
from pseudograd.data.survey import Note
from pseudograd.files import UNFINISHED, locked
from pseudograd.fleet import Fleet, MLPRecipe, Outcome, Stop, Trial
from pseudograd.fleet.modules.training import SCHEDULES
from pseudograd.fleet.recipe import ACTIVATIONS, OPTIMIZERS, PRECISIONS
from pseudograd.search import (
    Bagging,
    Progress,
    Protocol,
    Result,
    Study,
    assessment,
    default_folder,
    load_model,
    read_assessment,
    read_examples,
    study_of,
    table_recipe,
    tune,
)
from pseudograd.search.baselines import baselines
from pseudograd.search.display import Display
from trials import replace

pytestmark = pytest.mark.usefixtures("one_thread")

# The default search, and the paper's, which is quicker on data this small.
BAGGED = shlex.split("--hidden 6 --k 1 0.5 --learning-rates 0.1 --epochs 3")
SMALL = shlex.split(
    "--protocol paper --hidden 6 --k 1 0.5 --learning-rates 0.4 --repetitions 2 --retrainings 2 "
    "--epochs 3"
)

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # Boosting takes seconds on the digits.
    monkeypatch.setattr("pseudograd.search.baselines._BOOSTING_WIDTH", 100)


@pytest.fixture(autouse=True)
def _baselines_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train the baselines of a data set once for all tests; boosting takes most of a run's time."""
    monkeypatch.setattr(assessment, "baselines", once)


TRAINED: dict[tuple[str, int], Any] = {}


def once(data: Dataset) -> Any:
    key = data.sha256, data.train_size
    if key not in TRAINED:
        TRAINED[key] = baselines(data)
    return TRAINED[key]


def pets(rows: int = 120) -> Path:
    """A table with numbers, texts, gaps and string labels, from which the labels can be learned."""
    lines = ["weight,colour,pet"]
    for at in range(rows):
        cat = at % 2 == 0
        weight = "" if at % 7 == 3 else str((4 if cat else 30) + at % 3)
        lines.append(f"{weight},{('grey', 'black')[at % 3 == 0]},{'cat' if cat else 'dog <b>'}")
    path = Path("pets.csv")
    path.write_text("\n".join(lines) + "\n")
    return path


def tuned(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    assert main(["tune", *arguments]) == 0
    captured = capsys.readouterr()
    return captured.out, captured.err


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str, seen: bool = False) -> str:
    """Return the last line of a command that must fail, its only one unless ``seen``."""
    try:
        status: Any = main(arguments)
    except SystemExit as exit_:
        status = exit_.code
    assert status in (1, 2)
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("pseudograd")
    assert seen or len(lines) == 1
    return lines[-1]


# --- a whole run -----------------------------------------------------------------------------


def test_a_table_from_the_search_to_predictions(capsys: pytest.CaptureFixture[str]) -> None:
    pets()
    out, err = tuned(capsys, "pets.csv", "--target", "pet", *BAGGED, "--out", "run")
    lines = out.splitlines()
    assert lines[0].startswith("the model gets ")
    table = lines.index("     k   best rate   validation error, % (± standard error)")
    assert any(line.startswith("does k matter? ") for line in lines[:table])
    assert [line.split()[0] for line in lines[table + 1 : table + 3]] == ["1", "1/2"]
    assert lines[table + 3].startswith("the validation error plus a quarter of the cross-entropy")
    assert lines[table + 4].startswith("the model averages ")
    assert lines[-2:] == ["page: run/report.html", "model, ledger and everything else: run"]
    said = "columns read as numbers: 'weight'; as categories: 'colour' (2 indicator columns)"
    assert err.splitlines()[:2] == [said, "target 'pet': 2 classes: 'cat' (60), 'dog <b>' (60)"]
    assert "warning" not in err
    assert "search: 20 of 20 trials" in err
    assert err.splitlines()[-1].startswith("assessing the model")

    run = Study.open("run")
    assert run.finished
    assert run.data["labels"] == ["cat", "dog <b>"]
    assert run.data["columns"] == said
    session = run.sessions[0]
    assert (
        session["command"] == f"pseudograd tune pets.csv --target pet {' '.join(BAGGED)} --out run"
    )
    assert session["trials"] == len(run.ledger)
    assert {"python", "torch", "pseudograd"} <= set(session["versions"])
    assert session["hardware"]
    page = Path("run/report.html").read_text()
    assert "dog &lt;b&gt;" in page
    assert "dog <b>" not in page
    with pytest.raises(UnicodeDecodeError):
        Path("run/model.safetensors").read_text()

    Path("new.csv").write_text("colour,weight\nblack,31\ngrey,5\n")
    assert main(["predict", "run", "new.csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["pet"] for row in rows] == ["dog <b>", "cat"]
    assert all(float(row["p(cat)"]) + float(row["p(dog <b>)"]) == pytest.approx(1) for row in rows)
    assert main(["predict", "run", "new.csv", "--out", "labels.csv"]) == 0
    assert "2 predictions: labels.csv" in capsys.readouterr().out
    given = Path("new.csv").read_text("utf-8")
    said = refusal(capsys, "predict", "run", "new.csv", "--out", "./new.csv")
    assert said.endswith("--out new.csv is the input file itself: name another")
    said = refusal(capsys, "predict", "run", "new.csv", "--out", "labels.parquet")
    assert said.endswith("--out labels.parquet must end in .csv: predictions are CSV")
    assert not Path("labels.parquet").exists()
    Path("link.csv").symlink_to("target.csv")
    assert main(["predict", "run", "new.csv", "--out", "link.csv"]) == 0
    assert Path("link.csv").is_symlink()
    assert Path("target.csv").read_bytes() == Path("labels.csv").read_bytes()
    capsys.readouterr()
    assert Path("new.csv").read_text("utf-8") == given
    assert Path("labels.csv").read_text().startswith("pet,p(cat),p(dog <b>)\ndog <b>,")

    Path("other.csv").write_text("colour,height\nblack,31\n")
    said = refusal(capsys, "predict", "run", "other.csv")
    assert "missing: 'weight'" in said
    assert "not used: 'height'" in said

    Path("run/report.html").unlink()
    assert main(["report", "run"]) == 0
    assert capsys.readouterr().out == "page: run/report.html\n"
    assert Path("run/report.html").read_text() == page


@pytest.mark.parametrize("options", [BAGGED, SMALL], ids=["bagging", "paper"])
def test_a_few_decimal_numbers_are_classes(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    doses = (0.5, 1, 2) * 20
    rows = [f"{dose + at / 100},{dose}\n" for at, dose in enumerate(doses)]
    Path("doses.csv").write_text("response,dose\n" + "".join(rows))
    with pytest.warns(Note, match="'dose' has 3 distinct decimal numbers, and each becomes a"):
        tuned(capsys, "doses.csv", "--target", "dose", *options, "--out", "run")
    assert main(["predict", "run", "doses.csv"]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[0] == "dose,p(0.5),p(1.0),p(2.0)"
    assert "of 60 rows with a label" in captured.err


@pytest.mark.parametrize("options", [BAGGED, SMALL], ids=["bagging", "paper"])
def test_the_same_command_again_repeats_nothing(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    pets()
    options = ["pets.csv", "--target", "pet", *options]
    out, _ = tuned(capsys, *options)
    (folder,) = Path("runs").iterdir()
    assert folder.name.startswith("pets-6-")
    before = contents(folder)
    again, err = tuned(capsys, *options)
    assert again == out
    assert f"resuming {folder}" in err
    assert "assessing" not in err
    assert contents(folder) == before
    assert [session["trials"] for session in Study.open(folder).sessions][1:] == [0]
    # Another setting makes another run.
    tuned(capsys, *options, "--seed", "1")
    assert len(list(Path("runs").iterdir())) == 2
    assert main(["runs"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == 3
    assert sum(line.endswith(str(folder)) for line in listed) == 1


def contents(folder: Path) -> dict[Path, bytes]:
    """Return all files of a run, except those that name its sessions and unfinished ones."""
    return {
        path.relative_to(folder): path.read_bytes()
        for path in folder.rglob("*.*")
        if path.name not in ("run.json", "report.html") and path.suffix != UNFINISHED
    }


def test_the_papers_network_stands_beside_baselines(capsys: pytest.CaptureFixture[str]) -> None:
    pets()
    out, _ = tuned(capsys, "pets.csv", "--target", "pet", *SMALL, "--out", "run")
    known = read_assessment(Study.open("run"))
    assert known is not None
    assert known["model"]["error"] == json.loads(Path("run/model.json").read_text())["test_error"]
    names = [one["name"] for one in known["baselines"]]
    assert names == ["majority", "logistic regression", "gradient boosting"]
    assert "logistic regression (" in out.splitlines()[1]
    page = html.unescape(Path("run/report.html").read_text("utf-8"))
    for heading in ("Confusion matrix", "Calibration", "Which columns matter", "Errors by class"):
        assert f"<h2>{heading}</h2>" in page
    assert "2 networks" in page  # those that k is judged by


def test_the_papers_networks_are_combined(capsys: pytest.CaptureFixture[str]) -> None:
    """The ensemble has the final networks of the selected k and as many of k = 1."""
    tuned(capsys, "digits", *SMALL, "--out", "run")
    known = read_assessment(Study.open("run"))
    assert known is not None
    k = json.loads(Path("run/model.json").read_text())["k"]
    expected = {"plain": [1.0, 1.0]} if k == 1 else {"chosen": [k, k], "plain": [1.0, 1.0]}
    assert {one["name"]: one["ks"] for one in known["combined"]} == expected
    data = digits()
    test, labels = data.features[data.train_size :], data.labels[data.train_size :]
    for one in known["combined"]:
        model, _ = load_model("run", one["ks"][0], ensemble=True)
        wrong = model.probabilities(test).argmax(1) != labels
        assert one["error"] == float(wrong.double().mean())
    assert "<h2>Combined predictions</h2>" in Path("run/report.html").read_text("utf-8")


def test_the_test_error_is_the_models_own(capsys: pytest.CaptureFixture[str]) -> None:
    """It is neither the mean over the networks nor the error of the model with k = 1."""
    options = ["digits", *BAGGED, "--out", "run"]
    out, _ = tuned(capsys, *options)
    data = digits()
    labels = data.labels[data.train_size :]
    errors = []
    for k in (None, 1.0):
        model, _ = load_model("run", k)
        answers = model.probabilities(data.features[data.train_size :]).argmax(1)
        errors.append(float((answers != labels).double().mean()))
    written = json.loads(Path("run/model.json").read_text())
    assert written["test_error"] == errors[0]
    assert f"a test error of {100 * errors[0]:.2f}%" in out.splitlines()[0]
    assert written["k"] is None  # it mixes both
    assert set(written["sha256"]) >= {"model.safetensors", "plain.safetensors"}
    told = read_assessment(Study.open("run"))
    assert told is not None
    assert [told[name]["error"] for name in ("model", "plain")] == errors
    members = written["members"]
    pairs = {(k, rate): weight for k, rate, weight in members["pairs"]}
    assert {k for k, _ in pairs} == {1.0, 0.5}
    assert sum(pairs.values()) == pytest.approx(1)
    assert members["networks"] == 5 * len(pairs) == sum(count for _, count in members["ks"])
    assert set(contents(Path("run"))) >= set(
        map(Path, ("assessment.json", "examples.json", "ledger.jsonl", "suspects.csv"))
    )
    assert len(list(Path("run/networks").iterdir())) == 20
    assert "run has no model of k = 0.5: give 1" in refusal(
        capsys, "predict", "run", "new.npz", "--k", "1/2"
    )

    # Another metric chooses among the same networks.
    ledger = Path("run/ledger.jsonl").read_bytes()
    out, _ = tuned(capsys, *options, "--metric", "log-loss")
    assert ", chosen by the log loss on out-of-fold predictions" in out
    assert Path("run/ledger.jsonl").read_bytes() == ledger
    again = json.loads(Path("run/model.json").read_text())
    assert again["made_from"]["metric"] == "log-loss"
    assert again["members"]["pairs"] != members["pairs"]


def test_pairs_are_first_tried_on_a_sample_of_a_large_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pseudograd.search.bagging._LARGE", 50)
    monkeypatch.setattr("pseudograd.search.bagging._SAMPLE", 40)
    pets()
    options = [
        "pets.csv",
        "--target",
        "pet",
        *BAGGED,
        "--learning-rates",
        "0.1",
        "0.3",
        "--out",
        "run",
    ]
    _, err = tuned(capsys, *options)
    run = Study.open("run")
    assert f"search: {len(run.ledger)} of {len(run.ledger)} trials" in err
    stages = [run.protocol.stage_of(trial) for trial in run.ledger]
    assert stages == ["first look"] * 4 + ["search"] * (len(stages) - 4)
    assert len(stages) - 4 in (10, 15)  # two finalists, and the best of k = 1 if it is neither
    model, _ = load_model("run")
    assert len(model.networks) % 5 == 0
    assert main(["predict", "run", "pets.csv"]) == 0


def test_lost_and_damaged_networks_are_trained_again(capsys: pytest.CaptureFixture[str]) -> None:
    pets()
    options = ["pets.csv", "--target", "pet", *BAGGED, "--out", "run"]
    tuned(capsys, *options)
    before = contents(Path("run"))
    lost, damaged, *_ = sorted(Path("run/networks").iterdir())
    lost.unlink()
    damaged.write_bytes(damaged.read_bytes()[:-4])
    Path("run/model.safetensors").write_bytes(b"")
    said = refusal(capsys, "predict", "run", "pets.csv")
    assert "run/model.safetensors is damaged" in said
    tuned(capsys, *options)
    assert contents(Path("run")) == before


def test_a_lost_model_is_trained_again(capsys: pytest.CaptureFixture[str]) -> None:
    """A crash between the last outcome and the model costs only two trainings."""
    tuned(capsys, "digits", *SMALL, "--out", "run")
    ledger = Path("run/ledger.jsonl").read_bytes()
    tensors = Path("run/model.safetensors").read_bytes()
    for name in ("model.json", "model.safetensors", "examples.json"):
        Path("run", name).unlink()
    said = refusal(capsys, "predict", "run", "new.csv")
    assert "has no model yet" in said
    tuned(capsys, "digits", *SMALL, "--out", "run")
    assert Path("run/ledger.jsonl").read_bytes() == ledger
    assert len(Path("run/model.safetensors").read_bytes()) == len(tensors)
    assert read_examples(Study.open("run")) is not None


def test_lost_files_of_a_run_are_restored(capsys: pytest.CaptureFixture[str]) -> None:
    tuned(capsys, "digits", *SMALL, "--out", "run")
    ledger = Path("run/ledger.jsonl").read_bytes()
    np.savez("new.npz", X=digits().features[:5].numpy())
    Path("run/model.safetensors").unlink()
    said = refusal(capsys, "predict", "run", "new.npz")
    assert "run/model.safetensors is missing: run the search's command again" in said
    tuned(capsys, "digits", *SMALL, "--out", "run")
    assert main(["predict", "run", "new.npz"]) == 0
    assert Path("run/ledger.jsonl").read_bytes() == ledger
    Path("run/run.json").write_text('{"data')
    for command in (["predict", "run", "new.npz"], ["tune", "digits", *SMALL, "--out", "run"]):
        capsys.readouterr()
        said = refusal(capsys, *command)
        assert "run/run.json is damaged (" in said
        assert "run the search's command with another --out" in said


def test_new_outcomes_that_change_the_choice_change_the_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tuned(capsys, "digits", *SMALL, "--out", "run")
    before = json.loads(Path("run/model.json").read_text())["k"]
    path = Path("run/ledger.jsonl")
    lines = []
    for line in path.read_text().splitlines():
        fields = json.loads(line)
        if "trial" in fields and fields["trial"]["k"] == before:
            fields["error"] = 0.99
        lines.append(json.dumps(fields) + "\n")
    path.write_text("".join(lines))
    tuned(capsys, "digits", *SMALL, "--out", "run")
    run = Study.open("run")
    chosen = run.result.chosen.k
    assert chosen != before
    assert json.loads(Path("run/model.json").read_text())["k"] == chosen
    examples = read_examples(run)
    assert examples is not None
    assert examples["networks"]["chosen"]["k"] == chosen
    Path("run/model.json").write_text("{}")  # an invalid model is made again
    tuned(capsys, "digits", *SMALL, "--out", "run")
    assert json.loads(Path("run/model.json").read_text())["k"] == chosen
    Path("run/examples.json").write_text("")
    assert "run/examples.json" in refusal(capsys, "report", "run")


def test_wide_rows_keep_their_first_columns(capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"x{at}" for at in range(11)]
    rows = [",".join(str(at * (3 + x) % 17) for x in range(11)) + f",{at % 2}" for at in range(40)]
    Path("wide.csv").write_text("\n".join([",".join([*names, "y"]), *rows]))
    tuned(capsys, "wide.csv", "--target", "y", *SMALL, "--out", "run")
    examples = read_examples(Study.open("run"))
    assert examples is not None
    for example in examples["hardest"]:
        assert list(example["row"]) == names[:8]
        assert example["columns"] == 11
    assert "and 3 more columns" in Path("run/report.html").read_text("utf-8")


def test_predict_accepts_k_as_displayed(capsys: pytest.CaptureFixture[str]) -> None:
    pets()
    Path("new.csv").write_text("colour,weight\nblack,31\n")
    for k in ("0.3333333333", "1/16"):
        options = [*SMALL, "--k", "1", k]
        folder = f"run-{k[0]}"
        out, _ = tuned(capsys, "pets.csv", "--target", "pet", *options, "--out", folder)
        said = refusal(capsys, "predict", folder, "new.csv", "--k", "7")
        shown = said.rpartition(" or ")[2].rpartition("give ")[2]
        assert main(["predict", folder, "new.csv", "--k", shown]) == 0
        chosen = out.partition("chosen: k = ")[2].partition(",")[0]
        assert main(["predict", folder, "new.csv", "--k", chosen]) == 0


def test_lines_that_cannot_be_read_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    tuned(capsys, "digits", *SMALL, "--out", "run")
    path = Path("run/ledger.jsonl")
    head, first, *rest = path.read_text().splitlines(keepends=True)
    path.write_text("".join([head, first[:50] + "\n", *rest, "hello\n"]))
    _, err = tuned(capsys, "digits", *SMALL, "--out", "run")
    said = "run/ledger.jsonl: 2 lines set aside, the first because it is not JSON, or cut off"
    assert said in err.splitlines()
    total = len(rest) + 1  # the trial of the torn line is run again
    assert f"{total} of {total} trials" in err


def test_ctrl_c_loses_nothing_that_was_finished(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["digits", *SMALL, "--k", "1", "0.5", "2", "--repetitions", "6"]
    undisturbed, _ = tuned(capsys, *options, "--out", "undisturbed")
    command = [sys.executable, "-m", "pseudograd", "tune", *options, "--out", "run"]
    process = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    ledger = Path("run/ledger.jsonl")
    deadline = time.monotonic() + 120
    while not (ledger.exists() and ledger.read_text()) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    if process.returncode != 0:  # otherwise it finished before the signal
        assert process.returncode == 130
        assert "stopped by Ctrl-C" in said.splitlines()[-1]
        assert "the same command resumes from there" in said
        assert "Traceback" not in said
    kept = len(Study.open("run").ledger)
    assert kept > 0
    out, _ = tuned(capsys, *options, "--out", "run")
    assert out.splitlines()[:-2] == undisturbed.splitlines()[:-2]  # folder names follow
    assert Study.open("run").sessions[1]["trials"] == len(Study.open("run").ledger) - kept


LONG = shlex.split("digits --hidden 12 --k 1 0.5 2 --learning-rates 0.02 --epochs 12")


def test_twenty_kills_at_random_moments_change_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """The command, killed again and again from its start to its end, ends as if undisturbed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pseudograd.cli.tune", "pseudograd.search", "sklearn.datasets"])
    undisturbed, _ = tuned(capsys, *LONG, "--out", "undisturbed")
    chance, killed = random.Random(0), 0
    for _ in range(20):
        process = context.Process(target=_command, args=(Path.cwd(), [*LONG, "--out", "run"]))
        process.start()
        process.join(chance.uniform(0.1, 0.7))
        process.kill()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        killed += process.exitcode != 0
    assert killed > 5
    out, _ = tuned(capsys, *LONG, "--out", "run")
    assert out.splitlines()[:-2] == undisturbed.splitlines()[:-2]  # folder names follow
    assert dict(Study.open("run").ledger) == dict(Study.open("undisturbed").ledger)
    run, before = contents(Path("run")), contents(Path("undisturbed"))
    del run[Path("ledger.jsonl")], before[Path("ledger.jsonl")]  # in another order
    assert run == before
    lines = Path("run/ledger.jsonl").read_text().splitlines()
    assert len(lines) == 1 + len(Study.open("run").ledger) + len(Study.open("run").ledger.set_aside)


def _command(folder: Path, arguments: list[str]) -> None:
    os.chdir(folder)
    torch.set_num_threads(1)
    sys.exit(main(["tune", *arguments]))


def test_a_kill_before_the_first_file_is_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run").mkdir()
    Path("run/run.json.part").write_text("{")
    tuned(capsys, "digits", *SMALL, "--out", "run")


def test_a_killed_session_is_not_forgotten(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its duration is recorded while it runs."""
    monkeypatch.setattr("pseudograd.search.study._SECONDS_BETWEEN_NOTES", 0.0)
    seen = []

    def watch(display: Display, progress: Progress) -> None:
        seen.append(json.loads(Path("run/run.json").read_text())["sessions"][0]["trials"])

    monkeypatch.setattr(Display, "show", watch)
    tuned(capsys, "digits", *SMALL, "--out", "run")
    assert seen == list(range(1, len(seen) + 1))


def test_options_reach_the_trials(capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        "--protocol paper --hidden 5 4 --activation tanh --optimizer adam --momentum 0.9 "
        "--batch-size 64 --clip 7 --k 1 --learning-rates 0.01 0.02 0.04 --repetitions 1 "
        "--retrainings 1 --patience 2 --epochs 2 --stratify --seed 3 --device cpu --out run"
    )
    tuned(capsys, "digits", *options.split())
    protocol = Study.open("run").protocol
    assert protocol == replace(protocol, ks=(1.0,), learning_rates=(0.01, 0.02, 0.04), seed=3)
    assert protocol.recipe == MLPRecipe(
        "digits", (5, 4), digits().sha256[:16], "adam", 0.9, activation="tanh", batch_size=64,
        clip=7.0, patience=2, ties="last", max_epochs=2, stratified=True,
    )  # fmt: skip


def test_options_reach_the_networks_of_bagging(capsys: pytest.CaptureFixture[str]) -> None:
    pets()
    options = (
        "--target pet --hidden 5 4 --activation tanh --batch-size 16 --clip 7 --k 1 2 "
        "--learning-rates 0.01 0.02 --repetitions 10 --epochs 2 --seed 3 --out run"
    )
    tuned(capsys, "pets.csv", *options.split())
    data, _ = open_data("pets.csv", target="pet")
    recipe = table_recipe(
        "pets.csv", 96, data.sha256[:16], hidden_layer_sizes=(5, 4), activation="tanh",
        batch_size=16, clip=7.0, max_epochs=2,
    )  # fmt: skip
    assert (recipe.optimizer, recipe.weight_decay, recipe.schedule) == ("adam", 0.1, "cosine")
    protocol = Study.open("run").protocol
    assert protocol == Bagging(
        recipe, ks=(1.0, 2.0), learning_rates=(0.01, 0.02), repetitions=10, seed=3
    )
    assert len(list(Path("run/networks").iterdir())) == len(Study.open("run").ledger)


def test_defaults_of_bagging_follow_the_table() -> None:
    parser = argparse.ArgumentParser()
    add_network(parser)
    add_search(parser)
    options = parser.parse_args([])
    data, encoder = open_data("digits")
    protocol = protocol_of(options, data, encoder)
    assert protocol == Bagging(table_recipe("digits", 1437, data.sha256[:16], pixels=True))
    assert (protocol.ks, protocol.learning_rates) == ((2.0, 1.0, 0.5), (0.003, 0.01, 0.03))
    recipe = protocol.recipe
    assert isinstance(recipe, MLPRecipe)
    assert (recipe.bins, recipe.hidden_layer_sizes, recipe.batch_size) == (0, (128, 128), 64)
    large = Dataset("large", torch.zeros(2500, 1), torch.zeros(2500).long(), 2000, (-1.0, 1.0))
    found = protocol_of(options, large, replace(encoder, pixels=None))
    assert isinstance(found, Bagging)
    assert (found.finalists, found.sample) == (4, 0)


def test_defaults_of_the_papers_protocol(capsys: pytest.CaptureFixture[str]) -> None:
    tuned(capsys, *SMALL, "--hidden", "4", "4", "--out", "deep")
    fields = Study.open("deep").protocol.recipe.fields()
    assert (fields["data"], fields["clip"], fields.get("batch_size")) == ("digits", 100.0, None)
    tuned(capsys, *SMALL, "--hidden", "0", "--out", "linear")
    fields = Study.open("linear").protocol.recipe.fields()
    assert (fields["hidden_layer_sizes"], fields.get("clip")) == ([], None)


def test_a_time_limit_ends_a_run_and_keeps_what_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["digits", *BAGGED, "--epochs", "100000", "--out", "run"]
    out, _ = tuned(capsys, *options, "--time-limit", "1/60")
    assert "time limit reached; 0 trials kept, and the same command resumes from there" in out
    out, _ = tuned(capsys, "digits", *SMALL, "--out", "short", "--time-limit", "60")
    assert "page: short/report.html" in out


# --- errors -----------------------------------------------------------------------------------


def test_bad_options(capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests) -> None:
    cases: list[tuple[list[str], str]] = [
        (["--k", "many"], "argument --k: invalid number_or_ramp value: 'many'"),
        (["--k", "1/0"], "argument --k: invalid number_or_ramp value: '1/0'"),
        (["--k", "1", "2->"], "argument --k: a ramp must be two numbers like"),
        (["--k", "1", "0"], "--k must be finite numbers above 0"),
        (["--k", "1", "1e300"], "--k must be finite numbers above 0 (2^-100 to 2^100)"),
        (["--k", "2", "0.5"], "--k must include 1"),
        (["--seed", "4294967296"], "--seed must be a whole number in [0, 2^32)"),
        (["--device", "meta"], "--device meta cannot be used here"),
        (["--k", "1", "1"], "--k must be distinct numbers"),
        (["--hidden", "x"], "argument --hidden: invalid int value: 'x'"),
        (["--hidden", "0", "3"], "--hidden must be"),
        (["--hidden", "-3"], "--hidden must be"),
        (["--test-fraction", "1"], "--test-fraction cannot be set for data 'digits'"),
        (["--learning-rates", "-1"], "--learning-rates must be finite numbers above 0, not -1"),
        (["--activation", "gelu"], "invalid choice: 'gelu'"),
        (["--device", "cuda:99"], "--device cuda:99 cannot be used here"),
        (["--device", "nonsense"], "--device nonsense cannot be used here"),
        (["--target", "y"], "--target cannot be set for data 'digits'"),
        (["--test-path", "y.csv"], "--test-path cannot be set for data 'digits'"),
        (["--data-dir", "y"], "--data-dir cannot be set for data 'digits'"),
        (["--drop", "y"], "--drop cannot be set for data 'digits'"),
        (["--categories", "y"], "--categories cannot be set for data 'digits'"),
        (["--batch-size", "0"], "--batch-size must be a whole number above 0, not 0"),
        (["--epochs", "0"], "--epochs must be a whole number above 0, not 0"),
        (["--clip", "0"], "--clip must be a finite number above 0"),
        (["--unknown"], "unrecognized arguments: --unknown"),
        (["--repetitions", "7"], "--repetitions must be a multiple of 5, so that every fold"),
        (["--momentum", "0.5"], "--momentum needs --protocol paper: add that, or leave this"),
        (["--retrainings", "2"], "--retrainings needs --protocol paper"),
        (["--stratify"], "--stratify needs --protocol paper"),
        (["--metric", "auc"], "invalid choice: 'auc'"),
        (["--protocol", "paper", "--metric", "balanced"], "--metric must be left out with"),
        (["--protocol", "paper", "--momentum", "1"], "--momentum must be a number in [0, 1)"),
        (["--protocol", "paper", "--retrainings", "0"], "--retrainings must be 1 or more"),
        (["--protocol", "paper", "--batch-size", "0"], "--batch-size must be a whole number"),
    ]
    for arguments, said in cases:
        with subtests.test(said=said):
            assert said in refusal(capsys, "tune", "digits", *arguments)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("absent.csv", None, "absent.csv does not exist"),
        ("digitz", None, "data 'digitz' is not known"),
        ("empty.csv", b"", "empty.csv"),
        ("header.csv", b"a,y\n", "header.csv"),
        ("image.png", b"\x89PNG", "image.png must end in one of"),
        ("broken.parquet", b"PAR1 nonsense", "broken.parquet"),
        ("broken.npz", b"PK nonsense", "broken.npz"),
        ("single.csv", b"a,y\n" + b"1,cat\n" * 40, "single class"),
        ("few.csv", b"a,y\n1,cat\n2,dog\n3,cat\n4,dog\n", "at least 5"),
        ("other.csv", b"a,z\n1,cat\n", "has no column 'y'"),
        ("semicolons.csv", b"a;y\n1,5;cat\n", "name a column of classes"),
        ("bad.csv", b"a,y\n" + b"1,cat\n" * 19 + b"1,dog\n", "left out: all entries are the same"),
    ],
)
def test_data_that_cannot_be_used(
    name: str, content: bytes | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        Path(name).write_bytes(content)
    target = [] if name == "digitz" else ["--target", "y"]
    assert said in refusal(capsys, "tune", name, *target, *SMALL)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--data-dir", "here"], "--data-dir cannot be set for data 'pets.csv'"),
        (["--test-path", "pets.csv"], "--test-path pets.csv is the training file"),
        (["--test-path", "more.csv", "--test-fraction", "0.3"], "--test-fraction must be left out"),
        (["--speed", "3"], "tune: unrecognized arguments: --speed 3; see pseudograd tune"),
        (["--test-fraction", "1"], "--test-fraction must lie between 0 and 1, not 1"),
        (["--drop", "weigth"], "--drop names 'weigth': pets.csv has 'weight'"),
        (["--drop", "pet"], "--drop names 'pet', which is the target"),
        (["--categories", "hue"], "--categories names 'hue': pets.csv has"),
    ],
)
def test_options_of_a_table(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pets()
    assert said in refusal(capsys, "tune", "pets.csv", "--target", "pet", *SMALL, *arguments)
    assert not Path("runs").exists()


def test_the_target_of_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    pets()
    assert "--target must name the column of labels" in refusal(capsys, "tune", "pets.csv", *SMALL)


def test_dropped_columns_and_unseen_strings(capsys: pytest.CaptureFixture[str]) -> None:
    lines = pets().read_text().splitlines()
    more = [line + f",P{at},{at}" for at, line in enumerate(lines)]
    Path("pets.csv").write_text("\n".join(more).replace("P0,0", "id,when", 1) + "\n")
    options = ["pets.csv", "--target", "pet", *SMALL, "--out", "run"]
    left_out = (
        "column 'id' left out: all entries differ, as ids do",
        "column 'when' left out: whole numbers only rise or only fall, as row numbers do "
        "(--numbers NAME keeps them)",
    )
    said = refusal(capsys, "tune", *options, "--strict")
    assert said == f"pseudograd: pets.csv is refused, since strict is set: {'; '.join(left_out)}"
    with pytest.warns(Note) as told:
        tuned(capsys, *options)
    notes = [str(note.message) for note in told]
    assert tuple(note for note in notes if "left out" in note) == left_out
    Path("new.csv").write_text("id,colour,weight\nP1,pink,31\nP2,grey,5\nP3,blue,\n")
    assert main(["predict", "run", "new.csv"]) == 0
    captured = capsys.readouterr()
    assert captured.err == (
        "column 'colour': 2 of 3 entries are new, such as 'pink', and match none of the "
        "categories seen in training\n"
    )
    assert len(captured.out.splitlines()) == 4


def test_numbers_outside_the_range_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    pets()
    tuned(capsys, "pets.csv", "--target", "pet", *SMALL, "--out", "run")
    Path("new.csv").write_text("colour,weight\nblack,31\ngrey,99.5\ngrey,\n")
    assert main(["predict", "run", "new.csv"]) == 0
    assert capsys.readouterr().err == (
        "numbers outside the range of the training data: 'weight' (1 of 3 rows, such as 99.5)\n"
    )
    Path("new.csv").write_text('colour,weight\nblack,31\ngrey,"$1,234,567"\ngrey,\n')
    assert main(["predict", "run", "new.csv"]) == 0
    assert "'weight' (1 of 3 rows, such as 1234567)" in capsys.readouterr().err


def test_numbers_as_categories(capsys: pytest.CaptureFixture[str]) -> None:
    pets()
    options = ["pets.csv", "--target", "pet", *SMALL, "--categories", "weight"]
    _, err = tuned(capsys, *options)
    said = "columns read as categories: 'weight', 'colour' (9 indicator columns)"
    assert err.splitlines()[0] == said


def test_the_classes_of_a_table_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"{at % 9},{('red', 'Red')[at % 2]},{'x' if at % 4 else 'X'}" for at in range(40)]
    Path("a.csv").write_text("\n".join(["size,hue,y", *rows]))
    _, err = tuned(capsys, "a.csv", "--target", "y", *SMALL)
    assert err.splitlines()[1:4] == [
        "target 'y': 2 classes: 'x' (30), 'X' (10)",
        "warning: column 'y' has 'X', 'x', which differ only in whitespace or case and are "
        "treated as different classes: if they mean the same, spell them the same way",
        "warning: column 'hue' has 'Red', 'red', which differ only in whitespace or case and are "
        "treated as different categories: if they mean the same, spell them the same way",
    ]
    rows = [f"{at % 7},{min(at // 6, 9)}" for at in range(0, 200, 2)]
    Path("b.csv").write_text("\n".join(["size,y", *rows]))
    _, err = tuned(capsys, "b.csv", "--target", "y", *SMALL)
    counts = "9 (73), 0 (3), 1 (3), 2 (3), 3 (3), 4 (3), 5 (3), and 2 more down to 8 (3)"
    assert err.splitlines()[1] == f"target 'y': 10 classes: {counts}"
    _, err = tuned(capsys, "digits", *SMALL)
    assert "classes" not in err


def test_classes_with_too_few_rows_cause_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    labels = ["rare" if at in (3, 90, 400) else "common" for at in range(600)]
    rows = [f"{at % 9},{label}" for at, label in enumerate(labels)]
    Path("a.csv").write_text("\n".join(["size,y", *rows]))
    out, err = tuned(capsys, "a.csv", "--target", "y", *SMALL, "--out", "run")
    assert "warning: fewer than 5 rows have the label 'rare': that is too few" in err
    assert "a test error of 0.00%" in out
    said = "he test set has no examples of 'rare', so the test error does not cover"
    assert f"\nwarning: t{said}" in out
    page = html.unescape(Path("run/report.html").read_text("utf-8"))
    assert f"T{said}" in page


def test_a_single_test_row_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    """The difference of log losses then has no interval."""
    pets(rows=7)
    out, _ = tuned(capsys, "pets.csv", "--target", "pet", *BAGGED, "--out", "run")
    assert "of 1 test example" in out
    assert "nan" not in out
    comparison = json.loads(Path("run/assessment.json").read_text("utf-8"))["comparison"]
    assert comparison["log_loss"]["low"] is None
    assert "nan" not in html.unescape(Path("run/report.html").read_text("utf-8"))


def test_suspects_are_of_the_model_beside_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even after a stop while the model of another metric was being saved."""
    pets(rows=40)
    command = ["pets.csv", "--target", "pet", *BAGGED, "--out", "run"]
    tuned(capsys, *command)
    expected = Path("run/suspects.csv").read_text()

    def stopped(*_: Any, **__: Any) -> None:
        Path("run/suspects.csv").write_text("those of another model")
        raise ValueError("stopped")

    with monkeypatch.context() as patched:
        patched.setattr("pseudograd.search.tuning.save_model", stopped)
        assert main(["tune", *command, "--metric", "log-loss"]) == 1
    tuned(capsys, *command)
    assert Path("run/suspects.csv").read_text() == expected


def test_rows_without_out_of_fold_predictions_are_not_suspects(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Four of the 19 training rows are in no fold; random labels make most rows suspects."""
    rows = [f"{at * 7 % 24},{'ab'[at * at % 11 % 2]}" for at in range(24)]
    Path("a.csv").write_text("\n".join(["size,y", *rows]))
    tuned(capsys, "a.csv", "--target", "y", *BAGGED, "--out", "run")
    _, *found = Path("run/suspects.csv").read_text().splitlines()
    assert found
    # With two classes, at least one network agrees with their joint prediction.
    assert all(float(line.split(",")[-1]) > 0 for line in found)


def test_the_network_of_k_1_is_kept_too(capsys: pytest.CaptureFixture[str]) -> None:
    """With so few and small steps, k = 2 wins by far."""
    data, encoder = open_data("digits")
    recipe = MLPRecipe("digits", (16,), max_epochs=6)
    protocol = Protocol(recipe, (1.0, 2.0), 0.01, repetitions=3, retrainings=1, most_extensions=0)
    run = study_of(data, encoder, protocol, "run")
    found = tune(run, data, encoder, Fleet(data, keep_parameters=True).run)
    assert found is not None
    assert found.chosen.k == 2
    np.savez("new.npz", X=data.features[:50].numpy())
    said = {}
    for option in ([], ["--k", "2"], ["--k", "1"]):
        assert main(["predict", "run", "new.npz", *option]) == 0
        said[" ".join(option)] = capsys.readouterr().out
    assert said[""] == said["--k 2"] != said["--k 1"]
    refused = refusal(capsys, "predict", "run", "new.npz", "--k", "4")
    assert "run has no model of k = 4: give 2 or 1" in refused


def test_out_of_memory_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ...")

    monkeypatch.setattr("pseudograd.fleet.mlp.worker._stack", full)
    assert refusal(capsys, "tune", "digits", *SMALL, "--out", "run", seen=True) == (
        "pseudograd: not enough memory for these networks: lower --hidden (now 6) or "
        "--batch-size (now 128)"
    )


def test_hard_examples_can_be_found_in_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    """The hardest example is one with a wrong label; it is shown with its row number."""
    lines = pets().read_text().splitlines()
    assert lines[41] == "5,grey,cat"  # after the header the 41st
    lines[41] = "5,grey,dog <b>"
    Path("pets.csv").write_text("\n".join(lines) + "\n")
    tuned(capsys, "pets.csv", "--target", "pet", *SMALL, "--epochs", "40", "--out", "run")
    examples = read_examples(Study.open("run"))
    assert examples is not None
    lacking = {example["row_number"]: example["lacking"] for example in examples["hardest"]}
    assert lacking[41] == max(lacking.values()) > 0.5
    page = Path("run/report.html").read_text()
    assert ">row 41<" in page
    assert "the first row of data is row 1" in page
    tuned(capsys, "digits", *SMALL, "--out", "digits")
    examples = read_examples(Study.open("digits"))
    assert examples is not None
    assert {example["row_number"] for example in examples["hardest"]} == {None}
    assert "row of data" not in Path("digits/report.html").read_text()


def test_a_file_that_cannot_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    Path("folder.csv").mkdir()
    assert "folder.csv" in refusal(capsys, "tune", "folder.csv", "--target", "pet")


def test_a_full_disk_keeps_what_is_finished(capsys: pytest.CaptureFixture[str]) -> None:
    """No file may grow beyond a limit that the ledger reaches in the middle of a line."""
    resource = pytest.importorskip("resource", reason="needs POSIX's limits")
    options = ["digits", *SMALL, "--repetitions", "6", "--out", "run"]
    process = subprocess.run(
        [sys.executable, "-m", "pseudograd", "tune", *options],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000)),
    )
    assert process.returncode == 1
    last = process.stderr.splitlines()[-1]
    assert "run/ledger.jsonl cannot be written (file too large): fix that" in last
    ledger = Study.open("run").ledger
    assert len(ledger) > 5
    assert Path("run/ledger.jsonl").read_text()[-1] != "\n"  # the last line is incomplete
    _, err = tuned(capsys, *options)
    assert f"{len(ledger)} trials are done" in err
    assert not Study.open("run").ledger.set_aside  # the incomplete line is gone


def test_a_folder_that_cannot_be_used(capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("")
    assert "file cannot be written" in refusal(capsys, "tune", *SMALL, "--out", "file")
    Path("mine").mkdir()
    Path("mine/letter.txt").write_text("")
    assert "mine is not empty" in refusal(capsys, "tune", *SMALL, "--out", "mine")
    tuned(capsys, "digits", *SMALL, "--out", "run")
    said = refusal(capsys, "tune", "digits", *SMALL, "--momentum", "0.5", "--out", "run")
    assert "momentum was 0.9, is now 0.5" in said
    pets()
    said = refusal(capsys, "tune", "pets.csv", "--target", "pet", *SMALL, "--out", "run")
    assert "run on other data, called 'digits'" in said
    fields = json.loads(Path("run/run.json").read_text())
    del fields["data"]["encoder"]  # as in an earlier version
    Path("run/run.json").write_text(json.dumps(fields))
    assert "other data, called" in refusal(capsys, "tune", "digits", *SMALL, "--out", "run")
    Path("run/run.json").write_text("{}")
    assert "run.json is damaged, or from another version" in refusal(capsys, "report", "run")
    assert "holds no run: there is no such folder" in refusal(capsys, "report", "nowhere")
    assert "holds no run" in refusal(capsys, "predict", "nowhere", "new.csv")
    assert "nowhere is not a folder" in refusal(capsys, "runs", "nowhere")
    assert main(["runs", "mine"]) == 0
    assert capsys.readouterr().out == "no runs in mine\n"


def test_a_cluster_that_cannot_be_reached(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray", reason="needs Ray")
    options = ["digits", *SMALL, "--ray", "127.0.0.1:1", "--out", "run"]
    said = refusal(capsys, "tune", *options, seen=True)
    assert "127.0.0.1:1" in said
    said = refusal(capsys, "tune", "digits", *SMALL, "--ray", "--device", "cpu", "--out", "run")
    assert "--device must be left out with --ray" in said


def test_a_run_on_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray", reason="needs Ray")
    pets()
    options = ["pets.csv", "--target", "pet", *BAGGED]
    alone, _ = tuned(capsys, *options, "--out", "alone")
    out, _ = tuned(capsys, *options, "--ray", "local", "--out", "run")
    assert out.splitlines()[:-2] == alone.splitlines()[:-2]  # folder names follow
    kept = {path.name: path.read_bytes() for path in Path("run/networks").iterdir()}
    assert kept == {path.name: path.read_bytes() for path in Path("alone/networks").iterdir()}
    assert len(kept) == 20
    assert Study.open("run").sessions[0]["devices"] == ["ray"]
    assert Study.open("run").sessions[0]["hardware"].startswith("Ray cluster: 1 × node, ")


def test_two_tables_of_one_name_are_two_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Even if their features are equal, for example in other units or with other labels."""
    path = pets(100)
    tuned(capsys, "pets.csv", "--target", "pet", *SMALL)
    path.write_text(path.read_text().replace("cat", "car"))
    tuned(capsys, "pets.csv", "--target", "pet", *SMALL)
    assert len(list(Path("runs").iterdir())) == 2
    (folder, _) = sorted(Path("runs").iterdir())
    pets(120)
    said = refusal(capsys, "tune", "pets.csv", "--target", "pet", *SMALL, "--out", str(folder))
    assert "holds a run on other data" in said


def test_another_process_in_the_folder(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("fcntl", reason="needs POSIX's locks")
    tuned(capsys, "digits", *SMALL, "--out", "run")
    with locked(Path("run/ledger.jsonl")):
        said = refusal(capsys, "tune", "digits", *SMALL, "--out", "run", seen=True)
    assert "another process is using run/ledger.jsonl" in said


def diverging(trials: deque[Trial], stop: Stop) -> Iterator[Outcome]:
    nothing = ((torch.full((64, 10), math.nan), torch.zeros(10)),)
    while trials:
        lost = Outcome(trials.popleft(), 0.9, 1, 0.9, math.nan, 1, "diverged", (0.9,), wrong=())
        yield replace(lost, parameters=nothing)


RECIPE = MLPRecipe("digits", (6,), max_epochs=3)


@pytest.mark.parametrize(
    "protocol",
    [
        Protocol(RECIPE, (1.0,), 0.1, repetitions=1, retrainings=1),
        Bagging(RECIPE, (1.0,), learning_rates=(0.1,)),
    ],
)
def test_networks_that_all_diverge(protocol: Protocol) -> None:
    data, encoder = open_data("digits")
    run = study_of(data, encoder, protocol, "run")
    with pytest.raises(ValueError, match="all networks diverged"):
        tune(run, data, encoder, diverging)
    assert {outcome.cross_entropy for outcome in run.ledger.values()} == {math.inf}
    assert not Path("run/model.json").exists()


def test_networks_of_k_1_that_all_diverge() -> None:
    data, encoder = open_data("digits")
    protocol = Bagging(RECIPE, (1.0, 2.0), learning_rates=(0.1,), most_extensions=0)
    run, fleet = study_of(data, encoder, protocol, "run"), Fleet(data, keep_parameters=True)

    def runner(trials: deque[Trial], stop: Stop) -> Iterator[Outcome]:
        for outcome in fleet.run(trials, stop):
            yield from (
                diverging(deque([outcome.trial]), stop) if outcome.trial.k == 1 else [outcome]
            )

    with pytest.raises(ValueError, match="all networks of k = 1, which the model is compared with"):
        tune(run, data, encoder, runner)


def test_the_choice_is_compared_with_k_1() -> None:
    data, encoder = open_data("digits")
    run = study_of(data, encoder, Bagging(RECIPE, (2.0, 0.5)), "run")
    with pytest.raises(ValueError, match="ks must contain 1: the chosen k is compared with it"):
        tune(run, data, encoder, diverging)


def test_diverged_folds_are_left_out_of_the_model() -> None:
    data, encoder = open_data("digits")
    protocol = Bagging(RECIPE, (1.0,), learning_rates=(0.1,), most_extensions=0)
    run, fleet = study_of(data, encoder, protocol, "run"), Fleet(data, keep_parameters=True)

    def runner(trials: deque[Trial], stop: Stop) -> Iterator[Outcome]:
        for outcome in fleet.run(trials, stop):
            lost = outcome.trial.split.repetition == 3
            yield from diverging(deque([outcome.trial]), stop) if lost else [outcome]

    assert tune(run, data, encoder, runner) is not None
    model, _ = load_model("run")
    assert len(model.networks) == 4
    assert model.weights == (0.25,) * 4
    assert model.probabilities(data.features[:5]).isfinite().all()


def test_a_network_that_diverged_after_its_best_epoch_is_a_model(tmp_path: Path) -> None:
    data, encoder = open_data("digits")
    protocol = Protocol(RECIPE, (1.0, 0.5), 0.1, repetitions=1, retrainings=1, most_extensions=0)
    run, fleet = study_of(data, encoder, protocol, tmp_path), Fleet(data, keep_parameters=True)

    def late(trials: Iterable[Trial], stop: Stop) -> Iterator[Outcome]:
        return (replace(outcome, stopped_by="diverged") for outcome in fleet.run(trials, stop))

    found = tune(run, data, encoder, late)
    assert isinstance(found, Result)
    wrong = found.comparison.kept.wrong
    model, _ = load_model(tmp_path)
    test = model.probabilities(data.features[data.train_size :]).argmax(-1)
    assert wrong == tuple((test != data.labels[data.train_size :]).nonzero()[:, 0].tolist())


def test_a_broken_run_does_not_hide_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    tuned(capsys, "digits", *SMALL)
    Path("runs/broken").mkdir()
    Path("runs/broken/run.json").write_text("[")
    assert main(["runs"]) == 1
    captured = capsys.readouterr()
    assert "runs/broken/run.json is damaged (" in captured.err
    assert len(captured.out.splitlines()) == 2


# --- output -----------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def progress(k: float, repetition: int, done: int) -> Progress:
    trial = Protocol(MLPRecipe("digits", (6,)), initial_rate=0.1, repetitions=2)._at(
        k, 0.1, repetition
    )
    outcome = Outcome(trial, 0.02, 12, 0.03 * k, 0.1, 27, "patience", ())
    return Progress("search", done, 42, outcome)


def test_a_terminal_shows_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    protocol = Protocol(MLPRecipe("digits", (6,)), initial_rate=0.1, repetitions=2)
    with Display(protocol, {}, out) as display:
        for done, (k, repetition) in enumerate([(1, 0), (1, 1), (0.5, 0), (0.5, 1)], 1):
            display.show(progress(k, repetition, done))
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    lines = [line.rstrip() for line in plain.replace("\r", "\n").splitlines()]
    heads = [at for at, line in enumerate(lines) if "best rate" in line]
    assert {lines[at].strip() for at in heads} == {"k  best rate  validation error, %"}
    assert all(set(lines[at - 1]) <= set("━╸╺") for at in heads)
    last = out.getvalue().split("search: ")[-1]
    assert last.startswith("4 of 42 trials")
    assert "1.50 ± 0.00" in last
    assert "3.00 ± 0.00" in last


def test_progress_lines_are_rare_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10_000, 3))
    monkeypatch.setattr("pseudograd.search.display.time.monotonic", lambda: float(next(clock)))
    out = io.StringIO()
    protocol = Protocol(MLPRecipe("digits", (6,)), initial_rate=0.1, repetitions=2)
    with Display(protocol, {}, out) as display:
        for done in range(1, 43):
            display.show(progress(1, 0, done))
    lines = out.getvalue().splitlines()
    assert 5 < len(lines) < 22
    assert lines[-1].startswith("search: 42 of 42 trials, ")
    assert "left" not in lines[-1]
    assert " min " in lines[1]


def test_the_time_left_does_not_count_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilation takes 30 s, then a trial ends every second."""
    now = [0.0]
    monkeypatch.setattr("pseudograd.search.display.time.monotonic", lambda: now[0])
    out = io.StringIO()
    protocol = Protocol(MLPRecipe("digits", (6,)), initial_rate=0.1, repetitions=2)
    with Display(protocol, {}, out) as display:
        for done in range(1, 43):
            now[0] = 30.0 + done
            display.show(progress(1, 0, done))
    first, *_, last = (line.split(";")[0] for line in out.getvalue().splitlines())
    assert first == "search: 1 of 42 trials"
    assert "search: 31 of 42 trials" in out.getvalue()
    assert last == "search: 42 of 42 trials, 1.0 trials/s"
    assert re.findall(r"1\.0 trials/s, (\d+) s left", out.getvalue()) == ["1"]


def test_no_speed_if_no_time_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pseudograd.search.display.time.monotonic", lambda: 0.0)
    out = io.StringIO()
    protocol = Protocol(MLPRecipe("digits", (6,)), initial_rate=0.1, repetitions=2)
    with Display(protocol, {}, out) as display:
        for done in range(1, 43):
            display.show(progress(1, 0, done))
    assert out.getvalue().splitlines()[-1] == "search: 42 of 42 trials"


@pytest.mark.parametrize("protocol", ["paper", "bagging"])
def test_another_k_is_added_to_a_finished_search(
    protocol: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*shlex.split("digits --hidden 6 --epochs 2 --protocol"), protocol]
    command += ["--learning-rates", "0.1", "0.2", "--k"]
    tuned(capsys, *command, "1", "0.5")
    (folder,) = Path("runs").iterdir()
    before = dict(Study.open(folder).ledger)
    _, err = tuned(capsys, *command, "1", "0.5", "2", "--time-limit", "0.0000001")
    assert f"resuming {folder}: {len(before)} trials are done" in err
    assert "has no model yet" in refusal(capsys, "predict", str(folder), "digits")
    out, _ = tuned(capsys, *command, "1", "0.5", "2")
    assert list(Path("runs").iterdir()) == [folder]
    study = Study.open(folder)
    new = [trial for trial in study.ledger if trial not in before]
    assert {trial: study.ledger[trial] for trial in before} == before
    assert {trial.k for trial in new if not trial.split.retrain} == {2}
    assert out.startswith(study.summary())
    assert [line.split()[0] for line in out.splitlines() if "±" in line and "k " not in line] == [
        "2", "1", "1/2"
    ]  # fmt: skip
    model = Path(folder / "model.json").read_bytes()
    tuned(capsys, *command, "1", "2")
    assert Path(folder / "model.json").read_bytes() != model
    tuned(capsys, *command, "1", "0.5", "2")
    assert Path(folder / "model.json").read_bytes() == model


def test_the_default_folder_tells_searches_apart() -> None:
    data, encoder = open_data("digits")
    protocol = Protocol(MLPRecipe("digits", (6,)))
    folder = default_folder(protocol, data, encoder)
    assert folder == default_folder(protocol, *open_data("digits"))
    assert folder != default_folder(replace(protocol, seed=1), data, encoder)
    assert folder == default_folder(replace(protocol, ks=(1.0, 3.0)), data, encoder)
    assert folder != default_folder(protocol, digits(test_size=300), encoder)
    assert folder != default_folder(protocol, data, replace(encoder, target="x"))
    linear = Protocol(MLPRecipe("digits", ()))
    assert default_folder(linear, data, encoder).name.startswith("digits-linear")


def test_the_model_is_not_chosen_by_its_test_error(capsys: pytest.CaptureFixture[str]) -> None:
    tuned(capsys, "digits", *SMALL, "--retrainings", "4", "--out", "run")
    found = Study.open("run").result
    model = json.loads(Path("run/model.json").read_text())
    least = min(outcome.stop_error for outcome in found.comparison.chosen)
    (chosen,) = [
        o for o in found.comparison.chosen if o.trial.seed == model["made_from"].get("seed", 0)
    ]
    assert chosen.stop_error == least


def test_predict_offers_the_saved_networks_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["tune", "--help"])
    told = capsys.readouterr().out
    told = "".join(told.split())
    for names in (ACTIVATIONS, SCHEDULES, ("float32", "tf32", "bf16")):
        assert f"{{{','.join(names)}}}" in told
    assert {"float32", "tf32", "bf16"} == {*PRECISIONS}
    assert protocols._OPTIMIZERS == OPTIMIZERS
