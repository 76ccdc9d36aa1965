"""Text files of rows and columns, such as .csv: read once, kept as texts, then typed by column.

The csv module reads them, since pandas takes a line that is too short for one with empty cells.
"""

from __future__ import annotations

import csv
import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from pandas import DataFrame, Series

# What counts as missing: the list that pandas documents for `read_csv`.
MISSING = {
    "", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN",
    "<NA>", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null",
}  # fmt: skip
_TRUTH = {"True": True, "TRUE": True, "true": True, "False": False, "FALSE": False, "false": False}
_BLOCK = 10_000  # rows that are Python objects at a time
_JOINT = "\0"  # between the entries of a packed column
_LEADING_ZERO = re.compile(r" *[+-]?0\d")
_SWAP_MARKS = str.maketrans(",.", ".,")


class BadLine(ValueError):
    """A line that does not fit the others: what is wrong, and what to do about it."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason)
        self.fix = fix


@dataclass(frozen=True, eq=False)
class Texts:
    """The columns of a text file, each packed into one string: about as large as the file.

    Attributes:
        columns: Their names, as they stand in the file.
        rows: How many rows there are.
        marks: The decimal marks that numbers may have, the likelier first.

    """

    columns: list[str]
    rows: int
    marks: str
    _packed: list[str]

    def typed(
        self, places: Sequence[int], known: Mapping[str, Collection[object]], *, codes: bool
    ) -> DataFrame:
        """Return some of the columns, as numbers, truth values or texts.

        Args:
            places: Which columns.
            known: Columns that stay texts even if they look like numbers, with the texts they are
                known to have.
            codes: Whether whole numbers stay texts too if one begins with a zero, like 007.

        """
        import pandas as pd

        mark = self._mark([at for at in places if self.columns[at] not in known])
        columns = {}
        for at in places:
            name, (texts, rows) = self.columns[at], self._distinct(at)
            values = texts
            if name in known:
                values = _without_points(texts, known[name])
            elif (numbers := _numbers(texts, mark)) is None:
                values = _truth(texts)
            elif not codes or not _are_codes(texts, numbers):
                values = numbers
            columns[at] = values.to_numpy()[rows]
        frame = pd.DataFrame(columns, index=range(self.rows))
        frame.columns = pd.Index([self.columns[at] for at in places], dtype=object)
        return frame

    def _distinct(self, at: int) -> tuple[Series, NDArray[np.intp]]:
        """Return a column's different texts, NaN if missing, and which of them each row has."""
        import pandas as pd

        texts = self._packed[at].split(_JOINT) if self.rows else []
        rows, found = pd.factorize(np.array(texts, object))
        found[[text in MISSING for text in found]] = np.nan
        return pd.Series(found, dtype=object), rows

    def _mark(self, places: Sequence[int]) -> str:
        """Return the decimal mark that makes more of the columns numbers."""
        if len(self.marks) == 1:
            return self.marks
        counts = Counter[str]()
        for at in places:
            texts, _ = self._distinct(at)
            counts.update(mark for mark in self.marks if _numbers(texts, mark) is not None)
        return max(self.marks, key=counts.__getitem__)


def read_delimited(path: Path) -> Texts:
    """Read a text file whose columns are separated by commas, semicolons or tabs."""
    limit = csv.field_size_limit(2**31 - 1)  # texts may have any length
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            separator, skipped, lines = _separator(file)
            rows = _rows(lines, separator, skipped)
            header = next(rows, [])
            blocks, count = [], 0
            while block := list(itertools.islice(rows, _BLOCK)):
                blocks.append([_JOINT.join(column) for column in zip(*block, strict=True)])
                count += len(block)
    finally:
        csv.field_size_limit(limit)
    packed = [_JOINT.join(parts) for parts in zip(*blocks, strict=True)]
    if any(column.count(_JOINT) != count - 1 for column in packed):
        raise ValueError("it has characters of code 0")
    return Texts(header, count, ",." if separator == ";" else ".", packed)


def _separator(file: TextIO) -> tuple[str, int, Iterator[str]]:
    """Return the separator, how many lines came before the header, and the lines from there."""
    skipped, first = 0, ""
    for skipped, first in enumerate(file):  # noqa: B007
        if first.strip():
            break
    # Excel writes a line that only says what separates.
    if said := re.fullmatch(r'"?sep=([,;\t])"?', first.rstrip("\r\n"), re.IGNORECASE):
        return said[1], skipped + 1, file
    unquoted = re.sub(r'"[^"]*"', "", first)
    return max(",;\t", key=unquoted.count), skipped, itertools.chain([first], file)


def _rows(lines: Iterator[str], separator: str, skipped: int) -> Iterator[list[str]]:
    """Yield the rows, all as long as the first, and pass over blank lines."""
    # The end is marked, since a quote that is never closed would swallow it.
    rows = csv.reader(itertools.chain(lines, [_JOINT]), delimiter=separator)
    width, last = 0, skipped
    for row in rows:
        line, last = last + 1, skipped + rows.line_num
        if row == [_JOINT] or not row or (len(row) == 1 and row[0] and not row[0].strip(" \t")):
            continue
        if row[-1].endswith(_JOINT):
            raise BadLine(f"line {line} has a quote that is never closed", "close it")
        width = width or len(row)
        if len(row) != width:
            more = "put texts that contain the separator into double quotes"
            fewer = "keep the separators of empty cells"
            raise BadLine(
                f"line {line} has {len(row)} field{'s' * (len(row) > 1)}, the header {width}",
                f"correct that line, and {more if len(row) > width else fewer}",
            )
        yield row


def _numbers(texts: Series, mark: str) -> Series | None:
    """Return the texts as numbers, or None if one is no number."""
    import pandas as pd

    if mark == ",":  # a point is then no decimal mark
        texts = texts.str.translate(_SWAP_MARKS)
    try:
        return pd.to_numeric(texts)
    except ValueError:
        return None


def _are_codes(texts: Series, numbers: Series) -> bool:
    whole = not (numbers.dropna() % 1).any()
    return whole and any(map(_LEADING_ZERO.match, texts.dropna().unique()))


def _truth(texts: Series) -> Series:
    """Return truth values if all entries are, and else the texts."""
    return texts.map(_TRUTH) if set(texts.dropna().unique()) <= _TRUTH.keys() else texts


def _without_points(texts: Series, known: Collection[object]) -> Series:
    """Write 1.0 as 1, as pandas does where no entry is missing, unless 1.0 is known."""
    bare = texts.str.replace(r"^([+-]?\d+)\.0+$", r"\1", regex=True)
    return bare.where(~texts.isin(known), texts)
