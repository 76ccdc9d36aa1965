"""Render the templates of this package: text for the terminal, and self-contained pages."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from importlib import resources

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from pseudograd import words
from pseudograd.fleet.ramp import as_k


def fill(template: str, *, html: bool = False, **values: object) -> str:
    """Return a rendered template; in HTML, values are escaped unless they are Markup."""
    environment = Environment(
        autoescape=html,
        loader=FunctionLoader(_read),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= _FILTERS
    environment.filters["option"] = _code if html else str
    return environment.get_template(template).render(values)


def render(template: str, script: str | None = None, **values: object) -> str:
    """Return a rendered page with the style sheet and a policy that blocks external resources.

    Args:
        template: The template's file name; it receives ``policy``, ``style`` and ``script``.
        script: The file name of its script, if it has one.
        values: Other values for the template, escaped unless they are Markup.

    """
    style, code = _read("page.css"), _read(script) if script else ""
    policy = f"default-src 'none'; img-src data:; style-src {_hash(style)}; "
    if script:
        policy += f"script-src {_hash(code)}; "
    return fill(
        template,
        html=True,
        policy=policy + "base-uri 'none'; form-action 'none'",
        style=Markup(style),
        script=Markup(code),
        **values,
    )


def _code(option: str) -> Markup:
    """Return a command-line option as code, which the style sheet keeps on one line."""
    return Markup("<code>{}</code>").format(option)


def _unbroken(html: Markup) -> Markup:
    """Return HTML with no-break spaces in "k = 1", in the text between tags."""

    def joined(text: re.Match[str]) -> str:
        return re.sub(r"\b([kp]) (=|&lt;) (?=\d)", "\\1\xa0\\2\xa0", text[0])

    return Markup(re.sub(">[^<]+", joined, html))


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _read(name: str) -> str:
    return resources.files("pseudograd.report").joinpath(name).read_text(encoding="utf-8")


_FILTERS = {
    name: getattr(words, name)
    for name in (
        "between", "counted", "duration", "interval", "joined", "listed", "p_value",
        "percent", "ratio", "shortened", "signed",
    )
} | {
    "fraction": lambda k: words.fraction(as_k(k)),  # JSON holds a ramp as its text
    "sentence": lambda text: type(text)(words.sentence(text)),  # Markup stays Markup
    "quoted": repr,
    "rate": lambda rate: f"{rate:.4g}",
    "decimal": lambda value: f"{value:.3f}" if math.isfinite(value) else "infinite",
    "unbroken": _unbroken,
    "probability": lambda p: f"p = {p:.2f}" if p >= 0.005 else "p < 0.01",
}  # fmt: skip
