"""Two runs in one directory: the second is refused before it writes, and the directory is free when the first ends."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowbit as lb
from lowbit.demo import experiment
from lowbit.demo.gpt import GPT, GPTConfig
from lowbit.files import DirectoryLock, exclusive, write_json
from lowbit.serialize import saving

TEXT = "\n\n".join(f"Document {n}. " + "A model that is trained on little text. " * 25 for n in range(300))


def refused(call, directory: Path):
    """What ``call`` answers once another run has left ``directory``, in which it was refused before."""
    directory.mkdir(exist_ok=True)
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    other = DirectoryLock(directory, "another")
    with pytest.raises(BlockingIOError, match="another run writes to this directory; wait until it has ended"):
        call()
    assert {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()} == before
    other.release()
    return call()


def test_calibrate(tmp_path: Path):
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    batches = [torch.randn(4, 32)]
    found = refused(
        lambda: lb.calibrate(model, "int4-weight-only", batches, directory=tmp_path / "out"), tmp_path / "out"
    )
    again = refused(
        lambda: lb.calibrate(model, "int4-weight-only", batches, directory=tmp_path / "out"), tmp_path / "out"
    )
    assert found.rows.keys() == again.rows.keys()


def test_train(tmp_path: Path, run, monkeypatch):
    monkeypatch.setattr(experiment, "SPEED_TURNS", 1)
    (tmp_path / "text").write_text(TEXT)
    options = "--steps 2 --batch 2 --layers 1 --dim 32 --heads 2 --hidden 32 --vocab 256 --precision fp32"
    tiny = ["--data", str(tmp_path / "text"), *options.split(), "--recipe", "int8-weight-only"]
    out = tmp_path / "out"
    out.mkdir()
    other = DirectoryLock(out, "another")
    for more in ([], ["--overwrite"]):
        told = run("train", *tiny, "--out", str(out), *more, code=1)
        assert "lowbit train --out: another run writes to this directory" in told
    assert not list(out.iterdir())
    other.release()
    run("train", *tiny, "--out", str(out), "--json")
    assert (out / "report.md").exists()
    other = DirectoryLock(out, "another")
    assert "another run writes to this directory" in run("train", "--out", str(out), "--resume", code=1)
    other.release()


def test_a_ladder(tmp_path: Path, run):
    other = DirectoryLock(tmp_path, "another")
    told = run("fit", "--ladder", "--memory", "300MiB", "--quick", "--out", str(tmp_path), code=1)
    assert "lowbit fit --ladder --out: another run writes to this directory" in told
    other.release()


def test_a_plan(tmp_path: Path, run):
    for out in (tmp_path, tmp_path / "new"):
        with exclusive(out, "another"):
            told = run("fit", "demo", "--memory", "60%", "--out", str(out), code=1)
            assert "lowbit fit --out: another run writes to this directory" in told
    assert not list(tmp_path.iterdir())


def test_evaluate(tmp_path: Path, run, monkeypatch):
    (tmp_path / "text").write_text(TEXT)
    model, out = tmp_path / "model", tmp_path / "out"
    lb.save_model(GPT(GPTConfig(vocab=32, context=8, layers=1, heads=2, dim=8, hidden=16)), model)
    monkeypatch.setattr("lowbit.evaluate.run.cells_of", lambda *given: [])
    with exclusive(out, "another"):
        told = run("evaluate", str(model), "--text", str(tmp_path / "text"), "--out", str(out), code=1)
        assert "lowbit evaluate --out: another run writes to this directory" in told
        assert not list(out.iterdir())
    run("evaluate", str(model), "--text", str(tmp_path / "text"), "--out", str(out))
    assert (out / "evaluate.md").exists()


def test_a_model_is_saved_once_others_have_named_theirs(tmp_path: Path, monkeypatch):
    model = nn.Linear(4, 4)
    lb.save_model(model, tmp_path)
    monkeypatch.setattr(saving, "_LOCK_TIMEOUT", 0.0)
    refused(lambda: lb.save_model(model, tmp_path), tmp_path)
    monkeypatch.undo()

    other = threading.Thread(target=lambda: lb.save_model(nn.Linear(4, 4), tmp_path))

    def write(path: Path, value: dict[str, Any]) -> None:
        if other.ident is None:
            other.start()
            other.join(0.5)  # it comes between what this one has read and what it writes
        write_json(path, value)

    monkeypatch.setattr(saving, "write_json", write)
    lb.save_model(model, tmp_path)
    other.join()
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".safetensors"]
    lb.load_model(tmp_path, nn.Linear(4, 4))


def test_a_directory_that_was_made_for_nothing_goes_and_threads_have_one_each(tmp_path: Path):
    with exclusive(tmp_path / "a", "one"):
        with pytest.raises(BlockingIOError, match="two: another run"), exclusive(tmp_path / "a", "two"):
            pass
        with exclusive(tmp_path / "b", "two"):
            (tmp_path / "b" / "x").write_text("x")
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
