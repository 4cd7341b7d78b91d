"""Reads a GGUF file into a model of transformers, and keeps the codes that lowbit has schemes for.

The file is untrusted: shapes are checked against the model before weights are read.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.convert.adapters import find
from lowbit.files import shown
from lowbit.interop.files import require_library
from lowbit.interop.gguf.architectures import TOKEN_TYPES, Architecture, Change, find_architecture, with_factors
from lowbit.interop.gguf.blocks import BLOCK_TYPES, from_blocks
from lowbit.interop.gguf.header import Header
from lowbit.interop.gguf.names import TensorNames, parts_of
from lowbit.interop.gguf.vocabulary import PRE_TOKENIZERS
from lowbit.nn.linear import QuantLinear
from lowbit.recipes import RECIPES, Gemm, Recipe
from lowbit.serialize import huggingface
from lowbit.serialize.empty import empty_weights, to_meta_
from lowbit.serialize.loading import Layer, Saved, load_into
from lowbit.tensor.quantized import Quantized

__all__ = ["read", "tokenizer"]

#: The dtypes of float matrices.
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

#: Tensors that transformers computes from the config.
_COMPUTED = re.compile(r"rope_freqs\.weight|rope_factors_\w+\.weight|.*\.(attn_rot_embd|rope_freqs)\.weight|.*\.scale")


class _File(Header):
    """A file whose tensors can be decoded."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.gguf = require_library("gguf")
        self.name = self.values.get("general.architecture")

    def settings(self) -> dict[str, Any]:
        """The metadata of the architecture, by keys after its name."""
        prefix = f"{self.name}."
        shared = {key: self.values[key] for key in (TOKEN_TYPES,) if key in self.values}
        return shared | {key[len(prefix) :]: value for key, value in self.values.items() if key.startswith(prefix)}

    def quantized(self, name: str, dtype: torch.dtype) -> Quantized | None:
        """The matrix with its codes, or None if lowbit has no scheme for them."""
        stored = self.tensors[name]
        row = BLOCK_TYPES.get(stored.type)
        if row is None or len(stored.shape) != 2:
            return None
        scale = None
        if row.scheme.global_scale == "tensor":
            other = name.removesuffix("weight") + "scale"
            scale = self.float(other, torch.float32) if other in self.tensors else torch.ones(1)
            if scale.numel() != 1:
                raise ValueError(f"{self.path} has {other} with shape {list(scale.shape)}, expected one number")
        scale = None if scale is None else scale.view(1, 1)
        return from_blocks(row, self.read(name), stored.shape[1], dtype, scale)

    def float(self, name: str, dtype: torch.dtype) -> Tensor:
        """The decoded tensor."""
        stored = self.tensors[name]
        if stored.type in _FLOATS:
            return self.read(name).view(_FLOATS[stored.type]).view(stored.shape).to(dtype)
        kept = self.quantized(name, dtype)
        if kept is not None:
            return kept.dequantize(dtype)
        decoded = self.gguf.dequantize(self.read(name).numpy(), self.gguf.GGMLQuantizationType[stored.type])
        return torch.from_numpy(decoded).view(stored.shape).to(dtype)

    def dtype(self) -> torch.dtype:
        """The dtype of the model: that of most float matrices, or bf16."""
        sizes = dict.fromkeys(_FLOATS, 0)
        for stored in self.tensors.values():
            if len(stored.shape) > 1 and stored.type in sizes:
                sizes[stored.type] += torch.Size(stored.shape).numel()
        most = max(sizes, key=lambda name: sizes[name])
        return _FLOATS[most] if sizes[most] else torch.bfloat16


@torch.no_grad()
def read(path: str | Path, dtype: torch.dtype | None = None) -> nn.Module:
    """Load a GGUF file as a model of transformers, in eval mode.

    Linears whose block type lowbit has become QuantLinears with the codes of the file. Other types are decoded.

    Args:
        path: The file.
        dtype: The dtype of the model. None: that of the file's float matrices, or bf16 if all matrices are quantized.

    Raises:
        ImportError: transformers or gguf is not installed.
        ValueError: The file is damaged, or its architecture is not known. The message names the tensor.
    """
    file = _File(Path(path))
    try:
        architecture = find_architecture(file.name, file.settings())
        model = _without_weights(file, architecture)
    except ImportError:
        raise
    except Exception as error:  # a class may raise anything for untrusted metadata
        raise ValueError(f"{path} cannot be read: {str(error)[:300]}") from error
    reader = _Reader(file, architecture, model, dtype or file.dtype())
    reader.run()
    load_into(model, Saved(Path(path), reader.layers, reader.tensors, reader.tied, None), built=False)
    return model.to(reader.dtype).eval()


