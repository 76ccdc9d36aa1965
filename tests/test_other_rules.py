"""`pseudograd.Study` with another rule than the paper's, and with another baseline than k = 1."""

from __future__ import annotations

import functools
import html
import json
import re
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pseudograd import rules
from pseudograd.fleet import MLPRecipe, Outcome, Trial
from pseudograd.fleet.ramp import level
from pseudograd.report.summary import line_of_run
from pseudograd.search import Cell, Protocol, networks
from pseudograd.search import Study as AnyStudy
from pseudograd.study import Study

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(240, 6, generator=GENERATOR)
Y = X[:, :3].argmax(1)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))


def poly1(logits: Tensor, labels: Tensor, a: float) -> Tensor:
    """PolyLoss, as a rule of the user's own."""
    p = logits.softmax(-1)
    p_y = p.gather(-1, labels[..., None])
    return (1 + a * p_y) * (p - nn.functional.one_hot(labels, p.shape[-1]))


def study(folder: Path | None = None, **settings: Any) -> Study:
    chosen: dict[str, Any] = {
        "rule": rules.generalized_cross_entropy,
        "k": (0, 0.4, 0.7),
        "baseline": 0,
        "learning_rates": (0.01, 0.02, 0.04),
        "epochs": 2,
        "batch_size": 45,
        "validation": 0.25,
        "retrainings": 3,
        "folder": folder,
        **settings,
    }
    return Study(network, (X[:180], Y[:180]), (X[180:], Y[180:]), **chosen)


def run(one: Study, **settings: Any) -> Study:
    assert one.run(**{"device": "cpu", "slots": 1, "progress": False, **settings})
    return one


def judged(best: float) -> Callable[..., Iterator[Outcome]]:
    """Return a runner that trains nothing, for which this value is the best, at a rate of 0.02."""
    state = network().state_dict()  # of all networks, so that no ensemble is better than one

    def runner(trials: deque[Trial], stop: object) -> Iterator[Outcome]:
        while trials:
            trial = trials.popleft()
            error = 0.1 + 0.1 * abs(level(trial.k) - best) + abs(trial.learning_rate - 0.02)
            wrong = (1,) if trial.split.retrain else None
            yield Outcome(trial, error, 2, error, error, 2, "limit", (), wrong, state=state)

    return runner


def text_of(page: Path) -> str:
    """Return the text of a page, with what its figures say."""
    told = re.sub(r'(?:data-say|aria-label)="([^"]*)"', r">\1<", page.read_text("utf-8"))
    told = re.sub(r"<(style|script).*?</\1>|<[^>]+>", " ", told, flags=re.DOTALL)
    return re.sub(r"\s+", " ", html.unescape(told).replace("\xa0", " "))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return run(study(tmp_path_factory.mktemp("study") / "run"))


def test_it_trains_and_resumes(finished: Study) -> None:
    assert finished.best.k in (0, 0.4, 0.7)
    assert {one.trial.k for one in finished.comparison.plain} == {0}
    assert finished.folder is not None
    again = study(finished.folder)
    assert again.finished
    assert again.summary() == finished.summary() == AnyStudy.open(finished.folder).summary()
    written = json.loads((finished.folder / "run.json").read_text())["protocol"]
    assert (written["baseline"], written["parameter"]) == (0, "q")
    assert len(study(finished.folder, k=(0, 0.2, 0.4, 0.7)).ledger) == len(finished.ledger)
    with pytest.raises(ValueError, match=r"other settings \(rule was generalized_cross_entropy"):
        study(finished.folder, rule=rules.redescending)


def test_at_0_it_is_cross_entropy(finished: Study) -> None:
    plain = run(study(rule=None, k=(1,), baseline=None, retrainings=0))
    errors = {cell.learning_rate: cell.error for cell in plain.protocol.cells(plain.ledger)}
    for cell in finished.result.cells:
        if cell.k == 0 and cell.learning_rate in (0.01, 0.02, 0.04):
            assert cell.error == pytest.approx(errors[cell.learning_rate], abs=0.03)


def test_the_network_of_the_baseline(finished: Study) -> None:
    wrong = float((finished.model(k=0)(X[180:]).argmax(1) != Y[180:]).float().mean())
    assert wrong == pytest.approx(finished.comparison.plain[0].error)
    loaded = networks.load_network(finished, network, 0)
    torch.testing.assert_close(loaded(X), finished.model(0)(X), rtol=0, atol=0)
    assert len(finished.ensemble("plain").networks) == 3
    with pytest.raises(ValueError, match=r"^k must be .*0.*, not 1$"):
        finished.model(1)


@pytest.mark.parametrize("best", [0.0, 0.7])
def test_reports_name_the_rule_and_its_parameter(best: float, tmp_path: Path) -> None:
    one = study(tmp_path / "run")
    assert one.protocol.plan().startswith("about 16 networks, more where")
    assert one.protocol.plan().endswith("of the choice and of q = 0")
    run(one, runner=judged(best))
    summary, page = one.summary(), text_of(one.report())
    for text in (summary, page):
        assert text.count("rule: generalized_cross_entropy") == 1
        assert not re.search(r"\bk\b", re.sub(r"study\.model\(k=0\)|..k\s(0|mixed)", "", text))
        assert "plain cross-entropy" not in text
    assert "What k does" not in page
    assert "Error against q" in page
    shown = re.sub(r"  +", " ", line_of_run(one))
    if best:
        assert "does q matter? perhaps: q = 0.7 has 10.00%, q = 0 17.00% (mean of 3" in summary
        hint = "the saved model has q = 0.7; study.model(k=0) or pseudograd predict --k 0 uses the"
        assert hint in summary
        assert "Test error with q = 0.7 minus that with q = 0" in page
        assert " q = 0.7 " in shown
    else:
        assert "does q matter? q = 0 was chosen, so there is nothing to compare" in summary
        assert "Keep q = 0" in page
        assert " q = 0 " in shown
    assert " at 0 " in shown


