"""Errors that say that memory has run out."""

from __future__ import annotations

import traceback

import torch

from ..errors import ShardkitError

# What libraries say that have no class of their own for it.
_SAYINGS = ("can't allocate memory", "not enough memory", "out of memory", "status_alloc_failed")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether a device, or the host, had no memory left for this rank."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, ShardkitError):  # it may quote what another rank has said
        return False
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _SAYINGS)


def forget_frames(error: BaseException) -> None:
    """Frees what the functions held that the error came through; those that still run keep theirs."""
    seen: set[int] = set()
    reason: BaseException | None = error
    while reason is not None and id(reason) not in seen:
        seen.add(id(reason))
        traceback.clear_frames(reason.__traceback__)
        reason = reason.__cause__ or reason.__context__
