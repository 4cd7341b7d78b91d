"""DeepSpeed configurations in the terms of lowbit: the arguments, their calls, and the keys that have none."""

from __future__ import annotations

import json
import math
import re
from itertools import permutations
from pathlib import Path

import pytest
import torch
from torch import nn

import lowbit as lb
from lowbit.distributed import from_deepspeed
from lowbit.distributed.deepspeed.keys import KEYS

#: As articles print it.
STAGE_2 = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-5, "warmup_num_steps": 100}},
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 2e8,
        "contiguous_gradients": True,
    },
    "steps_per_print": 100,
}


def test_stage_2():
    found = from_deepspeed(STAGE_2)
    assert found.strategy == "zero2-replicated" and found.shard == {"bucket": 400_000_000}
    assert found.precision == "bf16" and found.working_copies
    assert found.optimizer == (
        lb.optim.AdamW, {"lr": 3e-5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "bits": 32}
    )  # fmt: skip
    assert (found.clip, found.micro_batches, found.batch_size, found.world_size) == (1.0, 2, 4, 8)
    assert list(found.unsupported) == ["steps_per_print"] and not found.auto and not found.notes
    assert str(found).splitlines() == [
        "lb.train.mixed_(model, 'bf16', working_copies=True)",
        "optimizer = lb.optim.AdamW(model.parameters(), lr=3e-05, betas=(0.9, 0.95), eps=1e-08, weight_decay=0.1, "
        "bits=32, master='fp32')",
        "model, optimizer = lb.distributed.shard_(model, optimizer, 'zero2-replicated', bucket=400000000)",
        "scheduler = config.schedule(optimizer)  # WarmupLR",
        "# batch_size=4 per process in each micro-batch, world_size=8",
        "# 2 micro-batches per step: lb.memory.micro_batches(batch, 2)",
        "nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # before each optimizer step",
        "# no counterpart: steps_per_print: logging is up to the training loop; lb.memory.profile and "
        "lb.distributed.traffic measure",
    ]


SAMPLES, STEPS, TOTAL = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"


