"""What ``save`` and ``load`` leave as it is, and what happens where a process or a disk fails."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.bits import same_bits
from support.processes import run_processes
from torch import nn
from torch.multiprocessing.spawn import ProcessExitedException

import lowbit as lb
from lowbit.distributed import checkpoint as module
from lowbit.distributed import load, save


def meet(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/meet{os.getppid()}", rank=rank, world_size=2)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for step in range(count):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


# -- one process ------------------------------------------------------------------------------------------------------
def test_values_come_back_and_what_cannot_is_refused_when_it_is_saved(tmp_path: Path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    save(tmp_path / "one", model, optimizer, config={"lr": 1}, step=3)
    assert load(tmp_path / "one", model, optimizer) == {"config": {"lr": 1}, "step": 3}
    with pytest.raises(RuntimeError, match="process 0 failed: UnpicklingError"):
        save(tmp_path / "one", model, optimizer, best=np.float64(1.5))
    assert load(tmp_path / "one", model, optimizer)["step"] == 3, "the one before is still there"
    with pytest.raises(ValueError, match="no states by the names"):
        load(tmp_path / "one", model, optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1))


def test_an_optimizer_without_states_keeps_its_rates_and_loses_those_it_has(tmp_path: Path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    for _ in range(2):
        steps(model, optimizer, 1)
        scheduler.step()
    save(tmp_path / "sgd", model, optimizer, scheduler=scheduler)
    fresh = torch.optim.SGD(network().parameters(), lr=1.0)
    load(tmp_path / "sgd", model, fresh, scheduler=torch.optim.lr_scheduler.StepLR(fresh, 1, 0.1))
    assert fresh.param_groups[0]["lr"] == pytest.approx(0.01)
    adam = lb.optim.AdamW(model.parameters())
    save(tmp_path / "start", model, adam)
    steps(model, adam, 2)
    load(tmp_path / "start", model, adam)
    assert not adam.state


@pytest.mark.parametrize("make", [torch.optim.AdamW, lb.optim.AdamW])
def test_parameters_that_never_had_a_gradient_and_gradients_that_wait(make, tmp_path: Path):
    def start() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.ModuleDict({"used": network(), "unused": nn.Linear(64, 64)})
        return model, make(model.parameters(), lr=1e-2)

    model, optimizer = start()
    steps(model["used"], optimizer, 2)
    save(tmp_path / "some", model, optimizer)
    other, fresh = start()
    other["used"](torch.ones(1, 64)).sum().backward()
    waits = other["used"][0].weight.grad.clone()
    load(tmp_path / "some", other, fresh)
    assert torch.equal(other["used"][0].weight.grad, waits)
    assert set(fresh.state) == set(other["used"].parameters())
    other.zero_grad()
    steps(model["used"], optimizer, 2)
    steps(other["used"], fresh, 2)
    assert all(map(same_bits, model.parameters(), other.parameters()))


def test_a_process_that_ended_between_renames_has_lost_nothing(tmp_path: Path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    target, before = tmp_path / "one", tmp_path / ".one.old"
    for done in range(3):
        save(target, model, optimizer, step=done)
        if done == 0:
            target.rename(before)  # the new one had not been renamed yet
            assert load(target, model) == {"step": 0}
        else:
            save(before, model, optimizer, step=-1)  # it had, and the old one had not been removed
    assert load(target, model) == {"step": 2}
    assert sorted(path.name for path in tmp_path.iterdir()) in (["one"], [".one.old", "one"])
    save(target, model, optimizer, step=3)
    assert [path.name for path in tmp_path.iterdir()] == ["one"] and load(target, model) == {"step": 3}


# -- two --------------------------------------------------------------------------------------------------------------
def _one_fails(rank: int, path: str) -> None:
    meet(rank, path)
    model = network()
    model, optimizer = lb.distributed.shard_(model, lb.optim.AdamW(model.parameters()), "zero3")
    steps(model, optimizer, 1)
    save(f"{path}/good", model, optimizer, step=1)
    real = torch.save

    def full(*args: object, **kwargs: object) -> None:
        if rank == 1:
            raise OSError(28, "No space left on device")
        real(*args, **kwargs)

    with (
        mock.patch.object(module.torch, "save", full),
        pytest.raises(RuntimeError, match=r"process 1 failed.*No space"),
    ):
        save(f"{path}/good", model, optimizer, step=2)
    with (
        mock.patch(
            "torch.distributed.checkpoint.filesystem.FileSystemWriter.write_data", side_effect=OSError(28, "full")
        ),
        pytest.raises(RuntimeError, match=r"distributed\.save"),
    ):
        save(f"{path}/good", model, optimizer, step=2)
    assert load(f"{path}/good", model, optimizer) == {"step": 1}
    dist.destroy_process_group()


def test_all_processes_raise_what_one_does(tmp_path: Path):
    run_processes(_one_fails, (str(tmp_path),))


def _killed(rank: int, path: str) -> None:
    meet(rank, path)
    model = network()
    model, optimizer = lb.distributed.shard_(model, lb.optim.AdamW(model.parameters()), "zero3")
    steps(model, optimizer, 1)
    save(f"{path}/good", model, optimizer, step=1)
    if rank == 1:
        module.save_from = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
    save(f"{path}/good", model, optimizer, step=2)


def _goes_on(rank: int, path: str) -> None:
    meet(rank, path)
    model = network()
    model, optimizer = lb.distributed.shard_(model, lb.optim.AdamW(model.parameters()), "zero3")
    assert load(f"{path}/good", model, optimizer) == {"step": 1}
    save(f"{path}/good", model, optimizer, step=3)
    dist.destroy_process_group()
    assert load(f"{path}/good", network()) == {"step": 3}


def test_a_process_that_is_killed_while_it_saves_has_lost_nothing(tmp_path: Path):
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        run_processes(_killed, (str(tmp_path),))
    (met,) = tmp_path.glob("meet*")
    met.unlink()
    run_processes(_goes_on, (str(tmp_path),))
    assert not list(tmp_path.glob(".good*"))


# -- what follows an optimizer ----------------------------------------------------------------------------------------
def _followed(rank: int, path: str) -> None:
    meet(rank, path)
    for strategy in ("ddp", "zero1", "zero2-replicated", "zero2", "zero3"):
        model = network()
        lb.train.prepare_(model, "int8-stochastic", skip=())
        state, called = lb.train.state(model), []
        optimizer = lb.optim.AdamW(model.parameters())
        optimizer.register_step_post_hook(lambda *_, called=called: called.append(1))
        steps(model, optimizer, 2)
        model, optimizer = lb.distributed.shard_(model, optimizer, strategy)
        save(f"{path}/{strategy}", model, optimizer)
        assert (int(state.step), len(called)) == (2, 2), f"{strategy}: to have states is no step"
        steps(model, optimizer, 1)
        assert (int(state.step), len(called)) == (3, 3), strategy
        saturation = lb.optim.watch.saturation(optimizer)
        assert len(saturation) == 2, f"{strategy}: {saturation}"
    network_of_its_own = network()
    offloaded = lb.optim.offload_(torch.optim.AdamW(network_of_its_own.parameters()), f"{path}/files")
    with pytest.raises(ValueError, match="unoffload_ first"):
        lb.distributed.shard_(network_of_its_own, offloaded, "zero1")
    with pytest.raises(ValueError, match="replaced the optimizer's step"):
        lb.optim.offload_(
            lb.distributed.shard_(model := network(), torch.optim.SGD(model.parameters()), "zero1")[1], path
        )
    dist.destroy_process_group()


def test_hooks_of_steps_and_watching(tmp_path: Path):
    run_processes(_followed, (str(tmp_path),))
