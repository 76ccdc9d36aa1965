"""What the ledgers show: comparisons of methods, and the verdicts that PLAN.md defines."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from beyond.arrays import jackknife, read_found
from beyond.methods import RAMPS, Method
from beyond.protocol import MethodProtocol
from beyond.questions import SETTINGS, VALIDATION, Experiment, Setting
from beyond.run import opened
from pseudograd.data.dataset import FOLDS
from pseudograd.fleet import Outcome, Ramp
from pseudograd.search import Difference, paired_difference
from pseudograd.search.study import Study

LEVEL = 0.05
BETTER, WORSE, EVEN = "better", "worse", "level"


@dataclass(frozen=True)
class Compared:
    """A paired difference between two methods.

    Attributes:
        difference: The mean, with its 95% interval for this comparison alone.
        p: The p-value, corrected by Holm's method if the table makes several comparisons.
        more_is_better: True for AUROC, False for errors.

    """

    difference: Difference
    p: float
    more_is_better: bool = False

    @property
    def verdict(self) -> str:
        """Whether the first method is better, worse or level."""
        if not self.p < LEVEL:
            return EVEN
        return BETTER if (self.difference.mean < 0) != self.more_is_better else WORSE

    @classmethod
    def by_student(cls, mean: float, error: float, freedom: int) -> Compared:
        """Return the comparison of a mean difference with its standard error, by Student's t."""
        from scipy.stats import t

        reach = float(t.ppf(0.975, freedom)) * error
        p = 2 * float(t.sf(abs(mean) / error, freedom)) if error else float(mean == 0)
        return cls(Difference(mean, mean - reach, mean + reach), p)


@dataclass(frozen=True)
class Line:
    """A finished method in a setting.

    Attributes:
        method: The method.
        value: The chosen value of its parameter.
        rate: The chosen learning rate.
        validation: The validation error of that configuration, a fraction.
        outcomes: The final networks, by seed.
        trainings: The number of networks trained, search included.
        on_edge: Whether the chosen rate is still the lowest or highest one tried.
        against: The comparison with cross-entropy; None for itself.
        tried: The validation errors of the search, by value and rate.

    """

    method: Method
    value: float | Ramp
    rate: float
    validation: float
    outcomes: tuple[Outcome, ...]
    trainings: int
    on_edge: bool
    against: Compared | None = None
    tried: Mapping[tuple[float | Ramp, float], float] = field(default_factory=dict)

    @property
    def unlearned(self) -> dict[float | Ramp, list[float]]:
        """The values that never learned, with the errors of their configurations.

        At every rate, their validation accuracy is below half of the chosen configuration's.
        """
        by_value: dict[float | Ramp, list[float]] = {}
        for (value, _), error in self.tried.items():
            by_value.setdefault(value, []).append(error)
        half = (1 - self.validation) / 2
        return {value: errors for value, errors in by_value.items() if 1 - min(errors) < half}

    def values(self, name: str) -> list[float]:
        """Return a measure of every final network; infinity where a training diverged."""
        if name == "error":
            return [one.error for one in self.outcomes]
        if name == "last_error":
            return [(one.measures or {"last_error": one.error})[name] for one in self.outcomes]
        return [(one.measures or {}).get(name, math.inf) for one in self.outcomes]

    def mean(self, name: str) -> float:
        """Return the mean of a measure."""
        return statistics.fmean(self.values(name))

    def epochs_to(self, target: float) -> float | None:
        """Return the mean number of epochs to a validation error; None if one never reaches it."""
        found = []
        for one in self.outcomes:
            reached = [at for at, error in enumerate(one.curve, 1) if error <= target]
            if not reached:
                return None
            found.append(reached[0])
        return statistics.fmean(found)


