"""The progress of a study: a live table on a terminal, occasional lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, TextIO

from pseudograd.fleet import Outcome, Trial
from pseudograd.fleet.ramp import by_level
from pseudograd.search.ledger import Ledger
from pseudograd.search.protocol import Protocol
from pseudograd.search.study import Progress
from pseudograd.words import counted, duration, fraction, percent

if TYPE_CHECKING:
    from rich.console import Group

_SECONDS_BETWEEN_LINES = 10.0


class Display(contextlib.AbstractContextManager["Display"]):
    """Shows a study's stage, trials, speed, time left, and the best rate of each k so far.

    Args:
        protocol: The study's protocol.
        known: The outcomes it starts with.
        out: The output stream, by default standard error.
        name: The study's name, if several run at once; then only lines are written.

    Example:
        >>> from pseudograd.fleet import MLPRecipe
        >>> recipe = MLPRecipe("digits", (400,))
        >>> outcome = Outcome(Trial(recipe, 1, 0.1), 0.02, 12, 0.03, 0.1, 27, "patience", ())
        >>> with Display(Protocol(recipe, initial_rate=0.1), {}, sys.stdout) as display:
        ...     display.show(Progress("search", 147, 147, outcome))
        search: 147 of 147 trials...

    """

    def __init__(
        self,
        protocol: Protocol,
        known: Mapping[Trial, Outcome],
        out: TextIO | None = None,
        name: str = "",
    ) -> None:
        self.protocol, self.outcomes, self.out = protocol, dict(known), out or sys.stderr
        self.name, self.live = name, self.out.isatty() and not name
        self.before = len(known)
        self.progress: Progress | None = None
        self.first: tuple[float, int] | None = None  # when the first outcome came, and its `done`
        self.started = self.line_written = time.monotonic()
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> Display:
        if self.live:
            from rich.console import Console
            from rich.live import Live

            self._console = Console(file=self.out)
            live = Live(console=self._console, refresh_per_second=4, get_renderable=self._table)
            self._exits.enter_context(live)
        return self

    def __exit__(self, *error: object) -> None:
        self._exits.close()

    def show(self, progress: Progress) -> None:
        """Show the latest outcome."""
        now = time.monotonic()
        self.progress = progress
        self.outcomes[progress.outcome.trial] = progress.outcome
        self.first = self.first or (now, progress.done)
        if self.live:
            return
        last = progress.done == progress.total
        if last or now - self.line_written >= _SECONDS_BETWEEN_LINES:
            self.line_written = now
            print(self._line() + self._best(), file=self.out, flush=True)

    def tell(self, note: str) -> None:
        """Print a line, above the table if there is one."""
        if self.live:
            self._console.print(note)
        else:
            print(note, file=self.out, flush=True)

    def _line(self) -> str:
        """Return the progress as a line."""
        progress = self.progress
        if progress is None:
            return "preparing"
        line = f"{self.name}, " if self.name else ""
        done, total = self._counts(progress)
        line += f"{progress.stage}: {done} of {total} trials"
        if speed := self._speed(progress):
            line += f", {_pace(speed)}"
            if progress.done < progress.total:
                line += f", {duration((progress.total - progress.done) / speed)} left"
        return line

    def _speed(self, progress: Progress) -> float | None:
        """Return the trials per second since the first outcome; None while it is not known.

        The first outcome includes start-up and compilation, and trials that train side by side end
        in bursts. So the speed is known once as much time has passed again.
        """
        if self.first is None:
            return None
        now, (first, done) = time.monotonic(), self.first
        if progress.done == done or now - first <= first - self.started:
            return None
        return (progress.done - done) / (now - first)

    def _counts(self, progress: Progress) -> tuple[int, int]:
        """Return the number of finished trials and of all, including earlier runs."""
        return self.before + progress.done, self.before + progress.total

    def _best(self) -> str:
        """Return the best k so far in words."""
        cells = self.protocol.best_of_each_k(self.outcomes)
        if not cells:
            return ""
        best = self.protocol.best(cells, self.protocol.baseline)
        name = self.protocol.parameter
        return f"; best so far {name} = {fraction(best.k)}, {percent(best.error)}%"

    def _table(self) -> Group:
        from rich.console import Group
        from rich.padding import Padding
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False)
        for heading in (self.protocol.parameter, "best rate", "validation error, %"):
            table.add_column(heading, justify="right")
        cells = {cell.k: cell for cell in self.protocol.best_of_each_k(self.outcomes)}
        least = min((cell.error for cell in cells.values()), default=None)
        for k in sorted(self.protocol.ks, key=by_level, reverse=True):
            if cell := cells.get(k):
                error = f"{percent(cell.error)} ± {percent(cell.standard_error)}"
                style = "bold green" if cell.error == least else ""
                table.add_row(fraction(k), f"{cell.learning_rate:.4g}", error, style=style)
            else:
                table.add_row(fraction(k), "", "", style="dim")
        done, total = self._counts(self.progress) if self.progress else (0, 1)
        bar = Padding(ProgressBar(total, done, width=60), 0)  # the bar itself does not end its line
        return Group(Text(self._line()), bar, table)


def _pace(trials_per_second: float) -> str:
    """Return the speed in the shortest unit that gives at least 1, or per hour.

    Example:
        >>> _pace(6.4), _pace(0.2), _pace(0.001)
        ('6.4 trials/s', '12.0 trials/min', '3.6 trials/h')

    """
    for unit, seconds in (("s", 1), ("min", 60)):
        if trials_per_second * seconds >= 1:
            return f"{trials_per_second * seconds:.1f} trials/{unit}"
    return f"{trials_per_second * 3600:.1f} trials/h"


def tell_set_aside(ledger: Ledger) -> None:
    """Print how many lines of a ledger cannot be used, and why the first of them cannot."""
    if ledger.set_aside:
        count, first = counted(len(ledger.set_aside), "line"), ledger.set_aside[0]
        print(f"{ledger.path}: {count} set aside, the first because {first}", file=sys.stderr)
