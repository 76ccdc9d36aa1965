"""Formatting of numbers and lists for the terminal, the page and error messages.

A k, an interval or a list of names then looks the same everywhere. This module imports only the
standard library.
"""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

_LETTERS = (
    "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve",
)  # fmt: skip
DASH = "–"  # shown in place of a missing number


# --- numbers -------------------------------------------------------------------------------------


def fraction(k: Any) -> str:
    """Return k as a short text, such as "1/8"; for a ramp, its start and end.

    >>> fraction(4.0), fraction(0.125), fraction(0.3)
    ('4', '1/8', '0.3')
    >>> from types import SimpleNamespace
    >>> fraction(SimpleNamespace(start=0.5, end=2.0))
    '1/2→2'
    """
    if hasattr(k, "start"):
        return f"{fraction(k.start)}→{fraction(k.end)}"
    return f"1/{1 / k:g}" if 0 < k < 1 and (1 / k).is_integer() else f"{k:g}"


def signed(value: float, form: str = ".2f") -> str:
    """Return a number with its sign; a number that rounds to zero has none.

    >>> signed(-0.5), signed(0.25), signed(-0.001), signed(20, "g")
    ('−0.50', '+0.25', '0.00', '+20')
    """
    text = format(abs(value), form)
    if not float(text):
        return text
    return ("−" if value < 0 else "+") + text


def percent(share: float, digits: int = 2) -> str:
    """Return a fraction in percent, without the percent sign.

    >>> percent(0.0213), percent(0.5, digits=0), percent(float("nan"))
    ('2.13', '50', '-')
    """
    return f"{100 * share:.{digits}f}" if math.isfinite(share) else "-"


def interval(
    value: Any, form: str = ".2f", times: float = 1, unit: str = "", label: str = ""
) -> str:
    """Return a difference with its interval, or the difference alone if it has none.

    Args:
        value: Has ``mean``, ``low`` and ``high``; the ends are NaN if there is only one value.
        form: The format of each of the three numbers.
        times: A factor for all three, such as 100 for percentage points.
        unit: Written after the mean.
        label: Written before the interval.

    >>> from types import SimpleNamespace
    >>> gain = SimpleNamespace(mean=-0.003, low=-0.005, high=0.001)
    >>> interval(gain, times=100)
    '−0.30 (−0.50 to +0.10)'
    >>> interval(gain, ".1f", 100, unit="points", label="95% interval")
    '−0.3 points (95% interval −0.5 to +0.1)'
    >>> interval(SimpleNamespace(mean=-0.003, low=float("nan"), high=float("nan")), ".3f")
    '−0.003'
    """
    if not math.isfinite(value.mean):
        return DASH
    mean = f"{signed(times * value.mean, form)} {unit}".rstrip()
    if math.isnan(value.low):
        return mean
    return f"{mean} ({f'{label} {between(value, form, times)}'.lstrip()})"


def between(value: Any, form: str = ".2f", times: float = 1) -> str:
    """Return the ends of an interval, without its mean.

    >>> from types import SimpleNamespace
    >>> between(SimpleNamespace(mean=0, low=-0.005, high=0.001), times=100)
    '−0.50 to +0.10'
    """
    return f"{signed(times * value.low, form)} to {signed(times * value.high, form)}"


def p_value(p: float) -> str:
    """Return a p-value with two significant digits, or "p < 0.001".

    >>> p_value(0.0213), p_value(1e-6)
    ('p = 0.021', 'p < 0.001')
    """
    return f"p = {p:.2g}" if p >= 0.001 else "p < 0.001"


def ratio(value: float) -> str:
    """Return a ratio with three significant digits, or as a whole number from 100 on.

    >>> ratio(1.1472), ratio(6561.0)
    ('1.15', '6,561')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Return a duration in at most two units.

    >>> duration(59), duration(61), duration(7300)
    ('59 s', '1 min 1 s', '2 h 1 min')
    """
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


# --- words ---------------------------------------------------------------------------------------


def counted(count: int, noun: str, *, spelled: bool = False) -> str:
    """Return a count with its noun; ``spelled`` writes 0 and 1 as "no" and "one".

    >>> counted(1, "network"), counted(5000, "network"), counted(1, "layer", spelled=True)
    ('1 network', '5,000 networks', 'one layer')
    """
    number = {0: "no", 1: "one"}.get(count) if spelled else None
    return f"{number or f'{count:,}'} {noun}{'s' * (count != 1)}"


