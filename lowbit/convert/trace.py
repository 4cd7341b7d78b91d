"""Traces the calls of a model with torch.fx."""

from __future__ import annotations

from torch import fx, nn

__all__ = ["trace"]


def trace(model: nn.Module, tracer: fx.Tracer) -> fx.Graph:
    """Return the graph of a model's calls. The tracer is emptied, because reference cycles would keep the model."""

    try:
        return tracer.trace(model)
    finally:
        vars(tracer).clear()
