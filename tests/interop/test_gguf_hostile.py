"""GGUF files with hostile metadata: an error with the file's name, quickly, and without large allocations."""

from __future__ import annotations

import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lowbit as lb
from lowbit.interop.gguf import contents, tokenizer

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers", minversion="5")

U8, U32, I32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 5, 6, 7, 8, 9, 10
NUMBERS = {U8: "B", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q"}

#: A value, as its type and its content; an array, as the type of its elements, their number and their bytes.
Value = tuple[int, Any]


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def array(kind: int, count: int, content: bytes) -> Value:
    return ARRAY, struct.pack("<IQ", kind, count) + content


def texts(*values: str) -> Value:
    return array(STRING, len(values), b"".join(map(text, values)))


def numbers(kind: int, *values: float) -> Value:
    return array(kind, len(values), struct.pack(f"<{len(values)}{NUMBERS[kind]}", *values))


def encoded(value: Value) -> bytes:
    kind, content = value
    if kind in NUMBERS:
        content = struct.pack(f"<{NUMBERS[kind]}", content)
    return struct.pack("<I", kind) + (text(content) if kind == STRING else content)


#: A tensor: its axes as in the file, its type, and its offset.
Tensors = dict[str, tuple[tuple[int, ...], int, int]]

ALPHABET = [chr(97 + index) for index in range(26)]
VALUES: dict[str, Value] = {
    "general.architecture": (STRING, "llama"),
    "llama.vocab_size": (U32, 32), "llama.context_length": (U32, 64), "llama.embedding_length": (U32, 32),
    "llama.block_count": (U32, 1), "llama.feed_forward_length": (U32, 32), "llama.attention.head_count": (U32, 2),
    "llama.attention.head_count_kv": (U32, 2), "llama.attention.layer_norm_rms_epsilon": (F32, 1e-5),
    "llama.rope.freq_base": (F32, 1e4), "llama.attention.key_length": (U32, 16),
    "tokenizer.ggml.model": (STRING, "gpt2"), "tokenizer.ggml.pre": (STRING, "gpt-2"),
    "tokenizer.ggml.tokens": texts(*ALPHABET, "ab"), "tokenizer.ggml.token_type": numbers(I32, *[1] * 27),
    "tokenizer.ggml.merges": texts("a b"), "tokenizer.ggml.bos_token_id": (U32, 3),
    "tokenizer.chat_template": (STRING, "{{ messages }}"),
}  # fmt: skip
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
SHAPES: dict[str, tuple[int, ...]] = {
    "token_embd.weight": (32, 32), "output_norm.weight": (32,), "blk.0.attn_norm.weight": (32,),
    "blk.0.ffn_norm.weight": (32,), **{f"blk.0.{name}.weight": (32, 32) for name in MATRICES},
}  # fmt: skip


def tensors() -> Tensors:
    found: Tensors = {}
    end = 0
    for name, shape in SHAPES.items():
        found[name] = (shape, 0, end)
        end += 4 * torch.Size(shape).numel()
    return found


def write(
    path: Path, values: dict[str, Value], rows: list[tuple[str, tuple[tuple[int, ...], int, int]]], size: int = 1 << 16
) -> Path:
    header = b"GGUF" + struct.pack("<IQQ", 3, len(rows), len(values))
    header += b"".join(text(key) + encoded(value) for key, value in values.items())
    for name, (axes, kind, offset) in rows:
        header += text(name) + struct.pack(f"<I{len(axes)}QIQ", len(axes), *axes, kind, offset)
    path.write_bytes(header + bytes(-len(header) % 32) + bytes(size))
    return path


def refused(load: Callable[[Path], Any], path: Path) -> str:
    """The message of the error. A process that has allocated 100 MB more fails."""
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(ValueError) as error:
        load(path)
    assert path.name in str(error.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB
    assert time.process_time() - started < 5
    return str(error.value)


@pytest.fixture(scope="module", autouse=True)
def _loaded_once(tmp_path_factory):
    """The unchanged file loads; what is imported for it counts for no test."""
    path = write(tmp_path_factory.mktemp("whole") / "whole.gguf", VALUES, list(tensors().items()))
    model = lb.load_model(path)
    assert torch.isfinite(model(torch.tensor([[1, 2]])).logits).all()
    assert tokenizer(path)("abc")["input_ids"] == [26, 2]
    assert contents(path).quantized is None


def deep(depth: int) -> Value:
    content = b""
    for _ in range(depth):
        content = struct.pack("<IQ", ARRAY, 1) + content
    return ARRAY, content


METADATA: list[tuple[str, Value]] = [
    ("llama.vocab_size", (U32, 2**31)), ("llama.vocab_size", (U32, 0)), ("llama.vocab_size", (STRING, "32")),
    ("llama.block_count", (U32, 2**31)), ("llama.block_count", (U32, 2000)), ("llama.block_count", (U32, 0)),
    ("llama.attention.head_count", (U32, 0)), ("llama.attention.head_count", numbers(U32, 2, 2)),
    ("llama.attention.head_count", (U32, 2**31)),
    ("llama.attention.head_count_kv", (U32, 0)), ("llama.attention.head_count_kv", (I32, -1)),
    ("llama.attention.layer_norm_rms_epsilon", (F32, -1e-5)),
    ("llama.attention.layer_norm_rms_epsilon", (F32, float("nan"))),
    ("llama.attention.layer_norm_rms_epsilon", (F32, float("inf"))),
    ("llama.attention.layer_norm_rms_epsilon", (STRING, "1e-5")),
    ("llama.feed_forward_length", (U64, 2**40)), ("llama.feed_forward_length", (U32, 2**31)),
    ("llama.embedding_length", (U32, 2**31)), ("llama.attention.key_length", (U32, 2**31)),
    ("llama.attention.key_length", (U32, 2**16)), ("llama.attention.key_length", (U32, 15)),
    ("llama.rope.dimension_count", (U64, 2**40)), ("llama.rope.freq_base", (F32, 0.0)),
    ("llama.rope.freq_base", (F32, float("nan"))), ("llama.rope.scaling.type", (STRING, "unheard of")),
    ("llama.expert_count", (U32, 2**31)), ("general.architecture", texts("llama")),
    ("general.alignment", (U32, 0)), ("general.alignment", (U32, 2**31)), ("general.alignment", (STRING, "32")),
    ("general.any", array(STRING, 2**60, b"")), ("general.any", array(U8, 2**63, b"")),
    ("general.any", array(U64, 2**61, b"")), ("general.any", array(ARRAY, 2**60, b"")),
    ("general.any", array(99, 1, b"")), ("general.any", deep(5)), ("general.any", deep(10_000)),
    ("tokenizer.ggml.bos_token_id", texts("a")),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), METADATA, ids=[f"{key} {index}" for index, (key, _) in enumerate(METADATA)])
def test_metadata_of_no_model_are_refused(key: str, value: Value, tmp_path):
    refused(lb.load_model, write(tmp_path / "hostile.gguf", VALUES | {key: value}, list(tensors().items())))


#: Changes of a row, by the tensor's name.
ROWS: dict[str, tuple[tuple[int, ...], int, int]] = {
    "beyond the file": ((32, 32), 0, 1 << 20),
    "beyond 64 bits": ((32, 32), 0, 2**64 - 32),
    "over another": ((32, 32), 0, 64),
    "an axis of 2 ** 63": ((2**63, 32), 0, 0),
    "sizes that overflow": ((2**33, 2**33), 0, 0),
    "an empty axis": ((32, 0), 0, 0),
    "an unknown type": ((32, 32), 250, 0),
    "another shape": ((16, 64), 0, 0),
    "five axes": ((2, 2, 2, 2, 64), 0, 0),
}


@pytest.mark.parametrize("row", ROWS)
def test_tensors_in_impossible_places_are_refused(row: str, tmp_path):
    rows = tensors() | {"token_embd.weight": ROWS[row]}
    refused(lb.load_model, write(tmp_path / "hostile.gguf", VALUES, list(rows.items())))


def test_names_that_occur_twice_are_refused(tmp_path):
    rows = list(tensors().items())
    assert "twice" in refused(lb.load_model, write(tmp_path / "hostile.gguf", VALUES, [*rows, rows[1]]))
    values = VALUES | {"general.a": (U8, 1), "general.b": (U8, 1)}
    path = write(tmp_path / "keys.gguf", values, rows)
    path.write_bytes(path.read_bytes().replace(b"general.b", b"general.a"))
    assert "twice" in refused(lb.load_model, path)


def test_numbers_of_rows_that_the_file_cannot_have_are_refused(tmp_path):
    path = write(tmp_path / "hostile.gguf", VALUES, list(tensors().items()))
    whole = path.read_bytes()
    for start in (8, 16):  # tensors, keys
        path.write_bytes(whole[:start] + struct.pack("<Q", 2**60) + whole[start + 8 :])
        refused(lb.load_model, path)


def test_tables_of_positions_have_the_size_of_the_metadata(tmp_path):
    names = ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count")
    values: dict[str, Value] = {"general.architecture": (STRING, "bert")}
    values |= {f"bert.{name}": (U32, 32) for name in names} | {"bert.context_length": (U32, 2**31)}
    values |= {"bert.attention.layer_norm_epsilon": (F32, 1e-5), "bert.vocab_size": (U32, 32)}
    table = ((32, 32), 0, 0)
    for more in ({}, {"position_embd.weight": ((32, 32), 0, 4096)}):
        rows = {"token_embd.weight": table, **more}
        refused(lb.load_model, write(tmp_path / "hostile.gguf", values, list(rows.items())))


WORDS: list[tuple[str, Value | None]] = [
    ("tokens", numbers(U32, 1, 2)), ("tokens", (STRING, "abc")), ("tokens", texts("a")), ("tokens", None),
    ("tokens", array(STRING, 1, struct.pack("<Q", 2) + b"\xff\xfe")),
    ("token_type", texts("a")), ("token_type", numbers(I32, 1)), ("token_type", (U32, 1)), ("token_type", None),
    ("merges", texts("ab")), ("merges", texts("a zz")), ("merges", numbers(U32, 1)), ("merges", None),
    ("pre", (STRING, "unheard of")), ("pre", texts("gpt-2")), ("model", (STRING, "unheard of")), ("model", None),
    ("model", numbers(U32, 1)), ("bos_token_id", texts("a")), ("bos_token_id", (F32, float("nan"))),
    ("unknown_token_id", (STRING, "a")), ("chat_template", (U32, 1)), ("chat_template", texts("a")),
]  # fmt: skip


#: Keys that a kind of tokenizer does not read.
UNREAD = {"bert": ("merges", "pre"), "llama": ("merges", "pre", "bos_token_id", "unknown_token_id", "token_type")}
CASES = [
    pytest.param(kind, key, value, id=f"{kind} {key} {index}")
    for kind in ("gpt2", "bert", "llama")
    for index, (key, value) in enumerate(WORDS)
    if key not in UNREAD.get(kind, ())
]


@pytest.mark.parametrize(("kind", "key", "value"), CASES)
def test_tokenizers_of_wrong_types_are_refused(kind: str, key: str, value: Value | None, tmp_path):
    values = VALUES | {"tokenizer.ggml.model": (STRING, kind), "tokenizer.ggml.scores": numbers(F32, *[0.0] * 27)}
    name = "tokenizer.chat_template" if key == "chat_template" else f"tokenizer.ggml.{key}"
    if value is None:
        del values[name]
    else:
        values[name] = value
    refused(tokenizer, write(tmp_path / "hostile.gguf", values, []))
