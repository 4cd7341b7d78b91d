"""transformers' Trainer with its own gradient checkpointing and ``checkpoint_`` on one model."""

from __future__ import annotations

import warnings

import pytest
import torch

import lowbit as lb

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


def trained(tmp_path, policy, own):
    """Losses and weights of three steps of a tiny Llama."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, attention_dropout=0.1,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    calls = []
    model.model.layers[1].self_attn.q_proj.register_forward_hook(lambda *_: calls.append(1))
    if policy is not None:
        lb.memory.checkpoint_(model, policy)
    rows = [{"input_ids": torch.arange(i, i + 16) % 64, "labels": torch.arange(i, i + 16) % 64} for i in range(12)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=4, max_steps=3, gradient_checkpointing=own,
        logging_steps=1, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, seed=1,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, [p.detach().clone() for p in model.parameters()], len(calls)


@pytest.mark.slow
def test_they_do_not_fight(tmp_path):
    losses, weights, once = trained(tmp_path, None, own=False)
    for policy, own in ((None, True), ("block", False), ("block", True), ("sqrt", True)):
        again, others, calls = trained(tmp_path, policy, own)
        assert again == losses, (policy, own)
        assert all(map(torch.equal, others, weights)), (policy, own)
        assert calls == 2 * once, "a block is computed twice, not three times"
