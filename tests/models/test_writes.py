"""Functions that run a model to look at it: buffers and generators are what they were."""

from __future__ import annotations

import importlib
import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lowbit as lb
from lowbit.cli.doctor import examine
from lowbit.memory.cost import rates
from lowbit.models.writes import held_buffers


class Moving(nn.Module):
    """One buffer is replaced, one is written to, one is made by the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.r, self.b = nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)
        self.register_buffer("replaced", torch.ones(()))
        self.register_buffer("written", torch.ones(()))
        self.register_buffer("made", None)

    def forward(self, x: Tensor) -> Tensor:
        self.replaced = self.replaced * 2
        self.written.mul_(2)
        self.made = x.detach().mean() if self.made is None else self.made
        return self.b(self.r(self.a(x) * self.replaced * self.written)) + self.made


def numbers(model: nn.Module) -> list[object]:
    return [model.replaced.item(), model.written.item(), model.made]


@pytest.mark.parametrize("look", ["held", "find_nonfinite", "estimate", "fit"])
def test_a_model_that_is_looked_at_keeps_its_buffers(look, tmp_path, monkeypatch):
    monkeypatch.setenv("LOWBIT_CACHE", str(tmp_path))
    model, x = Moving(), torch.randn(3, 4)
    replaced, written = model.replaced, model.written
    if look == "held":
        with held_buffers(model):
            model(x), model(x)
    elif look == "find_nonfinite":
        assert lb.train.find_nonfinite(model, lambda: model(x).sum()) is None
    elif look == "estimate":
        lb.estimate(model, x)
    else:
        lb.fit(model, x, "100%", lambda output, batch: output.mean(), require=("fp32", "adamw"), progress=False)
    assert numbers(model) == [1.0, 1.0, None] and model.replaced is replaced and model.written is written


def states() -> tuple[object, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


@pytest.mark.thinned(6)
@pytest.mark.parametrize("look", ["seconds", "fit", "rates", "bandwidth", "doctor"])
def test_what_is_measured_draws_from_no_global_generator(look, tmp_path, monkeypatch):
    monkeypatch.setenv("LOWBIT_CACHE", str(tmp_path))
    model, x = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 8)), torch.randn(3, 8)
    before = states()
    if look == "fit":
        lb.fit(model, x, "100%", lambda output, batch: output.mean(), progress=False)
    elif look == "seconds":
        assert lb.estimate(model, x).seconds > 0
    elif look == "rates":
        rates.__wrapped__(torch.device("cpu"))
    elif look == "bandwidth":
        bandwidth = importlib.import_module("lowbit.storage.bandwidth")  # the package has a function of this name
        monkeypatch.setattr(bandwidth, "_BYTES", 1 << 16)
        bandwidth._of_directory.__wrapped__(tmp_path)
    else:
        examine()
    assert states() == before
