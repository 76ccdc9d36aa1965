"""The results as documents: complete, the same in both forms, and checked against the studies."""

from __future__ import annotations

import math
import re
import shlex
import shutil
import statistics
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from made_up_results import SECONDS, change_sessions, made_up, write

from paper import effort, report
from paper.claims import (
    CLAIMS,
    judge,
    paper_points,
    pooled_by_architecture,
    pooled_by_data_set,
)
from paper.cli import main
from paper.findings import Finding, Reproduction, cross_entropies, read
from paper.report import documents, rates
from paper.rows import Experiment, Row, experiments, rows, select
from paper.run import study_of
from paper.toy import ToyRun, write_csv
from pseudograd.fleet import Outcome
from pseudograd.search import Cell, Difference, Result
from pseudograd.words import fraction, interval, signed
from trials import a_trial

ROOT = Path(__file__).parents[2]
SOME = experiments(rows("all", "*x400 m0.5"))  # 12 rows of all data sets and depths
FEW = [row for row in rows("all", "mnist *x400*") if row.momentum]
PICTURES = {"selected-k.svg", "deviations.svg", "error-against-k.svg"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("project") / "paper" / "results"
    write(found, SOME)
    write_csv(
        [ToyRun(k, run, 0, 0.95, 7000, 6.4, -0.3, 0.05, 4 + k + run, 0.28)
         for k in (4.0, 1.0, 0.25) for run in range(10)],
        found / "toy.csv",
    )  # fmt: skip
    return found


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(folder, tmp_path / "paper/results")


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents without pictures, which take most of the time."""
    monkeypatch.setattr(report, "draw", lambda numbers: {})


@pytest.fixture
def changed_text(copy: Path, undrawn: None) -> Callable[..., str]:
    """Return the document after a change to the studies' records of data and sessions."""

    def text(change: Callable[[dict[str, Any]], None], experiments: list[Experiment] = SOME) -> str:
        change_sessions(copy, change)
        return documents(experiments, copy)[copy.parents[1] / "RESULTS.md"]

    return text


@pytest.fixture(scope="module")
def files(folder: Path) -> dict[Path, str]:
    return documents(SOME, folder)


@pytest.fixture(scope="module")
def found(folder: Path) -> Reproduction:
    return read(SOME, folder)


@pytest.fixture(scope="module")
def text(files: dict[Path, str], folder: Path) -> str:
    return files[folder.parents[1] / "RESULTS.md"]


@pytest.fixture(scope="module")
def html(files: dict[Path, str], folder: Path) -> str:
    return files[folder / "results.html"]


def lines_of(text: str, name: str, after: str = "") -> list[list[str]]:
    """Return the cells of all table rows with this first cell, after a heading."""
    text = text[text.index(after) :]
    found = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found]


