"""A model on the meta device and the checkpoint that has its tensors, which are read while they are needed."""

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
    """The weights of ``model``, on the meta device, are those of ``checkpoint``.

    Raises ValueError where one is missing or has another shape, or where tied ones differ, and for a model that is not
    on the meta device. Warns of tensors that the model does not have.
    """

    forgets = True

    def __init__(self, model: nn.Module, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.names = _names(model, checkpoint)

    def has(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is one of the model's, or a part of one."""
        return storage(tensor) in self.names

    def read(self, tensor: Tensor) -> Tensor:
        """What the checkpoint has for ``tensor`` or the part of one that it is, in its dtype."""
        if not tensor.is_meta:
            return tensor
        whole = self.checkpoint.read(self.names[storage(tensor)]).to(tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def load(self, model: nn.Module, blocks: Iterable[nn.Module]) -> None:
        """Take up all tensors of ``model`` outside of ``blocks``, for good."""
        inside = {id(module) for block in blocks for module in block.modules()}
        self._fill([module for module in model.modules() if id(module) not in inside])

    @contextmanager
    def held(self, *modules: nn.Module) -> Iterator[None]:
        """Inside, ``modules`` have their tensors; what is quantized there is let go of as well."""
        inner = [module for one in modules for module in one.modules()]
        filled = self._fill(inner)
        try:
            yield
        finally:
            for where, name, before in filled:
                where[name] = before
            for one in modules:
                for module in one.modules():
                    if isinstance(module, QuantLinear):
                        module.to("meta")

    def paged(self, blocks: Iterable[nn.Module]) -> AbstractContextManager[None]:
        """Inside, each of ``blocks`` has its tensors while it is called."""
        return wrapped((block, _Paged(self)) for block in blocks)

    def _fill(self, modules: Iterable[nn.Module]) -> list[tuple[dict[str, Any], str, Any]]:
        """Give ``modules`` what the checkpoint has; where that was put, and what was there."""
        read: dict[int, Tensor] = {}
        filled: list[tuple[dict[str, Any], str, Any]] = []

        def put(where: dict[str, Any], name: str, tensor: Tensor) -> None:
            key = storage(tensor)
            if key not in read:
                if key not in self.names:
                    raise ValueError(
                        f"{name} is made of a part of a tensor, which is only done in memory; load the model, and use "
                        f"quantize_"
                    )
                read[key] = self.checkpoint.read(self.names[key]).to(tensor.dtype)
            real: Tensor = read[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            filled.append((where, name, tensor))
            where[name] = nn.Parameter(real, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else real

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
    """The checkpoint's name of each tensor of the model, by its storage, with or without the prefix of a base model."""
    held, prefix = checkpoint.entries, f"{getattr(model, 'base_model_prefix', '')}."
    found: dict[int, str] = {}
    missing: dict[int, str] = {}
    used: set[str] = set()
    for name, tensor in model.state_dict().items():
        if not tensor.is_meta:
            raise ValueError(
                f"quantize_files: {name} is not on the meta device; build the model within "
                f"`with lowbit.serialize.empty_weights():`, or call lowbit.quantize_"
            )
        known = next((one for one in (name, name.removeprefix(prefix), prefix + name) if one in held), None)
        if known is None:
            missing[storage(tensor)] = name
            continue
        if held[known].shape != tensor.shape:
            raise ValueError(
                f"{checkpoint.directory} does not fit this model: {known} is {list(held[known].shape)}, and the model "
                f"has {list(tensor.shape)}"
            )
        used.add(known)
        first = found.setdefault(storage(tensor), known)
        if first != known and not torch.equal(checkpoint.read(first), checkpoint.read(known)):
            raise ValueError(
                f"{checkpoint.directory} does not fit this model, which has one tensor for {first} and {known}"
            )
    lost = [name for key, name in missing.items() if key not in found]
    if lost:
        raise ValueError(
            f"{checkpoint.directory} does not fit this model: it lacks {len(lost)} tensors, such as "
            f"{', '.join(lost[:4])}; it has {', '.join(list(held)[:4])}. Where transformers renames them while it "
            f"loads, use from_pretrained and lowbit.quantize_"
        )
    others = sorted(held.keys() - used)
    if others:
        warn(f"quantize_files leaves out tensors that the model does not have: {', '.join(others[:8])}")
    return found
