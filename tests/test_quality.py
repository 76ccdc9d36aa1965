"""The page and the summary of an assessed model: its quality, and whether k matters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pseudograd.report import charts
from pseudograd.report.page import page
from pseudograd.report.quality import standing
from pseudograd.report.summary import ensemble_summary
from pseudograd.search import Bagging
from pseudograd.search.assessment import share
from pseudograd.search.measures import compare_counts
from test_page import ABOUT, DATA, HOSTILE, RECIPE, Parsed, browser, made_up, open_page

if TYPE_CHECKING:
    from selenium.webdriver.chrome.webdriver import WebDriver

__all__ = ["browser"]

PROTOCOL = Bagging(RECIPE, ks=(1.0, 0.5), learning_rates=(0.05, 0.1, 0.2))
OUTCOMES = made_up(PROTOCOL)
PIXELS = [0, 255] * 32


def measured(wrong: int, count: int = 360, **more: float) -> dict[str, Any]:
    known = {"balanced_error": 0.05, "log_loss": 0.1, "ece": 0.02}
    return share(wrong, count) | known | more


def baseline(name: str, wrong: int, only_model: int, only_it: int, **more: Any) -> dict[str, Any]:
    against = compare_counts(only_model, only_it, 360)
    return {"name": name, "trained_on": 1437, **measured(wrong), "against": against, **more}


def suspect(at: int, **more: Any) -> dict[str, Any]:
    known: dict[str, Any] = {
        "index": at,
        "row_number": None,
        "label": at % 10,
        "predicted": (at + 1) % 10,
    }
    known |= {"pixels": PIXELS, "row": None, "columns": None}
    return known | {"self_confidence": 0.01 * at, "agreement": 0.9} | more


def assessment(**change: Any) -> dict[str, Any]:
    """Return a model that gets 9 of 360 digits wrong, chosen across k, with a test's changes."""
    matrix = [[35 if at == to else int(to == at + 1) for to in range(10)] for at in range(10)]
    bins = [{"confidence": 0.6, "accuracy": 0.5, "count": 20}]
    bins += [{"confidence": 0.98, "accuracy": 0.99, "count": 340}]
    comparison = compare_counts(5, 2, 360)
    found = {
        "classes": list(range(10)),
        "model": measured(9, log_loss=0.1, ece=0.02),
        "uncalibrated": measured(9, log_loss=0.2, ece=0.06),
        "plain": measured(12, log_loss=0.15),
        "baselines": [
            baseline("majority", 320, 311, 0, label=3),
            baseline("logistic regression", 30, 25, 4),
            baseline("gradient boosting", 12, 7, 4),
        ],
        "unequal": False,
        "by_class": [share(int(at < 9), 36) | {"label": at} for at in range(10)],
        "confusion": matrix,
        "confused": [{"label": 0, "predicted": 1, "count": 1}],
        "reliability": {"model": bins, "uncalibrated": bins},
        "comparison": comparison
        | {"kind": "noise", "log_loss": {"mean": -0.05, "low": -0.1, "high": 0.0}},
        "importance": None,
        "suspects": {"count": 60, "of": 1437, "first": [suspect(at) for at in range(50)]},
        "members": {"networks": 12, "ks": [[0.5, 7], [1.0, 5]], "temperature": 1.25},
    }
    return found | change


BETTER = compare_counts(30, 2, 360) | {
    "kind": "proof",
    "log_loss": {"mean": -0.1, "low": -0.2, "high": -0.05},
}


def drawn(about: Mapping[str, Any] = ABOUT, **change: Any) -> Parsed:
    return Parsed(page(about, PROTOCOL, OUTCOMES, None, assessment(**change)))


def printed(**change: Any) -> str:
    cells = tuple(PROTOCOL.best_of_each_k(OUTCOMES))
    return ensemble_summary(cells, PROTOCOL.best(cells), assessment(**change))


# --- its quality -----------------------------------------------------------------------------


def test_the_models_own_error_comes_first() -> None:
    said = "he model gets 9 of 360 test examples wrong: a test error of 2.50% (95% interval 1.32"
    parsed = drawn()
    assert "<h1>Test error 2.50%, level with gradient boosting</h1>" in parsed.html
    assert f"T{said}" in parsed.text
    assert printed().startswith(f"t{said}")


def test_intervals_by_group_say_so() -> None:
    assert "to 13.98, by 12 groups)" in printed(groups=12, model=measured(2, high=0.1398))
    assert "sign test by group" in printed(groups=12)
    parsed = drawn(groups=12)
    assert "intervals and tests are computed over the 12 groups of the test set" in parsed.text
    assert "McNemar" not in parsed.text


