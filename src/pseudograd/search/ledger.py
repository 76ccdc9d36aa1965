"""The ledger: an append-only, crash-safe file with one line of JSON per finished trial.

A recipe is written once, before the first outcome of its trials, which refer to it by its
fingerprint. Every line is flushed and synced to disk; a line cut off by a crash is removed when the
next one is written. So a killed search loses at most its unfinished trials, and ledgers of several
machines can be concatenated. Processes may append to one file in turn, under a lock; `refresh`
reads the lines that others have added.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pseudograd.files import reason, writing
from pseudograd.fleet import Outcome, Recipe, Split, Trial
from pseudograd.fleet.ramp import as_k, plain_k
from pseudograd.fleet.recipe import are_numbers, is_whole


class Ledger(Mapping[Trial, Outcome]):
    """The outcomes in a file, by trial: a mapping that `append` adds to.

    Args:
        path: The file, created with the first outcome; None to keep outcomes in memory only.
        recipes: The recipes of its trials. Outcomes of others are set aside.
        belongs: Returns whether a trial belongs to this ledger. Outcomes of others are set aside.

    Attributes:
        set_aside: Why lines of the file cannot be used, a reason for each. They stay in the file. A
            last line that was cut off does not count; the next `append` removes it.

    Example:
        >>> import tempfile
        >>> from pseudograd.fleet import MLPRecipe
        >>> file, recipe = Path(tempfile.mkdtemp()) / "ledger.jsonl", MLPRecipe("digits", (400,))
        >>> trial = Trial(recipe, k=0.5, learning_rate=0.1)
        >>> ledger = Ledger(file, [recipe])
        >>> ledger.append(Outcome(trial, 0.02, 12, 0.03, 0.1, 27, "patience", (0.5, 0.1)))
        >>> Ledger(file, [recipe])[trial].error
        0.03

    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        recipes: Iterable[Recipe],
        belongs: Callable[[Trial], bool] = lambda _: True,
    ) -> None:
        self.path = None if path is None else Path(path)
        self.recipes = {recipe.fingerprint: recipe for recipe in recipes}
        self.set_aside: list[str] = []
        self._belongs = belongs
        self._outcomes: dict[Trial, Outcome] = {}
        self._headed: set[str] = set()  # fingerprints of the recipes in the file
        self._bytes_read = 0  # of lines that have an end
        self.refresh()

    def refresh(self) -> None:
        """Read the lines that processes have added.

        Example:
            >>> import tempfile
            >>> from pseudograd.fleet import MLPRecipe
            >>> path, recipe = Path(tempfile.mkdtemp()) / "ledger.jsonl", MLPRecipe("digits", (9,))
            >>> ours, theirs = Ledger(path, [recipe]), Ledger(path, [recipe])
            >>> trial = Trial(recipe, k=0.5, learning_rate=0.1)
            >>> theirs.append(Outcome(trial, 0.02, 12, 0.03, 0.1, 27, "patience", ()))
            >>> ours.refresh()
            >>> trial in ours
            True

        """
        content = _content(self.path, self._bytes_read)
        *lines, rest = content.split(b"\n")
        self._bytes_read += len(content) - len(rest)
        self.set_aside += filter(None, map(self._read, lines))
        if rest:  # perhaps cut off, or only without its end: it is read again with the next ones
            self._read(rest)

    def _read(self, line: bytes) -> str | None:
        """Take over the outcome or recipe in a line; return why that is impossible, or None."""
        try:
            # A crash can leave bytes that are not UTF-8; only their own line is lost.
            fields = json.loads(line.decode("utf-8", errors="replace"))
        except (json.JSONDecodeError, RecursionError):
            return "it is not JSON, or cut off"
        if isinstance(fields, dict) and fields.keys() == {"fingerprint", "recipe"}:
            self._headed.add(str(fields["fingerprint"]))
            return None
        try:
            outcome = outcome_from_json(fields, self.recipes)
        except ValueError as problem:
            return str(problem)
        if not self._belongs(outcome.trial):
            return "it is the outcome of another search's trial"
        self._outcomes[outcome.trial] = outcome
        return None

    def append(self, outcome: Outcome) -> None:
        """Add an outcome, without its weights; it is on disk when this returns."""
        outcome = dataclasses.replace(outcome, parameters=None, state=None, last_state=None)
        if outcome.stopped_by and not math.isfinite(outcome.cross_entropy):
            # From a fleet NaN means divergence; from a user's own loop it means unknown.
            outcome = dataclasses.replace(outcome, cross_entropy=math.inf)
        if self.path is not None:
            self._write(self.path, outcome)
        self._outcomes[outcome.trial] = outcome

    def _write(self, path: Path, outcome: Outcome) -> None:
        recipe = outcome.trial.recipe
        lines: list[dict[str, Any]] = [outcome_to_json(outcome)]
        if recipe.fingerprint not in self._headed:
            lines.insert(0, {"fingerprint": recipe.fingerprint, "recipe": recipe.to_json()})
        text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a+b") as file:
                _mend_end(file)
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
        self._headed.add(recipe.fingerprint)

    def __getitem__(self, trial: Trial) -> Outcome:
        return self._outcomes[trial]

    def __iter__(self) -> Iterator[Trial]:
        return iter(self._outcomes)

    def __len__(self) -> int:
        return len(self._outcomes)


