"""Read tables from files and data frames: the requested columns, with unique names.

`READERS` has a reader for each file format. Nothing is ever unpickled.
"""

from __future__ import annotations

import bz2
import contextlib
import csv
import gzip
import io
import lzma
import math
import sys
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from pseudograd.data.columns import AS_IT_IS, Choices, Refusal, feature_names
from pseudograd.data.delimited import MOST_TITLES, Delimited, read_delimited
from pseudograd.data.encoder import Encoder
from pseudograd.extras import needed_for
from pseudograd.words import first_line, listed, nearest

if TYPE_CHECKING:
    from pandas import DataFrame

Source = Any  # a path, or a pandas or polars data frame; "-" is standard input
_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


@dataclass(frozen=True, eq=False)
class Table:
    """The result of a reader."""

    frame: Any  # a DataFrame, or Delimited if the columns are parsed later
    test: DataFrame | None = None  # the test set, if the file has one
    pixels: tuple[int, ...] | None = None  # the shape of an image, if the columns are pixels
    kept: DataFrame | None = None  # columns to return unchanged
    comma: bool = False  # whether the decimal separator is a comma
    said: str = ""  # a note for the user


def read_table(
    source: Source,
    target: str | None,
    choices: Choices = AS_IT_IS,
    encoder: Encoder | None = None,
    keep: Sequence[str] = (),
) -> Table:
    """Return the requested columns of a file or data frame, parsed, and its test set if any.

    With an encoder the rows are new: they need no labels, and only the encoder's columns are read.
    The columns to ``keep`` are returned unchanged.
    """
    with needed_for("reading tables"):
        import pandas as pd

    place = name_of(source)
    with in_a_sentence(place):
        table = _read(source, target, encoder is not None)
    names = [str(name) for name in table.frame.columns]
    if names.count(str(target)) > 1:
        raise ValueError(f"{place} has more than one column {target!r}: rename them")
    names = unique_names(names)
    if encoder is None:
        _check_choices(place, names, choices, table.pixels is not None)
    _check_names("keep", keep, names, place)
    places, kept = _wanted(names, encoder, choices), [names.index(name) for name in keep]
    if isinstance(table.frame, Delimited):
        # Text columns stay text, even if new entries look like numbers.
        known: dict[str, Collection[object]] = dict.fromkeys(choices.categories, ())
        if encoder is not None:
            known = encoder.known_texts()
        text = replace(table.frame, columns=names)
        with in_a_sentence(place):
            frame, comma = text.typed(places, known, codes=encoder is None)
            as_it_is = text.verbatim(kept) if kept else None
        table = replace(table, comma=comma, said=_assumptions(place, text))
    else:
        frame = table.frame.iloc[:, places].reset_index(drop=True)
        as_it_is = table.frame.iloc[:, kept].reset_index(drop=True) if kept else None
    frame = frame.set_axis(pd.Index([names[at] for at in places], dtype=object), axis=1)
    for part in (frame, table.test):
        if part is not None and part.empty:
            raise ValueError(f"{place} is empty: it must have columns and rows")
    if as_it_is is not None:
        as_it_is = as_it_is.set_axis([*keep], axis=1)
    return replace(table, frame=frame, kept=as_it_is)


def _assumptions(place: str, text: Delimited) -> str:
    """Return a note on what was assumed to read a text file; empty if nothing was."""
    said = [without_titles(text.titles)] if text.titles else []
    if text.assumed:
        fix = "save it as UTF-8 if letters look wrong"
        said.append(f"is not UTF-8 and was read as {text.assumed}: {fix}")
    return f"{place} {' and '.join(said)}" if said else ""


def name_of(source: Source) -> str:
    """Return the name of a file or data frame for messages."""
    if not isinstance(source, (str, Path)):
        return "the frame"
    return "standard input" if str(source) == "-" else str(source)


def _read(source: Source, target: str | None, new: bool) -> Table:
    if not isinstance(source, (str, Path)):
        return Table(_as_pandas(source))
    with opened(Path(source)) as (file, suffix):
        if suffix not in READERS:
            raise Refusal(
                f"must end in one of {', '.join(READERS)}, or be such a file compressed as "
                f"{', '.join((*_OPENERS, '.zip'))}"
            )
        return READERS[suffix](file, target or "", new)


