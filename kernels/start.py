"""Launches kernels, with a cache of compiled kernels by argument specialization.

Triton's own lookup at each call takes longer than most kernels run.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from lowbit.kernels.spec import INTERPRETED, Launch

__all__ = ["bound", "run", "specialization"]

#: Compiled kernels by device and specialization.
_compiled: dict[Any, Any] = {}


def run(launches: list[Launch]) -> None:
    """Launch kernels in order, on the current stream of the current device.

    Raises:
        RuntimeError: Kernels are interpreted, and NumPy would flush subnormal numbers.
    """
    with _interpreting() if INTERPRETED else nullcontext():
        for one in launches:
            _start(one)


def _start(one: Launch) -> None:
    if INTERPRETED:
        one.kernel[one.grid](**one.arguments)
        return
    key = (torch.cuda.current_device(), specialization(one))
    compiled = _compiled.get(key)
    if compiled is None:
        # An fma would round once, but the specification rounds the product and the sum.
        options = {"num_warps": one.warps, "num_stages": one.stages, "enable_fp_fusion": False}
        _compiled[key] = one.kernel[one.grid](**one.arguments, **options)
        return
    compiled[(*one.grid, 1, 1)[:3]](*_parameters(one.kernel).all(one.arguments))


def bound(one: Launch) -> tuple[Callable[..., Any], list[Any], tuple[int, ...]]:
    """The function, arguments and tensor indices of a launched kernel, for a launch with other addresses."""
    arguments = [one.arguments[name] for name in one.kernel.arg_names]
    tensors = tuple(index for index, value in enumerate(arguments) if isinstance(value, torch.Tensor))
    if INTERPRETED:
        return partial(_interpret, one, arguments), arguments, tensors
    compiled = _compiled[torch.cuda.current_device(), specialization(one)]
    return compiled[(*one.grid, 1, 1)[:3]], arguments, tensors


def _interpret(one: Launch, tensors: list[Any], *arguments: Any) -> None:
    """Launch an interpreted kernel, which needs tensors, with addresses in their place."""
    given = [
        _at(value, like) if isinstance(like, torch.Tensor) else value
        for value, like in zip(arguments, tensors, strict=True)
    ]
    run([one._replace(arguments=dict(zip(one.kernel.arg_names, given, strict=True)))])


def _at(address: int, like: torch.Tensor) -> torch.Tensor:
    """The memory at an address as a tensor with the shape, strides and dtype of ``like``."""
    steps = sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
    memory = (ctypes.c_byte * (max(steps + 1, 0) * like.element_size())).from_address(address)
    whole = torch.frombuffer(memory, dtype=like.dtype) if len(memory) else like
    return whole.as_strided(like.shape, like.stride())


class _Parameters(NamedTuple):
    """Parameters of a kernel: getters of all arguments and of constants, and the names of pointers, of specialized
    numbers and of other numbers.
    """

    all: Any
    constants: Any
    pointers: tuple[str, ...]
    special: tuple[str, ...]
    general: tuple[str, ...]


@cache
def _parameters(kernel: Any) -> _Parameters:
    names = [param.name for param in kernel.params]
    rest = [param for param in kernel.params if not param.is_constexpr]
    pointers = tuple(param.name for param in rest if param.name.endswith("_ptr"))
    numbers = [param for param in rest if param.name not in pointers]
    return _Parameters(
        itemgetter(*names),
        itemgetter(*[param.name for param in kernel.params if param.is_constexpr]),
        pointers,
        tuple(param.name for param in numbers if not param.do_not_specialize),
        tuple(param.name for param in numbers if param.do_not_specialize),
    )


def specialization(one: Launch) -> tuple[Any, ...]:
    """The specialization of a kernel: constants, dtypes, and which addresses and numbers are multiples of 16, or 1."""
    found, arguments = _parameters(one.kernel), one.arguments
    pointers = [
        None if x is None else (x.dtype, x.data_ptr() % 16 == 0) for x in map(arguments.__getitem__, found.pointers)
    ]
    special = [(v == 1, v % 16 == 0, v < _WIDE) for v in map(arguments.__getitem__, found.special)]
    general = [type(v) if isinstance(v, float) else v < _WIDE for v in map(arguments.__getitem__, found.general)]
    return one.kernel, one.warps, one.stages, found.constants(arguments), *pointers, *special, *general


#: The smallest number that needs 64 bits.
_WIDE = 1 << 31


@contextmanager
def _interpreting() -> Iterator[None]:
    """A context for interpreted kernels: NumPy must keep subnormals and not warn of IEEE special cases.

    torch ops of the interpreter are not part of a recorded call.
    """
    if np.float32(1e-39) * np.float32(1) == 0:
        raise RuntimeError(
            "interpreted Triton kernels cannot run under torch.set_flush_denormal(True), which would change their "
            "results; switch it off, or leave out use_backend('triton')"
        )
    with np.errstate(all="ignore"), _disable_current_modes():
        yield
