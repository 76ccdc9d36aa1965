"""Where trials run: the options ``--device`` and ``--ray``."""

from __future__ import annotations

import argparse
import contextlib
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from pseudograd.data import Dataset
    from pseudograd.fleet import Outcome, Stop, Trial
    from pseudograd.search import Runner
    from pseudograd.search.cluster import RayRunner


def add_place(parser: argparse._ActionsContainer) -> None:
    """Add ``--device`` and ``--ray``."""
    parser.add_argument(
        "--device",
        nargs="+",
        metavar="DEVICE",
        help="cpu, cuda, cuda:1, ... (all GPUs, or the CPU if there is none)",
    )
    parser.add_argument(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="run on a Ray cluster: the one at ADDRESS, the one running here, or a new one",
    )


class Place(contextlib.ExitStack):
    """The devices or the cluster that run trials; a context that disconnects from the cluster.

    Args:
        options: The parsed ``device`` and ``ray``.

    Attributes:
        devices: The devices, as recorded in the run.

    Example:
        >>> with Place(argparse.Namespace(device=["cpu"], ray=None)) as place:
        ...     place.devices
        ('cpu',)

    """

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.address: str | None = options.ray
        self._clusters: dict[str, RayRunner] = {}
        if self.address is not None:
            if options.device:
                raise ValueError("--device must be left out with --ray, which has its own devices")
            self.devices: tuple[str, ...] = ("ray",)
        else:
            self.devices = _devices(options.device)

    def __enter__(self) -> Self:
        super().__enter__()
        if self.address is not None:
            from pseudograd.search.connection import connection

            self.enter_context(connection(self.address or None))
        return self

    def runner(self, data: Dataset, keep_parameters: bool = False, memory: float = 1.0) -> Runner:
        """Return a runner for a data set.

        Args:
            data: The data set.
            keep_parameters: Whether outcomes carry the weights.
            memory: The part of a GPU's memory that is for this runner.

        """
        if self.address is None:
            from pseudograd.fleet import Fleet

            def run(trials: deque[Trial], stop: Stop) -> Iterable[Outcome]:
                keep = keep_parameters and trials[0].split.may_be_kept
                fleet = Fleet(data, self.devices, keep_parameters=keep, memory=memory)
                return fleet.run(trials, stop)

            return run
        from pseudograd.search.cluster import RayRunner

        # One runner per data set, so that the data are sent to the cluster once.
        if data.sha256 not in self._clusters:
            self._clusters[data.sha256] = self.enter_context(RayRunner(data))
        cluster = self._clusters[data.sha256]

        def run_on_cluster(trials: deque[Trial], stop: Stop) -> Iterable[Outcome]:
            cluster.keep_parameters = keep_parameters and trials[0].split.may_be_kept
            return cluster(trials, stop)

        return run_on_cluster


def _devices(given: list[str] | None) -> tuple[str, ...]:
    """Return the devices to use: the given ones, checked, or all."""
    from pseudograd.fleet.devices import all_devices, check_device

    if not given:
        return all_devices()
    for device in given:
        try:
            check_device(device)
        except ValueError as problem:
            raise ValueError(
                f"--device {device} {problem}: leave it out to use the available devices"
            ) from problem
    return tuple(given)
