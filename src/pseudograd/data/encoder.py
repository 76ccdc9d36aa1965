"""From rows of a table to features, as learned from the training part alone.

What is learned is kept as plain values and saved as JSON. The scikit-learn transformer is always
made from these values, so a saved encoder and a new one cannot differ.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pseudograd.data.columns import (
    Column,
    Label,
    feature_names,
    first_of,
    kind_of,
    labels_in,
    look_alikes,
    named,
    target_column,
)
from pseudograd.data.features import Categories, Numbers, column_transformer
from pseudograd.words import listed

if TYPE_CHECKING:
    from pandas import DataFrame, Series
    from sklearn.compose import ColumnTransformer

_ROWS = 10_000  # encoded at a time, since the steps in between take memory


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
        columns: list[Numbers | Categories] = []
        for name, entries in frame.drop(columns=target).items():
            kind = Numbers if kind_of(name, entries) == "numbers" else Categories
            columns.append(kind.fit(name, entries))
        if not columns:
            raise ValueError(f"there is no column besides the target {target!r}: add features")
        return cls(target, labels, tuple(columns))

    def transform(self, frame: DataFrame) -> NDArray[Any]:
        """Return the features of rows, one row each: float32, or uint8 if they are pixels.

        Args:
            frame: Rows with the columns of the training part in any order, with or without the
                target.

        """
        frame = named(frame)
        self._check_columns(frame)
        if self.pixels is not None:
            return _pixels(frame[list(self.kinds())], self.value_range)
        transformer, order = self._transformer
        features = np.empty((len(frame), len(order)), np.float32)
        for start in range(0, len(frame), _ROWS):
            rows = slice(start, start + _ROWS)
            features[rows] = transformer.transform(frame[rows])[:, order]
        return features

    @cached_property
    def _transformer(self) -> tuple[ColumnTransformer, NDArray[np.intp]]:
        return column_transformer(self.columns)

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
        for name in texts[:1]:
            column = Column.of(name, frame[name].reset_index(drop=True))
            if len(column.not_numbers):
                said += f"; {name!r} has {first_of(column.not_numbers)}"
        raise ValueError(
            f"the columns do not match those of the training part ({said}): "
            "give the same columns with the same kind of content"
        )

    def unseen(self, frame: DataFrame) -> dict[str, Series]:
        """Return the entries that are none of their column's categories, by column, if any."""
        return self._outside(frame, Categories)

    def beyond(self, frame: DataFrame) -> dict[str, Series]:
        """Return the numbers outside the range of the training part, by column, if any."""
        return self._outside(frame, Numbers)

    def _outside(self, frame: DataFrame, kind: type) -> dict[str, Series]:
        frame, columns = named(frame), [part for part in self.columns if isinstance(part, kind)]
        found = {column.name: column.outside(frame[column.name]) for column in columns}
        return {name: entries for name, entries in found.items() if len(entries)}

    @property
    def _texts(self) -> dict[str, Categories]:
        return {part.name: part for part in self.columns if isinstance(part, Categories)}

    @property
    def taken_for(self) -> str | None:
        """What the columns were taken for, in words; None if the features are pixels."""
        if self.pixels is not None:
            return None
        texts, kinds = self._texts, []
        if numbers := [part.name for part in self.columns if part.name not in texts]:
            kinds.append(f"for numbers: {listed(numbers)}")
        if texts:
            width = sum(column.width for column in texts.values())
            kinds.append(f"for categories: {listed(texts)} ({width} indicator columns)")
        return f"columns taken {'; '.join(kinds)}"

    def look_alikes(self) -> dict[str, list[list[str]]]:
        """Return labels and categories that differ only in case or outer blanks, by column."""
        found = {self.target: look_alikes(self.labels)}
        found |= {name: look_alikes(column.categories) for name, column in self._texts.items()}
        return {name: alike for name, alike in found.items() if alike}

    def known_texts(self) -> dict[str, Collection[object]]:
        """Return what stays text even where it looks like numbers, by column; no truth values."""
        known: dict[str, Collection[object]] = {
            name: column.categories
            for name, column in self._texts.items()
            if not {"True", "False"}.issuperset(column.categories)
        }
        return known | ({self.target: self.labels} if isinstance(self.labels[0], str) else {})

    def kinds(self) -> dict[str, str | None]:
        """Return what each column must hold, in the words of `kind_of`."""
        if self.pixels is not None:
            return dict.fromkeys(feature_names(math.prod(self.pixels)), "numbers")
        return {column.name: column.kind for column in self.columns}

    def decode(self, features: NDArray[Any]) -> dict[str, str]:
        """Return one row of features as the table would show it, by column."""
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
            fields = json.loads(text, object_hook=_with_tuples)
            columns = [
                (Categories if "categories" in column else Numbers)(**column)
                for column in fields.pop("columns")
            ]
            encoder = cls(columns=tuple(columns), **fields)
            low, high = encoder.value_range
        except (KeyError, TypeError, ValueError) as problem:
            raise ValueError(f"this is not the JSON of an encoder ({problem!r})") from problem
        if encoder.pixels is None and (low, high) != cls.value_range:
            raise ValueError(
                f"this encoder scales numbers to [{low:g}, {high:g}], not to [-1, 1] as now: run "
                "tune again"
            )
        return encoder


def _with_tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(item) if isinstance(item, list) else item for name, item in fields.items()}


def _pixels(frame: DataFrame, value_range: tuple[float, float]) -> NDArray[np.uint8]:
    """Return pixels of any type as uint8."""
    low, high = value_range
    values: NDArray[Any] = frame.to_numpy()
    with np.errstate(invalid="ignore"):
        pixels: NDArray[np.uint8] = values.astype(np.uint8)
    if not ((values == pixels) & (pixels >= low) & (pixels <= high)).all():
        raise ValueError(f"the pixels must be whole numbers from {low:g} to {high:g}: scale them")
    return pixels
