"""The fixed settings of a study, as plain values for the templates."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from pseudograd.fleet import MLPRecipe, OwnRecipe, Ramp, Recipe
from pseudograd.fleet.ramp import as_k
from pseudograd.fleet.recipe import ModuleRecipe
from pseudograd.words import counted, fraction, joined

_DIGEST = re.compile(r",? [0-9a-f]{8}(?=[(,)]|$)")


def described(recipe: Recipe) -> dict[str, Any]:
    """Return the settings of a recipe, including its "kind" and a one-line "network"."""
    settings = {**vars(recipe), "kind": recipe.kind}
    if isinstance(recipe, MLPRecipe):
        momentum = recipe.momentum if recipe.optimizer == "sgd" else 0
        return {**settings, "network": _layers(recipe), "momentum": momentum}
    if isinstance(recipe, ModuleRecipe):
        named = ("network", "optimizer", "schedule", "augment")
        return settings | {name: without_digests(getattr(recipe, name)) for name in named}
    assert isinstance(recipe, OwnRecipe)
    return {**settings, "network": recipe.description}


@dataclass(frozen=True)
class Parameter:
    """What a study varies besides the learning rate: k, or the parameter of another rule.

    Attributes:
        name: Its name.
        baseline: The value that the choice is compared with.
        rule: The name of the other rule; "" for the paper's, or if the recipe does not know it.

    Example:
        >>> Parameter("q", 0.0, "generalized_cross_entropy").plain
        'q = 0'

    """

    name: str = "k"
    baseline: float | Ramp = 1.0
    rule: str = ""

    @classmethod
    def of(cls, recipe: Recipe, name: str, baseline: float | Ramp) -> Self:
        """Return what a study of this recipe varies."""
        rule = without_digests(getattr(recipe, "rule", "tunable"))
        return cls(name, baseline, "" if rule == "tunable" else rule)

    def at(self, k: object) -> str:
        """Return a value with the name, such as "k = 1/2"."""
        return f"{self.name} = {fraction(as_k(k))}"

    @property
    def plain(self) -> str:
        """The baseline with the name."""
        return self.at(self.baseline)

    @property
    def is_k(self) -> bool:
        """Whether this is the sensitivity of the paper's rule."""
        return self.name == "k" and not self.rule

    @property
    def axis(self) -> str:
        """The title of an axis."""
        return "k, sensitivity to large errors" if self.is_k else self.name

    @property
    def entropy(self) -> bool:
        """Whether the baseline is cross-entropy, as far as the recipe tells."""
        return self.is_k and self.baseline == 1


K = Parameter()


def _layers(recipe: MLPRecipe) -> str:
    """Return the network in words, such as "one hidden layer of 400 units (relu)"."""
    sizes = [f"{size:,}" for size in recipe.hidden_layer_sizes]
    if not sizes:
        return "no hidden layer"
    units = joined(sizes[:1] if len(set(sizes)) == 1 else sizes)
    layers = counted(len(sizes), "hidden layer", spelled=True)
    return f"{layers} of {units} units ({recipe.activation})"


def without_digests(text: str) -> str:
    """Return a description of code without its hashes.

    >>> without_digests("ResNet, 6,573,120 parameters, 95b4ed6d"), without_digests("AdamW()")
    ('ResNet, 6,573,120 parameters', 'AdamW')
    >>> without_digests("<lambda> 0f3c2a19"), without_digests("make 0f3c2a19(flip 95b4ed6d, p=0.5)")
    ('a lambda', 'make(flip, p=0.5)')
    """
    return _DIGEST.sub("", text).replace("<lambda>", "a lambda").removesuffix("()")


def shapes_in_words(shapes: Sequence[Sequence[int]]) -> str:
    """Return the shapes of a network's inputs in words.

    >>> shapes_in_words([[3, 32, 32]]), shapes_in_words([[128], []])
    ('inputs of 3 × 32 × 32 numbers', 'inputs of 128 numbers and 1 number')
    """
    sizes = [" × ".join(map(str, shape)) or "1" for shape in shapes]
    numbers = [f"{size} number{'s' * (size != '1')}" for size in sizes]
    return f"inputs of {joined(numbers)}"
