"""Models of transformers: recognized, described as JSON, built again without weights, and read from a directory.

transformers is imported only where a file or a user asks for one of its models.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.convert.engine import quantized_layers
from lowbit.files import read_json, shown
from lowbit.nn.attention import QuantMultiheadAttention
from lowbit.nn.experts import QuantExperts, stacks
from lowbit.serialize import safetensors
from lowbit.serialize.configs import check_config
from lowbit.serialize.empty import empty_weights, to_meta_
from lowbit.serialize.shards import Checkpoint

__all__ = [
    "build", "describe", "from_directory", "is_directory", "is_pretrained", "is_quantized", "placeholders",
    "require_whole", "without_weights", "write_configs",
]  # fmt: skip

#: The file with ``placeholders``.
NEEDS_LOWBIT = "needs-lowbit.safetensors"

#: What embeddings are not made of, so that a checkpoint need not have it.
_UNREAD = "pooler."

#: Nothing but the directory is read, and no code in it runs.
_LOCAL = {"local_files_only": True, "trust_remote_code": False}


def _transformers(what: str) -> Any:
    try:
        return import_module("transformers")
    except ImportError:
        command = f"{sys.executable} -m pip install 'transformers>=4.56'"
        raise ImportError(f"{what} needs transformers: {command}") from None


def is_pretrained(model: nn.Module) -> bool:
    """Whether ``model`` is of a class that transformers itself has, so that its config builds it again."""
    library = sys.modules.get("transformers")
    if library is None or not type(model).__module__.startswith("transformers."):
        return False
    return getattr(library, type(model).__name__, None) is type(model) and hasattr(model, "config")


def describe(model: Any) -> dict[str, Any]:
    """The class and the config of a model, and how it generates if it does, as JSON has them."""
    generation = getattr(model, "generation_config", None)
    config = json.loads(model.config.to_json_string())
    if is_quantized(config):  # lowbit.json has the layers
        del config["quantization_config"]
    if config.get("tie_word_embeddings") and not _tied(model):
        config["tie_word_embeddings"] = False
    return {
        "architecture": type(model).__name__,
        "config": config,
        "generation": None if generation is None else json.loads(generation.to_json_string()),
    }


def _tied(model: Any) -> bool:
    """Whether the output layer has the weight of the embedding, or none of its own that is plain."""
    output, table = model.get_output_embeddings(), model.get_input_embeddings()
    weights = [layer._parameters.get("weight") if isinstance(layer, nn.Module) else None for layer in (output, table)]
    return any(weight is None for weight in weights) or weights[0] is weights[1]


def build(described: dict[str, Any]) -> nn.Module:
    """The model that ``describe`` described, freshly initialized, in eval mode.

    Raises: ImportError without transformers; ValueError for a class or a config that it does not have.
    """
    name = described["architecture"]
    config = json.loads(json.dumps(described["config"]), object_hook=_number)
    library = _transformers(f"a {shown(name)}")
    cls, kind = _class(library, name), config.get("model_type")
    if cls is None:
        raise ValueError(f"transformers {library.__version__} has no model {shown(name)}")
    if not isinstance(kind, str) or kind not in library.CONFIG_MAPPING:
        raise ValueError(f"transformers {library.__version__} knows no model_type {shown(kind)}")
    check_config(config)
    model: nn.Module = cls(library.CONFIG_MAPPING[kind].from_dict(config))
    if described["generation"] is not None:
        model.generation_config = library.GenerationConfig.from_dict(described["generation"])
    return model.eval()


def _number(value: dict[str, Any]) -> Any:
    """A JSON object; or the number that it stands for, where transformers wrote one that JSON cannot spell."""
    number = value.get("__float__") if len(value) == 1 else None
    return float(number) if number in ("Infinity", "-Infinity", "NaN") else value


def _class(library: Any, name: Any) -> Any:
    """The model of transformers with that name, or None."""
    cls = getattr(library, name, None) if isinstance(name, str) else None
    return cls if isinstance(cls, type) and issubclass(cls, library.PreTrainedModel) else None


# -- directories -------------------------------------------------------------------------------------------------------
def is_directory(directory: Path) -> bool:
    """Whether ``directory`` has a config of transformers. Raises ValueError for one that is damaged."""
    try:
        config = read_json(directory / "config.json")
    except (FileNotFoundError, NotADirectoryError):
        return False
    return "model_type" in config or "architectures" in config


def is_quantized(config: dict[str, Any]) -> bool:
    """Whether ``save_pretrained`` wrote this config of a model that lowbit quantized."""
    quantization = config.get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == "lowbit"


def from_directory(directory: Path) -> nn.Module:
    """The model in a directory of transformers, from safetensors files, in the dtype that they have, in eval mode.

    The class is the first of the config's ``architectures``, or what ``AutoModel`` takes. No code of the directory
    runs. Raises: ImportError without transformers; ValueError for a directory that transformers cannot load, or of a
    model that is quantized already.
    """
    _, kind = _class_of(directory)
    try:
        check_config(read_json(directory / "config.json"))
        model, info = kind.from_pretrained(
            str(directory), dtype="auto", use_safetensors=True, output_loading_info=True, **_LOCAL
        )
    except Exception as error:  # what a library raises for a stranger's files has no end
        raise ValueError(f"transformers cannot load {directory}: {_first(error)}") from error
    require_whole(directory, model, info["missing_keys"])
    quiet: nn.Module = model.eval()
    return quiet


def require_whole(directory: Path, model: nn.Module, missing: Iterable[str]) -> None:
    """Raise ValueError where transformers found no tensor for some of the model's, which it then fills at random.

    A pooler may be missing: many encoders are saved without it, and what they answer does not depend on it.
    """
    lost = sorted(name for name in missing if not name.startswith(_UNREAD))
    if lost:
        raise ValueError(
            f"{directory} lacks {len(lost)} tensors of a {type(model).__name__}, such as {shown(lost[:3])}; copy it "
            f"again, or save the model again"
        )


def without_weights(directory: Path) -> nn.Module:
    """What ``from_directory`` loads, with its weights on the meta device.

    Weights are not needed: where there is no safetensors file, the dtype is that of the config, or fp32.
    Raises as that; ValueError for a model that keeps some modules in fp32.
    """
    library, kind = _class_of(directory)
    try:
        entries = Checkpoint(directory).entries
    except FileNotFoundError:
        entries = {}
    held = next((entry.dtype for entry in entries.values() if entry.dtype.is_floating_point), torch.float32)
    try:
        check_config(read_json(directory / "config.json"))
        config = library.AutoConfig.from_pretrained(str(directory), **_LOCAL)
        dtype = config.dtype if isinstance(config.dtype, torch.dtype) else held
        with empty_weights():
            build = kind.from_config if kind is library.AutoModel else kind._from_config
            model = to_meta_(build(config, dtype=dtype))
        if (directory / "generation_config.json").exists() and getattr(model, "generation_config", None) is not None:
            model.generation_config = library.GenerationConfig.from_pretrained(str(directory), local_files_only=True)
    except Exception as error:
        raise ValueError(f"transformers cannot build the model of {directory}: {_first(error)}") from error
    lists = ("_keep_in_fp32_modules_strict", *(("_keep_in_fp32_modules",) if dtype == torch.float16 else ()))
    kept = [name for attribute in lists for name in getattr(model, attribute, None) or ()]
    if kept and dtype != torch.float32:
        raise ValueError(
            f"a {type(model).__name__} keeps {', '.join(sorted(kept))} in fp32 and the rest in {dtype}, which is only "
            f"done in memory; load it with from_pretrained and call lowbit.quantize_"
        )
    return model.eval()


def _class_of(directory: Path) -> tuple[Any, Any]:
    """transformers, and its class for the model in ``directory``."""
    library = _transformers(f"loading {directory}")
    config = read_json(directory / "config.json")
    if is_quantized(config):
        raise ValueError(f"the model in {directory} is quantized already; start from the one that it was made of")
    names = config.get("architectures")
    return library, _class(library, names[0] if isinstance(names, list) and names else None) or library.AutoModel


def write_configs(model: Any, directory: Path) -> list[dict[str, Any]] | None:
    """Write ``config.json``, which names the quantized layers, and how the model generates, as ``save_pretrained``;
    and a file with ``placeholders``, of which the answer is the row for ``write_index``.

    None where the transformers that is installed is older than lowbit's integration, and could not read them.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None:
        return None
    quantizer.get_state_dict_and_metadata(model)  # describes the layers in the config
    model.config.save_pretrained(directory)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(directory)
    empty = placeholders(model)
    safetensors.write(directory / NEEDS_LOWBIT, empty)
    return [{"file": NEEDS_LOWBIT, "names": list(empty)}]


def placeholders(model: nn.Module) -> dict[str, Tensor]:
    """An empty tensor for each quantized layer, by the name that its weight has in the plain model.

    It fits no layer: where lowbit is not imported, transformers builds plain layers and refuses its shape. Without it
    their weights would be random.
    """
    return {
        f"{name}.{_plain_name(layer)}": torch.empty(1, 2, 0, dtype=torch.uint8)  # experts are split
        for name, layer in quantized_layers(model).items()
    }


def _plain_name(layer: nn.Module) -> str:
    """What the first weight of the plain layer is called."""
    if isinstance(layer, QuantExperts):
        return stacks(layer)[0]
    return "out_proj.weight" if isinstance(layer, QuantMultiheadAttention) else "weight"


def _first(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
