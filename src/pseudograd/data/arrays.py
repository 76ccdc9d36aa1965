"""Examples as arrays of any shape, from .npz files, image folders and known data sets."""

from __future__ import annotations

import contextlib
import struct
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pseudograd.data.benchmarks import BENCHMARKS, load
from pseudograd.data.columns import Refusal
from pseudograd.data.dataset import check_size, digits
from pseudograd.data.parts import check_fraction, draw
from pseudograd.data.reading import array_in, arrays_in, in_a_sentence, name_of, opened
from pseudograd.data.survey import Note
from pseudograd.extras import needed_for
from pseudograd.words import counted, first_line, listed, nearest

Part = tuple[NDArray[Any], NDArray[Any]]

KNOWN = ("digits", *BENCHMARKS)
_SUFFIXES = (
    *(".bmp", ".gif", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".ppm", ".tif", ".tiff"),
    ".webp",
)
_CHANNELS = {1: "L", 3: "RGB"}  # Pillow's names of modes
_ORIENTATION = 0x0112  # EXIF tag
_ON_ITS_SIDE = (5, 6, 7, 8)


class Arrays(NamedTuple):
    """A training and a test set.

    Attributes:
        train: Inputs, one row per example, and labels.
        test: The same for the test set.
        classes: The names of the classes; None if they only have numbers.

    """

    train: Part
    test: Part
    classes: tuple[str, ...] | None


@dataclass(frozen=True, eq=False)
class NewExamples:
    """Examples to predict.

    Attributes:
        inputs: One row per example.
        names: The file of each example; None for arrays.
        labels: The label of each example; None if unknown.

    """

    inputs: NDArray[Any]
    names: tuple[str, ...] | None
    labels: NDArray[Any] | None


def images(name: str, data_dir: str | Path | None = None) -> tuple[Part, Part]:
    """Return the training and the test set of a known image data set.

    Args:
        name: "digits", "mnist", "fashion-mnist", "svhn", "cifar10" or "cifar100". All but the
            digits must be on this machine: ``pseudograd data fetch cifar10`` downloads a set.
        data_dir: The folder of the data sets, as for `data_folder`.

    Returns:
        Two pairs of images (examples, channels, height, width), uint8, and class indices.

    Example:
        >>> (x, y), (x_test, y_test) = images("digits")
        >>> x.shape, x.dtype, x_test.shape, y[:3]
        ((1437, 1, 8, 8), dtype('uint8'), (360, 1, 8, 8), array([6, 5, 5]))

    """
    size: tuple[int, ...]
    if name == "digits":
        data, size = digits(), (8, 8)
        spread = data.features.float() * (255 / data.value_range[1])
        pixels = spread.round().byte().numpy()
    elif name in BENCHMARKS:
        data, size = load(name, data_dir), BENCHMARKS[name].shape[:2]
        pixels = data.features.numpy()
    else:
        raise ValueError(f"name must be one of {', '.join(KNOWN)}, not {name!r}")
    pictures = pixels.reshape(len(pixels), *size, -1).transpose(0, 3, 1, 2)
    pictures = np.ascontiguousarray(pictures)
    labels, cut = data.labels.numpy(), data.train_size
    return (pictures[:cut], labels[:cut]), (pictures[cut:], labels[cut:])


