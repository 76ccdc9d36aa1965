"""What a reader would ask next: how much k matters, whether it is the rate, how sure it all is."""

from __future__ import annotations

import statistics

from pseudograd.report.results import figures
from pseudograd.report.results.document import Block, Figure, Part, Table, Text, Title
from pseudograd.report.results.tables import other_activations
from pseudograd.report.results.wording import (
    DASH,
    data_of,
    interval,
    mean_and_sd,
    rates,
    rates_tried,
)
from pseudograd.report.summary import counted, fraction, percent
from pseudograd.reproduce.findings import (
    Finding,
    Reproduction,
    Stability,
    apart_from_1,
    error_against_k,
    errors_pct,
    may_be_the_rate,
    stability,
    untried_rates,
)
from pseudograd.reproduce.rows import rows
from pseudograd.search import paired_difference

_PAPER_RATES = dict.fromkeys(("svhn", "cifar10", "cifar100"), "0.0001 to 1") | {
    "mnist": "0.1 to 10"
}


def asked_next(found: Reproduction) -> Part:
    """Answer what the verdicts leave open.

    Args:
        found: What came of the experiments.

    Example:
        >>> asked_next(Reproduction({}, (), [], [], 0)).blocks
        [Text(text='No row is finished.')]

    """
    title = "What a reader would ask next"
    if not found.finished:
        return Part(title, [Text("No row is finished.")])
    blocks: list[Block] = [
        Title("How much does k matter?"),
        *_curves(found),
        Title("Is it k, or the learning rate?"),
        *_controls(found),
        Title("How sure is the selection?"),
        *_selection(found),
        Title("Which learning rates are selected?"),
        *_selected_rates(found),
        Title("What does the activation change?"),
        *other_activations(found),
    ]
    return Part(title, blocks)


def _curves(found: Reproduction) -> list[Block]:
    """Of each depth, and of each data set for itself, since they may want opposite k."""
    groups: dict[tuple[int, str], list[Finding]] = {}
    for finding in sorted(found.finished, key=lambda f: f.experiment.row.hidden_layers):
        experiment, row = finding.experiment, finding.experiment.row
        alike = ["all"] * (experiment.as_printed and row.printed)
        for data in (*alike, data_of(experiment)):
            groups.setdefault((row.hidden_layers, data), []).append(finding)
    curves = {group: error_against_k(findings) for group, findings in groups.items()}
    ks = sorted({k for curve in curves.values() for k in curve})
    lines = [
        [str(depth), data, str(len(groups[depth, data])),
         *("0" if k == 1 else interval(curve[k], ".2f") if k in curve else DASH for k in ks)]
        for (depth, data), curve in curves.items()
    ]  # fmt: skip
    head = ["hidden layers", "data", "rows", *(f"k = {fraction(k)}" for k in ks)]
    of_depth = {depth: curve for (depth, data), curve in curves.items() if data == "all"}
    text = (
        "Validation error of each k at its best rate, relative to that of k = 1 in the same row, "
        "averaged over the rows of a depth, in percent; the interval is Student’s over rows. Data "
        "sets may differ in what suits them, so each stands for itself, too; “all” are those that "
        "the paper prints, with MNIST in [−1, 1]."
    )
    printed = {row.data for row in rows()}  # as the paper has them: no tanh, no other scaling
    for depth in of_depth:
        best = {
            data: fraction(min(curve, key=lambda k: curve[k].mean))
            for (at, data), curve in curves.items()
            if at == depth
        }
        layers = counted(depth, "hidden layer")
        each = ", ".join(f"{data} {k}" for data, k in best.items() if data in printed)
        text += f" With {layers} the best k on average is {best['all']} ({each})."
    blocks: list[Block] = [Text(text)]
    if of_depth:
        blocks.append(Figure("error-against-k.svg", figures.error_against_k(of_depth)))
    return [*blocks, Table(head, lines)]


