"""The course of one training: its errors so far, the best epoch, and when to stop."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pseudograd.fleet.recipe import MLPRecipe, ModuleRecipe
from pseudograd.fleet.trial import Outcome, Trial, mixed_score


@dataclass(frozen=True, eq=False)
class Judged:
    """The evaluation of a network on some examples.

    Attributes:
        error: The fraction of labels predicted wrong, without those equal to ignore_index.
        cross_entropy: The mean cross-entropy.
        wrong: A flat mask of the labels predicted wrong; None if not needed.

    """

    error: float
    cross_entropy: float
    wrong: Tensor | None

    @classmethod
    def of(cls, flags: Tensor | None, counted: float, cross_entropy: float, wrong: float) -> Judged:
        """Return the evaluation from the mask, and from sums over the labels that count."""
        counted = max(1.0, counted)
        value = cross_entropy / counted
        if not math.isfinite(value):  # NaN logits have an argmax too
            return cls(1.0, math.inf, None if flags is None else torch.ones_like(flags))
        return cls(wrong / counted, value, flags)


@dataclass
class Course:
    """The state of a trial in training.

    Attributes:
        trial: The trial.
        recipe: Its recipe.
        epoch: The number of epochs so far.
        best_epoch: The epoch that is kept.
        best_error: Its error on the early-stopping part.
        since: The first epoch with the best score.
        curve: The error after each epoch, if it was measured.

    """

    trial: Trial
    recipe: MLPRecipe | ModuleRecipe
    epoch: int = 0
    best_epoch: int = 0
    best_error: float = math.inf
    best_score: float = math.inf
    since: int = 0
    curve: list[float] = field(default_factory=list)

    @property
    def progress(self) -> float:
        """The fraction of all epochs completed in the middle of this one."""
        return (self.epoch + 0.5) / self.recipe.max_epochs

    def note(self, error: float | None, cross_entropy: float = math.nan) -> bool:
        """Record an epoch's evaluation, if there was one; return whether to keep its weights."""
        self.epoch += 1
        if error is not None:
            self.curve.append(error)
        if error is None or self.recipe.patience is None:
            self.best_epoch = self.epoch
            return True
        by_error = self.recipe.stop_by == "error"
        score = error if by_error else mixed_score(error, cross_entropy)
        if score < self.best_score:
            self.best_score, self.since = score, self.epoch
        if self.since == self.epoch or (score == self.best_score and self.recipe.ties == "last"):
            self.best_epoch, self.best_error = self.epoch, error
        return self.best_epoch == self.epoch

    def stopped_by(self, finite: bool) -> str | None:
        """Return the reason to end the trial now, or None to continue."""
        if not finite:
            return "diverged"
        patience = self.recipe.patience
        if patience is not None and self.epoch - self.since >= patience:
            return "patience"
        return "limit" if self.epoch >= self.recipe.max_epochs else None

    def outcome(
        self,
        reason: str,
        judged: Judged,
        state: dict[str, Tensor] | None = None,
        last_state: dict[str, Tensor] | None = None,
        **kept: Any,
    ) -> Outcome:
        """Return the outcome, given the evaluation of the kept network."""
        retrain = self.trial.split.retrain
        stop_error = judged.error
        if self.recipe.patience is not None:
            stop_error = min(self.best_error, 1.0)
        elif retrain:
            stop_error = 0.0  # not the test error, which must not be used to select networks
        wrong = None
        if retrain and judged.wrong is not None:
            wrong = tuple(judged.wrong.nonzero()[:, 0].tolist())
        return Outcome(
            trial=self.trial,
            stop_error=stop_error,
            best_epoch=self.best_epoch or self.epoch,
            error=judged.error,
            cross_entropy=judged.cross_entropy,
            epochs=self.epoch,
            stopped_by=reason,
            curve=tuple(self.curve),
            wrong=wrong,
            state=state,
            last_state=last_state,
            **kept,
        )
