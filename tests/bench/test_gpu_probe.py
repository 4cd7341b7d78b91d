"""The probe of tensor cores, against sums that are cut off on purpose; and a session without a GPU."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lowbit.bench import gpu_probe

ROOT = Path(gpu_probe.__file__).parents[1]


def cut_off(bits):
    """As tensor cores add: products are truncated below ``bits`` bits of the fraction of the largest, then added."""

    def multiply(a, b):
        products = a.double()[:, None, :] * b.double()[None, :, :]
        unit = 2.0 ** (math.floor(math.log2(float(products.abs().max()))) - bits)
        return ((products / unit).trunc() * unit).sum(-1).float()

    return multiply


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("bits", [10, 13, 14, 22, 23, 24, 25])
def test_bits_of_a_sum_are_found(bits, kind):
    assert gpu_probe.fraction_bits(cut_off(bits), kind) == bits


def test_exact_sums_keep_all_that_is_asked_about():
    exact = lambda a, b: (a.double() @ b.double().t()).float()
    assert gpu_probe.fraction_bits(exact, "bf16") == gpu_probe.fraction_bits(exact, "fp8") == 27


@pytest.mark.slow
def test_probes_run_without_a_gpu(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(ROOT / "bench" / "gpu_probe.py"), str(tmp_path), "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, cwd=ROOT)
    assert done.returncode == 0 and "probes: nothing differs" in done.stdout, done.stdout + done.stderr
    assert (tmp_path / "probe.json").exists()
