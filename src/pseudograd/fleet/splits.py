"""From a split to the examples of each role."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pseudograd.data import Dataset
from pseudograd.data.dataset import FOLDS
from pseudograd.fleet import randomness
from pseudograd.fleet.trial import Split


@dataclass(frozen=True, eq=False)
class Parts:
    """Indices of examples, by role.

    Attributes:
        train: Those trained on.
        stop: Those that stop the training early.
        judge: Those of the reported error: a validation part, or the test set.

    Example:
        >>> Parts(torch.tensor([0, 1, 2]), torch.tensor([3]), torch.tensor([4])).judge
        tensor([4])

    """

    train: Tensor
    stop: Tensor
    judge: Tensor


def parts(data: Dataset, split: Split, stratified: bool = False) -> Parts:
    """Give the examples of each role: a function of the data set and the split alone.

    The five parts are exactly equal, so in cross-validation up to four examples have no role; in
    the final training they are trained on.

    Args:
        data: The data set.
        split: The cut and the roles.
        stratified: Whether all five folds have equal shares of each class.

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
        raise ValueError(f"data {data.name!r} must have a test set to be judged on")
    # Five turns for the judging part, times four for the stopping part after it.
    recut, turn = divmod(split.repetition, FOLDS * (FOLDS - 1))
    judging = turn % FOLDS
    stopping = (judging + 1 + turn // FOLDS) % FOLDS
    shuffled = randomness.folds(split.plan + (recut << 32), data.train_size)
    if stratified and data.pieces_of is not None:
        shuffled = _pieces_together(shuffled, data.pieces_of.cpu())
    size = data.train_size // FOLDS
    dealt, left_over = shuffled[: size * FOLDS], shuffled[size * FOLDS :]
    if stratified:
        # Class by class, the examples are dealt to the five parts in turn.
        by_class = data.labels.cpu()[dealt].argsort(stable=True)
        folds = dealt[by_class].reshape(size, FOLDS).T
    else:
        folds = dealt.reshape(FOLDS, size)
    test = torch.arange(data.train_size, len(data.labels))
    if split.retrain:
        train = torch.cat((*_without(folds, stopping), left_over))
        return Parts(train, folds[stopping], test)
    train = torch.cat(_without(folds, stopping, judging))
    return Parts(train, folds[stopping], test if split.test else folds[judging])


def _pieces_together(shuffled: Tensor, pieces_of: Tensor) -> Tensor:
    """Bring pieces of one together where its first is, and what is whole to the end.

    So the parts, to which examples are dealt in turn, get different pieces, and the up to four
    examples that are left over are whole.
    """
    _, one, pieces = torch.unique(pieces_of[shuffled], return_inverse=True, return_counts=True)
    place = torch.arange(len(shuffled))
    first = torch.full_like(pieces, len(shuffled)).scatter_reduce(0, one, place, "amin")
    return shuffled[(first + (pieces == 1) * len(shuffled))[one].argsort(stable=True)]


def _without(folds: Tensor, *left_out: int) -> tuple[Tensor, ...]:
    return tuple(fold for at, fold in enumerate(folds) if at not in left_out)
