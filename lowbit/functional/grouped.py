"""Whether one kernel launch can multiply all experts of a mixture of experts. Source: docs/numerics.md section 9."""

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
    """Whether ``scaled_grouped_mm`` is one launch, which needs no synchronization with the host.

    Args:
        device: Device type.
        input: Scheme in which inputs are quantized, or None.
        dtype: dtype of the inputs.
        scheme: Scheme of one expert's weight.
        shape: Shape of one expert's weight.
    """
    return _multiplies_at_once(device, registry.forced(), input, dtype, scheme, shape)


@lru_cache(maxsize=256)
def _multiplies_at_once(
    device: str, backend: str | None, input: str | None, dtype: torch.dtype, scheme: Scheme, shape: tuple[int, int]
) -> bool:
    w = quantize(torch.empty(shape, device="meta"), scheme)
    x = torch.empty((1, shape[1]), dtype=dtype, device="meta")
    call = Linear(x, w.codes, scheme.name, w.scale, w.zero_point, w.global_scale, None, input, dtype)
    impls = registry.candidates("linear", device)
    return any(impl.backend == "triton" and impl.supports(call) is None for impl in impls)
