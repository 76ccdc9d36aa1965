"""Downloads that resume where they stopped, from the first source that has the right file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from pseudograd.extras import needed_for
from pseudograd.files import UNFINISHED, locked

_CHUNK = 1 << 16  # at most this is lost when a connection breaks
_TIMEOUT = (10, 60)  # seconds to connect, and to wait for the next bytes


def download(
    urls: Sequence[str], path: Path, sha256: str, *, restart: str, progress: bool = False
) -> None:
    """Download a file, and move it into place once its checksum is right.

    Until then it has ``.part`` at the end of its name.

    Args:
        urls: Its sources, in the order they are tried.
        path: Where it goes.
        sha256: Its checksum.
        restart: The command that resumes the download, for the message.
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
        f"{path.name} could not be downloaded ({'; '.join(reasons)}): run `{restart}` later to go "
        f"on, or put the file into {path.parent}"
    )


def _complete(url: str, part: Path, progress: bool) -> None:
    """Resume a partial file until it is complete, as long as each connection adds to it."""
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
    """Append the missing bytes, by one request."""
    import requests
    import urllib3
    from tqdm import tqdm

    start = part.stat().st_size if part.exists() else 0
    # The file as it is stored, neither compressed on the way nor decompressed.
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
    try:
        with requests.get(url, headers=headers, stream=True, timeout=_TIMEOUT) as response:
            if start and response.status_code == requests.codes.requested_range_not_satisfiable:
                return  # there is no more; the checksum tells whether it is complete
            response.raise_for_status()
            if not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
                start = 0  # the server sends all of it
            length = response.headers.get("Content-Length")
            with (
                part.open("ab" if start else "wb") as file,
                # With ``disable=None`` tqdm shows itself only on a terminal.
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
        while cause.__context__:  # the first one is the shortest
            cause = cause.__context__
        raise ConnectionError(str(cause)) from problem
