"""Training with a state in transformers' Trainer and in Accelerate, by ``prepare_`` alone: accumulation, checkpointing,
and a run that resumes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.bits import same_bits
from torch import Tensor, nn

import lowbit as lb

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

DELAYED = lb.Cast("fp8_e4m3:tensor", scale="delayed", history=3)
DRAWN = lb.Gemm(lb.Cast("fp8_e5m2:tensor", scale="delayed", rounding="stochastic", history=3), "reuse")
RECIPE = lb.Recipe(lb.Gemm(DELAYED, DELAYED), DRAWN, DRAWN, name="both")
ROWS = torch.randint(64, (32, 8), generator=torch.Generator().manual_seed(0))


def llama() -> nn.Module:
    transformers.set_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    )
    lb.train.prepare_(model, RECIPE)
    return model


def by_trainer(path: Path, resume: bool = False, recompute: bool = False) -> list[Tensor]:
    model = llama()
    settings = transformers.TrainingArguments(
        str(path), max_steps=4, save_steps=2, gradient_accumulation_steps=2, gradient_checkpointing=recompute,
        per_device_train_batch_size=2, lr_scheduler_type="constant", use_cpu=True, disable_tqdm=True, report_to=[],
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in ROWS]
    trainer = transformers.Trainer(model, settings, train_dataset=data)
    trainer.train(resume_from_checkpoint=str(path / "checkpoint-2") if resume else None)
    return finished(model)


def by_accelerate(path: Path, resume: bool = False, recompute: bool = False) -> list[Tensor]:
    model = llama()
    if recompute:
        model.gradient_checkpointing_enable()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    wrapped, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    if resume:
        accelerator.load_state(str(path / "half"))
    for number, tokens in enumerate(ROWS[:16].split(2)):
        if resume and number < 4:
            continue
        with accelerator.accumulate(wrapped):
            accelerator.backward(wrapped(tokens, labels=tokens).loss)
            optimizer.step()
            optimizer.zero_grad()
        if number == 3:
            accelerator.save_state(str(path / "half"))
    return finished(model)


def finished(model: nn.Module) -> list[Tensor]:
    assert lb.train.state(model).step == 4
    return list(model.state_dict().values())


@pytest.mark.thinned(2)
@pytest.mark.parametrize("trained", [by_trainer, by_accelerate])
def test_a_run_resumes_and_recomputes_in_the_same_bits(tmp_path, trained):
    whole = trained(tmp_path)
    assert all(map(same_bits, trained(tmp_path, resume=True), whole))
    assert all(map(same_bits, trained(tmp_path / "other", recompute=True), whole))
