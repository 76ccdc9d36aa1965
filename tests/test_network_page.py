"""The page and the summary of a study of any network, from a real study of a small one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from pseudograd import study as studies
from pseudograd.cli import main
from pseudograd.fleet import Outcome, Ramp
from pseudograd.fleet.recipe import ModuleRecipe
from pseudograd.report.combined import combined
from pseudograd.report.page import page
from pseudograd.report.summary import line_of_run, summary
from pseudograd.search import Study, read_assessment, result
from pseudograd.search.assessment import share
from pseudograd.search.measures import compare_counts, wilson
from pseudograd.search.networks import write_found
from pseudograd.search.protocol import NetworkProtocol
from pseudograd.words import percent
from run_folders import cut
from test_page import ABOUT, HOSTILE, Parsed, browser, made_up, open_page
from test_quality import OVERLAPS

if TYPE_CHECKING:
    from selenium.webdriver.chrome.webdriver import WebDriver

__all__ = ["browser"]

DRAWN = torch.Generator().manual_seed(0)
X = torch.randn(300, 2, 2, 2, generator=DRAWN)
Y = (X[:, 0, 0, 0] * X[:, 1, 0, 0] > 0).long() + (X[:, 0, 1, 0] > 1)
NAMES = ["low", "middle", "high"]
RAMP = Ramp(0.5, 2.0)


class Small(nn.Sequential):
    """63 parameters."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3))


def flipped(inputs: torch.Tensor) -> torch.Tensor:
    return inputs.flip(3)


def made(folder: Path | None, **settings: Any) -> studies.Study:
    settings = {
        "k": (0.5, 1, "0.5→2"),
        "learning_rates": (0.01, 0.03, 0.1),
        "epochs": 4,
        "batch_size": 20,
        "validation": 0.25,
        "retrainings": 3,
        "name": "corners",
        "classes": NAMES,
        "augment": flipped,
        "clip": 5.0,
        "label_smoothing": 0.05,
        "class_weights": (1, 1, 2),
        "weight_decay": 0.01,
        **settings,
    }
    return studies.Study(Small, (X[:200], Y[:200]), (X[200:], Y[200:]), folder=folder, **settings)


def run(study: studies.Study, **how: Any) -> bool:
    return study.run(device="cpu", slots=1, progress=False, command="train.py", **how)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> studies.Study:
    study = made(tmp_path_factory.mktemp("runs") / "corners")
    assert run(study)
    return study


@pytest.fixture
def folder(finished: studies.Study) -> Iterator[Path]:
    """Return the folder of the finished study, and restore it after the test."""
    assert finished.folder is not None
    path = finished.folder / "assessment.json"
    whole = path.read_bytes()
    yield finished.folder
    path.write_bytes(whole)


def read(path: Path) -> Parsed:
    return Parsed(path.read_text(encoding="utf-8"))


# --- its statements --------------------------------------------------------------------------


def test_the_page_says_what_was_found(finished: studies.Study) -> None:
    parsed = read(finished.report())
    found = finished.assessment
    model = found["model"]
    title, heading = re.findall(r"<(?:title|h1)>(.*?)</", parsed.html)
    if model["error"] < found["baselines"][0]["error"]:
        assert heading.startswith(f"Test error {percent(model['error'])}%")
        assert title == f"{heading} · corners"
    wrong = (
        f"{model['wrong']} of 100 test examples wrong: a test error of {percent(model['error'])}%"
    )
    assert f"The model gets {wrong} (95% interval" in parsed.text
    assert f"would get {percent(found['baselines'][0]['error'])}% wrong" in parsed.text
    for outcomes in (finished.comparison.chosen, finished.comparison.plain):
        mean = sum(outcome.error for outcome in outcomes) / len(outcomes)
        assert f"{percent(mean)}%" in parsed.text
    for said in ("Confusion matrix of 3 classes", "Reliability", "Validation error by epoch."):
        assert said in parsed.said
    assert "Validation error of the best rate of each k" in parsed.said
    assert "k = 1/2→2" in parsed.said
    assert "Ramps, whose k changes during training" in parsed.text
    assert "What k does" in parsed.text
    assert "The test set was used neither" in parsed.text


