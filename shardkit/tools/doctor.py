"""Looks at machines before a job does, ``shardkit doctor``; and at the network, for whoever starts jobs.

Examines a machine with a few ranks of its own, or all machines of the job that this process is a rank of.

Measured between ranks, those of the default process group (gloo), are bandwidth, round trips, clocks, and what a rank
opens. Pairs are measured one after the other, so that none is in the other's way: all pairs of at most :data:`_MOST`
ranks, one of each machine where there are several.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import socket
import statistics
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ..backend import get_backend
from ..errors import ConfigurationError, RankFailedError
from ..launching import launch
from ..launching.started import started_rank
from ..tracing.tables import counted
from ..types import T
from ..version import __version_tuple__

ERROR, WARNING, NOTE = "error", "warning", "note"
_ORDER = (ERROR, WARNING, NOTE)


class Finding(NamedTuple):
    """One thing that is wrong, or will be.

    Attributes:
        level: :data:`ERROR`: jobs fail; :data:`WARNING`: they may, or are slow; :data:`NOTE`: good to know.
        what: is the case.
        do: about it.
        where: machine; "" for what concerns all.
    """

    level: str
    what: str
    do: str
    where: str = ""


def in_order(findings: list[Finding]) -> list[Finding]:
    """Sorts errors first; what several machines have is said once."""
    machines: dict[Finding, list[str]] = {}
    for finding in findings:
        machines.setdefault(finding._replace(where=""), []).append(finding.where)
    merged = [f._replace(where=", ".join(filter(None, dict.fromkeys(w)))) for f, w in machines.items()]
    return sorted(merged, key=lambda f: _ORDER.index(f.level))


# ------------------------------------------------------------ between ranks
_RANKS = 3  # of its own: enough to tell what each further one needs
_SECONDS = 60.0  # that the ranks may take
_MOST = 8  # ranks
_BYTES = 8 << 20
_TRIPS = 12
_CHANNELS = 5  # what FSDP has: the group's own connections, and four channels
_CLOCKS = 1.0  # seconds; more confuses logs, and what compares times of files
_SLOW = 0.4  # of the median bandwidth
_POOR = 0.125  # GB/s: 1 Gbit/s
_LOST = 0.01  # of the segments


class Link(NamedTuple):
    """Between two ranks.

    Attributes:
        gbytes: a second, in one direction.
        trip: median seconds of a round trip; ``longest`` of them.
        clock: by how much the second rank's clock is ahead, in seconds.
    """

    first: int
    second: int
    gbytes: float
    trip: float
    longest: float
    clock: float


class OpenFiles(NamedTuple):
    """Files of a rank: ``base``, and ``each`` for every other rank."""

    base: float
    each: float


def measure_links(hosts: list[str]) -> list[Link]:
    """Measures pairs of ranks (collective); returns all links on rank 0, elsewhere none."""
    ranks = [hosts.index(host) for host in dict.fromkeys(hosts)]
    ranks = sorted(ranks if len(ranks) > 1 else range(len(hosts)))[:_MOST]
    found = []
    for i, first in enumerate(ranks):
        for second in ranks[i + 1 :]:
            dist.barrier()
            if dist.get_rank() == first:
                found.append(_ask(first, second))
            elif dist.get_rank() == second:
                _answer(first)
    everybody = gathered(found)
    return [link for links in everybody for link in links] if dist.get_rank() == 0 else []


def gathered(value: T) -> list[T]:
    """Returns each rank's value (collective). torch's own call for that needs numpy."""
    return get_backend("gloo").group().all_gather_object(value, label="shardkit doctor")


def _ask(first: int, second: int) -> Link:
    small, large = torch.zeros(1, dtype=torch.float64), torch.zeros(_BYTES, dtype=torch.uint8)
    trips, clocks = [], []
    for _ in range(_TRIPS):
        began, sent = time.perf_counter(), time.time()
        dist.send(small, second)
        dist.recv(small, second)
        took = time.perf_counter() - began
        trips.append(took)
        clocks.append((took, float(small) - sent - took / 2))
    dist.send(large, second)  # connections grow fast with use
    dist.recv(small, second)
    began = time.perf_counter()
    dist.send(large, second)
    dist.recv(small, second)
    seconds = time.perf_counter() - began
    return Link(first, second, _BYTES / seconds / 1e9, statistics.median(trips), max(trips), min(clocks)[1])


def _answer(first: int) -> None:
    small, large = torch.zeros(1, dtype=torch.float64), torch.zeros(_BYTES, dtype=torch.uint8)
    for message in [small] * _TRIPS + [large] * 2:
        dist.recv(message, first)
        dist.send(torch.tensor([time.time()], dtype=torch.float64), first)


def measure_files() -> OpenFiles | None:
    """Counts the files that this rank opens for a group of all ranks, and for each further one (collective)."""
    if not Path("/proc/self/fd").is_dir():
        return None
    begin, counts, kept, sizes = _open_files(), [], [], [dist.get_world_size(), 2]
    for size in sizes:
        before = _open_files()
        kept.append(dist.new_group(list(range(size)), backend="gloo"))
        if dist.get_rank() < size:
            dist.barrier(kept[-1])
        counts.append(_open_files() - before)
    each = (counts[0] - counts[1]) / (sizes[0] - 2) if sizes[0] > 2 and dist.get_rank() < 2 else 1.0
    for group in kept:
        dist.barrier()
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    each = max(each, 1.0)
    fixed = max(0.0, counts[0] - each * (sizes[0] - 1))
    return OpenFiles(begin - each * (sizes[0] - 1) + _CHANNELS * fixed, _CHANNELS * each)


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def segments() -> tuple[int, int]:
    """Counts TCP segments that this machine has sent, and has sent again."""
    try:
        lines = Path("/proc/net/snmp").read_text().splitlines()
    except OSError:
        return 0, 0
    names, values = (line.split() for line in lines if line.startswith("Tcp:"))
    counts = dict(zip(names, values, strict=True))
    return int(counts["OutSegs"]), int(counts["RetransSegs"])


def check_links(links: list[Link], hosts: list[str]) -> Iterator[Finding]:
    usual = statistics.median(link.gbytes for link in links) if links else 0.0
    for link in links:
        a, b = hosts[link.first], hosts[link.second]
        name = f"ranks {link.first} and {link.second} ({a if a == b else f'{a}, {b}'})"
        if link.gbytes < _SLOW * usual or link.gbytes < _POOR:
            yield Finding(
                WARNING if link.gbytes < _SLOW * usual else NOTE,
                f"{name}: {link.gbytes:.3g} GB/s, where {usual:.3g} is usual here",
                "check that they use the fast interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), its speed "
                "(ethtool) and who else uses it",
            )
        if abs(link.clock) > _CLOCKS:
            what = f"{name}: clocks differ by {abs(link.clock):.1f} s"
            yield Finding(WARNING, what, "synchronize them (chrony, ntpd)")


def check_segments(host: str, sent: int, again: int) -> Iterator[Finding]:
    """Reports packets that were lost while links were measured."""
    if sent < 50 or again / sent < _LOST:
        return
    yield Finding(
        WARNING,
        f"{again} of {sent} TCP segments ({100 * again / sent:.0f} %) were sent again: packets get lost",
        "check cables, switches and the interface's errors (ip -s link); collectives wait for each lost packet",
        host,
    )


# ------------------------------------------------------------ the examination
@dataclass(frozen=True)
class Examination:
    """All that was found.

    Attributes:
        files: that a rank opens; None: unknown.
    """

    machines: list[Machine]
    hosts: list[str]
    links: list[Link]
    files: OpenFiles | None
    world_size: int
    findings: list[Finding]

    @property
    def is_well(self) -> bool:
        return not any(f.level == ERROR for f in self.findings)


# Of a rank: its machine, and what was measured.
_Told: TypeAlias = "tuple[Machine, list[Link], OpenFiles | None]"


def examine(world_size: int | None) -> Examination | None:
    """Returns the report; None on ranks of a job other than 0.

    Args:
        world_size: that limits have to do for; None: that of the job, or 8.
    """
    started = started_rank()
    if started is None or (started.world_size == 1 and not started.is_elastic):
        return _alone(world_size or 8)
    variables = dict(os.environ)
    dist.set_debug_level(dist.DebugLevel.OFF)  # type: ignore[attr-defined] # it counts sends as collectives
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    try:
        told = gathered(_examine_rank(started.rank, variables))
    finally:
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
    return _report(told, world_size or started.world_size) if started.rank == 0 else None


def _alone(world_size: int) -> Examination:
    variables = dict(os.environ)  # those of ranks that launch has started are its own
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "OFF"  # it counts sends as collectives
    try:
        told = launch(
            _examine_rank, _RANKS, backend="gloo", args=(variables,), timeout=_SECONDS, start_timeout=_SECONDS
        )
    except RankFailedError as error:
        machine = look(1)
        lines = str(error).strip().splitlines()
        failed = Finding(
            ERROR,
            f"{_RANKS} ranks of this machine could not be started, or could not reach each other: {lines[-1]}",
            "see the findings about interfaces and variables; GLOO_SOCKET_IFNAME=lo shows whether it is the network",
            machine.host,
        )
        return Examination([machine], [], [], None, world_size, in_order([*machine.findings, failed]))
    finally:
        os.environ.pop("TORCH_DISTRIBUTED_DEBUG")
        os.environ.update(variables)
    return _report(told, world_size)


def _examine_rank(rank: int, variables: Mapping[str, str]) -> _Told:
    # what differs on another machine, or in another container: the name first
    ids = [socket.gethostname(), _read(Path("/proc/sys/kernel/random/boot_id"))]
    with contextlib.suppress(OSError):
        ids.append(os.readlink("/proc/self/ns/net"))
    hosts = _names(gathered(tuple(ids)))
    machine, before = look(len(set(hosts)), variables, hosts[rank]), segments()
    files, links = measure_files(), measure_links(hosts)
    sent, again = (now - then for now, then in zip(segments(), before, strict=True))
    machine.findings += check_segments(machine.host, sent, again)
    return machine, links, files


def _names(ids: list[tuple[str, ...]]) -> list[str]:
    """Returns a name for each rank's machine: its own, with a number where several have the same."""
    same: dict[str, list[tuple[str, ...]]] = {}
    for found in dict.fromkeys(ids):
        same.setdefault(found[0], []).append(found)
    return [i[0] if len(same[i[0]]) == 1 else f"{i[0]}#{same[i[0]].index(i) + 1}" for i in ids]


