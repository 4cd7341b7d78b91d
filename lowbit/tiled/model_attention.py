"""``lb.memory.attention`` in models: ``attention_``, ``unattention_``, and the attention ``"lowbit"`` of Hugging Face
models (``attn_implementation="lowbit"`` of ``from_pretrained`` and of configs,
``model.set_attn_implementation("lowbit")``).
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowbit.memory.fake import answer_without_data
from lowbit.memory.kept import Kept
from lowbit.models.check import check_model
from lowbit.report import Report, report_on
from lowbit.tiled.attention_tiles import attention
from lowbit.tiled.multihead import is_switched, multihead_layers, put_back, put_on

__all__ = ["IMPLEMENTATION", "attends_without_scores", "attention_", "register", "register_mask", "unattention_"]

#: Of what kernels of attention take the dimensions of heads to be a multiple.
_MULTIPLE = 8

#: The name among transformers' implementations of attention.
IMPLEMENTATION = "lowbit"


#: Where a Hugging Face model keeps the implementation that it had before.
_BEFORE = "_lowbit_attention"

#: Where a module keeps, by attribute, the configs that it shared with others before.
_SHARED = "_lowbit_shared_configs"


def attention_(model: nn.Module, *, batch: Any = None, loss: Callable[[Any, Any], Tensor] | None = None) -> Report:
    """Have the attention of ``model`` computed by ``lb.memory.attention``, in place: scores are never held as a whole.

    Serves Hugging Face models that can choose their implementation of attention, and every ``nn.MultiheadAttention``
    whose class does not replace ``forward``: also the quantized ones, and those in ``nn.TransformerEncoder``,
    ``nn.TransformerDecoder`` and ``nn.Transformer``. Results are those of ``"eager"``, ``"sdpa"`` and
    ``need_weights=False`` within the rounding of sums. A token that sees no other gets zeros. Dropout draws other
    random numbers than torch's.

    A Hugging Face model reads its implementation from its config, which other models may share. It gets a copy of its
    own, so that these stay as they are.

    ``output_attentions=True`` of Hugging Face raises ValueError. ``need_weights=True`` of ``nn.MultiheadAttention``
    returns the weights. Backward keeps none of them, so they are freed as soon as the caller drops them. A row that
    sees no key is NaN then, as in torch.

    torch's fused inference kernel of encoder layers allocates scores and is switched off. In evaluation, padded
    positions of an encoder's result are therefore no zeros.

    Args:
        model: A model that is or contains one of these.
        batch: A batch as ``lb.estimate`` takes it. The report then says what activations are kept for backward,
            before and after, as estimated.
        loss: The loss of output and batch, as ``lb.estimate`` takes it.

    Returns:
        A report of the models and layers that changed. Those that ``attention_`` has changed before are not in it.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: ``model`` contains nothing that can be served.
    """
    check_model(model)
    choosing, layers = _choosing(model), multihead_layers(model)
    if not choosing and not layers:
        raise ValueError(
            f"memory.attention_: expected nn.MultiheadAttention with torch's own forward, or a Hugging Face model that "
            f"can choose its implementation of attention, in the model, got {type(model).__name__}; call "
            f"lowbit.memory.attention(q, k, v, ...) where the model computes it"
        )
    models = {path: module for path, module in choosing.items() if _implementation(module) != IMPLEMENTATION}
    layers = {path: layer for path, layer in layers.items() if not is_switched(layer)}
    kept = Kept(model, batch, loss)
    if models:
        register(sys.modules["transformers.modeling_utils"])
        register_mask(sys.modules["transformers.masking_utils"])
        _own_configs(model)
    for module in models.values():
        vars(module)[_BEFORE] = _implementation(module)
        module.set_attn_implementation(IMPLEMENTATION)
    put_on(model, layers)
    return kept.told(report_on("memory.attention_", model, {**models, **layers}, "attention without scores"))


def unattention_(model: nn.Module) -> Report:
    """Have attention computed as before ``attention_``, in place.

    The config that a model shared with others comes back, unless one of the two has been changed since.

    Args:
        model: A model that ``attention_`` has changed, or one loaded with ``attn_implementation="lowbit"``, which gets
            ``"sdpa"``, or ``"eager"`` where it has no other.

    Returns:
        A report of the models and layers that changed.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: nothing in ``model`` computes attention without scores, or a layer was sharded since.
    """
    check_model(model)
    models = {path: module for path, module in _choosing(model).items() if _implementation(module) == IMPLEMENTATION}
    layers = {path: layer for path, layer in multihead_layers(model).items() if is_switched(layer)}
    if not models and not layers:
        raise ValueError(
            f"memory.unattention_: expected a model that lowbit.memory.attention_ changed, got {type(model).__name__} "
            f"with attention of its own; there is nothing to undo"
        )
    put_back(model, layers)
    if any(_BEFORE not in vars(module) for module in models.values()):  # loaded so, with a config that may be shared
        _own_configs(model)
    for module in models.values():
        usual = "sdpa" if getattr(module, "_supports_sdpa", False) else "eager"
        module.set_attn_implementation(vars(module).pop(_BEFORE, usual))
    if models:
        _share_configs(model)
    return report_on("memory.unattention_", model, {**models, **layers}, "attention as before")


def attends_without_scores(model: nn.Module, batch: Any) -> bool:
    """Whether ``attention_`` would spare ``model`` scores that it makes for such a batch, by a forward without data:
    those of Hugging Face's ``"eager"``, and of an ``nn.MultiheadAttention`` that torch's kernels do not serve.
    """
    if not any(_implementation(module) == "eager" for module in _choosing(model).values()):
        held: list[bool] = []

        def watch(copied: nn.Module) -> None:
            for layer in multihead_layers(copied).values():
                if not is_switched(layer):
                    layer.register_forward_pre_hook(partial(_note_scores, held), with_kwargs=True)

        answer_without_data(model, watch, batch)
        if not any(held):
            return False
    return answer_without_data(model, attention_, batch) is not None


def _note_scores(held: list[bool], layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Whether an ``nn.MultiheadAttention`` holds scores, or a mask as large, that it would not after ``attention_``."""
    call = inspect.signature(nn.MultiheadAttention.forward).bind(layer, *args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    both = given["attn_mask"] is not None and given["key_padding_mask"] is not None
    dropped = layer.training and layer.dropout > 0 and given["query"].device.type == "cpu"
    held.append(given["need_weights"] or both or dropped)


def _choosing(model: nn.Module) -> dict[str, Any]:
    """By path the outermost models of transformers that can choose their implementation."""
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    found: dict[str, Any] = {}
    for name, module in model.named_modules() if modeling is not None else ():
        inside = any(name.startswith(f"{path}." if path else "") for path in found)
        if not inside and isinstance(module, modeling.PreTrainedModel) and module._can_set_attn_implementation():
            found[name] = module
    return found


def _implementation(model: Any) -> str | None:
    name: str | None = model.config._attn_implementation
    return name


def _own_configs(model: nn.Module) -> None:
    """Give the modules of ``model`` copies of their configs, which they share among them as before."""
    config: Any = sys.modules["transformers.configuration_utils"].PreTrainedConfig  # type: ignore[attr-defined]
    copies: dict[int, Any] = {}
    for module in model.modules():
        held = {name: value for name, value in vars(module).items() if isinstance(value, config)}
        if held:
            vars(module).update({name: copy.deepcopy(value, copies) for name, value in held.items()})
            vars(module)[_SHARED] = held


def _share_configs(model: nn.Module) -> None:
    """Give the modules the configs of before ``_own_configs``, where they say what the copies say."""
    for module in model.modules():
        shared = vars(module).pop(_SHARED, {})
        vars(module).update(
            {name: value for name, value in shared.items() if _says_same(value, vars(module).get(name))}
        )


def _says_same(config: Any, other: Any) -> bool:
    """Whether two configs are equal in all attributes, of which ``==`` leaves out that of attention."""
    if type(config) is not type(other):
        return False
    parts = set(getattr(config, "sub_configs", ()))
    here, there = ({name: value for name, value in vars(one).items() if name not in parts} for one in (config, other))
    return here == there and all(_says_same(getattr(config, name), getattr(other, name)) for name in parts)


def register(modeling: Any) -> None:
    """Tell ``transformers.modeling_utils`` of the implementation."""
    modeling.AttentionInterface.register(IMPLEMENTATION, _attend)


def register_mask(masking: Any) -> None:
    """Tell ``transformers.masking_utils`` which masks it takes: those of torch's SDPA, which are bool."""
    masking.AttentionMaskInterface.register(IMPLEMENTATION, masking.sdpa_mask)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: ``query`` [B, H, T, D], ``key`` and ``value`` [B, K, S, D], ``attention_mask`` bool or
    added to scores, which hides what comes later too. Returns ``[B, T, H, D]``, and no attention weights.
    """
    if options.get("output_attentions"):
        raise ValueError(_refused(module, "attention weights are never held as a whole, and output_attentions is True"))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    mask = attention_mask
    if position_bias is not None:
        mask = position_bias if mask is None else _added(position_bias, mask)
    causal = bool(causal) and attention_mask is None and query.shape[2] > 1
    scale, sinks, width = query.shape[-1] ** -0.5 if scaling is None else scaling, options.get("s_aux"), value.shape[-1]
    if sinks is not None:
        query, key, value, mask = _with_sinks(query, key, value, mask, sinks / scale, causal)
        causal = False
    out = attention(query, key, value, mask, causal=causal, scale=scale, softcap=softcap, dropout=dropout)[..., :width]
    return out.transpose(1, 2).contiguous(), None


def _with_sinks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The same attention with one more key, whose product with a query of head h is ``sinks[h]`` and whose value is 0.

    In one more dimension queries are ``sinks`` and keys 0, but for that key, which is 1 there and 0 in the others.
    """
    (rows, _, queries, dim), keys = query.shape, key.shape[2]
    more = -dim % _MULTIPLE or _MULTIPLE
    last = torch.zeros(more, dtype=key.dtype, device=key.device)
    last[0] = 1
    query = torch.cat([query, (sinks.view(1, -1, 1, 1) * last).to(query.dtype).expand(rows, -1, queries, -1)], -1)
    key = F.pad(key, (0, more, 0, 1))
    key = torch.cat([key[:, :, :-1], F.pad(last, (dim, 0)).expand_as(key[:, :, -1:])], 2)
    value = F.pad(value, (0, max(dim + more - value.shape[-1], 0), 0, 1))
    if causal:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=key.device).tril_().view(1, 1, queries, keys)
    if mask is not None:
        mask = F.pad(mask, (0, 1), value=True if mask.dtype == torch.bool else 0.0)
    return query, key, value, mask


def _added(bias: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, bias, torch.finfo(bias.dtype).min) if mask.dtype == torch.bool else bias + mask


def _refused(module: nn.Module, why: str) -> str:
    return (
        f"the attention {IMPLEMENTATION!r}: {why} ({type(module).__name__}); call "
        f"model.set_attn_implementation('eager')"
    )
