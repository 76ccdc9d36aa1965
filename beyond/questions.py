"""The settings of all questions, in the order of PLAN.md: data, network, methods, search."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from beyond import networks, sequences
from beyond.methods import (
    ALL_KS,
    METHODS,
    NORMALIZED,
    SCHEDULES,
    Method,
    times,
    tunable_smoothing,
)
from beyond.protocol import MethodProtocol
from pseudograd.fleet.modules.training import Training
from pseudograd.fleet.recipe import MLPRecipe, Recipe

ORDER = ("5", "1", "7", "3", "6", "2", "4")  # the most informative first
VALIDATION = 0.1
REVERSE = 9.21  # |A| of reverse cross-entropy in published code: -log of the smallest p, 1e-4


@dataclass(frozen=True)
class Spec:
    """A network and its training.

    Attributes:
        kind: "resnet", "cnn8" or "mlp"; "row" for one of the paper's, on the MLP fleet; "gru",
            "lstm" or "transformer" for sequences.
        epochs: The number of epochs.
        width: As in `beyond.networks`.
        depth: Blocks per stage, hidden layers, or the input size of a GRU.
        flips: Whether images are flipped as well as shifted.
        folds: Whether to train on five folds in turn; the last epoch is then used.

    """

    kind: str
    epochs: int
    width: int
    depth: int = 1
    flips: bool = True
    folds: bool = False

    def training(self, method: Method, classes: int = 10) -> Training:
        """Return the training with a method's rule."""
        common: dict[str, Any] = {
            "network": self._network(classes),
            "optimizer": torch.optim.SGD,
            "epochs": self.epochs,
            # Never stops early; the best epoch is kept beside the last.
            "patience": None if self.folds else self.epochs,
            "validation": None if self.folds else VALIDATION,
            "rule": method.rule,
        }
        augment = networks.flip_and_shift if self.flips else networks.shift
        if self.kind == "resnet":
            settings = {"momentum": 0.9, "nesterov": True, "weight_decay": 5e-4}
            return Training(
                **common, optimizer_settings=settings, batch_size=512, schedule="one-cycle",
                augment=augment, precision="bf16",
            )  # fmt: skip
        if self.kind == "cnn8":
            settings = {"momentum": 0.9, "weight_decay": 1e-4}
            return Training(
                **common, optimizer_settings=settings, schedule="cosine", clip=5.0,
                augment=augment, precision="bf16",
            )  # fmt: skip
        if self.kind in ("gru", "lstm", "transformer"):
            return Training(
                **common | {"optimizer": torch.optim.AdamW}, schedule="cosine", clip=1.0,
                optimizer_settings={"weight_decay": 0.01}, precision="tf32",
                batch_size=128 if self.kind == "gru" else 64,
                augment=sequences.shift_speech if self.depth == sequences.BANDS else None,
            )  # fmt: skip
        return Training(
            **common, optimizer_settings={"momentum": 0.5}, schedule="cosine",
            clip=100.0 if self.depth > 1 else None, precision="tf32",
        )  # fmt: skip

    def row(self, data: str, data_hash: str, batch_size: int = 128) -> MLPRecipe:
        """Return the recipe of one of the paper's rows, for a fixed number of epochs."""
        return MLPRecipe(
            data,
            (self.width,) * self.depth,
            data_hash,
            momentum=0.5,
            schedule="cosine",
            clip=100.0 if self.depth > 1 else None,
            batch_size=batch_size,
            patience=self.epochs,
            max_epochs=self.epochs,
        )

    def _network(self, classes: int) -> Callable[[], nn.Module]:
        if self.kind == "resnet":
            return functools.partial(networks.ResNet, classes, self.width, self.depth)
        if self.kind == "cnn8":
            return functools.partial(networks.CNN8, self.width)
        if self.kind == "gru":  # depth is its input size
            return functools.partial(sequences.RowReader, self.depth, self.width)
        if self.kind == "lstm":
            return functools.partial(sequences.TextLSTM, classes, self.width)
        if self.kind == "transformer":
            return functools.partial(sequences.TextTransformer, classes, self.width, self.depth)
        return functools.partial(networks.MLP, 3072, self.width, self.depth)

    @property
    def slots(self) -> int:
        """The number of concurrent trainings that fills a large GPU."""
        return 4 if self.kind == "resnet" and self.width >= 64 else 8

    def small(self) -> Spec:
        """Return a small version for --smoke."""
        depth = self.depth if self.kind == "gru" else min(self.depth, 2)
        return replace(self, epochs=2, width=4, depth=depth)


