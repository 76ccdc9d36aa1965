"""Drop-in replacements for PyTorch's cross-entropy, as functions and as modules."""

from pseudograd.loss.binary import (
    TunableBCEWithLogitsLoss,
    tunable_binary_cross_entropy_with_logits,
)
from pseudograd.loss.functional import tunable_cross_entropy
from pseudograd.loss.linear import tunable_linear_cross_entropy
from pseudograd.loss.modules import TunableCrossEntropyLoss, TunableLinearCrossEntropyLoss
from pseudograd.loss.rule import RuleCrossEntropyLoss

__all__ = [
    "RuleCrossEntropyLoss",
    "TunableBCEWithLogitsLoss",
    "TunableCrossEntropyLoss",
    "TunableLinearCrossEntropyLoss",
    "tunable_binary_cross_entropy_with_logits",
    "tunable_cross_entropy",
    "tunable_linear_cross_entropy",
]
