"""Calls of ops as calls of ``torch.ops.lowbit_native.*``: what the CPU and CUDA backends share.

Native ops take matrices with unit column stride, plain integers for formats and schemes, and outputs to fill; here
tensors of any rank and stride become that.  Schemas: csrc/ops.cpp.  On the CPU what follows from a call's metadata is
done once, and calls then hand over pointers alone: csrc/ops_planned.h.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit import formats, scaling
from lowbit.backends.registry import Held, Moves, Run
from lowbit.ops import OPS, optimizer
from lowbit.ops.spec import as_rows

__all__ = ["PREPARE", "RUN", "Argument", "adamw", "as_it_is", "hold", "prepared", "scheme_number", "through_torch"]


# -- arguments ---------------------------------------------------------------------------------------------------------
@cache
def _format(name: str) -> int:
    """A format as native ops take it: the number under which they keep it."""
    number: int = torch.ops.lowbit_native.keep(formats.find(name).params())
    return number


@cache
def scheme_number(name: str | None) -> int:
    """The same of a scheme; of a float matrix, which has none, -1."""
    number: int = -1 if name is None else torch.ops.lowbit_native.keep(scaling.scheme(name).params())
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


def _rng(call: Any) -> list[int]:
    """Where the random bits of stochastic rounding come from; nothing asks for rounding to nearest."""
    if call.rounding == "nearest":
        return []
    pitch = scaling.as_matrix(tuple(call[0].shape))[1] if call.pitch is None else call.pitch
    return [call.seed, call.step, call.stream, call.offset, pitch]


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

    def place(self, call: Any) -> int:
        """Where a tensor is found in ``(*call, *outs)``."""
        return len(call) + self.source if isinstance(self.source, int) else call._fields.index(self.source)


_X, _CODES = Argument("x", _matrix), Argument("codes", _dense_matrix)
_SCALES = (Argument("scale", _dense), Argument("zero_point", _dense), Argument("outer_scale", _dense))
_FORMAT, _SCHEME, _RNG = Argument("format", _format), Argument("scheme", scheme_number), Argument(None, _rng)
_OUT = Argument(0, _filled)

#: The arguments of native ops, in the order of their schemas.
_ARGUMENTS: dict[str, tuple[Argument, ...]] = {
    "encode": (_X, _OUT, _FORMAT, Argument("saturate"), _RNG),
    "decode": (_CODES, _OUT, _FORMAT),
    "pack": (_CODES, _OUT, Argument("bits")),
    "unpack": (Argument("packed", _dense_matrix), _OUT, Argument("bits")),
    "outer_scale": (_X, Argument(0), _SCHEME),
    "block_range": (_X, Argument(0), Argument(1), _SCHEME),
    "quantize": (
        _X, Argument("outer_scale", _dense), _OUT, Argument(1), Argument(2, lambda t: t if t.dim() == 2 else None),
        _SCHEME, _RNG,
    ),
    "quantize_static": (_X, *_SCALES, _OUT, _SCHEME, _RNG),
    "dequantize": (_CODES, *_SCALES, _OUT, _SCHEME),
    "fake_quantize": (_X, *_SCALES, _OUT, _SCHEME, _RNG),
    "fake_quantize_backward": (
        Argument("grad", _matrix), _X, *_SCALES, _OUT, Argument(1, lambda t: t if t.numel() else None), _SCHEME,
    ),
}  # fmt: skip

_ADAMW = (
    Argument("param", _matrix), Argument("grad", _matrix),
    Argument("exp_avg", _dense_matrix), Argument("exp_avg_scale", _dense),
    Argument("exp_rms", _dense_matrix), Argument("exp_rms_scale", _dense),
    _OUT, Argument(1, _filled), Argument(2), Argument(3, _filled), Argument(4),
    _SCHEME, Argument("rms_scheme", scheme_number), Argument(None, lambda call: list(optimizer.factors(call))),
    _RNG,
)  # fmt: skip


# -- calls -------------------------------------------------------------------------------------------------------------
def through_torch(op: str, arguments: tuple[Argument, ...]) -> Run:
    """Runs the native op by torch's dispatcher, whatever the call."""

    def run(outs: tuple[Tensor, ...], call: Any) -> None:
        getattr(torch.ops.lowbit_native, op)(*[a.native(a.find(outs, call)) for a in arguments])

    return run


