"""Converts whole models in place: selects layers, makes their replacements, swaps them and reports.

``register`` makes a class of layers convertible.
"""

from lowbit.convert.adapters import ADAPTERS, Adapter, register
from lowbit.convert.dequantize import dequantize_
from lowbit.convert.fold import fold_
from lowbit.convert.prepack import prepack_, unprepack_
from lowbit.convert.quantize import quantize_
from lowbit.convert.requantize import fuse_requantize_, unfuse_requantize_
from lowbit.models.ties import model_bytes
from lowbit.report import LayerReport, Report

__all__ = [
    "ADAPTERS", "Adapter", "LayerReport", "Report", "dequantize_", "fold_", "fuse_requantize_", "model_bytes",
    "prepack_", "quantize_", "register", "unfuse_requantize_", "unprepack_",
]  # fmt: skip
