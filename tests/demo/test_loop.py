"""Text, tokenizer, batches, checkpointing, and above all: stopping and resuming changes no bit."""

import contextlib
import copy
import errno
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.variants import best, serving
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from torch import nn

import lowbit as lb
from lowbit import files
from lowbit.demo import experiment, text, tokenizer
from lowbit.demo.data import Corpus
from lowbit.demo.experiment import Settings
from lowbit.demo.explain import held
from lowbit.demo.gpt import GPT, GPTConfig
from lowbit.demo.loop import Interrupted, TrainConfig, Trainer, evaluate
from lowbit.demo.optimizers import state_bytes
from lowbit.files import read_checked, write_atomically, write_checked
from lowbit.memory.checkpoint import checkpoint_blocks_
from lowbit.models import find_blocks

pytestmark = pytest.mark.filterwarnings("ignore:train.mixed_. this processor")
ENGLISH = Path(__file__).parents[1] / "data" / "english.txt"
TINY = GPTConfig(vocab=300, context=32, layers=2, heads=2, dim=32, hidden=64)
SHORT = TrainConfig(steps=20, batch=2, context=32, warmup=4, eval_every=5, eval_windows=4, save_every=100)


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors this small gain nothing from a second thread, and lose a lot where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus.load(ENGLISH, TINY.vocab)


# -- text ------------------------------------------------------------------------------------------------------------
def test_prose_keeps_english_and_leaves_code():
    raw = """
    The simple form of the statement is equivalent to the following:

        if __debug__:
            if not expression: raise AssertionError

    It’s “evaluated” once, at
    the start — and never again.

    >>> this(is, code)

    Too short.
    """
    assert list(text.prose(raw)) == ["""It's "evaluated" once, at the start - and never again."""]


def test_held_out_text_of_the_standard_library_is_not_trained_on():
    documents = text.standard_library()
    assert [d.name for d in documents[:2]] == ["assert", "assignment"], "topics first, in the order of their names"
    train, held = text.split(documents)
    assert sum(len(d.text) for d in train) > 200_000
    assert 0.03 < sum(len(d.text) for d in held) / sum(len(d.text) for d in documents) < 0.2
    assert not {p for d in train for p in d.paragraphs} & {p for d in held for p in d.paragraphs}


def test_split_moves_no_document_when_one_is_added():
    documents = [text.Document(f"d{k}", ("x",)) for k in range(100)]
    held = text.split(documents)[1]
    assert held and text.split([*documents, text.Document("d100", ("x",))])[1][: len(held)] == held
    assert text.split(documents[:2])[1], "a short text still holds something out"


