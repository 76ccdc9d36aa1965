"""The examples of docs/adoption.md do what they claim."""

from __future__ import annotations

import copy
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import reference
from documents import Document
from pseudograd import TunableCrossEntropyLoss

DOCUMENT = Document("adoption.md")
run = DOCUMENT.run


def test_a_training_loop() -> None:
    names = run("A training loop")
    model, x, y = names["model"], names["x"], names["y"]
    _, f = reference.loss(model(x), y, 0.5)
    assert model.weight.grad.shape == (3, 4)
    names["optimizer"].zero_grad()
    names["criterion"](model(x), y).backward()
    torch.testing.assert_close(model.weight.grad.double(), f.T @ x.double(), rtol=1e-4, atol=1e-6)


def test_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one process, the weights are those of a plain loop over the accumulated batches."""
    port = _free_port()
    for name, value in {
        "LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    names = run("All at once")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for at in (0, 4):
        x, y = map(torch.cat, zip(*names["batches"][at : at + 4], strict=True))
        optimizer.zero_grad()
        TunableCrossEntropyLoss(k=0.5)(model(x), y).backward()
        optimizer.step()
    for mine, theirs in zip(names["model"].cpu().parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-3)  # of bfloat16


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        port: int = one.getsockname()[1]
        return port


def test_masks() -> None:
    names = run("A training loop", "Masks")
    logits, y, mask = (names[name] for name in ("logits", "y", "mask"))
    value, _ = reference.loss(logits[mask], y[mask], 0.5)
    gradients = []
    for name in ("loss", "weighted", "by_hand"):
        torch.testing.assert_close(names[name].double(), value, rtol=1e-5, atol=0)
        gradients += torch.autograd.grad(names[name], logits, retain_graph=True)
    for one in gradients:
        torch.testing.assert_close(one, gradients[0])


def test_mixup() -> None:
    """The value equals timm's loss; the gradient is that of the rule for soft targets."""
    torch.manual_seed(0)
    names = run("A training loop", "Mixup")
    x, y, model, mixed, targets = (names[name] for name in ("x", "y", "model", "mixed", "targets"))
    logits = model(mixed).detach().requires_grad_()
    loss = names["criterion"](logits, targets)
    timms = torch.sum(-targets * F.log_softmax(logits, dim=-1), dim=-1).mean()
    torch.testing.assert_close(loss, timms)
    (gradient,) = torch.autograd.grad(loss, logits)
    _, f = reference.loss(logits, targets, 0.5)
    torch.testing.assert_close(gradient.double(), f, rtol=1e-4, atol=1e-7)

    # x and y are blended in the same proportions.
    y_and_x = torch.cat([F.one_hot(y, 3), x], 1)
    mixed, targets = names["mixup"](y_and_x, y, 3)
    torch.testing.assert_close(mixed[:, :3], targets)
    assert not torch.equal(mixed, y_and_x)

    # A weighted sum of one loss per label would have another gradient, except at k = 1.
    whole, one = (torch.tensor(q) for q in ([[0.7, 0.3, 0.0]], [[1.0, 0.0, 0.0]]))
    other, row = torch.tensor([[0.0, 1.0, 0.0]]), logits[:1]
    for k, same in ((1.0, True), (0.5, False)):
        blend, first, second = (reference.loss(row, q, k)[1] for q in (whole, one, other))
        assert torch.allclose(blend, 0.7 * first + 0.3 * second, rtol=1e-6) == same


def test_segmentation() -> None:
    names = run("A training loop", "Segmentation")
    logits, masks, network = (names[name] for name in ("pixel_logits", "masks", "network"))
    rows, pixels = logits.movedim(1, -1).reshape(-1, 21).double(), masks.flatten()
    value, f = reference.loss(rows, pixels, 0.5, ignore_index=255)
    torch.testing.assert_close(names["loss"].double(), value, rtol=1e-5, atol=0)
    torch.testing.assert_close(network.bias.grad.double(), f.sum(0), rtol=1e-4, atol=1e-6)


def test_skorch() -> None:
    pytest.importorskip("skorch")
    names = run("A training loop", "skorch")
    assert names["classifier"].criterion_.k == 0.5
    np.testing.assert_allclose(names["probabilities"].sum(1), 1, rtol=1e-5)
    assert np.isfinite(names["grid"].cv_results_["mean_test_score"]).all()
    assert names["grid"].best_estimator_.criterion_.k == names["grid"].best_params_["criterion__k"]


def test_a_large_vocabulary() -> None:
    names = run("A training loop", "A large vocabulary")
    model, hidden, labels = names["model"], names["hidden"], names["labels"]
    logits = model(hidden).detach().flatten(0, 1)
    value, f = reference.loss(logits, labels.flatten(), 0.5)
    torch.testing.assert_close(names["loss"].double(), value, rtol=1e-5, atol=0)
    expected = (f @ model.weight.double()).reshape(hidden.shape)
    torch.testing.assert_close(hidden.grad.double(), expected, rtol=1e-4, atol=1e-7)


