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
    from pandas import DataFrame, Series
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

    def outside(self, column: Series) -> Series:
        """Return the entries outside the range of the training part."""
        values = as_numbers(self.name, column)
        return column[(values < self.low) | (values > self.high)]

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

    def outside(self, column: Series) -> Series:
        """Return the entries that are none of the categories."""
        texts = as_texts(column).dropna()
        return texts[~texts.isin(self.categories)]

    def show(self, features: NDArray[np.float32]) -> str:
        """Return an entry of the column as text, from its features."""
        names = [*self.categories, "missing"]
        return next((name for name, set_ in zip(names, features, strict=False) if set_), "other")


def column_transformer(
    columns: Sequence[Numbers | Categories],
) -> tuple[ColumnTransformer, NDArray[np.intp]]:
    """Return a fitted transformer, and the order that brings its features to that of the columns.

    Its features are the numbers, then which of them are missing, then the categories.
    """
    with needed_for("encoding tables"):
        import pandas as pd
        from sklearn.compose import ColumnTransformer
        from sklearn.impute import SimpleImputer
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import FunctionTransformer, OneHotEncoder

    numbers = {column.name: column for column in columns if isinstance(column, Numbers)}
    texts = {column.name: column for column in columns if isinstance(column, Categories)}
    gaps = [name for name, column in numbers.items() if column.missing]
    ends = np.array([(column.low, column.high) for column in numbers.values()])
    scale_and_impute = make_pipeline(
        FunctionTransformer(_scaled, kw_args={"ends": ends}),
        SimpleImputer(strategy="median", add_indicator=True),
    )
    one_hot = make_pipeline(
        FunctionTransformer(_as_texts),
        OneHotEncoder(
            categories=[[*text.categories, *[np.nan] * text.missing] for text in texts.values()],
            handle_unknown="ignore",
            sparse_output=False,
            dtype=np.float32,
        ),
    )
    transformer = ColumnTransformer(
        [("numbers", scale_and_impute, [*numbers]), ("texts", one_hot, [*texts])]
    ).set_output(transform="default")
    # Fitted to a row of the medians, and to one that tells where numbers may be missing.
    medians = {column.name: getattr(column, "median", np.nan) for column in columns}
    transformer.fit(pd.DataFrame([medians, medians | dict.fromkeys(gaps, np.nan)], dtype=object))
    places = {column.name: at for at, column in enumerate(columns)}
    owners = [*numbers, *gaps, *(name for name in texts for _ in range(texts[name].width))]
    return transformer, np.argsort([places[name] for name in owners], kind="stable")


def _as_texts(frame: DataFrame) -> DataFrame:
    return frame.apply(as_texts)


def _scaled(frame: DataFrame, ends: NDArray[np.float64]) -> NDArray[np.float32]:
    """Map each column's ends to -1 and 1, and what lies outside to the nearest end.

    Unlike MinMaxScaler's, the ends and the middle are exact, and a constant column becomes 0.
    """
    values = np.stack([as_numbers(name, entries) for name, entries in frame.items()], 1)
    low, high = ends.T
    varies = high > low
    scaled: NDArray[np.float64] = 2 * ((values - low) / np.where(varies, high - low, 1)) - 1
    return scaled.clip(np.where(varies, -1, 0), varies).astype(np.float32)
