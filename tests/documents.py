"""Documents whose examples are run."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class Document:
    """A file of ``docs`` and its sections."""

    def __init__(self, name: str) -> None:
        self.path = Path(__file__).parents[1] / "docs" / name
        self.sections = re.split(r"^## ", self.path.read_text("utf-8"), flags=re.MULTILINE)

    def section(self, title: str) -> str:
        (section,) = (text for text in self.sections if text.startswith(title))
        return section

    def blocks(self, title: str, language: str = "py(?:thon)?") -> list[str]:
        """Return the code blocks of a section."""
        fenced = rf"^```{language}\n(.*?)^```$"
        return re.findall(fenced, self.section(title), re.MULTILINE | re.DOTALL)

    def execute(self, blocks: Iterable[str]) -> dict[str, Any]:
        """Run code blocks in order; return the names they define."""
        names: dict[str, Any] = {"__name__": "__main__"}
        for block in blocks:
            exec(compile(block, self.path.name, "exec"), names)
        return names

    def run(self, *titles: str) -> dict[str, Any]:
        """Run the code of some sections; return the names they define."""
        return self.execute(block for title in titles for block in self.blocks(title))
