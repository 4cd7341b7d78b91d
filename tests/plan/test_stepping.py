"""Optimizer steps over some of many alike blocks: extended, they equal steps over all of them."""

from __future__ import annotations

import pytest
import torch

from lowbit.demo.gpt import GPT, GPTConfig
from lowbit.plan.fitting.predict import Predictor
from lowbit.plan.fitting.stepping import Blocks
from lowbit.plan.settings import TrainingSettings
from lowbit.plan.subject import Subject

ROWS = torch.zeros(2, 16, dtype=torch.long)

SETTINGS = [
    {}, {"bits": 8}, {"bits": 4}, {"precision": "bf16", "bits": 8}, {"precision": "bf16", "master": "stochastic"},
    {"optimizer": "adafactor", "bits": 8}, {"optimizer": "muon", "bits": 8}, {"optimizer": "lion", "bits": 4},
    {"adapters": 4}, {"adapters": 4, "base": "nf4", "bits": 8}, {"gpus": 4, "strategy": "zero2", "bits": 8},
    {"gpus": 4, "strategy": "zero1"},
]  # fmt: skip


def gpt(layers: int) -> GPT:
    return GPT(GPTConfig(vocab=64, layers=layers, heads=2, dim=64, hidden=128))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("changes", SETTINGS, ids=str)
def test_a_step_over_some_blocks_is_extended_to_all(changes):
    if "adapters" in changes:
        pytest.importorskip("peft")
    settings, model = TrainingSettings(**changes), gpt(9)
    some, every = Predictor(Subject(model, ROWS)), Predictor(Subject(model, ROWS))
    vars(every)["_alike"] = None
    extended, expected = some._step(settings), every._step(settings)
    assert some._alike is not None
    assert extended._replace(seconds=0.0) == expected._replace(seconds=0.0)


def test_few_blocks_and_blocks_that_differ_are_all_stepped():
    model = gpt(9)
    model.blocks[4] = torch.nn.Sequential(model.blocks[4])
    assert Blocks.of(gpt(5)) is None and Blocks.of(model) is None
    assert len(Blocks.of(gpt(9)).names) == 9
