"""Columns of a table: what they hold, and what is wrong with them."""

from __future__ import annotations

import difflib
import re
import shlex
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from pandas import DataFrame, Series


Label = str | int | bool
_LARGEST = 1e300  # so that the difference of two numbers is finite
_NEARLY_ALL = 0.9
_FEW = 20  # different texts, which may all differ by chance; rows that may be in order by chance
# A number as people write it: with a currency, a percent sign, thousands apart, any decimal mark.
_FORMATTED = re.compile(
    r"\(?[+-]?\s*[$€£¥]?\s*[+-]?(\d{1,3}([.,'’\s]\d{3})+|\d+)?([.,]\d*)?\s*[%‰$€£¥]?\)?"
)


def named(frame: DataFrame) -> DataFrame:
    """The frame with texts as the names of its columns."""
    frame = frame.rename(columns=str)
    if not frame.columns.is_unique:
        twice = frame.columns[frame.columns.duplicated()].unique()
        raise ValueError(f"there is more than one column {listed(twice)}: rename them")
    return frame


def feature_names(count: int) -> list[str]:
    """Give names for the columns of an array X."""
    return [f"X[{at}]" for at in range(count)]


def target_column(frame: DataFrame, target: str, place: object) -> Series:
    """Give the column of that name; there must be one."""
    if target not in frame.columns:
        there = nearest(target, frame.columns)
        raise ValueError(f"{place} has no column {target!r} for the target: it has {there}")
    return frame[target]


def labels_in(target: str, column: Series) -> list[Label]:
    """The labels as plain values, all of one type."""
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
        f"target {target!r} must hold classes, all texts, all whole numbers or all truth values: "
        "name another column, or make classes of it"
    )


def kind_of(name: str, column: Series) -> str | None:
    """What a column holds: "numbers", "text" (truth values, too), or None if all is missing."""
    from pandas.api.types import infer_dtype

    kind = infer_dtype(column, skipna=True)
    if kind == "empty" or column.isna().all():
        return None
    if kind in ("integer", "floating", "mixed-integer-float", "decimal"):
        return "numbers"
    if kind in ("string", "boolean", "categorical"):
        return "text"
    raise ValueError(
        f"column {name!r} holds neither numbers nor text but {kind}: convert it, or "
        f"{how_to_drop(name)}"
    )


def check_text(name: str, column: Series, *, chosen: bool = False) -> None:
    """Refuse a column of text that was meant to be numbers, or that tells single rows apart.

    Warn of one that may be so. Whole numbers may be codes. With ``chosen``, all numbers are.
    """
    if kind_of(name, column) != "text":
        return
    texts = as_texts(column).dropna()
    wrong = no_numbers(texts)
    meant = wrong.str.fullmatch(_FORMATTED) & wrong.str.contains(r"\d")
    numbers = len(texts) - len(wrong) + int(meant.sum())
    if wrong.empty:  # a point where other columns have a decimal comma
        wrong = texts[~texts.str.fullmatch(r"\s*[+-]?\d+\s*")]
    if len(wrong) and numbers >= _NEARLY_ALL * len(texts) and not chosen:
        raise ValueError(
            f"column {name!r} is mostly numbers, but {len(wrong)} of {len(texts)} entries cannot "
            f"be read so, first {first_of(wrong)}: write 1234.5 for $1,234.50 or 1.234,50 and 12.5 "
            f"for 12.5% (decimal commas in all columns or none), leave these cells empty, "
            f"{_how_to_choose(name)}, or {how_to_drop(name)}"
        )
    different = texts.drop_duplicates()
    found = f"column {name!r} has {len(different)} different texts in {len(texts)} rows"
    if len(different) >= max(_FEW, _NEARLY_ALL * len(texts)):
        raise ValueError(
            f"{found}, as names and dates do, from which nothing can be learned: "
            f"{how_to_drop(name)}"
        )
    measured = len(wrong) and different.str.match(r"\W*\d").mean() > 0.5
    if len(different) >= _FEW and not chosen and (measured or len(different) > len(texts) / 2):
        warnings.warn(
            f"{found}, such as {first_of(wrong if len(wrong) else texts)}, and each becomes a "
            f"category: if they are numbers, write 12.3 for 12.3 kg and leave other cells empty; "
            f"if not, {_how_to_choose(name)}, or {how_to_drop(name)}",
            stacklevel=3,
        )


