"""A study's folder: ``run.json``, the ledger, and the locks of processes that share it.

There are three kinds of file locks. The file ``.lock`` is held briefly, while a process selects a
trial, claims it, or writes. A fleet holds a lock on the ledger while it runs, and no other process
gets a trial. Each claim on a trial by ``ask`` is a lock, and no fleet starts while there is one.
The operating system releases the locks of a process that ends, even by kill -9.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import json
import math
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pseudograd.environment import session
from pseudograd.files import UNFINISHED, Lock, busy, guarded, locked, writing
from pseudograd.fleet import Trial
from pseudograd.fleet.recipe import are_numbers, recipe_from_json
from pseudograd.search.bagging import Bagging
from pseudograd.search.documents import fields_of, write_json
from pseudograd.search.ledger import Ledger, trial_name
from pseudograd.search.protocol import RANGE, NetworkProtocol, OwnProtocol, Protocol

_LOCK = ".lock"
# Facts about the data that the user gives; the number of classes follows from their names.
_GIVEN = {"name", "labels", "classes"}
_PROTOCOLS: dict[str, type[Protocol]] = {
    kind.kind: kind for kind in (Protocol, Bagging, NetworkProtocol, OwnProtocol)
}


class StoredStudy:
    """A protocol, the ledger of its outcomes and its sessions, in a folder: the base of `Study`.

    Args:
        folder: The folder; None keeps them in memory.
        protocol: The protocol of the search.
        data: Facts about the data, in a form that JSON can hold; None accepts any.

    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        protocol: Protocol,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = None if folder is None else Path(folder)
        self.protocol = protocol
        self.data: Mapping[str, Any] = data or {}
        self.sessions: list[dict[str, Any]] = []
        self._asked: set[Trial] = set()  # used if trials are not claimed by files
        self._led: set[Trial] = set()  # trials that rank 0 of a torch.distributed job asked for
        self._in_session = False
        self._claims = Claims(self.folder or Path())
        self._place: int | None = None  # index of this process's session in `sessions`
        self._process = os.getpid()
        self._loops = 0  # running loops over shared trials
        self._noted = -math.inf
        if self.folder is not None:
            self._open_folder(self.folder, check_data=data is not None)
        self.ledger = self._read_ledger()

    @property
    def about(self) -> dict[str, Any]:
        """The provenance of the results, merged over all sessions that ran trials."""
        if self.folder is None:
            raise ValueError("a study in memory records no sessions: give it a folder")
        if not self.sessions:
            raise ValueError(f"{self.folder} holds a run that was never started: run it")
        ran = [one for one in self.sessions if one["trials"]] or self.sessions
        versions: dict[str, list[str]] = {}
        for one in ran:
            for name, version in one["versions"].items():
                versions.setdefault(name, []).append(version)
        return {
            "command": _joined("\n", (one["command"] for one in ran)),
            "versions": {name: _joined(" and ", several) for name, several in versions.items()},
            "commit": _joined(", ", (one["commit"] for one in ran)),
            "hardware": _joined("; ", (one["hardware"] for one in ran)),
            "devices": list(dict.fromkeys(device for one in ran for device in one["devices"])),
            "started": self.sessions[0]["started"],
            "seconds": sum(one["seconds"] for one in self.sessions),
            "seed": self.protocol.seed,
            "compared_before": self.compared_before,
            "data": self.data,
        }

    @property
    def compared_before(self) -> int:
        """The number of final networks first compared, if more were asked for later; or 0."""
        before = [one["compared_before"] for one in self.sessions if "compared_before" in one]
        return before[0] if before else 0

    # --- sessions ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def session(self, command: str, devices: Sequence[str], share: float = 1.0) -> Iterator[None]:
        """Record where and for how long the study runs, and lock the folder meanwhile.

        A nested session continues the outer one.
        """
        if self.folder is None or self._in_session:
            yield
            return
        now = _begun(command, devices, share)
        with contextlib.ExitStack() as stack:
            with self._guard():
                stack.enter_context(locked(self._ledger_path))
                if self._claims.trials or self._claims.others():
                    raise busy(self._ledger_path)
                self._begin(now)
            self._in_session = True
            try:
                yield
            finally:
                self._in_session = False
                self._note_time()

    def _begin(self, now: dict[str, Any]) -> None:
        """Record the start of a session, and read the outcomes of others."""
        assert self.folder is not None
        with self._guard():
            written = read_run(self.folder)
            if self._is_started(written):
                ours = self._as_json()
                _check_settings(self.folder, written, ours, self.protocol)
                if written["protocol"] != ours["protocol"] and self._claims.others():
                    raise BlockingIOError(
                        f"another process is using {self.folder} with other values of k, learning "
                        "rates, repetitions or retrainings: give the same, or wait for it to finish"
                    )
            self.sessions[:] = written["sessions"]
            self.ledger = self._read_ledger()
            before = written["protocol"].get("retrainings", 0)
            if before < self.protocol.retrainings and self._has_compared(before):
                now["compared_before"] = before
            self.sessions.append(now)
            self._place = None
            self._write()

    def _has_compared(self, networks: int) -> bool:
        """Return whether k = 1 and another k have as many final networks or more."""
        pairs = Counter((one.k, one.learning_rate) for one in self.ledger if one.split.retrain)
        return networks > 0 and len({k for (k, _), n in pairs.items() if n >= networks}) > 1

    def _note_time(self) -> None:
        """Record the duration of this process's session so far."""
        if not self.sessions:
            return
        with self._guard():
            latest = self.sessions[-1 if self._place is None else self._place]
            started = datetime.datetime.fromisoformat(latest["started"])
            passed = datetime.datetime.now(datetime.UTC) - started
            latest["seconds"] = round(passed.total_seconds(), 1)
            description = None
            if self._place is not None and self.folder is not None:
                description = read_run(self.folder)  # another process may have changed its range
                self.sessions[:] = description["sessions"]
                self.sessions[self._place] = latest
            self._write(description)
            self._noted = time.monotonic()

    # --- a folder shared with other processes ------------------------------------------------

    @property
    def _shares(self) -> bool:
        """Whether other processes may be running trials of this study."""
        return self.folder is not None and not self._in_session

    @property
    def _ledger_path(self) -> Path:
        assert self.folder is not None
        return self.folder / "ledger.jsonl"

    def _guard(self) -> contextlib.AbstractContextManager[None]:
        """Hold the folder's lock against other processes and threads."""
        return contextlib.nullcontext() if self.folder is None else guarded(self.folder / _LOCK)

    @contextlib.contextmanager
    def _sharing(self) -> Iterator[None]:
        """Join the processes that share the folder, and hold its lock."""
        self._notice_fork()
        now = _begun("", []) if self._place is None else None
        with self._guard(), locked(self._ledger_path):  # only a fleet holds that lock for longer
            if self._place is None:
                self._begin(now or _begun("", []))
                self._place, self._noted = len(self.sessions) - 1, -math.inf
            self.ledger.refresh()
            yield

    def _notice_fork(self) -> None:
        """In a forked child, drop the session of the parent process; its locks are gone already."""
        if self._process != os.getpid():
            self._process, self._place, self._loops = os.getpid(), None, 0

    def _read_ledger(self) -> Ledger:
        path = None if self.folder is None else self._ledger_path
        return Ledger(path, self.protocol.recipes, self.protocol.admits)

    def _open_folder(self, folder: Path, *, check_data: bool) -> None:
        """Create the folder of a new study, or check that it holds this study."""
        if file := next((path for path in (folder, *folder.parents) if path.is_file()), None):
            raise ValueError(f"{file} cannot be written into (it is a file): name a folder")
        if not (folder / "run.json").exists():
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
            with self._guard():
                if not (folder / "run.json").exists():
                    _check_empty(folder)
                    self._write()
                    return
        written = read_run(folder)
        if not check_data:
            self.data = written["data"]
        if not self._is_started(written):  # its settings may still change
            with self._guard():
                written = read_run(folder)
                if not self._is_started(written):
                    if {**self._as_json(), "sessions": []} != written:
                        self._write()
                    return
        _check_settings(folder, written, self._as_json(), self.protocol)
        self.data = written["data"]  # as written by the version that started it
        self.sessions = written["sessions"]

    def _is_started(self, written: Mapping[str, Any]) -> bool:
        path = self._ledger_path
        return bool(written["sessions"]) or (path.exists() and path.stat().st_size > 0)

    @property
    def fingerprint(self) -> str:
        """A hash of the recipe, the protocol and the facts about the data."""
        return hashlib.sha256(json.dumps(self._description()).encode()).hexdigest()

    def _description(self) -> dict[str, Any]:
        recipe = self.protocol.recipe.to_json()
        return {"recipe": recipe, "protocol": self.protocol.settings(), "data": self.data}

    def _as_json(self) -> dict[str, Any]:
        """Return the description as JSON returns it, with lists for tuples."""
        description: dict[str, Any] = json.loads(json.dumps(self._description()))
        return description

    def _write(self, description: Mapping[str, Any] | None = None) -> None:
        if self.folder is not None:
            with self._guard():
                content = {**(description or self._description()), "sessions": self.sessions}
                write_json(self.folder / "run.json", content)


