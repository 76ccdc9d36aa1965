"""Schedules of k, their callbacks, and the examples of docs/schedules.md."""

from __future__ import annotations

import io
import math
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.optim import lr_scheduler

import pseudograd
from documents import Document
from pseudograd import (
    RuleCrossEntropyLoss,
    TunableCrossEntropyLoss,
    TunableLinearCrossEntropyLoss,
    schedules,
    tunable_cross_entropy,
)
from pseudograd.rules import cross_entropy
from pseudograd.schedules import (
    CosineK,
    KSchedule,
    LambdaK,
    LinearK,
    StepK,
    _lightning_class,
    _trainer_class,
)

Make = Callable[[Any], KSchedule]
EVERY: dict[str, Make] = {
    "LinearK": lambda criterion: LinearK(criterion, 0.5, 2, 6),
    "CosineK": lambda criterion: CosineK(criterion, 4, 0.25, 6),
    "StepK": lambda criterion: StepK(criterion, 1, 2, 0.5),
    "LambdaK": lambda criterion: LambdaK(criterion, lambda step: step + 1),
}
every = pytest.mark.parametrize("make", EVERY.values(), ids=EVERY.keys())


def followed(schedule: KSchedule, steps: int) -> list[float]:
    """Return the criterion's k before each step and after the last one."""
    ks = [schedule.criterion.k]
    for _ in range(steps):
        schedule.step()
        ks.append(schedule.criterion.k)
        assert schedule.last_k == ks[-1]
    return ks


# --- values ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "rate", "theirs"),
    [
        (lambda c: LinearK(c, 0.25, 1, 7), 1.0, lambda o: lr_scheduler.LinearLR(o, 0.25, 1.0, 7)),
        (lambda c: LinearK(c, 4, 1, 5), 4.0, lambda o: lr_scheduler.LinearLR(o, 1.0, 0.25, 5)),
        (lambda c: StepK(c, 0.3, 3, 1.7), 0.3, lambda o: lr_scheduler.StepLR(o, 3, 1.7)),
        (
            lambda c: LambdaK(c, lambda step: 2 / (1 + step)),
            2.0,
            lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
        ),
    ],
    ids=["up", "down", "steps", "lambda"],
)
def test_schedules_match_those_of_pytorch(make: Make, rate: float, theirs: Any) -> None:
    """Ten steps, beyond the end of the linear ones."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], rate)
    scheduler, rates = theirs(optimizer), []
    for _ in range(11):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert followed(make(TunableCrossEntropyLoss()), 10) == pytest.approx(rates)


def test_the_cosine_matches_that_of_pytorch_and_then_stays() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 2.0)
    scheduler, rates = lr_scheduler.CosineAnnealingLR(optimizer, 5, eta_min=0.5), [2.0]
    for _ in range(5):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    found = followed(CosineK(TunableCrossEntropyLoss(), 2, 0.5, 5), 9)
    assert found[:6] == pytest.approx(rates)
    assert found[5:] == [0.5] * 5


@pytest.mark.parametrize("kind", [LinearK, CosineK])
def test_both_ends_are_exact(kind: Any) -> None:
    found = followed(kind(TunableCrossEntropyLoss(), 0.1, 0.7, 3), 5)
    assert (found[0], *found[3:]) == (0.1, 0.7, 0.7, 0.7)


@pytest.mark.parametrize(("gamma", "end"), [(10, 2.0**100), (0.1, 2.0**-100)])
def test_steps_stay_within_the_bounds_of_k(gamma: float, end: float) -> None:
    schedule = StepK(TunableCrossEntropyLoss(), 1, 1, gamma)
    assert followed(schedule, 40)[-9:] == [end] * 9
    schedule.load_state_dict({"last_step": 10**9})
    assert schedule.last_k == end


# --- criteria --------------------------------------------------------------------------------


class Own(nn.Module):
    """A user's loss with a k."""

    def __init__(self) -> None:
        super().__init__()
        self.k = 1.0


