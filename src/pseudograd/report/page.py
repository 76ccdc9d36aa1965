"""The page of a search: one file that needs no network, made from what its run folder holds."""

from __future__ import annotations

import base64
import hashlib
import math
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from pseudograd.fleet import Outcome, Trial
from pseudograd.report import figures
from pseudograd.report.figures import interval
from pseudograd.report.summary import (
    baseline,
    doubts,
    evidence,
    leaves_out_0,
    possible,
    still_learning,
)
from pseudograd.reproduce.findings import side
from pseudograd.reproduce.rows import rows
from pseudograd.search import Cell, Comparison, Protocol, compare, paired_difference
from pseudograd.search.comparison import ByClass
from pseudograd.words import counted, duration, fraction, p_value, percent, signed

# How often each k was selected, by the number of hidden layers: all rows of the paper's Tables 1, 3
# and 4 and of the two tables of its supplement.
PAPER = {
    depth: dict(sorted(Counter(r.selected_k for r in rows() if r.hidden_layers == depth).items()))
    for depth in (1, 3, 5)
}

_SOURCE = "Keren, Sabato and Schuller, Tables 1, 3 and 4 and supplement"

Outcomes = Mapping[Trial, Outcome]


def page(
    about: Mapping[str, Any],
    protocol: Protocol,
    ledger: Outcomes,
    examples: Mapping[str, Any] | None,
) -> str:
    """Give the page of a search as HTML; of an unfinished one, what is known so far.

    Args:
        about: How the search was run: command, versions, commit, hardware, devices, started,
            seconds, seed, and data (name, sha256, train_size, test_size, features, classes, labels,
            pixels, target).
        protocol: What was searched, and how.
        ledger: The outcomes so far.
        examples: Which training examples pull hardest (networks, edges, hardest), by the retrained
            networks, and test errors by_class of the one that is kept, if they are known; None if
            the search is not finished.

    Example:
        >>> data = {"name": "digits", "sha256": "0f", "train_size": 1437, "test_size": 360,
        ...         "features": 64, "classes": 10, "labels": list(range(10)), "pixels": [8, 8],
        ...         "target": "y"}
        >>> about = {"command": "pseudograd tune digits", "versions": {"pseudograd": "0.1.0"},
        ...          "commit": None, "hardware": "2 cores", "devices": ["cpu"], "seed": 0,
        ...          "started": "2026-01-01T12:00:00+00:00", "seconds": 0.0, "data": data}
        >>> html = page(about, Protocol(Trial("digits", (400,), k=1, learning_rate=1)), {}, None)
        >>> "Not finished" in html
        True

    """
    _check(about)
    found = _Findings(protocol, ledger, examples)
    k = found.chosen.k if found.chosen else 1.0
    headline, lead = _headline(found, about)
    if found.warning:
        headline = "No better than always giving one label"
    return render(
        "page.html",
        "page.js",
        title=f"{headline} · {about['data']['name']}",
        version=about["versions"]["pseudograd"],
        command=escape(about["command"]),
        over=f"{about['data']['name']} · {_network(protocol.trial)}",
        headline=headline,
        warning=_sentences(found.baseline, found.warning) if found.warning else None,
        lead=lead,
        k=fraction(k),
        kinds=_kinds(found),
        slider=_slider(k),
        ratio=_times(9 ** min(k, 300)),
        easy=_times(0.1 ** (k - 1)),
        hard=_times(0.9 ** (k - 1)),
        pull_curve=figures.pull_curve(k),
        rerun_text=(
            "A search that was stopped goes on where its ledger ends. Folds, weights and orders "
            "follow from the seed, so the same versions find the same, up to rounding."
        ),
        facts=_facts(about, protocol, ledger),
        **_answer(found),
        **_search(found),
        **_curves(found),
        **_driving(about, examples),
    )


