"""QuantEmbedding: lookup from a quantized table; only the rows that are asked for are decoded."""

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
    """``nn.Embedding`` on a quantized table: ids, integers of any shape ``[...]``, give rows ``[..., embedding_dim]``.

    ``self.linear`` has the table, as the weight ``[num_embeddings, embedding_dim]`` of a QuantLinear: an output layer
    that is tied to the embedding has the very codes. Rows are in the dtype of the weight, with the bits of
    ``weight.dequantize()[ids]``; they have no gradient. What a recipe says of inputs has no meaning here.
    Raises IndexError for ids outside of the table, TypeError for ids that are no integers; ValueError for a table with
    scales that several rows share.
    """

    @property
    def lowbit_kind(self) -> str:
        """Quantized, or what its table is trained to be."""
        return str(kind(self.linear))

    def __init__(self, like: nn.Embedding, linear: QuantLinear) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = like.num_embeddings, like.embedding_dim
        self.padding_idx = like.padding_idx
        self.recipe = linear.recipe
        if kind(linear) != "quantized":
            raise ValueError("an embedding is quantized by rounding alone; leave it out of this recipe")
        if linear.scheme.block[0] not in (1, None):
            raise ValueError(
                f"recipe {self.recipe.name!r}: rows of an embedding's table need scales of their own, and in "
                f"{linear.scheme} rows share them; use for instance int8-weight-only"
            )
        self.linear = linear

    @property
    def weight(self) -> Quantized:
        """The table."""
        return self.linear.weight

    def forward(self, input: Tensor) -> Tensor:
        ids = input
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise TypeError(f"QuantEmbedding: ids must be integers, got {ids.dtype}")
        flat, table, scheme = ids.reshape(-1).long(), self.weight, self.linear.scheme

        def rows(part: Tensor | None, own: bool = True) -> Any:
            return part.index_select(0, flat) if part is not None and own else part

        each = scheme.block[0] == 1
        q = Quantized(
            rows(table.codes), rows(table.scale, each), rows(table.zero_point, each),
            rows(table.global_scale, scheme.global_scale_shape(2)[0] == 2), scheme,
            torch.Size((flat.shape[0], self.embedding_dim)), table.dtype,
        )  # fmt: skip
        if self.linear.rotation is None:
            return q.dequantize().view(*ids.shape, self.embedding_dim)
        plain = hadamard(q.dequantize(torch.float32), self.linear.rotation).to(table.dtype)
        return plain.view(*ids.shape, self.embedding_dim)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, padding_idx={self.padding_idx}"
