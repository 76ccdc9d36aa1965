"""The benchmark data sets, from official files or a download, cached as plain arrays.

Each set is looked up in ``FOLDER/NAME``, where downloads and cached arrays go, and in ``FOLDER``,
which may hold official files. Every load checks the hash of the arrays.
"""

from __future__ import annotations

import gzip
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
from pseudograd.files import sha256_of

# The hash is written last: if it exists, the arrays are complete.
_PICTURES, _LABELS, _HASH = "pictures.npy", "labels.npy", "arrays.sha256"


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
