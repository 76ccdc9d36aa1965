"""Encodings of columns as features, fitted on the training set and applied to any rows.

Fitted values are plain, so that they can be saved as JSON.
"""

from __future__ import annotations

import math
import re
import warnings
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pseudograd.data.columns import Reading, as_dates, as_floats, kind_of
from pseudograd.data.values import (
    GAPS,
    TEXT_GAPS,
    Code,
    Form,
    distinct,
    gaps_in,
    is_ambiguous,
    numbers_of_form,
    plain_numbers,
    read_dates,
    read_numbers,
    spread,
    times_of,
)

if TYPE_CHECKING:
    from pandas import DatetimeIndex, Series

Features = NDArray[np.float32]

MOST_CATEGORIES = 100  # that get their own feature, per column
FEWEST_ROWS = 3  # that a category needs to get its own feature ...
_FEW_CATEGORIES = 10  # ... unless the column has at most this many
_MOST_UNREAD = 0.1  # share of new entries that may fail to parse
_SOFT = 3.0  # scaled numbers lie between -3 and 3


class Misfit(ValueError):
    """New entries whose type differs from that of the training set."""

    def __init__(self, found: str, wanted: str, entry: object = None) -> None:
        super().__init__(f"{found} where {wanted}")
        self.found, self.wanted, self.entry = found, wanted, entry


def _tell_unread(name: str, wanted: str, column: Series, wrong: NDArray[np.bool_]) -> None:
    """Warn about a few entries that cannot be parsed, and refuse many."""
    if not wrong.any():
        return
    entry, count = column[wrong].iloc[0], int(wrong.sum())
    if count > _MOST_UNREAD * len(column):
        raise Misfit("text", f"{wanted} belong", entry)
    warnings.warn(
        f"column {name!r}: {count} of {len(column)} entries are not {wanted}, such as {entry!r}, "
        "and are treated as missing",
        stacklevel=6,
    )


