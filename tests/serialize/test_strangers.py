"""Files from strangers: whatever a byte of a saved model is, loading gives the same model or a ValueError that names
the file, soon and without large allocations."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import sys
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch as library
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models import same_state

import lowbit as lb
from lowbit import files
from lowbit.demo.gpt import GPT, GPTConfig
from lowbit.serialize import safetensors

TINY = GPTConfig(vocab=32, context=8, layers=1, heads=2, dim=8, hidden=16)


def gpt(recipe: str | None = "int8") -> GPT:
    model = GPT(TINY)
    if recipe:
        lb.quantize_(model, recipe)
    return model


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("saved") / "model"
    lb.save_model(gpt(), directory)
    return directory


@pytest.fixture
def saved(original, tmp_path) -> Path:
    shutil.copytree(original, tmp_path / "model")
    return tmp_path / "model"


def weights_of(directory: Path) -> Path:
    (path,) = directory.glob("weights-*.safetensors")
    return path


def put(directory: Path, data: bytes) -> None:
    """Other bytes as the weights, with a config that says so: what a stranger can make."""
    path = directory / "lowbit.json"
    config = files.read_json(path)
    weights = {**config["weights"], "sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    (directory / weights["file"]).write_bytes(data)
    files.write_json(path, {**config, "weights": weights})


def described(tensors: dict[str, object], data: bytes = b"") -> bytes:
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text + data


# -- fuzzing ---------------------------------------------------------------------------------------------------------
def spoiled(original: Path, name: str, change) -> None:
    """Load a copy of the model with one file changed: the same model, or an error that names a file in it."""
    with tempfile.TemporaryDirectory() as where:
        directory = Path(where) / "model"
        shutil.copytree(original, directory)
        path = directory / name
        path.write_bytes(change(path.read_bytes()))
        try:
            loaded = lb.load_model(directory)
        except (ValueError, FileNotFoundError) as error:
            assert str(directory) in str(error)
            assert len(str(error)) < 2000
        else:
            assert same_state(loaded, gpt()) and loaded.config == TINY


@pytest.mark.parametrize("kind", ["config", "weights"])
@given(data=st.data())
def test_a_flipped_bit_is_refused_or_changes_nothing(original, kind, data):
    name = "lowbit.json" if kind == "config" else weights_of(original).name
    size = (original / name).stat().st_size
    bit = data.draw(st.integers(0, 8 * size - 1))

    def flip(text: bytes) -> bytes:
        changed = bytearray(text)
        changed[bit // 8] ^= 1 << bit % 8
        return bytes(changed)

    spoiled(original, name, flip)


@pytest.mark.parametrize("kind", ["config", "weights"])
@given(data=st.data())
def test_a_truncated_or_overwritten_file_is_refused(original, kind, data):
    name = "lowbit.json" if kind == "config" else weights_of(original).name
    size = (original / name).stat().st_size
    length = data.draw(st.integers(0, size))
    rest = data.draw(st.binary(max_size=40))
    spoiled(original, name, lambda text: text[:length] + rest)


@given(data=st.data())
def test_a_weights_file_of_any_bytes_is_refused(original, data):
    """The checksum is right, as a stranger's would be; the header is spoiled in one place or is any bytes at all."""
    good = weights_of(original).read_bytes()
    start = data.draw(st.integers(0, 600))
    bad = data.draw(st.binary(min_size=1, max_size=12))
    text = data.draw(st.sampled_from([good[:start] + bad + good[start + len(bad) :], bad, good[:8] + bad]))
    with tempfile.TemporaryDirectory() as where:
        shutil.copytree(original, directory := Path(where) / "model")
        put(directory, text)
        try:
            lb.load_model(directory)
        except ValueError as error:
            assert str(directory) in str(error)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**13), 10**13) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(data=st.data())
def test_a_config_with_any_value_in_any_place_is_refused_or_harmless(original, data):
    config = files.read_json(original / "lowbit.json")
    places = [()]
    for place in places:
        inner = config
        for key in place:
            inner = inner[key]
        if isinstance(inner, dict):
            places += [(*place, key) for key in inner]
    *path, last = data.draw(st.sampled_from(places[1:]))
    inner = config
    for key in path:
        inner = inner[key]
    inner[last] = data.draw(values)
    with tempfile.TemporaryDirectory() as where:
        shutil.copytree(original, directory := Path(where) / "model")
        files.write_json(directory / "lowbit.json", config)
        try:
            lb.load_model(directory)
        except (ValueError, FileNotFoundError) as error:
            assert str(directory) in str(error)


