"""QuantEmbedding: lookup in a quantized table, which decodes only the requested rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lowbit.functional import hadamard
from lowbit.nn.base import kind
from lowbit.nn.linear import QuantLinear
from lowbit.tensor.quantized import Quantized

__all__ = ["QuantEmbedding"]


class QuantEmbedding(nn.Module):
    """``nn.Embedding`` with a quantized table: integer ids ``[...]`` to rows ``[..., embedding_dim]``.

    ``self.linear`` holds the table as the weight ``[num_embeddings, embedding_dim]`` of a QuantLinear, so a tied output
    layer shares the codes. Rows have the dtype of the weight, are bit-identical to ``weight.dequantize()[ids]``, and
    have no gradient. The recipe's input scheme is ignored.

    Args:
        like: the embedding to replace.
        linear: a QuantLinear with the table as weight.

    Raises:
        ValueError: the table is not quantized, or several of its rows share a scale.
        TypeError: forward got ids that are not integers.
        IndexError: forward got ids outside of the table.
    """

    @property
    def lowbit_kind(self) -> str:
        """The kind of the layer that holds the table."""
        return str(kind(self.linear))

    def __init__(self, like: nn.Embedding, linear: QuantLinear) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = like.num_embeddings, like.embedding_dim
        self.padding_idx = like.padding_idx
        self.recipe = linear.recipe
        if kind(linear) != "quantized":
            raise ValueError("an embedding is quantized by rounding alone; exclude it from this recipe")
        if self.recipe.reordered:
            raise ValueError("the columns of an embedding have one order; exclude it from this recipe")
        if linear.scheme.block[0] not in (1, None):
            raise ValueError(
                f"recipe {self.recipe.name!r}: expected a scheme in which each row of an embedding has its own scales, "
                f"got {linear.scheme}; use for instance int8-weight-only"
            )
        self.linear = linear

    @property
    def weight(self) -> Quantized:
        return self.linear.weight

    def forward(self, input: Tensor) -> Tensor:
        ids = input
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise TypeError(f"QuantEmbedding: ids must be integers, got {ids.dtype}")
        flat, table, scheme = ids.reshape(-1).long(), self.weight, self.linear.scheme

        def rows(part: Tensor | None, per_row: bool = True) -> Any:
            return part.index_select(0, flat) if part is not None and per_row else part

        each = scheme.block[0] == 1
        q = Quantized(
            rows(table.codes), rows(table.scale, each), rows(table.zero_point, each),
            rows(table.global_scale, scheme.global_scale_shape(2, 1)[0] == 2), scheme,
            torch.Size((flat.shape[0], self.embedding_dim)), table.dtype,
        )  # fmt: skip
        if self.linear.rotation is None:
            return q.dequantize().view(*ids.shape, self.embedding_dim)
        plain = hadamard(q.dequantize(torch.float32), self.linear.rotation).to(table.dtype)
        return plain.view(*ids.shape, self.embedding_dim)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, padding_idx={self.padding_idx}"