def spelled(count: int) -> str:
    """Return a whole number spelled out, or in digits above twelve.

    >>> spelled(5), spelled(1200)
    ('five', '1,200')
    """
    return _LETTERS[count - 1] if 1 <= count <= len(_LETTERS) else f"{count:,}"


def joined(texts: Iterable[str], last: str = "and") -> str:
    """Join texts with commas, and "and" before the last.

    >>> joined(["a"]), joined(["a", "b", "c"]), joined(["a", "b"], "or")
    ('a', 'a, b and c', 'a or b')
    """
    *most, end = texts
    return f"{', '.join(most)} {last} {end}" if most else end


def shortened(texts: Sequence[str], to: str = "", most: int = 8) -> str:
    """Return the first few texts and how many more there are; ``to`` introduces the last one.

    >>> shortened(["a", "b"]), shortened(list("abcdef"), most=4)
    ('a, b', 'a, b, c, d and 2 more')
    >>> shortened(list("abcdef"), "up to", most=4)
    'a, b, c, and 2 more up to f'
    >>> shortened(list("abcde"), "up to", most=4)
    'a, b, c, d, e'
    """
    if len(texts) <= most + bool(to):  # the last one takes no more room than "1 more"
        return ", ".join(texts)
    if not to:
        return f"{', '.join(texts[:most])} and {len(texts) - most} more"
    return f"{', '.join(texts[: most - 1])}, and {len(texts) - most} more {to} {texts[-1]}"


def listed(names: Iterable[object]) -> str:
    """Return the first few names and the last one, quoted.

    >>> listed(["red", "green"]), listed(range(12))
    ("'red', 'green'", '0, 1, 2, 3, 4, 5, 6, and 4 more up to 11')
    """
    return shortened([repr(name) for name in names], "up to")


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the names closest to a misspelled one, or all of them.

    >>> nearest("colr", ["colour", "weight"]), nearest("x", ["colour", "weight"])
    ("'colour'", "'colour', 'weight'")
    """
    names = list(names)
    return listed(difflib.get_close_matches(name, names) or names)


def first_line(problem: BaseException) -> str:
    """Return the first line of an exception's message, or its class name if it has none.

    >>> first_line(ValueError("no such thing."))
    'no such thing'
    """
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0].rstrip(".")


def last_line(problem: BaseException) -> str:
    """Return the last line of an exception's message, or its class name if it has none.

    >>> last_line(ValueError("Trouble:\\nno such thing."))
    'no such thing'
    """
    return (str(problem).strip().splitlines() or [type(problem).__name__])[-1].rstrip(".")


def raised(problem: BaseException) -> str:
    """Return an exception's class name and the first line of its message, if it has one.

    >>> raised(ValueError("no such thing.")), raised(ValueError())
    ('ValueError: no such thing', 'ValueError')
    """
    name = type(problem).__name__
    return f"{name}: {first_line(problem)}" if str(problem).strip() else name


def shown(value: object, most: int = 60) -> str:
    """Return the repr of a value on one line, cut if it is long.

    Example:
        >>> shown("adam"), shown(list(range(100)), 12)
        ("'adam'", '[0, 1, 2, 3,...')

    """
    text = " ".join(repr(value).split())
    return text if len(text) <= most else f"{text[:most]}..."


@contextlib.contextmanager
def renamed(**names: str) -> Iterator[None]:
    """Rename the argument that the message of a ValueError inside the block begins with.

    Example:
        >>> with renamed(max_epochs="--epochs"):
        ...     raise ValueError("max_epochs must be a whole number above 0, not 0")
        Traceback (most recent call last):
        ...
        ValueError: --epochs must be a whole number above 0, not 0

    """
    try:
        yield
    except ValueError as problem:
        name, _, rest = str(problem).partition(" ")
        if (known := names.get(name.strip("'"))) is None:
            raise
        raise ValueError(f"{known} {rest}") from problem


def sentence(text: str) -> str:
    """Return a clause as a sentence, with a capital letter and a full stop.

    >>> sentence("always answering 'yes' would be right")
    "Always answering 'yes' would be right."
    """
    return f"{text[0].upper()}{text[1:]}."