def open_arrays(
    source: str | Path,
    *,
    test_fraction: float | None = None,
    image_size: int | None = None,
    data_dir: str | Path | None = None,
) -> Arrays:
    """Open examples for any network.

    Args:
        source: One of these:

            - the name of a known set, as for `images`;
            - an .npz file with the arrays ``X`` and ``y``, and optionally ``X_test`` and ``y_test``
              (``x``, ``X_train``, ``x_train`` and ``y_train`` are accepted, too);
            - a folder with one folder of images per class, or with folders ``train`` and ``test``
              of this kind (``val`` instead of ``test`` is accepted, too).
        test_fraction: The share to hold out as a stratified test set if there is none, by default
            0.2.
        image_size: Resize the images of a folder so that their shorter side has this many pixels,
            and crop the central square.
        data_dir: The folder of the known sets, as for `data_folder`.

    Returns:
        The training set, the test set, and the names of the classes if they have any.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "sounds.npz")
        >>> X, y = np.random.rand(20, 2, 50).astype("float32"), ["dog", "cat"] * 10
        >>> np.savez(path, X=X, y=y)
        >>> train, test, classes = open_arrays(path)
        >>> train[0].shape, test[0].shape, test[1], classes
        ((16, 2, 50), (4, 2, 50), array([1, 0, 0, 1]), ('cat', 'dog'))

    """
    path = Path(source)
    check_fraction(test_fraction)
    if image_size is not None and image_size < 1:
        raise ValueError(f"image_size must be 1 or more, not {image_size}")
    if str(source) in KNOWN:
        _refuse(source, "has a test set of its own", test_fraction=test_fraction)
        _refuse(source, "has images of one size", image_size=image_size)
        return Arrays(*images(str(source), data_dir), None)
    _refuse(source, "is not a known set", data_dir=data_dir)
    if path.is_dir():
        return _folder(path, test_fraction, image_size)
    _refuse(source, "is not a folder of images", image_size=image_size)
    if ".npz" not in [suffix.lower() for suffix in path.suffixes]:
        if not path.exists() and not path.suffix:
            raise ValueError(
                f"data {path.name!r} is not known: give {nearest(path.name, KNOWN)}, an .npz file "
                "or a folder of images"
            )
        raise ValueError(
            f"{source} must be an .npz file, a folder of images or one of {', '.join(KNOWN)}, to "
            "train your own network on it"
        )
    return _npz(path, test_fraction)


def _refuse(source: str | Path, why: str, **options: object) -> None:
    for option, given in options.items():
        if given is not None:
            raise ValueError(f"{option!r} must be left out: {source} {why}")


def _parted(
    inputs: NDArray[Any], labels: NDArray[Any], test_fraction: float | None
) -> tuple[Part, Part]:
    """Hold out a test set, which does not depend on the seed of a search."""
    one_class_each = labels.ndim == 1
    codes = np.unique(labels, return_inverse=True)[1] if one_class_each else np.zeros(len(labels))
    drawn = draw(codes.astype(np.intp), test_fraction or 0.2, one_class_each, seed=0)
    return (inputs[~drawn], labels[~drawn]), (inputs[drawn], labels[drawn])


# --- .npz files ----------------------------------------------------------------------------------

_INPUTS = ("X", "x", "X_train", "x_train")
_TARGETS = ("y", "Y", "y_train", "Y_train")
_TEST_INPUTS = ("X_test", "x_test")
_TEST_TARGETS = ("y_test", "Y_test")


def _npz(path: Path, test_fraction: float | None) -> Arrays:
    with _arrays_in(path) as arrays:
        train = _pair(arrays, _INPUTS, _TARGETS)
        test = None
        if any(name in arrays.files for name in (*_TEST_INPUTS, *_TEST_TARGETS)):
            test = _pair(arrays, _TEST_INPUTS, _TEST_TARGETS)
    if test is None:
        train, test = _parted(*train, test_fraction)
    else:
        _refuse(name_of(path), "has a test set of its own", test_fraction=test_fraction)
    (x, y), (x_test, y_test) = train, test
    if y.dtype.kind != "U" or y.ndim > 1:
        return Arrays(train, test, None)
    classes, codes = np.unique(y, return_inverse=True)
    where = np.searchsorted(classes, y_test).clip(max=len(classes) - 1)
    if len(unknown := np.unique(y_test[classes[where] != y_test])):
        raise ValueError(
            f"{name_of(path)} has test labels that no training example has, "
            f"{listed(unknown.tolist())}: add training examples of these, too"
        )
    names = tuple(str(name) for name in classes.tolist())
    return Arrays((x, codes.astype(np.int64)), (x_test, where.astype(np.int64)), names)


@contextlib.contextmanager
def _arrays_in(path: Path) -> Iterator[Any]:
    """Open an .npz file; errors inside the block become one sentence about it."""
    with in_a_sentence(name_of(path)), opened(path) as (file, suffix):
        if suffix != ".npz":
            raise Refusal("must be an .npz file or images, for your own network")
        yield arrays_in(file)


def _pair(arrays: Any, inputs: Sequence[str], targets: Sequence[str]) -> Part:
    x_name, y_name = _first(arrays, inputs), _first(arrays, targets)
    x, y = _numbers(arrays, x_name), array_in(arrays, y_name)
    if y.ndim == 2 and y.shape[1] == 1:  # a column, as Keras stores labels
        y = y[:, 0]
    if not y.ndim or len(x) != len(y):
        raise Refusal(
            f"has {len(x)} examples in {x_name!r}, but the shape {y.shape} in {y_name!r}: give one "
            "label for each example"
        )
    if not len(x):
        raise Refusal(f"has no examples in {x_name!r}: add some")
    if y.dtype.kind not in "biufUS":
        raise Refusal(f"has labels of dtype {y.dtype} in {y_name!r}: save numbers or strings")
    return x, y.astype(str) if y.dtype.kind == "S" else y