def _controls(found: Reproduction) -> list[Block]:
    """Where the search did not try it: k = 1 at the selected k's rate, beside what it found."""
    apart = [finding for finding in found.finished if apart_from_1(finding)]
    if not apart:
        return [Text("In every finished row k = 1 was tried at the selected k’s rate.")]
    lines, run, cleared = [], 0, 0
    for finding in apart:
        chosen, plain = finding.result.chosen, finding.result.plain
        validated, tested, change = DASH, DASH, DASH
        if finding.control:
            cell, outcomes = finding.control
            validated = percent(cell.error)
            tested = mean_and_sd(errors_pct(outcomes), ".2f")
            ours = [outcome.error for outcome in finding.result.comparison.chosen]
            paired = paired_difference(ours, [outcome.error for outcome in outcomes])
            change = interval(paired, ".2f", 100)
            run += 1
        marked = may_be_the_rate(finding)
        cleared += not marked
        lines.append(
            [finding.experiment.name + " §" * marked,
             f"{fraction(chosen.k)}: {rates(chosen.learning_rate)}", rates(plain.learning_rate),
             percent(chosen.error), percent(plain.error), validated,
             mean_and_sd(finding.error_pct, ".2f"), mean_and_sd(finding.error_k1_pct, ".2f"),
             tested, change]
        )  # fmt: skip
    text = (
        "The search for a k’s rate stops in the first valley that it finds, so the selected k and "
        "k = 1 may be compared at rates far apart. In the rows below the search did not try k = 1 "
        "at the selected k’s rate, so it is trained there, too, afterwards and without a part in "
        "the selection."
    )
    if run:
        text += (
            f" Of {counted(run, 'row')} in which that has been done, k = 1 has no lower validation "
            f"error there than at its own rate in {cleared}: that rate is not what k = 1 lacks, "
            "and the row is not marked §. In rows that are, the last column is the fairer "
            "comparison; in the others it says little, since each k needs a rate of its own."
        )
    if run < len(apart):
        text += f" It has yet to be done for {counted(len(apart) - run, 'row')}."
    head = ["row", "selected k: its rate", "k = 1’s rate", "validation error, selected k, %",
            "k = 1", "k = 1 at the selected k’s rate", "test error, selected k, %", "k = 1",
            "k = 1 at the selected k’s rate", "selected k minus that (95% interval)"]  # fmt: skip
    return [Text(text), Table(head, lines)]


def _selection(found: Reproduction) -> list[Block]:
    """How often resamples select the same k."""
    resampled = [(finding, stability(finding)) for finding in found.finished]
    by_depth: dict[int, list[Stability]] = {}
    for finding, shares in resampled:
        if finding.experiment.as_printed and finding.experiment.row.printed:
            by_depth.setdefault(finding.experiment.row.hidden_layers, []).append(shares)
    head = ["hidden layers", "rows", "same k, %", "same side of 1, %"]
    lines = [
        [str(depth), str(len(group)),
         percent(statistics.fmean(shares.same_k for shares in group), 0),
         percent(statistics.fmean(shares.same_side for shares in group), 0)]
        for depth, group in sorted(by_depth.items())
    ]  # fmt: skip
    each = [
        [finding.experiment.name, fraction(finding.k),
         percent(shares.same_k, 0), percent(shares.same_side, 0),
         ", ".join(f"{fraction(k)}: {percent(share, 0)}" for k, share in shares.shares.items())]
        for finding, shares in resampled
    ]  # fmt: skip
    text = (
        "The repetitions of each row were drawn anew 10,000 times, with replacement and the same "
        "ones for all k and rates that had been tried (bootstrap, fixed seed), and k was selected "
        "again."
    )
    if lines:
        text += (
            " The table has the mean share of resamples that select the same k, and a k on the "
            "same side of 1, over rows as the paper has them."
        )
    return [
        Text(text),
        *([Table(head, lines)] if lines else []),
        Table(
            ["row", "selected k", "same k, %", "same side of 1, %", "k selected in resamples, %"],
            each,
            fold="Row by row",
        ),
    ]


def _selected_rates(found: Reproduction) -> list[Block]:
    """The best rates, and where a search did not try those of others."""
    untried = {finding.experiment: untried_rates(finding) for finding in found.finished}
    of_data: dict[str, list[Finding]] = {}
    for finding in found.finished:
        of_data.setdefault(data_of(finding.experiment), []).append(finding)
    lines = []
    for data, findings in of_data.items():
        searches = sum(len(finding.result.best_of_each_k) for finding in findings)
        lines.append([
            data, str(len(findings)),
            rates(*(finding.result.plain.learning_rate for finding in findings)),
            rates(*(finding.result.chosen.learning_rate for finding in findings)),
            _PAPER_RATES.get(findings[0].experiment.row.data, DASH),
            f"{sum(len(untried[finding.experiment]) for finding in findings)} of {searches}",
            f"{sum(map(apart_from_1, findings))} of {len(findings)}",
        ])  # fmt: skip
    each = [
        [finding.experiment.name,
         ", ".join(
             f"k = {fraction(cell.k)}: {rates(cell.learning_rate)}"
             + "*" * (cell.k in untried[finding.experiment])
             + f" ({rates_tried(finding, cell.k)})"
             for cell in finding.result.best_of_each_k
         )]
        for finding in found.finished
    ]  # fmt: skip
    return [
        Table(
            ["data", "rows", "at k = 1", "at selected k", "paper", "searches apart", "rows apart"],
            lines,
        ),
        Text(
            "The paper’s search adds rates for a k only while the best one is at an end of those "
            "tried. Where the error has two valleys along the rates, it finds the one where it "
            "begins, and not the same one for all k. The last two columns count the searches (of "
            "one k in one row) that never tried the rate that was best for a k next to theirs, and "
            "the rows in which k = 1, which the selected k is compared with, was not tried at the "
            "selected k’s rate."
        ),
        Table(["row", "best rate of each k, and in brackets the lowest and highest tried (*: a "
               "neighbour’s best was not tried)"], each, fold="Row by row"),
    ]  # fmt: skip