class _Reader:
    """Collects the state of a model from a file."""

    def __init__(self, file: _File, architecture: Architecture, model: nn.Module, dtype: torch.dtype) -> None:
        self.file, self.architecture, self.model, self.dtype = file, architecture, model, dtype
        self.names = TensorNames(file.gguf, model, architecture)
        self.layers: dict[str, Layer] = {}
        self.tensors: dict[str, Tensor] = {}
        self.tied: dict[str, str] = {}
        self._used: set[str] = set()

    def run(self) -> None:
        """Raises ValueError if file and model do not have the same tensors."""
        first: dict[int, str] = {}
        for path, module in self.model.named_modules(remove_duplicate=False):
            for short, value in (*module._parameters.items(), *module._buffers.items()):
                name = f"{path}.{short}" if path else short
                if value is None or short in module._non_persistent_buffers_set:
                    continue
                source = first.setdefault(id(value), name)
                if source != name:
                    self.tied[name], self.tensors[name] = source, self.tensors[source]
                    continue
                weight = self._codes(name, module) if short == "weight" else None
                if weight is None:
                    self.tensors[name] = self._values(name, module, value)
                else:
                    recipe = _recipe(weight)
                    self.layers[path] = Layer(recipe, self.dtype, [weight.shape[1]])
                    self.tensors |= QuantLinear(weight, None, recipe).state_dict(prefix=f"{path}.")
        unused = sorted(name for name in self.file.tensors if name not in self._used and not _COMPUTED.fullmatch(name))
        if unused:
            raise ValueError(f"{self.file.path} has {shown(unused[0])}, which a {_class(self.model)} does not use")

    def _codes(self, name: str, module: nn.Module) -> Quantized | None:
        """The weight of a Linear with the codes of the file; None if it has none that lowbit has."""
        stored = self.names.of(name)
        if stored not in self.file.tensors or not isinstance(module, nn.Linear) or find(module).listed is None:
            return None
        assert stored is not None
        self._check_shape(stored, (module.out_features, module.in_features))
        weight = self.file.quantized(stored, self.dtype)
        if weight is None:
            return None
        self._used.add(stored)
        for change in self._changes(stored):
            if change.values is not None:
                return None
            if change.rows is not None:
                back = change.rows(weight.shape[0], self.model.config).argsort()
                weight = weight.map(lambda part: part[back] if len(part) == len(back) else part)  # noqa: B023
        return weight

    def _values(self, name: str, module: nn.Module, value: Tensor) -> Tensor:
        """A float parameter, from one or more tensors of the file."""
        filled = torch.empty(value.shape, dtype=self.dtype)
        for part, view in parts_of(name, module, filled):
            stored = self.names.of(part)
            if stored is None:
                continue
            if stored not in self.file.tensors:
                raise ValueError(f"{self.file.path} lacks {stored}, which a {_class(self.model)} needs; copy it again")
            self._check_shape(stored, tuple(view.shape))
            self._used.add(stored)
            matrix = self.file.float(stored, torch.float32 if view.ndim == 1 else self.dtype)
            for change in self._changes(stored):
                if change.rows is not None:
                    matrix = matrix[change.rows(len(matrix), self.model.config).argsort()]
                if change.values is not None:
                    matrix = change.values[1](matrix.float())
            view.copy_(matrix)
        return filled

    def _changes(self, stored: str) -> list[Change]:
        return [change for change in self.architecture.changes if re.fullmatch(change.pattern, stored)]

    def _check_shape(self, stored: str, shape: tuple[int, ...]) -> None:
        actual = self.file.tensors[stored].shape
        if actual != shape:
            raise ValueError(
                f"{self.file.path} has {stored} with shape {list(actual)}, expected {list(shape)}; its metadata are "
                f"of another model, or the file is damaged"
            )


def _class(model: nn.Module) -> str:
    return type(model).__name__


def _recipe(weight: Quantized) -> Recipe:
    """The weight-only recipe of this scheme, by its name if it has one."""
    named = (row for row in RECIPES.values() if row.input is None and row.weight == weight.scheme)
    return next(named, Recipe(Gemm(None, weight.scheme), name=f"{weight.scheme.name}-weight-only"))


