"""Peers: other libraries' functions for the same work; those that are not installed or raise are skipped.

``OFFERS`` lists the peers of each op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from lowbit import formats, scaling
from lowbit.bench import layer_peers, optimizer_peers, probe
from lowbit.bench.timing import Case, once, usable
from lowbit.formats import Format
from lowbit.ops.matmul import ScaledMM, sides
from lowbit.scaling import Scheme

#: Packages whose versions the report shows.
PACKAGES = ("ml_dtypes", "torchao", "bitsandbytes", "onnxruntime")

_ML_DTYPES = {
    "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "fp6_e3m2": "float6_e3m2fn", "fp6_e2m3": "float6_e2m3fn",
    "fp4_e2m1": "float4_e2m1fn", "int4": "int4",
}  # fmt: skip


def of(op: str, call: Any) -> Iterator[Case]:
    """The peers of a call."""
    return OFFERS[op](call) if op in OFFERS else iter(())


# -- encode and decode without scales ----------------------------------------------------------------------------------
def encoders(x: Tensor, format: Format) -> Iterator[Case]:
    yield from usable(lambda: _torch_cast(x, format))
    yield from usable(lambda: _ml_dtypes_cast(x, format))


def decoders(codes: Tensor, format: Format, dtype: torch.dtype) -> Iterator[Case]:
    yield from usable(lambda: _torch_uncast(codes, format, dtype))
    if dtype == torch.float32:
        yield from usable(lambda: _ml_dtypes_uncast(codes, format))


def _torch_float8(format: Format) -> torch.dtype | None:
    return getattr(torch, format.torch_dtype) if format.kind == "float" and format.torch_dtype else None


def _torch_cast(x: Tensor, format: Format) -> Case | None:
    dtype = _torch_float8(format)
    if dtype is None:
        return None
    out = torch.empty_like(x, dtype=dtype)
    return Case("torch", lambda: out.copy_(x))


def _torch_uncast(codes: Tensor, format: Format, dtype: torch.dtype) -> Case | None:
    stored = _torch_float8(format)
    if stored is None:
        return None
    source, out = codes.view(stored), torch.empty_like(codes, dtype=dtype)
    return Case("torch", lambda: out.copy_(source))


def _ml_dtypes_cast(x: Tensor, format: Format) -> Case | None:
    import ml_dtypes
    import numpy as np

    if format.name not in _ML_DTYPES or x.dtype != torch.float32:
        return None
    source = x.numpy()
    out = np.empty(source.shape, getattr(ml_dtypes, _ML_DTYPES[format.name]))
    return Case("ml_dtypes", lambda: np.copyto(out, source, casting="unsafe"))


def _ml_dtypes_uncast(codes: Tensor, format: Format) -> Case | None:
    import ml_dtypes
    import numpy as np

    if format.name not in _ML_DTYPES:
        return None
    source = codes.numpy().view(getattr(ml_dtypes, _ML_DTYPES[format.name]))
    out = np.empty(source.shape, np.float32)
    return Case("ml_dtypes", lambda: np.copyto(out, source, casting="unsafe"))


# -- quantize with scales --------------------------------------------------------------------------------------------
def quantizers(x: Tensor, scheme: Scheme) -> Iterator[Case]:
    yield from usable(lambda: _torchao_quantize(x, scheme))
    yield from usable(lambda: _bitsandbytes_quantize(x, scheme))


def dequantizers(x: Tensor, scheme: Scheme, dtype: torch.dtype) -> Iterator[Case]:
    if scheme.name == "nf4" and dtype == x.dtype:
        yield from usable(lambda: _bitsandbytes_dequantize(x))


def _torchao_quantize(x: Tensor, scheme: Scheme) -> Case | None:
    """Integers are compiled, as torchao recommends. MX and NVFP4 conversions do not compile on CPUs and run eagerly."""
    if scheme.name in ("mxfp8", "mxfp4"):
        from torchao.prototype.mx_formats.mx_tensor import to_mx

        dtype = torch.float8_e4m3fn if scheme.format.bits == 8 else torch.float4_e2m1fn_x2
        return Case("torchao, eager", lambda: to_mx(x, dtype, scheme.block[1]))
    if scheme.name == "nvfp4":
        from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

        return Case("torchao, eager", lambda: nvfp4_quantize(x))
    if scheme.format.kind != "integer" or scheme.affine or scheme.block[0] != 1 or scheme.scale_format.name != "fp32":
        return None
    from torchao.quantization.quant_primitives import MappingType, choose_qparams_affine, quantize_affine

    block = (1, scheme.block[1] or x.shape[1])
    low, high = scheme.format.qmin, scheme.format.qmax

    @torch.compile
    def run(x: Tensor) -> Tensor:
        scale, zero = choose_qparams_affine(x, MappingType.SYMMETRIC, block, torch.int8, low, high)
        return quantize_affine(x, block, scale, zero, torch.int8, low, high)

    return Case("torchao", lambda: run(x))


def _bitsandbytes_quantize(x: Tensor, scheme: Scheme) -> Case | None:
    if scheme.name == "nf4":
        from bitsandbytes.functional import quantize_4bit

        return Case("bitsandbytes", lambda: quantize_4bit(x, blocksize=scheme.block[1], quant_type="nf4"))
    if scheme.name == "int8:row":
        from bitsandbytes.functional import int8_vectorwise_quant

        half = x.half()
        return Case("bitsandbytes", lambda: int8_vectorwise_quant(half))
    return None


def _bitsandbytes_dequantize(x: Tensor) -> Case | None:
    """Allocates its result, because on CPUs it has no ``out=`` form."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    packed, state = quantize_4bit(x, blocksize=64, quant_type="nf4")
    return Case("bitsandbytes", lambda: dequantize_4bit(packed, state))


