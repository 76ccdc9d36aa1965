"""The fleet: every slot trains as a plain loop does, whatever the other slots train."""

from __future__ import annotations

import functools
import gc
import math
import queue
import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import plain_loop
from covering import covering
from plain_loop import Layers, PlainRun
from pseudograd.data import Dataset, digits
from pseudograd.fleet import Fleet, Outcome, Ramp, Split, Stop, Trial, never, parts, randomness
from pseudograd.fleet.mlp.fleet import side_by_side
from pseudograd.fleet.mlp.stack import Examples, Stack
from pseudograd.fleet.mlp.worker import StackWorker
from pseudograd.fleet.precision import Precision
from pseudograd.fleet.splits import held_out
from trials import a_trial, recipe_of, replace

pytestmark = pytest.mark.usefixtures("one_thread")

EXACT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}


@functools.cache
def blobs(kind: str = "pixels") -> Dataset:
    """Return four overlapping classes, as pixels or numbers in [-3, 5]: 213 train, 50 test."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(4, (263,), generator=generator)
    centres = torch.rand(4, 12, generator=generator, dtype=torch.float64)
    noise = torch.randn(263, 12, generator=generator, dtype=torch.float64)
    unit = (centres[labels] + 0.45 * noise).clamp(0, 1)
    if kind == "pixels":
        return Dataset("blobs", (255 * unit).byte(), labels, 213)
    return Dataset("blobs", 8 * unit - 3, labels, 213, value_range=(-3.0, 5.0))


CPU = torch.device("cpu")
ONE = a_trial("blobs", (9,), k=1, learning_rate=0.3, batch_size=32, max_epochs=8)


def mixed(**shared: Any) -> list[Trial]:
    """Return trials that differ in everything that a fleet's trials may differ in."""
    base = replace(ONE, **shared)
    retrain, bagged = base.split.retrain, base.split.bagged
    step = (
        0.03
        if recipe_of(base).optimizer != "sgd"
        else 8.0
        if recipe_of(base).activation == "sigmoid"
        else 1.0
    )
    own: list[tuple[float, float, float, int, int, int, int, float]] = [
        (0.25, 0.1, 0.0, 1, 0, 15, 8, 0.2),
        (0.5, 0.3, 0.5, 1, 7, 1, 9, 0.5),
        (1.0, 0.2, 0.9, 2, 23, 3, 9, 0.05),
        (2.0, 0.5, 0.5, 3, 4, 2, 9, 0.1),
        (4.0, 0.4, 0.0, -5, 4, 15, 2, 1e6),
        (1 / 16, 0.05, 0.99, 2**40, 11, 2, 5, 0.3),
        (1.0, 0.2, 0.0, 2, 23, 3, 9, 0.02),
    ]
    return [
        replace(
            base,
            k=k,
            learning_rate=rate * step,
            momentum=momentum if recipe_of(base).optimizer == "sgd" else 0.0,
            seed=seed,
            split=Split(plan, repetition, retrain, bagged=bagged),
            patience=patience,
            max_epochs=limit,
            clip=None if recipe_of(base).clip is None else clip,
        )
        for plan, (k, rate, momentum, seed, repetition, patience, limit, clip) in enumerate(own)
    ]


def diverging(trial: Trial) -> list[Trial]:
    return [replace(trial, learning_rate=rate, patience=15) for rate in (1e6, 1e30, 1e300)]


@functools.cache
def plain(trial: Trial, kind: str = "pixels") -> PlainRun:
    return plain_loop.train(blobs(kind), trial)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> dict[Trial, list[Layers]]:
    """Record the layers of every trial's network after each of its epochs."""
    seen: dict[Trial, list[Layers]] = {}
    judge = StackWorker._judge_the_epoch

    def watch(worker: StackWorker) -> dict[int, str]:
        stack = worker.stack
        for slot, run in enumerate(worker.runs):
            if run:
                layers = zip(stack.weights, stack.biases, strict=True)
                now = tuple((w[slot].clone(), b[slot, 0].clone()) for w, b in layers)
                seen.setdefault(run.trial, []).append(now)
        return judge(worker)

    monkeypatch.setattr(StackWorker, "_judge_the_epoch", watch)
    return seen


def assert_same_layers(ours: Layers | None, theirs: Layers | None) -> None:
    assert ours is not None
    torch.testing.assert_close(ours, theirs, **EXACT)


def assert_same(ours: Outcome, theirs: Outcome) -> None:
    assert ours.cross_entropy == pytest.approx(theirs.cross_entropy, rel=1e-9, nan_ok=True)
    assert replace(ours, cross_entropy=0) == replace(theirs, cross_entropy=0)


RETRAIN, BAGGED = Split(retrain=True), Split(bagged=True)
SHARED: list[dict[str, Any]] = [
    {},
    {"hidden_layer_sizes": ()},
    {"activation": "tanh", "batch_size": 20, "clip": 1.0},
    {"activation": "sigmoid", "batch_size": 1000, "split": RETRAIN},
    {"hidden_layer_sizes": (8, 6, 7), "clip": 1.0},
    {"hidden_layer_sizes": (8, 6, 7), "clip": 1.0, "activation": "sigmoid", "split": RETRAIN},
    {"hidden_layer_sizes": (8, 6, 7), "activation": "tanh", "feature_range": (0.0, 1.0)},
    {"optimizer": "adam", "batch_size": 50},
    {"optimizer": "adam", "hidden_layer_sizes": (8, 6, 7), "clip": 1.0, "activation": "tanh"},
    {"optimizer": "rmsprop", "batch_size": 50, "activation": "tanh", "clip": 1.0},
    {"optimizer": "rmsprop", "hidden_layer_sizes": (8, 6, 7)},
    {"rule": "focal"},
    {"rule": "log_of_power", "hidden_layer_sizes": (8, 6, 7)},
    {"optimizer": "adam", "weight_decay": 0.3, "split": BAGGED, "stratified": True},
    {"optimizer": "adam", "weight_decay": 0.01, "schedule": "cosine", "sample": 100, "clip": 1.0},
    {"schedule": "cosine", "hidden_layer_sizes": (8, 6), "split": BAGGED},
    {"stop_by": "error and cross-entropy", "split": BAGGED},
    {"ties": "last"},
]


@pytest.mark.parametrize("slots", [None, 3], ids=["all at once", "refilled"])
@pytest.mark.parametrize(
    ("shared", "kind"),
    [*((shared, "pixels") for shared in SHARED), (SHARED[0], "numbers"), (SHARED[6], "numbers")],
    ids=str,
)
def test_every_slot_follows_a_plain_loop(
    shared: dict[str, Any], kind: str, slots: int | None, watched: dict[Trial, list[Layers]]
) -> None:
    trials = mixed(**shared)
    neighbours = diverging(trials[0])
    fleet = Fleet(blobs(kind), slots=slots, precision="float64", keep_parameters=True)
    together = [neighbours[0], *trials[:3], neighbours[1], *trials[3:], neighbours[2]]
    outcomes = {outcome.trial: outcome for outcome in fleet.run(together)}
    assert outcomes.keys() == set(together)
    for trial in trials:
        assert len(watched[trial]) == len(plain(trial, kind).epochs)
        for ours, theirs in zip(watched[trial], plain(trial, kind).epochs, strict=True):
            assert_same_layers(ours, theirs)
        assert_same(outcomes[trial], plain(trial, kind).outcome)
        assert_same_layers(outcomes[trial].parameters, plain(trial, kind).outcome.parameters)
    for trial in neighbours:
        assert 0 <= outcomes[trial].error <= 1