def test_the_facts_are_those_of_the_training(finished: studies.Study) -> None:
    text = read(finished.report()).text
    for fact in (
        "corners · Small, 63 parameters",
        "200 training examples, 100 test examples, inputs of 2 × 2 × 2 numbers, 3 classes",
        "AdamW(weight_decay=0.01), 4 epochs, batches of 20, cosine schedule, gradients clipped at "
        "5, augmented by flipped, float32, label smoothing 0.05, class weights 1, 1, 2",
        "25% of the training examples, held out; the last epoch is kept",
        "k in 1/2, 1, 1/2→2; 1 repetition of each pair of k and rate, 3 final networks",
        "train.py",
        "A stopped search resumes from its ledger when the same command or study is run again.",
        "The model is the first of 3 final networks",
    ):
        assert fact in text
    for absent in ("target", "feature", "column", "examples.json", "still improving"):
        assert absent not in text
    assert "ross-validation" not in text
    assert "hardest training examples" not in text
    assert "drive the training" not in text


def test_ensembles_are_reported_with_their_numbers(finished: studies.Study) -> None:
    parsed = read(finished.report())
    start, end = (parsed.text.index(words) for words in ("Combined predictions", "Error against k"))
    text = parsed.text[start:end]
    ensembles = finished.assessment["combined"]
    assert {one["name"] for one in ensembles} >= {"mixed", "plain"}
    for one in ensembles:
        interval = f"{percent(one['low'])} to {percent(one['high'])}"
        assert f"{percent(one['error'])}{interval}{one['log_loss']:.3f}" in text
        assert f"{one['against_one']['verdict']} (p" in text
    told = combined(finished.assessment)
    assert told
    assert f"An ensemble of three networks of {told.of} is " in text
    assert f"({percent(told.told['error'])}% against {percent(told.one)}%)" in text
    assert "five" not in text
    printed = finished.summary()
    assert ("an ensemble of three networks" in printed) == told.better
    assert f"{percent(finished.assessment['model']['error'])}%" in printed.splitlines()[0]
    assert "±" not in printed  # each pair was trained once


def shares(chosen: int, mixed: int, plain: int, one: int = 60, size: int = 5) -> dict[str, Any]:
    """Return an assessment that compares ensembles and one network on 1,000 examples."""

    def against(wrong: int, other: int) -> dict[str, Any]:
        return compare_counts(max(0, other - wrong), max(0, wrong - other), 1000)

    turns: list[float | str] = [0.5, 1.0, "0.5→2"]
    ks: dict[str, list[float | str]] = {
        "chosen": [0.5] * size,
        "mixed": (turns * size)[:size],
        "plain": [1.0] * size,
    }
    wrongs = {"chosen": chosen, "mixed": mixed, "plain": plain}
    own = {**share(one, 1000), "balanced_error": 0.06, "log_loss": 0.2, "ece": 0.01}
    return {
        **dict.fromkeys(("uncalibrated", "plain", "confusion", "comparison")),
        **dict.fromkeys(("importance", "suspects", "members")),
        "classes": NAMES,
        "unit": "example",
        "model": own,
        "baselines": [],
        "unequal": False,
        "by_class": [],
        "confused": [],
        "reliability": {"model": []},
        "combined": [
            {
                **share(wrong, 1000),
                "name": name,
                "ks": ks[name],
                "log_loss": 0.19,
                "against_one": against(wrong, one),
                "against_plain": against(wrong, plain),
            }
            for name, wrong in wrongs.items()
        ],
    }


RECIPE = ModuleRecipe(
    "Net, 12,345 parameters, 0a1b2c3d", "corners", optimizer="SGD()", epochs=3, batch_size=32
)
PROTOCOL = NetworkProtocol(
    RECIPE, ks=(1.0, 0.5, RAMP), learning_rates=(0.05, 0.1, 0.2), repetitions=2, retrainings=5
)
SHAPES = {"shapes": [[3, 8, 8], []]}
TOLD = {
    **ABOUT,
    "command": "train.py",
    "data": {**ABOUT["data"], **SHAPES, "pixels": None},
}


def told(assessment: Any, protocol: NetworkProtocol = PROTOCOL, **how: Any) -> tuple[str, str]:
    """Return the text of the page and the summary, for made-up outcomes."""
    outcomes = made_up(protocol, **how)
    printed = summary(result(protocol, outcomes), assessment or None)
    return Parsed(page(TOLD, protocol, outcomes, None, assessment)).text, printed


