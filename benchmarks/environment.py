"""What a figure stands beside: hardware, versions, commit and date."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

import pseudograd


def environment() -> dict[str, str | int]:
    """Describe this machine and what runs on it."""
    return {
        "hardware": hardware(),
        "cores": os.cpu_count() or 0,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "numba": version("numba"),
        "pseudograd": pseudograd.__version__,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def hardware() -> str:
    """Name the GPU if there is one, or else the CPU."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor()


def version(package: str) -> str:
    """Give a package's version, or nothing where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def commit() -> str:
    """Give the commit; in a copy without git, it can be named by PSEUDOGRAD_COMMIT."""
    if named := os.environ.get("PSEUDOGRAD_COMMIT"):
        return named
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True
    )
    return described.stdout.strip() or "unknown"