@dataclass(frozen=True)
class Table:
    """A setting: its finished methods, and the missing ones.

    Attributes:
        setting: The setting.
        lines: The finished methods, in the order of the plan.
        missing: The methods that are not finished.
        noise_rate: The share of wrong training labels; None before the first run.
        about: Hardware, versions, commits and data hashes of the runs; empty before the first.
        validated: The number of validation examples; 0 before the first run.

    """

    setting: Setting
    lines: tuple[Line, ...]
    missing: tuple[Method, ...]
    noise_rate: float | None
    about: Mapping[str, str]
    validated: int = 0

    def line(self, name: str) -> Line | None:
        """Return the line of a method, if it is finished."""
        return next((one for one in self.lines if one.method.name == name), None)

    def standard_error(self, error: float) -> float:
        """Return the standard error of one network's validation error."""
        return math.sqrt(error * (1 - error) / self.validated)

    @property
    def to_use(self) -> list[Line]:
        """The methods better than cross-entropy that validation does not tell apart, best first.

        Their validation error is within one standard error of the lowest among the better ones.
        """
        better = [one for one in self.lines if one.against and one.against.verdict == BETTER]
        if not better:
            return []
        better.sort(key=lambda one: one.validation)
        lowest = better[0].validation
        return [one for one in better if one.validation <= lowest + self.standard_error(lowest)]


def compared(first: Line, second: Line, measure: str = "error") -> Compared:
    """Compare two methods, paired over seeds."""
    return _compared(first.values(measure), second.values(measure))


def _compared(one: list[float], other: list[float], overlap: float = 0.0) -> Compared:
    """Compare paired values.

    ``overlap`` is Nadeau and Bengio's (2003) correction for values whose training sets overlap:
    the number of test examples over that of training examples, 0 for independent values.
    """
    differences = [a - b for a, b in zip(one, other, strict=True)]
    if not all(map(math.isfinite, differences)):
        return Compared(paired_difference(one, other), 1.0)
    count = len(differences)
    error = statistics.stdev(differences) * math.sqrt(1 / count + overlap)
    return Compared.by_student(statistics.fmean(differences), error, count - 1)


def holm(ps: Sequence[float]) -> list[float]:
    """Return p-values corrected by Holm's method.

    Example:
        >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
        [0.03, 0.06, 0.06]

    """
    corrected, running = [1.0] * len(ps), 0.0
    for rank, at in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        running = max(running, min(1.0, (len(ps) - rank) * ps[at]))
        corrected[at] = running
    return corrected


def corrected(several: Sequence[Compared], planned: int) -> list[Compared]:
    """Return the comparisons of one table with p-values corrected for all planned ones.

    Missing comparisons count as p = 1, so a verdict of "better" or "worse" stays when they arrive.
    """
    ps = holm([*(one.p for one in several), *[1.0] * (planned - len(several))])
    return [replace(one, p=p) for one, p in zip(several, ps, strict=False)]


# --- methods in a setting ------------------------------------------------------------------------


def table(setting: Setting, results: Path, *, smoke: bool = False) -> Table:
    """Return the results of a setting so far; every method is compared with cross-entropy."""
    lines, missing, studies = [], [], dict[str, Study]()
    for method in setting.methods:
        study = opened(Experiment(setting, method, smoke), results)
        if study is not None and study.finished:
            studies[method.title] = study
            lines += _lines(method, study)
        else:
            missing.append(method)
    plain = next((one for one in lines if one.method.name == "ce"), None)
    if plain is not None:
        others = [one for one in lines if one is not plain]
        planned = len(setting.methods) - 1
        against = corrected([compared(one, plain) for one in others], planned)
        by_name = {one.method.name: found for one, found in zip(others, against, strict=True)}
        lines = [replace(one, against=by_name.get(one.method.name)) for one in lines]
    facts: Mapping[str, Any] = next((study.data for study in studies.values()), {})
    return Table(
        setting,
        tuple(lines),
        tuple(missing),
        facts.get("noise_rate"),
        _about(studies),
        round(VALIDATION * facts.get("train_size", 0)),
    )


