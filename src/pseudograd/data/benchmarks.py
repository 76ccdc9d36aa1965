"""The benchmark data sets, from official files or a download, cached as plain arrays.

Each set is looked up in ``FOLDER/NAME``, where downloads and cached arrays go, and in ``FOLDER``,
which may hold official files. Every load checks the hash of the arrays.

The SHA-256 of a file is the one that TensorFlow Datasets publishes (``url_checksums`` in its
repository). The SHA-256 of a variant is `Dataset.sha256`, which runs record: that of the images,
flattened in the order (height, width, channels), the training set first, then of the int64 labels.
"""

from __future__ import annotations

import gzip
import io
import math
import os
import posixpath
import shlex
import struct
import tarfile
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import torch
from numpy.typing import NDArray

from pseudograd.data.dataset import Dataset
from pseudograd.data.download import download
from pseudograd.extras import needed_for
from pseudograd.files import sha256_of

Bytes = NDArray[np.uint8]

# The hash is written last: if it exists, the arrays are complete.
_PICTURES, _LABELS, _HASH = "pictures.npy", "labels.npy", "arrays.sha256"
_UNSIGNED_BYTE = 8  # type code in an IDX header


# --- file formats: a reader returns images, labels counted from 0, or both -----------------------


def read_idx(file: BinaryIO) -> list[Bytes]:
    """Read the array of an IDX file, the format of MNIST."""
    content = file.read()
    if content[:3] != bytes([0, 0, _UNSIGNED_BYTE]) or len(content) < 4 + 4 * content[3]:
        raise ValueError("it does not have the header of an IDX file of bytes")
    header = 4 + 4 * content[3]
    shape = struct.unpack_from(f">{content[3]}I", content, 4)
    if len(content) - header != math.prod(shape):
        raise ValueError(
            f"its header announces {math.prod(shape)} bytes, but {len(content) - header} follow"
        )
    return [np.frombuffer(content, np.uint8, offset=header).reshape(shape)]


def read_cifar10(file: BinaryIO) -> list[Bytes]:
    """Read the images and labels of a file of CIFAR-10's binary version."""
    return _read_cifar(file, labels=1)


def read_cifar100(file: BinaryIO) -> list[Bytes]:
    """Read the images and fine labels of a file of CIFAR-100's binary version."""
    return _read_cifar(file, labels=2)


def _read_cifar(file: BinaryIO, labels: int) -> list[Bytes]:
    """Read examples of one or two labels, the fine one last, and three colour planes."""
    content = np.frombuffer(file.read(), np.uint8)
    size = labels + 3 * 32 * 32
    if len(content) % size:
        raise ValueError(f"its {len(content)} bytes are not a multiple of an example's {size}")
    examples = content.reshape(-1, size)
    planes = examples[:, labels:].reshape(-1, 3, 32, 32)
    return [planes.transpose(0, 2, 3, 1), examples[:, labels - 1]]


def read_svhn(file: BinaryIO) -> list[Bytes]:
    """Read the images and labels of a .mat file of SVHN's cropped digits."""
    with needed_for("reading .mat files"):
        from scipy.io import loadmat

    try:
        held = loadmat(file, variable_names=("X", "y"))
    except Exception as problem:  # SciPy raises many types for damaged files
        raise ValueError(f"SciPy says: {problem}") from problem
    pictures, labels = held.get("X"), held.get("y")
    if (
        not (isinstance(pictures, np.ndarray) and isinstance(labels, np.ndarray))
        or pictures.dtype != np.uint8
        or pictures.ndim != 4
        or labels.shape != (pictures.shape[3], 1)
    ):
        raise ValueError("it has no images X (height, width, channels, n) with labels y (n, 1)")
    # SVHN labels the digit 0 with 10.
    return [pictures.transpose(3, 0, 1, 2), (labels[:, 0] % 10).astype(np.uint8)]


# --- the sets ------------------------------------------------------------------------------------


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


# --- loading --------------------------------------------------------------------------------------