@pytest.mark.parametrize(
    "criterion",
    [TunableCrossEntropyLoss(), TunableLinearCrossEntropyLoss(), Own(),
     TunableCrossEntropyLoss(k=torch.tensor([1.0, 2.0]))],
    ids=["loss", "linear", "own", "k per example"],
)  # fmt: skip
def test_construction_sets_the_first_k(criterion: Any) -> None:
    LinearK(criterion, 0.5, 2, 4)
    assert criterion.k == 0.5


def test_a_compiled_criterion_is_unwrapped() -> None:
    criterion = TunableCrossEntropyLoss()
    compiled: Any = torch.compile(criterion)
    schedule = LinearK(compiled, 0.5, 2, 1)
    schedule.step()
    assert criterion.k == 2.0
    assert schedule.criterion is criterion


@pytest.mark.parametrize("kind", [nn.CrossEntropyLoss, RuleCrossEntropyLoss])
def test_a_criterion_without_k_is_refused(kind: Any) -> None:
    criterion = kind() if kind is nn.CrossEntropyLoss else kind(cross_entropy)
    with pytest.raises(
        TypeError, match=f"criterion must have an attribute k, .*{kind.__name__} has"
    ):
        LinearK(criterion, 0.5, 2, 4)


C = TunableCrossEntropyLoss()
BAD: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: LinearK(C, 0, 2, 4), ValueError, "start must be a finite number above 0"),
    (lambda: LinearK(C, 1, math.inf, 4), ValueError, "end must be a finite number above 0"),
    (lambda: CosineK(C, 1, math.nan, 4), ValueError, "end must be a finite number above 0"),
    (lambda: CosineK(C, "1", 2, 4), TypeError, "start must be a finite number"),  # type: ignore[arg-type]
    (
        lambda: LinearK(C, torch.tensor(1.0), 2, 4),  # type: ignore[arg-type]
        TypeError,
        "start must be a number, not a tensor; use .item()",
    ),
    (lambda: LinearK(C, 1, 2, 0), ValueError, "total_steps must be a whole number of at least 1"),
    (lambda: CosineK(C, 1, 2, 2.5), ValueError, "total_steps must be a whole number"),  # type: ignore[arg-type]
    (lambda: StepK(C, 1, 0, 2), ValueError, "step_size must be a whole number of at least 1"),
    (lambda: StepK(C, 1, 3, 0), ValueError, "gamma must be a finite number above 0"),
    (lambda: LambdaK(C, 0.5), TypeError, "k_lambda must be a function of the step, not 0.5"),  # type: ignore[arg-type]
    (lambda: LambdaK(C, lambda _: 0), ValueError, "k of step 0 must be a finite number above 0"),
    (lambda: LinearK(C, 1, 2, 3).load_state_dict({}), ValueError, "whole number as last_step"),
    (
        lambda: LinearK(C, 1, 2, 3).load_state_dict({"last_step": -1}),
        ValueError,
        "state_dict must come from a schedule of k",
    ),
    (
        lambda: schedules.trainer_callback(C),  # type: ignore[arg-type]
        TypeError,
        "schedule must be a schedule of k, such as LinearK, not",
    ),
]


def test_bad_arguments(subtests: pytest.Subtests) -> None:
    for call, error, says in BAD:
        with subtests.test(says=says), pytest.raises(error, match=re.escape(says)):
            call()


def test_a_bad_k_on_the_way_changes_nothing() -> None:
    criterion = TunableCrossEntropyLoss()
    schedule = LambdaK(criterion, lambda step: 2.0 - step)
    schedule.step()
    with pytest.raises(ValueError, match="k of step 2 must be a finite number above 0"):
        schedule.step()
    assert (schedule.last_step, schedule.last_k, criterion.k) == (1, 1.0, 1.0)


def test_numpy_scalars_become_python_numbers() -> None:
    numpys: Any = np.float32(0.5), np.int64(2), np.int64(3)
    schedule = LinearK(TunableCrossEntropyLoss(), *numpys)
    assert repr(schedule) == "LinearK(start=0.5, end=2.0, total_steps=3)"
    assert type(LambdaK(Own(), lambda _: np.float64(2)).criterion.k) is float


# --- checkpoints -----------------------------------------------------------------------------


