"""The calls of a model, by torch.fx."""

from __future__ import annotations

from torch import fx, nn

__all__ = ["trace"]


def trace(model: nn.Module, tracer: fx.Tracer) -> fx.Graph:
    """The graph of a model's calls, without the model: nodes are in cycles with their tracer, which holds its root."""
    try:
        return tracer.trace(model)
    finally:
        vars(tracer).clear()
