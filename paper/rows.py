"""The rows of the paper's tables: the experiments and the paper's figures."""

from __future__ import annotations

import csv
import difflib
import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import TypeVar

from paper.protocol import PaperProtocol
from pseudograd.data.benchmarks import BENCHMARKS
from pseudograd.fleet import MLPRecipe
from pseudograd.search import clip_for, ks_for, repetitions_for

TABLES = ("table1", "table3", "table4", "supplement")
UNPRINTED = "unprinted"  # rows commented out in the paper's LaTeX source
_SETS = ("mnist", "cifar10", "svhn", "cifar100")


@dataclass(frozen=True)
class Row:
    """One row of a table: an experiment, and the paper's figures for it.

    Attributes:
        table: "table1", "table3", "table4", "supplement" or "unprinted"; any other name for a row
            of your own.
        data: The data set, one of those that `pseudograd.data.load` knows.
        hidden_layers: The number of hidden layers.
        width: The units of each.
        momentum: The momentum of the training.
        selected_k: The k that cross-validation selected; meaningless for a row of your own.
        error_k1_pct: The test error at k = 1, in percent; None where the paper prints none.
        error_selected_pct: At the selected k.
        ce_k1: The test cross-entropy at k = 1.
        ce_selected: At the selected k.

    Example:
        >>> row = rows("table1")[0]
        >>> row.name, row.selected_k, row.error_k1_pct
        ('mnist 1x400 m0.5', 0.5, 1.76)

    """

    table: str
    data: str
    hidden_layers: int
    width: int
    momentum: float
    selected_k: float = 1.0
    error_k1_pct: float | None = None
    error_selected_pct: float | None = None
    ce_k1: float | None = None
    ce_selected: float | None = None

    def __post_init__(self) -> None:
        if self.data not in BENCHMARKS:
            raise ValueError(f"data must be one of {', '.join(BENCHMARKS)}, not {self.data!r}")

    @property
    def name(self) -> str:
        """The row's name: data set, layers and momentum."""
        return f"{self.data} {self.hidden_layers}x{self.width} m{self.momentum:g}"

    @property
    def printed(self) -> bool:
        """Whether the paper prints it."""
        return self.table in TABLES

    @property
    def of_paper(self) -> bool:
        """Whether it is a row of the paper, printed or commented out in its source."""
        return self.printed or self.table == UNPRINTED


