"""A user's own table as a data set: read, split, and encoded as numbers in [0, 1].

All that the encoding knows is learned from the training part alone, and is kept as plain values, so
that new rows can be encoded in the same way later.
"""

from __future__ import annotations

import difflib
import inspect
import json
import math
import re
import shlex
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from pseudograd.data.benchmarks import load
from pseudograd.data.dataset import FOLDS, Dataset, digits
from pseudograd.data.registry import BENCHMARKS

if TYPE_CHECKING:
    from pandas import DataFrame, Series

Label = str | int | bool

SUFFIXES = (".csv", ".parquet", ".npz")
_MOST_CATEGORIES = 1000  # a column of its own for each: names or dates would fill the memory
_LARGEST = 1e300  # so that the difference of two numbers is finite
_NEARLY_ALL = 0.9
_FEW = 20  # different texts, which may all differ by chance; rows that may rise by 1 by chance
# A number as people write it: with a currency, a percent sign, thousands apart, any decimal mark.
_FORMATTED = re.compile(
    r"\(?[+-]?\s*[$€£¥]?\s*[+-]?(\d{1,3}([.,'’\s]\d{3})+|\d+)?([.,]\d*)?\s*[%‰$€£¥]?\)?"
)

# Data sets that have a name, and the shape of their pictures. Add others here.
_KNOWN: dict[str, tuple[Callable[..., Dataset], tuple[int, ...]]] = {
    "digits": (digits, (8, 8)),
    **{name: (partial(load, name), known.shape) for name, known in BENCHMARKS.items()},
}


class OptionError(ValueError):
    """An option that does not fit the data.

    Attributes:
        option: The option, as an argument is named in Python.
        complaint: What is wrong with it: the rest of the sentence.

    Example:
        >>> raise OptionError("drop", "cannot be set")
        Traceback (most recent call last):
        ...
        pseudograd.data.table.OptionError: 'drop' cannot be set

    """

    def __init__(self, option: str, complaint: str) -> None:
        super().__init__(f"{option!r} {complaint}")
        self.option, self.complaint = option, complaint


@dataclass(frozen=True)
class Numbers:
    """How a column of numbers is encoded: scaled to [0, 1], what is missing as the median.

    Numbers beyond those of the training part become 0 or 1, for no feature may leave its range.

    Attributes:
        name: The column.
        low: Its least number in the training part ...
        high: ... and its greatest; if they are equal, all becomes 0.
        median: What stands for a missing number.
        missing: Whether a second feature tells which numbers are missing.

    Example:
        >>> import pandas as pd
        >>> Numbers("age", 20.0, 60.0, 30.0, missing=True).transform(pd.Series([40, None, 70]))
        array([[0.5 , 0.  ],
               [0.25, 1.  ],
               [1.  , 0.  ]], dtype=float32)

    """

    name: str
    low: float
    high: float
    median: float
    missing: bool

    kind: ClassVar[str] = "numbers"

    @classmethod
    def fit(cls, name: str, column: Series) -> Numbers:
        """Learn from a column of the training part."""
        values = _numbers(name, column)
        present = values[~np.isnan(values)]
        return cls(
            name,
            float(present.min()),
            float(present.max()),
            float(np.median(present)),
            len(present) < len(values),
        )

    def transform(self, column: Series) -> NDArray[np.float32]:
        """Encode a column."""
        values = _numbers(self.name, column)
        missing = np.isnan(values)
        values = np.where(missing, self.median, values) - self.low
        span = self.high - self.low
        scaled = np.clip(values / span, 0, 1) if span else np.zeros_like(values)
        return np.stack([scaled, missing] if self.missing else [scaled], 1).astype(np.float32)

    @property
    def width(self) -> int:
        """The number of features."""
        return 1 + self.missing

    def show(self, features: NDArray[np.float32]) -> str:
        """Give an entry of the column as text, from its features."""
        if self.missing and features[1]:
            return "missing"
        return f"{self.low + float(features[0]) * (self.high - self.low):g}"


