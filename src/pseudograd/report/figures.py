"""Figures of the search, the training and the rule."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from pseudograd.fleet import Outcome, Ramp
from pseudograd.fleet.ramp import as_k, by_level, level
from pseudograd.report.described import K, Parameter
from pseudograd.report.drawing import (
    WIDTH,
    Drawing,
    Point,
    log_scale,
    log_ticks,
    round_numbers,
    scale,
)
from pseudograd.report.verdict import error_interval
from pseudograd.search import Cell, Comparison
from pseudograd.words import between, counted, fraction, percent, signed

# The fill of bars of k = 1, defined once for all figures of the page.
HATCH = Markup(
    '<svg class="unseen" aria-hidden="true"><defs><pattern id="hatch" width="5" height="5" '
    'patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><path d="M2.5 0V5"/></pattern>'
    "</defs></svg>"
)


def describe(cell: Cell, parameter: Parameter = K) -> str:
    """Return a pair of k and learning rate with its error as one line.

    >>> describe(Cell(0.5, 0.1, (0.03,)))
    'k = 1/2, rate 0.1: 3.00%'
    """
    ends = error_interval(cell.errors)
    spread = f" (95% interval {' to '.join(map(percent, ends))})" if ends else ""
    at = parameter.at(cell.k)
    return f"{at}, rate {cell.learning_rate:.3g}: {percent(cell.error)}%{spread}"


def error_by_k(best: Sequence[Cell], chosen: Cell | None, parameter: Parameter = K) -> Markup:
    """Draw the validation error of each k: constants on a log axis if it can be, ramps beside it.

    Args:
        best: The best rate of each k.
        chosen: The best of them, if known yet.
        parameter: The name of k, and its baseline.

    """
    best = sorted(best, key=lambda cell: (isinstance(cell.k, Ramp), by_level(cell.k)))
    reaches = [error_interval(cell.errors) or (cell.error, cell.error) for cell in best]
    ticks = round_numbers([100 * end for reach in reaches for end in reach])
    base = 276
    ks = [cell.k for cell in best]
    x = _places(ks)
    y = scale(ticks[0], ticks[-1], base, 32)
    said = "; ".join(f"{parameter.at(cell.k)}: {percent(cell.error)}%" for cell in best)
    about = f"Validation error of the best rate of each {parameter.name}. {said}."
    drawing = Drawing(base + 44, about)
    drawing.grid(ticks, y, "validation error, %")
    named: list[tuple[float, float]] = []
    first = (chosen and chosen.k, parameter.baseline)
    for k in sorted(ks, key=lambda k: (k != first[0], k != first[1], by_level(k))):
        half = 13 if not isinstance(k, Ramp) else 4 * len(fraction(k))
        # Skip labels that would overlap.
        if all(abs(x[k] - place) > half + other for place, other in named):
            drawing.text(x[k], base + 19, fraction(k), "middle")
            named.append((x[k], half))
    title = parameter.axis + " (log scale)" * all(level(k) > 0 for k in ks)
    drawing.text((WIDTH + 42) / 2, base + 40, title, "middle soft")
    constant = [cell for cell in best if not isinstance(cell.k, Ramp)]
    drawing.line([(x[cell.k], y(100 * cell.error)) for cell in constant], "thread")
    for cell, (low, high) in zip(best, reaches, strict=True):
        kind = _kind(cell, chosen, parameter)
        with drawing.group(f"mark {kind}", describe(cell, parameter)):
            drawing.line([(x[cell.k], y(100 * low)), (x[cell.k], y(100 * high))], "whisker")
            drawing.symbol(x[cell.k], y(100 * cell.error), kind)
    return drawing.svg()


def _places(ks: Sequence[float | Ramp]) -> dict[float | Ramp, float]:
    """Return the x coordinate of each k: constants on a log scale, ramps to their right."""
    left, right = 66.0, WIDTH - 24.0
    constant = [level(k) for k in ks if not isinstance(k, Ramp)]
    ramps = [k for k in ks if isinstance(k, Ramp)]
    step = min(60.0, (right - left) / (len(ramps) + bool(constant)))
    places: dict[float | Ramp, float] = {
        k: right - 12 - step * back for back, k in enumerate(reversed(ramps))
    }
    if constant:
        axis = log_scale if constant[0] > 0 else scale
        x = axis(constant[0], constant[-1], left, right - step * len(ramps))
        places |= {k: x(k) for k in constant}
    return places


def heat_map(
    cells: Sequence[Cell], best: Sequence[Cell], chosen: Cell | None, start: float,
    parameter: Parameter = K,
) -> Markup:  # fmt: skip
    """Draw the validation error of all pairs of k and rate, with an arrow to the best of each k.

    Args:
        cells: All pairs that were tried.
        best: The best rate of each k.
        chosen: The best of all, if known yet.
        start: The rate at which the arrows start.
        parameter: The name of k, and its baseline.

    """
    ks = sorted({cell.k for cell in cells}, key=by_level)
    rates = sorted({cell.learning_rate for cell in cells} | {start}, reverse=True)
    margin, top = max(60, 8 + 11 * max(len(f"{rate:.3g}") for rate in rates)), 26
    row = min(max(250 // len(rates), 30), 60)
    widest = max(len(fraction(k)) for k in ks)
    column = max(50, 8 * widest, (WIDTH - margin) / len(ks))
    x = {k: margin + column * number for number, k in enumerate(ks)}
    y = {rate: top + row * number for number, rate in enumerate(rates)}
    bottom = top + row * len(rates)
    least = min(cells, key=lambda cell: cell.error)
    about = f"Validation error of {len(cells)} pairs of {parameter.name} and learning rate. "
    about += f"The lowest: {describe(least, parameter)}"
    drawing = Drawing(bottom + 44, about, round(margin + column * len(ks)))
    drawing.text(0, 14, "learning rate", "soft")
    for rate in rates:
        drawing.text(margin - 8, y[rate] + row / 2 + 4, f"{rate:.3g}", "end")
    for k in ks:
        drawing.text(x[k] + (column - 14) / 2, bottom + 19, fraction(k), "middle")
    drawing.text((margin + drawing.width) / 2, bottom + 40, parameter.axis, "middle soft")
    depth = scale(least.error, palest(cells), 1.0, 0.06, beyond=False)
    for cell in cells:
        left, up, dark = x[cell.k], y[cell.learning_rate], depth(cell.error)
        # The text colour changes with the shade, for contrast.
        turned = (" half" if dark >= 0.6 else "") + (" deep" if dark >= 0.85 else "")
        with drawing.group("mark" + turned, describe(cell, parameter)):
            drawing.box(left, up + 1, column - 15, row - 2, "heat", dark)
            short = percent(cell.error, 2 if cell.error < 0.1 else 1)
            drawing.text(left + (column - 15) / 2, up + row / 2 + 4, short, "middle")
    for cell in best:
        left, up = x[cell.k], y[cell.learning_rate]
        drawing.box(left, up + 1, column - 15, row - 2, f"best {_kind(cell, chosen, parameter)}")
        drawing.arrow(left + column - 7, y[start] + row / 2, up + row / 2)
    return drawing.svg()


def palest(cells: Sequence[Cell]) -> float:
    """Return the error of the palest shade, which limits the influence of diverged pairs.

    >>> round(palest([Cell(1.0, rate, (rate,)) for rate in (0.1, 0.2, 0.9)]), 3)
    0.3
    """
    errors = [cell.error for cell in cells]
    least, middle = min(errors), statistics.median(errors)
    return min(max(errors), 2 * middle - least) if middle > least else max(errors)


def learning_curves(
    groups: Mapping[str, Sequence[Outcome]], fold: str = "early-stopping", parameter: Parameter = K
) -> Markup:
    """Draw the error on a fold by epoch, thin for each network and thick for their mean.

    Args:
        groups: The outcomes of "chosen" and "plain", or of one of them.
        fold: The name of the fold.
        parameter: The name of k.

    """
    outcomes = [outcome for group in groups.values() for outcome in group]
    errors = [100 * error for outcome in outcomes for error in outcome.curve]
    # On a log scale, an error of 0 is drawn at half the smallest positive one.
    least = min((error for error in errors if error), default=1.0)
    foot = least / 2 if 0 in errors else least
    high = max([*errors, least]) * 1.03
    y = log_scale(foot / 1.03, high, 276, 32)
    epochs = max(outcome.epochs for outcome in outcomes)
    x = scale(min(1, epochs - 1), epochs, 50, WIDTH - 8)

    def at(epoch: float, error: float) -> Point:
        return x(epoch), y(max(100 * error, foot))

    said = "; ".join(
        f"{parameter.at(group[0].trial.k)}: {counted(len(group), 'network')}, best after "
        f"{statistics.fmean(outcome.best_epoch for outcome in group):.0f} epochs on average"
        for group in groups.values()
    )
    drawing = Drawing(320, f"{fold.capitalize()} error by epoch. {said}.")
    drawing.grid(log_ticks(least / 1.03, high), y, f"{fold} error, % (log scale)")
    if foot < least:
        drawing.text(34, at(1, 0)[1] + 4, "0", "end")
    for tick in round_numbers([0, epochs], 5):
        if x(1) - 1 <= x(tick) <= WIDTH - 7:
            drawing.text(x(tick), 295, f"{tick:g}", "middle")
    drawing.text((WIDTH + 42) / 2, 316, "epoch", "middle soft")
    for kind, group in reversed(list(groups.items())):  # the chosen one last, on top
        for outcome in group:
            drawing.line([at(n, e) for n, e in enumerate(outcome.curve, 1)], f"{kind} one")
        # The mean ends where the first network stops.
        common = zip(*(outcome.curve for outcome in group), strict=False)
        drawing.line([at(n, statistics.fmean(e)) for n, e in enumerate(common, 1)], f"{kind} mean")
        for outcome in group:
            told = (
                f"{parameter.at(outcome.trial.k)}, seed {outcome.trial.seed}: best after "
                f"{outcome.best_epoch} of {outcome.epochs} epochs, {percent(outcome.stop_error)}%"
            )
            with drawing.group(f"mark {kind}", told):
                drawing.symbol(*at(outcome.best_epoch, outcome.stop_error), kind, 3.5)
    return drawing.svg()


def pull_shares(edges: Sequence[float], networks: Mapping[str, Mapping[str, Any]]) -> Markup:
    """Draw the share of the pull (gradient magnitude) of examples by difficulty.

    Args:
        edges: The edges of the bins of 1 - p_y.
        networks: "chosen" and "plain", or one of them: k, and count and mass of each bin.

    """
    left, bar = 118, 15
    row = bar * len(networks) + 14
    most = max(found["mass"] for network in networks.values() for found in network["bins"])
    length = scale(0, most, 0, WIDTH - left - 108)
    said = []
    drawing = Drawing(28 + row * (len(edges) - 1), "")
    drawing.text(0, 14, "1 − p", "soft")
    drawing.text(left, 14, "share of all pull · examples", "soft")
    for number, (low, high) in enumerate(itertools.pairwise(edges)):
        top = 28 + row * number
        drawing.line([(0, top - 3), (WIDTH, top - 3)], "grid")
        span = f"{low:g} – {high:g}" if low else f"below {high:g}"
        drawing.text(0, top + row / 2 + 1, span)
        for place, (kind, network) in enumerate(networks.items()):
            found, y = network["bins"][number], top + 4 + bar * place
            share = "under 1%" if 0 < found["mass"] < 0.01 else f"{percent(found['mass'], 0)}%"
            examples = counted(found["count"], "example")
            k = fraction(as_k(network["k"]))
            said.append(f"1 − p {span}, k = {k}: {share} from {examples}")
            with drawing.group(f"mark {kind}", said[-1]):
                reach = length(found["mass"])
                drawing.box(left, y, max(reach, 1.5), bar - 2, f"bar {kind}")
                drawing.text(left + reach + 7, y + 11, f"{share} · {found['count']:,}", "small")
    drawing.about = f"Share of the pull by difficulty. {'; '.join(said)}."
    return drawing.svg()


def differences(comparison: Comparison) -> Markup:
    """Draw the difference in test error of each pair, their mean and its interval."""
    pairs = [
        100 * (one.error - other.error)
        for one, other in zip(comparison.chosen, comparison.plain, strict=True)
    ]
    error = comparison.error
    mean, low, high = (100 * value for value in (error.mean, error.low, error.high))
    known = not math.isnan(low)
    # Symmetric around zero.
    side = max(map(abs, [*pairs, *([low, high] if known else [])])) or 1.0
    ticks = round_numbers([-side, side], 5)
    x = scale(ticks[0], ticks[-1], 16, WIDTH - 16)
    reach = f", 95% interval {between(error, times=100)}" if known else ""
    told = f"Mean difference in test error: {signed(mean)} percentage points{reach}"
    drawing = Drawing(100, f"{told}. Pairs: {', '.join(signed(pair) for pair in pairs)}.")
    drawing.text(0, 13, "← fewer errors", "soft")
    drawing.text(WIDTH, 13, "more errors →", "end soft")
    drawing.line([(0, 66), (WIDTH, 66)], "axis")
    for tick in ticks:
        drawing.line([(x(tick), 66), (x(tick), 70)], "axis")
        drawing.text(x(tick), 84, signed(tick, "g"), "middle small")
    drawing.line([(x(0), 22), (x(0), 66)], "zero")
    for pair in pairs:
        drawing.ring(x(pair), 54, 3.5, "pair")
    with drawing.group("mark chosen", told):
        if known:
            drawing.line([(x(low), 35), (x(high), 35)], "whisker")
        drawing.symbol(x(mean), 35, "chosen")
    return drawing.svg()


def pull_curve(k: float) -> Markup:
    """Draw |f_y| = |ε_y|^k against |ε_y| (Eq. 5) for the slider's k, and k = 1 dashed."""
    size, left, top = 370, 50, 44
    about = "How hard an example pulls, against how wrong it is; the slider sets k."
    drawing = Drawing(top + size + 42, about)
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
    title = "how wrong it is, |ε| = 1 − p"
    drawing.text(left + size / 2, top + size + 39, title, "middle soft")
    # In unit coordinates, as in page.js. Points are denser near 0, where x^k is steep for small k.
    points = [(step / 80) ** 4 for step in range(81)]
    path = "M" + "L".join(f"{x:.5f} {x**k:.5f}" for x in points)
    drawing.add('<g transform="translate({} {}) scale({} -{})">', left, top + size, size, size)
    drawing.add('<path class="plain mean" d="M0 0L1 1"/>')
    drawing.add('<path class="chosen mean" id="curve" d="{}"/>', path)
    for bias in (0.1, 0.9):
        circle = '<circle class="chosen" data-bias="{0}" cx="{0}" cy="{1:.4f}" r="0.016"/>'
        drawing.add(circle, bias, bias**k)
    drawing.add("</g>")
    return drawing.svg()


