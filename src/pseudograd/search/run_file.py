"""run.json: the description of a study and its sessions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pseudograd.environment import session
from pseudograd.files import UNFINISHED
from pseudograd.fleet.recipe import are_numbers, recipe_from_json
from pseudograd.search.bagging import Bagging
from pseudograd.search.documents import misfit, read_json
from pseudograd.search.protocol import RANGE, NetworkProtocol, OwnProtocol, Protocol

LOCK = ".lock"
_SESSION = {
    "command": str,
    "started": str,
    "seconds": float,
    "hardware": str,
    "versions": {"pseudograd": str, ...: str},
    "commit": str,
    "devices": [str],
    "trials": int,
}
_RUN = {"recipe": dict, "protocol": dict, "data": dict, "sessions": [_SESSION]}
# Facts about the data that the user gives; the number of classes follows from their names.
_GIVEN = {"name", "labels", "classes"}
_PROTOCOLS: dict[str, type[Protocol]] = {
    kind.kind: kind for kind in (Protocol, Bagging, NetworkProtocol, OwnProtocol)
}


def read_run(folder: Path) -> dict[str, Any]:
    """Return the content of run.json: recipe, protocol, data and sessions."""
    path = folder / "run.json"
    if not path.exists():
        why = "there is no run.json" if folder.is_dir() else "there is no such folder"
        raise FileNotFoundError(f"{folder} holds no run: {why}; pseudograd runs lists them")
    found = read_json(
        path,
        "run the search's command with another --out; to keep finished trials, stop it with "
        f"Ctrl-C, copy {folder / 'ledger.jsonl'} into its folder and run it again",
    )
    if wrong := misfit(found, _RUN, "it"):
        raise ValueError(_foreign(path, wrong))
    return found


def _foreign(path: Path, wrong: str) -> str:
    return (
        f"{path} does not describe a run ({wrong}): if another version of pseudograd wrote it, use "
        "that version, or name another folder"
    )


def protocol_in(folder: Path, written: Mapping[str, Any]) -> Protocol:
    """Return the protocol that run.json describes."""
    try:
        settings: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in written["protocol"].items()
        }
        settings["recipe"] = recipe_from_json(written["recipe"])
        return _PROTOCOLS[settings.pop("kind", Protocol.kind)](**settings)
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise ValueError(_foreign(folder / "run.json", repr(problem))) from problem


def check_settings(
    folder: Path, written: Mapping[str, Any], ours: Mapping[str, Any], protocol: Protocol
) -> None:
    """Raise ValueError if the folder holds a study that this one cannot continue.

    Only the settings of `RANGE` may differ, and those that the protocol lets grow.
    """
    old, new = _facts(written["data"]), _facts(ours["data"])
    changed = {name for name in old | new if old.get(name) != new.get(name)}
    if changed and not ("sha256" in old and changed <= _GIVEN):
        raise ValueError(
            f"{folder} holds a run on other data, called {old.get('name')!r}: name another folder, "
            "or restore the data"
        )
    if "name" in changed:
        raise _other(folder, "name", old["name"], new["name"])
    settings = (*dataclasses.fields(protocol), *dataclasses.fields(protocol.recipe))  # type: ignore[arg-type]
    defaults = {field.name: field.default for field in settings}
    for part in ("recipe", "protocol"):
        for name in written[part] | ours[part]:
            old, new = (one[part].get(name, defaults.get(name)) for one in (written, ours))
            grown = name in protocol.grows and are_numbers(old) and old < new
            if old != new and name not in RANGE and not grown:
                raise _other(folder, name, old, new)
    if changed:
        raise _other(folder, "classes", written["data"]["labels"], ours["data"]["labels"])


def _other(folder: Path, name: str, old: object, new: object) -> ValueError:
    return ValueError(
        f"{folder} holds a run with other settings ({name} was {old}, is now {new}): name another "
        "folder, or use the same settings"
    )


def check_empty(folder: Path) -> None:
    """Raise ValueError if a folder holds anything but a run."""
    if any(path.suffix != UNFINISHED and path.name != LOCK for path in folder.iterdir()):
        raise ValueError(f"{folder} is not empty and holds no run: name another folder")


def begun(command: str, devices: Sequence[str], share: float = 1.0) -> dict[str, Any]:
    """Return the record of a session that starts now."""
    now = {**session(command, *devices), "devices": list(devices), "trials": 0}
    return now | {"share": share} if share != 1 else now


def _facts(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that identify the data, without texts that versions may add or change."""
    told = ("columns", "notes", "positions")
    return {name: value for name, value in data.items() if name not in told}
