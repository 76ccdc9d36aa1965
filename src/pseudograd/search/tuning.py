"""`tune`: run a study of a user's data to its end, and save the model that it chooses.

The folder then holds, beside the study's own files, the model (``model.json`` and the weights) and
``examples.json``, which describes what the model does with the examples.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pseudograd.data import Dataset, Encoder
from pseudograd.files import writing
from pseudograd.fleet import Network, Outcome, Stop, Trial, never
from pseudograd.search.comparison import best_stopped, by_class
from pseudograd.search.difficulty import difficulty
from pseudograd.search.ledger import trial_to_json
from pseudograd.search.protocol import Protocol
from pseudograd.search.study import Progress, Result, Runner, Study, write_json

_PLAIN = "plain.safetensors"


def study_of(
    data: Dataset, encoder: Encoder, protocol: Protocol, folder: str | os.PathLike[str] | None
) -> Study:
    """Return the study of a data set, new or resumed; in `default_folder` if ``folder`` is None."""
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
        "notes": encoder.notes,
        # The features alone do not tell the units and names.
        "encoder": _digest(encoder.to_json()),
    }
    return Study(folder or default_folder(protocol, data, encoder), protocol, facts)


def tune(
    study: Study,
    data: Dataset,
    encoder: Encoder,
    runner: Runner,
    *,
    stop: Stop = never,
    command: str = "",
    devices: Sequence[str] = ("cpu",),
    watch: Callable[[Progress], None] = lambda _: None,
) -> Result | None:
    """Run a study to its end, from wherever it stands, and save the model that it chooses.

    Args:
        study: The study, in a folder.
        data: Its data set.
        encoder: The encoder of the data set, saved with the model.
        runner: Trains trials; outcomes of the final training must carry their parameters.
        stop: Called between epochs; once it returns True, the study is left as it is.
        command: The command line to record.
        devices: The devices to record.
        watch: Called after each trial.

    Returns:
        The result; None if it was stopped before the end.

    Example:
        >>> import tempfile
        >>> from pseudograd.data import open_data
        >>> from pseudograd.fleet import Fleet, MLPRecipe
        >>> data, encoder = open_data("digits")
        >>> protocol = Protocol(MLPRecipe("digits", (8,), max_epochs=2), ks=(1.0,),
        ...                     initial_rate=0.2, repetitions=1, retrainings=1, most_extensions=1)
        >>> study = study_of(data, encoder, protocol, tempfile.mkdtemp())
        >>> tune(study, data, encoder, Fleet(data, keep_parameters=True).run).chosen.k
        1.0
        >>> sorted(path.name for path in study.folder.iterdir())
        ['examples.json', 'ledger.jsonl', 'model.json', 'model.safetensors', 'run.json']

    """
    folder = _folder(study)
    if not study.protocol.retrainings:
        raise ValueError("retrainings must be 1 or more, for there to be a model")
    trained: dict[Trial, Outcome] = {}

    def note(progress: Progress) -> None:
        if progress.outcome.trial.split.retrain:
            trained[progress.outcome.trial] = progress.outcome
        watch(progress)

    with study.session(command, devices):
        if not study.run(runner, stop=stop, watch=note):
            return None
        found = study.result
        labels = data.labels[data.train_size :].tolist()
        comparison = found.comparison
        comparison = replace(comparison, by_class=by_class(comparison.kept, labels, encoder.labels))
        found = replace(found, comparison=comparison)
        if not _is_saved(folder, comparison.kept.trial):
            _save_model(folder, data, encoder, runner, found, trained)
    return found


def _folder(study: Study) -> Path:
    if study.folder is None:
        raise ValueError("study must be kept in a folder, for its model to be saved there")
    return study.folder


def read_examples(study: Study) -> dict[str, Any] | None:
    """Return `difficulty` and the errors by class of the saved model; None if there is none yet."""
    return _read(study, "examples.json")


def read_assessment(study: Study) -> dict[str, Any] | None:
    """Return what `assess` found about the saved model; None if there is nothing yet."""
    return _read(study, "assessment.json")


def _read(study: Study, name: str) -> dict[str, Any] | None:
    path = _folder(study) / name
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


def _is_saved(folder: Path, trial: Trial) -> bool:
    """Return whether this trial's model is saved: a ledger that grew may choose another."""
    path = folder / "model.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        names = [name for name in (fields["network"], fields.get("plain")) if name]
        there = all((folder / name).exists() for name in names)
        return there and fields["trial"] == trial_to_json(trial)
    except (FileNotFoundError, KeyError, TypeError, ValueError):
        return False


