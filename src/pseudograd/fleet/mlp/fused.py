"""The stack of networks trained by the kernels, an epoch at a time as one CUDA graph."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from pseudograd.fleet.mlp import kernels
from pseudograd.fleet.mlp.kernels import PANEL
from pseudograd.fleet.mlp.stack import Examples, Rows, Settings, Stack, launching

# Tiles and warps that measured best on an H200.
_GATHER = {"block": 128, "num_warps": 8}
_LAYER = {"block_out": 128, "block_in": 64, "num_warps": 8, "num_stages": 3}
_BEFORE = {"block_in": 128, "block_out": 64, "num_warps": 4, "num_stages": 3}
_NORM = {"part": 1024, "block": 128, "num_warps": 8, "num_stages": 3}
_UPDATE = {"block_in": 64, "block_out": 64, "num_warps": 4}
_UPDATE_AND_NEXT = {"block_in": 32, "block_out": 64, "num_warps": 4}


class FusedStack(Stack):
    """`Stack` for "sgd" with batches of up to 128: products of float16 numbers, sums in float32.

    Args:
        examples: The data set.
        layer_sizes: Inputs, hidden layers, classes.
        activation: The hidden layers' activation.
        models: The number of networks.

    """

    def __init__(
        self, examples: Examples, layer_sizes: Sequence[int], activation: str, models: int
    ) -> None:
        super().__init__(examples, layer_sizes, activation, "sgd", models)
        self.shapes = list(itertools.pairwise(self.layer_sizes))
        self.activations = [activation] * (len(self.shapes) - 1) + ["none"]
        self.loaded = False  # whether an evaluation's kernels are loaded
        self._lay_out()

    def _lay_out(self) -> None:
        """Allocate the buffers of a step. A graph holds their addresses."""
        models, device = len(self.weights[0]), self.examples.labels.device
        self.shadows = [weight.half() for weight in self.weights]
        self.panels = self._panels(models)
        self.following = torch.empty_like(self.panels[0])
        self.deltas = [torch.empty_like(panel, dtype=torch.half) for panel in self.panels[1:]]
        self.unit = torch.empty(models, device=device)
        self.norm_parts = [triton.cdiv(width, _NORM["part"]) for width, _ in self.shapes]
        self.norms = torch.empty(sum(self.norm_parts), models, device=device)
        self.order: Tensor | None = None
        self.settings: Settings | None = None
        self.graph: torch.cuda.CUDAGraph | None = None

    def _panels(self, count: int) -> list[Tensor]:
        """Allocate inputs and hidden layers in float16, and logits in float32."""
        *widths, classes = self.layer_sizes
        device = self.examples.labels.device
        panels = [torch.empty(count, w, PANEL, dtype=torch.half, device=device) for w in widths]
        return [*panels, torch.empty(count, classes, PANEL, device=device)]

    def _rows(self, models: int) -> Rows:
        """Return a tensor of its own for each layer, as the kernels expect."""
        rows = super()._rows(0)
        rows.tensors = [
            torch.zeros(models, *view.shape[1:], device=view.device) for view in rows.tensors
        ]
        return rows

    def start(self, models: Tensor, seeds: Tensor) -> None:
        """Put fresh networks in the given slots."""
        super().start(models, seeds)
        for shadow, weight in zip(self.shadows, self.weights, strict=True):
            shadow[models] = weight[models].half()

    def select(self, models: Tensor) -> None:
        """Drop all networks but the given ones."""
        super().select(models)
        with launching:
            self.graph = None
        self._lay_out()

    def train(self, order: Tensor, batch_size: int, settings: Settings) -> None:
        """Train for one epoch: the first time kernel by kernel, then as one graph."""
        if self.order is None or self.settings is None:
            self.order, self.settings = order.int(), settings.clone()
            with launching:
                self._epoch(self.order, batch_size, self.settings)
            return
        self.order.copy_(order)
        self.settings.copy_(settings)
        if not self.order.is_cuda:
            self._epoch(self.order, batch_size, self.settings)
            return
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            stream = _capture_stream(self.order.device)
            # Other threads may allocate during the capture.
            capture = torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local")
            with launching, capture:
                self._epoch(self.order, batch_size, self.settings)
        self.graph.replay()

    def _epoch(self, order: Tensor, batch_size: int, settings: Settings) -> None:
        """Train step by step; the first layer's shadow is valid before and after, not between."""
        first, *others = batches = order.split(batch_size, 1)
        self._gather(first, self.panels[0])
        self._run_layers(range(1), self.shadows, self.biases, self.panels)
        for index, following in itertools.zip_longest(batches, others):
            self._run_layers(range(1, len(self.shapes)), self.shadows, self.biases, self.panels)
            self._find_errors(index, settings)
            self._update_layers(following, settings)

    def _find_errors(self, index: Tensor, settings: Settings) -> None:
        """Compute all layers' errors, and their unit, from the logits of the batch ``index``."""
        models, size = index.shape
        kernels.pseudo_gradient[(models,)](
            self.panels[-1], index, index.stride(0), self.examples.labels, settings.k,
            self.deltas[-1], self.unit, size, self.layer_sizes[-1],
            block=triton.next_power_of_2(self.layer_sizes[-1]),
        )  # fmt: skip
        # A rule that weights each example by a function of its cross-entropy scales the last
        # layer's deltas here (one factor for each column of a panel), before they go backward.
        for at in range(len(self.shapes) - 1, 0, -1):
            width, outputs = self.shapes[at]
            tiles = _within(_BEFORE, block_in=width, block_out=outputs)
            kernels.errors_before[(triton.cdiv(width, tiles["block_in"]), models)](
                self.deltas[at], self.shadows[at], self.panels[at], self.deltas[at - 1], width,
                outputs, self.activations[at - 1], **tiles,
            )  # fmt: skip
        if settings.clip is not None:
            parts = self.norms.split(self.norm_parts)
            for shape, x, delta, part in zip(
                self.shapes, self.panels[:-1], self.deltas, parts, strict=True
            ):
                kernels.squared_norm[(models, len(part))](
                    x, delta, self.unit, part, models, *shape, **_NORM
                )
            kernels.clip_unit[(models,)](
                self.unit, self.norms, settings.clip, models, len(self.norms)
            )

    def _update_layers(self, following: Tensor | None, settings: Settings) -> None:
        """Update all layers, and run the ``following`` batch, if any, through the first."""
        models = len(self.unit)
        own = self.unit, settings.learning_rate, settings.momentum
        # The first layer comes last: its new outputs overwrite those the second learns from.
        for at in reversed(range(len(self.shapes))):
            width, outputs = self.shapes[at]
            velocity, bias_velocity = self.moments[0].tensors[2 * at : 2 * at + 2]
            kernels.update_bias[(triton.cdiv(outputs, 64), models)](
                self.deltas[at], *own, self.biases[at], bias_velocity, outputs, block=64
            )
            if at == 0 and following is not None:
                self._gather(following, self.following)
                tiles = _within(_UPDATE_AND_NEXT, block_in=width, block_out=outputs)
                kernels.update_and_next[(triton.cdiv(outputs, tiles["block_out"]), models)](
                    self.panels[0], self.following, self.deltas[0], *own, self.weights[0], velocity,
                    self.biases[0], self.panels[1], width, outputs, self.activations[0], **tiles,
                )  # fmt: skip
                # Only the names are swapped: a graph has the addresses of its every step.
                self.panels[0], self.following = self.following, self.panels[0]
                continue
            tiles = _within(_UPDATE, block_in=width, block_out=outputs)
            grid = (
                triton.cdiv(outputs, tiles["block_out"]),
                triton.cdiv(width, tiles["block_in"]),
                models,
            )
            kernels.update[grid](
                self.panels[at], self.deltas[at], *own, self.weights[at], velocity,
                self.shadows[at], width, outputs, **tiles,
            )  # fmt: skip

    def _gather(self, index: Tensor, out: Tensor) -> None:
        """Gather the examples ``index`` (models, size) into panels."""
        models, size = index.shape
        tiles, features = triton.cdiv(size, PANEL), self.layer_sizes[0]
        kernels.gather[(triton.cdiv(features, _GATHER["block"]), models * tiles)](
            self.examples.features, index, index.stride(0), out, size, self.examples.factor,
            self.examples.offset, tiles, features, **_GATHER,
        )  # fmt: skip

    def _run_layers(
        self,
        layers: range,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor],
        panels: Sequence[Tensor],
    ) -> None:
        """Run some layers forward, each from its panels to the next."""
        count, models = len(panels[0]), len(weights[0])
        for at in layers:
            width, outputs = self.shapes[at]
            blocks = _within(_LAYER, block_in=width, block_out=outputs)
            kernels.layer[(triton.cdiv(outputs, blocks["block_out"]), count)](
                panels[at], weights[at], biases[at], panels[at + 1], count // models, width,
                outputs, self.activations[at], **blocks,
            )  # fmt: skip

    def evaluated(self, models: Tensor | None) -> list[Tensor]:
        """Return the parameters to evaluate, weights in float16."""
        if models is None:
            return [p for layer in zip(self.shadows, self.biases, strict=True) for p in layer]
        parameters = super().evaluated(models)
        return [p if at % 2 else p.half() for at, p in enumerate(parameters)]

    def logits_of(self, index: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """Return the logits of the examples ``index`` (models, size) by the given parameters."""
        models, size = index.shape
        tiles = triton.cdiv(size, PANEL)
        panels = self._panels(models * tiles)
        # Loaded kernels may be launched while another thread loads or captures.
        with contextlib.nullcontext() if self.loaded else launching:
            self._gather(index.contiguous(), panels[0])
            self._run_layers(range(len(self.shapes)), parameters[::2], parameters[1::2], panels)
        self.loaded = True
        return panels[-1].reshape(models, tiles, -1, PANEL).mT.flatten(1, 2)[:, :size]


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the device's one stream to capture on; PyTorch reuses those of its small pool."""
    return torch.cuda.Stream(device)


def _within(tiles: dict[str, int], **sizes: int) -> dict[str, Any]:
    """Return the tiles, no larger than the sizes need."""
    fitting = {
        name: min(tiles[name], max(16, triton.next_power_of_2(size)))
        for name, size in sizes.items()
    }
    return {**tiles, **fitting}
