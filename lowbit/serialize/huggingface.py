"""Hugging Face models: describe them as JSON, build them without weights, and load them from a directory.

transformers is imported only if a file or a user asks for one of its models.
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
from lowbit.models import cache_scales
from lowbit.models.wrap import plain_class
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

#: Prefix of weights that may be missing: many encoders are saved without a pooler, and embeddings do not use it.
_OPTIONAL = "pooler."

#: Read only the directory, and run no code from it.
_LOCAL = {"local_files_only": True, "trust_remote_code": False}


def _transformers(subject: str) -> Any:
    try:
        return import_module("transformers")
    except ImportError:
        command = f"{sys.executable} -m pip install 'transformers>=4.56'"
        raise ImportError(f"{subject} needs transformers: {command}") from None


def is_pretrained(model: nn.Module) -> bool:
    """Whether the class of ``model`` is defined in transformers, so that its config can build it again."""
    library, cls = sys.modules.get("transformers"), plain_class(model)
    if library is None or not cls.__module__.startswith("transformers."):
        return False
    return getattr(library, cls.__name__, None) is cls and hasattr(model, "config")


def describe(model: Any) -> dict[str, Any]:
    """The class, config and generation config of a model, as JSON values."""
    generation = getattr(model, "generation_config", None)
    config = json.loads(model.config.to_json_string())
    if is_quantized(config):  # lowbit.json has the layers
        del config["quantization_config"]
    if not cache_scales.scales_of(model):
        config.pop(cache_scales.ATTRIBUTE, None)
    if config.get("tie_word_embeddings") and not _tied(model):
        config["tie_word_embeddings"] = False
    return {
        "architecture": plain_class(model).__name__,
        "config": config,
        "generation": None if generation is None else json.loads(generation.to_json_string()),
    }


def _tied(model: Any) -> bool:
    """Whether the output layer shares the embedding's weight, or one of the two has no plain weight."""
    output, table = model.get_output_embeddings(), model.get_input_embeddings()
    weights = [layer._parameters.get("weight") if isinstance(layer, nn.Module) else None for layer in (output, table)]
    return any(weight is None for weight in weights) or weights[0] is weights[1]


def build(described: dict[str, Any]) -> nn.Module:
    """Build a model from its description, with new weights, in eval mode.

    Args:
        described: The result of ``describe``; checked, because it may come from an untrusted file.

    Raises:
        ImportError: transformers is not installed.
        ValueError: transformers has no such class or ``model_type``, or the config fails ``check_config``.
    """
    name = described["architecture"]
    config = json.loads(json.dumps(described["config"]), object_hook=_number)
    library = _transformers(f"a {shown(name)}")
    cls, model_type = _class(library, name), config.get("model_type")
    if cls is None:
        raise ValueError(f"transformers {library.__version__} has no model {shown(name)}")
    if not isinstance(model_type, str) or model_type not in library.CONFIG_MAPPING:
        raise ValueError(f"transformers {library.__version__} has no model_type {shown(model_type)}")
    check_config(config)
    model: nn.Module = cls(library.CONFIG_MAPPING[model_type].from_dict(config))
    cache_scales.expect_(model)
    if described["generation"] is not None:
        model.generation_config = library.GenerationConfig.from_dict(described["generation"])
    return model.eval()


def _number(value: dict[str, Any]) -> Any:
    """The float of ``{"__float__": "Infinity"}``, as transformers writes it; other objects unchanged."""
    number = value.get("__float__") if len(value) == 1 else None
    return float(number) if number in ("Infinity", "-Infinity", "NaN") else value


def _class(library: Any, name: Any) -> Any:
    """The model class of transformers called ``name``, or None."""
    cls = getattr(library, name, None) if isinstance(name, str) else None
    return cls if isinstance(cls, type) and issubclass(cls, library.PreTrainedModel) else None


# -- directories -------------------------------------------------------------------------------------------------------
def is_directory(directory: Path) -> bool:
    """Whether ``directory`` has the config of a Hugging Face model. Raises ValueError if the config is damaged."""
    try:
        config = read_json(directory / "config.json")
    except (FileNotFoundError, NotADirectoryError):
        return False
    return "model_type" in config or "architectures" in config


def is_quantized(config: dict[str, Any]) -> bool:
    """Whether this is the config of a model that lowbit quantized and ``save_pretrained`` wrote."""
    quantization = config.get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == "lowbit"


