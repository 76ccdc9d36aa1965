"""Train classifiers with tunable sensitivity to large errors.

Change one line of a PyTorch program:

    >>> from pseudograd import TunableCrossEntropyLoss
    >>> criterion = TunableCrossEntropyLoss(k=0.5)  # was: torch.nn.CrossEntropyLoss()

At k = 1 it is cross-entropy. Below 1, hard or mislabelled examples count less relative to the
others; above 1, more.
"""

from typing import TYPE_CHECKING, Any

from pseudograd import schedules as schedules
from pseudograd.loss import (
    RuleCrossEntropyLoss,
    TunableBCEWithLogitsLoss,
    TunableCrossEntropyLoss,
    TunableLinearCrossEntropyLoss,
    tunable_binary_cross_entropy_with_logits,
    tunable_cross_entropy,
    tunable_linear_cross_entropy,
)

__version__ = "0.1.0"

if TYPE_CHECKING:
    from pseudograd import data as data
    from pseudograd.estimator import TunableMLPClassifier as TunableMLPClassifier
    from pseudograd.study import Study as Study

# Without the classifier and `Study`, so that `import *` works without the `tune` extra.
__all__ = [
    "RuleCrossEntropyLoss",
    "TunableBCEWithLogitsLoss",
    "TunableCrossEntropyLoss",
    "TunableLinearCrossEntropyLoss",
    "tunable_binary_cross_entropy_with_logits",
    "tunable_cross_entropy",
    "tunable_linear_cross_entropy",
]


def __dir__() -> list[str]:
    # What users write, for tab completion: also what `__getattr__` imports.
    return [*__all__, "Study", "TunableMLPClassifier", "__version__", "data", "rules", "schedules"]


def __getattr__(name: str) -> Any:
    # Imported lazily, because they need packages that are slow to import.
    if name == "data":
        import importlib

        return importlib.import_module("pseudograd.data")
    if name == "Study":
        from pseudograd.study import Study

        return Study
    if name == "TunableMLPClassifier":
        from pseudograd.extras import needed_for

        with needed_for("TunableMLPClassifier"):
            from pseudograd.estimator import TunableMLPClassifier
        return TunableMLPClassifier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
