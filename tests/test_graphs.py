"""The slots of a GPU, run on a CPU: their steps are called instead of captured.

What only a GPU can show (capture, streams, kernels) is checked by benchmarks/check_modules.py.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pseudograd.fleet import Outcome, Split, Trial
from pseudograd.fleet.modules import graphs, worker
from pseudograd.fleet.modules.examples import Examples
from pseudograd.fleet.modules.fleet import ModuleFleet
from pseudograd.fleet.modules.graphs import Slot, Uncapturable, capturable_optimizer
from pseudograd.fleet.modules.loop import NOISE, train
from pseudograd.fleet.modules.training import Training
from pseudograd.fleet.modules.worker import GraphWorker
from pseudograd.fleet.ramp import Ramp

CPU = torch.device("cpu")
CAPTURED: Any = Slot._captured


class Stream:
    """A stream whose work is always done."""

    def __init__(self, *_: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record_event(self) -> Stream:
        return self

    def query(self) -> bool:
        return True


class Graph:
    """A graph that calls its step."""

    def __init__(self, step: Callable[[], None]) -> None:
        self.replay = step

    def pool(self) -> None:
        return None


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def nothing(*_: object) -> Iterator[None]:
        yield

    def captured(self: Slot, step: Callable[[], None], pool: Any = None) -> Graph:
        return Graph(step)

    def read(self: Slot, tensor: Tensor) -> Generator[bool, None, Tensor]:
        yield False
        return tensor.clone()

    def optimizer(training: Training, module: nn.Module, rate: Tensor) -> Any:
        # Some optimizers accept a tensor rate only on a GPU.
        made = training.optimizer(module.parameters(), lr=0.0, **training.optimizer_settings)
        made.register_step_pre_hook(lambda one, *_: one.param_groups[0].update(lr=float(rate)))
        return made

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", nothing)
    monkeypatch.setattr(torch.cuda, "device", nothing)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**34, 2**35))
    monkeypatch.setattr(Slot, "_captured", captured)
    monkeypatch.setattr(Slot, "_own_noise", nothing)
    monkeypatch.setattr(Slot, "_read", read)
    monkeypatch.setattr(GraphWorker, "_draw", _drawn)
    monkeypatch.setattr(graphs, "capturable_optimizer", optimizer)


def _drawn(self: GraphWorker, seed: int) -> list[Tensor]:
    fresh = self.training.module(seed)
    return [one.detach() for one in (*fresh.parameters(), *fresh.buffers())]


def images(count: int = 300) -> Examples:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(count, 1, 6, 6, generator=generator)
    y = x.flatten(1)[:, :3].argmax(1)
    return Examples.of((x[:240], y[:240]), (x[240:], y[240:]))


def network() -> nn.Module:
    # Without convolutions, which round differently in another memory format.
    return nn.Sequential(
        nn.Flatten(), nn.BatchNorm1d(36), nn.Linear(36, 16), nn.Tanh(), nn.Linear(16, 3)
    )


def trained(
    made: Training, data: Examples, wanted: list[Trial], slots: int
) -> dict[Trial, Outcome]:
    recipe = made.recipe("data", data.sha256[:16])
    worker = GraphWorker(made, data, recipe, CPU, slots, keep_parameters=True)
    return {one.trial: one for one in worker.through(deque(wanted), lambda: False)}


class Rows(nn.Sequential):
    """A class for each row of an image."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x[:, 0]).transpose(1, 2)
        return out


def rows() -> Examples:
    """Sequences of labels, some of which are ignored."""
    data = images()
    x = data.inputs[0]
    y = x[:, 0, :, :3].argmax(2)
    y[:, 0] = -100
    y[::5, 1:4] = -100
    return Examples.of((x[:240], y[:240]), (x[240:], y[240:]))


