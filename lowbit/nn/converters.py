"""The table of converters: which layers become quantized ones, how, and why one of such a class must stay as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from lowbit.nn.attention import QuantMultiheadAttention
from lowbit.nn.conv import QuantConv2d
from lowbit.nn.linear import QuantLinear

__all__ = ["CONVERTERS", "Converter", "Make", "class_name", "foreign_forward"]

#: Makes a QuantLinear of a parameter, the matrix [out, in] that the layer computes with (a view or a copy of it, or of
#: part of it), and a bias.
Make = Callable[[Tensor, Tensor, Any], QuantLinear]

#: The forward of a checkpointed block, by its full name: it looks up what the block's class computes at each call.
_FOLLOWS_CLASS = "lowbit.memory.checkpoint.recomputed"


class Converter(NamedTuple):
    """One kind of layer: what becomes of it, and a reason why one of them must stay as it is (None: none)."""

    convert: Callable[[Any, Make], nn.Module]
    refuses: Callable[[Any], str | None]


def class_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def foreign_forward(layer: nn.Module) -> bool:
    """Whether ``layer`` runs a forward of its own in place of its class's (lowbit's checkpointing runs its class's)."""
    forward = vars(layer).get("forward")
    if not isinstance(forward, partial) or forward.args[:1] != (layer,):
        return forward is not None
    what = forward.func
    return f"{getattr(what, '__module__', '')}.{getattr(what, '__qualname__', '')}" != _FOLLOWS_CLASS


def _unusual(
    layer: nn.Module,
    parameters: Iterable[str] = ("weight", "bias"),
    optional: Iterable[str] = (),
    children: Iterable[str] = (),
) -> str | None:
    """Why ``layer`` is more, or something else, than an instance of its class with these plain parameters."""
    if foreign_forward(layer):
        return "its forward was replaced on the layer itself (accelerate's hooks do so); remove that first"
    computed = [name for name in parameters if name not in layer._parameters]
    if computed:
        return (
            f"its {' and '.join(computed)} is computed from other tensors (weight_norm, pruning); make it a plain "
            f"parameter first"
        )
    extra = {*layer._parameters, *layer._buffers, *layer._modules} - {*parameters, *optional, *children}
    if extra:
        return f"it also holds {', '.join(sorted(extra))}, which its class does not know; remove that first"
    return None


def _refuses_conv(layer: nn.Conv2d) -> str | None:
    if layer.groups > 1:
        return f"it has {layer.groups} groups, and one matrix product serves one"
    return _unusual(layer)


def _refuses_attention(layer: nn.MultiheadAttention) -> str | None:
    packed = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias")
    reason = _unusual(layer, packed, ("bias_k", "bias_v"), ("out_proj",))
    if reason is not None:
        return reason
    out = layer.out_proj
    if type(out) not in (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return f"its out_proj is a {type(out).__name__}, and not a plain Linear"
    reason = _unusual(out)
    return None if reason is None else f"of its out_proj: {reason}"


def _attention(layer: nn.MultiheadAttention, make: Make) -> QuantMultiheadAttention:
    packed = layer.in_proj_weight
    weights = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight) if packed is None else packed.chunk(3)
    biases = [None] * 3 if layer.in_proj_bias is None else layer.in_proj_bias.detach().chunk(3)
    q, k, v = (
        make(
            weight if packed is None else packed,
            weight,
            None if bias is None else nn.Parameter(bias.clone(), layer.in_proj_bias.requires_grad),
        )
        for weight, bias in zip(weights, biases, strict=True)
    )
    out = layer.out_proj
    return QuantMultiheadAttention(layer, q, k, v, make(out.weight, out.weight, out.bias))


#: What is converted, by the full name of its exact class: subclasses may compute something else, and are left alone.
CONVERTERS: dict[str, Converter] = {
    "torch.nn.modules.linear.Linear": Converter(
        lambda layer, make: make(layer.weight, layer.weight, layer.bias), _unusual
    ),
    "torch.nn.modules.conv.Conv2d": Converter(
        lambda layer, make: QuantConv2d(layer, make(layer.weight, layer.weight.flatten(1), layer.bias)), _refuses_conv
    ),
    "torch.nn.modules.activation.MultiheadAttention": Converter(_attention, _refuses_attention),
    "transformers.pytorch_utils.Conv1D": Converter(
        lambda layer, make: make(layer.weight, layer.weight.t(), layer.bias), _unusual
    ),
}
