"""The transformer of the ladder, a family of shapes with one size parameter, and the textbook sum of its bytes.

Shapes in names: B sequences, T tokens, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["Shape", "Transformer", "batch_of", "first_above", "textbook"]

_FP32 = 4

#: Elements that a block saves for backward, in units of tokens times width: inputs of two norms (2), of the attention's
#: and the first feed-forward matmul (2), query, key and value (3), the attention's output (1), and GELU's input and
#: output (8).
_SAVED_BY_BLOCK = 16
#: The same after the blocks: inputs of the last norm and of the head.
_SAVED_AFTER = 2


@dataclass(frozen=True)
class Shape:
    """A transformer and its batch. Layers and width are proportional to ``size``."""

    size: int
    batch: int = 12
    context: int = 128
    vocab: int = 1024

    @property
    def layers(self) -> int:
        return 2 * self.size

    @property
    def width(self) -> int:
        return 32 * self.size

    @property
    def heads(self) -> int:
        return self.size

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.batch * self.context

    @property
    def parameters(self) -> int:
        """Number of trained elements, norms and biases included."""
        d = self.width
        block = 12 * d * d + 13 * d
        return self.layers * block + (self.vocab + self.context) * d + 2 * d + self.vocab * d + self.vocab


class Block(nn.Module):
    """A pre-norm transformer block, ``[B, T, D]``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_BTD: Tensor, hidden_TT: Tensor) -> Tensor:
        y_BTD = self.norm1(x_BTD)
        x_BTD = x_BTD + self.attention(y_BTD, y_BTD, y_BTD, attn_mask=hidden_TT, need_weights=False, is_causal=True)[0]
        result: Tensor = x_BTD + self.mlp(self.norm2(x_BTD))
        return result


class Transformer(nn.Module):
    """A decoder from int64 tokens ``[B, T]`` to logits ``[B, T, vocab]``."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        length, device = tokens_BT.shape[1], tokens_BT.device
        hidden_TT = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
        x_BTD = self.tokens(tokens_BT) + self.positions(torch.arange(length, device=device))
        for block in self.blocks:
            x_BTD = block(x_BTD, hidden_TT)
        logits: Tensor = self.head(self.norm(x_BTD))
        return logits


def batch_of(shape: Shape, device: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return random tokens and their targets, int64 ``[B, T]`` each."""
    drawn = torch.randint(
        shape.vocab, (shape.batch, shape.context + 1), generator=torch.Generator().manual_seed(seed)
    ).to(device)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def textbook(shape: Shape) -> dict[str, int]:
    """Return the bytes of a step in fp32 by kind: parameters 4P, gradients 4P, Adam states 8P, and saved activations.

    Activations are those of the blocks, inputs of the last norm and of the head, and the softmax of the logits. The sum
    is larger than the peak, because backward frees activations as it creates gradients.
    """
    weights = _FP32 * shape.parameters
    widths = _SAVED_BY_BLOCK * shape.layers + _SAVED_AFTER
    return {
        "parameters": weights,
        "gradients": weights,
        "states": 2 * weights,
        "activations": _FP32 * shape.tokens * (widths * shape.width + shape.vocab),
    }


def first_above(budget: int, factor: float = 1.5) -> Shape:
    """Return the smallest shape whose textbook sum is at least ``factor`` times ``budget`` bytes.

    Raises:
        ValueError: If that is the smallest shape of all, for which techniques have nothing to save.
    """
    size = 1
    while sum(textbook(Shape(size)).values()) < factor * budget:
        size += 1
    if size == 1:
        raise ValueError(
            f"ladder: expected a budget of at least {sum(textbook(Shape(1)).values()) >> 20} MiB, the need of its "
            f"smallest transformer, got {budget} bytes; pass a larger one"
        )
    return Shape(size)
