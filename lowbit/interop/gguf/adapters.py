"""Writes LoRA adapters of peft as a GGUF file, which llama.cpp adds to the base model (``--lora``)."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowbit.interop.files import require_library
from lowbit.interop.gguf.architectures import Architecture, architecture_of
from lowbit.interop.gguf.container import Entry, write_file
from lowbit.interop.gguf.names import TensorNames
from lowbit.models.adapters import KEEPING_INITS
from lowbit.models.check import uncompiled
from lowbit.models.names import plain_name
from lowbit.models.ties import storage_key
from lowbit.models.wrap import plain_class
from lowbit.report import LayerReport, Report

__all__ = ["write_adapters"]

#: Settings of a LoraConfig that llama.cpp cannot express: whether a value uses them, and the reason.
_REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "use_dora": (bool, "DoRA also scales the rows of the sum"),
    "modules_to_save": (bool, "these layers are trained as a whole"),
    "trainable_token_indices": (bool, "rows of the embedding are trained as a whole"),
    "target_parameters": (bool, "these parameters are not weights of layers"),
    "layer_replication": (bool, "the base model has fewer layers"),
    "lora_bias": (bool, "it adds to biases"),
    "bias": (lambda value: value != "none", "biases of the base model are trained"),
    "init_lora_weights": (
        lambda value: value not in KEEPING_INITS,
        "it changes the weights of the base model; convert the adapter with peft's "
        "save_pretrained(path, path_initial_model_for_weight_conversion=...) and load it again",
    ),
}


class _Adapter(NamedTuple):
    """The adapter of a layer: its output is ``b @ a @ x * scaling`` for ``a [r, in]`` and ``b [out, r]``."""

    path: str
    layer: Any
    a: Tensor
    b: Tensor
    scaling: float

    @property
    def alpha(self) -> float:
        """llama.cpp scales by alpha / rank, also if peft scales by alpha / sqrt(rank)."""
        return self.scaling * self.b.shape[1]


@torch.no_grad()
def write_adapters(model: nn.Module, path: str | Path, adapter: str | None = None) -> Report:
    """Write the LoRA adapters of a model for llama.cpp, which adds them to a file of the base model.

    Values are in fp32. llama.cpp has one alpha for all layers; if layers differ, their ``lora_b`` is scaled.

    Args:
        model: A PeftModel whose base model has a class in ``ARCHITECTURES``, quantized or not; or a model of
            transformers after ``add_adapter``.
        path: The file.
        adapter: Name of the adapter. None: the active one.

    Returns:
        The report, with a row for each adapted layer.

    Raises:
        ImportError: The package gguf is not installed.
        ValueError: The model has no LoRA adapter of this name, llama.cpp cannot express it, or it is merged.
        OSError: The file cannot be written, or the disk has too little space.

    Source: llama.cpp, convert_lora_to_gguf.py and src/llama-adapter.cpp.
    """
    gguf, model, path = require_library("gguf"), uncompiled(model), Path(path)
    name = _name(model, adapter)
    get_base: Any = getattr(model, "get_base_model", None)
    base: Any = model if get_base is None else get_base()
    architecture = architecture_of(base)
    adapters = _adapters(base, name)
    names = TensorNames(gguf, base, architecture)
    alpha = next((one.alpha for one in adapters if one.alpha), 1.0)
    entries = []
    for one in adapters:
        stored = _stored_name(one, names, architecture, base)
        a, b = _factors(one, stored, alpha, architecture, base.config)
        for suffix, value in (("lora_a", a), ("lora_b", b)):
            entries.append(Entry(f"{stored}.{suffix}", "F32", tuple(value.shape), lambda value=value: value))  # type: ignore[misc]
    metadata = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": float(alpha)}
    write_file(gguf, path, architecture.name, metadata, entries)
    ranks = sorted({one.b.shape[1] for one in adapters})
    note = f"adapter {name!r}: alpha {alpha:g}, rank {', '.join(map(str, ranks))}"
    return Report("write_adapters", None, tuple(map(_row, adapters)), notes=(note,), done=f"written to {path}")


def _name(model: Any, adapter: str | None) -> str:
    """The name of the adapter. Raises ValueError if it is not a LoRA adapter that llama.cpp can express."""
    configs: dict[str, Any] = getattr(model, "peft_config", {})
    if not configs:
        raise ValueError(f"write_adapters: expected a PeftModel, got a {type(model).__name__} without adapters")
    name = _active(model) if adapter is None else adapter
    if name not in configs:
        raise ValueError(f"write_adapters: expected an adapter of {', '.join(configs)}, got {name!r}")
    config = configs[name]
    kind = getattr(config.peft_type, "value", config.peft_type)
    if kind != "LORA":
        raise ValueError(f"write_adapters: llama.cpp has LoRA adapters, and {name!r} is {kind}; merge it if it can be")
    for field, (uses, reason) in _REFUSED.items():
        value = getattr(config, field, None)
        if value is not None and uses(value):
            raise ValueError(
                f"write_adapters: llama.cpp cannot express {field}={value!r} as an adapter: {reason}. "
                f"Or merge: model = model.merge_and_unload()"
            )
    return name


def _active(model: Any) -> str:
    """The active adapter. Raises ValueError if several are active."""
    active = model.active_adapters  # a method of models of transformers, else an attribute
    names = list(active() if callable(active) else active)
    if len(names) != 1:
        raise ValueError(f"write_adapters: {len(names)} adapters are active: {', '.join(names)}; pass adapter=NAME")
    return str(names[0])


# -- layers ------------------------------------------------------------------------------------------------------------
def _adapters(base: nn.Module, name: str) -> list[_Adapter]:
    """The adapters of all layers. Raises ValueError for those that are merged, or not two matrices."""
    found = []
    for path, layer in base.named_modules():
        scaling = getattr(layer, "scaling", None)
        if not isinstance(scaling, dict) or name not in scaling or not hasattr(layer, "lora_A"):
            continue
        if layer.merged:
            raise ValueError(
                f"write_adapters: the adapter of {path!r} is merged; call model.unmerge_adapter() first, so that a "
                f"file of the base model does not have it too"
            )
        variant = getattr(layer, "lora_variant", {}).get(name)
        a, b = (_matrix(layer, part, name) for part in ("A", "B"))
        if variant is not None or a is None or b is None:
            kind = plain_class(layer if variant is None else variant).__name__
            raise ValueError(f"write_adapters: llama.cpp has no adapters like the {kind} of {path!r}; merge it")
        found.append(_Adapter(plain_name(path), layer, a, b, float(scaling[name])))
    if not found:
        raise ValueError(f"write_adapters: no layer has the adapter {name!r}")
    return found


def _matrix(layer: Any, part: str, name: str) -> Tensor | None:
    """A factor of an adapter, in fp32 on the CPU; None if it is not a matrix."""
    linears, tables = getattr(layer, f"lora_{part}"), getattr(layer, f"lora_embedding_{part}")
    value = tables[name] if name in tables else linears[name].weight if name in linears else None
    return None if value is None or value.ndim != 2 else value.detach().to("cpu", torch.float32)


def _stored_name(one: _Adapter, names: TensorNames, architecture: Architecture, base: Any) -> str:
    """The name of the layer's weight in the file of the base model."""
    stored = names.of(f"{one.path}.weight")
    if stored is None or any(c.values is not None and re.fullmatch(c.pattern, stored) for c in architecture.changes):
        raise ValueError(f"write_adapters: llama.cpp does not use adapters of {one.path!r}; merge them")
    if stored in ("token_embd.weight", "output.weight") and _is_tied(base):
        raise ValueError(
            f"write_adapters: the weight of {one.path!r} is both the embedding and the output layer, and its adapter "
            f"is for one of them; leave the layer out of target_modules"
        )
    return stored


