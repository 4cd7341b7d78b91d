"""``start``: the process group, device, seed and data of a training script, with or without ``torchrun``."""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from lowbit.dist_utils import exchange_device, launched

__all__ = ["Processes", "start"]

#: Variables in which a launcher other than torchrun gives its processes their number, with the variable of the rank.
#: ``SLURM_NTASKS`` is none of them: it is also set in the one shell of an allocation.
_LAUNCHERS = {
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
}


def start(
    seed: int | None = None, *, device: str | torch.device | None = None, timeout: float | None = None
) -> Processes:
    """Join the processes of ``torchrun``, or begin as a single process if the script runs without it.

    It creates the process group (NCCL and gloo on GPUs, gloo on CPUs), selects this process' GPU, and seeds random
    numbers. The end of the ``with`` block destroys the group. A group that exists already is used, and kept::

        with lb.distributed.start(seed=0) as processes:
            model = MyModel().to(processes.device)
            model, optimizer = lb.distributed.shard_(model, torch.optim.AdamW(model.parameters()), "ddp")
            for batch in processes.loader(dataset, batch_size=8):
                ...

    Args:
        seed: Seed of torch, of Python's ``random`` and of numpy, the same in all processes, so that they create the
            same model. None leaves the seeds.
        device: ``"cpu"`` or ``"cuda"``. Default: a GPU if torch finds one.
        timeout: Seconds that a collective waits for the other processes. Default: torch's.

    Returns:
        A ``Processes``, which is also a context manager. Without ``with``, call its ``close`` at the end.

    Raises:
        ValueError: The machine has fewer GPUs than processes, ``timeout`` is not positive, or ``srun`` or ``mpirun``
            started several processes without ``RANK`` and ``WORLD_SIZE``.
    """
    creates = not dist.is_initialized()
    if creates and not launched():
        _require_one_process()
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    place = _place(device, local_rank)
    if timeout is not None and not timeout > 0:
        raise ValueError(f"distributed.start: timeout expects seconds above 0, got {timeout!r}")
    if place.type == "cuda":
        torch.cuda.set_device(place)
    if creates:
        _create(place, None if timeout is None else timedelta(seconds=timeout))
    if seed is not None:
        _seed(seed)
    return Processes(dist.get_rank(), local_rank, dist.get_world_size(), place, seed or 0, creates)


@dataclass(frozen=True)
class Processes:
    """The processes that train together, as one of them sees them. A context manager that ends with ``close``.

    Attributes:
        rank: Number of this process, from 0.
        local_rank: Number of this process on its machine.
        world_size: Number of processes.
        device: The device of this process.
        seed: The seed of ``start``; 0 without one.
        created: Whether ``start`` created the process group.
    """

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    seed: int = 0
    created: bool = False

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None or self.world_size == 1:  # after an error it could wait for a lost process
            self.close()

    def close(self) -> None:
        """Destroy the process group, if ``start`` created it."""
        if self.created and dist.is_initialized():
            gc.collect()  # free models first: the reducer of DistributedDataParallel must not outlive its group
            dist.destroy_process_group()

    @property
    def is_first(self) -> bool:
        """Whether this is the process that prints and writes files."""
        return self.rank == 0

    def loader(
        self,
        dataset: Dataset[Any],
        batch_size: int = 1,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        **options: Any,
    ) -> DataLoader[Any]:
        """A DataLoader of this process' share of a dataset, in another order in each epoch.

        Every process has the same number of batches. If the samples cannot be divided evenly, some are repeated, or
        with ``drop_last`` left out. ``loader.sampler.set_epoch(n)`` resumes with the order of epoch ``n``.

        Args:
            dataset: A dataset with a length, the same in all processes.
            batch_size: Samples per batch of this process.
            shuffle: Whether samples are shuffled, by the seed of ``start`` and the number of the epoch.
            drop_last: Whether incomplete batches and shares are left out.
            options: Further arguments of ``DataLoader``.

        Raises:
            ValueError: ``dataset`` has no length, or ``options`` has a sampler.
        """
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise ValueError(
                f"Processes.loader: expected a dataset with a length, got {type(dataset).__name__}; use a DataLoader, "
                f"and take every {self.world_size}th sample from number {self.rank} on"
            )
        chosen = [name for name in ("sampler", "batch_sampler") if options.get(name) is not None]
        if chosen:
            raise ValueError(
                f"Processes.loader: it has a sampler of its own, got {chosen[0]}; use DataLoader for others"
            )
        sampler = _EpochSampler(
            dataset, self.world_size, self.rank, shuffle=shuffle, seed=self.seed, drop_last=drop_last
        )
        options = {"pin_memory": self.device.type == "cuda", **options}
        return DataLoader(dataset, batch_size, sampler=sampler, drop_last=drop_last, **options)

    def mean(self, value: float | Tensor) -> float:
        """The mean of a number, such as the loss, over processes. All must call it."""
        number = torch.as_tensor(value, dtype=torch.float64).detach().to(exchange_device())
        dist.all_reduce(number)
        return float(number) / self.world_size


class _EpochSampler(DistributedSampler[Any]):
    """A sampler whose epoch advances each time that it is iterated over."""

    def __iter__(self) -> Iterator[Any]:
        indices = super().__iter__()
        self.epoch += 1
        return indices


def _require_one_process() -> None:
    """Raise ValueError if this is one of several processes; each would train a model of its own."""
    missing = " and ".join(name for name in ("RANK", "WORLD_SIZE") if name not in os.environ)
    for variable, rank in _LAUNCHERS.items():
        count = os.environ.get(variable, "")
        if count.isdecimal() and int(count) > 1:
            raise ValueError(
                f"distributed.start: expected RANK and WORLD_SIZE in the environment of {count} processes "
                f"({variable}={count}), got no {missing}; start the script with torchrun, or export "
                f"RANK=${rank} WORLD_SIZE=${variable} MASTER_ADDR MASTER_PORT (on GPUs also LOCAL_RANK) in each. "
                f"For {count} separate runs, unset {variable}"
            )


def _place(device: str | torch.device | None, local_rank: int) -> torch.device:
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if place.type != "cuda" or place.index is not None:
        return place
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"distributed.start: process {local_rank} of this machine needs a GPU of its own, but torch finds "
            f"{torch.cuda.device_count()}; start one process per GPU (torchrun --nproc-per-node gpu), or pass "
            f"device='cpu'"
        )
    return torch.device("cuda", local_rank)


def _create(place: torch.device, timeout: timedelta | None) -> None:
    backend = "cpu:gloo,cuda:nccl" if place.type == "cuda" and dist.is_nccl_available() else "gloo"
    if launched():
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]  # documented, but not in __all__
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