class Words(HTMLParser):
    """The words of a page outside its figures, and the tags that may load something."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.words, self.asking, self.inside = "", list[str](), ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("svg", "style", "head"):
            self.inside = self.inside or tag
        names = {name for name, _ in attrs}
        if tag in ("script", "img", "link", "iframe") or names & {"src", "href", "onload"}:
            self.asking.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag == self.inside:
            self.inside = ""
        self.words += " " * (tag not in ("strong", "code", "i"))

    def handle_data(self, data: str) -> None:
        if not self.inside:
            self.words += data


# --- contents ------------------------------------------------------------------------------------


def test_files(files: dict[Path, str], folder: Path) -> None:
    assert {path.name for path in files} == {"RESULTS.md", "results.html"} | PICTURES
    assert all(
        path.parent == (folder.parents[1] if path.suffix == ".md" else folder) for path in files
    )


def test_each_row_stands_beside_the_papers(text: str, folder: Path) -> None:
    for experiment, finding in read(SOME, folder).found.items():
        assert finding is not None
        if experiment.activation != "relu":
            continue
        row = experiment.row
        error, cross_entropy = lines_of(text, experiment.name, "## The tables")[:2]
        assert error[1].endswith(f"({fraction(row.selected_k)})")
        assert error[2].startswith(f"{finding.error_k1_pct.mean:.2f} ± ")
        assert cross_entropy[5].startswith(
            f"{cross_entropies(finding.result.comparison.chosen).mean:.3f} ± "
        )
        if row.error_k1_pct is None:
            assert error[3:5] == ["–", "–"]
        else:
            assert error[3] == f"{row.error_k1_pct:.2f}"
            deviation = finding.error_k1_pct.mean - row.error_k1_pct
            assert float(error[4].replace("−", "-")) == pytest.approx(deviation, abs=0.0051)
        tested = [100 * outcome.error for outcome in finding.tested[1]]
        assert error[9].startswith(f"{sum(tested) / len(tested):.2f} ± ")
        assert (error[8] == "0") == (finding.k == 1)


def test_commands_beside_rows_run_these_and_nothing_else(text: str) -> None:
    for experiment in SOME:
        if experiment.activation == "relu":
            line = lines_of(text, experiment.name, "## The tables")[0]
        else:
            lines = lines_of(text, experiment.row.name, "### What does the activation change?")
            (line,) = [line for line in lines if line[1] == experiment.activation]
        *program, table, _, pattern, _, _ = shlex.split(line[-1].strip("`"))
        assert program == ["python", "-m", "paper", "run"]
        assert select(experiments(rows(table)), pattern) == [experiment]
    assert "`python -m paper toy --csv paper/results/toy.csv` runs it again" in text
    assert "needs the data (`pseudograd data fetch mnist`" in text
    assert "`python -m paper report --out again`, with the same `--rows`, shows the" in text


def test_figures_of_the_paper_are_as_it_prints_them(text: str, tmp_path: Path) -> None:
    (tmp_path / "paper/results").mkdir(parents=True)
    text = documents(experiments(rows()), tmp_path / "paper/results")[tmp_path / "RESULTS.md"]
    assert lines_of(text, "mnist 1x400 m0")[1][3:7] == ["0.0757", "–", "not run yet", "0.148"]
    assert lines_of(text, "mnist 1x400 m0")[0][6] == "1.70"


def test_verdicts(text: str) -> None:
    verdicts = {n: lines_of(text, n, "| | claim |")[0][2:] for n in "13456"}
    assert verdicts["1"] == ["confirmed", "–", "–"]
    assert verdicts["6"][:2] == ["confirmed", "confirmed"]
    assert verdicts["4"][0] == "partly"  # worse in all four rows, but four are too few
    assert lines_of(text, "2d")[0][2] == "confirmed"
    assert "exact sign test" in text
    assert "12 rows" in text
    assert "so far" not in text
    assert "not finished yet" not in text
    assert "while rows are missing" not in text
    assert lines_of(text, "2b")[0][-1] == "open (too few rows)"  # four cannot confirm it
    assert "same rows |" not in text  # all are finished, so it would be redundant
    assert "right direction, but within noise" in text


def test_depths_stand_beside_the_papers(text: str, folder: Path) -> None:
    found = [finding for e, finding in read(SOME, folder).found.items() if e.as_printed and finding]
    lines = {
        n: lines_of(text, n, "percentage points of test error by number of hidden layers")[0]
        for n in ("all", "1", "3")
    }
    assert lines["all"][1] == "12"
    # Ours select 1/4, 1 and 4; the paper, in rows of the same depth:
    theirs = [finding.experiment.row.selected_k for finding in found]
    assert lines["all"][8] == str(sum(f.k == k for f, k in zip(found, theirs, strict=True)))
    one = [finding for finding in found if finding.experiment.row.hidden_layers == 1]
    papers = pooled_by_architecture(paper_points(finding.experiment.row for finding in one))
    assert lines["1"][3] == interval(papers, ".2f")
    # Here each data set has one architecture of each depth.
    assert lines["1"][5] == lines["1"][3]
    of_sets = pooled_by_data_set(paper_points(finding.experiment.row for finding in found))
    assert lines["all"][5] == interval(of_sets) != lines["all"][3]
    deviations = [f.error_k1_pct.mean - (f.experiment.row.error_k1_pct or math.nan) for f in one]
    lower = f"({sum(deviation < 0 for deviation in deviations)} of 4 lower)"
    assert lines["1"][6] == f"{signed(statistics.fmean(deviations))} {lower}"
    # With three hidden layers ours is 1 everywhere, so nothing changes; MNIST and SVHN agree.
    assert lines["3"][2].startswith("0.00")
    assert lines["3"][8] == lines["3"][9] == str(sum(k == 1 for k in theirs[4:8]))


def test_how_many_figures_are_nearer_to_three_fifths(text: str, folder: Path) -> None:
    nearer = []
    for experiment, finding in read(SOME, folder).found.items():
        if (theirs := experiment.row.error_k1_pct) is not None and experiment.as_printed:
            assert finding is not None
            part = 100 * statistics.fmean(outcome.error for outcome in finding.tested[1])
            nearer.append(abs(part - theirs) < abs(finding.error_k1_pct.mean - theirs))
    assert f"nearer to these ({sum(nearer)} of {len(nearer)} errors at k = 1, " in text


def test_the_toy_example_stands_beside_the_papers(text: str) -> None:
    line = lines_of(text, "1/4", "### 1. Toy example")[0]
    # Runs have errors of 4.25 to 13.25 percent.
    assert line[1:] == ["8.75 ± 3.03", "4.04", "0.280 ± 0.000", "0.405"]


def test_the_report_says_what_was_run(text: str, folder: Path) -> None:
    assert "a <GPU> & more" in text
    assert "0123456789ab" in text
    svhn = "2d1568822e365c1e47e0c28714b9cf4242ad7d4f0def3464a00f3b89c51b6934"
    assert f"svhn: `{svhn}`, re-cropped from" in text
    line = lines_of(text, "svhn 1x400 m0.5", "## What was run")[0]
    trials = len((folder / "svhn-1x400-m0.5/ledger.jsonl").read_text("utf-8").splitlines())
    assert line[1:] == [f"{trials:,}", f"{2 * trials:,}", "0.6", f"{100 * trials:,}"]
    assert "plain loop" not in text  # nothing was measured here


def test_a_report_of_some_rows_tells_of_them_alone(
    text: str, changed_text: Callable[..., str]
) -> None:
    whole = len(SOME) * SECONDS + (len(SOME) - 1) * 2
    assert f"{whole / 60:.1f} minutes including reading the data, in 1 session." in text

    def by_others(described: dict[str, Any]) -> None:
        (session,) = described["sessions"]
        if described["data"]["name"] == "mnist":
            session["commit"] = "abcdef of others"

    svhn = [experiment for experiment in SOME if experiment.row.data == "svhn"]
    some = changed_text(by_others, svhn)
    assert "including reading the data" not in some  # it includes other data
    assert "\n- svhn: `" in some
    assert "\n- cifar10: `" in text
    assert "\n- cifar10: `" not in some
    assert "abcdef" not in some
    assert "- Commit: abcdef of others, 0123456789ab.\n" in changed_text(lambda _: None)


def test_the_time_of_the_papers_own_rows_is_reported(
    text: str, folder: Path, changed_text: Callable[..., str]
) -> None:
    own = [Experiment(row) for row in rows("all", "*x400 m0.5")]
    networks = sum(len(study_of(e, folder).ledger) for e in own)
    assert f"The paper’s own rows account for 7.2 minutes and {networks:,} networks" in text
    assert "The goal was" not in text  # most rows are missing
    assert "Of these" not in changed_text(lambda _: None, own)


@pytest.mark.parametrize(
    ("times", "hardware", "said"),
    [
        (1, "NVIDIA H200", "it took 7.2 minutes, so the goal was met."),
        (10, "NVIDIA H200", "it took 72.0 minutes, so the goal was missed."),
        (1, "a CPU", ""),
    ],
)
def test_whether_the_goal_was_met(
    changed_text: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    times: int,
    hardware: str,
    said: str,
) -> None:
    """The paper is reduced to these rows; additional rows do not count."""
    monkeypatch.setattr(effort, "paper_rows", lambda: rows("all", "*x400 m0.5"))

    def change(described: dict[str, Any]) -> None:
        (session,) = described["sessions"]
        session |= {"hardware": hardware, "seconds": times * session["seconds"]}

    text = changed_text(change)
    goal = "The goal was one hour on one NVIDIA H200 for all 12 rows of the paper; "
    assert goal + said in text if said else goal not in text


def test_an_unlisted_content_is_official(changed_text: Callable[..., str]) -> None:
    """It could be loaded only because its files have the official checksums."""

    def change(described: dict[str, Any]) -> None:
        described["data"]["sha256"] = "0" * 64

    svhn = [experiment for experiment in SOME if experiment.row.data == "svhn"]
    assert f"svhn: `{'0' * 64}`, official." in changed_text(change, svhn)


def test_the_plain_loop_is_estimated_from_the_nearest_network(copy: Path, tmp_path: Path) -> None:
    measured = tmp_path / "benchmarks" / "results"
    measured.mkdir(parents=True)
    (measured / "fleet_cuda.csv").write_text(
        "network,way,us_per_model_step,hardware\n"
        "784-400-10,plain loop,1000,one GPU\n"
        "784-400-10,fleet,1,one GPU\n"
        "3072-5x800-10,plain loop,9000,one GPU\n"
        '784-400-10,"one model, CUDA graph",101.4,one GPU\n'
        '3072-5x800-10,"one model, CUDA graph",295.43,one GPU\n',
        "utf-8",
    )
    some = [Experiment(row) for row in rows("all", "*x400 m0.5") if row.data != "svhn"]
    text = documents(some, copy)[tmp_path / "RESULTS.md"]
    steps = {effort.experiment.name: effort.steps for effort in read(some, copy).efforts}
    for row, microseconds in (("mnist 1x400 m0.5", 1000), ("cifar100 5x400 m0.5", 9000)):
        hours = f"{steps[row] * microseconds / 3.6e9:,.1f}"
        assert lines_of(text, row)[0][-1] == hours
    assert "This is an estimate" in text
    assert "as a CUDA graph, a single network takes 101 to 295 µs per step" in text
    assert "one GPU" in text


def test_rows_side_by_side_are_said_to_share_the_time(
    text: str, changed_text: Callable[..., str]
) -> None:
    said = "A row that was trained side by side with others counts with its share of the device"
    assert said not in text

    def halved(described: dict[str, Any]) -> None:
        described["sessions"][0]["share"] = 0.5

    told = changed_text(halved)
    assert said in told
    assert f"- Time: {len(SOME) * SECONDS / 2 / 60:.1f} minutes, " in told
    assert lines_of(told, "svhn 1x400 m0.5", "## What was run")[0][3] == f"{SECONDS / 120:.1f}"


def test_what_a_reader_would_ask_next(text: str) -> None:
    title = "### How much does k matter?"
    curves = [line for n in "135" for line in lines_of(text, n, title) if len(line) == 10]
    several = {"all": "4", "all but mnist": "3"}
    assert all(line[2] == several.get(line[1], "1") for line in curves)
    for depth in "135":
        of_depth = [e.data for e in SOME if str(e.row.hidden_layers) == depth]
        shown = [line[1] for line in curves if line[0] == depth]
        assert {*shown} == {*several, *of_depth}
        assert shown[0] == "all"
    one, three, five = (line for line in curves if line[1] == "all")
    # The error is 0.12 at k = 1 and 0.1 at the best k.
    assert one[7] == "0"
    assert one[5].startswith("−16.")
    assert three[3] == "–"
    assert three[8].startswith("+")
    assert five[9].startswith("−16.")
    resampled = lines_of(text, "cifar10 5x400 m0.5 tanh", "### How sure is the selection?")
    assert resampled[0][1] == "4"
    rates = lines_of(text, "mnist [0,1]", "### Which learning rates")[0]
    assert rates[1:] == ["3", "1/8", "1/8", "0.1 to 10", "0 of 17", "0 of 3"]
    section = "### What does the activation change?"
    assert [line[1] for line in lines_of(text, "cifar10 5x400 m0.5", section)] == ["relu", "tanh"]
    assert "In 4 rows finished with both, tanh selects the same k in 4, and a k on the" in text
    # Errors are 12% or less at k = 1, and both are the same up to chance.
    relu, tanh = lines_of(text, "cifar10 1x400 m0.5", section)
    assert relu[7] == tanh[7] == "−1.26"
    assert relu[4].startswith("−36.2")
    assert "to the paper’s change from k = 1 to the selected k, ReLU is nearer in" in text
    rival = "In rows with one hidden layer that were run with both, the change is −2.0"
    assert rival in text
    assert "and −1.26 in the paper (cifar10 1x400 m0.5) (see “What does the activation" in text
    best = "With 5 hidden layers the best k on average is 4 (mnist 4, svhn 4, cifar10 4, cifar100 4"
    assert f"{best}; 4 without MNIST)." in text


def test_any_activation_stands_beside_relu_in_the_same_range(tmp_path: Path) -> None:
    row = rows("table1", "mnist 1x400*")[0]
    some = [
        Experiment(row, feature_range=(0.0, 1.0)),
        Experiment(row, activation="tanh"),
        Experiment(row, feature_range=(0.0, 1.0), activation="sigmoid"),
    ]
    write(tmp_path / "paper/results", some)
    text = documents(some, tmp_path / "paper/results")[tmp_path / "RESULTS.md"]
    # There is no row with ReLU in [-1, 1] to compare tanh with.
    assert "Some rows are also run with tanh. Some rows are also run with sigmoid. In 1 row" in text
    assert "finished with both, sigmoid selects the same k in 1" in text
    assert re.search(r"in percentage points: \S+ \(mnist 1x400 m0.5 \[0,1\]\)\.", text)
    table = lines_of(text, "mnist 1x400 m0.5 [0,1]", "### What does the activation change?")
    assert [line[1] for line in table] == ["relu", "sigmoid"]


def with_errors(errors: Sequence[float], chosen_epoch: int) -> Callable[[Result], Result]:
    """Return a change of a result: k = 1 has these errors, the selected k one of 0.1."""

    def changed(result: Result) -> Result:
        comparison = result.comparison
        plain = tuple(
            replace(outcome, error=error, best_epoch=epoch)
            for outcome, error, epoch in zip(
                comparison.plain, errors, (15, 16, 3, 99, 16), strict=True
            )
        )
        chosen = tuple(
            replace(outcome, error=0.1, best_epoch=chosen_epoch) for outcome in comparison.chosen
        )
        return replace(result, comparison=replace(comparison, plain=plain, chosen=chosen))

    return changed


def test_networks_that_were_taken_early_are_counted(text_with: TextWith) -> None:
    text = text_with(with_errors((0.2, 0.3, 0.4, 0.5, 0.6), chosen_epoch=1))
    assert MARKED.name == "cifar10 1x400 m0.5"
    networks, pairs = lines_of(text, "cifar10", "### Did training stop early?")[:4:3]
    assert networks[1:6] == ["1", "2 of 5", "30.00", "46.67", "5 of 5"]
    assert networks[7] == "–"
    assert pairs[1:] == ["1", "5: −30.00", "0", "3: −36.67", "2: −20.00", "0"]
    assert "outweigh" not in text


def test_a_gain_that_rests_on_early_stopping_is_pointed_out(text_with: TextWith) -> None:
    text = text_with(with_errors((0.2, 0.1, 0.4, 0.1, 0.05), chosen_epoch=99))
    pairs = lines_of(text, "cifar10", "### Did training stop early?")[3]
    assert pairs[1:] == ["1", "5: −7.00", "2: −20.00", "0", "0", "3: +1.67"]
    said = (
        "in cifar10 with 1 hidden layer (2 of 5 pairs at −20.00, 3 in which neither was at +1.67, "
        "all at −7.00)."
    )
    assert said in text
    notes = [line for line in text.splitlines() if line.startswith("- Early stopping is a part")]
    assert len(notes) == 2  # below claims 3 and 6
    assert "In cifar10 with 1 hidden layer, the pairs of networks in which it took" in notes[0]


def test_both_scalings_of_mnist_stand_beside_the_papers_figures(
    text: str, text_with: TextWith
) -> None:
    title = "### Which scaling of MNIST fits the paper?"
    for name in ("[−1, 1]", "[0, 1]"):
        (line,) = lines_of(text, name, title)
        assert [*line[1:4], *line[6:]] == ["3", "3", "3", "1", "2"]
    assert "Rates fit neither better" in text
    stated = Experiment(rows("table1", "mnist 1x400*")[0])
    text = text_with(at_another_rate, stated)
    assert lines_of(text, "[−1, 1]", title)[0][2:4] == ["3", "2"]
    assert "Rates fit [0, 1] better" in text


def test_wide_spreads_are_explained(text_with: TextWith) -> None:
    def spread(result: Result) -> Result:
        errors = (0.43, 0.47, 0.43, 0.43, 0.43)
        plain = tuple(
            replace(outcome, error=error, best_epoch=8 if error > 0.45 else 54)
            for outcome, error in zip(result.comparison.plain, errors, strict=True)
        )
        return replace(result, comparison=replace(result.comparison, plain=plain))

    text = text_with(spread)
    each = "43.0 (54), 47.0 (8), 43.0 (54), 43.0 (54), 43.0 (54)"
    assert f"- {MARKED.name}: the errors at k = 1 are, with the epoch of each, {each}." in text
    assert text.count("with the epoch of each") == 1


def test_rows_that_were_not_run_are_shown(copy: Path, tmp_path: Path) -> None:
    shutil.rmtree(copy / "svhn-1x400-m0.5")
    ledger = copy / "cifar10-1x400-m0.5/ledger.jsonl"
    ledger.write_text("".join(ledger.read_text("utf-8").splitlines(keepends=True)[:50]), "utf-8")
    text = documents(SOME, copy)[tmp_path / "RESULTS.md"]
    assert lines_of(text, "svhn 1x400 m0.5")[0][2:6] == ["not run yet", "16.88", "–", "not run yet"]
    assert lines_of(text, "cifar10 1x400 m0.5")[0][2] == "not finished"
    assert lines_of(text, "cifar10 1x400 m0.5 (not finished)")[0][1] == "50"
    ours = ["partly so far (2 of 4 rows)"] * 2
    assert lines_of(text, "2a")[0][2:] == [*ours, "partly", "partly"]
    said = "Ours, MNIST in [0, 1]: **partly** (so far, 2 of 4 rows in 2 architectures, p = "
    assert said in text
    assert "The paper’s own figures, same rows: **partly** (2 rows in 2 architectures, p" in text
    assert "10 of 12 rows are finished" in text
    assert "**Rows that are not finished yet: 1 of svhn, 1 of cifar10.**" in text


@pytest.fixture(scope="module")
def part(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the documents of all rows, of which some are finished, none of them in [0, 1]."""
    folder = tmp_path_factory.mktemp("part") / "results"
    write(folder, [Experiment(row) for row in FEW])
    return {path.name: text for path, text in documents(experiments(rows()), folder).items()}


