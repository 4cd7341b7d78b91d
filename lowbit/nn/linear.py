"""QuantLinear: a Linear layer with one Quantized as weight, for inference and for adapters on top of it.

Codes and scales are integer parameters without gradient, with rows as dim 0. FSDP2 shards parameters but not buffers,
and neither ``model.bfloat16()`` nor a mixed-precision policy casts integers, so the weight never changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.functional import hadamard
from lowbit.functional.arguments import refuse_tangents
from lowbit.nn.base import Announced
from lowbit.op_calls import call
from lowbit.ops.conv import Window
from lowbit.ops.spec import stored_global, stored_scale, stored_zero
from lowbit.recipes import Recipe
from lowbit.scaling import Scheme, as_matrix
from lowbit.tensor.quantized import Quantized, Scales, scale_dtype, zero_dtype

__all__ = [
    "INPUT_PARTS",
    "PARTS",
    "QuantLinear",
    "empty",
    "empty_scales",
    "is_signed",
    "misfits",
    "plain_state",
    "result_dtype",
    "scheme_state",
    "wrong_width",
]

#: The parameters that make up the weight.
PARTS = ("codes", "scale", "zero_point", "global_scale")

#: The parameters that quantize inputs, if the recipe's input scales are static.
INPUT_PARTS = ("input_scale", "input_zero_point")

#: Prefix of the block size of a Hadamard transform in ``_extra_state``.
_ROTATION = "hadamard"

#: The integer dtype that stores the bits of a floating-point scale.
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def result_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a Linear's result: autocast's inside autocast, else the input's."""
    device = "cpu" if x.is_cpu else x.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


