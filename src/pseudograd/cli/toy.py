"""``pseudograd toy`` and ``pseudograd curve``: the paper's toy example and its Figure 2."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from pseudograd.cli.options import add_k, add_picture, file, number, whole

if TYPE_CHECKING:
    from pseudograd.cli.options import Commands


def _alpha(text: str) -> float:
    if not 0.5 < (value := number(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number between 0.5 and 1, like 0.95")
    return value
