"""Tiled attention in ``nn.MultiheadAttention``, and so in torch's encoders, decoders and ``nn.Transformer``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowbit.convert.engine import sync_fused_kernels
from lowbit.models.wrap import change_class, derived, plain_class, replaced_forward
from lowbit.nn.attention import MultiheadForward, in_projections
from lowbit.tiled.attention_tiles import AttentionCall, attend, cast_by_autocast
from lowbit.tiled.attention_weights import attend_with_weights

__all__ = ["is_switched", "multihead_layers", "put_back", "put_on"]


def multihead_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that run the forward of ``nn.MultiheadAttention`` or ``MultiheadForward``, by path."""
    layers = {}
    for path, module in model.named_modules():
        supported = isinstance(module, MultiheadForward) or (
            isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward
        )
        if supported and replaced_forward(module) is None:
            layers[path] = module
    return layers


def is_switched(module: nn.Module) -> bool:
    """Return whether lowbit computes the attention of the layer."""
    return getattr(module, "attend", None) is not None


def put_on(model: nn.Module, layers: dict[str, nn.Module]) -> None:
    """Have lowbit compute the attention of ``layers`` of ``model``."""
    for layer in layers.values():
        #: The only instance, also in copies and pickles of layers.
        ATTEND.put_on(layer)
    sync_fused_kernels(model)


def put_back(model: nn.Module, layers: dict[str, nn.Module]) -> None:
    """Undo ``put_on``."""
    for layer in layers.values():
        ATTEND.take_off(layer)
    sync_fused_kernels(model)


class _Attend:
    """The stateless ``attend`` of ``MultiheadForward``."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, padding: Tensor | None, dropout: float, causal: bool
    ) -> Tensor:
        call = _for_kernels(_call(q, k, v, None if causal else mask, padding, dropout, causal))
        out: Tensor = (_UNCOMPILED[attend] if _breaks_graphs(dropout) else attend)(call)
        return out

    def with_weights(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        padding: Tensor | None,
        dropout: float,
        average: bool,
    ) -> tuple[Tensor, Tensor]:
        call = cast_by_autocast(_call(q, k, v, mask, padding, dropout, False))
        compute = _UNCOMPILED[attend_with_weights] if _breaks_graphs(dropout) else attend_with_weights
        result: tuple[Tensor, Tensor] = compute(call, average)
        return result

    def put_on(self, layer: nn.Module) -> None:
        if is_switched(layer):
            return
        if isinstance(layer, MultiheadForward):
            layer.attend = self
        else:
            change_class(layer, _without_scores(plain_class(layer)))

    def take_off(self, layer: nn.Module) -> None:
        if not isinstance(layer, _WithoutScores):
            del layer.attend
            return
        cls: Any = plain_class(layer)
        if "lowbit_computes_as" not in vars(cls):
            raise ValueError(
                f"memory.unattention_: expected a layer of the class that attention_ gave it, got its subclass "
                f"{cls.__name__}; call unattention_ before fully_shard"
            )
        change_class(layer, cls.lowbit_computes_as)

    def __reduce__(self) -> str:
        return "ATTEND"


#: The one there is, also in copies and pickles of layers.
ATTEND = _Attend()


def _call(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, padding: Tensor | None, dropout: float, causal: bool
) -> AttentionCall:
    mask, padding = (_of_dtype(tensor, q.dtype) for tensor in (mask, padding))
    if padding is not None and padding.requires_grad:  # a key_mask gets no gradient
        mask, padding = _joined(q, k, mask, padding, False), None
    return AttentionCall(q, k, v, mask, padding, causal, None, q.shape[-1] ** -0.5, None, dropout, hides=True)


#: Replacements in compiled code for calls with dropout.
_UNCOMPILED: dict[Any, Any] = {
    function: torch.compiler.disable(
        function, reason="dropout of attention draws random numbers tile by tile, which is not compiled"
    )
    for function in (attend, attend_with_weights)
}


def _breaks_graphs(dropout: float) -> bool:
    return dropout > 0 and torch.compiler.is_compiling()


# -- the layer ---------------------------------------------------------------------------------------------------------
class _WithoutScores(MultiheadForward):
    """Base that precedes the class of an ``nn.MultiheadAttention``, and reads its parameters."""

    attend = ATTEND
    in_proj_weight: Tensor | None
    in_proj_bias: Tensor | None
    q_proj_weight: Tensor
    k_proj_weight: Tensor
    v_proj_weight: Tensor
    out_proj: nn.Linear

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if query.is_nested:
            plain: Any = nn.MultiheadAttention.forward
            return plain(  # type: ignore[no-any-return]
                self, query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        return super().forward(
            query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
        )

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        bias, packed = self.in_proj_bias, self.in_proj_weight
        if packed is not None and query is key and key is value:
            q, k, v = F.linear(query, packed, bias).chunk(3, -1)
            return q, k, v
        weights, biases = in_projections(self)
        q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
        return q, k, v

    def project_back(self, y_BTE: Tensor) -> Tensor:
        return F.linear(y_BTE, self.out_proj.weight, self.out_proj.bias)


#: Classes created so far, by the original class.
_CLASSES: dict[type, Any] = {}


def _without_scores(plain: type[nn.Module]) -> Any:
    if plain not in _CLASSES:
        names = {"__module__": plain.__module__, "__doc__": plain.__doc__, "lowbit_computes_as": plain}
        _CLASSES[plain] = derived(f"Scoreless{plain.__name__}", (_WithoutScores, plain), names, _without_scores, plain)
    return _CLASSES[plain]


# -- masks -------------------------------------------------------------------------------------------------------------
def _of_dtype(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return mask if mask is None or mask.dtype == torch.bool else mask.to(dtype)


def _for_kernels(call: AttentionCall) -> AttentionCall:
    """Return the call with one mask as torch's SDPA takes it, if that has at most as many elements as the queries.

    SDPA converts bool masks to floats and saves them for backward. A larger mask would cost as much memory as scores.
    Tiles take the masks as they are.
    """
    q, k, mask, padding = call.q, call.k, call.mask, call.key_mask
    if padding is not None and mask is None and not call.causal:
        return call._replace(key_mask=~padding if padding.dtype == torch.bool else padding, hides=False)
    if padding is None and (mask is None or mask.dtype != torch.bool):
        return call._replace(hides=False)
    batch = 1 if padding is None else q.shape[0]
    numbers = batch * q.shape[2] * k.shape[2] if mask is None or mask.dim() == 2 else mask.numel()
    if numbers > q.numel():
        return call
    return call._replace(mask=_joined(q, k, mask, padding, call.causal), key_mask=None, causal=False, hides=False)


def _joined(q: Tensor, k: Tensor, mask: Tensor | None, padding: Tensor | None, causal: bool) -> Tensor:
    """Combine all masks into one: bool whose True takes part, or floats that are added.

    True in ``mask`` and ``padding`` hides a key.
    """
    masks = [part for part in (mask, None if padding is None else padding[:, None, None, :]) if part is not None]
    if causal:
        masks.append(torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu_(1))
    if all(part.dtype == torch.bool for part in masks):
        hidden = masks[0]
        for part in masks[1:]:
            hidden = hidden | part
        return ~hidden
    total = torch.zeros((), dtype=q.dtype, device=q.device)
    for part in masks:
        added = total.new_zeros(part.shape).masked_fill_(part, -torch.inf) if part.dtype == torch.bool else part
        total = total + added
    return total
