"""Model directories in the layout of compressed-tensors, which llm-compressor, vLLM and transformers use.

Codes and scales are unchanged in both directions.
"""

from lowbit.interop.compressed_tensors.reading import contents, detect, read
from lowbit.interop.compressed_tensors.schemes import refuses
from lowbit.interop.compressed_tensors.writing import write

__all__ = ["contents", "detect", "read", "refuses", "write"]