def test_the_trials_above_do_what_they_are_there_for() -> None:
    """They stop for every reason and at different epochs, improve, and clip some of the steps."""
    every = [[plain(trial) for trial in mixed(**shared)] for shared in SHARED]
    for shared, runs in zip(SHARED, every, strict=True):
        assert {run.outcome.stopped_by for run in runs} >= {"patience", "limit"}
        assert len({run.outcome.epochs for run in runs}) >= 3
        assert len({run.outcome.best_epoch for run in runs}) >= 2
        assert min(run.outcome.error for run in runs) < 0.7  # 0.8 is chance
        if "clip" in shared:
            assert all(run.clipped == 0 for run in runs if recipe_of(run.outcome.trial).clip == 1e6)
            assert any(run.clipped > 0 for run in runs)
    assert any(0 < run.clipped < run.steps for runs in every for run in runs)
    # Some reach their lowest error again, not in the next epoch; then patience stops them.
    firsts, lasts = every[0], every[-1]
    later = [
        b.outcome.best_epoch > a.outcome.best_epoch for a, b in zip(firsts, lasts, strict=True)
    ]
    assert any(later)
    assert [run.outcome.epochs for run in lasts] == [run.outcome.epochs for run in firsts]
    # The best epochs by the mixed score differ from those by the error.
    mixed_scores, errors = every[-2], [plain(trial) for trial in mixed(split=BAGGED)]
    assert [run.outcome.best_epoch for run in mixed_scores] != [
        run.outcome.best_epoch for run in errors
    ]
    # The last batch of an epoch is short.
    assert len(parts(blobs(), ONE.split).train) % recipe_of(ONE).batch_size != 0


@pytest.mark.parametrize("shared", [SHARED[0], SHARED[4], SHARED[8]], ids=str)
def test_outcomes_depend_on_the_trial_alone(shared: dict[str, Any]) -> None:
    """In double precision, beside diverging neighbours too."""
    trials = mixed(**shared)
    wild = diverging(trials[2])
    fleet = functools.partial(Fleet, blobs(), precision="float64", keep_parameters=True)
    alone = {trial: next(iter(fleet().run([trial]))) for trial in trials}
    for slots in (None, 1, 2, 5, 100):
        for order in (trials, wild + trials[::-1], trials[1::2] + wild + trials[::2], trials[:4]):
            together = {outcome.trial: outcome for outcome in fleet(slots=slots).run(order)}
            assert together.keys() == set(order)
            for trial in set(order).difference(wild):
                assert_same(together[trial], alone[trial])
                assert_same_layers(together[trial].parameters, alone[trial].parameters)


@pytest.mark.parametrize("slots", [None, 3], ids=["all at once", "refilled"])
@pytest.mark.parametrize("shared", [SHARED[0], SHARED[11], SHARED[14]], ids=str)
def test_ramps_follow_a_plain_loop(shared: dict[str, Any], slots: int | None) -> None:
    """Beside constant k; of different lengths, rising and falling."""
    ks: list[float | Ramp] = [Ramp(0.25, 4), Ramp(2, 0.5), 1.0, Ramp(1, 3), 4.0, Ramp(4, 0.25), 2.0]
    trials = [replace(one, k=k) for one, k in zip(mixed(**shared), ks, strict=True)]
    fleet = Fleet(blobs(), slots=slots, precision="float64", keep_parameters=True)
    outcomes = {outcome.trial: outcome for outcome in fleet.run(trials)}
    for trial in trials:
        assert_same(outcomes[trial], plain(trial).outcome)
        assert_same_layers(outcomes[trial].parameters, plain(trial).outcome.parameters)


def test_a_nearly_flat_ramp_is_nearly_a_constant_k() -> None:
    flat, ramp, steep = (replace(ONE, k=k) for k in (0.5, Ramp(0.5, 0.5 + 1e-9), Ramp(0.5, 2)))
    fleet = Fleet(blobs(), precision="float64", keep_parameters=True)
    found = {outcome.trial: outcome.parameters for outcome in fleet.run([flat, ramp, steep])}
    torch.testing.assert_close(found[flat], found[ramp], rtol=1e-6, atol=1e-6)
    (weight, _), *_ = found[flat] or ()
    (other, _), *_ = found[steep] or ()
    assert (weight - other).abs().max() > 0.01


def test_the_same_trial_may_be_given_twice() -> None:
    first, second = Fleet(blobs(), slots=1).run([ONE, ONE])
    assert first == second


@covering(
    precision=["tf32", "float32", "float64"],
    activation=["relu", "tanh"],
    rate=[1e6, 1e12, 1e30, 1e300],
)
def test_divergence_is_noted(rate: float, activation: str, precision: str) -> None:
    trial = replace(
        ONE, learning_rate=rate, momentum=0.9, activation=activation, max_epochs=1000, patience=999
    )
    (outcome,) = Fleet(blobs(), precision=precision, keep_parameters=True).run([trial])
    assert 0 <= outcome.error <= 1
    assert 0 <= outcome.stop_error <= 1
    assert all(0 <= error <= 1 for error in outcome.curve)
    assert 1 <= outcome.best_epoch <= outcome.epochs == len(outcome.curve)
    if activation == "relu":  # tanh bounds a network with any weights
        assert outcome.stopped_by == "diverged"
        assert outcome.epochs < 100
    if precision == "float64":
        assert outcome.stopped_by == plain(trial).outcome.stopped_by


def test_a_network_of_nan_gets_everything_wrong() -> None:
    """Even where argmax would return the label: at the first NaN."""
    examples = Examples(torch.ones(4, 1), torch.tensor([0, 0, 1, 1]), 1.0, 0.0)
    stack = Stack(examples, (1, 2), "relu", "sgd", models=3)
    for model, weights in enumerate(([math.nan, 1.0], [1.0, -math.inf], [1.0, 0.0])):
        stack.weights[0][model, 0] = torch.tensor(weights)
    errors, values = stack.evaluate(torch.arange(4).expand(3, 4))
    assert errors.tolist() == [1, 0.5, 0.5]
    assert values.isfinite().tolist() == [False, False, True]


def test_large_weights_that_predict_well_are_not_divergence() -> None:
    features = torch.eye(2)[torch.arange(40) % 2]
    data = Dataset("eye", features, torch.arange(40) % 2, 40, value_range=(0.0, 1.0))
    trial = a_trial("eye", (), k=1, learning_rate=1e6, batch_size=8, patience=2)
    (outcome,) = Fleet(data).run([trial])
    assert (outcome.stopped_by, outcome.error, outcome.stop_error) == ("patience", 0, 0)


