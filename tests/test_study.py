"""`pseudograd.Study`: which k for a network of your own."""

from __future__ import annotations

import html
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

import pseudograd
from pseudograd.cli import main
from pseudograd.fleet import Outcome, Ramp, Trial
from pseudograd.fleet.modules.examples import Examples, _Inputs
from pseudograd.fleet.modules.feeds import Streamed
from pseudograd.fleet.ramp import level
from pseudograd.fleet.recipe import ModuleRecipe
from pseudograd.rules import generalized_cross_entropy
from pseudograd.search import Study as AnyStudy
from pseudograd.search.networks import ModuleEnsemble
from pseudograd.search.protocol import NetworkProtocol
from pseudograd.study import Study

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(240, 6, generator=GENERATOR)
Y = X[:, :3].argmax(1)
TRAIN, TEST = (X[:180], Y[:180]), (X[180:], Y[180:])


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))


def study(folder: Path | None = None, **settings: Any) -> Study:
    chosen: dict[str, Any] = {
        "network": network,
        "train": TRAIN,
        "test": TEST,
        "k": (0.5, 1, 2),
        "learning_rates": (0.01, 0.03),
        "epochs": 2,
        "batch_size": 45,
        "validation": 0.25,
        "retrainings": 3,
        "folder": folder,
        **settings,
    }
    return Study(chosen.pop("network"), chosen.pop("train"), chosen.pop("test"), **chosen)


def run(one: Study) -> Study:
    assert one.run(device="cpu", slots=1, progress=False)
    return one


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return run(study(tmp_path_factory.mktemp("study") / "run"))


def test_it_chooses_k(finished: Study) -> None:
    assert finished.finished
    assert finished.best.k in (0.5, 1, 2)
    assert finished.comparison.error.mean == pytest.approx(
        sum(one.error for one in finished.comparison.chosen) / 3
        - sum(one.error for one in finished.comparison.plain) / 3
    )
    assert pseudograd.Study is Study


def test_the_model_has_the_test_error_of_its_outcome(finished: Study) -> None:
    for k in (None, 1):
        model = finished.model(k)
        assert not model.training
        wrong = (model(TEST[0]).argmax(1) != TEST[1]).float().mean()
        outcomes = finished.comparison.plain if k == 1 else finished.comparison.chosen
        assert float(wrong) == pytest.approx(outcomes[0].error)  # none is stopped early
    with pytest.raises(ValueError, match=r"^k must be (1 or 1/2|1/2 or 1|2 or 1|1), not 17$"):
        finished.model(17)


def test_the_model_of_a_ramp_is_named_as_it_was_given() -> None:
    one = study(None, k=("0.5→2", 1), retrainings=1, learning_rates=(0.01, 0.02, 0.04))
    while trials := one.protocol.wanted(one.ledger):
        for trial in trials:  # as if the ramp were the best
            wrong = (1,) if trial.split.retrain else None
            error = 0.1 if isinstance(trial.k, Ramp) else 0.2
            error += abs(trial.learning_rate - 0.02)
            one.tell(trial, Outcome(trial, error, 2, error, error, 2, "limit", (), wrong))
            if trial.split.retrain:
                one.checkpoints.put(trial, network().state_dict())
    assert one.best.k == Ramp(0.5, 2.0)
    for k in (None, "0.5→2", "0.5->2", Ramp(0.5, 2.0), 1):
        assert isinstance(one.model(k), nn.Module)
    with pytest.raises(ValueError, match=r"^k must be 1/2→2 or 1, not 2→1/2$"):
        one.model("2→1/2")


def test_ensembles_are_of_one_size_and_average_probabilities(finished: Study) -> None:
    found = {one["name"]: one for one in finished.assessment["combined"]}
    assert {"plain", "mixed"} <= found.keys()
    for name, one in found.items():
        ensemble = finished.ensemble(name)
        assert isinstance(ensemble, ModuleEnsemble)
        assert len(ensemble.networks) == 3 == len(one["ks"])
        each = torch.stack([network(TEST[0]).softmax(1) for network in ensemble.networks])
        torch.testing.assert_close(ensemble(TEST[0]).exp(), each.mean(0))
        wrong = (ensemble(TEST[0]).argmax(1) != TEST[1]).sum()
        assert int(wrong) == one["wrong"]
    assert set(found["plain"]["ks"]) == {1}
    assert sorted(found["mixed"]["ks"]) == [0.5, 1, 2]
    with pytest.raises(ValueError, match="which must be one of"):
        finished.ensemble("all")


def test_a_finished_study_says_so_and_trains_nothing(
    finished: Study, capsys: pytest.CaptureFixture[str]
) -> None:
    assert study(finished.folder).run(device="cpu", slots=1)
    assert capsys.readouterr().err == f"{len(finished.ledger)} trials done before\n"


def test_it_is_resumed_from_its_folder(finished: Study, tmp_path: Path) -> None:
    assert finished.folder is not None
    again = study(finished.folder)
    assert again.finished
    assert again.best == finished.best
    kept, own = again.model().state_dict(), finished.model().state_dict()
    assert all(torch.equal(kept[name], own[name]) for name in own)
    opened = AnyStudy.open(finished.folder)
    assert isinstance(opened.protocol, NetworkProtocol)
    assert opened.result == finished.result


def test_weights_that_are_lost_are_trained_again(tmp_path: Path) -> None:
    first = run(study(tmp_path / "run"))
    before = {name: value.clone() for name, value in first.model().state_dict().items()}
    for path in (tmp_path / "run" / "networks").iterdir():
        path.unlink()
    again = study(tmp_path / "run")
    with pytest.raises(ValueError, match="missing or damaged: run the study again"):
        again.model()
    run(again)
    assert all(torch.equal(again.model().state_dict()[name], before[name]) for name in before)


def test_in_memory_it_is_the_same(finished: Study) -> None:
    alone = run(study(None))
    assert alone.result == finished.result
    assert alone.assessment == finished.assessment


def test_a_time_limit_leaves_it_unfinished(tmp_path: Path) -> None:
    one = study(tmp_path / "run", epochs=10**5)
    assert not one.run(device="cpu", slots=1, progress=False, time_limit=0.2)
    with pytest.raises(ValueError, match="not finished"):
        _ = one.comparison
    with pytest.raises(ValueError, match="not finished"):
        one.ensemble()


