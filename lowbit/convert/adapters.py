"""The table of layer classes that lowbit converts, with their conversion to quantized layers and back.

``register`` adds a row. A subclass that computes the same as its base is converted like its base.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowbit.models.wrap import replaced_forward
from lowbit.nn.attention import QuantMultiheadAttention, in_projections
from lowbit.nn.base import full_name
from lowbit.nn.conv import QuantConv, QuantConv1d, QuantConv2d, QuantConv3d
from lowbit.nn.embedding import QuantEmbedding
from lowbit.nn.experts import QuantExperts, stacks
from lowbit.nn.linear import QuantLinear
from lowbit.ops.conv import spans_tensor
from lowbit.recipes import Recipe

__all__ = ["ADAPTERS", "EXPERTS", "Adapter", "Make", "Plain", "find", "register", "unusual"]

#: ``make(parameter, matrix, bias)`` returns a QuantLinear. ``matrix`` [out, in] is ``parameter`` or a part of it, as a
#: view or a copy.
Make = Callable[[Tensor, Tensor, Any], QuantLinear]

#: ``plain(*layers, kernel_size=None, transposed=False)`` returns a Parameter with the decoded weights of QuantLinears,
#: concatenated by rows; with ``kernel_size`` as convolution filters. Layers that share codes get one Parameter.
Plain = Callable[..., nn.Parameter]


class Adapter(NamedTuple):
    """How one class of layer is converted.

    Attributes:
        convert: ``convert(layer, make)`` returns the quantized layer, with QuantLinears from ``make``. It must not
            change ``layer``.
        restore: ``restore(layer, quantized, plain)`` fills the tensors of the plain ``layer``, which are None.
        refuses: ``refuses(layer)`` returns the reason why a layer cannot be converted, or None.
        parameters: The names of the parameters, which a subclass must not replace by properties.
        slower: ``slower(layer, recipe)`` returns the reason why the recipe would make the layer much slower, or None.
            Such a layer stays, unless a pattern of per-layer recipes names it.
    """

    convert: Callable[[Any, Make], nn.Module]
    restore: Callable[[Any, Any, Plain], None]
    refuses: Callable[[Any], str | None]
    parameters: tuple[str, ...] = ("weight", "bias")
    slower: Callable[[Any, Recipe], str | None] = lambda layer, recipe: None


class Found(NamedTuple):
    """The row of the table for a module."""

    adapter: Adapter | None  # None: the class is not in the table, or a subclass computes something else
    listed: str | None  # the full name of the class in the table
    reason: str | None  # why a listed class has no adapter


#: Attributes that decide the result of a call. A subclass that replaces one may compute something else.
_COMPUTES = (
    "forward", "_conv_forward", "merge_masks", "__call__", "_call_impl", "_wrapped_call_impl", "__getattr__",
    "__getattribute__",
)  # fmt: skip


def register(cls: type | str, adapter: Adapter | type) -> None:
    """Make layers of class ``cls`` convertible.

    The row applies to subclasses that compute the same as ``cls``, and replaces an earlier row for ``cls``.

    Args:
        cls: The class, or its full name (``"package.module.Class"``), which need not be importable.
        adapter: An Adapter, or a class in the table that computes the same with the same parameters.

    Raises:
        ValueError: ``adapter`` is a class that is not in the table.
        TypeError: ``cls`` or ``adapter`` has another type.

    Example:
        ``lb.convert.register(MyLinear, nn.Linear)``: MyLinear computes the same as nn.Linear from ``weight`` and
        ``bias``.
    """
    if not isinstance(cls, type | str):
        raise TypeError(f"register: cls must be a class or its full name, got {type(cls).__name__}")
    if isinstance(cls, type) and not issubclass(cls, nn.Module):
        raise TypeError(f"register: {cls.__name__} is not a subclass of nn.Module")
    if isinstance(adapter, type):
        row = ADAPTERS.get(full_name(adapter))
        if row is None:
            raise ValueError(
                f"register: {full_name(adapter)} is not in the table; expected one of {', '.join(ADAPTERS)}, or an "
                f"Adapter"
            )
    elif isinstance(adapter, Adapter):
        row = adapter
    else:
        raise TypeError(f"register: adapter must be an Adapter or a class in the table, got {type(adapter).__name__}")
    ADAPTERS[cls if isinstance(cls, str) else full_name(cls)] = row


def find(module: nn.Module) -> Found:
    """Return the row for the class of ``module``, or for its nearest listed base if the class computes the same."""
    cls = getattr(module, "lowbit_computes_as", type(module))
    for base in cls.__mro__:
        name = full_name(base)
        adapter = ADAPTERS.get(name)
        if adapter is None:
            continue
        names = (*_COMPUTES, *(p for p in adapter.parameters if p in module._parameters))
        changed = [a for a in names if getattr(cls, a, None) is not getattr(base, a, None)]
        if not changed:
            return Found(adapter, name, None)
        return Found(
            None,
            name,
            f"a {cls.__name__} replaces {' and '.join(changed)} of {base.__name__}, and may compute something else; "
            f"if it does not, call lowbit.convert.register({cls.__name__}, {base.__name__})",
        )
    if EXPERTS in ADAPTERS and _decorated(cls):
        return Found(ADAPTERS[EXPERTS], EXPERTS, None)
    return Found(None, None, None)


def unusual(
    layer: nn.Module,
    parameters: Iterable[str] = ("weight", "bias"),
    optional: Iterable[str] = (),
    children: Iterable[str] = (),
) -> str | None:
    """Why ``layer`` is not a plain instance of its class with these parameters; None if it is."""
    if "_hf_hook" in vars(layer):
        return (
            "an accelerate hook runs in place of its forward; call "
            "accelerate.hooks.remove_hook_from_module(model, recurse=True) first, or quantize before dispatching"
        )
    if replaced_forward(layer) is not None:
        return "its forward was replaced on the layer itself; remove that first"
    computed = [name for name in parameters if name not in layer._parameters]
    if computed:
        return (
            f"its {' and '.join(computed)} is computed from other tensors (weight_norm, pruning, parametrize); make it "
            f"a plain parameter first"
        )
    extra = {*layer._parameters, *layer._buffers, *layer._modules} - {*parameters, *optional, *children}
    if extra:
        return f"it also holds {', '.join(sorted(extra))}, which its class does not have; remove that first"
    return None


# -- nn.Linear, and transformers' Conv1D, whose weight is [in, out] ---------------------------------------------------
def _linear(layer: nn.Linear, make: Make) -> QuantLinear:
    return make(layer.weight, layer.weight, layer.bias)


def _linear_back(layer: nn.Linear, quantized: QuantLinear, plain: Plain) -> None:
    layer.weight, layer._parameters["bias"] = plain(quantized), quantized.bias


def _conv1d(layer: Any, make: Make) -> QuantLinear:
    return make(layer.weight, layer.weight.t(), layer.bias)


def _conv1d_back(layer: Any, quantized: QuantLinear, plain: Plain) -> None:
    layer.weight, layer._parameters["bias"] = plain(quantized, transposed=True), quantized.bias


# -- nn.Embedding -----------------------------------------------------------------------------------------------------
def _embedding(layer: nn.Embedding, make: Make) -> QuantEmbedding:
    return QuantEmbedding(layer, make(layer.weight, layer.weight, None))


def _embedding_back(layer: nn.Embedding, quantized: QuantEmbedding, plain: Plain) -> None:
    layer.weight = plain(quantized.linear)


def _refuses_embedding(layer: nn.Embedding) -> str | None:
    if layer.max_norm is not None:
        return f"max_norm={layer.max_norm} rescales its rows in every call"
    return unusual(layer, ("weight",))


# -- nn.Conv1d, nn.Conv2d, nn.Conv3d ----------------------------------------------------------------------------------
def _conv(layer: Any, make: Make, cls: type[QuantConv]) -> QuantConv:
    return cls(layer, make(layer.weight, layer.weight.movedim(1, -1).flatten(1), layer.bias))


def _slow_conv(layer: Any, recipe: Recipe) -> str | None:
    input = recipe.input
    if layer.groups < layer.in_channels or layer.in_channels == 1 or input is None or spans_tensor(input):
        return None
    return (
        f"a depthwise convolution is many times slower with input scales finer than one per tensor ({input}); use "
        f"int8-static with lowbit.calibrate, or name the layer in per-layer recipes"
    )


def _conv_back(layer: Any, quantized: QuantConv, plain: Plain) -> None:
    layer.weight = plain(quantized.linear, kernel_size=quantized.kernel_size)
    layer._parameters["bias"] = quantized.bias


# -- nn.MultiheadAttention --------------------------------------------------------------------------------------------
_PROJECTIONS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias")


def _refuses_attention(layer: nn.MultiheadAttention) -> str | None:
    reason = unusual(layer, _PROJECTIONS, ("bias_k", "bias_v"), ("out_proj",))
    if reason is not None:
        return reason
    out = layer.out_proj
    if find(out).listed != full_name(nn.Linear):
        return f"its out_proj is a {type(out).__name__}, not a Linear"
    reason = find(out).reason or unusual(out)
    return None if reason is None else f"of its out_proj: {reason}"


def _attention(layer: nn.MultiheadAttention, make: Make) -> QuantMultiheadAttention:
    packed = layer.in_proj_weight
    weights, biases = in_projections(layer)
    q, k, v = (
        make(
            weight if packed is None else packed,
            weight,
            None if bias is None else nn.Parameter(bias.detach().clone(), layer.in_proj_bias.requires_grad),
        )
        for weight, bias in zip(weights, biases, strict=True)
    )
    out = layer.out_proj
    return QuantMultiheadAttention(layer, q, k, v, make(out.weight, out.weight, out.bias))


def _attention_back(layer: nn.MultiheadAttention, quantized: QuantMultiheadAttention, plain: Plain) -> None:
    projections = (quantized.q_proj, quantized.k_proj, quantized.v_proj)
    if layer._qkv_same_embed_dim:
        layer.in_proj_weight = plain(*projections)
    else:
        for name, projection in zip(_PROJECTIONS[1:4], projections, strict=True):
            setattr(layer, name, plain(projection))
    biases = [p.bias for p in projections if p.bias is not None]
    if biases:
        bias = torch.cat([bias.detach() for bias in biases])
        layer.in_proj_bias = nn.Parameter(bias, biases[0].requires_grad)
    layer.bias_k, layer.bias_v = quantized.bias_k, quantized.bias_v
    _linear_back(layer.out_proj, quantized.out_proj, plain)
    if quantized.attend is not None:
        quantized.attend.put_on(layer)


# -- stacked experts of transformers ----------------------------------------------------------------------------------
#: The decorator of all classes of stacked experts, and the name of their row.
EXPERTS = "transformers.integrations.moe.use_experts_implementation"


def _decorated(cls: type) -> bool:
    """Whether ``forward`` comes from the decorator."""
    module = getattr(getattr(cls, "forward", None), "__globals__", {}).get("__name__")
    return bool(module == EXPERTS.rpartition(".")[0])


def _bias(part: Tensor, trained: bool) -> nn.Parameter:
    """A copy of one expert's bias; on the meta device the view itself, which ``out_of_core`` finds in its file."""
    return nn.Parameter(part.detach() if part.is_meta else part.detach().clone(), trained)


