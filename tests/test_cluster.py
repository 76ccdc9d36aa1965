"""Trials on Ray: a simulated cluster, and a real one of several nodes, one of which is killed."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

import pseudograd
from pseudograd.data import digits
from pseudograd.fleet import Fleet, Outcome, Split, Stop, Trial
from pseudograd.fleet.modules.examples import Examples
from pseudograd.fleet.modules.fleet import ModuleFleet
from pseudograd.fleet.modules.training import Training
from pseudograd.search import Progress, Protocol, Study, cluster, connection
from pseudograd.search.cluster import ModuleRunner, RayRunner
from pseudograd.study import Study as ModuleStudy
from trials import a_trial, replace

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed"
)

TRIAL = a_trial("digits", (8,), k=1, learning_rate=0.2, momentum=0.5, patience=2, max_epochs=6)
TRIALS = [replace(TRIAL, seed=seed) for seed in range(8)]


# --- a made-up cluster -----------------------------------------------------------------------


def outcome_of(trial: Trial) -> Outcome:
    return Outcome(trial, 0.1, 1, 0.1, 0.2, 3, "patience", (0.1,))


class MadeUpRunner(RayRunner):
    """A runner whose tasks are generators in this process; they may raise `cluster._Lost`."""

    def __init__(self, task: Callable[[list[Trial]], Iterator[Outcome]], places: int = 2) -> None:
        self.device, self.made_up_task, self.places = "cpu", task, places
        self.started: list[list[Trial]] = []
        self.open: list[Iterator[Outcome]] = []
        self.cancelled: list[Iterator[Outcome]] = []

    def _places(self, device: str) -> int:
        return self.places

    def _start(self, trials: list[Trial]) -> Iterator[Outcome]:
        self.started.append(trials)
        return self.made_up_task(trials)

    def _ready(self, streams: list[Any]) -> list[Any]:
        self.open = streams
        return streams[:1]

    def _next(self, stream: Any) -> Outcome | None:
        return next(stream, None)

    def _cancel(self, stream: Any) -> None:
        self.cancelled.append(stream)


def all_end(trials: list[Trial]) -> Iterator[Outcome]:
    return (outcome_of(trial) for trial in trials)


def lost() -> cluster._Lost:
    loss = cluster._Lost()
    loss.__cause__ = ConnectionResetError()
    return loss


def test_every_trial_has_its_outcome_and_equal_ones_are_run_once() -> None:
    runner = MadeUpRunner(all_end)
    assert {outcome.trial for outcome in runner([*TRIALS, *TRIALS])} == set(TRIALS)
    assert sum(map(len, runner.started)) == len(TRIALS)
    assert not runner.cancelled


def test_only_lost_trials_run_again() -> None:
    dead: list[list[Trial]] = []

    def dies_once_after_two(trials: list[Trial]) -> Iterator[Outcome]:
        for number, trial in enumerate(trials):
            if number == 2 and not dead:
                dead.append(trials)
                raise lost()
            yield outcome_of(trial)

    runner = MadeUpRunner(dies_once_after_two)
    given = [outcome.trial for outcome in runner(TRIALS)]
    assert sorted(given, key=TRIALS.index) == TRIALS
    assert runner.started.count(dead[0][2:]) == 1
    assert sum(map(len, runner.started)) == len(TRIALS) + 2


def test_a_trial_that_kills_three_workers_is_given_up() -> None:
    bad = TRIALS[5]

    def dies_of_the_bad_one(trials: list[Trial]) -> Iterator[Outcome]:
        for trial in sorted(trials, key=lambda trial: trial == bad):
            if trial == bad:
                raise lost()
            yield outcome_of(trial)

    runner = MadeUpRunner(dies_of_the_bad_one)
    given: list[Trial] = []
    with pytest.raises(
        ConnectionError, match=r"3 times .* ConnectionResetError.* seed=5\)"
    ) as error:
        given.extend(outcome.trial for outcome in runner(TRIALS))
    assert "\n" not in str(error.value)
    assert bad not in given
    assert runner.started[-3:] == [[bad]] * 3


def test_losses_of_productive_workers_are_unlimited() -> None:
    def dies_after_one(trials: list[Trial]) -> Iterator[Outcome]:
        yield outcome_of(trials[0])
        if len(trials) > 1:
            raise lost()

    runner = MadeUpRunner(dies_after_one)
    assert len([*runner(TRIALS)]) == len(TRIALS) == len(runner.started)


def test_losing_a_finished_worker_is_harmless() -> None:
    def dies_at_the_end(trials: list[Trial]) -> Iterator[Outcome]:
        yield from all_end(trials)
        raise lost()

    runner = MadeUpRunner(dies_at_the_end)
    assert len([*runner(TRIALS)]) == len(TRIALS)
    assert sum(map(len, runner.started)) == len(TRIALS)
    assert all(runner.started)


def test_an_outcome_that_comes_twice_is_given_once() -> None:
    def stutters(trials: list[Trial]) -> Iterator[Outcome]:
        for trial in trials:
            yield outcome_of(trial)
            yield outcome_of(trial)

    assert len([*MadeUpRunner(stutters)(TRIALS)]) == len(TRIALS)


def test_an_exception_ends_the_run_and_the_other_tasks() -> None:
    def fails(trials: list[Trial]) -> Iterator[Outcome]:
        if TRIALS[1] in trials:
            raise ValueError("k is bad")
        yield from all_end(trials)

    runner = MadeUpRunner(fails)
    with pytest.raises(ValueError, match="k is bad"):
        list(runner(TRIALS))
    assert len(runner.started) == 2
    assert len(runner.cancelled) == 1


def test_closing_the_generator_cancels_running_tasks() -> None:
    runner = MadeUpRunner(all_end)
    outcomes = iter(runner(TRIALS))
    next(outcomes)
    outcomes.close()  # type: ignore[attr-defined]
    assert len(runner.cancelled) == 2


def test_without_a_node_left_a_task_waits_for_one() -> None:
    assert len([*MadeUpRunner(all_end, places=0)(TRIALS)]) == len(TRIALS)


def test_data_arrive_as_they_were_sent() -> None:
    sent = replace(digits(), weights=torch.linspace(1, 2, 1797))
    assert sent.sha256  # computed once and kept
    arrived = cluster._from_arrays(pickle.loads(pickle.dumps(cluster._to_arrays(sent))))
    assert arrived.sha256 == sent.sha256
    assert (arrived.name, arrived.train_size) == (sent.name, sent.train_size)
    assert arrived.value_range == sent.value_range
    torch.testing.assert_close(arrived.weights, sent.weights)


def test_a_cluster_can_be_told_to_stop() -> None:
    runner, told = MadeUpRunner(all_end), threading.Event()
    trials = deque(replace(TRIAL, seed=seed) for seed in range(80))
    outcomes = runner(trials, told.is_set)
    assert len([next(outcomes) for _ in range(20)]) == 20
    told.set()
    assert len(list(outcomes)) < 10
    assert {*runner.cancelled} == {*runner.open}  # the tasks in flight
    assert not trials


def test_as_many_tasks_as_there_are_places_also_when_nodes_join() -> None:
    runner = MadeUpRunner(all_end)
    under_way = []
    for number, _ in enumerate(runner(replace(TRIAL, seed=seed) for seed in range(80))):
        under_way.append(len(runner.open))
        if number == 20:
            runner.places = 5
    assert max(under_way[:20]) == 2 + 1  # the extra one waits in Ray's queue
    assert max(under_way) == 5 + 1


def test_tasks_are_of_about_equal_size(subtests: pytest.Subtests) -> None:
    cases: list[tuple[int, int, int, list[int]]] = [
        (0, 2, 4, []),
        (1, 2, 4, [1]),
        (7, 2, 4, [4, 3]),
        (147, 2, 4, [4] * 33 + [3] * 5),
        (147, 64, 4, [3] * 19 + [2] * 45),
        (147, 1, 512, [147]),
        (147, 2, 512, [74, 73]),
        (1100, 2, 512, [275] * 4),
    ]
    for trials, places, most, sizes in cases:
        with subtests.test(trials=trials, places=places, most=most):
            wanted = [replace(TRIAL, seed=seed) for seed in range(trials)]
            tasks = cluster._cut(wanted, places, most)
            assert [len(task) for task in tasks] == sizes
            assert sorted(trial.seed for task in tasks for trial in task) == list(range(trials))


class MadeUpRay(SimpleNamespace):
    """A fake connection to a cluster with the given resources, which records what is requested."""

    def __init__(self, **resources: float) -> None:
        super().__init__(
            is_initialized=lambda: True,
            get_runtime_context=lambda: SimpleNamespace(gcs_address="10.0.0.1:6379"),
            cluster_resources=lambda: resources,
            put=lambda value: value,
            shutdown=lambda: pytest.fail("Ray was not started here"),
            cloudpickle=cloudpickle,
        )
        self.asked: dict[str, object] = {}

    def remote(self, **options: object) -> Callable[..., Any]:
        self.asked = options
        return lambda function: function


@pytest.mark.parametrize(
    ("has", "device", "asked"),
    [
        ({"CPU": 8.0}, None, {"num_cpus": 1, "num_gpus": 0}),
        ({"CPU": 8.0, "GPU": 2.0}, None, {"num_cpus": 1, "num_gpus": 1}),
        ({"CPU": 8.0, "GPU": 2.0}, "cpu", {"num_cpus": 1, "num_gpus": 0}),
    ],
)
def test_a_task_asks_for_a_gpu_if_there_are_any(
    monkeypatch: pytest.MonkeyPatch,
    has: dict[str, float],
    device: str | None,
    asked: dict[str, object],
) -> None:
    ray = MadeUpRay(**has)
    monkeypatch.setattr(connection, "_imported_ray", lambda: ray)
    with RayRunner(digits(), device=device) as runner:
        assert ray.asked == {**asked, "max_retries": 0}
        assert runner.device == ("cuda" if asked["num_gpus"] else "cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": "cuda"}, "needs a GPU, but the Ray cluster has none"),
        ({"device": "tpu"}, "device must be one of"),
        ({"precision": "half"}, "precision must be one of"),
        ({"address": "10.0.0.2:6379"}, "is connected to the Ray cluster at 10.0.0.1:6379"),
    ],
)
def test_invalid_requests_raise_one_sentence(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(connection, "_imported_ray", lambda: MadeUpRay(CPU=1.0))
    with pytest.raises(ValueError, match=message):
        RayRunner(digits(), **change)


@pytest.mark.parametrize("before", [None, "relative"])
def test_workers_find_modules_where_we_do(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    ray, paths = MadeUpRay(CPU=1.0), ""

    def init(**options: object) -> None:
        nonlocal paths
        assert options["address"] == "local"
        paths = os.environ["PYTHONPATH"]

    ray.is_initialized, ray.init = (lambda: False), init
    monkeypatch.setattr(connection, "_find", lambda ray, address: None)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if before is not None:
        monkeypatch.setenv("PYTHONPATH", before)
    assert connection._connect(ray, "local")
    assert str(Path(pseudograd.__file__).parents[1]) in paths.split(os.pathsep)
    assert os.environ.get("PYTHONPATH") == before


def test_missing_ray_raises_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"a cluster needs ray: pip install 'pseudograd\[ray\]'"):
        RayRunner(digits())


# --- addresses -------------------------------------------------------------------------------


@pytest.fixture
def no_default_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """A server that accepts connections and never answers."""
    with socket.create_server(("", 0)) as listening:
        yield listening


def address_of(server: socket.socket) -> str:
    return f"127.0.0.1:{server.getsockname()[1]}"


@needs_ray
def test_an_unreachable_address_raises_one_sentence(
    no_default_address: None, server: socket.socket
) -> None:
    address = address_of(server)
    server.close()
    with pytest.raises(ConnectionError, match=f"no Ray cluster answers at {address}") as error:
        RayRunner(digits(), address)
    assert "\n" not in str(error.value)


@needs_ray
def test_a_silent_server_times_out(
    monkeypatch: pytest.MonkeyPatch, no_default_address: None, server: socket.socket
) -> None:
    monkeypatch.setattr(connection, "_PATIENCE", 0.5)
    with pytest.raises(ConnectionError, match="timed out"):
        RayRunner(digits(), address_of(server))


@needs_ray
def test_a_server_other_than_ray_is_recognised(
    no_default_address: None, server: socket.socket
) -> None:
    def answer() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(ConnectionError, match="the server there is not Ray"):
        RayRunner(digits(), address_of(server))
    thread.join()


@needs_ray
def test_bad_addresses_raise_one_sentence(
    monkeypatch: pytest.MonkeyPatch, no_default_address: None, subtests: pytest.Subtests
) -> None:
    cases: list[tuple[str, str]] = [
        ("somewhere", "address must be 'host:port'"),
        ("localhost:ray", "address must be 'host:port'"),
        ("ray://localhost:10001", "ray job submit"),
    ]
    for address, message in cases:
        for by_environment in (False, True):
            with subtests.test(address=address, message=message, by_environment=by_environment):
                if by_environment:
                    monkeypatch.setenv("RAY_ADDRESS", address)
                with pytest.raises(ValueError, match=message):
                    RayRunner(digits(), None if by_environment else address)


@needs_ray
def test_leftovers_of_a_crashed_cluster_are_ignored(
    monkeypatch: pytest.MonkeyPatch, no_default_address: None, server: socket.socket
) -> None:
    import ray

    address = address_of(server)
    server.close()
    found = "ray._private.services.canonicalize_bootstrap_address"
    monkeypatch.setattr(found, lambda _: address)
    assert connection._find(ray, None) is None  # start one
    with pytest.raises(ConnectionError, match=f"no Ray cluster answers at {address}"):
        connection._find(ray, "auto")


# --- a real cluster --------------------------------------------------------------------------

PROTOCOL = Protocol(
    TRIAL.recipe, ks=(1.0, 0.5), initial_rate=0.2, repetitions=4, retrainings=2, most_extensions=1
)
STORE = 80 * 2**20


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A cluster on this machine: a head that runs no tasks, and two nodes of one CPU each."""
    pytest.importorskip("ray", reason="Ray is not installed")
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "object_store_memory": STORE, "include_dashboard": False}
    started = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(2):
            started.add_node(num_cpus=1, object_store_memory=STORE)
        yield started
    finally:
        started.shutdown()


