"""``lb.distributed.start`` under ``torchrun`` and without it, and the scripts of docs/distributed.md."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.processes import run_processes
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import lowbit as lb

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = re.compile(r"^```py\n# (\w+\.py): torchrun[^\n]*\n(.*?)^```\n", re.DOTALL | re.MULTILINE)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_one_process_trains_as_without_it():
    for strategy in ("ddp", "zero2-replicated"):
        with lb.distributed.start(seed=3, device="cpu") as processes:
            first = torch.rand(2), random.random()
            assert (processes.rank, processes.world_size, processes.device.type) == (0, 1, "cpu") and processes.is_first
            model, optimizer = lb.distributed.shard_(
                net := nn.Linear(4, 1), torch.optim.SGD(net.parameters()), strategy
            )
            for (x,) in processes.loader(TensorDataset(torch.ones(5, 4)), batch_size=2):
                model(x).sum().backward()
                optimizer.step()
            assert processes.mean(2.5) == 2.5
            del model, optimizer, net
        assert not dist.is_initialized()
    with lb.distributed.start(seed=3, device="cpu"):
        assert torch.equal(torch.rand(2), first[0]) and random.random() == first[1]
    with pytest.raises(KeyError), lb.distributed.start(device="cpu"):
        raise KeyError
    assert not dist.is_initialized()


def test_a_group_that_exists_is_kept(tmp_path: Path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        with lb.distributed.start(device="cpu") as processes:
            assert not processes.created
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("variable", "rank"),
    [
        ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        ("PMI_SIZE", "PMI_RANK"),
    ],
)
def test_several_processes_without_ranks_are_refused(monkeypatch, variable, rank):
    monkeypatch.setenv(variable, "4")
    for partial in (None, "RANK", "WORLD_SIZE"):
        with monkeypatch.context() as context:
            if partial is not None:
                context.setenv(partial, "0")
            with pytest.raises(ValueError, match=rf"4 processes \({variable}=4\).*torchrun.*RANK=\${rank} WORLD_SIZE="):
                lb.distributed.start(device="cpu")
            assert not dist.is_initialized()


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"},  # the shell of salloc
        {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7", "SLURM_PROCID": "0"},  # a script of sbatch
        {
            "SLURM_NTASKS": "4",
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": "0",
            "SLURM_STEP_NUM_TASKS": "1",
        },  # srun --pty bash
        {"OMPI_COMM_WORLD_SIZE": "1", "PMI_SIZE": ""},
    ],
)
def test_a_single_process_of_a_launcher_starts(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with lb.distributed.start(device="cpu") as processes:
        assert processes.world_size == 1


def test_ranks_of_torchrun_count_under_a_launcher(monkeypatch):
    """Each of two tasks of a step runs torchrun."""
    variables = {"SLURM_STEP_NUM_TASKS": "2", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    for name, value in {**variables, "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    with lb.distributed.start(device="cpu", timeout=20) as processes:
        assert processes.world_size == 1


class Endless(IterableDataset):
    def __iter__(self):
        yield 1


def test_bad_arguments():
    with pytest.raises(ValueError, match="seconds above 0, got -1"):
        lb.distributed.start(device="cpu", timeout=-1)
    with lb.distributed.start(device="cpu") as processes:
        with pytest.raises(ValueError, match="expected a dataset with a length, got Endless"):
            processes.loader(Endless())
        with pytest.raises(ValueError, match="has a sampler of its own, got batch_sampler"):
            processes.loader(TensorDataset(torch.ones(2)), batch_sampler=[[0]])


def _epochs(rank: int, path: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="localhost")
    dist.init_process_group("gloo", init_method=f"file://{path}/meet", rank=rank, world_size=2)
    with lb.distributed.start(seed=1, device="cpu", timeout=60) as processes:
        assert (processes.rank, processes.world_size, processes.is_first) == (rank, 2, rank == 0)
        assert processes.mean(torch.tensor(float(rank))) == 0.5
        data = TensorDataset(torch.arange(10))
        loader = processes.loader(data, batch_size=2)
        epochs = [torch.cat([x for (x,) in loader]) for _ in range(2)]
        assert not torch.equal(*epochs), "each epoch has an order of its own"
        loader.sampler.set_epoch(0)
        assert torch.equal(torch.cat([x for (x,) in loader]), epochs[0])
        both = [torch.empty(5, dtype=torch.int64) for _ in range(2)]
        dist.all_gather(both, epochs[0])
        assert sorted(torch.cat(both).tolist()) == list(range(10)), "each sample is in one share"
        plain = processes.loader(data, batch_size=5, shuffle=False)
        assert [x.tolist() for (x,) in plain] == [list(range(rank, 10, 2))]
    dist.destroy_process_group()


def test_loaders_share_a_dataset(tmp_path: Path):
    run_processes(_epochs, (str(tmp_path),))


# -- scripts ----------------------------------------------------------------------------------------------------------
def scripts() -> dict[str, tuple[str, str]]:
    """By name: the script, and the text that the page shows after it."""
    text = (ROOT / "docs" / "distributed.md").read_text()
    found = {}
    for match in SCRIPT.finditer(text):
        shown = re.match(r"\n```text\n(.*?)^```", text[match.end() :], re.DOTALL | re.MULTILINE)
        found[match[1]] = match[2], shown[1] if shown else ""
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"), [("train_ddp.py", 1), ("train_ddp.py", 2), ("train_zero3.py", 2), ("bytes_sent.py", 2)]
)
def test_scripts_of_the_page_run(tmp_path: Path, name: str, count: int):
    script, shown = scripts()[name]
    assert len(script.splitlines()) <= 25
    (tmp_path / name).write_text(script)
    launcher = [] if count == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    done = subprocess.run(
        [sys.executable, *launcher, name], cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    if shown and count == 2:
        assert done.stdout == shown
    if not shown:
        losses = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines()]
        assert len(losses) == 5 and losses[-1] < losses[0]
