"""What installing and importing the package requires."""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import pseudograd
from pseudograd.extras import OPTIONAL
from pseudograd.loss import cpu

ROOT = Path(__file__).parents[1]


def in_a_fresh_process(code: str) -> str:
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return done.stdout


def test_torch_compile_finds_a_loss_made_before_it_was_imported() -> None:
    """Lazy imports must not break torch.compile, which here sees the losses first."""
    code = (
        "import sys, torch, pseudograd\n"
        "from pseudograd.rules import tunable\n"
        "losses = [pseudograd.TunableCrossEntropyLoss(k=0.5),\n"
        "          pseudograd.RuleCrossEntropyLoss(lambda z, y: tunable(z, y, 0.5))]\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "z, y = torch.randn(2, 3, 4, requires_grad=True), torch.tensor([[0, 1, 2], [3, 2, 1]])\n"
        "for loss in losses:\n"
        "    total = lambda z, y: torch.vmap(loss)(z, y).sum()\n"
        "    z.grad = None\n"
        "    torch.compile(total, fullgraph=True, backend='aot_eager')(z, y).backward()\n"
        "    torch.testing.assert_close(3 * z.grad, tunable(z.detach(), y, 0.5))\n"
        "print('right')"
    )
    assert in_a_fresh_process(code) == "right\n"


def test_a_default_device_does_not_affect_the_loss() -> None:
    """Even if it was set before the import."""
    code = (
        "import torch\n"
        "torch.set_default_device('meta')\n"
        "import pseudograd\n"
        "z, y = torch.zeros(2, 4, device='cpu'), torch.tensor([0, 3], device='cpu')\n"
        "print(f'{pseudograd.tunable_cross_entropy(z, y).item():.4f}')"
    )
    assert in_a_fresh_process(code) == "1.3863\n"


def distributions_of(*roots: str) -> set[str]:
    """Return these distributions and all that they depend on."""
    waiting, found = list(roots), set[str]()
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found:
            continue
        found.add(name)
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            needs = map(Requirement, importlib.metadata.requires(name) or [])
            waiting += [r.name for r in needs if not r.marker or r.marker.evaluate({"extra": ""})]
    return found


def in_a_core_install(code: str) -> str:
    """Run code where the only third-party packages are those of NumPy and PyTorch."""
    core = distributions_of("numpy", "torch")
    hidden = {
        module
        for module, owners in importlib.metadata.packages_distributions().items()
        if module != "pseudograd" and core.isdisjoint(map(canonicalize_name, owners))
    }
    hide = (
        "import sys\n"
        "class Hiding:\n"
        "    def __init__(self, finder): self.finder = finder\n"
        "    def __getattr__(self, name): return getattr(self.finder, name)\n"
        "    def find_spec(self, name, *where):\n"
        f"        hidden = name.partition('.')[0] in {hidden}\n"
        "        return None if hidden else self.finder.find_spec(name, *where)\n"
        "sys.meta_path[:] = map(Hiding, sys.meta_path)\n"
    )
    return in_a_fresh_process(hide + code)


def test_a_core_install_trains() -> None:
    """With every feature of the loss, and without warnings about missing packages."""
    code = (
        "import warnings, torch\n"
        "warnings.simplefilter('error')\n"
        "import pseudograd, pseudograd.rules as rules\n"
        "from pseudograd import TunableCrossEntropyLoss, TunableLinearCrossEntropyLoss\n"
        "torch.manual_seed(0)\n"
        "x, y = torch.randn(64, 5), torch.arange(64) % 3\n"
        "model = torch.nn.Linear(5, 3)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.5)\n"
        "soft = torch.nn.functional.one_hot(y, 3) * 0.9 + 0.1 / 3\n"
        "of_a_rule = pseudograd.RuleCrossEntropyLoss(lambda z, y: rules.tunable(z, y, 0.5))\n"
        "linear = TunableLinearCrossEntropyLoss(k=0.5)\n"
        "losses = {\n"
        "    'labels': lambda: TunableCrossEntropyLoss(k=0.5)(model(x), y),\n"
        "    'soft': lambda: TunableCrossEntropyLoss(k=2.0)(model(x), soft),\n"
        "    'smoothed': lambda: TunableCrossEntropyLoss(k=2, label_smoothing=0.1)(model(x), y),\n"
        "    'rule': lambda: of_a_rule(model(x), y),\n"
        "    'linear': lambda: linear(x, model.weight, y, model.bias),\n"
        "}\n"
        "for name, loss in losses.items():\n"
        "    model.reset_parameters()\n"
        "    values = []\n"
        "    for _ in range(20):\n"
        "        optimizer.zero_grad()\n"
        "        value = loss()\n"
        "        value.backward()\n"
        "        optimizer.step()\n"
        "        values.append(value.item())\n"
        "    assert values[-1] < values[0], name\n"
        "assert 'pandas' not in sys.modules\n"
        "print('trained')"
    )
    assert in_a_core_install(code) == "trained\n"