def _as_pandas(frame: Any) -> DataFrame:
    """Return a data frame of pandas, polars or another library as a pandas data frame."""
    import pandas as pd

    if isinstance(frame, pd.DataFrame):
        return frame
    if not hasattr(frame, "to_pandas") and hasattr(frame, "collect"):  # a polars LazyFrame
        frame = frame.collect()
    if not hasattr(frame, "to_pandas"):
        kind = type(frame).__name__
        raise Refusal(f"must be a path, or a pandas or polars data frame, not {kind}")
    with needed_for("a polars frame"):
        found: DataFrame = frame.to_pandas()
    return found


def unique_names(names: Sequence[str]) -> list[str]:
    """Return unique column names; duplicates and empty names are renamed as in pandas."""
    given: dict[str, None] = {}
    for at, name in enumerate(names):
        first = name = (name.strip() and name) or f"Unnamed: {at}"
        count = 0
        while name in given:
            count += 1
            name = f"{first}.{count}"
        given[name] = None
    return [*given]


def _check_choices(place: str, names: list[str], choices: Choices, pictures: bool) -> None:
    """Raise if an option names a column that does not exist."""
    options = {
        "drop": choices.drop,
        "categories": choices.categories,
        "numbers": choices.numbers,
        "group": [choices.group] if choices.group is not None else [],
    }
    for option, given in options.items():
        if given and pictures:
            raise ValueError(
                f"{option!r} cannot be set for {place}, which has images: leave it out"
            )
        _check_names(option, given, names, place)


def _check_names(option: str, given: Sequence[str], names: list[str], place: str) -> None:
    if wrong := [name for name in given if name not in names]:
        there = nearest(wrong[0], names) if len(wrong) == 1 else listed(names)
        raise ValueError(f"{option!r} names {listed(wrong)}: {place} has {there}")


@contextlib.contextmanager
def in_a_sentence(place: str) -> Iterator[None]:
    """Turn errors of reading a file into one sentence that says why."""
    try:
        yield
    except FileNotFoundError:
        raise
    except Refusal as refusal:
        raise ValueError(f"{place} {refusal}") from refusal
    except (
        *(OSError, ValueError, EOFError, KeyError, csv.Error),
        *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, NotImplementedError),
    ) as problem:
        kind = Path(place).suffix.lower() or "table"
        reason = first_line(problem)
        raise ValueError(
            f"{place} cannot be read as a {kind} file ({reason}): save it again"
        ) from problem


def _wanted(names: list[str], encoder: Encoder | None, choices: Choices) -> list[int]:
    """Return the positions of the columns to use.

    For new rows these are the model's columns; or all, if one of those is missing, so that
    `Encoder.transform` can report the difference.
    """
    wanted = {*names} - {*choices.drop}
    if encoder is not None:
        columns = {*encoder.kinds()}
        wanted = {*columns, encoder.target} if columns <= {*names} else {*names}
    return [at for at, name in enumerate(names) if name in wanted]


# --- files: open and decompress -----------------------------------------------------------------


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[BinaryIO, str]]:
    """Open a file, decompressed, or standard input (text) if the path is "-".

    Yields the open file and the suffix of its format.
    """
    if str(path) == "-":
        content = sys.stdin.buffer.read()
        yield io.BytesIO(content), ".jsonl" if content.startswith(b"{") else ".csv"
        return
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: check the path")
    if path.is_dir():
        raise Refusal("is a folder: name a file")
    suffix = path.suffix.lower()
    if suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if not name.endswith("/")]
            if len(names) != 1:
                raise Refusal(f"contains {len(names)} files: make an archive of a single one")
            yield io.BytesIO(archive.read(names[0])), Path(names[0]).suffix.lower()
    elif suffix in _OPENERS:
        with _OPENERS[suffix](path) as file:  # in memory, since readers jump back and forth
            yield io.BytesIO(file.read()), Path(path.stem).suffix.lower() or ".csv"
    else:
        with path.open("rb") as file:
            yield file, suffix


# --- formats: a reader takes an open file, the target, and whether the rows are new --------------


def read_text(file: BinaryIO, target: str, new: bool) -> Table:
    """Read a .csv file or another delimited text file."""
    return Table(read_delimited(file))


def read_parquet(file: BinaryIO, target: str, new: bool) -> Table:
    """Read a .parquet file."""
    with needed_for("reading .parquet files"):
        import pandas as pd
        import pyarrow  # noqa: F401  (so that a missing package gets its own message)

    return Table(pd.read_parquet(file, engine="pyarrow"))


def read_arrow(file: BinaryIO, target: str, new: bool) -> Table:
    """Read a .feather or .arrow file."""
    with needed_for("reading .feather and .arrow files"):
        import pandas as pd
        import pyarrow as pa

    if file.read(4) == b"\xff\xff\xff\xff":  # a stream, which Hugging Face's datasets writes
        file.seek(0)
        return Table(pa.ipc.open_stream(file).read_pandas())
    file.seek(0)
    return Table(pd.read_feather(file))


