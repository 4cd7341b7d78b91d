"""Several processes of one test, which begin with torch and lowbit imported."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp


def run_processes(check: Callable[..., None], arguments: tuple[Any, ...], count: int = 2) -> None:
    """``check(rank, *arguments)`` in each, raising what the first of them raises.

    They are forks of a server, a process that has imported what takes seconds and computes nothing, so that no pool of
    threads is lost in them. All calls of a session share it, with the environment variables of the first call.
    """
    multiprocessing.set_forkserver_preload(["pytest", "lowbit.train", "torch._dynamo", "torch.distributed.fsdp"])
    mp.start_processes(check, arguments, count, start_method="forkserver")
