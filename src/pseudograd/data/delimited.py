"""Delimited text files such as .csv: read once, checked line by line, parsed by pandas."""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import re
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

from pseudograd.data.columns import Refusal
from pseudograd.words import counted

if TYPE_CHECKING:
    from pandas import DataFrame, Series

_END = "\ud800"  # follows the last line; no UTF-8 file contains it
_SEPARATORS = ",;\t|"
BLANKS = r"\s+"  # any whitespace, as a separator for pandas
MOST_TITLES = 20  # lines or rows that are searched for the header
_CHUNK = 2**24  # bytes decoded at a time
# pandas' default `na_values` without "None", which may be a label or a category.
_GAPS = ["", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN"]
_GAPS += ["<NA>", "N/A", "NA", "NULL", "NaN", "n/a", "nan", "null"]


@dataclass(frozen=True, eq=False)
class Delimited:
    """A text file, its column names and separator; the header follows ``skipped`` lines.

    ``assumed`` is the encoding if it is not UTF-8; ``titles`` counts the lines before the header.
    """

    content: bytes
    columns: list[str]
    separator: str
    skipped: int
    assumed: str = ""
    titles: int = 0

    def typed(
        self, places: Sequence[int], known: Mapping[str, Collection[object]], *, codes: bool
    ) -> tuple[DataFrame, bool]:
        """Return the columns at these positions as numbers, booleans or strings.

        Args:
            places: The positions of the columns.
            known: Columns that stay strings even if they look like numbers, and known strings of
                each.
            codes: Whether whole numbers also stay strings if one has a leading zero, like 007.

        Returns:
            The columns, named by their positions, and whether the decimal separator is a comma.

        """
        import pandas as pd

        if not self.columns:
            return pd.DataFrame(), False
        texts = {at: str for at in places if self.columns[at] in known}
        decimal = "."
        if self.separator == ";":
            # Such files often have decimal commas: use the separator that parses more columns.
            first = {mark: self._read(places, decimal=mark, nrows=10_000) for mark in ",."}
            decimal = max(first, key=lambda mark: first[mark].select_dtypes("number").shape[1])
        frame = self._read(places, dtype=texts, decimal=decimal, low_memory=False)
        for at in texts:
            frame[at] = _without_points(frame[at], known[self.columns[at]])
        # Searching the bytes is faster than parsing all integer columns a second time.
        numbers = frame.select_dtypes("number")
        whole = [at for at in numbers if not (numbers[at].dropna() % 1).any()]
        mark = b" " if self.separator == BLANKS else re.escape(self.separator.encode())
        if codes and whole and re.search(rb'[\n\r"%b] *[+-]?0\d' % mark, self.content):
            for at, entries in self._read(whole, dtype=str).items():
                if entries.str.match(r" *[+-]?0\d", na=False).any():
                    frame[at] = entries
        return frame, decimal == ","

    def verbatim(self, places: Sequence[int]) -> DataFrame:
        """Return the columns at these positions as unparsed strings, in this order."""
        return self._read(places, dtype=str, na_filter=False)[[*places]]

    def _read(self, places: Sequence[int], **options: Any) -> DataFrame:
        """Return some columns as pandas reads them, named by their positions."""
        import pandas as pd

        file, names = io.BytesIO(self.content), range(len(self.columns))
        options |= {"sep": self.separator, "skiprows": self.skipped, "encoding": "utf-8-sig"}
        options |= {"keep_default_na": False, "na_values": _GAPS, "skipinitialspace": True}
        return pd.read_csv(file, header=0, names=names, usecols=places, **options)


def _without_points(texts: Series, known: Collection[object]) -> Series:
    """Return strings with 1.0 as 1, unless "1.0" is known.

    pandas reads whole numbers as floats if the column has missing values.
    """
    bare = texts.str.replace(r"^([+-]?\d+)\.0+$", r"\1", regex=True)
    return bare.where(~texts.isin(known), texts)


def read_delimited(file: BinaryIO) -> Delimited:
    """Read a text file whose columns are separated by commas, semicolons, tabs, bars or spaces."""
    content, assumed = _as_utf8(file.read())
    try:
        return _parsed(content, 0, assumed)
    except Refusal:
        if not (titles := _titles(content)):
            raise
        return _parsed(content, titles, assumed)


def _parsed(content: bytes, skipped: int, assumed: str) -> Delimited:
    """Parse a file whose header follows ``skipped`` lines."""
    lines, titles = _lines(content), skipped
    found = ((at, line) for at, line in enumerate(lines) if at >= skipped and line.strip())
    at, first = next(found, (0, ""))
    # Excel may write a first line such as "sep=;".
    if said := re.fullmatch(r'"?sep=([,;\t|])"?', first.rstrip("\r\n"), re.IGNORECASE):
        separator, skipped = said[1], at + 1
    else:
        separator, count = _separator(first)
        if not count and " " in _unquoted(first):
            separator = BLANKS
    lines.seek(0)
    limit = csv.field_size_limit(2**31 - 1)  # strings may have any length
    try:
        left = itertools.chain(itertools.islice(lines, skipped, None), [_END])
        rows: Any = csv.reader(left, delimiter=separator[0])
        if separator == BLANKS:
            stripped = (line.strip() for line in left)
            rows = csv.reader(stripped, delimiter=" ", skipinitialspace=True)
        names = [name.strip() for name in _checked_header(rows, skipped, separator)]
        return Delimited(content, names, separator, skipped, assumed, titles)
    finally:
        csv.field_size_limit(limit)


def _lines(content: bytes) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(content), "utf-8-sig", newline="")


