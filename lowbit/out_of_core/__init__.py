"""Models larger than memory: a checkpoint is converted while little of it is loaded."""

from lowbit.out_of_core.quantize import quantize_files

__all__ = ["quantize_files"]
