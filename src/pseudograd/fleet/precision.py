"""The precision of float32 products and convolutions, a global setting of PyTorch."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch


class Precision:
    """Allows or forbids TF32 while fleets train; the last one to finish restores the setting.

    If fleets that train at once need different precisions, full float32 applies.

    Example:
        >>> torch.set_float32_matmul_precision("medium")
        >>> precision = Precision()
        >>> with precision(tf32=True), precision(tf32=False):
        ...     print(torch.get_float32_matmul_precision())
        highest
        >>> torch.get_float32_matmul_precision()
        'medium'
        >>> torch.set_float32_matmul_precision("highest")

    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked_for: list[bool] = []
        self._restore: Callable[[], None] = lambda: None

    @contextlib.contextmanager
    def __call__(self, *, tf32: bool) -> Iterator[None]:
        """Allow TF32 inside the block, or forbid it."""
        with self._lock:
            if not self._asked_for:
                self._restore = _how_to_restore()
            self._asked_for.append(tf32)
            self._set()
        try:
            yield
        finally:
            with self._lock:
                self._asked_for.remove(tf32)
                self._set()

    def _set(self) -> None:
        if not self._asked_for:
            self._restore()
            return
        tf32 = all(self._asked_for)
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        if torch.cuda.is_available():
            torch.backends.cudnn.allow_tf32 = tf32


def _how_to_restore() -> Callable[[], None]:
    """Return a function that sets the precision to what it is now."""
    flags: Any = torch.backends
    backends = [flags.cuda.matmul, flags.mkldnn.matmul]
    if has_gpu := torch.cuda.is_available():
        backends += [flags.cudnn.conv, flags.cudnn.rnn]
    before = [one.fp32_precision for one in backends]
    # Settings for all backends at once, kept beside the others. PyTorch refuses to say them if
    # they contradict those.
    name: str | None = None
    with contextlib.suppress(RuntimeError):
        name = torch.get_float32_matmul_precision()
    convolutions: bool | None = None
    with contextlib.suppress(RuntimeError):
        convolutions = flags.cudnn.allow_tf32 if has_gpu else None

    def restore() -> None:
        if name is not None:
            torch.set_float32_matmul_precision(name)
        if convolutions is not None:
            flags.cudnn.allow_tf32 = convolutions
        for one, precision in zip(backends, before, strict=True):
            one.fp32_precision = precision

    return restore


precision = Precision()
