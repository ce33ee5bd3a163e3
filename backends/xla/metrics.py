"""Counts what XLA did in this process."""

from __future__ import annotations

from collections import Counter

import torch_xla

_RUNTIME = torch_xla._XLAC


def compiles() -> int:
    """Counts graphs compiled so far by all replicas of this process."""
    return _RUNTIME._xla_counter_value("UncachedCompile") or 0


def transfers() -> Counter[str]:
    """Counts tensors that moved "to device" and "from device" so far, by all replicas of this process."""
    found: Counter[str] = Counter()
    for way in ("to device", "from device"):
        data = _RUNTIME._xla_metric_data(f"Transfer{way.title().replace(' ', '')}Time")
        found[way] = int(data[0]) if data else 0
    return found