SCRIPT = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
from test_study import study
one = study(Path({folder!r}), repetitions=4)
one.run(device="cpu", slots=1, progress=False)
"""


def test_kill_9_loses_no_finished_trial(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    code = SCRIPT.format(path=[str(Path(__file__).parent)], folder=str(folder))
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    ledger = folder / "ledger.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if ledger.exists() and len(ledger.read_text().splitlines()) > 4:
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.01)
    process.wait()
    one = study(folder, repetitions=4)
    before = dict(one.ledger)
    assert before
    run(one)
    assert all(one.ledger[trial] == outcome for trial, outcome in before.items())
    assert one.result == run(study(None, repetitions=4)).result


def test_a_sweep_finds_the_first_learning_rate() -> None:
    one = study(learning_rates=(), k=(1,), retrainings=0, epochs=8)
    run(one)
    swept = [trial for trial in one.ledger if one.protocol.stage_of(trial) == "sweep"]
    assert len(swept) == 8
    assert {trial.recipe.epochs for trial in swept} == {5}  # type: ignore[attr-defined]


class Deaf(nn.Module):
    """Learns nothing: its logits are its biases, which hardly change."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.tensor([2.0, 0.0, 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.bias.expand(len(x), 3)


def test_a_network_that_learns_nothing_is_not_tried_at_ever_lower_rates() -> None:
    one = run(study(network=Deaf, k=(1,), learning_rates=(1e-6, 2e-6), retrainings=0))
    tried = sorted(trial.learning_rate for trial in one.ledger)
    assert tried[0] == 1e-6  # all rates make the same mistakes, but higher ones have a lower loss
    assert tried[-1] > 2e-6


# --- bad input: one sentence, before any training -----------------------------------------------


class Wrapped(nn.Module):
    """Applies a function to the output."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.inner, self.change = network(), change

    def forward(self, x: Tensor) -> Any:
        return self.change(self.inner(x))


class Unreadable:
    """Random examples, the second of which is replaced."""

    def __init__(self, second: Any = None) -> None:
        self.second = second

    def __len__(self) -> int:
        return 8

    def __getitem__(self, at: int) -> tuple[Any, int]:
        if at != 1:
            return torch.rand(6), at % 3
        if self.second is None:
            raise OSError("torn file")
        return self.second, 0


class Late(nn.Module):
    """Makes a buffer when it is first called, so that its weights could not be loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Any:
        if not hasattr(self, "center"):
            self.register_buffer("center", x.mean(0))
        return self.inner(x)


