"""``LazyMask``: the mask of documents that share a row, which Hugging Face models compute once and pass to each layer.

transformers describes a mask by a function of a query's and a key's position. ``lazy_mask`` recognizes the functions of
packed rows, which transformers derives from position ids that restart. The mask then has the documents instead of
values. lowbit's attention needs no more; every other operation computes the values and runs on them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lowbit.autograd import transformed
from lowbit.tiled.documents import Documents, documents_of
from lowbit.torch_private import disabled_torch_function, make_wrapper_subclass, without_modes

__all__ = ["LazyMask", "lazy_mask"]


class LazyMask(Tensor):
    """A bool mask ``[batch, 1, length, length]``: True for keys of a query's document up to the query.

    Attributes:
        documents: The documents.
        window: Only the last ``window`` keys up to a query take part; None: all.
    """

    documents: Documents
    window: int | None
    _dense: Tensor | None

    __torch_function__ = disabled_torch_function

    @staticmethod
    def of(documents: Documents, window: int | None, batch: int) -> LazyMask:
        """Return the mask for ``batch`` rows."""
        length = documents.numbers.shape[1]
        mask: Any = make_wrapper_subclass(
            LazyMask, (batch, 1, length, length), dtype=torch.bool, device=documents.numbers.device, storage_size=0
        )
        mask.documents, mask.window, mask._dense = documents, window, None
        return mask  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            mask = args[0]
            return LazyMask.of(mask.documents, mask.window, mask.shape[0])
        read = tree_map_only(LazyMask, LazyMask.dense, (args, kwargs or {}))
        return func(*read[0], **read[1])

    def dense(self) -> Tensor:
        """Return the mask as a plain tensor, which is kept."""
        if self._dense is None:
            numbers = self.documents.numbers
            place = torch.arange(numbers.shape[1], device=numbers.device)
            ahead = place - place.unsqueeze(1)
            seen = (ahead <= 0) if self.window is None else (ahead <= 0) & (ahead > -self.window)
            seen = (numbers[:, None, :, None] == numbers[:, None, None, :]) & seen
            self._dense = seen.expand(self.shape[0], -1, -1, -1)
        return self._dense


def lazy_mask(masking: Any, options: dict[str, Any]) -> LazyMask | None:
    """Return the mask that ``transformers.masking_utils`` describes, or None if it is not one of packed rows.

    Args:
        masking: That module.
        options: What it passes to a function that makes masks.
    """
    pattern = _pattern(masking, options["mask_function"])
    if pattern is None or pattern.documents is None or not pattern.causal:
        return None
    ids, batch = pattern.documents, options["batch_size"]
    offsets = [options.get(name, 0) for name in ("q_offset", "kv_offset")]
    is_plain = (
        options.get("attention_mask") is None
        and not options.get("use_vmap")
        and all(isinstance(offset, int) and not offset for offset in offsets)
        and options.get("q_length") == options["kv_length"] == ids.shape[1]
        and ids.shape[0] in (1, batch)
        and ids.device.type != "meta"
        and not transformed()
        and not masking.is_tracing(ids)
    )
    if not is_plain or not _is_as_known(masking):
        return None
    return LazyMask.of(documents_of(ids), pattern.window, batch)


class _Pattern(NamedTuple):
    """What a function of transformers lets a query see: keys that all of these let it see.

    Attributes:
        causal: Keys up to the query.
        window: The last ``window`` keys up to the query, and later ones.
        documents: Keys with the query's number in ``[batch, length]``.
    """

    causal: bool = False
    window: int | None = None
    documents: Tensor | None = None


def _pattern(masking: Any, function: Any) -> _Pattern | None:
    """Return the pattern of a function of ``masking``, or None for another one."""
    if function is masking.causal_mask_function:
        return _Pattern(causal=True)
    for name, read in _READ.items():
        held = _held(getattr(masking, name, None), function)
        if held is not None:
            return read(masking, held)
    return None


def _all_of(masking: Any, held: dict[str, Any]) -> _Pattern | None:
    parts = [_pattern(masking, function) for function in held["mask_functions"]]
    known = [part for part in parts if part is not None]
    windows = [part.window for part in known if part.window is not None]
    documents = [part.documents for part in known if part.documents is not None]
    if len(known) < len(parts) or len(documents) > 1:
        return None
    return _Pattern(any(part.causal for part in known), min(windows, default=None), next(iter(documents), None))


def _by_position(masking: Any, held: dict[str, Any]) -> _Pattern | None:
    """Positions of a document grow by 1 from token to token, so distances within it are the same."""
    part = _pattern(masking, held["mask_function"])
    return None if part is None or part.documents is not None else part


#: Functions of transformers that return functions of masks, with a reader of the variables that these hold.
_READ: dict[str, Callable[[Any, dict[str, Any]], _Pattern | None]] = {
    "and_masks": _all_of,
    "remap_positions_for_packed_sequence": _by_position,
    "sliding_window_overlay": lambda masking, held: _Pattern(window=held["sliding_window"]),
    "packed_sequence_mask_function": lambda masking, held: _Pattern(documents=held["packed_sequence_mask"]),
}


def _held(maker: Any, function: Any) -> dict[str, Any] | None:
    """Return the variables that ``function`` holds, if ``maker`` has made it."""
    code = getattr(function, "__code__", None)
    if maker is None or code is None or not any(code is constant for constant in maker.__code__.co_consts):
        return None
    return {name: cell.cell_contents for name, cell in zip(code.co_freevars, function.__closure__, strict=True)}


@cache
def _is_as_known(masking: Any) -> bool:
    """Whether this transformers means by its functions what ``_READ`` says, on two documents and a window."""
    with without_modes():
        ids, places = torch.tensor([[0, 0, 0, 0, 1, 1, 1]]), torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
        window = masking.sliding_window_causal_mask_function(2)
        function = masking.and_masks(
            masking.remap_positions_for_packed_sequence(window, places), masking.packed_sequence_mask_function(ids)
        )
        dense = masking.sdpa_mask(
            batch_size=1, q_length=7, kv_length=7, mask_function=function, allow_is_causal_skip=False
        )
        pattern = _pattern(masking, function)
        return pattern is not None and torch.equal(LazyMask.of(documents_of(ids), pattern.window, 1).dense(), dense)
