"""Columns of a table: their types, names and labels."""

from __future__ import annotations

import datetime
import numbers
import shlex
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pseudograd.data.values import (
    GAPS,
    LABEL_GAPS,
    TEXT_GAPS,
    Code,
    Form,
    as_text,
    distinct,
    gaps_in,
    is_ambiguous,
    is_code,
    read_dates,
    read_numbers,
    sentinels,
    spread,
)
from pseudograd.words import counted, listed, nearest

if TYPE_CHECKING:
    from pandas import DataFrame, Series


Label = str | float | bool

# The kinds of columns, by pandas' name for the type of their entries.
_KINDS = {
    **dict.fromkeys(("integer", "floating", "mixed-integer-float", "decimal"), "numbers"),
    **dict.fromkeys(("timedelta", "timedelta64"), "numbers"),
    **dict.fromkeys(("datetime", "datetime64", "date", "period"), "dates"),
    **dict.fromkeys(("string", "boolean", "categorical", "time"), "text"),
}
_MOST_DECIMALS = 20  # distinct decimal numbers that are taken as classes


class Refusal(ValueError):
    """A file that can be read but not used; the message continues a sentence after its name."""


@dataclass(frozen=True)
class Choices:
    """The user's options for the columns; `load_table` explains them."""

    drop: Sequence[str] = ()
    categories: Sequence[str] = ()
    numbers: Sequence[str] = ()
    missing: Sequence[str] = ()
    group: str | None = None

    @property
    def codes(self) -> tuple[Code, ...]:
        """The entries that mark a missing value, as strings and, where possible, as numbers."""
        codes: list[Code] = [*map(str, self.missing)]
        for text in self.missing:
            try:
                codes.append(float(text))
            except ValueError:
                continue
        return tuple(codes)


AS_IT_IS = Choices()  # no options given


@dataclass(frozen=True, eq=False)
class Reading:
    """How a column is interpreted.

    Attributes:
        kind: "numbers", "text" (including booleans), "dates", "other" for anything else, or None
            if every entry is missing.
        entries: The parsed entries: numbers, pandas categories, or datetime64.
        form: The separators of formatted numbers; None for plain ones.
        format: The format of the dates.
        codes: Entries that mark a missing value, in addition to the usual ones.
        doubts: Warnings for the user; each continues "column 'x' ".

    """

    kind: str | None
    entries: Series
    form: Form | None = None
    format: str = ""
    codes: tuple[Code, ...] = ()
    doubts: tuple[str, ...] = ()


def read_column(
    name: str, entries: Series, choices: Choices = AS_IT_IS, comma: bool = False
) -> Reading:
    """Infer the type of a column of a training table, and convert its entries.

    Args:
        name: The name of the column.
        entries: Its raw entries.
        choices: The user's options.
        comma: Whether the file's decimal separator is a comma.

    """
    kind = kind_of(entries)
    if kind is None or kind == "other":
        return Reading(kind, entries)
    if kind == "dates" and name not in choices.categories:
        return Reading(kind, as_dates(entries), codes=choices.codes)
    if kind == "numbers" and name not in choices.categories:
        return _read_plain(name, entries, choices)
    return _read_texts(name, entries, choices, comma)


def _read_plain(
    name: str,
    entries: Series,
    choices: Choices,
    form: Form | None = None,
    doubts: tuple[str, ...] = (),
) -> Reading:
    """Parse a column of numbers, and find those that mark a missing value."""
    import pandas as pd

    if entries.dtype == np.float16:  # pandas cannot factorize float16
        entries = entries.astype(np.float32)
    values = as_floats(entries)
    codes = choices.codes
    if infinite := int(np.isinf(values).sum()):
        doubts += (f"has {counted(infinite, 'infinite number')}, treated as missing",)
    chosen = name in choices.numbers
    for code in () if chosen else sentinels(values[~np.isin(values, _floats(codes))]):
        doubts += (
            f"has {code:g}, far from all other numbers, which is treated as missing (--numbers "
            "NAME keeps it)",
        )
        codes += (code,)
    gaps = np.isinf(values) | np.isin(values, _floats(codes))
    if (gaps | np.isnan(values)).all():
        return Reading(None, entries)
    if gaps.any():
        entries = pd.Series(values, entries.index).mask(gaps)
    return Reading("numbers", entries, form, codes=codes, doubts=doubts)


