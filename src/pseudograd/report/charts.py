"""Charts of a model's quality: errors, confusion matrix, calibration, feature importance."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from pseudograd.report.drawing import WIDTH, Drawing, Scale, round_numbers, scale
from pseudograd.search.measures import wilson
from pseudograd.words import counted, percent, signed

_CLASSES = 20  # shown in a figure
_COLUMNS = 15
_TOP = 4  # of the first row, in units
_LETTER = 9.8  # width in units, on a phone


def cut(text: object, most: int) -> str:
    """Return a label on one line, shortened in the middle if it is long.

    >>> cut("versicolor", 20), cut("an iris of many colours", 12)
    ('versicolor', 'an iri…lours')
    """
    line = " ".join(str(text).split())
    if len(line) <= most:
        return line
    return f"{line[: most // 2]}…{line[most // 2 + 1 - most :]}"


def errors(rows: Sequence[Mapping[str, Any]]) -> Markup:
    """Draw errors with their intervals, one row each, on a common axis.

    A row far outside the range of the others, such as the majority baseline, becomes an arrow.

    Args:
        rows: name, kind ("chosen", "plain" or "other"), error, low and high of each.

    """
    ends = sorted(100 * row["high"] for row in rows)
    far = ends[-1] if len(ends) > 2 and ends[-1] > 2.5 * ends[-2] else math.inf
    ticks = round_numbers([0, *(end for end in ends if end < far)], 5)
    row_height = 44
    said = "; ".join(f"{row['name']}: {_with_interval(row)}" for row in rows)
    about = f"Test error with 95% intervals. {said}."
    height = row_height * len(rows)
    drawing, x = _on_axis(ticks, 10, WIDTH - 14, height, about, "test error, %")
    for at, row in enumerate(rows):
        y = _TOP + row_height * at
        beyond = 100 * row["high"] >= far
        with drawing.group(f"mark {row['kind']}", f"{row['name']}: {_with_interval(row)}"):
            drawing.text(0, y + 14, row["name"], "strong" if row["kind"] == "chosen" else "")
            drawing.text(WIDTH, y + 14, f"{percent(row['error'])}%", "end")
            if beyond:
                drawing.line([(WIDTH - 40, y + 28), (WIDTH - 6, y + 28)], "whisker")
                tip = [(WIDTH - 12, y + 23), (WIDTH - 5, y + 28), (WIDTH - 12, y + 33)]
                drawing.line(tip, "whisker")
            else:
                drawing.line(
                    [(x(100 * row["low"]), y + 28), (x(100 * row["high"]), y + 28)], "whisker"
                )
                drawing.symbol(x(100 * row["error"]), y + 28, row["kind"])
    return drawing.svg()


def errors_by_class(classes: Sequence[Mapping[str, Any]]) -> Markup:
    """Draw the error of each class with its interval; of many classes, only the worst.

    Args:
        classes: label, wrong, count, error, low and high of each.

    """
    known = [one for one in classes if one["count"]]
    if len(known) > _CLASSES:
        known = sorted(known, key=lambda one: (-one["error"], -one["count"]))[:_CLASSES]
    row_height = 25
    left, right = _beside([cut(one["label"], 15) for one in known]), WIDTH - 92
    ticks = round_numbers([0, *(100 * one["high"] for one in known)], 4)
    said = "; ".join(f"{one['label']}: {one['wrong']} of {one['count']}" for one in known)
    about = f"Test error of each class. {said}."
    height, title = row_height * len(known), "test error of the class, %"
    drawing, x = _on_axis(ticks, left, right, height, about, title)
    for at, one in enumerate(known):
        y = _TOP + row_height * (at + 0.5)
        told = f"{one['label']}: {one['wrong']:,} of {one['count']:,} wrong, {_with_interval(one)}"
        with drawing.group("mark chosen", told):
            drawing.text(left - 10, y + 4, cut(one["label"], 15), "end")
            drawing.line([(x(100 * one["low"]), y), (x(100 * one["high"]), y)], "whisker")
            drawing.symbol(x(100 * one["error"]), y, "chosen", 4.5)
            drawing.text(WIDTH, y + 4, f"{one['wrong']:,} of {one['count']:,}", "end small")
    return drawing.svg()


def confusion_map(matrix: Sequence[Sequence[int]], labels: Sequence[object]) -> Markup:
    """Draw the confusion matrix: a row for each label, a column for each prediction.

    Correct predictions on the diagonal are blue, mistakes orange; the opacity is the share of the
    row.
    """
    size = len(matrix)
    short = [cut(label, 12) for label in labels]
    upright = max(map(len, short)) > 3 and size > 2
    left = _beside(short)
    top = 24 + (_LETTER * max(map(len, short)) if upright else 18)
    least = 34 if max(map(max, matrix)) > 999 else 30  # room for the counts on a phone
    side = min(max((WIDTH - left) / size, least), 70)
    shares = [[count / max(sum(row), 1) for count in row] for row in matrix]
    worst = max(
        (share for at, row in enumerate(shares) for to, share in enumerate(row) if at != to)
    )
    drawing = Drawing(
        top + side * size + 4, _about_matrix(matrix, labels), max(WIDTH, round(left + side * size))
    )
    drawing.text(0, 14, "label ↓   predicted →", "soft")
    for at, label in enumerate(short):
        drawing.text(left - 8, top + side * (at + 0.5) + 4, label, "end")
        middle = left + side * (at + 0.5)
        if upright:
            place = '<text transform="translate({:.1f} {:.1f}) rotate(-90)">{}</text>'
            drawing.add(place, middle + 4, top - 6, label)
        else:
            drawing.text(middle, top - 8, label, "middle")
    for at, to in itertools.product(range(size), repeat=2):
        count, share = matrix[at][to], shares[at][to]
        right = at == to
        strength = share if right else share / worst if worst else 0.0
        deep = " deep" if strength >= 0.75 else " half" if strength >= 0.5 else ""
        told = f"{labels[at]} predicted as {labels[to]}: {count:,} ({percent(share, 1)}%)"
        with drawing.group("mark" + (deep if count else ""), told):
            x, y = left + side * to, top + side * at
            opacity = 0.08 + 0.92 * strength if count else 0.0
            drawing.box(x + 1, y + 1, side - 2, side - 2, "heat" if right else "heat miss", opacity)
            if count:
                drawing.text(x + side / 2, y + side / 2 + 4, _short(count), "middle small")
    return drawing.svg()


def calibration(
    after: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]] | None
) -> Markup:
    """Draw a reliability diagram: the accuracy of predictions by confidence.

    Args:
        after: confidence, accuracy and count of each bin, for the model's probabilities.
        before: The same before temperature scaling, if it was applied.

    """
    size, left, top = 300, 50, 34
    foot = top + size + 52
    x, y = scale(0, 1, left, left + size + 70), scale(0, 1, top + size, top)
    said = "; ".join(
        f"{percent(one['confidence'], 0)}% sure, {percent(one['accuracy'], 0)}% of "
        f"{counted(one['count'], 'example')} right"
        for one in after
    )
    drawing = Drawing(foot + 62, f"Reliability of the probabilities. {said}.")
    drawing.text(0, 14, "right, %", "soft")
    for tick in (0, 0.25, 0.5, 0.75, 1):
        drawing.line([(x(0), y(tick)), (x(1), y(tick))], "grid")
        drawing.text(left - 8, y(tick) + 4, f"{100 * tick:g}", "end")
        drawing.text(x(tick), y(0) + 19, f"{100 * tick:g}", "middle")
    drawing.text((x(0) + x(1)) / 2, y(0) + 39, "confidence, %", "middle soft")
    drawing.line([(x(0), y(0)), (x(1), y(1))], "zero")
    if before:
        _reliability(drawing, before, x, y, "other")
    _reliability(drawing, after, x, y, "chosen")
    most = max(one["count"] for one in after)
    height = scale(0, most, 0, 40)
    drawing.text(0, foot + 54, "count", "soft")
    for one in after:
        tall = max(height(one["count"]), 1)
        told = f"{one['count']:,} examples about {percent(one['confidence'], 0)}% sure"
        with drawing.group("mark chosen", told):
            drawing.box(x(one["confidence"]) - 7, foot + 56 - tall, 14, tall, "bar", 0.6)
    return drawing.svg()


def _reliability(
    drawing: Drawing, bins: Sequence[Mapping[str, Any]], x: Scale, y: Scale, kind: str
) -> None:
    """Draw the accuracy of each bin, with its interval for the "chosen" kind."""
    points = [(x(one["confidence"]), y(one["accuracy"])) for one in bins]
    drawing.add('<g class="{}">', kind)
    drawing.line(points, f"{kind} one")
    drawing.add("</g>")
    for one, (at, to) in zip(bins, points, strict=True):
        right = round(one["accuracy"] * one["count"])
        told = (
            f"{'before scaling: ' if kind == 'other' else ''}{percent(one['confidence'], 1)}% "
            f"sure on average, {right:,} of {one['count']:,} right"
        )
        with drawing.group(f"mark {kind}", told):
            if kind == "chosen":
                low, high = wilson(right, one["count"])
                drawing.line([(at, y(low)), (at, y(high))], "whisker thin")
            drawing.symbol(at, to, kind, 5)


def importance(columns: Sequence[Mapping[str, Any]]) -> Markup:
    """Draw the permutation importance of each column, the most important first.

    Args:
        columns: column, increase and spread of each.

    """
    columns = columns[:_COLUMNS]
    row_height = 26
    left, right = _beside([cut(one["column"], 16) for one in columns]), WIDTH - 66
    # The axis starts at 0: a decrease is noise, and has no bar.
    ends = (max(100 * (one["increase"] + one["spread"]), 0) for one in columns)
    ticks = round_numbers([0, 1, *ends], 4)
    said = "; ".join(f"{one['column']}: {signed(100 * one['increase'])}" for one in columns)
    about = f"Increase of the test error, in percentage points. {said}."
    height, title = row_height * len(columns), "more errors without it, percentage points"
    drawing, x = _on_axis(ticks, left, right, height, about, title)
    for at, one in enumerate(columns):
        y = _TOP + row_height * (at + 0.5)
        increase, spread = 100 * one["increase"], 100 * one["spread"]
        told = f"{one['column']}: {signed(increase)} points, ± {spread:.2f} over the shuffles"
        with drawing.group("mark chosen", told):
            drawing.text(left - 10, y + 4, cut(one["column"], 16), "end")
            drawing.box(left, y - 7, max(x(increase) - left, 1), 14, "bar", 0.75)
            reach = [x(max(increase + sign * spread, 0)) for sign in (-1, 1)]
            drawing.line([(reach[0], y), (reach[1], y)], "whisker over")
            drawing.text(WIDTH, y + 4, signed(increase), "end small")
    return drawing.svg()


def _beside(labels: Sequence[str]) -> float:
    """Return the left margin of a figure with labels, with room for wide letters on a phone."""
    return 14 + _LETTER * max(map(len, labels))


def _on_axis(
    ticks: Sequence[float], left: float, right: float, height: float, about: str, title: str
) -> tuple[Drawing, Scale]:
    """Return a figure with grid lines, tick labels and the axis title, and the axis's scale.

    The rows of the figure have this total height, and start at `_TOP`.
    """
    bottom = _TOP + height
    drawing, x = Drawing(bottom + 44, about), scale(ticks[0], ticks[-1], left, right)
    for tick in ticks:
        drawing.line([(x(tick), _TOP), (x(tick), bottom)], "grid")
        drawing.text(x(tick), bottom + 18, f"{tick:g}", "middle small")
    drawing.text((x(ticks[0]) + x(ticks[-1])) / 2, bottom + 39, title, "middle soft")
    return drawing, x


def _with_interval(row: Mapping[str, Any]) -> str:
    ends = f"{percent(row['low'])} to {percent(row['high'])}"
    return f"{percent(row['error'])}% (95% interval {ends})"


def _about_matrix(matrix: Sequence[Sequence[int]], labels: Sequence[object]) -> str:
    mistakes = [
        (count, f"{labels[at]} predicted as {labels[to]} {count:,} times")
        for at, row in enumerate(matrix)
        for to, count in enumerate(row)
        if at != to and count
    ]
    mistakes.sort(key=lambda one: -one[0])
    most = "; ".join(words for _, words in mistakes[:5]) or "there are no mistakes"
    return f"Confusion matrix of {len(labels)} classes. Most frequent mistakes: {most}."


def _short(count: int) -> str:
    """Return a count in at most four characters.

    >>> _short(9999), _short(12345), _short(1234567)
    ('9999', '12k', '1M')
    """
    if count < 10_000:
        return str(count)
    return f"{count / 1000:.0f}k" if count < 999_500 else f"{count / 1e6:.0f}M"