@pytest.mark.parametrize(
    ("sizes", "world_size", "batch_size", "micro_batches", "processes"),
    [
        ({TOTAL: 64, SAMPLES: 4}, 8, 4, 2, 8),
        ({TOTAL: 64, STEPS: 2}, 8, 4, 2, 8),
        ({TOTAL: 64}, 8, 8, 1, 8),
        ({TOTAL: 64, SAMPLES: 4, STEPS: 2}, None, 4, 2, 8),
        ({TOTAL: 64, SAMPLES: 4, STEPS: 2}, 8, 4, 2, 8),
        ({SAMPLES: 4, STEPS: 2}, 3, 4, 2, 3),
        ({TOTAL: None, SAMPLES: 4}, None, 4, 1, None),
    ],
)
def test_two_batch_sizes_give_the_third(sizes, world_size, batch_size, micro_batches, processes):
    """The rules of DeepSpeed's ``_set_batch_related_parameters``, in every order of the keys."""
    for keys in permutations(sizes):
        found = from_deepspeed({key: sizes[key] for key in keys}, world_size=world_size)
        assert (found.batch_size, found.micro_batches, found.world_size) == (batch_size, micro_batches, processes)
        assert not found.unsupported


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({TOTAL: 64, SAMPLES: 4}, f"it gives {STEPS} if the number of processes is known; pass .*world_size"),
        ({TOTAL: 64, STEPS: 4}, f"it gives {SAMPLES} if"),
        ({TOTAL: 64}, f"it gives {SAMPLES} if"),
        ({TOTAL: 64, STEPS: "auto"}, f"the Trainer decides {STEPS}; give numbers"),
    ],
)
def test_a_total_without_the_number_of_processes(sizes, reason, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    found = from_deepspeed(sizes)
    assert re.match(reason, found.unsupported[TOTAL]) and found.world_size is None


def test_the_number_of_processes_is_that_of_the_group_or_of_torchrun(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert from_deepspeed({TOTAL: 64, SAMPLES: 4}).micro_batches == 4
    monkeypatch.delenv("WORLD_SIZE")
    with lb.distributed.start(device="cpu"):
        assert from_deepspeed({TOTAL: 64, SAMPLES: 4}).micro_batches == 16
        assert from_deepspeed({TOTAL: 64, SAMPLES: 4}, world_size=2).micro_batches == 8


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    ("config", "each"),
    [
        ({"bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}}, 2),
        ({"bf16": {"enabled": True}, "optimizer": {"type": "SGD"}}, 4),
        ({"bf16": {"enabled": True}}, 4),
        ({"fp16": {"enabled": True}, "optimizer": {"type": "AdamW"}}, 4),
        ({"optimizer": {"type": "AdamW"}}, 4),
    ],
)
def test_buckets_have_as_many_elements_as_in_deepspeed(stage, config, each):
    """A gradient has the dtype of its parameter, which is in 16 bits only with working copies."""
    config = {"zero_optimization": {"reduce_bucket_size": 5e5, "stage": stage}, **config}
    found = from_deepspeed(config)
    assert found.shard["bucket"] == 500_000 * each
    with lb.distributed.start(seed=0, device="cpu"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        make = None if found.optimizer else lambda parameters: torch.optim.SGD(parameters, lr=0.1)
        model, optimizer = found.apply_(model, make)
        model(torch.zeros(2, 4)).sum().backward()
        assert {parameter.grad.element_size() for parameter in model.parameters() if parameter.dim() > 1} == {each}
        del model, optimizer


def test_stage_3_from_a_file(tmp_path: Path):
    zero = {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/local", "pin_memory": True},
        "offload_param": {"device": "cpu"},
        "stage3_prefetch_bucket_size": 5e7,
        "stage3_param_persistence_threshold": 1e5,
        "reduce_bucket_size": 5e8,
    }
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps({"zero_optimization": zero, "bf16": {"enabled": True}, "communication_data_type": "fp32"})
    )
    found = from_deepspeed(path)
    assert found.strategy == "zero3" and not found.working_copies
    assert found.shard == {"precision": torch.bfloat16, "reduce": torch.float32, "offload": True, "prefetch": 1}
    assert set(found.unsupported) == {
        f"zero_optimization.{key}"
        for key in ("offload_optimizer.device", "stage3_param_persistence_threshold", "reduce_bucket_size")
    }
    assert "precision=torch.bfloat16" in str(found) and "optimizer = ...  # the configuration leaves it" in str(found)
    assert from_deepspeed(str(path)) == found


@pytest.mark.parametrize("stage, strategy", [(0, "ddp"), (1, "zero1"), (2, "zero2-replicated"), (3, "zero3")])
def test_stages(stage: int, strategy: str):
    assert from_deepspeed({"zero_optimization": {"stage": stage}}).strategy == strategy


def test_values_that_the_trainer_decides():
    config = {
        "fp16": {"enabled": "auto"},
        "optimizer": {"type": "Adam", "params": {"lr": "auto", "betas": "auto", "eps": 1e-6}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
    }
    found = from_deepspeed(config)
    assert set(found.auto) == {
        "fp16.enabled", "gradient_clipping", "zero_optimization.reduce_bucket_size", "optimizer.params.lr",
        "optimizer.params.betas", "scheduler.params.total_num_steps",
    }  # fmt: skip
    assert found.optimizer == (lb.optim.AdamW, {"eps": 1e-6, "weight_decay": 0.0, "bits": 32})
    assert found.clip is None and found.precision is None
    assert "# decided by the Trainer of transformers: gradient_clipping" in str(found)


def test_fp16_other_optimizers_checkpoints_and_unknown_keys():
    found = from_deepspeed({
        "fp16": {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 2},
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 1, "offload_optimizer": {"device": "cpu"}, "overlap_com": True, "overlap_comm": False,
        },
        "activation_checkpointing": {"number_checkpoints": 4, "cpu_checkpointing": True, "partition_activations": True},
        "tensorboard": {"enabled": True, "job_name": ""},
    })  # fmt: skip
    assert found.scaler == {"init_scale": 4096.0, "growth_interval": 500}
    assert found.loss_scaler().get_scale() == 4096.0
    assert found.checkpoint == "segments:4" and found.checkpoint_to == "cpu"
    assert (
        "zero1 keeps its share of the states on the device"
        in found.unsupported["zero_optimization.offload_optimizer.device"]
    )
    assert "did you mean zero_optimization.overlap_comm" in found.unsupported["zero_optimization.overlap_com"]
    assert {"optimizer.type", "fp16.hysteresis", "tensorboard.enabled", "zero_optimization.overlap_comm",
            "activation_checkpointing.partition_activations"} < set(found.unsupported)  # fmt: skip
    with pytest.raises(ValueError, match="no optimizer; pass apply_"):
        found.apply_(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"zero_optimization": {"stage": 4}}, "stage must be one of 0, 1, 2, 3, got 4"),
        ({"gradient_clipping": "one"}, "gradient_clipping must be a number from 0, got 'one'"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "both enabled"),
        ([], "expected a JSON object"),
        ({"communication_data_type": "int8"}, "must be one of fp16"),
        ({TOTAL: 10, SAMPLES: 4}, f"{TOTAL} must be a multiple of 4 with {SAMPLES}=4, got 10; correct one"),
        ({TOTAL: 0}, f"{TOTAL} must be a number from 1, got 0"),
    ],
)
def test_values_that_deepspeed_does_not_have(config, message):
    with pytest.raises(ValueError, match=message):
        from_deepspeed(config)


