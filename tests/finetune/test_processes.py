"""Fine-tuning on several processes: losses and weights of one process, state and result of every strategy."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from support.processes import run_processes
from torch import Tensor

import lowbit as lb
from lowbit.distributed.torchrun import STRATEGIES
from lowbit.finetune import Session, TuneConfig, add_adapters, read, split
from lowbit.finetune.session import first_batch
from lowbit.interrupts import Interrupted

transformers = pytest.importorskip("transformers", minversion="5")

CONFIG = TuneConfig(steps=4, rows=4, length=16, lr=1e-3, warmup=1, eval_every=2, save_every=4, clip=0.5)
#: By name: the strategy, the configuration, and the recipe of a quantized base.
RUNS: dict[str, tuple[str, TuneConfig, str | None]] = {
    **{strategy: (strategy, CONFIG, None) for strategy in STRATEGIES},
    "bf16 zero1": ("zero1", replace(CONFIG, precision="bf16"), None),
    "bf16 zero2-replicated": ("zero2-replicated", replace(CONFIG, precision="bf16"), None),
    "delayed zero1": ("zero1", replace(CONFIG, precision="fp8-delayed", outside="fp32"), None),
    "adapters zero3": ("zero3", replace(CONFIG, adapters=2), None),
    "nf4 ddp": ("ddp", replace(CONFIG, adapters=2), "nf4"),
    "nf4 zero2": ("zero2", replace(CONFIG, adapters=2), "nf4"),
}


def session_of(
    model_path: Path, directory: Path, config: TuneConfig, strategy: str | None, base: str | None = None
) -> Session:
    model = transformers.LlamaForCausalLM.from_pretrained(model_path).train()
    if base is not None:
        lb.quantize_(model, base)
    if config.adapters:
        model = add_adapters(model, config.adapters).train()
    directory.mkdir(parents=True, exist_ok=True)
    documents = read(model_path / "sums.jsonl", transformers.AutoTokenizer.from_pretrained(model_path))
    return Session(model, *split(documents, config.length), config, directory, None, strategy)


def train(rank: int, model_path: str, directory: str) -> None:
    torch.set_num_threads(1)
    path, root = Path(model_path), Path(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    dist.init_process_group("gloo", init_method=f"file://{root}/meet", rank=rank, world_size=2)
    found = {}
    for name, (strategy, config, base) in RUNS.items():
        session = session_of(path, root / name, config, strategy, base)
        assert not session.saved
        history = session.train()
        session.write_model(root / name / "model", tokenizer)
        found[name] = (history.train, history.held_out)
    for name in ("zero1", "nf4 zero2", "delayed zero1"):
        strategy, config, base = RUNS[name]
        stopped = session_of(path, root / "stopped" / name, config, strategy, base)
        with pytest.raises(Interrupted):
            stopped.train(lambda now: os.kill(os.getpid(), signal.SIGINT) if rank == 1 and now.step == 3 else None)
        torch.rand(7)
        resumed = session_of(path, root / "stopped" / name, config, strategy, base)
        resumed.load()
        assert resumed.step == 3
        history = resumed.train()
        resumed.write_model(root / "stopped" / name / "model", tokenizer)
        found[f"stopped {name}"] = (history.train, history.held_out)
    if rank == 0:
        (root / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def root(directory, tmp_path_factory):
    root = tmp_path_factory.mktemp("processes")
    run_processes(train, (str(directory), str(root)))
    return root


def weights(path: Path) -> dict[str, Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    return {name: value.detach() for name, value in model.named_parameters()}


def off(found: dict[str, Tensor], expected: dict[str, Tensor], start: dict[str, Tensor]) -> float:
    """The norm of the difference, relative to that of the change by training."""
    assert found.keys() == expected.keys()
    changes = [(found[name] - expected[name], expected[name] - start[name]) for name in expected]
    difference, change = (torch.stack([pair[i].square().sum() for pair in changes]).sum().sqrt() for i in (0, 1))
    return float(difference / change)


# -- the oracle: torch, without lowbit's runs --------------------------------------------------------------------------
def by_torch(session: Session, path: Path) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of one process that takes each batch whole, of which the loss is a mean over all labels."""
    model = transformers.LlamaForCausalLM.from_pretrained(path).train()
    optimizer, losses = torch.optim.AdamW(model.parameters(), weight_decay=0.0), []
    for step in range(CONFIG.steps):
        loss = model(**session.rows.batch(step, CONFIG.rows), use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), CONFIG.clip)
        for group in optimizer.param_groups:
            group["lr"] = CONFIG.lr_at(step)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: value.detach().clone() for name, value in model.named_parameters()}


