"""Finished runs for tests: made once, copied, damaged and compared."""

from __future__ import annotations

import copy
import json
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pseudograd.cli import main
from pseudograd.fleet import Fleet

COMMON = ["--hidden", "4", "--k", "1", "0.5", "--epochs", "2", "--out", "run"]
BAGGING = ["--learning-rates", "0.01", "--repetitions", "5", *COMMON]
PAPER = (
    shlex.split("--protocol paper --learning-rates 0.01 --repetitions 1 --retrainings 2") + COMMON
)
OPTIONS = {"bagging": BAGGING, "paper": PAPER}


def tune(*options: str) -> int:
    return main(["tune", "pets.csv", "--target", "pet", *options])


def make_runs(folder: Path) -> None:
    """Fill a folder with a table, and a finished run of each protocol."""
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


def choose_one_half() -> None:
    """Set the errors at k = 1/2 to 0, so that it is chosen and both models are kept."""
    path = Path("run/ledger.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line.get("trial", {}).get("k") == 0.5:
            line["error"] = 0.0
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def use(finished: Path, protocol: str) -> dict[str, bytes]:
    """Make the folder "run" a copy of a finished run, and return its files by name."""
    shutil.rmtree("run", ignore_errors=True)
    shutil.copytree(finished / protocol, "run")
    return content()


def content() -> dict[str, bytes]:
    """Return the files of the run by name, except those with times in them."""
    return {
        path.relative_to("run").as_posix(): path.read_bytes()
        for path in Path("run").rglob("*")
        if path.is_file() and path.name not in ("run.json", "report.html")
    }


def trained(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that records the trials of later fleets."""
    run, noted = Fleet.run, []

    def noting(self: Fleet, trials: Any, *stop: Any) -> Any:
        for outcome in run(self, trials, *stop):
            noted.append(outcome.trial)
            yield outcome

    monkeypatch.setattr(Fleet, "run", noting)
    return noted


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def flip(path: Path) -> None:
    """Change a weight, leaving a valid safetensors file of the same length."""
    damaged = bytearray(path.read_bytes())
    damaged[-3] ^= 1
    path.write_bytes(damaged)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value in parsed JSON."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for name, one in inner:
        yield (*at, name)
        if isinstance(one, dict | list):
            yield from places(one, (*at, name))


def changed(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    """Return a copy with another value at a path, or without the entry if it is ``...``."""
    value = copy.deepcopy(value)
    inner = value
    for name in at[:-1]:
        inner = inner[name]
    if new is ...:
        del inner[at[-1]]
    else:
        inner[at[-1]] = new
    return value


def stop_after(lines: int) -> None:
    """Truncate a run to the state after a few lines of its ledger."""
    path = Path("run/ledger.jsonl")
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:lines]))
    for name in ("model.json", "model.safetensors", "assessment.json", "examples.json"):
        Path("run", name).unlink()