def _lines(method: Method, study: Study) -> list[Line]:
    """Return the configurations that have final networks: one, or one for each value."""
    protocol, ledger = study.protocol, study.ledger
    assert isinstance(protocol, MethodProtocol)
    searched = protocol.searched(ledger)
    tried = {(one.k, one.learning_rate): one.error for one in protocol.cells(ledger)}
    return [
        Line(
            method,
            value,
            rate,
            tried.get((value, rate), math.nan),
            tuple(ledger[trial] for trial in protocol.retrainings_of(value, rate)),
            len(ledger),
            len(searched[value]) > 1 and rate in (searched[value][0], searched[value][-1]),
            tried=tried,
        )
        for value, rate in protocol.chosen_cells(ledger)
    ]


@dataclass(frozen=True)
class WithOne:
    """What a tuner of k that includes k = 1 would choose by validation error.

    Attributes:
        value: The chosen k.
        plain: The lowest validation error of k = 1.
        rates: The number of learning rates that k = 1 gets.

    """

    value: float | Ramp
    plain: float
    rates: int


def with_one(table: Table) -> list[WithOne]:
    """Return the choices of a tuner that includes k = 1, which the method ``tunable`` lacks.

    First k = 1 has all rates of cross-entropy, then as many as each other k had.
    """
    tunable, plain = table.line("tunable"), table.line("ce")
    if tunable is None or plain is None:
        return []
    by_rate = {rate: error for (_, rate), error in plain.tried.items()}
    found = []
    for rates in (by_rate.keys(), by_rate.keys() & tunable.method.rates(table.setting.middle)):
        if rates:
            lowest = min(by_rate[rate] for rate in rates)
            value = 1.0 if lowest <= tunable.validation else tunable.value  # 1 wins a tie
            found.append(WithOne(value, lowest, len(rates)))
    return found


def each_value(setting: Setting, results: Path, *, smoke: bool = False) -> list[Line]:
    """Return the lines of a setting whose one study has final networks of every value."""
    (method,) = setting.methods
    study = opened(Experiment(setting, method, smoke), results)
    return _lines(method, study) if study is not None and study.finished else []


def _about(studies: Mapping[str, Study]) -> dict[str, str]:
    """Return where studies ran: hardware (if it differs, with their names), versions and data."""
    if not studies:
        return {}
    ran = [
        (name, study, one)
        for name, study in studies.items()
        for one in study.sessions
        if one["trials"]
    ]
    on: dict[str, list[str]] = {}
    for name, _, session in ran:
        names = on.setdefault(session["hardware"], [])
        names += [name] if name not in names else []
    hardware = [f"{one} ({', '.join(names)})" for one, names in on.items()]
    found = {
        "hardware": list(on) if len(on) == 1 else hardware,
        "commit": [session["commit"] for _, _, session in ran],
        "torch": [session["versions"].get("torch", "") for _, _, session in ran],
        "sha256": [str(study.data["sha256"])[:16] for _, study, _ in ran],
    }
    return {name: ", ".join(dict.fromkeys(values)) for name, values in found.items()}


def about(settings: Sequence[Setting], results: Path, *, smoke: bool = False) -> dict[str, str]:
    """Return where the finished studies of some settings ran, as `_about` does."""
    studies = {}
    for setting in settings:
        for method in setting.methods:
            study = opened(Experiment(setting, method, smoke), results)
            if study is not None and study.finished:
                several = len(setting.methods) > 1
                studies[f"{setting.name}: {method.name}" if several else setting.name] = study
    return _about(studies)


def settings_of(question: str) -> list[Setting]:
    """Return the settings of a question."""
    return [one for one in SETTINGS if one.question == question]


