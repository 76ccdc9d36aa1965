"""The stack of networks trained by Triton kernels, several steps per CUDA graph."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from pseudograd.fleet.mlp import kernels
from pseudograd.fleet.mlp.kernels import PANEL
from pseudograd.fleet.mlp.stack import Examples, Rows, Settings, Stack, launching

# The fastest tile sizes and numbers of warps measured on an H200.
_GATHER = {"block": 128, "num_warps": 8}
_LAYER = {"block_out": 128, "block_in": 64, "num_warps": 8, "num_stages": 3}
_BEFORE = {"block_in": 128, "block_out": 64, "num_warps": 4, "num_stages": 3}
_NORM = {"part": 1024, "block": 128, "num_warps": 8, "num_stages": 3}
_UPDATE = {"block_in": 64, "block_out": 64, "num_warps": 4}
_UPDATE_AND_NEXT = {"block_in": 32, "block_out": 64, "num_warps": 4}
_BIASES = 512

_JUDGED_AT_ONCE = 512  # panels, over all models
_LONGEST_SPAN = 16  # steps per graph: more take longer to capture, fewer leave gaps on the device


class FusedStack(Stack):
    """`Stack` for "sgd" with batches of up to 128: float16 products, accumulated in float32.

    Args:
        examples: The data set.
        layer_sizes: Inputs, hidden layers, classes.
        activation: The hidden layers' activation.
        models: The number of networks.

    """

    def __init__(
        self, examples: Examples, layer_sizes: Sequence[int], activation: str, models: int
    ) -> None:
        self.shapes = list(itertools.pairwise(layer_sizes))
        self.activations = [activation] * (len(self.shapes) - 1) + ["none"]
        super().__init__(examples, layer_sizes, activation, "sgd", models)

    def _lay_out(self) -> None:
        """Allocate the buffers of a step, whose addresses a CUDA graph captures."""
        models, device = len(self.weights[0]), self.examples.labels.device
        self.shadows = [_aligned(weight.shape, torch.half, device) for weight in self.weights]
        self.panels = self._panels(models)
        self.following = torch.empty_like(self.panels[0])
        self.deltas = [torch.empty_like(panel, dtype=torch.half) for panel in self.panels[1:]]
        self.unit, self.live = (torch.ones(models, 1, device=device) for _ in range(2))
        self.clock, self.start_of_clock = torch.zeros(2, 1, dtype=torch.int32, device=device)
        self.norm_parts = [triton.cdiv(width, _NORM["part"]) for width, _ in self.shapes]
        self.norms = torch.empty(sum(self.norm_parts), models, device=device)
        self.pulls = torch.empty_like(_biases(self.current))  # gradients of all biases
        # Partial sums of ‖inputs‖² and ‖errors‖², layer by layer.
        most = triton.cdiv(max(self.layer_sizes), _UPDATE_AND_NEXT["block_out"])
        sizes = map(triton.next_power_of_2, (len(self.shapes), most))
        self.squares = torch.zeros(models, 2, *sizes, device=device)
        self.order: Tensor | None = None
        self.settings: Settings | None = None
        self.judged: Tensor | None = None
        with launching:
            self.steps_of_an_epoch, self.judgement = _Repeated(device), _Repeated(device)

    def _panels(self, count: int) -> list[Tensor]:
        """Allocate panels for inputs and hidden layers in float16, and for logits in float32."""
        *widths, classes = self.layer_sizes
        device = self.examples.labels.device
        panels = [torch.empty(count, w, PANEL, dtype=torch.half, device=device) for w in widths]
        return [*panels, torch.empty(count, classes, PANEL, device=device)]

    def _rows(self, models: int) -> Rows:
        """Return storage with one tensor of weights per layer, and one tensor for all biases."""
        return _Rows(models, self.layer_sizes, self.dtype, self.examples.labels.device)

    def start(self, models: Tensor, seeds: Tensor) -> None:
        """Initialize new networks in the given slots."""
        super().start(models, seeds)
        for shadow, weight in zip(self.shadows, self.weights, strict=True):
            shadow[models] = weight[models].half()

    def select(self, models: Tensor) -> None:
        """Keep only the given networks."""
        super().select(models)
        for shadow, weight in zip(self.shadows, self.weights, strict=True):
            shadow.copy_(weight)

    def train(self, order: Tensor, batch_size: int, settings: Settings) -> None:
        """Train for one epoch by replaying a graph of several steps."""
        if self.order is None or self.settings is None:
            self.order, self.settings = order.int().contiguous(), settings.clone()
        else:
            self.order.copy_(order)
            self.settings.copy_(settings)
        self.live.fill_(1) if settings.live is None else self.live.copy_(settings.live)
        self.unit.copy_(self.live)
        self.clock.zero_()
        self.squares.zero_()
        batches = triton.cdiv(order.shape[1], batch_size)
        # Minimize replays plus idle steps after the last batch; even, since panels are swapped.
        span = min(range(2, _LONGEST_SPAN + 1, 2), key=lambda n: -batches % n + batches / n)
        with self.steps_of_an_epoch.loading():
            self._gather(self.order, 0, batch_size, self.unit, self.panels[0])
            self._run_layers(range(1), self.shadows, self.biases, self.unit, self.panels)
        for _ in range(triton.cdiv(batches, span)):
            self.steps_of_an_epoch(functools.partial(self._steps, span, batch_size))
        # The steps keep no float16 copy of the first layer's weights.
        self.shadows[0].copy_(self.weights[0])

    def _steps(self, span: int, batch_size: int) -> None:
        """Train ``span`` steps, starting at the batch number in ``clock``."""
        for ahead in range(span):
            layers = range(1, len(self.shapes))
            self._run_layers(layers, self.shadows, self.biases, self.unit, self.panels)
            self._find_errors(ahead, batch_size)
            self._update_layers(ahead + 1, batch_size)
        self.clock += span

    def _find_errors(self, ahead: int, batch_size: int) -> None:
        """Compute the errors of all layers, and their unit, from the logits of a batch."""
        assert self.order is not None
        assert self.settings is not None
        models, limit = self.order.shape
        kernels.pseudo_gradient[(models,)](
            self.panels[-1], self.order, self.unit, self.clock, ahead, batch_size, limit,
            self.examples.labels, self.settings.k, self.deltas[-1],
            *self._pulls(len(self.shapes) - 1), *self._squares(1, len(self.shapes) - 1),
            self.layer_sizes[-1], block=triton.next_power_of_2(self.layer_sizes[-1]),
        )  # fmt: skip
        # A `Reweighted` rule would scale the last layer's deltas here, one factor per column.
        for at in range(len(self.shapes) - 1, 0, -1):
            width, outputs = self.shapes[at]
            tiles = _within(_BEFORE, block_in=width, block_out=outputs)
            kernels.errors_before[(triton.cdiv(width, tiles["block_in"]), models)](
                self.deltas[at], self.shadows[at], self.panels[at], self.unit, self.deltas[at - 1],
                *self._pulls(at - 1), *self._squares(1, at - 1), width, outputs, _padded(outputs),
                self.activations[at - 1], **tiles,
            )  # fmt: skip
        if self.settings.clip is not None:
            own, sizes = (self.unit, self.settings.clip, self.squares), self.squares.shape[2:]
            parts = self.norms.split(self.norm_parts)
            for shape, x, delta, part in zip(
                self.shapes, self.panels[:-1], self.deltas, parts, strict=True
            ):
                kernels.squared_norm[(models, len(part))](
                    x, delta, *own, part, models, *sizes, *shape, **_NORM
                )
            kernels.clip_unit[(models,)](*own, self.norms, models, len(self.norms), *sizes)

    def _update_layers(self, ahead: int, batch_size: int) -> None:
        """Update all layers, and run the next batch through the first."""
        assert self.order is not None
        assert self.settings is not None
        models, biases = self.pulls.shape
        own = self.unit, self.settings.learning_rate, self.settings.momentum
        kernels.update_biases[(triton.cdiv(biases, _BIASES), models)](
            self.pulls, *own, _biases(self.current), _biases(self.moments[0]), biases,
            block=_BIASES,
        )  # fmt: skip
        # The first layer comes last: its new outputs overwrite the second layer's inputs.
        for at in reversed(range(len(self.shapes))):
            width, outputs = self.shapes[at]
            velocity = self.moments[0].tensors[2 * at]
            if at == 0:
                self._gather(self.order, ahead, batch_size, self.unit, self.following)
                tiles = _within(_UPDATE_AND_NEXT, block_in=width, block_out=outputs)
                kernels.update_and_next[(triton.cdiv(outputs, tiles["block_out"]), models)](
                    self.panels[0], self.following, self.deltas[0], *own, self.weights[0], velocity,
                    self.biases[0], biases, self.panels[1], *self._squares(0, 1), width, outputs,
                    _padded(outputs), self.activations[0], **tiles,
                )  # fmt: skip
                # Swap only the names: the graph captures the addresses of each step.
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
                self.shadows[at], width, outputs, _padded(outputs), **tiles,
            )  # fmt: skip

    def _pulls(self, at: int) -> tuple[Tensor, int]:
        """Return the output for the sums of a layer's errors, and its stride between models."""
        before = sum(outputs for _, outputs in self.shapes[:at])
        return self.pulls[:, before:], self.pulls.shape[1]

    def _squares(self, of: int, at: int) -> tuple[Tensor | None, int]:
        """Return the output for ‖inputs‖² (0) or ‖errors‖² (1) of a layer, and its stride.

        They are needed for gradient clipping only. Logits are not the input of any layer.
        """
        assert self.settings is not None
        if self.settings.clip is None or at == len(self.shapes):
            return None, 0
        return self.squares[:, of, at], self.squares.stride(0)

    def _gather(self, order: Tensor, ahead: int, size: int, unit: Tensor, out: Tensor) -> None:
        """Gather batch ``clock + ahead`` of each model's ``order`` into panels.

        Evaluation does not use the clock and starts from batch 0.
        """
        (models, limit), features = order.shape, self.layer_sizes[0]
        in_epoch = order is self.order
        clock = self.clock if in_epoch else self.start_of_clock
        squares, apart = self._squares(0, 0) if in_epoch else (None, 0)
        kernels.gather[(triton.cdiv(features, _GATHER["block"]), len(out))](
            self.examples.features, order, unit, clock, ahead, size, limit, out, squares, apart,
            self.examples.factor, self.examples.offset, len(out) // models, features, **_GATHER,
        )  # fmt: skip

    def _run_layers(
        self,
        layers: range,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor],
        unit: Tensor,
        panels: Sequence[Tensor],
    ) -> None:
        """Run the forward pass of some layers, each from its panels to the next layer's."""
        count, models = len(panels[0]), len(weights[0])
        for at in layers:
            width, outputs = self.shapes[at]
            blocks = _within(_LAYER, block_in=width, block_out=outputs)
            kernels.layer[(triton.cdiv(outputs, blocks["block_out"]), count)](
                panels[at], weights[at], biases[at], biases[at].stride(0), unit, panels[at + 1],
                *(self._squares(0, at + 1) if panels is self.panels else (None, 0)),
                count // models, width, outputs, _padded(outputs), self.activations[at], **blocks,
            )  # fmt: skip

    def evaluated(self, models: Tensor | None) -> list[Tensor]:
        """Return the parameters to evaluate, weights in float16."""
        if models is None:
            return [p for layer in zip(self.shadows, self.biases, strict=True) for p in layer]
        chosen = [best[models] for best in self.best.tensors]
        for at, weight in enumerate(chosen[::2]):
            half = _aligned(weight.shape, torch.half, weight.device)
            chosen[2 * at] = half.copy_(weight)
        return chosen

    def evaluate(self, index: Tensor, models: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the error and the mean cross-entropy of each network.

        Args:
            index: Examples, shape (models, examples).
            models: Evaluate the best versions of these networks; None for all current ones.

        """
        if models is None:
            if self.judged is None or self.judged.shape != index.shape:
                if self.judged is not None:
                    with launching:
                        self.judgement = _Repeated(index.device)
                self.judged = index.int().contiguous()
                self.sums, self.judging = self._sums_and_panels(index)
            else:
                self.judged.copy_(index)
            judge = (self.judged, self.live, self.evaluated(None), self.sums, self.judging)
            self.judgement(functools.partial(self._judge, *judge))
            sums = self.sums
        else:
            sums, panels = self._sums_and_panels(index)
            unit = torch.ones(len(index), device=index.device)
            with self.judgement.loading():
                self._judge(index.int().contiguous(), unit, self.evaluated(models), sums, panels)
        errors, values = sums.double().sum(-1) / index.shape[1]
        return errors, values

    def _sums_and_panels(self, index: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Allocate the sums of an evaluation, one per panel, and the panels for it."""
        models, size = index.shape
        tiles = triton.cdiv(size, PANEL)
        at_once = min(tiles, max(1, _JUDGED_AT_ONCE // models))
        return torch.zeros(2, models, tiles, device=index.device), self._panels(models * at_once)

    def _judge(
        self,
        index: Tensor,
        unit: Tensor,
        parameters: Sequence[Tensor],
        sums: Tensor,
        panels: Sequence[Tensor],
    ) -> None:
        """Count misclassified examples and sum cross-entropies, panel by panel."""
        (models, limit), tiles = index.shape, sums.shape[-1]
        at_once = len(panels[0]) // models
        for ahead in range(triton.cdiv(tiles, at_once)):
            self._forward_panels(index, ahead, unit, parameters, panels)
            kernels.judge[(models * at_once,)](
                panels[-1], index, unit, self.start_of_clock, ahead, at_once * PANEL, limit,
                self.examples.labels, *sums, at_once, tiles, self.layer_sizes[-1],
                block=triton.next_power_of_2(self.layer_sizes[-1]),
            )  # fmt: skip

    def _forward_panels(
        self,
        index: Tensor,
        ahead: int,
        unit: Tensor,
        parameters: Sequence[Tensor],
        panels: Sequence[Tensor],
    ) -> None:
        """Run as many examples as the panels hold through all layers."""
        size = len(panels[0]) // len(index) * PANEL
        self._gather(index, ahead, size, unit, panels[0])
        layers = range(len(self.shapes))
        self._run_layers(layers, parameters[::2], parameters[1::2], unit, panels)

    def logits_of(self, index: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """Return the logits of the examples ``index`` (models, size) under these parameters."""
        models, size = index.shape
        tiles = triton.cdiv(size, PANEL)
        panels = self._panels(models * tiles)
        unit = torch.ones(models, device=index.device)
        with self.judgement.loading():
            self._forward_panels(index.int().contiguous(), 0, unit, parameters, panels)
        return panels[-1].reshape(models, tiles, -1, PANEL).mT.flatten(1, 2)[:, :size]


class _Rows(Rows):
    """One value per parameter of each network, in the layout of the kernels.

    Attributes:
        biases: The biases of all layers, shape (models, units); `tensors` has views of them.

    """

    def __init__(
        self, models: int, layer_sizes: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        outputs = layer_sizes[1:]
        self.biases = torch.zeros(models, sum(outputs), dtype=dtype, device=device)
        weights = [
            _aligned((models, *shape), dtype, device) for shape in itertools.pairwise(layer_sizes)
        ]
        biases = self.biases.unsqueeze(1).split(list(outputs), 2)
        self.tensors = [tensor for layer in zip(weights, biases, strict=True) for tensor in layer]


def _biases(rows: Rows) -> Tensor:
    assert isinstance(rows, _Rows)
    return rows.biases


class _Repeated:
    """Repeated work: the first time kernel by kernel, then as a CUDA graph."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.loaded = False  # whether the kernels are loaded
        self.graph: torch.cuda.CUDAGraph | None = None

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Hold the lock for launches, unless the kernels are loaded."""
        # Loaded kernels may be launched while another thread loads or captures.
        with contextlib.nullcontext() if self.loaded else launching:
            yield

    def __call__(self, work: Callable[[], None]) -> None:
        """Run the work, which must be the same every time."""
        if self.graph is None and self.loaded and self.device.type == "cuda":
            self._capture(work)
        if self.graph is None:
            with self.loading():
                work()
            self.loaded = True
        else:
            self.graph.replay()

    def _capture(self, work: Callable[[], None]) -> None:
        """Capture the work, unless another thread is loading or capturing."""
        if not launching.acquire(blocking=False):
            return
        graph = torch.cuda.CUDAGraph()
        try:
            # Unlike `torch.cuda.graph`, this neither synchronizes nor empties PyTorch's cache.
            with torch.cuda.stream(_capture_stream(self.device)):
                # Other threads may allocate during the capture.
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    work()
                finally:
                    graph.capture_end()
            self.graph = graph
        finally:
            launching.release()


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the capture stream of a device.

    PyTorch reuses the streams of a pool, so another thread could be using the same stream. Nothing
    else here uses the high-priority pool.
    """
    return torch.cuda.Stream(device, priority=-1)


def _padded(outputs: int) -> int:
    """Return the row stride of weights: wide rows are aligned to cache lines."""
    return outputs + -outputs % 64 if outputs > 64 else outputs


def _aligned(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros of the shape (models, in, out), with rows padded by `_padded`."""
    *rows, outputs = shape
    return torch.zeros(*rows, _padded(outputs), dtype=dtype, device=device)[..., :outputs]


def _within(tiles: dict[str, int], **sizes: int) -> dict[str, Any]:
    """Return the tile sizes, limited to the given dimensions."""
    fitting = {
        name: min(tiles[name], max(16, triton.next_power_of_2(size)))
        for name, size in sizes.items()
    }
    return {**tiles, **fitting}
