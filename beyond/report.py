"""BEYOND.md and its pictures, from the ledgers."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from beyond import PROGRAM, findings, pictures
from beyond.arrays import SCORES
from beyond.findings import NOT_RUN, Compared, Line, Table
from beyond.questions import ORDER
from beyond.run import SESSIONS
from pseudograd.fleet import Ramp
from pseudograd.words import fraction

ROOT = Path(__file__).parents[1]
COMMITTED = ROOT / "beyond" / "results"


def documents(results: Path, *, smoke: bool = False) -> dict[Path, str]:
    """Return BEYOND.md and its pictures: of the committed ledgers, where they are committed.

    Args:
        results: The folder of all studies.
        smoke: Whether they were run in small.

    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    committed = results.resolve() == COMMITTED
    target = ROOT if committed else results
    places = (
        {"beyond/pictures": ROOT / "beyond/pictures"}
        if committed
        else {"pictures": results / "pictures"}
    )
    ((shown, folder),) = places.items()
    noise = [findings.table(one, results, smoke=smoke) for one in findings.settings_of("5")]
    clean = [
        findings.table(one, results, smoke=smoke)
        for one in findings.settings_of("1")
        if len(one.methods) > 1
    ]
    deep, rates = findings.depths(results, smoke=smoke), findings.best_rates(results, smoke=smoke)
    ramps = findings.schedules(results, smoke=smoke)
    texts = [findings.table(one, results, smoke=smoke) for one in findings.settings_of("2")]
    combined, suspects = findings.ensembles(results), findings.suspects(results)
    anchor = next(one for one in noise if one.setting.name == "anchor")
    noise.remove(anchor)
    drawn = {
        "5": pictures.differences(_panels(noise)),
        "1": pictures.differences(_panels(clean)),
        "1-depth": pictures.depths(deep) if deep else "",
        "7": pictures.best_rates(rates) if rates else "",
        "3": pictures.differences(
            {
                f"{one.setting.name}: minus constant {parameter(one.best)}": [
                    (f"k = {line.value}", line.against) for line in one.lines if line.against
                ]
                for one in ramps
            }
        ),
        "2": pictures.differences(_panels(texts)),
        "6": pictures.suspects(suspects) if suspects else "",
        "4": pictures.differences(
            {
                f"{one.setting.name}: ensembles minus that of k = 1": [*one.compared.items()]
                for one in combined
            }
        ),
    }
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "percent": percent, "points": points, "parameter": parameter, "number": number,
    }  # fmt: skip
    text = environment.get_template("BEYOND.md.jinja").render(
        program=PROGRAM,
        smoke=smoke,
        folder="beyond/results" if committed else "this folder",
        noise=noise,
        clean=clean,
        anchor=anchor,
        depths=deep,
        rates=rates,
        noise_claims=findings.noise_claims(noise),
        clean_claims=findings.clean_claims(clean),
        depth_claim=findings.depth_claim(deep),
        ramps=ramps,
        schedule_claims=findings.schedule_claims(ramps),
        texts=texts,
        sequence_claim=findings.sequence_claim(texts),
        ensembles=combined,
        ensemble_claim=findings.ensemble_claim(combined),
        suspects=suspects,
        suspects_claim=findings.suspects_claim(suspects),
        SCORES=SCORES,
        situations=situations(noise, clean),
        sessions=sessions(results),
        pictures={name: f"{shown}/{name}.svg" for name, picture in drawn.items() if picture},
        order=ORDER,
        NOT_RUN=NOT_RUN,
    )
    found = {target / "BEYOND.md": text}
    found |= {folder / f"{name}.svg": picture for name, picture in drawn.items() if picture}
    return found


def _panels(tables: Sequence[Table]) -> dict[str, list[tuple[str, Compared]]]:
    return {
        f"{table.setting.name}: minus cross-entropy’s": [
            (line.method.title, line.against) for line in table.lines if line.against
        ]
        for table in tables
    }


# --- the decision table --------------------------------------------------------------------------

_SITUATIONS = (
    ("1", "cifar10", "clean labels, a convolutional network with a tuned recipe, 10 classes"),
    ("1", "cifar100", "the same, 100 classes"),
    ("1", "svhn", "the same, house numbers"),
    ("5", "cifar10-worst", "labels by single people, two in five wrong (CIFAR-10N worst)"),
    ("5", "cifar100-human", "100 classes, labels by people, two in five wrong (CIFAR-100N)"),
    ("5", "cifar10-symmetric-40", "two in five labels wrong at random"),
    ("5", "cifar10-symmetric-60", "three in five labels wrong at random"),
    ("5", "cifar10-asymmetric-40", "similar classes confused"),
    ("5", "cifar100-symmetric-40", "100 classes, two in five labels wrong at random"),
)


def situations(noise: list[Table], clean: list[Table]) -> list[dict[str, Any]]:
    """Return the decision table: what to use in which situation, and what to expect.

    Of the methods that are better than cross-entropy, it names the one that validation chooses.
    """
    tables = {(one.setting.question, one.setting.name): one for one in (*noise, *clean)}
    rows = []
    for question, name, situation in _SITUATIONS:
        table = tables[question, name]
        known: dict[str, Any] = {"situation": situation, "question": question, "state": NOT_RUN}
        if table.lines and not table.missing:
            better = [one for one in table.lines if one.against and one.against.verdict == "better"]
            advised = min(better, key=lambda one: one.validation, default=None)
            known |= {
                "state": "done",
                "line": advised,
                "plain": table.line("ce"),
                "tunable": table.line("tunable"),
            }
        rows.append(known)
    return rows


def sessions(results: Path) -> list[dict[str, Any]]:
    """Return the sessions in which the studies ran."""
    path = results / SESSIONS
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# --- numbers in words ----------------------------------------------------------------------------


def percent(share: float, digits: int = 2) -> str:
    """Return a fraction in percent.

    Example:
        >>> percent(0.1234), percent(float("inf"))
        ('12.34', 'diverged')

    """
    return f"{100 * share:.{digits}f}" if math.isfinite(share) else "diverged"


def points(compared: Compared | None) -> str:
    """Return a difference in percentage points, its 95% interval and its verdict."""
    if compared is None:
        return "–"
    one = compared.difference
    if not math.isfinite(one.low):
        return "diverged"
    sign = [f"{100 * value:+.2f}".replace("-", "−") for value in (one.mean, one.low, one.high)]
    verdict = f"**{compared.verdict}**" if compared.verdict != "level" else "level"
    return f"{sign[0]} ({sign[1]} to {sign[2]}), {verdict}"


def parameter(line: Line) -> str:
    """Return a method's chosen value."""
    if line.method.parameter == "–":
        return "–"
    value = str(line.value) if isinstance(line.value, Ramp) else fraction(line.value)
    return f"{line.method.parameter} = {value}"


def number(value: float | None, digits: int = 3) -> str:
    """Return a number, or a dash for none."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"
