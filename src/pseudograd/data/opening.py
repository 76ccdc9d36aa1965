"""Open a table's file: plain or compressed, from disk or standard input."""

from __future__ import annotations

import bz2
import codecs
import contextlib
import gzip
import io
import lzma
import stat
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from pseudograd.data.columns import Refusal
from pseudograd.data.memory import HARMLESS, MOST_TIMES, available, check_size

_UNPACKED: dict[str, Callable[..., Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
}
COMPRESSIONS = (*_UNPACKED, ".zip")
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_BEGINNINGS = {
    b"\x1f\x8b": ".gz",
    b"BZh": ".bz2",
    b"\xfd7zXZ": ".xz",
    b"PAR1": ".parquet",
    b"ARROW1": ".feather",
    b"{": ".jsonl",
}


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[BinaryIO, str]]:
    """Open a file for reading, or standard input if the path is "-", and decompress it.

    Yields the open file and the suffix of its format.
    """
    if str(path) == "-":
        most = available() // 4
        too_large = f"holds more than {most / 2**20:,.0f} MB: save it as a file, and name that"
        content = _bounded(sys.stdin.buffer, most, too_large, any_format=True)
        yield _unpacked(io.BytesIO(content), _suffix_of(content), len(content), path)
        return
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: check the path")
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        what = "a folder" if stat.S_ISDIR(found.st_mode) else "a device or a pipe"
        raise Refusal(f"is {what}: name a file, or - for standard input")
    check_size(found.st_size, "has")
    with path.open("rb") as file:
        yield _unpacked(file, path.suffix.lower(), found.st_size, path)


def _unpacked(file: BinaryIO, suffix: str, size: int, path: Path) -> tuple[BinaryIO, str]:
    """Decompress a file in memory, up to a limit for tables."""
    if suffix not in COMPRESSIONS:
        return file, suffix
    most = min(max(HARMLESS, MOST_TIMES * size), available() // 4)
    too_large = (
        f"is not read: it decompresses to more than {most / 2**20:,.0f} MB, far more than a table "
        "would; decompress it yourself if that is right"
    )
    inner = Path(path.stem).suffix.lower()
    if suffix == ".zip":
        with zipfile.ZipFile(file) as archive:
            members = [one for one in archive.infolist() if not one.is_dir()]
            if len(members) != 1:
                raise Refusal(f"contains {len(members)} files: make an archive of a single one")
            inner = Path(members[0].filename).suffix.lower()
            with archive.open(members[0]) as unpacked:
                content = _bounded(cast(BinaryIO, unpacked), most, too_large)
    else:
        with _UNPACKED[suffix](file) as unpacked:
            content = _bounded(unpacked, most, too_large)
    return io.BytesIO(content), inner or _suffix_of(content)


def _bounded(file: BinaryIO, most: int, too_large: str, any_format: bool = False) -> bytes:
    """Return the content of a file; raise if it exceeds ``most`` bytes.

    With ``any_format``, raise also if it is neither text nor a known binary format.
    """
    parts: list[bytes] = []
    size = 0
    while part := file.read(2**20):
        known = part.startswith((*_BEGINNINGS, b"PK\x03\x04", *_UTF_16))
        if any_format and not parts and b"\0" in part and not known:
            raise Refusal("is not a text file: save it again as UTF-8")
        size += len(part)
        if size > most:
            raise Refusal(too_large)
        parts.append(part)
    return b"".join(parts)


def _suffix_of(content: bytes) -> str:
    """Return the suffix of the format that a file's first bytes indicate."""
    if content.startswith(b"PK\x03\x04"):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            names = archive.namelist()
        if any(name.startswith("xl/") for name in names):
            return ".xlsx"
        return ".npz" if all(name.endswith(".npy") for name in names) else ".zip"
    found = (suffix for start, suffix in _BEGINNINGS.items() if content.startswith(start))
    return next(found, ".csv")
