"""Schedules of k, in the habit of `torch.optim.lr_scheduler`: see docs/schedules.md."""

from pseudograd.loss.schedules import *  # noqa: F403
from pseudograd.loss.schedules import __all__ as __all__
