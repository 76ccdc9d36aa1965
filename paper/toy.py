"""The paper's toy example: one input, two classes, and a threshold that k moves.

The input is uniform on [-1, 1]; its class is +1 on [0, α] and -1 elsewhere. The network is one
linear layer with two outputs, so it can only choose a threshold. The best threshold is 0, but the
examples in (α, 1], which it then gets wrong, pull it upwards, the more so the larger k is.

Three facts reduce 70 runs of full-batch descent on 30,000 examples to seconds.

*Four parameters are two.* Eq. 5 gives f = (-A, A) for two classes, so what one output gains, the
other loses: w₊ + w₋ and b₊ + b₋ never change, and only w = w₊ - w₋ and b = b₊ - b₋ have to be
tracked, at twice the learning rate.

*A sample is a few hundred weighted points.* A is a smooth function of x as long as the label does
not change, so on a short cell it equals the polynomial through its values at a few nodes, to the
last digits. The sum over the examples of a cell is then a weighted sum over the nodes, and the
weights depend only on the sample. This does not replace the sample by its distribution: every
example enters at its own position, and the sums agree with those over the 30,000 to 1e-12.

*The validation error is a lookup.* It depends only on the threshold's place among the sorted
examples.
"""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from importlib import resources
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from paper.theory import fixed_point, is_positive
from pseudograd.files import write_whole
from pseudograd.rules.checks import check_k

ALPHA = 0.95
MEASURED = ("error_pct", "threshold", "cross_entropy")
KS = (4.0, 2.0, 1.0, 0.5, 0.25, 0.125, 0.0625)

# Epochs between two checks of the validation error; a run still ends at the exact epoch.
_STRETCH = 250

# Nodes of a cell. A's nearest singularity is at a distance of π / |w| from the real line, and no
# cell is longer than 1 / |w|, so the interpolation error shrinks at least 12-fold with each node.
_NODES = 12
_ANGLES = (np.arange(_NODES) + 0.5) * (np.pi / _NODES)


@dataclass(frozen=True)
class ToyRun:
    """The result of one run; error and cross-entropy are those of the test set.

    Attributes:
        k: The sensitivity to large errors.
        run: The number of the run, from 0.
        seed: Seeds the data and the initial weights, together with the run's number.
        alpha: The end of class +1's interval.
        epochs: The number of steps.
        weight: The final w₊ - w₋.
        bias: The final b₊ - b₋.
        threshold: Where the two outputs are equal, -bias / weight.
        error_pct: The misclassification rate, in percent.
        cross_entropy: The mean cross-entropy, in nats.

    """

    k: float
    run: int
    seed: int
    alpha: float
    epochs: int
    weight: float
    bias: float
    threshold: float
    error_pct: float
    cross_entropy: float


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation (n - 1); the latter is NaN for a single value."""

    mean: float
    sd: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return those of some values."""
        sd = statistics.stdev(values) if len(values) > 1 else math.nan
        return cls(statistics.fmean(values), sd)

    def shown(self, form: str) -> str:
        """Return the mean with its standard deviation, or the mean alone if it has none.

        >>> Spread(1.761, 0.052).shown(".2f"), Spread(math.inf, math.nan).shown(".2f")
        ('1.76 ± 0.05', 'infinite')
        """
        if not math.isfinite(self.mean):
            return "infinite"
        mean = format(self.mean, form)
        return mean if math.isnan(self.sd) else f"{mean} ± {self.sd:{form}}"


@dataclass(frozen=True)
class ToySummary:
    """All runs of one k."""

    k: float
    alpha: float
    runs: int
    error_pct: Spread
    threshold: Spread
    cross_entropy: Spread


@dataclass(frozen=True)
class PaperRow:
    """A row of the paper's table of the toy example."""

    k: float
    error_pct: float
    threshold: float
    cross_entropy: float


