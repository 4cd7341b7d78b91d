"""The public functions on tensors: encode, decode, pack, unpack, quantize, fake_quantize, scaled_mm, linear, explain.

Shapes: a tensor of any rank is seen as ``[rows, cols]``, cols its last axis; scales are
``[ceil(rows/r), ceil(cols/c)]`` for blocks ``(r, c)``.
A scale is the multiplier that decodes; encoding divides by it in fp32.
Source: docs/numerics.md.
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lowbit import formats, reference
from lowbit.backends import registry
from lowbit.backends.dispatch import Bound, call
from lowbit.ops.spec import as_rows
from lowbit.quantized import Quantized, scale_dtype, zero_dtype
from lowbit.scaling import Scheme, as_matrix
from lowbit.scaling import scheme as find_scheme

__all__ = ["decode", "encode", "explain", "fake_quantize", "linear", "pack", "quantize", "scaled_mm", "unpack"]


#: Seed, step, stream, offset and pitch of what draws no random bits.
_NO_RANDOM_BITS = (0, 0, 0, 0, None)


def _rng(
    rounding: str, seed: int | None, step: int, stream: int | str, offset: int, pitch: int | None
) -> tuple[Any, ...]:
    """What ops take for rounding; without a seed, stochastic rounding draws one from torch's generator."""
    if rounding != "stochastic":
        return _NO_RANDOM_BITS
    if seed is None:
        if torch.compiler.is_compiling():
            raise ValueError(
                "stochastic rounding inside torch.compile needs seed= (and step=): a compiled call draws none"
            )
        asking = registry.asking()  # ``explain`` leaves the generator alone
        seed = 0 if asking else int(torch.empty((), dtype=torch.int64, device="cpu").random_())
    words = crc32(stream.encode()) if isinstance(stream, str) else stream
    return (
        _word("seed", seed, 64), _word("step", step, 32), _word("stream", words, 32), _word("offset", offset, 64),
        None if pitch is None else _word("pitch", pitch, 64),
    )  # fmt: skip


def _refuse_tangents(op: str, *arguments: Any) -> None:
    """Forward-mode derivatives (torch.func.jvp, dual numbers) would be lost without a word."""
    if getattr(forward_ad, "_current_level", -1) < 0 or torch.compiler.is_compiling():
        return
    if any(isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in arguments):
        raise NotImplementedError(f"{op} has no forward-mode derivative; use reverse mode, for instance torch.func.vjp")


def _word(name: str, word: int, bits: int) -> int:
    """A word of 32 or 64 bits, signed or not, as the signed 64-bit integer that op schemas carry."""
    if not -(1 << bits - 1) <= word < 1 << bits:
        raise ValueError(f"{name}: expected an integer of {bits} bits, got {word}; take it modulo 2**{bits}")
    return word - (1 << 64) if word >= 1 << 63 else word


def encode(
    x: Tensor,
    format: str | formats.Format,
    rounding: str = "nearest",
    saturate: bool = True,
    seed: int | None = None,
    step: int = 0,
    stream: int | str = 0,
    offset: int = 0,
    pitch: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Codes of ``x``, one a byte (uint8, shape of ``x``), without any scale.

    ``rounding``: ``"nearest"`` (ties to even) or ``"stochastic"``, whose bits depend on ``(seed, step, stream)`` and
    the element's index ``offset + row * pitch + col`` alone (for a slice, give the whole tensor's offset and pitch).
    Without ``seed``, each call draws one from torch's CPU generator; a fullgraph ``torch.compile`` cannot, and raises.
    Under ``torch.vmap`` every sample is a call of its own, which counts from ``offset`` again.
    Too large: the format's maximum, or with ``saturate=False`` Inf or NaN where the format has them. NaN: the canonical
    NaN with its sign; formats without NaN: the maximum (codebooks: the entry nearest 0; integers: 0). -0 keeps its
    sign.

    Raises TypeError for dtypes other than float32, bfloat16, float16; ValueError for an unknown format or rounding.
    Source: docs/numerics.md sections 2, 3, 4, 7.
    """
    args = (formats.find(format).name, rounding, saturate, *_rng(rounding, seed, step, stream, offset, pitch))
    if out is None:
        made: Tensor = call("encode", x, *args)
        return made
    torch.ops.lowbit.encode_out(x, *args, out=out)
    return out


def decode(
    codes: Tensor, format: str | formats.Format, dtype: torch.dtype = torch.float32, out: Tensor | None = None
) -> Tensor:
    """The values of ``codes`` (uint8, one a byte), exact in fp32 and rounded to ``dtype`` (nearest even).

    Bits of a code above the format's width are ignored. Raises TypeError when codes are not uint8.
    Source: docs/numerics.md section 6.
    """
    name = formats.find(format).name
    if out is None:
        made: Tensor = call("decode", codes, name, dtype)
        return made
    torch.ops.lowbit.decode_out(codes, name, dtype, out=out)
    return out


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes ``[..., cols]`` one a byte to ``[..., ceil(cols*bits/8)]`` bytes: a little-endian bit stream a row.

    Source: docs/numerics.md section 8.
    """
    packed: Tensor = call("pack", codes, bits)
    return packed


