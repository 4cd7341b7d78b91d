"""Encoders and a classifier in ``lowbit bench engines``: error, size and time of one forward."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import lowbit as lb
from lowbit.bench.engines_programs import PROGRAMS, Inputs, Program, Section, Table, files, size_cells
from lowbit.evaluate import models
from lowbit.evaluate.data import Wanted
from lowbit.evaluate.tasks import Batch

__all__ = ["tables"]

#: Rounds in which the files of a model take turns, and held-out batches.
ROUNDS, HELD_OUT = 7, 4

SECTION = Section(
    "Encoders and a classifier",
    f"Error: norm of the difference to torch's fp32 output, relative to that output, mean of up to {HELD_OUT} held-out "
    f"batches. Milliseconds: one batch on one thread, medians of {ROUNDS} rounds in which the files of a model take "
    "turns. Both quantizers of a pair have equal bits. Only static int8 uses data: the same batches for both. OpenVINO "
    "runs with inference precision f32.",
    ("model", "program", "bits", "quantizer", "error", "size", "relative to fp32", "ms", "relative to fp32"),
    4,
)

Run = Callable[[Inputs], Tensor]


class Task(NamedTuple):
    """A model in fp32, with its batches.

    Attributes:
        model: Loads it; the output is a tensor.
        calibration, held_out: Disjoint batches of positional arguments.
        compared: The quantizers that are measured, by their keys in ``Program.own``.
        tables: Patterns of the embeddings that are quantized as well.
        floats: Patterns of layers that stay floats with dynamic inputs.
    """

    model: Callable[[], nn.Module]
    calibration: list[Inputs]
    held_out: list[Inputs]
    compared: tuple[str, ...]
    tables: tuple[str, ...] = ()
    floats: tuple[str, ...] = ()


# -- models ------------------------------------------------------------------------------------------------------------
class Sentence(nn.Module):
    """A sentence encoder: the mean of the last hidden states."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[..., None].to(hidden.dtype)
        embedding: Tensor = (hidden * mask).sum(1) / mask.sum(1)
        return embedding


class Frames(nn.Module):
    """Whisper's encoder."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: Tensor) -> Tensor:
        hidden: Tensor = self.model(features).last_hidden_state
        return hidden


def _evaluated(
    name: str, wrap: Callable[[nn.Module], nn.Module], of: Callable[[Batch], Inputs]
) -> tuple[Callable[[], nn.Module], list[Inputs], list[Inputs]]:
    """The loader and both parts of the data of a model of ``lowbit evaluate``."""
    row = models.find(name)
    parts = [row.load(row.location(), Wanted(limit=32, part=part)) for part in ("calibration", "held out")]
    calibration, held_out = ([of(batch) for batch in part.batches] for part in parts)
    return lambda: wrap(row.load(row.location(), Wanted(limit=2)).model.float()).eval(), calibration, held_out


def _efficientnet() -> Task:
    return Task(*_evaluated("efficientnet-lite0", lambda model: model, lambda batch: (batch.inputs,)), ("static",))


def _minilm() -> Task:
    loaded = _evaluated("minilm", Sentence, lambda batch: (batch.inputs["input_ids"], batch.inputs["attention_mask"]))
    return Task(*loaded, ("dynamic", "int8", "int4"), tables=("word_embeddings",))


def _whisper() -> Task:
    torch.manual_seed(1)
    calibration, held_out = ([(torch.randn(1, 80, 3000).cumsum(-1) / 40,) for _ in range(2)] for _ in range(2))
    return Task(_random_whisper, calibration, held_out, ("dynamic", "int8", "int4"), floats=("conv1", "conv2"))


def _random_whisper() -> nn.Module:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    torch.manual_seed(0)
    config = WhisperConfig(d_model=384, encoder_layers=4, encoder_attention_heads=6, encoder_ffn_dim=1536)
    return Frames(WhisperEncoder(config)).eval()


TASKS: dict[str, Callable[[], Task]] = {
    "EfficientNet-Lite0": _efficientnet,
    "MiniLM-L6": _minilm,
    "Whisper's encoder (tiny, random weights)": _whisper,
}


# -- measurements ------------------------------------------------------------------------------------------------------
def _in_onnxruntime(session: Any) -> Run:
    names = [entry.name for entry in session.get_inputs()]

    def run(inputs: Inputs) -> Tensor:
        feed = {name: value.numpy() for name, value in zip(names, inputs, strict=True)}
        return torch.from_numpy(session.run(None, feed)[0])

    return run


def _in_openvino(compiled: Any) -> Run:
    return lambda inputs: torch.from_numpy(compiled([value.numpy() for value in inputs])[0])


RUNS: dict[str, Callable[[Any], Run]] = {"onnx": _in_onnxruntime, "openvino": _in_openvino}


def _error(output: Tensor, expected: Tensor) -> float:
    return ((output - expected).norm() / expected.norm()).item()


def _rows(name: str, program: Program, directory: Path) -> list[tuple[str, ...]]:
    """The rows of a model in a program."""
    task = TASKS[name]()
    written = files(
        program, directory, task.model,
        lambda model, path: lb.export(model, program.format, path, batch=task.held_out[0]),
        task.compared, task.calibration, task.tables, task.floats,
    )  # fmt: skip
    runs = [RUNS[program.format](program.open(file.path)) for file in written]
    held_out = task.held_out[:HELD_OUT]
    with torch.no_grad():
        model = task.model()
        exact = [model(*inputs) for inputs in held_out]
    errors = [statistics.mean(map(_error, map(run, held_out), exact)) for run in runs]
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(ROUNDS):
        for run, times in zip(runs, seconds, strict=True):
            begin = time.perf_counter()
            run(held_out[0])
            times.append(time.perf_counter() - begin)
    medians = list(map(statistics.median, seconds))
    return [
        (name, program.name, file.kind, file.maker, f"{error:.2%}", *size_cells(file, written[0]),
         f"{median * 1e3:.1f}", f"{median / medians[0]:.2f}")
        for file, error, median in zip(written, errors, medians, strict=True)
    ]  # fmt: skip


def tables() -> list[Table]:
    """The tables of all models and programs."""
    return [
        Table(f"{name}, {program.name}", SECTION, partial(_rows, name, program))
        for name in TASKS
        for program in PROGRAMS
    ]
