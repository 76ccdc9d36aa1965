"""Figures in the documents equal those in the result files."""

from __future__ import annotations

import csv
import re
from collections import Counter
from pathlib import Path
from statistics import mean

import pytest

import paper.findings
from paper.cli import FLEETS_ON_A_GPU
from paper.rows import experiments, rows
from paper.verdicts import readings
from pseudograd.search import paired_difference

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
# Wall-clock times of the loss on a GPU. `python -m benchmarks.loss --device cuda` writes
# loss_cuda.csv; once that is committed, name it here, and let the documents follow.
ON_GPU = "loss_wall_cuda.csv"


def rows_of_tables(document: str) -> list[list[str]]:
    """Yield the cells of every table row of a document."""
    lines = (ROOT / document).read_text("utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]


def read(name: str) -> list[dict[str, str]]:
    with (RESULTS / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def on_cpu(shape: str, text: str) -> list[float]:
    """Return cross-entropy's microseconds, and our time for each k as a multiple of them."""
    target = re.sub(r", .*| \(.*", "", text).replace("binary", "yes or no") or "labels"
    dtype = next((name for name in ("float64", "bfloat16") if name in text), "float32")
    way = "compiled" if "compiled" in text else "eager"
    wanted = {"shape": shape, "target": target, "dtype": dtype, "layout": "", "way": way}
    lines = [line for line in read("loss_cpu.csv") if wanted.items() <= line.items()]
    (theirs,) = (float(line["us_median"]) for line in lines if line["whose"] == "cross_entropy")
    ours = {
        line["k"]: float(line["times_cross_entropy"]) for line in lines if line["whose"] == "ours"
    }
    return [theirs, *(ours[k] for k in ("1", "0.5", "2", "per example"))]


def on_gpu(dtype: str, shape: str) -> list[float]:
    """Return the milliseconds for each k, and those of cross-entropy, eager and compiled."""
    wanted = {"form": "logits", "shape": shape, "dtype": dtype}
    lines = [line for line in read(ON_GPU) if wanted.items() <= line.items()]
    found = {line["way"]: float(line["wall_ms_median"]) for line in lines}
    ways = (
        *(f"ours k={k}" for k in ("1", "0.5", "2", "per row")),
        "cross_entropy",
        "torch.compile",
    )
    return [found[way] for way in ways]


def shape_of(text: str) -> str:
    return text.strip("()").replace(", ", "x").replace("×", "x").replace(",", "")


CPU = re.compile(r"(\([\d, ]+\)|[\d,×]+) ((?:labels|smoothed labels|probabilities|binary).*)")
CPU_ROWS = [row for row in rows_of_tables("docs/speed.md") if CPU.fullmatch(row[0])]
GPU_ROWS = [row for row in rows_of_tables("docs/speed.md") if re.match(r"b?float\d+ \d", row[0])]
README_ROWS = [row for row in rows_of_tables("README.md") if re.match("2 CPU cores|H200", row[0])]
CLASSIFIERS = {
    "scikit-learn MLP of 32 units, tuned (85 tables)": "MLP of 32, tuned",
    "LogisticRegression, C tuned": "logistic, tuned",
    "RandomForest, 300 trees": "forest",
    "HistGradientBoosting": "boosting",
}


def test_the_tables_are_there() -> None:
    assert (len(CPU_ROWS), len(GPU_ROWS), len(README_ROWS)) == (25, 5, 8)


def test_speed_on_a_cpu(subtests: pytest.Subtests) -> None:
    for row in CPU_ROWS:
        with subtests.test(row=row):
            match = CPU.fullmatch(row[0])
            assert match is not None
            theirs, *ours = on_cpu(shape_of(match[1]), match[2])
            expected = f"{theirs / 1000:.1f} ms" if theirs >= 1000 else f"{theirs:.0f} µs"
            assert row[1:] == [expected, *(f"{times:.2f}" for times in ours)]


def test_speed_on_a_gpu(subtests: pytest.Subtests) -> None:
    for row in GPU_ROWS:
        with subtests.test(row=row):
            dtype, shape = row[0].split()
            assert row[1:] == [f"{ms:.2f}" for ms in on_gpu(dtype, shape_of(shape))]


def test_speed_in_the_readme(subtests: pytest.Subtests) -> None:
    for row in README_ROWS:
        with subtests.test(row=row):
            place, rest = row[0].split(", ", 1)
            dtype, shape = re.sub(r" \(\d\.\d\d to.*", "", rest).split(" ", 1)
            if place == "H200":
                *ours, theirs, _ = on_gpu(dtype, shape_of(shape))
                times = [ms / theirs for ms in ours]
            else:
                shape, _, target = shape.partition(" probabilities")
                _, *times = on_cpu(shape_of(shape), f"probabilities{target}" if target else "")
            assert row[1:] == [f"{one:.2f}" for one in times]


def reported() -> dict[str, list[str]]:
    """Return rows on the half of the tables that no default was chosen on, by method."""
    found: dict[str, list[str]] = {}
    for row in rows_of_tables("benchmarks/results/tables.md"):
        found.setdefault(row[0], row)  # the first table is that half's
    return found


def test_accuracy_on_tables() -> None:
    rows = {row[0]: row for row in rows_of_tables("README.md")}
    methods = reported()
    ours = methods["pseudograd"]
    assert rows["**`TunableMLPClassifier`**"][1:4] == [ours[2], ours[3], ours[7]]
    for name, method in CLASSIFIERS.items():
        line = [cell.replace(" against ", ", ours ").replace("-", "−") for cell in methods[method]]
        better, _, worse = line[5].split(" / ")  # from the peer's side
        assert rows[name][1:] == [line[2], line[3] or "–", line[7], f"{worse} / {better}", line[4]]
        (tables,) = re.findall(r"\((\d+) tables\)", name) or ["87"]
        assert line[1] == tables


def test_accuracy_where_slower_methods_ran() -> None:
    text = " ".join((ROOT / "README.md").read_text("utf-8").split())
    found = re.findall(
        r"(tuned boosting|RealMLP-TD|TabM) (\d\d\.\d\d)%, ours (\d\d\.\d\d)% \((\d+)", text
    )
    names = ("boosting, tuned", "RealMLP-TD", "TabM")
    lines = [reported()[name] for name in names]
    assert [tuple(one[1:]) for one in found] == [
        (*line[2].split(" against "), line[1]) for line in lines
    ]


def test_when_k_helps() -> None:
    text = " ".join((ROOT / "README.md").read_text("utf-8").split())
    results = rows_of_tables("RESULTS.md")
    for words, depth in (("one hidden layer", "1"), ("five hidden layers", "5")):
        row = next(row for row in results if row[0] == depth)  # the first table has the means
        mean, low, high = re.findall(r"[−+]\d\.\d\d", row[2])
        pattern = rf"{words} \|[^|]*\| {re.escape(mean)} .*?{re.escape(low)} to {re.escape(high)}"
        assert re.search(pattern, text), row


def test_the_rows_of_fully_connected_networks() -> None:
    """Intervals over data sets, selected k, and the validation errors of one network."""
    found = paper.findings.read(experiments(rows("all")), ROOT / "paper/results")
    points = readings(found)[0].points
    readme, page = (
        " ".join((ROOT / name).read_text("utf-8").split())
        for name in ("README.md", "docs/when-k-helps.md")
    )
    for depth, start in (("1", "one"), ("3", ""), ("5", "five"), ("all", "")):
        means: dict[str, dict[int, list[float]]] = {}
        for point in points:
            if depth in ("all", str(point.row.hidden_layers)):
                network = 10_000 * point.row.hidden_layers + point.row.width
                means.setdefault(point.row.data, {}).setdefault(network, []).append(point.error)
        changes = [mean(map(mean, networks.values())) for networks in means.values()]
        assert len(changes) == 4
        over = paired_difference(changes, [0.0] * 4)
        interval = f"{over.low:+.2f} to {over.high:+.2f}".replace("-", "−")
        assert re.search(rf"\| {depth} \|[^|]*\|[^|]*\|[^|]*\| {re.escape(interval)} \|", page)
        networks = sum(map(len, means.values()))
        if start:
            words = rf"{start} hidden layers? \|[^|]*\| [^|]*over {networks} architectures; "
            assert re.search(rf"{words}over 4 data sets, {re.escape(interval)} \|", readme)
    shallow = Counter(point.k for point in points if point.row.hidden_layers == 1)
    assert [shallow[k] for k in (1 / 8, 1 / 16, 1 / 4, 1 / 2, 1, 2, 4)] == [10, 9, 5, 4, 3, 1, 1]
    assert "⅛ in 10 experiments, 1/16 in 9, ¼ in 5, ½ in 4, 1 in 3, and 2 and 4 in one" in page
    assert "which 31 of 33 experiments select among 1/16 to 4" in readme
    deep = [point for point in points if point.row.hidden_layers == 5]
    assert [point.row.data == "mnist" for point in deep] == [point.k <= 1 for point in deep]
    (one,) = (
        each for each in found.finished
        if each.experiment.row.name == "cifar10 1x800 m0.5" and each.experiment.activation == "relu"
    )  # fmt: skip
    errors = {cell.k: f"{100 * cell.error:.2f}%" for cell in one.result.best_of_each_k}
    low = sorted(errors[k] for k in (1 / 4, 1 / 8, 1 / 16))
    assert (
        f"{low[0].strip('%')} to {low[-1]}, k = ½ has {errors[0.5]} and k = 1 {errors[1]}" in page
    )


def test_other_figures_of_the_studies_beyond_the_paper() -> None:
    readme, page, beyond = (
        " ".join((ROOT / name).read_text("utf-8").split())
        for name in ("README.md", "docs/when-k-helps.md", "BEYOND.md")
    )
    table = (ROOT / "BEYOND.md").read_text("utf-8").split("<summary>cifar10-symmetric-40<")[1]
    lines = {line.split(" | ")[0]: line.split(" | ") for line in table.splitlines()}
    plain, half = lines["| cross-entropy"], lines["| tunable (the paper’s)"]
    assert half[1] == "k = 1/2"
    assert f"k = ½ has {half[8]} against {plain[8]}" in readme
    assert f"cross-entropy of {half[8]} and an ECE of {half[9]}%" in page
    assert f"k = 1 of {plain[8]} and {plain[9]}%" in page
    for quoted in ("0.017 |", "p = 0.080", "better in 1 of 24 comparisons"):
        assert quoted in beyond
    assert "with p = 0.017 corrected for the six on its network, and 0.080 for all 24" in page
    assert "95.11% by self-confidence (k = 0.5) and 95.41% by margin (k = 2)" in beyond
    assert "with k = 1 95.17%" in beyond
    assert all(f"{quoted}%" in page for quoted in ("95.11", "95.17", "95.41"))
    row = next(row for row in rows_of_tables("BEYOND.md") if "40% of the labels wrong" in row[0])
    first, second, *others = row[1].removeprefix("one of these: ").split("; ")
    assert (first[:9], second) == ("symmetric", "tunable, smoothing 0.2, k = 1/4")
    assert len(others) == 5
    assert "label smoothing with k = ¼, or one of five others" in readme
    chosen = re.findall(r"\d+ rates[^()]*\((\d\d\.\d\d)%\)[^;.]*k = ([\d/]+)", beyond)
    assert chosen == [("43.34", "1"), ("43.80", "2"), ("47.42", "1"), ("48.10", "1/2")]
    assert "with the 3 rates of each other k, it would choose ½ and 2" in page


@pytest.mark.parametrize("document", ["README.md", "docs/when-k-helps.md"])
def test_differences_are_those_of_the_studies(document: str) -> None:
    text = " ".join((ROOT / document).read_text("utf-8").split())
    section = re.split("## (?:When does k help|Beyond the paper)", text)[1].split("## ")[0]
    sources = "".join((ROOT / name).read_text("utf-8") for name in ("BEYOND.md", "RESULTS.md"))
    number = r"[−+]\d\.\d\d"
    found = re.findall(rf"({number})(?: points)? (\({number} to {number}\))", section)
    assert len(found) > 5
    assert [" ".join(pair) for pair in found if " ".join(pair) not in sources] == []


def test_human_and_random_noise_are_not_confused() -> None:
    text = " ".join((ROOT / "README.md").read_text("utf-8").split())
    beyond = (ROOT / "BEYOND.md").read_text("utf-8")
    for setting, words in (
        (
            "cifar10-worst",
            {
                "smoothing": "label smoothing",
                "symmetric": "symmetric cross-entropy",
                "alone": "tunable (the paper’s)",
            },
        ),
        (
            "cifar10-symmetric-40",
            {
                "both": "tunable, smoothing 0.2",
                "symmetric": "symmetric cross-entropy",
                "alone": "tunable (the paper’s)",
            },
        ),
    ):
        table = beyond.split(f"<summary>{setting}</summary>")[1].split("</details>")[0]
        rows = {line.split(" | ")[0].strip("| "): line.split(" | ") for line in table.splitlines()}
        for word, method in words.items():
            assert f"{word} {rows[method][4]}" in text, (setting, method)


def test_the_papers_rows_on_a_gpu() -> None:
    """What the documents say of the fleet, from the committed points and their estimate."""
    notes, page = (
        " ".join((ROOT / name).read_text("utf-8").split())
        for name in ("docs/notes/fleet.md", "docs/fleet.md")
    )

    def side_by_side(name: str) -> list[dict[str, str]]:
        """As many fleets as `python -m paper run` has."""
        return [line for line in read(name) if line["fleets_at_once"] == str(FLEETS_ON_A_GPU)]

    *networks, total = side_by_side("fleet_rows_estimate.csv")
    assert total["network"] == "all rows"
    minutes, floor = total["minutes"], total["memory_floor_minutes"]
    assert f"is {total['share_of_memory_floor']} ({minutes} minutes" in notes
    assert f"the floor is {floor})" in notes
    assert f"{minutes} minutes, where the lower bound is {floor}" in page

    def low_and_high(lines: list[dict[str, str]]) -> str:
        shares = [float(line["share_of_memory_floor"]) for line in lines]
        return f"{min(shares):.2f} to {max(shares):.2f}"

    groups = {
        r"one hidden layer, inputs of 3072": "(?!mnist).* 1x",
        r"three or five layers of 800": ".* [35]x800",
        r"three or five layers of 400": ".* [35]x400",
        r"MNIST, one hidden layer": "mnist 1x",
    }
    for words, pattern in groups.items():
        lines = [line for line in networks if re.match(pattern, line["network"])]
        assert re.search(rf"\| {words}[^|]*\| {low_and_high(lines)} \|", notes), words
    points = side_by_side("fleet_rows_cuda.csv")
    for trials in ("8", "32"):
        shares = low_and_high([line for line in points if line["trials"] == trials])
        assert re.search(rf"with {trials} trials (?:have a share of )?{shares}", notes)


def test_compiled_losses_on_a_gpu() -> None:
    """The lines of two shapes in the table of graphs."""
    lines = read("loss_again_cuda.csv")
    ways = ("{}", "{}, compiled", "{}, scaled", "{}, none")
    for dtype, shape in (("bfloat16", "262144x10"), ("float32", "128x10")):
        wanted = {"form": "logits", "dtype": dtype, "shape": shape}
        found = {
            line["way"]: f"{float(line['both_ms_median']):.4f}"
            for line in lines
            if wanted.items() <= line.items()
        }
        mean, graph, scaled, none = (found[way.format("ours k=0.5")] for way in ways)
        start = f"{dtype} {shape.replace('x', '×')}, later run"
        (row,) = (row for row in rows_of_tables("docs/kernels.md") if row[0] == start)
        assert row[1:5] == [mean, graph, none, scaled]
        assert row[6] == found["torch.compile"]


def test_other_losses_on_a_gpu() -> None:
    """The table of docs/speed.md on binary, scaled and compiled losses."""
    rows = [row for row in rows_of_tables("docs/speed.md") if re.match("labels, |binary, ", row[0])]
    assert len(rows) == 10
    walls = {
        (line["form"], line["dtype"], line["shape"], line["way"]): float(line["wall_ms_median"])
        for line in read("loss_again_cuda.csv")
    }
    for case, *cells in rows:
        match = re.fullmatch(r"(labels|binary), (\w+) ([\d×]+)(, [^(]+)?( \(.*\))?", case)
        assert match is not None, case
        way = (match[4] or "").rstrip().replace("no reduction", "none")
        form = "logits" if match[1] == "labels" else "binary"
        plain = "cross_entropy" if form == "logits" else "binary_cross_entropy"
        where = (form, match[2], shape_of(match[3]))
        ours = walls[*where, f"ours k=0.5{way}"]
        theirs = walls[*where, "torch.compile" if way == ", compiled" else plain]
        assert cells == [f"{number:.2f}" for number in (ours, theirs, ours / theirs)], case


def test_any_network_on_a_gpu() -> None:
    """The tables of docs/fleet.md, its words about them, and the goals in the notes."""
    lines = read("modules_cuda.csv")
    networks = list(dict.fromkeys(line["network"] for line in lines))
    ways = list(dict.fromkeys(line["way"] for line in lines))
    found = {(line["network"], line["way"]): line for line in lines}
    text = (ROOT / "docs/fleet.md").read_text("utf-8")
    notes = " ".join((ROOT / "docs/notes/fleet.md").read_text("utf-8").split())
    section = text.split("### Times on an H200")[1].split("### ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if line.startswith(tuple(f"| {network.split()[0]} " for network in networks))
    ]
    assert len(networks) == 4
    assert len(rows) == 2 * len(networks)

    def spent(network: str, way: str) -> float:
        return float(found[network, way]["microseconds"])

    def all_in(network: str, way: str) -> float:
        line = found[network, way]
        trained = int(line["models"]) * int(line["steps"])
        return spent(network, way) + float(line["first_seconds"]) * 1e6 / trained

    *others, ours = ways
    words = " ".join(section.split())
    for network, speeds, totals in zip(networks, rows[:4], rows[4:], strict=True):
        assert speeds[0].split()[0] == totals[0] == network.split()[0]
        line = found[network, ours]
        assert speeds[1:] == [
            *(f"{spent(network, way):,.0f}" for way in others),
            f"**{spent(network, ours):,.0f}**",
            f"{float(line['times_eager']):.1f}",
            f"{float(line['busy']):.0%}",
        ]
        ray = "8 trials of Ray Tune"
        assert totals[1:] == [f"{all_in(network, way):,.0f}" for way in (ray, ours)]
        assert spent(network, ours) < min(spent(network, way) for way in others)
        if (busy := re.search(rf"\| {totals[0]}: GPU busy [^|]*\| (\d+%)", notes)) is not None:
            assert busy[1] == speeds[-1]
        else:
            assert re.search(rf"\| {totals[0]}: [^|]*\| {speeds[-2]} \|", notes)
        assert f"→ {speeds[1]} |" in notes
        assert f"→ {speeds[-3].strip('*')} |" in notes
    for count in (4, 8):
        starts = [
            float(line["first_seconds"])
            for line in lines
            if line["way"] == f"{count} trials of Ray Tune"
        ]
        assert f"{min(starts):.0f} to {max(starts):.0f} s for {count}" in words
    ahead = spent(networks[-1], "compiled, reduce-overhead") / spent(networks[-1], ours) - 1
    assert f"only {ahead:.0%} ahead of `torch.compile`" in words
    firsts = [float(found[network, ours]["first_seconds"]) for network in networks]
    assert f"{min(firsts):.1f} to {max(firsts):.1f} s" in words


def test_all_checks_of_networks_on_a_gpu_passed() -> None:
    checks = read("check_modules_cuda.csv")
    assert {line["ok"] for line in checks} == {"True"}
    assert f"All {len(checks)} checks pass" in (ROOT / "docs/fleet.md").read_text("utf-8")