def run_toy(
    ks: Iterable[float] = KS,
    runs: int = 10,
    *,
    alpha: float = ALPHA,
    seed: int = 0,
    examples: int = 30_000,
    rate: float = 0.01,
    patience: int = 3000,
    tolerance: float = 1e-5,
    progress: bool = False,
) -> list[ToyRun]:
    """Train the toy network several times for each k, and test the results.

    Run i draws its training, validation and test examples and its initial weights (uniform in
    (-0.1, 0.1); biases 0) from (seed, i), the same for every k. Each epoch is one step of gradient
    descent along the mean pseudo-gradient of the training set (Eq. 3 with f of Eq. 5).

    The paper stops after 3000 epochs in which the validation error did not change by more than
    0.001%. We read that as percentage points from the last error that did: one example of 30,000
    is 0.0033%, so any change restarts the count. `docs/toy.md` has the other reading.

    Args:
        ks: The sensitivities to large errors, above 0.
        runs: How many runs for each k.
        alpha: The end of class +1's interval, in (½, 1).
        seed: The seed of all randomness, 0 or above.
        examples: The size of each of the three sets.
        rate: The learning rate.
        patience: Epochs without a change after which a run stops.
        tolerance: The largest change of the validation error, as a fraction, that counts as none.
        progress: Whether to show on a terminal how many runs have stopped.

    Returns:
        One result for each k and run, in the order of ``ks`` and then of the runs.

    """
    ks = [float(k) for k in ks]
    for k in ks:
        check_k(k)
    if runs < 1:
        raise ValueError(f"runs must be 1 or more, not {runs}")
    if not 0.5 < alpha < 1:
        raise ValueError(f"alpha must lie between 0.5 and 1, not {alpha}")
    trainings = [_Training(k, run, seed, alpha, examples) for k in ks for run in range(runs)]
    active = trainings
    # On a terminal only: tqdm looks for one if ``disable`` is None.
    quiet = None if progress else True
    with (
        _one_thread(),
        tqdm(total=len(trainings), desc="toy", unit="run", leave=False, disable=quiet) as bar,
    ):
        while active:
            bar.set_postfix(epoch=active[0].epochs)
            # An epoch adds 2 · rate to |w| at most, because A and |x| are at most 1.
            for training in active:
                training.refine(abs(training.weight) + 2 * rate * _STRETCH)
            by_cells = sorted(active, key=lambda training: training.cells)
            for cells, group in groupby(by_cells, key=lambda training: training.cells):
                together = list(group)
                paths = _descend(together, _grid(alpha, cells), rate)
                for training, path in zip(together, paths, strict=True):
                    training.follow(path, patience, tolerance)
            bar.update(sum(training.stopped for training in active))
            active = [training for training in active if not training.stopped]
    return [training.result() for training in trainings]


def summarize(results: Iterable[ToyRun]) -> list[ToySummary]:
    """Return the mean and spread of the runs of each k, largest k first."""
    by_k: dict[float, list[ToyRun]] = {}
    for result in results:
        by_k.setdefault(result.k, []).append(result)
    return [
        ToySummary(
            k,
            runs[0].alpha,
            len(runs),
            *(Spread.of([getattr(run, name) for run in runs]) for name in MEASURED),
        )
        for k, runs in sorted(by_k.items(), reverse=True)
    ]


@cache
def paper_table() -> dict[float, PaperRow]:
    """Return the paper's table of the toy example (α = 0.95) by k, means of 10 runs as printed."""
    text = resources.files("paper").joinpath("toy.csv").read_text("utf-8")
    rows = csv.reader(text.splitlines()[1:])
    return {row.k: row for row in (PaperRow(*map(float, line)) for line in rows)}


def paper_row(summary: ToySummary) -> PaperRow | None:
    """Return the paper's row for a summary, if it has one of this k and alpha."""
    return paper_table().get(summary.k) if summary.alpha == ALPHA else None


def table(results: Iterable[ToyRun]) -> str:
    """Return our numbers beside the paper's and those of an infinite sample, as text."""
    triple = "{:>15} {:>6} {:>6}"
    lines = [
        f"{'':10}{'test error, %':>29}{'threshold':>29}{'cross-entropy':>29}",
        f"{'k':<10}" + triple.format("ours", "paper", "limit") * 3,
    ]
    for summary in summarize(results):
        paper, limit = paper_row(summary), fixed_point(summary.k, summary.alpha)
        cells = []
        for name, form in zip(MEASURED, (".2f", ".3f", ".3f"), strict=True):
            spread: Spread = getattr(summary, name)
            theirs = format(getattr(paper, name), form) if paper else "-"
            ours, expected = spread.shown(form), format(getattr(limit, name), form)
            cells.append(triple.format(ours, theirs, expected))
        lines.append(f"{summary.k:<10g}" + "".join(cells))
    return "\n".join(lines)


