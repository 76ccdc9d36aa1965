"""Doctests of modules whose libraries are not installed are left out."""

from __future__ import annotations

import importlib.util

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

collect_ignore = [
    module
    for library, modules in NEEDS.items()
    if importlib.util.find_spec(library) is None
    for module in modules
]
