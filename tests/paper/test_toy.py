"""The toy example: the fast runs equal plain ones and agree with the paper."""

import csv
import math
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from paper.theory import fixed_point, is_positive
from paper.toy import (
    KS,
    Spread,
    ToyRun,
    _grid,
    _one_thread,
    paper_row,
    paper_table,
    run_toy,
    summarize,
    table,
    write_csv,
)
from pseudograd.rules import tunable


@pytest.fixture(scope="module")
def results() -> list[ToyRun]:
    """The experiment at full size, with fewer runs."""
    return run_toy(runs=2)


def plain_run(k: float, run: int, examples: int, patience: int, alpha: float) -> ToyRun:
    """The paper's description word for word: four parameters, logits, Eq. 5, argmax, one by one."""
    generator = np.random.default_rng([0, run])
    sets = [torch.from_numpy(x) for x in generator.uniform(-1, 1, (3, examples))]
    labels = [((x >= 0) & (x <= alpha)).long() for x in sets]
    w, b = torch.from_numpy(generator.uniform(-0.1, 0.1, 2)), torch.zeros(2, dtype=torch.float64)

    def logits(part: int) -> torch.Tensor:
        return torch.outer(sets[part], w) + b

    def mistakes(part: int) -> int:
        return int((logits(part).argmax(1) != labels[part]).sum())

    epochs, quiet, last = 0, 0, -1
    while quiet < patience:
        pull = tunable(logits(0), labels[0], k)
        w = w - 0.01 * (pull * sets[0][:, None]).mean(0)
        b = b - 0.01 * pull.mean(0)
        epochs += 1
        now = mistakes(1)
        quiet, last = (quiet + 1 if now == last else 0), now
    weight, bias = (w[1] - w[0]).item(), (b[1] - b[0]).item()
    entropy = torch.nn.functional.cross_entropy(logits(2), labels[2]).item()
    error_pct = 100 * mistakes(2) / examples
    return ToyRun(
        k, run, 0, alpha, epochs, weight, bias, -bias / weight, error_pct, entropy
    )  # fmt: skip


@pytest.mark.parametrize(
    ("k", "run", "examples", "patience", "alpha"),
    [(4.0, 0, 200, 250, 0.95), (1.0, 1, 200, 300, 0.7), (0.0625, 2, 300, 300, 0.95)],
)
def test_a_run_is_the_plain_loop(
    k: float, run: int, examples: int, patience: int, alpha: float
) -> None:
    with _one_thread():
        plain = plain_run(k, run, examples, patience, alpha)
    fast = run_toy([k], run + 1, alpha=alpha, examples=examples, patience=patience)[run]
    assert fast.epochs == plain.epochs
    assert astuple(fast) == pytest.approx(astuple(plain), rel=1e-10, abs=1e-10)


def test_the_plain_loop_was_long_enough_to_need_finer_cells() -> None:
    result = run_toy([0.0625], 3, examples=300, patience=300)[2]
    assert result.weight > 16


@pytest.mark.parametrize("k", [16.0, *KS, 0.001])
@pytest.mark.parametrize("cells", [16, 128])
def test_nodes_stand_for_the_examples(k: float, cells: int) -> None:
    alpha = 0.95
    generator = np.random.default_rng(0)
    x = np.append(generator.uniform(-1, 1, 3000), [-1.0, 0.0, alpha, 1.0])
    grid = _grid(alpha, cells)
    counts, nodes, signs = (v.numpy() for v in (grid.counts(x), grid.nodes, grid.signs))
    label = np.where(is_positive(x, alpha), 1.0, -1.0)

    def sums(w: float, b: float, *points: NDArray[np.float64]) -> list[float]:
        x, s, n = points
        strength = np.exp(-k * np.logaddexp(0, s * (w * x + b)))
        return [float(n @ (s * strength)), float(n @ (s * strength * x))]

    # Up to the largest weight that such cells are used for, or that runs of this k reach.
    largest = min(cells, 20 / k)
    for w in (0.0, -0.1, largest / 3, largest):
        for b in (0.0, -0.1 * w, 0.3 * w + 0.1):
            exact = sums(w, b, x, label, np.ones_like(x))
            by_nodes = sums(w, b, nodes, signs, counts)
            assert by_nodes == pytest.approx(exact, rel=1e-11, abs=len(x) * 1e-13)


def test_a_run_does_not_depend_on_other_runs() -> None:
    together = run_toy([2.0, 0.25, 1.0], 3, examples=500, patience=200)
    (alone,) = [r for r in run_toy([0.25], 2, examples=500, patience=200) if r.run == 1]
    assert alone == together[4]
    assert [(r.k, r.run) for r in together] == [(k, i) for k in (2, 0.25, 1) for i in range(3)]


