"""Several processes of one test, which begin with torch and lowbit imported."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from typing import Any

import torch.multiprocessing as mp


def context() -> ForkServerContext:
    """Of processes that are forks of a server: it has imported what takes seconds, and computes nothing.

    So no pool of threads is lost in them. A session has one server, with the environment variables of the first call.
    """
    multiprocessing.set_forkserver_preload(["pytest", "lowbit.train", "torch._dynamo", "torch.distributed.fsdp"])
    return multiprocessing.get_context("forkserver")


def run_processes(check: Callable[..., None], arguments: tuple[Any, ...], count: int = 2) -> None:
    """``check(rank, *arguments)`` in each, raising what the first of them raises."""
    context()
    mp.start_processes(check, arguments, count, start_method="forkserver")