@dataclass(frozen=True)
class Categories:
    """How a column of texts or truth values is encoded: a feature for each category.

    Attributes:
        name: The column.
        categories: Those of the training part, sorted; all others become zeros.
        missing: Whether a last feature tells which entries are missing.

    Example:
        >>> import pandas as pd
        >>> Categories("hue", ("blue", "red"), missing=False).transform(pd.Series(["red", "pink"]))
        array([[0., 1.],
               [0., 0.]], dtype=float32)

    """

    name: str
    categories: tuple[str, ...]
    missing: bool

    @property
    def kind(self) -> str | None:
        """What the column must hold: None if it had no entry, so that anything will do."""
        return "text" if self.categories else None

    @classmethod
    def fit(cls, name: str, column: Series) -> Categories:
        """Learn from a column of the training part."""
        categories = tuple(sorted(_texts(column).dropna().unique()))
        if len(categories) > _MOST_CATEGORIES:
            raise ValueError(
                f"column {name!r} has {len(categories)} different texts, more than "
                f"{_MOST_CATEGORIES}: {_drop(name)}, or correct it if it should hold numbers"
            )
        return cls(name, categories, bool(column.isna().any()))

    def transform(self, column: Series) -> NDArray[np.float32]:
        """Encode a column."""
        import pandas as pd

        features = np.zeros((len(column), len(self.categories) + self.missing), np.float32)
        codes = pd.Index(self.categories, dtype=object).get_indexer(_texts(column))
        known = np.flatnonzero(codes >= 0)
        features[known, codes[known]] = 1
        if self.missing:
            features[:, -1] = column.isna()
        return features

    @property
    def width(self) -> int:
        """The number of features."""
        return len(self.categories) + self.missing

    def show(self, features: NDArray[np.float32]) -> str:
        """Give an entry of the column as text, from its features."""
        names = [*self.categories, "missing"]
        return next((name for name, set_ in zip(names, features, strict=False) if set_), "other")