def _save_model(
    folder: Path,
    data: Dataset,
    encoder: Encoder,
    runner: Runner,
    found: Result,
    trained: dict[Trial, Outcome],
) -> None:
    """Save the best networks of the chosen k and of k = 1, and the examples they find difficult."""
    comparison = found.comparison
    best = [comparison.kept, best_stopped(comparison.plain)]
    # Retrain networks of an earlier session: the ledger keeps no weights.
    lost = {outcome.trial: None for outcome in best if outcome.trial not in trained}
    if lost:
        trained |= {outcome.trial: outcome for outcome in runner(deque(lost), never)}
    chosen, plain = (Network.of(trained[outcome.trial], data) for outcome in best)
    if not chosen.is_finite:
        raise ValueError(
            "all networks diverged, so there is no model to save: lower the learning rates"
        )
    (folder / "model.json").unlink(missing_ok=True)
    files = {"model.safetensors": chosen}
    if found.chosen.k != 1 and plain.is_finite:
        files[_PLAIN] = plain
    for name, network in files.items():
        with writing(folder / name):
            network.save(folder / name)
    networks = {"chosen": (found.chosen.k, chosen), "plain": (found.plain.k, plain)}
    examples = difficulty(networks, data, encoder)
    examples["by_class"] = [asdict(one) for one in comparison.by_class]
    write_json(folder / "examples.json", examples)
    # Written last: if it exists, all the files do.
    outcome = trained[best[0].trial]
    write_json(
        folder / "model.json",
        {
            "network": "model.safetensors",
            "plain": _PLAIN if _PLAIN in files else None,
            "trial": trial_to_json(outcome.trial),
            "test_error": outcome.error,
            "encoder": json.loads(encoder.to_json()),
        },
    )


def load_model(folder: str | os.PathLike[str], k: float | None = None) -> tuple[Network, Encoder]:
    """Return the model that a search has chosen, and the encoder for new rows.

    Args:
        folder: The folder of the search.
        k: 1 for the best network of k = 1, which the choice was compared with.

    Example:
        >>> load_model("nowhere")
        Traceback (most recent call last):
        ...
        FileNotFoundError: nowhere holds no run: there is no run.json

    """
    folder = _folder(Study.open(folder))
    path = folder / "model.json"
    if not path.exists():
        raise ValueError(f"{folder} has no model yet: run its command again to finish the search")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        encoder = Encoder.from_json(json.dumps(fields["encoder"]))
        files = {1.0: fields.get("plain"), fields["trial"]["k"]: fields["network"]}
    except (KeyError, TypeError, ValueError) as problem:
        raise ValueError(f"{path} is not the description of a model ({problem!r})") from problem
    kept = [at for at, file in files.items() if file]
    if k is not None:  # users see six digits of it
        k = next((at for at in kept if math.isclose(at, k, rel_tol=1e-5)), k)
    if k is not None and k not in kept:
        raise ValueError(
            f"{folder} has no network of k = {k:g}: give {' or '.join(f'{at:g}' for at in kept)}"
        )
    path = folder / (fields["network"] if k is None else files[k])
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is missing: run the search's command again, which retrains only this network"
        )
    return Network.load(path), encoder


def default_folder(protocol: Protocol, data: Dataset, encoder: Encoder) -> Path:
    """Return a search's folder, which depends only on its settings and its data.

    Example:
        >>> from pseudograd.data import open_data
        >>> from pseudograd.fleet import MLPRecipe
        >>> protocol = Protocol(MLPRecipe("digits", (400,)))
        >>> default_folder(protocol, *open_data("digits")).as_posix()
        'runs/digits-400-...'

    """
    recipe = protocol.recipe
    sizes = "x".join(map(str, getattr(recipe, "hidden_layer_sizes", ()))) or "linear"
    key = json.dumps(
        [recipe.fingerprint, protocol.settings(), data.sha256, data.train_size, encoder.to_json()]
    )
    return Path("runs") / f"{Path(data.name).stem}-{sizes}-{_digest(key)[:8]}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
