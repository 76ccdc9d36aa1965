"""Hardware, versions, commit and date, recorded with every result."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from pseudograd import __version__

_ROOT = Path(__file__).parents[2]  # the root of a source checkout


def environment(*devices: str) -> dict[str, str | int]:
    """Return this machine's hardware and software versions; ``devices`` as for `hardware`."""
    return {
        "hardware": hardware(*devices),
        "cores": os.cpu_count() or 0,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "pseudograd": __version__,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def session(command: str, *devices: str) -> dict[str, Any]:
    """Return the record of a session that starts now; the caller fills in its seconds.

    Args:
        command: The command line.
        devices: As for `hardware`.

    """
    facts = environment(*devices)
    names = ("pseudograd", "python", "torch", "triton")
    return {
        "command": command,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        "seconds": 0.0,
        "hardware": facts["hardware"],
        "versions": {name: facts[name] for name in names if facts[name]},
        "commit": facts["commit"],
    }


def hardware(*devices: str) -> str:
    """Return the name of the GPU or CPU, and the number of GPUs if there are several.

    Args:
        devices: The devices in use; by default all GPUs, or the CPU if there are none. "ray" means
            the cluster that this process is connected to.

    """
    if not devices and torch.cuda.is_available():
        devices = ("cuda",) * torch.cuda.device_count()
    if "ray" in devices:
        return _cluster()
    gpus = [device for device in devices if device.startswith("cuda")]
    if gpus:
        name = torch.cuda.get_device_name(gpus[0])
        return f"{len(gpus)} × {name}" if len(gpus) > 1 else name
    cpu_info = Path("/proc/cpuinfo")
    for line in cpu_info.read_text().splitlines() if cpu_info.exists() else ():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor() or platform.machine()


def _cluster() -> str:
    """Return the total resources of the Ray cluster."""
    import ray

    has = ray.cluster_resources()
    prefix = "accelerator_type:"
    kinds = sorted(name.removeprefix(prefix) for name in has if name.startswith(prefix))
    nodes = sum(node["Alive"] for node in ray.nodes())
    gpus = f", {has['GPU']:g} × GPU ({', '.join(kinds) or 'unknown'})" if has.get("GPU") else ""
    return f"Ray cluster: {nodes} × node, {has.get('CPU', 0):g} × CPU{gpus}"


def version(package: str) -> str:
    """Return the version of a package, or "" if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def commit() -> str:
    """Return the commit of the sources, with "-dirty" if they have changed, or "unknown".

    The environment variable PSEUDOGRAD_COMMIT overrides it, for copies without a git repository.

    Example:
        >>> os.environ["PSEUDOGRAD_COMMIT"] = "af69094"
        >>> commit()
        'af69094'
        >>> del os.environ["PSEUDOGRAD_COMMIT"]

    """
    if named := os.environ.get("PSEUDOGRAD_COMMIT"):
        return named

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(_ROOT), *arguments]
        try:
            return subprocess.run(command, capture_output=True, text=True).stdout.strip()
        except FileNotFoundError:  # git is not installed
            return ""

    # Do not report the commit of another repository that an installed package lies in.
    if not (_ROOT / "src" / "pseudograd").is_dir() or not (_ROOT / ".git").exists():
        return "unknown"
    head = git("rev-parse", "--short=12", "HEAD")
    changed = git("status", "--porcelain", "--", "src")
    return f"{head}-dirty" if head and changed else head or "unknown"
