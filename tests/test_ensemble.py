"""Ensembles: their predictions, saving and loading, and how they are chosen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from pseudograd.data import Dataset
from pseudograd.fleet import Ensemble, Fleet, MLPRecipe, Network, Outcome, Trial, parts
from pseudograd.fleet.mlp.bins import Bins
from pseudograd.fleet.mlp.network import tempered
from pseudograd.search import Bagging, Cell
from pseudograd.search.ensemble import (
    METRICS,
    Candidates,
    candidates,
    mixture,
    score,
    select,
)
from pseudograd.search.measures import fit_temperature

pytestmark = pytest.mark.usefixtures("one_thread")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def a_network(seed: int, hidden: int = 4) -> Network:
    layers = tuple(
        (random(*shape, seed=seed + at) - 0.5, random(shape[1], seed=seed - at))
        for at, shape in enumerate(((3, hidden), (hidden, 3)))
    )
    return Network(layers, "tanh", 2.0, -1.0)


# --- predictions -----------------------------------------------------------------------------


def test_probabilities_are_averaged_and_then_tempered() -> None:
    one, other = a_network(1), a_network(2, hidden=7)
    x = random(20, 3)
    expected = 0.25 * one.probabilities(x) + 0.75 * other.probabilities(x)
    ensemble = Ensemble((one, other), (0.25, 0.75))
    torch.testing.assert_close(ensemble.probabilities(x), expected)
    cooled = Ensemble((one, other), (0.25, 0.75), temperature=0.5).probabilities(x)
    torch.testing.assert_close(cooled, expected**2 / (expected**2).sum(1, keepdim=True))


@pytest.mark.parametrize("temperature", [0.2, 0.9, 1.0, 5.0])
def test_a_temperature_changes_no_label(temperature: float) -> None:
    p = random(100, 4).square().softmax(1)
    p[0] = torch.tensor([0.0, 1.0, 0.0, 0.0])
    found = tempered(p, temperature)
    assert torch.equal(found.argmax(1), p.argmax(1))
    torch.testing.assert_close(found.sum(1), torch.ones(100))
    assert found[0].tolist() == [0.0, 1.0, 0.0, 0.0]
    sharper = found.amax(1) > p.amax(1)
    assert sharper[1:].all() if temperature < 1 else not sharper.any()


def test_an_ensemble_is_saved_and_loaded(tmp_path: Path) -> None:
    binned = Network(
        ((random(5, 3), random(3)),), "relu", 1.0, 0.0,
        Bins(torch.tensor([0, 2]), torch.tensor([0.1, 0.2]), torch.tensor([0.5, 0.7])),
    )  # fmt: skip
    ensemble = Ensemble((a_network(1), binned), (0.4, 0.6), temperature=1.7)
    path = tmp_path / "model.safetensors"
    ensemble.save(path)
    again = Ensemble.load(path)
    x = random(30, 3)
    assert torch.equal(again.probabilities(x), ensemble.probabilities(x))
    assert (again.weights, again.temperature) == ((0.4, 0.6), 1.7)
    assert [network.bins is None for network in again.networks] == [True, False]
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_damaged_file_is_refused_in_a_sentence(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "model.safetensors"
    Ensemble((a_network(1),), (1.0,)).save(path)
    whole = path.read_bytes()
    for content in (b"", whole[:-1], whole[:100], whole.replace(b"networks", b"netwerks")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"model\.safetensors is not a saved model \("):
            Ensemble.load(path)
    for about in (None, {"ensemble": "{}"}, {"ensemble": '{"networks": [3]}'}):
        save_file({"x": torch.zeros(1)}, path, about)
        with pytest.raises(ValueError, match=r"model\.safetensors is not a saved model \("):
            Ensemble.load(path)


def test_impossible_ensembles_are_refused() -> None:
    with pytest.raises(ValueError, match=r"one for each network, .* there are 2 for 1"):
        Ensemble((a_network(1),), (0.5, 0.5))
    with pytest.raises(ValueError, match="at least one: there are 0 for 0"):
        Ensemble((), ())
    for temperature in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="temperature must be a number above 0"):
            Ensemble((a_network(1),), (1.0,), temperature)


# --- the choice ------------------------------------------------------------------------------


def right_on(rows: Tensor, labels: Tensor, sure: float = 0.9, otherwise: float = 0.1) -> Tensor:
    """Return two classes' probabilities: the label has ``sure`` on ``rows``, else ``otherwise``."""
    own = torch.full((len(labels),), otherwise)
    own[rows] = sure
    return torch.stack((own, 1 - own), 1).gather(1, torch.stack((labels, 1 - labels), 1))


