"""The run folder: what is damaged or lost is noticed and repaired, what is foreign is refused."""

from __future__ import annotations

import copy
import json
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pseudograd.cli import main
from pseudograd.search import Study

pytestmark = pytest.mark.usefixtures("one_thread")

COMMON = ["--hidden", "4", "--k", "1", "0.5", "--max-epochs", "2", "--out", "run"]
BAGGING = ["--rates", "0.01", *COMMON]
PAPER = shlex.split("--protocol paper --rates 0.01 --repetitions 1 --retrainings 2") + COMMON
OPTIONS = {"bagging": BAGGING, "paper": PAPER}


def tune(*options: str) -> int:
    return main(["tune", "pets.csv", "--target", "pet", *options])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a table, and a finished run of each protocol."""
    folder = tmp_path_factory.mktemp("finished")
    lines = ["weight,colour,pet"]
    for at in range(60):
        pet = "cat" if at % 5 < 3 else "dog"
        weight = at * 7 % 11 + 6 * (pet == "dog")
        lines.append(f"{weight},{'grey' if at % 3 else 'black'},{pet}")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("pets.csv").write_text("\n".join(lines) + "\n")
        for protocol, options in OPTIONS.items():
            assert tune(*options) == 0
            if protocol == "paper":
                choose_one_half()
                assert tune(*options) == 0
            Path("run").rename(protocol)
    return folder


def choose_one_half() -> None:
    """Make the outcomes of the other k so good that it is chosen, and both models are kept."""
    path = Path("run/ledger.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line.get("trial", {}).get("k") == 0.5:
            line["error"] = 0.0
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


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
    damage(Path("run", name))
    k = ["--k", "1"] if name.startswith("plain") else []
    said = said_by(capsys, "predict", "run", "pets.csv", *k)
    assert f"run/{name} is " in said
    assert said.endswith("run the search's command again, which repairs it")
    noted = trained(monkeypatch)
    assert tune(*OPTIONS[protocol]) == 0
    assert content() == before
    # The paper's protocol keeps no other copy of a network, and of the other its file.
    assert len(noted) == (protocol == "paper")
    assert main(["predict", "run", "pets.csv", *k]) == 0


@pytest.mark.parametrize("damage", [cut, Path.unlink])
@pytest.mark.parametrize("name", ["model.json", "assessment.json", "examples.json", "suspects.csv"])
@pytest.mark.parametrize("protocol", OPTIONS)
def test_what_is_known_of_the_model_is_restored(
    protocol: str,
    name: str,
    damage: Callable[[Path], None],
    finished: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = use(finished, protocol)
    if protocol == "paper" and name not in before:
        assert name in ("assessment.json", "suspects.csv")
        return
    damage(Path("run", name))
    noted = trained(monkeypatch)
    assert tune(*OPTIONS[protocol]) == 0
    after = content()
    if name == "suspects.csv" and damage is cut:  # a user may have added to it
        assert after.pop(name) != before.pop(name)
    assert after == before
    # Without model.json, nobody knows which networks the files of the paper's protocol hold.
    assert len(noted) == 2 * (protocol == "paper" and name == "model.json")


def test_only_lost_networks_are_trained_again(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = use(finished, "bagging")
    networks = sorted(Path("run/networks").iterdir())
    assert len(networks) == len(Study.open("run").ledger)
    noted = trained(monkeypatch)
    networks[0].unlink()
    cut(networks[1])
    flip(networks[2])
    assert tune(*BAGGING) == 0
    assert not noted  # the model is as it was
    Path("run/model.json").unlink()
    assert tune(*BAGGING) == 0
    assert len(noted) == 3
    assert content() == before
    networks[0].unlink()
    networks[0].mkdir()
    Path("run/model.json").unlink()
    capsys.readouterr()
    assert tune(*BAGGING) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"pseudograd: {networks[0]} cannot be written (is a directory): ")


# --- foreign JSON -----------------------------------------------------------------------------

READ_BY = {
    "run.json": ("tune", "predict", "report", "runs"),
    "model.json": ("predict", "report", "runs"),
    "assessment.json": ("report", "runs"),
    "examples.json": ("report",),
}
COMMANDS = {
    "tune": ["tune", "pets.csv", "--target", "pet", *BAGGING],
    "predict": ["predict", "run", "pets.csv"],
    "report": ["report", "run"],
    "runs": ["runs", "."],
}
RAW = {
    "empty": b"",
    "cut": b'{"recipe": {',
    "null": b"null",
    "list": b"[]",
    "number": b"7",
    "text": b'"run"',
    "object": b"{}",
    "nan": b'{"k": NaN}',
    "infinite": b'{"k": 1e999}',
    "huge": b'{"k": 1' + b"0" * 400 + b"}",
    "endless": b'{"k": 1' + b"0" * 5000 + b"}",
    "deep": b"[" * 100_000,
    "latin-1": '{"k": "é"}'.encode("latin-1"),
    "half a character": b'{"k": "\\ud800"}',
    "binary": bytes(range(256)),
}


def check(
    capsys: pytest.CaptureFixture[str], command: str, name: str, how: tuple[Any, ...] = ()
) -> None:
    """The command ends with one sentence about the file if it reads it."""
    capsys.readouterr()
    status = main(COMMANDS[command])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    valid = how and command == "runs" and how[0] in ("recipe", "protocol", "data")
    if command not in READ_BY[name] or (valid and status == 0):
        # Trials of another recipe are set aside, so that the run seems unfinished.
        assert status == 0
        return
    assert status == 1, (command, how)
    lines = [line for line in captured.err.splitlines() if "is set aside: " not in line]
    assert len(lines) == 1, (command, how, lines)
    assert lines[0].startswith("pseudograd: ")
    assert "run/" in lines[0] or "run holds" in lines[0]
    if command == "runs":
        assert len(captured.out.splitlines()) == 2  # the other run is listed


@pytest.mark.parametrize("raw", RAW)
@pytest.mark.parametrize("name", READ_BY)
def test_foreign_files_are_refused_in_a_sentence(
    name: str, raw: str, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use(finished, "bagging")
    shutil.copytree("run", "other")
    for command in ("predict", "report", "runs", "tune"):
        if command != "tune" or name == "run.json" or raw in ("cut", "null"):
            Path("run", name).write_bytes(RAW[raw])
            check(capsys, command, name)


@pytest.mark.parametrize("name", READ_BY)
def test_a_folder_in_place_of_a_file(
    name: str, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use(finished, "bagging")
    shutil.copytree("run", "other")
    Path("run", name).unlink()
    Path("run", name).mkdir()
    for command in ("predict", "report", "runs"):
        check(capsys, command, name)
    assert main(COMMANDS["tune"]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"pseudograd: run/{name} cannot be ")
    assert "(is a directory): " in last


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the values are in what was read from JSON."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for name, one in inner:
        yield (*at, name)
        if isinstance(one, dict | list):
            yield from places(one, (*at, name))


def changed(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    """A copy with another value at a place, or without one if that is ``...``."""
    value = copy.deepcopy(value)
    inner = value
    for name in at[:-1]:
        inner = inner[name]
    if new is ...:
        del inner[at[-1]]
    else:
        inner[at[-1]] = new
    return value


STRANGE = [..., None, [], {}, "x", -1, 1e300, 0.5]


@pytest.mark.parametrize("new", STRANGE, ids=repr)
@pytest.mark.parametrize("name", READ_BY)
def test_changed_values_are_refused_in_a_sentence(
    name: str, new: Any, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use(finished, "bagging")
    shutil.copytree("run", "other")
    path = Path("run", name)
    right = json.loads(path.read_text())
    known = list(places(right))
    # Those that a checksum protects are all the same.
    for at in known if name == "run.json" else known[:: 1 + len(known) // 5]:
        strange = changed(right, at, new)
        if strange == right or (name == "run.json" and is_harmless(at, new)):
            continue
        path.write_text(json.dumps(strange))
        for command in READ_BY[name]:
            if command != "tune" or new == "x":
                check(capsys, command, name, at)


def is_harmless(at: tuple[Any, ...], new: Any) -> bool:
    """Whether a change in run.json is one that a person may make: in the notes of a session."""
    if at == ("sessions",) or at[-1] == "devices":
        return new == []
    if at[0] == "protocol" and new is ...:  # all of them are written, null or not
        return at[-1] == "initial_rate"
    kind = {"seconds": (int, float), "trials": int}.get(at[-1], str)
    return at[0] == "sessions" and len(at) > 2 and isinstance(new, kind)