def check_no_row_number(name: str, column: Series) -> None:
    """Refuse the number of the row: where examples are sorted by label, it would give that away.

    That is, whole numbers that only rise or only fall, whatever the steps: rows may have been
    removed since they were counted. Other numbers that do so, such as times, get a warning.
    """
    column = column.dropna()
    if kind_of(name, column) != "numbers" or len(column) < _FEW:
        return
    values = as_numbers(name, column)
    rises = column.is_monotonic_increasing
    if not (rises or column.is_monotonic_decreasing) or not column.is_unique:
        return
    first, last = (
        int(end) if float(end).is_integer() else end for end in (column.iloc[0], column.iloc[-1])
    )
    found = (
        f"column {name!r} {'rises' if rises else 'falls'} from row to row, from {first} to {last}, "
        "as a row number does, and would tell examples by their place in the file"
    )
    if (values % 1).any():
        warnings.warn(f"{found}: {how_to_drop(name)} if it means no more than that", stacklevel=3)
    else:
        raise ValueError(
            f"{found}: {how_to_drop(name)}, or shuffle the rows if it means more than that"
        )


def no_numbers(column: Series) -> Series:
    """Those entries of a column that cannot be read as numbers, as texts."""
    import pandas as pd

    texts = as_texts(column).dropna()
    return texts[pd.to_numeric(texts, errors="coerce").isna()]


def first_of(entries: Series) -> str:
    """The first entry and its row, as people count."""
    return f"{entries.iloc[0]!r} in row {entries.index[0] + 1}"


def how_to_drop(*names: str) -> str:
    """Say how columns are left out, in Python and on the command line."""
    them = "it" if len(names) == 1 else "them"
    if all(re.fullmatch(r"X\[\d+\]", name) for name in names):  # of an .npz file
        return f"leave {them} out of X"
    return f"leave {them} out (drop={list(names)}, on the command line --drop {shlex.join(names)})"


def _how_to_choose(name: str) -> str:
    """Say how a column is taken for categories, in Python and on the command line."""
    return (
        f"take it for categories (categories={[name]}, on the command line "
        f"--categories {shlex.quote(name)})"
    )


def as_numbers(name: str, column: Series) -> NDArray[np.float64]:
    """A column as float64, NaN where it is missing."""
    values: NDArray[np.float64] = column.to_numpy(np.float64, na_value=np.nan)
    if (np.abs(values) > _LARGEST).any():
        raise ValueError(
            f"column {name!r} has infinite numbers, or some beyond {_LARGEST:g}: "
            "correct them, or leave these cells empty"
        )
    return values


def as_texts(column: Series) -> Series:
    """Give a column's entries as texts; gaps stay."""
    return column.astype(object).map(str, na_action="ignore")


def look_alikes(texts: Iterable[object]) -> list[list[str]]:
    """Texts that differ only by blanks at their ends or by case, those alike together."""
    alike: dict[str, list[str]] = {}
    for text in texts:
        if isinstance(text, str):
            alike.setdefault(text.strip().casefold(), []).append(text)
    return [together for together in alike.values() if len(together) > 1]


def nearest(name: str, names: Iterable[str]) -> str:
    """The names that are meant most likely, for a sentence."""
    names = list(names)
    return listed(difflib.get_close_matches(name, names) or names)


def listed(names: Iterable[object], most: int = 8) -> str:
    """Names as they stand in a sentence, a few of them."""
    return shortened([repr(name) for name in names], "up to", most)


def shortened(texts: list[str], to: str, most: int = 8) -> str:
    """Texts in a row, a few of them; the last stands after the word for what leads to it."""
    if len(texts) <= most:
        return ", ".join(texts)
    return f"{', '.join(texts[: most - 1])}, and {len(texts) - most} more {to} {texts[-1]}"
