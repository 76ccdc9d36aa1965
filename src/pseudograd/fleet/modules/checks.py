"""Checks that a training fits its data: one step on a small batch before the search starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pseudograd.data.dataset import FOLDS
from pseudograd.fleet.modules.examples import Examples, prepared, random_states
from pseudograd.fleet.modules.training import Training
from pseudograd.fleet.randomness import seeded
from pseudograd.words import counted, first_line, joined

_TRIED = 4  # examples in the batch
_SAID = 200  # maximum length of an error message shown to the user


def check_training(training: Training, examples: Examples) -> int:
    """Try a step on a small batch; return the number of classes.

    Raises:
        ValueError: If network, data, loss or optimizer do not fit together.

    """
    _check_parts(training, examples)
    whole = prepared(examples.batch(torch.arange(min(_TRIED, examples.train_size))))
    size = min(_TRIED, examples.train_size, training.batch_size)
    labels = examples.labels[:size]
    with seeded(0):
        module = training.network().train()
        made = _shapes(module)
        # A copy, since a network may change its inputs in place.
        inputs = _augmented(training, tuple(one[:size].clone() for one in whole))
        drawn = random_states()[1:]
        try:
            logits = training.logits(module, inputs)
        except Exception as problem:
            shapes = " and ".join(str(tuple(one.shape)) for one in inputs)
            alone = size == 1 and any(isinstance(one, _BatchNorm) for one in module.modules())
            raise ValueError(
                f"network must take a batch of the shape {shapes}, but fails ({_said(problem)})"
                + ": batch normalization needs a batch_size of 2 or more" * alone
                + _on_bytes(examples)
            ) from problem
        classes = _classes(logits, labels, training, examples)
        if random_states()[1:] != drawn:
            raise _unseeded("network")
        _check_evaluation(training, module, whole, logits, _has_single(training, examples))
        if changed := made.items() ^ _shapes(module).items():
            raise ValueError(
                "network must create all its parameters and buffers before forward, but forward "
                f"changes {joined(sorted({name for name, _ in changed}))}"
            )
        loss = training.loss(logits, labels, 1.0)
        try:
            loss.backward()
        except Exception as problem:
            raise ValueError(f"network fails in the backward pass ({_said(problem)})") from problem
        if training.clip is not None:
            _check_clipping(training.clip, module)
        _check_optimizer(training, module)
        _check_copy(training, module.eval(), whole)
        _check_extremes(training, module, examples)
    return classes


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in module.state_dict().items()}


def _check_optimizer(training: Training, module: nn.Module) -> None:
    """Try an optimizer step with the gradients of the backward pass."""
    name = getattr(training.optimizer, "__name__", repr(training.optimizer))
    settings = training.optimizer_settings
    try:
        optimizer, other = (
            training.optimizer(module.parameters(), lr=rate, **settings) for rate in (1e-3, 2e-3)
        )
    except Exception as problem:
        raise ValueError(
            f"optimizer must accept the network's parameters and the keyword arguments "
            f"{dict(settings)}, but {name} fails ({_said(problem)})"
        ) from problem
    if _rates(optimizer) == _rates(other):
        raise ValueError(
            f"optimizer must use the learning rate it is given, but that of {name} does not depend "
            "on lr: pass lr on"
        )
    try:
        optimizer.step()
    except Exception as problem:
        raise ValueError(
            f"optimizer.step() must work without arguments, but {name} fails ({_said(problem)})"
        ) from problem


def _check_copy(training: Training, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Check that the `state_dict` holds all that a step of training has changed."""
    copy = training.module(0)
    copy.load_state_dict(module.state_dict())

    def logits_of(one: nn.Module) -> Tensor:
        with seeded(0), torch.no_grad():
            return training.logits(one, tuple(each.clone() for each in inputs))

    if not torch.allclose(
        logits_of(module), logits_of(copy.eval()), rtol=1e-3, atol=1e-5, equal_nan=True
    ):
        raise ValueError(
            "network must keep what it learns in its state_dict, but after a step of training, a "
            "new network with the same state_dict returns other logits: keep state in parameters "
            "and persistent buffers"
        )


def _check_clipping(limit: float, module: nn.Module) -> None:
    try:
        nn.utils.clip_grad_norm_(module.parameters(), limit)
    except Exception as problem:  # such as that of sparse gradients
        raise ValueError(f"clip fails for this network's gradients ({_said(problem)})") from problem


@torch.no_grad()
def _check_extremes(training: Training, module: nn.Module, examples: Examples) -> None:
    """Try the highest and the lowest value of integer inputs, such as the indices of tokens."""
    for one in examples.inputs:
        if one.is_floating_point() or one.dtype in (torch.uint8, torch.bool) or not one.numel():
            continue
        for extreme in one.aminmax():
            row = (one == extreme).reshape(len(one), -1).any(1).nonzero()[0]
            try:
                training.logits(module, prepared(examples.batch(torch.cat([row, row]))))
            except Exception as problem:
                part = "train" if int(row) < examples.train_size else "test"
                raise ValueError(
                    f"network fails for an input of {part} that has the value {int(extreme)} "
                    f"({_said(problem)})"
                ) from problem


def _rates(optimizer: Any) -> list[Any]:
    return [group.get("lr") for group in getattr(optimizer, "param_groups", ())]


def _check_parts(training: Training, examples: Examples) -> None:
    count, share = examples.train_size, training.validation
    if share is None:
        if count < FOLDS:
            raise ValueError(
                f"train must have {FOLDS} examples or more, one for each fold, not {count}"
            )
        return
    stops = training.patience is not None
    if not 0 < (2 if stops else 1) * (held_out := round(share * count)) < count:
        raise ValueError(
            f"validation must hold out some of the {count} training examples{' twice' * stops} "
            f"and leave some to train on, but {share} of them is {held_out}"
        )


