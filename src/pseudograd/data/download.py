"""Downloads that go on where they stopped, from whichever source has the right file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from pseudograd.extras import needed_for
from pseudograd.files import UNFINISHED, locked

_CHUNK = 1 << 16  # what is lost at most when a connection breaks
_TIMEOUT = (10, 60)  # seconds to connect, and to wait for the next bytes


def download(
    urls: Sequence[str], path: Path, sha256: str, *, restart: str, progress: bool = False
) -> None:
    """Download a file, and put it in its place once its checksum is right.

    What has come is kept in a file of the same name with ``.part`` at its end until all is there.

    Args:
        urls: Where it may be had, in the order they are tried.
        path: Where it goes.
        sha256: Its checksum.
        restart: The command that goes on with an interrupted download, for the complaint.
        progress: Whether to show a progress bar, if there is a terminal.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "empty.txt")
        >>> path.touch()
        >>> sha256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
        >>> download(["http://localhost/empty.txt"], path, sha256, restart="")  # it is there

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
        except ValueError:  # pooch has removed it
            reasons.append(f"{url} gave a file whose SHA-256 is not {sha256}, so it was removed")
        except ConnectionError as problem:
            reasons.append(f"{url}: {problem}")
    raise OSError(
        f"{path.name} could not be downloaded ({'; '.join(reasons)}): run `{restart}` later to go "
        f"on, or put the file into {path.parent}"
    )


def _complete(url: str, part: Path, progress: bool) -> None:
    """Go on with a partial file until it is complete, as long as each connection adds to it."""
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
    """Add the bytes that are missing, by one request."""
    import requests
    import urllib3
    from tqdm import tqdm

    start = part.stat().st_size if part.exists() else 0
    # The file as it is stored: no compression on the way, and none undone that is its own.
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
    try:
        with requests.get(url, headers=headers, stream=True, timeout=_TIMEOUT) as response:
            if start and response.status_code == requests.codes.requested_range_not_satisfiable:
                return  # there is no more: the checksum says whether it is all
            response.raise_for_status()
            if not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
                start = 0  # all of it is sent
            length = response.headers.get("Content-Length")
            with (
                part.open("ab" if start else "wb") as file,
                # On a terminal only: tqdm looks for one if ``disable`` is None.
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
        while cause.__context__:  # the first of them says it in a few words
            cause = cause.__context__
        raise ConnectionError(str(cause)) from problem
