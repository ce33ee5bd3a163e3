"""One record of all ranks' numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ..backend import Group

_SUMS = ("tokens_per_s", "samples_per_s", "gathered_bytes", "reduced_bytes")
_MOST = ("step_time_s", "peak_memory_bytes", "time", "step")


def combined(record: dict[str, float | int], group: Group) -> dict[str, float | int]:
    """Of the calling rank's record and the others' (collective)."""
    if group.world_size == 1:
        return record
    sent = group.channel("control").all_gather_bytes(json.dumps(record).encode(), label="metrics")
    return of_ranks([json.loads(data) for data in sent])


def of_ranks(records: Sequence[dict[str, float | int]]) -> dict[str, float | int]:
    """Rates and bytes are sums, times and memory those of the rank that has most, everything else is a mean."""
    found: dict[str, float | int] = {}
    for name in dict.fromkeys(name for record in records for name in record):
        values = [record[name] for record in records if name in record]
        if name in _SUMS:
            found[name] = sum(values)
        elif name in _MOST:
            found[name] = max(values)
        else:
            found[name] = sum(values) / len(values)
    waits = [record["exposed_wait_s"] for record in records]
    found["exposed_wait_s_max"] = max(waits)
    found["waited_for_rank"] = waits.index(min(waits))  # the others wait for who waits least
    return found
