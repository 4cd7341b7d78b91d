"""Estimates of torch's transformer layers whose attention trains in low precision are what a step holds."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowbit as lb
from lowbit.memory import profile
from lowbit.plan.fitting import Run
from lowbit.plan.fitting.predict import Predictor
from lowbit.plan.settings import TrainingSettings
from lowbit.plan.subject import Subject
from lowbit.train import TrainMultiheadAttention

VOCAB, WIDTH = 256, 64
BATCH = torch.randint(VOCAB, (4, 48), generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 128, 0.0, batch_first=True)
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.body = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(self.embed(tokens)))
        return logits


def loss(logits: Tensor, batch: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch.flatten())


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", [None, "attention", "mlp"])
def test_a_step_holds_what_is_predicted(checkpoint, tmp_path):
    settings = TrainingSettings(recipe="fp8", checkpoint=checkpoint)
    predicted = Predictor(Subject(Model(), BATCH, loss)).whole(settings)
    run = Run(Model(), settings, loss, tmp_path, {})
    assert any(isinstance(module, TrainMultiheadAttention) for module in run.model.modules())
    for _ in range(2):
        run.step(BATCH)
    gc.collect()
    found = profile(run.model, BATCH, run.step)
    held = found.peak_bytes - found.by_kind.get("other", 0)
    assert 0.98 * held <= predicted.peak_bytes <= 1.02 * held


@pytest.mark.slow
def test_estimates_and_plans_convert_attention():
    plain = Model()
    estimated = lb.estimate(plain, BATCH, loss=loss, recipe="fp8")
    prepared = copy.deepcopy(plain)
    lb.train.prepare_(prepared, "fp8")
    assert estimated.peak_bytes == lb.estimate(prepared, BATCH, loss=loss).peak_bytes
    assert not any(isinstance(module, TrainMultiheadAttention) for module in plain.modules())
    plan = lb.fit(plain, BATCH, "100%", loss, require=("fp8", "attention"), progress=False)
    run = plan.apply_(plain, lr=1e-3)
    assert sum(isinstance(module, TrainMultiheadAttention) for module in plain.modules()) == 3
    assert run.step(BATCH) > run.step(BATCH)
