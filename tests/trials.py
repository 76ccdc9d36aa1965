"""Trials of fully connected networks, made and changed in one call."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from pseudograd.fleet import MLPRecipe, Ramp, Split, Trial

_OWN = {field.name for field in dataclasses.fields(Trial)}
VALIDATION = Split()
_Dataclass = TypeVar("_Dataclass")


def a_trial(
    data: str,
    hidden_layer_sizes: tuple[int, ...],
    k: float | Ramp,
    learning_rate: float,
    split: Split = VALIDATION,
    seed: int = 0,
    **recipe: Any,
) -> Trial:
    """Return a trial of the recipe that the other arguments describe."""
    return Trial(MLPRecipe(data, hidden_layer_sizes, **recipe), k, learning_rate, split, seed)


def recipe_of(trial: Trial) -> MLPRecipe:
    assert isinstance(trial.recipe, MLPRecipe)
    return trial.recipe


def replace(record: _Dataclass, /, **changes: Any) -> _Dataclass:
    """Like `dataclasses.replace`; for a trial, fields of its recipe too."""
    if isinstance(record, Trial):
        own = {name: changes.pop(name) for name in list(changes) if name in _OWN}
        recipe = own.pop("recipe", record.recipe)
        return dataclasses.replace(record, recipe=dataclasses.replace(recipe, **changes), **own)
    return dataclasses.replace(record, **changes)  # type: ignore[type-var]
