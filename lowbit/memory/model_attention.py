"""``lb.memory.attention`` in models of transformers: the implementation of attention that they call ``"lowbit"``.

``attn_implementation="lowbit"`` of ``from_pretrained`` and of configs, ``model.set_attn_implementation("lowbit")``, and
``lb.memory.attention_(model)``, which says what it did.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.convert.engine import report_on
from lowbit.convert.report import Report
from lowbit.convert.select import check_model
from lowbit.memory.attention import attention

__all__ = ["IMPLEMENTATION", "attention_", "has_eager_attention", "register", "register_mask"]

#: The name among transformers' implementations of attention.
IMPLEMENTATION = "lowbit"


def attention_(model: nn.Module) -> Report:
    """Have the attention of ``model`` computed by ``lb.memory.attention``, in place: scores are never held as a whole.

    ``model``: one of transformers, or a module that has some inside. Results are those of ``"eager"`` and ``"sdpa"``
    within the rounding of sums; a token that sees none, as padding does, gets zeros. Attention weights
    (``output_attentions=True``) are not to be had. ``model.set_attn_implementation("eager")``, or what it was before,
    is the way back.

    Raises TypeError for what is no module; ValueError for a model without one of transformers that can choose its
    implementation. The forward raises ValueError for attention sinks and for output_attentions=True.
    """
    check_model(model)
    chosen = {name: module for name, module in _choosing(model).items() if _implementation(module) != IMPLEMENTATION}
    if not chosen and not _choosing(model):
        raise ValueError(
            f"memory.attention_: expected a model of transformers that can choose its implementation of attention, got "
            f"{type(model).__name__}; call lowbit.memory.attention(q, k, v, ...) where the model computes it"
        )
    for module in chosen.values():
        module.set_attn_implementation(IMPLEMENTATION)
    return report_on("memory.attention_", model, chosen, "attention without scores")


def has_eager_attention(model: nn.Module) -> bool:
    """Whether ``attention_`` would spare ``model`` the scores that transformers' ``"eager"`` makes."""
    return any(_implementation(module) == "eager" for module in _choosing(model).values())


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
    if options.get("s_aux") is not None:
        raise ValueError(_refused(module, "attention sinks are not served"))
    if options.get("output_attentions"):
        raise ValueError(_refused(module, "attention weights are never held as a whole, and output_attentions is True"))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    mask = attention_mask
    if position_bias is not None:
        mask = position_bias if mask is None else _added(position_bias, mask)
    out = attention(
        query, key, value, mask, causal=bool(causal) and attention_mask is None and query.shape[2] > 1,
        scale=scaling, softcap=softcap, dropout=dropout,
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


def _added(bias: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, bias, torch.finfo(bias.dtype).min) if mask.dtype == torch.bool else bias + mask


def _refused(module: nn.Module, why: str) -> str:
    return (
        f"the attention {IMPLEMENTATION!r}: {why} ({type(module).__name__}); call "
        f"model.set_attn_implementation('eager')"
    )
