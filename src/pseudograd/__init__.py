"""Train classifiers with tunable sensitivity to large errors.

One line of a PyTorch program changes:

    >>> from pseudograd import TunableCrossEntropyLoss
    >>> criterion = TunableCrossEntropyLoss(k=0.5)  # was: torch.nn.CrossEntropyLoss()

k = 1 is cross-entropy; below 1 hard or mislabelled examples count less, above 1 more.
"""

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import PurePath
from typing import TYPE_CHECKING, Any


@contextlib.contextmanager
def _ending_at_once_by_ctrl_c() -> Iterator[None]:
    """If it is our command that starts, have Ctrl-C end it here and now, without a word.

    In the midst of PyTorch's import it would come out as a long traceback, or as another error.
    Programs that import us are left alone.
    """
    program = "".join(sys.argv[:1])  # "-m" as long as Python is looking for the module to run
    ours = program == "-m" or PurePath(program).stem == "pseudograd"
    usual = signal.getsignal(signal.SIGINT)
    if not ours or usual is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)


with _ending_at_once_by_ctrl_c():
    from pseudograd.loss import (
        RuleCrossEntropyLoss,
        TunableCrossEntropyLoss,
        TunableLinearCrossEntropyLoss,
        tunable_cross_entropy,
        tunable_linear_cross_entropy,
    )

__version__ = "0.1.0"

if TYPE_CHECKING:
    from pseudograd.estimator import TunableMLPClassifier

__all__ = [
    "RuleCrossEntropyLoss",
    "TunableCrossEntropyLoss",
    "TunableLinearCrossEntropyLoss",
    "TunableMLPClassifier",
    "tunable_cross_entropy",
    "tunable_linear_cross_entropy",
]


def __getattr__(name: str) -> Any:
    # The estimator needs scikit-learn, which is slow to import: only those who ask for it wait.
    if name == "TunableMLPClassifier":
        from pseudograd.estimator import TunableMLPClassifier

        return TunableMLPClassifier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
