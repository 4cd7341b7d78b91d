"""Texts as documents, and rows of documents: every token once, and gradients of separate documents."""

import itertools
import json
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from lowbit.finetune.packing import IGNORED, Packed, Padded, keeps_documents_apart
from lowbit.finetune.texts import Document, read, split

transformers = pytest.importorskip("transformers", minversion="5")

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


def documents(lengths, seed=0):
    random = np.random.default_rng(seed)
    return [Document(random.integers(3, 61, n), random.random(n) < 0.8) for n in lengths]


def model_of(name):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES)
    config.use_cache = False
    cls = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}.get(name, f"{name}ForCausalLM")
    return getattr(transformers, cls)(config).eval()


class Letters:
    """A tokenizer with a token per letter, and a chat template."""

    eos_token_id = 0
    chat_template = "yes"

    def __call__(self, text, **_):
        return {"input_ids": [ord(letter) for letter in text]}

    def __len__(self):
        return 256

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        text = "".join(f"[{row['role'][0]}]{row['content']}." for row in messages)
        return text + "[a]" * add_generation_prompt


# -- rows --------------------------------------------------------------------------------------------------------------
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12), length=st.integers(2, 16), epoch=st.integers(0, 3)
)
def test_packed_rows_have_each_token_once_and_positions_from_zero(lengths, length, epoch):
    if sum(lengths) < 2 * length:
        return
    texts = [Document(document.ids, np.ones(len(document.ids), dtype=bool)) for document in documents(lengths)]
    rows = Packed(texts, length, seed=3)._rows(np.random.default_rng(epoch).permutation(len(texts)), epoch)
    ids, labels, positions = (rows[name] for name in ("input_ids", "labels", "position_ids"))
    assert ids.shape[1] == length and bool((positions[:, 0] == 0).all())
    assert len(ids) * length > sum(lengths) - 2 * length  # less than a row at each end is left out
    steps = positions.diff(dim=1)
    assert bool(((steps == 1) | (positions[:, 1:] == 0)).all())
    counted = labels != IGNORED
    assert torch.equal(labels[counted], ids[counted]) and not bool(counted[positions == 0].any())
    left = torch.bincount(torch.cat([torch.from_numpy(d.ids) for d in documents(lengths)]), minlength=61)
    assert bool((torch.bincount(ids.flatten(), minlength=61) <= left).all())


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12), length=st.integers(2, 16))
def test_padded_rows_have_each_token_once(lengths, length):
    rows = Padded(documents(lengths), length).all()
    kept = rows["attention_mask"].bool()
    assert torch.equal(rows["input_ids"][kept], torch.cat([torch.from_numpy(d.ids) for d in documents(lengths)]))
    assert not bool((rows["labels"] != IGNORED)[~kept].any())


@pytest.mark.parametrize("cls", [Packed, Padded])
def test_every_row_of_every_epoch_has_a_token_to_train_on(cls):
    texts = [Document(d.ids, np.arange(len(d.ids)) >= 28) for d in documents([30, 17, 33, 29, 31])]
    source = cls(texts, 8, seed=1)
    for step in range(60):
        batch = source.batch(step, 1)
        assert bool((batch["labels"] != IGNORED).any())
    with pytest.raises(ValueError, match="no token of the text is trained on"):
        cls([Document(d.ids, np.zeros(len(d.ids), dtype=bool)) for d in texts], 8).batch(0, 1)


def test_batches_depend_on_seed_and_step_and_each_epoch_has_another_order():
    sources = [Packed(documents([30] * 8), 16, seed=seed) for seed in (0, 0, 1)]
    first, again, other = (source.batch(5, 3)["input_ids"] for source in sources)
    assert torch.equal(first, again) and not torch.equal(first, other)
    epochs = [sources[0].epoch(number)["input_ids"] for number in (0, 1)]
    assert not torch.equal(*(epoch[: min(map(len, epochs))] for epoch in epochs))


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma3Text", "GPT2", "Mamba"])
def test_models_that_keep_documents_apart(name):
    assert keeps_documents_apart(model_of(name), 61) == (name != "Mamba")


def test_gradients_of_packed_rows_are_those_of_separate_documents():
    """To rounding: the sums have another order, and transformers computes the loss in fp32."""
    model, texts = model_of("Llama").double(), documents([7, 9, 5, 11])
    packed = Packed(texts, 16).all()
    assert packed["input_ids"].shape == (2, 16)
    loss = model(**packed).loss
    loss.backward()
    result = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row, positions, labels in zip(packed["input_ids"], packed["position_ids"], packed["labels"], strict=True):
        for begin, end in itertools.pairwise([*torch.where(positions == 0)[0].tolist(), 16]):
            number = int((labels[begin:end] != IGNORED).sum())
            if number:
                part = {"input_ids": row[None, begin:end], "labels": labels[None, begin:end]}
                total = total + model(**part).loss * number
                count += number
    (total / count).backward()
    torch.testing.assert_close(loss.double(), total / count, rtol=1e-6, atol=0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(result[name], parameter.grad, rtol=1e-5, atol=1e-7)


# -- texts -------------------------------------------------------------------------------------------------------------
def lines(path: Path, *rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_jsonl_trains_on_texts_completions_and_answers(tmp_path):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"},
                {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]  # fmt: skip
    path = lines(tmp_path / "a.jsonl", {"text": "abc"}, {"prompt": "ab", "completion": "cd"}, {"messages": messages})
    whole, completion, chat = read(path, Letters())
    assert bytes(whole.ids.tolist()) == b"abc\0" and whole.trained.all()
    assert bytes(completion.ids.tolist()) == b"abcd\0" and completion.trained.tolist() == [False] * 2 + [True] * 3
    assert bytes(chat.ids.tolist()) == b"[u]hi.[a]yo.[u]a.[a]b."
    assert bytes(chat.ids[chat.trained].tolist()) == b"yo.b."


def test_token_files(tmp_path):
    np.save(tmp_path / "a.npy", np.array([[1, 2, 3], [4, 5, 6]], dtype=np.uint16))
    np.array([7, 8, 9], dtype="<u2").tofile(tmp_path / "a.bin")
    assert [d.ids.tolist() for d in read(tmp_path / "a.npy", Letters())] == [[1, 2, 3], [4, 5, 6]]
    assert [d.ids.tolist() for d in read(tmp_path / "a.bin", Letters())] == [[7, 8, 9]]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"txt": "b"}', "line 2: expected an object with 'messages'"),
        ("a.jsonl", b'{"text": 3}', "line 1: expected a text, got 3"),
        ("a.jsonl", b"{", "line 1: not JSON"),
        ("a.jsonl", b'{"messages": ["hi"]}', "must be a list of objects with a 'role'"),
        ("a.txt", b"\xff", "not UTF-8"),
        ("a.jsonl", b"", "no token"),
        ("a.npy", b"abc", "no array"),
        ("a.bin", b"abc", "no tokens of uint16"),
        ("a.bin", b"\xff\xff", "has the token 65535, and the tokenizer has 256"),
    ],
)
def test_files_that_are_no_texts_are_refused(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=reason):
        read(tmp_path / name, Letters())


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=60), length=st.integers(2, 20))
def test_a_split_has_each_token_once(lengths, length):
    texts = documents(lengths)
    if sum(lengths) < 2 * length:
        with pytest.raises(ValueError, match="fewer than two rows"):
            split(texts, length)
        return
    train, held = split(texts, length)
    parts = [token for document in (*train, *held) for token in document.ids.tolist()]
    assert sorted(parts) == sorted(token for document in texts for token in document.ids.tolist())
    assert held and all(len(document.ids) for document in held)
