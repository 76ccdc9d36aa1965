"""Whether a training fits its data: tried on one small batch, before anything is trained."""

from __future__ import annotations

import torch
from torch import Tensor

from pseudograd.fleet.modules.examples import Examples, prepared
from pseudograd.fleet.modules.training import Training, seeded

_TRIED = 4  # examples


def check_training(training: Training, examples: Examples) -> int:
    """Try a step on a small batch; return the number of classes that the network knows.

    Raises:
        ValueError: If something does not fit, in one sentence.

    """
    rows = torch.arange(min(_TRIED, examples.train_size))
    labels = examples.labels[rows]
    inputs = prepared(examples.batch(rows))
    with seeded(0):
        module = training.network().train()
        inputs = _augmented(training, inputs)
        try:
            logits = training.logits(module, inputs)
        except Exception as problem:
            shapes = " and ".join(str(tuple(one.shape)) for one in inputs)
            raise ValueError(
                f"network must take a batch of the shape {shapes}, but fails ({_said(problem)})"
            ) from problem
        classes = _classes(logits, labels, training, examples)
        loss = training.loss(logits, labels, 1.0)
        loss.backward()
        try:
            optimizer = training.optimizer(
                module.parameters(), lr=1e-3, **training.optimizer_settings
            )
            optimizer.step()
        except Exception as problem:
            raise ValueError(
                f"optimizer must make steps from gradients alone, but {training.optimizer!r} with "
                f"{dict(training.optimizer_settings)} fails ({_said(problem)})"
            ) from problem
    return classes


def _augmented(training: Training, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    try:
        changed = training.augmented(inputs)
    except Exception as problem:
        raise ValueError(
            f"augment must be a function of a batch of inputs, but fails ({_said(problem)})"
        ) from problem
    if len(changed) != len(inputs) or any(
        not isinstance(new, Tensor) or len(new) != len(old)
        for new, old in zip(changed, inputs, strict=True)
    ):
        raise ValueError("augment must return a batch as it gets it, with as many examples")
    return changed


def _classes(logits: Tensor, labels: Tensor, training: Training, examples: Examples) -> int:
    if not isinstance(logits, Tensor):
        raise ValueError(f"network must return a tensor of logits, not a {type(logits).__name__}")
    wanted = labels.shape[1:]
    if logits.dim() != labels.dim() + 1 or logits.shape[2:] != wanted:
        shape = "(N, classes" + "".join(f", {size}" for size in wanted) + ")"
        turned = logits.dim() > 2 and logits.shape[1:-1] == wanted
        raise ValueError(
            f"network must return logits of the shape {shape}, not {tuple(logits.shape)}"
            + (": use .movedim(-1, 1)" if turned else "")
        )
    classes = logits.shape[1]
    counted = examples.labels[examples.labels != training.ignore_index]
    if int(counted.max()) >= classes:
        beyond = examples.labels.flatten(1) if wanted else examples.labels.unsqueeze(1)
        where = int((beyond >= classes).any(1).nonzero()[0])
        part = "train" if where < examples.train_size else "test"
        raise ValueError(
            f"network has {classes} outputs, but {part} has the label {int(counted.max())}: labels "
            f"count from 0, so it needs {int(counted.max()) + 1} outputs, or other labels"
        )
    weights = training.class_weights
    if weights is not None and len(weights) != classes:
        raise ValueError(
            f"class_weights must be one for each of the network's {classes} outputs, not "
            f"{len(weights)}"
        )
    return classes


def _said(problem: BaseException) -> str:
    lines = str(problem).strip().splitlines() or [type(problem).__name__]
    return lines[0].rstrip(".")[:200]