def _report(told: list[_Told], world_size: int) -> Examination:
    _, links, files = told[0]
    looks = [machine for machine, _, _ in told]
    hosts, findings = [m.host for m in looks], [f for m in looks for f in m.findings]
    machines = [looks[hosts.index(host)] for host in dict.fromkeys(hosts)]
    findings += [*compare(machines), *check_links(links, hosts)]
    if files is not None:
        for machine in machines:
            found = check_open_files(machine.limits, *files, world_size)
            findings += [f._replace(where=machine.host) for f in found]
    return Examination(machines, hosts, links, files, world_size, in_order(findings))


# ------------------------------------------------------------ the report
def as_text(report: Examination) -> str:
    lines = [line for machine in report.machines for line in _machine(machine)]
    if report.files is not None:
        lines.append(
            f"open files of a rank: about {report.files.base:.0f} and {report.files.each:.0f} for each other rank"
        )
    for link in report.links:
        lines.append(
            f"ranks {link.first} and {link.second}: {link.gbytes:.2f} GB/s, round trip {1e3 * link.trip:.2f} ms "
            f"(longest {1e3 * link.longest:.2f}), clocks {1e3 * link.clock:+.1f} ms"
        )
    lines.append("")
    for finding in report.findings:
        where = f" [{finding.where}]" if finding.where else ""
        lines += [f"{finding.level.upper()}{where}: {finding.what}", f"    {finding.do}"]
    if not report.findings:
        lines.append(f"Nothing is in the way of {counted(report.world_size, 'rank')}.")
    return "\n".join(lines)


