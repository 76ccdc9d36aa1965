"""The page of a search: its statements, its safety, and its rendering in a browser."""

from __future__ import annotations

import base64
import hashlib
import io
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from pseudograd.data import digits
from pseudograd.fleet import Fleet, MLPRecipe, Outcome, Ramp, Trial
from pseudograd.fleet.ramp import level
from pseudograd.report.drawing import image
from pseudograd.report.page import page
from pseudograd.report.quality import assessed
from pseudograd.report.summary import line_of_run, summary
from pseudograd.report.verdict import error_interval, verdict
from pseudograd.search import Cell, Ledger, Protocol, Result, Study, compare, result
from pseudograd.search.assessment import share
from pseudograd.search.comparison import Difference
from pseudograd.search.measures import compare_counts
from pseudograd.words import fraction

if TYPE_CHECKING:
    from selenium.webdriver.chrome.webdriver import WebDriver

HOSTILE = """</script><script>document.title='broken'</script><img src=x onerror="alert(1)">&'"""

DATA: dict[str, Any] = {
    "name": "digits",
    "sha256": "8f90dd4f",
    "train_size": 1437,
    "test_size": 360,
    "features": 64,
    "classes": 10,
    "labels": list(range(10)),
    "pixels": [8, 8],
    "target": "y",
}
ABOUT: dict[str, Any] = {
    "command": "pseudograd tune digits --hidden 8",
    "versions": {"pseudograd": "0.1.0", "python": "3.11.7", "torch": "2.13.0"},
    "commit": None,
    "hardware": "two cores",
    "devices": ["cpu"],
    "started": "2026-01-01T12:00:00+00:00",
    "seconds": 83.2,
    "seed": 0,
    "data": DATA,
}
RECIPE = MLPRecipe("digits", (8,))
TRIAL = Trial(RECIPE, k=1, learning_rate=1)


def examples(k: float = 0.5, row: Mapping[str, str] | None = None) -> dict[str, Any]:
    features, labels = digits().features, digits().labels
    bins = [{"count": 1400, "mass": 0.25}, {"count": 37, "mass": 0.75}]
    hardest = [
        {
            "index": at,
            "label": int(labels[at]),
            "predicted": (int(labels[at]) + at) % 10,
            "lacking": 0.98,
            "lacking_plain": 0.71,
            "pixels": None if row else (features[at].int() * 255 // 16).tolist(),
            "row": row,
            "columns": row and len(row) + 3,
        }
        for at in range(6)
    ]
    networks = {"chosen": {"k": k, "bins": bins}, "plain": {"k": 1.0, "bins": bins[::-1]}}
    return {"networks": networks, "edges": [0, 0.5, 1], "hardest": hardest}


def made_up(
    protocol: Protocol,
    best_k: float = 0.5,
    wrong: Mapping[float | Ramp, list[set[int]]] | None = None,
    stop: int | None = None,
    **change: Any,
) -> dict[Trial, Outcome]:
    """Return outcomes of a search, possibly interrupted, with the given final errors."""
    outcomes: dict[Trial, Outcome] = {}
    while wanted := protocol.wanted(outcomes):
        for trial in wanted:
            if len(outcomes) == stop:
                return outcomes
            distance = abs(math.log2(level(trial.k) / best_k))
            distance += abs(math.log2(trial.learning_rate / 0.1))
            error = 0.02 + 0.01 * distance + 0.001 * trial.split.repetition
            missed = None
            if trial.split.retrain:
                at = trial.split.repetition
                missed = tuple((wrong or {}).get(trial.k, [{1, 2}] * 9)[at])
                error = len(missed) / DATA["test_size"]
            outcome = Outcome(
                trial, error, 2, error, 2 * error, 3, "patience", (0.5, error, 0.6), missed
            )
            outcomes[trial] = replace(outcome, **change)
    return outcomes


def in_a_ledger(outcomes: Mapping[Trial, Outcome], folder: Path) -> Ledger:
    recipes = {trial.recipe for trial in outcomes}
    ledger = Ledger(folder / "ledger", recipes)
    for outcome in outcomes.values():
        ledger.append(outcome)
    return ledger


@dataclass
class Parsed(HTMLParser):
    """A page's visible text, the text of its figures, and all tags."""

    html: str
    text: str = ""
    said: str = ""
    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    raw: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.html)
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.said += f" {dict(attrs).get('aria-label') or ''}"

    def handle_data(self, data: str) -> None:
        if self.cdata_elem in ("script", "style"):
            self.raw[self.cdata_elem] = self.raw.get(self.cdata_elem, "") + data
        else:
            self.text += data


