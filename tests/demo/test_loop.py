"""The training loop: stopping and resuming changes no bit, and what stops a run says so."""

import copy
import gc
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from support.runs import SHORT, TINY, made

import lowbit as lb
from lowbit.demo.explain import held
from lowbit.demo.gpt import GPT
from lowbit.demo.loop import TrainConfig, Trainer
from lowbit.demo.optimizers import state_bytes
from lowbit.demo.step import evaluate
from lowbit.interrupts import Interrupted
from lowbit.memory import rss

pytestmark = pytest.mark.filterwarnings("ignore:train.mixed_. this processor")


# -- the loop --------------------------------------------------------------------------------------------------------
def test_learning_rate_warms_up_and_falls():
    config = TrainConfig(steps=100, warmup=10, lr=1.0, final_lr=0.1)
    assert config.lr_at(0) == pytest.approx(0.1) and config.lr_at(9) == 1.0 and config.lr_at(10) == 1.0
    assert config.lr_at(55) == pytest.approx(0.55) and config.lr_at(100) == pytest.approx(0.1)


def test_loss_is_the_mean_over_all_windows(corpus):
    model, windows = GPT(TINY), corpus.held_out_windows(5, 32)
    with torch.no_grad():
        logp = model(windows[:, :-1])
    logp = logp.double().log_softmax(-1).gather(-1, windows[:, 1:, None])
    assert evaluate(model, windows, batch=2) == pytest.approx(-float(logp.mean()), rel=1e-6)


def test_training_learns(corpus, tmp_path):
    history = made(corpus, tmp_path, precision="fp32", steps=30, lr=1e-2).run()
    assert history.held_out[-1][1] < history.train[0] - 0.5
    assert [step for step, _ in history.held_out] == list(range(5, 31, 5))
    assert history.seconds > 0


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("precision", "outside", "optimizer"),
    [
        ("fp32", "bf16", "adamw"), ("bf16", "bf16", "lion4bit"), ("fp8", "bf16", "adamw8bit"),
        ("fp8", "fp32", "muon8bit"), ("fp8-delayed", "bf16", "adamw8bit"), ("fp16", "bf16", "adamw"),
        ("fp16", "fp32", "adamw8bit"),
    ],
)  # fmt: skip
def test_interrupted_and_resumed_equals_straight_through_in_every_bit(corpus, tmp_path, precision, outside, optimizer):
    low = precision.startswith("fp8")
    changes = {"precision": precision, "outside": outside, "optimizer": optimizer, "checkpointing": low}
    straight = made(corpus, tmp_path / "a", **changes)
    straight.run()

    stopped = made(corpus, tmp_path / "b", **changes)
    with pytest.raises(Interrupted) as stop:
        stopped.run(lambda now: os.kill(os.getpid(), signal.SIGINT) if now.step == 10 else None)
    assert stop.value.step == 10 and stop.value.path.exists()

    torch.rand(7)  # another process would not have this one's generator
    resumed = made(corpus, tmp_path / "b", **changes)
    resumed.load()
    assert resumed.step == 10
    resumed.run()

    assert_same_runs(resumed, straight)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("precision", ["fp8-delayed", "nvfp4:keep_blocks=0"])
@pytest.mark.parametrize("stop", [3, 4, 5])
def test_a_run_with_a_tail_resumes_in_every_bit_before_it_at_its_beginning_and_in_it(corpus, tmp_path, precision, stop):
    changes = {"precision": precision, "tail": 0.5, "steps": 8, "compress_activations": True, "save_every": stop}
    straight = made(corpus, tmp_path / "a", **changes)
    straight.run()

    class Stopped(Exception):
        pass

    def leave(now: Trainer) -> None:
        if now.step == stop + 1:
            raise Stopped

    with pytest.raises(Stopped):
        made(corpus, tmp_path / "b", **changes).run(leave)
    resumed = made(corpus, tmp_path / "b", **changes)
    resumed.load()
    assert resumed.step == stop and (resumed.attached is None) == (stop > 4)
    resumed.run()
    assert_same_runs(resumed, straight)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_tail_computes_as_a_run_in_floats(corpus, tmp_path, checkpointing):
    """The oracle is a run in bf16 that begins with the weights and the optimizer's states of the recipe's steps."""
    low = made(corpus, tmp_path / "low", precision="fp8", tail=0.2, compress_activations=True, save_every=16,
               checkpointing=checkpointing)  # fmt: skip
    floats = made(corpus, tmp_path / "floats", precision="bf16")
    assert low.config.tail_begins == 16 and replace(low.config, precision="bf16").tail_begins == 20

    def hand_over(now: Trainer) -> None:
        if now.step == 16:
            floats.model.load_state_dict(copy.deepcopy(now.model.state_dict()))
            floats.optimizer.load_state_dict(copy.deepcopy(now.optimizer.state_dict()))
            floats.step = 16

    low.run(hand_over)
    floats.run()
    assert low.history.train[16:] == floats.history.train and low.history.held_out[-1] == floats.history.held_out[-1]
    assert all(map(torch.equal, low.model.parameters(), floats.model.parameters()))
    assert not any(isinstance(module, lb.train.TrainLinear) for module in low.model.modules())
    lb.train.compress_activations_(low.model)  # refuses a model whose activations are codes already


