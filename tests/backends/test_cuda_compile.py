"""The CUDA sources compile, and their machine code is what docs/numerics.md section 1 asks for; no GPU is needed.

``make cuda-compile`` builds every architecture; here one is built, and held by csrc/cuda/check_sass.py.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def load_checker() -> Any:
    spec = importlib.util.spec_from_file_location("check_sass", ROOT / "csrc/cuda/check_sass.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


checker = load_checker()
NVCC, CUOBJDUMP = checker.find_nvcc(), checker.find_cuobjdump()


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated")
    script = ROOT / "csrc/generate_formats.py"
    subprocess.run([sys.executable, script, ROOT / "lowbit/formats.py", folder / "format_table.h"], check=True)
    return folder


@pytest.mark.slow
@pytest.mark.skipif(NVCC is None, reason="needs nvcc (CUDA toolkit)")
@pytest.mark.skipif(CUOBJDUMP is None, reason="needs cuobjdump (CUDA toolkit, or the triton package)")
def test_machine_code(generated: Path) -> None:
    command = [sys.executable, ROOT / "csrc/cuda/check_sass.py", "--arch", "90", "--generated", generated]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for source in (ROOT / "csrc/cuda").rglob("*.cu"):
        assert re.search(rf"^{source.name} sm_90: \d+ kernels", done.stdout, re.MULTILINE), done.stdout


BAD = """
#include "common/numerics.h"
__global__ void approximate(const float* a, float* c) { c[0] = __fdividef(a[0], a[1]); }
__global__ void contracted(const float* a, float* c) { c[0] = __fmaf_rn(a[0], a[1], a[2]); }
__global__ void exact(const float* a, float* c) { c[0] = __fdiv_rn(a[0], a[1]) + a[2]; }
"""


@pytest.mark.skipif(NVCC is None, reason="needs nvcc (CUDA toolkit)")
def test_checker_finds_what_it_looks_for(generated: Path, tmp_path: Path) -> None:
    source, ptx = tmp_path / "bad.cu", tmp_path / "bad.ptx"
    source.write_text(BAD)
    flags = ["-std=c++17", "-fmad=false", "-arch=sm_90", f"-I{ROOT / 'csrc'}", f"-I{generated}"]
    for extra, expected in (
        ([], {"approximate", "contracted"}),
        (["-ftz=true"], {"approximate", "contracted", "exact"}),
    ):
        subprocess.run([NVCC, *flags, *extra, "-ptx", "-o", ptx, source], check=True)
        kernels = checker.kernels_of_ptx(ptx.read_text())
        found = {name for name, lines in kernels.items() if checker.check_ptx(name, lines)}
        assert len(kernels) == 3 and {word for word in expected for name in found if word in name} == expected
        assert len(found) == len(expected)