def _machine(machine: Machine) -> list[str]:
    devices, memory, limits = machine.devices, machine.memory, machine.limits
    accelerators = f"{devices['count']} {devices['type']}" if devices["count"] else "no accelerator"
    if devices["driver"]:
        accelerators += f" (driver {devices['driver']})"
    shown = [f"{n} {f['address'] or f['state'] or '?'}" for n, f in machine.interfaces.items() if n != "lo"]
    gib = {name: size / 2**30 for name, size in memory.items()}
    return [
        f"{machine.host} ({machine.address or 'no address'})",
        "  " + ", ".join(f"{name} {version}" for name, version in machine.versions.items()),
        f"  {accelerators}, {devices['cpus']} CPUs, {gib.get('machine', 0):.0f} GiB of memory"
        + (f" ({gib['container']:.0f} for this container)" if "container" in gib else "")
        + f", /dev/shm {gib.get('shared', 0):.1f} GiB",
        f"  open files {limits.get('open_files', -1)} (at most {limits.get('open_files_hard', -1)})",
        f"  interfaces: {', '.join(shown) or 'none but lo'}",
    ]


def as_data(report: Examination) -> dict[str, object]:
    return {
        "ok": report.is_well,
        "world_size": report.world_size,
        "machines": [{k: v for k, v in vars(m).items() if k != "findings"} for m in report.machines],
        "hosts": report.hosts,
        "links": [link._asdict() for link in report.links],
        "open_files_of_a_rank": report.files._asdict() if report.files else None,
        "findings": [finding._asdict() for finding in report.findings],
    }


