"""Directories for files of one process: they go with it, however it ends, and with no other one."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from lowbit.memory import stream_blocks_
from lowbit.models.wrap import wrappers
from lowbit.offload import offload_activations
from lowbit.optim import offload_
from lowbit.storage import directory
from lowbit.storage.directory import ScratchDirectory
from lowbit.storage.mapped import mapped_like

CHILD = """
import sys, torch
from lowbit.offload import offload_activations
x = torch.randn(64, 64, requires_grad=True)
with offload_activations(sys.argv[1], min_bytes=0) as context:
    loss = (x * 2).sin().cos().sin().sum()
print("ready", flush=True)
sys.stdin.read()
"""


def owners(directory) -> dict[str, list[str]]:
    """The files of each process that has a directory."""
    return {path.name.split("-")[2]: os.listdir(path) for path in directory.iterdir()}


def killed_in_forward(where) -> int:
    """The number of a process that has moved activations, and was killed then."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        x = torch.randn(64, 64, requires_grad=True)
        with offload_activations(where, min_bytes=0):
            loss = (x * 2).sin().cos().sin().sum()
            os.write(writer, b"!")
            signal.pause()
        loss.backward()
    assert os.read(reader, 1) == b"!"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reader)
    os.close(writer)
    return child


@pytest.mark.slow
def test_killed_processes_leave_what_the_next_one_removes_and_others_keep_theirs_until_they_end(tmp_path):
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as living:
        assert living.stdout.readline() == "ready\n"
        killed = str(killed_in_forward(tmp_path))
        assert owners(tmp_path).keys() == {str(living.pid), killed} and owners(tmp_path)[killed]
        mine = ScratchDirectory(tmp_path)
        assert owners(tmp_path).keys() == {str(living.pid), str(os.getpid())}
        assert owners(tmp_path)[str(living.pid)]
        mine.close()
        living.stdin.close()
        assert living.wait(60) == 0
    assert not owners(tmp_path)


def test_the_directory_goes_with_the_object_and_a_fork_does_not_remove_it(tmp_path):
    files = ScratchDirectory(tmp_path)
    child = os.fork()
    if child == 0:
        files.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert files.path.is_dir()
    del files
    assert not list(tmp_path.iterdir())


def test_bytes_come_back_and_room_is_given_back(tmp_path):
    files = ScratchDirectory(tmp_path, budget=4000)
    numbers = torch.randn(1000)
    path = files.reserve(4000)
    with pytest.raises(OSError, match=r"1 B more than the 3.91 KiB in use exceed the budget of 3.91 KiB"):
        files.reserve(1)
    directory.write(path, directory.bytes_of(numbers))
    back = torch.empty(1000)
    directory.read(path, directory.bytes_of(back))
    assert torch.equal(back, numbers)
    os.truncate(path, 100)
    with pytest.raises(OSError, match="100 of 4000 bytes are there"):
        directory.read(path, directory.bytes_of(back))
    files.release(path, 4000)
    files.release(files.reserve(4000), 4000)
    assert files.used == 0 and not list(files.path.iterdir())


def test_what_is_no_directory_of_ours_stays(tmp_path):
    (tmp_path / "lowbit-offload-7-abc").write_text("a file")
    (tmp_path / "target").mkdir()
    (tmp_path / "lowbit-offload-8-abc").symlink_to(tmp_path / "target")
    ScratchDirectory(tmp_path).close()
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    ("where", "error", "message"),
    [
        ("", ValueError, "got ''; for the current directory write '.'"),
        ("cuda:0", ValueError, "got 'cuda:0'; for a directory of that name write ./cuda:0"),
        ("CPU", ValueError, "got 'CPU'"), (None, TypeError, "got NoneType"), (torch.device("cpu"), TypeError, "device"),
    ],
)  # fmt: skip
def test_what_is_no_directory_is_refused_and_nothing_is_made(tmp_path, monkeypatch, where, error, message):
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(2)))
    for offload in (
        lambda: offload_activations(where),
        lambda: stream_blocks_(model, where),
        lambda: offload_(torch.optim.SGD(model.parameters()), where),
    ):
        with pytest.raises(error, match=f'offload: expected "cpu" or the path of a directory, .*{message}'):
            offload()
    assert not list(tmp_path.iterdir()) and not wrappers(model[0])


