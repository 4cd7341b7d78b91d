"""Measure one cell of the table, a model with a recipe and layout, in this process.

``python -m lowbit.evaluate.cell`` reads a request from standard input and writes the result to a file.
"""

from __future__ import annotations

import copy
import gc
import json
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lowbit as lb
from lowbit.convert import model_bytes
from lowbit.evaluate import models
from lowbit.evaluate.data import Wanted, digest
from lowbit.evaluate.loaders import Loaded
from lowbit.evaluate.peers import PEERS, bytes_of
from lowbit.evaluate.tasks import TASKS
from lowbit.files import write_atomically, write_record
from lowbit.machine import provenance
from lowbit.memory.rss import peak_bytes, reset_peak

__all__ = [
    "FLOATS",
    "OUTPUTS",
    "PACKED",
    "PLAIN",
    "REFERENCE",
    "Request",
    "calibrated",
    "measure",
    "weight_error",
]

#: The layouts, and the unquantized rows.
PLAIN, PACKED = "plain", "packed"
FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16}

#: The row whose outputs are the reference, and the suffix of the file for these outputs.
REFERENCE, OUTPUTS = "fp32", ".reference.pt"

#: Steps of a method in addition to ``lb.calibrate``: fold BatchNorm first, and correct biases at the end.
FOLD, BIAS = "fold", "bias"

#: Tokens of the prompt, and tokens whose generation is timed; the first of them is left out.
PROMPT, NEW_TOKENS = 16, 24


@dataclass(frozen=True)
class Request:
    """The settings of a cell."""

    model: str
    recipe: str
    """A recipe of lowbit, a float format or a peer."""
    layout: str
    dtype: str
    """Dtype of the unquantized parts."""
    text: str | None
    windows: int
    limit: int
    table: str
    """JSON Lines file for the result."""
    name: str
    """Name of the result in the file."""
    key: Mapping[str, Any]
    """Everything that determines the result; a result with another key is measured again."""
    method: str | None = None
    """Calibration methods, ``fold`` and ``bias``, joined by ``+``; None: the default without data."""
    calibration: str | None = None
    """File of the calibration text, if the model needs one."""
    samples: int = 0
    """Windows, texts or images for calibration."""
    part: str = "all"

    @property
    def steps(self) -> list[str]:
        """The parts of ``method``."""
        return [] if self.method is None else self.method.split("+")

    @property
    def wanted(self) -> Wanted:
        return Wanted(Path(self.text) if self.text else None, self.windows, self.limit, self.part)

    @property
    def calibrated_on(self) -> Wanted:
        """The calibration data."""
        text = Path(self.calibration) if self.calibration else None
        return Wanted(text, self.samples, self.samples, "calibration")


def calibrated(steps: list[str]) -> list[str]:
    """The names for ``lb.calibrate``."""
    return [name for name in steps if name not in (FOLD, BIAS)]


def measure(request: Request) -> dict[str, Any]:
    """The result of a cell, as in its file; raises the errors of loading.

    If ``quantize_`` rejects the recipe, or no layer has a packed layout, the result has the reason as ``refused``.
    """
    row = models.find(request.model)
    loaded = row.load(row.location(), request.wanted)
    result: dict[str, Any] = {"task": loaded.task, "data": loaded.origin, "data_sha256": digest(loaded.batches)}
    model = loaded.model
    measures_saved = bool(row.held) and request.recipe not in FLOATS
    if row.held and not measures_saved:
        lb.dequantize_(model)
    calibration = None
    data: list[Any] = []
    if request.method is not None:
        data = [batch.inputs for batch in row.load(row.location(), request.calibrated_on).batches]
        gc.collect()
        reset_peak()
        start = time.perf_counter()
        try:
            if FOLD in request.steps:
                lb.fold_(model)
            calibration = lb.calibrate(model, request.recipe, data, calibrated(request.steps))
        except (ValueError, TypeError) as error:
            return {"key": dict(request.key), "result": {**result, "refused": str(error)}, "made": provenance()}
        result.update(seconds_to_calibrate=time.perf_counter() - start, peak_bytes_to_calibrate=peak_bytes())
    plain = copy.deepcopy(model) if BIAS in request.steps else None
    converted = _apply_layout(model, request) if measures_saved else _convert(model, request, calibration)
    result.update(converted)
    if plain is not None and "refused" not in converted:
        start = time.perf_counter()
        result["corrected"] = len(lb.correct_bias_(model, plain, data).converted)
        result["seconds_to_calibrate"] += time.perf_counter() - start
    del plain, data
    if "refused" not in converted:
        result.update(_evaluate(loaded, request))
    return {"key": dict(request.key), "result": result, "made": provenance()}


