"""Memory limits of tables, checked before they are loaded."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from pseudograd.data.columns import Refusal

# Text typically compresses 10:1, and rarely better than 50:1.
MOST_TIMES = 200
HARMLESS = 2**26  # decompressed bytes that are always accepted
FEATURES = 2 * 2**30  # bytes; fixed, so that a table has the same features on every machine


def available() -> int:
    """Return the available memory in bytes; 1 TiB if the system does not report it."""
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
    """Raise if something needs more than half of the available memory."""
    if size > available() / 2:
        raise Refusal(
            f"{what} {size / 2**30:,.1f} GB, more than half of the available memory "
            f"({available() / 2**30:,.1f} GB): take a sample of the rows, or fewer columns"
        )


def check_unpacked(size: int, packed: int) -> None:
    """Raise if a file decompresses to far more than a table of its size would."""
    if size > max(HARMLESS, MOST_TIMES * packed):
        raise Refusal(
            f"is not read: {packed / 2**20:,.1f} MB would decompress to {size / 2**20:,.0f} MB, "
            "far more than a table would; decompress it yourself if that is right"
        )
    check_size(size, "holds")
