"""Columns as numbers in [-1, 1], learned from the training part alone and kept as plain values.

Indicators are 0 where they do not apply, and not -1: the many that a column of texts has would all
push at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pseudograd.data.columns import (
    Label,
    as_numbers,
    as_texts,
    feature_names,
    first_of,
    how_to_drop,
    kind_of,
    labels_in,
    listed,
    look_alikes,
    named,
    no_numbers,
    target_column,
)

if TYPE_CHECKING:
    from pandas import DataFrame, Series


_MOST_CATEGORIES = 1000  # a column of its own for each: names or dates would fill the memory


@dataclass(frozen=True)
class Numbers:
    """How a column of numbers is encoded: scaled to [-1, 1], what is missing as the median.

    Numbers beyond those of the training part become -1 or 1, for no feature may leave its range.

    Attributes:
        name: The column.
        low: Its least number in the training part ...
        high: ... and its greatest; if they are equal, all becomes 0.
        median: What stands for a missing number.
        missing: Whether a second feature tells which numbers are missing.

    Example:
        >>> import pandas as pd
        >>> Numbers("age", 20.0, 60.0, 30.0, missing=True).transform(pd.Series([40, None, 70]))
        array([[ 0. ,  0. ],
               [-0.5,  1. ],
               [ 1. ,  0. ]], dtype=float32)

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
        present = values[~np.isnan(values)]
        return cls(
            name,
            float(present.min()),
            float(present.max()),
            float(np.median(present)),
            len(present) < len(values),
        )

    def transform(self, column: Series) -> NDArray[np.float32]:
        """Encode a column."""
        values = as_numbers(self.name, column)
        missing = np.isnan(values)
        values = np.where(missing, self.median, values) - self.low
        span = self.high - self.low
        scaled = np.clip(2 * (values / span) - 1, -1, 1) if span else np.zeros_like(values)
        return np.stack([scaled, missing] if self.missing else [scaled], 1).astype(np.float32)

    @property
    def width(self) -> int:
        """The number of features."""
        return 1 + self.missing

    def show(self, features: NDArray[np.float32]) -> str:
        """Give an entry of the column as text, from its features."""
        if self.missing and features[1]:
            return "missing"
        return f"{self.low + (float(features[0]) + 1) / 2 * (self.high - self.low):g}"


@dataclass(frozen=True)
class Categories:
    """How a column of texts or truth values is encoded: a feature for each category.

    Attributes:
        name: The column.
        categories: Those of the training part, sorted; all others become zeros.
        missing: Whether a last feature tells which entries are missing.

    Example:
        >>> import pandas as pd
        >>> Categories("hue", ("blue", "red"), missing=False).transform(pd.Series(["red", "pink"]))
        array([[0., 1.],
               [0., 0.]], dtype=float32)

    """

    name: str
    categories: tuple[str, ...]
    missing: bool

    @property
    def kind(self) -> str | None:
        """What the column must hold: None if it had no entry, so that anything will do."""
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

    def transform(self, column: Series) -> NDArray[np.float32]:
        """Encode a column."""
        import pandas as pd

        features = np.zeros((len(column), len(self.categories) + self.missing), np.float32)
        codes = pd.Index(self.categories, dtype=object).get_indexer(as_texts(column))
        known = np.flatnonzero(codes >= 0)
        features[known, codes[known]] = 1
        if self.missing:
            features[:, -1] = column.isna()
        return features

    @property
    def width(self) -> int:
        """The number of features."""
        return len(self.categories) + self.missing

    def show(self, features: NDArray[np.float32]) -> str:
        """Give an entry of the column as text, from its features."""
        names = [*self.categories, "missing"]
        return next((name for name, set_ in zip(names, features, strict=False) if set_), "other")