# -- one by one --------------------------------------------------------------------------------------------------------
ONE = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize("size", [0x280, 0x380, 0x480, 0x580])
def test_a_header_whose_size_has_the_bytes_of_a_pickle(tmp_path, size):
    """The file of every 64th model begins so: a size is written least byte first."""
    whole, path = {"a": torch.arange(4.0)}, tmp_path / "weights.safetensors"
    for length in range(size):
        path.write_bytes(library.save(whole, metadata={"pad": "x" * length}))
        if path.read_bytes()[:8] == size.to_bytes(8, "little"):
            break
    data = path.read_bytes()
    assert data[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
    assert torch.equal(safetensors.read(path, hashlib.sha256(data).hexdigest(), len(data))["a"], whole["a"])


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "header too small"),
        (b"\xff" * 40, "header too large"),
        (pickle.dumps({"a": 1}), "is a pickle .*, .* can run code .* as safetensors"),
        (b"PK\x03\x04" + bytes(100), "is a pickle"),
        (described([]), "invalid JSON in header"),
        (described({"a": {}}), "missing field `dtype`"),
        (described({"a": {**ONE, "dtype": "F7"}}, bytes(4)), "unknown variant `F7`"),
        (described({"a": {**ONE, "shape": [10**12, 10**12]}}, bytes(4)), "overflow computing buffer size"),
        (described({"a": {**ONE, "shape": [10**30, 0], "data_offsets": [0, 0]}}), "invalid JSON in header"),
        (described({"a": {**ONE, "shape": [2**62, 2**62, 0], "data_offsets": [0, 0]}}), "overflow computing"),
        (described({"a": {**ONE, "shape": [True]}}, bytes(4)), "invalid JSON in header"),
        (described({"a": ONE, "b": ONE}, bytes(4)), "invalid offset for tensor"),
        (described({"a": {**ONE, "data_offsets": [4, 8]}}, bytes(8)), "invalid offset for tensor"),
        (described({"a": ONE}, bytes(8)), "file not fully covered"),
        (described({"a": ONE})[:-1] + b', "a": {}}', "invalid JSON in header"),
        (len(b'{"a":1,"a":2}').to_bytes(8, "little") + b'{"a":1,"a":2}', "invalid JSON in header"),
        ((200_000).to_bytes(8, "little") + b'{"a":' + b"[" * 199_995, "recursion limit exceeded"),
        ((9).to_bytes(8, "little") + b'{"a": 1}\xff', "invalid UTF-8 in header"),
        ((6).to_bytes(8, "little") + b'{"a":9' + b"9" * 10_000, "invalid JSON in header"),
    ],
)  # fmt: skip
def test_headers_that_are_none(saved, data, told):
    put(saved, data)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=told) as caught:
            lb.load_model(saved)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
    assert weights_of(saved).name in str(caught.value)


def test_a_tensor_of_more_axes_than_torch_has_is_refused(saved):
    put(saved, described({"a": {**ONE, "shape": [1] * 65}}, bytes(4)))
    with pytest.raises(ValueError) as caught:
        lb.load_model(saved)
    assert str(saved) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"format": "lowbit-model", "a": ' + "[" * 100_000, "nested too deeply"),
        ('{"format": "lowbit-model", "a": ' + "[" * 900 + "]" * 900 + "}", "format version None|nested too deeply"),
        ('{"format": "lowbit-model", "version": ' + "9" * 5000 + "}", "is damaged: it is not JSON"),
        ('{"format": "lowbit-model", "version": "' + "x" * 10**6 + '"}', "has format version 'xxx"),
        ("", "is damaged: it is not JSON"),
    ],
    ids=["deep", "less deep", "digits", "long", "empty"],
)
def test_configs_that_are_none(saved, text, told):
    (saved / "lowbit.json").write_text(text)
    for load in (lambda: lb.load_model(saved), lambda: lb.load_model(saved, gpt(None))):
        with pytest.raises(ValueError, match=told) as caught:
            load()
        assert "lowbit.json" in str(caught.value) and len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "change",
    [{name: 10**12} for name in ("vocab", "layers", "dim", "hidden", "heads")]
    + [{"layers": 10**12, "dim": 10**12}, {"layers": 2.5}, {"layers": "2"}, {"rope_base": float("nan")}, {"dim": True}],
    ids=str,
)
def test_a_config_with_absurd_sizes_builds_nothing(saved, change):
    config = files.read_json(saved / "lowbit.json")
    config["model"]["config"] |= change
    files.write_json(saved / "lowbit.json", config)
    with pytest.raises(ValueError, match=r"lowbit.json(: cannot build| does not fit this model)"):
        lb.load_model(saved)


