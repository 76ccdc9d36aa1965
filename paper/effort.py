"""The numbers of "What was run": networks, time, hardware, and a plain loop's time."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paper.findings import Effort, Reproduction
from paper.rows import Experiment, paper_rows
from pseudograd.data import variant
from pseudograd.data.benchmarks import BENCHMARKS

GOAL_HARDWARE = "NVIDIA H200"


def what_was_run(found: Reproduction, root: Path, smoke: bool) -> dict[str, Any]:
    """Return what was trained, on what hardware and for how long.

    Args:
        found: The content of the studies.
        root: The root of the clone, which may have the fleet's benchmark.
        smoke: Whether it was a smoke test.

    """
    trials, seconds = sum(effort.trials for effort in found.efforts), _seconds(found.efforts)
    in_all = sum(session["seconds"] for session in found.sessions)
    unknown = sum(effort.untimed for effort in found.efforts)
    judged = bool(seconds) and not unknown and not smoke
    plain = None if smoke else _plain_loop(root)
    return {
        "trials": trials,
        "epochs": sum(effort.epochs for effort in found.efforts),
        "seconds": seconds,
        "per_hour": 3600 * trials / seconds if seconds else None,
        # If it is much more, these calls also trained other rows.
        "with_reading": in_all if 0.9 * in_all < seconds < in_all else None,
        "calls": len(found.sessions),
        "unknown": unknown,
        "papers": _of_the_paper(found) if judged else None,
        "hardware": list(dict.fromkeys(session["hardware"] for session in found.sessions)),
        "commits": list(dict.fromkeys(session["commit"] for session in found.sessions)),
        "versions": _versions(found),
        "data": _data(found, smoke),
        "unread": found.unread,
        "side_by_side": any("share" in session for session in found.sessions),
        "plain": plain and _plain_numbers(plain, found.efforts, seconds),
        "lines": [
            {
                "name": effort.experiment.name,
                "finished": found.found[effort.experiment] is not None,
                "effort": effort,
                "plain_hours": plain.hours(effort) if plain else None,
            }
            for effort in found.efforts
        ],
    }


def _seconds(efforts: Iterable[Effort]) -> float:
    return sum(effort.seconds for effort in efforts)


def _versions(found: Reproduction) -> list[str]:
    return list(
        dict.fromkeys(
            ", ".join(f"{name} {number}" for name, number in session["versions"].items() if number)
            for session in found.sessions
        )
    )


def _data(found: Reproduction, smoke: bool) -> list[tuple[str, str, str]]:
    """Each data set's name, hash and variant."""
    used = {effort.experiment.row.data for effort in found.efforts}
    hashes = dict.fromkeys(item for session in found.sessions for item in session["data"].items())
    return [
        (name, sha256, "part" if smoke else variant(name, sha256) or "official")
        for name, sha256 in hashes
        if name in used
    ]


def _of_the_paper(found: Reproduction) -> dict[str, Any]:
    """Return the time of the paper's own rows, and whether the goal of one hour was met."""
    printed = {Experiment(row) for row in paper_rows() if row.printed}
    own = [effort for effort in found.efforts if effort.experiment in printed]
    seconds = _seconds(own)
    whole = printed <= {finding.experiment for finding in found.finished}
    missed = seconds > 3600
    decided = missed or (whole and all(effort.seconds for effort in own))
    hardware = {session["hardware"] for session in found.sessions}
    return {
        "seconds": seconds,
        "trials": sum(effort.trials for effort in own),
        "only_some": 0 < len(own) < len(found.efforts),
        "rows": len(printed),
        "whole": whole,
        "goal": ("missed" if missed else "met")
        if decided and hardware == {GOAL_HARDWARE}
        else None,
    }


@dataclass(frozen=True)
class PlainLoop:
    """Measured microseconds per step of single networks, by their number of weights."""

    hardware: str
    microseconds: Mapping[int, float]
    as_graph: Sequence[float]  # of single networks whose steps are CUDA graphs

    def hours(self, effort: Effort) -> float:
        """Estimate how long a row's steps would have taken, from the nearest network measured."""
        row = effort.experiment.row
        inputs = math.prod(BENCHMARKS[row.data].shape)
        classes = 100 if row.data == "cifar100" else 10
        weights = _weights(inputs, row.hidden_layers, row.width, classes)
        nearest = min(self.microseconds, key=lambda other: abs(math.log(other / weights)))
        return 1e-6 * self.microseconds[nearest] * effort.steps / 3600


def _plain_loop(root: Path) -> PlainLoop | None:
    """Return the measurement of the fleet's benchmark, if the file exists."""
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
    return PlainLoop(hardware, measured, as_graph) if measured else None


def _weights(inputs: int, depth: int, width: int, classes: int) -> int:
    return inputs * width + (depth - 1) * width**2 + width * classes


def _plain_numbers(plain: PlainLoop, efforts: Sequence[Effort], seconds: float) -> dict[str, Any]:
    hours, steps = sum(map(plain.hours, efforts)), plain.microseconds.values()
    return {
        "hardware": plain.hardware,
        "microseconds": (min(steps), max(steps)),
        "as_graph": (min(plain.as_graph), max(plain.as_graph)) if plain.as_graph else None,
        "hours": hours,
        "times": 3600 * hours / seconds if seconds else None,
    }
