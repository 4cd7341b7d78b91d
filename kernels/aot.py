"""Compile every kernel for every architecture without a GPU, and check what came out.

    python -m lowbit.kernels.aot                   # some cases on sm_90, every kernel on every architecture: a minute
    python -m lowbit.kernels.aot --full --arch 90  # every format and scheme, on this one (long)

The interpreter cannot see how a GPU divides, flushes or contracts; the PTX shows it. Codecs must divide with
``div.rn``, keep subnormals, and contract nothing; products of matrices must run on tensor cores.

Source: docs/numerics.md section 1.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch

from lowbit import formats, scaling
from lowbit.kernels import convolutions, launch, products, scaled_products
from lowbit.kernels.spec import INTERPRETED, Launch
from lowbit.ops.conv import Conv
from lowbit.ops.grouped import ScaledGroupedMM, has_rows_of_its_own, product
from lowbit.ops.matmul import ScaledMM
from lowbit.ops.optim import FLOAT_STATES, RULES, STATE_SCHEME
from lowbit.tensor.quantized import scale_dtype, zero_dtype
from lowbit.testing.inputs import element_formats, schemes

ARCHITECTURES = (80, 89, 90, 100, 120)

#: A scheme for each path through the kernels, which a quick run compiles: kinds of format, scale formats, blocks,
#: levels, packing. A full run compiles those of ``lowbit.testing.inputs`` after them.
QUICK_SCHEMES = (
    "fp8_e4m3:row", "int8:row", "mxfp4", "nvfp4", "nf4", "uint4:group128:affine", "fp8_e4m3:tensor",
    "fp8_e5m2:block128x128", "mxfp6:ceil",
)  # fmt: skip
QUICK_PRODUCTS: tuple[tuple[str | None, str], ...] = (
    ("int8:row", "int8:row"), ("fp8_e4m3:row", "fp8_e4m3:row"), ("int8:row", "int4:group128"), (None, "int4:group128"),
    (None, "nvfp4"), (None, "nf4"), (None, "uint4:group64:affine"),
)  # fmt: skip

#: What PTX may not hold: division and functions that are not correctly rounded, flushed subnormals, contraction.
FORBIDDEN = re.compile(
    r"^\s*(?:@!?%\w+\s+)?((?:div\.(?:approx|full)|rcp|ex2|lg2|fma|mad(?:\.\w+)*\.f\d+)\S*|\S*\.ftz\S*)", re.MULTILINE
)

#: The matrix instruction that each architecture should use, in PTX.
MATRIX = {90: re.compile(r"wgmma\.mma_async"), 100: re.compile(r"tcgen05\.mma|mma\.sync")}
#: That of integers, whose tiles may have too few rows for it.
ANY_MATRIX = re.compile(r"wgmma\.mma_async|tcgen05\.mma|mma\.sync")
#: Those that multiply codes as they are, by architecture; others have none.
CODES = {
    100: re.compile(r"tcgen05\.mma\S*(?:block_scale|f8f6f4)"),
    120: re.compile(r"mma\.sync\S*(?:block_scale|\.e[45]m[23])"),
}
#: The architectures from which on hardware converts FP8, and to FP4.
FP8_FROM, FP4_FROM = 89, 100
#: Kernels of products of matrices, which those of depthwise convolutions are not. Theirs may multiply and add at once
#: pairs of 16 bits, where no result is rounded (``decode_4bit``).
INTEGERS = ("integers", "grouped_integers", "conv_integers")
PRODUCTS = ("weight_only", "grouped_weight_only", "conv_weight_only", "scaled", *INTEGERS)
PAIRS = re.compile(r"fma\.rn\.b?f16x2")


#: Bytes of shared memory that a program may take, by architecture (CUDA C++ Programming Guide, compute capabilities).
SHARED = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


class Case(NamedTuple):
    """A named group of launches: one call of the host side, on the architectures that it is for."""

    name: str
    launches: list[Launch]
    fast: bool
    architectures: tuple[int, ...] = ARCHITECTURES


def _meta(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _rounding(stochastic: bool) -> launch.Rounding:
    return launch.Rounding(_meta(2, dtype=torch.int64), 9, 0, 4096) if stochastic else launch.Rounding()


def _codec_cases() -> Iterator[Case]:
    x, codes = _meta(64, 4096, dtype=torch.float32), _meta(64, 4096)
    for index, format in enumerate(element_formats()):
        name = format.name
        dtype = (torch.float32, torch.bfloat16, torch.float16)[index % 3]
        yield Case(f"encode {name}", launch.encode(x.to(dtype), codes, format, True, _rounding(False)), index < 6)
        yield Case(f"decode {name}", launch.decode(codes, _meta(64, 4096, dtype=dtype), format), index < 6)
        made = launch.encode(x.t().to(dtype).t(), codes, format, False, _rounding(True))
        yield Case(f"encode {name} stochastic", made, index in (1, 5) or name == "nf4")
    yield Case("decode e8m0", launch.decode(codes, x, formats.find("e8m0")), True)
    for bits in (3, 4, 6):
        packed = _meta(64, 4096 * bits // 8)
        yield Case(f"pack {bits}", launch.pack(codes, packed, bits), bits != 3)
        yield Case(f"unpack {bits}", launch.unpack(packed, codes, bits), bits != 3)
        turned = _meta(4096, 64 * bits // 8)
        yield Case(f"transpose {bits}", launch.transpose(packed, turned, bits, 4096), bits == 4)


def _scheme_cases() -> Iterator[Case]:
    listed = dict.fromkeys([*map(scaling.scheme, QUICK_SCHEMES), *schemes()])
    for index, scheme in enumerate(listed):
        name = scheme.name
        rows, cols = 2048, 4096
        dtype = (torch.float32, torch.bfloat16, torch.float16)[(index + 1) % 3]
        x, y = _meta(rows, cols, dtype=dtype), _meta(rows, cols, dtype=dtype)
        packed = _meta(rows, scheme.packed_cols(cols))
        scale = _meta(*scheme.scale_shape(rows, cols), dtype=scale_dtype(scheme))
        zero = _meta(*scale.shape, dtype=zero_dtype(scheme)) if scheme.affine else None
        global_scale = (
            _meta(*scheme.global_scale_shape(x.shape[0]), dtype=torch.float32) if scheme.global_scale else None
        )
        near, some = _rounding(False), _rounding(True)
        fast = index < len(QUICK_SCHEMES)
        yield Case(
            f"quantize {name}", launch.quantize_dynamic(x, scheme, global_scale, packed, scale, zero, near), fast
        )
        low, high = _meta(*scale.shape, dtype=torch.float32), _meta(*scale.shape, dtype=torch.float32)
        yield Case(f"block_range {name}", launch.block_range(x, low, high, scheme), index in (0, 3))
        yield Case(f"dequantize {name}", launch.dequantize(packed, scheme, scale, zero, global_scale, y), fast)
        made = launch.quantize_dynamic(x, scheme, global_scale, packed, scale, zero, some)
        yield Case(f"quantize {name} stochastic", made, index in (0, 2))
        made = launch.quantize_static(x, scheme, scale, zero, global_scale, packed, near)
        yield Case(f"quantize_static {name}", made, index in (1, 3))
        made = launch.quantize_dynamic(x, scheme, global_scale, y, None, None, near, fake=True)
        yield Case(f"fake_quantize {name}", made, index in (1, 5))
        sums = _meta(*([2] if scheme.affine else []), *scale.shape, dtype=torch.float32)
        made = launch.fake_quantize_backward(y, x, scheme, scale, zero, global_scale, y, sums)
        yield Case(f"fake_quantize_backward {name}", made, index in (1, 6))
        if global_scale is not None:
            yield Case(f"global_scale {name}", launch.global_scale(x, global_scale, scheme), fast)


def _rotation_cases() -> Iterator[Case]:
    for index, dtype in enumerate((torch.bfloat16, torch.float32, torch.float16)):
        x = _meta(512, 4096 + 16, dtype=dtype)
        for block, axis in ((16, 1), (128, 1), (128, 0)):
            sides = (x, x) if axis else (x.t(), x.t())
            yield Case(f"hadamard {block} {dtype}", launch.hadamard(*sides, block, axis == 1), index == 0 and axis == 1)


def _product_cases() -> Iterator[Case]:
    """Products of few rows and of many, of each scheme of the samples by another one, and by floats."""
    listed = [*map(str, schemes())]
    pairs: list[tuple[str | None, str]] = [*QUICK_PRODUCTS, *((None, name) for name in listed)]
    pairs += [(a, b) for a, b in zip(listed, [*listed[1:], listed[0]], strict=True)]
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    for index, (a, b) in enumerate(pairs):
        rows, quick = (512 if index % 2 else 1), index < len(QUICK_PRODUCTS)
        sides = _side("a", rows, a, torch.bfloat16 if quick else dtypes[index % 3]) | _side("b", 512, b)
        bias, out = _meta(512, dtype=torch.bfloat16), _meta(rows, 512, dtype=torch.bfloat16)
        call = ScaledMM(**sides, cols=4096, bias=bias, out_dtype=out.dtype)
        if products.supports(call) is None:
            yield Case(f"scaled_mm {rows} rows {a or call.a.dtype} x {b}", products.scaled_mm(call, out), quick)


#: Products of codes that tensor cores multiply as they are.
CODED = (
    ("nvfp4:global_row", "nvfp4"), ("mxfp8", "mxfp8"), ("fp8_e5m2:row", "fp8_e4m3:tensor"), ("mxfp4", "mxfp4"),
    ("mxfp6", "mxfp6:ceil"), ("nvfp4", "fp4_e2m1:block16x16:e4m3"),
)  # fmt: skip


def _coded_cases() -> Iterator[Case]:
    for index, (a, b) in enumerate(CODED):
        for rows in (1, 64, 512):
            call = ScaledMM(**_side("a", rows, a), **_side("b", 512, b), cols=4096)
            made = scaled_products.scaled_mm(call, _meta(rows, 512, dtype=torch.bfloat16))
            yield Case(f"scaled_mm {rows} rows {a} x {b} as codes", made, index < 3 and rows == 64, tuple(CODES))


#: Products of experts that a quick run compiles.
QUICK_GROUPED = ((None, "int4:group128"), (None, "nf4"), ("int8:row", "int8:row"))


def _grouped_cases() -> Iterator[Case]:
    """Products of 8 experts, a row each and many."""
    for index, (a, b) in enumerate(dict.fromkeys((*QUICK_GROUPED, *QUICK_PRODUCTS, (None, "mxfp4")))):
        rows, one = (8 if index % 2 == 0 else 1024), _side("b", 512, b)
        stacks = {name: x.expand(8, *x.shape) if isinstance(x, torch.Tensor) else x for name, x in one.items()}
        call = ScaledGroupedMM(
            **_side("a", rows, a), **stacks, offsets=_meta(8, dtype=torch.int32), cols=4096,
            bias=_meta(8, 512, dtype=torch.bfloat16),
        )  # fmt: skip
        if a is not None and not has_rows_of_its_own(scaling.scheme(a)):
            continue
        if products.supports(product(call, 0, slice(None))) is None:
            made = products.scaled_grouped_mm(call, _meta(rows, 512, dtype=torch.bfloat16))
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
#: Those that a quick run compiles.
QUICK_CONVOLUTIONS = 4


def _conv_cases() -> Iterator[Case]:
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    for index, (a, b, sizes, out, kernel, groups) in enumerate(CONVOLUTIONS):
        axes, dtype = len(sizes) - 2, dtypes[index % 3]
        weight = _side("b", out, b, cols=sizes[-1] // groups * kernel**axes)
        call = Conv(
            _meta(*sizes, dtype=dtype), weight["b"], b, weight["b_scale"], weight["b_zero_point"],
            weight.get("b_global_scale"), _meta(out, dtype=dtype), (kernel,) * axes, (1,) * axes,
            (kernel // 2,) * 2 * axes, (1,) * axes, groups, a, dtype,
        )  # fmt: skip
        coded, launches = convolutions.quantized(call)
        launches += convolutions.convolve(coded, _meta(*sizes[:-1], out, dtype=dtype))
        name = f"conv {list(sizes)} {a or dtype} x {b}, kernel {kernel}, groups {groups}"
        yield Case(name, launches, index < QUICK_CONVOLUTIONS)


def _side(
    name: str, rows: int, text: str | None, dtype: torch.dtype = torch.bfloat16, cols: int = 4096
) -> dict[str, Any]:
    if text is None:
        return {name: _meta(rows, cols, dtype=dtype)}
    scheme = scaling.scheme(text)
    shape = scheme.scale_shape(rows, cols)
    made = {
        name: _meta(rows, scheme.packed_cols(cols)),
        f"{name}_scheme": text,
        f"{name}_scale": _meta(*shape, dtype=scale_dtype(scheme)),
        f"{name}_zero_point": _meta(*shape, dtype=zero_dtype(scheme)) if scheme.affine else None,
    }
    if scheme.global_scale:
        made[f"{name}_global_scale"] = _meta(*scheme.global_scale_shape(rows), dtype=torch.float32)
    return made


#: Steps to compile: the rule, what its moments are kept in, the parameter's dtype, its master's, and whether the
#: parameter is rounded by random bits.
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
        numbers = _meta(64, 4096, dtype=FLOAT_STATES[text])
        return launch.Moment(None, numbers, None, numbers, None)
    scheme = scaling.scheme(text)
    codes = _meta(64, scheme.packed_cols(4096))
    scale = _meta(*scheme.scale_shape(64, 4096), dtype=scale_dtype(scheme))
    return launch.Moment(scheme, codes, scale, codes, scale)


def _step_cases() -> Iterator[Case]:
    grads = (torch.float32, torch.bfloat16, torch.float16)
    for index, (rule, moments, dtype, master_dtype, random) in enumerate(STEPS):
        param, grad = _meta(64, 4096, dtype=dtype), _meta(64, 4096, dtype=grads[index % 3])
        master = None if master_dtype is None else _meta(64, 4096, dtype=master_dtype)
        stochastic = index % 2 == 1
        made = launch.optimizer_step(
            launch.Weight(param, master, param, master, random), grad, [_step_moment(text) for text in moments], rule,
            [0.5] * len(RULES[rule].factors), _rounding(stochastic or random), stochastic,
        )  # fmt: skip
        yield Case(f"{rule} {' '.join(moments)}", made, index < 4)


@cache
def cases() -> list[Case]:
    """Every case: kernels x formats of the table, schemes of the samples, and options."""
    makers = (
        _codec_cases, _scheme_cases, _rotation_cases, _step_cases, _product_cases, _coded_cases, _grouped_cases,
        _conv_cases,
    )  # fmt: skip
    return [case for make in makers for case in make()]


# -- compiling ---------------------------------------------------------------------------------------------------------
_TYPES = {
    torch.float32: "fp32", torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8",
    torch.uint8: "u8", torch.bfloat16: "bf16", torch.float16: "fp16",
}  # fmt: skip


class Compiled(NamedTuple):
    """A launch compiled: its PTX, its machine code as an ELF file, and the bytes of shared memory that it takes."""

    ptx: str
    cubin: bytes
    shared: int


def specialized(one: Launch, architecture: int) -> tuple[dict[str, str], dict[str, Any], dict[Any, Any]]:
    """What Triton compiles a launch for, as it does on a GPU: types of arguments, constants, and which are divisible.

    Addresses count as multiples of 16.
    """
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[Any, Any] = {}
    without = {} if architecture >= FP8_FROM else dict.fromkeys(("FP8", "A_FP8", "CONVERT"), "")
    if architecture < FP4_FROM and one.arguments.get("CONVERT") == "e2m1":
        without["CONVERT"] = ""
    arguments = one.arguments | without
    for index, param in enumerate(one.kernel.params):
        value = arguments[param.name]
        tensor = isinstance(value, torch.Tensor)
        if param.is_constexpr or value is None or (not tensor and value == 1 and not param.do_not_specialize):
            signature[param.name], constants[param.name] = "constexpr", value
            continue
        number = "fp32" if isinstance(value, float) else "i32" if not tensor and abs(value) < 1 << 31 else "i64"
        wide = param.annotation_type or number
        signature[param.name] = f"*{_TYPES[value.dtype]}" if tensor else wide
        if tensor or (wide != "fp32" and value % 16 == 0 and not param.do_not_specialize):
            attributes[(index,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def compile_launch(one: Launch, architecture: int) -> Compiled:
    """A launch compiled and assembled for an architecture, specialised to its arguments. Raises: what Triton or ptxas
    raise.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(one.kernel, *specialized(one, architecture))
    options = {"num_warps": one.warps, "num_stages": one.stages, "enable_fp_fusion": False}
    compiled = triton.compile(source, GPUTarget("cuda", architecture, 32), options)
    return Compiled(str(compiled.asm["ptx"]), compiled.asm["cubin"], int(compiled.metadata.shared))


