"""Writing files whole or not at all, by one process at a time, and with clear errors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

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


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Replace an OSError by one that says what to do about it.

    Example:
        >>> with writing(Path("ledger.jsonl")):
        ...     raise OSError(28, "No space left on device")
        Traceback (most recent call last):
        ...
        OSError: ledger.jsonl cannot be written (no space left on device): make that possible and
        run the same command again; finished work is kept

    """
    try:
        yield
    except OSError as problem:
        reason = (problem.strerror or str(problem)).lower()
        raise OSError(
            f"{path} cannot be written ({reason}): make that possible and run the same command "
            "again; finished work is kept"
        ) from problem


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a file for this process, and create it if it does not exist.

    Without support for locks in the operating system or the file system, nothing is locked.
    """
    try:
        import fcntl
    except ImportError:  # not POSIX
        yield
        return
    with writing(path):
        file = path.open("ab")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(
                f"another process is at work on {path}: wait for it, or name another folder"
            ) from None
        except OSError:  # this file system has no locks
            pass
        yield
