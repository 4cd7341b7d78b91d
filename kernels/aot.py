"""Compiles every kernel for every architecture without a GPU, and checks the PTX and machine code.

    python -m lowbit.kernels.aot                   # some cases on sm_90, each kernel once per architecture: a minute
    python -m lowbit.kernels.aot --full --arch 90  # every format and scheme on sm_90 (long)

The interpreter cannot show division, flushing and contraction on a GPU; the PTX can. Codecs must divide with
``div.rn``, keep subnormals, and contract nothing. Matmuls must run on tensor cores.

Source: docs/numerics.md section 1.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch

from lowbit.kernels.arguments import ROUNDED_ONCE_FROM
from lowbit.kernels.cases import ARCHITECTURES, MULTIPLY_CODES, cases
from lowbit.kernels.spec import INTERPRETED, Launch

#: Forbidden in PTX: division and functions without correct rounding, flushed subnormals, contraction.
FORBIDDEN = re.compile(
    r"^\s*(?:@!?%\w+\s+)?((?:div\.(?:approx|full)|rcp|ex2|lg2|fma|mad(?:\.\w+)*\.f\d+)\S*|\S*\.ftz\S*)", re.MULTILINE
)

#: The PTX matrix instruction that each architecture should use.
MATRIX = {90: re.compile(r"wgmma\.mma_async"), 100: re.compile(r"tcgen05\.mma|mma\.sync")}
#: For integers, whose tiles may have too few rows for ``MATRIX``.
ANY_MATRIX = re.compile(r"wgmma\.mma_async|tcgen05\.mma|mma\.sync")
#: Instructions that multiply FP8 and FP4 codes directly, by architecture; other architectures have none.
CODES = dict(
    zip(
        MULTIPLY_CODES,
        (
            re.compile(r"tcgen05\.mma\S*(?:block_scale|f8f6f4)"),
            re.compile(r"mma\.sync\S*(?:block_scale|\.e[45]m[23])"),
        ),
        strict=True,
    )
)
#: The first architectures whose hardware converts FP8, and to FP4.
FP8_FROM, FP4_FROM = 89, 100
#: The arguments that name the target format of a hardware conversion.
CONVERSIONS = ("CONVERT", "OTHER_CONVERT")
#: Matmul kernels, without depthwise convolutions. They may use fma on pairs of 16-bit numbers if no result is rounded
#: (``decode_4bit``).
INTEGERS = ("integers", "grouped_integers", "conv_integers")
OF_CODES = ("scaled", "grouped_scaled")
PRODUCTS = ("weight_only", "grouped_weight_only", "conv_weight_only", *OF_CODES, *INTEGERS)
PAIRS = re.compile(r"fma\.rn\.b?f16x2")


#: Bytes of shared memory per program, by architecture (CUDA C++ Programming Guide, compute capabilities).
SHARED = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


# -- compiling ---------------------------------------------------------------------------------------------------------
_TYPES = {
    torch.float32: "fp32", torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8",
    torch.uint8: "u8", torch.bfloat16: "bf16", torch.float16: "fp16",
}  # fmt: skip


class Compiled(NamedTuple):
    """A compiled launch: PTX, machine code as an ELF file, and bytes of shared memory."""

    ptx: str
    cubin: bytes
    shared: int


def specialized(one: Launch, architecture: int) -> tuple[dict[str, str], dict[str, Any], dict[Any, Any]]:
    """The specialization of a launch, as on a GPU: argument types, constants, and which arguments are divisible.

    Addresses count as multiples of 16.
    """
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[Any, Any] = {}
    without = {} if architecture >= FP8_FROM else dict.fromkeys(("FP8", "A_FP8", *CONVERSIONS), "")
    if architecture < 10 * ROUNDED_ONCE_FROM[0] + ROUNDED_ONCE_FROM[1]:
        without |= dict.fromkeys(CONVERSIONS, "")
    if architecture < FP4_FROM:
        without |= {name: "" for name in CONVERSIONS if one.arguments.get(name) == "e2m1"}
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
    """Compile and assemble a launch for an architecture, specialized to its arguments.

    Errors of Triton and ptxas are raised unchanged.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(one.kernel, *specialized(one, architecture))
    options = {"num_warps": one.warps, "num_stages": one.stages, "enable_fp_fusion": False}
    compiled = triton.compile(source, GPUTarget("cuda", architecture, 32), options)
    return Compiled(str(compiled.asm["ptx"]), compiled.asm["cubin"], int(compiled.metadata.shared))


def faults(name: str, ptx: str, architecture: int) -> list[str]:
    """Forbidden and missing instructions in the PTX of a kernel."""
    held = sorted(set(FORBIDDEN.findall(ptx)))
    found = [f"holds {text}" for text in held if not (name in PRODUCTS and PAIRS.match(text))]
    wanted = ANY_MATRIX if name in INTEGERS else MATRIX.get(architecture, re.compile(r"mma\.sync"))
    wanted = CODES[architecture] if name in OF_CODES else wanted
    if name in PRODUCTS and not wanted.search(ptx):
        found.append("runs on no tensor core")
    return found


class Job(NamedTuple):
    """Launches of a case, by index, to compile for an architecture."""

    case: int
    architecture: int
    launches: tuple[int, ...]


def _compile_case(job: Job) -> list[str]:
    """Faults of the launches of one case on one architecture."""
    listed, architecture = cases()[job.case].launches, job.architecture
    found = []
    for one in (listed[number] for number in job.launches):
        kernel = one.kernel.__name__
        try:
            made = compile_launch(one, architecture)
        except Exception as error:  # any compiler error is a fault of this kernel
            found.append(f"{kernel} does not compile: {error}")
        else:
            found += [f"{kernel} {fault}" for fault in faults(kernel, made.ptx, architecture)]
            if made.shared > SHARED.get(architecture, made.shared):
                found.append(f"{kernel} takes {made.shared} bytes of shared memory of {SHARED[architecture]}")
    return found


def jobs(full: bool, architectures: tuple[int, ...]) -> list[Job]:
    """The jobs. Not ``full``: some cases on the first architecture that has them, each kernel once on the others."""
    listed = cases()
    every = [tuple(range(len(case.launches))) for case in listed]
    order = sorted(architectures, key=lambda architecture: architecture != 90)
    if full:
        return [
            Job(i, arch, every[i]) for arch in architectures for i, c in enumerate(listed) if arch in c.architectures
        ]
    chosen = []
    for index, case in enumerate(listed):
        first = next((arch for arch in order if arch in case.architectures), None)
        if case.fast and first is not None:
            chosen.append(Job(index, first, every[index]))
    for architecture in order:
        done = {
            listed[job.case].launches[number].kernel.__name__
            for job in chosen if job.architecture == architecture for number in job.launches
        }  # fmt: skip
        for index, case in enumerate(listed):
            new = {one.kernel.__name__: number for number, one in enumerate(case.launches)}
            left = tuple(number for name, number in new.items() if name not in done)
            if architecture in case.architectures and left:
                chosen.append(Job(index, architecture, left))
                done |= new.keys()
    return chosen


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
        for job, found in zip(work, pool.map(_compile_case, work), strict=True):
            counts[job.architecture] += len(job.launches)
            broken += bool(found)
            for fault in found:
                print(f"sm_{job.architecture} {listed[job.case].name}: {fault}", file=sys.stderr)
    compiled = ", ".join(f"sm_{arch} {count}" for arch, count in sorted(counts.items()))
    print(f"kernels compiled: {compiled}; cases at fault: {broken}; {time.perf_counter() - start:.0f} s")
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
