"""``--network``: tuning of the user's own network, and its predictions."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import inspect
import json
import pkgutil
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pseudograd.cli.options import (
    deadline,
    number,
    tell_found,
    tell_if_trained_on,
    tell_resumed,
    told_if_stopped,
)
from pseudograd.cli.place import Place
from pseudograd.cli.results import MIXED
from pseudograd.words import raised

if TYPE_CHECKING:
    from pseudograd.data.arrays import Arrays, NewExamples
    from pseudograd.fleet.modules.examples import Examples
    from pseudograd.fleet.recipe import ModuleRecipe
    from pseudograd.search import Study as AnyStudy
    from pseudograd.study import Study

NETWORK = "network.json"  # the name of the network function, in a run's folder
# Options that need --network, and options that exclude it, with their defaults.
_OWN = (
    *("validation", "schedule", "precision", "weight_decay", "label_smoothing", "augment"),
    "image_size",
)
_OTHERS = {
    **dict.fromkeys(("target", "test_path", "drop", "categories", "numbers", "missing", "group")),
    **dict.fromkeys(("strict", "hidden", "stratify")),
    "activation": "relu",
    "protocol": "bagging",
    "metric": "error",
}


def add_own_network(parser: argparse.ArgumentParser) -> None:
    """Add ``--network`` and the options that need it."""
    own = parser.add_argument_group("your own network")
    own.add_argument(
        "--network",
        metavar="MODULE:FUNCTION",
        help="a function that returns a new torch.nn.Module, such as nets:net for net() in "
        "nets.py; DATA is then an .npz file of arrays of any shape, a folder with one folder of "
        "images per class, or a named data set of images",
    )
    own.add_argument(
        "--augment",
        metavar="MODULE:FUNCTION",
        help="a function of a batch of inputs, or of inputs and labels, applied during training",
    )
    own.add_argument(
        "--image-size",
        type=int,
        metavar="N",
        help="crop the images of a folder to a square and resize them to N×N pixels",
    )
    own.add_argument(
        "--validation",
        type=number,
        metavar="F",
        help="validate on this fraction of the training examples (five folds)",
    )
    # Repeated from `fleet`, which takes too long to import for every command.
    own.add_argument(
        "--schedule",
        choices=("constant", "cosine", "linear", "one-cycle"),
        help="the learning rate schedule (cosine)",
    )
    own.add_argument(
        "--precision",
        choices=("float32", "tf32", "bf16"),
        help="the precision of matrix products; bf16 uses autocast (float32)",
    )
    own.add_argument(
        "--weight-decay",
        type=number,
        metavar="W",
        help="weight decay (the default of the optimizer)",
    )
    own.add_argument(
        "--label-smoothing",
        type=number,
        metavar="S",
        help="fraction of the target spread over all classes (0)",
    )


def refuse_own(options: argparse.Namespace) -> None:
    """Raise ValueError for options that need ``--network`` if it is missing."""
    for name in _OWN:
        if getattr(options, name, None) is not None:
            raise ValueError(f"{name} needs --network: add that, or leave this out")


# --- the search ----------------------------------------------------------------------------------


def tune_network(options: argparse.Namespace) -> None:
    """Run ``pseudograd tune DATA --network ...``."""
    for name, default in _OTHERS.items():
        if getattr(options, name) != default:
            raise ValueError(f"{name} must be left out with --network: it is for tables")
    place = Place(options)
    settings = _settings(options)
    arrays = _opened(options)
    study = _study(options, arrays, settings)
    tell_resumed(study)
    _tell(arrays, study)
    lower = f"--batch-size (now {study.training.batch_size})"
    with told_if_stopped(study, lower), place, _runner(place, study) as runner:
        finished = study.run(
            runner,
            device="cpu" if runner else place.devices,
            stop=deadline(options),
            command=shlex.join(["pseudograd", *options.arguments]),
            devices=place.devices,
        )
    tell_found(study, "networks" if finished else None)


@contextlib.contextmanager
def _runner(place: Place, study: Study) -> Iterator[Any]:
    """Yield a runner on a cluster, or None to train on this machine."""
    if place.address is None:
        yield None
        return
    from pseudograd.search.cluster import ModuleRunner

    with ModuleRunner(study.training, study.examples) as runner:
        yield runner


def _opened(options: argparse.Namespace) -> Arrays:
    from pseudograd.data import open_arrays

    return open_arrays(
        options.data,
        test_fraction=options.test_fraction,
        image_size=options.image_size,
        data_dir=options.data_dir,
    )


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of the study, except the data."""
    given = {
        "k": options.k,
        "learning_rates": options.learning_rates,
        "epochs": options.epochs,
        "batch_size": options.batch_size,
        "schedule": options.schedule,
        "clip": options.clip,
        "patience": options.patience,
        "validation": options.validation,
        "repetitions": options.repetitions,
        "retrainings": options.retrainings,
        "precision": options.precision,
        "label_smoothing": options.label_smoothing,
        "seed": options.seed,
        "augment": options.augment and imported(options.augment, "--augment"),
        **_optimizer(options),
    }
    return {name: value for name, value in given.items() if value is not None}