def load(name: str, data_dir: str | Path | None = None) -> Dataset:
    """Load a benchmark set that is on this machine, without downloading anything.

    Official files are read and checked once, then cached as plain arrays, which load quickly.

    Args:
        name: "mnist", "fashion-mnist", "svhn", "cifar10" or "cifar100".
        data_dir: The folder, as for `data_folder`.

    """
    benchmark, folder = _benchmark(name), data_folder(data_dir)
    data = _from_arrays(name, benchmark, folder / name)
    if data is None:
        data = _from_files(name, benchmark, folder)
        _keep(data, benchmark, folder / name)
    return data


def fetch(name: str, data_dir: str | Path | None = None, *, progress: bool = False) -> Dataset:
    """Load a benchmark set, and download missing files.

    Args:
        name: As for `load`.
        data_dir: The folder, as for `data_folder`.
        progress: Whether to show a progress bar on a terminal.

    """
    benchmark, folder = _benchmark(name), data_folder(data_dir)
    if not (folder / name / _HASH).exists():
        for file in benchmark.files:
            if _find(file, _places(name, benchmark, folder)) is None:
                urls = [source + file.name for source in benchmark.sources]
                path = folder / name / file.name
                restart = _command(name, folder)
                download(urls, path, file.sha256, restart=restart, progress=progress)
    return load(name, folder)


def variant(name: str, sha256: str) -> str | None:
    """Return the name of a known variant of a benchmark set.

    Args:
        name: As for `load`.
        sha256: The hash of the data, `Dataset.sha256`.

    Returns:
        "official" or another name; None if the hash is not listed. `load` accepts unlisted data
        only from files that have the official checksums.

    """
    return _benchmark(name).contents.get(sha256)


def data_folder(data_dir: str | Path | None = None) -> Path:
    """Return the folder of the benchmark sets.

    Args:
        data_dir: Its path. If None, the environment variable PSEUDOGRAD_DATA, or else a folder in
            the user's cache directory.

    """
    if chosen := data_dir or os.environ.get("PSEUDOGRAD_DATA"):
        return Path(chosen)
    with needed_for("the default folder for data (name one by data_dir or PSEUDOGRAD_DATA)"):
        import pooch
    return Path(pooch.os_cache("pseudograd"))


def _benchmark(name: str) -> Benchmark:
    if name not in BENCHMARKS:
        raise ValueError(f"name must be one of {', '.join(BENCHMARKS)}, not {name!r}")
    return BENCHMARKS[name]


def _command(name: str, folder: Path) -> str:
    return f"pseudograd data fetch {name} --data-dir {shlex.quote(str(folder))}"


def _dataset(name: str, benchmark: Benchmark, pictures: Bytes, labels: Bytes) -> Dataset:
    return Dataset(
        name=name,
        features=torch.from_numpy(pictures.reshape(len(pictures), -1)),
        labels=torch.from_numpy(labels).long(),
        train_size=benchmark.train_size,
    )


def _from_arrays(name: str, benchmark: Benchmark, folder: Path) -> Dataset | None:
    """Return the data set from cached arrays, memory-mapped; None if there are none."""
    if not (folder / _HASH).exists():
        return None
    try:
        # Copy-on-write, since PyTorch has no read-only tensors.
        pictures = np.load(folder / _PICTURES, mmap_mode="c", allow_pickle=False)
        labels = np.load(folder / _LABELS, allow_pickle=False)
        data = _dataset(name, benchmark, pictures, labels)
        sha256 = data.sha256
        known = sha256 in benchmark.contents or not benchmark.official_is_listed
        if sha256 != (folder / _HASH).read_text() or not known:
            raise ValueError(f"their SHA-256 is {sha256}")
    except (OSError, ValueError, EOFError) as problem:
        raise ValueError(
            f"the arrays of {name} in {folder} are damaged ({problem}): remove {_PICTURES}, "
            f"{_LABELS} and {_HASH} there, and run `{_command(name, folder.parent)}`"
        ) from problem
    return data


