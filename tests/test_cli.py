"""The command line: what it prints and writes, and how it says no."""

import csv
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pseudograd import __version__
from pseudograd.cli import main

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a bad command line ends in."""
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert list(Path().iterdir()) == []
    return captured.err


def test_toy(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--runs 2 --k 1 3 --seed 5 --csv runs.csv --picture a.png"
    assert main(["toy", *options.split()]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""  # progress is for terminals
    lines = captured.out.splitlines()
    assert [line.split()[0] for line in lines] == (
        ["test", "k", "3", "1", "ours:", "runs:", "picture:"]
    )
    assert "4.90" in lines[3]
    assert lines[2].split()[4] == "-"
    assert lines[-2:] == ["runs: runs.csv", "picture: a.png"]
    with open("runs.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["k"], row["run"], row["seed"]) for row in rows] == [
        ("1.0", "0", "5"),
        ("1.0", "1", "5"),
        ("3.0", "0", "5"),
        ("3.0", "1", "5"),
    ]
    assert all(4 < float(row["error_pct"]) < 9 for row in rows)
    assert Path("a.png").read_bytes().startswith(PNG)
    assert len(Path("a.png").read_bytes()) > 10_000


def test_toy_with_one_run_and_another_alpha(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["toy", "--runs", "1", "--k", "2", "--alpha", "0.7"]) == 0
    row = capsys.readouterr().out.splitlines()[2].split()
    assert row[2] == "-"  # the paper's numbers are for 0.95
    assert float(row[1]) == pytest.approx(float(row[3]), abs=1.5)
    assert Path("toy.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("name", "start"), [("c.png", PNG), ("c.svg", b"<?xml"), ("c.pdf", b"%PDF")]
)
def test_curve(name: str, start: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["curve", "--k", "1", "0.3", "--picture", name]) == 0
    assert capsys.readouterr().out == f"picture: {name}\n"
    assert Path(name).read_bytes().startswith(start)


def test_k_may_be_a_fraction(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["toy", "--runs", "1", "--k", "1/2", "1/3"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows[2:4]] == ["0.5", "0.333333"]


def test_curve_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["curve"]) == 0
    assert len(Path("curve.png").read_bytes()) > 10_000


@pytest.mark.parametrize(
    ("options", "named", "advice"),
    [
        ("--alpha 0.5", "--alpha", "between 0.5 and 1"),
        ("--alpha 1", "--alpha", "between 0.5 and 1"),
        ("--alpha nan", "--alpha", "between 0.5 and 1"),
        ("--k 1 0", "--k", "above 0"),
        ("--k -1", "--k", "above 0"),
        ("--k inf", "--k", "above 0"),
        ("--k many", "--k", "above 0"),
        ("--k 1 2 1.0", "--k", "twice"),
        ("--k 1/2 0.5", "--k", "twice"),
        ("--k 1/0", "--k", "above 0"),
        ("--k 1/2/3", "--k", "above 0"),
        ("--k half/2", "--k", "above 0"),
        (f"--k 1{'0' * 400}/3", "--k", "above 0"),
        (f"--k 1/1{'0' * 40}", "--k", "2^-100"),
        ("--runs 0", "--runs", "at least 1"),
        ("--runs 1.5", "--runs", "at least 1"),
        ("--seed -1", "--seed", "at least 0"),
        ("--csv no/such/folder.csv", "--csv", "name a file in a folder"),
        ("--csv .", "--csv", "name a file in a folder"),
        ("--picture no/such/folder.png", "--picture", "name a file in a folder"),
        ("--picture toy.gif", "--picture", ".png, .pdf, .svg"),
        ("--picture toy", "--picture", ".png, .pdf, .svg"),
    ],
)
def test_toy_refuses(
    options: str, named: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(capsys, "toy", *options.split())
    assert line.startswith("pseudograd toy: ")
    assert named in line
    assert advice in line


@pytest.mark.parametrize(
    "arguments", [[], ["fly"], ["toy", "--speed", "9"], ["curve", "--runs", "1"]]
)
def test_unknown_words_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--help" in refusal(capsys, *arguments)


def test_looking_whether_a_file_can_be_written_leaves_it_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("kept.csv").write_text("precious")
    with pytest.raises(SystemExit):
        main(["toy", "--csv", "kept.csv", "--runs", "0"])
    assert Path("kept.csv").read_text() == "precious"


def test_a_second_ctrl_c_does_not_wait_for_workers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python would abort at its end, with its workers in C++."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    class Left(Exception):
        pass

    def leave(status: int) -> None:
        raise Left(status)

    monkeypatch.setattr("pseudograd.reproduce.toy.run_toy", interrupted)
    monkeypatch.setattr("os._exit", leave)
    end = threading.Event()
    worker = threading.Thread(target=end.wait, name="fleet-0")
    worker.start()
    try:
        with pytest.raises(Left, match="130"):
            main(["toy"])
    finally:
        end.set()
        worker.join()
    assert "stopped by Ctrl-C" in capsys.readouterr().err


def test_ctrl_c_ends_quietly(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pseudograd.reproduce.toy.run_toy", interrupted)
    assert main(["toy"]) == 130
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "pseudograd: stopped by Ctrl-C before the end\n"
    assert list(Path().iterdir()) == []


def test_warnings_are_lines_of_their_own() -> None:
    """And name no place in our sources."""
    weights = "\n".join(f"{at % 40}.5 kg,{'ab'[at % 2]}" for at in range(100))
    Path("mice.csv").write_text(f"weight,kind\n{weights}")
    command = ["tune", "mice.csv", "--target", "kind", "--k", "1", "--max-epochs", "1"]
    run = subprocess.run(
        [sys.executable, "-m", "pseudograd", *command, "--repetitions", "1", "--hidden", "2"],
        capture_output=True,
        text=True,
        check=True,
    )
    (said,) = (line for line in run.stderr.splitlines() if "12.3 kg" in line)
    assert said.startswith("warning: column 'weight' has 40 different texts in 100 rows")
    assert "UserWarning" not in run.stderr


def test_as_a_module() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pseudograd", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == f"pseudograd {__version__}\n"


def test_a_reader_that_has_had_enough() -> None:
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


def test_help_is_answered_without_drawing_libraries() -> None:
    code = (
        "import sys; from pseudograd.cli import main\n"
        "try: main(['toy', '--help'])\n"
        "except SystemExit: print('matplotlib' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--alpha" in run.stdout
    assert run.stdout.endswith("False\n")
