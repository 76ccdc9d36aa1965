"""The tables: each row beside the paper's, notes on it, and how far ours are from the paper's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from paper.findings import (
    Finding,
    Reproduction,
    agreeing,
    beside_the_papers,
    cross_entropies,
    errors_pct,
    may_be_the_rate,
)
from paper.report.document import Block, Bullets, Figure, Part, Table, Text, Title
from paper.report.figures import deviations
from paper.report.wording import (
    DASH,
    MARKED,
    data_of,
    interval,
    mean_and_sd,
    rates,
    rates_tried,
)
from paper.rows import Experiment, Row
from paper.toy import Spread
from pseudograd.fleet import Outcome
from pseudograd.report.figures import signed
from pseudograd.report.summary import counted, fraction
from pseudograd.search import Comparison, Difference

_WIDE = 1.0  # a spread, in percentage points, that is looked into
_COMPARED = "selected k minus k = 1 (95% interval)"
_TITLES = {
    "table1": "Table 1: one hidden layer, momentum 0.5",
    "table3": "Table 3: three hidden layers, momentum 0.5",
    "table4": "Table 4: five hidden layers",
    "supplement": "Supplement: one and three hidden layers, other momenta",
    "unprinted": "Rows that stand in the paper’s source as comments",
}


def the_tables(found: Reproduction) -> Part:
    """Show each row beside the paper's, table by table.

    Args:
        found: What came of the experiments.

    Example:
        >>> from pathlib import Path
        >>> from paper.findings import read
        >>> from paper.rows import experiments, rows
        >>> found = read(experiments(rows("table1", "svhn 1x400*")), Path("nowhere"))
        >>> the_tables(found).blocks[3].rows[0][:4]
        ['svhn 1x400 m0.5', '(1/4)', 'not run yet', '16.88']

    """
    retrainings = {len(f.result.comparison.chosen) for f in found.finished} or {5}
    blocks: list[Block] = [
        Text(
            "Ours beside the paper’s. Ours are means ± standard deviations over "
            f"{'/'.join(map(str, sorted(retrainings)))} networks, retrained with one fifth of the "
            "examples for early stopping; the interval of a difference is Student’s over pairs of "
            "networks with the same seed, so it tells of seeds and folds, and not of how the test "
            "set was drawn. Beside them stand the networks of cross-validation, "
            "trained on three fifths (means ± standard deviations over the repetitions), since "
            f"some of the paper’s figures lie nearer to these{_nearer(found)}. Where our k is not "
            "the paper’s, the deviation at the selected k is between two different k. Where a "
            "spread is a point or more, the errors stand below the table with the epochs at which "
            "early stopping took the networks (see “Were networks taken early?”). † marks a k that "
            "others equalled in cross-validation, ‡ a row with a k whose best rate may lie beyond "
            f"those tried, § a row in which {MARKED}, so that part of the difference may be the "
            "rate’s (see “Is it k, or the learning rate?”). The last column is the command that "
            "runs this row again, and nothing else. It needs the data (`pseudograd data fetch "
            "mnist`, or whichever set it is), and `python -m paper report --out again`, with "
            "the same `--rows`, shows what came of it."
        )
    ]
    own = [e.row.table for e in found.found if not e.row.of_paper]
    titles = _TITLES | {table: f"Not of the paper: {table}" for table in own}
    for table, title in titles.items():
        # The paper's rows with another activation have a table further below.
        experiments = [
            e
            for e in found.found
            if e.row.table == table and (e.activation == "relu" or not e.row.of_paper)
        ]
        if not experiments:
            continue
        blocks += [
            Title(title),
            Text("Test error, %:"),
            Table(
                [*_head(_ERROR), "run it again"],
                [[*_line(e, found, _ERROR), _command(e)] for e in experiments],
            ),
            Text("Test cross-entropy:"),
            Table(_head(_CROSS_ENTROPY), [_line(e, found, _CROSS_ENTROPY) for e in experiments]),
        ]
        notes = [note for e in experiments if (f := found.found[e]) for note in _notes(f)]
        blocks += [Bullets(notes)] if notes else []
    groups = _relative_deviations(found.finished)
    if groups:
        blocks += [
            Title("How far from the paper"),
            Text(
                "Test errors of the retrained networks over those that the paper prints. A row "
                "whose selected k is not the paper’s is among them. The table by depth at the top "
                "has the means in percentage points."
            ),
            Figure("deviations.svg", deviations(groups)),
        ]
    return Part("The tables", blocks)


def _nearer(found: Reproduction) -> str:
    """How many of the paper's errors are nearer to networks trained on three fifths."""
    nearer: dict[str, list[bool]] = {"plain": [], "chosen": []}
    for finding in found.finished:
        if finding.experiment.as_printed and finding.experiment.row.printed:
            for kind, whole, part, theirs in beside_the_papers(finding):
                nearer[kind].append(abs(part.mean - theirs) < abs(whole.mean - theirs))
    plain, chosen = (f"{sum(found)} of {len(found)}" for found in nearer.values())
    return f" ({plain} errors at k = 1, {chosen} at the selected k)" if nearer["plain"] else ""


