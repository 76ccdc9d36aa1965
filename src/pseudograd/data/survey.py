"""Checks of a table before training: uninformative columns, and columns to warn about."""

from __future__ import annotations

import re
import shlex
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from pseudograd.data.columns import Choices, Reading, as_floats
from pseudograd.data.features import FEWEST_ROWS
from pseudograd.data.values import distinct
from pseudograd.words import listed

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from pandas import DataFrame, Series

    from pseudograd.data.encoder import Encoder

_FEW = 20  # fewer strings may all be distinct, and fewer rows may be sorted, by chance
_NEARLY_ALL = 0.9
_MOST_OF_AN_ENTITY = 2 / 3  # distinct ids per row; above it, few rows share an id
_ID = re.compile(
    r"(?i:unnamed:.*|row[ _.-]?(names?|labels?|nr|no|num|number)?|index|idx|obs|observation|"
    r"((row|obs|case|record|sample|line|serial)[ _.-]?)?(id|ids|no|nr|number|key|index)|"
    r"uuid|guid|.*[ _.-]ids?|id[ _.-].*)|.*[a-z](ID|Id)"
)
_ENTITY = re.compile(
    r"(?i:(patient|subject|person|participant|respondent|user|customer|client|student|pupil|"
    r"household|family|animal|individual|session|device|account)([ _.-]?(id|no|nr|number|code))?)"
)


class Note(UserWarning):
    """Reports how a table was read; informational, unlike other warnings."""


@dataclass
class Notes:
    """How a table was read, for the terminal and the page.

    Attributes:
        columns: How each column is used, and why, as plain values.
        rows: The number of rows of each kind.
        said: The messages, one line each, and whether each is a warning.

    """

    columns: dict[str, dict[str, Any]] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    said: dict[str, bool] = field(default_factory=dict)

    def tell(self, stacklevel: int) -> None:
        """Issue all messages: as a `UserWarning` if doubtful, otherwise as a `Note`."""
        for line, doubt in self.said.items():
            warnings.warn(line, UserWarning if doubt else Note, stacklevel + 1)
        self.said.clear()

    def say(self, line: str, doubt: bool = False) -> None:
        """Add a message."""
        self.said[line] = doubt

    def plain(self, encoder: Encoder) -> dict[str, Any]:
        """Return the notes for `Encoder.notes`."""
        for column in encoder.columns:
            self.columns[column.name]["features"] = column.width
        return {
            "columns": [{"name": name, **facts} for name, facts in self.columns.items()],
            "rows": self.rows,
        }


def look_over(readings: Mapping[str, Reading], choices: Choices, notes: Notes) -> list[str]:
    """Return the columns to keep, and note which are dropped and which are doubtful."""
    left_out: dict[str, list[str]] = {}
    doubtful: dict[str, list[str]] = {}
    kept = []
    for name, reading in readings.items():
        chosen = name in choices.categories or name in choices.numbers
        checks = (empty,) if chosen else LEFT_OUT
        why = next(filter(None, (check(name, reading) for check in checks)), None)
        if why:
            left_out.setdefault(why, []).append(name)
            notes.columns[name] = {"used_as": "left out", "why": why}
            if hint := entity(name, reading):
                doubtful.setdefault(hint, []).append(name)
            continue
        kept.append(name)
        doubts = [*reading.doubts]
        if not chosen:
            doubts += [*filter(None, (check(name, reading) for check in DOUBTFUL))][:1]
        used_as = {"text": "categories"}.get(str(reading.kind), reading.kind)
        notes.columns[name] = {"used_as": used_as, "why": "; ".join(doubts)}
        for doubt in doubts:
            doubtful.setdefault(doubt, []).append(name)
    for doubt, names in doubtful.items():
        several = f"{len(names)} columns {listed(names)}: each"
        notes.say(f"{f'column {names[0]!r}' if len(names) == 1 else several} {doubt}", doubt=True)
    for why, names in left_out.items():
        them = "column" if len(names) == 1 else f"{len(names)} columns"
        notes.say(f"{them} {listed(names)} left out: {why}")
    return kept


# --- columns to drop: a check returns the reason, or None ----------------------------------------


def empty(name: str, reading: Reading) -> str | None:
    """Drop columns without entries, or with entries that cannot become features."""
    if reading.kind is None:
        return "no entries"
    return "neither numbers nor texts nor dates" if reading.kind == "other" else None


def constant(name: str, reading: Reading) -> str | None:
    """Drop columns whose entries are all equal, with none missing."""
    entries = reading.entries
    same = bool((entries == entries.iloc[0]).all())
    return "all entries are the same" if same else None


def identity(name: str, reading: Reading) -> str | None:
    """Drop strings and whole numbers that are mostly distinct, in a column named like an id.

    `entity` warns about ids that repeat.
    """
    if not (_ID.fullmatch(name) or _ENTITY.fullmatch(name)):
        return None
    if reading.kind != "text" and not _whole(reading) and not _in_order(reading):
        return None
    if reading.entries.is_unique:
        return "all entries differ, as ids do"
    several = len(reading.entries) >= _FEW and _differ(reading) > _MOST_OF_AN_ENTITY
    return "most entries differ, as ids do" if several else None


