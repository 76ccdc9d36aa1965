"""Read tables from files and data frames: the requested columns, with unique names."""

from __future__ import annotations

import contextlib
import csv
import lzma
import zipfile
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pseudograd.data.columns import AS_IT_IS, Choices, OptionError, Refusal
from pseudograd.data.delimited import Delimited
from pseudograd.data.encoder import Encoder
from pseudograd.data.opening import COMPRESSIONS, opened
from pseudograd.data.readers import READERS, Table, without_titles
from pseudograd.extras import needed_for
from pseudograd.words import first_line, listed, nearest

if TYPE_CHECKING:
    from pandas import DataFrame

Source = Any  # a path, or a pandas or polars data frame; "-" is standard input


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
                f"{', '.join(COMPRESSIONS)}"
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
            raise OptionError(option, f"cannot be set for {place}, which has images: leave it out")
        _check_names(option, given, names, place)


def _check_names(option: str, given: Sequence[str], names: list[str], place: str) -> None:
    if wrong := [name for name in given if name not in names]:
        there = nearest(wrong[0], names) if len(wrong) == 1 else listed(names)
        raise OptionError(option, f"names {listed(wrong)}: {place} has {there}")


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
