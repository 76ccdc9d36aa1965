"""Claims: file locks on the trials in progress, so that processes can share a study's folder.

A claim is a file in the folder ``claims``, named after its trial and locked by the process that
trains it. The operating system releases the lock when that process ends, even by kill -9. All
methods must be called under the lock of the study's folder (`pseudograd.files.guarded`), so that no
file is removed while another process is opening it.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from pseudograd.files import Lock
from pseudograd.fleet import Trial
from pseudograd.search.ledger import trial_name

FOLDER = "claims"


class Claims:
    """The claims of one process.

    Args:
        folder: The study's folder.

    Example:
        >>> import tempfile
        >>> from pseudograd.fleet import OwnRecipe
        >>> folder, trial = Path(tempfile.mkdtemp()), Trial(OwnRecipe("mine"), 0.5, 0.1)
        >>> ours, theirs = Claims(folder), Claims(folder)
        >>> ours.take(trial), theirs.take(trial)
        (True, False)
        >>> ours.release(trial)
        >>> theirs.take(trial)
        True

    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / FOLDER
        self._locks: dict[Trial, Lock] = {}

    @property
    def trials(self) -> list[Trial]:
        """The trials that this process has claimed."""
        return [trial for trial, lock in self._locks.items() if lock.held]

    def take(self, trial: Trial) -> bool:
        """Claim a trial; return False if it is already claimed."""
        if trial in self.trials:
            return False
        self.folder.mkdir(exist_ok=True)
        lock = Lock.on(self._file(trial))
        if lock is None:
            return False
        self._locks[trial] = lock
        return True

    def release(self, trial: Trial) -> None:
        """Release a claim, if this process holds it."""
        lock = self._locks.pop(trial, None)
        if lock is not None and lock.held:  # a forked child does not hold its parent's locks
            lock.release()
            self._file(trial).unlink(missing_ok=True)
            self._remove_folder()

    def others(self) -> bool:
        """Return whether others hold claims; remove those of killed processes."""
        if not self.folder.is_dir():
            return False
        ours = {self._file(trial) for trial in self.trials}
        for path in {*self.folder.iterdir()} - ours:
            if (lock := Lock.on(path)) is None:
                return True
            lock.release()
            path.unlink(missing_ok=True)
        self._remove_folder()
        return False

    def _remove_folder(self) -> None:
        with contextlib.suppress(OSError):  # not empty
            self.folder.rmdir()

    def _file(self, trial: Trial) -> Path:
        return self.folder / trial_name(trial)
