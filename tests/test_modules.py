"""Training of any module: the loop, its data, and processes on a CPU."""

from __future__ import annotations

import contextlib
import importlib.util
import linecache
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, Subset, TensorDataset

from pseudograd import rules, tunable_cross_entropy
from pseudograd.fleet import Outcome, Split, Trial, randomness
from pseudograd.fleet.modules import examples as examples_module
from pseudograd.fleet.modules import fleet as fleet_module
from pseudograd.fleet.modules import training as training_module
from pseudograd.fleet.modules.checks import check_training
from pseudograd.fleet.modules.code import describe, describe_network
from pseudograd.fleet.modules.examples import Examples
from pseudograd.fleet.modules.fleet import ModuleFleet
from pseudograd.fleet.modules.loop import train
from pseudograd.fleet.modules.training import SCHEDULES, Training
from pseudograd.fleet.ramp import Ramp

CPU = torch.device("cpu")


def images(count: int = 240, test: int = 60) -> Examples:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(count, 1, 6, 6, generator=generator)
    y = x.flatten(1)[:, :3].argmax(1)
    return Examples.of((x[:-test], y[:-test]), (x[-test:], y[-test:]))


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2),
        nn.Linear(64, 3),
    )  # fmt: skip


def brightened(x: Tensor) -> Tensor:
    return x * (1 + 0.1 * torch.rand(len(x), 1, 1, 1))


def training(**settings: Any) -> Training:
    return Training(**{"network": network, "epochs": 3, "batch_size": 32, **settings})


def trial(made: Training, data: Examples, k: Any = 0.5, at: int = 0, **split: Any) -> Trial:
    recipe = made.recipe(data.name, data.sha256[:16])
    return Trial(recipe, k, 0.01, Split(0, at, **split), seed=at)


def trained(made: Training, data: Examples, one: Trial, **settings: Any) -> Outcome:
    outcome = train(made, data, one, CPU, **settings)
    assert outcome is not None
    return outcome


# --- the loop -----------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_at_k_1_it_trains_as_a_loop_by_hand(optimizer: Callable[..., Any]) -> None:
    def plain() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3))

    data = images()
    made = training(network=plain, optimizer=optimizer, clip=0.5, schedule="one-cycle")
    one = trial(made, data, k=1, retrain=True)
    outcome = trained(made, data, one, keep_parameters=True)

    torch.manual_seed(0)
    module = plain()
    steps = optimizer(module.parameters(), lr=0.01)
    count = data.train_size // 32
    shuffled = data.parts(made.recipe("data"), one.split).train
    for epoch in range(3):
        order = randomness.order(torch.tensor([0]), torch.tensor([epoch]), data.train_size)[0]
        for at in range(count):
            rows = shuffled[order[32 * at : 32 * (at + 1)]]
            progress = (epoch * count + at + 0.5) / (3 * count)
            factor = progress / 0.2 if progress < 0.2 else (1 - progress) / 0.8
            steps.param_groups[0]["lr"] = 0.01 * factor
            loss = F.cross_entropy(module(data.inputs[0][rows]), data.labels[rows])
            steps.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            steps.step()
    assert outcome.state is not None
    for name, value in module.state_dict().items():
        torch.testing.assert_close(outcome.state[name], value, rtol=1e-4, atol=1e-6)
    rows = torch.arange(data.train_size, len(data))
    logits = module(data.inputs[0][rows])
    wrong = logits.argmax(1) != data.labels[rows]
    assert outcome.wrong == tuple(wrong.nonzero()[:, 0].tolist())
    assert outcome.error == pytest.approx(float(wrong.float().mean()))
    value = float(F.cross_entropy(logits, data.labels[rows]).detach())
    assert outcome.cross_entropy == pytest.approx(value, rel=1e-4)


def test_k_of_a_ramp_changes_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    real: Any = tunable_cross_entropy

    def noted(*given: Any, **more: Any) -> Any:
        seen.append(more["k"])
        return real(*given, **more)

    monkeypatch.setattr(training_module, "tunable_cross_entropy", noted)
    data, made = images(), training(validation=0.2)
    trained(made, data, trial(made, data, k=Ramp(0.5, 2.0)))
    assert len(seen) == 3 * (144 // 32)
    places = [(at + 0.5) / len(seen) for at in range(len(seen))]
    assert seen == pytest.approx([0.5 + 1.5 * place for place in places])


def test_the_loss_gets_smoothing_weights_and_ignored_labels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, Any] = {}
    real: Any = tunable_cross_entropy

    def noted(*given: Any, **more: Any) -> Any:
        seen.update(more)
        return real(*given, **more)

    monkeypatch.setattr(training_module, "tunable_cross_entropy", noted)
    made = training(label_smoothing=0.1, class_weights=(1.0, 2.0, 0.5), ignore_index=7)
    data = images()
    trained(made, data, trial(made, data))
    assert seen["label_smoothing"] == 0.1
    assert seen["ignore_index"] == 7
    assert seen["weight"].tolist() == [1.0, 2.0, 0.5]


