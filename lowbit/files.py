"""Atomic writes and validated reads of files, and locks of directories.

A new file is written under a random name that did not exist before (``O_EXCL``), flushed to disk and renamed. Users may
edit JSON files, so readers validate them.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import reprlib
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

__all__ = [
    "DirectoryLock",
    "check_regular",
    "exclusive",
    "flush",
    "is_file_name",
    "left_behind",
    "read_checked",
    "read_json",
    "read_records",
    "replaced",
    "resumable",
    "sha256",
    "shown",
    "sync_directory",
    "write_atomically",
    "write_checked",
    "write_json",
    "write_record",
]

#: Limit of JSON files, far above the size of any that lowbit writes.
MOST_JSON = 64 << 20

#: Header of a checked file; the digest, a newline and the payload follow.
_MAGIC = b"lowbit-checked-1 sha256:"

#: Bytes that are read at a time.
_PIECE = 1 << 20

#: Names of unfinished files of ``replaced``.
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}\.tmp")

#: Errors of file systems that cannot lock directories.
_NO_LOCKS = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80

#: A value for a message, shortened if it is long or deep.
shown: Callable[[Any], str] = _short.repr


@contextmanager
def resumable(directory: Path) -> Iterator[None]:
    """Adds to an OSError raised inside that finished parts in ``directory`` remain and the call can be repeated."""
    try:
        yield
    except OSError as error:
        text = (
            f"{error.strerror or error}; finished parts in {directory} are intact: fix the error, and repeat the call "
            f"to continue from there"
        )
        if error.errno is None:
            raise OSError(text) from error
        raise OSError(error.errno, text, error.filename2 or error.filename or str(directory)) from error


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yields a new, empty file in the folder of ``path``, which replaces ``path`` at the end.

    A failure leaves the old file. Among concurrent writers the last one wins. Raises OSError with the name of ``path``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        temporary.open("xb").close()  # exclusive: never an existing file or a link
        try:
            yield temporary
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error  # errors of a full disk name no file


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Writes a file with ``write``, atomically and flushed to disk. Raises OSError."""
    with replaced(path) as temporary, open(temporary, "wb") as file:
        write(file)
        flush(file)


def left_behind(directory: Path, name: str | None = None) -> list[Path]:
    """Unfinished files that killed writers of ``directory / name``, or of any file, have left."""
    matches = ((path, _TEMPORARY.fullmatch(path.name)) for path in directory.iterdir())
    return [path for path, match in matches if match and name in (None, match["name"])]


def flush(file: BinaryIO) -> None:
    """Flushes ``file`` to disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Flushes the file names in ``directory`` to disk; only POSIX systems need this."""
    if os.name == "posix":
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def check_regular(path: Path, most: int | None = None) -> int:
    """The size of a file in bytes.

    Raises:
        FileNotFoundError: It does not exist.
        ValueError: It is a folder, pipe or device, or has more than ``most`` bytes.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is not a regular file; remove it, or give another directory")
    if most is not None and status.st_size > most:
        raise ValueError(f"{path} has {status.st_size} bytes, expected at most {most}; copy or save it again")
    return status.st_size


def is_file_name(text: Any) -> bool:
    """Whether ``text``, read from another file, is a plain file name without a folder."""
    return isinstance(text, str) and text.isprintable() and 0 < len(text.encode()) <= 255 and Path(text).name == text


def sha256(path: Path) -> str:
    """The SHA-256 of a file in hexadecimal. Raises OSError."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


# -- one process per directory -----------------------------------------------------------------------------------------
class DirectoryLock:
    """An exclusive lock of a directory, against other processes and other locks of this process.

    The system releases it when the process ends, even if it is killed. It writes no file. Some file systems do not
    support locks.

    Args:
        directory: An existing directory.
        who: The calling function, for the message.

    Attributes:
        held: Whether the directory is locked; False if the file system does not support locks.

    Raises:
        BlockingIOError: The directory is locked already.
    """

    def __init__(self, directory: Path, who: str) -> None:
        self._handle: int | None = None
        self.held = False
        if os.name != "posix":
            return
        import fcntl

        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            taken = not os.path.isdir(directory) or not os.path.samestat(os.stat(directory), os.fstat(handle))
        except BlockingIOError:
            taken = True
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(handle)
                raise
            self._handle = handle
            return
        if taken:
            os.close(handle)
            raise BlockingIOError(
                errno.EWOULDBLOCK,
                f"{who}: another run writes to this directory; wait until it has ended, or pass another directory",
                str(directory),
            )
        self._handle, self.held = handle, True

    def release(self) -> None:
        """Releases the lock; may be called twice."""
        handle, self._handle, self.held = self._handle, None, False
        if handle is not None:
            os.close(handle)