def started_by(runner: RayRunner | ModuleRunner, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that collects the streams of all tasks that the runner starts."""
    streams: list[Any] = []
    start = runner._start

    def noted(trials: list[Trial]) -> Any:
        streams.append(start(trials))
        return streams[-1]

    monkeypatch.setattr(runner, "_start", noted)
    return streams


def test_an_exception_in_a_worker_is_raised_once_and_unchanged(
    nodes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RayRunner(digits(), nodes.address) as run:
        started = started_by(run, monkeypatch)
        with pytest.raises(ValueError, match="trials need the data 'other'") as error:
            list(run([replace(TRIAL, data="other")]))
        assert type(error.value) is ValueError  # not Ray's multi-line wrapper
        assert len(started) == 1


def test_stopping_early_cancels_the_tasks_in_the_cluster(
    nodes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = [replace(t, max_epochs=10**9, patience=10**9) for t in TRIALS[1:]]
    with RayRunner(digits(), nodes.address) as run:
        started = started_by(run, monkeypatch)
        outcomes = iter(run([TRIALS[0], *endless]))
        assert next(outcomes).trial == TRIALS[0]
        outcomes.close()  # type: ignore[attr-defined]
        assert len(started) == 2
        for stream in started:
            with pytest.raises(run.ray.exceptions.TaskCancelledError):
                run.ray.get(stream.completed(), timeout=120)


def test_parameters_come_along(nodes: Any, one_thread: None) -> None:
    with RayRunner(digits(), nodes.address, precision="float64", keep_parameters=True) as run:
        (there,) = run(TRIALS[:1])
    (here,) = Fleet(digits(), precision="float64", keep_parameters=True).run(TRIALS[:1])
    assert there.parameters is not None
    assert here.parameters is not None
    torch.testing.assert_close(there.parameters, here.parameters)
    assert there.parameters[0][0].device.type == "cpu"


def test_an_existing_connection_stays_open(nodes: Any) -> None:
    import ray

    with RayRunner(digits(), nodes.address):
        with RayRunner(digits()) as run:
            assert len(list(run(TRIALS[:1]))) == 1
        assert ray.is_initialized()
        with pytest.raises(ValueError, match="is connected to the Ray cluster at"):
            RayRunner(digits(), "10.255.255.1:6379")
    assert not ray.is_initialized()


# --- any network -----------------------------------------------------------------------------


class Net(nn.Sequential):
    """A class that workers cannot import: they get it pickled by value."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 3)
        )