def test_the_loss_is_of_augmented_inputs_and_logits_in_bf16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Tensor] = []
    real: Any = tunable_cross_entropy

    def noted(logits: Tensor, *given: Any, **more: Any) -> Any:
        seen.append(logits.detach())
        return real(logits, *given, **more)

    monkeypatch.setattr(training_module, "tunable_cross_entropy", noted)
    made = training(network=flat, augment=lambda x: x * 0, precision="bf16")
    data = images()
    trained(made, data, trial(made, data))
    for logits in seen:
        assert logits.dtype == torch.bfloat16
        assert torch.equal(logits, logits[:1].expand_as(logits))  # of zeros


def test_augmentation_may_change_labels() -> None:
    """Shuffled classes are other labels; one-hot probabilities are the same labels."""

    class Module(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return x, y

    def trained_with(augment: Any) -> float:
        made = training(network=flat, augment=augment)
        return trained(made, data, trial(made, data)).cross_entropy

    data = images()
    plain = trained_with(None)
    for same in (lambda x, y: (x.flip(0), y.flip(0)), lambda x, y: [x, F.one_hot(y, 3).float()],
                 lambda x, scale=1: x * scale, nn.Identity(), Module()):  # fmt: skip
        assert trained_with(same) == pytest.approx(plain, rel=1e-5)
    assert trained_with(lambda x, y: (x, (y + 1) % 3)) > plain + 0.02


def test_images_and_masks_are_cropped_together() -> None:
    def crop(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x[..., 1:5], y[..., 1:5]

    x = images().inputs[0]
    y = (x[:, 0] > 0.5).long()
    data = Examples.of((x[:180], y[:180]), (x[180:], y[180:]))
    made = training(network=lambda: nn.Conv2d(1, 2, 1), augment=crop)
    assert check_training(made, data) == 2
    assert math.isfinite(trained(made, data, trial(made, data)).cross_entropy)


def flat() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 3))


