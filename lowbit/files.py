"""Files that are either the old ones or the new ones, never half, also when the machine stops."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

__all__ = ["put_in_place", "temporary_for", "write_atomically"]


def temporary_for(path: Path) -> Path:
    """Where to write what will become ``path``: a hidden name beside it, of this process."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def put_in_place(temporary: Path, path: Path) -> None:
    """Make the finished file ``temporary`` the file ``path`` in one step, on disk before this returns."""
    with open(temporary, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
    if os.name == "posix":  # elsewhere a directory cannot be opened, and needs no flush of its own
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then put it in its place; a failure leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_for(path)
    try:
        with open(temporary, "wb") as file:
            write(file)
        put_in_place(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
