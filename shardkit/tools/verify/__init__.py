"""Tools to show that training is right: the same steps in one process, with fairscale and with shardkit, compared.

``shardkit verify`` is :func:`verify` on the command line.
"""

from __future__ import annotations

from .comparing import (
    EXACT,
    Difference,
    Moment,
    Parting,
    Tolerance,
    Trace,
    check_named,
    check_numbers,
    check_optimizer_state,
    check_tensor,
    check_value,
    first_parting,
    tolerance_of,
)
from .differential import Experiment, Report, Side, Verifier, verify

__all__ = [
    "EXACT",
    "Difference",
    "Experiment",
    "Moment",
    "Parting",
    "Report",
    "Side",
    "Tolerance",
    "Trace",
    "Verifier",
    "check_named",
    "check_numbers",
    "check_optimizer_state",
    "check_tensor",
    "check_value",
    "first_parting",
    "tolerance_of",
    "verify",
]
