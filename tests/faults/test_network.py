"""A network link that goes down, between two network namespaces of this machine (as root on Linux)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.jobs import cases, faults, machines, try_case
from tests.started import output_of, program

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 6.0  # seconds, of the process group
LATEST = 60.0  # the machine is shared

SCRIPT = program("train_until_the_link_is_down")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Two, connected by a link whose ends are called as they are."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs Linux, root and iproute2")
    names = [f"sk{end}{os.getpid()}" for end in "ab"]
    try:
        try:
            for name in names:
                _ip("netns", "add", name)
            _ip(
                "link",
                "add",
                names[0],
                "netns",
                names[0],
                "type",
                "veth",
                "peer",
                names[1],
                "netns",
                names[1],
            )
        except (subprocess.SubprocessError, OSError) as error:
            pytest.skip(f"this machine allows no network namespaces: {error}")
        for number, name in enumerate(names):
            _ip("-n", name, "addr", "add", f"10.213.77.{number + 1}/24", "dev", name)
            _ip("-n", name, "link", "set", name, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=10)


def test_a_link_that_goes_down(namespaces: list[str], tmp_path: Path) -> None:
    """Two jobs at once, whose ranks meet in a file and in a store of rank 0."""
    printed = output_of(SCRIPT, ",".join(namespaces), str(tmp_path), str(TIMEOUT))
    found = re.findall(r"RANK (\w+ \d) (\w+) (\d+) (.*)", printed)
    assert sorted(f[0] for f in found) == ["file 0", "file 1", "tcp 0", "tcp 1"], printed
    for _, kind, seconds, text in found:
        assert kind == "RankLostError", found
        assert float(seconds) <= LATEST, found
        assert "of channel" in text, found


# ------------ A job on two machines goes on with one. ``python -m tests.faults.jobs`` has more machines, and
# more that happens.
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
