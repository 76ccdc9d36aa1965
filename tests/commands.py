"""Command lines in tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest


def refused_by(
    main: Callable[[Sequence[str]], int], capsys: pytest.CaptureFixture[str], *arguments: str
) -> str:
    """Return the one-line error of a bad command line; nothing may have been written."""
    try:
        status: object = main(arguments)
    except SystemExit as exit_:
        status = exit_.code
    assert status in (1, 2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert list(Path().iterdir()) == []
    return captured.err
