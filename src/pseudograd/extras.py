"""Optional packages: the extra that installs each, and the error when one is missing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

# Import name → (name on PyPI, extra that installs it); tests compare this with pyproject.toml.
OPTIONAL = {
    "cloudpickle": ("loky", "tune"),
    "jinja2": ("jinja2", "tune"),
    "loky": ("loky", "tune"),
    "pandas": ("pandas", "tune"),
    "pooch": ("pooch", "tune"),
    "rich": ("rich", "tune"),
    "safetensors": ("safetensors", "tune"),
    "scipy": ("scipy", "tune"),
    "sklearn": ("scikit-learn", "tune"),
    "threadpoolctl": ("threadpoolctl", "tune"),
    "tqdm": ("tqdm", "tune"),
    "PIL": ("pillow", "images"),
    "openpyxl": ("openpyxl", "excel"),
    "pyarrow": ("pyarrow", "parquet"),
    "ray": ("ray", "ray"),
    "jax": ("jax", "jax"),
}


@contextlib.contextmanager
def needed_for(purpose: str) -> Iterator[None]:
    """Raise ImportError naming the extra to install if an import inside the block fails.

    Args:
        purpose: The feature that needs the import; the message begins with it.

    Example:
        >>> with needed_for("reading tables"):
        ...     raise ModuleNotFoundError(name="pandas")  # what `import pandas` raises
        Traceback (most recent call last):
        ...
        ImportError: reading tables needs pandas: pip install 'pseudograd[tune]'

    """
    try:
        yield
    except ModuleNotFoundError as problem:
        package, extra = OPTIONAL.get((problem.name or "").partition(".")[0], ("", ""))
        if not extra:
            raise
        raise ImportError(
            f"{purpose} needs {package}: pip install 'pseudograd[{extra}]'"
        ) from problem
