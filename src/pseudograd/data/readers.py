"""Readers of tables, one for each format. Nothing is ever unpickled.

A reader takes an open file, the target, and whether the rows are new; new rows need no labels.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from pseudograd.data.columns import Refusal, feature_names
from pseudograd.data.delimited import MOST_TITLES, read_delimited
from pseudograd.data.memory import check_size, check_unpacked
from pseudograd.extras import needed_for
from pseudograd.words import nearest

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, eq=False)
class Table:
    """The result of a reader."""

    frame: Any  # a DataFrame, or Delimited if the columns are parsed later
    test: DataFrame | None = None  # the test set, if the file has one
    pixels: tuple[int, ...] | None = None  # the shape of an image, if the columns are pixels
    kept: DataFrame | None = None  # columns to return unchanged
    comma: bool = False  # whether the decimal separator is a comma
    said: str = ""  # a note for the user


def read_text(file: BinaryIO, target: str, new: bool) -> Table:
    """Read a .csv file or another delimited text file."""
    return Table(read_delimited(file))


def read_parquet(file: BinaryIO, target: str, new: bool) -> Table:
    """Read a .parquet file."""
    with needed_for("reading .parquet files"):
        import pandas as pd
        import pyarrow.parquet as pq

    facts = pq.read_metadata(file)
    check_size(8 * facts.num_rows * facts.num_columns, "would take")
    return Table(pd.read_parquet(file, engine="pyarrow"))


def read_arrow(file: BinaryIO, target: str, new: bool) -> Table:
    """Read a .feather or .arrow file."""
    with needed_for("reading .feather and .arrow files"):
        import pyarrow as pa
        from pyarrow import feather

    start = file.read(6)
    file.seek(0)
    if start.startswith(b"FEA1"):
        return Table(feather.read_feather(file))
    if start == b"ARROW1":
        whole = pa.ipc.open_file(file)
        batches = (whole.get_batch(at) for at in range(whole.num_record_batches))
    else:
        whole = batches = pa.ipc.open_stream(file)
    held, size = [], 0
    for batch in batches:
        held.append(batch)
        size += batch.nbytes
        check_size(2 * size, "would take")
    return Table(pa.Table.from_batches(held, whole.schema).to_pandas())


def read_lines_of_json(file: BinaryIO, target: str, new: bool) -> Table:
    """Read a .jsonl file, one object per line."""
    import pandas as pd

    return Table(pd.read_json(file, lines=True, dtype=False, convert_dates=False))


def read_excel(file: BinaryIO, target: str, new: bool) -> Table:
    """Read the first sheet of an .xlsx file."""
    with needed_for("reading .xlsx files"):
        import openpyxl  # noqa: F401  (so that a missing package gets its own message)
        import pandas as pd

    with zipfile.ZipFile(file) as archive:
        check_unpacked(sum(one.file_size for one in archive.infolist()), _size(file))
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


def _size(file: BinaryIO) -> int:
    size = file.seek(0, 2)
    file.seek(0)
    return size


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
    """Return the arrays of an .npz file by name, after checking their headers."""
    if file.read(6) == b"\x93NUMPY":
        raise ValueError("it holds a single array")
    if not zipfile.is_zipfile(file):
        raise Refusal(
            "is not an .npz file despite its name: make one with numpy.savez, or rename it"
        )
    _check_arrays(file)
    return np.load(file, allow_pickle=False)


def _check_arrays(file: BinaryIO) -> None:
    """Raise if an array's header does not match its size, or if it is too large."""
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            with archive.open(member) as array:
                # Versions 2 and 3 differ only in the encoding of field names.
                first = np.lib.format.read_magic(array) == (1, 0)
                read = (
                    np.lib.format.read_array_header_1_0
                    if first
                    else np.lib.format.read_array_header_2_0
                )
                shape, _, kind = read(array)
                claimed = array.tell() + math.prod(shape) * kind.itemsize
            if not kind.hasobject and claimed != member.file_size:
                name = member.filename.removesuffix(".npy")
                raise Refusal(
                    f"has an array {name!r} of {member.file_size:,} bytes, but its header "
                    f"announces {claimed:,}: save it again"
                )
            check_unpacked(member.file_size, member.compress_size)
    file.seek(0)


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
