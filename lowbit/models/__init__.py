"""Facts about a model: which blocks it repeats and how they chain, what is shared, which layers read its raw input."""

from lowbit.models.blocks import find_blocks, stacks
from lowbit.models.input_layers import find_input_layers

__all__ = ["find_blocks", "find_input_layers", "stacks"]