# ------------------------------------------------------------ one machine
_PACKAGES = (
    "torch",
    "torch_xla",
    "numpy",
    "safetensors",
    "xxhash",
    "torchdata",
    "transformers",
    "accelerate",
    "lightning",
)
_SHM = 1 << 30  # bytes; containers have 64 MB where nobody says otherwise
_SPARE = 1.25  # files that a program opens itself, above what ranks need
_MEMLOCK = 1 << 30


@dataclass
class Machine:
    """Describes a machine, as plain data."""

    host: str
    address: str
    versions: dict[str, str]
    devices: dict[str, object]
    limits: dict[str, int]
    memory: dict[str, int]
    interfaces: dict[str, dict[str, object]]
    findings: list[Finding] = field(default_factory=list)


def look(machines: int, environment: Mapping[str, str] = os.environ, host: str = "") -> Machine:
    """Looks at this machine.

    Args:
        host: what it is called, if not by its own name.
    """
    name, address = socket.gethostname(), ""
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(name)  # what it stands for here
    host, limits = host or name, {}  # soft and hard ones; -1: none
    for kind, number in (("open_files", resource.RLIMIT_NOFILE), ("locked_memory", resource.RLIMIT_MEMLOCK)):
        limits[kind], limits[f"{kind}_hard"] = resource.getrlimit(number)
    found = Machine(host, address, _versions(), _devices(), limits, _memory(), interfaces())
    count = int(str(found.devices["count"]))
    checks = [
        *_check_versions(found.versions),
        *_check_devices(found.devices),
        *_check_memory(found),
        *check_names(found.interfaces, environment),
        *check_own_address(address, machines, environment),
        *check_variables(environment, count),
    ]
    found.findings = [f._replace(where=host) for f in checks]
    return found


# ------------------------------------------------------------------ versions and devices
def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "shardkit": ".".join(map(str, __version_tuple__))}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {**versions, "kernel": platform.release()}


def _check_versions(versions: dict[str, str]) -> Iterator[Finding]:
    ours, needs = versions.get("torch", ""), versions.get("torch_xla", "")
    if needs and ours.split("+")[0].split(".")[:2] != needs.split("+")[0].split(".")[:2]:
        what = f"torch_xla {needs} beside torch {ours}: it needs its own version of torch"
        do = f"pip install torch=={needs.split('+')[0]}, or remove torch_xla"
        yield Finding(ERROR, what, do)


def _devices() -> dict[str, object]:
    kind = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if kind is not None else 0
    driver = ""
    with contextlib.suppress(OSError):
        match = re.search(r"Module\s+([\d.]+)", Path("/proc/driver/nvidia/version").read_text())
        driver = match[1] if match else ""
    built = torch.version.cuda or torch.version.hip or ""
    cpus = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return {
        "type": kind.type if kind else "cpu",
        "count": count,
        "driver": driver,
        "torch_built_for": built,
        "cpus": cpus,
    }