def test_seeds_repeat_and_differ() -> None:
    first, again, other = (
        run_toy([1.0], 2, examples=500, patience=100, seed=seed) for seed in (7, 7, 8)
    )
    assert first == again
    assert {r.weight for r in first}.isdisjoint(r.weight for r in other)
    assert first[0].weight != first[1].weight


def test_threads_are_given_back() -> None:
    threads = torch.get_num_threads()
    run_toy([1.0], 1, examples=50, patience=10)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("patience", [1, 249, 250, 600])
def test_stops_after_exactly_so_many_quiet_epochs(patience: int) -> None:
    # No change is larger than 100 percentage points: all epochs after the first are quiet.
    (result,) = run_toy([1.0], 1, examples=100, patience=patience, tolerance=1.0)
    assert result.epochs == patience + 1


def test_a_wider_tolerance_stops_no_later() -> None:
    strict, wide = (
        run_toy([0.5], 3, examples=3000, patience=500, tolerance=t) for t in (1e-5, 1e-3)
    )
    assert all(a.epochs >= b.epochs for a, b in zip(strict, wide, strict=True))
    assert sum(a.epochs for a in strict) > sum(b.epochs for b in wide)


def test_the_paper_is_reproduced(results: list[ToyRun]) -> None:
    summaries = summarize(results)
    errors = [summary.error_pct.mean for summary in summaries]
    assert [summary.k for summary in summaries] == list(KS)
    assert errors == sorted(errors, reverse=True)
    for summary in summaries:
        paper = paper_row(summary)
        assert paper is not None
        assert summary.error_pct.mean == pytest.approx(paper.error_pct, abs=0.4)
        assert summary.threshold.mean == pytest.approx(paper.threshold, abs=0.007)
    # The error falls with k while the cross-entropy does not: it is least at k = 1.
    assert min(summaries, key=lambda summary: summary.cross_entropy.mean).k == 1


def test_thresholds_are_those_of_the_population(results: list[ToyRun]) -> None:
    for result in results:
        limit = fixed_point(result.k)
        # 2.5 times the spread over samples of 30,000, which is 0.003.
        assert result.threshold == pytest.approx(limit.threshold, abs=0.0075)
        if result.k >= 2:
            assert result.weight == pytest.approx(limit.weight, rel=0.1)
        if result.k <= 0.25:  # the stopping rule ends these runs before they converge
            assert result.weight < 0.9 * limit.weight


def test_the_papers_table_comes_with_the_package() -> None:
    rows = paper_table()
    assert tuple(rows) == KS
    assert [row.error_pct for row in rows.values()] == [8.36, 6.73, 4.9, 4.27, 4.04, 3.94, 3.61]
    assert rows[0.0625].threshold == 0.022
    assert rows[4.0].cross_entropy == 0.489


def example(k: float = 1.0, run: int = 0, alpha: float = 0.95, error_pct: float = 5.0) -> ToyRun:
    return ToyRun(k, run, 0, alpha, 10, 2.0, -0.1, 0.05, error_pct, 0.3)


def test_summaries_take_mean_and_spread() -> None:
    summary, single = summarize([example(0.5), example(), example(run=1, error_pct=6.0)])
    assert (summary.k, summary.runs) == (1.0, 2)
    assert summary.error_pct == Spread(5.5, math.sqrt(0.5))
    assert summary.threshold == Spread(0.05, 0.0)
    assert (single.k, single.runs, single.error_pct.mean) == (0.5, 1, 5.0)
    assert math.isnan(single.error_pct.sd)


def test_the_table_sets_ours_beside_the_papers() -> None:
    lines = table([example(), example(run=1, error_pct=6.0), example(3.0)]).splitlines()
    assert lines[1].split() == ["k", *["ours", "paper", "limit"] * 3]
    assert lines[2].split()[:4] == ["3", "5.00", "-", f"{fixed_point(3.0).error_pct:.2f}"]
    assert lines[3].split()[:6] == ["1", "5.50", "±", "0.71", "4.90", "5.02"]
    # The paper's numbers are for its alpha.
    assert table([example(alpha=0.9)]).splitlines()[2].split()[2] == "-"
    assert max(map(len, lines)) <= 100


def test_csv_has_a_line_for_each_run(tmp_path: Path) -> None:
    runs = [example(), replace(example(0.125, 3), weight=1 / 3)]
    write_csv(runs, tmp_path / "runs.csv")
    with (tmp_path / "runs.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert ",".join(rows[0]) == (
        "k,run,seed,alpha,epochs,weight,bias,threshold,error_pct,cross_entropy"
    )
    assert [tuple(map(float, row)) for row in rows[1:]] == [astuple(run) for run in runs]