def test_a_rule_of_the_users_own_with_three_arguments() -> None:
    for rule in (poly1, functools.partial(poly1), lambda z, y, a: poly1(z, y, a)):
        one = run(study(rule=rule, k=(0, "0.5→2"), learning_rates=(0.02,), retrainings=1))
        assert one.protocol.parameter == "a"
        assert "does a matter?" in one.summary()


def test_bound_parameters_are_not_searched() -> None:
    rule = functools.partial(rules.symmetric_cross_entropy, alpha=0.1)
    one = study(rule=rule, k=(0.5, 1), baseline=1)
    assert one.protocol.parameter == "beta"
    run(one, runner=judged(1))
    assert "rule: symmetric_cross_entropy(alpha=0.1)\ndoes beta matter?" in one.summary()


def test_the_papers_rule_is_no_other_rule() -> None:
    one, same = (study(rule=rule, k=(0.5, 1), baseline=None) for rule in (None, rules.tunable))
    assert one.protocol == same.protocol
    assert not {"baseline", "parameter"} & one.protocol.settings().keys()


def test_another_baseline_for_the_papers_rule(tmp_path: Path) -> None:
    one = run(study(tmp_path / "run", rule=None, k=(0.25, 0.5), baseline=0.5), runner=judged(0.25))
    assert "k = 1/4 has 10.00%, k = 1/2 12.50%" in one.summary()
    page = text_of(one.report())
    assert "k = 1/4 may make fewer errors than k = 1/2" in page
    assert "What k does" in page


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no baseline": ({"baseline": None}, "^baseline must be given with a rule: the value of q that"),
    "baseline is a word": ({"baseline": "0"}, "^baseline must be a number, not '0'$"),
    "k without the baseline": ({"k": (0.4, 0.7)}, "^k must contain 0, because the chosen q is"),
    "a bad value": ({"k": (0, 2)}, r"but fails at 2 \(q must be a number in \[0, 1\], not 2.0\)$"),
    "a bad baseline": ({"baseline": -1, "retrainings": 0}, r"fails at -1 \(q must be a number in"),
    "infinity": ({"k": (0, float("inf"))}, "^k must be finite numbers, not"),
    "no number": ({"k": (0, "a")}, "^k must be distinct numbers"),
    "NaN": ({"rule": lambda z, y, a: z / (0 * a)}, r"0 \(its pseudo-gradient is not finite\)$"),
    "a name": ({"rule": "focal"}, "^rule must be a function of logits, labels and the parameter"),
    "two arguments": ({"rule": rules.bias}, "^rule must be a function of logits, labels and the"),
    "label smoothing": ({"label_smoothing": 0.1}, "^label_smoothing must be left out with a rule"),
    "k of 0": ({"rule": None}, "^k must be finite numbers above 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_gets_one_sentence(case: str) -> None:
    settings, sentence = REFUSED[case]
    with pytest.raises(ValueError, match=sentence):
        study(**settings)


def test_ties_go_to_the_value_nearest_the_baseline() -> None:
    cells = [Cell(k, 0.1, (0.1,)) for k in (-0.2, 0.0, 0.3, 0.5, 2.0)]
    for baseline, nearest in ((1.0, 0.5), (0.5, 0.5), (0.0, 0.0), (-0.3, -0.2), (0.1, 0.3)):
        assert Protocol.best(cells, baseline).k == nearest


def test_own_training_with_another_baseline(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"learning_rates": (0.1, 0.2, 0.4), "folder": tmp_path / "run"}
    one = Study.own_training("GCE", k=(0, 0.5, 0.7), parameter="q", baseline=0, **settings)
    for trial in one:
        one.tell(trial, error=0.2 - 0.1 * level(trial.k) + (trial.learning_rate - 0.2) ** 2)
    assert "does q matter? perhaps: q = 0.7 has 13.00%, q = 0 20.00%" in one.summary()
    page = text_of(one.report())
    assert "q = 0.7 may make fewer errors than q = 0 · GCE" in page
    assert not re.search(r"\bk\b", page)
    other = Study.own_training("mine", k=(0.25, 0.5, 0.75), learning_rates=(0.1,), baseline=0.5)
    assert other.protocol.plan().endswith("of the choice and of k = 1/2")
    with pytest.raises(ValueError, match=r"^k must contain 1, "):
        Study.own_training("mine", k=(0.25, 0.5), learning_rates=(0.1,))
    with pytest.raises(ValueError, match=r"^k must be finite numbers above 0 "):
        Study.own_training("mine", k=(0, 0.5), learning_rates=(0.1,), baseline=0)
    with pytest.raises(ValueError, match="parameter was q, is now k"):
        Study.own_training("GCE", k=(0.5, 1), **settings)


def test_another_baseline_compares_the_same_networks_anew(tmp_path: Path) -> None:
    one = run(study(tmp_path / "run"), runner=judged(0.7))
    again = study(tmp_path / "run", baseline=0.4)
    assert not again.finished
    run(again, runner=judged(0.7))
    assert "q = 0.7 has 10.00%, q = 0.4 13.00%" in again.summary()
    assert len(again.ledger) == len(one.ledger) + 3 - 1  # one of them was in the mixed ensemble


def test_a_recipe_names_its_rule() -> None:
    recipe = MLPRecipe("digits", (4,), rule="focal")
    one = AnyStudy(None, Protocol(recipe, ks=(1, 2), initial_rate=0.1))
    for trial in one:
        one.tell(trial, error=0.1 * level(trial.k))
    assert "rule: focal\ndoes k matter? k = 1 was chosen, so" in one.summary()
