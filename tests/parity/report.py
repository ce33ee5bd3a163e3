"""docs/PARITY.md from the facts, the list of differences and shardkit as it is: ``python -m tests.parity.report``."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from tests.parity.differences import DIFFERENCES, Difference
from tests.parity.surface import FACTS, MODULES, Finding, below, findings_of

REPORT = Path(__file__).resolve().parents[2] / "docs" / "PARITY.md"

HEAD = """\
# Parity with fairscale {version}

Made by `python -m tests.parity.report` from `tests/parity/fairscale_api.json` (every public module, class, function,
method, property, constant and re-export of fairscale, with names, order, kinds and defaults of arguments) and
`tests/parity/differences.py` (the only list of differences). `tests/parity/test_parity.py` fails on a difference that
is not in the list, on an entry of the list that nothing needs any more, and if this page is out of date.

What is different under the same name is listed in [DEPARTURES.md](DEPARTURES.md). To use it:
`fairscale.X` is `shardkit.X`, for every path in the table.

- **same**: everything that is public has its name, signature and place.
- **better**: the same, and more; what, is said.
- **redirected**: can be imported, subclassed and asked for with `isinstance`; on use it says what to take instead.
- **missing**: not there.

{count}

"""


def entry_of(finding: Finding) -> Difference | None:
    """The entry that covers it."""
    return next((d for d in DIFFERENCES if d.covers(finding)), None)


def _names(module: str) -> list[str]:
    """What of a module is public and defined there."""
    facts = MODULES[module]
    return [n for kind in ("classes", "functions", "constants") for n in facts.get(kind, {}) if n[0] != "_"]


def _row(module: str) -> tuple[str, str]:
    """Status and what is to say of it: each reason with the names that it is for."""
    told: dict[str, list[str]] = {}
    kinds = set()
    redirected = set()
    prefix = f"{below(module)}."
    for finding in findings_of(module):
        entry = entry_of(finding)
        if entry is None:
            continue
        name = finding.where.removeprefix(prefix).removesuffix(".__init__")
        reason = entry.reason
        if finding.what == "redirected":
            redirected.add(name)
            why, _, instead = finding.detail.partition(" is not carried over: ")[2].partition(". Use ")
            reason = f"redirected to {instead.removesuffix(' instead.')}: {why}"
        elif entry.kind == "missing":
            reason = f"missing: {reason}"
        kinds.add(entry.kind)
        names = told.setdefault(reason, [])
        if name not in (below(module), *names):
            names.append(name)
    for entry in DIFFERENCES:
        if entry.kind == "behaviour" and _home(entry.where) == below(module):
            kinds.add("better")
            told.setdefault(entry.reason, []).extend(
                [n for n in [entry.where.removeprefix(prefix)] if n != below(module)]
            )
    status = next((k for k in ("missing", "redirected", "better") if k in kinds), "same")
    if redirected and status == "redirected" and not set(_names(module)) <= redirected:
        status = "redirected in part"
    if status == "missing" and set(_names(module)):
        status = "redirected in part" if redirected else "missing in part"
    return status, "; ".join(_text(reason, names) for reason, names in told.items())


def _home(where: str) -> str:
    """The module of a path."""
    while f"fairscale.{where}" not in MODULES:
        where = where.rpartition(".")[0]
    return where


def _text(reason: str, names: list[str]) -> str:
    shown = ", ".join(f"`{n}`" for n in names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    return f"{shown}: {reason}" if shown else reason


def report() -> str:
    """The page."""
    rows = {module: _row(module) for module in MODULES}
    counts = Counter(status for status, _ in rows.values())
    count = f"{len(rows)} modules: " + ", ".join(
        f"{counts[s]} {s}"
        for s in ("same", "better", "redirected in part", "redirected", "missing in part", "missing")
        if counts[s]
    )
    lines = ["| fairscale | | what, and why |", "|---|---|---|"]
    lines += [f"| `{module}` | {status} | {text} |" for module, (status, text) in sorted(rows.items())]
    return HEAD.format(version=FACTS["version"], count=count + ".") + "\n".join(lines) + "\n"


if __name__ == "__main__":
    REPORT.write_text(report())
    sys.stdout.write(f"{REPORT}\n")