@pytest.fixture(scope="module")
def protocol() -> Protocol:
    """With so few and small steps, k = 2 wins by far on any machine."""
    return Protocol(
        replace(RECIPE, hidden_layer_sizes=(16,), max_epochs=6),
        ks=(1.0, 2.0),
        initial_rate=0.01,
        repetitions=3,
        retrainings=3,
        most_extensions=0,
    )


@pytest.fixture(scope="module")
def ledger(protocol: Protocol, tmp_path_factory: pytest.TempPathFactory) -> Ledger:
    study = Study(tmp_path_factory.mktemp("run"), protocol)
    assert study.run(Fleet(digits()).run)
    return study.ledger


@pytest.fixture(scope="module")
def html(protocol: Protocol, ledger: Ledger) -> str:
    return page(ABOUT, protocol, ledger, examples(2.0))


# --- its statements --------------------------------------------------------------------------


def test_the_answer_is_that_of_the_search(protocol: Protocol, ledger: Ledger, html: str) -> None:
    found = result(protocol, ledger)
    assert found.chosen.k == 2
    parsed = Parsed(html)
    for outcomes in (found.comparison.chosen, found.comparison.plain):
        error = 100 * sum(outcome.error for outcome in outcomes) / len(outcomes)
        assert f"{error:.2f}%" in parsed.text
    said = {attributes.get("data-say") for _, attributes in parsed.tags}
    for cell in found.cells:
        start = f"k = {fraction(cell.k)}, rate {cell.learning_rate:.3g}: {100 * cell.error:.2f}% ("
        assert any(words and words.startswith(start) for words in said)
    assert ABOUT["command"] in parsed.text
    assert DATA["sha256"] in parsed.text
    assert "1 min 23 s" in parsed.text


SOME = set(range(20))


@pytest.mark.parametrize(
    ("chosen", "headline", "advice"),
    [
        ([{0, 1}, {0, 2}, {1}], "k = 1/2 makes fewer errors than k = 1", "Train with k = 1/2."),
        (
            [SOME | {at + 100 for at in range(more)} for more in (19, 20, 21)],
            "k = 1/2 makes more errors than k = 1",
            "Stay with k = 1",
        ),
        # Always better, by one example: too few examples.
        ([SOME - {1}] * 3, "k = 1/2 may make fewer errors than k = 1", "a hint, not proof"),
        # Much better once: too few networks.
        ([SOME, SOME, set()], "k = 1/2 may make fewer errors than k = 1", "contains 0, but"),
        ([SOME - {1}, SOME, SOME | {30}], "but k = 1 does as well", "within noise"),
        ([SOME] * 3, "but k = 1 does as well", "The difference, 0.00 percentage points,"),
    ],
)
def test_words_follow_the_numbers(
    chosen: list[set[int]], headline: str, advice: str, tmp_path: Path
) -> None:
    protocol = Protocol(RECIPE, ks=(1.0, 0.5), initial_rate=0.1, repetitions=2, retrainings=3)
    outcomes = made_up(protocol, wrong={0.5: chosen, 1.0: [SOME] * 3})
    text = Parsed(page(ABOUT, protocol, outcomes, examples())).text
    assert headline in text
    assert advice in text
    # The terminal says the same, and both say how to use the other network.
    printed = summary(result(protocol, in_a_ledger(outcomes, tmp_path)))
    (line,) = [line for line in printed.splitlines() if line.startswith("does k matter? ")]
    assert ("within noise" in line) == ("within noise: " in text)
    assert ("a hint, not proof" in line) == ("a hint, not proof" in text)
    for said in (printed, text):
        assert ("pseudograd predict --k 1" in said) == ("Train with" not in advice)


