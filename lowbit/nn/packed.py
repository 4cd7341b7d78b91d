"""PackedLinear: a QuantLinear whose weight has the packed layout of CPU kernels (lowbit/tensor/prepack.py).

``lowbit.prepack_`` creates it, and ``lowbit.unprepack_`` turns it back. The weight is one immutable buffer;
``state_dict``, copies, pickles and ``weight`` unpack it into new plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from lowbit.functional import hadamard
from lowbit.nn.base import Announced
from lowbit.nn.linear import QuantLinear, misfits, plain_state, scheme_state
from lowbit.op_calls import call, original
from lowbit.ops.spec import stored_global, stored_scale
from lowbit.recipes import Recipe
from lowbit.scaling import Scheme
from lowbit.tensor import prepack
from lowbit.tensor.quantized import Quantized

__all__ = ["PackedLinear"]


class _NoBackward(torch.autograd.Function):
    """Returns ``y``, which a kernel without a backward pass computed from ``x``; backward raises."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return y.view_as(y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Nothing is saved."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            "PackedLinear has no backward pass; call lowbit.unprepack_(model) before training, and "
            "lowbit.prepack_(model) again for inference"
        )


_no_backward = cast(Callable[[Tensor, Tensor], Tensor], _NoBackward.apply)


class PackedLinear(Announced, nn.Module):
    """``y = x @ weight.T + bias`` with a packed weight, bit-identical to the QuantLinear that it was made from.

    The input is ``[..., in_features]``, fp32, bf16 or fp16 on the CPU; the result has its dtype, or autocast's. The
    layer is for inference: ``prepack_`` sets ``requires_grad=False`` on its bias. ``state_dict`` has the same entries
    as the QuantLinear's, so each layer loads the other's.

    Args:
        weight: the weight to pack, ``[out_features, in_features]``.
        bias: ``[out_features]`` or None.
        recipe: the recipe that the weight was quantized with.

    Raises:
        RuntimeError: a backward pass, or a move to another device. Call ``lowbit.unprepack_`` first.
    """

    lowbit_kind = "packed"
    packed: Tensor
    bias: nn.Parameter | None

    def __init__(self, weight: Quantized, bias: nn.Parameter | None, recipe: Recipe) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.recipe, self.scheme, self.rotation = recipe, weight.scheme, recipe.rotation
        self.weight_dtype = weight.dtype
        self.trains_bias = False  # whether the bias requires grad once it is unpacked
        self.register_buffer("packed", prepack.prepack(weight, recipe.input), persistent=False)
        self.register_parameter("bias", bias)

    @property
    def weight(self) -> Quantized:
        """The weight, unpacked into new tensors."""
        q = prepack.unpack(self.packed)
        return Quantized(q.codes, q.scale, q.zero_point, q.global_scale, q.scheme, q.shape, self.weight_dtype)

    @property
    def input(self) -> Scheme:
        """The scheme of quantized inputs."""
        return prepack.input_of(self.packed)

    def with_bias(self, bias: nn.Parameter | None) -> PackedLinear:
        """A layer that shares this weight and has another bias."""
        other = PackedLinear.__new__(PackedLinear)
        nn.Module.__init__(other)
        vars(other).update({k: v for k, v in vars(self).items() if k not in vars(other)})
        other.register_buffer("packed", self._buffers["packed"], persistent=False)
        other.register_parameter("bias", bias)
        return other

    def unpacked(self) -> QuantLinear:
        """The QuantLinear with this weight and the same bias parameter."""
        return QuantLinear(self.weight, self.bias, self.recipe)

    def forward(self, input: Tensor) -> Tensor:
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        packed, bias = self._buffers["packed"], self._parameters["bias"]
        x = input if self.rotation is None else hadamard(input, self.rotation)
        if x.requires_grad and torch.is_grad_enabled():
            return _no_backward(x, call("linear_packed", x.detach(), packed, self.out_features, bias, dtype))
        try:  # calls the op directly: one more Python function would cost a tenth of a small layer's time
            y: Tensor = torch.ops.lowbit.linear_packed.default(x, packed, self.out_features, bias, dtype)
            return y
        except (RuntimeError, ValueError) as error:
            raise original(error) from None

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"recipe={self.recipe.name}, weight={self.scheme}, input={self.recipe.input}, packed"
        )

    # -- saving, loading, copying --------------------------------------------------------------------------------------
    def get_extra_state(self) -> Tensor:
        return scheme_state(self.scheme, self.in_features, self.rotation)

    def set_extra_state(self, state: Any) -> None:
        """Nothing to do: ``_load_from_state_dict`` has compared it already."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name, part in plain_state(self.weight).items():
            destination[prefix + name] = part
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[no-untyped-call]

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
        state = plain_state(self.weight)
        loaded = {name: state_dict[prefix + name] for name in state if prefix + name in state_dict}
        errors = misfits(state, self.scheme, self.in_features, state_dict, prefix, self.rotation)
        errors += [
            f"{prefix}{name}: the state has shape {list(part.shape)}, and this layer {list(state[name].shape)}"
            for name, part in loaded.items()
            if part.shape != state[name].shape
        ]
        if errors:
            error_msgs.extend(errors)
            return
        rest = {key: value for key, value in state_dict.items() if key not in {prefix + name for name in state}}
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        missing_keys.extend(prefix + name for name in state if name not in loaded)
        parts = {**state, **loaded}
        weight = Quantized(
            parts["codes"], stored_scale(parts["scale"], self.scheme.name), parts.get("zero_point"),
            stored_global(parts.get("global_scale")), self.scheme,
            torch.Size((self.out_features, self.in_features)), self.weight_dtype,
        )  # fmt: skip
        self.packed = prepack.prepack(weight, self.recipe.input)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        buffers = dict(state["_buffers"])
        del buffers["packed"]
        return {**state, "_buffers": buffers, "_weight": self.weight}

    def __setstate__(self, state: dict[str, Any]) -> None:
        weight = state.pop("_weight")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._buffers["packed"] = prepack.prepack(weight, self.recipe.input)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedLinear:
        """Casts change the bias and ``weight_dtype``; the packed weight stays as it is."""
        target = fn(torch.empty(0, dtype=torch.uint8)).device.type
        if target != "cpu":
            raise RuntimeError(
                f"this model has layers that lowbit.prepack_ packed for the CPU and cannot move to {target}; call "
                "lowbit.unprepack_(model) first"
            )
        packed = self._buffers["packed"]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._buffers["packed"] = packed  # fn may have converted it
        self.weight_dtype = fn(torch.empty(0, dtype=self.weight_dtype)).dtype
        return self