@dataclass(frozen=True)
class Scale:
    """Robust scaling with smooth clipping, as in RealMLP (Holzmüller et al., 2024).

    The median becomes 0 and the interquartile range 1; then everything is squeezed into (-3, 3). A
    column that is mostly one number is scaled by its range instead.
    """

    median: float
    factor: float

    @classmethod
    def fit(cls, values: NDArray[np.float64]) -> Scale:
        """Fit the scaling to numbers; NaN marks missing ones."""
        values = values[~np.isnan(values)]
        if not len(values):
            return cls(0.0, 0.0)
        return cls.of(*np.quantile(values, (0, 0.25, 0.5, 0.75, 1)))

    @classmethod
    def of(cls, low: float, first: float, median: float, third: float, high: float) -> Scale:
        """Return the scaling of numbers with this minimum, these quartiles and this maximum."""
        for wanted, width in ((1.0, third - first), (2.0, high - low)):
            # Numbers near the ends of float64 have no finite range, or none to divide by.
            if 1e-300 < width < math.inf:
                return cls(float(median), wanted / float(width))
        return cls(float(median), 0.0)

    def apply(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return scaled numbers; missing ones are imputed by the median."""
        scaled = (np.where(np.isnan(values), self.median, values) - self.median) * self.factor
        scaled = scaled.clip(-1e9, 1e9)  # avoids inf / inf
        return scaled / np.hypot(1, scaled / _SOFT)


@dataclass(frozen=True)
class Numbers:
    """The encoding of a column of numbers.

    Attributes:
        name: The name of the column.
        low: The minimum in the training set.
        high: The maximum in the training set.
        median: The number that maps to 0 and imputes missing ones.
        factor: The scaling factor, see `Scale`.
        missing: Whether a second feature indicates missing numbers.
        marks: The decimal and thousands separators, if the numbers are formatted.
        codes: Entries that mark a missing value, in addition to the usual ones.

    """

    name: str
    low: float
    high: float
    median: float
    factor: float
    missing: bool
    marks: str = ""
    codes: tuple[Code, ...] = ()

    kind: ClassVar[str] = "numbers"

    @classmethod
    def fit(cls, name: str, reading: Reading, column: Series) -> Numbers:
        """Fit the encoding to a column of the training set."""
        values = as_floats(column)
        gaps = np.isnan(values)
        ends = (values[~gaps].min(), values[~gaps].max()) if not gaps.all() else (0.0, 0.0)
        scale, form = Scale.fit(values), reading.form
        return cls(
            name,
            *(float(ends[0]), float(ends[1]), scale.median, scale.factor),
            missing=bool(gaps.any()),
            marks=form.decimal + form.thousands if form else "",
            codes=reading.codes,
        )

    @property
    def width(self) -> int:
        """The number of features."""
        return 1 + self.missing

    def encode(self, column: Series, features: Features) -> None:
        """Write the features of the entries to ``features``."""
        values = self.values(column)
        features[:, 0] = Scale(self.median, self.factor).apply(values)
        if self.missing:
            features[:, 1] = np.isnan(values)

    def values(self, column: Series) -> NDArray[np.float64]:
        """Return entries as numbers, NaN where one is missing or cannot be read."""
        kind = kind_of(column)
        if kind == "numbers":
            values = as_floats(column)
        elif kind in ("text", None):
            values = self._read(column)
        else:
            raise Misfit(kind or "", "numbers belong")
        codes = [code for code in self.codes if isinstance(code, float)]
        return np.where(np.isfinite(values) & ~np.isin(values, codes), values, np.nan)

    def _read(self, column: Series) -> NDArray[np.float64]:
        """Return strings as numbers."""
        places, texts = distinct(column)
        gaps = gaps_in(texts, GAPS, self.codes)
        values = plain_numbers(texts)
        if self.marks:
            written = numbers_of_form(texts, Form(*self.marks))
            values = np.where(np.isnan(written), values, written)
        elif (np.isnan(values) & ~gaps).any():
            there = [*compress(texts, ~gaps)]
            if found := read_numbers(there, np.ones(len(there), np.intp), False, False):
                values[~gaps] = found[0]
        wrong = spread(np.isnan(values) & ~gaps, places, False)
        _tell_unread(self.name, "numbers", column, wrong)
        return spread(values, places, np.nan)

    def outside(self, column: Series) -> Series:
        """Return the numbers outside the range of the training set."""
        import pandas as pd

        values = pd.Series(self.values(column), column.index)
        return values[(values < self.low) | (values > self.high)]


@dataclass(frozen=True)
class Categories:
    """The one-hot encoding of a column of strings or booleans.

    Attributes:
        name: The name of the column.
        categories: The categories of the training set, sorted. Each has a feature that is 1 or 0
            (not -1, which would make all features of a column act on every row).
        missing: Whether a last feature indicates missing entries.
        other: Whether the feature before it is shared by all other strings, because some were too
            rare for their own feature.
        codes: Entries that mark a missing value, in addition to the usual ones.

    """

    name: str
    categories: tuple[str, ...]
    missing: bool
    other: bool = False
    codes: tuple[Code, ...] = ()

    @property
    def kind(self) -> str | None:
        """The kind of the column; None, which accepts anything, if it had no entries."""
        return "text" if self.categories else None

    @classmethod
    def fit(
        cls, name: str, reading: Reading, column: Series, most: int = MOST_CATEGORIES
    ) -> Categories:
        """Fit the encoding to a column of the training set, with at most ``most`` categories."""
        places, texts = distinct(column)
        counts = np.bincount(places[places >= 0], minlength=len(texts))
        fewest = FEWEST_ROWS if len(texts) > _FEW_CATEGORIES else 1
        common = [
            (-count, text) for count, text in zip(counts, texts, strict=True) if count >= fewest
        ]
        kept = [text for _, text in sorted(common)[:most]]
        return cls(
            name,
            tuple(sorted(kept)),
            other=len(kept) < len(texts),
            missing=bool((places < 0).any()),
            codes=reading.codes,
        )

    @property
    def width(self) -> int:
        """The number of features."""
        return len(self.categories) + self.other + self.missing

    def encode(self, column: Series, features: Features) -> None:
        """Write the features of the entries to ``features``."""
        places = self._places(column)
        features[:] = 0
        there = places < self.width
        features[np.flatnonzero(there), places[there]] = 1

    def _places(self, column: Series) -> NDArray[np.intp]:
        """Return the index of the feature that is 1 for each entry, or the width if none is."""
        kind = kind_of(column)
        if kind == "other" and self.kind:
            raise Misfit("objects", "text belongs", column.dropna().iloc[0])
        places, texts = distinct(column)
        known = {text: at for at, text in enumerate(self.categories)}
        if known and kind in ("numbers", "dates") and known.keys().isdisjoint(texts):
            raise Misfit(kind, "text belongs", column.dropna().iloc[0])
        other = len(known) if self.other else self.width
        gap = self.width - 1 if self.missing else self.width
        gaps = gaps_in(texts, TEXT_GAPS, self.codes)
        to = [
            known.get(text, gap if is_gap else other)
            for text, is_gap in zip(texts, gaps, strict=True)
        ]
        return spread(np.array(to, np.intp), places, gap)

    def outside(self, column: Series) -> Series:
        """Return the entries that are not categories, unless a feature is shared by others."""
        if self.other:
            return column[:0]
        places, texts = distinct(column)
        known = np.array([text in self.categories for text in texts], bool)
        new = ~(known | gaps_in(texts, TEXT_GAPS, self.codes))
        return column[spread(new, places, False)]


@dataclass(frozen=True)
class Dates:
    """The encoding of a column of dates or times.

    Attributes:
        name: The name of the column.
        format: The format for `pandas.to_datetime`; empty if the entries were not strings.
        first: The earliest date of the training set, from which days are counted.
        parts: The features: year, month, weekday (Monday is 0), hour and days since the first,
            except those that are constant, each with the median and factor of its scaling.
        missing: Whether a last feature indicates missing dates.
        codes: Entries that mark a missing value, in addition to the usual ones.

    """

    name: str
    format: str
    first: str
    parts: tuple[tuple[str, float, float], ...]
    missing: bool
    codes: tuple[Code, ...] = ()

    kind: ClassVar[str] = "dates"

    @classmethod
    def fit(cls, name: str, reading: Reading, column: Series) -> Dates:
        """Fit the encoding to a column of the training set."""
        import pandas as pd

        times = pd.DatetimeIndex(as_dates(column))
        first = times.min()
        parts = []
        for part, values in _parts_of(times, first).items():
            scale = Scale.fit(values)
            if scale.factor:
                parts.append((part, scale.median, scale.factor))
        missing = bool(times.isna().any())
        text = "" if pd.isna(first) else first.isoformat()
        return cls(name, reading.format, text, tuple(parts), missing, reading.codes)

    @property
    def width(self) -> int:
        """The number of features."""
        return len(self.parts) + self.missing

    def encode(self, column: Series, features: Features) -> None:
        """Write the features of the entries to ``features``."""
        times = self._times(column)
        values = _parts_of(times, self._first)
        for at, (part, median, factor) in enumerate(self.parts):
            features[:, at] = Scale(median, factor).apply(values[part])
        if self.missing:
            features[:, -1] = times.isna()

    @property
    def _first(self) -> Any:
        import pandas as pd

        return pd.Timestamp(self.first or 0)

    def _times(self, column: Series) -> DatetimeIndex:
        """Return entries as times."""
        import pandas as pd

        kind = kind_of(column)
        if kind in ("dates", None):
            return pd.DatetimeIndex(as_dates(column))
        if kind != "text":
            raise Misfit(kind or "", "dates belong", column.dropna().iloc[0])
        places, texts = distinct(column)
        gaps = gaps_in(texts, GAPS, self.codes)
        there = [*compress(texts, ~gaps)]
        times = dict(zip(there, self._read(there), strict=True))
        unread = np.array([times.get(text, 0) is pd.NaT for text in texts], bool)
        wrong = spread(unread, places, False)
        _tell_unread(self.name, "dates", column, wrong)
        return pd.DatetimeIndex([*(times.get(text) for text in texts), None])[places]

    def _read(self, texts: list[str]) -> DatetimeIndex:
        """Return strings as times, in the training set's format unless another fits all of them."""
        if found := read_dates(texts, self.format):
            times, format_ = found
            before = _orders(self.format)
            if _orders(format_) - before and (before or is_ambiguous(texts, format_)):
                warnings.warn(
                    f"column {self.name!r}: dates such as {texts[0]!r} are read as {format_}, "
                    "unlike those of the training set: check the order of day and month",
                    stacklevel=6,
                )
            return times
        return times_of(texts, self.format or "ISO8601")


def _orders(format_: str) -> set[str]:
    """Return the orders of day and month in a format of dates: "%d%m", "%m%d", both or none."""
    return {"".join(re.findall("%[dm]", one)) for one in format_.split("|")} & {"%d%m", "%m%d"}


def _parts_of(times: DatetimeIndex, first: Any) -> dict[str, NDArray[np.float64]]:
    """Return the components of times as numbers."""
    import pandas as pd

    day = times.normalize()
    parts = {
        "year": times.year,
        "month": times.month,
        "weekday": times.day_of_week,
        "hour": (times - day) / pd.Timedelta(hours=1),
        "days": (day - first.normalize()) / pd.Timedelta(days=1),
    }
    return {part: values.to_numpy(np.float64) for part, values in parts.items()}


Column = Numbers | Categories | Dates


def fit_column(name: str, reading: Reading, column: Series, most: int = MOST_CATEGORIES) -> Column:
    """Return the encoding that fits the kind of a column of the training set."""
    if reading.kind == "numbers":
        return Numbers.fit(name, reading, column)
    if reading.kind == "dates":
        return Dates.fit(name, reading, column)
    return Categories.fit(name, reading, column, most)
