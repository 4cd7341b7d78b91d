"""``lb.memory.attention`` in models of transformers: the implementation of attention that they call ``"lowbit"``.

``attn_implementation="lowbit"`` of ``from_pretrained`` and of configs, ``model.set_attn_implementation("lowbit")``, and
``lb.memory.attention_(model)``, which says what it did.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowbit.convert.engine import report_on
from lowbit.convert.report import Report
from lowbit.convert.select import check_model
from lowbit.memory.attention import attention
from lowbit.memory.fake import answer_without_data

__all__ = ["IMPLEMENTATION", "attends_without_scores", "attention_", "register", "register_mask"]

#: Of what kernels of attention take the dimensions of heads to be a multiple.
_MULTIPLE = 8

#: The name among transformers' implementations of attention.
IMPLEMENTATION = "lowbit"


def attention_(model: nn.Module) -> Report:
    """Have the attention of ``model`` computed by ``lb.memory.attention``, in place: scores are never held as a whole.

    ``model``: one of transformers, or a module that has some inside. Results are those of ``"eager"`` and ``"sdpa"``
    within the rounding of sums; a token that sees none, as padding does, gets zeros. Attention weights
    (``output_attentions=True``) are not to be had. ``model.set_attn_implementation("eager")``, or what it was before,
    is the way back.

    Raises TypeError for what is no module; ValueError for a model without one of transformers that can choose its
    implementation. The forward raises ValueError for output_attentions=True.
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


def attends_without_scores(model: nn.Module, batch: Any) -> bool:
    """Whether ``attention_`` would spare ``model`` the scores that transformers' ``"eager"`` makes for such a batch; by
    a forward without data.
    """
    if not any(_implementation(module) == "eager" for module in _choosing(model).values()):
        return False
    return answer_without_data(model, attention_, batch) is not None


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
