"""``torch.ops.lowbit.optimizer_steps_``: on the CPU one C++ call (csrc/ops_optim.cpp), elsewhere a step at a time.

C++ passes on to Python what it does not serve, as it does of every op (csrc/ops_entry.h): tensors that do not fit, for
whose errors Python has the words; those that share memory; and all while another backend is asked for.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from lowbit.backends import native
from lowbit.op_calls import OVERLOADS, failed
from lowbit.ops import OPS
from lowbit.ops.steps import SCHEMA, OptimizerSteps, each, step_

__all__ = ["NAME", "is_native"]

#: The op, which is no row of the table of ops.
NAME = "optimizer_steps_"
_library = torch.library.Library("lowbit", "FRAGMENT")
_table = torch.library.Library("lowbit_table", "FRAGMENT")


@cache
def is_native() -> bool:
    """Whether one C++ call serves all tensors on a CPU."""
    return native.loading_error() is None and _is_compiled()


def _is_compiled() -> bool:
    return hasattr(torch.ops.lowbit_native, "entries") and NAME in torch.ops.lowbit_native.entries()


def _one_by_one(*args: Any) -> Tensor:
    call = OptimizerSteps(*args)
    finite = []
    for step in each(call):
        step_(step)
        kept = ((step.first, step.first_scale), (step.second, step.second_scale))
        looked = [codes if scale is None else scale for codes, scale in kept if codes is not None]
        finite.append(all(x.numel() > call.look or bool(x.isfinite().all()) for x in looked))
    return torch.tensor(finite, dtype=torch.uint8, device=call.params[0].device)


def _answer(*args: Any) -> list[Tensor]:
    """For C++, which an exception would not reach: nothing where one is raised."""
    try:
        return [_one_by_one(*args)]
    except BaseException as error:
        failed(error)
        torch.ops.lowbit_native.refuse(isinstance(error, (ValueError, TypeError)), str(error))
        return []


def _fake(*args: Any) -> Tensor:
    call = OptimizerSteps(*args)
    for step in each(call):
        OPS["optimizer_step"].check(step)
    return call.params[0].new_empty(len(call.params), dtype=torch.uint8)


def register() -> None:
    """Makes the op."""
    _library.define(f"{NAME}({SCHEMA}) -> Tensor")
    _table.define(f"{NAME}({SCHEMA}) -> Tensor[]")
    _table.impl(NAME, _answer, "CompositeExplicitAutograd")
    for device in ("CUDA",) if _is_compiled() else ("CUDA", "CPU"):
        _library.impl(NAME, _one_by_one, device)
    torch.library.register_fake(f"lowbit::{NAME}", _fake, lib=_library)
    OVERLOADS[NAME] = getattr(torch.ops.lowbit, NAME).default