@pytest.mark.parametrize(
    ("wrongs", "words", "call"),
    [
        (
            (45, 44, 50),
            "n ensemble of five networks of k = 1/2 is better than one network beyond noise (4.50% "
            "against 6.00%); against five of k = 1 (5.00%) it is level",
            "study.ensemble() or pseudograd predict --ensemble",
        ),
        (
            (45, 44, 58),
            "networks of k = 1/2 is better than one network beyond noise (4.50% against 6.00%); "
            "against five of k = 1 (5.80%) it is better",
            "study.ensemble() or pseudograd predict --ensemble",
        ),
        (
            (57, 50, 45),
            "networks of k = 1 is better than one network beyond noise (4.50% against 6.00%)",
            'study.ensemble("plain") or pseudograd predict --ensemble --k 1',
        ),
        (
            (57, 44, 57),
            "networks of mixed k (1/2, 1 and 1/2→2) is better than one network beyond noise (4.40% "
            "against 6.00%); against five of k = 1 (5.70%) it is better",
            'study.ensemble("mixed") or pseudograd predict --ensemble --k mixed',
        ),
        (
            (57, 57, 45),
            "networks of k = 1 is better than one network beyond noise (4.50% against 6.00%)",
            'study.ensemble("plain") or pseudograd predict --ensemble --k 1',
        ),
        (
            (58, 59, 58),
            "networks of k = 1/2 is level with one network, within noise (5.80% against 6.00%); "
            "against five of k = 1 (5.80%) it is level",
            None,
        ),
        (
            (70, 70, 57),
            "networks of k = 1/2 is worse than one network beyond noise (7.00% against 6.00%); "
            "against five of k = 1 (5.70%) it is worse",
            None,
        ),
    ],
)
def test_words_about_ensembles_follow_the_numbers(
    wrongs: tuple[int, int, int], words: str, call: str | None
) -> None:
    text, printed = told(shares(*wrongs))
    assert f"{words}." in text
    lines = [line for line in printed.splitlines() if "an ensemble of five" in line]
    assert len(lines) == (call is not None)
    if call:
        assert f"{words.replace('→', '->')}: {call} uses it" in lines[0]
        assert f"{call} uses it." in text
    assert "five of mixed k (two of 1/2, two of 1 and one of 1/2→2)" in text


@pytest.mark.parametrize(
    ("wrongs", "headline", "line"),
    [
        ((45, 44, 50), "Test error 6.00%, 4.50% as an ensemble", "1/2 x5 4.50 5.00"),
        ((57, 44, 57), "Test error 6.00%, 4.40% as an ensemble", "1/2+1+1/2->2 x5 4.40 5.70"),
        ((57, 57, 45), "Test error 6.00%, 4.50% as an ensemble", "1 x5 4.50 4.50"),
        ((58, 59, 58), "Test error 6.00%", "1/2 6.00 6.00"),
    ],
)
def test_an_ensemble_that_is_better_is_in_the_headline_and_in_the_list_of_runs(
    tmp_path: Path, wrongs: tuple[int, int, int], headline: str, line: str
) -> None:
    study = Study(tmp_path / "run", PROTOCOL, TOLD["data"])
    with study.session("train.py", ["cpu"]):
        for trial, outcome in made_up(PROTOCOL).items():
            study.tell(trial, outcome)
    write_found(study, shares(*wrongs))
    _, heading = re.findall(r"<(?:title|h1)>(.*?)</", read(study.report()).html)
    assert heading == headline
    assert f" {line} " in " ".join(line_of_run(study).split())


def test_one_network_is_not_an_ensemble() -> None:
    text, printed = told(shares(40, 40, 40, size=1), replace(PROTOCOL, retrainings=1))
    assert "Combined predictions" not in text
    assert "nsemble" not in printed
    assert combined({"model": {}}) is None


def test_an_ensemble_of_the_choice_is_that_of_1_if_1_is_chosen() -> None:
    found = shares(0, 40, 45)
    del found["combined"][0]
    text, printed = told(found, best_k=1.0)
    assert "An ensemble of five networks of k = 1 is better than one network beyond noise" in text
    assert "study.ensemble() or pseudograd predict --ensemble uses it" in printed
    assert "one network of k = 1" in text


# --- other trainings -------------------------------------------------------------------------


