"""Many networks of one shape as one stack of matrices, trained with PyTorch operations.

Weights have the shape (models, in, out), so that one batched product serves all models. The
gradients are written by hand: they are those of `torch.nn.Linear` layers under
`tunable_cross_entropy`.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pseudograd.fleet import randomness
from pseudograd.rules import paper, reweighted

# Rows per evaluation step, over all models: enough to keep a device busy.
_EVALUATED_AT_ONCE = 1 << 17

_aten = torch.ops.aten

# In place.
ACTIVATE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": Tensor.relu_,
    "tanh": Tensor.tanh_,
    # PyTorch's own sigmoid rounds differently at the end of a tensor, but a network's result must
    # not depend on its place in the stack.
    "sigmoid": lambda x: x.neg_().exp_().add_(1).reciprocal_(),
}
# The backward pass of an activation, given its value.
_PASS_BACK: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda delta, h: _aten.threshold_backward(delta, h, 0),
    "tanh": _aten.tanh_backward,
    "sigmoid": _aten.sigmoid_backward,
}


# Hold this lock for a kernel's first launch, to capture or drop a CUDA graph, and to empty the
# cache. PyTorch allows one capture per process and no emptying meanwhile, and guards its set of
# graphs with no lock; a kernel that one thread is still loading looks launchable to the others.
launching = threading.Lock()


@dataclass(frozen=True, eq=False)
class Examples:
    """A data set on a device, with unscaled features.

    Attributes:
        features: One row per example.
        labels: Class indices.
        factor: Features are multiplied by this when they are gathered ...
        offset: ... and this is added.
        weights: How much each example counts, 1 on average, float64; None if all count the same.

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

    def gather(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the scaled features of the examples ``index``."""
        return self.features[index].to(dtype).mul_(self.factor).add_(self.offset)


class Stack:
    """The networks, their optimizers' state, and the best version of each so far.

    Args:
        examples: The data set.
        layer_sizes: Inputs, hidden layers, classes.
        activation: The activation of the hidden layers.
        optimizer: "sgd", "adam" or "rmsprop".
        models: The number of networks.
        dtype: The type of all weights and states.
        rule: "tunable", or the name of a `Reweighted` rule.

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
        device = examples.labels.device
        shapes = list(itertools.pairwise(layer_sizes))
        self.weights = [
            self._laid_out(torch.zeros(models, *shape, dtype=dtype, device=device))
            for shape in shapes
        ]
        self.biases = [torch.zeros(models, 1, out, dtype=dtype, device=device) for _, out in shapes]
        self.best = [torch.zeros_like(parameter) for parameter in self.parameters]
        moments = 2 if optimizer == "adam" else 1
        self.moments = [
            [torch.zeros_like(parameter) for parameter in self.parameters] for _ in range(moments)
        ]
        self.steps = torch.zeros(models, 1, 1, dtype=dtype, device=device)

    @property
    def parameters(self) -> list[Tensor]:
        """Weights and biases, layer by layer."""
        return [
            parameter
            for layer in zip(self.weights, self.biases, strict=True)
            for parameter in layer
        ]

    def start(self, models: Tensor, seeds: Tensor) -> None:
        """Start new networks in the given places: hidden layers Glorot-uniform, all else zero."""
        for state in (self.parameters, *self.moments, self.best, [self.steps]):
            for tensor in state:
                tensor[models] = 0
        for layer, weight in enumerate(self.weights[:-1]):
            weight[models] = randomness.glorot_uniform(seeds, layer, *weight.shape[1:]).to(
                self.dtype
            )

    def _laid_out(self, matrices: Tensor) -> Tensor:
        """A copy of the matrices, each aligned to a cache line."""
        return _on_lines(matrices, *matrices.shape).copy_(matrices)

    def keep(self, models: Tensor) -> None:
        """Save the given networks as their best versions."""
        for best, parameter in zip(self.best, self.parameters, strict=True):
            best[models] = parameter[models]

    def best_of(self, model: int) -> tuple[tuple[Tensor, Tensor], ...]:
        """Return the weights (in, out) and biases (out) of a network's best version."""
        kept = [best[model].cpu().clone() for best in self.best]
        return tuple((w, b.squeeze(0)) for w, b in zip(kept[::2], kept[1::2], strict=True))

    def select(self, models: Tensor) -> None:
        """Keep only the given networks."""
        self.weights = [self._laid_out(weight[models]) for weight in self.weights]
        self.biases = [bias[models] for bias in self.biases]
        self.best = [best[models] for best in self.best]
        self.moments = [[moment[models] for moment in moments] for moments in self.moments]
        self.steps = self.steps[models]

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
        # The pseudo-gradient at the logits (Eq. 5) replaces the gradient ...
        target, k = self.examples.labels[index], settings.k
        top, margin = paper.top_and_margin(logits, target)
        strength = paper.strength(margin, k if self.factor is None else 1.0) / size
        if self.factor is not None:  # ... or cross-entropy's gradient, reweighted
            strength *= self.factor(paper.cross_entropy(margin), k)
            k = torch.ones_like(k)
        strength[:, size:] = 0
        if self.examples.weights is not None:
            strength *= self.examples.weights[index].to(self.dtype).unsqueeze(-1)
        delta = paper.push(logits, target, k, top, strength)
        # ... and the chain rule does the rest (Eq. 3).
        gradients = []
        for layer in range(len(self.weights) - 1, -1, -1):
            gradient = _on_lines(delta, *self.weights[layer].shape)
            torch.bmm(hidden[layer].mT, delta, out=gradient)
            gradients += [delta.sum(1, keepdim=True), gradient]
            if layer:
                delta = self.pass_back(delta @ self.weights[layer].mT, hidden[layer])
        gradients.reverse()
        if settings.clip is not None:
            norm = sum(gradient.square().sum((1, 2), keepdim=True) for gradient in gradients) ** 0.5
            factor = (settings.clip / (norm + 1e-6)).clamp(max=1)  # as torch's clip_grad_norm_
            for gradient in gradients:
                gradient.mul_(factor)
        self._update(gradients, settings)

    def evaluated(self, models: Tensor | None) -> list[Tensor]:
        """Return the parameters to evaluate: the given networks' best, or all current ones."""
        if models is None:
            return self.parameters
        return [self._laid_out(best[models]) for best in self.best]

    def logits_of(self, index: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """Return the logits of the examples ``index`` (models, rows) under these parameters."""
        features = self.examples.gather(_whole_lines(index), self.dtype)
        return self._forward(features, parameters)[-1][:, : index.shape[1]]

    def _forward(self, x: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Inputs, hidden layers' outputs, logits."""
        layers = [x]
        for weight, bias in zip(parameters[::2], parameters[1::2], strict=True):
            if len(layers) > 1:
                layers[-1] = self.activate(layers[-1])
            layers.append(torch.baddbmm(bias, layers[-1], weight))
        return layers

    def _update(self, gradients: list[Tensor], settings: Settings) -> None:
        """One step of the optimizer, with `torch.optim`'s formulas and defaults."""
        self.steps += 1
        rate = settings.learning_rate
        for at, (parameter, gradient) in enumerate(zip(self.parameters, gradients, strict=True)):
            first = self.moments[0][at]
            if self.optimizer == "sgd":
                first.mul_(settings.momentum).add_(gradient)
                parameter.addcmul_(first, rate, value=-1)
            elif self.optimizer == "rmsprop":
                first.mul_(0.99).addcmul_(gradient, gradient, value=0.01)
                parameter.sub_(gradient.mul_(rate).div_(first.sqrt().add_(1e-8)))
            else:
                second = self.moments[1][at]
                first.lerp_(gradient, 1 - 0.9)
                second.mul_(0.999).addcmul_(gradient, gradient, value=1 - 0.999)
                spread = (second.sqrt() / (1 - 0.999**self.steps).sqrt()).add_(1e-8)
                parameter.sub_(first * (rate / (1 - 0.9**self.steps)) / spread)

    def evaluate(self, index: Tensor, models: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the error and the mean cross-entropy of each network, weighted if examples are.

        Args:
            index: Examples, shape (models, examples).
            models: Evaluate the best versions of these networks; None for all current ones.

        """
        judged = list(self._judged(index, models))
        # Sum all at once: partial sums would round by how many networks are judged together.
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
        """Yield, some examples at a time, which are mistaken, and their cross-entropies."""
        parameters = self.evaluated(models)
        for rows in index.split(max(1, _EVALUATED_AT_ONCE // len(index)), 1):
            logits = self.logits_of(rows, parameters)
            target = self.examples.labels[rows]
            loss = paper.cross_entropy(paper.top_and_margin(logits, target)[1]).squeeze(-1)
            yield (logits.argmax(-1) != target) | ~loss.isfinite(), loss


# On a CPU, products of matrices that are not aligned to a cache line (64 bytes) round differently,
# but a network's result must not depend on its place in the stack. So the inputs and outputs of
# every product are aligned.


def _on_lines(like: Tensor, models: int, rows: int, columns: int) -> Tensor:
    """New matrices, padded so that each is aligned."""
    size = rows * columns
    lines: Tensor = like.new_empty(models, size + -size % 16)
    return lines[:, :size].view(models, rows, columns)


def _whole_lines(index: Tensor) -> Tensor:
    """The columns, padded with the first to a multiple of 16."""
    missing = -index.shape[1] % 16
    return torch.cat((index, index[:, :1].expand(-1, missing)), 1) if missing else index


@dataclass(frozen=True, eq=False)
class Settings:
    """The settings of each network, shape (models, 1, 1).

    Attributes:
        k: The sensitivity to large errors.
        learning_rate: The step size.
        momentum: Classical momentum.
        clip: The largest norm of a gradient; None for no limit.

    """

    k: Tensor
    learning_rate: Tensor
    momentum: Tensor
    clip: Tensor | None

    def clone(self) -> Settings:
        """Return a deep copy."""
        clip = None if self.clip is None else self.clip.clone()
        return Settings(self.k.clone(), self.learning_rate.clone(), self.momentum.clone(), clip)

    def copy_(self, other: Settings) -> None:
        """Copy the values of ``other``, in place."""
        self.k.copy_(other.k)
        self.learning_rate.copy_(other.learning_rate)
        self.momentum.copy_(other.momentum)
        if self.clip is not None and other.clip is not None:
            self.clip.copy_(other.clip)
