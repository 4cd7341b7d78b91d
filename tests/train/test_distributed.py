"""The state of training in two processes: replicas, histories reduced over them, FSDP2 and distributed checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.bits import same_bits
from support.processes import run_processes
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import lowbit as lb
from lowbit.train import State

WORLD, MICRO_BATCHES = 2, 3
E4M3 = lb.Cast("fp8_e4m3:tensor", scale="delayed", history=3)
E5M2 = lb.Cast("fp8_e5m2:tensor", scale="delayed", rounding="stochastic", history=3)
RECIPE = lb.Recipe(lb.Gemm(E4M3, E4M3), lb.Gemm(E5M2, "reuse"), lb.Gemm(E5M2, "reuse"), name="both")


def of_all(value: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(value) for _ in range(WORLD)]
    dist.all_gather(parts, value.contiguous())
    return parts


def network(sharded: bool = False) -> tuple[nn.Module, torch.optim.Optimizer, State]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16))
    lb.train.prepare_(model, RECIPE, skip=())
    if sharded:
        for module in (model[0], model[2], model):
            fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = lb.train.state(model)
    return model, optimizer, state


def inputs(rank: int, step: int, micro_batch: int) -> Tensor:
    """Larger on rank 0 in the first micro-batch, on rank 1 in the others."""
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * rank + 10 * step + micro_batch))
    return x * (4 if rank == min(micro_batch, 1) else 1) * 2**step


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, which: range) -> None:
    for step in which:
        for micro_batch in range(MICRO_BATCHES):
            model(inputs(rank, step, micro_batch)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _data_parallel(rank: int, path: Path) -> None:
    model, optimizer, state = network()  # the state follows the optimizer by itself, and reduces magnitudes
    wrapped = DDP(model)
    seen: list[tuple[int, Tensor]] = []
    model[2].register_forward_hook(lambda *_: seen.append((int(state.micro_batch), state.keys.clone())))
    steps(wrapped, optimizer, rank, range(2))
    assert state.replica == rank and [number for number, _ in seen] == [0, 1, 2] * 2
    for _, keys in seen:  # of one micro-batch: other bits for the data of another replica, the same for the weight
        (data, weight), (other_data, other_weight) = of_all(keys)
        assert torch.equal(weight, other_weight) and not torch.equal(data, other_data)
    assert len({tuple(keys[0].tolist()) for _, keys in seen}) == len(seen)
    for value in model.state_dict().values():
        assert all(same_bits(value, other) for other in of_all(value))
    largest = torch.stack(
        [inputs(r, step, m).abs().max() for step in (1, 0) for r in range(WORLD) for m in range(MICRO_BATCHES)]
    )
    assert same_bits(state.histories["0/output.a"][:2], largest.reshape(2, -1).amax(1))
    state.set_replica(7)
    (own, _), (other, _) = of_all(state.keys)
    assert state.replica == 7 and torch.equal(own, other)


def _reduced_by_hand(rank: int, path: Path) -> None:
    model, optimizer, state = network()
    model(inputs(rank, 0, 0))
    first, second = of_all(state.pending)
    assert not torch.equal(first, second)
    state.reduce_amax(dist.group.WORLD)
    assert same_bits(state.pending, torch.maximum(first, second))
    state.attach(optimizer, reduce_amax=False)
    model(inputs(rank, 1, rank)).sum().backward()
    optimizer.step()
    first, second = of_all(state.amax)
    assert not torch.equal(first, second)


def _sharded(rank: int, path: Path) -> None:
    whole, optimizer, state = network(sharded=True)
    state.attach(optimizer)
    steps(whole, optimizer, rank, range(4))
    half, optimizer, state = network(sharded=True)
    state.attach(optimizer)
    steps(half, optimizer, rank, range(2))
    parts, moments = get_state_dict(half, optimizer)
    kept = [name.removeprefix("0.lowbit_state.") for name in parts if "lowbit" in name]
    assert kept == ["rng", "amax", "streams"]
    dcp.save({"model": parts, "optimizer": moments}, checkpoint_id=path / "saved")
    again, optimizer, state = network(sharded=True)
    state.attach(optimizer)
    steps(again, optimizer, rank, range(1))
    parts, moments = get_state_dict(again, optimizer)
    dcp.load({"model": parts, "optimizer": moments}, checkpoint_id=path / "saved")
    set_state_dict(again, optimizer, model_state_dict=parts, optim_state_dict=moments)
    assert (state.step, state.replica, int(state.micro_batch)) == (2, rank, -1)
    steps(again, optimizer, rank, range(2, 4))
    for value, expected in zip(again.state_dict().values(), whole.state_dict().values(), strict=True):
        value, expected = (t.full_tensor() if hasattr(t, "full_tensor") else t for t in (value, expected))
        assert same_bits(value, expected)


def _checks(rank: int, path: Path) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{path}/meeting", rank=rank, world_size=WORLD)
    for check in (_data_parallel, _reduced_by_hand, _sharded):
        check(rank, path)
    dist.destroy_process_group()


def test_two_processes(tmp_path):
    run_processes(_checks, (tmp_path,), WORLD)