def empty(
    shape: tuple[int, ...], scheme: Scheme, dtype: torch.dtype, device: torch.device | str | None = None
) -> Quantized:
    """A Quantized with allocated but unfilled tensors; ``load_model`` fills them."""
    rows, cols = as_matrix(shape)
    scales = scheme.scale_shape(rows, cols)

    def make(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    return Quantized(
        make((*shape[:-1], scheme.packed_cols(cols)), torch.uint8),
        make(scales, scale_dtype(scheme)),
        make(scales, zero_dtype(scheme)) if scheme.affine else None,
        make(scheme.global_scale_shape(rows, cols), torch.float32) if scheme.global_scale else None,
        scheme, torch.Size(shape), dtype,
    )  # fmt: skip


class QuantLinear(Announced, nn.Module):
    """``y = x @ weight.T + bias`` with a quantized weight, and a quantized input if the recipe has ``recipe.input``.

    The input is ``[..., in_features]``, fp32, bf16 or fp16; the result has its dtype, or autocast's. The gradient of
    the input is ``grad @ weight.dequantize()`` (straight-through). Backward runs on the backend of its forward; under
    torch.compile each call chooses its own backend. ``lowbit.prepack_`` replaces the layer by a ``PackedLinear``,
    which is faster on CPUs.

    The parameters are ``codes``, ``scale``, ``zero_point`` (affine schemes), ``global_scale`` (two-level schemes),
    ``columns`` (recipes with ``reordered``), and with static input scales ``input_scale`` and ``input_zero_point``.
    Floating-point scales and minima are stored as integers with the same bits; ``.weight`` views them as floats.
    Integers have no gradient, so ``model.requires_grad_(True)`` raises in torch; set it on the floating-point
    parameters instead. ``AveragedModel`` would average these integers too, so average only floating-point parameters,
    for instance with ``multi_avg_fn=lambda a, b, n: ema(a, b, n) if a[0].is_floating_point() else None``.

    ``state_dict`` also has the scheme's name as ``_extra_state``: ASCII in a uint8 tensor, which safetensors and
    distributed checkpoints can store. It includes ``in_features`` if rows of codes end within a byte.
    ``load_state_dict`` rejects codes of another scheme, because most would fit and decode to wrong values.

    ``lowbit.fuse_requantize_`` sets ``consumers`` to one of the layers that read this layer's output, which all share
    one static input scheme and its scales. For an fp32 input without gradients the result is then codes in that scheme:
    int8 if zero is the code 0, else uint8. The consumers' results are bit-identical.

    Args:
        weight: ``[out_features, in_features]``. With ``recipe.rotation`` it is the weight of inputs after a Hadamard
            transform in blocks of that size; ``plain_weight`` returns the untransformed matrix.
        bias: ``[out_features]`` in high precision, or None.
        recipe: the recipe that the layer was quantized with.
        input_scales: the static input scales, for recipes with ``scale="static"``; others quantize each input with
            scales computed from it.
        columns: int32 ``[in_features]``, for recipes with ``reordered``: column j of ``weight`` belongs to
            ``columns[j]`` of the input.

    Raises:
        TypeError: forward got an input of another dtype.
        ValueError: the weight is not a matrix, ``input_scales`` or ``columns`` do not fit the recipe, or forward got an
            input whose last axis is not ``in_features``.
    """

    lowbit_kind = "quantized"

    codes: nn.Parameter
    scale: nn.Parameter
    zero_point: nn.Parameter | None
    global_scale: nn.Parameter | None
    input_scale: nn.Parameter | None
    input_zero_point: nn.Parameter | None
    columns: nn.Parameter | None
    bias: nn.Parameter | None
    consumers: tuple[QuantLinear, ...] = ()  # a tuple, so that torch does not register it as a submodule

    def __init__(
        self,
        weight: Quantized,
        bias: nn.Parameter | None,
        recipe: Recipe,
        input_scales: Scales | None = None,
        columns: Tensor | None = None,
    ) -> None:
        super().__init__()
        if weight.ndim != 2:
            raise ValueError(f"QuantLinear: expected a weight [out, in], got shape {list(weight.shape)}")
        self.out_features, self.in_features = weight.shape
        self.recipe, self.scheme, self.rotation = recipe, weight.scheme, recipe.rotation
        self.weight_dtype = weight.dtype
        if recipe.static != (input_scales is not None):
            raise ValueError(
                f"QuantLinear: recipe {recipe.name!r} {'needs' if recipe.static else 'does not take'} input_scales; "
                f"only recipes with scale='static' use them, from lowbit.calibrate(model, recipe, batches)"
            )
        if recipe.reordered != (columns is not None):
            raise ValueError(f"QuantLinear: recipe {recipe.name!r} has reordered={recipe.reordered}, columns={columns}")
        parts = {**plain_state(weight), **_input_state(input_scales)}
        if columns is not None:
            parts["columns"] = columns.detach()
        for name in (*PARTS, *INPUT_PARTS, "columns"):
            part = parts.get(name)
            self.register_parameter(name, None if part is None else nn.Parameter(part, requires_grad=False))
        self._input_name = None if recipe.input is None else recipe.input.name
        self.register_parameter("bias", bias)

    @property
    def weight(self) -> Quantized:
        """The weight, as views of this layer's parameters."""
        parts: dict[str, Any] = self._parameters
        shape = torch.Size((self.out_features, self.in_features))
        return Quantized(
            parts["codes"], stored_scale(parts["scale"], self.scheme.name),
            stored_zero(parts["zero_point"], self.scheme.name), stored_global(parts["global_scale"]),
            self.scheme, shape, self.weight_dtype,
        )  # fmt: skip

    @property
    def input_scales(self) -> Scales | None:
        """The static input scales, as views of this layer's parameters; None if they are dynamic."""
        parts: dict[str, Any] = self._parameters
        if self._input_name is None or parts["input_scale"] is None:
            return None
        return Scales(stored_scale(parts["input_scale"], self._input_name), parts["input_zero_point"])

    def plain_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """The decoded matrix ``[out_features, in_features]`` without rotation, in ``dtype`` or the weight's dtype."""
        weight = self.weight
        if self.columns is not None:
            plain = weight.dequantize(dtype)
            return torch.empty_like(plain).index_copy_(1, self.columns.long(), plain)
        if self.rotation is None:
            return weight.dequantize(dtype)
        return hadamard(weight.dequantize(torch.float32), self.rotation).to(dtype or weight.dtype)

    def share_weight(self, other: QuantLinear) -> None:
        """Use the parameters of ``other``'s weight: tied layers have one Quantized."""
        for name in (*PARTS, "columns"):
            self._parameters[name] = other._parameters[name]

    def forward(self, input: Tensor) -> Tensor:
        x, dtype = self._operand(input)
        if x.shape[-1:] != (self.in_features,):
            raise wrong_width(self, x)
        if self.rotation is not None:
            x = hadamard(x, self.rotation)
        parts: dict[str, Any] = self._parameters
        if parts["columns"] is not None:
            x = x.index_select(-1, parts["columns"])
        bias = parts["bias"]
        refuse_tangents("linear", x, bias)
        y: Tensor = call(
            "linear", x, parts["codes"], self.scheme.name, parts["scale"], parts["zero_point"], parts["global_scale"],
            bias, self._input_name, dtype, *self._scales(x, dtype),
        )  # fmt: skip
        return self._signed(y)

    def conv(self, x: Tensor, window: Window) -> Tensor:
        """Convolve ``x [N, *S, C]`` with this weight; returns ``[N, *S', out_features]``."""
        x, dtype = self._operand(x)
        parts: dict[str, Any] = self._parameters
        refuse_tangents("conv", x, parts["bias"])
        y: Tensor = call(
            "conv", x, parts["codes"], self.scheme.name, parts["scale"], parts["zero_point"], parts["global_scale"],
            parts["bias"], *window, self._input_name, dtype, *self._scales(x, dtype),
        )  # fmt: skip
        return self._signed(y)

    def _operand(self, x: Tensor) -> tuple[Tensor, torch.dtype]:
        """The input as the op expects it, and the dtype of the result: fp32 if the input is codes."""
        if x.dtype in (torch.int8, torch.uint8) and self.recipe.static:
            return x.view(torch.uint8), torch.float32
        dtype = result_dtype(x)
        return x.to(dtype) if self._input_name is None and x.dtype != dtype else x, dtype

    def _scales(self, x: Tensor, dtype: torch.dtype) -> tuple[Any, ...]:
        """The input scales, and the consumer's scales if the result is codes, as arguments of the op."""
        input_scales = self.input_scales
        graded = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, self.bias))
        if not self.consumers or dtype != torch.float32 or graded:
            return () if input_scales is None else tuple(input_scales)
        consumer = self.consumers[0]
        out_scales = consumer.input_scales
        assert input_scales is not None and out_scales is not None
        return (
            input_scales.scale, input_scales.zero_point, None,
            consumer._input_name, out_scales.scale, out_scales.zero_point,
        )  # fmt: skip

    def _signed(self, y: Tensor) -> Tensor:
        """View codes as int8 if zero is the code 0."""
        if y.dtype != torch.uint8:
            return y
        scheme = self.consumers[0].recipe.input
        return y.view(torch.int8) if scheme is not None and is_signed(scheme) else y

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"recipe={self.recipe.name}, weight={self.scheme}, input={self.recipe.input or 'float'}"
        )

    def get_extra_state(self) -> Tensor:
        return scheme_state(self.scheme, self.in_features, self.rotation)

    def set_extra_state(self, state: Any) -> None:
        """Raise ValueError for codes of another scheme or width.

        ``_load_from_state_dict`` has compared them already, but other libraries call only this method.
        """
        errors = misfits({}, self.scheme, self.in_features, {"_extra_state": state}, "", self.rotation)
        if errors:
            raise ValueError(errors[0])

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        parts = {name: part for name in (*PARTS, *INPUT_PARTS) if (part := self._parameters[name]) is not None}
        errors = misfits(parts, self.scheme, self.in_features, state_dict, prefix, self.rotation)
        if errors:  # leave the layer unchanged
            error_msgs.extend(errors)
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantLinear:
        """Casts change the bias and ``weight_dtype``; codes and scales are only moved."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.weight_dtype = fn(torch.empty(0, dtype=self.weight_dtype)).dtype
        return self


def is_signed(scheme: Scheme) -> bool:
    """Whether codes of a scheme are the bytes of signed 8-bit integers, with the code 0 for zero."""
    return scheme.format.kind == "integer" and scheme.format.bits == 8 and scheme.format.signed and not scheme.affine


def empty_scales(scheme: Scheme, cols: int, device: torch.device | str | None = None) -> Scales:
    """Static scales for inputs ``[..., cols]`` that are allocated but not filled."""
    shape = scheme.scale_shape(0, cols)
    zero = torch.empty(shape, dtype=zero_dtype(scheme), device=device) if scheme.affine else None
    return Scales(torch.empty(shape, dtype=scale_dtype(scheme), device=device), zero)


def plain_state(weight: Quantized) -> dict[str, Tensor]:
    """A weight's tensors as layers store and save them, with floating-point scales as integers of the same bits."""
    return {name: _bits(part.detach()) for name, part in weight.parts.items()}


