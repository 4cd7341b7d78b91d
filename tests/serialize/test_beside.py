"""Several processes and threads that save to one directory, and load from it, at once."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from support.processes import context
from torch import nn

import lowbit as lb
from lowbit import files
from lowbit.demo.gpt import GPT, GPTConfig

CONFIG = GPTConfig(vocab=32, context=8, layers=1, heads=2, dim=8, hidden=16)


def mark(model: nn.Module) -> float:
    """The number that ``marked`` filled the model with; fails if the model has several."""
    (value,) = {float(x) for p in model.parameters() for x in (p.detach().min(), p.detach().max())}
    return value


def marked(number: float) -> GPT:
    model = GPT(CONFIG)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(number)
    return model


def save_often(directory: str, numbers: list[int]) -> None:
    torch.set_num_threads(1)
    for number in numbers:
        lb.save_model(marked(number), directory)


def read_often(directory: str, stop: threading.Event, found: list[object]) -> None:
    while not stop.is_set():
        try:
            found.append(mark(lb.load_model(directory)))
        except BaseException as error:
            found.append(error)
            return


def whole(directory: Path) -> None:
    """The directory holds one model and nothing half written."""
    mark(lb.load_model(directory))
    assert not list(directory.glob(".*"))


def test_threads_that_save_and_load_at_once_all_succeed(tmp_path):
    lb.save_model(marked(99), tmp_path)
    stop, found, failed = threading.Event(), [], []

    def saver(numbers: list[int]) -> None:
        try:
            save_often(str(tmp_path), numbers)
        except BaseException as error:
            failed.append(error)

    threads = torch.get_num_threads()
    savers = [threading.Thread(target=saver, args=(list(range(k, k + 20)),)) for k in (0, 100, 200)]
    readers = [threading.Thread(target=read_often, args=(str(tmp_path), stop, found)) for _ in range(2)]
    for thread in (*savers, *readers):
        thread.start()
    for thread in savers:
        thread.join()
    stop.set()
    for thread in readers:
        thread.join()
    torch.set_num_threads(threads)
    assert not failed, failed
    assert found and all(isinstance(value, float) for value in found), found[-1]
    whole(tmp_path)
    lb.save_model(marked(7), tmp_path)
    assert mark(lb.load_model(tmp_path)) == 7, "the last one wins"


def test_processes_that_save_at_once_leave_a_whole_model(tmp_path):
    lb.save_model(marked(99), tmp_path)
    savers = [context().Process(target=save_often, args=(str(tmp_path), list(range(k, k + 15)))) for k in (0, 100)]
    for process in savers:
        process.start()
    seen = set()
    while any(process.is_alive() for process in savers):
        seen.add(mark(lb.load_model(tmp_path)))
    for process in savers:
        process.join()
        assert process.exitcode == 0
    assert seen
    whole(tmp_path)


def test_a_save_does_not_follow_a_planted_link(tmp_path, monkeypatch):
    """Even one with the very name that the temporary file will have."""
    target = tmp_path / "precious"
    target.write_bytes(b"mine")
    directory = tmp_path / "model"
    directory.mkdir()
    monkeypatch.setattr("secrets.token_hex", lambda size: "0" * 2 * size)
    names = [f"weights-{'0' * 16}.safetensors", f".lowbit.json.{'0' * 16}.tmp"]
    for name in names:
        os.symlink(target, directory / name)
        with pytest.raises(FileExistsError, match="cannot be saved"):
            lb.save_model(marked(1), directory)
        assert target.read_bytes() == b"mine" and (directory / name).is_symlink()
        (directory / name).unlink()
    os.symlink(target, directory / "lowbit.json")  # replaced, as a name is; what it pointed to stays
    with pytest.raises(ValueError, match="is damaged"):
        lb.save_model(marked(1), directory)
    assert target.read_bytes() == b"mine"


def test_the_config_is_written_through_no_link(tmp_path):
    kept = tmp_path / "kept.json"
    files.write_json(tmp_path / "a.json", {"a": 1})
    (tmp_path / "a.json").rename(kept)
    os.symlink(kept, tmp_path / "a.json")
    files.write_json(tmp_path / "a.json", {"a": 2})
    assert files.read_json(kept) == {"a": 1} and files.read_json(tmp_path / "a.json") == {"a": 2}


def test_a_reader_goes_on_where_a_save_has_moved_the_model(tmp_path, monkeypatch):
    """A save ends between the reading of the config and that of the weights that it names."""
    from lowbit.serialize import safetensors

    lb.save_model(marked(1), tmp_path)
    read, pending = safetensors.read, [2, 3]

    def late(*arguments):
        if pending:
            lb.save_model(marked(pending.pop(0)), tmp_path)
        return read(*arguments)

    monkeypatch.setattr(safetensors, "read", late)
    assert mark(lb.load_model(tmp_path)) == 3
    (weights,) = tmp_path.glob("weights-*")
    weights.unlink()
    with pytest.raises(FileNotFoundError, match=r"which lowbit.json names, does not exist; copy the whole directory"):
        lb.load_model(tmp_path)
