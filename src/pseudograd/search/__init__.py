"""Which k, and which learning rate: the paper's protocol, and the ledger of what was tried."""

from pseudograd.search.comparison import Comparison, Difference, compare, paired_difference
from pseudograd.search.ledger import Ledger, SetAside
from pseudograd.search.protocol import (
    DEEP_KS,
    SHALLOW_KS,
    Cell,
    Protocol,
    batch_size_for,
    clip_for,
    ks_for,
    repetitions_for,
)
from pseudograd.search.run import Run, default_folder, load_model, tune
from pseudograd.search.search import Progress, Result, Runner, advance, result

__all__ = [
    "DEEP_KS",
    "SHALLOW_KS",
    "Cell",
    "Comparison",
    "Difference",
    "Ledger",
    "Progress",
    "Protocol",
    "Result",
    "Run",
    "Runner",
    "SetAside",
    "advance",
    "batch_size_for",
    "clip_for",
    "compare",
    "default_folder",
    "ks_for",
    "load_model",
    "paired_difference",
    "repetitions_for",
    "result",
    "tune",
]