def test_what_is_no_regular_file_is_refused(saved):
    for name in ("lowbit.json", weights_of(saved).name):
        path = saved / name
        kept = path.read_bytes()
        path.unlink()
        path.mkdir()
        with pytest.raises(ValueError, match=f"{name} is not a regular file"):
            lb.load_model(saved)
        path.rmdir()
        if hasattr(os, "mkfifo"):
            os.mkfifo(path)  # reading one would wait for ever
            with pytest.raises(ValueError, match=f"{name} is not a regular file"):
                lb.load_model(saved)
            path.unlink()
        path.write_bytes(kept)
    lb.load_model(saved)
    with pytest.raises(FileNotFoundError, match="is not a directory that save_model wrote"):
        lb.load_model(saved / "lowbit.json")


# -- what is loaded belongs to the model -------------------------------------------------------------------------------
@pytest.mark.parametrize("start", ["alone", "meta"])
def test_no_parameter_is_mapped_on_the_file(saved, start):
    model = lb.load_model(saved, None if start == "alone" else gpt(None).to("meta"))
    path = weights_of(saved)
    size = path.stat().st_size
    with open(path, "r+b") as file:  # in place, as no save does
        file.write(b"\xff" * size)
    assert same_state(model, gpt())
    os.truncate(path, 0)
    assert same_state(model, gpt())
    storages = [value.untyped_storage() for value in model.state_dict().values()]
    assert all(s.nbytes() == v.nbytes for s, v in zip(storages, model.state_dict().values(), strict=True))


@pytest.mark.parametrize("start", ["alone", "meta"])
def test_loading_draws_no_random_numbers(saved, monkeypatch, start):
    skeleton = None if start == "alone" else gpt(None).to("meta")
    before = torch.get_rng_state()
    drawn = lambda *args, **kwargs: pytest.fail("a weight was drawn")
    monkeypatch.setattr(torch, "randn", drawn)
    assert isinstance(lb.load_model(saved, skeleton), GPT)
    assert torch.equal(torch.get_rng_state(), before)


# -- the format, against the library that defines it -------------------------------------------------------------------
DTYPES = (
    "bool uint8 int8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64 float8_e4m3fn float8_e5m2 "
    "float8_e8m0fnu complex64"
).split()


def test_every_dtype_is_written_and_read_as_the_library_does(tmp_path):
    torch.manual_seed(0)
    tensors = {}
    for name in DTYPES:
        dtype = getattr(torch, name)
        bits = torch.randint(0, 2, (3, 5, dtype.itemsize), dtype=torch.uint8)
        tensors[f"{name} é"] = bits.view(dtype).squeeze(-1)
        tensors[f"{name} turned"] = bits.view(dtype).squeeze(-1).t()
        tensors[f"{name} empty"] = torch.empty(0, 7, dtype=dtype)
        tensors[f"{name} one"] = bits[0, 0].view(dtype)[0]
    digest, size = safetensors.write(tmp_path / "ours", tensors)
    theirs = library.load_file(tmp_path / "ours")
    library.save_file({name: value.contiguous().clone() for name, value in tensors.items()}, tmp_path / "theirs")
    data = (tmp_path / "theirs").read_bytes()
    ours = safetensors.read(tmp_path / "theirs", hashlib.sha256(data).hexdigest(), len(data))
    again = safetensors.read(tmp_path / "ours", digest, size)
    for read in (theirs, ours, again):
        assert read.keys() == tensors.keys()
        for name, value in tensors.items():
            assert read[name].dtype == value.dtype and read[name].shape == value.shape
            as_bytes = (read[name].contiguous().reshape(-1), value.contiguous().reshape(-1))
            assert torch.equal(*(part.view(torch.uint8) for part in as_bytes))


def test_conjugate_and_negative_views_are_written_as_the_numbers_they_show(tmp_path):
    x = torch.tensor([1 + 2j, 3 - 4j])
    digest, size = safetensors.write(tmp_path / "file", {"conj": x.conj(), "neg": x.conj().imag})
    read = safetensors.read(tmp_path / "file", digest, size)
    assert np.array_equal(read["conj"].numpy(), np.array([1 - 2j, 3 + 4j], dtype=np.complex64))
    assert np.array_equal(read["neg"].numpy(), np.array([-2, 4], dtype=np.float32))


@pytest.mark.skipif(sys.byteorder != "little", reason="the format is little-endian")
def test_data_begins_at_a_multiple_of_eight(original):
    assert int.from_bytes(weights_of(original).read_bytes()[:8], "little") % 8 == 0