def test_the_best_network_stays_alone_if_others_hurt() -> None:
    labels = torch.arange(40) % 2
    good = right_on(torch.arange(36), labels, 0.95)
    bad = right_on(torch.arange(10), labels, 0.6, 0.01)
    for metric in METRICS:
        weights = select(torch.stack((bad, good, bad)), labels, metric)
        assert weights.tolist() == [0, 1, 0]


def test_complementary_networks_are_combined() -> None:
    labels = torch.arange(40) % 2
    first, second = (
        right_on(torch.arange(30), labels, 0.9, 0.45),
        right_on(torch.arange(10, 40), labels, 0.9, 0.45),
    )
    weights = select(torch.stack((first, second)), labels)
    assert weights.tolist() == pytest.approx([0.5, 0.5], abs=0.051)
    both = torch.einsum("c,cnk->nk", weights, torch.stack((first, second)))
    assert not (both.argmax(1) != labels).any()


def test_an_ensemble_has_three_pairs_at_most() -> None:
    labels = torch.zeros(50).long()
    each = [right_on(torch.arange(10 * at, 10 * at + 10), labels, 0.99, 0.3) for at in range(5)]
    weights = select(torch.stack(each), labels, "log-loss")
    assert (weights > 0).sum() == 3
    assert weights.sum() == pytest.approx(1)
    assert (weights * 20).tolist() == pytest.approx((weights * 20).round().tolist())


def test_each_metric_has_its_own_favourite() -> None:
    """Nine of ten examples are of class 0."""
    labels = (torch.arange(100) >= 90).long()
    always_0 = right_on(torch.arange(90), labels, 0.99, 0.01)
    fair = right_on(torch.arange(20, 100), labels, 0.99, 0.01)
    sure = right_on(torch.arange(10, 100), labels, 0.6, 0.01)
    modest = right_on(torch.arange(20, 100), labels, 0.6, 0.2)

    def favourite(metric: str, *several: Tensor) -> int:
        return int(select(torch.stack(several), labels, metric).argmax())

    assert favourite("error", always_0, fair) == 0
    assert favourite("balanced", always_0, fair) == 1
    assert favourite("error", sure, modest) == 0
    assert favourite("log-loss", sure, modest) == 1


def test_example_weights_equal_copies() -> None:
    labels, p = torch.arange(30) % 3, random(30, 3).softmax(1)
    weights = torch.ones(30)
    weights[:5] = 3
    copied = torch.cat((torch.arange(30), *[torch.arange(5)] * 2))
    for metric in METRICS:
        ours, theirs = score(p, labels, metric, weights), score(p[copied], labels[copied], metric)
        assert ours == pytest.approx(theirs)


@pytest.mark.parametrize("temperature", [0.4, 1.0, 3.0])
def test_a_known_temperature_is_found(temperature: float) -> None:
    """Networks are off by it; labels occur exactly as often as the true probabilities say."""
    p = random(200, 3).softmax(1) ** 2
    p = p / p.sum(1, keepdim=True)
    off = tempered(p, 1 / temperature).repeat_interleave(3, 0)
    labels = torch.arange(600) % 3
    found = fit_temperature(off.log().double().numpy(), labels.numpy(), p.flatten().numpy())
    assert found == pytest.approx(temperature, rel=0.08)  # it is shrunk towards 1
    assert (found - temperature) * (1 - found) > -1e-3


