"""Plot a run of `benchmarks.loss --device cuda` with peers: time and memory of ours and of theirs.

python -m benchmarks.picture_loss docs/pictures/kernels.png
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.environment import RESULTS

OURS = "ours k=0.5"
# Okabe and Ito's palette, which is safe for colour-blind readers.
LOOKS = {
    "cross_entropy": ("#595959", "s"),
    "linear, cross_entropy": ("#595959", "s"),
    "torch.compile": ("#E69F00", "D"),
    "liger": ("#009E73", "^"),
    "liger, CuTe": ("#009E73", "x"),
    "quack": ("#CC79A7", "v"),
    "linear, quack": ("#CC79A7", "1"),
    "cut, exact": ("#D55E00", "<"),
    OURS: ("#0072B2", "o"),
}
LABELS = {
    "linear, cross_entropy": "PyTorch",
    "cross_entropy": "PyTorch",
    "linear, quack": "PyTorch's layer, quack",
    "liger, CuTe": "liger for Hopper",
    OURS: "ours, k = 1/2",
}
FORMS = {"logits": "", "linear": "layer and loss, "}
Rows = Sequence[dict[str, str]]


def case(row: dict[str, str]) -> tuple[str, str, str]:
    return row["form"], row["dtype"], row["shape"]


def panel(axes: Axes, rows: Rows, column: str, unit: str, size: float) -> None:
    """Plot each shape on a line, with a mark for each contender as a multiple of ours."""
    cases = list(dict.fromkeys(map(case, rows)))
    beside = ("axes fraction", "data")
    own = {case(row): float(row[column]) for row in rows if row["way"] == OURS}
    for name, (colour, marker) in LOOKS.items():
        points = [
            (float(row[column]) / own[case(row)], cases.index(case(row)))
            for row in rows
            if row["way"] == name
        ]
        axes.plot(*zip(*points, strict=True), marker, color=colour, label=LABELS.get(name, name),
                  markersize=8 if name == OURS else 6)  # fmt: skip
    for line, figure in enumerate(own.values()):
        text = f"{figure / size:{',.0f' if figure >= 100 * size else '.3g'}} {unit}"
        axes.annotate(text, (1.01, line), xycoords=beside, verticalalignment="center", fontsize=8)
    axes.annotate("ours", (1.01, -1), xycoords=beside, fontsize=8)
    axes.grid(axis="y", linewidth=0.4)
    axes.spines[["top", "right", "left"]].set_visible(False)
    names = [f"{FORMS[form]}{dtype} {shape.replace('x', '×')}" for form, dtype, shape in cases]
    axes.set_yticks(range(len(cases)), names)


def main() -> None:
    with (RESULTS / "loss_peers_cuda.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["form"] in FORMS]
    figure = Figure(figsize=(11, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    panel(left, rows, "both_ms_median", "ms", 1)
    left.invert_yaxis()
    left.set_xscale("log")
    left.xaxis.set_major_formatter("{x:g}")
    left.set_xlabel("time, as a multiple of ours")
    holding = [row for row in rows if "liger" not in row["way"] or row["form"] == "linear"]
    panel(right, holding, "peak_bytes", "MB", 1e6)
    right.set_xlim(left=0)
    right.set_xlabel(
        "memory beyond the inputs, as a multiple of ours\n"
        "(Liger is left out for logits: it writes the gradient over them)"
    )
    handles, labels = left.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(unique.values(), unique.keys(), loc="outside upper center", ncols=4,
                  frameon=False)  # fmt: skip
    figure.savefig(Path(sys.argv[1]), dpi=110)


if __name__ == "__main__":
    main()
