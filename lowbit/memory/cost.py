"""Time of an op by the roofline model: its arithmetic or its memory traffic at the rates of this machine.

The rates are measured once per process, with a matmul and a copy. The slower of arithmetic and traffic counts (Williams
et al., "Roofline", 2009).
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lowbit.machine import fastest
from lowbit.ops import OPS
from lowbit.scaling import scheme
from lowbit.torch_private import without_modes

__all__ = ["Rates", "Work", "rates", "work"]

#: Side of the timed square matmul, and bytes of the timed copy.
_SIDE, _BYTES = 512, 1 << 24


class Work(NamedTuple):
    """Operations, bytes moved, and the arithmetic of the operations: a dtype such as ``"bf16"``, or ``"fp8"``."""

    flops: int = 0
    bytes: int = 0
    kind: str = "fp32"

    @property
    def computes(self) -> bool:
        """Whether there is any work."""
        return bool(self.flops or self.bytes)

    def seconds(self, at: Rates) -> float:
        """Return the time at the given rates."""
        return max(self.flops / at.flops, self.bytes / at.bytes)


class Rates(NamedTuple):
    """Floating-point operations and bytes per second."""

    flops: float
    bytes: float


def work(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Work:
    """Return the work of a call of a dispatcher op; zero for views. Tensors may be fake."""
    results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
    operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if getattr(func, "is_view", False) or not (results or func._schema.is_mutable):
        return Work(0, 0)
    moved = sum(t.numel() * t.element_size() for t in (*results, *operands))
    packet = func._overloadpacket
    spec = OPS.get(func._schema.name.removeprefix("lowbit::")) if func.namespace == "lowbit" else None
    if spec is not None:
        call = spec.args(*args, **kwargs)
        return Work(*spec.cost(call), _arithmetic(call))
    formula = flop_registry.get(packet)
    if formula is None:
        return Work(0, moved)
    shapes = _of_equal_heads(args) if "scaled_dot_product" in str(packet) else args
    kind = _KINDS.get(next((t.dtype for t in operands if t.is_floating_point()), torch.float32), "fp32")
    return Work(int(formula(*shapes, **kwargs, out_val=out)), moved, kind)


#: Arithmetics of matmuls by the dtype of their operands.
_KINDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def _arithmetic(call: Any) -> str:
    """Return the narrowest arithmetic in which a product of this call's operands can be computed."""
    first, second = (getattr(call, "a_scheme", None), getattr(call, "b_scheme", None))
    if first is None:
        first, second = getattr(call, "input_scheme", None), getattr(call, "scheme", None)
    if first is None or second is None:
        return _KINDS.get(call[0].dtype, "bf16")
    formats = [scheme(name).format for name in (first, second)]
    if all(format.kind == "integer" for format in formats):
        return "int8"
    if all(format.kind == "float" for format in formats):
        return "fp4" if max(format.bits for format in formats) == 4 else "fp8"
    return "bf16"


def _of_equal_heads(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return shapes with as many key and value heads as query heads, as torch's FLOP formula for attention requires."""
    heads = max(t.shape[1] for t in args if isinstance(t, Tensor) and t.dim() == 4)
    return tuple((t.shape[0], heads, *t.shape[2:]) if isinstance(t, Tensor) and t.dim() == 4 else t for t in args)


@cache
def rates(device: torch.device) -> Rates:
    """Return the rates of ``device``, measured once."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with without_modes():  # an estimate may ask in the middle of a mode for fake tensors
        a = torch.randn(_SIDE, _SIDE, device=device, generator=torch.Generator(device)).to(dtype)
        source = torch.empty(_BYTES, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        flops = 2 * _SIDE**3 / fastest(lambda: a @ a, device)
        return Rates(flops, 2 * _BYTES / fastest(lambda: target.copy_(source), device))
