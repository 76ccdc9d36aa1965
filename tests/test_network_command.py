"""``pseudograd tune --network`` and predictions with its result, on arrays and images."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import pseudograd
from pseudograd.cli import main
from pseudograd.cli.networks import imported
from pseudograd.data import Dataset, digits, images, open_arrays
from pseudograd.data.arrays import open_new
from pseudograd.data.survey import Note
from pseudograd.fleet.modules.fleet import ModuleFleet
from pseudograd.search import Study, cluster, connection

pytestmark = pytest.mark.usefixtures("one_thread")

NETS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, outputs=3, inputs=12):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(inputs, 8), nn.ReLU())
        self.out = nn.Linear(8, outputs)

    def forward(self, x):
        return self.out(self.layers(x))

def net():
    return Net()

def two():
    return Net(2)

def small_images():
    return Net(2, 3 * 16)

def needs_width(width):
    return Net()

def raises():
    raise RuntimeError("there is no GPU\\nat all")

def dark(x):
    return x * 0.5

number = 3
module = nn.Linear(3, 2)
"""
SMALL = shlex.split(
    "--k 1 0.5 --learning-rates 0.01 0.03 0.1 --validation 0.25 --epochs 2 --batch-size 10 "
    "--retrainings 2 --device cpu"
)
FINISHED = ["--network", "nets:net", *SMALL, "--out", "run"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in an empty folder with a file of networks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("nets.py").write_text(NETS)
    yield
    for name in ("nets", "other"):
        sys.modules.pop(name, None)


def arrays(path: str = "shapes.npz", **others: Any) -> None:
    """An .npz file of three classes that are easy to tell apart."""
    random = np.random.default_rng(0)
    y = np.arange(90) % 3
    X = random.normal(size=(90, 3, 4)).astype(np.float32)
    X[np.arange(90), y] += 2
    np.savez(path, **{"X": X, "y": y, **others})


def pictures(
    folder: str, count: int = 12, size: tuple[int, int] = (4, 4), mode: str = "RGB"
) -> None:
    """Images of two classes, light and dark."""
    image = pytest.importorskip("PIL.Image")
    random = np.random.default_rng(0)
    for name, mean in (("dark", 60), ("light", 200)):
        Path(folder, name).mkdir(parents=True, exist_ok=True)
        for at in range(count):
            pixels = random.normal(mean, 20, (*size[::-1], 3)).clip(0, 255).astype(np.uint8)
            image.fromarray(pixels).convert(mode).save(Path(folder, name, f"{at}.png"))


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the one-line error of a command that must fail."""
    try:
        status: Any = main(arguments)
    except SystemExit as exit_:
        status = exit_.code
    assert status in (1, 2)
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert lines[-1].startswith("pseudograd")
    assert len(lines) == 1
    assert not captured.out
    return lines[-1]


def predicted(
    capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[list[dict[str, str]], str]:
    assert main(["predict", "run", *arguments]) == 0
    captured = capsys.readouterr()
    return list(csv.DictReader(io.StringIO(captured.out))), captured.err


# --- a whole run -----------------------------------------------------------------------------


def test_from_arrays_to_predictions(capsys: pytest.CaptureFixture[str]) -> None:
    arrays()
    assert main(["tune", "shapes.npz", *FINISHED]) == 0
    captured = capsys.readouterr()
    told = captured.out
    assert told.endswith("\npage: run/report.html\nnetworks, ledger and everything else: run\n")
    assert Path("run/report.html").exists()
    lines = captured.err.splitlines()
    assert lines[0] == ("72 training and 18 test examples of shape (3, 4); 3 classes: 0, 1, 2")
    assert lines[1].startswith("training about 10 networks")
    run = Study.open("run")
    assert run.finished
    assert run.data["name"] == "shapes.npz"
    assert run.about["command"] == f"pseudograd tune shapes.npz {' '.join(FINISHED)}"
    assert json.loads(Path("run/network.json").read_text()) == {
        "network": "nets:net", "image_size": None
    }  # fmt: skip

    rows, err = predicted(capsys, "shapes.npz")
    assert len(rows) == 90
    assert list(rows[0]) == ["row", "label", "p(0)", "p(1)", "p(2)"]
    assert [row["row"] for row in rows[:3]] == ["0", "1", "2"]
    assert err.startswith("error ")
    assert err.splitlines()[1] == (
        "by name and size, this is the data of the search: the model was trained on 72 of these "
        "examples, so the error on new ones may be higher"
    )
    assert "of 90 examples)" in err
    several = [[[float(row[f"p({at})"]) for at in range(3)] for row in rows]]
    for extra in (
        ["--k", "1"],
        ["--ensemble"],
        ["--ensemble", "--k", "1"],
        ["--ensemble", "--k", "mixed"],
    ):
        rows, _ = predicted(capsys, "shapes.npz", *extra)
        several.append([[float(row[f"p({at})"]) for at in range(3)] for row in rows])
    assert np.array(several).sum(-1) == pytest.approx(1, abs=1e-4)
    assert not np.allclose(several[0], several[2])
    assert main(["predict", "run", "shapes.npz", "--out", "labels.csv"]) == 0
    assert "90 predictions: labels.csv" in capsys.readouterr().out
    assert Path("labels.csv").read_text().startswith("row,label,p(0),p(1),p(2)\n0,")

    # The averaged probabilities are the mean over the final networks.
    x = np.load("shapes.npz")["X"]
    train, test, _ = open_arrays("shapes.npz")
    study = pseudograd.Study(
        imported("nets:net"), train, test, k=(1, 0.5), learning_rates=(0.01, 0.03, 0.1),
        validation=0.25, epochs=2, batch_size=10, retrainings=2, folder="run", name="shapes.npz",
    )  # fmt: skip
    assert told.startswith(Study.open("run").summary())
    ensembles = map(study.ensemble, ("chosen", "plain", "mixed"))
    with torch.no_grad():
        for at, network in enumerate((study.model(), study.model(1), *ensembles)):
            expected = network(torch.from_numpy(x)).softmax(1)
            assert np.array(several[at]) == pytest.approx(expected.numpy(), abs=1e-5)


def test_the_same_command_resumes_and_repeats_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays()
    command = ["tune", "shapes.npz", "--network", "nets:net", *SMALL]
    stopped = [*command, "--time-limit", "1"]

    def clock() -> float:
        """Make the time limit expire at the first outcome."""
        return 1000.0 * any("error" in path.read_text() for path in Path().glob("runs/*/*.jsonl"))

    with monkeypatch.context() as patch:
        patch.setattr("pseudograd.fleet.trial.time", SimpleNamespace(monotonic=clock))
        assert main(stopped) == 0
    captured = capsys.readouterr()
    assert "time limit reached; " in captured.out
    assert captured.out.splitlines()[-1].startswith("ledger and everything else: runs/shapes-net-")
    (folder,) = Path("runs").iterdir()
    some = len(Study.open(folder).ledger)
    assert some > 0
    assert main(command) == 0
    captured = capsys.readouterr()
    assert f"resuming {folder}: {some} trials are done" in captured.err
    ledger = (folder / "ledger.jsonl").read_bytes()
    assert main(command) == 0
    assert capsys.readouterr().out == captured.out
    assert (folder / "ledger.jsonl").read_bytes() == ledger
    assert [*Path("runs").iterdir()] == [folder]


def test_ctrl_c_keeps_what_is_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pseudograd.search.display.Display.show", interrupted)
    assert main(["tune", "shapes.npz", *FINISHED]) == 130
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == (
        "pseudograd: stopped by Ctrl-C; 1 trial kept, and the same command resumes from there"
    )


def test_options_reach_the_training(capsys: pytest.CaptureFixture[str]) -> None:
    arrays()
    more = shlex.split(
        "--repetitions 1 --seed 3 --clip 2 --patience 4 --optimizer sgd --momentum 0.9 "
        "--weight-decay 0.01 --schedule linear --precision bf16 --label-smoothing 0.1 "
        "--augment nets:dark --test-fraction 0.5"
    )
    assert main(["tune", "shapes.npz", *FINISHED, *more]) == 0
    protocol = Study.open("run").protocol
    recipe: Any = protocol.recipe
    assert (protocol.seed, protocol.repetitions, protocol.retrainings) == (3, 1, 2)
    assert protocol.learning_rates == (0.01, 0.03, 0.1)
    assert recipe.optimizer == "SGD(momentum=0.9, weight_decay=0.01)"
    assert (recipe.epochs, recipe.batch_size, recipe.clip, recipe.patience) == (2, 10, 2.0, 4)
    assert (recipe.schedule, recipe.precision, recipe.label_smoothing) == ("linear", "bf16", 0.1)
    assert recipe.augment.startswith("dark ")
    assert recipe.validation == 0.25
    assert Study.open("run").data["train_size"] == 45
    capsys.readouterr()


def test_a_folder_of_images(capsys: pytest.CaptureFixture[str]) -> None:
    pictures("photos", size=(9, 6))
    Path("photos/dark/readme.txt").write_text("no image")
    options = ["--network", "nets:small_images", *SMALL, "--image-size", "4", "--out", "run"]
    with pytest.warns(Note, match=r"1 file in photos/dark left out .* such as readme.txt"):
        assert main(["tune", "photos", *options]) == 0
    err = capsys.readouterr().err
    assert "examples of shape (3, 4, 4); 2 classes: dark, light" in err
    pictures("more", 2, size=(8, 8), mode="L")
    rows, err = predicted(capsys, "more")
    assert list(rows[0]) == ["file", "label", "p(dark)", "p(light)"]
    assert [row["file"] for row in rows] == [
        "dark/0.png", "dark/1.png", "light/0.png", "light/1.png"
    ]  # fmt: skip
    assert {row["label"] for row in rows} <= {"dark", "light"}
    assert err.endswith("of 4 examples)\n")
    (row,), _ = predicted(capsys, "more/dark/1.png")
    assert row == {**rows[1], "file": "1.png"}


def test_a_run_on_a_cluster_gets_its_runner(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Runner(contextlib.nullcontext[Any]):
        def __init__(self, training: Any, examples: Any) -> None:
            super().__init__(ModuleFleet(training, examples, "cpu", 1, True).run)

    monkeypatch.setattr(connection, "connection", lambda address: contextlib.nullcontext())
    monkeypatch.setattr(cluster, "ModuleRunner", Runner)
    monkeypatch.setattr("pseudograd.environment._cluster", lambda: "a cluster")
    arrays()
    options = [word for word in FINISHED if word not in ("--device", "cpu")]
    assert main(["tune", "shapes.npz", *options, "--ray"]) == 0
    assert Study.open("run").about["devices"] == ["ray"]
    capsys.readouterr()


# --- errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("called", "said"),
    [
        ("nets", "--network nets must be a function, such as nets:net for net() in nets.py, not a"),
        ("nets.py:net", "No module named 'nets.py'"),
        ("./nets:net", "--network ./nets:net cannot be imported (ValueError: invalid format"),
        ("nest:net", "cannot be imported (ModuleNotFoundError: No module named 'nest'): name mod"),
        ("nets:nte", "(AttributeError: module 'nets' has no attribute 'nte')"),
        ("nets:number", "--network nets:number must be a function"),
        (
            "nets:module",
            "--network nets:module is a module: name a function that returns a new one",
        ),
        ("nets:needs_width", "fails when it is called (TypeError: needs_width() missing 1"),
        ("nets:raises", "fails when it is called (RuntimeError: there is no GPU)"),
        ("other:net", "cannot be imported (ModuleNotFoundError: No module named 'absent')"),
        ("builtins:dict", "network must return a torch.nn.Module, not {}"),
        ("nets:two", "network has 2 outputs, but"),
        ("nets:small_images", "training fails on a batch of shape (4, 3, 4): "),
    ],
)
def test_unusable_networks_are_refused(
    called: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arrays()
    Path("other.py").write_text("import absent\n")
    assert said in refusal(capsys, "tune", "shapes.npz", "--network", called, *SMALL)
    assert not Path("runs").exists()


def test_more_outputs_than_classes(capsys: pytest.CaptureFixture[str]) -> None:
    arrays(y=np.array(["a", "b"] * 45))
    said = refusal(capsys, "tune", "shapes.npz", "--network", "nets:net", *SMALL)
    assert said == ("pseudograd: --network must have an output for each of the 2 classes, not 3")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--target", "y"], "--target must be left out with --network"),
        (["--drop", "y"], "--drop must be left out with --network"),
        (["--strict"], "--strict must be left out with --network"),
        (["--hidden", "4"], "--hidden must be left out with --network"),
        (["--protocol", "paper"], "--protocol must be left out with --network"),
        (["--metric", "balanced"], "--metric must be left out with --network"),
        (["--k", "2"], "--k must include 1"),
        (["--optimizer", "adamm"], "--optimizer adamm is not in torch.optim: give 'Adam"),
        (["--optimizer", "swa_utils"], "--optimizer swa_utils is not in torch.optim: give 'A"),
        (["--optimizer", "optimizer"], "--optimizer optimizer is not in torch.optim: give"),
        (["--time-limit", "-1"], "--time-limit: must be a number of minutes above 0, not -1"),
        (["--momentum", "0.9"], "--momentum cannot be set for --optimizer AdamW"),
        (["--image-size", "8"], "--image-size must be left out: shapes.npz is not a folder"),
        (["--data-dir", "."], "--data-dir must be left out: shapes.npz is not a known set"),
        (["--schedule", "steps"], "invalid choice: 'steps'"),
        (["--validation", "0.001"], "--validation must hold out some of the 72 training"),
        (["--validation", "1"], "--validation must be a fraction between 0 and 1"),
        (["--test-fraction", "1"], "--test-fraction must lie between 0 and 1"),
        (["--label-smoothing", "2"], "--label-smoothing must be a number in [0, 1]"),
        (["--weight-decay", "-1"], "Invalid weight_decay value: -1"),
        (["--epochs", "0"], "--epochs must be a whole number above 0"),
        (["--learning-rates", "0"], "--learning-rates must be finite numbers above 0"),
        (["--retrainings", "0"], "--retrainings must be 1 or more"),
        (["--augment", "nets:nothing"], "--augment nets:nothing cannot be imported"),
        (["--augment", "nets:raises"], "TypeError: raises() takes 0 positional"),
    ],
)
def test_options_that_do_not_fit(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arrays()
    options = ["--network", "nets:net", *SMALL, *arguments]
    assert said in refusal(capsys, "tune", "shapes.npz", *options)
    assert not Path("runs").exists()


@pytest.mark.parametrize("option", ["--validation=0.1", "--schedule=linear", "--image-size=4"])
def test_options_that_need_a_network(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, "tune", "digits", option)
    assert f"{option.partition('=')[0]} needs --network: add that, or leave this out" in said


def test_an_optimizer_without_a_network(capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, "tune", "digits", "--protocol", "paper", "--optimizer", "lion")
    assert said.endswith("--optimizer must be one of sgd, adam, rmsprop, not 'lion'")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"y": None}, "shapes.npz has no array 'y': it has"),
        ({"X": None}, "shapes.npz has no array 'X': it has"),
        ({"y": np.array([object()] * 90)}, "has Python objects in array 'y': save it as numbers"),
        ({"X": np.array([object()] * 90)}, "has Python objects in array 'X': save it as numbers"),
        ({"y": np.arange(80)}, "has 90 examples in 'X', but the shape (80,) in 'y'"),
        ({"X": np.array(["a"] * 90)}, "has an array 'X' of dtype <U1"),
        ({"X_test": np.zeros((9, 3, 4))}, "shapes.npz has no array 'y_test'"),
        ({"y": np.arange(90) / 2}, "train must have class indices as labels, not fractions"),
        ({"y": np.arange(90) % 3 - 1}, "must have labels of at least 0"),
        ({"X": np.full((90, 3, 4), np.nan)}, "train must have finite inputs"),
    ],
)
def test_arrays_that_cannot_be_used(
    change: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arrays()
    kept = {**np.load("shapes.npz"), **change}
    kept = {name: array for name, array in kept.items() if array is not None}
    np.savez("shapes.npz", **kept)
    assert said in refusal(capsys, "tune", "shapes.npz", "--network", "nets:net", *SMALL)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("digitz", "data 'digitz' is not known: give 'digits'"),
        ("absent.npz", "absent.npz does not exist: check the path"),
        ("table.csv", "table.csv must be an .npz file, a folder of images or one of digits, mnist"),
        ("broken.npz", "broken.npz"),
        ("mnist", "mnist needs train-images-idx3-ubyte.gz"),
    ],
)
def test_data_that_cannot_be_used(
    data: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PSEUDOGRAD_DATA", str(Path("sets").absolute()))
    Path("table.csv").write_text("x,y\n1,2\n")
    Path("broken.npz").write_bytes(b"PK nonsense")
    assert said in refusal(capsys, "tune", data, "--network", "nets:net", *SMALL)


def test_a_folder_of_another_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    arrays()
    assert main(["tune", "shapes.npz", *FINISHED]) == 0
    before = Path("run/run.json").read_bytes()
    capsys.readouterr()
    said = refusal(capsys, "tune", "shapes.npz", *FINISHED, "--clip", "3")
    assert "run holds a run with other settings (clip was None, is now 3.0)" in said
    arrays(y=np.arange(90) // 30)
    assert "run holds a run on other data" in refusal(capsys, "tune", "shapes.npz", *FINISHED)
    assert Path("run/run.json").read_bytes() == before


# --- predictions -----------------------------------------------------------------------------


def test_impossible_predictions_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    arrays()
    assert main(["tune", "shapes.npz", *FINISHED]) == 0
    capsys.readouterr()
    arrays("wide.npz", X=np.zeros((90, 3, 5)))
    said = refusal(capsys, "predict", "run", "wide.npz")
    assert "of shape (3, 5), but the network was trained on examples of shape (3, 4)" in said
    arrays("gaps.npz", X=np.full((90, 3, 4), np.nan))
    assert "gaps.npz must have finite numbers" in refusal(capsys, "predict", "run", "gaps.npz")
    pictures("photos", 1)
    one = next(Path("photos").rglob("*.png"))
    for given in ("photos", str(one)):
        assert "name an .npz file of such examples" in refusal(capsys, "predict", "run", given)
    said = refusal(capsys, "predict", "run", "nets.py")
    assert said == "pseudograd: nets.py must be an .npz file or images, for your own network"
    said = refusal(capsys, "predict", "run", "shapes.npz", "--k", "3")
    assert re.search(r"run has no network of k = 3: give 1(/2)? or 1|give 1$", said)
    said = refusal(capsys, "predict", "run", "shapes.npz", "--k", "mixed")
    assert said.endswith("--k mixed must be given with --ensemble: it is an ensemble")
    said = refusal(capsys, "predict", "run", "shapes.npz", "--keep", "id")
    assert "--keep must be left out" in said

    # Another network, the same under another name, none, and one that no longer exists.
    said = refusal(capsys, "predict", "run", "shapes.npz", "--network", "nets:two")
    assert "run has the network 'Net, " in said
    assert "restore its code" in said
    Path("other.py").write_text(NETS)
    assert len(predicted(capsys, "shapes.npz", "--network", "other:net")[0]) == 90
    Path("nets.py").unlink()
    del sys.modules["nets"]
    said = refusal(capsys, "predict", "run", "shapes.npz")
    assert "--network nets:net cannot be imported" in said
    Path("run/network.json").write_text('{"network": "nets:net"}')
    assert "run/network.json is damaged" in refusal(capsys, "predict", "run", "shapes.npz")
    Path("run/network.json").unlink()
    said = refusal(capsys, "predict", "run", "shapes.npz")
    assert said.endswith(
        "run does not record its network function: name it with --network module:function"
    )
    for path in Path("run/networks").iterdir():
        path.unlink()
    said = refusal(capsys, "predict", "run", "shapes.npz", "--network", "other:net")
    assert "are missing or damaged: run the study again" in said


def test_an_unfinished_run_has_no_predictions(capsys: pytest.CaptureFixture[str]) -> None:
    arrays()
    assert main(["tune", "shapes.npz", *FINISHED]) == 0
    path = Path("run/ledger.jsonl")
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:4]))
    capsys.readouterr()
    said = refusal(capsys, "predict", "run", "shapes.npz")
    assert said == "pseudograd: run is not finished: run its command again"


# --- the data --------------------------------------------------------------------------------


def test_digits_as_images() -> None:
    (x, y), (x_test, y_test) = pseudograd.data.images("digits")
    known = digits()
    assert (x.shape, x_test.shape) == ((1437, 1, 8, 8), (360, 1, 8, 8))
    assert (x.min(), x.max()) == (0, 255)
    assert np.concatenate([y, y_test]).tolist() == known.labels.tolist()
    assert np.abs(x.reshape(1437, 64) / 255 - known.features[:1437].numpy() / 16).max() < 0.003
    with pytest.raises(ValueError, match=r"name must be one of digits, mnist, .*, not 'mnits'"):
        images("mnits")


def test_colours_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = torch.arange(3 * 32 * 32 * 3).reshape(3, -1).byte()
    data = Dataset("cifar10", pixels, torch.tensor([0, 1, 1]), 2)
    monkeypatch.setattr("pseudograd.data.arrays.load", lambda name, data_dir: data)
    (x, _), (x_test, _) = images("cifar10")
    assert (x.shape, x_test.shape) == ((2, 3, 32, 32), (1, 3, 32, 32))
    assert np.array_equal(x[1, 2], pixels[1].numpy().reshape(32, 32, 3)[..., 2])


@pytest.mark.parametrize("names", [("X", "y"), ("x", "y"), ("x_train", "y_train")])
def test_names_of_arrays(names: tuple[str, str]) -> None:
    x, y = np.arange(24.0).reshape(6, 4).astype(">f8"), np.arange(6)[:, None] % 2
    held: dict[str, Any] = {names[0]: x, names[1]: y, "x_test": x[:2], "y_test": y[:2]}
    np.savez("a.npz", **held)
    (train_x, train_y), (test_x, test_y), classes = open_arrays("a.npz")
    assert torch.from_numpy(train_x).shape == (6, 4)
    assert train_y.tolist() == [0, 1] * 3
    assert (test_x.shape, test_y.tolist(), classes) == ((2, 4), [0, 1], None)
    new = open_new("a.npz", (4,))  # to predict: not what was trained on
    assert new.labels is not None
    assert (new.inputs.tolist(), new.labels.tolist()) == (test_x.tolist(), [0, 1])
    with pytest.raises(ValueError, match=r"'test_fraction' must be left out: a.npz has a test"):
        open_arrays("a.npz", test_fraction=0.2)


def test_labels_may_be_texts() -> None:
    labels = np.array(["dog", "cat", "cat", "dog"])
    np.savez(
        "a.npz", X=np.zeros((4, 2)), y=labels.astype("S"), X_test=np.zeros((1, 2)), y_test=["dog"]
    )
    (_, y), (_, y_test), classes = open_arrays("a.npz")
    assert (y.tolist(), y_test.tolist(), classes) == ([1, 0, 0, 1], [1], ("cat", "dog"))
    np.savez("a.npz", X=np.zeros((4, 2)), y=labels, X_test=np.zeros((1, 2)), y_test=["cow"])
    with pytest.raises(ValueError, match=r"a.npz has test labels that no training example .*'cow'"):
        open_arrays("a.npz")


def test_the_test_share_has_all_classes() -> None:
    y = np.arange(100) % 10
    np.savez("a.npz", X=np.arange(200).reshape(100, 2), y=y)
    (x, train), (x_test, test), _ = open_arrays("a.npz", test_fraction=0.3)
    assert np.bincount(test).tolist() == [3] * 10
    assert sorted([*x[:, 0], *x_test[:, 0]]) == list(range(0, 200, 2))
    assert len(train) == 70
    again = open_arrays("a.npz", test_fraction=0.3)
    assert np.array_equal(again.test[0], x_test)


def test_folders_of_images() -> None:
    pictures("photos", 5, mode="L")
    (x, y), (x_test, _), classes = open_arrays("photos")
    assert (x.shape, x.dtype.name, x_test.shape) == ((8, 1, 4, 4), "uint8", (2, 1, 4, 4))
    assert classes == ("dark", "light")
    assert x[y == 0].mean() < 100 < x[y == 1].mean()
    pictures("parted/train", 5)
    pictures("parted/val", 2, mode="L")
    (x, _), (x_test, y_test), _ = open_arrays("parted")
    assert (x.shape, x_test.shape, y_test.tolist()) == ((10, 3, 4, 4), (4, 3, 4, 4), [0, 0, 1, 1])
    with pytest.raises(ValueError, match="parted has a test set of its own"):
        open_arrays("parted", test_fraction=0.5)


def test_images_are_turned_upright_and_cut_to_a_square() -> None:
    image = pytest.importorskip("PIL.Image")
    for name in ("a", "b"):
        Path("photos", name).mkdir(parents=True)
        pixels = np.zeros((6, 12, 3), np.uint8)
        pixels[:, 6:] = 250  # the right half
        picture = image.fromarray(pixels)
        picture.save(f"photos/{name}/0.png")
        turned = picture.getexif()
        turned[0x0112] = 6  # the orientation: rotate clockwise
        picture.save(f"photos/{name}/1.png", exif=turned)
    with pytest.raises(ValueError, match=r"12×6 in 0.png, 6×12 in 1.png"):
        open_arrays("photos", test_fraction=0.5)
    new = open_new("photos", (3, 6, 6), image_size=6)
    assert new.inputs[0, 0, 0].tolist() == [0, 0, 0, 250, 250, 250]
    assert new.inputs[1, 0, :, 0].tolist() == [0, 0, 0, 250, 250, 250]


@pytest.mark.parametrize(
    "problem", ["empty", "unreadable", "cut", "deep", "one", "no test", "more"]
)
def test_images_that_cannot_be_used(problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    image = pytest.importorskip("PIL.Image")
    pictures("photos", 3, size=(16, 16))
    path, said = Path("photos/dark/0.png"), ""
    if problem == "empty":
        Path("photos/empty").mkdir()
        said = "photos/empty has no images (.bmp, "
    elif problem == "unreadable":
        path.write_text("no image")
        said = "photos/dark/0.png cannot be read as an image (cannot identify image file): replace"
    elif problem == "cut":
        path.write_bytes(path.read_bytes()[:-40])
        said = "photos/dark/0.png cannot be read as an image ("
    elif problem == "deep":
        image.fromarray(np.zeros((16, 16), np.uint16)).save(path)
        said = "photos/dark/0.png has more than 8 bits per pixel"
    elif problem == "one":
        for file in Path("photos/dark").iterdir():
            file.unlink()
        Path("photos/dark").rmdir()
        said = "photos must have a folder of images for each of two classes or more, but has 1"
    elif problem == "no test":
        Path("photos/train").mkdir()
        said = "photos has a folder 'train' but none called 'test'"
    elif problem == "more":
        pictures("parted/train", 3)
        pictures("parted/test", 3)
        Path("parted/test/dark").rename("parted/test/dim")
        Path("photos").rename("old")
        Path("parted").rename("photos")
        said = "photos/test has the class 'dim', which photos/train lacks"
    options = ["--network", "nets:small_images", *SMALL]
    assert said in refusal(capsys, "tune", "photos", *options)


def test_images_of_different_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    pictures("photos", 3)
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (5, 7)).save("photos/light/9.png")
    said = refusal(capsys, "tune", "photos", "--network", "nets:small_images", *SMALL)
    assert said == (
        "pseudograd: --image-size must be given, such as 64, to resize the images in photos: they "
        "differ in size (4×4 in 0.png, 5×7 in 9.png)"
    )


def test_missing_pillow_raises_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures("photos", 3)
    monkeypatch.setitem(sys.modules, "PIL", None)
    said = refusal(capsys, "tune", "photos", "--network", "nets:small_images", *SMALL)
    assert said.endswith("reading images needs pillow: pip install 'pseudograd[images]'")
