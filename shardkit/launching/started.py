"""Says whether this process was started as one of several ranks, by whom, and as which.

torchrun and ``shardkit run`` say so in TORCHELASTIC_RUN_ID and RANK, WORLD_SIZE, ...; Kubernetes' operators (and
people) in RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT alone; srun, mpirun and PMI in variables of their own.

[Note: inherited variables] What a rank starts inherits its variables: a test suite, a DataLoader, a second training.
So a process that has become a rank notes its number beside what it has read (:func:`note`): who finds this note with
another process's number, and the same variables, is no rank, but a child of one. A single rank (WORLD_SIZE=1, as
notebooks and cluster images have it) says nothing either: whoever wants more ranks starts them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from ..types import T

_NOTE = "SHARDKIT_RANK_PROCESS"
_NAMES = (
    "TORCHELASTIC_RUN_ID",
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_PROCID",
    "OMPI_COMM_WORLD_RANK",
    "PMIX_NAMESPACE",
    "PMI_RANK",
)
_NO_STEP = 4294967290  # from here on Slurm's step numbers are the batch script and the like
_PR_SET_PDEATHSIG = 1
_PORTS = (20000, 10000)  # the first, and how many, for jobs that were given none


@dataclass(frozen=True)
class StartedRank:
    """A rank that another program has started.

    Attributes:
        by: that program, for people.
        address: of rank 0's machine; "" if unknown.
        port: where ranks meet there.
        is_elastic: torch's agent is at work, and holds the store in which ranks meet.
    """

    by: str
    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    address: str
    port: int
    is_elastic: bool = False

    def variables(self) -> dict[str, str]:
        """Lists what torchrun sets, for libraries; what is unknown is left out."""
        values = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "MASTER_ADDR": self.address or None,
            "MASTER_PORT": self.port,
        }
        return {name: str(value) for name, value in values.items() if value is not None}


def started_rank(environment: Mapping[str, str] = os.environ) -> StartedRank | None:
    """Returns what this process was started as; None if it is on its own."""
    process, _, facts = environment.get(_NOTE, "").partition(" ")
    if process and process != str(os.getpid()) and facts == _facts(environment):
        return None
    for look in (_plain, _slurm, _of_mpi):
        found = look(environment)
        if found is not None:
            return found
    return None


def note(process: int | None = None) -> None:
    """Notes that this process's variables are its own. See [Note: inherited variables].

    Args:
        process: its number; 0: they are nobody's, since a launch that has ended its work of starting ranks set them.
    """
    os.environ[_NOTE] = f"{os.getpid() if process is None else process} {_facts(os.environ)}"


def variables_of_rank(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Returns what torchrun sets on one machine, for libraries that read it; nobody uses ``port``."""
    found = StartedRank("launch", rank, world_size, rank, world_size, "127.0.0.1", port).variables()
    return {
        **found,
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "ROLE_RANK": found["RANK"],
        "ROLE_WORLD_SIZE": found["WORLD_SIZE"],
    }


def end_with_parent() -> None:
    """Has the kernel end this process with the one that started it (Linux)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _facts(environment: Mapping[str, str]) -> str:
    return " ".join(environment.get(name, "-").replace(" ", "") or "-" for name in _NAMES)


def _numbers(environment: Mapping[str, str], *names: str) -> list[int] | None:
    """Returns the values of all variables; None where one is missing or no number."""
    texts = [environment.get(name, "") for name in names]
    return [int(t) for t in texts] if all(re.fullmatch(r"\d+", t) for t in texts) else None


def _number(environment: Mapping[str, str], name: str, default: T) -> int | T:
    found = _numbers(environment, name)
    return found[0] if found else default


def _port(environment: Mapping[str, str], job: str) -> int:
    """Returns the one that was set, or one that all ranks of the job work out alike."""
    first, count = _PORTS
    return _number(environment, "MASTER_PORT", first + zlib.crc32(job.encode()) % count)


def _plain(environment: Mapping[str, str]) -> StartedRank | None:
    is_elastic = "TORCHELASTIC_RUN_ID" in environment
    found = _numbers(environment, "RANK", "WORLD_SIZE", *([] if is_elastic else ["MASTER_PORT"]))
    address = environment.get("MASTER_ADDR", "")
    if found is None or not (address or is_elastic) or not found[0] < found[1]:
        return None
    by = "torchrun" if is_elastic else "RANK and WORLD_SIZE in the environment"
    local, here = (_number(environment, name, None) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    port = _number(environment, "MASTER_PORT", 0)
    return StartedRank(by, found[0], found[1], local, here, address, port, is_elastic)


def _slurm(environment: Mapping[str, str]) -> StartedRank | None:
    step = _number(environment, "SLURM_STEP_ID", _number(environment, "SLURM_STEPID", _NO_STEP))
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    found = _numbers(environment, "SLURM_PROCID", size)
    if found is None or step >= _NO_STEP:
        return None
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "")
    per_node = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    alike = re.fullmatch(r"(\d+)(\(x\d+\))?", per_node)  # where all nodes have the same number
    local, here = _number(environment, "SLURM_LOCALID", None), int(alike[1]) if alike else None
    address = environment.get("MASTER_ADDR") or first_host(nodes)
    port = _port(environment, f"{environment.get('SLURM_JOB_ID', '')}.{step}")
    return StartedRank("srun", found[0], found[1], local, here, address, port)


def first_host(nodes: str) -> str:
    """Returns the first of Slurm's list: ``node[03-07,9],other`` has ``node03``."""
    match = re.match(r"([^\[,]+)(?:\[([^\],\-]+)[^\]]*\]([^,\[]*))?", nodes)
    return "".join(part or "" for part in match.groups()) if match else ""


# What started it, then its variables: rank, size, and rank and size on the machine.
_MPI = (
    ("mpirun", *(f"OMPI_COMM_WORLD_{what}" for what in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    ("mpiexec (PMI)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def _of_mpi(environment: Mapping[str, str]) -> StartedRank | None:
    for by, rank, size, local_rank, local_size in _MPI:
        found = _numbers(environment, rank, size)
        if found is None:
            continue
        local, here = _number(environment, local_rank, None), _number(environment, local_size, None)
        address = environment.get("MASTER_ADDR") or ("127.0.0.1" if here == found[1] else "")
        names = ("PMIX_NAMESPACE", "PMI_ID", "HYDI_CONTROL_FD")
        job = next(filter(None, (environment.get(name) for name in names)), "")
        return StartedRank(by, found[0], found[1], local, here, address, _port(environment, f"{by} {job}"))
    return None
