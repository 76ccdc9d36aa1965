"""Training examples for the page: an image, or the first columns of a row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from pseudograd.data.values import as_text

if TYPE_CHECKING:
    from pseudograd.data import Dataset, Encoder


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
