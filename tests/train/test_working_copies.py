"""Weights in fp32 that ``mixed_`` stores in 16 bits: what rounding cuts off reaches the optimizer's masters."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.bits import same_bits
from torch import Tensor, nn

import lowbit as lb
from lowbit.optim import masters
from lowbit.plan.settings import TrainingSettings, arrange_

pytestmark = pytest.mark.filterwarnings("ignore:train.mixed_. this processor")
SHORT = {"bf16": torch.bfloat16, "fp16": torch.float16}


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 80), nn.GELU(), nn.LayerNorm(80), nn.Linear(80, 24))


def numbers(model: nn.Module, optimizer: lb.optim.Optimizer) -> list[Tensor]:
    """The fp32 weights that parameters and masters stand for."""
    pairs = [(p.detach(), optimizer.state.get(p, {}).get("master")) for p in model.parameters()]
    return [p.float() if master is None else masters.number(p, master) for p, master in pairs]


def step_(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 1) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        x = torch.randn(16, 24, generator=generator)
        (model(x) - x.tanh()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


# -- what is kept ------------------------------------------------------------------------------------------------------
#: Patterns whose low halves are at and around what rounds to 128 units of the remainder, a tie.
PATTERNS = st.builds(
    lambda high, low: high << 16 | low, st.integers(0, 0xFFFF), st.integers(0, 0xFFFF) | st.integers(0x7F7E, 0x8001)
)


@given(st.lists(PATTERNS, min_size=1, max_size=64))
def test_bf16_and_its_remainder_hold_the_leading_24_bits(patterns: list[int]):
    weights = torch.tensor(patterns, dtype=torch.int64).to(torch.int32).view(torch.float32)
    weights = weights[weights.isfinite() & (weights.abs() <= torch.finfo(torch.bfloat16).max)]
    param = nn.Parameter(weights.clone())
    remainder = masters.store_short(param, torch.bfloat16)
    assert same_bits(param.detach(), weights.bfloat16()), "what autocast rounds to"
    off = (weights.double() - masters.number(param.detach(), remainder.bits).double()).abs()
    unit = 2.0 ** (weights.double().abs().log2().floor().clamp(min=-126) - 15)
    clamped = ((weights.view(torch.int32) & 0xFFFF) - 0x8000).abs() <= 0x80
    assert bool((off <= unit * torch.where(clamped, 1.0, 0.5)).all())
    assert same_bits(masters.widened(param), masters.number(param.detach(), remainder.bits))


@given(st.lists(st.floats(-65504, 65504, width=32), min_size=1, max_size=64))
def test_fp16_and_its_remainder_hold_every_bit_of_normal_numbers(given_weights: list[float]):
    weights = torch.tensor(given_weights)
    param = nn.Parameter(weights.clone())
    masters.store_short(param, torch.float16)
    assert same_bits(param.detach(), weights.half())
    normal = weights.abs() >= 2.0**-14
    assert same_bits(masters.widened(param)[normal], weights[normal])
    assert bool(((masters.widened(param) - weights).abs() <= 2.0**-25).all())


@pytest.mark.parametrize("shape", [(0, 4), (3,), (2, 3, 5, 5), (1100, 1000)])
def test_remainders_are_in_the_weights_order_whatever_its_strides(shape: tuple[int, ...]):
    weight = torch.randn(shape)
    if len(shape) == 4:
        weight = weight.to(memory_format=torch.channels_last)
    param = nn.Parameter(weight.clone())
    masters.store_short(param, torch.bfloat16)
    expected = lb.reference.weight(*lb.reference.split24(weight.contiguous()))
    assert float((masters.widened(param) - expected).abs().sum()) <= 2.0**-14 * float(expected.abs().sum())


# -- where it goes -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bits", [32, 8])
@pytest.mark.parametrize(("precision", "master"), [("bf16", "residual"), ("bf16", "fp32"), ("fp16", "fp32")])
def test_masters_begin_as_the_fp32_weights(precision: str, master: str, bits: int):
    model, plain = layers(), layers()
    lb.train.mixed_(model, precision, working_copies=True)
    optimizer = lb.optim.SGD(model.parameters(), lr=0.0, momentum=0.9, bits=bits, master=master)
    step_(model, optimizer)
    for number, weight in zip(numbers(model, optimizer), plain.parameters(), strict=True):
        assert bool(((number - weight).abs() <= 2.0**-15 * weight.abs()).all())
    assert all(masters.of(p) is None for p in model.parameters()), "the masters are all that is kept"


def test_small_steps_move_weights_as_autocast_of_fp32_weights_does():
    """Updates far below half a bf16 ulp, of weights that are no bf16 numbers."""
    ends = []
    for copies in (False, True):
        model = layers()
        lb.train.mixed_(model, "bf16", working_copies=copies, fp32_gradients=True if copies else None)
        optimizer = lb.optim.SGD(model.parameters(), lr=1e-4, bits=32, master="residual" if copies else None)
        step_(model, optimizer, 3)
        ends.append(numbers(model, optimizer))
    for end, plain in ((end, plain) for end, plain in zip(ends[1], ends[0], strict=True) if end.dim() == 2):
        # Three roundings to 24 bits, and gradients of products whose operands may differ by what these change.
        assert float((end - plain).abs().max()) <= 4 * 2.0**-15 * float(plain.abs().max())


def test_copies_of_the_model_have_it_too():
    model = layers()
    lb.train.mixed_(model, "bf16", working_copies=True)
    twin = copy.deepcopy(model)
    ends = []
    for one in (model, twin):
        optimizer = lb.optim.AdamW(one.parameters(), lr=1e-4, master="residual")
        step_(one, optimizer)
        ends.append(numbers(one, optimizer))
    assert all(map(same_bits, *ends))


def test_a_state_without_masters_takes_it_as_the_master():
    model, plain = layers(), layers()
    torch_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4)
    step_(plain, torch_optimizer)
    model.load_state_dict(plain.state_dict())
    lb.train.mixed_(model, "bf16", working_copies=True)
    optimizer = lb.optim.AdamW(model.parameters(), lr=1e-4, bits=32, master="residual")
    with pytest.warns(UserWarning, match="are initialized from the parameters"):
        optimizer.load_state_dict(torch_optimizer.state_dict())
    for number, weight in zip(numbers(model, optimizer), plain.parameters(), strict=True):
        assert bool(((number - weight).abs() <= 2.0**-15 * weight.abs()).all())


def test_a_weight_that_something_writes_to_is_the_new_one():
    model, other = layers(), layers()
    lb.train.mixed_(model, "bf16", working_copies=True)
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(2)
    model.load_state_dict(other.state_dict())
    optimizer = lb.optim.SGD(model.parameters(), lr=0.0, bits=32, master="fp32")
    step_(model, optimizer)
    assert all(map(same_bits, numbers(model, optimizer), (p.detach().float() for p in model.parameters())))


def test_the_way_back_before_a_step_is_the_model_of_before():
    model, plain = layers(), layers()
    lb.train.mixed_(model, "fp16", working_copies=True)
    lb.train.unmixed_(model)
    assert all(map(same_bits, model.state_dict().values(), plain.state_dict().values()))


def test_frozen_weights_keep_nothing():
    model = layers()
    model[0].requires_grad_(False)
    lb.train.mixed_(model, "bf16", working_copies=True)
    assert masters.of(model[0].weight) is None and masters.of(model[3].weight) is not None


@pytest.mark.parametrize(("kind", "on_disk"), [("residual", True), ("stochastic", False), ("stochastic", True)])
def test_settings_hand_it_over_before_the_first_step(kind: str, on_disk: bool, tmp_path):
    """So that a plan's memory holds in its first step too; in memory a residual is as large as what becomes of it."""
    model = layers()
    settings = TrainingSettings(precision="bf16", bits=8, master=kind, offload_states=on_disk)
    optimizer = arrange_(model, settings, str(tmp_path), lr=1e-4)
    assert all(masters.of(p) is None for p in model.parameters())
    held = optimizer.state.get(model[0].weight, {}).get("master")
    assert (held is not None and bool(held.any())) == (kind == "residual")


def test_an_optimizer_that_replaces_that_of_a_plan_has_it(tmp_path):
    model, plain = layers(), layers()
    arrange_(model, TrainingSettings(precision="bf16", bits=8), str(tmp_path), lr=1e-4)
    optimizer = lb.optim.SGD(model.parameters(), lr=0.0, bits=32, master="residual")
    step_(model, optimizer)
    for number, weight in zip(numbers(model, optimizer), plain.parameters(), strict=True):
        assert bool(((number - weight).abs() <= 2.0**-15 * weight.abs()).all())


@pytest.mark.slow
def test_a_model_that_goes_frees_it():
    model = layers()
    lb.train.mixed_(model, "bf16", working_copies=True)
    bits = weakref.ref(masters.of(model[0].weight).bits)
    del model
    gc.collect()
    assert bits() is None
