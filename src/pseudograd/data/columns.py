"""Columns of a table: what each holds, and what may be wrong with it."""

from __future__ import annotations

import re
import shlex
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pseudograd.words import listed, nearest

if TYPE_CHECKING:
    from pandas import DataFrame, Series


Label = str | int | bool
CHOSEN = "named in categories"  # the reason of a column that the user takes for categories
_LARGEST = 1e300  # so that the difference of two numbers is finite
_NEARLY_ALL = 0.9
_FEW = 20  # fewer texts may all differ, and fewer rows may be in order, by chance
# A number as people write it: currency, percent sign, thousands separators, any decimal mark.
_FORMATTED = re.compile(
    r"\(?[+-]?\s*[$€£¥]?\s*[+-]?(\d{1,3}([.,'’\s]\d{3})+|\d+)?([.,]\d*)?\s*[%‰$€£¥]?\)?"
)


class Refusal(ValueError):
    """A file that can be read but not used; the message is complete."""


@dataclass(frozen=True, eq=False)
class Column:
    """A column of a table, what it is taken for, and why."""

    name: str
    entries: Series  # indexed by row
    kind: str | None  # "numbers", "text" (truth values too), or None if every entry is missing
    reason: str = ""  # why it is taken for that, if not for its entries alone

    @classmethod
    def of(cls, name: str, entries: Series, *, categories: Iterable[str] = ()) -> Column:
        """Decide what a column is taken for; ``categories`` are the user's choice."""
        return cls(name, entries, kind_of(name, entries), CHOSEN if name in categories else "")

    @cached_property
    def texts(self) -> Series:
        """The entries as texts, without gaps."""
        return as_texts(self.entries).dropna()

    @cached_property
    def not_numbers(self) -> Series:
        """The texts that cannot be read as numbers."""
        import pandas as pd

        return _those(self.texts, lambda texts: pd.to_numeric(texts, errors="coerce").isna())

    @cached_property
    def misfits(self) -> Series:
        """The texts that keep the column from being numbers."""
        if len(self.not_numbers):
            return self.not_numbers
        # Other columns have a decimal comma, so the point is what does not fit.
        return _those(self.texts, lambda texts: ~texts.str.fullmatch(r"\s*[+-]?\d+\s*"))


@dataclass(frozen=True)
class Complaint:
    """What is wrong with a column and what to do, in a sentence; a warning if not refused."""

    sentence: str
    refused: bool = True


def check_column(column: Column) -> None:
    """Raise or warn of the first complaint about a column."""
    for check in CHECKS[column.kind]:
        if complaint := check(column):
            if complaint.refused:
                raise ValueError(complaint.sentence)
            warnings.warn(complaint.sentence, stacklevel=3)


def formatted_numbers(column: Column) -> Complaint | None:
    """Complain about numbers that are written for people, or mixed with a few texts."""
    texts, unread, wrong = column.texts, column.not_numbers, column.misfits
    meant = _those(
        unread, lambda texts: texts.str.fullmatch(_FORMATTED) & texts.str.contains(r"\d")
    )
    numbers = len(texts) - len(unread) + len(meant)
    if column.reason == CHOSEN or wrong.empty or numbers < _NEARLY_ALL * len(texts):
        return None
    return Complaint(
        f"column {column.name!r} is mostly numbers, but {len(wrong)} of {len(texts)} entries are "
        f"not plain numbers, the first {first_of(wrong)}: write 1234.5 for $1,234.50 or 1.234,50 "
        f"and 12.5 for 12.5% (decimal commas in all columns or none), leave these cells empty, "
        f"{_how_to_choose(column.name)}, or {how_to_drop(column.name)}"
    )


def all_different(column: Column) -> Complaint | None:
    """Complain about texts that tell single rows apart, such as names and dates."""
    different = column.texts.nunique()
    if different < max(_FEW, _NEARLY_ALL * len(column.texts)):
        return None
    return Complaint(
        f"column {column.name!r} has {different} different texts in {len(column.texts)} rows, like "
        f"names or dates, so there is nothing to learn from it: {how_to_drop(column.name)}"
    )


def doubtful_categories(column: Column) -> Complaint | None:
    """Warn of many different texts, which may be measurements with a unit, or names."""
    texts, wrong = column.texts, column.misfits
    different = texts.drop_duplicates()
    measured = len(wrong) and different.str.match(r"\W*\d").mean() > 0.5
    doubtful = measured or len(different) > len(texts) / 2
    if column.reason == CHOSEN or len(different) < _FEW or not doubtful:
        return None
    return Complaint(
        f"column {column.name!r} has {len(different)} different texts in {len(texts)} rows, such "
        f"as {first_of(wrong if len(wrong) else texts)}, and each becomes a category: if they are "
        f"numbers, write 12.3 for 12.3 kg and leave other cells empty; if not, "
        f"{_how_to_choose(column.name)}, or {how_to_drop(column.name)}",
        refused=False,
    )