def test_a_tail_that_is_no_share_and_a_state_from_before_it_are_refused(corpus, tmp_path):
    with pytest.raises(ValueError, match=r"tail must be a fraction of the steps, from 0 to 1, got 1\.5"):
        TrainConfig(tail=1.5)
    trainer = made(corpus, tmp_path, precision="fp8", tail=0.25, steps=4, save_every=3)
    before: list[bytes] = []
    trainer.run(lambda now: before.append(now.path.read_bytes()) if now.step == 4 else None)
    trainer.path.write_bytes(before[0])
    with pytest.raises(ValueError, match=r"is of step 3, before the tail that begins after step 3, .*new Trainer"):
        trainer.load()


def assert_same_runs(resumed: Trainer, straight: Trainer) -> None:
    assert resumed.history.train == straight.history.train
    assert resumed.history.held_out == straight.history.held_out
    assert resumed.scaler.state_dict() == straight.scaler.state_dict()
    ours, theirs = resumed.model.state_dict(), straight.model.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    mine, other = (t.optimizer.state_dict()["state"] for t in (resumed, straight))
    assert all(torch.equal(mine[k][name], other[k][name]) for k in mine for name in mine[k])


@pytest.mark.thinned(3)
@pytest.mark.parametrize("changes", [{"precision": "bf16"}, {"precision": "fp8-delayed", "compress_activations": True}])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_what_a_run_holds_is_measured_beside_it(corpus, tmp_path, changes, checkpointing):
    """The oracle is a step of the run itself, which makes its batch and clips besides."""
    trainer = made(corpus, tmp_path, optimizer="adamw8bit", checkpointing=checkpointing, **changes)
    random = torch.get_rng_state()
    found = held(replace(TINY, vocab=corpus.tokenizer.get_vocab_size()), trainer.config)
    assert torch.equal(random, torch.get_rng_state())
    trainer._train_step()
    gc.collect()  # what the first step leaves, or its end would fall into the second
    peak = lb.memory.allocated_peak(trainer._train_step)
    assert found.step == pytest.approx(peak, abs=4096) and found.states == state_bytes(trainer.optimizer)
    weights, state = (sum(t.nbytes for t in kind()) for kind in (trainer.model.parameters, trainer.model.buffers))
    assert (found.weights, found.gradients) == (weights + state, weights)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("moment", ["while a state is written", "between steps"])
def test_a_killed_run_resumes_in_every_bit(corpus, tmp_path, moment):
    """``kill -9``: nothing is saved at the end, so the run goes on from its last state, which is whole."""
    changes = {"precision": "fp8-delayed", "optimizer": "adamw8bit", "save_every": 5, "eval_every": 20}
    straight = made(corpus, tmp_path / "a", **changes)
    straight.run()

    child = os.fork()
    if child == 0:
        try:
            killed, kill = made(corpus, tmp_path / "b", **changes), lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            rename = os.replace
            if moment != "between steps":
                os.replace = lambda *names: kill() if killed.step == 15 else rename(*names)
            killed.run(lambda now: kill() if now.step == 18 else None)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL

    resumed = made(corpus, tmp_path / "b", **changes)
    resumed.load()
    assert resumed.step == (15 if moment == "between steps" else 10)
    resumed.run()
    assert (resumed.history.train, resumed.history.held_out) == (straight.history.train, straight.history.held_out)
    ours, theirs = resumed.model.state_dict(), straight.model.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    "name", ["adamw16bit", "adamw8bit", "adamw4bit", "lion8bit", "sgd8bit", "muon8bit", "sgd", "adafactor32bit"]
)
def test_every_optimizer_learns(corpus, tmp_path, name):
    history = made(corpus, tmp_path, precision="fp32", optimizer=name, steps=30, lr=1e-2).run()
    assert history.held_out[-1][1] < history.train[0] - 0.3