def test_the_verdict_against_each_baseline() -> None:
    said = "is better than logistic regression (8.33%) and level with gradient boosting (3.33%)"
    text = drawn().text
    assert f"It {said}." in text
    assert "Always predicting 3, the most common label, would get 88.89% wrong." in text
    assert "Logistic regression gets 25 test examples wrong that the model gets right" in text
    assert f"it {said}" in printed().splitlines()[1]


@pytest.mark.parametrize(
    ("counts", "words"), [((20, 4), "better than"), ((5, 4), "level with"), ((4, 20), "worse than")]
)
def test_the_headline_names_the_best_rival(counts: tuple[int, int], words: str) -> None:
    far, near = baseline("logistic regression", 99, 90, 0), baseline("boosting", 10, *counts)
    html = drawn(baselines=[far, near]).html
    assert f"<h1>Test error 2.50%, {words} boosting</h1>" in html


def test_a_gain_over_one_label_may_be_noise() -> None:
    change: dict[str, Any] = {"baselines": [baseline("majority", 11, 6, 4, label="no")]}
    said = "he model makes fewer errors than that, but the difference is within noise"
    assert f"T{said}" in drawn(**change).text
    assert f"warning: t{said}" in printed(**change)
    assert said not in printed()


def test_a_model_that_is_no_better_than_one_label() -> None:
    change: dict[str, Any] = {"baselines": [baseline("majority", 9, 4, 4, label="no")]}
    assert "<h1>No better than always predicting one label</h1>" in drawn(**change).html
    warning = "warning: the model is no better than that"
    assert f"{warning}. More data or more informative columns may help" in printed(**change)
    assert f"{warning}. If a label is rare, try --metric" in printed(unequal=True, **change)


def test_a_test_set_with_one_label_proves_nothing() -> None:
    """Always predicting that label is always right, so no model can be better."""
    found = standing(
        assessment(model=measured(0), baselines=[baseline("majority", 0, 0, 0, label="no")])
    )
    assert not found.no_better
    assert not found.unclear


def test_a_column_that_may_give_the_label_away() -> None:
    def told(*increases: float, wrong: int = 1, majority: int = 90) -> bool:
        columns = [
            {"column": name, "increase": more, "spread": 0.0, "log_loss_increase": more}
            for name, more in zip(("ended", "plan", "fee"), increases, strict=False)
        ]
        change: dict[str, Any] = {
            "model": measured(wrong),
            "baselines": [baseline("majority", majority, majority, 0, label="no")],
            "importance": {"columns": columns, "repeats": 5, "rows": 360},
        }
        said = "early all of this accuracy comes from column 'ended': if it is known only after"
        found = f"warning: n{said}" in printed(**change)
        assert (f"N{said}" in drawn(**change).text) == found
        return found

    assert told(0.36, 0.001, 0)
    assert not told(0.36, 0.05, 0)  # other columns matter, too
    assert not told(0.36, 0.001, 0, wrong=10)  # the model is far from perfect
    assert not told(0.1, 0, 0)  # other columns replace it
    assert not told(0.36)  # there is no other column
    assert not told(0.0, 0.0, wrong=0, majority=0)


def test_a_baseline_trained_on_fewer_rows_says_so() -> None:
    thinned = [baseline("gradient boosting", 12, 7, 4, trained_on=1000)]
    said = "gradient boosting was trained on 1,000 of the 1,437 training rows"
    assert said in drawn(baselines=thinned).text
    assert "To save time" not in drawn().text


def test_a_baseline_that_was_left_out_is_named() -> None:
    left_out = "Gradient boosting is left out"
    assert left_out in drawn(baselines=[baseline("logistic regression", 12, 7, 4)]).text
    assert left_out not in drawn().text


def test_balanced_error_is_shown_where_classes_are_unequal() -> None:
    assert "Balanced error" not in drawn().text
    assert "Balanced error 5.00%" in drawn(unequal=True).text.replace("error5", "error 5")
    assert "balanced error, the mean over the classes: 5.00% (" in printed(unequal=True)


def test_the_balanced_error_stands_beside_those_of_the_others() -> None:
    perfect = baseline("gradient boosting", 0, 0, 9, balanced_error=0.0)
    plain = measured(12, balanced_error=0.07)
    change: dict[str, Any] = {"unequal": True, "baselines": [perfect], "plain": plain}
    others = "gradient boosting 0.00%, k = 1 alone 7.00%"
    assert f"classes: 5.00% ({others})" in printed(**change)
    assert f"as common ones; {others}" in drawn(**change).text


