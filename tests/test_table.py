"""A user's table: reading, fitting to the training part, and errors."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from covering import covering
from pseudograd.data import Dataset, Encoder, digits, load_table, open_data, read_frame
from pseudograd.data.features import Categories, Numbers
from pseudograd.fleet import MLPRecipe
from pseudograd.search import Protocol, study_of
from trials import replace

MIXED = {
    "größe": [1.0, None, 3.0, 5.0, 2.0, 4.0, 1.5, None, 2.5, 3.5],
    "色": ["red", "blue", None, "red", "blue", "red", "blue", "red", None, "green"],
    "smokes": [True, False, True, False, True, False, True, False, True, False],
    "same": [7] * 10,
    "none": [None] * 10,
    "kind": ["cat", "dog"] * 5,
}


pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def mixed(**columns: list[object]) -> pd.DataFrame:
    return pd.DataFrame({**MIXED, **columns})


def save(frame: pd.DataFrame, name: str) -> str:
    if name.endswith(".csv"):
        frame.to_csv(name, index=False)
    else:
        frame.to_parquet(name, index=False)
    return name


def arrays(name: str = "a.npz", **changes: Any) -> str:
    """Write an .npz file of 10 examples; None leaves an array out."""
    held = {"X": np.arange(20.0).reshape(10, 2), "y": np.arange(10) % 2, **changes}
    np.savez(name, **{key: value for key, value in held.items() if value is not None})
    return name


def soft(scaled: float) -> np.float32:
    return np.float32(scaled / math.sqrt(1 + (scaled / 3) ** 2))


def test_mixed_columns_are_encoded_by_hand() -> None:
    encoder = Encoder.fit(mixed(), "kind")
    assert encoder.columns == (
        Numbers("größe", 1.0, 5.0, 2.75, 1 / 1.75, missing=True),
        Categories("色", ("blue", "green", "red"), missing=True),
        Categories("smokes", ("False", "True"), missing=False),
        Numbers("same", 7.0, 7.0, 7.0, 0.0, missing=False),
        Categories("none", (), missing=True),
    )
    assert encoder.labels == ("cat", "dog")
    assert encoder.value_range == (-1.0, 1.0)
    features = encoder.transform(mixed())
    assert features.dtype == np.float32
    np.testing.assert_array_equal(
        features[:3],
        np.array(
            [
                # größe: value, missing; blue, green, red, missing; no, yes; same; none
                [soft(-1), 0, 0, 0, 1, 0, 0, 1, 0, 1],
                [0, 1, 1, 0, 0, 0, 1, 0, 0, 1],
                [soft(1 / 7), 0, 0, 0, 0, 1, 0, 1, 0, 1],
            ],
            np.float32,
        ),
    )


def test_new_rows() -> None:
    encoder = Encoder.fit(mixed(), "kind")
    new = pd.DataFrame(
        {
            "same": [8, 7],  # in another order, and without the target
            "none": ["text", "text"],
            "smokes": [True, None],
            "色": ["pink", None],
            "größe": [9, -9],  # beyond the training set
        }
    )
    high, low = soft(6.25 / 1.75), soft(-11.75 / 1.75)
    np.testing.assert_array_equal(
        encoder.transform(new),
        [[high, 0, 0, 0, 0, 0, 0, 1, 0, 0], [low, 0, 0, 0, 0, 1, 0, 0, 0, 0]],
    )


def test_gaps_that_first_occur_in_new_rows_become_the_median() -> None:
    encoder = Encoder.fit(pd.DataFrame({"a": [0, 1, 4], "b": list("xyz"), "y": [0, 1, 1]}), "y")
    new = pd.DataFrame({"a": [None, 2.0], "b": [None, "x"]})
    np.testing.assert_array_equal(encoder.transform(new), [[0, 0, 0, 0], [soft(1 / 2), 1, 0, 0]])


@pytest.mark.parametrize("labels", [[-3, 40, 7], ["é", "b", "a"], [False, True, True]])
def test_json_gives_the_same_encoder(labels: list[Any]) -> None:
    frame = mixed(kind=(labels * 4)[:10], größe=[0.1 * x**3 for x in range(10)])
    encoder = Encoder.fit(frame, "kind")
    text = encoder.to_json()
    json.loads(text)
    again = Encoder.from_json(text)
    assert again == encoder
    assert again.labels == tuple(sorted(set(labels)))
    assert [type(label) for label in again.labels] == [type(label) for label in encoder.labels]
    np.testing.assert_array_equal(again.transform(frame), encoder.transform(frame))
    np.testing.assert_array_equal(
        again.encode_labels(frame["kind"]), encoder.encode_labels(frame["kind"])
    )


def test_other_json_is_refused(subtests: pytest.Subtests) -> None:
    for text in ("", "[]", "{}", '{"columns": [{"name": "a"}]}'):
        said = "not the JSON of an encoder"
        with subtests.test(text=text), pytest.raises(ValueError, match=said):
            Encoder.from_json(text)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_round_trip(suffix: str) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow", reason="needs pyarrow to read .parquet")
    frame = pd.concat([mixed()] * 3, ignore_index=True)
    data, encoder = load_table(save(frame, "pets" + suffix), "kind")
    assert (data.name, data.train_size, data.test_size) == ("pets" + suffix, 24, 6)
    assert data.features.dtype == torch.float32
    assert data.features.is_contiguous()
    assert data.value_range == (-1.0, 1.0)
    assert data.classes == 2
    # Each row occurs once; each part is in the order of the file.
    rows = {tuple(row) for row in encoder.transform(frame).tolist()}
    assert {tuple(row) for row in data.features.tolist()} == rows
    assert sorted(data.labels.tolist()) == [0] * 15 + [1] * 15
    again, _ = load_table("pets" + suffix, "kind")
    assert again.sha256 == data.sha256
    other, _ = load_table("pets" + suffix, "kind", seed=1)
    assert other.sha256 != data.sha256


def test_columns_of_other_types() -> None:
    pytest.importorskip("pyarrow", reason="needs pyarrow to read .parquet")
    frame = pd.DataFrame(
        {
            "category": pd.Categorical(["3", "1", None, *"31313"]),
            "nullable": pd.array([1, None, 3, 1, 1, 1, 1, 2], dtype="Int64"),
            "y": pd.Categorical(list("abababab")),
        }
    )
    save(frame, "a.parquet")
    data, encoder = load_table("a.parquet", "y", test_path="a.parquet")
    assert encoder.columns == (
        Categories("category", ("1", "3"), missing=True),
        Numbers("nullable", 1.0, 3.0, 1.0, 2.0, missing=True),
    )
    # The same rows as CSV, where the categories look like numbers.
    save(frame, "a.csv")
    np.testing.assert_array_equal(
        encoder.transform(read_frame("a.csv", encoder)), data.features[:8].numpy()
    )


def test_parquet_without_pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("a.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"needs pyarrow: pip install 'pseudograd\[parquet\]'"):
        load_table("a.parquet", "y")


def test_nothing_leaks_from_the_test_part() -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "at": np.arange(50) * 7 % 50,
            "a": rng.random(50),
            "b": rng.choice(list("pqr"), 50),
            "y": [1, 2] * 25,
        }
    )
    data, encoder = load_table(save(frame, "a.csv"), "y")
    assert data.rows is not None
    held_out = data.rows[data.train_size :] - 1
    frame["b"] = frame["b"].astype(object)
    frame.loc[held_out.tolist(), ["a", "b"]] = [1e9, "new"]
    frame.loc[held_out.tolist()[:3], ["a", "b"]] = None
    changed, other = load_table(save(frame, "b.csv"), "y")
    assert other == encoder
    assert torch.equal(changed.features[:40], data.features[:40])
    assert not torch.equal(changed.features[40:], data.features[40:])
    assert changed.features.abs().max() <= 3
    assert torch.equal(changed.labels, data.labels)


@covering(stratify=[True, False], fraction=[0.01, 0.2, 0.5, 0.9], seed=range(3))
def test_each_class_keeps_an_example(stratify: bool, fraction: float, seed: int) -> None:
    labels = [30] * 60 + [10] * 30 + [20] * 9 + [7]
    save(pd.DataFrame({"x": np.arange(100) * 7 % 100, "y": labels}), "a.csv")
    data, encoder = load_table("a.csv", "y", test_fraction=fraction, stratify=stratify, seed=seed)
    assert encoder.labels == (7, 10, 20, 30)
    assert data.test_size == 100 * fraction
    counts = data.labels[: data.train_size].bincount(minlength=4)
    assert counts.min() >= 1
    assert counts[0] == 1
    if stratify:
        kept = torch.tensor([1, 30, 9, 60]) * (1 - fraction)
        assert (counts - kept).abs().max() <= 2


def test_a_test_file() -> None:
    frame = pd.DataFrame({"room": list("1a2b3"), "ok": list("001x1")})
    save(frame, "train.csv")
    # All of this looks like numbers, but is text.
    save(pd.DataFrame({"ok": [0, 1], "room": [2, 9]}), "test.csv")
    data, encoder = load_table("train.csv", "ok", test_path="test.csv")
    assert encoder.labels == ("0", "1", "x")
    assert (data.train_size, data.labels[5:].tolist()) == (5, [0, 1])
    assert data.features[5:].tolist() == [[0, 1, 0, 0, 0], [0] * 5]


@pytest.mark.parametrize("yes", ["True", "true", "TRUE"])
def test_truth_values_in_csv(yes: str) -> None:
    Path("a.csv").write_text("a,y\n" + f"{yes},1\nFalse,0\n" * 3)
    Path("b.csv").write_text(f"a\n{yes}\n\n")
    _, encoder = load_table("a.csv", "y", test_path="a.csv")
    assert encoder.transform(read_frame("b.csv", encoder)).tolist() == [[0, 1]]


def test_csv_of_a_spreadsheet() -> None:
    Path("a.csv").write_bytes("\ufeffä,y\r\n".encode() + b"1,u\r\n2,v\r\n" * 5)
    data, encoder = load_table("a.csv", "y")
    assert encoder.columns == (Numbers("ä", 1.0, 2.0, 1.5, 1.0, missing=False),)
    assert data.train_size == 8


def test_npz() -> None:
    data, encoder = load_table(arrays())
    assert encoder.target == "y"
    assert [column.name for column in encoder.columns] == ["X[0]", "X[1]"]
    assert (data.train_size, data.test_size) == (8, 2)
    arrays("named.npz", y=None, species=np.array(list("ab") * 5))
    _, encoder = load_table("named.npz", "species")
    assert encoder.labels == ("a", "b")
    arrays("new.npz", y=None)
    assert encoder.transform(read_frame("new.npz", encoder)).shape == (10, 2)


def test_npz_with_a_test_part() -> None:
    test = np.array([[0.0, 1.0], [50.0, -50.0]])
    data, encoder = load_table(arrays(X_test=test, y_test=np.array([1, 0])))
    assert (data.train_size, data.test_size) == (10, 2)
    assert encoder.columns[0] == Numbers("X[0]", 0.0, 18.0, 9.0, 1 / 9, missing=False)
    assert data.features[10:].tolist() == [[soft(-1), soft(-1)], [soft(41 / 9), soft(-60 / 9)]]
    assert data.labels[10:].tolist() == [1, 0]


def test_bytes_in_two_dimensions_are_numbers() -> None:
    """As pixels from 0 to 255, flags of 0 and 1 would be almost constant."""
    flags = np.random.default_rng(0).integers(0, 2, (30, 4), np.uint8)
    arrays(X=flags, y=np.arange(30) % 3)
    data, encoder = load_table("a.npz")
    assert encoder.pixels is None
    column = encoder.columns[0]
    assert isinstance(column, Numbers)
    assert (column.low, column.high) == (0.0, 1.0)
    assert len(data.features[:, 0].unique()) == 2


def test_labels_keep_their_zeros() -> None:
    rows = "".join(f"{n % 9},{n % 2:03d}\n" for n in range(20))
    Path("codes.csv").write_text("a,code\n" + rows)
    assert load_table("codes.csv", "code")[1].labels == ("000", "001")
    Path("codes.csv").write_text("a,code\n" + rows.replace("00", ""))
    assert load_table("codes.csv", "code")[1].labels == (0, 1)


def test_pixels_stay_as_they_are() -> None:
    pictures = np.random.default_rng(0).integers(0, 200, (30, 4, 3), np.uint8)
    arrays(X=pictures, y=np.arange(30) % 3, X_test=pictures[:5] + 50, y_test=np.arange(5) % 3)
    data, encoder = load_table("a.npz")
    assert encoder.pixels == (4, 3)
    assert encoder.columns == ()
    assert data.value_range == encoder.value_range == (0.0, 255.0)
    assert data.features.dtype == torch.uint8
    assert data.features.is_contiguous()
    np.testing.assert_array_equal(data.features[:30], pictures.reshape(30, 12))
    np.testing.assert_array_equal(data.features[30:], pictures[:5].reshape(5, 12) + 50)
    again = Encoder.from_json(encoder.to_json())
    assert again == encoder
    # As floating point they are still pixels.
    arrays("new.npz", X=pictures.astype(float), y=None)
    np.testing.assert_array_equal(
        again.transform(read_frame("new.npz", again)), pictures.reshape(30, 12)
    )
    for wrong in (pictures - 0.5, pictures * 2.0, pictures * -1.0, pictures + np.nan):
        arrays("new.npz", X=wrong, y=None)
        with pytest.raises(ValueError, match="pixels must be whole numbers from 0 to 255"):
            again.transform(read_frame("new.npz", again))
    arrays("new.npz", X=pictures[:, :3], y=None)
    with pytest.raises(ValueError, match=r"missing: 'X\[9\]', 'X\[10\]', 'X\[11\]'\)"):
        again.transform(read_frame("new.npz", again))


def test_columns_that_do_not_match(subtests: pytest.Subtests) -> None:
    cases: list[tuple[Callable[[pd.DataFrame], pd.DataFrame], str]] = [
        (lambda new: new.drop(columns=["色", "same"]), "missing: '色', 'same'"),
        (lambda new: new.drop(columns="same").assign(a=1, b=2), "'same'; not used: 'a', 'b'"),
        (
            lambda new: new.assign(größe="tall"),
            "text where numbers belong: 'größe'; 'größe' has 'tall'",
        ),
        (lambda new: new.assign(色=1, smokes=0), "numbers where text belongs: '色', 'smokes'"),
        (lambda new: new.rename(columns={"same": "Same"}), "missing: 'same'; not used: 'Same'"),
        (lambda new: new.assign(größe=pd.Timestamp(0)), "dates where numbers belong: 'größe'"),
        (lambda new: new.assign(größe=1j), "other where numbers belong: 'größe'"),
        (lambda new: new[["same", *new]], "more than one column 'same'"),
    ]
    for change, complaint in cases:
        with subtests.test(complaint=complaint):
            encoder = Encoder.fit(mixed(), "kind")
            with pytest.raises(ValueError) as refused:
                encoder.transform(change(mixed()))
            assert complaint in str(refused.value)
            assert "\n" not in str(refused.value)


def test_a_file_whose_columns_do_not_match() -> None:
    encoder = Encoder.fit(mixed(), "kind")
    save(mixed(size=[1] * 10).drop(columns=["色", "kind"]), "new.csv")
    with pytest.raises(ValueError, match=r"\(missing: '色'; not used: 'size'\)"):
        encoder.transform(read_frame("new.csv", encoder))


def text(content: str | bytes, name: str = "a.csv") -> str:
    Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
    return name


def table(**columns: object) -> str:
    return save(pd.DataFrame({"x": range(10), "y": [0, 1] * 5, **columns}), "a.csv")


def single_array(name: str = "a.npz") -> str:
    with open(name, "wb") as file:
        np.save(file, np.ones(3))
    return name


def test_bad_arguments_are_refused(subtests: pytest.Subtests) -> None:
    cases: list[tuple[Callable[[], str], dict[str, Any], str]] = [
        # The file
        (lambda: "away.csv", {}, "away.csv does not exist"),
        (
            lambda: text("", "a.doc"),
            {},
            "a.doc must end in one of .csv, .tsv, .txt, ",
        ),
        (lambda: text(""), {}, "a.csv is empty"),
        (lambda: text("\n\n"), {}, "a.csv is empty"),
        (lambda: text("x,y\n"), {}, "a.csv is empty"),
        (lambda: text(b"\x89PNG\r\n\x1a\n\xff\x00"), {}, "a.csv is not a text file"),
        (
            lambda: text("x,y\n1,2\n1,2,3,4\n"),
            {},
            "a.csv cannot be read as a table (line 3 has 4 fields, the header 2): correct that "
            "line, and put fields that contain the separator in double quotes",
        ),
        (lambda: text("sep=;\nx;y\n1;2\n1;2;3;4\n"), {}, "line 4 has 4 fields, the header 2"),
        (lambda: text("x,y\n1,2,3\n4,5,6\n"), {}, "line 2 has 3 fields, the header 2"),
        (
            lambda: text("x,z,y\n1,2,3\n1,3\n"),
            {},
            "a.csv cannot be read as a table (line 3 has 2 fields, the header 3): correct that "
            "line, and keep the separators of empty cells",
        ),
        (lambda: text("sep=;\nx;y\n1;2\n1\n"), {}, "line 4 has 1 field, the header 2"),
        (lambda: text("x,z,y\n1,,\n1,\n"), {"drop": ["z"]}, "line 3 has 2 fields, the header 3"),
        (lambda: text('\n"x\nz",y\n\n"1\n",2\r\n1'), {}, "line 7 has 1 field, the header 2"),
        (lambda: text('x,y\n1,2\n""\n'), {}, "line 3 has 1 field, the header 2"),
        (
            lambda: text('x,y\n1,2\n3,"b\n5,6\n'),
            {},
            "(line 3 has a quote that is never closed): close it",
        ),
        (
            lambda: text("x,y\n1,2\n", "a.npz"),
            {},
            "a.npz is not an .npz file despite its name: make one with numpy.savez, or",
        ),
        (lambda: text("", "a.npz"), {}, "a.npz is not an .npz file"),
        (lambda: text("PK\x03\x04...", "a.npz"), {}, "a.npz is not an .npz file"),
        (single_array, {}, "a.npz is not an .npz file despite its name: make one"),
        # Arrays
        (lambda: arrays(X=None), {}, "a.npz has no array 'X'"),
        (lambda: arrays(y=None), {}, "a.npz has no array 'y': it has 'X'"),
        (lambda: arrays(), {"target": "z"}, "a.npz has no array 'z': it has 'X', 'y'"),
        (lambda: arrays(X=np.ones(10)), {}, "'X' without columns"),
        (lambda: arrays(X=np.ones((10, 0), np.uint8)), {}, "'X' without columns"),
        (lambda: arrays(X=np.ones((0, 3)), y=np.ones(0)), {}, "a.npz is empty"),
        (lambda: arrays(X=np.array([[object()]] * 10)), {}, "Python objects in array 'X'"),
        (lambda: arrays(y=np.array([None] * 10)), {}, "Python objects in array 'y'"),
        (lambda: arrays(y=np.ones(9)), {}, "10 rows in 'X', but the shape (9,) in 'y'"),
        (lambda: arrays(y=np.ones((10, 2))), {}, "10 rows in 'X', but the shape (10, 2) in 'y'"),
        (lambda: arrays(X=np.ones((10, 2), complex)), {}, "left out: neither numbers"),
        (lambda: arrays(X_test=np.ones((2, 2))), {}, "a.npz has no array 'y_test'"),
        (lambda: arrays(y_test=np.ones(2)), {}, "a.npz has no array 'X_test'"),
        (
            lambda: arrays(X_test=np.ones((2, 3)), y_test=np.ones(2)),
            {},
            "a.npz has 2 columns in 'X', but 3 in 'X_test': save both with the same columns",
        ),
        (
            lambda: arrays(X_test=np.ones((2, 2)), y_test=np.array([0, 5])),
            {},
            "target 'y' has labels that the training set does not have, 5",
        ),
        (
            lambda: arrays(X_test=np.ones((2, 2)), y_test=np.ones(2)),
            {"test_path": "b.npz"},
            "'test_path' must be left out: a.npz has a test set of its own",
        ),
        (
            lambda: arrays(X_test=np.ones((2, 2)), y_test=np.ones(2)),
            {"test_fraction": 0.2},
            "'test_fraction' must be left out: a.npz has a test set of its own",
        ),
        (
            lambda: table(),
            {"test_path": "b.csv", "test_fraction": 0.2},
            "'test_fraction' must be left out: b.csv is the test set",
        ),
        # The target
        (lambda: table(), {"target": None}, "'target' must name the column of labels: one of 'x'"),
        (
            lambda: table(species=1),
            {"target": "Spezies"},
            "a.csv has no column 'Spezies' for the target: it has 'species'",
        ),
        (lambda: table(), {"target": "zzz"}, "for the target: it has 'x', 'y'"),
        (lambda: table(y=3), {}, "target 'y' has a single class, 3"),
        (lambda: table(y=[None] * 10), {}, "target 'y' has no labels in a.csv"),
        (lambda: table(y=np.arange(10) / 4), {}, "target 'y' differs in all rows"),
        (lambda: table(y=[1.5, np.inf] * 5), {}, "target 'y' must hold classes"),
        (lambda: table(y=range(10)), {}, "target 'y' differs in all rows"),
        (lambda: text("y\n" + "0\n1\n" * 5), {}, "no column besides the target 'y'"),
        # The columns
        (
            lambda: table(b="x"),
            {"drop": ["x"]},
            "a.csv has no column besides the target 'y' (column 'b' left out: all entries are the",
        ),
        (lambda: table(b="x"), {"test_path": "a.parquet"}, "a.parquet does not exist"),
        (lambda: table(b="x"), {"drop": ["c", "b"]}, "'drop' names 'c': a.csv has 'x', 'y', 'b'"),
        (lambda: table(b="x"), {"drop": ["y"]}, "'drop' names 'y', which is the target"),
        (lambda: table(), {"numbers": ["z"]}, "'numbers' names 'z': a.csv has 'x', 'y'"),
        (lambda: table(), {"numbers": "x"}, "'numbers' must be a list of names, such as ['x']"),
        (lambda: table(), {"missing": "x"}, "'missing' must be a list of names, such as ['x']"),
        (
            lambda: table(),
            {"numbers": ["x"], "categories": ["x"]},
            "'numbers' names 'x', also named as categories: choose one",
        ),
        # The sizes
        (lambda: text("x,y\n1,0\n2,1\n3,0\n4,1\n5,0\n"), {}, "a.csv leaves 4 examples to train on"),
        (
            lambda: table(),
            {"test_fraction": 0.7},
            "needs at least 5: add rows, or lower test_fraction",
        ),
        (lambda: table(), {"test_fraction": 0.0}, "test_fraction must lie between 0 and 1, not 0"),
        (lambda: table(), {"test_fraction": 1.0}, "test_fraction must lie between 0 and 1, not 1"),
    ]
    for make, options, complaint in cases:
        with subtests.test(complaint=complaint):
            path = make()
            if path.endswith(".csv"):
                options = {"target": "y", **options}
            with pytest.raises((ValueError, FileNotFoundError)) as refused:
                load_table(path, **options)
            assert complaint in str(refused.value)
            assert "\n" not in str(refused.value)


def test_lines_that_have_all_their_fields() -> None:
    """With gaps at the end, blank lines, and texts with line breaks, quotes and separators."""
    long = "x" * 200_000
    rows = f'u,,0\n"a\n\n,b",,1\n\n5" pipe,,0\n  \n"5"", {long}",2,1\nu,1,0\nu,,1\n\n\n'
    text("t,x,y\n" + rows)
    data, encoder = load_table("a.csv", "y", test_path="a.csv")
    assert encoder.columns == (
        Categories("t", ('5" pipe', f'5", {long}', "a\n\n,b", "u"), missing=False),
        Numbers("x", 1.0, 2.0, 1.5, 2.0, missing=True),
    )
    assert data.labels[:6].tolist() == [0, 1] * 3
    text("y,\n0,\n1,\n" + "0,\n" * 4)  # a separator at the end of every line
    with pytest.raises(ValueError, match="column 'Unnamed: 1' left out: no entries"):
        load_table("a.csv", "y")


def test_a_broken_parquet_file() -> None:
    pytest.importorskip("pyarrow", reason="needs pyarrow to read .parquet")
    with pytest.raises(ValueError, match=r"a.parquet cannot be read as a .parquet file \(.*\): "):
        load_table(text("garbage", "a.parquet"), "y")


def test_strings_that_are_not_numbers() -> None:
    rooms, dates = ["A-1", "B.2", "$", "%"] * 5, ["1.2.2020", "2020-01-02", "1.2.3", "5 kg"] * 5
    save(pd.DataFrame({"room": rooms, "date": dates, "y": [0, 1] * 10}), "a.csv")
    _, encoder = load_table("a.csv", "y")
    assert all(isinstance(column, Categories) for column in encoder.columns)


@pytest.mark.parametrize(
    "numbers",
    [
        range(19),  # sorted, perhaps by chance
        [*range(19), None, None],
        [0, *range(20)],  # sorted, as ages may be
        [1, 0, *range(2, 20)],
    ],
)
@pytest.mark.filterwarnings("error")
def test_increasing_numbers_that_are_not_row_numbers(numbers: list[int | None]) -> None:
    frame = pd.DataFrame({"at": numbers})
    save(frame.assign(y=np.arange(len(frame)) % 2), "a.csv")
    assert load_table("a.csv", "y")[1].columns[0].name == "at"


def measured(count: int, rows: int = 200) -> list[str]:
    return [f"{at * 7 % count / 10 + 10} kg" for at in range(rows)]


@pytest.mark.parametrize(
    "entries",
    [
        measured(19),
        [f"P{at % 60}" for at in range(200)],
        [f"{at % 60:05d}" for at in range(200)],  # codes
    ],
)
@pytest.mark.filterwarnings("error", "ignore::pseudograd.data.survey.Note")
def test_texts_that_are_categories(entries: list[str]) -> None:
    save(pd.DataFrame({"w": entries, "y": np.arange(200) % 2}), "a.csv")
    assert isinstance(load_table("a.csv", "y")[1].columns[0], Categories)


def test_codes_that_begin_with_a_zero_are_categories() -> None:
    rows = [f"{at % 7},{code},{at % 2}\n" for at, code in enumerate(["01067", "80331", ""] * 10)]
    text("".join(["a,zip,y\n", *rows]))
    _, encoder = load_table("a.csv", "y")
    assert encoder.columns[0] == Numbers("a", 0.0, 6.0, 3.0, 1 / 3.25, missing=False)
    assert encoder.columns[1] == Categories("zip", ("01067", "80331"), missing=True)
    text("a,zip\n3,80331\n3,1067\n", "new.csv")
    new = encoder.transform(read_frame("new.csv", encoder))
    assert new[:, 1:].tolist() == [[0, 1, 0], [0, 0, 0]]


def test_codes_are_the_same_with_and_without_a_point() -> None:
    """pandas writes integers with a decimal point if some are missing."""
    rows = [f"{at % 7},{code},{at % 2}\n" for at, code in enumerate(["1.0", "20.0", ""] * 10)]
    text("".join(["a,ward,y\n", *rows]))
    _, encoder = load_table("a.csv", "y", categories=["ward"])
    assert encoder.columns[1] == Categories("ward", ("1", "20"), missing=True)
    text("a,ward\n3,20\n3,20.0\n3,2\n", "new.csv")
    new = encoder.transform(read_frame("new.csv", encoder))
    assert new[:, 1:].tolist() == [[0, 1, 0], [0, 1, 0], [0, 0, 0]]


def test_texts_that_were_known_with_a_point_keep_it() -> None:
    rows = [f"{at % 7},{code},{at % 2}\n" for at, code in enumerate(["1.0", "2", "beta"] * 10)]
    text("".join(["a,release,y\n", *rows]))
    _, encoder = load_table("a.csv", "y")
    assert encoder.columns[1] == Categories("release", ("1.0", "2", "beta"), missing=False)
    text("a,release\n3,1.0\n3,2.0\n", "new.csv")
    new = encoder.transform(read_frame("new.csv", encoder))
    assert new[:, 1:].tolist() == [[1, 0, 0], [0, 1, 0]]
    data, encoder = load_table("a.csv", "release", test_path=Path("a.csv"))  # as labels too
    assert encoder.labels == ("1.0", "2", "beta")
    assert len(data.labels) == 2 * data.train_size


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".npz"])
def test_numbers_read_as_categories(suffix: str) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow", reason="needs pyarrow to read .parquet")
    path, name = "a" + suffix, "X[0]"
    values = np.array([[1, 3], [2, 4], [10, 5]] * 4)
    if suffix == ".npz":
        arrays(path, X=values, y=np.arange(12) % 2)
        arrays("new.npz", X=values[1:] + 0.0, y=None)
    else:
        frame = pd.DataFrame(values, columns=["X[0]", "X[1]"])
        save(frame.assign(y=np.arange(12) % 2), path)
        save(frame[1:], "new" + suffix)
    _, encoder = load_table(path, "y", categories=[name])
    assert encoder.columns[0] == Categories(name, ("1", "10", "2"), missing=False)
    assert isinstance(encoder.columns[1], Numbers)
    new = encoder.transform(read_frame("new" + suffix, encoder))
    assert new[:2, :3].tolist() == [[0, 0, 1], [0, 1, 0]]


def test_categories_that_are_not_there(subtests: pytest.Subtests) -> None:
    cases: list[tuple[Any, str]] = [
        (["z"], "'categories' names 'z': a.csv has 'x', 'y'"),
        (["y"], "'categories' names 'y', which is the target"),
        ("x", "'categories' must be a list of names, such as ['x']"),
    ]
    for categories, complaint in cases:
        with subtests.test(complaint=complaint):
            with pytest.raises(ValueError, match=re.escape(complaint)):
                load_table(table(), "y", categories=categories)
            pictures = np.zeros((10, 2, 2), np.uint8)
            with pytest.raises(
                ValueError, match=r"'categories' cannot be set for a.npz, which has imag"
            ):
                load_table(arrays(X=pictures), categories=["X[0]"])


def test_categories_that_look_like_numbers_in_part() -> None:
    save(pd.DataFrame({"room": [*"12345678", "9a", "9b"] * 3, "y": [0, 1] * 15}), "a.csv")
    _, encoder = load_table("a.csv", "y")
    assert isinstance(encoder.columns[0], Categories)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_columns_that_are_left_out(suffix: str) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow", reason="needs pyarrow to read .parquet")
    frame = pd.DataFrame({"x": range(10), "y": [0, 1] * 5})
    save(frame, "plain" + suffix)
    save(frame.assign(**{"row id": [f"P{i}" for i in range(10)], "when": 1}), "more" + suffix)
    wanted, expected = load_table("plain" + suffix, "y")
    out = ["row id", "when"]
    data, encoder = load_table("more" + suffix, "y", drop=out)
    assert encoder == expected
    assert data.sha256 == wanted.sha256
    # Columns that the model does not use are optional in new rows and in a test set.
    assert list(read_frame("more" + suffix, encoder).columns) == ["x", "y"]
    data, _ = load_table("more" + suffix, "y", drop=out, test_path="more" + suffix)
    assert data.test_size == 10


def test_columns_without_a_name_of_their_own() -> None:
    """They are named as pandas names them, in new rows too."""
    text("".join([",x,x,y\n", *(f"{n % 3},{n % 4},{n % 5},{n % 2}\n" for n in range(10))]))
    _, encoder = load_table("a.csv", "y")
    assert [column.name for column in encoder.columns] == ["Unnamed: 0", "x", "x.1"]
    text("x,x\n7,9\n", "new.csv")
    with pytest.raises(ValueError, match=r"\(missing: 'Unnamed: 0'\)"):
        encoder.transform(read_frame("new.csv", encoder))
    text(",x,x\n7,8,9\n", "new.csv")
    assert read_frame("new.csv", encoder).to_dict("list") == {
        "Unnamed: 0": [7],
        "x": [8],
        "x.1": [9],
    }


@pytest.mark.parametrize("rows", ["a;b;y\n{}1,5;2;u,v\n2,5;3;w\n", "a;b;y\n{}1.5;2;u,v\n2.5;3;w\n"])
def test_semicolons(rows: str) -> None:
    header, rest = rows.split("{}")
    text("\ufeff" + header + rest * 5)
    _, encoder = load_table("a.csv", "y")
    assert encoder.columns == (
        Numbers("a", 1.5, 2.5, 2.0, 1.0, missing=False),
        Numbers("b", 2.0, 3.0, 2.5, 1.0, missing=False),
    )
    assert encoder.labels == ("u,v", "w")
    assert encoder.transform(read_frame("a.csv", encoder))[:2].tolist() == [
        [soft(-0.5)] * 2,
        [soft(0.5)] * 2,
    ]


def test_only_columns_that_are_used_tell_the_decimal_mark() -> None:
    rows = "a;v;w;y\n" + "1,5;3.1;4.1;u\n2,5;3.2;4.2;w\n" * 5
    text(rows)
    _, encoder = load_table("a.csv", "y", drop=["v", "w"])
    assert encoder.columns == (Numbers("a", 1.5, 2.5, 2.0, 1.0, missing=False),)
    assert read_frame("a.csv", encoder)["a"].tolist()[:2] == [1.5, 2.5]


def test_a_duplicated_target_cannot_be_dropped() -> None:
    text("a,y,y\n1,0,0\n")
    with pytest.raises(ValueError, match=r"more than one column 'y': rename them$"):
        load_table("a.csv", "y")


def test_columns_to_leave_out_are_a_list() -> None:
    text("alpha,y\n1,0\n")
    with pytest.raises(ValueError, match=r"'drop' must be a list of names, such as \['alpha'\]"):
        load_table("a.csv", "y", drop="alpha")


def test_unseen_texts_of_columns_that_are_numbered() -> None:
    frame = pd.DataFrame({"0": ["a", "b"] * 5, "y": [0, 1] * 5})
    save(frame, "a.csv")
    _, encoder = load_table("a.csv", "y")
    unseen = encoder.unseen(pd.DataFrame({0: ["a", "c"]}))
    assert {name: entries.tolist() for name, entries in unseen.items()} == {"0": ["c"]}


def test_the_separator_is_that_of_the_header(subtests: pytest.Subtests) -> None:
    cases: list[tuple[str, str]] = [
        ('"Income, EUR";y', ";"),
        ("Income, EUR\ty\tz", "\t"),
        ('"a;b;c",y', ","),
        ("sep=;\na;y", ";"),
        ('\ufeff"sep=\t"\r\na,b\ty', "\t"),
    ]
    for header, mark in cases:
        with subtests.test(header=header, mark=mark):
            columns = header.splitlines()[-1].replace('"', "").split(mark)
            rows = [mark.join([str(at % 3), "uv"[at % 2], "1"][: len(columns)]) for at in range(10)]
            text("\n".join([header, *rows]))
            _, encoder = load_table("a.csv", "y")
            assert encoder.columns[0].name == columns[0]
            assert isinstance(encoder.columns[0], Numbers)
            assert encoder.labels == ("u", "v")


def test_tabs() -> None:
    text("a\ty\n" + "1.5\tu,v\n2.5\tw\n" * 5)
    _, encoder = load_table("a.csv", "y")
    assert encoder.columns == (Numbers("a", 1.5, 2.5, 2.0, 1.0, missing=False),)
    assert encoder.labels == ("u,v", "w")


def test_rows_of_the_file() -> None:
    """Counted from 1, in both parts."""
    data, _ = load_table(table(x=range(101, 111)), "y")
    assert data.rows is not None
    assert torch.equal(data.rows.argsort(), data.features[:, 0].argsort())  # x rises
    assert sorted(data.rows.tolist()) == list(range(1, 11))
    held_out, _ = load_table("a.csv", "y", test_path="a.csv")
    assert held_out.rows is not None
    assert held_out.rows.tolist() == [*range(1, 11), *range(1, 11)]
    too_few = data.rows[:4]
    with pytest.raises(ValueError, match="rows must be one number for each of the 10 examples"):
        replace(data, rows=too_few)
    with pytest.raises(ValueError, match="pieces_of must be one number for each of the 10 exam"):
        replace(data, pieces_of=too_few)


def test_what_was_never_seen() -> None:
    encoder = Encoder.fit(mixed(), "kind")
    assert encoder.unseen(mixed()) == {}
    found = encoder.unseen(
        mixed(色=["red", "pink", None, "grey", "pink"] * 2, none=["new", *[None] * 9])
    )
    assert {name: entries.tolist() for name, entries in found.items()} == {
        "色": ["pink", "grey", "pink"] * 2,
        "none": ["new"],
    }


def test_numbers_beyond_those_of_training() -> None:
    encoder = Encoder.fit(mixed(), "kind")
    assert encoder.beyond(mixed()) == {}
    found = encoder.beyond(mixed(größe=[0.5, 1.0, None, 5.0, 5.5] * 2))
    assert {name: entries.tolist() for name, entries in found.items()} == {
        "größe": [0.5, 5.5, 0.5, 5.5]
    }


def test_what_columns_are_read_as() -> None:
    assert Encoder.fit(mixed(), "kind").read_as == (
        "columns read as numbers: 'größe', 'same'; as categories: '色', 'smokes', 'none' "
        "(7 indicator columns)"
    )
    plain = Encoder.fit(pd.DataFrame({"x": [1, 2], "y": [0, 1]}), "y")
    assert plain.read_as == "columns read as numbers: 'x'"
    wide = pd.DataFrame({f"x{at}": [1, 2] for at in range(10)} | {"y": [0, 1]})
    told = Encoder.fit(wide, "y").read_as
    assert told is not None
    assert told.endswith("'x5', 'x6', and 2 more up to 'x9'")
    assert open_data("digits")[1].read_as is None


def test_texts_that_look_alike() -> None:
    frame = pd.DataFrame({"hue": ["red", "Red ", "blue"], "y": ["x", " x", "z"]})
    alike = {"y": [[" x", "x"]], "hue": [["Red ", "red"]]}
    assert Encoder.fit(frame, "y").look_alikes() == alike
    frame = pd.DataFrame({"hue": ["red", "re d", "r"], "y": [1, 2, 1]})
    assert Encoder.fit(frame, "y").look_alikes() == {}


def test_a_folder_is_not_a_table() -> None:
    Path("a.csv").mkdir()
    with pytest.raises(ValueError, match=r"a.csv is a folder: name a file"):
        load_table("a.csv", "y")


def test_open_data() -> None:
    data, encoder = open_data("digits", target=None)
    assert data.sha256 == digits().sha256
    assert (encoder.pixels, encoder.value_range) == ((8, 8), data.value_range)
    np.savez("new.npz", X=data.features.numpy().reshape(-1, 8, 8))
    new = encoder.transform(read_frame("new.npz", encoder))
    np.testing.assert_array_equal(new, data.features)
    opened: tuple[Dataset, Encoder] = open_data(table(), target="y", test_fraction=0.3, seed=None)
    assert opened[0].test_size == 3
    assert opened[0].sha256 == load_table("a.csv", "y", test_fraction=0.3)[0].sha256


def test_open_data_refuses(subtests: pytest.Subtests) -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("digit", {}, "data 'digit' is not known: give 'digits', or a file that ends in .csv"),
        ("away.csv", {}, "away.csv does not exist"),
        ("digits", {"target": "y"}, "'target' cannot be set for data 'digits'"),
        ("a.csv", {"colour": "y"}, "'colour' cannot be set for data 'a.csv'"),
    ]
    for name, options, complaint in cases:
        with subtests.test(name=name, complaint=complaint):
            with pytest.raises((ValueError, FileNotFoundError)) as refused:
                open_data(name, **options)
            assert complaint in str(refused.value)


@pytest.mark.parametrize("folder", ["search.py", "search.py/run"])
def test_the_folder_of_a_search_is_not_a_file(folder: str) -> None:
    Path("search.py").touch()
    data, encoder = open_data("digits")
    protocol = Protocol(MLPRecipe("digits", (8,)), ks=(1.0,))
    with pytest.raises(
        ValueError, match=r"^search.py cannot be written .*it is a file\): name a f"
    ):
        study_of(data, encoder, protocol, folder)


def test_pandas_is_imported_only_when_a_table_is_read() -> None:
    code = "import sys, pseudograd.data; sys.exit('pandas' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
