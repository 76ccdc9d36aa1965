"""The examples of docs/own-training.md work, and `Split.indices` assigns roles to examples."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from documents import Document
from pseudograd.data import digits
from pseudograd.fleet import Split, parts
from pseudograd.search import Difference, Study

pytestmark = pytest.mark.usefixtures("one_thread", "in_an_empty_folder")

DOCUMENT = Document("own-training.md")
PLAIN = "A plain PyTorch loop"


def run(title: str) -> dict[str, Any]:
    """Run the document's first block and a section; return the names they define."""
    return DOCUMENT.execute([DOCUMENT.blocks(PLAIN)[0], *DOCUMENT.blocks(title)])


def check_result(names: dict[str, Any], folder: str, most: float) -> None:
    """Assert that the search chose k, compared it with k = 1, and that networks learned."""
    study = names["study"]
    assert study.finished
    found = Study.open(folder).result
    assert found == study.result
    assert found.chosen.k in study.protocol.ks
    assert found.plain.k == 1
    assert {outcome.trial.k for outcome in found.comparison.plain} == {1.0}
    assert math.isfinite(found.comparison.error.mean)
    assert max(one.error for one in (*found.comparison.chosen, *found.comparison.plain)) < most


def check_parameters(names: dict[str, Any]) -> None:
    """Assert the same about a search by another library."""
    assert names["chosen"].keys() == names["plain"].keys() == {"k", "learning_rate"}
    assert 0.25 <= names["chosen"]["k"] <= 4
    assert names["plain"]["k"] == 1
    for parameters in (names["chosen"], names["plain"]):
        assert max(names["test_errors"](parameters)) < 0.3


# --- the examples -----------------------------------------------------------------------------


def test_a_plain_loop_and_many_processes(capfd: pytest.CaptureFixture[str]) -> None:
    """Two processes run the program at once, then this one: all report the same result."""
    Path("search.py").write_text("\n\n".join(DOCUMENT.blocks(PLAIN)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen([sys.executable, "search.py"], env=environment, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=300)[0].decode() for process in started]
    assert [process.returncode for process in started] == [0, 0]
    names = run(PLAIN)
    check_result(names, "runs/digits", 0.3)
    study = names["study"]
    *shares, last = (one["trials"] for one in study.sessions)
    assert (len(shares), sum(shares), last) == (2, len(study.ledger), 0)
    assert said == [capfd.readouterr().out] * 2
    # Digits may differ between machines.
    number = r"[+-]?\d+(\.\d+)?"
    (shown,) = DOCUMENT.blocks(PLAIN, "text")
    assert re.sub(number, "", said[0]) == re.sub(number, "", shown)


def test_lightning() -> None:
    pytest.importorskip("pytorch_lightning")
    check_result(run("Lightning"), "runs/lightning", 0.5)


def test_the_trainer_of_transformers() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    check_result(run("Hugging Face's Trainer"), "runs/vit", 0.7)


def test_optuna() -> None:
    pytest.importorskip("optuna")
    check_parameters(run("Optuna"))


@pytest.fixture
def _cluster() -> Iterator[None]:
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.tune")
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.usefixtures("_cluster")
def test_ray_tune() -> None:
    names = run("Ray Tune")
    check_parameters(names)
    assert len(names["results"]) == 6
    assert not names["results"].errors
    assert isinstance(names["paired_difference"]([0.1], [0.2]), Difference)


# --- indices ----------------------------------------------------------------------------------


def as_sets(split: Split, count: int, **how: Any) -> tuple[set[int], set[int], set[int]]:
    part = split.indices(count, **how)
    train, stop, judge = (one.tolist() for one in (part.train, part.stop, part.judge))
    for one in (train, stop, judge):
        assert len(set(one)) == len(one)
    return set(train), set(stop), set(judge)


def test_every_example_has_one_role(subtests: pytest.Subtests) -> None:
    for count in (5, 100, 1003):
        for held_out in (None, 0.2):
            with subtests.test(count=count):
                for repetition in range(25):
                    split = Split(3, repetition)
                    train, stop, judge = as_sets(split, count, held_out=held_out)
                    assert train | stop | judge == set(range(count))
                    assert len(train) + len(stop) + len(judge) == count
                    assert (
                        len(stop)
                        == len(judge)
                        == (count // 5 if held_out is None else round(count / 5))
                    )
                    more, none, one_fold = as_sets(
                        split, count, held_out=held_out, early_stopping=False
                    )
                    assert more | one_fold == set(range(count))
                    assert more.isdisjoint(one_fold)
                    assert (len(one_fold), none) == (len(judge), set())


def test_folds_take_turns() -> None:
    """Each is evaluated on once in five repetitions; then the folds, or the roles, change."""
    for stops in (True, False):
        judges = [as_sets(Split(0, r), 50, early_stopping=stops)[2] for r in range(5)]
        assert set.union(*judges) == set(range(50))
    trained = [as_sets(Split(0, r), 50, early_stopping=False)[0] for r in range(10)]
    assert len(set(map(frozenset, trained))) == 10


def test_folds_are_those_of_a_data_set() -> None:
    data = digits()
    for split in (
        Split(1, 7),
        Split(1, 2, test=True),
        Split(1, 8, retrain=True),
        Split(bagged=True),
    ):
        expected, found = parts(data, split), split.indices(data.train_size)
        assert torch.equal(found.stop, expected.stop)
        if split.retrain or split.test:
            assert not len(found.judge)
        else:
            assert torch.equal(found.judge, expected.judge)
        # A fleet's networks have equally many examples, and may leave out up to four.
        left_out = set(found.train.tolist()) ^ set(expected.train.tolist())
        assert len(left_out) == (0 if split.retrain or split.bagged else data.train_size % 5)


def test_a_final_training_has_the_examples_that_judged() -> None:
    for held_out in (None, 0.1):
        train, stop, judge = as_sets(Split(retrain=True), 100, held_out=held_out)
        assert train | stop == set(range(100))
        assert not judge
        how = {"held_out": held_out, "early_stopping": False}
        assert as_sets(Split(retrain=True), 100, **how) == (set(range(100)), set(), set())


def test_held_out_shares_differ_between_repetitions_and_plans() -> None:
    splits = [Split(plan, repetition) for plan in range(3) for repetition in range(3)]
    assert len({frozenset(as_sets(split, 100, held_out=0.3)[2]) for split in splits}) == 9
    assert len(as_sets(Split(0, 20 * 2**31 - 1), 100, held_out=0.3)[2]) == 30


def test_too_few_examples_to_split(subtests: pytest.Subtests) -> None:
    cases: list[Any] = [4, 0, -5, 7.5, "7", None]
    for count in cases:
        said = "count must be a whole number, 5 or more"
        with subtests.test(count=count), pytest.raises(ValueError, match=said):
            Split().indices(count)


def test_held_out_fractions_that_leave_no_examples(subtests: pytest.Subtests) -> None:
    cases: list[Any] = [0, 1, 1.5, -0.1, 0.5, 0.001, math.nan, "half"]
    for held_out in cases:
        with subtests.test(held_out=held_out):
            with pytest.raises(
                ValueError, match="held_out must be a fraction of the 100 examples that leaves"
            ):
                Split().indices(100, held_out=held_out)
            if held_out == 0.5:
                assert len(as_sets(Split(), 100, held_out=held_out, early_stopping=False)[0]) == 50
