"""The data sets by their names in PLAN.md; small synthetic data with --smoke."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beyond import noise, sequences
from pseudograd.data.dataset import Dataset
from pseudograd.fleet.modules.examples import Examples

Part = tuple[NDArray[Any], NDArray[Any]]
_SMOKE = (200, 50)  # examples


@dataclass(frozen=True)
class Place:
    """The folders of the data.

    Attributes:
        data_dir: The folder of the benchmark sets; None for the default.
        cifar_n: The folder of the human labels; None for that in PSEUDOGRAD_CIFAR_N.
        smoke: Whether to use small synthetic data instead.

    """

    data_dir: str | None = None
    cifar_n: str | None = None
    smoke: bool = False


@dataclass(frozen=True, eq=False)
class Named:
    """Examples and the true labels of the training set.

    Attributes:
        examples: Noisy training labels, clean test labels.
        clean: The true labels of the training examples.

    """

    examples: Examples
    clean: NDArray[np.int64]

    @property
    def noise_rate(self) -> float:
        """The share of training labels that are wrong."""
        given = self.examples.labels[: self.examples.train_size].numpy()
        return float((given != self.clean).mean())

    def dataset(self) -> Dataset:
        """Return the data with flat images, for the MLP fleet."""
        (images,) = self.examples.inputs
        return Dataset(
            self.examples.name, images.flatten(1), self.examples.labels, self.examples.train_size
        )

    def facts(self) -> dict[str, Any]:
        """Return the facts that a study records about its data."""
        examples = self.examples
        return {
            "name": examples.name,
            "sha256": examples.sha256,
            "train_size": examples.train_size,
            "test_size": examples.test_size,
            "noise_rate": round(self.noise_rate, 6),
        }


@functools.lru_cache(maxsize=1)
def named(name: str, place: Place) -> Named:
    """Return data by name: a set, or a set with noise such as "cifar10-symmetric-40"."""
    source, _, kind = name.partition("-")
    if source in ("speech", "shakespeare"):
        train, test = _sequences(source, kind, place)
        return Named(Examples.of(train, test, name), train[1])
    (x, y), test = _images(source, place)
    labels = y.astype(np.int64)
    return Named(Examples.of((x, _noisy(labels, kind, place)), test, name), labels)


def classes_of(name: str, place: Place) -> int:
    """Return the number of classes of a set."""
    if name == "shakespeare":
        return int(named(name, place).examples.labels.max()) + 1
    return 100 if name.startswith("cifar100") and not place.smoke else 10


def _sequences(source: str, speaker: str, place: Place) -> tuple[Part, Part]:
    """Return spoken digits or Shakespeare; for a smoke test, noise or one repeated line."""
    if place.smoke:
        if source == "shakespeare":
            return sequences.characters("to be or not to be, that is the question. " * 40)
        generator = np.random.default_rng(0)
        count, labels = sum(_SMOKE), np.arange(sum(_SMOKE)) % 10
        frames = generator.normal(size=(count, sequences.FRAMES, sequences.BANDS)).astype(
            np.float32
        )
        frames[np.arange(count), :, labels] += 1
        cut = _SMOKE[0]
        return (frames[:cut], labels[:cut]), (frames[cut:], labels[cut:])
    from pseudograd.data import data_folder

    folder = data_folder(place.data_dir)
    if source == "shakespeare":
        return sequences.shakespeare(folder)
    return sequences.speech(folder, int(speaker))


def _noisy(labels: NDArray[np.int64], kind: str, place: Place) -> NDArray[np.int64]:
    way, _, percent = kind.partition("-")
    if way == "symmetric":
        return noise.symmetric(labels, int(percent) / 100, int(labels.max()) + 1)
    if way == "asymmetric":
        return noise.asymmetric(labels, int(percent) / 100)
    if way in noise.HUMAN:
        if place.smoke:
            return noise.symmetric(labels, 0.4, int(labels.max()) + 1, seed=1)
        return noise.human(way, labels, place.cifar_n)
    if kind:
        raise ValueError(f"data has no noise called {kind!r}")
    return labels


@functools.lru_cache(maxsize=1)
def _images(name: str, place: Place) -> tuple[Part, Part]:
    if place.smoke:
        return _synthetic(*_SMOKE, 1 if name == "mnist" else 3)
    from pseudograd.data import images

    return images(name, place.data_dir)


def _synthetic(train: int, test: int, channels: int = 3) -> tuple[Part, Part]:
    """Return images with one bright square each, whose position gives the class."""
    size = 32 if channels == 3 else 28
    generator = np.random.default_rng(0)
    count = train + test
    labels = np.arange(count) % 10
    pictures = generator.integers(0, 160, (count, channels, size, size), dtype=np.uint8)
    for at, label in enumerate(labels):
        row, column = divmod(int(label), 4)
        pictures[at, :, 8 * row + 4 : 8 * row + 10, 8 * column + 1 : 8 * column + 7] += 80
    return (pictures[:train], labels[:train]), (pictures[train:], labels[train:])