def _read_texts(name: str, entries: Series, choices: Choices, comma: bool) -> Reading:
    """Parse a column of strings: as numbers or dates if they are, otherwise as categories."""
    import pandas as pd

    places, texts = distinct(entries)
    gaps = gaps_in(texts, GAPS, choices.codes)
    forced = name in choices.numbers
    categories = name in choices.categories or (entries.dtype == "category" and not forced)
    if not (gaps.all() or categories):
        there = [*compress(texts, ~gaps)]
        counts = np.bincount(places[places >= 0], minlength=len(texts))[~gaps]
        # For each entry its place in `there`, -1 if it is missing.
        to = spread(np.where(gaps, -1, np.cumsum(~gaps) - 1), places, -1)
        if forced or not any(map(is_code, there)):
            if found := read_numbers(there, counts, comma, forced):
                values, form = found
                if np.isnan(values).all():
                    raise ValueError(
                        f"'numbers' names {name!r}, which has no numbers, but {there[0]!r}: leave "
                        "it out"
                    )
                column = pd.Series(spread(values, to, np.nan), entries.index)
                doubts = _unread(name, there, counts, np.isnan(values))
                return _read_plain(name, column, choices, form, doubts)
            if dates := read_dates(there):
                times, format_ = dates
                column = pd.Series(times.append(pd.DatetimeIndex([None]))[to], entries.index)
                doubts = _doubtful_dates(there, format_)
                return Reading("dates", column, None, format_, choices.codes, doubts)
    # If "+" is a category, so is "-".
    usual = TEXT_GAPS - {"-"} if "+" in texts else TEXT_GAPS
    gaps = gaps_in(texts, usual, choices.codes)
    if gaps.all():
        return Reading(None, entries)
    column = pd.Series(pd.Categorical.from_codes(places, texts), entries.index)
    column = column.cat.remove_categories([*compress(texts, gaps)])
    return Reading("text", column, codes=choices.codes)


def _unread(
    name: str, texts: list[str], counts: NDArray[np.intp], unread: NDArray[np.bool_]
) -> tuple[str, ...]:
    if not unread.any():
        return ()
    return (
        f"is mostly numbers, but {counts[unread].sum()} of {counts.sum()} entries are not, such as "
        f"{texts[unread.argmax()]!r}: they are treated as missing (--categories "
        f"{shlex.quote(name)} reads the column as categories)",
    )


def _doubtful_dates(texts: list[str], format_: str) -> tuple[str, ...]:
    formats = format_.split("|")
    read_as = f"they are read as {' or '.join(formats)}"
    if is_ambiguous(texts, format_):
        return (f"holds dates that may be read in two ways: {read_as}",)
    return (f"holds dates in several formats: {read_as}",) if len(formats) > 1 else ()


def kind_of(entries: Series) -> str | None:
    """Return the kind of a column: "numbers", "text", "dates", "other", or None if it is empty."""
    from pandas.api.types import infer_dtype

    kind = infer_dtype(entries, skipna=True)
    if kind == "empty" or entries.isna().all():
        return None
    plain = (str, numbers.Real, datetime.date, datetime.time)
    if kind in ("mixed", "mixed-integer") and all(isinstance(v, plain) for v in entries.dropna()):
        return "text"
    return _KINDS.get(kind, "other")


def as_floats(entries: Series) -> NDArray[np.float64]:
    """Return numbers as float64, NaN where an entry is missing; time spans in days."""
    import pandas as pd

    if entries.dtype == object:
        entries = entries.infer_objects()
    if pd.api.types.is_timedelta64_dtype(entries):
        entries = entries / pd.Timedelta(days=1)
    values: NDArray[np.float64] = entries.to_numpy(np.float64, na_value=np.nan)
    return values


