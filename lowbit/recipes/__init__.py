"""Recipes: how each operand of a layer's matmuls is quantized, by name, as values, and per layer (without torch)."""

from lowbit.recipes.by_layer import LayerRecipes, Pattern, layer_recipes, require_pattern
from lowbit.recipes.cast import Cast, Gemm
from lowbit.recipes.definition import Recipe
from lowbit.recipes.parse import OPTIONS, recipe
from lowbit.recipes.refusals import refuse_beyond
from lowbit.recipes.table import ALIASES, RECIPES, register_recipe

__all__ = [
    "ALIASES",
    "OPTIONS",
    "RECIPES",
    "Cast",
    "Gemm",
    "LayerRecipes",
    "Pattern",
    "Recipe",
    "layer_recipes",
    "recipe",
    "refuse_beyond",
    "register_recipe",
    "require_pattern",
]  # fmt: skip
