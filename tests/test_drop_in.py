"""A drop-in replacement: PyTorch's arguments, in its order and types, mean the same here."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pseudograd import (
    RuleCrossEntropyLoss,
    TunableCrossEntropyLoss,
    TunableLinearCrossEntropyLoss,
    tunable_cross_entropy,
    tunable_linear_cross_entropy,
)
from pseudograd.rules import cross_entropy

pytestmark = pytest.mark.usefixtures("one_thread")

LOGITS = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
LABELS, WEIGHT = torch.tensor([0, 1, 2, 3]), torch.tensor([0.5, 1.0, 2.0, 4.0])


def parameters(function: Callable[..., Any], kinds: set[Any]) -> list[str]:
    found = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in found if parameter.kind in kinds]


POSITIONAL = {inspect.Parameter.POSITIONAL_OR_KEYWORD}


def test_positional_arguments_are_pytorchs() -> None:
    assert parameters(tunable_cross_entropy, POSITIONAL) == parameters(F.cross_entropy, POSITIONAL)
    theirs = parameters(nn.CrossEntropyLoss, POSITIONAL)
    assert parameters(TunableCrossEntropyLoss, POSITIONAL) == theirs
    theirs.remove("label_smoothing")
    assert parameters(RuleCrossEntropyLoss, POSITIONAL) == ["rule", *theirs]


@pytest.mark.parametrize(
    "loss",
    [tunable_cross_entropy, tunable_linear_cross_entropy, TunableCrossEntropyLoss,
     TunableLinearCrossEntropyLoss],
)  # fmt: skip
def test_k_is_given_by_name(loss: Callable[..., Any]) -> None:
    assert "k" in parameters(loss, {inspect.Parameter.KEYWORD_ONLY})


@pytest.mark.parametrize("count", range(7))
def test_each_argument_by_position(count: int) -> None:
    """Class weights too, with as many examples as classes."""
    arguments: Any = (WEIGHT, None, 1, None, "sum", 0.1)[:count]
    value = tunable_cross_entropy(LOGITS, LABELS, *arguments)
    torch.testing.assert_close(value, F.cross_entropy(LOGITS, LABELS, *arguments))
    torch.testing.assert_close(TunableCrossEntropyLoss(*arguments)(LOGITS, LABELS), value)
    if count < 6:
        criterion = RuleCrossEntropyLoss(cross_entropy, *arguments)
        torch.testing.assert_close(criterion(LOGITS, LABELS), value)


@pytest.mark.parametrize("size_average", [None, True, False])
@pytest.mark.parametrize("reduce", [None, True, False])
def test_deprecated_arguments_of_pytorch(size_average: bool | None, reduce: bool | None) -> None:
    """The same values and the same warning, whatever ``reduction`` says."""
    settings: dict[str, Any] = {
        "size_average": size_average, "reduce": reduce, "reduction": "sum"
    }  # fmt: skip

    def of(loss: Callable[..., Tensor]) -> tuple[Tensor, list[str]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            value = loss(LOGITS, LABELS)
        return value, [str(warning.message) for warning in caught]

    expected, warned = of(partial(F.cross_entropy, **settings))
    losses: tuple[Callable[..., Tensor], ...] = (
        partial(tunable_cross_entropy, **settings),
        lambda *examples: TunableCrossEntropyLoss(**settings)(*examples),
        lambda *examples: RuleCrossEntropyLoss(cross_entropy, **settings)(*examples),
    )
    for loss in losses:
        value, also_warned = of(loss)
        torch.testing.assert_close(value, expected)
        assert also_warned == warned


def test_a_number_in_the_place_of_class_weights_is_refused() -> None:
    for call in (
        lambda: tunable_cross_entropy(LOGITS, LABELS, 0.5),  # type: ignore[arg-type]
        lambda: TunableCrossEntropyLoss(0.5),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError, match=r"^weight must be .* pass k by keyword, k=\.\.\.$"):
            call()


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.float16])
def test_settings_may_be_numpys_numbers(kind: Any) -> None:
    """As PyTorch allows for label_smoothing."""
    half: Any = kind(0.5)
    two: Any = np.int64(2)
    smoothed = F.cross_entropy(LOGITS, LABELS, label_smoothing=0.5)
    capped = F.cross_entropy(0.5 * torch.tanh(LOGITS / 0.5), LABELS)
    of_linear = LOGITS, torch.eye(4), LABELS
    z_loss = 0.5 * LOGITS.logsumexp(-1).square().mean()
    for value, expected in (
        (tunable_cross_entropy(LOGITS, LABELS, label_smoothing=half), smoothed),
        (TunableCrossEntropyLoss(label_smoothing=half)(LOGITS, LABELS), smoothed),
        (tunable_linear_cross_entropy(*of_linear, label_smoothing=half), smoothed),
        (tunable_linear_cross_entropy(*of_linear, softcap=half), capped),
        (TunableLinearCrossEntropyLoss(softcap=half)(*of_linear), capped),
        (
            tunable_linear_cross_entropy(*of_linear, z_loss=half, chunk_rows=two),
            F.cross_entropy(LOGITS, LABELS) + z_loss,
        ),
    ):
        torch.testing.assert_close(value, expected)


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.int8])
def test_numpy_scalars(kind: Any) -> None:
    """A label mask's fill value often comes from NumPy."""
    target, settings = torch.tensor([0, -100, 2, 3]), {"ignore_index": kind(-100)}
    expected = F.cross_entropy(LOGITS, target)
    rule = RuleCrossEntropyLoss(cross_entropy, **settings)
    for value in (
        tunable_cross_entropy(LOGITS, target, **settings),
        tunable_cross_entropy(LOGITS, target, **settings, implementation="torch"),
        TunableCrossEntropyLoss(**settings)(LOGITS, target),
        tunable_linear_cross_entropy(LOGITS, torch.eye(4), target, **settings),
        TunableLinearCrossEntropyLoss(**settings)(LOGITS, torch.eye(4), target),
        rule(LOGITS, target),
    ):
        torch.testing.assert_close(value, expected)
    assert type(rule.ignore_index) is int


