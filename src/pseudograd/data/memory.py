"""How much memory a table may take, checked before it is used."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from pseudograd.data.columns import Refusal

# Text compresses to a tenth, and seldom to less than a fiftieth.
MOST_TIMES = 200
HARMLESS = 2**26  # bytes that may come out of any file
FEATURES = 2 * 2**30  # bytes; fixed, so that a table has the same features on every machine


def available() -> int:
    """Return how many bytes are free; 1 TiB if the system does not say."""
    found = [2**40]
    with contextlib.suppress(OSError, ValueError, KeyError):
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        found.append(int(lines["MemAvailable"].split()[0]) * 1024)
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        most, used = ((group / f"memory.{name}").read_text() for name in ("max", "current"))
        found.append(int(most) - int(used))
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            found.append(limit - pages * os.sysconf("SC_PAGE_SIZE"))
    return max(0, min(found))


def check_size(size: float, what: str) -> None:
    """Refuse what would take more than half of the available memory."""
    if size > available() / 2:
        raise Refusal(
            f"{what} {size / 2**30:,.1f} GB, more than half of the available memory "
            f"({available() / 2**30:,.1f} GB): take a sample of the rows, or fewer columns"
        )


def check_unpacked(size: int, packed: int) -> None:
    """Refuse a file that claims to hold far more than a table packs into so few bytes."""
    if size > max(HARMLESS, MOST_TIMES * packed):
        raise Refusal(
            f"is not read: it packs {size / 2**20:,.0f} MB into {packed / 2**20:,.1f} MB, as no "
            "table does; unpack it if that is right"
        )
    check_size(size, "holds")
