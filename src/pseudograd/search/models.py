"""Models in a run folder: saved atomically, verified when loaded, and never unpickled."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pseudograd.data import Encoder
from pseudograd.files import sha256_of, writing
from pseudograd.fleet import Ensemble, OwnRecipe, Ramp
from pseudograd.fleet.ramp import as_k, plain_k
from pseudograd.search.bagging import Bagging
from pseudograd.search.documents import fields_of, read_json, write_json
from pseudograd.search.study import Study

MODEL, PLAIN = "model.safetensors", "plain.safetensors"
# Ensembles of all final networks of the paper's protocol, by the file of the single model.
ENSEMBLES = {MODEL: "ensemble.safetensors", PLAIN: "plain_ensemble.safetensors"}
_REPAIR = "run the search's command again, which repairs it"


@dataclass(frozen=True)
class Saved:
    """The content of model.json.

    Attributes:
        folder: The study's folder.
        k: The model's k; None if it mixes several.
        digests: The SHA-256 of each file.
        made_from: The trials and settings that determine the model.
        encoder: The encoder for new rows.

    """

    folder: Path
    k: float | Ramp | None
    digests: Mapping[str, str]
    made_from: Mapping[str, Any]
    encoder: Encoder

    def check(self, name: str) -> Path:
        """Return the path of a file; raise if it is missing or changed since it was saved."""
        path = self.folder / name
        if not path.exists():
            raise ValueError(f"{path} is missing: {_REPAIR}")
        if not path.is_file() or sha256_of(path) != self.digests.get(name):
            raise ValueError(f"{path} is damaged, or was changed by hand: {_REPAIR}")
        return path

    def are_whole(self) -> bool:
        """Return whether no file is missing or damaged."""
        try:
            return all(self.check(name) for name in self.digests)
        except (OSError, ValueError):
            return False


def save_model(
    study: Study,
    models: Mapping[str, Ensemble],
    documents: Mapping[str, Mapping[str, Any]],
    encoder: Encoder,
    k: float | Ramp | None,
    made_from: Mapping[str, Any],
    **about: Any,
) -> None:
    """Save the model of a finished study and its documents.

    Args:
        study: The study.
        models: The model as `MODEL`, the model of k = 1 as `PLAIN` unless it is the same, and
            optionally their `ENSEMBLES`.
        documents: The contents of JSON files, by name.
        encoder: The encoder for new rows.
        k: The model's k; None if it mixes several.
        made_from: The trials and settings that determine the model, to detect changes.
        about: Further fields of model.json.

    """
    folder = folder_of(study)
    forget_model(study)
    for name, document in documents.items():
        write_json(folder / name, document)
    for name, model in models.items():
        with writing(folder / name):
            model.save(folder / name)
    fields = {
        "k": None if k is None else plain_k(k),
        "sha256": {name: sha256_of(folder / name) for name in (*models, *documents)},
        "run": study.fingerprint,
        "made_from": made_from,
        **about,
        "encoder": json.loads(encoder.to_json()),
    }
    # Written last: if it exists, so do all the files.
    write_json(folder / "model.json", fields)


def forget_model(study: Study) -> None:
    """Remove model.json; call it before a file of the model is replaced."""
    path = folder_of(study) / "model.json"
    with writing(path):
        path.unlink(missing_ok=True)


def forget_other_model(study: Study) -> None:
    """Remove model.json if it is damaged, or was saved with other values of k or rates."""
    try:
        saved(study)
    except ValueError:
        forget_model(study)


def saved(study: Study) -> Saved | None:
    """Return the content of model.json; None if there is no model yet.

    Raises:
        ValueError: If it is damaged or does not belong to this study.

    """
    folder = folder_of(study)
    path = folder / "model.json"
    if not path.exists():
        return None
    with fields_of(path, _REPAIR) as fields:
        run = fields["run"]
        encoder = Encoder.from_json(json.dumps(fields["encoder"]))
        digests, made_from = dict(fields["sha256"]), dict(fields["made_from"])
        found = Saved(folder, as_k(fields["k"]), digests, made_from, encoder)
    if run != study.fingerprint:
        raise ValueError(f"{path} does not belong to the run.json beside it: {_REPAIR}")
    return found


def is_saved(study: Study, made_from: Mapping[str, Any]) -> bool:
    """Return whether the model made from this is saved, with all files intact."""
    try:
        found = saved(study)
    except (OSError, ValueError):
        return False
    return found is not None and found.made_from == made_from and found.are_whole()


def read_document(study: Study, name: str) -> dict[str, Any] | None:
    """Return a JSON file that was saved with the model; None if there is no model yet."""
    found = saved(study)
    if found is None or name not in found.digests:
        return None
    return read_json(found.check(name), _REPAIR)


def load_model(
    folder: str | os.PathLike[str],
    k: float | str | Ramp | None = None,
    *,
    ensemble: bool = False,
) -> tuple[Ensemble, Encoder]:
    """Return the model of a search, and the encoder for new rows.

    Args:
        folder: The folder of the search.
        k: The k of the model; by default that of the chosen one. 1 returns the model that it was
            compared with; a ramp may be a string like "0.5→2".
        ensemble: Whether to return the ensemble of all final networks of the paper's protocol
            instead of a single one; the model of bagging is always an ensemble.

    Example:
        >>> load_model("nowhere")
        Traceback (most recent call last):
        ...
        FileNotFoundError: nowhere holds no run: there is no such folder...

    """
    study = Study.open(folder)
    found = saved(study)
    if isinstance(study.protocol.recipe, OwnRecipe):
        raise ValueError(f"{folder} has no model: the networks of your own training are not kept")
    if found is None:
        raise ValueError(f"{folder} has no model yet: run its command again to finish the search")
    name = _wanted(found, as_k(k))
    if ensemble and not isinstance(study.protocol, Bagging):
        name = ENSEMBLES[name]
        if name not in found.digests:
            raise ValueError(
                f"{folder} has no {name}: it needs two final networks or more (--retrainings), and "
                "a search of an earlier version creates it when its command is run again"
            )
    return Ensemble.load(found.check(name)), found.encoder


def _wanted(found: Saved, k: float | Ramp | None) -> str:
    """Return the file of the model with this k."""
    own = found.k
    if k is None or (own is not None and _same(own, k)):
        return MODEL
    if k == 1 and PLAIN in found.digests:
        return PLAIN
    kept = ([] if own is None else [_told(own)]) + ["1"] * (PLAIN in found.digests)
    raise ValueError(f"{found.folder} has no model of k = {_told(k)}: give {' or '.join(kept)}")


def _same(own: float | Ramp, k: float | Ramp) -> bool:
    if isinstance(own, Ramp) or isinstance(k, Ramp):
        return own == k
    return math.isclose(own, k, rel_tol=1e-5)


def _told(k: float | Ramp) -> str:
    return str(k) if isinstance(k, Ramp) else f"{k:g}"


def folder_of(study: Study) -> Path:
    """Return the folder of a study, which must have one."""
    if study.folder is None:
        raise ValueError("study must have a folder, for its model to be saved there")
    return study.folder
