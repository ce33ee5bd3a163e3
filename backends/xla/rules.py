"""What replicas on a CPU refuse because a TPU does: ``SHARDKIT_XLA_RULES=tpu``.

[Note: a TPU's rules] Threads of one process can do much that the chips of a pod can't. Under these rules replicas can't
either:

- objects go through device collectives, among all ranks at once; the process's memory is no way from one to another;
- a program with collectives is one of all ranks: who brings others, over other groups or in another order is refused;
- the ranks are on several hosts, with a process a chip: ``xr.local_ordinal`` and ``xm.is_master_ordinal`` tell.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from shardkit.errors import ConfigurationError

_RULES, _HOSTS = "SHARDKIT_XLA_RULES", "SHARDKIT_XLA_HOSTS"


@dataclass(frozen=True)
class Rules:
    """Of the replicas of a process.

    Attributes:
        pod: whether they are those of a pod of TPUs.
        hosts: on how many hosts it has its chips.
    """

    pod: bool = False
    hosts: int = 1


def rules_here(world_size: int) -> Rules:
    """As the environment says.

    Raises:
        ConfigurationError: unknown rules, or ranks that can't be divided so.
    """
    rules = os.environ.get(_RULES, "")
    if rules not in ("", "tpu"):
        raise ConfigurationError(f"{_RULES}={rules}: there are the rules of a 'tpu', or none (unset)")
    if not rules:
        return Rules()
    given = os.environ.get(_HOSTS, "2" if world_size % 2 == 0 else "1")
    if not given.isdecimal() or not int(given) or world_size % int(given):
        raise ConfigurationError(
            f"{_HOSTS}={given}: {world_size} replicas can't be on so many hosts with the same number each"
        )
    return Rules(True, int(given))


def ordinals(rules: Rules, world_size: int, rank: Callable[[], int]) -> dict[str, Callable[[], int]]:
    """Functions of torch_xla.runtime as a pod has them, with a process a chip."""
    here = world_size // rules.hosts
    return {
        "local_ordinal": lambda: rank() % here,
        "host_index": lambda: rank() // here,
        "process_index": rank,
        "process_count": lambda: world_size,
        "local_process_count": lambda: here,
        "local_device_count": lambda: here,
        "addressable_device_count": lambda: 1,
    }
