"""Files of one process that nobody needs once it is gone: a locked directory, a budget, whole buffers in and out.

The lock is the directory's own (``flock``), which the system releases however the process ends. A directory is known by
its name and by its mode, and is abandoned if it can be locked: the next one that is made beside it removes it. Only
files that this module has named are removed, and no directory that holds another.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import secrets
import stat
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.files import DirectoryLock
from lowbit.sizes import amount
from lowbit.storage.interrupts import keep_interrupts, uninterrupted

__all__ = ["ScratchDirectory", "bytes_of", "read", "write"]

_PREFIX = "lowbit-offload-"
#: The whole name of a directory, and the name of a file in it.
_DIRECTORY, _FILE = re.compile(rf"{_PREFIX}\d+-[0-9a-f]{{8}}"), re.compile(r"\d+\.bin")
#: The marker of a directory. Nobody has the sticky bit on a directory of one's own by accident, and ``mkdir`` sets it
#: with the name in one step, so that no killed process leaves a directory without it.
_MODE = stat.S_ISVTX | stat.S_IRWXU
#: What the system says of a disk, a quota or a limit that is exhausted.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: The most that one system call moves. Linux moves 2 GiB at a time, and a process that ends waits for the call.
_PIECE = 16 << 20
#: Names of devices, which a caller who gives one does not mean as those of directories.
_DEVICE = re.compile(r"(cpu|cuda|gpu|mps|xpu|meta|disk)(:\d+)?", re.IGNORECASE)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a CPU tensor's whole storage, without a copy."""
    raw = tensor.new_empty(0, dtype=torch.uint8)
    array: Any = raw.set_(tensor.untyped_storage()).numpy()
    return memoryview(array)


class ScratchDirectory:
    """A directory ``lowbit-offload-PID-...`` in ``target`` for files of this process, of ``budget`` bytes together.

    It goes with the object, at exit, and, after a crash, when the next one is made in ``target``. A process that is
    forked may not use it. Raises TypeError for what is no path, ValueError for an empty one and for the name of a
    device, OSError where ``target`` cannot be made or written to.
    """

    def __init__(self, target: str | os.PathLike[str], budget: int | None = None) -> None:
        keep_interrupts()
        parent = _parent(target)
        parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(parent)
        self.path, self._lock = _locked(parent)
        self.budget, self.used, self._process = budget, 0, os.getpid()
        self._numbers, self._guard = itertools.count(), threading.RLock()  # garbage is collected inside, too
        self._reserved: set[Path] = set()
        self._finalizer = weakref.finalize(self, _remove, self.path, self._lock, self._process)

    def reserve(self, size: int) -> Path:
        """A new file of ``size`` bytes, which the disk has room for.

        Raises OSError (ENOSPC), with nothing reserved, where the budget or the disk is exhausted.
        """
        path = self.path / f"{next(self._numbers)}.bin"
        try:
            with self._guard:
                if self.budget is not None and self.used + size > self.budget:
                    raise OSError(
                        errno.ENOSPC,
                        f"offload: {amount(size)} more than the {amount(self.used)} in use exceed the budget of "
                        f"{amount(self.budget)}; raise budget=, or offload less (a larger min_bytes=, checkpointing)",
                        str(self.path),
                    )
                self.used += size
                self._reserved.add(path)
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                _allocate(file, size)
            finally:
                os.close(file)
        except BaseException as error:
            budgeted = path not in self._reserved
            self.release(path, size)
            if isinstance(error, OSError) and error.errno in _FULL and not budgeted:
                raise OSError(
                    error.errno,
                    f"offload: the disk has no room for {amount(size)} more than the {amount(self.used)} in use; free "
                    f"some, or name a directory on another disk ({os.strerror(error.errno)})",
                    str(self.path),
                ) from error
            raise
        return path

    def release(self, path: Path, size: int) -> None:
        """Remove a file of ``reserve``; again is no error. A Ctrl-C meanwhile is raised soon after."""
        uninterrupted(lambda: self._release(path, size))

    def _release(self, path: Path, size: int) -> None:
        if os.getpid() == self._process:  # a fork has the same objects, and no right to the files
            path.unlink(missing_ok=True)
        with self._guard:
            if path in self._reserved:
                self.used -= size  # and at once, so that an interrupt finds both or neither
                self._reserved.discard(path)

    def close(self) -> None:
        """Remove the directory and the files that were reserved in it."""
        self._finalizer()


