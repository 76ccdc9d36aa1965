"""Counter-based random numbers: a hash of (seed, purpose, position), the same on every device.

A generator's numbers depend on how many were drawn before; a hash's do not. The hash is SplitMix64
(Steele, Lea and Flood, 2014) on wrapping integers. Everything derived from it rounds at most once,
so CPUs and GPUs agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

import torch
from torch import Tensor

_INITIAL_WEIGHTS, _ORDER, _FOLDS = 1, 2, 3
_lock = RLock()  # PyTorch's default CPU generator is global
_INDEX_BITS = 26  # low bits of a sort key that hold the position: up to 67 million examples


def _signed(number: int) -> int:
    """Return the 64-bit pattern of ``number`` as a signed integer, as PyTorch's int64 needs it."""
    return (number & (2**64 - 1)) - (2**64 if number >> 63 & 1 else 0)


_GOLDEN, _MIX_1, _MIX_2 = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Return a logical right shift, which PyTorch lacks."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _hash(x: Tensor) -> Tensor:
    x = x + _GOLDEN
    x = (x ^ _shifted(x, 30)) * _MIX_1
    x = (x ^ _shifted(x, 27)) * _MIX_2
    return x ^ _shifted(x, 31)


def _stream(seeds: Tensor, purpose: int, number: Tensor | int, count: int) -> Tensor:
    """Return ``count`` hashes per seed for one purpose and number, shape (seeds, count)."""
    key = _hash(_hash(_hash(seeds) ^ purpose) ^ number)
    return _hash(key.unsqueeze(-1) ^ torch.arange(count, device=seeds.device))


def glorot_uniform(seeds: Tensor, layer: int, fan_in: int, fan_out: int) -> Tensor:
    """Draw weights from U(-a, a), a = √(6 / (fan_in + fan_out)) (Glorot and Bengio, 2010).

    Args:
        seeds: One per model, int64.
        layer: The index of the layer, from 0.
        fan_in: The layer's inputs.
        fan_out: The layer's outputs.

    Returns:
        Weights of shape (models, fan_in, fan_out) in float32.

    Example:
        >>> glorot_uniform(torch.tensor([7]), 0, fan_in=2, fan_out=2)
        tensor([[[-0.7411,  1.0426],
                 [ 0.1985, -0.5143]]])

    """
    bits = _shifted(_stream(seeds, _INITIAL_WEIGHTS, layer, fan_in * fan_out), 40)  # 24 bits
    limit = (6.0 / (fan_in + fan_out)) ** 0.5
    unit = (bits - 2**23).float() * 2.0**-23  # exact, in [-1, 1)
    return Tensor.reshape(unit * limit, (-1, fan_in, fan_out))


def order(seeds: Tensor, epochs: Tensor, size: int) -> Tensor:
    """Return the positions 0 … size - 1 shuffled per model, shape (models, size).

    Args:
        seeds: One per model, int64.
        epochs: The epoch of each model, int64.
        size: The number of examples.

    Example:
        >>> order(torch.tensor([7, 7]), torch.tensor([0, 1]), 5)
        tensor([[0, 2, 3, 4, 1],
                [2, 1, 3, 0, 4]])

    """
    return _shuffled(_stream(seeds, _ORDER, epochs, size))


def folds(seed: int, size: int) -> Tensor:
    """Return the positions 0 … size - 1 shuffled, to be cut into folds.

    Example:
        >>> folds(0, 5)
        tensor([1, 4, 2, 0, 3])

    """
    return _shuffled(_stream(torch.tensor([seed]), _FOLDS, 0, size))[0]


def _shuffled(hashes: Tensor) -> Tensor:
    """Return the positions, sorted by their hashes."""
    if hashes.shape[-1] > 1 << _INDEX_BITS:
        raise ValueError(f"data must have at most {1 << _INDEX_BITS:,} training examples")
    position = torch.arange(hashes.shape[-1], device=hashes.device)
    # The position in the low bits makes every key unique, so every sort gives the same order.
    key = (hashes << _INDEX_BITS) | position
    return key.sort(-1).values & ((1 << _INDEX_BITS) - 1)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed PyTorch's default CPU generator inside the block, and restore its state afterwards."""
    with _lock:
        before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            torch.default_generator.set_state(before)
