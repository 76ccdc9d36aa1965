"""A search in a folder: all that is needed to go on with it, to show it and to use what it found.

The folder holds ``run.json`` (what is searched, on which data, and when and where it ran), the
ledger, and when the search is over the chosen model and what the examples tell about it.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pseudograd.data import Dataset, Encoder
from pseudograd.environment import session
from pseudograd.files import UNFINISHED, locked, write_whole, writing
from pseudograd.fleet import Network, Outcome, Trial
from pseudograd.search.comparison import best_stopped, by_class
from pseudograd.search.difficulty import difficulty
from pseudograd.search.ledger import Ledger, trial_from_fields
from pseudograd.search.protocol import Protocol
from pseudograd.search.search import Progress, Result, Runner, advance, result

_SECONDS_BETWEEN_NOTES = 5.0
_PLAIN = "plain.safetensors"


@dataclass(frozen=True)
class Run:
    """A search in a folder.

    Attributes:
        folder: Where all of it lies.
        protocol: What is searched, and how.
        data: Facts about the data set: its name, its hash, its sizes, its labels.
        sessions: One entry for each time the search was started: command, versions, commit,
            hardware, devices, when, for how long and how many trials.

    Example:
        >>> import tempfile
        >>> from pseudograd.data import open_data
        >>> data, encoder = open_data("digits")
        >>> protocol = Protocol(Trial("digits", (8,), k=1, learning_rate=1), initial_rate=0.2)
        >>> run = Run.prepare(tempfile.mkdtemp(), protocol, data, encoder)
        >>> Run.open(run.folder).data["train_size"]
        1437

    """

    folder: Path
    protocol: Protocol
    data: Mapping[str, Any]
    sessions: list[dict[str, Any]]

    @classmethod
    def prepare(
        cls,
        folder: str | os.PathLike[str],
        protocol: Protocol,
        data: Dataset,
        encoder: Encoder,
    ) -> Run:
        """Make the folder of a new search, or open it to go on with the same search.

        Args:
            folder: Where; it is made if it does not exist.
            protocol: What to search, and how.
            data: The data set.
            encoder: What made it.

        """
        folder = Path(folder)
        if file := next((path for path in (folder, *folder.parents) if path.is_file()), None):
            raise ValueError(f"{file} cannot be written into (it is a file): name a folder")
        facts = {
            "name": data.name,
            "sha256": data.sha256,
            "train_size": data.train_size,
            "test_size": data.test_size,
            "features": data.features.shape[1],
            "classes": data.classes,
            "labels": list(encoder.labels),
            "pixels": None if encoder.pixels is None else list(encoder.pixels),
            "target": encoder.target,
            "columns": encoder.taken_for,
            # Other units or names can make the same features.
            "encoder": _digest(encoder.to_json()),
        }
        if not (folder / "run.json").exists():
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
            if any(path.suffix != UNFINISHED for path in folder.iterdir()):
                raise ValueError(f"{folder} is not empty and holds no run: name another folder")
            run = cls(folder, protocol, facts, [])
            run._write()
            return run
        run = cls.open(folder)
        if any(run.data.get(name) != facts[name] for name in ("sha256", "train_size", "encoder")):
            raise ValueError(
                f"{folder} holds a run on other data, called {run.data['name']!r}: "
                "name another folder, or bring back the data as it was"
            )
        if different := _differences(asdict(run.protocol), asdict(protocol)):
            name, before, now = different[0]
            raise ValueError(
                f"{folder} holds a run with other settings ({name} was {before}, is now {now}): "
                "name another folder, or repeat its settings"
            )
        return run

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Run:
        """Open the folder of a search."""
        folder = Path(folder)
        path = folder / "run.json"
        if not path.exists():
            raise FileNotFoundError(f"{folder} holds no run: there is no run.json")
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as problem:
            raise ValueError(
                f"{path} is damaged ({problem}): run the search's command with another --out; to "
                f"keep what is done, stop it by Ctrl-C, copy {folder / 'ledger.jsonl'} into its "
                "folder and run it again"
            ) from problem
        try:
            protocol = dict(fields["protocol"])
            protocol["trial"] = trial_from_fields(protocol["trial"])
            for name in ("ks", "learning_rates"):
                protocol[name] = tuple(protocol[name])
            return cls(folder, Protocol(**protocol), fields["data"], fields["sessions"])
        except (KeyError, TypeError, ValueError) as problem:
            raise ValueError(
                f"{path} is not the description of a run ({problem!r}): if another version of "
                "pseudograd made it, use that one, or name another folder"
            ) from problem

    @property
    def ledger(self) -> Ledger:
        """What has been found so far, read from the file."""
        path = self.folder / "ledger.jsonl"
        return Ledger(path, self.data["sha256"], self.protocol.covers)

    @property
    def finished(self) -> bool:
        """Whether the search is over and its model saved."""
        return (self.folder / "model.json").exists()

    @property
    def examples(self) -> dict[str, Any] | None:
        """What the model does with the examples: what `difficulty` tells, and errors by class.

        None before the search is over.
        """
        path = self.folder / "examples.json"
        if not path.exists():
            return None
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as problem:
            raise ValueError(
                f"{path} cannot be read ({problem}): remove it and model.json, and run the "
                "search's command again"
            ) from problem
        return found

    @property
    def about(self) -> dict[str, Any]:
        """What stands beside the figures; where sessions that ran trials differ, of all of them."""
        if not self.sessions:
            raise ValueError(f"{self.folder} holds a run that was never started: start it")
        ran = [one for one in self.sessions if one["trials"]] or self.sessions
        versions: dict[str, list[str]] = {}
        for one in ran:
            for name, version in one["versions"].items():
                versions.setdefault(name, []).append(version)
        return {
            "command": _joined("\n", (one["command"] for one in ran)),
            "versions": {name: _joined(" and ", found) for name, found in versions.items()},
            "commit": _joined(", ", (one["commit"] for one in ran)),
            "hardware": _joined("; ", (one["hardware"] for one in ran)),
            "devices": list(dict.fromkeys(device for one in ran for device in one["devices"])),
            "started": self.sessions[0]["started"],
            "seconds": sum(one["seconds"] for one in self.sessions),
            "seed": self.protocol.seed,
            "data": self.data,
        }

    @contextlib.contextmanager
    def session(self, command: str, devices: list[str]) -> Iterator[dict[str, Any]]:
        """Note that the search goes on, where and for how long; no one else may go on meanwhile.

        Args:
            command: What was asked for.
            devices: Where it is done.

        """
        with locked(self.folder / "ledger.jsonl"):
            self.sessions[:] = Run.open(self.folder).sessions  # another process may have ended
            now = {**session(command, *devices), "devices": devices, "trials": 0}
            self.sessions.append(now)
            self._write()
            try:
                yield now
            finally:
                self.note_time()

    def note_time(self) -> None:
        """Write down how long the latest session has lasted."""
        latest = self.sessions[-1]
        started = datetime.datetime.fromisoformat(latest["started"])
        passed = datetime.datetime.now(datetime.UTC) - started
        latest["seconds"] = round(passed.total_seconds(), 1)
        self._write()

    def _write(self) -> None:
        fields = {
            "data": self.data,
            "protocol": asdict(self.protocol),
            "sessions": self.sessions,
        }
        _write_json(self.folder / "run.json", fields)


def tune(
    run: Run,
    data: Dataset,
    encoder: Encoder,
    runner: Runner,
    *,
    command: str = "",
    devices: tuple[str, ...] = ("cpu",),
    watch: Callable[[Progress], None] = lambda _: None,
) -> Result:
    """Run a search to its end, from wherever it stands, and save the model that it chooses.

    Args:
        run: The search.
        data: Its data set.
        encoder: What made the data set; it is saved with the model.
        runner: Trains trials; those of the final training should carry their parameters.
        command: What to write down as having been asked for.
        devices: What to write down as having been used.
        watch: Called after each trial.

    Example:
        >>> import tempfile
        >>> from pseudograd.data import open_data
        >>> from pseudograd.fleet import Fleet
        >>> data, encoder = open_data("digits")
        >>> template = Trial("digits", (8,), k=1, learning_rate=1, max_epochs=2)
        >>> protocol = Protocol(template, ks=(1.0,), initial_rate=0.2, repetitions=1, retrainings=1,
        ...                     most_extensions=1)
        >>> run = Run.prepare(tempfile.mkdtemp(), protocol, data, encoder)
        >>> tune(run, data, encoder, Fleet(data, keep_parameters=True).run).chosen.k
        1.0
        >>> sorted(path.name for path in run.folder.iterdir())
        ['examples.json', 'ledger.jsonl', 'model.json', 'model.safetensors', 'run.json']

    """
    with run.session(command, list(devices)) as noted_down:
        ledger = run.ledger
        trained = {}
        noted = -math.inf  # at the first trial, so that it is known of a session that is killed
        for progress in advance(run.protocol, ledger, runner):
            noted_down["trials"] += 1
            if progress.outcome.trial.split.retrain:
                trained[progress.outcome.trial] = progress.outcome
            if time.monotonic() - noted > _SECONDS_BETWEEN_NOTES:
                run.note_time()
                noted = time.monotonic()
            watch(progress)
        found = result(run.protocol, ledger)
        labels = data.labels[data.train_size :].tolist()
        comparison = found.comparison
        comparison = replace(comparison, by_class=by_class(comparison.kept, labels, encoder.labels))
        found = replace(found, comparison=comparison)
        if not _is_saved(run, comparison.kept.trial):
            _save_model(run, data, encoder, runner, found, trained)
    return found


def _is_saved(run: Run, trial: Trial) -> bool:
    """Whether the model is there, and of this trial: lines added to a ledger may choose another."""
    path = run.folder / "model.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        names = [name for name in (fields["network"], fields.get("plain")) if name]
        there = all((run.folder / name).exists() for name in names)
        return there and trial_from_fields(fields["trial"]) == trial
    except (FileNotFoundError, KeyError, TypeError, ValueError):
        return False


def _save_model(
    run: Run,
    data: Dataset,
    encoder: Encoder,
    runner: Runner,
    found: Result,
    trained: dict[Trial, Outcome],
) -> None:
    """Save the best network of the choice and that of k = 1, and what they find difficult."""
    comparison = found.comparison
    best = [comparison.kept, best_stopped(comparison.plain)]
    # Those of an earlier session are trained again: the ledger keeps no weights.
    lost = {outcome.trial: None for outcome in best if outcome.trial not in trained}
    if lost:
        trained |= {outcome.trial: outcome for outcome in runner(list(lost))}
    chosen, plain = (Network.of(trained[outcome.trial], data) for outcome in best)
    if not chosen.is_finite:
        raise ValueError(
            "all networks diverged, so there is none to save: lower the learning rates"
        )
    (run.folder / "model.json").unlink(missing_ok=True)
    files = {"model.safetensors": chosen}
    if found.chosen.k != 1 and plain.is_finite:
        files[_PLAIN] = plain
    for name, network in files.items():
        with writing(run.folder / name):
            network.save(run.folder / name)
    networks = {"chosen": (found.chosen.k, chosen), "plain": (found.plain.k, plain)}
    examples = difficulty(networks, data, encoder)
    examples["by_class"] = [asdict(one) for one in comparison.by_class]
    _write_json(run.folder / "examples.json", examples)
    # The last of the files: once it is there, all are.
    outcome = trained[best[0].trial]
    _write_json(
        run.folder / "model.json",
        {
            "network": "model.safetensors",
            "plain": _PLAIN if _PLAIN in files else None,
            "trial": asdict(outcome.trial),
            "test_error": outcome.error,
            "encoder": json.loads(encoder.to_json()),
        },
    )


def load_model(folder: str | os.PathLike[str], k: float | None = None) -> tuple[Network, Encoder]:
    """Load the model that a search has chosen, and what encodes new rows for it.

    Args:
        folder: Of the search.
        k: 1 for the best network of k = 1, which the choice was compared with.

    Example:
        >>> load_model("nowhere")
        Traceback (most recent call last):
        ...
        FileNotFoundError: nowhere holds no run: there is no run.json

    """
    run = Run.open(folder)
    if not run.finished:
        raise ValueError(f"{folder} has no model yet: run its command again to finish the search")
    path = run.folder / "model.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        encoder = Encoder.from_json(json.dumps(fields["encoder"]))
        files = {1.0: fields.get("plain"), fields["trial"]["k"]: fields["network"]}
    except (KeyError, TypeError, ValueError) as problem:
        raise ValueError(f"{path} is not the description of a model ({problem!r})") from problem
    kept = [at for at, file in files.items() if file]
    if k is not None:  # as it is shown, in six digits
        k = next((at for at in kept if math.isclose(at, k, rel_tol=1e-5)), k)
    if k is not None and k not in kept:
        raise ValueError(
            f"{folder} has no network of k = {k:g}: give {' or '.join(f'{at:g}' for at in kept)}"
        )
    path = run.folder / (fields["network"] if k is None else files[k])
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is missing: run the search's command again, which trains this network again "
            "and nothing else"
        )
    return Network.load(path), encoder


def default_folder(protocol: Protocol, data: Dataset, encoder: Encoder) -> Path:
    """Name a folder for a search: the same for the same search on the same data.

    Args:
        protocol: What to search, and how.
        data: The data set.
        encoder: What made it.

    Example:
        >>> from pseudograd.data import open_data
        >>> protocol = Protocol(Trial("digits", (400,), k=1, learning_rate=1))
        >>> default_folder(protocol, *open_data("digits")).as_posix()
        'runs/digits-400-...'

    """
    sizes = "x".join(map(str, protocol.trial.hidden_layer_sizes)) or "linear"
    key = json.dumps([asdict(protocol), data.sha256, data.train_size, encoder.to_json()])
    return Path("runs") / f"{Path(data.name).stem}-{sizes}-{_digest(key)[:8]}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _joined(separator: str, texts: Iterable[str]) -> str:
    """Different texts as one, in the order they came."""
    return separator.join(dict.fromkeys(texts))


def _differences(before: Any, now: Any, name: str = "") -> list[tuple[str, Any, Any]]:
    """The settings that differ, by name, with their values."""
    if isinstance(before, dict):
        return [found for key in before for found in _differences(before[key], now[key], key)]
    return [] if before == now else [(name, before, now)]


def _write_json(path: Path, fields: Mapping[str, Any]) -> None:
    """Write a file all at once or not at all."""
    with writing(path):
        write_whole(path, json.dumps(fields, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
