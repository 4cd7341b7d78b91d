"""Text, tokenizer and batches."""

import json
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.runs import ENGLISH, TINY
from tokenizers.pre_tokenizers import ByteLevel

from lowbit.demo import text, tokenizer
from lowbit.demo.data import Corpus

pytestmark = pytest.mark.filterwarnings("ignore:train.mixed_. this processor")


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


@pytest.mark.slow
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
