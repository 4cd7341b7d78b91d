"""Plans for large models at the memory of common GPUs, and their sizes checked on truncated models.

``lowbit bench plans`` writes plans.md. Models are configs, without weights. Its plans and measurements are kept in
plans/; a repeated run resumes.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lowbit as lb
from lowbit.bench.fit_steps import WATCHED, Cells
from lowbit.bench.memory import storages
from lowbit.machine import provenance
from lowbit.plan.fitting.choices import words
from lowbit.plan.fitting.predict import Predictor
from lowbit.plan.fitting.run import Run
from lowbit.plan.settings import TrainingSettings
from lowbit.plan.subject import Subject
from lowbit.sizes import amount
from lowbit.tables import markdown

__all__ = ["run"]

#: Budget in GiB, and the device with that memory. The CUDA context and libraries take the rest.
BUDGETS = ((11, "rtx-3060"), (23, "rtx-4090"), (44, "l40s"), (78, "h100"))

#: Tokens of a step, one row.
TOKENS = 2048

#: Rank of the adapters, and what is required of a plan.
RANK = 16
KINDS: dict[str, dict[str, Any]] = {"adapters": {"adapters": RANK}, "all weights": {}}

#: Models by name: class, depth, and config.
MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "Llama-3 8B": ("LlamaForCausalLM", 32, {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 8}),
    "Qwen3 14B": ("Qwen3ForCausalLM", 40, {
        "vocab_size": 151936, "hidden_size": 5120, "intermediate_size": 17408, "num_attention_heads": 40,
        "num_key_value_heads": 8, "head_dim": 128}),
    "Qwen3 32B": ("Qwen3ForCausalLM", 64, {
        "vocab_size": 151936, "hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 128}),
    "Mixtral 8x7B": ("MixtralForCausalLM", 32, {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "gpt-oss 20B": ("GptOssForCausalLM", 24, {
        "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4,
        "sliding_window": 128}),
}  # fmt: skip

#: Blocks of the truncated models, their tokens, and the settings that they train with.
_BLOCKS = (1, 2)
_SHORT = 256
_CHECKED = {
    "adapters": TrainingSettings(adapters=RANK, loaded="bf16", bf16_params=True, checkpoint="block"),
    "adapters on nf4": TrainingSettings(
        adapters=RANK, base="nf4", loaded="bf16", bf16_params=True, optimizer="adamw", bits=8
    ),
}


def _model(name: str, blocks: int | None = None, device: str = "meta") -> nn.Module:
    import transformers

    kind, depth, shape = MODELS[name]
    cls = getattr(transformers, kind)
    config = cls.config_class(**shape, num_hidden_layers=blocks or depth, use_cache=False)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model: nn.Module = cls(config)
    finally:
        torch.set_default_dtype(default)
    return model.train()


def _batch(tokens: int) -> dict[str, Any]:
    ids = torch.randint(2048, (1, tokens), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def _planned(name: str, kind: str, budget: int, device: str) -> dict[str, Any]:
    options = KINDS[kind]
    try:
        plan = lb.fit(
            _model(name), _batch(TOKENS), f"{budget}GiB", device=device, quality="any", progress=False, **options
        )
    except ValueError as error:
        return {"error": str(error)}
    return {"plan": words(plan.settings), "peak": plan.peak_bytes, "seconds": plan.seconds}


def _measured(name: str, blocks: int, settings: TrainingSettings) -> dict[str, int]:
    batch = _batch(_SHORT)
    predictor = Predictor(Subject(_model(name, blocks), batch, None, settings.adapters), parts=False)
    predicted = predictor.whole_peak(settings)
    with tempfile.TemporaryDirectory(prefix="lowbit-plans-") as directory:
        run = Run(_model(name, blocks, "cpu"), settings, None, Path(directory), {"lr": 1e-4})
        run.step(batch)
        gc.collect()
        states = [t for s in run.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
        before = storages([list(run.model.parameters()), list(run.model.buffers()), states, batch])
        peak = before + lb.memory.allocated_peak(lambda: [run.step(batch) for _ in range(WATCHED)], "cpu")
    return {"predicted": predicted, "measured": peak}


def plans(cells: Cells) -> str:
    """Return the table of plans."""
    rows = []
    for name, kind, (budget, device) in itertools.product(MODELS, KINDS, BUDGETS):
        row = cells(f"{name} {kind} {budget}", lambda n=name, k=kind, b=budget, d=device: _planned(n, k, b, d))
        plan = row.get("plan") or "nothing fits" + _least(row["error"])
        peak, seconds = (f"{row['peak'] / 2**30:.1f}", f"{row['seconds']:.2f}") if "peak" in row else ("", "")
        rows.append((name, kind, f"{budget}, {device}", plan, peak, seconds))
    head = ("model", "trained", "budget in GiB, device", "plan", "peak, GiB", "s a step, roofline")
    return markdown(head, rows, numbers=(4, 5))


def _least(error: str) -> str:
    """Return the smallest budget that an error of ``lb.fit`` names, in words."""
    _, found, rest = error.partition("; the least is ")
    return f"; the least is {rest.split(',')[0]}" if found else ""


def checks(cells: Cells) -> str:
    """Return the table of truncated models, and a summary."""
    rows, errors = [], []
    for name, blocks, (kind, settings) in itertools.product(MODELS, _BLOCKS, _CHECKED.items()):
        row = cells(f"{name} {blocks} {kind}", lambda n=name, b=blocks, s=settings: _measured(n, b, s))
        errors.append(row["measured"] / row["predicted"] - 1)
        rows.append((name, str(blocks), kind, amount(row["predicted"]), amount(row["measured"]),
                     f"{100 * errors[-1]:+.2f}%"))  # fmt: skip
    size = sorted(map(abs, errors))
    summary = (f"{len(errors)} truncated models: the measured peak differs from the predicted one by "
               f"{statistics.median(size):.2%} in the median and by {size[-1]:.2%} at most.")  # fmt: skip
    head = ("model", "blocks", "trained", "predicted", "measured", "difference")
    return f"{summary}\n\n{markdown(head, rows, numbers=range(3, 6))}"


def run(directory: Path) -> Path:
    """Plan and measure, and write ``plans.md``."""
    about = provenance("lowbit bench plans", packages=("transformers", "peft"))
    cells = Cells(directory / "plans", str(about["commit"]))
    checked, planned = checks(cells), plans(cells)
    lines = [
        "# Plans for large models\n",
        *(f"- {name}: {value}" for name, value in about.items()),
        f"- commits of the measurements: {cells.commits()}",
        f"\n`lb.fit(model, batch, budget, device=..., quality=\"any\")` for models of transformers in bf16, without "
        f"weights, for one row of {TOKENS} tokens. Adapters have rank {RANK}. Times are rooflines of data sheets, "
        "which a real step does not reach.\n",
        planned,
        "\n## Sizes, checked\n\n"
        f"The same models with one and two blocks train on a CPU, on one row of {_SHORT} tokens. Peaks are those of "
        "torch's allocator in three steps.\n",
        checked,
    ]  # fmt: skip
    path = directory / "plans.md"
    path.write_text("\n".join(lines) + "\n")
    return path
