"""The process that holds XLA replicas: what it starts, how it ends, and how long it may take to be ready."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from shardkit.errors import RankFailedError
from tests.backends import xla_process_programs as programs
from tests.pools import rank_pool

pytest.importorskip("torch_xla", reason="needs torch_xla")

from shardkit.backends.xla import ReplicaPool

pytestmark = pytest.mark.xla


# spawned ones are the default, and slow
@pytest.mark.parametrize(("start", "workers"), [("spawn", 1), ("fork", 2)])
def test_workers_of_data_loaders(start: str, workers: int) -> None:
    context = {} if start == "spawn" else {"multiprocessing_context": start}
    options = {"num_workers": workers, "persistent_workers": start == "spawn", **context}
    found = rank_pool(2, "xla").run(programs.load, options)
    assert all(numbers == [*range(8), *range(8)] for numbers, _ in found)
    readers = {reader for _, mine in found for reader in mine}
    assert len(readers) == (2 if start == "spawn" else 8)
    assert all(programs.ends(reader) for reader in readers)


def test_memory() -> None:
    first, second = rank_pool(2, "xla").run(programs.memory)
    for info in (first, second):
        assert 50_000_000 < info["bytes_used"] <= info["peak_bytes_used"] < info["bytes_limit"]
    assert (
        first["bytes_limit"]
        == second["bytes_limit"]
        <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    )


# -- its end, and that of what it has started


def test_no_process_outlives_a_killed_parent() -> None:
    code = (
        "import os, sys, threading\n"
        "from shardkit.backends.xla import ReplicaPool\n"
        "from tests.backends import xla_process_programs as programs\n"
        "if __name__ == '__main__':\n"
        "    ReplicaPool(1).run(programs.start_others_and_wait)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    processes = [int(parent.stdout.readline()) for _ in range(3)]
    assert not _ended(processes)
    parent.kill()
    parent.wait()
    assert all(programs.ends(process) for process in processes)


def _ended(processes: list[int]) -> list[int]:
    return [p for p in processes if not os.path.exists(f"/proc/{p}")]


def test_death_shows_where_every_replica_was_and_leaves_nothing(tmp_path: Any) -> None:
    with (
        ReplicaPool(2, timeout=400) as pool,
        pytest.raises(RankFailedError, match="in start_others_and_abort") as failure,
    ):
        pool.run(programs.start_others_and_abort, str(tmp_path / "processes"))
    assert failure.value.remote_type == "SIGABRT"
    assert failure.value.remote_traceback.count("in start_others_and_abort") == 2
    assert "replicas with equal programs compile once" in failure.value.remote_traceback
    processes = [int(line) for line in (tmp_path / "processes").read_text().split()]
    assert len(processes) >= 4
    assert all(programs.ends(process) for process in processes)


def test_a_start_that_takes_too_long() -> None:
    with (
        ReplicaPool(1, start_timeout=0.2) as pool,
        pytest.raises(RankFailedError, match="had a core for") as failure,
    ):
        pool.run(programs.memory)
    assert failure.value.remote_type == "TimeoutError"
    assert "start_timeout=0.2" in failure.value.remote_traceback
