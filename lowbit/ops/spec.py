"""What an operation is: its arguments, checks, outputs, cost and tolerance, in one row.

The argument list of an op is a NamedTuple; the torch schema is derived from its annotations, and everything that
concerns a call (checks, the fake rule, selection, kernels) receives that one tuple.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from lowbit import scaling
from lowbit.tensor.quantized import scale_dtype, zero_dtype

#: Shape and dtype of one output.
Out = tuple[tuple[int, ...], torch.dtype]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ROUNDINGS = ("nearest", "stochastic")

_SCHEMA_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    str: "str",
    str | None: "str?",
    int: "SymInt",
    int | None: "SymInt?",
    Sequence[int]: "int[]",
    Sequence[float]: "float[]",
    bool: "bool",
    float: "float",
    torch.dtype: "ScalarType",
    torch.dtype | None: "ScalarType?",
}


class Cost(NamedTuple):
    """Floating-point (or integer) operations, and the bytes that must move at least."""

    flops: int
    bytes: int


class Numerics(NamedTuple):
    """What a kernel of a float matrix product computes in; its error bound follows. ``codebooks``: whether numbers of
    codebooks are rounded to the operand's format too.
    """

    operand: str = "fp32"
    accumulator: str = "fp32"
    codebooks: bool = False


@dataclass(frozen=True)
class OpSpec:
    """One operation.

    ``args``: NamedTuple class of the arguments. ``outputs(call)``: shape and dtype of each output, which allocates
    them, is the fake rule, and checks what ``out=`` gives. ``check(call)``: raises for what no kernel could compute.
    ``cost(call)``: for rooflines.
    ``tolerance(call, numerics)``: elementwise bound on the error of the last output (the others are exact), or
    None where kernels agree in every bit. ``in_place``: outputs that may be the very tensor of an argument.
    """

    name: str
    args: type[Any]
    returns: tuple[str, ...]
    outputs: Callable[[Any], list[Out]]
    check: Callable[[Any], None]
    cost: Callable[[Any], Cost]
    tolerance: Callable[[Any, Numerics], Tensor] | None = None
    in_place: dict[str, str] = field(default_factory=dict)

    @property
    def schemas(self) -> tuple[str, str]:
        """The functional torch schema and that of the ``_out`` form, which returns nothing."""
        defaults = {name: _schema_default(value) for name, value in self.args._field_defaults.items()}
        arguments = ", ".join(f"{word}={defaults[name]}" if name in defaults else word for name, word in self._words())
        results = ", ".join("Tensor" for _ in self.returns)
        return f"{self.name}({arguments}) -> ({results})", f"{self.name}_out({arguments}, *, {self._outs}) -> ()"

    @property
    def positional(self) -> tuple[str, str]:
        """The arguments of both forms as C++ gives and takes them: all of them, by position."""
        arguments = ", ".join(word for _, word in self._words())
        return arguments, f"{arguments}, {self._outs}"

    def _words(self) -> list[tuple[str, str]]:
        """Each argument's name, and its type and name as a schema has them."""
        hints = get_type_hints(self.args)
        return [(name, f"{_SCHEMA_TYPES[hints[name]]} {name}") for name in self.args._fields]

    @property
    def _outs(self) -> str:
        return ", ".join(f"Tensor({chr(97 + i)}!) {name}" for i, name in enumerate(self.returns))


#: How a torch schema writes a dtype's default: the number of its ScalarType.
_SCALAR_TYPES = {torch.float16: 5, torch.float32: 6, torch.bfloat16: 15}