def test_words_follow_the_training() -> None:
    text, printed = told(None)
    assert "digits · Net, 12,345 parameters" in text
    assert "inputs of 3 × 8 × 8 numbers and 1 number" in text
    assert "SGD, 3 epochs, batches of 32, constant rate, float32" in text
    assert "one of five folds, a different one in each repetition; the last epoch is kept" in text
    assert "Cross-validation selected k = 1/2" in text
    other = "study.model(k=1) or pseudograd predict --k 1 uses the best network with k = 1 instead"
    assert f"The saved model has k = 1/2; {other}." in text
    assert f"the saved model has k = 1/2; {other}\n" in f"{printed}\n"
    # The number of labels is not known without the assessment.
    assert "The model has a test error of 0.56%." in text
    assert "Run the study again for the confusion matrix" in text
    assert "Run the study again" not in told({})[0]
    patient = replace(RECIPE, patience=5, validation=0.1, precision="bf16", ignore_index=-1)
    outcomes = made_up(replace(PROTOCOL, recipe=patient), stopped_by="limit")
    parsed = Parsed(page(TOLD, replace(PROTOCOL, recipe=patient), outcomes, None))
    for words in (
        "3 epochs at most",
        "bfloat16 autocast, labels of -1 ignored",
        "10% of the training examples, held out; training stops after 5 epochs without a lower "
        "error, and the best epoch is kept",
        "still improving at the limit of 3 epochs; more epochs may change the result",
        "with the lowest early-stopping error",
        "Validation selected k = 1/2",
    ):
        assert words in parsed.text
    assert "Early-stopping error by epoch" in parsed.said
    text, _ = told(None, replace(PROTOCOL, recipe=replace(patient, schedule="cosine")))
    assert "still improving" not in text


def test_a_ramp_can_be_the_choice() -> None:
    outcomes = {
        trial: replace(outcome, error=0.001) if trial.k == RAMP else outcome
        for trial, outcome in made_up(PROTOCOL).items()
    }
    while wanted := PROTOCOL.wanted(outcomes):
        for trial in wanted:
            outcomes[trial] = Outcome(trial, 0.0, 3, 0.001, 0.01, 3, "limit", (), (1,))
    parsed = Parsed(page(TOLD, PROTOCOL, outcomes, None))
    assert "selected k = 1/2→2 at a learning rate of" in parsed.text
    assert "The slider starts at 2, where the ramp k = 1/2→2 ends." in parsed.text
    assert "chosen: k = 1/2->2" in summary(result(PROTOCOL, outcomes))


@pytest.mark.parametrize("stop", [0, 7, 12, 24, 26])
def test_an_unfinished_study_has_a_page(stop: int) -> None:
    parsed = Parsed(page(TOLD, PROTOCOL, made_up(PROTOCOL, stop=stop), None, shares(1, 1, 1)))
    assert "Not finished yet" in parsed.text
    assert "Combined predictions" not in parsed.text
    assert "Test error" not in parsed.text
    assert ("Validation error by epoch" in parsed.said) == ("is selected" in parsed.text)


def test_without_final_networks_nothing_is_compared() -> None:
    protocol = replace(PROTOCOL, retrainings=0)
    text = Parsed(page(TOLD, protocol, made_up(protocol), None)).text
    assert "All trials are done. No final networks were asked for" in text


def test_several_labels_of_an_example_are_counted_as_labels() -> None:
    x, y = X.flatten(1).unsqueeze(1).expand(-1, 3, -1)[..., :4], Y.unsqueeze(1).expand(-1, 4)
    test = torch.cat([60 + (Y[60:] == label).nonzero()[:10, 0] for label in range(3)])
    study = studies.Study(
        lambda: nn.Conv1d(3, 4, 1),  # one output more than there are labels, as for padding
        (x[:60], y[:60]),
        (x[test], y[test]),
        k=(0.5, 1),
        learning_rates=(0.01, 0.1, 1.0),
        epochs=1,
        validation=0.25,
        retrainings=2,
    )
    assert run(study)
    assert study.assessment["unit"] == "label"
    assert "of 120 test labels wrong" in study.summary()
    assert [one["label"] for one in study.assessment["by_class"]] == [0, 1, 2]
    assert not study.assessment["unequal"]
    assert "has no examples of" not in study.summary()


