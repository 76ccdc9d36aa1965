"""What a figure stands beside: hardware, versions, commit and date."""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

import pseudograd

RESULTS = Path(__file__).parent / "results"


def environment(device: str | None = None) -> dict[str, str | int]:
    """Describe this machine and what runs on it.

    Args:
        device: "cpu" or "cuda", for the hardware to name; the GPU unless given, if there is one.

    """
    return {
        "hardware": hardware(device),
        "cores": os.cpu_count() or 0,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "numba": version("numba"),
        "pseudograd": pseudograd.__version__,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def hardware(device: str | None = None) -> str:
    """Name the GPU or the CPU."""
    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    cpu_info = Path("/proc/cpuinfo")
    for line in cpu_info.read_text().splitlines() if cpu_info.exists() else ():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor() or platform.machine()


def version(package: str) -> str:
    """Give a package's version, or nothing where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def commit() -> str:
    """Give the commit, "-dirty" if the sources differ from it.

    In a copy without git, it can be named by PSEUDOGRAD_COMMIT.
    """
    if named := os.environ.get("PSEUDOGRAD_COMMIT"):
        return named

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    head = git("rev-parse", "--short=12", "HEAD")
    changed = git("status", "--porcelain", "--", "src")
    return f"{head}-dirty" if head and changed else head or "unknown"


def write(rows: Sequence[Mapping[str, object]], path: Path) -> None:
    """Write rows that share their columns to a CSV file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    print(f"written to {path}")