def test_examples_that_point_the_other_way_are_no_evidence() -> None:
    """Networks make fewer errors, but on different examples: better on 10, worse on 27."""

    def outcomes(mistakes: list[set[int]]) -> list[Outcome]:
        return [
            Outcome(
                Trial(RECIPE, 1, 1), 0.1, 2, len(wrong) / 360, 0.2, 3, "patience", (), tuple(wrong)
            )
            for wrong in mistakes
        ]

    every = outcomes([{*range(10)}] * 3)
    each = outcomes([{*range(start, start + 9)} for start in (10, 20, 30)])
    comparison = compare(each, every)
    assert (comparison.better_on, comparison.worse_on) == (10, 27)
    assert comparison.sign_p < 0.05
    assert comparison.error.high < 0
    for judged in (verdict(comparison), verdict(compare(every, each))):
        assert (judged.kind, judged.opposed) == ("hint", True)
    judged = verdict(compare(outcomes([set()] * 3), every))
    assert (judged.kind, judged.opposed) == ("proof", False)
    assert compare(outcomes([set()] * 3), every).verdict == "better"
    assert compare(every, outcomes([set()] * 3)).verdict == "worse"
    same = compare(every, every)
    assert (same.verdict, verdict(same).kind) == ("same", "same")
    assert math.isnan(same.error.low)  # nothing was measured
    few = compare(outcomes([{*range(12)}, set(), set()]), outcomes([{0}, {0, 1}, {*range(9)}]))
    equal = replace(few, error=Difference(0.0, -1.0, 1.0), sign_p=0.01)
    for one in (equal, replace(equal, better_on=1, worse_on=12)):
        assert verdict(one).kind == "noise"


def test_one_network_of_each_has_no_interval(tmp_path: Path) -> None:
    protocol = Protocol(RECIPE, ks=(1.0, 0.5), initial_rate=0.1, repetitions=1, retrainings=1)
    outcomes = made_up(protocol, wrong={0.5: [set()], 1.0: [SOME]})
    text = Parsed(page(ABOUT, protocol, outcomes, examples())).text
    assert "with one network each, its variance is unknown, and a sign test" in text
    assert "one pair, so no interval" in text
    assert "-5.56 points, a hint, not proof" in summary(
        result(protocol, in_a_ledger(outcomes, tmp_path))
    )
    assert "nan" not in text


def test_k_of_1_is_compared_with_nothing() -> None:
    protocol = Protocol(RECIPE, ks=(1.0, 0.5), initial_rate=0.1, repetitions=2, retrainings=2)
    parsed = Parsed(page(ABOUT, protocol, made_up(protocol, best_k=1.0), examples(1.0)))
    assert "Keep k = 1" in parsed.text
    next_best = "k = 1/2 with 3.05%, a difference of +1.00 (+1.00 to +1.00) percentage points"
    assert f"The runner-up in cross-validation is {next_best}" in parsed.text
    assert "McNemar" not in parsed.text
    assert "Sign test" not in parsed.text
    assert "Mean difference" not in parsed.said


def test_caveats_are_stated(tmp_path: Path) -> None:
    protocol = Protocol(
        RECIPE, ks=(1.0, 0.5), initial_rate=0.8, repetitions=1, retrainings=2, most_extensions=0
    )
    outcomes = made_up(protocol, stopped_by="limit")
    text = Parsed(page(ABOUT, protocol, outcomes, None)).text
    assert "For k = 1 and 1/2 the best rate is the lowest or the highest one tried" in text
    assert "4 of the 4 final networks were still improving" in text
    printed = summary(result(protocol, in_a_ledger(outcomes, tmp_path)))
    assert "\n4 of the 4 final networks were still improving" in printed
    assert "Equally good in cross-validation" not in text
    level = made_up(protocol, error=0.1)
    text = Parsed(page(ABOUT, protocol, level, None)).text
    tied = "k = 1 (rate 0.8), k = 1 (rate 1.6), k = 1/2 (rate 0.4)"
    assert f"Equally good in cross-validation: {tied}" in text


RARE = set(range(18))  # the test examples outside the most frequent class


def assessment_of(found: Result, *classes: tuple[object, int, int]) -> dict[str, Any]:
    """Return an assessment, given each label, its test examples, and how many are wrong.

    The first label is the most common one.
    """
    (common, _, missed), *others = classes
    total, rest = sum(count for _, count, _ in classes), sum(count for _, count, _ in others)
    right = sum(count - wrong for _, count, wrong in others)
    majority = {"name": "majority", "label": common, "trained_on": None}
    majority |= share(rest, total) | {"against": compare_counts(right, missed, total)}
    return {
        **(known := assessed(found.comparison, total)),
        "model": {**known["model"], "balanced_error": 0.5},
        "unequal": True,
        "classes": [label for label, *_ in classes],
        "baselines": [majority],
        "by_class": [{"label": label, **share(wrong, count)} for label, count, wrong in classes],
    }


