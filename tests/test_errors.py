"""Bad input raises one sentence that names the argument and says what it should be."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from pseudograd import (
    RuleCrossEntropyLoss,
    TunableCrossEntropyLoss,
    TunableLinearCrossEntropyLoss,
    tunable_cross_entropy,
)
from pseudograd.rules import cross_entropy

LOGITS, LABELS = torch.zeros(3, 4), torch.tensor([0, 1, 3])
IMAGE, IMAGE_LABELS = torch.zeros(2, 4, 5, 5), torch.zeros(2, 5, 5, dtype=torch.long)
PROBABILITIES = torch.full((3, 4), 0.25)


class Bad(NamedTuple):
    """A call, and its expected error: the type, the argument's name, and words of advice."""

    arguments: dict[str, Any]
    error: type[Exception]
    names: str
    says: str


def call(input: Any = LOGITS, target: Any = LABELS, **others: Any) -> dict[str, Any]:
    return {"input": input, "target": target, **others}


BAD: dict[str, Bad] = {
    # k
    "zero k": Bad(call(k=0), ValueError, "k", "above 0"),
    "negative k": Bad(call(k=-0.5), ValueError, "k", "above 0"),
    "tiny k": Bad(call(k=1e-46), ValueError, "k", "above 0"),
    "huge k": Bad(call(k=1e39), ValueError, "k", "above 0"),
    "NaN k": Bad(call(k=math.nan), ValueError, "k", "above 0"),
    "infinite k": Bad(call(k=math.inf), ValueError, "k", "finite"),
    "text for k": Bad(call(k="0.5"), TypeError, "k", "a number or a tensor, not str"),
    "no k": Bad(call(k=None), TypeError, "k", "a number or a tensor, not NoneType"),
    "list for k": Bad(call(k=[0.5] * 3), TypeError, "k", "a number or a tensor, not list"),
    "truth for k": Bad(call(k=True), TypeError, "k", "a number or a tensor, not bool"),
    "zero in k": Bad(call(k=torch.tensor([1.0, 0.0, 1.0])), ValueError, "k", "above 0"),
    "NaN in k": Bad(call(k=torch.tensor([1.0, math.nan, 1.0])), ValueError, "k", "above 0"),
    "infinity in k": Bad(call(k=torch.tensor([1.0, math.inf, 1.0])), ValueError, "k", "finite"),
    "negative tensor k": Bad(call(k=torch.tensor(-1.0)), ValueError, "k", "above 0"),
    "too few k": Bad(
        call(k=torch.ones(2)), ValueError, "k", "one value for each example, shape (3,"
    ),
    "one k in a list": Bad(call(k=torch.ones(1)), ValueError, "k", "one value for each example"),
    "k a column": Bad(call(k=torch.ones(3, 1)), ValueError, "k", "shape (3,), not (3, 1)"),
    "k for each class": Bad(
        call(k=torch.ones(4)),
        ValueError,
        "k",
        "not (4,); for one value for each class, use class_k",
    ),
    "k for each image": Bad(
        call(IMAGE, IMAGE_LABELS, k=torch.ones(2)),
        ValueError,
        "k",
        "shape (2, 5, 5), not (2,); use k[:, None, None].expand(2, 5, 5)",
    ),
    "sparse k": Bad(call(k=torch.ones(3).to_sparse()), TypeError, "k", "use .to_dense()"),
    "sparse input": Bad(call(LOGITS.to_sparse()), TypeError, "input", "use .to_dense()"),
    "sparse target": Bad(
        call(target=PROBABILITIES.to_sparse()), TypeError, "target", "use .to_dense()"
    ),
    "no index to ignore": Bad(
        call(target=PROBABILITIES, ignore_index=None), TypeError, "ignore_index", "a whole number"
    ),
    "integer tensor k": Bad(
        call(k=torch.ones(3, dtype=torch.long)), TypeError, "k", "floating-point numbers, not"
    ),
    "k to be learned": Bad(
        call(k=torch.ones(3, requires_grad=True)), ValueError, "k", "use k.detach()"
    ),
    # input
    "integer logits": Bad(call(LOGITS.long()), TypeError, "input", "floating-point logits"),
    "float8 logits": Bad(
        call(LOGITS.to(torch.float8_e4m3fn)),
        TypeError,
        "input",
        "float32 or float64, not torch.float8_e4m3fn; use .float()",
    ),
    "float8 target": Bad(
        call(target=PROBABILITIES.to(torch.float8_e5m2)), TypeError, "target", "use .float()"
    ),
    "float8 weight": Bad(
        call(weight=torch.ones(4).to(torch.float8_e5m2)), TypeError, "weight", "use .float()"
    ),
    "float8 k": Bad(call(k=torch.ones(3).to(torch.float8_e5m2)), TypeError, "k", "use .float()"),
    "complex logits": Bad(
        call(LOGITS.to(torch.complex64)), TypeError, "input", "floating-point logits"
    ),
    "list of logits": Bad(
        call(LOGITS.tolist()), TypeError, "input", "a tensor of logits, not list"
    ),
    "no dimension": Bad(
        call(torch.tensor(1.0), torch.tensor(0)), ValueError, "input", "shape (C), (N, C) or"
    ),
    "no classes": Bad(call(torch.zeros(3, 0)), ValueError, "input", "no classes"),
    # target
    "label too large": Bad(
        call(target=torch.tensor([0, 4, 1])), IndexError, "target", "4 classes (0 to 3)"
    ),
    "label negative": Bad(
        call(target=torch.tensor([0, -1, 1])), IndexError, "target", "class index -1"
    ),
    "wrong ignored label": Bad(
        call(target=torch.tensor([0, -100, 1]), ignore_index=-1),
        IndexError,
        "target",
        "ignore_index is -1",
    ),
    "label too large for smoothing": Bad(
        call(target=torch.tensor([0, 4, 1]), label_smoothing=0.1), IndexError, "target", "0 to 3"
    ),
    "label too large for float64": Bad(
        call(LOGITS.double(), torch.tensor([0, 4, 1])), IndexError, "target", "0 to 3"
    ),
    "too few labels": Bad(
        call(target=torch.tensor([0, 1])), ValueError, "target", "shape (3,) for an input of shape"
    ),
    "labels a column": Bad(
        call(target=LABELS.unsqueeze(1)), ValueError, "target", "class indices of shape (3,)"
    ),
    "labels of another image": Bad(
        call(IMAGE, IMAGE_LABELS[:, :4]), ValueError, "target", "shape (2, 5, 5)"
    ),
    "list of labels": Bad(
        call(target=[0, 1, 3]), TypeError, "target", "a tensor of labels, not list"
    ),
    "truth as labels": Bad(call(target=LABELS > 0), TypeError, "target", "not torch.bool"),
    "complex labels": Bad(
        call(target=LABELS.to(torch.complex64)), TypeError, "target", "class indices or"
    ),
    "labels as floats": Bad(call(target=LABELS.float()), ValueError, "target", "use .long()"),
    "probabilities of another shape": Bad(
        call(target=PROBABILITIES[:, :3]),
        ValueError,
        "target",
        "shape of input, (3, 4), not (3, 3)",
    ),
    "labels elsewhere": Bad(
        call(target=LABELS.to("meta")), ValueError, "target", "on meta but input is on cpu"
    ),
    # the others
    "weight elsewhere": Bad(
        call(weight=torch.ones(4, device="meta")), ValueError, "weight", "on meta but input is"
    ),
    "weight for three classes": Bad(
        call(weight=torch.ones(3)), ValueError, "weight", "each of the 4 classes"
    ),
    "weight a row": Bad(call(weight=torch.ones(1, 4)), ValueError, "weight", "(4,), not (1, 4)"),
    "integer weight": Bad(
        call(weight=torch.ones(4, dtype=torch.long)), TypeError, "weight", "floating-point tensor"
    ),
    "number for class_k": Bad(
        call(class_k=0.5), TypeError, "class_k", "with one value for each class, not float"
    ),
    "list of weights": Bad(call(weight=[1.0] * 4), TypeError, "weight", "floating-point tensor"),
    "weight to be learned": Bad(
        call(weight=torch.ones(4, requires_grad=True)), ValueError, "weight", "weight.detach()"
    ),
    "unknown reduction": Bad(
        call(reduction="average"), ValueError, "reduction", "'mean', 'sum' or 'none'"
    ),
    "list for reduction": Bad(
        call(reduction=["mean"]), ValueError, "reduction", "'mean', 'sum' or 'none', not ['mean']"
    ),
    "no reduction": Bad(call(reduction=None), ValueError, "reduction", "'mean', 'sum' or 'none'"),
    "negative smoothing": Bad(call(label_smoothing=-0.1), ValueError, "label_smoothing", "[0, 1]"),
    "smoothing above 1": Bad(call(label_smoothing=1.1), ValueError, "label_smoothing", "[0, 1]"),
    "NaN smoothing": Bad(call(label_smoothing=math.nan), ValueError, "label_smoothing", "[0, 1]"),
    "text for smoothing": Bad(call(label_smoothing="0.1"), TypeError, "label_smoothing", "[0, 1]"),
    "text for ignore_index": Bad(
        call(ignore_index="-100"), TypeError, "ignore_index", "a whole number"
    ),
    "fractional ignore_index": Bad(
        call(ignore_index=-1.5), TypeError, "ignore_index", "a whole number"
    ),
    "huge ignore_index": Bad(call(ignore_index=2**63), ValueError, "ignore_index", "64 bits"),
    "ignore_index for probabilities": Bad(
        call(target=PROBABILITIES, ignore_index=1), ValueError, "ignore_index", "must be negative"
    ),
}


