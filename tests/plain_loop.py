"""One network trained in plain PyTorch: the reference for every slot of a fleet.

It uses `torch.nn.Linear`, `torch.optim`, our loss and autograd. Random numbers and splits are the
fleet's; everything else is independent code for one network at a time.
"""

from __future__ import annotations

import inspect
import itertools
import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pseudograd import RuleCrossEntropyLoss, TunableCrossEntropyLoss
from pseudograd.data import Dataset
from pseudograd.fleet import Outcome, Ramp, Trial, parts, randomness
from pseudograd.rules import reweighted
from trials import recipe_of

ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid}

Layers = tuple[tuple[Tensor, Tensor], ...]


@dataclass
class PlainRun:
    """The outcome of a trial, its layers after every epoch, and the number of clipped steps."""

    outcome: Outcome
    epochs: list[Layers] = field(repr=False)
    clipped: int
    steps: int


def scaled(data: Dataset, trial: Trial, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return all features, scaled to the trial's range."""
    (low, high), (least, greatest) = recipe_of(trial).feature_range, data.value_range
    return low + (data.features.to(dtype) - least) / (greatest - least) * (high - low)


def network(data: Dataset, trial: Trial, layers: Layers, dtype: torch.dtype) -> nn.Sequential:
    """Return the trial's network with the given weights (in, out) and biases (out)."""
    sizes = (data.features.shape[1], *recipe_of(trial).hidden_layer_sizes, data.classes)
    modules: list[nn.Module] = []
    for (inputs, outputs), (weight, bias) in zip(itertools.pairwise(sizes), layers, strict=True):
        linear = nn.Linear(inputs, outputs, dtype=dtype)
        with torch.no_grad():
            linear.weight.copy_(weight.T)
            linear.bias.copy_(bias)
        modules += [linear, ACTIVATIONS[recipe_of(trial).activation]()]
    return nn.Sequential(*modules[:-1])


def initial_layers(data: Dataset, trial: Trial) -> Layers:
    """Return Glorot-uniform hidden layers, all else zero."""
    sizes = (data.features.shape[1], *recipe_of(trial).hidden_layer_sizes, data.classes)
    shapes, seed = list(itertools.pairwise(sizes)), torch.tensor([trial.seed])
    hidden = [randomness.glorot_uniform(seed, at, *s)[0] for at, s in enumerate(shapes[:-1])]
    weights = [*hidden, torch.zeros(shapes[-1])]
    return tuple((weight, torch.zeros(weight.shape[1])) for weight in weights)


def mistakes_and_losses(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        logits = model(x)
    losses = nn.functional.cross_entropy(logits, y, reduction="none")
    return (logits.argmax(1) != y) | ~losses.isfinite(), losses


def error_and_cross_entropy(
    model: nn.Module, x: Tensor, y: Tensor, weights: Tensor | None = None
) -> tuple[float, float]:
    wrong, losses = mistakes_and_losses(model, x, y)
    weights = torch.ones(len(y), dtype=torch.float64) if weights is None else weights.double()
    total = weights.sum()
    return ((weights * wrong).sum() / total).item(), ((weights * losses).sum() / total).item()


def _criterion(trial: Trial, epoch: int) -> nn.Module:
    """Return the loss of an epoch, counted from 1; a ramp has the k of the epoch's middle."""
    k = trial.k
    if isinstance(k, Ramp):
        k = k.start + (k.end - k.start) * (epoch - 0.5) / recipe_of(trial).max_epochs
    if recipe_of(trial).rule == "tunable":
        return TunableCrossEntropyLoss(k=k, reduction="none")
    rule = reweighted(recipe_of(trial).rule)
    _, parameter, *_ = inspect.signature(rule.factor).parameters
    with_k: Any = partial(rule, **{parameter: k})  # type: ignore[arg-type]
    return RuleCrossEntropyLoss(with_k, reduction="none")


def _optimizer(model: nn.Module, trial: Trial) -> torch.optim.Optimizer:
    if recipe_of(trial).optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), trial.learning_rate, recipe_of(trial).momentum)
    if recipe_of(trial).optimizer == "adam":
        decay = recipe_of(trial).weight_decay
        if decay:
            return torch.optim.AdamW(model.parameters(), trial.learning_rate, weight_decay=decay)
        return torch.optim.Adam(model.parameters(), trial.learning_rate)
    return torch.optim.RMSprop(model.parameters(), trial.learning_rate)


