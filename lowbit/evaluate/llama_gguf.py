"""A Llama model and its tokenizer out of a GGUF file (llama.cpp), for transformers.

Source of the format: ggml/docs/gguf.md; of the permutation: llama.cpp, ``LlamaModel.permute`` in its converter.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["load", "tokenizer", "unpermute"]

#: Where GGUF's tensors are in LlamaForCausalLM; ``{}`` is the layer.
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.{}.attn_norm": "model.layers.{}.input_layernorm",
    "blk.{}.attn_q": "model.layers.{}.self_attn.q_proj",
    "blk.{}.attn_k": "model.layers.{}.self_attn.k_proj",
    "blk.{}.attn_v": "model.layers.{}.self_attn.v_proj",
    "blk.{}.attn_output": "model.layers.{}.self_attn.o_proj",
    "blk.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.ffn_gate": "model.layers.{}.mlp.gate_proj",
    "blk.{}.ffn_up": "model.layers.{}.mlp.up_proj",
    "blk.{}.ffn_down": "model.layers.{}.mlp.down_proj",
}

#: GGUF's ``tokenizer.ggml.token_type`` of tokens that text does not spell.
CONTROL = 3


def unpermute(weight: Tensor, heads: int) -> Tensor:
    """The rows of a q or k projection [heads * d, K] in transformers' order.

    llama.cpp rotates neighbouring pairs of a head's rows and transformers its halves, so llama.cpp's converter
    interleaves the halves; this is the inverse. Raises: ValueError where ``heads`` does not divide the rows by two.
    """
    rows, cols = weight.shape
    if rows % (2 * heads):
        raise ValueError(f"a weight of {rows} rows is none of {heads} heads with two halves each")
    return weight.view(heads, rows // heads // 2, 2, cols).transpose(1, 2).reshape(rows, cols)


def load(path: Path) -> tuple[nn.Module, Callable[[str], list[int]]]:
    """The model in fp32, in eval mode, and what makes tokens of a text.

    Raises: ValueError for another architecture, or a tensor that is missing, unknown or of another shape.
    """
    import gguf
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = gguf.GGUFReader(path)

    def value(key: str) -> Any:
        return reader.fields[key].contents()

    if value("general.architecture") != "llama":
        raise ValueError(f"{path} holds a {value('general.architecture')} model; only llama is read")
    heads, heads_kv = value("llama.attention.head_count"), value("llama.attention.head_count_kv")
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    config = LlamaConfig(
        vocab_size=len(value("tokenizer.ggml.tokens")),
        hidden_size=value("llama.embedding_length"),
        intermediate_size=value("llama.feed_forward_length"),
        num_hidden_layers=value("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=heads_kv,
        max_position_embeddings=value("llama.context_length"),
        rms_norm_eps=value("llama.attention.layer_norm_rms_epsilon"),
        tie_word_embeddings=tied,
    )
    _set_rope_base(config, value("llama.rope.freq_base"))
    state = {}
    for tensor in reader.tensors:
        name, found = _name(tensor.name), torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            found = unpermute(found, heads if "q_proj" in name else heads_kv)
        state[name] = found
    model, told = LlamaForCausalLM.from_pretrained(
        None, config=config, state_dict=state, output_loading_info=True, torch_dtype=torch.float32
    )
    wrong = {kind: sorted(map(str, names)) for kind, names in told.items() if names}
    if wrong:
        raise ValueError(f"{path} holds no complete Llama of the shape that it tells: {wrong}")
    eager: nn.Module = model.eval()
    return eager, tokenizer(value)


def _set_rope_base(config: Any, base: float) -> None:
    """transformers 5 keeps the base among ``rope_parameters``, transformers 4 as ``rope_theta``."""
    parameters = getattr(config, "rope_parameters", None)
    if parameters is None:
        config.rope_theta = base
    else:
        parameters["rope_theta"] = base


def _name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    layer = re.match(r"blk\.(\d+)\.", stem)
    pattern = stem if layer is None else stem.replace(f"blk.{layer[1]}.", "blk.{}.", 1)
    place = NAMES.get(pattern, pattern)
    return f"{place.format(layer[1]) if layer else place}.{kind}"


def tokenizer(value: Callable[[str], Any]) -> Callable[[str], list[int]]:
    """The byte-level BPE tokenizer of a GGUF whose fields ``value`` gives. Raises: ValueError for another kind."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    kind = (value("tokenizer.ggml.model"), value("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"the tokenizer is {kind[0]} with {kind[1]} pre-tokenization; only gpt2 with smollm is read")
    tokens, types = value("tokenizer.ggml.tokens"), value("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in value("tokenizer.ggml.merges")]
    bpe = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    bpe.add_special_tokens(
        [AddedToken(token, special=True) for token, of in zip(tokens, types, strict=True) if of == CONTROL]
    )
    return lambda text: list(bpe.encode(text, add_special_tokens=False).ids)