def test_every_strategy_has_losses_and_weights_of_one_process(root, directory, tmp_path):
    session = session_of(directory, tmp_path, CONFIG, None)
    counts = [(session.rows.batch(step, 4)["labels"][:, 1:] != -100).sum(1) for step in range(CONFIG.steps)]
    assert any(int(count[:2].sum()) != int(count[2:].sum()) for count in counts), "processes have different weights"
    losses, expected = by_torch(session, directory)
    found, start = json.loads((root / "found.json").read_text()), weights(directory)
    for strategy in STRATEGIES:
        assert found[strategy][0] == pytest.approx(losses, rel=1e-5), strategy
        assert off(weights(root / strategy / "model"), expected, start) < 1e-2, strategy


@pytest.mark.parametrize("name", [name for name in RUNS if name not in STRATEGIES])
def test_a_run_on_two_processes_is_that_of_one(name, root, directory, tmp_path):
    _, config, base = RUNS[name]
    session = session_of(directory, tmp_path, config, None, base)
    history = session.train()
    session.write_model(tmp_path / "model", transformers.AutoTokenizer.from_pretrained(directory))
    losses, held_out = json.loads((root / "found.json").read_text())[name]
    close = 1e-5 if config.precision is None else 1e-2  # other sums round to other bf16 and fp8 numbers
    assert losses == pytest.approx(history.train, rel=close)
    assert [loss for _, loss in held_out] == pytest.approx([loss for _, loss in history.held_out], rel=close)
    found, start = weights(root / name / "model"), weights(directory)
    assert off(found, weights(tmp_path / "model"), start) < (1e-2 if config.precision is None else 0.3)
    if config.precision == "bf16":
        kept = torch.cat([(value.bfloat16().float() != value).flatten() for value in found.values()])
        assert kept.float().mean() > 0.9, "masters are written, not their bf16 copies"


@pytest.mark.parametrize("name", ["zero1", "nf4 zero2", "delayed zero1"])
def test_a_signal_to_one_process_stops_all_and_the_run_goes_on_in_every_bit(name, root):
    found = json.loads((root / "found.json").read_text())
    assert found[f"stopped {name}"] == found[name]
    ours, straight = (weights(root / part / name / "model") for part in ("stopped", "."))
    assert all(torch.equal(value, straight[key]) for key, value in ours.items())


def test_what_is_of_one_process_is_refused_beside_a_strategy(directory, tmp_path):
    config = replace(CONFIG, precision="fp8", watch=2)
    with pytest.raises(ValueError, match=r"--watch.*it watches the casts of one process"):
        session_of(directory, tmp_path, config, "ddp")
    with pytest.raises(ValueError, match=r"--tail.*training state in the last steps"):
        session_of(directory, tmp_path, replace(config, watch=0, tail=0.5), "zero1")