@pytest.mark.parametrize("name", ["lowbit-offload-run1", "lowbit-offload-7-abcdef01", "lowbit-offload-"])
@pytest.mark.parametrize("file", ["precious.txt", "0.bin", None])
def test_directories_of_users_stay_whatever_they_are_called(tmp_path, name, file):
    mine = tmp_path / name
    mine.mkdir(mode=0o700)
    if file:
        (mine / file).write_text("a week of work")
    inner = ScratchDirectory(mine)  # of a live process, in a directory of that name
    kept = inner.reserve(10)
    ScratchDirectory(tmp_path).close()
    assert mine.is_dir() and kept.exists() and (file is None or (mine / file).read_text() == "a week of work")
    inner.close()
    assert os.listdir(mine) == ([file] if file else [])


def test_files_of_users_in_a_directory_of_ours_stay_with_it(tmp_path):
    killed = str(killed_in_forward(tmp_path))
    (left,) = tmp_path.iterdir()
    (left / "notes.txt").write_text("x")
    ours = ScratchDirectory(tmp_path)
    (ours.path / "notes.txt").write_text("y")
    ours.reserve(10)
    assert owners(tmp_path)[killed] == ["notes.txt"], "its own files are gone"
    ours.close()
    assert sorted(names for names in owners(tmp_path).values()) == [["notes.txt"]] * 2


def test_a_disk_without_locks_is_used_and_nothing_on_it_is_taken_for_abandoned(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    first, second = ScratchDirectory(tmp_path), ScratchDirectory(tmp_path)
    assert first.reserve(10).exists() and second.reserve(10).exists() and len(list(tmp_path.iterdir())) == 2


def test_an_interrupt_in_what_frees_is_raised_and_frees_all(tmp_path, monkeypatch):
    unlinked = type(tmp_path).unlink

    def interrupted(self, missing_ok=False):
        monkeypatch.undo()
        signal.raise_signal(signal.SIGINT)
        unlinked(self, missing_ok=missing_ok)

    def freed(lose):
        """What is lost meanwhile."""
        monkeypatch.setattr(type(tmp_path), "unlink", interrupted)
        start = time.perf_counter()
        with pytest.raises(KeyboardInterrupt):
            lose()
            while time.perf_counter() - start < 2:
                time.sleep(0.001)

    files = ScratchDirectory(tmp_path)
    mapped = [mapped_like(torch.empty(5000), files)]
    freed(mapped.clear)
    assert files.used == 0 and not list(files.path.iterdir())
    graphs = []
    context = offload_activations(tmp_path, min_bytes=0)
    with context:
        graphs.append((torch.randn(64, 64, requires_grad=True) * 2).sin().cos().sin().sum())
    assert context.target.files.used > 0
    freed(graphs.clear)
    for _ in range(200):  # a write that is under way frees its file when it is done
        if not context.target.files.used:
            break
        time.sleep(0.01)
    assert context.target.files.used == 0 and not list(context.target.files.path.iterdir())
    held = [files]
    del files, context
    files_path = held[0].path
    mapped.append(mapped_like(torch.empty(5000), held[0]))
    mapped.clear()
    held[0].reserve(10)
    freed(held.clear)
    assert not files_path.exists()


def test_an_interrupt_that_python_would_only_print_is_raised(tmp_path):
    ScratchDirectory(tmp_path).close()

    class Lost:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        Lost()
        while time.perf_counter() - start < 2:
            time.sleep(0.001)
