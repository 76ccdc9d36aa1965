"""JSON files of a run folder: written atomically, and read with one-sentence errors."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pseudograd.files import reason, write_whole, writing


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file atomically."""
    with writing(path):
        write_whole(path, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path, advice: str) -> dict[str, Any]:
    """Return the JSON object in a file; raise if a number is not finite.

    Args:
        path: The file.
        advice: The advice to the user if it cannot be read.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "run.json")
        >>> _ = path.write_text("[1, 2")
        >>> read_json(path, "run the command again")
        Traceback (most recent call last):
        ...
        ValueError: ...run.json is damaged (Expecting ',' delimiter: line 1 column 6 (char 5)): run
        the command again

    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it is not a JSON object")
        # Fails on numbers that are not finite, and on lone surrogates.
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    except OSError as problem:
        raise OSError(f"{path} cannot be read ({reason(problem)}): {advice}") from problem
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{path} is damaged ({problem}): {advice}") from problem
    return found


@contextlib.contextmanager
def fields_of(path: Path, advice: str) -> Iterator[dict[str, Any]]:
    """Yield the fields of a JSON file; a missing or strange one gives an error like `read_json`'s.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "run.json")
        >>> _ = path.write_text("{}")
        >>> with fields_of(path, "run the command again") as fields:
        ...     fields["recipe"]
        Traceback (most recent call last):
        ...
        ValueError: ...run.json is damaged, or from another version (KeyError('recipe')): run the
        command again

    """
    fields = read_json(path, advice)
    try:
        yield fields
    except (AttributeError, KeyError, TypeError, ValueError) as problem:
        raise ValueError(
            f"{path} is damaged, or from another version ({problem!r}): {advice}"
        ) from problem
