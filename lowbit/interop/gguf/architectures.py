"""Model architectures of llama.cpp: their metadata, and the tensors that differ from those of transformers.

Names of tensors come from the package gguf, which knows all architectures.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lowbit.models.wrap import plain_class
from lowbit.name_tables import did_you_mean

__all__ = [
    "ARCHITECTURES", "TOKEN_TYPES", "Architecture", "Change", "architecture_of", "find_architecture", "head_dim",
    "llama3_factors", "register_architecture", "rope_of", "with_factors",
]  # fmt: skip


@dataclass(frozen=True)
class Change:
    """A change of a tensor from transformers to llama.cpp."""

    #: A regular expression of names in GGUF files.
    pattern: str
    #: The new order of rows, from the number of rows and the config; None if rows keep their order.
    rows: Callable[[int, Any], Tensor] | None = None
    #: A change of float values, and its inverse.
    values: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] | None = None


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp.

    Attributes:
        name: Its name in ``general.architecture``.
        model_type: The ``model_type`` of configs of transformers.
        model_class: The class of transformers that reads it.
        keys: For keys of metadata after the architecture's name, the attribute of the config.
        changes: Tensors that differ from those of transformers.
        more: Further metadata, from the config; keys that begin with ``tokenizer.`` are written as they are.
        config: Further arguments of the config, from the metadata by key.
        needs: For attributes of the config that llama.cpp has one meaning of, the values with this meaning. An absent
            attribute has it.
        refuses: Returns the reason why llama.cpp cannot run a model with this config, or None.
        names: Names of modules in GGUF files by their names in transformers, if the package gguf does not have them;
            ``{bid}`` stands for the number of a block.
        embeds: Whether the model computes embeddings, not tokens.
        scales: Whether llama.cpp multiplies the global scale of NVFP4 weights.
        positions: Whether the model has a table of positions, not rotary embeddings.
    """

    name: str
    model_type: str
    model_class: str
    keys: dict[str, str]
    changes: tuple[Change, ...] = ()
    more: Callable[[Any], dict[str, Any]] = lambda config: {}
    config: Callable[[dict[str, Any]], dict[str, Any]] = lambda values: {}
    needs: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    refuses: Callable[[Any], str | None] = lambda config: None
    names: dict[str, str] = field(default_factory=dict)
    embeds: bool = False
    scales: bool = True
    positions: bool = False


# -- rotary embeddings -------------------------------------------------------------------------------------------------
def rope_of(config: Any) -> dict[str, Any]:
    """The parameters of the rotary embedding, those of full attention if layers differ; empty if there is none."""
    rope = getattr(config, "rope_parameters", None)
    if rope is None and hasattr(config, "rope_theta"):  # transformers 4
        rope = {"rope_theta": config.rope_theta, **(getattr(config, "rope_scaling", None) or {})}
    inner = (rope or {}).get("full_attention")
    return dict(inner if isinstance(inner, dict) else rope or {})


