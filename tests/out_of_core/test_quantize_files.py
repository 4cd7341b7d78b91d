"""quantize_files: the bits of quantizing in memory, from files, in less memory than the model takes."""

from __future__ import annotations

import copy
import errno
import inspect
import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import lowbit as lb
from lowbit.calibrate.methods import METHODS, signround
from lowbit.serialize import empty_weights, shards

ROOT = Path(lb.__file__).parents[1]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = torch.arange(12).reshape(2, 6)


def saved(directory: Path, name: str, dtype: torch.dtype) -> type:
    """A tiny model of that class in several files of transformers; the class."""
    transformers = pytest.importorskip("transformers")
    sizes = {**SIZES, "vocab_size": 100, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**sizes)).to(dtype)
    model.save_pretrained(directory, max_shard_size="60KB")
    assert (directory / shards.INDEX).exists()
    return kind


def same(a: nn.Module, b: nn.Module) -> bool:
    one, two = a.state_dict(), b.state_dict()
    return one.keys() == two.keys() and all(torch.equal(one[k], two[k]) and one[k].dtype == two[k].dtype for k in one)


@pytest.mark.parametrize(
    ("name", "dtype", "recipe", "method", "skip"),
    [
        ("LlamaForCausalLM", torch.bfloat16, "int8", "nearest", ("lm_head",)),
        ("LlamaForCausalLM", torch.float32, {"*": "int4-weight-only:group32", "*.down_proj": "nvfp4"}, "search", ()),
        ("BertModel", torch.float32, "nf4", "mse", ()),
        ("GPT2LMHeadModel", torch.float16, "int8", "nearest", ("*.c_fc",)),
    ],
)
def test_files_have_the_bits_of_quantizing_in_memory(tmp_path, name, dtype, recipe, method, skip):
    kind = saved(tmp_path / "plain", name, dtype)
    told = []
    report = lb.quantize_files(
        tmp_path / "plain", recipe, tmp_path / "out", method, skip=skip, shard_bytes=30_000,
        progress=lambda what, done, total: told.append((done, total)),
    )  # fmt: skip
    model = kind.from_pretrained(tmp_path / "plain", dtype="auto").eval()
    found = lb.calibrate(model, recipe, None, method, skip=skip) if method != "nearest" else None
    expected = lb.quantize_(model, recipe, found, skip=skip)
    assert str(report) == str(expected) and report.left == expected.left
    assert told == [(i, len(told)) for i in range(len(told))] and len(told) > 2

    lb.save_model(model, tmp_path / "saved")
    ours, theirs = lb.load_model(tmp_path / "out"), lb.load_model(tmp_path / "saved")
    assert same(ours, theirs) and type(ours) is type(theirs)
    with torch.no_grad():
        assert torch.equal(ours(TOKENS)[0], theirs(TOKENS)[0])
    __import__("lowbit.integrations.transformers")
    again = kind.from_pretrained(tmp_path / "out")
    assert same(again, theirs) and again.config.dtype == dtype
    for path in (tmp_path / "out").glob("model-*"):
        held = safetensors.torch.load_file(path)
        assert (
            len({name.rpartition(".")[0] for name in held}) == 1
            or sum(value.nbytes for value in held.values()) <= 30_000
        )
    assert not list((tmp_path / "out").glob(".*")) and not (tmp_path / "out" / "lowbit-progress.json").exists()


def large(layers: int) -> nn.Module:
    """A chain of blocks of two layers each."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(1024, 512), nn.Linear(512, 1024)) for _ in range(layers // 2)))


LIMITED = """
import resource, sys, torch, lowbit as lb
from lowbit.serialize import empty_weights
torch.set_num_threads(1)
lb.quantize_(nn.Sequential(nn.Linear(1024, 512)), "int8")    # what a first call allocates for good
torch.randn(64, 64) @ torch.randn(64, 64)
with empty_weights():
    model = large(LAYERS)
