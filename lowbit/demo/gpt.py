"""A small GPT: RoPE, RMSNorm, SwiGLU, causal scaled-dot-product attention, no biases.

Shape suffixes: B sequences, T positions, S cached and new positions, C width, H heads, D width of a head, V vocabulary.

Projections with the same input are fused, so that each activation is quantized once. The model has no buffers, so that
a cast rounds only weights.
Sources: RoPE arXiv 2104.09864, RMSNorm arXiv 1910.07467, SwiGLU arXiv 2002.05202.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowbit.nn.kv_cache import QuantizedRows

__all__ = ["GPT", "GPTConfig", "KVCache", "QuantizedKVCache", "generate"]


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The shape of a GPT. Widths that are multiples of 128 have no partial groups in any scheme."""

    vocab: int = 1024
    context: int = 256
    layers: int = 4
    heads: int = 2
    dim: int = 128
    hidden: int = 384
    rope_base: float = 10000.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            expected = "number" if name == "rope_base" else "integer"
            if not (type(value) is int or (type(value) is float and expected == "number")) or not 0 < value < math.inf:
                raise ValueError(f"GPTConfig.{name} must be a positive {expected}, got {value!r}")
        if self.dim % (2 * self.heads):
            raise ValueError(
                f"dim must be a multiple of 2 * heads (RoPE rotates pairs), got dim {self.dim} and {self.heads} heads; "
                f"try dim={2 * self.heads * max(1, self.dim // (2 * self.heads))}"
            )


