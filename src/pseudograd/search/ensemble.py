"""The ensemble of a bagging study, chosen by out-of-fold predictions.

Pairs of k and learning rate are added greedily, with replacement (Caruana et al., "Ensemble
selection from libraries of models", ICML 2004). All networks of a pair, one per fold, are added
together. The paper suggests it as future work: "combining the predictions of models with different
levels of this sensitivity".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pseudograd.data import Dataset
from pseudograd.data.dataset import FOLDS
from pseudograd.fleet import Ensemble, Fleet, Network, Outcome, Stop, Trial
from pseudograd.fleet.splits import held_out
from pseudograd.search.bagging import Bagging
from pseudograd.search.measures import fit_temperature
from pseudograd.search.protocol import Cell, Outcomes
from pseudograd.search.study import Progress, Study

METRICS = ("error", "balanced", "log-loss")
_PICKS = 20  # a pair's weight is a multiple of 1/20
_PAIRS = 3  # at most in an ensemble: as many as k = 1 has learning rates


@dataclass(frozen=True, eq=False)
class Candidates:
    """The networks of each pair, and their out-of-fold predictions.

    Attributes:
        cells: The pairs of k and learning rate.
        networks: The networks of each.
        rows: The training examples with out-of-fold predictions: all but up to four.
        out_of_fold: Their out-of-fold probabilities, shape (cells, rows, classes).
        votes: The classes predicted out of fold, with a column for each pair and each repetition of
            the folds, shape (rows, columns).

    """

    cells: tuple[Cell, ...]
    networks: tuple[tuple[Network, ...], ...]
    rows: Tensor
    out_of_fold: Tensor
    votes: Tensor

    def ensemble(self, weights: Tensor, temperature: float = 1.0) -> Ensemble:
        """Return the ensemble with these weights of the cells.

        Diverged networks are left out, and the others of their cell share the weight.
        """
        pairs = []
        for networks, weight in zip(self.networks, weights.tolist(), strict=True):
            if weight:
                finite = [one for one in networks if one.is_finite] or networks
                pairs += [(network, weight / len(finite)) for network in finite]
        members, shares = zip(*pairs, strict=True)
        return Ensemble(members, shares, temperature)

    def combined(self, weights: Tensor) -> Tensor:
        """Return the out-of-fold probabilities of an ensemble."""
        return torch.einsum("c,cnk->nk", weights, self.out_of_fold)

    def whole(self, weights: Tensor, labels: Tensor) -> Tensor:
        """Return `combined` for all training examples.

        Examples without out-of-fold predictions get probability 1 for their label, so that they are
        not suspects.
        """
        found = torch.zeros(len(labels), self.out_of_fold.shape[2])
        found.scatter_(1, labels.unsqueeze(1), 1.0)
        found[self.rows] = self.combined(weights)
        return found

    def all_votes(self, labels: Tensor) -> Tensor:
        """Return the votes on all training examples, filled in like `whole`."""
        votes = labels.short().unsqueeze(1).repeat(1, self.votes.shape[1])
        votes[self.rows] = self.votes
        return votes


def candidates(
    protocol: Bagging, outcomes: Outcomes, data: Dataset, network_of: Callable[[Trial], Network]
) -> Candidates:
    """Return the candidates for the ensemble of a finished study.

    Args:
        protocol: The study's protocol.
        outcomes: Its outcomes.
        data: Its data set.
        network_of: Returns the network of a trial.

    """
    stratified = getattr(protocol.recipe, "stratified", False)
    cells = tuple(protocol.cells(outcomes))
    networks, found = [], []
    for cell in cells:
        trials = protocol.trials_of(cell)
        networks.append(tuple(map(network_of, trials)))
        found.append(_out_of_fold(trials, networks[-1], data, stratified))
    rows = torch.stack([one.covered for one in found]).all(0).nonzero()[:, 0]
    return Candidates(
        cells,
        tuple(networks),
        rows,
        torch.stack([one.probabilities[rows] for one in found]),
        torch.stack([vote[rows] for one in found for vote in one.votes], 1),
    )


class _OutOfFold(NamedTuple):
    """Out-of-fold predictions of one pair: on which examples, their mean, and the classes."""

    covered: Tensor
    probabilities: Tensor
    votes: list[Tensor]  # one for each repetition of the folds


def _out_of_fold(
    trials: Sequence[Trial], networks: Sequence[Network], data: Dataset, stratified: bool
) -> _OutOfFold:
    total = torch.zeros(data.train_size, data.classes)
    counts = torch.zeros(data.train_size, 1)
    votes = [
        torch.zeros(data.train_size, dtype=torch.int16) for _ in range(-(-len(trials) // FOLDS))
    ]
    for trial, network in zip(trials, networks, strict=True):
        judged = held_out(data, trial.split, stratified)
        probabilities = network.probabilities(data.features[judged]).float().nan_to_num()
        total[judged] += probabilities
        counts[judged] += 1
        votes[trial.split.repetition // FOLDS][judged] = probabilities.argmax(-1).short()
    return _OutOfFold(counts.squeeze(1) > 0, total / counts.clamp(min=1), votes)


def train_candidates(
    protocol: Bagging,
    data: Dataset,
    device: str | torch.device,
    watch: Callable[[Progress], None] = lambda _: None,
) -> Candidates:
    """Run a study in memory, and return the candidates for its ensemble."""
    fleet = Fleet(data, device, keep_parameters=True)
    networks: dict[Trial, Network] = {}

    def run(trials: deque[Trial], stop: Stop) -> Iterator[Outcome]:
        for outcome in fleet.run(trials, stop):
            networks[outcome.trial] = Network.of(outcome, data)
            yield outcome

    study = Study(None, protocol)
    study.run(run, watch=watch)
    return candidates(protocol, study.ledger, data, networks.__getitem__)


def select(
    out_of_fold: Tensor,
    labels: Tensor,
    metric: str = "error",
    example_weights: Tensor | None = None,
    picks: int = _PICKS,
) -> Tensor:
    """Return the weight of each candidate in the best ensemble on these predictions.

    Args:
        out_of_fold: Probabilities, shape (candidates, examples, classes).
        labels: The class indices of the examples.
        metric: "error" or "balanced", to both of which a quarter of the log loss is added to reduce
            the noise of few examples; or "log-loss".
        example_weights: The sample weights; None if all are equal.
        picks: The number of greedy steps; 1 selects the single best candidate.

    Example:
        >>> right = torch.tensor([[0.9, 0.1], [0.4, 0.6]])
        >>> wrong = torch.tensor([[0.2, 0.8], [0.4, 0.6]])
        >>> select(torch.stack([wrong, right]), torch.tensor([0, 1]))
        tensor([0., 1.])

    """
    counts = torch.zeros(len(out_of_fold))
    total = torch.zeros_like(out_of_fold[0])
    for picked in range(picks):
        scores = torch.tensor(
            [
                score((total + one) / (picked + 1), labels, metric, example_weights)
                for one in out_of_fold
            ]
        )
        if (counts > 0).sum() == _PAIRS:
            scores[counts == 0] = torch.inf
        best = int(scores.argmin())
        counts[best] += 1
        total += out_of_fold[best]
    return counts / picks


def score(
    probabilities: Tensor, labels: Tensor, metric: str, example_weights: Tensor | None = None
) -> float:
    """Return the score that `select` minimizes."""
    weights = torch.ones(len(labels)) if example_weights is None else example_weights.float()
    if metric == "balanced":  # all classes have the same total weight
        weights = weights / torch.bincount(labels, weights)[labels]
    own = probabilities.gather(1, labels.unsqueeze(1)).squeeze(1).clamp(min=1e-7)
    wrong = probabilities.argmax(1) != labels
    loss = -own.log()
    judged = loss if metric == "log-loss" else wrong + 0.25 * loss
    return float((weights * judged).sum() / weights.sum())


def calibrated(
    found: Candidates, weights: Tensor, labels: Tensor, example_weights: Tensor | None = None
) -> Ensemble:
    """Return the ensemble with these weights, calibrated on its out-of-fold predictions."""
    log_probabilities = found.combined(weights).clamp(min=1e-7).log().numpy()
    counts = None if example_weights is None else example_weights.double().numpy()
    return found.ensemble(weights, fit_temperature(log_probabilities, labels.numpy(), counts))


def mixture(cells: Sequence[Cell], weights: Tensor) -> list[tuple[Cell, float]]:
    """Return the cells of an ensemble with their weights, in decreasing order."""
    chosen = [(cell, w) for cell, w in zip(cells, weights.tolist(), strict=True) if w]
    return sorted(chosen, key=lambda one: -one[1])