@every
def test_a_schedule_survives_a_checkpoint(make: Make) -> None:
    whole = followed(make(TunableCrossEntropyLoss()), 10)
    first = make(TunableCrossEntropyLoss())
    followed(first, 4)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = make(TunableCrossEntropyLoss())
    second.load_state_dict(torch.load(file, weights_only=True))
    assert followed(second, 6) == whole[4:]


# --- torch.compile ---------------------------------------------------------------------------


@pytest.mark.parametrize("linear", [False, True])
@every
def test_a_schedule_does_not_recompile(make: Make, linear: bool) -> None:
    """Its twelve k include 1 and, for LambdaK, ints."""
    torch.manual_seed(0)
    weight, z, y = torch.eye(5), torch.randn(6, 5), torch.randint(5, (6,))
    kind: Any = TunableLinearCrossEntropyLoss if linear else TunableCrossEntropyLoss
    criterion = kind(k=1)

    def loss(z: Tensor) -> Tensor:
        value: Tensor = criterion(z, weight, y) if linear else criterion(z, y)
        return value

    torch.compiler.reset()
    counter = CompileCounter()
    step = torch.compile(loss, backend=counter, fullgraph=True)
    schedule, seen = make(criterion), set()
    for _ in range(12):
        seen.add(criterion.k)
        ours, theirs = (z.clone().requires_grad_() for _ in range(2))
        step(ours).backward()
        tunable_cross_entropy(theirs, y, k=criterion.k).backward()
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)
        schedule.step()
    assert len(seen) >= 6
    assert counter.frame_count == 1


# --- Lightning -------------------------------------------------------------------------------

X, Y = torch.randn(24, 4), torch.arange(24) % 3


class Recorder(TunableCrossEntropyLoss):
    """Notes the k of each batch."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.used: list[float] = []

    def forward(self, input: Tensor, target: Tensor, *others: Any, **named: Any) -> Tensor:
        assert isinstance(self.k, float)
        self.used.append(self.k)
        return super().forward(input, target, *others, **named)


@pytest.fixture
def lightning() -> Any:
    return pytest.importorskip("pytorch_lightning", reason="needs pytorch-lightning")


def classifier(lightning: Any) -> Any:
    class Classifier(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.criterion = nn.Linear(4, 3), Recorder()

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            value: Tensor = self.criterion(self.layer(batch[0]), batch[1])
            return value

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Classifier()


def fit(lightning: Any, module: Any, *callbacks: Any, resume: Any = None, **settings: Any) -> Any:
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=4)
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=list(callbacks), **settings,
    )  # fmt: skip
    trainer.fit(module, data, ckpt_path=resume)
    return trainer


def test_lightning_steps_after_every_optimizer_step(lightning: Any) -> None:
    """Every two of the six batches make a step."""
    module = classifier(lightning)
    schedule = LinearK(module.criterion, 1, 4, 3)
    callback = schedules.lightning_callback(schedule)
    trainer = fit(lightning, module, callback, max_epochs=1, accumulate_grad_batches=2)
    assert trainer.global_step == 3
    assert module.criterion.used == [1, 1, 2, 2, 3, 3]
    assert schedule.last_k == 4.0


def test_lightning_checkpoints_hold_the_schedule(lightning: Any, tmp_path: Path) -> None:
    """Of two schedules, each restores its own."""

    def parts() -> Any:
        module = classifier(lightning)
        module.other = TunableCrossEntropyLoss()
        ramps = LinearK(module.criterion, 1, 13, 12), LinearK(module.other, 2, 14, 12)
        called = [
            schedules.lightning_callback(ramp, name) for ramp, name in zip(ramps, "ab", strict=True)
        ]
        return module, called

    module, callbacks = parts()
    trainer = fit(lightning, module, *callbacks, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert module.criterion.used == [1, 2, 3, 4, 5, 6]
    module, callbacks = parts()
    resume = tmp_path / "last.ckpt"
    fit(lightning, module, *callbacks, max_epochs=2, resume=resume)
    assert module.criterion.used == [7, 8, 9, 10, 11, 12]
    assert module.other.k == 14.0


def test_a_callback_of_lightning_can_be_sent_to_a_process(lightning: Any) -> None:
    callback = schedules.lightning_callback(LinearK(TunableCrossEntropyLoss(), 1, 3, 2), "mine")
    callback.schedule.step()
    again = pickle.loads(pickle.dumps(callback))
    assert again.state_key == callback.state_key
    assert again.schedule.criterion.k == 2.0


# --- transformers ----------------------------------------------------------------------------


@pytest.fixture
def transformers() -> Any:
    pytest.importorskip("accelerate", reason="needs accelerate")
    return pytest.importorskip("transformers", reason="needs transformers")


def trained(
    transformers: Any, folder: Path, resume: str | None = None, **settings: Any
) -> Recorder:
    """Return the criterion after eight steps, or as many as ``settings`` gives."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            return {"logits": self.layer(x)}

    criterion = Recorder(reduction="sum")
    schedule = LinearK(criterion, 1, 9, 8)
    given = {"max_steps": 8, "save_strategy": "no", **settings}
    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=2, report_to="none", use_cpu=True,
        disable_tqdm=True, **given,
    )  # fmt: skip
    transformers.Trainer(
        Model(),
        arguments,
        train_dataset=[{"x": x, "labels": y} for x, y in zip(X, Y, strict=True)],
        compute_loss_func=lambda outputs, labels, num_items_in_batch=None: (
            criterion(outputs["logits"], labels) / len(labels)
        ),
        callbacks=[schedules.trainer_callback(schedule)],
    ).train(resume_from_checkpoint=resume)
    return criterion