SETTINGS: dict[str, dict[str, Any]] = {
    "the last epoch": {},
    "SGD": {"optimizer": torch.optim.SGD, "optimizer_settings": {"momentum": 0.9}},
    "patience": {"patience": 2, "epochs": 8, "schedule": "constant"},
    "a share": {"validation": 0.15},
    "a share and patience": {"validation": 0.15, "patience": 3},
    "clipped, smoothed, weighted": {
        "clip": 0.3, "label_smoothing": 0.1, "class_weights": (1.0, 2.0, 3.0),
    },
    "augmented, ignored labels": {"augment": lambda x: x.flip(3), "ignore_index": 2},
    "sequences": {"network": Rows},
}  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_slot_trains_as_the_plain_loop_whatever_it_trained_before(
    settings: dict[str, Any],
) -> None:
    data = rows() if settings.get("network") is Rows else images()
    common = {"network": network, "epochs": 3, "batch_size": 32, "compile": False}
    made = Training(**{**common, **settings})
    recipe = made.recipe("data", data.sha256[:16])
    ks: tuple[float | Ramp, ...] = (0.5, 1.0, Ramp(0.5, 2.0), 2.0, 1.0)
    wanted = [Trial(recipe, k, 0.02, Split(0, at), seed=at) for at, k in enumerate(ks)]
    for group in (wanted, [replace(one, split=Split(0, 0, retrain=True)) for one in wanted]):
        found = trained(made, data, group, slots=2)  # each slot trains two or three of them
        assert found.keys() == {*group}
        for one in group:
            plain = train(made, data, one, CPU, keep_parameters=True)
            assert plain is not None
            mine = found[one]
            assert mine.cross_entropy == pytest.approx(plain.cross_entropy, rel=1e-4)
            assert mine.curve == pytest.approx(plain.curve)
            assert mine.error == pytest.approx(plain.error)
            assert (mine.epochs, mine.stopped_by) == (plain.epochs, plain.stopped_by)
            assert mine.wrong == plain.wrong
            if one.split.retrain:
                assert mine.state is not None
                assert plain.state is not None
                for name, value in plain.state.items():
                    torch.testing.assert_close(mine.state[name], value, rtol=1e-3, atol=1e-5)


def test_a_network_that_diverges_does_not_spoil_the_next() -> None:
    data = images()
    made = Training(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 3)),
        torch.optim.SGD, {"momentum": 0.9}, epochs=3, batch_size=32, compile=False,
    )  # fmt: skip
    recipe = made.recipe("data", data.sha256[:16])
    wanted = [Trial(recipe, 1.0, rate, Split(0, 0), seed=0) for rate in (1e38, 0.1)]
    found = trained(made, data, wanted, slots=1)
    assert found[wanted[0]].stopped_by == "diverged"
    assert found[wanted[0]].error == 1
    assert found[wanted[1]].error < 0.7


@pytest.mark.parametrize("rate", [0.02, 1e38])
def test_a_batch_without_counted_labels_is_not_divergence(rate: float) -> None:
    data = images()
    data.labels[:240] = torch.where(torch.arange(240) % 8 == 0, data.labels[:240], -100)
    made = Training(network, torch.optim.SGD, epochs=2, batch_size=4, compile=False)
    one = Trial(made.recipe("data", data.sha256[:16]), 0.5, rate, Split(0, 0, retrain=True), seed=0)
    found, plain = trained(made, data, [one], slots=1)[one], train(made, data, one, CPU)
    assert plain is not None
    assert found.stopped_by == plain.stopped_by == ("limit" if rate < 1 else "diverged")
    assert found.cross_entropy == pytest.approx(plain.cross_entropy, rel=1e-4)


class Reading:
    """Examples from a source, which vary slightly between reads."""

    def __init__(self, data: Examples, start: int, end: int) -> None:
        self.data, self.start, self.end = data, start, end

    def __len__(self) -> int:
        return self.end - self.start

    def __getitem__(self, at: int) -> Any:
        x = self.data.inputs[0][self.start + at]
        return x + 1e-6 * torch.rand(()), self.data.labels[self.start + at]


def test_examples_that_are_read_on_the_host_are_the_right_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    data = images()
    read = Examples.of(Reading(data, 0, 240), Reading(data, 240, 300))
    assert read.source is not None
    made = Training(network, epochs=2, batch_size=32, compile=False)
    recipe = made.recipe("data")
    one = Trial(recipe, 0.5, 0.02, Split(0, 1), seed=3)
    found = trained(made, read, [replace(one, recipe=made.recipe("data", read.sha256[:16]))], 1)
    plain = train(made, data, one, CPU)
    assert plain is not None
    assert next(iter(found.values())).cross_entropy == pytest.approx(plain.cross_entropy, rel=1e-3)