def render(template: str, script: str | None = None, **values: object) -> str:
    """Fill a template of this package, which gets the page's style and needs no network.

    Args:
        template: The name of its file; it is given ``policy``, ``style`` and ``script``.
        script: The name of its script's file, if it has one.
        values: What else it is given, escaped unless it is Markup.

    Example:
        >>> render("results.html", title="1 < 2", lead="", parts=[])[:15]
        '<!doctype html>'

    """
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_unbroken,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style, code = _read("page.css"), _read(script) if script else ""
    # This style and this script may be used, and nothing else, nor anything from elsewhere.
    policy = f"default-src 'none'; img-src data:; style-src {_hash(style)}; "
    if script:
        policy += f"script-src {_hash(code)}; "
    return environment.from_string(_read(template)).render(
        policy=policy + "base-uri 'none'; form-action 'none'",
        style=Markup(style),
        script=Markup(code),
        **values,
    )


class _Findings:
    """What a ledger holds for a protocol, finished or not."""

    def __init__(
        self, protocol: Protocol, ledger: Outcomes, examples: Mapping[str, Any] | None
    ) -> None:
        self.protocol, self.ledger = protocol, ledger
        self.wanted = protocol.wanted(ledger)
        self.cells = protocol.cells(ledger)
        self.best = protocol.best_of_each_k(ledger)
        self.chosen: Cell | None = None
        self.plain: Cell | None = None
        if any(cell.k == 1 for cell in self.cells):
            self.chosen, self.plain = protocol.chosen(ledger)
        self.selected = not self.wanted or self.wanted[0].split.retrain
        self.comparison: Comparison | None = None
        self.baseline = self.warning = ""
        if not self.wanted:
            known = (examples or {}).get("by_class", ())
            comparison = compare(self.retrained(self.chosen), self.retrained(self.plain))
            self.comparison = replace(
                comparison,
                error=possible(comparison.error),
                by_class=tuple(ByClass(**one) for one in known),
            )
            self.baseline, self.warning = baseline(self.comparison)

    def retrained(self, cell: Cell | None) -> list[Outcome]:
        """The final networks of a pair, those that there are."""
        if cell is None or not self.selected:
            return []
        trials = self.protocol.retrainings_of(cell.k, cell.learning_rate)
        return [self.ledger[trial] for trial in trials if trial in self.ledger]


# --- the answer ------------------------------------------------------------------------------


