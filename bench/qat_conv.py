"""Benchmarks quantization-aware training of EfficientNet-Lite0 with one scale per weight tensor.

``lowbit bench qat-conv`` writes qat_conv.md. Channels of depthwise convolutions differ much in magnitude, most of all
with folded BatchNorm, so one scale per weight leaves few codes for the small ones. The network is trained without
labels to match the logits of the unquantized network on crops of photographs; other photographs are held out.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowbit as lb
from lowbit.evaluate import metrics, models
from lowbit.evaluate.data import Wanted
from lowbit.evaluate.tasks import Batch
from lowbit.machine import provenance
from lowbit.tables import markdown

#: Static int8 inputs, and weights with one scale per channel or per tensor.
CHANNELS, TENSOR = "int8-static-affine", "int8-static-affine:tensor"

#: Steps, images per step, learning rate, and the number of batches that observers see before.
STEPS, BATCH, RATE, OBSERVED = 60, 8, 5e-5, 8


class Row(NamedTuple):
    """A network: the method, figures relative to fp32 on held-out photographs, and seconds."""

    recipe: str
    what: str
    top: metrics.Estimate
    cosine: metrics.Estimate
    seconds: float


def figures(
    model: nn.Module, held: Sequence[Batch], exact: Sequence[Tensor]
) -> tuple[metrics.Estimate, metrics.Estimate]:
    """The share of crops with fp32's class, and the cosine of the logits: means over photographs."""
    top, cosine = [], []
    with torch.inference_mode():
        for batch, y in zip(held, exact, strict=True):
            out = model(batch.inputs).double()
            top.append(float((out.argmax(-1) == y.argmax(-1)).double().mean()))
            cosine.append(float(torch.tensor(metrics.cosine(out, y.double())).mean()))
    return metrics.mean(top), metrics.mean(cosine)


def train(model: nn.Module, teacher: nn.Module, images: Sequence[Tensor]) -> None:
    """Train ``model`` in place to match the teacher's logits. Scales use a tenth of the learning rate."""
    model.train()
    with torch.no_grad():
        for x in images[:OBSERVED]:
            model(x)
    named = list(model.named_parameters())
    scales = [p for name, p in named if name.endswith(("_scale", "_zero_point"))]
    weights = [p for name, p in named if not name.endswith(("_scale", "_zero_point"))]
    optimizer = torch.optim.Adam([{"params": weights, "lr": RATE}, {"params": scales, "lr": RATE / 10}])
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)
    everything, generator = torch.cat(list(images)), torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        x = everything[torch.randint(len(everything), (BATCH,), generator=generator)]
        x = x.flip(3) if torch.rand((), generator=generator) < 0.5 else x
        with torch.no_grad():
            taught = teacher(x)
        loss = F.mse_loss(model(x), taught) / taught.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()


def measure() -> list[Row]:
    """All rows, in order."""
    row = models.MODELS["efficientnet-lite0"]
    held, seen = (row.load(row.location(), Wanted(part=part)) for part in ("held out", "calibration"))
    teacher = held.model
    images = [batch.inputs for batch in seen.batches]
    with torch.inference_mode():
        exact = [teacher(batch.inputs) for batch in held.batches]
    lb.fold_(teacher)
    rows: list[Row] = []

    def add(recipe: str, what: str, model: nn.Module, start: float) -> None:
        rows.append(Row(recipe, what, *figures(model, held.batches, exact), time.perf_counter() - start))

    def trained(start: nn.Module, what: str) -> None:
        began, model = time.perf_counter(), copy.deepcopy(start).requires_grad_(True)
        lb.qat.prepare_(model, TENSOR, learn_scale=True, observe=OBSERVED)
        train(model, teacher, images)
        prepared = figures(model, held.batches, exact)
        lb.qat.convert_(model)
        add(TENSOR, what, model, began)
        assert rows[-1][2:4] == prepared, "the deployed network is not the trained one"

    for recipe in (CHANNELS, TENSOR):
        start, model = time.perf_counter(), copy.deepcopy(teacher)
        lb.quantize_(model, recipe, lb.calibrate(model, recipe, images, "nearest"))
        add(recipe, "nearest", model, start)
    trained(teacher, "nearest, then QAT")
    start, model = time.perf_counter(), copy.deepcopy(teacher)
    lb.quantize_(model, TENSOR, lb.calibrate(model, TENSOR, images, ("guided-gptq", "mse")))
    lb.correct_bias_(model, teacher, images)
    add(TENSOR, "guided-gptq, bias corrected", model, start)
    lb.dequantize_(model)
    trained(model, "guided-gptq, bias corrected, then QAT")
    return rows


def _cells(row: Row) -> tuple[str, ...]:
    top, cosine = row.top, row.cosine
    return (
        f"`{row.recipe}`", row.what, f"{top.value:.1%} ± {top.error:.1%}", f"{cosine.value:.4f} ± {cosine.error:.1g}",
        f"{row.seconds:.0f}",
    )  # fmt: skip


def run(directory: Path) -> Path:
    """Train, measure, and write ``qat_conv.md``."""
    torch.manual_seed(0)
    rows = measure()
    about = provenance()
    lines = [
        "# Quantization-aware training of EfficientNet-Lite0\n",
        f"BatchNorm folded; {STEPS} steps of {BATCH} crops, mean squared error to the logits of fp32, learned scales. "
        "Figures are of the deployed networks on photographs held out, beside fp32, with standard errors over them.\n",
        *(f"- {name}: {value}" for name, value in about.items()),
        "",
        markdown(("recipe", "", "same top class", "cosine", "s"), map(_cells, rows), numbers=(2, 3, 4)),
    ]  # fmt: skip
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "qat_conv.md"
    path.write_text("\n".join(lines) + "\n")
    return path
