"""Maps of which modules of a block feed which linear layers, by the name of the block's class.

Columns of the output of ``before`` are divided by factors, and weight columns of ``after`` multiplied by them. So
``before`` must be a norm whose output goes only to these layers, or a linear layer whose output reaches them only
through sums and products of full columns (values through attention, ``up`` through a gate).
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["MAPS", "Map"]


class Map(NamedTuple):
    """A module and the linear layers that it feeds.

    Attributes:
        before: The name of a norm or linear layer in the block.
        after: The names of the linear layers that it feeds.
        part: The rows of a linear layer ``before``: ``(2, 3)`` is the last of three equal parts.
    """

    before: str
    after: tuple[str, ...]
    part: tuple[int, int] = (0, 1)


_LLAMA = (
    Map("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    Map("self_attn.v_proj", ("self_attn.o_proj",)),
    Map("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
    Map("mlp.up_proj", ("mlp.down_proj",)),
)

#: Maps by class name of a block. Add rows for other models: ``lowbit.calibrate.transforms.MAPS["MyBlock"] = ...``.
MAPS: dict[str, tuple[Map, ...]] = {
    "LlamaDecoderLayer": _LLAMA,
    "MistralDecoderLayer": _LLAMA,
    "Qwen2DecoderLayer": _LLAMA,
    "Qwen3DecoderLayer": _LLAMA,
    "GPT2Block": (Map("ln_1", ("attn.c_attn",)), Map("ln_2", ("mlp.c_fc",))),
    # A BertLayer's norms feed the residual too, which must not be scaled.
    "BertLayer": (Map("attention.self.value", ("attention.output.dense",)),),
    "Block": (  # the GPT of lowbit.demo
        Map("norm1", ("attention.qkv",)),
        Map("attention.qkv", ("attention.out",), (2, 3)),
        Map("norm2", ("mlp.gate_up",)),
        Map("mlp.gate_up", ("mlp.down",), (1, 2)),
    ),
}
