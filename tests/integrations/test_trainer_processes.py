"""transformers' Trainer on two processes, with DDP and with FSDP2: the losses and weights of a loop with ``shard_``."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.bits import same_bits
from support.processes import run_processes
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import lowbit as lb

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

STEPS, ROWS = 4, 2
FSDP = {"fsdp": True, "fsdp_config": {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
#: How gradients are clipped too: the norm of shards is accelerate's own, which rounds otherwise than torch's.
MODES: dict[str, dict[str, Any]] = {"ddp": {"max_grad_norm": 1.0}, "zero3": {**FSDP, "max_grad_norm": 0.0}}


class Texts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4 * STEPS * ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def network() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, tie_word_embeddings=False, **shape))
    lb.train.prepare_(model, "fp8")
    return model


def whole(model: nn.Module) -> list[Tensor]:
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in model.parameters()]


def _trainer(path: str, model: nn.Module, batches: list[Tensor], steps: int, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    model.register_forward_pre_hook(
        lambda _, args, kwargs: batches.append(kwargs["input_ids"].clone()), with_kwargs=True
    )
    options = {"save_strategy": "no", **options}
    arguments = TrainingArguments(
        path, per_device_train_batch_size=ROWS, max_steps=steps, logging_steps=1, report_to=[], use_cpu=True,
        lr_scheduler_type="constant", disable_tqdm=True, **options,
    )  # fmt: skip
    optimizer = lb.optim.AdamW8bit(model.parameters(), lr=1e-2)
    return Trainer(model=model, args=arguments, train_dataset=Texts(), optimizers=(optimizer, None))


def as_torchrun_does(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    port = Path(path, "port").read_text()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true"}


def leave() -> None:
    """Together, once nothing is left that uses the group: a reducer that outlives it waits for ever."""
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def _train(rank: int, path: str, way: str) -> None:
    as_torchrun_does(rank, path)
    _compare(path, way)
    leave()


def _compare(path: str, way: str) -> None:
    batches: list[Tensor] = []
    trainer = _trainer(f"{path}/{way}", network(), batches, STEPS, **MODES[way])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    found = whole(trainer.model)
    model = network()
    model, optimizer = lb.distributed.shard_(model, lb.optim.AdamW8bit(model.parameters(), lr=1e-2), way)
    by_hand = []
    for tokens in batches[:STEPS]:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        if MODES[way]["max_grad_norm"]:
            nn.utils.clip_grad_norm_(model.parameters(), MODES[way]["max_grad_norm"])
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        by_hand.append(float(mean) / 2)
    assert losses == pytest.approx(by_hand, rel=1e-6), way
    assert all(map(same_bits, found, whole(model))), way


def _resume(rank: int, path: str) -> None:
    as_torchrun_does(rank, path)
    _cut_and_go_on(path)
    leave()


def _cut_and_go_on(path: str) -> None:
    """Four steps at once, and two with a checkpoint and two from it."""
    straight = _trainer(f"{path}/straight", network(), [], STEPS)
    straight.train()
    first = _trainer(f"{path}/cut", network(), [], STEPS, save_strategy="steps", save_steps=2)
    first.train()
    again = _trainer(f"{path}/cut", network(), [], STEPS)
    again.train(resume_from_checkpoint=f"{path}/cut/checkpoint-2")
    assert all(map(same_bits, whole(straight.model), whole(again.model)))


def with_port(path: Path) -> tuple[str]:
    import socket

    with socket.socket() as asked:
        asked.bind(("localhost", 0))
        (path / "port").write_text(str(asked.getsockname()[1]))
    return (str(path),)


def test_trainer_has_the_bits_of_a_loop_with_shard(tmp_path: Path):
    for way in MODES:
        run_processes(_train, (*with_port(tmp_path), way))


def test_a_checkpoint_of_two_processes_resumes_in_every_bit(tmp_path: Path):
    run_processes(_resume, with_port(tmp_path))
