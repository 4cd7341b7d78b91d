"""QuantExperts: the experts of a mixture, each with quantized matrices of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.nn.base import kind
from lowbit.nn.linear import QuantLinear

__all__ = ["QuantExperts", "stacks"]


def stacks(experts: Any) -> tuple[str, str]:
    """What transformers' ``Experts`` modules call their two stacks of matrices."""
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


class QuantExperts(nn.Module):
    """What transformers' ``Experts`` modules compute, whose weights are stacks of matrices, by QuantLinears.

    ``forward(hidden [T, H], index [T, k], weights [T, k])``: for each token the sum over its ``k`` experts of
    ``down(gate(gate_up(hidden))) * weight``, ``[T, H]``. ``gate``: that of the class of ``like``, by default
    ``act(gate) * up``; its activation where it has none. ``gate_up`` and ``down`` have a layer for each expert; one
    that no token chooses is not called. An index of E, which padding has, chooses none.

    In ``torch.compile`` and ``torch.export`` each expert computes every token, since no shape may depend on the index:
    the results are those of eager mode within rounding, in E / k times the products.
    """

    act_fn: Any

    @property
    def lowbit_kind(self) -> str:
        """Quantized, or what its matrices are trained to be."""
        return "qat" if kind(self.down[0]) == "qat" else "quantized"

    def __init__(self, like: Any, gate_up: Sequence[QuantLinear], down: Sequence[QuantLinear]) -> None:
        super().__init__()
        # What its gate may read: numbers and activations.
        vars(self).update({k: v for k, v in vars(like).items() if isinstance(v, int | float) or callable(v)})
        self._modules.update(like._modules)
        self.num_experts = len(down)
        self._gate = type(like)._apply_gate if like.has_gate else None
        self.recipe = down[0].recipe
        self.gate_up, self.down = nn.ModuleList(gate_up), nn.ModuleList(down)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        result = torch.zeros_like(hidden_states)
        if torch.compiler.is_compiling():
            for expert in range(self.num_experts):
                chosen = top_k_index == expert
                weight = (top_k_weights * chosen).sum(-1, keepdim=True)
                y = self._expert(expert, hidden_states) * weight
                result = result + torch.where(chosen.any(-1, keepdim=True), y, 0).to(result.dtype)
            return result
        for expert in top_k_index.unique().tolist():
            if expert >= self.num_experts:
                continue
            token, place = torch.where(top_k_index == expert)
            y = self._expert(expert, hidden_states[token]) * top_k_weights[token, place, None]
            result.index_add_(0, token, y.to(result.dtype))
        return result

    def _expert(self, expert: int, x: Tensor) -> Tensor:
        """What one expert computes, before it is weighted."""
        y = self.gate_up[expert](x)
        y = self.act_fn(y) if self._gate is None else self._gate(self, y)
        output: Tensor = self.down[expert](y)
        return output