def write_csv(results: Iterable[ToyRun], path: Path) -> None:
    """Write a line for each run, below the names of its fields."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, [column.name for column in fields(ToyRun)])
    writer.writeheader()
    writer.writerows(asdict(result) for result in results)
    write_whole(path, text.getvalue())


def read_csv(path: Path) -> list[ToyRun]:
    """Read what `write_csv` wrote."""
    types: dict[str, Any] = {
        column.name: int if column.type == "int" else float for column in fields(ToyRun)
    }
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return [
                ToyRun(**{name: read(line[name]) for name, read in types.items()})
                for line in csv.DictReader(file)
            ]
    except (KeyError, TypeError, ValueError) as problem:
        raise ValueError(
            f"{path} is not what `python -m paper toy --csv` writes ({problem!r}): write it again"
        ) from problem


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep PyTorch to one thread: on a busy machine a second one costs more than it gains."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class _Grid:
    """Cells that tile [-1, 1] and end where the label changes, each with its Chebyshev nodes.

    A function g that is smooth within each cell is Σ_j g(x_j) L_j(x) there, L_j being the Lagrange
    polynomials of the cell's nodes x_j. So Σ_i g(x_i) over any sample is Σ_j g(x_j) c_j, where
    c_j = Σ_i L_j(x_i) says how many examples the node stands for.
    """

    alpha: float
    starts: NDArray[np.float64]  # where each cell begins, and at last 1
    nodes: Tensor  # (cells * _NODES)
    signs: Tensor  # the class at each node, as ±1

    def counts(self, x: NDArray[np.float64]) -> Tensor:
        """Return how many of the examples each node stands for; the sum is ``len(x)``."""
        # The two borders belong to class +1: 0 begins a cell, but α must stay in the one it ends.
        cell = np.searchsorted(self.starts, x, side="right") - 1
        cell[x == self.alpha] -= 1
        cell = cell.clip(max=len(self.starts) - 2)
        low, high = self.starts[cell], self.starts[cell + 1]
        angle = np.arccos(((2 * x - low - high) / (high - low)).clip(-1, 1))
        # L_j(x) = (1 + 2 Σ_d T_d(x) T_d(x_j)) / n with T_d(cos θ) = cos(d θ), since Chebyshev's
        # polynomials T_d are orthogonal over their nodes x_j.
        lagrange = np.ones((len(x), _NODES))
        for degree in range(1, _NODES):
            lagrange += 2 * np.outer(np.cos(degree * angle), np.cos(degree * _ANGLES))
        counts = np.zeros((len(self.starts) - 1, _NODES))
        np.add.at(counts, cell, lagrange / _NODES)
        return torch.from_numpy(counts.ravel())


@cache
def _grid(alpha: float, cells: int) -> _Grid:
    """The grid with at least ``cells`` cells for each unit of length."""
    borders = (-1.0, 0.0, alpha, 1.0)
    starts = [
        np.linspace(low, high, math.ceil(cells * (high - low)), endpoint=False)
        for low, high in pairwise(borders)
    ]
    signs = np.repeat([-1.0, 1.0, -1.0], [len(part) * _NODES for part in starts])
    ends = np.append(np.concatenate(starts), 1.0)
    middle, half = (ends[1:] + ends[:-1]) / 2, (ends[1:] - ends[:-1]) / 2
    nodes = middle[:, None] + half[:, None] * np.cos(_ANGLES)
    return _Grid(alpha, ends, torch.from_numpy(nodes.ravel()), torch.from_numpy(signs))


def _descend(trainings: Sequence[_Training], grid: _Grid, rate: float) -> NDArray[np.float64]:
    """Run a stretch of epochs of all trainings at once.

    Returns (weight, bias) after each epoch, shape (trainings, epochs, 2).
    """
    device = grid.nodes.device
    parameters = [[t.weight, t.bias] for t in trainings]
    w, b = torch.tensor(parameters, dtype=torch.float64, device=device).split(1, dim=1)
    k = torch.tensor([[t.k] for t in trainings], dtype=torch.float64, device=device)
    share = torch.stack([t.counts for t in trainings]) / len(trainings[0].train)
    # Twice the rate, because w and b are differences of two parameters that move oppositely.
    pull_b = 2 * rate * share * grid.signs
    pull_w = pull_b * grid.nodes
    away, away_x = -grid.signs, -grid.signs * grid.nodes
    path = torch.empty(_STRETCH, 2, len(trainings), 1, dtype=torch.float64, device=device)
    for epoch in range(_STRETCH):
        # A = (1 - p_y)^k, where 1 - p_y is the sigmoid of minus the margin.
        a = F.logsigmoid(away_x * w + away * b).mul_(k).exp_()
        w = w + (a * pull_w).sum(1, keepdim=True)
        b = b + (a * pull_b).sum(1, keepdim=True)
        path[epoch, 0], path[epoch, 1] = w, b
    return path.squeeze(-1).permute(2, 0, 1).numpy()


@dataclass
class _Training:
    """A run under way."""

    k: float
    run: int
    seed: int
    alpha: float
    examples: int
    epochs: int = field(default=0, init=False)
    stopped: bool = field(default=False, init=False)
    cells: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        generator = np.random.default_rng([self.seed, self.run])
        self.train, self.valid, self.test = generator.uniform(-1, 1, (3, self.examples))
        initial = generator.uniform(-0.1, 0.1, 2)
        self.weight, self.bias = float(initial[1] - initial[0]), 0.0
        self.valid.sort()
        positive = is_positive(self.valid, self.alpha)
        # The number of mistakes if the first i examples are predicted -1 and the others +1.
        passed = np.concatenate([[0], np.cumsum(np.where(positive, 1, -1))])
        self.mistakes = passed + np.count_nonzero(~positive)
        self.reference = -1.0
        self.quiet = 0

    def refine(self, largest_weight: float) -> None:
        """Make sure that no cell is longer than 1 / largest_weight."""
        if largest_weight > self.cells:
            self.cells = max(16, 2 ** math.ceil(math.log2(largest_weight)))
            self.counts = _grid(self.alpha, self.cells).counts(self.train)

    def follow(self, path: NDArray[np.float64], patience: int, tolerance: float) -> None:
        """Follow (weight, bias) epoch by epoch, to the end or to where the run stops."""
        steps = 0
        for error in self._errors(path).tolist():
            steps += 1
            if self.reference < 0 or abs(error - self.reference) > tolerance:
                self.reference, self.quiet = error, 0
            else:
                self.quiet += 1
            self.stopped = self.quiet == patience
            if self.stopped:
                break
        self.epochs += steps
        self.weight, self.bias = path[steps - 1].tolist()

    def _errors(self, path: NDArray[np.float64]) -> NDArray[np.float64]:
        """The validation error, a fraction, at each (weight, bias)."""
        weight, bias = path.T
        threshold = -bias / weight
        # Output +1 must be the larger one: a tie goes to -1.
        rising = self.mistakes[np.searchsorted(self.valid, threshold, side="right")]
        falling = self.examples - self.mistakes[np.searchsorted(self.valid, threshold)]
        errors: NDArray[np.float64] = np.where(weight > 0, rising, falling) / self.examples
        return errors

    def result(self) -> ToyRun:
        """Return the results on the test set."""
        margin = self.weight * self.test + self.bias
        positive = is_positive(self.test, self.alpha)
        losses = np.logaddexp(0, np.where(positive, -margin, margin))
        return ToyRun(
            k=self.k,
            run=self.run,
            seed=self.seed,
            alpha=self.alpha,
            epochs=self.epochs,
            weight=self.weight,
            bias=self.bias,
            threshold=-self.bias / self.weight,
            error_pct=100 * float(np.mean((margin > 0) != positive)),
            cross_entropy=float(losses.mean()),
        )
