"""Products of a mixture's experts: whether one launch serves all of them. Source: docs/numerics.md section 9."""

from __future__ import annotations

from functools import lru_cache

import torch

from lowbit.backends import registry
from lowbit.functional.quantizers import quantize
from lowbit.ops.linear import Linear
from lowbit.scaling import Scheme

__all__ = ["multiplies_at_once"]


def multiplies_at_once(
    device: str, input: str | None, dtype: torch.dtype, scheme: Scheme, shape: tuple[int, int]
) -> bool:
    """Whether ``scaled_grouped_mm`` is one launch, for which the host waits for nothing.

    ``device``: its type. ``input``: the scheme that rows of ``dtype`` are quantized in, or None. ``scheme`` and
    ``shape``: those of one expert's weight.
    """
    return _multiplies_at_once(device, registry.forced(), input, dtype, scheme, shape)


@lru_cache(maxsize=256)
def _multiplies_at_once(
    device: str, backend: str | None, input: str | None, dtype: torch.dtype, scheme: Scheme, shape: tuple[int, int]
) -> bool:
    """The same for a backend that is asked for: whether it quantizes and multiplies for one expert."""
    w = quantize(torch.empty(shape, device="meta"), scheme)
    x = torch.empty((1, shape[1]), dtype=dtype, device="meta")
    asked = Linear(x, w.codes, scheme.name, w.scale, w.zero_point, w.global_scale, None, input, dtype)
    rows = registry.candidates("linear", device)
    return any(row.backend == "triton" and row.supports(asked) is None for row in rows)