def assert_clear(bad: Bad, action: Callable[[], Any]) -> None:
    with pytest.raises(bad.error) as caught:
        action()
    message = str(caught.value)
    assert type(caught.value) is bad.error
    assert message.split()[0] == bad.names
    assert bad.says in message


def made_and_called(kind: Any, settings: dict[str, Any], examples: tuple[Any, Any]) -> None:
    kind(**settings)(*examples)


@pytest.mark.usefixtures("path")
def test_function(subtests: pytest.Subtests) -> None:
    for name, bad in BAD.items():
        with subtests.test(name):
            assert_clear(bad, partial(tunable_cross_entropy, **bad.arguments))


@pytest.mark.parametrize("kind", [TunableCrossEntropyLoss, RuleCrossEntropyLoss])
def test_module(kind: Any, subtests: pytest.Subtests) -> None:
    """When it is constructed or when it is called, with the same words."""
    for name, bad in BAD.items():
        arguments = dict(bad.arguments)
        examples = arguments.pop("input"), arguments.pop("target")
        if kind is RuleCrossEntropyLoss:
            if {"k", "class_k", "label_smoothing"} & set(arguments):
                continue
            arguments["rule"] = cross_entropy
        with subtests.test(name):
            assert_clear(bad, partial(made_and_called, kind, arguments, examples))


