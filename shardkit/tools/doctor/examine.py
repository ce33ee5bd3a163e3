"""Examines a machine with a few ranks of its own, or all machines of the job that this process is a rank of."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from ...errors import RankFailedError
from ...launching import launch
from ...launching.started import started_rank
from ...tracing.tables import counted
from .findings import ERROR, Finding, in_order
from .links import (
    Link,
    OpenFiles,
    check_links,
    check_segments,
    gathered,
    measure_files,
    measure_links,
    segments,
)
from .machine import Machine, check_open_files, compare, look
from .network import machine_id

_RANKS = 3  # of its own: enough to tell what each further one needs
_SECONDS = 60.0  # that the ranks may take


@dataclass(frozen=True)
class Examination:
    """All that was found.

    Attributes:
        hosts: of each rank.
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


@dataclass(frozen=True)
class _Told:
    machine: Machine
    links: list[Link]
    files: OpenFiles | None
    lost: list[Finding]
    host: str


def examine(world_size: int | None) -> Examination | None:
    """The report; None on ranks of a job other than 0.

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
    hosts = _names(gathered(machine_id()))
    machine, before = look(len(set(hosts)), variables, hosts[rank]), segments()
    files, links = measure_files(), measure_links(hosts)
    sent, again = (now - then for now, then in zip(segments(), before, strict=True))
    return _Told(machine, links, files, list(check_segments(machine.host, sent, again)), hosts[rank])


def _names(ids: list[tuple[str, ...]]) -> list[str]:
    """A name for each rank's machine: its own, with a number where several have the same."""
    same: dict[str, list[tuple[str, ...]]] = {}
    for found in dict.fromkeys(ids):
        same.setdefault(found[0], []).append(found)
    return [i[0] if len(same[i[0]]) == 1 else f"{i[0]}#{same[i[0]].index(i) + 1}" for i in ids]


def _report(told: list[_Told], world_size: int) -> Examination:
    machines = list({t.machine.host: t.machine for t in reversed(told)}.values())[::-1]
    hosts, links, files = [t.host for t in told], told[0].links, told[0].files
    findings = [f for t in told for f in (*t.machine.findings, *t.lost)]
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
        "machines": [machine.as_data() for machine in report.machines],
        "hosts": report.hosts,
        "links": [link._asdict() for link in report.links],
        "open_files_of_a_rank": report.files._asdict() if report.files else None,
        "findings": [finding._asdict() for finding in report.findings],
    }