def test_singular_for_a_single_example() -> None:
    one = compare_counts(1, 2, 360)
    kind = {"kind": "noise", "log_loss": {"mean": -0.05, "low": -0.1, "high": 0.0}}
    text = drawn(comparison=one | kind, baselines=[baseline("logistic regression", 9, 1, 1)]).text
    assert "1 test example right only with the model" in text
    assert "gets 1 test example wrong that the model gets right" in text
    assert "1 test examples" not in text


def test_the_selection_criterion_is_stated() -> None:
    rule = "the validation error plus a quarter of the cross-entropy"
    assert rule in printed()
    assert f"Frames mark the best rate of each k: {rule}" in drawn().text


# --- the figures -----------------------------------------------------------------------------


def test_errors_are_drawn_beside_those_of_the_baselines() -> None:
    said = drawn().said
    order = ["this model: 2.50%", "the same with k = 1: 3.33%", "gradient boosting: 3.33%"]
    order += ["logistic regression: 8.33%", "always the most common label: 88.89%"]
    places = [said.index(words) for words in order]
    assert places == sorted(places)


@pytest.mark.parametrize(("classes", "wide"), [(2, False), (10, False), (20, True)])
def test_a_confusion_matrix_is_drawn_for_up_to_20_classes(classes: int, wide: bool) -> None:
    labels = [f"class {at}" if wide else at for at in range(classes)]
    matrix = [[1234 if at == to else at for to in range(classes)] for at in range(classes)]
    by_class = [share(0, 9) | {"label": label} for label in labels]
    parsed = drawn(confusion=matrix, classes=labels, by_class=by_class, suspects=None)
    last = classes - 1
    most = f"Most frequent mistakes: {labels[last]} predicted as {labels[0]} {last} times"
    assert most in parsed.said
    assert parsed.text.count("1234") == classes
    assert (' wide"><h2>Confusion matrix' in parsed.html) == wide


def test_of_more_classes_the_most_frequent_mistakes_are_listed() -> None:
    parsed = drawn(confusion=None)
    assert "<h2>The most frequent mistakes</h2>" in parsed.html
    assert "Confusion matrix" not in parsed.text
    assert ("details", {"open": None}) in parsed.tags


def test_errors_by_class_show_the_worst_of_many() -> None:
    by_class = [share(at % 25, 30) | {"label": f"<{at}>"} for at in range(25)]
    parsed = drawn(by_class=by_class)
    assert "The 20 classes with the highest error." in parsed.text
    assert "<24>: 24 of 30; <23>: 23 of 30" in parsed.said
    assert "<4>: 4 of 30" not in parsed.said


def test_a_class_without_test_examples_has_no_error() -> None:
    by_class = [share(1, 36) | {"label": "here"}, share(0, 0) | {"label": "nowhere"}]
    parsed = drawn(by_class=by_class, suspects=None)
    assert "nowhere" not in parsed.said
    assert "nowhere00–" in parsed.text.replace(" ", "")
    said = "test set has no examples of 'nowhere'"
    assert said in parsed.text
    assert said in printed(by_class=by_class)


def test_calibration_before_and_after() -> None:
    change = "from 0.200 to 0.100 and the expected calibration error from 6.0% to 2.0%"
    text = drawn().text
    assert (
        f"(temperature 1.25), fitted on out-of-fold predictions, changes the log loss {change}"
        in text
    )
    assert "before temperature scaling" in text
    assert change in printed()
    plain = drawn(uncalibrated=None, reliability={"model": assessment()["reliability"]["model"]})
    assert "temperature" not in plain.text
    assert "60% sure, 50% of 20 examples right" in plain.said


def test_columns_that_matter() -> None:
    columns = [
        {"column": f"x{at}", "increase": 0.2 / (at + 1), "spread": 0.01, "log_loss_increase": 0.5}
        for at in range(20)
    ]
    parsed = drawn(importance={"columns": columns, "rows": 300, "repeats": 5})
    assert "5 shuffles of 300 test rows" in parsed.text
    assert "x0: +20.00; x1: +10.00" in parsed.said
    assert "x15:" not in parsed.said  # the table below lists all columns
    assert "x1910.00" not in parsed.text
    assert "Which columns matter" not in drawn().text


def test_a_column_that_does_not_matter_has_no_bar() -> None:
    """Its error may even fall by chance, by less than its spread over shuffles."""
    columns = [("a", 0.69, 0.01), ("b", -0.012, 0.004)]
    names = ("column", "increase", "spread")
    drawing = charts.importance([dict(zip(names, one, strict=True)) for one in columns])
    widths = re.findall(r'class="bar" [^>]*width="([\d.]+)"', drawing)
    assert [float(width) > 1 for width in widths] == [True, False]
    assert "-" not in "".join(re.findall(r'class="middle small">([^<]*)<', drawing))


