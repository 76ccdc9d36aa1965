"""The eager training loop of any module, which CUDA graphs reproduce on a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pseudograd.fleet import randomness
from pseudograd.fleet.course import Course, Judged
from pseudograd.fleet.modules.examples import Examples, prepared
from pseudograd.fleet.modules.training import Training
from pseudograd.fleet.precision import precision
from pseudograd.fleet.ramp import k_at
from pseudograd.fleet.randomness import seeded
from pseudograd.fleet.recipe import ModuleRecipe
from pseudograd.fleet.splits import Parts
from pseudograd.fleet.trial import Outcome, Stop, Trial, never, recipe_of

NOISE = 1 << 40  # offset of the seeds of dropout and augmentation from those of the weights


def batches(count: int, batch_size: int) -> tuple[int, int]:
    """Return the number of steps per epoch and of examples per step.

    Example:
        >>> batches(1000, 128), batches(100, 128)
        ((7, 128), (1, 100))

    """
    return max(1, count // batch_size), min(count, batch_size)


def sensitivities(trial: Trial, steps: int) -> list[float]:
    """Return k at each step."""
    return [k_at(trial.k, (step + 0.5) / steps) for step in range(steps)]


def train(
    training: Training,
    examples: Examples,
    trial: Trial,
    device: torch.device,
    *,
    stop: Stop = never,
    keep_parameters: bool = False,
) -> Outcome | None:
    """Train one network from its seed; return its outcome, or None if stopped.

    Args:
        training: The network and how it is trained.
        examples: The data.
        trial: The trial. Its recipe's epochs and patience override those of ``training``: a sweep
            shortens them.
        device: Where to train.
        stop: Called before every step.
        keep_parameters: Whether the outcome carries the weights.

    """
    recipe = recipe_of(trial, ModuleRecipe)
    cut = examples.parts(recipe, trial.split)
    steps, size = batches(len(cut.train), recipe.batch_size)
    rates = [trial.learning_rate * factor for factor in training.factors(recipe.epochs * steps)]
    ks = sensitivities(trial, recipe.epochs * steps)
    seeds = torch.tensor([trial.seed])
    course = Course(trial, recipe)
    with _deterministic_noise(trial.seed, device), precision(tf32=allows_tf32(recipe, device)):
        module = training.module(trial.seed).to(device)
        optimizer = training.optimizer(
            module.parameters(), lr=trial.learning_rate, **training.optimizer_settings
        )
        # Keep the ratio of each parameter group's learning rate to the trial's.
        relative = [group["lr"] / trial.learning_rate for group in optimizer.param_groups]
        best: dict[str, Tensor] = {}
        while True:
            order = randomness.order(seeds, torch.tensor([course.epoch]), len(cut.train))[0]
            order = cut.train[order[: steps * size]].reshape(steps, size)
            module.train()
            read = zip(order, examples.batches(order), strict=True)
            for at, (rows, found) in enumerate(read, course.epoch * steps):
                if stop():
                    return None
                for group, share in zip(optimizer.param_groups, relative, strict=True):
                    group["lr"] = rates[at] * share
                inputs = tuple(one.to(device) for one in found)
                labels = examples.labels[rows].to(device)
                inputs, labels = training.augmented(prepared(inputs), labels)
                logits = training.logits(module, inputs)
                loss = training.loss(logits, labels, ks[at])
                optimizer.zero_grad()
                loss.backward()
                if recipe.clip is not None:
                    nn.utils.clip_grad_norm_(module.parameters(), recipe.clip)
                optimizer.step()
            finite = is_finite(float(loss.detach()), module)
            watched = watched_rows(cut, trial)
            judged = evaluate(training, module, examples, watched, device) if len(watched) else None
            if course.note(judged.error if judged else None) and recipe.patience is not None:
                best = {name: value.clone() for name, value in module.state_dict().items()}
            if reason := course.stopped_by(finite):
                last = _on_cpu(module.state_dict()) if best and keep_parameters else None
                if best:
                    module.load_state_dict(best)
                final = judged
                if judged is None or best or watched is not cut.judge:
                    final = evaluate(training, module, examples, cut.judge, device)
                state = _on_cpu(module.state_dict()) if keep_parameters else None
                assert final is not None
                return course.outcome(reason, final, state, last)


def is_finite(loss: float, module: nn.Module) -> bool:
    """Return whether a step with this loss left the network intact.

    A batch without labels that count has the loss NaN and the gradient 0, so if the loss is NaN,
    the weights decide.
    """
    if math.isnan(loss):
        return all(bool(one.isfinite().all()) for one in module.parameters())
    return math.isfinite(loss)


def watched_rows(cut: Parts, trial: Trial) -> Tensor:
    """Return the examples to evaluate after each epoch, never the test set."""
    if len(cut.stop) or trial.split.retrain:
        return cut.stop
    return cut.judge


@torch.no_grad()
def evaluate(
    training: Training, module: nn.Module, examples: Examples, rows: Tensor, device: torch.device
) -> Judged:
    """Evaluate a network on some examples."""
    wrong, counted, total = [], 0, 0.0
    for some, logits in _logits(training, module, examples, rows, device):
        labels = examples.labels[some].to(device)
        matters = labels != training.ignore_index
        wrong.append(((logits.argmax(1) != labels) & matters).flatten().cpu())
        counted += int(matters.sum())
        values = F.cross_entropy(
            logits, labels, ignore_index=training.ignore_index, reduction="none"
        )
        total += float(values.sum())  # reduction="sum" adds in no fixed order on a GPU
    flags = torch.cat(wrong)
    return Judged.of(flags, counted, total, float(flags.sum()))


@torch.no_grad()
def predict(
    training: Training, module: nn.Module, examples: Examples, rows: Tensor, device: torch.device
) -> Tensor:
    """Return class probabilities, shape (rows, classes) or (rows, classes, ...)."""
    with precision(tf32=allows_tf32(training, device)):
        found = _logits(training, module, examples, rows, device)
        return torch.cat([logits.softmax(1).cpu() for _, logits in found])


def _logits(
    training: Training, module: nn.Module, examples: Examples, rows: Tensor, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of rows with their float32 logits, in evaluation mode."""
    module.eval()
    several = rows.split(training.batch_size)
    for some, found in zip(several, examples.batches(several), strict=True):
        inputs = tuple(one.to(device) for one in found)
        yield some, training.logits(module, prepared(inputs)).float()


def _on_cpu(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in state.items()}


@contextmanager
def _deterministic_noise(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the generators that dropout and augmentation draw from."""
    with seeded((seed + NOISE) % 2**63):
        if device.type == "cuda":
            torch.cuda.manual_seed((seed + NOISE) % 2**63)
        yield


def allows_tf32(settings: Training | ModuleRecipe, device: torch.device) -> bool:
    """Return whether products may be rounded to TF32; on a CPU, that would save no time."""
    return device.type == "cuda" and settings.precision != "float32"
