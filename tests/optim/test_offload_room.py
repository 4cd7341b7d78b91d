"""A disk that fills under an offloaded optimizer: nothing has moved, and the step can be made again."""

from __future__ import annotations

import copy
import errno
import os
from pathlib import Path

import pytest
import torch
from support.bits import same_bits
from torch import nn

import lowbit as lb
from lowbit.optim import offload_
from lowbit.optim.offload import OFFLOADED
from lowbit.optim.outlook import states_to_come
from lowbit.storage import directory


class ReadsGradients(torch.optim.Optimizer):
    """A step that nobody can foresee without data: it looks at its gradients."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and bool((param.grad != 0).any()):
                    state = self.state[param]
                    if not state:
                        state["sum"] = torch.zeros_like(param)
                    param.sub_(state["sum"].add_(param.grad), alpha=group["lr"])


MAKE = {
    "torch AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "torch AdamW, foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "torch SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "torch Adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
    "torch ASGD": lambda params: torch.optim.ASGD(params, lr=1e-2),
    "AdamW 8": lambda params: lb.optim.AdamW(params, lr=1e-2),
    "AdamW 4": lambda params: lb.optim.AdamW(params, lr=1e-2, bits=4),
    "AdamW 32, masters": lambda params: lb.optim.AdamW(params, lr=1e-2, bits=32, master="fp32"),
    "Muon": lambda params: lb.optim.Muon(params, lr=1e-2),
    "GaLore": lambda params: lb.optim.GaLore(params, lr=1e-2, rank=48, refresh=3),
    "Apollo": lambda params: lb.optim.Apollo(params, lr=1e-2, rank=48, refresh=3),
    "reads gradients": ReadsGradients,
}


def network(name: str) -> nn.Sequential:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(96, 128), nn.Tanh(), nn.Linear(128, 96, bias=False), nn.Linear(96, 96))
    return net.bfloat16() if "masters" in name else net


def backward(model: nn.Module, seed: int = 0) -> None:
    x = torch.randn(16, 96, generator=torch.Generator().manual_seed(seed)).to(next(model.parameters()).dtype)
    model(x).float().square().mean().backward()


class Disk:
    """A disk with room for so many files."""

    def __init__(self, monkeypatch) -> None:
        self.room, self._allocate = 10**9, directory._allocate
        monkeypatch.setattr(directory, "_allocate", self.allocate)

    def allocate(self, file: int, size: int) -> None:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= 1
        self._allocate(file, size)


@pytest.mark.parametrize("name", MAKE)
def test_a_full_disk_in_the_first_step_moves_nothing(tmp_path: Path, monkeypatch, name: str):
    monkeypatch.setattr("lowbit.optim.offload.CHUNK_BYTES", 40_000)  # several chunks, and one weight beyond it
    monkeypatch.setattr("lowbit.optim.offload.LEAST_BYTES", 256)
    disk = Disk(monkeypatch)
    plain, model = network(name), network(name)
    expected, optimizer = MAKE[name](plain.parameters()), offload_(MAKE[name](model.parameters()), tmp_path)
    files = vars(optimizer)[OFFLOADED].files
    for net in (plain, model):
        backward(net)
    weights = [p.detach().clone() for p in model.parameters()]
    failures = 0
    while True:
        disk.room = failures
        try:
            optimizer.step()
            break
        except OSError as error:
            assert error.errno == errno.ENOSPC
            assert "No weight and no state has changed: make room, and call step() again" in str(error)
        assert all(map(same_bits, model.parameters(), weights))
        assert not any(optimizer.state.values()) and files.used == 0 and not os.listdir(files.path)
        failures += 1
    assert failures >= 3, "each weight has a state"
    expected.step()
    disk.room = 10**9
    for seed in range(1, 4):
        for net, one in ((plain, expected), (model, optimizer)):
            one.zero_grad()
            backward(net, seed)
            one.step()
    assert all(map(same_bits, model.parameters(), plain.parameters()))


@pytest.mark.parametrize("name", ["torch AdamW", "AdamW 8"])
def test_a_full_disk_leaves_the_optimizer_and_no_gradient_moves_without_the_others(tmp_path, monkeypatch, name):
    disk = Disk(monkeypatch)
    plain, model = network(name), network(name)
    expected, optimizer = MAKE[name](plain.parameters()), MAKE[name](model.parameters())
    for net, one in ((plain, expected), (model, optimizer)):
        backward(net)
        one.step()
        one.zero_grad()
    before = dict(vars(optimizer))
    states = [value for state in optimizer.state.values() for value in state.values()]
    failures = 0
    while True:
        disk.room = failures
        try:
            offload_(optimizer, tmp_path, gradients=True)
            break
        except OSError as error:
            assert "the optimizer has not changed" in str(error)
        assert vars(optimizer) == before and not list(tmp_path.iterdir())
        after = [value for state in optimizer.state.values() for value in state.values()]
        assert all(a is b for a, b in zip(states, after, strict=True))
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
        failures += 1
    used = vars(optimizer)[OFFLOADED].files.used
    for room in range(5):  # of five gradients
        disk.room = room
        with pytest.raises(OSError, match=r"No weight has changed: drop the gradients .*\(zero_grad\), and make room"):
            backward(model, 1)
        assert vars(optimizer)[OFFLOADED].files.used == used
        optimizer.zero_grad()
    disk.room = 5
    for seed in range(1, 3):
        for net, one in ((plain, expected), (model, optimizer)):
            backward(net, seed)
            one.step()
            one.zero_grad()
    assert all(map(same_bits, model.parameters(), plain.parameters()))


def test_states_that_are_loaded_onto_a_full_disk_stay_in_memory(tmp_path: Path, monkeypatch):
    disk = Disk(monkeypatch)
    plain, model = network(""), network("")
    expected, optimizer = (
        torch.optim.AdamW(plain.parameters()),
        offload_(torch.optim.AdamW(model.parameters()), tmp_path),
    )
    backward(plain)
    expected.step()
    model.load_state_dict(plain.state_dict())
    for room in range(4):
        disk.room = room
        with pytest.raises(OSError, match="The states are loaded, and are in memory"):
            optimizer.load_state_dict(copy.deepcopy(expected.state_dict()))  # torch keeps the tensors
        backward(model, 1)
        weights = [p.detach().clone() for p in model.parameters()]
        disk.room = room
        with pytest.raises(OSError, match="No weight and no state has changed"):
            optimizer.step()
        assert all(map(same_bits, model.parameters(), weights))
        optimizer.zero_grad()
    disk.room = 10**9
    for net, one in ((plain, expected), (model, optimizer)):
        one.zero_grad()
        backward(net, 1)
        one.step()
    assert all(map(same_bits, model.parameters(), plain.parameters()))


def test_a_file_that_may_not_become_so_large_says_the_same(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(errno.EFBIG, "File too large")))
    model = network("")
    optimizer = offload_(torch.optim.AdamW(model.parameters()), tmp_path)
    backward(model)
    with pytest.raises(OSError, match=r"the disk has no room for .* No weight and no state has changed"):
        optimizer.step()


@pytest.mark.parametrize("name", [name for name in MAKE if name != "reads gradients"])
def test_states_are_foreseen(name: str):
    """The oracle is a step."""
    model = network(name)
    optimizer = MAKE[name](model.parameters())
    random = torch.get_rng_state()
    (group,) = optimizer.param_groups
    foreseen = [states_to_come(optimizer, group, place) for place in range(len(group["params"]))]
    assert not optimizer.state and torch.equal(torch.get_rng_state(), random)
    backward(model)
    optimizer.step()
    for param, states in zip(group["params"], foreseen, strict=True):
        made = {k: (v.shape, v.dtype, v.stride()) for k, v in optimizer.state[param].items() if torch.is_tensor(v)}
        assert states is not None and {k: (v.shape, v.dtype, v.stride()) for k, v in states.items()} == made
