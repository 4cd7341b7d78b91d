"""The blocks that a model repeats."""

from __future__ import annotations

from torch import nn

__all__ = ["find_blocks"]


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