@dataclass(frozen=True)
class Encoder:
    """From the rows of a table to features and class indices, as the training part had them.

    Attributes:
        target: The column of labels.
        labels: The labels of the classes, sorted.
        columns: How each column is encoded; none if the features are pixels.
        pixels: The shape of one picture, if the features are pixels: they stay whole numbers.
        value_range: The features' least and greatest possible value.

    Example:
        >>> import pandas as pd
        >>> rows = pd.DataFrame({"size": [1, 3, 2], "hue": ["red", "blue", None], "y": list("aba")})
        >>> encoder = Encoder.fit(rows, "y")
        >>> encoder.transform(rows)
        array([[0. , 0. , 1. , 0. ],
               [1. , 1. , 0. , 0. ],
               [0.5, 0. , 0. , 1. ]], dtype=float32)
        >>> encoder.labels, encoder.encode_labels(rows["y"])
        (('a', 'b'), array([0, 1, 0]))
        >>> Encoder.from_json(encoder.to_json()) == encoder
        True

    """

    target: str
    labels: tuple[Label, ...]
    columns: tuple[Numbers | Categories, ...]
    pixels: tuple[int, ...] | None = None
    value_range: tuple[float, float] = (0.0, 1.0)

    @classmethod
    def fit(
        cls, frame: DataFrame, target: str, *, pixels: tuple[int, ...] | None = None
    ) -> Encoder:
        """Learn from the training part.

        Args:
            frame: Its rows.
            target: The column of labels; all others hold features.
            pixels: The shape of a picture, if the other columns are pixels from 0 to 255 and are
                named as `read_frame` does.

        """
        frame = _named(frame)
        labels = tuple(sorted(set(_labels(target, _target_column(frame, target, "the table")))))
        if len(labels) < 2:
            raise ValueError(
                f"target {target!r} has a single class, {_listed(labels)}: "
                "name a column with two or more"
            )
        if pixels is not None:
            return cls(target, labels, (), pixels, (0.0, 255.0))
        columns = [_fit_column(name, frame[name]) for name in frame.columns if name != target]
        if not columns:
            raise ValueError(f"there is no column besides the target {target!r}: add features")
        return cls(target, labels, tuple(columns))

    def transform(self, frame: DataFrame) -> NDArray[Any]:
        """Give the features of rows, one row each: float32, or uint8 if they are pixels.

        Args:
            frame: Rows with the columns of the training part in any order; the target may be
                there or not.

        """
        frame = _named(frame)
        kinds = self._kinds()
        known = {*kinds, self.target}
        found = {name: _kind(name, frame[name]) for name in kinds if name in frame.columns}
        wrong = [name for name, kind in found.items() if kind and kind != (kinds[name] or kind)]
        texts = [name for name in wrong if found[name] == "text"]
        complaints = {
            "missing": [name for name in kinds if name not in found],
            "unknown": [name for name in frame.columns if name not in known],
            "text where numbers belong": texts,
            "numbers where text belongs": [name for name in wrong if found[name] == "numbers"],
        }
        if any(complaints.values()):
            said = "; ".join(
                f"{what}: {_listed(names)}" for what, names in complaints.items() if names
            )
            if texts and len(entries := _no_numbers(frame[texts[0]].reset_index(drop=True))):
                said += f"; {texts[0]!r} has {_first(entries)}"
            raise ValueError(
                f"the columns do not match those of the training part ({said}): "
                "give the same columns with the same kind of content"
            )
        if self.pixels is not None:
            return _pixels(frame[list(kinds)], self.value_range)
        return np.concatenate([column.transform(frame[column.name]) for column in self.columns], 1)

    def unseen(self, frame: DataFrame) -> dict[str, Series]:
        """Give the entries that are none of their column's categories, by column, if there are any.

        Args:
            frame: Rows that `transform` takes.

        """
        found, frame = {}, _named(frame)
        for column in self.columns:
            if isinstance(column, Categories):
                texts = _texts(frame[column.name]).dropna()
                found[column.name] = texts[~texts.isin(column.categories)]
        return {name: entries for name, entries in found.items() if len(entries)}

    def beyond(self, frame: DataFrame) -> dict[str, Series]:
        """Give the numbers beyond the range of the training part, by column, if there are any.

        Args:
            frame: Rows that `transform` takes.

        """
        found, frame = {}, _named(frame)
        for column in self.columns:
            if isinstance(column, Numbers):
                entries = frame[column.name]
                values = _numbers(column.name, entries)
                found[column.name] = entries[(values < column.low) | (values > column.high)]
        return {name: entries for name, entries in found.items() if len(entries)}

    @property
    def taken_for(self) -> str | None:
        """What the columns were taken for, in words; None if the features are pixels."""
        if self.pixels is not None:
            return None
        widths = [column.width for column in self.columns if isinstance(column, Categories)]
        return (
            f"columns taken for numbers: {len(self.columns) - len(widths)}, for categories: "
            f"{len(widths)}" + f" ({sum(widths)} indicator columns)" * bool(widths)
        )

    def _texts(self) -> list[str]:
        """The columns of texts, which stay so where they look like numbers; no truth values."""
        return [
            column.name
            for column in self.columns
            if isinstance(column, Categories)
            and not {"True", "False"}.issuperset(column.categories)
        ]

    def _kinds(self) -> dict[str, str | None]:
        """What each column must hold, as `_kind` says it."""
        if self.pixels is not None:
            return dict.fromkeys(_pixel_names(math.prod(self.pixels)), "numbers")
        return {column.name: column.kind for column in self.columns}

    def decode(self, features: NDArray[Any]) -> dict[str, str]:
        """Give one row of features as the table would show it, by column.

        Args:
            features: A row of what `transform` gives.

        """
        row, rest = {}, features
        for column in self.columns:
            row[column.name] = column.show(rest[: column.width])
            rest = rest[column.width :]
        return row

    def encode_labels(self, labels: Series | Sequence[Label]) -> NDArray[np.int64]:
        """Give the class index of each label, its place in ``labels``."""
        import pandas as pd

        plain = _labels(self.target, pd.Series(labels))
        codes = {label: code for code, label in enumerate(self.labels)}
        if unseen := sorted(set(plain) - set(codes), key=str):
            raise ValueError(
                f"target {self.target!r} has labels that the training part does not have, "
                f"{_listed(unseen)}: remove these rows, or add such rows to the training part"
            )
        return np.array([codes[label] for label in plain], np.int64)

    def to_json(self) -> str:
        """Give all of it as JSON."""
        return json.dumps(asdict(self), ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Encoder:
        """Make it again from what `to_json` gave."""
        try:
            fields = json.loads(text)
            columns = [
                Categories(column["name"], tuple(column["categories"]), column["missing"])
                if "categories" in column
                else Numbers(**column)
                for column in fields["columns"]
            ]
            low, high = fields["value_range"]
            pixels = None if fields["pixels"] is None else tuple(fields["pixels"])
            labels = tuple(fields["labels"])
            return cls(fields["target"], labels, tuple(columns), pixels, (low, high))
        except (KeyError, TypeError, ValueError) as problem:
            raise ValueError(f"this is not the JSON of an encoder ({problem!r})") from problem


def open_data(name: str | Path, **options: Any) -> tuple[Dataset, Encoder]:
    """Open a data set that has a name, or a user's own table.

    Args:
        name: "digits", the name of a benchmark set, or the path of a .csv, .parquet or .npz file.
        options: Those of `load_table` for a table, those of `pseudograd.data.digits` for the
            digits, ``data_dir`` for a benchmark set; None stands for an option's default.

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
            f"data {path.name!r} is not known: give {_nearest(path.name, _KNOWN)}, "
            f"or a file that ends in {', '.join(SUFFIXES)}"
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
        path: The file, read as `read_frame` does.
        target: The column of labels; in an .npz file the array of labels, "y" unless given.
        test_path: A second file with the test part; without it, the arrays X_test and y_test of an
            .npz file are the test part, and else it is drawn at random.
        test_fraction: How much of the table is drawn, 0.2 unless given.
        drop: Columns to leave out; of an .npz file none.
        categories: Columns whose numbers are codes, each of which becomes a category. Texts are
            categories anyway, and in a .csv file so are whole numbers that begin with a zero.
        stratify: Whether all classes have the same share of what is drawn, as nearly as they can.
            In any case each class keeps an example to train on.
        seed: Determines what is drawn.

    Returns:
        The data set, named as the file, and the encoder that made it.

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
    for option, named in {"drop": drop, "categories": categories}.items():
        if isinstance(named, str):
            raise OptionError(option, f"must be a list of names, such as [{named!r}]")
        if target in named:
            raise OptionError(option, f"names {target!r}, which is the target: name another column")
    file = _read(path, target, drop=drop, categories=categories)
    train, test = file.frame, file.test
    if target is None:
        raise OptionError(
            "target", f"must name the column of labels: one of {_listed(train.columns)}"
        )
    labels = _labels(target, _target_column(train, target, path))
    for option, given in {"test_path": test_path, "test_fraction": test_fraction}.items():
        if given is not None and test is not None:
            raise OptionError(
                option, f"must be left out: {path} has a test part of its own, X_test"
            )
    if file.pixels is None:
        for name in train.columns.drop(target):
            _check_text(name, train[name], chosen=name in categories)
            _check_no_row_number(name, train[name])
    if test_path is None and test is None:
        drawn = _draw(labels, test_fraction or 0.2, stratify, seed)
        if not drawn.any():
            raise ValueError(f"target {target!r} differs in all rows: name a column of classes")
        train, test = train[~drawn], train[drawn]
    if len(train) < FOLDS:
        raise ValueError(
            f"{path} leaves {len(train)} examples to train on, but cross-validation needs "
            f"at least {FOLDS}: add rows"
        )
    encoder = Encoder.fit(train, target, pixels=file.pixels)
    if test is None:
        assert test_path is not None
        test = read_frame(test_path, encoder)
    test_labels = _target_column(test, target, test_path or path)
    features = [encoder.transform(train), encoder.transform(test)]
    codes = [encoder.encode_labels(train[target]), encoder.encode_labels(test_labels)]
    data = Dataset(
        name=path.name,
        features=torch.from_numpy(np.concatenate(features)).contiguous(),
        labels=torch.from_numpy(np.concatenate(codes)),
        train_size=len(train),
        value_range=encoder.value_range,
        rows=torch.from_numpy(np.concatenate([train.index, test.index])) + 1,
    )
    return data, encoder


def read_frame(path: str | Path, encoder: Encoder) -> DataFrame:
    """Read new rows from a file, for `Encoder.transform`.

    Args:
        path: A .csv file with a header, a .parquet file, or an .npz file with the features in the
            array X, whose columns are then called X[0], X[1], ...
        encoder: Tells which columns hold text, even if it looks like numbers in these rows, and
            which are wanted: others of a .csv or .parquet file are left out.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "new.csv")
        >>> _ = path.write_text("room\\n12\\n7\\n")
        >>> encoder = Encoder("free", (False, True), (Categories("room", ("12", "12a"), False),))
        >>> encoder.transform(read_frame(path, encoder))
        array([[1., 0.],
               [0., 0.]], dtype=float32)

    """
    return _read(Path(path), encoder.target, encoder).frame


class _Refusal(ValueError):
    """A file that can be read, but not used: the message says it all."""


@dataclass(frozen=True, eq=False)
class _File:
    """What a file holds: rows, perhaps a test part, and the shape of a picture if it has any."""

    frame: DataFrame
    test: DataFrame | None = None
    pixels: tuple[int, ...] | None = None


def _read(
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

            frame = _named(pd.read_parquet(path, engine="pyarrow").reset_index(drop=True))
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
    text = categories if encoder is None else encoder._texts()
    test = None if file.test is None else _with_texts(file.test, text)
    return _File(_with_texts(file.frame, text), test, file.pixels)


def _check_names(option: str, named: Iterable[str], path: Path, names: list[str]) -> None:
    for name in named:
        if name not in names:
            raise OptionError(option, f"names {name!r}: {path} has {_nearest(name, names)}")


def _with_texts(frame: DataFrame, names: Iterable[str]) -> DataFrame:
    """The frame with the numbers of some columns as texts; whole ones have no point, ever."""

    def text(value: float) -> str:
        return str(int(value) if float(value).is_integer() else value)

    numbers = [name for name in names if name in frame and _kind(name, frame[name]) == "numbers"]
    texts = {name: frame[name].map(text, na_action="ignore") for name in numbers}
    return frame.assign(**texts) if texts else frame


def _kept(path: Path, names: list[str], encoder: Encoder | None, drop: Sequence[str]) -> list[str]:
    """The columns of a file to use; of new rows those that are wanted, if all of these are there.

    If some are missing, all with a name stay, so that `Encoder.transform` can tell.
    """
    if encoder is None:
        _check_names("drop", drop, path, names)
        return [name for name in names if name not in drop]
    wanted: Set[str] = encoder._kinds().keys()
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
    decimals = ",." if separator == ";" else "."
    read: Callable[..., DataFrame] = partial(
        pd.read_csv, path, sep=separator, skiprows=skipped, encoding="utf-8-sig"
    )
    # pandas renames a column without a name or with that of another. A row number or a second
    # column of labels must not slip in as a feature that way. With the first row comes a complaint
    # if it has more entries than the header, which pandas else takes for names of the rows.
    try:
        header = read(header=None, nrows=2, na_filter=False, dtype=str)
    except pd.errors.EmptyDataError as problem:
        raise _Refusal(f"{path} is empty: it must have columns and rows") from problem
    names = header.iloc[0].tolist()
    kept = _kept(path, names, encoder, drop)
    if "" in kept:
        raise _Refusal(
            f"{path} has no name for column {names.index('') + 1}: name it, or {_drop('')}"
        )
    if twice := sorted({name for name in kept if kept.count(name) > 1}):
        way_out = "" if target in twice else f", or {_drop(*twice)}"
        raise _Refusal(f"{path} has more than one column {_listed(twice)}: rename them{way_out}")
    # What was text stays text, even where it looks like numbers; truth values are found again.
    text = list(categories)
    if encoder is not None:
        text = encoder._texts()
        if isinstance(encoder.labels[0], str):
            text.append(encoder.target)
    kinds = dict.fromkeys(text, str)
    used = [at for at, name in enumerate(names) if name in kept]
    # Where semicolons separate, decimals mostly have commas: take what makes more numbers.
    frame = max(
        (read(dtype=kinds, decimal=mark, low_memory=False).iloc[:, used] for mark in decimals),
        key=lambda frame: frame.select_dtypes("number").shape[1],
    )
    frame.columns = pd.Index(kept)
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


def _separator(path: Path) -> tuple[str, int]:
    """What separates the columns, and how many lines to skip that only say so, as of Excel."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        at, first = next(((at, line) for at, line in enumerate(file) if line.strip()), (0, ""))
    if said := re.fullmatch(r'"?sep=([,;\t])"?', first.rstrip("\r\n"), re.IGNORECASE):
        return said[1], at + 1
    unquoted = re.sub(r'"[^"]*"', "", first)
    return max(",;\t", key=unquoted.count), 0