class Tagger(nn.Module):
    """A class for each position, from tokens and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 8), nn.Linear(9, 5)

    def forward(self, tokens: Tensor, numbers: Tensor) -> Tensor:
        out: Tensor = self.head(torch.cat((self.embed(tokens), numbers), 2))
        return out.transpose(1, 2)


def test_sequences_of_several_inputs_and_ignored_labels() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, (200, 7), generator=generator)
    labels = tokens.clone()
    labels[:, 0] = -100
    numbers = torch.rand(200, 7, 1, generator=generator)
    data = Examples.of(
        ((tokens[:150], numbers[:150]), labels[:150]), ((tokens[150:], numbers[150:]), labels[150:])
    )
    made = training(network=Tagger, epochs=30, schedule="constant", batch_size=50)
    one = replace(trial(made, data, k=2, retrain=True), learning_rate=0.05)
    outcome = trained(made, data, one)
    assert outcome.error == 0  # the first positions do not count
    assert outcome.wrong == ()


def test_patience_keeps_the_best_epoch() -> None:
    data, made = images(), training(epochs=60, patience=3, schedule="constant", validation=0.25)
    one = replace(trial(made, data, retrain=True), learning_rate=0.05)
    outcome = trained(made, data, one, keep_parameters=True)
    assert outcome.stopped_by == "patience"
    assert outcome.epochs == outcome.best_epoch + 3
    assert outcome.curve[outcome.best_epoch - 1] == min(outcome.curve) == outcome.stop_error
    cut = data.parts(made.recipe("data"), one.split)
    module = network()
    assert outcome.state is not None
    module.load_state_dict(outcome.state)
    logits = module.eval()(data.inputs[0][cut.stop])
    wrong = (logits.argmax(1) != data.labels[cut.stop]).float().mean()
    assert float(wrong) == pytest.approx(outcome.stop_error)
    assert outcome.last_state is not None
    assert any(
        not torch.equal(outcome.state[name], outcome.last_state[name])
        for name in module.state_dict()
    )


def test_the_best_epoch_reports_the_error_on_its_stopping_examples() -> None:
    data, made = images(), training(epochs=12, patience=12, schedule="constant", validation=0.25)
    one = replace(trial(made, data, bagged=True), learning_rate=0.05)
    (outcome,) = ModuleFleet(made, data, slots=1, keep_parameters=True).run([one])
    assert outcome.state is not None
    assert outcome.best_epoch < outcome.epochs
    assert outcome.error == outcome.stop_error == min(outcome.curve)


def test_it_trains_by_another_rule_and_k_is_its_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    data, sgd = images(), {"optimizer": torch.optim.SGD}
    made = training(rule=lambda gamma: partial(rules.focal, gamma=gamma), **sgd)
    outcome = trained(made, data, trial(made, data, k=2.0, retrain=True), keep_parameters=True)
    seen = []

    def by_hand(logits: Tensor, labels: Tensor, **given: Any) -> Tensor:
        seen.append(given["k"])
        log_p = logits.log_softmax(1).gather(1, labels[:, None])
        return (-((-log_p.expm1()) ** 2) * log_p).mean()

    monkeypatch.setattr(training_module, "tunable_cross_entropy", by_hand)
    plain = training(**sgd)
    other = trained(plain, data, trial(plain, data, k=2.0, retrain=True), keep_parameters=True)
    assert set(seen) == {2.0}
    assert outcome.state is not None
    assert other.state is not None
    for name, value in outcome.state.items():
        torch.testing.assert_close(value, other.state[name], rtol=1e-3, atol=1e-5)
    with pytest.raises(ValueError, match=r"^label_smoothing must be left out with a rule"):
        training(rule=lambda gamma: rules.focal, label_smoothing=0.1).recipe("data")


def test_the_test_set_does_not_choose_among_final_networks() -> None:
    data, made = images(), training()
    outcome = trained(made, data, trial(made, data, retrain=True))
    assert outcome.error > 0
    assert outcome.stop_error == 0
    assert outcome.curve == ()  # and evaluated once


def test_a_training_that_diverges_says_so() -> None:
    def deep() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3))

    data, made = images(), training(network=deep, optimizer=torch.optim.SGD, epochs=6)
    outcome = trained(made, data, replace(trial(made, data), learning_rate=1e30))
    assert outcome.stopped_by == "diverged"
    assert outcome.error == 1
    assert outcome.cross_entropy == math.inf


@pytest.mark.parametrize("ignored", [True, False], ids=["ignored", "without weight"])
def test_a_batch_without_counted_labels_is_not_divergence(ignored: bool) -> None:
    data = images()
    data.labels[: data.train_size] = -100 if ignored else 0
    data.labels[:4] = torch.tensor([0, 1, 2, 1])
    made = training(class_weights=None if ignored else (0.0, 1.0, 1.0), batch_size=4, epochs=2)
    outcome = trained(made, data, trial(made, data, retrain=True))
    assert (outcome.stopped_by, outcome.epochs) == ("limit", 2)
    assert outcome.cross_entropy < math.inf


def test_global_random_numbers_and_precision_are_left_as_they_were() -> None:
    data, made = images(), training(augment=brightened)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    before = torch.backends.cuda.matmul.allow_tf32
    trained(made, data, trial(made, data))
    assert torch.equal(torch.rand(3), expected)
    assert torch.backends.cuda.matmul.allow_tf32 == before


# --- which examples -----------------------------------------------------------------------------


def counts(data: Examples, rows: Tensor) -> list[int]:
    return data.labels[rows].bincount(minlength=3).tolist()


@pytest.mark.parametrize("patience", [None, 3])
@pytest.mark.parametrize("validation", [None, 0.2])
def test_roles_do_not_overlap(validation: float | None, patience: int | None) -> None:
    data = images()
    recipe = training(validation=validation, patience=patience).recipe("data")
    for at in range(5):
        cut = data.parts(recipe, Split(0, at))
        assert not {*cut.train.tolist()} & {*cut.judge.tolist(), *cut.stop.tolist()}
        assert max(cut.train.max(), cut.judge.max()) < data.train_size
        assert not {*cut.stop.tolist()} & {*cut.judge.tolist()}
        assert len(cut.judge) == 36
        final = data.parts(recipe, Split(0, at, retrain=True))
        assert final.judge.tolist() == list(range(180, 240))
        assert len(final.train) + len(final.stop) == data.train_size
        assert bool(len(final.stop)) == bool(patience)


def test_a_share_is_held_out() -> None:
    data = images()
    assert [
        len(data.parts(training(validation=share).recipe("data"), Split(0, 0)).judge)
        for share in (None, 0.1)
    ] == [36, 18]


def test_a_share_has_every_class_in_proportion_and_differs_between_repetitions() -> None:
    data = images()
    recipe = training(validation=0.2).recipe("data")
    first, second = (data.parts(recipe, Split(0, at)).judge for at in (0, 1))
    assert first.tolist() != second.tolist()
    for held in (first, second):
        for found, of_all in zip(counts(data, held), counts(data, torch.arange(180)), strict=True):
            assert abs(found - 0.2 * of_all) <= 1


# --- data ---------------------------------------------------------------------------------------


class Given(Dataset[Any]):
    """Examples computed by a function."""

    def __init__(self, count: int, example: Callable[[int], Any]) -> None:
        self.count, self.example = count, example

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, at: int) -> Any:
        return self.example(at)


def test_tensors_arrays_and_datasets_are_the_same_data() -> None:
    x, y = torch.rand(20, 4), torch.arange(20) % 2
    forms: list[Any] = [
        (x, y),
        (x.double().numpy(), y.int().numpy()),
        TensorDataset(x, y),
        Given(20, lambda at: (x[at].numpy(), int(y[at]))),
    ]
    made = [Examples.of(form, form) for form in forms]
    assert len({one.sha256 for one in made}) == 1
    copies = "20 of 20 test examples are copies of a training example"
    assert {one.notes for one in made} == {(f"{copies}: the test error may look too low",)}


@pytest.mark.filterwarnings("error")
def test_arrays_that_pytorch_does_not_take_as_they_are() -> None:
    x = np.arange(24.0, dtype="f4").reshape(6, 4)
    y = np.arange(6) % 2
    fixed = x.copy()
    fixed.setflags(write=False)  # as those of pandas
    for given in (fixed, x.tolist(), x.T.copy().T):
        found = Examples.of((given, y), (given, y))
        assert found.inputs[0].tolist() == [*x.tolist(), *x.tolist()]


def test_a_trial_is_short_in_a_message() -> None:
    recipe = training().recipe("data")
    told = str(Trial(recipe, 0.5, 0.01, seed=3))
    assert told.startswith(f"Trial({recipe.fingerprint}, k=0.5, learning_rate=0.01, split=Split(")
    assert told.endswith("seed=3)")
    assert "AdamW" not in told


def test_notes_on_labels_to_guess_and_on_copies() -> None:
    x, y = torch.arange(24.0).reshape(8, 3), torch.tensor([0, 1, 0, 1, 0, 1, 3, -100])
    copied, other = (x[[1, 2]], y[[1, 2]]), (x[[1, 2]], y[[2, 1]])
    assert Examples.of((x[:6], y[:6]), (x[6:], y[6:])).notes == (
        "test has labels that train has not, 3: no network can learn to predict them",
    )
    assert Examples.of((x[:6], y[:6]), copied).notes == (
        "2 of 2 test examples are copies of a training example: the test error may look too low",
    )
    assert Examples.of((x[:6], y[:6]), other).notes == ()


def test_bytes_are_scaled_to_0_1() -> None:
    seen: list[Tensor] = []

    class Seeing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            seen.append(x)
            out: Tensor = self.layer(x)
            return out

    x = torch.full((20, 4), 255, dtype=torch.uint8)
    data = Examples.of((x, torch.arange(20) % 2), (x - 1, torch.arange(20) % 2))
    made = training(network=Seeing, epochs=1)
    trained(made, data, trial(made, data))
    assert all(bool((one == 1).all()) for one in seen)
    assert data.notes == ("bytes are divided by 255, as ToTensor does",)


def test_a_dataset_that_differs_each_time_is_read_in_every_epoch() -> None:
    x, y = torch.rand(60, 4), torch.arange(60) % 2
    reads: list[int] = []

    def noisy(at: int) -> Any:
        reads.append(at)
        return x[at] + 0.01 * torch.rand(4), y[at]

    data = Examples.of(Given(60, noisy), (x, y))
    assert data.inputs == ()
    assert "changes each time it is read" in data.notes[0]
    made = training(network=lambda: nn.Linear(4, 2), epochs=2, batch_size=12)
    one = trial(made, data, retrain=True)
    reads.clear()
    outcome = trained(made, data, one)
    assert outcome.epochs == 2
    assert sorted(reads) == sorted([*range(60)] * 2)


class Shifted(Given):
    """Draws from a generator of its own, which no seed controls."""

    def __init__(self, shift: float) -> None:
        super().__init__(20, lambda at: (torch.zeros(4), at % 2))
        self.shift, self.generator = shift, np.random.default_rng(0)

    def __getitem__(self, at: int) -> Any:
        x, y = super().__getitem__(at)
        return x + self.shift * float(self.generator.random()), y


def test_the_code_of_a_dataset_is_part_of_data_that_cannot_be_sampled() -> None:
    hashes = []
    for shift in (1.0, 1.0, 2.0):
        data = Subset(Shifted(shift), range(10))
        hashes.append(Examples.of(data, data).sha256)
    assert hashes[0] == hashes[1] != hashes[2]


def test_slow_reading_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(examples_module, "_FIRST_LINE", 0.15)
    x, y = torch.rand(5, 4), torch.arange(5) % 2

    def slow(at: int) -> Any:
        time.sleep(0.1)
        return x[at], y[at]

    Examples.of(Given(5, slow), (x, y))
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"train: [23] of 5 examples read, 0 s left", line)


def test_floats_of_any_precision_are_one_type() -> None:
    x, y = torch.rand(20, 4), torch.arange(20) % 2
    for double in ((x.double(), y), Given(20, lambda at: (x[at].double() + torch.rand(4), y[at]))):
        data = Examples.of((x.half(), y), double)
        assert all(one.dtype == torch.float32 for one in data.batch(torch.tensor([0, 30])))


def test_bytes_that_are_read_each_time_are_noted_too() -> None:
    def random(at: int) -> Any:
        return torch.randint(256, (4,), dtype=torch.uint8), at % 2

    data = Examples.of(Given(20, random), Given(20, random))
    assert "bytes are divided by 255, as ToTensor does" in data.notes


# --- several at once ----------------------------------------------------------------------------


def outcomes(fleet: ModuleFleet, wanted: list[Trial]) -> dict[Trial, Outcome]:
    return {outcome.trial: outcome for outcome in fleet.run(deque(wanted))}


def test_a_trial_alone_and_in_company_is_the_same_to_the_last_bit() -> None:
    data, made = images(), training(augment=brightened)
    wanted = [trial(made, data, k, at) for k in (0.5, 1) for at in (0, 1)]
    wanted += [trial(made, data, 2, 0, retrain=True)]
    with ModuleFleet(made, data, slots=2, keep_parameters=True) as fleet:
        together = outcomes(fleet, wanted[:4]) | outcomes(fleet, wanted[4:])
    for one in wanted:
        alone = outcomes(ModuleFleet(made, data, slots=1, keep_parameters=True), [one])[one]
        assert together[one] == alone
        if one.split.retrain:
            kept, own = together[one].state, alone.state
            assert kept is not None
            assert own is not None
            assert all(torch.equal(kept[name], own[name]) for name in own)
        else:
            assert together[one].state is None


@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
def test_a_precision_that_the_program_has_set_does_not_count(precision: str) -> None:
    """On a CPU "medium" rounds products to bfloat16, but not in the processes of a fleet."""
    seen: set[str] = set()

    class Seeing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.add(torch.get_float32_matmul_precision())
            return super().forward(x.flatten(1))

    data, ambient = images(), torch.get_float32_matmul_precision()
    made = training(network=lambda: Seeing(36, 3), epochs=1, precision=precision)
    torch.set_float32_matmul_precision("medium")
    try:
        trained(made, data, trial(made, data))
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(ambient)
    assert seen == {"highest"}


@pytest.mark.parametrize("short", [60.0, 0.0], ids=["short", "long"])
def test_processes_are_started_only_for_long_trials(
    short: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "_SHORT", short)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    data, made = images(), training(augment=brightened)
    wanted = [trial(made, data, k) for k in (0.5, 1, 2)]
    with ModuleFleet(made, data) as fleet:
        found = outcomes(fleet, wanted)
        assert (fleet._processes is None) == bool(short)
    assert found == outcomes(ModuleFleet(made, data, slots=1), wanted)


def dying(flag: Path, times: int) -> Callable[[], nn.Module]:
    """Return a network function that kills its process, if a worker, the first ``times`` times."""
    parent = os.getpid()

    def made() -> nn.Module:
        for at in range(times if os.getpid() != parent else 0):
            with contextlib.suppress(FileExistsError):  # two workers may start at once
                (flag / str(at)).touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 3))

    return made


def test_a_worker_that_dies_loses_no_trial(tmp_path: Path) -> None:
    data, made = images(), training(network=dying(tmp_path, 1), epochs=1)
    wanted = [trial(made, data, k) for k in (0.5, 1, 2)]
    assert outcomes(ModuleFleet(made, data, slots=2), wanted).keys() == {*wanted}
    assert len(list(tmp_path.iterdir())) == 1


def test_a_trial_that_always_kills_its_worker_is_given_up(tmp_path: Path) -> None:
    data, made = images(), training(network=dying(tmp_path, 10**6), epochs=1)
    with pytest.raises(ConnectionError, match="a worker process died 3 times"):
        outcomes(ModuleFleet(made, data, slots=2), [trial(made, data, k) for k in (0.5, 1)])


def test_an_error_in_a_worker_is_raised_here() -> None:
    parent = os.getpid()

    class Failing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if os.getpid() != parent:
                raise LookupError("no such thing")
            return super().forward(x.flatten(1))

    data, made = images(), training(network=lambda: Failing(36, 3))
    with pytest.raises(LookupError, match="no such thing"):
        outcomes(ModuleFleet(made, data, slots=2), [trial(made, data, k) for k in (0.5, 1)])


def test_what_cannot_be_pickled_is_named() -> None:
    lock = threading.Lock()

    def drawn(at: int) -> tuple[Tensor, int]:
        with lock:
            return torch.rand(1, 6, 6), at % 3

    data, made = images(), training(network=lambda: nn.Linear(36, 3 if lock else 4))
    read = Examples.of(Given(180, drawn), Given(60, drawn))
    for name, examples, its_training in (
        ("the network and its training", data, made),
        ("a Dataset of the study", read, training()),
    ):
        trials = [trial(its_training, examples, k) for k in (0.5, 1)]
        with pytest.raises(ValueError, match=rf"^{name} must be picklable .*lock") as error:
            outcomes(ModuleFleet(its_training, examples, slots=2), trials)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("slots", [1, 2])
def test_it_stops_on_request(slots: int) -> None:
    data, made = images(), training(epochs=10**6)
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked > 3

    pending = deque(trial(made, data, k) for k in (0.5, 1, 2))
    assert list(ModuleFleet(made, data, slots=slots).run(pending, stop)) == []


def test_trials_of_another_training_are_refused() -> None:
    data = images()
    one = trial(training(), data)
    with pytest.raises(ValueError, match=r"their optimizer is 'AdamW.*the fleet's is 'SGD"):
        outcomes(ModuleFleet(training(optimizer=torch.optim.SGD), data), [one])
    with pytest.raises(ValueError, match="with a hash that begins with"):
        outcomes(ModuleFleet(training(), images(250)), [one])


# --- descriptions -------------------------------------------------------------------------------


def test_the_recipe_covers_everything_that_affects_training() -> None:
    def other() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 3))

    first = training(augment=brightened).recipe("data")
    assert first == training(augment=brightened).recipe("data")
    changes: list[dict[str, Any]] = [
        {"network": other},
        {"augment": lambda x: x},
        {"optimizer": torch.optim.SGD},
        {"optimizer_settings": {"weight_decay": 0.1}},
        {"schedule": "linear"},
        {"schedule": lambda progress: 1 - progress},
        {"epochs": 4},
        {"class_weights": (1.0, 1.0, 2.0)},
        {"rule": lambda gamma: partial(rules.focal, gamma=gamma)},
    ]
    recipes = [training(**{"augment": brightened, **change}).recipe("data") for change in changes]
    assert len({first.fingerprint, *(one.fingerprint for one in recipes)}) == len(changes) + 1


def test_pytorch_functions_are_described_by_name_only() -> None:
    assert describe(torch.optim.AdamW) == "AdamW"
    assert describe(SCHEDULES["cosine"]) != describe(SCHEDULES["linear"])


@pytest.mark.parametrize(
    "schedule", [lambda _: float("nan"), lambda _: -1.0], ids=["NaN", "below 0"]
)
def test_a_schedule_must_give_rates(schedule: Callable[[float], float]) -> None:
    data, made = images(), training(schedule=schedule)
    with pytest.raises(ValueError, match="schedule must return finite numbers of at least 0"):
        trained(made, data, trial(made, data))


def test_a_schedule_may_be_constant() -> None:
    """Unlike one of epochs, which differs outside [0, 1]."""
    made = training(schedule=lambda progress: 0.5 + 0 * math.sqrt(1 - progress))
    assert made.factors(3) == [0.5] * 3


def test_groups_of_parameters_keep_their_own_learning_rates() -> None:
    def frozen_bias(parameters: Any, lr: float) -> torch.optim.Optimizer:
        groups = [{"params": [one], "lr": lr * (one.dim() > 1)} for one in parameters]
        return torch.optim.SGD(groups, lr=lr)

    data = images()
    made = training(network=lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 3)),
                    optimizer=frozen_bias)  # fmt: skip
    one = trial(made, data, retrain=True)
    outcome = trained(made, data, one, keep_parameters=True)
    assert outcome.state is not None
    before = made.module(one.seed).state_dict()
    assert torch.equal(outcome.state["1.bias"], before["1.bias"])
    assert not torch.equal(outcome.state["1.weight"], before["1.weight"])


@pytest.mark.parametrize("share", [0.5, 0.02])
def test_rare_random_transforms_are_noticed(share: float) -> None:
    x, y = torch.rand(400, 3), torch.arange(400) % 2

    def flipped(at: int) -> Any:
        return (x[at].flip(0) if torch.rand(()) < share else x[at]), y[at]

    made = [Examples.of(Given(400, flipped), (x, y)) for _ in range(2)]
    assert all(one.source is not None for one in made)
    assert made[0].sha256 == made[1].sha256  # so that a study can be resumed

    def noisier(at: int) -> Any:
        return x[at] + torch.rand(3), y[at]

    assert Examples.of(Given(400, noisier), (x, y)).sha256 != made[0].sha256


def test_functions_in_a_tuple_do_not_change_a_recipe_from_run_to_run() -> None:
    def network(*several: Any) -> str:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer, self.several = nn.Linear(2, 2), several

        return training(network=Net).recipe("data").network

    # The functions' addresses differ, as in two processes.
    assert network((lambda x: x,)) == network((lambda x: x,))
    assert network((1, "a")) != network((2, "a"))


def test_defaults_of_keywords_are_part_of_a_recipe() -> None:
    def shifted(by: int) -> Callable[..., Any]:
        def shift(x: Any, *, by: int = by) -> Any:
            return x + by

        return shift

    assert describe(shifted(1)) == describe(shifted(1))
    assert describe(shifted(1)) != describe(shifted(2))


class Scaled(nn.Linear):
    """A linear layer with an arbitrary setting."""

    def __init__(self, setting: Any) -> None:
        super().__init__(4, 3)
        self.setting = setting


def zeros() -> nn.Module:
    made = nn.Linear(4, 3)
    nn.init.zeros_(made.weight)
    return made


def frozen_bias() -> nn.Module:
    made = nn.Linear(4, 3)
    made.bias.requires_grad_(False)
    return made


def pretrained(weights: Tensor) -> nn.Module:
    made = nn.Linear(4, 3)
    made.load_state_dict({"weight": weights, "bias": torch.zeros(3)})
    return made


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (partial(nn.Linear, 4, 3), zeros),
        (zeros, frozen_bias),
        (partial(Scaled, torch.relu), partial(Scaled, torch.tanh)),
        (partial(Scaled, lambda x: x + 1), partial(Scaled, lambda x: x + 2)),
        (partial(Scaled, {"scale": 1.0}), partial(Scaled, {"scale": 2.0})),
        (partial(Scaled, [1, (2, "a")]), partial(Scaled, [1, (3, "a")])),
    ],
    ids=["initialisation", "frozen", "function", "lambda", "dict", "list"],
)
def test_a_description_tells_networks_apart(
    one: Callable[[], nn.Module], other: Callable[[], nn.Module]
) -> None:
    assert describe_network(one) == describe_network(one)
    assert describe_network(one) != describe_network(other)


def test_pretrained_weights_are_part_of_a_description() -> None:
    def described(weights: Tensor) -> str:
        return describe_network(lambda: pretrained(weights.clone()))

    first = torch.arange(12.0).reshape(3, 4)
    assert described(first) == described(first.clone())
    assert described(first) != described(first + 1)


def test_frozen_parameters_are_part_of_a_description() -> None:
    class Net(nn.Linear):
        frozen = False

        def __init__(self) -> None:
            super().__init__(4, 3)
            self.bias.requires_grad_(not self.frozen)

    before = describe_network(Net)
    Net.frozen = True
    assert describe_network(Net) != before


def test_a_lambda_is_described_without_the_rest_of_its_line() -> None:
    def settings(**given: Any) -> Any:
        return given["f"]

    one = settings(f=lambda: nn.Linear(4, 3), k=(0.5, 1))
    other = settings(k=(0.5, 1, 2), f=lambda: nn.Linear(4, 3))
    assert describe(one) == describe(other)
    plus, minus = (lambda x: x + 1), (lambda x: x - 1)
    assert describe(plus) != describe(minus)
    outer = lambda x: lambda y: x + y  # noqa: E731
    assert describe(outer) != describe(outer(1))


def test_networks_of_classes_keep_their_description() -> None:
    assert describe_network(partial(nn.Linear, 4, 3)) == "Linear, 15 parameters, db1b3ee8"


class NewerPReLU(nn.PReLU):
    """PReLU as in a future PyTorch, with another argument."""

    def __init__(self, num_parameters: int = 1, init: float = 0.25, new: str = "no") -> None:
        super().__init__(num_parameters, init)
        self.new = new

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, new={self.new}"


for _one in (NewerPReLU, NewerPReLU.extra_repr):
    _one.__module__ = nn.PReLU.__module__
NewerPReLU.__name__ = NewerPReLU.__qualname__ = "PReLU"


def test_attributes_added_by_a_new_pytorch_do_not_change_descriptions() -> None:
    before = describe_network(nn.PReLU)
    assert describe_network(NewerPReLU) == before
    assert describe_network(partial(NewerPReLU, new="yes")) != before
    assert describe_network(partial(NewerPReLU, 2)) != before


class Clock:
    """Notes when it was made, like a logger."""

    def __init__(self) -> None:
        self.began = time.perf_counter()

    def passed(self) -> float:
        return time.perf_counter() - self.began


class Timed(nn.Linear):
    """Holds a clock."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.clock = Clock()


