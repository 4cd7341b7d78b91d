"""Keys and values of attention, quantized as they are appended. Source: KIVI, arXiv 2402.02750, with rows for both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowbit.functional.quantize import quantize
from lowbit.scaling import Scheme
from lowbit.scaling import scheme as find_scheme
from lowbit.tensor.quantized import Quantized

__all__ = ["QuantizedRows"]


class QuantizedRows:
    """Rows ``[..., S, D]`` that grow along S: a row is quantized when it is appended, and its codes never change.

    ``scheme``: one with scales for rows or for groups within them, such as ``"int8:row"``, ``"int4:group32"``,
    ``"fp8_e4m3:group32"``, ``"nf4"``. Raises ValueError for one with scales that several rows share.
    """

    def __init__(self, scheme: Scheme | str) -> None:
        self.scheme = find_scheme(scheme)
        if self.scheme.block[0] != 1 or (self.scheme.global_scale and self.scheme.global_scale_shape(2)[0] != 2):
            raise ValueError(
                f"rows that are appended need scales of their own, and in {self.scheme} rows share them; use for "
                f"instance int8:row, int4:group32 or fp8_e4m3:group32"
            )
        self.length = 0
        self._parts: dict[str, Tensor] = {}  # [..., S, *]
        self._dtype = torch.float32
        self._width = 0

    def append(self, x: Tensor) -> None:
        """Add rows ``x [..., T, D]`` behind those that are there; T may be 0.

        Raises ValueError for rows of another shape than those that are there.
        """
        there = self.shape
        if x.dim() < 2 or (self.length and (*x.shape[:-2], x.shape[-1]) != (*there[:-2], there[-1])):
            expected = f"of the shape {list(there)} that is there, but for S" if self.length else "[..., T, D]"
            raise ValueError(f"QuantizedRows: expected rows {expected}, got {list(x.shape)}")
        q = quantize(x, self.scheme)
        parts = {name: part.reshape(*x.shape[:-1], part.shape[-1]) for name, part in q.parts.items()}
        if self.length:
            parts = {name: torch.cat([self._parts[name], part], -2) for name, part in parts.items()}
        self._parts, self._dtype, self._width = parts, x.dtype, x.shape[-1]
        self.length += x.shape[-2]

    @property
    def shape(self) -> torch.Size:
        """That of all rows, ``[..., S, D]``; ``[0, 0]`` before the first ``append``."""
        codes = self._parts.get("codes", torch.empty(0, 0))
        return torch.Size((*codes.shape[:-1], self._width))

    def read(self) -> Tensor:
        """All rows, decoded: ``[..., S, D]`` in the dtype that was appended.

        Raises RuntimeError before the first ``append``.
        """
        if not self._parts:
            raise RuntimeError("QuantizedRows: nothing was appended yet, so that there is nothing to read")
        scales = {name: part.flatten(0, -2) for name, part in self._parts.items() if name != "codes"}
        q = Quantized(
            self._parts["codes"], scales["scale"], scales.get("zero_point"), scales.get("global_scale"), self.scheme,
            self.shape, self._dtype,
        )  # fmt: skip
        return q.dequantize()

    def crop(self, length: int) -> None:
        """Forget all but the first ``length`` rows."""
        self._parts = {name: part[..., :length, :].contiguous() for name, part in self._parts.items()}
        self.length = min(self.length, length)

    def select(self, index: Tensor) -> None:
        """Take these of the first axis, which is the batch, in this order."""
        self._parts = {name: part.index_select(0, index.to(part.device)) for name, part in self._parts.items()}

    def to(self, *args: Any, **kwargs: Any) -> QuantizedRows:
        """Move the codes and scales, in place."""
        self._parts = {name: part.to(*args, **kwargs) for name, part in self._parts.items()}
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(part.nbytes for part in self._parts.values())
