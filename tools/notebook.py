"""Run a notebook's cells in order and store their outputs.

    python -m tools.notebook docs/notebook.ipynb

A Jupyter kernel would do the same, but needs twenty more packages.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt


def run(path: Path) -> dict[str, Any]:
    """Run a notebook and return it with its outputs; errors in cells propagate."""
    matplotlib.use("agg")
    plt.close("all")
    notebook: dict[str, Any] = json.loads(path.read_text("utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for count, cell in enumerate(cells, start=1):
        cell["execution_count"] = count
        cell["outputs"] = _run_cell("".join(cell["source"]), names, f"{path.name}[{count}]")
    return notebook


def _run_cell(source: str, names: dict[str, Any], file: str) -> list[dict[str, Any]]:
    program = ast.parse(source, file)
    last = program.body.pop() if isinstance(program.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, file, "exec"), names)
        value = None
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), file, "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        lines = printed.getvalue().splitlines(keepends=True)
        outputs.append({"output_type": "stream", "name": "stdout", "text": lines})
    if value is not None:
        outputs.append(_shown({"text/plain": repr(value).splitlines(keepends=True)}))
    for number in plt.get_fignums():
        picture = io.BytesIO()
        plt.figure(number).savefig(picture, format="png", dpi=90)
        outputs.append(_shown({"image/png": base64.b64encode(picture.getvalue()).decode()}))
    plt.close("all")
    return outputs


def _shown(data: dict[str, Any]) -> dict[str, Any]:
    return {"output_type": "display_data", "data": data, "metadata": {}}


if __name__ == "__main__":
    notebook = run(Path(sys.argv[1]))
    text = json.dumps(notebook, ensure_ascii=False, indent=1)
    Path(sys.argv[1]).write_text(text + "\n", "utf-8")
