"""``assessment.json`` of a study of a `ModuleRecipe`: written, and read with checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pseudograd.search.documents import misfit, read_signed, write_signed
from pseudograd.search.study import Study

ASSESSMENT = "assessment.json"
_REPAIR = "run the study again, which rewrites it"

# What another version may lack. The checksum shows that nothing else changed since it was written.
_FOUND = {"classes": list, "unit": str, "model": dict, "baselines": list, "combined": list}


def write_found(study: Study, found: Mapping[str, Any]) -> None:
    """Write the result of `assess_networks` to the study's folder, if it has one."""
    if study.folder is not None:
        fields = {"trials": len(study.ledger), "run": study.fingerprint, "found": found}
        write_signed(study.folder / ASSESSMENT, fields)


def read_found(study: Study) -> dict[str, Any] | None:
    """Return the saved result of `assess_networks`; None if it is missing or outdated.

    Raises:
        ValueError: If the file is damaged, or from another version.

    """
    if study.folder is None or not (study.folder / ASSESSMENT).exists():
        return None
    fields = read_signed(study.folder / ASSESSMENT, {"found": dict}, _REPAIR)
    if fields.get("trials") != len(study.ledger) or fields.get("run") != study.fingerprint:
        return None
    found: dict[str, Any] = fields["found"]
    if found and (wrong := misfit(found, _FOUND, "it")):
        path = study.folder / ASSESSMENT
        raise ValueError(f"{path} is from another version ({wrong}): {_REPAIR}")
    return found