def test_module_refuses_k_when_made(subtests: pytest.Subtests) -> None:
    for k in (0, -1.0, math.nan, "0.5", None, torch.tensor(-1.0)):
        wrong: Any = k
        with subtests.test(k=k), pytest.raises((ValueError, TypeError), match=r"^k "):
            TunableCrossEntropyLoss(k=wrong)


def test_a_module_does_not_learn_its_k() -> None:
    learned = torch.nn.Parameter(torch.tensor(0.5))
    criterion = TunableCrossEntropyLoss(k=1)
    with pytest.raises(ValueError, match="k must not require a gradient"):
        TunableCrossEntropyLoss(k=learned)
    with pytest.raises(ValueError, match="k must not require a gradient"):
        criterion.k = learned
    assert criterion.k == 1
    criterion.k = learned.requires_grad_(False)  # is then a tensor as any other
    assert criterion.k == 0.5
    assert not list(criterion.parameters())


# Wrong for any logits.
OF_ITSELF = {
    name: bad
    for name, bad in BAD.items()
    if bad.names in ("reduction", "label_smoothing")
    or (bad.names, bad.error) in {("ignore_index", TypeError), ("weight", TypeError)}
}


def test_modules_refuse_settings_when_made(subtests: pytest.Subtests) -> None:
    for name, bad in OF_ITSELF.items():
        setting = {bad.names: bad.arguments[bad.names]}
        kinds: list[Any] = [TunableCrossEntropyLoss]
        if bad.names != "label_smoothing":
            kinds.append(partial(RuleCrossEntropyLoss, cross_entropy))
        with subtests.test(name):
            for kind in kinds:
                assert_clear(bad, partial(kind, **setting))
            if bad.names == "weight":
                bad = bad._replace(names="class_weight")
                setting = {"class_weight": setting["weight"]}
            assert_clear(bad, partial(TunableLinearCrossEntropyLoss, **setting))


