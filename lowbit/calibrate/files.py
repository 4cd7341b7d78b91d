"""quantize_files: a checkpoint larger than memory in, a quantized one out, one weight after the other."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowbit._version import __version__
from lowbit.calibrate.sources import without_data
from lowbit.casts import refuse_beyond
from lowbit.convert.maker import Allocated, Source, decibel
from lowbit.convert.quantize import quantize_from
from lowbit.convert.report import Report
from lowbit.convert.select import DEFAULT_SKIP
from lowbit.files import write_json
from lowbit.nn.linear import INPUT_PARTS, PARTS, QuantLinear
from lowbit.recipes import Plan, Recipe, plan
from lowbit.serialize import huggingface
from lowbit.serialize.layout import CONFIG
from lowbit.serialize.saving import described, distinct
from lowbit.serialize.shards import Checkpoint, Group, Written, pack, write_index
from lowbit.tensor.quantized import Quantized

__all__ = ["quantize_files"]


@torch.no_grad()
def quantize_files(
    directory: str | Path,
    recipe: str | Recipe | Plan | Mapping[str, str | Recipe | None],
    out: str | Path,
    method: str = "nearest",
    *,
    model: nn.Module | None = None,
    skip: Iterable[str] = DEFAULT_SKIP,
    shard_bytes: int = 1 << 30,
    progress: Callable[[str, int, int], None] | None = None,
) -> Report:
    """Quantize a checkpoint of safetensors files to ``out``, with no more in memory than the largest tensor and what
    quantizing that takes. The bits are those of ``quantize_`` and ``save_model``.

    ``directory``: ``model.safetensors``, or several files with an index, as ``save_pretrained`` writes them.
    ``recipe``, ``skip``: as for ``quantize_``. ``method``: one of ``lowbit.calibrate.METHODS`` that needs no data.
    ``model``: what the checkpoint is of, on the meta device, where it stays; weights are converted to its dtypes. None:
    it is built from the ``config.json`` of transformers. ``load_model`` reads ``out``, given such a model where this
    was; so does ``from_pretrained`` of a transformers that ``lowbit.integrations.transformers`` serves.
    ``shard_bytes``: of a file in ``out``, at most, unless one tensor is larger. ``progress(what, done, total)`` is
    called before each file.
    A call that was stopped goes on after the last finished file, and ends with the same bits.

    Raises: as ``quantize_``; FileNotFoundError for missing files; FileExistsError where ``out`` holds something else;
    ValueError for another run that was stopped there, a damaged file, a checkpoint that does not fit the model, a
    method that needs data or cannot serve a weight; ImportError without transformers.
    """
    directory, out = Path(directory), Path(out)
    if shard_bytes < 1:
        raise ValueError(f"quantize_files: shard_bytes must be 1 or more, got {shard_bytes}")
    chosen, source = plan(recipe), without_data(method, "quantize_files")
    for one in chosen.recipes:
        refuse_beyond(one, "quantize_files", ("output.b",), transform=("hadamard",))
    skip = skip if skip is DEFAULT_SKIP or isinstance(skip, str) else tuple(skip)
    checkpoint = Checkpoint(directory)
    model = huggingface.without_weights(directory) if model is None else copy.deepcopy(model)
    work = _Work(model, checkpoint, chosen, source, skip)
    files = pack(work.groups(), shard_bytes)
    dtypes = sorted({str(tensor.dtype) for tensor in work.tensors.values()})
    about = {
        "model": checkpoint.digest(), "recipe": str(chosen.to_dict()), "method": method, "skip": " ".join(sorted(skip)),
        "dtypes": " ".join(dtypes), "shard_bytes": shard_bytes, "lowbit": __version__,
    }  # fmt: skip
    written = Written(out, about)
    for index, groups in enumerate(files):
        if progress is not None:
            progress("file", index, len(files))
        if index >= len(written.files):
            layout = {name: work.tensors[name] for names, _ in groups for name in names}
            file = f"model-{index + 1:05}-of-{len(files):05}.safetensors"
            written.write(file, layout, work.make(groups, written.told))
    if not huggingface.is_pretrained(model) or huggingface.write_configs(model, out):
        write_index(out, written.files)
    rows = [{key: file[key] for key in ("file", "sha256", "bytes")} for file in written.files]
    write_json(out / CONFIG, {**described(model, work.tied), "weights": rows})
    written.forget()
    return work.reported(written.told)


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
        self.jobs[_storage(made.codes)] = _Job(name, matrix, recipe)
        return made, None


class _Work:
    """What is to be done: ``model``, on the meta device, is quantized; its tensors are made when they are asked for.

    ``tensors``: of the quantized model, each once; ``tied``: the other names of those that have several.
    """

    def __init__(
        self, model: nn.Module, checkpoint: Checkpoint, chosen: Plan, source: Source, skip: Iterable[str]
    ) -> None:
        self.checkpoint, self.source = checkpoint, source
        self.names = _names(model, checkpoint)
        for one in chosen.recipes:
            source.input_scales("", torch.empty(0, device="meta"), one)  # refuses static scales without data
        planned = _Planned()
        self.report = quantize_from(model, chosen, planned, skip)
        self.tensors, self.tied = distinct(model.state_dict())
        self.layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantLinear)}
        self.jobs = {name: planned.jobs[_storage(layer.codes)] for name, layer in self.layers.items()}
        self.row_of = {
            id(inner): row.name for row in self.report.layers for inner in model.get_submodule(row.name).modules()
        }
        for name, tensor in self.tensors.items():
            if (
                tensor.is_meta
                and name.rpartition(".")[2] not in (*PARTS, *INPUT_PARTS)
                and _storage(tensor) not in self.names
            ):
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
                yield names[0], self._plain(self.tensors[names[0]])
                continue
            try:
                made, told[layer] = self._quantized(self.jobs[layer])
            except (ValueError, TypeError) as error:
                raise type(error)(f"layer {layer!r}: {error}") from error
            yield from ((name, made[name.rpartition(".")[2]]) for name in names)

    def _plain(self, tensor: Tensor) -> Tensor:
        """What the checkpoint has for a tensor of the model, in the model's dtype."""
        return self.checkpoint.read(self.names[_storage(tensor)]).to(tensor.dtype) if tensor.is_meta else tensor

    def _quantized(self, job: _Job) -> tuple[dict[str, Tensor], list[float]]:
        whole, m = self._plain(job.matrix), job.matrix
        matrix = whole.as_strided(m.shape, m.stride(), m.storage_offset())
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


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _names(model: nn.Module, checkpoint: Checkpoint) -> dict[int, str]:
    """The checkpoint's name of each tensor of the model, by its storage, with or without the prefix of a base model.

    Raises ValueError where one is missing or has another shape, or where tied ones differ, and for a model that is not
    on the meta device. Warns of tensors that the model does not have.
    """
    held, prefix = checkpoint.entries, f"{getattr(model, 'base_model_prefix', '')}."
    found: dict[int, str] = {}
    missing: dict[int, str] = {}
    used: set[str] = set()
    for name, tensor in model.state_dict().items():
        if not tensor.is_meta:
            raise ValueError(
                f"quantize_files: {name} is not on the meta device; build the model within "
                f"`with lowbit.serialize.empty_weights():`, or call lowbit.quantize_"
            )
        known = next((one for one in (name, name.removeprefix(prefix), prefix + name) if one in held), None)
        if known is None:
            missing[_storage(tensor)] = name
            continue
        if held[known].shape != tensor.shape:
            raise ValueError(
                f"{checkpoint.directory} does not fit this model: {known} is {list(held[known].shape)}, and the model "
                f"has {list(tensor.shape)}"
            )
        used.add(known)
        first = found.setdefault(_storage(tensor), known)
        if first != known and not torch.equal(checkpoint.read(first), checkpoint.read(known)):
            raise ValueError(
                f"{checkpoint.directory} does not fit this model, which has one tensor for {first} and {known}"
            )
    lost = [name for storage, name in missing.items() if storage not in found]
    if lost:
        raise ValueError(
            f"{checkpoint.directory} does not fit this model: it lacks {len(lost)} tensors, such as "
            f"{', '.join(lost[:4])}; it has {', '.join(list(held)[:4])}. Where transformers renames them while it "
            f"loads, use from_pretrained and lowbit.quantize_"
        )
    others = sorted(held.keys() - used)
    if others:
        warnings.warn(
            f"quantize_files leaves out tensors that the model does not have: {', '.join(others[:8])}", stacklevel=5
        )
    return found
