"""The pictures of BEYOND.md, as SVG by matplotlib: differences with intervals, and lines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from beyond.findings import BestRates, Compared, Depth, Summed
from paper.figures import TEXT, Picture, picture
from pseudograd.words import fraction

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = {"better": "#0072B2", "worse": "#D55E00", "level": TEXT}  # for the colour-blind, too
_WIDTH, _ROW, _HEAD = 7.0, 0.24, 0.75  # inches


def differences(panels: Mapping[str, Sequence[tuple[str, Compared]]], title: str) -> Picture | None:
    """Draw differences of test errors with their intervals, a panel for each heading."""
    panels = {heading: rows for heading, rows in panels.items() if rows}
    if not panels:
        return None
    sizes = [_HEAD + _ROW * len(rows) for rows in panels.values()]
    said = [
        f"{heading}: "
        + ", ".join(
            f"{label} {100 * one.difference.mean:+.2f} ({one.verdict})" for label, one in rows
        )
        for heading, rows in panels.items()
    ]

    def fill(figure: Figure) -> None:
        several = figure.subplots(len(panels), squeeze=False, height_ratios=sizes)[:, 0]
        for axes, (heading, rows) in zip(several, panels.items(), strict=True):
            axes.axvline(0, color=TEXT, linewidth=0.8)
            for at, (_, one) in enumerate(rows):
                low, mean, high = (
                    100 * end
                    for end in (one.difference.low, one.difference.mean, one.difference.high)
                )
                if math.isfinite(low):
                    axes.plot((low, high), (at, at), color=_COLOURS[one.verdict], linewidth=2)
                if math.isfinite(mean):
                    axes.plot(mean, at, "o", color=_COLOURS[one.verdict], markersize=5)
            axes.set_yticks(range(len(rows)), [label for label, _ in rows])
            axes.invert_yaxis()
            axes.set_title(heading)
        several[-1].set_xlabel(
            "percentage points of test error; blue: better, grey: level, orange: worse"
        )

    return picture(title, said, fill, _WIDTH, sum(sizes))


def depths(found: Sequence[Depth]) -> Picture | None:
    """Draw the test error against k, a line for each depth."""
    series = {
        f"{one.blocks} blocks": {
            k: 100 * sum(errors) / len(errors) for k, errors in one.errors.items()
        }
        for one in found
    }
    return _chart(series, "Test error against k at several depths", "test error, %")


def suspects(found: Sequence[Summed]) -> Picture | None:
    """Draw the AUROC of finding wrong labels against k, a line for each label set and score."""
    series = {
        f"{one.setting.name}, {score}": {
            float(k): 100 * scores[score]["auroc"] for k, scores in one.found.items()
        }
        for one in found
        for score in ("self-confidence", "margin")
    }
    return _chart(series, "AUROC of finding wrong labels against k", "AUROC, %")


def best_rates(found: Sequence[BestRates]) -> Picture | None:
    """Draw the best learning rate against k, as it is and rescaled."""
    names = {"tunable": "Eq. 5", "normalized": "rescaled"}
    series = {
        f"{one.setting.name}, {names[method]}": {
            k: 2.0**best for k, best in one.best(method).items()
        }
        for one in found
        for method in names
    }
    title = "The best learning rate of each k, as it is and rescaled"
    return _chart(series, title, "best learning rate", log=True)


def _chart(
    series: Mapping[str, Mapping[float, float]], title: str, label: str, *, log: bool = False
) -> Picture | None:
    """Draw lines over k; more than three are pairs of one colour, the second dashed."""
    if not series:
        return None
    paired = len(series) > 3
    said = [
        f"{name}: " + ", ".join(f"k = {fraction(k)} {value:.4g}" for k, value in one.items())
        for name, one in series.items()
    ]

    def fill(figure: Figure) -> None:
        axes = figure.subplots()
        for at, (name, one) in enumerate(series.items()):
            ks = sorted(one)
            colour, style = (f"C{at // 2}", ("-o", "--o")[at % 2]) if paired else (f"C{at}", "-o")
            axes.plot(ks, [one[k] for k in ks], style, color=colour, markersize=4, label=name)
        axes.set_xscale("log", base=2)
        if log:
            axes.set_yscale("log", base=2)
        ks = sorted({k for one in series.values() for k in one})
        axes.set_xticks(ks, [fraction(k) for k in ks])
        axes.set_xlabel("k")
        axes.set_ylabel(label)
        figure.legend(loc="outside right upper")

    return picture(title, said, fill, _WIDTH, 3.2)
