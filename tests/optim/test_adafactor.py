"""Adafactor against the paper's formulas in float64, and torch's Adafactor beside it."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

import lowbit as lb
from lowbit.optim.shards import Part
from lowbit.optim.sums import Matrix


def rms(x):
    return x.square().mean().sqrt()


def paper(p, g, rows, cols, t, lr, weight_decay):
    """One step of algorithm 4 with relative steps bounded by ``lr``, in float64."""
    new = t**-0.8
    rows = rows * (1 - new) + (g.square() + 1e-30).mean(1) * new
    cols = cols * (1 - new) + (g.square() + 1e-30).mean(0) * new
    update = g / (rows[:, None] * cols / rows.mean()).sqrt()
    update = update / max(1.0, rms(update))
    rate = max(1e-3, rms(p)) * min(lr, 1 / math.sqrt(t))
    return p * (1 - lr * weight_decay) - rate * update, rows, cols


@pytest.mark.parametrize("shape", [(64, 80), (37, 151), (8, 16, 3, 3), (1, 1)])
def test_a_step_is_the_papers(shape):
    param = torch.nn.Parameter(torch.randn(shape))
    optimizer = lb.optim.Adafactor([param], weight_decay=0.1)
    exact = param.detach().double().reshape(shape[0], -1)
    rows, cols = exact.new_zeros(exact.shape[0]), exact.new_zeros(exact.shape[1])
    for step in (1, 2, 3):
        param.grad = torch.randn(shape) * 10.0 ** (step - 3)
        exact, rows, cols = paper(exact, param.grad.double().view_as(exact), rows, cols, step, 1e-2, 0.1)
        optimizer.step()
        torch.testing.assert_close(param.detach().double().view_as(exact), exact, rtol=1e-6, atol=1e-6)
    state = optimizer.state[param]
    torch.testing.assert_close(state["row_var"][:, 0].double(), rows, rtol=1e-6, atol=0)
    torch.testing.assert_close(state["col_var"][0].double(), cols, rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(64, 80), (5000,), ()])
def test_follows_torchs(shape):
    mine = torch.nn.Parameter(torch.randn(shape))
    theirs = torch.nn.Parameter(mine.detach().clone())
    a, b = lb.optim.Adafactor([mine]), torch.optim.Adafactor([theirs])
    for step in range(5):
        mine.grad = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        theirs.grad = mine.grad.clone()
        a.step(), b.step()
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    resumed = lb.optim.Adafactor([mine])
    resumed.load_state_dict(b.state_dict())
    for optimizer, param in ((resumed, mine), (b, theirs)):
        param.grad = torch.ones(shape)
        optimizer.step()
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bits", [32, 8])
def test_a_mean_of_updates_is_kept_in_bits(bits):
    param = torch.nn.Parameter(torch.ones(64, 80))
    optimizer = lb.optim.Adafactor([param], beta1=0.5, bits=bits)
    for _ in range(2):
        param.grad = torch.ones_like(param)
        optimizer.step()
    # every update is 1: the means are 1/2 and 3/4, the rates 0.01 times the weights' size
    expected = 1 - 0.01 * 0.5
    torch.testing.assert_close(param[0, 0].item(), expected - 0.01 * expected * 0.75, rtol=1e-3, atol=0)
    assert optimizer.state[param]["momentum_buffer"].dtype == (torch.float32 if bits == 32 else torch.uint8)


@pytest.mark.parametrize("shape", [(7, 33), (7, 1), (1, 33)])
def test_sums_of_squares_are_exact_to_their_steps(shape):
    """Against rationals: each square is off by half a step of its row at most, whatever the other rows hold."""
    x = torch.randn(shape) * torch.logspace(-30, 30, shape[0])[:, None]
    rows, cols = Matrix(Part.of(x, "")).squares(x)
    for sums, lines in ((rows, x), (cols, x.t())):
        for total, line in zip(sums.tolist(), lines.tolist(), strict=True):
            exact = sum(Fraction(v) ** 2 for v in line)
            largest = max(abs(Fraction(v)) for v in line)
            assert abs(Fraction(total) - exact) <= len(line) * largest**2 / 2**36


@pytest.mark.parametrize("eps", [(1e-30, 1e-3), (0.0, 1e-3)])
def test_rows_without_gradients_stay(eps):
    param = torch.nn.Parameter(torch.randn(64, 80))
    before = param.detach().clone()
    optimizer = lb.optim.Adafactor([param], eps=eps)
    param.grad = torch.randn(64, 80)
    param.grad[3] = 0
    for _ in range(2):
        optimizer.step()
    assert torch.equal(param[3], before[3])
    assert param.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("shape", [(4, 3), (4, 1), (1, 3)])
def test_sums_of_what_is_not_finite_are_nan(shape, value, dtype):
    x = torch.ones(shape, dtype=dtype)
    x[-1, -1] = value
    for axis, sums in enumerate(Matrix(Part.of(x, "")).squares(x)):
        assert sums.isnan().tolist() == [False] * (shape[axis] - 1) + [True]
        assert (sums[:-1] == shape[1 - axis]).all()


def test_masters_decide_the_size_of_weights():
    param = torch.nn.Parameter(torch.ones(64, 80, dtype=torch.bfloat16))
    optimizer = lb.optim.Adafactor([param], lr=1e-3, master="fp32")
    param.grad = torch.ones_like(param)
    for _ in range(3):
        optimizer.step()
    torch.testing.assert_close(optimizer.state[param]["master"], torch.full((64, 80), 0.999**3), rtol=1e-5, atol=0)


def test_what_is_not_finite_reaches_the_weights():
    param = torch.nn.Parameter(torch.ones(64, 80))
    optimizer = lb.optim.Adafactor([param])
    param.grad = torch.ones_like(param)
    param.grad[3, 4] = float("nan")
    optimizer.step()
    assert param.isnan().all()
