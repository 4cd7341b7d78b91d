"""The tests of products on an older processor. Nothing imported here asks for the features of this one."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path

import pytest

FILES = ("tests/ops/test_scaled_mm.py", "tests/functional/test_matmul.py")


def check_products(rank: int, without: tuple[str, ...]) -> None:
    """In a process that has not asked for features yet: hide some, and test the products of AVX-512."""
    os.environ["LOWBIT_WITHOUT"] = ",".join(without)
    os.chdir(Path(__file__).parents[2])
    with contextlib.redirect_stdout(io.StringIO()) as told:
        failed = pytest.main(["-q", "-p", "no:cacheprovider", *FILES, "-k", "avx512"])
    assert not failed and " passed" in told.getvalue(), told.getvalue()[-3000:]
    from lowbit import _native

    assert not set(without) & set(_native.cpu_features()), "the features were not hidden"


def ask_for_instruction_sets(rank: int, without: tuple[str, ...]) -> None:
    os.environ["LOWBIT_WITHOUT"] = ",".join(without)
    from lowbit import _native

    _native.isas()
