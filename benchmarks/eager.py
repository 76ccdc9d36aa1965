"""The eager training loop that the module benchmarks compare with."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.networks import EXAMPLES, Case

RATE, MOMENTUM, VALIDATION = 0.01, 0.9, 0.1


def noise(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return random inputs and labels in the shape of a real set; speed does not depend on them."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (EXAMPLES,), generator=generator)
    return torch.rand(EXAMPLES, *shape, generator=generator), labels


class Loop:
    """A well-written eager loop: no synchronization within an epoch, images in channels-last."""

    def __init__(self, case: Case, compiled: bool = False) -> None:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        x, y = noise(case.shape)
        held = int(EXAMPLES * VALIDATION)
        self.x, self.y, self.case = x.cuda(), y.cuda(), case
        self.held = torch.arange(held, device="cuda")
        self.trained = torch.arange(held, EXAMPLES, device="cuda")
        self.module = case.network().cuda()
        if x.dim() == 4:  # batches keep the layout
            self.x = self.x.contiguous(memory_format=torch.channels_last)
            self.module = self.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.forward: Any = self.module
        if compiled:
            self.forward = torch.compile(self.module, mode="reduce-overhead")
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=RATE, momentum=MOMENTUM)
        self.steps = len(self.trained) // case.batch_size

    def autocast(self) -> torch.autocast:
        return torch.autocast("cuda", torch.bfloat16, enabled=self.case.precision == "bf16")

    def epoch(self) -> float:
        """Train for an epoch; return the error on the examples held out."""
        self.module.train()
        order = self.trained[torch.randperm(len(self.trained), device="cuda")]
        for rows in order[: self.steps * self.case.batch_size].split(self.case.batch_size):
            x, y = self.x[rows], self.y[rows]
            with self.autocast():
                logits = self.forward(x)
            loss = F.cross_entropy(logits.float(), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        self.module.eval()
        wrong = torch.zeros((), device="cuda")
        with torch.no_grad(), self.autocast():
            for rows in self.held.split(4 * self.case.batch_size):
                wrong += (self.module(self.x[rows]).argmax(1) != self.y[rows]).sum()
        return wrong.item() / len(self.held)

    def seconds(self, epochs: int) -> float:
        """Train for some epochs; return the seconds that they take."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(epochs):
            self.epoch()
        torch.cuda.synchronize()
        return time.perf_counter() - began
