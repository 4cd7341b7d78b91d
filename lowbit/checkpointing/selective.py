"""Selective checkpointing: save the results of matmuls, convolutions and attention, and recompute the cheap ops.

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

#: Ops with saved results, by namespace and name. Ops that this version of torch or lowbit lacks have no effect.
_PRODUCTS = {
    "aten": (
        "mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "convolution",
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    ),
    "lowbit": ("scaled_mm", "scaled_grouped_mm", "linear", "linear_packed", "conv"),
}  # fmt: skip


class _Saved(NamedTuple):
    """The result of a matmul.

    Attributes:
        op: The op.
        out: Its result; None if it is not saved or was used already.
        watched: Tensors in its memory with their versions, which change if the result is written to.
    """

    op: Any
    out: Any = None
    watched: tuple[tuple[Tensor, int], ...] = ()

    @classmethod
    def of(cls, op: Any, out: Any) -> _Saved:
        return cls(op, out, tuple((leaf, leaf._version) for leaf in tree_leaves(out) if isinstance(leaf, Tensor)))

    @property
    def is_usable(self) -> bool:
        return self.out is not None and all(tensor._version == version for tensor, version in self.watched)


def kept_products() -> tuple[Any, Any]:
    """Return the contexts of one call, in forward and in backward, that save matmuls, convolutions and attention."""
    if torch.compiler.is_compiling():  # the partitioner needs the marks of torch's contexts
        contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(_policy)
        return contexts
    saved: list[_Saved] = []
    return _Saving(saved), _Replaying(saved)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_product(op) else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def _is_product(op: Any) -> bool:
    return op.__name__.split(".")[0] in _PRODUCTS.get(op.namespace, ()) and not op._schema.is_mutable


@cache
def _dropout(op: Any) -> int | None:
    """Return the index of the dropout argument of an attention op, or None."""
    names = [argument.name for argument in op._schema.arguments]
    return names.index("dropout_p") if "dropout_p" in names else None


def _draws(op: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a call advances the random generator, so that it must be recomputed."""
    index = _dropout(op)
    if index is None:
        return False
    return bool(kwargs.get("dropout_p", args[index] if len(args) > index else 0.0))


@cache
def _is_aside(op: Any) -> bool:
    """Return whether an op computes nothing: a query about a tensor, or an alias."""
    return op.namespace == "prim" or op is torch.ops.aten.detach.default


_looked_at = 0


def looked_at() -> int:
    """Return how many ops were called within forward contexts in this process."""
    return _looked_at


class _Mode(TorchDispatchMode):
    """Calls ``called`` for every op on tensors. Compiled code and higher-order ops are passed on."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, saved: list[_Saved]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.saved = saved

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return self.called(op, args, kwargs) if isinstance(op, OpOverload) else op(*args, **kwargs)

    def called(self, op: OpOverload, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError


class _Saving(_Mode):
    """Saves the results of matmuls, in order. A result that the module is about to write to is copied first."""

    def __init__(self, saved: list[_Saved]) -> None:
        super().__init__(saved)
        self._indices: dict[int, int] = {}  # indices of unmodified results, by storage

    def called(self, op: OpOverload, args: Any, kwargs: Any) -> Any:
        global _looked_at
        if op._schema.is_mutable and self._indices:
            self._before_writing(written(op, args, kwargs))
        out = op(*args, **kwargs)
        _looked_at += not _is_aside(op)
        if _is_product(op):
            self._save(op, out, _draws(op, args, kwargs))
        elif op is torch.ops.aten._unsafe_view.default and (index := self._indices.get(storage(out))) is not None:
            # ``linear`` of more than two dimensions returns this: the same memory with its own version.
            entry, alias = self.saved[index], with_version_of(out)
            self.saved[index] = entry._replace(watched=(*entry.watched, (alias, alias._version)))
        return out

    def _save(self, op: OpOverload, out: Any, draws: bool) -> None:
        tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if draws or any(tensor.layout is not torch.strided for tensor in tensors):
            self.saved.append(_Saved(op))
            return
        self._indices.update((storage(tensor), len(self.saved)) for tensor in tensors)
        self.saved.append(_Saved.of(op, tree_map_only(Tensor, with_version_of, out)))

    def _before_writing(self, targets: list[Any]) -> None:
        dense = [tensor for tensor in targets if isinstance(tensor, Tensor) and tensor.layout is torch.strided]
        for written_to in {storage(tensor) for tensor in dense} & self._indices.keys():
            index = self._indices.pop(written_to)
            op, out, _ = self.saved[index]
            self.saved[index] = _Saved.of(op, tree_map_only(Tensor, partial(_copy_if_in, written_to), out))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._indices.clear()


def _copy_if_in(where: int, tensor: Tensor) -> Tensor:
    """Return a copy of a tensor in storage ``where``; other tensors are returned as they are."""
    return tensor.clone() if storage(tensor) == where else tensor


class _Replaying(_Mode):
    """Returns each saved result once. Results that were written to or already returned are computed again."""

    def __init__(self, saved: list[_Saved]) -> None:
        super().__init__(saved)
        self._next = 0

    def __enter__(self) -> Any:
        self._next = 0
        return super().__enter__()  # type: ignore[no-untyped-call]

    def called(self, op: OpOverload, args: Any, kwargs: Any) -> Any:
        if not _is_product(op):
            return op(*args, **kwargs)
        index, self._next = self._next, self._next + 1
        entry = self.saved[index] if index < len(self.saved) else _Saved(None)
        if entry.op is not op:
            raise NotReplayed(
                f"product {index + 1} of a checkpointed module was {entry.op} in forward and is {op} in backward; only "
                f"a module that computes the same each time can be checkpointed, so leave this one out of checkpoint_"
            )
        self.saved[index] = _Saved(op)
        return entry.out if entry.is_usable else op(*args, **kwargs)
