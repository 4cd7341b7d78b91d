"""nn.MultiheadAttention in low precision on two processes: DDP, FSDP2 and gathered weights have the bits of one."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.bits import assert_same_bits
from support.processes import run_processes
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

import lowbit as lb
from lowbit.train import TrainMultiheadAttention

WORLD, WIDTH = 2, 32


def network(recipe: str) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, 0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    lb.train.prepare_(model, recipe)
    assert isinstance(model.layers[0].self_attn, TrainMultiheadAttention)
    return model


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def gradients(model: nn.Module) -> list[Tensor]:
    found: list[Any] = [p.grad for p in model.parameters()]
    return [(g.full_tensor() if isinstance(g, DTensor) else g).detach().clone() for g in found]


def trained(model: nn.Module, called: nn.Module, rank: int) -> list[Tensor]:
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(3):
        called(batch(rank, step))[..., ::2].square().mean().backward()
        seen += gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return seen


def alone(model: nn.Module) -> list[Tensor]:
    """Both batches of each step, one after the other."""
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(3):
        parts = []
        for rank in range(WORLD):
            parts.append(
                torch.autograd.grad(model(batch(rank, step))[..., ::2].square().mean(), list(model.parameters()))
            )
        for param, first, second in zip(model.parameters(), *parts, strict=True):
            param.grad = (first + second) / 2
        seen += gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return seen


def assert_same(found: list[Tensor], expected: list[Tensor], what: str) -> None:
    for number, (mine, other) in enumerate(zip(found, expected, strict=True)):
        assert_same_bits(mine, other, f"{what}, {number}")


def _checks(rank: int, path: Path) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{path}/meeting", rank=rank, world_size=WORLD)
    for recipe in ("fp8", "int8", "mxfp8", "fp8-tensor"):
        plain = network(recipe)
        expected = alone(copy.deepcopy(plain))
        model = copy.deepcopy(plain)
        assert_same(trained(model, DDP(model), rank), expected, f"{recipe}, ddp")
        for checkpointed in (False, True):
            model = copy.deepcopy(plain)
            if checkpointed:
                lb.memory.checkpoint_(model, "attention")
            for layer in model.layers:
                fully_shard(layer)
            fully_shard(model)
            assert_same(trained(model, model, rank), expected, f"{recipe}, fsdp, {checkpointed}")
    model = network("fp8")
    expected = alone(copy.deepcopy(model))
    report = lb.distributed.all_gather_(model, "fp8")
    assert set(report.converted) == {f"layers.{i}.linear{j}" for i in (0, 1) for j in (1, 2)}
    assert all("MultiheadAttention" in report.left[f"layers.{i}.self_attn"] for i in (0, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = lb.distributed.shard_(model, optimizer, "zero3")
    seen = []
    for step in range(3):
        model(batch(rank, step))[..., ::2].square().mean().backward()
        seen += gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    assert_same(seen, expected, "all_gather_")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes(tmp_path: Path):
    run_processes(_checks, (tmp_path,), WORLD)
