"""What ``--help`` shows."""

from __future__ import annotations

import re
import shlex

import pytest

from pseudograd.cli import EXAMPLES, main, parser

LINES = [
    re.split(r"\s{2,}", line.strip())[0]  # without its remark
    for lines in EXAMPLES.values()
    for line in lines.splitlines()
    if line.startswith("  ")
]


@pytest.mark.parametrize("line", LINES)
def test_examples_are_command_lines(line: str) -> None:
    program, *arguments = shlex.split(line)
    assert program == "pseudograd"
    parser().parse_args(arguments)


def test_help_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    for command, lines in EXAMPLES.items():
        with pytest.raises(SystemExit):
            main([*([command] if command else []), "--help"])
        assert capsys.readouterr().out.endswith(f"examples:{lines}")