class Claims:
    """The claims of one process: locked files in ``claims``, named after their trials.

    All methods must be called under the lock of the study's folder, so that no file is removed
    while another process is opening it.

    Args:
        folder: The study's folder.

    Example:
        >>> import tempfile
        >>> from pseudograd.fleet import OwnRecipe
        >>> folder, trial = Path(tempfile.mkdtemp()), Trial(OwnRecipe("mine"), 0.5, 0.1)
        >>> ours, theirs = Claims(folder), Claims(folder)
        >>> ours.take(trial), theirs.take(trial)
        (True, False)
        >>> ours.release(trial)
        >>> theirs.take(trial)
        True

    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "claims"
        self._locks: dict[Trial, Lock] = {}

    @property
    def trials(self) -> list[Trial]:
        """The trials that this process has claimed."""
        return [trial for trial, lock in self._locks.items() if lock.held]

    def take(self, trial: Trial) -> bool:
        """Claim a trial; return False if it is already claimed."""
        if trial in self.trials:
            return False
        self.folder.mkdir(exist_ok=True)
        lock = Lock.on(self._file(trial))
        if lock is None:
            return False
        self._locks[trial] = lock
        return True

    def release(self, trial: Trial) -> None:
        """Release a claim, if this process holds it."""
        lock = self._locks.pop(trial, None)
        if lock is not None and lock.held:  # a forked child does not hold its parent's locks
            lock.release()
            self._file(trial).unlink(missing_ok=True)
            self._remove_folder()

    def others(self) -> bool:
        """Return whether others hold claims; remove those of killed processes."""
        if not self.folder.is_dir():
            return False
        ours = {self._file(trial) for trial in self.trials}
        for path in {*self.folder.iterdir()} - ours:
            if (lock := Lock.on(path)) is None:
                return True
            lock.release()
            path.unlink(missing_ok=True)
        self._remove_folder()
        return False

    def _remove_folder(self) -> None:
        with contextlib.suppress(OSError):  # not empty
            self.folder.rmdir()

    def _file(self, trial: Trial) -> Path:
        return self.folder / trial_name(trial)


# --- run.json ---------------------------------------------------------------------------------


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


def _check_settings(
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
        raise _other(folder, "name", old.get("name"), new.get("name"))
    settings = (*dataclasses.fields(protocol), *dataclasses.fields(protocol.recipe))  # type: ignore[arg-type]
    defaults = {field.name: field.default for field in settings}
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


def _check_empty(folder: Path) -> None:
    """Raise ValueError if a folder holds anything but a run."""
    if any(path.suffix != UNFINISHED and path.name != _LOCK for path in folder.iterdir()):
        raise ValueError(f"{folder} is not empty and holds no run: name another folder")


def _begun(command: str, devices: Sequence[str], share: float = 1.0) -> dict[str, Any]:
    """Return the record of a session that starts now."""
    now = {**session(command, *devices), "devices": list(devices), "trials": 0}
    return now | {"share": share} if share != 1 else now


def _facts(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that identify the data, without texts that versions may add or change."""
    told = ("columns", "notes", "positions")
    return {name: value for name, value in data.items() if name not in told}


def _joined(separator: str, texts: Iterable[str]) -> str:
    """Join texts without duplicates, in order."""
    return separator.join(dict.fromkeys(texts))
