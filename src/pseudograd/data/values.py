"""Parse the strings of a column as numbers, dates and missing values."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from pandas import DatetimeIndex, Series

Code = str | float  # an entry that marks a missing value

# Spellings of a missing label. "None" and "-" may well be labels.
LABEL_GAPS = frozenset(["NA", "N/A", "n/a", "N.A.", "n.a.", "#N/A", "#NA", "NaN", "nan", "<NA>"])
LABEL_GAPS |= {"NULL", "Null", "null", "?", ""}
# "None" may be a category, such as no treatment, but never a number or a date.
TEXT_GAPS = LABEL_GAPS | {"-", "–", "—", "--", "."}
GAPS = TEXT_GAPS | {"None", "none", "NONE", "na", "Na"}

# Currency and percent signs.
_SIGNS = (*"$€£¥₹%‰", "USD", "EUR", "GBP", "CHF", "JPY", "CNY", "INR", "AUD", "CAD", "SEK", "NOK")
_USUAL = str.maketrans("\u00a0\u2009\u202f’−", "   '-")  # typographic spaces, ' and -
_DATES = (
    *("%d.%m.%Y", "%m/%d/%Y", "%d/%m/%Y", "%d-%m-%Y", "%m-%d-%Y", "%Y/%m/%d", "%Y.%m.%d"),
    *("%d.%m.%y", "%m/%d/%y", "%d/%m/%y", "%d-%m-%y", "%m-%d-%y"),
    *("%d %b %Y", "%d-%b-%Y", "%d-%b-%y", "%b %d, %Y", "%b %d %Y"),
    *("%d %B %Y", "%d. %B %Y", "%B %d, %Y", "%B %d %Y"),
)
_TIMES = ("%H:%M", "%H:%M:%S", "%H:%M:%S.%f", "%I:%M %p", "%I:%M:%S %p")
_ISO = "ISO8601"  # pandas' name for all its variants
_MOST_FORMATS = 3  # of dates in one column
_NEARLY_ALL = 0.9


@dataclass(frozen=True)
class Form:
    """The decimal and thousands separators of formatted numbers."""

    decimal: str
    thousands: str


_FORMS = tuple(Form(*marks) for marks in (".,", ",.", ". ", ", ", ".'", ",'"))


def distinct(entries: Series, *, texts: bool = True) -> tuple[NDArray[np.intp], list[Any]]:
    """Return the code of each entry, -1 if it is missing, and the distinct entries, as strings."""
    import pandas as pd

    if entries.dtype == np.float16:  # pandas cannot factorize float16
        entries = entries.astype(np.float32)
    places, values = pd.factorize(entries, use_na_sentinel=True)
    found = values.tolist()
    if not texts or entries.dtype == "str":
        return places, found
    again, names = pd.factorize(np.array([as_text(value) for value in found], object))
    return spread(again, places, -1), names.tolist()


def spread(values: NDArray[Any], places: NDArray[np.intp], missing: Any) -> NDArray[Any]:
    """Return the value at each place, and ``missing`` where the place is -1."""
    return np.append(values, missing)[places]  # -1 is the last index


def as_text(value: Any) -> str:
    """Return an entry as a string, a whole number without a decimal point."""
    if isinstance(value, (float, np.floating)) and float(value).is_integer():
        return str(int(value))
    return str(value)


def plain_numbers(texts: Sequence[str]) -> NDArray[np.float64]:
    """Return strings as numbers, NaN where one is not a number."""
    import pandas as pd

    found: NDArray[np.float64] = pd.to_numeric(
        pd.Series(texts, dtype=object), errors="coerce"
    ).to_numpy(np.float64, na_value=np.nan, copy=True)
    return found


def numbers_of_form(texts: Sequence[str], form: Form) -> NDArray[np.float64]:
    """Return formatted numbers, NaN where a string does not have this form."""
    thousands, decimal = map(re.escape, (form.thousands, form.decimal))
    digits = rf"(?:\d{{1,3}}(?:{thousands}\d{{3}})+|\d+)?(?:{decimal}\d*)?"
    # Accountants write negative numbers in brackets.
    sign = f"(?:{'|'.join(map(re.escape, _SIGNS))})?"
    number = re.compile(rf"(\(?)([+-]?) ?{sign} ?([+-]?)({digits}) ?{sign}\)?").fullmatch

    def bare(text: str) -> str:
        found = number(text.strip().translate(_USUAL))
        if found is None:
            return ""
        debt, first, second, size = found.groups()
        sign = "-" if debt or "-" in (first, second) else ""
        return sign + size.replace(form.thousands, "").replace(form.decimal, ".")

    return plain_numbers([bare(text) for text in texts])


def read_numbers(
    texts: Sequence[str], counts: NDArray[np.intp], comma: bool, forced: bool
) -> tuple[NDArray[np.float64], Form | None] | None:
    """Return strings as numbers, NaN where one is not a number, and their form unless plain.

    Args:
        texts: The distinct strings of a column, without missing values.
        counts: How many entries equal each of them.
        comma: Whether the file's decimal separator is a comma.
        forced: Whether the user declared the column as numbers.

    Returns:
        None if fewer than 90% of the entries are numbers of one form.

    """
    signs = {sign for text in texts for sign in _SIGNS if sign in text}
    forms: list[Form | None] = [*_FORMS] if len(signs) < 2 or forced else []
    # With decimal commas, points can only separate thousands.
    forms = [_FORMS[1], *forms, None] if comma else [None, *forms]
    best: tuple[int, NDArray[np.float64], Form | None] | None = None
    few, total = slice(0, None, 1 + len(texts) // 200), int(counts.sum())
    for form in forms:
        if not forced and np.isnan(_numbers(texts[few], form)).mean() > 0.5:
            continue
        values = _numbers(texts, form)
        read = int(counts[~np.isnan(values)].sum())
        if best is None or read > best[0]:
            best = read, values, form
        if read == total:
            break
    if best is None or not (forced or best[0] >= _NEARLY_ALL * total):
        return None
    return best[1:]


def _numbers(texts: Sequence[str], form: Form | None) -> NDArray[np.float64]:
    return plain_numbers(texts) if form is None else numbers_of_form(texts, form)


def read_dates(texts: Sequence[str], format_: str = "") -> tuple[DatetimeIndex, str] | None:
    """Return strings as dates, and their format, if one of the usual formats fits all of them.

    If none does, up to three formats are combined, separated by "|" and tried in turn for each
    string; two that differ only in the order of day and month are never combined.
    """
    few = texts[:20]
    usual = re.compile(r"\d{1,4}[-/.: ]|[A-Za-z]{3,9} \d{1,2},? \d{4}")
    if not all(usual.match(text.strip()) for text in few):
        return None
    first = [text.split(" ")[0] for text in few]
    dates = [date for date in _DATES if " " in date or times_of(first, date).notna().all()]
    for tried in [format_] * bool(format_) + _with_times(dates):
        if times_of(few, tried).notna().all() and (found := times_of(texts, tried)).notna().all():
            return found, tried
    several = _mixed(texts[:200], _with_times(_DATES) if ":" in "".join(few) else [_ISO, *_DATES])
    if several and (found := times_of(texts, several)).notna().all():
        return found, several
    return None


def _mixed(texts: Sequence[str], formats: Sequence[str]) -> str:
    """Return up to three formats that together parse all strings, the most frequent first."""
    chosen: list[str] = []
    while texts and len(chosen) < _MOST_FORMATS:
        read = {one: times_of(texts, one).notna() for one in formats if _swapped(one) not in chosen}
        best = max(read, key=lambda one: read[one].sum())
        chosen.append(best)
        if not read[best].any() or best in _TIMES:
            return ""
        texts = [text for text, done in zip(texts, read[best], strict=True) if not done]
    return "" if texts else "|".join(chosen)


def _with_times(dates: Sequence[str]) -> list[str]:
    return [_ISO, *_TIMES, *dates, *(f"{date} {time}" for date in dates for time in _TIMES)]


def times_of(texts: Sequence[str], format_: str) -> DatetimeIndex:
    """Return strings as times, NaT where one does not match any of the formats."""
    import pandas as pd

    found = pd.Series(pd.NaT, range(len(texts)), "datetime64[s]")
    for one in format_.split("|"):
        read = pd.to_datetime(pd.Index(texts), format=one, errors="coerce", utc=True)
        found = found.fillna(pd.Series(read.tz_localize(None).as_unit("s")))
    return pd.DatetimeIndex(found)


def _swapped(format_: str) -> str:
    return format_.replace("%d", "%_").replace("%m", "%d").replace("%_", "%m")


def is_ambiguous(texts: Sequence[str], format_: str) -> bool:
    """Return whether all dates would also be valid with day and month swapped."""
    if not {"%d", "%m"} <= set(re.findall(r"%[dm]", format_)):
        return False
    return all(times_of(some, _swapped(format_)).notna().all() for some in (texts[:100], texts))


def is_code(text: str) -> bool:
    """Return whether a string is a number with a leading zero, like 007."""
    digits = text.strip().lstrip("+-")
    return len(digits) > 1 and digits[0] == "0" and digits.isdecimal()


def gaps_in(
    texts: Sequence[str], gaps: Collection[str], codes: Collection[Code]
) -> NDArray[np.bool_]:
    """Return which strings mark a missing value."""
    known = {*gaps, *codes}
    return np.array([text.strip() in known or text in known for text in texts], bool)


def sentinels(values: NDArray[np.float64]) -> tuple[float, ...]:
    """Return numbers such as -999 that mark missing values: repeated, and far from all others."""
    found: list[float] = []
    values = values[np.isfinite(values)]
    for _ in range(3):
        rest, code = _without_sentinel(values)
        if code is None:
            break
        values = rest
        found.append(code)
    return tuple(found)


def _without_sentinel(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], float | None]:
    for end in (values.min(), values.max()) if len(values) else ():
        if not re.fullmatch(r"-?9{2,6}", f"{end:.15g}"):
            continue
        rest = values[values != end]
        if len(values) - len(rest) < 2 or len(np.unique(rest[:1000])) < 3:
            continue
        low, high = rest.min(), rest.max()
        alone = end < 0 <= low
        if alone or max(low - end, end - high) > 2 * (high - low):
            return rest, float(end)
    return values, None
