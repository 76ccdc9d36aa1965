"""`tune`: run a study of a user's data to its end, and save the chosen model.

In addition to the study's own files, the folder then contains the model (``model.json`` and the
weights), ``examples.json`` (difficulty of the examples), ``assessment.json`` (quality of the model)
and, for an ensemble, ``suspects.csv``.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pseudograd.data import Dataset, Encoder
from pseudograd.files import writing
from pseudograd.fleet import Ensemble, Network, Outcome, Stop, Trial, never
from pseudograd.fleet.mlp.network import tempered
from pseudograd.fleet.ramp import plain_k
from pseudograd.search.assessment import EnsembleOf, assess
from pseudograd.search.bagging import Bagging
from pseudograd.search.comparison import best_stopped, by_class
from pseudograd.search.difficulty import difficulty
from pseudograd.search.ensemble import Candidates, calibrated, candidates, mixture, select
from pseudograd.search.found import ASSESSMENT, read_found
from pseudograd.search.ledger import trial_to_json
from pseudograd.search.models import (
    ENSEMBLES,
    MODEL,
    PLAIN,
    Store,
    folder_of,
    forget_model,
    forget_other_model,
    is_saved,
    read_document,
    save_model,
)
from pseudograd.search.protocol import RANGE, Cell, NetworkProtocol, Protocol
from pseudograd.search.result import Result
from pseudograd.search.study import Progress, Runner, Study
from pseudograd.search.suspects import suspects, write_suspects

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
    store = Store(folder_of(study) / "networks")

    def training(trials: deque[Trial], stop: Stop) -> Iterator[Outcome]:
        for outcome in runner(trials, stop):
            # Saved before the ledger has the outcome, so that a kill in between loses nothing else.
            of_the_model = outcome.trial.recipe == study.protocol.recipe
            if of_the_model if bagging else outcome.trial.split.retrain:
                store.put(outcome, data)
            yield outcome

    with study.session(command, devices):
        forget_other_model(study)
        if not study.run(training, stop=stop, watch=watch):
            return None
        if bagging:
            return _combine(study, data, encoder, runner, store, metric, tell)
        return _compare(study, data, encoder, runner, store, tell)


def read_examples(study: Study) -> dict[str, Any] | None:
    """Return `difficulty` and the errors by class of the saved model; None without a model."""
    return read_document(study, EXAMPLES)


def read_assessment(study: Study) -> dict[str, Any] | None:
    """Return the assessment of the saved model; None without a model."""
    if isinstance(study.protocol, NetworkProtocol):
        return read_found(study)
    return read_document(study, ASSESSMENT)


# --- the paper's protocol: one network ------------------------------------------------------------


def _compare(
    study: Study,
    data: Dataset,
    encoder: Encoder,
    runner: Runner,
    store: Store,
    tell: Callable[[str], None],
) -> Result:
    """Save the best networks of the chosen k and of k = 1, and the examples they find difficult."""
    found = study.result
    comparison = found.comparison
    labels = data.labels[data.train_size :].tolist()
    comparison = replace(comparison, by_class=by_class(comparison.kept, labels, encoder.labels))
    found = replace(found, comparison=comparison)
    best = {MODEL: comparison.kept.trial, PLAIN: best_stopped(comparison.plain).trial}
    finals = {
        MODEL: [outcome.trial for outcome in comparison.chosen],
        PLAIN: [outcome.trial for outcome in comparison.plain],
    }
    made_from = {
        **trial_to_json(best[MODEL]),
        "plain": trial_to_json(best[PLAIN]),
        "networks": len(finals[MODEL]),
    }
    if is_saved(study, made_from):
        return found
    tell(_ASSESSING)
    _train_lost(dict.fromkeys((*finals[MODEL], *finals[PLAIN])), data, runner, store)
    network_of = _network_in(store)
    chosen, plain = (network_of(trial) for trial in best.values())
    _check_finite([chosen])
    networks = {"chosen": (found.chosen.k, chosen), "plain": (found.plain.k, plain)}
    examples = difficulty(networks, data, encoder)
    examples["by_class"] = [asdict(one) for one in comparison.by_class]
    models = {}
    for name, network in {MODEL: chosen, PLAIN: plain}.items():
        if name == PLAIN and (found.chosen.k == 1 or not plain.is_finite):
            continue
        models[name] = Ensemble((network,), (1.0,))
        if len(finals[name]) > 1:
            sound = [one for one in map(network_of, finals[name]) if one.is_finite]
            models[ENSEMBLES[name]] = Ensemble(tuple(sound), (1 / len(sound),) * len(sound))
    assessment = _assessed_network(data, encoder, models, found)
    documents = {EXAMPLES: examples, ASSESSMENT: assessment}
    error = assessment["model"]["error"]
    save_model(study, models, documents, encoder, found.chosen.k, made_from, test_error=error)
    return found


def _assessed_network(
    data: Dataset, encoder: Encoder, models: Mapping[str, Ensemble], result: Result
) -> dict[str, Any]:
    """Return the assessment of the selected network and of ensembles; all networks judge k."""
    test = data.features[data.train_size :]
    names = {"model": MODEL, "plain": PLAIN}
    files = {"plain": MODEL} if result.chosen.k == 1 else {"chosen": MODEL, "plain": PLAIN}
    several = {name: models.get(ENSEMBLES[file]) for name, file in files.items()}
    ks = {"chosen": result.chosen.k, "plain": 1.0}
    ensembles = {
        name: EnsembleOf([ks[name]] * len(one.networks), one.probabilities(test).numpy())
        for name, one in several.items()
        if one is not None
    }
    # Networks that diverged are left out; then the sizes may differ.
    are_alike = len({len(one.ks) for one in ensembles.values()}) == 1
    found = assess(
        data=data,
        encoder=encoder,
        test={
            name: models[file].probabilities(test).numpy()
            for name, file in names.items()
            if file in models
        },
        predict=lambda rows: models[MODEL].probabilities(torch.from_numpy(rows)).numpy(),
        ensembles=ensembles if are_alike and len(ensembles) == len(files) else None,
    )
    return {**found, "comparison": None}


def _train_lost(trials: Iterable[Trial], data: Dataset, runner: Runner, store: Store) -> None:
    """Retrain networks that are missing or damaged in the store."""
    if lost := store.missing(trials):
        for outcome in runner(deque(lost), never):
            store.put(outcome, data)


def _check_finite(
    networks: Iterable[Network], what: str = "all networks diverged, so there is no model to save"
) -> None:
    if not all(network.is_finite for network in networks):
        raise ValueError(f"{what}: lower the learning rates")


# --- bagging: an ensemble -------------------------------------------------------------------------


def _combine(
    study: Study,
    data: Dataset,
    encoder: Encoder,
    runner: Runner,
    store: Store,
    metric: str,
    tell: Callable[[str], None],
) -> Combined:
    """Choose the ensemble, save it, and assess it on the test set."""
    folder, protocol = folder_of(study), study.protocol
    assert isinstance(protocol, Bagging)
    chosen, plain_cell = protocol.chosen(study.ledger)
    made_from = {
        "trials": len(study.ledger),
        "metric": metric,
        "pairs": [[plain_k(cell.k), cell.learning_rate] for cell in (chosen, plain_cell)],
    }
    best = tuple(protocol.best_of_each_k(study.ledger))
    if is_saved(study, made_from) and (folder / SUSPECTS).exists():
        return Combined(best, chosen, read_assessment(study) or {})
    tell(_ASSESSING)
    trials = [trial for c in protocol.cells(study.ledger) for trial in protocol.trials_of(c)]
    _train_lost(trials, data, runner, store)
    found = candidates(protocol, study.ledger, data, _network_in(store))
    labels = data.labels[found.rows]
    counts = None if data.weights is None else data.weights[found.rows]
    weights = select(found.out_of_fold, labels, metric, counts)
    at_1 = torch.tensor([cell.k == 1 for cell in found.cells])
    plain_weights = torch.zeros_like(weights)
    plain_weights[at_1] = select(found.out_of_fold[at_1], labels, metric, counts)
    model, plain = (
        calibrated(found, shares, labels, counts) for shares in (weights, plain_weights)
    )
    _check_finite(model.networks)
    _check_finite(
        plain.networks, "all networks of k = 1, which the model is compared with, diverged"
    )
    forget_model(study)  # suspects.csv is about to be replaced
    both = (model, weights), (plain, plain_weights)
    assessment = _assessed(data, encoder, found, *both, metric, folder)
    networks = {
        name: (cell.k, found.networks[found.cells.index(cell)][0])
        for name, cell in (("chosen", chosen), ("plain", plain_cell))
    }
    models = {MODEL: model}
    if not torch.equal(weights, plain_weights):
        models[PLAIN] = plain
    ks = {cell.k for cell, _ in mixture(found.cells, weights)}
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


def _network_in(store: Store) -> Callable[[Trial], Network]:
    def network_of(trial: Trial) -> Network:
        network = store.get(trial)
        if network is None:
            raise OSError(f"{store.folder} lacks a network that was just saved: check the disk")
        return network

    return network_of


def _assessed(
    data: Dataset,
    encoder: Encoder,
    found: Candidates,
    model: tuple[Ensemble, torch.Tensor],
    plain: tuple[Ensemble, torch.Tensor],
    metric: str,
    folder: Path,
) -> dict[str, Any]:
    """Return the assessment of the model, and write the labels that look wrong."""
    test = data.features[data.train_size :]
    labels = data.labels[: data.train_size]
    own, of_1 = (found.whole(weights, labels).numpy() for _, weights in (model, plain))
    ranked = suspects(labels.numpy(), own, of_1, found.all_votes(labels).numpy())
    with writing(folder / SUSPECTS):
        write_suspects(folder / SUSPECTS, ranked, data, encoder)
    pairs = mixture(found.cells, model[1])
    counts = Counter(cell.k for cell, _ in pairs)
    members = {
        "networks": len(model[0].networks),
        "ks": [[plain_k(k), len(found.networks[0]) * count] for k, count in counts.items()],
        "pairs": [
            [plain_k(cell.k), cell.learning_rate, round(weight, 4)] for cell, weight in pairs
        ],
        "temperature": model[0].temperature,
        "plain_networks": len(plain[0].networks),
        "metric": metric,
    }
    uncalibrated = replace(model[0], temperature=1.0).probabilities(test)
    return assess(
        data=data,
        encoder=encoder,
        test={
            "model": tempered(uncalibrated, model[0].temperature).numpy(),
            "uncalibrated": uncalibrated.numpy(),
            "plain": plain[0].probabilities(test).numpy(),
        },
        suspects=ranked,
        predict=lambda rows: model[0].probabilities(torch.from_numpy(rows)).numpy(),
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