batches = [torch.randn(32, 1024, generator=torch.Generator().manual_seed(i)) for i in range(2)] if METHOD else None
if METHOD:
    lb.calibrate(nn.Sequential(nn.Linear(1024, 512), nn.Linear(512, 1024)), RECIPE, batches, METHOD)
held = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (held + LIMIT, held + LIMIT))
try:
    large(LAYERS)
except RuntimeError as error:
    print(error)
lb.quantize_files(sys.argv[1], RECIPE, sys.argv[2], METHOD, batches=batches, model=model, shard_bytes=SHARD)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "method", "layers", "limit"),
    [("int8", None, 104, 64 << 20), ("mxfp8-weight-only", "search", 62, 40 << 20)],
)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit is Linux's")
def test_a_checkpoint_three_times_the_memory_is_quantized(tmp_path, recipe, method, layers, limit):
    shard = limit // 2
    model = large(layers)
    (tmp_path / "plain").mkdir()
    safetensors.torch.save_file(model.state_dict(), tmp_path / "plain" / "model.safetensors")
    assert (tmp_path / "plain" / "model.safetensors").stat().st_size > 3 * limit
    code = (
        f"from torch import nn\nLAYERS, LIMIT, SHARD = {layers}, {limit}, {shard}\n"
        f"RECIPE, METHOD = {recipe!r}, {method!r}\n"
        f"{inspect.getsource(large)}{LIMITED}"
    )

    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "plain"), str(tmp_path / "out")], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"},
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "can't allocate memory" in done.stdout, "the limit is no limit"
    batches = [torch.randn(32, 1024, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    lb.quantize_(model, recipe, lb.calibrate(model, recipe, batches, method) if method else None)
    with empty_weights():
        empty = large(layers)
    assert same(lb.load_model(tmp_path / "out", empty), model)


SHORT_SIGNROUND = METHODS["signround"]._replace(tune=partial(signround.tune, iterations=4))
DATA = tuple(torch.randint(0, 100, (2, 9), generator=torch.Generator().manual_seed(i)) for i in range(3))


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("name", "dtype", "recipe", "method", "skip"),
    [
        ("LlamaForCausalLM", torch.bfloat16, "int4-weight-only:group32", None, ("lm_head",)),
        ("LlamaForCausalLM", torch.float32, {"*": "nf4", "*.down_proj": "nvfp4"}, "search", ()),
        ("LlamaForCausalLM", torch.float32, "int8", ("smoothquant", "ls-gptq"), ("lm_head",)),
        ("GPT2LMHeadModel", torch.float16, "int8-static", ("gptq", "percentile"), ("lm_head",)),
        ("BertModel", torch.float32, "int4-weight-only", ("hadamard", "gptq"), ("*pooler*",)),
        ("BertModel", torch.float32, "nf4", SHORT_SIGNROUND, ("*pooler*",)),
        ("BertModel", torch.float32, "int8", "signed", ()),
    ],
)
def test_files_have_the_bits_of_calibrating_in_memory(tmp_path, name, dtype, recipe, method, skip):
    kind = saved(tmp_path / "plain", name, dtype)
    report = lb.quantize_files(
        tmp_path / "plain", recipe, tmp_path / "out", method, batches=DATA, skip=skip, shard_bytes=30_000
    )
    model = kind.from_pretrained(tmp_path / "plain", dtype="auto").eval()
    found = lb.calibrate(model, recipe, DATA, method, skip=skip)
    expected = lb.quantize_(model, recipe, found, skip=skip)
    assert str(report) == str(expected) and report.left == expected.left
    assert same(lb.load_model(tmp_path / "out"), model)
    assert not (tmp_path / "out" / "calibration").exists()


class Killed(Exception):
    pass


def plain(tmp_path: Path) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    (tmp_path / "plain").mkdir()
    safetensors.torch.save_file(model.state_dict(), tmp_path / "plain" / "model.safetensors")
    return model


def test_a_run_that_was_stopped_goes_on_with_the_next_file(tmp_path):
    model = plain(tmp_path)

    def go(out: str, stop: int | None, recipe: str = "int8") -> list[int]:
        told: list[int] = []

        def progress(what: str, done: int, total: int) -> None:
            told.append(done)
            if done == stop:
                raise Killed

        lb.quantize_files(
            tmp_path / "plain", recipe, tmp_path / out, model=copy.deepcopy(model).to("meta"), shard_bytes=5000,
            progress=progress,
        )  # fmt: skip
        return told

    with pytest.raises(Killed):
        go("out", 3)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("model-*")}
    assert len(before) == 3 and not (tmp_path / "out" / "lowbit.json").exists()
    with pytest.raises(ValueError, match="has an interrupted run with recipe"):
        go("out", None, "nf4")
    go("out", None)
    assert all((tmp_path / "out" / name).stat().st_mtime_ns == time for name, time in before.items())
    go("whole", None)
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    with pytest.raises(FileExistsError, match="is not empty"):
        go("out", None)
    lb.quantize_(model, "int8")
    assert same(lb.load_model(tmp_path / "out", nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))), model)