def row_number(column: Column) -> Complaint | None:
    """Complain about whole numbers that only rise or only fall, and warn of other numbers.

    Where rows are sorted by label, a row number gives the label away. Its steps may be of any
    size, since rows may have been removed after they were numbered.
    """
    entries = column.entries.dropna()
    rises = entries.is_monotonic_increasing
    in_order = (rises or entries.is_monotonic_decreasing) and entries.is_unique
    if len(entries) < _FEW or not in_order:
        return None
    first, last = (
        int(end) if float(end).is_integer() else end for end in (entries.iloc[0], entries.iloc[-1])
    )
    found = (
        f"column {column.name!r} {'rises' if rises else 'falls'} from row to row, from {first} to "
        f"{last}, as a row number does, so a network could tell examples by their place in the file"
    )
    out = how_to_drop(column.name)
    if (as_numbers(column.name, entries) % 1).any():
        return Complaint(f"{found}: {out} if it means no more than that", refused=False)
    return Complaint(f"{found}: {out}, or shuffle the rows if it means more than that")


# The checks of each kind of column, in order. Add one as a function from a column to a complaint.
CHECKS: dict[str | None, tuple[Callable[[Column], Complaint | None], ...]] = {
    "text": (formatted_numbers, all_different, doubtful_categories),
    "numbers": (row_number,),
    None: (),
}


def kind_of(name: str, entries: Series) -> str | None:
    """Return what a column holds: "numbers", "text" (truth values too), or None if nothing."""
    from pandas.api.types import infer_dtype

    kind = infer_dtype(entries, skipna=True)
    if kind == "empty" or entries.isna().all():
        return None
    if kind in ("integer", "floating", "mixed-integer-float", "decimal"):
        return "numbers"
    if kind in ("string", "boolean", "categorical"):
        return "text"
    raise ValueError(
        f"column {name!r} holds neither numbers nor text but {kind}: convert it, or "
        f"{how_to_drop(name)}"
    )


def named(frame: DataFrame) -> DataFrame:
    """Return the frame with texts as column names, all different."""
    frame = frame.rename(columns=str)
    if not frame.columns.is_unique:
        twice = frame.columns[frame.columns.duplicated()].unique()
        raise ValueError(f"there is more than one column {listed(twice)}: rename them")
    return frame


def feature_names(count: int) -> list[str]:
    """Return names for the columns of an array X."""
    return [f"X[{at}]" for at in range(count)]


def target_column(frame: DataFrame, target: str, place: object) -> Series:
    """Return the column of labels."""
    if target not in frame.columns:
        there = nearest(target, frame.columns)
        raise ValueError(f"{place} has no column {target!r} for the target: it has {there}")
    return frame[target]


def labels_in(target: str, column: Series) -> list[Label]:
    """Return the labels as plain Python values, all of one type."""
    from pandas.api.types import infer_dtype

    if count := int(column.isna().sum()):
        raise ValueError(
            f"target {target!r} has {count} missing labels (empty, NA, null or the like), the "
            f"first in row {column.isna().argmax() + 1}: fill them in, or remove these rows"
        )
    values = column.astype(object)
    kind = infer_dtype(values)
    if kind in ("string", "integer", "boolean"):
        plain: type = {"string": str, "integer": int, "boolean": bool}[kind]
        return [plain(value) for value in values]
    if kind in ("floating", "mixed-integer-float") and all(float(v).is_integer() for v in values):
        return [int(value) for value in values]
    raise ValueError(
        f"target {target!r} must hold classes (all texts, all whole numbers or all truth values): "
        "name another column, or make classes of it"
    )


def as_numbers(name: str, entries: Series) -> NDArray[np.float64]:
    """Return a column as float64, NaN where an entry is missing."""
    values: NDArray[np.float64] = entries.to_numpy(np.float64, na_value=np.nan)
    if (np.abs(values) > _LARGEST).any():
        raise ValueError(
            f"column {name!r} has infinite numbers, or numbers beyond {_LARGEST:g}: "
            "correct them, or leave these cells empty"
        )
    return values


def as_texts(entries: Series) -> Series:
    """Return a column's entries as texts, NaN where an entry is missing."""
    texts = entries.astype(object).map(str, na_action="ignore").astype(object)
    return texts.where(entries.notna(), np.nan)


def _those(texts: Series, hold: Callable[[Series], Series]) -> Series:
    """Return the texts for which a condition holds; it is tried once for each different text."""
    different = texts.drop_duplicates()
    return texts[texts.isin(different[hold(different)])]


def look_alikes(texts: Iterable[object]) -> list[list[str]]:
    """Return groups of texts that differ only in case or in blanks at their ends."""
    alike: dict[str, list[str]] = {}
    for text in texts:
        if isinstance(text, str):
            alike.setdefault(text.strip().casefold(), []).append(text)
    return [together for together in alike.values() if len(together) > 1]


def first_of(entries: Series) -> str:
    """Return the first entry and its row, counted from 1, for a sentence."""
    return f"{entries.iloc[0]!r} in row {entries.index[0] + 1}"


def how_to_drop(*names: str) -> str:
    """Say how to leave columns out, in Python and on the command line."""
    them = "it" if len(names) == 1 else "them"
    if all(re.fullmatch(r"X\[\d+\]", name) for name in names):  # of an .npz file
        return f"leave {them} out of X"
    return f"leave {them} out (drop={list(names)}, on the command line --drop {shlex.join(names)})"


def _how_to_choose(name: str) -> str:
    return (
        f"take it for categories (categories={[name]}, on the command line "
        f"--categories {shlex.quote(name)})"
    )
