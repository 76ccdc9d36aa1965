"""Small tables in tests."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pandas as pd

from pseudograd.data import Encoder, load_table
from pseudograd.data.survey import Note

SCATTERED = np.arange(40) * 7 % 41


def loaded(target: str = "y", path: str = "a.csv", **options: Any) -> tuple[Encoder, list[str]]:
    """Load a table; return the encoder and the notes, warnings marked with "!"."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        _, encoder = load_table(path, target, **options)
    lines = [("" if note.category is Note else "!") + str(note.message) for note in told]
    return encoder, [line for line in lines if "of a training row" not in line]


def saved(rows: int = 40, **columns: Any) -> None:
    """Write a table with labels y and a column x that is kept."""
    labels = columns.pop("y", np.arange(rows) % 2)
    frame = pd.DataFrame({"x": np.arange(rows) * 7 % 11, **columns, "y": labels})
    frame.to_csv("a.csv", index=False)


def names(encoder: Encoder) -> list[str]:
    return [column.name for column in encoder.columns]
