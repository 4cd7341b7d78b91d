"""Multi-head attention: its forward, and QuantMultiheadAttention, which splits the packed in_proj into three layers.

Shape suffixes: B sequences, T queries, S keys, H heads, D width of a head, E width of the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowbit.nn.base import kind
from lowbit.nn.linear import QuantLinear

__all__ = [
    "MultiheadForward", "QuantMultiheadAttention", "SplitMultiheadAttention", "in_projections", "split_attention_",
]  # fmt: skip


def in_projections(layer: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
    """Return the weights and the biases of an ``nn.MultiheadAttention`` for queries, keys and values.

    A packed weight is split once, so that backward concatenates the gradients of its parts once.
    """
    packed, bias = layer.in_proj_weight, layer.in_proj_bias
    weights = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight) if packed is None else packed.chunk(3)
    return weights, (None,) * 3 if bias is None else bias.chunk(3)


class MultiheadForward:
    """The forward of ``nn.MultiheadAttention`` for any projections, with the attributes of that class.

    ``attend`` optionally replaces torch's SDPA. Its arguments are the heads ``[B, H, T, D]`` and ``[B, H, S, D]``, the
    mask ``[T, S]`` or ``[B, H, T, S]``, the key padding mask ``[B, S]``, the dropout probability, and ``is_causal``.
    True in a bool mask hides; other masks are added. If weights are requested, ``attend.with_weights`` is called, whose
    last argument says whether to average them over heads.
    """

    attend: Any = None
    embed_dim: int
    num_heads: int
    head_dim: int
    kdim: int
    vdim: int
    dropout: float
    batch_first: bool
    add_zero_attn: bool
    training: bool
    bias_k: Tensor | None
    bias_v: Tensor | None

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries ``[B, T, E]``, keys ``[B, S, E]`` and values ``[B, S, E]``."""
        raise NotImplementedError

    def project_back(self, y_BTE: Tensor) -> Tensor:
        """Apply the output projection."""
        raise NotImplementedError

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
        if query.is_nested or key.is_nested or value.is_nested:
            raise TypeError(
                f"{type(self).__name__}: expected padded tensors and a key_padding_mask, got nested tensors; call "
                f"to_padded_tensor"
            )
        if is_causal and attn_mask is None:
            raise ValueError("is_causal=True is a hint about attn_mask, as in nn.MultiheadAttention: give the mask too")
        self._check_inputs(query, key, value)
        batched = query.dim() == 3
        self._check_masks(query, key, key_padding_mask, attn_mask)

        def batch_in_front(x: Tensor) -> Tensor:
            return x[None] if not batched else x if self.batch_first else x.transpose(0, 1)

        same_keys, same_values = key is query, value is key  # one input can be projected by one matmul
        query = batch_in_front(query)
        key = query if same_keys else batch_in_front(key)
        value = key if same_values else batch_in_front(value)
        q_BTE, k_BSE, v_BSE = self.project(query, key, value)
        mask, padding = self._laid_out(attn_mask, key_padding_mask, k_BSE)
        k_BSE, v_BSE, mask, padding = self._extend(k_BSE, v_BSE, mask, padding)
        q_BHTD, k_BHSD, v_BHSD = (self._heads(x) for x in (q_BTE, k_BSE, v_BSE))
        dropout = self.dropout if self.training else 0.0
        weights: Tensor | None = None
        if need_weights and self.attend is not None:
            y_BHTD, weights = self.attend.with_weights(
                q_BHTD, k_BHSD, v_BHSD, mask, padding, dropout, average_attn_weights
            )
        elif need_weights:
            total = _merged(mask, padding, q_BTE.dtype)
            scores_BHTS = q_BHTD * self.head_dim**-0.5 @ k_BHSD.transpose(-1, -2)
            weights_BHTS = (scores_BHTS if total is None else scores_BHTS + total).softmax(-1)
            weights_BHTS = F.dropout(weights_BHTS, dropout) if dropout else weights_BHTS
            y_BHTD = weights_BHTS @ v_BHSD
            weights = weights_BHTS.mean(1) if average_attn_weights else weights_BHTS
        elif self.attend is not None:
            # As in torch, the hint holds without padding, and then hides the positions that _extend has added.
            causal = is_causal and (padding is None or k_BSE.shape[1] == key.shape[1])
            y_BHTD = self.attend(q_BHTD, k_BHSD, v_BHSD, mask, padding, dropout, causal)
        else:
            total = _merged(mask, padding, q_BTE.dtype)
            y_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHSD, v_BHSD, attn_mask=total, dropout_p=dropout)

        y = self.project_back(y_BHTD.transpose(1, 2).flatten(2))
        if not batched:
            return y[0], None if weights is None else weights[0]
        return y if self.batch_first else y.transpose(0, 1), weights

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        dim = query.dim()
        if dim not in (2, 3) or key.dim() != dim or value.dim() != dim:
            raise ValueError(
                f"query, key, value must be all 3-D (a batch) or all 2-D (one sequence); {_got(query, key, value)}"
            )
        widths = (self.embed_dim, self.kdim, self.vdim)
        if (query.shape[-1], key.shape[-1], value.shape[-1]) != widths:
            raise ValueError(
                f"query, key, value must have the widths {', '.join(map(str, widths))}; {_got(query, key, value)}"
            )
        batch = 0 if self.batch_first else 1
        if key.shape[:-1] != value.shape[:-1] or (dim == 3 and key.shape[batch] != query.shape[batch]):
            axes = "" if dim == 2 else f", and axis {batch}, the batch (batch_first={self.batch_first}), query's"
            raise ValueError(
                f"key and value must have the same positions{axes}; {_got(query, key, value)}; expand them"
            )

    def _check_masks(self, query: Tensor, key: Tensor, padding: Tensor | None, attn: Tensor | None) -> None:
        heads = self.num_heads
        if query.dim() == 2:
            queries, keys = query.shape[0], key.shape[0]
            paddings: dict[str, tuple[int, ...]] = {"keys": (keys,)}
            both = {"queries, keys": (queries, keys), "heads, queries, keys": (heads, queries, keys)}
        else:
            axis = 0 if self.batch_first else 1
            batch, queries, keys = query.shape[axis], query.shape[1 - axis], key.shape[1 - axis]
            paddings = {"batch, keys": (batch, keys)}
            both = {"queries, keys": (queries, keys), "batch * heads, queries, keys": (batch * heads, queries, keys)}
        if padding is not None:
            _check_mask("key_padding_mask", padding, paddings)
        if attn is not None:
            _check_mask("attn_mask", attn, both)

    def _heads(self, x_BTE: Tensor) -> Tensor:
        return x_BTE.reshape(*x_BTE.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)

    def _laid_out(
        self, attn: Tensor | None, padding: Tensor | None, k_BSE: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """Reshape the masks to ``[T, S]`` or ``[B, H, T, S]``, and ``[B, S]``."""
        batch, keys = k_BSE.shape[:2]
        if attn is not None and attn.dim() == 3:
            attn = attn.reshape(batch, self.num_heads, *attn.shape[1:])
        return attn, None if padding is None else padding.reshape(batch, keys)

    def _extend(
        self, k_BSE: Tensor, v_BSE: Tensor, attn: Tensor | None, padding: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Append the learned and the zero position that the layer may add, visible to every query."""
        batch, before = k_BSE.shape[:2]
        if self.bias_k is not None and self.bias_v is not None:
            k_BSE = torch.cat((k_BSE, self.bias_k.to(k_BSE.dtype).expand(batch, -1, -1)), 1)
            v_BSE = torch.cat((v_BSE, self.bias_v.to(v_BSE.dtype).expand(batch, -1, -1)), 1)
        if self.add_zero_attn:
            k_BSE, v_BSE = F.pad(k_BSE, (0, 0, 0, 1)), F.pad(v_BSE, (0, 0, 0, 1))
        more = k_BSE.shape[1] - before
        if more:
            attn, padding = (None if mask is None else F.pad(mask, (0, more)) for mask in (attn, padding))
        return k_BSE, v_BSE, attn, padding


class SplitMultiheadAttention(MultiheadForward, nn.Module):
    """``nn.MultiheadAttention`` with a module for each of its four projections.

    Arguments and results are those of the replaced layer (masks, ``batch_first``, unbatched input), except for nested
    tensors. Attention is computed in the dtype of the projections' result.

    Args:
        like: the layer to replace.
        q: projection of queries.
        k: projection of keys.
        v: projection of values.
        out: output projection.

    Raises:
        ValueError: inputs or masks of other shapes (nothing is broadcast), or ``is_causal`` without a mask.
        TypeError: a mask that is neither bool nor floating-point, or a nested tensor.
    """

    #: nn.TransformerEncoder reads these to decide whether its fused kernel for plain weights may run: never.
    in_proj_bias = None
    in_proj_weight = None
    _qkv_same_embed_dim = False

    def __init__(self, like: nn.MultiheadAttention, q: nn.Module, k: nn.Module, v: nn.Module, out: nn.Module) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.head_dim = like.embed_dim, like.num_heads, like.head_dim
        self.kdim, self.vdim = like.kdim, like.vdim
        self.dropout, self.batch_first, self.add_zero_attn = like.dropout, like.batch_first, like.add_zero_attn
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = q, k, v, out
        self.bias_k, self.bias_v = like.bias_k, like.bias_v
        self.attend = getattr(like, "attend", None)

    @classmethod
    def of(cls, layer: nn.MultiheadAttention) -> SplitMultiheadAttention:
        """Return the layer with Linear projections, which share the storage of its weights."""
        weights, biases = in_projections(layer)
        q, k, v = map(_linear, weights, biases)
        split = cls(layer, q, k, v, _linear(layer.out_proj.weight, layer.out_proj.bias))
        return split.train(layer.training)

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q_proj(query), self.k_proj(key), self.v_proj(value)

    def project_back(self, y_BTE: Tensor) -> Tensor:
        result: Tensor = self.out_proj(y_BTE)
        return result

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, batch_first={self.batch_first}"


def split_attention_(model: nn.Module, chosen: Callable[[str], bool] = lambda path: True) -> None:
    """Replace each ``nn.MultiheadAttention`` with a ``chosen`` path, which reads its weights without a layer, in place.

    The new layers have a Linear layer for each projection, with the same weights.
    """
    for path, parent in list(model.named_modules()):
        for name, layer in parent.named_children():
            if type(layer) is nn.MultiheadAttention and chosen(f"{path}.{name}" if path else name):
                setattr(parent, name, SplitMultiheadAttention.of(layer))


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach(), weight.requires_grad)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach(), bias.requires_grad)
    return layer


class QuantMultiheadAttention(SplitMultiheadAttention):
    """``nn.MultiheadAttention`` with quantized projections ``q_proj``, ``k_proj``, ``v_proj``, ``out_proj``."""

    q_proj: QuantLinear
    k_proj: QuantLinear
    v_proj: QuantLinear
    out_proj: QuantLinear

    def __init__(
        self, like: nn.MultiheadAttention, q: QuantLinear, k: QuantLinear, v: QuantLinear, out: QuantLinear
    ) -> None:
        super().__init__(like, q, k, v, out)
        self.recipe = q.recipe

    @property
    def lowbit_kind(self) -> str:
        """ "qat" while the projections are trained, else "quantized"."""
        return "qat" if kind(self.q_proj) == "qat" else "quantized"


def _merged(attn: Tensor | None, padding: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Both masks as one additive mask that broadcasts to [B, H, T, S]."""
    total = None if attn is None else _additive(attn, dtype)
    if padding is None:
        return total
    hidden = _additive(padding[:, None, None, :], dtype)
    return hidden if total is None else total + hidden


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, -torch.inf)


def _got(query: Tensor, key: Tensor, value: Tensor) -> str:
    return f"got query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"


def _check_mask(name: str, mask: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> None:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(
            f"{name} must be bool (True hides) or floating-point (added to the scores), got {mask.dtype}; "
            f"if its ones mean hidden, pass {name}.bool()"
        )
    if not any(mask.shape == shape for shape in shapes.values()):
        expected = " or ".join(f"[{axes}] = {list(shape)}" for axes, shape in shapes.items())
        raise ValueError(f"{name} must have shape {expected}, got {list(mask.shape)}; masks are not broadcast")