def _first(arrays: Any, names: Sequence[str]) -> str:
    """Return the first of these names that is in the file; the usual name if none is."""
    return next((name for name in names if name in arrays.files), names[0])


def _numbers(arrays: Any, name: str) -> NDArray[Any]:
    found = array_in(arrays, name)
    if found.dtype.kind not in "biuf" or found.ndim < 1:
        raise Refusal(
            f"has an array {name!r} of dtype {found.dtype} and shape {found.shape}: save "
            "numbers, with a row for each example"
        )
    # PyTorch supports only native byte order, and few operations on wide unsigned integers.
    if found.dtype.kind == "u" and found.dtype.itemsize > 1:
        return found.astype(np.int64)
    return found.astype(found.dtype.newbyteorder("="), copy=False)


# --- folders of images ---------------------------------------------------------------------------


def _folder(folder: Path, test_fraction: float | None, image_size: int | None) -> Arrays:
    train_folder = folder / "train"
    test_folder = next(
        (folder / name for name in ("test", "val") if (folder / name).is_dir()), None
    )
    if train_folder.is_dir() and test_folder is None:
        raise ValueError(
            f"{folder} has a folder 'train' but none called 'test': add one, or name {train_folder}"
        )
    if not train_folder.is_dir() or test_folder is None:
        files, labels, classes = _by_class(folder)
        pictures = _read(folder, files, None, image_size)
        return Arrays(*_parted(pictures, labels, test_fraction), classes)
    _refuse(folder, "has a test set of its own", test_fraction=test_fraction)
    files, labels, classes = _by_class(train_folder)
    test_files, test_labels, test_classes = _by_class(test_folder)
    if unknown := [name for name in test_classes if name not in classes]:
        raise ValueError(
            f"{test_folder} has the class {unknown[0]!r}, which {train_folder} lacks: give both "
            "the same classes"
        )
    pictures = _read(folder, [*files, *test_files], None, image_size)
    codes = np.array([classes.index(name) for name in test_classes])[test_labels]
    cut = len(files)
    return Arrays((pictures[:cut], labels), (pictures[cut:], codes), classes)


def _by_class(folder: Path) -> tuple[list[Path], NDArray[np.int64], tuple[str, ...]]:
    """Return the images of all class folders, their class indices, and the class names."""
    folders = sorted(path for path in folder.iterdir() if path.is_dir() and _is_shown(path))
    if len(folders) < 2:
        raise ValueError(
            f"{folder} must have a folder of images for each of two classes or more, but has "
            f"{counted(len(folders), 'folder')}"
        )
    files: list[Path] = []
    labels: list[int] = []
    for at, one in enumerate(folders):
        found = list(_images_in(one))
        if not found:
            raise ValueError(
                f"{one} has no images ({', '.join(_SUFFIXES)}): add some, or remove the folder"
            )
        files += found
        labels += [at] * len(found)
    return files, np.array(labels), tuple(one.name for one in folders)


def _is_shown(path: Path) -> bool:
    return not path.name.startswith((".", "__"))


def _images_in(folder: Path) -> Iterator[Path]:
    """Yield the images below a folder; warn about other files."""
    others = []
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or not all(
            _is_shown(Path(p)) for p in path.relative_to(folder).parts
        ):
            continue
        if path.suffix.lower() in _SUFFIXES:
            yield path
        else:
            others.append(path)
    if others:
        warnings.warn(
            f"{counted(len(others), 'file')} in {folder} left out that are not images, such as "
            f"{others[0].name}",
            Note,
            stacklevel=2,
        )


