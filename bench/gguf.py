"""Benchmarks GGUF files of SmolLM2 inside llama.cpp: perplexity and speed, next to llama.cpp's own quantization.

``lowbit bench gguf --text FILE --calibration-text FILE`` writes gguf.md.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import lowbit as lb
from lowbit.bench.hidden_grid import hide_grid_
from lowbit.evaluate import data, models
from lowbit.evaluate.loaders import decoded_gguf, token_ids
from lowbit.interop import gguf
from lowbit.machine import provenance
from lowbit.tables import markdown

__all__ = ["Row", "run"]

#: Windows of the text, windows of the calibration text, and tokens of each.
HELD_OUT, SEEN, WINDOW = 12, 64, 512

#: Perplexity in nats per token of a file, and its tokens per second, in a process of its own.
_RUN = """
import json, sys, time
import xllamacpp as xl
path, windows = sys.argv[1], json.load(open(sys.argv[2]))
params = xl.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.warmup, params.verbosity = path, 1024, 1, False, -1
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
server = xl.Server(params)
def asked(ids, token, count):  # the bias chooses the token; log-probabilities do not count the bias
    question = {"prompt": ids, "max_tokens": 1, "temperature": 0, "logit_bias": [[token, 1000]], "logprobs": count}
    answer = server.handle_completions(question)["choices"][0]["logprobs"]
    return answer["content"][0] if answer and answer["content"] else None
losses, whole = [], None
for ids in windows:
    for index in range(1, len(ids)):
        row = asked(ids[:index], ids[index], 1)
        if row is None:  # the token is a part of a character, which llama.cpp holds back: choose another
            rows = {one["id"]: one for one in asked(ids[:index], whole, 200000)["top_logprobs"]}
            row = rows[ids[index]]
        else:
            whole = ids[index]
        assert row["id"] == ids[index], (row, ids[index])
        losses.append(-row["logprob"])
speeds = []
for _ in range(3):
    question = {"prompt": windows[0][:64], "max_tokens": 64, "temperature": 0, "ignore_eos": True}
    answer = server.handle_completions(question)
    speeds.append(answer["timings"]["predicted_per_second"])
print("ANSWER" + json.dumps([sum(losses) / len(losses), sorted(speeds)[1]]))
"""


class Case(NamedTuple):
    """A file: recipe or recipes by layer, and whether it is calibrated."""

    label: str
    recipe: Any
    method: str | None


CASES: tuple[Case, ...] = (
    Case("Q8_0", "q8_0", None),
    Case("Q4_0, nearest", "q4_0", None),
    Case("Q4_0, guided-gptq", "q4_0", "guided-gptq"),
    Case("NVFP4, guided-gptq", "nvfp4-weight-only", "guided-gptq"),
    Case("Q5_0 and Q5_K, guided-gptq", {"*": "q5_0", "down_proj": "q5_k"}, "guided-gptq"),
)


class Row(NamedTuple):
    """Nats per token in llama.cpp and of the decoded weights in torch, bits per weight, and tokens per second."""

    label: str
    bits: float
    inside: float
    outside: float
    speed: float


def inside(path: Path, windows: list[Tensor], directory: Path) -> tuple[float, float]:
    """Nats per token and tokens per second of a file in llama.cpp, on one thread."""
    (directory / "windows.json").write_text(json.dumps([window.flatten().tolist() for window in windows]))
    arguments = [sys.executable, "-c", _RUN, str(path), str(directory / "windows.json")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    answer = next(line for line in done.stdout.splitlines() if line.startswith("ANSWER"))
    loss, speed = json.loads(answer.removeprefix("ANSWER"))
    return loss, speed


@torch.no_grad()
def outside(model: nn.Module, windows: list[Tensor]) -> float:
    """Nats per token of the model in torch, with decoded weights."""
    losses = []
    for window in windows:
        logits = model(window).logits[0, :-1].float()
        losses.append(nn.functional.cross_entropy(logits, window[0, 1:]).item())
    return math.fsum(losses) / len(losses)


def _windows(tokenizer: Any, text: Path, count: int) -> list[Tensor]:
    ids = torch.tensor(token_ids(tokenizer, data.read(text)))
    return list(ids[: count * WINDOW].view(count, 1, WINDOW))


def _model(path: Path) -> nn.Module:
    model, _ = decoded_gguf(path)
    hide_grid_(model)
    return model.bfloat16()


def _measured(case: Case, path: Path, windows: list[Tensor], seen: list[Tensor], tokenizer: Any) -> Row:
    model = _model(path)
    calibration = None if case.method is None else lb.calibrate(model, case.recipe, seen, method=case.method)
    report = lb.quantize_(model, case.recipe, calibration)
    with TemporaryDirectory() as directory:
        file = Path(directory) / "model.gguf"
        lb.export(model, "gguf", file, tokenizer)
        loss, speed = inside(file, windows, Path(directory))
    lb.dequantize_(model)
    weights = sum(row.weights for row in report.layers)
    bits = sum(_stored_bits(row.recipe) * row.weights for row in report.layers) / weights
    return Row(case.label, bits, loss, outside(model.float(), windows), speed)


def _stored_bits(recipe: str | None) -> float:
    """Bits per weight in the file."""
    row = gguf.block_type(lb.recipe(str(recipe)).weight)
    assert row is not None
    return row.nbytes * 8 / row.size


def run(directory: Path, text: Path, calibration_text: Path) -> Path:
    """Measure, and write ``gguf.md``."""
    path = models.find("smollm2").location()
    tokenizer = gguf.tokenizer(path)
    windows, seen = _windows(tokenizer, text, HELD_OUT), _windows(tokenizer, calibration_text, SEEN)
    plain = _model(path)
    with TemporaryDirectory() as scratch:
        file = Path(scratch) / "model.gguf"
        lb.export(plain, "gguf", file, tokenizer)
        base, base_speed = inside(file, windows, Path(scratch))
    rows = [Row("BF16", 16.0, base, outside(plain.float(), windows), base_speed)]
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / "gguf.md"
    for case in CASES:
        begin = time.time()
        rows.append(_measured(case, path, windows, seen, tokenizer))
        print(f"{rows[-1]} {time.time() - begin:.0f} s", file=sys.stderr)
        target.write_text(_page(rows, text, calibration_text))
    return target


def _page(rows: list[Row], text: Path, calibration_text: Path) -> str:
    base = rows[0]
    shown: Callable[[float, float], str] = lambda loss, plain: f"{math.exp(loss):.2f} ({math.expm1(loss - plain):+.1%})"
    cells = [
        (
            row.label,
            f"{row.bits:.2f}",
            shown(row.inside, base.inside),
            shown(row.outside, base.outside),
            f"{row.speed:.0f}",
        )
        for row in rows
    ]  # fmt: skip
    lines = [
        "# GGUF files of SmolLM2-135M in llama.cpp\n",
        *(f"- {name}: {value}" for name, value in provenance().items()),
        f"\nPerplexity on {HELD_OUT} windows of {WINDOW} tokens of `{text.name}`, relative to bf16. Calibration: "
        f"{SEEN} windows of `{calibration_text.name}`. The stored weights of this model lie on a grid of groups of 32 "
        f"columns; channels are permuted first, which keeps the function and hides the grid. Linear layers are "
        f"quantized; embedding and output layer are bf16. llama.cpp of the package xllamacpp (AVX2), one thread.\n",
        markdown(
            ("type", "bits per weight", "in llama.cpp", "decoded, in torch", "tokens per second in llama.cpp"), cells,
            numbers=(1, 2, 3, 4),
        ),
        "",
    ]  # fmt: skip
    return "\n".join(lines)