@pytest.mark.parametrize("batches", [None, [torch.ones(4, 64)]], ids=["without data", "with data"])
def test_a_run_that_is_killed_in_its_first_write_goes_on(tmp_path, monkeypatch, batches):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64)) for _ in range(2)))
    (tmp_path / "plain").mkdir()
    safetensors.torch.save_file(model.state_dict(), tmp_path / "plain" / "model.safetensors")
    replace = os.replace

    def go(out: str, killed_at: int | None = None) -> int:
        """Kill the process, as far as files can tell, before that rename; how many renames there were."""
        renames = 0

        def counted(*paths: object) -> None:
            nonlocal renames
            if renames == killed_at:
                raise Killed
            renames += 1
            replace(*paths)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", counted)
            patch.setattr(os, "fsync", lambda handle: None)  # takes most of the time
            if killed_at is not None:
                patch.setattr(Path, "unlink", lambda *_, **__: None)
            lb.quantize_files(
                tmp_path / "plain", "int8", tmp_path / out, "search" if batches else None, batches=batches,
                model=copy.deepcopy(model).to("meta"), shard_bytes=1,
            )  # fmt: skip
        return renames

    for killed_at in range(go("whole")):
        out = tmp_path / f"out{killed_at}"
        with pytest.raises(Killed):
            go(out.name, killed_at)
        assert list(out.rglob(".*.tmp"))
        go(out.name)
        assert {path.name for path in out.iterdir()} == {path.name for path in (tmp_path / "whole").iterdir()}
        for path in (tmp_path / "whole").iterdir():
            assert (out / path.name).read_bytes() == path.read_bytes()

    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / f".thesis.txt.{'0' * 16}.tmp").write_text("")
    with pytest.raises(FileExistsError, match="is not empty"):
        go("mine")


@pytest.mark.thinned(2)
@pytest.mark.parametrize("batches", [None, [torch.ones(4, 64)]], ids=["without data", "with data"])
def test_a_full_disk_is_named_with_the_file_and_what_remains(tmp_path, monkeypatch, batches):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64)) for _ in range(2)))
    (tmp_path / "plain").mkdir()
    safetensors.torch.save_file(model.state_dict(), tmp_path / "plain" / "model.safetensors")

    def go(out: Path, room: int = 1000) -> int:
        """Quantize to a disk that has room for so many flushes; how many there were."""
        flushes = 0

        def counted(handle: int) -> None:
            nonlocal flushes
            if flushes == room:
                raise OSError(errno.ENOSPC, "No space left on device")
            flushes += 1

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", counted)
            lb.quantize_files(
                tmp_path / "plain", "int8", out, "search" if batches else None, batches=batches,
                model=copy.deepcopy(model).to("meta"), shard_bytes=1,
            )  # fmt: skip
        return flushes

    for room in range(go(tmp_path / "whole")):
        out = tmp_path / f"out{room}"
        told = rf"No space left on device; finished parts in {out}\S* are intact: .*continue from there: '{out}/.*\w'"
        with pytest.raises(OSError, match=told) as caught:
            go(out, room)
        assert caught.value.errno == errno.ENOSPC and ".tmp" not in str(caught.value)
        go(out)
        assert all((out / path.name).read_bytes() == path.read_bytes() for path in (tmp_path / "whole").iterdir())


