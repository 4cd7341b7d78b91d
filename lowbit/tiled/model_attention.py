"""``attention_`` and ``unattention_``: tiled attention in models, and the ``"lowbit"`` attention of Hugging Face
models.

Hugging Face models select it with ``from_pretrained(..., attn_implementation="lowbit")``, in their config, or with
``model.set_attn_implementation("lowbit")``.
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
from lowbit.tiled.attention_tiles import AttentionCall, attend, attention
from lowbit.tiled.lazy_mask import LazyMask, lazy_mask
from lowbit.tiled.multihead import is_switched, multihead_layers, put_back, put_on

__all__ = ["IMPLEMENTATION", "attends_without_scores", "attention_", "register", "register_mask", "unattention_"]

#: Attention kernels expect a head dimension that is a multiple of this.
_MULTIPLE = 8

#: The name of this attention in Hugging Face models.
IMPLEMENTATION = "lowbit"


#: Attribute of a Hugging Face model with the implementation that it had before.
_BEFORE = "_lowbit_attention"

#: Attribute of a module with the configs, by attribute, that it shared with other modules before.
_SHARED = "_lowbit_shared_configs"


def attention_(model: nn.Module, *, batch: Any = None, loss: Callable[[Any, Any], Tensor] | None = None) -> Report:
    """Have ``model`` compute its attention with ``lb.memory.attention``, in place, without allocating all scores at
    once.

    Supported are Hugging Face models with a selectable attention implementation, and every ``nn.MultiheadAttention``
    whose class does not override ``forward``. The latter includes quantized layers and those in
    ``nn.TransformerEncoder``, ``nn.TransformerDecoder`` and ``nn.Transformer``.

    Results equal those of ``"eager"``, ``"sdpa"`` and ``need_weights=False`` up to rounding of sums. A token that
    attends to no key gets zeros. Dropout draws different random numbers than torch's.

    A Hugging Face model reads its implementation from its config, which other models may share. It gets its own copy,
    so the other models do not change.

    ``output_attentions=True`` of Hugging Face models raises ValueError. ``need_weights=True`` of
    ``nn.MultiheadAttention`` returns the weights. They are not saved for backward, so they are freed when the caller
    drops them. A row that attends to no key is then NaN, as in torch.

    torch's fused inference kernel for encoder layers allocates scores and is switched off. In evaluation, padded
    positions of an encoder's output are therefore not zeros.

    Args:
        model: A model that is or contains one of these.
        batch: An example batch, as for ``lb.estimate``. With it, the report has the estimated bytes saved for backward
            before and after.
        loss: A function of output and batch, as for ``lb.estimate``.

    Returns:
        A report of the models and layers that changed, without those that ``attention_`` had changed before.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``model`` contains no supported attention.
    """
    check_model(model)
    choosing, layers = _choosing(model), multihead_layers(model)
    if not choosing and not layers:
        raise ValueError(
            f"memory.attention_: expected nn.MultiheadAttention with torch's own forward, or a Hugging Face model with "
            f"a selectable attention implementation, in the model, got {type(model).__name__}; call "
            f"lowbit.memory.attention(q, k, v, ...) in the model's forward instead"
        )
    models = {path: module for path, module in choosing.items() if _implementation(module) != IMPLEMENTATION}
    layers = {path: layer for path, layer in layers.items() if not is_switched(layer)}
    activations = Kept(model, batch, loss)
    if models:
        register(sys.modules["transformers.modeling_utils"])
        register_mask(sys.modules["transformers.masking_utils"])
        _own_configs(model)
    for module in models.values():
        vars(module)[_BEFORE] = _implementation(module)
        module.set_attn_implementation(IMPLEMENTATION)
    put_on(model, layers)
    return activations.told(report_on("memory.attention_", model, {**models, **layers}, "attention without scores"))


def unattention_(model: nn.Module) -> Report:
    """Undo ``attention_``, in place.

    The config that a model shared with other models is restored, unless one of the two has been changed since.

    Args:
        model: A model that ``attention_`` has changed, or one loaded with ``attn_implementation="lowbit"``. The latter
            gets ``"sdpa"``, or ``"eager"`` if it does not support it.

    Returns:
        A report of the models and layers that changed.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``attention_`` has changed nothing in ``model``, or a layer was sharded since.
    """
    check_model(model)
    models = {path: module for path, module in _choosing(model).items() if _implementation(module) == IMPLEMENTATION}
    layers = {path: layer for path, layer in multihead_layers(model).items() if is_switched(layer)}
    if not models and not layers:
        raise ValueError(
            f"memory.unattention_: expected a model that lowbit.memory.attention_ changed, got an unchanged "
            f"{type(model).__name__}; there is nothing to undo"
        )
    put_back(model, layers)
    if any(_BEFORE not in vars(module) for module in models.values()):  # loaded with "lowbit"; may share its config
        _own_configs(model)
    for module in models.values():
        usual = "sdpa" if getattr(module, "_supports_sdpa", False) else "eager"
        module.set_attn_implementation(vars(module).pop(_BEFORE, usual))
    if models:
        _share_configs(model)
    return report_on("memory.unattention_", model, {**models, **layers}, "attention as before")


def attends_without_scores(model: nn.Module, batch: Any) -> bool:
    """Return whether ``attention_`` would avoid scores, or a mask of that size, that ``model`` allocates for ``batch``.
    Runs a forward on fake tensors.

    Hugging Face's ``"eager"`` allocates scores, and so does ``nn.MultiheadAttention`` if torch's kernels do not support
    the call. Other attention of Hugging Face models allocates a mask if rows have several documents.
    """
    before = {_implementation(module) for module in _choosing(model).values()}
    if "eager" in before:
        return answer_without_data(model, attention_, batch) is not None
    allocates: list[bool] = []

    def watch_layers(copied: nn.Module) -> None:
        for layer in multihead_layers(copied).values():
            if not is_switched(layer):
                layer.register_forward_pre_hook(partial(_note_scores, allocates), with_kwargs=True)

    def watch_masks(copied: nn.Module) -> None:
        attention_(copied)
        for module in copied.modules():
            module.register_forward_pre_hook(partial(_note_documents, allocates), with_kwargs=True)

    answer_without_data(model, watch_layers, batch)
    if any(allocates):
        return answer_without_data(model, attention_, batch) is not None
    if not before - {IMPLEMENTATION}:
        return False
    return answer_without_data(model, watch_masks, batch) is not None and any(allocates)


def _note_documents(allocates: list[bool], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Append whether the call has a mask of documents."""
    allocates.append(any(isinstance(value, LazyMask) for value in (*args, *kwargs.values())))


