"""Gradient accumulation: a batch in parts, each with the weight that makes their sum the loss of the whole batch.

The mean of the parts' mean losses is not the mean over the batch where parts have different numbers of targets.
Trainers took it for that until 2024: https://unsloth.ai/blog/gradient,
https://github.com/huggingface/transformers/pull/34191.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

__all__ = ["accumulation_weights", "largest_part", "micro_batches", "samples"]

#: Where the targets of a batch are: a key (an index in a tuple), or a function of the batch.
Targets = str | int | Callable[[Any], Tensor]


def micro_batches(
    batch: Any,
    parts: int | None = None,
    *,
    size: int | None = None,
    targets: Targets | None = None,
    ignore_index: int = -100,
    model: nn.Module | None = None,
) -> Iterator[tuple[Any, float]]:
    """The batch in parts along dim 0, each with its weight: the sum of ``weight * mean loss`` is the mean loss of all.

    ``parts``: how many, whose sizes differ by one sample at most. ``size``: samples of each part, the last may have
    fewer. ``batch``: tensors in any nesting of tuples, lists and dicts. Its first tensor with a dimension says how many
    samples there are. What has no dimension, or is no tensor, is in every part as it is; so is the value of a dict
    whose dim 0 has another size, such as a mask ``[length, length]`` (where length is the number of samples, give it
    as ``[1, length, length]``). Parts are views.

    The mean is over samples, or with ``targets`` over the targets that are not ``ignore_index``: a key of the batch, or
    a function of a part. For a language model that shifts labels itself that is ``lambda part: part["labels"][:, 1:]``.
    A part without targets is left out, since its mean loss is no number.

    ``model``: DistributedDataParallel or what else has ``no_sync`` and ``process_group``. All but the last part run in
    ``no_sync``, and the mean is over the batches of all processes, whose gradients the model averages.

    ::

        for part, weight in micro_batches(batch, 4, targets="labels"):
            scaler.scale(weight * loss(model, part)).backward()

    Raises ValueError for what cannot be split, and where a process of ``model`` has no targets while others do;
    TypeError for a model without ``no_sync``.
    """
    pieces = _split(batch, parts, size)
    weights = accumulation_weights(pieces, targets=targets, ignore_index=ignore_index, model=model)
    return _with_weights(pieces, weights, model)


def accumulation_weights(
    batches: Sequence[Any], *, targets: Targets | None = None, ignore_index: int = -100, model: nn.Module | None = None
) -> list[float]:
    """The weight of each of ``batches`` whose gradients one step sums, such as the next four of a DataLoader.

    The arguments are those of ``micro_batches``. A batch without targets has weight 0; where none has targets, the
    weights are equal, and the loss is no number, as that of the whole batch.
    """
    if not batches:
        raise ValueError("memory.accumulation_weights: expected at least one batch, got none")
    if targets is None:
        counts = [float(samples(batch)) for batch in batches]
    else:
        counts = _counts(batches, targets, ignore_index)
    by_process = _by_process(sum(counts), model)
    if not any(by_process):
        return [1 / len(counts)] * len(counts)
    if not all(by_process):
        raise ValueError(
            f"memory.micro_batches: expected targets in every process, got {[int(n) for n in by_process]} by rank; "
            f"give each rank a batch with targets, or none a step"
        )
    return [count * len(by_process) / sum(by_process) for count in counts]


def _with_weights(pieces: list[Any], weights: list[float], model: nn.Module | None) -> Iterator[tuple[Any, float]]:
    chosen = [(piece, weight) for piece, weight in zip(pieces, weights, strict=True) if weight]
    for index, pair in enumerate(chosen):
        last = index == len(chosen) - 1
        with nullcontext() if last or model is None else model.no_sync():  # type: ignore[operator]
            yield pair


# -- parts -------------------------------------------------------------------------------------------------------------
def _split(batch: Any, parts: int | None, size: int | None) -> list[Any]:
    if (parts is None) == (size is None):
        raise ValueError(
            f"memory.micro_batches: expected parts (how many) or size (samples of each), got parts={parts}, size={size}"
        )
    name, number = ("parts", parts) if parts is not None else ("size", size)
    assert number is not None
    if number < 1:
        raise ValueError(f"memory.micro_batches: {name} is at least 1, got {number}")
    total = samples(batch)
    count = min(number, total) if parts is not None else -(-total // number)
    if count == 1:
        return [batch]
    bounds = [total * i // count if parts is not None else i * number for i in range(count)] + [total]
    return [_cut(batch, total, start, end) for start, end in pairwise(bounds)]


def largest_part(batch: Any, parts: int) -> Any:
    """The largest of so many parts of a batch, which is the last. Raises as ``micro_batches``."""
    total = samples(batch)
    return _cut(batch, total, total * (parts - 1) // parts, total)


def _cut(batch: Any, total: int, start: int, end: int) -> Any:
    """The samples of a batch from ``start`` to before ``end``."""
    leaves, structure = pytree.tree_flatten_with_path(dict(batch) if isinstance(batch, Mapping) else batch)
    return pytree.tree_unflatten([_part(path, leaf, total, start, end) for path, leaf in leaves], structure)


def _part(path: Any, leaf: Any, samples: int, start: int, end: int) -> Any:
    if not isinstance(leaf, Tensor) or leaf.dim() == 0:
        return leaf
    if len(leaf) == samples:
        return leaf[start:end]
    if path and isinstance(path[-1], pytree.MappingKey):
        return leaf
    raise ValueError(
        f"memory.micro_batches: expected {samples} samples in dim 0 as the first tensor of the batch has, got shape "
        f"{list(leaf.shape)} at batch{pytree.keystr(path)}; pass what has no samples as the value of a dict"
    )


def samples(batch: Any) -> int:
    for leaf in pytree.tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch):
        if isinstance(leaf, Tensor) and leaf.dim():
            if len(leaf):
                return len(leaf)
            raise ValueError("memory.micro_batches: the batch has no samples, its first tensor has 0 in dim 0")
    raise ValueError(
        f"memory.micro_batches: expected a tensor with samples along dim 0, got a {type(batch).__name__} without one"
    )


# -- weights -----------------------------------------------------------------------------------------------------------
def _counts(batches: Sequence[Any], targets: Targets, ignore_index: int) -> list[float]:
    """How many targets each batch has. Tensors on a device are read once, together."""
    found = [targets(batch) if callable(targets) else _at(batch, targets) for batch in batches]
    for value in found:
        if not isinstance(value, Tensor):
            raise TypeError(f"memory.micro_batches: targets are a tensor, got {type(value).__name__}; name their key")
    counts: list[float] = torch.stack([(value != ignore_index).sum() for value in found]).double().tolist()
    return counts


def _at(batch: Any, key: str | int) -> Any:
    try:
        return batch[key]
    except (KeyError, IndexError, TypeError) as error:
        has = list(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise ValueError(
            f"memory.micro_batches: targets={key!r} names nothing in the batch, which has {has}; "
            f"pass a key of it, or a function of the batch"
        ) from error


def _by_process(own: float, model: nn.Module | None) -> list[float]:
    """The targets of each process of the model."""
    if model is None:
        return [own]
    group = getattr(model, "process_group", None)
    if group is None or not hasattr(model, "no_sync"):
        raise TypeError(
            f"memory.micro_batches: model is what exchanges gradients, with no_sync and process_group, as "
            f"DistributedDataParallel; got {type(model).__name__}; leave model out where nothing is exchanged"
        )
    found = torch.zeros(dist.get_world_size(group), dtype=torch.float64, device=next(model.parameters()).device)
    found[dist.get_rank(group)] = own
    dist.all_reduce(found, group=group)
    counts: list[float] = found.tolist()
    return counts
