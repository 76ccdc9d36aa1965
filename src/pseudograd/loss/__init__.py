"""A rule with PyTorch's face: functions and modules that take the place of cross-entropy."""

from pseudograd.loss.functional import tunable_cross_entropy
from pseudograd.loss.linear import TunableLinearCrossEntropyLoss, tunable_linear_cross_entropy
from pseudograd.loss.modules import RuleCrossEntropyLoss, TunableCrossEntropyLoss

__all__ = [
    "RuleCrossEntropyLoss",
    "TunableCrossEntropyLoss",
    "TunableLinearCrossEntropyLoss",
    "tunable_cross_entropy",
    "tunable_linear_cross_entropy",
]