def test_column_usage_is_reported() -> None:
    columns = [
        {"name": "id", "used_as": "left out", "why": "all entries differ"},
        {"name": "size", "used_as": "numbers", "why": "", "features": 2},
    ]
    notes = {"columns": columns, "rows": {"read": 1797, "without label": 2}}
    text = drawn({**ABOUT, "data": {**DATA, "notes": notes}}).text
    assert "id: left out, all entries differ Rows: 1,797 read, 2 without label" in text
    assert "size numbers 2" in re.sub("(?<=size)|(?<=numbers)", " ", text)
    assert "size:" not in text
    plain = {"columns": columns[1:], "rows": {}}
    assert "All columns are used" in drawn({**ABOUT, "data": {**DATA, "notes": plain}}).text
    pixels = {**ABOUT, "data": {**DATA, "notes": {}}}
    assert "How the columns were used" not in drawn(pixels).text


def test_axes_that_are_logarithmic_say_so() -> None:
    html = drawn().html
    assert "k, sensitivity to large errors (log scale)</text>" in html
    assert "held-out error, % (log scale)</text>" in html


def test_the_networks_of_the_best_pair_have_learning_curves() -> None:
    parsed = drawn()
    assert "Held-out error by epoch. k = 1/2: 5 networks" in parsed.said
    assert "each on the fold held out from it" in parsed.text
    assert "final networks" not in parsed.text


# --- labels worth a second look --------------------------------------------------------------


def test_suspects_are_shown_with_their_images() -> None:
    parsed = drawn()
    assert "Which labels look wrong? For 60 of 1,437 training rows, networks" in parsed.text
    assert "suspects.csv lists all." in parsed.text
    assert len([tag for tag, _ in parsed.tags if tag == "img"]) == 50
    assert "38 more" in parsed.text
    assert "p < 0.01, 90% of networks agree" in parsed.text.replace("\xa0", " ")
    assert "labels worth a second look: for 60 of 1,437" in printed()


def test_suspects_of_a_weak_model_come_with_a_caution() -> None:
    assert "xpect few wrong labels" not in drawn().text + printed()
    said = "xpect few wrong labels among them: the model is wrong about 30% of all test examples"
    assert drawn(model=measured(108)).text.count(said) == 2  # at the top and beside the rows
    assert said in printed(model=measured(108))
    by_class = [share(18, 36) | {"label": at} for at in range(10)]
    first = [suspect(at, label=3) for at in range(4)]
    weak = drawn(by_class=by_class, suspects={"count": 4, "of": 1437, "first": first}).text
    assert "wrong about 50% of the test examples of 3, the label of most of these rows." in weak


def test_no_suspects() -> None:
    none = {"count": 0, "of": 1437, "first": []}
    assert "Which labels look wrong? None." in drawn(suspects=none).text
    assert "second look" not in printed(suspects=none)
    assert "second look" not in drawn(suspects=None).text


# --- does k matter ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "counts", "headline", "said"),
    [
        ("noise", (5, 2), "k makes no difference beyond noise", "not beyond noise"),
        ("hint", (9, 2), "Mixing k may make fewer errors than k = 1", "perhaps"),
        ("proof", (30, 2), "Mixing k makes fewer errors than k = 1", "yes: "),
        ("proof", (2, 30), "Mixing k makes more errors than k = 1", "yes, k = 1 is better"),
        ("same", (0, 0), "Keep k = 1", "all networks of the ensemble have k = 1"),
    ],
)
def test_two_ensembles_tell_whether_k_matters(
    kind: str, counts: tuple[int, int], headline: str, said: str
) -> None:
    log_loss = {"mean": 0.0, "low": -0.1, "high": 0.1}
    comparison = compare_counts(*counts, 360) | {"kind": kind, "log_loss": log_loss}
    parsed, lines = drawn(comparison=comparison), printed(comparison=comparison)
    assert re.search(f"<h2>{headline}</h2>", parsed.html.replace("\xa0", " "))
    assert f"Does k matter? {headline}" in parsed.text.replace("\xa0", " ")
    assert f"does k matter? {said}" in lines
    instead = kind != "same" and counts != (30, 2)
    assert ("predict --k 1" in parsed.text) == ("predict --k 1" in lines) == instead
    assert "McNemar" in parsed.text