def _plan(op: str, arguments: tuple[Argument, ...], like: Any) -> tuple[int, list[int], list[Tensor]] | None:
    """The number of the plan of the CPU's native op (csrc/ops_planned.h) for calls with the metadata of ``like``, where
    its tensors are found in ``(*call, *outs)``, and those of ``like``.

    None where a tensor must be copied first, and where random bits are drawn, other ones at each call. Outputs are
    allocated for it, of which only the metadata is looked at.
    """
    outs = tuple([torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in OPS[op].outputs(like)])
    given = [argument.find(outs, like) for argument in arguments]
    taken = [argument.native(value) for argument, value in zip(arguments, given, strict=True)]
    tensors = [index for index, value in enumerate(taken) if isinstance(value, Tensor)]
    copied = any(taken[index].data_ptr() != given[index].data_ptr() for index in tensors)
    if copied or getattr(like, "rounding", "nearest") != "nearest":
        return None
    number: int = getattr(torch.ops.lowbit_native, f"plan_{op}")(*taken)
    return number, [arguments[index].place(like) for index in tensors], [taken[index] for index in tensors]


def prepared(op: str, arguments: tuple[Argument, ...], like: Any) -> Run:
    """Runs the CPU's native op for calls with the metadata of ``like``, by pointers alone where it has a plan."""
    planned = _plan(op, arguments, like)
    if planned is None:
        return through_torch(op, arguments)
    plan, places, _ = planned
    call_native, pick = _functions().call[len(places)], itemgetter(*places)

    def run(outs: tuple[Tensor, ...], call: Any) -> None:
        error = call_native(plan, *map(_data_ptr, pick((*call, *outs))))
        if error is not None:
            raise RuntimeError(error.decode())

    weakref.finalize(run, _functions().forget, plan).atexit = False
    return run


_data_ptr = Tensor.data_ptr


def hold(op: str, arguments: tuple[Argument, ...], like: Any, moves: Moves) -> Held | None:
    """The same for an op that takes its first argument first and has one output, last; its other tensors are kept.

    From C++, which garbage collection does not see through: not those that other objects hang on, which may lead back.
    """
    planned = _plan(op, arguments, like)
    if planned is None:
        return None
    plan, _, tensors = planned
    try:
        kept = [*tensors[1:-1], *(t for pair in moves for t in pair)]
        if any(vars(t) or t._backward_hooks or t._post_accumulate_grad_hooks for t in kept):  # type: ignore[attr-defined]
            return None
        number = torch.ops.lowbit_native.hold(plan, tensors, [t for pair in moves for t in pair])
    finally:
        _functions().forget(plan)
    answer = partial(torch.ops.lowbit_native.held.default._op, number)
    weakref.finalize(answer, _functions().release, number).atexit = False
    return answer


class _Functions(NamedTuple):
    """Native functions without torch, whose modes and tracers would see a call."""

    forget: Callable[[int], None]
    release: Callable[[int], None]
    call: tuple[Callable[..., bytes | None], ...]  # by the number of pointers; answers what went wrong


@cache
def _functions() -> _Functions:
    forget, release, *calls = torch.ops.lowbit_native.functions()
    number = ctypes.c_void_p
    free = ctypes.CFUNCTYPE(None, number)
    kinds = [ctypes.CFUNCTYPE(ctypes.c_char_p, number, *[number] * count) for count in range(len(calls))]
    return _Functions(free(forget), free(release), tuple(kind(call) for kind, call in zip(kinds, calls, strict=True)))


#: How the ops that the CPU and CUDA serve are run through torch, for rows of the registry; and prepared, on the CPU.
RUN: dict[str, Run] = {op: through_torch(op, arguments) for op, arguments in _ARGUMENTS.items()}
PREPARE: dict[str, Callable[[Any], Run]] = {
    op: partial(prepared, op, arguments) for op, arguments in _ARGUMENTS.items()
}

#: Its factors are others at each step.
adamw = through_torch("adamw", _ADAMW)