def test_they_are_cross_entropy_losses() -> None:
    assert isinstance(TunableCrossEntropyLoss(k=0.5), nn.CrossEntropyLoss)
    assert isinstance(RuleCrossEntropyLoss(cross_entropy), nn.CrossEntropyLoss)


def converted(criterion: nn.CrossEntropyLoss, k: float = 0.5) -> TunableCrossEntropyLoss:
    return TunableCrossEntropyLoss.from_cross_entropy(criterion, k=k)


@pytest.mark.parametrize(
    "copied", [lambda x: x, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_an_existing_loss_is_converted(copied: Callable[[Any], Any]) -> None:
    theirs = nn.CrossEntropyLoss(WEIGHT, ignore_index=2, reduction="none", label_smoothing=0.1)
    ours = copied(converted(copied(theirs), k=1.0).eval())
    logits, other = (LOGITS.clone().requires_grad_() for _ in range(2))
    value, expected = ours(logits, LABELS), theirs(other, LABELS)
    torch.testing.assert_close(value, expected)
    value.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(logits.grad, other.grad)
    assert ours.k == 1.0
    assert not ours.training
    assert list(ours.state_dict()) == list(theirs.state_dict())


def test_conversion_keeps_our_own_settings() -> None:
    criterion = TunableCrossEntropyLoss.from_cross_entropy(
        nn.CrossEntropyLoss().eval(), k=2.0, implementation="torch", persistent=True
    )
    assert (criterion.k, criterion.implementation, criterion.persistent) == (2.0, "torch", True)
    assert not criterion.training


class Own(nn.CrossEntropyLoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return 2 * super().forward(input, target)


@pytest.mark.parametrize(
    "other", [nn.NLLLoss(), Own(), RuleCrossEntropyLoss(cross_entropy), F.cross_entropy, None]
)
def test_other_losses_are_not_converted(other: Any) -> None:
    with pytest.raises(TypeError, match=r"^criterion must be a torch.nn.CrossEntropyLoss, not "):
        converted(other)


def predicted_by(criterion: nn.Module, logits: Tensor) -> Tensor:
    """skorch's choice: it applies softmax if the criterion is cross-entropy."""
    return logits.softmax(-1) if isinstance(criterion, nn.CrossEntropyLoss) else logits


@pytest.mark.parametrize(
    "criterion", [TunableCrossEntropyLoss(k=0.5), RuleCrossEntropyLoss(cross_entropy)]
)
def test_probabilities_are_probabilities(criterion: nn.Module) -> None:
    torch.testing.assert_close(predicted_by(criterion, LOGITS).sum(-1), torch.ones(4))


def test_in_skorch() -> None:
    skorch = pytest.importorskip("skorch")
    generator = np.random.default_rng(0)
    x = generator.normal(size=(60, 3)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 1)
    found: dict[type, Any] = {}
    for criterion, k in (
        (nn.CrossEntropyLoss, {}),
        (TunableCrossEntropyLoss, {"criterion__k": 1.0}),
    ):
        torch.manual_seed(0)
        network = skorch.NeuralNetClassifier(
            nn.Linear, module__in_features=3, module__out_features=3, criterion=criterion,
            max_epochs=3, lr=0.1, verbose=0, **k,
        )  # fmt: skip
        found[criterion] = network.fit(x, y).predict_proba(x)
    np.testing.assert_allclose(found[TunableCrossEntropyLoss].sum(-1), 1, rtol=1e-6)
    np.testing.assert_allclose(
        found[TunableCrossEntropyLoss], found[nn.CrossEntropyLoss], rtol=1e-5
    )
