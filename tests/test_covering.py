"""The covering arrays that parametrise other tests miss no combination."""

from __future__ import annotations

import itertools

import pytest

from covering import rows


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_every_combination_occurs(strength: int) -> None:
    factors = {"a": range(4), "b": "xyz", "c": (True, False), "d": range(5)}
    found = rows(strength, factors)
    for group in itertools.combinations(range(4), strength):
        values = [list(factors.values())[at] for at in group]
        assert {tuple(row[at] for at in group) for row in found} == set(itertools.product(*values))
    assert len(found) < 4 * 3 * 2 * 5
    assert found == rows(strength, factors)
