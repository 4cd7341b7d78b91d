"""Scales and zero points as users give them, made into what ops take."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit import reference
from lowbit.functional.codec import decode, encode
from lowbit.op_calls import call
from lowbit.scaling import Scheme, as_matrix
from lowbit.tensor.quantized import scale_dtype, zero_dtype
from lowbit.torch_private import is_fake


def given_scales(
    kind: Scheme,
    x: Tensor,
    scale: Tensor | float | None,
    zero_point: Tensor | int | None,
    global_scale: Tensor | float | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Scale, zero point and global scale as ops take them; a two-level scheme's is made where it is not given."""
    if scale is None and zero_point is None and global_scale is None and not kind.global_scale:
        return None, None, None
    shape = kind.scale_shape(*as_matrix(tuple(x.shape)))
    if zero_point is not None and scale is None:
        raise ValueError(f"{kind}: a zero_point needs its scale; give both, or neither for dynamic ones")
    stored = None if scale is None else _stored_scale(kind, scale, shape, x.device)
    zero = None
    if zero_point is not None or (kind.affine and scale is not None):
        zero = _stored_zero(kind, zero_point, shape, x.device)
    level = None
    if global_scale is not None:
        if not kind.global_scale:
            raise ValueError(f"{kind} has no global_scale; add ':e4m3' for scales below a global one")
        level = _stored_global(global_scale, kind.global_scale_shape(as_matrix(tuple(x.shape))[0]), x.device)
    elif kind.global_scale:
        if scale is not None:
            raise ValueError(f"{kind}: a given scale needs its global_scale too, since the two decode together")
        level = call("global_scale", x.detach(), kind.name)
    return stored, zero, level


def _shaped(name: str, value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A user's scalar for every block, or one number a block: a matrix of that very shape, or a vector in its order."""
    if value.numel() == 1 and value.dim() < len(shape):
        return value.reshape([1] * len(shape)).expand(shape).contiguous()
    if value.numel() != torch.Size(shape).numel() or (value.dim() > 1 and tuple(value.shape) != shape):
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(value.shape)}")
    return value.reshape(shape)


def _number(scale: Tensor | float, device: torch.device) -> Tensor:
    """A Python number is taken in fp32, as scales are; a tensor as it is."""
    if isinstance(scale, complex) or (isinstance(scale, Tensor) and scale.is_complex()):
        raise TypeError("a scale must be a real number, got a complex one")
    return scale if isinstance(scale, Tensor) else torch.tensor(float(scale), dtype=torch.float32, device=device)


def _stored_global(global_scale: Tensor | float, shape: tuple[int, int], device: torch.device) -> Tensor:
    value = _shaped("global_scale", _number(global_scale, device), shape)
    if value.dtype != torch.float32 and not torch.equal(value.float().double(), value.double()):
        raise ValueError(f"global_scale is stored as fp32, which cannot hold the {value.dtype} given exactly")
    return value.float()


def _stored_scale(kind: Scheme, scale: Tensor | float, shape: tuple[int, int], device: torch.device) -> Tensor:
    """A user's scale in the dtype that the scheme stores. Raises where the storage format cannot hold it exactly."""
    dtype = scale_dtype(kind)
    value = _shaped(f"{kind}: scale", _number(scale, device), shape)
    if value.dtype == dtype:
        return value
    stored = value.to(dtype) if dtype != torch.uint8 else _scale_codes(value.float(), kind)
    back = stored if dtype != torch.uint8 else decode(stored, kind.scale_format.name)
    if not torch.equal(back.double(), value.double()):
        raise ValueError(f"{kind} stores scales as {kind.scale_format.name}, which cannot hold the scale given exactly")
    return stored


def _scale_codes(value: Tensor, kind: Scheme) -> Tensor:
    if kind.scale_format.name != "e8m0":
        return encode(value, kind.scale_format.name)
    return reference.e8m0_code(value.where(value > 0, 1.0), 1.0, raise_above=0x7FFFFF).to(torch.uint8)


def _stored_zero(kind: Scheme, zero: Tensor | int | None, shape: tuple[int, int], device: torch.device) -> Tensor:
    if not kind.affine:
        raise ValueError(f"{kind} has no zero point; add ':affine' for one")
    if zero is None:
        raise ValueError(f"{kind}: a given scale needs its zero_point too")
    value = _shaped(f"{kind}: zero_point", torch.as_tensor(zero, device=device), shape)
    dtype = zero_dtype(kind)
    blind = torch.compiler.is_compiling() or value.is_meta or is_fake(value)  # no number can be looked at
    if value.dtype == dtype and (kind.format.bits == 8 or blind):
        return value
    if (
        value.is_floating_point()
        or value.is_complex()
        or bool(((value < kind.format.qmin) | (value > kind.format.qmax)).any())
    ):
        raise ValueError(f"{kind}: zero_point must be integers in [{kind.format.qmin}, {kind.format.qmax}]")
    return value.to(dtype)
