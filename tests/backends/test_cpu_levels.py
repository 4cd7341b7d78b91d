"""Within an instruction set, kernels use what more the processor has; an older one, which lacks it, must do as well.

``LOWBIT_WITHOUT`` hides features from a process, in which the products are then tested again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.variants import isas

#: What an older processor of the same instruction set lacks, youngest first.
LEVELS = {
    "without matrix registers": ("amx_tile",),
    "Cooper Lake": ("avx512_vbmi",),
    "Ice Lake": ("avx512_bf16",),
    "Cascade Lake": ("avx512_vbmi", "avx512_bf16"),
    "Skylake": ("avx512_vbmi", "avx512_bf16", "avx512_vnni"),
}


def run(arguments: list[str], without: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "LOWBIT_WITHOUT": ",".join(without)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.skipif("avx512" not in isas(), reason="this processor has no AVX-512")
@pytest.mark.parametrize("level", LEVELS)
def test_products_on_an_older_processor(level):
    from lowbit import _native

    hidden = tuple(f for f in LEVELS[level] if f in _native.cpu_features())
    if not hidden:
        pytest.skip(f"this processor has none of {', '.join(LEVELS[level])} itself")
    tests = run(
        [
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "tests/ops/test_scaled_mm.py",
            "tests/functional/test_matmul.py",
            "-k",
            "avx512",
        ],
        hidden,
    )
    assert tests.returncode == 0 and " passed" in tests.stdout, tests.stdout[-3000:] + tests.stderr[-1000:]


@pytest.mark.skipif(not isas(), reason="without the compiled extension")
def test_an_unknown_feature_is_an_error():
    told = run(["-c", "from lowbit import _native; _native.isas()"], ("avx1024",))
    assert told.returncode != 0
    assert "LOWBIT_WITHOUT: unknown processor feature 'avx1024'" in told.stderr
