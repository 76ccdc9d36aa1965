"""``--network``: tuning of the user's own network, and its predictions."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import inspect
import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pseudograd.cli.options import as_typed, deadline, numbers, share, typed, whole
from pseudograd.cli.place import Place
from pseudograd.cli.results import MIXED
from pseudograd.cli.telling import tell_found, tell_if_trained_on, tell_resumed, told_if_stopped
from pseudograd.words import raised

if TYPE_CHECKING:
    from pseudograd.data.arrays import Arrays, NewExamples
    from pseudograd.fleet.modules.examples import Examples
    from pseudograd.fleet.recipe import ModuleRecipe
    from pseudograd.search import Study as AnyStudy
    from pseudograd.study import Study

NETWORK = "network.json"  # the name of the network function, in a run's folder
_SHAPE = {"network": str, "image_size": (int, None)}
# Options that need --network, and options that exclude it, with their defaults.
_OWN = (
    *("validation", "schedule", "precision", "weight_decay", "label_smoothing", "augment"),
    "image_size",
)
_OTHERS = {
    **dict.fromkeys(("target", "test", "drop", "categories", "numbers", "missing", "group")),
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
        help="a function of a batch of inputs, applied during training",
    )
    own.add_argument(
        "--image-size",
        type=whole(1, 10**5),
        metavar="N",
        help="crop the images of a folder to a square and resize them to N×N pixels",
    )
    own.add_argument(
        "--validation",
        type=share,
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
        type=numbers(lambda value: 0 <= value < math.inf, "of at least 0, like 0.05"),
        metavar="W",
        help="weight decay (the default of the optimizer)",
    )
    own.add_argument(
        "--label-smoothing",
        type=numbers(lambda value: 0 <= value <= 1, "from 0 to 1, like 0.1"),
        metavar="S",
        help="fraction of the target spread over all classes (0)",
    )


def refuse_own(options: argparse.Namespace) -> None:
    """Raise ValueError for options that need ``--network`` if it is missing."""
    for name in _OWN:
        if getattr(options, name, None) is not None:
            raise ValueError(f"{typed(name)} needs --network: add that, or leave out {typed(name)}")


# --- the search ----------------------------------------------------------------------------------


def tune_network(options: argparse.Namespace) -> None:
    """Run ``pseudograd tune DATA --network ...``."""
    for name, default in _OTHERS.items():
        if getattr(options, name) != default:
            raise ValueError(f"{typed(name)} must be left out with --network: it is for tables")
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

    with as_typed():
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
        "learning_rates": options.rates,
        "epochs": options.max_epochs,
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

    there = {
        name.lower(): kind
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)
    }
    del there["optimizer"]
    named = options.optimizer or "AdamW"
    kind = there.get(named.lower())
    if kind is None:
        names = [one.__name__ for one in there.values()]
        raise ValueError(f"--optimizer {named} is not in torch.optim: give {nearest(named, names)}")
    settings = {"weight_decay": options.weight_decay, "momentum": options.momentum}
    for name, value in settings.items():
        if value is not None and name not in inspect.signature(kind).parameters:
            raise ValueError(
                f"{typed(name)} cannot be set for --optimizer {kind.__name__}: leave it out"
            )
    return {"optimizer": kind, **settings}


def _study(options: argparse.Namespace, arrays: Arrays, settings: dict[str, Any]) -> Study:
    from pseudograd.search.documents import write_json
    from pseudograd.study import Study

    called = options.network
    network = _network(called)
    name = "stdin" if options.data == "-" else Path(options.data).resolve().name
    folder = options.out or Path("runs") / _folder_name(name, called, network, arrays, settings)
    try:
        study = Study(
            network,
            arrays.train,
            arrays.test,
            folder=folder,
            name=name,
            classes=arrays.classes,
            **settings,
        )
    except ValueError as problem:
        argument, _, complaint = str(problem).partition(" ")
        if argument == "classes" and complaint.startswith("must name"):
            count = len(arrays.classes or ())
            raise ValueError(
                f"--network {called} has more outputs than {options.data} has classes: give it "
                f"{count}"
            ) from problem
        if argument not in settings:
            raise
        option = {"epochs": "max_epochs", "learning_rates": "rates"}.get(argument, argument)
        raise ValueError(f"{typed(option)} {complaint}") from problem
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
    module_name, _, function = called.partition(":")
    if not module_name or not function or module_name.endswith(".py") or os.sep in module_name:
        raise ValueError(
            f"{option} must be module:function, such as nets:net for net() in nets.py, not "
            f"{called!r}"
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as problem:
        missing = getattr(problem, "name", None) or "."
        if isinstance(problem, ModuleNotFoundError) and f"{module_name}.".startswith(f"{missing}."):
            raise ValueError(
                f"{option} {called}: there is no module {missing!r} in this folder or installed: "
                "run the command in its folder"
            ) from problem
        raise ValueError(
            f"{option} {called}: importing {module_name} fails ({raised(problem)})"
        ) from problem
    for part in function.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{option} {called}: {module_name} has no {function!r}")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(
            f"{option} {called}: {function} must be a function, not a {type(found).__name__}"
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
    from pseudograd.search.documents import misfit, read_json

    path = options.run_folder / NETWORK
    image_size, called = None, options.network
    if path.exists():
        known = read_json(path, "name the network with --network")
        if wrong := misfit(known, _SHAPE, "it"):
            raise ValueError(f"{path} is damaged ({wrong}): name the network with --network")
        called, image_size = called or known["network"], known["image_size"]
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