def unpack(packed: Tensor, bits: int, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """Codes of ``shape`` (at least one axis), one a byte, from what ``pack`` made of them."""
    if not isinstance(shape, (tuple, list)) or not shape:
        raise ValueError(f"unpack: shape must be that of the codes that were packed, such as (4, 64), got {shape!r}")
    codes: Tensor = call("unpack", packed, bits, shape[-1])
    if codes.numel() != torch.Size(shape).numel():
        raise ValueError(
            f"unpack: {list(packed.shape)} holds {list(codes.shape)} codes of {bits} bits, not {list(shape)}"
        )
    return codes.reshape(shape)


def quantize(
    x: Tensor,
    scheme: str | Scheme,
    scale: Tensor | float | None = None,
    zero_point: Tensor | int | None = None,
    outer_scale: Tensor | float | None = None,
    rounding: str = "nearest",
    seed: int | None = None,
    step: int = 0,
    stream: int | str = 0,
    offset: int = 0,
    pitch: int | None = None,
    out: Quantized | None = None,
) -> Quantized:
    """``x`` in ``scheme``: packed codes with a scale for each block.

    ``scale`` (and ``zero_point``, ``outer_scale``) given: used as they are, else made from the blocks' amax (affine:
    range). A block that holds Inf or NaN decodes to NaN, all of it and nothing else. ``out`` is filled and returned.
    Codes carry no gradient, so neither does what they decode to; ``fake_quantize`` is the same rounding with one.

    Raises TypeError and ValueError for dtypes, shapes and schemes that do not fit.
    Source: docs/numerics.md sections 3, 5.
    """
    kind = find_scheme(scheme)
    matrix = x.detach() if x.dim() else x.detach().reshape(1)
    rng = _rng(rounding, seed, step, stream, offset, pitch)
    scales = tuple([None if s is None else s.detach() for s in _given(kind, matrix, scale, zero_point, outer_scale)])
    parts = out.parts if out is not None else {}
    if out is not None and (out.scheme, out.shape, out.dtype) != (kind, x.shape, x.dtype):
        raise ValueError(
            f"quantize: out holds {out.scheme} {list(out.shape)} of {out.dtype}, "
            f"but the result is {kind} {list(x.shape)} of {x.dtype}"
        )
    if scales[0] is not None:
        codes = _quantize_static(matrix, kind, scales, rounding, rng, parts)
        made = (scales[0], scales[1])
        _copy_given(parts, scales)
    else:
        codes, *made = _quantize_dynamic(matrix, kind, scales[2], rounding, rng, parts)
    if out is not None:
        return out
    return Quantized(codes, made[0], made[1] if kind.affine else None, scales[2], kind, x.shape, x.dtype)


def _quantize_dynamic(
    x: Tensor, scheme: Scheme, outer: Tensor | None, rounding: str, rng: tuple[Any, ...], parts: dict[str, Tensor]
) -> Any:
    args = (x, scheme.name, outer, rounding, *rng)
    if not parts:
        return call("quantize", *args)
    zero = parts.get("zero_point")
    if zero is None:
        zero = torch.empty(0, dtype=zero_dtype(scheme), device=x.device)
    torch.ops.lowbit.quantize_out(*args, codes=parts["codes"], scale=parts["scale"], zero_point=zero)
    if outer is not None:
        parts["outer_scale"].copy_(outer)
    return parts["codes"], parts["scale"], zero


def _quantize_static(
    x: Tensor, scheme: Scheme, scales: tuple[Any, ...], rounding: str, rng: tuple[Any, ...], parts: dict[str, Tensor]
) -> Any:
    args = (x, scheme.name, *scales, rounding, *rng)
    if not parts:
        return call("quantize_static", *args)
    torch.ops.lowbit.quantize_static_out(*args, out=parts["codes"])
    return parts["codes"]


def _copy_given(parts: dict[str, Tensor], scales: tuple[Tensor | None, ...]) -> None:
    for name, value in zip(("scale", "zero_point", "outer_scale"), scales, strict=True):
        if value is not None and name in parts and parts[name] is not value:
            parts[name].copy_(value)


def fake_quantize(
    x: Tensor,
    scheme: str | Scheme,
    scale: Tensor | float | None = None,
    zero_point: Tensor | int | None = None,
    outer_scale: Tensor | float | None = None,
    rounding: str = "nearest",
    seed: int | None = None,
    step: int = 0,
    stream: int | str = 0,
    offset: int = 0,
    pitch: int | None = None,
) -> Tensor:
    """``quantize(x, scheme, ...).dequantize()`` in every bit, in the dtype of ``x``, with a gradient.

    The gradient passes where the element was in range (integers: ``qmin <= rint(x/s) + zp <= qmax``; floats:
    ``|x/s| <= max``) and is 0 elsewhere; scales made from ``x`` are constants. A floating-point ``scale`` that requires
    grad gets its LSQ gradient (arXiv 1902.08153, without the paper's scaling by 1/sqrt(n * qmax)).

    Raises RuntimeError where an ``outer_scale``, or a scale that is stored as codes, requires grad: it would get none;
    NotImplementedError for forward-mode derivatives.
    Source: docs/numerics.md section 10.
    """
    _refuse_tangents("fake_quantize", x, scale)
    kind = find_scheme(scheme)
    matrix = x if x.dim() else x.reshape(1)
    scales = _given(kind, matrix, scale, zero_point, outer_scale)
    learned = isinstance(scale, Tensor) and scale.requires_grad and torch.is_grad_enabled()
    if learned and scales[0] is not None and not scales[0].is_floating_point():
        raise RuntimeError(
            f"fake_quantize: scale requires grad, but {kind} stores scales as {kind.scale_format.name} codes, "
            "which have no gradient; give scale.detach(), or a scheme with fp32, bf16 or fp16 scales"
        )
    rng = _rng(rounding, seed, step, stream, offset, pitch)
    y: Tensor = call("fake_quantize", matrix, kind.name, *scales, rounding, *rng)
    return y.reshape(x.shape)


def scaled_mm(
    a: Quantized | Tensor,
    b: Quantized | Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out_scheme: str | Scheme | None = None,
    out_scale: Tensor | float | None = None,
    out: Tensor | Quantized | None = None,
) -> Tensor | Quantized:
    """``a @ b.T`` accumulated in int32 or fp32: ``a [..., M, K]``, ``b [N, K]`` (the layout of nn.Linear's weight).

    Each operand is Quantized or a float tensor. ``bias [N]`` is added in fp32, then one cast to ``out_dtype``; with
    ``out_scheme`` the fp32 result is quantized instead (with ``out_scale``, or a new scale), and Quantized is returned.

    Raises ValueError where shapes or devices do not fit, NotImplementedError for forward-mode derivatives.
    Source: docs/numerics.md section 9.
    """
    if len(b.shape) != 2:
        raise ValueError(f"scaled_mm: b must be a matrix [N, K], got shape {list(b.shape)}")
    if len(a.shape) < 1 or a.shape[-1] != b.shape[-1]:
        raise ValueError(f"scaled_mm: a {list(a.shape)} and b {list(b.shape)} must end in the same K; b is [N, K]")
    _refuse_tangents("scaled_mm", a, b, bias)
    (a_data, a_scheme, *a_scales), (b_data, b_scheme, *b_scales) = _operand(a), _operand(b)
    dtype = torch.float32 if out_scheme is not None else out_dtype
    args = (a_data, b_data, a.shape[-1], a_scheme, b_scheme, *a_scales, *b_scales, bias, dtype)
    shape = (*a.shape[:-1], b.shape[0])
    if out_scale is not None and out_scheme is None:
        raise ValueError("scaled_mm: out_scale is the scale of an out_scheme; give that too, or leave out_scale out")
    if out is not None:
        _check_out(out, shape, out_scheme, args)
    if isinstance(out, Tensor):
        viewed = out.dim() == 2 or out.is_contiguous()
        matrix = as_rows(out) if viewed else out.new_empty((out.shape[:-1].numel(), out.shape[-1]))
        torch.ops.lowbit.scaled_mm_out(*args, out=matrix)
        return out if viewed else out.copy_(matrix.reshape(shape))
    y: Tensor = call("scaled_mm", *args).reshape(shape)
    return y if out_scheme is None else quantize(y, out_scheme, scale=out_scale, out=out)


def _check_out(out: Tensor | Quantized, shape: tuple[int, ...], out_scheme: Any, inputs: tuple[Any, ...]) -> None:
    kind = Tensor if out_scheme is None else Quantized
    if not isinstance(out, kind):
        raise TypeError(
            f"scaled_mm: with out_scheme={str(out_scheme) if out_scheme is not None else None}, out must be a "
            f"{kind.__name__}, got {type(out).__name__}"
        )
    if tuple(out.shape) != shape:
        raise ValueError(f"scaled_mm: out must be of shape {list(shape)}, got {list(out.shape)}")
    _refuse_grad_of_out("scaled_mm", inputs)


def _refuse_grad_of_out(op: str, inputs: tuple[Any, ...]) -> None:
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in inputs):
        raise RuntimeError(
            f"{op}: out= does not support automatic differentiation, but an argument requires grad; "
            "leave out= away, or work under torch.no_grad()"
        )


