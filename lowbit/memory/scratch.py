"""What kernels allocate for themselves while they run, in bytes, by op: what no one outside of the kernel sees.

A row of ``SCRATCH`` is needed where it is much beside the op's results. Those of the CPU were found with
``memory.profile`` of single calls; other devices have none yet.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["SCRATCH", "scratch_bytes"]

#: Of an op's arguments and its results.
Scratch = Callable[[tuple[Any, ...], Any], int]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _is_product(weight: Tensor, stride: Any) -> bool:
    """Whether oneDNN computes the convolution as a matrix product, in the layout that it is given."""
    pointwise = all(extent == 1 for extent in weight.shape[2:]) and all(step == 1 for step in stride)
    return pointwise and weight.dtype == torch.float32


def _convolution(args: tuple[Any, ...], out: Any) -> int:
    """oneDNN copies input and weight into its own layout, and the output out of it."""
    x, weight, stride = args[0], args[1], args[3]
    if x.device.type != "cpu" or _is_product(weight, stride):
        return 0
    return max(_bytes(x) + _bytes(weight), _bytes(out))


def _convolution_backward(args: tuple[Any, ...], out: Any) -> int:
    """The gradient of the output is copied for each of two products, the input or its gradient for one; the gradient
    of a weight in 16 bits is a sum in fp32.
    """
    grad, x, weight, stride = args[0], args[1], args[2], args[4]
    if x.device.type != "cpu":
        return 0
    if _is_product(weight, stride):
        return _bytes(grad)
    copies = 2 * _bytes(grad) + (_bytes(x) if out[0] is not None else 0)
    if weight.dtype == torch.float32:
        return max(copies, _bytes(weight) + _bytes(grad))
    return copies + 4 * int(weight.numel())


def _sum(args: tuple[Any, ...], out: Any) -> int:
    """A sum in another dtype is one of a copy in that dtype."""
    x = args[0]
    return int(x.numel() * out.element_size()) if x.device.type == "cpu" and x.dtype != out.dtype else 0


def _attention(args: tuple[Any, ...], out: Any) -> int:
    """Scores of a block of queries by a block of keys in each thread; many queries in bf16 copy keys and values into
    the layout of their product where the processor has one. Source: torch, FlashAttentionKernel.cpp.
    """
    query, key = args[0], args[1]
    batch, heads, length, width = query.shape
    keys, threads = key.shape[2], torch.get_num_threads()
    rows = min(length, 256 if length >= 768 else 64 if length >= 192 else 32)
    cols, even = min(keys, 512), keys + keys % 2
    each = 4 * rows * (cols + 2 + width)
    if query.element_size() > 2:
        return int(threads * each)
    each += 2 * rows * cols
    a_thread = -(-batch * heads * -(-length // rows) // threads) * rows
    if query.dtype != torch.bfloat16 or min(length, keys) < 64 or a_thread < 4 * batch * heads or not _packs():
        return int(threads * each)
    return int(threads * (each + 2 * min(even, 512) * width) + 2 * batch * heads * width * (keys + even))


@cache
def _packs() -> bool:
    return torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"


SCRATCH: dict[str, Scratch] = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _attention,
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _convolution_backward,
    "aten.sum.dim_IntList": _sum,
    "aten.sum.default": _sum,
}


def scratch_bytes(name: str, args: tuple[Any, ...], out: Any) -> int:
    """What the op called ``name`` allocates beside its results; 0 for those that are not known to."""
    found = SCRATCH.get(name)
    return 0 if found is None else found(args, out)