class Learning(nn.Module):
    """Subtracts a running mean that is not in its state_dict."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.inner, self.mean = network(), torch.zeros(6)
        if buffer:
            del self.mean
            self.register_buffer("mean", torch.zeros(6), persistent=False)

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.mean.lerp_(x.mean(0), 0.1)
        return self.inner(x - self.mean)


class Counting(nn.Linear):
    """Saves something that is no tensor."""

    def __init__(self) -> None:
        super().__init__(6, 3)

    def get_extra_state(self) -> Any:
        return {"calls": 0}

    def set_extra_state(self, state: Any) -> None:
        pass


def tokens(count: int = 10, **settings: Any) -> nn.Module:
    return nn.Sequential(nn.Embedding(count, 3, **settings), nn.Flatten(), nn.Linear(12, 3))


TOKENS = torch.arange(720).reshape(180, 4) % 9
TOKENS[100, 2] = 10
SHARED = network()
NAN = (torch.cat((TRAIN[0][:5], torch.full((175, 6), torch.nan))), TRAIN[1])
UNEQUAL = [(torch.zeros(6), 0), (torch.zeros(5), 1), (torch.zeros(6), 2)]
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "too few outputs": (
        {"network": lambda: nn.Linear(6, 2)},
        "network has 2 outputs, but train has the label 2: labels start at 0, so give it 3",
    ),
    "too few outputs for the test set": (
        {
            "train": (TRAIN[0], TRAIN[1].where(torch.arange(180) > 0, 255)),
            "test": (TEST[0], TEST[1] + 1),
            "ignore_index": 255,
        },
        "^network has 3 outputs, but test has the label 3: labels start at 0, so give it 4",
    ),
    "probably transposed": (
        {"network": lambda: Wrapped(lambda z: z.unsqueeze(2)), "train": TRAIN},
        r"^network must return logits of shape \(4, classes\) for labels of .*, not \(4, 3, 1\)$",
    ),
    "no tensor": (
        {"network": lambda: Wrapped(lambda z: (z, z))},
        r"^network must return logits of shape \(4, classes\) for labels of shape .4,., not tuple$",
    ),
    "wrong inputs": (
        {"network": lambda: nn.Linear(5, 3)},
        r"^training fails on a batch of shape \(4, 6\): RuntimeError: mat1 and mat2 shapes cannot",
    ),
    "one row for all": (
        {"network": lambda: Wrapped(lambda z: z.mean(0, keepdim=True))},
        r"^network must return logits of shape \(4, classes\) .* not \(1, 3\)$",
    ),
    "a single example at the end of the test set": (
        {"network": lambda: Wrapped(Tensor.squeeze), "test": (X[-46:], Y[-46:])},
        r"^network must return logits of shape \(1, classes\) for labels of .*, not \(3,\)$",
    ),
    "a buffer made late": (
        {"network": Late},
        "^network must keep what it learns in its state_dict, .* create them in __init__$",
    ),
    "a buffer that is not saved": (
        {"network": lambda: Learning(buffer=True)},
        "^network must keep what it learns in its state_dict, .* create them in __init__$",
    ),
    "an attribute that is not saved": (
        {"network": lambda: Learning(buffer=False)},
        "^network must keep what it learns in its state_dict, .* create them in __init__$",
    ),
    "noise by NumPy": (
        {"network": lambda: Wrapped(lambda z: z * np.random.rand())},  # noqa: NPY002
        "^network and augment must draw random numbers with PyTorch, not with NumPy or Python's",
    ),
    "NaN logits": (
        {"network": lambda: Wrapped(lambda z: z * math.nan)},
        "^network must return finite logits, but returns NaN or infinity before training",
    ),
    "same object": ({"network": lambda: SHARED}, "must return a new module at every call"),
    "a module": (
        {"network": SHARED},
        "network must be a function that returns a new module, not a",
    ),
    "global state": (
        {"network": lambda: nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.1), Noisy())},
        "network must return the same weights for the same PyTorch seed",
    ),
    "not a module": ({"network": lambda: 3}, "network must return a torch.nn.Module, not 3"),
    "labels below 0": (
        {"train": (TRAIN[0], TRAIN[1] - 1)},
        r"train must have labels of at least 0, or ignore_index \(-100\), not -1",
    ),
    "fractions": (
        {"train": (TRAIN[0], TRAIN[1] + 0.5)},
        "train must have class indices as labels, not fractions",
    ),
    "too many labels": (
        {"test": (TEST[0], TEST[1][:-1])},
        "test must have one label for each example, but has 60 examples and 59 labels",
    ),
    "NaN": ({"train": NAN}, "train must have finite inputs, but example 5 has NaN or infinity"),
    "unequal shapes": (
        {"train": UNEQUAL},
        r"train must have examples of one shape and type, but example 1 has \(5,\) float32 and",
    ),
    "another test shape": (
        {"test": (TEST[0][:, :5], TEST[1])},
        r"test must have .* the same shapes and types as train, \(6,\) float32, not \(5,\)",
    ),
    "bytes and fractions": (
        {"train": ((TRAIN[0] * 9).byte(), TRAIN[1])},
        r"^test must have .* same shapes and types as train, \(6,\) uint8, not \(6,\) float32$",
    ),
    "nothing to test on": ({"test": (TEST[0][:0], TEST[1][:0])}, "test must have examples"),
    "no data": ({"train": 7}, "train must be a pair .inputs, labels. or a map-style Dataset"),
    "no pairs": (
        {"train": [1, 2, 3]},
        r"train must have examples \(x, y\), but example 0 cannot be read \(TypeError: ",
    ),
    "LBFGS": ({"optimizer": torch.optim.LBFGS}, r"^training fails .*: LBFGS.step\(\) missing"),
    "one rate for all": (
        {"optimizer": lambda parameters, lr: torch.optim.SGD(parameters, lr=0.1)},
        "^optimizer must use the learning rate it is given, but its rate does not depend on lr",
    ),
    "unknown setting": (
        {"wait_decay": 1},
        r"^training fails on .*: TypeError: .*unexpected keyword argument 'wait_decay'",
    ),
    "capturable": (
        {"capturable": True},
        "^capturable must be left out: the study sets it where it is needed$",
    ),
    "no optimizer": ({"optimizer": "adam"}, "optimizer must be a class such as .*, not 'adam'"),
    "k without 1": ({"k": (0.5, 2)}, "^k must contain 1"),
    "k of 0": ({"k": (0, 1)}, "^k must be finite numbers above 0"),
    "k twice": ({"k": (1, 1)}, "^k must be distinct numbers"),
    "nothing to validate on": (
        {"validation": 0.001},
        "^validation must hold out some of the 180 training examples and leave some to train on,"
        " but 0.001 of them is 0$",
    ),
    "nothing to train on": (
        {"validation": 0.6, "patience": 2},
        "^validation must hold out some of the 180 training examples twice .* 0.6 of them is 108$",
    ),
    "too few for folds": (
        {"validation": None, "train": (X[:4], Y[:4])},
        "^train must have 5 examples or more, one for each fold, not 4",
    ),
    "class weights": (
        {"class_weights": (1, 2)},
        "class_weights must be one for each of the network's 3 outputs, not 2",
    ),
    "weights in a dict": (
        {"class_weights": {0: 1.0, 1: 2.0, 2: 1.0}},
        r"^class_weights must be a sequence, such as \[\*class_weights.values\(\)\], not a dict$",
    ),
    "texts as weights": (
        {"class_weights": ("a", "b", "c")},
        r"^class_weights must be finite numbers of at least 0, not \('a', 'b', 'c'\)$",
    ),
    "class names": (
        {"classes": ["a", "b"]},
        "network must have an output for each of the 2 classes, not 3",
    ),
    "precision": ({"precision": "fp8"}, "precision must be one of"),
    "schedule": ({"schedule": "triangle"}, "schedule must be a function of progress"),
    "a failing schedule": (
        {"schedule": lambda progress: progress / 0},
        r"^schedule must be .*, but it fails \(ZeroDivisionError: ",
    ),
    "validation": ({"validation": 1.5}, "validation must be a fraction between 0 and 1"),
    "epochs": ({"epochs": -1}, "epochs must be a whole number above 0"),
    "no epochs": ({"epochs": 0}, "epochs must be a whole number above 0"),
    "augment": (
        {"augment": lambda x: x[:1]},
        r"^network must return logits of shape \(4, classes\) .* not \(1, 3\)$",
    ),
    "augment without the labels it takes": (
        {"augment": lambda x, y: x},
        r"^training fails .*: augment must return both inputs and labels if it takes both$",
    ),
    "augmented labels": (
        {"augment": lambda x, y: (x, 3)},
        "^augment must return labels as a tensor, not as int$",
    ),
    "probabilities of too few classes": (
        {"augment": lambda x, y: (x, torch.ones(len(y), 2))},
        r"^augment must return probabilities of shape \(4, 3\), not \(4, 2\)$",
    ),
    "probabilities with a rule": (
        {
            "augment": lambda x, y: (x, nn.functional.one_hot(y, 3).float()),
            "rule": generalized_cross_entropy,
            "k": (0, 0.5),
            "baseline": 0,
        },
        "^augment must return class indices, not probabilities: a rule needs hard labels$",
    ),
    "probabilities with an index to ignore": (
        {"augment": lambda x, y: (x, nn.functional.one_hot(y, 3).float()), "ignore_index": 7},
        "^augment must return class indices, not probabilities, if ignore_index is 0 or more$",
    ),
    "augment by NumPy": (
        {"augment": lambda x: x * np.random.rand()},  # noqa: NPY002
        "^network and augment must draw random numbers with PyTorch, not with NumPy or Python's",
    ),
    "unequal labels": (
        {"train": [(torch.zeros(6), label) for label in ([0], [1, 2], [0])]},
        r"train must have .* example 1 has \(6,\) float32 with labels \(2,\) and .* labels \(1,\)",
    ),
    "one k": ({"k": 1}, r"^k must be several values, such as \(0.5, 1\), not 1$"),
    "one k, not 1": ({"k": 2.0}, r"^k must be several values, such as \(2.0, 1\), not 2.0$"),
    "an argument of run": ({"device": "cpu"}, r"^device belongs to run\(device=...\)$"),
    "a DataLoader": (
        {"train": DataLoader(TensorDataset(*TRAIN))},
        r"^train must be a pair .inputs, labels. or .*, not DataLoader: pass its dataset$",
    ),
    "classes last": (
        {
            "network": lambda: nn.Linear(2, 4),
            "train": (torch.ones(180, 6, 2), torch.arange(1080).reshape(180, 6) % 4),
            "test": (torch.ones(60, 6, 2), torch.arange(360).reshape(60, 6) % 4),
        },
        r"^network must return logits of shape \(4, classes, 6\) for .*: use .movedim\(-1, 1\)$",
    ),
    "one rate": ({"learning_rates": 0.1}, "learning_rates must be several values"),
    "one weight": ({"class_weights": 2.0}, "class_weights must be several values"),
    "weights of 0": ({"class_weights": [0, 0, 0]}, "class_weights must be finite numbers"),
    "a weight of NaN": ({"class_weights": [1, 1, math.nan]}, "class_weights must be finite"),
    "no repetitions": ({"repetitions": 0}, "^repetitions must be 1 or more"),
    "a misspelt name": ({"epoch": 3}, "a study has no argument 'epoch': did you mean 'epochs'?"),
    "one learning rate": ({"lr": 0.1}, "^lr must be left out: .* so give learning_rates"),
    "a schedule by epochs": (
        {"schedule": lambda epoch: 0.1 ** (epoch // 10)},
        "^schedule must be .*, not of the epoch, but it is always 1 there: multiply progress by",
    ),
    "a scheduler": (
        {"schedule": torch.optim.lr_scheduler.CosineAnnealingLR},
        "schedule must be a function of progress",
    ),
    "lazy layers": (
        {"network": lambda: nn.LazyLinear(3)},
        "network must have layers of known size: replace lazy ones",
    ),
    "probabilities": (
        {"network": lambda: nn.Sequential(network(), nn.Softmax(1))},
        "network must return logits, but its outputs are probabilities",
    ),
    "a sigmoid": (
        {"network": lambda: nn.Sequential(network(), nn.Sigmoid())},
        "^network must return logits, but ends in a sigmoid: leave it out$",
    ),
    "one class": (
        {"train": (TRAIN[0], torch.full_like(TRAIN[1], 2))},
        "^train must have labels of two or more classes, but all are 2$",
    ),
    "fails in evaluation": (
        {"network": lambda: Evaluated(fails=True)},
        r"^evaluation fails on a batch of shape \(4, 6\): RuntimeError: not today$",
    ),
    "other shape in evaluation": (
        {"network": lambda: Evaluated(fails=False)},
        r"^network must return logits of shape \(4, classes\) for labels of .*, not \(4,\)$",
    ),
    "one-hot labels": (
        {
            "train": (TRAIN[0], nn.functional.one_hot(TRAIN[1])),
            "test": (TEST[0], nn.functional.one_hot(TEST[1])),
        },
        r"^network must return logits of shape \(4, classes, 3\) for .*: use labels.argmax\(1\)$",
    ),
    "an input out of range": (
        {"network": tokens, "train": (TOKENS, Y[:180]), "test": (TOKENS[:60] % 9, Y[180:])},
        r"^the input value 10 fails on a batch of shape \(2, 4\): IndexError: index out of range",
    ),
    "extra state": (
        {"network": Counting},
        r"^network must keep its state in parameters and buffers, not in get_extra_state\(\)$",
    ),
    "texts": (
        {"train": [(torch.zeros(6), name) for name in ("cat", "dog", "cow")]},
        "train labels must be numbers in tensors or arrays .can't convert np.ndarray of type",
    ),
    "nothing counts": (
        {"test": (TEST[0], torch.full_like(TEST[1], -100))},
        "test must have labels other than ignore_index",
    ),
    "a whole optimizer": (
        {"optimizer": torch.optim.SGD(network().parameters())},
        r"optimizer must be a class such as torch.optim.AdamW, not SGD \( Parameter Group 0",
    ),
    "a number of examples to validate on": (
        {"validation": 45},
        "^validation must be a fraction between 0 and 1",
    ),
    "a text to validate on": (
        {"validation": "0.1"},
        r"^validation must have examples \(x, y\), but example 0 cannot be read",
    ),
    "another validation shape": (
        {"validation": (TEST[0][:, :5], TEST[1])},
        r"^validation must have .* the same shapes and types as train, \(6,\) float32, not \(5,\)",
    ),
    "too few outputs for the validation set": (
        {"validation": (TEST[0], TEST[1] + 1)},
        "^network has 3 outputs, but validation has the label 3: labels start at 0, so give it 4",
    ),
    "a single example at the end of the validation set": (
        {"network": lambda: Wrapped(Tensor.squeeze), "validation": (X[-46:], Y[-46:])},
        r"^network must return logits of shape \(1, classes\) for labels of .*, not \(3,\)$",
    ),
    "workers": ({"num_workers": -1}, "^num_workers must be a whole number, 0 or more, not -1$"),
    "no number to ignore": ({"ignore_index": "pad"}, "ignore_index must be a whole number"),
    "unreadable": (
        {"train": Unreadable()},
        r"train must have .*, but example 1 cannot be read \(OSError: torn file\)",
    ),
    "NaN that is read each time": (
        {"train": Unreadable(torch.full((6,), math.nan))},
        "train must have finite inputs, but example 1 has NaN",
    ),
}


class Noisy(nn.Module):
    """Draws its weight from Python's random numbers, which PyTorch's seed does not control."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(random.random()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Evaluated(nn.Module):
    """Behaves differently in evaluation mode."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.inner, self.fails = network(), fails

    def forward(self, x: Tensor) -> Any:
        if self.training:
            return self.inner(x)
        if self.fails:
            raise RuntimeError("not today")
        return self.inner(x).argmax(1)


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_sentence(case: str) -> None:
    settings, sentence = BAD[case]
    with pytest.raises((ValueError, TypeError), match=sentence) as problem:
        study(None, **settings)
    assert "\n" not in str(problem.value)


def test_copies_in_a_validation_set_are_noted() -> None:
    one = study(None, **{**OWN, "validation": TEST})
    assert one.notes == [
        "60 of 60 test examples are copies of a validation example: the test error may look too low"
    ]


OWN = {"train": (X[:120], Y[:120]), "validation": (X[120:180], Y[120:180])}


@pytest.mark.parametrize("patience", [None, 1])
def test_a_validation_set_of_its_own(tmp_path: Path, patience: int | None) -> None:
    one = run(study(tmp_path, **OWN, patience=patience, batch_size=20, epochs=3))
    assert one.protocol.repetitions == 1
    recipe = one.protocol.recipe
    assert isinstance(recipe, ModuleRecipe)
    assert recipe.validation == 60
    judge, tested = one.examples.labels.split([60, 60, 60, 60])[2:]
    assert len(judge) == len(tested) == one.examples.test_size == 60
    seeds: dict[bool, set[int]] = {}
    for trial, outcome in one.ledger.items():
        cut = one.examples.parts(recipe, trial.split)
        assert cut.train.tolist() == [*range(120)]
        assert cut.stop.tolist() == ([] if patience is None else [*range(120, 180)])
        first = 180 if trial.split.retrain else 120
        assert cut.judge.tolist() == [*range(first, first + 60)]
        assert round(outcome.error * 60, 6) % 1 == 0
        seeds.setdefault(trial.split.retrain, set()).add(trial.seed)
    assert not seeds[True] & seeds[False]  # or a final network would be one of the search
    wrong = (one.model()(TEST[0]).argmax(1) != TEST[1]).float().mean()
    assert float(wrong) == pytest.approx(one.comparison.chosen[0].error)
    assert one.assessment["model"]["count"] == 60
    page = one.report().read_text(encoding="utf-8")
    assert "<dt>Validation</dt><dd>60 examples of their own; " in page
    assert AnyStudy.open(tmp_path).protocol == one.protocol


def test_a_validation_set_may_be_a_dataset_and_processes_see_it() -> None:
    class Jittered(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 120

        def __getitem__(self, at: int) -> tuple[Tensor, Tensor]:
            return X[at] + 0.1 * torch.randn(6), Y[at]

    plain = torch.utils.data.TensorDataset(*OWN["validation"])
    one = study(None, train=Jittered(), validation=plain, retrainings=0, k=(1,))
    assert one.run(device="cpu", slots=2, progress=False)
    rows = torch.arange(120, 180)
    assert torch.equal(one.examples.batch(rows)[0], X[rows])
    tensors = study(None, **OWN, retrainings=0)
    assert tensors.run(device="cpu", slots=2, progress=False)
    alone = run(study(None, **OWN, retrainings=0))
    assert {trial: outcome.error for trial, outcome in tensors.ledger.items()} == {
        trial: outcome.error for trial, outcome in alone.ledger.items()
    }


class Read(torch.utils.data.Dataset[Any]):
    """Says which process read an example, in its second input, and perhaps adds noise."""

    def __init__(self, noise: float = 0.0) -> None:
        self.noise, self.parent = noise, os.getpid()

    def __len__(self) -> int:
        return 120

    def __getitem__(self, at: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        elsewhere = torch.tensor(float(os.getpid() != self.parent))
        noise = self.noise * torch.randn(6) if self.noise else torch.zeros(6)
        return (X[at] + noise, elsewhere), Y[at]


def test_worker_processes_read_the_same_batches() -> None:
    rows = torch.randperm(120)[:100].reshape(5, 20)
    source: ConcatDataset[Any] = ConcatDataset([_Inputs(Read(), "train")])
    here, there = (Examples("data", (), Y[:120], 120, source, num_workers=n) for n in (0, 2))
    state = torch.get_rng_state()
    for alone, together in zip(here.batches(rows), there.batches(rows), strict=True):
        assert torch.equal(alone[0], together[0])
        assert not alone[1].any()
        assert together[1].all()
    assert torch.equal(torch.get_rng_state(), state)  # dropout does not depend on the workers
    noisy: ConcatDataset[Any] = ConcatDataset([_Inputs(Read(1.0), "train")])
    one, two = (Examples("data", (), Y[:120], 120, noisy, num_workers=n) for n in (1, 2))
    drawn, again = ([x for x, _ in some.batches(rows)] for some in (one, two))
    assert all(map(torch.equal, drawn, again))  # whatever the number of workers
    assert not torch.equal(drawn[0] - X[rows[0]], drawn[1] - X[rows[1]])


def test_a_gpu_gets_the_same_batches_from_threads_and_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda one: one)  # which needs a GPU
    rows = torch.randperm(120)[:100].reshape(10, 10)
    source: ConcatDataset[Any] = ConcatDataset([_Inputs(Read(), "train")])
    for workers in (0, 1):
        examples = Examples("data", (), Y[:120], 120, source, num_workers=workers)
        feed = Streamed(examples, 10, torch.device("cpu"))
        for some, _ in zip(rows, feed.feed(rows), strict=True):
            (inputs, elsewhere), labels = feed.take(some)
            assert torch.equal(inputs, X[some])
            assert torch.equal(labels, Y[some])
            assert bool(elsewhere.all()) == bool(workers)


class Many(torch.utils.data.Dataset[Any]):
    """Too large for the memory, as far as a study can tell."""

    def __len__(self) -> int:
        return 180

    def __getitem__(self, at: int) -> tuple[Tensor, Tensor]:
        return X[at], Y[at]


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.5), nn.Linear(12, 3))


@pytest.mark.parametrize("slots", [1, 2])
def test_worker_processes_change_no_outcome(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pseudograd.data.dataset.memory", lambda: 0)
    errors = []
    for workers in (0, 1):
        one = study(
            None, network=dropping, train=Many(), num_workers=workers * (3 - slots),
            k=(1,), learning_rates=(0.01, 0.02, 0.04), retrainings=1, epochs=1,
        )  # fmt: skip
        assert "train is larger than a third of the memory" in one.notes[0]
        assert one.run(device="cpu", slots=slots, progress=False)
        errors.append({trial: outcome.cross_entropy for trial, outcome in one.ledger.items()})
    assert errors[0] == errors[1]


def test_a_sweep_and_several_inputs_with_a_validation_set() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 3)

        def forward(self, x: Tensor, y: Tensor) -> Any:
            return self.inner(x + y).unsqueeze(2).expand(-1, -1, 4)

    def two(x: Tensor, y: Tensor) -> tuple[Any, Tensor]:
        return (x, x), y[:, None].expand(-1, 4)

    sets = {name: two(*pair) for name, pair in {**OWN, "test": TEST}.items()}
    one = run(study(None, network=Sum, **sets, learning_rates=(), k=(1,), retrainings=1))
    assert one.assessment["model"]["count"] == 4 * 60


@pytest.mark.parametrize("kind", [dict, SimpleNamespace])
def test_a_network_may_return_its_logits_in_an_object(kind: Any, finished: Study) -> None:
    """As the models of transformers do; the model of the study is the user's own."""
    one = run(study(network=lambda: Wrapped(lambda z: kind(loss=None, logits=z))))
    assert [outcome.error for outcome in one.ledger.values()] == [
        outcome.error for outcome in finished.ledger.values()
    ]
    assert isinstance(one.model()(X), kind)
    assert one.ensemble()(X).shape == (240, 3)


