"""The methods that are compared: losses with one parameter, which takes k's place in a trial."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from pseudograd import rules
from pseudograd.fleet import Ramp
from pseudograd.rules import Rule

KS = (0.25, 0.5, 2.0, 4.0)
ROOT_2 = 2**0.5
CONFIGURATIONS = 12  # per method


@dataclass(frozen=True)
class Method:
    """A loss with one parameter.

    Attributes:
        name: As in PLAN.md.
        title: Its name in tables.
        parameter: The name of its parameter.
        values: The values that are tried; (1,) for cross-entropy, which has none.
        rule: Returns the rule for a value; None for the paper's.
        link: Computes probabilities from logits and the parameter; None for the softmax.

    """

    name: str
    title: str
    parameter: str
    values: tuple[float | Ramp, ...]
    rule: Callable[[Any], Rule] | None = None
    link: Callable[[Tensor, float], Tensor] | None = None

    @property
    def factor(self) -> float:
        """The factor between neighbouring learning rates."""
        return ROOT_2 if len(self.values) == 1 else 2.0

    def rates(self, middle: float, count: int = CONFIGURATIONS) -> tuple[float, ...]:
        """Return the rates around the middle one; every method has as many configurations.

        Example:
            >>> METHODS["gce"].rates(0.4)
            (0.2, 0.4, 0.8)
            >>> rates = METHODS["ce"].rates(0.4)
            >>> len(rates), rates[0], round(rates[1], 3)
            (12, 0.05, 0.071)

        """
        each = max(1, count // len(self.values))
        return tuple(round(middle * self.factor ** (at - each // 2), 9) for at in range(each))


def _smoothed(logits: Tensor, target: Tensor, smoothing: Any, k: Any) -> Tensor:
    classes = logits.shape[-1]
    labels = F.one_hot(target, classes).to(logits.dtype)
    return rules.soft_tunable(logits, (1 - smoothing) * labels + smoothing / classes, k)


def _smoothing(smoothing: Any) -> Rule:
    return functools.partial(_smoothed, smoothing=smoothing, k=1.0)


def _tunable_smoothing(smoothing: float, k: Any) -> Rule:
    return functools.partial(_smoothed, smoothing=smoothing, k=k)


def _focal(gamma: Any) -> Rule:
    return functools.partial(rules.focal, gamma=gamma)


def _generalized(q: Any) -> Rule:
    return functools.partial(rules.generalized_cross_entropy, q=q)


def _symmetric(alpha: Any) -> Rule:
    """Return symmetric cross-entropy, scaled so that α + β |A| = 1."""
    return functools.partial(rules.symmetric_cross_entropy, alpha=alpha, beta=(1 - alpha) / 4)


def _nce_rce(alpha: Any) -> Rule:
    """Return NCE + RCE, scaled so that β |A| = 1."""
    return functools.partial(rules.nce_rce, alpha=alpha, beta=0.25)


def _bi_tempered(delta: Any) -> Rule:
    return functools.partial(rules.bi_tempered, t1=1 - delta, t2=1 + delta)


def _redescending(q: Any) -> Rule:
    return functools.partial(rules.redescending, q=q, k=0.5)


def _normalized_rule(logits: Tensor, target: Tensor, k: Any) -> Tensor:
    """Return Eq. 5, rescaled so that the batch's Σ|f_y| is that of cross-entropy."""
    f, y = rules.tunable(logits, target, k), target.unsqueeze(-1)
    wanted = rules.tunable(logits, target).gather(-1, y).sum()
    return f * (wanted / f.gather(-1, y).sum())


def _normalized(k: Any) -> Rule:
    return functools.partial(_normalized_rule, k=k)


def _tempered(logits: Tensor, delta: float) -> Tensor:
    return rules.tempered_softmax(logits, 1 + delta)


def _scaled(logits: Tensor, target: Tensor, scale: float, rule: Rule) -> Tensor:
    return scale * rule(logits, target)


def times(scale: float, rule: Callable[[Any], Rule], value: Any) -> Rule:
    """Return the rule for a value, times a factor."""
    return functools.partial(_scaled, scale=scale, rule=rule(value))


def tunable_smoothing(smoothing: float) -> Method:
    """Return the paper's rule with a fixed amount of label smoothing."""
    rule = functools.partial(_tunable_smoothing, smoothing)
    title = f"tunable, smoothing {smoothing:g}"
    return Method("tunable-smoothing", title, "k", KS, rule)


METHODS = {
    method.name: method
    for method in (
        Method("ce", "cross-entropy", "–", (1.0,)),
        Method("tunable", "tunable (the paper’s)", "k", KS),
        Method("smoothing", "label smoothing", "s", (0.05, 0.1, 0.2, 0.4), _smoothing),
        tunable_smoothing(0.2),
        Method("redescending", "redescending, k = 1/2", "q", (0.2, 0.4, 0.7, 1.0), _redescending),
        Method("gce", "generalized cross-entropy", "q", (0.2, 0.4, 0.7, 1.0), _generalized),
        Method("sce", "symmetric cross-entropy", "α", (0.025, 0.1, 0.4, 0.94), _symmetric),
        Method("nce-rce", "NCE + RCE", "α", (0.1, 1.0, 3.0, 10.0), _nce_rce),
        Method("bi-tempered", "bi-tempered", "δ", (0.1, 0.2, 0.4, 0.6), _bi_tempered, _tempered),
        Method("focal", "focal", "γ", (0.5, 1.0, 2.0, 4.0), _focal),
    )
}
ALL_KS = Method("tunable", "tunable (the paper’s)", "k", (0.25, 0.5, 1.0, 2.0, 4.0))
# Constant k, and pairs of ramps with the same ends: rising, falling.
RAMPS = tuple((Ramp(low, high), Ramp(high, low)) for low, high in ((0.5, 2), (0.25, 1), (1, 4)))
SCHEDULES = Method("schedules", "k over training", "k", (0.5, 1.0, 2.0, *sum(RAMPS, ())))
NORMALIZED = Method("normalized", "rescaled", "k", ALL_KS.values, _normalized)
