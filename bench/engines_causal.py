"""A causal language model with a KV cache in ``lowbit bench engines``: perplexity, size, and time per token.

One file computes prompts and next tokens: its inputs are token ids, positions, and keys and values of any length.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import lowbit as lb
from lowbit.bench.engines_programs import PROGRAMS, Program, Section, Table, files, size_cells
from lowbit.bench.hidden_grid import hide_grid_
from lowbit.evaluate import data, models
from lowbit.evaluate.data import Wanted
from lowbit.evaluate.loaders import decoded_gguf, token_ids
from lowbit.evaluate.tasks import Batch

__all__ = ["DECODERS", "generate", "tables", "write"]

#: Windows of the text, and tokens of each.
HELD_OUT, WINDOW = 8, 512

#: Rounds in which the files take turns, tokens of the prompt, and tokens generated.
ROUNDS, PROMPT, NEW = 7, 128, 16

NAME = "SmolLM2-135M"

SECTION = Section(
    "A language model with a KV cache",
    "One file computes the prompt and the next tokens. Perplexity: relative to torch's fp32 model, "
    f"{HELD_OUT} windows of {WINDOW} tokens, without a cache. Prompt: {PROMPT} tokens, with logits of all. Token: mean "
    f"of {NEW} greedy tokens after it. Times: one thread, medians of {ROUNDS} rounds in which the files take turns. "
    "The stored weights of this model lie on a grid of groups of 32 columns; channels are permuted first, which keeps "
    "the function and hides the grid. Both quantizers of a pair have equal bits, and no data. With ONNX Runtime, "
    "embedding and output layer, which share a table, stay fp32. With OpenVINO, both are quantized. OpenVINO runs with "
    "inference precision f32 and stores the cache in f32.",
    ("model", "program", "bits", "quantizer", "perplexity", "size", "relative to fp32", "prompt, ms",
     "relative to fp32", "token, ms", "relative to fp32"),
    4,
)  # fmt: skip


# -- the model ---------------------------------------------------------------------------------------------------------
class Loaded(NamedTuple):
    """The model in fp32, with windows of a text."""

    model: nn.Module
    held_out: list[Batch]


@cache
def _loaded(text: Path | None) -> Loaded:
    model, tokenizer = decoded_gguf(models.find("smollm2").location())
    hide_grid_(model)
    words = "\n\n".join(data.paragraphs(Wanted(limit=2000))) if text is None else data.read(text)
    windows = data.windows(token_ids(tokenizer, words), Wanted(windows=HELD_OUT), WINDOW + 1, _origin(text))
    return Loaded(model.eval(), windows)


def _origin(text: Path | None) -> str:
    return "the documentation in this Python" if text is None else text.name


@torch.no_grad()
def write(model: Any, format: str, path: Path) -> None:
    """Write a causal model of transformers with its cache, for sequences of any length in a batch of one.

    Args:
        model: A model in fp32, quantized or not.
        format: ``"onnx"`` or ``"openvino"``.
        path: The file.
    """
    from transformers.exporters import OnnxConfig, OnnxExporter, OpenVINOConfig, OpenVINOExporter
    from transformers.exporters.utils import decompose_for_generation

    exporter, config = (
        (OnnxExporter(), OnnxConfig) if format == "onnx" else (OpenVINOExporter(), OpenVINOConfig)
    )  # fmt: skip
    example = {"input_ids": torch.arange(3, 9)[None]}
    _, inputs = decompose_for_generation(model, example, multi_token_decode=True)["decode"]
    with lb.interop.exportable(model, format):
        program = exporter.export(model, inputs, config(dynamic_shapes=_lengths(inputs))).program
    if format == "openvino":
        lb.interop.openvino.compress(program)
    exporter.save_program(program, path)


def _lengths(inputs: dict[str, Any]) -> dict[str, Any]:
    """The axes of any length: tokens of ids and positions [1, T], and of keys and values [1, heads, T, size]."""
    free = torch.export.Dim.AUTO
    shapes: dict[str, Any] = {}
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            shapes[name] = {1: free}
        elif hasattr(value, "layers"):
            shapes[name] = [{2: free} for _ in value.layers for _ in ("keys", "values")]
    return shapes


# -- files in their programs -------------------------------------------------------------------------------------------
class OnnxRuntimeDecoder:
    """A session with a cache, which stays in ONNX Runtime's memory."""

    def __init__(self, session: Any) -> None:
        self.session = session
        self.outputs = [entry.name for entry in session.get_outputs()]
        self.heads = {
            entry.name: entry.shape for entry in session.get_inputs() if entry.name.startswith("input.")
        }  # fmt: skip
        self.reset()

    def reset(self) -> None:
        """Empty the cache."""
        self.length = 0
        self.past = {
            name: _ort_value(np.zeros((1, shape[1], 0, shape[3]), np.float32)) for name, shape in self.heads.items()
        }  # fmt: skip

    def __call__(self, ids: Tensor) -> Tensor:
        """Logits [1, T, V] of the next tokens [1, T]."""
        places = torch.arange(self.length, self.length + ids.shape[1])[None]
        feed = {"input_ids": _ort_value(ids.numpy()), "position_ids": _ort_value(places.numpy()), **self.past}
        values = dict(zip(self.outputs, self.session.run_with_ort_values(self.outputs, feed), strict=True))
        self.past = {name: values[name.replace("input.", "output.", 1)] for name in self.past}
        self.length += ids.shape[1]
        return torch.from_numpy(values["logits"].numpy())


