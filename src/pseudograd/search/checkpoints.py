"""Checkpoints: the weights of a study's trained networks, by trial."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from torch import Tensor

from pseudograd.extras import needed_for
from pseudograd.files import write_whole, writing
from pseudograd.fleet import Outcome, Stop, Trial, never
from pseudograd.search.ledger import trial_name
from pseudograd.search.study import Runner


class Checkpoints:
    """The weights of trained networks: one file per network in a folder, or in memory.

    A network whose file is missing or damaged counts as not trained.

    Args:
        folder: Where to keep them; None for memory.

    Example:
        >>> import tempfile, torch
        >>> from pseudograd.fleet import OwnRecipe
        >>> checkpoints, trial = Checkpoints(Path(tempfile.mkdtemp())), Trial(OwnRecipe("a"), 1, 1)
        >>> checkpoints.put(trial, {"bias": torch.zeros(2)})
        >>> checkpoints.get(trial)
        {'bias': tensor([0., 0.])}

    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._kept: dict[Trial, Mapping[str, Tensor]] = {}

    def put(self, trial: Trial, tensors: Mapping[str, Tensor]) -> None:
        """Store the weights of a trial's network."""
        if self.folder is None:
            self._kept[trial] = tensors
            return
        with needed_for("saving a network"):
            from safetensors.torch import save

        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        path = self._path(trial)
        with writing(path):
            self.folder.mkdir(exist_ok=True)
            write_whole(path, save(whole, {"sha256": _sha256(save(whole))}))

    def get(self, trial: Trial) -> Mapping[str, Tensor] | None:
        """Return the weights of a trial's network; None if they are missing or damaged."""
        if self.folder is None:
            return self._kept.get(trial)
        with needed_for("loading a network"):
            from safetensors import SafetensorError, safe_open
            from safetensors.torch import save

        try:
            with safe_open(self._path(trial), "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                known = (file.metadata() or {}).get("sha256")
        except (OSError, SafetensorError):
            return None
        return tensors if _sha256(save(tensors)) == known else None

    def load(self, trial: Trial) -> Mapping[str, Tensor]:
        """Return the weights of a trial's network; raise ValueError where `get` returns None."""
        if (tensors := self.get(trial)) is None:
            raise ValueError(f"the weights of {trial} are missing or damaged: run the study again")
        return tensors

    def keeping(
        self, runner: Runner, tensors_of: Callable[[Outcome], Mapping[str, Tensor] | None]
    ) -> Runner:
        """Return a runner that stores networks before it yields their outcomes.

        So a study that is killed has the network of every outcome in its ledger.

        Args:
            runner: Trains trials.
            tensors_of: Returns the weights to store of an outcome, or None.

        """

        def run(trials: deque[Trial], stop: Stop) -> Iterator[Outcome]:
            for outcome in runner(trials, stop):
                if (tensors := tensors_of(outcome)) is not None:
                    self.put(outcome.trial, tensors)
                yield outcome

        return run

    def complete(self, trials: Iterable[Trial], keeping: Runner) -> bool:
        """Train the networks that are missing, with a runner by `keeping`; return if any were."""
        lost = [trial for trial in trials if self.get(trial) is None]
        if lost:
            for _ in keeping(deque(lost), never):
                pass
        return bool(lost)

    def _path(self, trial: Trial) -> Path:
        assert self.folder is not None
        return self.folder / f"{trial_name(trial)}.safetensors"


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
