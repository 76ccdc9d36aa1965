"""Text files of rows and columns, such as .csv: read once, checked by line, typed by pandas."""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

from pseudograd.data.columns import Refusal
from pseudograd.words import counted

if TYPE_CHECKING:
    from pandas import DataFrame, Series

_END = "\ud800"  # follows the last line; no UTF-8 file contains it
_SEPARATORS = ",;\t|"
_CHUNK = 2**24  # bytes looked at together
# pandas' own, without "None", which may be a label or a category.
_GAPS = ["", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN"]
_GAPS += ["<NA>", "N/A", "NA", "NULL", "NaN", "n/a", "nan", "null"]


@dataclass(frozen=True, eq=False)
class Delimited:
    """A text file, the names in its header, and what separates them, after ``skipped`` lines.

    ``assumed`` names an encoding other than UTF-8.
    """

    content: bytes
    columns: list[str]
    separator: str
    skipped: int
    assumed: str = ""

    def typed(
        self, places: Sequence[int], known: Mapping[str, Collection[object]], *, codes: bool
    ) -> tuple[DataFrame, bool]:
        """Return the columns at these places, as numbers, truth values or texts.

        The ``known`` ones, with texts they are known to have, stay texts even if they look like
        numbers. With ``codes`` so do whole numbers if one begins with a zero, like 007.

        Returns:
            The columns, called by their places, and whether the decimal mark is a comma.

        """
        import pandas as pd

        if not self.columns:
            return pd.DataFrame(), False
        texts = {at: str for at in places if self.columns[at] in known}
        mark = "."
        if self.separator == ";":
            # Decimals mostly have commas then: take what makes more numbers.
            first = {mark: self._read(places, decimal=mark, nrows=10_000) for mark in ",."}
            mark = max(first, key=lambda mark: first[mark].select_dtypes("number").shape[1])
        frame = self._read(places, dtype=texts, decimal=mark, low_memory=False)
        for at in texts:
            frame[at] = _without_points(frame[at], known[self.columns[at]])
        # Looking for a code in the file is quicker than reading all whole numbers again.
        if codes and re.search(rb'[\n\r"%b] *[+-]?0\d' % self.separator.encode(), self.content):
            numbers = frame.select_dtypes("number")
            whole = [at for at in numbers if not (numbers[at].dropna() % 1).any()]
            for at, entries in self._read(whole, dtype=str).items():
                if entries.str.match(r" *[+-]?0\d", na=False).any():
                    frame[at] = entries
        return frame, mark == ","

    def verbatim(self, places: Sequence[int]) -> DataFrame:
        """Return the columns at these places as the texts that are in the file, in this order."""
        return self._read(places, dtype=str, na_filter=False)[[*places]]

    def _read(self, places: Sequence[int], **options: Any) -> DataFrame:
        """Have pandas read some columns, and call them by their places."""
        import pandas as pd

        file, names = io.BytesIO(self.content), range(len(self.columns))
        options |= {"sep": self.separator, "skiprows": self.skipped, "encoding": "utf-8-sig"}
        options |= {"keep_default_na": False, "na_values": _GAPS}
        return pd.read_csv(file, header=0, names=names, usecols=places, **options)


def _without_points(texts: Series, known: Collection[object]) -> Series:
    """Write 1.0 as 1, as pandas does where no entry is missing, unless 1.0 is known."""
    bare = texts.str.replace(r"^([+-]?\d+)\.0+$", r"\1", regex=True)
    return bare.where(~texts.isin(known), texts)


def read_delimited(file: BinaryIO) -> Delimited:
    """Read a text file whose columns are separated by commas, semicolons, tabs or bars."""
    content, assumed = _as_utf8(file.read())
    lines = io.TextIOWrapper(io.BytesIO(content), "utf-8-sig", newline="")
    at, first = next(((at, line) for at, line in enumerate(lines) if line.strip()), (0, ""))
    # Excel writes a line that only says what separates.
    if said := re.fullmatch(r'"?sep=([,;\t|])"?', first.rstrip("\r\n"), re.IGNORECASE):
        separator, skipped = said[1], at + 1
    else:
        separator, skipped = max(_SEPARATORS, key=re.sub(r'"[^"]*"', "", first).count), 0
    lines.seek(0)
    limit = csv.field_size_limit(2**31 - 1)  # texts may have any length
    try:
        rows = csv.reader(
            itertools.chain(itertools.islice(lines, skipped, None), [_END]), delimiter=separator
        )
        header = _header(rows, skipped)
        return Delimited(content, header, separator, skipped, assumed)
    finally:
        csv.field_size_limit(limit)


def _header(rows: Any, skipped: int) -> list[str]:
    """Return the first row once all are as long, since pandas fills short ones with gaps."""
    header: list[str] = []
    line = skipped + 1
    for row in rows:
        start, line = line, skipped + rows.line_num + 1
        blank = not row or (len(row) == 1 and row[0] and not row[0].strip(" \t"))
        if blank or row == [_END]:
            continue
        header = header or row
        if row[-1].endswith(_END):
            wrong, fix = "a quote that is never closed", "close it"
        elif len(row) != len(header):
            wrong = f"{counted(len(row), 'field')}, the header {len(header)}"
            more = "put texts that contain the separator into double quotes"
            fewer = "keep the separators of empty cells"
            fix = f"correct that line, and {more if len(row) > len(header) else fewer}"
        else:
            continue
        raise Refusal(f"cannot be read as a table (line {start} has {wrong}): {fix}")
    return header


def _as_utf8(content: bytes) -> tuple[bytes, str]:
    """Return a text as UTF-8, and the encoding that was assumed if it is in none that shows."""
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
        # The five bytes that this code page leaves open are control characters in Latin-1.
        text = content.decode("cp1252", errors="replace")
        return text.encode(), "Windows-1252"
    return content, ""
