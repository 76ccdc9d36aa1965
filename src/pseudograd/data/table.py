"""A user's own table as a data set: read, checked, split, and encoded as numbers in [-1, 1]."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pseudograd.data.benchmarks import load
from pseudograd.data.columns import Column, Label, check_column, labels_in, target_column
from pseudograd.data.dataset import FOLDS, Dataset, digits
from pseudograd.data.encoder import Encoder
from pseudograd.data.reading import READERS, OptionError, read_table
from pseudograd.data.registry import BENCHMARKS
from pseudograd.words import listed, nearest

if TYPE_CHECKING:
    from pandas import DataFrame


# Data sets that have a name: what loads them, and the shape of their pictures.
_KNOWN: dict[str, tuple[Callable[..., Dataset], tuple[int, ...]]] = {
    "digits": (digits, (8, 8)),
    **{name: (partial(load, name), known.shape) for name, known in BENCHMARKS.items()},
}


def open_data(name: str | Path, **options: Any) -> tuple[Dataset, Encoder]:
    """Open a data set that has a name, or a user's own table.

    Args:
        name: "digits", the name of a benchmark set, or the path of a .csv, .parquet or .npz file.
        options: Those of `load_table` for a table, of `digits` for the digits, ``data_dir`` for a
            benchmark set. None stands for the default.

    Example:
        >>> data, encoder = open_data("digits")
        >>> data.name, encoder.pixels, encoder.labels
        ('digits', (8, 8), (0, 1, 2, 3, 4, 5, 6, 7, 8, 9))

    """
    options = {option: value for option, value in options.items() if value is not None}
    known = _KNOWN.get(str(name))
    loader = known[0] if known else load_table
    if unknown := sorted(set(options) - set(inspect.signature(loader).parameters)):
        raise OptionError(unknown[0], f"cannot be set for data {str(name)!r}")
    if known:
        data = known[0](**options)
        return data, Encoder("y", tuple(range(data.classes)), (), known[1], data.value_range)
    path = Path(name)
    if not path.suffix and not path.exists():
        raise ValueError(
            f"data {path.name!r} is not known: give {nearest(path.name, _KNOWN)}, "
            f"or a file that ends in {', '.join(READERS)}"
        )
    return load_table(path, **options)


def load_table(
    path: str | Path,
    target: str | None = None,
    *,
    test_path: str | Path | None = None,
    test_fraction: float | None = None,
    drop: Sequence[str] = (),
    categories: Sequence[str] = (),
    stratify: bool = True,
    seed: int = 0,
) -> tuple[Dataset, Encoder]:
    """Load a .csv, .parquet or .npz file as a data set.

    Args:
        path: The file, as `read_frame` takes it.
        target: The column of labels; in an .npz file the array of labels, by default "y".
        test_path: A second file, the test part. By default it is the arrays X_test and y_test of an
            .npz file if there are any, and otherwise drawn at random.
        test_fraction: How much of the table is drawn as the test part, by default 0.2.
        drop: Columns to leave out; not for .npz files.
        categories: Columns whose numbers are codes, so that each becomes a category. Texts always
            do, and so do whole numbers of a .csv file if one begins with a zero.
        stratify: Whether the test part has the same share of every class, as nearly as possible.
            In any case each class keeps a training example.
        seed: Determines the test part.

    Returns:
        The data set, named after the file, and the encoder that made it.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "pets.csv")
        >>> _ = path.write_text("weight,pet\\n" + "4,cat\\n30,dog\\n5,cat\\n25,dog\\n9,dog\\n" * 2)
        >>> data, encoder = load_table(path, "pet")
        >>> data.name, data.train_size, data.test_size, encoder.labels
        ('pets.csv', 8, 2, ('cat', 'dog'))
        >>> encoder.columns
        (Numbers(name='weight', low=4.0, high=30.0, median=9.0, missing=False),)

    """
    path = Path(path)
    if test_fraction is not None and not 0 < test_fraction < 1:
        raise ValueError(f"test_fraction must lie between 0 and 1, not {test_fraction}")
    if test_fraction is not None and test_path is not None:
        raise OptionError("test_fraction", f"must be left out: {test_path} is the test part")
    if target is None and path.suffix.lower() == ".npz":
        target = "y"
    _check_names(target, drop=drop, categories=categories)
    train, test, pixels = read_table(path, target, drop=drop, categories=categories)
    if target is None:
        raise OptionError(
            "target", f"must name the column of labels: one of {listed(train.columns)}"
        )
    labels = labels_in(target, target_column(train, target, path))
    for option, given in {"test_path": test_path, "test_fraction": test_fraction}.items():
        if given is not None and test is not None:
            raise OptionError(
                option, f"must be left out: {path} has a test part of its own, X_test"
            )
    if pixels is None:
        for name in train.columns.drop(target):
            check_column(Column.of(name, train[name], categories=categories))
    if test_path is None and test is None:
        drawn = _draw(labels, test_fraction or 0.2, stratify, seed)
        if not drawn.any():
            raise ValueError(f"target {target!r} differs in all rows: name a column of classes")
        train, test = train[~drawn], train[drawn]
    if len(train) < FOLDS:
        fix = "add rows" if test_fraction is None else "add rows, or lower test_fraction"
        raise ValueError(
            f"{path} leaves {len(train)} examples to train on, but cross-validation needs "
            f"at least {FOLDS}: {fix}"
        )
    encoder = Encoder.fit(train, target, pixels=pixels)
    if test is None:
        assert test_path is not None
        test = read_frame(test_path, encoder)
    target_column(test, target, test_path or path)
    return _dataset(path.name, train, test, encoder), encoder


def _check_names(target: str | None, **options: Sequence[str]) -> None:
    for option, names in options.items():
        if isinstance(names, str):
            raise OptionError(option, f"must be a list of names, such as [{names!r}]")
        if target in names:
            raise OptionError(option, f"names {target!r}, which is the target: name another column")


def _dataset(name: str, train: DataFrame, test: DataFrame, encoder: Encoder) -> Dataset:
    def joined(of: Callable[[DataFrame], Any]) -> Tensor:
        return torch.from_numpy(np.concatenate([of(train), of(test)])).contiguous()

    return Dataset(
        name=name,
        features=joined(encoder.transform),
        labels=joined(lambda part: encoder.encode_labels(part[encoder.target])),
        train_size=len(train),
        value_range=encoder.value_range,
        rows=joined(lambda part: part.index + 1),
    )


def read_frame(path: str | Path, encoder: Encoder) -> DataFrame:
    """Read new rows from a file, for `Encoder.transform`.

    Args:
        path: A .csv file with a header, a .parquet file, or an .npz file with the features in an
            array X, whose columns are called X[0], X[1], ...
        encoder: Tells which columns to read, and which of them hold text even if it looks like
            numbers in these rows.

    """
    return read_table(Path(path), encoder.target, encoder)[0]


def _draw(labels: Sequence[Label], fraction: float, stratify: bool, seed: int) -> NDArray[np.bool_]:
    """Return which rows are the test part, drawn by the labels and the seed alone."""
    codes = np.unique(np.array(labels), return_inverse=True)[1]
    shuffled = torch.randperm(len(codes), generator=torch.Generator().manual_seed(seed)).numpy()
    # The first example of each class stays in the training part.
    rest = np.delete(shuffled, np.unique(codes[shuffled], return_index=True)[1])
    count = min(len(rest), max(1, round(fraction * len(codes))))
    if stratify:
        # Examples at equal steps through the classes.
        rest = rest[np.argsort(codes[rest], kind="stable")]
        rest = rest[((np.arange(count) + 0.5) * len(rest) / max(count, 1)).astype(int)]
    drawn = np.zeros(len(codes), bool)
    drawn[rest[:count]] = True
    return drawn