def test_a_network_may_change_its_inputs_in_place() -> None:
    before = TRAIN[0].clone()
    one = run(study(network=lambda: nn.Sequential(nn.ReLU(inplace=True), network())))
    assert torch.equal(TRAIN[0], before)
    copies = run(study(network=lambda: nn.Sequential(nn.ReLU(), network())))
    assert [outcome.error for outcome in one.ledger.values()] == [
        outcome.error for outcome in copies.ledger.values()
    ]


def test_masked_classes_and_augmented_shapes_are_fine() -> None:
    mask = torch.tensor([0.0, 0.0, -math.inf])
    labels: dict[str, Any] = {"train": (TRAIN[0], TRAIN[1] % 2), "test": (TEST[0], TEST[1] % 2)}
    study(network=lambda: Wrapped(lambda z: z + mask), **labels)
    study(network=lambda: nn.Sequential(nn.AdaptiveAvgPool1d(3), nn.Linear(3, 3)),
          augment=lambda x: x[:, 1:])  # fmt: skip


def test_a_folder_of_another_recipe_is_refused(finished: Study) -> None:
    with pytest.raises(ValueError, match=r"holds a run with other settings .batch_size was 45"):
        study(finished.folder, batch_size=30)
    with pytest.raises(ValueError, match=r"other settings .network was Sequential, 123 param"):
        study(finished.folder, network=lambda: nn.Linear(6, 3))
    with pytest.raises(ValueError, match="holds a run on other data"):
        study(finished.folder, train=(TRAIN[0] + 1, TRAIN[1]))
    with pytest.raises(ValueError, match=r"other settings .classes was .0, 1, 2., is now .'a', "):
        study(finished.folder, classes=list("abc"))
    with pytest.raises(ValueError, match=r"other settings .network was Sequential, 123 param"):
        study(finished.folder, network=lambda: nn.Linear(6, 4))
    with pytest.raises(ValueError, match=r"other settings .name was data, is now other"):
        study(finished.folder, name="other")