def test_while_rows_are_missing_the_paper_is_judged_by_the_same_rows(part: dict[str, str]) -> None:
    text = part["RESULTS.md"]
    head = next(line for line in text.splitlines() if line.startswith("| | claim |"))
    assert head == "| | claim | ours | the paper’s figures, same rows | the paper’s figures |"
    assert "Some rows are also run with tanh." in text
    assert "(while rows are missing, also to the finished rows only), to" in text
    for claim in CLAIMS:
        line = lines_of(text, claim.name, "| | claim |")[0]
        whole, found = judge(claim, paper_points(rows())), judge(claim, paper_points(FEW))
        assert whole.by_row is not None
        other = whole.by_row.verdict
        assert line[4] == whole.verdict + f"; by row {other}" * (other != whole.verdict)
        verdict = line[3].partition("; by row ")[0]
        assert verdict in (found.verdict, "open (too few rows)")
        assert f"The paper’s own figures, same rows: **{verdict}** ({found.rows} rows in " in text
        assert f"; by row {other}" in text


def test_the_figure_is_of_the_same_rows(part: dict[str, str]) -> None:
    picture = part["selected-k.svg"]
    assert "in the same rows" in picture
    for depth in ("1 hidden layer", "3 hidden layers", "5 hidden layers"):
        assert f"{depth}, 2 rows by selected k" in picture
    # For MNIST with one hidden layer, the paper selected 1/2 in both rows, we 1/4.
    assert "1 hidden layer: k = 1/4 2 and 0, k = 1/2 0 and 2, k = 1 0 and 0" in picture


