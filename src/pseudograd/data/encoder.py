"""Encode the rows of a table as features, with statistics of the training set only.

The statistics are plain values that are saved as JSON.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pseudograd.data.columns import (
    Label,
    Reading,
    check_several,
    feature_names,
    labels_in,
    look_alikes,
    named,
    read_column,
    target_column,
)
from pseudograd.data.features import (
    MOST_CATEGORIES,
    Categories,
    Column,
    Dates,
    Misfit,
    Numbers,
    fit_column,
)
from pseudograd.words import listed

if TYPE_CHECKING:
    from pandas import DataFrame, Series


@dataclass(frozen=True)
class Encoder:
    """Encodes rows of a table as features and class indices, fitted on the training set.

    Attributes:
        target: The column of labels.
        labels: The labels of the classes, sorted.
        columns: The encoding of each column; empty if the features are pixels.
        pixels: The shape of an image, if the features are pixels, which stay integers.
        value_range: The range that a recipe maps to its ``feature_range``: the smallest and largest
            pixel, or [-1, 1], so that a recipe with this range does not rescale a table's features.
        notes: How `load_table` used each column and row, as plain values; not saved.

    Example:
        >>> import pandas as pd
        >>> rows = pd.DataFrame({"size": [1, 3, 2], "hue": ["red", "blue", None], "y": list("aba")})
        >>> encoder = Encoder.fit(rows, "y")
        >>> encoder.transform(rows).round(2)
        array([[-0.95,  0.  ,  1.  ,  0.  ],
               [ 0.95,  1.  ,  0.  ,  0.  ],
               [ 0.  ,  0.  ,  0.  ,  1.  ]], dtype=float32)
        >>> encoder.labels, encoder.encode_labels(rows["y"])
        (('a', 'b'), array([0, 1, 0]))
        >>> Encoder.from_json(encoder.to_json()) == encoder
        True

    """

    target: str
    labels: tuple[Label, ...]
    columns: tuple[Column, ...]
    pixels: tuple[int, ...] | None = None
    value_range: tuple[float, float] = (-1.0, 1.0)
    notes: dict[str, Any] = field(default_factory=dict, compare=False)

    @classmethod
    def fit(
        cls,
        frame: DataFrame,
        target: str,
        *,
        pixels: tuple[int, ...] | None = None,
        readings: Mapping[str, Reading] | None = None,
        most: int = MOST_CATEGORIES,
    ) -> Encoder:
        """Fit an encoder to the training set.

        Args:
            frame: The training rows.
            target: The column of labels; all others are features.
            pixels: The shape of an image, if the other columns are pixels from 0 to 255 with the
                names that `read_frame` gives them.
            readings: How the columns are read; inferred by default.
            most: The maximum number of categories per column that get their own feature.

        """
        frame = named(frame)
        labels = tuple(labels_in(target, target_column(frame, target, "the table"))[1])
        check_several(target, labels)
        if pixels is not None:
            return cls(target, labels, (), pixels, (0.0, 255.0))
        columns = []
        for name in frame.columns.drop(target):
            reading = readings[name] if readings else read_column(name, frame[name])
            entries = frame[name] if readings else reading.entries
            columns.append(fit_column(name, reading, entries, most))
        if not columns:
            raise ValueError(f"there is no column besides the target {target!r}: add features")
        return cls(target, labels, tuple(columns))

    @property
    def width(self) -> int:
        """The number of features."""
        if self.pixels is not None:
            return math.prod(self.pixels)
        return sum(column.width for column in self.columns)

    def transform(self, frame: DataFrame, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Return the features of each row: float32, or uint8 for pixels.

        Args:
            frame: Rows with the columns of the training set in any order; others are ignored.
            out: The array to write to; by default a new one.

        """
        frame = named(frame)
        if out is None:
            kind = np.float32 if self.pixels is None else np.uint8
            out = np.empty((len(frame), self.width), kind)
        names = [*self.kinds()]
        complaints = {"missing": [name for name in names if name not in frame.columns]}
        if complaints["missing"]:
            others = [name for name in frame if name not in names and name != self.target]
            raise _mismatch({**complaints, "not used": others})
        if self.pixels is not None:
            out[:] = _pixels(frame[names], self.value_range)
            return out
        start, examples = 0, []
        for column in self.columns:
            end = start + column.width
            try:
                column.encode(frame[column.name], out[:, start:end])
            except Misfit as misfit:
                complaints.setdefault(str(misfit), []).append(column.name)
                examples.append(f"{column.name!r} has {misfit.entry!r}")
            start = end
        if any(complaints.values()):
            raise _mismatch(complaints, examples[0])
        return out

    def unseen(self, frame: DataFrame) -> dict[str, Series]:
        """Return the entries that are not categories of their column, by column."""
        return self._outside(frame, Categories)

    def beyond(self, frame: DataFrame) -> dict[str, Series]:
        """Return the numbers outside the range of the training set, by column."""
        return self._outside(frame, Numbers)

    def _outside(
        self, frame: DataFrame, kind: type[Categories] | type[Numbers]
    ) -> dict[str, Series]:
        frame, columns = named(frame), [part for part in self.columns if isinstance(part, kind)]
        with warnings.catch_warnings(action="ignore"):  # `transform` issues the same
            found = {column.name: column.outside(frame[column.name]) for column in columns}
        return {name: entries for name, entries in found.items() if len(entries)}

    @property
    def _texts(self) -> dict[str, Categories]:
        return {part.name: part for part in self.columns if isinstance(part, Categories)}

    @property
    def read_as(self) -> str | None:
        """The types of the columns in words; None for pixels."""
        if self.pixels is not None:
            return None
        kinds = []
        for what, kind in (("numbers", Numbers), ("dates", Dates), ("categories", Categories)):
            columns = [column for column in self.columns if isinstance(column, kind)]
            if columns:
                width = sum(column.width for column in columns)
                indicators = f" ({width} indicator columns)" if kind is Categories else ""
                names = listed(column.name for column in columns)
                kinds.append(f"as {what}: {names}{indicators}")
        return f"columns read {'; '.join(kinds)}"

    def look_alikes(self) -> dict[str, list[list[str]]]:
        """Return labels and categories that differ only in case or whitespace, by column."""
        found = {self.target: look_alikes(self.labels)}
        found |= {name: look_alikes(column.categories) for name, column in self._texts.items()}
        return {name: alike for name, alike in found.items() if alike}

    def known_texts(self) -> dict[str, Collection[object]]:
        """Return the known texts of each column that stays text even if it looks numeric."""
        known: dict[str, Collection[object]] = {
            name: column.categories
            for name, column in self._texts.items()
            if not {"True", "False"}.issuperset(column.categories)
        }
        return known | ({self.target: self.labels} if isinstance(self.labels[0], str) else {})

    def kinds(self) -> dict[str, str | None]:
        """Return the kind of each column, as `kind_of` names it."""
        if self.pixels is not None:
            return dict.fromkeys(feature_names(math.prod(self.pixels)), "numbers")
        return {column.name: column.kind for column in self.columns}

    def encode_labels(self, labels: Series | Sequence[Label]) -> NDArray[np.int64]:
        """Return the class index of each label."""
        import pandas as pd

        places, found = labels_in(self.target, pd.Series(labels))
        codes = {label: code for code, label in enumerate(self.labels)}
        if unseen := sorted(set(found) - set(codes), key=str):
            raise ValueError(
                f"target {self.target!r} has labels that the training set does not have, "
                f"{listed(unseen)}: remove these rows, or add rows with these labels to the "
                "training set"
            )
        return np.array([codes[label] for label in found], np.int64)[places]

    def to_json(self) -> str:
        """Return the encoder as JSON."""
        fields = asdict(self)
        del fields["notes"]
        return json.dumps(fields, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Encoder:
        """Return the encoder from the output of `to_json`."""
        try:
            fields = json.loads(text, object_hook=_with_tuples)
            columns = [_column(column) for column in fields.pop("columns")]
            return cls(columns=tuple(columns), **fields)
        except (KeyError, TypeError, ValueError) as problem:
            raise ValueError(f"this is not the JSON of an encoder ({problem!r})") from problem


def _column(fields: dict[str, Any]) -> Column:
    if "categories" in fields:
        return Categories(**fields)
    if "parts" in fields:
        parts = tuple((str(part), median, factor) for part, median, factor in fields["parts"])
        return Dates(**{**fields, "parts": parts})
    return Numbers(**fields)


def _with_tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(item) if isinstance(item, list) else item for name, item in fields.items()}


def _mismatch(complaints: Mapping[str, Sequence[str]], *examples: str) -> ValueError:
    said = [f"{what}: {listed(names)}" for what, names in complaints.items() if names]
    return ValueError(
        f"the columns do not match those of the training set ({'; '.join([*said, *examples])}): "
        "provide the same columns with the same types"
    )


def _pixels(frame: DataFrame, value_range: tuple[float, float]) -> NDArray[np.uint8]:
    """Return pixels of any dtype as uint8; raise if they are not integers in the range."""
    low, high = value_range
    values: NDArray[Any] = frame.to_numpy()
    with np.errstate(invalid="ignore"):
        pixels: NDArray[np.uint8] = values.astype(np.uint8)
    if not ((values == pixels) & (pixels >= low) & (pixels <= high)).all():
        raise ValueError(f"the pixels must be whole numbers from {low:g} to {high:g}: scale them")
    return pixels
