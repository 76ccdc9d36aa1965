"""The benchmark sets as data sets: from plain arrays, from the official files, or downloaded.

All is looked for in one folder: in ``FOLDER/NAME``, where downloads and arrays go, and in the
``FOLDER`` itself, where there may be official files. Whichever way the arrays came, their hash is
checked each time they are loaded.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import posixpath
import shlex
import tarfile
import tempfile
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import torch

from pseudograd.data.dataset import Dataset
from pseudograd.data.download import download
from pseudograd.data.formats import Bytes
from pseudograd.data.registry import BENCHMARKS, Benchmark, File
from pseudograd.extras import needed_for

# The arrays, and their hash, which is written last and so says that they are complete.
_PICTURES, _LABELS, _HASH = "pictures.npy", "labels.npy", "arrays.sha256"


def load(name: str, data_dir: str | Path | None = None) -> Dataset:
    """Load a benchmark set that is on this machine: nothing is downloaded.

    Official files are read, checked, and kept as plain arrays beside them, which are quick to load.

    Args:
        name: "mnist", "fashion-mnist", "svhn", "cifar10" or "cifar100".
        data_dir: The folder, as `data_folder` takes it.

    Example:
        >>> load("mnist", "no/such/folder")
        Traceback (most recent call last):
        FileNotFoundError: mnist needs train-images-idx3-ubyte.gz, ...

    """
    benchmark, folder = _benchmark(name), data_folder(data_dir)
    data = _from_arrays(name, benchmark, folder / name)
    if data is None:
        data = _from_files(name, benchmark, folder)
        _keep(data, benchmark, folder / name)
    return data


def fetch(name: str, data_dir: str | Path | None = None, *, progress: bool = False) -> Dataset:
    """Load a benchmark set, and download first what is missing.

    Args:
        name: As in `load`.
        data_dir: The folder, as `data_folder` takes it.
        progress: Whether to show a progress bar, if there is a terminal.

    Example:
        >>> fetch("iris")
        Traceback (most recent call last):
        ValueError: name must be one of mnist, fashion-mnist, svhn, cifar10, cifar100, not 'iris'

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
    """Tell which of the known contents of a benchmark set a hash stands for.

    Args:
        name: As in `load`.
        sha256: Of a data set, as `Dataset.sha256` gives it.

    Returns:
        "official", or what else the content is called; None if the hash is not listed. `load` takes
        an unlisted content only from files that have the official checksums.

    Example:
        >>> hash_of_a_run = "2d1568822e365c1e47e0c28714b9cf4242ad7d4f0def3464a00f3b89c51b6934"
        >>> variant("svhn", hash_of_a_run)
        're-cropped'

    """
    return _benchmark(name).contents.get(sha256)


def data_folder(data_dir: str | Path | None = None) -> Path:
    """Give the folder of the benchmark sets.

    Args:
        data_dir: Its path. Unless given, the environment variable PSEUDOGRAD_DATA names it, and
            without that it is the folder where this system keeps what can be downloaded again.

    Example:
        >>> data_folder("data").name
        'data'

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
    """The data set from arrays that were kept, mapped into memory; None if there are none."""
    if not (folder / _HASH).exists():
        return None
    try:
        # Mapped so that changes stay in memory: PyTorch has no tensors that cannot be written to.
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
    """Write the arrays, each to a file of its own that appears when it is complete."""
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
            f"the arrays of {data.name} could not be kept in {folder} ({problem.strerror}), so the "
            "official files will be read again next time",
            stacklevel=3,
        )


def _from_files(name: str, benchmark: Benchmark, folder: Path) -> Dataset:
    """The data set from the official files, if they are what they should be."""
    places = _places(name, benchmark, folder)
    paths: dict[File, Path] = {}
    missing = []
    for file in benchmark.files:
        if path := _find(file, places):
            paths[file] = path
        else:
            missing.append(file.name)
    if missing:
        raise FileNotFoundError(
            f"{name} needs {', '.join(missing)}, packed or unpacked, in "
            f"{' or '.join(map(str, places))}: run `{_command(name, folder)}`, or name the folder "
            "that holds the official files by data_dir (--data-dir) or PSEUDOGRAD_DATA"
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
            f"the files of {name} in {folder} do not fit together ({problem}): replace them by the "
            f"official ones, or remove them and run `{_command(name, folder)}`"
        ) from problem
    _check(data, benchmark, paths, folder)
    return data


def _check(data: Dataset, benchmark: Benchmark, paths: dict[File, Path], folder: Path) -> None:
    """Refuse what is not known."""
    sha256, known = data.sha256, benchmark.contents
    if sha256 in known:
        return
    expected = [f"{listed} ({called})" for listed, called in known.items()]
    if not benchmark.official_is_listed:
        if all(path.is_file() and _sha256(path) == file.sha256 for file, path in paths.items()):
            return
        expected += [f"that of files with the SHA-256 {', '.join(f.sha256 for f in paths)}"]
    raise ValueError(
        f"the content of {data.name} in {folder} has the SHA-256 {sha256}, but should have "
        f"{' or '.join(expected)}: replace the files by the official ones, or remove them and run "
        f"`{_command(data.name, folder)}`"
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _places(name: str, benchmark: Benchmark, folder: Path) -> list[Path]:
    return [folder / name] if benchmark.own_folder else [folder / name, folder]


def _find(file: File, places: list[Path]) -> Path | None:
    """The path of an official file, or of the folder with its members; None if there is neither."""
    for place in places:
        if (place / file.name).is_file():
            return place / file.name
        if all((place / member).is_file() for member in file.members):
            return place
    return None


def _streams(file: File, path: Path) -> Iterator[BinaryIO]:
    """The members of an official file, open."""
    if path.is_dir():
        for member in file.members:
            with (path / member).open("rb") as stream:
                yield stream
    elif path.name.endswith(".tar.gz"):
        held = {}
        with tarfile.open(path, "r|gz") as archive:  # in one pass, whatever their order is
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
