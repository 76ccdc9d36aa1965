"""Print the tables of the documents from the results of the loss on a GPU, as Markdown.

    python -m benchmarks.loss_tables [FILE]      # loss_cuda.csv if no other is named

Rows and columns are those of README.md, docs/speed.md and docs/kernels.md, in this order. A shape
or contender that the file lacks is shown as "–". The ratios of `benchmarks.loss` follow.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.environment import RESULTS
from benchmarks.loss_cuda import BINARY, LOGITS, PROBABILITIES, show

Line = dict[str, str]
OURS = tuple(f"ours k={k}" for k in ("1", "0.5", "2", "per row"))
COMPILED = tuple(f"{way}, compiled" for way in OURS)
KS = ("k = 1", "k = ½", "k = 2", "k per example")
SHORT = (
    "float32 128x10",
    "bfloat16 262144x10",
    "bfloat16 131072x100",
    "bfloat16 65536x1000",
    "bfloat16 8192x32000",
)
README = (SHORT[0], SHORT[3], SHORT[4])


class Results:
    """The lines of a file, by form, dtype and shape, and contender."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self.lines = {
            (line["form"], f"{line['dtype']} {line['shape']}", line["way"]): line for line in lines
        }

    def number(self, form: str, shape: str, way: str, column: str) -> float | None:
        """Return a number, or None if it was not measured."""
        line = self.lines.get((form, shape, way))
        return None if line is None else float(line[column])

    def wall(self, form: str, shape: str, way: str) -> str:
        ms = self.number(form, shape, way, "wall_ms_median")
        return "–" if ms is None else f"{ms:.2f}"

    def gpu(self, form: str, shape: str, way: str) -> str:
        ms = self.number(form, shape, way, "both_ms_median")
        if ms is None:
            return "–"
        return f"{ms:.2f}" if ms >= 1 else f"{ms:.3f}" if ms >= 0.04 else f"{ms:.4f}"

    def ratio(self, form: str, shape: str, way: str) -> str:
        """Return the wall-clock time as a multiple of cross-entropy's."""
        ours, theirs = (
            self.number(form, shape, name, "wall_ms_median") for name in (way, "cross_entropy")
        )
        return "–" if ours is None or not theirs else f"{ours / theirs:.2f}"

    def megabytes(self, form: str, shape: str, way: str) -> str:
        size = self.number(form, shape, way, "peak_bytes")
        return "–" if size is None else f"{size / 1e6:.1f}"


def table(
    title: str, form: str, shapes: Sequence[str], ways: Sequence[str], names: Sequence[str],
    value: Callable[[str, str, str], str],
) -> Iterator[str]:  # fmt: skip
    """Yield the lines of a table with a row for each shape and a column for each contender."""
    yield f"\n### {title}\n"
    yield "| logits | " + " | ".join(names) + " |"
    yield "|" + "---|" * (len(names) + 1)
    for shape in shapes:
        cells = " | ".join(value(form, shape, way) for way in ways)
        yield f"| {shape.replace('x', '×')} | {cells} |"


def tables(found: Results) -> Iterator[str]:
    """Yield the lines of all tables."""

    def shapes(form: Sequence[tuple[object, int, int]]) -> list[str]:
        return [f"{str(dtype)[6:]} {rows}x{classes}" for dtype, rows, classes in form]

    pytorch, names = ("cross_entropy", "torch.compile"), ("cross-entropy", "torch.compile")
    row = ("k = 1", "k = ½", "k = 2", "k per row")
    yield from table("README.md: wall clock, multiples of cross-entropy", "logits", README, OURS,
                     KS, found.ratio)  # fmt: skip
    yield from table("speed.md: wall clock, ms", "logits", SHORT, (*OURS, *pytorch),
                     (*KS, *names), found.wall)  # fmt: skip
    others = [shape for shape in shapes(LOGITS) if shape not in SHORT]
    yield from table("kernels.md: wall clock of the other shapes, ms", "logits", others,
                     (*OURS, *pytorch), (*row, *names), found.wall)  # fmt: skip
    yield from table("kernels.md: the same, probabilities", "probabilities", shapes(PROBABILITIES),
                     (*OURS, *pytorch), (*row, *names), found.wall)  # fmt: skip
    for form, all_shapes in (("logits", LOGITS), ("probabilities", PROBABILITIES)):
        yield from table(f"wall clock of compiled losses, ms: {form}", form, shapes(all_shapes),
                         (*COMPILED, pytorch[1]), (*row, names[1]), found.wall)  # fmt: skip
        yield from table(f"kernels.md: GPU time, ms: {form}", form, shapes(all_shapes),
                         (*OURS, *pytorch), (*row, "PyTorch", names[1]), found.gpu)  # fmt: skip
        yield from table(f"memory, MB: {form}", form, shapes(all_shapes),
                         (OURS[1], COMPILED[1], *pytorch),
                         ("k = ½", "k = ½ compiled", "PyTorch", names[1]),
                         found.megabytes)  # fmt: skip
    ways = ("ours k=0.5", "ours k=0.5, compiled", "ours k=0.5, none", "ours k=0.5, scaled")
    theirs = ("cross_entropy, none", "cross_entropy, scaled", "torch.compile")
    columns = ("mean", "compiled", "none", "scaled")
    peers = ("cross-entropy none", "scaled", "compiled")
    for unit, value in (("GPU time", found.gpu), ("wall clock", found.wall)):
        yield from table(f"kernels.md: graphs, no reduction, scaled: {unit}, ms, k = ½", "logits",
                         shapes(LOGITS), (*ways, *theirs), (*columns, *peers), value)  # fmt: skip
        yield from table(f"kernels.md: probabilities, {unit}, ms, k = ½", "probabilities",
                         shapes(PROBABILITIES), (ways[1], ways[3], *theirs[1:]),
                         ("compiled", "scaled", "cross-entropy scaled", "compiled"),
                         value)  # fmt: skip
    binary = ("binary_cross_entropy", "torch.compile")
    yield from table("speed.md: the binary loss, wall clock, ms", "binary", shapes(BINARY),
                     (*OURS, COMPILED[1], "ours k=0.5, scaled", "ours k=0.5, probabilities",
                      *binary, "binary_cross_entropy, scaled",
                      "binary_cross_entropy, probabilities"),
                     (*KS, "k = ½ compiled", "k = ½ scaled", "k = ½ probabilities", "PyTorch",
                      "torch.compile", "PyTorch scaled", "PyTorch probabilities"),
                     found.wall)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("file", type=Path, nargs="?", default=RESULTS / "loss_cuda.csv")
    path = parser.parse_args().file
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    print(*tables(Results(lines)), sep="\n")
    print()
    if "wall_ms_error" in lines[0]:
        show(lines)


if __name__ == "__main__":
    main()
