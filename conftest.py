"""What cannot be tested here is left out; which tests stay together if several processes test."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from typing import Any

import pytest

NEEDS = {
    "numba": ["src/pseudograd/loss/cpu.py"],
    "ray": ["src/pseudograd/search/cluster.py"],
    "triton": [
        "src/pseudograd/fleet/fused.py",
        "src/pseudograd/fleet/kernels.py",
        "src/pseudograd/loss/kernels.py",
        "src/pseudograd/loss/operators.py",
    ],
}

# Doctests of modules whose libraries are not installed.
collect_ignore = [
    module
    for library, modules in NEEDS.items()
    if importlib.util.find_spec(library) is None
    for module in modules
]

# What starts a Ray cluster: parts of the names of tests.
CLUSTERS = (
    "test_cluster.py",
    "cluster.RayRunner",
    "cluster.md",
    "test_rows_on_a_cluster",
    "test_a_run_on_a_cluster",
)

# Ray's workers step back for all other processes, and so for the tests beside them.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 (so Ray calls it)


def needs_cluster(nodeid: str) -> bool:
    """Whether a test is one of those."""
    return any(name in nodeid for name in CLUSTERS)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a cluster where Ray itself, without any code of ours, cannot start one."""
    if needs_cluster(item.nodeid) and (why := why_no_cluster()):
        pytest.skip(f"Ray cannot start a cluster here: {why}")


@functools.cache
def why_no_cluster() -> str | None:
    """Why Ray cannot start one; None if it can, or if it is not installed."""
    if importlib.util.find_spec("ray") is None:
        return None
    start = "import ray; ray.init(address='local', num_cpus=1, include_dashboard=False)"
    try:
        run = subprocess.run([sys.executable, "-c", start], capture_output=True, timeout=180)
    except subprocess.TimeoutExpired:
        return "it takes more than three minutes"
    if run.returncode == 0:
        return None
    said = run.stderr.decode(errors="replace").strip().splitlines()
    return said[-1] if said else f"exit status {run.returncode}"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep a file in one process, to prepare things once, and clusters, to have one at a time."""
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "clusters" if needs_cluster(nodeid) else super()._split_scope(nodeid)

    return Files(config, log)
