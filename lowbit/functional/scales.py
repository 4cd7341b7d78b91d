"""Conversion of the scales and zero points that users pass to the tensors that ops take."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit import reference
from lowbit.functional.codec import decode, encode
from lowbit.op_calls import call
from lowbit.scaling import Scheme, as_matrix
from lowbit.tensor.quantized import scale_dtype, zero_dtype
from lowbit.torch_private import is_fake


def stored_scales(
    scheme: Scheme,
    x: Tensor,
    scale: Tensor | float | None,
    zero_point: Tensor | int | None,
    global_scale: Tensor | float | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Scale, zero point and global scale as arguments of ops; computes a missing global scale that the scheme needs."""
    if scale is None and zero_point is None and global_scale is None and not scheme.global_scale:
        return None, None, None
    shape = scheme.scale_shape(*as_matrix(tuple(x.shape)))
    if zero_point is not None and scale is None:
        raise ValueError(f"{scheme}: a zero_point needs its scale; pass both, or neither for dynamic scales")
    stored = None if scale is None else _stored_scale(scheme, scale, shape, x.device)
    zero = None
    if zero_point is not None or (scheme.affine and scale is not None):
        zero = _stored_zero(scheme, zero_point, shape, x.device)
    stored_global = None
    if global_scale is not None:
        if not scheme.global_scale:
            raise ValueError(f"{scheme} has no global_scale; add ':e4m3' for block scales with a global scale")
        stored_global = _stored_global(global_scale, scheme.global_scale_shape(*as_matrix(tuple(x.shape))), x.device)
    elif scheme.global_scale:
        if scale is not None:
            raise ValueError(f"{scheme}: a scale needs its global_scale, since decoding multiplies by both; pass both")
        stored_global = call("global_scale", x.detach(), scheme.name)
    return stored, zero, stored_global


def _shaped(name: str, value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``value`` in ``shape``: a scalar for all blocks, or one number per block as a matrix or a flat vector."""
    if value.numel() == 1 and value.dim() < len(shape):
        return value.reshape([1] * len(shape)).expand(shape).contiguous()
    if value.numel() != torch.Size(shape).numel() or (value.dim() > 1 and tuple(value.shape) != shape):
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(value.shape)}")
    return value.reshape(shape)


def _number(scale: Tensor | float, device: torch.device) -> Tensor:
    """A tensor as it is; a Python number becomes an fp32 tensor."""
    if isinstance(scale, complex) or (isinstance(scale, Tensor) and scale.is_complex()):
        raise TypeError("a scale must be a real number, got a complex one")
    return scale if isinstance(scale, Tensor) else torch.tensor(float(scale), dtype=torch.float32, device=device)


def _stored_global(global_scale: Tensor | float, shape: tuple[int, int], device: torch.device) -> Tensor:
    value = _shaped("global_scale", _number(global_scale, device), shape)
    if value.dtype != torch.float32 and not torch.equal(value.float().double(), value.double()):
        raise ValueError(
            f"global_scale is stored as fp32, which cannot represent this {value.dtype} exactly; "
            "pass global_scale.float()"
        )
    return value.float()


def _stored_scale(scheme: Scheme, scale: Tensor | float, shape: tuple[int, int], device: torch.device) -> Tensor:
    """A user's scale in the scheme's dtype. Raises ValueError if that cannot represent it exactly."""
    dtype = scale_dtype(scheme)
    value = _shaped(f"{scheme}: scale", _number(scale, device), shape)
    if value.dtype == dtype:
        return value
    stored = value.to(dtype) if dtype != torch.uint8 else _scale_codes(value.float(), scheme)
    back = stored if dtype != torch.uint8 else decode(stored, scheme.scale_format.name)
    if not torch.equal(back.double(), value.double()):
        raise ValueError(
            f"{scheme} stores scales as {scheme.scale_format.name}, which cannot represent this scale exactly; "
            "round it first, or use a scheme with fp32 scales"
        )
    return stored


def _scale_codes(value: Tensor, scheme: Scheme) -> Tensor:
    if scheme.scale_format.name != "e8m0":
        return encode(value, scheme.scale_format.name)
    return reference.e8m0_code(value.where(value > 0, 1.0), 1.0, raise_above=0x7FFFFF).to(torch.uint8)


def _stored_zero(scheme: Scheme, zero: Tensor | int | None, shape: tuple[int, int], device: torch.device) -> Tensor:
    if not scheme.affine:
        raise ValueError(f"{scheme} has no zero point; add ':affine' to the scheme, or drop zero_point")
    if zero is None:
        raise ValueError(f"{scheme}: a scale needs its zero_point{' (the minimum)' * scheme.minimum}; pass both")
    value = _shaped(f"{scheme}: zero_point", torch.as_tensor(zero, device=device), shape)
    dtype = zero_dtype(scheme)
    if scheme.minimum:
        if value.dtype != dtype and not torch.equal(value.to(dtype).double(), value.double()):
            raise ValueError(f"{scheme} stores minima as {dtype}, which cannot represent this zero_point exactly")
        return value.to(dtype)
    unreadable = torch.compiler.is_compiling() or value.is_meta or is_fake(value)
    if value.dtype == dtype and (scheme.format.bits == 8 or unreadable):
        return value
    if (
        value.is_floating_point()
        or value.is_complex()
        or bool(((value < scheme.format.qmin) | (value > scheme.format.qmax)).any())
    ):
        raise ValueError(f"{scheme}: zero_point must be integers in [{scheme.format.qmin}, {scheme.format.qmax}]")
    return value.to(dtype)
