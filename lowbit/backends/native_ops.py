"""Calls of ops as calls of ``torch.ops.lowbit_native.*``: what the CPU and CUDA backends share.

Native ops take matrices with unit column stride, numbers for formats and schemes, and outputs to fill; here tensors of
any rank and stride become that.  Schemas: csrc/ops.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lowbit import formats, scaling
from lowbit.backends.registry import Run
from lowbit.ops import optim
from lowbit.ops.spec import as_rows

__all__ = ["RUN", "Argument", "adamw", "as_it_is", "scheme_number", "through_torch"]


# -- arguments ---------------------------------------------------------------------------------------------------------
@cache
def _format(name: str) -> int:
    """A format as native ops take it: the number under which they keep it."""
    number: int = torch.ops.lowbit_native.keep(name, formats.find(name).params())
    return number


@cache
def scheme_number(name: str | None) -> int:
    """The same of a scheme; of a float matrix, which has none, -1."""
    number: int = -1 if name is None else torch.ops.lowbit_native.keep(name, scaling.scheme(name).params())
    return number


def _matrix(x: Tensor) -> Tensor:
    """``x`` as ``[rows, cols]`` with unit column stride, copied only where its strides ask for it."""
    matrix = as_rows(x)
    return matrix if matrix.stride(1) == 1 or matrix.shape[1] == 1 else matrix.contiguous()


def _filled(out: Tensor) -> Tensor:
    """An output, which is contiguous, as a matrix."""
    return out if out.dim() == 2 else out.view(-1, out.shape[-1]) if out.dim() else out.view(1, 1)


def _dense_matrix(t: Tensor) -> Tensor:
    return _filled(t.contiguous())


def _dense(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def as_it_is(value: Any) -> Any:
    return value


def _rng(call: Any) -> Tensor | None:
    """Seed and step of stochastic rounding; nothing asks for rounding to nearest."""
    return None if call.rounding == "nearest" else _dense(call.rng)


def _place(call: Any) -> list[int]:
    """Stream, offset and pitch of stochastic rounding."""
    if call.rounding == "nearest":
        return []
    pitch = scaling.as_matrix(tuple(call[0].shape))[1] if call.pitch is None else call.pitch
    return [call.stream, call.offset, pitch]


@dataclass(frozen=True)
class Argument:
    """What a native op takes: ``native`` of a call's field, of the output of that number, or of the call (``None``)."""

    source: str | int | None
    native: Callable[[Any], Any] = as_it_is

    def find(self, outs: tuple[Tensor, ...], call: Any) -> Any:
        """What ``native`` is to make fit."""
        if self.source is None:
            return call
        return outs[self.source] if isinstance(self.source, int) else getattr(call, self.source)


_X, _CODES = Argument("x", _matrix), Argument("codes", _dense_matrix)
_SCALES = (Argument("scale", _dense), Argument("zero_point", _dense), Argument("global_scale", _dense))
_FORMAT, _SCHEME = Argument("format", _format), Argument("scheme", scheme_number)
_RNG = (Argument(None, _rng), Argument(None, _place))
_OUT = Argument(0, _filled)

#: The arguments of native ops, in the order of their schemas.
_ARGUMENTS: dict[str, tuple[Argument, ...]] = {
    "encode": (_X, _OUT, _FORMAT, Argument("saturate"), *_RNG),
    "decode": (_CODES, _OUT, _FORMAT),
    "pack": (_CODES, _OUT, Argument("bits")),
    "unpack": (Argument("packed", _dense_matrix), _OUT, Argument("bits")),
    "global_scale": (_X, Argument(0), _SCHEME),
    "block_range": (_X, Argument(0), Argument(1), _SCHEME),
    "quantize": (
        _X, Argument("global_scale", _dense), _OUT, Argument(1), Argument(2, lambda t: t if t.dim() == 2 else None),
        _SCHEME, *_RNG,
    ),
    "quantize_static": (_X, *_SCALES, _OUT, _SCHEME, *_RNG),
    "dequantize": (_CODES, *_SCALES, _OUT, _SCHEME),
    "fake_quantize": (_X, *_SCALES, _OUT, _SCHEME, *_RNG),
    "fake_quantize_backward": (
        Argument("grad", _matrix), _X, *_SCALES, _OUT, Argument(1, lambda t: t if t.numel() else None), _SCHEME,
    ),
}  # fmt: skip

_ADAMW = (
    Argument("param", _matrix), Argument("grad", _matrix),
    Argument("exp_avg", _dense_matrix), Argument("exp_avg_scale", _dense),
    Argument("exp_avg_sq_root", _dense_matrix), Argument("exp_avg_sq_root_scale", _dense),
    _OUT, Argument(1, _filled), Argument(2), Argument(3, _filled), Argument(4),
    _SCHEME, Argument("rms_scheme", scheme_number), Argument(None, lambda call: list(optim.factors(call))),
    *_RNG,
)  # fmt: skip


# -- calls -------------------------------------------------------------------------------------------------------------
def through_torch(op: str, arguments: tuple[Argument, ...]) -> Run:
    """Runs ``torch.ops.lowbit_native.OP`` on the arguments that it takes of a call."""

    def run(outs: tuple[Tensor, ...], call: Any) -> None:
        getattr(torch.ops.lowbit_native, op)(*[a.native(a.find(outs, call)) for a in arguments])

    return run


#: How the ops that the CPU and CUDA serve are run, for rows of the registry.
RUN: dict[str, Run] = {op: through_torch(op, arguments) for op, arguments in _ARGUMENTS.items()}

adamw = through_torch("adamw", _ADAMW)
