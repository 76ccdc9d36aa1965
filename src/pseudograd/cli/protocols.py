"""Options of ``pseudograd tune`` for the search and the network, and the protocol they define."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from pseudograd.cli.options import add_k, add_values, number

if TYPE_CHECKING:
    from pseudograd.data import Dataset, Encoder
    from pseudograd.search import Protocol

_OPTIMIZERS = ("sgd", "adam", "rmsprop")
# Options of the paper's protocol only, and their defaults.
_PAPER = {
    "optimizer": "sgd",
    "momentum": 0.9,
    "patience": 15,
    "retrainings": 5,
    "stratify": False,
}


def add_network(parser: argparse.ArgumentParser) -> None:
    """Add the options of the network and its training."""
    network = parser.add_argument_group("the network")
    sizes = (
        "sizes of the hidden layers; 0 for none (two of 32 to 128, depending on the number of "
        "rows; --protocol paper: 400)"
    )
    network.add_argument("--hidden", type=int, nargs="+", metavar="SIZE", help=sizes)
    # Copied from `fleet.recipe`, which is too slow to import for every command.
    network.add_argument(
        "--activation",
        choices=("relu", "tanh", "sigmoid"),
        default="relu",
        help="activation of the hidden layers (relu)",
    )
    clip = "clip the gradient norm (never; --protocol paper: at 100, with several hidden layers)"
    epochs = "maximum number of epochs (depends on the number of rows; --protocol paper: 1000)"
    add_values(
        network,
        ("--batch-size", int, "N", "examples per step (depends on the number of rows)"),
        ("--clip", number, "CLIP", clip),
        ("--epochs", int, "EPOCHS", epochs),
    )


def add_search(parser: argparse.ArgumentParser) -> None:
    """Add the options of the search."""
    search = parser.add_argument_group("the search")
    search.add_argument(
        "--protocol",
        choices=("bagging", "paper"),
        default="bagging",
        help="bagging: keep an ensemble of the cross-validation networks, across k; paper: the "
        "paper's search, which keeps one network (%(default)s)",
    )
    search.add_argument(
        "--metric",
        choices=("error", "balanced", "log-loss"),
        default="error",
        help="criterion for choosing the ensemble; balanced weights all classes equally "
        "(%(default)s)",
    )
    default = "2 1 1/2; --protocol paper: 4 to 1/4 and, with up to one hidden layer, 1/8 1/16"
    add_k(search, default, ramps=True)
    rates = "learning rates to start from (0.003 0.01 0.03; --protocol paper: found by a sweep)"
    search.add_argument("--learning-rates", type=number, nargs="+", metavar="RATE", help=rates)
    each = "networks per pair of k and rate (5, one per fold; --protocol paper: 7, 10 for mnist)"
    add_values(search, ("--repetitions", int, "N", each))
    seed = "random seed of the folds, the initial weights and the shuffling (%(default)s)"
    search.add_argument("--seed", type=int, default=0, help=seed)
    paper = parser.add_argument_group("only with --protocol paper or --network")
    optimizer = "sgd, adam or rmsprop (sgd); with --network any of torch.optim (AdamW)"
    patience = "stop after this many epochs without improvement (15; with --network never)"
    add_values(
        paper,
        ("--optimizer", str, "NAME", optimizer),
        ("--momentum", number, "MOMENTUM", "momentum of sgd (0.9; with --network: none)"),
        ("--patience", int, "EPOCHS", patience),
        ("--retrainings", int, "N", "final networks of the chosen k and of k = 1 (5)"),
    )
    stratify = "stratify the folds by class, as bagging and --network always do"
    paper.add_argument("--stratify", action="store_true", default=None, help=stratify)


def protocol_of(options: argparse.Namespace, data: Dataset, encoder: Encoder) -> Protocol:
    """Return the protocol that the options describe."""
    hidden = None
    if options.hidden:
        hidden = tuple(size for size in options.hidden if size)
        if len(hidden) < len(options.hidden) > 1:
            raise ValueError(
                "--hidden must be whole numbers above 0, or a single 0 for no hidden layer"
            )
    if options.protocol == "paper":
        return _paper(options, data, (400,) if hidden is None else hidden)
    for name in _PAPER:
        if getattr(options, name) is not None:
            raise ValueError(f"{name} needs --protocol paper: add that, or leave this out")
    return _bagging(options, data, encoder, hidden)


def _bagging(
    options: argparse.Namespace, data: Dataset, encoder: Encoder, hidden: tuple[int, ...] | None
) -> Protocol:
    from pseudograd.search.bagging import bagging_for, table_recipe

    recipe = table_recipe(
        data.name,
        data.train_size,
        data.sha256[:16],
        pixels=encoder.pixels is not None,
        hidden_layer_sizes=hidden,
        activation=options.activation,
        batch_size=options.batch_size,
        clip=options.clip,
        max_epochs=options.epochs,
    )
    return bagging_for(
        recipe,
        data.train_size,
        ks=options.k,
        learning_rates=options.learning_rates,
        repetitions=options.repetitions,
        seed=options.seed,
    )


def _paper(options: argparse.Namespace, data: Dataset, hidden: tuple[int, ...]) -> Protocol:
    from pseudograd.fleet import MLPRecipe
    from pseudograd.search import Protocol, batch_size_for, clip_for, ks_for, repetitions_for

    if options.metric != "error":
        raise ValueError(
            "--metric must be left out with --protocol paper, which always uses the error"
        )
    defaults = {
        **_PAPER,
        "k": ks_for(len(hidden)),
        "learning_rates": (),
        "batch_size": batch_size_for(data.train_size),
        "clip": clip_for(len(hidden)),
        "epochs": 1000,
        "repetitions": repetitions_for(data.name),
    }
    given: dict[str, Any] = {
        name: default if getattr(options, name) is None else getattr(options, name)
        for name, default in defaults.items()
    }
    if given["optimizer"] not in _OPTIMIZERS:
        raise ValueError(
            f"optimizer must be one of {', '.join(_OPTIMIZERS)}, not {given['optimizer']!r}"
        )
    recipe = MLPRecipe(
        data.name,
        hidden,
        data.sha256[:16],
        momentum=given["momentum"],
        optimizer=given["optimizer"],
        activation=options.activation,
        batch_size=given["batch_size"],
        clip=given["clip"],
        patience=given["patience"],
        ties="last",
        max_epochs=given["epochs"],
        stratified=given["stratify"],
    )
    rates = given["learning_rates"]
    return Protocol(
        recipe,
        ks=given["k"],
        initial_rate=rates[0] if len(rates) == 1 else None,
        learning_rates=rates if len(rates) > 1 else (),
        repetitions=given["repetitions"],
        retrainings=given["retrainings"],
        seed=options.seed,
    )
