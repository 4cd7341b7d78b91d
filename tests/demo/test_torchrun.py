"""The demo on several processes: the losses of one, and runs whose processes stop, die or do not answer."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.processes import run_processes
from support.runs import ENGLISH, SHORT, TINY
from typer.testing import CliRunner

from lowbit.cli import app
from lowbit.cli import train as train_command
from lowbit.demo.data import Corpus
from lowbit.demo.experiment import RunSettings
from lowbit.demo.gpt import GPT
from lowbit.demo.loop import History, TrainConfig, Trainer
from lowbit.demo.step import arrange_, loss_of, optimizer_of, update
from lowbit.distributed import torchrun
from lowbit.distributed.torchrun import STRATEGIES
from lowbit.interrupts import Interrupted
from lowbit.train import LossScaler

CONFIG = replace(SHORT, precision="fp32", steps=6, batch=4, warmup=1, eval_every=6, eval_windows=48, save_every=2)
#: With gradients that are clipped in most steps; those of ``CONFIG`` are not, so that no norm counts, which zero2 and
#: zero3 sum by shard.
CLIPPED = replace(CONFIG, clip=0.1)
#: What the command line makes ``CONFIG`` and ``TINY`` of.
OPTIONS = (
    f"--data {ENGLISH} --vocab 300 --context 32 --layers 2 --heads 2 --dim 32 --hidden 64 --steps 6 --batch 4 "
    "--precision fp32 --recipe int8 --save-every 2 --eval-every 6"
).split()

#: The command, of which one process sends itself a signal in the middle of a step: after backward, before the update.
SCRIPT = """
import os, sys
from lowbit.cli import main
from lowbit.demo import loop

update, steps = loop.update, 0
rank, step, number = map(int, os.environ["FAILS"].split())


def fail(*args):
    global steps
    steps += 1
    if int(os.environ["RANK"]) == rank and steps == step:
        os.kill(os.getpid(), number)
    update(*args)


