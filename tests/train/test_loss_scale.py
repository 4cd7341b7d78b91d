"""Loss scaling: against arithmetic in fp64 and torch's GradScaler, on what underflows and what overflows."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from support.bits import same_bits
from torch import Tensor, nn

import lowbit as lb
from lowbit.train import LossScaler

TORCHS = {"adamw": torch.optim.AdamW, "fused": lambda p, **o: torch.optim.AdamW(p, fused=True, **o)}
OURS = {
    "adamw32": lambda p, **o: lb.optim.AdamW(p, bits=32, **o),
    "adamw8": lb.optim.AdamW8bit,
    "lion4": lb.optim.Lion4bit,
}
OPTIMIZERS = {**TORCHS, **OURS}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(80, 80), nn.SiLU(), nn.Linear(80, 3))


def loss_of(model: nn.Module, step: int) -> Tensor:
    x = torch.randn(8, 80, generator=torch.Generator().manual_seed(step))
    return model(x).square().mean()


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Parameters and states, copied."""
    states: list[Any] = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    return [t.detach().clone() for t in (*model.parameters(), *states)]


def all_same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(same_bits, a, b))


# -- what it is for ----------------------------------------------------------------------------------------------------
def trained_in_fp16(scaler: Any) -> list[float]:
    """Losses of a regression whose gradients are about 1e-8, less than half of the least number that fp16 has."""
    torch.manual_seed(0)
    model, losses = nn.Linear(16, 1, bias=False), []
    nn.init.zeros_(model.weight)
    x = torch.randn(64, 16)
    target = x @ torch.linspace(-1, 1, 16)[:, None]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, eps=1e-20)
    for _ in range(100):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = (model(x).float() - target).square().mean() * 1e-7
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item() * 1e7)
    return losses


def test_gradients_that_underflow_train_with_the_scaler_and_stand_still_without():
    still = trained_in_fp16(LossScaler(enabled=False))
    assert len(set(still)) == 1, "every gradient is 0 in fp16"
    losses = trained_in_fp16(LossScaler())
    assert losses[0] == still[0] and losses[-1] < 0.01 * losses[0]
    torch.testing.assert_close(losses, trained_in_fp16(torch.amp.GradScaler("cpu")))


# -- beside training without a scale -----------------------------------------------------------------------------------
@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_in_fp32_a_power_of_two_changes_no_bit(name, accumulate, clip):
    ends = []
    for scaler in (LossScaler(enabled=False), LossScaler(init_scale=2.0**10, growth_interval=2)):
        model = network()
        optimizer = OPTIMIZERS[name](model.parameters(), lr=1e-2)
        for step in range(5):
            optimizer.zero_grad()
            for part in range(accumulate):
                scaler.scale(loss_of(model, accumulate * step + part) / accumulate).backward()
            if clip is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
        ends.append(bits(model, optimizer))
    assert all_same(*ends)
    assert scaler.get_scale() == 2.0**12 and scaler.skipped == 0


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_overflows_changes_nothing_and_calls_no_hook(name, bad):
    model, scaler = network(), LossScaler(init_scale=8.0)
    optimizer, calls = OPTIMIZERS[name](model.parameters(), lr=1e-2), []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))

    def step(factor: float) -> None:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, 0) * factor).backward()
        scaler.step(optimizer)
        scaler.update()

    step(1.0)
    before = bits(model, optimizer)
    step(bad)
    assert all_same(bits(model, optimizer), before) and calls == [1]
    assert (scaler.skipped, scaler.get_scale(), scaler.gave_up) == (1, 4.0, False)
    step(1.0)
    assert not all_same(bits(model, optimizer), before) and calls == [1, 1] and scaler.skipped == 1


def test_scales_are_those_of_torchs_scaler():
    pattern = [1.0, 1.0, float("inf"), 1.0, 1.0, 1.0, 1.0, float("nan"), float("inf"), 1.0]
    options = {"init_scale": 4.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 3}
    seen = []
    for scaler in (LossScaler(**options), torch.amp.GradScaler("cpu", **options)):
        model = network()
        optimizer, scales = torch.optim.SGD(model.parameters(), lr=1e-3), []
        for step, factor in enumerate(pattern):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        seen.append(scales)
    assert seen[0] == seen[1]


def test_the_training_state_advances_only_with_steps_that_are_done():
    model, scaler = network(), LossScaler()
    lb.train.prepare_(model, "fp8-delayed", skip=())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    state = lb.train.state(model)
    state.attach(optimizer)
    for step, factor in enumerate((1.0, float("inf"), 1.0)):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert state.step == 2 and scaler.skipped == 1


def test_several_optimizers_share_a_scale_and_skip_on_their_own():
    models, scaler = (network(), network()), LossScaler(init_scale=4.0)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    before = [bits(*pair) for pair in zip(models, optimizers, strict=True)]
    for loss in scaler.scale([loss_of(models[0], 0), loss_of(models[1], 0) * float("inf")]):
        loss.backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    first, second = (all_same(bits(*pair), b) for *pair, b in zip(models, optimizers, before, strict=True))
    assert (first, second) == (False, True)
    assert (scaler.skipped, scaler.get_scale()) == (1, 2.0)


