"""Check a rule for the properties that the paper asks for (Section 4) and proves (Lemma 1).

Each check tries a rule on examples, random ones by default, and returns a `Finding`: whether the
property held, the largest violation, and the example and classes where it occurred.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan

import torch
from torch import Tensor

from pseudograd.rules.checks import check_labels
from pseudograd.rules.framework import Rule, bias, checked


@dataclass(frozen=True)
class Finding:
    """The result of a check.

    Attributes:
        name: The property.
        holds: Whether it held everywhere, up to the tolerance.
        violation: The largest violation, as each check defines it; 0 or more.
        logits: The example where it occurred, shape (C).
        label: Its label.
        classes: The class or pair of classes concerned.

    """

    name: str
    holds: bool
    violation: float
    logits: Tensor
    label: int
    classes: tuple[int, ...]


def sign(rule: Rule, examples: tuple[Tensor, Tensor] | None = None) -> Finding:
    """Check that f ≥ 0 off the label and f ≤ 0 on it; the violation is |f| of the wrong sign.

    Args:
        rule: The rule.
        examples: Logits (R, C) and labels (R) to try it on.

    Example:
        >>> from pseudograd.rules import cross_entropy
        >>> sign(cross_entropy).holds
        True
        >>> sign(lambda z, y: -cross_entropy(z, y)).holds
        False

    """
    z, y = _in_float64(examples)
    f = checked(rule, z, y)
    wrong = (-f).scatter(-1, y.unsqueeze(-1), f.gather(-1, y.unsqueeze(-1))).clamp(min=0)
    return _worst("sign", wrong, z, y, tolerance=0.0)


def zero_sum(
    rule: Rule, examples: tuple[Tensor, Tensor] | None = None, tolerance: float = 1e-12
) -> Finding:
    """Check Eq. 4, f_y = -Σ f_j; the violation is the sum, relative to the largest entry.

    Args:
        rule: The rule.
        examples: Logits (R, C) and labels (R) to try it on.
        tolerance: Violations up to this count as rounding.

    Example:
        >>> from pseudograd.rules import from_bias, tunable
        >>> zero_sum(tunable).holds
        True
        >>> zero_sum(from_bias(lambda bias, y: bias**3)).holds  # a plain power is not enough
        False

    """
    z, y = _in_float64(examples)
    f = checked(rule, z, y)
    size = f.abs().amax(-1).clamp(min=torch.finfo(f.dtype).tiny)
    violation = (f.sum(-1).abs() / size).unsqueeze(-1)
    everywhere = torch.arange(f.shape[-1], device=z.device).expand(len(f), 1, -1)
    return _worst("zero sum", violation, z, y, tolerance, everywhere)


def monotone(
    rule: Rule, examples: tuple[Tensor, Tensor] | None = None, tolerance: float = 1e-12
) -> Finding:
    """Check that a larger bias never gets a smaller push; the violation is the difference.

    Within an example, f must be in the order of ε. And if only the label's logit is raised, so that
    |ε_y| falls, |f_y| must not grow. The violation is relative to the largest push of all.

    Args:
        rule: The rule.
        examples: Logits (R, C) and labels (R) to try it on.
        tolerance: Violations up to this count as rounding.

    Example:
        >>> from functools import partial
        >>> from pseudograd.rules import generalized_cross_entropy, tunable
        >>> monotone(partial(tunable, k=0.25)).holds
        True
        >>> monotone(generalized_cross_entropy).holds  # it gives up on the largest errors
        False

    """
    z, y = _in_float64(examples)
    label = y.unsqueeze(-1)
    order, f = bias(z, y).argsort(-1), checked(rule, z, y)
    falls = -f.gather(-1, order).diff(dim=-1).clamp(max=0)
    pairs = torch.stack((order[:, :-1], order[:, 1:]), -1)

    steps = torch.linspace(-10, 10, 41, dtype=z.dtype, device=z.device)
    raised = torch.stack([z.scatter_add(-1, label, step.expand_as(label)) for step in steps])
    strength = torch.stack([-checked(rule, row, y).gather(-1, label).squeeze(-1) for row in raised])
    grows = strength.diff(dim=0).clamp(min=0)
    labels = y.repeat(len(steps) - 1)

    size = torch.maximum(_largest(f), _largest(strength))
    within = _worst("monotone", falls / size, z, y, tolerance, pairs)
    across = _worst("monotone", (grows / size).flatten().unsqueeze(-1), raised[1:].flatten(0, 1),
                    labels, tolerance, labels[:, None, None])  # fmt: skip
    return max(within, across, key=lambda finding: (isnan(finding.violation), finding.violation))


def integrable(
    rule: Rule, examples: tuple[Tensor, Tensor] | None = None, tolerance: float = 1e-10
) -> Finding:
    """Check that f is a gradient; the violation is |∂f_i/∂z_j - ∂f_j/∂z_i| (Lemma 1).

    A function of the logits is the gradient of some loss if and only if its Jacobian is symmetric.
    The violation is relative to the largest derivative of all.

    Args:
        rule: The rule; it must consist of differentiable operations. A ValueError is raised if its
            derivative disagrees with finite differences, as where a part of it is detached.
        examples: Logits (R, C) and labels (R) to try it on.
        tolerance: Violations up to this count as rounding.

    Example:
        >>> from functools import partial
        >>> from pseudograd.rules import tunable
        >>> integrable(partial(tunable, k=1.0)).holds
        True
        >>> integrable(partial(tunable, k=0.5)).holds
        False
        >>> integrable(partial(tunable, k=0.5), random_examples(classes=2)).holds
        True

    """
    z, y = _in_float64(examples)
    jacobian = _jacobian(rule, z, y)
    _check_derivative(rule, jacobian, z, y)
    antisymmetric = (jacobian - jacobian.transpose(-1, -2)).abs() / _largest(jacobian)
    classes = torch.arange(z.shape[-1], device=z.device)
    pairs = torch.cartesian_prod(classes, classes)
    return _worst("integrable", antisymmetric.flatten(1), z, y, tolerance,
                  pairs.expand(len(z), -1, -1))  # fmt: skip


def finite(rule: Rule, examples: tuple[Tensor, Tensor] | None = None) -> Finding:
    """Check that f is finite, in float64 and in float32; the violation is infinite or NaN.

    Args:
        rule: The rule.
        examples: Logits (R, C) and labels (R) to try it on. By default they are extreme: logits up
            to ±1000, alone and in random rows, and classes other than the label masked by -inf.

    Example:
        >>> import torch
        >>> from pseudograd.rules import cross_entropy, from_bias
        >>> finite(cross_entropy).holds
        True
        >>> finite(from_bias(lambda bias, y: bias * bias.abs().log())).holds  # 0 · log 0
        False

    """
    z, y = _in_float64(_extreme_examples() if examples is None else examples)
    f = torch.cat([checked(rule, z.to(dtype), y).double() for dtype in (z.dtype, torch.float32)])
    violation = torch.where(f.isfinite(), 0, f.abs())
    return _worst("finite", violation, torch.cat((z, z)), torch.cat((y, y)), tolerance=0.0)


def random_examples(
    count: int = 200, classes: int = 5, spread: float = 3.0, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return normally distributed logits, in float64, and uniformly distributed labels.

    Args:
        count: How many examples.
        classes: How many classes each.
        spread: The standard deviation of the logits.
        seed: The same seed gives the same examples.

    """
    device = torch.device("cpu")  # whatever the default device is
    generator = torch.Generator(device).manual_seed(seed)
    z = torch.randn(count, classes, generator=generator, dtype=torch.float64, device=device)
    return z * spread, torch.randint(classes, (count,), generator=generator, device=device)