def _input_state(scales: Scales | None) -> dict[str, Tensor]:
    parts = {} if scales is None else dict(zip(INPUT_PARTS, (scales.scale, scales.zero_point), strict=True))
    return {name: _bits(part.detach()) for name, part in parts.items() if part is not None}


def _bits(part: Tensor) -> Tensor:
    return part.view(_BITS[part.dtype]) if part.is_floating_point() else part


def wrong_width(layer: Any, x: Tensor) -> ValueError:
    """The error for an input with a wrong last axis, which codes padded to whole bytes would hide."""
    return ValueError(
        f"{type(layer).__name__}: the input and the weight must end in the same K, here in_features="
        f"{layer.in_features}; got an input {list(x.shape)}"
    )


def scheme_state(scheme: Scheme, cols: int, rotation: int | None = None) -> Tensor:
    """The ``_extra_state`` of a weight: the scheme, the columns if rows of codes end within a byte, and the rotation if
    any.
    """
    width = [str(cols)] if cols * scheme.format.bits % 8 else []
    text = " ".join([scheme.name, *width, *([] if rotation is None else [f"{_ROTATION}{rotation}"])])
    return torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")


def _transform(block: object) -> str:
    return "without a Hadamard transform" if block is None else f"with a Hadamard transform in blocks of {block}"


