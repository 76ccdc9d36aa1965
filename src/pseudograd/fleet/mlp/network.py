"""A trained network on its own: it predicts, and is saved without pickle."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

import torch
from torch import Tensor

from pseudograd.data import Dataset
from pseudograd.extras import needed_for
from pseudograd.files import write_whole
from pseudograd.fleet.mlp.crew import mlp_recipe
from pseudograd.fleet.mlp.stack import ACTIVATE
from pseudograd.fleet.trial import Outcome

_AT_ONCE = 1 << 14  # examples per product, to bound the memory


@dataclass(frozen=True, eq=False)
class Network:
    """The weights of a network, and the scaling of its inputs.

    Attributes:
        parameters: The weights (in, out) and biases (out) of each layer.
        activation: The activation of the hidden layers.
        factor: Raw features are multiplied by this ...
        offset: ... and this is added.

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
        recipe = mlp_recipe(outcome.trial)
        return cls(outcome.parameters, recipe.activation, *data.scaling(recipe.feature_range))

    @property
    def is_finite(self) -> bool:
        """True if all weights are finite; those of a network that diverged at once are not."""
        return all(bool(tensor.isfinite().all()) for layer in self.parameters for tensor in layer)

    def logits(self, features: Tensor) -> Tensor:
        """Return the float64 logits (examples, classes) of raw features (examples, features)."""
        inputs = len(self.parameters[0][0])
        if features.dim() != 2 or features.shape[1] != inputs:
            raise ValueError(
                f"features must have the shape (examples, {inputs}), not {tuple(features.shape)}"
            )
        return torch.cat([self._logits(rows) for rows in features.split(_AT_ONCE)])

    def _logits(self, features: Tensor) -> Tensor:
        x = self.factor * features.double() + self.offset
        for at, (weight, bias) in enumerate(self.parameters):
            if at:
                x = ACTIVATE[self.activation](x)
            x = x @ weight.double() + bias.double()
        return x

    def probabilities(self, features: Tensor) -> Tensor:
        """Return the probability of each class for raw features (examples, features)."""
        return self.logits(features).softmax(-1)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the network to a safetensors file, whole or not at all."""
        with needed_for("saving a network"):
            from safetensors.torch import save

        tensors = {}
        for at, (weight, bias) in enumerate(self.parameters):
            tensors[f"{at}.weight"] = weight.contiguous()
            tensors[f"{at}.bias"] = bias.contiguous()
        about = {"activation": self.activation, "factor": self.factor, "offset": self.offset}
        write_whole(path, save(tensors, {"network": json.dumps(about)}))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Network:
        """Return the network that `save` wrote."""
        with needed_for("loading a network"):
            from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt") as file:
                about = json.loads(file.metadata()["network"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            layers = range(len(tensors) // 2)
            parameters = tuple((tensors[f"{at}.weight"], tensors[f"{at}.bias"]) for at in layers)
            return cls(parameters, **about)
        except (SafetensorError, KeyError, TypeError, ValueError) as problem:
            raise ValueError(f"{path} is not a saved network ({problem})") from problem
