"""Builds csrc/cuda for the host with the emulator's headers, and calls its launchers on CPU tensors."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).parents[3]
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class View(ctypes.Structure):
    """A matrix as emulator.cpp takes it."""

    _fields_ = [("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("rows", "cols", "pitch", "dtype"))]


def view(x: Tensor | None, cols: int | None = None) -> View:
    """``x: [rows, cols]`` with unit column stride; ``cols`` counts codes where they are packed."""
    if x is None:
        return View()
    assert x.dim() == 1 or x.stride(1) == 1 or x.shape[1] <= 1
    rows, pitch = (1, x.shape[0]) if x.dim() == 1 else (x.shape[0], x.stride(0))
    return View(x.data_ptr(), rows, x.shape[-1] if cols is None else cols, pitch, _DTYPES.get(x.dtype, -1))


def compiler() -> str | None:
    return os.environ.get("CXX") or next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)


_HERE = ROOT / "tests/support/cuda_emulator"
_FLAGS = ["-x", "c++", "-std=c++17", "-O2", "-fPIC", "-ffp-contract=off", "-Wno-unknown-pragmas", "-D__CUDACC__"]


def place() -> Path:
    """The folder of the library that these sources, flags and compiler make: a later session finds it there."""
    version = subprocess.run([str(compiler()), "--version"], capture_output=True, check=True).stdout
    digest = hashlib.blake2b(version + " ".join(_FLAGS).encode(), digest_size=8)
    for path in sorted([*(ROOT / "csrc").rglob("*"), *_HERE.rglob("*"), ROOT / "lowbit/formats.py"]):
        if path.suffix in (".cu", ".cuh", ".h", ".inl", ".cpp", ".py"):
            digest.update(path.read_bytes())
    return ROOT / "build/emulated-cuda" / digest.hexdigest()


def build(folder: Path) -> ctypes.CDLL:
    """Compiles every .cu file as C++ and links them with the emulator; what ``folder`` holds already is loaded."""
    library = folder / "libemulated.so"
    if library.exists():
        return ctypes.CDLL(str(library))
    generate = [
        sys.executable,
        ROOT / "csrc/generate_formats.py",
        ROOT / "lowbit/formats.py",
        folder / "format_table.h",
    ]
    subprocess.run(generate, check=True)
    sources = [_HERE / "emulator.cpp", *sorted((ROOT / "csrc/cuda").rglob("*.cu"))]
    includes = [f"-I{path}" for path in (_HERE, ROOT / "csrc", folder)]
    command = [str(compiler()), *_FLAGS, *includes]

    def compile(source: Path) -> Path:
        out = folder / f"{source.name}.o"
        subprocess.run([*command, "-c", str(source), "-o", str(out)], check=True)
        return out

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        objects = [str(path) for path in pool.map(compile, sources)]
    linked = folder / "linked.so"
    subprocess.run([str(compiler()), "-shared", "-o", str(linked), *objects], check=True)
    linked.rename(library)
    return ctypes.CDLL(str(library))


class Emulated:
    """The launchers, on CPU tensors; a refusal is a ValueError."""

    def __init__(self, folder: Path) -> None:
        self.library = build(folder)

    def __call__(self, name: str, *args: object) -> None:
        function = getattr(self.library, f"lowbit_{name}")
        function.restype = ctypes.c_char_p
        error = function(*(_convert(arg) for arg in args))
        if error:
            raise ValueError(error.decode())


def _convert(arg: object) -> object:
    if arg is None:
        return ctypes.c_void_p()
    if isinstance(arg, Tensor):
        return ctypes.c_void_p(arg.data_ptr())
    if isinstance(arg, bool | int):
        return ctypes.c_int64(arg)
    if isinstance(arg, Sequence):
        return (ctypes.c_int64 * len(arg))(*arg)
    return arg
