"""The official file formats of the benchmark sets. Nothing is ever unpickled.

A reader takes an open file and returns its uint8 arrays: images (examples, height, width, and
channels if any), labels counted from 0, or both in this order.
"""

from __future__ import annotations

import math
import struct
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from pseudograd.extras import needed_for

Bytes = NDArray[np.uint8]

_UNSIGNED_BYTE = 8  # type code in an IDX header


def read_idx(file: BinaryIO) -> list[Bytes]:
    """Read the array of an IDX file, the format of MNIST."""
    content = file.read()
    if content[:3] != bytes([0, 0, _UNSIGNED_BYTE]) or len(content) < 4 + 4 * content[3]:
        raise ValueError("it does not have the header of an IDX file of bytes")
    header = 4 + 4 * content[3]
    shape = struct.unpack_from(f">{content[3]}I", content, 4)
    if len(content) - header != math.prod(shape):
        raise ValueError(
            f"its header announces {math.prod(shape)} bytes, but {len(content) - header} follow"
        )
    return [np.frombuffer(content, np.uint8, offset=header).reshape(shape)]


def read_cifar10(file: BinaryIO) -> list[Bytes]:
    """Read the images and labels of a file of CIFAR-10's binary version."""
    return _read_cifar(file, labels=1)


def read_cifar100(file: BinaryIO) -> list[Bytes]:
    """Read the images and fine labels of a file of CIFAR-100's binary version."""
    return _read_cifar(file, labels=2)


def _read_cifar(file: BinaryIO, labels: int) -> list[Bytes]:
    """Read examples of one or two labels, the fine one last, and three colour planes."""
    content = np.frombuffer(file.read(), np.uint8)
    size = labels + 3 * 32 * 32
    if len(content) % size:
        raise ValueError(f"its {len(content)} bytes are not a multiple of an example's {size}")
    examples = content.reshape(-1, size)
    planes = examples[:, labels:].reshape(-1, 3, 32, 32)
    return [planes.transpose(0, 2, 3, 1), examples[:, labels - 1]]


def read_svhn(file: BinaryIO) -> list[Bytes]:
    """Read the images and labels of a .mat file of SVHN's cropped digits."""
    with needed_for("reading .mat files"):
        from scipy.io import loadmat

    try:
        held = loadmat(file, variable_names=("X", "y"))
    except Exception as problem:  # SciPy raises many types for damaged files
        raise ValueError(f"SciPy says: {problem}") from problem
    pictures, labels = held.get("X"), held.get("y")
    if (
        not (isinstance(pictures, np.ndarray) and isinstance(labels, np.ndarray))
        or pictures.dtype != np.uint8
        or pictures.ndim != 4
        or labels.shape != (pictures.shape[3], 1)
    ):
        raise ValueError("it has no images X (height, width, channels, n) with labels y (n, 1)")
    # SVHN labels the digit 0 with 10.
    return [pictures.transpose(3, 0, 1, 2), (labels[:, 0] % 10).astype(np.uint8)]
