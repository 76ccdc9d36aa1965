"""JSON files of a run folder: written atomically, and read with one-sentence errors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pseudograd.files import reason, write_whole, writing

# The shape of a value: a type; a list of one shape, for all items; a dict of shapes, where ``...``
# matches all other names; or a tuple of shapes, one of which must fit.
Shape = Any


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


def write_signed(path: Path, fields: Mapping[str, Any]) -> None:
    """Write a JSON file with a checksum of its content."""
    write_json(path, {**fields, "checksum": checksum(fields)})


def read_signed(path: Path, shape: Shape, advice: str) -> dict[str, Any]:
    """Return the content of a file by `write_signed`; raise if it is changed or misshapen."""
    fields = read_json(path, advice)
    if fields.pop("checksum", None) != checksum(fields):
        raise ValueError(f"{path} is damaged, or was changed by hand: {advice}")
    if wrong := misfit(fields, shape, "it"):
        raise ValueError(f"{path} is from another version ({wrong}): {advice}")
    return fields


def checksum(fields: Mapping[str, Any]) -> str:
    """Return a hash of the content of a JSON file."""
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()


def misfit(value: object, shape: Shape, at: str) -> str | None:
    """Return why a value read from JSON does not have a shape, or None if it does.

    Args:
        value: The value.
        shape: The required shape.
        at: The name of the value in the message.

    Example:
        >>> session = {"started": str, "devices": [str], "versions": {...: str}}
        >>> misfit({"started": "", "devices": ["cpu", 1], "versions": {}}, session, "session")
        "session['devices'][1] is not a text"
        >>> misfit({"started": ""}, session, "session")
        "session['devices'] is missing"

    """
    if isinstance(shape, tuple):
        wrong = [misfit(value, one, at) for one in shape]
        return None if None in wrong else wrong[0]
    if isinstance(shape, list):
        if not isinstance(value, list):
            return f"{at} is not a list"
        wrong = [misfit(one, shape[0], f"{at}[{number}]") for number, one in enumerate(value)]
        return next(filter(None, wrong), None)
    if isinstance(shape, dict):
        return _dict_misfit(value, shape, at)
    if shape is None:
        return None if value is None else f"{at} is not null"
    kinds = (int, float) if shape is float else shape
    if not isinstance(value, kinds) or (isinstance(value, bool) and shape is not bool):
        named = {str: "a text", int: "a whole number", float: "a number"}
        named |= {dict: "an object", list: "a list"}
        return f"{at} is not {named.get(shape, shape.__name__)}"
    return None


def _dict_misfit(value: object, shape: dict[Any, Shape], at: str) -> str | None:
    if not isinstance(value, dict):
        return f"{at} is not an object"
    for name, inner in shape.items():
        if name is not ... and name not in value:
            return f"{at}[{name!r}] is missing"
        names = value.keys() - shape.keys() if name is ... else [name]
        for one in names:
            if wrong := misfit(value[one], inner, f"{at}[{one!r}]"):
                return wrong
    return None