def _check_devices(devices: dict[str, object]) -> Iterator[Finding]:
    if not devices["driver"] or devices["count"]:
        return
    if not devices["torch_built_for"]:
        what = f"a GPU driver ({devices['driver']}) is here, but this torch was built for CPUs alone"
        do = "install torch from the index for your CUDA version (pytorch.org/get-started)"
        yield Finding(WARNING, what, do)
    else:
        yield Finding(
            ERROR,
            f"GPU driver {devices['driver']} is here, but torch (for CUDA {devices['torch_built_for']}) sees no device",
            "see nvidia-smi and CUDA_VISIBLE_DEVICES; a driver older than torch's CUDA has to be renewed",
        )


# ------------------------------------------------------------------ limits and memory
def _memory() -> dict[str, int]:
    """Returns bytes of each kind of memory."""
    memory = {}
    with contextlib.suppress(ValueError, OSError, AttributeError):
        memory["machine"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):
        memory["container"] = int(Path("/sys/fs/cgroup/memory.max").read_text())
    with contextlib.suppress(OSError):
        usage = shutil.disk_usage("/dev/shm")
        memory["shared"], memory["shared_free"] = usage.total, usage.free
    return memory


def _check_memory(found: Machine) -> Iterator[Finding]:
    shared = found.memory.get("shared")
    if shared is not None and min(shared, found.memory["shared_free"]) < _SHM:
        yield Finding(
            WARNING,
            f"/dev/shm has {shared / 2**20:.0f} MiB, {found.memory['shared_free'] / 2**20:.0f} of them free: "
            "workers of DataLoaders and NCCL put tensors there, and die of SIGBUS when it is full",
            "docker run --shm-size=8g; Kubernetes: an emptyDir with medium: Memory at /dev/shm; "
            "remove what ended jobs have left there",
        )
    locked = found.limits.get("locked_memory", -1)
    if Path("/sys/class/infiniband").is_dir() and 0 <= locked < _MEMLOCK:
        yield Finding(
            WARNING, f"InfiniBand is here, and only {locked} bytes may be locked", "ulimit -l unlimited"
        )


def check_open_files(
    limits: Mapping[str, int], base: float, each: float, world_size: int
) -> Iterator[Finding]:
    """Compares limits with what a rank needs: ``base + each * (world_size - 1)``, as measured."""
    need = int(_SPARE * (base + each * (world_size - 1))) + 1
    soft, hard = limits.get("open_files", -1), limits.get("open_files_hard", -1)
    if soft < 0 or soft >= need:
        return
    do = f"ulimit -n {need} before the ranks start"
    if 0 <= hard < need:
        do += f" (as root, for the hard limit is {hard}: /etc/security/limits.conf, or LimitNOFILE= of the service)"
    per = f"{each:.0f} for each other rank"
    what = f"a rank may open {soft} files; with {world_size} ranks it needs about {need} ({per})"
    yield Finding(ERROR, what, do)


def compare(machines: list[Machine]) -> Iterator[Finding]:
    """Compares what has to be the same on all machines, or should be."""
    for name, level in (("python", WARNING), ("torch", ERROR), ("shardkit", ERROR), ("torch_xla", ERROR)):
        values: dict[str, list[str]] = {}
        for machine in machines:
            value = machine.versions.get(name, "none")
            if name == "python":
                value = value.rpartition(".")[0]
            values.setdefault(value, []).append(machine.host)
        if len(values) > 1:
            told = "; ".join(f"{value} on {', '.join(hosts)}" for value, hosts in values.items())
            yield Finding(
                level, f"machines have different versions of {name}: {told}", "install one everywhere"
            )
    kinds = {(m.devices["type"], m.devices["count"]) for m in machines}
    if len(kinds) > 1:
        told = "; ".join(f"{m.devices['count']} {m.devices['type']} on {m.host}" for m in machines)
        yield Finding(
            WARNING, f"machines have different devices: {told}", "check drivers where some are missing"
        )


