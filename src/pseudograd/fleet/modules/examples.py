"""The examples of a study of any network: tensors of any shape, or a map-style Dataset."""

from __future__ import annotations

import functools
import hashlib
import random
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from pseudograd.data.parts import copies_in_words, count_copies
from pseudograd.fleet.modules.code import describe
from pseudograd.fleet.randomness import seeded
from pseudograd.fleet.recipe import ModuleRecipe
from pseudograd.fleet.splits import Parts, indices
from pseudograd.fleet.trial import Split
from pseudograd.words import duration, first_line, listed


@dataclass(frozen=True, eq=False)
class Examples:
    """Examples of a classification problem, the training ones first.

    Attributes:
        name: The name that recipes refer to.
        inputs: The network's inputs, one tensor per argument, one row per example; () if they are
            read from ``source``.
        labels: Class indices, shape (examples) or, for sequences and images, (examples, ...).
        train_size: The number of training examples; the rest is the test set.
        source: Reads the inputs of an example, if they do not fit into memory or change from one
            read to the next.
        notes: Remarks for the user on how the data is used.

    """

    name: str
    inputs: tuple[Tensor, ...]
    labels: Tensor
    train_size: int
    source: Sequence[tuple[Tensor, ...]] | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, train: Any, test: Any, name: str = "data", ignore_index: int = -100) -> Examples:
        """Return the examples of a training and a test set.

        Args:
            train: A pair of inputs and labels, or a map-style `torch.utils.data.Dataset` of such
                pairs. Inputs are a tensor or array with one row per example, or a tuple of these if
                the network takes several arguments.
            test: The test set, in the same form.
            name: A name for the data.
            ignore_index: The label to ignore.

        Example:
            >>> x, y = torch.rand(10, 3, 8, 8), torch.arange(10) % 2
            >>> found = Examples.of((x[:8], y[:8]), (x[8:], y[8:]))
            >>> found.train_size, found.test_size, found.shapes
            (8, 2, ((3, 8, 8),))

        """
        both = [_Part.of(part, which) for part, which in ((train, "train"), (test, "test"))]
        first, second = both
        if first.shapes != second.shapes:
            raise ValueError(
                f"test must have inputs of the same shape as train, {_shown(first.shapes)}, not "
                f"{_shown(second.shapes)}"
            )
        if first.types != second.types:
            raise ValueError(
                "test must have inputs of the same type as train, "
                f"{' and '.join(first.types)}, not {' and '.join(second.types)}"
            )
        if first.labels.shape[1:] != second.labels.shape[1:]:
            raise ValueError(
                "test must have labels of the same shape per example as train, "
                f"{tuple(first.labels.shape[1:])}, not {tuple(second.labels.shape[1:])}"
            )
        known, tested = (part.classes - {ignore_index} for part in both)
        for classes, which in ((known, "train"), (tested, "test")):
            if not classes:
                raise ValueError(f"{which} must have labels other than ignore_index")
            if (lowest := min(classes)) < 0:
                raise ValueError(
                    f"{which} must have labels of at least 0, or ignore_index ({ignore_index}), "
                    f"not {lowest}"
                )
        if len(known) == 1:
            raise ValueError(
                f"train must have labels of two or more classes, but all are {min(known)}"
            )
        labels = torch.cat([part.labels for part in both])
        said = (*first.notes, *second.notes, *_compared(first, second, tested - known))
        notes = tuple(dict.fromkeys(said))
        if all(part.inputs for part in both):
            columns = zip(first.inputs, second.inputs, strict=True)
            inputs = tuple(torch.cat([one, other]) for one, other in columns)
            return cls(name, inputs, labels, len(first), None, notes)
        return cls(name, (), labels, len(first), _Joined(first, second), notes)

    @property
    def arrays(self) -> list[np.ndarray[Any, Any]]:
        """The inputs, then the labels, as arrays that can be shared between processes."""
        return [tensor.numpy() for tensor in (*self.inputs, self.labels)]

    @classmethod
    def shared(
        cls,
        name: str,
        arrays: Iterable[np.ndarray[Any, Any]],
        train_size: int,
        source: Sequence[tuple[Tensor, ...]] | None,
    ) -> Examples:
        """Return examples that use the `arrays` of another process without copying them."""
        *inputs, labels = read_only(arrays)
        return cls(name, tuple(inputs), labels, train_size, source)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def test_size(self) -> int:
        """The number of test examples."""
        return len(self.labels) - self.train_size

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each input of one example."""
        return tuple(tuple(one.shape[1:]) for one in self.batch(torch.arange(1)))

    def batch(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs of some examples, as they are stored."""
        if self.source is None:
            return tuple(one.index_select(0, rows) for one in self.inputs)
        read = [self.source[row] for row in rows.tolist()]
        return tuple(torch.stack(column) for column in zip(*read, strict=True))

    @functools.cached_property
    def sha256(self) -> str:
        """The SHA-256 of inputs and labels; a source is sampled."""
        digest = hashlib.sha256()
        if self.source is not None:
            digest.update(f"{self.source!r}".encode() + _sampled(self.source))
        for tensor in (*self.inputs, self.labels):
            digest.update(tensor.contiguous().numpy().data)
        return digest.hexdigest()

    def parts(self, recipe: ModuleRecipe, split: Split) -> Parts:
        """Return the examples of each role, as `Split.indices` does.

        All parts are stratified if every example has one label.
        """
        labels = self.labels[: self.train_size]
        has_classes = labels.dim() == 1 and bool((labels >= 0).all())
        cut = indices(
            split,
            self.train_size,
            early_stopping=recipe.patience is not None,
            held_out=recipe.validation,
            labels=labels if has_classes else None,
        )
        test = torch.arange(self.train_size, len(self))
        return Parts(cut.train, cut.stop, test if split.retrain else cut.judge)


