"""Tables in files: .csv, .parquet and .npz."""

from __future__ import annotations

import csv
import math
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pseudograd.data.columns import feature_names, how_to_drop, kind_of, listed, named, nearest
from pseudograd.data.encoder import Encoder

if TYPE_CHECKING:
    from pandas import DataFrame, Series


SUFFIXES = (".csv", ".parquet", ".npz")


class OptionError(ValueError):
    """An option that does not fit the data.

    Attributes:
        option: The option, as an argument is named in Python.
        complaint: What is wrong with it: the rest of the sentence.

    Example:
        >>> raise OptionError("drop", "cannot be set")
        Traceback (most recent call last):
        ...
        pseudograd.data.reading.OptionError: 'drop' cannot be set

    """

    def __init__(self, option: str, complaint: str) -> None:
        super().__init__(f"{option!r} {complaint}")
        self.option, self.complaint = option, complaint


class _Refusal(ValueError):
    """A file that can be read, but not used: the message says it all."""


@dataclass(frozen=True, eq=False)
class _File:
    """What a file holds: rows, perhaps a test part, and the shape of a picture if it has any."""

    frame: DataFrame
    test: DataFrame | None = None
    pixels: tuple[int, ...] | None = None


def read_table(
    path: Path,
    target: str | None,
    encoder: Encoder | None = None,
    drop: Sequence[str] = (),
    categories: Sequence[str] = (),
) -> _File:
    """Read a file by its suffix; with an encoder, new rows, which need no labels."""
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"{path} must end in one of {', '.join(SUFFIXES)}")
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: check the path")
    try:
        if suffix == ".npz":
            if drop:
                raise OptionError("drop", f"cannot be set for {path}: leave columns out of X")
            file = _read_npz(path, target or "", new=encoder is not None)
        elif suffix == ".csv":
            file = _File(_read_csv(path, target, encoder, drop, categories))
        else:
            import pandas as pd

            frame = named(pd.read_parquet(path, engine="pyarrow").reset_index(drop=True))
            file = _File(frame[_kept(path, list(frame.columns), encoder, drop)])
    except (_Refusal, OptionError):
        raise
    except ImportError as problem:
        raise ImportError(
            f"{path} cannot be read without pyarrow: pip install '.[parquet]' in a checkout"
        ) from problem
    except UnicodeDecodeError as problem:
        raise ValueError(
            f"{path} cannot be read as a {suffix} file (it is not UTF-8): save it anew as UTF-8"
        ) from problem
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as problem:
        reason = (str(problem).strip().splitlines() or [type(problem).__name__])[0].rstrip(".")
        raise ValueError(
            f"{path} cannot be read as a {suffix} file ({reason}): save it anew"
        ) from problem
    for frame in (file.frame, file.test):
        if frame is not None and frame.empty:
            raise ValueError(f"{path} is empty: it must have columns and rows")
    if file.pixels is not None and categories:
        raise OptionError("categories", f"cannot be set for {path}, which has pictures")
    _check_names("categories", categories, path, list(file.frame.columns))
    text = categories if encoder is None else encoder.text_columns()
    test = None if file.test is None else _with_texts(file.test, text)
    return _File(_with_texts(file.frame, text), test, file.pixels)


def _check_names(option: str, named: Iterable[str], path: Path, names: list[str]) -> None:
    for name in named:
        if name not in names:
            raise OptionError(option, f"names {name!r}: {path} has {nearest(name, names)}")


def _with_texts(frame: DataFrame, names: Iterable[str]) -> DataFrame:
    """The frame with the numbers of some columns as texts; whole ones have no point, ever."""

    def text(value: float) -> str:
        return str(int(value) if float(value).is_integer() else value)

    numbers = [name for name in names if name in frame and kind_of(name, frame[name]) == "numbers"]
    texts = {name: frame[name].map(text, na_action="ignore") for name in numbers}
    return frame.assign(**texts) if texts else frame


def _kept(path: Path, names: list[str], encoder: Encoder | None, drop: Sequence[str]) -> list[str]:
    """The columns of a file to use; of new rows those that are wanted, if all of these are there.

    If some are missing, all with a name stay, so that `Encoder.transform` can tell.
    """
    if encoder is None:
        _check_names("drop", drop, path, names)
        return [name for name in names if name not in drop]
    wanted: Set[str] = encoder.kinds().keys()
    wanted = {*wanted, encoder.target} if wanted <= set(names) else {*names} - {""}
    return [name for name in names if name in wanted]


