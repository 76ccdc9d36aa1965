"""Resumable downloads from the first source that has the right file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from pseudograd.extras import needed_for
from pseudograd.files import UNFINISHED, locked

_CHUNK = 1 << 16  # bytes that are lost at most when a connection breaks
_TIMEOUT = (10, 60)  # seconds to connect, and between bytes


def download(
    urls: Sequence[str], path: Path, sha256: str, *, restart: str, progress: bool = False
) -> None:
    """Download a file, and move it into place once its checksum matches.

    Until then its name ends in ``.part``.

    Args:
        urls: The sources, tried in this order.
        path: The destination.
        sha256: The expected checksum.
        restart: The command that resumes the download, for the error message.
        progress: Whether to show a progress bar on a terminal.

    """
    with needed_for("downloading"):
        import pooch

    part = path.with_name(path.name + UNFINISHED)

    def downloader(url: str, output_file: str, _: object) -> None:
        with locked(part):
            _complete(url, part, progress)
            os.replace(part, output_file)

    reasons = []
    for url in urls:
        try:
            pooch.retrieve(url, sha256, path.name, path.parent, downloader=downloader)
            return
        except ValueError:  # the wrong checksum: pooch has removed the file
            reasons.append(f"{url} gave a file whose SHA-256 is not {sha256}, so it was removed")
        except ConnectionError as problem:
            reasons.append(f"{url}: {problem}")
    raise OSError(
        f"{path.name} could not be downloaded ({'; '.join(reasons)}): run `{restart}` later to "
        f"resume, or put the file into {path.parent}"
    )


def _complete(url: str, part: Path, progress: bool) -> None:
    """Download the rest of a partial file, reconnecting as long as each attempt makes progress."""
    most = 0
    while True:
        try:
            return _append(url, part, progress)
        except ConnectionError:
            size = part.stat().st_size if part.exists() else 0
            if not size:
                part.unlink(missing_ok=True)
            if size <= most:
                raise
            most = size


def _append(url: str, part: Path, progress: bool) -> None:
    """Append the missing bytes with one request."""
    import requests
    import urllib3
    from tqdm import tqdm

    start = part.stat().st_size if part.exists() else 0
    # The stored bytes: no compression in transit.
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
    try:
        with requests.get(url, headers=headers, stream=True, timeout=_TIMEOUT) as response:
            if start and response.status_code == requests.codes.requested_range_not_satisfiable:
                return  # nothing is left; the checksum decides
            response.raise_for_status()
            if not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
                start = 0  # the server ignored the range
            length = response.headers.get("Content-Length")
            with (
                part.open("ab" if start else "wb") as file,
                # With ``disable=None`` tqdm draws only on a terminal.
                tqdm(
                    desc=part.stem,
                    total=start + int(length) if length else None,
                    initial=start,
                    unit="B",
                    unit_scale=True,
                    leave=False,
                    disable=None if progress else True,
                ) as bar,
            ):
                for chunk in response.raw.stream(_CHUNK, decode_content=False):
                    file.write(chunk)
                    bar.update(len(chunk))
    except (requests.RequestException, urllib3.exceptions.HTTPError) as problem:
        cause: BaseException = problem
        while cause.__context__:  # the root cause has the shortest message
            cause = cause.__context__
        raise ConnectionError(str(cause)) from problem
