"""Text files of rows and columns, such as .csv: read once, kept as texts, then typed by column.

The csv module reads them, since pandas takes a line that is too short for one with empty cells.
"""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from pseudograd.data.columns import Refusal

if TYPE_CHECKING:
    from pandas import DataFrame, Series

_BLOCK = 1000  # rows that are Python objects at a time
_JOINT, _UNUSED = "\x1e", "\x1f"  # between the entries of a packed column, and never in them
_LEADING_ZERO = re.compile(rf"(?:^|{_JOINT}) *[+-]?0\d")


@dataclass(frozen=True, eq=False)
class Texts:
    """The columns of a text file, each packed into one string: about as large as the file.

    Attributes:
        columns: Their names, as they stand in the file.
        marks: The decimal marks that numbers may have, the likelier first.

    """

    columns: list[str]
    marks: str
    _packed: list[str]

    def typed(
        self, places: Sequence[int], known: Mapping[str, Collection[object]], *, codes: bool
    ) -> DataFrame:
        """Return the columns at these places, as numbers, truth values or texts.

        The ``known`` ones, with texts they are known to have, stay texts even if they look like
        numbers. With ``codes`` so do whole numbers if one begins with a zero, like 007.
        """
        import pandas as pd

        names = pd.Index([self.columns[at] for at in places], dtype=object)
        if not any(self._packed):
            return pd.DataFrame(columns=names)
        mark = self._mark([at for at in places if self.columns[at] not in known])
        columns = {}
        for at in places:
            packed, name = self._packed[at], self.columns[at]
            if name in known:
                columns[at] = _without_points(_typed(packed, dtype=str), known[name])
                continue
            column = _typed(packed, decimal=mark)
            whole = column.dtype.kind in "iuf" and not (column.dropna() % 1).any()
            if codes and whole and _LEADING_ZERO.search(packed):
                column = _typed(packed, dtype=str)
            columns[at] = column
        return pd.DataFrame(columns).set_axis(names, axis=1)

    def _mark(self, places: Sequence[int]) -> str:
        """Return the decimal mark that makes more of the columns numbers."""
        if len(self.marks) == 1:
            return self.marks
        counts = Counter(
            mark
            for at in places
            for mark in self.marks
            if _typed(self._packed[at], decimal=mark).dtype.kind in "iuf"
        )
        return max(self.marks, key=counts.__getitem__)


def _typed(packed: str, **options: Any) -> Series:
    """Have pandas decide on the type of a column, and on what counts as missing."""
    import pandas as pd

    frame = pd.read_csv(
        io.StringIO(packed),
        names=[0],
        sep=_UNUSED,
        lineterminator=_JOINT,
        quoting=csv.QUOTE_NONE,
        skip_blank_lines=False,
        low_memory=False,
        **options,
    )
    return frame[0]


def _without_points(texts: Series, known: Collection[object]) -> Series:
    """Write 1.0 as 1, as pandas does where no entry is missing, unless 1.0 is known."""
    bare = texts.str.replace(r"^([+-]?\d+)\.0+$", r"\1", regex=True)
    return bare.where(~texts.isin(known), texts)


def read_delimited(path: Path) -> Texts:
    """Read a text file whose columns are separated by commas, semicolons or tabs."""
    limit = csv.field_size_limit(2**31 - 1)  # texts may have any length
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            separator, skipped, lines = _separator(file)
            rows = _rows(path, lines, separator, skipped)
            header = next(rows, [])
            blocks, count = [[""] * len(header)], 0
            while block := list(itertools.islice(rows, _BLOCK)):
                blocks.append([_JOINT.join([*column, ""]) for column in zip(*block, strict=True)])
                count += len(block)
    finally:
        csv.field_size_limit(limit)
    packed = ["".join(parts) for parts in zip(*blocks, strict=True)]
    if any(column.count(_JOINT) != count or _UNUSED in column for column in packed):
        raise ValueError("it has control characters in its texts")
    return Texts(header, ",." if separator == ";" else ".", packed)


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


def _rows(path: Path, lines: Iterator[str], separator: str, skipped: int) -> Iterator[list[str]]:
    """Yield the rows, all as long as the first, and pass over blank lines."""
    # The end is marked, since a quote that is never closed would swallow it.
    rows = csv.reader(itertools.chain(lines, [_JOINT]), delimiter=separator)
    width, last = 0, skipped
    for row in rows:
        line, last = last + 1, skipped + rows.line_num
        if row == [_JOINT] or not row or (len(row) == 1 and row[0] and not row[0].strip(" \t")):
            continue
        found = f"{path} cannot be read as a table (line {line} has"
        if row[-1].endswith(_JOINT):
            raise Refusal(f"{found} a quote that is never closed): close it")
        width = width or len(row)
        if len(row) != width:
            more = "put texts that contain the separator into double quotes"
            fewer = "keep the separators of empty cells"
            raise Refusal(
                f"{found} {len(row)} field{'s' * (len(row) > 1)}, the header {width}): correct "
                f"that line, and {more if len(row) > width else fewer}"
            )
        yield row
