"""Options of ``pseudograd tune`` for the search and the network, and the protocol they define."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from pseudograd.cli.options import Different, add_k, add_values, numbers, positive, whole

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
    network.add_argument("--hidden", type=whole(0, 10**8), nargs="+", metavar="SIZE", help=sizes)
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
        ("--batch-size", whole(1), "N", "examples per step (depends on the number of rows)"),
        ("--clip", positive, "CLIP", clip),
        ("--max-epochs", whole(1), "EPOCHS", epochs),
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
    rate = numbers(lambda rate: 1e-9 <= rate <= 1e9, "from 1e-9 to 1e9, like 0.1")
    rates = "learning rates to start from (0.003 0.01 0.03; --protocol paper: found by a sweep)"
    search.add_argument(
        "--rates", type=rate, nargs="+", action=Different, metavar="RATE", help=rates
    )
    each = "networks per pair of k and rate (5, one per fold; --protocol paper: 7, 10 for mnist)"
    add_values(search, ("--repetitions", whole(1, 10**5), "N", each))
    seed = "random seed of the folds, the initial weights and the shuffling (%(default)s)"
    search.add_argument("--seed", type=whole(0, 2**32), default=0, help=seed)
    paper = parser.add_argument_group("only with --protocol paper or --network")
    momentum = numbers(lambda value: 0 <= value < 1, "in [0, 1), like 0.9")
    optimizer = "sgd, adam or rmsprop (sgd); with --network any of torch.optim (AdamW)"
    patience = "stop after this many epochs without improvement (15; with --network never)"
    add_values(
        paper,
        ("--optimizer", str, "NAME", optimizer),
        ("--momentum", momentum, "MOMENTUM", "momentum of sgd (0.9; with --network: none)"),
        ("--patience", whole(1), "EPOCHS", patience),
        ("--retrainings", whole(1, 10**5), "N", "final networks of the chosen k and of k = 1 (5)"),
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
            raise ValueError(f"--{name} needs --protocol paper: add that, or leave out --{name}")
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
        max_epochs=options.max_epochs,
    )
    if options.repetitions and options.repetitions % 5:
        wrong = options.repetitions
        raise ValueError(
            f"--repetitions must be a multiple of 5, one network per fold, not {wrong}"
        )
    return bagging_for(
        recipe,
        data.train_size,
        ks=tuple(options.k) if options.k else None,
        learning_rates=tuple(options.rates) if options.rates else None,
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
    given: dict[str, Any] = {
        name: default if getattr(options, name) is None else getattr(options, name)
        for name, default in _PAPER.items()
    }
    if given["optimizer"] not in _OPTIMIZERS:
        raise ValueError(
            f"--optimizer must be one of {', '.join(_OPTIMIZERS)}, not {given['optimizer']!r}"
        )
    recipe = MLPRecipe(
        data.name,
        hidden,
        data.sha256[:16],
        momentum=given["momentum"],
        optimizer=given["optimizer"],
        activation=options.activation,
        batch_size=options.batch_size or batch_size_for(data.train_size),
        clip=options.clip or clip_for(len(hidden)),
        patience=given["patience"],
        ties="last",
        max_epochs=options.max_epochs or 1000,
        stratified=given["stratify"],
    )
    rates = options.rates or []
    return Protocol(
        recipe,
        ks=tuple(options.k or ks_for(len(hidden))),
        initial_rate=rates[0] if len(rates) == 1 else None,
        learning_rates=tuple(rates) if len(rates) > 1 else (),
        repetitions=options.repetitions or repetitions_for(data.name),
        retrainings=given["retrainings"],
        seed=options.seed,
    )
