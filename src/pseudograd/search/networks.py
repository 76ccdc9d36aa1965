"""The trained networks of a study of any network: storage, ensembles and assessment."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pseudograd.fleet import Trial
from pseudograd.fleet.modules.code import describe_network
from pseudograd.fleet.modules.examples import Examples
from pseudograd.fleet.modules.loop import predict
from pseudograd.fleet.modules.training import Training, logits_of
from pseudograd.fleet.ramp import Ramp, as_k
from pseudograd.fleet.recipe import ModuleRecipe
from pseudograd.search.assessment import (
    EnsembleOf,
    assess_ensembles,
    assess_probabilities,
    quality,
    share_of,
)
from pseudograd.search.checkpoints import Checkpoints
from pseudograd.search.comparison import best_stopped
from pseudograd.search.documents import fields_of, write_json
from pseudograd.search.measures import are_unequal, compare_on_rows
from pseudograd.search.protocol import NetworkProtocol
from pseudograd.search.study import Study
from pseudograd.words import fraction, joined

ASSESSMENT = "assessment.json"
_MOST_NUMBERS = 1 << 28  # maximum number of test probabilities to hold in memory
_REPAIR = "run the study again, which rewrites it"


class ModuleEnsemble(nn.Module):
    """A module that averages the probabilities of several networks.

    Args:
        networks: The networks.

    Example:
        >>> ensemble = ModuleEnsemble([nn.Linear(2, 3), nn.Linear(2, 3)])
        >>> ensemble(torch.rand(5, 2)).exp().sum(1).round().tolist()
        [1.0, 1.0, 1.0, 1.0, 1.0]

    """

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the log of the mean probabilities, which can be used as logits."""
        logits = [logits_of(network(*inputs)) for network in self.networks]
        found = torch.stack([one.float().log_softmax(1) for one in logits])
        return found.logsumexp(0) - float(np.log(len(self.networks)))


def can_assess(examples: Examples, classes: Sequence[Any]) -> bool:
    """Return whether the probabilities of the test set fit into memory."""
    return examples.labels[-examples.test_size :].numel() * len(classes) <= _MOST_NUMBERS


def assess_networks(
    training: Training,
    examples: Examples,
    classes: Sequence[Any],
    groups: Mapping[str, Sequence[Trial]],
    kept: Mapping[str, Trial],
    checkpoints: Checkpoints,
    device: torch.device,
) -> dict[str, Any]:
    """Return the assessment of the kept network and the ensembles on the test set.

    It is empty if the probabilities do not fit into memory, or if a network diverged. Several
    labels of an example are not independent, so intervals and tests treat examples as units.

    Args:
        training: The network and how it is trained.
        examples: The data.
        classes: The names of the classes.
        groups: The networks of each ensemble: "chosen", "plain" (of k = 1) and "mixed".
        kept: The network that becomes the "model", and the one of k = 1, "plain", if it differs.
        checkpoints: Their weights.
        device: Where to predict.

    """
    if not can_assess(examples, classes):
        return {}
    rows = torch.arange(len(examples))[-examples.test_size :]
    labels = examples.labels[rows].flatten()
    several = len(labels) // len(rows)
    matters = labels != training.ignore_index
    known = labels[matters].numpy()
    units = np.arange(len(rows)).repeat(several)[matters.numpy()] if several > 1 else None
    single: dict[str, Tensor] = {}
    sums: dict[str, Tensor] = {}  # not the networks' own probabilities, which may be many
    for trial in dict.fromkeys((*kept.values(), *itertools.chain(*groups.values()))):
        module = trained(training, checkpoints, trial)
        found = predict(training, module.to(device), examples, rows, device)
        if not bool(found.isfinite().all()):
            return {}
        found = found.movedim(1, -1).flatten(0, -2)[matters]
        single |= {name: found for name, one in kept.items() if one == trial}
        for name, group in groups.items():
            if trial in group:
                sums[name] = sums[name] + found if name in sums else found
    own = single["model"].double().numpy()
    wrong = own.argmax(1) != known
    ensembles = {
        name: EnsembleOf(
            [one.k for one in groups[name]], (total / len(groups[name])).double().numpy()
        )
        for name, total in sums.items()
    }
    plain = single["plain"].double().numpy() if "plain" in single else None
    learned = examples.labels[: examples.train_size].flatten()
    counts = learned[learned != training.ignore_index].bincount(minlength=len(classes))
    common = int(counts.argmax())
    majority = {
        "name": "majority",
        "label": classes[common],
        "trained_on": None,
        "against": compare_on_rows(wrong, known != common, units),
        **share_of(known != common, units),
    }
    assessment = assess_probabilities(known, classes, {"model": own}, units)
    # Without classes that no example has, such as an output for padding.
    by_class = [
        one
        for one, trained_on in zip(assessment["by_class"], counts.tolist(), strict=True)
        if trained_on or one["count"]
    ]
    return assessment | {
        "by_class": by_class,
        "unequal": are_unequal(np.array([one["count"] for one in by_class])),
        "plain": None if plain is None else quality(plain, known, units),
        "unit": "example" if examples.labels.dim() == 1 else "label",
        "baselines": [majority],
        "combined": assess_ensembles(ensembles, known, wrong, units),
        "remarks": list(examples.notes),
    }


