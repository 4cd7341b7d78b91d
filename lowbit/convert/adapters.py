"""The table of layer classes that lowbit converts, and how each becomes a quantized layer and a plain one again.

``register`` adds a row. A subclass that computes what its base computes is converted as its base.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowbit.models.wrap import replaced_forward
from lowbit.nn.attention import QuantMultiheadAttention
from lowbit.nn.base import full_name
from lowbit.nn.conv import QuantConv, QuantConv1d, QuantConv2d, QuantConv3d
from lowbit.nn.embedding import QuantEmbedding
from lowbit.nn.experts import QuantExperts, stacks
from lowbit.nn.linear import QuantLinear
from lowbit.ops.conv import spans_tensor
from lowbit.recipes import Recipe

__all__ = ["ADAPTERS", "Adapter", "Make", "Plain", "find", "register", "unusual"]

#: Makes a QuantLinear of ``parameter``, of the matrix ``[out, in]`` that the layer computes with (a view or a copy of
#: it, or of a part of it), and of a bias.
Make = Callable[[Tensor, Tensor, Any], QuantLinear]

#: Makes a plain Parameter of the weights of QuantLinears, rows one below the other: ``plain(*layers,
#: kernel_size=None, transposed=False)``, as filters of a convolution if ``kernel_size`` is given. Layers that share
#: their codes get one Parameter.
Plain = Callable[..., nn.Parameter]


class Adapter(NamedTuple):
    """How one class of layer is converted.

    ``convert(layer, make)``: the quantized layer, whose QuantLinears ``make`` makes. It must not change ``layer``.
    ``restore(layer, quantized, plain)``: fills ``layer``, which is as it was but for its tensors, which are None.
    ``refuses(layer)``: why this one must stay as it is, or None.
    ``slower(layer, recipe)``: why the recipe would make this one much slower; it stays then, unless a pattern of
    recipes by layer names it.
    ``parameters``: the names of its parameters, which a subclass must not compute in another way.
    """

    convert: Callable[[Any, Make], nn.Module]
    restore: Callable[[Any, Any, Plain], None]
    refuses: Callable[[Any], str | None]
    parameters: tuple[str, ...] = ("weight", "bias")
    slower: Callable[[Any, Recipe], str | None] = lambda layer, recipe: None


class Found(NamedTuple):
    """The adapter for a module and the name of the class it is listed under, or the reason why there is none.

    ``listed`` without ``adapter``: the module is a subclass of that class which computes something else.
    """

    adapter: Adapter | None
    listed: str | None
    reason: str | None


#: What decides the result of a call, of which a subclass may replace nothing.
_COMPUTES = (
    "forward", "_conv_forward", "merge_masks", "__call__", "_call_impl", "_wrapped_call_impl", "__getattr__",
    "__getattribute__",
)  # fmt: skip


def register(cls: type | str, adapter: Adapter | type) -> None:
    """Convert layers of class ``cls`` from now on, by ``adapter`` or, where it is a class in the table, as that one.

    ``cls``: the class, or its full name (``"package.module.Class"``) where its library need not be installed. The row
    holds for subclasses that compute what ``cls`` computes, and replaces the row that was there.

    ``lb.convert.register(MyLinear, nn.Linear)`` says that MyLinear's result is that of nn.Linear with the same
    ``weight`` and ``bias``.
    Raises TypeError for arguments of other types, ValueError for a class to follow that is not in the table.
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
    """The row of the module's class, or of the nearest base class if it computes what that one computes."""
    cls = getattr(module, "lowbit_computes_as", type(module))
    for base in cls.__mro__:
        name = full_name(base)
        adapter = ADAPTERS.get(name)
        if adapter is None:
            continue
        own = (*_COMPUTES, *(p for p in adapter.parameters if p in module._parameters))
        changed = [a for a in own if getattr(cls, a, None) is not getattr(base, a, None)]
        if not changed:
            return Found(adapter, name, None)
        return Found(
            None,
            name,
            f"a {cls.__name__} replaces {' and '.join(changed)} of {base.__name__}, and may compute something else; "
            f"if it does not, call lowbit.convert.register({cls.__name__}, {base.__name__})",
        )
    if _EXPERTS in ADAPTERS and _decorated(cls):
        return Found(ADAPTERS[_EXPERTS], _EXPERTS, None)
    return Found(None, None, None)


def unusual(
    layer: nn.Module,
    parameters: Iterable[str] = ("weight", "bias"),
    optional: Iterable[str] = (),
    children: Iterable[str] = (),
) -> str | None:
    """Why ``layer`` is more, or something else, than an instance of its class with these plain parameters."""
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
        return f"it also holds {', '.join(sorted(extra))}, which its class does not know; remove that first"
    return None


# -- nn.Linear, and transformers' Conv1D, whose weight is [in, out] ---------------------------------------------------
def _linear(layer: nn.Linear, make: Make) -> QuantLinear:
    return make(layer.weight, layer.weight, layer.bias)


def _linear_back(layer: nn.Linear, made: QuantLinear, plain: Plain) -> None:
    layer.weight, layer._parameters["bias"] = plain(made), made.bias


def _conv1d(layer: Any, make: Make) -> QuantLinear:
    return make(layer.weight, layer.weight.t(), layer.bias)


def _conv1d_back(layer: Any, made: QuantLinear, plain: Plain) -> None:
    layer.weight, layer._parameters["bias"] = plain(made, transposed=True), made.bias


