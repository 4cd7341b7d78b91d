"""Stored: the weights of a model on the meta device, read from a checkpoint when they are needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.calibrate.recording import Observed
from lowbit.calibrate.weights import InMemory
from lowbit.models.ties import storage
from lowbit.models.wrap import Wrapper, wrapped
from lowbit.nn.linear import QuantLinear
from lowbit.serialize.shards import Checkpoint
from lowbit.user_warnings import warn

__all__ = ["Stored"]


@dataclass(eq=False)
class _Paged(Wrapper):
    weights: Stored

    def __call__(self, module: nn.Module, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        with self.weights.held(module):
            return forward(*args, **kwargs)


class Stored(InMemory):
    """The weights of ``model``, on the meta device, from ``checkpoint``.

    Raises ValueError if the model is not on the meta device, a tensor is missing or has another shape, or tied tensors
    differ. Warns of tensors that the model does not have.
    """

    forgets = True

    def __init__(self, model: nn.Module, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.names = _names(model, checkpoint)

    def has(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is a tensor of the model, or a part of one."""
        return storage(tensor) in self.names

    def read(self, tensor: Tensor) -> Tensor:
        """Read ``tensor``, or the part of a stored tensor that it is, in its dtype."""
        if not tensor.is_meta:
            return tensor
        stored = self.checkpoint.read(self.names[storage(tensor)]).to(tensor.dtype)
        return stored.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def load(self, model: nn.Module, blocks: Iterable[nn.Module]) -> None:
        inside = {id(module) for block in blocks for module in block.modules()}
        self._fill([module for module in model.modules() if id(module) not in inside])

    @contextmanager
    def held(self, *modules: nn.Module) -> Iterator[None]:
        """Load the tensors of ``modules`` in this context. At the end new QuantLinears move to the meta device."""
        filled = self._fill([inner for module in modules for inner in module.modules()])
        try:
            yield
        finally:
            for tensors, name, before in filled:
                tensors[name] = before
            for outer in modules:
                for module in outer.modules():
                    if isinstance(module, QuantLinear):
                        module.to("meta")

    def paged(self, blocks: Iterable[nn.Module]) -> AbstractContextManager[None]:
        return wrapped((block, _Paged(self)) for block in blocks)

    def _fill(self, modules: Iterable[nn.Module]) -> list[tuple[dict[str, Any], str, Any]]:
        """Load the tensors of ``modules``. Returns (dict, key, old value) of each change."""
        read: dict[int, Tensor] = {}
        filled: list[tuple[dict[str, Any], str, Any]] = []

        def put(tensors: dict[str, Any], name: str, tensor: Tensor) -> None:
            key = storage(tensor)
            if key not in read:
                if key not in self.names:
                    raise ValueError(
                        f"{name} is made of a part of a tensor, which needs the model in memory; load it, and use "
                        f"quantize_"
                    )
                read[key] = self.checkpoint.read(self.names[key]).to(tensor.dtype)
            real: Tensor = read[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            filled.append((tensors, name, tensor))
            tensors[name] = nn.Parameter(real, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else real

        for module in modules:
            for tensors in (module._parameters, module._buffers):
                for name, tensor in list(tensors.items()):
                    if tensor is not None and tensor.is_meta:
                        put(tensors, name, tensor)
            if isinstance(module, Observed) and module.weight.is_meta:
                put(vars(module), "weight", module.weight)
                filled.append((vars(module), "plain", module.plain))
                module.plain = module.weight
        return filled


def _names(model: nn.Module, checkpoint: Checkpoint) -> dict[int, str]:
    """The checkpoint's name of each tensor of the model, by storage. Either may lack the prefix of the base model."""
    entries, prefix = checkpoint.entries, f"{getattr(model, 'base_model_prefix', '')}."
    names: dict[int, str] = {}
    missing: dict[int, str] = {}
    used: set[str] = set()
    for name, tensor in model.state_dict().items():
        if not tensor.is_meta:
            raise ValueError(
                f"quantize_files: {name} is not on the meta device; build the model within "
                f"`with lowbit.serialize.empty_weights():`, or call lowbit.quantize_"
            )
        key = next((key for key in (name, name.removeprefix(prefix), prefix + name) if key in entries), None)
        if key is None:
            missing[storage(tensor)] = name
            continue
        if entries[key].shape != tensor.shape:
            raise ValueError(
                f"{checkpoint.directory} does not fit this model: {key} is {list(entries[key].shape)}, and the model "
                f"has {list(tensor.shape)}"
            )
        used.add(key)
        first = names.setdefault(storage(tensor), key)
        if first != key and not torch.equal(checkpoint.read(first), checkpoint.read(key)):
            raise ValueError(
                f"{checkpoint.directory} does not fit this model, which has one tensor for {first} and {key}"
            )
    lost = [name for key, name in missing.items() if key not in names]
    if lost:
        raise ValueError(
            f"{checkpoint.directory} does not fit this model: it lacks {len(lost)} tensors, such as "
            f"{', '.join(lost[:4])}; it has {', '.join(list(entries)[:4])}. If transformers renames them while it "
            f"loads, use from_pretrained and lowbit.quantize_"
        )
    unused = sorted(entries.keys() - used)
    if unused:
        warn(f"quantize_files leaves out tensors that the model does not have: {', '.join(unused[:8])}")
    return names
