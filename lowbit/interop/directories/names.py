"""Names of a model's tensors in checkpoints, where transformers uses other names in memory."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

from torch import Tensor

from lowbit.nn.experts import stacks

__all__ = ["Names"]

#: The operations that make a stack of matrices from a matrix per expert, by the number of matrices that are joined.
_STACKING = {1: ["MergeModulelist"], 2: ["MergeModulelist", "Concatenate"]}


class ExpertNames(NamedTuple):
    """Names of the matrices of one expert: those that are joined by rows for its first matmul, and the others."""

    first: tuple[str, ...]
    second: tuple[str, ...]


class Names:
    """The names in checkpoints by the conversions of transformers, which version 4 does not have."""

    def __init__(self, model: Any) -> None:
        conversions = _conversions(model)
        self._joined = [one for one in conversions if hasattr(one, "operations")]
        renamings = [one for one in conversions if not hasattr(one, "operations")]
        self._renamings = [one.reverse_transform() for one in reversed(renamings)]

    def stored(self, name: str) -> str:
        """The name of a tensor in checkpoints."""
        for renaming in self._renamings:
            name, _ = renaming.rename_source_key(name)
        return name

    def layer(self, path: str) -> str:
        """The name of a layer in checkpoints."""
        return self.stored(f"{path}.weight").removesuffix(".weight")

    def tensors(self, model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of the model as checkpoints have them: with their names, and split or joined as there."""
        if not any(self.is_converted(name) for name in tensors):
            return {self.stored(name): value for name, value in tensors.items()}
        loading = import_module("transformers.core_model_loading")
        return dict(loading.revert_weight_conversion(model, tensors))

    def is_converted(self, name: str) -> bool:
        """Whether checkpoints have other values than the tensor ``name``."""
        return any(one.reverse_transform().rename_source_key(name)[1] is not None for one in self._joined)

    def experts(self, path: str, module: Any) -> ExpertNames | None:
        """The matrices of each expert of a stack, or None if checkpoints do not have one matrix per expert."""
        parts = [self._parts(f"{path}.{stack}") for stack in stacks(module)]
        return None if None in parts else ExpertNames(*parts)  # type: ignore[arg-type]

    def _parts(self, name: str) -> tuple[str, ...] | None:
        for one in self._joined:
            if one.reverse_transform().rename_source_key(name)[1] is not None:
                sources = one._original_source_patterns
                operations = [type(operation).__name__ for operation in one.operations]
                known = operations == _STACKING.get(len(sources)) and all(".*." in source for source in sources)
                return tuple(source.split(".")[-2] for source in sources) if known else None
        return None


def _conversions(model: Any) -> list[Any]:
    """The conversions that were used to load the model, or those of its class."""
    try:
        mapping = import_module("transformers.conversion_mapping")
    except ImportError:
        return []
    used = getattr(model, "_weight_conversions", None)
    if used is not None:
        return list(used)
    known = mapping.get_model_conversion_mapping(model, add_legacy=False)
    return [one for one in known if type(one).__name__ != "PrefixChange"]  # as in transformers' save_pretrained