def test_a_nan_weight_is_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the outputs are finite: a kernel's ReLU turns NaN into 0."""
    epochs: list[int] = []

    def broken(stack: Stack, *_: Any) -> None:
        if not epochs:
            stack.weights[0][0, 0, 0] = math.nan
        epochs.append(len(stack.weights[0]))

    def finite(stack: Stack, index: Tensor, models: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return torch.full((len(index),), 0.25), torch.ones(len(index))

    monkeypatch.setattr(Stack, "train", broken)
    monkeypatch.setattr(Stack, "evaluate", finite)
    sick, well = Fleet(blobs()).run([ONE, replace(ONE, seed=1, max_epochs=2)])
    assert (sick.stopped_by, sick.epochs) == ("diverged", 1)
    assert (well.stopped_by, well.epochs) == ("limit", 2)


# Randomness


def splitmix64(state: int) -> int:
    """Return the first output of SplitMix64 from a state, in Python integers."""
    z = (state + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def stream(seed: int, purpose: int, number: int, count: int) -> list[int]:
    key = splitmix64(splitmix64(splitmix64(seed % 2**64) ^ purpose) ^ number)
    return [splitmix64(key ^ at) for at in range(count)]


def test_the_hash_is_splitmix64() -> None:
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]  # seed 1234567
    states = [1234567 + at * 0x9E3779B97F4A7C15 for at in range(3)]
    assert [splitmix64(state) for state in states] == published
    hashed = randomness._hash(torch.tensor([randomness._signed(state) for state in states]))
    assert [number % 2**64 for number in hashed.tolist()] == published


SEEDS = [0, 1, -1, 2**40, 2**63 - 1, -(2**63)]


def test_random_numbers_are_what_their_hashes_say(subtests: pytest.Subtests) -> None:
    for seed in SEEDS:
        with subtests.test(seed=seed):
            seeds = torch.tensor([seed])
            for layer, (fan_in, fan_out) in enumerate([(3, 4), (1, 1), (5, 2)]):
                limit = math.sqrt(6 / (fan_in + fan_out))
                unit = [(h >> 40) / 2**23 - 1 for h in stream(seed, 1, layer, fan_in * fan_out)]
                ours = randomness.glorot_uniform(seeds, layer, fan_in, fan_out)
                assert ours.shape == (1, fan_in, fan_out)
                assert ours.dtype == torch.float32
                expected = torch.tensor(unit).reshape(1, fan_in, fan_out) * limit
                torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
            for epoch in (0, 1, 999):
                hashes = [h % 2**38 for h in stream(seed, 2, epoch, 50)]
                signed = [h - 2**38 if h >= 2**37 else h for h in hashes]
                assert randomness.order(seeds, torch.tensor([epoch]), 50).tolist() == [
                    sorted(range(50), key=signed.__getitem__)
                ]


def test_pinned_random_numbers() -> None:
    """A published result may depend on these: never change them."""
    weights = randomness.glorot_uniform(torch.tensor([0, 1]), 0, 2, 3)
    assert weights[0, 0].tolist() == [0.6996350884437561, -0.8883229494094849, 0.5379393696784973]
    assert weights[0, 1].tolist() == [0.41634005308151245, 0.2987522482872009, 0.29576051235198975]
    assert weights[1, 0].tolist() == [0.628150463104248, -0.702650785446167, -0.4176703691482544]
    assert weights[1, 1].tolist() == [0.8742866516113281, 0.5157732367515564, 0.04282373562455177]
    second_layer = randomness.glorot_uniform(torch.tensor([0]), 1, 1, 2)
    assert second_layer.tolist() == [[[1.3550933599472046, -0.9746399521827698]]]
    order = randomness.order(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]), 8)
    assert order.tolist() == [
        [6, 7, 5, 2, 4, 3, 0, 1],
        [4, 6, 5, 1, 2, 3, 0, 7],
        [3, 1, 0, 6, 4, 2, 5, 7],
    ]
    assert randomness.folds(0, 10).tolist() == [9, 1, 4, 2, 5, 7, 0, 8, 6, 3]


def test_random_numbers_do_not_depend_on_other_seeds() -> None:
    seeds, epochs = torch.tensor(SEEDS), torch.arange(len(SEEDS))
    weights, orders = randomness.glorot_uniform(seeds, 1, 6, 4), randomness.order(seeds, epochs, 33)
    for at in range(len(SEEDS)):
        one = slice(at, at + 1)
        assert torch.equal(randomness.glorot_uniform(seeds[one], 1, 6, 4), weights[one])
        assert torch.equal(randomness.order(seeds[one], epochs[one], 33), orders[one])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_seed_gives_the_same_on_a_gpu() -> None:
    seeds, epochs = torch.tensor(SEEDS), torch.arange(len(SEEDS))
    for size in (1, 33, 50_000):
        theirs = randomness.order(seeds.cuda(), epochs.cuda(), size)
        assert torch.equal(randomness.order(seeds, epochs, size), theirs.cpu())
    weights = randomness.glorot_uniform(seeds, 0, 784, 400)
    assert torch.equal(weights, randomness.glorot_uniform(seeds.cuda(), 0, 784, 400).cpu())


@pytest.mark.parametrize(("fan_in", "fan_out"), [(64, 400), (400, 10), (3, 20_000)])
def test_initial_weights_are_glorot_uniform(fan_in: int, fan_out: int) -> None:
    limit = math.sqrt(6 / (fan_in + fan_out))
    weights = randomness.glorot_uniform(torch.arange(20), 0, fan_in, fan_out).double() / limit
    assert weights.abs().max() <= 1
    assert weights.abs().max() > 0.999
    for each in weights.flatten(1):  # within 5 standard errors of the moments of U(-1, 1)
        scale = 5 / math.sqrt(len(each))
        assert abs(each.mean().item()) < scale * math.sqrt(1 / 3)
        assert abs(each.square().mean().item() - 1 / 3) < scale * math.sqrt(4 / 45)
        assert abs((each[1:] * each[:-1]).mean().item()) < scale / 3
    # Seeds and layers are uncorrelated.
    others = randomness.glorot_uniform(torch.arange(20), 1, fan_in, fan_out).double() / limit
    table = torch.cat((weights, others)).flatten(1)
    correlation = table @ table.T / table.shape[1] * 3
    assert (correlation - torch.eye(40)).abs().max() < 7 / math.sqrt(table.shape[1])


def test_orders_are_permutations_and_all_different() -> None:
    seeds, epochs = torch.arange(40).repeat_interleave(40), torch.arange(40).repeat(40)
    orders = randomness.order(seeds, epochs, 100)
    assert torch.equal(orders.sort(1).values, torch.arange(100).expand(1600, 100))
    assert len({tuple(order) for order in orders.tolist()}) == 1600
    # Every example appears in every position: position × example counts of 16 ± 4.
    counts = torch.zeros(100, 100).scatter_add_(0, orders, torch.ones(1600, 100))
    chi_square = ((counts - 16).square() / 16).sum().item()
    assert chi_square == pytest.approx(99 * 99, abs=6 * math.sqrt(2 * 99 * 99))
    one = randomness.order(torch.tensor([3]), torch.tensor([0]), 1)
    assert one.tolist() == [[0]]


# Splits


