"""What a profile says is what the allocator held."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lowbit import optim
from lowbit.demo.gpt import GPT, GPTConfig
from lowbit.memory import allocated_peak, estimate, profile

CONFIG = GPTConfig(vocab=512, layers=3, heads=4, dim=128, hidden=256)


class Stages(nn.Module):
    """Convolutions, norms with buffers, in-place activations, a residual."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.act = nn.ReLU(inplace=True)
        self.conv = nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        x = self.act(self.norm(self.stem(x)))
        return self.head((x + self.conv(x)).mean((2, 3)))


def gpt_step(model, optimizer):
    def step(batch):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(batch[:, :-1])
        F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def image_step(model, optimizer):
    def step(batch):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


CASES = {
    "gpt, torch's AdamW": (lambda: GPT(CONFIG), lambda: torch.randint(512, (4, 129)), gpt_step, torch.optim.AdamW),
    "gpt, 8 bits": (lambda: GPT(CONFIG), lambda: torch.randint(512, (4, 129)), gpt_step, optim.AdamW),
    "images, momentum": (
        Stages, lambda: torch.randn(8, 3, 32, 32), image_step, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    ),
}  # fmt: skip


def storages(*tensors):
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())


@pytest.mark.thinned(3)
@pytest.mark.parametrize("case", CASES)
def test_the_peak_is_the_allocators(case):
    make, data, steps, optimizer = CASES[case]
    model, batch = make(), data()
    stepper = optimizer(model.parameters())
    step = steps(model, stepper)
    step(batch)
    states = [v for s in stepper.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    before = storages(*model.parameters(), *model.buffers(), *states, batch)
    true = allocated_peak(lambda: step(batch)) + before
    found = profile(model, batch, step)
    other = found.by_kind.get("other", 0)
    assert found.peak_bytes - other == pytest.approx(true, rel=0.001)
    assert sum(found.by_kind.values()) == found.peak_bytes == sum(sum(k.values()) for k in found.by_layer.values())
    assert found.by_kind["parameters"] == storages(*model.parameters())
    assert found.by_kind["optimizer state"] == storages(*states)
    assert max(found.by_phase.values()) == found.peak_event.bytes == max(m.bytes for m in found.timeline)


def test_kinds_and_layers_of_a_chain():
    """Linear, ReLU, Linear: backward needs the output of the ReLU, and not that of the first Linear."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 32))
    x = torch.randn(100, 64)
    with profile(model) as p:
        loss = model(x).sum()
        taken = p.snapshot("after forward")
        p.reset_peak()
        loss.backward()
    assert p.by_layer["1"]["activations"] == 100 * 256 * 4 and "activations" not in p.by_layer["0"]
    assert taken.allocated >= 100 * 256 * 4 and p.snapshots[0].peak >= taken.allocated
    assert {"gradients", "parameters", "inputs"} <= set(p.by_kind)
    assert p.peak_event.phase == "backward"
    text = str(p)
    assert "after forward" in text and "activations" in text


@pytest.mark.slow
def test_a_recomputation_is_a_phase_of_its_own():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
    x = torch.randn(256, 64, requires_grad=True)

    def run(keep):
        with profile(model) as p:
            h = x
            for block in model:
                h = block(h) if keep else checkpoint(block, h, use_reentrant=False)
            h.sum().backward()
        return p

    plain, saved = run(True), run(False)
    assert "recomputation" in saved.by_phase and "recomputation" not in plain.by_phase
    assert saved.peak_bytes < plain.peak_bytes
    again = [m for m in saved.timeline if m.phase == "recomputation"]
    assert {m.layer for m in again} >= {"0.0", "3.0"}


def test_copies_and_masters_have_their_kinds():
    model = nn.Linear(512, 64).bfloat16()
    stepper = optim.AdamW(model.parameters(), bits=8, master="fp32")
    for _ in range(2):
        with profile(model) as p:
            model(torch.randn(4, 512, dtype=torch.bfloat16)).sum().backward()
            stepper.step()
    assert p.by_kind["master copies"] == 4 * (512 * 64 + 64)
    cast = nn.Linear(512, 512)
    with profile(cast) as p, torch.autocast("cpu", torch.bfloat16):
        cast(torch.randn(2, 512)).sum().backward()
    assert p.by_layer["Linear"]["weight copies"] == 2 * (512 * 512 + 512)


@pytest.mark.slow
def test_a_planted_leak_is_named_by_its_line():
    model = nn.Linear(64, 64)
    stepper = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = []
    with profile(model) as p:
        for _ in range(4):
            loss = model(torch.randn(32, 64)).square().mean()
            kept.append(loss * 1)
            loss.backward()
            stepper.step()
            stepper.zero_grad()
    named = [leak for leak in p.leaks() if leak.line.rsplit(":", 1)[0].endswith("test_profile.py")]
    text = open(__file__).read().splitlines()
    lines = {text[int(leak.line.rsplit(":", 1)[1]) - 1].strip() for leak in named}
    assert "kept.append(loss * 1)" in lines
    with profile(model) as clean:
        for _ in range(4):
            model(torch.randn(32, 64)).square().mean().backward()
            stepper.step()
            stepper.zero_grad()
    assert clean.leaks() == []


def test_no_hook_is_left_and_an_error_ends_it():
    model = nn.Linear(8, 8)
    with pytest.raises(ZeroDivisionError), profile(model):
        model(torch.randn(2, 8))
        raise ZeroDivisionError
    hooks = nn.modules.module
    assert not hooks._global_forward_hooks and not hooks._global_forward_pre_hooks
    assert not model.weight._post_accumulate_grad_hooks
    gc.collect()


def test_what_cannot_be_profiled_says_so(tmp_path):
    model = nn.Linear(8, 8)
    with pytest.raises(ValueError, match=r"lb\.estimate"):
        profile(model.to("meta"))
    with pytest.raises(ValueError, match="step="):
        profile(nn.Linear(2, 2), torch.randn(2, 2))
    p = profile(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="with block"):
        p.snapshot("early")
    with p, pytest.raises(RuntimeError, match="after the with block"):
        p.peak_bytes  # noqa: B018
    with pytest.raises(RuntimeError, match="has run already"), p:
        pass
    with pytest.raises(ValueError, match="3 steps"):
        p.leaks()
    assert json.loads(p.save(tmp_path / "p.json").read_text())["peak_bytes"] == p.peak_bytes


def test_a_profile_within_another_is_refused_and_the_outer_one_is_whole():
    model = nn.Linear(8, 8)
    with profile(model) as outer:
        with pytest.raises(RuntimeError, match="cannot be nested"), profile(model):
            pass
        model(torch.randn(2, 8)).sum().backward()
    assert outer.by_phase.keys() >= {"forward", "backward"}


def test_a_step_that_raises_and_a_closure_leave_phases_what_they_are():
    model = nn.Linear(8, 8)
    stepper = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure():
        loss = model(torch.randn(2, 8)).sum()
        loss.backward()
        return loss

    def bad():
        raise ZeroDivisionError

    with profile(model) as p:
        with pytest.raises(ZeroDivisionError):
            stepper.step(bad)
        stepper.step(closure)
    assert p.by_phase.keys() >= {"forward", "backward"}
    assert {m.phase for m in p.timeline if m.layer == "Linear"} == {"forward", "backward"}


def test_a_reset_after_the_last_op_leaves_what_is_held_then():
    model = nn.Linear(64, 64)
    with profile(model) as p:
        kept = model(torch.randn(256, 64)).sum()
        kept.backward()
        p.reset_peak()
    assert p.timeline == [] and p.peak_bytes == sum(h.bytes for h in p._holdings if h.died == float("inf"))
    assert p.by_kind["parameters"] == p.by_kind["gradients"] == 4 * 65 * 64


@pytest.mark.slow
def test_steps_of_two_optimizers_are_the_steps_of_one():
    model = nn.Linear(64, 64)
    steppers = [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]

    def train(p, steps, mark):
        for _ in range(steps):
            model(torch.randn(32, 64)).square().mean().backward()
            for stepper in steppers:
                stepper.step()
                stepper.zero_grad()
            if mark:
                p.step()

    for mark in (False, True):
        with profile(model) as p:
            train(p, 2, mark)
        with pytest.raises(ValueError, match="got 2"):
            p.leaks()
        with profile(model) as p:
            train(p, 3, mark)
        assert p.leaks() == []


@pytest.mark.slow
def test_a_profile_that_has_ended_can_be_copied_and_keeps_nothing_alive():
    model = nn.Linear(64, 64)
    with profile(model) as p:
        model(torch.randn(8, 64)).sum().backward()
    for other in (copy.deepcopy(p), pickle.loads(pickle.dumps(p))):
        assert other.as_dict() == p.as_dict() and str(other) == str(p)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_tensors_outside_of_the_model_are_said_to_count():
    """Every live tensor of the process is in the peak; the table says so if there is one, and otherwise nothing."""
    elsewhere = torch.ones(1 << 18)
    model, batch = nn.Linear(8, 8), torch.randn(4, 8)
    found = profile(model, batch, lambda batch: model(batch).square().mean().backward())
    assert found.by_kind["other"] >= elsewhere.nbytes and found.peak_bytes >= elsewhere.nbytes
    assert "other: tensors of the process that belong neither to the model nor to its optimizer" in str(found)
    assert "tensors of the process" not in str(estimate(model, batch))