def _scheduler(
    optimizer: torch.optim.Optimizer, trial: Trial
) -> torch.optim.lr_scheduler.LRScheduler:
    """Return a scheduler; a cosine has half a period, and an epoch the rate of its middle."""
    epochs, cosine = recipe_of(trial).max_epochs, recipe_of(trial).schedule == "cosine"

    def factor(epoch: int) -> float:
        return (1 + math.cos(math.pi * (epoch + 0.5) / epochs)) / 2 if cosine else 1.0

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def _sampled(examples: Tensor, most: int) -> Tensor:
    return examples[[at * len(examples) // most for at in range(most)]] if most else examples


def _layers(model: nn.Sequential) -> Layers:
    linear = [module for module in model if isinstance(module, nn.Linear)]
    return tuple((one.weight.detach().T.clone(), one.bias.detach().clone()) for one in linear)


def train(data: Dataset, trial: Trial, dtype: torch.dtype = torch.float64) -> PlainRun:
    cut, x, y = (
        parts(data, trial.split, recipe_of(trial).stratified),
        scaled(data, trial, dtype),
        data.labels,
    )
    weights = torch.ones(len(y), dtype=dtype) if data.weights is None else data.weights.to(dtype)
    weights = weights / weights[: data.train_size].mean()
    model = network(data, trial, initial_layers(data, trial), dtype)
    optimizer = _optimizer(model, trial)
    scheduler = _scheduler(optimizer, trial)
    trained = _sampled(cut.train, recipe_of(trial).sample)
    votes = y[: data.train_size].bincount(weights[: data.train_size])
    chance = 1 - votes.max().item() / data.train_size
    clip = recipe_of(trial).clip
    curve: list[float] = []
    epochs: list[Layers] = []
    best_score, best_epoch, since, stopped_by, clipped, steps = math.inf, 0, 0, "limit", 0, 0
    for epoch in range(1, recipe_of(trial).max_epochs + 1):
        criterion = _criterion(trial, epoch)
        order = randomness.order(
            torch.tensor([trial.seed]), torch.tensor([epoch - 1]), len(trained)
        )
        for batch in trained[order[0]].split(recipe_of(trial).batch_size):
            optimizer.zero_grad()
            losses = criterion(model(x[batch]), y[batch])
            (weights[batch] * losses).mean().backward()
            if clip is not None:
                norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
                clipped += int(norm > clip)
            optimizer.step()
            steps += 1
        scheduler.step()
        error, value = error_and_cross_entropy(model, x[cut.stop], y[cut.stop], weights[cut.stop])
        curve.append(error)
        epochs.append(_layers(model))
        score = error if recipe_of(trial).stop_by == "error" else error + value / 4
        if score < best_score:
            best_score, best_epoch, since = score, epoch, epoch
        elif score == best_score and recipe_of(trial).ties == "last":
            best_epoch = epoch
        largest = max(weight.abs().max().item() for weight, _ in epochs[-1])
        if not math.isfinite(value) or (error > 0.99 * chance and not largest < 1e4):
            stopped_by = "diverged"
            break
        if epoch - since == recipe_of(trial).patience:
            stopped_by = "patience"
            break
    best = epochs[best_epoch - 1]
    judged = network(data, trial, best, dtype), x[cut.judge], y[cut.judge]
    wrong, _ = mistakes_and_losses(*judged)
    error, value = error_and_cross_entropy(*judged, weights[cut.judge])
    mistakes = tuple(at for at, mistaken in enumerate(wrong.tolist()) if mistaken)
    outcome = Outcome(
        trial=trial,
        stop_error=curve[best_epoch - 1],
        best_epoch=best_epoch,
        error=error,
        cross_entropy=value,
        epochs=len(curve),
        stopped_by=stopped_by,
        curve=tuple(curve),
        wrong=mistakes if trial.split.retrain else None,
        parameters=best,
    )
    return PlainRun(outcome, epochs, clipped, steps)
