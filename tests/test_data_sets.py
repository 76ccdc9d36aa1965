"""The benchmark sets: official formats, downloads from a local server, checksums.

Most tests use small sets in the official formats, which they add to the registry.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pseudograd.cli.data import data as data_command
from pseudograd.cli.options import Parser
from pseudograd.data import Dataset, data_folder, fetch, load, open_data, variant
from pseudograd.data.benchmarks import BENCHMARKS, File, read_cifar10, read_idx, read_svhn
from pseudograd.data.download import download
from pseudograd.files import locked

NAMES = list(BENCHMARKS)
TRAIN, TEST = 100, 50


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# --- Small sets in the official formats ---


def idx(array: NDArray[np.uint8]) -> bytes:
    shape = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + shape + array.tobytes()


def cifar(x: NDArray[np.uint8], *labels: NDArray[np.uint8]) -> bytes:
    planes = x.transpose(0, 3, 1, 2).reshape(len(x), -1)
    return np.concatenate([*(y[:, None] for y in labels), planes], 1).tobytes()


def mat(x: NDArray[np.uint8], y: NDArray[np.uint8], compressed: bool = True) -> bytes:
    from scipy.io import savemat

    file = io.BytesIO()
    held = {"X": x.transpose(1, 2, 3, 0), "y": np.where(y == 0, 10, y)[:, None]}
    savemat(file, held, do_compression=compressed)
    return file.getvalue()


def tar(members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return file.getvalue()


@dataclass(frozen=True)
class Small:
    """A small set: its arrays, its downloads, and their unpacked members."""

    name: str
    x: NDArray[np.uint8]
    y: NDArray[np.uint8]
    files: dict[str, bytes]
    members: dict[str, bytes]

    def write(self, folder: Path, *, unpacked: bool = False) -> Path:
        for name, content in (self.members if unpacked else self.files).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        return folder

    def is_in(self, data: Dataset) -> None:
        assert data.name == self.name
        assert data.train_size == TRAIN
        assert data.value_range == (0.0, 255.0)
        assert data.features.dtype == torch.uint8
        assert data.features.is_contiguous()
        np.testing.assert_array_equal(data.features, self.x.reshape(len(self.x), -1))
        np.testing.assert_array_equal(data.labels, self.y)


def small(name: str) -> Small:
    """Return noise, which does not compress, so that files are long enough to be cut off."""
    shape = BENCHMARKS[name].shape
    random = np.random.default_rng(NAMES.index(name))
    x = random.integers(0, 256, (TRAIN + TEST, *shape), np.uint8)
    y = random.integers(0, 100 if name == "cifar100" else 10, TRAIN + TEST).astype(np.uint8)
    train, test = slice(TRAIN), slice(TRAIN, None)
    if name.endswith("mnist"):
        members = {
            "train-images-idx3-ubyte": idx(x[train]),
            "train-labels-idx1-ubyte": idx(y[train]),
            "t10k-images-idx3-ubyte": idx(x[test]),
            "t10k-labels-idx1-ubyte": idx(y[test]),
        }
        files = {
            f"{member}.gz": gzip.compress(content, mtime=0) for member, content in members.items()
        }
    elif name == "svhn":
        members = {
            "train_32x32.mat": mat(x[train], y[train]),
            "test_32x32.mat": mat(x[test], y[test], compressed=False),
        }
        files = members
    elif name == "cifar10":
        fifth = TRAIN // 5
        members = {
            f"cifar-10-batches-bin/data_batch_{batch + 1}.bin": cifar(x[part], y[part])
            for batch in range(5)
            for part in [slice(batch * fifth, (batch + 1) * fifth)]
        }
        members["cifar-10-batches-bin/test_batch.bin"] = cifar(x[test], y[test])
        # The order in the archive is not that of the batches.
        files = {"cifar-10-binary.tar.gz": tar(dict(reversed(members.items())))}
    else:
        members = {
            "cifar-100-binary/train.bin": cifar(x[train], y[train] % 20, y[train]),
            "cifar-100-binary/test.bin": cifar(x[test], y[test] % 20, y[test]),
        }
        extra = {"cifar-100-binary/fine_label_names.txt": b"apple\n"}
        files = {"cifar-100-binary.tar.gz": tar({**extra, **members})}
    return Small(name, x, y, files, members)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Small]:
    """Put a small set into the registry; if ``called`` is None, only its files' hashes."""

    def put(name: str, *sources: str, called: str | None = "official") -> Small:
        set_ = small(name)
        content = set_.x.tobytes() + set_.y.astype(np.int64).tobytes()
        benchmark = replace(
            BENCHMARKS[name],
            train_size=TRAIN,
            sources=sources,
            files=tuple(
                replace(file, sha256=sha256(set_.files[file.name]))
                for file in BENCHMARKS[name].files
            ),
            contents={sha256(content): called} if called else {},
        )
        monkeypatch.setitem(BENCHMARKS, name, benchmark)
        return set_

    return put