def _has_single(training: Training, examples: Examples) -> bool:
    """Return whether the last batch of an evaluation has one example."""
    count, share, size = examples.train_size, training.validation, training.batch_size
    judged = (count // FOLDS, -(-count // FOLDS)) if share is None else (round(share * count),)
    return any(one % size == 1 % size for one in (examples.test_size, *judged))


def _check_evaluation(
    training: Training,
    module: nn.Module,
    inputs: tuple[Tensor, ...],
    logits: Tensor,
    alone: bool,
) -> None:
    try:
        with torch.no_grad():
            found = training.logits(module.eval(), inputs)
            single = training.logits(module, tuple(one[:1] for one in inputs)) if alone else None
    except Exception as problem:
        raise ValueError(f"network fails in evaluation mode ({_said(problem)})") from problem
    finally:
        module.train()
    if isinstance(found, Tensor) and found.dim() == logits.dim():
        _check_rows(found, len(inputs[0]))
    if not isinstance(found, Tensor) or found.shape[1:] != logits.shape[1:]:
        raise ValueError(
            "network must return logits of the same shape in evaluation mode as in training"
        )
    if single is not None and single.shape != found[:1].shape:
        raise ValueError(
            f"network must return logits of the shape {tuple(found[:1].shape)} for a batch of one "
            f"example, the last of an evaluation, not {tuple(single.shape)}: leave out squeeze()"
        )
    for some in (logits, found):
        # A few classes may be masked with -inf, but then log_softmax has no NaN.
        if bool(some.float().log_softmax(1).isnan().any()):
            raise ValueError(
                "network must return finite logits, but returns NaN or infinity before training: "
                "check its initial weights and the scale of the inputs"
            )
        if bool((some >= 0).all()) and bool(((some.float().sum(1) - 1).abs() < 1e-3).all()):
            raise ValueError(
                "network must return logits, but its outputs are probabilities that sum to 1: "
                "leave out the softmax at its end"
            )


def _check_rows(logits: Tensor, count: int) -> None:
    if len(logits) != count:
        raise ValueError(
            "network must return logits for each example, but returns "
            f"{counted(len(logits), 'row')} for a batch of {count}: keep the first dimension"
        )


def _augmented(training: Training, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    before = random_states()[1:]
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
        raise ValueError("augment must return as many inputs and examples as it is given")
    if random_states()[1:] != before:
        raise _unseeded("augment")
    return changed


def _unseeded(name: str) -> ValueError:
    return ValueError(
        f"{name} must draw random numbers with PyTorch, not with NumPy or Python's random: "
        "trials seed only PyTorch's generators"
    )


def _on_bytes(examples: Examples) -> str:
    """Return a hint for networks that do not expect bytes to be scaled."""
    scaled = any(one.dtype == torch.uint8 for one in examples.batch(torch.arange(1)))
    return "; bytes (uint8) are scaled to [0, 1]: convert other numbers to int64" * scaled


def _classes(logits: Any, labels: Tensor, training: Training, examples: Examples) -> int:
    if not isinstance(logits, Tensor):
        named = hasattr(logits, "logits") or (isinstance(logits, Mapping) and "logits" in logits)
        raise ValueError(
            f"network must return a tensor of logits, not of the type {type(logits).__name__}"
            + ": wrap it in a module that returns its logits" * named
        )
    wanted = labels.shape[1:]
    column = labels.dim() == logits.dim() and wanted == (1, *logits.shape[2:])
    if column or (labels.dim() == 2 and labels.shape == logits.shape):
        shape = "(N" + "".join(f", {size}" for size in logits.shape[2:]) + ")"
        raise ValueError(
            f"labels must be class indices of the shape {shape}, not {tuple(labels.shape)} for a "
            f"batch of {len(labels)}: use labels.{'squeeze(1)' if column else 'argmax(1)'}"
        )
    if logits.dim() != labels.dim() + 1 or logits.shape[2:] != wanted:
        shape = "(N, classes" + "".join(f", {size}" for size in wanted) + ")"
        turned = logits.dim() > 2 and logits.shape[1:-1] == wanted
        raise ValueError(
            f"network must return logits of the shape {shape}, not {tuple(logits.shape)}"
            + (": use .movedim(-1, 1)" if turned else "")
        )
    _check_rows(logits, len(labels))
    if not logits.requires_grad:
        raise ValueError(
            "network must return logits with a gradient: leave out detach() and torch.no_grad()"
        )
    if logits.grad_fn is not None and logits.grad_fn.name() == "SigmoidBackward0":
        raise ValueError("network must return logits, but ends in a sigmoid: leave it out")
    classes = logits.shape[1]
    present = examples.labels.where(examples.labels != training.ignore_index, -1)
    highest = int(present.max())
    if highest >= classes:
        where = int((present == highest).nonzero()[0, 0])
        part = "train" if where < examples.train_size else "test"
        raise ValueError(
            f"network has {counted(classes, 'output')}, but {part} has the label {highest}: "
            f"labels start at 0, so give it {highest + 1} outputs or change the labels"
        )
    weights = training.class_weights
    if weights is not None and len(weights) != classes:
        raise ValueError(
            f"class_weights must be one for each of the network's {classes} outputs, not "
            f"{len(weights)}"
        )
    return classes


def _said(problem: BaseException) -> str:
    return first_line(problem)[:_SAID]