def test_an_opened_study_has_the_same_results(finished: Study) -> None:
    assert finished.folder is not None
    for opened in (Study.open(finished.folder), AnyStudy.open(finished.folder)):
        assert opened.best == finished.best
        assert opened.comparison == finished.comparison
        assert opened.summary() == finished.summary()
        assert opened.report() == finished.report()


def test_own_training_has_a_summary() -> None:
    def told(**more: Any) -> str:
        rates: Any = np.array([0.1, 0.2, 0.4])
        one = Study.own_training("mine", k=(0.5, 1), learning_rates=rates)
        for trial in one:
            error = 0.1 * level(trial.k) + (trial.learning_rate - 0.2) ** 2
            one.tell(trial, error=error, **more)
        assert one.comparison == one.result.comparison
        return one.summary()

    least = told()
    assert "k = 1/2 has 5.00%, k = 1 10.00% (mean of 5 networks each): -5.00 points" in least
    assert "chosen: k = 1/2, learning rate 0.2" in least
    for absent in ("the model", "cross-entropy ", "sign test", "study."):
        assert absent not in least
    assert "cross-entropy 0.500, against 0.500" in told(cross_entropy=0.5)
    assert "(sign test: p = 1)" in told(wrong=[1])


def test_a_summary_before_the_end_shows_the_best_pairs() -> None:
    one = Study.own_training("mine", k=(0.5, 1), learning_rates=(0.1, 0.2), extensions=0,
                             repetitions=1, retrainings=0)  # fmt: skip
    said = [one.summary()]
    for trial in one:
        one.tell(trial, error=0.1 + trial.learning_rate)
        said.append(one.summary())
    assert said[0] == (
        "not finished yet, 0 trials done: nothing is compared with k = 1 (retrainings=0)"
    )
    assert said[2].splitlines()[-1] == "   1/2         0.1   20.00   best so far"
    assert said[-1].startswith("finished, 4 trials done: nothing is compared with k = 1")
    assert said[-1].splitlines()[2] == "     1         0.1   20.00   best so far"


