"""Arguments of ``shard_``, and checks of their values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from lowbit.name_tables import did_you_mean
from lowbit.sizes import bytes_in

__all__ = ["Arguments", "bucket_in", "check_options", "prefetch_in"]

#: A smaller bucket means that its unit was forgotten.
_LEAST_BUCKET = 1000
#: Options of torch that have an argument of ``shard_``.
_INSTEAD = {
    "bucket_cap_mb": "bucket", "mp_policy": "precision", "offload_policy": "offload", "forward_prefetch": "prefetch",
    "backward_prefetch": "prefetch", "limit_all_gathers": "prefetch", "cpu_offload": "offload",
    "mixed_precision": "precision", "auto_wrap_policy": "blocks", "sharding_strategy": "strategy",
}  # fmt: skip


class Arguments(NamedTuple):
    """Arguments of ``shard_``."""

    blocks: list[nn.Module] | None
    group_size: int | None
    precision: torch.dtype | None
    reduce: torch.dtype | None
    offload: bool
    prefetch: int | None
    bucket: int | None
    options: dict[str, Any]


def prefetch_in(value: object) -> int:
    """The number of blocks that ``prefetch`` gathers ahead.

    Raises:
        ValueError: It is no number from 1.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(
            f"distributed.shard_: prefetch is the number of blocks that are gathered ahead, from 1, got {value!r}; "
            f"leave it out for torch's default"
        )
    return value


def bucket_in(value: object) -> int:
    """The bytes of ``bucket``.

    Raises:
        ValueError: It is no size.
    """
    size = value
    if isinstance(value, str):
        try:
            size = bytes_in(value)
        except ValueError as error:
            raise ValueError(f"distributed.shard_: bucket: {error}") from None
    if isinstance(size, bool) or not isinstance(size, int) or size < _LEAST_BUCKET:
        raise ValueError(
            f"distributed.shard_: bucket is a number of bytes from {_LEAST_BUCKET}, or a size such as '25MB', got "
            f"{value!r}"
        )
    return size


def check_options(function: Callable[..., Any], options: dict[str, Any], own: Sequence[str]) -> None:
    """Check the extra options of ``shard_``, which are keyword arguments of ``function`` other than ``own``.

    Raises:
        ValueError: An option is unknown; the message lists the options that are known.
    """
    known = [name for name in inspect.signature(function).parameters if name not in ("self", *own)]
    for name in options:
        if name in known:
            continue
        instead = _INSTEAD.get(name)
        hint = f" (pass {instead}= of shard_)" if instead else did_you_mean(name, known)
        raise ValueError(
            f"distributed.shard_: {function.__name__} has no option {name!r}{hint}; its options are {', '.join(known)}"
        )
