"""OpSpec, which defines an op (arguments, checks, outputs, cost, tolerance), and checks that ops share.

The arguments of an op are a NamedTuple. The torch schema is derived from its annotations. Checks, fake functions,
kernel selection and kernels all receive this tuple.
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
    """Floating-point (or integer) operations, and the fewest bytes that must move."""

    flops: int
    bytes: int


class Numerics(NamedTuple):
    """Formats in which a kernel of a float matmul computes; they determine its error bound.

    Attributes:
        operand: The format to which operands are rounded.
        accumulator: The format of sums.
        codebooks: Whether codebook values are rounded to the operand's format too.
    """

    operand: str = "fp32"
    accumulator: str = "fp32"
    codebooks: bool = False


@dataclass(frozen=True)
class OpSpec:
    """One operation.

    Attributes:
        name: The name in ``torch.ops.lowbit``.
        args: NamedTuple class of the arguments.
        returns: Names of the outputs.
        outputs: ``outputs(call)`` returns the shape and dtype of each output. It allocates outputs, is the fake
            function, and checks ``out=``.
        check: ``check(call)`` raises for a call that no kernel could compute.
        cost: ``cost(call)``, for rooflines.
        tolerance: ``tolerance(call, numerics)`` is the elementwise error bound of the last output (the others are
            exact). None if all kernels are bit-identical.
        in_place: Outputs that may be the same tensor as an argument.
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
        """The torch schemas of the functional form and of the ``_out`` form, which returns nothing."""
        defaults = {name: _schema_default(value) for name, value in self.args._field_defaults.items()}
        arguments = ", ".join(f"{word}={defaults[name]}" if name in defaults else word for name, word in self._words())
        results = ", ".join("Tensor" for _ in self.returns)
        return f"{self.name}({arguments}) -> ({results})", f"{self.name}_out({arguments}, *, {self._outs}) -> ()"

    @property
    def positional(self) -> tuple[str, str]:
        """The arguments of both forms for C++: all of them, by position."""
        arguments = ", ".join(word for _, word in self._words())
        return arguments, f"{arguments}, {self._outs}"

    def _words(self) -> list[tuple[str, str]]:
        """Each argument's name, and its type and name in schema syntax."""
        hints = get_type_hints(self.args)
        return [(name, f"{_SCHEMA_TYPES[hints[name]]} {name}") for name in self.args._fields]

    @property
    def _outs(self) -> str:
        return ", ".join(f"Tensor({chr(97 + i)}!) {name}" for i, name in enumerate(self.returns))


#: Default dtypes in schema syntax: the number of the ScalarType.
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
    """Ops support fp32, bf16 and fp16: wider input would round twice."""
    if x.dtype not in FLOATS:
        raise TypeError(
            f"lowbit.{op}: {name} must be float32, bfloat16 or float16, got {str(x.dtype).removeprefix('torch.')}; "
            f"convert it first, for instance {name}.float()"
        )


def require_codes(op: str, name: str, codes: Tensor) -> None:
    if codes.dtype != torch.uint8:
        raise TypeError(f"lowbit.{op}: {name} must be uint8 codes, got {str(codes.dtype).removeprefix('torch.')}")


def require_input(op: str, x: Tensor, input_scheme: str | None, scale: Tensor | None) -> None:
    """Check that ``x`` holds floats, or 8-bit codes of ``input_scheme`` with a scale."""
    if x.dtype != torch.uint8:
        require_float(op, "x", x)
        return
    require(
        input_scheme is not None and scale is not None and scaling.scheme(input_scheme).format.bits == 8,
        f"lowbit.{op}: x is uint8 and so holds codes, which have a scheme of 8 bits and a scale: give input_scheme and "
        f"input_scale; got input_scheme={input_scheme!r} and input_scale={'given' if scale is not None else None}",
    )


