"""Batches for captured steps: gathered on the GPU, or copied there ahead of time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from pseudograd.fleet.modules.examples import Examples

_READERS, _BATCHES_AHEAD = 2, 4  # threads and prefetched batches of data read on the host


class Taker:
    """Provides the batches of a captured step from examples in device memory.

    Args:
        examples: The examples.
        device: The GPU.

    """

    def __init__(self, examples: Examples, device: torch.device) -> None:
        self.inputs = tuple(one.to(device) for one in examples.inputs)
        self.labels = examples.labels.to(device)

    def take(self, rows: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the inputs and labels of these rows, on the device."""
        inputs = tuple(one.index_select(0, rows) for one in self.inputs)
        return inputs, self.labels.index_select(0, rows)

    def feed(self, rows: Tensor) -> Iterator[None]:
        """Do nothing before each step: the data is on the device."""
        while True:
            yield


class Streamed(Taker):
    """Provides batches that host threads, or a DataLoader, prefetch into pinned memory.

    Args:
        examples: The examples.
        size: Examples per batch.
        device: The GPU.

    """

    def __init__(self, examples: Examples, size: int, device: torch.device) -> None:
        self.examples = examples
        rows = torch.zeros(size, dtype=torch.int64)
        self.inputs = tuple(one.to(device) for one in examples.batch(rows))
        self.labels = examples.labels[rows].to(device)
        self.readers = ThreadPoolExecutor(_READERS)

    def take(self, rows: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the batch that was last copied to the device."""
        return self.inputs, self.labels

    def feed(self, rows: Tensor) -> Iterator[None]:
        """Copy each batch of rows to the device before its step."""
        for batch in self._ahead(rows.cpu()):
            for mine, new in zip((*self.inputs, self.labels), batch, strict=True):
                mine.copy_(new, non_blocking=True)
            yield

    def _ahead(self, rows: Tensor) -> Iterator[list[Tensor]]:
        """Yield the inputs and labels of each batch."""
        if self.examples.num_workers:
            yield from map(self._pinned, rows, self.examples.batches(rows))
            return
        coming = deque(self.readers.submit(self._read, some) for some in rows[:_BATCHES_AHEAD])
        for at in range(len(rows)):
            batch = coming.popleft().result()
            if at + _BATCHES_AHEAD < len(rows):
                coming.append(self.readers.submit(self._read, rows[at + _BATCHES_AHEAD]))
            yield batch

    def _read(self, rows: Tensor) -> list[Tensor]:
        return self._pinned(rows, self.examples.batch(rows))

    def _pinned(self, rows: Tensor, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        return [one.pin_memory() for one in (*inputs, self.examples.labels[rows])]


def fits(examples: Examples, device: torch.device) -> bool:
    """Return whether the examples take less than half of the device's free memory."""
    if examples.source is not None:
        return False
    size = sum(one.nbytes for one in (*examples.inputs, examples.labels))
    return size < torch.cuda.mem_get_info(device)[0] / 2