def test_objects_that_differ_in_every_network_are_no_part_of_a_description() -> None:
    assert describe_network(Timed) == describe_network(Timed)


def test_what_training_changes_in_a_class_is_no_part_of_a_description() -> None:
    class Counting(nn.Linear):
        sizes: ClassVar[list[int]] = list()  # noqa: C408
        noise = math.pi

        def forward(self, x: Tensor) -> Tensor:
            self.sizes.append(len(x))
            type(self).noise *= 0.9
            return super().forward(x + self.noise)

    before = describe_network(partial(Counting, 4, 3))
    Counting(4, 3)(torch.rand(2, 4))
    assert describe_network(partial(Counting, 4, 3)) == before


CALLS: list[int] = []
NORM = nn.BatchNorm1d(3, affine=False)


def counted() -> int:
    CALLS.append(1)
    return len(CALLS)


class Buffered(nn.Linear):
    """Has a buffer of NumPy's random numbers, which is not saved."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("noise", torch.from_numpy(np.random.rand(3)), persistent=False)  # noqa: NPY002


@pytest.mark.parametrize(
    ("network", "sentence"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.1 * (counted() % 2))), "same layers"),
        (lambda: Scaled(counted()), "same layers and settings at every call"),
        (Buffered, "same weights for the same PyTorch seed"),
        (lambda: nn.Sequential(nn.Linear(4, 3), NORM), "new module at every call"),
    ],
    ids=["layers", "settings", "buffers", "a shared layer"],
)
def test_networks_of_global_state_are_refused(
    network: Callable[[], nn.Module], sentence: str
) -> None:
    with pytest.raises(ValueError, match=f"network must return .*{sentence}"):
        describe_network(network)


def test_comments_and_docstrings_are_no_part_of_a_recipe(tmp_path: Path) -> None:
    described = set()
    for at, body in enumerate(
        ("return x  # as it is", "# the same\n\n    return x", "'As it is.'\n    return x")
    ):
        path = tmp_path / f"module{at}.py"
        path.write_text(f"def f(x):\n    {body}\n")
        specification = importlib.util.spec_from_file_location(f"module{at}", path)
        assert specification is not None
        assert specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        described.add(describe(module.f))
    assert len(described) == 1


OWN = """
import argparse
import enum
import functools
import numpy as np
import torch
from torch import nn

