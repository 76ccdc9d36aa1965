"""Train classifiers with tunable sensitivity to large errors.

One line of a PyTorch program changes:

    >>> from pseudograd import TunableCrossEntropyLoss
    >>> criterion = TunableCrossEntropyLoss(k=0.5)  # was: torch.nn.CrossEntropyLoss()

k = 1 is cross-entropy; below 1 hard or mislabelled examples count less, above 1 more.
"""

from pseudograd.loss import RuleCrossEntropyLoss, TunableCrossEntropyLoss, tunable_cross_entropy

__version__ = "0.1.0"

__all__ = ["RuleCrossEntropyLoss", "TunableCrossEntropyLoss", "tunable_cross_entropy"]