def test_labels_of_one_example_are_not_taken_for_independent(tmp_path: Path) -> None:
    """Ten identical positions are no more evidence than one."""
    x, y = X.flatten(1).unsqueeze(2).expand(-1, -1, 10), Y.unsqueeze(1).expand(-1, 10)
    study = studies.Study(
        lambda: nn.Sequential(nn.Conv1d(8, 5, 1), nn.ReLU(), nn.Conv1d(5, 3, 1)),
        (x[:200], y[:200]),
        (x[200:], y[200:]),
        k=(0.5, 1),
        learning_rates=(0.01, 0.03),
        epochs=4,
        batch_size=20,
        validation=0.25,
        retrainings=3,
        folder=tmp_path / "run",
    )
    assert run(study)
    found = study.assessment
    for one in (found["model"], found["plain"] or found["model"], *found["combined"]):
        assert one["count"] == 1000
        low, high = wilson(one["error"] * 100, 100)
        assert (one["low"], one["high"]) == pytest.approx((low, high), abs=0.003)
    against = found["baselines"][0]["against"]
    wrong, other = (round(one["error"] * 100) for one in (found["model"], found["baselines"][0]))
    assert against["difference"] == pytest.approx((wrong - other) / 100)
    assert against["high"] - against["low"] > 0.1  # of 100 examples, not of 1,000 labels
    text = read(study.report()).text
    assert "so intervals and tests are computed over the 100 test examples." in text
    assert "The share of each class’s test labels that the model gets wrong" in text


def test_a_sign_test_counts_examples_and_not_their_labels(tmp_path: Path) -> None:
    protocol = replace(PROTOCOL, retrainings=2)
    facts = {**TOLD["data"], "positions": 6, "test_size": 60}
    study = Study(tmp_path / "run", protocol, facts)
    wrong: dict[float | Ramp, list[set[int]]] = {
        0.5: [{0}] * 2,
        1.0: [{*range(12)}] * 2,
        RAMP: [{1}] * 2,
    }
    with study.session("train.py", ["cpu"]):
        for trial, outcome in made_up(protocol, wrong=wrong).items():
            study.tell(trial, outcome)
    write_found(study, {**shares(45, 44, 50, size=2), "unit": "label"})
    comparison = study.result.comparison
    assert (comparison.better_on, comparison.worse_on, comparison.sign_p) == (2, 0, 0.5)
    assert comparison.only_chosen_right == 22
    text = read(study.report()).text
    assert "a sign test over the test examples gives p = 0.5" in text
    assert "2 test examples right more often with k = 1/2, 0 with k = 1" in text
    assert "it counts each test label 2 times, once for each pair" in text
    assert "better or worse if a sign test on the test examples has p < 0.05" in text


# --- the folder ------------------------------------------------------------------------------


