"""Holds the machine code of the CUDA kernels to docs/numerics.md section 1, and to the instructions they are meant for.

Usage: check_sass.py --generated DIR [--nvcc nvcc] [--cuobjdump cuobjdump] [--arch 90 ...] [--file codec/codec.cu ...]

For each file and architecture it compiles PTX and machine code, and reports every finding:

- PTX of codecs: each fp32 division is ``div.rn.f32``, each product, sum and difference rounds to nearest and keeps
  subnormals; no ``fma``, ``rcp``, ``ex2``, ``div.full`` or ``div.approx``. That is the proof; MUFU.RCP alone shows
  nothing, since exact fp32 and integer divisions both begin with it.
- machine code of codecs: ptxas, which may contract, has not. A probe kernel of one and of two divisions shows how many
  FFMA and flushing operations an expansion of ``div.rn`` takes in line and in its subroutine; a codec kernel may hold
  what its divisions account for, and no more. No MUFU but RCP (and the subroutine's RSQ, which makes NaN).
- all kernels: no local memory (spills, or arrays indexed at run time).
- products: HMMA, IMMA or QMMA as ``PRODUCTS`` says.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

FLAGS = ["-std=c++17", "-O3", "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true"]
HERE = Path(__file__).resolve().parent

#: File, and the tensor-core instruction that its kernels must have (and no other) on an architecture.
PRODUCTS = {
    "bf16.cu": dict.fromkeys((80, 89, 90, 100, 120), "HMMA"),
    "int8.cu": dict.fromkeys((80, 89, 90, 100, 120), "IMMA"),
    # fp8 runs as exact fp16 where the launcher uses it (9.x and 10.x); sm_80 has none, and its kernels are empty.
    "fp8.cu": {89: "QMMA", 90: "HMMA", 100: "HMMA", 120: "QMMA"},
}

#: fp32 arithmetic that PTX may hold; everything else named like arithmetic is a finding.
_EXACT = re.compile(r"^(div\.rn|add\.rn|sub\.rn|mul\.rn|add|sub|mul|neg|abs|min|max|cvt\.rni|cvt\.rn|cvt\.rzi)\.")
_ARITHMETIC = re.compile(r"^(div|fma|mad|mul|add|sub|rcp|sqrt|rsqrt|ex2|lg2|sin|cos|tanh)\b[.\w]*\.f(16|32|64)")

_PROBE = """__global__ void one(const float* a, float* c) { c[0] = __fdiv_rn(a[0], a[1]); }
__global__ void two(const float* a, float* c) { c[0] = __fdiv_rn(a[0], a[1]); c[1] = __fdiv_rn(a[2], a[3]); }
"""


class Division(NamedTuple):
    """FFMA, and flushing operations, of exact divisions: of each one in line, and of the subroutine they share."""

    fused: int
    fused_once: int
    flushing: int
    flushing_once: int


def fused(lines: list[str]) -> int:
    return sum(line.startswith("FFMA") for line in lines)


def flushing(lines: list[str]) -> int:
    return sum(line.startswith(("FADD", "FMUL", "FFMA", "FMNMX")) and ".FTZ" in line for line in lines)


def find_nvcc() -> str | None:
    place = os.environ.get("CUDA_HOME", "/usr/local/cuda") + "/bin/nvcc"
    return shutil.which("nvcc") or (place if Path(place).exists() else None)


def find_cuobjdump() -> str | None:
    """CUDA's own, or the one that the triton package carries."""
    spec = importlib.util.find_spec("triton")
    carried = Path(spec.origin).parent / "backends/nvidia/bin/cuobjdump" if spec and spec.origin else None
    return shutil.which("cuobjdump") or (str(carried) if carried and carried.exists() else None)


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def kernels_of_ptx(text: str) -> dict[str, list[str]]:
    """Instructions (predicates and operands dropped from none) of each kernel, by mangled name."""
    found: dict[str, list[str]] = {}
    for entry in re.finditer(r"\.entry (\w+)\(.*?\n\{(.*?)\n\}", text, re.S):
        lines = (re.sub(r"^@!?%p\d+\s+", "", line.strip()) for line in entry[2].splitlines())
        found[entry[1]] = [line for line in lines if line and line[0] not in "./{}$"]
    return found


def kernels_of_sass(text: str) -> dict[str, list[str]]:
    """Instructions of each kernel, by mangled name, predicates dropped."""
    found: dict[str, list[str]] = {}
    for part in text.split("Function : ")[1:]:
        name, _, body = part.partition("\n")
        lines = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][^;]*);", body)
        found[name.strip()] = lines
    return found


