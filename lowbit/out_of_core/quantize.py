"""quantize_files: quantizes a checkpoint larger than memory, weight by weight."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowbit.calibrate.blockwise import Blockwise
from lowbit.calibrate.calibration import Calibration, Edit
from lowbit.calibrate.choice import Choice, resolve
from lowbit.calibrate.methods import Method
from lowbit.calibrate.resume import Finished, run_of
from lowbit.convert.maker import Allocated, Calibrated, Ruled, Source, decibel
from lowbit.convert.quantize import quantize_from
from lowbit.convert.select import DEFAULT_SKIP, Skip
from lowbit.files import exclusive, resumable, write_json
from lowbit.models.batches import batches_in
from lowbit.models.losses import Loss
from lowbit.models.names import patterns_in
from lowbit.models.ties import storage
from lowbit.nn.linear import INPUT_PARTS, PARTS, QuantLinear
from lowbit.out_of_core.stored import Stored
from lowbit.progress import Progress, reporting
from lowbit.recipes import LayerRecipes, Recipe
from lowbit.report import Report
from lowbit.serialize import huggingface
from lowbit.serialize.layout import CONFIG
from lowbit.serialize.saving import described, distinct
from lowbit.serialize.shards import Checkpoint, Group, Written, pack, write_index
from lowbit.tensor.quantized import Quantized

__all__ = ["quantize_files"]

#: The folder in ``out`` with the finished blocks of a calibration.
_CALIBRATION = "calibration"


@torch.no_grad()
def quantize_files(
    directory: str | Path,
    recipe: str | Recipe | LayerRecipes | Mapping[Any, str | Recipe | None],
    out: str | Path,
    method: str | Method | Iterable[str | Method] | None = None,
    *,
    batches: Iterable[Any] | None = None,
    model: nn.Module | None = None,
    skip: Skip = DEFAULT_SKIP,
    loss: Loss | None = None,
    shard_bytes: int = 1 << 30,
    progress: Progress | bool | None = None,
) -> Report:
    """Quantize a checkpoint of safetensors files to ``out``, with little of it in memory at a time.

    The result is bit-identical to ``calibrate``, ``quantize_`` and ``save_model``. Peak memory without ``batches`` is
    the largest tensor and its quantization. With ``batches`` it is the tensors outside of the model's blocks, one block
    (float and quantized), and each batch's hidden state. The blocks must be a chain, as in a transformer.

    A stopped call resumes after the last finished block or file, with a bit-identical result. ``load_model`` and a
    supported transformers' ``from_pretrained`` read ``out``.

    Args:
        directory: Contains ``model.safetensors``, or several files with an index, as from ``save_pretrained``.
        recipe: As for ``quantize_``.
        out: The output directory.
        method: As for ``calibrate``. ``guided-gptq`` reads each block twice more for every batch.
        batches: As for ``calibrate``.
        model: The model of the checkpoint on the meta device. It is not changed, and weights are converted to its
            dtypes. None: built from the ``config.json`` of transformers.
        skip: As for ``quantize_``.
        loss: As for ``calibrate``.
        shard_bytes: Maximum bytes of a file in ``out``, unless one tensor is larger.
        progress: ``progress(what, done, total)`` is called before each block to calibrate and before each file. None:
            a bar if standard error is a terminal. False: nothing.

    Returns:
        The report of ``quantize_``.

    Raises:
        ValueError: As ``calibrate`` and ``quantize_``; ``out`` has another stopped run; a file is damaged; the
            checkpoint does not fit the model; batches for a model that is not a chain of blocks.
        TypeError: As ``calibrate`` and ``quantize_``.
        FileNotFoundError: A file is missing.
        FileExistsError: ``out`` has other content.
        ImportError: transformers is needed and not installed.
    """
    directory, out = Path(directory), Path(out)
    if shard_bytes < 1:
        raise ValueError(f"quantize_files: shard_bytes must be 1 or more, got {shard_bytes}")
    recipes, choice = resolve(recipe, method, "quantize_files")
    data = batches_in(batches)
    skip = patterns_in(skip, "skip")
    checkpoint = Checkpoint(directory)
    model = huggingface.without_weights(directory) if model is None else copy.deepcopy(model)
    stored = Stored(model, checkpoint)
    dtypes = sorted({str(tensor.dtype) for tensor in model.state_dict().values()})
    about = {
        **run_of(checkpoint.digest(), recipes, choice, skip, data, loss),
        "dtypes": " ".join(dtypes), "shard_bytes": str(shard_bytes),
    }  # fmt: skip
    with exclusive(out, "quantize_files"):
        if data:
            written = Written(out, about)
            if (out / CONFIG).exists():  # all files are written, and the calibration may be partly removed
                calibration = Calibration()
            else:
                finished = Finished(out / _CALIBRATION, about)
                opened = finished.opened()
                if opened is None:
                    run = Blockwise(model, data, recipes, choice, skip, finished, loss, stored)
                    with reporting(progress, "calibrating") as report_block:
                        opened = run.all(report_block)
                calibration = opened
            work = _Work(model, stored, recipes, Calibrated(calibration), skip, calibration.edits)
        else:
            work = _Work(model, stored, recipes, _without_data(recipes, choice, loss), skip)
            written = Written(out, about)
        files = pack(work.groups(), shard_bytes)
        with reporting(progress, "quantizing") as report_file:
            for index, groups in enumerate(files):
                report_file("file", index, len(files))
                if index >= len(written.files):
                    layout = {name: work.tensors[name] for names, _ in groups for name in names}
                    file = f"model-{index + 1:05}-of-{len(files):05}.safetensors"
                    written.write(file, layout, work.make(groups, written.told))
        with resumable(out):
            more = huggingface.write_configs(model, out) if huggingface.is_pretrained(model) else []
            if more is not None:
                write_index(out, [*written.files, *more])
            rows = [{key: file[key] for key in ("file", "sha256", "bytes")} for file in written.files]
            write_json(out / CONFIG, {**described(model, work.tied), "weights": rows})
        shutil.rmtree(out / _CALIBRATION, ignore_errors=True)
        written.forget()
        return work.reported(written.told)


def _without_data(recipes: LayerRecipes, choice: Choice, loss: Loss | None) -> Source:
    if loss is not None:
        raise ValueError("quantize_files: a loss is for method='guided-gptq', which needs data; give batches=")
    if choice.transforms:
        raise ValueError(f"quantize_files: {choice.transforms[0].name} needs data; give batches=")
    source = Ruled(None if choice.weights is None else choice.weights.rule("quantize_files"))
    for row in recipes.recipes:
        source.input_scales("", torch.empty(0, device="meta"), row)  # raises for static scales
    return source


class _Job(NamedTuple):
    """A weight to quantize."""

    name: str  # in the source
    matrix: Tensor  # the weight, or a part of a stored tensor, on the meta device
    recipe: Recipe


class _Planned(Allocated):
    """Allocates weights on the meta device, and records a job for each, by the storage of its codes."""

    def __init__(self) -> None:
        self.jobs: dict[int, _Job] = {}

    def weight(self, name: str, matrix: Tensor, recipe: Recipe) -> tuple[Quantized, None]:
        weight, _ = super().weight(name, matrix, recipe)
        self.jobs[storage(weight.codes)] = _Job(name, matrix, recipe)
        return weight, None


class _Work:
    """The quantized ``model`` on the meta device, and the jobs that make its tensors.

    Attributes:
        tensors: The tensors of the quantized model, each once.
        tied: The first name of each further name of a tensor.
    """

    def __init__(
        self,
        model: nn.Module,
        stored: Stored,
        recipes: LayerRecipes,
        source: Source,
        skip: Skip,
        edits: Iterable[Edit] = (),
    ) -> None:
        self.stored, self.source = stored, source
        self.edits = {edit.name: edit.value for edit in edits}
        planned = _Planned()
        self.report = quantize_from(model, source.recipes(recipes), planned, skip)
        self.tensors, self.tied = distinct(model.state_dict())
        self.layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantLinear)}
        self.jobs = {name: planned.jobs[storage(layer.codes)] for name, layer in self.layers.items()}
        self.row_of = {
            id(inner): row.name for row in self.report.layers for inner in model.get_submodule(row.name).modules()
        }
        for name, tensor in self.tensors.items():
            if tensor.is_meta and name.rpartition(".")[2] not in (*PARTS, *INPUT_PARTS) and not self.stored.has(tensor):
                raise ValueError(
                    f"{name} is made of a part of a tensor, which needs the model in memory; use quantize_"
                )

    def groups(self) -> list[Group]:
        """Groups of tensors that are made together, in the order of the model."""
        groups: dict[str, list[str]] = {}
        for name in self.tensors:
            layer = name.rpartition(".")[0]
            groups.setdefault(layer if self._is_part(name) else name, []).append(name)
        return [(tuple(names), sum(self.tensors[name].nbytes for name in names)) for names in groups.values()]

    def _is_part(self, name: str) -> bool:
        layer, _, part = name.rpartition(".")
        return layer in self.layers and part in (*PARTS, *INPUT_PARTS)

    def make(self, groups: Iterable[Group], energies: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a file, made one after the other. Adds the energies of weights and errors."""
        for names, _ in groups:
            layer = names[0].rpartition(".")[0]
            if not self._is_part(names[0]):
                edit = self.edits.get(names[0])
                yield names[0], self.stored.read(self.tensors[names[0]]) if edit is None else edit
                continue
            try:
                state, energies[layer] = self._quantized(self.jobs[layer])
            except (ValueError, TypeError) as error:
                raise type(error)(f"layer {layer!r}: {error}") from error
            yield from ((name, state[name.rpartition(".")[2]]) for name in names)

    def _quantized(self, job: _Job) -> tuple[dict[str, Tensor], list[float]]:
        matrix = self.stored.read(job.matrix)
        weight, pair = self.source.weight(job.name, matrix, job.recipe)
        assert pair is not None
        layer = QuantLinear(weight, None, job.recipe, self.source.input_scales(job.name, matrix, job.recipe))
        return layer.state_dict(), pair.tolist()

    def reported(self, energies: Mapping[str, list[float]]) -> Report:
        """The report, with the SQNR of each layer."""
        sums: dict[str, list[float]] = {}
        for name, layer in self.layers.items():
            first = name if name in energies else self.tied[f"{name}.codes"].rpartition(".")[0]
            total = sums.setdefault(self.row_of[id(layer)], [0.0, 0.0])
            total[:] = [a + b for a, b in zip(total, energies[first], strict=True)]
        rows = tuple(replace(row, sqnr=decibel(*sums[row.name])) for row in self.report.layers)
        return replace(self.report, layers=rows)