def test_rules_have_labels_only() -> None:
    with pytest.raises(TypeError, match=r"target must hold class indices"):
        RuleCrossEntropyLoss(cross_entropy)(LOGITS, PROBABILITIES)


def test_a_rule_is_a_function() -> None:
    with pytest.raises(TypeError, match=r"rule must be a function of logits and labels, not 0\.5"):
        RuleCrossEntropyLoss(0.5)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"to turn a function of the bias into a rule, use .*from_bias"
    ):
        RuleCrossEntropyLoss(lambda bias: bias)  # type: ignore[arg-type, misc]
    RuleCrossEntropyLoss(torch.sub)  # its signature is unknown to Python


def test_a_rule_gives_a_number_for_each_class() -> None:
    leaf = LOGITS.clone().requires_grad_()
    loss = RuleCrossEntropyLoss(lambda z, y: z.sum(-1, keepdim=True))(leaf, LABELS)
    with pytest.raises(ValueError, match=r"rule must return .* \(3, 4\), not \(3, 1\)"):
        loss.backward()


@pytest.mark.parametrize("k", [0.0, math.nan])
def test_k_is_checked_under_transforms(k: float) -> None:
    """A Python number is always known, whatever traces the tensors."""
    with pytest.raises(ValueError, match="k must be a finite number above 0"):
        torch.func.grad(lambda z: tunable_cross_entropy(z, LABELS, k=k))(LOGITS)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", [np.float16, np.float32, np.longdouble])
def test_numbers_of_numpy_are_compared_as_they_are(kind: Callable[[float], Any]) -> None:
    """Not in their own type, in which the greatest allowed k may overflow."""
    assert TunableCrossEntropyLoss(k=kind(0.5)).k == 0.5
    for wrong in (0, math.nan, math.inf):
        with pytest.raises(ValueError, match="k must be a finite number above 0"):
            TunableCrossEntropyLoss(k=kind(wrong))


@pytest.mark.parametrize("inner", [(5,), (5, 6), (5, 6, 7)])
def test_the_advice_for_one_k_per_image_works(inner: tuple[int, ...]) -> None:
    k = torch.tensor([0.5, 2.0])
    target = torch.arange(2 * math.prod(inner)).reshape(2, *inner) % 4
    leaf = torch.arange(target.numel() * 4.0).cos().reshape(2, 4, *inner).requires_grad_()
    with pytest.raises(ValueError, match=r"^k must") as caught:
        tunable_cross_entropy(leaf, target, k=k)
    (advice,) = re.findall(r"use (k\[.*\)) to", str(caught.value))
    tunable_cross_entropy(leaf, target, k=eval(advice, {"k": k}), reduction="sum").backward()
    for row, image, labels in zip(k.tolist(), leaf.detach(), target, strict=True):
        alone = image.unsqueeze(0).requires_grad_()
        tunable_cross_entropy(alone, labels.unsqueeze(0), k=row, reduction="sum").backward()
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad[k == row], alone.grad)