_READ_AGAIN = 256  # examples read twice, to see whether a Dataset changes between reads
_FIRST_LINE, _NEXT_LINE = 2.0, 10.0  # seconds until reading reports its progress
_MOST_CLASSES = 1 << 20  # to count at once
_HASHED = 16  # examples of a source that go into its hash


class _Part:
    """A training or test set: labels in memory, and inputs too if they fit."""

    def __init__(
        self,
        inputs: tuple[Tensor, ...],
        labels: Tensor,
        source: Dataset[Any] | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.inputs, self.labels, self.source, self.notes = inputs, labels, source, notes

    @classmethod
    def of(cls, given: Any, which: str) -> _Part:
        if isinstance(given, TensorDataset):
            *inputs, labels = given.tensors
            given = (tuple(inputs), labels)
        if isinstance(given, tuple | list) and len(given) == 2:
            made = cls(_inputs(given[0], which), _labels(given[1], which))
        elif (
            hasattr(given, "__getitem__")
            and hasattr(given, "__len__")
            and not isinstance(given, Mapping | str)
        ):
            made = cls._read(given, which)
        else:
            raise ValueError(
                f"{which} must be a pair (inputs, labels) or a map-style Dataset of such pairs, "
                f"not {type(given).__name__}" + ": pass its dataset" * isinstance(given, DataLoader)
            )
        made._check(which)
        return made

    @classmethod
    def _read(cls, given: Any, which: str) -> _Part:
        """Read a Dataset into memory, unless it is too large or changes between reads."""
        from pseudograd.data.memory import available

        if not len(given):
            raise ValueError(f"{which} must have examples, but has none")
        first = _example(given, 0, which)
        size = len(given) * sum(one.nbytes for one in first[0])
        before = random_states()
        keep = size < available() / 3
        columns: list[list[Tensor]] = [[] for _ in first[0]]
        labels = []
        shapes, types = [one.shape for one in first[0]], _types(first[0])
        for at in _told(which, len(given)):
            inputs, label = _example(given, at, which)
            if not all(bool(one.isfinite().all()) for one in inputs):
                raise _not_finite(which, at)
            if [one.shape for one in inputs] != shapes or label.shape != first[1].shape:
                found, wanted, what = [one.shape for one in inputs], shapes, "examples"
                if found == shapes:
                    found, wanted, what = [label.shape], [first[1].shape], "labels"
                raise ValueError(
                    f"{which} must have {what} of one shape, but example {at} has "
                    f"{_shown(found)} and example 0 has {_shown(wanted)}: pad or crop them"
                )
            if _types(inputs) != types:
                raise ValueError(
                    f"{which} must have examples of one type, but example {at} has "
                    f"{' and '.join(_types(inputs))} and example 0 has {' and '.join(types)}: "
                    "convert them"
                )
            labels.append(label)
            if keep:
                for column, one in zip(columns, inputs, strict=True):
                    column.append(one)
        targets = _labels(torch.stack(labels), which)
        # A Dataset with random transforms must be read again in every epoch.
        same = random_states() == before and all(
            torch.equal(old[at], new)
            for at in range(0, len(given), -(-len(given) // _READ_AGAIN))
            for old, new in zip(columns, _example(given, at, which)[0], strict=keep)
        )
        if keep and same:
            return cls(tuple(torch.stack(column) for column in columns), targets)
        why = (
            "is larger than a third of the free memory" if same else "changes each time it is read"
        )
        note = f"{which} {why}, so its examples are read again in every epoch"
        return cls((), targets, given, (note,))

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def arrays(self) -> list[np.ndarray[Any, Any]]:
        return [tensor.numpy() for tensor in (*self.inputs, self.labels)]

    @property
    def classes(self) -> set[int]:
        """All values of the labels."""
        if not self.labels.numel():
            return set()
        low, high = (int(one) for one in self.labels.aminmax())
        if high - low > _MOST_CLASSES:
            return {*self.labels.unique().tolist()}
        counts = (self.labels.flatten() - low).bincount()  # faster than `unique`
        return {at + low for at in counts.nonzero().flatten().tolist()}

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [tuple(one.shape) for one in self[0]]

    @property
    def types(self) -> list[str]:
        return _types(self[0])

    def __getitem__(self, at: int) -> tuple[Tensor, ...]:
        if self.source is None:
            return tuple(one[at] for one in self.inputs)
        return _example(self.source, at, "data")[0]

    def _check(self, which: str) -> None:
        if not len(self.labels):
            raise ValueError(f"{which} must have examples, but has none")
        for one in self.inputs:
            if len(one) != len(self.labels):
                raise ValueError(
                    f"{which} must have one label for each example, but has {len(one)} examples "
                    f"and {len(self.labels)} labels"
                )
            if _has_infinite(one):
                finite = one.isfinite().flatten(1).all(1) if one.dim() > 1 else one.isfinite()
                raise _not_finite(which, int((~finite).nonzero()[0]))
        self.inputs = tuple(one.float() if _is_other_float(one) else one for one in self.inputs)
        if "uint8" in self.types:
            self.notes += ("bytes are divided by 255, as ToTensor does",)


def _compared(first: _Part, second: _Part, unknown: set[int]) -> Iterator[str]:
    """Yield remarks on test examples that the training examples make too easy or too hard."""
    if unknown:
        yield (
            f"test has labels that train has not, {listed(sorted(unknown))}: no network can learn "
            "to predict them"
        )
    has_both = first.inputs and second.inputs
    if has_both and (count := count_copies(second.arrays, first.arrays)):
        yield copies_in_words(count, len(second), "example")


def _told(which: str, count: int) -> Iterator[int]:
    """Yield the indices of examples to read; report on standard error if it takes long."""
    began, wait = time.monotonic(), _FIRST_LINE
    for at in range(count):
        passed = time.monotonic() - began
        if passed > wait:
            left = duration(passed / at * (count - at))
            print(f"{which}: {at:,} of {count:,} examples read, {left} left", file=sys.stderr)
            wait = passed + _NEXT_LINE
        yield at


def _not_finite(which: str, at: int) -> ValueError:
    return ValueError(
        f"{which} must have finite inputs, but example {at} has NaN or infinity: replace these or "
        "drop the example"
    )


def _has_infinite(tensor: Tensor) -> bool:
    """Return whether a tensor has NaN or infinity, without the memory that `isfinite` needs."""
    if not (tensor.is_floating_point() and tensor.numel()):
        return False
    return not bool(torch.stack(tensor.aminmax()).isfinite().all())  # NaN is both extremes


def _is_other_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float32


def _types(inputs: Iterable[Tensor]) -> list[str]:
    """Return the names of the inputs' types as the network gets them: all floats are float32."""
    return [
        "float32" if one.is_floating_point() else str(one.dtype).removeprefix("torch.")
        for one in inputs
    ]


class _Joined(Sequence[tuple[Tensor, ...]]):
    """The inputs of the training set followed by those of the test set, read on demand."""

    def __init__(self, first: _Part, second: _Part) -> None:
        self.first, self.second = first, second

    def __len__(self) -> int:
        return len(self.first) + len(self.second)

    def __getitem__(self, at: Any) -> Any:
        inputs = self.first[at] if at < len(self.first) else self.second[at - len(self.first)]
        return tuple(one.float() if _is_other_float(one) else one for one in inputs)

    def __repr__(self) -> str:
        return f"{type(self.first.source).__name__} of {len(self.first)} and {len(self.second)}"


def random_states() -> tuple[Any, ...]:
    """Return the states of the global generators: PyTorch's, then Python's and NumPy's."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002, since transforms use it
    drawn = torch.get_rng_state().numpy().tobytes()
    return drawn, random.getstate(), kind, np.asarray(keys).tobytes(), *rest


def _sampled(source: Any) -> bytes:
    """Return some examples of a source as bytes, or its code if they differ under the same seed."""

    def read() -> bytes:
        with seeded(0):
            random.seed(0)
            np.random.seed(0)  # noqa: NPY002
            places = range(0, len(source), -(-len(source) // _HASHED))
            return b"".join(one.numpy().tobytes() for at in places for one in source[at])

    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        first, second = read(), read()
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
    return first if first == second else _code(source).encode()


def _code(source: Any) -> str:
    """Return a description of the Datasets that a source reads."""
    found = ""
    for part in (source.first.source, source.second.source):
        while part is not None:
            found += describe(part)
            part = getattr(part, "dataset", None)  # of a Subset
    return found


def _example(source: Any, at: int, which: str) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the inputs and the label of one example of a Dataset."""
    try:
        example = source[at]
    except Exception as problem:
        raise ValueError(
            f"{which}: example {at} cannot be read ({first_line(problem)})"
        ) from problem
    if not isinstance(example, tuple | list) or len(example) != 2:
        raise ValueError(
            f"{which} must have examples (x, y), but example {at} is a {type(example).__name__}"
            + (f" of {len(example)}" if isinstance(example, tuple | list) else "")
        )
    x, y = example
    return _inputs(x, which), _tensor(y, f"{which} labels")


def _inputs(given: Any, which: str) -> tuple[Tensor, ...]:
    """Return the inputs, one for each argument of the network."""
    if isinstance(given, list) and all(isinstance(one, float | int | list) for one in given):
        raise ValueError(
            f"{which} inputs must be tensors or arrays, not lists of numbers: use torch.tensor"
        )
    several = given if isinstance(given, tuple | list) else (given,)
    return tuple(_tensor(one, f"{which} inputs") for one in several)


def _tensor(given: Any, what: str) -> Tensor:
    if type(given).__module__.startswith("PIL."):
        raise ValueError(
            f"{what} must be tensors or arrays, not Pillow images: give the Dataset a transform "
            "such as torchvision.transforms.PILToTensor()"
        )
    if isinstance(given, Tensor):
        if given.layout != torch.strided:
            raise ValueError(f"{what} must be dense tensors, not sparse: use to_dense()")
        return given.detach().cpu()
    try:
        array = np.asarray(given)
        if min(array.strides, default=0) < 0 or not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="), order="C")
        return torch.from_numpy(array) if array.flags.writeable else read_only([array])[0]
    except (TypeError, ValueError, RuntimeError) as problem:
        kind = repr(given) if isinstance(given, str) else type(given).__name__
        if isinstance(given, np.ndarray):
            kind += " of texts" if given.dtype.kind in "US" else f" of {given.dtype.name}"
        raise ValueError(
            f"{what} must be numbers in tensors or arrays, not {kind}: convert them, labels to "
            "class indices from 0"
        ) from problem


def _labels(given: Any, which: str) -> Tensor:
    labels = _tensor(given, f"{which} labels")
    if labels.is_floating_point() and not bool((labels == labels.round()).all()):
        raise ValueError(f"{which} must have class indices as labels, not fractions or NaN")
    return labels.long()


def _shown(shapes: Sequence[Sequence[int]]) -> str:
    return " and ".join(str(tuple(shape)) for shape in shapes)


def read_only(arrays: Iterable[np.ndarray[Any, Any]]) -> list[Tensor]:
    """Return tensors that share memory with read-only arrays, without PyTorch's warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [torch.from_numpy(array) for array in arrays]


def prepared(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return a batch with bytes scaled to [0, 1], as `ToTensor` does."""
    return tuple(one.float() / 255 if one.dtype == torch.uint8 else one for one in inputs)
