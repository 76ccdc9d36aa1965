"""Ramps: a k that changes during training."""

from __future__ import annotations

import math
import numbers
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Self

from pseudograd.rules.checks import check_k

_ARROWS = re.compile("→|->")


@dataclass(frozen=True)
class Ramp:
    """A k that changes linearly from ``start`` to ``end`` during training.

    Attributes:
        start: k at the start of training.
        end: k at the end, different from ``start``.

    Example:
        >>> ramp = Ramp(0.5, 2)
        >>> ramp.at(0), ramp.at(0.5), ramp.at(1)
        (0.5, 1.25, 2.0)
        >>> print(ramp, Ramp.parse("0.5->2") == ramp)
        0.5→2 True

    """

    start: float
    end: float

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Real):
                raise TypeError(f"{name} of a ramp must be a number, not {value!r}")
            try:
                check_k(float(value))
            except (OverflowError, ValueError):
                raise ValueError(
                    f"{name} of a ramp must be a finite number above 0 (2^-100 to 2^100), "
                    f"not {value}"
                ) from None
            object.__setattr__(self, name, float(value))
        if self.start == self.end:
            raise ValueError(
                f"start and end of a ramp must differ: give the number {self.start:g} instead of "
                f"{self}"
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the ramp that a text like "0.5→2", "0.5->2" or "1/2→2" describes.

        Example:
            >>> Ramp.parse("1/2 -> 2")
            Ramp(start=0.5, end=2.0)
            >>> Ramp.parse("0.5")
            Traceback (most recent call last):
            ...
            ValueError: a ramp must be two numbers like '0.5→2' or '0.5->2', not '0.5'

        """
        try:
            start, end = (float(Fraction(number)) for number in _ARROWS.split(text))
        except (ArithmeticError, TypeError, ValueError):
            raise ValueError(
                f"a ramp must be two numbers like '0.5→2' or '0.5->2', not {text!r}"
            ) from None
        return cls(start, end)

    def at(self, progress: float) -> float:
        """Return k at this fraction of the training: 0 at the start, 1 at the end."""
        if not 0 <= progress <= 1:
            raise ValueError(f"progress must be a number from 0 to 1, not {progress}")
        return (1 - progress) * self.start + progress * self.end

    @property
    def level(self) -> float:
        """The geometric mean of start and end, which orders ramps among constant k."""
        return math.sqrt(self.start * self.end)

    def __str__(self) -> str:
        return f"{_exact(self.start)}→{_exact(self.end)}"


def k_at(k: float | Ramp, progress: float) -> float:
    """Return k at this fraction of the training, whether it is constant or a ramp.

    Args:
        k: A number or a ramp, such as a trial's k.
        progress: 0 at the start of training, 1 at its end.

    Example:
        >>> k_at(0.5, 0.75), k_at(Ramp(0.5, 2), 0.75)
        (0.5, 1.625)

    """
    return k.at(progress) if isinstance(k, Ramp) else k


def level(k: float | Ramp) -> float:
    """Return the number that stands for k in plots, sorting and tie-breaking: k, or `Ramp.level`.

    Example:
        >>> level(0.5), level(Ramp(0.5, 2))
        (0.5, 1.0)

    """
    return k.level if isinstance(k, Ramp) else k


def by_level(k: float | Ramp) -> tuple[float, bool, float]:
    """Return a sort key for k: its `level`, with numbers before ramps of equal level.

    Example:
        >>> [str(k) for k in sorted([Ramp(2, 0.5), 4, Ramp(0.5, 2), 1], key=by_level)]
        ['1', '0.5→2', '2→0.5', '4']

    """
    return level(k), isinstance(k, Ramp), k_at(k, 0)


def plain_k(k: float | Ramp) -> float | str:
    """Return k in a form that JSON can hold: a number, or a ramp's text.

    Example:
        >>> plain_k(0.5), plain_k(Ramp(0.5, 2))
        (0.5, '0.5→2')

    """
    return str(k) if isinstance(k, Ramp) else k


def as_k(k: Any) -> Any:
    """Return the ramp that a string with an arrow describes; any other value is returned as is.

    Example:
        >>> as_k("0.5→2"), as_k(0.5), as_k("auto")
        (Ramp(start=0.5, end=2.0), 0.5, 'auto')

    """
    return Ramp.parse(k) if isinstance(k, str) and _ARROWS.search(k) else k


def _exact(k: float) -> str:
    """Return the shortest text that parses to exactly this number."""
    text = f"{k:g}"
    return text if float(text) == k else repr(k)
