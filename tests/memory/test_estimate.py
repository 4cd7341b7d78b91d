"""What an estimate says before a step is what the allocator held in it."""

from __future__ import annotations

import gc
import sys
import threading
from contextlib import suppress
from functools import partial
from importlib import import_module

import pytest
import torch
from torch import nn
from torch.utils import _foreach_utils

import lowbit as lb
from lowbit.checkpointing.host_time import overhead
from lowbit.checkpointing.selective import looked_at
from lowbit.demo.gpt import GPT, GPTConfig
from lowbit.memory import checkpoint_, estimate, profile, usual_loss
from lowbit.memory.estimator import Recomputation
from lowbit.optim.names import find_optimizer

CONFIG = GPTConfig(vocab=512, layers=3, heads=4, dim=128, hidden=256)

#: recipe, precision, optimizer, policy of checkpointing, micro-batches.
CASES = (
    (None, None, "adamw", None, 1),
    (None, "bf16", "adamw8bit", "block", 1),
    (None, "bf16", "sgd", "attention", 2),
    ("fp8", "bf16", "adamw4bit", None, 1),
    ("fp8-tensor", "bf16", "lion8bit", "sqrt", 1),
    ("int8", "bf16", "adamw", "save_matmuls", 1),
    ("mxfp8", None, "muon8bit", "mlp", 1),
    (None, "bf16", partial(lb.optim.GaLore8bit, rank=32), "block", 1),
    (None, None, "apollomini8bit", None, 1),
)


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.layers(x))


def measured(model, batch, recipe=None, precision=None, optimizer="adamw", policy=None, micro_batches=1):
    if recipe is not None:
        lb.train.prepare_(model, recipe)
    if precision is not None:
        lb.train.mixed_(model, precision)
    if policy is not None:
        checkpoint_(model, policy)
    make = optimizer if callable(optimizer) else find_optimizer(optimizer).make
    stepper = make(model.parameters())

    def step(given):
        for _ in range(micro_batches):
            usual_loss(model(given), given).backward()
        stepper.step()
        stepper.zero_grad()

    gc.collect()
    found = profile(model, batch, step)
    return found, found.peak_bytes - found.by_kind.get("other", 0)


@pytest.mark.thinned(7)
@pytest.mark.parametrize(("recipe", "precision", "optimizer", "policy", "parts"), CASES)
def test_an_estimate_is_what_the_step_takes(recipe, precision, optimizer, policy, parts):
    model, batch = GPT(CONFIG), torch.randint(512, (4, 128))
    told = estimate(
        model, batch, None, recipe, optimizer, policy, precision=precision, micro_batches=parts
    )  # fmt: skip
    found, peak = measured(model, batch, recipe, precision, optimizer, policy, parts)
    assert told.peak_bytes == pytest.approx(peak, rel=0.01)
    assert sum(told.by_kind.values()) == told.peak_bytes
    for kind in ("parameters", "optimizer state"):
        assert told.by_kind[kind] == found.by_kind[kind]


@pytest.mark.parametrize(
    "make",
    [
        partial(lb.optim.GaLore, rank=64, bits=4),
        partial(lb.optim.GaLore, rank=8, bits=32, projection_bits=32),
        partial(lb.optim.Apollo, rank=64),
        partial(lb.optim.Apollo, rank=1, scaling="channel"),
    ],
    ids=["int4 projection", "fp32 projection", "APOLLO", "rank 1"],
)
def test_the_peak_of_a_step_that_projects_is_estimated(make):
    """The batch is one row, so the step needs more than forward and backward. The first step refreshes."""
    model, batch = nn.Sequential(nn.Linear(384, 1024), nn.GELU(), nn.Linear(1024, 384)), torch.randn(1, 384)
    told = estimate(model, batch, lambda output, _: output.square().mean(), optimizer=make)
    stepper = make(model.parameters())

    def step(given):
        model(given).square().mean().backward()
        stepper.step()
        stepper.zero_grad()

    found = profile(model, batch, step)
    assert max(told.by_phase, key=told.by_phase.__getitem__) == "step"
    assert told.peak_bytes == pytest.approx(found.peak_bytes - found.by_kind.get("other", 0), rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.RMSprop])