@pytest.mark.parametrize(
    ("wrong", "kept", "warning"),
    [
        ([RARE] * 3, (0, 18), "The model is no better than that and gets only 'no' right."),
        # The others, and the mean, are better, but the network that is kept counts.
        ([RARE, set(), set()], (0, 18), "The model is no better than that and gets"),
        ([RARE | {99}] * 3, (2, 17), "The model is no better than that. If a label"),
        ([{0}, RARE, RARE | set(range(99))], (0, 1), None),
        ([{0, 50}] * 3, (1, 1), None),
    ],
)
@pytest.mark.parametrize("best_k", [0.5, 1.0])
def test_a_model_no_better_than_one_label_is_no_success(
    wrong: list[set[int]], kept: tuple[int, int], warning: str | None, best_k: float, tmp_path: Path
) -> None:
    protocol = Protocol(RECIPE, ks=(1.0, 0.5), initial_rate=0.1, repetitions=2, retrainings=3)
    outcomes = made_up(protocol, best_k, wrong={best_k: wrong})
    outcomes = {  # the first is kept: its early-stopping error is the lowest
        trial: replace(outcome, stop_error=0.01 * trial.split.repetition)
        for trial, outcome in outcomes.items()
    }
    found = result(protocol, in_a_ledger(outcomes, tmp_path))
    known = assessment_of(found, ("no", 342, kept[0]), ("yes", 18, kept[1]))
    parsed = Parsed(page(ABOUT, protocol, outcomes, examples(best_k), known))
    said = "lways predicting 'no', the most common label, would get 5.00% wrong"
    assert parsed.text.count(f"A{said}.") == 1
    assert ("No better than always predicting one label" in parsed.text) == (warning is not None)
    assert f"no342{kept[0]}" in parsed.text.replace(" ", "")
    opened = next(attributes for tag, attributes in parsed.tags if tag == "details")
    assert ("open" in opened) == (warning is not None)
    printed = summary(found, known)
    assert printed.splitlines().count(f"a{said}") == 1
    assert ("warning: " in printed) == (warning is not None)
    if warning:
        assert warning in parsed.text
        assert warning[1:] in printed
        for advice in ("sample_weight of TunableMLPClassifier", "--metric balanced", "more data"):
            assert advice in parsed.text
            assert advice in printed
    # Without an assessment, they are left out.
    for text in (Parsed(page(ABOUT, protocol, outcomes, examples(best_k))).text, summary(found)):
        assert "lways predicting" not in text
        assert "by class" not in text


def test_the_error_of_the_network_that_is_kept_is_the_headline(tmp_path: Path) -> None:
    """Its early-stopping error is the lowest; the mean over the networks is a footnote."""
    protocol = Protocol(RECIPE, ks=(1.0, 0.5), initial_rate=0.1, repetitions=2, retrainings=3)
    outcomes = made_up(protocol, wrong={0.5: [{0}, set(range(90)), {0, 1}], 1.0: [SOME] * 3})
    outcomes = {
        trial: replace(outcome, stop_error=0.3 if trial.split.repetition != 1 else 0.2)
        for trial, outcome in outcomes.items()
    }
    parsed = Parsed(page(ABOUT, protocol, outcomes, examples()))
    title, heading = re.findall(r"<(?:title|h1)>(.*?)</", parsed.html)
    assert (title, heading) == ("Test error 25.00% · digits", "Test error 25.00%")
    said = "he model gets 90 of 360 test examples wrong: a test error of 25.00% (95% interval 20.81"
    assert f"T{said}" in parsed.text
    footnote = "final networks with the lowest early-stopping error; their mean test error is 8.61%"
    assert footnote in parsed.text
    assert "this model: 25.00% (95% interval 20.81 to 29.72)" in parsed.said
    found = result(protocol, in_a_ledger(outcomes, tmp_path))
    first, *_, last = summary(found, assessed(found.comparison, 360)).splitlines()
    assert first.startswith(f"t{said}")
    assert last.endswith(footnote)
    study = Study(tmp_path / "run", protocol)
    for trial, outcome in outcomes.items():
        study.tell(trial, outcome)
    assert "25.00         5.56" in line_of_run(study)


