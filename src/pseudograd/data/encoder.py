"""Columns as numbers in [-1, 1], learned from the training part alone and kept as plain values.

What is learned is two small dataclasses, `Numbers` and `Categories`, which are saved as JSON. The
scikit-learn transformer is always made from them, so a saved encoder and a new one cannot differ.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
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
    not_numbers,
    target_column,
)
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


@dataclass(frozen=True)
class Encoder:
    """Encodes rows of a table as features and class indices, as learned from the training part.

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
                named as `read_frame` names them.

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
        columns = [
            (Numbers if kind_of(name, frame[name]) == "numbers" else Categories).fit(
                name, frame[name]
            )
            for name in frame.columns
            if name != target
        ]
        if not columns:
            raise ValueError(f"there is no column besides the target {target!r}: add features")
        return cls(target, labels, tuple(columns))

    def transform(self, frame: DataFrame) -> NDArray[Any]:
        """Return the features of rows, one row each: float32, or uint8 if they are pixels.

        Args:
            frame: Rows with the columns of the training part in any order, with or without the
                target.

        """
        import pandas as pd

        frame = named(frame)
        self._check_columns(frame)
        if self.pixels is not None:
            return _pixels(frame[list(self.kinds())], self.value_range)
        columns = {name: as_numbers(name, frame[name]) for name in _names(self._numbers)}
        columns |= {name: as_texts(frame[name]).to_numpy() for name in _names(self._texts)}
        return np.take(self._transformer.transform(pd.DataFrame(columns)), self._order, axis=1)

    def _check_columns(self, frame: DataFrame) -> None:
        """Refuse columns that are not those of the training part."""
        kinds = self.kinds()
        found = {name: kind_of(name, frame[name]) for name in kinds if name in frame.columns}
        wrong = [name for name, kind in found.items() if kind and kind != (kinds[name] or kind)]
        texts = [name for name in wrong if found[name] == "text"]
        complaints = {
            "missing": [name for name in kinds if name not in found],
            "unknown": [name for name in frame if name not in kinds and name != self.target],
            "text where numbers belong": texts,
            "numbers where text belongs": [name for name in wrong if found[name] == "numbers"],
        }
        if not any(complaints.values()):
            return
        said = "; ".join(f"{what}: {listed(names)}" for what, names in complaints.items() if names)
        if texts and len(entries := not_numbers(frame[texts[0]].reset_index(drop=True))):
            said += f"; {texts[0]!r} has {first_of(entries)}"
        raise ValueError(
            f"the columns do not match those of the training part ({said}): "
            "give the same columns with the same kind of content"
        )

    @property
    def _numbers(self) -> list[Numbers]:
        return [column for column in self.columns if isinstance(column, Numbers)]

    @property
    def _texts(self) -> list[Categories]:
        return [column for column in self.columns if isinstance(column, Categories)]

    @cached_property
    def _transformer(self) -> ColumnTransformer:
        return _column_transformer(self._numbers, self._texts)

    @cached_property
    def _order(self) -> NDArray[np.intp]:
        """Where the transformer puts each feature, in the order of the table's columns."""
        place = {column.name: at for at, column in enumerate(self.columns)}
        numbers = [place[column.name] for column in self._numbers]
        gaps = [place[column.name] for column in self._numbers if column.missing]
        texts = [place[column.name] for column in self._texts for _ in range(column.width)]
        return np.argsort(numbers + gaps + texts, kind="stable")

    def unseen(self, frame: DataFrame) -> dict[str, Series]:
        """Return the entries that are none of their column's categories, by column, if any.

        Args:
            frame: Rows that `transform` takes.

        """
        found, frame = {}, named(frame)
        for column in self._texts:
            texts = as_texts(frame[column.name]).dropna()
            found[column.name] = texts[~texts.isin(column.categories)]
        return {name: entries for name, entries in found.items() if len(entries)}

    def beyond(self, frame: DataFrame) -> dict[str, Series]:
        """Return the numbers outside the range of the training part, by column, if any.

        Args:
            frame: Rows that `transform` takes.

        """
        found, frame = {}, named(frame)
        for column in self._numbers:
            entries = frame[column.name]
            values = as_numbers(column.name, entries)
            found[column.name] = entries[(values < column.low) | (values > column.high)]
        return {name: entries for name, entries in found.items() if len(entries)}

    @property
    def taken_for(self) -> str | None:
        """What the columns were taken for, in words; None if the features are pixels."""
        if self.pixels is not None:
            return None
        kinds = [f"for numbers: {listed(_names(self._numbers))}"] if self._numbers else []
        if self._texts:
            width = sum(column.width for column in self._texts)
            names = listed(_names(self._texts))
            kinds.append(f"for categories: {names} ({width} indicator columns)")
        return f"columns taken {'; '.join(kinds)}"

    def look_alikes(self) -> dict[str, list[list[str]]]:
        """Return labels and categories that differ only in case or outer blanks, by column."""
        found = {self.target: look_alikes(self.labels)}
        found |= {column.name: look_alikes(column.categories) for column in self._texts}
        return {name: alike for name, alike in found.items() if alike}

    def known_texts(self) -> dict[str, Collection[object]]:
        """Return what stays text even where it looks like numbers, by column; no truth values."""
        known: dict[str, Collection[object]] = {
            column.name: column.categories
            for column in self._texts
            if not {"True", "False"}.issuperset(column.categories)
        }
        return known | ({self.target: self.labels} if isinstance(self.labels[0], str) else {})

    def kinds(self) -> dict[str, str | None]:
        """Return what each column must hold, in the words of `kind_of`."""
        if self.pixels is not None:
            return dict.fromkeys(feature_names(math.prod(self.pixels)), "numbers")
        return {column.name: column.kind for column in self.columns}

    def decode(self, features: NDArray[Any]) -> dict[str, str]:
        """Return one row of features as the table would show it, by column.

        Args:
            features: A row of what `transform` returns.

        """
        row, rest = {}, features
        for column in self.columns:
            row[column.name] = column.show(rest[: column.width])
            rest = rest[column.width :]
        return row

    def encode_labels(self, labels: Series | Sequence[Label]) -> NDArray[np.int64]:
        """Return the class index of each label."""
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
        """Return the encoder as JSON."""
        return json.dumps(asdict(self), ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Encoder:
        """Return the encoder that `to_json` wrote."""
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
                f"this encoder scales numbers to [{low:g}, {high:g}], not to [-1, 1] as now: run "
                "tune again"
            )
        return encoder


def _column_transformer(
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
            ("numbers", impute_and_scale, _names(numbers)),
            ("gaps", MissingIndicator(features="all"), _names(gaps)),
            ("categories", one_hot, _names(texts)),
        ]
    )
    # All is given but the medians, which are learned from one row of them.
    row = {column.name: np.array([column.median]) for column in numbers}
    row |= {column.name: np.array([np.nan], object) for column in texts}
    return transformer.fit(pd.DataFrame(row))


def _names(columns: Sequence[Numbers | Categories]) -> list[str]:
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


def _pixels(frame: DataFrame, value_range: tuple[float, float]) -> NDArray[np.uint8]:
    """Return pixels of any type as uint8."""
    low, high = value_range
    values: NDArray[Any] = frame.to_numpy()
    with np.errstate(invalid="ignore"):
        pixels: NDArray[np.uint8] = values.astype(np.uint8)
    if not ((values == pixels) & (pixels >= low) & (pixels <= high)).all():
        raise ValueError(f"the pixels must be whole numbers from {low:g} to {high:g}: scale them")
    return pixels