INPUTS = torch.randn(90, 6, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(90) % 3
EXAMPLES = Examples.of((INPUTS[:70], LABELS[:70]), (INPUTS[70:], LABELS[70:]))
TRAINING = Training(Net, torch.optim.SGD, {"momentum": 0.9}, epochs=3, batch_size=10)
OF_MODULES = [
    Trial(TRAINING.recipe("data"), k, 0.1, Split(retrain=retrain), seed)
    for k in (0.5, 1.0)
    for retrain in (False, True)
    for seed in (0, 1)
]


def in_order(outcomes: Iterable[Outcome]) -> list[Outcome]:
    return sorted(outcomes, key=lambda outcome: OF_MODULES.index(outcome.trial))


def assert_equal(there: list[Outcome], here: list[Outcome]) -> None:
    assert there == here
    for one, other in zip(there, here, strict=True):
        assert (one.state is not None) == one.trial.split.retrain
        if one.state is not None and other.state is not None:
            assert one.state.keys() == other.state.keys()
            for name, value in other.state.items():
                assert torch.equal(one.state[name], value)


@pytest.fixture(scope="module")
def expected() -> list[Outcome]:
    fleet = ModuleFleet(TRAINING, EXAMPLES, "cpu", 1, keep_parameters=True)
    return in_order(fleet.run(OF_MODULES))


def test_modules_train_on_a_cluster_as_they_do_here(
    nodes: Any, expected: list[Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ModuleRunner(TRAINING, EXAMPLES, nodes.address) as run:
        started = started_by(run, monkeypatch)
        assert_equal(in_order(run(OF_MODULES)), expected)
    assert len(started) == len(OF_MODULES)


class Read(torch.utils.data.Dataset[Any]):
    """Examples that vary between reads, and so are read in every epoch."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end, self.reads = start, end, 0

    def __len__(self) -> int:
        return self.end - self.start

    def __getitem__(self, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.reads += 1
        first = self.reads <= len(self) + 1  # while they are inspected
        return INPUTS[self.start + at] + 1e-3 * first, LABELS[self.start + at]


def test_a_source_of_examples_travels(nodes: Any) -> None:
    examples = Examples.of(Read(0, 70), Read(70, 90))
    assert examples.source is not None
    trial = OF_MODULES[0]
    (here,) = ModuleFleet(TRAINING, examples, "cpu", 1).run([trial])
    with ModuleRunner(TRAINING, examples, nodes.address) as run:
        (there,) = run([trial])
    assert there == here


def test_modules_survive_the_death_of_a_worker(
    nodes: Any, expected: list[Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths = tmp_path / "deaths"

    def dies_once(trials: list[Trial], *settings: Any) -> Iterator[Outcome]:
        if OF_MODULES[3] in trials and not deaths.exists():
            deaths.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        yield from cluster._train_modules(trials, *settings)

    with ModuleRunner(TRAINING, EXAMPLES, nodes.address) as run:
        run.task = run.ray.remote(num_cpus=1, max_retries=0)(dies_once)
        started = started_by(run, monkeypatch)
        assert_equal(in_order(run(OF_MODULES)), expected)
    assert deaths.exists()
    assert len(started) == len(OF_MODULES) + 1


def test_a_module_missing_on_a_machine_raises_one_sentence(
    nodes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = ModuleType("gone")
    monkeypatch.setitem(sys.modules, "gone", gone)
    exec("from torch import nn\ndef net():\n    return nn.Linear(6, 3)", gone.__dict__)
    training = Training(gone.net, epochs=1)
    trial = Trial(training.recipe("data"), 1, 0.1)
    with (
        ModuleRunner(training, EXAMPLES, nodes.address) as run,
        pytest.raises(ImportError, match=r"cannot import the network \(No module named 'gone'"),
    ):
        list(run([trial]))


def test_a_study_on_a_cluster_ends_as_one_without(
    nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network is in a file of the current folder, which the workers' folder lacks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("own_net.py").write_text(
        "from torch import nn\nHIDDEN = 5\nclass Own(nn.Sequential):\n    def __init__(self):\n"
        "        super().__init__(nn.Linear(6, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 3))\n"
    )
    own_net = importlib.import_module("own_net")
    monkeypatch.setitem(sys.modules, "own_net", own_net)
    studies = [
        ModuleStudy(
            own_net.Own, (INPUTS[:70], LABELS[:70]), (INPUTS[70:], LABELS[70:]),
            k=(0.5, 1), learning_rates=(0.01, 0.03, 0.1), epochs=2, batch_size=10, validation=0.3,
            retrainings=2, folder=folder,
        )
        for folder in ("here", "there")
    ]  # fmt: skip
    assert studies[0].run(device="cpu", slots=1, progress=False)
    assert studies[1].run(ray=nodes.address, progress=False)
    here, there = studies
    assert dict(here.ledger) == dict(there.ledger)
    assert here.result == there.result
    assert here.assessment == there.assessment
    assert there.about["devices"] == ["ray"]
    for one, other in zip(here.model().parameters(), there.model().parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_cluster_with_gpus_trains_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_imported_ray", lambda: MadeUpRay(CPU=1.0, GPU=1.0))
    with ModuleRunner(TRAINING, EXAMPLES) as run:
        assert run.device == "cuda"


def test_trials_of_another_training_are_refused_by_a_worker(nodes: Any) -> None:
    refused = pytest.raises(ValueError, match="their batch_size is 11, but the fleet's is 10")
    with ModuleRunner(TRAINING, EXAMPLES, nodes.address) as run, refused:
        list(run([replace(OF_MODULES[0], batch_size=11)]))


def test_unpicklable_functions_raise_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_imported_ray", lambda: MadeUpRay(CPU=1.0))
    lock = threading.Lock()
    training = Training(lambda: nn.Linear(6, 3 if lock else 4))
    with pytest.raises(ValueError, match=r"must be picklable .*lock") as error:
        ModuleRunner(training, EXAMPLES)
    assert "\n" not in str(error.value)


# --- the last test, which leaves the cluster with one node -----------------------------------


def test_a_node_killed_in_mid_run_changes_nothing(
    nodes: Any, tmp_path: Path, one_thread: None
) -> None:
    in_process = Study(None, PROTOCOL)
    assert in_process.run(Fleet(digits(), precision="float64").run)
    expected = in_process.ledger

    first, held = PROTOCOL.wanted({})[0], tmp_path / "held"

    def holds_once(trials: list[Trial], *settings: Any) -> Iterator[Outcome]:
        """Yield one outcome and hang: the others can only come from another worker."""
        import ray

        hold = first in trials and not held.exists()
        for outcome in cluster._train(trials, *settings):
            if hold:
                held.write_text(ray.get_runtime_context().get_node_id())
            yield outcome
            while hold:
                time.sleep(0.1)

    study, killed, calls = Study(tmp_path / "cluster", PROTOCOL), 0, 0

    def kill_what_holds(progress: Progress) -> None:
        nonlocal killed
        there = held.read_text() if held.exists() else ""
        for node in [node for node in nodes.worker_nodes if node.node_id == there]:
            nodes.remove_node(node, allow_graceful=False)
            killed = len(study.ledger)

    with RayRunner(digits(), nodes.address, precision="float64") as run:
        run.task = run.ray.remote(num_cpus=1, max_retries=0)(holds_once)

        def counted(trials: deque[Trial], stop: Stop) -> Iterator[Outcome]:
            nonlocal calls
            calls += 1
            return run(trials, stop)

        assert study.run(counted, watch=kill_what_holds)
    found = study.ledger
    assert 0 < killed < len(expected)
    assert calls <= 4  # lost trials were rerun within the same call

    assert set(Study.open(tmp_path / "cluster").ledger) == set(expected)
    for trial, outcome in found.items():
        assert outcome == replace(expected[trial], cross_entropy=outcome.cross_entropy)
        assert outcome.cross_entropy == pytest.approx(expected[trial].cross_entropy, rel=1e-9)
    ours, theirs = study.result, in_process.result
    assert (ours.chosen, ours.plain, ours.cells) == (theirs.chosen, theirs.plain, theirs.cells)
    assert ours.comparison.error == theirs.comparison.error
    assert ours.comparison.mcnemar_p == theirs.comparison.mcnemar_p
    lines = (tmp_path / "cluster" / "ledger.jsonl").read_text().splitlines()
    assert len(lines) == 1 + len(expected)  # each trial once
