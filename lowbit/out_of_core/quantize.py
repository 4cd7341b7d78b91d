"""quantize_files: a checkpoint larger than memory in, a quantized one out, one weight after the other."""

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
from lowbit.calibrate.choice import Choice, planned
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

#: Where in ``out`` the finished blocks are while a model is calibrated.
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
    """Quantize a checkpoint of safetensors files to ``out``, with little of it in memory at a time. The bits are those
    of ``calibrate``, ``quantize_`` and ``save_model``.

    Without ``batches`` that is the largest tensor, and what quantizing it takes. With them it is what is outside of the
    model's blocks, one block in its own dtype and as codes, and of each batch what goes from block to block; the blocks
    have to be a chain, as those of a transformer are.

    ``directory``: ``model.safetensors``, or several files with an index, as ``save_pretrained`` writes them.
    ``recipe``, ``skip``: as for ``quantize_``. ``method``, ``batches``, ``loss``: as for ``calibrate``. ``guided-gptq``
    reads each block twice more for every batch.
    ``model``: what the checkpoint is of, on the meta device, where it stays; weights are converted to its dtypes. None:
    it is built from the ``config.json`` of transformers. ``load_model`` reads ``out``, given such a model where this
    was; so does ``from_pretrained`` of a transformers that ``lowbit.integrations.transformers`` serves.
    ``shard_bytes``: of a file in ``out``, at most, unless one tensor is larger. ``progress(what, done, total)`` is
    called before each block that is calibrated, and before each file. None: a bar where standard error is a terminal;
    False: nothing.
    A call that was stopped goes on after the last finished block or file, and ends with the same bits.

    Raises: as ``calibrate`` and ``quantize_``; FileNotFoundError for missing files; FileExistsError where ``out`` holds
    something else; ValueError for another run that was stopped there, a damaged file, a checkpoint that does not fit
    the model, batches for a model that is no chain of blocks; ImportError without transformers.
    """
    directory, out = Path(directory), Path(out)
    if shard_bytes < 1:
        raise ValueError(f"quantize_files: shard_bytes must be 1 or more, got {shard_bytes}")
    chosen, choice = planned(recipe, method, "quantize_files")
    data = batches_in(batches)
    skip = patterns_in(skip, "skip")
    checkpoint = Checkpoint(directory)
    model = huggingface.without_weights(directory) if model is None else copy.deepcopy(model)
    stored = Stored(model, checkpoint)
    dtypes = sorted({str(tensor.dtype) for tensor in model.state_dict().values()})
    about = {
        **run_of(checkpoint.digest(), chosen, choice, skip, data, loss),
        "dtypes": " ".join(dtypes), "shard_bytes": str(shard_bytes),
    }  # fmt: skip
    with exclusive(out, "quantize_files"):
        if data:
            written = Written(out, about)
            if (out / CONFIG).exists():  # every file is there, and the calibration half removed
                found = Calibration()
            else:
                finished = Finished(out / _CALIBRATION, about)
                opened = finished.opened()
                if opened is None:
                    run = Blockwise(model, data, chosen, choice, skip, finished, loss, stored)
                    with reporting(progress, "calibrating") as calibrated:
                        opened = run.all(calibrated)
                found = opened
            work = _Work(model, stored, chosen, Calibrated(found), skip, found.edits)
        else:
            work = _Work(model, stored, chosen, _without_data(chosen, choice, loss), skip)
            written = Written(out, about)
        files = pack(work.groups(), shard_bytes)
        with reporting(progress, "quantizing") as quantized:
            for index, groups in enumerate(files):
                quantized("file", index, len(files))
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


def _without_data(chosen: LayerRecipes, choice: Choice, loss: Loss | None) -> Source:
    """The Source of a choice, where there are no batches."""
    if loss is not None:
        raise ValueError("quantize_files: a loss is for method='guided-gptq', which needs data; give batches=")
    if choice.transforms:
        raise ValueError(f"quantize_files: {choice.transforms[0].name} needs data; give batches=")
    source = Ruled(None if choice.weights is None else choice.weights.rule("quantize_files"))
    for one in chosen.recipes:
        source.input_scales("", torch.empty(0, device="meta"), one)  # refuses static scales
    return source


class _Job(NamedTuple):
    """A weight to quantize: what ``source`` calls it, and on the meta device, which part of which tensor it is."""

    name: str
    matrix: Tensor
    recipe: Recipe


class _Planned(Allocated):
    """Allocates weights on the meta device, and notes what each is to be made of, by the storage of its codes."""

    def __init__(self) -> None:
        self.jobs: dict[int, _Job] = {}

    def weight(self, name: str, matrix: Tensor, recipe: Recipe) -> tuple[Quantized, None]:
        made, _ = super().weight(name, matrix, recipe)
        self.jobs[storage(made.codes)] = _Job(name, matrix, recipe)
        return made, None


class _Work:
    """What is to be done: ``model``, on the meta device, is quantized; its tensors are made when they are asked for.

    ``tensors``: of the quantized model, each once; ``tied``: the other names of those that have several.
    """

    def __init__(
        self,
        model: nn.Module,
        stored: Stored,
        chosen: LayerRecipes,
        source: Source,
        skip: Skip,
        edits: Iterable[Edit] = (),
    ) -> None:
        self.stored, self.source = stored, source
        self.edits = {edit.name: edit.value for edit in edits}
        chosen = source.recipes(chosen)
        planned = _Planned()
        self.report = quantize_from(model, chosen, planned, skip)
        self.tensors, self.tied = distinct(model.state_dict())
        self.layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantLinear)}
        self.jobs = {name: planned.jobs[storage(layer.codes)] for name, layer in self.layers.items()}
        self.row_of = {
            id(inner): row.name for row in self.report.layers for inner in model.get_submodule(row.name).modules()
        }
        for name, tensor in self.tensors.items():
            if tensor.is_meta and name.rpartition(".")[2] not in (*PARTS, *INPUT_PARTS) and not self.stored.has(tensor):
                raise ValueError(f"{name} is made of a part of a tensor, which is only done in memory; use quantize_")

    def groups(self) -> list[Group]:
        """The tensors that are made together, in the order of the model."""
        found: dict[str, list[str]] = {}
        for name in self.tensors:
            layer = name.rpartition(".")[0]
            found.setdefault(layer if self._is_part(name) else name, []).append(name)
        return [(tuple(names), sum(self.tensors[name].nbytes for name in names)) for names in found.values()]

    def _is_part(self, name: str) -> bool:
        layer, _, part = name.rpartition(".")
        return layer in self.layers and part in (*PARTS, *INPUT_PARTS)

    def make(self, groups: Iterable[Group], told: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a file, each made when it is asked for; ``told`` gets the energies of weights and errors."""
        for names, _ in groups:
            layer = names[0].rpartition(".")[0]
            if not self._is_part(names[0]):
                edit = self.edits.get(names[0])
                yield names[0], self.stored.read(self.tensors[names[0]]) if edit is None else edit
                continue
            try:
                made, told[layer] = self._quantized(self.jobs[layer])
            except (ValueError, TypeError) as error:
                raise type(error)(f"layer {layer!r}: {error}") from error
            yield from ((name, made[name.rpartition(".")[2]]) for name in names)

    def _quantized(self, job: _Job) -> tuple[dict[str, Tensor], list[float]]:
        matrix = self.stored.read(job.matrix)
        made, pair = self.source.weight(job.name, matrix, job.recipe)
        assert pair is not None
        layer = QuantLinear(made, None, job.recipe, self.source.input_scales(job.name, matrix, job.recipe))
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