def page_of_own_training(folder: Path, last: int = 10**6, /, **told: Any) -> str:
    """Return the text of the page after the outcomes of all trials, or of the first ones."""
    settings: dict[str, Any] = {"k": (0.5, 1), "learning_rates": (0.1, 0.2, 0.4)}
    settings |= {name: told.pop(name) for name in ("k", "retrainings") if name in told}
    one = Study.own_training("ResNet <18>, 30 epochs", folder=folder, **settings)
    for count, trial in enumerate(one):
        if count == last:
            break
        noise = 0.001 * (trial.split.repetition % 3) * level(trial.k)
        error = 0.1 * level(trial.k) + (trial.learning_rate - 0.2) ** 2 + noise
        one.tell(trial, error=error, **told)
    text = html.unescape(re.sub(r"<(style|script|svg).*?</\1>|<[^>]+>", "", flags=re.DOTALL,
                                string=one.report().read_text("utf-8")))  # fmt: skip
    assert " nan" not in text
    assert "None" not in text
    assert "ResNet <18>, 30 epochs" in text
    return re.sub(r"\s+", " ", text.replace("\xa0", " "))


def test_own_training_has_a_page(tmp_path: Path) -> None:
    text = page_of_own_training(tmp_path)
    assert "k = 1/2 may make fewer errors than k = 1 · ResNet" in text
    assert re.search(r"With k = 1/2, the test error is 5\.\d\d%, with k = 1 it is 10\.\d\d%", text)
    assert "is a hint, not proof" in text
    assert "tell the study which test examples are wrong" in text
    for heading in ("Error against k", "Where the search went", "What k does"):
        assert heading in text
    for absent in ("Sign test", "cross-entropy is", "the model", "Is this classifier", "SHA-256"):
        assert absent not in text


