"""Logits and labels in, pseudo-gradient out: the mathematics, and nothing else."""

from pseudograd.rules.framework import Rule, bias, cross_entropy, from_bias
from pseudograd.rules.paper import soft_tunable, tunable
from pseudograd.rules.reweighted import (
    Reweighted,
    focal,
    generalized_cross_entropy,
    log_of_power,
    power_of_log,
    reweighted,
)
from pseudograd.rules.robust import (
    bi_tempered,
    nce_rce,
    redescending,
    symmetric_cross_entropy,
    tempered_softmax,
)

__all__ = [
    "Reweighted",
    "Rule",
    "bi_tempered",
    "bias",
    "cross_entropy",
    "focal",
    "from_bias",
    "generalized_cross_entropy",
    "log_of_power",
    "nce_rce",
    "power_of_log",
    "redescending",
    "reweighted",
    "soft_tunable",
    "symmetric_cross_entropy",
    "tempered_softmax",
    "tunable",
]
