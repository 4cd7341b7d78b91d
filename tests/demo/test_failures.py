"""Runs that cannot go on: losses that are not finite, learning rates that diverge, a disk that is full."""

import contextlib
import errno
import math
import os
import re

import pytest
import torch
from support.runs import SHORT, made
from torch import nn

from lowbit import files
from lowbit.demo.gpt import GPT, GPTConfig
from lowbit.demo.loop import TrainConfig, Trainer

pytestmark = pytest.mark.filterwarnings("ignore:train.mixed_. this processor")


def test_a_loss_that_is_not_finite_stops_the_run(corpus, tmp_path):
    trainer = made(corpus, tmp_path, precision="fp32")
    with torch.no_grad():
        trainer.model.embed.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="lower the learning rate"):
        trainer.run()
    assert not trainer.path.exists(), "a broken state must not be saved"


def test_an_inf_in_a_batch_under_fp16_skips_the_step_and_loses_nothing(corpus, tmp_path):
    trainer = made(corpus, tmp_path, precision="fp16", steps=8, save_every=4)
    seen, kept = [], {}

    def spoil(module: nn.Module, _: object, rows: torch.Tensor) -> torch.Tensor | None:
        """The third batch's embeddings."""
        seen.append(module.training and torch.is_grad_enabled())
        return rows.index_fill(1, torch.tensor([5]), float("inf")) if seen[-1] and sum(seen) == 3 else None

    trainer.model.embed.register_forward_hook(spoil)

    def look(now: Trainer) -> None:
        kept[now.step] = [p.detach().clone() for p in now.model.parameters()]

    history = trainer.run(look)
    assert history.skipped == 1 and [math.isfinite(loss) for loss in history.train] == [step != 2 for step in range(8)]
    assert all(map(torch.equal, kept[2], kept[3])) and not all(map(torch.equal, kept[3], kept[4]))
    assert trainer.scaler.get_scale() == 2.0**15 and all(math.isfinite(loss) for _, loss in history.held_out)
    again = made(corpus, tmp_path, precision="fp16", steps=8, save_every=4)
    again.load()
    assert again.history.skipped == again.scaler.skipped == 1 and again.scaler.get_scale() == 2.0**15


@pytest.mark.parametrize(("steps", "told"), [(20, "the loss at step 8 is .*, with 8 steps skipped"), (5, "held-out")])
def test_weights_that_are_lost_under_fp16_stop_the_run(corpus, tmp_path, steps, told):
    """After eight steps in succession without a finite loss, or where the run would end with such weights."""
    trainer = made(corpus, tmp_path, precision="fp16", steps=steps, eval_every=100)

    def lose(now: Trainer) -> None:
        with torch.no_grad():
            now.model.lm_head.weight.fill_(float("nan"))

    ready = pytest.warns(UserWarning, match="the loss itself is not finite") if steps > 8 else contextlib.nullcontext()
    with ready, pytest.raises(FloatingPointError, match=f"{told}.*lower the learning rate") as caught:
        trainer.run(lose)
    assert "wider format than fp16" in str(caught.value) and not trainer.path.exists()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_learning_rate_that_diverges_stops_the_run(corpus, tmp_path, precision):
    trainer = made(corpus, tmp_path, precision=precision, lr=1e30, steps=40, warmup=1)
    with pytest.raises(FloatingPointError, match=r"lower the learning rate \(1e\+30\)"):
        trainer.run()
    assert not trainer.path.exists()


def test_a_disk_that_is_full_keeps_the_state_before_and_says_what_to_do(corpus, tmp_path, monkeypatch):
    trainer = made(corpus, tmp_path, precision="fp32", steps=6, save_every=2)

    def full(file: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fill(now: Trainer) -> None:
        if now.step == 3:
            monkeypatch.setattr(files, "flush", full)

    with pytest.raises(OSError, match="the state after step 4 is not saved") as caught:
        trainer.run(fill)
    text = str(caught.value)
    assert caught.value.errno == errno.ENOSPC and str(trainer.path) in text
    assert "No space left on device" in text and "the state that was saved before it is whole" in text
    assert re.search(r"make room for [\d,]+ bytes, then continue with --resume", text)
    assert list(tmp_path.iterdir()) == [trainer.path], "no half of a file is left"
    monkeypatch.undo()
    resumed = made(corpus, tmp_path, precision="fp32", steps=6, save_every=2)
    resumed.load()
    assert resumed.step == 2
    straight = made(corpus, tmp_path / "other", precision="fp32", steps=6)
    assert resumed.run().train == straight.run().train
    monkeypatch.setattr(files, "flush", full)
    with pytest.raises(OSError, match="none was saved before it"):
        made(corpus, tmp_path / "new", precision="fp32", steps=1).run()


@pytest.mark.parametrize(("precision", "advised"), [("fp32", False), ("bf16", True), ("fp8", True)])
def test_a_wider_format_is_advised_where_there_is_one(corpus, tmp_path, precision, advised):
    trainer = made(corpus, tmp_path, precision=precision)
    with torch.no_grad():
        trainer.model.embed.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError) as caught:
        trainer.run()
    assert (f"wider format than {precision}" in str(caught.value)) == advised


def test_a_gpt_of_one_block_is_checkpointed(corpus, tmp_path):
    model = GPT(GPTConfig(vocab=300, context=32, layers=1, heads=2, dim=32, hidden=64))
    config = TrainConfig(**{**vars(SHORT), "steps": 2, "precision": "fp8", "checkpointing": True})
    trainer = Trainer(model, corpus, config, tmp_path)
    assert type(model.blocks[0]).__name__ == "CheckpointedBlock", "its class is one that recomputes"
    assert len(trainer.run().train) == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_settings_that_are_no_numbers_are_refused(value):
    with pytest.raises(ValueError, match="lr must be positive and finite"):
        TrainConfig(lr=value)
