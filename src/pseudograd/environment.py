"""What a figure stands beside: hardware, versions, commit and date."""

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

_ROOT = Path(__file__).parents[2]  # of a checkout


def environment(*devices: str) -> dict[str, str | int]:
    """Describe this machine and what runs on it.

    Args:
        devices: Those to name the hardware of; the GPUs unless given, if there are any.

    Example:
        >>> environment("cpu")["torch"] == torch.__version__
        True

    """
    return {
        "hardware": hardware(*devices),
        "cores": os.cpu_count() or 0,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "numba": version("numba"),
        "pseudograd": __version__,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def session(command: str, *devices: str) -> dict[str, Any]:
    """Describe work that begins now, as plain values; its seconds are to be filled in.

    Args:
        command: What was asked for.
        devices: Where it is done.

    Example:
        >>> begun = session("pseudograd tune digits", "cpu")
        >>> begun["command"], begun["seconds"]
        ('pseudograd tune digits', 0.0)

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
    """Name the GPU or the CPU, and how many there are if they are several.

    Args:
        devices: Those in use; the GPUs unless given, if there are any. "ray" is the cluster that
            this process is connected to.

    Example:
        >>> hardware("cpu") != ""
        True

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
    """What the machines of a Ray cluster have together."""
    import ray

    has = ray.cluster_resources()
    prefix = "accelerator_type:"
    kinds = sorted(name.removeprefix(prefix) for name in has if name.startswith(prefix))
    nodes = sum(node["Alive"] for node in ray.nodes())
    gpus = f", {has['GPU']:g} × GPU ({', '.join(kinds) or 'unknown'})" if has.get("GPU") else ""
    return f"Ray cluster: {nodes} × node, {has.get('CPU', 0):g} × CPU{gpus}"


def version(package: str) -> str:
    """Give a package's version, or nothing where it is not installed.

    Args:
        package: Its name.

    Example:
        >>> version("no-such-package")
        ''

    """
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def commit() -> str:
    """Give the commit of these sources, "-dirty" if they differ from it, or "unknown".

    In a copy without git, it can be named by PSEUDOGRAD_COMMIT.

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
        except FileNotFoundError:  # no git here
            return ""

    # An installed package may lie inside somebody else's repository.
    if not (_ROOT / "src" / "pseudograd").is_dir() or not (_ROOT / ".git").exists():
        return "unknown"
    head = git("rev-parse", "--short=12", "HEAD")
    changed = git("status", "--porcelain", "--", "src")
    return f"{head}-dirty" if head and changed else head or "unknown"
