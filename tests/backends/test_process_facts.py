"""What is known of a process: memory, and how long it could have got on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from shardkit.backends.processes import ProcessTime, memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux tells")


def test_memory() -> None:
    now, most, machine = memory()
    assert 10_000_000 < now <= most < machine


@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(100)"], ids=["busy", "asleep"])
def test_time_with_a_core_and_time_asleep_count(code: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        progress = ProcessTime(process.pid)
        while progress.seconds() < 0.3:
            time.sleep(0.02)
        assert (progress.cpu > progress.slept) == ("pass" in code)
        assert f"{progress.cpu:.1f} s" in str(progress)
    finally:
        process.kill()
        process.wait()


def test_time_without_a_core_does_not_count() -> None:
    """One core for two: what counts is together what has passed."""
    core = {min(os.sched_getaffinity(0))}
    code = f"import os; os.sched_setaffinity(0, {core}); print(flush=True)\nwhile True: pass"
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(3)]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        start = time.monotonic()
        before = [(p := ProcessTime(process.pid), p.seconds()) for process in processes]
        time.sleep(0.6)
        counted = sum(p.seconds() - first for p, first in before)
        assert counted < 1.4 * (time.monotonic() - start)  # and not three times
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.wait()


def test_a_process_that_is_gone() -> None:
    assert ProcessTime(None).seconds() < 1
