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
from pseudograd.search.documents import fields_of
from pseudograd.search.protocol import RANGE, NetworkProtocol, OwnProtocol, Protocol

LOCK = ".lock"
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
    with fields_of(path, _advice(folder)) as found:
        parts = {name: dict(found[name]) for name in ("recipe", "protocol", "data")}
        return {**parts, "sessions": [_session(one) for one in found["sessions"]]}


def _session(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of a session; raise if a field is missing or strange."""
    return {
        **fields,
        **{name: str(fields[name]) for name in ("command", "started", "hardware", "commit")},
        "seconds": float(fields["seconds"]),
        "trials": int(fields["trials"]),
        "devices": [str(device) for device in fields["devices"]],
        "versions": {name: str(version) for name, version in fields["versions"].items()},
    }


def _advice(folder: Path) -> str:
    return (
        "use the version that wrote it, or run the search's command with another --out; to keep "
        f"finished trials, stop it with Ctrl-C, copy {folder / 'ledger.jsonl'} into its folder and "
        "run it again"
    )


def protocol_in(folder: Path) -> Protocol:
    """Return the protocol that run.json describes."""
    with fields_of(folder / "run.json", _advice(folder)) as found:
        settings: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in found["protocol"].items()
        }
        settings["recipe"] = recipe_from_json(found["recipe"])
        return _PROTOCOLS[settings.pop("kind", Protocol.kind)](**settings)


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
    defaults = {field.name: field.default for field in dataclasses.fields(protocol.recipe)}  # type: ignore[arg-type]
    for part in ("recipe", "protocol"):
        for name in written[part] | ours[part]:
            old, new = (one[part].get(name, defaults.get(name)) for one in (written, ours))
            grown = name in protocol.grows and are_numbers(old) and old < new
            if old != new and name not in RANGE and not grown:
                raise _other(folder, name, old, new)
    if changed:
        raise _other(folder, "classes", *(one["data"].get("labels") for one in (written, ours)))


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
