"""The table of ops. To add an op, add an ``OpSpec`` to one of these modules, and its reference."""

from __future__ import annotations

import torch

from lowbit import formats
from lowbit.ops import codec, conv, dual, fused, grouped, linear, matmul, optim, packed, quantize, rotation
from lowbit.ops.spec import Cost, Numerics, OpSpec

__all__ = ["OPS", "Cost", "Numerics", "OpSpec"]

#: Every operation, by name.
OPS: dict[str, OpSpec] = {
    spec.name: spec
    for module in (codec, quantize, dual, matmul, grouped, linear, packed, conv, optim, rotation, fused)
    for spec in module.SPECS
}

formats.tracing = torch.compiler.is_compiling  # the hook that formats.py describes
