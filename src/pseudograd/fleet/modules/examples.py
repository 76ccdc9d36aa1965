"""The examples of a study of any network: tensors of any shape, or a map-style Dataset."""

from __future__ import annotations

import functools
import hashlib
import math
import random
import sys
import time
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, TensorDataset

from pseudograd.data.parts import copies_in_words, count_copies
from pseudograd.fleet.modules.code import describe
from pseudograd.fleet.randomness import seeded
from pseudograd.fleet.recipe import ModuleRecipe, is_whole
from pseudograd.fleet.splits import Parts, indices
from pseudograd.fleet.trial import Split
from pseudograd.words import duration, first_line, listed, raised


@dataclass(frozen=True, eq=False)
class Examples:
    """Examples of a classification problem: training, validation, then test examples.

    Attributes:
        name: The name that recipes refer to.
        inputs: The network's inputs, one tensor per argument, one row per example; () if they are
            read from ``source``.
        labels: Class indices, shape (examples) or, for sequences and images, (examples, ...).
        train_size: The number of training examples.
        source: Reads the inputs of an example, if they do not fit into memory or change from one
            read to the next.
        notes: Remarks for the user on how the data is used.
        validation_size: The number of examples after the training ones that form a validation set
            of its own; 0 if networks are validated on a part of the training examples. The rest is
            the test set.
        num_workers: As for a DataLoader: the processes that read ``source`` for one training.

    """

    name: str
    inputs: tuple[Tensor, ...]
    labels: Tensor
    train_size: int
    source: Dataset[tuple[Tensor, ...]] | None = None
    notes: tuple[str, ...] = ()
    validation_size: int = 0
    num_workers: int = 0

    @classmethod
    def of(
        cls,
        train: Any,
        test: Any,
        name: str = "data",
        ignore_index: int = -100,
        validation: Any = None,
        num_workers: int = 0,
    ) -> Examples:
        """Return the examples of a training, a test and perhaps a validation set.

        Args:
            train: A pair of inputs and labels, or a map-style `torch.utils.data.Dataset` of such
                pairs. Inputs are a tensor or array with one row per example, or a tuple of these if
                the network takes several arguments.
            test: The test set, in the same form.
            name: A name for the data.
            ignore_index: The label to ignore.
            validation: The validation set, in the same form; None if there is none.
            num_workers: As for a `torch.utils.data.DataLoader`, for a Dataset that is read again in
                every epoch.

        Example:
            >>> x, y = torch.rand(10, 3, 8, 8), torch.arange(10) % 2
            >>> found = Examples.of((x[:8], y[:8]), (x[8:], y[8:]))
            >>> found.train_size, found.test_size, found.shapes
            (8, 2, ((3, 8, 8),))

        """
        if not is_whole(num_workers, 0, math.inf):
            raise ValueError(f"num_workers must be a whole number, 0 or more, not {num_workers!r}")
        given = {"train": train, "validation": validation, "test": test}
        if validation is None:
            del given["validation"]
        sets, labels, told = zip(*(_read(one, which) for which, one in given.items()), strict=True)
        wanted, *others = (_form(one[0], y[0]) for one, y in zip(sets, labels, strict=True))
        present = [{*y.unique().tolist()} - {ignore_index} for y in labels]
        for which, found in zip([*given][1:], others, strict=True):
            if found != wanted:
                raise ValueError(
                    f"{which} must have examples of the same shapes and types as train, {wanted}, "
                    f"not {found}"
                )
        for which, classes in zip(given, present, strict=True):
            if not classes:
                raise ValueError(f"{which} must have labels other than ignore_index")
            if (lowest := min(classes)) < 0:
                raise ValueError(
                    f"{which} must have labels of at least 0, or ignore_index ({ignore_index}), "
                    f"not {lowest}"
                )
        known = present[0]
        if len(known) == 1:
            raise ValueError(
                f"train must have labels of two or more classes, but all are {min(known)}"
            )
        notes = [*filter(None, told)]
        if any(one.dtype == torch.uint8 for one in sets[0][0]):
            notes.append("bytes are divided by 255, as ToTensor does")
        for which, classes in zip(given, present, strict=True):
            if unknown := classes - known:
                notes.append(
                    f"{which} has labels that train has not, {listed(sorted(unknown))}: no network "
                    "can learn to predict them"
                )
        inputs: tuple[Tensor, ...] = ()
        source: Dataset[tuple[Tensor, ...]] | None = ConcatDataset(sets)
        if all(isinstance(one, TensorDataset) for one in sets):
            columns = [one.tensors for one in sets]
            rows = [
                [one.numpy() for one in (*part, y)] for part, y in zip(columns, labels, strict=True)
            ]
            for part, kind in zip(rows[:-1], ("training", "validation"), strict=False):
                if copies := count_copies(rows[-1], part):
                    notes.append(copies_in_words(copies, len(labels[-1]), "example", kind))
            inputs, source = tuple(map(torch.cat, zip(*columns, strict=True))), None
        return cls(
            name,
            inputs,
            torch.cat(labels),
            len(labels[0]),
            source,
            tuple(notes),
            0 if validation is None else len(labels[1]),
            num_workers,
        )

    @property
    def arrays(self) -> list[np.ndarray[Any, Any]]:
        """The inputs, then the labels, as arrays that can be shared between processes."""
        return [tensor.numpy() for tensor in (*self.inputs, self.labels)]

    @classmethod
    def shared(
        cls,
        source: Dataset[tuple[Tensor, ...]] | None,
        arrays: Iterable[np.ndarray[Any, Any]],
        name: str,
        train_size: int,
        validation_size: int,
        num_workers: int,
        sha256: str,
    ) -> Examples:
        """Return examples that use the `arrays` of another process without copying them."""
        *inputs, labels = read_only(arrays)
        found = cls(
            name, tuple(inputs), labels, train_size, source, (), validation_size, num_workers
        )
        vars(found)["sha256"] = sha256  # not computed again
        return found

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def test_size(self) -> int:
        """The number of test examples."""
        return len(self.labels) - self.train_size - self.validation_size

    @property
    def known(self) -> tuple[Any, ...]:
        """What `shared` needs besides the source and the arrays."""
        return self.name, self.train_size, self.validation_size, self.num_workers, self.sha256

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each input of one example."""
        return tuple(tuple(one.shape[1:]) for one in self.batch(torch.arange(1)))

    def batch(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs of some examples, as they are stored."""
        if self.source is None:
            return tuple(one.index_select(0, rows) for one in self.inputs)
        return _stacked([self.source[row] for row in rows.tolist()])

    def batches(self, several: Iterable[Tensor]) -> Iterator[tuple[Tensor, ...]]:
        """Yield the inputs of several batches in order; worker processes read them ahead."""
        if self.source is None or not self.num_workers:
            yield from map(self.batch, several)
            return
        yield from DataLoader(
            _Seeded(self.source),
            batch_size=None,
            sampler=[rows.tolist() for rows in several],
            num_workers=self.num_workers,
            collate_fn=_unchanged,
            generator=torch.Generator(),  # draws nothing from the global one, as dropout does
            # In a worker process of loky, the default would be loky's, which torch cannot use.
            multiprocessing_context="fork" if sys.platform == "linux" else "spawn",
        )

    @functools.cached_property
    def sha256(self) -> str:
        """The SHA-256 of inputs and labels; a source is sampled."""
        digest = hashlib.sha256()
        if self.source is not None:
            digest.update(_sampled(self.source))
        for tensor in (*self.inputs, self.labels):
            digest.update(tensor.contiguous().numpy().data)
        return digest.hexdigest()

    def parts(self, recipe: ModuleRecipe, split: Split) -> Parts:
        """Return the examples of each role, as `Split.indices` does.

        All parts are stratified if every example has one label. With a validation set of its own,
        all splits train on all training examples.
        """
        train, own, test = torch.arange(len(self)).split(
            [self.train_size, self.validation_size, self.test_size]
        )
        if len(own):
            stop = own[:0] if recipe.patience is None else own
            return Parts(train, stop, test if split.retrain else own)
        labels = self.labels[: self.train_size]
        has_classes = labels.dim() == 1 and bool((labels >= 0).all())
        cut = indices(
            split,
            self.train_size,
            early_stopping=recipe.patience is not None,
            held_out=recipe.validation,
            labels=labels if has_classes else None,
        )
        return Parts(cut.train, cut.stop, test if split.retrain else cut.judge)


