"""Numbers as sentences and tables write them; to be merged with ``pseudograd.words``."""

from __future__ import annotations

import math

from pseudograd.search import Difference

DASH = "–"  # stands for a number that does not exist


def fraction(k: float) -> str:
    """Return k as people write it.

    >>> fraction(4.0), fraction(0.125), fraction(0.3)
    ('4', '1/8', '0.3')
    """
    return f"1/{1 / k:g}" if k < 1 and (1 / k).is_integer() else f"{k:g}"


def rates(*values: float) -> str:
    """Return a learning rate, or the lowest and the highest of several, exactly if that is short.

    >>> rates(0.0625), rates(0.5, 0.0625, 0.25), rates(2.0**-14)
    ('1/16', '1/16 to 1/2', '6.104e-05')
    """

    def rate(value: float) -> str:
        text = fraction(value)
        return text if sum(map(str.isdigit, text.removeprefix("1/"))) <= 4 else f"{value:.4g}"

    return " to ".join(dict.fromkeys(rate(end) for end in (min(values), max(values))))


def signed(value: float, form: str = ".2f") -> str:
    """Return a number with its sign; zero, also after rounding, has none.

    >>> signed(-0.5), signed(0.25), signed(-0.001), signed(20, "g")
    ('−0.50', '+0.25', '0.00', '+20')
    """
    text = format(abs(value), form)
    if not float(text):
        return text
    return ("−" if value < 0 else "+") + text


def percent(share: float, digits: int = 2) -> str:
    """Return a share in percent, without the percent sign.

    >>> percent(0.0213), percent(0.5, digits=0), percent(float("nan"))
    ('2.13', '50', '-')
    """
    return f"{100 * share:.{digits}f}" if math.isfinite(share) else "-"


def interval(value: Difference, form: str = ".2f", times: float = 1, label: str = "") -> str:
    """Return a difference with its interval, or alone if it has none.

    >>> interval(Difference(-0.003, -0.005, 0.001), times=100, label="95% interval")
    '−0.30 (95% interval −0.50 to +0.10)'
    """
    if not math.isfinite(value.mean):
        return DASH
    mean, low, high = (signed(times * x, form) for x in (value.mean, value.low, value.high))
    return mean if math.isnan(value.low) else f"{mean} ({f'{label} {low}'.lstrip()} to {high})"


def mean_and_sd(mean: float, sd: float, form: str = ".2f") -> str:
    """Return a mean with its standard deviation, or alone if it has none.

    >>> mean_and_sd(1.761, 0.052), mean_and_sd(1.761, math.nan), mean_and_sd(math.inf, math.nan)
    ('1.76 ± 0.05', '1.76', 'infinite')
    """
    if not math.isfinite(mean):
        return "infinite"
    return f"{mean:{form}}" if math.isnan(sd) else f"{mean:{form}} ± {sd:{form}}"


def p_value(p: float) -> str:
    """Return a p-value with two digits, or that it is below 0.001.

    >>> p_value(0.0213), p_value(1e-6)
    ('p = 0.021', 'p < 0.001')
    """
    return f"p = {p:.2g}" if p >= 0.001 else "p < 0.001"


def counted(count: int, noun: str) -> str:
    """Return a number with its noun.

    >>> counted(1, "network"), counted(5000, "network")
    ('1 network', '5,000 networks')
    """
    return f"{count:,} {noun}" + "s" * (count != 1)


def duration(seconds: float) -> str:
    """Return a time in at most two units.

    >>> duration(59), duration(61), duration(7300)
    ('59 s', '1 min 1 s', '2 h 1 min')
    """
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