def faults(name: str, ptx: str, architecture: int) -> list[str]:
    """What the PTX of a kernel holds that it may not, or lacks."""
    held = sorted(set(FORBIDDEN.findall(ptx)))
    found = [f"holds {text}" for text in held if not (name in PRODUCTS and PAIRS.match(text))]
    wanted = ANY_MATRIX if name in INTEGERS else MATRIX.get(architecture, re.compile(r"mma\.sync"))
    wanted = CODES[architecture] if name == "scaled" else wanted
    if name in PRODUCTS and not wanted.search(ptx):
        found.append("runs on no tensor core")
    return found


def _compile_case(job: tuple[int, int]) -> list[str]:
    """Faults of one case on one architecture."""
    index, architecture = job
    case = cases()[index]
    found = []
    for one in case.launches:
        kernel = one.kernel.__name__
        try:
            made = compile_launch(one, architecture)
        except Exception as error:  # whatever the compiler raises is a finding about this kernel
            found.append(f"{kernel} does not compile: {error}")
        else:
            found += [f"{kernel} {fault}" for fault in faults(kernel, made.ptx, architecture)]
            if made.shared > SHARED.get(architecture, made.shared):
                found.append(f"{kernel} takes {made.shared} bytes of shared memory of {SHARED[architecture]}")
    return found


