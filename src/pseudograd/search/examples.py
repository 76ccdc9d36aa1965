"""Training examples for the page: those with suspicious labels, and the hardest ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from pseudograd.data import Dataset, Encoder
from pseudograd.data.values import as_text
from pseudograd.files import write_whole
from pseudograd.fleet import Network, Ramp, k_at
from pseudograd.fleet.ramp import plain_k
from pseudograd.rules import paper
from pseudograd.search.measures import Floats

if TYPE_CHECKING:
    from pandas import DataFrame

# Bin edges of the difficulty 1 - p_y.
EDGES = (0.0, 1e-4, 1e-3, 1e-2, 0.1, 0.5, 1.0)
_SUSPECTS, _HARDEST = 50, 24  # shown


def suspects(
    labels: NDArray[np.integer[Any]],
    model: Floats,
    plain: Floats,
    votes: NDArray[np.integer[Any]],
) -> DataFrame:
    """Return the training rows whose label may be wrong, the most suspicious first.

    The ranking was chosen by flipping labels of real tables (`benchmarks/suspects.py`): the plain
    probability of the given label, averaged over the model and the model of k = 1, finds more of
    them than margins, or than the class-adjusted probabilities of confident learning.

    Args:
        labels: The class indices of the training rows.
        model: Their out-of-fold probabilities.
        plain: Those of the model of k = 1, which are averaged with the model's.
        votes: The class that each network predicts out of fold, rows × networks.

    Returns:
        The predicted class, the out-of-fold probability of the given label ("self_confidence"), and
        the share of networks that predict the same class ("agreement"), by index of the row.

    Example:
        >>> labels, votes = np.array([0, 1, 1]), np.array([[0, 0], [0, 1], [0, 0]])
        >>> model = np.array([[0.9, 0.1], [0.6, 0.4], [0.95, 0.05]])
        >>> print(suspects(labels, model, model, votes))
           predicted  self_confidence  agreement
        2          0             0.05        1.0
        1          0             0.40        0.5

    """
    import pandas as pd

    probabilities = (model.astype(np.float64) + plain) / 2
    predicted = probabilities.argmax(1)
    found = pd.DataFrame(
        {
            "predicted": predicted,
            "self_confidence": probabilities[np.arange(len(labels)), labels],
            "agreement": (votes == predicted[:, None]).mean(1),
        }
    )
    return found[predicted != labels].sort_values("self_confidence", kind="stable")


def write_suspects(path: Path, found: DataFrame, data: Dataset, encoder: Encoder) -> None:
    """Write all suspects as CSV: row, label, predicted, self_confidence, agreement.

    Rows are counted from 1, in the file or, without a file, in the training set.
    """
    at, names = found.index.to_numpy(), np.array(encoder.labels, object)
    table = found.assign(
        row=at + 1 if data.rows is None else data.rows.numpy()[at],
        label=names[data.labels.numpy()[at]],
        predicted=names[found["predicted"]],
        self_confidence=found["self_confidence"].map("{:.4f}".format),
        agreement=found["agreement"].map("{:.3f}".format),
    )
    columns = ["row", "label", "predicted", "self_confidence", "agreement"]
    write_whole(path, table.to_csv(index=False, columns=columns, lineterminator="\n"))


def shown_suspects(found: DataFrame, data: Dataset, encoder: Encoder) -> dict[str, Any]:
    """Return the first suspects without duplicates, as the page shows them."""
    first = itertools.islice(distinct(data, found.index.tolist()), _SUSPECTS)
    return {
        "count": len(found),
        "of": data.train_size,
        "first": [
            {
                **shown(data, encoder, row),
                "predicted": int(found.at[row, "predicted"]),
                "self_confidence": round(float(found.at[row, "self_confidence"]), 4),
                "agreement": round(float(found.at[row, "agreement"]), 3),
            }
            for row in first
        ],
    }


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
        for at in itertools.islice(distinct(data, order), _HARDEST)
    ]
    return {"networks": told, "edges": list(EDGES), "hardest": hardest}


def shown(data: Dataset, encoder: Encoder, at: int) -> dict[str, Any]:
    """Return a training example as plain values for JSON, as it is in the user's file.

    Returns:
        index; row_number in the file, if there is one; label, the class index; and pixels (0 to
        255), or the first entries of its row by column and the total number of columns.

    """
    number = None if data.rows is None else int(data.rows[at])
    found: dict[str, Any] = {
        "index": at,
        "row_number": number,
        "label": int(data.labels[at]),
        "pixels": None,
        "row": None,
        "columns": None,
    }
    if encoder.pixels is not None:
        low, high = encoder.value_range
        shades = (data.features[at].double() - low) * (255 / (high - low))
        found["pixels"] = shades.round().int().tolist()
    elif data.frame is not None and number is not None:
        found["row"] = {name: _entry(column[number - 1]) for name, column in data.frame.items()}
        found["columns"] = len(encoder.columns)
    return found


def distinct(data: Dataset, order: Iterable[int]) -> Iterator[int]:
    """Yield indices of examples, without duplicates (equal features and label)."""
    seen = set()
    for at in order:
        key = int(data.labels[at]), data.features[at].numpy().tobytes()
        if key not in seen:
            seen.add(key)
            yield at


def _entry(value: Any) -> str:
    import pandas as pd

    return "missing" if pd.isna(value) else as_text(value).removesuffix(" 00:00:00")
