"""Training examples for the page: an image, or the first columns of a row."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pseudograd.data import Dataset, Encoder

_COLUMNS = 8  # shown of a table's row


def shown(data: Dataset, encoder: Encoder, at: int) -> dict[str, Any]:
    """Return an example as plain values for JSON, decoded to the user's values.

    Returns:
        index; row_number in the file, if there is one; label, the class index; and pixels (0 to
        255), or the first entries of its row by column and the total number of columns.

    """
    features = data.features[at]
    found: dict[str, Any] = {
        "index": at,
        "row_number": None if data.rows is None else int(data.rows[at]),
        "label": int(data.labels[at]),
        "pixels": None,
        "row": None,
        "columns": None,
    }
    if encoder.pixels is None:
        row, kinds = encoder.decode(features.numpy()), encoder.kinds()
        found["row"] = {
            name: _rounded(entry) if kinds[name] == "numbers" else entry
            for name, entry in list(row.items())[:_COLUMNS]
        }
        found["columns"] = len(row)
    else:
        low, high = encoder.value_range
        shades = (features.double() - low) * (255 / (high - low))
        found["pixels"] = shades.round().int().tolist()
    return found


def distinct(data: Dataset, order: Iterable[int]) -> Iterator[int]:
    """Yield indices of examples, without duplicates (equal features and label)."""
    seen = set()
    for at in order:
        key = int(data.labels[at]), data.features[at].numpy().tobytes()
        if key not in seen:
            seen.add(key)
            yield at


def _rounded(entry: str) -> str:
    """Return a number with four significant digits; integers are unchanged.

    >>> _rounded("0.123456"), _rounded("2019"), _rounded("31.9999"), _rounded("missing")
    ('0.1235', '2019', '32', 'missing')
    """
    try:
        value = float(entry)
    except ValueError:
        return entry
    if not math.isfinite(value) or value.is_integer():
        return entry
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