def _without_weights(file: _File, architecture: Architecture) -> nn.Module:
    """The model on the meta device."""
    values = file.settings()
    settings: dict[str, Any] = {"model_type": architecture.model_type}
    tokens = file.values.get("tokenizer.ggml.tokens") or ()
    for key, attribute in architecture.keys.items():
        value = len(tokens) if key == "vocab_size" and key not in values else values.get(key)
        if value is not None:
            settings[attribute] = value
    settings |= architecture.config(values)
    if "rope_freqs.weight" in file.tensors:
        original = values.get("rope.scaling.original_context_length")
        factors = file.float("rope_freqs.weight", torch.float32)
        settings["rope_parameters"] = with_factors(settings["rope_parameters"], factors, original)
    settings["attention_bias"] = "blk.0.attn_output.bias" in file.tensors
    settings["mlp_bias"] = "blk.0.ffn_down.bias" in file.tensors
    settings["tie_word_embeddings"] = "output.weight" not in file.tensors
    for role in ("bos", "eos"):
        number = file.values.get(f"tokenizer.ggml.{role}_token_id")
        if number is not None:
            settings[f"{role}_token_id"] = int(number)
    described = {"architecture": architecture.model_class, "config": settings, "generation": None}
    with empty_weights(most=4 * len(file.tensors) + 1000):
        return to_meta_(huggingface.build(described))


# -- tokenizer ---------------------------------------------------------------------------------------------------------
def tokenizer(path: str | Path) -> Any:
    """The tokenizer of a GGUF file, as a fast tokenizer of transformers.

    Raises:
        ImportError: transformers is not installed.
        ValueError: The file has no tokenizer, or one that lowbit and transformers do not have.
    """
    file = _File(Path(path))
    if file.values.get("tokenizer.ggml.model") != "gpt2":
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(str(file.path.parent), gguf_file=file.path.name)
        except Exception as error:
            raise ValueError(f"{path} has no tokenizer that transformers can read: {str(error)[:200]}") from error
    return _byte_level(file)


def _byte_level(file: _File) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    name = file.values.get("tokenizer.ggml.pre")
    steps = next((steps for steps, known in PRE_TOKENIZERS.items() if known == name), None)
    if steps is None:
        raise ValueError(
            f"{file.path} has pre-tokenizer {shown(name)}, expected one of "
            f"{', '.join(PRE_TOKENIZERS.values())}; pass the model's own tokenizer"
        )
    tokens, types = _listed(file, "tokens", str), _listed(file, "token_type", int)
    merges = [tuple(merge.split(" ", 1)) for merge in _listed(file, "merges", str)]
    if len(types) != len(tokens) or any(len(merge) != 2 for merge in merges):
        raise ValueError(f"{file.path} is damaged: it has {len(tokens)} tokens and {len(types)} types of tokens")
    try:
        backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    except Exception as error:  # a merge of tokens that do not exist
        raise ValueError(f"{file.path} is damaged: {error}; download it again") from None
    made: list[Any] = []
    for step in steps:
        if step == "digits":
            made.append(pre_tokenizers.Digits(individual_digits=True))
        elif step != "bytes":
            made.append(pre_tokenizers.Split(Regex(step), "isolated"))
    made.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=steps[-1] == "bytes"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Sequence(made), decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(token, special=True) for token, code in zip(tokens, types, strict=True) if code == 3]
    )
    backend.add_tokens([AddedToken(token) for token, code in zip(tokens, types, strict=True) if code == 4])
    roles = {}
    for role, name in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        number = file.values.get(f"tokenizer.ggml.{role}_token_id")
        if number is not None and int(number) < len(tokens):
            roles[f"{name}_token"] = tokens[int(number)]
    if file.values.get("tokenizer.ggml.add_bos_token") and "bos_token" in roles:
        bos = roles["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, tokens.index(bos))]
        )
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, **roles)
    fast.chat_template = file.values.get("tokenizer.chat_template")
    return fast


def _listed(file: _File, key: str, kind: type) -> list[Any]:
    values = file.values.get(f"tokenizer.ggml.{key}")
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise ValueError(f"{file.path} is damaged: tokenizer.ggml.{key} is {shown(values)}; download it again")
    return values