def test_the_note_on_a_useless_k_1_needs_a_gain() -> None:
    majority = baseline("majority", 40, 35, 4, label="no")
    change: dict[str, Any] = {"plain": measured(40), "baselines": [majority]}
    said = "k = 1 is no better than always predicting one label"
    assert said not in drawn(**change).text.replace("\xa0", " ") + printed(**change)
    assert said in drawn(**change, comparison=BETTER).text.replace("\xa0", " ")
    assert f"warning: the model with {said}" in printed(**change, comparison=BETTER)


def test_what_the_ensemble_is_made_of() -> None:
    said = "he model averages 12 networks: 7 with k = 1/2 and 5 with k = 1, chosen by the error on "
    said += "out-of-fold predictions"
    assert f"T{said}." in drawn().text.replace("\xa0", " ")
    assert f"t{said}" in printed()
    assert "averages" not in drawn(members=None).text
    assert "Mixing" in drawn(members=None, comparison=BETTER).text
    single = drawn(members={"networks": 5, "ks": [[2.0, 5]]}, comparison=BETTER)
    assert "k = 2 makes fewer errors than k = 1" in single.text.replace("\xa0", " ")
    assert "The model averages 5 networks with k = 2, chosen" in single.text.replace("\xa0", " ")


def test_an_unfinished_search_has_no_assessment_yet() -> None:
    """An assessment from an earlier search in the folder would be out of date."""
    half = dict(list(OUTCOMES.items())[:20])
    text = Parsed(page(ABOUT, PROTOCOL, half, None, assessment())).text
    assert "Not finished yet" in text
    assert "Is this classifier any good?" not in text


# --- safe and without overlaps ---------------------------------------------------------------


@pytest.fixture(scope="module")
def crowded() -> str:
    """Twenty long labels and columns, all of them attempted script injections."""
    labels = [f"{at} {HOSTILE}" for at in range(20)]
    columns = [
        {"column": label, "increase": 0.1, "spread": 0.2, "log_loss_increase": 0.5}
        for label in labels
    ]
    found = assessment(
        classes=labels,
        confusion=[[98765 if at == to else to for to in range(20)] for at in range(20)],
        by_class=[share(at, 12345) | {"label": label} for at, label in enumerate(labels)],
        baselines=[baseline("majority", 300, 300, 0, label=HOSTILE)],
        importance={"columns": columns, "rows": 300, "repeats": 5},
        suspects={
            "count": 1,
            "of": 2,
            "first": [suspect(1, pixels=None, row={HOSTILE: HOSTILE}, columns=9)],
        },
    )
    notes = {"columns": [{"name": HOSTILE, "used_as": HOSTILE, "why": HOSTILE}]}
    data = {**DATA, "labels": labels, "notes": notes}
    return page({**ABOUT, "data": data}, PROTOCOL, OUTCOMES, None, found)


def test_labels_and_columns_stay_texts(crowded: str) -> None:
    tags = [tag for tag, _ in Parsed(crowded).tags]
    assert tags.count("script") == 1
    assert "img" not in tags


OVERLAPS = """
const found = [];
for (const figure of document.querySelectorAll('.figure svg')) {
  const frame = figure.getBoundingClientRect();
  const texts = [...figure.querySelectorAll('text')].map(
    text => [text.textContent, text.getBoundingClientRect()]);
  texts.forEach(([words, box], at) => {
    if (box.left < frame.left - 3 || box.right > frame.right + 3) found.push(words + ' leaves');
    for (const [others, other] of texts.slice(at + 1)) {
      const width = Math.min(box.right, other.right) - Math.max(box.left, other.left);
      const height = Math.min(box.bottom, other.bottom) - Math.max(box.top, other.top);
      if (width > 1 && height > 3) found.push(words + ' / ' + others);
    }
  });
}
return found"""


@pytest.mark.parametrize(("largest", "fits"), [(999, True), (1000, False)])
def test_ten_classes_with_names_fit_a_phone(largest: int, fits: bool) -> None:
    matrix = [[largest if at == to else 9 for to in range(10)] for at in range(10)]
    drawn = charts.confusion_map(matrix, ["twelve chars"] * 10)
    assert ('viewBox="0 0 440 ' in drawn) == fits == ('class="broad"' not in drawn)


@pytest.mark.parametrize("width", [360, 1200])
def test_no_words_overlap(browser: WebDriver, crowded: str, width: int, tmp_path: Path) -> None:
    for html in (drawn().html, crowded):
        open_page(browser, tmp_path / "report.html", html, width)
        assert browser.execute_script("return document.documentElement.scrollWidth") == width
        assert browser.execute_script(OVERLAPS) == []
