"""Schedules of k, in the habit of `torch.optim.lr_scheduler`: see docs/schedules.md."""

from pseudograd.loss.schedules import (
    CosineK,
    KSchedule,
    LambdaK,
    LinearK,
    StepK,
    lightning_callback,
    trainer_callback,
)

__all__ = [
    "CosineK",
    "KSchedule",
    "LambdaK",
    "LinearK",
    "StepK",
    "lightning_callback",
    "trainer_callback",
]