def test_a_run_that_is_killed_while_its_calibration_is_removed_goes_on(tmp_path, monkeypatch):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64)) for _ in range(2)))
    (tmp_path / "plain").mkdir()
    safetensors.torch.save_file(model.state_dict(), tmp_path / "plain" / "model.safetensors")
    batches = [torch.randn(4, 64)]

    def go(out: Path) -> tuple[lb.Report, list[str]]:
        told: list[str] = []
        report = lb.quantize_files(
            tmp_path / "plain", {"*": "int8", "0.0": "int8-static"}, out, batches=batches, shard_bytes=1,
            model=copy.deepcopy(model).to("meta"), progress=lambda what, done, total: told.append(what),
        )  # fmt: skip
        return report, told

    whole, told = go(tmp_path / "whole")
    assert "block" in told
    remove, done = shutil.rmtree, False
    for killed_at in range(20):

        def removed(directory: Path, killed_at: int = killed_at, **_: object) -> None:
            for path in sorted(directory.rglob("*.*"), reverse=True)[:killed_at]:
                path.unlink()
            if killed_at % 2 or not list(directory.rglob("*.*")):
                remove(directory / "blocks")
            raise Killed

        out = tmp_path / f"out{killed_at}"
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", removed)
            with pytest.raises(Killed):
                go(out)
        done = not list((out / "calibration").rglob("*.*"))
        report, told = go(out)
        assert str(report) == str(whole) and "block" not in told
        assert {path.name for path in out.iterdir()} == {path.name for path in (tmp_path / "whole").iterdir()}
        assert all((out / path.name).read_bytes() == path.read_bytes() for path in (tmp_path / "whole").iterdir())
        if done:
            break
    assert done


@pytest.mark.slow
@pytest.mark.parametrize("method", ["guided-gptq", "ls-gptq"])
def test_a_calibration_from_files_goes_on_from_every_block_and_file(tmp_path, method):
    saved(tmp_path / "plain", "LlamaForCausalLM", torch.float32)

    def go(out: str, stop: int | None) -> list[str]:
        told: list[str] = []

        def progress(what: str, done: int, total: int) -> None:
            told.append(f"{what} {done} of {total}")
            if len(told) - 1 == stop:
                raise Killed

        lb.quantize_files(
            tmp_path / "plain", "int4-weight-only:group32", tmp_path / out, method, batches=DATA, shard_bytes=30_000,
            progress=progress,
        )  # fmt: skip
        return told

    told = go("whole", None)
    assert told[:4] == ["block 0 of 2", "block 1 of 2", "block 2 of 2", "file 0 of 4"]
    for stop in range(len(told)):
        with pytest.raises(Killed):
            go(f"out{stop}", stop)
        again = go(f"out{stop}", None)
        assert again == told[3:] if stop >= 3 else again == told
        assert {path.name for path in (tmp_path / f"out{stop}").iterdir()} == {
            path.name for path in (tmp_path / "whole").iterdir()
        }
        for path in (tmp_path / "whole").iterdir():
            assert (tmp_path / f"out{stop}" / path.name).read_bytes() == path.read_bytes()