def test_a_gain_over_networks_that_learned_nothing_is_said_to_be_one(tmp_path: Path) -> None:
    protocol = Protocol(RECIPE, ks=(1.0, 0.5), initial_rate=0.1, repetitions=2, retrainings=3)
    outcomes = made_up(protocol, 0.5, wrong={0.5: [{0}] * 3, 1.0: [RARE] * 3})
    found = result(protocol, in_a_ledger(outcomes, tmp_path))
    known = assessment_of(found, ("no", 342, 0), ("yes", 18, 1))
    said = "he model with k = 1 is no better than always predicting one label, so the gain"
    assert f"warning: t{said}" in summary(found, known)
    assert f"T{said}" in Parsed(page(ABOUT, protocol, outcomes, examples(0.5), known)).text


@pytest.mark.parametrize(
    ("label", "quoted"), [("it's,\nnew", '"it\'s,\\nnew"'), ("it's", '"it\'s"'), (7, "7")]
)
def test_a_label_stays_within_its_line(label: str | int, quoted: str) -> None:
    outcome = Outcome(TRIAL, 0.1, 1, 0.25, 0.3, 1, "limit", (), wrong=(1,))
    cell = Cell(1.0, 0.1, (0.2,))
    found = Result((cell,), (cell,), cell, cell, (), (), compare([outcome], [outcome]))
    printed = summary(found, assessment_of(found, (label, 3, 0), ("other", 1, 1)))
    *_, said, warning = printed.partition("does k matter?")[0].splitlines()
    assert said.startswith(f"always predicting {quoted}, the most common label")
    assert f"and gets only {quoted} right. " in warning


def test_singular_for_a_single_network() -> None:
    recipe = replace(RECIPE, optimizer="adam", momentum=0.9, max_epochs=1)
    protocol = Protocol(recipe, ks=(1.0, 0.5), initial_rate=0.1, repetitions=1, retrainings=1)
    outcomes = made_up(protocol, 1.0, stopped_by="limit", epochs=1, best_epoch=1, curve=(0.5,))
    parsed = Parsed(page(ABOUT, protocol, outcomes, None))
    assert "Test error 0.56%" in parsed.text
    assert (
        "The final network was still improving at the limit of 1 epoch; more epochs" in parsed.text
    )
    assert "1 repetition of each pair of k and rate, 1 final network, " in parsed.text
    assert "k = 1: 1 network, best after" in parsed.said
    assert "mean of" not in parsed.text
    assert "adam, batches" in parsed.text  # Adam has no momentum
    assert "Generated from the run folder alone" in parsed.text
    outcomes = made_up(protocol)
    last = next(trial for trial in outcomes if trial.split.retrain)
    outcomes[last] = replace(outcomes[last], stopped_by="limit")
    text = Parsed(page(ABOUT, protocol, outcomes, None)).text
    assert "Test error 0.56%" in text
    assert "1 of the 2 final networks was still improving" in text
    sgd = Protocol(replace(recipe, optimizer="sgd"), initial_rate=0.1)
    assert "sgd, momentum 0.9, batches" in Parsed(page(ABOUT, sgd, {}, None)).text


def test_an_interval_of_errors_is_within_0_and_1() -> None:
    assert error_interval([0.0, 0.9]) == (0.0, 1.0)
    assert error_interval([0.4, 0.5, 0.6]) == pytest.approx((0.25159, 0.74841), abs=1e-5)


def test_an_interval_of_a_difference_is_within_minus_1_and_1(tmp_path: Path) -> None:
    """Student's t over two pairs that disagree reaches far beyond."""
    protocol = Protocol(RECIPE, ks=(1.0, 0.5), initial_rate=0.1, repetitions=2, retrainings=2)
    many = {*range(100)}
    outcomes = made_up(protocol, wrong={0.5: [set(), many], 1.0: [many, set()]})
    parsed = Parsed(page(ABOUT, protocol, outcomes, examples()))
    assert "95% interval −100.00 to +100.00" in parsed.text
    assert "95% interval −100.00 to +100.00" in parsed.said
    printed = summary(result(protocol, in_a_ledger(outcomes, tmp_path)))
    assert "points (95% interval -100.00 to +100.00), within noise" in printed