def as_dates(entries: Series) -> Series:
    """Return dates of any type as datetime64 in UTC."""
    import pandas as pd

    if isinstance(entries.dtype, pd.PeriodDtype):
        return entries.dt.to_timestamp()
    return pd.to_datetime(entries, utc=True, errors="coerce").dt.tz_localize(None)


def _floats(codes: Iterable[Code]) -> list[float]:
    return [code for code in codes if isinstance(code, float)]


def named(frame: DataFrame) -> DataFrame:
    """Return the data frame with strings as column names; raise if one occurs twice."""
    frame = frame.rename(columns=str)
    if not frame.columns.is_unique:
        twice = frame.columns[frame.columns.duplicated()].unique()
        raise ValueError(f"there is more than one column {listed(twice)}: rename them")
    return frame


def feature_names(count: int) -> list[str]:
    """Return column names for an array X."""
    return [f"X[{at}]" for at in range(count)]


# --- labels --------------------------------------------------------------------------------------


def target_column(frame: DataFrame, target: str, place: object) -> Series:
    """Return the column of labels."""
    if target not in frame.columns:
        there = nearest(target, frame.columns)
        raise ValueError(f"{place} has no column {target!r} for the target: it has {there}")
    return frame[target]


def unlabelled(column: Series, codes: Collection[Code] = ()) -> NDArray[np.bool_]:
    """Return which rows have no label."""
    places, values = distinct(column, texts=False)
    gaps = gaps_in([as_text(value) for value in values], LABEL_GAPS, codes)
    gaps |= np.array([isinstance(value, float) and value in codes for value in values], bool)
    return spread(gaps, places, True)


def labels_in(target: str, column: Series) -> tuple[NDArray[np.intp], list[Label]]:
    """Return the class index of each row, and the labels of the classes, sorted and of one type."""
    from pandas.api.types import infer_dtype

    places, values = distinct(column, texts=False)
    if (places < 0).any():
        raise ValueError(
            f"target {target!r} has {counted(int((places < 0).sum()), 'missing label')}, the first "
            f"in row {(places < 0).argmax() + 1}: fill them in, or remove these rows"
        )
    types: dict[str, Callable[[Any], Label]] = {"string": str, "integer": int, "boolean": bool}
    kind = infer_dtype(values)
    found = f"entries of type {kind}"
    if kind in ("floating", "mixed-integer-float"):
        found = f"{len(values)} distinct decimal numbers"
        if not np.isfinite(values).all():
            found = "infinite numbers"
        elif all(float(value).is_integer() for value in values):
            types[kind] = int
        elif len(values) <= _MOST_DECIMALS:
            single = str(column.dtype).lower() == "float32"  # 0.1, not 0.10000000149
            types[kind] = (lambda value: float(str(np.float32(value)))) if single else float
    if kind not in types:
        raise ValueError(
            f"target {target!r} must hold classes (strings, integers, booleans, or at most "
            f"{_MOST_DECIMALS} distinct decimal numbers), but has {found}: name another column, or "
            "bin this one, for example with pandas.cut"
        )
    plain = [types[kind](value) for value in values]
    labels = sorted(set(plain))
    to = {label: at for at, label in enumerate(labels)}
    order = np.array([to[label] for label in plain], np.intp)
    return order[places], labels


def check_several(target: str, labels: Sequence[Label]) -> None:
    """Raise unless there are two classes or more."""
    if len(labels) < 2:
        raise ValueError(
            f"target {target!r} has a single class, {listed(labels)}: "
            "name a column with two or more"
        )


def look_alikes(texts: Iterable[object]) -> list[list[str]]:
    """Return groups of strings that differ only in case or in surrounding whitespace."""
    alike: dict[str, list[str]] = {}
    for text in texts:
        if isinstance(text, str):
            alike.setdefault(text.strip().casefold(), []).append(text)
    return [together for together in alike.values() if len(together) > 1]
