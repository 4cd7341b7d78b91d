"""Benchmarks GGUF files of SmolLM2 inside llama.cpp: perplexity, and speed next to lowbit on the same file.

``lowbit bench gguf --text FILE --calibration-text FILE`` writes gguf.md. Losses are recorded in gguf.jsonl next to it
and not measured again; speeds are measured in every run.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import lowbit as lb
from lowbit.bench.hidden_grid import hide_grid_
from lowbit.evaluate import data, models
from lowbit.evaluate.loaders import decoded_gguf, token_ids
from lowbit.files import read_records, write_record
from lowbit.interop import gguf
from lowbit.machine import provenance
from lowbit.tables import markdown

__all__ = ["Case", "run"]

#: Windows of the text, windows of the calibration text, and tokens of each.
HELD_OUT, SEEN, WINDOW = 12, 64, 512

#: Steps of QAT, one window each.
STEPS = 64

#: Rounds of speed, tokens of the prompt, and tokens generated.
ROUNDS, PROMPT, NEW = 3, 64, 32

#: A model in llama.cpp, for the two programs below.
_SERVER = """
import json, sys
import xllamacpp as xl
path, windows = sys.argv[1], json.load(open(sys.argv[2]))
params = xl.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.warmup, params.verbosity = path, 1024, 1, False, -1
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
server = xl.Server(params)
"""

#: Nats per token of a file.
_LOSS = """
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
print("ANSWER", sum(losses) / len(losses))
"""

#: Generated tokens per second.
_SPEED = """
question = {"prompt": windows[0], "max_tokens": int(sys.argv[3]), "temperature": 0, "ignore_eos": True}
print("ANSWER", server.handle_completions(question)["timings"]["predicted_per_second"])
"""

#: Generated tokens per second of a file in lowbit, after the prompt.
_OURS = """
import json, sys, time
import torch
import lowbit as lb
torch.set_num_threads(1)
model = lb.load_model(sys.argv[1], prepack=True)
ids, new = torch.tensor(json.load(open(sys.argv[2]))[:1]), int(sys.argv[3])
def seconds(count):
    begin = time.perf_counter()
    model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False)
    return time.perf_counter() - begin
seconds(2)
print("ANSWER", new / (seconds(new + 1) - seconds(1)))
"""


class Case(NamedTuple):
    """A file: recipe or recipes by layer, method of calibration, and QAT's rates for weights and scales."""

    label: str
    recipe: Any
    method: str | None = None
    rates: tuple[float, float] | None = None


MIX = {"*": "q5_0", "down_proj": "q5_k"}

CASES: tuple[Case, ...] = (
    Case("BF16", None),
    Case("Q8_0", "q8_0"),
    Case("Q4_0, nearest", "q4_0"),
    Case("Q4_0, guided-gptq", "q4_0", "guided-gptq"),
    Case("NVFP4, guided-gptq", "nvfp4-weight-only", "guided-gptq"),
    Case("Q5_0 and Q5_K, guided-gptq", MIX, "guided-gptq"),
    Case("Q4_0, nearest, then QAT", "q4_0", rates=(1.5e-4, 2e-6)),
    Case("Q4_0, guided-gptq, then QAT", "q4_0", "guided-gptq", (1e-5, 1e-5)),
)

#: Files for speeds, which do not depend on the codes.
SPEEDS: tuple[Case, ...] = (
    Case("BF16", None),
    Case("Q8_0", "q8_0"),
    Case("Q4_0", "q4_0"),
    Case("NVFP4", "nvfp4-weight-only"),
    Case("Q5_0 and Q5_K", MIX),
)


class Texts(NamedTuple):
    """Windows ``[1, T]`` of the held-out text and of the calibration text, the model's file and its tokenizer."""

    held_out: list[Tensor]
    seen: list[Tensor]
    path: Path
    tokenizer: Any