def test_own_training_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page_of_own_training(tmp_path / "run")
    assert main(["report", str(tmp_path / "run")]) == 0
    assert main(["runs", str(tmp_path)]) == 0
    # Means: the lowest test error of several networks would be too low.
    assert re.search(r" 1/2 +5\.04 +10\.08 ", capsys.readouterr().out)
    assert main(["predict", str(tmp_path / "run"), "new.npz"]) == 1
    assert "has no model: the networks of your own training are not kept" in capsys.readouterr().err


def test_the_page_of_own_training_shows_what_was_told(tmp_path: Path) -> None:
    text = page_of_own_training(tmp_path, wrong=[1], cross_entropy=0.5)
    assert "Sign testp = 1" in text
    assert "Test cross-entropy is 0.500 with k = 1/2 and 0.500 with k = 1" in text


def test_the_page_of_own_training_where_there_is_less_to_show(tmp_path: Path) -> None:
    assert "Not finished yet: k = 1/2 leads" in page_of_own_training(tmp_path / "searching", 25)
    assert "4 more are needed to compare" in page_of_own_training(tmp_path / "selected", 36)
    alone = page_of_own_training(tmp_path / "alone", k=(1,), retrainings=1)
    assert "Keep k = 1 · " in alone
    assert "In words" not in alone
    assert "No other k was tried." in alone
    assert "keep plain cross-entropy" not in alone
    uncompared = page_of_own_training(tmp_path / "uncompared", retrainings=0)
    assert uncompared.startswith(" k = 1/2 is selected · ")
    assert "No final networks were asked for" in uncompared