def check_ptx(name: str, lines: list[str]) -> list[str]:
    """Findings in a codec kernel's PTX."""
    findings = [f"{name}: flushes subnormals: {line}" for line in lines if ".ftz" in line]
    for line in lines:
        if _ARITHMETIC.match(line) and (not _EXACT.match(line) or re.match(r"^(fma|mad)", line)):
            findings.append(f"{name}: inexact or contracted: {line}")
    return findings


def check_sass(name: str, lines: list[str], divisions: int, each: Division) -> list[str]:
    """Findings in a codec kernel's machine code; ``divisions`` is the number of div.rn.f32 in its PTX."""
    findings = []
    for what, found, line, once in (
        ("FFMA", fused(lines), each.fused, each.fused_once),
        ("flushing operations", flushing(lines), each.flushing, each.flushing_once),
    ):
        allowed = divisions * line + once * bool(divisions)
        if found > allowed:
            findings.append(f"{name}: {found} {what}, but {divisions} divisions account for {allowed} at most")
    approximate = [
        line for line in lines if line.startswith("MUFU") and not line.startswith(("MUFU.RCP ", "MUFU.RSQ "))
    ]
    return findings + [f"{name}: approximate function: {line}" for line in approximate]


def compile_for(
    source: Path, arch: int, options: argparse.Namespace, folder: Path
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """The kernels of a file in machine code, and in the PTX on the way to it."""
    kept = folder / f"{source.stem}.{arch}"
    kept.mkdir()
    binary = kept / f"{source.stem}.cubin"
    includes = [f"-I{HERE.parent}", f"-I{options.generated}"]
    keep = ["--keep", "--keep-dir", str(kept)]
    run([options.nvcc, *FLAGS, f"-arch=sm_{arch}", *includes, *keep, "-cubin", "-o", str(binary), str(source)])
    sass = kernels_of_sass(run([options.cuobjdump, "-sass", str(binary)]))
    return sass, kernels_of_ptx((kept / f"{source.stem}.ptx").read_text())


def probe(arch: int, options: argparse.Namespace, folder: Path) -> Division:
    source = folder / "probe.cu"
    source.write_text(_PROBE)
    kernels, _ = compile_for(source, arch, options, folder)
    one, two = (next(lines for name, lines in kernels.items() if word in name) for word in ("3one", "3two"))
    in_line, flushed = fused(two) - fused(one), flushing(two) - flushing(one)
    return Division(in_line, fused(one) - in_line, flushed, flushing(one) - flushed)


def check_file(
    source: Path, arch: int, options: argparse.Namespace, folder: Path, each: Division
) -> tuple[list[str], str]:
    """Findings in one file on one architecture, and one line on what was there."""
    sass, ptx = compile_for(source, arch, options, folder)
    label = f"{source.name} sm_{arch}"
    findings = [
        f"{label}: {name}: local memory: {line}"
        for name, lines in sass.items()
        for line in lines
        if line.startswith(("LDL", "STL"))
    ]
    if source.name in PRODUCTS:
        wanted = PRODUCTS[source.name].get(arch)
        for name, lines in sass.items():
            found = {line.split(".")[0] for line in lines if re.match(r"[A-Z]+MMA", line)}
            if found != ({wanted} if wanted else set()):
                findings.append(
                    f"{label}: {name}: expected {wanted or 'no tensor-core instruction'}, found {sorted(found)}"
                )
        return findings, f"{label}: {len(sass)} kernels, {wanted or 'empty'}"
    total = 0
    for name, lines in ptx.items():
        divisions = sum(line.startswith("div.rn.f32") for line in lines)
        total += divisions
        findings += [f"{label}: {f}" for f in check_ptx(name, lines) + check_sass(name, sass[name], divisions, each)]
    return findings, f"{label}: {len(sass)} kernels, {total} exact divisions"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvcc", default=find_nvcc())
    parser.add_argument("--cuobjdump", default=find_cuobjdump())
    parser.add_argument("--generated", required=True, help="directory of format_table.h")
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 89, 90, 100, 120])
    parser.add_argument("--file", nargs="+", help="files of csrc/cuda; default: all")
    options = parser.parse_args()
    if options.nvcc is None or options.cuobjdump is None:
        print("check_sass: NOT CHECKED: needs nvcc, and cuobjdump (CUDA toolkit, or the triton package)")
        return 0
    sources = [HERE / name for name in options.file] if options.file else sorted(HERE.rglob("*.cu"))
    missing = sorted(PRODUCTS.keys() - {source.name for source in sources})
    findings = [f"{name} is not below {HERE}" for name in missing if not options.file]
    with tempfile.TemporaryDirectory() as folder:
        for arch in options.arch:
            each = probe(arch, options, Path(folder))
            for source in sources:
                found, summary = check_file(source, arch, options, Path(folder), each)
                findings += found
                print(summary, flush=True)
    print("\n".join(findings) if findings else "no finding")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