def _note_scores(allocates: list[bool], layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Append whether the call allocates scores, or a mask of that size, that it would not after ``attention_``."""
    call = inspect.signature(nn.MultiheadAttention.forward).bind(layer, *args, **kwargs)
    call.apply_defaults()
    arguments = call.arguments
    both = arguments["attn_mask"] is not None and arguments["key_padding_mask"] is not None
    dropped = layer.training and layer.dropout > 0 and arguments["query"].device.type == "cpu"
    allocates.append(arguments["need_weights"] or both or dropped)


def _choosing(model: nn.Module) -> dict[str, Any]:
    """Return the outermost Hugging Face models with a selectable attention implementation, by path."""
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    models: dict[str, Any] = {}
    for name, module in model.named_modules() if modeling is not None else ():
        nested = any(name.startswith(f"{path}." if path else "") for path in models)
        if not nested and isinstance(module, modeling.PreTrainedModel) and module._can_set_attn_implementation():
            models[name] = module
    return models


def _implementation(model: Any) -> str | None:
    name: str | None = model.config._attn_implementation
    return name


def _own_configs(model: nn.Module) -> None:
    """Give the modules of ``model`` copies of their configs. Modules that shared a config share its copy."""
    config: Any = sys.modules["transformers.configuration_utils"].PreTrainedConfig  # type: ignore[attr-defined]
    copies: dict[int, Any] = {}
    for module in model.modules():
        configs = {name: value for name, value in vars(module).items() if isinstance(value, config)}
        if configs:
            vars(module).update({name: copy.deepcopy(value, copies) for name, value in configs.items()})
            vars(module)[_SHARED] = configs


def _share_configs(model: nn.Module) -> None:
    """Give the modules their configs from before ``_own_configs``, if the copies are still equal to them."""
    for module in model.modules():
        shared = vars(module).pop(_SHARED, {})
        vars(module).update(
            {name: value for name, value in shared.items() if _says_same(value, vars(module).get(name))}
        )


def _says_same(config: Any, other: Any) -> bool:
    """Return whether two configs are equal, including their attention implementation, which ``==`` ignores."""
    if type(config) is not type(other):
        return False
    parts = set(getattr(config, "sub_configs", ()))
    left, right = ({name: value for name, value in vars(cfg).items() if name not in parts} for cfg in (config, other))
    return left == right and all(_says_same(getattr(config, name), getattr(other, name)) for name in parts)


def register(modeling: Any) -> None:
    """Register the implementation in ``transformers.modeling_utils``."""
    modeling.AttentionInterface.register(IMPLEMENTATION, _attend)


def register_mask(masking: Any) -> None:
    """Have ``transformers.masking_utils`` make the same bool masks for it as for torch's SDPA, those of packed rows
    without values.
    """
    masking.AttentionMaskInterface.register(IMPLEMENTATION, partial(_mask, masking))


def _mask(masking: Any, **options: Any) -> Tensor | None:
    mask: Tensor | None = lazy_mask(masking, options)
    return masking.sdpa_mask(**options) if mask is None else mask


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
    """The attention function that Hugging Face models call.

    Takes ``query`` [B, H, T, D], ``key`` and ``value`` [B, K, S, D], and an ``attention_mask`` that is bool or added to
    scores and that includes causality. Returns ``[B, T, H, D]``, and None for the attention weights.
    """
    if options.get("output_attentions"):
        raise ValueError(_refused(module, "it returns no attention weights, and output_attentions is True"))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    mask = attention_mask
    if position_bias is not None:
        mask = position_bias if mask is None else _added(position_bias, mask)
    causal = bool(causal) and attention_mask is None and query.shape[2] > 1
    scale, sinks, width = query.shape[-1] ** -0.5 if scaling is None else scaling, options.get("s_aux"), value.shape[-1]
    if isinstance(mask, LazyMask) and sinks is None and query.shape[2] == key.shape[2] == mask.shape[-1]:
        within = AttentionCall(
            query, key, value, None, None, True, mask.window, scale, softcap, dropout, documents=mask.documents
        )
        return attend(within).transpose(1, 2).contiguous(), None
    if sinks is not None:
        query, key, value, mask = _with_sinks(query, key, value, mask, sinks / scale, causal)
        causal = False
    out = attention(query, key, value, mask, causal=causal, scale=scale, softcap=softcap, dropout=dropout)[..., :width]
    return out.transpose(1, 2).contiguous(), None


def _with_sinks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Express attention sinks as one more key with value 0, whose product with a query of head h is ``sinks[h]``.

    Heads get extra dimensions: in the first of them queries are ``sinks`` and keys are 0, except for the new key, which
    is 1 there and 0 elsewhere.
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
