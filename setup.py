"""Thin driver: packages, and native code built by CMake.

Native code is optional. When something for it is missing, lowbit installs as pure Python, prints one notice, and keeps
the notice in ``lowbit/_build.json`` for ``lowbit doctor`` and for the warning of the first op that needs it (pip shows
no notices). Environment:

- ``LOWBIT_NATIVE``: ``auto`` (default), ``1`` (a failing build is an error), ``0`` (pure Python, and no warning).
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
LIBRARIES = {".so", ".pyd", ".dylib"}
#: What really builds again: pip would call the requirement satisfied, or take a wheel from its cache.
AGAIN = "`pip install --force-reinstall --no-deps --no-cache-dir .` in the folder of lowbit's sources"
NO_TORCH = (
    "the build found no torch to build the torch ops against (pip builds lowbit before it installs torch); "
    f"now with torch there, install lowbit again: {AGAIN} (where torch is not in the same site-packages, with "
    "LOWBIT_TORCH_DIR set to its folder, which `python -c 'import torch; print(torch.__path__[0])'` prints)"
)


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
        if not self.inplace:  # everything in build_lib is installed, so also what an earlier build left there
            for path in self.built():
                path.unlink()
        off = f"switched off by LOWBIT_NATIVE=0; to have it, without that: {AGAIN}"
        notice = off if mode == "0" else self.build_native(work)
        if notice and mode == "1":
            raise SystemExit(f"lowbit: native code was asked for (LOWBIT_NATIVE=1) but could not be built: {notice}")
        if notice:
            print(f"\nlowbit: NOTICE: some native code is left out: {notice}\n", file=sys.stderr, flush=True)
        (self.package / "_build.json").write_text(json.dumps({"notice": notice, "wanted": mode != "0"}) + "\n")

    def build_native(self, work):
        """Builds what can be built; returns None, or what is missing and how to get it."""
        cmake = tool("cmake")
        if cmake is None:
            return f"CMake was not found; `pip install cmake ninja`, then {AGAIN}"
        compiler = os.environ.get("CXX") or next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)
        if compiler is None:
            return f"no C++ compiler was found; install g++ or clang++ (`apt install g++`), then {AGAIN}"
        try:
            import pybind11
        except ImportError:
            return f"pybind11 was not found; `pip install pybind11`, then {AGAIN}"
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
                return f"`{' '.join(command)}` failed; with -v pip shows why: {AGAIN}"
        return NO_TORCH if torch is None else None

    def built(self):
        return [path for path in sorted(self.package.glob("*")) if path.suffix in LIBRARIES]

    def get_outputs(self):
        return [str(path) for path in [*self.built(), self.package / "_build.json"]]

    def get_output_mapping(self):
        return {}


setup(
    packages=[*find_packages(include=["lowbit", "lowbit.*"]), *(f"lowbit.{name}" for name in ADOPTED)],
    package_dir={f"lowbit.{name}": name for name in ADOPTED},
    package_data={"lowbit": ["py.typed", "_build.json"]},
    ext_modules=[Extension("lowbit._native", sources=[], py_limited_api=False)],
    cmdclass={"build_ext": BuildNative},
)
