"""The transformer of the ladder, in a family of shapes of which one number is the size, and the textbook's sum of its
bytes.

Shapes in names: B sequences, T tokens of each, D the width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["Shape", "Transformer", "batch_of", "first_above", "textbook"]

#: Bytes of a number in fp32.
_FP32 = 4

#: Numbers that backward needs of a block, as multiples of tokens times width: the inputs of two norms (2), of the
#: attention's and the first feed-forward product (2), query, key and value (3), the attention's result (1), the
#: feed-forward layer before and after GELU (8).
_KEPT_BY_BLOCK = 16
#: The same after the blocks: the inputs of the last norm and of the head.
_KEPT_AFTER = 2


@dataclass(frozen=True)
class Shape:
    """A transformer of ``size`` and its batch: layers and width grow together."""

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
        """Tokens of a step."""
        return self.batch * self.context

    @property
    def parameters(self) -> int:
        """Numbers that are trained, with those of norms and biases."""
        d = self.width
        block = 12 * d * d + 13 * d
        return self.layers * block + (self.vocab + self.context) * d + 2 * d + self.vocab * d + self.vocab


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm and added to its input, ``[B, T, D]``."""

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
    """A decoder: tokens int64 ``[B, T]`` to logits ``[B, T, vocab]``."""

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
    """Random tokens and their targets, int64 ``[B, T]`` each."""
    drawn = torch.randint(
        shape.vocab, (shape.batch, shape.context + 1), generator=torch.Generator().manual_seed(seed)
    ).to(device)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def textbook(shape: Shape) -> dict[str, int]:
    """Bytes of a step in fp32 by kind: parameters 4P, gradients 4P, states of Adam 8P, and what backward needs of the
    forward: activations of the blocks, inputs of the last norm and of the head, and the softmax of the logits.

    They sum to more than a step holds at a time, because backward gives activations up as it makes gradients.
    """
    weights = _FP32 * shape.parameters
    widths = _KEPT_BY_BLOCK * shape.layers + _KEPT_AFTER
    return {
        "parameters": weights,
        "gradients": weights,
        "states": 2 * weights,
        "activations": _FP32 * shape.tokens * (widths * shape.width + shape.vocab),
    }


def first_above(budget: int, factor: float = 1.5) -> Shape:
    """The smallest shape whose textbook sum is ``factor`` times ``budget`` bytes at least.

    Raises ValueError where that is the smallest of all, with which no technique would have anything to save.
    """
    size = 1
    while sum(textbook(Shape(size)).values()) < factor * budget:
        size += 1
    if size == 1:
        raise ValueError(
            f"the ladder needs a budget that its smallest transformer does not exceed, of "
            f"{sum(textbook(Shape(1)).values()) >> 20} MiB or more, got {budget} bytes; give more"
        )
    return Shape(size)
