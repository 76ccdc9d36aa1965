"""`tune`: run a study of a user's data to its end, and save the chosen model.

In addition to the study's own files, the folder then contains the model (``model.json`` and the
weights), ``examples.json`` (difficulty of the examples), ``assessment.json`` (quality of the model)
and, for an ensemble, ``suspects.csv``.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pseudograd.data import Dataset, Encoder
from pseudograd.files import writing
from pseudograd.fleet import Ensemble, Network, Outcome, Stop, Trial, never
from pseudograd.fleet.mlp.network import by_name, tempered
from pseudograd.fleet.ramp import plain_k
from pseudograd.search.assessment import EnsembleOf, assess
from pseudograd.search.bagging import Bagging
from pseudograd.search.baselines import Predict
from pseudograd.search.checkpoints import Checkpoints
from pseudograd.search.comparison import Result, best_stopped
from pseudograd.search.ensemble import Candidates, calibrated, candidates, mixture, select
from pseudograd.search.examples import difficulty, suspects, write_suspects
from pseudograd.search.ledger import trial_to_json
from pseudograd.search.measures import Floats
from pseudograd.search.models import (
    ENSEMBLES,
    MODEL,
    PLAIN,
    folder_of,
    forget_model,
    forget_other_model,
    is_saved,
    read_document,
    save_model,
)
from pseudograd.search.networks import ASSESSMENT, read_found
from pseudograd.search.protocol import RANGE, Cell, NetworkProtocol, Protocol
from pseudograd.search.study import Progress, Runner, Study

EXAMPLES, SUSPECTS = "examples.json", "suspects.csv"
_ASSESSING = "assessing the model and training baselines"


@dataclass(frozen=True)
class Combined:
    """The result of a finished bagging study.

    Attributes:
        best_of_each_k: The best rate of each k.
        chosen: The best single pair of k and rate.
        assessment: The assessment of the ensemble from `pseudograd.search.assess`.

    """

    best_of_each_k: tuple[Cell, ...]
    chosen: Cell
    assessment: Mapping[str, Any]


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
        "columns": encoder.read_as,
        "notes": encoder.notes,
        # The hash of the features does not cover column names and units.
        "encoder": _digest(encoder.to_json()),
    }
    return Study(folder or default_folder(protocol, data, encoder), protocol, facts)


def tune(
    study: Study,
    data: Dataset,
    encoder: Encoder,
    runner: Runner,
    *,
    metric: str = "error",
    stop: Stop = never,
    command: str = "",
    devices: Sequence[str] = ("cpu",),
    watch: Callable[[Progress], None] = lambda _: None,
    tell: Callable[[str], None] = lambda _: None,
) -> Result | Combined | None:
    """Run or resume a study to its end, and save the chosen model.

    Args:
        study: The study, in a folder.
        data: Its data set.
        encoder: The encoder of the data set, saved with the model.
        runner: Trains trials; outcomes of bagging and of final networks must carry their
            parameters.
        metric: The criterion for choosing the ensemble: "error", "balanced" or "log-loss".
        stop: Called between epochs; once it returns True, the study stops.
        command: The command line to record.
        devices: The devices to record.
        watch: Called after each trial.
        tell: Called with a line to show when the trials are done and the model is assessed.

    Returns:
        The result; None if the study was stopped before the end.

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
        >>> sorted(path.name for path in study.folder.glob("[a-z]*"))
        ['assessment.json', 'examples.json', 'ledger.jsonl', 'model.json', 'model.safetensors', ...]

    """
    bagging = isinstance(study.protocol, Bagging)
    if not study.protocol.retrainings and not bagging:
        raise ValueError("retrainings must be 1 or more, or there is no model to save")
    if 1.0 not in study.protocol.ks:
        raise ValueError("ks must contain 1: the chosen k is compared with it")
    checkpoints = Checkpoints(folder_of(study) / "networks")

    def of_the_model(outcome: Outcome) -> Mapping[str, Tensor] | None:
        trial = outcome.trial
        is_kept = trial.split.may_be_kept and trial.recipe == study.protocol.recipe
        return by_name(outcome.parameters) if is_kept and outcome.parameters else None

    training = checkpoints.keeping(runner, of_the_model)
    with study.session(command, devices):
        forget_other_model(study)
        if not study.run(training, stop=stop, watch=watch):
            return None
        job = _Job(study, data, encoder, training, checkpoints, tell)
        return _combine(job, metric) if bagging else _compare(job)


def read_examples(study: Study) -> dict[str, Any] | None:
    """Return the `difficulty` of the examples for the saved model; None without a model."""
    return read_document(study, EXAMPLES)


def read_assessment(study: Study) -> dict[str, Any] | None:
    """Return the assessment of the saved model; None without a model."""
    if isinstance(study.protocol, NetworkProtocol):
        return read_found(study)
    return read_document(study, ASSESSMENT)


@dataclass(frozen=True)
class _Job:
    """A finished study whose model is to be saved; see `tune` for the fields."""

    study: Study
    data: Dataset
    encoder: Encoder
    training: Runner
    checkpoints: Checkpoints
    tell: Callable[[str], None]

    def networks_of(self, trials: Iterable[Trial]) -> dict[Trial, Network]:
        """Return the networks of trials; train those again that are missing or damaged."""
        trials = list(trials)
        self.checkpoints.complete(trials, self.training)
        load = self.checkpoints.load
        return {trial: Network.of_tensors(trial, load(trial), self.data) for trial in trials}

    def test_probabilities(self, model: Ensemble) -> Floats:
        """Return the probabilities of a model on the test set."""
        return model.probabilities(self.data.features[self.data.train_size :]).numpy()


def _check_finite(
    networks: Iterable[Network], what: str = "all networks diverged, so there is no model to save"
) -> None:
    if not all(network.is_finite for network in networks):
        raise ValueError(f"{what}: lower the learning rates")


def _predict(model: Ensemble) -> Predict:
    return lambda rows: model.probabilities(torch.from_numpy(rows)).numpy()


# --- the paper's protocol: one network ------------------------------------------------------------


def _compare(job: _Job) -> Result:
    """Save the best networks of the chosen k and of k = 1, and the examples they find difficult."""
    study, data, encoder = job.study, job.data, job.encoder
    found = study.result
    chosen, plain = found.comparison.kept.trial, best_stopped(found.comparison.plain).trial
    made_from = {
        **trial_to_json(chosen),
        "plain": trial_to_json(plain),
        "networks": len(found.comparison.chosen),
    }
    if is_saved(study, made_from):
        return found
    job.tell(_ASSESSING)
    finals = (*found.comparison.chosen, *found.comparison.plain)
    networks = job.networks_of(outcome.trial for outcome in finals)
    _check_finite([networks[chosen]])
    models = _models(found, networks, chosen, plain)
    examples = difficulty(
        {
            "chosen": (found.chosen.k, networks[chosen]),
            "plain": (found.plain.k, networks[plain]),
        },
        data,
        encoder,
    )
    assessment = _assessed_network(job, models, found)
    documents = {EXAMPLES: examples, ASSESSMENT: assessment}
    error = assessment["model"]["error"]
    save_model(study, models, documents, encoder, found.chosen.k, made_from, test_error=error)
    return found


def _models(
    found: Result, networks: Mapping[Trial, Network], chosen: Trial, plain: Trial
) -> dict[str, Ensemble]:
    """Return the models to save: single networks and ensembles of the chosen k and of k = 1."""
    models = {}
    for name, best, finals in (
        (MODEL, chosen, found.comparison.chosen),
        (PLAIN, plain, found.comparison.plain),
    ):
        if name == PLAIN and (found.chosen.k == 1 or not networks[plain].is_finite):
            continue
        models[name] = Ensemble((networks[best],), (1.0,))
        if len(finals) > 1:
            sound = [networks[one.trial] for one in finals if networks[one.trial].is_finite]
            models[ENSEMBLES[name]] = Ensemble(tuple(sound), (1 / len(sound),) * len(sound))
    return models


def _assessed_network(job: _Job, models: Mapping[str, Ensemble], result: Result) -> dict[str, Any]:
    """Return the assessment of the selected network and of ensembles; all networks judge k."""
    names = {"model": MODEL, "plain": PLAIN}
    # If k = 1 was chosen, its ensemble is that of the model.
    files = {"plain": MODEL} if result.chosen.k == 1 else {"chosen": MODEL, "plain": PLAIN}
    ks = {"chosen": result.chosen.k, "plain": 1.0}
    ensembles = {
        name: EnsembleOf([ks[name]] * len(one.networks), job.test_probabilities(one))
        for name, file in files.items()
        if (one := models.get(ENSEMBLES[file])) is not None
    }
    # Networks that diverged are left out; then the sizes may differ.
    are_alike = len({len(one.ks) for one in ensembles.values()}) == 1
    found = assess(
        data=job.data,
        encoder=job.encoder,
        test={
            name: job.test_probabilities(models[file])
            for name, file in names.items()
            if file in models
        },
        predict=_predict(models[MODEL]),
        ensembles=ensembles if are_alike and len(ensembles) == len(files) else None,
    )
    return {**found, "comparison": None}


# --- bagging: an ensemble -------------------------------------------------------------------------


class _Choice(NamedTuple):
    """The weights of the candidates in an ensemble, and the calibrated ensemble."""

    weights: Tensor
    model: Ensemble


def _combine(job: _Job, metric: str) -> Combined:
    """Choose the ensemble, save it, and assess it on the test set."""
    study, data, encoder, protocol = job.study, job.data, job.encoder, job.study.protocol
    assert isinstance(protocol, Bagging)
    chosen, plain_cell = protocol.chosen(study.ledger)
    made_from = {
        "trials": len(study.ledger),
        "metric": metric,
        "pairs": [[plain_k(cell.k), cell.learning_rate] for cell in (chosen, plain_cell)],
    }
    best = tuple(protocol.best_of_each_k(study.ledger))
    if is_saved(study, made_from) and (folder_of(study) / SUSPECTS).exists():
        return Combined(best, chosen, read_assessment(study) or {})
    job.tell(_ASSESSING)
    cells = protocol.cells(study.ledger)
    trained = job.networks_of(trial for cell in cells for trial in protocol.trials_of(cell))
    found = candidates(protocol, study.ledger, data, trained.__getitem__)
    model = _choice(found, data, metric, slice(None))
    plain = _choice(found, data, metric, torch.tensor([cell.k == 1 for cell in found.cells]))
    _check_finite(model.model.networks)
    _check_finite(
        plain.model.networks, "all networks of k = 1, which the model is compared with, diverged"
    )
    forget_model(study)  # suspects.csv is about to be replaced
    assessment = _assessed(job, found, model, plain, metric)
    networks = {
        name: (cell.k, found.networks[found.cells.index(cell)][0])
        for name, cell in (("chosen", chosen), ("plain", plain_cell))
    }
    models = {MODEL: model.model}
    if not torch.equal(model.weights, plain.weights):
        models[PLAIN] = plain.model
    ks = {cell.k for cell, _ in mixture(found.cells, model.weights)}
    save_model(
        study,
        models,
        {ASSESSMENT: assessment, EXAMPLES: difficulty(networks, data, encoder)},
        encoder,
        ks.pop() if len(ks) == 1 else None,
        made_from,
        test_error=assessment["model"]["error"],
        members=assessment["members"],
    )
    return Combined(best, chosen, assessment)


def _choice(found: Candidates, data: Dataset, metric: str, allowed: slice | Tensor) -> _Choice:
    """Return the best ensemble of the allowed candidates."""
    labels = data.labels[found.rows]
    counts = None if data.weights is None else data.weights[found.rows]
    weights = torch.zeros(len(found.cells))
    weights[allowed] = select(found.out_of_fold[allowed], labels, metric, counts)
    return _Choice(weights, calibrated(found, weights, labels, counts))


def _assessed(
    job: _Job, found: Candidates, model: _Choice, plain: _Choice, metric: str
) -> dict[str, Any]:
    """Return the assessment of the model, and write the labels that look wrong."""
    data, ensemble = job.data, model.model
    labels = data.labels[: data.train_size]
    own, of_1 = (found.whole(one.weights, labels).numpy() for one in (model, plain))
    ranked = suspects(labels.numpy(), own, of_1, found.all_votes(labels).numpy())
    path = folder_of(job.study) / SUSPECTS
    with writing(path):
        write_suspects(path, ranked, data, job.encoder)
    pairs = mixture(found.cells, model.weights)
    counts = Counter(cell.k for cell, _ in pairs)
    members = {
        "networks": len(ensemble.networks),
        "ks": [[plain_k(k), len(found.networks[0]) * count] for k, count in counts.items()],
        "pairs": [
            [plain_k(cell.k), cell.learning_rate, round(weight, 4)] for cell, weight in pairs
        ],
        "temperature": ensemble.temperature,
        "plain_networks": len(plain.model.networks),
        "metric": metric,
    }
    uncalibrated = job.test_probabilities(replace(ensemble, temperature=1.0))
    return assess(
        data=data,
        encoder=job.encoder,
        test={
            "model": tempered(torch.from_numpy(uncalibrated), ensemble.temperature).numpy(),
            "uncalibrated": uncalibrated,
            "plain": job.test_probabilities(plain.model),
        },
        suspects=ranked,
        predict=_predict(ensemble),
        members=members,
    )


def default_folder(protocol: Protocol, data: Dataset, encoder: Encoder) -> Path:
    """Return the default folder of a search, from its data and all settings but k and the rates.

    Example:
        >>> from pseudograd.data import open_data
        >>> from pseudograd.fleet import MLPRecipe
        >>> protocol = Protocol(MLPRecipe("digits", (400,)))
        >>> default_folder(protocol, *open_data("digits")).as_posix()
        'runs/digits-400-...'

    """
    recipe = protocol.recipe
    sizes = "x".join(map(str, getattr(recipe, "hidden_layer_sizes", ()))) or "linear"
    settings = {name: one for name, one in protocol.settings().items() if name not in RANGE}
    key = json.dumps(
        [recipe.fingerprint, settings, data.sha256, data.train_size, encoder.to_json()]
    )
    return Path("runs") / f"{Path(data.name).stem}-{sizes}-{_digest(key)[:8]}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
