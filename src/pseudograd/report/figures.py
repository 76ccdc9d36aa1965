"""The figures of the page as SVG: no library, sharp at every size, coloured by the page's style.

A figure is 440 units wide, so that its words stay readable on a phone. The chosen k is round and
solid everywhere, k = 1 a diamond and dashed. All words go through `Markup.format`, which escapes
them.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import math
import statistics
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from pseudograd.fleet import Outcome
from pseudograd.search import Cell, Comparison, paired_difference
from pseudograd.words import counted, fraction, percent
from pseudograd.words import signed as signed  # TODO(merge): the paper's report wants it here

_WIDTH = 440

Point = tuple[float, float]
Scale = Callable[[float], float]


# --- numbers as people write them --------------------------------------------------------------


def say(cell: Cell) -> str:
    """Describe a pair of k and rate in one line.

    Args:
        cell: The pair.

    Example:
        >>> say(Cell(0.5, 0.1, (0.03,)))
        'k = 1/2, rate 0.1: 3.00%'

    """
    reach = interval(cell.errors)
    spread = f" (95% interval {percent(reach[0])} to {percent(reach[1])})" if reach else ""
    return f"k = {fraction(cell.k)}, rate {cell.learning_rate:.3g}: {percent(cell.error)}%{spread}"


def interval(errors: Sequence[float]) -> tuple[float, float] | None:
    """Give the 95% interval of a mean error by Student's t; none for a single value.

    Args:
        errors: One for each repetition.

    Example:
        >>> interval([0.1, 0.1])
        (0.1, 0.1)

    """
    if len(errors) < 2:
        return None
    reach = paired_difference(list(errors), [0.0] * len(errors))
    return max(reach.low, 0.0), min(reach.high, 1.0)


# --- the figures ---------------------------------------------------------------------------------


def error_by_k(best: Sequence[Cell], chosen: Cell | None, paper: Mapping[float, int]) -> Markup:
    """Draw the validation error of each k, and below it how often the paper selected that k.

    Args:
        best: The best rate of each k.
        chosen: The best of them, if that can be told yet.
        paper: How often each k was selected in the paper, for this depth; may be empty.

    Example:
        >>> best = [Cell(0.5, 0.1, (0.02, 0.04)), Cell(1.0, 0.1, (0.03, 0.04))]
        >>> error_by_k(best, best[0], {0.5: 8})[:4]
        Markup('<svg')

    """
    best = sorted(best, key=lambda cell: cell.k)
    reaches = [interval(cell.errors) or (cell.error, cell.error) for cell in best]
    ticks = round_numbers([100 * end for reach in reaches for end in reach])
    floor = 196
    base = floor + 80 if paper else floor
    ks = sorted({cell.k for cell in best} | set(paper))
    x_of_log = scale(math.log2(ks[0]), math.log2(ks[-1]), 66, _WIDTH - 24)
    y = scale(ticks[0], ticks[-1], floor, 32)

    def x(k: float) -> float:
        return x_of_log(math.log2(k))

    said = "; ".join(f"k = {fraction(cell.k)}: {percent(cell.error)}%" for cell in best)
    drawing = Drawing(base + 44, f"Validation error of the best rate of each k. {said}.")
    drawing.grid(ticks, y, "validation error, %")
    named: list[float] = []
    for k in sorted(ks, key=lambda k: (chosen is None or k != chosen.k, k != 1, k)):
        if all(abs(x(k) - x(other)) > 26 for other in named):  # where two would overlap, one
            drawing.text(x(k), base + 19, fraction(k), "middle")
            named.append(k)
    drawing.text((_WIDTH + 42) / 2, base + 40, "k, sensitivity to large errors", "middle soft")
    drawing.line([(x(cell.k), y(100 * cell.error)) for cell in best], "thread")
    for cell, (low, high) in zip(best, reaches, strict=True):
        with drawing.group(f"mark {_kind(cell, chosen)}", say(cell)):
            drawing.line([(x(cell.k), y(100 * low)), (x(cell.k), y(100 * high))], "whisker")
            drawing.symbol(x(cell.k), y(100 * cell.error), _kind(cell, chosen))
    if paper:
        count = sum(paper.values())
        drawing.text(0, floor + 22, f"the paper’s choice in {count} experiments", "soft")
        drawing.line([(42, base), (_WIDTH, base)], "axis")
        height = scale(0, max(paper.values()), 0, 34)
        for k, times in paper.items():
            drawing.box(x(k) - 9, base - height(times), 18, height(times), "paper")
            drawing.text(x(k), base - height(times) - 4, str(times), "middle small")
    return drawing.svg()


def heat_map(
    cells: Sequence[Cell], best: Sequence[Cell], chosen: Cell | None, start: float
) -> Markup:
    """Draw the validation error of all pairs of k and rate, and for each k the way to its best.

    Args:
        cells: All pairs that were tried.
        best: The best rate of each k.
        chosen: The best of all, if that can be told yet.
        start: The rate from which the ways begin.

    Example:
        >>> cells = [Cell(1.0, 0.1, (0.02, 0.04)), Cell(1.0, 0.2, (0.03, 0.04))]
        >>> heat_map(cells, cells[:1], cells[0], 0.2)[:4]
        Markup('<svg')

    """
    ks = sorted({cell.k for cell in cells})
    rates = sorted({cell.learning_rate for cell in cells} | {start}, reverse=True)
    margin, top = 60, 26
    row = min(max(250 // len(rates), 30), 60)
    column = max(50, (_WIDTH - margin) / len(ks))
    x = {k: margin + column * number for number, k in enumerate(ks)}
    y = {rate: top + row * number for number, rate in enumerate(rates)}
    bottom = top + row * len(rates)
    least = min(cells, key=lambda cell: cell.error)
    drawing = Drawing(
        bottom + 44,
        f"Validation error of {len(cells)} pairs of k and learning rate. The least is {say(least)}",
        round(margin + column * len(ks)),
    )
    drawing.text(0, 14, "learning rate", "soft")
    for rate in rates:
        drawing.text(margin - 8, y[rate] + row / 2 + 4, f"{rate:.3g}", "end")
    for k in ks:
        drawing.text(x[k] + (column - 14) / 2, bottom + 19, fraction(k), "middle")
    title = "k, sensitivity to large errors"
    drawing.text((margin + drawing.width) / 2, bottom + 40, title, "middle soft")
    depth = scale(least.error, palest(cells), 1.0, 0.06, beyond=False)
    for cell in cells:
        left, up, dark = x[cell.k], y[cell.learning_rate], depth(cell.error)
        # Words turn over where the shade is nearer to them than to the page.
        turned = (" half" if dark >= 0.6 else "") + (" deep" if dark >= 0.85 else "")
        with drawing.group("mark" + turned, say(cell)):
            drawing.box(left, up + 1, column - 15, row - 2, "heat", dark)
            short = percent(cell.error, 2 if cell.error < 0.1 else 1)
            drawing.text(left + (column - 15) / 2, up + row / 2 + 4, short, "middle")
    for cell in best:
        left, up = x[cell.k], y[cell.learning_rate]
        drawing.box(left, up + 1, column - 15, row - 2, f"best {_kind(cell, chosen)}")
        drawing.way(left + column - 7, y[start] + row / 2, up + row / 2)
    return drawing.svg()


def palest(cells: Sequence[Cell]) -> float:
    """Give the error from which on the heat map is palest, so that a diverged pair hides nothing.

    Args:
        cells: All pairs that were tried.

    Example:
        >>> round(palest([Cell(1.0, rate, (rate,)) for rate in (0.1, 0.2, 0.9)]), 3)
        0.3

    """
    errors = [cell.error for cell in cells]
    least, middle = min(errors), statistics.median(errors)
    return min(max(errors), 2 * middle - least) if middle > least else max(errors)


def learning_curves(groups: Mapping[str, Sequence[Outcome]]) -> Markup:
    """Draw the early-stopping error by epoch, each network thin and their mean thick.

    Args:
        groups: Outcomes of "chosen" and "plain", or of one of them.

    Example:
        >>> from pseudograd.fleet import Trial
        >>> trial = Trial("digits", (4,), k=1, learning_rate=0.1)
        >>> outcome = Outcome(trial, 0.1, 2, 0.1, 0.3, 2, "limit", (0.5, 0.1))
        >>> learning_curves({"plain": [outcome]})[:4]
        Markup('<svg')

    """
    outcomes = [outcome for group in groups.values() for outcome in group]
    errors = [100 * error for outcome in outcomes for error in outcome.curve]
    # A logarithm, since errors fall by factors; no error at all is drawn as half the least one.
    least = min((error for error in errors if error), default=1.0)
    foot = least / 2 if 0 in errors else least
    low, high = foot / 1.03, max(*errors, least) * 1.03
    y_of_log = scale(math.log(low), math.log(high), 276, 32)
    epochs = max(outcome.epochs for outcome in outcomes)
    x = scale(min(1, epochs - 1), epochs, 50, _WIDTH - 8)

    def at(epoch: float, error: float) -> Point:
        return x(epoch), y_of_log(math.log(max(100 * error, foot)))

    said = "; ".join(
        f"k = {fraction(group[0].trial.k)}: {counted(len(group), 'network')}, best after "
        f"{statistics.fmean(outcome.best_epoch for outcome in group):.0f} epochs on average"
        for group in groups.values()
    )
    drawing = Drawing(320, f"Error on the early-stopping part by epoch. {said}.")
    ticks = _log_ticks(least / 1.03, high)
    drawing.grid(ticks, lambda t: y_of_log(math.log(t)), "error on the early-stopping part, %")
    if foot < least:
        drawing.text(34, at(1, 0)[1] + 4, "0", "end")
    for tick in round_numbers([0, epochs], 5):
        if x(1) - 1 <= x(tick) <= _WIDTH:
            drawing.text(x(tick), 295, f"{tick:g}", "middle")
    drawing.text((_WIDTH + 42) / 2, 316, "epoch", "middle soft")
    for kind, group in reversed(list(groups.items())):  # the chosen one last, on top
        for outcome in group:
            drawing.line([at(n, e) for n, e in enumerate(outcome.curve, 1)], f"{kind} one")
        common = zip(*(outcome.curve for outcome in group), strict=False)  # as long as all run
        drawing.line([at(n, statistics.fmean(e)) for n, e in enumerate(common, 1)], f"{kind} mean")
        for outcome in group:
            told = (
                f"k = {fraction(outcome.trial.k)}, seed {outcome.trial.seed}: best after "
                f"{outcome.best_epoch} of {outcome.epochs} epochs, {percent(outcome.stop_error)}%"
            )
            with drawing.group(f"mark {kind}", told):
                drawing.symbol(*at(outcome.best_epoch, outcome.stop_error), kind, 3.5)
    return drawing.svg()


def pull_shares(edges: Sequence[float], networks: Mapping[str, Mapping[str, Any]]) -> Markup:
    """Draw which share of the pull comes from examples of which difficulty.

    Args:
        edges: Of the bins of 1 - p_y, one more than there are bins.
        networks: "chosen" and "plain", or one of them: k, and for each bin count and mass.

    Example:
        >>> network = {"k": 1.0, "bins": [{"count": 90, "mass": 0.3}, {"count": 10, "mass": 0.7}]}
        >>> pull_shares([0, 0.5, 1], {"plain": network})[:4]
        Markup('<svg')

    """
    left, bar = 100, 15
    row = bar * len(networks) + 14
    most = max(found["mass"] for network in networks.values() for found in network["bins"])
    length = scale(0, most, 0, _WIDTH - left - 108)
    said = []
    drawing = Drawing(28 + row * (len(edges) - 1), "")
    drawing.text(0, 14, "1 − p", "soft")
    drawing.text(left, 14, "share of all pull · examples", "soft")
    for number, (low, high) in enumerate(itertools.pairwise(edges)):
        top = 28 + row * number
        drawing.line([(0, top - 3), (_WIDTH, top - 3)], "grid")
        span = f"{low:g} – {high:g}" if low else f"below {high:g}"
        drawing.text(0, top + row / 2 + 1, span)
        for place, (kind, network) in enumerate(networks.items()):
            found, y = network["bins"][number], top + 4 + bar * place
            share = "under 1%" if 0 < found["mass"] < 0.01 else f"{100 * found['mass']:.0f}%"
            told = (
                f"1 − p {span}, k = {fraction(network['k'])}: {share} of the pull by "
                f"{found['count']:,} examples"
            )
            said.append(told)
            with drawing.group(f"mark {kind}", told):
                reach = length(found["mass"])
                drawing.box(left, y, max(reach, 1.5), bar - 2, f"bar {kind}")
                drawing.text(left + reach + 7, y + 11, f"{share} · {found['count']:,}", "small")
    drawing.about = "Share of the pseudo-gradient by difficulty. " + "; ".join(said) + "."
    return drawing.svg()


def differences(comparison: Comparison) -> Markup:
    """Draw the differences in test error of all pairs, their mean and its interval.

    Args:
        comparison: The choice against k = 1.

    Example:
        >>> from pseudograd.fleet import Trial
        >>> from pseudograd.search import compare
        >>> trial = Trial("digits", (4,), k=1, learning_rate=0.1)
        >>> outcome = Outcome(trial, 0.1, 1, 0.50, 0.3, 1, "limit", (), wrong=(0, 1))
        >>> differences(compare([outcome], [outcome]))[:4]
        Markup('<svg')

    """
    pairs = [
        100 * (one.error - other.error)
        for one, other in zip(comparison.chosen, comparison.plain, strict=True)
    ]
    mean, low, high = (
        100 * value
        for value in (comparison.error.mean, comparison.error.low, comparison.error.high)
    )
    known = not math.isnan(low)
    ends = [0.0, *pairs, *([low, high] if known else [])]
    side = max(abs(end) for end in ends) or 1.0  # zero in the middle, so that no side looks bigger
    ticks = round_numbers([-side, side], 5)
    x = scale(ticks[0], ticks[-1], 16, _WIDTH - 16)
    reach = f", 95% interval {signed(low)} to {signed(high)}" if known else ""
    told = f"Mean difference in test error: {signed(mean)} percentage points{reach}"
    drawing = Drawing(100, f"{told}. Pairs: {', '.join(signed(pair) for pair in pairs)}.")
    drawing.text(0, 13, "← fewer errors", "soft")
    drawing.text(_WIDTH, 13, "more errors →", "end soft")
    drawing.line([(0, 66), (_WIDTH, 66)], "axis")
    for tick in ticks:
        drawing.line([(x(tick), 66), (x(tick), 70)], "axis")
        drawing.text(x(tick), 84, signed(tick, "g"), "middle small")
    drawing.line([(x(0), 22), (x(0), 66)], "zero")
    for pair in pairs:
        drawing.add('<circle class="pair" cx="{:.1f}" cy="54" r="3.5"/>', x(pair))
    with drawing.group("mark chosen", told):
        if known:
            drawing.line([(x(low), 35), (x(high), 35)], "whisker")
        drawing.symbol(x(mean), 35, "chosen")
    return drawing.svg()


def pull_curve(k: float) -> Markup:
    """Draw |f_y| = |ε_y|^k against |ε_y|, which the page's slider changes, and k = 1 dashed.

    Args:
        k: The sensitivity to begin with.

    Example:
        >>> pull_curve(0.5)[:4]
        Markup('<svg')

    """
    size, left, top = 370, 50, 44
    drawing = Drawing(
        top + size + 42,
        "How hard an example pulls, against how wrong it is; k is set by the slider.",
    )
    for tick in (0, 0.25, 0.5, 0.75, 1):
        x, y = left + size * tick, top + size * (1 - tick)
        drawing.line([(left, y), (left + size, y)], "grid")
        drawing.line([(x, top), (x, top + size)], "grid")
        drawing.text(left - 8, y + 4, f"{tick:g}", "end")
        drawing.text(x, top + size + 19, f"{tick:g}", "middle")
    drawing.text(0, 12, "how hard it pulls, |f|", "soft")
    for bias in (0.1, 0.9):
        x = left + size * bias
        drawing.text(x, top - 10, f"p = {1 - bias:g}", "middle")
        drawing.line([(x, top - 4), (x, top + size)], "zero")
    title = "what the right class lacks, |ε| = 1 − p"
    drawing.text(left + size / 2, top + size + 39, title, "middle soft")
    # From here on both axes run from 0 to 1, in the script as well.
    drawing.add('<g transform="translate({} {}) scale({} -{})">', left, top + size, size, size)
    drawing.add('<path class="plain mean" d="M0 0L1 1"/>')
    drawing.add('<path class="chosen mean" id="curve" d="{}"/>', _power_path(k))
    for bias in (0.1, 0.9):
        circle = '<circle class="chosen" data-bias="{0}" cx="{0}" cy="{1:.4f}" r="0.016"/>'
        drawing.add(circle, bias, bias**k)
    drawing.add("</g>")
    return drawing.svg()


def image(pixels: Sequence[int], shape: Sequence[int]) -> str | None:
    """Give an image as the address of a PNG that holds all of it; None for what is no image.

    Args:
        pixels: 0 to 255, in the order of the shape.
        shape: (height, width), or with 1 or 3 colours in front or at the end.

    Example:
        >>> image([0, 255], (1, 2))[:22]
        'data:image/png;base64,'

    """
    if len(shape) == 2:
        shape = (*shape, 1)
    if len(shape) == 3 and shape[2] not in (1, 3) and shape[0] in (1, 3):
        size = shape[1] * shape[2]
        pixels = [value for at in range(size) for value in pixels[at::size]]
        shape = (shape[1], shape[2], shape[0])
    if len(shape) != 3 or shape[2] not in (1, 3):
        return None
    height, width, colours = shape
    line = width * colours
    # Every line begins with a zero: it is not encoded by its neighbours.
    lines = b"".join(b"\0" + bytes(pixels[at * line : (at + 1) * line]) for at in range(height))
    kind = {1: 0, 3: 2}[colours]
    content = [
        (b"IHDR", struct.pack(">2I5B", width, height, 8, kind, 0, 0, 0)),
        (b"IDAT", zlib.compress(lines, 9)),
        (b"IEND", b""),
    ]
    file = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in content
    )
    return "data:image/png;base64," + base64.b64encode(file).decode()


# --- tools ---------------------------------------------------------------------------------------


def _kind(cell: Cell, chosen: Cell | None) -> str:
    if cell == chosen:
        return "chosen"
    return "plain" if cell.k == 1 else "other"


def scale(low: float, high: float, start: float, end: float, beyond: bool = True) -> Scale:
    """Give a function that maps [low, high] to [start, end]; a point maps to the start.

    Args:
        low: Of the values.
        high: Of the values.
        start: Where low is drawn.
        end: Where high is drawn.
        beyond: Whether values outside are drawn outside, and not at the nearer end.

    Example:
        >>> scale(0, 2, 100, 300)(1.5)
        250.0

    """

    def at(value: float) -> float:
        part = (value - low) / (high - low) if high != low else 0.0
        return start + (end - start) * (part if beyond else min(max(part, 0.0), 1.0))

    return at


def round_numbers(values: Sequence[float], about: int = 5) -> list[float]:
    """Give round numbers that enclose the values, evenly spaced.

    Args:
        values: What is to be drawn.
        about: About how many numbers there should be.

    Example:
        >>> round_numbers([0.13, 0.88])
        [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]

    """
    low, high = min(values), max(values)
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / about))
    step = next(power * m for m in (1, 2, 5, 10) if power * m * about >= span)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(step * number, 10) for number in range(first, max(last, first + 1) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Round numbers inside: 1, 2, 5 and so on, or evenly spaced where these are too few."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [m * 10.0**power for power in powers for m in (1, 2, 5)]
    inside = [tick for tick in ticks if low <= tick <= high]
    if len(inside) > 2:
        return inside
    return [tick for tick in round_numbers([low, high]) if low <= tick <= high]


def _power_path(k: float) -> str:
    """The curve of x^k on [0, 1], denser towards 0, where those of small k are steep."""
    points = [(step / 80) ** 4 for step in range(81)]
    return "M" + "L".join(f"{x:.5f} {x**k:.5f}" for x in points)


class Drawing:
    """Pieces of SVG, one after the other.

    Args:
        height: In units.
        about: What it shows, for those who do not see it.
        width: In units.

    Example:
        >>> drawing = Drawing(20, "a word")
        >>> drawing.text(0, 14, "error < 2%")
        >>> drawing.svg()
        Markup('<svg class="" viewBox="0 0 440 20" role="img" aria-label="a word"><text x="0.0"
        y="14.0" class="">error &lt; 2%</text></svg>')

    """

    def __init__(self, height: float, about: str, width: int = _WIDTH) -> None:
        self.height, self.width, self.about = height, width, about
        self._pieces: list[Markup] = []

    def add(self, piece: str, *values: object) -> None:
        """Add a piece, with values that are escaped."""
        self._pieces.append(Markup(piece).format(*values))

    def text(self, x: float, y: float, words: str, style: str = "") -> None:
        """Write some words."""
        self.add('<text x="{:.1f}" y="{:.1f}" class="{}">{}</text>', x, y, style, words)

    def line(self, points: Sequence[Point], style: str) -> None:
        """Draw a line through some points."""
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        self.add('<path class="{}" d="M{}"/>', style, path)

    def box(
        self, x: float, y: float, width: float, height: float, style: str, opacity: float = 1.0
    ) -> None:
        """Draw a rectangle."""
        self.add(
            '<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" '
            'fill-opacity="{:.2f}" rx="2"/>',
            style, x, y, width, height, opacity,
        )  # fmt: skip

    def symbol(self, x: float, y: float, kind: str, size: float = 5.5) -> None:
        """Draw a disc, or a diamond for k = 1."""
        if kind == "plain":
            d = 1.25 * size
            diamond = "M{0:.1f} {1:.1f}l{2:.1f} {2:.1f}l-{2:.1f} {2:.1f}l-{2:.1f} -{2:.1f}z"
            self.add(f'<path class="dot" d="{diamond}"/>', x, y - d, d)
        else:
            r = size if kind == "chosen" else 0.65 * size
            self.add('<circle class="dot" cx="{:.1f}" cy="{:.1f}" r="{:.1f}"/>', x, y, r)

    def grid(self, ticks: Sequence[float], y: Scale, title: str) -> None:
        """Draw horizontal lines with their numbers, and above them what they mean."""
        self.text(0, 14, title, "soft")
        for tick in ticks:
            self.line([(42, y(tick)), (self.width, y(tick))], "grid")
            self.text(34, y(tick) + 4, f"{tick:g}", "end")

    def way(self, x: float, start: float, end: float) -> None:
        """Draw a way from a ring at the start to an arrowhead at the end."""
        self.add('<circle class="way" cx="{:.1f}" cy="{:.1f}" r="2.5"/>', x, start)
        if end != start:
            up = 1 if end < start else -1
            self.line([(x, start - 2.5 * up), (x, end - 4 * up)], "way")
            self.line([(x - 4, end + 2 * up), (x, end - 4 * up), (x + 4, end + 2 * up)], "way")

    @contextlib.contextmanager
    def group(self, style: str, said: str) -> Iterator[None]:
        """Hold pieces that belong together, and what the pointer over them is told."""
        self.add('<g class="{}" data-say="{}">', style, said)
        yield
        self.add("</g>")

    def svg(self) -> Markup:
        """Give the whole."""
        kind = "broad" if self.width > _WIDTH else ""
        size = f"{self.width} {self.height:.0f}"
        figure = '<svg class="{}" viewBox="0 0 {}" role="img" aria-label="{}">{}</svg>'
        return Markup(figure).format(kind, size, self.about, Markup("").join(self._pieces))
