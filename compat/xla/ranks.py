"""Which backend the calling rank belongs to, where there is no tensor to tell by."""

from __future__ import annotations

import importlib
import importlib.util
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardkit.backend import Backend, Group, backend_for, get_backend
from shardkit.errors import ConfigurationError

_BY_PROCESS_GROUP = {"xla": "xla", "nccl": "cuda", "gloo": "gloo"}
_made: weakref.WeakKeyDictionary[Group, dict[tuple[tuple[int, ...], ...], Group]] = (
    weakref.WeakKeyDictionary()
)


def current_backend() -> Backend:
    """XLA in its replicas and where its devices are; else that of the process group, or of the calling thread.

    A process group over gloo says nothing in a process that uses XLA's devices: it may be there for objects.
    """
    if importlib.util.find_spec("torch_xla") is not None:
        from shardkit.backends.xla.backend import has_accelerator, has_started, in_replica

        if in_replica() or (has_accelerator() and (has_started() or not dist.is_initialized())):
            return get_backend("xla")
    if dist.is_available() and dist.is_initialized():
        name = _BY_PROCESS_GROUP.get(dist.get_backend())
        if name is not None:
            return get_backend(name)
    return backend_for([torch.empty(0)])


def rank_and_world_size() -> tuple[int, int]:
    """Finds those of the calling rank; (0, 1) outside of a job."""
    backend = current_backend()
    if backend.name in ("gloo", "cuda") and not dist.is_initialized():
        return 0, 1
    group = backend.group()
    return group.rank, group.world_size


def is_first_of_host() -> bool:
    """Whether the calling rank is the first one on its machine."""
    backend = current_backend()
    if backend.name == "xla":
        import torch_xla.runtime

        return int(torch_xla.runtime.local_ordinal()) == 0
    local = os.environ.get("LOCAL_RANK", "")
    are_processes = backend.process_group_backend is not None and dist.is_initialized()
    return int(local) == 0 if are_processes and local.isdecimal() else rank_and_world_size()[0] == 0


def group_among(groups: Sequence[Sequence[int]]) -> Group:
    """Returns the one of these groups of global ranks that the calling rank is in (collective; made once).

    Raises:
        ConfigurationError: the rank is in none of them.
    """
    everyone = current_backend().group()
    key = tuple(tuple(group) for group in groups)
    known = _made.setdefault(everyone, {})
    if key not in known:
        mine = None
        for ranks in key:
            made = everyone if len(ranks) == everyone.world_size else everyone.new_group(ranks)
            mine = made if made is not None else mine
        if mine is None:
            raise ConfigurationError(
                f"rank {everyone.rank} is in none of the groups {[list(g) for g in groups]}; each rank has to be in one"
            )
        known[key] = mine
    return known[key]


# ------------------------------------------------------------ names of torch_xla
def names_of(module: str) -> Callable[[str], Any]:
    """Returns a module's ``__getattr__``, which takes names from this module of torch_xla's once they are asked for."""

    def get(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module(module), name)

    return get
