"""Variables of the environment that contradict each other, or cost more than people remember."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ...launching.started import started_rank
from .findings import ERROR, NOTE, WARNING, Finding

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
    """Contradictions and costs."""
    return [*_ranks(environment), *_devices(environment, devices), *_costs(environment)]


def _ranks(environment: Mapping[str, str]) -> Iterator[Finding]:
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


def _devices(environment: Mapping[str, str], devices: int) -> Iterator[Finding]:
    local = environment.get("LOCAL_WORLD_SIZE", "")
    if local.isdigit() and 1 < devices < int(local):
        yield Finding(
            ERROR,
            f"{local} ranks on a machine with {devices} visible accelerators",
            "start as many ranks as accelerators, or correct CUDA_VISIBLE_DEVICES",
        )


def _costs(environment: Mapping[str, str]) -> Iterator[Finding]:
    for name, (value, costs, do) in _COSTLY.items():
        if environment.get(name) == value:
            yield Finding(NOTE, f"{name}={value}: {costs}", do)
    if environment.get("NCCL_DEBUG") in ("INFO", "TRACE"):
        yield Finding(
            NOTE, f"NCCL_DEBUG={environment['NCCL_DEBUG']}: each rank writes much", "set it to WARN"
        )