def write(path: Path, memory: memoryview, durable: bool = False) -> None:
    """Write ``memory`` to a reserved file, and let go of the pages that the system keeps of it. Raises OSError.

    ``durable``: it is on the disk afterwards, and not on its way there.
    """
    _transfer(path, os.O_WRONLY | (os.O_DSYNC if durable else 0), memory, os.pwrite)


def read(path: Path, memory: memoryview) -> None:
    """Fill ``memory`` from a file. Raises OSError, also for a file that has become shorter."""
    _transfer(path, os.O_RDONLY, memory, lambda file, piece, offset: os.preadv(file, [piece], offset))


def _transfer(path: Path, mode: int, memory: memoryview, move: Callable[[int, memoryview, int], int]) -> None:
    file = os.open(path, mode | os.O_CLOEXEC)
    try:
        done = 0
        while done < len(memory):
            moved = move(file, memory[done : done + _PIECE], done)
            if not moved:
                raise OSError(
                    errno.EIO, f"offload: {done} of {len(memory)} bytes are there; who changed it?", str(path)
                )
            done += moved
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)


def _allocate(file: int, size: int) -> None:
    """Blocks for all of a file, so that no later write meets a full disk."""
    if hasattr(os, "posix_fallocate") and size:
        try:
            return os.posix_fallocate(file, 0, size)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
    os.ftruncate(file, size)


def _parent(target: Any) -> Path:
    if not isinstance(target, str | os.PathLike):
        raise TypeError(f'offload: expected "cpu" or the path of a directory, got {type(target).__name__}')
    text = os.fspath(target)
    if not text or _DEVICE.fullmatch(text):
        here = f"; for a directory of that name write ./{text}" if text else "; for the directory that is current, '.'"
        raise ValueError(f'offload: expected "cpu" or the path of a directory, got {text!r}{here}')
    return Path(target)


# -- whose a directory is ----------------------------------------------------------------------------------------------
def remove_abandoned(parent: Path) -> None:
    """Remove the directories of this module in ``parent`` that no process has locked. What cannot be removed stays."""
    for path in parent.glob(f"{_PREFIX}*"):
        if not _is_ours(path):
            continue
        try:
            lock = DirectoryLock(path, "offload")
        except OSError:
            continue
        if lock.held:
            _remove_files(path)
        lock.release()


def _is_ours(path: Path) -> bool:
    """Whether this module has made a directory, for this user."""
    try:
        status = path.lstat()
    except OSError:
        return False
    mode = stat.S_IMODE(status.st_mode) & ~stat.S_ISGID  # which a directory has from the one that it is in
    made = stat.S_ISDIR(status.st_mode) and mode == _MODE and status.st_uid == os.getuid()
    return made and _DIRECTORY.fullmatch(path.name) is not None


def _remove_files(path: Path) -> None:
    """Remove the files that this module has named, and the directory unless it holds others."""
    with suppress(OSError):
        for file in list(path.iterdir()):
            if _FILE.fullmatch(file.name):
                file.unlink(missing_ok=True)
        path.rmdir()


def _locked(parent: Path) -> tuple[Path, DirectoryLock]:
    """A new directory and its lock. Another process that finds it before it is locked removes it: then try again."""
    while True:
        path = parent / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        path.mkdir(mode=_MODE)
        with suppress(BlockingIOError, FileNotFoundError):
            return path, DirectoryLock(path, "offload")


def _remove(path: Path, lock: DirectoryLock, process: int) -> None:
    if os.getpid() == process:
        uninterrupted(lambda: _remove_files(path))
    lock.release()