def _notes(finding: Finding) -> list[str]:
    """What the marks of a row say, and which of its networks did not end as planned."""
    name, notes = finding.experiment.name, []
    if tied := _tied_ks(finding):
        ks = ", ".join(map(fraction, tied))
        notes.append(f"† {name}: k = {ks} did as well; of equals the k nearest 1 is taken.")
    if finding.result.open_ks:
        ks = ", ".join(map(fraction, finding.result.open_ks))
        notes.append(f"‡ {name}: the best rate of k = {ks} may lie beyond those tried.")
    if may_be_the_rate(finding):
        tried, missed = rates_tried(finding, 1.0), rates(finding.result.chosen.learning_rate)
        notes.append(f"§ {name}: the search tried k = 1 at rates of {tried}, not at {missed}.")
    comparison = finding.result.comparison
    for what, outcomes in (("the selected k", comparison.chosen), ("k = 1", comparison.plain)):
        if errors_pct(outcomes).sd >= _WIDE and (what == "k = 1" or finding.k != 1):
            each = ", ".join(f"{100 * o.error:.1f} ({o.best_epoch})" for o in outcomes)
            notes.append(f"{name}: the errors at {what} are, with the epoch of each, {each}.")
    final = {*comparison.chosen, *comparison.plain}
    if cut := sum(outcome.stopped_by != "patience" for outcome in final):
        notes.append(f"{name}: {cut} of {len(final)} final networks did not end by patience.")
    return notes


def _tied_ks(finding: Finding) -> list[float]:
    return list(dict.fromkeys(cell.k for cell in finding.result.ties if cell.k != finding.k))


def _relative_deviations(findings: Iterable[Finding]) -> dict[str, dict[str, list[float]]]:
    groups: dict[str, dict[str, list[float]]] = {}
    for finding in findings:
        if finding.experiment.activation != "relu":
            continue
        for kind, ours, _, theirs in beside_the_papers(finding):
            group = groups.setdefault(data_of(finding.experiment), {}).setdefault(kind, [])
            group.append(100 * (ours.mean / theirs - 1))
    return groups


def other_activations(found: Reproduction) -> list[Block]:
    """Show the rows that are run with another activation, each below the same row with ReLU.

    Args:
        found: What came of the experiments.

    Example:
        >>> from pathlib import Path
        >>> from paper.findings import read
        >>> from paper.rows import experiments, rows
        >>> found = read(experiments(rows("table1", "mnist 1x400*")), Path("nowhere"))
        >>> [row[:3] for row in other_activations(found)[1].rows]
        [['mnist 1x400 m0.5', 'relu', 'not run yet'], ['mnist 1x400 m0.5', 'tanh', 'not run yet']]

    """
    others = [e for e in found.found if e.activation != "relu"]
    if not others:
        return [Text("No row was to be run with another activation than ReLU.")]
    lines = []
    for other in others:
        plain = replace(other, activation="relu")
        for experiment in (plain, other):
            finding, command = found.found.get(experiment), _command(experiment)
            if finding is None:
                state = _state(experiment, found)
                lines.append([plain.name, experiment.activation, state, *[DASH] * 5, command])
                continue
            lines.append([
                plain.name, experiment.activation,
                f"{fraction(finding.k)} {_paper_k(other.row)}",
                mean_and_sd(finding.error_k1_pct, ".2f"), mean_and_sd(finding.error_pct, ".2f"),
                _change(finding, _ERROR),
                mean_and_sd(finding.cross_entropy_k1, ".3f"),
                mean_and_sd(finding.cross_entropy, ".3f"),
                command,
            ])  # fmt: skip
    head = ["row", "activation", "k (paper)", "error at k = 1, %", "at selected k, %",
            _COMPARED, "cross-entropy at k = 1", "at selected k", "run it again"]  # fmt: skip
    text = "The paper does not name its activation."
    for name in dict.fromkeys(other.activation for other in others):
        text += f" Some rows are run with {name}, too."
        pairs = [
            (relu, finding)
            for other in others
            if other.activation == name
            and (relu := found.found.get(replace(other, activation="relu")))
            and (finding := found.found[other])
        ]
        if pairs:
            same, on_side = agreeing((relu.k, finding.k) for relu, finding in pairs)
            changes = ", ".join(
                f"{signed(finding.error_k1_pct.mean - relu.error_k1_pct.mean)} "
                f"({relu.experiment.name})"
                for relu, finding in pairs
            )
            text += (
                f" Of {counted(len(pairs), 'row')} finished with both, {name} selects the same k "
                f"in {same}, and one on the same side of 1 in {on_side}. Its test error at k = 1 "
                f"minus that of ReLU is, in percentage points: {changes}."
            )
    return [Text(text), Table(head, lines)]


