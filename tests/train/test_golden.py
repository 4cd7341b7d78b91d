"""Golden losses: 30 steps of training by each recipe arrive where they did when they were recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from support import golden
from support.layers import TRAINING
from support.variants import forced_isa, isas

import lowbit as lb

GOLDEN = golden.read()


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", TRAINING)
def test_losses_are_those_recorded(name):
    assert name in GOLDEN, (
        f"no losses of {name} are recorded; see that it trains as it should, and run: "
        f"python tests/support/golden.py {name}"
    )
    losses = golden.train(name)
    assert GOLDEN[name].is_met_by(losses), (
        f"expected losses within {GOLDEN[name].limits} of those recorded, got "
        f"{golden.distance(losses, GOLDEN[name].losses)}; where the arithmetic is meant to change, run: "
        f"python tests/support/golden.py {name}"
    )


def test_only_recipes_that_train_are_recorded():
    assert set(GOLDEN) <= set(TRAINING)
    assert all(row.losses.shape == (golden.STEPS,) and row.losses[-1] < row.losses[0] - 1 for row in GOLDEN.values())


def changed(recipe: lb.Recipe, change: Callable[[lb.Cast], lb.Cast]) -> lb.Recipe:
    """``recipe`` with another cast for each of its casts."""
    products = {
        name: replace(gemm, **{side: change(cast) for side in "ab" if isinstance(cast := getattr(gemm, side), lb.Cast)})
        for name in ("output", "grad_input", "grad_weight")
        for gemm in (getattr(recipe, name),)
    }
    return replace(recipe, **products, name="changed")


def floor(cast: lb.Cast) -> lb.Cast:
    return replace(cast, scheme=lb.scheme(cast.scheme.name.replace(":ceil", "")))


def stochastic(cast: lb.Cast) -> lb.Cast:
    return replace(cast, rounding="stochastic")


def swapped(cast: lb.Cast) -> lb.Cast:
    other = {"fp8_e4m3": "fp8_e5m2", "fp8_e5m2": "fp8_e4m3"}[cast.scheme.format.name]
    return replace(cast, scheme=lb.scheme(cast.scheme.name.replace(cast.scheme.format.name, other)))


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("name", "change"),
    [("mxfp8", floor), ("fp8", stochastic), ("fp8-tensor", stochastic), ("fp8-tensor", swapped), ("fp8", swapped)],
)
def test_another_scale_rounding_or_format_shows(name, change):
    """Scales rounded down, which saturates, instead of up; other rounding; E4M3 for E5M2 and the other way round."""
    assert not GOLDEN[name].is_met_by(golden.train(changed(lb.recipe(name), change)))


@pytest.mark.parametrize("isa", isas())
def test_kernels_with_other_sums_meet_it(isa):
    """Each instruction set sums in another order, and so differs by rounding alone."""
    with forced_isa(isa):
        assert GOLDEN["fp8"].is_met_by(golden.train("fp8"))
