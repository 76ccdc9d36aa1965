"""BEYOND.md and its pictures, from the ledgers."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from beyond import PROGRAM, findings, pictures
from beyond.arrays import SCORES
from beyond.findings import NOT_RUN, Claim, Compared, Line, Table
from beyond.questions import experiments
from beyond.run import SESSIONS
from paper.figures import Picture
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
    committed = results.resolve() == COMMITTED
    root, pictures_at = (ROOT, "beyond/pictures") if committed else (results, "pictures")
    found = _found(results, smoke)
    drawn = {name: picture for name, picture in _drawn(found).items() if picture}
    text = _rendered(
        **found,
        about=functools.partial(findings.about, results=results, smoke=smoke),
        smoke=smoke,
        folder="beyond/results" if committed else "this folder",
        sessions=sessions(results),
        pictures={
            name: f"![{picture.title}]({pictures_at}/{name}.svg)" for name, picture in drawn.items()
        },
    )
    files = {root / "BEYOND.md": text}
    return files | {
        root / pictures_at / f"{name}.svg": picture.svg for name, picture in drawn.items()
    }


def _found(results: Path, smoke: bool) -> dict[str, Any]:
    """Return tables and claims, by the names that the template uses."""

    def tables(question: str) -> list[Table]:
        return [
            findings.table(one, results, smoke=smoke)
            for one in findings.settings_of(question)
            if len(one.methods) > 1
        ]

    noise, clean, texts = tables("5"), tables("1"), tables("2")
    (anchor,) = (one for one in noise if one.setting.name == "anchor")
    noise.remove(anchor)
    depths, ramps = findings.depths(results, smoke=smoke), findings.schedules(results, smoke=smoke)
    ensembles, suspects = findings.ensembles(results), findings.suspects(results)
    schedule_claims = findings.schedule_claims(ramps)
    sequence_claim = findings.sequence_claim(texts)
    ensemble_claim = findings.ensemble_claim(ensembles)
    suspects_claim = findings.suspects_claim(suspects)
    found_by = next(iter(suspects_claim.comparisons), "").rpartition(", ")[2]  # a k
    overall = findings.over_networks(ramps)
    known = situations(noise, clean)
    answers = [
        _answer("recurrent networks and transformers", sequence_claim, "tune k", "k = 1"),
        _answer(
            "k that changes during training",
            schedule_claims[0],
            f"k = {_winners(ramps)}",
            "a constant k",
            "against the best of k = 1/2, 1 and 2",
            f"; better in {len(overall['wins'])} of {overall['ramps']} comparisons",
        ),
        _answer(
            "an ensemble",
            ensemble_claim,
            "one network of each k, each scaled by its temperature",
            "networks of k = 1",
            "mixed k against k = 1, scaled",
            "".join(
                f"; raw: {one.setting.name} {points(raw)}, {verdict(raw)}"
                for one in ensembles
                if (raw := one.compared.get("mixed, raw"))
            ),
        ),
        _answer(
            "looking for wrong labels",
            suspects_claim,
            f"{found_by} by self-confidence{_or_margin(suspects, found_by)}",
            "k = 1",
            "AUROC by self-confidence against k = 1, above 0 is better",
            "".join(f"; {by_margin(one)}" for one in suspects),
        ),
    ]
    return {
        "noise": noise,
        "clean": clean,
        "texts": texts,
        "anchor": anchor,
        "depths": depths,
        "depth_settings": [one for one in findings.settings_of("1") if len(one.methods) == 1],
        "rates": findings.best_rates(results, smoke=smoke),
        "ramps": ramps,
        "overall": overall,
        "ensembles": ensembles,
        "suspects": suspects,
        "noise_claims": findings.noise_claims(noise),
        "clean_claims": findings.clean_claims(clean),
        "depth_claim": findings.depth_claim(depths),
        "schedule_claims": schedule_claims,
        "sequence_claim": sequence_claim,
        "ensemble_claim": ensemble_claim,
        "suspects_claim": suspects_claim,
        "situations": known,
        "answers": [one for one in answers if one["use"]],
        "open": [
            *(row["situation"] for row in known if not row["tunable"]),
            *(one["situation"] for one in answers if not one["use"]),
        ],
    }


def _drawn(found: dict[str, Any]) -> dict[str, Picture | None]:
    """Return the pictures by name; None without data."""
    of_methods = "Test error of each method minus cross-entropy’s, with 95% intervals"
    ramps = {
        f"{one.setting.name}: minus constant {parameter(one.best)}": [
            (f"k = {line.value}", line.against) for line in one.lines if line.against
        ]
        for one in found["ramps"]
    }
    ensembles = {one.setting.name: [*one.compared.items()] for one in found["ensembles"]}
    return {
        "5": pictures.differences(_panels(found["noise"]), of_methods),
        "1": pictures.differences(_panels(found["clean"]), of_methods),
        "1-depth": pictures.depths(found["depths"]),
        "7": pictures.best_rates(found["rates"]),
        "3": pictures.differences(
            ramps, "Test error of each ramp minus that of the best constant k, with 95% intervals"
        ),
        "2": pictures.differences(_panels(found["texts"]), of_methods),
        "6": pictures.suspects(found["suspects"]),
        "4": pictures.differences(
            ensembles, "Test error of ensembles minus that of k = 1, with 95% intervals"
        ),
    }


def _panels(tables: Sequence[Table]) -> dict[str, list[tuple[str, Compared]]]:
    return {
        table.setting.name: [
            (line.method.title, line.against) for line in table.lines if line.against
        ]
        for table in tables
    }


def _rendered(**numbers: Any) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        one.__name__: one
        for one in (percent, points, p_value, verdict, parameter, number, best_ranking, unlearned)
    }
    environment.filters |= {"fraction": fraction, "with_one": findings.with_one}
    template = environment.get_template("BEYOND.md.jinja")
    text = template.render(numbers, program=PROGRAM, SCORES=SCORES)
    return re.sub(r"\n{3,}", "\n\n", text)  # parts may be empty


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
    """Return the decision table: what to use in which situation, and what to expect."""
    tables = {(one.setting.question, one.setting.name): one for one in (*noise, *clean)}
    rows = []
    for question, name, situation in _SITUATIONS:
        table = tables[question, name]
        tunable = table.line("tunable")
        rows.append(
            {
                "situation": situation,
                "lines": table.to_use,
                "tunable": tunable if tunable and tunable.against else None,
                "missing": len(table.missing),
                "methods": len(table.setting.methods),
            }
        )
    return rows


def _answer(
    situation: str,
    claim: Claim,
    yes: str,
    no: str,
    measure: str = "against k = 1",
    note: str = "",
) -> dict[str, str]:
    """Return what to do in a situation, from the verdict on a claim; ``use`` is "" if unknown.

    Args:
        situation: The situation.
        claim: The claim that decides.
        yes: What to use if the claim holds.
        no: What to use otherwise.
        measure: What the differences of the claim compare.
        note: What else to know, after the differences.

    """
    better = [
        name.partition(",")[0]
        for name, one in claim.comparisons.items()
        if one.verdict == findings.BETTER
    ]
    mixed = f"{yes} on {' and '.join(better)}; otherwise {no}"
    uses = {"confirmed": yes, "partly confirmed": mixed, NOT_RUN: ""}
    change = "; ".join(
        f"{name} {points(one)}, {verdict(one)}" for name, one in claim.comparisons.items()
    )
    use = uses.get(claim.verdict, no)
    left = claim.planned - len(claim.comparisons)
    if use and left > 0:
        situation += f" ({left} of {claim.planned} settings not finished)"
    return {"situation": situation, "use": use, "change": f"{measure}: {change}{note}"}


def _or_margin(suspects: Sequence[findings.Summed], found_by: str) -> str:
    """Return the k whose margin is as good, wherever the self-confidence of a k is better."""
    as_good: set[str] | None = None
    for one in suspects:
        k = found_by.removeprefix("k = ")
        if one.compared and one.compared[k].verdict == findings.BETTER:
            wanted = one.found[k]["self-confidence"]["auroc"]
            own = {k for k, scores in one.found.items() if scores["margin"]["auroc"] >= wanted}
            as_good = own if as_good is None else as_good & own
    return f" (k = {', '.join(sorted(as_good))} by margin is no worse)" if as_good else ""


def _winners(ramps: Sequence[findings.Schedules]) -> str:
    """Return the ramps that beat a constant k somewhere."""
    values = sorted({str(line.value) for one in ramps for line in one.wins})
    return ", ".join(values)


def not_reported(results: Path) -> list[str]:
    """Return the names of studies in a folder that are not in `beyond.questions`."""
    there = {path.parent.relative_to(results).as_posix() for path in results.rglob("run.json")}
    return sorted(there - {one.name for one in experiments()})


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


def best_ranking(one: findings.Summed) -> str:
    """Return the way to rank labels, and the k, with the highest AUROC."""
    aurocs = {
        (score, k): scores[score]["auroc"] for k, scores in one.found.items() for score in SCORES
    }
    score, k = max(aurocs, key=lambda key: aurocs[key])
    plain = f", with k = 1 {percent(aurocs[score, '1'])}%" if k != "1" else ""
    return f"{one.setting.name} by {score} with k = {k}, {percent(aurocs[score, k])}%{plain}"


def by_margin(one: findings.Summed) -> str:
    """Return the highest AUROC by self-confidence and by margin; they are not tested."""
    best = [
        f"{percent(found[k])}% by {score} (k = {k})"
        for score in SCORES[:2]
        if (found := {k: scores[score]["auroc"] for k, scores in one.found.items()})
        if (k := max(found, key=found.__getitem__))
    ]
    return f"{one.setting.name}: at best {' and '.join(best)}"


def unlearned(tables: Sequence[Table], name: str) -> str:
    """Return the values of a method that never learned, with their validation errors."""
    lines = {table.setting.name: line for table in tables if (line := table.line(name))}
    found = {where: line.unlearned for where, line in lines.items() if line.unlearned}
    if not found:
        return ""
    method = next(iter(lines.values())).method
    values = list(dict.fromkeys(value for some in found.values() for value in some))
    errors = ", ".join(
        f"{percent(min(all_of), 0)} to {percent(max(all_of), 0)}% on {where}"
        for where, some in found.items()
        if (all_of := [error for errors in some.values() for error in errors])
    )
    return (
        f"{len(values)} of its {len(method.values)} values, {method.parameter} ="
        f" {' and '.join(map(fraction, values))} (validation errors of {errors})"
    )


def number(value: float | None, digits: int = 3) -> str:
    """Return a number, or a dash for none."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"
