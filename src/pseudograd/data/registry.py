"""The benchmark sets: their sources, checksums and known variants.

The SHA-256 of a file is the one that TensorFlow Datasets publishes (``url_checksums`` in its
repository). The SHA-256 of a variant is `Dataset.sha256`, which runs record: that of the images,
flattened in the order (height, width, channels), the training set first, then of the int64 labels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

from pseudograd.data.formats import Bytes, read_cifar10, read_cifar100, read_idx, read_svhn


@dataclass(frozen=True)
class File:
    """A file of an official distribution, under its published name and checksum."""

    name: str
    sha256: str
    members: tuple[str, ...]  # files in the archive, in reading order; else the file itself


@dataclass(frozen=True)
class Benchmark:
    """A published data set."""

    shape: tuple[int, ...]  # of one image
    train_size: int
    sources: tuple[str, ...]  # URLs of folders with the files, tried in this order
    files: tuple[File, ...]  # their members hold images and labels in turn, the test set last
    read: Callable[[BinaryIO], list[Bytes]]  # reads a member
    # Names of known variants, by hash. If none is "official", the files' checksums are compared.
    contents: dict[str, str]
    # Whether the files must be in a folder named after the set: another set has the same names.
    own_folder: bool = False

    @property
    def official_is_listed(self) -> bool:
        """Whether the hash of the official variant is known."""
        return "official" in self.contents.values()


def _idx(*checksums: str) -> tuple[File, ...]:
    """Return the four files of MNIST or a set in its format."""
    parts = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    return tuple(
        File(f"{part}-ubyte.gz", checksum, (f"{part}-ubyte",))
        for part, checksum in zip(parts, checksums, strict=True)
    )


def _cifar(name: str, checksum: str, folder: str, *members: str) -> tuple[File, ...]:
    return (File(name, checksum, tuple(f"{folder}/{member}.bin" for member in members)),)


BENCHMARKS = {
    "mnist": Benchmark(
        shape=(28, 28),
        train_size=60_000,
        # Mirrors: the authors' page no longer serves the files.
        sources=(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        files=_idx(
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
        read=read_idx,
        contents={"b3fe36794a3a345d09632e9d79f122d61ca91a07e5a22f8536973655bacf2a78": "official"},
    ),
    "fashion-mnist": Benchmark(
        shape=(28, 28),
        train_size=60_000,
        sources=(
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        ),
        files=_idx(
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        ),
        read=read_idx,
        contents={},
        own_folder=True,
    ),
    "svhn": Benchmark(
        shape=(32, 32, 3),
        train_size=73_257,
        sources=("http://ufldl.stanford.edu/housenumbers/",),
        files=tuple(
            File(f"{part}_32x32.mat", checksum, (f"{part}_32x32.mat",))
            for part, checksum in {
                "train": "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
                "test": "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
            }.items()
        ),
        read=read_svhn,
        # Cropped again, not by its authors, from the official images of whole house numbers.
        contents={"2d1568822e365c1e47e0c28714b9cf4242ad7d4f0def3464a00f3b89c51b6934": "re-cropped"},
    ),
    "cifar10": Benchmark(
        shape=(32, 32, 3),
        train_size=50_000,
        sources=("https://www.cs.toronto.edu/~kriz/",),
        files=_cifar(
            "cifar-10-binary.tar.gz",
            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            "cifar-10-batches-bin",
            *(f"data_batch_{at}" for at in range(1, 6)),
            "test_batch",
        ),
        read=read_cifar10,
        contents={"679a0a54bc26fa5425a8717c376404f30e2982dcca8ebd67a5e0ea32155044bf": "official"},
    ),
    "cifar100": Benchmark(
        shape=(32, 32, 3),
        train_size=50_000,
        sources=("https://www.cs.toronto.edu/~kriz/",),
        files=_cifar(
            "cifar-100-binary.tar.gz",
            "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            "cifar-100-binary",
            "train",
            "test",
        ),
        read=read_cifar100,
        contents={"41a78115fcfae7e3278f3c8fcac49c845163cfe3481588b1e45b615bcb767843": "official"},
    ),
}