# -- nn.Embedding -----------------------------------------------------------------------------------------------------
def _embedding(layer: nn.Embedding, make: Make) -> QuantEmbedding:
    return QuantEmbedding(layer, make(layer.weight, layer.weight, None))


def _embedding_back(layer: nn.Embedding, made: QuantEmbedding, plain: Plain) -> None:
    layer.weight = plain(made.linear)


def _refuses_embedding(layer: nn.Embedding) -> str | None:
    if layer.max_norm is not None:
        return f"max_norm={layer.max_norm} rescales its rows in every call"
    return unusual(layer, ("weight",))


# -- nn.Conv1d, nn.Conv2d, nn.Conv3d ----------------------------------------------------------------------------------
def _conv(layer: Any, make: Make, made: type[QuantConv]) -> QuantConv:
    return made(layer, make(layer.weight, layer.weight.movedim(1, -1).flatten(1), layer.bias))


def _slow_conv(layer: Any, recipe: Recipe) -> str | None:
    input = recipe.input
    if layer.groups < layer.in_channels or layer.in_channels == 1 or input is None or spans_tensor(input):
        return None
    return (
        f"a depthwise convolution is many times slower with input scales finer than one for the tensor ({input}); use "
        f"int8-static with lowbit.calibrate, or name the layer in recipes by layer"
    )


def _conv_back(layer: Any, made: QuantConv, plain: Plain) -> None:
    layer.weight = plain(made.linear, kernel_size=made.kernel_size)
    layer._parameters["bias"] = made.bias


# -- nn.MultiheadAttention --------------------------------------------------------------------------------------------
_PROJECTIONS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias")


def _refuses_attention(layer: nn.MultiheadAttention) -> str | None:
    reason = unusual(layer, _PROJECTIONS, ("bias_k", "bias_v"), ("out_proj",))
    if reason is not None:
        return reason
    out = layer.out_proj
    if find(out).listed != full_name(nn.Linear):
        return f"its out_proj is a {type(out).__name__}, and not a Linear"
    reason = find(out).reason or unusual(out)
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


def _attention_back(layer: nn.MultiheadAttention, made: QuantMultiheadAttention, plain: Plain) -> None:
    projections = (made.q_proj, made.k_proj, made.v_proj)
    if layer._qkv_same_embed_dim:
        layer.in_proj_weight = plain(*projections)
    else:
        for name, projection in zip(_PROJECTIONS[1:4], projections, strict=True):
            setattr(layer, name, plain(projection))
    biases = [p.bias for p in projections if p.bias is not None]
    if biases:
        joined = biases[0].new_empty(3 * layer.embed_dim)
        for part, bias in zip(joined.chunk(3), biases, strict=True):
            part.copy_(bias.detach())
        layer.in_proj_bias = nn.Parameter(joined, biases[0].requires_grad)
    layer.bias_k, layer.bias_v = made.bias_k, made.bias_v
    _linear_back(layer.out_proj, made.out_proj, plain)
    if made.attend is not None:
        made.attend.put_on(layer)


# -- stacked experts of transformers ----------------------------------------------------------------------------------
#: The row of every class that this decorates, which says how it computes what all of them do.
_EXPERTS = "transformers.integrations.moe.use_experts_implementation"


def _decorated(cls: type) -> bool:
    """Whether ``forward`` is the one that the decorator makes."""
    made_in = getattr(getattr(cls, "forward", None), "__globals__", {}).get("__name__")
    return bool(made_in == _EXPERTS.rpartition(".")[0])


def _own(part: Tensor, trained: bool) -> nn.Parameter:
    """A copy of a part of stacked biases; on the meta device the very part, by which files know what it is of."""
    return nn.Parameter(part.detach() if part.is_meta else part.detach().clone(), trained)


def _experts(layer: Any, make: Make) -> QuantExperts:
    def layers(name: str) -> list[QuantLinear]:
        stack = getattr(layer, name)
        biases: Any = getattr(layer, f"{name}_bias") if layer.has_bias else [None] * len(stack)
        return [
            make(
                stack,
                matrix.t() if layer.is_transposed else matrix,
                None if bias is None else _own(bias, biases.requires_grad),
            )
            for matrix, bias in zip(stack, biases, strict=True)
        ]

    gate_up, down = (layers(name) for name in stacks(layer))
    return QuantExperts(layer, gate_up, down)


def _experts_back(layer: Any, made: QuantExperts, plain: Plain) -> None:
    for name, of in zip(stacks(layer), (made.gate_up, made.down), strict=True):
        layers: Any = list(of)
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


#: What is converted, by the full name of the class, which need not be importable.
ADAPTERS: dict[str, Adapter] = {
    "torch.nn.modules.linear.Linear": Adapter(_linear, _linear_back, unusual),
    **{
        f"torch.nn.modules.conv.{plain}": Adapter(partial(_conv, made=made), _conv_back, unusual, slower=_slow_conv)
        for plain, made in (("Conv1d", QuantConv1d), ("Conv2d", QuantConv2d), ("Conv3d", QuantConv3d))
    },
    "torch.nn.modules.sparse.Embedding": Adapter(_embedding, _embedding_back, _refuses_embedding, ("weight",)),
    "torch.nn.modules.activation.MultiheadAttention": Adapter(
        _attention, _attention_back, _refuses_attention, (*_PROJECTIONS, "bias_k", "bias_v")
    ),
    "transformers.pytorch_utils.Conv1D": Adapter(_conv1d, _conv1d_back, unusual),
    _EXPERTS: Adapter(_experts, _experts_back, _refuses_experts),
}