def _rope_kind(rope: dict[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _rope_keys(config: Any) -> dict[str, Any]:
    rope = rope_of(config)
    kind = _rope_kind(rope)
    keys: dict[str, Any] = {"rope.freq_base": float(rope["rope_theta"])}
    if kind in ("linear", "yarn"):
        keys |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind in ("yarn", "llama3"):
        original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        keys["rope.scaling.original_context_length"] = int(original)
    return keys


def llama3_factors(rope: dict[str, Any], size: int) -> Tensor:
    """What llama3's rotary embedding divides each of the ``size / 2`` frequencies by, in fp32."""
    lengths = 2 * torch.pi * float(rope["rope_theta"]) ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
    factor, low, high = (float(rope[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original = float(rope["original_max_position_embeddings"])
    smooth = (original / lengths - low) / (high - low)
    middle = 1 / ((1 - smooth) / factor + smooth)
    return torch.where(lengths < original / high, 1.0, torch.where(lengths > original / low, factor, middle)).float()


def with_factors(rope: dict[str, Any], factors: Tensor, original: int | None) -> dict[str, Any]:
    """The parameters of llama3's rotary embedding whose factors a file has.

    Raises:
        ValueError: The factors are not those of Llama 3 models.
    """
    for length in (original, 8192):
        candidate = rope | {
            "rope_type": "llama3", "factor": float(factors.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": length,
        }  # fmt: skip
        if length and torch.allclose(llama3_factors(candidate, 2 * len(factors)), factors, rtol=1e-4):
            return candidate
    raise ValueError("rope_freqs.weight has factors that no rotary embedding of transformers is known to have")


#: Parameters of rotary embeddings that have no key in GGUF files, or that lowbit does not write, and usual values.
_USUAL_ROPE = {
    "partial_rotary_factor": 1.0, "attention_factor": None, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": None,
    "mscale_all_dim": None, "truncate": True,
}  # fmt: skip


def _refuse_rope(config: Any) -> str | None:
    kind = _rope_kind(rope_of(config))
    if kind not in ("default", "linear", "yarn", "llama3"):
        return f"its rotary embedding is {kind!r}, and lowbit writes default, linear, yarn and llama3"
    rope = {"partial_rotary_factor": getattr(config, "partial_rotary_factor", None), **rope_of(config)}
    for key, usual in _USUAL_ROPE.items():
        if rope.get(key) not in (None, usual):
            return f"its rotary embedding has {key} {rope[key]}, and lowbit writes {usual}"
    return None


def _rope_config(values: dict[str, Any]) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": float(values.get("rope.freq_base", 10000.0))}
    kind = values.get("rope.scaling.type", "none")
    if kind not in ("none", "default"):
        rope |= {"rope_type": kind, "factor": float(values["rope.scaling.factor"])}
        if "rope.scaling.original_context_length" in values:
            rope["original_max_position_embeddings"] = int(values["rope.scaling.original_context_length"])
    return {"rope_parameters": rope}


def interleaved(heads: Callable[[Any], int]) -> Callable[[int, Any], Tensor]:
    """The order of rows for llama.cpp's rotary embedding, which rotates neighboring rows of a head, not its halves."""

    def order(rows: int, config: Any) -> Tensor:
        return torch.arange(rows).view(heads(config), 2, -1).transpose(1, 2).reshape(-1)

    return order


#: Rows of queries and keys, for architectures that rotate neighboring rows.
_NEIGHBORS = (
    Change(r"blk\.\d+\.attn_q\.(weight|bias)", rows=interleaved(lambda config: config.num_attention_heads)),
    Change(r"blk\.\d+\.attn_k\.(weight|bias)", rows=interleaved(lambda config: config.num_key_value_heads)),
)

_PLUS_ONE = (lambda weight: weight + 1, lambda weight: weight - 1)

# -- metadata ----------------------------------------------------------------------------------------------------------
#: Keys that all decoders have.
_DECODER = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}


def _heads(config: Any) -> dict[str, Any]:
    size = head_dim(config)
    return {"attention.key_length": size, "attention.value_length": size, "rope.dimension_count": size}


def _decoder(config: Any) -> dict[str, Any]:
    return _heads(config) | _rope_keys(config)


def _decoder_config(values: dict[str, Any]) -> dict[str, Any]:
    size = values.get("attention.key_length") or values.get("rope.dimension_count")
    return _rope_config(values) | ({"head_dim": int(size)} if size else {})


def _experts(config: Any) -> dict[str, Any]:
    size = getattr(config, "moe_intermediate_size", None)
    return _decoder(config) | ({"expert_feed_forward_length": int(size)} if size else {})


#: Gated feed-forward layers with SiLU.
_SILU = {"hidden_act": ("silu",)}

#: No window limits attention.
_NO_WINDOW = {**_SILU, "sliding_window": (None,)}
_QWEN = {**_SILU, "use_sliding_window": (False,)}

_NEEDS_GEMMA3 = {
    "hidden_activation": ("gelu_pytorch_tanh",), "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,), "use_bidirectional_attention": (False, None),
}  # fmt: skip


def _gemma3(config: Any) -> dict[str, Any]:
    keys: dict[str, Any] = _decoder(config)
    if config.sliding_window:
        keys["attention.sliding_window"] = int(config.sliding_window)
    return keys


def _gemma3_scale(blocks: int, width: int, heads: int, size: int) -> int:
    """The square of what queries are divided by: the width per head in the model of 27B, else the head's size."""
    return width // heads if blocks == 62 else size


def _refuse_gemma3(config: Any) -> str | None:
    local = (getattr(config, "rope_parameters", None) or {}).get("sliding_attention", {})
    kinds = config.layer_types
    expected = ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(len(kinds))]
    if list(kinds) != expected:
        return "llama.cpp expects full attention in every sixth layer, and sliding windows in all others"
    if float(local.get("rope_theta", 10000.0)) != 10000.0:
        return f"llama.cpp expects a rope_theta of 10000 in sliding layers, got {local['rope_theta']}"
    expected_scale = _gemma3_scale(len(kinds), config.hidden_size, config.num_attention_heads, head_dim(config))
    if config.query_pre_attn_scalar != expected_scale:
        return f"query_pre_attn_scalar is {config.query_pre_attn_scalar}, and llama.cpp computes with {expected_scale}"
    return _refuse_rope(config)


def _gemma3_config(values: dict[str, Any]) -> dict[str, Any]:
    settings = _decoder_config(values)
    rope = settings["rope_parameters"]
    sliding = {"rope_type": "default", "rope_theta": 10000.0}
    settings["rope_parameters"] = {"full_attention": rope, "sliding_attention": sliding}
    settings["query_pre_attn_scalar"] = _gemma3_scale(
        values["block_count"], values["embedding_length"], values["attention.head_count"], settings["head_dim"]
    )
    if "attention.sliding_window" in values:
        settings["sliding_window"] = int(values["attention.sliding_window"])
    return settings


def _phi3(config: Any) -> dict[str, Any]:
    keys: dict[str, Any] = _decoder(config)
    original = getattr(config, "original_max_position_embeddings", None)
    keys["rope.scaling.original_context_length"] = int(original or config.max_position_embeddings)
    return keys


def _phi3_config(values: dict[str, Any]) -> dict[str, Any]:
    settings = _rope_config(values)
    settings["rope_parameters"].pop("original_max_position_embeddings", None)
    return settings | {"sliding_window": values.get("attention.sliding_window"), "pad_token_id": 0}


#: A key without the architecture's name.
TOKEN_TYPES = "tokenizer.ggml.token_type_count"


def _bert(config: Any) -> dict[str, Any]:
    return {"attention.causal": False, "pooling_type": 1, TOKEN_TYPES: int(config.type_vocab_size)}


#: One row per architecture. ``register_architecture`` adds one.
ARCHITECTURES: dict[str, Architecture] = {
    row.model_type: row
    for row in (
        Architecture("llama", "llama", "LlamaForCausalLM", _DECODER, _NEIGHBORS, _decoder, _decoder_config, _SILU,
                     _refuse_rope),
        Architecture("llama", "mistral", "MistralForCausalLM", _DECODER, _NEIGHBORS, _decoder, _decoder_config,
                     _NO_WINDOW, _refuse_rope),
        Architecture("llama", "mixtral", "MixtralForCausalLM",
                     _DECODER | {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
                     _NEIGHBORS, _experts, _decoder_config, _NO_WINDOW, _refuse_rope),
        Architecture("qwen2", "qwen2", "Qwen2ForCausalLM", _DECODER, (), _decoder, _rope_config, _QWEN, _refuse_rope),
        Architecture("qwen3", "qwen3", "Qwen3ForCausalLM", _DECODER, (), _decoder, _decoder_config, _QWEN,
                     _refuse_rope),
        Architecture("qwen3moe", "qwen3_moe", "Qwen3MoeForCausalLM",
                     _DECODER | {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
                                 "expert_feed_forward_length": "moe_intermediate_size"},
                     (), _experts, lambda values: _decoder_config(values) | {"norm_topk_prob": True},
                     {**_QWEN, "norm_topk_prob": (True,), "mlp_only_layers": ([], None), "decoder_sparse_step": (1,)},
                     _refuse_rope),
        Architecture("gemma3", "gemma3_text", "Gemma3ForCausalLM", _DECODER,
                     (Change(r".*norm\.weight", values=_PLUS_ONE),), _gemma3, _gemma3_config, _NEEDS_GEMMA3,
                     _refuse_gemma3, scales=False),
        # llama.cpp does not limit attention to a window.
        Architecture("phi3", "phi3", "Phi3ForCausalLM", _DECODER, (), _phi3, _phi3_config, _NO_WINDOW, _refuse_rope,
                     scales=False),
        Architecture("gpt2", "gpt2", "GPT2LMHeadModel",
                     {"vocab_size": "vocab_size", "context_length": "n_positions", "embedding_length": "n_embd",
                      "block_count": "n_layer", "attention.head_count": "n_head",
                      "attention.layer_norm_epsilon": "layer_norm_epsilon"},
                     (), lambda config: {"feed_forward_length": int(config.n_inner or 4 * config.n_embd)},
                     lambda values: {"n_inner": int(values["feed_forward_length"])},
                     {"activation_function": ("gelu_new",), "scale_attn_weights": (True,),
                      "scale_attn_by_inverse_layer_idx": (False,)}, scales=False, positions=True),
        Architecture("bert", "bert", "BertModel",
                     {"vocab_size": "vocab_size", "context_length": "max_position_embeddings",
                      "embedding_length": "hidden_size", "block_count": "num_hidden_layers",
                      "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
                      "attention.layer_norm_epsilon": "layer_norm_eps"},
                     (), _bert, lambda values: {"type_vocab_size": int(values.get(TOKEN_TYPES, 2))},
                     {"hidden_act": ("gelu",), "position_embedding_type": ("absolute",), "is_decoder": (False,)},
                     embeds=True, scales=False, positions=True),
    )
}  # fmt: skip


def register_architecture(row: Architecture) -> None:
    """Add an architecture, or replace the one of its ``model_type``."""
    if not isinstance(row, Architecture):
        raise TypeError(f"register_architecture: expected an Architecture, got {type(row).__name__}")
    re.compile("|".join(change.pattern for change in row.changes))
    ARCHITECTURES[row.model_type] = row


def architecture_of(model: Any) -> Architecture:
    """The architecture of a model of transformers.

    Raises:
        ValueError: llama.cpp or the table does not have it, or llama.cpp would compute something else.
    """
    config, cls = model.config, plain_class(model).__name__
    kind = getattr(config, "model_type", None)
    row = ARCHITECTURES.get(str(kind))
    if row is None:
        raise ValueError(
            f"no architecture of llama.cpp is known for model_type {kind!r}{did_you_mean(str(kind), ARCHITECTURES)}; "
            f"expected one of {', '.join(ARCHITECTURES)}, or add it with lowbit.interop.gguf.register_architecture"
        )
    reasons = [f"it is a {cls}, and llama.cpp runs a {row.model_class}"] if cls != row.model_class else []
    for attribute, values in row.needs.items():
        value = getattr(config, attribute, values[0])
        if value not in values:
            reasons.append(f"{attribute} is {value!r}, and llama.cpp computes with {values[0]!r}")
    reason = reasons[0] if reasons else row.refuses(config)
    if reason is not None:
        raise ValueError(f"llama.cpp cannot run this {kind} model as it is: {reason}; export it to compressed-tensors")
    return row


def find_architecture(name: Any, values: dict[str, Any]) -> Architecture:
    """The architecture of a file. Raises ValueError if the table does not have it."""
    rows = [row for row in ARCHITECTURES.values() if row.name == name]
    if not rows:
        known = ", ".join(dict.fromkeys(row.name for row in ARCHITECTURES.values()))
        raise ValueError(f"has architecture {name!r}, expected one of {known}")
    mixtures = [row for row in rows if "expert_count" in row.keys]
    return mixtures[0] if mixtures and values.get("expert_count") else rows[0]
