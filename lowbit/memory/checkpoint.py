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

from lowbit.autograd import backend_now, on_backend
from lowbit.convert.engine import report_on
from lowbit.convert.report import Report
from lowbit.convert.select import check_model
from lowbit.models.blocks import find_blocks

__all__ = ["checkpoint_blocks_"]


def checkpoint_blocks_(model: nn.Module, blocks: Iterable[nn.Module] | None = None) -> Report:
    """Checkpoint each block of ``model`` in place (``blocks``, or those that ``find_blocks`` finds), and report
    them.

    Backward recomputes a block with the same autocast, random state and backend (``use_backend``; inside torch.compile
    each call chooses its backend anew), so losses and gradients keep their bits.
    Without gradients nothing changes. Parameter names stay as they are; a block already checkpointed is left alone.
    Blocks may be converted before or after (``quantize_``, ``train.prepare_``, ``train.convert_``): one that is a layer
    itself runs what its class computes at the time of the call, or the forward that it was given for itself.

    Raises: ValueError when no blocks are found, and for blocks that are not of ``model``; TypeError for what is no
    module, before any block is changed.
    """
    check_model(model)
    chosen = find_blocks(model) if blocks is None else list(blocks)
    if blocks is None and not chosen:
        raise ValueError(
            f"{type(model).__name__} has no ModuleList or Sequential of two or more modules of one class; "
            f"pass blocks=[...] to say what to checkpoint"
        )
    names = {id(module): name for name, module in model.named_modules()}
    for block in chosen:
        if not isinstance(block, nn.Module):
            raise TypeError(
                f"memory.checkpoint_blocks_: blocks are modules, got {type(block).__name__} {block!r}; write for "
                f"instance blocks=model.layers, or model.get_submodule(name)"
            )
        if id(block) not in names:
            raise ValueError(
                f"memory.checkpoint_blocks_: a {type(block).__name__} of blocks is no module of the model; take blocks "
                f"from the model that is to be checkpointed"
            )
    for block in chosen:
        own = vars(block).get("forward")
        if own is None:
            block.forward = partial(recomputed, block)  # type: ignore[method-assign]
        elif not (isinstance(own, partial) and own.func in (recomputed, _recomputed)):
            block.forward = partial(_recomputed, own)  # type: ignore[method-assign]
    return report_on("memory.checkpoint_blocks_", model, {names[id(block)]: block for block in chosen}, "checkpointed")


def recomputed(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of ``block``'s class, looked up now."""
    return _recomputed(partial(type(block).forward, block), *args, **kwargs)


#: Conversions may change the class of such a block (lowbit/nn/base.py).
recomputed.lowbit_runs_class_forward = True  # type: ignore[attr-defined]


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
