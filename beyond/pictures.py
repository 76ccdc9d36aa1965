"""Pictures as SVG text: differences with their intervals, and lines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from beyond.findings import BestRates, Compared, Depth, Summed

_WIDTH, _LABEL, _ROW, _TOP = 760, 230, 22, 46
_COLOURS = {"better": "#1a7f37", "worse": "#cf222e", "level": "#57606a"}
_LINES = ("#0550ae", "#54aeff", "#57606a", "#fb8f44", "#953800")
_FONT = 'font-family="system-ui, sans-serif" font-size="13"'


def differences(panels: Mapping[str, Sequence[tuple[str, Compared]]]) -> str:
    """Draw differences of test errors with their intervals, a panel per title; "" for none."""
    parts, top = [], 0.0
    for title, rows in panels.items():
        if rows:
            parts.append(_panel(title, rows, top))
            top += _TOP + _ROW * len(rows) + 34
    return _picture(_WIDTH, top, parts) if parts else ""


def _panel(title: str, rows: Sequence[tuple[str, Compared]], top: float) -> str:
    found = [compared.difference for _, compared in rows]
    ends = [100 * end for one in found for end in (one.low, one.high) if math.isfinite(end)]
    scale = _Scale(min([*ends, 0]), max([*ends, 0]), _LABEL, _WIDTH - 20)
    bottom = top + _TOP + _ROW * len(rows)
    heading = f"{title}, percentage points of test error"
    out = [_text(8, top + 20, heading, bold=True), scale.axis(top + _TOP - 10, bottom)]
    for at, (label, compared) in enumerate(rows):
        y = top + _TOP + _ROW * at + 4
        difference, colour = compared.difference, _COLOURS[compared.verdict]
        out.append(_text(8, y + 4, label))
        if math.isfinite(difference.low):
            low, high = scale(100 * difference.low), scale(100 * difference.high)
            out.append(_line(low, y, high, y, colour, 2))
        if math.isfinite(difference.mean):
            x = scale(100 * difference.mean)
            out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
    return "".join(out)


def depths(found: Sequence[Depth]) -> str:
    """Draw the test error against k, a line per depth."""
    series = {
        f"{one.blocks} blocks": {
            math.log2(k): 100 * sum(errors) / len(errors) for k, errors in one.errors.items()
        }
        for one in found
    }
    return _chart(series, "test error (%) against log₂ k")


def suspects(found: Sequence[Summed]) -> str:
    """Draw the AUROC of finding wrong labels against k, a line per label set and score."""
    series = {
        f"{one.setting.name}, {score}": {
            math.log2(float(k)): 100 * scores[score]["auroc"] for k, scores in one.found.items()
        }
        for one in found
        for score in ("self-confidence", "margin")
    }
    return _chart(series, "AUROC (%) of finding wrong labels against log₂ k")


def best_rates(found: Sequence[BestRates]) -> str:
    """Draw log2 of the best learning rate against log2 k, as it is and rescaled."""
    names = {"tunable": "Eq. 5", "normalized": "rescaled"}
    series = {
        f"{one.setting.name}, {names[method]}": {
            math.log2(k): best for k, best in one.best(method).items()
        }
        for one in found
        for method in names
    }
    return _chart(series, "log₂ of the best learning rate against log₂ k")


def _chart(series: Mapping[str, Mapping[float, float]], title: str) -> str:
    points = [point for one in series.values() for point in one.items()]
    if not points:
        return _picture(_WIDTH, 0, [])
    across = _Scale(min(x for x, _ in points), max(x for x, _ in points), 60, _WIDTH - 300)
    height = 300
    up = _Scale(min(y for _, y in points), max(y for _, y in points), height - 30, 50)
    out = [_text(8, 20, title, bold=True), across.axis(40, height - 20), up.axis(50, 50, up=True)]
    for at, (name, one) in enumerate(series.items()):
        colour = _LINES[at // 2 % len(_LINES)] if len(series) > 5 else _LINES[at % len(_LINES)]
        dashed = len(series) > 5 and at % 2 == 1
        path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in sorted(one.items()))
        dash = ' stroke-dasharray="5 4"' * dashed
        out.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'
        )
        y = 60 + 20 * at
        out.append(_line(_WIDTH - 285, y - 4, _WIDTH - 260, y - 4, colour, 2))
        out.append(_text(_WIDTH - 254, y, name + " (dashed)" * dashed))
    return _picture(_WIDTH, height + 10, out)


class _Scale:
    """Numbers to pixels, with round ticks."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        spread = (high - low) or 1.0
        step = 10 ** math.floor(math.log10(spread))
        self.step = next(step * by for by in (0.2, 0.5, 1, 2) if spread / (step * by) <= 7)
        self.low = math.floor(low / self.step) * self.step
        self.high = max(math.ceil(high / self.step) * self.step, self.low + self.step)
        self.start, self.end = start, end

    def __call__(self, value: float) -> float:
        share: float = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def axis(self, first: float, last: float, *, up: bool = False) -> str:
        """Draw ticks: vertical lines from first to last, or numbers at the left."""
        out = []
        for at in range(round((self.high - self.low) / self.step) + 1):
            value = self.low + at * self.step
            place, label = self(value), f"{value:.3g}" if abs(value) > 1e-9 else "0"
            if up:
                out.append(_text(first - 6, place + 4, label, anchor="end"))
                out.append(_line(first, place, _WIDTH - 300, place, "#d0d7de", 1))
            else:
                strong = abs(value) < 1e-9
                out.append(_line(place, first, place, last, "#57606a" if strong else "#d0d7de", 1))
                out.append(_text(place, last + 16, label, anchor="middle"))
        return "".join(out)


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: int) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width}"/>'


def _text(x: float, y: float, text: str, *, bold: bool = False, anchor: str = "start") -> str:
    weight = ' font-weight="600"' * bold
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} fill="#1f2328"{weight}>{escape(text)}</text>'


def _picture(width: float, height: float, parts: Sequence[str]) -> str:
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    body = '<rect width="100%" height="100%" fill="white"/>' + "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {_FONT}>{body}</svg>\n'