def _convert(model: nn.Module, request: Request, calibration: lb.Calibration | None) -> dict[str, Any]:
    """Quantize ``model`` in place and apply the layout; returns times, bytes and numbers of layers."""
    if request.recipe in FLOATS:
        model.to(FLOATS[request.recipe])
        return {"bytes": model_bytes(model), "converted": 0, "left": []}
    if request.recipe in PEERS:
        return _convert_by_peer(model.to(FLOATS[request.dtype]), request.recipe)
    weights = {name: value.detach() for name, value in model.named_parameters()}
    start = time.perf_counter()
    try:
        report = lb.quantize_(model, request.recipe, calibration)
    except (ValueError, TypeError) as error:
        return {"refused": str(error)}
    facts = {
        "converted": len(report.converted), "left": sorted(report.left),
        "seconds_to_quantize": time.perf_counter() - start, "weight_error": weight_error(model, weights),
    }  # fmt: skip
    del weights
    layout = _apply_layout(model, request)
    return layout if "refused" in layout else {**facts, **layout}


def _apply_layout(model: nn.Module, request: Request) -> dict[str, Any]:
    """Cast the unquantized parts of ``model``, and pack the rest for the packed layout; returns its bytes."""
    model.to(FLOATS[request.dtype])
    if request.layout != PACKED:
        return {"bytes": model_bytes(model)}
    before = [type(module) for module in model.modules()]
    start = time.perf_counter()
    lb.prepack_(model)
    if [type(module) for module in model.modules()] == before:
        return {"refused": f"no layer of {request.recipe} has a packed layout"}
    return {"seconds_to_pack": time.perf_counter() - start, "bytes": model_bytes(model)}


def _convert_by_peer(model: nn.Module, name: str) -> dict[str, Any]:
    """Let another package quantize ``model`` in place."""
    start = time.perf_counter()
    PEERS[name].quantize(model)
    return {"seconds_to_quantize": time.perf_counter() - start, "bytes": bytes_of(model)}


def weight_error(model: nn.Module, weights: Mapping[str, Tensor]) -> float | None:
    """The relative error of all quantized weights in Frobenius norm; None if no weight has its original name.

    Args:
        model: The quantized model.
        weights: The original parameters by name.
    """
    error = total = 0.0
    for name, module in model.named_modules():
        weight, plain = getattr(module, "weight", None), weights.get(f"{name}.weight")
        if isinstance(weight, lb.Quantized) and plain is not None:
            expected = plain.double().movedim(1, -1).flatten()  # weights of convolutions have channels last
            error += float((weight.dequantize().double().flatten() - expected).square().sum())
            total += float(expected.square().sum())
    return (error / total) ** 0.5 if total else None


def _evaluate(loaded: Loaded, request: Request) -> dict[str, Any]:
    """Quality, speed and peak memory of the model."""
    task, model = TASKS[loaded.task], loaded.model
    dtype = FLOATS[request.recipe if request.recipe in FLOATS else request.dtype]
    stored = Path(request.table).with_suffix(OUTPUTS)
    is_reference = task.reference and request.recipe == REFERENCE
    reference = torch.load(stored, weights_only=True) if task.reference and not is_reference else None
    gc.collect()
    was_reset = reset_peak()
    values: dict[str, list[float]] = {}
    outputs, rates = [], []
    # Tensors of some peers do not support inference mode.
    with torch.no_grad() if request.recipe in PEERS else torch.inference_mode():
        loaded.call(model, _as(loaded.batches[0].inputs, dtype))  # the first call plans and allocates
        for index, batch in enumerate(loaded.batches):
            start = time.perf_counter()
            output = loaded.call(model, _as(batch.inputs, dtype))
            rates.append(batch.units / (time.perf_counter() - start))
            target = output.float() if is_reference else None if reference is None else reference[index]
            for name, items in task.measure(batch, output.float(), target).items():
                values.setdefault(name, []).extend(items)
            if is_reference:
                outputs.append(output.float().clone())
        generated = _generation(loaded)
    if is_reference:
        write_atomically(stored, lambda file: torch.save(outputs, file))
    return {
        "values": values, "units_per_second": statistics.median(rates), "generated_per_second": generated,
        "peak_bytes": peak_bytes(), "peak_of": "evaluation" if was_reset else "process",
        "threads": torch.get_num_threads(),
    }  # fmt: skip


def _as(inputs: Any, dtype: torch.dtype) -> Any:
    """Cast float inputs to ``dtype``."""
    return inputs.to(dtype) if isinstance(inputs, Tensor) and inputs.is_floating_point() else inputs


def _generation(loaded: Loaded) -> float | None:
    """Generated tokens per second of one sequence with a KV cache: the median over single tokens."""
    if loaded.generate is None:
        return None
    prompt = loaded.batches[0].inputs[:, :PROMPT]
    count = min(NEW_TOKENS, loaded.batches[0].inputs.shape[1] - prompt.shape[1])
    if count < 2:
        return None
    stamps = [time.perf_counter() for _ in loaded.generate(loaded.model, prompt, count)]
    return 1 / statistics.median(b - a for a, b in pairwise(stamps))


def main() -> None:
    """Measure the cell whose request is on standard input."""
    request = Request(**json.load(sys.stdin))
    write_record(Path(request.table), request.name, measure(request))


if __name__ == "__main__":
    main()
