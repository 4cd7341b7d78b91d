"""Plans that fuse the loss of hand-written models."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowbit as lb
from lowbit.plan.checklist import checklist
from lowbit.tiled.fused_loss import why_not_fused

VOCABULARY = 6000
IDS = torch.randint(VOCABULARY, (8, 48), generator=torch.Generator().manual_seed(0))
PLAIN = ("fp32", "adamw", "everything kept", "memory", "activations in memory", "own attention")


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 2, 64, dropout=0, batch_first=True) for _ in range(2)
        )
        self.output = nn.Linear(32, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.output(x)


def loss(output: Tensor, batch: Tensor) -> Tensor:
    return F.cross_entropy(output[:, :-1].reshape(-1, VOCABULARY), batch[:, 1:].reshape(-1))


def made() -> nn.Module:
    torch.manual_seed(0)
    return Words()


@pytest.mark.slow
def test_a_plan_fuses_the_loss_of_a_hand_written_model_and_trains_within_its_peak(tmp_path):
    model = made()
    plain = copy.deepcopy(model)
    plan = lb.fit(model, IDS, "60%", loss, require=PLAIN, exclude=("micro-batches",), progress=False)
    assert plan.settings.fused_loss and "fused loss" in str(plan)
    run = plan.apply_(model, lr=1e-3, directory=tmp_path)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        value = loss(plain(IDS), IDS)
        value.backward()
        optimizer.step()
        assert run.step(IDS) == pytest.approx(value.item(), rel=1e-6)
    profiled = lb.memory.profile(run.model, IDS, run.step)
    held = profiled.peak_bytes - profiled.by_kind.get("other", 0)
    assert 0.97 * plan.peak_bytes <= held <= 1.01 * plan.peak_bytes and held <= plan.budget


def test_applicability_is_decided_by_the_loss():
    model = made()
    assert why_not_fused(model, IDS, loss) is None and why_not_fused(model, IDS, None) is None
    for other, why in (
        (lambda output, batch: output.square().mean(), "square reads its output"),
        (lambda output, batch: F.cross_entropy(output.log_softmax(-1).mT, batch), "log_softmax reads"),
        (lambda output, batch: torch.zeros((), requires_grad=True), "nothing reads its output"),
    ):
        assert why in str(why_not_fused(model, IDS, other))
    assert "structure" in str(why_not_fused(nn.Linear(3, 3), torch.ones(2, 3), None))
    assert why_not_fused(model.eval(), IDS, loss) == "it is in evaluation mode"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:train.mixed_")
def test_the_checklist_advises_it():
    row = next(row for row in checklist(made(), IDS, loss).rows if row.technique == "fused loss")
    assert row.saves > 2 * 4 * IDS.numel() * VOCABULARY * 0.7 and row.call == "lb.memory.fuse_loss_(model)"


def test_plans_do_not_shard_the_last_layer_of_a_fused_loss():
    with pytest.raises(ValueError, match="fully_shard"):
        lb.fit(made(), IDS, "100%", loss, gpus=2, require=(*PLAIN, "fused loss", "zero3"), progress=False)