def misfits(
    parts: Mapping[str, Tensor],
    scheme: Scheme,
    cols: int,
    state_dict: Mapping[str, Any],
    prefix: str,
    rotation: int | None = None,
) -> list[str]:
    """Reasons why ``state_dict`` does not fit a layer with the parameters ``parts``, empty if it fits."""
    extra_state = state_dict.get(f"{prefix}_extra_state")
    if isinstance(extra_state, Tensor) and not extra_state.is_meta:
        name, *words = bytes(extra_state.tolist()).decode(errors="replace").split(" ")
        width = next((word for word in words if word.isdigit()), "")
        block = next((word.removeprefix(_ROTATION) for word in words if word.startswith(_ROTATION)), None)
        if block != (None if rotation is None else str(rotation)):
            return [
                f"{prefix}codes: the state has a weight {_transform(block)}, and this layer one "
                f"{_transform(rotation)}; quantize the model with the recipe that the state was saved with"
            ]
        if width and int(width) != cols:
            return [f"{prefix}codes: the state has a weight with {width} columns, and this layer one with {cols}"]
        if name != scheme.name:
            return [
                f"{prefix}codes: the state has a weight in scheme {name!r}, and this layer one in "
                f"{scheme.name!r}; quantize the model with the recipe that the state was saved with"
            ]
    return [
        f"{prefix}{name}: the state has dtype {saved.dtype}, and this layer {part.dtype}, which holds a scale's bits"
        for name, part in parts.items()
        if isinstance(saved := state_dict.get(prefix + name), Tensor) and saved.dtype != part.dtype
    ]
