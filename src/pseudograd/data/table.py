"""A user's table as a data set: read, checked, split, and encoded as features."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from pseudograd.data.benchmarks import BENCHMARKS, load
from pseudograd.data.columns import (
    Choices,
    Reading,
    check_several,
    labels_in,
    read_column,
    target_column,
    unlabelled,
)
from pseudograd.data.dataset import FOLDS, Dataset, check_size, digits
from pseudograd.data.encoder import Encoder
from pseudograd.data.features import MOST_CATEGORIES
from pseudograd.data.parts import check_fraction, copies_in_words, draw, in_both_parts
from pseudograd.data.reading import READERS, Source, Table, name_of, read_table
from pseudograd.data.survey import Note, Notes, look_over, new_categories, question_target
from pseudograd.data.values import distinct
from pseudograd.words import counted, listed, nearest

if TYPE_CHECKING:
    from pandas import DataFrame, Series


_SHOWN = 8  # columns that are kept to show examples
FEATURES = 2 * 2**30  # bytes; fixed, so that a table has the same features on every machine

# Named data sets: their loaders, and the shape of their images.
_KNOWN: dict[str, tuple[Callable[..., Dataset], tuple[int, ...]]] = {
    "digits": (digits, (8, 8)),
    **{name: (partial(load, name), known.shape) for name, known in BENCHMARKS.items()},
}


def open_data(name: Source, **options: Any) -> tuple[Dataset, Encoder]:
    """Open a named data set, or a table of your own.

    Args:
        name: "digits", the name of a benchmark set, or a table as for `load_table`.
        options: The options of `load_table` for a table, of `digits` for the digits, ``data_dir``
            for a benchmark set. None means the default.

    Example:
        >>> data, encoder = open_data("digits")
        >>> data.name, encoder.pixels, encoder.labels
        ('digits', (8, 8), (0, 1, 2, 3, 4, 5, 6, 7, 8, 9))

    """
    options = {option: value for option, value in options.items() if value is not None}
    is_path = isinstance(name, (str, Path))
    known = _KNOWN.get(str(name)) if is_path else None
    loader = known[0] if known else load_table
    if unknown := sorted(set(options) - set(inspect.signature(loader).parameters)):
        raise ValueError(f"{unknown[0]!r} cannot be set for data {str(name)!r}: leave it out")
    if known:
        data = known[0](**options)
        return data, Encoder("y", tuple(range(data.classes)), (), known[1], data.value_range)
    if is_path and str(name) != "-" and not Path(name).suffix and not Path(name).exists():
        raise ValueError(
            f"data {Path(name).name!r} is not known: give {nearest(Path(name).name, _KNOWN)}, "
            f"or a file that ends in {', '.join(READERS)}"
        )
    return load_table(name, **options)


def load_table(
    source: Source,
    target: str | None = None,
    *,
    test_path: str | Path | None = None,
    test_fraction: float | None = None,
    drop: Sequence[str] = (),
    categories: Sequence[str] = (),
    numbers: Sequence[str] = (),
    missing: Sequence[str] = (),
    group: str | None = None,
    strict: bool = False,
    stratify: bool = True,
    seed: int = 0,
) -> tuple[Dataset, Encoder]:
    """Load a table as a data set; columns without information are dropped, with a warning.

    Args:
        source: The file or data frame, as for `read_frame`.
        target: The column of labels; in an .npz file the array of labels, by default "y".
        test_path: A second file, the test set. By default, the arrays X_test and y_test of an .npz
            file if it has them, and otherwise a random sample of the rows.
        test_fraction: The share of rows to hold out as the test set, by default 0.2.
        drop: Columns to drop.
        categories: Columns to read as categories, such as numbers that are codes. Strings that are
            neither numbers nor dates are always categories, and so are whole numbers if one of
            them has a leading zero.
        numbers: Columns to keep as numbers: entries that are not numbers are treated as missing,
            and -999 is a number.
        missing: Entries that mark a missing value, in addition to NA, ? and the like.
        group: A column that identifies groups of rows, such as patients: a group is either in the
            training set or in the test set. It is not used as a feature.
        strict: Refuse the table if anything has to be left out or is doubtful.
        stratify: Whether to stratify the test set by class. In any case each class keeps a training
            example.
        seed: Determines the test set.

    Returns:
        The data set, named after the file, and its encoder, whose ``notes`` say how each column is
        used.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "pets.csv")
        >>> _ = path.write_text("weight,pet\\n" + "4,cat\\n30,dog\\n5,cat\\n25,dog\\n9,dog\\n" * 2)
        >>> data, encoder = load_table(path, "pet")
        >>> data.name, data.train_size, data.test_size, encoder.labels
        ('pets.csv', 8, 2, ('cat', 'dog'))
        >>> encoder.notes["columns"]
        [{'name': 'weight', 'used_as': 'numbers', 'why': '', 'features': 1}]

    """
    choices = Choices(drop, categories, numbers, missing, group)
    if target is None and isinstance(source, (str, Path)) and str(source).lower().endswith(".npz"):
        target = "y"
    _check_options(target, test_path, test_fraction, choices)
    table, place, notes = read_table(source, target, choices), name_of(source), Notes()
    if target is None:
        raise ValueError(
            f"'target' must name the column of labels: one of {listed(table.frame.columns)}"
        )
    for option, given in {"test_path": test_path, "test_fraction": test_fraction}.items():
        if given is not None and table.test is not None:
            raise ValueError(
                f"{option!r} must be left out: {place} has a test set of its own, X_test"
            )
    if table.said:
        notes.say(table.said)
    frame = _labelled(table.frame, target, choices, place, notes)
    classes = _classes(frame, target, notes)
    frame, readings = _read_columns(frame, table, target, choices, place, notes)
    if strict and notes.said:
        raise ValueError(f"{place} is refused, since strict is set: {'; '.join(notes.said)}")
    notes.tell(stacklevel=2)
    groups = None if group is None else _groups(table.frame.loc[frame.index, group])
    drawn = np.zeros(len(frame), bool)
    if test_path is None and table.test is None:
        drawn = draw(classes, test_fraction or 0.2, stratify, seed, groups)
    train = frame[~drawn]
    fix = "add rows" if test_fraction is None else "add rows, or lower test_fraction"
    _check_folds(place, len(train), None if groups is None else groups[~drawn], fix)
    encoder = _fit(train, target, table.pixels, readings, place, notes)
    if isinstance(encoder.labels[0], float):
        notes.say(
            f"target {target!r} has {len(encoder.labels)} distinct decimal numbers, and each "
            "becomes a class: the model ignores their order"
        )
    test = frame[drawn]
    if not drawn.any():
        given = table.test if test_path is None else read_frame(test_path, encoder)
        test = _labelled(given, target, choices, test_path or place, notes)
    if groups is not None:
        unknown = np.full(0 if drawn.any() else len(test), -1)
        groups = np.concatenate([groups[~drawn], groups[drawn], unknown])
    data = _dataset(source, train, test, encoder, groups)
    if test_path is not None:
        for line in new_categories(test, encoder):
            notes.say(f"{test_path}: {line}")
    _note_copies(data, encoder, notes)
    notes.tell(stacklevel=2)
    if table.pixels is None:
        first = [column.name for column in encoder.columns[:_SHOWN]]
        data = replace(data, frame=table.frame[first])
    return data, replace(encoder, notes=notes.plain(encoder))


def _check_folds(place: str, examples: int, groups: NDArray[np.int64] | None, fix: str) -> None:
    """Raise if the training set has too few examples or groups for one in each fold."""
    if examples < FOLDS:
        raise ValueError(
            f"{place} leaves {examples} examples to train on, but cross-validation needs "
            f"at least {FOLDS}: {fix}"
        )
    if groups is not None and (count := len(np.unique(groups))) < FOLDS:
        raise ValueError(
            f"'group' leaves {counted(count, 'group')} to train on, but cross-validation needs at "
            f"least {FOLDS}: name a column with more groups"
        )


def _classes(frame: DataFrame, target: str, notes: Notes) -> NDArray[np.intp]:
    """Return the class index of each row; refuse a target with one class, or one per row."""
    classes, labels = labels_in(target, frame[target])
    if len(labels) == len(frame):
        raise ValueError(f"target {target!r} differs in all rows: name a column of classes")
    check_several(target, labels)
    if question := question_target(target, classes, labels):
        notes.say(question, doubt=True)
    return classes


def _groups(column: Series) -> NDArray[np.int64]:
    """Return the group index of each row; a row with a missing group is its own group."""
    places, values = distinct(column)
    return np.where(places < 0, len(values) + np.arange(len(places)), places).astype(np.int64)


def _check_options(
    target: str | None, test_path: object, test_fraction: float | None, choices: Choices
) -> None:
    check_fraction(test_fraction)
    if test_fraction is not None and test_path is not None:
        raise ValueError(f"'test_fraction' must be left out: {test_path} is the test set")
    for option in ("drop", "categories", "numbers", "missing"):
        names = getattr(choices, option)
        if isinstance(names, str):
            raise ValueError(f"{option!r} must be a list of names, such as [{names!r}]")
        if target in names and option != "missing":
            raise ValueError(
                f"{option!r} names {target!r}, which is the target: name another column"
            )
    if target is not None and choices.group == target:
        raise ValueError(f"'group' names {target!r}, which is the target: name another column")
    if twice := sorted({*choices.categories} & {*choices.numbers}):
        raise ValueError(f"'numbers' names {listed(twice)}, also named as categories: choose one")


def _labelled(
    frame: DataFrame, target: str, choices: Choices, place: object, notes: Notes
) -> DataFrame:
    """Return the rows that have a label, and note how many do not."""
    gaps = unlabelled(target_column(frame, target, place), choices.codes)
    notes.rows["read"] = notes.rows.get("read", 0) + len(frame)
    if not gaps.any():
        return frame
    count = int(gaps.sum())
    if count == len(frame):
        raise ValueError(f"target {target!r} has no labels in {place}: name another column")
    notes.rows["without label"] = notes.rows.get("without label", 0) + count
    notes.say(f"{counted(count, 'row')} of {place} set aside: no label in column {target!r}")
    return frame[~gaps].infer_objects()


def _read_columns(
    frame: DataFrame, table: Table, target: str, choices: Choices, place: str, notes: Notes
) -> tuple[DataFrame, dict[str, Reading]]:
    """Return the columns to keep, parsed, and how each is read."""
    import pandas as pd

    if table.pixels is not None:
        return frame, {}
    names = [name for name in frame.columns if name not in (target, choices.group)]
    readings = {name: read_column(name, frame[name], choices, table.comma) for name in names}
    kept = look_over(readings, choices, notes)
    if not kept:
        said = f" ({'; '.join(notes.said)})" if notes.said else ""
        raise ValueError(f"{place} has no column besides the target {target!r}{said}: add features")
    columns = {name: readings[name].entries for name in kept}
    return pd.DataFrame({**columns, target: frame[target]}), readings


def _fit(
    train: DataFrame,
    target: str,
    pixels: tuple[int, ...] | None,
    readings: dict[str, Reading],
    place: str,
    notes: Notes,
) -> Encoder:
    """Fit the encoder, with fewer categories if their features would need too much memory."""
    most, size = MOST_CATEGORIES, 0.0
    while True:
        encoder = Encoder.fit(train, target, pixels=pixels, readings=readings or None, most=most)
        size = 4.0 * encoder.width * notes.rows["read"]
        if pixels is not None or size <= FEATURES or most < 4:
            break
        most //= 2
    if most < MOST_CATEGORIES:
        notes.say(
            f"text columns have at most {most} categories, the most common ones: with "
            f"{MOST_CATEGORIES} the features would take more than {FEATURES / 2**30:g} GB",
            doubt=True,
        )
    check_size(place, 2 * size, "features")
    return encoder


def _dataset(
    source: Source,
    train: DataFrame,
    test: DataFrame,
    encoder: Encoder,
    groups: NDArray[np.int64] | None,
) -> Dataset:
    name = Path(source).name if isinstance(source, (str, Path)) else "frame"
    rows = len(train) + len(test)
    kind = np.float32 if encoder.pixels is None else np.uint8
    features = np.empty((rows, encoder.width), kind)
    encoder.transform(train, features[: len(train)])
    encoder.transform(test, features[len(train) :])
    labels = [encoder.encode_labels(part[encoder.target]) for part in (train, test)]
    return Dataset(
        name="stdin" if name == "-" else name,
        features=torch.from_numpy(features),
        labels=torch.from_numpy(np.concatenate(labels)),
        train_size=len(train),
        value_range=encoder.value_range,
        rows=torch.from_numpy(np.concatenate([part.index + 1 for part in (train, test)])),
        groups=None if groups is None else torch.from_numpy(groups),
    )


def _note_copies(data: Dataset, encoder: Encoder, notes: Notes) -> None:
    if count := in_both_parts(data, encoder):
        notes.rows["test rows that equal a training row"] = count
        notes.say(copies_in_words(count, data.test_size, "row"))


def read_frame(source: Source, encoder: Encoder) -> DataFrame:
    """Read new rows for `Encoder.transform`.

    Args:
        source: A path, "-" for standard input, or a pandas or polars data frame. .csv, .tsv and
            .txt files must have a header; .xlsx, .parquet, .feather, .arrow and .jsonl files are
            read, too. In an .npz file the features are the array X, whose columns are called X[0],
            X[1], ... Files may be compressed: .csv.gz, .bz2, .xz or .zip.
        encoder: Determines which columns to read, and which of them are text even if the entries of
            these rows look like numbers.

    Example:
        >>> from pandas import DataFrame
        >>> pets = DataFrame({"weight": range(10), "pet": ["cat"] * 5 + ["dog"] * 5})
        >>> data, encoder = load_table(pets, "pet")
        >>> new = read_frame(DataFrame({"weight": [7, 28], "name": ["Tom", "Rex"]}), encoder)
        >>> new.columns.tolist(), encoder.transform(new).shape
        (['weight'], (2, 1))

    """
    return read_rows(source, encoder)[0]


def read_rows(
    source: Source, encoder: Encoder, keep: Sequence[str] = ()
) -> tuple[DataFrame, DataFrame | None]:
    """Read new rows like `read_frame`, and return the columns to ``keep`` unchanged."""
    table = read_table(source, encoder.target, encoder=encoder, keep=keep)
    if table.said:
        warnings.warn(table.said, Note, stacklevel=3)
    frame: Any = table.frame
    return frame, table.kept
