"""Every case of the table: how each rank ends, and after how long; docs/RELIABILITY.md shows each."""

from __future__ import annotations

import re

import pytest

from tests.faults.cases import CASES, GONE, LATEST, LOST, SOON, Case
from tests.faults.report import REPORT, known, page_of
from tests.faults.running import submit

WITH_STRATEGIES = [(case, strategy) for case in CASES for strategy in case.strategies]
WITH_STRATEGIES += [(Case("killed later", "", "killed_in_an_agreement", 2, (LOST, GONE)), "fsdp")]


@pytest.fixture(autouse=True, scope="module")
def _begin(request: pytest.FixtureRequest) -> None:
    """Starts what was selected, several cases at a time."""
    for item in request.session.items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if isinstance(params.get("case"), Case):
            submit(params["case"], params["strategy"], LATEST)


@pytest.mark.parametrize(
    ("case", "strategy"), WITH_STRATEGIES, ids=[f"{s}: {c.name}" for c, s in WITH_STRATEGIES]
)
def test_every_rank_hears_of_it(case: Case, strategy: str) -> None:
    outcomes = submit(case, strategy, LATEST).result()
    late = max(outcome.late for outcome in outcomes)
    for outcome, expected in zip(outcomes, case.errors, strict=True):
        assert outcome.kind in expected, outcomes
        if outcome.kind.endswith("Error"):
            assert outcome.seconds <= SOON + late, outcomes
            for word in case.words:
                assert word in outcome.text, outcome


def test_the_page_is_what_the_report_makes_of_the_cases() -> None:
    """But for the machine on which it was measured."""
    pages = (REPORT.read_text(), page_of(known()))
    found, made = (re.sub(r"torch \S+ on Linux, with\n\d+ CPU cores", "", page) for page in pages)
    assert found == made, "run: python -m tests.faults.report [case ...]"