class KVCache:
    """Keys and values ``k``, ``v`` [layers, B, H, context, D], of which ``length`` positions are filled."""

    def __init__(
        self, config: GPTConfig, batch: int, *, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        shape = (config.layers, batch, config.heads, config.context, config.dim // config.heads)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.length = 0

    def extend(self, layer: int, k_BHTD: Tensor, v_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        """Append the new positions of ``layer``; return its keys and values of all positions, [B, H, S, D]."""
        end = self.length + k_BHTD.shape[2]
        self.k[layer, :, :, self.length : end] = k_BHTD
        self.v[layer, :, :, self.length : end] = v_BHTD
        return self.k[layer, :, :, :end], self.v[layer, :, :, :end]


class QuantizedKVCache(KVCache):
    """A cache that quantizes each position with ``scheme`` when it is appended."""

    def __init__(self, config: GPTConfig, scheme: str) -> None:
        self.rows = [(QuantizedRows(scheme), QuantizedRows(scheme)) for _ in range(config.layers)]
        self.length = 0

    def extend(self, layer: int, k_BHTD: Tensor, v_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.rows[layer]
        keys.append(k_BHTD)
        values.append(v_BHTD)
        return keys.read(), values.read()


def rope(positions_T: Tensor, width: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin [T, D/2] of the rotation angle of each pair at each position, always in fp32."""
    powers = torch.arange(0, width, 2, dtype=torch.float32, device=positions_T.device) / width
    angles = positions_T[:, None].float() * base**-powers
    return angles.cos(), angles.sin()


def rotate(x_BHTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair ``(x[i], x[i + D/2])`` by its angle."""
    a, b = x_BHTD.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x_BHTD.dtype)


class Attention(nn.Module):
    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.heads, self.layer = config.heads, layer
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x_BTC: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None) -> Tensor:
        q_BHTD, k_BHTD, v_BHTD = self.qkv(x_BTC).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q_BHTD, k_BHTD = rotate(q_BHTD, cos, sin), rotate(k_BHTD, cos, sin)
        # T new queries see all keys up to their own position: the lower right corner of the causal triangle.
        causal, mask_TS = True, None
        if cache is not None:
            k_BHTD, v_BHTD = cache.extend(self.layer, k_BHTD, v_BHTD)
            causal = cache.length == 0
            queries, keys = q_BHTD.shape[2], k_BHTD.shape[2]
            if not causal and queries > 1:
                mask_TS = torch.ones(queries, keys, dtype=torch.bool, device=x_BTC.device).tril(keys - queries)
        y_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, attn_mask=mask_TS, is_causal=causal)
        y_BTC: Tensor = self.out(y_BHTD.transpose(1, 2).flatten(2))
        return y_BTC


class SwiGLU(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.dim, 2 * config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        gate, up = self.gate_up(x_BTC).chunk(2, dim=-1)
        y_BTC: Tensor = self.down(F.silu(gate) * up)
        return y_BTC


class Block(nn.Module):
    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(config.dim, eps=1e-6), Attention(config, layer)
        self.norm2, self.mlp = nn.RMSNorm(config.dim, eps=1e-6), SwiGLU(config)

    def forward(self, x_BTC: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None = None) -> Tensor:
        x_BTC = x_BTC + self.attention(self.norm1(x_BTC), cos, sin, cache)
        y_BTC: Tensor = x_BTC + self.mlp(self.norm2(x_BTC))
        return y_BTC


class GPT(nn.Module):
    """The model; ``seed`` determines its weights."""

    def __init__(self, config: GPTConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[]):  # keeps the caller's random state
            self.embed = nn.Embedding(config.vocab, config.dim)
            self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
            self.norm = nn.RMSNorm(config.dim, eps=1e-6)
            self.lm_head = nn.Linear(config.dim, config.vocab, bias=False)
        self.reset_parameters(seed)

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Draw normal weights with standard deviation 1 / sqrt(fan in), the same on every device.

        The ``2 * layers`` projections into the residual stream are scaled by ``1 / sqrt(2 * layers)``, which keeps its
        variance. Embeddings have a deviation of 0.5, similar to the output of a block: with much smaller embeddings
        the model learns far more slowly.
        """
        generator = torch.Generator("cpu").manual_seed(seed)
        residual = (2 * self.config.layers) ** -0.5
        for name, weight in self.named_parameters():
            if weight.is_meta:
                continue
            if weight.ndim == 1:
                weight.fill_(1.0)
                continue
            std = {"embed.weight": 0.5, "lm_head.weight": 0.02}.get(name, weight.shape[1] ** -0.5)
            std *= residual if name.endswith(("out.weight", "down.weight")) else 1.0
            weight.copy_(torch.randn(weight.shape, generator=generator, device="cpu") * std)

    def kv_cache(self, rows: int, scheme: str | None = None) -> KVCache:
        """An empty cache for ``rows`` sequences, in the model's dtype or quantized with ``scheme``."""
        if scheme is not None:
            return QuantizedKVCache(self.config, scheme)
        norm = self.norm.weight  # no recipe quantizes it, so it has the model's dtype
        return KVCache(self.config, rows, dtype=norm.dtype, device=norm.device)

    def forward(self, tokens_BT: Tensor, cache: KVCache | None = None) -> Tensor:
        """Logits [B, T, V] of the next token at each position; with ``cache``, tokens are appended to its positions.

        Raises:
            ValueError: There are more positions than ``config.context``.
        """
        start = 0 if cache is None else cache.length
        end = start + tokens_BT.shape[1]
        if end > self.config.context:
            raise ValueError(f"{end} positions exceed the model's context of {self.config.context}; shorten the input")
        positions_T = torch.arange(start, end, device=tokens_BT.device)
        cos, sin = rope(positions_T, self.config.dim // self.config.heads, self.config.rope_base)
        x_BTC = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTC = block(x_BTC, cos, sin, cache)
        if cache is not None:
            cache.length = end
        logits_BTV: Tensor = self.lm_head(self.norm(x_BTC))
        return logits_BTV


@torch.no_grad()
def generate(
    model: GPT,
    prompt_BT: Tensor,
    tokens: int,
    *,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
    kv_cache: str | None = None,
) -> Iterator[Tensor]:
    """Generate tokens, one position at a time.

    Args:
        model: The model.
        prompt_BT: Tokens [B, T].
        tokens: Number of new tokens per sequence.
        temperature: Sampling temperature; 0 is greedy.
        top_k: Number of most likely tokens to sample from.
        seed: Seed of the sampling.
        kv_cache: Scheme of a quantized cache, such as ``"int8:group32"``; None: in the model's dtype.

    Yields:
        The next token of each sequence, [B].

    Raises:
        ValueError: Prompt and new tokens exceed ``model.config.context``, or ``QuantizedRows`` rejects the scheme.
    """
    config, (batch, length) = model.config, prompt_BT.shape
    if length == 0 or length + tokens > config.context:
        raise ValueError(
            f"a prompt of {length} and {tokens} new tokens need 1 to {config.context} positions; shorten one of them"
        )
    generator = torch.Generator(prompt_BT.device).manual_seed(seed)
    cache = model.kv_cache(batch, kv_cache)
    next_BT = prompt_BT
    for _ in range(tokens):
        logits_BV = model(next_BT, cache)[:, -1].float()
        if temperature == 0:
            next_BT = logits_BV.argmax(-1, keepdim=True)
        else:
            best_BK, index_BK = logits_BV.topk(min(top_k, config.vocab))
            chosen_BT = torch.multinomial((best_BK / temperature).softmax(-1), 1, generator=generator)
            next_BT = index_BK.gather(1, chosen_BT)
        yield next_BT[:, 0]
