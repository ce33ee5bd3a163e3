"""Rehearsals: an unchanged training script on simulated ranks of one process.

Says who would hang and where, before a cluster is asked for: see docs/REHEARSAL.md.
"""

from .running import Report, rehearse

__all__ = ["Report", "rehearse"]