def from_directory(directory: Path) -> nn.Module:
    """Load an unquantized Hugging Face model from safetensors files, in their dtype, in eval mode.

    The class is the first entry of the config's ``architectures``, or ``AutoModel``. Code in the directory does not
    run.

    Raises:
        ImportError: transformers is not installed.
        ValueError: transformers cannot load the directory, or the model is already quantized.
    """
    _, cls = _class_of(directory)
    try:
        check_config(read_json(directory / "config.json"))
        model, info = cls.from_pretrained(
            str(directory), dtype="auto", use_safetensors=True, output_loading_info=True, **_LOCAL
        )
    except Exception as error:  # transformers may raise anything for untrusted files
        raise ValueError(f"transformers cannot load {directory}: {_first(error)}") from error
    require_whole(directory, model, info["missing_keys"])
    loaded: nn.Module = model.eval()
    return loaded


def require_whole(directory: Path, model: nn.Module, missing: Iterable[str]) -> None:
    """Raise ValueError for missing tensors, which transformers initializes at random; a pooler may be missing."""
    lost = sorted(name for name in missing if not name.startswith(_OPTIONAL))
    if lost:
        raise ValueError(
            f"{directory} lacks {len(lost)} tensors of a {type(model).__name__}, such as {shown(lost[:3])}; copy the "
            f"directory again, or save the model again"
        )


def without_weights(directory: Path) -> nn.Module:
    """Build the model that ``from_directory`` loads, on the meta device.

    The directory needs no weights. Without a safetensors file, the dtype is the config's, or fp32.

    Raises:
        ImportError: transformers is not installed.
        ValueError: transformers cannot build the model, it is already quantized, or it keeps some modules in fp32.
    """
    library, cls = _class_of(directory)
    try:
        entries = Checkpoint(directory).entries
    except FileNotFoundError:
        entries = {}
    file_dtype = next((entry.dtype for entry in entries.values() if entry.dtype.is_floating_point), torch.float32)
    try:
        check_config(read_json(directory / "config.json"))
        config = library.AutoConfig.from_pretrained(str(directory), **_LOCAL)
        dtype = config.dtype if isinstance(config.dtype, torch.dtype) else file_dtype
        with empty_weights():
            build = cls.from_config if cls is library.AutoModel else cls._from_config
            model = to_meta_(build(config, dtype=dtype))
        if (directory / "generation_config.json").exists() and getattr(model, "generation_config", None) is not None:
            model.generation_config = library.GenerationConfig.from_pretrained(str(directory), local_files_only=True)
    except Exception as error:
        raise ValueError(f"transformers cannot build the model of {directory}: {_first(error)}") from error
    lists = ("_keep_in_fp32_modules_strict", *(("_keep_in_fp32_modules",) if dtype == torch.float16 else ()))
    fp32_modules = [name for attribute in lists for name in getattr(model, attribute, None) or ()]
    if fp32_modules and dtype != torch.float32:
        raise ValueError(
            f"a {type(model).__name__} keeps {', '.join(sorted(fp32_modules))} in fp32 and the rest in {dtype}, which "
            f"is only supported in memory; load it with from_pretrained and call lowbit.quantize_"
        )
    return model.eval()


def _class_of(directory: Path) -> tuple[Any, Any]:
    """The transformers module, and its class for the model in ``directory``."""
    library = _transformers(f"loading {directory}")
    config = read_json(directory / "config.json")
    if is_quantized(config):
        raise ValueError(f"the model in {directory} is already quantized; use the original model")
    names = config.get("architectures")
    return library, _class(library, names[0] if isinstance(names, list) and names else None) or library.AutoModel


def write_configs(model: Any, directory: Path) -> list[dict[str, Any]] | None:
    """Write the configs that ``save_pretrained`` writes, and a file with ``placeholders``.

    Returns:
        The row of the placeholders for ``write_index``; None if the installed transformers is older than lowbit's
        integration supports, so that it could not load the result.
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
    """An empty tensor for each quantized layer, under the weight's name in the plain model.

    If lowbit is not imported, transformers builds plain layers, and raises an error for the shape of the placeholder.
    Without placeholders it would initialize the weights at random.
    """
    return {
        f"{name}.{_plain_name(layer)}": torch.empty(1, 2, 0, dtype=torch.uint8)  # experts are split
        for name, layer in quantized_layers(model).items()
    }


def _plain_name(layer: nn.Module) -> str:
    """The name of the first weight in the plain layer."""
    if isinstance(layer, QuantExperts):
        return stacks(layer)[0]
    return "out_proj.weight" if isinstance(layer, QuantMultiheadAttention) else "weight"


def _first(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
