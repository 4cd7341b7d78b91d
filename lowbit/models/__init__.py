"""Facts about a model: repeated blocks and how they chain, shared parameters, and layers that read the raw input."""

from lowbit.models.blocks import find_blocks, stacks
from lowbit.models.input_layers import find_input_layers

__all__ = ["find_blocks", "find_input_layers", "stacks"]