SCALE = torch.full((2,), FACTOR)
SCALES = [FACTOR]
SCALAR = np.float32(FACTOR)
SET = {"a", "b", FACTOR}
ACTIVATIONS = {"used": torch.relu if FACTOR == 1 else torch.tanh}
given = argparse.Namespace(scale=FACTOR, device=DEVICE)

class Choice(enum.Enum):
    A = 1
    B = 100

CHOICE = Choice(int(FACTOR))

class Settings:
    scale = FACTOR

def scaled(x, by=FACTOR):
    return FACTOR * x

def closed(by):
    return lambda x: x * by

def twice(function):
    @functools.wraps(function)
    def changed(x):
        return function(function(x)) * FACTOR
    return changed

class Base(nn.Linear):
    def forward(self, x):
        return super().forward(x * FACTOR)

class Net(Base):
    def extra(self):
        return 1

class Sized(nn.Linear):
    scale = SCALES[0]

    def forward(self, x):
        return super().forward(x) * self.scale

class Helped(nn.Linear):
    def forward(self, x):
        return super().forward([scaled(one) for one in (x,)][0])

class Held(nn.Linear):
    def __init__(self, settings):
        super().__init__(2, 2)
        self.settings = settings

    def forward(self, x):
        return super().forward(x) * self.settings.scale

