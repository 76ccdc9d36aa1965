"""Write benchmark results with their hardware, versions and commit."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from pseudograd.environment import environment

__all__ = ["RESULTS", "environment", "write"]

RESULTS = Path(__file__).parent / "results"


def write(rows: Sequence[Mapping[str, object]], path: Path) -> None:
    """Write rows with the same columns to a CSV file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    print(f"written to {path}")
