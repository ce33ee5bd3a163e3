"""One machine: versions, devices, limits, shared memory, interfaces, variables."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from ...launching.started import started_rank
from ...version import __version_tuple__
from . import ERROR, NOTE, WARNING, Finding
from .network import check_names, check_own_address, interfaces, own_name

_PACKAGES = (
    "torch", "torch_xla", "numpy", "safetensors", "xxhash", "torchdata", "transformers", "accelerate", "lightning"
)  # fmt: skip
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

    def as_data(self) -> dict[str, object]:
        data = asdict(self)
        del data["findings"]
        return data


def look(machines: int, environment: Mapping[str, str] = os.environ, host: str = "") -> Machine:
    """Looks at this machine.

    Args:
        host: what it is called, if not by its own name.
    """
    name, address = own_name()
    host = host or name
    found = Machine(host, address, _versions(), _devices(), _limits(), _memory(), interfaces())
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
        yield Finding(
            ERROR,
            f"torch_xla {needs} beside torch {ours}: it needs its own version of torch",
            f"pip install torch=={needs.split('+')[0]}, or remove torch_xla",
        )


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
        yield Finding(
            WARNING,
            f"a GPU driver ({devices['driver']}) is here, but this torch was built for CPUs alone",
            "install torch from the index for your CUDA version (pytorch.org/get-started)",
        )
    else:
        yield Finding(
            ERROR,
            f"GPU driver {devices['driver']} is here, but torch (for CUDA {devices['torch_built_for']}) sees no device",
            "see nvidia-smi and CUDA_VISIBLE_DEVICES; a driver older than torch's CUDA has to be renewed",
        )


# ------------------------------------------------------------------ limits and memory
def _limits() -> dict[str, int]:
    """Soft and hard limits; -1: none."""
    try:
        import resource
    except ImportError:
        return {}
    limits = {}
    for name, number in (("open_files", resource.RLIMIT_NOFILE), ("locked_memory", resource.RLIMIT_MEMLOCK)):
        limits[name], limits[f"{name}_hard"] = resource.getrlimit(number)
    return limits


def _memory() -> dict[str, int]:
    """Bytes."""
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
    """Against what a rank needs: ``base + each * (world_size - 1)``, as measured."""
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
_COSTLY = {
    "CUDA_LAUNCH_BLOCKING": ("1", "each operation on the device is waited for", "unset it for training"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "torch compares each collective over all ranks", "unset it for training"),
    "NCCL_P2P_DISABLE": ("1", "GPUs exchange through the machine's memory", "unset it, if it can do better"),
    "NCCL_IB_DISABLE": ("1", "InfiniBand is not used", "unset it, if the machines have it"),
    "NCCL_SHM_DISABLE": ("1", "GPUs of a machine exchange through sockets", "unset it; see /dev/shm"),
    "GLOO_DEVICE_TRANSPORT": ("TCP_TLS", "what gloo sends is encrypted", "unset it within a trusted network"),
    "TORCH_USE_RTLD_GLOBAL": ("1", "symbols of libraries may replace each other's", "unset it"),
    "TORCH_SHOW_CPP_STACKTRACES": ("1", "errors take seconds", "unset it for training"),
    "PYTHONDONTWRITEBYTECODE": ("1", "every rank compiles every module at each start", "unset it where ranks start"),
}  # fmt: skip


def check_variables(environment: Mapping[str, str], devices: int) -> list[Finding]:
    return [*_check_ranks(environment), *_check_visible(environment, devices), *_check_costs(environment)]


def _check_ranks(environment: Mapping[str, str]) -> Iterator[Finding]:
    started = started_rank(environment)
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    given = [name for name in names if environment.get(name)]
    if started is None and given:
        missing = [name for name in names if name not in given]
        what = (
            f"{', '.join(given)} set, but not {', '.join(missing)}"
            if missing
            else "variables of another process's rank"
        )
        yield Finding(
            WARNING,
            f"{what}: libraries read them, each in its own way",
            f"unset {' '.join(given)}, or set all",
        )
    slurm, tasks = environment.get("SLURM_STEP_NUM_TASKS"), environment.get("WORLD_SIZE")
    if slurm and tasks and slurm != tasks and "TORCHELASTIC_RUN_ID" not in environment:
        yield Finding(
            WARNING,
            f"srun started {slurm} tasks, and WORLD_SIZE says {tasks}: shardkit.launch goes by WORLD_SIZE",
            "unset RANK and WORLD_SIZE, or set them as srun has it",
        )
    address = environment.get("MASTER_ADDR", "")
    local, world = environment.get("LOCAL_WORLD_SIZE", ""), environment.get("WORLD_SIZE", "")
    is_here = address in ("localhost", "127.0.0.1", "::1")
    if is_here and local and world and local != world:
        yield Finding(
            ERROR,
            f"MASTER_ADDR is {address}, but only {local} of {world} ranks are on this machine",
            "set it to an address of rank 0's machine that the others reach",
        )


def _check_visible(environment: Mapping[str, str], devices: int) -> Iterator[Finding]:
    local = environment.get("LOCAL_WORLD_SIZE", "")
    if local.isdigit() and 1 < devices < int(local):
        yield Finding(
            ERROR,
            f"{local} ranks on a machine with {devices} visible accelerators",
            "start as many ranks as accelerators, or correct CUDA_VISIBLE_DEVICES",
        )


def _check_costs(environment: Mapping[str, str]) -> Iterator[Finding]:
    for name, (value, costs, do) in _COSTLY.items():
        if environment.get(name) == value:
            yield Finding(NOTE, f"{name}={value}: {costs}", do)
    if environment.get("NCCL_DEBUG") in ("INFO", "TRACE"):
        yield Finding(
            NOTE, f"NCCL_DEBUG={environment['NCCL_DEBUG']}: each rank writes much", "set it to WARN"
        )
