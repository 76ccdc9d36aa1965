"""The search for k and the learning rate: protocols, studies, and the ledger of outcomes."""

from pseudograd.fleet.trial import Deadline
from pseudograd.search.assessment import assess
from pseudograd.search.bagging import Bagging, table_recipe
from pseudograd.search.comparison import (
    Comparison,
    Difference,
    Result,
    compare,
    paired_difference,
    result,
)
from pseudograd.search.ledger import Ledger
from pseudograd.search.models import load_model
from pseudograd.search.paper import batch_size_for, clip_for, ks_for, repetitions_for
from pseudograd.search.protocol import DEEP_KS, SHALLOW_KS, Cell, Protocol
from pseudograd.search.study import Progress, Runner, Study
from pseudograd.search.tuning import (
    Combined,
    default_folder,
    read_assessment,
    read_examples,
    study_of,
    tune,
)

__all__ = [
    "DEEP_KS",
    "SHALLOW_KS",
    "Bagging",
    "Cell",
    "Combined",
    "Comparison",
    "Deadline",
    "Difference",
    "Ledger",
    "Progress",
    "Protocol",
    "Result",
    "Runner",
    "Study",
    "assess",
    "batch_size_for",
    "clip_for",
    "compare",
    "default_folder",
    "ks_for",
    "load_model",
    "paired_difference",
    "read_assessment",
    "read_examples",
    "repetitions_for",
    "result",
    "study_of",
    "table_recipe",
    "tune",
]
