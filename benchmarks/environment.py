"""Write benchmark results with their hardware, versions and commit."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pseudograd.environment import environment

__all__ = ["RESULTS", "earlier", "environment", "write"]

RESULTS = Path(__file__).parent / "results"


def write(rows: Sequence[Mapping[str, object]], path: Path, quiet: bool = False) -> None:
    """Write rows with the same columns to a CSV file, in place of its earlier contents."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")  # a program that is killed leaves a whole file
    with part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    part.replace(path)
    if not quiet:
        print(f"written to {path}")


def earlier(path: Path, facts: Mapping[str, object]) -> list[dict[str, Any]]:
    """Return the lines of a file that a run of this commit wrote on this hardware."""
    if not path.exists():
        return []
    same = ("hardware", "commit", "torch", "triton")
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    return [line for line in lines if all(line[name] == str(facts[name]) for name in same)]
