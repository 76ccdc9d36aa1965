"""Models in a run folder: saved whole, checked when they are loaded, and never unpickled."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pseudograd.data import Dataset, Encoder
from pseudograd.files import writing
from pseudograd.fleet import Ensemble, Network, Outcome, Trial
from pseudograd.search.ledger import trial_to_json
from pseudograd.search.study import Study, write_json

MODEL, PLAIN = "model.safetensors", "plain.safetensors"


class Store:
    """The networks of a bagging study, a file each, until and after the model is chosen.

    A network that is missing or damaged counts as not trained.

    Args:
        folder: Where they are kept.

    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, outcome: Outcome, data: Dataset) -> None:
        """Keep the network of an outcome."""
        path = self._path(outcome.trial)
        with writing(path):
            self.folder.mkdir(exist_ok=True)
            Network.of(outcome, data).save(path)

    def get(self, trial: Trial) -> Network | None:
        """Return the network of a trial, or None if there is none that can be read."""
        try:
            return Network.load(self._path(trial))
        except (ValueError, OSError):
            return None

    def missing(self, trials: Iterable[Trial]) -> list[Trial]:
        """Return the trials that have no network here."""
        return [trial for trial in trials if self.get(trial) is None]

    def _path(self, trial: Trial) -> Path:
        key = json.dumps(trial_to_json(trial), sort_keys=True)
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.safetensors"


def save_model(
    folder: Path,
    models: Mapping[str, Ensemble],
    encoder: Encoder,
    k: float | None,
    made_from: Mapping[str, Any],
    **about: Any,
) -> None:
    """Save the model of a finished study.

    Args:
        folder: The study's folder.
        models: The model under the name `MODEL`, and that of k = 1 under `PLAIN` unless it is the
            same.
        encoder: The encoder for new rows.
        k: The model's k; None if it mixes several.
        made_from: What the model follows from, to notice when that changes.
        about: What else to note, as JSON can hold it.

    """
    path = folder / "model.json"
    path.unlink(missing_ok=True)
    for name, model in models.items():
        with writing(folder / name):
            model.save(folder / name)
    # Written last: if it exists, all the files do.
    write_json(
        path,
        {
            "k": k,
            "sha256": {name: _sha256(folder / name) for name in models},
            "made_from": made_from,
            **about,
            "encoder": json.loads(encoder.to_json()),
        },
    )


def is_saved(folder: Path, made_from: Mapping[str, Any]) -> bool:
    """Return whether the model that follows from this is saved, and none of its files damaged."""
    try:
        fields = json.loads((folder / "model.json").read_text(encoding="utf-8"))
        return fields["made_from"] == json.loads(json.dumps(made_from)) and all(
            _sha256(folder / name) == digest
            for name, digest in fields["sha256"].items()
            if name in (MODEL, PLAIN)
        )
    except (OSError, AttributeError, KeyError, TypeError, ValueError):
        return False


def load_model(folder: str | os.PathLike[str], k: float | None = None) -> tuple[Ensemble, Encoder]:
    """Return the model that a search has chosen, and the encoder for new rows.

    Args:
        folder: The folder of the search.
        k: 1 for the model of k = 1, which the choice was compared with.

    Example:
        >>> load_model("nowhere")
        Traceback (most recent call last):
        ...
        FileNotFoundError: nowhere holds no run: there is no run.json

    """
    folder = Path(folder)
    Study.open(folder)  # says what is wrong with the folder, if anything is
    path = folder / "model.json"
    if not path.exists():
        raise ValueError(f"{folder} has no model yet: run its command again to finish the search")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        encoder = Encoder.from_json(json.dumps(fields["encoder"]))
        digests = {name: fields["sha256"].get(name) for name in (MODEL, PLAIN)}
        own = fields["k"] if fields["k"] is None else float(fields["k"])
    except (AttributeError, KeyError, TypeError, ValueError) as problem:
        raise ValueError(
            f"{path} is not the description of a model ({problem!r}): run the search's command "
            "again, which repairs it"
        ) from problem
    name = _wanted(folder, k, own, digests)
    file = folder / name
    if not file.exists() or _sha256(file) != digests[name]:
        raise ValueError(
            f"{file} is {'damaged' if file.exists() else 'missing'}: run the search's command "
            "again, which repairs it"
        )
    return Ensemble.load(file), encoder


def _wanted(
    folder: Path, k: float | None, own: float | None, digests: Mapping[str, str | None]
) -> str:
    """Return the file of the model with this k."""
    if k is None or (own is not None and math.isclose(own, k, rel_tol=1e-5)):
        return MODEL
    if k == 1 and digests[PLAIN]:
        return PLAIN
    kept = ([] if own is None else [f"{own:g}"]) + (["1"] if digests[PLAIN] else [])
    there = f"give {' or '.join(kept)}" if kept else "all of its networks have k = 1"
    raise ValueError(f"{folder} has no model of k = {k:g}: {there}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
