"""Looks at machines before a job does: ``shardkit doctor``."""

from typing import NamedTuple

ERROR, WARNING, NOTE = "error", "warning", "note"
_ORDER = (ERROR, WARNING, NOTE)


class Finding(NamedTuple):
    """One thing that is wrong, or will be.

    Attributes:
        level: :data:`ERROR`: jobs fail; :data:`WARNING`: they may, or are slow; :data:`NOTE`: good to know.
        what: is the case.
        do: about it.
        where: machine; "" for what concerns all.
    """

    level: str
    what: str
    do: str
    where: str = ""


def in_order(findings: list[Finding]) -> list[Finding]:
    """Sorts errors first; what several machines have is said once."""
    machines: dict[Finding, list[str]] = {}
    for finding in findings:
        machines.setdefault(finding._replace(where=""), []).append(finding.where)
    merged = [f._replace(where=", ".join(filter(None, dict.fromkeys(w)))) for f, w in machines.items()]
    return sorted(merged, key=lambda f: _ORDER.index(f.level))
