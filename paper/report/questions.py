"""What a reader would ask next: how much k matters, whether it is the rate, how sure it all is."""

from __future__ import annotations

import math
import statistics

from paper.findings import (
    Finding,
    Reproduction,
    Stability,
    agreeing,
    apart_from_1,
    beside_the_papers,
    error_against_k,
    errors_pct,
    may_be_the_rate,
    stability,
    untried_rates,
)
from paper.report import figures
from paper.report.document import Block, Figure, Part, Table, Text, Title
from paper.report.tables import other_activations
from paper.report.wording import (
    DASH,
    OTHER,
    STATED,
    data_of,
    interval,
    mean_and_sd,
    rates,
    rates_tried,
)
from paper.rows import Experiment, rows
from pseudograd.report.summary import counted, fraction, percent
from pseudograd.search import paired_difference

_PAPER_RATES = dict.fromkeys(("svhn", "cifar10", "cifar100"), "0.0001 to 1") | {
    "mnist": "0.1 to 10"
}
_LOW_RATE, _HIGH_RATE = 0.1, 10  # of these for MNIST
_EARLY = 15  # epochs: as many as early stopping waits
_ALIKE = ("all", "all but mnist")  # rows as the paper has them


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
        *_taken_early(found),
        Title("How sure is the selection?"),
        *_selection(found),
        Title("Which learning rates are selected?"),
        *_selected_rates(found),
        *_scalings(found),
        Title("What does the activation change?"),
        *other_activations(found),
    ]
    return Part(title, blocks)


def _curves(found: Reproduction) -> list[Block]:
    """Of each depth, and of each data set for itself, since they may want opposite k."""
    groups: dict[tuple[int, str], list[Finding]] = {}
    for finding in sorted(found.finished, key=lambda f: f.experiment.row.hidden_layers):
        experiment, row = finding.experiment, finding.experiment.row
        alike = []
        if experiment.as_printed and row.printed:
            alike = [name for name in _ALIKE if name == "all" or row.data != "mnist"]
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
    of_depth = {
        depth: {name: curves[depth, name] for name in _ALIKE if (depth, name) in curves}
        for depth, data in curves
        if data == "all"
    }
    text = (
        "Validation error of each k at its best rate, relative to that of k = 1 in the same row, "
        "averaged over the rows of a depth, in percent; the interval is Student’s over rows. Data "
        "sets may differ in what suits them, so each stands for itself, too; “all” are those that "
        "the paper prints, with MNIST in [−1, 1]. MNIST has the smallest errors, which vary most "
        "by this measure, and so the greatest weight; “all but mnist” is without it."
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
        but = f"; {best[_ALIKE[1]]} without MNIST" if "mnist" in best and _ALIKE[1] in best else ""
        text += f" With {layers} the best k on average is {best['all']} ({each}{but})."
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


def _taken_early(found: Reproduction) -> list[Block]:
    """How many final networks early stopping took after few epochs, and how these differ."""
    groups: dict[tuple[str, int], list[Finding]] = {}
    for finding in found.finished:
        row = finding.experiment.row
        if finding.experiment.as_printed and row.printed:
            groups.setdefault((row.data, row.hidden_layers), []).append(finding)
    if not groups:
        return []
    lines = []
    for (data, depth), findings in groups.items():
        line = [data, str(depth)]
        compared = [finding.result.comparison for finding in findings]
        for outcomes in (
            [outcome for each in compared for outcome in each.plain],
            [outcome for each in compared for outcome in each.chosen],
        ):
            early = [outcome for outcome in outcomes if outcome.best_epoch <= _EARLY]
            later = [outcome for outcome in outcomes if outcome.best_epoch > _EARLY]
            line.append(f"{len(early)} of {len(outcomes)}")
            line += [f"{errors_pct(some).mean:.2f}" if some else DASH for some in (early, later)]
        lines.append(line)
    head = ["data", "hidden layers", f"k = 1, within {_EARLY} epochs", "their error, %",
            "the others’", f"selected k, within {_EARLY} epochs", "their error, %",
            "the others’"]  # fmt: skip
    return [
        Title("Were networks taken early?"),
        Text(
            "Early stopping takes the epoch with the lowest error on one fifth, and waits "
            f"{_EARLY} epochs for a lower one. Counted are the final networks that it took within "
            "the first so many, with the mean test error of these and of the others, over all "
            "architectures of a depth. Where there are many of both and their errors differ, which "
            "of the two a seed comes to can outweigh what k changes, and a small spread may mean "
            "that all of a row came to the same."
        ),
        Table(head, lines),
    ]


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


def _scalings(found: Reproduction) -> list[Block]:
    """MNIST in [−1, 1] and in [0, 1], each beside the paper's figures."""
    stated, other = (
        {
            finding.experiment.row: finding
            for finding in found.finished
            if finding.experiment.row.data == "mnist"
            and finding.experiment == Experiment(finding.experiment.row, feature_range)
        }
        for feature_range in (STATED, OTHER)
    )
    both = stated.keys() & other.keys()
    if not both:
        return []
    lines, fits = [], []
    for name, findings in (("[−1, 1]", stated), ("[0, 1]", other)):
        chosen = [finding for row, finding in findings.items() if row in both]
        within = [
            sum(_LOW_RATE <= cell.learning_rate <= _HIGH_RATE for cell in cells)
            for cells in zip(*((f.result.plain, f.result.chosen) for f in chosen), strict=True)
        ]
        off: dict[str, list[float]] = {"plain": [], "chosen": []}
        for finding in chosen:
            for kind, ours, _, theirs in beside_the_papers(finding):
                off[kind].append(abs(ours.mean - theirs))
        distances = [statistics.fmean(far) if far else math.nan for far in off.values()]
        same = agreeing((finding.k, finding.experiment.row.selected_k) for finding in chosen)
        lines.append([
            name, str(len(chosen)), *map(str, within),
            *(DASH if math.isnan(far) else f"{far:.2f}" for far in distances),
            *map(str, same),
        ])  # fmt: skip
        fits.append((sum(within), -sum(distances), sum(same)))

    def better(measure: int) -> str:
        first, second = (fit[measure] for fit in fits)
        return "[0, 1]" if second > first else "[−1, 1]" if first > second else "neither"

    head = ["scaling", "rows", "rate within the paper’s, k = 1", "selected k",
            "distance of errors, points, k = 1", "selected k", "same k",
            "same side of 1"]  # fmt: skip
    return [
        Title("Which scaling of MNIST fits the paper?"),
        Text(
            f"The paper scales to [−1, 1]; its rates for MNIST, {_PAPER_RATES['mnist']}, are high "
            "for that. Of rows finished with both: how many selected rates are among the "
            "paper’s, the mean distance of our test errors from those that it prints, and how many "
            f"rows select its k, or one on the same side of 1. Rates fit {better(0)} better, "
            f"errors {better(1)}, selected k {better(2)}."
        ),
        Table(head, lines),
    ]