def test_the_trainer_steps_after_every_optimizer_step(transformers: Any, tmp_path: Path) -> None:
    found = trained(transformers, tmp_path, max_steps=3, gradient_accumulation_steps=2)
    assert found.used == [1, 1, 2, 2, 3, 3]
    assert found.k == 4.0


def test_a_training_of_the_trainer_is_resumed(transformers: Any, tmp_path: Path) -> None:
    trained(transformers, tmp_path, save_strategy="steps", save_steps=5)
    found = trained(transformers, tmp_path, resume=str(tmp_path / "checkpoint-5"))
    assert found.used == [6, 7, 8]
    assert found.k == 9.0


@pytest.mark.parametrize(
    ("make", "cached", "packages", "says"),
    [
        (schedules.lightning_callback, _lightning_class, ("lightning", "lightning.pytorch",
         "pytorch_lightning"), "lightning_callback needs Lightning: pip install lightning"),
        (schedules.trainer_callback, _trainer_class, ("transformers",),
         "trainer_callback needs transformers: pip install"),
    ],
)  # fmt: skip
def test_a_missing_library_is_named(
    make: Any, cached: Any, packages: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached.cache_clear()
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=says):
        make(LinearK(TunableCrossEntropyLoss(), 1, 2, 3))


# --- the document ----------------------------------------------------------------------------

DOCUMENT = Document("schedules.md")
run = DOCUMENT.run


def test_the_training_loop_and_its_checkpoint() -> None:
    names = run("In a training loop", "Checkpoints")
    assert names["used"] == pytest.approx([0.5 + 0.15 * step for step in range(10)] + [2, 2])
    assert names["again"].last_step == 12
    assert names["resumed"].k == 2.0


def test_the_table_names_every_schedule() -> None:
    told = re.findall(r"^\| `(\w+)\(", DOCUMENT.section("In a training loop"), re.MULTILINE)
    own = {name for name in schedules.__all__ if issubclass_of_schedule(name)}
    assert set(told) == own - {"KSchedule"}


def issubclass_of_schedule(name: str) -> bool:
    found = getattr(pseudograd.schedules, name)
    return isinstance(found, type) and issubclass(found, KSchedule)


def test_the_example_of_lightning(
    lightning: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("In a training loop", "Lightning")["ramp"].last_k == 2.0


def test_the_example_of_the_trainer(
    transformers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("In a training loop", "Hugging Face's Trainer")["ramp"].last_k == 2.0


def test_the_search() -> None:
    names = run("In a training loop", "In a search")
    assert names["by_epoch"] == pytest.approx([0.6875, 1.0625, 1.4375, 1.8125])