@contextmanager
def exclusive(directory: Path, who: str) -> Iterator[None]:
    """Context with a ``DirectoryLock`` of ``directory``, which is created, and removed again if it stays empty.

    Raises:
        BlockingIOError: The directory is locked already.
        OSError: It cannot be created.
    """
    is_new = not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    lock = DirectoryLock(directory, who)
    try:
        yield
    finally:
        if is_new:
            with suppress(OSError):  # not empty
                directory.rmdir()
        lock.release()


# -- JSON --------------------------------------------------------------------------------------------------------------
def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes ``value`` to ``path``, atomically. Raises OSError."""
    text = json.dumps(value, indent=2).encode() + b"\n"
    write_atomically(path, lambda file: file.write(text))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: It does not contain a JSON object.
    """
    check_regular(path, MOST_JSON)
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: it is not JSON ({error}); copy or save it again") from None
    except RecursionError:
        raise ValueError(f"{path} is damaged: it is nested too deeply; copy or save it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is damaged: expected a JSON object, got a {type(value).__name__}; copy it again")
    return value


# -- JSON Lines: one table per file, one record per line --------------------------------------------------------------
def read_records(path: Path) -> dict[str, dict[str, Any]]:
    """The records of a JSON Lines file by their ``"name"``, in order; a missing file has none.

    Raises:
        ValueError: For a line that is not a JSON object with a name.
    """
    records = {}
    for number, line in enumerate(path.read_text(errors="replace").splitlines() if path.exists() else (), 1):
        name, record = _record(line)
        if name is None:
            raise ValueError(f"{path}, line {number} is damaged: expected a JSON object with a name; remove the line")
        records[name] = record
    return records


def write_record(path: Path, name: str, record: Mapping[str, Any]) -> None:
    """Add a record to a JSON Lines file, or replace the one with this name. Atomic, for one writer at a time."""
    line = json.dumps({"name": name, **record})
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    index = next((i for i, old in enumerate(lines) if _record(old)[0] == name), len(lines))
    lines[index : index + 1] = [line]
    write_atomically(path, lambda file: file.write("\n".join([*lines, ""]).encode()))


def _record(line: str) -> tuple[str | None, dict[str, Any]]:
    """The name and the rest of a line; None as the name of a damaged one."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None, {}
    name = value.pop("name", None) if isinstance(value, dict) else None
    return (name, value) if isinstance(name, str) else (None, {})


# -- bytes with a checksum ---------------------------------------------------------------------------------------------
class _Hashed:
    """A file that passes on what is written to it, and hashes it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.hash = file, hashlib.sha256()

    def write(self, piece: Any) -> int:
        self.hash.update(piece)
        return self._file.write(piece)

    def flush(self) -> None:
        self._file.flush()


def write_checked(path: Path, write: Callable[[Any], object]) -> None:
    """Writes a file with ``write``, piece by piece, after its checksum, atomically. Raises OSError."""

    def written(file: BinaryIO) -> None:
        file.write(_head(hashlib.sha256()))
        payload = _Hashed(file)
        write(payload)
        file.seek(0)
        file.write(_head(payload.hash))

    write_atomically(path, written)


def _head(digest: Any) -> bytes:
    name: str = digest.hexdigest()
    return _MAGIC + name.encode() + b"\n"


def read_checked(path: Path) -> bytes:
    """Reads a payload that ``write_checked`` wrote.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: It has any other content.
    """
    check_regular(path)
    with open(path, "rb") as file:
        head = file.read(len(_MAGIC) + 65)
        payload = file.read() if head.startswith(_MAGIC) else b""
    if head != _head(hashlib.sha256(payload)):
        raise ValueError(f"{path} is damaged, or was not written by this version of lowbit")
    return payload
