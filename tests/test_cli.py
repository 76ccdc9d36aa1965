"""The command line: output, files and errors."""

import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from commands import refused_by
from pseudograd import __version__
from pseudograd.cli import main

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


refusal = partial(refused_by, main)


@pytest.mark.parametrize(
    "arguments", [[], ["fly"], ["tune", "--speed", "9"], ["data", "list", "--runs", "1"]]
)
def test_unknown_words_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--help" in refusal(capsys, *arguments)


def test_a_second_ctrl_c_does_not_wait_for_workers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python would abort at exit while its workers run C++ code."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    class Left(Exception):
        pass

    def leave(status: int) -> None:
        raise Left(status)

    monkeypatch.setattr("pseudograd.data.data_folder", interrupted)
    monkeypatch.setattr("os._exit", leave)
    end = threading.Event()
    worker = threading.Thread(target=end.wait, name="fleet-0")
    worker.start()
    try:
        with pytest.raises(Left, match="130"):
            main(["data", "list"])
    finally:
        end.set()
        worker.join()
    assert "stopped by Ctrl-C" in capsys.readouterr().err


def test_ctrl_c_ends_quietly(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pseudograd.data.data_folder", interrupted)
    assert main(["data", "list"]) == 130
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "pseudograd: stopped by Ctrl-C before the end\n"
    assert list(Path().iterdir()) == []


def test_warnings_are_lines_of_their_own() -> None:
    """They do not show a location in our sources."""
    weights = "\n".join(f"{at},{at % 40}.5 kg,{'ab'[at % 2]}" for at in range(100))
    Path("mice.csv").write_text(f"id,weight,kind\n{weights}")
    command = ["tune", "mice.csv", "--target", "kind", "--k", "1", "--epochs", "1"]
    run = subprocess.run(
        [sys.executable, "-m", "pseudograd", *command, "--hidden", "2"],
        capture_output=True,
        text=True,
        check=True,
    )
    (said,) = (line for line in run.stderr.splitlines() if "write them as" in line)
    assert said.startswith("warning: column 'weight' has 40 distinct texts, such as '0.5 kg'")
    assert "\ncolumn 'id' left out: all entries differ, as ids do\n" in run.stderr
    assert "UserWarning" not in run.stderr


def test_as_a_module() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pseudograd", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == f"pseudograd {__version__}\n"


def test_a_closed_pipe_ends_quietly() -> None:
    """As in ``pseudograd data list | head -1``."""
    command = [sys.executable, "-m", "pseudograd", "data", "list", "--data-dir", "here"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    reading, writing = os.pipe()
    os.close(reading)
    run = subprocess.run(
        command, stdout=writing, stderr=subprocess.PIPE, text=True, env=environment
    )
    os.close(writing)
    assert (run.returncode, run.stderr) == (0, "")
