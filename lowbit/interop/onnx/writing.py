"""Writes a model as an ONNX file for ONNX Runtime. Weights beyond 2 GB are in a file next to it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from lowbit.interop.graphs import Target
from lowbit.interop.graphs.tracing import Inputs
from lowbit.interop.onnx import layers
from lowbit.interop.onnx.rows import EXPERTS, ROWS

__all__ = ["TARGET"]

#: FP4 needs 23. For 23 alone, onnxscript writes RotaryEmbedding, whose kernel has no broadcast positions.
_OPSET = 24


def _save(model: nn.Module, inputs: Inputs, path: Path) -> None:
    program = torch.onnx.export(
        model, (), kwargs=inputs.values, dynamic_shapes=inputs.axes, dynamo=True, opset_version=_OPSET, verbose=False
    )
    assert program is not None
    program.save(str(path))


TARGET = Target("onnx", ROWS, layers.embedding, _save, ("onnx", "onnxscript"), experts=EXPERTS)
