"""A trained network: predictions, saving and loading."""

from pathlib import Path

import pytest
import torch

from pseudograd.data import digits
from pseudograd.fleet import Fleet, Network, Outcome, Split, Trial
from trials import a_trial, replace

TRIAL = a_trial(
    "digits", (12, 7), 0.5, 0.2, activation="tanh", max_epochs=3, split=Split(retrain=True)
)


def trained(trial: Trial) -> Outcome:
    (outcome,) = Fleet(digits(), precision="float64", keep_parameters=True).run([trial])
    return outcome


@pytest.mark.parametrize("activation", ["relu", "tanh", "sigmoid"])
def test_predictions_equal_those_of_the_fleet(activation: str, tmp_path: Path) -> None:
    outcome, data = (
        trained(replace(TRIAL, activation=activation, feature_range=(-0.5, 2))),
        digits(),
    )
    network = Network.of(outcome, data)
    test = data.features[data.train_size :]
    probabilities = network.probabilities(test)
    wrong = probabilities.argmax(1) != data.labels[data.train_size :]
    assert tuple(wrong.nonzero()[:, 0].tolist()) == outcome.wrong
    right = probabilities[torch.arange(len(test)), data.labels[data.train_size :]]
    assert -right.log().mean().item() == pytest.approx(outcome.cross_entropy)
    network.save(tmp_path / "network.safetensors")
    again = Network.load(tmp_path / "network.safetensors")
    assert torch.equal(again.probabilities(test), probabilities)
    assert [path.name for path in tmp_path.iterdir()] == ["network.safetensors"]


def test_large_batches_are_predicted_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network.of(trained(TRIAL), digits())
    whole = network.logits(digits().features)
    monkeypatch.setattr("pseudograd.fleet.mlp.network._AT_ONCE", 100)
    torch.testing.assert_close(network.logits(digits().features), whole)
    assert network.logits(digits().features[:0]).shape == (0, 10)


def test_invalid_networks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="outcome must carry parameters"):
        Network.of(replace(trained(TRIAL), parameters=None), digits())
    with pytest.raises(ValueError, match=r"features must have the shape \(examples, 64\)"):
        Network.of(trained(TRIAL), digits()).logits(torch.zeros(3, 63))
    with pytest.raises(ValueError, match="activation must be one of"):
        Network((), "gelu", 1.0, 0.0)
    path = tmp_path / "other.safetensors"
    path.write_bytes(b"not a network")
    with pytest.raises(ValueError, match="is not a saved model"):
        Network.load(path)
