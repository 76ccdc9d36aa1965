"""Parametrise a test by a covering array, which has far fewer cases than the full product."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from _pytest.mark.structures import ParameterSet

# Factors that are fixtures: their values become `request.param`.
FIXTURES = ("path", "kernel")
PATHS = ("fused", "plain")  # of the loss on a CPU


def covering(
    strength: int = 2, indirect: Sequence[str] = (), **factors: Any
) -> pytest.MarkDecorator:
    """Return a `parametrize` mark in which any ``strength`` factors take all their combinations.

    Most defects depend on one or two factors, so these cases find what the full product would.

    Args:
        strength: How many factors are combined in full; with 1, each value occurs at least once.
        indirect: The factors whose values go to the fixture of that name, beside `FIXTURES`.
        factors: The values of each argument of the test.

    """
    fixtures = [name for name in (*FIXTURES, *indirect) if name in factors]
    cases = [_plain(row) for row in rows(strength, factors)]
    return pytest.mark.parametrize(list(factors), cases, indirect=fixtures, ids=_id)


def rows(strength: int, factors: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return the rows of a covering array, found greedily and always the same."""
    values = [list(given) for given in factors.values()]
    groups = list(itertools.combinations(range(len(values)), min(strength, len(values))))
    missing = {
        (group, chosen): None  # a dict keeps the order
        for group in groups
        for chosen in itertools.product(*(range(len(values[at])) for at in group))
    }
    found, used = [], Counter[tuple[int, int]]()
    while missing:
        row = dict(zip(*next(iter(missing)), strict=True))
        for at in set(range(len(values))) - set(row):
            worth = [
                (_gain(missing, row | {at: value}), -used[at, value])
                for value in range(len(values[at]))
            ]
            row[at] = worth.index(max(worth))
        used.update(row.items())
        for group in groups:
            missing.pop((group, tuple(row[at] for at in group)), None)
        found.append(tuple(values[at][row[at]] for at in range(len(values))))
    return found


def _gain(missing: dict[Any, None], row: dict[int, int]) -> int:
    """Return how many missing combinations a (possibly partial) row could still cover."""
    return sum(
        all(row.get(at, value) == value for at, value in zip(group, chosen, strict=True))
        for group, chosen in missing
    )


def _plain(row: tuple[Any, ...]) -> Any:
    """Return a case with the marks of those values that are a `pytest.param`."""
    sets = [value if isinstance(value, ParameterSet) else pytest.param(value) for value in row]
    marks = [mark for one in sets for mark in one.marks]
    return pytest.param(*(one.values[0] for one in sets), marks=marks)


def _id(value: Any) -> str | None:
    return str(value) if isinstance(value, torch.dtype | tuple) else None
