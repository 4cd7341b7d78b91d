"""The launches that ``aot`` compiles: host-side calls on meta tensors, one for each path through the kernels."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch

from lowbit import formats, scaling
from lowbit.kernels import convolutions, dual_launch, fused_launch, launch, products, scaled_products
from lowbit.kernels.spec import Launch
from lowbit.ops import OPS
from lowbit.ops.conv import Conv
from lowbit.ops.dual import QuantizeBoth
from lowbit.ops.fused import ACTIVATIONS, RMSNorm, RMSNormBackward, Rotary, Swiglu, SwigluBackward
from lowbit.ops.grouped import ScaledGroupedMM, has_rows_of_its_own, product
from lowbit.ops.matmul import ScaledMM
from lowbit.ops.optim import FLOAT_STATES, RULES, STATE_SCHEME
from lowbit.tensor.quantized import scale_dtype, zero_dtype
from lowbit.testing.inputs import element_formats, schemes

__all__ = ["ARCHITECTURES", "DUAL", "MULTIPLY_CODES", "STEPS", "Case", "cases", "meta", "side"]

ARCHITECTURES = (80, 89, 90, 100, 120)
#: Architectures that multiply FP8 and FP4 codes directly.
MULTIPLY_CODES = (100, 120)

#: Schemes of a quick run, one for each path through the kernels: kinds of format, scale formats, blocks, levels,
#: packing. A full run also compiles those of ``lowbit.testing.inputs``.
QUICK_SCHEMES = (
    "fp8_e4m3:row", "int8:row", "mxfp4", "nvfp4", "nf4", "uint4:group128:affine", "fp8_e4m3:tensor",
    "fp8_e5m2:block128x128", "mxfp6:ceil",
)  # fmt: skip
QUICK_PRODUCTS: tuple[tuple[str | None, str], ...] = (
    ("int8:row", "int8:row"), ("fp8_e4m3:row", "fp8_e4m3:row"), ("int8:row", "int4:group128"), (None, "int4:group128"),
    (None, "nvfp4"), (None, "nf4"), (None, "uint4:group64:affine"),
)  # fmt: skip


class Case(NamedTuple):
    """A named group of launches: one host-side call, with the architectures that it is for."""

    name: str
    launches: list[Launch]
    fast: bool
    architectures: tuple[int, ...] = ARCHITECTURES


def meta(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _rounding(stochastic: bool) -> launch.Rounding:
    return launch.Rounding(meta(2, dtype=torch.int64), 9, 0, 4096) if stochastic else launch.Rounding()


def _codec_cases() -> Iterator[Case]:
    x, codes = meta(64, 4096, dtype=torch.float32), meta(64, 4096)
    for index, format in enumerate(element_formats()):
        name = format.name
        dtype = (torch.float32, torch.bfloat16, torch.float16)[index % 3]
        yield Case(f"encode {name}", launch.encode(x.to(dtype), codes, format, True, _rounding(False)), index < 6)
        yield Case(f"decode {name}", launch.decode(codes, meta(64, 4096, dtype=dtype), format), index < 6)
        made = launch.encode(x.t().to(dtype).t(), codes, format, False, _rounding(True))
        yield Case(f"encode {name} stochastic", made, index in (1, 5) or name == "nf4")
    yield Case("decode e8m0", launch.decode(codes, x, formats.find("e8m0")), True)
    for bits in (3, 4, 6):
        packed = meta(64, 4096 * bits // 8)
        yield Case(f"pack {bits}", launch.pack(codes, packed, bits), bits != 3)
        yield Case(f"unpack {bits}", launch.unpack(packed, codes, bits), bits != 3)
        turned = meta(4096, 64 * bits // 8)
        yield Case(f"transpose {bits}", launch.transpose(packed, turned, bits, 4096), bits == 4)


def _scheme_cases() -> Iterator[Case]:
    listed = dict.fromkeys([*map(scaling.scheme, QUICK_SCHEMES), *schemes()])
    for index, scheme in enumerate(listed):
        name = scheme.name
        rows, cols = 2048, 4096
        dtype = (torch.float32, torch.bfloat16, torch.float16)[(index + 1) % 3]
        x, y = meta(rows, cols, dtype=dtype), meta(rows, cols, dtype=dtype)
        packed = meta(rows, scheme.packed_cols(cols))
        scale = meta(*scheme.scale_shape(rows, cols), dtype=scale_dtype(scheme))
        zero = meta(*scale.shape, dtype=zero_dtype(scheme)) if scheme.affine else None
        global_scale = meta(*scheme.global_scale_shape(*x.shape), dtype=torch.float32) if scheme.global_scale else None
        near, some = _rounding(False), _rounding(True)
        fast = index < len(QUICK_SCHEMES)
        yield Case(
            f"quantize {name}", launch.quantize_dynamic(x, scheme, global_scale, packed, scale, zero, near), fast
        )
        low, high = meta(*scale.shape, dtype=torch.float32), meta(*scale.shape, dtype=torch.float32)
        yield Case(f"block_range {name}", launch.block_range(x, low, high, scheme), index in (0, 3))
        yield Case(f"dequantize {name}", launch.dequantize(packed, scheme, scale, zero, global_scale, y), fast)
        made = launch.quantize_dynamic(x, scheme, global_scale, packed, scale, zero, some)
        yield Case(f"quantize {name} stochastic", made, index in (0, 2))
        made = launch.quantize_static(x, scheme, scale, zero, global_scale, packed, near)
        yield Case(f"quantize_static {name}", made, index in (1, 3))
        made = launch.quantize_dynamic(x, scheme, global_scale, y, None, None, near, fake=True)
        yield Case(f"fake_quantize {name}", made, index in (1, 5))
        sums = meta(*([2] if scheme.affine else []), *scale.shape, dtype=torch.float32)
        made = launch.fake_quantize_backward(y, x, scheme, scale, zero, global_scale, y, sums)
        yield Case(f"fake_quantize_backward {name}", made, index in (1, 6))
        if launch.whole_rows(rows, cols, scheme) is not None:
            assert global_scale is not None
            yield Case(f"quantize_global {name}", launch.quantize_rows(x, scheme, packed, scale, global_scale), True)
        if global_scale is not None:
            yield Case(f"global_scale {name}", launch.global_scale(x, global_scale, scheme), fast)


def _rotation_cases() -> Iterator[Case]:
    for index, dtype in enumerate((torch.bfloat16, torch.float32, torch.float16)):
        x = meta(512, 4096 + 16, dtype=dtype)
        for block, axis in ((16, 1), (128, 1), (128, 0)):
            sides = (x, x) if axis else (x.t(), x.t())
            yield Case(f"hadamard {block} {dtype}", launch.hadamard(*sides, block, axis == 1), index == 0 and axis == 1)


#: Pairs of schemes, and the transform block of the second.
DUAL = (
    ("mxfp8:ceil", "mxfp8:ceil:T", 1), ("nvfp4:global_row", "nvfp4:T", 16), ("mxfp4:nearest", "mxfp4:nearest:T", 32),
    ("fp8_e4m3:group128", "fp8_e4m3:group128:T", 1), ("fp8_e4m3:row:e8m0:ceil", "fp8_e4m3:row:e8m0:ceil:T", 1),
    ("int8:row", "int4:group32", 128),
)  # fmt: skip


def _both_cases() -> Iterator[Case]:
    for index, (first, second, block) in enumerate(DUAL):
        for word in ("nearest", "stochastic"):
            x, rng = meta(2048, 4096, dtype=torch.bfloat16), meta(2, dtype=torch.int64)
            call = QuantizeBoth(x, first, second, block, word, word, None if word == "nearest" else rng)
            outs = tuple(meta(*shape, dtype=dtype) for shape, dtype in OPS["quantize_both"].outputs(call))
            fast = index < 2 and (word == "stochastic") == (index == 1)
            yield Case(f"quantize_both {first} {second} {word}", dual_launch.quantize_both(call, outs), fast)


def _product_cases() -> Iterator[Case]:
    """Matmuls with few and many rows: each sample scheme by another one, and by floats."""
    listed = [*map(str, schemes())]
    pairs: list[tuple[str | None, str]] = [*QUICK_PRODUCTS, *((None, name) for name in listed)]
    pairs += [(a, b) for a, b in zip(listed, [*listed[1:], listed[0]], strict=True)]
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    for index, (a, b) in enumerate(pairs):
        rows, quick = (512 if index % 2 else 1), index < len(QUICK_PRODUCTS)
        sides = side("a", rows, a, torch.bfloat16 if quick else dtypes[index % 3]) | side("b", 512, b)
        bias, out = meta(512, dtype=torch.bfloat16), meta(rows, 512, dtype=torch.bfloat16)
        call = ScaledMM(**sides, cols=4096, bias=bias, out_dtype=out.dtype)
        if products.supports(call) is None:
            yield Case(f"scaled_mm {rows} rows {a or call.a.dtype} x {b}", products.scaled_mm(call, out), quick)


#: Pairs of schemes whose codes tensor cores multiply directly.
CODED = (
    ("nvfp4:global_row", "nvfp4"), ("mxfp8", "mxfp8"), ("fp8_e5m2:row", "fp8_e4m3:tensor"), ("mxfp4", "mxfp4"),
    ("mxfp6", "mxfp6:ceil"), ("nvfp4", "fp4_e2m1:block16x16:e4m3"),
)  # fmt: skip


def _coded_cases() -> Iterator[Case]:
    for index, (a, b) in enumerate(CODED):
        for rows in (1, 64, 512):
            call = ScaledMM(**side("a", rows, a), **side("b", 512, b), cols=4096)
            made = scaled_products.scaled_mm(call, meta(rows, 512, dtype=torch.bfloat16))
            yield Case(f"scaled_mm {rows} rows {a} x {b} as codes", made, index < 3 and rows == 64, MULTIPLY_CODES)


def _coded_experts() -> Iterator[Case]:
    """Matmuls of codes for 8 experts."""
    for index, (a, b) in enumerate(pair for pair in CODED if has_rows_of_its_own(scaling.scheme(pair[0]))):
        for rows in (8, 1024):
            made = scaled_products.scaled_grouped_mm(_experts(rows, a, b), meta(rows, 512, dtype=torch.bfloat16))
            quick = index < 2 and rows == 1024
            yield Case(f"scaled_grouped_mm {rows} rows {a} x {b} as codes", made, quick, MULTIPLY_CODES)


#: Expert matmuls of a quick run.
QUICK_GROUPED = ((None, "int4:group128"), (None, "nf4"), ("int8:row", "int8:row"))


def _experts(rows: int, a: str | None, b: str) -> ScaledGroupedMM:
    one = side("b", 512, b)
    stacks: dict[str, Any] = {
        name: x.expand(8, *x.shape) if isinstance(x, torch.Tensor) else x for name, x in one.items()
    }
    return ScaledGroupedMM(
        **side("a", rows, a), **stacks, offsets=meta(8, dtype=torch.int32), cols=4096,
        bias=meta(8, 512, dtype=torch.bfloat16),
    )  # fmt: skip


def _grouped_cases() -> Iterator[Case]:
    """Matmuls for 8 experts, with one row each and with many."""
    for index, (a, b) in enumerate(dict.fromkeys((*QUICK_GROUPED, *QUICK_PRODUCTS, (None, "mxfp4")))):
        rows = 8 if index % 2 == 0 else 1024
        call = _experts(rows, a, b)
        if a is not None and not has_rows_of_its_own(scaling.scheme(a)):
            continue
        if products.supports(product(call, 0, slice(None))) is None:
            made = products.scaled_grouped_mm(call, meta(rows, 512, dtype=torch.bfloat16))
            yield Case(f"scaled_grouped_mm {rows} rows {a or call.a.dtype} x {b}", made, index < len(QUICK_GROUPED))


#: Convolutions to compile: schemes of input and weight, sizes of ``x``, out channels, kernel, groups.
CONVOLUTIONS: tuple[tuple[str | None, str, tuple[int, ...], int, int, int], ...] = (
    ("int8:tensor", "int8:row", (8, 56, 56, 64), 64, 3, 1),
    ("fp8_e4m3:row", "fp8_e4m3:row", (8, 28, 28, 128), 128, 3, 1),
    (None, "int4:group128", (8, 28, 28, 128), 256, 1, 1),
    ("int8:row", "int8:row", (8, 56, 56, 144), 144, 3, 144),
    ("int8:row", "int8:row", (8, 28, 28, 128), 128, 3, 4),
    ("uint8:tensor:affine", "int4:row", (2, 28, 28, 3), 32, 7, 1),
    (None, "fp8_e4m3:row", (2, 40, 96), 96, 3, 2),
    (None, "int4:row", (8, 14, 14, 480), 480, 5, 480),
    ("fp8_e4m3:tensor", "nf4:row", (8, 28, 28, 64), 64, 3, 64),
    ("int8:tensor", "int8:group32", (1, 8, 8, 8, 64), 64, 3, 1),
    (None, "nf4", (1, 7, 7, 512), 512, 3, 1),
)
#: The number of these in a quick run.
QUICK_CONVOLUTIONS = 4


def _conv_cases() -> Iterator[Case]:
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    for index, (a, b, sizes, out, kernel, groups) in enumerate(CONVOLUTIONS):
        axes, dtype = len(sizes) - 2, dtypes[index % 3]
        weight = side("b", out, b, cols=sizes[-1] // groups * kernel**axes)
        call = Conv(
            meta(*sizes, dtype=dtype), weight["b"], b, weight["b_scale"], weight["b_zero_point"],
            weight.get("b_global_scale"), meta(out, dtype=dtype), (kernel,) * axes, (1,) * axes,
            (kernel // 2,) * 2 * axes, (1,) * axes, groups, a, dtype,
        )  # fmt: skip
        coded, launches = convolutions.quantized(call)
        launches += convolutions.convolve(coded, meta(*sizes[:-1], out, dtype=dtype))
        name = f"conv {list(sizes)} {a or dtype} x {b}, kernel {kernel}, groups {groups}"
        yield Case(name, launches, index < QUICK_CONVOLUTIONS)


def side(
    name: str, rows: int, text: str | None, dtype: torch.dtype = torch.bfloat16, cols: int = 4096
) -> dict[str, Any]:
    if text is None:
        return {name: meta(rows, cols, dtype=dtype)}
    scheme = scaling.scheme(text)
    shape = scheme.scale_shape(rows, cols)
    made = {
        name: meta(rows, scheme.packed_cols(cols)),
        f"{name}_scheme": text,
        f"{name}_scale": meta(*shape, dtype=scale_dtype(scheme)),
        f"{name}_zero_point": meta(*shape, dtype=zero_dtype(scheme)) if scheme.affine else None,
    }
    if scheme.global_scale:
        made[f"{name}_global_scale"] = meta(*scheme.global_scale_shape(rows, cols), dtype=torch.float32)
    return made


#: Optimizer steps: rule, schemes of the moments, dtypes of parameter and master, and whether the parameter is rounded
#: stochastically.
STEPS: tuple[tuple[str, tuple[str, ...], torch.dtype, torch.dtype | None, bool], ...] = (
    ("adamw", (STATE_SCHEME, STATE_SCHEME), torch.float32, None, False),
    ("lion", (STATE_SCHEME,), torch.bfloat16, None, True),
    ("adamw", ("dynamic4:group128", "ulog4:group128"), torch.bfloat16, None, False),
    ("adamw", ("int4:group33", "fp6_e3m2:group96"), torch.float32, None, False),
    ("adamw", ("dynamic8:group256", "udynamic8:group256"), torch.bfloat16, torch.float32, False),
    ("momentum", ("e2m2b3:group7",), torch.float16, None, False),
    ("adamw", ("fp8_e5m2:group32", "mxfp8"), torch.bfloat16, torch.int8, False),
    ("adamw", ("fp32", "bf16"), torch.float16, torch.float32, False),
    ("lion", ("int4:group32",), torch.float16, None, False),
    ("momentum", ("bf16",), torch.bfloat16, torch.float32, False),
    ("momentum", ("mxfp4",), torch.float32, None, False),
    ("sgd", (), torch.bfloat16, torch.int8, False),
)


def _step_moment(text: str) -> launch.Moment:
    if text in FLOAT_STATES:
        numbers = meta(64, 4096, dtype=FLOAT_STATES[text])
        return launch.Moment(None, numbers, None, numbers, None)
    scheme = scaling.scheme(text)
    codes = meta(64, scheme.packed_cols(4096))
    scale = meta(*scheme.scale_shape(64, 4096), dtype=scale_dtype(scheme))
    return launch.Moment(scheme, codes, scale, codes, scale)


def _step_cases() -> Iterator[Case]:
    grads = (torch.float32, torch.bfloat16, torch.float16)
    for index, (rule, moments, dtype, master_dtype, random) in enumerate(STEPS):
        param, grad = meta(64, 4096, dtype=dtype), meta(64, 4096, dtype=grads[index % 3])
        master = None if master_dtype is None else meta(64, 4096, dtype=master_dtype)
        stochastic = index % 2 == 1
        made = launch.optimizer_step(
            launch.Weight(param, master, param, master, random), grad, [_step_moment(text) for text in moments], rule,
            [0.5] * len(RULES[rule].factors), _rounding(stochastic or random), stochastic,
        )  # fmt: skip
        yield Case(f"{rule} {' '.join(moments)}", made, index < 4)


def _fused_cases() -> Iterator[Case]:
    dtypes = (torch.bfloat16, torch.float32, torch.float16)
    for index, dtype in enumerate(dtypes):
        x, grad, fast = meta(512, 4096, dtype=dtype), meta(512, 4096, dtype=dtypes[index - 1]), index == 0
        weight, rstd = meta(4096, dtype=dtypes[index - 2]), meta(512, dtype=torch.float32)
        yield Case(f"rms_norm {dtype}", fused_launch.rms_norm(RMSNorm(x, weight, 1e-6, index % 2), x, rstd), fast)
        call = RMSNormBackward(grad, x, weight, rstd, index % 2)
        yield Case(f"rms_norm_backward {dtype}", fused_launch.rms_norm_backward(call, x, weight), fast)
        for activation in ACTIVATIONS:
            quick = fast and activation == "silu"
            yield Case(f"swiglu {activation} {dtype}", fused_launch.swiglu(Swiglu(x, x, activation), x), quick)
            gates = SwigluBackward(grad, x, x, activation)
            yield Case(f"swiglu_backward {activation} {dtype}", fused_launch.swiglu_backward(gates, x, x), quick)
        heads, table = meta(2, 32, 512, 128, dtype=dtype), meta(512, 48, dtype=dtypes[index - 2])
        for interleaved in (False, True):
            rotary = Rotary(heads, table, table, interleaved)
            yield Case(f"rotary {interleaved} {dtype}", fused_launch.rotary(rotary, heads), fast and not interleaved)


@cache
def cases() -> list[Case]:
    """Every case: kernels x formats of the table, schemes of the samples, and options."""
    makers = (
        _codec_cases, _scheme_cases, _rotation_cases, _both_cases, _step_cases, _product_cases, _coded_cases,
        _coded_experts, _grouped_cases, _conv_cases, _fused_cases,
    )  # fmt: skip
    return [case for make in makers for case in make()]