# -- plans and the command ---------------------------------------------------------------------------------------------
def train_by_plan(rank: int, model_path: str, directory: str) -> None:
    torch.set_num_threads(1)
    path, root = Path(model_path), Path(directory)
    dist.init_process_group("gloo", init_method=f"file://{root}/meet", rank=rank, world_size=2)
    model = transformers.LlamaForCausalLM.from_pretrained(path).train()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    documents = split(read(path / "sums.jsonl", tokenizer), CONFIG.length)
    batch = first_batch(model, documents[0], CONFIG)
    assert batch["input_ids"].shape == (2, 16)
    plan = lb.fit(model, batch, "200%", require=("fp32", "adamw", "zero1"), gpus=2, progress=False)
    session = Session(model, *documents, CONFIG, root, plan)
    assert session.together.strategy == "zero1" == plan.settings.strategy
    history = session.train()
    session.write_model(root / "model", tokenizer)
    if rank == 0:
        (root / "found.json").write_text(json.dumps(history.train))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_plan_for_two_processes_trains_as_one(directory, tmp_path):
    run_processes(train_by_plan, (str(directory), str(tmp_path)))
    losses, expected = by_torch(session_of(directory, tmp_path / "one", CONFIG, None), directory)
    assert json.loads((tmp_path / "found.json").read_text()) == pytest.approx(losses, rel=1e-2)
    assert off(weights(tmp_path / "model"), expected, weights(directory)) < 0.3


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--strategy", "zero3", "--memory", "100MiB", "--precision", "fp32")])
def test_the_command_prints_once_and_resumes(options, directory, tmp_path):
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "lowbit", "train",
        str(directory), "--text", str(directory / "sums.jsonl"), "--steps", "4", "--batch", "4", "--context", "16",
        "--lr", "1e-3", "--out", str(tmp_path / "out"), *options,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "400"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("held-out loss:") == 1 and done.stdout.count("report:") == 1
    again = subprocess.run([*command, "--resume", "--json"], capture_output=True, text=True, env=environment)
    assert again.returncode == 0, again.stderr
    report = (tmp_path / "out" / "report.md").read_text()
    assert f"2, {options[1] if options else 'ddp'}" in report
    session = session_of(directory, tmp_path / "one", replace(CONFIG, clip=1.0, warmup=10), None)
    assert json.loads(again.stdout)["train"] == pytest.approx(session.train().train, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "options"),
    [
        (None, ("--strategy", "ddp")),
        ("int8-weight-only", ("--strategy", "zero1")),
        ("int4-weight-only:group32", ("--strategy", "zero2")),
        ("nf4", ("--strategy", "zero3")),
        (None, ("--strategy", "zero3", "--memory", "100MiB", "--precision", "fp32")),
    ],
)
def test_the_command_trains_adapters_as_one_process_does(base, options, directory, tmp_path, run):
    """Losses, the adapter and the model of one process; peft, transformers and ``lowbit evaluate`` read the result."""
    peft = pytest.importorskip("peft")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "400"}
    source = directory
    if base is not None:
        source = tmp_path / "base"
        model = transformers.LlamaForCausalLM.from_pretrained(directory)
        lb.quantize_(model, base)
        lb.save_model(model, source)
        transformers.AutoTokenizer.from_pretrained(directory).save_pretrained(source)

    def arguments(name: str) -> list[str]:
        return [
            "train", str(source), "--text", str(directory / "sums.jsonl"), "--steps", "4", "--batch", "4",
            "--context", "16", "--lr", "1e-2", "--adapters", "4", "--json", "--out", str(tmp_path / name),
        ]  # fmt: skip

    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "lowbit"]
    done = subprocess.run([*launch, *arguments("two"), *options], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    shared = json.loads(done.stdout)
    alone = json.loads(run(*arguments("one"), *(() if "--memory" not in options else options[2:])))
    near = 1e-5 if "--memory" not in options else 1e-2  # a plan may choose other optimizer states
    assert shared["train"] == pytest.approx(alone["train"], rel=near)
    (_, before), *_, (_, after) = shared["held_out"]
    assert after < before and after == pytest.approx(alone["held_out"][-1][1], rel=near)
    assert f"| processes | 2, {options[1]} |" in (tmp_path / "two/report.md").read_text()
    files = [{file.name for file in (tmp_path / name / "adapter").iterdir()} for name in ("one", "two")]
    assert files[0] == files[1]
    one, both = (load_file(tmp_path / name / "adapter/adapter_model.safetensors") for name in ("one", "two"))
    shapes = [{key: (value.shape, value.dtype) for key, value in tensors.items()} for tensors in (one, both)]
    assert shapes[0] == shapes[1]
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "two/model").float().eval()
    load = transformers.AutoModelForCausalLM.from_pretrained if base is None else lb.load_model
    adapted = peft.PeftModel.from_pretrained(load(source).float().eval(), tmp_path / "two/adapter")
    ids = torch.arange(2, 18)[None]
    assert (adapted(ids).logits - merged(ids).logits).norm() < 1e-2 * merged(ids).logits.norm()
    if base is None:  # transformers reads a model and its adapter from the directory of the adapter alone
        found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "two/adapter").float().eval()
        assert torch.equal(found(ids).logits, adapted(ids).logits)
    config = json.loads((tmp_path / "two/adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(source)
    out = tmp_path / "evaluated"
    told = run("evaluate", str(tmp_path / "two/model"), "--text", str(directory / "sums.jsonl"), "--recipes", "int8",
               "--windows", "1", "--out", str(out), "--json")  # fmt: skip
    assert "perplexity" in told and (out / "evaluate.md").exists()
