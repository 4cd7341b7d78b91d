"""Files that are written whole or not at all, and read with suspicion.

A new file is written under a random name that no other process can hold or have prepared (``O_EXCL``), flushed to disk
and renamed. JSON files may be edited by hand; who reads one checks what it holds.
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

#: No JSON file of lowbit comes near this many bytes.
MOST_JSON = 64 << 20

#: What a checked file begins with; the digest, a newline and the payload follow.
_MAGIC = b"lowbit-checked-1 sha256:"

#: How much of a file is read at a time.
_PIECE = 1 << 20

#: What ``replaced`` calls a file that is not finished.
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}\.tmp")

#: What the system says where a disk has no locks for directories.
_NO_LOCKS = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80

#: What a file holds, for a message: cut where it is long or deep.
shown: Callable[[Any], str] = _short.repr


@contextmanager
def resumable(directory: Path) -> Iterator[None]:
    """An error of the system inside says what remains of a run in ``directory``."""
    try:
        yield
    except OSError as error:
        text = (
            f"{error.strerror or error}; what was finished in {directory} is whole: mend that, and the same call goes "
            f"on from there"
        )
        if error.errno is None:
            raise OSError(text) from error
        raise OSError(error.errno, text, error.filename2 or error.filename or str(directory)) from error


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A new, empty file beside ``path``, which takes its place once it is filled; a failure leaves the old file.

    Of several writers at once the last one wins. Raises: OSError, with the name of ``path``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        temporary.open("xb").close()  # never an existing file, never through a link
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
        raise OSError(error.errno, error.strerror, str(path)) from error  # of a full disk the system names no file


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let ``write`` fill the file that is ``replaced``. Raises: OSError."""
    with replaced(path) as temporary, open(temporary, "wb") as file:
        write(file)
        flush(file)


def left_behind(directory: Path, name: str | None = None) -> list[Path]:
    """What killed writers of ``directory / name``, or of any file, have left beside it."""
    found = ((path, _TEMPORARY.fullmatch(path.name)) for path in directory.iterdir())
    return [path for path, match in found if match and name in (None, match["name"])]


def flush(file: BinaryIO) -> None:
    """Bring what was written to ``file`` to the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Bring the names in ``directory`` to the disk; where directories cannot be opened they need no flush."""
    if os.name == "posix":
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def check_regular(path: Path, most: int | None = None) -> int:
    """The size of a file. Raises: FileNotFoundError; ValueError for a folder, pipe or device, or more bytes than
    ``most``.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is not a regular file; remove it, or give another directory")
    if most is not None and status.st_size > most:
        raise ValueError(f"{path} has {status.st_size} bytes and may have {most} at most; copy or save it again")
    return status.st_size


def is_file_name(text: Any) -> bool:
    """Whether ``text`` can be the name of a file in a directory, as another file gives it."""
    return isinstance(text, str) and text.isprintable() and 0 < len(text.encode()) <= 255 and Path(text).name == text


def sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal. Raises: OSError."""
    total = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            total.update(piece)
    return total.hexdigest()


# -- one process a directory -------------------------------------------------------------------------------------------
class DirectoryLock:
    """A directory that no other process, and no other lock of this one, has at the same time.

    The system releases it however the process ends, and nothing is written. Where a disk has no locks there is none.

    Args:
        directory: It must exist.
        who: The caller, for the message.

    Attributes:
        held: Whether the directory is locked; False where the disk has no locks.

    Raises:
        BlockingIOError: Something else has the lock.
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
                f"{who}: another run writes to this directory; wait until it has ended, or give another one",
                str(directory),
            )
        self._handle, self.held = handle, True

    def release(self) -> None:
        """Let others have the directory; again is no error."""
        handle, self._handle, self.held = self._handle, None, False
        if handle is not None:
            os.close(handle)


@contextmanager
def exclusive(directory: Path, who: str) -> Iterator[None]:
    """Within, ``directory`` is locked. It is made, and goes again where it stays empty.

    Raises: BlockingIOError, as ``DirectoryLock``; OSError.
    """
    made = not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    lock = DirectoryLock(directory, who)
    try:
        yield
    finally:
        if made:
            with suppress(OSError):  # it holds something now
                directory.rmdir()
        lock.release()


# -- JSON --------------------------------------------------------------------------------------------------------------
def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write ``value`` to ``path``, atomically. Raises: OSError."""
    text = json.dumps(value, indent=2).encode() + b"\n"
    write_atomically(path, lambda file: file.write(text))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises: FileNotFoundError; ValueError for anything but a JSON object."""
    check_regular(path, MOST_JSON)
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: it is not JSON ({error}); copy or save it again") from None
    except RecursionError:
        raise ValueError(f"{path} is damaged: it is nested too deeply; copy or save it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is damaged: it holds a JSON {type(value).__name__}, not an object; copy it again")
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
def write_checked(path: Path, payload: bytes) -> None:
    """Write ``payload`` behind its checksum, atomically. Raises: OSError."""
    head = _MAGIC + hashlib.sha256(payload).hexdigest().encode() + b"\n"
    write_atomically(path, lambda file: (file.write(head), file.write(payload)))


def read_checked(path: Path) -> bytes:
    """The payload of ``write_checked``. Raises: FileNotFoundError; ValueError for any other content."""
    check_regular(path)
    with open(path, "rb") as file:
        head = file.read(len(_MAGIC) + 65)
        payload = file.read() if head.startswith(_MAGIC) else b""
    if head != _MAGIC + hashlib.sha256(payload).hexdigest().encode() + b"\n":
        raise ValueError(f"{path} is damaged, or was not written by this version of lowbit")
    return payload
