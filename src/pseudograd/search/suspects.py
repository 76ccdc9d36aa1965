"""Labels that look wrong: training rows whose label has a low out-of-fold probability.

The ranking was chosen by flipping labels of real tables (`benchmarks/suspects.py`): the plain
probability of the given label, averaged over the model and the model of k = 1, finds more of them
than margins, or than the class-adjusted probabilities of confident learning.
"""

from __future__ import annotations

import csv
import io
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pseudograd.files import write_whole
from pseudograd.search.measures import Floats
from pseudograd.search.shown import distinct, shown

if TYPE_CHECKING:
    from pseudograd.data import Dataset, Encoder

_SHOWN = 50


@dataclass(frozen=True, eq=False)
class Suspects:
    """Training rows whose label differs from the out-of-fold prediction, the most suspicious first.

    Attributes:
        rows: Their indices in the training set.
        predicted: The class predicted for each.
        self_confidence: The out-of-fold probability of the given label.
        agreement: The share of networks that predict the same class.
        of: The number of training rows.

    """

    rows: NDArray[np.int64]
    predicted: NDArray[np.int64]
    self_confidence: NDArray[np.float64]
    agreement: NDArray[np.float64]
    of: int

    def __len__(self) -> int:
        return len(self.rows)


def suspects(
    labels: NDArray[np.integer[Any]],
    model: Floats,
    plain: Floats,
    votes: NDArray[np.integer[Any]],
) -> Suspects:
    """Return the rows whose label may be wrong, ranked.

    Args:
        labels: The class indices of the training rows.
        model: Their out-of-fold probabilities.
        plain: Those of the model of k = 1, which are averaged with the model's.
        votes: The class that each network predicts out of fold, rows × networks.

    Example:
        >>> labels, votes = np.array([0, 1, 1]), np.array([[0, 0], [0, 1], [0, 0]])
        >>> model = np.array([[0.9, 0.1], [0.6, 0.4], [0.95, 0.05]])
        >>> found = suspects(labels, model, model, votes)
        >>> found.rows.tolist(), found.self_confidence.tolist(), found.agreement.tolist()
        ([2, 1], [0.05, 0.4], [1.0, 0.5])

    """
    probabilities = (model.astype(np.float64) + plain) / 2
    confidence = probabilities[np.arange(len(labels)), labels]
    predicted = probabilities.argmax(1)
    agreement = (votes == predicted[:, None]).mean(1)
    rows = np.flatnonzero(predicted != labels)
    rows = rows[np.argsort(confidence[rows], kind="stable")]
    return Suspects(rows, predicted[rows], confidence[rows], agreement[rows], len(labels))


def write_suspects(path: Path, found: Suspects, data: Dataset, encoder: Encoder) -> None:
    """Write all suspects as CSV: row, label, predicted, self_confidence, agreement.

    Rows are counted from 1, in the file or, without a file, in the training set.
    """
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["row", "label", "predicted", "self_confidence", "agreement"])
    for at, row in enumerate(found.rows.tolist()):
        table.writerow(
            [
                row + 1 if data.rows is None else int(data.rows[row]),
                encoder.labels[int(data.labels[row])],
                encoder.labels[int(found.predicted[at])],
                f"{found.self_confidence[at]:.4f}",
                f"{found.agreement[at]:.3f}",
            ]
        )
    write_whole(path, text.getvalue())


def shown_suspects(found: Suspects, data: Dataset, encoder: Encoder) -> dict[str, Any]:
    """Return the first suspects without duplicates, as the page shows them."""
    place = {row: at for at, row in enumerate(found.rows.tolist())}
    return {
        "count": len(found),
        "of": found.of,
        "first": [
            {
                **shown(data, encoder, row),
                "predicted": int(found.predicted[place[row]]),
                "self_confidence": round(float(found.self_confidence[place[row]]), 4),
                "agreement": round(float(found.agreement[place[row]]), 3),
            }
            for row in itertools.islice(distinct(data, place), _SHOWN)
        ],
    }
