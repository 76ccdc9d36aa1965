"""The networks of the studies, and how their images are augmented."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_SHIFT = 4  # pixels


def convolution(before: int, after: int, *more: nn.Module) -> nn.Sequential:
    """Return a convolution with batch norm and ReLU, followed by the given layers."""
    layer = nn.Conv2d(before, after, 3, padding=1, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(after), nn.ReLU(), *more)


class Residual(nn.Module):
    """Two convolutions with a skip connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(convolution(width, width), convolution(width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return x plus the output of the convolutions."""
        out: Tensor = x + self.body(x)
        return out


class ResNet(nn.Sequential):
    """The network of docs/any-network.md: at width 64, with one block, 6.6 million parameters.

    Args:
        classes: The number of classes.
        width: Channels of the first convolution.
        blocks: Residual blocks in each of two stages.

    """

    def __init__(self, classes: int = 10, width: int = 64, blocks: int = 1) -> None:
        pool = nn.MaxPool2d
        super().__init__(
            nn.BatchNorm2d(3),
            convolution(3, width),
            convolution(width, 2 * width, pool(2)),
            *(Residual(2 * width) for _ in range(blocks)),
            convolution(2 * width, 4 * width, pool(2)),
            convolution(4 * width, 8 * width, pool(2)),
            *(Residual(8 * width) for _ in range(blocks)),
            nn.AdaptiveMaxPool2d(1),
            nn.Flatten(),
            nn.Linear(8 * width, classes, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, scaled so that cross-entropy starts gently."""
        out: Tensor = super().forward(x) / 8
        return out


class CNN8(nn.Sequential):
    """Six convolutions and two layers, as in Ma et al. (2020) for CIFAR-10.

    Args:
        width: Channels of the first convolutions; others are in proportion.

    """

    def __init__(self, width: int = 64) -> None:
        sizes = (width, 2 * width, 49 * width // 16)  # 64, 128, 196
        layers: list[nn.Module] = []
        before = 3
        for size in sizes:
            layers += [_with_bias(before, size), _with_bias(size, size), nn.MaxPool2d(2)]
            before = size
        dense = nn.Linear(16 * before, 4 * width)
        super().__init__(
            *layers, nn.Flatten(), dense, nn.BatchNorm1d(4 * width), nn.ReLU(),
            nn.Linear(4 * width, 10),
        )  # fmt: skip


def _with_bias(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())


class MLP(nn.Sequential):
    """Fully connected layers on flat images in [-1, 1], as in the paper.

    Args:
        inputs: Numbers per image.
        width: Units per hidden layer.
        layers: The number of hidden layers.

    """

    def __init__(self, inputs: int = 3072, width: int = 800, layers: int = 1) -> None:
        hidden: list[nn.Module] = []
        before = inputs
        for _ in range(layers):
            hidden += [nn.Linear(before, width), nn.ReLU()]
            before = width
        super().__init__(nn.Flatten(), *hidden, nn.Linear(before, 10))
        for one in self.modules():
            if isinstance(one, nn.Linear):  # Glorot initialization, as in the MLP fleet
                nn.init.xavier_uniform_(one.weight)
                nn.init.zeros_(one.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of images in [0, 1]."""
        out: Tensor = super().forward(2 * x - 1)
        return out


def flip_and_shift(x: Tensor) -> Tensor:
    """Flip each image with probability 1/2, then shift it by up to four pixels."""
    return shift(torch.where(torch.rand(len(x), 1, 1, 1, device=x.device) < 0.5, x.flip(3), x))


def shift(x: Tensor) -> Tensor:
    """Shift each image by up to four pixels in each direction."""
    count, device, (height, width) = len(x), x.device, x.shape[2:]
    x = F.pad(x, (_SHIFT,) * 4, mode="reflect")
    offsets = torch.randint(2 * _SHIFT + 1, (2, count, 1), device=device)
    rows = offsets[0] + torch.arange(height, device=device)
    columns = offsets[1] + torch.arange(width, device=device)
    image = torch.arange(count, device=device)[:, None, None]
    return x.movedim(1, 3)[image, rows[:, :, None], columns[:, None, :]].movedim(3, 1)
