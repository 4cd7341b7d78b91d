"""Starting kernels. Triton works out at each call what it has compiled for it, which takes longer than most kernels do;
here it is asked once for each kind of arguments.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowbit.kernels.spec import INTERPRETED, Launch

__all__ = ["kind_of", "run"]

#: Compiled kernels by device and kind of arguments.
_compiled: dict[Any, Any] = {}


def run(launches: list[Launch]) -> None:
    """Start kernels in order, on the current stream of the tensors' device.

    Raises: RuntimeError for interpreted kernels where NumPy would flush subnormal numbers.
    """
    with _interpreting() if INTERPRETED else nullcontext():
        for one in launches:
            _start(one)


def _start(one: Launch) -> None:
    if INTERPRETED:
        one.kernel[one.grid](**one.arguments)
        return
    key = (torch.cuda.current_device(), kind_of(one))
    compiled = _compiled.get(key)
    if compiled is None:
        # Contraction of a product and a sum into an fma would round once where the specification rounds twice.
        options = {"num_warps": one.warps, "num_stages": one.stages, "enable_fp_fusion": False}
        _compiled[key] = one.kernel[one.grid](**one.arguments, **options)
        return
    compiled[(*one.grid, 1, 1)[:3]](*[one.arguments[name] for name, _, _ in _parameters(one.kernel)])


@cache
def _parameters(kernel: Any) -> tuple[tuple[str, bool, bool], ...]:
    """Each parameter's name, whether it is a constant, and whether its value is none of the compiler's business."""
    return tuple((param.name, param.is_constexpr, param.do_not_specialize) for param in kernel.params)


def kind_of(one: Launch) -> tuple[Any, ...]:
    """What a kernel is compiled for: constants, dtypes, and which addresses and numbers are multiples of 16, or 1."""
    kind: list[Any] = [one.kernel, one.warps, one.stages]
    for name, constant, general in _parameters(one.kernel):
        value = one.arguments[name]
        if constant or value is None:
            kind.append(value)
        elif isinstance(value, Tensor):
            kind.append((value.dtype, value.data_ptr() % 16 == 0))
        elif isinstance(value, float):
            kind.append(float)
        else:
            small = -(2**31) <= value < 2**31
            kind.append(small if general else (small, value == 1, value % 16 == 0))
    return tuple(kind)


def _interpreting() -> AbstractContextManager[Any]:
    """NumPy interprets kernels: it must keep subnormals, and not warn of what IEEE arithmetic does as specified."""
    if np.float32(1e-39) * np.float32(1) == 0:
        raise RuntimeError(
            "interpreted Triton kernels cannot run under torch.set_flush_denormal(True), which would change their "
            "results; switch it off, or leave out use_backend('triton')"
        )
    return np.errstate(all="ignore")