loop.update = fail
sys.argv[0] = "lowbit"
main()
"""


# -- the losses of one process ----------------------------------------------------------------------------------------
def in_two_parts(corpus: Corpus, config: TrainConfig) -> list[float]:
    """The oracle: the losses of one process that takes each batch in two parts, one after the other."""
    model = GPT(TINY, seed=0)
    arrange_(model, config)
    optimizer, losses = optimizer_of(model, config), []
    for step in range(config.steps):
        inputs, targets = corpus.batch(step, config.batch, config.context, config.seed)
        parts = [loss_of(model, *part) / 2 for part in zip(inputs.chunk(2), targets.chunk(2), strict=True)]
        for part in parts:
            part.backward()
        losses.append(sum(part.item() for part in parts))
        for group in optimizer.param_groups:
            group["lr"] = config.lr_at(step)
        update(model, optimizer, LossScaler(enabled=False), config.clip)
    return losses


def train(rank: int, directory: str) -> None:
    """Runs in each way; one that a signal to the second process stops, and that goes on."""
    torch.set_num_threads(1)
    corpus, root = Corpus.load(ENGLISH, TINY.vocab), Path(directory)
    dist.init_process_group("gloo", init_method=f"file://{root}/meet", rank=rank, world_size=2)

    def made(name: str, strategy: str, config: TrainConfig) -> Trainer:
        return Trainer(GPT(TINY, seed=0), corpus, config, root / name, strategy=strategy)

    found = {strategy: made(strategy, strategy, CONFIG).run() for strategy in STRATEGIES}
    low = replace(CONFIG, precision="fp8-delayed", optimizer="adamw8bit", compress_activations=True)
    found["clipped"] = made("clipped", "ddp", CLIPPED).run()
    found["low"] = made("low", "zero1", low).run()
    for name, strategy, config in (("clipped", "ddp", CLIPPED), ("low", "zero3", low)):
        stopped = made(f"{name}-stopped", strategy, config)
        with pytest.raises(Interrupted) as stop:
            stopped.run(lambda now: os.kill(os.getpid(), signal.SIGINT) if rank == 1 and now.step == 3 else None)
        assert stop.value.step == 3
        torch.rand(7)
        again = made(f"{name}-stopped", strategy, config)
        assert again.saved
        again.load()
        assert again.step == 3
        found[f"{name}-stopped"] = again.run()
    if rank == 0:
        (root / "found.json").write_text(json.dumps({name: asdict(history) for name, history in found.items()}))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, History]:
    root = tmp_path_factory.mktemp("ways")
    run_processes(train, (str(root),))
    return {name: History(**values) for name, values in json.loads((root / "found.json").read_text()).items()}


def test_two_processes_have_the_losses_of_one_that_takes_the_batch_in_two_parts_in_every_bit(corpus, found):
    expected = in_two_parts(corpus, CONFIG)
    assert {strategy: found[strategy].train for strategy in STRATEGIES} == dict.fromkeys(STRATEGIES, expected)
    assert found["clipped"].train == in_two_parts(corpus, CLIPPED) != expected


def test_two_processes_have_the_losses_of_one_within_the_rounding_of_its_sums(corpus, found, tmp_path):
    one = Trainer(GPT(TINY, seed=0), corpus, CONFIG, tmp_path).run()
    # A loss is a mean of 128 terms in fp32: of one sum or of two, it differs by at most 128 roundings of half a unit.
    bound = 128 * 2**-24 * one.train[0]
    assert found["ddp"].train == pytest.approx(one.train, abs=bound, rel=0)


@pytest.mark.parametrize("name", ["clipped", "low"])
def test_a_signal_to_one_process_stops_all_after_the_same_step_and_the_run_goes_on_in_every_bit(found, name):
    stopped, straight = found[f"{name}-stopped"], found[name]
    assert (stopped.train, stopped.held_out) == (straight.train, straight.held_out)


# -- processes that are lost ------------------------------------------------------------------------------------------
def start(tmp_path: Path, command: list[str], *options: str, **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "400", **variables}
    environment.pop("LOWBIT_TRACEBACK", None)
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, *command, "train", "--out", str(tmp_path / "run"), *options]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_process_that_is_killed_in_a_step_ends_the_job_and_the_run_goes_on_in_every_bit(found, tmp_path):
    together = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    fails = f"1 4 {int(signal.SIGKILL)}"
    killed = start(tmp_path, [*together, str(tmp_path / "script.py")], *OPTIONS, FAILS=fails)
    _, errors = killed.communicate(timeout=60)
    assert killed.returncode == 1
    assert "process 0 of 2 waited" in errors and "and another process has ended; 2 steps are saved in" in errors, errors
    assert errors.count("start the same command with --resume") == 1
    resumed = start(tmp_path, [*together, "-m", "lowbit"], "--resume", "--json")
    output, errors = resumed.communicate(timeout=60)
    assert resumed.returncode == 0, errors
    history = json.loads(output)["runs"]["fp32"]
    assert (history["train"], history["held_out"]) == (found["ddp"].train, found["ddp"].held_out)
    assert (tmp_path / "run" / "report.md").exists() and (tmp_path / "run" / "model").is_dir()


@pytest.mark.slow
def test_a_process_that_does_not_answer_ends_the_others_within_the_timeout(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    of_group = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    fails = f"1 2 {int(signal.SIGSTOP)}"
    first, second = (
        start(tmp_path, [str(tmp_path / "script.py")], *OPTIONS, "--timeout", "3", FAILS=fails, RANK=str(rank),
              **of_group)
        for rank in range(2)
    )  # fmt: skip
    try:
        _, errors = first.communicate(timeout=60)
    finally:
        second.kill()
        second.communicate()
    assert first.returncode == 1
    assert "did not answer in time; no step is saved yet; start the same command with --resume" in errors, errors
    assert "with a longer --timeout" in errors
    waited = float(errors.split("process 0 of 2 waited ")[1].split(" s ")[0])
    assert 2.9 < waited < 8


# -- what is refused --------------------------------------------------------------------------------------------------
def test_a_batch_that_does_not_divide_is_refused_with_those_that_do(monkeypatch):
    monkeypatch.setattr(torchrun, "processes", lambda: 4)
    monkeypatch.setattr(torchrun, "rank", lambda: 1)
    assert torchrun.share(8) == slice(2, 4)
    with pytest.raises(ValueError, match="give --batch 4 or 8, or torchrun --nproc-per-node a divisor of 6"):
        torchrun.share(6)


def test_what_is_of_one_process_is_refused_beside_a_way():
    with pytest.raises(ValueError, match="strategy must be one of ddp, zero1, zero2, zero3"):
        RunSettings(strategy="zero4")
    with pytest.raises(ValueError, match=r"--watch.*it watches the casts of one process"):
        RunSettings(strategy="ddp", watch=5)


def test_a_way_and_a_run_with_one_are_refused_without_torchrun_and_say_how_to_start_it(tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    out = ["train", "--out", str(tmp_path / "run")]
    refused = CliRunner().invoke(app, [*out, "--strategy", "zero1"])
    assert "torchrun --nproc-per-node 2 -m lowbit train" in str(refused.exception) and not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    RunSettings(strategy="ddp").save(tmp_path / "run")
    refused = CliRunner().invoke(app, [*out, "--resume"])
    assert "with --strategy ddp, needs several processes; start them with torchrun" in str(refused.exception)


def test_a_run_of_one_process_is_not_gone_on_with_by_several(tmp_path, monkeypatch):
    RunSettings().save(tmp_path)
    monkeypatch.setattr(train_command, "process_group", lambda timeout, device: nullcontext())
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused = CliRunner().invoke(app, ["train", "--out", str(tmp_path), "--resume"])
    assert "has one process; resume with lowbit train --resume, without torchrun" in str(refused.exception)