def test_what_too_few_rows_cannot_confirm_is_open(part: dict[str, str]) -> None:
    text = part["RESULTS.md"]
    assert lines_of(text, "5", "| | claim |")[0][2] == "open (too few rows)"
    assert "is left open (“open (too few rows)”)." in text
    said = "**open (too few rows)** (so far, 4 of 34 rows in 2 architectures, p = 1): better in 1"
    assert said in text
    assert lines_of(text, "2a")[0][2] == "partly so far (2 of 33 rows)"
    assert "not confirmed so far" not in text


def test_the_other_scaling_is_judged_once_a_row_is_finished(tmp_path: Path) -> None:
    some = experiments(rows("table1", "mnist*"))
    write(tmp_path / "paper/results", [e for e in some if e.activation == "relu"][:2])
    text = documents(some, tmp_path / "paper/results")[tmp_path / "RESULTS.md"]
    assert "| claim | ours | ours, MNIST in [0, 1] | the paper’s figures, same rows |" in text


def test_nothing_was_run_yet(tmp_path: Path) -> None:
    folder = tmp_path / "paper/results"
    folder.mkdir(parents=True)
    files = documents(SOME, folder)
    text = files[tmp_path / "RESULTS.md"]
    assert {path.name for path in files} == {"RESULTS.md", "results.html"}
    assert all(
        lines_of(text, e.name)[0][2] == "not run yet" for e in SOME if e.activation != "tanh"
    )
    assert lines_of(text, "3")[0][2:] == ["open", "confirmed"]
    assert "`python -m paper toy --csv paper/results/toy.csv` runs it." in text


