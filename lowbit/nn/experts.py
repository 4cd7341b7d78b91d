"""QuantExperts: the experts of a mixture, each with quantized matrices of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.nn.base import kind
from lowbit.nn.linear import QuantLinear

__all__ = ["QuantExperts"]


class QuantExperts(nn.Module):
    """What transformers' ``Experts`` modules compute, whose weights are stacked ``[E, out, in]``, by QuantLinears.

    ``forward(hidden [T, H], index [T, k], weights [T, k])``: for each token the sum over its ``k`` experts of
    ``down(act(gate) * up) * weight``, ``[T, H]``. ``gate_up`` and ``down`` have a layer for each expert; one that no
    token chooses is not called. An index of E, which padding has, chooses none.
    """

    @property
    def lowbit_kind(self) -> str:
        """Quantized, or what its matrices are trained to be."""
        return "qat" if kind(self.down[0]) == "qat" else "quantized"

    def __init__(self, like: Any, gate_up: Sequence[QuantLinear], down: Sequence[QuantLinear]) -> None:
        super().__init__()
        self.num_experts, self.act_fn = len(down), like.act_fn
        self.recipe = down[0].recipe
        self.gate_up, self.down = nn.ModuleList(gate_up), nn.ModuleList(down)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        result = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            if expert >= self.num_experts:
                continue
            token, place = torch.where(top_k_index == expert)
            gate, up = self.gate_up[expert](hidden_states[token]).chunk(2, -1)
            y = self.down[expert](self.act_fn(gate) * up) * top_k_weights[token, place, None]
            result.index_add_(0, token, y.to(result.dtype))
        return result