def _schema_default(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return str(_SCALAR_TYPES[value])
    return f'"{value}"' if isinstance(value, str) else str(value)


# -- checks that several ops share -----------------------------------------------------------------------------------
def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def require_float(op: str, name: str, x: Tensor) -> None:
    """Ops take fp32, bf16 and fp16: wider input would round twice."""
    if x.dtype not in FLOATS:
        raise TypeError(
            f"lowbit.{op}: {name} must be float32, bfloat16 or float16, got {str(x.dtype).removeprefix('torch.')}; "
            f"convert it first, for instance {name}.float()"
        )


def require_codes(op: str, name: str, codes: Tensor) -> None:
    if codes.dtype != torch.uint8:
        raise TypeError(f"lowbit.{op}: {name} must be uint8 codes, got {str(codes.dtype).removeprefix('torch.')}")


def require_input(op: str, x: Tensor, input_scheme: str | None, scale: Tensor | None) -> None:
    """``x`` holds floats, or codes of 8 bits of the scheme ``input_scheme`` with this scale."""
    if x.dtype != torch.uint8:
        require_float(op, "x", x)
        return
    require(
        input_scheme is not None and scale is not None and scaling.scheme(input_scheme).format.bits == 8,
        f"lowbit.{op}: x is uint8 and so holds codes, which have a scheme of 8 bits and a scale: give input_scheme and "
        f"input_scale; got input_scheme={input_scheme!r} and input_scale={'given' if scale is not None else None}",
    )


def require_rounding(op: str, call: Any) -> None:
    """``call`` rounds in a way that there is, and stochastic rounding has its seed and step, ``rng``."""
    if call.rounding not in ROUNDINGS:
        raise ValueError(f"lowbit.{op}: rounding must be 'nearest' or 'stochastic', got {call.rounding!r}")
    if call.rounding == "nearest":
        return
    if call.rng is None or call.rng.dtype != torch.int64 or tuple(call.rng.shape) != (2,):
        got = "None" if call.rng is None else f"{call.rng.dtype} {list(call.rng.shape)}"
        raise ValueError(f"lowbit.{op}: stochastic rounding takes rng, an int64 tensor [seed, step], got {got}")


def stored_scale(scale: Tensor, name: str) -> Tensor:
    """A weight's scale as its scheme stores it: layers keep floating-point ones as the integers of their bits."""
    dtype = scale_dtype(scaling.scheme(name))
    same_bits = not scale.is_floating_point() and scale.dtype.itemsize == dtype.itemsize
    return scale.view(dtype) if same_bits else scale


def stored_global(global_scale: Tensor | None) -> Tensor | None:
    """The same of a global scale."""
    return (
        global_scale.view(torch.float32)
        if global_scale is not None and global_scale.dtype == torch.int32
        else global_scale
    )


def require_scales(
    op: str,
    scheme: scaling.Scheme,
    rows: int,
    cols: int,
    scale: Tensor,
    zero_point: Tensor | None,
    global_scale: Tensor | None,
) -> None:
    """Scale, zero point and global scale have the dtype and shape that the scheme keeps them in, and are all there."""
    expected = scheme.scale_shape(rows, cols)
    dtype = scale_dtype(scheme)
    if scale.dtype != dtype or tuple(scale.shape) != expected:
        raise ValueError(
            f"lowbit.{op}: {scheme} keeps the scales of a [{rows}, {cols}] matrix as {dtype} {list(expected)}, "
            f"got {scale.dtype} {list(scale.shape)}"
        )
    if (zero_point is not None) != scheme.affine:
        need = "needs a zero_point" if scheme.affine else "has no zero_point (add ':affine' for one)"
        raise ValueError(f"lowbit.{op}: {scheme} {need}")
    if zero_point is not None:
        want = zero_dtype(scheme)
        if zero_point.dtype != want or tuple(zero_point.shape) != expected:
            raise ValueError(
                f"lowbit.{op}: {scheme} keeps zero points as {want} {list(expected)}, "
                f"got {zero_point.dtype} {list(zero_point.shape)}"
            )
    require_global_scale(op, scheme, rows, global_scale)


def require_global_scale(op: str, scheme: scaling.Scheme, rows: int, global_scale: Tensor | None) -> None:
    if (global_scale is not None) != bool(scheme.global_scale):
        raise ValueError(f"lowbit.{op}: {scheme} {'needs an' if scheme.global_scale else 'has no'} global_scale")
    expected = scheme.global_scale_shape(rows)
    if global_scale is not None and (global_scale.dtype != torch.float32 or tuple(global_scale.shape) != expected):
        raise ValueError(
            f"lowbit.{op}: {scheme} keeps the global_scale of {rows} rows as float32 {list(expected)}, "
            f"got {global_scale.dtype} {list(global_scale.shape)}"
        )


# -- what kernels need of a call -------------------------------------------------------------------------------------
def dtype_name(dtype: torch.dtype) -> str:
    """``fp32``, ``bf16`` or ``fp16``."""
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


def matrix_shape(x: Tensor) -> tuple[int, int]:
    """``[rows, cols]`` of a tensor of any rank, its last axis being cols; a scalar is ``[1, 1]``."""
    return scaling.as_matrix(tuple(x.shape))


def as_rows(x: Tensor) -> Tensor:
    """``x`` as a ``[rows, cols]`` matrix: a view where strides allow."""
    return x if x.dim() == 2 else x.reshape(matrix_shape(x))
