"""Model directories in the layout of compressed-tensors, which llm-compressor, vLLM and transformers use.

Codes and scales are unchanged in both directions.
"""

from functools import partial

from lowbit.interop import directories
from lowbit.interop.compressed_tensors.rules import CompressedTensors
from lowbit.interop.compressed_tensors.schemes import refuses
from lowbit.interop.compressed_tensors.writing import write

__all__ = ["CompressedTensors", "detect", "read", "refuses", "write"]

detect, read = CompressedTensors.detect, partial(directories.read, rules=CompressedTensors)
