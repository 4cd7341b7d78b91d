"""Peers on GPUs for the matmul of ``x`` and a weight, one function each; skipped if the package is missing.

torch's matmuls take quantized operands. torchao's and bitsandbytes' are layers, compiled if their documentation says
so. Layers with quantized inputs quantize ``x`` in every call, which lowbit's matmuls in the same table do not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["OFFERS", "of"]

Run = Callable[[], object]


def of(x: Tensor, weights: list[Tensor], names: tuple[str | None, str]) -> dict[str, Callable[[int], object]]:
    """Cases for ``x [M, K]`` and weights ``[N, K]``, called with the index of a weight."""
    torch._dynamo.reset()  # it has a limit of recompilations, after which it silently runs eagerly
    found: dict[str, Callable[[int], object]] = {}
    for who, offer in OFFERS.get(names, ()):
        try:
            runs = [offer(x, weight) for weight in weights]
        except ImportError:
            continue
        except Exception as error:  # peers raise errors of any type
            print(f"  {who}: left out: {str(error).splitlines()[0][:200]}", file=sys.stderr, flush=True)
            continue
        found[who] = lambda index, runs=runs: runs[index]()  # type: ignore[misc]
    return found


# -- torch -------------------------------------------------------------------------------------------------------------
def _int_mm(x: Tensor, weight: Tensor) -> Run:
    left, right = (torch.randint(-127, 128, t.shape, dtype=torch.int8, device=t.device) for t in (x, weight))
    return lambda: torch._int_mm(left, right.t())


def _scaled_mm(by_rows: bool) -> Callable[[Tensor, Tensor], Run]:
    def offer(x: Tensor, weight: Tensor) -> Run:
        left, right = (t.clamp(-448, 448).to(torch.float8_e4m3fn) for t in (x, weight))
        shapes = ((len(x), 1), (1, len(weight))) if by_rows else ((), ())
        scales = [torch.ones(shape, device=x.device) for shape in shapes]
        more: dict[str, Any] = {
            "scale_a": scales[0],
            "scale_b": scales[1],
            "out_dtype": torch.bfloat16,
            "use_fast_accum": False,
        }
        return lambda: torch._scaled_mm(left, right.t(), **more)

    return offer


# -- packages ----------------------------------------------------------------------------------------------------------
def _torchao(config: Callable[[], Any]) -> Callable[[Tensor, Tensor], Run]:
    def offer(x: Tensor, weight: Tensor) -> Run:
        quantization = import_module("torchao.quantization")
        layer = nn.Linear(weight.shape[1], len(weight), bias=False, device=weight.device, dtype=weight.dtype)
        layer.weight.data = weight
        model = nn.Sequential(layer).requires_grad_(False)
        quantization.quantize_(model, config())
        run = torch.compile(model, dynamic=False, fullgraph=True) if x.is_cuda else model
        return lambda: run(x)

    return offer


def _config(name: str, module: str = "torchao.quantization", **options: Any) -> Callable[[], Any]:
    return lambda: getattr(import_module(module), name)(**options)


def _fp8_rows() -> Any:
    quantization = import_module("torchao.quantization")
    return quantization.Float8DynamicActivationFloat8WeightConfig(granularity=quantization.PerRow())


def _bitsandbytes(x: Tensor, weight: Tensor) -> Run:
    peer = import_module("bitsandbytes")
    packed, state = peer.functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    return lambda: peer.matmul_4bit(x, packed.t(), state)


def _marlin(x: Tensor, weight: Tensor) -> Run:
    """Marlin's layer with random codes and scales. It needs fp16."""
    marlin = import_module("marlin")
    layer = marlin.Layer(weight.shape[1], len(weight), groupsize=128).to(x.device)
    layer.B.random_(-(1 << 31), (1 << 31) - 1)
    layer.s.fill_(0.01)
    half = x.half()
    return lambda: layer(half)


_MX = "torchao.prototype.mx_formats"
#: Peers by (scheme of ``x``, scheme of the weight).
OFFERS: dict[tuple[str | None, str], tuple[tuple[str, Callable[[Tensor, Tensor], Run]], ...]] = {
    ("int8:row", "int8:row"): (
        ("torch._int_mm", _int_mm),
        ("torchao, quantizes x", _torchao(_config("Int8DynamicActivationInt8WeightConfig"))),
    ),
    ("fp8_e4m3:row", "fp8_e4m3:row"): (
        ("torch._scaled_mm", _scaled_mm(by_rows=True)),
        ("torchao, quantizes x", _torchao(_fp8_rows)),
    ),
    ("fp8_e4m3:tensor", "fp8_e4m3:tensor"): (("torch._scaled_mm", _scaled_mm(by_rows=False)),),
    ("mxfp8", "mxfp8"): (
        ("torchao, quantizes x", _torchao(_config("MXDynamicActivationMXWeightConfig", _MX))),
    ),
    ("nvfp4", "nvfp4"): (
        ("torchao, quantizes x", _torchao(_config("NVFP4DynamicActivationNVFP4WeightConfig", _MX))),
    ),
    (None, "int4:group128"): (
        ("torchao", _torchao(_config("Int4WeightOnlyConfig", group_size=128,
                                     int4_packing_format="tile_packed_to_4d"))),
        ("marlin, fp16", _marlin),
    ),
    (None, "int8:row"): (("torchao", _torchao(_config("Int8WeightOnlyConfig"))),),
    (None, "nf4"): (("bitsandbytes", _bitsandbytes),),
}  # fmt: skip