def test_a_file_that_is_no_text_is_a_clear_error(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes("naïve".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin.txt is not UTF-8 text \(byte 2\)"):
        Corpus.load(path, 300)
    path.write_text("too short")
    with pytest.raises(ValueError, match="give a longer text"):
        Corpus.load(path, 300)


# -- tokenizer -------------------------------------------------------------------------------------------------------
def test_merges_are_the_most_frequent_pairs():
    # "aaab" three times: aa occurs 6 times (overlaps counted), ab 3; then (aa) a is as frequent as ab, and larger.
    trained = tokenizer.train("aaab. aaab. aaab.", 260)
    assert [trained.id_to_token(token) for token in range(256, 259)] == ["aa", "ab", "aaab"]


def test_of_equally_frequent_pairs_the_smaller_is_merged_first():
    trained = tokenizer.train("xy ab xy ab ba", 257)
    assert trained.id_to_token(256) == "Ġa" and trained.get_vocab_size() == 257


@pytest.fixture(scope="module")
def trained(corpus) -> Tokenizer:
    return corpus.tokenizer


@given(sample=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_the_tokenizer(trained, sample):
    assert trained.decode(trained.encode(sample).ids) == sample


def test_the_first_tokens_are_the_bytes(trained):
    assert tokenizer.train("", 256).encode("\0 a~\x7fé\U0001f600").ids == list("\0 a~\x7fé\U0001f600".encode())
    assert sorted(trained.id_to_token(byte) for byte in range(256)) == sorted(ByteLevel.alphabet())


def test_the_same_text_gives_the_same_tokens_on_every_machine(corpus):
    """A run's batches, and so its losses, follow from the text and the vocabulary alone."""
    text = ENGLISH.read_text()
    digests = {
        vocab: zlib.crc32(json.dumps(tokenizer.train(text, vocab).encode(text).ids).encode()) for vocab in (300, 1024)
    }
    assert digests == {300: 125061659, 1024: 1141026414}


def test_tokenizer_compresses_and_is_kept_in_a_file(trained, tmp_path):
    sample = ENGLISH.read_text()[:5000]
    encoded = trained.encode(sample).ids
    assert len(encoded) < 0.8 * len(sample) and max(encoded) < TINY.vocab
    tokenizer.save(trained, tmp_path / "tokenizer.json")
    assert tokenizer.load(tmp_path / "tokenizer.json").encode(sample).ids == encoded
    with pytest.raises(ValueError, match="at least 256"):
        tokenizer.train("x", 100)


def test_transformers_reads_the_file(trained, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer.save(trained, tmp_path / "tokenizer.json")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    sample = ENGLISH.read_text()[:500]
    assert theirs(sample)["input_ids"] == trained.encode(sample).ids


def test_without_the_library_one_message_names_it(monkeypatch, tmp_path):
    monkeypatch.setattr(tokenizer, "find_spec", lambda name: None)
    for call in (lambda: tokenizer.train("x", 256), lambda: tokenizer.load(tmp_path / "tokenizer.json")):
        with pytest.raises(ImportError, match=r"pip install 'lowbit\[demo\]'"):
            call()


# -- batches ---------------------------------------------------------------------------------------------------------
def test_batches_follow_from_seed_and_step_and_cover_each_epoch_once(corpus):
    inputs, targets = corpus.batch(3, 2, 32, seed=0)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(inputs, corpus.batch(3, 2, 32, seed=0)[0])
    assert not torch.equal(inputs, corpus.batch(3, 2, 32, seed=1)[0])
    # Number the tokens, so that a window says where it lies.
    numbered = Corpus(corpus.tokenizer, torch.arange(32 * 12), corpus.held_out, corpus.held_out_bytes, "numbers")
    windows = 32 * 12 // 32 - 1
    for epoch in range(2):
        starts = [int(numbered.batch(k, 1, 32, seed=0)[0][0, 0]) for k in range(epoch * windows, (epoch + 1) * windows)]
        assert sorted(starts) == list(range(min(starts), min(starts) + 32 * windows, 32))


def test_held_out_windows_do_not_overlap(corpus):
    windows = corpus.held_out_windows(8, 32)
    assert windows.shape == (8, 33)
    with pytest.raises(ValueError, match="do not fill one window"):
        corpus.held_out_windows(8, len(corpus.held_out))


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


def made(corpus: Corpus, directory: Path, **changes: object) -> Trainer:
    values = {**vars(SHORT), **changes}
    return Trainer(GPT(TINY, seed=0), corpus, TrainConfig(**values), directory)


def test_training_learns(corpus, tmp_path):
    history = made(corpus, tmp_path, precision="fp32", steps=30, lr=1e-2).run()
    assert history.held_out[-1][1] < history.train[0] - 0.5
    assert [step for step, _ in history.held_out] == list(range(5, 31, 5))
    assert history.seconds > 0


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


@pytest.mark.parametrize("precision", ["fp8-delayed", "nvfp4:ends=0"])
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
    with pytest.raises(ValueError, match=r"tail is a share of the steps, from 0 to 1, got 1\.5"):
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


@pytest.mark.parametrize("changes", [{"precision": "bf16"}, {"precision": "fp8-delayed", "compress_activations": True}])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_what_a_run_holds_is_measured_beside_it(corpus, tmp_path, changes, checkpointing):
    """The oracle is a step of the run itself, which makes its batch and clips besides."""
    trainer = made(corpus, tmp_path, optimizer="adamw8bit", checkpointing=checkpointing, **changes)
    random = torch.get_rng_state()
    found = held(replace(TINY, vocab=corpus.tokenizer.get_vocab_size()), trainer.config)
    assert torch.equal(random, torch.get_rng_state())
    trainer._train_step()
    peak = lb.memory.allocated_peak(trainer._train_step)
    assert found.step == pytest.approx(peak, abs=4096) and found.states == state_bytes(trainer.optimizer)
    weights, state = (sum(t.nbytes for t in kind()) for kind in (trainer.model.parameters, trainer.model.buffers))
    assert (found.weights, found.gradients) == (weights + state, weights)


@pytest.mark.parametrize("moment", ["between steps", "while a state is written"])
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


@pytest.mark.parametrize("name", ["adamw16bit", "adamw8bit", "adamw4bit", "lion8bit", "sgd8bit", "muon8bit"])
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


def test_a_checkpoint_of_something_else_is_refused(corpus, tmp_path):
    made(corpus, tmp_path, steps=2).run()
    with pytest.raises(ValueError, match=r"another run \(lr 0.005 -> 0.5\)"):
        made(corpus, tmp_path, steps=2, lr=0.5).load()
    other = Corpus(corpus.tokenizer, corpus.train[1:], corpus.held_out, corpus.held_out_bytes, "other")
    with pytest.raises(ValueError, match="another text"):
        made(other, tmp_path, steps=2).load()
    with pytest.raises(FileNotFoundError, match="nothing to resume"):
        made(corpus, tmp_path / "nowhere", steps=2).load()


@pytest.fixture(scope="module")
def checkpoint(corpus, tmp_path_factory) -> tuple[Trainer, bytes]:
    """A run that saved its state, and the file."""
    trainer = made(corpus, tmp_path_factory.mktemp("run"), steps=2)
    trainer.run()
    return trainer, trainer.path.read_bytes()


@given(data=st.data())
def test_a_checkpoint_with_one_bit_flipped_or_cut_short_is_refused(checkpoint, data):
    trainer, whole = checkpoint
    if data.draw(st.booleans()):
        bit = data.draw(st.integers(0, 8 * len(whole) - 1))
        spoiled = bytearray(whole)
        spoiled[bit // 8] ^= 1 << bit % 8
    else:
        spoiled = whole[: data.draw(st.integers(0, len(whole) - 1))]
    trainer.path.write_bytes(spoiled)
    with pytest.raises(ValueError, match=r"checkpoint.pt is damaged, or was not written .*; delete it to start over"):
        trainer.load()


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("optimizer"),
        lambda state: state.update(config=3),
        lambda state: state.update(random=torch.zeros(3)),
        lambda state: state.update(history={"train": 3, "other": 4}),
        lambda state: state["model"].popitem(),
        lambda state: state.clear(),
    ],
)
def test_a_checkpoint_that_no_run_wrote_is_one_message(corpus, checkpoint, tmp_path, change):
    """Its checksum is right: someone made it."""
    trainer, whole = checkpoint
    trainer.path.write_bytes(whole)
    state = torch.load(io.BytesIO(read_checked(trainer.path)), weights_only=True)
    change(state)
    payload = io.BytesIO()
    torch.save(state, payload)
    other = made(corpus, tmp_path, steps=2)
    write_checked(other.path, payload.getvalue())
    with pytest.raises(ValueError, match=r"checkpoint.pt is (no checkpoint of this run .*|of another run)"):
        other.load()


def test_a_plain_torch_file_is_no_checkpoint(corpus, tmp_path):
    trainer = made(corpus, tmp_path, steps=2)
    torch.save({}, trainer.path)
    with pytest.raises(ValueError, match="was not written by this version of lowbit; delete it"):
        trainer.load()


@given(data=st.data())
def test_settings_with_one_bit_flipped_are_refused_or_as_if_edited(tmp_path_factory, data):
    directory, settings = tmp_path_factory.mktemp("settings"), Settings(recipes=("int8",))
    settings.save(directory)
    path = directory / "settings.json"
    text = bytearray(path.read_bytes())
    bit = data.draw(st.integers(0, 8 * len(text) - 1))
    text[bit // 8] ^= 1 << bit % 8
    path.write_bytes(text)
    try:
        loaded = Settings.load(directory)
    except ValueError as error:
        assert "settings.json is not what this lowbit train writes" in str(error)
    else:
        for part in ("model", "train"):
            values, before = vars(getattr(loaded, part)), vars(getattr(settings, part))
            assert {name: type(value) for name, value in values.items()} == {k: type(v) for k, v in before.items()}
        assert loaded.recipes == settings.recipes and set(loaded.precisions) <= {"bf16", "fp8"}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"train": {"steps": 4.5}}, "steps must be of type int, got 4.5"),
        ({"train": {"batch": True}}, "batch must be of type int, got True"),
        ({"train": {"lr": "0.1"}}, "lr must be of type float, got '0.1'"),
        ({"train": {"checkpointing": 1}}, "checkpointing must be of type bool"),
        ({"train": {"pace": 1}}, "pace"),
        ({"train": None}, "NoneType"),
        ({"model": {"layers": 2.0}}, "layers must be a positive integer"),
        ({"recipes": ["int9"]}, "int9"),
    ],
)
def test_settings_may_be_edited_and_what_is_invalid_is_named(tmp_path, changes, told):
    Settings(recipes=("int8",)).save(tmp_path)
    path = tmp_path / "settings.json"
    saved = json.loads(path.read_text())
    path.write_text(json.dumps({**saved, "train": {**saved["train"], "steps": 7}}))
    assert Settings.load(tmp_path).train.steps == 7
    path.write_text(json.dumps({**saved, **changes}))
    with pytest.raises(ValueError, match=rf"settings.json is not what this lowbit train writes \(.*{told}"):
        Settings.load(tmp_path)


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
    assert re.search(r"make room for [\d,]+ bytes, then go on with --resume", text)
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
    assert "forward" in vars(model.blocks[0]), "its forward is replaced by one that recomputes"
    assert len(trainer.run().train) == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_settings_that_are_no_numbers_are_refused(value):
    with pytest.raises(ValueError, match="lr must be positive and finite"):
        TrainConfig(lr=value)


