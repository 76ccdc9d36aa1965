"""Launches that are remembered, so that Python does not work out the same ones at every step.

A launch through Triton's front end takes 20 to 60 microseconds of Python, most of it to find the
compiled kernel that belongs to the arguments. The tensors of a training step have the same layout
at every step. So the kernels of a pass are found once for each layout, and launched again with
other addresses, which takes a few microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Addresses that are multiples of this many bytes give the same kernels.
_ALIGNMENT = 16
# More layouts than a program should have; they are all forgotten then.
_MOST_PLANS = 4096


class Launch(NamedTuple):
    """A kernel that has been launched, and its arguments."""

    compiled: Any  # None in Triton's interpreter
    grid: tuple[int]
    names: list[str]
    arguments: tuple[Any, ...]


def start(kernel: Any, grid: tuple[int], *arguments: Any, **settings: Any) -> Launch:
    """Launch a kernel; ``settings`` are its compile-time constants and the compiler's options."""
    return Launch(kernel[grid](*arguments, **settings), grid, kernel.arg_names, arguments)


class Plan:
    """The launches of a pass, to be repeated on other tensors of the same layout."""

    def __init__(self, launches: Iterable[Launch], tensors: Sequence[Tensor | None]) -> None:
        slots = {id(tensor): slot for slot, tensor in enumerate(tensors)}
        self._steps = []
        for compiled, (programs,), names, arguments in launches:
            # Constants, which come last, are part of the compiled kernel.
            template = [*arguments, *[None] * (len(names) - len(arguments))]
            places = [
                (at, slots[id(argument)])
                for at, argument in enumerate(arguments)
                if isinstance(argument, Tensor)
            ]
            k_at = names.index("k") if "k" in names else None
            self._steps.append((compiled[programs, 1, 1], template, places, k_at))

    def repeat(self, addresses: Sequence[int], k: float, device: int) -> None:
        """Launch the kernels again, with other addresses and another k."""
        stream = torch._C._cuda_getCurrentRawStream(device)
        for run, template, places, k_at in self._steps:
            arguments = template.copy()
            for at, slot in places:
                arguments[at] = addresses[slot]
            if k_at is not None:
                arguments[k_at] = k
            run(*arguments, stream=stream)


class Plans:
    """The plans of one kind of pass, by the layout of its tensors."""

    def __init__(self) -> None:
        self._plans: dict[Hashable, Plan] = {}

    def launch(
        self,
        layout: Hashable,
        tensors: Sequence[Tensor | None],
        k: float,
        launches: Callable[[], Iterable[Launch | None]],
    ) -> None:
        """Launch the kernels of a pass: by the plan for the layout, or by ``launches`` at first.

        Args:
            layout: All that the kernels and their other arguments depend on.
            tensors: All tensors that the kernels read and write; the first is on their device.
            k: The kernels' argument of that name.
            launches: Launches the kernels one by one, on the current device; None stands for a
                launch that is not needed.

        """
        first = tensors[0]
        assert first is not None
        device = first.get_device()
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        together = 0
        for address in addresses:
            together |= address
        if device < 0 or device != torch._C._cuda_getDevice() or together % _ALIGNMENT:
            with torch.cuda.device_of(first):
                list(launches())
            return
        plan = self._plans.get((device, layout))
        if plan is not None:
            plan.repeat(addresses, k, device)
            return
        launched = [launch for launch in launches() if launch is not None]
        if all(launch.compiled is not None for launch in launched):
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            self._plans[device, layout] = Plan(launched, tensors)
