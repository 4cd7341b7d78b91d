"""The first and last blocks of a model, which 4-bit training leaves in high precision."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from lowbit.convert.select import Protection, recipe_for
from lowbit.models.blocks import find_blocks
from lowbit.recipes import LayerRecipes

__all__ = ["keep_blocks", "kept_blocks"]


def kept_blocks(blocks: int, share: float) -> set[int]:
    """Indices of the blocks that stay: a share of all, but at least the first and the last; a quarter of them at the
    start.

    Later blocks need more precision (Pretraining Large Language Models with NVFP4, arXiv 2509.25149).
    """
    if not share or not blocks:
        return set()
    count = min(max(2, round(share * blocks)), blocks)
    first = max(1, count // 4)
    return {*range(first), *range(blocks - count + first, blocks)}


def keep_blocks(
    model: nn.Module, recipes: LayerRecipes, protect: Callable[[str, nn.Module], Protection | None]
) -> Callable[[str, nn.Module], Protection | None]:
    """``protect``, extended to the layers in the blocks that ``keep_blocks`` of their recipe leaves in high precision.

    Blocks are those of ``lowbit.models.find_blocks`` that have children.
    """
    if not any(recipe.keep_blocks for recipe in recipes.recipes):
        return protect
    blocks = [block for block in find_blocks(model) if any(True for _ in block.children())]
    indices = {id(module): index for index, block in enumerate(blocks) for module in block.modules()}

    def protection(name: str, module: nn.Module) -> Protection | None:
        other = protect(name, module)
        index = indices.get(id(module))
        recipe = recipe_for(recipes, name, module) if other is None and index is not None else None
        if recipe is None or index not in kept_blocks(len(blocks), recipe.keep_blocks):
            return other
        reason = (
            f"block {index + 1} of {len(blocks)}: the first and last blocks stay in high precision; the option "
            f"keep_blocks=0 of {recipe.name}, or a recipe for its name, converts it"
        )
        return Protection(name.rpartition(".")[2], reason)

    return protection
