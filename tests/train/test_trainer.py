"""Training with a state in transformers' Trainer: accumulation, checkpointing, and a run that resumes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.bits import same_bits
from torch import Tensor

import lowbit as lb

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

DELAYED = lb.Cast("fp8_e4m3:tensor", scale="delayed", history=3)
DRAWN = lb.Gemm(lb.Cast("fp8_e5m2:tensor", scale="delayed", rounding="stochastic", history=3), "reuse")
RECIPE = lb.Recipe(lb.Gemm(DELAYED, DELAYED), DRAWN, DRAWN, name="both")


class Attach(transformers.TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, optimizer=None, **more) -> None:
        lb.train.state(model).attach(optimizer)


def trained(path: Path, resume: bool = False, recompute: bool = False) -> list[Tensor]:
    transformers.set_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    )
    lb.train.prepare_(model, RECIPE)
    settings = transformers.TrainingArguments(
        str(path), max_steps=4, save_steps=2, gradient_accumulation_steps=2, gradient_checkpointing=recompute,
        per_device_train_batch_size=2, lr_scheduler_type="constant", use_cpu=True, disable_tqdm=True, report_to=[],
    )  # fmt: skip
    rows = torch.randint(64, (32, 8), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = transformers.Trainer(model, settings, train_dataset=data, callbacks=[Attach()])
    trainer.train(resume_from_checkpoint=str(path / "checkpoint-2") if resume else None)
    assert lb.train.state(model).step == 4
    return list(model.state_dict().values())


def test_a_run_resumes_and_recomputes_in_the_same_bits(tmp_path):
    whole = trained(tmp_path)
    assert all(map(same_bits, trained(tmp_path, resume=True), whole))
    assert all(map(same_bits, trained(tmp_path / "other", recompute=True), whole))