def test_sparse_gradients():
    table, scaler = nn.Embedding(4, 3, sparse=True), LossScaler()
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    expected = table.weight.detach().clone()
    expected[1] -= 2
    scaler.scale(table(torch.tensor([1, 1])).sum()).backward()
    scaler.step(optimizer)
    torch.testing.assert_close(table.weight.detach(), expected)


# -- its state ---------------------------------------------------------------------------------------------------------
def test_the_state_goes_both_ways_between_torchs_scaler_and_this_one():
    ours = LossScaler(init_scale=2.0**20, growth_interval=7)
    ours.skipped = 5
    theirs, again = torch.amp.GradScaler("cpu"), LossScaler()
    theirs.load_state_dict(ours.state_dict())
    assert theirs.state_dict() == {k: v for k, v in ours.state_dict().items() if k in theirs.state_dict()}
    again.load_state_dict(ours.state_dict())
    assert again.state_dict() == ours.state_dict() and again.skipped == 5
    again.load_state_dict(theirs.state_dict())
    assert again.get_scale() == 2.0**20 and again.skipped == 0
    assert copy.deepcopy(ours).state_dict() == ours.state_dict()


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("scale", math.nan), ("scale", math.inf), ("scale", 0.0), ("scale", None), ("growth_factor", 0.5),
        ("backoff_factor", math.nan), ("growth_interval", 0.5), ("_growth_tracker", -1), ("skipped", math.nan),
    ],
)  # fmt: skip
def test_a_state_with_a_number_that_is_none_is_refused(entry, value):
    scaler, before = LossScaler(), LossScaler().state_dict()
    with pytest.raises(ValueError, match=f"{entry}: expected a .*got {value!r}"):
        scaler.load_state_dict({**before, entry: value})
    assert scaler.state_dict() == before


def test_without_scaling_it_does_what_a_loop_without_it_does():
    scaler, model = LossScaler(enabled=False), network()
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.1), loss_of(model, 0)
    assert scaler.scale(loss) is loss and scaler.get_scale() == 1.0 and scaler.state_dict() == {}
    loss.backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.gave_up


# -- where it cannot help ----------------------------------------------------------------------------------------------
def run_down(scaler: LossScaler, loss: Any, steps: int) -> list[str]:
    """Warnings of steps by gradients of ``loss(weight)``."""
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(steps):
            optimizer.zero_grad()
            scaler.scale(loss(weight)).backward()
            scaler.step(optimizer)
            scaler.update()
    return [str(one.message) for one in said]


def test_losses_that_are_never_finite_are_told_after_eight_steps():
    scaler = LossScaler()
    assert run_down(scaler, lambda w: w.sum() * float("nan"), 7) == [] and not scaler.gave_up
    (told,) = run_down(scaler, lambda w: w.sum() * float("nan"), 5)
    assert scaler.gave_up
    assert told.startswith("LossScaler: 8 steps were skipped, and the scale is 256; the loss itself is not finite")
    assert "train in bf16" in told
    run_down(scaler, lambda w: w.sum(), 1)
    assert not scaler.gave_up


def test_gradients_that_no_scale_makes_finite_are_told_below_the_least_scale():
    scaler = LossScaler(init_scale=2.0**-12)
    (told,) = run_down(scaler, lambda w: ((w - 1).square().sum()).sqrt(), 4)  # the root of 0 has a NaN for gradient
    assert scaler.gave_up and scaler.get_scale() == 2.0**-16
    assert "3 steps were skipped" in told and "the loss is finite and its gradients are not" in told


def test_what_cannot_be_unscaled_is_refused():
    model = network()
    optimizer, scaler = lb.optim.in_backward_(model, lb.optim.SGD, lr=0.1), LossScaler()
    scaler.scale(loss_of(model, 0)).backward()
    for call in (scaler.unscale_, scaler.step):
        with pytest.raises(ValueError, match=r"steps in the backward pass .* train in bf16"):
            call(optimizer)
    half = nn.Linear(4, 4).half()
    optimizer = torch.optim.SGD(half.parameters(), lr=0.1)
    scaler.scale(half(torch.ones(1, 4).half()).sum()).backward()
    with pytest.raises(ValueError, match=r"a gradient \[4, 4\] is float16.*fp32_gradients=True"):
        scaler.step(optimizer)


def test_a_step_without_a_backward_pass_is_refused():
    scaler, model = LossScaler(), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(loss_of(model, 0))
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler.step(optimizer)


@pytest.mark.parametrize(
    ("name", "value"),
    [("init_scale", 0.0), ("init_scale", float("inf")), ("growth_factor", 1.0), ("backoff_factor", 1.0),
     ("backoff_factor", 0.0), ("growth_interval", 0), ("init_scale", float("nan"))],
)  # fmt: skip
def test_factors_that_do_not_fit_are_refused(name, value):
    with pytest.raises(ValueError, match=f"LossScaler: {name} must be more than .* got {value!r}"):
        LossScaler(**{name: value})
