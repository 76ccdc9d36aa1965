"""Files that are there as a whole or not at all."""

from __future__ import annotations

import os
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
    unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
    unfinished.replace(path)