def jobs(full: bool, architectures: tuple[int, ...]) -> list[tuple[int, int]]:
    """Pairs of case and architecture. Fast: some cases on the first one that has them, each kernel once on others."""
    listed = cases()
    order = sorted(architectures, key=lambda architecture: architecture != 90)
    if full:
        return [(i, arch) for arch in architectures for i, case in enumerate(listed) if arch in case.architectures]
    chosen: dict[tuple[int, int], None] = {}
    for index, case in enumerate(listed):
        first = next((arch for arch in order if arch in case.architectures), None)
        if case.fast and first is not None:
            chosen[index, first] = None
    for architecture in order:
        done = {one.kernel.__name__ for index, arch in chosen if arch == architecture for one in listed[index].launches}
        for index, case in enumerate(listed):
            names = {one.kernel.__name__ for one in case.launches}
            if architecture in case.architectures and not names <= done:
                chosen[index, architecture] = None
                done |= names
    return list(chosen)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lowbit.kernels.aot", description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, nargs="+", default=list(ARCHITECTURES), help="compute capabilities, as 90")
    parser.add_argument(
        "--full", action="store_true", help="every case on every architecture (long; narrow it with --arch)"
    )
    parser.add_argument("--workers", type=int, default=2, help="processes (default 2)")
    options = parser.parse_args(argv)
    if INTERPRETED:
        parser.error("TRITON_INTERPRET is set, and interpreted kernels cannot be compiled; unset it")
    listed, work = cases(), jobs(options.full, tuple(options.arch))
    start, counts, broken = time.perf_counter(), Counter[int](), 0
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        for (index, arch), found in zip(work, pool.map(_compile_case, work), strict=True):
            counts[arch] += len(listed[index].launches)
            broken += bool(found)
            for fault in found:
                print(f"sm_{arch} {listed[index].name}: {fault}", file=sys.stderr)
    compiled = ", ".join(f"sm_{arch} {count}" for arch, count in sorted(counts.items()))
    print(f"kernels compiled: {compiled}; cases at fault: {broken}; {time.perf_counter() - start:.0f} s")
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
