"""What was run, on what and how long, and how long a plain loop would have taken."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paper.findings import Effort, Reproduction
from paper.report.document import Block, Bullets, Part, Table, Text
from paper.report.wording import DASH
from paper.rows import Experiment, paper_rows
from pseudograd.data import variant
from pseudograd.data.registry import BENCHMARKS
from pseudograd.report.summary import counted

_GOAL_HARDWARE = "NVIDIA H200"


def what_was_run(found: Reproduction, root: Path, *, smoke: bool) -> Part:
    """Tell what was run, and what it took.

    Args:
        found: What the ledgers and the manifest hold.
        root: The project's folder, which may hold the fleet's benchmark.
        smoke: Whether it was run in small.

    Example:
        >>> what_was_run(Reproduction({}, (), [], [], 0), Path("nowhere"), smoke=False).blocks
        [Text(text='Nothing yet.')]

    """
    title = "What was run"
    if not found.efforts:
        return Part(title, [Text("Nothing yet.")])
    plain = None if smoke else _plain_loop(root)
    return Part(title, [Bullets(_facts(found, smoke)), *_times(found, plain)])


def _facts(found: Reproduction, smoke: bool) -> list[str]:
    """Networks and time, then hardware, versions and data."""
    trials = sum(effort.trials for effort in found.efforts)
    epochs = sum(effort.epochs for effort in found.efforts)
    seconds = _seconds(found.efforts)
    facts = [f"{trials:,} networks were trained, in {epochs:,} epochs."]
    if seconds:
        text = f"Time: {_minutes(seconds)} minutes, {3600 * trials / seconds:,.0f} networks an hour"
        in_all = sum(session["seconds"] for session in found.sessions)
        if seconds > 0.9 * in_all:  # or other experiments were trained beside these
            calls = counted(len(found.sessions), "call")
            text += f"; {_minutes(in_all)} minutes with reading the data, in {calls}"
        facts.append(f"{text}.")
    if unknown := _unknown(found):
        facts.append(
            f"Of {counted(unknown, 'network')} no manifest says where and how long they were "
            f"trained{', so this time is too short' * bool(seconds)}."
        )
    elif seconds and not smoke:
        facts += _of_the_paper(found)
    for name, key in (("Hardware", "hardware"), ("Commit", "commit")):
        told = list(dict.fromkeys(session[key] for session in found.sessions))
        facts += [f"{name}: {', '.join(told)}."] if told else []
    versions = dict.fromkeys(
        ", ".join(f"{name} {version}" for name, version in session["versions"].items() if version)
        for session in found.sessions
    )
    facts += [f"Versions: {'; '.join(versions)}."] if versions else []
    of_data = {effort.experiment.row.data for effort in found.efforts}
    data = dict.fromkeys(item for session in found.sessions for item in session["data"].items())
    for name, sha256 in (item for item in data if item[0] in of_data):
        called = "a part of it" if smoke else variant(name, sha256) or "official"
        if called == "re-cropped":
            called += ": cut again from the official pictures of whole numbers"
        facts.append(f"{name}: `{sha256}`, {called}.")
    if found.unread:
        facts.append(f"{counted(found.unread, 'line')} of the ledgers cannot be read: left out.")
    return facts


def _unknown(found: Reproduction) -> int:
    """How many networks are in the ledgers, but in no manifest."""
    noted = sum(session["trials"] for session in found.sessions)
    return max(0, sum(effort.trials for effort in found.efforts) - noted)


def _of_the_paper(found: Reproduction) -> list[str]:
    """What the paper's own rows took if others were run, too, and whether the goal was met."""
    printed = {Experiment(row) for row in paper_rows() if row.printed}
    own = [effort for effort in found.efforts if effort.experiment in printed]
    seconds, facts = _seconds(own), []
    if 0 < len(own) < len(found.efforts):
        trials = sum(effort.trials for effort in own)
        facts.append(
            f"Of these, {_minutes(seconds)} minutes and {trials:,} networks are of the paper’s own "
            "rows."
        )
    whole = printed <= {finding.experiment for finding in found.finished}
    missed = seconds > 3600
    hardware = {session["hardware"] for session in found.sessions}
    known = all(effort.seconds for effort in own)
    if (missed or (whole and known)) and hardware == {_GOAL_HARDWARE}:
        facts.append(
            f"The goal was an hour of one {_GOAL_HARDWARE} for all {len(printed)} rows of the "
            f"paper; it {'took' if whole else 'has taken'} {_minutes(seconds)} minutes"
            f"{'' if whole else ' so far'}, so the goal was {'missed' if missed else 'met'}."
        )
    return facts


