"""``torch.ops.lowbit.optimizer_steps_``: one C++ call on the CPU (csrc/ops_optim.cpp), one step at a time elsewhere.

As for every op (csrc/ops_entry.h), C++ passes calls that it does not support to Python: invalid tensors, for which
Python has the messages, tensors that share memory, and all calls under ``use_backend`` with another backend.
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

#: The name of the op, which is not in the table of ops.
NAME = "optimizer_steps_"
_library = torch.library.Library("lowbit", "FRAGMENT")
_table = torch.library.Library("lowbit_table", "FRAGMENT")


@cache
def is_native() -> bool:
    """Whether one C++ call steps all tensors on a CPU."""
    return native.loading_error() is None and _is_compiled()


def _is_compiled() -> bool:
    return hasattr(torch.ops.lowbit_native, "entries") and NAME in torch.ops.lowbit_native.entries()


def _step_each(*args: Any) -> Tensor:
    call = OptimizerSteps(*args)
    finite = []
    for step in each(call):
        step_(step)
        moments = ((step.first, step.first_scale), (step.second, step.second_scale))
        inspected = [codes if scale is None else scale for codes, scale in moments if codes is not None]
        finite.append(all(x.numel() > call.look or bool(x.isfinite().all()) for x in inspected))
    return torch.tensor(finite, dtype=torch.uint8, device=call.params[0].device)


def _step_each_or_refuse(*args: Any) -> list[Tensor]:
    """For C++, which an exception would not reach: an empty list if one is raised."""
    try:
        return [_step_each(*args)]
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
    """Define the op and register its implementations."""
    _library.define(f"{NAME}({SCHEMA}) -> Tensor")
    _table.define(f"{NAME}({SCHEMA}) -> Tensor[]")
    _table.impl(NAME, _step_each_or_refuse, "CompositeExplicitAutograd")
    for device in ("CUDA",) if _is_compiled() else ("CUDA", "CPU"):
        _library.impl(NAME, _step_each, device)
    torch.library.register_fake(f"lowbit::{NAME}", _fake, lib=_library)
    OVERLOADS[NAME] = getattr(torch.ops.lowbit, NAME).default
