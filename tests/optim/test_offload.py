"""Offloaded optimizers: the bits of those that are not, and all that optimizers can do besides."""

from __future__ import annotations

import copy
import gc
import os
import weakref

import pytest
import torch
from support.peaks import resident_peak
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import lowbit as lb
from lowbit.optim import AdamW, clip_grad_norm_, offload_, unoffload_

MAKE = {
    "torch AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "torch AdamW in a loop": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=False),
    "torch SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "AdamW 8": lambda params: AdamW(params, lr=1e-2, bits=8),
    "AdamW 4": lambda params: AdamW(params, lr=1e-2, bits=4),
    "AdamW 32, masters": lambda params: AdamW(params, lr=1e-2, bits=32, master="fp32"),
    "SGD 8": lambda params: lb.optim.SGD(params, lr=1e-2, momentum=0.9),
    "Muon": lambda params: lb.optim.Muon(params, lr=1e-2),
    "GaLore": lambda params: lb.optim.GaLore(params, lr=1e-2, rank=48, refresh=3),
    "Apollo": lambda params: lb.optim.Apollo(params, lr=1e-2, rank=48, refresh=3),
}


def network(dtype=torch.float32) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(96, 128), nn.Tanh(), nn.Linear(128, 64, bias=False), nn.Linear(64, 64)).to(dtype)


def train(model, optimizer, steps=range(20), clip=torch.nn.utils.clip_grad_norm_, scheduler=None, parts=2):
    """Steps of accumulated gradients that are clipped; the losses."""
    losses = []
    for number in steps:
        optimizer.zero_grad()
        for part in range(parts):
            torch.manual_seed(1000 * number + part)
            x = torch.randn(16, 96, dtype=model[0].weight.dtype)
            loss = model(x).float().square().mean()
            loss.backward()
            losses.append(loss.detach())
        if clip is torch.nn.utils.clip_grad_norm_:
            losses.append(clip(model.parameters(), 0.05))
        else:
            losses.append(clip(optimizer, 0.05))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return [*losses, *(p.detach().clone() for p in model.parameters())]


def schedule(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)


def same(left, right) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def states(optimizer):
    return [value for state in optimizer.state_dict()["state"].values() for value in state.values()]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("gradients", [False, True], ids=["states", "gradients"])
@pytest.mark.parametrize("name", MAKE)
def test_twenty_steps_have_the_bits_that_they_have_without(tmp_path, monkeypatch, recwarn, name, gradients):
    monkeypatch.setattr("lowbit.optim.offload.CHUNK_BYTES", 40_000)  # several chunks
    dtype = torch.bfloat16 if "masters" in name else torch.float32
    plain, model = network(dtype), network(dtype)
    expected = MAKE[name](plain.parameters())
    optimizer = MAKE[name](model.parameters())
    kind = type(optimizer)
    assert offload_(optimizer, tmp_path, gradients) is optimizer and type(optimizer) is kind
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert same(
        train(model, optimizer, scheduler=schedule(optimizer)), train(plain, expected, scheduler=schedule(expected))
    )
    assert same(states(optimizer), states(expected))
    files = [os.path.getsize(os.path.join(at, name)) for at, _, names in os.walk(tmp_path) for name in names]
    large = [value.nbytes for value in states(expected) if value.nbytes >= 4096]
    moved = [p.nbytes for p in model.parameters()] if gradients else []
    assert sorted(files) == sorted(large + moved)
    assert not [w for w in recwarn if "scheduler" in str(w.message)]


def test_a_scheduler_that_is_older_goes_on(tmp_path, recwarn):
    plain, model = network(), network()
    expected, optimizer = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, model))
    scheduler = schedule(optimizer)
    train(model, optimizer, range(3), scheduler=scheduler)
    offload_(optimizer, tmp_path)
    result = train(model, optimizer, range(3, 8), scheduler=scheduler)
    unoffload_(optimizer)
    assert not list(tmp_path.iterdir())
    result += train(model, optimizer, range(8, 10), scheduler=scheduler)
    before = schedule(expected)
    train(plain, expected, range(3), scheduler=before)
    again = train(plain, expected, range(3, 8), scheduler=before)
    assert same(result, again + train(plain, expected, range(8, 10), scheduler=before))
    assert not list(recwarn)


@pytest.mark.parametrize("name", ["torch AdamW", "AdamW 8"])
def test_states_are_saved_and_loaded(tmp_path, name):
    plain, model, other = network(), network(), network()
    expected, optimizer = MAKE[name](plain.parameters()), offload_(MAKE[name](model.parameters()), tmp_path / "a")
    train(plain, expected, range(6))
    train(model, optimizer, range(3))
    torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "saved.pt")
    weights, saved = torch.load(tmp_path / "saved.pt")
    resumed = offload_(MAKE[name](other.parameters()), tmp_path / "b", gradients=True)
    other.load_state_dict(weights)
    resumed.load_state_dict(saved)
    assert len(list((tmp_path / "b").glob("*/*"))) == len(list((tmp_path / "a").glob("*/*")))
    train(other, resumed, range(3, 6))
    assert same(list(other.parameters()), list(plain.parameters())) and same(states(resumed), states(expected))
    twin = copy.deepcopy(resumed)
    assert same(states(twin), states(expected))


