"""Piecewise-linear encoding of numeric features (Gorishniy et al., NeurIPS 2022).

A feature x becomes x and, for each of its bins [a, b], the fraction of the bin below x: 0 if x < a,
1 if x > b, and (x - a) / (b - a) between. The bin edges are quantiles of the training set, so the
network can bend its response where the examples are.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from pseudograd.data import Dataset

_FEWEST_VALUES = 6  # features with fewer distinct values, such as indicators, get no bins
_LOOKED_AT = 50_000  # at most this many training examples determine the quantiles


@dataclass(frozen=True, eq=False)
class Bins:
    """The bins of all features, one after the other.

    Attributes:
        feature: The feature of each bin.
        low: Its lower end.
        width: Its width.

    Example:
        >>> bins = Bins(torch.tensor([0, 0]), torch.tensor([0.0, 1.0]), torch.tensor([1.0, 4.0]))
        >>> bins.encode(torch.tensor([[0.5], [3.0]]))
        tensor([[0.5000, 0.0000],
                [1.0000, 0.5000]])

    """

    feature: Tensor
    low: Tensor
    width: Tensor

    @classmethod
    def fit(cls, data: Dataset, count: int) -> Bins:
        """Return up to ``count`` bins per feature, with equally many training examples in each."""
        fitted = _fitted.setdefault(data, {})
        if count not in fitted:
            fitted[count] = cls._fit(data, count)
        return fitted[count]

    @classmethod
    def _fit(cls, data: Dataset, count: int) -> Bins:
        step = -(-data.train_size // _LOOKED_AT)
        features = data.features[: data.train_size : step].cpu().double()
        weights = torch.ones(data.train_size) if data.weights is None else data.weights
        weights = weights[: data.train_size : step].cpu().double()
        shares = torch.linspace(0, 1, count + 1, dtype=torch.float64)
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for at, column in enumerate(features.T):
            edges = quantiles(column, weights, shares).unique()
            if len(edges) > 2 and len(column.unique()) >= _FEWEST_VALUES:
                low = edges[:-1]
                found.append((torch.full((len(low),), at), low, edges[1:] - low))
        if not found:
            return cls(torch.zeros(0, dtype=torch.int64), torch.zeros(0), torch.zeros(0))
        feature, low, width = map(torch.cat, zip(*found, strict=True))
        return cls(feature, low.float(), width.float())

    def __len__(self) -> int:
        return len(self.feature)

    def to(self, device: torch.device) -> Bins:
        """Return the bins on a device."""
        return Bins(self.feature.to(device), self.low.to(device), self.width.to(device))

    def encode(self, features: Tensor) -> Tensor:
        """Return the encoding (..., bins) of raw features (..., features)."""
        passed = features[..., self.feature].to(self.low.dtype).sub_(self.low)
        return passed.div_(self.width).clamp_(0, 1)


# All networks of a data set share its bins; weak keys let the data set be freed.
_fitted: weakref.WeakKeyDictionary[Dataset, dict[int, Bins]] = weakref.WeakKeyDictionary()


def quantiles(values: Tensor, weights: Tensor, shares: Tensor) -> Tensor:
    """Return weighted quantiles, each one of the values; a weight of 2 acts like a second copy."""
    ordered, order = values.sort()
    passed = weights[order].cumsum(0)
    at = torch.searchsorted(passed, shares * passed[-1] * (1 - 1e-12))
    return ordered[at.clamp(max=len(ordered) - 1)]
