"""Bins of numeric features: where they are, what they encode, and that networks train on them."""

from __future__ import annotations

import gc
import itertools
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pseudograd.data import Dataset
from pseudograd.fleet import Fleet, Network, Outcome, Split, Trial
from pseudograd.fleet.mlp.bins import Bins
from trials import a_trial, replace

pytestmark = pytest.mark.usefixtures("one_thread")


def a_set(
    features: Tensor, train_size: int | None = None, weights: Tensor | None = None
) -> Dataset:
    labels = torch.arange(len(features)) % 2
    return Dataset("any", features, labels, train_size or len(features), (-3.0, 3.0), weights)


def shuffled(count: int, seed: int = 0) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).float()


# --- where they are --------------------------------------------------------------------------


def test_bins_are_equally_full_in_the_training_part() -> None:
    values = shuffled(100).square()  # so equal widths would be far from equally full
    features = torch.cat((values, torch.full((20,), 1e6))).unsqueeze(1)  # test rows beyond
    bins = Bins.fit(a_set(features, 100), 4)
    assert bins.feature.tolist() == [0] * 4
    edges = [*bins.low.tolist(), (bins.low + bins.width)[-1].item()]
    assert (edges[0], edges[-1]) == (0.0, 99.0**2)
    assert torch.equal((bins.low + bins.width)[:-1], bins.low[1:])
    counts = [int(((values > a) & (values <= b)).sum()) for a, b in itertools.pairwise(edges)]
    assert counts == [24, 25, 25, 25]  # the smallest value is the first edge


def test_a_weight_of_two_equals_a_second_copy() -> None:
    values = shuffled(60).exp2().fmod(97).unsqueeze(1)
    weights = torch.where(shuffled(60, seed=1) < 20, 2.0, 1.0)
    copied = torch.cat((values, values[weights == 2]))
    ours, theirs = Bins.fit(a_set(values, weights=weights), 7), Bins.fit(a_set(copied), 7)
    assert torch.equal(ours.low, theirs.low)
    assert torch.equal(ours.width, theirs.width)
    assert not torch.equal(ours.low, Bins.fit(a_set(values), 7).low)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_bins_of_data_on_a_gpu_are_the_same() -> None:
    features, weights = shuffled(50).unsqueeze(1), torch.rand(50) + 1
    ours = Bins.fit(a_set(features.cuda(), weights=weights.cuda()), 4)
    assert torch.equal(ours.low, Bins.fit(a_set(features, weights=weights), 4).low)


def test_bins_are_shared_and_do_not_keep_the_data_in_memory() -> None:
    data = a_set(shuffled(50).unsqueeze(1))
    assert Bins.fit(data, 4) is Bins.fit(data, 4)
    assert len(Bins.fit(data, 5)) == 5
    seen = weakref.ref(data)
    del data
    gc.collect()
    assert seen() is None


def test_features_of_few_values_have_none() -> None:
    columns = [
        shuffled(100) % 2,  # an indicator
        shuffled(100) % 5,
        shuffled(100) % 6,
        torch.where(shuffled(100) < 2, shuffled(100), 0.0),  # nearly constant
        torch.where(shuffled(100) < 40, shuffled(100), 0.0),
    ]
    bins = Bins.fit(a_set(torch.stack(columns, 1)), 8)
    assert set(bins.feature.tolist()) == {2, 4}
    assert (bins.feature == 2).sum() == 5  # between six values
    assert (bins.feature == 4).sum() < 8  # several quantiles are the same value
    assert (bins.width > 0).all()
    assert len(Bins.fit(a_set(columns[0].unsqueeze(1)), 8)) == 0