@pytest.mark.parametrize(
    ("optimizer", "settings", "reason"),
    [
        (torch.optim.Rprop, {}, "Rprop is none of SGD, Adam"),
        (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1}, "with dampening, the first step"),
    ],
)
def test_optimizers_whose_state_cannot_be_reset_are_not_captured(
    optimizer: Any, settings: dict[str, Any], reason: str
) -> None:
    made = Training(network, optimizer, settings)
    with pytest.raises(Uncapturable, match=reason):
        capturable_optimizer(made, network(), torch.tensor(0.1))


def worker_of(made: Training, data: Examples, slots: int) -> tuple[GraphWorker, list[Trial]]:
    """Return a worker, and seven trials of two seeds."""
    recipe = made.recipe("data", data.sha256[:16])
    wanted = [Trial(recipe, 1.0, 0.01 + 0.001 * at, Split(0, 0), seed=at // 4) for at in range(7)]
    return GraphWorker(made, data, recipe, CPU, slots, keep_parameters=False), wanted


def test_a_slot_is_made_while_others_train(monkeypatch: pytest.MonkeyPatch) -> None:
    data, made = images(), Training(network, epochs=3, batch_size=32, compile=False)
    worker, wanted = worker_of(made, data, slots=3)
    steps = []
    allocate = Slot._allocate

    def allocated(self: Slot, *arguments: Any) -> None:
        steps.append([int(slot.counters[0]) for slot in worker.slots])
        allocate(self, *arguments)

    monkeypatch.setattr(Slot, "_allocate", allocated)
    assert {one.trial for one in worker.through(deque(wanted), lambda: False)} == {*wanted}
    assert [len(taken) for taken in steps] == [0, 1, 2]
    assert min(steps[1] + steps[2]) > 0


@pytest.mark.parametrize("free", [2**34, 2**20], ids=["an error", "planned"])
def test_too_little_memory_means_fewer_slots_and_loses_nothing(
    free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, made = images(), Training(network, epochs=2, batch_size=32, compile=False)
    worker, wanted = worker_of(made, data, slots=4)
    allocate = Slot._allocate

    def allocated(self: Slot, *arguments: Any) -> None:
        if free == 2**34 and len(worker.slots) == 2:
            raise torch.OutOfMemoryError("simulated")
        allocate(self, *arguments)

    # Each slot takes a third of the memory.
    left = lambda _: (free * (3 - len(worker.slots)) // 3, free)  # noqa: E731
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", left if free == 2**20 else lambda _: (free, free)
    )
    monkeypatch.setattr(Slot, "_allocate", allocated)
    assert {one.trial for one in worker.through(deque(wanted), lambda: False)} == {*wanted}
    assert len(worker.slots) == 2


def no_decay_of_biases(kind: Any) -> Callable[..., Any]:
    def made(parameters: Any, lr: Any) -> Any:
        each = list(parameters)
        groups = [
            {"params": [one for one in each if one.dim() > 1]},
            {"params": [one for one in each if one.dim() < 2], "weight_decay": 0.0},
        ]
        return kind(groups, lr=lr)

    return made


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_groups_of_parameters_are_captured(kind: Any) -> None:
    made = Training(network, no_decay_of_biases(kind))
    groups = capturable_optimizer(made, network(), torch.tensor(0.1)).param_groups
    assert len(groups) == 2
    for group in groups:
        assert group.get("capturable", True)
        assert group.get("fused", True)


class Invalid:
    """A graph whose capture fails."""

    def capture_begin(self, *_: object, **__: object) -> None:
        pass

    def capture_end(self) -> None:
        raise RuntimeError("operation failed due to a previous error during capture")


@pytest.mark.parametrize("problem", [torch.OutOfMemoryError("full"), RuntimeError("no item()")])
def test_a_failed_capture_raises_the_error_of_its_step(
    problem: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, data = Training(network, epochs=2, batch_size=32, compile=False), images()
    worker, wanted = worker_of(made, data, slots=1)
    list(worker.through(deque(wanted[:1]), lambda: False))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Invalid)

    def step() -> None:
        raise problem

    with pytest.raises(type(problem), match=str(problem)):
        CAPTURED(worker.slots[0], step)
    with pytest.raises(RuntimeError, match="during capture"):
        CAPTURED(worker.slots[0], lambda: None)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("slots_before", [0, 1])
def test_a_slot_that_fails_is_told_and_loses_nothing(
    slots_before: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, made = images(), Training(network, epochs=2, batch_size=32, compile=compiled)
    worker, wanted = worker_of(made, data, slots=4)
    told: list[str] = []
    worker.tell = told.append
    allocate = Slot._allocate

    def allocated(self: Slot, source: Any, cut: Any, compiled: bool) -> None:
        if len(worker.slots) == slots_before:
            raise RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")
        allocate(self, source, cut, compiled=False)

    monkeypatch.setattr(Slot, "_allocate", allocated)
    if not slots_before:
        with pytest.raises(Uncapturable, match=r"^CUBLAS_STATUS_ALLOC_FAILED$"):
            list(worker.through(deque(wanted), lambda: False))
        assert told == []
        return
    assert {one.trial for one in worker.through(deque(wanted), lambda: False)} == {*wanted}
    assert told == ["only 1 trial at once: CUBLAS_STATUS_ALLOC_FAILED"]


def test_a_network_that_cannot_be_compiled_is_captured_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data, made = images(), Training(network, epochs=2, batch_size=32)
    worker, wanted = worker_of(made, data, slots=1)
    told: list[str] = []
    worker.tell = told.append

    def failing(_: nn.Module) -> nn.Module:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", failing)
    assert len(list(worker.through(deque(wanted), lambda: False))) == 7
    assert told == ["the network is not compiled: no compiler"]


def test_weights_of_a_seed_are_drawn_once_for_trials_that_follow_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data, made = images(), Training(network, epochs=1, batch_size=32, compile=False)
    worker, wanted = worker_of(made, data, slots=2)
    seeds = []

    def drawn(self: GraphWorker, seed: int) -> list[Tensor]:
        seeds.append(seed)
        return _drawn(self, seed)

    monkeypatch.setattr(GraphWorker, "_draw", drawn)
    assert len(list(worker.through(deque(wanted), lambda: False))) == 7
    assert seeds == [0, 1]


def test_noise_depends_on_the_seed_of_the_trial() -> None:
    data, made = images(), Training(network, epochs=1, batch_size=32, compile=False)
    worker, wanted = worker_of(made, data, slots=1)
    for one in (wanted[0], wanted[-1]):
        list(worker.through(deque([one]), lambda: False))
        assert worker.slots[0].generator.initial_seed() == one.seed + NOISE


def test_several_gpus_share_the_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    made, data = Training(network, epochs=2, batch_size=32, compile=False), images()
    recipe = made.recipe("data", data.sha256[:16])
    wanted = [Trial(recipe, 0.5, 0.01, Split(0, at % 5), seed=at) for at in range(12)]
    met, used = threading.Barrier(2, timeout=60), []

    def on_a_cpu(
        training: Any, examples: Any, recipe: Any, device: Any, slots: int, keep: bool
    ) -> GraphWorker:
        met.wait()  # both GPUs start before either has taken all trials
        used.append(str(device))
        return GraphWorker(training, examples, recipe, CPU, slots, keep)

    monkeypatch.setattr(worker, "GraphWorker", on_a_cpu)
    fleet = ModuleFleet(made, data, ["cuda:0", "cuda:1"], slots=2, keep_parameters=True)
    found = {one.trial: one for one in fleet.run(wanted)}
    assert sorted(used) == ["cuda:0", "cuda:1"]
    assert found == trained(made, data, wanted, slots=1)


class Skipping(nn.Sequential):
    """Skips its layers at random, as LayerDrop does."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x) if torch.rand(()) < 0.9 else x.flatten(1)[:, :3]
        return out


def test_numbers_drawn_on_the_host_are_noticed() -> None:
    """A captured step would repeat them. Here the CPU stands for the GPU and the host alike."""
    data, state = images(), torch.get_rng_state()

    def draws(**settings: Any) -> bool:
        return worker.draws_on_host(Training(**{"network": network, **settings}), data, CPU)

    assert not draws()
    assert not draws(augment=lambda x: x.flip(3))
    assert draws(augment=lambda x: x + torch.rand(()))
    assert draws(network=lambda: Skipping(nn.Flatten(), nn.Linear(36, 3)))
    assert torch.equal(torch.get_rng_state(), state)
