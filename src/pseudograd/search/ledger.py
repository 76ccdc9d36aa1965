"""The ledger: one line of JSON for each finished trial, only ever appended to.

A line is written in one piece and forced to disk before the next trial's; if a crash cuts one off,
that part is removed when the next is written. So a killed run loses at most the trials under way,
ledgers of several machines are merged by concatenation, and the next run goes on where this one
stopped.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pseudograd.files import writing
from pseudograd.fleet import Outcome, Split, Trial

_HASH_LENGTH = 16  # so many digits of a data set's hash are noted


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
        data_hash: Of the data set: it is written into every line, and lines with another one are
            set aside.
        belongs: Tells whether a trial is one of this ledger's; others are set aside.

    Attributes:
        set_aside: The lines that could not be used when the file was read. They stay in it, but for
            a last line that was cut off, which goes when the next outcome is added.
        data_hashes: What the outcomes in the file have noted, also those on other data.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "ledger.jsonl"
        >>> trial = Trial("digits", (400,), k=0.5, learning_rate=0.1)
        >>> Ledger(file).append(Outcome(trial, 0.02, 12, 0.03, 0.1, 27, "patience", (0.5, 0.1)))
        >>> Ledger(file)[trial].error
        0.03

    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        data_hash: str | None = None,
        belongs: Callable[[Trial], bool] = lambda _: True,
    ) -> None:
        self.path = Path(path)
        self.data_hash = None if data_hash is None else data_hash[:_HASH_LENGTH]
        self.set_aside: list[SetAside] = []
        self.data_hashes: set[str] = set()
        self._outcomes: dict[Trial, Outcome] = {}
        for number, line in enumerate(_lines(self.path), 1):
            try:
                outcome, noted = from_line(line)
                if noted is not None:
                    self.data_hashes.add(noted)
                _check_hash(noted, self.data_hash)
                if not belongs(outcome.trial):
                    raise ValueError("it is the outcome of a trial of another search")
            except ValueError as error:
                self.set_aside.append(SetAside(number, str(error)))
            else:
                self._outcomes[outcome.trial] = outcome

    def append(self, outcome: Outcome) -> None:
        """Add an outcome, and return when it is on the disk. Its parameters are not kept."""
        outcome = dataclasses.replace(outcome, parameters=None)
        if not math.isfinite(outcome.cross_entropy):
            outcome = dataclasses.replace(outcome, cross_entropy=math.inf)  # as it is read again
        line = to_line(outcome, self.data_hash).encode() + b"\n"
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                if file.tell() and _last_byte(self.path) != b"\n":
                    _mend_end(self.path, file)
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        self._outcomes[outcome.trial] = outcome

    def __getitem__(self, trial: Trial) -> Outcome:
        return self._outcomes[trial]

    def __iter__(self) -> Iterator[Trial]:
        return iter(self._outcomes)

    def __len__(self) -> int:
        return len(self._outcomes)


def to_line(outcome: Outcome, data_hash: str | None = None) -> str:
    """Write an outcome as one line of JSON, without its parameters.

    Of the trial, what is as by default is left out, and the mistakes on the test set, which may be
    thousands, are written as the set bits of a string of bytes in base 64.

    Args:
        outcome: The outcome.
        data_hash: Of the data set, to be noted too.

    Example:
        >>> trial = Trial("digits", (400,), k=0.5, learning_rate=0.1)
        >>> to_line(Outcome(trial, 0.02, 12, 0.03, 0.1, 27, "patience", (0.5,)))[:73]
        '{"trial": {"data": "digits", "hidden_layer_sizes": [400], "k": 0.5, "lear'

    """
    fields: dict[str, Any] = {} if data_hash is None else {"data_hash": data_hash}
    fields |= {name: value for name, value in vars(outcome).items() if name != "parameters"}
    fields["trial"] = _without_defaults(outcome.trial)
    if outcome.wrong is not None:
        fields["wrong"] = _to_bits(outcome.wrong)
    if not math.isfinite(outcome.cross_entropy):
        fields["cross_entropy"] = None  # JSON has no infinity
    return json.dumps(fields, allow_nan=False)


def from_line(line: str) -> tuple[Outcome, str | None]:
    """Read an outcome, and the hash of its data if it is noted; raises ValueError for what is none.

    Args:
        line: One line of JSON.

    Example:
        >>> from_line('{"k": 1}')
        Traceback (most recent call last):
        ...
        ValueError: it is JSON, but not the outcome of a trial of this version

    """
    try:
        fields: Any = json.loads(line)
    except json.JSONDecodeError:
        raise ValueError("it is not JSON, or cut off") from None
    try:
        noted = fields.pop("data_hash", None)
        fields["trial"] = trial_from_fields(fields["trial"])
        fields["curve"] = tuple(fields["curve"])
        if fields["wrong"] is not None:
            fields["wrong"] = _from_bits(fields["wrong"])
        if fields["cross_entropy"] is None:
            fields["cross_entropy"] = math.inf
        outcome = Outcome(**fields)
        # Comparisons fail for what is no number.
        if not (0 <= outcome.error <= 1 and 0 <= outcome.stop_error <= 1 <= outcome.epochs):
            raise ValueError
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError("it is JSON, but not the outcome of a trial of this version") from None
    return outcome, noted


def _check_hash(noted: str | None, data_hash: str | None) -> None:
    if None not in (noted, data_hash) and noted != data_hash:
        raise ValueError(f"it is of other data, whose hash begins with {noted}")


def trial_from_fields(fields: Mapping[str, Any]) -> Trial:
    """Make a trial of its fields as JSON has them.

    Args:
        fields: By name, with lists for tuples.

    Example:
        >>> trial = Trial("digits", (400,), k=0.5, learning_rate=0.1)
        >>> fields = json.loads(json.dumps(dataclasses.asdict(trial)))
        >>> trial_from_fields(fields) == trial
        True

    """
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    if "split" in values:
        values["split"] = Split(**values["split"])
    return Trial(**values)


def _without_defaults(record: Trial | Split) -> dict[str, Any]:
    """The fields of a record that are not as by default."""
    told = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if value != default:
            told[field.name] = _without_defaults(value) if isinstance(value, Split) else value
    return told


def _to_bits(places: Iterable[int]) -> str:
    mask = bytearray()
    for place in places:
        mask.extend(bytes(max(0, place // 8 + 1 - len(mask))))
        mask[place // 8] |= 1 << place % 8
    return base64.b64encode(mask).decode()


def _from_bits(text: str) -> tuple[int, ...]:
    mask = np.frombuffer(base64.b64decode(text, validate=True), np.uint8)
    return tuple(np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist())


def _lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    # A crash can leave bytes that are no text; they must cost their own line only.
    return path.read_text(encoding="utf-8", errors="replace").splitlines()


def _mend_end(path: Path, file: BinaryIO) -> None:
    """Have the next line begin on its own, in a ledger whose last line has no end.

    What a crash cut off never was a finished trial, and goes: it would stop others that read JSON.
    """
    last = path.read_bytes().rpartition(b"\n")[2]
    try:
        json.loads(last)  # no part of an object is JSON, so this is whole
    except ValueError:
        file.truncate(file.tell() - len(last))
    else:
        file.write(b"\n")


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)
