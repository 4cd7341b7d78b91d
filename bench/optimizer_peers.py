"""Peers for an AdamW step: torch with fp32 moments, and 8-bit optimizers of other packages."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lowbit.bench.timing import Case, usable
from lowbit.ops.optim import OptimizerStep

#: The most elements for bitsandbytes and torchao, whose CPU steps take seconds above.
_MOST = 1 << 25


def of(call: OptimizerStep) -> Iterator[Case]:
    if call.rule != "adamw" or call.rounding != "nearest":
        return
    yield from usable(lambda: _case("torch fused, fp32 moments", call, lambda p: torch.optim.AdamW(p, fused=True)))
    if call.param.numel() <= _MOST:
        yield from usable(lambda: _case("torchao 8-bit", call, _torchao))
        yield from usable(lambda: _case("bitsandbytes 8-bit", call, _bitsandbytes))


def _case(who: str, call: OptimizerStep, make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> Case:
    param = call.param.clone().requires_grad_()
    param.grad = call.grad.clone()
    optimizer = make([param])
    return Case(who, lambda: optimizer.step())


def _torchao(params: list[Tensor]) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit

    made: torch.optim.Optimizer = AdamW8bit(params)
    return made


def _bitsandbytes(params: list[Tensor]) -> torch.optim.Optimizer:
    from bitsandbytes.optim import AdamW8bit

    made: torch.optim.Optimizer = AdamW8bit(params)
    return made
