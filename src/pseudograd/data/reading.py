"""Files of tables: a reader for each format, and the columns that are wanted of them."""

from __future__ import annotations

import contextlib
import csv
import math
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pseudograd.data.columns import Refusal, feature_names, how_to_drop, kind_of, named
from pseudograd.data.delimited import Delimited, read_delimited
from pseudograd.data.encoder import Encoder
from pseudograd.extras import needed_for
from pseudograd.words import listed, nearest

if TYPE_CHECKING:
    from pandas import DataFrame


class OptionError(ValueError):
    """An option that does not fit the data: its name in Python, and the rest of the sentence."""

    def __init__(self, option: str, complaint: str) -> None:
        super().__init__(f"{option!r} {complaint}")
        self.option, self.complaint = option, complaint


@dataclass(frozen=True, eq=False)
class Table:
    """What a reader returns."""

    frame: DataFrame | Delimited  # all columns; those of a text file are typed later
    test: DataFrame | None = None  # the test part, if the file has one
    pixels: tuple[int, ...] | None = None  # the shape of a picture, if the columns are pixels


def read_csv(path: Path, target: str, new: bool) -> Table:
    """Read a .csv file."""
    return Table(read_delimited(path))


def read_parquet(path: Path, target: str, new: bool) -> Table:
    """Read a .parquet file."""
    with needed_for("reading .parquet files"):
        import pandas as pd
        import pyarrow  # noqa: F401  (so that its absence is told from other problems)

    return Table(pd.read_parquet(path, engine="pyarrow").reset_index(drop=True))


def read_npz(path: Path, target: str, new: bool) -> Table:
    """Read the arrays X and ``target``, and those of the test part unless the rows are new."""
    with path.open("rb") as file:
        try:
            arrays = np.load(file, allow_pickle=False)
        except ValueError as problem:  # NumPy takes anything else for a pickle
            raise Refusal(
                f"{path} is not an .npz file, whatever its name says: make one with numpy.savez, "
                "or rename it"
            ) from problem
        if isinstance(arrays, np.ndarray):
            raise ValueError("it holds a single array")
        features = _array(path, arrays, "X")
        labelled = not new or target in arrays.files
        frame = _frame_of(path, features, target if labelled else None, arrays)
        test = None
        if not new and not {"X_test", target + "_test"}.isdisjoint(arrays.files):
            test = _frame_of(path, _array(path, arrays, "X_test"), target, arrays, "_test")
    pictures = features.dtype == np.uint8 and features.ndim > 2
    return Table(frame, test, features.shape[1:] if pictures else None)


def _array(path: Path, arrays: Any, name: str) -> NDArray[Any]:
    if name not in arrays.files:
        raise Refusal(f"{path} has no array {name!r}: it has {nearest(name, arrays.files)}")
    try:
        found: NDArray[Any] = arrays[name]
    except ValueError as problem:
        # Unpickling runs whatever code the file holds, so we never do it.
        raise Refusal(
            f"{path} has Python objects in array {name!r}: save it as numbers or text"
        ) from problem
    return found


def _frame_of(
    path: Path, features: NDArray[Any], target: str | None, arrays: Any, suffix: str = ""
) -> DataFrame:
    """Return a part of an .npz file as a frame, with its labels if they have a name."""
    import pandas as pd

    width = math.prod(features.shape[1:])
    if features.ndim < 2 or not width:
        raise Refusal(f"{path} has an array 'X{suffix}' without columns: make it 2-dimensional")
    frame = pd.DataFrame(features.reshape(-1, width), columns=feature_names(width))
    if target is not None:
        labels = _array(path, arrays, target + suffix)
        if labels.shape != features.shape[:1]:
            raise Refusal(
                f"{path} has {len(features)} rows in 'X{suffix}', but the shape {labels.shape} in "
                f"{target + suffix!r}: give one label for each row"
            )
        frame[target] = labels
    return frame


# A reader takes the path, the target, and whether the rows are new, so that labels may be missing.
Reader = Callable[[Path, str, bool], Table]
READERS: dict[str, Reader] = {".csv": read_csv, ".parquet": read_parquet, ".npz": read_npz}


