"""The result of a search in a few lines of text."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

from pseudograd.fleet import Outcome
from pseudograd.search import Cell, Comparison, Difference, Result, Run, result
from pseudograd.words import counted as counted  # TODO(merge): the paper's report wants these here
from pseudograd.words import duration as duration
from pseudograd.words import fraction as fraction
from pseudograd.words import listed
from pseudograd.words import p_value as p_value
from pseudograd.words import percent as percent

_CHANCE = 0.05  # the level of the sign test; that of the intervals is 95%


def leaves_out_0(difference: Difference) -> bool:
    """Tell whether an interval leaves out 0; that of a single pair, which is NaN, does not.

    Args:
        difference: With its interval.

    Example:
        >>> leaves_out_0(Difference(-0.3, -0.5, -0.1)), leaves_out_0(Difference(0.1, -0.1, 0.3))
        (True, False)

    """
    return difference.low > 0 or difference.high < 0


def possible(difference: Difference) -> Difference:
    """Cut the interval of a difference of two errors to what such a difference can be, -1 to 1.

    Student's t knows no bounds, and of two or three pairs it may reach far beyond.

    Args:
        difference: With its interval.

    Example:
        >>> possible(Difference(-0.05, -1.38, 1.27))
        Difference(mean=-0.05, low=-1.0, high=1.0)

    """
    low, high = max(difference.low, -1.0), min(difference.high, 1.0)  # NaN stays
    return Difference(difference.mean, low, high)


def evidence(comparison: Comparison) -> str:
    """Weigh a difference in test error: the interval over networks and the test over examples.

    An example that all networks get wrong counts once in the test and several times in the error,
    so the two can point in opposite directions; then the test is no evidence of the difference.

    Args:
        comparison: Of a finished search.

    Returns:
        "proof" if both tell the difference from chance, "hint" if one does, else "noise".

    Example:
        >>> from pseudograd.fleet import Outcome, Trial
        >>> from pseudograd.search import compare
        >>> trial = Trial("mail", (4,), k=1, learning_rate=0.1)
        >>> outcome = Outcome(trial, 0.1, 1, 0.25, 0.3, 1, "limit", (), wrong=(1,))
        >>> evidence(compare([outcome, outcome], [outcome, outcome]))
        'noise'

    """
    by_networks = leaves_out_0(comparison.error)
    same_way = (comparison.better_on - comparison.worse_on) * comparison.error.mean < 0
    by_examples = comparison.sign_p < _CHANCE and same_way
    return ("noise", "hint", "proof")[by_networks + by_examples]


def baseline(comparison: Comparison) -> tuple[str, str]:
    """Say what always giving the commonest label would get, and warn if that is no worse.

    Args:
        comparison: Of a finished search; there is nothing to say where it has no ``by_class``.

    Returns:
        A sentence, and the warning or nothing.

    Example:
        >>> from dataclasses import replace
        >>> from pseudograd.fleet import Outcome, Trial
        >>> from pseudograd.search import compare
        >>> from pseudograd.search.comparison import ByClass
        >>> trial = Trial("mail", (4,), k=1, learning_rate=0.1)
        >>> outcome = Outcome(trial, 0.1, 1, 0.25, 0.3, 1, "limit", (), wrong=(1,))
        >>> classes = (ByClass("ham", 3, 0), ByClass("spam", 1, 1))
        >>> said, warning = baseline(replace(compare([outcome], [outcome]), by_class=classes))
        >>> said
        "always answering 'ham', the commonest label of the test part, would get 25.00% wrong"
        >>> warning.split(". ")[0]
        "the network that is kept is no better than that, and gets only 'ham' right"

    """
    classes = comparison.by_class
    if not classes:
        return "", ""
    commonest = max(classes, key=lambda one: one.count)
    count, kept = sum(one.count for one in classes), sum(one.wrong for one in classes)
    missed = _wrong_by_one_label(comparison)
    said = (
        f"always answering {str(commonest.label)!r}, the commonest label of the test part, would "
        f"get {percent(missed / count)}% wrong"
    )
    if not missed or max(_mean_wrong(comparison.chosen), kept) < missed:
        return said, ""
    problem = "the final networks are on average no better than that"
    if kept >= missed:
        problem = "the network that is kept is no better than that"
    right = [one.label for one in classes if one.wrong < one.count]
    if len(right) == 1:  # so that it cannot be better
        problem += f", and gets only {str(right[0])!r} right"
    return said, (
        f"{problem}. Where a label is rare, give its examples more weight (sample_weight of "
        "TunableMLPClassifier.fit) and judge by another measure than the error; else more data, or "
        "columns that tell more, may help"
    )


def doubts(comparison: Comparison) -> list[str]:
    """Say what the test errors cannot tell, a sentence each; often there is nothing to say.

    They tell little of k where the networks of k = 1, and they alone, are no better than always
    giving the commonest label, and nothing of classes that the test part has no example of.

    Args:
        comparison: Of a finished search, with its ``by_class``.

    Example:
        >>> from dataclasses import replace
        >>> from pseudograd.fleet import Outcome, Trial
        >>> from pseudograd.search import compare
        >>> from pseudograd.search.comparison import ByClass
        >>> trial = Trial("mail", (4,), k=1, learning_rate=0.1)
        >>> plain = Outcome(trial, 0.1, 1, 0.25, 0.3, 1, "limit", (), wrong=(1,))
        >>> better = replace(plain, trial=replace(trial, k=0.5), wrong=())
        >>> classes = (ByClass("ham", 3, 0), ByClass("spam", 1, 0), ByClass("scam", 0, 0))
        >>> for said in doubts(replace(compare([better], [plain]), by_class=classes)):
        ...     print(said.partition(",")[0])
        the networks of k = 1 are on average no better than that
        the test part has no example of 'scam'

    """
    said, missed = [], _wrong_by_one_label(comparison)
    if _mean_wrong(comparison.chosen) < missed <= _mean_wrong(comparison.plain):
        said.append(
            "the networks of k = 1 are on average no better than that, so what is gained over them "
            "may not be due to k: they may need other learning rates (--rates)"
        )
    if missing := [one.label for one in comparison.by_class if not one.count]:
        said.append(
            f"the test part has no example of {listed(missing)}, so the test error does not tell "
            "how these are recognized: add examples, or name a test part that has some (--test)"
        )
    return said


def _wrong_by_one_label(comparison: Comparison) -> int:
    """How many test examples are not of the commonest class."""
    counts = [one.count for one in comparison.by_class]
    return sum(counts) - max(counts, default=0)


def _mean_wrong(outcomes: Iterable[Outcome]) -> float:
    return statistics.fmean(len(outcome.wrong or ()) for outcome in outcomes)


def table_of_k(cells: tuple[Cell, ...], chosen: Cell | None = None) -> str:
    """Give a line for each k: its best rate, its validation error and the standard error of that.

    Args:
        cells: The best of each k.
        chosen: The one to mark.

    Example:
        >>> print(table_of_k((Cell(1.0, 0.2, (0.02, 0.03)), Cell(0.5, 0.1, (0.01, 0.02)))))
             k   best rate   validation error, % (± standard error)
             1         0.2   2.50 ± 0.50
           1/2         0.1   1.50 ± 0.50

    """
    lines = [f"{'k':>6}   {'best rate':>9}   validation error, % (± standard error)"]
    for cell in sorted(cells, key=lambda cell: -cell.k):
        error = f"{percent(cell.error)} ± {percent(cell.standard_error)}"
        mark = "   chosen" if cell == chosen else ""
        lines.append(f"{fraction(cell.k):>6}   {cell.learning_rate:>9.4g}   {error}{mark}")
    return "\n".join(lines)


def still_learning(comparison: Comparison) -> str:
    """Tell which final networks the limit of epochs stopped; nothing if none.

    Args:
        comparison: Of the networks of the chosen k and of k = 1.

    Example:
        >>> from pseudograd.fleet import Outcome, Trial
        >>> from pseudograd.search import compare
        >>> trial = Trial("digits", (4,), k=1, learning_rate=0.1, max_epochs=20)
        >>> outcome = Outcome(trial, 0.1, 1, 0.50, 0.3, 20, "limit", (), wrong=(0, 1))
        >>> still_learning(compare([outcome], [outcome])).partition(" when")[0]
        'the final network was still learning'

    """
    final = {*comparison.chosen, *comparison.plain}
    cut = [outcome for outcome in final if outcome.stopped_by == "limit"]
    if not cut:
        return ""
    some = (
        "the final network" if len(final) == 1 else f"{len(cut)} of the {len(final)} final networks"
    )
    verb, them = ("was", "it") if len(cut) == 1 else ("were", "them")
    return (
        f"{some} {verb} still learning when the limit of "
        f"{counted(cut[0].trial.max_epochs, 'epoch')} stopped {them}; with more epochs the result "
        "may be another"
    )


def summary(found: Result) -> str:
    """Tell the result of a search: the table of k, the choice, and how it compares with k = 1.

    Args:
        found: The result.

    Example:
        >>> from pseudograd.fleet import Outcome, Trial
        >>> from pseudograd.search import compare
        >>> trial = Trial("digits", (4,), k=1, learning_rate=0.1)
        >>> outcome = Outcome(trial, 0.1, 1, 0.50, 0.3, 16, "patience", (), wrong=(0, 1))
        >>> cell, same = Cell(1.0, 0.1, (0.02, 0.04)), compare([outcome], [outcome])
        >>> print(summary(Result((cell,), (cell,), cell, cell, (), (), same)))
             k   best rate   validation error, % (± standard error)
             1         0.1   3.00 ± 1.00   chosen
        chosen: k = 1, learning rate 0.1
        test error 50.00%, cross-entropy 0.300 (1 network)
        k = 1, cross-entropy itself, is the choice: there is nothing to compare it with

    """
    chosen, plain = found.chosen, found.plain
    lines = [table_of_k(found.best_of_each_k, chosen)]
    lines.append(f"chosen: k = {fraction(chosen.k)}, learning rate {chosen.learning_rate:.4g}")
    if found.ties:
        tied = ", ".join(
            f"k = {fraction(cell.k)} at {cell.learning_rate:.4g}" for cell in found.ties[:4]
        )
        tied += f" and {len(found.ties) - 4} more" * (len(found.ties) > 4)
        lines.append(f"as good: {tied}; of equals the k nearest 1 is taken, then the smaller rate")
    if found.open_ks:
        ks = ", ".join(fraction(k) for k in found.open_ks)
        lines.append(f"the best rate of k = {ks} may lie beyond those tried")
    comparison = found.comparison
    networks = len(comparison.chosen)
    error, plain_error = (
        sum(outcome.error for outcome in group) / networks
        for group in (comparison.chosen, comparison.plain)
    )
    value, plain_value = (
        sum(outcome.cross_entropy for outcome in group) / networks
        for group in (comparison.chosen, comparison.plain)
    )
    count = counted(networks, "network")
    said, warning = baseline(comparison)
    last = [said] * bool(said)
    warnings = [warning] * bool(warning) + doubts(comparison)
    last += [f"warning: {problem}" for problem in warnings]
    if limited := still_learning(comparison):
        last.append(f"{limited} (--max-epochs)")
    if chosen == plain:
        lines.append(f"test error {percent(error)}%, cross-entropy {value:.3f} ({count})")
        lines.append(
            "k = 1, cross-entropy itself, is the choice: there is nothing to compare it with"
        )
        return "\n".join(lines + last)
    times = "once" if networks == 1 else f"{networks} times"
    lines += [
        f"test error {percent(error)}%, at k = 1 {percent(plain_error)}% ({count} each): "
        + _interval(possible(comparison.error), 100, "points", evidence(comparison)),
        f"cross-entropy {value:.3f}, at k = 1 {plain_value:.3f}: "
        + _interval(comparison.cross_entropy, 1, "", _alone(comparison.cross_entropy)),
        f"of the predictions that differ, {comparison.only_chosen_right} are right at "
        f"k = {fraction(chosen.k)} alone, {comparison.only_plain_right} at k = 1 alone "
        f"(McNemar's test: p = {comparison.mcnemar_p:.2g}, each example counted {times})",
        f"of the test examples, {comparison.better_on} are right more often at "
        f"k = {fraction(chosen.k)}, {comparison.worse_on} at k = 1 "
        f"(sign test: p = {comparison.sign_p:.2g})",
    ]
    if evidence(comparison) != "proof" or comparison.error.mean > 0:
        lines.append(
            f"the model is the network of k = {fraction(chosen.k)}; "
            "pseudograd predict --k 1 applies the one of k = 1"
        )
    return "\n".join(lines + last)


def table_of_runs(runs: Iterable[Run]) -> str:
    """Give a line for each run: how far it is, and what it found.

    Args:
        runs: The runs.

    Example:
        >>> print(table_of_runs([]))
        started            trials   k     test error, %   at k = 1   folder

    """
    lines = ["started            trials   k     test error, %   at k = 1   folder"]
    for run in runs:
        started = run.sessions[0]["started"][:16].replace("T", " ") if run.sessions else ""
        ledger = run.ledger
        line = f"{started:<16} {len(ledger):>8}   "
        if run.protocol.wanted(ledger):
            line += "unfinished".ljust(35)
        else:
            found = result(run.protocol, ledger)
            errors = [
                sum(outcome.error for outcome in group) / len(group)
                for group in (found.comparison.chosen, found.comparison.plain)
            ]
            line += f"{fraction(found.chosen.k):<5} {percent(errors[0]):>13}   "
            line += f"{percent(errors[1]):>8}   "
        lines.append(line + str(run.folder))
    return "\n".join(lines)


def _alone(difference: Difference) -> str:
    """What the interval says where there is no other test."""
    return "noise" if difference.low <= 0 <= difference.high else "proof"


def _interval(difference: Difference, scale: float, unit: str, weight: str) -> str:
    """A difference, its interval and what it means."""
    mean, low, high = (scale * x for x in (difference.mean, difference.low, difference.high))
    said = f"{mean:+.2f} {unit}".strip()
    verdict = {"proof": "", "hint": ", a hint and no proof", "noise": ", within noise"}[weight]
    if math.isnan(low):
        return said + verdict
    return f"{said} (95% interval {low:+.2f} to {high:+.2f}{verdict})"
