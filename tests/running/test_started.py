"""Who has started this process as a rank, from its variables; and ranks that srun and the like have started meet."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardkit.launching.started import first_host, note, started_rank
from tests.pools import free_port
from tests.started import environment, program

ROOT = Path(__file__).resolve().parents[2]
PLAIN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "node[07-08]",
}  # fmt: skip
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "a",
}  # fmt: skip


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        (PLAIN, (1, 4, None, None, "node0", 29500)),
        ({**PLAIN, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, (1, 4, 1, 2, "node0", 29500)),
        ({**PLAIN, "MASTER_PORT": ""}, None),
        ({"WORLD_SIZE": "4"}, None),
        ({**PLAIN, "RANK": "4"}, None),
        ({**PLAIN, **SRUN}, (1, 4, None, None, "node0", 29500)),
        ({**SRUN, "MASTER_PORT": "1234"}, (3, 4, 1, 2, "node07", 1234)),
        ({**SRUN, "SLURM_STEP_ID": "4294967291"}, None),  # the batch script itself
        ({**MPIRUN, "MASTER_PORT": "1234"}, (1, 2, 1, 2, "127.0.0.1", 1234)),
        ({**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "MASTER_PORT": "1"}, (1, 2, 1, 1, "", 1)),
        (
            {"PMI_RANK": "0", "PMI_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            (0, 2, None, None, "a", 1),
        ),
    ],
)
def test_variables(variables: dict[str, str], expected: tuple[object, ...] | None) -> None:
    found = started_rank(variables)
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert (
        found.rank, found.world_size, found.local_rank, found.local_world_size, found.address, found.port
    ) == expected  # fmt: skip


def test_ports_without_a_word_are_those_of_the_job() -> None:
    ports = [
        started_rank({**SRUN, "SLURM_PROCID": str(r), "SLURM_JOB_ID": job}) for job in "ab" for r in range(2)
    ]
    (a, b, c, d) = (p.port for p in ports if p is not None)
    assert a == b != c == d


def test_first_hosts() -> None:
    lists = {"a": "a", "a,b": "a", "n[03-07,9],b": "n03", "n[5,7]-ib": "n5-ib", "r1n[10-11]": "r1n10", "": ""}
    assert {text: first_host(text) for text in lists} == lists


def test_what_a_rank_starts_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PLAIN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SHARDKIT_RANK_PROCESS", "")
    assert started_rank() is not None
    note()
    assert started_rank() is not None  # a second launch in the same rank
    note(os.getpid() + 1)
    assert started_rank() is None
    monkeypatch.setenv("RANK", "2")  # started anew by somebody
    assert started_rank() is not None


SCRIPT = program("step_once")


def test_ranks_of_srun_meet() -> None:
    port = str(free_port())
    clean = {k: v for k, v in environment().items() if k not in PLAIN}
    here = {**SRUN, "SLURM_STEP_NUM_TASKS": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, SCRIPT, size],
            env={**clean, **here, "SLURM_PROCID": str(rank)}, stdout=subprocess.PIPE, text=True,
        )
        for rank, size in enumerate(("2", "2"))
    ]  # fmt: skip
    ranks.append(
        subprocess.Popen(
            [sys.executable, SCRIPT, "3"], env={**clean, **PLAIN}, stdout=subprocess.PIPE, text=True
        )
    )
    said = [rank.communicate(timeout=400)[0] for rank in ranks]
    assert said[:2] == ["[('rank 0', '0'), ('rank 1', '1')]\n"] * 2
    assert said[2].startswith("ConfigurationError RANK and WORLD_SIZE in the environment started 4 ranks"), (
        said
    )
