"""Measures on the test set: error, cross-entropy and calibration, also after scaling."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from pseudograd.fleet.modules.examples import Examples, prepared
from pseudograd.fleet.modules.training import Training

BINS = 15
_BATCH = 2048
_LEAST = 1e-12  # probability, before the logarithm
_HALVINGS = 40


@torch.no_grad()
def logits_of(
    training: Training,
    module: torch.nn.Module,
    state: Mapping[str, Tensor],
    examples: Examples,
    rows: Tensor,
    device: torch.device,
) -> Tensor:
    """Return the logits of some examples, (examples or positions, classes), on the device."""
    module.load_state_dict(state)
    module.eval()
    found = []
    for some in rows.split(_BATCH):
        inputs = prepared(tuple(one.to(device) for one in examples.batch(some)))
        found.append(training.logits(module, inputs).float())
    logits = torch.cat(found)
    return logits.movedim(1, -1).flatten(0, -2)  # each position of a sequence is an example


def measured(log_p: Tensor, labels: Tensor) -> dict[str, float]:
    """Return the error, the cross-entropy and the ECE of log-probabilities.

    Example:
        >>> found = measured(torch.tensor([[0.9, 0.1], [0.9, 0.1]]).log(), torch.tensor([0, 1]))
        >>> {name: round(value, 3) for name, value in found.items()}
        {'error': 0.5, 'cross_entropy': 1.204, 'ece': 0.4}

    """
    log_p = log_p.double()
    confidence, predicted = log_p.max(1)
    right = (predicted == labels).double()
    return {
        "error": 1 - float(right.mean()),
        "cross_entropy": float(-log_p.gather(1, labels[:, None]).mean()),
        "ece": _calibration_error(confidence.exp(), right),
    }


def _calibration_error(confidence: Tensor, right: Tensor) -> float:
    place = (confidence * BINS).long().clamp(max=BINS - 1)
    gaps = torch.zeros(BINS, dtype=confidence.dtype, device=confidence.device)
    return float(gaps.index_add(0, place, confidence - right).abs().sum() / len(right))


def temperature(log_p: Tensor, labels: Tensor) -> float:
    """Return the temperature with the lowest cross-entropy, from 1/20 to 20.

    Example:
        >>> round(temperature(torch.tensor([[2.0, 0.0]] * 3), torch.tensor([0, 0, 1])), 2)
        2.89

    """
    log_p = log_p.double()
    own = log_p.gather(1, labels[:, None]).squeeze(1)

    def slope(power: float) -> float:
        """Return the derivative of cross-entropy, convex in 1 / T, by 1 / T = exp(power)."""
        scaled = math.exp(power) * log_p
        return float(((scaled.softmax(1) * log_p).sum(1) - own).mean())

    low, high = -math.log(20), math.log(20)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if slope(middle) > 0 else (middle, high)
    return math.exp(-low)


def all_measures(
    log_p: Tensor, labels: Tensor, validation: tuple[Tensor, Tensor] | None
) -> dict[str, float]:
    """Return `measured`, also after temperature scaling on the validation split."""
    found = measured(log_p, labels)
    if validation is not None:
        found["temperature"] = temperature(*validation)
        scaled = measured((log_p.double() / found["temperature"]).log_softmax(1), labels)
        found |= {f"{name}_scaled": scaled[name] for name in ("cross_entropy", "ece")}
    return found


def log_probabilities(p: Tensor) -> Tensor:
    """Return finite log-probabilities."""
    return p.double().clamp(min=_LEAST).log()
