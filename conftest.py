"""Skip tests that cannot run here, and say which tests share a process under pytest-xdist."""

from __future__ import annotations

import functools
import glob
import importlib.util
import os
import subprocess
import sys
from typing import Any

import pytest

NEEDS = {
    "jax": ["src/pseudograd/jax.py"],
    "ray": ["src/pseudograd/search/cluster.py"],
    "triton": [
        "src/pseudograd/fleet/mlp/fused.py",
        "src/pseudograd/fleet/mlp/kernels.py",
        *sorted(glob.glob("src/pseudograd/loss/triton/*.py", root_dir=os.path.dirname(__file__))),
    ],
}

# Doctests of modules whose libraries are not installed.
collect_ignore = [
    module
    for library, modules in NEEDS.items()
    if importlib.util.find_spec(library) is None
    for module in modules
]

# Parts of the names of tests that start a Ray cluster.
CLUSTERS = (
    "test_cluster.py",
    "cluster.RayRunner",
    "cluster.md",
    "test_ray_tune",
    "test_rows_on_a_cluster",
    "test_a_run_on_a_cluster",
)

# By default Ray's workers yield the CPU to all other processes, such as tests running beside them.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 (Ray's spelling)


def needs_cluster(nodeid: str) -> bool:
    """Return whether a test starts a Ray cluster."""
    return any(name in nodeid for name in CLUSTERS)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that need a cluster if Ray itself, without our code, cannot start one."""
    if needs_cluster(item.nodeid) and (why := why_no_cluster()):
        pytest.skip(f"Ray cannot start a cluster here: {why}")


@functools.cache
def why_no_cluster() -> str | None:
    """Return why Ray cannot start a cluster; None if it can, or if it is not installed."""
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
    """Run each file in one process, so that fixtures are shared, and one cluster at a time."""
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "clusters" if needs_cluster(nodeid) else super()._split_scope(nodeid)

    return Files(config, log)
