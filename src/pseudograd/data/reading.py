"""Files of tables: a reader for each format, and the columns that are wanted of them."""

from __future__ import annotations

import contextlib
import csv
import lzma
import math
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from pseudograd.data.columns import AS_IT_IS, Choices, OptionError, Refusal, feature_names
from pseudograd.data.delimited import Delimited, read_delimited
from pseudograd.data.encoder import Encoder
from pseudograd.data.memory import check_size
from pseudograd.data.opening import opened
from pseudograd.extras import needed_for
from pseudograd.words import nearest

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, eq=False)
class Table:
    """What a reader returns, and how it is to be told."""

    frame: DataFrame | Delimited  # all columns; those of a text file are typed later
    test: DataFrame | None = None  # the test part, if the file has one
    pixels: tuple[int, ...] | None = None  # the shape of a picture, if the columns are pixels
    kept: DataFrame | None = None  # columns that are asked for as they are
    comma: bool = False  # whether the decimal mark is a comma
    said: str = ""  # what was assumed, to be told


def read_text(file: BinaryIO, target: str, new: bool) -> Table:
    """Read a .csv file, or one with other separators."""
    return Table(read_delimited(file))


def read_parquet(file: BinaryIO, target: str, new: bool) -> Table:
    """Read a .parquet file."""
    with needed_for("reading .parquet files"):
        import pandas as pd
        import pyarrow.parquet as pq

    facts = pq.read_metadata(file)
    check_size(8 * facts.num_rows * facts.num_columns, "would take")
    return Table(pd.read_parquet(file, engine="pyarrow").reset_index(drop=True))


def read_npz(file: BinaryIO, target: str, new: bool) -> Table:
    """Read the arrays X and ``target``, and those of the test part unless the rows are new."""
    try:
        arrays = np.load(file, allow_pickle=False)
    except ValueError as problem:  # NumPy takes anything else for a pickle
        raise Refusal(
            "is not an .npz file, whatever its name says: make one with numpy.savez, or rename it"
        ) from problem
    if isinstance(arrays, np.ndarray):
        raise ValueError("it holds a single array")
    features = _array(arrays, "X")
    labelled = not new or target in arrays.files
    frame = _frame_of(features, target if labelled else None, arrays)
    test = None
    if not new and not {"X_test", target + "_test"}.isdisjoint(arrays.files):
        test = _frame_of(_array(arrays, "X_test"), target, arrays, "_test")
        if list(test.columns) != list(frame.columns):
            raise Refusal(
                f"has {frame.shape[1] - 1} columns in 'X', but {test.shape[1] - 1} in 'X_test': "
                "give both the same columns"
            )
    pictures = features.dtype == np.uint8 and features.ndim > 2
    return Table(frame, test, features.shape[1:] if pictures else None)


def _array(arrays: Any, name: str) -> NDArray[Any]:
    if name not in arrays.files:
        raise Refusal(f"has no array {name!r}: it has {nearest(name, arrays.files)}")
    try:
        found: NDArray[Any] = arrays[name]
    except ValueError as problem:
        # Unpickling runs whatever code the file holds, so we never do it.
        raise Refusal(
            f"has Python objects in array {name!r}: save it as numbers or text"
        ) from problem
    return found


def _frame_of(
    features: NDArray[Any], target: str | None, arrays: Any, suffix: str = ""
) -> DataFrame:
    """Return a part of an .npz file as a frame, with its labels if they have a name."""
    import pandas as pd

    width = math.prod(features.shape[1:])
    if features.ndim < 2 or not width:
        raise Refusal(f"has an array 'X{suffix}' without columns: make it 2-dimensional")
    frame = pd.DataFrame(features.reshape(-1, width), columns=feature_names(width))
    if target is not None:
        labels = _array(arrays, target + suffix)
        if labels.shape != features.shape[:1]:
            raise Refusal(
                f"has {len(features)} rows in 'X{suffix}', but the shape {labels.shape} in "
                f"{target + suffix!r}: give one label for each row"
            )
        frame[target] = labels
    return frame


# A reader takes an open file, the target, and whether the rows are new, so that labels may be
# missing.
Reader = Callable[[BinaryIO, str, bool], Table]
READERS: dict[str, Reader] = {
    ".csv": read_text,
    ".tsv": read_text,
    ".txt": read_text,
    ".parquet": read_parquet,
    ".npz": read_npz,
}


def read_table(
    source: str | Path | DataFrame,
    target: str | None,
    choices: Choices = AS_IT_IS,
    encoder: Encoder | None = None,
    keep: Sequence[str] = (),
) -> Table:
    """Return the wanted columns of a file or a frame, typed, and its test part if any.

    With an encoder the rows are new: they need no labels, and other columns are left out, except
    that those to ``keep`` are returned as they are in the file.
    """
    with needed_for("reading tables"):
        import pandas as pd

    place = name_of(source)
    with _in_a_sentence(place):
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
        # What was text stays text, even where it looks like numbers.
        known: dict[str, Collection[object]] = dict.fromkeys(choices.categories, ())
        if encoder is not None:
            known = encoder.known_texts()
        text = replace(table.frame, columns=names)
        with _in_a_sentence(place):
            frame, comma = text.typed(places, known, codes=encoder is None)
            as_it_is = text.verbatim(kept) if kept else None
        said = "is not UTF-8 and was read as Windows-1252: save it as UTF-8 if letters look wrong"
        table = replace(table, comma=comma, said=f"{place} {said}" * bool(text.assumed))
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


def name_of(source: str | Path | DataFrame) -> str:
    """Return what to call a file or a frame."""
    if not isinstance(source, (str, Path)):
        return "the frame"
    return "standard input" if str(source) == "-" else str(source)


def _read(source: str | Path | DataFrame, target: str | None, new: bool) -> Table:
    if not isinstance(source, (str, Path)):
        return Table(source)
    with opened(Path(source)) as found:
        if found.suffix not in READERS:
            raise Refusal(f"must end in one of {', '.join(READERS)}")
        return READERS[found.suffix](found.file, target or "", new)


def unique_names(names: Sequence[str]) -> list[str]:
    """Return a name of its own for each column, as pandas makes them."""
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
    """Refuse options that name other columns."""
    options = {
        "drop": choices.drop,
        "categories": choices.categories,
        "numbers": choices.numbers,
        "group": [choices.group] if choices.group is not None else [],
    }
    for option, given in options.items():
        if given and pictures:
            raise OptionError(option, f"cannot be set for {place}, which has pictures")
        _check_names(option, given, names, place)


def _check_names(option: str, given: Sequence[str], names: list[str], place: str) -> None:
    for name in given:
        if name not in names:
            raise OptionError(option, f"names {name!r}: {place} has {nearest(name, names)}")


@contextlib.contextmanager
def _in_a_sentence(place: str) -> Iterator[None]:
    """Say in one sentence why a file cannot be read."""
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
        reason = (str(problem).strip().splitlines() or [type(problem).__name__])[0].rstrip(".")
        raise ValueError(
            f"{place} cannot be read as a {kind} file ({reason}): save it again"
        ) from problem


def _wanted(names: list[str], encoder: Encoder | None, choices: Choices) -> list[int]:
    """Return the places of the columns to use.

    Of new rows these are the model's columns, or all if one of those is missing:
    `Encoder.transform` then names the difference.
    """
    wanted = {*names} - {*choices.drop}
    if encoder is not None:
        columns = {*encoder.kinds()}
        wanted = {*columns, encoder.target} if columns <= {*names} else {*names}
    return [at for at, name in enumerate(names) if name in wanted]
