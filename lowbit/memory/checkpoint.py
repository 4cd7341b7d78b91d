"""Gradient checkpointing of a model's blocks: keep a block's input, compute its inside again in backward.

Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lowbit.nn.linear import backend_now, on_backend

__all__ = ["checkpoint_blocks_", "find_blocks"]


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of ``model``: its largest ``ModuleList`` or ``Sequential`` of modules of one class.

    Raises: ValueError when there is none.
    """

    def weight(blocks: nn.Module) -> int:
        return sum(p.numel() for p in blocks.parameters())

    stacks = [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1 and len({type(b) for b in module}) == 1
    ]
    if not stacks:
        raise ValueError(
            f"{type(model).__name__} has no ModuleList or Sequential of two or more modules of one class; "
            f"pass blocks=[...] to say what to checkpoint"
        )
    return list(max(stacks, key=weight))


def checkpoint_blocks_(model: nn.Module, blocks: Iterable[nn.Module] | None = None) -> int:
    """Checkpoint each block of ``model`` in place (``blocks``, or those that ``find_blocks`` finds); return how many.

    Backward recomputes a block with the same autocast, random state and backend (``use_backend``; inside torch.compile
    each call chooses its backend anew), so losses and gradients keep their bits.
    Without gradients nothing changes. Parameter names stay as they are; a block already checkpointed is left alone.

    Raises: ValueError when no blocks are found.
    """
    found = find_blocks(model) if blocks is None else list(blocks)
    for block in found:
        if not isinstance(block.forward, partial):
            block.forward = partial(_recomputed, block.forward)  # type: ignore[method-assign]
    return len(found)


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if torch.compiler.is_compiling():
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    served = partial(_served, backend_now(), forward)
    return checkpoint(served, *args, use_reentrant=False, **kwargs)


def _served(backend: str | None, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with on_backend(backend):
        return forward(*args, **kwargs)
