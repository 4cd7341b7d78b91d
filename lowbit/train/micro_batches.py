"""Gradient accumulation: split a batch into micro-batches, with weights that make their sum the loss of the whole
batch.

If micro-batches have different numbers of targets, the mean of their mean losses is not the mean over the batch.
Trainers had this bug until 2024: https://unsloth.ai/blog/gradient,
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

from lowbit.dist_utils import exchange_device, gathered, processes

__all__ = ["accumulation_weights", "largest_part", "micro_batches", "samples", "share_of_targets"]

#: The targets of a batch: its key (an index in a tuple), or a function of the batch.
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
    """Split a batch along dim 0 and yield each micro-batch with its weight.

    The sum of ``weight * mean loss`` over the micro-batches is the mean loss of the whole batch::

        for part, weight in micro_batches(batch, 4, targets="labels"):
            scaler.scale(weight * loss(model, part)).backward()

    The first tensor with a dimension gives the number of samples. Scalars, non-tensors and dict values with another
    size in dim 0 (a mask ``[length, length]``) go into every micro-batch unchanged. If length equals the number of
    samples, pass the mask as ``[1, length, length]``.

    Args:
        batch: tensors in any nesting of tuples, lists and dicts.
        parts: number of micro-batches. Their sizes differ by at most one sample.
        size: samples per micro-batch, instead of ``parts``; the last may have fewer.
        targets: the mean is over targets that are not ``ignore_index``, instead of over samples. Key of the targets in
            the batch, or a function of a micro-batch. For a language model that shifts labels itself use ``lambda part:
            part["labels"][:, 1:]``. A micro-batch without targets is left out, because its mean loss is NaN.
        ignore_index: the target that does not count.
        model: DistributedDataParallel, or another module with ``no_sync`` and ``process_group``. All but the last
            micro-batch run in ``no_sync``. The mean is over the batches of all processes, whose gradients the model
            averages.

    Returns:
        An iterator over pairs of a micro-batch (views of the batch) and its weight.

    Raises:
        ValueError: the batch cannot be split, or a process of ``model`` has no targets while others have some.
        TypeError: ``model`` has no ``no_sync``, or the targets are not a tensor.
    """
    pieces = _split(batch, parts, size)
    weights = accumulation_weights(pieces, targets=targets, ignore_index=ignore_index, model=model)
    return _with_weights(pieces, weights, model)


def accumulation_weights(
    batches: Sequence[Any], *, targets: Targets | None = None, ignore_index: int = -100, model: nn.Module | None = None
) -> list[float]:
    """Return the weights of several batches whose gradients one step sums, such as the next four of a DataLoader.

    Args:
        batches: at least one batch.
        targets: as for ``micro_batches``.
        ignore_index: as for ``micro_batches``.
        model: as for ``micro_batches``.

    Returns:
        One weight per batch: 0 for a batch without targets. If no batch has targets, the weights are equal, and the
            loss is
        NaN, as it is for the whole batch.

    Raises:
        ValueError: ``batches`` is empty, or as for ``micro_batches``.
        TypeError: as for ``micro_batches``.
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
    _check_processes(by_process)
    return [count * len(by_process) / sum(by_process) for count in counts]


def share_of_targets(batch: Any, targets: Targets, ignore_index: int = -100) -> float:
    """Return the targets of this process's batch, relative to the mean over processes.

    Weighted by it, gradients that are averaged over processes are those of the mean loss of all batches. All processes
    call it; a single process has 1.

    Args:
        batch: This process's batch.
        targets: as for ``micro_batches``.
        ignore_index: as for ``micro_batches``.

    Raises:
        ValueError: some processes have targets, and others have none.
        TypeError: the targets are not a tensor.
    """
    count = torch.tensor(_counts([batch], targets, ignore_index), device=exchange_device() if processes() > 1 else None)
    by_process = [float(one) for one in gathered(count)]
    if not any(by_process):
        return 1.0
    _check_processes(by_process)
    return float(count) * len(by_process) / sum(by_process)


def _check_processes(by_process: list[float]) -> None:
    if not all(by_process):
        raise ValueError(
            f"memory.micro_batches: expected targets in every process, got {[int(n) for n in by_process]} by rank; "
            f"give each rank a batch with targets, or skip the step on all ranks"
        )


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
            f"memory.micro_batches: expected parts (number of micro-batches) or size (samples per micro-batch), "
            f"got parts={parts}, size={size}"
        )
    name, number = ("parts", parts) if parts is not None else ("size", size)
    assert number is not None
    if number < 1:
        raise ValueError(f"memory.micro_batches: {name} must be at least 1, got {number}")
    total = samples(batch)
    count = min(number, total) if parts is not None else -(-total // number)
    if count == 1:
        return [batch]
    bounds = [total * i // count if parts is not None else i * number for i in range(count)] + [total]
    return [_cut(batch, total, start, end) for start, end in pairwise(bounds)]


def largest_part(batch: Any, parts: int) -> Any:
    """The largest of ``parts`` micro-batches of a batch, which is the last one. Raises as ``micro_batches``."""
    total = samples(batch)
    return _cut(batch, total, total * (parts - 1) // parts, total)


def _cut(batch: Any, total: int, start: int, end: int) -> Any:
    """The samples ``start`` to ``end - 1`` of a batch."""
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
        f"memory.micro_batches: expected {samples} samples in dim 0 as in the first tensor of the batch, got shape "
        f"{list(leaf.shape)} at batch{pytree.keystr(path)}; pass a tensor without samples as the value of a dict"
    )


def samples(batch: Any) -> int:
    for leaf in pytree.tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch):
        if isinstance(leaf, Tensor) and leaf.dim():
            if len(leaf):
                return len(leaf)
            raise ValueError("memory.micro_batches: the batch has no samples: dim 0 of its first tensor is 0")
    raise ValueError(
        f"memory.micro_batches: expected a tensor with samples along dim 0, got a {type(batch).__name__} without one"
    )


# -- weights -----------------------------------------------------------------------------------------------------------
def _counts(batches: Sequence[Any], targets: Targets, ignore_index: int) -> list[float]:
    """Number of targets per batch, with one device synchronization for all batches."""
    labels = [targets(batch) if callable(targets) else _at(batch, targets) for batch in batches]
    for value in labels:
        if not isinstance(value, Tensor):
            raise TypeError(f"memory.micro_batches: targets are a tensor, got {type(value).__name__}; name their key")
    counts: list[float] = torch.stack([(value != ignore_index).sum() for value in labels]).double().tolist()
    return counts


def _at(batch: Any, key: str | int) -> Any:
    try:
        return batch[key]
    except (KeyError, IndexError, TypeError) as error:
        keys = list(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise ValueError(
            f"memory.micro_batches: targets={key!r} names nothing in the batch, which has {keys}; "
            f"pass a key of it, or a function of the batch"
        ) from error


def _by_process(count: float, model: nn.Module | None) -> list[float]:
    """The counts of all processes of the model, by rank."""
    if model is None:
        return [count]
    group = getattr(model, "process_group", None)
    if group is None or not hasattr(model, "no_sync"):
        raise TypeError(
            f"memory.micro_batches: expected a model with no_sync and process_group, such as DistributedDataParallel, "
            f"got {type(model).__name__}; leave model out if no gradients are exchanged"
        )
    counted = torch.zeros(dist.get_world_size(group), dtype=torch.float64, device=next(model.parameters()).device)
    counted[dist.get_rank(group)] = count
    dist.all_reduce(counted, group=group)
    counts: list[float] = counted.tolist()
    return counts
