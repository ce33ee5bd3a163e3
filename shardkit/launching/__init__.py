"""Starts ranks on any backend; what started this process; SIGTERM as a request to stop; and the folder of a run.

torchrun and ``shardkit run`` tell a process which rank it is in TORCHELASTIC_RUN_ID and RANK, WORLD_SIZE, ...;
Kubernetes' operators (and people) in RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT alone; srun, mpirun and PMI in
variables of their own.

[Note: inherited variables] What a rank starts inherits its variables: a test suite, a DataLoader, a second training.
So a process that has become a rank notes its number beside what it has read (:func:`note`): who finds this note with
another process's number, and the same variables, is no rank, but a child of one. A single rank (WORLD_SIZE=1, as
notebooks and cluster images have it) says nothing either: whoever wants more ranks starts them.

[Note: agreeing to stop] The signal comes to ranks at different moments, or to one alone, and a rank that stopped a step
before the others would leave them in a collective. So all ranks exchange whether they were asked, in calls of
:func:`stop_requested` that all of them know beforehand: the exchange also says how many calls lie until the next one,
so that there is one about every second. Other calls cost an addition. Nothing is sent where there is one rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import mmap
import os
import re
import signal
import struct
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from ..backend import Backend, Group, ReduceOp, backend_for_device, backend_of_job, get_backend
from ..errors import BackendError, ConfigurationError, LifecycleError
from ..types import Args, T

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


# ------------------------------------------------------------ the folder of a run
# ``runs/ID/`` holds
#
# - ``command``: the line that was typed; ``checkpoints``: directories in which a rank has saved, one a line;
# - ``attempt-N/``: ``rankR.out`` and ``rankR.err`` (what it printed), ``rankR.error.json`` (the error that ended it),
#   ``rankR.steps`` (how far it is), ``rankR.stacks`` and ``rankR.where`` (where it stood when another one failed);
# - ``failure.txt``: the page about the last failure; ``agent.log``: what torch's elastic agent says.
RUN_DIR = "SHARDKIT_RUN_DIR"  # environment variable: the run's folder
_STEPS = struct.Struct("qd")  # optimizer steps, and when the last one ended (0: none yet)


class RunFolder:
    """Paths of a run.

    Args:
        path: the folder; made where it is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    def attempt(self, number: int) -> Path:
        folder = self.path / f"attempt-{number}"
        folder.mkdir(exist_ok=True)
        return folder

    def next_attempt(self) -> int:
        """Returns the number of the next one."""
        taken = [
            int(m[1]) for p in self.path.glob("attempt-*") if (m := re.fullmatch(r"attempt-(\d+)", p.name))
        ]
        return max(taken, default=-1) + 1

    @property
    def log(self) -> Path:
        return self.path / "agent.log"

    def checkpoint_dirs(self) -> list[Path]:
        """Returns the directories in which ranks have saved, the latest last."""
        try:
            lines = (self.path / "checkpoints").read_text().splitlines()
        except OSError:
            return []
        return [Path(line) for line in dict.fromkeys(filter(None, lines))]


def write_at_once(path: Path, text: str) -> None:
    """Writes a file that whoever looks finds complete, or as it was."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text)
    os.replace(beside, path)


def note_checkpoints(directory: str | os.PathLike[str]) -> None:
    """Tells the run that this process belongs to, if any, where checkpoints are."""
    run = os.environ.get(RUN_DIR)
    if not run:
        return
    line, file = os.path.abspath(directory), Path(run, "checkpoints")
    with contextlib.suppress(OSError):
        if not file.exists() or line not in file.read_text().splitlines():
            with file.open("a") as out:
                out.write(line + "\n")


class Steps:
    """Counts optimizer steps of a rank in a file in shared memory, which outlives the rank."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(_STEPS.pack(0, 0.0))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _STEPS.size)
        self._count = 0

    def add(self) -> None:
        self._count += 1
        _STEPS.pack_into(self._map, 0, self._count, time.time())


def steps_of(path: Path) -> tuple[int, float]:
    """Reads a rank's steps, and when the last one ended; (0, 0.0) where the rank has not begun."""
    try:
        count, when = _STEPS.unpack_from(path.read_bytes())
    except (OSError, struct.error):
        return 0, 0.0
    return int(count), float(when)


# ------------------------------------------------------------ SIGTERM as a request: all ranks save, and end
_SECONDS = 1.0  # between exchanges
_MOST = 10_000  # calls
_GROWTH = 4  # of the number of calls, from exchange to exchange