def write_found(study: Study, found: Mapping[str, Any]) -> None:
    """Write the result of `assess_networks` to the study's folder, if it has one."""
    if study.folder is not None:
        fields = {"trials": len(study.ledger), "run": study.fingerprint, "found": found}
        write_json(study.folder / ASSESSMENT, fields)


def read_found(study: Study) -> dict[str, Any] | None:
    """Return the saved result of `assess_networks`; None if it is missing or outdated.

    Raises:
        ValueError: If the file is damaged, or from another version.

    """
    if study.folder is None or not (study.folder / ASSESSMENT).exists():
        return None
    with fields_of(study.folder / ASSESSMENT, _REPAIR) as fields:
        found = dict(fields["found"])
        if found:  # what another version may lack
            _ = float(found["model"]["error"])
            _ = [found[name] for name in ("classes", "unit", "baselines", "combined")]
        current = fields["trials"] == len(study.ledger) and fields["run"] == study.fingerprint
    return found if current else None


def trained(training: Training, checkpoints: Checkpoints, trial: Trial) -> nn.Module:
    """Return the trained network of a trial."""
    module = training.module(trial.seed)
    module.load_state_dict(checkpoints.load(trial))
    return module.eval()


def final_groups(study: Study) -> dict[str, list[Trial]]:
    """Return the networks of each ensemble: "chosen", "plain" (of k = 1) and perhaps "mixed".

    All have the same size, except that diverged networks are left out.
    """
    assert isinstance(study.protocol, NetworkProtocol)
    comparison = study.result.comparison
    groups = {
        "chosen": [outcome.trial for outcome in comparison.chosen],
        "plain": [outcome.trial for outcome in comparison.plain],
        "mixed": study.protocol.mixed_trials(study.ledger),
    }
    return {
        name: [one for one in group if math.isfinite(study.ledger[one].cross_entropy)] or group
        for name, group in groups.items()
        if group
    }


def load_network(
    study: Study,
    network: Callable[[], nn.Module],
    k: float | str | Ramp | None = None,
    *,
    ensemble: bool = False,
) -> nn.Module:
    """Return the network of a finished study; the data is not needed.

    Args:
        study: The study, from `pseudograd.search.Study.open`.
        network: The function that creates the network.
        k: The baseline, usually 1, for the network that the choice was compared with; "mixed" for
            the ensemble of several k.
        ensemble: Whether to return the ensemble of all final networks.

    """
    recipe = study.protocol.recipe
    if not isinstance(recipe, ModuleRecipe) or study.folder is None:
        raise ValueError("study must be a study of your own network, kept in a folder")
    if not study.finished:
        raise ValueError(f"{study.folder} is not finished: run its command again")
    described = describe_network(network)
    if described != recipe.network:
        raise ValueError(
            f"{study.folder} has the network {recipe.network!r}, but the function now returns "
            f"{described!r}: restore its code"
        )
    groups = final_groups(study)
    names: dict[float | Ramp | str | None, str] = {
        study.protocol.baseline: "plain",
        groups["chosen"][0].k: "chosen",
        None: "chosen",
    }
    if ensemble and "mixed" in groups:
        names["mixed"] = "mixed"
    wanted = k if k == "mixed" else as_k(k)
    if wanted not in names:
        there = [one if isinstance(one, str) else fraction(one) for one in names if one is not None]
        named = k if isinstance(k, str) else fraction(k)
        raise ValueError(
            f"{study.folder} has no network of {study.protocol.parameter} = {named}: give "
            f"{joined(there, 'or')}"
        )
    training, checkpoints = Training(network), Checkpoints(study.folder / "networks")
    group = groups[names[wanted]]
    if not ensemble:
        best = best_stopped(map(study.ledger.__getitem__, group)).trial
        return trained(training, checkpoints, best)
    return ModuleEnsemble([trained(training, checkpoints, trial) for trial in group]).eval()
