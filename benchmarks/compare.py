"""Two results of one benchmark side by side: before and after a change.

    python -m benchmarks.compare before.csv after.csv --out benchmarks/results/compared.csv

Rows are matched by what names them; their figures are written as before, after and ratio. Run both
on the same machine, by turns if it is uneven: of several files, joined by commas, the median is
taken.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from pathlib import Path

from benchmarks.environment import write

# What names a row, in the files of all benchmarks.
NAMES = ("form", "target", "network", "stage", "shape", "dtype", "way", "k")
# The figure that is compared.
FIGURES = ("us_median", "both_ms_median", "us_per_model_step", "ms_median", "seconds")
FACTS = ("hardware", "cores", "python", "torch", "triton")


def read(paths: str) -> dict[tuple[str, ...], tuple[float, dict[str, str]]]:
    """Return the median figure of each row over several files, and the row."""
    found: dict[tuple[str, ...], list[tuple[float, dict[str, str]]]] = {}
    for path in paths.split(","):
        with Path(path).open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                name = tuple(row.get(part, "") for part in NAMES)
                figure = next(figure for figure in FIGURES if figure in row)
                found.setdefault(name, []).append((float(row[figure]), row))
    return {
        name: (statistics.median(figure for figure, _ in several), several[0][1])
        for name, several in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("before", help="CSV files, joined by commas")
    parser.add_argument("after", help="CSV files, joined by commas")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    before, after = read(arguments.before), read(arguments.after)
    rows = []
    for name, (figure, row) in after.items():
        if name in before:
            old, old_row = before[name]
            rows.append(
                {
                    **{part: text for part, text in zip(NAMES, name, strict=True) if text},
                    "before": old,
                    "after": figure,
                    "ratio": round(figure / old, 3),
                    "unit": next(unit for unit in FIGURES if unit in row),
                    "commit_before": old_row["commit"],
                    "commit_after": row["commit"],
                    "date": row["date"],
                    **{fact: row[fact] for fact in FACTS},
                }
            )
    every = dict.fromkeys(column for row in rows for column in row)
    write([{column: row.get(column, "") for column in every} for row in rows], arguments.out)
    ratios = sorted(float(str(row["ratio"])) for row in rows)
    middle = statistics.median(ratios)
    print(f"{len(rows)} rows, ratio {ratios[0]} to {ratios[-1]}, median {middle}")


if __name__ == "__main__":
    main()
