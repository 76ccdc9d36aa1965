"""Pictures of the toy example and of the rule, by matplotlib without a display."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from paper.theory import error_pct, fixed_point
from paper.toy import ToyRun, ToySummary, paper_row, summarize
from pseudograd.rules.checks import check_k
from pseudograd.words import fraction

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can tell apart too.
_OURS, _PAPER, _LIMIT = "#0072B2", "#D55E00", "#595959"


def toy_picture(results: Iterable[ToyRun], path: Path) -> None:
    """Draw test error and threshold against k: ours, the paper's, and the fixed point.

    Args:
        results: Runs of one alpha.
        path: The file; its suffix (.png, .pdf, .svg) selects the format.

    """
    summaries = summarize(results)
    alpha = summaries[0].alpha
    figure = _figure(9.0, 4.0)
    left, right = figure.subplots(1, 2, gridspec_kw={"wspace": 0.08})
    _measured(left, summaries, "error_pct")
    _measured(right, summaries, "threshold")
    for axes, least in ((left, error_pct(0.0, alpha)), (right, 0.0)):
        axes.axhline(least, color=_LIMIT, linewidth=0.8, linestyle=(0, (1, 2)))
        axes.annotate(
            "best possible",
            (1, least),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 3),
            textcoords="offset points",
            horizontalalignment="right",
            color=_LIMIT,
        )
        axes.set_xlabel("k, sensitivity to large errors")
    left.set_title("Test error (%)", loc="left")
    right.set_title("Threshold", loc="left")
    figure.legend(
        *left.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False
    )
    figure.savefig(path, dpi=160)


def curve_picture(ks: Sequence[float], path: Path) -> None:
    """Draw the paper's Figure 2: the gradient |f_y| against the bias |ε_y|."""
    from matplotlib import colormaps

    for k in ks:
        check_k(k)
    figure = _figure(6.0, 4.2)
    axes = figure.subplots()
    # Denser towards 0, where the curves of small k are steep.
    bias = np.linspace(0, 1, 401) ** 4
    ordered = sorted(ks)
    # Viridis without its palest fifth, which is too pale for a line on white.
    shades = colormaps["viridis"](np.linspace(0, 0.8, len(ordered)))
    for k, shade in zip(ordered, shades, strict=True):
        if k == 1:
            axes.plot(bias, bias, color="black", linestyle="--", label="1 (cross-entropy)")
        else:
            axes.plot(bias, bias**k, color=shade, linewidth=1.8, label=fraction(k))
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_aspect("equal")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(r"$1 - p = |\epsilon_y|$, probability missing from the true class")
    axes.set_ylabel(r"$|f_y|$, gradient at the true class's logit")
    # In the order of the curves, from the top down.
    axes.legend(title="k", frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=160)


def _figure(width: float, height: float) -> Figure:
    """An empty figure, in inches, outside pyplot's global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _measured(axes: Axes, summaries: Sequence[ToySummary], name: str) -> None:
    """Draw one quantity against k, with the paper's and the theory's."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    ks = [summary.k for summary in summaries]
    spreads = [getattr(summary, name) for summary in summaries]
    alpha = summaries[0].alpha
    smooth = np.geomspace(min(ks), max(ks), 49)
    limits = [getattr(fixed_point(float(k), alpha), name) for k in smooth]
    axes.plot(smooth, limits, color=_LIMIT, linewidth=1.2, label="theory, infinite sample")
    papers = [row for row in map(paper_row, summaries) if row]
    if papers:
        axes.plot(
            [row.k for row in papers],
            [getattr(row, name) for row in papers],
            color=_PAPER,
            linestyle="none",
            marker="D",
            markersize=6,
            markerfacecolor="none",
            markeredgewidth=1.4,
            label="paper",
        )
    runs = summaries[0].runs
    axes.errorbar(
        ks,
        [spread.mean for spread in spreads],
        yerr=[spread.sd for spread in spreads] if runs > 1 else None,
        color=_OURS,
        linestyle="none",
        marker="o",
        markersize=5,
        capsize=3,
        label=f"ours, mean ± sd of {runs} runs" if runs > 1 else "ours, one run",
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(ks)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda k, _: fraction(k)))
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
