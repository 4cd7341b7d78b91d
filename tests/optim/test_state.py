"""State on disk: saved and loaded in every bit, through every way that people save; and converted from other states."""

from __future__ import annotations

import io

import pytest
import torch
from support.bits import same_bits
from torch import nn

import lowbit as lb
from lowbit.optim.states import Storage, Stored

BITS = [row.name for row in lb.optim.STATES.values()]


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(80, 96), nn.Tanh(), nn.Linear(96, 64)).to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        weight = next(model.parameters())
        x = torch.randn(8, 80, generator=torch.Generator().manual_seed(step)).to(weight.dtype)
        model(x).square().mean().backward()
        optimizer.step()


def through_torch_save(state):
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def through_safetensors(state):
    safetensors = pytest.importorskip("safetensors.torch")
    flat = {f"{i}.{k}": v for i, s in state["state"].items() for k, v in s.items()}
    loaded = safetensors.load(safetensors.save(flat))
    states: dict = {}
    for name, value in loaded.items():
        i, k = name.split(".", 1)
        states.setdefault(int(i), {})[k] = value
    return {"state": states, "param_groups": state["param_groups"]}


@pytest.mark.parametrize("through", [through_torch_save, through_safetensors])
@pytest.mark.parametrize("master", [None, "fp32", "residual", "stochastic"])
@pytest.mark.parametrize("bits", BITS)
def test_a_resumed_run_goes_on_in_every_bit(bits, master, through):
    options = {"lr": 1e-2, "bits": bits, "master": master, "seed": 5}
    model = network(torch.bfloat16)
    optimizer = lb.optim.AdamW(model.parameters(), **options)
    train(model, optimizer, range(3))
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    saved = through(optimizer.state_dict())
    train(model, optimizer, range(3, 6))

    other = network(torch.bfloat16)
    other.load_state_dict(weights)
    resumed = lb.optim.AdamW(other.parameters(), **options)
    resumed.load_state_dict(saved)
    train(other, resumed, range(3, 6))
    assert all(same_bits(a.detach(), b.detach()) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        mine, theirs = optimizer.state[p], resumed.state[q]
        assert list(mine) == list(theirs)
        assert all(same_bits(mine[k], theirs[k]) for k in mine)


def test_the_file_is_not_the_optimizers_memory():
    model = network()
    optimizer = lb.optim.AdamW(model.parameters())
    train(model, optimizer, range(2))
    saved = through_torch_save(optimizer.state_dict())
    before = {k: v.clone() for k, v in saved["state"][0].items()}
    optimizer.load_state_dict(saved)
    train(model, optimizer, range(2, 4))
    assert all(same_bits(before[k], v) for k, v in saved["state"][0].items())


@pytest.mark.parametrize("old", BITS)
@pytest.mark.parametrize("new", BITS)
def test_states_of_other_bits_are_converted(old, new):
    model = network()
    before = lb.optim.AdamW(model.parameters(), bits=old, rounding="nearest")
    train(model, before, range(3))
    after = lb.optim.AdamW(model.parameters(), lr=1.0, bits=new)
    if old == new:
        after.load_state_dict(before.state_dict())
    else:
        with pytest.warns(UserWarning, match="are converted to"):
            after.load_state_dict(before.state_dict())
    assert after.param_groups[0]["lr"] == 1e-3  # as torch: hyperparameters are the state's
    assert after.param_groups[0]["bits"] == new
    weight = model[0].weight
    for moment in ("exp_avg", "exp_avg_sq_root"):
        numbers = [_numbers(o, weight, moment) for o in (before, after)]
        kept = after.storages(after.param_groups[0], weight)[moment]
        expected = numbers[0].to(kept.dtype).float() if kept.dtype else _rounded(numbers[0], kept)
        if old != new:
            assert same_bits(numbers[1], expected)
    train(model, after, range(3, 4))


def _numbers(optimizer, param, moment):
    kept = optimizer.storages(optimizer.param_groups[0], param)[moment]
    state = optimizer.state[param]
    return Stored(kept, state[moment], state.get(f"{moment}_scale")).numbers()


def _rounded(numbers, kept: Storage):
    return lb.quantize(numbers.flatten(), kept.kind).dequantize().view_as(numbers)


@pytest.mark.parametrize(
    ("theirs", "ours", "options", "moment"),
    [
        (torch.optim.AdamW, lb.optim.AdamW, {}, "exp_avg_sq_root"),
        (torch.optim.Adam, lb.optim.AdamW, {}, "exp_avg"),
        (torch.optim.SGD, lb.optim.SGD, {"momentum": 0.9}, "momentum_buffer"),
    ],
)
def test_torchs_states_are_taken_over(theirs, ours, options, moment):
    model, same = network(), network()
    before, beside = theirs(model.parameters(), **options), theirs(same.parameters(), **options)
    train(model, before, range(3))
    train(same, beside, range(3))
    after = ours(model.parameters(), bits=32, **options)
    if moment == "momentum_buffer":
        after.load_state_dict(before.state_dict())
    else:
        with pytest.warns(UserWarning, match="exp_avg_sq is kept as exp_avg_sq_root"):
            after.load_state_dict(before.state_dict())
    train(model, after, range(3, 6))
    train(same, beside, range(3, 6))
    for p, q in zip(model.parameters(), same.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("old", [None, "fp32", "residual", "stochastic"])
@pytest.mark.parametrize("new", [None, "fp32", "residual", "stochastic"])
def test_masters_are_converted(old, new):
    model = network(torch.bfloat16)
    before = lb.optim.SGD(model.parameters(), lr=1e-3, master=old)
    train(model, before, range(4))
    after = lb.optim.SGD(model.parameters(), master=new)
    kinds = ("fp32", "residual")
    if old == new or not {old, new} & set(kinds):
        after.load_state_dict(before.state_dict())
    else:
        with pytest.warns(UserWarning, match="master weights"):
            after.load_state_dict(before.state_dict())
    weight = model[0].weight
    master = after.state[weight].get("master")
    assert (master is None) == (new not in kinds)
    if old in kinds and new in kinds:
        held = lb.reference.weight(weight.detach(), before.state[weight]["master"])
        torch.testing.assert_close(lb.reference.weight(weight.detach(), master), held, rtol=2**-16, atol=0)


@pytest.mark.parametrize(
    ("theirs", "ours", "options"),
    [
        (torch.optim.AdamW, lb.optim.AdamW, {}),
        (torch.optim.SGD, lb.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adafactor, lb.optim.Adafactor, {}),
    ],
)
def test_the_way_back_to_torch(theirs, ours, options):
    model, same = network(), network()
    before, beside = ours(model.parameters(), bits=32, **options), theirs(same.parameters(), **options)
    train(model, before, range(3))
    train(same, beside, range(3))
    after = theirs(model.parameters(), **options)
    after.load_state_dict(before.torch_state_dict())
    train(model, after, range(3, 6))
    train(same, beside, range(3, 6))
    for p, q in zip(model.parameters(), same.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_states_that_are_left_out_are_named():
    model = network()
    adamw = lb.optim.AdamW(model.parameters())
    train(model, adamw, range(1))
    with pytest.warns(UserWarning, match="exp_avg_sq_root is dropped"):
        lb.optim.Lion(model.parameters()).load_state_dict(adamw.state_dict())


def test_states_that_do_not_fit_change_nothing():
    model = network()
    optimizer = lb.optim.AdamW(model.parameters())
    train(model, optimizer, range(2))
    before = optimizer.state_dict()
    other = lb.optim.Lion(model.parameters(), lr=0.5)
    train(model, other, range(1))
    with pytest.raises(ValueError, match=r"needs exp_avg_sq_root \[96, 80\]"):
        optimizer.load_state_dict(other.state_dict())
    amsgrad = torch.optim.AdamW(model.parameters(), amsgrad=True)
    train(model, amsgrad, range(1))
    with pytest.raises(ValueError, match="AMSGrad"):
        optimizer.load_state_dict(amsgrad.state_dict())
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert all(same_bits(v, after["state"][i][k]) for i, s in before["state"].items() for k, v in s.items())


def test_hooks_of_users_see_tensors():
    model = network()
    optimizer = lb.optim.AdamW(model.parameters())
    train(model, optimizer, range(1))
    seen = []
    optimizer.register_load_state_dict_pre_hook(lambda o, s: seen.append(type(s["state"][0]["exp_avg"])))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(type(o.state[model[0].weight]["exp_avg"])))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [torch.Tensor, torch.Tensor]
