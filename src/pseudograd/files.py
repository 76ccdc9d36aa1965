"""Writing files: whole or not at all, by one process at a time, and with clear errors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

UNFINISHED = ".part"  # the suffix of a file that is being written


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file so that whoever reads it finds all of it, or what was there before.

    Args:
        path: The file.
        content: What it shall hold; texts are written in UTF-8.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "model.json")
        >>> write_whole(path, "{}")
        >>> path.read_text(), [file.name for file in path.parent.iterdir()]
        ('{}', ['model.json'])

    """
    path = Path(path)
    unfinished = path.with_name(path.name + UNFINISHED)
    with unfinished.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())  # or a power failure could leave an empty file of that name
    unfinished.replace(path)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say in one sentence what to do when a file of a run cannot be written.

    Args:
        path: The file.

    Example:
        >>> with writing(Path("ledger.jsonl")):
        ...     raise OSError(28, "No space left on device")
        Traceback (most recent call last):
        ...
        OSError: ledger.jsonl cannot be written (no space left on device): make that possible and
        run the same command again, what is finished is kept

    """
    try:
        yield
    except OSError as problem:
        reason = (problem.strerror or str(problem)).lower()
        raise OSError(
            f"{path} cannot be written ({reason}): make that possible and run the same command "
            "again, what is finished is kept"
        ) from problem


@contextlib.contextmanager
def in_turn(folder: Path) -> Iterator[None]:
    """Wait until no other process is between reading and writing files of a folder.

    Args:
        folder: The folder; where the system has no locks, nobody waits.

    Example:
        >>> import tempfile
        >>> with in_turn(Path(tempfile.mkdtemp())):
        ...     pass

    """
    try:
        import fcntl
    except ImportError:  # not POSIX
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # this file system has no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep a file to this process; what the system has no locks for is left open to all.

    Args:
        path: The file; it is made if it does not exist.

    Example:
        >>> import tempfile
        >>> with locked(Path(tempfile.mkdtemp(), "ledger.jsonl")):
        ...     pass

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