def test_an_interrupted_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, lambda file: file.write(b"old"))

    def fail(file):
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, fail)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


@given(data=st.data())
def test_a_tokenizer_with_one_byte_changed_is_refused_or_one_of_the_model(tmp_path_factory, data):
    model = GPT(GPTConfig(vocab=259, context=4, layers=1, heads=1, dim=2, hidden=2))
    directory = tmp_path_factory.mktemp("model")
    experiment.save(model, tokenizer.train("aaab. aaab. aaab.", 259), directory)
    path = directory / "tokenizer.json"
    text = bytearray(path.read_bytes())
    text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(text)
    try:
        loaded = experiment.load(directory)[1]
    except ValueError as error:
        assert "tokenizer.json" in str(error) and "copy the whole directory again" in str(error)
    else:
        assert all(token < 259 for token in loaded.encode("aaab. Any text.").ids)


# -- checkpointing of blocks -------------------------------------------------------------------------------------------
class Noisy(nn.Module):
    """A block with dropout, so that recomputing needs the random state."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x):
        return x + self.drop(torch.tanh(self.line(x)))


def gradients(model: nn.Module, x: torch.Tensor) -> tuple[list[torch.Tensor], int]:
    """Gradients, and the bytes that autograd kept for backward."""
    kept: dict[int, int] = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    model.zero_grad()
    torch.manual_seed(0)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), torch.autocast("cpu", torch.bfloat16):
        loss = model(x).float().square().mean()
    size = sum(kept.values())
    loss.backward()
    return [p.grad.clone() for p in model.parameters()], size


@pytest.mark.parametrize("kind", ["gpt", "sequential"])
def test_checkpointed_gradients_have_the_same_bits_and_keep_less(corpus, kind):
    if kind == "gpt":
        plain, x = GPT(TINY), corpus.batch(0, 2, 32, seed=0)[0]
    else:
        torch.manual_seed(1)
        plain, x = nn.Sequential(*(Noisy() for _ in range(4))), torch.randn(16, 8)
    again = copy.deepcopy(plain)
    names = list(again.state_dict())
    first, second = checkpoint_blocks_(again), checkpoint_blocks_(again)
    assert len(first.layers) == len(find_blocks(plain)) and first == second
    assert list(again.state_dict()) == names
    (expected, whole), (got, less) = gradients(plain, x), gradients(again, x)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert less < whole


def test_checkpointed_models_can_be_copied(corpus):
    model = GPT(TINY)
    checkpoint_blocks_(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.blocks[0].mlp.down.weight.fill_(0.0)
    x = corpus.batch(0, 1, 32, seed=0)[0]
    assert not torch.equal(model(x), twin(x)), "the copy must run its own weights"


@pytest.mark.parametrize(("forward", "backward"), [("reference", None), (None, "reference")])
def test_blocks_are_recomputed_on_the_backend_of_their_forward(forward, backward):
    model = nn.Sequential(*(lb.train.TrainLinear(8, 8) for _ in range(2)))
    checkpoint_blocks_(model)
    with lb.use_backend(forward):
        loss = model(torch.randn(4, 8)).sum()
    with lb.use_backend(backward), serving() as served:
        loss.backward()
    assert {"quantize", "scaled_mm"} <= set(served)
    assert served == (dict.fromkeys(served, forward) if forward else best(served))


def test_a_model_without_blocks_is_a_clear_error():
    with pytest.raises(ValueError, match=r"pass blocks="):
        checkpoint_blocks_(nn.Linear(2, 2))


def test_peak_memory_sees_a_large_tensor():
    """In a process of its own: from a large one the system may take pages at any moment."""
    code = (
        "import torch; from lowbit.memory.rss import peak_bytes, reset_peak\n"
        "before = peak_bytes() if reset_peak() else 0\n"
        "held = torch.ones(64 << 20, dtype=torch.uint8)\n"
        "assert peak_bytes() >= before + (60 << 20) if before else peak_bytes() > 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


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