def _extreme_examples() -> tuple[Tensor, Tensor]:
    """Return logits far apart, with and without a mask, and labels that are not masked."""
    z, y = random_examples(spread=300.0)
    far, masked = 1000.0, -torch.inf
    rows = [
        [far, 0, 0, 0, 0],
        [-far, 0, 0, 0, 0],
        [far, -far, -far, -far, -far],
        [-far, far, far, far, far],
        [far] * 5,
        [-far] * 5,
        [0, masked, 0, 0, 0],
        [-far, masked, far, 0, 0],
        [0, masked, masked, masked, masked],
    ]
    extreme = torch.tensor(rows, dtype=z.dtype, device=z.device)
    return torch.cat((extreme, z)), torch.cat((y.new_zeros(len(rows)), y))


def _in_float64(examples: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """Return examples in float64, where a rule's rounding does not matter; raise if unusable."""
    if examples is None:
        return random_examples()
    if isinstance(examples, Tensor) or len(examples) != 2:
        raise TypeError("examples must be a pair of tensors: logits (R, C) and labels (R)")
    z, y = examples
    if z.dim() != 2 or not len(z) or z.shape[1] < 2:
        raise ValueError(
            "examples must be logits (R, C) of one or more examples and two or more classes, and "
            f"labels (R); the logits have the shape {tuple(z.shape)}"
        )
    check_labels(z, y)
    return z.double(), y


def _jacobian(rule: Rule, z: Tensor, y: Tensor) -> Tensor:
    """Return ∂f_i/∂z_j for each example, (R, C, C).

    Not by `torch.func.vmap`, which does not support all of PyTorch, such as `one_hot`.
    """
    with torch.enable_grad():
        leaf = z.detach().clone().requires_grad_()
        # Rows do not depend on each other, so the gradient of a sum over rows has that of each.
        totals = checked(rule, leaf, y).sum(0)
        if not totals.requires_grad:  # the rule is constant, or detached
            return z.new_zeros(*z.shape, z.shape[-1])
        rows = [
            torch.autograd.grad(total, leaf, retain_graph=True, materialize_grads=True)[0]
            for total in totals
        ]
    return torch.stack(rows, 1)


def _check_derivative(rule: Rule, jacobian: Tensor, z: Tensor, y: Tensor) -> None:
    """Raise if autograd and central differences disagree in more than 1 of 10 examples."""
    generator = torch.Generator(z.device).manual_seed(0)
    step = 1e-5 * torch.randn(z.shape, generator=generator, dtype=z.dtype, device=z.device)
    difference = (checked(rule, z + step, y) - checked(rule, z - step, y)) / 2
    along = (jacobian @ step.unsqueeze(-1)).squeeze(-1)
    wrong = ((along - difference).abs() > 1e-4 * _largest(difference)).any(-1)
    if wrong.double().mean() > 0.1:  # fewer may be at a kink
        raise ValueError(
            "rule must consist of differentiable operations: autograd's derivative disagrees with "
            "finite differences, as if a part of the rule were detached"
        )


def _largest(values: Tensor) -> Tensor:
    """Return the largest finite magnitude over all examples.

    Not per example: a plainly written rule like softmax(z) - onehot(y) has its largest relative
    rounding errors where it is almost 0.
    """
    finite = values.abs().nan_to_num(0.0, posinf=0.0)
    return finite.amax().clamp(min=torch.finfo(values.dtype).tiny)


def _worst(
    name: str, violation: Tensor, z: Tensor, y: Tensor, tolerance: float,
    classes: Tensor | None = None,
) -> Finding:  # fmt: skip
    """Return the finding for violations (R, entries); NaN counts as the largest."""
    at = int(violation.nan_to_num(torch.inf).argmax())
    row, entry = divmod(at, violation.shape[-1])
    worst = float(violation[row, entry])
    where = (entry,) if classes is None else tuple(int(index) for index in classes[row, entry])
    return Finding(name, worst <= tolerance, worst, z[row], int(y[row]), where)
