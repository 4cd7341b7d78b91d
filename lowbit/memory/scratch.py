"""Bytes of scratch memory that kernels allocate while they run, by op: a table for ops that cannot be run.

``SCRATCH`` needs a row for an op whose scratch memory is large compared with its results. CPU rows were found with
``memory.profile`` of single calls, CUDA rows with the allocator's peak around each op on an H200. Some cuDNN algorithms
for fp32 convolutions use more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lowbit.backends.scratch import allocated
from lowbit.ops import OPS

__all__ = ["SCRATCH", "scratch_bytes"]

#: Returns the bytes for an op's arguments and results.
Scratch = Callable[[tuple[Any, ...], Any], int]


# -- CPU ---------------------------------------------------------------------------------------------------------------
def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _is_product(weight: Tensor, stride: Any) -> bool:
    """Return whether oneDNN computes the convolution as a matmul, in the input's layout."""
    pointwise = all(extent == 1 for extent in weight.shape[2:]) and all(step == 1 for step in stride)
    return pointwise and weight.dtype == torch.float32


def _convolution(args: tuple[Any, ...], out: Any) -> int:
    """oneDNN copies input and weight into its own layout, and the output from it."""
    x, weight, stride = args[0], args[1], args[3]
    if _is_product(weight, stride):
        return 0
    return max(_bytes(x) + _bytes(weight), _bytes(out))


def _convolution_backward(args: tuple[Any, ...], out: Any) -> int:
    """The output gradient is copied for both matmuls, the input or its gradient for one. The gradient of a 16-bit
    weight is summed in fp32.
    """
    grad, x, weight, stride = args[0], args[1], args[2], args[4]
    if _is_product(weight, stride):
        return _bytes(grad)
    copies = 2 * _bytes(grad) + (_bytes(x) if out[0] is not None else 0)
    if weight.dtype == torch.float32:
        return max(copies, _bytes(weight) + _bytes(grad))
    return copies + 4 * int(weight.numel())


def _sum(args: tuple[Any, ...], out: Any) -> int:
    """A sum in another dtype first copies its input to that dtype."""
    x = args[0]
    return int(x.numel() * out.element_size()) if x.dtype != out.dtype else 0