@pytest.mark.parametrize("cross_entropy", [math.nan, 3.0])
def test_ties_in_own_training_add_no_learning_rates(tmp_path: Path, cross_entropy: float) -> None:
    def rates(name: str, error: Callable[[float], float]) -> list[float]:
        folder = tmp_path / name
        one = Study.own_training("mine", k=(1,), learning_rates=(0.1, 0.2, 0.4), folder=folder)
        for trial in one:
            one.tell(trial, error=error(trial.learning_rate), cross_entropy=cross_entropy)
        assert AnyStudy.open(folder).finished
        return sorted(cell.learning_rate for cell in one.result.cells)

    assert rates("equal", lambda rate: 0.5) == [0.1, 0.2, 0.4]
    assert rates("equal at low rates", lambda rate: max(rate, 0.2)) == [0.1, 0.2, 0.4]
    assert rates("better at 0.05", lambda rate: max(rate, 0.05)) == [0.025, 0.05, 0.1, 0.2, 0.4]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"k": (0.5, 2)}, "^k must contain 1"),
        ({"k": 1}, "^k must be several values"),
        ({"learning_rates": 0.1}, "^learning_rates must be several values"),
        ({"learning_rates": ()}, "^learning_rates must be at least one number"),
        ({"repetitions": 0}, "^repetitions must be 1 or more"),
        ({"extensions": -1}, "^extensions must be 0 or more"),
    ],
)
def test_bad_settings_of_own_training(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Study.own_training("mine", **{"learning_rates": (0.1,), **settings})


def test_given_rates_can_be_kept_to(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "k": (1, 0.5), "learning_rates": (0.01,), "repetitions": 2, "retrainings": 1,
        "folder": tmp_path,
    }  # fmt: skip
    counts = []
    for extensions in (0, 1, 0):
        one = Study.own_training("mine", **settings, extensions=extensions)
        for trial in one:
            one.tell(trial, error=0.5 - trial.learning_rate)
        counts.append(len([trial for trial in one.ledger if not trial.split.retrain]))
        assert (", more where" in one.protocol.plan()) == bool(extensions)
        assert one.protocol.open_ks(one.ledger) == [1, 0.5]
    assert counts == [4, 8, 8]
    assert "so a better one may lie outside the range" in one.report().read_text("utf-8")


def test_more_networks_keep_what_is_done(tmp_path: Path) -> None:
    """The page advises more final networks, so a finished study can be given more."""
    first = run(study(tmp_path / "run", k=(1, 2), retrainings=2))
    chosen, plain = first.result.chosen, first.result.plain
    more = study(tmp_path / "run", k=(1, 2), retrainings=4)
    assert not more.finished
    run(more)
    new = set(more.ledger) - set(first.ledger)
    assert len(new) == (4 if chosen != plain else 3)
    assert {trial.split.retrain for trial in new} == {True}
    assert len(more.comparison.chosen) == 4
    assert (more.result.chosen, more.result.plain) == (chosen, plain)
    assert len(more.ensemble().networks) == 4
    alone = run(study(None, k=(1, 2), retrainings=4))
    assert more.result == alone.result
    assert more.assessment == alone.assessment
    again = run(study(tmp_path / "run", k=(1, 2), retrainings=4, repetitions=2))
    validated = {t.split.repetition for t in again.ledger if t not in more.ledger}
    assert 1 in validated
    assert {len(cell.errors) for cell in again.result.cells} == {2}
    for settings in ({"retrainings": 3}, {"retrainings": 4, "repetitions": 1}):
        with pytest.raises(ValueError, match=r"other settings .re(training|petition)s was"):
            study(tmp_path / "run", k=(1, 2), **settings)


def test_the_result_says_that_networks_were_added_to_a_comparison(tmp_path: Path) -> None:
    def told(retrainings: int, repetitions: int = 5, at_most: int = 10**6) -> AnyStudy:
        one = Study.own_training("mine", k=(0.5, 1), learning_rates=(0.1, 0.2, 0.4),
                                 repetitions=repetitions, retrainings=retrainings,
                                 folder=tmp_path / "run")  # fmt: skip
        for count, trial in enumerate(one):
            if count == at_most:
                break
            error = 0.1 * level(trial.k) + (trial.learning_rate - 0.2) ** 2
            one.tell(trial, error=error + 0.001 * trial.split.repetition)
        return one

    sentence = "note: the comparison was first made with 2 networks of each k; if you added more "
    told(0)  # nothing is compared yet
    assert sentence not in told(2).summary()
    told(2, repetitions=6, at_most=1)  # cut off, but the comparison has been seen
    more = told(4, repetitions=6)
    assert len(more.ledger) == 6 * 6 + 2 * 4
    assert sentence in more.summary()
    assert sentence in AnyStudy.open(tmp_path / "run").summary()


def test_other_k_and_rates_keep_what_is_done(tmp_path: Path) -> None:
    def told(**settings: Any) -> tuple[Study, list[Trial]]:
        """Run the study, and return it with the new trials of the search."""
        one = study(tmp_path / "run", **settings)
        before = dict(one.ledger)
        run(one)
        assert {trial: one.ledger[trial] for trial in before} == before
        return one, [t for t in one.ledger if t not in before and not t.split.retrain]

    first, _ = told(k=(0.5, 1))
    tried = first.result.cells
    more, new = told(k=(0.5, 1, 2))
    assert {trial.k for trial in new} == {2}
    assert {cell for cell in more.result.cells if cell.k != 2} == set(tried)
    assert len(more.result.best_of_each_k) == 3
    assert "k in 1/2, 1, 2" in more.report().read_text("utf-8")
    # A rate between the others is new for every k. Rates added at the edges stay.
    between, new = told(k=(0.5, 1, 2), learning_rates=(0.01, 0.02, 0.03))
    assert {trial.learning_rate for trial in new} >= {0.02}
    assert len(new) <= 6
    assert set(tried) < set(between.result.cells)
    # Fewer values leave out finished trials; the ledger still has them for later.
    fewer, new = told(k=(1, 2), learning_rates=(0.03,))
    assert not new
    assert {cell.k for cell in fewer.result.cells} == {1, 2}
    assert set(fewer.result.cells) == {cell for cell in between.result.cells if cell.k != 0.5}
    again, new = told(k=(0.5, 1, 2), learning_rates=(0.01, 0.02, 0.03))
    assert not new
    assert again.result == between.result
    assert again.assessment == between.assessment
    assert not again.ledger.set_aside


def test_given_rates_follow_a_sweep(tmp_path: Path) -> None:
    run(study(tmp_path / "run", k=(0.5, 1), learning_rates=(), epochs=8))
    given = study(tmp_path / "run", k=(0.5, 1), epochs=8)
    assert not given.ledger.set_aside
    run(given)
    assert {0.01, 0.03} < {cell.learning_rate for cell in given.result.cells}
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    done = len(given.ledger)
    assert (
        len(run(study(tmp_path / "copy", k=(0.5, 1), learning_rates=(), epochs=8)).ledger) == done
    )


def test_more_outputs_than_labels_are_allowed() -> None:
    one = study(network=lambda: nn.Linear(6, 5))
    assert one.classes == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"device": "nowhere"}, "device 'nowhere' cannot be used here"),
        ({"device": "fpga"}, r"^device 'fpga' cannot be used here \([^.]*'aten::[^ ]*' [^.]*\)$"),
        ({"slots": "two"}, "slots must be a whole number above 0, not 'two'"),
        ({"time_limit": -1}, "time_limit must be a number of seconds, not -1"),
    ],
)
def test_bad_arguments_of_run_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        study(None).run(**settings)


def test_closures_and_globals_are_part_of_the_recipe(tmp_path: Path) -> None:
    def with_power(power: float) -> Study:
        return study(tmp_path / "run", schedule=lambda progress: (1 - progress) ** power)

    run(with_power(1.0))
    assert with_power(1.0).finished
    with pytest.raises(ValueError, match=r"other settings .schedule was"):
        with_power(2.0)


class Dropping(nn.Module):
    """Has a setting that no layer shows."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.inner, self.share = network(), share

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.inner(x), self.share, self.training)


def test_settings_of_a_network_are_part_of_the_recipe(tmp_path: Path) -> None:
    run(study(tmp_path / "run", network=lambda: Dropping(0.1)))
    with pytest.raises(ValueError, match=r"other settings .network was"):
        study(tmp_path / "run", network=lambda: Dropping(0.5))


class Unlucky(nn.Module):
    """Diverges for some seeds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 12), nn.Linear(12, 3)
        unlucky = float(self.first.weight[0, 0].detach()) > 0.1
        self.factor: Tensor
        self.register_buffer("factor", torch.tensor(1e30 if unlucky else 1.0))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x).relu())
        return (out * self.factor) * self.factor


def test_a_test_set_with_too_many_probabilities_is_not_predicted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pseudograd.search.networks._MOST_NUMBERS", 3 * len(TEST[1]) - 1)
    monkeypatch.setattr("pseudograd.search.networks.predict", None)
    one = study(epochs=1, retrainings=2)
    assert one.run(device="cpu", slots=1)
    assert one.assessment == {}
    assert "the test set has too many probabilities to compare" in capsys.readouterr().err


def test_diverged_final_networks_are_reported_and_not_kept() -> None:
    one = run(study(None, network=Unlucky, retrainings=5, k=(1, 2)))
    final = [*one.comparison.chosen, *one.comparison.plain]
    lost = [outcome for outcome in final if outcome.stopped_by == "diverged"]
    assert 0 < len(lost) < len(final)  # otherwise the test shows nothing
    assert bool(one.model()(TEST[0]).isfinite().all())
    assert bool(one.ensemble("plain")(TEST[0]).isfinite().all())
    assert "final networks diverged" in one.summary()