@pytest.mark.parametrize(
    ("initial_rate", "stop", "words"),
    [
        (None, 0, "Not finished yet 0 trials are in the ledger, and at least 8 more are needed"),
        (None, 5, "Not finished yet 5 trials are in the ledger, and at least 3 more are needed"),
        (0.1, 0, "0 trials are in the ledger, and at least 12 more are needed before"),
        (0.1, 7, "Not finished yet: k = 1 leads"),
        (0.1, 11, "Not finished yet: k = 1/2 leads"),
        (0.1, 12, "Not finished yet: k = 1/2 is selected"),
        (0.1, 13, "Not finished yet: k = 1/2 is selected"),
        (0.1, 15, "Not finished yet: k = 1/2 is selected"),
    ],
)
def test_an_unfinished_search_says_so(initial_rate: float | None, stop: int, words: str) -> None:
    protocol = Protocol(
        RECIPE, ks=(1.0, 0.5), initial_rate=initial_rate, repetitions=2, retrainings=2
    )
    parsed = Parsed(page(ABOUT, protocol, made_up(protocol, stop=stop), None))
    assert words in parsed.text
    assert "Test error" not in parsed.text
    assert ("Validation error of" in parsed.said) == (stop >= 7)
    assert ("Early-stopping error" in parsed.said) == (stop >= 13)


def test_given_rates_and_a_k_beyond_the_usual() -> None:
    protocol = Protocol(
        RECIPE, ks=(1.0, 10.0), learning_rates=(0.3, 0.1), repetitions=1, retrainings=1
    )
    parsed = Parsed(page(ABOUT, protocol, made_up(protocol, best_k=10.0), examples(10.0)))
    assert "started with the rates 0.1 and 0.3, and continued" in parsed.text
    slider = next(attributes for tag, attributes in parsed.tags if tag == "input")
    assert (slider["min"], slider["max"], slider["value"]) == ("-4", "4", "3.3219")


def test_rows_of_a_table_are_shown_by_their_first_columns() -> None:
    protocol = Protocol(RECIPE, ks=(1.0, 0.5), initial_rate=0.1, repetitions=1, retrainings=1)
    data = {**DATA, "pixels": None, "labels": [f"class {at}" for at in range(10)]}
    row = {f"column {at}": f"value {at}" for at in range(8)}
    about = {**ABOUT, "data": data}
    parsed = Parsed(page(about, protocol, made_up(protocol), examples(row=row)))
    assert "column 7value 7" in parsed.text
    assert "and 3 more columns" in parsed.text
    assert "predicted as class" in parsed.text
    assert "img" not in {tag for tag, _ in parsed.tags}


def test_k_and_its_value_stay_on_one_line() -> None:
    """By no-break spaces, except in the command, which is there to copy."""
    protocol = Protocol(RECIPE, ks=(1.0, 0.5), initial_rate=0.1, repetitions=1, retrainings=1)
    about = {**ABOUT, "command": "pseudograd tune 'k = 1.csv'"}
    html = page(about, protocol, made_up(protocol), None)
    assert "k\xa0=\xa01/2 was selected, but k\xa0=\xa01 does as well</h2>" in html
    assert "<pre>pseudograd tune &#39;k = 1.csv&#39;</pre>" in html


# --- images ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 1), (4, 5, 3), (3, 4, 5), (1, 4, 5)])
def test_images_come_back_as_they_were(shape: tuple[int, ...]) -> None:
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, shape)
    address = image(pixels.ravel().tolist(), shape)
    assert address is not None
    start, _, content = address.partition(",")
    assert start == "data:image/png;base64"
    decoded = np.asarray(Image.open(io.BytesIO(base64.b64decode(content))))
    if len(shape) == 3 and shape[2] == 5:  # channels first
        pixels = np.moveaxis(pixels, 0, -1)
    np.testing.assert_array_equal(decoded.reshape(pixels.shape), pixels)


@pytest.mark.parametrize("shape", [(6,), (2, 3, 4), (2, 2, 2, 3)])
def test_data_that_is_not_an_image_is_not_shown(shape: tuple[int, ...]) -> None:
    assert image([0] * math.prod(shape), shape) is None


# --- safe and complete -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def hostile() -> str:
    """A page in which every user-supplied string is an attempted script injection."""
    protocol = Protocol(RECIPE, ks=(1.0, 0.5), initial_rate=0.1, repetitions=2, retrainings=2)
    data = {**DATA, "labels": [f"{HOSTILE}{at}" for at in range(10)], "pixels": None}
    for name in ("name", "target", "sha256"):
        data[name] = HOSTILE
    about = {**ABOUT, "data": data, "command": HOSTILE, "hardware": HOSTILE, "commit": HOSTILE}
    about |= {"versions": {"pseudograd": HOSTILE, HOSTILE: HOSTILE}, "devices": [HOSTILE]}
    about["started"] = HOSTILE
    outcomes = made_up(protocol)
    known = assessment_of(result(protocol, outcomes), (HOSTILE, 342, 2))
    return page(about, protocol, outcomes, examples(row={HOSTILE: HOSTILE}), known)


