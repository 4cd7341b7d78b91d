"""Names of tensors in GGUF files, by their names in transformers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from lowbit.interop.gguf.architectures import Architecture
from lowbit.models.names import plain_name
from lowbit.models.wrap import plain_class

__all__ = ["IN_FP32", "TensorNames", "parts_of"]

#: Matrices that llama.cpp reads in fp32, whatever the dtype of the model.
IN_FP32 = re.compile(r"(position_embd|token_types|blk\.\d+\.ffn_gate_inp)\.weight")

#: Tensors of transformers that llama.cpp computes, or does not use.
_UNUSED = re.compile(r"(.*\.)?(rotary_emb\.\w+|position_ids|masked_bias|attn\.bias|pooler\..*)")

#: Matrices of one expert in a stack.
_EXPERTS = re.compile(r"\.(\d+)\..*\bexperts\.(gate|up|down)_proj$")


class TensorNames:
    """The names of a model's tensors, from the package gguf and from the architecture."""

    def __init__(self, gguf: Any, model: nn.Module, architecture: Architecture) -> None:
        config: Any = model.config
        key = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
        blocks = getattr(config, "num_hidden_layers", None) or config.n_layer
        self._map = gguf.get_tensor_name_map(key, blocks)
        self._architecture = architecture

    def of(self, name: str) -> str | None:
        """The name of a tensor, or None if llama.cpp does not use it.

        Raises:
            ValueError: llama.cpp has no such tensor.
        """
        name = plain_name(name)
        if _UNUSED.fullmatch(name):
            return None
        experts = _EXPERTS.search(name)
        if experts is not None:
            return f"blk.{experts[1]}.ffn_{experts[2]}_exps.weight"
        stem, _, part = name.rpartition(".")
        number = re.search(r"(?<=\.)\d+(?=\.)", f".{stem}.")
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "{bid}", f".{stem}.", count=1).strip(".")
        own = self._architecture.names.get(pattern)
        found = self._map.get_name(stem) if own is None else own.replace("{bid}", number[0] if number else "")
        if found is None:
            raise ValueError(
                f"llama.cpp's {self._architecture.name} has no tensor for {name!r}; it cannot run this model"
            )
        return f"{found}.{part}"


def parts_of(name: str, module: nn.Module, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The matrices of a float parameter as views: transposed for a Conv1D, two for the first matmul of experts."""
    if plain_class(module).__name__ == "Conv1D" and value.ndim == 2:
        yield name, value.t()
    elif name.endswith(".gate_up_proj") and value.ndim == 3:
        stem = name.removesuffix("gate_up_proj")
        yield from zip((f"{stem}gate_proj", f"{stem}up_proj"), value.chunk(2, 1), strict=True)
    else:
        yield name, value