# --- candidates ------------------------------------------------------------------------------


def test_out_of_fold_predictions_are_of_networks_that_have_not_seen_the_example() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (43,), generator=generator)
    features = torch.randn(43, 2, generator=generator) + labels.unsqueeze(1)
    data = Dataset("blobs", features, labels, 38, (-3.0, 6.0))
    recipe = MLPRecipe("blobs", (4,), batch_size=16, max_epochs=3, stratified=True)
    protocol = Bagging(
        recipe, (1.0, 0.5), learning_rates=(0.1,), repetitions=10, most_extensions=0, seed=2
    )
    trials = protocol.wanted({})
    outcomes: dict[Trial, Outcome] = {
        outcome.trial: outcome for outcome in Fleet(data, keep_parameters=True).run(trials)
    }
    found = candidates(protocol, outcomes, data, lambda t: Network.of(outcomes[t], data))
    assert [cell.k for cell in found.cells] == [1.0, 0.5]
    assert [len(networks) for networks in found.networks] == [10, 10]
    assert found.out_of_fold.shape == (2, len(found.rows), 3)
    assert found.votes.shape == (len(found.rows), 4)  # two splits into folds for each k
    assert set(range(35)) <= set(range(len(found.rows)))  # each split leaves out up to three
    row = int(found.rows[7])
    unseen = [
        Network.of(outcomes[trial], data).probabilities(data.features[row : row + 1])
        for trial in protocol.trials_of(found.cells[1])
        if row not in parts(data, trial.split, True).train
    ]
    assert 1 <= len(unseen) <= 2
    expected = torch.cat(unseen).mean(0).float()
    torch.testing.assert_close(found.out_of_fold[1, 7], expected)

    ensemble = found.ensemble(torch.tensor([0.25, 0.75]), temperature=2.0)
    assert ensemble.weights == pytest.approx((0.025,) * 10 + (0.075,) * 10)
    assert ensemble.temperature == 2.0
    alone = found.ensemble(torch.tensor([0.0, 1.0]))
    assert alone.networks == found.networks[1]
    torch.testing.assert_close(
        found.combined(torch.tensor([0.25, 0.75])),
        0.25 * found.out_of_fold[0] + 0.75 * found.out_of_fold[1],
    )
    pairs = mixture(found.cells, torch.tensor([0.25, 0.75]))
    assert [(cell.k, weight) for cell, weight in pairs] == [(0.5, 0.75), (1.0, 0.25)]


def test_networks_that_diverged_are_left_out() -> None:
    lost = Network(((torch.full((3, 3), torch.nan), torch.zeros(3)),), "relu", 1.0, 0.0)
    networks = (a_network(1), lost, a_network(2))
    nothing = torch.zeros(0)
    found = Candidates((Cell(1.0, 0.1, (0.1,)),), (networks,), nothing, nothing, nothing)
    ensemble = found.ensemble(torch.tensor([1.0]))
    assert ensemble.networks == (networks[0], networks[2])
    assert ensemble.weights == (0.5, 0.5)


def test_examples_that_all_networks_saw_keep_their_label() -> None:
    found = Candidates(
        (Cell(1.0, 0.1, (0.0,)),),
        ((),),
        torch.tensor([0, 2]),
        torch.tensor([[[0.9, 0.1], [0.3, 0.7]]]),
        torch.tensor([[0], [1]], dtype=torch.int16),
    )
    labels = torch.tensor([0, 1, 0])
    expected = torch.tensor([[0.9, 0.1], [0.0, 1.0], [0.3, 0.7]])
    assert torch.equal(found.whole(torch.tensor([1.0]), labels), expected)
    assert found.all_votes(labels).tolist() == [[0], [1], [1]]
