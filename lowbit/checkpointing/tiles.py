"""``tile_`` and ``untile_``: the feed-forward parts of a model run on a few tokens at a time.

In a feed-forward part, every token is computed on its own. With many tokens its inner activations are the largest
tensors of a step. A tile at a time, only those of one tile exist; backward recomputes them.

Source: Bekman et al., "Arctic Long Sequence Training", arXiv 2506.13996.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lowbit.checkpointing.parts import BlockFunction
from lowbit.checkpointing.policies import choose
from lowbit.checkpointing.segment import Recomputed, Segment
from lowbit.memory.kept import Kept
from lowbit.models.check import check_model
from lowbit.models.wrap import Wrapper, unwrap_all, wrap
from lowbit.report import Report, report_on
from lowbit.torch_private import is_fake

__all__ = ["tile_", "untile_"]

#: The method of torch's encoder and decoder layers that computes their feed-forward part.
_METHOD = "_ff_block"

#: Tokens on which a module is checked, and the tolerance for another order of sums.
_CHECKED, _TOLERANCE = 8, 1e-2


def tile_(
    model: nn.Module,
    rows: int = 2048,
    modules: Any = "mlp",
    *,
    batch: Any = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
) -> Report:
    """Run the feed-forward parts of ``model`` on ``rows`` tokens at a time, in place.

    Backward recomputes each tile, as with ``checkpoint_(model, "mlp")``, so only the inner activations of one tile
    exist at a time. Gradients equal those of the plain model up to the order of sums over tokens. Up to ``rows``
    tokens, a module runs as before. Dropout draws other random numbers. A recipe with one scale per tensor of
    activations has one per tile.

    At its first call, each module is checked on a few tokens: the result of a token must not depend on others.

    Args:
        model: The model.
        rows: Tokens per tile.
        modules: The modules to tile, as a policy of ``checkpoint_``. Each takes and returns one tensor
            ``[..., features]``. By default the feed-forward part of each block, also that of torch's encoder and
            decoder layers.
        batch: An example batch, as for ``lb.estimate``. With it, the report has the estimated bytes saved for backward
            before and after.
        loss: A function of output and batch, as for ``lb.estimate``.

    Returns:
        A report of the modules. ``untile_`` restores them.

    Raises:
        ValueError: ``rows`` is not positive, or nothing can be tiled. ``model`` is unchanged.
        TypeError: As ``checkpoint_``.
    """
    check_model(model)
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        raise ValueError(f"memory.tile_: rows is a number of tokens from 1, got {rows!r}")
    names = {id(module): name for name, module in model.named_modules()}
    parts = [_part_of(model, group.modules) for group in choose(model, modules)]
    activations = Kept(model, batch, loss)
    untile_(model)
    for module, is_method in parts:
        tiles = _Tiles(Recomputed(names[id(module)], Segment(1)), rows)
        if is_method:
            vars(module)[_METHOD] = _TiledMethod(getattr(module, _METHOD), tiles)
        else:
            wrap(module, _Tiled(tiles))
    layers = {names[id(module)]: module for module, _ in parts}
    return activations.told(report_on("memory.tile_", model, layers, f"in tiles of {rows} tokens"))


def untile_(model: nn.Module) -> Report:
    """Undo ``tile_``, in place.

    Args:
        model: A model with or without tiled modules.

    Returns:
        A report of the modules that were restored.
    """
    check_model(model)
    restored = {path: model.get_submodule(path) for path, _ in unwrap_all(model, "memory.untile_", _Tiled)}
    for path, module in model.named_modules():
        if isinstance(vars(module).get(_METHOD), _TiledMethod):
            del vars(module)[_METHOD]
            restored[path] = module
    return report_on("memory.untile_", model, restored, "restored")


def _part_of(model: nn.Module, modules: Sequence[nn.Module | BlockFunction]) -> tuple[nn.Module, bool]:
    """Return the module to tile, and whether it is a block of which only the method for this part is tiled."""
    first = modules[0]
    if len(modules) == 1 and isinstance(first, nn.Module):
        return first, False
    children = {id(part) for part in modules}
    for block in model.modules():
        if callable(getattr(block, _METHOD, None)) and children & set(map(id, block.children())):
            return block, True
    raise ValueError(
        f"memory.tile_: expected feed-forward parts that are one module each, got {len(modules)} modules that a block "
        f"of {type(model).__name__} calls one by one; move them into a module, or pass others as modules="
    )


@dataclass(eq=False)
class _Tiles:
    """Calls a function of tokens ``[..., features]`` on ``rows`` of them at a time."""

    recomputed: Recomputed
    rows: int
    is_checked: bool = False

    def __call__(self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        hidden = args[0] if args else next(iter(kwargs.values()), None)
        if not isinstance(hidden, Tensor) or hidden.dim() < 2 or len(tree_leaves((args, kwargs))) > 1:
            raise ValueError(
                f"{self._who}: expected one tensor [..., features] as its argument, got "
                f"{[type(leaf).__name__ for leaf in tree_leaves((args, kwargs))]}; leave the module out of modules="
            )
        if hidden.shape[:-1].numel() <= self.rows:
            return forward(*args, **kwargs)
        of_tokens = forward if args else partial(_by_name, forward, next(iter(kwargs)))
        tokens = hidden.reshape(*[1] * (hidden.dim() - 2), -1, hidden.shape[-1])
        self._check(module, of_tokens, tokens)
        results = [self.recomputed(module, of_tokens, tile) for tile in tokens.split(self.rows, -2)]
        return torch.cat(results, -2).view(*hidden.shape[:-1], -1)

    @property
    def _who(self) -> str:
        return f"memory.tile_: {self.recomputed.path!r}"

    def _check(self, module: nn.Module, forward: Callable[[Tensor], Any], tokens: Tensor) -> None:
        """Raise ValueError if a module does not return one tensor, or if the result of a token depends on others."""
        if self.is_checked or torch.compiler.is_compiling() or is_fake(tokens) or tokens.is_meta:
            return
        few = tokens[..., :_CHECKED, :].detach()
        with torch.no_grad(), _in_eval(module):
            together = forward(few)
            if not isinstance(together, Tensor) or together.shape[:-1] != few.shape[:-1]:
                got = list(together.shape) if isinstance(together, Tensor) else type(together).__name__
                raise ValueError(
                    f"{self._who}: expected a result [..., features] for {list(few.shape)}, got {got}; leave the "
                    f"module out of modules="
                )
            half = few.shape[-2] // 2
            apart = torch.cat([forward(few[..., :half, :]), forward(few[..., half:, :])], -2)
        if not (together - apart).abs().max() <= _TOLERANCE * together.abs().max():
            raise ValueError(
                f"{self._who}: the result of a token depends on other tokens, so it cannot be computed in tiles; leave "
                f"the module out of modules="
            )
        self.is_checked = True


def _by_name(forward: Callable[..., Any], name: str, hidden: Tensor) -> Any:
    return forward(**{name: hidden})


@contextmanager
def _in_eval(module: nn.Module) -> Iterator[None]:
    """Context in which a module is in evaluation mode."""
    training = [inner for inner in module.modules() if inner.training]
    try:
        for inner in training:
            inner.training = False
        yield
    finally:
        for inner in training:
            inner.training = True


@dataclass(eq=False)
class _Tiled(Wrapper):
    """Wrapper of a module that runs in tiles."""

    tiles: _Tiles
    prefix = "Tiled"

    def __call__(self, module: nn.Module, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        return self.tiles(module, forward, args, kwargs)


@dataclass(eq=False)
class _TiledMethod:
    """A method of a block that runs in tiles, in place of the method."""

    method: Any
    tiles: _Tiles

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.tiles(self.method.__self__, self.method, args, kwargs)