def test_groups_that_are_added_step_too(tmp_path):
    plain, model = network(), network()
    made = []
    for net in (plain, model):
        optimizer = torch.optim.AdamW(net[0].parameters(), lr=1e-2)
        if net is model:
            offload_(optimizer, tmp_path, gradients=True)
        optimizer.add_param_group({"params": list(net[2:].parameters()), "lr": 1e-3})
        made.append(train(net, optimizer, range(4)))
    assert same(*made)


def test_hooks_of_steps_and_training_state_run_once_a_step(tmp_path):
    results = []
    for offloaded in (False, True):
        model = network()
        lb.train.prepare_(model, "fp8", skip=())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        calls: list[int] = []
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append(1))
        if offloaded:
            offload_(optimizer, tmp_path)
        results.append(train(model, optimizer, range(3)))
        assert len(calls) == 3
    assert same(*results)


def test_closures_and_clipping_by_the_optimizer(tmp_path):
    plain, model = network(), network()
    expected, optimizer = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, model))
    offload_(optimizer, tmp_path, gradients=True)
    result = train(model, optimizer, range(3), clip=clip_grad_norm_)
    assert same(result, train(plain, expected, range(3)))

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 96)).sum()
        loss.backward()
        return loss

    value = model(torch.ones(2, 96)).sum()
    assert torch.equal(optimizer.step(closure), value)


def test_an_error_in_a_step_leaves_groups_whole_and_states_in_place(tmp_path):
    model = network()
    optimizer = offload_(torch.optim.AdamW(model.parameters(), lr=1e-2), tmp_path)
    train(model, optimizer, range(2))
    groups = [list(group["params"]) for group in optimizer.param_groups]
    model[3].weight.grad = torch.ones(64, 64).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    for group, before in zip(optimizer.param_groups, groups, strict=True):
        assert [id(param) for param in group["params"]] == [id(param) for param in before]
    train(model, optimizer, range(2, 3))


def test_what_cannot_be_offloaded(tmp_path):
    params = list(network().parameters())
    with pytest.raises(TypeError, match=r"expected a torch.optim.Optimizer, got list"):
        offload_(params, tmp_path)
    with pytest.raises(TypeError, match="needs all parameters at once"):
        offload_(torch.optim.LBFGS(params), tmp_path)
    optimizer = offload_(torch.optim.SGD(params), tmp_path)
    with pytest.raises(ValueError, match="offloaded already"):
        offload_(optimizer, tmp_path)
    replaced = torch.optim.SGD(params)
    replaced.step = lambda: None
    with pytest.raises(ValueError, match="has replaced the optimizer's step"):
        offload_(replaced, tmp_path)
    model = network()
    with pytest.raises(ValueError, match="steps in the backward pass"):
        offload_(lb.optim.in_backward_(model, AdamW), tmp_path)
    assert unoffload_(replaced) is replaced
    plain = torch.optim.SGD(params)
    with pytest.raises(ValueError, match="these are on the CPU, as are their states; give a directory"):
        offload_(plain, "cpu")
    with pytest.raises(ValueError, match="some are on the meta device; load the model first"):
        offload_(torch.optim.SGD([*params, torch.zeros(2, device="meta")]), tmp_path)
    assert "step" not in vars(plain)


def test_resident_memory_stays_flat_with_states_and_gradients_in_files(tmp_path):
    params = [nn.Parameter(torch.ones(1 << 20)) for _ in range(32)]  # written, so resident
    optimizer = offload_(torch.optim.AdamW(params, lr=1e-3), tmp_path, gradients=True)

    def work():
        for _ in range(2):
            for param in params:
                (param * 2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    states_and_gradients = 3 * sum(param.nbytes for param in params)
    assert resident_peak(work) < 0.4 * states_and_gradients


@pytest.mark.parametrize("gradients", [False, True])
def test_model_and_files_go_with_the_optimizer(tmp_path, gradients):
    model = nn.Linear(64, 64)
    optimizer = lb.optim.offload_(torch.optim.AdamW(model.parameters()), tmp_path, gradients=gradients)
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    kept = weakref.ref(model.weight)
    del model, optimizer
    gc.collect()
    assert kept() is None
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 4096]


def test_parameters_that_have_no_memory_of_their_own_step(tmp_path):
    pair = TwoTensor(torch.ones(32, 32), torch.ones(32, 32))
    param = nn.Parameter(pair)
    optimizer = lb.optim.offload_(torch.optim.SGD([param], lr=0.5), tmp_path)
    param.grad = TwoTensor(torch.ones(32, 32), torch.ones(32, 32))
    optimizer.step()
    assert torch.equal(param.detach().a, torch.full((32, 32), 0.5))