@dataclass(frozen=True)
class Encoder:
    """From the rows of a table to features and class indices, as the training part had them.

    Attributes:
        target: The column of labels.
        labels: The labels of the classes, sorted.
        columns: How each column is encoded; none if the features are pixels.
        pixels: The shape of one picture, if the features are pixels: they stay whole numbers.
        value_range: The features' least and greatest possible value.

    Example:
        >>> import pandas as pd
        >>> rows = pd.DataFrame({"size": [1, 3, 2], "hue": ["red", "blue", None], "y": list("aba")})
        >>> encoder = Encoder.fit(rows, "y")
        >>> encoder.transform(rows)
        array([[-1.,  0.,  1.,  0.],
               [ 1.,  1.,  0.,  0.],
               [ 0.,  0.,  0.,  1.]], dtype=float32)
        >>> encoder.labels, encoder.encode_labels(rows["y"])
        (('a', 'b'), array([0, 1, 0]))
        >>> Encoder.from_json(encoder.to_json()) == encoder
        True

    """

    target: str
    labels: tuple[Label, ...]
    columns: tuple[Numbers | Categories, ...]
    pixels: tuple[int, ...] | None = None
    value_range: tuple[float, float] = (-1.0, 1.0)

    @classmethod
    def fit(
        cls, frame: DataFrame, target: str, *, pixels: tuple[int, ...] | None = None
    ) -> Encoder:
        """Learn from the training part.

        Args:
            frame: Its rows.
            target: The column of labels; all others hold features.
            pixels: The shape of a picture, if the other columns are pixels from 0 to 255 and are
                named as `read_frame` does.

        """
        frame = named(frame)
        labels = tuple(sorted(set(labels_in(target, target_column(frame, target, "the table")))))
        if len(labels) < 2:
            raise ValueError(
                f"target {target!r} has a single class, {listed(labels)}: "
                "name a column with two or more"
            )
        if pixels is not None:
            return cls(target, labels, (), pixels, (0.0, 255.0))
        columns = [_fit_column(name, frame[name]) for name in frame.columns if name != target]
        if not columns:
            raise ValueError(f"there is no column besides the target {target!r}: add features")
        return cls(target, labels, tuple(columns))

    def transform(self, frame: DataFrame) -> NDArray[Any]:
        """Give the features of rows, one row each: float32, or uint8 if they are pixels.

        Args:
            frame: Rows with the columns of the training part in any order; the target may be
                there or not.

        """
        frame = named(frame)
        kinds = self.kinds()
        known = {*kinds, self.target}
        found = {name: kind_of(name, frame[name]) for name in kinds if name in frame.columns}
        wrong = [name for name, kind in found.items() if kind and kind != (kinds[name] or kind)]
        texts = [name for name in wrong if found[name] == "text"]
        complaints = {
            "missing": [name for name in kinds if name not in found],
            "unknown": [name for name in frame.columns if name not in known],
            "text where numbers belong": texts,
            "numbers where text belongs": [name for name in wrong if found[name] == "numbers"],
        }
        if any(complaints.values()):
            said = "; ".join(
                f"{what}: {listed(names)}" for what, names in complaints.items() if names
            )
            if texts and len(entries := no_numbers(frame[texts[0]].reset_index(drop=True))):
                said += f"; {texts[0]!r} has {first_of(entries)}"
            raise ValueError(
                f"the columns do not match those of the training part ({said}): "
                "give the same columns with the same kind of content"
            )
        if self.pixels is not None:
            return _pixels(frame[list(kinds)], self.value_range)
        return np.concatenate([column.transform(frame[column.name]) for column in self.columns], 1)

    def unseen(self, frame: DataFrame) -> dict[str, Series]:
        """Give the entries that are none of their column's categories, by column, if there are any.

        Args:
            frame: Rows that `transform` takes.

        """
        found, frame = {}, named(frame)
        for column in self.columns:
            if isinstance(column, Categories):
                texts = as_texts(frame[column.name]).dropna()
                found[column.name] = texts[~texts.isin(column.categories)]
        return {name: entries for name, entries in found.items() if len(entries)}

    def beyond(self, frame: DataFrame) -> dict[str, Series]:
        """Give the numbers beyond the range of the training part, by column, if there are any.

        Args:
            frame: Rows that `transform` takes.

        """
        found, frame = {}, named(frame)
        for column in self.columns:
            if isinstance(column, Numbers):
                entries = frame[column.name]
                values = as_numbers(column.name, entries)
                found[column.name] = entries[(values < column.low) | (values > column.high)]
        return {name: entries for name, entries in found.items() if len(entries)}

    @property
    def taken_for(self) -> str | None:
        """What the columns were taken for, in words; None if the features are pixels."""
        if self.pixels is not None:
            return None
        categories = [column for column in self.columns if isinstance(column, Categories)]
        numbers = [column.name for column in self.columns if isinstance(column, Numbers)]
        kinds = [f"for numbers: {listed(numbers)}"] if numbers else []
        if categories:
            width = sum(column.width for column in categories)
            names = listed(column.name for column in categories)
            kinds.append(f"for categories: {names} ({width} indicator columns)")
        return f"columns taken {'; '.join(kinds)}"

    def look_alikes(self) -> dict[str, list[list[str]]]:
        """Give labels and categories that only blanks at their ends or case tell apart, by column.

        Columns without any are left out.
        """
        found = {self.target: look_alikes(self.labels)}
        found |= {name: look_alikes(texts) for name, texts in self.categories().items()}
        return {name: alike for name, alike in found.items() if alike}

    def text_columns(self) -> list[str]:
        """The columns of texts, which stay so where they look like numbers; no truth values."""
        return [
            column.name
            for column in self.columns
            if isinstance(column, Categories)
            and not {"True", "False"}.issuperset(column.categories)
        ]

    def categories(self) -> dict[str, tuple[str, ...]]:
        """The texts that each column of texts had."""
        columns = (column for column in self.columns if isinstance(column, Categories))
        return {column.name: column.categories for column in columns}

    def kinds(self) -> dict[str, str | None]:
        """Say what each column must hold, as `kind_of` says it."""
        if self.pixels is not None:
            return dict.fromkeys(feature_names(math.prod(self.pixels)), "numbers")
        return {column.name: column.kind for column in self.columns}

    def decode(self, features: NDArray[Any]) -> dict[str, str]:
        """Give one row of features as the table would show it, by column.

        Args:
            features: A row of what `transform` gives.

        """
        row, rest = {}, features
        for column in self.columns:
            row[column.name] = column.show(rest[: column.width])
            rest = rest[column.width :]
        return row

    def encode_labels(self, labels: Series | Sequence[Label]) -> NDArray[np.int64]:
        """Give the class index of each label, its place in ``labels``."""
        import pandas as pd

        plain = labels_in(self.target, pd.Series(labels))
        codes = {label: code for code, label in enumerate(self.labels)}
        if unseen := sorted(set(plain) - set(codes), key=str):
            raise ValueError(
                f"target {self.target!r} has labels that the training part does not have, "
                f"{listed(unseen)}: remove these rows, or add such rows to the training part"
            )
        return np.array([codes[label] for label in plain], np.int64)

    def to_json(self) -> str:
        """Give all of it as JSON."""
        return json.dumps(asdict(self), ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Encoder:
        """Make it again from what `to_json` gave."""
        try:
            fields = json.loads(text)
            columns = [
                Categories(column["name"], tuple(column["categories"]), column["missing"])
                if "categories" in column
                else Numbers(**column)
                for column in fields["columns"]
            ]
            low, high = fields["value_range"]
            pixels = None if fields["pixels"] is None else tuple(fields["pixels"])
            labels = tuple(fields["labels"])
            encoder = cls(fields["target"], labels, tuple(columns), pixels, (low, high))
        except (KeyError, TypeError, ValueError) as problem:
            raise ValueError(f"this is not the JSON of an encoder ({problem!r})") from problem
        if pixels is None and (low, high) != cls.value_range:
            raise ValueError(
                f"numbers were scaled to [{low:g}, {high:g}], where now it is [-1, 1]: run tune "
                "again"
            )
        return encoder


def _fit_column(name: str, column: Series) -> Numbers | Categories:
    numbers = kind_of(name, column) == "numbers"
    return Numbers.fit(name, column) if numbers else Categories.fit(name, column)


def _pixels(frame: DataFrame, value_range: tuple[float, float]) -> NDArray[np.uint8]:
    """Pixels of whatever type as uint8."""
    low, high = value_range
    values: NDArray[Any] = frame.to_numpy()
    with np.errstate(invalid="ignore"):
        pixels: NDArray[np.uint8] = values.astype(np.uint8)
    if not ((values == pixels) & (pixels >= low) & (pixels <= high)).all():
        raise ValueError(f"the pixels must be whole numbers from {low:g} to {high:g}: scale them")
    return pixels
