"""What installing and importing the package brings along."""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


def in_a_fresh_process(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


@pytest.mark.parametrize(
    "loss",
    [
        "pseudograd.TunableCrossEntropyLoss(k=0.5)",
        "pseudograd.RuleCrossEntropyLoss(lambda z, y: tunable(z, y, 0.5))",
    ],
)
def test_torch_compile_finds_a_loss_made_before_it_was_imported(loss: str) -> None:
    """Importing less must not cost correctness: here torch.compile meets the loss first of all."""
    code = (
        "import sys, torch, pseudograd\n"
        "from pseudograd.rules import tunable\n"
        f"loss = {loss}\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "z, y = torch.randn(2, 3, 4, requires_grad=True), torch.tensor([[0, 1, 2], [3, 2, 1]])\n"
        "total = lambda z, y: torch.vmap(loss)(z, y).sum()\n"
        "torch.compile(total, fullgraph=True, backend='aot_eager')(z, y).backward()\n"
        "torch.testing.assert_close(3 * z.grad, tunable(z.detach(), y, 0.5))\n"
        "print('right')"
    )
    assert in_a_fresh_process(code) == "right\n"


def test_every_version_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {canonicalize_name(line.partition("==")[0]) for line in lines if "==" in line}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    waiting = [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *itertools.chain.from_iterable(project["project"]["optional-dependencies"].values()),
        *itertools.chain.from_iterable(project["dependency-groups"].values()),
    ]
    needed: set[str] = set()
    while waiting:
        requirement = Requirement(waiting.pop())
        name = canonicalize_name(requirement.name)
        marker = requirement.marker
        if name in needed or (marker and not marker.evaluate({"extra": ""})):
            continue
        needed.add(name)
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # of the build
            waiting += importlib.metadata.requires(name) or []
    assert needed - pins == set()