def test_optimizers_step_over_lists_where_the_device_has_kernels_for_them(optimizer, monkeypatch):
    """As torch's do on CUDA, with temporaries as large as all parameters."""
    devices = [*_foreach_utils._get_foreach_kernels_supported_devices(), "cpu"]
    for module in (_foreach_utils, import_module("torch.optim.optimizer")):
        monkeypatch.setattr(module, "_get_foreach_kernels_supported_devices", lambda: devices)
    model, batch = GPT(CONFIG), torch.randint(512, (1, 8))
    told = estimate(model, batch, optimizer=optimizer)
    stepper = optimizer(model.parameters())

    def step(given):
        usual_loss(model(given), given).backward()
        stepper.step()
        stepper.zero_grad()

    found = profile(model, batch, step)
    assert told.peak_event.phase == found.peak_event.phase == "step"
    assert told.peak_bytes == pytest.approx(found.peak_bytes - found.by_kind.get("other", 0), rel=0.002)
    assert told.by_kind["temporaries"] >= 0.9 * told.by_kind["parameters"]


def test_convolutions():
    model, batch = Convolutions(), torch.randn(16, 3, 32, 32)
    assert estimate(model, batch).peak_bytes == pytest.approx(measured(model, batch)[1], rel=0.01)


def test_a_model_on_meta_is_estimated_as_the_real_one_and_nothing_changes():
    with torch.device("meta"):
        meta = GPT(CONFIG)
    model = GPT(CONFIG)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batch = torch.randint(512, (2, 64))
    told = estimate(model, batch, recipe="fp8", checkpoint="block")
    assert estimate(meta, batch.to("meta"), recipe="fp8", checkpoint="block").peak_bytes == told.peak_bytes
    assert type(model.blocks[0]) is type(GPT(CONFIG).blocks[0]) and type(model.lm_head) is nn.Linear
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_the_textbook_of_adam():
    """Parameters 4P, gradients 4P, states 8P, of a model whose activations are nothing beside them."""
    model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False))
    count = 2 * 512 * 512
    told = estimate(model, torch.empty(1, 512))
    assert told.by_kind["parameters"] == 4 * count
    assert told.by_kind["optimizer state"] == pytest.approx(8 * count, rel=1e-4)
    assert told.by_kind["gradients"] == 4 * count
    assert estimate(model, torch.empty(1, 512), optimizer=None).by_kind.get("optimizer state") is None


def test_the_layer_that_holds_most_comes_first():
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 4096), nn.GELU()), nn.Linear(4096, 8))
    told = estimate(model, torch.empty(256, 8), optimizer=None)
    assert list(told.by_layer)[:3] == ["2", "1.0", "1.1"]
    assert told.by_layer["1.1"]["activations"] == told.by_layer["1.0"]["activations"] == 256 * 4096 * 4
    assert told.peak_event.phase == "backward" and told.peak_event.layer == "2"