# --- claims --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """A claim of PLAN.md with its verdict.

    Attributes:
        name: Such as "5a".
        text: The claim.
        comparisons: By setting.
        verdict: "confirmed", "partly confirmed", "not confirmed", "refuted" or `NOT_RUN`.
        planned: The number of settings that PLAN.md asks for.

    """

    name: str
    text: str
    comparisons: Mapping[str, Compared]
    verdict: str
    planned: int = 0

    @property
    def shown(self) -> str:
        """The verdict, and the number of settings behind it if some are missing."""
        if not 0 < len(self.comparisons) < self.planned:
            return self.verdict
        return f"{self.verdict} so far ({len(self.comparisons)} of {self.planned} settings)"


NOT_RUN = "no setting finished yet"


def judged(verdicts: Sequence[str], *, all_needed: bool = False) -> str:
    """Return the verdict on a claim from those of its settings.

    Args:
        verdicts: One for each finished setting.
        all_needed: Whether the claim must hold in all settings, not only in more than half.

    Example:
        >>> judged(["better", "better", "level"]), judged(["level", "worse"]), judged([])
        ('confirmed', 'not confirmed', 'no setting finished yet')

    """
    if not verdicts:
        return NOT_RUN
    holds, fails = verdicts.count(BETTER), verdicts.count(WORSE)
    if not holds:
        return "refuted" if fails > len(verdicts) / 2 else "not confirmed"
    most = holds == len(verdicts) if all_needed else holds > len(verdicts) / 2
    return "confirmed" if most and not fails else "partly confirmed"


ROBUST = ("gce", "sce", "nce-rce", "bi-tempered")


def noise_claims(tables: Sequence[Table]) -> list[Claim]:
    """Return the claims about label noise."""
    found: dict[str, dict[str, Compared]] = {name: {} for name in ("5a", "5b", "5c", "5d", "5e")}
    for one in tables:
        name = one.setting.name
        for claim, method in (("5a", "tunable"), ("5d", "redescending")):
            line = one.line(method)
            if line is not None and line.against is not None and not one.missing:
                found[claim][name] = line.against
        lines = {line.method.name: line for line in one.lines}
        if one.missing or not {"tunable-smoothing", "redescending", *ROBUST} <= lines.keys():
            continue
        published = min((lines[method] for method in ROBUST), key=lambda line: line.validation)
        added = corrected(
            [
                compared(lines["tunable-smoothing"], lines["smoothing"]),
                compared(lines["redescending"], lines["gce"]),
                compared(lines["redescending"], published),
            ],
            3,
        )
        for claim, comparison in zip(("5b", "5c", "5e"), added, strict=True):
            found[claim][name] = comparison
    texts = {
        "5a": "The tunable rule, at its best k other than 1, has a lower test error than "
        "cross-entropy.",
        "5b": "The best k other than 1 adds to label smoothing.",
        "5c": "k = 1/2 adds to a redescending rule.",
        "5d": "The redescending rule has a lower test error than cross-entropy.",
        "5e": "The redescending rule beats the best published robust loss.",
    }
    planned = sum(not one.setting.reserve for one in tables)
    return [_claim(name, texts[name], found[name], planned) for name in texts]


def clean_claims(tables: Sequence[Table]) -> list[Claim]:
    """Return the claims about well-tuned convolutional networks."""
    pairs = {"1a": ("tunable", "ce"), "1b": ("tunable-smoothing", "smoothing")}
    keys, plain = [], []
    for one in tables:
        for claim, (first, second) in pairs.items():
            lines = one.line(first), one.line(second)
            if lines[0] is not None and lines[1] is not None:
                keys.append((claim, one.setting.name))
                plain.append(compared(lines[0], lines[1]))
    found: dict[str, dict[str, Compared]] = {name: {} for name in pairs}
    for (claim, name), comparison in zip(
        keys, corrected(plain, len(pairs) * len(tables)), strict=True
    ):
        found[claim][name] = comparison
    texts = {
        "1a": "The best k other than 1 improves a well-tuned ResNet.",
        "1b": "The best k other than 1 improves it beside label smoothing.",
    }
    return [_claim(name, texts[name], found[name], len(tables), all_needed=True) for name in texts]


def _claim(
    name: str,
    text: str,
    comparisons: Mapping[str, Compared],
    planned: int,
    *,
    all_needed: bool = False,
) -> Claim:
    verdict = judged([one.verdict for one in comparisons.values()], all_needed=all_needed)
    return Claim(name, text, comparisons, verdict, planned)


# --- depth ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Depth:
    """The errors of each k at one depth.

    Attributes:
        blocks: Residual blocks per stage.
        errors: By k, the test errors of the final networks.

    """

    blocks: int
    errors: Mapping[float, list[float]]

    @property
    def preference(self) -> list[float]:
        """D = error(k = 2) - error(k = 1/2) by seed: below 0 if a large k is better."""
        return [a - b for a, b in zip(self.errors[2.0], self.errors[0.5], strict=True)]


def depths(results: Path, *, smoke: bool = False) -> list[Depth]:
    """Return the finished depths."""
    found = []
    for setting in settings_of("1"):
        if not setting.name.startswith("depth"):
            continue
        lines = each_value(setting, results, smoke=smoke)
        errors = {one.value: one.values("error") for one in lines if isinstance(one.value, float)}
        if errors:
            found.append(Depth(setting.spec.depth, errors))
    return found


def depth_claim(found: Sequence[Depth]) -> Claim:
    """Return the claim that deeper networks want a larger k."""
    text, name = "Deeper networks want a larger k.", "3 blocks against none"
    by_blocks = {one.blocks: one for one in found}
    if not {0, 3} <= by_blocks.keys() or not {0.5, 2.0} <= by_blocks[0].errors.keys():
        return Claim("1c", text, {}, NOT_RUN)
    comparison = _compared(by_blocks[3].preference, by_blocks[0].preference)
    names = {BETTER: "confirmed", WORSE: "refuted", EVEN: "not confirmed"}
    return Claim("1c", text, {name: comparison}, names[comparison.verdict])


# --- one learning rate for all k -----------------------------------------------------------------


@dataclass(frozen=True)
class BestRates:
    """The best learning rate of each k, for the paper's rule and for the rescaled one.

    Attributes:
        setting: The network.
        errors: By method and k, mean validation errors by rate.

    """

    setting: Setting
    errors: Mapping[str, Mapping[float, Mapping[float, float]]]

    def best(self, method: str) -> dict[float, float]:
        """Return log2 of the best rate of each k."""
        return {k: minimum(errors) for k, errors in self.errors[method].items()}

    def spread(self, method: str) -> float:
        """Return the range of the best rate over k, in doublings."""
        found = self.best(method).values()
        return max(found) - min(found)

    @property
    def verdict(self) -> str:
        """As PLAN.md defines it."""
        plain, rescaled = self.spread("tunable"), self.spread("normalized")
        if rescaled <= 1 and rescaled <= plain / 2:
            return "confirmed"
        return "refuted" if rescaled >= plain else "partly confirmed"


def minimum(errors: Mapping[float, float]) -> float:
    """Return log2 of the best rate, by a parabola through the lowest error and its neighbours.

    Example:
        >>> minimum({1.0: 0.3, 2.0: 0.2, 4.0: 0.3}), minimum({1.0: 0.1, 2.0: 0.2, 4.0: 0.3})
        (1.0, 0.0)

    """
    rates = sorted(errors)
    at = min(range(len(rates)), key=lambda one: errors[rates[one]])
    middle = math.log2(rates[at])
    if at in (0, len(rates) - 1):
        return middle
    low, here, high = (errors[rates[at + step]] for step in (-1, 0, 1))
    bend = low - 2 * here + high
    step = math.log2(rates[at + 1]) - middle
    return middle + step * (low - high) / (2 * bend) if bend > 0 else middle


def best_rates(results: Path, *, smoke: bool = False) -> list[BestRates]:
    """Return the networks of question 7 that are finished."""
    found = []
    for setting in settings_of("7"):
        errors: dict[str, dict[float, dict[float, float]]] = {}
        for method in setting.methods:
            study = opened(Experiment(setting, method, smoke), results)
            if study is None or not study.finished:
                break
            by_k: dict[float, dict[float, float]] = {}
            for cell in study.protocol.cells(study.ledger):
                by_k.setdefault(float(cell.k), {})[cell.learning_rate] = cell.error  # type: ignore[arg-type]
            errors[method.name] = by_k
        else:
            found.append(BestRates(setting, errors))
    return found


# --- k over training -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Schedules:
    """Ramps and constant k on one network.

    Attributes:
        setting: The network.
        lines: All of them, constant k first; ramps are compared with the best constant k.
        best: The constant k of lowest validation error.
        rising: Rising minus falling ramps, the mean over pairs with the same ends.

    """

    setting: Setting
    lines: tuple[Line, ...]
    best: Line
    rising: Compared

    @property
    def wins(self) -> list[Line]:
        """The ramps that are better than the best constant k."""
        return [one for one in self.lines if one.against and one.against.verdict == BETTER]


def schedules(results: Path, *, smoke: bool = False) -> list[Schedules]:
    """Return the finished networks of question 3."""
    found = []
    for setting in settings_of("3"):
        lines = each_value(setting, results, smoke=smoke)
        if not lines:
            continue
        constant = [one for one in lines if not isinstance(one.value, Ramp)]
        ramps = [one for one in lines if isinstance(one.value, Ramp)]
        best = min(constant, key=lambda one: one.validation)
        against = corrected([compared(one, best) for one in ramps], len(ramps))
        ramps = [replace(one, against=two) for one, two in zip(ramps, against, strict=True)]
        by_value = {one.value: one.values("error") for one in ramps}
        pairs = [pair for pair in RAMPS if by_value.keys() >= set(pair)]
        up, down = (
            [statistics.fmean(several) for several in zip(*errors, strict=True)]
            for errors in zip(*([by_value[one] for one in pair] for pair in pairs), strict=True)
        )
        rising = _compared(up, down)
        found.append(Schedules(setting, (*constant, *ramps), best, rising))
    return found


def over_networks(found: Sequence[Schedules]) -> dict[str, Any]:
    """Return the numbers of ramps and of wins, and the p-values of wins if all ramps count.

    The verdicts of `Schedules` are corrected for the ramps of one network only.
    """
    ramps = [(one, network.best) for network in found for one in network.lines if one.against]
    planned = len(settings_of("3")) * 2 * len(RAMPS)
    again = corrected([compared(one, best) for one, best in ramps], planned)
    wins = [
        over_all.p
        for (one, _), over_all in zip(ramps, again, strict=True)
        if one.against and one.against.verdict == BETTER
    ]
    return {"ramps": len(ramps), "wins": wins}


def schedule_claims(found: Sequence[Schedules]) -> list[Claim]:
    """Return the claims about k over training."""
    rising = {one.setting.name: one.rising for one in found}
    wins = sum(bool(one.wins) for one in found)
    verdict = NOT_RUN
    if found:
        verdict = "confirmed" if wins >= 2 else "partly confirmed" if wins else "not confirmed"
    best = {
        one.setting.name: min((one.against for one in one.lines if one.against), key=_mean)
        for one in found
    }
    planned = len(settings_of("3"))
    text = "Easy first, hard later: rising ramps beat falling ones."
    return [
        Claim("3a", "Some ramp beats the best of k = 1/2, 1 and 2.", best, verdict, planned),
        _claim("3b", text, rising, planned),
    ]


def _mean(compared: Compared) -> float:
    return compared.difference.mean


# --- probabilities of networks -------------------------------------------------------------------


@dataclass(frozen=True)
class Summed:
    """The found.json of a setting of question 4 or 6, and the comparisons with k = 1.

    Attributes:
        setting: The setting.
        found: The content of the file.
        compared: By kind of ensemble, or by k.

    """

    setting: Setting
    found: Mapping[str, Any]
    compared: Mapping[str, Compared]


def _summed(question: str, results: Path) -> list[tuple[Setting, dict[str, Any]]]:
    folders = {
        setting.name: Experiment(setting, setting.methods[0]).folder(results)
        for setting in settings_of(question)
    }
    found = [(one, read_found(folders[one.name])) for one in settings_of(question)]
    return [(setting, one) for setting, one in found if one is not None]


def ensembles(results: Path) -> list[Summed]:
    """Return the finished settings of question 4; compare each kind with k = 1, scaled alike."""
    several = []
    for setting, found in _summed("4", results):
        compared = {}
        for kind, errors in found.items():
            name, _, way = kind.rpartition(", ")
            if name != "k = 1":
                mean, error = jackknife(errors, found[f"k = 1, {way}"])
                compared[kind] = Compared.by_student(mean, error, len(errors["without"]) - 1)
        several.append(Summed(setting, found, compared))
    return several


def ensemble_claim(several: Sequence[Summed]) -> Claim:
    """Return the claim about mixed ensembles."""
    mixed = {one.setting.name: one.compared["mixed, scaled"] for one in several}
    text = "An ensemble of mixed k has a lower test error than one of k = 1."
    return _claim("4", text, mixed, len(settings_of("4")), all_needed=True)


def suspects(results: Path) -> list[Summed]:
    """Return the finished settings of question 6; the AUROC of each k is compared with k = 1."""
    several = []
    for setting, found in _summed("6", results):
        others = [k for k in found if k != "1" and "1" in found]
        # A network is trained on four fifths of the examples and tested on the other fifth.
        plain = [
            replace(
                _compared(found[k]["by fold"], found["1"]["by fold"], 1 / (FOLDS - 1)),
                more_is_better=True,
            )
            for k in others
        ]
        comparisons = corrected(plain, len(others))
        several.append(Summed(setting, found, dict(zip(others, comparisons, strict=True))))
    return several


def suspects_claim(several: Sequence[Summed]) -> Claim:
    """Return the claim that some k finds more wrong labels than k = 1: the same k on both sets."""
    known = [one.compared for one in several if one.compared]

    def rank(k: str) -> tuple[int, float]:
        return (
            sum(one[k].verdict == BETTER for one in known),
            sum(one[k].difference.mean for one in known),
        )

    shown = {}
    if known:
        best = max(sorted(set.intersection(*map(set, known))), key=rank)
        shown = {
            f"{one.setting.name}, k = {best}": one.compared[best] for one in several if one.compared
        }
    text = "Some k ≠ 1 finds more wrong labels than k = 1."
    return _claim("6", text, shown, len(settings_of("6")), all_needed=True)


# --- sequences -----------------------------------------------------------------------------------


def sequence_claim(tables: Sequence[Table]) -> Claim:
    """Return the claim about recurrent networks and transformers; speakers count together."""
    found: dict[str, Compared] = {}
    speakers: list[tuple[float, float]] = []
    spoken = [one for one in tables if one.setting.name.startswith("speech")]
    for one in tables:
        first, second = one.line("tunable"), one.line("ce")
        if first is None or second is None:
            continue
        if one in spoken:
            speakers.append((first.mean("error"), second.mean("error")))
        else:
            found[one.setting.name] = compared(first, second)
    if speakers and len(speakers) == len(spoken):
        one_side, other = map(list, zip(*speakers, strict=True))
        found["speech"] = _compared(one_side, other, 1 / (len(spoken) - 1))
    planned = len(tables) - len(spoken) + bool(spoken)
    several = dict(zip(found, corrected([*found.values()], planned), strict=True))
    wins = sum(one.verdict == BETTER for one in several.values())
    verdict = NOT_RUN
    if several:
        verdict = "confirmed" if wins >= 3 else "partly confirmed" if wins else "not confirmed"
    text = "The best k other than 1 lowers the test error of recurrent networks and transformers."
    return Claim("2", text, several, verdict, planned)
