"""The table of docs/TESTING.md, made of the faults."""

from __future__ import annotations

from tests.deliberate_faults.fault import XLA, Fault
from tests.deliberate_faults.planting import ROOT
from tests.deliberate_faults.table import FAULTS

PAGE = ROOT / "docs/TESTING.md"
BEGIN, END = "<!-- faults: generated -->\n", "<!-- faults: end -->\n"


def row(fault: Fault) -> str:
    tests = list(dict.fromkeys(f"`{t.split('::')[-1]}` of `{t.split('::')[0]}`" for t in fault.tests))
    where = " (XLA)" if fault.environment == XLA else ""
    words = fault.breaks.replace("|", "\\|")
    return f"| {fault.part}{where} | {words} | {', '.join(tests)} |"


def table() -> str:
    """All faults, in Markdown."""
    rows = ["| part | fault | tests that fail |", "| --- | --- | --- |", *map(row, FAULTS)]
    return "\n".join(rows) + "\n"


def with_table(page: str) -> str:
    """A page whose table is that of the faults."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


def write_report() -> None:
    """Writes the table into docs/TESTING.md."""
    PAGE.write_text(with_table(PAGE.read_text()))