def test_what_reads_values_says_so():
    class Routed(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum().item() > 0 else x

    with pytest.raises(ValueError, match=r"memory\.profile"):
        estimate(Routed(4, 4), torch.randn(2, 4))
    with pytest.raises(ValueError, match="unknown optimizer 'adamw9bit'"):
        estimate(nn.Linear(4, 4), torch.randn(2, 4), optimizer="adamw9bit")
    with pytest.raises(ValueError, match="precision must be"):
        estimate(nn.Linear(4, 4), torch.randn(2, 4), precision="fp12")


def test_gradients_are_on_whatever_the_mode_outside():
    model, batch = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(2, 8)
    want = estimate(model, batch).by_phase
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert estimate(model, batch).by_phase == want
            inside = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        assert estimate(inside, batch).by_phase == want


class Locked(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (
            {"optimizer": torch.optim.SGD([torch.zeros(1)])},
            TypeError,
            "optimizer must be a name, or .* its class, .* got SGD",
        ),
        ({"loss": "ce"}, TypeError, "loss must be a function of output and batch, or None, got str"),
        ({"prepare": 3}, TypeError, "prepare must be a function of the model, or None, got int"),
        ({"micro_batches": "2"}, ValueError, "an integer from 1, got '2'"),
        ({"micro_batches": 1.5}, ValueError, "an integer from 1, got 1.5"),
        (
            {"loss": lambda output, batch: output},
            ValueError,
            r"a tensor of one element, got shape \[2, 4\]; take its mean",
        ),
        ({"loss": lambda output, batch: 1.0}, ValueError, "a tensor of one element, got float"),
        ({"model": Locked()}, ValueError, r"Locked cannot be copied, .*_thread.lock.* memory\.profile"),
        ({"model": nn.LazyLinear(4)}, ValueError, "lazy layers without shapes yet; call it once"),
        ({"batch": "tokens"}, TypeError, "a batch is a tensor, a tuple .* got str"),
    ],
)
def test_what_has_no_estimate_is_refused(settings, error, message):
    given = {"model": nn.Linear(4, 4), "batch": torch.randn(2, 4), **settings}
    with pytest.raises(error, match=message):
        estimate(**given)


def test_tensors_that_are_no_buffers_go_along():
    class Table(nn.Linear):
        def __init__(self):
            super().__init__(8, 8)
            self.table = torch.ones(8)

        def forward(self, x):
            return super().forward(x) + self.table

    assert estimate(Table(), torch.zeros(4, 8)).peak_bytes > 0


class Raises(nn.Module):
    """Takes another way where an op raises, as models do that try a fast path first."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        with suppress(RuntimeError):
            x @ torch.empty(3, 3)
        return self.second(self.first(x))


def test_an_op_that_raises_shifts_no_time():
    found = estimate(Raises(), torch.empty(8, 32))
    times = list(zip(found.ops, found.op_seconds, strict=True))
    products = [seconds for op, seconds in times if op.name == "aten.addmm.default"]
    assert len(products) == 2 and len(set(products)) == 1 and products[0] > 0
    assert all(seconds == 0 for op, seconds in times if op.name == "aten.t.default")


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("policy", "each"), [("save_matmuls", 0.5), ("block", 0.25), (None, 0.0)])
def test_what_checkpoints_take_of_the_hosts_time_is_counted(steady_times, monkeypatch, policy, each):
    batch = torch.randint(512, (2, 32))
    before = estimate(GPT(CONFIG), batch, checkpoint=policy).seconds_by_phase
    takes = Recomputation(looked_at, lambda selective: 0.5 if selective else 0.25)
    monkeypatch.setattr("lowbit.memory.estimator.RECOMPUTATIONS", [takes])
    found = estimate(GPT(CONFIG), batch, checkpoint=policy)
    again = sum(op.phase == "recomputation" for op in found.ops)
    assert (again == 0) == (policy is None)
    more = {phase: seconds - before[phase] for phase, seconds in found.seconds_by_phase.items()}
    assert more.pop("recomputation", 0.0) == pytest.approx(each * again) and not any(more.values())


def test_keeping_some_results_takes_the_host_longer(monkeypatch):
    """Instead of seconds, which depend on the load of the machine, the calls of Python functions count."""

    def calls(step) -> float:
        count = 0

        def event(frame, kind, argument) -> None:
            nonlocal count
            count += 1

        sys.setprofile(event)
        try:
            step()
        finally:
            sys.setprofile(None)
        return count * 1e-7

    monkeypatch.setattr("lowbit.checkpointing.host_time.fastest", calls)
    overhead.cache_clear()
    try:
        with torch.inference_mode():
            assert 0 < overhead(False) < overhead(True) < 1e-3
    finally:
        overhead.cache_clear()
