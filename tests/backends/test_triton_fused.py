"""Triton's kernels of rms_norm, swiglu and rotary against the reference: every sample, and in tiles of few elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.bits import assert_same_bits, describe
from support.samples import samples

pytest.importorskip("triton")
import lowbit as lb
from lowbit.kernels import fused_launch
from lowbit.kernels.spec import INTERPRETED, Target
from lowbit.ops import OPS
from lowbit.testing.inputs import random_matrix

DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="no GPU here")

NAMES = ("rms_norm", "rms_norm_backward", "swiglu", "swiglu_backward", "rotary")


def moved(call: Any) -> Any:
    return call._replace(**{k: v.to(DEVICE) for k, v in call._asdict().items() if isinstance(v, torch.Tensor)})


def check(op: str, call: Any) -> None:
    by_triton, by_reference = (
        next(impl for impl in lb.impls(op, DEVICE) if impl.name == name) for name in ("triton", "reference")
    )
    assert by_triton.supports(call) is None
    got, wanted = (
        tuple(torch.zeros(shape, dtype=dtype, device=DEVICE) for shape, dtype in OPS[op].outputs(call))
        for _ in range(2)
    )
    by_triton.run(got, call)
    by_reference.run(wanted, call)
    for name, a, b in zip(OPS[op].returns, got, wanted, strict=True):
        assert_same_bits(a, b, f"{name} of {describe(call)}")


@pytest.mark.thinned(2)
@pytest.mark.parametrize("op", NAMES)
def test_every_sample_equals_the_reference(op):
    for call in samples(op):
        if call[0].numel():
            check(op, moved(call))


@pytest.mark.parametrize("op", NAMES)
def test_small_tiles_equal_the_reference(op, monkeypatch):
    """Several tiles along both axes, tiles of one row, and rows in several blocks."""
    monkeypatch.setattr(fused_launch, "TARGET", Target(256, 256))
    monkeypatch.setattr(fused_launch, "_SUM_COLS", 16)
    for call in samples(op)[::3]:
        if 1 < call[0].numel() < 3000:
            check(op, moved(call))


def test_rows_of_many_blocks_and_few_columns():
    x, grad = (random_matrix(64 * 5 + 1, 5, DEVICE, seed=i) for i in range(2))
    rstd = (x.square().mean(-1) + 1e-6).rsqrt()
    check("rms_norm_backward", OPS["rms_norm_backward"].args(grad, x, x[0], rstd, 1))


def test_rows_that_no_program_holds_are_refused():
    x = torch.ones(1, (1 << 15) + 1, device=DEVICE)
    with lb.use_backend("triton"), pytest.raises(RuntimeError, match="hold rows of at most 32768 columns, got 32769"):
        lb.rms_norm(x, x[0])
