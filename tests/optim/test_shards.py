"""Every bit of a step is that of the whole tensor, on 1, 2 and 4 processes, however it is cut."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.bits import same_bits
from support.processes import run_processes
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import lowbit as lb

WORLD = 4
#: Rows that blocks divide, rows that they do not, uneven parts, axes before and after, few elements.
CASES: list[tuple[tuple[int, ...], list[Any]]] = [
    ((64, 512), [Shard(0)]),
    ((64, 512), [Shard(1)]),
    ((64, 80), [Shard(0)]),
    ((37, 152), [Shard(0)]),
    ((38, 400), [Shard(1)]),
    ((30, 16, 3, 4), [Shard(0)]),
    ((30, 16, 8, 32), [Shard(1)]),
    ((6144,), [Shard(0)]),
    ((10, 7), [Shard(0)]),
    ((64, 512), [Replicate()]),
    ((3, 2048), [Shard(0)]),
]
GRIDS: list[tuple[tuple[int, ...], list[Any]]] = [
    ((64, 512), [Replicate(), Shard(0)]),
    ((64, 512), [Shard(0), Shard(1)]),
    ((64, 80), [Shard(0), Shard(0)]),
]
OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (lb.optim.AdamW, {"bits": 8}),
    (lb.optim.AdamW, {"bits": 4, "master": "residual"}),
    (lb.optim.Lion, {"bits": "dynamic8", "master": "stochastic"}),
    (lb.optim.SGD, {"bits": "compand8", "momentum": 0.9, "master": "fp32"}),
    (lb.optim.Muon, {"bits": 8, "master": "stochastic"}),
    (lb.optim.Adafactor, {"bits": 8, "beta1": 0.9, "master": "residual"}),
]


def number(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ended(make: Any, place: Any, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    """A parameter and its states, whole, after three steps."""
    cls, options = make
    param = nn.Parameter(place(number(shape, 0).to(dtype)))
    optimizer = cls([param], lr=1e-2, **options)
    for step in (1, 2, 3):
        param.grad = place(number(shape, step).to(dtype) * step**3)
        optimizer.step()
    found = {"param": param.detach(), **optimizer.state[param]}
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in found.items()}


def _steps(rank: int) -> None:
    for which, make in enumerate(OPTIMIZERS):
        dtype = torch.bfloat16 if "master" in make[1] else torch.float32
        alone = {shape: ended(make, lambda x: x, shape, dtype) for shape in {s for s, _ in (*CASES, *GRIDS)}}
        line = {size: DeviceMesh("cpu", list(range(size))) for size in (2, 4)}
        grid = DeviceMesh("cpu", [[0, 1], [2, 3]])
        runs = [(line[size], *case) for case in CASES for size in line if rank < size]
        for mesh, shape, placements in (*runs, *((grid, *case) for case in GRIDS)):
            here = f"{which} {shape} {placements} on {mesh.size()}"
            try:
                made = ended(make, lambda x, m=mesh, p=placements: distribute_tensor(x, m, p), shape, dtype)
            except ValueError as error:
                raise AssertionError(here) from error
            assert made.keys() == alone[shape].keys(), here
            for name, value in made.items():
                assert same_bits(value, alone[shape][name]), f"{here}: {name}"


def _refused(rank: int) -> None:
    mesh = DeviceMesh("cpu", list(range(4)))
    param = nn.Parameter(distribute_tensor(torch.ones(512, 10), mesh, [Shard(1)]))
    param.grad = param.detach().clone()
    with pytest.raises(ValueError, match="use bits=8 in its group"):
        lb.optim.AdamW([("weight", param)], bits=4).step()
    cube = DeviceMesh("cpu", [[0, 1], [2, 3]])
    param = nn.Parameter(distribute_tensor(torch.ones(16, 16, 32), cube, [Shard(1), Shard(2)]))
    param.grad = param.detach().clone()
    with pytest.raises(ValueError, match=r"weight \[16, 16, 32\] is sharded along its axes \[1, 2\]"):
        lb.optim.AdamW([("weight", param)]).step()


# -- a model under FSDP2 -----------------------------------------------------------------------------------------------
def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(72, 128), nn.Tanh(), nn.Linear(128, 70))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """The same batch on every process: the mean of a power of two of gradients is what one process has."""
    for step in steps:
        optimizer.zero_grad()
        model(number((8, 72), 100 + step)).square().mean().backward()
        optimizer.step()


def sharded(mesh: DeviceMesh, release: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network()
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
    if release:
        return model, lb.optim.in_backward_(model, lb.optim.AdamW, lr=1e-2)
    return model, lb.optim.AdamW(model.named_parameters(), lr=1e-2)


def whole(model: nn.Module) -> list[Tensor]:
    return [p.full_tensor().detach() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


def expected(steps: int) -> list[Tensor]:
    model = network()
    train(model, lb.optim.AdamW(model.named_parameters(), lr=1e-2), range(steps))
    return whole(model)


def _fsdp(rank: int, path: str) -> None:
    meshes = {size: DeviceMesh("cpu", list(range(size))) for size in (1, 2, 4)}
    if rank < 2:
        model, optimizer = sharded(meshes[2])
        train(model, optimizer, range(3))
        assert all(same_bits(a, b) for a, b in zip(whole(model), expected(3), strict=True))
        released, _ = sharded(meshes[2], release=True)
        for step in range(3):
            released(number((8, 72), 100 + step)).square().mean().backward()
        assert all(same_bits(a, b) for a, b in zip(whole(released), expected(3), strict=True))
        states = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
        dcp.save(states, checkpoint_id=path, process_group=meshes[2].get_group())
        full = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
        torch.save(full, f"{path}/full{rank}.pt") if rank == 0 else None
    dist.barrier()
    for size in (1, 2, 4):
        if rank >= size:
            continue
        model, optimizer = sharded(meshes[size])
        states = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
        dcp.load(states, checkpoint_id=path, process_group=meshes[size].get_group())
        set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optim"])
        saved_weights = {k: v.full_tensor().clone() for k, v in model.state_dict().items()}
        train(model, optimizer, range(3, 6))
        assert all(same_bits(a, b) for a, b in zip(whole(model), expected(6), strict=True)), size
        # the same from one file of whole tensors
        model, optimizer = sharded(meshes[size])
        for name, param in model.named_parameters():
            param.data.copy_(distribute_tensor(saved_weights[name], meshes[size], param.placements))
        full = torch.load(f"{path}/full0.pt")
        set_optimizer_state_dict(model, optimizer, full, options=StateDictOptions(full_state_dict=True))
        train(model, optimizer, range(3, 6))
        assert all(same_bits(a, b) for a, b in zip(whole(model), expected(6), strict=True)), size


def _run(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/meet", rank=rank, world_size=WORLD)
    try:
        _steps(rank)
        _refused(rank)
        os.makedirs(f"{path}/state", exist_ok=True)
        _fsdp(rank, f"{path}/state")
    finally:
        dist.destroy_process_group()


def test_bits_are_those_of_the_whole_tensor(tmp_path: Path):
    run_processes(_run, (str(tmp_path),), WORLD)
