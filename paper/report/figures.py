"""The figures of the results: SVG in the style of the page, inline or as files of their own."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from itertools import chain

from markupsafe import Markup

from pseudograd.report.figures import Drawing, Scale, round_numbers, scale, signed
from pseudograd.report.summary import counted, fraction
from pseudograd.search import Difference

_PANEL, _GAP, _LEFT = 270, 40, 46


def selected_k(
    ours: Mapping[int, Mapping[float, int]], paper: Mapping[int, Mapping[float, int]]
) -> Markup:
    """Draw how often each k was selected, by depth, ours beside the paper's of the same rows.

    Args:
        ours: By the number of hidden layers and k, how often.
        paper: The same for the paper.

    Example:
        >>> selected_k({1: {0.5: 3}}, {1: {0.5: 1, 0.25: 2}})[:4]
        Markup('<svg')

    """
    top, floor = 66, 216
    most = max(times for counts in (*ours.values(), *paper.values()) for times in counts.values())
    height = scale(0, most, 0, floor - top)
    said = "; ".join(
        f"{counted(depth, 'hidden layer')}: "
        + ", ".join(
            f"k = {fraction(k)} {ours[depth].get(k, 0)} and {paper[depth].get(k, 0)}"
            for k in _ks(ours[depth], paper[depth])
        )
        for depth in paper
    )
    drawing = Drawing(
        floor + 44,
        f"How often each k was selected in the same rows, ours and the paper’s. {said}.",
        _width(len(paper)),
    )
    for left, style, words in ((0, "bar chosen", "ours"), (70, "paper", "the paper")):
        drawing.box(left, 4, 14, 12, style)
        drawing.text(left + 20, 14, words)
    for number, depth in enumerate(paper):
        left = _left(number)
        ks = _ks(ours[depth], paper[depth])
        rows = counted(sum(paper[depth].values()), "row")
        drawing.text(left, 42, f"{counted(depth, 'hidden layer')}, {rows} by selected k", "soft")
        drawing.line([(left, floor), (left + _PANEL, floor)], "axis")
        column = _PANEL / len(ks)
        for place, k in enumerate(ks):
            middle = left + column * (place + 0.5)
            drawing.text(middle, floor + 18, fraction(k), "middle")
            for counts, x, style in (
                (ours[depth], middle - 14, "bar chosen"),
                (paper[depth], middle, "paper"),
            ):
                if times := counts.get(k, 0):
                    drawing.box(x, floor - height(times), 13, height(times), style)
                    drawing.text(x + 6.5, floor - height(times) - 4, str(times), "middle small")
        drawing.text(left + _PANEL / 2, floor + 38, "k", "middle soft")
    return drawing.svg()


def error_against_k(curves: Mapping[int, Mapping[str, Mapping[float, Difference]]]) -> Markup:
    """Draw the validation error against k relative to k = 1, by depth, with 95% intervals.

    Args:
        curves: By the number of hidden layers, the name of some of the rows and k, the mean over
            these rows, in percent. The second of two names is drawn grey.

    Example:
        >>> curve = {0.5: Difference(-1, -2, 0), 1.0: Difference(0, 0, 0)}
        >>> error_against_k({1: {"all": curve}})[:4]
        Markup('<svg')

    """
    top, floor = 56, 236
    said = "; ".join(
        f"{counted(depth, 'hidden layer')}, {name}: "
        + ", ".join(f"k = {fraction(k)} {signed(mean.mean)}%" for k, mean in curve.items())
        for depth, named in curves.items()
        for name, curve in named.items()
    )
    drawing = Drawing(
        floor + 44,
        f"Validation error against k, relative to that of k = 1. {said}.",
        _width(len(curves)),
    )
    grey = "".join(f"; grey: {name}" for name in list(dict.fromkeys(chain(*curves.values())))[1:])
    drawing.text(0, 14, f"validation error relative to that of k = 1, %{grey}", "soft")
    for number, (depth, named) in enumerate(curves.items()):
        left = _left(number)
        ends = [end for curve in named.values() for mean in curve.values() for end in _reach(mean)]
        ticks = round_numbers(ends, 4)
        y = scale(ticks[0], ticks[-1], floor, top)
        ks = sorted({k for curve in named.values() for k in curve})
        x = _log_scale(ks, left + 20, left + _PANEL - 20)
        drawing.text(left, 40, counted(depth, "hidden layer"), "soft")
        for tick in ticks:
            drawing.line([(left, y(tick)), (left + _PANEL, y(tick))], "grid" if tick else "zero")
            drawing.text(left - 8, y(tick) + 4, signed(tick, "g"), "end")
        for place, (name, curve) in reversed(list(enumerate(named.items()))):  # grey below
            aside = 5 * place
            at = {k: x(k) + aside * (k != 1) for k in curve}
            drawing.line([(at[k], y(mean.mean)) for k, mean in curve.items()], "thread")
            for k, mean in curve.items():
                kind = "plain" if k == 1 else "other" if place else "chosen"
                low, high = _reach(mean)
                told = f"{name}, k = {fraction(k)}: {signed(mean.mean)}%"
                with drawing.group(f"mark {kind}", told):
                    drawing.line([(at[k], y(low)), (at[k], y(high))], "whisker")
                    drawing.symbol(at[k], y(mean.mean), kind)
        for k in ks:
            drawing.text(x(k), floor + 18, fraction(k), "middle")
        drawing.text(left + _PANEL / 2, floor + 38, "k", "middle soft")
    return drawing.svg()


def deviations(groups: Mapping[str, Mapping[str, Sequence[float]]]) -> Markup:
    """Draw how far our test errors are from the paper's.

    Args:
        groups: By data set, for "plain" (k = 1) and "chosen" (the selected k): ours over the
            paper's minus 1, in percent, one for each row.

    Example:
        >>> deviations({"mnist": {"plain": [1.5, -2.0], "chosen": [0.5]}})[:4]
        Markup('<svg')

    """
    left, top, row, width = 130, 44, 46, _width(2)
    values = [value for group in groups.values() for kind in group.values() for value in kind]
    side = max(map(abs, values), default=1.0)
    ticks = round_numbers([-side, side], 6)
    x = scale(ticks[0], ticks[-1], left + 10, width - 20)
    bottom = top + row * len(groups)
    drawing = Drawing(bottom + 44, "", width)
    drawing.text(0, 14, "our test error against the paper’s, row by row", "soft")
    for at, kind, words in ((width - 180, "plain", "k = 1"), (width - 100, "chosen", "selected k")):
        with drawing.group(f"mark {kind}", words):
            drawing.symbol(at, 10, kind)
        drawing.text(at + 12, 14, words)
    for tick in ticks:
        style = "grid" if tick else "zero"
        drawing.line([(x(tick), top - 10), (x(tick), bottom)], style)
        drawing.text(x(tick), bottom + 18, f"{signed(tick, 'g')}%", "middle")
    title = "by how much ours is higher, relative to the paper’s"
    drawing.text((left + width) / 2, bottom + 38, title, "middle soft")
    said = []
    for number, (name, group) in enumerate(groups.items()):
        middle = top + row * (number + 0.5)
        drawing.text(0, middle, name)
        for kind, height in (("plain", -12), ("chosen", 8)):
            for value in group.get(kind, ()):
                with drawing.group(f"mark {kind}", f"{name}: {signed(value, '.1f')}%"):
                    drawing.symbol(x(value), middle + height, kind, 4)
        told = [value for kind in group.values() for value in kind]
        said.append(f"{name}: {signed(min(told), '.1f')}% to {signed(max(told), '.1f')}%")
    drawing.about = f"Our test errors relative to the paper’s. {'; '.join(said)}."
    return drawing.svg()


def standalone(figure: Markup) -> str:
    """Give a figure as a file of its own, on white.

    Args:
        figure: One of the above.

    Example:
        >>> standalone(deviations({"mnist": {"plain": [1.5]}}))[:39]
        '<svg xmlns="http://www.w3.org/2000/svg"'

    """
    page = resources.files("pseudograd.report").joinpath("page.css").read_text("utf-8")
    colours = page[: page.index("}") + 1]  # those of light surroundings stand first
    rules = re.findall(r"^(?:svg |\.chosen ).*$", page, re.MULTILINE)
    style = "\n".join([colours, "svg { font-family: sans-serif; }", *rules])
    start, rest = str(figure).split(">", 1)
    start = start.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
    ground = '<rect width="100%" height="100%" fill="#ffffff"/>'
    return f"{start}><style>\n{style}\n</style>{ground}{rest}\n"


def _width(panels: int) -> int:
    return _LEFT + panels * (_PANEL + _GAP) - _GAP + 6


def _left(panel: int) -> int:
    return _LEFT + panel * (_PANEL + _GAP)


def _ks(*counts: Mapping[float, int]) -> list[float]:
    return sorted({k for group in counts for k in group} | {1.0})


def _reach(mean: Difference) -> tuple[float, float]:
    """The interval of a mean; the mean itself, if there is none."""
    return (mean.mean, mean.mean) if math.isnan(mean.low) else (mean.low, mean.high)


def _log_scale(ks: Sequence[float], start: float, end: float) -> Scale:
    logs = [math.log2(k) for k in ks]
    place = scale(min(logs), max(logs), start, end)
    return lambda k: place(math.log2(k))