def _headline(found: _Findings, about: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The answer in a line, and in a paragraph or two."""
    chosen, plain, comparison = found.chosen, found.plain, found.comparison
    done = f"{len(found.ledger):,} trials are in the ledger, and {len(found.wanted):,} or more"
    if chosen is None or plain is None:
        return "Not finished yet", [f"{done} are needed before there is anything to compare."]
    k = fraction(chosen.k)
    selected = (
        f"Cross-validation selected k = {k} at a learning rate of {chosen.learning_rate:.3g}, with "
        f"a validation error of {percent(chosen.error)}%"
    )
    if comparison is None:
        if found.selected:
            text = f"{selected}. {done} are needed to compare it with k = 1 on the test set."
            return f"Not finished yet: k = {k} is selected", [text]
        text = (
            f"{done} are needed. So far k = {k} has the lowest validation error, "
            f"{percent(chosen.error)}% at a learning rate of {chosen.learning_rate:.3g}."
        )
        return f"Not finished yet: k = {k} leads", [text]
    count = len(comparison.chosen)
    networks = f"{_networks(count)} get{'s' * (count == 1)}"
    of_test = f"of the {about['data']['test_size']:,} test examples wrong"
    error = _mean(comparison.chosen, "error")
    if chosen.k == 1:
        text = (
            f"{selected}, the lowest of all that were tried: plain cross-entropy is the choice for "
            f"this network and these data. Retrained, {networks} {error}% {of_test}."
        )
        return "Keep k = 1", [text]
    text = (
        f"{selected}. Retrained, {networks} {error}% {of_test}; with k = 1 (rate "
        f"{plain.learning_rate:.3g}) it is {_mean(comparison.plain, 'error')}%."
    )
    headline, verdict = _verdict(k, comparison)
    return headline, [text, verdict]


def _verdict(k: str, comparison: Comparison) -> tuple[str, str]:
    """What the test set says: the interval over networks and the test over examples together."""
    difference, p = comparison.error, comparison.sign_p
    pairs = len(comparison.chosen)
    mean = f"{signed(100 * difference.mean)} percentage points"
    reach = f"{signed(100 * difference.low)} to {signed(100 * difference.high)}"
    weight = evidence(comparison)
    fewer = difference.mean < 0
    if pairs == 1:
        networks = "there is one network of each, so its spread is not known"
    elif leaves_out_0(difference):
        networks = f"its 95% interval over the {pairs} pairs of networks, {reach}, leaves out 0"
    else:
        networks = f"its 95% interval over the {pairs} pairs of networks, {reach}, contains 0"
    example_test = f"a sign test over the test examples gives {p_value(p)}"
    other = (
        f"The run's model is a network of k = {k}; pseudograd predict --k 1 applies the best one "
        "of k = 1 instead."
    )
    if weight == "proof":
        headline = f"k = {k} makes {'fewer' if fewer else 'more'} errors than k = 1"
        advice = (
            f"Train with k = {k}."
            if fewer
            else f"Stay with k = 1: what looked best in cross-validation did not hold. {other}"
        )
        return headline, f"The difference is {mean}: {networks}, and {example_test}. {advice}"
    if weight == "hint":
        headline = f"k = {k} may make {'fewer' if fewer else 'more'} errors than k = 1"
        joined = f"{networks}, {'but' if pairs > 1 else 'and'} {example_test}"
        return headline, (
            f"The difference is {mean}, which is a hint and no proof: {joined}. More networks "
            f"(retrainings) or more test examples would tell. {other}"
        )
    return f"k = {k} was selected, but k = 1 does as well", (
        f"The difference, {mean}, is within noise: {networks}, and {example_test}. On this "
        f"evidence either will do, and k = 1 is the simpler one. {other}"
    )


def _answer(found: _Findings) -> dict[str, Any]:
    """The card below the headline."""
    comparison, chosen, plain = found.comparison, found.chosen, found.plain
    if comparison is None or chosen is None or plain is None:
        return {"tiles": [], "differences": None, "by_class": []}
    k, pairs = fraction(chosen.k), len(comparison.chosen)
    words = {
        "notes": _notes(found, comparison, chosen),
        "by_class": [
            (str(one.label), f"{one.count:,}", f"{one.wrong:,}", _share(one.wrong, one.count))
            for one in comparison.by_class
        ],
    }

    def tile(name: str, value: str, fine: str, kind: str | None = None) -> dict[str, str | None]:
        return {"name": name, "value": value, "fine": fine, "kind": kind}

    def tested(cell: Cell, outcomes: Sequence[Outcome], kind: str) -> dict[str, str | None]:
        errors = [outcome.error for outcome in outcomes]
        fine = f"rate {cell.learning_rate:.3g}, "
        if pairs == 1:
            fine += "one network"
        else:
            fine += f"mean of {pairs} networks, {percent(min(errors))} to {percent(max(errors))}"
        value = f"{_mean(outcomes, 'error')}%"
        return tile(f"Test error with k = {fraction(cell.k)}", value, fine, kind)

    tiles = [tested(chosen, comparison.chosen, "chosen")]
    if chosen.k == 1:
        entropy = _mean(comparison.chosen, "cross_entropy")
        same = "mean of the same networks" if pairs > 1 else "of the same network"
        tiles.append(tile("Test cross-entropy", entropy, same))
        return {"tiles": tiles, "differences": None, **words}
    difference = comparison.error
    low, high = signed(100 * difference.low), signed(100 * difference.high)
    tiles += [
        tested(plain, comparison.plain, "plain"),
        tile(
            "Difference, percentage points",
            signed(100 * difference.mean),
            f"95% interval {low} to {high}" if pairs > 1 else "one pair, so no interval",
        ),
        tile(
            "Sign test",
            p_value(comparison.sign_p),
            f"{comparison.better_on} test examples right more often with k = {k}, "
            f"{comparison.worse_on} with k = 1",
        ),
    ]
    return {
        "tiles": tiles,
        "differences": figures.differences(comparison),
        "differences_text": (
            "Rings are pairs of networks with the same seed and folds; the dot is their mean"
            + (", the bar its 95% interval." if pairs > 1 else ".")
        ),
        **words,
    }


def _notes(found: _Findings, comparison: Comparison, chosen: Cell) -> list[str]:
    """What else a careful reader should know."""
    protocol, notes = found.protocol, []
    k, pairs = fraction(chosen.k), len(comparison.chosen)
    if found.baseline and not found.warning:
        notes.append(_sentences(found.baseline))
    notes += [_sentences(said) for said in doubts(comparison)]
    if chosen.k != 1:
        one, other = (
            _mean(group, "cross_entropy") for group in (comparison.chosen, comparison.plain)
        )
        difference = comparison.cross_entropy
        if difference.low > 0:
            meaning = (
                f": the probabilities of k = {k} are the worse ones, so calibrate them before you "
                "use them"
            )
        elif difference.high < 0:
            meaning = f": the probabilities of k = {k} are the better ones, too"
        elif difference.low <= 0 <= difference.high:
            meaning = ", a difference within noise"
        else:
            meaning = ""  # a single pair
        notes.append(f"Test cross-entropy is {one} with k = {k} and {other} with k = 1{meaning}.")
        mcnemar = (
            f"McNemar's test on the predictions ({comparison.only_chosen_right} right with k = {k} "
            f"alone, {comparison.only_plain_right} with k = 1 alone) gives "
            f"{p_value(comparison.mcnemar_p)}"
        )
        if pairs > 1:
            notes.append(
                "The interval tells how much the training of networks varies, the sign test how "
                f"much test examples do. {mcnemar}; it counts every test example {pairs} times, "
                "once for each pair, so its p is too small."
            )
        else:
            notes.append(f"{mcnemar}.")
    others = [cell for cell in found.best if cell.k != 1]
    if chosen.k == 1 and others:
        second = protocol.best(others)
        notes.append(
            f"Next in cross-validation is k = {fraction(second.k)} with {percent(second.error)}%, "
            f"on the same folds {_against(second, chosen)} percentage points."
        )
    tied = protocol.ties(found.ledger)
    ties = [f"k = {fraction(c.k)} (rate {c.learning_rate:.3g})" for c in tied[:4]]
    if ties:
        more = f" and {len(tied) - 4} more" * (len(tied) > 4)
        notes.append(
            f"As good in cross-validation, to the last error: {', '.join(ties)}{more}. Ties go to "
            "the k nearest 1, then to the smaller rate."
        )
    open_ks = [fraction(open_k) for open_k in protocol.open_ks(found.ledger)]
    if open_ks:
        notes.append(
            f"For k = {', '.join(open_ks)} the best rate is the last that was tried, and a better "
            "one may lie beyond: the limit of extensions was reached."
        )
    if limited := still_learning(comparison):
        notes.append(f"{limited[0].upper()}{limited[1:]}.")
    notes.append(
        "The test set was not looked at before k and the learning rate were selected, and was not "
        "used to stop the training."
    )
    return notes


# --- the search ------------------------------------------------------------------------------


def _search(found: _Findings) -> dict[str, Any]:
    """The error against k, and the heat map."""
    if not found.cells:
        return {"error_by_k": None}
    protocol, cells, best = found.protocol, found.cells, found.best
    errors = [cell.error for cell in cells]
    paper = PAPER.get(len(protocol.trial.hidden_layer_sizes), {})
    given = protocol.learning_rates or protocol.initial_rate
    origin = "as given" if given else "around the best of a short sweep at k = 1"
    first = protocol.first_rates(found.ledger)
    rates = ", ".join(f"{rate:.3g}" for rate in first)
    return {
        "error_by_k": figures.error_by_k(best, found.chosen, paper),
        "error_text": (
            "Lower is better. Each point is the best learning rate of that k"
            + (
                f"; bars are 95% intervals of the mean over {protocol.repetitions} repetitions. "
                "All k share the folds: the numbers below compare them pair by pair."
                if protocol.repetitions > 1
                else ", trained once."
            )
        ),
        "expected": bool(paper),
        "expectation": _expectation(len(protocol.trial.hidden_layer_sizes), found),
        "k_rows": [
            (*_row(cell), _against(cell, found.plain))
            for cell in sorted(best, key=lambda cell: cell.k)
        ],
        "heat_map": figures.heat_map(cells, best, found.chosen, first[len(first) // 2]),
        "heat_text": (
            f"Validation error in percent. Every k began with the rates {rates}, {origin}, and "
            "went on while its best was the last one tried. Frames are the best rate of each k."
        ),
        "heat_range": (
            f"{percent(min(errors))}% (strong) to {percent(figures.palest(cells))}%"
            + (" or more" if max(errors) > figures.palest(cells) else "")
        ),
        "cell_rows": [_row(cell) for cell in sorted(cells, key=lambda c: (c.k, c.learning_rate))],
    }


def _expectation(depth: int, found: _Findings) -> str:
    """What the paper found for this depth, and whether we did."""
    if depth not in PAPER:
        near = [d for d in PAPER if d < depth][-1:] + [d for d in PAPER if d > depth][:1]
        return (
            f"The paper has no network with {_layers(depth)}. "
            + " ".join(f"{_sides(other)}." for other in near)
            + f" ({_SOURCE}.)"
        )
    counts = PAPER[depth]
    text = f"{_sides(depth)} ({_SOURCE})."
    if found.selected and found.chosen:
        usual = max((-1, 0, 1), key=lambda wanted: _on(wanted, counts))
        agrees = usual == side(found.chosen.k)
        relation = "in line with that" if agrees else "against that tendency"
        text += f" Here k = {fraction(found.chosen.k)} was selected, {relation}."
    return text


def _on(wanted: int, counts: Mapping[float, int]) -> int:
    return sum(count for k, count in counts.items() if side(k) == wanted)


def _sides(depth: int) -> str:
    counts = PAPER[depth]
    below, one, above = (_on(wanted, counts) or "none" for wanted in (-1, 0, 1))
    return (
        f"In the paper’s {sum(counts.values())} experiments with {_layers(depth)} a k below 1 was "
        f"selected in {below}, k = 1 in {one} and a k above 1 in {above}"
    )


def _row(cell: Cell) -> tuple[str, ...]:
    reach = interval(cell.errors)
    spread = f"{percent(reach[0])} to {percent(reach[1])}" if reach else "–"
    return fraction(cell.k), f"{cell.learning_rate:.3g}", percent(cell.error), spread


def _against(cell: Cell, plain: Cell | None) -> str:
    if plain is None or cell == plain:
        return "–"
    difference = possible(paired_difference(list(cell.errors), list(plain.errors)))
    if math.isnan(difference.low):
        return signed(100 * difference.mean)
    low, high = signed(100 * difference.low), signed(100 * difference.high)
    return f"{signed(100 * difference.mean)} ({low} to {high})"


# --- the networks ----------------------------------------------------------------------------


def _curves(found: _Findings) -> dict[str, Any]:
    """The learning curves of the final networks."""
    groups = {"chosen": found.retrained(found.chosen)}
    if found.plain != found.chosen:
        groups["plain"] = found.retrained(found.plain)
    groups = {kind: outcomes for kind, outcomes in groups.items() if outcomes}
    if not groups:
        return {"curves": None}
    means = [
        f"{statistics.fmean(outcome.best_epoch for outcome in outcomes):.0f} with k = "
        + fraction(outcomes[0].trial.k)
        for outcomes in groups.values()
    ]
    return {
        "curves": figures.learning_curves(groups),
        "curves_text": (
            "The final networks, each a thin line, and their mean for as long as all of them run. "
            f"Marks are the epochs that were kept, on average {' and '.join(means)}."
        ),
    }


def _driving(about: Mapping[str, Any], examples: Mapping[str, Any] | None) -> dict[str, Any]:
    """Which examples drive the training, and the hardest of them."""
    if examples is None:
        return {"shares": None, "hardest": []}
    networks = dict(examples["networks"])
    if networks["chosen"]["k"] == networks["plain"]["k"]:
        del networks["plain"]
    edge = examples["edges"][-2]
    told = []
    for network in networks.values():
        last = network["bins"][-1]
        count = sum(found["count"] for found in network["bins"])
        told.append(
            f"with k = {fraction(network['k'])} they are {last['count']:,} of {count:,} and do "
            f"{100 * last['mass']:.0f}% of the pulling"
        )
    hardest = [_example(example, about["data"], networks) for example in examples["hardest"]]
    return {
        "shares": figures.pull_shares(examples["edges"], networks),
        "shares_text": (
            "From easy examples to hard ones, by what the probability p of the right class lacks; "
            f"each pulls with (1 − p) to the power of k. The hardest lack more than {edge:g}: "
            f"{'; '.join(told)}."
            + " Each k is shown on the network that it trained, so they differ by what is left to "
            "learn, too; on one and the same network the smaller k gives the hardest less."
            * (len(networks) > 1)
        ),
        "hardest": hardest,
        "hardest_text": (
            f"The {len(hardest)} whose label gets the least probability p with the chosen k. "
            "Wrong labels gather here, so look at them: a k below 1 makes them count for less, a k "
            "above 1 for more."
            + " Rows are those of the file; the first row of data is row 1."
            * any(example.get("row_number") for example in examples["hardest"])
        ),
    }


def _example(
    example: Mapping[str, Any], data: Mapping[str, Any], networks: Mapping[str, Any]
) -> dict[str, Any]:
    number = example.get("row_number")  # runs of earlier versions have none
    given = [f"row {number}"] if number else []
    given.append(f"p = {_probability(1 - example['lacking'])}")
    if "plain" in networks:
        given.append(f"k = 1: p = {_probability(1 - example['lacking_plain'])}")
    row = [(str(name), str(value)) for name, value in (example["row"] or {}).items()]
    more = (example["columns"] or 0) - len(row)
    return {
        "index": example["index"],
        "label": str(data["labels"][example["label"]]),
        "seen": str(data["labels"][example["predicted"]]),
        "given": given,
        "image": figures.image(example["pixels"], data["pixels"]) if example["pixels"] else None,
        "row": row,
        "more": f"and {more} more column{'s' * (more > 1)}" if more > 0 else None,
    }


# --- how it was run --------------------------------------------------------------------------


def _facts(about: Mapping[str, Any], protocol: Protocol, ledger: Outcomes) -> list[tuple[str, str]]:
    data, trial = about["data"], protocol.trial
    training = [
        trial.optimizer,
        # Of the others it is no part.
        *([f"momentum {trial.momentum:g}"] if trial.momentum and trial.optimizer == "sgd" else []),
        f"batches of {trial.batch_size}",
        f"features in [{trial.feature_range[0]:g}, {trial.feature_range[1]:g}]",
        f"patience {trial.patience}",
        f"at most {counted(trial.max_epochs, 'epoch')}",
        *([f"gradients clipped at {trial.clip:g}"] if trial.clip else []),
    ]
    stratified = ", folds with equal shares of classes" if trial.split.stratified else ""
    return [
        ("Data", f"{data['name']}, target {data['target']}: {data['train_size']:,} examples to "
                 f"train on, {data['test_size']:,} to test on, {data['features']:,} features, "
                 f"{data['classes']:,} classes"),
        ("SHA-256 of the data", data["sha256"]),
        ("Network", _network(trial)),
        ("Training", ", ".join(training)),
        ("Search", f"k in {', '.join(map(fraction, protocol.ks))}; "
                   f"{counted(protocol.repetitions, 'repetition')} of each pair of k and rate, "
                   f"{counted(protocol.retrainings, 'final network')}, {len(ledger):,} trials"
                   f"{stratified}"),
        ("Seed", str(about["seed"])),
        ("Versions", ", ".join(f"{name} {of}" for name, of in about["versions"].items())),
        ("Commit", about["commit"] or "not known"),
        ("Hardware", f"{about['hardware']} ({', '.join(about['devices'])})"),
        ("Started", about["started"]),
        ("Computing time", duration(about["seconds"])),
    ]  # fmt: skip


def _check(about: Mapping[str, Any]) -> None:
    needed = ("command", "versions", "commit", "hardware", "devices", "started", "seconds", "seed")
    of_data = ("name", "sha256", "train_size", "test_size", "features", "classes", "labels",
               "pixels", "target")  # fmt: skip
    missing = [name for name in (*needed, "data") if name not in about]
    missing += [f"data[{name!r}]" for name in of_data if name not in about.get("data", of_data)]
    if missing:
        raise ValueError(f"about must have {', '.join(missing)}")


# --- small words -----------------------------------------------------------------------------


def _kinds(found: _Findings) -> dict[str, str]:
    kinds = {}
    if found.chosen:
        word = "selected" if found.selected else "best so far"
        kinds["chosen"] = f"k = {fraction(found.chosen.k)}, {word}"
    if not found.chosen or found.chosen.k != 1:
        kinds["plain"] = "k = 1, cross-entropy"
    return kinds


def _network(trial: Trial) -> str:
    sizes = trial.hidden_layer_sizes
    if not sizes:
        return "no hidden layer"
    units = f"{sizes[0]:,}" if len(set(sizes)) == 1 else ", ".join(f"{size:,}" for size in sizes)
    return f"{_layers(len(sizes))} of {units} units ({trial.activation})"


def _layers(depth: int) -> str:
    return "one hidden layer" if depth == 1 else f"{depth or 'no'} hidden layers"


def _networks(count: int) -> str:
    return "one network" if count == 1 else f"{count} networks"


def _mean(outcomes: Sequence[Outcome], name: str) -> str:
    mean = statistics.fmean(getattr(outcome, name) for outcome in outcomes)
    if name == "error":
        return f"{100 * mean:.2f}"
    return f"{mean:.3f}" if math.isfinite(mean) else "infinite"


def _share(part: int, whole: int) -> str:
    return percent(part / whole) if whole else "–"


def _probability(p: float) -> str:
    return f"{p:.2f}" if p >= 0.005 else "under 0.01"


def _times(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.3g}"


def _slider(k: float) -> dict[str, Any]:
    """From 1/16 to 4, or further if k lies beyond; in powers of 2."""
    low, high = min(-4, math.floor(math.log2(k))), max(2, math.ceil(math.log2(k)))
    ends = {"least": fraction(2.0**low), "most": fraction(2.0**high)}
    return {"low": low, "high": high, "at": f"{math.log2(k):.4f}", **ends}


def _sentences(*texts: str) -> str:
    return " ".join(f"{text[0].upper()}{text[1:]}." for text in texts)


def _unbroken(value: object) -> object:
    """Keep "k = 1" on one line; the value is a text unless it is HTML already."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return re.sub(r"\b([kp]) ([=<]) (?=\d)", "\\1\N{NO-BREAK SPACE}\\2\N{NO-BREAK SPACE}", value)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _read(name: str) -> str:
    return resources.files("pseudograd.report").joinpath(name).read_text(encoding="utf-8")