def test_what_does_not_fit_is_refused_before_a_file_is_written(tmp_path):
    model = plain(tmp_path)

    def refused(error: type[Exception], match: str, model: nn.Module, recipe: str = "int8", **more: object) -> None:
        with pytest.raises(error, match=match):
            lb.quantize_files(tmp_path / "plain", recipe, tmp_path / "out", model=model, **more)
        assert not (tmp_path / "out").exists()

    refused(ValueError, "is not on the meta device", model)
    meta = copy.deepcopy(model).to("meta")
    refused(ValueError, "a data-free method, one of nearest, .*got 'gptq'", meta, method="gptq")
    refused(ValueError, "smoothquant needs data; give batches=", meta, method="smoothquant")
    refused(ValueError, "need calibration data", meta, "int8-static")
    refused(ValueError, "shard_bytes must be 1 or more", meta, shard_bytes=0)
    refused(ValueError, "skip: the function .* cannot be written", meta, skip=lambda module, path: path == "0")
    refused(ValueError, "lacks 2 tensors, such as 6.weight", nn.Sequential(*meta, nn.Linear(64, 64, device="meta")))
    wide = nn.Sequential(nn.Linear(32, 64, device="meta"), *list(meta)[1:])
    refused(ValueError, r"0.weight is \[64, 64\], and the model has \[64, 32\]", wide)
    attention = nn.Sequential(nn.MultiheadAttention(16, 2, device="meta"))
    state = nn.Sequential(nn.MultiheadAttention(16, 2)).state_dict()
    safetensors.torch.save_file(state, tmp_path / "plain" / "model.safetensors")
    refused(ValueError, "made of a part of a tensor", attention)


def test_damaged_files_are_one_message(tmp_path):
    model = plain(tmp_path)
    path = tmp_path / "plain" / "model.safetensors"
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    head = json.loads(whole[8 : 8 + length])

    def spoiled(**row: object) -> bytes:
        text = json.dumps({**head, "0.weight": {**head["0.weight"], **row}}).encode()
        return len(text).to_bytes(8, "little") + text + whole[8 + length :]

    for held in (
        b"", whole[:40], whole[:-8], b"\xff" * 64, spoiled(shape=[64, 65]), spoiled(data_offsets=[-8, 0]),
        spoiled(dtype="F7"), spoiled(shape=None), spoiled(data_offsets=[1 << 60, (1 << 60) + 64 * 64 * 4]),
    ):  # fmt: skip
        path.write_bytes(held)
        with pytest.raises(ValueError, match=r"model.safetensors is (damaged|not a safetensors file)"):
            lb.quantize_files(path.parent, "int8", tmp_path / "out", model=copy.deepcopy(model).to("meta"))
    path.unlink()
    for file in ("../model.safetensors", "x" * 5000, "a\0b", "\ud800", ""):
        (path.parent / shards.INDEX).write_text(json.dumps({"weight_map": {"0.weight": file}}))
        with pytest.raises(ValueError, match="names a file outside") as caught:
            lb.quantize_files(path.parent, "int8", tmp_path / "out", model=copy.deepcopy(model).to("meta"))
        assert len(str(caught.value)) < 500


