"""Memory by op is that of torch's profiler, and the same for a step that runs and for its estimate."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity

import lowbit as lb
from lowbit.memory import profile
from lowbit.memory.by_op import BEFORE, BETWEEN
from lowbit.memory.measure import allocations


class Net(nn.Module):
    """Convolutions, norms, an in-place activation and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.act, self.head = nn.ReLU(inplace=True), nn.Linear(8 * 16 * 16, 10)

    def forward(self, x):
        return self.head(self.act(self.norm(self.stem(x))).flatten(1)).logsumexp(-1)


def net():
    torch.manual_seed(0)
    return Net(), torch.randn(4, 3, 16, 16)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 32), nn.Dropout(0.1)), torch.randn(100, 64)


def stepper(model, x):
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step(_=None):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


@pytest.mark.parametrize("make", [net, mlp])
def test_allocated_bytes_are_those_of_torchs_profiler(make):
    """In total those of its events; for an op that frees nothing those of the op with all that it calls."""
    step = stepper(*make())
    step()
    total = sum(change for _, change in allocations(step) if change > 0)
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as theirs:
        step()
    model, x = make()
    ours = profile(model, None, stepper(model, x)).by_op
    # Below a dispatch mode torch makes tensors of 8 bytes from Python numbers.
    assert 0 <= sum(row.allocated for row in ours.values()) - total < 512
    named = {event.key: event for event in theirs.key_averages()}
    same = ("aten::addmm", "aten::mm", "aten::gelu", "aten::gelu_backward",
            "aten::sqrt", "aten::relu_", "aten::threshold_backward", "aten::native_dropout_backward")  # fmt: skip
    compared = 0
    for name in set(same) & named.keys():
        row = ours[f"{name.replace('::', '.')}.default"]
        assert (row.calls, row.allocated) == (named[name].count, named[name].cpu_memory_usage), name
        compared += 1
    assert compared >= 4


@pytest.mark.parametrize("make", [net, mlp])
def test_an_estimate_says_the_same(make):
    model, x = make()
    real = profile(model, None, stepper(model, x)).by_op
    told = lb.estimate(
        model, x, lambda output, _: output.square().mean(), optimizer=lambda p: torch.optim.AdamW(p, foreach=False)
    ).by_op
    for name in ("aten.addmm.default", "aten.mm.default", "aten.sqrt.default", "aten.pow.Tensor_Scalar"):
        assert told[name][:2] == real[name][:2], name


def test_bytes_at_the_peak_sum_to_it_and_tensors_from_before_are_a_row():
    model, x = mlp()
    with profile(model) as p:
        model(x).sum()
    rows = p.by_op
    assert sum(row.at_peak for row in rows.values()) == p.peak_bytes
    assert rows[BEFORE].calls == rows[BEFORE].allocated == 0
    assert rows[BEFORE].at_peak == sum(p.by_kind.get(k, 0) for k in ("parameters", "inputs", "other", "gradients"))
    assert rows["aten.addmm.default"][:2] == (2, 100 * (256 + 32) * 4)
    assert [row.allocated for row in rows.values()] == sorted((row.allocated for row in rows.values()), reverse=True)


def test_ops_before_a_reset_of_the_peak_do_not_count():
    model, x = mlp()
    with profile(model) as p:
        loss = model(x).sum()
        p.reset_peak()
        loss.backward()
    assert "aten.addmm.default" not in p.by_op and p.by_op["aten.mm.default"].calls == 3
    assert sum(row.at_peak for row in p.by_op.values()) == p.peak_bytes
    assert p.by_op[BEFORE].at_peak > 100 * 256 * 4


def test_allocations_between_ops_are_no_ops():
    """``torch.tensor`` allocates outside of the ops that a dispatch mode sees."""
    model, x = mlp()
    values = list(range(5000))
    with profile(model) as p:
        y = model(x)
        made = torch.tensor(values)
    assert p.by_op[BETWEEN].allocated >= made.nbytes and p.by_op["aten.addmm.default"].allocated == 100 * 288 * 4
    assert len(y) == 100


def test_the_table_has_the_largest_ops_first_and_a_sum_of_the_others():
    model, x = mlp()
    p = profile(model, None, stepper(model, x))
    lines = p.by_op.table(rows=3).splitlines()
    assert lines[0].split() == ["op", "calls", "allocated", "at", "the", "peak"] and len(lines) == 5
    assert lines[1].startswith(next(iter(p.by_op))) and lines[4].startswith(f"{len(p.by_op) - 3} more")
    assert str(p.by_op) == p.by_op.table(20)
    data = json.loads(json.dumps(p.as_dict()))
    assert data["by_op"]["aten.addmm.default"]["calls"] == 2 and data["reserved_bytes"] is None


# -- start and stop ----------------------------------------------------------------------------------------------------
def test_start_and_stop_are_the_block():
    model, x = mlp()
    with profile(model) as block:
        model(x).sum().backward()
    model.zero_grad()
    p = profile(model)
    assert p.start() is p
    model(x).sum().backward()
    taken = p.snapshot("end")
    assert p.stop() is p
    assert p.by_op["aten.addmm.default"] == block.by_op["aten.addmm.default"]
    assert p.by_kind["gradients"] == block.by_kind["gradients"]
    assert taken.reserved is None and taken.resident > 0 and p.reserved_bytes is None


def test_started_twice_or_stopped_without_a_start():
    model, x = mlp()
    p = profile(model)
    with pytest.raises(RuntimeError, match=r"Profile\.stop: the profile is not running"):
        p.stop()
    p.start()
    with pytest.raises(RuntimeError, match="is running already"):
        p.start()
    with pytest.raises(RuntimeError, match="end the other profiler first"):
        profile(model).start()
    model(x)
    p.stop()
    for wrong, words in ((p.start, "has run already"), (p.stop, "is not running")):
        with pytest.raises(RuntimeError, match=words):
            wrong()
    assert p.by_op["aten.addmm.default"].calls == 2
