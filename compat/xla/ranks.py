"""Which backend the calling rank belongs to, where there is no tensor to tell by."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from shardkit.backend import Backend, Group, backend_of_job, get_backend


def current_backend() -> Backend:
    """Returns XLA in its replicas and where its devices are; else that of the process group, or of the calling thread.

    A process group over gloo says nothing in a process that uses XLA's devices: it may be there for objects.
    """
    if importlib.util.find_spec("torch_xla") is not None:
        from shardkit.backends.xla import has_accelerator, has_started, world_here

        if world_here() is not None or (has_accelerator() and (has_started() or not dist.is_initialized())):
            return get_backend("xla")
    return backend_of_job()


def rank_and_world_size() -> tuple[int, int]:
    """Finds those of the calling rank; (0, 1) outside of a job."""
    backend = current_backend()
    if backend.name in ("gloo", "cuda") and not dist.is_initialized():
        return 0, 1
    group = backend.group()
    return group.rank, group.world_size


def group_among(groups: Sequence[Sequence[int]]) -> Group:
    """Returns the one of these groups of global ranks that the calling rank is in (collective; made once).

    Raises:
        ConfigurationError: the rank is in none of them.
    """
    everyone = current_backend().group()
    return everyone if [*map(len, groups)] == [everyone.world_size] else everyone.part_of(groups)


# ------------------------------------------------------------ names of torch_xla
def names_of(module: str) -> Callable[[str], Any]:
    """Returns a module's ``__getattr__``, which takes names from this module of torch_xla's once they are asked for."""

    def get(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module(module), name)

    return get
