"""What a RESULTS.md says in figures: cells of tables, verdicts, and numbers in prose.

`python tests/paper/extract.py RESULTS.md` prints them as JSON. ``results_before.json`` was made so
from the document of the previous generator, which had its sentences in Python.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import TypedDict

# Commands, which may be renamed, and numbers that are only part of the wording.
_WORDING = (
    r"`(?:pseudograd|python -m paper) [^`]*`|k = 1(?![/\d])|\[(?:0|−1), 1\]|95%"
    r"|\b(?:below|above|of|nearest|near) 1(?![/.,\d]|\s*\w*\s*rows?\b)"
)
_NUMBER = r"[−+]?\d[\d,]*(?:\.\d+)?(?:e-\d+)?"
_VERDICT = r"\*\*(confirmed|partly|not confirmed|open[^*]*)\*\*(?: \([^:]*?(p [<=] [\de.-]+)?\))?"


class Section(TypedDict):
    """What stands below one heading, before the next."""

    tables: list[list[str]]
    verdicts: list[str]
    numbers: dict[str, int]


def extract(text: str) -> dict[str, Section]:
    """Return the sections of a document by their headings."""
    found: dict[str, Section] = {}
    above = ""
    for part in re.split(r"^(?=##)", text, flags=re.MULTILINE):
        first = part.splitlines()[0]
        above = first.lstrip("# ") if not first.startswith("###") else above
        name = above + (" > " + first.lstrip("# ")) * first.startswith("###")
        found[name] = _section(part.removeprefix(first))
    return found


def _section(text: str) -> Section:
    tables, prose = [], text
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        prose = prose.replace(table, "")
        rows = [
            [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()
        ]
        # Headings are wording; that a command runs its row is tested apart.
        kept = [" | ".join(c for c in row if not c.startswith("`")) for row in rows[2:]]
        tables.append(kept)
    prose = " ".join(prose.split())
    verdicts = [" ".join(filter(None, found)) for found in re.findall(_VERDICT, prose)]
    numbers = Counter(
        number.rstrip(",") for number in re.findall(_NUMBER, re.sub(_WORDING, "", prose))
    )
    return Section(tables=tables, verdicts=verdicts, numbers=dict(sorted(numbers.items())))


if __name__ == "__main__":
    print(json.dumps(extract(Path(sys.argv[1]).read_text("utf-8")), ensure_ascii=False, indent=0))
