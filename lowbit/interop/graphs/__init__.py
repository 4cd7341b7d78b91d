"""Exports through ``torch.export``: quantized layers are replaced by modules whose forward the format can express."""

from lowbit.interop.graphs.replacing import with_operators
from lowbit.interop.graphs.rows import Row, Target
from lowbit.interop.graphs.writing import write

__all__ = ["Row", "Target", "with_operators", "write"]