@pytest.mark.parametrize("weights", [None, torch.ones(1000)])
def test_bins_of_many_examples_use_a_sample(
    weights: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pseudograd.fleet.mlp.bins._LOOKED_AT", 150)
    values = torch.arange(1000.0).unsqueeze(1)
    bins = Bins.fit(a_set(values, weights=weights), 4)
    assert bins.low.tolist() == pytest.approx([0, 250, 500, 750], abs=10)


# --- what they encode ------------------------------------------------------------------------


def test_features_inside_and_outside_of_the_bins() -> None:
    bins = Bins(torch.tensor([1, 1]), torch.tensor([0.0, 2.0]), torch.tensor([2.0, 8.0]))
    features = torch.tensor([[9.0, x] for x in (-5, 0, 1, 2, 4, 10, 11)])
    assert bins.encode(features).tolist() == [
        [0, 0], [0, 0], [0.5, 0], [1, 0], [1, 0.25], [1, 1], [1, 1],
    ]  # fmt: skip
    stacked = bins.encode(features.expand(3, -1, -1))  # the shape that a stack of networks gathers
    assert torch.equal(stacked, bins.encode(features).expand(3, -1, -1))
    assert features[0].tolist() == [9.0, -5.0]  # not changed in place


# --- networks --------------------------------------------------------------------------------


def rings() -> Dataset:
    """Two classes that no plane tells apart: near 0 and far from it; a third column is noise."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(240, 3, generator=generator)
    labels = (features[:, :2].square().sum(1) > 1.4).long()
    return Dataset("rings", features.clamp(-3, 3), labels, 200, (-3.0, 3.0))


TRIAL = a_trial(
    "rings", (), 0.5, 0.05, Split(bagged=True), optimizer="adam", weight_decay=0.1,
    schedule="cosine", batch_size=32, max_epochs=30, bins=6,
)  # fmt: skip


def trained(data: Dataset, trial: Trial) -> Outcome:
    (outcome,) = Fleet(data, keep_parameters=True).run([trial])
    return outcome


def test_bins_are_features_like_any_others() -> None:
    data = rings()
    scaling = data.scaling((-1.0, 1.0))
    encoded = torch.cat(
        (data.features * scaling[0] + scaling[1], Bins.fit(data, 6).encode(data.features)), 1
    )
    ours = trained(data, TRIAL)
    theirs = trained(
        Dataset("rings", encoded, data.labels, 200, (-1.0, 1.0)), replace(TRIAL, bins=0)
    )
    assert replace(ours, trial=theirs.trial) == theirs
    assert ours.error < 0.3 < trained(data, replace(TRIAL, bins=0)).error


def test_encoding_ahead_and_batch_by_batch_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = replace(TRIAL, hidden_layer_sizes=(8,), max_epochs=5)
    ahead = trained(rings(), trial)
    monkeypatch.setattr("pseudograd.fleet.mlp.stack._MOST_ENCODED", 0)
    now = trained(rings(), trial)
    assert now == ahead
    assert now.parameters is not None
    assert ahead.parameters is not None
    for ours, theirs in zip(now.parameters, ahead.parameters, strict=True):
        assert all(map(torch.equal, ours, theirs))


def test_a_network_keeps_its_bins(tmp_path: Path) -> None:
    data = rings()
    outcome = trained(data, TRIAL)
    network = Network.of(outcome, data)
    assert network.bins is not None
    assert len(network.parameters[0][0]) == 3 + len(network.bins) == 3 + 18
    probabilities = network.probabilities(data.features)
    network.save(tmp_path / "network.safetensors")
    again = Network.load(tmp_path / "network.safetensors")
    assert torch.equal(again.probabilities(data.features), probabilities)
    with pytest.raises(ValueError, match=r"features must have the shape \(examples, 3\)"):
        again.logits(torch.zeros(1, 21))


def test_a_network_predicts_as_the_fleet_judged_it() -> None:
    data = rings()
    outcome = trained(data, replace(TRIAL, split=Split(retrain=True)))
    test = Network.of(outcome, data).probabilities(data.features[200:])
    wrong = test.argmax(1) != data.labels[200:]
    assert tuple(wrong.nonzero()[:, 0].tolist()) == outcome.wrong


def test_bins_of_indicators_alone_are_none() -> None:
    data = a_set(torch.stack((shuffled(50) % 2, shuffled(50) % 3), 1))
    trial = replace(TRIAL, data="any", max_epochs=2)
    assert Network.of(trained(data, trial), data).bins is None
