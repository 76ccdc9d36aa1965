"""Many networks of one shape, stacked and trained with batched PyTorch operations.

Weights have the shape (models, in, out), so one batched matrix product serves all models. The
backward pass is written by hand; it computes the gradients of `torch.nn.Linear` layers under
`tunable_cross_entropy`.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pseudograd.data import Dataset
from pseudograd.fleet import randomness
from pseudograd.fleet.mlp.bins import Bins
from pseudograd.rules import paper, reweighted

# Up to this many bytes, features are encoded into bins once; larger sets, batch by batch.
_MOST_ENCODED = 1 << 29

# Rows per evaluation step over all models: enough for full occupancy.
_EVALUATED_AT_ONCE = 1 << 17

# Initial weights drawn at a time: each takes some 30 bytes until it is rounded.
_DRAWN_AT_ONCE = 1 << 25

_aten = torch.ops.aten

# Activations, all in place.
ACTIVATE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": Tensor.relu_,
    "tanh": Tensor.tanh_,
    # torch.sigmoid rounds differently at the end of a tensor (the vectorized loop's remainder), but
    # a network's result must not depend on its position in the stack.
    "sigmoid": lambda x: x.neg_().exp_().add_(1).reciprocal_(),
}
# The backward pass of each activation, given its output.
_PASS_BACK: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda delta, h: _aten.threshold_backward(delta, h, 0),
    "tanh": _aten.tanh_backward,
    "sigmoid": _aten.sigmoid_backward,
}


# Held for a kernel's first launch, CUDA graph capture and release, and empty_cache. PyTorch allows
# one capture per process and no empty_cache meanwhile, and its registry of graphs is not
# thread-safe; nor is Triton's loading of a kernel.
launching = threading.Lock()


@dataclass(frozen=True, eq=False)
class Examples:
    """A data set on a device, with unscaled features.

    Attributes:
        features: One row per example.
        labels: Class indices.
        factor: Features are multiplied by this when they are gathered ...
        offset: ... and this is added.
        weights: The weight of each example, 1 on average, float64; None if all are equal.
        bins: Encodes the raw features on the fly; None if there are none, or features are encoded.

    Example:
        >>> pixels = torch.tensor([[0, 255]]).byte()
        >>> examples = Examples(pixels, torch.tensor([1]), factor=2 / 255, offset=-1.0)
        >>> examples.gather(torch.tensor([0]), torch.float32)
        tensor([[-1.,  1.]])

    """

    features: Tensor
    labels: Tensor
    factor: float
    offset: float
    weights: Tensor | None = None
    bins: Bins | None = None

    @classmethod
    def of(
        cls, data: Dataset, device: torch.device, scaling: tuple[float, float], bins: Bins | None
    ) -> Examples:
        """Return a data set on a device, already encoded into bins if that fits in memory."""
        features = data.features.to(device).contiguous()
        weights = None
        if data.weights is not None:
            weights = data.weights.double()
            weights = (weights / weights[: data.train_size].mean()).to(device)
        examples = cls(features, data.labels.to(device).contiguous(), *scaling, weights)
        if not bins:
            return examples
        bins = bins.to(device)
        if 4 * len(features) * (features.shape[1] + len(bins)) > _MOST_ENCODED:
            return replace(examples, bins=bins)
        encoded = torch.cat((features.float() * scaling[0] + scaling[1], bins.encode(features)), 1)
        return replace(examples, features=encoded, factor=1.0, offset=0.0)

    def gather(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the scaled features of the examples ``index``."""
        features = self.features[index]
        # Encode first, since scaling is in place.
        encoded = None if self.bins is None else self.bins.encode(features).to(dtype)
        scaled = features.to(dtype).mul_(self.factor).add_(self.offset)
        return scaled if encoded is None else torch.cat((scaled, encoded), -1)