def _ort_value(array: Any) -> Any:
    import onnxruntime

    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


class OpenVINODecoder:
    """A compiled model whose cache is a state of its request."""

    def __init__(self, compiled: Any) -> None:
        self.request = compiled.create_infer_request()
        self.length = 0

    def reset(self) -> None:
        """Empty the cache."""
        self.request.reset_state()
        self.length = 0

    def __call__(self, ids: Tensor) -> Tensor:
        """Logits [1, T, V] of the next tokens [1, T]."""
        places = torch.arange(self.length, self.length + ids.shape[1])[None]
        beams = np.zeros(1, np.int32)
        feed = {"input_ids": ids.numpy(), "position_ids": places.numpy(), "beam_idx": beams}
        self.length += ids.shape[1]
        return torch.from_numpy(self.request.infer(feed)["logits"])


Decoder = OnnxRuntimeDecoder | OpenVINODecoder

#: Decoders by format, from the result of ``Program.open``.
DECODERS: dict[str, Callable[[Any], Decoder]] = {"onnx": OnnxRuntimeDecoder, "openvino": OpenVINODecoder}


class Generated(NamedTuple):
    """Generated tokens [1, N], seconds of the prompt, and seconds per token."""

    tokens: Tensor
    prompt: float
    token: float


def generate(decoder: Decoder, ids: Tensor, count: int) -> Generated:
    """Greedy tokens after a prompt [1, T]: the first one is from the prompt's logits."""
    decoder.reset()
    begin = time.perf_counter()
    tokens = [decoder(ids)[:, -1:].argmax(-1)]
    between = time.perf_counter()
    for _ in range(count):
        tokens.append(decoder(tokens[-1])[:, -1:].argmax(-1))
    end = time.perf_counter()
    return Generated(torch.cat(tokens, 1), between - begin, (end - between) / count)


# -- measurements ------------------------------------------------------------------------------------------------------
def _loss(logits: Callable[[Tensor], Tensor], windows: list[Batch]) -> float:
    """Nats per token."""
    losses = []
    for window in windows:
        assert window.targets is not None
        losses.append(nn.functional.cross_entropy(logits(window.inputs)[0], window.targets[0]).item())
    return math.fsum(losses) / len(losses)


def _without_cache(decoder: Decoder, ids: Tensor) -> Tensor:
    decoder.reset()
    return decoder(ids)


@torch.no_grad()
def _rows(text: Path | None, program: Program, directory: Path) -> list[tuple[str, ...]]:
    """The rows of the model in a program."""
    loaded = _loaded(text)
    written = files(
        program, directory, lambda: copy.deepcopy(loaded.model),
        lambda model, path: write(model, program.format, path),
        ("dynamic", "int8", "int4"), [], tables=("embed_tokens", "lm_head"),
    )  # fmt: skip
    decoders = [DECODERS[program.format](program.open(file.path)) for file in written]
    exact = _loss(lambda ids: loaded.model(ids).logits, loaded.held_out)
    losses = [_loss(partial(_without_cache, decoder), loaded.held_out) for decoder in decoders]
    prompt = loaded.held_out[0].inputs[:, :PROMPT]
    rounds = [[generate(decoder, prompt, NEW) for decoder in decoders] for _ in range(ROUNDS)]
    prompts, tokens = (
        [statistics.median(getattr(turn[index], part) for turn in rounds) for index in range(len(decoders))]
        for part in ("prompt", "token")
    )
    return [
        (NAME, program.name, file.kind, file.maker, f"{math.expm1(loss - exact):+.2%}", *size_cells(file, written[0]),
         f"{prompts[index] * 1e3:.1f}", f"{prompts[index] / prompts[0]:.2f}",
         f"{tokens[index] * 1e3:.1f}", f"{tokens[index] / tokens[0]:.2f}")
        for index, (file, loss) in enumerate(zip(written, losses, strict=True))
    ]  # fmt: skip


def tables(text: Path | None) -> list[Table]:
    """The tables of all programs, with perplexity on a text, by default the documentation in this Python."""
    facts = {"text": _origin(text)}
    return [Table(f"{NAME}, {program.name}", SECTION, partial(_rows, text, program), facts) for program in PROGRAMS]