# -- matmuls ---------------------------------------------------------------------------------------------------------
def multipliers(call: ScaledMM) -> Iterator[Case]:
    """torch's matmuls of unquantized operands, of int8 and of FP8."""
    m, n, k = call.a.shape[0], call.b.shape[0], call.cols
    yield probe.linear(m, n, k, torch.float32)
    yield probe.linear(m, n, k, torch.int8 if probe.integers(call) else torch.bfloat16)
    kinds = [None if side.scheme is None else scaling.scheme(side.scheme).format for side in sides(call)]
    a, b = (None if kind is None else _torch_float8(kind) for kind in kinds)
    if a is not None and b is not None:
        yield from usable(lambda: _decoded(m, n, k, a, b))
        yield from usable(lambda: _torch_scaled_mm(m, n, k, a, b))


def _torch_scaled_mm(m: int, n: int, k: int, a: torch.dtype, b: torch.dtype) -> Case | None:
    """Only if fast: torch multiplies FP8 element by element on some CPUs, and few rows on all."""
    return probe.scaled_mm(m, n, k, a, b) if _scaled_mm_seconds(m, n, k, a, b) < 10 else None


@cache
def _scaled_mm_seconds(m: int, n: int, k: int, a: torch.dtype, b: torch.dtype) -> float:
    """An upper bound on its time, from a part with fewer rows."""
    part = min(m, 64), min(n, 512), min(k, 512)
    case = probe.scaled_mm(*part, a, b)
    case.run()
    return once(case) * (m * n * k) / prod(part)


def _decoded(m: int, n: int, k: int, a_dtype: torch.dtype, b_dtype: torch.dtype) -> Case:
    """torch's alternative to its FP8 matmul: both operands to bf16, then the bf16 matmul."""
    a, b = torch.randn(m, k).to(a_dtype), torch.randn(n, k).to(b_dtype)
    return Case("torch fp8 to bf16", lambda: a.bfloat16() @ b.bfloat16().t())


#: The peers of each op as cases of a call; other ops have none.
OFFERS: dict[str, Callable[[Any], Iterator[Case]]] = {
    "encode": lambda call: encoders(call.x, formats.find(call.format)) if call.rounding == "nearest" else iter(()),
    "decode": lambda call: decoders(call.codes, formats.find(call.format), call.dtype),
    "quantize": lambda call: quantizers(call.x, scaling.scheme(call.scheme)),
    "dequantize": lambda call: dequantizers(
        torch.randn(call.codes.shape[0], call.cols).to(call.dtype), scaling.scheme(call.scheme), call.dtype
    ),
    "scaled_mm": multipliers,
    "linear": layer_peers.of,
    "optimizer_step": optimizer_peers.of,
}
