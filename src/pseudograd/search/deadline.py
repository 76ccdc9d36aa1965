"""A time limit as a `Stop`."""

from __future__ import annotations

import math
import time


class Deadline:
    """A `Stop` that returns True after the given number of seconds; never if it is None.

    Example:
        >>> Deadline(60)(), Deadline(0)(), Deadline(None)()
        (False, True, False)

    """

    def __init__(self, seconds: float | None) -> None:
        self.end = math.inf if seconds is None else time.monotonic() + seconds

    def __call__(self) -> bool:
        """Return whether the time is over."""
        return time.monotonic() >= self.end