def _read(
    folder: Path, files: Sequence[Path], channels: int | None, image_size: int | None
) -> NDArray[np.uint8]:
    """Return images as (examples, channels, height, width)."""
    with needed_for("reading images"):
        from PIL import Image, ImageOps

    sizes: dict[tuple[int, int], Path] = {}
    grey = True
    for path in files:
        with _image(path) as image:
            if image.mode.startswith(("I", "F")):
                raise Refusal("has more than 8 bits per pixel: convert the images to 8")
            grey = grey and image.mode in ("1", "L", "LA")
            turned = image.getexif().get(_ORIENTATION) in _ON_ITS_SIDE
            sizes.setdefault(image.size[::-1] if turned else image.size, path)
    if image_size is None and len(sizes) > 1:
        (one, its), (other, others) = list(sizes.items())[:2]
        raise ValueError(
            f"'image_size' must be given, such as 64, to resize the images in {folder}: they "
            f"differ in size ({one[0]}×{one[1]} in {its.name}, {other[0]}×{other[1]} in "
            f"{others.name})"
        )
    channels = channels or (1 if grey else 3)
    width, height = next(iter(sizes)) if image_size is None else (image_size, image_size)
    check_size(str(folder), 2 * len(files) * channels * height * width, "images")
    pictures = np.empty((len(files), height, width, channels), np.uint8)
    for at, path in enumerate(files):
        with _image(path) as image:
            upright = ImageOps.exif_transpose(image).convert(_CHANNELS[channels])
            if image_size is not None:
                upright = ImageOps.fit(upright, (width, height), Image.Resampling.BILINEAR)
            pictures[at] = np.asarray(upright).reshape(height, width, channels)
    return np.ascontiguousarray(pictures.transpose(0, 3, 1, 2))


@contextlib.contextmanager
def _image(path: Path) -> Iterator[Any]:
    """Open an image; if it cannot be used, raise an error that says why in one sentence."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            yield image
    except Refusal as refusal:
        raise ValueError(f"{path} {refusal}") from refusal
    except (
        OSError,
        SyntaxError,
        ValueError,
        struct.error,
        Image.DecompressionBombError,
    ) as problem:
        reason = first_line(problem)
        reason = reason.replace(f" {str(path)!r}", "")
        raise ValueError(
            f"{path} cannot be read as an image ({reason}): replace it, or remove it"
        ) from problem


# --- examples to predict -------------------------------------------------------------------------


def open_new(
    source: str | Path,
    shape: Sequence[int],
    classes: Sequence[str | int] = (),
    image_size: int | None = None,
) -> NewExamples:
    """Open examples to predict.

    Args:
        source: An .npz file with the array ``X``, and optionally the labels ``y``, or with a test
            set, which is then opened; or an image, or a folder of images, whose labels are known if
            each is in a folder named after its class.
        shape: The shape of a training example.
        classes: The names of the classes.
        image_size: The same as for `open_arrays`.

    """
    path = Path(source)
    if path.is_dir() or path.suffix.lower() in _SUFFIXES:
        found = _new_images(path, shape, classes, image_size)
    else:
        with _arrays_in(path) as arrays:
            tested = any(name in arrays.files for name in _TEST_INPUTS)
            names = _TEST_INPUTS if tested else _INPUTS
            targets = _TEST_TARGETS if tested else _TARGETS
            inputs, labels = _numbers(arrays, _first(arrays, names)), None
            if any(target in arrays.files for target in targets):
                inputs, labels = _pair(arrays, names, targets)
        found = NewExamples(inputs, None, labels)
    if found.inputs.shape[1:] != tuple(shape) or not len(found.inputs):
        raise ValueError(
            f"{name_of(path)} has {len(found.inputs)} examples of shape {found.inputs.shape[1:]}, "
            f"but the network was trained on examples of shape {tuple(shape)}"
        )
    return found


def _new_images(
    folder: Path, shape: Sequence[int], classes: Sequence[str | int], image_size: int | None
) -> NewExamples:
    files = list(_images_in(folder)) if folder.is_dir() else [folder]
    if not files:
        raise ValueError(f"{folder} has no images ({', '.join(_SUFFIXES)}): name another folder")
    if len(shape) != 3 or shape[0] not in _CHANNELS:
        raise ValueError(
            f"{folder} holds images, but the network was trained on examples of shape "
            f"{tuple(shape)}: name an .npz file of such examples"
        )
    names = [path.relative_to(folder if folder.is_dir() else folder.parent) for path in files]
    labels = None
    if all(len(name.parts) > 1 and name.parts[0] in map(str, classes) for name in names):
        labels = np.array([name.parts[0] for name in names])
    pictures = _read(folder, files, shape[0], image_size)
    return NewExamples(pictures, tuple(name.as_posix() for name in names), labels)