def _experts(layer: Any, make: Make) -> QuantExperts:
    def layers(name: str) -> list[QuantLinear]:
        stack = getattr(layer, name)
        biases: Any = getattr(layer, f"{name}_bias") if layer.has_bias else [None] * len(stack)
        return [
            make(
                stack,
                matrix.t() if layer.is_transposed else matrix,
                None if bias is None else _bias(bias, biases.requires_grad),
            )
            for matrix, bias in zip(stack, biases, strict=True)
        ]

    gate_up, down = (layers(name) for name in stacks(layer))
    return QuantExperts(layer, gate_up, down)


def _experts_back(layer: Any, quantized: QuantExperts, plain: Plain) -> None:
    for name, experts in zip(stacks(layer), (quantized.gate_up, quantized.down), strict=True):
        layers: Any = list(experts)
        stack = plain(*layers).detach().unflatten(0, (len(layers), -1))  # type: ignore[no-untyped-call]
        setattr(layer, name, nn.Parameter(stack.transpose(1, 2).contiguous() if layer.is_transposed else stack))
        if layer.has_bias:
            setattr(layer, f"{name}_bias", nn.Parameter(torch.stack([inner.bias.detach() for inner in layers])))


def _refuses_experts(layer: Any) -> str | None:
    if layer.has_post_expert_norm:
        return f"a {type(layer).__name__} normalizes what each expert computes"
    names = stacks(layer)
    biases = tuple(f"{name}_bias" for name in names) if layer.has_bias else ()
    return unusual(layer, (*names, *biases), children=("act_fn",))


#: Adapters by the full name of the class, which need not be importable.
ADAPTERS: dict[str, Adapter] = {
    "torch.nn.modules.linear.Linear": Adapter(_linear, _linear_back, unusual),
    **{
        f"torch.nn.modules.conv.{plain}": Adapter(partial(_conv, cls=cls), _conv_back, unusual, slower=_slow_conv)
        for plain, cls in (("Conv1d", QuantConv1d), ("Conv2d", QuantConv2d), ("Conv3d", QuantConv3d))
    },
    "torch.nn.modules.sparse.Embedding": Adapter(_embedding, _embedding_back, _refuses_embedding, ("weight",)),
    "torch.nn.modules.activation.MultiheadAttention": Adapter(
        _attention, _attention_back, _refuses_attention, (*_PROJECTIONS, "bias_k", "bias_v")
    ),
    "transformers.pytorch_utils.Conv1D": Adapter(_conv1d, _conv1d_back, unusual),
    EXPERTS: Adapter(_experts, _experts_back, _refuses_experts),
}
