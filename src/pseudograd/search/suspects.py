"""Labels that look wrong: training rows whose label has a low out-of-fold probability.

The ranking was chosen by flipping labels of real tables (`benchmarks/suspects.py`): the plain
probability of the given label, averaged over the model and the model of k = 1, finds more of them
than margins, or than the class-adjusted probabilities of confident learning.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pseudograd.files import write_whole
from pseudograd.search.measures import Floats
from pseudograd.search.shown import distinct, shown

if TYPE_CHECKING:
    from pandas import DataFrame

    from pseudograd.data import Dataset, Encoder

_SHOWN = 50


def suspects(
    labels: NDArray[np.integer[Any]],
    model: Floats,
    plain: Floats,
    votes: NDArray[np.integer[Any]],
) -> DataFrame:
    """Return the training rows whose label may be wrong, the most suspicious first.

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
    first = itertools.islice(distinct(data, found.index.tolist()), _SHOWN)
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
