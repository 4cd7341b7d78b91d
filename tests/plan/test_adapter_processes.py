"""Adapters on two processes: bits of one process with the same batch, files of peft, resume, memory and sent bytes."""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from support.processes import run_processes
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import lowbit as lb
from lowbit.demo.gpt import GPT, GPTConfig
from lowbit.integrations.peft import from_pretrained
from lowbit.memory.rss import peak_bytes, reset_peak, resident_bytes
from lowbit.memory.timing import Timings
from lowbit.plan.adapters import adapters_in
from lowbit.plan.fitting import Run
from lowbit.plan.fitting.choices import words
from lowbit.plan.fitting.predict import Predictor
from lowbit.plan.settings import TrainingSettings
from lowbit.plan.subject import Subject

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers", minversion="5")

STRATEGIES = ("ddp", "zero1", "zero2-replicated", "zero2", "zero3")
#: By name: the recipe of the base; None: as it is.
BASES = {"fp32": None, "bf16": None, "int8": "int8-weight-only", "nf4": "nf4", "int4": "int4-weight-only:group32"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.up, self.down = nn.Linear(32, 72), nn.Linear(72, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.down(nn.functional.gelu(self.up(x)))


class Written(nn.Module):
    """A transformer by hand: attention without layers of its own, and a head called head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(32, 97)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def next_tokens(output: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def written() -> nn.Module:
    torch.manual_seed(0)
    return Written().train()


def llama(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(dtype).train()


def mixtral() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config).train()


def batch_of(step: int, labels: bool) -> Any:
    """Four rows; the processes have different numbers of labels."""
    ids = torch.randint(97, (4, 16), generator=torch.Generator().manual_seed(step))
    if not labels:
        return ids
    return {"input_ids": ids, "labels": torch.cat([torch.full((1, 9), -100), ids[:1, 9:]], 1).expand(4, -1).where(
        torch.arange(4)[:, None] == step % 4, ids)}  # fmt: skip


Case = tuple[Callable[[], nn.Module], dict[str, Any]]

DORA = {"r": 4, "target_modules": ["q_proj", "down_proj"], "use_dora": True}
HEAD = {"r": 4, "target_modules": ["v_proj"], "modules_to_save": ["lm_head"]}
CASES: dict[str, Case] = {
    **{name: (llama, {"adapters": 4, "base": base}) for name, base in BASES.items() if name != "bf16"},
    "bf16": (lambda: llama(torch.bfloat16), {"adapters": 4, "loaded": "bf16", "bf16_params": True}),
    "nf4, 8-bit states, checkpoints": (llama, {"adapters": 4, "base": "nf4", "bits": 8, "checkpoint": "block"}),
    "nf4, fused": (llama, {"adapters": 4, "base": "nf4", "attention": True, "fused_loss": True}),
    "DoRA": (llama, {"adapters": adapters_in(peft.LoraConfig(**DORA), "test"), "base": "nf4"}),
    "a head that is saved": (llama, {"adapters": adapters_in(peft.LoraConfig(**HEAD), "test")}),
    "by hand": (written, {"adapters": 4}),
    "by hand, int8": (written, {"adapters": 4, "base": "int8-weight-only"}),
    "mixture": (mixtral, {"adapters": 4, "base": "nf4"}),
}  # fmt: skip
#: In mixed precision, adapters have working copies, except with ``fully_shard``.
MIXED: Case = (llama, {"adapters": 4, "precision": "bf16", "base": "nf4"})
PAIRS = [
    *itertools.product(BASES, STRATEGIES),
    *itertools.product((name for name in CASES if name not in BASES), ("zero1", "zero3")),
    *(("mixed", strategy) for strategy in STRATEGIES if not lb.distributed.STRATEGIES[strategy].parameters),
]
STEPS, STOP = 3, 2
#: The cases that are also stopped and resumed.
RESUMED = ("fp32", "int8", "nf4", "int4", "mixed")


def run_of(name: str, rank: int, **changes: Any) -> Run:
    make, settings = MIXED if name == "mixed" else CASES[name]
    model = make()
    torch.manual_seed(1 + rank)  # adapters begin with the random numbers of the first process
    loss = next_tokens if isinstance(model, Written) else None
    return Run(model, TrainingSettings(**settings, **changes), loss, None, {"lr": 1e-2})


def train(run: Run, steps: range, rank: int | None = None) -> list[float]:
    """Take steps on whole batches, or on the rows of a process."""
    labels = not isinstance(run._plain_model, Written)
    share = slice(None) if rank is None else slice(2 * rank, 2 * rank + 2)
    losses = []
    for step in steps:
        batch = batch_of(step, labels)
        losses.append(run.step({key: rows[share] for key, rows in batch.items()} if labels else batch[share]))
    return losses


def weights(run: Run) -> dict[str, Tensor]:
    """The parameters that are trained, and those that are not, whole."""
    named = run._plain_model.named_parameters()
    return {key: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for key, p in named}


# -- bits -------------------------------------------------------------------------------------------------------------
def _train(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/meet", rank=rank, world_size=2)
    found = {}
    for name, strategy in PAIRS:
        run = run_of(name, rank, gpus=2, strategy=strategy)
        both: list[Any] = [None, None]
        losses = train(run, range(STOP), rank)
        if name in RESUMED:
            lb.distributed.save(Path(path, "checkpoint"), run.model, run.optimizer)
        losses += train(run, range(STOP, STEPS), rank)
        dist.all_gather_object(both, losses)
        found[name, strategy] = [sum(pair) / 2 for pair in zip(*both, strict=True)], weights(run)
        run.save_adapters(Path(path, name, strategy))
        if name in RESUMED:
            resumed = run_of(name, 5 + rank, gpus=2, strategy=strategy)
            lb.distributed.load(Path(path, "checkpoint"), resumed.model, resumed.optimizer)
            assert train(resumed, range(STOP, STEPS), rank) == losses[STOP:], f"{name}, {strategy}: resumed"
            after = weights(resumed)
            assert all(torch.equal(value, after[key]) for key, value in found[name, strategy][1].items())
    if rank == 0:
        torch.save(found, Path(path, "found.pt"))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapters")
    run_processes(_train, (str(path),))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES, "mixed"])
def test_two_processes_have_the_bits_and_files_of_one(name: str, root: Path, tmp_path: Path):
    """One process takes the shares as two micro-batches, whose gradients are summed in the same order."""
    alone = run_of(name, 0, micro_batches=2)
    start = weights(alone)
    losses, expected = train(alone, range(STEPS)), weights(alone)
    changed = {key for key, value in expected.items() if not torch.equal(value, start[key])}
    assert changed and changed == {key for key, p in alone.model.named_parameters() if p.requires_grad}
    alone.save_adapters(tmp_path)
    files = load_file(tmp_path / "adapter_model.safetensors")
    found = torch.load(root / "found.pt", weights_only=True)
    for strategy in (strategy for case, strategy in PAIRS if case == name):
        assert found[name, strategy][0] == losses, strategy
        assert found[name, strategy][1].keys() == expected.keys()
        for key, value in found[name, strategy][1].items():
            assert value.dtype == expected[key].dtype and torch.equal(value, expected[key]), f"{strategy}: {key}"
        directory = root / name / strategy
        assert {file.name for file in directory.iterdir()} == {file.name for file in tmp_path.iterdir()}
        config = (directory / "adapter_config.json").read_text()
        assert config == (tmp_path / "adapter_config.json").read_text()
        saved = load_file(directory / "adapter_model.safetensors")
        assert saved.keys() == files.keys()
        assert all(torch.equal(value, files[key]) and value.dtype == files[key].dtype for key, value in saved.items())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_files_of_two_processes_load_with_peft(strategy: str, root: Path):
    """``fp32`` onto the plain model; ``by hand, int8`` onto the quantized one, with a layer for each projection."""
    found = torch.load(root / "found.pt", weights_only=True)
    for name, recipe, load in (
        ("fp32", None, peft.PeftModel.from_pretrained), ("nf4", "nf4", peft.PeftModel.from_pretrained),
        ("by hand, int8", "int8-weight-only", from_pretrained),
    ):  # fmt: skip
        base = CASES[name][0]()
        if recipe is not None:
            lb.quantize_(base, recipe)
        loaded = dict(load(base, root / name / strategy).named_parameters())
        for key, value in found[name, strategy][1].items():
            assert torch.equal(loaded[f"base_model.model.{key}"], value), f"{name}: {key}"


def _fit(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/meet", rank=rank, world_size=2)
    Timings.seconds = lambda self, call: None  # type: ignore[method-assign]  # no op is run to be timed
    found = {}
    for name, strategy in itertools.product(("nf4", "by hand, int8"), ("ddp", "zero3")):
        run = _planned(name, strategy, rank, 2)
        both: list[Any] = [None, None]
        dist.all_gather_object(both, train(run, range(STEPS), rank))
        found[name, strategy] = [sum(pair) / 2 for pair in zip(*both, strict=True)]
    if rank == 0:
        torch.save(found, Path(path, "found.pt"))
    dist.destroy_process_group()


def _planned(name: str, strategy: str, rank: int, gpus: int) -> Run:
    """By ``lb.fit``; one process takes two micro-batches."""
    model, loss = CASES[name][0](), next_tokens if name.startswith("by hand") else None
    batch = batch_of(0, labels=loss is None)
    require = ("fp32", "adamw", "own attention", "own loss", "everything kept", f"{name.split()[-1]} base")
    more = (strategy, "whole batch") if gpus > 1 else ("whole batch",)
    plan = lb.fit(model, batch, "200%", loss, adapters=4, gpus=gpus, require=(*require, *more), progress=False)
    assert plan.settings.adapters == 4 and plan.settings.base == CASES[name][1]["base"]
    torch.manual_seed(1 + rank)
    run = plan.apply_(model, lr=1e-2)
    if gpus == 1:
        run.settings = replace(run.settings, micro_batches=2)
    return run


@pytest.mark.slow
def test_a_plan_of_fit_for_two_processes_trains_as_one(tmp_path: Path):
    run_processes(_fit, (str(tmp_path),))
    for (name, strategy), losses in torch.load(tmp_path / "found.pt", weights_only=True).items():
        assert losses == train(_planned(name, strategy, 0, 1), range(STEPS)), f"{name}, {strategy}"


# -- memory -----------------------------------------------------------------------------------------------------------
CONFIG = GPTConfig(vocab=2048, context=128, layers=3, heads=4, dim=512, hidden=1408)
BATCH = torch.randint(2048, (4, 128), generator=torch.Generator().manual_seed(0))
RANK = 64
MEASURED = (
    *(TrainingSettings(gpus=2, adapters=RANK, base="nf4", strategy=strategy) for strategy in STRATEGIES),
    TrainingSettings(gpus=2, adapters=RANK, strategy="ddp"),
    TrainingSettings(gpus=2, adapters=RANK, strategy="zero3"),
    TrainingSettings(gpus=2, adapters=RANK, base="int8-weight-only", checkpoint="block", strategy="zero2"),
    TrainingSettings(gpus=2, adapters=RANK, base=BASES["int4"], checkpoint="block", micro_batches=2, strategy="zero3"),
    TrainingSettings(gpus=2, adapters=RANK, base=BASES["int4"], micro_batches=2, strategy="zero2-replicated"),
    TrainingSettings(gpus=2, adapters=RANK, base="int8-weight-only", precision="bf16", strategy="zero1"),
)


def _held(settings: TrainingSettings) -> int:
    """The most that the process holds in the third step, when all buckets exist."""
    run = Run(GPT(CONFIG), settings, None, None, {"lr": 1e-3})
    for _ in range(3):
        gc.collect()
        reset_peak()
        run.step(BATCH)
    return peak_bytes()


def _measure(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/meet", rank=rank, world_size=2)
    libc = ctypes.CDLL(None)
    for option, value in ((-3, 1 << 16), (-1, 1 << 16), (-8, 1)):  # memory goes back to the system as it is freed
        libc.mallopt(option, value)
    for settings in (MEASURED[0], MEASURED[-3], MEASURED[-1]):  # what libraries load and keep
        _held(settings)
    found = []
    for settings in MEASURED:
        gc.collect()
        before = resident_bytes()
        found.append(_held(settings) - before)
    if rank == 0:
        Path(path, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_process_holds_what_is_predicted(tmp_path: Path):
    run_processes(_measure, (str(tmp_path),))
    predictor = Predictor(Subject(GPT(CONFIG), BATCH, None, RANK))
    for settings, held in zip(MEASURED, json.loads((tmp_path / "found.json").read_text()), strict=True):
        whole, quick = predictor.whole(settings).peak_bytes, predictor.predicted(settings).peak_bytes
        print(f"{words(settings)}: {whole / 1e6:.1f} MB predicted, {held / 1e6:.1f} held, {whole / held - 1:+.1%}")
        assert whole == pytest.approx(held, rel=0.05), words(settings)
        assert quick == pytest.approx(whole, rel=0.03), words(settings)


def test_a_plan_counts_that_frozen_weights_have_no_gradients_to_exchange():
    """``ddp`` sends gradients, of adapters alone; ``zero3`` also gathers the frozen weights, twice."""
    predictor = Predictor(Subject(written(), batch_of(0, labels=False), next_tokens, 4), bandwidth=1e3)
    parameters = list(run_of("by hand", 0).model.parameters())
    total, trained = sum(p.nbytes for p in parameters), sum(p.nbytes for p in parameters if p.requires_grad)
    seconds = {
        strategy: predictor.whole(TrainingSettings(adapters=4, gpus=2, strategy=strategy)).seconds
        for strategy in STRATEGIES
    }
    for strategy, sent in (("ddp", trained), ("zero1", 1.5 * trained), ("zero3", total + trained / 2)):
        assert seconds[strategy] == pytest.approx(sent / 1e3, rel=0.05), strategy
