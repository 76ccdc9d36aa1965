"""The examples of a split: those for training, early stopping and evaluation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pseudograd.data import Dataset
from pseudograd.data.dataset import FOLDS
from pseudograd.fleet import randomness
from pseudograd.fleet.recipe import are_numbers, is_whole
from pseudograd.fleet.trial import Split

_MOST_STOPPING = 10_000  # examples of a bagged split's fold that are used for early stopping


@dataclass(frozen=True, eq=False)
class Parts:
    """Indices of examples, by role.

    Attributes:
        train: The training examples.
        stop: The early-stopping fold; in bagging, the validation fold or a part of it.
        judge: The examples that the reported error is measured on: the validation fold, or the
            test set.

    """

    train: Tensor
    stop: Tensor
    judge: Tensor


def parts(data: Dataset, split: Split, stratified: bool = False) -> Parts:
    """Return the examples of each role, which depend only on the data set and the split.

    The five folds have exactly the same size, so cross-validation leaves out up to four examples;
    the final training uses them. Groups of examples stay together in one fold, and are then not
    stratified.

    Args:
        data: The data set.
        split: The split into folds, and their roles.
        stratified: Whether all five folds have the same class proportions.

    Example:
        >>> from pseudograd.data import digits
        >>> cut = parts(digits(), Split(plan=0, repetition=0))
        >>> len(cut.train), len(cut.stop), len(cut.judge)
        (861, 287, 287)
        >>> final = parts(digits(), Split(plan=0, retrain=True))
        >>> len(final.train), len(final.stop), len(final.judge)
        (1150, 287, 360)

    """
    if data.train_size < FOLDS:
        raise ValueError(f"data {data.name!r} must have at least {FOLDS} training examples")
    if (split.retrain or split.test) and not data.test_size:
        raise ValueError(f"data {data.name!r} must have a test set to evaluate on")
    recut, judging, stopping = _roles(split.repetition, stopping=not split.bagged)
    folds, left_over = _folds(data, split.plan + (recut << 32), stratified)
    test = torch.arange(data.train_size, len(data.labels))
    # Networks of one stack need equally many examples, so smaller folds of groups repeat some.
    sizes = sorted(map(len, folds))
    stop, judge = (_repeated(folds[at], sizes[-1]) for at in (stopping, judging))
    if split.retrain:
        train = torch.cat((*_without(folds, stopping), left_over))
        return Parts(_repeated(train, data.train_size - sizes[0]), stop, test)
    if split.bagged:
        train = torch.cat((*_without(folds, judging), left_over))
        stop = judge[:: -(-len(judge) // _MOST_STOPPING)]  # evaluated after every epoch
        return Parts(_repeated(train, data.train_size - sizes[0]), stop, judge)
    train = _repeated(torch.cat(_without(folds, stopping, judging)), sum(sizes[2:]))
    return Parts(train, stop, test if split.test else judge)


def held_out(data: Dataset, split: Split, stratified: bool = False) -> Tensor:
    """Return all examples of a bagged split's held-out fold.

    Example:
        >>> from pseudograd.data import digits
        >>> len(held_out(digits(), Split(bagged=True)))
        287

    """
    recut, judging, _ = _roles(split.repetition, stopping=False)
    return _folds(data, split.plan + (recut << 32), stratified)[0][judging]


def indices(
    split: Split,
    count: int,
    *,
    early_stopping: bool,
    held_out: float | None,
    labels: Tensor | None = None,
) -> Parts:
    """Implement `Split.indices`; if labels are given, all parts are stratified."""
    stopping = early_stopping and not split.bagged  # bagging stops early by the validation fold
    if held_out is None:
        size = count // FOLDS if is_whole(count, 0, math.inf) else 0
        recut, judge_at, stop_at = _roles(split.repetition, stopping=stopping)
        if not size:
            raise ValueError(f"count must be a whole number, {FOLDS} or more, not {count!r}")
    else:
        size = round(held_out * count) if are_numbers(held_out) and 0 < held_out < 1 else 0
        recut, judge_at, stop_at = split.repetition % 2**31, 0, 1
        if not 0 < (2 if stopping else 1) * size < count:
            raise ValueError(
                f"held_out must be a fraction of the {count} examples that leaves some to train "
                f"on, not {held_out!r}"
            )
    shuffled = randomness.folds(split.plan + (recut << 32), count)
    if labels is not None:
        shuffled = _mixed_evenly(shuffled, labels)
    judge = shuffled[judge_at * size : (judge_at + 1) * size]
    stop = shuffled[stop_at * size : (stop_at + 1) * size]
    trains = torch.ones(count, dtype=torch.bool)
    trains[judge] = split.retrain
    trains[stop] &= not stopping
    none = shuffled[:0]
    return Parts(
        train=shuffled[trains[shuffled]],
        stop=(judge if split.bagged else stop) if early_stopping else none,
        judge=none if split.retrain or split.test else judge,
    )


def _mixed_evenly(shuffled: Tensor, labels: Tensor) -> Tensor:
    """Reorder examples so that every contiguous slice is stratified by class."""
    by_class = shuffled[labels[shuffled].argsort(stable=True)]
    ordered = labels[by_class]
    counts = ordered.bincount()
    rank = torch.arange(len(ordered)) - (counts.cumsum(0) - counts)[ordered]
    return by_class[((rank + 0.5) / counts[ordered]).argsort(stable=True)]


def _roles(repetition: int, *, stopping: bool) -> tuple[int, int, int]:
    """Return the number of the split into folds, its validation fold and its stopping fold."""
    # Five choices of the validation fold, times four of the stopping fold if there is one.
    recut, turn = divmod(repetition, FOLDS * (FOLDS - 1) if stopping else FOLDS)
    judging = turn % FOLDS
    return recut, judging, (judging + 1 + turn // FOLDS) % FOLDS


def _folds(data: Dataset, seed: int, stratified: bool) -> tuple[Sequence[Tensor], Tensor]:
    """Return five folds of the training examples, and up to four left-over examples."""
    shuffled = randomness.folds(seed, data.train_size)
    if data.groups is not None:
        return _folds_of_groups(shuffled, data.groups[: data.train_size].cpu()), shuffled[:0]
    if stratified and data.pieces_of is not None:
        shuffled = _pieces_together(shuffled, data.pieces_of.cpu())
    size = data.train_size // FOLDS
    dealt, left_over = shuffled[: size * FOLDS], shuffled[size * FOLDS :]
    if stratified:
        # Deal the examples to the five folds in turn, sorted by class.
        by_class = data.labels.cpu()[dealt].argsort(stable=True)
        return tuple(dealt[by_class].reshape(size, FOLDS).T), left_over
    return tuple(dealt.reshape(FOLDS, size)), left_over


def _folds_of_groups(shuffled: Tensor, groups: Tensor) -> tuple[Tensor, ...]:
    """Return folds that keep groups together: largest first, each joins the smallest fold."""
    _, group, counts = torch.unique(groups[shuffled], return_inverse=True, return_counts=True)
    if len(counts) < FOLDS:
        raise ValueError(
            f"groups must be at least {FOLDS} in the training set, one per fold, not {len(counts)}"
        )
    place = torch.arange(len(shuffled))
    first = torch.full_like(counts, len(shuffled)).scatter_reduce(0, group, place, "amin")
    by_chance = first.argsort()
    fold_of, sizes = torch.empty(len(counts), dtype=torch.int64), [0] * FOLDS
    for one in by_chance[counts[by_chance].argsort(descending=True, stable=True)].tolist():
        smallest = sizes.index(min(sizes))
        fold_of[one] = smallest
        sizes[smallest] += int(counts[one])
    return tuple(shuffled[fold_of[group] == fold] for fold in range(FOLDS))


def _pieces_together(shuffled: Tensor, pieces_of: Tensor) -> Tensor:
    """Move the pieces of an example next to its first piece, and whole examples to the end.

    Dealing in turn then gives each fold a different piece, and only whole examples are left over.
    """
    _, one, pieces = torch.unique(pieces_of[shuffled], return_inverse=True, return_counts=True)
    place = torch.arange(len(shuffled))
    first = torch.full_like(pieces, len(shuffled)).scatter_reduce(0, one, place, "amin")
    return shuffled[(first + (pieces == 1) * len(shuffled))[one].argsort(stable=True)]


def _repeated(examples: Tensor, size: int) -> Tensor:
    """Repeat examples cyclically up to the given size."""
    return examples.repeat(-(-size // len(examples)))[:size]


def _without(folds: Sequence[Tensor], *left_out: int) -> tuple[Tensor, ...]:
    return tuple(fold for at, fold in enumerate(folds) if at not in left_out)
