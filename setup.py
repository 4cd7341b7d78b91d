"""Thin driver: packages, and native code built by CMake.

Native code is optional. When something for it is missing, lowbit installs as pure Python, prints one notice, and keeps
the notice in ``lowbit/_build.json`` for ``lowbit doctor``. Environment:

- ``LOWBIT_NATIVE``: ``auto`` (default), ``1`` (a failing build is an error), ``0`` (pure Python).
- ``LOWBIT_CUDA``: ``AUTO`` (default: when nvcc is there and torch has CUDA), ``ON``, ``OFF``, ``COMPILE`` (not linked).
- ``LOWBIT_TORCH_DIR``: the directory of the torch package to build against, where it is not in this environment.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
ADOPTED = ("kernels", "bench")  # folders beside the package that are installed as parts of it (lowbit/checkout.py)


def tool(name):
    """Path of cmake or ninja: from its Python package first (also in an isolated build), then from PATH."""
    beside = Path(sys.executable).parent / name
    if beside.exists():
        return str(beside)
    return shutil.which(name)


def torch_dir():
    """Directory of the installed torch package, or None.

    An isolated build hides torch from ``import``, but the paths of the target environment remain known; torch is
    never imported, since only its headers are read.
    """
    named = os.environ.get("LOWBIT_TORCH_DIR")
    places = [Path(named)] if named else [Path(p) / "torch" for p in [sysconfig.get_path("platlib"), *sys.path] if p]
    for place in places:
        if (place / "include/torch/csrc/stable/library.h").is_file():
            return place
    return None


class BuildNative(build_ext):
    """Runs CMake; the libraries land in the package (of the source tree when building in place)."""

    def run(self):
        mode = os.environ.get("LOWBIT_NATIVE", "auto").lower()
        if self.inplace:
            self.package, work = ROOT / "lowbit", ROOT / "build/native"
        else:
            self.package, work = Path(self.build_lib).resolve() / "lowbit", Path(self.build_temp).resolve()
        self.package.mkdir(parents=True, exist_ok=True)
        notice = "switched off by LOWBIT_NATIVE=0; reinstall without it" if mode == "0" else self.build_native(work)
        if notice and mode == "1":
            raise SystemExit(f"lowbit: native code was asked for (LOWBIT_NATIVE=1) but could not be built: {notice}")
        if notice:
            print(f"\nlowbit: NOTICE: some native code is left out: {notice}\n", file=sys.stderr, flush=True)
        (self.package / "_build.json").write_text(json.dumps({"notice": notice}) + "\n")

    def build_native(self, work):
        """Builds what can be built; returns None, or what is missing and how to get it."""
        cmake = tool("cmake")
        if cmake is None:
            return "CMake was not found; `pip install cmake ninja`, then reinstall lowbit"
        compiler = os.environ.get("CXX") or next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)
        if compiler is None:
            return "no C++ compiler was found; install g++ or clang++ (`apt install g++`), then reinstall lowbit"
        try:
            import pybind11
        except ImportError:
            return "pybind11 was not found; `pip install pybind11`, then reinstall lowbit"
        torch = torch_dir()
        configure = [
            cmake, "-S", str(ROOT), "-B", str(work), "-DCMAKE_BUILD_TYPE=Release",
            f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DLOWBIT_OUTPUT_DIR={self.package}", f"-DLOWBIT_TORCH_DIR={torch or ''}",
            f"-DLOWBIT_CUDA={os.environ.get('LOWBIT_CUDA', 'AUTO')}",
        ]  # fmt: skip
        if tool("ninja"):
            configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"]
        cache = work / "CMakeCache.txt"
        if cache.exists() and f"CMAKE_HOME_DIRECTORY:INTERNAL={ROOT}\n" not in cache.read_text():
            shutil.rmtree(work)  # copied from another checkout
        for command in (configure, [cmake, "--build", str(work), "--parallel", str(os.cpu_count() or 1)]):
            if subprocess.run(command).returncode:
                return f"`{' '.join(command)}` failed (its output stands above; `pip install -v` shows it)"
        if torch is None:
            return "no torch was found to build the torch ops against; `pip install torch`, then reinstall lowbit"
        return None

    def get_outputs(self):
        return [str(p) for p in sorted(self.package.glob("*")) if p.suffix in {".so", ".pyd", ".dylib", ".json"}]

    def get_output_mapping(self):
        return {}


setup(
    packages=[*find_packages(include=["lowbit", "lowbit.*"]), *(f"lowbit.{name}" for name in ADOPTED)],
    package_dir={f"lowbit.{name}": name for name in ADOPTED},
    package_data={"lowbit": ["py.typed", "_build.json"], "lowbit.train": ["*.txt"]},
    ext_modules=[Extension("lowbit._native", sources=[], py_limited_api=False)],
    cmdclass={"build_ext": BuildNative},
)
