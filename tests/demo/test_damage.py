"""States, settings and tokenizers that are damaged or of something else are refused."""

import io
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.runs import made

from lowbit.demo import experiment, tokenizer
from lowbit.demo.data import Corpus
from lowbit.demo.experiment import RunSettings
from lowbit.demo.gpt import GPT, GPTConfig
from lowbit.demo.loop import Trainer
from lowbit.files import read_checked, write_atomically, write_checked

pytestmark = pytest.mark.filterwarnings("ignore:train.mixed_. this processor")


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
    other = made(corpus, tmp_path, steps=2)
    write_checked(other.path, lambda file: torch.save(state, file))
    with pytest.raises(ValueError, match=r"checkpoint.pt is (no checkpoint of this run .*|of another run)"):
        other.load()


def test_a_plain_torch_file_is_no_checkpoint(corpus, tmp_path):
    trainer = made(corpus, tmp_path, steps=2)
    torch.save({}, trainer.path)
    with pytest.raises(ValueError, match="was not written by this version of lowbit; delete it"):
        trainer.load()


@given(data=st.data())
def test_settings_with_one_bit_flipped_are_refused_or_as_if_edited(tmp_path_factory, data):
    directory, settings = tmp_path_factory.mktemp("settings"), RunSettings(recipes=("int8",))
    settings.save(directory)
    path = directory / "settings.json"
    text = bytearray(path.read_bytes())
    bit = data.draw(st.integers(0, 8 * len(text) - 1))
    text[bit // 8] ^= 1 << bit % 8
    path.write_bytes(text)
    try:
        loaded = RunSettings.load(directory)
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
    RunSettings(recipes=("int8",)).save(tmp_path)
    path = tmp_path / "settings.json"
    saved = json.loads(path.read_text())
    path.write_text(json.dumps({**saved, "train": {**saved["train"], "steps": 7}}))
    assert RunSettings.load(tmp_path).train.steps == 7
    path.write_text(json.dumps({**saved, **changes}))
    with pytest.raises(ValueError, match=rf"settings.json is not what this lowbit train writes \(.*{told}"):
        RunSettings.load(tmp_path)


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
