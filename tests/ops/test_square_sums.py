"""Sums of squares as integers against rationals, on every backend. Source: docs/numerics.md section 11.

Every kernel against the reference, on any number of threads: test_kernels.py.
"""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from support.variants import ALL

import lowbit as lb
from lowbit.op_calls import call
from lowbit.testing.inputs import random_matrix, specials

everywhere = pytest.mark.parametrize("variant", [p for p in ALL if not p.values[0].interpreted])


def exact(line: list[float], e: int) -> int:
    inside = [Fraction(v) for v in line if math.isfinite(v) and abs(Fraction(v)) < Fraction(2) ** e]
    return sum(round(v**2 * Fraction(2) ** (38 - 2 * e)) for v in inside)


def of(x: torch.Tensor, exponents: list[int], axis: int, device: str = "cpu") -> list[int]:
    given = torch.tensor(exponents, dtype=torch.int32, device=device)
    return call("square_sums", x.to(device), given, axis).tolist()


@everywhere
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_sums_are_those_of_rationals(variant, dtype, axis):
    x = random_matrix(9, 70, seed=axis, extremes=True)
    x[3, : specials().numel()] = specials()[:70]
    x = x.to(dtype)
    lines = (x if axis == 0 else x.t()).double().tolist()
    exponents = [(4, 0, 16, -130, 129, -3)[i % 6] for i in range(len(lines))]
    with variant.use():
        got = of(x, exponents, axis, variant.device)
    assert got == [exact(line, e) for line, e in zip(lines, exponents, strict=True)]


@everywhere
@pytest.mark.parametrize("axis", [0, 1])
def test_the_ends_and_what_rounds(variant, axis):
    """The largest below ``2^e``, what is not below, terms around a half (none is one), and terms of many bits."""
    top = 1 - 2.0**-24
    lines = [[top, -top, 0.0], [1.0, -1.0, 2.0**-19], [math.inf, math.nan, -0.5]]
    lines += [[n * 2.0**-20, 0.7 * 2.0**-19, (n + 0.1) * 2.0**-19] for n in (1, 2, 3, 5, 6, 7)]
    x = torch.tensor(lines)
    given = x if axis == 0 else x.t()
    with variant.use():
        got = of(given, [0] * len(lines), axis, variant.device)
    assert got == [exact(line, 0) for line in x.double().tolist()]


@pytest.mark.parametrize("axis", [0, 1])
def test_no_elements_sum_to_zero(axis):
    assert of(torch.empty(0, 3), [0] * (3 * axis), axis) == [0] * (3 * axis)
    assert of(torch.empty(3, 0), [0] * (3 - 3 * axis), axis) == [0] * (3 - 3 * axis)


def test_exponents_of_any_size_mean_what_they_say():
    x = torch.tensor([[1.0, 1e-45, 0.0]] * 4)
    assert of(x, [2**31 - 1, -(2**31), 300, -300], 0) == [0, 0, 0, 0]


def test_what_does_not_fit_is_refused():
    x, e = torch.ones(2, 3), torch.zeros(2, dtype=torch.int32)
    for args, error, words in (
        ((x.double(), e, 0), TypeError, "x must be float32, bfloat16 or float16, got float64"),
        ((x[0], e, 0), ValueError, r"x must be a matrix \[rows, cols\], got \[3\]"),
        ((x, e, 2), ValueError, "axis must be 0"),
        ((x, e, 1), ValueError, r"exponents must be int32 \[3\], one for each column of x, got torch.int32 \[2\]"),
        ((x, e.long(), 0), ValueError, r"exponents must be int32 \[2\], one for each row of x, got torch.int64"),
    ):
        with pytest.raises(error, match=words):
            call("square_sums", *args)


def test_calls_are_measured_on_matrices():
    assert {w.subject for w in lb.testing.WORKLOADS["square_sums"](64, 64)} >= {"rows of fp32", "columns of fp32"}
