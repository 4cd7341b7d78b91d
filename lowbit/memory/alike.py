"""Runs of blocks that are alike: same classes, attributes, and shapes of tensors.

An estimate runs only some of them, see ``lowbit.memory.fewer_blocks``.
"""

from __future__ import annotations

import re
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowbit.models.blocks import stacks
from lowbit.torch_private import FakeTensor, without_modes

__all__ = ["SHOWN", "Run", "runs_of"]

#: Periods of a run that are estimated: the first and the last, and two between them that must agree.
SHOWN = 4

#: Largest number of blocks after which a stack may repeat itself, as one of global attention after five of local.
_LONGEST_PERIOD = 8

_NUMBER = re.compile(r"\d+")


class Run(NamedTuple):
    """Consecutive blocks that repeat themselves.

    Attributes:
        holder: The module that contains the blocks.
        periods: Names of the blocks in ``holder``, by period. At least ``SHOWN + 1`` periods.
    """

    holder: nn.Module
    periods: tuple[tuple[str, ...], ...]


def runs_of(model: nn.Module) -> list[Run]:
    """Return the runs of alike blocks in the stacks of ``model``.

    Blocks that share parameters or buffers with one another are in no run.
    """
    runs = list[Run]()
    for stack in stacks(model):
        members = {id(block) for block in stack}
        for holder in model.modules():
            names = [name for name, child in holder._modules.items() if id(child) in members]
            if isinstance(holder, nn.ModuleList | nn.Sequential) and len(names) == len(stack) == len(members):
                runs += [Run(holder, periods) for periods in _periods(holder, names)]
                break
    return runs


def _periods(holder: nn.Module, names: Sequence[str]) -> list[tuple[tuple[str, ...], ...]]:
    """Return the runs of a stack, each as its periods. A short period is preferred."""
    blocks = [holder._modules[name] for name in names]
    tensors = [id(tensor) for tensor in _tensors(blocks)]
    if len(set(tensors)) != len(tensors):
        return []
    known = dict[tuple[int, int], bool]()

    def alike(index: int, period: int) -> bool:
        if (index, period) not in known:
            known[index, period] = _Comparison(period).alike(blocks[index], blocks[index + period])
        return known[index, period]

    def count(start: int, period: int) -> int:
        end = min(start + period, len(blocks))
        while end < len(blocks) and alike(end - period, period):
            end += 1
        return (end - start) // period

    runs, start = list[tuple[tuple[str, ...], ...]](), 0
    while start < len(blocks):
        counts, end = dict[int, int](), start
        for period in range(1, _LONGEST_PERIOD + 1):
            if start + period <= end and not alike(end - period, period):
                continue  # this period does not cover more than a shorter one
            counts[period] = count(start, period)
            end = max(end, start + counts[period] * period)
            if len(blocks) - end < period:
                break  # no longer period covers more
        period = max(counts, key=lambda period: (counts[period] - SHOWN) * period)
        if counts[period] > SHOWN:
            runs.append(tuple(tuple(names[start + n * period :][:period]) for n in range(counts[period])))
            start += counts[period] * period
        else:
            start += 1
    return runs


def _tensors(blocks: Sequence[nn.Module | None]) -> list[Tensor]:
    return [t for block in blocks if block is not None for t in (*block.parameters(), *block.buffers())]


class _Comparison:
    """Compares two blocks that are ``distance`` apart. Whole numbers may differ by it, as the index of a layer does."""

    def __init__(self, distance: int) -> None:
        self._distance = distance
        self._visited = dict[tuple[int, int], tuple[Any, Any]]()  # with the objects, so that no id is used again

    def alike(self, one: Any, other: Any) -> bool:
        """Return whether two objects lead to equal ops on tensors of equal shapes."""
        if one is other:
            return True
        kind = type(one)
        if kind is not type(other):
            return False
        if kind in (int, str):
            return one == other or self._distance_apart(one, other)
        if (id(one), id(other)) in self._visited:
            return True
        self._visited[id(one), id(other)] = one, other
        if isinstance(one, Tensor):
            return _like(one) == _like(other) and _same_numbers(one, other) and self._all(vars(one), vars(other))
        for classes, parts in _PARTS.items():
            if isinstance(one, classes):
                return self._all(parts(one), parts(other))
        if hasattr(one, "__dict__") and not isinstance(one, type | types.ModuleType):
            return self._all(vars(one), vars(other))
        try:
            return bool(one == other)
        except Exception:  # the comparison of any class
            return False

    def _all(self, one: Any, other: Any) -> bool:
        if not one or not other:  # as most registries of a module are
            return len(one) == len(other)
        if isinstance(one, dict | Mapping):
            names, others = list(one), list(other)
            by_number = type(names[0]) is int and all(isinstance(key, int) for key in names)  # hooks, by their handles
            if not by_number and names != others and not self._all(names, others):
                return False
            one, other = list(one.values()), list(other.values())
        return len(one) == len(other) and all(map(self.alike, one, other))

    def _distance_apart(self, one: Any, other: Any) -> bool:
        if isinstance(one, int):
            return bool(other - one == self._distance)
        numbers, others = _NUMBER.findall(one), _NUMBER.findall(other)
        same_text = _NUMBER.sub("0", one) == _NUMBER.sub("0", other)
        return same_text and all(int(b) - int(a) in (0, self._distance) for a, b in zip(numbers, others, strict=True))


def _like(tensor: Tensor) -> tuple[Any, ...]:
    has_gradient = tensor.is_leaf and tensor.grad is not None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, has_gradient


def _same_numbers(one: Tensor, other: Tensor) -> bool:
    """Return whether whole numbers, which a forward may read, are equal. Those of fake tensors are attributes."""
    if one.is_floating_point() or one.is_meta or isinstance(one, FakeTensor):
        return True
    with without_modes():
        return torch.equal(one, other)


def _cells(function: types.FunctionType) -> list[Any]:
    """Return the variables of a function that its surroundings have set."""
    cells = list[Any]()
    for cell in function.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:  # not set yet
            cells.append(None)
    return cells


#: By class, the parts of an object that have to be alike.
_PARTS: dict[Any, Callable[[Any], Any]] = {
    types.FunctionType: lambda f: (f.__code__, f.__defaults__, _cells(f)),
    types.MethodType: lambda method: (method.__func__, method.__self__),
    partial: lambda call: (call.func, call.args, call.keywords),
    weakref.ref: lambda reference: (type(reference()),),
    dict: lambda mapping: mapping,
    (tuple, list): lambda row: row,
    nn.Module: vars,
}
