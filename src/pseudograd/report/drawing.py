"""SVG drawing: shapes and text with tooltips, coloured by the page's style sheet.

A figure is 440 units wide, so that its text stays readable on a phone. The chosen k is always
drawn as a disc and solid lines, k = 1 as a diamond and dashed lines. `Markup.format` escapes all
text.
"""

from __future__ import annotations

import base64
import contextlib
import math
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence

from markupsafe import Markup

WIDTH = 440

Point = tuple[float, float]
Scale = Callable[[float], float]


class Drawing:
    """A figure: SVG elements in drawing order.

    Args:
        height: The height in units.
        about: A description for screen readers; without it they skip the figure.
        width: The width in units; a figure wider than `WIDTH` scrolls on a phone.
        style: A CSS class.

    Example:
        >>> drawing = Drawing(20, "a word")
        >>> drawing.text(0, 14, "error < 2%")
        >>> drawing.svg()
        Markup('<svg class="" viewBox="0 0 440 20" role="img" aria-label="a word"><text x="0.0"
        y="14.0" class="">error &lt; 2%</text></svg>')

    """

    def __init__(self, height: float, about: str, width: int = WIDTH, style: str = "") -> None:
        self.height, self.width, self.about, self.style = height, width, about, style
        self._pieces: list[Markup] = []

    def add(self, piece: str, *values: object) -> None:
        """Add an SVG element with escaped values."""
        self._pieces.append(Markup(piece).format(*values))

    def text(self, x: float, y: float, words: str, style: str = "") -> None:
        """Draw text."""
        self.add('<text x="{:.1f}" y="{:.1f}" class="{}">{}</text>', x, y, style, words)

    def line(self, points: Sequence[Point], style: str) -> None:
        """Draw a line through points."""
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        self.add('<path class="{}" d="M{}"/>', style, path)

    def ring(self, x: float, y: float, radius: float, style: str) -> None:
        """Draw a circle."""
        circle = '<circle class="{}" cx="{:.1f}" cy="{:.1f}" r="{:.1f}"/>'
        self.add(circle, style, x, y, radius)

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
            self.ring(x, y, size if kind == "chosen" else 0.65 * size, "dot")

    def grid(self, ticks: Sequence[float], y: Scale, title: str) -> None:
        """Draw horizontal grid lines, tick labels, and the axis title above them."""
        self.text(0, 14, title, "soft")
        for tick in ticks:
            self.line([(42, y(tick)), (self.width, y(tick))], "grid")
            self.text(34, y(tick) + 4, f"{tick:g}", "end")

    def arrow(self, x: float, start: float, end: float) -> None:
        """Draw a vertical arrow that starts at a ring."""
        self.ring(x, start, 2.5, "way")
        if end != start:
            up = 1 if end < start else -1
            self.line([(x, start - 2.5 * up), (x, end - 4 * up)], "way")
            self.line([(x - 4, end + 2 * up), (x, end - 4 * up), (x + 4, end + 2 * up)], "way")

    @contextlib.contextmanager
    def group(self, style: str, said: str) -> Iterator[None]:
        """Group elements, with ``said`` as their tooltip."""
        self.add('<g class="{}" data-say="{}">', style, said)
        yield
        self.add("</g>")

    def svg(self) -> Markup:
        """Return the figure as an SVG element."""
        style = self.style or ("broad" if self.width > WIDTH else "")
        told = Markup('role="img" aria-label="{}"').format(self.about)
        return Markup('<svg class="{}" viewBox="0 0 {} {:.0f}" {}>{}</svg>').format(
            style,
            self.width,
            self.height,
            told if self.about else Markup('aria-hidden="true"'),
            Markup("").join(self._pieces),
        )


def scale(low: float, high: float, start: float, end: float, beyond: bool = True) -> Scale:
    """Return a function that maps [low, high] to [start, end]; with low = high, to start.

    Values outside are extrapolated, or clamped unless ``beyond``.

    >>> scale(0, 2, 100, 300)(1.5)
    250.0
    """

    def at(value: float) -> float:
        part = (value - low) / (high - low) if high != low else 0.0
        return start + (end - start) * (part if beyond else min(max(part, 0.0), 1.0))

    return at


def log_scale(low: float, high: float, start: float, end: float) -> Scale:
    """Return a function that maps [low, high] to [start, end] on a log scale.

    >>> log_scale(1, 16, 0, 100)(4)
    50.0
    """
    at = scale(math.log2(low), math.log2(high), start, end)
    return lambda value: at(math.log2(value))


def round_numbers(values: Sequence[float], about: int = 5) -> list[float]:
    """Return roughly ``about`` evenly spaced round numbers that enclose the values.

    >>> round_numbers([0.13, 0.88])
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    low, high = min(values), max(values)
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / about))
    step = next(power * m for m in (1, 2, 5, 10) if power * m * about >= span)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(step * number, 10) for number in range(first, max(last, first + 1) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return ticks in [low, high]: 1, 2, 5, 10 and so on, or even steps if those are too few.

    >>> log_ticks(0.4, 12), log_ticks(1.1, 1.6)
    ([0.5, 1.0, 2.0, 5.0, 10.0], [1.1, 1.2, 1.3, 1.4, 1.5, 1.6])
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [m * 10.0**power for power in powers for m in (1, 2, 5)]
    inside = [tick for tick in ticks if low <= tick <= high]
    if len(inside) > 2:
        return inside
    return [tick for tick in round_numbers([low, high]) if low <= tick <= high]


def image(pixels: Sequence[int], shape: Sequence[int]) -> str | None:
    """Return an image as a PNG data URL, or None if the shape is not that of an image.

    Args:
        pixels: Values from 0 to 255, in the order of the shape.
        shape: (height, width), or with 1 or 3 channels first or last.

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
    # Each PNG scan line starts with its filter type, 0 for none.
    lines = b"".join(b"\0" + bytes(pixels[at * line : (at + 1) * line]) for at in range(height))
    chunks = [
        (b"IHDR", struct.pack(">2I5B", width, height, 8, {1: 0, 3: 2}[colours], 0, 0, 0)),
        (b"IDAT", zlib.compress(lines, 9)),
        (b"IEND", b""),
    ]
    file = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )
    return "data:image/png;base64," + base64.b64encode(file).decode()