MARKED = Experiment(rows("table1", "cifar10 1x400*")[0])
TextWith = Callable[..., str]


@pytest.fixture
def text_with(
    folder: Path, found: Reproduction, monkeypatch: pytest.MonkeyPatch, undrawn: None
) -> TextWith:
    """Return the document for other search results of one row and of the rest."""

    def text(
        change: Callable[[Result], Result],
        *others: Experiment,
        control: tuple[Cell, tuple[Outcome, ...]] | None = None,
    ) -> str:
        changed = dict(found.found)
        for experiment in (MARKED, *others):
            finding = changed[experiment]
            assert isinstance(finding, Finding)
            changed[experiment] = replace(finding, result=change(finding.result), control=control)
        otherwise = replace(found, found=changed, unread=3)
        monkeypatch.setattr(report, "read", lambda *_, **__: otherwise)
        return documents(SOME, folder)[folder.parents[1] / "RESULTS.md"]

    return text


def test_ties_and_open_rates_are_marked(text_with: TextWith) -> None:
    def with_ties(result: Result) -> Result:
        same_k = replace(result.chosen, learning_rate=0.5)
        ties = (Cell(0.125, 0.1, same_k.errors), same_k)
        return replace(result, ties=ties, open_ks=(4.0,))

    text = text_with(with_ties)
    assert lines_of(text, MARKED.name, "## The tables")[0][1] == "1/4†‡ (1/4)"
    assert lines_of(text, "svhn 1x400 m0.5", "## The tables")[0][1] == "1/4 (1/4)"
    assert f"- † {MARKED.name}: k = 1/8 did equally well" in text
    assert f"- ‡ {MARKED.name}: the best rate of k = 4 may lie beyond" in text
    assert "3 lines of the ledgers cannot be read" in text


def test_a_neighbours_best_rate_that_was_not_tried_is_marked(text_with: TextWith) -> None:
    """No k is above 4, so only k = 2 can lack its rate."""

    def with_another(result: Result) -> Result:
        far = Cell(4.0, 16.0, result.chosen.errors)
        best = tuple(far if cell.k == 4 else cell for cell in result.best_of_each_k)
        return replace(result, cells=(*result.cells, far), best_of_each_k=best)

    text = text_with(with_another)
    line = lines_of(text, MARKED.name, "### Which learning rates")[0]
    tried = "(1/16 to 1/2)"
    assert line[1].startswith(f"k = 4: 16 (1/16 to 16), k = 2: 1/8* {tried}, k = 1: 1/8 {tried}, ")
    apart = lines_of(text, "cifar10", "### Which learning rates")[0][-2:]
    assert apart[0].startswith("1 of ")
    assert apart[1] == "0 of 3"


def at_another_rate(result: Result) -> Result:
    """Return the result as if the selected k were best at a rate not tried with k = 1."""
    chosen = replace(result.chosen, learning_rate=16.0)
    return replace(result, cells=(*result.cells, chosen), chosen=chosen)


def told_of_claims(text: str) -> list[str]:
    """Return the notes below claims about rows marked §."""
    return [line.removeprefix("- ") for line in text.splitlines() if line.startswith("- § marks")]


