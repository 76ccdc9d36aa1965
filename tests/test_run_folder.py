"""The run folder: what is damaged or lost is noticed and repaired, what is foreign is refused."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pseudograd.cli import main

pytestmark = pytest.mark.usefixtures("one_thread")

COMMON = ["--hidden", "4", "--k", "1", "0.5", "--max-epochs", "2", "--out", "run"]
BAGGING = ["--rates", "0.01", *COMMON]
PAPER = shlex.split("--protocol paper --rates 0.01 --repetitions 1 --retrainings 2") + COMMON
OPTIONS = {"bagging": BAGGING, "paper": PAPER}
JSON = ("run.json", "model.json", "assessment.json", "examples.json")


def tune(*options: str) -> int:
    return main(["tune", "pets.csv", "--target", "pet", *options])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a table, and a finished run of each protocol."""
    folder = tmp_path_factory.mktemp("finished")
    lines = ["weight,colour,pet"]
    for at in range(60):
        pet = ("cat", "dog", "cow")[at * at % 7 % 3]
        lines.append(
            f"{at % 11 + len(pet) + ord(pet[-1]) % 5},{'grey' if at % 3 else 'black'},{pet}"
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("pets.csv").write_text("\n".join(lines) + "\n")
        for protocol, options in OPTIONS.items():
            assert tune(*options) == 0
            Path("run").rename(protocol)
    return folder


@pytest.fixture(autouse=True)
def _in_an_empty_folder(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(finished / "pets.csv", "pets.csv")


def use(finished: Path, protocol: str) -> dict[str, bytes]:
    """Make the folder "run" a copy of a finished run, and return its files by name."""
    shutil.rmtree("run", ignore_errors=True)
    shutil.copytree(finished / protocol, "run")
    return content()


def content() -> dict[str, bytes]:
    """The files of the run by name, except for those that tell the time."""
    return {
        path.relative_to("run").as_posix(): path.read_bytes()
        for path in Path("run").rglob("*")
        if path.is_file() and path.name not in ("run.json", "report.html")
    }


def trained(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Where the trials of later fleets are noted."""
    from pseudograd.fleet import Fleet

    run, noted = Fleet.run, []

    def noting(self: Fleet, trials: Any, *stop: Any) -> Any:
        for outcome in run(self, trials, *stop):
            noted.append(outcome.trial)
            yield outcome

    monkeypatch.setattr(Fleet, "run", noting)
    return noted


def said_by(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of a command that ends with status 1."""
    capsys.readouterr()
    assert main(arguments) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("pseudograd: ")
    return lines[0]


# --- damage -----------------------------------------------------------------------------------


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def flip(path: Path) -> None:
    """Change a weight: the file is as long as before and still a safetensors file."""
    damaged = bytearray(path.read_bytes())
    damaged[-3] ^= 1
    path.write_bytes(damaged)


@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
@pytest.mark.parametrize("name", ["model.safetensors", "plain.safetensors"])
@pytest.mark.parametrize("protocol", OPTIONS)
def test_a_damaged_model_is_noticed_and_repaired(
    protocol: str,
    name: str,
    damage: Callable[[Path], None],
    finished: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = use(finished, protocol)
    if name not in before:
        pytest.skip("k = 1 was chosen")
    damage(Path("run", name))
    k = ["--k", "1"] if name.startswith("plain") else []
    said = said_by(capsys, "predict", "run", "pets.csv", *k)
    assert f"run/{name} is " in said
    assert said.endswith("run the search's command again, which repairs it")
    noted = trained(monkeypatch)
    assert tune(*OPTIONS[protocol]) == 0
    assert content() == before
    # The paper's protocol keeps no other copy of a network.
    assert len(noted) == (protocol == "paper")
    assert main(["predict", "run", "pets.csv", *k]) == 0