# --- A server ---


@dataclass
class Server:
    """A server's files and behaviour, and its requests: path and first byte."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[tuple[str, int]] = field(default_factory=list)
    ranges: bool = True
    cuts: list[int] = field(default_factory=list)  # cut the next responses after so many bytes

    def put(self, folder: str, files: dict[str, bytes]) -> str:
        """Serve files in a folder; return its address."""
        self.files.update({f"/{folder}/{name}": content for name, content in files.items()})
        return f"{self.url}/{folder}/"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("NO_PROXY", "*")
    here = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = here.files.get(self.path)
            start = int(self.headers.get("Range", "bytes=0-")[len("bytes=") : -1])
            here.asked.append((self.path, start))
            if content is None:
                return self.send_error(404)
            if not here.ranges:
                start = 0
            if start and start >= len(content):
                return self.send_error(416)
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/*")
            self.send_header("Content-Length", str(len(content) - start))
            if self.path.endswith(".gz"):  # as some servers do, meaning the file's own encoding
                self.send_header("Content-Encoding", "x-gzip")
            self.end_headers()
            self.wfile.write(content[start:][: here.cuts.pop(0) if here.cuts else None])

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        here.url = f"http://127.0.0.1:{http.server_port}"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield here
        http.shutdown()
        thread.join()


# --- Official files that are present ---


@pytest.mark.parametrize("unpacked", [False, True], ids=["packed", "unpacked"])
@pytest.mark.parametrize("name", NAMES)
def test_official_files_are_read(
    name: str, unpacked: bool, known: Callable[..., Small], tmp_path: Path
) -> None:
    set_ = known(name)
    set_.write(tmp_path / name, unpacked=unpacked)
    set_.is_in(load(name, tmp_path))


@pytest.mark.parametrize("unpacked", [False, True], ids=["packed", "unpacked"])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "fashion-mnist"])
def test_official_files_may_be_in_the_root_folder(
    name: str, unpacked: bool, known: Callable[..., Small], tmp_path: Path
) -> None:
    set_ = known(name)
    set_.write(tmp_path, unpacked=unpacked)
    set_.is_in(load(name, str(tmp_path)))


def test_sets_with_equal_file_names_do_not_mix(known: Callable[..., Small], tmp_path: Path) -> None:
    known("mnist").write(tmp_path)
    known("fashion-mnist")
    with pytest.raises(FileNotFoundError, match="fashion-mnist"):
        load("fashion-mnist", tmp_path)


def test_cached_arrays_are_memory_mapped(known: Callable[..., Small], tmp_path: Path) -> None:
    set_ = known("svhn")
    set_.write(tmp_path)
    first = load("svhn", tmp_path)
    for file in tmp_path.glob("*.mat"):
        file.unlink()
    again = load("svhn", tmp_path)
    set_.is_in(again)
    assert again.sha256 == first.sha256
    assert sorted(os.listdir(tmp_path / "svhn")) == ["arrays.sha256", "labels.npy", "pictures.npy"]
    pictures = np.load(tmp_path / "svhn" / "pictures.npy", mmap_mode="r")
    np.testing.assert_array_equal(pictures, set_.x)
    again.features.zero_()  # in memory, not in the file
    set_.is_in(load("svhn", tmp_path))


def test_loading_needs_nothing_for_downloads(
    known: Callable[..., Small], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("pooch", "requests", "urllib3"):
        monkeypatch.setitem(sys.modules, module, None)
    set_ = known("cifar10")
    set_.write(tmp_path)
    set_.is_in(load("cifar10", tmp_path))


def test_arrays_that_cannot_be_cached(known: Callable[..., Small], tmp_path: Path) -> None:
    set_ = known("mnist")
    set_.write(tmp_path)
    (tmp_path / "mnist").write_text("where the folder should be")
    with pytest.warns(UserWarning, match="could not be cached"):
        set_.is_in(load("mnist", tmp_path))


def test_missing_files_are_named(known: Callable[..., Small], tmp_path: Path) -> None:
    set_ = known("mnist")
    set_.write(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(FileNotFoundError) as complaint:
        load("mnist", tmp_path)
    message = str(complaint.value)
    assert message.startswith("mnist needs t10k-labels-idx1-ubyte.gz, packed or unpacked, in ")
    assert f"{tmp_path / 'mnist'} or {tmp_path}: run " in message
    assert f"pseudograd data fetch mnist --data-dir {tmp_path}" in message
    assert "PSEUDOGRAD_DATA" in message


@pytest.mark.parametrize("call", [load, fetch])
def test_unknown_names(call: Callable[[str], Dataset]) -> None:
    with pytest.raises(ValueError, match=r"name must be one of mnist, .*, not 'mnits'"):
        call("mnits")


# --- Damaged or wrong files ---


def without_last(name: str) -> bytes:
    return tar(dict(list(small(name).members.items())[:-1]))


def other_variables() -> bytes:
    from scipy.io import savemat

    file = io.BytesIO()
    savemat(file, {"X": np.zeros((2, 2))})
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "file", "damage", "reason"),
    [
        ("mnist", "t10k-images-idx3-ubyte.gz", lambda c: c[:-100], "end-of-stream"),
        ("mnist", "t10k-images-idx3-ubyte.gz", lambda c: c[:40] + b"?" * 9 + c[49:], ""),
        ("mnist", "t10k-images-idx3-ubyte.gz", lambda _: b"<html>", "gzip"),
        ("mnist", "t10k-images-idx3-ubyte.gz", lambda _: b"", "IDX"),
        ("mnist", "t10k-images-idx3-ubyte.gz", lambda _: gzip.compress(b"\0\0\r\3"), "IDX"),
        ("mnist", "t10k-images-idx3-ubyte.gz", lambda _: gzip.compress(b"\0\0\b\3\0"), "IDX"),
        (
            "mnist",
            "t10k-images-idx3-ubyte.gz",
            lambda c: gzip.compress(gzip.decompress(c)[:-1]),
            "39200 bytes, but 39199",
        ),
        ("svhn", "train_32x32.mat", lambda c: c[:-100], "SciPy"),
        ("svhn", "train_32x32.mat", lambda _: b"<html>" * 100, "SciPy"),
        ("svhn", "train_32x32.mat", lambda _: b"", "SciPy"),
        ("svhn", "train_32x32.mat", lambda _: other_variables(), "images X"),
        ("cifar10", "cifar-10-binary.tar.gz", lambda c: c[: len(c) // 2], ""),
        ("cifar10", "cifar-10-binary.tar.gz", lambda _: b"<html>", "gzip"),
        ("cifar10", "cifar-10-binary.tar.gz", lambda _: without_last("cifar10"), "test_batch.bin"),
        (
            "cifar100",
            "cifar-100-binary.tar.gz",
            lambda _: tar({**small("cifar100").members, "cifar-100-binary/test.bin": b"abc"}),
            "3 bytes are not a multiple of an example's 3074",
        ),
    ],
)
def test_damaged_files_are_named(
    name: str,
    file: str,
    damage: Callable[[bytes], bytes],
    reason: str,
    known: Callable[..., Small],
    tmp_path: Path,
) -> None:
    set_ = known(name)
    set_.files[file] = damage(set_.files[file])
    set_.write(tmp_path)
    with pytest.raises(ValueError) as complaint:
        load(name, tmp_path)
    message = str(complaint.value)
    assert message.startswith(f"{tmp_path / file} cannot be read as the official {file} (")
    assert reason in message
    assert f"remove it, and run `pseudograd data fetch {name}" in message
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("pair", [("t10k-labels", "train-labels"), ("t10k-images", "t10k-labels")])
def test_files_that_do_not_fit_together(
    pair: tuple[str, str], known: Callable[..., Small], tmp_path: Path
) -> None:
    set_ = known("mnist")
    one, other = (next(file for file in set_.files if file.startswith(start)) for start in pair)
    set_.files[one], set_.files[other] = set_.files[other], set_.files[one]
    set_.write(tmp_path)
    with pytest.raises(ValueError, match=r"mnist in .* do not fit together .*data fetch mnist"):
        load("mnist", tmp_path)


def swapped(set_: Small) -> dict[str, bytes]:
    """Return the same files with two test labels swapped."""
    y = set_.y[TRAIN:].copy()
    first = int(np.flatnonzero(y != y[0])[0])
    y[[0, first]] = y[[first, 0]]
    if set_.name == "svhn":
        return {**set_.files, "test_32x32.mat": mat(set_.x[TRAIN:], y)}
    return {**set_.files, "t10k-labels-idx1-ubyte.gz": gzip.compress(idx(y))}


@pytest.mark.parametrize("called", ["official", "re-cropped", None])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "svhn"])
def test_unknown_content_is_refused(
    name: str, called: str | None, known: Callable[..., Small], tmp_path: Path
) -> None:
    set_ = replace(known(name, called=called), files=swapped(small(name)))
    set_.write(tmp_path / name)
    with pytest.raises(ValueError, match=f"the content of {name} in ") as complaint:
        load(name, tmp_path)
    message = str(complaint.value)
    benchmark = BENCHMARKS[name]
    for listed, title in benchmark.contents.items():
        assert f"{listed} ({title})" in message
    for file in benchmark.files:
        assert (file.sha256 in message) == (called != "official")
    assert f"pseudograd data fetch {name}" in message
    assert not (tmp_path / name / "arrays.sha256").exists()


def test_unlisted_content_is_accepted_by_the_checksums_of_its_files(
    known: Callable[..., Small], tmp_path: Path
) -> None:
    set_ = known("svhn", called=None)
    set_.write(tmp_path)
    data = load("svhn", tmp_path)
    set_.is_in(data)
    assert variant("svhn", data.sha256) is None
    set_.is_in(load("svhn", tmp_path))


@pytest.mark.parametrize("unpacked", [False, True], ids=["packed anew", "unpacked"])
def test_without_these_checksums_it_is_refused(
    unpacked: bool, known: Callable[..., Small], tmp_path: Path
) -> None:
    set_ = known("fashion-mnist", called=None)
    for name, content in set_.files.items():
        set_.files[name] = gzip.compress(gzip.decompress(content), 1, mtime=1)
    set_.write(tmp_path / "fashion-mnist", unpacked=unpacked)
    with pytest.raises(ValueError, match="the content of fashion-mnist"):
        load("fashion-mnist", tmp_path)


def test_listed_content_may_be_recompressed(known: Callable[..., Small], tmp_path: Path) -> None:
    set_ = known("mnist")
    for name, content in set_.files.items():
        set_.files[name] = gzip.compress(gzip.decompress(content), 1, mtime=1)
    set_.write(tmp_path)
    data = load("mnist", tmp_path)
    set_.is_in(data)
    assert variant("mnist", data.sha256) == "official"


def test_a_content_has_the_name_that_the_registry_gives_it() -> None:
    listed = {called: sha256 for sha256, called in BENCHMARKS["svhn"].contents.items()}
    assert variant("svhn", listed["re-cropped"]) == "re-cropped"
    assert variant("mnist", listed["re-cropped"]) is None


def objects(folder: Path) -> None:
    np.save(folder / "labels.npy", np.array([{}] * (TRAIN + TEST)), allow_pickle=True)


def one_bit(folder: Path) -> None:
    content = bytearray((folder / "pictures.npy").read_bytes())
    content[-1] ^= 1
    (folder / "pictures.npy").write_bytes(content)


def cut(folder: Path) -> None:
    content = (folder / "pictures.npy").read_bytes()
    (folder / "pictures.npy").write_bytes(content[:-1])


def consistent(folder: Path) -> None:
    """Change the arrays and the hash stored with them."""
    one_bit(folder)
    pictures, labels = (np.load(folder / name) for name in ("pictures.npy", "labels.npy"))
    content = pictures.tobytes() + labels.astype(np.int64).tobytes()
    (folder / "arrays.sha256").write_text(sha256(content))


def removed(folder: Path) -> None:
    (folder / "labels.npy").unlink()


@pytest.mark.parametrize("damage", [objects, one_bit, cut, consistent, removed])
def test_damaged_arrays_are_refused(
    damage: Callable[[Path], None], known: Callable[..., Small], tmp_path: Path
) -> None:
    known("mnist").write(tmp_path)
    load("mnist", tmp_path)
    damage(tmp_path / "mnist")
    with pytest.raises(
        ValueError, match=r"arrays of mnist in .* are damaged .*remove pictures.npy"
    ):
        load("mnist", tmp_path)


# --- Downloads ---


@pytest.mark.parametrize("name", NAMES)
def test_fetch(name: str, known: Callable[..., Small], server: Server, tmp_path: Path) -> None:
    set_ = known(name, f"{server.url}/official/")
    server.put("official", set_.files)
    set_.is_in(fetch(name, tmp_path))
    assert server.asked == [(f"/official/{file}", 0) for file in set_.files]
    assert sorted(os.listdir(tmp_path / name)) == sorted(
        [*set_.files, "arrays.sha256", "labels.npy", "pictures.npy"]
    )
    for file in set_.files:  # the arrays are enough
        (tmp_path / name / file).unlink()
    set_.is_in(fetch(name, tmp_path))
    assert len(server.asked) == len(set_.files)


def test_fetch_uses_existing_files(
    known: Callable[..., Small], server: Server, tmp_path: Path
) -> None:
    set_ = known("mnist", f"{server.url}/official/")
    server.put("official", set_.files)
    set_.write(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte.gz").unlink()
    set_.is_in(fetch("mnist", tmp_path))
    assert server.asked == [("/official/train-labels-idx1-ubyte.gz", 0)]


def test_fetch_keeps_files_that_it_did_not_download(
    known: Callable[..., Small], server: Server, tmp_path: Path
) -> None:
    set_ = known("svhn", f"{server.url}/official/")
    server.put("official", set_.files)
    set_.write(tmp_path)
    (tmp_path / "test_32x32.mat").write_text("somebody's own")
    with pytest.raises(ValueError, match=r"test_32x32.mat cannot be read"):
        fetch("svhn", tmp_path)
    assert (tmp_path / "test_32x32.mat").read_text() == "somebody's own"
    assert server.asked == []


CONTENT = np.random.default_rng(0).bytes(400_000)


def get(server: Server, folder: Path, *sources: str) -> None:
    """Download CONTENT as "a.bin" from folders of the server."""
    urls = [f"{server.url}/{source}/a.bin" for source in sources]
    download(urls, folder / "a.bin", sha256(CONTENT), restart="the command")
    assert (folder / "a.bin").read_bytes() == CONTENT
    assert os.listdir(folder) == ["a.bin"]


def test_a_broken_connection_resumes(server: Server, tmp_path: Path) -> None:
    server.put("x", {"a.bin": CONTENT})
    server.cuts = [150_000, 100_000]
    get(server, tmp_path, "x")
    starts = [start for _, start in server.asked]
    assert 0 == starts[0] < starts[1] <= 150_000
    assert starts[1] < starts[2] <= 250_000
    assert len(starts) == 3


def test_an_interrupted_download_resumes(server: Server, tmp_path: Path) -> None:
    server.put("x", {"a.bin": CONTENT})
    (tmp_path / "a.bin.part").write_bytes(CONTENT[:123_456])
    get(server, tmp_path, "x")
    assert server.asked == [("/x/a.bin", 123_456)]


def test_a_complete_but_unchecked_download(server: Server, tmp_path: Path) -> None:
    server.put("x", {"a.bin": CONTENT})
    (tmp_path / "a.bin.part").write_bytes(CONTENT)
    get(server, tmp_path, "x")


@pytest.mark.parametrize("part", [CONTENT[:1000], b"wrong" * 1000, CONTENT + b"more"])
def test_a_server_without_range_requests(part: bytes, server: Server, tmp_path: Path) -> None:
    server.put("x", {"a.bin": CONTENT})
    server.ranges = False
    (tmp_path / "a.bin.part").write_bytes(part)
    get(server, tmp_path, "x")


def test_a_file_is_downloaded_by_one_process_at_a_time(server: Server, tmp_path: Path) -> None:
    pytest.importorskip("fcntl", reason="needs POSIX's locks")
    server.put("x", {"a.bin": CONTENT})
    busy = pytest.raises(BlockingIOError, match=r"another process is using .*a\.bin\.part")
    with locked(tmp_path / "a.bin.part"), busy:
        get(server, tmp_path, "x")
    assert server.asked == []
    get(server, tmp_path, "x")


def test_retries_are_limited(server: Server, tmp_path: Path) -> None:
    server.put("x", {"a.bin": CONTENT})
    server.ranges = False
    server.cuts = [150_000] * 10
    with pytest.raises(OSError, match=r"a\.bin could not be downloaded"):
        get(server, tmp_path, "x")
    assert len(server.asked) == 2


def test_partial_downloads_are_kept(server: Server, tmp_path: Path) -> None:
    server.put("x", {"a.bin": CONTENT})
    server.cuts = [150_000, 0]
    with pytest.raises(OSError, match="run `the command` later to resume"):
        get(server, tmp_path, "x")
    assert os.listdir(tmp_path) == ["a.bin.part"]
    kept = (tmp_path / "a.bin.part").read_bytes()
    assert kept
    assert CONTENT.startswith(kept)
    get(server, tmp_path, "x")
    assert server.asked[-1] == ("/x/a.bin", len(kept))


@pytest.mark.parametrize("wrong", [b"<html>", CONTENT[:-1], CONTENT[:-1] + b"?", CONTENT + b"?"])
def test_a_wrong_file_is_removed(wrong: bytes, server: Server, tmp_path: Path) -> None:
    server.put("x", {"a.bin": wrong})
    with pytest.raises(OSError) as complaint:
        get(server, tmp_path, "x")
    message = str(complaint.value)
    assert message.startswith(f"a.bin could not be downloaded ({server.url}/x/a.bin gave a file")
    assert f"SHA-256 is not {sha256(CONTENT)}, so it was removed" in message
    assert message.count("\n") == 0
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("first", [None, b"<html>", CONTENT[:-1] + b"?"])
def test_another_source_is_tried(first: bytes | None, server: Server, tmp_path: Path) -> None:
    if first is not None:
        server.put("x", {"a.bin": first})
    server.put("y", {"a.bin": CONTENT})
    get(server, tmp_path, "x", "y")
    assert [path for path, _ in server.asked] == ["/x/a.bin", "/y/a.bin"]


def test_another_source_resumes_a_partial_download(server: Server, tmp_path: Path) -> None:
    for source in "xy":
        server.put(source, {"a.bin": CONTENT})
    server.cuts = [150_000, 0]
    get(server, tmp_path, "x", "y")
    (_, first), (_, again), (path, other) = server.asked
    assert path == "/y/a.bin"
    assert 0 == first < again == other


def test_a_wrong_part_does_not_spoil_the_other_source(server: Server, tmp_path: Path) -> None:
    for source in "xy":
        server.put(source, {"a.bin": CONTENT})
    (tmp_path / "a.bin.part").write_bytes(b"wrong" * 1000)
    get(server, tmp_path, "x", "y")
    assert server.asked == [("/x/a.bin", 5000), ("/y/a.bin", 0)]


def test_when_all_sources_fail_all_are_named(server: Server, tmp_path: Path) -> None:
    server.put("y", {"a.bin": b"<html>"})
    with pytest.raises(OSError) as complaint:
        get(server, tmp_path, "x", "y")
    message = str(complaint.value)
    assert f"{server.url}/x/a.bin: 404" in message
    assert f"{server.url}/y/a.bin gave a file" in message
    assert f"put the file into {tmp_path}" in message


def test_an_unreachable_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "*")
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as http:
        port = http.server_port
    url = f"http://127.0.0.1:{port}/a.bin"
    with pytest.raises(OSError, match=r"could not be downloaded \(http.*refused.*put the file"):
        download([url], tmp_path / "a.bin", "0" * 64, restart="the command")


# --- The folder, names, and the command ---


def test_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PSEUDOGRAD_DATA", raising=False)
    assert "pseudograd" in str(data_folder())
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(ImportError, match="PSEUDOGRAD_DATA"):
        data_folder()
    monkeypatch.setenv("PSEUDOGRAD_DATA", str(tmp_path))
    assert data_folder() == tmp_path
    assert data_folder("elsewhere") == Path("elsewhere")


@pytest.mark.parametrize("name", NAMES)
def test_open_data(name: str, known: Callable[..., Small], tmp_path: Path) -> None:
    set_ = known(name)
    set_.write(tmp_path / name)
    data, encoder = open_data(name, data_dir=tmp_path, target=None)
    set_.is_in(data)
    assert encoder.pixels == BENCHMARKS[name].shape
    assert encoder.labels == tuple(range(100 if name == "cifar100" else 10))
    with pytest.raises(ValueError, match="'target' cannot be set"):
        open_data(name, data_dir=tmp_path, target="y")


def run(*arguments: str | Path) -> Any:
    parser = Parser(prog="pseudograd")
    data_command(parser.add_subparsers())
    options = parser.parse_args(["data", *map(str, arguments)])
    return options.run(options)


def test_data_fetch_and_list(
    known: Callable[..., Small], server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    set_ = known("svhn", f"{server.url}/x/", called="re-cropped")
    official = known("fashion-mnist", f"{server.url}/x/", called=None)
    server.put("x", {**set_.files, **official.files})
    run("fetch", "svhn", "fashion-mnist", "--data-dir", tmp_path)
    fetched = capsys.readouterr().out.splitlines()
    assert fetched[0].split() == (
        ["svhn", "100", "+", "50", "3072", "0", "re-cropped", load("svhn", tmp_path).sha256]
    )
    (tmp_path / "train_32x32.mat").write_text("of no use, but of no harm either")
    known("mnist").write(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_text("damaged")
    run("list", "--data-dir", tmp_path)
    folder, _, *rows = capsys.readouterr().out.splitlines()
    assert folder == f"folder: {tmp_path}"
    assert [row.split()[0] for row in rows] == NAMES
    assert "cannot be read" in rows[0]
    assert rows[1:3] == [fetched[1], fetched[0]]
    assert rows[1].split()[-2] == "official"
    assert rows[3:] == [f"{name:14}not found" for name in ("cifar10", "cifar100")]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [((), "ACTION"), (("fetch",), "NAME"), (("fetch", "mnits"), "mnits"), (("drop",), "drop")],
)
def test_bad_commands(
    arguments: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        run(*arguments)
    assert exit_.value.code == 2
    complaint = capsys.readouterr().err
    assert named in complaint
    assert complaint.count("\n") == 1


# --- The registry, and the real sets ---


def test_the_registry_is_well_formed() -> None:
    hashes = [
        listed
        for benchmark in BENCHMARKS.values()
        for listed in (*(file.sha256 for file in benchmark.files), *benchmark.contents)
    ]
    assert len(set(hashes)) == len(hashes)
    assert all(len(bytes.fromhex(listed)) == 32 for listed in hashes)
    for benchmark in BENCHMARKS.values():
        assert all(source.startswith("http") and source[-1] == "/" for source in benchmark.sources)
        assert all(isinstance(file, File) and file.members for file in benchmark.files)


@pytest.mark.parametrize("read", [read_idx, read_cifar10, read_svhn])
def test_readers_never_unpickle(read: Callable[[io.BytesIO], object]) -> None:
    pickled = b"cos\nsystem\n(S'false'\ntR."
    with pytest.raises(ValueError):
        read(io.BytesIO(pickled))


# SHA-256 of each array: training images and labels, test images and labels, all of type uint8.
ARRAYS = {
    "mnist": (
        "741c988805d008ac6e4c904b69001ba184c24b2c540a4ef403f4c71b676cf757",
        "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13",
        "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161",
        "ddeff807876a9661a1110d45c266c86239a3a1b7d37da0c3716a7a683c852ff5",
    ),
    "svhn": (  # re-cropped
        "2ad6a4d495b01bbee807888f2c432ea3d33b94330a2d0feb0120ca20c8993b82",
        "6a6e359bb9ecc6ce40896703f7b224715776155fe39710e0ddb8008a18172c6f",
        "a2abccfbdf457b8d7a2d6f2fc54ce3d1df8a5979f409ffe120e189c216a1d32a",
        "c2488ef300c629f4bd90a3d2a7b4141589e5b5a4f9046845dfc1a9021319e31a",
    ),
    "cifar10": (
        "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
        "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
        "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
        "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
    ),
    "cifar100": (
        "4e457917601a66aed021f5fa37957b56c6319557c0a8ed5484de3c390af45430",
        "9f11b9f97aad759ba6df0a33e3218b01d8deaf4ed3a14aa1185d69b9ad7ebcb3",
        "4cb8e5d9309da489bf6b19cc10cd96c3ae6f8daf225380b605aaee4c0d6aee19",
        "4dad7d09c7c97d33f6cb928d705cf4196221316fd6e31bdd978a08ed9103ee0b",
    ),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_the_real_sets(name: str, tmp_path: Path) -> None:
    """From the official files, without arrays that may be cached with them."""
    folder = os.environ.get("PSEUDOGRAD_DATA")
    if folder is None:
        pytest.skip("PSEUDOGRAD_DATA names no folder with the official files")
    (tmp_path / name).mkdir()
    for place in (Path(folder, name), Path(folder)):
        for entry in place.glob("*"):
            link = tmp_path / name / entry.name
            if entry.name != "arrays.sha256" and not link.exists():
                link.symlink_to(entry.resolve())
    try:
        data = load(name, tmp_path)
    except FileNotFoundError:
        pytest.skip(f"PSEUDOGRAD_DATA has no official files of {name}")
    if variant(name, data.sha256) is None:
        pytest.skip(f"this {name} is known by the checksums of its files only")
    images, labels = data.features.numpy(), data.labels.numpy().astype(np.uint8)
    train, test = slice(data.train_size), slice(data.train_size, None)
    parts = (images[train], labels[train], images[test], labels[test])
    assert tuple(sha256(part.tobytes()) for part in parts) == ARRAYS[name]