def test_k_1_at_the_selected_ks_rate_stands_beside_both(text_with: TextWith) -> None:
    text = text_with(at_another_rate)
    title = "### Is it k, or the learning rate?"
    line = lines_of(text, f"{MARKED.name} §", title)[0]
    assert (line[1], line[2], line[5], line[8]) == ("1/4: 16", "1/8", "–", "–")
    assert "It has yet to be done for 1 row." in text

    trial = a_trial("cifar10", (400,), k=1, learning_rate=16)
    networks = tuple(replace(made_up(trial), error=error) for error in (0.4, 0.5, 0.45, 0.4, 0.5))
    text = text_with(at_another_rate, control=(Cell(1.0, 16.0, (0.5, 0.6)), networks))
    line = lines_of(text, MARKED.name, title)[0]
    assert (line[5], line[8]) == ("55.00", "45.00 ± 5.00")
    assert line[9].startswith("−34.9")  # the best k has 10% and some chance
    assert "In 1 of them, k = 1 has no lower validation error" in text
    # So it is not the rate, and no claim is judged again without this row.
    assert lines_of(text, MARKED.name, "## The tables")[0][1] == "1/4 (1/4)"
    assert told_of_claims(text) == []

    # Better than the 0.12 at its own rate, so it may be the rate.
    text = text_with(at_another_rate, control=(Cell(1.0, 16.0, (0.05, 0.15)), networks))
    assert lines_of(text, f"{MARKED.name} §", title)[0][5] == "10.00"
    assert "In 0 of them, k = 1 has no lower validation error" in text
    assert lines_of(text, MARKED.name, "## The tables")[0][1] == "1/4§ (1/4)"
    assert len(told_of_claims(text)) == 5


def test_rows_whose_rate_was_not_tried_at_k_1_are_marked(text_with: TextWith) -> None:
    text = text_with(at_another_rate)
    assert lines_of(text, MARKED.name, "## The tables")[0][1] == "1/4§ (1/4)"
    assert f"- § {MARKED.name}: the search tried k = 1 at rates of 1/16 to 1/2, not at 16." in text
    assert lines_of(text, "cifar10", "### Which learning rates")[0][-1] == "1 of 3"
    # All claims that rest on it name it: 2a and 4 (the 4 shallow rows), 2d, 3 and 6 (all 12).
    # Each is then judged without it, in both scalings of MNIST.
    told = told_of_claims(text)
    for line, number in zip(told, (4, 12, 12, 4, 12), strict=True):
        assert line.startswith(f"§ marks 1 of {number} rows: {MARKED.name}. Without them: **")
        assert line.count(f"** ({number - 1} rows") == 2
        assert ". Without them, MNIST in [0, 1]: **" in line
    assert re.search(r"Without the rows marked § the change is .* with 1 hidden layer\.", text)


def test_marked_rows_that_are_run_beside_the_papers_are_counted_apart(text_with: TextWith) -> None:
    scaled = Experiment(rows("table4", "mnist 5x400 m0.5")[0], feature_range=(0.0, 1.0))
    # No claim is judged by rows with tanh.
    tanh = Experiment(rows("table1", "cifar10 1x400*")[0], activation="tanh")
    text = text_with(at_another_rate, scaled, tanh)
    of_4, of_12 = (f"§ marks 1 of {number} rows: {MARKED.name}." for number in (4, 12))
    of_1, of_2, of_3 = (
        f"§ marks 1 of {number} of MNIST in [0, 1]: {scaled.name}."
        for number in ("1 row", "2 rows", "3 rows")
    )
    both = f"{of_12} {of_3}"
    told = [line.partition(" Without them")[0] for line in told_of_claims(text)]
    assert told == [of_4, of_1, both, both, of_4, of_2, both]


def test_verdicts_without_marked_rows_are_reported(text_with: TextWith) -> None:
    """The section "In short" lists them only if they differ, the claim's section always."""
    shallow = [Experiment(row) for row in rows("table1", "*1x400 m0.5")]
    text = text_with(at_another_rate, *shallow)
    verdicts = {claim.name: lines_of(text, claim.name)[0] for claim in CLAIMS}
    other = "; without rows marked § "
    # Of the rows with one hidden layer, the first reading keeps none, MNIST in [0, 1] one.
    assert verdicts["2a"][2] == f"partly{other}open"
    assert verdicts["2a"][3] == "partly"
    assert "Without them: no row is left." in text
    assert (
        "Without them, MNIST in [0, 1]: **partly** (1 row in 1 architecture, p = 1): below" in text
    )
    # Four of the eight remaining rows select 1, which leaves too few for claim 2d.
    assert verdicts["2d"][2] == f"confirmed{other}partly"
    assert "Without them: **partly** (8 rows in 8 architectures, p = 0.1" in text
    # No marked row has five hidden layers, and no row of the paper's figures is marked.
    assert other not in verdicts["2c"][2] + verdicts["2d"][4]