def outcome_to_json(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome in a form that JSON can hold, without its weights.

    Defaults of the trial are left out. The mistakes on the test set, which may be thousands, are
    stored as a bit mask in base 64.
    """
    weights = ("parameters", "state", "last_state")
    fields = {name: value for name, value in vars(outcome).items() if name not in weights}
    if not outcome.measures:
        del fields["measures"]
    fields["trial"] = trial_to_json(outcome.trial)
    if outcome.wrong is not None:
        fields["wrong"] = _to_bits(outcome.wrong)
    if math.isnan(outcome.cross_entropy):
        del fields["cross_entropy"]
    elif math.isinf(outcome.cross_entropy):
        fields["cross_entropy"] = None  # JSON has no infinity
    return fields


def trial_to_json(trial: Trial) -> dict[str, Any]:
    """Return a trial in a form that JSON can hold, with its recipe's fingerprint."""
    split = {name: value for name, value in vars(trial.split).items() if value}
    return {
        "recipe": trial.recipe.fingerprint,
        "k": plain_k(trial.k),
        "learning_rate": trial.learning_rate,
        **({"split": split} if split else {}),
        **({"seed": trial.seed} if trial.seed else {}),
    }


def trial_name(trial: Trial) -> str:
    """Return a file name for a trial: 16 hex digits of its hash."""
    text = json.dumps(trial_to_json(trial), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def outcome_from_json(fields: Any, recipes: Mapping[str, Recipe]) -> Outcome:
    """Return the outcome that `outcome_to_json` wrote; raise ValueError for anything else."""
    try:
        trial = dict(fields["trial"])
        fingerprint = trial["recipe"]
        fields = {"cross_entropy": math.nan, **fields}
        fields["curve"] = tuple(fields["curve"])
        if fields["wrong"] is not None:
            fields["wrong"] = _from_bits(fields["wrong"])
        if fields["cross_entropy"] is None:
            fields["cross_entropy"] = math.inf
        # Comparisons also raise TypeError for values that are not numbers.
        if not (0 <= fields["error"] <= 1 and 0 <= fields["stop_error"] <= 1):
            raise ValueError
        if not (is_whole(fields["epochs"], 0, 2**63) and is_whole(fields["best_epoch"], 0, 2**63)):
            raise ValueError
        measures = fields.get("measures", {}).values()
        if not are_numbers(fields["cross_entropy"], *fields["curve"], *measures):
            raise ValueError
        if fingerprint in recipes:
            trial["recipe"] = recipes[fingerprint]
            trial["k"] = as_k(trial["k"])
            trial["split"] = Split(**trial.get("split", {}))
            outcome = Outcome(**{**fields, "trial": Trial(**trial)})
            hash(outcome.trial)  # raises TypeError if a field holds a list or an object
            return outcome
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        raise ValueError("it is JSON, but not the outcome of a trial of this version") from None
    raise ValueError(f"it is the outcome of a trial with another recipe, {fingerprint}")


def _to_bits(places: Sequence[int]) -> str:
    there = np.zeros(max(places, default=-1) + 1, bool)
    there[list(places)] = True
    return base64.b64encode(np.packbits(there, bitorder="little").tobytes()).decode()


def _from_bits(text: str) -> tuple[int, ...]:
    mask = np.frombuffer(base64.b64decode(text, validate=True), np.uint8)
    return tuple(np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist())


def _content(path: Path | None, start: int) -> bytes:
    """Return the content of a file from a position on."""
    if path is None or not path.exists():
        return b""
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read()
    except OSError as problem:
        advice = "restore the file, or name another folder"
        raise OSError(f"{path} cannot be read ({reason(problem)}): {advice}") from problem


def _mend_end(file: BinaryIO) -> None:
    """End the last line of a ledger, or remove it if a crash cut it off.

    A line that was cut off would break other JSON readers.
    """
    if not (size := file.seek(0, os.SEEK_END)):
        return
    file.seek(size - 1)
    if file.read() == b"\n":
        return
    file.seek(0)
    last = file.read().rpartition(b"\n")[2]
    try:
        json.loads(last)  # a prefix of an object is not valid JSON, so this one is complete
    except ValueError:
        file.truncate(size - len(last))
    else:
        file.write(b"\n")
