"""The three figures of RESULTS.md, as SVG by matplotlib.

The background is transparent and the text grey, readable on white and on black. A figure's
description holds its data in words: for readers who cannot see it, and for `report.same`.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paper.claims import paper_points
from paper.verdicts import selected_counts
from pseudograd.search import Difference
from pseudograd.words import counted, fraction, signed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_OURS, _OTHER, TEXT = "#2f7fc1", "#d5702b", "#7a7f87"
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # keep text as text
    "svg.hashsalt": "pseudograd",  # deterministic ids
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": TEXT,
    "axes.edgecolor": TEXT,
    "axes.labelcolor": TEXT,
    "axes.titlecolor": TEXT,
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "legend.frameon": False,
}

Counts = Mapping[int, Mapping[float, int]]
Curves = Mapping[int, Mapping[str, Mapping[float, Difference]]]


@dataclass(frozen=True)
class Picture:
    """A figure: a short title, a description with its data, and its SVG."""

    title: str
    about: str
    svg: str


def draw(numbers: Mapping[str, Any]) -> dict[str, Picture]:
    """Return the figures that have data, by file name."""
    found = {}
    if points := numbers["points"]:
        papers = paper_points(point.row for point in points)
        found["selected-k.svg"] = selected_k(selected_counts(points), selected_counts(papers))
    if numbers["deviations"]:
        found["deviations.svg"] = deviations(numbers["deviations"])
    if numbers["curves"]["drawn"]:
        found["error-against-k.svg"] = error_against_k(numbers["curves"]["drawn"])
    return found


def selected_k(ours: Counts, paper: Counts) -> Picture:
    """Draw how often each k was selected, by depth, ours beside the paper's for the same rows."""
    panels, said = [], []
    for depth in paper:
        ks = sorted({*ours[depth], *paper[depth], 1.0})
        counts = [[of[depth].get(k, 0) for k in ks] for of in (ours, paper)]
        rows = counted(sum(counts[1]), "row")
        panels.append((f"{counted(depth, 'hidden layer')}, {rows} by selected k", ks, counts))
        each = [
            f"k = {fraction(k)} {mine} and {theirs}"
            for k, mine, theirs in zip(ks, *counts, strict=True)
        ]
        said.append(f"{counted(depth, 'hidden layer')}: {', '.join(each)}")

    def fill(figure: Figure) -> None:
        for axes, (title, ks, counts) in zip(_panels(figure, len(panels)), panels, strict=True):
            for values, left, colour, name in (
                (counts[0], -0.2, _OURS, "ours"),
                (counts[1], 0.2, _OTHER, "the paper"),
            ):
                places = [at + left for at in range(len(ks))]
                bars = axes.bar(places, values, 0.38, color=colour, label=name)
                axes.bar_label(bars, [str(value or "") for value in values], color=TEXT)
            axes.set_xticks(range(len(ks)), [fraction(k) for k in ks])
            axes.set_yticks([])
            axes.margins(y=0.12)
            axes.spines["left"].set_visible(False)
            axes.set_title(title)
            axes.set_xlabel("k")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=2)

    title = "How often each k was selected in the same rows, ours and the paper’s"
    return picture(title, said, fill, 3.3 * len(panels), 2.8)


def error_against_k(curves: Curves) -> Picture:
    """Draw the validation error against k relative to k = 1, by depth, with 95% intervals."""
    said = [
        f"{counted(depth, 'hidden layer')}, {name}: "
        + ", ".join(f"k = {fraction(k)} {signed(mean.mean)}%" for k, mean in curve.items())
        for depth, named in curves.items()
        for name, curve in named.items()
    ]

    def fill(figure: Figure) -> None:
        for axes, (depth, named) in zip(_panels(figure, len(curves)), curves.items(), strict=True):
            axes.axhline(0, color=TEXT, linewidth=0.8)
            for (name, curve), colour, aside in zip(
                named.items(), (_OURS, _OTHER), (-0.05, 0.05), strict=False
            ):
                places = [math.log2(k) + aside * (k != 1) for k in curve]
                reach = [
                    0.0 if math.isnan(mean.low) else mean.high - mean.mean
                    for mean in curve.values()
                ]
                means = [mean.mean for mean in curve.values()]
                axes.errorbar(places, means, reach, fmt="o-", ms=4, color=colour, lw=1, label=name)
            ks = sorted({k for curve in named.values() for k in curve})
            axes.set_xticks([math.log2(k) for k in ks], [fraction(k) for k in ks])
            axes.set_title(counted(depth, "hidden layer"))
            axes.set_xlabel("k")
        figure.supylabel("validation error relative to k = 1, %", color=TEXT, fontsize=9)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=2)

    title = "Validation error against k, relative to that of k = 1"
    return picture(title, said, fill, 3.3 * len(curves), 3.0)


def deviations(groups: Mapping[str, Mapping[str, Sequence[float]]]) -> Picture:
    """Draw how far our test errors are from the paper's.

    Args:
        groups: By data set, for "plain" (k = 1) and "chosen" (the selected k): ours over the
            paper's minus 1, in percent, one for each row.

    """
    said = []
    for name, group in groups.items():
        values = [value for kind in group.values() for value in kind]
        said.append(f"{name}: {signed(min(values), '.1f')}% to {signed(max(values), '.1f')}%")

    def fill(figure: Figure) -> None:
        axes = figure.subplots()
        axes.axvline(0, color=TEXT, linewidth=0.8)
        for kind, colour, marker, aside, label in (
            ("plain", _OTHER, "D", -0.15, "k = 1"),
            ("chosen", _OURS, "o", 0.15, "selected k"),
        ):
            spots = [
                (value, at + aside)
                for at, group in enumerate(groups.values())
                for value in group.get(kind, ())
            ]
            places, heights = zip(*spots, strict=True) if spots else ((), ())
            axes.scatter(places, heights, s=16, c=colour, marker=marker, alpha=0.8, label=label)
        axes.set_yticks(range(len(groups)), list(groups))
        axes.invert_yaxis()
        axes.set_xlabel("our test error relative to the paper’s, row by row, %")
        figure.legend(loc="outside upper left", ncols=2)

    title = "Our test errors relative to the paper’s"
    return picture(title, said, fill, 7.0, 0.9 + 0.45 * len(groups))


def _panels(figure: Figure, count: int) -> Sequence[Axes]:
    """One panel for each depth."""
    panels: Sequence[Axes] = figure.subplots(1, count, squeeze=False)[0]
    return panels


def picture(
    title: str, said: Sequence[str], fill: Callable[[Figure], None], width: float, height: float
) -> Picture:
    """Draw a figure of this size, in inches; ``said`` gives its data in words."""
    import matplotlib
    from matplotlib.figure import Figure

    text = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        fill(figure)
        about = f"{title}. {'; '.join(said)}."
        metadata = {"Date": None, "Title": title, "Description": about}
        figure.savefig(text, format="svg", transparent=True, metadata=metadata)
    return Picture(title, about, text.getvalue())