@dataclass(frozen=True)
class Setting:
    """Data, a network, and the methods compared on them.

    Attributes:
        question: Its number.
        name: As in PLAN.md; also the folder's name.
        data: As `beyond.data.named` takes it.
        spec: The network.
        methods: In the order of the runs.
        middle: The middle learning rate.
        search: Attributes of `MethodProtocol` that differ from their defaults.
        rates: The learning rates, instead of those around the middle.
        target: The validation error for "epochs to a given error", if that is reported.
        keeps: Whether the probabilities of final networks are kept (questions 4 and 6).
        reserve: Whether it runs only if time remains.

    """

    question: str
    name: str
    data: str
    spec: Spec
    methods: tuple[Method, ...]
    middle: float = 0.4
    search: tuple[tuple[str, Any], ...] = ()
    rates: tuple[float, ...] = ()
    target: float | None = None
    keeps: bool = False
    reserve: bool = False


@dataclass(frozen=True)
class Experiment:
    """A method in a setting: one study."""

    setting: Setting
    method: Method
    smoke: bool = False

    @property
    def name(self) -> str:
        """The question, the setting and the method; also the folder's path.

        Example:
            >>> experiments("5")[0].name
            '5/cifar10-worst/ce'

        """
        return f"{self.setting.question}/{self.setting.name}/{self.method.name}"

    @property
    def spec(self) -> Spec:
        """The network."""
        return self.setting.spec.small() if self.smoke else self.setting.spec

    def folder(self, results: Path) -> Path:
        """Return the folder of the study."""
        return results / self.name

    def training(self, classes: int) -> Training:
        """Return the training."""
        made = self.spec.training(self.method, classes)
        return replace(made, batch_size=64, precision="float32") if self.smoke else made

    def row(self, data: str, data_hash: str) -> MLPRecipe:
        """Return the recipe of one of the paper's rows."""
        return self.spec.row(data, data_hash, batch_size=64 if self.smoke else 128)

    def protocol(self, recipe: Recipe) -> MethodProtocol:
        """Return the search."""
        setting, method = self.setting, self.method
        values = method.values
        rates = setting.rates or method.rates(setting.middle)
        settings: dict[str, Any] = {"retrainings": 5, "factor": method.factor}
        settings |= dict(setting.search)
        if self.smoke:
            values = values[1:5] if method is SCHEDULES else values[-3:-1] or values
            rates = rates[: 1 if setting.keeps else 2]
            few = 3 if setting.keeps else 2
            settings |= {"most_extensions": 0, "retrainings": min(few, settings["retrainings"])}
            if not settings.get("each"):
                values = values[-1:]
        return MethodProtocol(
            recipe, ks=values, learning_rates=tuple(rates), stops=True, **settings
        )


_RESNET = Spec("resnet", epochs=15, width=64)
_SMALL = Spec("resnet", epochs=15, width=32)
_CLEAN = tuple(
    {**METHODS, "tunable-smoothing": tunable_smoothing(0.1)}[name]
    for name in ("ce", "tunable", "smoothing", "tunable-smoothing")
)
_SEQUENCES = tuple(METHODS[name] for name in ("ce", "tunable", "smoothing"))
_TEN_SEEDS = (("retrainings", 10),)
_NO_SEARCH = (("most_extensions", 0), ("retrainings", 3))
_ALL_RATES = (("repetitions", 2), ("retrainings", 0), ("each", True))


def _published(name: str, value: float, scale: float = 1.0) -> Method:
    """Return a method at its published setting and size."""
    method = replace(METHODS[name], values=(value,))
    if scale == 1 or method.rule is None:
        return method
    return replace(method, rule=functools.partial(times, scale, method.rule))


def _noise(data: str, *, ten_seeds: bool = True, reserve: bool = False) -> Setting:
    search = _TEN_SEEDS if ten_seeds else ()
    methods = tuple(METHODS.values())
    return Setting("5", data, data, _SMALL, methods, search=search, reserve=reserve)


