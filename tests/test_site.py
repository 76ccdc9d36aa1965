"""The documents as a site: it builds without a warning, is complete, and needs no other server."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

pytest.importorskip("mkdocstrings", reason="needs the dependency group docs")

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    *_, packed = (site / "objects.inv").read_bytes().split(b"\n", 4)
    listed = {line.split()[0] for line in zlib.decompress(packed).decode().splitlines()}
    rooms = ("", ".data", ".fleet", ".jax", ".rules", ".schedules", ".search")
    public = {
        f"pseudograd{room}.{name}"
        for room in rooms
        for name in importlib.import_module(f"pseudograd{room}").__all__
    }
    public |= {"pseudograd.Study", "pseudograd.TunableMLPClassifier"}
    # A function with its module's name is listed under the module.
    listed |= {name.rpartition(".")[0] for name in listed}
    assert public - listed == set()


@pytest.mark.parametrize(
    ("page", "summary"),
    [
        ("data", "Load a table as a data set"),
        ("fleet", "Trains many trials of one architecture at once"),
        ("rules", "Return the pseudo-gradient of Eq. 5"),
        ("schedules", "Change k linearly"),
        ("search", "A search for the best k and learning rate"),
    ],
)
def test_the_reference_has_descriptions(site: Path, page: str, summary: str) -> None:
    assert summary in (site / "reference" / page / "index.html").read_text("utf-8")


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    loads = re.compile(r"""<(?:script|img|link|iframe)\b[^>]*\b(?:src|href)=["']?https?://[^>]*""")
    loaded = {
        (path.name, found)
        for path in site.rglob("*.html")
        for found in loads.findall(path.read_text("utf-8"))
        if 'rel="canonical"' not in found
    }
    assert loaded == set()


def test_no_list_hides_in_a_paragraph(site: Path) -> None:
    """A list needs a blank line before it, and a wrapped line must not begin like an item."""
    paragraphs = re.compile(r"<(?:p|li)>(?:(?!</?(?:p|li|pre|ul|ol|table)\b).)*", re.DOTALL)
    hidden = {
        (str(path.relative_to(site)), paragraph[:80])
        for path in site.rglob("*.html")
        for paragraph in paragraphs.findall(path.read_text("utf-8"))
        if re.search(r"\n\s*(?:[-*+]|\d+[.)]) ", re.sub("<[^>]+>", "", paragraph))
    }
    assert hidden == set()
