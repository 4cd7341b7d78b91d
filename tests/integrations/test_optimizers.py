"""Optimizers of few bits in the training loops of transformers and Accelerate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.bits import same_bits
from torch import nn

import lowbit as lb

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

LENGTH = 16


def model() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64,
    )  # fmt: skip
    made: nn.Module = transformers.LlamaForCausalLM(config)
    return made


def data() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 128, (32, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def trainer(directory: Path, steps: int, cls: type = lb.optim.AdamW8bit) -> transformers.Trainer:
    arguments = transformers.TrainingArguments(
        str(directory), max_steps=steps, per_device_train_batch_size=4, save_steps=3, report_to=[], seed=3,
        use_cpu=True, disable_tqdm=True, lr_scheduler_type="constant", max_grad_norm=1.0, gradient_accumulation_steps=2,
    )  # fmt: skip
    return transformers.Trainer(
        model(), arguments, train_dataset=data(), optimizer_cls_and_kwargs=(cls, {"lr": 1e-2, "weight_decay": 0.1})
    )


@pytest.mark.thinned(2)
@pytest.mark.parametrize("cls", [lb.optim.AdamW8bit, lb.optim.Lion4bit])
def test_trainer_trains_and_resumes_in_every_bit(tmp_path, cls):
    straight = trainer(tmp_path / "straight", 6, cls)
    straight.train()
    assert isinstance(straight.optimizer.optimizer, cls)
    losses = [row["loss"] for row in straight.state.log_history if "loss" in row]
    assert all(loss < 5.5 for loss in losses)
    resumed = trainer(tmp_path / "straight", 6, cls)
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-3"))
    for a, b in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert same_bits(a.detach(), b.detach())


def test_accelerate_prepares_saves_and_loads(tmp_path):
    from accelerate import Accelerator

    def steps(accelerator, net, optimizer, which: range) -> None:
        for step in which:
            ids = torch.stack([row["input_ids"] for row in data()[4 * step : 4 * step + 4]])
            accelerator.backward(net(input_ids=ids, labels=ids).loss)
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    accelerator = Accelerator(cpu=True)
    plain = model()
    net, optimizer = accelerator.prepare(plain, lb.optim.AdamW8bit(plain.parameters(), lr=1e-2))
    steps(accelerator, net, optimizer, range(2))
    accelerator.save_state(str(tmp_path))
    steps(accelerator, net, optimizer, range(2, 4))
    straight = [p.detach().clone() for p in net.parameters()]
    accelerator.load_state(str(tmp_path))
    steps(accelerator, net, optimizer, range(2, 4))
    assert all(same_bits(a, b.detach()) for a, b in zip(straight, net.parameters(), strict=True))
