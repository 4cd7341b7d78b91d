"""Calls go straight to their kernels, or through torch's dispatcher where something watches; plans are made once."""

from __future__ import annotations

import pytest
import torch
from bits import assert_same_bits
from torch import Tensor
from watching import WatchDispatch

import lowbit as lb
from lowbit.backends import dispatch
from lowbit.ops import OPS


class Sub(Tensor):
    pass


@pytest.fixture
def straight(monkeypatch):
    """The names of the ops that ran without the dispatcher; those that it runs ask for their plan first."""
    called, through = [], []
    names = {spec.args: name for name, spec in OPS.items()}
    plan_of, run = dispatch._plan_of, dispatch._run

    def noting_plan(spec, call):
        through.append(call)
        return plan_of(spec, call)

    def noting_run(plan, call):
        if not any(call is other for other in through):
            called.append(names[type(call)])
        return run(plan, call)

    monkeypatch.setattr(dispatch, "_plan_of", noting_plan)
    monkeypatch.setattr(dispatch, "_run", noting_run)
    return called


def test_an_unwatched_call_goes_straight(straight):
    x, w = torch.randn(3, 40), lb.quantize(torch.randn(5, 40), "int8:row")
    lb.scaled_mm(lb.quantize(x, "int8:row"), w)
    assert straight == ["quantize", "quantize", "scaled_mm"]


def test_modes_see_every_op(straight):
    with WatchDispatch() as watch:
        lb.scaled_mm(torch.randn(3, 40), lb.quantize(torch.randn(5, 40), "int8:row"))
    assert straight == []
    assert {"lowbit.quantize.default", "lowbit.scaled_mm.default"} <= set(watch.seen)


def test_autograd_subclasses_and_transforms_go_through_the_dispatcher(straight):
    w = lb.quantize(torch.randn(5, 40), "int8:row")
    straight.clear()
    x = torch.randn(3, 40, requires_grad=True)
    lb.scaled_mm(x, w, out_dtype=torch.float32).sum().backward()
    assert straight == [] and x.grad is not None
    lb.encode(torch.randn(4).as_subclass(Sub), "fp8_e4m3")
    assert straight == []
    meta = lb.encode(torch.empty(4, device="meta"), "fp8_e4m3")
    assert straight == [] and meta.is_meta
    with torch.no_grad():
        lb.scaled_mm(x, w)
    assert straight == ["scaled_mm"]


def test_a_tensor_whose_bits_await_a_sign_is_not_taken_as_it_lies():
    z = torch.randn(4, 40, dtype=torch.complex64)
    lazy = torch.imag(z.conj())
    assert lazy.is_neg()
    assert_same_bits(lb.encode(lazy, "fp8_e4m3"), lb.encode(-z.imag.contiguous(), "fp8_e4m3"))


def test_both_ways_give_the_same_bits():
    x = torch.randn(7, 130)
    for scheme in ("fp8_e4m3:row", "uint4:group32:affine", "nvfp4"):
        q = lb.quantize(x, scheme)
        with WatchDispatch():
            watched = lb.quantize(x, scheme)
        for name, part in q.parts.items():
            assert_same_bits(part, watched.parts[name], f"{scheme} {name}")


def test_plans_depend_on_metadata_and_not_on_random_bits():
    x = torch.randn(5, 33)
    lb.encode(x, "fp8_e4m3", rounding="stochastic", seed=0)
    before = len(dispatch._plans)
    codes = [lb.encode(x, "fp8_e4m3", rounding="stochastic", seed=s, step=s, offset=s) for s in range(20)]
    assert len(dispatch._plans) == before
    assert not torch.equal(codes[0], codes[1])
    lb.encode(x.t(), "fp8_e4m3", rounding="stochastic", seed=0)
    assert len(dispatch._plans) == before + 1


def test_a_call_that_fails_fails_again():
    for _ in range(2):
        with pytest.raises(TypeError, match="must be float32, bfloat16 or float16"):
            lb.encode(torch.ones(3, dtype=torch.float64), "fp8_e4m3")


def test_a_forced_backend_has_plans_of_its_own():
    x = torch.randn(5, 35)
    fast = lb.quantize(x, "mxfp4")
    with lb.use_backend("reference"):
        assert lb.explain("quantize", x, "mxfp4").chosen.backend == "reference"
        assert_same_bits(lb.quantize(x, "mxfp4").codes, fast.codes)
    assert lb.explain("quantize", x, "mxfp4").chosen.backend in ("cpu", "reference")


def test_plans_are_forgotten_before_they_pile_up(monkeypatch):
    monkeypatch.setattr(dispatch, "_MOST_PLANS", 4)
    dispatch._plans.clear()
    for n in range(1, 20):
        lb.encode(torch.ones(n), "int8")
        assert len(dispatch._plans) <= 4