@dataclass(frozen=True)
class Experiment:
    """A row as it is run: as the paper describes it, or with a change.

    Attributes:
        row: The row.
        feature_range: The range that pixels are scaled to.
        activation: The activation of the hidden layers.

    Example:
        >>> first = experiments(rows("table1"))[0]
        >>> first.name, len(first.protocol().wanted({}))  # of a sweep for the first learning rate
        ('mnist 1x400 m0.5', 8)
        >>> replace(first, feature_range=(0.0, 1.0), activation="tanh").name
        'mnist 1x400 m0.5 tanh [0,1]'

    """

    row: Row
    feature_range: tuple[float, float] = (-1.0, 1.0)
    activation: str = "relu"

    @property
    def name(self) -> str:
        """The row's name and the changes."""
        return " ".join([self.row.name, *self._changes])

    @property
    def as_printed(self) -> bool:
        """Whether the row is run without a change."""
        return not self._changes

    @property
    def network(self) -> str:
        """The name without momentum."""
        row = self.row
        return " ".join([f"{row.data} {row.hidden_layers}x{row.width}", *self._changes])

    @property
    def data(self) -> str:
        """The data set and the changes."""
        return " ".join([self.row.data, *self._changes])

    @property
    def _changes(self) -> list[str]:
        changes = [] if self.activation == "relu" else [self.activation]
        low, high = self.feature_range
        return changes + ([] if (low, high) == (-1, 1) else [f"[{low:g},{high:g}]"])

    def recipe(self, data_hash: str = "") -> MLPRecipe:
        """Return the network and its training as the paper describes them.

        Args:
            data_hash: The first digits of the data set's hash, if known.

        """
        row = self.row
        return MLPRecipe(
            row.data,
            (row.width,) * row.hidden_layers,
            data_hash,
            momentum=row.momentum,
            activation=self.activation,
            feature_range=self.feature_range,
            clip=clip_for(row.hidden_layers),
        )

    def protocol(self, data_hash: str = "") -> PaperProtocol:
        """Return the paper's protocol for this row, at full size."""
        row = self.row
        return PaperProtocol(
            self.recipe(data_hash),
            ks=ks_for(row.hidden_layers),
            repetitions=repetitions_for(row.data),
        )

    def smoke(self, data_hash: str = "") -> PaperProtocol:
        """Return a small version for a smoke test; its figures mean nothing."""
        sizes = (max(8, self.row.width // 25),) * self.row.hidden_layers
        recipe = self.recipe(data_hash)
        return replace(
            self.protocol(data_hash),
            recipe=replace(recipe, hidden_layer_sizes=sizes, max_epochs=3, patience=2),
            ks=(1.0, 0.5),
            repetitions=2,
            retrainings=2,
            most_extensions=2,
        )


@cache
def paper_rows() -> tuple[Row, ...]:
    """Return all 94 rows in the paper's order; 27 of them are not printed."""
    text = resources.files("paper").joinpath("rows.csv").read_text("utf-8")

    def figure(text: str) -> float | None:
        return float(text) if text else None

    return tuple(
        Row(
            line["table"],
            line["data"],
            int(line["hidden_layers"]),
            int(line["width"]),
            float(line["momentum"]),
            float(line["selected_k"]),
            figure(line["error_k1_pct"]),
            figure(line["error_selected_pct"]),
            figure(line["ce_k1"]),
            figure(line["ce_selected"]),
        )
        for line in csv.DictReader(text.splitlines())
    )


def rows(table: str = "all", pattern: str = "*") -> list[Row]:
    """Return some of the rows.

    Args:
        table: "table1", "table3", "table4", "supplement", "all" of these, or "unprinted".
        pattern: Matches their names, with ``*`` for anything.

    Example:
        >>> [row.name for row in rows("table3", "svhn*")]
        ['svhn 3x400 m0.5', 'svhn 3x800 m0.5']

    """
    if table not in (*TABLES, UNPRINTED, "all"):
        raise ValueError(f"table must be one of {(*TABLES, UNPRINTED, 'all')}, not {table!r}")
    tables = TABLES if table == "all" else (table,)
    there = [row for row in paper_rows() if row.table in tables]
    return _matching(pattern, {row: row.name for row in there}, f"of {table}")


_Named = TypeVar("_Named")


def _matching(pattern: str, names: dict[_Named, str], where: str) -> list[_Named]:
    """Return those whose names match a pattern; raise ValueError if none does."""
    found = _those_matching(pattern, names)
    if not found:
        near = difflib.get_close_matches(pattern.lower(), names.values(), n=1, cutoff=0)
        like = near[0] if near else paper_rows()[0].name
        raise ValueError(
            f"rows {pattern!r} match no row {where}: names are like {like!r}, and * stands for "
            "anything"
        )
    return found


def _those_matching(pattern: str, names: dict[_Named, str]) -> list[_Named]:
    literal = pattern.replace("[", "[[]")  # as in "mnist 1x400 m0.5 [0,1]"
    return [one for one, name in names.items() if fnmatch.fnmatchcase(name, literal)]


# The effect of the activation: one row of each depth of CIFAR-10, and one of MNIST.
_TANH = ("mnist 1x400 m0.5", "cifar10 1x400 m0.5", "cifar10 3x400 m0.5", "cifar10 5x400 m0.5")


def experiments(rows: Iterable[Row]) -> list[Experiment]:
    """Return the experiments of some rows: each as in the paper, and some also with a change.

    MNIST is also run in [0, 1], which fits the paper's learning rates better, and four rows with
    tanh, since the paper does not name its activation.

    Example:
        >>> [experiment.name for experiment in experiments(rows("table1", "mnist 1x400*"))]
        ['mnist 1x400 m0.5', 'mnist 1x400 m0.5 [0,1]', 'mnist 1x400 m0.5 tanh']

    """
    found = []
    for row in rows:
        found.append(Experiment(row))
        if row.data == "mnist":
            found.append(Experiment(row, feature_range=(0.0, 1.0)))
        if row.name in _TANH:
            found.append(Experiment(row, activation="tanh"))
    return found


def select(experiments: Sequence[Experiment], pattern: str) -> list[Experiment]:
    """Return the experiments whose rows' names match a pattern, or else whose own names do.

    Brackets in the pattern are literal; a full name selects only that experiment.

    Example:
        >>> some = experiments(rows("table1"))
        >>> [experiment.name for experiment in select(some, "mnist 1x800*")]
        ['mnist 1x800 m0.5', 'mnist 1x800 m0.5 [0,1]']
        >>> [experiment.name for experiment in select(some, "* tanh")]
        ['mnist 1x400 m0.5 tanh', 'cifar10 1x400 m0.5 tanh']

    """
    exactly = [experiment for experiment in experiments if experiment.name == pattern]
    if exactly:
        return exactly
    names = {experiment: experiment.row.name for experiment in experiments}
    if not _those_matching(pattern, names):
        names = {experiment: experiment.name for experiment in experiments}
    return _matching(pattern, names, "that is asked for")


def in_turn(experiments: Iterable[Experiment]) -> list[Experiment]:
    """Return experiments in the order of the runs.

    The paper's rows come first, data set by data set, and then the variants; rows that differ only
    in momentum follow each other.

    Example:
        >>> [one.name for one in in_turn(experiments(rows("supplement", "mnist 1x400*")))][:3]
        ['mnist 1x400 m0', 'mnist 1x400 m0.9', 'mnist 1x400 m0 [0,1]']

    """
    found = sorted(experiments, key=_turn)
    networks = list(dict.fromkeys(one.network for one in found))
    return sorted(found, key=lambda one: networks.index(one.network))


def _turn(experiment: Experiment) -> tuple[bool, int]:
    data = experiment.row.data
    return not experiment.as_printed, _SETS.index(data) if data in _SETS else len(_SETS)
