"""QuantLinear: a Linear layer whose weight is one Quantized, for inference and for adapters on top of it.

Codes and scales are integer parameters without gradient, rows as dim 0: FSDP2 shards parameters (not buffers), and
neither ``model.bfloat16()`` nor a mixed-precision policy casts integers, so no bit of them ever changes.
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
from lowbit.ops.spec import stored_global, stored_scale
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

#: What quantizes inputs, where the recipe's input scales are static.
INPUT_PARTS = ("input_scale", "input_zero_point")

#: Before the block of a Hadamard transform, in what states say of a weight.
_ROTATION = "hadamard"

#: The integer dtype whose bits hold those of a floating-point scale.
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def result_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a Linear's result: autocast's inside autocast, else that of its input."""
    kind = "cpu" if x.is_cpu else x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


def empty(
    shape: tuple[int, ...], scheme: Scheme, dtype: torch.dtype, device: torch.device | str | None = None
) -> Quantized:
    """A Quantized of that shape whose tensors are allocated but not filled; ``load_model`` fills them."""
    rows, cols = as_matrix(shape)
    scales = scheme.scale_shape(rows, cols)

    def make(size: tuple[int, ...], kind: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=kind, device=device)

    return Quantized(
        make((*shape[:-1], scheme.packed_cols(cols)), torch.uint8),
        make(scales, scale_dtype(scheme)),
        make(scales, zero_dtype(scheme)) if scheme.affine else None,
        make(scheme.global_scale_shape(rows), torch.float32) if scheme.global_scale else None,
        scheme, torch.Size(shape), dtype,
    )  # fmt: skip


