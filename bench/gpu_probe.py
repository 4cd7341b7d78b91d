"""Probes a GPU: accumulator bits of tensor cores, NaN patterns, and whether graphs and replays are bit-identical.

``python bench/gpu_probe.py OUT [--dry-run]``; without a GPU on the CPU. A sum keeps ``n`` fraction bits if adding a
term of ``2^-n`` to 1 changes it. Beyond fp32's 23 bits, several equal terms are added whose sum is ``2^-23``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lowbit as lb

#: The matmul of ``a [M, K]`` and ``b [N, K]``, powers of two in fp32, with an fp32 result.
Multiply = Callable[[Tensor, Tensor], Tensor]

#: M, N and K that every kernel supports.
_M, _N, _K = 32, 32, 32
#: The largest and smallest exponents of powers of two by operand format.
_RANGES = {"bf16": (60, -60), "fp8": (8, -9)}


def _terms(bits: int) -> tuple[int, int]:
    """Number and exponent of equal terms whose sum fp32 can represent next to 1."""
    return (1, -bits) if bits <= 23 else (1 << (bits - 23), -bits)


def _split(exponent: int, most: int, least: int) -> tuple[int, int]:
    """Two exponents in a range whose sum is ``exponent``."""
    first = min(most, exponent - least)
    return first, exponent - first


def fraction_bits(multiply: Multiply, kind: str) -> int:
    """Fraction bits that the sums of a matmul keep of terms next to a larger one."""
    most, least = _RANGES[kind]
    kept = 0
    for bits in range(1, 28):
        count, exponent = _terms(bits)
        top = 2 * most
        if exponent + top < 2 * least or count >= _K:
            break
        a, b = torch.zeros(_M, _K), torch.zeros(_N, _K)
        for at, power in [(0, top), *((1 + index, exponent + top) for index in range(count))]:
            left, right = _split(power, most, least)
            a[:, at], b[:, at] = 2.0**left, 2.0**right
        if not bool((multiply(a, b) > 2.0**top).all()):
            break
        kept = bits
    return kept


def _bf16(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a.cuda().bfloat16(), b.cuda().bfloat16().t(), out_dtype=torch.float32).cpu()


def _fp8(a: Tensor, b: Tensor) -> Tensor:
    left, right = (x.cuda().to(torch.float8_e4m3fn) for x in (a, b))
    one = torch.ones((), device="cuda")
    return torch._scaled_mm(left, right.t(), one, one, out_dtype=torch.float32, use_fast_accum=False).cpu()


def _codes(scheme: str) -> Multiply:
    """lowbit's kernel that multiplies codes directly; scales are powers of two."""

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        left, right = (lb.quantize(x.cuda(), scheme) for x in (a, b))
        with lb.use_backend("triton_codes_medium" if torch.cuda.get_device_capability()[0] == 12 else "triton_codes"):
            product = lb.scaled_mm(left, right, out_dtype=torch.float32)
        assert isinstance(product, Tensor)
        return product.cpu()

    return multiply


def accumulators() -> dict[str, int | str]:
    """Bits that sums keep, by kernel, or the reason why a kernel is missing."""
    cases: dict[str, tuple[Multiply, str]] = {"bf16: torch.mm": (_bf16, "bf16"), "fp8: torch._scaled_mm": (_fp8, "fp8")}
    if torch.cuda.get_device_capability()[0] in (10, 12):
        cases |= {"fp8: scaled": (_codes("fp8_e4m3:row:e8m0"), "fp8"), "mxfp8: scaled": (_codes("mxfp8"), "fp8")}
    found: dict[str, int | str] = {}
    for name, (multiply, kind) in cases.items():
        try:
            found[name] = fraction_bits(multiply, kind)
        except RuntimeError as error:
            found[name] = str(error).splitlines()[0]
    return found


def nan_patterns() -> dict[str, str]:
    """The bit patterns of NaN results of torch's FP8 matmul, which lowbit makes canonical."""
    a = torch.zeros(_M, _K, device="cuda").to(torch.float8_e4m3fn)
    a.view(torch.uint8)[0, 0], a.view(torch.uint8)[1, 0] = 0x7F, 0xFF
    one = torch.ones((), device="cuda")
    y = torch._scaled_mm(a, torch.ones_like(a).t(), one, one, out_dtype=torch.float32)
    patterns = y[:2, 0].contiguous().view(torch.int32).tolist()
    return {name: f"{pattern & 0xFFFFFFFF:#010x}" for name, pattern in zip(("0x7f", "0xff"), patterns, strict=True)}


def repeated(device: str) -> dict[str, bool]:
    """Whether the third eager call of a layer (a replay) and a CUDA graph are bit-identical to the first call."""
    torch.manual_seed(0)
    found = {}
    for recipe in ("fp8", "int8", "mxfp8", "nvfp4", "int4-weight-only"):
        model = torch.nn.Sequential(torch.nn.Linear(256, 128)).bfloat16()
        lb.quantize_(model, recipe)
        model, xs = model.to(device), [torch.randn(8, 256, device=device).bfloat16() for _ in range(3)]
        with torch.no_grad():
            with lb.use_backend("reference"):
                exact = [model(x).float() for x in xs]
            first = [model(x) for x in xs]  # the third call is a replay
            again = [model(x) for x in xs]
            found[f"{recipe}: replayed"] = all(torch.equal(p, q) for p, q in zip(first, again, strict=True))
            close = (torch.allclose(p.float(), q, rtol=0.05, atol=0.05) for p, q in zip(again, exact, strict=True))
            found[f"{recipe}: as the reference"] = all(close)
            if device == "cuda":
                given, graph = xs[0].clone(), torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    y = model(given)
                given.copy_(xs[1])
                graph.replay()
                found[f"{recipe}: captured"] = torch.equal(y, first[1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dry-run", action="store_true", help="without a GPU, on the CPU")
    options = parser.parse_args()
    found: dict[str, Any] = {"repeated": repeated("cpu" if options.dry_run else "cuda")}
    if not options.dry_run:
        found |= {"fraction bits": accumulators(), "NaN of fp8": nan_patterns()}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "probe.json").write_text(json.dumps(found, indent=1))
    print(json.dumps(found, indent=1))
    wrong = [name for name, right in found["repeated"].items() if not right]
    print(f"probes: {'nothing' if not wrong else ', '.join(wrong)} differs")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
