"""The networks of the module benchmarks: small ones of each kind, and a ResNet."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn


class CNN(nn.Module):
    """Three convolutions of 32, 64 and 128 channels with batch norm, for images of 32×32×3."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 64, 128)
        self.body = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv2d(before, after, 3, padding=1),
                    nn.BatchNorm2d(after),
                    nn.ReLU(),
                    nn.MaxPool2d(2),
                )
                for before, after in itertools.pairwise(widths)
            )
        )
        self.head = nn.Linear(128 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).flatten(1))
        return out


class GRU(nn.Module):
    """A GRU of 128 units, for sequences of 28 rows of 28 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(28, 128, batch_first=True)
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.rnn(x)[0][:, -1])
        return out


class Transformer(nn.Module):
    """Four layers of 128 with dropout, for sequences of 28 rows of 28 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(28, 128)
        self.position = nn.Parameter(torch.zeros(28, 128))
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 4)
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(self.embed(x) + self.position).mean(1))
        return out


def block(before: int, after: int, pool: bool = False) -> nn.Sequential:
    layers = [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, *([nn.MaxPool2d(2)] if pool else []))


class Residual(nn.Module):
    """Two blocks with a skip connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(block(width, width), block(width, width))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.body(x)
        return out


class ResNet(nn.Module):
    """Nine layers, 6.6 M parameters, for images of 32×32×3; its logits are divided by 8."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            block(3, 64),
            block(64, 128, pool=True),
            Residual(128),
            block(128, 256, pool=True),
            block(256, 512, pool=True),
            Residual(512),
            nn.AdaptiveMaxPool2d(1),
        )
        self.head = nn.Linear(512, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).flatten(1)) / 8
        return out


class Case(NamedTuple):
    """A network, the shape of its input, and its training settings."""

    network: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch_size: int
    precision: str
    epochs: int  # per trial


CASES = {
    "CNN 32-64-128": Case(CNN, (3, 32, 32), 128, "tf32", 10),
    "GRU 128": Case(GRU, (28, 28), 128, "tf32", 40),
    "transformer 4×128": Case(Transformer, (28, 28), 128, "tf32", 10),
    "ResNet 6.6 M": Case(ResNet, (3, 32, 32), 512, "bf16", 10),
}
EXAMPLES = 12_800