def test_the_five_parts_and_their_roles(subtests: pytest.Subtests) -> None:
    for size in (5, 9, 213, 1437):
        for plan in (0, 1, 2**32 - 1):
            with subtests.test(size=size, plan=plan):
                data = Dataset("any", torch.zeros(size + 7, 1), torch.arange(size + 7) % 2, size)
                cuts = [parts(data, Split(plan, repetition)) for repetition in range(40)]
                for cut in cuts:
                    assert len(cut.stop) == len(cut.judge) == size // 5
                    assert len(cut.train) == 3 * (size // 5)
                    used = torch.cat((cut.train, cut.stop, cut.judge)).tolist()
                    assert len(set(used)) == len(used) == size // 5 * 5
                    assert set(used) <= set(range(size))
                for start in range(0, 40, 5):
                    judged = torch.cat([cut.judge for cut in cuts[start : start + 5]]).tolist()
                    assert len(set(judged)) == size // 5 * 5
                for start in (0, 20):
                    pairs = {
                        (tuple(cut.stop.tolist()), tuple(cut.judge.tolist()))
                        for cut in cuts[start : start + 20]
                    }
                    assert len(pairs) == 20
                    assert len({pair[0] for pair in pairs}) == len({pair[1] for pair in pairs}) == 5
                if size > 9:  # after twenty repetitions, the split is a new one
                    assert set(cuts[0].judge.tolist()) not in [
                        set(cut.judge.tolist()) for cut in cuts[20:]
                    ]


def test_networks_of_cross_validation_can_be_judged_on_the_test_set() -> None:
    data = blobs()
    for repetition in range(20):
        cut, usual = (parts(data, Split(3, repetition, test=test)) for test in (True, False))
        assert torch.equal(cut.train, usual.train)
        assert torch.equal(cut.stop, usual.stop)
        assert cut.judge.tolist() == list(range(213, 263))
    trials = [replace(ONE, split=Split(test=test)) for test in (True, False)]
    found = {outcome.trial.split.test: outcome for outcome in Fleet(data).run(trials)}
    tested, validated = found[True], found[False]
    assert tested.curve == validated.curve
    assert tested.error != validated.error


@pytest.mark.parametrize("size", [5, 9, 213])
def test_the_final_training_is_judged_on_the_test_set(size: int) -> None:
    data = Dataset("any", torch.zeros(size + 7, 1), torch.arange(size + 7) % 2, size)
    for repetition in range(20):
        cut = parts(data, Split(3, repetition, retrain=True))
        assert cut.judge.tolist() == list(range(size, size + 7))
        assert sorted(torch.cat((cut.train, cut.stop)).tolist()) == list(range(size))
        search = parts(data, Split(3, repetition))
        assert torch.equal(cut.stop, search.stop)
        assert set(cut.train.tolist()) >= {*search.train.tolist(), *search.judge.tolist()}


@pytest.mark.parametrize("size", [5, 9, 213])
def test_bagged_networks_train_on_all_that_they_are_not_judged_on(size: int) -> None:
    data = Dataset("any", torch.zeros(size + 7, 1), torch.arange(size + 7) % 2, size)
    cuts = [parts(data, Split(3, number, bagged=True), stratified=True) for number in range(10)]
    for cut in cuts:
        assert torch.equal(cut.stop, cut.judge)
        assert len(cut.judge) == size // 5
        assert sorted(torch.cat((cut.train, cut.judge)).tolist()) == list(range(size))
        classes = data.labels[cut.judge].bincount(minlength=2)
        assert (classes[0] - classes[1]).abs() <= 2
    rounds = [torch.cat([cut.judge for cut in cuts[start : start + 5]]) for start in (0, 5)]
    for judged in rounds:
        assert len(judged.unique()) == len(judged) == size // 5 * 5
    if size > 9:  # after five repetitions, the split is a new one
        folds = [{*cut.judge.tolist()} for cut in cuts]
        assert all(fold not in folds[5:] for fold in folds[:5])


def test_a_sample_of_a_large_fold_decides_the_best_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pseudograd.fleet.splits._MOST_STOPPING", 10)
    cut = parts(blobs(), BAGGED, stratified=True)
    assert len(cut.judge) == 42
    assert 5 < len(cut.stop) <= 10
    assert set(cut.stop.tolist()) < set(cut.judge.tolist())
    outcomes = list(
        Fleet(blobs()).run([replace(ONE, split=BAGGED), replace(ONE, split=BAGGED, k=2)])
    )
    assert all((error * len(cut.stop)).is_integer() for o in outcomes for error in o.curve)


SPLITS = [Split(3, repetition, **role) for repetition in (0, 1, 7, 21)
          for role in ({}, {"bagged": True}, {"retrain": True})]  # fmt: skip


def test_groups_stay_on_one_side_of_every_split(subtests: pytest.Subtests) -> None:
    """Groups have 1 to 20 examples each, scattered over the data."""
    for split in SPLITS:
        with subtests.test(split=split):
            generator = torch.Generator().manual_seed(0)
            groups = torch.arange(20).repeat_interleave(torch.arange(1, 21))
            groups = groups[torch.randperm(210, generator=generator)]
            features, labels = torch.randn(220, 2, generator=generator), torch.arange(220) % 2
            groups = torch.cat((groups, torch.full((10,), -1)))
            data = Dataset("grouped", features, labels, 210, (-4.0, 4.0), groups=groups)
            cut = parts(data, split, stratified=True)
            seen = set(groups[cut.train].tolist())
            for part in [cut.stop] if split.retrain else [cut.stop, cut.judge]:
                assert not seen & set(groups[part].tolist())
            assert len(cut.stop) == 42  # these groups can be split evenly
            # All networks of a stack have equally many examples, whatever their fold.
            other = parts(data, replace(split, repetition=split.repetition + 13), stratified=True)
            assert [len(part) for part in vars(cut).values()] == [
                len(p) for p in vars(other).values()
            ]


def test_a_large_group_takes_no_examples_from_the_others() -> None:
    """All networks of a stack have equally many examples: smaller folds repeat some."""
    groups = torch.tensor([0] * 30 + [*range(1, 11)] * 4 + [-1] * 5)
    data = Dataset("large", torch.zeros(75, 1), torch.arange(75) % 2, 70, groups=groups)
    splits = [Split(3, repetition, bagged=True) for repetition in range(5)]
    held = torch.cat([held_out(data, split) for split in splits])
    assert held.sort().values.tolist() == list(range(70))
    for split in splits:
        cut, all_held = parts(data, split), held_out(data, split)
        assert set(cut.judge.tolist()) == set(all_held.tolist())
        assert {*cut.train.tolist(), *all_held.tolist()} == {*range(70)}
        assert set(cut.train.tolist()).isdisjoint(all_held.tolist())
    for role in ({"bagged": True}, {"retrain": True}, {}):
        found = [parts(data, Split(3, at, **role)) for at in range(20)]
        assert len({tuple(map(len, vars(cut).values())) for cut in found}) == 1
        counts = [cut.train.unique(return_counts=True)[1] for cut in found]
        assert all(int(count.max()) - int(count.min()) <= 1 for count in counts)


def test_groups_that_cannot_be_folds() -> None:
    data = Dataset("few", torch.zeros(20, 1), torch.arange(20) % 2, 20, groups=torch.arange(20) % 4)
    with pytest.raises(ValueError, match="groups must be at least 5 in the training set"):
        parts(data, Split())


def test_the_plan_is_a_pure_function() -> None:
    """Of sizes and split: not of the features, the labels, the name, or earlier calls."""
    other = Dataset("other", torch.ones(263, 3), torch.zeros(263).long(), 213, (0.0, 1.0))
    for split in (Split(), Split(1), Split(1, 3), Split(1, 23), Split(1, 3, True)):
        first, second, again = (parts(data, split) for data in (blobs(), other, blobs()))
        for role in ("train", "stop", "judge"):
            assert torch.equal(getattr(first, role), getattr(second, role))
            assert torch.equal(getattr(first, role), getattr(again, role))
    stops = [tuple(parts(blobs(), Split(plan)).stop.tolist()) for plan in range(50)]
    assert len(set(stops)) == 50
    assert parts(blobs(), Split(0)).stop[:6].tolist() == [189, 133, 200, 15, 141, 194]


def with_another_test_set(data: Dataset) -> Dataset:
    features, labels = data.features.clone(), data.labels.clone()
    features[data.train_size :] = 255 - features[data.train_size :]
    labels[data.train_size :] = 3
    return replace(data, features=features, labels=labels)


@pytest.mark.parametrize("retrain", [False, True])
def test_the_test_set_is_used_only_for_final_networks(retrain: bool) -> None:
    trials = mixed(split=Split(retrain=retrain))
    ours = list(Fleet(blobs(), keep_parameters=True).run(trials))
    theirs = list(Fleet(with_another_test_set(blobs()), keep_parameters=True).run(trials))
    for one, other in zip(ours, theirs, strict=True):
        if retrain:
            assert one.error != other.error
            assert one.wrong != other.wrong
            other = replace(
                other, error=one.error, cross_entropy=one.cross_entropy, wrong=one.wrong
            )
        assert one == other
        torch.testing.assert_close(one.parameters, other.parameters, rtol=0, atol=0)


def test_divergence_is_not_judged_by_the_test_set() -> None:
    """Weights are large and errors around 1/10; all labels of the test set are the same."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(1000) % 2
    features = labels[:, None] - 0.5 + 0.5 * torch.randn(1000, 1, generator=generator)
    labels[100:] = 0
    data = Dataset("hard", features, labels, 100, value_range=(-1.0, 1.0))
    trial = a_trial("hard", (), k=1, learning_rate=1e6, batch_size=8, patience=30, max_epochs=30)
    (outcome,) = Fleet(data).run([trial])
    assert 0.05 <= min(outcome.curve) < max(outcome.curve) < 0.495
    assert outcome.stopped_by == "limit"


@pytest.mark.parametrize("retrain", [False, True])
def test_stratified_parts_share_the_classes_equally(retrain: bool) -> None:
    data = blobs()
    for repetition in range(6):
        cut = parts(data, Split(3, repetition, retrain), stratified=True)
        plain = parts(data, Split(3, repetition, retrain))
        roles = [cut.train, cut.stop] + ([] if retrain else [cut.judge])
        assert len(cut.train) == len(plain.train)
        assert len(torch.cat(roles).unique()) == sum(map(len, roles))
        share = data.labels[: data.train_size].bincount() / 5
        for part in roles[1:]:
            assert (data.labels[part].bincount(minlength=4) - share).abs().max() <= 1.8
        assert (data.labels[plain.stop].bincount(minlength=4) - share).abs().max() > 1.8
    first, second = (parts(data, Split(plan), stratified=True).stop for plan in (3, 4))
    assert set(first.tolist()) != set(second.tolist())


@pytest.mark.parametrize(
    ("data", "split", "message"),
    [
        (Dataset("few", torch.zeros(5, 1), torch.zeros(5).long(), 4), Split(), "'few' .* 5 train"),
        (Dataset("open", torch.zeros(5, 1), torch.zeros(5).long(), 5), RETRAIN, "'open' .* test"),
    ],
)
def test_sets_that_cannot_be_split(data: Dataset, split: Split, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parts(data, split)


# Features


@pytest.mark.parametrize("feature_range", [(-1.0, 1.0), (0.0, 1.0), (-3.0, 0.5)])
def test_features_are_scaled_to_the_range_of_the_trial(feature_range: tuple[float, float]) -> None:
    trial = replace(ONE, feature_range=feature_range)
    for data in (blobs("pixels"), blobs("numbers")):
        worker = StackWorker(Fleet(data, precision="float64"), trial, CPU, 1, 1)
        ours = worker.stack.examples.gather(torch.arange(263).reshape(1, -1), torch.float64)
        torch.testing.assert_close(ours[0], plain_loop.scaled(data, trial), **EXACT)
        assert (ours.min().item(), ours.max().item()) == pytest.approx(feature_range)
        assert worker.stack.examples.features.dtype == data.features.dtype  # pixels stay uint8


def test_gathering_leaves_the_features_alone() -> None:
    features = torch.tensor([[0.0, 1.0], [2.0, 3.0]], dtype=torch.float64)
    examples = Examples(features, torch.tensor([0, 1]), factor=2.0, offset=1.0)
    gathered = examples.gather(torch.tensor([[1], [1]]), torch.float64)
    assert gathered.tolist() == [[[5.0, 7.0]], [[5.0, 7.0]]]
    assert features.tolist() == [[0.0, 1.0], [2.0, 3.0]]


@pytest.mark.parametrize("precision", ["tf32", "float64"])
def test_the_layout_of_the_features_does_not_matter(precision: str) -> None:
    data = blobs()
    turned = replace(data, features=data.features.T.contiguous().T)
    worker = StackWorker(Fleet(turned, precision=precision), ONE, CPU, 1, 1)
    assert worker.stack.examples.features.is_contiguous()  # as the kernels assume
    ours, theirs = (list(Fleet(d, precision=precision).run([ONE])) for d in (turned, data))
    assert ours == theirs


# Best weights


@pytest.mark.parametrize("precision", ["tf32", "float32", "float64"])
@pytest.mark.parametrize("shared", [SHARED[0], SHARED[5], SHARED[6]], ids=str)
def test_best_weights_give_the_reported_error(shared: dict[str, Any], precision: str) -> None:
    fleet = Fleet(blobs(), slots=2, precision=precision, keep_parameters=True)
    for outcome in fleet.run(mixed(**shared)):
        trial, layers = outcome.trial, outcome.parameters
        assert layers is not None
        model = plain_loop.network(blobs(), trial, layers, fleet.dtype)
        x, cut = plain_loop.scaled(blobs(), trial, fleet.dtype), parts(blobs(), trial.split)
        for part, error in ((cut.stop, outcome.stop_error), (cut.judge, outcome.error)):
            found, value = plain_loop.error_and_cross_entropy(model, x[part], blobs().labels[part])
            assert found == error
        tolerance = 1e-10 if precision == "float64" else 1e-5
        assert value == pytest.approx(outcome.cross_entropy, rel=tolerance)
        assert outcome.stop_error == min(outcome.curve)
        lowest = [at for at, error in enumerate(outcome.curve, 1) if error == outcome.stop_error]
        assert outcome.best_epoch == lowest[-1 if recipe_of(trial).ties == "last" else 0]


def test_weights_come_on_request_only() -> None:
    (outcome,) = Fleet(blobs()).run([ONE])
    assert outcome.parameters is None


# Memory


def out_of_memory_beyond(
    limit: int, monkeypatch: pytest.MonkeyPatch, at: str, after: int = 0
) -> list[int]:
    """Make `Stack`'s method ``at`` fail for more models than the limit, from a given call on."""
    sizes: list[int] = []
    original = getattr(Stack, at)

    def limited(stack: Stack, *arguments: Any, **named: Any) -> Any:
        result = original(stack, *arguments, **named)
        sizes.append(len(stack.weights[0]))
        if sizes[-1] > limit and len(sizes) > after:
            raise torch.OutOfMemoryError("simulated")
        return result

    monkeypatch.setattr(Stack, at, limited)
    return sizes


@pytest.mark.parametrize("after", [0, 3, 9])
@pytest.mark.parametrize("at", ["__init__", "start", "train", "evaluate"])
def test_out_of_memory_halves_the_slots(
    at: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = mixed()
    sizes = out_of_memory_beyond(2, monkeypatch, at, after)
    outcomes = list(Fleet(blobs(), slots=6, precision="float64").run(trials))
    assert len(outcomes) == len(trials)
    assert {outcome.trial for outcome in outcomes} == set(trials)
    for outcome in outcomes:
        assert_same(outcome, plain(outcome.trial).outcome)
    assert sizes[0] == 6
    if after == 0:
        assert [size for size in sizes if size > 2] == [6, 3]
    else:
        assert max(sizes[after + 2 :], default=0) <= 2


@pytest.mark.parametrize(("at", "call"), [("evaluate", 2), ("best_of", 3)])
def test_out_of_memory_while_judging_loses_no_trial(
    at: str, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among trials of two kinds that end in the same epoch, evaluated one kind after the other."""
    trials = [replace(ONE, seed=s, split=Split(test=s % 2 == 1), max_epochs=2) for s in range(4)]
    expected = {outcome.trial: outcome for outcome in Fleet(blobs()).run(trials)}
    calls: list[int] = []
    original = getattr(Stack, at)

    def limited(stack: Stack, *arguments: Any) -> Any:
        if at == "best_of" or len(arguments) == 2:  # the best versions, for the final evaluation
            calls.append(len(stack.weights[0]))
            if len(calls) == call:
                raise torch.OutOfMemoryError("simulated")
        return original(stack, *arguments)

    monkeypatch.setattr(Stack, at, limited)
    outcomes = list(Fleet(blobs(), slots=4, keep_parameters=True).run(trials))
    assert calls[: call + 1] == [4] * call + [2]
    assert len(outcomes) == 4
    assert {outcome.trial: outcome for outcome in outcomes} == expected


def test_out_of_memory_while_the_slots_become_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copying the last network out of a stack of two takes memory for a third."""
    trials = [replace(ONE, seed=seed, max_epochs=2 * seed + 1) for seed in range(2)]
    expected = {outcome.trial: outcome for outcome in Fleet(blobs()).run(trials)}
    original, calls = Stack.select, []

    def limited(stack: Stack, models: Tensor) -> None:
        calls.append(len(models))
        if len(calls) == 1:
            raise torch.OutOfMemoryError("simulated")
        original(stack, models)

    monkeypatch.setattr(Stack, "select", limited)
    found = {outcome.trial: outcome for outcome in Fleet(blobs(), slots=2).run(trials)}
    assert calls[0] == 1
    assert found == expected


@pytest.mark.parametrize("at", ["__init__", "train"])
def test_halving_starts_from_the_slots_in_use(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = out_of_memory_beyond(1, monkeypatch, at)
    trials = [replace(ONE, seed=seed, max_epochs=1) for seed in range(4)]
    assert len(list(Fleet(blobs(), slots=500).run(trials))) == 4
    assert sizes[:3] == [4, 2, 1]


@pytest.mark.parametrize("at", ["__init__", "train"])
def test_too_little_memory_for_one_model(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = out_of_memory_beyond(0, monkeypatch, at)
    with pytest.raises(torch.OutOfMemoryError, match="simulated"):
        list(Fleet(blobs(), slots=4).run(mixed()))
    assert sizes == [4, 2, 1]


def test_memory_is_freed_before_the_next_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: weakref.WeakSet[Stack] = weakref.WeakSet()
    left: list[int] = []
    init = Stack.__init__
    gc.collect()

    def counted(stack: Stack, *arguments: Any, **named: Any) -> None:
        alive.add(stack)
        init(stack, *arguments, **named)

    monkeypatch.setattr(Stack, "__init__", counted)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: left.append(len(alive)))
    out_of_memory_beyond(2, monkeypatch, "train")
    gc.disable()
    try:
        assert len(list(Fleet(blobs(), slots=6).run(mixed()))) == len(mixed())
        assert left == [0, 0]
        assert len(alive) == 0
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("cached", "memory", "slots"),
    [(0, 1, 16), (5 * 10**9, 1, 101), (10**12, 1, 256), (5 * 10**9, 0.003, 50), (0, 0.003, 16)],
)
def test_slots_are_planned_from_free_memory(
    cached: int, memory: float, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here 10^9 of 10^12 bytes plus PyTorch's unused cache, at 53 million per trial."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10**9, 10**12))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: cached + 7)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 7)
    recipe = recipe_of(replace(ONE, hidden_layer_sizes=(1400, 1400), batch_size=128))
    fleet = Fleet(blobs(), memory=memory)
    assert fleet._planned_slots(recipe, torch.device("cuda")) == slots


def test_initial_weights_are_the_same_drawn_together_or_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    examples = Examples(torch.zeros(4, 20), torch.zeros(4, dtype=torch.int64), 1.0, 0.0)
    found = []
    for at_once in (1, 700, 1 << 25):
        monkeypatch.setattr("pseudograd.fleet.mlp.stack._DRAWN_AT_ONCE", at_once)
        stack = Stack(examples, (20, 16, 16, 3), "relu", "sgd", models=6)
        stack.start(torch.tensor([5, 0, 3, 1, 4]), torch.arange(5))
        found.append(stack.current.flat)
    assert found[0][2].eq(0).all()
    assert found[0][0].ne(0).any()
    assert found[0].equal(found[1])
    assert found[0].equal(found[2])


# Running


def test_outcomes_come_as_they_end() -> None:
    trials = [replace(ONE, max_epochs=limit, patience=99) for limit in (9, 1, 5)]
    epochs = [outcome.epochs for outcome in Fleet(blobs(), slots=3).run(trials)]
    assert epochs == [1, 5, 9]


def test_an_iteration_may_be_closed_early() -> None:
    fleet = Fleet(blobs(), slots=2)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")  # not the fleet's precision
    try:
        running = iter(fleet.run(mixed()))
        next(running)
        running.close()  # type: ignore[attr-defined]
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert list(running) == []
    assert len(list(fleet.run(mixed()))) == len(mixed())


@pytest.mark.parametrize("precision", ["tf32", "float32", "float64"])
@pytest.mark.parametrize("ambient", ["highest", "high", "medium"])
def test_products_are_as_precise_as_asked_for(
    precision: str, ambient: str, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In training and evaluation, whatever PyTorch's setting, which is restored.

    On a CPU rounding saves no time, so every precision is full there.
    """
    seen: set[tuple[str, str]] = set()
    for name in ("train", "evaluate"):
        original = getattr(Stack, name)

        def noted(
            stack: Stack, *arguments: Any, _original: Any = original, _name: str = name
        ) -> Any:
            seen.add((_name, torch.get_float32_matmul_precision()))
            return _original(stack, *arguments)

        monkeypatch.setattr(Stack, name, noted)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(ambient)
    try:
        assert len(list(Fleet(blobs(), precision=precision).run([ONE]))) == 1
        assert torch.get_float32_matmul_precision() == ambient
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == {("train", "highest"), ("evaluate", "highest")}


@pytest.mark.parametrize("first", [True, False])
def test_concurrent_fleets_use_the_stricter_precision(
    first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of products and convolutions, for any order of starting and finishing."""
    ambient, names = torch.get_float32_matmul_precision(), {True: "high", False: "highest"}
    cudnn = SimpleNamespace(
        allow_tf32=True,
        conv=SimpleNamespace(fp32_precision="tf32"),
        rnn=SimpleNamespace(fp32_precision="tf32"),
    )
    monkeypatch.setattr(torch.backends, "cudnn", cudnn)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def now() -> tuple[str, bool]:
        return torch.get_float32_matmul_precision(), cudnn.allow_tf32

    precision = Precision()
    torch.set_float32_matmul_precision("medium")
    try:
        outer, inner = precision(tf32=first), precision(tf32=not first)
        with outer:
            assert now() == (names[first], first)
            with inner:
                assert now() == ("highest", False)
            assert now() == (names[first], first)
        assert now() == ("medium", True)
        outer, inner = precision(tf32=first), precision(tf32=not first)
        outer.__enter__()
        inner.__enter__()
        outer.__exit__(None, None, None)
        assert now() == (names[not first], not first)
        inner.__exit__(None, None, None)
        assert now() == ("medium", True)
    finally:
        torch.set_float32_matmul_precision(ambient)


def test_a_precision_of_each_backend_is_left_as_it_was() -> None:
    """PyTorch refuses to say the precision of products if the backends' settings have no name."""
    before = torch.get_float32_matmul_precision()
    flags: Any = torch.backends
    backends = flags.cuda.matmul, flags.mkldnn.matmul
    torch.set_float32_matmul_precision("medium")
    torch.backends.cuda.matmul.allow_tf32 = True
    ambient = [one.fp32_precision for one in backends]
    try:
        with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
            torch.get_float32_matmul_precision()
        assert len(list(Fleet(blobs()).run([ONE]))) == 1
        assert [one.fp32_precision for one in backends] == ambient
    finally:
        torch.set_float32_matmul_precision(before)


def test_several_workers_give_what_one_gives() -> None:
    """On the CPU each of PyTorch's threads is a worker; its settings are restored at the end."""
    trials = mixed()
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    try:
        torch.set_num_threads(1)
        alone = {o.trial: o for o in Fleet(blobs(), slots=2, precision="float64").run(trials)}
        torch.set_num_threads(3)
        fleet = Fleet(blobs(), slots=2, precision="float64")
        together = {o.trial: o for o in fleet.run(trials)}
        assert torch.get_num_threads() == 3
        assert torch.get_float32_matmul_precision() == precision
        running = iter(fleet.run(trials))
        next(running)
        running.close()  # type: ignore[attr-defined]
        assert torch.get_num_threads() == 3
        assert not [t for t in threading.enumerate() if t.daemon and "fleet" in t.name]
    finally:
        torch.set_num_threads(threads)
    assert set(together) == set(alone) == set(trials)
    for trial, outcome in together.items():
        assert outcome.curve == alone[trial].curve
        assert outcome.cross_entropy == pytest.approx(alone[trial].cross_entropy, nan_ok=True)


def test_trials_may_be_added_to_the_queue() -> None:
    """More trials are added as outcomes arrive; in threads, a fleet may finish before that."""
    trials = [replace(ONE, seed=seed, max_epochs=3) for seed in range(20)]
    queue, later, found = deque(trials[:2]), deque(trials[2:]), {}
    while queue or later:
        queue = queue or deque([later.popleft()])
        for outcome in Fleet(blobs()).run(queue):
            found[outcome.trial] = outcome
            queue.extend(later.popleft() for _ in range(min(5, len(later))))
    assert found == {outcome.trial: outcome for outcome in Fleet(blobs()).run(trials)}


def test_slots_follow_the_work() -> None:
    trials = [replace(ONE, seed=seed, max_epochs=1 + seed % 5) for seed in range(40)]
    expected = {outcome.trial: outcome for outcome in Fleet(blobs()).run(trials)}
    queue, later, found, slots = deque(trials[:2]), deque(trials[2:]), {}, []
    worker = StackWorker(Fleet(blobs()), ONE, CPU, 2, 16)
    for outcome in worker.through(queue, never):
        found[outcome.trial] = outcome
        slots.append(len(worker.runs))
        queue.extend(later.popleft() for _ in range(min(4, len(later))))
    assert found == expected
    assert slots[0] == 2
    assert max(slots) == 16
    assert slots[-1] < 8


def test_added_trials_must_share_the_architecture() -> None:
    queue = deque([ONE])
    outcomes = StackWorker(Fleet(blobs()), ONE, CPU, 1, 1).through(queue, never)
    next(outcomes)
    queue.append(replace(ONE, hidden_layer_sizes=(3,)))
    with pytest.raises(ValueError, match="trials of one fleet must share"):
        next(outcomes)


@covering(
    batch_size=[16, 29],
    activation=["relu", "tanh", "sigmoid"],
    hidden=[(), (9,), (17, 9), (32,), (5, 11, 3)],
)
def test_outcomes_do_not_depend_on_other_trials_to_the_last_bit(
    hidden: tuple[int, ...], activation: str, batch_size: int
) -> None:
    """Even in single precision, where different rounding would grow into different errors."""
    one = replace(
        ONE, hidden_layer_sizes=hidden, activation=activation, batch_size=batch_size, max_epochs=5
    )
    trials = [replace(one, seed=seed, k=k) for seed in range(4) for k in (0.5, 2)]

    def outcomes(threads: int, slots: int, trials: list[Trial]) -> dict[Trial, Any]:
        torch.set_num_threads(threads)
        fleet = Fleet(blobs(), slots=slots, keep_parameters=True)
        return {
            o.trial: (o.curve, o.error, o.cross_entropy, o.parameters and o.parameters[0][0].sum())
            for o in fleet.run(trials)
        }

    threads = torch.get_num_threads()
    try:
        expected = outcomes(1, 1, trials)
        assert outcomes(1, 3, trials[::-1]) == expected
        assert outcomes(1, 8, trials) == expected
        assert outcomes(2, 2, trials) == expected
        assert outcomes(2, 2, trials[3:4]) == {trials[3]: expected[trials[3]]}
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("weighted", [False, True])
def test_evaluations_do_not_depend_on_other_networks_to_the_last_bit(
    weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs in parts; the more networks, the more parts."""
    monkeypatch.setattr("pseudograd.fleet.mlp.stack._EVALUATED_AT_ONCE", 2048)
    data = blobs("numbers")
    weights = torch.linspace(0.5, 1.5, 263, dtype=torch.float64) if weighted else None
    examples = Examples(data.features.float(), data.labels, 1.0, 0.0, weights)
    stack = Stack(examples, (12, 9, 4), "relu", "sgd", models=8)
    models = torch.arange(8)
    stack.start(models, models)
    stack.weights[-1].copy_(randomness.glorot_uniform(models, 1, 9, 4))
    stack.keep(models)
    index = (torch.arange(1000) * 7 % 263).expand(8, -1)
    errors, values = stack.evaluate(index, models)
    for model in models.split(1):
        error, value = stack.evaluate(index[:1], model)
        assert torch.equal(error, errors[model])
        assert torch.equal(value, values[model])


def test_several_devices_give_what_one_gives() -> None:
    """Two names of the CPU stand in for two devices, which share the trials."""
    used = set()
    both = threading.Barrier(2)

    class Watched(Fleet):
        def _work(self, first: Trial, device: torch.device, *rest: Any) -> Iterator[Outcome]:
            for outcome in super()._work(first, device, *rest):
                if str(device) not in used:
                    used.add(str(device))
                    both.wait(60)  # so that neither does all the work
                yield outcome

    trials = mixed()
    alone = {o.trial: o for o in Fleet(blobs(), slots=2, precision="float64").run(trials)}
    fleet = Watched(blobs(), ["cpu", "cpu:0"], slots=2, precision="float64")
    together = {o.trial: o for o in fleet.run(trials)}
    assert used == {"cpu", "cpu:0"}
    assert set(together) == set(alone) == set(trials)
    assert all(together[trial].curve == alone[trial].curve for trial in trials)


def test_a_fleet_without_a_device_is_refused() -> None:
    with pytest.raises(ValueError, match="device must name at least one"):
        Fleet(blobs(), [])


def test_a_failing_worker_fails_the_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(stack: Stack, *arguments: Any) -> None:
        raise ZeroDivisionError("broken on purpose")

    threads = torch.get_num_threads()
    monkeypatch.setattr(Stack, "train", broken)
    torch.set_num_threads(2)
    try:
        with pytest.raises(ZeroDivisionError, match="on purpose"):
            list(Fleet(blobs(), slots=2).run(mixed()))
    finally:
        torch.set_num_threads(threads)


class Interrupted(queue.SimpleQueue[Any]):
    """A queue whose first reader is interrupted, as by Ctrl-C."""

    seen = False

    def get(self, *arguments: Any, **options: Any) -> Any:
        if not self.seen:
            self.seen = True
            raise KeyboardInterrupt
        return super().get(*arguments, **options)


@pytest.mark.parametrize("failure", [ZeroDivisionError, KeyboardInterrupt])
def test_trials_that_end_while_workers_stop_are_yielded(
    failure: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = list(Fleet(blobs(), slots=2).run(mixed()[:2]))

    def breaks(stop: Stop) -> Iterator[Outcome]:
        yield first
        if failure is ZeroDivisionError:
            raise failure

    def is_within_an_epoch(stop: Stop) -> Iterator[Outcome]:
        deadline = time.monotonic() + 60
        while not stop():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield second

    if failure is KeyboardInterrupt:
        monkeypatch.setattr(queue, "SimpleQueue", Interrupted)
    given: list[Outcome] = []
    with pytest.raises(failure):
        given.extend(side_by_side([breaks, is_within_an_epoch], never))  # until it raises
    assert set(given) == {first, second}


def test_numpy_scalars_become_python_numbers() -> None:
    """Otherwise trials could not be written to a ledger after training."""
    of_split: dict[str, Any] = {"plan": np.int64(3), "repetition": np.int32(1)}
    sizes: Any = (np.int64(8), 4)
    numbers: dict[str, Any] = {"k": np.float32(0.5), "learning_rate": np.array(0.1)}
    split = Split(**of_split)
    trial = a_trial("blobs", sizes, **numbers, split=split)
    assert trial == a_trial("blobs", (8, 4), 0.5, 0.1, split=Split(3, 1))
    values = [*vars(trial).values(), *vars(split).values(), *recipe_of(trial).hidden_layer_sizes]
    assert not any(isinstance(value, np.generic | np.ndarray) for value in values)


def test_no_trials_no_outcomes() -> None:
    assert list(Fleet(blobs()).run([])) == []
    assert list(Fleet(blobs()).run(iter(()))) == []


def test_trials_of_different_architectures(subtests: pytest.Subtests) -> None:
    cases: list[tuple[str, Any]] = [
        ("data", "other"),
        ("hidden_layer_sizes", (9, 9)),
        ("optimizer", "adam"),
        ("activation", "tanh"),
        ("feature_range", (0.0, 1.0)),
        ("batch_size", 31),
        ("clip", 1.0),
        ("schedule", "cosine"),
        ("bins", 4),
        ("sample", 50),
        ("stratified", True),
        ("rule", "focal"),
        ("split", RETRAIN),
        ("split", BAGGED),
    ]
    for field, value in cases:
        with subtests.test(field=field):
            name = {"clip": "whether they clip", "split": "retrain and are bagged"}.get(
                field, field
            )
            with pytest.raises(ValueError, match=re.escape(name)) as caught:
                list(Fleet(blobs()).run([ONE, ONE, replace(ONE, **{field: value})]))
            assert repr(value) in str(caught.value)


def test_a_fleet_stops_on_request() -> None:
    """It stops after an epoch: finished trials are yielded, the others dropped."""
    short, long = replace(ONE, max_epochs=1), replace(ONE, max_epochs=10**6, patience=10**6)
    found, told = [], threading.Event()
    for outcome in Fleet(blobs()).run([short, long], stop=told.is_set):
        found.append(outcome.trial)
        told.set()
    assert found == [short]


def test_data_of_another_hash() -> None:
    mine = replace(ONE, data_hash=blobs().sha256[:16])
    assert len(list(Fleet(blobs()).run([mine]))) == 1
    with pytest.raises(ValueError, match="a hash that begins with 0000000000000000"):
        list(Fleet(blobs()).run([replace(ONE, data_hash="0" * 16)]))


def test_trials_of_another_data_set() -> None:
    with pytest.raises(ValueError, match="data 'digits', but the fleet has 'blobs'"):
        list(Fleet(blobs()).run([replace(ONE, data="digits")]))


NAN, INF = math.nan, math.inf
BAD: list[tuple[str, Any]] = [
    *(("hidden_layer_sizes", value) for value in ((0,), (5, -1), 5, [5], (2.5,))),
    *(("k", value) for value in (0, -1, NAN, INF, 1e300, 1e-200, "1", None)),
    *(("learning_rate", value) for value in (0, -0.1, NAN, INF, "0.1")),
    *(("momentum", value) for value in (-0.1, 1, NAN, "0.5")),
    *(("optimizer", value) for value in ("SGD", "adamw", "")),
    *(("activation", value) for value in ("gelu", None)),
    *(("feature_range", value) for value in ((1.0, -1.0), (0.0, 0.0), (0.0, INF), (NAN, 1.0))),
    ("feature_range", ("0", "1")),
    *(("feature_range", value) for value in ((-1, 0, 1), (1.0,), [-1.0, 1.0], 1.0)),
    *(("batch_size", value) for value in (0, -128, 32.5, NAN)),
    *(("clip", value) for value in (0, -1.0, NAN, INF, "1")),
    *(("ties", value) for value in ("lowest", None)),
    *(("weight_decay", value) for value in (-0.1, NAN, INF, "0.1", 0.1)),  # the last for "sgd"
    *(("schedule", value) for value in ("linear", None)),
    *(("stop_by", value) for value in ("loss", None)),
    *((name, value) for name in ("bins", "sample") for value in (-1, 1.5, None)),
    *(("patience", value) for value in (0, -1, 1.5, INF)),
    *(("max_epochs", value) for value in (0, -1, 1.5, INF)),
    *(("rule", value) for value in ("cross-entropy", "no_module:focal", "math:sin")),
    *(("seed", value) for value in (2**63, -(2**63) - 1, 0.5)),
]


def test_a_bad_trial_is_refused(subtests: pytest.Subtests) -> None:
    for field, value in BAD:
        with (
            subtests.test(field=field),
            pytest.raises(ValueError, match=f"^{field} must be .*, not {re.escape(repr(value))}$"),
        ):
            replace(ONE, **{field: value})


def test_a_bad_split_is_refused(subtests: pytest.Subtests) -> None:
    cases: list[tuple[str, Any]] = [
        *(("repetition", value) for value in (-1, 1.5, 20 * 2**31)),
        *(("plan", value) for value in (-1, 2**32, 0.5)),
    ]
    for field, value in cases:
        said = f"^{field} must be .*, not {value}$"
        with subtests.test(field=field, value=value), pytest.raises(ValueError, match=said):
            replace(Split(), **{field: value})


@pytest.mark.parametrize("other", ["retrain", "test"])
def test_bagging_has_its_own_folds(other: str) -> None:
    with pytest.raises(ValueError, match="bagged must be left out with test or retrain"):
        replace(BAGGED, **{other: True})


def test_weight_decay_is_adams() -> None:
    with pytest.raises(ValueError, match=r"^weight_decay must be 0 for optimizers other than"):
        replace(ONE, weight_decay=0.1, optimizer="rmsprop")
    assert recipe_of(replace(ONE, weight_decay=1, optimizer="adam")).fields()["weight_decay"] == 1.0


def test_the_last_split_there_is() -> None:
    cut = parts(blobs(), Split(plan=2**32 - 1, repetition=20 * 2**31 - 1))
    assert len(torch.cat((cut.train, cut.stop, cut.judge)).unique()) == 210


def test_a_bad_fleet_is_refused(subtests: pytest.Subtests) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"precision": "fp8"}, "precision must be one of .* not 'fp8'"),
        ({"slots": 0}, "slots must be a whole number above 0, not 0"),
        ({"memory": 0}, "memory must be above 0 and at most 1, not 0"),
        ({"memory": 1.5}, "memory must be above 0 and at most 1, not 1.5"),
    ]
    for arguments, message in cases:
        with subtests.test(message=message), pytest.raises(ValueError, match=message):
            Fleet(blobs(), **arguments)


def test_a_bad_data_set_is_refused(subtests: pytest.Subtests) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"features": torch.zeros(263)}, r"features must .* got \(263,\)"),
        ({"features": torch.zeros(262, 12)}, r"features must .* got \(262, 12\) for 263 labels"),
        ({"train_size": 0}, r"train_size must lie in \[1, 263\], not 0"),
        ({"train_size": 264}, "train_size must"),
        ({"value_range": (1.0, 1.0)}, "value_range must"),
        ({"value_range": (0.0, NAN)}, "value_range must"),
        ({"labels": torch.zeros(263)}, "labels must be .* int64"),
        ({"labels": torch.full((263,), -1)}, "labels must be .* from 0"),
    ]
    for arguments, message in cases:
        with subtests.test(message=message), pytest.raises(ValueError, match=message):
            replace(blobs(), **arguments)


def test_the_digits_learn() -> None:
    """A full training in float32: an error of about 3% on validation and test set."""
    trials = [
        a_trial("digits", (64,), k, 0.1, Split(0, seed, retrain), seed, momentum=0.9, patience=5)
        for retrain in (False, True)
        for k in (0.5, 1.0)
        for seed in range(2)
    ]
    for half in (trials[:4], trials[4:]):
        for outcome in Fleet(digits()).run(half):
            assert outcome.stopped_by == "patience"
            assert outcome.error < 0.08