SETTINGS = (
    _noise("cifar10-worst", ten_seeds=False),  # run before the plan asked for ten
    _noise("cifar10-symmetric-40"),
    _noise("cifar10-asymmetric-40"),
    _noise("cifar100-human"),
    _noise("cifar10-symmetric-60"),
    _noise("cifar100-symmetric-40"),
    Setting(
        "5",
        "anchor",
        "cifar10-symmetric-40",
        Spec("cnn8", epochs=120, width=64),
        (
            METHODS["ce"],
            _published("gce", 0.7),
            _published("sce", 0.1 / (0.1 + REVERSE), 0.1 + REVERSE),  # α = 0.1, β = 1
            _published("nce-rce", 1 / REVERSE, REVERSE),  # α = 1, β = 1
            _published("redescending", 0.7),
        ),
        rates=(0.01,),
        search=_NO_SEARCH,
    ),
    _noise("cifar10-symmetric-20", reserve=True),
    _noise("cifar10-aggregate", reserve=True),
    *(
        Setting("1", data, data, spec, _CLEAN, search=_TEN_SEEDS, target=target)
        for data, spec, target in (
            ("cifar10", _RESNET, 0.1),
            ("cifar100", _RESNET, 0.4),
            ("svhn", replace(_RESNET, epochs=10, flips=False), 0.06),
        )
    ),
    *(
        Setting(
            "1",
            f"depth-{blocks}",
            "cifar10",
            replace(_SMALL, depth=blocks),
            (ALL_KS,),
            rates=(0.2, 0.4, 0.8),
            search=(("each", True),),
        )
        for blocks in (0, 1, 3)
    ),
    Setting(
        "7",
        "resnet",
        "cifar10",
        _SMALL,
        (ALL_KS, NORMALIZED),
        rates=(0.1, 0.2, 0.4, 0.8, 1.6),
        search=_ALL_RATES,
    ),
    *(
        Setting(
            "7",
            f"{layers}x800",
            "cifar10",
            Spec("mlp", epochs=15, width=800, depth=layers),
            (ALL_KS, NORMALIZED),
            rates=tuple(0.004 * 2**power for power in range(7)),
            search=_ALL_RATES,
        )
        for layers in (1, 5)
    ),
    *(
        Setting(
            "3",
            f"{layers}x800",
            "cifar10",
            Spec("row", epochs=60, width=800, depth=layers),
            (SCHEDULES,),
            rates=tuple(0.0075 * 2**power for power in range(6)),
            search=(("each", True),),
        )
        for layers in (1, 3, 5)
    ),
    Setting(
        "3",
        "resnet",
        "cifar10",
        _SMALL,
        (SCHEDULES,),
        rates=(0.2, 0.4, 0.8),
        search=(("each", True),),
    ),
    *(
        Setting(
            "6",
            data,
            data,
            replace(_SMALL, folds=True),
            (ALL_KS,),
            rates=(0.2, 0.4, 0.8),
            search=(("each", True), ("folds", True)),
            keeps=True,
        )
        for data in ("cifar10-worst", "cifar10-aggregate")
    ),
    *(
        Setting(
            "4",
            data,
            data,
            _SMALL,
            (ALL_KS,),
            rates=(0.2, 0.4, 0.8),
            search=(("each", True), ("retrainings", 10)),
            keeps=True,
        )
        for data in ("cifar10", "cifar10-worst")
    ),
    *(
        Setting("2", name, data, spec, _SEQUENCES, middle=0.002)
        for name, data, spec in (
            ("mnist", "mnist", Spec("gru", epochs=15, width=128, depth=28)),
            ("text-transformer", "shakespeare", Spec("transformer", 20, width=128, depth=4)),
            ("text-lstm", "shakespeare", Spec("lstm", epochs=20, width=256)),
            *(
                (f"speech-{speaker}", f"speech-{speaker}", Spec("gru", 40, width=128, depth=40))
                for speaker in range(6)
            ),
        )
    ),
)


def experiments(
    question: str | None = None, pattern: str = "*", *, smoke: bool = False, reserve: bool = True
) -> list[Experiment]:
    """Return the studies of one question, or of all, in the order of the runs.

    Args:
        question: The number of the question.
        pattern: A pattern of names, such as "5/cifar10-worst/*".
        smoke: Whether it is a smoke test: then only the first setting has all methods.
        reserve: Whether to include settings that run only if time remains.

    """
    found = [
        Experiment(setting, method, smoke)
        for wanted in ORDER
        if question in (None, wanted)
        for place, setting in enumerate(one for one in SETTINGS if one.question == wanted)
        if reserve or not setting.reserve
        for method in (setting.methods[:1] if smoke and place else setting.methods)
    ]
    return [one for one in found if fnmatchcase(one.name, pattern)]
