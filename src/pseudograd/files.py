"""Atomic writes and file locks, with clear errors for both."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # not POSIX
    fcntl = None  # type: ignore[assignment]

UNFINISHED = ".part"  # the suffix of a file while it is being written


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file atomically: a reader sees all of it, or the previous content.

    Strings are written in UTF-8.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "model.json")
        >>> write_whole(path, "{}")
        >>> path.read_text(), [file.name for file in path.parent.iterdir()]
        ('{}', ['model.json'])

    """
    path = Path(path)
    unfinished = path.with_name(path.name + UNFINISHED)
    try:
        with unfinished.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())  # otherwise a power failure could leave an empty file
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def reason(problem: OSError) -> str:
    """Return why a file could not be read or written, for the middle of a sentence."""
    return (problem.strerror or str(problem)).lower()


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Re-raise an OSError with advice on what to do.

    Example:
        >>> with writing(Path("ledger.jsonl")):
        ...     raise OSError(28, "No space left on device")
        Traceback (most recent call last):
        ...
        OSError: ledger.jsonl cannot be written (no space left on device): fix that and run the same
        command again; finished work is kept

    """
    try:
        yield
    except OSError as problem:
        raise OSError(
            f"{path} cannot be written ({reason(problem)}): fix that and run the same command "
            "again; finished work is kept"
        ) from problem


class Lock:
    """A lock on a file, held until `release` or until this process ends, even by kill -9.

    Child processes do not inherit it. If the operating system or the file system does not support
    locks, every lock is granted.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "ledger.jsonl")
        >>> lock = Lock.on(path)
        >>> Lock.on(path) is None  # already locked
        True
        >>> lock.release()
        >>> Lock.on(path) is None
        False

    """

    def __init__(self, file: BinaryIO) -> None:
        self._file: BinaryIO | None = file
        _OPEN.add(self)

    @classmethod
    def on(cls, path: Path, *, wait: bool = False) -> Lock | None:
        """Lock a file, created if it does not exist; return None if it is already locked.

        Args:
            path: The file.
            wait: Whether to wait until the lock is granted.

        """
        with writing(path):
            file = path.open("ab")  # NFS needs write access
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                file.close()
                return None
            except OSError:  # the file system does not support locks
                pass
            except BaseException:  # Ctrl-C while waiting
                file.close()
                raise
        return cls(file)

    @property
    def held(self) -> bool:
        """Whether this process holds the lock."""
        return self._file is not None

    def release(self) -> None:
        """Unlock the file."""
        if self._file is not None and fcntl is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)
        self._close()

    def _close(self) -> None:
        """Close the file, which unlocks it unless another process shares the descriptor."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __del__(self) -> None:
        self._close()


_OPEN: weakref.WeakSet[Lock] = weakref.WeakSet()


def _forget_locks() -> None:
    """Close a forked child's copies of the descriptors, which would keep the locks alive."""
    for lock in list(_OPEN):
        lock._close()  # not `release`, which would drop the parent's lock
    _GUARDED.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, or raise BlockingIOError; see `Lock`."""
    lock = Lock.on(path)
    if lock is None:
        raise busy(path)
    try:
        yield
    finally:
        lock.release()


def busy(path: Path) -> BlockingIOError:
    """Return the error for a file that another process has locked."""
    return BlockingIOError(
        f"another process is using {path}: wait for it to finish, or name another folder"
    )


_GUARDED: set[tuple[Path, int]] = set()


@contextlib.contextmanager
def guarded(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, waiting for it if needed; reentrant within a thread.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), ".lock")
        >>> with guarded(path), guarded(path):
        ...     print("no other process or thread is here")
        no other process or thread is here

    """
    key = path.absolute(), threading.get_ident()
    if key in _GUARDED:
        yield
        return
    lock = Lock.on(path, wait=True)
    _GUARDED.add(key)
    try:
        yield
    finally:
        _GUARDED.discard(key)
        if lock is not None:
            lock.release()