# --- a line of a table ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Measure:
    """What a table shows: errors or cross-entropies."""

    name: str
    form: str
    times: float  # from what an outcome has to what is shown
    paper: Callable[[Row], tuple[float | None, float | None]]
    spread: Callable[[Sequence[Outcome]], Spread]
    difference: Callable[[Comparison], Difference]


_ERROR = _Measure(
    "error",
    ".2f",
    100,
    lambda row: (row.error_k1_pct, row.error_selected_pct),
    errors_pct,
    lambda comparison: comparison.error,
)
_CROSS_ENTROPY = _Measure(
    "cross-entropy",
    ".3f",
    1,
    lambda row: (row.ce_k1, row.ce_selected),
    cross_entropies,
    lambda comparison: comparison.cross_entropy,
)


def _head(measure: _Measure) -> list[str]:
    both = [f"{measure.name} at k = 1", f"{measure.name} at selected k"]
    beside = ["paper", "deviation"]
    three_fifths = ["three fifths, k = 1", "three fifths, selected k"]
    return ["row", "k (paper)", both[0], *beside, both[1], *beside, _COMPARED, *three_fifths]


def _line(experiment: Experiment, found: Reproduction, measure: _Measure) -> list[str]:
    finding, form = found.found[experiment], measure.form
    paper = measure.paper(experiment.row)
    printed = [DASH if figure is None else _printed(figure, form) for figure in paper]
    k = _paper_k(experiment.row)
    if finding is None:
        state = _state(experiment, found)
        return [experiment.name, k, state, printed[0], DASH, state, printed[1], *[DASH] * 4]
    marks = "†" * bool(_tied_ks(finding)) + "‡" * bool(finding.result.open_ks)
    marks += "§" * may_be_the_rate(finding)
    comparison = finding.result.comparison
    cells = [experiment.name, f"{fraction(finding.k)}{marks} {k}"]
    for outcomes, theirs, words in zip(
        (comparison.plain, comparison.chosen), paper, printed, strict=True
    ):
        ours = measure.spread(outcomes)
        deviation = DASH if theirs is None else signed(ours.mean - theirs, form)
        cells += [mean_and_sd(ours, form), words, deviation]
    cells.append(_change(finding, measure))
    chosen, plain = finding.tested
    return [*cells, *(mean_and_sd(measure.spread(group), form) for group in (plain, chosen))]


def _state(experiment: Experiment, found: Reproduction) -> str:
    """How far an experiment is that is not finished."""
    return "not finished" if experiment in found.begun else "not run yet"


def _paper_k(row: Row) -> str:
    return f"({fraction(row.selected_k) if row.of_paper else DASH})"


def _printed(figure: float, form: str) -> str:
    """A figure of the paper, which has more digits here and there."""
    text = format(figure, form)
    return text if float(text) == figure else f"{figure:g}"


def _change(finding: Finding, measure: _Measure) -> str:
    """The selected k minus k = 1."""
    difference = measure.difference(finding.result.comparison)
    return interval(difference, measure.form, measure.times) if finding.k != 1 else "0"


def _command(experiment: Experiment) -> str:
    """The command that runs this row again, and nothing else."""
    if not experiment.row.of_paper:
        return DASH
    table = experiment.row.table
    return f'`python -m paper run {table} --rows "{experiment.name}" --out again`'
