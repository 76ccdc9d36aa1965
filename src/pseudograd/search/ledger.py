"""The ledger: one line of JSON for each finished trial, only ever appended to.

A line is complete or it is not there: it is written in one piece and forced to disk before the next
trial's. So a killed run loses at most the trials under way, ledgers of several machines are merged
by concatenation, and the next run goes on where this one stopped.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pseudograd.fleet import Outcome, Split, Trial


@dataclass(frozen=True)
class SetAside:
    """A line that is not an outcome, and why.

    Attributes:
        number: Of the line, from 1.
        reason: What is wrong with it.

    Example:
        >>> print(SetAside(7, "it is cut off"))
        line 7 is set aside: it is cut off

    """

    number: int
    reason: str

    def __str__(self) -> str:
        return f"line {self.number} is set aside: {self.reason}"


class Ledger(Mapping[Trial, Outcome]):
    """The outcomes in a file, by trial; a mapping that is added to by `append`.

    Args:
        path: The file; it is made when the first outcome is added.

    Attributes:
        set_aside: The lines that could not be read; they stay in the file.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "ledger.jsonl"
        >>> trial = Trial("digits", (400,), k=0.5, learning_rate=0.1)
        >>> Ledger(file).append(Outcome(trial, 0.02, 12, 0.03, 0.1, 27, "patience", (0.5, 0.1)))
        >>> Ledger(file)[trial].error
        0.03

    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.set_aside: list[SetAside] = []
        self._outcomes: dict[Trial, Outcome] = {}
        for number, line in enumerate(_lines(self.path), 1):
            try:
                outcome = from_line(line)
            except ValueError as error:
                self.set_aside.append(SetAside(number, str(error)))
            else:
                self._outcomes[outcome.trial] = outcome

    def append(self, outcome: Outcome) -> None:
        """Add an outcome, and return when it is on the disk."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            # A line that a crash cut off must not swallow this one.
            start = b"\n" if file.tell() and _last_byte(self.path) != b"\n" else b""
            file.write(start + to_line(outcome).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._outcomes[outcome.trial] = outcome

    def __getitem__(self, trial: Trial) -> Outcome:
        return self._outcomes[trial]

    def __iter__(self) -> Iterator[Trial]:
        return iter(self._outcomes)

    def __len__(self) -> int:
        return len(self._outcomes)


def to_line(outcome: Outcome) -> str:
    """Write an outcome as one line of JSON, without its parameters.

    Args:
        outcome: The outcome.

    Example:
        >>> trial = Trial("digits", (400,), k=0.5, learning_rate=0.1)
        >>> to_line(Outcome(trial, 0.02, 12, 0.03, 0.1, 27, "patience", (0.5,)))[:33]
        '{"trial": {"data": "digits", "hid'

    """
    fields = {name: value for name, value in vars(outcome).items() if name != "parameters"}
    fields["trial"] = asdict(outcome.trial)
    if not math.isfinite(outcome.cross_entropy):
        fields["cross_entropy"] = None  # JSON has no infinity
    return json.dumps(fields, allow_nan=False)


def from_line(line: str) -> Outcome:
    """Read an outcome from a line; raises ValueError for what is none.

    Args:
        line: One line of JSON.

    Example:
        >>> from_line('{"k": 1}')
        Traceback (most recent call last):
        ...
        ValueError: it is JSON, but not the outcome of a trial

    """
    try:
        fields: Any = json.loads(line)
    except json.JSONDecodeError:
        raise ValueError("it is not JSON, or cut off") from None
    try:
        trial = dict(fields["trial"])
        trial["split"] = Split(**trial["split"])
        for name in ("hidden_layer_sizes", "feature_range"):
            trial[name] = tuple(trial[name])
        fields["trial"] = Trial(**trial)
        fields["curve"] = tuple(fields["curve"])
        fields["wrong"] = None if fields["wrong"] is None else tuple(fields["wrong"])
        if fields["cross_entropy"] is None:
            fields["cross_entropy"] = math.inf
        return Outcome(**fields)
    except (KeyError, TypeError, ValueError):
        raise ValueError("it is JSON, but not the outcome of a trial") from None


def _lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    # A crash can leave bytes that are no text; they must cost their own line only.
    return path.read_text(encoding="utf-8", errors="replace").splitlines()


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)