class _Stopping:
    """State of one process. Ranks that are threads share the request, and count calls each for itself."""

    def __init__(self) -> None:
        self.is_asked = False
        self._installed = 0  # the process that has the handler
        self._counts = threading.local()

    def install(self) -> None:
        """Takes the first SIGTERM from now on for a request; another one ends the process."""
        if self._installed == os.getpid() or threading.current_thread() is not threading.main_thread():
            return
        self._installed = os.getpid()
        if signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, None):
            signal.signal(signal.SIGTERM, self._signalled)

    def _signalled(self, number: int, _: FrameType | None) -> None:
        self.is_asked = True
        signal.signal(number, signal.SIG_DFL)

    def requested(self, group: Group | None) -> bool:
        """Counts a call; exchanges when it is time."""
        if group is None or group.world_size == 1:
            return self.is_asked
        counts = self._counts
        is_known = getattr(counts, "group", None) is group
        if not is_known:
            counts.group, counts.left, counts.calls, counts.answer = group, 0, 1, False
            counts.since = time.monotonic()
        if counts.answer:
            return True
        if counts.left:
            counts.left -= 1
            return False
        self._exchange(group)
        return bool(counts.answer)

    def _exchange(self, group: Group) -> None:
        """Tells that this rank was asked, and how many calls take a second: the slowest rank's counts (collective)."""
        counts, now = self._counts, time.monotonic()
        rate = counts.calls / max(now - counts.since, 1e-6)
        wanted = max(1, min(int(rate * _SECONDS), _GROWTH * counts.calls, _MOST))
        told = torch.tensor([int(self.is_asked), -wanted], dtype=torch.int64, device=group.backend.device())
        group.channel("control").all_reduce(told, op=ReduceOp.MAX, label="whether to stop")
        asked, wanted = (int(x) for x in told.tolist())
        counts.answer, counts.calls, counts.left, counts.since = bool(asked), -wanted, -wanted - 1, now


_stopping = _Stopping()


def stop_requested() -> bool:
    """Says whether the job was asked to stop, by SIGTERM to ``shardkit run`` or to any rank: the same on all ranks.

    To be called by all ranks once a step, between steps. When it says yes, save a checkpoint and end with status 75
    (``sys.exit(75)``), which says that the job can be started again::

        for batch in batches:
            ...
            if shardkit.stop_requested():
                shardkit.save_training(folder, model=model, optimizer=optimizer, step=step)
                sys.exit(75)

    About once a second ranks exchange two numbers; all other calls are a few Python operations. So a request is heard
    after about a second and a step. Until the first call SIGTERM ends a rank as usual, and so does a second SIGTERM.
    From the first call on, a handler of the program's own for SIGTERM stays in place, and this says no.

    Ranks are those of the default process group; without one the process is alone.
    """
    _stopping.install()
    return _stopping.requested(_group())


def _group() -> Group | None:
    dist = torch.distributed
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    known = getattr(_known, "group", None)
    if known is not None and known[0] is world and world is not None:
        return known[1]  # type: ignore[no-any-return]
    try:
        group = backend_of_job().group()
    except (ConfigurationError, LifecycleError):
        return None
    _known.group = world, group
    return group


_known = threading.local()


# ------------------------------------------------------------ starting ranks
def launch(
    fn: Callable[..., T],
    world_size: int,
    *,
    backend: str | Backend | None = None,
    args: Args = (),
    timeout: float | None = None,
    start_timeout: float | None = 180.0,
) -> list[T]:
    """Runs ``fn(rank, *args)`` on ``world_size`` ranks of this machine and returns each rank's result.

    Ranks are processes (gloo, cuda, tpu), replicas on xla (TPU cores, or several on a CPU), or threads (simulated).
    A default process group exists inside ``fn`` where the backend has one, and is gone afterwards, whatever happened.

    A rank whose ``fn`` returns while others wait for it in a collective of shardkit ends the job with an
    OutOfStepError within seconds (on NCCL: when its own timeout is over).

    Started by ``shardkit run``, torchrun, srun, mpirun, or with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the
    environment (Kubernetes), this process is one rank already: ``fn`` runs here, and the list holds the results of
    all ranks.

    Args:
        fn: an importable function (it travels to other processes by name).
        world_size: number of ranks.
        backend: "gloo", "cuda", "tpu", "xla", "simulated", or a package's. Default: the machine's accelerator
            (torch.accelerator) where a backend serves it, else gloo; gloo and a warning where devices are too few.
        args: further arguments, picklable.
        timeout: seconds that ``fn`` may take, after which ranks are ended; None: no limit.
        start_timeout: seconds that ranks may take to import the program and to meet, before ``fn`` begins; None: no
            limit. Ranks that are late are ended, and the error shows where each of them stands.

    Processes find what torchrun sets in their environment (RANK, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, ...).

    Raises:
        RankFailedError: a rank raised, died or was too late. The others are ended at once; it holds the rank and its
            traceback.
        BackendError: the backend is not available on this machine, or ranks that others started do not meet.
        ConfigurationError: ``world_size`` does not fit the ranks that others started, or ``fn`` can't be sent to
            other processes.
    """
    chosen = backend or _of_machine(world_size)
    chosen = get_backend(chosen) if isinstance(chosen, str) else chosen
    if not chosen.is_available():
        raise BackendError(
            f"backend {chosen.name!r} is not available on this machine: no such device, or its package is not installed"
        )
    started = started_rank() if chosen.process_group_backend is not None else None
    if started is not None and (started.is_elastic or started.world_size > 1):
        return _run_as_started_rank(fn, world_size, chosen, args, started, start_timeout)
    return chosen.launch(fn, world_size, args, timeout=timeout, start_timeout=start_timeout)


