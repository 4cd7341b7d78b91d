"""save_model and load_model where the system, the file or the model is at fault: errors that say what to do."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import lowbit as lb
from lowbit.demo.gpt import GPT, GPTConfig
from lowbit.files import read_json, write_json
from lowbit.serialize import safetensors
from lowbit.serialize.shards import Written


def gpt() -> GPT:
    return GPT(GPTConfig(vocab=32, context=8, layers=1, heads=2, dim=8, hidden=16))


@pytest.fixture
def saved(tmp_path) -> Path:
    lb.save_model(gpt(), tmp_path / "model")
    return tmp_path / "model"


# -- saving ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("value", "told"),
    [
        (torch.eye(2).to_sparse(), r"'b' is torch.sparse_coo, expected a dense tensor; .*persistent=False"),
        (torch.eye(2).to_mkldnn(), "'b' is torch._mkldnn"),
        (torch.zeros(2, dtype=torch.complex128), r"cannot hold torch.complex128 \(b\); convert it"),
    ],
    ids=["sparse", "mkldnn", "complex128"],
)
def test_buffers_that_no_file_holds_are_named(tmp_path, value, told):
    model = nn.Module()
    model.register_buffer("b", value)
    with pytest.raises(TypeError, match=told):
        lb.save_model(model, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ['{"format": "lowbit-model", "vers', "\x00", ""])
def test_a_damaged_config_is_not_called_another_programs(saved, text):
    (saved / "lowbit.json").write_text(text)
    with pytest.raises(ValueError, match=r"lowbit.json is damaged: it is not JSON"):
        lb.save_model(gpt(), saved)
    (saved / "lowbit.json").unlink()
    lb.save_model(gpt(), saved)


def test_model_and_directory_in_the_other_order(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(TypeError, match=r"load_model\(directory, model\)"):
        lb.load_model(model, tmp_path)
    with pytest.raises(TypeError, match="the model comes first, then the directory"):
        lb.save_model(tmp_path, model)


@pytest.mark.parametrize("where", ["weights", "config"])
def test_a_full_disk_names_the_directory(saved, monkeypatch, where):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = sorted(saved.iterdir())
    owner, name = (safetensors, "write") if where == "weights" else (os, "replace")
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, full)
        with pytest.raises(OSError, match=rf"cannot be saved to {saved} .*No space left on device.*before is whole"):
            lb.save_model(gpt(), saved)
    assert sorted(saved.iterdir()) == before
    assert isinstance(lb.load_model(saved), GPT)


LIMITED = """
import resource, sys, torch
import lowbit as lb
model = torch.nn.Linear(256, 256)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
try:
    lb.save_model(model, sys.argv[1])
except OSError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs limits on file sizes")
def test_a_write_that_really_fails_names_the_directory(tmp_path):
    done = subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert f"the model cannot be saved to {tmp_path} (" in done.stdout, done.stderr
    assert not list(tmp_path.iterdir())


def test_a_file_is_no_place_for_a_model(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match=r"cannot be saved to .*file \(File exists\); .*another directory"):
        lb.save_model(gpt(), tmp_path / "file")


# -- loading ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tied": {"a": ["b"]}}, "is damaged: TypeError tied names must be strings"),
        ({"tied": {"a": None}}, "is damaged: TypeError tied names must be strings"),
        ({"tied": ["ab"]}, "is damaged: TypeError tied names must be strings"),
        ({"model": "GPT"}, "is damaged"),
        ({"model": {}}, "is damaged"),
        ({"model": {"class": ["x"]}}, "the model's class must be a string"),
        ({"model": {"class": "lowbit.demo.gpt.GPT"}}, "cannot build 'lowbit.demo.gpt.GPT'"),
    ],
)
def test_entries_of_another_kind_are_damage(saved, changes, told):
    path = saved / "lowbit.json"
    write_json(path, {**read_json(path), **changes})
    with pytest.raises(ValueError, match=told):
        lb.load_model(saved)


class Turned(nn.Module):
    """With a table that is computed when it is built, as rotary embeddings have."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("count", torch.ones(1))

    def forward(self, x):
        return self.line(x) * self.table


def test_buffers_on_meta_that_no_file_holds_are_refused(tmp_path):
    model = nn.Sequential(Turned(), Turned())
    lb.quantize_(model, "int8", skip=())
    lb.save_model(model, tmp_path)
    with torch.device("meta"):
        born = nn.Sequential(Turned(), Turned())
    with pytest.raises(ValueError, match=r"does not hold 0.table, 1.table, non-persistent .*empty_weights"):
        lb.load_model(tmp_path, born)
    assert type(born[0].line) is nn.Linear and born[0].count.is_meta, "the model is left alone"
    for module in born:
        module.table = torch.arange(4.0)
    x = torch.randn(2, 4)
    assert torch.equal(lb.load_model(tmp_path, born)(x), model(x))


@pytest.mark.parametrize("changes", [{"files": 7}, {"files": [7]}, {"told": [1]}, {"files": None}])
def test_the_progress_of_a_stopped_run_that_is_damaged_is_named(tmp_path, changes):
    path = tmp_path / "lowbit-progress.json"
    write_json(path, {"run": {"recipe": "int8"}, "files": [], "told": {}, **changes})
    with pytest.raises(ValueError, match=r"lowbit-progress.json is damaged: TypeError .*start over"):
        Written(tmp_path, {"recipe": "int8"})
    write_json(path, {"run": {"recipe": "int8"}})
    with pytest.raises(ValueError, match=r"lowbit-progress.json is damaged: KeyError 'files'"):
        Written(tmp_path, {"recipe": "int8"})
