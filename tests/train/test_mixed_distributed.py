"""Loss scaling and mixed precision in two processes: steps are skipped together, in DDP and in FSDP2."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.bits import same_bits
from support.processes import run_processes
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import lowbit as lb

WORLD = 2


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(15, 9), nn.LayerNorm(9), nn.Linear(9, 1))


def inputs(rank: int, step: int) -> Tensor:
    return torch.randn(4, 15, generator=torch.Generator().manual_seed(10 * step + rank))


def whole(model: nn.Module) -> list[Tensor]:
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in model.parameters()]


def spoil(model: nn.Module, rank: int) -> None:
    """An Inf in what rank 1 alone holds of the first gradient."""
    grad = model[0].weight.grad
    if rank == 1:
        (grad.to_local() if hasattr(grad, "to_local") else grad)[0, 0] = float("inf")


def step(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: lb.train.LossScaler, rank: int, number: int,
         bad: bool = False) -> None:  # fmt: skip
    optimizer.zero_grad()
    scaler.scale(model(inputs(rank, number)).square().mean()).backward()
    if bad:
        spoil(model, rank)
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()


def _sharded(rank: int) -> None:
    """FSDP2: a bad gradient in one shard skips the step of all; without one, steps are those of one process."""
    model, plain = network(), network()
    for one in (model, plain):
        lb.train.mixed_(one, "bf16")
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = lb.optim.AdamW8bit(model.parameters(), lr=1e-2)
    single = lb.optim.AdamW8bit(plain.parameters(), lr=1e-2)
    scaler = lb.train.LossScaler(init_scale=2.0**8)
    for number in range(3):
        before = whole(model)
        step(model, optimizer, scaler, rank, number, bad=number == 1)
        assert all(map(same_bits, before, whole(model))) == (number == 1)
        if number != 1:
            single.zero_grad()
            losses = [plain(inputs(r, number)).square().mean() for r in range(WORLD)]
            torch.stack(losses).mean().backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            single.step()
    for mine, other in zip(whole(model), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other.detach(), rtol=1e-3, atol=1e-3)
    assert (scaler.skipped, scaler.get_scale()) == (1, 2.0**7)
    wrong = network()
    fully_shard(wrong)
    for options in ({"working_copies": True}, {"fp32_gradients": True}):
        model = wrong.bfloat16() if "fp32_gradients" in options else wrong
        with pytest.raises(ValueError, match=r"got shards \(DTensor\); call mixed_ before fully_shard"):
            lb.train.mixed_(model, "bf16", **options)


def _only_here(rank: int) -> None:
    """Without a wrapper: processes agree, and each says that it gave up where one's loss is NaN."""
    model, scaler = network(), lb.train.LossScaler()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    before = whole(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for number in range(8):
            optimizer.zero_grad()
            factor = float("nan") if rank == 1 else 1.0
            scaler.scale(model(inputs(rank, number)).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scaler.gave_up and scaler.skipped == 8 and len(said) == 1 and "the loss itself" in str(said[0].message)
    assert all(map(same_bits, before, whole(model)))


def _replicated(rank: int) -> None:
    """DDP around a model in fp16, and around working copies in bf16; gradients in fp32 are refused."""
    for precision, copies in (("fp16", False), ("bf16", True)):
        model = network()
        lb.train.mixed_(model, precision, working_copies=copies)
        wrapped = DDP(model)
        optimizer = lb.optim.AdamW(model.parameters(), lr=1e-2, master="fp32")
        scaler = lb.train.LossScaler(enabled=precision == "fp16", init_scale=2.0**8)
        for number in range(3):
            optimizer.zero_grad()
            scaler.scale(wrapped(inputs(rank, number)).square().mean()).backward()
            if number == 1 and not copies:
                spoil(model, rank)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.skipped == 1 - copies
        for value in whole(model):
            parts = [torch.empty_like(value) for _ in range(WORLD)]
            dist.all_gather(parts, value)
            assert all(same_bits(part, value) for part in parts)
    model = network()
    lb.train.mixed_(model, "fp16", working_copies=True)
    with pytest.raises(ValueError, match="DistributedDataParallel reduces gradients in the dtype of their parameters"):
        DDP(model)(inputs(rank, 0))


def _checks(rank: int, path: Path) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "train.mixed_: this processor")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{path}/meeting", rank=rank, world_size=WORLD)
    for check in (_sharded, _only_here, _replicated):
        check(rank)
    dist.destroy_process_group()


def test_two_processes(tmp_path):
    run_processes(_checks, (tmp_path,), WORLD)