# ------------------------------------------------------------ variables that contradict each other, or cost
_UNSET = "unset it for training"
_COSTLY = {
    "CUDA_LAUNCH_BLOCKING": ("1", "each operation on the device is waited for", _UNSET),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "torch compares each collective over all ranks", _UNSET),
    "NCCL_P2P_DISABLE": ("1", "GPUs exchange through the machine's memory", "unset it, if it can do better"),
    "NCCL_IB_DISABLE": ("1", "InfiniBand is not used", "unset it, if the machines have it"),
    "NCCL_SHM_DISABLE": ("1", "GPUs of a machine exchange through sockets", "unset it; see /dev/shm"),
    "GLOO_DEVICE_TRANSPORT": ("TCP_TLS", "what gloo sends is encrypted", "unset it within a trusted network"),
    "TORCH_USE_RTLD_GLOBAL": ("1", "symbols of libraries may replace each other's", "unset it"),
    "TORCH_SHOW_CPP_STACKTRACES": ("1", "errors take seconds", _UNSET),
    "PYTHONDONTWRITEBYTECODE": (
        "1",
        "every rank compiles every module at each start",
        "unset it where ranks start",
    ),
}


def _check_ranks(environment: Mapping[str, str]) -> Iterator[Finding]:
    started = started_rank(environment)
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    given = [name for name in names if environment.get(name)]
    if started is None and given:
        missing = [name for name in names if name not in given]
        what = "variables of another process's rank"
        if missing:
            what = f"{', '.join(given)} set, but not {', '.join(missing)}"
        what = f"{what}: libraries read them, each in its own way"
        do = f"unset {' '.join(given)}, or set all"
        yield Finding(WARNING, what, do)
    slurm, tasks = environment.get("SLURM_STEP_NUM_TASKS"), environment.get("WORLD_SIZE")
    if slurm and tasks and slurm != tasks and "TORCHELASTIC_RUN_ID" not in environment:
        what = f"srun started {slurm} tasks, and WORLD_SIZE says {tasks}: shardkit.launch goes by WORLD_SIZE"
        do = "unset RANK and WORLD_SIZE, or set them as srun has it"
        yield Finding(WARNING, what, do)
    address = environment.get("MASTER_ADDR", "")
    local, world = environment.get("LOCAL_WORLD_SIZE", ""), environment.get("WORLD_SIZE", "")
    is_here = address in ("localhost", "127.0.0.1", "::1")
    if is_here and local and world and local != world:
        what = f"MASTER_ADDR is {address}, but only {local} of {world} ranks are on this machine"
        do = "set it to an address of rank 0's machine that the others reach"
        yield Finding(ERROR, what, do)


def check_variables(environment: Mapping[str, str], devices: int) -> Iterator[Finding]:
    yield from _check_ranks(environment)
    local = environment.get("LOCAL_WORLD_SIZE", "")
    if local.isdigit() and 1 < devices < int(local):
        what = f"{local} ranks on a machine with {devices} visible accelerators"
        do = "start as many ranks as accelerators, or correct CUDA_VISIBLE_DEVICES"
        yield Finding(ERROR, what, do)
    for name, (value, costs, do) in _COSTLY.items():
        if environment.get(name) == value:
            yield Finding(NOTE, f"{name}={value}: {costs}", do)
    if environment.get("NCCL_DEBUG") in ("INFO", "TRACE"):
        yield Finding(
            NOTE, f"NCCL_DEBUG={environment['NCCL_DEBUG']}: each rank writes much", "set it to WARN"
        )


# ------------------------------------------------------------ interfaces, and what libraries that send make of them
_SIOCGIFADDR = 0x8915
_NAMED_BY = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def interfaces() -> dict[str, dict[str, object]]:
    """Lists by name address (IPv4), state, speed in Mbit/s (0: unknown), and mtu."""
    found = {}
    for _, name in socket.if_nameindex():
        folder = Path("/sys/class/net", name)
        speed = _read(folder / "speed")
        found[name] = {
            "address": _address(name),
            "state": _read(folder / "operstate"),
            "speed": max(0, int(speed)) if re.fullmatch(r"-?\d+", speed) else 0,
            "mtu": int(_read(folder / "mtu") or 0),
        }
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # the file is there, and has no answer while the interface is down
        return ""