class QuantLinear(Announced, nn.Module):
    """``y = x @ weight.T + bias`` with a quantized weight, and with ``recipe.input`` a quantized input: by scales that
    are made of each input, or where the recipe says ``scale="static"``, by ``input_scales``.

    ``rotation``: the block of the Hadamard transform that inputs go through first (``recipe.rotation``); ``weight`` is
    that of the transformed inputs then, and ``plain_weight`` that of the layer's.

    ``weight``: Quantized ``[out_features, in_features]``; ``bias [out_features]`` stays in high precision. Input
    ``[..., in_features]`` fp32, bf16 or fp16; the result has its dtype (inside autocast: autocast's). The gradient of
    the input passes straight through its quantization: ``grad @ weight.dequantize()``.

    Parameters: ``codes``, ``scale``, ``zero_point`` (affine schemes) and ``global_scale`` (two-level schemes), with
    static input scales also ``input_scale`` and ``input_zero_point``; floating scales are kept as the integers of their
    bits, and ``.weight`` shows them as the numbers they are. Integers have no gradient, so torch raises for
    ``model.requires_grad_(True)``; set it on the floating-point parameters instead. What averages parameters
    (``AveragedModel``) would average these integers too, which moves the scales a little at every update: average the
    floating-point ones only, for instance with
    ``multi_avg_fn=lambda a, b, n: ema(a, b, n) if a[0].is_floating_point() else None``.
    ``state_dict`` also holds the scheme's name, as ``_extra_state``: ASCII in a uint8 tensor, which every container of
    tensors keeps (safetensors, distributed checkpoints); with ``in_features`` where rows of codes end within a byte.
    ``load_state_dict`` refuses codes of another scheme, since
    most would fit, and mean something else. Backward runs on the backend of its forward; inside torch.compile each
    call chooses anew.

    ``lowbit.fuse_requantize_`` sets ``consumers``: one of the layers that consume this layer's output, all of which
    share one static input scheme and its scales. The result of an fp32 input is then codes in that scheme: int8 where
    zero is the code 0, else uint8. With gradients it stays in floats. No bit of what the consumers compute changes.

    ``lowbit.prepack_`` makes a ``PackedLinear`` of it, which is faster on CPUs.
    Raises TypeError for inputs of other dtypes, ValueError for another last axis.
    """

    lowbit_kind = "quantized"

    codes: nn.Parameter
    scale: nn.Parameter
    zero_point: nn.Parameter | None
    global_scale: nn.Parameter | None
    input_scale: nn.Parameter | None
    input_zero_point: nn.Parameter | None
    bias: nn.Parameter | None
    consumers: tuple[QuantLinear, ...] = ()  # in a tuple: it is not a part of this layer

    def __init__(
        self, weight: Quantized, bias: nn.Parameter | None, recipe: Recipe, input_scales: Scales | None = None
    ) -> None:
        super().__init__()
        if weight.ndim != 2:
            raise ValueError(f"QuantLinear needs a weight [out, in], got shape {list(weight.shape)}")
        self.out_features, self.in_features = weight.shape
        self.recipe, self.scheme, self.rotation = recipe, weight.scheme, recipe.rotation
        self.weight_dtype = weight.dtype
        if recipe.static != (input_scales is not None):
            raise ValueError(
                f"QuantLinear: recipe {recipe.name!r} {'needs' if recipe.static else 'does not take'} input_scales; "
                f"recipes with scale='static' have them, from lowbit.calibrate(model, recipe, batches)"
            )
        parts = {**plain_state(weight), **_input_state(input_scales)}
        for name in (*PARTS, *INPUT_PARTS):
            part = parts.get(name)
            self.register_parameter(name, None if part is None else nn.Parameter(part, requires_grad=False))
        self._input_name = None if recipe.input is None else recipe.input.name
        self.register_parameter("bias", bias)

    @property
    def weight(self) -> Quantized:
        """The weight: views of this layer's parameters."""
        parts: dict[str, Any] = self._parameters
        shape = torch.Size((self.out_features, self.in_features))
        return Quantized(
            parts["codes"], stored_scale(parts["scale"], self.scheme.name), parts["zero_point"],
            stored_global(parts["global_scale"]), self.scheme, shape, self.weight_dtype,
        )  # fmt: skip

    @property
    def input_scales(self) -> Scales | None:
        """The static scales that inputs are quantized by: views of this layer's parameters. None: they are dynamic."""
        parts: dict[str, Any] = self._parameters
        if self._input_name is None or parts["input_scale"] is None:
            return None
        return Scales(stored_scale(parts["input_scale"], self._input_name), parts["input_zero_point"])

    def plain_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """The matrix ``[out_features, in_features]`` that the layer stands for, in ``dtype`` or that of ``weight``."""
        weight = self.weight
        if self.rotation is None:
            return weight.dequantize(dtype)
        return hadamard(weight.dequantize(torch.float32), self.rotation).to(dtype or weight.dtype)

    def share_weight(self, other: QuantLinear) -> None:
        """Hold the very parameters of ``other``'s weight: tied layers have one Quantized."""
        for name in PARTS:
            self._parameters[name] = other._parameters[name]

    def forward(self, input: Tensor) -> Tensor:
        x, dtype = self._given(input)
        if x.shape[-1:] != (self.in_features,):
            raise wrong_width(self, x)
        if self.rotation is not None:
            x = hadamard(x, self.rotation)
        parts: dict[str, Any] = self._parameters
        bias = parts["bias"]
        refuse_tangents("linear", x, bias)
        y: Tensor = call(
            "linear", x, parts["codes"], self.scheme.name, parts["scale"], parts["zero_point"], parts["global_scale"],
            bias, self._input_name, dtype, *self._scales(x, dtype),
        )  # fmt: skip
        return self._signed(y)

    def conv(self, x: Tensor, window: Window) -> Tensor:
        """A convolution's result ``[N, *S', out_features]``, of ``x [N, *S, C]``, with this weight."""
        x, dtype = self._given(x)
        parts: dict[str, Any] = self._parameters
        refuse_tangents("conv", x, parts["bias"])
        y: Tensor = call(
            "conv", x, parts["codes"], self.scheme.name, parts["scale"], parts["zero_point"], parts["global_scale"],
            parts["bias"], *window, self._input_name, dtype, *self._scales(x, dtype),
        )  # fmt: skip
        return self._signed(y)

    def _given(self, x: Tensor) -> tuple[Tensor, torch.dtype]:
        """An input as the op takes it, and the dtype of the result: fp32 of codes."""
        if x.dtype in (torch.int8, torch.uint8) and self.recipe.static:
            return x.view(torch.uint8), torch.float32
        dtype = result_dtype(x)
        return x.to(dtype) if self._input_name is None and x.dtype != dtype else x, dtype

    def _scales(self, x: Tensor, dtype: torch.dtype) -> tuple[Any, ...]:
        """The scales of the input, and what makes codes of a result of that dtype, as ops take them."""
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
        """Codes as numbers in their order, where zero is the code 0."""
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
        """Raises ValueError for codes of another scheme or width; ``_load_from_state_dict`` has compared them already,
        other libraries call this alone.
        """
        wrong = misfits({}, self.scheme, self.in_features, {"_extra_state": state}, "", self.rotation)
        if wrong:
            raise ValueError(wrong[0])

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
        wrong = misfits(parts, self.scheme, self.in_features, state_dict, prefix, self.rotation)
        if wrong:  # nothing of this layer is written
            error_msgs.extend(wrong)
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantLinear:
        """Casts and moves reach the bias and the dtype that ``weight`` answers; codes and scales are only moved."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.weight_dtype = fn(torch.empty(0, dtype=self.weight_dtype)).dtype
        return self


def is_signed(scheme: Scheme) -> bool:
    """Whether codes of a scheme are the bytes of signed integers, zero being the code 0."""
    return scheme.format.kind == "integer" and scheme.format.bits == 8 and scheme.format.signed and not scheme.affine


def empty_scales(scheme: Scheme, cols: int, device: torch.device | str | None = None) -> Scales:
    """Static scales for inputs ``[..., cols]`` that are allocated but not filled."""
    shape = scheme.scale_shape(0, cols)
    zero = torch.empty(shape, dtype=zero_dtype(scheme), device=device) if scheme.affine else None
    return Scales(torch.empty(shape, dtype=scale_dtype(scheme), device=device), zero)


def plain_state(weight: Quantized) -> dict[str, Tensor]:
    """The tensors of a weight as layers keep and save them: floating-point scales as the integers of their bits."""
    return {name: _bits(part.detach()) for name, part in weight.parts.items()}


def _input_state(scales: Scales | None) -> dict[str, Tensor]:
    """The same of static input scales."""
    parts = {} if scales is None else dict(zip(INPUT_PARTS, (scales.scale, scales.zero_point), strict=True))
    return {name: _bits(part.detach()) for name, part in parts.items() if part is not None}


def _bits(part: Tensor) -> Tensor:
    return part.view(_BITS[part.dtype]) if part.is_floating_point() else part


def wrong_width(layer: Any, x: Tensor) -> ValueError:
    """The error for an input whose last axis is not what the layer takes: codes padded to whole bytes would hide it."""
    return ValueError(
        f"{type(layer).__name__}: the input and the weight must end in the same K, here in_features="
        f"{layer.in_features}; got an input {list(x.shape)}"
    )


def scheme_state(scheme: Scheme, cols: int, rotation: int | None = None) -> Tensor:
    """What a state says of a weight besides its tensors: the scheme, the columns where bytes of codes hide them, and
    the block of its Hadamard transform where it has one.
    """
    width = [str(cols)] if cols * scheme.format.bits % 8 else []
    text = " ".join([scheme.name, *width, *([] if rotation is None else [f"{_ROTATION}{rotation}"])])
    return torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")


def _transform(block: object) -> str:
    return "without a Hadamard transform" if block is None else f"with a Hadamard transform in blocks of {block}"


def misfits(
    own: Mapping[str, Tensor],
    scheme: Scheme,
    cols: int,
    state_dict: Mapping[str, Any],
    prefix: str,
    rotation: int | None = None,
) -> list[str]:
    """Why codes and scales of ``state_dict`` mean something else than a layer with ``own`` would read in them."""
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
        f"{prefix}{name}: the state has dtype {given.dtype}, and this layer {part.dtype}, whose bits it must be"
        for name, part in own.items()
        if isinstance(given := state_dict.get(prefix + name), Tensor) and given.dtype != part.dtype
    ]
