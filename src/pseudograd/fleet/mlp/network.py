"""Trained networks and ensembles: prediction, and saving without pickle."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pseudograd.data import Dataset
from pseudograd.extras import needed_for
from pseudograd.files import write_whole
from pseudograd.fleet.mlp.bins import Bins
from pseudograd.fleet.mlp.stack import ACTIVATE
from pseudograd.fleet.recipe import MLPRecipe
from pseudograd.fleet.trial import Outcome, Trial, recipe_of

_AT_ONCE = 1 << 14  # examples per matrix product, to bound memory


@dataclass(frozen=True, eq=False)
class Network:
    """The weights of a network, and the scaling of its inputs.

    Attributes:
        parameters: The weights (in, out) and biases (out) of each layer.
        activation: The activation of the hidden layers.
        factor: Raw features are multiplied by this ...
        offset: ... and this is added.
        bins: The bins of numeric features, if the network has any.

    Example:
        >>> layer = (torch.eye(2), torch.zeros(2))
        >>> network = Network((layer, layer), "relu", factor=1.0, offset=0.0)
        >>> network.probabilities(torch.tensor([[0, 0], [9, -9]])).round(decimals=3)
        tensor([[0.5000, 0.5000],
                [1.0000, 0.0000]], dtype=torch.float64)

    """

    parameters: tuple[tuple[Tensor, Tensor], ...]
    activation: str
    factor: float
    offset: float
    bins: Bins | None = None

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATE:
            raise ValueError(
                f"activation must be one of {tuple(ACTIVATE)}, not {self.activation!r}"
            )

    @classmethod
    def of(cls, outcome: Outcome, data: Dataset) -> Network:
        """Return the network of an outcome from a fleet with ``keep_parameters``."""
        if outcome.parameters is None:
            raise ValueError("outcome must carry parameters: run a Fleet with keep_parameters=True")
        return cls.of_tensors(outcome.trial, by_name(outcome.parameters), data)

    @classmethod
    def of_tensors(cls, trial: Trial, tensors: Mapping[str, Tensor], data: Dataset) -> Network:
        """Return the network of a trial from its parameters `by_name`."""
        recipe = recipe_of(trial, MLPRecipe)
        bins = Bins.fit(data, recipe.bins) if recipe.bins else None
        scaling = data.scaling(recipe.feature_range)
        return cls(_layers(tensors), recipe.activation, *scaling, bins or None)

    @property
    def is_finite(self) -> bool:
        """Whether all weights are finite; False if the network diverged at once."""
        return all(bool(tensor.isfinite().all()) for layer in self.parameters for tensor in layer)

    def logits(self, features: Tensor) -> Tensor:
        """Return the float64 logits (examples, classes) of raw features (examples, features)."""
        inputs = len(self.parameters[0][0]) - (len(self.bins) if self.bins else 0)
        if features.dim() != 2 or features.shape[1] != inputs:
            raise ValueError(
                f"features must have the shape (examples, {inputs}), not {tuple(features.shape)}"
            )
        return torch.cat([self._logits(rows) for rows in features.split(_AT_ONCE)])

    def _logits(self, features: Tensor) -> Tensor:
        x = self.factor * features.double() + self.offset
        if self.bins:
            x = torch.cat((x, self.bins.encode(features).double()), 1)
        for at, (weight, bias) in enumerate(self.parameters):
            if at:
                x = ACTIVATE[self.activation](x)
            x = x @ weight.double() + bias.double()
        return x

    def probabilities(self, features: Tensor) -> Tensor:
        """Return the probability of each class for raw features (examples, features)."""
        return self.logits(features).softmax(-1)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the network to a safetensors file, atomically."""
        Ensemble((self,), (1.0,)).save(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Network:
        """Return the network that `save` wrote."""
        return Ensemble.load(path).networks[0]


@dataclass(frozen=True, eq=False)
class Ensemble:
    """Networks whose probabilities are averaged, and then calibrated by one temperature.

    Attributes:
        networks: The networks.
        weights: The weight of each network; they sum to 1.
        temperature: The averaged probabilities p become p^(1 / temperature), normalized. The
            predicted label stays the same.

    Example:
        >>> layer = (torch.tensor([[1.0, 0.0]]), torch.zeros(2))
        >>> network = Network((layer,), "relu", factor=1.0, offset=0.0)
        >>> x = torch.tensor([[2.0]])
        >>> Ensemble((network,), (1.0,)).probabilities(x).round(decimals=3)
        tensor([[0.8810, 0.1190]], dtype=torch.float64)
        >>> Ensemble((network,), (1.0,), temperature=2.0).probabilities(x).round(decimals=3)
        tensor([[0.7310, 0.2690]], dtype=torch.float64)

    """

    networks: tuple[Network, ...]
    weights: tuple[float, ...]
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not self.networks or len(self.networks) != len(self.weights):
            raise ValueError(
                f"weights must be one for each network, and at least one: there are "
                f"{len(self.weights)} for {len(self.networks)} networks"
            )
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature must be a number above 0, not {self.temperature}")

    def probabilities(self, features: Tensor) -> Tensor:
        """Return the probability of each class for raw features (examples, features)."""
        averaged: Tensor = sum(
            weight * network.probabilities(features)
            for network, weight in zip(self.networks, self.weights, strict=True)
        )  # type: ignore[assignment]
        return tempered(averaged, self.temperature)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the ensemble to a safetensors file, atomically."""
        with needed_for("saving a model"):
            from safetensors.torch import save

        tensors, about = {}, []
        for number, network in enumerate(self.networks):
            for name, tensor in by_name(network.parameters).items():
                tensors[f"{number}.{name}"] = tensor.contiguous()
            if network.bins:
                for name, tensor in vars(network.bins).items():
                    tensors[f"{number}.bins.{name}"] = tensor.clone()
            about.append(
                {
                    "activation": network.activation,
                    "factor": network.factor,
                    "offset": network.offset,
                }
            )
        ensemble = {"networks": about, "weights": self.weights, "temperature": self.temperature}
        # A single entry, since safetensors does not fix the order of several.
        write_whole(path, save(tensors, {"ensemble": json.dumps(ensemble)}))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Ensemble:
        """Return the ensemble that `save` wrote."""
        with needed_for("loading a model"):
            from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt") as file:
                about = json.loads(file.metadata()["ensemble"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            networks = []
            for number, one in enumerate(about["networks"]):
                start = f"{number}."
                own = {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}
                held = [own.pop(f"bins.{name}", None) for name in ("feature", "low", "width")]
                bins = None if held[0] is None else Bins(*held)
                networks.append(Network(_layers(own), **one, bins=bins))
            return cls(tuple(networks), tuple(about["weights"]), about["temperature"])
        except (SafetensorError, KeyError, TypeError, ValueError, AttributeError) as problem:
            raise ValueError(f"{path} is not a saved model ({problem})") from problem


def by_name(parameters: tuple[tuple[Tensor, Tensor], ...]) -> dict[str, Tensor]:
    """Return the parameters of an outcome as tensors by name: "0.weight", "0.bias", ..."""
    kinds = ("weight", "bias")
    return {
        f"{at}.{kind}": tensor
        for at, layer in enumerate(parameters)
        for kind, tensor in zip(kinds, layer, strict=True)
    }


def _layers(tensors: Mapping[str, Tensor]) -> tuple[tuple[Tensor, Tensor], ...]:
    """Return the parameters that `by_name` named."""
    count = len(tensors) // 2
    return tuple((tensors[f"{at}.weight"], tensors[f"{at}.bias"]) for at in range(count))


def tempered(probabilities: Tensor, temperature: float) -> Tensor:
    """Return p^(1 / temperature), normalized."""
    if temperature == 1:
        return probabilities
    return (probabilities.log() / temperature).softmax(-1)