def _times(found: Reproduction, plain: _PlainLoop | None) -> list[Block]:
    """The time of each row, and about how long a plain loop would have taken for it."""
    head = ["row", "networks trained", "epochs", "minutes", "networks an hour"]
    lines = [
        [effort.experiment.name + " (not finished)" * (found.found[effort.experiment] is None),
         f"{effort.trials:,}", f"{effort.epochs:,}",
         _minutes(effort.seconds) if effort.seconds else DASH,
         f"{effort.trials_per_hour:,.0f}" if effort.seconds else DASH]
        for effort in found.efforts
    ]  # fmt: skip
    blocks: list[Block] = []
    if plain:
        head.append("plain loop, hours")
        hours = [plain.hours(effort) for effort in found.efforts]
        for line, estimate in zip(lines, hours, strict=True):
            line.append(f"{estimate:,.1f}")
        blocks.append(Text(_estimate(plain, sum(hours), _seconds(found.efforts))))
    shared = (
        "Rows that differ in the momentum alone are trained together; of their time each row has "
        "its share by steps."
    )
    if any("share" in session for session in found.sessions):
        shared += " Architectures that were trained side by side on one GPU share its time equally."
    return [*blocks, Text(shared), Table(head, lines, fold="Time of each row")]


def _seconds(efforts: Iterable[Effort]) -> float:
    return sum(effort.seconds for effort in efforts)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:,.1f}"


# --- the plain loop ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _PlainLoop:
    """Measured times of a loop over single networks."""

    hardware: str
    microseconds: Mapping[int, float]  # by the number of weights
    as_graph: Sequence[float]  # microseconds of single networks whose steps are CUDA graphs

    def hours(self, effort: Effort) -> float:
        """About how long a row's steps would have taken, by the nearest one measured."""
        row = effort.experiment.row
        inputs = math.prod(BENCHMARKS[row.data].shape)
        classes = 100 if row.data == "cifar100" else 10
        weights = _weights(inputs, row.hidden_layers, row.width, classes)
        nearest = min(self.microseconds, key=lambda other: abs(math.log(other / weights)))
        return 1e-6 * self.microseconds[nearest] * effort.steps / 3600


def _plain_loop(root: Path) -> _PlainLoop | None:
    """The measurement of the fleet's benchmark, if it is there."""
    path = root / "benchmarks" / "results" / "fleet_cuda.csv"
    if not path.exists():
        return None
    measured, as_graph, hardware = {}, [], ""
    with path.open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            if line["way"] == "plain loop":
                inputs, hidden, classes = line["network"].split("-")
                depth, width = f"1x{hidden}".split("x")[-2:]
                weights = _weights(int(inputs), int(depth), int(width), int(classes))
                measured[weights] = float(line["us_per_model_step"])
                hardware = line["hardware"]
            elif line["way"] == "one model, CUDA graph":
                as_graph.append(float(line["us_per_model_step"]))
    return _PlainLoop(hardware, measured, as_graph) if measured else None


def _weights(inputs: int, depth: int, width: int, classes: int) -> int:
    return inputs * width + (depth - 1) * width**2 + width * classes


def _estimate(plain: _PlainLoop, hours: float, seconds: float) -> str:
    """How long it would have taken in all, beside the time that it took, if that is known."""
    low, high = min(plain.microseconds.values()), max(plain.microseconds.values())
    text = (
        "A plain loop, which trains one network after the other, takes "
        f"{low:,.0f} to {high:,.0f} µs a step on one {plain.hardware} "
        "(`benchmarks/results/fleet_cuda.csv`). At the speed of the measured architecture "
        "whose number of weights is nearest, the same steps would have taken about "
        f"{hours:,.0f} hours. This is an estimate, and of training steps alone."
    )
    if seconds:
        text += f" It is {3600 * hours / seconds:,.0f} times the time above."
    if plain.as_graph:
        low, high = min(plain.as_graph), max(plain.as_graph)
        text += (
            " Most of a plain loop’s time is that of the processor, which is slow there: as a "
            f"CUDA graph, a single network takes {low:,.0f} to {high:,.0f} µs a step on that "
            "machine (`docs/fleet.md`)."
        )
    return text
