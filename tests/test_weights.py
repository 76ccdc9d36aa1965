"""Weighted examples in the fleet."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import plain_loop
from pseudograd.data import Dataset, open_data
from pseudograd.fleet import Fleet, Outcome, Split, Trial
from pseudograd.fleet.mlp import worker as fleet_module
from pseudograd.fleet.mlp.stack import Examples, Settings, Stack
from pseudograd.search import Bagging, table_recipe, tuning
from trials import a_trial, recipe_of, replace

pytestmark = pytest.mark.usefixtures("one_thread")

ONE = a_trial("blobs", (7,), k=0.5, learning_rate=0.2, momentum=0.5, batch_size=32, max_epochs=6)


def blobs(weights: Tensor | None = None) -> Dataset:
    """Return three overlapping classes: 113 to train on, 30 to test."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(3, (143,), generator=generator)
    centres = torch.rand(3, 5, generator=generator, dtype=torch.float64)
    noise = torch.randn(143, 5, generator=generator, dtype=torch.float64)
    features = centres[labels] + 0.4 * noise
    return Dataset("blobs", features, labels, 113, value_range=(-1.0, 2.0), weights=weights)


def uneven() -> Tensor:
    """Return weights from 0.1 to 100, whose mean is far from 1."""
    return 10 ** (3 * torch.rand(143, generator=torch.Generator().manual_seed(2)).double() - 1)


def run(data: Dataset, trials: Sequence[Trial]) -> dict[Trial, Outcome]:
    fleet = Fleet(data, precision="float64", keep_parameters=True)
    return {outcome.trial: outcome for outcome in fleet.run(trials)}


@pytest.mark.parametrize(
    "shared",
    [
        {},
        {"split": Split(plan=1, retrain=True), "clip": 0.05},
        {"optimizer": "adam", "learning_rate": 0.02, "hidden_layer_sizes": (6, 5)},
    ],
    ids=str,
)
def test_weighted_trials_follow_a_plain_loop(shared: dict[str, Any]) -> None:
    data = blobs(uneven())
    trials = [replace(ONE, **shared, k=k, seed=seed) for k in (0.25, 1, 2) for seed in (0, 1)]
    for trial, ours in run(data, trials).items():
        theirs = plain_loop.train(data, trial).outcome
        torch.testing.assert_close(ours.parameters, theirs.parameters, rtol=1e-10, atol=1e-10)
        assert ours.curve == pytest.approx(theirs.curve, abs=1e-12)
        assert ours.error == pytest.approx(theirs.error, abs=1e-12)
        assert ours.cross_entropy == pytest.approx(theirs.cross_entropy, rel=1e-9)
        assert (ours.best_epoch, ours.wrong) == (theirs.best_epoch, theirs.wrong)


def test_weights_change_training_and_judgement() -> None:
    trial = replace(ONE, split=Split(retrain=True))
    plain, weighted = run(blobs(), [trial])[trial], run(blobs(uneven()), [trial])[trial]
    assert plain.curve != weighted.curve
    assert plain.wrong is not None
    assert plain.error == len(plain.wrong) / 30
    assert weighted.wrong is not None
    weights = uneven()[113:]
    share = weights[list(weighted.wrong)].sum() / weights.sum()
    assert weighted.error == pytest.approx(share.item())


