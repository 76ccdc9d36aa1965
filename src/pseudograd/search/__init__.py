"""Which k, and which learning rate: the paper's protocol, and the ledger of what was tried."""

from pseudograd.search.comparison import Comparison, Difference, compare, paired_difference
from pseudograd.search.ledger import Ledger, SetAside
from pseudograd.search.protocol import DEEP_KS, SHALLOW_KS, Cell, Protocol
from pseudograd.search.search import Progress, Result, advance, result

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
    "SetAside",
    "advance",
    "compare",
    "paired_difference",
    "result",
]
