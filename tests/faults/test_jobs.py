"""A job on two machines goes on with one. ``python -m tests.faults.jobs`` has more machines, and more that happens."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.jobs import cases, faults, machines, try_case


def test_a_link_that_goes_down_during_a_job(tmp_path: Path) -> None:
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs Linux, root and iproute2")
    try:
        with machines(2) as names:
            (case,) = (c for c in cases(2) if c.name == "link down")
            outcome = try_case(case, names, tmp_path)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this machine allows no network namespaces: {error.stderr}")
    assert faults(case, outcome, 2) == [], outcome.output
    assert outcome.began[0] == (2, 0)
    assert "This machine leaves the job" in outcome.output