def test_batch_sizes_that_contradict_the_number_of_processes():
    with pytest.raises(
        ValueError, match=f"{TOTAL} must be 16 with {SAMPLES}=4, {STEPS}=2, world_size=2, got 64; correct one"
    ):
        from_deepspeed(STAGE_2, world_size=2)
    with pytest.raises(ValueError, match="world_size must be a whole number from 1, got 0"):
        from_deepspeed(STAGE_2, world_size=0)


def test_schedules():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    params = {"warmup_max_lr": 0.1, "warmup_num_steps": 4, "total_num_steps": 8, "warmup_type": "linear"}
    scheduler = from_deepspeed({"scheduler": {"type": "WarmupDecayLR", "params": params}}).schedule(optimizer)
    rates = []
    for _ in range(9):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0, 0.025, 0.05, 0.075, 0.1, 0.075, 0.05, 0.025, 0])
    del params["total_num_steps"], params["warmup_type"]
    scheduler = from_deepspeed({"scheduler": {"type": "WarmupLR", "params": params}}).schedule(optimizer)
    assert optimizer.param_groups[0]["lr"] == 0
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * math.log(2) / math.log(4))
    assert from_deepspeed({}).schedule(optimizer) is None


def test_apply_trains():
    torch.manual_seed(0)
    for config in ({**STAGE_2, TOTAL: 8}, {**STAGE_2, TOTAL: 8, "zero_optimization": {"stage": 3}}):
        with lb.distributed.start(seed=0, device="cpu"):
            config = from_deepspeed(config)
            model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.SiLU()) for _ in range(3)))
            model, optimizer = config.apply_(model)
            scheduler, losses = config.schedule(optimizer), []
            x = torch.randn(8, 16)
            for _ in range(10):
                for group in optimizer.param_groups:
                    group["lr"] = 1e-2
                loss = (model(x) - x).square().mean()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), config.clip)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                losses.append(loss.item())
            assert losses[-1] < 0.9 * losses[0]
            del model, optimizer, scheduler, loss


def test_every_key_says_what_it_becomes():
    assert all(row.about for row in KEYS.values())
