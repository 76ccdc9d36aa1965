"""Columns as features: what is learned from each, and the transformer that is made from that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from pseudograd.data.columns import as_numbers, as_texts, how_to_drop
from pseudograd.extras import needed_for

if TYPE_CHECKING:
    from pandas import Series
    from sklearn.compose import ColumnTransformer


_MOST_CATEGORIES = 1000  # each is a feature: names or dates would fill the memory


@dataclass(frozen=True)
class Numbers:
    """What is learned from a column of numbers.

    Attributes:
        name: The column.
        low: Its least number in the training part, which becomes -1, as does anything below.
        high: Its greatest, which becomes 1, as does anything above. If low = high, all becomes 0.
        median: Stands in for a missing number.
        missing: Whether a second feature tells which numbers are missing.

    """

    name: str
    low: float
    high: float
    median: float
    missing: bool

    kind: ClassVar[str] = "numbers"

    @classmethod
    def fit(cls, name: str, column: Series) -> Numbers:
        """Learn from a column of the training part."""
        values = as_numbers(name, column)
        low, median, high = np.nanmin(values), np.nanmedian(values), np.nanmax(values)
        return cls(name, float(low), float(high), float(median), bool(np.isnan(values).any()))

    @property
    def width(self) -> int:
        """The number of features."""
        return 1 + self.missing

    def show(self, features: NDArray[np.float32]) -> str:
        """Return an entry of the column as text, from its features."""
        if self.missing and features[1]:
            return "missing"
        return f"{self.low + (float(features[0]) + 1) / 2 * (self.high - self.low):g}"


@dataclass(frozen=True)
class Categories:
    """What is learned from a column of texts or truth values.

    Attributes:
        name: The column.
        categories: The texts of the training part, sorted: a feature each, 1 where it applies and
            otherwise 0 (not -1, or the many features of one column would all push at once).
        missing: Whether a last feature tells which entries are missing.

    """

    name: str
    categories: tuple[str, ...]
    missing: bool

    @property
    def kind(self) -> str | None:
        """What the column must hold: None, for anything, if it had no entry."""
        return "text" if self.categories else None

    @classmethod
    def fit(cls, name: str, column: Series) -> Categories:
        """Learn from a column of the training part."""
        categories = tuple(sorted(as_texts(column).dropna().unique()))
        if len(categories) > _MOST_CATEGORIES:
            raise ValueError(
                f"column {name!r} has {len(categories)} different texts, more than "
                f"{_MOST_CATEGORIES}: {how_to_drop(name)}, or correct it if it should hold numbers"
            )
        return cls(name, categories, bool(column.isna().any()))

    @property
    def width(self) -> int:
        """The number of features."""
        return len(self.categories) + self.missing

    def show(self, features: NDArray[np.float32]) -> str:
        """Return an entry of the column as text, from its features."""
        names = [*self.categories, "missing"]
        return next((name for name, set_ in zip(names, features, strict=False) if set_), "other")


def column_transformer(
    numbers: Sequence[Numbers], texts: Sequence[Categories]
) -> ColumnTransformer:
    """Return a fitted transformer to the numbers, then their gaps, then the categories."""
    with needed_for("encoding tables"):
        import pandas as pd
        from sklearn.compose import ColumnTransformer
        from sklearn.impute import MissingIndicator, SimpleImputer
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import FunctionTransformer, OneHotEncoder

    ends = {end: np.array([getattr(column, end) for column in numbers]) for end in ("low", "high")}
    impute_and_scale = make_pipeline(
        SimpleImputer(strategy="median"), FunctionTransformer(_scaled, kw_args=ends)
    )
    one_hot = OneHotEncoder(
        categories=[[*column.categories, *[np.nan] * column.missing] for column in texts],
        handle_unknown="ignore",
        sparse_output=False,
        dtype=np.float32,
    )
    gaps = [column for column in numbers if column.missing]
    transformer = ColumnTransformer(
        [
            ("numbers", impute_and_scale, names_of(numbers)),
            ("gaps", MissingIndicator(features="all"), names_of(gaps)),
            ("categories", one_hot, names_of(texts)),
        ]
    )
    # All is given but the medians, which are learned from one row of them.
    row = {column.name: np.array([column.median]) for column in numbers}
    row |= {column.name: np.array([np.nan], object) for column in texts}
    return transformer.fit(pd.DataFrame(row))


def names_of(columns: Sequence[Numbers | Categories]) -> list[str]:
    """Return the names of columns."""
    return [column.name for column in columns]


def _scaled(
    values: NDArray[np.float64], low: NDArray[np.float64], high: NDArray[np.float64]
) -> NDArray[np.float32]:
    """Map [low, high] to [-1, 1], and what lies outside to the nearest end.

    Unlike MinMaxScaler's, the ends and the middle are exact, and a constant column becomes 0.
    """
    span = high - low
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = np.clip(2 * ((values - low) / span) - 1, -1, 1)
    return np.where(span > 0, scaled, 0).astype(np.float32)
