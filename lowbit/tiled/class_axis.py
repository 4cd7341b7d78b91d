"""Views of logits as views of the rows that they are computed from.

Logits ``[..., classes, ...]`` have one row of ``hidden`` ``[..., features]`` for each element of their other axes. A
view of logits that keeps the class axis whole is therefore computed from a view of ``hidden``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit.models.ties import storage
from lowbit.torch_private import without_modes

__all__ = ["carried", "has_tensors", "selected"]


def carried(
    hidden: Tensor, axis: int, shape: Sequence[int], view: Callable[[Tensor], Any]
) -> list[tuple[Tensor, int]] | None:
    """Return the rows of each result of ``view``, and the position of its class axis.

    ``view`` is called with a meta tensor whose strides show where elements come from: 1 on the class axis, and
    multiples of the number of classes on the others.

    Args:
        hidden: Rows of the logits ``[..., features]``.
        axis: Position of the class axis in the logits.
        shape: Shape of the logits.
        view: A function of torch that returns views of a tensor, or copies.

    Returns:
        One pair per result. None if a result does not keep the class axis whole.
    """
    classes = shape[axis]
    rows = [size for position, size in enumerate(shape) if position != axis]
    strides = [classes * stride for stride in _contiguous(rows)]
    strides.insert(axis, 1)
    with without_modes():
        probe = torch.empty_strided(tuple(shape), tuple(strides), device="meta")
        try:
            results = view(probe)
        except (RuntimeError, NotImplementedError):  # the order of elements in memory does not allow this view
            return None
        listed = [results] if isinstance(results, Tensor) else list(results)
        if any(storage(result) != storage(probe) or result.dtype != probe.dtype for result in listed):
            return None
    pairs = [_rows_of(hidden, result, classes) for result in listed]
    return None if None in pairs else pairs  # type: ignore[return-value]


def _rows_of(hidden: Tensor, result: Tensor, classes: int) -> tuple[Tensor, int] | None:
    """Return the rows that a view of the probe selects, and its class axis."""
    sizes, strides = list(result.shape), list(result.stride())
    axes = [axis for axis in range(len(sizes)) if sizes[axis] == classes and strides[axis] == 1]
    if not axes or result.storage_offset() % classes:
        return None
    del sizes[axes[0]], strides[axes[0]]
    if any(stride % classes for size, stride in zip(sizes, strides, strict=True) if size > 1):
        return None
    steps = [stride // classes for stride in strides]
    offset, features = result.storage_offset() // classes, hidden.shape[-1]
    if offset == 0 and math.prod(sizes) * features == hidden.numel() and _is_contiguous(sizes, steps):
        return hidden.reshape(*sizes, features), axes[0]
    whole = hidden.contiguous()
    places = [step * features for step in steps]
    return whole.as_strided([*sizes, features], [*places, 1], whole.storage_offset() + offset * features), axes[0]


def has_tensors(index: Any) -> bool:
    """Return whether an index has tensors or lists, so that indexing copies."""
    return any(isinstance(part, list) or (isinstance(part, Tensor) and part.dim() > 0) for part in _parts(index))


def selected(hidden: Tensor, axis: int, index: Any) -> Tensor | None:
    """Return the rows of ``logits[index]`` for an index with tensors or lists, such as a mask of tokens.

    Returns:
        Rows whose class axis is the last. None if the class axis is not last or is indexed.
    """
    parts = _parts(index)
    while isinstance(parts[-1], slice) and parts[-1] == slice(None):
        parts = parts[:-1]
    used = 0
    for part in parts:
        nested = isinstance(part, list) and any(isinstance(entry, list | bool) for entry in part)
        if part is Ellipsis or isinstance(part, bool) or nested:
            return None
        is_mask = isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8)
        used += part.dim() if is_mask else 0 if part is None else 1
    return hidden[parts] if used <= axis == hidden.dim() - 1 else None


def _parts(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _contiguous(sizes: Sequence[int]) -> list[int]:
    strides = [1] * len(sizes)
    for position in range(len(sizes) - 2, -1, -1):
        strides[position] = strides[position + 1] * max(sizes[position + 1], 1)
    return strides


def _is_contiguous(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    wanted = _contiguous(sizes)
    return all(size <= 1 or stride == want for size, stride, want in zip(sizes, strides, wanted, strict=True))