def test_the_ensemble_is_chosen_and_calibrated_by_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, encoder = open_data("digits")
    weights = torch.linspace(1, 2, len(data.labels))
    data = dataclasses.replace(data, weights=weights)
    seen = []

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            seen.append(arguments[3])
            return function(*arguments)

        return call

    for name in ("select", "calibrated"):
        monkeypatch.setattr(tuning, name, noted(getattr(tuning, name)))
    protocol = Bagging(
        table_recipe("digits", data.train_size, pixels=True, hidden_layer_sizes=(4,), max_epochs=1),
        ks=(1.0, 0.5), learning_rates=(0.01,), most_extensions=0,
    )  # fmt: skip
    study = tuning.study_of(data, encoder, protocol, tmp_path)
    tuning.tune(study, data, encoder, Fleet(data, keep_parameters=True).run)
    assert [len(counts) for counts in seen] == [data.train_size // 5 * 5] * 4
    assert all(bool((counts > 1).any()) for counts in seen)


def test_equal_weights_change_nothing() -> None:
    (plain,) = run(blobs(), [ONE]).values()
    (weighted,) = run(blobs(torch.full((143,), 4.0)), [ONE]).values()
    torch.testing.assert_close(weighted.parameters, plain.parameters, rtol=1e-12, atol=1e-12)
    assert weighted.curve == pytest.approx(plain.curve)


def test_whole_weights_are_repeated_examples() -> None:
    """In full batches, where a step is the same sum of examples."""
    data = blobs()
    counts = torch.arange(113) % 4 + 1
    features, labels = data.features[:113], data.labels[:113]
    weights = counts / counts.double().mean()
    examples = Examples(features, labels, 1.0, 0.0, weights)
    repeated = Examples(
        features.repeat_interleave(counts, 0), labels.repeat_interleave(counts), 1.0, 0.0
    )
    column = torch.ones(2, 1, dtype=torch.float64)
    settings = Settings(0.5 * column.unsqueeze(-1), 0.3 * column, 0.9 * column, clip=None)
    judged = []
    for each in (examples, repeated):
        stack = Stack(each, (5, 6, 3), "tanh", "sgd", models=2, dtype=torch.float64)
        stack.start(torch.arange(2), torch.tensor([3, 4]))
        everything = torch.arange(len(each.labels)).expand(2, -1)
        for _ in range(20):
            stack.train(everything, len(each.labels), settings)
        judged.append((stack.parameters, stack.evaluate(everything)))
    torch.testing.assert_close(judged[0], judged[1], rtol=1e-10, atol=1e-12)


def test_chance_is_weighted() -> None:
    """A diverged network is compared with the most frequent class by weight, not by count."""
    labels = torch.arange(20) // 15  # 15 examples of class 0, 5 of class 1
    weights = torch.where(labels == 1, 9.0, 1.0)
    data = Dataset("one", torch.zeros(20, 1), labels, 20, weights=weights)
    trial = a_trial("one", (), k=1, learning_rate=0.1)
    worker = fleet_module.StackWorker(Fleet(data), trial, torch.device("cpu"), slots=1, most=1)
    assert worker.majority == pytest.approx(45 / 60)


class OnGPU:
    """A stand-in for a tensor that is enough for `_stack`."""

    device = torch.device("cuda")


def kind_on_gpu(data: Dataset, trial: Trial = ONE, precision: str = "tf32") -> str:
    """Return the name of the stack that a fleet would choose on a GPU."""
    examples = Examples(data.features, OnGPU(), 1.0, 0.0, data.weights)  # type: ignore[arg-type]
    return type(
        fleet_module._stack(examples, Fleet(data, precision=precision), recipe_of(trial), 1)
    ).__name__


@pytest.fixture
def nothing_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stack, "__init__", lambda self, *_: None)
    pytest.importorskip("triton")
    monkeypatch.setattr("pseudograd.fleet.mlp.fused.FusedStack.__init__", lambda self, *_: None)


def of_classes(classes: int) -> Dataset:
    return Dataset("blobs", torch.zeros(classes, 1), torch.arange(classes), classes)


@pytest.mark.usefixtures("nothing_built")
def test_weighted_data_do_not_use_the_kernels() -> None:
    """The kernels do not support weights, so weighted data fall back to PyTorch ops."""
    assert kind_on_gpu(blobs()) == "FusedStack"
    assert kind_on_gpu(blobs(uneven())) == "Stack"


@pytest.mark.usefixtures("nothing_built")
def test_the_kernels_are_used_where_supported() -> None:
    assert kind_on_gpu(blobs(), replace(ONE, batch_size=128)) == "FusedStack"
    assert kind_on_gpu(blobs(), replace(ONE, batch_size=129)) == "Stack"
    for optimizer in ("adam", "rmsprop"):
        assert kind_on_gpu(blobs(), replace(ONE, optimizer=optimizer)) == "Stack"
    assert kind_on_gpu(blobs(), replace(ONE, rule="focal")) == "Stack"
    for precision in ("float32", "float64"):
        assert kind_on_gpu(blobs(), precision=precision) == "Stack"
    assert kind_on_gpu(of_classes(256)) == "FusedStack"
    assert kind_on_gpu(of_classes(257)) == "Stack"


def test_without_triton_the_fleet_falls_back_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stack, "__init__", lambda self, *_: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "pseudograd.fleet.mlp.fused", None)  # makes its import fail
    assert kind_on_gpu(blobs()) == "Stack"


def test_weights_belong_to_the_hash() -> None:
    assert blobs().sha256 == blobs().sha256
    assert len({data.sha256 for data in (blobs(), blobs(uneven()), blobs(2 * uneven()))}) == 3


def test_bad_weights_are_named(subtests: pytest.Subtests) -> None:
    cases: list[tuple[Tensor, str]] = [
        (torch.ones(142), "one floating-point number for each of the 143"),
        (torch.ones(143, 1), "one floating-point number for each of the 143"),
        (torch.ones(143).long(), "one floating-point number for each of the 143"),
        (-torch.ones(143), "above 0"),
        (torch.zeros(143), "remove examples"),
        (torch.full((143,), torch.nan), "finite"),
        (torch.full((143,), torch.inf), "finite"),
    ]
    for weights, message in cases:
        said = f"weights must be .*{message}"
        with subtests.test(message=message), pytest.raises(ValueError, match=said):
            blobs(weights)