_READ_AGAIN = 256  # examples read twice, to see whether a Dataset changes between reads
_FIRST_LINE, _NEXT_LINE = 2.0, 10.0  # seconds until reading reports its progress
_HASHED = 16  # examples of a source that go into its hash


class _Inputs(Dataset[tuple[Tensor, ...]]):
    """The inputs of the examples of a Dataset, as the network gets them."""

    def __init__(self, dataset: Any, which: str) -> None:
        self.dataset, self.which = dataset, which

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, at: int) -> tuple[Tensor, ...]:
        return _example(self.dataset, at, self.which)[0]


class _Seeded(Dataset[tuple[Tensor, ...]]):
    """The batches of a source; their random transforms depend on their rows, not on the worker."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __getitem__(self, rows: Any) -> tuple[Tensor, ...]:
        seed = zlib.crc32(repr(rows).encode())
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        return _stacked([self.source[row] for row in rows])


def _unchanged(batch: Any) -> Any:
    return batch


_Part = tuple[Dataset[tuple[Tensor, ...]], Tensor, str]


def _read(given: Any, which: str) -> _Part:
    """Return the inputs and the labels of a training or test set, and a remark or ""."""
    if isinstance(given, TensorDataset):
        *tensors, labels = given.tensors
        given = (tuple(tensors), labels)
    is_pair = isinstance(given, tuple | list) and len(given) == 2
    if not is_pair and not (hasattr(given, "__getitem__") and hasattr(given, "__len__")):
        raise ValueError(
            f"{which} must be a pair (inputs, labels) or a map-style Dataset of such pairs, not "
            f"{type(given).__name__}{': pass its dataset' * isinstance(given, DataLoader)}"
        )
    if not len(given[1] if is_pair else given):
        raise ValueError(f"{which} must have examples, but has none")
    if not is_pair:
        return _read_dataset(given, which)
    inputs, labels = _inputs(given[0], which), _labels(given[1], which)
    if any(len(one) != len(labels) for one in inputs):
        raise ValueError(
            f"{which} must have one label for each example, but has {len(inputs[0])} examples and "
            f"{len(labels)} labels"
        )
    _check_finite(inputs, which)
    return TensorDataset(*inputs), labels, ""


def _read_dataset(given: Any, which: str) -> _Part:
    """Read a Dataset into memory, unless it is too large or changes between reads."""
    from pseudograd.data.dataset import memory

    first, label = _example(given, 0, which)
    wanted, before = _form(first, label), random_states()
    keep = len(given) * sum(one.nbytes for one in first) < memory() / 3
    columns: list[list[Tensor]] = [[] for _ in first]
    labels = []
    for at in _told(which, len(given)):
        inputs, label = _example(given, at, which)
        if (found := _form(inputs, label)) != wanted:
            raise ValueError(
                f"{which} must have examples of one shape and type, but example {at} has {found} "
                f"and example 0 has {wanted}: pad, crop or convert them"
            )
        _check_finite(tuple(one[None] for one in inputs), which, at)
        labels.append(label)
        for column, one in zip(columns, inputs, strict=True) if keep else ():
            column.append(one)
    targets = _labels(torch.stack(labels), which)
    # A Dataset with random transforms must be read again in every epoch.
    again = range(0, len(given), -(-len(given) // _READ_AGAIN)) if keep else ()
    same = random_states() == before and all(
        torch.equal(old[at], new)
        for at in again
        for old, new in zip(columns, _example(given, at, which)[0], strict=True)
    )
    if keep and same:
        return TensorDataset(*map(torch.stack, columns)), targets, ""
    why = "is larger than a third of the memory" if same else "changes each time it is read"
    note = f"{which} {why}, so its examples are read again in every epoch"
    return _Inputs(given, which), targets, note


def _stacked(read: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return tuple(torch.stack(column) for column in zip(*read, strict=True))


def _form(inputs: Iterable[Tensor], label: Tensor) -> str:
    """Return the shapes and types of an example in words."""
    shown = [f"{tuple(one.shape)} {str(one.dtype).removeprefix('torch.')}" for one in inputs]
    return " and ".join(shown) + f" with labels {tuple(label.shape)}" * bool(label.dim())


def _check_finite(inputs: Iterable[Tensor], which: str, start: int = 0) -> None:
    for one in inputs:
        # Less memory than `isfinite`, and NaN is both extremes.
        if not one.is_floating_point() or not one.numel():
            continue
        if not bool(torch.stack(one.aminmax()).isfinite().all()):
            at = start + int((~one.isfinite()).nonzero()[0, 0])
            raise ValueError(
                f"{which} must have finite inputs, but example {at} has NaN or infinity: replace "
                "these or drop the example"
            )


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
    for part in source.datasets:
        while (part := getattr(part, "dataset", None)) is not None:  # of a Subset, too
            found += describe(part)
    return found


def _example(source: Any, at: int, which: str) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the inputs and the label of one example of a Dataset."""
    try:
        x, y = source[at]
    except Exception as problem:
        raise ValueError(
            f"{which} must have examples (x, y), but example {at} cannot be read "
            f"({raised(problem)})"
        ) from problem
    return _inputs(x, which), _tensor(y, f"{which} labels")