def read_lines_of_json(file: BinaryIO, target: str, new: bool) -> Table:
    """Read a .jsonl file, one object per line."""
    import pandas as pd

    return Table(pd.read_json(file, lines=True, dtype=False, convert_dates=False))


def read_excel(file: BinaryIO, target: str, new: bool) -> Table:
    """Read the first sheet of an .xlsx file."""
    with needed_for("reading .xlsx files"):
        import openpyxl  # noqa: F401  (so that a missing package gets its own message)
        import pandas as pd

    with pd.ExcelFile(file, engine="openpyxl") as book:
        first, *others = book.sheet_names
        filled = pd.read_excel(book, header=None, nrows=MOST_TITLES).notna().sum(axis=1)
        # Titles fill less than half as many cells as the header.
        titles = int((2 * filled >= filled.max()).argmax()) if len(filled) else 0
        frame = pd.read_excel(book, skiprows=titles)
    names = ["" if str(name).startswith("Unnamed: ") else str(name).strip() for name in frame]
    said = [f"only the first sheet, {first!r}, is read"] if others else []
    said += [f"{first!r} {without_titles(titles)}"] if titles else []
    return Table(frame.set_axis(names, axis=1), said="; ".join(said))


def without_titles(count: int) -> str:
    """Return a note that lines above the header are skipped; it continues after the file name."""
    return f"is read from line {count + 1} on, the first that looks like a header"


def read_npz(file: BinaryIO, target: str, new: bool) -> Table:
    """Read the arrays X and ``target``, and those of the test set unless the rows are new."""
    arrays = arrays_in(file)
    features = array_in(arrays, "X")
    labelled = not new or target in arrays.files
    frame = _frame_of(features, target if labelled else None, arrays)
    test = None
    if not new and not {"X_test", target + "_test"}.isdisjoint(arrays.files):
        test = _frame_of(array_in(arrays, "X_test"), target, arrays, "_test")
        if list(test.columns) != list(frame.columns):
            raise Refusal(
                f"has {frame.shape[1] - 1} columns in 'X', but {test.shape[1] - 1} in 'X_test': "
                "save both with the same columns"
            )
    pictures = features.dtype == np.uint8 and features.ndim > 2
    return Table(frame, test, features.shape[1:] if pictures else None)


def arrays_in(file: BinaryIO) -> Any:
    """Return the arrays of an .npz file by name."""
    if not zipfile.is_zipfile(file):
        raise Refusal(
            "is not an .npz file despite its name: make one with numpy.savez, or rename it"
        )
    file.seek(0)
    return np.load(file, allow_pickle=False)


def array_in(arrays: Any, name: str) -> NDArray[Any]:
    """Return one of the arrays; raise if it would have to be unpickled."""
    if name not in arrays.files:
        raise Refusal(f"has no array {name!r}: it has {nearest(name, arrays.files)}")
    try:
        found: NDArray[Any] = arrays[name]
    except ValueError as problem:
        # Unpickling can run arbitrary code, so we never do it.
        raise Refusal(
            f"has Python objects in array {name!r}: save it as numbers or text"
        ) from problem
    return found


def _frame_of(
    features: NDArray[Any], target: str | None, arrays: Any, suffix: str = ""
) -> DataFrame:
    """Return the training or test arrays as a data frame, with labels if ``target`` is given."""
    import pandas as pd

    width = math.prod(features.shape[1:])
    if features.ndim < 2 or not width:
        raise Refusal(f"has an array 'X{suffix}' without columns: make it 2-dimensional")
    frame = pd.DataFrame(features.reshape(-1, width), columns=feature_names(width))
    if target is not None:
        labels = array_in(arrays, target + suffix)
        if labels.shape != features.shape[:1]:
            raise Refusal(
                f"has {len(features)} rows in 'X{suffix}', but the shape {labels.shape} in "
                f"{target + suffix!r}: give one label for each row"
            )
        frame[target] = labels
    return frame


Reader = Callable[[BinaryIO, str, bool], Table]
READERS: dict[str, Reader] = {
    ".csv": read_text,
    ".tsv": read_text,
    ".txt": read_text,
    ".xlsx": read_excel,
    ".parquet": read_parquet,
    ".feather": read_arrow,
    ".arrow": read_arrow,
    ".jsonl": read_lines_of_json,
    ".npz": read_npz,
}
