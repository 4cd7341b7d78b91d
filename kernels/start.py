"""Starting kernels. Triton works out at each call what it has compiled for it, which takes longer than most kernels do;
here it is asked once for each kind of arguments.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from lowbit.kernels.spec import INTERPRETED, Launch

__all__ = ["run", "specialization"]

#: Compiled kernels by device and kind of arguments.
_compiled: dict[Any, Any] = {}


def run(launches: list[Launch]) -> None:
    """Start kernels in order, on the current stream of the current device.

    Raises: RuntimeError for interpreted kernels where NumPy would flush subnormal numbers.
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
        # Contraction of a product and a sum into an fma would round once where the specification rounds twice.
        options = {"num_warps": one.warps, "num_stages": one.stages, "enable_fp_fusion": False}
        _compiled[key] = one.kernel[one.grid](**one.arguments, **options)
        return
    compiled[(*one.grid, 1, 1)[:3]](*_parameters(one.kernel).all(one.arguments))


class _Parameters(NamedTuple):
    """Of a kernel: getters of all arguments and of constants, and the names of pointers, of numbers that are compiled
    for, and of those that are not.
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
    """What a kernel is compiled for: constants, dtypes, and which addresses and numbers are multiples of 16, or 1."""
    found, arguments = _parameters(one.kernel), one.arguments
    pointers = [
        None if x is None else (x.dtype, x.data_ptr() % 16 == 0) for x in map(arguments.__getitem__, found.pointers)
    ]
    special = [(v == 1, v % 16 == 0, v < _WIDE) for v in map(arguments.__getitem__, found.special)]
    general = [type(v) if isinstance(v, float) else v < _WIDE for v in map(arguments.__getitem__, found.general)]
    return one.kernel, one.warps, one.stages, found.constants(arguments), *pointers, *special, *general


#: Numbers from here on take 64 bits.
_WIDE = 1 << 31


def _interpreting() -> AbstractContextManager[Any]:
    """NumPy interprets kernels: it must keep subnormals, and not warn of what IEEE arithmetic does as specified."""
    if np.float32(1e-39) * np.float32(1) == 0:
        raise RuntimeError(
            "interpreted Triton kernels cannot run under torch.set_flush_denormal(True), which would change their "
            "results; switch it off, or leave out use_backend('triton')"
        )
    return np.errstate(all="ignore")
