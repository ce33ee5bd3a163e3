"""The report as text and as data."""

from __future__ import annotations

from ...tracing.tables import counted
from .examine import Examination
from .machine import Machine


def as_text(report: Examination) -> str:
    """For people."""
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
    """For programs."""
    return {
        "ok": report.is_well,
        "world_size": report.world_size,
        "machines": [machine.as_data() for machine in report.machines],
        "hosts": report.hosts,
        "links": [link._asdict() for link in report.links],
        "open_files_of_a_rank": report.files._asdict() if report.files else None,
        "findings": [finding._asdict() for finding in report.findings],
    }
