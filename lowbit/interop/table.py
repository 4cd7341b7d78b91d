"""The table of formats in which models leave and enter, ``export`` and ``load_model``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from lowbit.convert.engine import quantized_layers
from lowbit.convert.prepack import prepack_
from lowbit.interop import compressed_tensors, directories, gguf, graphs, producers
from lowbit.interop.directories import Rules
from lowbit.interop.exportable import TARGETS
from lowbit.interop.files import Contents, Refusal
from lowbit.interop.producers import gptq, modelopt
from lowbit.name_tables import did_you_mean
from lowbit.recipes import Recipe
from lowbit.report import Report
from lowbit.serialize import huggingface
from lowbit.serialize import load_model as load_directory
from lowbit.serialize.layout import our_config

__all__ = [
    "FORMATS", "KINDS", "WRITTEN", "ModelFormat", "export", "find_format", "format_of", "load_model", "tokenizer_of",
]  # fmt: skip


class ModelFormat(NamedTuple):
    """A format of another program.

    Attributes:
        name: Its name in ``export``.
        about: The programs that read it, and the kind of path.
        detect: Whether a path has this format.
        read: Loads the model, in eval mode, with the codes of the file.
        contents: The model without its weights, and its recipes.
        write: Writes a model to a path, with what ``takes`` names, or None. None: the format is only read.
        refuses: Returns why it cannot express a recipe, with the nearest recipe that it can, or None.
        tokenizer: Loads the tokenizer of a path.
        takes: The argument of ``export`` that ``write`` takes: ``"tokenizer"`` or ``"batch"``.
    """

    name: str
    about: str
    detect: Callable[[Path], bool]
    read: Callable[[Path], nn.Module]
    contents: Callable[[Path], Contents]
    write: Callable[[nn.Module, Path, Any], Report] | None
    refuses: Callable[[Recipe], Refusal | None]
    tokenizer: Callable[[Path], Any]
    takes: str = "tokenizer"


def _not_read(path: Path) -> Any:
    raise ValueError(f"{path} is in a format that lowbit only writes")


def _pretrained_tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(path), local_files_only=True)


def _directory(
    rules: type[Rules],
    about: str,
    write: Callable[[nn.Module, Path, Any], Report] | None = None,
    refuses: Callable[[Recipe], Refusal | None] = lambda recipe: Refusal("the format is only read", recipe.name),
) -> ModelFormat:
    """The row of a layout of Hugging Face directories."""
    return ModelFormat(
        rules.method, about, rules.detect, partial(directories.read, rules=rules),
        partial(directories.contents, rules=rules), write, refuses, _pretrained_tokenizer,
    )  # fmt: skip


def _graph(name: str, about: str) -> ModelFormat:
    """The row of a format of graphs."""
    target = TARGETS[name]
    return ModelFormat(
        name, about, lambda path: False, _not_read, _not_read, partial(graphs.write, target=target), target.refuses,
        _not_read, takes="batch",
    )  # fmt: skip


#: One row per format. Names are API.
FORMATS: dict[str, ModelFormat] = {
    row.name: row
    for row in (
        ModelFormat("gguf", "a file for llama.cpp, Ollama and LM Studio", gguf.detect, gguf.read, gguf.contents,
                    gguf.write, gguf.refuses, gguf.tokenizer),
        _directory(compressed_tensors.CompressedTensors, "a directory for vLLM and transformers",
                   compressed_tensors.write, compressed_tensors.refuses),
        _graph("onnx", "a file for ONNX Runtime"),
        _graph("openvino", "a file for OpenVINO"),
        _graph("torch", "a program of torch.export"),
        _directory(producers.GPTQ, "a directory of AutoGPTQ or GPTQModel",
                   partial(directories.write, layout=gptq.LAYOUT), gptq.refuses),
        _directory(producers.AWQ, "a directory of AutoAWQ"),
        _directory(producers.ModelOpt, "a directory of NVIDIA's ModelOpt",
                   partial(directories.write, layout=modelopt.LAYOUT), modelopt.refuses),
        _directory(producers.FP8, "a directory with FP8 weights like DeepSeek-V3"),
        _directory(producers.MXFP4, "a directory with MXFP4 experts like gpt-oss"),
    )
}  # fmt: skip

#: The formats that ``export`` writes.
WRITTEN = tuple(name for name, row in FORMATS.items() if row.write is not None)


#: The paths of these formats, for messages.
_DIRECTORIES = ", ".join(name for name in FORMATS if name != "gguf" and name not in TARGETS)
KINDS = f"a GGUF file, or a directory of {_DIRECTORIES}"


def export(model: nn.Module, format: str, path: str | Path, tokenizer: Any = None, *, batch: Any = None) -> Report:
    """Write a model for another program, with unchanged codes and scales.

    Args:
        model: A model, quantized or not. ``"onnx"``, ``"openvino"`` and ``"torch"`` take any that torch can export, in
            fp32; the others take models of transformers.
        format: ``"gguf"``, ``"compressed-tensors"``, ``"gptq"``, ``"modelopt"``, ``"onnx"``, ``"openvino"`` or
            ``"torch"``.
        path: The file or directory, which gets its name when it is complete.
        tokenizer: A fast tokenizer of transformers, or a directory that has one. GGUF files also take a
            ``tokenizers.Tokenizer``; without a tokenizer llama.cpp cannot read text.
        batch: For ``"onnx"``, ``"openvino"`` and ``"torch"``, an example batch: a tensor, a tuple of arguments, or a
            dict of keyword arguments. Models of transformers need none.

    Returns:
        The report, with a row for each quantized layer.

    Raises:
        ValueError: The format is unknown, cannot express a layer, or does not take an argument. The message names the
            nearest recipe that works.
            Or the model has adapters of peft that are not merged: ``lowbit.interop.gguf.write_adapters`` writes them.
        ImportError: The format needs a package that is not installed.
        FileExistsError: ``path`` is a directory with content.
        OSError: The path cannot be written, or the disk has too little space.
    """
    row = find_format(format)
    assert row.write is not None
    extras = {"tokenizer": tokenizer, "batch": batch}
    taken = extras.pop(row.takes)
    for name, value in extras.items():
        if value is not None:
            raise ValueError(f"export: {format!r} takes no {name}")
    return row.write(model, Path(path), taken)


def find_format(name: str) -> ModelFormat:
    """The format called ``name`` that ``export`` writes. Raises ValueError if there is none."""
    row = FORMATS.get(name) if isinstance(name, str) else None
    if row is None:
        raise ValueError(
            f"export: unknown format {name!r}{did_you_mean(str(name), WRITTEN)}; expected one of {', '.join(WRITTEN)}"
        )
    if row.write is None:
        raise ValueError(f"export: {name} is only read; expected one of {', '.join(WRITTEN)}")
    return row


def format_of(path: str | Path) -> ModelFormat | None:
    """The format of another program that a path has, or None."""
    return next((row for row in FORMATS.values() if row.detect(Path(path))), None)


def load_model(path: str | Path, model: nn.Module | None = None, prepack: bool = False) -> nn.Module:
    """Load a model that ``save_model`` or another program wrote, with its codes.

    Files of other programs are read into a model of transformers: GGUF files, and directories in the layouts of
    ``lowbit.interop.FORMATS``. For a directory that ``save_model`` wrote, the model is filled or built as described in
    ``lowbit.serialize.load_model``.

    Args:
        path: A directory that ``save_model`` wrote, or a path in one of ``lowbit.interop.FORMATS``.
        model: A model of the saved architecture to fill; only for ``save_model``'s directories. None: build it.
        prepack: Call ``prepack_`` on the model, for inference on a CPU; a float model stays as it is.

    Returns:
        ``model``, or the new model.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file is damaged, has a scheme or an architecture that lowbit does not have, or does not fit the
            model.
        ImportError: The file needs a package that is not installed.
        OSError: A file cannot be read.

        ``model`` is unchanged if any of them is raised.
    """
    row = None if isinstance(path, nn.Module) else format_of(path)
    if row is None:
        if not isinstance(path, nn.Module):
            _require_model(Path(path))
        return load_directory(path, model, prepack)
    if model is not None:
        raise ValueError(f"{path} is a {row.name} model, which is built from its own config; leave out the model")
    loaded = row.read(Path(path))
    if prepack and quantized_layers(loaded):
        prepack_(loaded)
    return loaded


def _require_model(path: Path) -> None:
    """Raise FileNotFoundError, with the kinds of paths, if there is neither lowbit's nor a Hugging Face config."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; expected a directory that save_model wrote, {KINDS}")
    if our_config(path) is None and not huggingface.is_directory(path):
        raise FileNotFoundError(f"{path} is not a directory that save_model wrote, {KINDS}")


def tokenizer_of(path: str | Path) -> Any:
    """The tokenizer in a path of one of the formats, or in a directory of transformers."""
    row = format_of(path)
    return (_pretrained_tokenizer if row is None else row.tokenizer)(Path(path))