def test_a_folder_gives_the_same_page(
    finished: studies.Study, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    html = finished.report().read_text(encoding="utf-8")
    for opened in (Study.open(folder), studies.Study.open(folder), made(folder)):
        (folder / "report.html").unlink()
        assert opened.report().read_text(encoding="utf-8") == html
        assert read_assessment(opened) == finished.assessment
    again = made(folder)
    assert again.assessment == finished.assessment
    assert again.summary() == finished.summary()

    def never(*_: object) -> dict[str, Any]:
        raise AssertionError("networks that were assessed are assessed again")

    monkeypatch.setattr(studies, "assess_networks", never)
    assert run(again)
    assert again.assessment == finished.assessment


def test_the_command_line_reads_such_a_folder(
    finished: studies.Study, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"page: {folder / 'report.html'}\n"
    assert main(["runs", str(folder.parent)]) == 0
    assert f" {percent(finished.assessment['model']['error'])} " in capsys.readouterr().out


def rewritten(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (cut, "is damaged"),
        (lambda path: path.write_text("[]"), "is damaged"),
        (lambda path: path.write_text("{}"), "is damaged, or from another version (KeyError"),
        (lambda path: rewritten(path, lambda f: {**f, "found": {"model": 1}}), "another version"),
        (lambda path: rewritten(path, lambda f: {**f, "found": None}), "another version"),
    ],
)
def test_a_damaged_assessment_is_reported_and_rewritten(
    damage: Callable[[Path], object], complaint: str, finished: studies.Study, folder: Path
) -> None:
    path = folder / "assessment.json"
    damage(path)
    again = made(folder)
    for ask in (Study.open(folder).report, again.report, again.summary):
        with pytest.raises(ValueError, match=re.escape(complaint)) as told:
            ask()
        assert "\n" not in str(told.value)
        assert str(told.value).startswith(str(path))
        assert str(told.value).endswith("run the study again, which rewrites it")
    assert main(["runs", str(folder.parent)]) == 1  # its headline may need the ensemble
    assert run(again)
    assert again.assessment == finished.assessment
    assert "Combined predictions" in read(again.report()).text


@pytest.mark.parametrize("other", [{"trials": 1}, {"run": "0" * 64}])
def test_an_assessment_of_other_outcomes_is_ignored(other: dict[str, Any], folder: Path) -> None:
    rewritten(folder / "assessment.json", lambda fields: {**fields, **other})
    study = Study.open(folder)
    assert read_assessment(study) is None
    text = read(study.report()).text
    assert "Combined predictions" not in text
    assert "Run the study again for the confusion matrix" in text
    assert made(folder).assessment == {}


def test_the_page_without_an_assessment(folder: Path) -> None:
    study = made(folder)
    write_found(study, {})  # as if there were too many predictions to keep
    assert read_assessment(study) == {}
    assert study.summary().startswith("the model has a test error of ")
    assert "Run the study again" not in read(study.report()).text


def test_networks_that_diverged_are_not_averaged(tmp_path: Path) -> None:
    study = made(tmp_path / "run", k=(0.5, 1), retrainings=2)
    assert run(study)
    (tmp_path / "run/assessment.json").unlink()
    trial = study.comparison.plain[0].trial
    state = study.checkpoints.get(trial)
    assert state is not None
    study.checkpoints.put(trial, {name: one * torch.nan for name, one in state.items()})
    again = made(tmp_path / "run", k=(0.5, 1), retrainings=2)
    assert run(again)
    assert again.assessment == {}
    assert "Combined predictions" not in read(again.report()).text


def test_doubts_about_the_data_are_on_the_page(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"k": (1,), "learning_rates": (0.01,), "epochs": 1, "retrainings": 1}
    test = (torch.cat([X[:2], X[200:240]]), torch.cat([Y[:2], Y[200:240]]))
    study = studies.Study(
        Small, (X[:200], Y[:200]), test, folder=tmp_path / "run", validation=0.25, **settings
    )
    assert run(study)
    said = Parsed(study.report().read_text("utf-8")).text
    assert "2 of 42 test examples are copies of a training example: the test error may look" in said


def test_a_study_in_memory_has_a_summary_and_no_page() -> None:
    study = made(None, k=(0.5, 1), retrainings=2, repetitions=2, epochs=1)
    assert run(study)
    assert study.summary().startswith("the model gets ")
    with pytest.raises(ValueError, match="must have a folder"):
        study.report()


def test_what_the_page_needs_of_the_data_is_named(tmp_path: Path) -> None:
    data = {name: value for name, value in TOLD["data"].items() if name != "shapes"}
    study = Study(tmp_path / "run", PROTOCOL, data)
    with pytest.raises(ValueError, match=r"KeyError\('shapes'\)\): name a run of pseudograd\.S"):
        study.report()


# --- in a browser ----------------------------------------------------------------------------


def hostile() -> str:
    recipe = replace(RECIPE, network=HOSTILE, optimizer=HOSTILE, schedule=HOSTILE, augment=HOSTILE)
    protocol = replace(PROTOCOL, recipe=recipe)
    about = {**TOLD, "data": {**TOLD["data"], "name": HOSTILE}, "command": HOSTILE}
    found = shares(45, 44, 50) | {"classes": [HOSTILE] * 3}
    found["by_class"] = [{"label": HOSTILE, **share(1, 10)}]
    return page(about, protocol, made_up(protocol), None, found)


def test_texts_of_users_stay_texts() -> None:
    parsed = Parsed(hostile())
    tags = [tag for tag, _ in parsed.tags]
    assert tags.count("script") == tags.count("style") == 1
    assert "img" not in tags
    assert parsed.text.count(HOSTILE) == 3 + 2 + 3 + 1 + 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
def test_nothing_overlaps(
    browser: WebDriver, finished: studies.Study, width: int, scheme: str, tmp_path: Path
) -> None:
    html = finished.report().read_text(encoding="utf-8")
    crowded = page(TOLD, PROTOCOL, made_up(PROTOCOL), None, shares(45, 44, 50, size=12))
    for content in (html, crowded, hostile()):
        open_page(browser, tmp_path / "report.html", content, width, scheme)
        assert browser.execute_script("return document.documentElement.scrollWidth") == width
        assert browser.execute_script(OVERLAPS) == []
        assert browser.get_log("browser") == []