def _keep(data: Dataset, benchmark: Benchmark, folder: Path) -> None:
    """Cache the arrays; each file is moved into place once it is complete."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as unfinished:
            here = Path(unfinished)
            np.save(here / _PICTURES, data.features.numpy().reshape(-1, *benchmark.shape))
            np.save(here / _LABELS, data.labels.numpy().astype(np.uint8))
            (here / _HASH).write_text(data.sha256)
            for file in (_PICTURES, _LABELS, _HASH):
                os.replace(here / file, folder / file)
    except OSError as problem:
        warnings.warn(
            f"the arrays of {data.name} could not be cached in {folder} ({problem.strerror}): the "
            "official files will be read again next time",
            stacklevel=3,
        )


def _from_files(name: str, benchmark: Benchmark, folder: Path) -> Dataset:
    """Return the data set from the official files, after checking them."""
    places = _places(name, benchmark, folder)
    found = {file: _find(file, places) for file in benchmark.files}
    paths = {file: path for file, path in found.items() if path}
    if missing := [file.name for file in found if file not in paths]:
        raise FileNotFoundError(
            f"{name} needs {', '.join(missing)}, packed or unpacked, in "
            f"{' or '.join(map(str, places))}: run `{_command(name, folder)}`, or name the folder "
            "of the official files by data_dir (--data-dir) or PSEUDOGRAD_DATA"
        )
    arrays = []
    for file, path in paths.items():
        try:
            arrays += [array for stream in _streams(file, path) for array in benchmark.read(stream)]
        except (OSError, EOFError, ValueError, tarfile.TarError, zlib.error) as problem:
            raise ValueError(
                f"{path} cannot be read as the official {file.name} ({problem}): remove it, and "
                f"run `{_command(name, folder)}`"
            ) from problem
    try:
        pictures, labels = np.concatenate(arrays[0::2]), np.concatenate(arrays[1::2])
        if (training := len(labels) - len(arrays[-1])) != benchmark.train_size:
            raise ValueError(f"{training} examples to train on, not {benchmark.train_size}")
        data = _dataset(name, benchmark, pictures, labels)
    except ValueError as problem:
        raise ValueError(
            f"the files of {name} in {folder} do not fit together ({problem}): replace them with "
            f"the official ones, or remove them and run `{_command(name, folder)}`"
        ) from problem
    _check(data, benchmark, paths, folder)
    return data


def _check(data: Dataset, benchmark: Benchmark, paths: dict[File, Path], folder: Path) -> None:
    """Raise if the data are neither a known variant nor from files with official checksums."""
    sha256, known = data.sha256, benchmark.contents
    if sha256 in known:
        return
    expected = [f"{listed} ({called})" for listed, called in known.items()]
    if not benchmark.official_is_listed:
        if all(path.is_file() and sha256_of(path) == file.sha256 for file, path in paths.items()):
            return
        expected += [f"that of files with the SHA-256 {', '.join(f.sha256 for f in paths)}"]
    raise ValueError(
        f"the content of {data.name} in {folder} has the SHA-256 {sha256}, but should have "
        f"{' or '.join(expected)}: replace the files with the official ones, or remove them and "
        f"run `{_command(data.name, folder)}`"
    )


def _places(name: str, benchmark: Benchmark, folder: Path) -> list[Path]:
    return [folder / name] if benchmark.own_folder else [folder / name, folder]


def _find(file: File, places: list[Path]) -> Path | None:
    """Return the path of an official file or the folder with its extracted members, or None."""
    for place in places:
        if (place / file.name).is_file():
            return place / file.name
        if all((place / member).is_file() for member in file.members):
            return place
    return None


def _streams(file: File, path: Path) -> Iterator[BinaryIO]:
    """Yield the members of an official file as open streams."""
    if path.is_dir():
        for member in file.members:
            with (path / member).open("rb") as stream:
                yield stream
    elif path.name.endswith(".tar.gz"):
        held = {}
        with tarfile.open(path, "r|gz") as archive:  # a single pass: members come in any order
            for entry in archive:
                member = posixpath.normpath(entry.name)
                if member in file.members and (content := archive.extractfile(entry)):
                    held[member] = content.read()
        for member in file.members:
            if member not in held:
                raise ValueError(f"{member} is not in it")
            yield io.BytesIO(held[member])
    elif path.suffix == ".gz":
        with gzip.open(path) as stream:
            yield cast(BinaryIO, stream)
    else:
        with path.open("rb") as stream:
            yield stream
