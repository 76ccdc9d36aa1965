"""``python -m paper toy`` and ``curve``: what they print, write and refuse."""

from __future__ import annotations

import csv
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from commands import refused_by
from paper.cli import main

ROOT = Path(__file__).parents[2]
PNG = b"\x89PNG\r\n\x1a\n"


pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


refusal = partial(refused_by, main)


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


def test_toy_refuses(capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests) -> None:
    cases: list[tuple[str, str, str]] = [
        ("--alpha 0.5", "--alpha", "between 0.5 and 1"),
        ("--alpha 1", "--alpha", "between 0.5 and 1"),
        ("--k 1 0", "--k", "above 0"),
        ("--k -1", "--k", "above 0"),
        ("--k many", "--k", "invalid number value"),
        ("--k 1/0", "--k", "invalid number value"),
        (f"--k 1/1{'0' * 40}", "--k", "2^-100"),
        ("--runs 0", "--runs", "1 or more"),
        ("--runs 1.5", "--runs", "invalid int value"),
        ("--picture toy.gif", "--picture", ".png, .pdf, .svg"),
        ("--picture toy", "--picture", ".png, .pdf, .svg"),
    ]
    for options, named, advice in cases:
        with subtests.test(options=options, named=named, advice=advice):
            line = refusal(capsys, "toy", *options.split())
            assert line.startswith("python -m paper")
            assert named in line
            assert advice in line


def test_help_is_answered_without_drawing_libraries() -> None:
    code = (
        "import sys; from paper.cli import main\n"
        "try: main(['toy', '--help'])\n"
        "except SystemExit: print('matplotlib' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert "--alpha" in run.stdout
    assert run.stdout.endswith("False\n")
