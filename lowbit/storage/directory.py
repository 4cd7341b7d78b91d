"""Scratch directories for temporary files of one process, with a lock and a budget.

The lock is a ``flock`` of the directory, which the system releases however the process ends. A scratch directory is
recognized by its name and mode. It is abandoned if it can be locked; the next one in the same parent removes it. Only
files with names of this module are removed, and no directory that has other files.
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
#: The name of a directory, and the names of files in it.
_DIRECTORY, _FILE = re.compile(rf"{_PREFIX}\d+-[0-9a-f]{{8}}"), re.compile(r"\d+\.bin")
#: The mode of a directory, which marks it. Private directories do not have the sticky bit by accident. ``mkdir`` sets
#: it together with the name, so that no killed process leaves a directory without it.
_MODE = stat.S_ISVTX | stat.S_IRWXU
#: Error numbers for an exhausted disk, quota or file size limit.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: Maximum bytes per system call. Linux would move 2 GiB, and a process that ends waits for the call.
_PIECE = 16 << 20
#: Device names: a caller who passes one does not mean a directory.
_DEVICE = re.compile(r"(cpu|cuda|gpu|mps|xpu|meta|disk)(:\d+)?", re.IGNORECASE)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a CPU tensor's storage, without a copy."""
    raw = tensor.new_empty(0, dtype=torch.uint8)
    array: Any = raw.set_(tensor.untyped_storage()).numpy()
    return memoryview(array)


class ScratchDirectory:
    """A directory ``lowbit-offload-PID-...`` for temporary files of this process.

    It is removed with the object, at exit, or after a crash when the next one is created in ``target``. Forked
    processes may not use it.

    Args:
        target: The parent directory, created if needed.
        budget: Maximum bytes of all files; None for no limit.

    Raises:
        TypeError: ``target`` is not a path.
        ValueError: ``target`` is empty or the name of a device.
        OSError: ``target`` cannot be created or written to.
    """

    def __init__(self, target: str | os.PathLike[str], budget: int | None = None) -> None:
        keep_interrupts()
        parent = _parent(target)
        parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(parent)
        self.path, self._lock = _locked(parent)
        self.budget, self.used, self._process = budget, 0, os.getpid()
        self._numbers, self._guard = itertools.count(), threading.RLock()  # finalizers may run while it is held
        self._reserved: set[Path] = set()
        self._finalizer = weakref.finalize(self, _remove, self.path, self._lock, self._process)

    def reserve(self, size: int) -> Path:
        """Create a file with ``size`` bytes of allocated disk space.

        Raises:
            OSError: The budget or the disk is exhausted (ENOSPC). Nothing is reserved.
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
                    f"some, or pass a directory on another disk ({os.strerror(error.errno)})",
                    str(self.path),
                ) from error
            raise
        return path

    def release(self, path: Path, size: int) -> None:
        """Remove a file of ``reserve``. Repeated calls are no error. A Ctrl-C is raised soon afterwards."""
        uninterrupted(lambda: self._release(path, size))

    def _release(self, path: Path, size: int) -> None:
        if os.getpid() == self._process:  # a fork has the same objects, but must not remove the files
            path.unlink(missing_ok=True)
        with self._guard:
            if path in self._reserved:
                self.used -= size  # next to each other, so that an interrupt sees both or neither
                self._reserved.discard(path)

    def close(self) -> None:
        """Remove the directory and its files."""
        self._finalizer()


def write(path: Path, memory: memoryview, durable: bool = False) -> None:
    """Write ``memory`` to a reserved file, and drop the system's cached pages of it. Raises OSError.

    With ``durable``, the bytes are on the disk when this returns.
    """
    _transfer(path, os.O_WRONLY | (os.O_DSYNC if durable else 0), memory, os.pwrite)


def read(path: Path, memory: memoryview) -> None:
    """Fill ``memory`` from a file. Raises OSError, also if the file is too short."""
    _transfer(path, os.O_RDONLY, memory, lambda file, piece, offset: os.preadv(file, [piece], offset))


def _transfer(path: Path, mode: int, memory: memoryview, move: Callable[[int, memoryview, int], int]) -> None:
    file = os.open(path, mode | os.O_CLOEXEC)
    try:
        done = 0
        while done < len(memory):
            moved = move(file, memory[done : done + _PIECE], done)
            if not moved:
                raise OSError(
                    errno.EIO,
                    f"offload: {done} of {len(memory)} bytes are there; another program has changed the file",
                    str(path),
                )
            done += moved
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)


def _allocate(file: int, size: int) -> None:
    """Allocate disk space for the file, so that no later write fails for a full disk."""
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
        remedy = f"; for a directory of that name write ./{text}" if text else "; for the current directory write '.'"
        raise ValueError(f'offload: expected "cpu" or the path of a directory, got {text!r}{remedy}')
    return Path(target)


# -- ownership ---------------------------------------------------------------------------------------------------------
def remove_abandoned(parent: Path) -> None:
    """Remove the scratch directories in ``parent`` that no process has locked, as far as possible."""
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
    """Whether this module has created the directory, for this user."""
    try:
        status = path.lstat()
    except OSError:
        return False
    mode = stat.S_IMODE(status.st_mode) & ~stat.S_ISGID  # a directory inherits it from its parent
    marked = stat.S_ISDIR(status.st_mode) and mode == _MODE and status.st_uid == os.getuid()
    return marked and _DIRECTORY.fullmatch(path.name) is not None


def _remove_files(path: Path) -> None:
    """Remove the files with names of this module, and the directory unless it has other files."""
    with suppress(OSError):
        for file in list(path.iterdir()):
            if _FILE.fullmatch(file.name):
                file.unlink(missing_ok=True)
        path.rmdir()


def _locked(parent: Path) -> tuple[Path, DirectoryLock]:
    """A new directory and its lock. Another process may remove it before it is locked; then try again."""
    while True:
        path = parent / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        path.mkdir(mode=_MODE)
        with suppress(BlockingIOError, FileNotFoundError):
            return path, DirectoryLock(path, "offload")


def _remove(path: Path, lock: DirectoryLock, process: int) -> None:
    if os.getpid() == process:
        uninterrupted(lambda: _remove_files(path))
    lock.release()