def _address(name: str) -> str:
    if sys.platform != "linux":
        return ""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket, contextlib.suppress(OSError):
        answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return ""


def check_names(
    known: Mapping[str, Mapping[str, object]], environment: Mapping[str, str]
) -> Iterator[Finding]:
    usable = ", ".join(sorted(n for n, facts in known.items() if facts["address"])) or "none"
    for variable in _NAMED_BY:
        value = environment.get(variable, "")
        is_prefix = variable.startswith("NCCL")
        if is_prefix:  # a list of them, "=" for whole names, "^" for those that are not meant
            value = "" if value.startswith("^") else value.lstrip("=").partition(",")[0].partition(":")[0]
        if not value:
            continue
        names = [n for n in known if n.startswith(value)] if is_prefix else [value]
        if not any(n in known for n in names):
            what = f"{variable} is {environment[variable]}, and there is no such interface"
            do = f"name one of those with an address ({usable}), or unset it"
            yield Finding(ERROR, what, do)
        elif all(known[n]["state"] == "down" or not known[n]["address"] for n in names if n in known):
            what = f"{variable} is {environment[variable]}, an interface that is down or has no address"
            do = f"name one of those with an address ({usable}), or bring it up: ip link set {value} up"
            yield Finding(ERROR, what, do)


def check_own_address(address: str, machines: int, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Checks what gloo tells others of this machine: the address of its name, unless a variable says otherwise."""
    if machines < 2 or environment.get("GLOO_SOCKET_IFNAME"):
        return
    if not address or address.startswith("127."):
        what = f"this machine's name {f'stands for {address}' if address else 'has no address'}"
        yield Finding(
            WARNING,
            f"{what}: gloo tells other machines an address at which they don't reach this one",
            "correct /etc/hosts, or set GLOO_SOCKET_IFNAME to the interface towards the others (shardkit run "
            "does so)",
        )


# ------------------------------------------------------------ where machines meet
_ANSWER = datetime.timedelta(seconds=3)


def _parts(rendezvous: str) -> tuple[str, int]:
    host, _, port = rendezvous.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigurationError(f"--rdzv {rendezvous}: write HOST:PORT")
    return host, int(port)


def own_address(rendezvous: str) -> str:
    """Returns the address of this machine from which the way leads to where machines meet."""
    host, port = _parts(rendezvous)
    try:
        kind, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as way:
            way.connect(target)  # sends nothing
            return str(way.getsockname()[0])
    except OSError as error:
        raise ConfigurationError(
            f"--rdzv {rendezvous}: {error}. No way leads there from here: check the name, and with 'ip route get' "
            "which interface it takes"
        ) from error


def can_host(rendezvous: str) -> bool:
    """Says whether the address is this machine's and the port is free, so that it is here that others meet."""
    host, port = _parts(rendezvous)
    address = socket.gethostbyname(host)
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((address, port))
            return True
        except OSError as error:
            if error.errno != errno.EADDRINUSE:  # another machine's address
                return False
    if not _is_store(host, port):
        raise ConfigurationError(
            f"--rdzv {rendezvous}: the port is taken by something else (ss -tlnp says by what); choose another one, "
            "the same on all machines"
        )
    return False  # another agent of this machine was here before


def _is_store(host: str, port: int) -> bool:
    """Says whether a store of torch's answers there. What is no store may never answer the question."""
    answered = threading.Event()

    def ask() -> None:
        with contextlib.suppress(RuntimeError, ValueError):
            store = TCPStore(host, port, None, is_master=False, wait_for_workers=False, timeout=_ANSWER)
            store.check(["any"])
            answered.set()

    threading.Thread(target=ask, daemon=True).start()
    return answered.wait(_ANSWER.total_seconds())


def is_reachable(rendezvous: str) -> bool:
    try:
        socket.create_connection(_parts(rendezvous), _ANSWER.total_seconds()).close()
    except OSError:
        return False
    return True