class Holding:
    def __init__(self, settings):
        self.settings = settings

    def __call__(self, x):
        return x * self.settings.scale

class Scaling:
    def __init__(self, by):
        self.by = by

    def __call__(self, x):
        return x * self.by

@twice
def wrapped(x):
    return x

helper = lambda x: scaled(x)
tensor = lambda x: x * SCALE
a_list = lambda x: x * SCALES[0]
a_scalar = lambda x: x * SCALAR
a_set = lambda x: x * len(SET)
a_choice = lambda x: x if CHOICE is Choice.A else -x
in_a_dict = lambda x: ACTIVATIONS["used"](x)
in_a_class = lambda x: x * Settings.scale
holding = Holding(given)
held = lambda: Held(given)
setting = lambda x: x * given.scale
closure = closed(torch.tensor(FACTOR))
default = lambda x, by=SCALE: x * by
instance = Scaling(FACTOR)
partly = functools.partial(scaled, by=torch.full((2000,), FACTOR))
method = instance.__call__
derived = lambda: Net(2, 2)
calling = lambda: Helped(2, 2)
sized = lambda: Sized(2, 2)
of_a_module = lambda x: x * configuration.scale

def counting():
    count = 0

    def counted(x):
        nonlocal count
        count += 1
        return x * SCALE

    return counted

