"""Model directories in the layout of compressed-tensors, which llm-compressor, vLLM and transformers use.

Codes and scales are unchanged in both directions.
"""

from functools import partial

from lowbit.interop import directories
from lowbit.interop.compressed_tensors.config import LAYOUT
from lowbit.interop.compressed_tensors.rules import CompressedTensors
from lowbit.interop.compressed_tensors.schemes import refuses

__all__ = ["LAYOUT", "CompressedTensors", "detect", "read", "refuses", "write"]

detect, read = CompressedTensors.detect, partial(directories.read, rules=CompressedTensors)
write = partial(directories.write, layout=LAYOUT)