def _inputs(given: Any, which: str) -> tuple[Tensor, ...]:
    """Return the inputs, one for each argument of the network."""
    several = isinstance(given, tuple) or (
        isinstance(given, list) and all(isinstance(one, Tensor | np.ndarray) for one in given)
    )  # a list of numbers is one input
    found = (_tensor(one, f"{which} inputs") for one in (given if several else [given]))
    return tuple(one.float() if one.is_floating_point() else one for one in found)


def _tensor(given: Any, what: str) -> Tensor:
    try:
        if isinstance(given, Tensor):
            return given.detach().cpu()
        return read_only([np.asarray(given)])[0]
    except (TypeError, ValueError, RuntimeError) as problem:
        raise ValueError(
            f"{what} must be numbers in tensors or arrays ({first_line(problem)})"
        ) from problem


def _labels(given: Any, which: str) -> Tensor:
    labels = _tensor(given, f"{which} labels")
    if labels.is_floating_point() and not bool((labels == labels.round()).all()):
        raise ValueError(f"{which} must have class indices as labels, not fractions or NaN")
    return labels.long()


def read_only(arrays: Iterable[np.ndarray[Any, Any]]) -> list[Tensor]:
    """Return tensors that share memory with read-only arrays, without PyTorch's warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [torch.from_numpy(array) for array in arrays]


def prepared(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return a batch with bytes scaled to [0, 1], as `ToTensor` does."""
    return tuple(one.float() / 255 if one.dtype == torch.uint8 else one for one in inputs)
