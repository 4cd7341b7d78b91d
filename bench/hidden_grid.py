"""Permutes the channels of a Llama, so that quantized weights of its file no longer lie on a grid in groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["hide_grid_"]


@torch.no_grad()
def hide_grid_(model: Any, seed: int = 0) -> None:
    """Permute the residual stream, the channels between up and down, and those of each head of values.

    The model computes the same function, up to the order of float sums.

    Args:
        model: A ``LlamaForCausalLM``.
        seed: The seed of the permutations.
    """
    generator = torch.Generator().manual_seed(seed)
    config = model.config

    def order(count: int) -> Tensor:
        return torch.randperm(count, generator=generator)

    stream = order(config.hidden_size)
    model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight[:, stream])
    if model.lm_head.weight is not model.model.embed_tokens.weight:
        model.lm_head.weight.copy_(model.lm_head.weight[:, stream])
    model.model.norm.weight.copy_(model.model.norm.weight[stream])
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight.copy_(norm.weight[stream])
        for reads in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            reads.weight.copy_(reads.weight[:, stream])
        for writes in (attention.o_proj, mlp.down_proj):
            writes.weight.copy_(writes.weight[stream])
        inner = order(config.intermediate_size)
        for rows in (mlp.gate_proj, mlp.up_proj):
            rows.weight.copy_(rows.weight[inner])
        mlp.down_proj.weight.copy_(mlp.down_proj.weight[:, inner])
        _permute_values_(attention, config, order)


def _permute_values_(attention: Any, config: Any, order: Any) -> None:
    """Permute the channels of each head of values; query heads that share it read the same order."""
    size, shared = attention.head_dim, config.num_attention_heads // config.num_key_value_heads
    heads = [order(size) for _ in range(config.num_key_value_heads)]
    rows = torch.cat([index * size + head for index, head in enumerate(heads)])
    cols = torch.cat([index * size + heads[index // shared] for index in range(config.num_attention_heads)])
    attention.v_proj.weight.copy_(attention.v_proj.weight[rows])
    attention.o_proj.weight.copy_(attention.o_proj.weight[:, cols])