def _answer(program: str, file: Path, windows: list[Tensor], *arguments: object) -> float:
    """The number that a program prints for a model file and token ids."""
    ids = file.with_suffix(".json")
    ids.write_text(json.dumps([window.flatten().tolist() for window in windows]))
    command = [sys.executable, "-c", program, str(file), str(ids), *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return float(next(line for line in done.stdout.splitlines() if line.startswith("ANSWER")).split()[1])


@torch.no_grad()
def _in_torch(model: nn.Module, windows: list[Tensor]) -> float:
    """Nats per token of the model in torch."""
    losses = []
    for window in windows:
        logits = model(window).logits[0, :-1].float()
        losses.append(nn.functional.cross_entropy(logits, window[0, 1:]).item())
    return math.fsum(losses) / len(losses)


def _model(path: Path) -> nn.Module:
    """SmolLM2 in bf16, with permuted channels."""
    model, _ = decoded_gguf(path)
    hide_grid_(model)
    return model.bfloat16()


def _train(model: nn.Module, recipe: Any, rates: tuple[float, float], texts: Texts) -> None:
    """QAT of decoded weights and of their scales on the calibration text, with the original model as teacher."""
    teacher = _model(texts.path).float()
    lb.dequantize_(model)
    lb.qat.prepare_(model, recipe, learn_scale=True)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.requires_grad_(False)  # the output layer shares it
    parts: tuple[list[nn.Parameter], list[nn.Parameter]] = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parts["scale" in name].append(parameter)
    groups = [{"params": part, "lr": rate, "most": rate} for part, rate in zip(parts, rates, strict=True)]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    for step in range(STEPS):
        window = texts.seen[step % len(texts.seen)]
        with torch.no_grad():
            taught = teacher(window).logits
        loss = lb.qat.distillation_loss(model(window).logits, taught)
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = group["most"] * min((step + 1) / 8, 1.0) * (1 - step / STEPS)
        optimizer.step()
        optimizer.zero_grad()
        print(f"QAT step {step}: {loss.item():.4f}", file=sys.stderr, flush=True)
    lb.qat.convert_(model)


def _measured(case: Case, texts: Texts, file: Path) -> dict[str, float]:
    """The bits per weight of a file, and its nats per token in llama.cpp and, decoded, in torch."""
    model, bits = _model(texts.path).float(), 16.0  # many processors multiply fp32 faster than bf16
    if case.recipe is not None:
        calibration = None
        if case.method is not None:
            calibration = lb.calibrate(model, case.recipe, texts.seen, method=case.method)
        report = lb.quantize_(model, case.recipe, calibration)
        weights = sum(row.weights for row in report.layers)
        bits = sum(_stored_bits(row.recipe) * row.weights for row in report.layers) / weights
    if case.rates is not None:
        _train(model, case.recipe, case.rates, texts)
    model.bfloat16()
    lb.export(model, "gguf", file, texts.tokenizer)
    inside = _answer(_SERVER + _LOSS, file, texts.held_out)
    model.float()
    if case.recipe is not None:
        lb.dequantize_(model)
    return {"bits": bits, "inside": inside, "outside": _in_torch(model, texts.held_out)}


def _stored_bits(recipe: str | None) -> float:
    """Bits per weight in the file."""
    row = gguf.block_type(lb.recipe(str(recipe)).weight)
    assert row is not None
    return row.nbytes * 8 / row.size


def losses_table(records: Path, texts: Texts, scratch: Path) -> str:
    """Perplexities; a case without a record is measured."""
    cells, base = [], None
    for case in CASES:
        about: dict[str, list[float]] = {"windows": [HELD_OUT, SEEN, WINDOW]}
        if case.rates is not None:
            about["qat"] = [STEPS, *case.rates]
        row = read_records(records).get(case.label)
        if row is None or row["about"] != about:
            begin = time.time()
            row = {"about": about, **_measured(case, texts, scratch / "model.gguf")}
            write_record(records, case.label, row)
            print(f"{case.label}: {row}, {time.time() - begin:.0f} s", file=sys.stderr, flush=True)
        base = base or row
        cells.append(
            (case.label, f"{row['bits']:.2f}", *(_shown(row[key], base[key]) for key in ("inside", "outside")))
        )
    return markdown(("type", "bits per weight", "in llama.cpp", "decoded, in torch"), cells, numbers=(1, 2, 3))


def _shown(loss: float, base: float) -> str:
    return f"{math.exp(loss):.2f} ({math.expm1(loss - base):+.1%})"


def speeds_table(texts: Texts, scratch: Path) -> str:
    """Tokens per second of both programs, medians of rounds in which files and programs take turns."""
    programs = {"llama.cpp": _SERVER + _SPEED, "lowbit": _OURS}
    prompt = [texts.held_out[0][:, :PROMPT]]
    for case in SPEEDS:
        model = _model(texts.path)
        if case.recipe is not None:
            lb.quantize_(model, case.recipe)
        lb.export(model, "gguf", scratch / f"{case.label}.gguf", texts.tokenizer)
    speeds: dict[tuple[str, str], list[float]] = {}
    for _ in range(ROUNDS):
        for case in SPEEDS:
            for name, program in programs.items():
                speed = _answer(program, scratch / f"{case.label}.gguf", prompt, NEW)
                speeds.setdefault((case.label, name), []).append(speed)
    cells = []
    for case in SPEEDS:
        theirs, ours = (statistics.median(speeds[case.label, name]) for name in programs)
        cells.append((case.label, f"{theirs:.1f}", f"{ours:.1f}", f"{ours / theirs:.2f}"))
    return markdown(("type", *programs, "lowbit / llama.cpp"), cells, numbers=(1, 2, 3))


def run(directory: Path, text: Path, calibration_text: Path) -> Path:
    """Measure, and write ``gguf.md``."""
    path = models.find("smollm2").location()
    tokenizer = gguf.tokenizer(path)

    def windows(file: Path, count: int) -> list[Tensor]:
        ids = torch.tensor(token_ids(tokenizer, data.read(file)))
        return list(ids[: count * WINDOW].view(count, 1, WINDOW))

    texts = Texts(windows(text, HELD_OUT), windows(calibration_text, SEEN), path, tokenizer)
    directory.mkdir(parents=True, exist_ok=True)
    about = provenance(packages=("xllamacpp",))
    with TemporaryDirectory() as scratch:
        losses = losses_table(directory / "gguf.jsonl", texts, Path(scratch))
        speeds = speeds_table(texts, Path(scratch))
    rates = [case.rates for case in CASES if case.rates is not None]
    lines = [
        "# GGUF files of SmolLM2-135M in llama.cpp\n",
        *(f"- {name}: {value}" for name, value in about.items()),
        "\nThe stored weights of this model lie on a grid of groups of 32 columns. Channels are permuted first, which "
        "keeps the function and hides the grid. Linear layers are quantized; embedding and output layer are bf16. "
        "llama.cpp is that of the package xllamacpp (AVX2), one thread.\n",
        "## Perplexity\n",
        f"{HELD_OUT} windows of {WINDOW} tokens of `{text.name}`; in parentheses relative to bf16. Calibration: {SEEN} "
        f"windows of `{calibration_text.name}`. QAT: {STEPS} steps of one window each of the same text, with learned "
        f"scales and distillation from the bf16 model; learning rates of weights and scales: "
        f"{'; '.join(f'{weights:g} and {scales:g}' for weights, scales in rates)} (first and second row).\n",
        losses,
        "\n## Tokens per second\n",
        f"{NEW} tokens after a prompt of {PROMPT}, one thread, medians of {ROUNDS} rounds. lowbit: "
        "`lb.load_model(file, prepack=True)` and `generate` of transformers.\n",
        speeds,
    ]  # fmt: skip
    target = directory / "gguf.md"
    target.write_text("\n".join(lines) + "\n")
    return target
