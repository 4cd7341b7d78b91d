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

from lowbit.checkpointing.frame import NotReplayed
from lowbit.memory.fake import written
from lowbit.models.ties import storage
from lowbit.torch_private import OpOverload, with_version_of

__all__ = ["kept_products", "looked_at"]

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


class _Kept(NamedTuple):
    """The result of a product. ``out`` is None where it is not kept, or was given. ``watched``: tensors in its memory
    with their versions, of which one that was written into since has another.
    """

    op: Any
    out: Any = None
    watched: tuple[tuple[Tensor, int], ...] = ()

    @classmethod
    def of(cls, op: Any, out: Any) -> _Kept:
        return cls(op, out, tuple((leaf, leaf._version) for leaf in tree_leaves(out) if isinstance(leaf, Tensor)))

    @property
    def serves(self) -> bool:
        return self.out is not None and all(tensor._version == version for tensor, version in self.watched)


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
    return op.__name__.split(".")[0] in _PRODUCTS.get(op.namespace, ()) and not op._schema.is_mutable


@cache
def _dropout(op: Any) -> int | None:
    """Which argument of attention says how much is dropped."""
    names = [argument.name for argument in op._schema.arguments]
    return names.index("dropout_p") if "dropout_p" in names else None


def _draws(op: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call moves the random generator, which what comes after it reads: it has to be made again."""
    place = _dropout(op)
    if place is None:
        return False
    return bool(kwargs.get("dropout_p", args[place] if len(args) > place else 0.0))


@cache
def _is_aside(op: Any) -> bool:
    """Whether an op computes nothing: a question about a tensor, or another name for it."""
    return op.namespace == "prim" or op is torch.ops.aten.detach.default


_looked_at = 0


def looked_at() -> int:
    """How many ops were called within forward contexts in this process."""
    return _looked_at


class _Mode(TorchDispatchMode):
    """``op(args)`` of every op that computes on tensors; compiled code and ops of a higher order go their own way."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, kept: list[_Kept]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept = kept

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return self.called(op, args, kwargs) if isinstance(op, OpOverload) else op(*args, **kwargs)

    def called(self, op: OpOverload, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError


class _Keeping(_Mode):
    """Keeps the results of products, in order, as they were computed: what the module writes into is copied first."""

    def __init__(self, kept: list[_Kept]) -> None:
        super().__init__(kept)
        self._places: dict[int, int] = {}  # of results that nothing was written into, by storage

    def called(self, op: OpOverload, args: Any, kwargs: Any) -> Any:
        global _looked_at
        if op._schema.is_mutable and self._places:
            self._before_writing(written(op, args, kwargs))
        out = op(*args, **kwargs)
        _looked_at += not _is_aside(op)
        if _is_product(op):
            self._keep(op, out, _draws(op, args, kwargs))
        elif op is torch.ops.aten._unsafe_view.default and (place := self._places.get(storage(out))) is not None:
            # What ``linear`` returns of more than two dimensions: the same memory with a version of its own.
            entry, alias = self.kept[place], with_version_of(out)
            self.kept[place] = entry._replace(watched=(*entry.watched, (alias, alias._version)))
        return out

    def _keep(self, op: OpOverload, out: Any, draws: bool) -> None:
        tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if draws or any(tensor.layout is not torch.strided for tensor in tensors):
            self.kept.append(_Kept(op))
            return
        self._places.update((storage(tensor), len(self.kept)) for tensor in tensors)
        self.kept.append(_Kept.of(op, tree_map_only(Tensor, with_version_of, out)))

    def _before_writing(self, into: list[Any]) -> None:
        dense = [tensor for tensor in into if isinstance(tensor, Tensor) and tensor.layout is torch.strided]
        for written_to in {storage(tensor) for tensor in dense} & self._places.keys():
            place = self._places.pop(written_to)
            op, out, _ = self.kept[place]
            self.kept[place] = _Kept.of(op, tree_map_only(Tensor, partial(_copied, written_to), out))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._places.clear()


def _copied(where: int, tensor: Tensor) -> Tensor:
    """A copy of a tensor that lies in the storage ``where``; others as they are."""
    return tensor.clone() if storage(tensor) == where else tensor


class _Giving(_Mode):
    """Answers with what was kept, each result once. One that was written into since, or given, is computed again."""

    def __init__(self, kept: list[_Kept]) -> None:
        super().__init__(kept)
        self._next = 0

    def __enter__(self) -> Any:
        self._next = 0
        return super().__enter__()  # type: ignore[no-untyped-call]

    def called(self, op: OpOverload, args: Any, kwargs: Any) -> Any:
        if not _is_product(op):
            return op(*args, **kwargs)
        place, self._next = self._next, self._next + 1
        known = self.kept[place] if place < len(self.kept) else _Kept(None)
        if known.op is not op:
            raise NotReplayed(
                f"product {place + 1} of a checkpointed module was {known.op} in forward and is {op} in backward; only "
                f"a module that computes the same each time can be checkpointed, so leave this one out of checkpoint_"
            )
        self.kept[place] = _Kept(op)
        return known.out if known.serves else op(*args, **kwargs)