def test_the_command_in_a_core_install() -> None:
    """The command shows its help, and names the extra that a subcommand needs."""
    code = (
        "import contextlib\n"
        "from pseudograd.cli import main\n"
        "for option in ('--help', '--version'):\n"
        "    with contextlib.suppress(SystemExit): main([option])\n"
        "with contextlib.redirect_stderr(sys.stdout):\n"
        "    assert main(['tune', 'digits']) == 1"
    )
    said = in_a_core_install(code).splitlines()
    assert said[0].startswith("usage: pseudograd")
    assert said[-2] == f"pseudograd {pseudograd.__version__}"
    needs = "data 'digits' needs scikit-learn: pip install 'pseudograd[tune]'"
    assert said[-1] == f"pseudograd: {needs}"


def test_errors_name_the_missing_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PSEUDOGRAD_DATA", raising=False)
    Path("a.csv").touch()
    needs = {
        "pseudograd import TunableMLPClassifier": "TunableMLPClassifier needs scipy",
        "pseudograd import Study; Study(None, 0, 0)": "a study needs safetensors",
        "pseudograd.data import digits; digits()": "data 'digits' needs scikit-learn",
        "pseudograd.data import load_table as f; f('a.csv', 'y')": "reading tables needs pandas",
        "pseudograd.data import data_folder; data_folder()": "the default folder for data "
        "(name one by data_dir or PSEUDOGRAD_DATA) needs pooch",
        "pseudograd.data.benchmarks import read_svhn as read; read(0)": "reading .mat files needs "
        "scipy",
        "pseudograd.fleet import Network; Network.load('a')": "loading a model needs safetensors",
        "pseudograd.search.connection import connection as c; next(c().gen)": "a cluster needs ray",
        "pseudograd.jax import tunable_cross_entropy": "pseudograd.jax needs jax",
    }
    code = "".join(
        f"try:\n    from {use}\nexcept ImportError as problem:\n    print(problem)\n"
        for use in needs
    )
    said = in_a_core_install(code).splitlines()
    extras = [
        package if (package := sentence.split()[-1]) in ("ray", "jax") else "tune"
        for sentence in needs.values()
    ]
    assert said == [
        f"{sentence}: pip install 'pseudograd[{extra}]'"
        for sentence, extra in zip(needs.values(), extras, strict=True)
    ]


def test_optional_packages_are_in_their_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    declared = {
        (Requirement(line).name, extra)
        for extra, lines in extras.items()
        if extra != "all"
        for line in lines
    }
    assert set(OPTIONAL.values()) == declared
    everything = Requirement(*extras["all"])
    assert everything.extras == extras.keys() - {"all", "jax"}


def test_every_version_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {canonicalize_name(line.partition("==")[0]) for line in lines if "==" in line}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *itertools.chain.from_iterable(project["project"]["optional-dependencies"].values()),
        *itertools.chain.from_iterable(project["dependency-groups"].values()),
    ]
    requirements = [Requirement(line) for line in asked]
    here = [r.name for r in requirements if r.marker is None or r.marker.evaluate()]
    assert distributions_of(*here) - pins == {"pseudograd"}


def test_tab_completion_finds_every_public_name() -> None:
    assert {*pseudograd.__all__, "Study", "TunableMLPClassifier"} < {*dir(pseudograd)}
    assert all(hasattr(pseudograd, name) for name in dir(pseudograd))


def test_the_citation_has_the_version_of_the_package() -> None:
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    assert re.findall(r"^version: (.*)$", citation, re.MULTILINE) == [pseudograd.__version__]


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_the_kernels_have_been_built() -> None:
    """Otherwise all their tests would be skipped unnoticed."""
    assert cpu.kernels() is not None