def key(kind: str) -> Markup:
    """Return the symbol of a legend entry."""
    drawing = Drawing(14, "", 30, "key")
    match kind:
        case "chosen" | "plain":
            drawing.add('<g class="{}">', kind)
            drawing.line([(0, 7), (30, 7)], f"{kind} mean")
            drawing.symbol(15, 7, kind, 5.5 if kind == "chosen" else 4.4)
            drawing.add("</g>")
        case "other":
            drawing.add('<g class="other">')
            drawing.line([(0, 7), (30, 7)], "other one")
            drawing.symbol(15, 7, "other", 5.5)
            drawing.add("</g>")
        case "heat":
            for number, opacity in enumerate((1, 0.5, 0.1)):
                drawing.box(10 * number, 0, 10, 14, "heat", opacity)
        case "best chosen" | "best plain":
            drawing.box(3, 2, 24, 10, kind)
        case "way":
            drawing.ring(5, 7, 2.5, "way")
            drawing.line([(7.5, 7), (26, 7)], "way")
            drawing.line([(20, 3), (26, 7), (20, 11)], "way")
    return drawing.svg()


def _kind(cell: Cell, chosen: Cell | None, parameter: Parameter) -> str:
    if cell == chosen:
        return "chosen"
    return "plain" if cell.k == parameter.baseline else "other"