def _read_npz(path: Path, target: str, *, new: bool) -> _File:
    """Read the arrays X and ``target``, and those of the test part unless the rows are new."""
    import pandas as pd

    def array(name: str) -> NDArray[Any]:
        if name not in archive.files:
            raise _Refusal(f"{path} has no array {name!r}: it has {_nearest(name, archive.files)}")
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
        frame = pd.DataFrame(flat, columns=_pixel_names(flat.shape[1]))
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
        archive = np.load(file, allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise ValueError("it holds a single array")
        frame, features = part("")
        has_test = not new and not {"X_test", target + "_test"}.isdisjoint(archive.files)
        test = part("_test")[0] if has_test else None
    pictures = features.dtype == np.uint8 and features.ndim > 2
    return _File(frame, test, features.shape[1:] if pictures else None)


def _draw(labels: Sequence[Label], fraction: float, stratify: bool, seed: int) -> NDArray[np.bool_]:
    """Draw the test part: which rows are in it. Depends on the labels and nothing else."""
    codes = np.unique(np.array(labels), return_inverse=True)[1]
    shuffled = torch.randperm(len(codes), generator=torch.Generator().manual_seed(seed)).numpy()
    # The first of each class stays in the training part.
    rest = np.delete(shuffled, np.unique(codes[shuffled], return_index=True)[1])
    count = min(len(rest), max(1, round(fraction * len(codes))))
    if stratify:
        # Class by class, every so many examples one.
        rest = rest[np.argsort(codes[rest], kind="stable")]
        rest = rest[((np.arange(count) + 0.5) * len(rest) / max(count, 1)).astype(int)]
    drawn = np.zeros(len(codes), bool)
    drawn[rest[:count]] = True
    return drawn


def _named(frame: DataFrame) -> DataFrame:
    """The frame with texts as the names of its columns."""
    frame = frame.rename(columns=str)
    if not frame.columns.is_unique:
        twice = frame.columns[frame.columns.duplicated()].unique()
        raise ValueError(f"there is more than one column {_listed(twice)}: rename them")
    return frame


def _pixel_names(count: int) -> list[str]:
    return [f"X[{at}]" for at in range(count)]


def _target_column(frame: DataFrame, target: str, place: object) -> Series:
    if target not in frame.columns:
        nearest = _nearest(target, frame.columns)
        raise ValueError(f"{place} has no column {target!r} for the target: it has {nearest}")
    return frame[target]


def _labels(target: str, column: Series) -> list[Label]:
    """The labels as plain values, all of one type."""
    from pandas.api.types import infer_dtype

    if count := int(column.isna().sum()):
        raise ValueError(
            f"target {target!r} has {count} missing labels (empty, NA, null or the like): "
            "fill them in, or remove these rows"
        )
    values = column.astype(object)
    kind = infer_dtype(values)
    if kind in ("string", "integer", "boolean"):
        plain: type = {"string": str, "integer": int, "boolean": bool}[kind]
        return [plain(value) for value in values]
    if kind in ("floating", "mixed-integer-float") and all(float(v).is_integer() for v in values):
        return [int(value) for value in values]
    raise ValueError(
        f"target {target!r} must hold classes, all texts, all whole numbers or all truth values: "
        "name another column, or make classes of it"
    )


def _kind(name: str, column: Series) -> str | None:
    """What a column holds: "numbers", "text" (truth values, too), or None if all is missing."""
    from pandas.api.types import infer_dtype

    kind = infer_dtype(column, skipna=True)
    if kind == "empty" or column.isna().all():
        return None
    if kind in ("integer", "floating", "mixed-integer-float", "decimal"):
        return "numbers"
    if kind in ("string", "boolean", "categorical"):
        return "text"
    raise ValueError(
        f"column {name!r} holds neither numbers nor text but {kind}: convert it, or {_drop(name)}"
    )


def _check_text(name: str, column: Series, *, chosen: bool = False) -> None:
    """Refuse a column of text that was meant to be numbers, or that tells single rows apart.

    Whole numbers may be codes. With ``chosen``, all numbers are.
    """
    if _kind(name, column) != "text":
        return
    texts = _texts(column).dropna()
    wrong = _no_numbers(texts)
    meant = wrong.str.fullmatch(_FORMATTED) & wrong.str.contains(r"\d")
    numbers = len(texts) - len(wrong) + int(meant.sum())
    if wrong.empty:  # a point where other columns have a decimal comma
        wrong = texts[~texts.str.fullmatch(r"\s*[+-]?\d+\s*")]
    if len(wrong) and numbers >= _NEARLY_ALL * len(texts) and not chosen:
        raise ValueError(
            f"column {name!r} is mostly numbers, but {len(wrong)} of {len(texts)} entries cannot "
            f"be read so, first {_first(wrong)}: write 1234.5 for $1,234.50 or 1.234,50 and 12.5 "
            f"for 12.5% (decimal commas in all columns or none), leave these cells empty, take it "
            f"for categories (categories={[name]}, on the command line "
            f"--categories {shlex.quote(name)}), or {_drop(name)}"
        )
    different = texts.nunique()
    if different >= max(_FEW, _NEARLY_ALL * len(texts)):
        raise ValueError(
            f"column {name!r} has {different} different texts in {len(texts)} rows, as names and "
            f"dates do, from which nothing can be learned: {_drop(name)}"
        )


def _check_no_row_number(name: str, column: Series) -> None:
    """Refuse the number of the row: where examples are sorted by label, it would give that away."""
    if _kind(name, column) != "numbers" or len(column) < _FEW:
        return
    values = _numbers(name, column)
    if values[0].is_integer() and (np.diff(values) == 1).all():
        raise ValueError(
            f"column {name!r} counts the rows, from {values[0]:.0f} to {values[-1]:.0f}, and "
            f"would tell examples by their place in the file: {_drop(name)}, or shuffle the rows "
            "if it means more than that"
        )


def _no_numbers(column: Series) -> Series:
    """Those entries of a column that cannot be read as numbers, as texts."""
    import pandas as pd

    texts = _texts(column).dropna()
    return texts[pd.to_numeric(texts, errors="coerce").isna()]


def _first(entries: Series) -> str:
    """The first entry and its row, as people count."""
    return f"{entries.iloc[0]!r} in row {entries.index[0] + 1}"


def _drop(*names: str) -> str:
    them = "it" if len(names) == 1 else "them"
    if all(re.fullmatch(r"X\[\d+\]", name) for name in names):  # of an .npz file
        return f"leave {them} out of X"
    return f"leave {them} out (drop={list(names)}, on the command line --drop {shlex.join(names)})"


def _fit_column(name: str, column: Series) -> Numbers | Categories:
    numbers = _kind(name, column) == "numbers"
    return Numbers.fit(name, column) if numbers else Categories.fit(name, column)


def _numbers(name: str, column: Series) -> NDArray[np.float64]:
    """A column as float64, NaN where it is missing."""
    values: NDArray[np.float64] = column.to_numpy(np.float64, na_value=np.nan)
    if (np.abs(values) > _LARGEST).any():
        raise ValueError(
            f"column {name!r} has infinite numbers, or some beyond {_LARGEST:g}: "
            "correct them, or leave these cells empty"
        )
    return values


def _texts(column: Series) -> Series:
    return column.astype(object).map(str, na_action="ignore")


def _pixels(frame: DataFrame, value_range: tuple[float, float]) -> NDArray[np.uint8]:
    """Pixels of whatever type as uint8."""
    low, high = value_range
    values: NDArray[Any] = frame.to_numpy()
    with np.errstate(invalid="ignore"):
        pixels: NDArray[np.uint8] = values.astype(np.uint8)
    if not ((values == pixels) & (pixels >= low) & (pixels <= high)).all():
        raise ValueError(f"the pixels must be whole numbers from {low:g} to {high:g}: scale them")
    return pixels


def _nearest(name: str, names: Iterable[str]) -> str:
    """The names that are meant most likely, for a sentence."""
    names = list(names)
    return _listed(difflib.get_close_matches(name, names) or names)


def _listed(names: Iterable[object], most: int = 8) -> str:
    """Names as they stand in a sentence, a few of them."""
    named = [repr(name) for name in names]
    return ", ".join(named[:most]) + f" and {len(named) - most} more" * (len(named) > most)
