"""Labels that look wrong: the ranking, the file, and the page's data."""

from __future__ import annotations

import csv
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from benchmarks.suspects import flip, found_among
from pseudograd.data import Dataset, Encoder, load_table, open_data
from pseudograd.data.features import Categories, Numbers
from pseudograd.search.examples import distinct, shown, shown_suspects, suspects, write_suspects

LABELS = np.array([0, 0, 1, 1, 2])
MODEL = np.array(
    [[0.9, 0.1, 0.0], [0.3, 0.7, 0.0], [0.2, 0.7, 0.1], [0.5, 0.3, 0.2], [0.8, 0.15, 0.05]]
)
VOTES = np.array([[0] * 4, [1, 1, 1, 0], [1] * 4, [0, 1, 2, 0], [0] * 4], np.int8)


def table(rows: torch.Tensor | None = None) -> tuple[Dataset, Encoder]:
    features = torch.tensor([[0.0, 1, 0], [0.5, 0, 1], [0.2, 1, 0], [0.0, 1, 0], [1 / 3, 0, 1]])
    columns = (
        Numbers("size", 0.0, 10.0, 5.0, 0.2, missing=False),
        Categories("code", ("007", "blue"), missing=False),
    )
    encoder = Encoder("pet", ("cat", "dog", 'a "fish", live'), columns)
    data = Dataset("pets", features, torch.from_numpy(LABELS), 5, (-1.0, 1.0), rows=rows)
    return data, encoder


def test_rows_are_ranked_by_the_probability_of_their_label() -> None:
    found = suspects(LABELS, MODEL, MODEL, VOTES)
    assert found.index.tolist() == [4, 1, 3]  # rows 1 and 3 tie, so 1 comes first
    assert found.predicted.tolist() == [0, 1, 0]
    assert found.self_confidence.tolist() == [0.05, 0.3, 0.3]


def test_both_models_count() -> None:
    plain = MODEL.copy()
    plain[1] = [0.9, 0.1, 0.0]  # agrees with row 1's label
    found = suspects(LABELS, MODEL, plain, VOTES)
    assert found.index.tolist() == [4, 3]


def test_agreement_is_the_share_of_networks_that_predict_the_same() -> None:
    found = suspects(LABELS, MODEL, MODEL, VOTES)
    assert found.agreement.tolist() == [1.0, 0.75, 0.5]


@pytest.mark.parametrize(("numbers", "rows"), [(None, "524"), ([11, 12, 13, 14, 15], "15 12 14")])
def test_the_file_has_all_suspects(numbers: list[int] | None, rows: str, tmp_path: Path) -> None:
    data, encoder = table(None if numbers is None else torch.tensor(numbers))
    ranked = suspects(LABELS, MODEL, MODEL, VOTES)
    write_suspects(tmp_path / "suspects.csv", ranked, data, encoder)
    with (tmp_path / "suspects.csv").open(newline="") as file:
        first, *others = found = list(csv.DictReader(file))
    assert [one["row"] for one in found] == (rows.split() if numbers else list(rows))
    assert first == {
        "row": first["row"],
        "label": 'a "fish", live',
        "predicted": "cat",
        "self_confidence": "0.0500",
        "agreement": "1.000",
    }
    assert [one["agreement"] for one in others] == ["0.750", "0.500"]


def test_the_page_is_given_the_rows_of_the_file() -> None:
    data, encoder = table(torch.tensor([1, 2, 3, 4, 6]))
    frame = pd.DataFrame({"size": [0.1 + 0.2] * 6, "code": [*"abcde", "007"]})
    data = replace(data, frame=frame)
    found = shown_suspects(suspects(LABELS, MODEL, MODEL, VOTES), data, encoder)
    assert (found["count"], found["of"]) == (3, 5)
    first = found["first"][0]
    assert first["row"] == {"size": "0.30000000000000004", "code": "007"}
    assert (first["row_number"], first["label"], first["predicted"]) == (6, 2, 0)
    assert (first["self_confidence"], first["agreement"]) == (0.05, 1.0)
    assert first["pixels"] is None


def test_images_come_as_pixels() -> None:
    data, encoder = open_data("digits")
    found = shown(data, encoder, 3)
    assert (len(found["pixels"]), max(found["pixels"]), found["row"]) == (64, 255, None)


@pytest.mark.usefixtures("in_an_empty_folder")
def test_entries_are_shown_as_in_the_file() -> None:
    rows = {
        "weight": ["12.0625", "", "9"],
        "code": ["007", "070", "007"],
        "price": ["$1,200", "$900", "$12"],
        "born": ["31.01.2020", "01.02.2020", ""],
        "breed": ["rare", "common", "common"],
    }
    columns = {name: (entries * 20)[:40] for name, entries in rows.items()}
    columns["breed"] = [f"rare {at}" if at < 12 else "common" for at in range(40)]
    frame = pd.DataFrame({**columns, "pet": ["cat", "dog"] * 20})
    frame.loc[0, "pet"] = None  # set aside
    frame.to_csv("pets.csv", index=False)
    with warnings.catch_warnings(action="ignore"):
        data, encoder = load_table("pets.csv", "pet")
    assert data.rows is not None
    for at in range(data.train_size):
        found, row = shown(data, encoder, at), int(data.rows[at]) - 1
        assert (found["row_number"], found["columns"]) == (row + 1, 5)
        assert found["row"] == {name: told[row] or "missing" for name, told in columns.items()}


def test_without_a_file_there_is_no_row_to_show() -> None:
    data, encoder = table()
    assert shown(data, encoder, 0)["row"] is None


def test_equal_rows_are_shown_once_unless_their_labels_differ() -> None:
    data, _ = table()
    assert list(distinct(data, [3, 0, 1])) == [3, 0, 1]  # equal rows, of two classes
    labels = torch.tensor([1, 0, 1, 1, 2])
    same = Dataset("pets", data.features, labels, 5, (-1.0, 1.0))
    assert list(distinct(same, [3, 0, 1])) == [3, 1]


# --- the benchmark ---------------------------------------------------------------------------


def test_flipped_labels_are_5_percent_and_another_class() -> None:
    labels = np.arange(400) % 4
    changed, flipped = flip(labels, np.random.default_rng(0))
    assert flipped.sum() == 20
    np.testing.assert_array_equal(changed != labels, flipped)
    assert set(changed) == {0, 1, 2, 3}


def test_precision_and_area_under_the_curve() -> None:
    flipped = np.array([True, False, True, False])
    assert found_among(np.array([0.1, 0.5, 0.2, 0.9]), flipped) == (1.0, 1.0)
    assert found_among(np.array([0.1, 0.5, 0.7, 0.9]), flipped) == (0.5, 0.75)
