"""Facts about a model: repeated blocks and how they chain, shared parameters, and the input and output layers."""

from lowbit.models.blocks import find_blocks, stacks
from lowbit.models.input_layers import find_input_layers
from lowbit.models.output_layers import find_output_layers

__all__ = ["find_blocks", "find_input_layers", "find_output_layers", "stacks"]