def test_an_unknown_optimizer_is_named():
    with pytest.raises(ValueError, match=r"unknown optimizer 'adam8bit' \(did you mean adamw8bit\?\)"):
        TrainConfig(optimizer="adam8bit")


def test_outside_is_what_a_recipes_run_computes_in_beside_its_linear_layers(corpus, tmp_path):
    """It changes the run of a recipe, not one in fp32 or bf16; a checkpoint is of one or the other."""

    def losses(precision: str, outside: str) -> list[float]:
        return made(corpus, tmp_path / precision / outside, precision=precision, outside=outside, steps=3).run().train

    assert losses("fp8", "fp32") != losses("fp8", "bf16")
    for plain in ("fp32", "bf16"):
        assert losses(plain, "fp32") == losses(plain, "bf16")
    with pytest.raises(ValueError, match=r"another run \(outside fp32 -> bf16\)"):
        made(corpus, tmp_path / "fp8" / "fp32", precision="fp8", outside="bf16", steps=3).load()
    with pytest.raises(ValueError, match="outside must be one of fp32, bf16, got 'fp16'"):
        TrainConfig(outside="fp16")


def test_peak_memory_sees_a_large_tensor():
    """In a process of its own, without torch: from a large one the system may take pages at any moment."""
    code = (
        "import runpy, sys; rss = runpy.run_path(sys.argv[1])\n"
        "before = rss['peak_bytes']() if rss['reset_peak']() else 0\n"
        "held = b'1' * (64 << 20)\n"
        "assert rss['peak_bytes']() >= before + (60 << 20) if before else rss['peak_bytes']() > 0\n"
    )
    subprocess.run([sys.executable, "-c", code, rss.__file__], check=True)


@pytest.mark.parametrize("moment", ["in the last step", "while the last state is written"])
def test_a_signal_in_the_last_step_stops_too(corpus, tmp_path, monkeypatch, moment):
    trainer = made(corpus, tmp_path, precision="fp32", steps=2)
    last = lambda now: now.step == now.config.steps and signal.raise_signal(signal.SIGINT)
    write = trainer.save
    if moment != "in the last step":
        monkeypatch.setattr(trainer, "save", lambda: (write(), last(trainer)))
    with pytest.raises(Interrupted) as stop:
        trainer.run(last if moment == "in the last step" else lambda now: None)
    assert stop.value.step == trainer.config.steps
    resumed = made(corpus, tmp_path, precision="fp32", steps=2)
    resumed.load()
    assert resumed.run().train == trainer.history.train


# -- watched ---------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_watched_run_has_the_bits_of_a_run_and_its_rows_go_on_after_a_stop(corpus, tmp_path):
    def trainer(name: str, every: int) -> Trainer:
        config = replace(SHORT, precision="fp8", checkpointing=True, save_every=6)
        return Trainer(GPT(TINY, seed=config.seed), corpus, config, tmp_path / name, every)

    plain, watched = trainer("plain", 0), trainer("watched", 4)
    assert plain.run().train == watched.run().train and plain.watch is None
    assert sorted({row.step for row in watched.watch.rows}) == [0, 4, 8, 12, 16]

    class Stopped(Exception):
        pass

    def stop(now: Trainer) -> None:
        if now.step == 9:
            raise Stopped

    with pytest.raises(Stopped):
        trainer("stopped", 4).run(stop)
    again = trainer("stopped", 4)
    again.load()
    assert again.step == 6
    again.run()
    assert list(map(repr, again.watch.rows)) == list(map(repr, watched.watch.rows))


@pytest.mark.parametrize("precision", ["fp32", "fp8"])
def test_a_run_that_fails_names_the_layer(corpus, tmp_path, precision):
    trainer = made(corpus, tmp_path, precision=precision)
    with pytest.raises(FloatingPointError) as caught:
        trainer.run(lambda now: spoil(now.model) if now.step == 2 else None)
    told = str(caught.value)
    assert told.startswith("the loss at step 2 is nan: weight of blocks.1."), told
    assert "has 1 NaN among" in told and "lower the learning rate" in told


def spoil(model: GPT) -> None:
    """One NaN in the first matrix of the second block."""
    with torch.no_grad():
        next(p for p in model.blocks[1].parameters() if p.ndim > 1)[0, 0] = float("nan")
