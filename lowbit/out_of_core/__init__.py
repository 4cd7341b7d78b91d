"""Quantizes checkpoints of models larger than memory."""

from lowbit.out_of_core.quantize import quantize_files

__all__ = ["quantize_files"]
