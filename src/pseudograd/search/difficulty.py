"""The distribution of the pull (gradient magnitude) over training examples by difficulty."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch

from pseudograd.data import Dataset, Encoder
from pseudograd.fleet import Network, Ramp, k_at
from pseudograd.fleet.ramp import plain_k
from pseudograd.rules import paper
from pseudograd.search.shown import distinct, shown

# Bin edges of the difficulty 1 - p_y.
EDGES = (0.0, 1e-4, 1e-3, 1e-2, 0.1, 0.5, 1.0)
_SHOWN = 24


def difficulty(
    networks: Mapping[str, tuple[float | Ramp, Network]], data: Dataset, encoder: Encoder
) -> dict[str, Any]:
    """Return how the pull of the training examples is distributed over their difficulty.

    The difficulty of an example is 1 - p_y, where p_y is the probability of the true class. Its
    pull is |f_y| = (1 - p_y)^k (Eq. 5); for a ramp, k is the final value.

    Args:
        networks: k and a network trained with it, by name. One must be named "plain"; the first
            determines which examples are hardest.
        data: The data set they were trained on.
        encoder: The encoder of the data set.

    Returns:
        Plain values for JSON: the bin edges of the difficulty, the number of examples and the share
        of the pull in each bin for each network, and the hardest distinct examples.

    Example:
        >>> from pseudograd.data import open_data
        >>> data, encoder = open_data("digits")
        >>> blank = Network(((torch.zeros(64, 10), torch.zeros(10)),), "relu", 1.0, 0.0)
        >>> found = difficulty({"plain": (1.0, blank)}, data, encoder)
        >>> [bin["count"] for bin in found["networks"]["plain"]["bins"]]
        [0, 0, 0, 0, 0, 1437]

    """
    features, labels = data.features[: data.train_size], data.labels[: data.train_size]
    edges = torch.tensor(EDGES, dtype=torch.float64)
    told: dict[str, Any] = {}
    lacking, predicted = {}, {}
    for name, (k, network) in networks.items():
        logits = network.logits(features)
        _, margin = paper.top_and_margin(logits, labels)
        # NaN, from a diverged network, counts as the maximum difficulty.
        lack, pull = (
            paper.strength(margin, power).squeeze(-1).nan_to_num(1.0) for power in (1.0, k_at(k, 1))
        )
        place = torch.bucketize(lack, edges[1:-1], right=True)
        counts = place.bincount(minlength=len(EDGES) - 1)
        masses = place.bincount(pull / pull.sum().clamp(min=1e-300), minlength=len(EDGES) - 1)
        bins = [
            {"count": count, "mass": round(mass, 6)}
            for count, mass in zip(counts.tolist(), masses.tolist(), strict=True)
        ]
        told[name] = {"k": plain_k(k), "bins": bins}
        lacking[name], predicted[name] = lack, logits.argmax(-1)
    first = next(iter(networks))
    order = lacking[first].argsort(descending=True, stable=True).tolist()
    hardest = [
        {
            **shown(data, encoder, at),
            "predicted": int(predicted[first][at]),
            "lacking": round(float(lacking[first][at]), 6),
            "lacking_plain": round(float(lacking["plain"][at]), 6),
        }
        for at in itertools.islice(distinct(data, order), _SHOWN)
    ]
    return {"networks": told, "edges": list(EDGES), "hardest": hardest}
