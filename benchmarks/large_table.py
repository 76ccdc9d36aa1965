"""Measure `pseudograd tune` on a million rows and twenty columns: time, memory, test error.

    python -m benchmarks.large_table

The table is synthetic: fourteen columns of numbers, six of categories, and labels that depend on
some of them, with noise. Baselines on the same split show whether the model is any good.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.environment import RESULTS, write
from pseudograd.environment import session


def write_table(path: Path, rows: int) -> None:
    """Write the table as a .csv file."""
    random = np.random.default_rng(0)
    numbers = random.normal(size=(rows, 14)).round(4)
    frame = pd.DataFrame(numbers, columns=[f"x{at}" for at in range(14)])
    for at in range(6):
        frame[f"c{at}"] = random.choice([f"v{value}" for value in range(3 + 5 * at)], rows)
    score = np.sin(2 * frame.x0) + frame.x1 * frame.x2 + 0.5 * frame.x3
    score += 1.5 * (frame.c0 == "v1") - (frame.c3 == "v2") + random.logistic(0, 0.7, rows)
    frame["label"] = np.where(score > 0.3, "yes", "no")
    frame.to_csv(path, index=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, default=RESULTS / "large_table.csv")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path, run = Path(folder, "large.csv"), Path(folder, "run")
        write_table(path, options.rows)
        command = ["tune", str(path), "--target", "label", "--out", str(run)]
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "pseudograd", *command], check=True)
        seconds = time.perf_counter() - started
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        found = json.loads((run / "assessment.json").read_text())
        about = session("python -m benchmarks.large_table", "cpu")
        row = {
            "rows": options.rows,
            "megabytes": round(path.stat().st_size / 1e6),
            "seconds": round(seconds),
            "cpu_seconds": round(used.ru_utime + used.ru_stime),
            "peak_gigabytes": round(used.ru_maxrss / 1e6, 2),  # kilobytes on Linux
            "test_error": round(found["model"]["error"], 4),
            **{one["name"]: round(one["error"], 4) for one in found["baselines"]},
            "hardware": about["hardware"],
            "versions": json.dumps(about["versions"]),
            "commit": about["commit"],
        }
    print(row)
    write([row], options.out)


if __name__ == "__main__":
    main()
