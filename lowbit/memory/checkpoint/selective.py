"""Checkpointing that keeps the results of products, and recomputes what is cheap between them.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv 2205.05198.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from lowbit.memory.checkpoint.frame import NotReplayed
from lowbit.memory.fake import written

__all__ = ["Overwritten", "kept_products", "looked_at"]

#: Ops whose results are kept, by namespace and name; those that this torch or this build lacks are passed over.
_PRODUCTS = {
    "aten": (
        "mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "convolution",
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    ),
    "lowbit": ("scaled_mm", "scaled_grouped_mm", "linear", "linear_packed", "conv"),
}  # fmt: skip


class Overwritten(NotReplayed):
    """A result that a checkpoint keeps was written into after the checkpointed module had returned."""


class _Kept(NamedTuple):
    """The result of a product, None once it was given, and the versions of its tensors."""

    op: Any
    out: Any
    versions: tuple[int, ...] = ()

    @classmethod
    def of(cls, op: Any, out: Any) -> _Kept:
        return cls(op, out, _versions(out))


def _versions(out: Any) -> tuple[int, ...]:
    return tuple(leaf._version for leaf in tree_leaves(out) if isinstance(leaf, Tensor))


def kept_products() -> tuple[Any, Any]:
    """The contexts of one call, in forward and in backward: products, convolutions and attention are kept."""
    if torch.compiler.is_compiling():  # whose partitioner reads what torch's contexts note
        contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(_policy)
        return contexts
    kept: list[_Kept] = []
    return _Keeping(kept), _Giving(kept)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_product(op) else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def _is_product(op: Any) -> bool:
    return op.__name__.split(".")[0] in _PRODUCTS.get(op.namespace, ())


@cache
def _is_aside(op: Any) -> bool:
    """Whether an op computes nothing: a question about a tensor, or another name for it."""
    return op.namespace == "prim" or op is torch.ops.aten.detach.default


_looked_at = 0


def looked_at() -> int:
    """How many ops were called within forward contexts in this process."""
    return _looked_at


class _Keeping(TorchDispatchMode):
    """Keeps the results of products, in order, as they were computed: what the module writes into is copied first."""

    def __init__(self, kept: list[_Kept]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept = kept
        self._places: dict[int, int] = {}  # of results that nothing was written into, by storage

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        global _looked_at
        kwargs = kwargs or {}
        if op._schema.is_mutable and self._places:
            self._before_writing(written(op, args, kwargs))
        out = op(*args, **kwargs)
        _looked_at += not _is_aside(op)
        if _is_product(op):
            for tensor in tree_leaves(out):
                if isinstance(tensor, Tensor):
                    self._places[_storage(tensor)] = len(self.kept)
            self.kept.append(_Kept.of(op, tree_map_only(Tensor, _alias, out)))
        return out

    def _before_writing(self, into: list[Any]) -> None:
        for storage in {_storage(tensor) for tensor in into if isinstance(tensor, Tensor)} & self._places.keys():
            place = self._places.pop(storage)
            op, out, _ = self.kept[place]
            self.kept[place] = _Kept.of(op, tree_map_only(Tensor, partial(_copied, storage), out))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._places.clear()


def _alias(tensor: Tensor) -> Tensor:
    """The same numbers and version without a graph, which would hold the frame that holds this."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _copied(storage: int, tensor: Tensor) -> Tensor:
    """A copy of a tensor that lies in a storage; others as they are."""
    return tensor.clone() if _storage(tensor) == storage else tensor


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Giving(TorchDispatchMode):
    """Answers with what was kept, each result once."""

    def __init__(self, kept: list[_Kept]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept, self._next = kept, 0

    def __enter__(self) -> Any:
        self._next = 0
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_product(op):
            return op(*args, **(kwargs or {}))
        place, self._next = self._next, self._next + 1
        known = self.kept[place] if place < len(self.kept) else _Kept(None, None)
        if known.op is not op:
            raise NotReplayed(
                f"product {place + 1} of a checkpointed module was {known.op} in forward and is {op} in backward; only "
                f"a module that computes the same each time can be checkpointed, so leave this one out of checkpoint_"
            )
        if known.out is None:
            raise NotReplayed(
                "backward runs a second time through a module whose products were kept, and they went with the first; "
                'checkpoint it by "block", or call backward once'
            )
        if _versions(known.out) != known.versions:
            raise Overwritten(
                f"the result of {op} in a checkpointed module was written into after the module had returned it, and "
                f'backward needs it; write to a copy, or checkpoint the module by "block"'
            )
        self.kept[place] = _Kept(op, None)
        return known.out
