"""Checks that a training fits its data: one step on a small batch before the search starts.

They find what would give wrong results without an error, or fail late in a study. What PyTorch
refuses is left to PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pseudograd.data.dataset import FOLDS
from pseudograd.fleet.modules.examples import Examples, prepared, random_states
from pseudograd.fleet.modules.training import Training
from pseudograd.fleet.ramp import Ramp, k_at
from pseudograd.fleet.randomness import seeded
from pseudograd.words import counted, first_line, raised

_TRIED = 4  # examples in the batch
_SAID = 200  # maximum length of an error message shown to the user


def check_training(
    training: Training, examples: Examples, ks: Sequence[float | Ramp] = (1.0,)
) -> int:
    """Try a step on a small batch, and a rule with every k; return the number of classes.

    Raises:
        ValueError: If network, data, loss or optimizer do not fit together.

    """
    _check_sizes(training, examples)
    whole = prepared(examples.batch(torch.arange(min(_TRIED, examples.train_size))))
    size = min(len(whole[0]), training.batch_size)
    inputs = _copied(whole, size)
    with seeded(0):
        module = training.network().train()
        drawn = random_states()[1:]
        with _trying("training", inputs):
            changed, labels = training.augmented(inputs, examples.labels[:size].clone())
            logits = training.logits(module, changed)
        _check_targets(training, labels, logits)
        classes = _checked_logits(logits, training, examples, labels)
        with _trying("evaluation", whole), torch.no_grad():
            found = training.logits(module.eval(), _copied(whole))
            alone = _has_single(training, examples)
            single = training.logits(module, _copied(whole, 1)) if alone else found
        for some, count in ((found, len(whole[0])), (single, 1 if alone else len(whole[0]))):
            _checked_logits(some, training, examples, examples.labels[:count])
        if random_states()[1:] != drawn:
            raise ValueError(
                "network and augment must draw random numbers with PyTorch, not with NumPy or "
                "Python's random: trials seed only PyTorch's generators"
            )
        if training.rule is not None:
            _check_rule(training, logits.detach(), labels, ks)
        with _trying("training", inputs):
            training.loss(logits, labels, k_at(ks[0], 0)).backward()
            if training.clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), training.clip)
            rates = []
            for rate in (2e-3, 1e-3):
                optimizer = training.optimizer(
                    module.parameters(), lr=rate, **training.optimizer_settings
                )
                rates.append([group["lr"] for group in optimizer.param_groups])
            optimizer.step()
        if rates[0] == rates[1]:
            raise ValueError(
                "optimizer must use the learning rate it is given, but its rate does not depend on "
                "lr: pass lr on"
            )
        _check_copy(training, module, whole)
        _check_extremes(training, module, examples)
    return classes


@contextmanager
def _trying(what: str, inputs: tuple[Tensor, ...]) -> Iterator[None]:
    """Raise ValueError with the reason if the block fails."""
    try:
        yield
    except Exception as problem:
        shapes = " and ".join(str(tuple(one.shape)) for one in inputs)
        raise ValueError(
            f"{what} fails on a batch of shape {shapes}: {raised(problem)[:_SAID]}"
        ) from problem


def _check_rule(
    training: Training, logits: Tensor, labels: Tensor, ks: Sequence[float | Ramp]
) -> None:
    """Try a rule with each k; only the rule knows which values it accepts."""
    for k in [k_at(k, end) for k in ks for end in (0, 1)]:
        refused = f"rule must accept every value of k, but fails at {k:g}"
        leaf = logits.clone().requires_grad_()
        try:
            training.loss(leaf, labels, k).backward()
        except Exception as problem:
            raise ValueError(f"{refused} ({first_line(problem)[:_SAID]})") from problem
        if leaf.grad is None or not bool(leaf.grad.isfinite().all()):
            raise ValueError(f"{refused} (its pseudo-gradient is not finite)")


def _copied(inputs: tuple[Tensor, ...], size: int | None = None) -> tuple[Tensor, ...]:
    """Return copies of the first examples, since a network may change its inputs in place."""
    return tuple(one[:size].clone() for one in inputs)


def _check_targets(training: Training, labels: Any, logits: Any) -> None:
    """Check the labels that an augmentation returned."""
    if not isinstance(labels, Tensor):
        wanted = f"labels as a tensor, not as {type(labels).__name__}"
    elif not labels.is_floating_point():
        return
    elif training.rule is not None:
        wanted = "class indices, not probabilities: a rule needs hard labels"
    elif training.ignore_index >= 0:
        wanted = "class indices, not probabilities, if ignore_index is 0 or more"
    elif isinstance(logits, Tensor) and labels.shape != logits.shape:
        wanted = f"probabilities of shape {tuple(logits.shape)}, not {tuple(labels.shape)}"
    else:
        return
    raise ValueError(f"augment must return {wanted}")


def _checked_logits(logits: Any, training: Training, examples: Examples, labels: Tensor) -> int:
    """Return the number of classes, after checking the logits for these labels."""
    shape = tuple(logits.shape) if isinstance(logits, Tensor) else ()
    for_labels = (*shape[:1], *shape[2:])
    if len(shape) < 2 or labels.shape != (shape if labels.is_floating_point() else for_labels):
        wanted = ", ".join(map(str, (len(labels), "classes", *labels.shape[1:])))
        hint = ": use labels.argmax(1)" * (len(shape) > 1 and labels.shape == shape)
        hint = hint or ": use .movedim(-1, 1)" * (len(shape) > 2 and labels.shape == shape[:-1])
        raise ValueError(
            f"network must return logits of shape ({wanted}) for labels of shape "
            f"{tuple(labels.shape)}, not {shape or type(logits).__name__}{hint}"
        )
    # A few classes may be masked with -inf, but then log_softmax has no NaN.
    if bool(logits.float().log_softmax(1).isnan().any()):
        raise ValueError(
            "network must return finite logits, but returns NaN or infinity before training: "
            "check its initial weights and the scale of the inputs"
        )
    if bool((logits >= 0).all()) and bool(((logits.float().sum(1) - 1).abs() < 1e-3).all()):
        raise ValueError(
            "network must return logits, but its outputs are probabilities that sum to 1: leave "
            "out the softmax at its end"
        )
    if logits.grad_fn is not None and logits.grad_fn.name() == "SigmoidBackward0":
        raise ValueError("network must return logits, but ends in a sigmoid: leave it out")
    classes = int(logits.shape[1])
    present = examples.labels.where(examples.labels != training.ignore_index, -1)
    highest = int(present.max())
    if highest >= classes:
        sizes = [examples.train_size, examples.validation_size, examples.test_size]
        parts = zip(("train", "validation", "test"), present.split(sizes), strict=True)
        part = next(name for name, labels in parts if bool((labels == highest).any()))
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


def _check_copy(training: Training, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Check that the `state_dict` holds all that a step of training has changed."""
    copy = training.module(0)
    keys = copy.load_state_dict(module.state_dict(), strict=False)

    def logits_of(one: nn.Module) -> Tensor:
        with seeded(0), torch.no_grad():
            return training.logits(one.eval(), _copied(inputs))

    if any(keys) or not torch.allclose(
        logits_of(module), logits_of(copy), rtol=1e-3, atol=1e-5, equal_nan=True
    ):
        raise ValueError(
            "network must keep what it learns in its state_dict, but after a step of training, a "
            "new network with the same state_dict is not the same: keep state in parameters and "
            "persistent buffers, and create them in __init__"
        )


def _check_extremes(training: Training, module: nn.Module, examples: Examples) -> None:
    """Try the highest and the lowest value of integer inputs, such as the indices of tokens."""
    for one in examples.inputs:
        if one.is_floating_point() or one.dtype in (torch.uint8, torch.bool) or not one.numel():
            continue
        for extreme in one.aminmax():
            row = (one == extreme).reshape(len(one), -1).any(1).nonzero()[0]
            inputs = prepared(examples.batch(torch.cat([row, row])))
            with _trying(f"the input value {int(extreme)}", inputs), torch.no_grad():
                training.logits(module.eval(), inputs)


def _check_sizes(training: Training, examples: Examples) -> None:
    count, share = examples.train_size, training.validation
    if examples.validation_size:
        return
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
    if examples.validation_size:
        judged = (examples.validation_size,)
    return any(one % size == 1 % size for one in (examples.test_size, *judged))
