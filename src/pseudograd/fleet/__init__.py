"""Recipes and trials, and fleets that train many trials at once on each device."""

from pseudograd.fleet.mlp.fleet import Fleet
from pseudograd.fleet.mlp.network import Ensemble, Network
from pseudograd.fleet.ramp import Ramp, k_at
from pseudograd.fleet.recipe import MLPRecipe, OwnRecipe, Recipe
from pseudograd.fleet.splits import Parts, parts
from pseudograd.fleet.trial import Outcome, Split, Stop, Trial, never

__all__ = [
    "Ensemble",
    "Fleet",
    "MLPRecipe",
    "Network",
    "Outcome",
    "OwnRecipe",
    "Parts",
    "Ramp",
    "Recipe",
    "Split",
    "Stop",
    "Trial",
    "k_at",
    "never",
    "parts",
]
