"""`import pseudograd` is fast, and its packages import in one direction only."""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pseudograd
from kernels import NO_KERNELS
from pseudograd.loss import cpu

PACKAGE = Path(pseudograd.__file__).parent
# The parts of the package that each part may import besides itself; `cli` may import all.
MAY_IMPORT: dict[str, set[str]] = {
    "rules": set(),
    "words": set(),
    "files": set(),
    "extras": set(),
    "environment": {"__version__"},
    "loss": {"rules"},
    "schedules": {"rules"},
    "jax": {"rules", "extras"},
    "data": {"files", "extras", "words"},
    "fleet": {"rules", "loss", "data", "files", "extras", "words"},
    "search": {"rules", "data", "fleet", "files", "environment", "extras", "words"},
    "estimator": {"rules", "data", "fleet", "search", "words"},
    "report": {"data", "files", "fleet", "search", "words"},
}
# The one upward import: a study writes its page. It is imported when called.
UPWARD = {
    ("pseudograd.search.study", "pseudograd.report.page.write_page"),
    ("pseudograd.search.study", "pseudograd.report.summary.study_summary"),
}
HEAVY = {
    "IPython", "PIL", "hypothesis", "jax", "jaxlib", "jinja2", "llvmlite", "matplotlib", "mpmath",
    "optax", "pandas", "pooch", "pytest", "ray", "requests", "rich", "safetensors",
    "scipy", "seaborn", "sklearn", "tqdm", "triton",
}  # fmt: skip


def imported_by(statement: str) -> set[str]:
    """Return the modules that ``statement`` imports in addition to ``import torch``."""
    code = (
        "import sys, torch; before = set(sys.modules); "
        f"{statement}; print(*sorted(set(sys.modules) - before))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment
    )
    return set(done.stdout.split())


def test_import_is_light() -> None:
    new = imported_by("import pseudograd")
    assert "pseudograd" in new
    assert not {name.partition(".")[0] for name in new} & HEAVY
    packages = {name.split(".")[1] for name in new if name.startswith("pseudograd.")}
    assert packages <= {"loss", "rules", "schedules"}
    # No module of PyTorch that `import torch` leaves out, such as its compiler.
    assert not {name for name in new if name.startswith(("torch._dynamo", "torch._inductor"))}


USE = (
    "z = torch.zeros(2, 3, requires_grad=True); "
    "pseudograd.tunable_cross_entropy(z, torch.tensor([0, 1]), k=0.5).backward(); "
    "assert abs(z.grad[0, 0] + 0.5 * (2 / 3) ** 0.5) < 1e-6"
)


def test_the_kernels_come_with_the_first_loss() -> None:
    """Not with the import, which should be free."""
    count = "assert cpu.kernels.cache_info().currsize == "
    imported_by(f"import pseudograd; from pseudograd.loss import cpu; {count}0; {USE}; {count}1")


@pytest.mark.parametrize(
    "obstacle",
    [
        "cpu.library_path = lambda name: Path('/nowhere')",  # built without a compiler
        "del os.register_at_fork",  # as on Windows
        "ctypes.CDLL(None).__class__.GOMP_parallel = None",  # PyTorch with another thread library
    ],
)
def test_works_where_something_is_missing(obstacle: str) -> None:
    first = "import ctypes, os; from pathlib import Path"
    late = "from pseudograd.loss import cpu"
    order = [obstacle, late] if "fork" in obstacle else [late, obstacle]
    imported_by("; ".join([first, *order, "import pseudograd", USE]))


@pytest.mark.skipif(cpu.kernels() is None, reason=NO_KERNELS)
def test_kernels_of_an_older_source_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "source_hash", lambda source: b"newer")
    with pytest.warns(UserWarning, match="built from other sources and is not used"):
        assert cpu.kernels.__wrapped__() is None


@functools.cache
def modules() -> dict[str, list[str]]:
    """Return what each module imports, by module name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE.parent).with_suffix("")
        found[".".join(relative.parts)] = [*names_imported(ast.parse(path.read_text()))]
    return found


def names_imported(tree: ast.Module) -> Iterator[str]:
    """Return all names imported anywhere in the file, including inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports must be absolute"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_packages_import_in_one_direction(part: str) -> None:
    seen = 0
    for name, imported in modules().items():
        if f"{name}.".split(".")[1] != part:
            continue
        seen += 1
        for other in imported:
            parts = other.split(".")
            assert parts[0] not in ("benchmarks", "paper"), f"{name} imports {other}"
            if parts[0] == "pseudograd":
                assert len(parts) > 1, f"{name} imports all of the package"
                allowed = parts[1] in {part, *MAY_IMPORT[part]} or (name, other) in UPWARD
                assert allowed, f"{name} imports {other}"
    assert seen


def test_public_names() -> None:
    assert set(pseudograd.__all__) >= {
        "RuleCrossEntropyLoss",
        "TunableCrossEntropyLoss",
        "tunable_cross_entropy",
    }
    for name in pseudograd.__all__:
        assert callable(getattr(pseudograd, name))
