"""Wrappers of a model whose parameters are replicated: torch's two, and the base class of lowbit's own."""

from __future__ import annotations

from torch import nn

__all__ = ["Replicas", "is_replicating"]


class Replicas(nn.Module):
    """A wrapper that calls ``module`` on this process' batch, and reduces gradients over processes."""

    module: nn.Module


def is_replicating(model: nn.Module) -> bool:
    """Whether this is DistributedDataParallel, DataParallel or ``Replicas``, with the model in ``module``."""
    return isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel | Replicas)
