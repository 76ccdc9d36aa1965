"""Sequences for question 2: spoken digits, Shakespeare's characters, and their networks."""

from __future__ import annotations

import functools
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Part = tuple[NDArray[Any], NDArray[Any]]

LENGTH = 128  # characters of a sequence
RATE, WINDOW, HOP, BANDS, FRAMES = 8000, 256, 100, 40, 80  # a second of speech
_SPEECH, _TEXT = "spoken-digits/fsdd.npz", "text/tinyshakespeare.txt"


def speech(folder: Path, speaker: int) -> tuple[Part, Part]:
    """Return the spoken digits as log-mel frames; the test set is one held-out speaker.

    Args:
        folder: That of the data sets, with spoken-digits/fsdd.npz.
        speaker: From 0 to 5.

    """
    frames, digit, who = _spoken(folder / _SPEECH)
    test = who == speaker
    return (frames[~test], digit[~test]), (frames[test], digit[test])


@functools.lru_cache(maxsize=1)  # several seconds, the same for all speakers
def _spoken(path: Path) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[Any]]:
    """Return the frames of all recordings, their digits and their speakers."""
    with np.load(_existing(path), allow_pickle=False) as found:
        samples, offsets = found["samples"], found["offsets"]
        digit, who = found["digit"].astype(np.int64), found["speaker"]
    return log_mel([samples[a:b] for a, b in itertools.pairwise(offsets)]), digit, who


def log_mel(recordings: list[NDArray[np.int16]]) -> NDArray[np.float32]:
    """Return recordings as (examples, frames, bands), padded with 0.

    Each band of a recording has mean 0, which removes much of the speaker and the microphone.
    """
    length = HOP * (FRAMES - 1)
    padded = torch.zeros(len(recordings), length)
    for at, one in enumerate(recordings):
        cut = one[:length]
        padded[at, : len(cut)] = torch.from_numpy(cut.astype(np.float32) / 2**15)
    window = torch.hann_window(WINDOW)
    spectrum = torch.stft(padded, WINDOW, HOP, window=window, return_complex=True).abs() ** 2
    bands = (_mel_filters() @ spectrum + 1e-6).log().movedim(1, 2)
    lengths = torch.tensor([min(FRAMES, len(one) // HOP + 1) for one in recordings])
    spoken = (torch.arange(FRAMES) < lengths[:, None])[:, :, None]
    mean = (bands * spoken).sum(1, keepdim=True) / lengths[:, None, None]
    found: NDArray[np.float32] = ((bands - mean) * spoken / 4).numpy()
    return found


def _mel_filters() -> Tensor:
    """Return triangular filters of equal width on the mel scale, (bands, frequencies)."""
    top = 2595 * math.log10(1 + RATE / 2 / 700)
    corners = 700 * (10 ** (torch.linspace(0, top, BANDS + 2) / 2595) - 1)
    frequencies = torch.linspace(0, RATE / 2, WINDOW // 2 + 1)
    low, middle, high = corners[:-2, None], corners[1:-1, None], corners[2:, None]
    up, down = (frequencies - low) / (middle - low), (high - frequencies) / (high - middle)
    return torch.minimum(up, down).clamp(min=0)


def shakespeare(folder: Path) -> tuple[Part, Part]:
    """Return character sequences, labelled with the next ones; the last tenth is the test set."""
    return characters(_existing(folder / _TEXT).read_text(encoding="utf-8"))


def characters(text: str) -> tuple[Part, Part]:
    """Return a text as sequences of character indices and of the next ones; the last tenth to test.

    Example:
        >>> (x, y), (x_test, _) = characters("to be or not to be " * 100)
        >>> x.shape, x_test.shape, bool((x[0, 1:] == y[0, :-1]).all())
        ((13, 128), (1, 128), True)

    """
    known = {one: at for at, one in enumerate(sorted(set(text)))}
    numbers = np.array([known[one] for one in text], np.int64)
    cut = int(0.9 * len(numbers))
    return _sequences(numbers[:cut]), _sequences(numbers[cut:])


def _sequences(numbers: NDArray[np.int64]) -> Part:
    count = (len(numbers) - 1) // LENGTH
    x = numbers[: count * LENGTH].reshape(count, LENGTH)
    return x, numbers[1 : count * LENGTH + 1].reshape(count, LENGTH)


def _existing(path: Path) -> Path:
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist: name the folder of the data with --data-dir"
        )
    return path


def shift_speech(x: Tensor) -> Tensor:
    """Return frames shifted by up to eight in time and by up to four bands in pitch, with noise."""
    count, device = len(x), x.device
    moves = torch.randint(-8, 9, (count, 1), device=device)
    bands = torch.randint(-4, 5, (count, 1), device=device)
    rows = (torch.arange(FRAMES, device=device) + moves).clamp(0, FRAMES - 1)
    columns = (torch.arange(BANDS, device=device) + bands).clamp(0, BANDS - 1)
    moved = x[torch.arange(count, device=device)[:, None, None], rows[:, :, None], columns[:, None]]
    return moved + 0.1 * torch.randn_like(moved)


# --- networks ------------------------------------------------------------------------------------


class RowReader(nn.Module):
    """A GRU that classifies images, read row by row, or speech, read frame by frame.

    Args:
        inputs: Numbers per row or frame.
        width: The number of units.
        classes: The number of classes.

    """

    def __init__(self, inputs: int, width: int = 128, classes: int = 10) -> None:
        super().__init__()
        self.gru = nn.GRU(inputs, width, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits from the mean of all states, so that frames after a word matter less."""
        states, _ = self.gru(x.squeeze(1) if x.dim() == 4 else x)
        out: Tensor = self.head(states.mean(1))
        return out


class TextLSTM(nn.Module):
    """A two-layer LSTM that predicts each next character.

    Args:
        characters: The size of the alphabet.
        width: Units per layer.

    """

    def __init__(self, characters: int, width: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, width)
        self.lower, self.upper = (nn.LSTM(width, width, batch_first=True) for _ in range(2))
        # Not the dropout of nn.LSTM: cuDNN draws it from one random state for all trainings.
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(width, characters)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (sequences, characters, positions)."""
        states = self.drop(self.lower(self.embed(x))[0])
        out: Tensor = self.head(self.upper(states)[0]).movedim(-1, 1)
        return out


class Block(nn.Module):
    """Causal attention, and two layers at each position."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.layers = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return x plus the outputs of attention and layers."""
        count, places, width = x.shape
        shape = (count, places, 3, self.heads, width // self.heads)
        q, k, v = self.mix(self.before(x)).reshape(shape).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(seen.transpose(1, 2).reshape(count, places, width)))
        out: Tensor = x + self.drop(self.layers(self.between(x)))
        return out


class TextTransformer(nn.Module):
    """A small decoder that predicts each next character.

    Args:
        characters: The size of the alphabet.
        width: The embedding dimension.
        layers: The number of blocks.

    """

    def __init__(self, characters: int, width: int = 128, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, width)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        heads = max(1, width // 32)
        self.blocks = nn.Sequential(*(Block(width, heads, 0.1) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (sequences, characters, positions)."""
        states = self.blocks(self.embed(x) + self.places)
        out: Tensor = self.head(self.norm(states)).movedim(-1, 1)
        return out
