"""BEYOND.md and its pictures, from the ledgers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from beyond import PROGRAM, findings, pictures
from beyond.arrays import SCORES
from beyond.findings import NOT_RUN, Claim, Compared, Line, Table
from beyond.run import SESSIONS
from pseudograd.fleet import Ramp
from pseudograd.words import fraction

ROOT = Path(__file__).parents[1]
COMMITTED = ROOT / "beyond" / "results"


def documents(results: Path, *, smoke: bool = False) -> dict[Path, str]:
    """Return the text of BEYOND.md and of its pictures, by path.

    For the committed ledgers these are the committed files; otherwise they go beside the ledgers.

    Args:
        results: The folder of all studies.
        smoke: Whether the ledgers are of a smoke test.

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
    of_methods = "Test error of each method minus cross-entropy’s, with 95% intervals"
    drawn = {
        "5": pictures.differences(_panels(noise), of_methods),
        "1": pictures.differences(_panels(clean), of_methods),
        "1-depth": pictures.depths(deep),
        "7": pictures.best_rates(rates),
        "3": pictures.differences(
            {
                f"{one.setting.name}: minus constant {parameter(one.best)}": [
                    (f"k = {line.value}", line.against) for line in one.lines if line.against
                ]
                for one in ramps
            },
            "Test error of each ramp minus that of the best constant k, with 95% intervals",
        ),
        "2": pictures.differences(_panels(texts), of_methods),
        "6": pictures.suspects(suspects),
        "4": pictures.differences(
            {one.setting.name: [*one.compared.items()] for one in combined},
            "Test error of ensembles minus that of k = 1, with 95% intervals",
        ),
    }
    known = situations(noise, clean)
    claims = {
        "schedule_claims": findings.schedule_claims(ramps),
        "sequence_claim": findings.sequence_claim(texts),
        "ensemble_claim": findings.ensemble_claim(combined),
        "suspects_claim": findings.suspects_claim(suspects),
    }
    answers = _answers(**claims)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "percent": percent, "points": points, "p_value": p_value, "verdict": verdict,
        "parameter": parameter, "number": number,
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
        texts=texts,
        ensembles=combined,
        suspects=suspects,
        SCORES=SCORES,
        situations=known,
        answers=answers,
        open=[
            *(row["situation"] for row in known if not row["tunable"]),
            *(situation for situation, claim, _ in answers if claim.verdict == NOT_RUN),
        ],
        **claims,
        sessions=sessions(results),
        pictures={
            name: f"![{picture.title}]({shown}/{name}.svg)"
            for name, picture in drawn.items()
            if picture
        },
    )
    found = {target / "BEYOND.md": re.sub(r"\n{3,}", "\n\n", text)}  # parts may be empty
    found |= {folder / f"{name}.svg": picture.svg for name, picture in drawn.items() if picture}
    return found


def _panels(tables: Sequence[Table]) -> dict[str, list[tuple[str, Compared]]]:
    return {
        table.setting.name: [
            (line.method.title, line.against) for line in table.lines if line.against
        ]
        for table in tables
    }


# --- the decision table --------------------------------------------------------------------------

_SITUATIONS = (
    ("1", "cifar10", "a convolutional network with a tuned recipe, clean labels, 10 classes"),
    ("1", "cifar100", "the same with 100 classes"),
    ("1", "svhn", "the same on house numbers"),
    ("5", "cifar10-worst", "10 classes, human labels, 40% wrong (CIFAR-10N worst)"),
    ("5", "cifar100-human", "100 classes, human labels, 40% wrong (CIFAR-100N)"),
    ("5", "cifar10-symmetric-40", "10 classes, 40% of the labels wrong at random"),
    ("5", "cifar10-symmetric-60", "10 classes, 60% of the labels wrong at random"),
    ("5", "cifar10-asymmetric-40", "10 classes, similar ones confused, 20% of the labels wrong"),
    ("5", "cifar100-symmetric-40", "100 classes, 40% of the labels wrong at random"),
)


def situations(noise: list[Table], clean: list[Table]) -> list[dict[str, Any]]:
    """Return the decision table: what to use in which situation, and what to expect.

    Among the methods that are better than cross-entropy it names the one that validation chooses.
    """
    tables = {(one.setting.question, one.setting.name): one for one in (*noise, *clean)}
    rows = []
    for question, name, situation in _SITUATIONS:
        table = tables[question, name]
        better = [one for one in table.lines if one.against and one.against.verdict == "better"]
        tunable = table.line("tunable")
        rows.append(
            {
                "situation": situation,
                "line": min(better, key=lambda one: one.validation, default=None),
                "tunable": tunable if tunable and tunable.against else None,
                "missing": len(table.missing),
                "methods": len(table.setting.methods),
            }
        )
    return rows


def _answers(
    schedule_claims: list[Claim],
    sequence_claim: Claim,
    ensemble_claim: Claim,
    suspects_claim: Claim,
) -> list[tuple[str, Claim, dict[str, str]]]:
    """Return for the other questions what to do, by the verdict on their claim."""
    several = (
        ("recurrent networks and transformers", sequence_claim, "tune k", "k = 1", "2"),
        ("k that changes during training", schedule_claims[0], "a ramp", "a constant k", "3"),
        ("an ensemble", ensemble_claim, "one network of each k", "networks of one k", "4"),
        ("looking for wrong labels", suspects_claim, "tune k", "k = 1", "6"),
    )
    return [
        (
            situation,
            claim,
            {
                "confirmed": yes,
                "partly confirmed": f"see question {question}",
                "not confirmed": no,
                "refuted": no,
            },
        )
        for situation, claim, yes, no, question in several
    ]


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
    """Return a difference in percentage points, with its 95% interval."""
    if compared is None:
        return "–"
    one = compared.difference
    if not math.isfinite(one.low):
        return "diverged"
    sign = [f"{100 * value:+.2f}".replace("-", "−") for value in (one.mean, one.low, one.high)]
    return f"{sign[0]} ({sign[1]} to {sign[2]})"


def p_value(compared: Compared | None) -> str:
    """Return a p-value with three digits after the point.

    Example:
        >>> difference = findings.Difference(-0.1, -0.2, 0.0)
        >>> p_value(Compared(difference, 0.0783)), p_value(Compared(difference, 0.0002))
        ('0.078', '< 0.001')

    """
    if compared is None:
        return "–"
    return "< 0.001" if compared.p < 0.001 else f"{compared.p:.3f}"


def verdict(compared: Compared | None) -> str:
    """Return the verdict, in bold unless it is "level"."""
    if compared is None:
        return "–"
    return "level" if compared.verdict == "level" else f"**{compared.verdict}**"


def parameter(line: Line) -> str:
    """Return a method's chosen value."""
    if line.method.parameter == "–":
        return "–"
    value = str(line.value) if isinstance(line.value, Ramp) else fraction(line.value)
    return f"{line.method.parameter} = {value}"


def number(value: float | None, digits: int = 3) -> str:
    """Return a number, or a dash for none."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"