def _of_machine(world_size: int) -> str | Backend:
    """Returns the backend where none is named."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return "gloo"
    try:
        backend = backend_for_device(kind.type)
    except BackendError:  # a device without a library of collectives
        return "gloo"
    here = int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
    count = backend.device_count() or torch.accelerator.device_count()
    if count >= here:
        return backend
    warnings.warn(
        f"{here} ranks are on the host (gloo), since this machine has {count} {kind.type.upper()} devices; launch at "
        f"most that many ranks, or say which backend: launch(..., backend={backend.name!r}) or backend='gloo'",
        stacklevel=3,
    )
    return "gloo"


def _run_as_started_rank(
    fn: Callable[..., T],
    world_size: int,
    backend: Backend,
    args: Args,
    started: StartedRank,
    start_timeout: float | None,
) -> list[T]:
    if started.world_size != world_size:
        how = f"torchrun --nproc-per-node={world_size}" if started.is_elastic else "other numbers there"
        raise ConfigurationError(
            f"{started.by} started {started.world_size} ranks, launch was asked for {world_size}; pass "
            f"world_size={started.world_size} or {how}. If this process is no rank, and has only inherited these "
            "variables, unset them"
        )
    if not started.is_elastic:
        os.environ.update(started.variables())
    note()
    backend.device()  # selects the rank's device before the process group asks for it
    mine = not dist.is_initialized()
    if mine:
        _meet(backend, started, start_timeout)
    try:
        result = fn(started.rank, *args)
        return backend.group().all_gather_object(result, label="results of launch")
    finally:
        if mine:
            dist.destroy_process_group()


def _meet(backend: Backend, started: StartedRank, start_timeout: float | None) -> None:
    if started.is_elastic:
        # The agent's store outlives process groups: what an earlier launch's group wrote there would be taken for this
        # one's, and ranks would look for each other at addresses that are gone.
        found, rank, world_size = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
        number = found.add(f"shardkit/launches of rank {rank}", 1)
        own = dist.PrefixStore(f"shardkit/launch/{number}", found)  # type: ignore[attr-defined]
        dist.init_process_group(backend.process_group_backend, store=own, rank=rank, world_size=world_size)
        return
    if not started.address:
        raise ConfigurationError(
            f"{started.by} started ranks on several machines, and does not say where rank 0 is: set MASTER_ADDR (and "
            "MASTER_PORT) to an address of its machine, on all ranks"
        )
    place = f"{started.address}:{started.port} (MASTER_ADDR, MASTER_PORT)"
    limit = datetime.timedelta(seconds=start_timeout or 10**6)
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            started.address, started.port, started.world_size, is_master=started.rank == 0, timeout=limit
        )
    except (RuntimeError, ValueError) as error:
        what = (
            "it could not listen there: the port is taken, or the address is another machine's; choose others"
        )
        if started.rank or not re.search("EADDRINUSE|listen", str(error)):
            what = f"not all were there after {limit}: others did not start, or can't reach that address"
        raise BackendError(
            f"rank {started.rank} of {started.world_size}, started by {started.by}, did not meet the others at "
            f"{place}: {what}. ({str(error).splitlines()[0]})"
        ) from error
    store.set_timeout(dist.distributed_c10d.default_pg_timeout)
    dist.init_process_group(
        backend.process_group_backend, store=store, rank=started.rank, world_size=started.world_size
    )