def require_rounding(op: str, call: Any) -> None:
    """Check the rounding mode, and ``rng`` (seed and step) for stochastic rounding."""
    if call.rounding not in ROUNDINGS:
        raise ValueError(f"lowbit.{op}: rounding must be 'nearest' or 'stochastic', got {call.rounding!r}")
    if call.rounding == "nearest":
        return
    if call.rng is None or call.rng.dtype != torch.int64 or tuple(call.rng.shape) != (2,):
        got = "None" if call.rng is None else f"{call.rng.dtype} {list(call.rng.shape)}"
        raise ValueError(f"lowbit.{op}: stochastic rounding takes rng, an int64 tensor [seed, step], got {got}")


def stored_scale(scale: Tensor, name: str) -> Tensor:
    """A weight's scale in its scheme's dtype: layers store floating-point scales as integers with the same bits."""
    dtype = scale_dtype(scaling.scheme(name))
    same_bits = not scale.is_floating_point() and scale.dtype.itemsize == dtype.itemsize
    return scale.view(dtype) if same_bits else scale


def stored_zero(zero_point: Tensor | None, name: str) -> Tensor | None:
    """``stored_scale`` for a zero point or minimum."""
    minimum = zero_point is not None and scaling.scheme(name).minimum
    return stored_scale(zero_point, name) if zero_point is not None and minimum else zero_point


def stored_global(global_scale: Tensor | None) -> Tensor | None:
    """``stored_scale`` for a global scale."""
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
    """Check that scale, zero point and global scale are present and have the scheme's dtypes and shapes."""
    expected = scheme.scale_shape(rows, cols)
    dtype = scale_dtype(scheme)
    if scale.dtype != dtype or tuple(scale.shape) != expected:
        raise ValueError(
            f"lowbit.{op}: {scheme} keeps the scales of a [{rows}, {cols}] matrix as {dtype} {list(expected)}, "
            f"got {scale.dtype} {list(scale.shape)}"
        )
    if (zero_point is not None) != scheme.affine:
        word = "minimum as zero_point" if scheme.minimum else "zero_point"
        need = f"needs a {word}" if scheme.affine else "has no zero_point (add ':affine' for one)"
        raise ValueError(f"lowbit.{op}: {scheme} {need}")
    if zero_point is not None:
        want = zero_dtype(scheme)
        if zero_point.dtype != want or tuple(zero_point.shape) != expected:
            raise ValueError(
                f"lowbit.{op}: {scheme} keeps zero points as {want} {list(expected)}, "
                f"got {zero_point.dtype} {list(zero_point.shape)}"
            )
    require_global_scale(op, scheme, rows, cols, global_scale)


def require_global_scale(op: str, scheme: scaling.Scheme, rows: int, cols: int, global_scale: Tensor | None) -> None:
    if (global_scale is not None) != bool(scheme.global_scale):
        raise ValueError(f"lowbit.{op}: {scheme} {'needs an' if scheme.global_scale else 'has no'} global_scale")
    expected = scheme.global_scale_shape(rows, cols)
    if global_scale is not None and (global_scale.dtype != torch.float32 or tuple(global_scale.shape) != expected):
        raise ValueError(
            f"lowbit.{op}: {scheme} keeps the global_scale of a [{rows}, {cols}] matrix as float32 {list(expected)}, "
            f"got {global_scale.dtype} {list(global_scale.shape)}"
        )


# -- shapes and dtypes for kernels -------------------------------------------------------------------------------------
def dtype_name(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


def matrix_shape(x: Tensor) -> tuple[int, int]:
    """``[rows, cols]`` of a tensor of any rank; cols is its last axis. A scalar is ``[1, 1]``."""
    return scaling.as_matrix(tuple(x.shape))


def as_rows(x: Tensor) -> Tensor:
    """``x`` as a ``[rows, cols]`` matrix: a view if strides allow."""
    return x if x.dim() == 2 else x.reshape(matrix_shape(x))