DTYPES = ("uint16", "uint32", "uint64", "complex64", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz", "float64")


def test_every_dtype_of_the_format_goes_from_file_to_file(tmp_path):
    model = plain(tmp_path)
    path = tmp_path / "plain" / "model.safetensors"
    for name in DTYPES:
        dtype = getattr(torch, name)
        bits = torch.randint(0, 2, (6, dtype.itemsize), dtype=torch.uint8)
        model.register_buffer(name, bits.view(dtype).squeeze(-1))
    safetensors.torch.save_file(model.state_dict(), path)
    lb.quantize_files(path.parent, "int8", tmp_path / "out", model=copy.deepcopy(model).to("meta"))
    (file,) = (tmp_path / "out").glob("*.safetensors")
    held = safetensors.torch.load_file(file)
    for name in DTYPES:
        buffer = model.get_buffer(name)
        assert held[name].dtype == buffer.dtype and torch.equal(held[name].view(torch.uint8), buffer.view(torch.uint8))


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "F6_E3M2"])
def test_a_dtype_that_is_not_read_is_not_called_damage(tmp_path, dtype):
    head = json.dumps({"a": {"dtype": dtype, "shape": [8], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes(4))
    with pytest.raises(ValueError, match=f"model.safetensors has 'a' in {dtype}, a dtype that lowbit does not support"):
        lb.quantize_files(tmp_path, "int8", tmp_path / "out", model=nn.Linear(8, 8, device="meta"))


def test_the_index_says_which_file_a_tensor_is_read_from(tmp_path):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    state = model.state_dict()
    directory = tmp_path / "plain"
    directory.mkdir()
    first = {name: state[name] for name in ("0.weight", "0.bias")}
    stale = {**state, "0.weight": torch.zeros(64, 64), "0.bias": torch.ones(64)}
    safetensors.torch.save_file(first, directory / "a.safetensors")
    safetensors.torch.save_file(stale, directory / "b.safetensors")
    where = {name: "a.safetensors" if name in first else "b.safetensors" for name in state}

    def index(where: dict[str, str]) -> None:
        (directory / shards.INDEX).write_text(json.dumps({"weight_map": where}))

    def quantized() -> None:
        lb.quantize_files(directory, "int8", tmp_path / "out", model=copy.deepcopy(model).to("meta"))

    index({**where, "1.bias": "a.safetensors"})
    with pytest.raises(
        ValueError, match=r"index.json says that '1\.bias' is in a\.safetensors, which does not have it"
    ):
        quantized()
    index({name: file for name, file in where.items() if name != "1.bias"})
    with pytest.raises(ValueError, match=r"index.json does not name '1\.bias', which b\.safetensors holds"):
        quantized()
    assert not (tmp_path / "out").exists()
    index(where)
    before = shards.Checkpoint(directory).digest()
    quantized()
    index({**where, "0.bias": "b.safetensors"})
    assert shards.Checkpoint(directory).digest() != before
    lb.quantize_(model, "int8")
    with empty_weights():
        empty = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    assert same(lb.load_model(tmp_path / "out", empty), model)


def test_tensors_that_are_tied_in_the_model_must_be_equal_in_the_files(tmp_path):
    model = plain(tmp_path)
    model[1].weight = model[0].weight
    model.to("meta")
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match=r"one tensor for 0\.weight and 1.weight"):
        lb.quantize_files(tmp_path / "plain", "int8", tmp_path / "out", model=model)


@pytest.mark.parametrize("dtype", ["auto", "fp16"])
def test_the_command_quantizes_from_disk(run, tmp_path, dtype):
    saved(tmp_path / "plain", "LlamaForCausalLM", torch.float32)
    (tmp_path / "plain" / "tokenizer.json").write_text("{}")
    given = ("quantize", str(tmp_path / "plain"), "int4-weight-only:group32", "--method", "search", "--dtype", dtype)
    made = json.loads(run(*given, "--out", str(tmp_path / "disk"), "--from-disk", "--json"))
    in_memory = json.loads(run(*given, "--out", str(tmp_path / "memory"), "--json"))
    assert {**made, "out": None} == {**in_memory, "out": None}
    assert same(lb.load_model(tmp_path / "disk"), lb.load_model(tmp_path / "memory"))
    assert (tmp_path / "disk" / "tokenizer.json").read_text() == "{}"


def test_a_model_that_is_no_chain_of_blocks_is_calibrated_in_memory(tmp_path):
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64))
    (tmp_path / "plain").mkdir()
    safetensors.torch.save_file(model.state_dict(), tmp_path / "plain" / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"Sequential is not a chain of blocks.* call lowbit.calibrate and lowbit.quant"
    ):
        lb.quantize_files(
            tmp_path / "plain", "int8", tmp_path / "out", "gptq", batches=[torch.randn(2, 64)], model=model.to("meta")
        )