class Stack:
    """The parameters and optimizer state of all networks, and the best version of each so far.

    Args:
        examples: The data set.
        layer_sizes: Inputs, hidden layers, classes.
        activation: The activation of the hidden layers.
        optimizer: "sgd", "adam" or "rmsprop".
        models: The number of networks.
        dtype: The dtype of all parameters and optimizer state.
        rule: "tunable", or the name of a `Reweighted` rule.

    Attributes:
        weights: The weights of each layer, shape (models, in, out).
        biases: The biases of each layer, shape (models, 1, out).

    Example:
        >>> examples = Examples(torch.eye(4), torch.tensor([0, 1, 0, 1]), 1.0, 0.0)
        >>> stack = Stack(examples, (4, 8, 2), "relu", "sgd", models=3)
        >>> stack.start(torch.arange(3), torch.tensor([1, 2, 3]))
        >>> stack.weights[0].shape
        torch.Size([3, 4, 8])

    """

    def __init__(
        self,
        examples: Examples,
        layer_sizes: Sequence[int],
        activation: str,
        optimizer: str,
        models: int,
        dtype: torch.dtype = torch.float32,
        rule: str = "tunable",
    ) -> None:
        self.factor = None if rule == "tunable" else reweighted(rule).factor
        self.examples = examples
        self.layer_sizes = tuple(layer_sizes)
        self.activate, self.pass_back = ACTIVATE[activation], _PASS_BACK[activation]
        self.optimizer = optimizer
        self.dtype = dtype
        self._allocate(models)

    def _allocate(self, models: int) -> None:
        """Allocate parameters, their best versions and moments, all zero."""
        self.current, self.best = self._rows(models), self._rows(models)
        self.moments = [self._rows(models) for _ in range(2 if self.optimizer == "adam" else 1)]
        self.weights, self.biases = self.current.tensors[::2], self.current.tensors[1::2]
        self.steps = torch.zeros(models, 1, dtype=self.dtype, device=self.weights[0].device)
        self._lay_out()

    def _lay_out(self) -> None:
        """Allocate the scratch buffers of a step."""
        self.gradients = self._rows(len(self.steps))

    def _rows(self, models: int) -> Rows:
        """Return storage for one value per parameter of each network, filled with zeros."""
        return Rows(models, self.layer_sizes, self.dtype, self.examples.labels.device)

    @property
    def parameters(self) -> list[Tensor]:
        """Weights and biases, layer by layer."""
        return self.current.tensors

    def start(self, models: Tensor, seeds: Tensor) -> None:
        """Initialize the given networks: hidden layers Glorot-uniform, everything else zero."""
        for state in (self.current, *self.moments, self.best):
            for tensor in state.tensors:
                tensor[models] = 0
        self.steps[models] = 0
        for layer, weight in enumerate(self.weights[:-1]):
            some = max(1, _DRAWN_AT_ONCE // weight[0].numel())
            for mine, own in zip(models.split(some), seeds.split(some), strict=True):
                drawn = randomness.glorot_uniform(own, layer, *weight.shape[1:])
                weight[mine] = drawn.to(self.dtype)

    def keep(self, models: Tensor) -> None:
        """Save the given networks as their best versions."""
        for best, parameter in zip(self.best.tensors, self.parameters, strict=True):
            best[models] = parameter[models]

    def best_of(self, model: int) -> tuple[tuple[Tensor, Tensor], ...]:
        """Return the weights (in, out) and biases (out) of a network's best version."""
        kept = [best[model].cpu().clone() for best in self.best.tensors]
        return tuple((w, b.squeeze(0)) for w, b in zip(kept[::2], kept[1::2], strict=True))

    def select(self, models: Tensor) -> None:
        """Keep only the given networks."""
        before, steps = (self.current, self.best, *self.moments), self.steps
        self._allocate(len(models))
        for new, old in zip((self.current, self.best, *self.moments), before, strict=True):
            new.fill(old, models)
        self.steps.copy_(steps[models])

    def largest_weight(self) -> Tensor:
        """Return the largest absolute weight of each network."""
        return torch.stack([w.abs().amax((1, 2)) for w in self.weights]).amax(0)

    def train(self, order: Tensor, batch_size: int, settings: Settings) -> None:
        """Train for one epoch.

        Args:
            order: Each network's examples in order, shape (models, examples).
            batch_size: Examples per step; the last step may have fewer.
            settings: The settings of each network.

        """
        for index in order.split(batch_size, 1):
            self._step(index, settings)

    def _step(self, index: Tensor, settings: Settings) -> None:
        size = index.shape[1]
        index = _whole_lines(index)
        layers = self._forward(self.examples.gather(index, self.dtype), self.parameters)
        *hidden, logits = layers
        # The pseudo-gradient (Eq. 5), or a reweighted gradient, replaces that at the logits.
        target, k = self.examples.labels[index], settings.k
        top, margin = paper.top_and_margin(logits, target)
        strength = paper.strength(margin, k if self.factor is None else 1.0) / size
        if self.factor is not None:
            strength *= self.factor(paper.cross_entropy(margin), k)
            k = torch.ones_like(k)
        strength[:, size:] = 0
        if self.examples.weights is not None:
            strength *= self.examples.weights[index].to(self.dtype).unsqueeze(-1)
        delta = paper.push(logits, target, k, top, strength)
        # Backpropagation from there (Eq. 3).
        for layer in range(len(self.weights) - 1, -1, -1):
            weight, bias = self.gradients.tensors[2 * layer : 2 * layer + 2]
            torch.bmm(hidden[layer].mT, delta, out=weight)
            torch.sum(delta, 1, keepdim=True, out=bias)
            if layer:
                delta = self.pass_back(delta @ self.weights[layer].mT, hidden[layer])
        self._update(self.gradients.flat, settings)

    def evaluated(self, models: Tensor | None) -> list[Tensor]:
        """Return the parameters to evaluate: the given networks' best, or all current ones."""
        if models is None:
            return self.parameters
        chosen = self._rows(len(models))
        chosen.fill(self.best, models)
        return chosen.tensors

    def logits_of(self, index: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """Return the logits of the examples ``index`` (models, rows) under these parameters."""
        features = self.examples.gather(_whole_lines(index), self.dtype)
        return self._forward(features, parameters)[-1][:, : index.shape[1]]

    def _forward(self, x: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return the inputs, the outputs of the hidden layers, and the logits."""
        layers = [x]
        for weight, bias in zip(parameters[::2], parameters[1::2], strict=True):
            if len(layers) > 1:
                layers[-1] = self.activate(layers[-1])
            layers.append(torch.baddbmm(bias, layers[-1], weight))
        return layers

    def _update(self, gradient: Tensor, settings: Settings) -> None:
        """Run one optimizer step, with the formulas and defaults of `torch.optim`."""
        self.steps += 1
        rate, parameter, first = settings.learning_rate, self.current.flat, self.moments[0].flat
        if settings.clip is not None:
            norm = gradient.square().sum(1, keepdim=True).sqrt()
            gradient.mul_((settings.clip / (norm + 1e-6)).clamp(max=1))  # clip_grad_norm_
        if self.optimizer == "sgd":
            first.mul_(settings.momentum).add_(gradient)
            parameter.addcmul_(first, rate, value=-1)
        elif self.optimizer == "rmsprop":
            first.mul_(0.99).addcmul_(gradient, gradient, value=0.01)
            parameter.sub_(gradient.mul_(rate).div_(first.sqrt().add_(1e-8)))
        else:  # Adam, or AdamW with weight decay
            second = self.moments[1].flat
            first.lerp_(gradient, 1 - 0.9)
            second.mul_(0.999).addcmul_(gradient, gradient, value=1 - 0.999)
            spread = second.sqrt().div_((1 - 0.999**self.steps).sqrt()).add_(1e-8)
            if settings.weight_decay is not None:
                parameter.mul_(1 - rate * settings.weight_decay)
            parameter.sub_((first * (rate / (1 - 0.9**self.steps))).div_(spread))

    def evaluate(self, index: Tensor, models: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the error and the mean cross-entropy of each network, with example weights.

        Args:
            index: Examples, shape (models, examples).
            models: Evaluate the best versions of these networks; None for all current ones.

        """
        judged = list(self._judged(index, models))
        # Sum at once: rounding of partial sums would depend on how many networks are evaluated.
        mistaken = torch.cat([mistaken for mistaken, _ in judged], 1).double()
        loss = torch.cat([loss for _, loss in judged], 1).double()
        if self.examples.weights is None:
            count = index.shape[1]
            return mistaken.sum(1) / count, loss.sum(1) / count
        weights = self.examples.weights[index]
        total = weights.sum(1)
        return (weights * mistaken).sum(1) / total, (weights * loss).sum(1) / total

    def mistakes(self, index: Tensor, models: Tensor | None = None) -> Tensor:
        """Return which examples each network gets wrong, shape (models, examples)."""
        return torch.cat([mistaken for mistaken, _ in self._judged(index, models)], 1)

    def _judged(self, index: Tensor, models: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, chunk by chunk, which examples are misclassified and their cross-entropies."""
        parameters = self.evaluated(models)
        for rows in index.split(max(1, _EVALUATED_AT_ONCE // len(index)), 1):
            logits = self.logits_of(rows, parameters)
            target = self.examples.labels[rows]
            loss = paper.cross_entropy(paper.top_and_margin(logits, target)[1]).squeeze(-1)
            yield (logits.argmax(-1) != target) | ~loss.isfinite(), loss


# On a CPU, the rounding of a matrix product depends on its alignment to cache lines (64 bytes), but
# a network's result must not depend on its position in the stack. So all operands are aligned.
_LINE = 16  # elements


class Rows:
    """One value per parameter of each network, in one row per network, with views of the layers.

    Attributes:
        flat: All values, shape (models, values), so that one operation updates all layers.
        tensors: Views of it: the weights (models, in, out) and biases (models, 1, out) of each
            layer in turn, aligned to cache lines.

    """

    def __init__(
        self, models: int, layer_sizes: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        shapes = []
        for inputs, outputs in itertools.pairwise(layer_sizes):
            shapes += [(inputs, outputs), (1, outputs)]
        sizes = [rows * columns for rows, columns in shapes]
        starts = [0, *itertools.accumulate(size + -size % _LINE for size in sizes)]
        self.flat = torch.zeros(models, starts.pop(), dtype=dtype, device=device)
        self.tensors = [
            self.flat[:, start : start + size].view(models, *shape)
            for start, size, shape in zip(starts, sizes, shapes, strict=True)
        ]

    def fill(self, other: Rows, models: Tensor) -> None:
        """Copy the rows of the given networks."""
        for mine, theirs in zip(self.tensors, other.tensors, strict=True):
            mine.copy_(theirs[models])


def _whole_lines(index: Tensor) -> Tensor:
    """Return the columns, padded with the first one to whole cache lines."""
    missing = -index.shape[1] % _LINE
    return torch.cat((index, index[:, :1].expand(-1, missing)), 1) if missing else index


@dataclass(frozen=True, eq=False)
class Settings:
    """The settings of each network.

    Attributes:
        k: The sensitivity to large errors, shape (models, 1, 1); all others have (models, 1).
        learning_rate: The step size.
        momentum: Classical momentum.
        clip: The largest norm of a gradient; None for no limit.
        weight_decay: AdamW's, for "adam"; None for none.
        live: 1, or -1 for an idle network; None if all are trained.

    """

    k: Tensor
    learning_rate: Tensor
    momentum: Tensor
    clip: Tensor | None = None
    weight_decay: Tensor | None = None
    live: Tensor | None = None

    def clone(self) -> Settings:
        """Return a deep copy."""
        return Settings(*(None if one is None else one.clone() for one in self._all()))  # type: ignore[arg-type]

    def copy_(self, other: Settings) -> None:
        """Copy the values of ``other``, in place."""
        for mine, theirs in zip(self._all(), other._all(), strict=True):
            if mine is not None and theirs is not None:
                mine.copy_(theirs)

    def _all(self) -> tuple[Tensor | None, ...]:
        return tuple(vars(self).values())