def _read_csv(
    path: Path,
    target: str | None,
    encoder: Encoder | None,
    drop: Sequence[str],
    categories: Sequence[str],
) -> DataFrame:
    import pandas as pd

    separator, skipped = _separator(path)
    _check_lines(path, separator, skipped)
    decimals = ",." if separator == ";" else "."
    read: Callable[..., DataFrame] = partial(
        pd.read_csv, path, sep=separator, skiprows=skipped, encoding="utf-8-sig"
    )
    # pandas renames a column without a name or with that of another. A row number or a second
    # column of labels must not slip in as a feature that way.
    try:
        header = read(header=None, nrows=1, na_filter=False, dtype=str)
    except pd.errors.EmptyDataError as problem:
        raise _Refusal(f"{path} is empty: it must have columns and rows") from problem
    names = header.iloc[0].tolist()
    kept = _kept(path, names, encoder, drop)
    if "" in kept:
        raise _Refusal(
            f"{path} has no name for column {names.index('') + 1}: name it, or {how_to_drop('')}"
        )
    if twice := sorted(name for name, count in Counter(kept).items() if count > 1):
        way_out = "" if target in twice else f", or {how_to_drop(*twice)}"
        raise _Refusal(f"{path} has more than one column {listed(twice)}: rename them{way_out}")
    # What was text stays text, even where it looks like numbers; truth values are found again.
    text = list(categories)
    if encoder is not None:
        text = encoder.text_columns()
        if isinstance(encoder.labels[0], str):
            text.append(encoder.target)
    kinds = dict.fromkeys(text, str)
    wanted = set(kept)
    used = [at for at, name in enumerate(names) if name in wanted]
    # Where semicolons separate, decimals mostly have commas: take what makes more numbers.
    frame = max(
        (read(dtype=kinds, decimal=mark, low_memory=False).iloc[:, used] for mark in decimals),
        key=lambda frame: frame.select_dtypes("number").shape[1],
    )
    frame.columns = pd.Index(kept)
    known = {} if encoder is None else encoder.categories() | {encoder.target: encoder.labels}
    for name in {*text} & {*kept}:
        frame[name] = _without_points(frame[name], known.get(name, ()))
    # Codes such as 007 are texts. To look for one in the file is quicker than to read it again.
    start = rb'[\n\r"%s] *[+-]?0\d' % re.escape(separator.encode())
    if encoder is None and re.search(start, path.read_bytes()):
        numbers = frame.select_dtypes("number")
        whole = {name for name in numbers if not (numbers[name].dropna() % 1).any()}
        places = [at for at in used if names[at] in whole]
        for at, (_, texts) in zip(places, read(usecols=places, dtype=str).items(), strict=True):
            if texts.str.match(r" *[+-]?0\d", na=False).any():
                frame[names[at]] = texts
    return frame


def _without_points(texts: Series, known: Collection[object]) -> Series:
    """Codes as pandas writes them without gaps, 1 in place of 1.0, unless they are known so."""
    bare = texts.str.replace(r"^([+-]?\d+)\.0+$", r"\1", regex=True)
    return bare.where(~texts.isin(known), texts)


def _separator(path: Path) -> tuple[str, int]:
    """What separates the columns, and how many lines to skip that only say so, as of Excel."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        at, first = next(((at, line) for at, line in enumerate(file) if line.strip()), (0, ""))
    if said := re.fullmatch(r'"?sep=([,;\t])"?', first.rstrip("\r\n"), re.IGNORECASE):
        return said[1], at + 1
    unquoted = re.sub(r'"[^"]*"', "", first)
    return max(",;\t", key=unquoted.count), 0


def _check_lines(path: Path, separator: str, skipped: int) -> None:
    """Refuse a line with more or fewer fields than the header.

    Where all rows have more, pandas takes the first for their names; what is fewer, for gaps.
    """
    limit = csv.field_size_limit(2**31 - 1)  # texts may have any length, as in pandas
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for _ in range(skipped):
                next(file)
            rows, header, last = csv.reader(file, delimiter=separator), 0, skipped
            for row in rows:
                line, last = last + 1, skipped + rows.line_num
                if not row or (len(row) == 1 and row[0] and not row[0].strip(" \t")):
                    continue  # blank, which pandas passes over
                header = header or len(row)
                if len(row) != header:
                    more = "put texts that have the separator in them into double quotes"
                    fewer = "keep the separators of empty cells"
                    raise _Refusal(
                        f"{path} cannot be read as a .csv file (line {line} has {len(row)} "
                        f"field{'s' * (len(row) > 1)}, the header {header}): correct that line, "
                        f"and {more if len(row) > header else fewer}"
                    )
    finally:
        csv.field_size_limit(limit)


def _read_npz(path: Path, target: str, *, new: bool) -> _File:
    """Read the arrays X and ``target``, and those of the test part unless the rows are new."""
    import pandas as pd

    def array(name: str) -> NDArray[Any]:
        if name not in archive.files:
            raise _Refusal(f"{path} has no array {name!r}: it has {nearest(name, archive.files)}")
        try:
            found: NDArray[Any] = archive[name]
        except ValueError as problem:
            # To unpickle is to run whatever code the file holds, so it is never done.
            raise _Refusal(
                f"{path} has Python objects in array {name!r}: save it as numbers or text"
            ) from problem
        return found

    def part(suffix: str) -> tuple[DataFrame, NDArray[Any]]:
        features = array("X" + suffix)
        if features.ndim < 2 or not math.prod(features.shape[1:]):
            raise _Refusal(
                f"{path} has an array 'X{suffix}' without columns: make it 2-dimensional"
            )
        flat = features.reshape(len(features), math.prod(features.shape[1:]))
        frame = pd.DataFrame(flat, columns=feature_names(flat.shape[1]))
        if not new or target in archive.files:
            labels = array(target + suffix)
            if labels.shape != features.shape[:1]:
                raise _Refusal(
                    f"{path} has {len(features)} rows in 'X{suffix}', but the shape {labels.shape} "
                    f"in {target + suffix!r}: give one label for each row"
                )
            frame[target] = labels
        return frame, features

    with path.open("rb") as file:
        try:
            archive = np.load(file, allow_pickle=False)
        except ValueError as problem:  # NumPy takes anything else for a pickle
            raise _Refusal(
                f"{path} is no .npz file, whatever its name says: make one by numpy.savez, or name "
                "it as what it is"
            ) from problem
        if isinstance(archive, np.ndarray):
            raise ValueError("it holds a single array")
        frame, features = part("")
        has_test = not new and not {"X_test", target + "_test"}.isdisjoint(archive.files)
        test = part("_test")[0] if has_test else None
    pictures = features.dtype == np.uint8 and features.ndim > 2
    return _File(frame, test, features.shape[1:] if pictures else None)
