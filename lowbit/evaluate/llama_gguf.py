"""Load a Llama model and its tokenizer from a GGUF file (llama.cpp) into transformers.

Sources: ggml/docs/gguf.md for the format; ``LlamaModel.permute`` in llama.cpp's converter for the permutation.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["load", "tokenizer", "unpermute"]

#: Names of GGUF tensors in LlamaForCausalLM; ``{}`` is the layer.
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

#: The ``tokenizer.ggml.token_type`` of control tokens.
CONTROL = 3


def unpermute(weight: Tensor, heads: int) -> Tensor:
    """The rows of a q or k projection [heads * d, K] in the order of transformers.

    llama.cpp's RoPE rotates neighboring rows of a head, and transformers rotates the two halves. llama.cpp's converter
    therefore interleaves the halves, and this is the inverse.

    Raises:
        ValueError: The number of rows is not a multiple of ``2 * heads``.
    """
    rows, cols = weight.shape
    if rows % (2 * heads):
        raise ValueError(f"expected a multiple of 2 * {heads} rows for {heads} heads, got a weight with {rows} rows")
    return weight.view(heads, rows // heads // 2, 2, cols).transpose(1, 2).reshape(rows, cols)


def load(path: Path) -> tuple[nn.Module, Callable[[str], list[int]]]:
    """The model in fp32 and eval mode, and a function that tokenizes text.

    Raises:
        ValueError: The architecture is not llama, or a tensor is missing, unknown or has another shape.
    """
    import gguf
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = gguf.GGUFReader(path)

    def value(key: str) -> Any:
        return reader.fields[key].contents()

    if value("general.architecture") != "llama":
        raise ValueError(f"{path} has a {value('general.architecture')} model; only llama is supported")
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
        name, weight = _name(tensor.name), torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = unpermute(weight, heads if "q_proj" in name else heads_kv)
        state[name] = weight
    model, info = LlamaForCausalLM.from_pretrained(
        None, config=config, state_dict=state, output_loading_info=True, torch_dtype=torch.float32
    )
    differences = {category: sorted(map(str, names)) for category, names in info.items() if names}
    if differences:
        raise ValueError(f"{path} does not have the tensors of the Llama in its metadata: {differences}")
    loaded: nn.Module = model.eval()
    return loaded, tokenizer(value)


def _set_rope_base(config: Any, base: float) -> None:
    """Set the base in ``rope_parameters`` (transformers 5) or ``rope_theta`` (transformers 4)."""
    parameters = getattr(config, "rope_parameters", None)
    if parameters is None:
        config.rope_theta = base
    else:
        parameters["rope_theta"] = base


def _name(name: str) -> str:
    stem, _, parameter = name.rpartition(".")
    layer = re.match(r"blk\.(\d+)\.", stem)
    pattern = stem if layer is None else stem.replace(f"blk.{layer[1]}.", "blk.{}.", 1)
    module = NAMES.get(pattern, pattern)
    return f"{module.format(layer[1]) if layer else module}.{parameter}"


def tokenizer(value: Callable[[str], Any]) -> Callable[[str], list[int]]:
    """The byte-level BPE tokenizer from the GGUF fields ``value(key)``. Raises ValueError for other tokenizers."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    names = (value("tokenizer.ggml.model"), value("tokenizer.ggml.pre"))
    if names != ("gpt2", "smollm"):
        raise ValueError(
            f"the tokenizer is {names[0]} with {names[1]} pre-tokenization; only gpt2 with smollm is supported"
        )
    tokens, types = value("tokenizer.ggml.tokens"), value("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in value("tokenizer.ggml.merges")]
    bpe = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    bpe.add_special_tokens(
        [AddedToken(token, special=True) for token, code in zip(tokens, types, strict=True) if code == CONTROL]
    )
    return lambda text: list(bpe.encode(text, add_special_tokens=False).ids)