def _is_tied(base: Any) -> bool:
    """Whether the output layer has the weight of the embedding, in the same order of elements."""
    weights = []
    for layer in (base.get_input_embeddings(), base.get_output_embeddings()):
        weight = getattr(layer, "weight", None)
        weights.append(getattr(weight, "codes", weight))
    first, second = weights
    return isinstance(first, Tensor) and isinstance(second, Tensor) and storage_key(first) == storage_key(second)


def _factors(
    one: _Adapter, stored: str, alpha: float, architecture: Architecture, config: Any
) -> tuple[Tensor, Tensor]:
    """``lora_a`` and ``lora_b`` in the order of the file."""
    a, b = one.a, one.b * (one.alpha / alpha)
    for change in architecture.changes:
        if change.rows is not None and re.fullmatch(change.pattern, stored):
            b = b[change.rows(len(b), config)]
    # llama.cpp looks up rows of lora_a for tokens.
    return (a.t() if stored == "token_embd.weight" else a).contiguous(), b.contiguous()


def _row(one: _Adapter) -> LayerReport:
    elements = one.a.numel() + one.b.numel()
    kind = plain_class(one.layer.get_base_layer()).__name__
    return LayerReport(one.path, kind, None, elements, 32.0, 4 * elements, 4 * elements)
