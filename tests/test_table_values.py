"""Entries of a table as features: scaling, categories, written numbers, gaps and dates."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from pseudograd.data import Encoder, dataset, load_table, table
from pseudograd.data.features import Categories, Dates, Numbers, Scale
from pseudograd.data.survey import Note
from tables import SCATTERED, loaded, saved

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


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


def test_numbers_beyond_all_others_are_at_the_limit() -> None:
    """Even if they overflow float64 when they are scaled."""
    assert Scale(0.0, 1e10).apply(np.array([-1e305, 1e305])).tolist() == [-3, 3]


def test_an_outlier_does_not_flatten_the_other_values() -> None:
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
    """They used to raise it from 4% to 45% on the breast cancer table."""
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


@pytest.mark.parametrize(
    "values", [[1e308, -1e308, 0], [1e-308, 0, 2e-308], [1e-320, 0, 2e-320], [2.0**60, 0, 1]]
)
def test_extreme_numbers_stay_finite(values: list[float]) -> None:
    saved(a=(values * 14)[:40])
    data, _ = load_table("a.csv", "y")
    assert data.features.isfinite().all()


@pytest.mark.parametrize("gap", ["", "?"])  # with "?", pandas reads the column as text
def test_infinite_numbers_count_as_missing(gap: str) -> None:
    saved(a=[np.inf, 1.0, 2.0, 4.0, gap] * 8)
    encoder, told = loaded()
    assert told == ["!column 'a' has 8 infinite numbers, treated as missing"]
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
    assert told[-1].startswith("!text columns have at most 25 categories")


def test_more_features_than_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    saved(400, t=[f"t{at % 80:02d}" for at in range(400)])
    monkeypatch.setattr(dataset, "memory", lambda: 20_000)
    with pytest.raises(ValueError, match=r"a.csv has features that take .*: take a sample"):
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


def test_formatted_numbers(subtests: pytest.Subtests) -> None:
    cases: list[tuple[str, list[str], float, float]] = [
        (",", ['"4,950"', '"2,350.5"'], 2350.5, 4950),
        (",", ['"1,234,567"', '"950"'], 950, 1234567),
        (",", ['"7,5"', "12"], 7.5, 12),
        (",", ["$2050", "-$8300"], -8300, 2050),
        (";", ["EUR 1.250,50", "EUR 7"], 7, 1250.5),
        (",", ["-20 CHF", "7.5 CHF"], -20, 7.5),
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
    ]
    for mark, entries, least, greatest in cases:
        with subtests.test(mark=mark, least=least, greatest=greatest):
            column = read_as(entries * 20, mark)
            assert isinstance(column, Numbers)
            assert (column.low, column.high) == (least, greatest)
            bare = [entry.strip('"') for entry in entries]
            values = column.values(pd.Series([*bare, None]))
            assert sorted(values[:2]) == [least, greatest]
            column = read_as(entries * 20, mark, categories=["w"])
            assert column == Categories("w", tuple(sorted(bare)), missing=False)


def test_strings_that_are_not_numbers(subtests: pytest.Subtests) -> None:
    cases: list[list[str]] = [
        ["$5", "7 €"],  # mixed currencies
        ["5 USD", "7 EUR"],
        ["1,2,3", "4,5"],
        ["12,34,567.8", "1"],
        ["A-1", "$"],
        ["1-2", "3-4"],
        ["1.2.3", "4.5.6"],
        ["007", "012"],
        ["12 kg", "13 kg"],
    ]
    for entries in cases:
        with subtests.test(entries=entries):
            assert isinstance(read_as([f'"{entry}"' for entry in entries] * 20), Categories)


def test_gaps_among_numbers_and_texts(subtests: pytest.Subtests) -> None:
    for gap in ("", "NA", "N/A", "n/a", "?", "-", "–", "none", "None", "null", "."):
        with subtests.test(gap=gap):
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
        "!column 'w' is mostly numbers, but 1 of 40 entries are not, such as 'unknown': they are "
        "treated as missing (--categories w reads the column as categories)"
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


def test_numbers_that_are_none() -> None:
    saved(w=["yes", "no", "", "yes"] * 10)
    with pytest.raises(ValueError, match="'numbers' names 'w', which has no numbers, but 'yes': "):
        loaded(numbers=["w"])


def test_numbers_that_are_categories_in_a_frame() -> None:
    w = pd.Categorical(["1.5", "2.5", "4", "1.5"] * 10)
    frame = pd.DataFrame({"x": np.arange(40) * 7 % 11, "w": w, "y": [0, 1] * 20})
    assert isinstance(load_table(frame, "y")[1].columns[1], Categories)
    column = load_table(frame, "y", numbers=["w"])[1].columns[1]
    assert isinstance(column, Numbers)
    assert (column.low, column.high) == (1.5, 4)


def test_codes_of_gaps_are_detected(subtests: pytest.Subtests) -> None:
    cases: list[object] = [36, "?"]
    for gap in cases:
        for code in (-999, -9999, 999, 99999, -99):
            with subtests.test(gap=gap, code=code):
                saved(age=[20, 35, code, gap, 64] * 8)
                encoder, (line,) = loaded()
                said = (
                    f"has {code}, far from all other numbers, which is treated as missing "
                    "(--numbers NAME keeps it)"
                )
                assert line == f"!column 'age' {said}"
                column = encoder.columns[1]
                assert isinstance(column, Numbers)
                assert (column.low, column.high, column.missing) == (20, 64, True)
                assert encoder.transform(pd.DataFrame({"x": [1], "age": [code]}))[
                    0, 1:
                ].tolist() == [0, 1]
                kept, told = loaded(numbers=["age"])
                assert told == []
                column = kept.columns[1]
                assert isinstance(column, Numbers)
                assert code in (column.low, column.high)
                assert Encoder.from_json(encoder.to_json()) == encoder
                saved(age=[20, 35, code, gap, 64] * 8, years=[30, 5, 6, 7, code] * 8)
                assert loaded()[1] == [f"!2 columns 'age', 'years': each {said}"]


def test_numbers_that_are_not_codes(subtests: pytest.Subtests) -> None:
    cases: list[Sequence[float]] = [
        [20, 35, 50, 64, 99] * 8,  # near the others
        [20, 35, 50, 64] * 9 + [999, 1, 2, 3],  # occurs once
        [20, 35, 50, 1234] * 10,  # not of that form
        [1, 99] * 20,  # two values
        [-999.5, 20, 35, 50] * 10,
    ]
    for entries in cases:
        with subtests.test(entries=entries):
            saved(age=entries)
            encoder, told = loaded()
            assert told == []
            assert not encoder.columns[1].missing


def test_missing_values_given_by_the_user() -> None:
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
        pytest.importorskip("pyarrow", reason="needs pyarrow to read .parquet")
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
        (np.arange(400) % 37, ["!target 'y' has 37 distinct whole numbers in 400 rows"]),
        ([f"t{at % 37}" for at in range(400)], ["!target 'y' has 37 distinct texts in 400 rows"]),
        (np.arange(400) % 30, []),
        (np.arange(400) % 3 / 2, ["target 'y' has 3 distinct decimal numbers, and each becomes"]),
    ],
)
def test_a_target_with_many_values_causes_a_warning(labels: Any, told: list[str]) -> None:
    saved(400, y=labels)
    assert [line[: len(told[0])] for line in loaded()[1]] == told
    saved(400, y=np.arange(400) / 8)
    with pytest.raises(ValueError, match=r"but has 400 distinct decimal numbers: .* pandas.cut"):
        load_table("a.csv", "y")


def test_decimal_labels_are_those_of_the_file() -> None:
    doses = np.arange(len(SCATTERED)) % 3 / 10
    frame = pd.DataFrame({"x": SCATTERED, "y": doses.astype(np.float32)})
    with pytest.warns(Note, match="3 distinct decimal numbers"):
        assert load_table(frame, "y", strict=True)[1].labels == (0.0, 0.1, 0.2)
    with pytest.raises(ValueError, match="but has infinite numbers: name another column"):
        load_table(frame.replace({"y": {0: np.inf}}), "y")


# --- dates and times -----------------------------------------------------------------------------


def test_dates_in_the_usual_formats(subtests: pytest.Subtests) -> None:
    cases: list[str] = [
        *("%Y-%m-%d", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M:%SZ", "%Y/%m/%d"),
        *("%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%d.%m.%y", "%d.%m.%Y %H:%M"),
        *("%m/%d/%Y %I:%M %p", "%d %b %Y", "%b %d, %Y", "%B %d, %Y", "%d-%b-%y", "%d %B %Y %H:%M"),
    ]
    for format_ in cases:
        with subtests.test(format_=format_):
            times = pd.date_range("2019-11-25 06:30", periods=40, freq="31h")
            saved(when=times.strftime(format_)[np.argsort(SCATTERED)])
            encoder, told = loaded()
            assert told == []
            column = encoder.columns[1]
            assert isinstance(column, Dates)
            hours = ["hour"] if "%M" in format_ else []
            assert [part for part, *_ in column.parts] == [
                "year",
                "month",
                "weekday",
                *hours,
                "days",
            ]
            written = times[[0, -1]].strftime(format_)
            features = encoder.transform(pd.DataFrame({"x": 1, "when": written}))
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


def test_ambiguous_order_of_day_and_month() -> None:
    saved(when=[f"{1 + at % 12}/{1 + at % 7}/2020" for at in range(40)])
    encoder, (line,) = loaded()
    assert line == (
        "!column 'when' holds dates that may be read in two ways: they are read as %m/%d/%Y"
    )
    new = pd.DataFrame({"x": [1], "when": ["2/13/2020"]})
    same = new.assign(when=pd.to_datetime(["2020-02-13"]))
    np.testing.assert_array_equal(encoder.transform(new), encoder.transform(same))


@pytest.mark.parametrize(
    ("format_", "new", "read_as"),
    [
        ("%m/%d/%Y", "25/02/2020", "%d/%m/%Y"),
        ("%Y-%m-%d", "01/02/2020", "%m/%d/%Y"),
        ("%Y-%m-%d", "25.02.2020", ""),  # only one order is possible
        ("%m/%d/%Y", "2020-02-01", ""),
        ("%m/%d/%Y", "02/01/2020 10:30", ""),  # the same order
    ],
)
def test_new_dates_in_another_order(format_: str, new: str, read_as: str) -> None:
    saved(when=pd.date_range("2019-11-25", periods=40, freq="31D").strftime(format_))
    encoder, _ = loaded()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        encoder.transform(pd.DataFrame({"x": [1], "when": [new]}))
    assert [str(warning.message) for warning in told] == [
        f"column 'when': dates such as {new!r} are read as {read_as}, unlike those of the training "
        "set: check the order of day and month"
    ] * bool(read_as)


def test_dates_in_several_formats() -> None:
    times = pd.date_range("2019-11-25", periods=40, freq="31D")
    written = [time.strftime(("%Y-%m-%d", "%d/%m/%Y", "%d %B %Y")[time.day % 3]) for time in times]
    saved(when=np.array(written)[np.argsort(SCATTERED)])
    encoder, (line,) = loaded()
    assert line == (
        "!column 'when' holds dates in several formats: they are read as %d/%m/%Y or %d %B %Y or "
        "ISO8601"
    )
    new = pd.DataFrame({"x": 1, "when": ["2020-02-13", "13/02/2020", "13 February 2020"]})
    assert np.ptp(encoder.transform(new), axis=0).max() == 0
    assert Encoder.from_json(encoder.to_json()) == encoder


def test_strings_that_are_not_dates(subtests: pytest.Subtests) -> None:
    cases: list[list[str]] = [
        ["2020-01-02", "soon"],
        ["25-34", "35-44"],
        ["1.2", "1.2.20"],
        ["13/1/2020", "1/13/2020"],  # which of them is the month?
        ["12:30", "12.30.2020"],
    ]
    for entries in cases:
        with subtests.test(entries=entries):
            saved(when=entries * 20)
            assert isinstance(loaded()[0].columns[1], Categories)


def test_dates_of_other_files() -> None:
    pytest.importorskip("pyarrow", reason="needs pyarrow to read .parquet")
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
