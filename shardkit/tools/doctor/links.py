"""Measurements between ranks: bandwidth, round trips, clocks, and what a rank opens.

Ranks are those of the default process group (gloo). Pairs are measured one after the other, so that none is in the
other's way: all pairs of at most :data:`_MOST` ranks, one of each machine where there are several.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ...backend import get_backend
from .findings import NOTE, WARNING, Finding

_MOST = 8  # ranks
_BYTES = 8 << 20
_TRIPS = 12
_CHANNELS = 5  # what FSDP has: the group's own connections, and four channels
_CLOCKS = 1.0  # seconds; more confuses logs, and what compares times of files
_SLOW = 0.4  # of the median bandwidth
_POOR = 0.125  # GB/s: 1 Gbit/s
_LATE = 0.05  # seconds; a round trip that took as long waited for a packet that was sent again
_LOST = 0.01  # of the segments
T = TypeVar("T")


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
    """Collective; on rank 0 all links, elsewhere none.

    Args:
        hosts: of each rank.
    """
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
    """Each rank's value (collective). torch's own call for that needs numpy."""
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
    begin, counts = _open_files(), []
    sizes = [dist.get_world_size(), 2]
    kept = []
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
    """TCP segments that this machine has sent, and has sent again."""
    try:
        lines = [
            line.split()
            for line in Path("/proc/net/snmp").read_text().splitlines()
            if line.startswith("Tcp:")
        ]
    except OSError:
        return 0, 0
    counts = dict(zip(lines[0][1:], lines[1][1:], strict=True))
    return int(counts["OutSegs"]), int(counts["RetransSegs"])


def check_links(links: list[Link], hosts: list[str]) -> Iterator[Finding]:
    usual = statistics.median(link.gbytes for link in links) if links else 0.0
    for link in links:
        name = _name(link, hosts)
        if link.gbytes < _SLOW * usual or link.gbytes < _POOR:
            yield Finding(
                WARNING if link.gbytes < _SLOW * usual else NOTE,
                f"{name}: {link.gbytes:.3g} GB/s, where {usual:.3g} is usual here",
                "check that they use the fast interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), its speed "
                "(ethtool) and who else uses it",
            )
        if abs(link.clock) > _CLOCKS:
            yield Finding(
                WARNING,
                f"{name}: clocks differ by {abs(link.clock):.1f} s",
                "synchronize them (chrony, ntpd)",
            )


def check_segments(host: str, sent: int, again: int) -> Iterator[Finding]:
    """Packets that were lost while links were measured."""
    if sent < 50 or again / sent < _LOST:
        return
    yield Finding(
        WARNING,
        f"{again} of {sent} TCP segments ({100 * again / sent:.0f} %) were sent again: packets get lost",
        "check cables, switches and the interface's errors (ip -s link); collectives wait for each lost packet",
        host,
    )


def _name(link: Link, hosts: list[str]) -> str:
    a, b = hosts[link.first], hosts[link.second]
    where = f" ({a})" if a == b else f" ({a}, {b})"
    return f"ranks {link.first} and {link.second}{where}"
