"""QuantizedRows: keys or values of attention, quantized as they are appended.

Source: KIVI, arXiv 2402.02750, but with scales per row for keys and for values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowbit.functional.quantizers import quantize
from lowbit.scaling import Scheme
from lowbit.scaling import scheme as find_scheme
from lowbit.tensor.quantized import Quantized

__all__ = ["QuantizedRows"]


#: A full buffer grows by this share, so a row is copied a constant number of times on average.
_GROWTH = 0.25


class QuantizedRows:
    """Rows ``[..., S, D]`` that grow along S. Each row is quantized once, when it is appended.

    Args:
        scheme: a scheme with scales per row or per group within a row, such as ``"int8:row"``, ``"int4:group32"``,
            ``"fp8_e4m3:group32"``, ``"nf4"``.
        scale: static scales of a scheme per row, such as ``"fp8_e4m3:row"``, in any shape that broadcasts to
            ``[..., S, 1]`` with one scale along S. Scales of rows are then not stored.

    Raises:
        ValueError: several rows share a scale in ``scheme``, or ``scale`` needs another scheme.
    """

    def __init__(self, scheme: Scheme | str, scale: Tensor | None = None) -> None:
        self.scheme, self.static = find_scheme(scheme), scale
        if self.scheme.block[0] != 1 or (self.scheme.global_scale and self.scheme.global_scale_shape(2, 1)[0] != 2):
            raise ValueError(
                f"QuantizedRows: expected a scheme in which each row has its own scales, got {self.scheme}; use for "
                f"instance int8:row, int4:group32 or fp8_e4m3:group32"
            )
        if scale is not None and (self.scheme.block[1] is not None or self.scheme.affine or self.scheme.global_scale):
            raise ValueError(f"QuantizedRows: static scales are per row, as in fp8_e4m3:row, got {self.scheme}")
        self.length = 0
        self._buffers: dict[str, Tensor] = {}  # [capacity, ..., *]
        self._dtype = torch.float32
        self._width = 0

    def append(self, x: Tensor) -> None:
        """Append rows.

        Args:
            x: ``[..., T, D]``; T may be 0.

        Raises:
            ValueError: the shape does not fit the existing rows.
        """
        shape = self.shape
        if x.dim() < 2 or (self.length and (*x.shape[:-2], x.shape[-1]) != (*shape[:-2], shape[-1])):
            expected = f"like the existing {list(shape)} except for S" if self.length else "[..., T, D]"
            raise ValueError(f"QuantizedRows: expected rows {expected}, got {list(x.shape)}")
        scale = None if self.static is None else self._of_rows(x.shape).reshape(-1, 1).to(x.device)
        q, end = quantize(x, self.scheme, scale), self.length + x.shape[-2]
        for name, part in q.parts.items() if scale is None else [("codes", q.codes)]:
            rows = part.reshape(*x.shape[:-1], part.shape[-1]).movedim(-2, 0)
            self._reserve(name, rows, end)
            self._buffers[name][self.length : end] = rows
        self.length, self._dtype, self._width = end, x.dtype, x.shape[-1]

    def _of_rows(self, shape: torch.Size) -> Tensor:
        """The static scale of each row, fp32 ``[..., S]``."""
        assert self.static is not None
        return self.static.float().expand(*shape[:-1], 1)[..., 0]

    def _reserve(self, name: str, rows: Tensor, length: int) -> None:
        """Grow the buffer to at least ``length`` rows like ``rows``."""
        old = self._buffers.get(name) if self.length else None
        if old is not None and len(old) >= length:
            return
        capacity = length if old is None else max(length, int((1 + _GROWTH) * self.length))
        self._buffers[name] = rows.new_empty(capacity, *rows.shape[1:])
        if old is not None:
            self._buffers[name][: self.length] = old[: self.length]

    @property
    def shape(self) -> torch.Size:
        """Shape of all rows, ``[..., S, D]``; ``[0, 0]`` before the first ``append``."""
        codes = self._buffers.get("codes")
        return torch.Size((0, 0) if codes is None else (*codes.shape[1:-1], self.length, self._width))

    def read(self) -> Tensor:
        """Decode all rows: ``[..., S, D]`` in the dtype that was appended, S outermost in memory.

        Raises:
            RuntimeError: nothing was appended yet.
        """
        if not self._buffers:
            raise RuntimeError("QuantizedRows: nothing was appended yet; call append before read")
        codes = self._buffers["codes"][: self.length]
        scale, zero_point, global_scale = map(self._scales, ("scale", "zero_point", "global_scale"))
        if self.static is not None:
            scale = self._of_rows(self.shape).movedim(-1, 0).reshape(-1, 1).to(codes.device)
        assert scale is not None
        shape = torch.Size((*codes.shape[:-1], self._width))
        q = Quantized(codes, scale, zero_point, global_scale, self.scheme, shape, self._dtype)
        return q.dequantize().movedim(0, -2)

    def _scales(self, name: str) -> Tensor | None:
        buffer = self._buffers.get(name)
        return None if buffer is None else buffer[: self.length].flatten(0, -2)

    def crop(self, length: int) -> None:
        """Drop all but the first ``length`` rows."""
        self.length = min(self.length, length)

    def select(self, index: Tensor) -> None:
        """Select entries of the first axis, the batch, in the order of ``index``."""
        self._buffers = {name: part.index_select(1, index.to(part.device)) for name, part in self._buffers.items()}

    def to(self, *args: Any, **kwargs: Any) -> QuantizedRows:
        """Move codes and scales, in place."""
        self._buffers = {name: part.to(*args, **kwargs) for name, part in self._buffers.items()}
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales, including reserved rows."""
        return sum(part.nbytes for part in self._buffers.values())