def row_number(name: str, reading: Reading) -> str | None:
    """Drop strictly monotonic whole numbers.

    If the rows are sorted by label, a row number leaks the label. Steps may have any size, since
    rows may have been removed after numbering.
    """
    if not _in_order(reading) or not _whole(reading):
        return None
    return "whole numbers only rise or only fall, as row numbers do (--numbers NAME keeps them)"


def all_different(name: str, reading: Reading) -> str | None:
    """Drop strings that identify single rows, such as names."""
    if reading.kind != "text":
        return None
    counts = reading.entries.value_counts()
    if len(counts) < _FEW:
        return None
    if len(counts) >= _NEARLY_ALL * counts.sum():
        if measured(name, reading):
            return "nearly all texts differ (if they are numbers, write 12.3 for 12.3 kg)"
        return "nearly all texts differ, as names do"
    return None if counts.max() >= FEWEST_ROWS else "no text is in three rows"


# --- doubtful columns: a check returns the rest of "column 'x' ...", or None ---------------------


def rises(name: str, reading: Reading) -> str | None:
    """Warn about other strictly monotonic numbers, such as times."""
    if reading.kind != "numbers" or not _in_order(reading):
        return None
    return (
        "only rises or only falls from row to row, as a row number does: if it is one, --drop "
        f"{shlex.quote(name)} leaves it out"
    )


def measured(name: str, reading: Reading) -> str | None:
    """Warn about many distinct strings that begin with a number, such as values with a unit."""
    if reading.kind != "text":
        return None
    texts = [text for text in distinct(reading.entries)[1] if not text.isdecimal()]
    number = re.compile(r"\W*\d")
    found = [text for text in texts if number.match(text)]
    if len(found) < _FEW or len(found) < len(texts) / 2:
        return None
    return (
        f"has {len(texts)} distinct texts, such as {found[0]!r}, and each becomes a category: if "
        "they are numbers or dates, write them as 12.3 or 2020-01-31"
    )


def entity(name: str, reading: Reading) -> str | None:
    """Warn about ids that repeat: rows of the same patient resemble each other."""
    if not (_ID.fullmatch(name) or _ENTITY.fullmatch(name)):
        return None
    if not (reading.kind == "text" or _whole(reading)):
        return None
    count, rows = reading.entries.nunique(), len(reading.entries)
    if count < 10 or _differ(reading) > _MOST_OF_AN_ENTITY:
        return None
    return (
        f"has {count} distinct entries in {rows} rows, as ids of patients or users do: "
        f"--group {shlex.quote(name)} keeps rows with the same id on one side of every split"
    )


Check = Callable[[str, Reading], str | None]
LEFT_OUT: tuple[Check, ...] = (empty, constant, identity, row_number, all_different)
DOUBTFUL: tuple[Check, ...] = (entity, rises, measured)


def _whole(reading: Reading) -> bool:
    """Return whether a column holds whole numbers."""
    if reading.kind != "numbers":
        return False
    values = as_floats(reading.entries)
    return not (values[~np.isnan(values)] % 1).any()


def _in_order(reading: Reading) -> bool:
    """Return whether a column of numbers is strictly monotonic, with enough rows to judge."""
    if reading.kind != "numbers":
        return False
    entries: Series = reading.entries.dropna()
    if len(entries) < max(_FEW, _NEARLY_ALL * len(reading.entries)):
        return False
    ordered = entries.is_monotonic_increasing or entries.is_monotonic_decreasing
    return bool(ordered and entries.is_unique)


def _differ(reading: Reading) -> float:
    """Return the number of distinct entries divided by the number of entries."""
    return float(reading.entries.nunique() / max(reading.entries.notna().sum(), 1))


def new_categories(frame: DataFrame, encoder: Encoder) -> list[str]:
    """Return a line for each column with categories that training did not have."""
    return [
        f"column {name!r}: {len(entries)} of {len(frame)} entries are new, such as "
        f"{entries.iloc[0]!r}, and match none of the categories seen in training"
        for name, entries in encoder.unseen(frame).items()
    ]


def out_of_range(frame: DataFrame, encoder: Encoder) -> list[str]:
    """Return a line on numbers outside the range of training, if there are any."""
    columns = [
        f"{name!r} ({len(entries)} of {len(frame)} rows, such as {entries.iloc[0]:.10g})"
        for name, entries in encoder.beyond(frame).items()
    ]
    more = f" and {len(columns) - 8} more columns" * (len(columns) > 8)
    told = f"numbers outside the range of the training data: {', '.join(columns[:8])}{more}"
    return [told] if columns else []


def question_target(target: str, places: NDArray[np.intp], labels: list[Any]) -> str | None:
    """Return a warning if the labels look like a quantity or like names; otherwise None."""
    if isinstance(labels[0], bool) or len(labels) <= max(30, len(places) / 20):
        return None
    what, fix = "whole numbers", "if it is a quantity, bin it first, for example with pandas.cut"
    if isinstance(labels[0], str):
        what, fix = "texts", "check that these are labels, not names or notes"
    return (
        f"target {target!r} has {len(labels)} distinct {what} in {len(places)} rows, and each "
        f"becomes a class: {fix}"
    )
