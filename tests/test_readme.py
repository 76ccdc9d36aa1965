"""The documents: their code runs, their links work, and user-facing names have an example."""

from __future__ import annotations

import doctest
import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

import pseudograd
import pseudograd.rules
from tools import notebook
from tools.document_code import ROOT, code_blocks, documents

DOCUMENTS = [path for path in documents() if path.suffix == ".md"]
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_code_in_documents_runs(
    document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}  # later blocks continue earlier ones
    for line, code in code_blocks(document):
        if ">>>" in code:
            example = doctest.DocTestParser().get_doctest(
                code, names, f"{name_of(document)}:{line}", str(document), line - 1
            )
            failed, _ = doctest.DocTestRunner(optionflags=OPTIONS).run(example, clear_globs=False)
            assert failed == 0
            names = example.globs
        else:
            exec(compile("\n" * (line - 1) + code, str(document), "exec"), names)


def test_the_notebook_runs_and_its_outputs_are_current() -> None:
    path = ROOT / "docs/notebook.ipynb"

    def shown(cells: list[dict[str, Any]]) -> list[list[tuple[str, list[str]]]]:
        return [
            [(output["output_type"], sorted(output.get("data", {}))) for output in cell["outputs"]]
            for cell in cells
            if cell["cell_type"] == "code"
        ]

    committed = json.loads(path.read_text("utf-8"))
    assert shown(committed["cells"]) == shown(notebook.run(path)["cells"])


def test_internal_links_exist(subtests: pytest.Subtests) -> None:
    for document in DOCUMENTS:
        with subtests.test(document=document):
            prose = re.sub(
                r"^```.*?^```$", "", document.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL
            )
            targets = re.findall(r"\]\(([^)#\s]+)", prose)
            missing = [
                target
                for target in targets
                if "://" not in target and not (document.parent / target).exists()
            ]
            assert missing == []


def user_facing() -> list[str]:
    """Return the user-facing names of the loss, tables and searches, as package.name."""
    packages = [pseudograd, pseudograd.rules]
    return [
        *(
            f"{package.__name__}.{name}"
            for package in packages
            for name in package.__all__
            if inspect.isclass(getattr(package, name)) or inspect.isfunction(getattr(package, name))
        ),
        "pseudograd.TunableMLPClassifier",
        *(
            f"pseudograd.data.{name}"
            for name in ("digits", "load_table", "open_data", "read_frame")
        ),
        *(f"pseudograd.fleet.{name}" for name in ("Fleet", "MLPRecipe", "OwnRecipe", "Trial")),
        *(f"pseudograd.search.{name}" for name in ("Ledger", "Protocol", "Study", "tune")),
    ]


def test_public_names_have_an_example(subtests: pytest.Subtests) -> None:
    for name in user_facing():
        with subtests.test(name=name):
            package, _, attribute = name.rpartition(".")
            docstring = inspect.getdoc(getattr(importlib.import_module(package), attribute)) or ""
            _, found, example = docstring.partition("\nExample:\n")
            assert found, f"{name} has no section 'Example:'"
            assert ">>>" in example