def _operand(x: Quantized | Tensor) -> tuple[Any, ...]:
    """The matrix, its scheme, scale, zero point and outer scale."""
    if isinstance(x, Tensor):
        return as_rows(x), None, None, None, None
    return as_rows(x.codes), x.scheme.name, x.scale, x.zero_point, x.outer_scale


def linear(
    x: Tensor,
    weight: Quantized,
    bias: Tensor | None = None,
    input: str | Scheme | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``x [..., K] @ weight [N, K].T + bias [N]`` for float ``x``, which ``input`` quantizes on the way: one op.

    The bits are those of ``scaled_mm(quantize(x, input), weight, bias, out_dtype)``; ``out_dtype`` is x's where not
    given. The gradient of ``x`` passes straight through its rounding: ``grad @ weight.dequantize()``.

    Raises TypeError and ValueError for dtypes, shapes and schemes that do not fit, NotImplementedError for forward-mode
    derivatives. Source: docs/numerics.md sections 3, 5 and 9.
    """
    _refuse_tangents("linear", x, bias)
    args = (x, *_linear_rest(weight, bias, input, x.dtype if out_dtype is None else out_dtype))
    if out is None:
        y: Tensor = call("linear", *args)
        return y
    if tuple(out.shape) != (*x.shape[:-1], weight.shape[0]):
        raise ValueError(f"linear: out must be of shape {[*x.shape[:-1], weight.shape[0]]}, got {list(out.shape)}")
    _refuse_grad_of_out("linear", args)
    torch.ops.lowbit.linear_out(*args, out=out)
    return out


def _linear_rest(
    weight: Quantized, bias: Tensor | None, input: str | Scheme | None, out_dtype: torch.dtype
) -> tuple[Any, ...]:
    """The arguments of the op after ``x``."""
    return (
        weight.codes, weight.scheme.name, weight.scale, weight.zero_point, weight.outer_scale, bias,
        None if input is None else find_scheme(input).name, out_dtype,
    )  # fmt: skip


class BoundLinear:
    """``linear`` with everything but ``x`` given once: what a layer calls, with half the overhead."""

    def __init__(
        self, weight: Quantized, bias: Tensor | None, input: str | Scheme | None, out_dtype: torch.dtype
    ) -> None:
        self.weight, self.bias, self.dtype = weight, bias, out_dtype
        self._call = Bound("linear", *_linear_rest(weight, bias, input, out_dtype))

    def __call__(self, x: Tensor) -> Tensor:
        _refuse_tangents("linear", x, self.bias)
        y: Tensor = self._call(x)
        return y


def explain(op: str, *args: Any, **kwargs: Any) -> registry.Explanation:
    """What would run for ``op`` with these arguments (as the function of that name takes them), and why not more.

    ``print(lowbit.explain("scaled_mm", a, b))``. Nothing is computed by the op itself.
    """
    if op not in _EXPLAINED:
        raise ValueError(f"explain: unknown op {op!r}; expected one of {', '.join(_EXPLAINED)}")
    function, *variants = _EXPLAINED[op]
    return registry.explaining((op, *variants), lambda: function(*args, **kwargs))


#: What ``explain`` knows: the public function of each op, and the op that it runs instead where scales are given.
_EXPLAINED: dict[str, tuple[Any, ...]] = {
    "encode": (encode,),
    "decode": (decode,),
    "pack": (pack,),
    "unpack": (unpack,),
    "quantize": (quantize, "quantize_static"),
    "dequantize": (Quantized.dequantize,),
    "fake_quantize": (fake_quantize,),
    "scaled_mm": (scaled_mm,),
    "linear": (linear,),
}


# -- scales as users give them ---------------------------------------------------------------------------------------
def _given(
    kind: Scheme, x: Tensor, scale: Tensor | float | None, zero_point: Tensor | int | None, outer: Tensor | float | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Scale, zero point and outer scale as ops take them; a two-level scheme's outer scale is made where not given."""
    if scale is None and zero_point is None and outer is None and not kind.outer:
        return None, None, None
    shape = kind.scale_shape(*as_matrix(tuple(x.shape)))
    if zero_point is not None and scale is None:
        raise ValueError(f"{kind}: a zero_point needs its scale; give both, or neither for dynamic ones")
    made = None if scale is None else _stored_scale(kind, scale, shape, x.device)
    zero = None
    if zero_point is not None or (kind.affine and scale is not None):
        zero = _stored_zero(kind, zero_point, shape, x.device)
    level = None
    if outer is not None:
        level = _stored_outer(outer, x.device)
    elif kind.outer:
        if scale is not None:
            raise ValueError(f"{kind}: a given scale needs its outer_scale too, since the two decode together")
        level = call("outer_scale", x.detach(), kind.name)
    return made, zero, level


def _shaped(name: str, value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A user's scalar for every block, or one number a block: a matrix of that very shape, or a vector in its order."""
    if value.numel() == 1 and value.dim() < len(shape):
        return value.reshape([1] * len(shape)).expand(shape).contiguous()
    if value.numel() != torch.Size(shape).numel() or (value.dim() > 1 and tuple(value.shape) != shape):
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(value.shape)}")
    return value.reshape(shape)


def _number(scale: Tensor | float, device: torch.device) -> Tensor:
    """A Python number is taken in fp32, as scales are; a tensor as it is."""
    return scale if isinstance(scale, Tensor) else torch.tensor(float(scale), dtype=torch.float32, device=device)


def _stored_outer(outer: Tensor | float, device: torch.device) -> Tensor:
    value = _shaped("outer_scale", _number(outer, device), (1, 1))
    if value.dtype != torch.float32 and not torch.equal(value.float().double(), value.double()):
        raise ValueError(f"outer_scale is stored as fp32, which cannot hold the {value.dtype} given exactly")
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
    return reference.e8m0_code(value.where(value > 0, 1.0), 1.0, ceil=False).to(torch.uint8)


def _stored_zero(kind: Scheme, zero: Tensor | int | None, shape: tuple[int, int], device: torch.device) -> Tensor:
    if not kind.affine:
        raise ValueError(f"{kind} has no zero point; add ':affine' for one")
    if zero is None:
        raise ValueError(f"{kind}: a given scale needs its zero_point too")
    value = _shaped(f"{kind}: zero_point", torch.as_tensor(zero, device=device), shape)
    dtype = zero_dtype(kind)
    blind = torch.compiler.is_compiling() or value.is_meta  # no number can be looked at
    if value.dtype == dtype and (kind.format.bits == 8 or blind):
        return value
    if value.is_floating_point() or bool(((value < kind.format.qmin) | (value > kind.format.qmax)).any()):
        raise ValueError(f"{kind}: zero_point must be integers in [{kind.format.qmin}, {kind.format.qmax}]")
    return value.to(dtype)
