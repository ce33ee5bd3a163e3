"""All deliberate faults."""

from __future__ import annotations

from tests.deliberate_faults import (
    devices,
    files,
    fully_sharded,
    jobs,
    layers,
    migration,
    ranks,
    sharded_optimizer,
)
from tests.deliberate_faults.fault import Fault

FAULTS: list[Fault] = [
    *sharded_optimizer.FAULTS,
    *fully_sharded.FAULTS,
    *layers.FAULTS,
    *files.FAULTS,
    *jobs.FAULTS,
    *migration.FAULTS,
    *ranks.FAULTS,
    *devices.FAULTS,
]
