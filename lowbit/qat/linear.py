"""FakeQuantLinear: a trainable Linear whose output is bit-identical to its quantized layer's."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.autograd import in_backward
from lowbit.datafree.scales import search
from lowbit.functional import hadamard
from lowbit.functional.arguments import refuse_tangents
from lowbit.nn.base import Announced
from lowbit.nn.linear import result_dtype, wrong_width
from lowbit.observers import MOMENTUM, Ranges
from lowbit.op_calls import call
from lowbit.ops.conv import Window
from lowbit.qat.gradients import Operand, fake_quant_conv, fake_quant_linear, multiply, quantized
from lowbit.qat.learned import Learned
from lowbit.recipes import Recipe
from lowbit.tensor.quantized import Quantized, Scales
from lowbit.torch_private import assert_async

__all__ = ["FakeQuantLinear"]


class FakeQuantLinear(Announced, nn.Module):
    """``y = x @ weight.T + bias`` as the QuantLinear of ``recipe`` computes it, with gradients.

    Forward is bit-identical to the deployed layer, in training and in eval mode. The input is ``[..., in_features]``;
    the result has its dtype, or autocast's. The gradient of rounding is 1 for values in range and 0 elsewhere
    (straight-through). Source: docs/numerics.md section 12.

    With ``recipe.rotation``, inputs and ``weight`` go through a Hadamard transform in blocks of that size before they
    are quantized. ``weight`` itself is not transformed.

    Static input scales start from the moving average of the extremes of each training batch (``input_range``), over the
    first ``observe`` batches. They are learned only afterwards. Without ``scale="static"``, input scales are computed
    from each input.

    Args:
        weight: ``[out_features, in_features]``, fp32, bf16 or fp16.
        bias: ``[out_features]``, fp32, bf16 or fp16, or None.
        recipe: the recipe of the deployed layer.
        learn_scale: make scales parameters, ``weight_scale`` and ``weight_zero_point``, which start from the scales
            with the least error of the weight. With static input scales also ``input_scale`` and ``input_zero_point``.
            They are fp32 ``[R, C]``; for power-of-two scales, binary logarithms (lowbit/qat/learned.py). Without it
            each forward computes weight scales from the weight.
        observe: number of batches to observe. Default None: all until ``lowbit.qat.freeze_observers_``.

    Raises:
        TypeError: forward got an input of another dtype.
        ValueError: the weight is not a matrix, ``observe`` is not a positive integer, or forward got an input whose
            last axis is not ``in_features``.
        RuntimeError: static input scales are needed before any training batch, or a second-order gradient.
    """

    lowbit_kind = "qat"

    weight: nn.Parameter
    bias: nn.Parameter | None
    input_range: Tensor
    observations_left: Tensor
    input_scale: Any
    input_zero_point: Any
    weight_global_scale: Tensor | None

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        recipe: Recipe,
        learn_scale: bool = False,
        observe: int | None = None,
    ) -> None:
        super().__init__()
        if weight.dim() != 2:
            raise ValueError(f"FakeQuantLinear: expected a weight [out, in], got shape {list(weight.shape)}")
        if observe is not None and (isinstance(observe, bool) or not isinstance(observe, int) or observe < 1):
            raise ValueError(f"FakeQuantLinear: observe counts batches, an integer of at least 1, got {observe!r}")
        self.out_features, self.in_features = weight.shape
        self.recipe, self.learns_scale = recipe, learn_scale
        self.weight = weight
        self.register_parameter("bias", bias)
        start = search(self._rotated().detach().float(), recipe.weight) if learn_scale else None
        self._keep("weight", None if start is None else Learned.of(start, recipe.weight), learns=True)
        self._keep("input", self._unseen() if recipe.static else None, learns=learn_scale)
        if recipe.static:
            self.register_buffer("observations_left", torch.tensor(-1 if observe is None else observe))

    def _keep(self, name: str, numbers: Learned | None, learns: bool) -> None:
        """Register the learnable numbers for scales as parameters, or as buffers if not ``learns``; global scales are
        buffers.
        """
        for part, value in zip(Learned._fields, numbers or (None, None, None), strict=True):
            if learns and part != "global_scale":
                self.register_parameter(f"{name}_{part}", None if value is None else nn.Parameter(value))
            else:
                self.register_buffer(f"{name}_{part}", value)

    def _unseen(self) -> Learned:
        """Initial static input scales, before any input; also registers the buffer of input ranges."""
        scheme, device = self.recipe.input, self.weight.device
        assert scheme is not None
        shape = scheme.scale_shape(0, self.in_features)
        self.register_buffer("input_range", torch.full((2, *shape), torch.nan, device=device))
        return Learned(torch.zeros(shape, device=device), torch.zeros(shape, device=device) if scheme.affine else None)

    def share_weight(self, other: FakeQuantLinear) -> None:
        """Use the parameters of ``other``'s weight and its scales, for tied layers."""
        for name in ("weight", "weight_scale", "weight_zero_point"):
            if name in other._parameters:
                self._parameters[name] = other._parameters[name]
        if other.weight_global_scale is not None:
            self.weight_global_scale = other.weight_global_scale

    # -- operands ------------------------------------------------------------------------------------------------------
    def _operand(self, name: str, scheme: Any) -> Operand:
        scale, zero_point, global_scale = (getattr(self, f"{name}_{part}") for part in Learned._fields)
        if scale is None:
            return Operand(scheme)
        if name == "input":  # backward needs the scales of this call, and the next call may overwrite them
            scale, zero_point = scale.clone(), None if zero_point is None else zero_point.clone()
        return Operand(scheme, Learned(scale, zero_point, global_scale))

    def _rotated(self) -> Tensor:
        """The weight before quantization, rotated if the recipe says so."""
        rotation = self.recipe.rotation
        return self.weight if rotation is None else hadamard(self.weight.float(), rotation)

    @property
    def quantized_weight(self) -> Quantized:
        """The quantized weight of the deployed layer, rotated if the recipe says so."""
        weight = quantized(self._rotated(), self._operand("weight", self.recipe.weight))
        return replace(weight, dtype=self.weight.dtype)

    def plain_weight(self) -> Tensor:
        """The decoded weight of the deployed layer without rotation, fp32."""
        weight = self.quantized_weight.dequantize(torch.float32)
        return weight if self.recipe.rotation is None else hadamard(weight, self.recipe.rotation)

    @property
    def input_scales(self) -> Scales | None:
        """The static input scales of the deployed layer; None if it computes them from each input.

        Raises:
            RuntimeError: no batch was observed yet.
        """
        if not self.recipe.static:
            return None
        self._require_range()
        return self._operand("input", self.recipe.input).scales

    def _require_range(self) -> None:
        unseen = self.input_range.isnan().any()
        message = (
            f"recipe {self.recipe.name!r} has static input scales, and this layer has seen no finite input to compute "
            f"them from; run the model on batches in training mode first"
        )
        if torch.compiler.is_compiling():  # a graph cannot branch on a value, so it raises when it runs
            assert_async(~unseen, message)
        elif bool(unseen):
            raise RuntimeError(message)

    # -- forward -------------------------------------------------------------------------------------------------------
    def forward(self, input: Tensor) -> Tensor:
        return self._product(input, None)

    def conv(self, x: Tensor, window: Window) -> Tensor:
        """A convolution with this weight, as ``QuantLinear.conv``."""
        return self._product(x, window)

    def _product(self, x: Tensor, window: Window | None) -> Tensor:
        recipe, dtype = self.recipe, result_dtype(x)
        if recipe.input is None and x.dtype != dtype:
            x = x.to(dtype)
        if window is None and x.shape[-1:] != (self.in_features,):
            raise wrong_width(self, x)
        refuse_tangents("FakeQuantLinear", x, self.weight, self.bias)
        weight = self._rotated()
        if recipe.rotation is not None:
            x = hadamard(x, recipe.rotation)
        if recipe.static:
            if self.training and self._may_observe():
                self._observe(x.detach())
            self._require_range()
        of_weight = self._operand("weight", recipe.weight)
        of_input = None if recipe.input is None else self._operand("input", recipe.input)
        if torch.is_grad_enabled():
            compute = fake_quant_linear if window is None else partial(fake_quant_conv, window)
            return compute(x, weight, self.bias, of_weight, of_input, dtype)
        return multiply(x, quantized(weight, of_weight), self.bias, of_input, dtype, window)

    def _may_observe(self) -> bool:
        """Whether this call observes its input. In a graph always; ``_observe`` then checks ``observations_left`` on
        the device.
        """
        return torch.compiler.is_compiling() or (not in_backward() and bool(self.observations_left))

    @torch.no_grad()
    def _observe(self, x: Tensor) -> None:
        """Update the moving average of the extremes with one batch and compute the input scales from it, ignoring Inf
        and NaN.

        Nothing branches on a value, so one graph serves every step. Without observations left, or before the first
        finite input, all buffers keep their values.
        """
        scheme = self.recipe.input
        assert scheme is not None
        low, high = call("block_range", x.reshape(-1, x.shape[-1]), scheme.name)
        batch, average = torch.stack([low, high]), self.input_range
        moved = torch.where(average.isnan(), batch, average + MOMENTUM * (batch - average))
        observing = self.observations_left != 0
        average.copy_(torch.where(batch.isnan() | ~observing, average, moved))
        self.observations_left -= (self.observations_left > 0).to(self.observations_left.dtype)
        known = observing & ~average.isnan().any()
        ranges = Ranges(scheme, x.shape[-1], histogram=False, device=x.device)
        learned = Learned.of(ranges.scales(average[0, 0], average[1, 0]), scheme)
        for current, new in ((self.input_scale, learned.scale), (self.input_zero_point, learned.zero_point)):
            if new is not None:
                current.copy_(torch.where(known, new, current))

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"recipe={self.recipe.name}, learn_scale={self.learns_scale}"
        )