@pytest.mark.usefixtures("undrawn")
def test_the_answer_comes_first(
    folder: Path, found: Reproduction, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(low: float, high: float) -> Callable[[Result], Result]:
        error = Difference((low + high) / 2, low, high)

        def changed(result: Result) -> Result:
            return replace(result, comparison=replace(result.comparison, error=error))

        return changed

    lower, higher, noise = of(-0.03, -0.01), of(0.01, 0.03), of(-0.01, 0.01)
    of_row = {
        "mnist 1x400 m0.5": lower,
        "svhn 1x400 m0.5": lower,
        "cifar10 1x400 m0.5": higher,
        "cifar100 1x400 m0.5": noise,
    }

    changed = dict(found.found)
    for experiment, finding in found.found.items():
        assert finding is not None
        result = of_row.get(experiment.name, noise)(finding.result)
        if experiment.name == "mnist 1x400 m0.5":
            result = at_another_rate(result)
        changed[experiment] = replace(finding, result=result)
    monkeypatch.setattr(report, "read", lambda *_, **__: replace(found, found=changed))
    text = documents(SOME, folder)[folder.parents[1] / "RESULTS.md"]
    answer = text[text.index("**Does k matter?**") :].splitlines()[0]
    # Twelve architectures: -2, -2, +2 and nine times 0 percentage points; then without one -2.
    half = 2.20099 * (35 / 33 / 12) ** 0.5  # Student's t, and the variance of these
    assert answer.startswith(
        "**Does k matter?** Compared with k = 1, the selected k changes the test error by −0.17 "
        f"(95% interval over architectures −{1 / 6 + half:.2f} to +{half - 1 / 6:.2f}) percentage "
        "points on average. Architectures on the same data set are not independent either: with "
        # -2/3, -2/3, 2/3 and 0
        "the 4 data sets as units the change is −0.17 (−1.18 to +0.85). Without the 1 row marked § "
        "(explained below the table) the change is 0.00 ("
    )
    # The four rows with three hidden layers select 1.
    assert (
        "In 8 of 12 rows the selected k is not 1; by each row’s own 95% interval over seeds, the "
        "error is lower in 2, higher in 1, and indistinguishable in 5." in answer
    )
    sets = dict.fromkeys(experiment.row.data for experiment in SOME)
    selected = "; ".join(f"for {data} (2 rows), 1 in 1, above 1 in 1" for data in sets)
    assert answer.endswith(f"With several hidden layers, the selected k is, {selected}.")


@pytest.mark.parametrize(
    ("rate", "said"),
    [(0.0625, "1/16"), (2.0**-13, "1/8192"), (2.0**-14, "6.104e-05"), (4.0, "4"), (0.3, "0.3"),
     (0.123456, "0.1235")],
)  # fmt: skip
def test_rates_are_exact_where_that_is_short(rate: float, said: str) -> None:
    assert rates(rate) == said


def test_networks_without_a_session_are_reported(
    text: str, changed_text: Callable[..., str]
) -> None:
    """Networks that a session records but the ledger lacks do not make up for them."""
    assert "no session records" not in text

    def miscounted(described: dict[str, Any]) -> None:
        (session,) = described["sessions"]
        session["trials"] += {"svhn": -7, "mnist": 500}.get(described["data"]["name"], 0)

    told = changed_text(miscounted)
    said = "- For 21 networks no session records where and how long they were trained"
    assert f"{said}, so this time is too short.\n" in told
    assert "The paper’s own rows account" not in told
    told = changed_text(lambda described: described["sessions"].clear())
    assert "no session records where and how long they were trained.\n" in told
    assert "- Time:" not in told


def test_user_defined_rows(tmp_path: Path) -> None:
    """Rows with another data set or depth are shown, but no claim is judged by them."""
    papers = Experiment(rows("table1", "svhn 1x400*")[0])
    own = [
        Experiment(Row("mine", "fashion-mnist", layers, 400, 0.5), activation=activation)
        for layers, activation in ((1, "relu"), (2, "relu"), (2, "tanh"))
    ]
    write(tmp_path / "paper/results", [papers, *own])
    benchmark = tmp_path / "benchmarks" / "results" / "fleet_cuda.csv"
    benchmark.parent.mkdir(parents=True)
    benchmark.write_text(
        "network,way,us_per_model_step,hardware\n784-400-10,plain loop,1000,one GPU\n", "utf-8"
    )
    for wanted, lead, claimed in (
        ([papers, *own], "1 of 1 rows are finished, and 3 of 3 that are not the p", "partly"),
        (own, "3 of 3 rows that are not the paper’s are finished; no claim is", "open"),
    ):
        text = documents(wanted, tmp_path / "paper/results")[tmp_path / "RESULTS.md"]
        assert f"k = 1 is cross-entropy. {lead}" in text
        assert "in `paper/results` by `paper.report.documents`." in text
        assert lines_of(text, "2a")[0][2] == claimed
        shown = text[text.index("### Not of the paper: mine") :]
        assert lines_of(shown, "fashion-mnist 1x400 m0.5")[0][1] == "1/4 (–)"
        assert lines_of(shown, "fashion-mnist 2x400 m0.5 tanh")[0][-1] == "–"


@pytest.mark.parametrize("name", ["mnist 1x400 m0.5 tanh", "mnist 1x400 m0.5 [0,1]"])
def test_a_row_that_is_run_beside_the_papers_alone(name: str, tmp_path: Path) -> None:
    """The commands that RESULTS.md prints beside it give a report that shows it."""
    alone = select(experiments(rows()), name)
    write(tmp_path / "paper/results", alone)
    text = documents(alone, tmp_path / "paper/results")[tmp_path / "RESULTS.md"]
    assert "1 of 1 rows that the paper does not have (MNIST in [0, 1], and some with tanh)" in text
    assert "No row is finished" not in text[text.index("## Follow-up questions") :]
    assert lines_of(text, name, "### How sure is the selection?")[0][1] == "1/4"
    table = "## The tables" if "tanh" not in name else "### What does the activation change?"
    shown = lines_of(text, name.removesuffix(" tanh"), table)
    assert any(" ± " in cell for line in shown for cell in line)


def test_mnist_in_0_1_is_a_reading_once_it_has_the_same_rows(copy: Path, tmp_path: Path) -> None:
    """With only some of them, its verdicts would rest on the other data sets."""
    shutil.rmtree(copy / "mnist-5x400-m0.5-0-1")
    text = documents(SOME, copy)[tmp_path / "RESULTS.md"]
    assert "Ours, MNIST in [0, 1]" not in text
    assert lines_of(text, "mnist 1x400 m0.5 [0,1]", "## The tables")[0][2] != "not run yet"


def test_a_depth_that_no_claim_is_about(tmp_path: Path) -> None:
    some = [Experiment(rows("table1", "svhn 1x400*")[0])]
    some.append(Experiment(Row("table1", "svhn", 2, 400, 0.5)))
    write(tmp_path / "paper/results", some)
    text = documents(some, tmp_path / "paper/results")[tmp_path / "RESULTS.md"]
    assert "2 of 2 rows are finished" in text
    said = "(1 row in 1 architecture, p = 1): below 1 in 1, 1 in 0, above 1 in 0;"
    assert said in text  # claim 2a
    assert lines_of(text, "svhn 2x400 m0.5", "### Table 1")[0][1] == "2 (1)"


# --- their form ----------------------------------------------------------------------------------


def test_the_page_says_the_same(text: str, html: str) -> None:
    page = Words(html)
    assert page.asking == []
    said = " ".join(page.words.split())
    for line in text.splitlines()[4:]:
        if line.startswith(("![", "<", "| ---", "#")):
            continue
        for words in line.strip("|").split("|"):
            plain = re.sub(r"^- ", "", words.strip()).replace("`", "").replace("**", "")
            assert " ".join(plain.split()) in said.replace("\N{NO-BREAK SPACE}", " ")


def test_what_comes_from_files_is_escaped(html: str) -> None:
    assert "a &lt;GPU&gt; &amp; more" in html
    assert "a <GPU>" not in html


def test_tables_are_even(text: str) -> None:
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({line.count("|") for line in block.splitlines()}) == 1


def test_pictures_stand_on_their_own(files: dict[Path, str], text: str) -> None:
    for path, content in files.items():
        if path.suffix == ".svg":
            picture = ET.fromstring(content)
            assert picture.tag == "{http://www.w3.org/2000/svg}svg"
            assert "<dc:date>" not in content  # the same every time
            assert f"(paper/results/{path.name})" in text


def test_pictures_are_drawn_the_same_every_time(files: dict[Path, str], folder: Path) -> None:
    assert files == documents(SOME, folder)


# --- the command ---------------------------------------------------------------------------------


def test_report_and_check(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("paper/results"), [Experiment(row) for row in rows("all", "svhn *x400 m0.5")])
    report = ["report"]
    assert main([*report, "--check"]) == 1
    assert capsys.readouterr().err == (
        "python -m paper: RESULTS.md is not what the ledgers give: "
        "run the same command without --check\n"
    )
    assert main(report) == 0
    assert capsys.readouterr().out.splitlines()[:2] == ["RESULTS.md", "paper/results/results.html"]
    assert main([*report, "--check"]) == 0
    picture = Path("paper/results/deviations.svg")
    drawn = picture.read_text("utf-8")
    picture.write_text(drawn.replace("#2f7fc1", "#000000"), "utf-8")
    assert main([*report, "--check"]) == 0  # drawn differently, but only the data count
    picture.write_text(drawn.replace("svhn: ", "svhn: 1"), "utf-8")
    assert main([*report, "--check"]) == 1
    assert capsys.readouterr().err.startswith(
        "python -m paper: paper/results/deviations.svg is not what"
    )


def test_rows_that_were_run_again_do_not_touch_the_results(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, "again")
    Path("RESULTS.md").write_text("all rows", "utf-8")
    assert main(["report", "--rows", "svhn *x400 m0.5", "--out", "again"]) == 0
    assert Path("RESULTS.md").read_text("utf-8") == "all rows"
    text = Path("again/RESULTS.md").read_text("utf-8")
    assert "3 of 3 rows are finished" in text
    made = "python -m paper report --rows 'svhn *x400 m0.5' --out again"
    assert f"in `again` by `{made}`." in text
    assert main([*shlex.split(made)[3:], "--check"]) == 0
    whole = str(Path("again").resolve())  # the same folder by another name
    same = ["report", "--rows", "svhn *x400 m0.5", "--out", whole]
    assert main([*same, "--check"]) == 0
    assert "`python -m paper toy --csv again/toy.csv` runs it again." in text
    assert "(deviations.svg)" in text


def test_report_of_runs_in_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    row = rows("table1", "mnist 1x400*")[0]
    write(Path("runs/smoke"), [Experiment(row)], smoke=True)
    report = ["report", "--smoke", "--as-printed", "--rows", row.name]
    assert main(report) == 0
    text = Path("runs/smoke/RESULTS.md").read_text("utf-8")
    assert "the figures mean nothing" in text
    assert "1 of 1 rows are finished" in text
    made = f"python -m paper report --rows '{row.name}' --as-printed --smoke --out runs/smoke"
    assert f"by `{made}`." in text
    assert "MNIST in [0, 1] |" not in text
    assert "`, a part of it." in text
    before = sorted(Path("runs/smoke").iterdir())
    for what in ("status", "report"):
        capsys.readouterr()
        assert main([what, "--out", "runs/smoke"]) == 1
        assert "holds a run with other settings" in capsys.readouterr().err
    assert sorted(Path("runs/smoke").iterdir()) == before
    assert main(["status", "--smoke", "--out", "runs/smoke"]) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["report"], "paper/results holds no ledgers: run `python -m paper run all` first"),
        (
            ["report", "--rows", "svhn*"],
            "a report of paper/results covers all rows: leave out --rows and --as-printed, or "
            "name the folder of another run by --out",
        ),
    ],
)
def test_report_refuses(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*arguments]) == 1
    assert capsys.readouterr().err == f"python -m paper: {said}\n"
    assert list(tmp_path.iterdir()) == []


def test_report_of_nothing_writes_nothing(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("again").mkdir()
    assert main(["report", "--out", "again"]) == 1
    said = (
        "python -m paper: again holds no study of these rows: run them first, `python -m paper run"
    )
    assert capsys.readouterr().err.startswith(said)
    assert list(Path("again").iterdir()) == []
    shutil.copytree(folder, "some")
    before = sorted(Path("some").iterdir())
    assert main(["report", "--rows", "mnist 5x800*", "--out", "some"]) == 1
    assert "some holds no study of these rows" in capsys.readouterr().err
    assert sorted(Path("some").iterdir()) == before


def test_the_results_of_this_project_are_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["report", "--check"]) == 0