counted = counting()
"""


def own(factor: float, folder: Path, has_file: bool) -> ModuleType:
    """`OWN` as a module in a folder, or as the cell of a notebook."""
    code = OWN.replace("FACTOR", f"{factor}").replace("DEVICE", f"'{folder}'")
    configuration = ModuleType("configuration")
    configuration.__dict__.update(scale=factor, device=folder, __file__="configuration.py")
    if not has_file:
        lines = code.splitlines(keepends=True)
        linecache.cache[f"<{folder}>"] = (len(code), None, lines, f"<{folder}>")  # as IPython does
        notebook = ModuleType("__main__")
        notebook.__dict__["configuration"] = configuration
        exec(compile(code, f"<{folder}>", "exec"), vars(notebook))
        return notebook
    folder.mkdir()
    (folder / "own.py").write_text(code)
    specification = importlib.util.spec_from_file_location("own", folder / "own.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    module.__dict__["configuration"] = configuration
    return module


@pytest.mark.parametrize("has_file", [True, False], ids=["module", "notebook"])
@pytest.mark.parametrize(
    "name",
    [
        *("wrapped", "helper", "tensor", "a_list", "setting", "closure", "default", "instance"),
        *("partly", "method", "derived", "calling", "a_scalar", "a_set", "a_choice", "in_a_dict"),
        *("in_a_class", "holding", "held", "sized", "of_a_module", "counted"),
    ],
)
def test_what_own_code_uses_is_part_of_a_recipe(
    name: str, has_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = []
    for at, factor in enumerate((1.0, 1.0, 100.0)):
        module = own(factor, tmp_path / f"{at}", has_file)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(sys.modules, "configuration", module.configuration)
        function = getattr(module, name)
        is_network = name in ("derived", "calling", "held", "sized")
        described.append(describe_network(function) if is_network else describe(function))
    # Such as the device, which no code names.
    assert described[0] == described[1] != described[2]


KILLED = """
import sys
sys.path[:0] = {path!r}
from test_modules import *
data, made = images(), training(epochs=10**6)
list(ModuleFleet(made, data, slots=2).run([trial(made, data, k) for k in (0.5, 1)]))
"""


def children(of: int) -> set[int]:
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == of:
                    found.add(int(entry.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc")
def test_workers_and_their_files_go_when_the_parent_is_killed(tmp_path: Path) -> None:
    code = KILLED.format(path=[str(Path(__file__).parent)])
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", code], env=environment)

    def until(holds: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + 90
        while not holds() and time.monotonic() < deadline:
            time.sleep(0.1)
        return holds()

    held = tmp_path.rglob

    def reading() -> set[int]:
        return {
            one for one in children(parent.pid) if "0.npy" in Path(f"/proc/{one}/maps").read_text()
        }

    assert until(lambda: len(reading()) >= 2)
    workers = children(parent.pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert until(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))
    assert until(lambda: not list(held("0.npy")))
