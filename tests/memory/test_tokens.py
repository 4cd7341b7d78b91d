"""Tokens of files, against the arrays that were written."""

from __future__ import annotations

import os
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from lowbit.memory import tokens
from tests.support.processes import run_processes

MIB = 1 << 20


def written(path: Path, count: int, dtype: str = "uint16", first: int = 1) -> np.ndarray:
    values = (np.arange(first, first + count) % 60_000).astype(dtype)
    if path.suffix == ".npy":
        np.save(path, values)
    else:
        values.astype(np.dtype(dtype).newbyteorder("<")).tofile(path)
    return values


@given(
    counts=st.lists(st.integers(2, 40), min_size=1, max_size=3), length=st.integers(1, 9), stride=st.integers(1, 12),
    kind=st.sampled_from(["a.bin", "a.npy"]), dtype=st.sampled_from(["uint16", "uint32"]),
)  # fmt: skip
def test_items_are_the_windows_of_each_file(tmp_path_factory, counts, length, stride, kind, dtype):
    folder = tmp_path_factory.mktemp("tokens")
    paths = [folder / f"{i}{kind}" for i in range(len(counts))]
    arrays = [
        written(path, count, dtype, 100 * i + 1) for i, (path, count) in enumerate(zip(paths, counts, strict=True))
    ]
    expected = [a[s : s + length + 1] for a in arrays for s in range(0, len(a), stride) if s + length + 1 <= len(a)]
    if not expected:
        with pytest.raises(ValueError, match=f"takes {length + 1} tokens, the longest file .* has {max(counts)}"):
            tokens(paths, length, dtype, stride)
        return
    data = tokens(paths, length, dtype, stride)
    assert len(data) == len(expected)
    for (inputs, targets), window in zip(data, expected, strict=True):
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.tolist() == window[:-1].tolist() and targets.tolist() == window[1:].tolist()
    assert torch.equal(data[-1][0], data[len(data) - 1][0])


def test_large_tokens_and_signed_files_keep_their_numbers(tmp_path):
    values = np.array([1, 70_000, 2**32 - 1, 5], dtype=np.uint32)
    values.tofile(tmp_path / "a.bin")
    assert tokens(tmp_path / "a.bin", 3, torch.uint32)[0][1].tolist() == [70_000, 2**32 - 1, 5]
    np.save(tmp_path / "a.npy", values.astype(">i8"))
    assert tokens(tmp_path / "a.npy", 3)[0][1].tolist() == [70_000, 2**32 - 1, 5]


def test_workers_and_processes_share_the_items(tmp_path):
    values = written(tmp_path / "a.bin", 101)
    data = tokens(str(tmp_path / "a.bin"), 10)
    assert len(pickle.dumps(data)) < 2000
    loader = DataLoader(data, batch_size=3, shuffle=True, num_workers=2, multiprocessing_context="fork")
    seen = torch.cat([inputs for inputs, _ in loader])
    assert sorted(seen.flatten().tolist()) == values[:100].tolist() and seen[:, 0].tolist() != values[:100:10].tolist()
    shares = [
        torch.cat([x for x, _ in DataLoader(data, sampler=DistributedSampler(data, num_replicas=2, rank=rank))])
        for rank in range(2)
    ]
    assert sorted(torch.cat(shares).flatten().tolist()) == values[:100].tolist()


def resident() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmRSS:"))


def _in_process(_: int, path: str) -> None:
    data = tokens(path, MIB, "uint16")
    assert len(data) == 2500 and data[-1][1][-1] == 7
    before = resident()
    for index in random.Random(0).sample(range(len(data)), 50):
        data[index]
    assert resident() - before < 24 * MIB  # 50 items have 100 MiB in the file; one has 8 MiB as int64


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
def test_resident_memory_stays_flat_over_a_large_file(tmp_path):
    path, end = tmp_path / "sparse.bin", 2 * 2500 * MIB  # 5 GiB, of which the disk holds the last token
    with path.open("wb") as stream:
        stream.seek(end)
        stream.write(b"\x07\x00")
    if path.stat().st_blocks * 512 > MIB:
        pytest.skip("files on this system are not sparse")
    run_processes(_in_process, (str(path),), 1)