class LanguageModel(nn.Module):
    """Like a model of transformers: the loss is an attribute, and computed on request."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Embedding(11, 6), nn.Linear(6, 11)
        self.loss_function: Any = self.plain_loss

    @staticmethod
    def plain_loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    def forward(self, input_ids: Tensor, labels: Tensor, **settings: Any) -> SimpleNamespace:
        logits = self.head(self.body(input_ids))
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=11, **settings)
        return SimpleNamespace(loss=loss, logits=logits)


def function(name: str, title: str) -> Any:
    """Return a function from a section whose other code needs more than PyTorch."""
    return DOCUMENT.execute(DOCUMENT.blocks(title, "python"))[name]


@pytest.fixture
def causal_loss() -> Any:
    return function("causal_loss", "A causal language model")


def test_a_causal_language_model(causal_loss: Any) -> None:
    """With a stand-in model: the value stays, the gradient is the rule's, padding is ignored."""
    torch.manual_seed(0)
    model = LanguageModel()
    tokens = torch.randint(11, (3, 7))
    labels = tokens.masked_fill(torch.rand(3, 7) < 0.3, -100)
    plain = model(tokens, labels)
    (of_plain,) = torch.autograd.grad(plain.loss, model.head.bias)
    model.loss_function = causal_loss
    output = model(tokens, labels)
    torch.testing.assert_close(output.loss, plain.loss)
    (gradient,) = torch.autograd.grad(output.loss, model.head.bias)
    _, f = reference.loss(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), 0.5)
    torch.testing.assert_close(gradient.double(), f.sum(0), rtol=1e-4, atol=1e-6)
    assert not torch.allclose(gradient, of_plain, rtol=0.1)


def test_half_precision_and_labels_that_are_shifted_already(causal_loss: Any) -> None:
    """A sum over many tokens overflows float16; the Trainer may pass shifted labels."""
    torch.manual_seed(0)
    logits, labels = 4 * torch.randn(1, 30_000, 11).half(), torch.randint(11, (1, 30_000))
    count = torch.tensor(29_999)
    loss = causal_loss(logits, labels, num_items_in_batch=count)
    expected = F.cross_entropy(logits[0, :-1].float(), labels[0, 1:])
    torch.testing.assert_close(loss, expected)
    shifted = F.pad(labels, (0, 1), value=-7)[:, 1:]
    again = causal_loss(logits, labels, shift_labels=shifted, ignore_index=-7)
    torch.testing.assert_close(again, expected)


def test_gradient_accumulation_over_batches_of_several_lengths(causal_loss: Any) -> None:
    """Given the number of tokens in all batches, the parts add up to the whole."""
    torch.manual_seed(0)
    model = LanguageModel()
    model.loss_function = causal_loss
    tokens = torch.randint(11, (4, 7))
    labels = tokens.clone()
    labels[0, 2:] = -100
    whole = model(tokens, labels).loss
    count = (labels[:, 1:] != -100).sum()
    parts = sum(
        model(tokens[i : i + 2], labels[i : i + 2], num_items_in_batch=count).loss for i in (0, 2)
    )
    torch.testing.assert_close(parts, whole)


def test_transformers() -> None:
    pytest.importorskip("transformers")
    names = run("A training loop", "A causal language model")
    assert names["language_model"].lm_head.weight.grad is not None


def test_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    names = run("A training loop", "A causal language model", "Hugging Face's Trainer")
    assert names["trainer"].state.global_step == 2


def test_accumulated_parts_of_a_batch_add_up() -> None:
    """Given their number of labels; otherwise each part is a batch. Ignored labels do not count."""
    loss = function("classifier_loss", "A classifier in the Trainer")
    torch.manual_seed(0)
    logits, labels = torch.randn(7, 3), torch.randint(3, (7,))
    labels[2] = -100
    expected, _ = reference.loss(logits, labels, 0.5)
    outputs = [SimpleNamespace(logits=part) for part in (logits, logits[:4], logits[4:])]
    whole = loss(outputs[0], labels)
    torch.testing.assert_close(whole.double(), expected, rtol=1e-5, atol=0)
    count = (labels != -100).sum()
    parts = loss(outputs[1], labels[:4], count) + loss(outputs[2], labels[4:], count)
    torch.testing.assert_close(parts, whole)


def test_trainer_of_a_classifier_accumulates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accumulated over batches of 4 and 3, the gradient is that of all 7 at once."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    names = run("A training loop", "A classifier in the Trainer")
    trainer, images = names["trainer"], names["images"]
    assert trainer.state.global_step == 1

    settings = copy.copy(names["settings"])
    settings.optim, settings.learning_rate, settings.max_grad_norm = "sgd", 1.0, 0.0
    model = transformers.ViTForImageClassification(names["config"])
    before = copy.deepcopy(model)
    logits = before(torch.stack([image["pixel_values"] for image in images])).logits
    labels = torch.tensor([image["labels"] for image in images])
    names["tunable_cross_entropy"](logits, labels, k=0.5).backward()
    transformers.Trainer(
        model, settings, train_dataset=images, compute_loss_func=names["classifier_loss"]
    ).train()
    for old, new in zip(before.classifier.parameters(), model.classifier.parameters(), strict=True):
        torch.testing.assert_close(old - new, old.grad, rtol=1e-4, atol=1e-6)


def test_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pytorch_lightning")
    monkeypatch.chdir(tmp_path)
    names = run("A training loop", "Lightning")
    assert names["classifier"].trainer.global_step == 2


def test_in_jax() -> None:
    """Three steps, each with its own k, equal PyTorch's."""
    pytest.importorskip("jax")
    names = run("In JAX")
    weights = torch.zeros(4, 3, requires_grad=True)
    x, y = (torch.tensor(names[name].tolist()) for name in ("x", "y"))
    for k in (0.25, 0.5, 1.0):
        value, f = reference.loss(x @ weights, y, k)
        weights = weights - 0.1 * (x.double().T @ f).float()
    assert float(names["value"]) == pytest.approx(value.item(), rel=1e-5)
    found = torch.tensor(names["weights"].tolist())
    torch.testing.assert_close(found, weights, rtol=1e-4, atol=1e-6)
    assert names["step"]._cache_size() == 1