def test_texts_of_users_stay_texts(hostile: str) -> None:
    parsed = Parsed(hostile)
    tags = [tag for tag, _ in parsed.tags]
    assert tags.count("script") == tags.count("style") == 1
    assert "img" not in tags
    assert not [name for _, attributes in parsed.tags for name in attributes if name[:2] == "on"]
    # The name in title, heading and facts, ten other facts, of six examples two labels, a column
    # and its entry, and the label of a class in its table; the most frequent label is quoted.
    assert parsed.text.count(HOSTILE) == 3 + 10 + 6 * 4 + 1
    assert parsed.text.count(repr(HOSTILE)) == 1


def test_the_page_loads_no_external_resources(html: str) -> None:
    parsed = Parsed(html)
    to_the_paper = '<a href="https://arxiv.org/abs/1611.07743">'
    assert html.count(to_the_paper) == 1
    loaded = html.replace(to_the_paper, "")
    assert not re.search(r"(http|https|ws|wss|ftp):|@import|url\((?!#)", loaded)
    assert "link" not in {tag for tag, _ in parsed.tags}
    sources = [attributes["src"] for _, attributes in parsed.tags if "src" in attributes]
    assert len(sources) == 6
    assert all(str(source).startswith("data:image/png;base64,") for source in sources)
    policy = next(a["content"] for tag, a in parsed.tags if tag == "meta" and "http-equiv" in a)
    assert policy is not None
    assert policy.startswith("default-src 'none'; img-src data:; ")
    for name in ("style", "script"):
        digest = hashlib.sha256(parsed.raw[name].encode()).digest()
        assert f"{name}-src 'sha256-{base64.b64encode(digest).decode()}'" in policy


# --- in a browser ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebDriver]:
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("chromium and chromedriver are not installed (Debian: chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    profile = tmp_path_factory.mktemp("profile")
    for flag in (
        "headless", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "no-first-run",
        "disable-background-networking", "disable-component-update", "disable-sync",
        "hide-scrollbars", f"user-data-dir={profile}",
    ):  # fmt: skip
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    exceptions = pytest.importorskip("selenium.common.exceptions")
    try:
        started = webdriver.Chrome(options, webdriver.ChromeService(driver))
    except exceptions.WebDriverException as problem:
        pytest.skip(f"chromium cannot be started here: {problem}")
    with started:
        yield started


def open_page(
    browser: WebDriver, path: Path, html: str, width: int = 1200, scheme: str = "light"
) -> None:
    path.write_text(html, encoding="utf-8")
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600},
    )
    browser.get(path.as_uri())


def test_a_browser_draws_all_figures(browser: WebDriver, html: str, tmp_path: Path) -> None:
    open_page(browser, tmp_path / "report.html", html)
    drawn = browser.execute_script(
        "return [...document.querySelectorAll('.figure svg')].map(figure => {"
        "  const inside = figure.getBBox(), box = figure.getBoundingClientRect();"
        "  const marks = figure.querySelectorAll('path, rect, circle').length;"
        "  return [inside.width, inside.height, box.width, box.height, marks]; })"
    )
    assert len(drawn) == 7
    for *sizes, marks in drawn:
        assert min(sizes) > 60
        assert marks > 3
    shown = "return [...document.images].map(image => image.complete && image.naturalWidth)"
    assert browser.execute_script(shown) == [8] * 6
    loaded = "return performance.getEntriesByType('resource').map(entry => entry.name.slice(0, 5))"
    assert set(browser.execute_script(loaded)) <= {"data:"}
    assert browser.get_log("browser") == []
    kept = Path(os.environ.get("PSEUDOGRAD_SCREENSHOT", tmp_path / "report.png"))
    shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})
    kept.write_bytes(base64.b64decode(shot["data"]))
    assert kept.read_bytes()[:4] == b"\x89PNG"