# -- what is refused ---------------------------------------------------------------------------------------------------
def test_damaged_files_are_refused_with_words(tmp_path):
    raw, array = tmp_path / "a.bin", tmp_path / "a.npy"
    written(raw, 50)
    with raw.open("ab") as stream:
        stream.write(b"x")
    with pytest.raises(ValueError, match=r"whole tokens of 2 bytes \(uint16\) in .*a.bin, got 101 bytes"):
        tokens(raw, 4)
    written(array, 50)
    whole = array.read_bytes()
    array.write_bytes(whole[:-3])
    with pytest.raises(
        ValueError, match=rf"expected {len(whole)} bytes in .*a.npy, got {len(whole) - 3}; .* truncated"
    ):
        tokens(array, 4)
    array.write_bytes(whole[:20])
    with pytest.raises(ValueError, match=r"no whole head of a \.npy file"):
        tokens(array, 4)


def test_another_dtype_is_refused_with_words(tmp_path):
    raw, array = tmp_path / "a.bin", tmp_path / "a.npy"
    written(raw, 50, "uint32")
    with pytest.raises(ValueError, match=r'every other number .* is 0 as uint16.*dtype="uint32"'):
        tokens(raw, 4)
    assert tokens(raw, 4, "uint16")[0][0].tolist() == [1, 0, 2, 0]
    with pytest.raises(ValueError, match="raw files hold uint16 or uint32, got dtype='int64'"):
        tokens(raw, 4, torch.int64)
    written(array, 50)
    with pytest.raises(ValueError, match="holds uint16, got dtype='uint32'"):
        tokens(array, 4, "uint32")
    for wrong in (np.ones(50), np.ones((5, 10), dtype=np.int64)):
        np.save(array, wrong)
        with pytest.raises(ValueError, match="expected one dimension of integers"):
            tokens(array, 4)


def test_items_are_checked_when_they_are_read(tmp_path):
    raw = tmp_path / "a.bin"
    written(raw, 50)
    data = tokens(raw, 4, vocabulary=40)
    assert data[8][1].tolist() == [34, 35, 36, 37]
    with pytest.raises(ValueError, match=r"expected tokens from 0 to 39, got 37 to 41 in .*a.bin from token 36 on"):
        data[9]
    with pytest.raises(IndexError, match="there are 12 items, got index 12"):
        data[12]
    os.truncate(raw, 40)
    assert data[0][0].tolist() == [1, 2, 3, 4]
    with pytest.raises(ValueError, match=r"expected 50 tokens in .*a\.bin, but it has become shorter"):
        data[8]


def test_what_cannot_be_opened_is_refused_with_words(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"missing\.bin"):
        tokens(tmp_path / "missing.bin", 4)
    with pytest.raises(ValueError, match="at least one file"):
        tokens([], 4)
    with pytest.raises(ValueError, match="length is at least 1, got 0"):
        tokens(tmp_path / "a.bin", 0)
    with pytest.raises(ValueError, match="stride is at least 1, got 0"):
        tokens(tmp_path / "a.bin", 4, stride=0)


@pytest.mark.parametrize("dtype", [None, "uint32"])
@pytest.mark.parametrize("numbers", ["normal", "uniform", "whole", "zeros"])
@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_a_file_of_floats_is_refused(kind, numbers, dtype, tmp_path):
    generator = np.random.default_rng(0)
    made = {
        "normal": generator.standard_normal(500) * 0.02,
        "uniform": generator.random(500) * 100,
        "whole": generator.integers(0, 50000, 500),
        "zeros": np.where(np.arange(500) % 3 == 0, 1.5, 0),
    }[numbers]
    path = tmp_path / "tokens.bin"
    made.astype(kind).tofile(path)
    with pytest.raises(
        ValueError, match=r"expected raw tokens of .* got floating-point numbers; write the tokens as integers"
    ):
        tokens(path, 8, dtype)


def test_files_of_other_kinds_are_refused(tmp_path):
    path = tmp_path / "tokens.bin"
    for kind, save in (
        (".npy file", lambda stream: np.save(stream, np.arange(100, dtype=np.uint16))),
        ("archive", lambda stream: torch.save(torch.arange(100), stream)),
    ):
        with path.open("wb") as stream:
            save(stream)
        with pytest.raises(ValueError, match=f"got an? {kind}"):
            tokens(path, 8, "uint16")


@pytest.mark.parametrize("high", [256, 4096, 20000, 32768, 50257, 65536])
def test_tokens_are_not_taken_for_floats(high, tmp_path):
    path = tmp_path / "tokens.bin"
    ids = (np.random.default_rng(0).zipf(1.2, 5000) % high).astype(np.uint16)
    ids.tofile(path)
    assert torch.equal(tokens(path, 99)[0][0], torch.from_numpy(ids[:99].astype(np.int64)))
    ids = np.random.default_rng(0).integers(0, high, 5000).astype(np.uint32)
    ids.tofile(path)
    assert torch.equal(tokens(path, 99, "uint32")[0][0], torch.from_numpy(ids[:99].astype(np.int64)))
