"""The stack of networks trained by the kernels, an epoch at a time as one CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from pseudograd.fleet import kernels
from pseudograd.fleet.stack import Examples, Settings, Stack

MOST_ROWS = 128  # of a batch: a step works on all of them at once

# The tiles, and the warps that work on one, as they measured best on an H200.
_LAYER = {"block_out": 64, "block_in": 64, "num_warps": 4, "num_stages": 3}
_BEFORE = {"block_in": 64, "block_out": 64, "num_warps": 4, "num_stages": 3}
_NORM = {"block": 64, "num_warps": 8, "num_stages": 2}
_UPDATE = {"block_in": 64, "block_out": 64, "num_warps": 4}


class FusedStack(Stack):
    """`Stack` for "sgd" with batches of up to 128: products of float16 numbers, sums in float32.

    Args:
        examples: The data set.
        layer_sizes: Inputs, hidden layers, classes.
        activation: Of the hidden layers.
        models: How many networks.
        batch_size: Examples a step.

    """

    def __init__(
        self,
        examples: Examples,
        layer_sizes: Sequence[int],
        activation: str,
        models: int,
        batch_size: int,
    ) -> None:
        super().__init__(examples, layer_sizes, activation, "sgd", models)
        self.activation = activation
        self.batch_size = batch_size
        self.block_rows = max(16, triton.next_power_of_2(batch_size))
        self._lay_out()

    def _lay_out(self) -> None:
        """Allocate what a step writes besides the networks. A graph keeps to these addresses."""
        models, device = len(self.weights[0]), self.examples.labels.device
        widths, rows = self.layer_sizes[1:], models * self.batch_size
        self.shadows = [weight.half() for weight in self.weights]
        self.hidden = [torch.empty(rows * w, dtype=torch.half, device=device) for w in widths[:-1]]
        self.logits = torch.empty(rows * widths[-1], device=device)
        self.deltas = [torch.empty(rows * w, dtype=torch.half, device=device) for w in widths]
        self.unit = torch.empty(models, device=device)
        self.norms = torch.zeros(len(widths), models, device=device)
        self.order: Tensor | None = None
        self.settings: Settings | None = None
        self.graph: torch.cuda.CUDAGraph | None = None

    def start(self, models: Tensor, seeds: Tensor) -> None:
        """Put fresh networks in the given places."""
        super().start(models, seeds)
        for shadow, weight in zip(self.shadows, self.weights, strict=True):
            shadow[models] = weight[models].half()

    def select(self, models: Tensor) -> None:
        """Drop all networks but the given ones."""
        super().select(models)
        self._lay_out()

    def train(self, order: Tensor, batch_size: int, settings: Settings) -> None:
        """Train for one epoch: the first kernel by kernel, all others as one graph."""
        if self.order is None or self.settings is None:
            self.order, self.settings = order.int(), settings.clone()
            self._epoch(self.order, self.settings)
            return
        self.order.copy_(order)
        self.settings.copy_(settings)
        if not self.order.is_cuda:
            self._epoch(self.order, self.settings)
            return
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._epoch(self.order, self.settings)
        self.graph.replay()

    def _epoch(self, order: Tensor, settings: Settings) -> None:
        for index in order.split(self.batch_size, 1):
            self._fused_step(index, settings)

    def _fused_step(self, index: Tensor, settings: Settings) -> None:
        models, size = index.shape
        rows = {"block_rows": self.block_rows}
        self._run_layers(index, self.shadows, self.biases, [*self.hidden, self.logits])
        kernels.pseudo_gradient[(models,)](
            self.logits, index, index.stride(0), self.examples.labels, settings.k, self.deltas[-1],
            self.unit, size, self.layer_sizes[-1],
            block_classes=triton.next_power_of_2(self.layer_sizes[-1]), **rows,
        )  # fmt: skip
        last = len(self.weights) - 1
        for at in range(last, 0, -1):
            width, outputs = self.layer_sizes[at : at + 2]
            kernels.errors_before[(triton.cdiv(width, _BEFORE["block_in"]), models)](
                self.deltas[at], self.shadows[at], self.hidden[at - 1], self.deltas[at - 1], size,
                width, outputs, self.activation, **rows, **_BEFORE,
            )  # fmt: skip
        clip = settings.clip
        if clip is not None:
            for at in range(last + 1):
                kernels.squared_norm[(models,)](
                    *self._inputs(at, index), self.deltas[at], self.unit, self.norms[at], size,
                    *self._scaling, *self.layer_sizes[at : at + 2], at == 0, **rows, **_NORM,
                )  # fmt: skip
        for at in range(last + 1):
            width, outputs = self.layer_sizes[at : at + 2]
            grid = (
                triton.cdiv(width, _UPDATE["block_in"]),
                triton.cdiv(outputs, _UPDATE["block_out"]),
                models,
            )
            kernels.update[grid](
                *self._inputs(at, index), self.deltas[at], self.unit, self.norms,
                settings.k if clip is None else clip, settings.learning_rate, settings.momentum,
                self.weights[at], self.moments[0][2 * at], self.shadows[at], self.biases[at],
                self.moments[0][2 * at + 1], size, *self._scaling, models, width, outputs, at == 0,
                last + 1, clip is not None, **rows, **_UPDATE,
            )  # fmt: skip

    def _run_layers(
        self,
        index: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor],
        outs: Sequence[Tensor],
    ) -> None:
        """All layers forward, for the examples ``index`` (models, rows)."""
        models, size = index.shape
        x = self.examples.features
        for at, (weight, bias, out) in enumerate(zip(weights, biases, outs, strict=True)):
            width, outputs = self.layer_sizes[at : at + 2]
            last = at == len(weights) - 1
            grid = (
                triton.cdiv(outputs, _LAYER["block_out"]),
                triton.cdiv(size, self.block_rows),
                models,
            )
            kernels.layer[grid](
                x, index, index.stride(0), weight, bias, out, size, *self._scaling,
                width, outputs, at == 0, "none" if last else self.activation,
                block_rows=self.block_rows, **_LAYER,
            )  # fmt: skip
            x = out

    def logits_of(self, index: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """Give the logits for the examples ``index`` (models, rows) by the given parameters."""
        models, size = index.shape
        device = index.device
        *widths, classes = self.layer_sizes[1:]
        hidden = [torch.empty(models * size * w, dtype=torch.half, device=device) for w in widths]
        logits = torch.empty(models, size, classes, device=device)
        weights = [weight.half() for weight in parameters[::2]]
        self._run_layers(index, weights, parameters[1::2], [*hidden, logits])
        return logits

    def _inputs(self, at: int, index: Tensor) -> tuple[Tensor, Tensor, int]:
        x = self.hidden[at - 1] if at else self.examples.features
        return x, index, index.stride(0)

    @property
    def _scaling(self) -> tuple[float, float]:
        return self.examples.factor, self.examples.offset