def _separator(line: str) -> tuple[str, int]:
    """Return the most frequent separator of a line outside quotes, and its count."""
    separator = max(_SEPARATORS, key=_unquoted(line).count)
    return separator, _unquoted(line).count(separator)


def _unquoted(line: str) -> str:
    return re.sub(r'"[^"]*"', "", line).rstrip("\r\n")


def _titles(content: bytes) -> int:
    """Return the number of lines before the header, with less than half the usual separators."""
    counts = [_separator(line)[1] for line in itertools.islice(_lines(content), MOST_TITLES)]
    usual = statistics.mode(filter(None, counts)) if any(counts) else 0
    return next(at for at, count in enumerate(counts) if 2 * count >= usual) if usual else 0


def _is_blank(row: list[str]) -> bool:
    return not row or (len(row) == 1 and bool(row[0]) and not row[0].strip(" \t"))


def _checked_header(rows: Any, skipped: int, separator: str) -> list[str]:
    """Return the header after checking the length of every row: pandas silently pads short rows."""
    header: list[str] = []
    wanted, line = 0, skipped + 1
    for row in rows:
        start, line = line, skipped + rows.line_num + 1
        if _is_blank(row) or row == [_END]:
            continue
        if len(header) == wanted == len(row) - 1 and separator in (BLANKS, "\t"):
            wanted += 1  # R writes row names without a column name
        header, wanted = header or row, wanted or len(row)
        if row[-1].endswith(_END):
            wrong, fix = "a quote that is never closed", "close it"
        elif len(row) != wanted and row is not header:
            wrong = f"{counted(len(row), 'field')}, the header {len(header)}"
            more = "put fields that contain the separator in double quotes"
            fewer = "keep the separators of empty cells"
            fix = f"correct that line, and {more if len(row) > wanted else fewer}"
        else:
            continue
        raise Refusal(f"cannot be read as a table (line {start} has {wrong}): {fix}")
    return [""] * (wanted - len(header)) + header


def _as_utf8(content: bytes) -> tuple[bytes, str]:
    """Return the content as UTF-8, and the name of the encoding if it was guessed."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return content.decode("utf-16").encode(), ""
    if b"\0" in content[:_CHUNK]:
        raise Refusal("is not a text file: save it again as UTF-8")
    try:
        decoder = codecs.getincrementaldecoder("utf-8")()
        for start in range(0, len(content), _CHUNK):
            decoder.decode(content[start : start + _CHUNK])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        # A superset of Latin-1 except for control characters; five bytes are undefined.
        text = content.decode("cp1252", errors="replace")
        return text.encode(), "Windows-1252"
    return content, ""
