"""What cannot be tested here is left out: what needs libraries or a cluster that cannot be had."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

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
CLUSTERS = ("test_cluster.py", "cluster.RayRunner", "cluster.md", "test_a_run_on_a_cluster")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a cluster where Ray itself, without any code of ours, cannot start one."""
    of_clusters = [item for item in items if any(name in item.nodeid for name in CLUSTERS)]
    if not of_clusters or importlib.util.find_spec("ray") is None:
        return
    start = "import ray; ray.init(address='local', num_cpus=1, include_dashboard=False)"
    try:
        run = subprocess.run([sys.executable, "-c", start], capture_output=True, timeout=180)
        if run.returncode == 0:
            return
        said = run.stderr.decode(errors="replace").strip().splitlines()
        why = said[-1] if said else f"exit status {run.returncode}"
    except subprocess.TimeoutExpired:
        why = "it takes more than three minutes"
    for item in of_clusters:
        item.add_marker(pytest.mark.skip(reason=f"Ray cannot start a cluster here: {why}"))
