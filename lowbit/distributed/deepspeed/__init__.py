"""``from_deepspeed``: a DeepSpeed configuration in the terms of lowbit."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lowbit.distributed.deepspeed.keys import AUTO, KEYS, priority
from lowbit.distributed.deepspeed.result import FromDeepSpeed
from lowbit.name_tables import did_you_mean

__all__ = ["FromDeepSpeed", "from_deepspeed"]

#: Keys whose values are translated together: arguments of optimizers and schedulers.
_WHOLE = ("optimizer.params", "scheduler.params")


def from_deepspeed(
    config: Mapping[str, Any] | str | os.PathLike[str], *, world_size: int | None = None
) -> FromDeepSpeed:
    """Translate a DeepSpeed configuration.

    Args:
        config: The configuration, or the path of its JSON file.
        world_size: Number of processes, for ``train_batch_size``. Default: the size of the process group, or of the
            group that ``torchrun`` announces; unknown without both.

    Returns:
        The strategy and the arguments of lowbit's calls. Its ``unsupported`` lists every key without a counterpart.

    Raises:
        ValueError: The file is no JSON object, a value is not one of DeepSpeed's, or batch sizes contradict each other.
    """
    if isinstance(config, str | os.PathLike):
        try:
            config = json.loads(Path(config).read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"from_deepspeed: {os.fspath(config)!r} is no JSON file: {error}") from None  # type: ignore[arg-type]
    if not isinstance(config, Mapping):
        raise ValueError(f"from_deepspeed: expected a JSON object (dict) or its path, got {type(config).__name__}")
    translation = FromDeepSpeed(world_size=_processes(world_size))
    entries = dict(_leaves(config))
    auto = tuple(key for key, value in entries.items() if value == AUTO)
    values = {key: value for key, value in entries.items() if value != AUTO}
    translation.auto = auto
    for key in sorted(values, key=priority):
        row = KEYS.get(key) or KEYS.get(f"{key.partition('.')[0]}.*")
        if row is None:
            translation.unsupported[key] = f"unknown key{did_you_mean(key, KEYS)}"
            continue
        reason = row.translate(translation, values[key], values)
        if reason:
            translation.unsupported[key] = reason
    return translation


def _processes(count: int | None) -> int | None:
    """The number of processes; None if it is unknown."""
    if count is None:
        return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 0)) or None
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"from_deepspeed: world_size must be a whole number from 1, got {count!r}")
    return count


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values. The arguments of optimizers and schedulers are one value."""
    for key, value in config.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and path not in _WHOLE:
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value
