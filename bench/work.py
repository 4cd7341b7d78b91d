"""The groups to measure, made from lowbit's own tables: all formats, and all recipes' schemes and products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import lowbit as lb
from bench import peers, probe
from bench.timing import Case, Group
from lowbit.backends import registry
from lowbit.formats import FORMATS, Format
from lowbit.ops import OPS
from lowbit.ops.matmul import ScaledMM
from lowbit.recipes import RECIPES
from lowbit.scaling import Scheme, scheme


def isas() -> list[str]:
    """Instruction sets of the compiled kernels, best last; one empty name where there are none to choose from."""
    try:
        from lowbit import _native
    except ImportError:
        return [""]
    return list(_native.isas()) if hasattr(torch.ops.lowbit_native, "force_isa") else [""]


def lowbit_cases(op: str, call: Any) -> Iterator[Case]:
    """lowbit's op on ``call`` with preallocated outputs: once for each instruction set."""
    spec = OPS[op]
    outs = {
        name: torch.empty(shape, dtype=dtype)
        for name, (shape, dtype) in zip(spec.returns, spec.outputs(call), strict=True)
    }
    run = getattr(torch.ops.lowbit, f"{op}_out")
    chosen = registry.explaining(op, lambda: run(*call, **outs)).chosen
    if chosen is None or chosen.backend == "reference":
        yield Case("lowbit reference", lambda: run(*call, **outs))
        return
    for isa in isas():
        enter: Callable[[], None] = (lambda isa=isa: torch.ops.lowbit_native.force_isa(isa)) if isa else (lambda: None)
        yield Case(f"lowbit {isa}".strip(), lambda: run(*call, **outs), enter)


def group(
    section: str, label: str, subject: str, op: str, call: Any, others: Iterator[Case], limit: Case | None = None
) -> Group:
    cost = OPS[op].cost(call)
    cases = (*lowbit_cases(op, call), *others)
    return Group(section, label, subject, cost.bytes, cost.flops, cases, limit or probe.copy_of(cost.bytes))


# -- codecs ------------------------------------------------------------------------------------------------------------
def element_formats() -> list[Format]:
    return [f for f in FORMATS.values() if f.bits <= 8 and f.kind != "exponent"]


def codecs(rows: int, cols: int) -> Iterator[Callable[[], Group]]:
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(0))
    codes = torch.randint(0, 256, (rows, cols), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    for format in element_formats():
        yield lambda f=format: group(
            "encode", "encode", f.name, "encode", OPS["encode"].args(x, f.name), peers.encoders(x, f)
        )
        if format.kind != "codebook":
            yield lambda f=format: group(
                "encode", "encode, stochastic", f.name, "encode", OPS["encode"].args(x, f.name, "stochastic"), iter(())
            )
        if format.signed:
            yield lambda f=format: group(
                "encode", "divide by a scale, encode, pack", f.name, "quantize_static",
                _static(x, scheme(f"{f.name}:tensor")), iter(()),
            )  # fmt: skip
        for dtype in (torch.float32, torch.bfloat16):
            yield lambda f=format, d=dtype: group(
                "decode", f"decode to {_name(d)}", f.name, "decode", OPS["decode"].args(_valid(codes, f), f.name, d),
                peers.decoders(_valid(codes, f), f, d),
            )  # fmt: skip


def _valid(codes: Tensor, format: Format) -> Tensor:
    return codes & ((1 << format.bits) - 1)


def _static(x: Tensor, kind: Scheme) -> Any:
    return OPS["quantize_static"].args(x, kind.name, torch.full((1, 1), 0.01))


def _name(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]


# -- schemes -----------------------------------------------------------------------------------------------------------
def recipe_schemes() -> list[Scheme]:
    """Every scheme that some recipe gives to a weight or an input."""
    return list(dict.fromkeys(s for row in RECIPES.values() for s in (row.weight, row.input) if s is not None))


def schemes(rows: int, cols: int) -> Iterator[Callable[[], Group]]:
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(0))
    for kind in recipe_schemes():
        outer = torch.ops.lowbit.outer_scale(x, kind.name) if kind.outer else None
        for source in (x, x.bfloat16()):
            label = _name(source.dtype)
            yield lambda k=kind, o=outer, s=source, n=label: group(
                "quantize",
                f"quantize {n}",
                k.name,
                "quantize",
                OPS["quantize"].args(s, k.name, o),
                peers.quantizers(s, k),
            )
            yield lambda k=kind, o=outer, s=source, n=label: group(
                "quantize", f"fake_quantize {n}", k.name, "fake_quantize",
                OPS["fake_quantize"].args(s, k.name, outer_scale=o), iter(()),
            )  # fmt: skip
        yield lambda k=kind, o=outer: group(
            "quantize", "dequantize to bf16", k.name, "dequantize", _stored(x, k, o, torch.bfloat16),
            peers.dequantizers(x.bfloat16(), k, torch.bfloat16),
        )  # fmt: skip


def _stored(x: Tensor, kind: Scheme, outer: Tensor | None, dtype: torch.dtype) -> Any:
    codes, scale, zero = torch.ops.lowbit.quantize(x, kind.name, outer)
    return OPS["dequantize"].args(codes, kind.name, x.shape[1], scale, zero if kind.affine else None, outer, dtype)


# -- products --------------------------------------------------------------------------------------------------------
def products(shapes: tuple[tuple[int, int, int], ...]) -> Iterator[Callable[[], Group]]:
    """Every recipe's forward product, ``y [m, n] = x [m, k] @ w [n, k].T`` x encoded beforehand or bf16."""
    pairs = dict.fromkeys((row.input.name if row.input else None, row.weight.name) for row in RECIPES.values())
    for m, n, k in shapes:
        for a_scheme, b_scheme in pairs:
            yield lambda a=a_scheme, b=b_scheme, m=m, n=n, k=k: _product(a, b, m, n, k)


def _side(name: str, x: Tensor, text: str | None) -> dict[str, Any]:
    """One operand's arguments of scaled_mm."""
    if text is None:
        return {name: x}
    q = lb.quantize(x, text)
    parts = {
        "": q.codes,
        "_scheme": text,
        "_scale": q.scale,
        "_zero_point": q.zero_point,
        "_outer_scale": q.outer_scale,
    }
    return {name + key: value for key, value in parts.items()}


def _product(a_scheme: str | None, b_scheme: str, m: int, n: int, k: int) -> Group:
    a, b = (torch.randn(rows, k, generator=torch.Generator().manual_seed(rows)) for rows in (m, n))
    call = ScaledMM(**_side("a", a.bfloat16(), a_scheme), **_side("b", b, b_scheme), cols=k)
    integers = all(text is not None and scheme(text).format.kind == "integer" for text in (a_scheme, b_scheme))
    limit = probe.linear(m, n, k, torch.int8 if integers else torch.bfloat16)
    others = [probe.linear(m, n, k, torch.float32)]
    if integers:
        others.append(probe.linear(m, n, k, torch.bfloat16))
    eight = scheme(b_scheme).format
    # torch 2.13 multiplies fp8 on CPUs one element at a time (0.03 GFLOP/s): a large product would take minutes.
    if a_scheme and eight.kind == "float" and eight.bits == 8 and eight.torch_dtype and m * n * k <= 1 << 24:
        others += peers.usable(lambda: probe.scaled_mm(m, n, k, getattr(torch, str(eight.torch_dtype))))
    subject = f"{a_scheme or 'bf16'} x {b_scheme}"
    return group("scaled_mm", f"scaled_mm {m}x{n}x{k}", subject, "scaled_mm", call, iter(others), limit)
