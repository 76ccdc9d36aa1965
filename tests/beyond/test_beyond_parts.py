"""The parts of the studies beyond the paper: noise, methods, the search, measures, verdicts."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from beyond import arrays, findings, noise, sequences
from beyond.findings import (
    Compared,
    Line,
    compared,
    corrected,
    judged,
    minimum,
    noise_claims,
    table,
)
from beyond.measures import all_measures, measured, temperature
from beyond.methods import ALL_KS, CONFIGURATIONS, METHODS, NORMALIZED
from beyond.networks import CNN8, MLP, ResNet, flip_and_shift, shift
from beyond.protocol import MethodProtocol
from beyond.questions import ORDER, SETTINGS, experiments
from pseudograd import rules
from pseudograd.fleet import Outcome, OwnRecipe, Ramp, Trial
from pseudograd.search import Difference, paired_difference
from pseudograd.search.measures import expected_calibration_error, log_loss

CLEAN = np.arange(5000) % 10


# --- noise ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.2, 0.4, 0.6])
def test_symmetric_noise_never_draws_the_true_class(share: float) -> None:
    noisy = noise.symmetric(CLEAN, share, 10)
    assert (noisy != CLEAN).mean() == share
    moved = (noisy - CLEAN)[noisy != CLEAN] % 10
    counts = np.bincount(moved, minlength=10)[1:]
    assert counts.min() > 0.8 * counts.mean()  # uniform over the other classes
    assert np.array_equal(noisy, noise.symmetric(CLEAN, share, 10))
    assert not np.array_equal(noisy, noise.symmetric(CLEAN, share, 10, seed=1))


def test_asymmetric_noise_is_the_usual_map() -> None:
    noisy = noise.asymmetric(CLEAN, 0.4)
    likes = {9: 1, 2: 0, 4: 7, 3: 5, 5: 3}
    for one in range(10):
        found = set(noisy[one == CLEAN].tolist())
        assert found == ({one, likes[one]} if one in likes else {one})
    assert (noisy != CLEAN)[CLEAN == 3].mean() == 0.4
    assert (noisy != CLEAN).mean() == 0.2


def test_human_labels_come_from_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PSEUDOGRAD_CIFAR_N", raising=False)
    with pytest.raises(ValueError, match=r"^give the folder with cifar10-worst.npy"):
        noise.human("worst", CLEAN)
    np.save(tmp_path / "cifar10-worst.npy", CLEAN[::-1].astype(np.uint8))
    assert np.array_equal(noise.human("worst", CLEAN, tmp_path), CLEAN[::-1])
    monkeypatch.setenv("PSEUDOGRAD_CIFAR_N", str(tmp_path))
    assert np.array_equal(noise.human("worst", CLEAN), CLEAN[::-1])
    with pytest.raises(ValueError, match=r"must hold a label for each of the 10 training images"):
        noise.human("worst", CLEAN[:10])


# --- methods and networks ------------------------------------------------------------------------


def test_every_method_gets_the_same_number_of_configurations() -> None:
    for method in METHODS.values():
        assert len(method.values) * len(method.rates(0.4)) == CONFIGURATIONS
    for setting in SETTINGS:
        counts = {
            len(method.values) * len(setting.rates or method.rates(setting.middle))
            for method in setting.methods
        }
        assert len(counts) == 1, setting.name
    rates = METHODS["ce"].rates(0.4)
    assert rates[0] < 0.2 < 0.8 < rates[-1]


def test_a_rescaled_rule_pushes_a_batch_as_hard_as_cross_entropy() -> None:
    logits, y = torch.randn(50, 4), torch.randint(4, (50,))
    assert NORMALIZED.rule is not None
    for k in NORMALIZED.values:
        assert not isinstance(k, Ramp)
        f = NORMALIZED.rule(k)(logits, y)
        plain = rules.cross_entropy(logits, y)
        own = y.unsqueeze(1)
        torch.testing.assert_close(f.gather(1, own).sum(), plain.gather(1, own).sum())
        assert isinstance(k, float)
        one = rules.tunable(logits, y, k)
        torch.testing.assert_close(f / f.norm(), one / one.norm())


@pytest.mark.parametrize("name", METHODS)
def test_rules_of_the_methods_take_their_parameter_as_a_tensor(name: str) -> None:
    method = METHODS[name]
    if method.rule is None:
        return
    logits, y = torch.randn(6, 4), torch.randint(4, (6,))
    for value in method.values:
        f = method.rule(torch.tensor(value))(logits, y)
        torch.testing.assert_close(f, method.rule(value)(logits, y))
        assert float(f.sum(1).abs().max()) < 1e-5


def test_networks_have_the_sizes_of_the_plan() -> None:
    def size(module: torch.nn.Module) -> int:
        return sum(one.numel() for one in module.parameters())

    assert round(size(ResNet()) / 1e6, 1) == 6.6
    assert round(size(ResNet(width=32)) / 1e6, 1) == 1.6
    assert [type(one).__name__ for one in CNN8().modules()].count("Conv2d") == 6
    assert CNN8()(torch.rand(2, 3, 32, 32)).shape == (2, 10)
    assert MLP(layers=5)(torch.rand(2, 3, 32, 32)).shape == (2, 10)


def test_images_are_flipped_and_shifted() -> None:
    x = torch.arange(32.0).repeat(64, 3, 32, 1)  # each column holds its index
    rising = shift(x)[:, 0, 0]
    starts = rising[:, 4] - 4
    assert starts.min() < 0 < starts.max()
    assert starts.abs().max() <= 4
    flipped = flip_and_shift(x)[:, 0, 0]
    assert 10 < int((flipped[:, 20] < flipped[:, 10]).sum()) < 54


# --- the search ----------------------------------------------------------------------------------


def told(protocol: MethodProtocol, error: dict[tuple[float, float], float]) -> dict[Trial, Outcome]:
    """Run the search with the errors in a table, 0.9 elsewhere."""
    outcomes: dict[Trial, Outcome] = {}
    while wanted := protocol.wanted(outcomes):
        for trial in wanted:
            found = error.get((trial.k, trial.learning_rate), 0.9)  # type: ignore[arg-type]
            outcomes[trial] = Outcome(trial, found, 1, found, 1.0, 1, "limit", (found,))
    return outcomes


def test_rates_are_extended_only_where_the_best_configuration_is_on_an_edge() -> None:
    protocol = MethodProtocol(
        OwnRecipe("a"), ks=(0.5, 2.0), learning_rates=(0.2, 0.4, 0.8), stops=True
    )
    errors = {(0.5, 0.2): 0.5, (2.0, 0.8): 0.4, (2.0, 1.6): 0.3, (2.0, 3.2): 0.35}
    outcomes = told(protocol, errors)
    assert protocol.searched(outcomes) == {0.5: [0.2, 0.4, 0.8], 2.0: [0.2, 0.4, 0.8, 1.6, 3.2]}
    assert protocol.chosen_cells(outcomes) == [(2.0, 1.6)]
    searched = [trial for trial in outcomes if not trial.split.retrain]
    finals = [trial for trial in outcomes if trial.split.retrain]
    assert all(trial.split.bagged for trial in searched)
    assert len(finals) == 5
    assert not {trial.seed for trial in finals} & {trial.seed for trial in searched}


def test_rates_are_extended_three_times_at_most() -> None:
    protocol = MethodProtocol(OwnRecipe("a"), ks=(1.0,), learning_rates=(1.0, 2.0))
    outcomes = told(protocol, {(1.0, 2.0**power): 0.5 - 0.01 * power for power in range(9)})
    assert protocol.searched(outcomes)[1.0] == [1.0, 2.0, 4.0, 8.0, 16.0]


def test_a_single_given_configuration_is_not_searched() -> None:
    protocol = MethodProtocol(
        OwnRecipe("a"), ks=(0.7,), learning_rates=(0.01,), most_extensions=0, retrainings=3
    )
    outcomes = told(protocol, {})
    assert [trial.split.retrain for trial in outcomes] == [True] * 3


def test_each_value_may_have_its_own_final_networks() -> None:
    protocol = MethodProtocol(
        OwnRecipe("a"), ks=(0.5, 2.0), learning_rates=(0.2, 0.4), each=True, retrainings=2
    )
    outcomes = told(protocol, {(0.5, 0.2): 0.2, (0.5, 0.1): 0.3, (2.0, 0.4): 0.2})
    assert protocol.chosen_cells(outcomes) == [(0.5, 0.2), (2.0, 0.4)]


def test_names_are_unique_and_in_the_order_of_the_plan() -> None:
    names = [one.name for one in experiments()]
    assert len(set(names)) == len(names)
    questions = [name[0] for name in names]
    assert sorted(questions, key=ORDER.index) == questions
    assert {one.name for one in experiments("5", "5/anchor/*")} < set(names)
    plan = Path(__file__).parents[2].joinpath("beyond/PLAN.md").read_text(encoding="utf-8")
    assert all(f"`{method}`" in plan for method in METHODS)
    assert all(
        f"`{one.name}`" in plan for one in SETTINGS if one.data == one.name and one.question == "5"
    )


def test_losses_of_the_anchor_have_their_published_size() -> None:
    z, y = torch.randn(6, 10, dtype=torch.float64), torch.arange(6)
    for name in ("sce", "nce-rce"):
        (one,) = experiments("5", f"5/anchor/{name}")
        assert one.method.rule is not None
        f = one.method.rule(one.method.values[0])(z, y)
        leaf = z.clone().requires_grad_()
        logs = leaf.log_softmax(1)
        of_label = logs.gather(1, y.unsqueeze(1)).squeeze(1)
        reverse = 9.21 * (1 - of_label.exp())
        forward = -0.1 * of_label if name == "sce" else of_label / logs.sum(1)
        (gradient,) = torch.autograd.grad((forward + reverse).sum(), leaf)
        torch.testing.assert_close(f, gradient)


# --- measures ------------------------------------------------------------------------------------


def test_measures_agree_with_those_of_the_library() -> None:
    logits, labels = 3 * torch.randn(400, 5, dtype=torch.float64), torch.randint(5, (400,))
    log_p = logits.log_softmax(1)
    found = measured(log_p, labels)
    p, y = log_p.exp().numpy(), labels.numpy()
    assert found["cross_entropy"] == pytest.approx(log_loss(p, y))
    assert found["ece"] == pytest.approx(expected_calibration_error(p, y))
    assert found["error"] == pytest.approx((p.argmax(1) != y).mean())


def test_a_temperature_undoes_a_factor_of_the_logits() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(5_000, 5, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)
    assert temperature(4 * logits, labels) == pytest.approx(4, rel=0.1)
    log_p = (4 * logits).log_softmax(1)
    found = all_measures(log_p, labels, (log_p, labels))
    assert found["ece"] > 0.1 > 0.02 > found["ece_scaled"]
    assert found["cross_entropy_scaled"] < found["cross_entropy"]


# --- probabilities of networks -------------------------------------------------------------------


def test_scores_of_labels_are_those_of_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    generator = np.random.default_rng(0)
    score = generator.normal(size=500).round(1)  # with ties
    positive = generator.random(500) < 0.3
    assert arrays.auroc(score, positive) == pytest.approx(metrics.roc_auc_score(positive, score))
    distinct = generator.normal(size=500)
    assert arrays.average_precision(distinct, positive) == pytest.approx(
        metrics.average_precision_score(positive, distinct)
    )


def test_a_mixed_ensemble_takes_one_network_of_each_kind() -> None:
    labels = np.array([0, 1])
    right, wrong = np.eye(2), 0.9 * np.eye(2)[::-1]
    always = [[right] * 4, [right] * 4, [wrong] * 4]
    assert arrays.ensemble_errors(always, labels) == {"error": 0.0, "without": [0.0] * 4}
    # Seed 1 of the first kind is wrong, too: in three of four subsets, at one of three places.
    once = arrays.ensemble_errors([[right, wrong, right, right], [right] * 4, [wrong] * 4], labels)
    assert once["error"] == pytest.approx(0.25)
    assert once["without"] == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3])


def test_the_jackknife_of_a_mean_is_its_standard_error() -> None:
    values = np.array([0.1, 0.2, 0.4, 0.3])
    without = [float(np.delete(values, at).mean()) for at in range(4)]
    zero = {"error": 0.0, "without": [0.0] * 4}
    mean, error = arrays.jackknife({"error": float(values.mean()), "without": without}, zero)
    assert mean == pytest.approx(0.25)
    assert error == pytest.approx(values.std(ddof=1) / 2)


# --- sequences -----------------------------------------------------------------------------------


def test_frames_of_a_tone_are_loud_in_its_band() -> None:
    time = np.arange(4000) / sequences.RATE
    tones = [
        (2**14 * np.sin(2 * np.pi * pitch * np.minimum(time, 0.25) ** 1.2)).astype(np.int16)
        for pitch in (300, 3000)
    ]
    low, high = sequences.log_mel(tones)
    assert low.shape == (sequences.FRAMES, sequences.BANDS)
    assert np.abs(low[45:]).max() == 0  # after the end
    assert low[10].argmax() < high[10].argmax()
    moved = sequences.shift_speech(torch.from_numpy(np.stack([low, high])))
    assert moved.shape == (2, *low.shape)


def test_networks_of_sequences_do_not_see_ahead() -> None:
    x = torch.randint(5, (2, sequences.LENGTH))
    other = x.clone()
    other[:, 100:] = 0
    for network in (sequences.TextLSTM(5, 8).eval(), sequences.TextTransformer(5, 8, 1).eval()):
        before, after = network(x), network(other)
        assert before.shape == (2, 5, sequences.LENGTH)
        torch.testing.assert_close(before[:, :, :100], after[:, :, :100])
    assert sequences.RowReader(28, 8)(torch.rand(2, 1, 28, 28)).shape == (2, 10)


# --- verdicts ------------------------------------------------------------------------------------


def line(name: str, errors: list[float], validation: float = 0.5) -> Line:
    trials = [Trial(OwnRecipe(name), 1.0, 0.1, seed=at) for at in range(len(errors))]
    outcomes = tuple(
        Outcome(trial, error, 1, error, 1.0, 2, "limit", (0.5, error))
        for trial, error in zip(trials, errors, strict=True)
    )
    return Line(METHODS[name], 1.0, 0.1, validation, outcomes, 17, False)


def test_differences_are_paired_and_corrected() -> None:
    plain = line("ce", [0.10, 0.12, 0.14, 0.16, 0.18])
    better = compared(line("gce", [0.09, 0.109, 0.131, 0.15, 0.169]), plain)
    assert better.verdict == "better"  # unpaired, the seeds' spread would hide it
    assert better.difference.mean == pytest.approx(-0.0102)
    weak = Compared(Difference(-0.01, -0.02, -0.001), 0.03)
    assert weak.verdict == "better"
    found = corrected([weak, weak, better], 3)
    assert [one.verdict for one in found] == ["level", "level", "better"]
    diverged = compared(line("sce", [math.inf, 0.1, 0.1, 0.1, 0.1]), plain)
    assert diverged.verdict == "level"


def test_missing_comparisons_are_corrected_for() -> None:
    ps = [0.004, 0.02]
    several = [Compared(Difference(-0.1, -0.2, -0.0), p) for p in ps]
    assert [round(one.p, 9) for one in corrected(several, 9)] == [0.036, 0.16]
    # A verdict of "better" stands, however the others turn out.
    for other in (0.0001, 0.01, 0.5):
        more = [*several, *[Compared(Difference(-0.1, -0.2, -0.0), other)] * 7]
        assert corrected(more, 9)[0].verdict == "better"


def test_tables_without_a_difference_rarely_claim_one() -> None:
    """Nine methods against one baseline, all equally good: a claim in at most 5% of tables."""
    generator = np.random.default_rng(0)
    claimed, covered, tables = 0, 0, 300
    for _ in range(tables):
        seeds = generator.normal(0.19, 0.004, 5)
        plain, *others = (
            line("ce", (seeds + generator.normal(0, 0.003, 5)).tolist()) for _ in range(10)
        )
        several = [compared(one, plain) for one in others]
        covered += sum(one.difference.low < 0 < one.difference.high for one in several)
        claimed += any(one.verdict != "level" for one in corrected(several, 9))
    assert claimed / tables < 0.08
    assert covered / (9 * tables) == pytest.approx(0.95, abs=0.02)


def test_overlapping_training_sets_widen_an_interval() -> None:
    folds = {"by fold": [0.91, 0.92, 0.93, 0.92, 0.92]}, {"by fold": [0.90, 0.92, 0.92, 0.90, 0.91]}
    plain = paired_difference(*(one["by fold"] for one in folds))
    assert plain.low > 0
    setting = next(one for one in SETTINGS if one.question == "6")
    with pytest.MonkeyPatch.context() as patched:
        found = {"1": folds[1], "2": folds[0]}
        patched.setattr(findings, "_summed", lambda *_: [(setting, found)])
        (one,) = findings.suspects(Path())
    assert one.compared["2"].difference.mean == pytest.approx(plain.mean)
    assert one.compared["2"].difference.low < 0
    assert one.compared["2"].verdict == "level"


def test_wrong_labels_must_be_found_by_one_k_on_both_sets() -> None:
    up, level = (Compared(Difference(0.01, 0.0, 0.02), p, True) for p in (0.01, 0.5))
    first, second = (one for one in SETTINGS if one.question == "6")

    def verdict(one: dict[str, Compared], other: dict[str, Compared]) -> str:
        several = [findings.Summed(first, {}, one), findings.Summed(second, {}, other)]
        return findings.suspects_claim(several).verdict

    assert verdict({"0.5": up, "2": level}, {"0.5": level, "2": up}) == "partly confirmed"
    assert verdict({"0.5": up, "2": level}, {"0.5": up, "2": level}) == "confirmed"
    assert verdict({"0.5": level}, {"0.5": level}) == "not confirmed"


def test_a_recommendation_names_all_methods_that_validation_cannot_tell_apart() -> None:
    better, level = (Compared(Difference(-0.01, -0.02, 0.0), p) for p in (0.01, 0.5))
    against = {"gce": (0.45, better), "sce": (0.44, better), "nce-rce": (0.46, better)}
    against |= {"smoothing": (0.43, level)}
    lines = tuple(
        replace(line(name, [0.1], validation), against=found)
        for name, (validation, found) in against.items()
    )
    (setting,) = (one for one in SETTINGS if one.name == "cifar10-symmetric-40")
    found = findings.Table(setting, lines, (), 0.4, {}, validated=1000)
    assert round(found.standard_error(0.44), 4) == 0.0157
    assert [one.method.name for one in found.to_use] == ["sce", "gce"]


def test_a_tuner_that_includes_cross_entropy_may_choose_it() -> None:
    (setting,) = (one for one in SETTINGS if one.name == "cifar10-symmetric-40")
    plain = replace(line("ce", [0.1], 0.40), tried={(1.0, 0.4): 0.43, (1.0, 0.566): 0.40})
    tunable = replace(line("tunable", [0.1], 0.42), value=2.0)
    found = findings.with_one(findings.Table(setting, (plain, tunable), (), 0.4, {}))
    assert found == [findings.WithOne(1.0, 0.40, 2), findings.WithOne(2.0, 0.43, 1)]
    assert findings.with_one(findings.Table(setting, (plain,), (tunable.method,), 0.4, {})) == []


def test_values_that_never_learned_are_told() -> None:
    tried: dict[tuple[float | Ramp, float], float]
    tried = {(0.2, 0.4): 0.5, (0.7, 0.4): 0.8, (0.7, 0.8): 0.78, (1.0, 0.4): 0.9, (1.0, 0.8): 0.7}
    assert replace(line("gce", [0.1], 0.5), tried=tried).unlearned == {0.7: [0.8, 0.78]}


def test_verdicts_are_those_of_the_plan() -> None:
    assert judged(["worse", "worse", "level"]) == "refuted"
    assert judged(["better", "better", "worse"]) == "partly confirmed"
    assert judged(["better", "level"]) == "partly confirmed"
    assert judged(["better", "better", "level"], all_needed=True) == "partly confirmed"
    assert judged(["better", "better"], all_needed=True) == "confirmed"


def test_time_to_an_error_is_none_if_a_network_never_has_it() -> None:
    found = line("ce", [0.1, 0.3])
    assert found.epochs_to(0.5) == 1
    assert found.epochs_to(0.3) == 2
    assert found.epochs_to(0.2) is None


def test_the_best_rate_is_between_the_tried_ones() -> None:
    errors = {2.0**power: (power - 0.3) ** 2 for power in range(-3, 4)}
    assert minimum(errors) == pytest.approx(0.3)


def test_nothing_is_claimed_before_a_setting_is_finished(tmp_path: Path) -> None:
    tables = [table(one, tmp_path) for one in SETTINGS if one.question == "5"]
    assert {one.verdict for one in noise_claims(tables)} == {"no setting finished yet"}
    assert not any(one.lines for one in tables)
    assert ALL_KS.values.count(1.0) == 1
