"""Counter of the calls and bytes that this process sends in collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lowbit.sizes import amount
from lowbit.tables import aligned

__all__ = ["Traffic", "traffic"]

#: By c10d op: the collective, and the minimum bytes that each of ``n`` processes sends for a largest argument of
#: ``size`` bytes.
#: Source: Rabenseifner, "Optimization of Collective Reduction Operations", 2004.
_SENT: dict[str, tuple[str, Callable[[int, int], float]]] = {
    "allreduce_": ("all-reduce", lambda size, n: 2 * size * (n - 1) / n),
    "allgather_": ("all-gather", lambda size, n: size * (n - 1) / n),
    "_allgather_base_": ("all-gather", lambda size, n: size * (n - 1) / n),
    "allgather_into_tensor_coalesced_": ("all-gather", lambda size, n: size * (n - 1) / n),
    "reduce_scatter_": ("reduce-scatter", lambda size, n: size * (n - 1) / n),
    "_reduce_scatter_base_": ("reduce-scatter", lambda size, n: size * (n - 1) / n),
    "alltoall_base_": ("all-to-all", lambda size, n: size * (n - 1) / n),
    "alltoall_": ("all-to-all", lambda size, n: size * (n - 1) / n),
    "broadcast_": ("broadcast", lambda size, n: size * (n - 1) / n),
    "reduce_": ("reduce", lambda size, n: size * (n - 1) / n),
    "send": ("send", lambda size, n: size),
}


class Traffic(TorchDispatchMode):
    """The result of ``traffic``.

    Attributes:
        calls: Number of calls, by collective.
        bytes: Bytes that this process has sent, by collective.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[str, int] = {}
        self.bytes: dict[str, int] = {}

    @property
    def total(self) -> int:
        """Bytes that this process has sent in all collectives."""
        return sum(self.bytes.values())

    def __str__(self) -> str:
        rows = [
            ("collective", "calls", "sent"),
            *((op, str(self.calls[op]), amount(self.bytes[op])) for op in self.calls),
        ]
        return aligned(rows, (1, 2))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._count(func._schema.name.partition("::")[2], args)
        return func(*args, **(kwargs or {}))

    def _count(self, op: str, args: Any) -> None:
        if op not in _SENT:
            return
        name, sent = _SENT[op]
        size = max(sum(t.nbytes for t in tree_leaves(arg) if isinstance(t, Tensor)) for arg in args)
        group = next(arg for arg in args if isinstance(arg, torch.ScriptObject) and str(arg._type()).endswith("Group"))
        n = dist.ProcessGroup.unbox(group).size()
        self.calls[name] = self.calls.get(name, 0) + 1
        self.bytes[name] = self.bytes.get(name, 0) + int(sent(size, n))


@contextmanager
def traffic() -> Iterator[Traffic]:
    """A context that counts the bytes this process sends in collectives of ``torch.distributed``.

    The count assumes the algorithm that sends least. With ``n`` processes, an all-reduce of ``size`` bytes sends
    ``2 * size * (n - 1) / n`` bytes, an all-gather or reduce-scatter half as many.

    Yields:
        A ``Traffic``.
    """
    with Traffic() as counter:
        yield counter