def _optimizer(options: argparse.Namespace) -> dict[str, Any]:
    """Return the optimizer and its settings."""
    import torch

    from pseudograd.words import nearest

    named = options.optimizer or "AdamW"
    kinds = [one for one in vars(torch.optim).values() if inspect.isclass(one)]
    there = {one.__name__.lower(): one for one in kinds if one is not torch.optim.Optimizer}
    kind = there.get(named.lower())
    if kind is None:
        known = nearest(named, [one.__name__ for one in there.values()])
        raise ValueError(f"--optimizer {named} is not in torch.optim: give {known}")
    settings = {"weight_decay": options.weight_decay, "momentum": options.momentum}
    for name, value in settings.items():
        if value is not None and name not in inspect.signature(kind).parameters:
            raise ValueError(f"{name} cannot be set for --optimizer {kind.__name__}: leave it out")
    return {"optimizer": kind, **settings}


def _study(options: argparse.Namespace, arrays: Arrays, settings: dict[str, Any]) -> Study:
    from pseudograd.search.documents import write_json
    from pseudograd.study import Study

    called = options.network
    network = _network(called)
    name = Path(options.data).resolve().name
    folder = options.out or Path("runs") / _folder_name(name, called, network, arrays, settings)
    study = Study(
        network,
        arrays.train,
        arrays.test,
        folder=folder,
        name=name,
        classes=arrays.classes,
        **settings,
    )
    write_json(folder / NETWORK, {"network": called, "image_size": options.image_size})
    return study


def _network(called: str) -> Callable[..., Any]:
    """Return the function of ``--network``, which must return a new module without arguments."""
    from torch import nn

    network = imported(called)
    if isinstance(network, nn.Module):
        raise ValueError(f"--network {called} is a module: name a function that returns a new one")
    try:
        network()
    except Exception as problem:
        raise ValueError(
            f"--network {called} fails when it is called ({raised(problem)})"
        ) from None
    return network


def _folder_name(
    name: str,
    called: str,
    network: Callable[..., Any],
    arrays: Arrays,
    settings: dict[str, Any],
) -> str:
    """Return the run's folder name, with a hash of the data and all settings but k and rates."""
    from pseudograd.fleet.modules.code import describe, describe_network

    plain = {
        key: describe(value) if callable(value) else str(value)
        for key, value in settings.items()
        if key not in ("k", "learning_rates")
    }
    digest = hashlib.sha256(json.dumps([describe_network(network), plain]).encode())
    for part in (arrays.train, arrays.test):
        for array in part:
            digest.update(array.tobytes())
    return f"{Path(name).stem}-{called.rpartition(':')[2]}-{digest.hexdigest()[:8]}"


def _tell(arrays: Arrays, study: Study) -> None:
    from pseudograd.words import shortened

    (x, _), (x_test, _) = arrays.train, arrays.test
    names = [str(name) for name in study.classes]
    print(
        f"{len(x):,} training and {len(x_test):,} test examples of shape {x.shape[1:]}; "
        f"{len(names)} classes: {shortened(names, 'to')}",
        file=sys.stderr,
    )