def _attention(args: tuple[Any, ...], out: Any) -> int:
    """Each thread has the scores of a block of queries by a block of keys.

    With many bf16 queries, keys and values are packed if the processor has bf16 matmul instructions. Source: torch,
    FlashAttentionKernel.cpp.
    """
    query, key = args[0], args[1]
    batch, heads, length, width = query.shape
    keys, threads = key.shape[2], torch.get_num_threads()
    rows = min(length, 256 if length >= 768 else 64 if length >= 192 else 32)
    cols, even = min(keys, 512), keys + keys % 2
    bytes_per_thread = 4 * rows * (cols + 2 + width)
    if query.element_size() > 2:
        return int(threads * bytes_per_thread)
    bytes_per_thread += 2 * rows * cols
    rows_per_thread = -(-batch * heads * -(-length // rows) // threads) * rows
    if query.dtype != torch.bfloat16 or min(length, keys) < 64 or rows_per_thread < 4 * batch * heads or not _packs():
        return int(threads * bytes_per_thread)
    return int(threads * (bytes_per_thread + 2 * min(even, 512) * width) + 2 * batch * heads * width * (keys + even))


def _safe_softmax(args: tuple[Any, ...], out: Any) -> int:
    """A mask of the scores; on CUDA too."""
    return int(args[0].numel())


@cache
def _packs() -> bool:
    return torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"


# -- CUDA --------------------------------------------------------------------------------------------------------------
def _cuda_convolution(args: tuple[Any, ...], out: Any) -> int:
    """cuDNN converts input, output, and a weight of more than one pixel between layouts."""
    x, weight = args[0], args[1]
    return _bytes(x) + _bytes(out) + (_bytes(weight) if max(weight.shape[2:]) > 1 else 0)


def _cuda_convolution_backward(args: tuple[Any, ...], out: Any) -> int:
    """As in forward for each of two matmuls, with the output gradient instead of the output."""
    return _bytes(args[0]) + _bytes(args[1]) + _bytes(args[2])


def _cuda_sum(args: tuple[Any, ...], out: Any) -> int:
    """Partial sums of thread blocks that share an output, if the last axis is not reduced.

    Each of their threads has one for each of its outputs. Source: torch, Reduce.cuh, ``setReduceConfig`` and
    ``global_memory_size``.
    """
    x, axes = args[0], args[1] if len(args) > 1 and args[1] else range(args[0].dim())
    if x.numel() == 0 or (x.dim() - 1) in {axis % x.dim() for axis in axes}:
        return 0
    outputs, fp32 = out.numel(), 4
    terms = x.numel() // outputs
    vector = next(v for v in (4, 2, 1) if x.shape[-1] % v == 0) if x.stride(-1) == 1 else 1
    threads = 512 // vector
    wide, tall = (min(1 << (max(size, 1).bit_length() - 1), threads) for size in (outputs // vector, terms))
    width = min(wide, 32)
    height = min(tall, threads // width)
    width = min(wide, threads // height)
    if terms < min(height * 16, 256):  # a thread sums all terms of its outputs
        return 0
    terms_per_thread = -(-terms // height)
    blocks = -(-(outputs // vector) // width)
    blocks_resident = _resident_threads() // (width * height)
    if terms_per_thread < 256 or blocks > blocks_resident:
        return 0
    share = max(min(-(-blocks_resident // blocks), -(-terms_per_thread // 16)), -(-terms_per_thread // 256))
    return fp32 * outputs * share * width * vector if share > 1 else 0


@cache
def _resident_threads() -> int:
    """Return the number of threads that the GPU runs at a time; that of an H100 without a GPU."""
    if not torch.cuda.is_available():
        return 132 * 2048
    properties = torch.cuda.get_device_properties()
    return int(properties.multi_processor_count * properties.max_threads_per_multi_processor)


def _cuda_attention_backward(args: tuple[Any, ...], out: Any) -> int:
    """The fp32 gradient of the queries, one sum per query, and key and value gradients per query head."""
    query, key = args[1], args[2]
    heads, kv_heads = query.shape[1], key.shape[1]
    expanded = 2 * _bytes(key) * heads // kv_heads if heads != kv_heads else 0
    return 4 * int(query.numel() + query.numel() // query.shape[-1]) + expanded


def _cuda_softmax_backward(args: tuple[Any, ...], out: Any) -> int:
    """The product of gradient and output."""
    return _bytes(args[0])


def _of_ours(op: str) -> Scratch:
    """Return the scratch memory of a lowbit op, for the CUDA kernel that would be selected."""
    fields = OPS[op].args._fields
    return lambda args, out: allocated(op, OPS[op].args(*args[: len(fields)]), torch.device("cuda"))


#: By device type and op.
SCRATCH: dict[str, dict[str, Scratch]] = {
    "cpu": {
        "aten._safe_softmax.default": _safe_softmax,
        "aten._scaled_dot_product_flash_attention_for_cpu.default": _attention,
        "aten.convolution.default": _convolution,
        "aten.convolution_backward.default": _convolution_backward,
        "aten.sum.dim_IntList": _sum,
        "aten.sum.default": _sum,
    },
    "cuda": {
        "aten._safe_softmax.default": _safe_softmax,
        "aten._scaled_dot_product_cudnn_attention_backward.default": _cuda_attention_backward,
        "aten._scaled_dot_product_efficient_attention_backward.default": _cuda_attention_backward,
        "aten._scaled_dot_product_flash_attention_backward.default": _cuda_attention_backward,
        # In estimates for GPUs on machines without one:
        "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _cuda_attention_backward,
        "aten._softmax_backward_data.default": _cuda_softmax_backward,
        "aten.convolution.default": _cuda_convolution,
        "aten.convolution_backward.default": _cuda_convolution_backward,
        "aten.sum.dim_IntList": _cuda_sum,
        **{f"lowbit.{name}.default": _of_ours(name) for name, spec in OPS.items() if not spec.in_place},
    },
}


def scratch_bytes(name: str, args: tuple[Any, ...], out: Any, kind: str | None = None) -> int:
    """Return the scratch memory of the op called ``name``; 0 if it has no row.

    Args:
        name: Name of the op.
        args: Its arguments.
        out: Its results.
        kind: Type of the device, by default that of the first argument.
    """
    first = next((a for a in args if isinstance(a, Tensor)), None)
    row = None if first is None else SCRATCH.get(kind or first.device.type, {}).get(name)
    return 0 if row is None else row(args, out)
