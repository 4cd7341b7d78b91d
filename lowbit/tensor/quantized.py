"""``Quantized``: packed codes with the scales that decode them.

It is not a Tensor subclass, so operations that do not support low-bit numbers raise instead of computing with codes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lowbit.op_calls import call, fill
from lowbit.scaling import Scheme, as_matrix
from lowbit.scaling import scheme as parse

__all__ = ["Quantized", "Scales", "scale_dtype", "zero_dtype"]


def scale_dtype(scheme: Scheme) -> torch.dtype:
    """dtype of the stored scales; E8M0 and E4M3 scales are stored as codes."""
    dtype: torch.dtype = getattr(torch, scheme.scale_format.dtype)
    return dtype


def zero_dtype(scheme: Scheme) -> torch.dtype:
    """dtype of the stored zero points; minima are stored like scales."""
    if scheme.minimum:
        return scale_dtype(scheme)
    return torch.int8 if scheme.format.signed else torch.uint8


class Scales(NamedTuple):
    """Static scales as ``quantize`` takes them: stored scales and zero points ``[R, C]``, and the global scale.

    In schemes with minima, ``zero_point`` holds these.
    """

    scale: Tensor
    zero_point: Tensor | None = None
    global_scale: Tensor | None = None

    @classmethod
    def of(cls, q: Quantized) -> Scales:
        """The scales of a quantized tensor."""
        return cls(q.scale, q.zero_point, q.global_scale)


#: The remedy in errors of operations that need a plain tensor.
_PLAIN = "call dequantize() for a tensor, or lowbit.dequantize_(model) for plain layers"


@dataclass(frozen=True, eq=False)
class Quantized:
    """A quantized tensor, as ``quantize`` returns it."""

    #: Packed codes, uint8 ``shape[:-1] + [packed cols]`` (a scalar: ``[1]``).
    codes: Tensor
    #: ``[R, C]`` in the scheme's scale dtype; E8M0, E4M3 and integer scales are uint8 codes.
    scale: Tensor
    #: ``[R, C]``, only in affine schemes: int8 or uint8; minima in the dtype of scales.
    zero_point: Tensor | None
    #: fp32 ``[1, 1]``, ``[rows, 1]`` or of superblocks ``[rows, S]`` or ``[rows, 2 S]``; only in schemes with a global
    #: scale.
    global_scale: Tensor | None
    #: The scheme.
    scheme: Scheme
    #: Shape of the tensor that was quantized.
    shape: torch.Size
    #: dtype of the tensor that was quantized.
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def parts(self) -> dict[str, Tensor]:
        """The tensors by name, without those that are None."""
        tensors = {
            "codes": self.codes, "scale": self.scale, "zero_point": self.zero_point, "global_scale": self.global_scale,
        }  # fmt: skip
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales, global scales and zero points."""
        return self.scheme.nbytes(tuple(self.shape))

    def numel(self) -> int:
        return self.shape.numel()

    def dequantize(self, dtype: torch.dtype | None = None, *, out: Tensor | None = None) -> Tensor:
        """Decodes to a float tensor.

        Args:
            dtype: dtype of the result; by default the dtype of ``out``, else of the tensor that was quantized.
            out: Tensor of the same shape that receives the result, which saves an allocation.

        Returns:
            ``out``, or a new tensor.

        Raises:
            ValueError: ``out`` has another shape or dtype.
            RuntimeError: ``out`` requires grad.
        """
        if out is not None and out.shape != self.shape:
            raise ValueError(f"lowbit.dequantize: out must be of shape {list(self.shape)}, got {list(out.shape)}")
        if dtype is None:
            dtype = self.dtype if out is None else out.dtype
        args = (
            self.codes, self.scheme.name, as_matrix(self.shape)[1], self.scale, self.zero_point, self.global_scale,
            dtype,
        )  # fmt: skip
        if out is None:
            y: Tensor = call("dequantize", *args)
            return y.reshape(self.shape)
        fill("dequantize", *args, out=out if self.ndim else out.view(1))
        return out

    def t(self) -> Quantized:
        """The transposed matrix. 8-bit codes are a view, narrower codes are repacked; blocks are transposed too."""
        if self.ndim != 2:
            raise ValueError(f"t() needs a matrix, got shape {list(self.shape)}")
        if self.scheme.superblocks:
            raise ValueError(f"t(): {self.scheme} has no transposed form; call dequantize().t()")
        codes, bits = self.codes, self.scheme.format.bits
        if bits == 8:
            codes = codes.t()
        elif codes.is_cuda:
            codes = call("transpose", codes, bits, self.shape[1])
        else:
            codes = call("pack", call("unpack", codes, bits, self.shape[1]).t().contiguous(), bits)
        zero_point = None if self.zero_point is None else self.zero_point.t().contiguous()
        shape = torch.Size((self.shape[1], self.shape[0]))
        return Quantized(
            codes, self.scale.t().contiguous(), zero_point, self.global_scale, self.scheme.t(), shape, self.dtype
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> Quantized:
        """A Quantized with ``change`` applied to each tensor of ``parts``, such as a move; shapes must not change."""
        parts = {name: change(part) for name, part in self.parts.items()}
        return Quantized(
            parts["codes"], parts["scale"], parts.get("zero_point"), parts.get("global_scale"),
            self.scheme, self.shape, self.dtype,
        )  # fmt: skip

    def to(
        self, device: torch.device | str | int, dtype: torch.dtype | None = None, *, non_blocking: bool = False
    ) -> Quantized:
        """Copies to another device. Raises TypeError for a dtype; use ``dequantize(dtype)`` for this."""
        dtype = device if isinstance(device, torch.dtype) else dtype
        if dtype is not None:
            raise TypeError(f"a Quantized keeps its scheme; for numbers in {dtype}, call dequantize({dtype})")
        return self.map(lambda part: part.to(device, non_blocking=non_blocking))

    def cpu(self) -> Quantized:
        """Copies to the CPU."""
        return self.to("cpu")

    def cuda(self) -> Quantized:
        """Copies to the current CUDA device."""
        return self.to("cuda")

    def dim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def size(self, axis: int | None = None) -> torch.Size | int:
        """``shape``, or its size along one axis."""
        return self.shape if axis is None else self.shape[axis]

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            known = not name.startswith("_") and hasattr(Tensor, name)
            hint = f": it holds codes, no numbers; {_PLAIN}" if known else ""
            raise AttributeError(f"a Quantized has no attribute {name!r}{hint}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """torch calls this if one of its functions gets a Quantized. Raises TypeError."""
        name = getattr(func, "__name__", str(func))
        raise TypeError(f"torch's {name} takes tensors, and a Quantized holds codes; {_PLAIN}")

    def __matmul__(self, other: Any) -> NoReturn:
        """Raises TypeError; the matmul of quantized tensors is ``lowbit.scaled_mm``."""
        raise TypeError(f"@ takes tensors, and a Quantized holds codes; call lowbit.scaled_mm(x, q), or {_PLAIN}")

    __rmatmul__ = __matmul__

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies, pickles and ``torch.save`` store the scheme by name."""
        return _restored, (*_flatten(self)[1], *self.parts.values())

    def __repr__(self) -> str:
        return (
            f"Quantized({self.scheme}, shape={list(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"{self.nbytes} bytes)"
        )


def _flatten(q: Quantized) -> tuple[list[Tensor], tuple[Any, ...]]:
    return list(q.parts.values()), (tuple(q.parts), q.scheme.name, tuple(q.shape), q.dtype)


def _unflatten(parts: Any, context: tuple[Any, ...]) -> Quantized:
    names, scheme, shape, dtype = context
    named = dict(zip(names, parts, strict=True))
    return Quantized(
        named["codes"], named["scale"], named.get("zero_point"), named.get("global_scale"),
        parse(scheme), torch.Size(shape), dtype,
    )  # fmt: skip


def _restored(
    names: tuple[str, ...], scheme: str, shape: tuple[int, ...], dtype: torch.dtype, *parts: Tensor
) -> Quantized:
    return _unflatten(parts, (names, scheme, shape, dtype))


# torch.load(weights_only=True) may call this once lowbit is imported.
torch.serialization.add_safe_globals([_restored])


def _to_dumpable(context: tuple[Any, ...]) -> list[Any]:
    names, scheme, shape, dtype = context
    return [list(names), scheme, list(shape), str(dtype).removeprefix("torch.")]


def _from_dumpable(dumped: Any) -> tuple[Any, ...]:
    names, scheme, shape, dtype = dumped
    return tuple(names), scheme, tuple(shape), getattr(torch, dtype)


pytree.register_pytree_node(
    Quantized,
    _flatten,
    _unflatten,
    serialized_type_name="lowbit.Quantized",
    to_dumpable_context=_to_dumpable,
    from_dumpable_context=_from_dumpable,
)