def imported(called: str, option: str = "--network") -> Callable[..., Any]:
    """Import the function ``module:function`` from the current folder or an installed package.

    Example:
        >>> imported("torch.nn:Identity")
        <class 'torch.nn.modules.linear.Identity'>

    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        found: Any = pkgutil.resolve_name(called)
    except (Exception, SystemExit) as problem:
        raise ValueError(
            f"{option} {called} cannot be imported ({raised(problem)}): name module:function, such "
            "as nets:net for net() in nets.py, and run the command in the folder of nets.py"
        ) from problem
    if not callable(found):
        raise ValueError(
            f"{option} {called} must be a function, such as nets:net for net() in nets.py, not a "
            f"{type(found).__name__}"
        )
    result: Callable[..., Any] = found
    return result


# --- predictions ---------------------------------------------------------------------------------


def predict_network(options: argparse.Namespace, run: AnyStudy, recipe: ModuleRecipe) -> Any:
    """Return the predictions of a run's network as a table."""
    import pandas as pd
    import torch

    from pseudograd.data.arrays import open_new
    from pseudograd.fleet.modules.loop import predict
    from pseudograd.fleet.modules.training import Training
    from pseudograd.search.networks import load_network

    if options.keep:
        raise ValueError("--keep must be left out: arrays and images have no columns to keep")
    if options.k == MIXED and not options.ensemble:
        raise ValueError("--k mixed must be given with --ensemble: it is an ensemble")
    network, image_size = _made_by(options)
    module = load_network(run, network, options.k, ensemble=options.ensemble)
    classes, shapes = list(run.data["labels"]), run.data["shapes"]
    if len(shapes) != 1:
        raise ValueError(
            f"{options.run_folder} has a network with {len(shapes)} inputs, which this command "
            "does not support: call study.model() in Python"
        )
    new = open_new(options.file, shapes[0], classes, image_size)
    examples, rows = _unlabelled(new, options.file), torch.arange(len(new.inputs))
    training = Training(network, batch_size=recipe.batch_size, precision=recipe.precision)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    probabilities = predict(training, module.to(device), examples, rows, device)
    if probabilities.dim() != 2:
        raise ValueError(
            f"{options.run_folder} has a network with several labels per example, which do not fit "
            "into a table: call study.model() in Python"
        )
    best = probabilities.argmax(1).tolist()
    table = pd.DataFrame(probabilities.numpy(), columns=[f"p({name})" for name in classes])
    table.insert(0, "label", [classes[at] for at in best])
    table.insert(0, *(("row", rows.tolist()) if new.names is None else ("file", new.names)))
    if _tell_error(new, classes, best):
        tell_if_trained_on(run, options.file, len(best))
    return table


def _unlabelled(new: NewExamples, file: str) -> Examples:
    """Return new examples as a fleet takes them; their labels are not used."""
    import torch

    from pseudograd.fleet.modules.examples import Examples

    inputs = torch.from_numpy(new.inputs)
    if inputs.is_floating_point():
        inputs = inputs.float()
        if not bool(inputs.isfinite().all()):
            raise ValueError(f"{file} must have finite numbers, but has NaN or infinity")
    labels = torch.zeros(len(inputs), dtype=torch.int64)
    return Examples("new", (inputs,), labels, len(inputs))


def _made_by(options: argparse.Namespace) -> tuple[Callable[..., Any], int | None]:
    """Return the network function and the image size that the run recorded."""
    from pseudograd.search.documents import fields_of

    path = options.run_folder / NETWORK
    image_size, called = None, options.network
    if path.exists():
        with fields_of(path, "name the network with --network") as known:
            called = called or str(known["network"])
            image_size = known["image_size"] and int(known["image_size"])
    if called is None:
        raise ValueError(
            f"{options.run_folder} does not record its network function: name it with "
            "--network module:function"
        )
    return imported(called), image_size


def _tell_error(new: NewExamples, classes: list[Any], predicted: list[int]) -> bool:
    """Print the error if labels are known; return whether they are."""
    if new.labels is None or new.labels.ndim > 1:
        return False
    from pseudograd.words import percent

    codes = {str(name): at for at, name in enumerate(classes)}
    known = [codes.get(str(label), -1) for label in new.labels.tolist()]
    wrong = sum(one != other for one, other in zip(known, predicted, strict=True))
    count = len(known)
    print(f"error {percent(wrong / count)}% ({wrong:,} of {count:,} examples)", file=sys.stderr)
    return True