def read_table(
    path: Path,
    target: str | None,
    encoder: Encoder | None = None,
    drop: Sequence[str] = (),
    categories: Sequence[str] = (),
) -> tuple[DataFrame, DataFrame | None, tuple[int, ...] | None]:
    """Return the wanted columns of a file, its test part and the shape of its pictures, if any.

    With an encoder the rows are new: they need no labels, and other columns are left out.
    """
    suffix = path.suffix.lower()
    if suffix not in READERS:
        raise ValueError(f"{path} must end in one of {', '.join(READERS)}")
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: check the path")
    with needed_for("reading tables"):
        import pandas  # noqa: F401
    with _in_a_sentence(path):
        table = READERS[suffix](path, target or "", encoder is not None)
    names = list(map(str, table.frame.columns))
    if drop and suffix == ".npz":
        raise OptionError("drop", f"cannot be set for {path}: leave columns out of X")
    if categories and table.pixels is not None:
        raise OptionError("categories", f"cannot be set for {path}, which has pictures")
    for option, given in {"drop": drop, "categories": categories}.items():
        for name in given:
            if name not in names:
                raise OptionError(option, f"names {name!r}: {path} has {nearest(name, names)}")
    places = _wanted(path, names, target, encoder, drop)
    # What was text stays text, even where it looks like numbers.
    known: dict[str, Collection[object]] = dict.fromkeys(categories, ())
    if encoder is not None:
        known = encoder.known_texts()
    if isinstance(table.frame, Delimited):
        with _in_a_sentence(path):
            frame = table.frame.typed(places, known, codes=encoder is None)
    else:
        frame = _with_texts(named(table.frame.iloc[:, places]), known)
    test = None if table.test is None else _with_texts(named(table.test), known)
    for part in (frame, test):
        if part is not None and part.empty:
            raise ValueError(f"{path} is empty: it must have columns and rows")
    return frame, test, table.pixels


@contextlib.contextmanager
def _in_a_sentence(path: Path) -> Iterator[None]:
    """Say in one sentence why a file cannot be read."""
    failed = f"{path} cannot be read as a {path.suffix.lower()} file"
    try:
        yield
    except Refusal:
        raise
    except UnicodeDecodeError as problem:
        raise ValueError(f"{failed} (it is not UTF-8): save it again as UTF-8") from problem
    except (OSError, ValueError, EOFError, csv.Error, zipfile.BadZipFile, zlib.error) as problem:
        reason = (str(problem).strip().splitlines() or [type(problem).__name__])[0].rstrip(".")
        raise ValueError(f"{failed} ({reason}): save it again") from problem


def _wanted(
    path: Path, names: list[str], target: str | None, encoder: Encoder | None, drop: Sequence[str]
) -> list[int]:
    """Return the places of the columns to use, which must have names of their own.

    Of new rows these are the model's columns, or all that have a name if one of those is missing:
    `Encoder.transform` then names the difference.
    """
    wanted = {*names} - {*drop}
    if encoder is not None:
        columns = {*encoder.kinds()}
        wanted = {*columns, encoder.target} if columns <= {*names} else {*names} - {""}
    places = [at for at, name in enumerate(names) if name in wanted]
    if "" in wanted and "" in names:
        raise ValueError(
            f"{path} has no name for column {names.index('') + 1}: name it, or {how_to_drop('')}"
        )
    counts = Counter(names[at] for at in places)
    if twice := sorted(name for name, count in counts.items() if count > 1):
        way_out = "" if target in twice else f", or {how_to_drop(*twice)}"
        raise ValueError(f"{path} has more than one column {listed(twice)}: rename them{way_out}")
    return places


def _with_texts(frame: DataFrame, names: Iterable[str]) -> DataFrame:
    """Return the frame with the numbers of some columns as texts, whole ones without a point."""

    def text(value: float) -> str:
        return str(int(value) if float(value).is_integer() else value)

    numbers = [name for name in names if name in frame and kind_of(name, frame[name]) == "numbers"]
    texts = {name: frame[name].map(text, na_action="ignore") for name in numbers}
    return frame.assign(**texts) if texts else frame
