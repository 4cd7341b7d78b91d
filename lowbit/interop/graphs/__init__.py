"""Exports through ``torch.export``: quantized layers are replaced by modules whose forward the format can express."""

from lowbit.interop.graphs.replacing import replaced
from lowbit.interop.graphs.rows import Row, Target
from lowbit.interop.graphs.writing import write

__all__ = ["Row", "Target", "replaced", "write"]