def test_the_slider_moves_the_curve_and_the_sentence(
    browser: WebDriver, html: str, tmp_path: Path
) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    open_page(browser, tmp_path / "report.html", html)
    slider, curve, sentence = (browser.find_element(By.ID, name) for name in ("k", "curve", "pull"))
    seen = {}
    for key in (Keys.HOME, Keys.END, Keys.ARROW_LEFT):
        slider.send_keys(key)
        dots = browser.find_elements(By.CSS_SELECTOR, "[data-bias]")
        seen[key] = curve.get_attribute("d"), dots[1].get_attribute("cy"), sentence.text
        k = 2 ** float(str(slider.get_attribute("value")))
        assert float(str(dots[1].get_attribute("cy"))) == pytest.approx(0.9**k, abs=1e-4)
        middle = re.search(r"L0\.06250 (\S+)L", str(curve.get_attribute("d")))  # step 40 of 80
        assert middle
        assert float(middle[1]) == pytest.approx(0.0625**k, abs=1e-5)
    assert len(set(seen.values())) == 3
    assert "At k = 1/16 an" in seen[Keys.HOME][2].replace("\xa0", " ")
    assert "pulls 1.15 times as hard" in seen[Keys.HOME][2]
    assert "At k = 4 an" in seen[Keys.END][2].replace("\xa0", " ")
    assert "pulls 6,561 times as hard" in seen[Keys.END][2]
    assert slider.get_attribute("aria-valuetext") == "k = 3.91"
    beside = browser.find_elements(By.CSS_SELECTOR, "[data-beside-1]")
    assert [place.is_displayed() for place in beside] == [True, True]
    browser.execute_script(
        "arguments[0].value = 0; arguments[0].dispatchEvent(new Event('input'))", slider
    )
    assert not any(place.is_displayed() for place in beside)  # k = 1 is not compared with itself
    assert browser.get_log("browser") == []


def test_tooltips(browser: WebDriver, html: str, tmp_path: Path) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    open_page(browser, tmp_path / "report.html", html)
    mark = browser.find_element(By.CSS_SELECTOR, ".cards .mark.plain .dot")
    tip = browser.find_element(By.ID, "tip")
    assert not tip.is_displayed()
    ActionChains(browser).scroll_to_element(mark).move_to_element(mark).perform()
    WebDriverWait(browser, 30).until(lambda _: tip.is_displayed())
    assert tip.text.startswith("k = 1, rate ")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_has_nothing_to_scroll_sideways(
    browser: WebDriver, html: str, hostile: str, scheme: str, tmp_path: Path
) -> None:
    ks = tuple(2.0 ** (power / 2) for power in range(-8, 5))
    protocol = Protocol(RECIPE, ks=ks, initial_rate=0.003, repetitions=1, retrainings=1)
    crowded = page(ABOUT, protocol, made_up(protocol), None)
    for content in (html, hostile, crowded):
        open_page(browser, tmp_path / "report.html", content, 390, scheme)
        assert browser.execute_script("return document.documentElement.scrollWidth") == 390


def test_dark_and_light_follow_the_reader(browser: WebDriver, html: str, tmp_path: Path) -> None:
    def lightness(scheme: str) -> tuple[int, ...]:
        open_page(browser, tmp_path / "report.html", html, scheme=scheme)
        colours = "return ['backgroundColor', 'color'].map(c => getComputedStyle(document.body)[c])"
        return tuple(
            sum(map(int, re.findall(r"\d+", colour)[:3]))
            for colour in browser.execute_script(colours)
        )

    (page_by_day, ink_by_day), (page_by_night, ink_by_night) = map(lightness, ("light", "dark"))
    assert page_by_day > 600 > 150 > page_by_night
    assert ink_by_day < 150 < 600 < ink_by_night


def test_paper_is_white_whatever_the_screen_is(
    browser: WebDriver, html: str, tmp_path: Path
) -> None:
    open_page(browser, tmp_path / "report.html", html, scheme="dark")
    dark = {"name": "prefers-color-scheme", "value": "dark"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": [dark]})
    colours = "return ['backgroundColor', 'color'].map(c => getComputedStyle(document.body)[c])"
    page, ink = (
        sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in browser.execute_script(colours)
    )
    assert page == 3 * 255
    assert ink < 150
    slider = "return getComputedStyle(document.querySelector('input')).display"
    assert browser.execute_script(slider) == "none"
    printed = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", {})["data"])
    assert printed.startswith(b"%PDF")
    assert 1 <= len(re.findall(rb"/Type\s*/Page\b", printed)) <= 8
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_texts_of_users_do_nothing_in_a_browser(
    browser: WebDriver, hostile: str, tmp_path: Path
) -> None:
    open_page(browser, tmp_path / "report.html", hostile)
    assert browser.title.endswith(HOSTILE)
    assert browser.get_log("browser") == []
