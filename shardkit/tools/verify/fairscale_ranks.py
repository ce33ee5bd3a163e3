"""A rank process in which fairscale's FullyShardedDataParallel, unchanged, runs on a CPU over gloo.

That class asks for CUDA streams, events and one-piece reduce-scatters wherever it goes. Here streams and events do
nothing, device copies are none, and gloo gets its operands flat. The process is good for nothing else: what is compared
with fairscale never runs in it.

fairscale decides by ``compute_device`` where tensors live; pass ``torch.device("cpu")``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from typing import Any

import torch
import torch.distributed as dist

from ...types import AnyCallable, Tree


class NoStream:
    """A stream, or an event, on which everything has happened already."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NoStream)  # fairscale asserts that it is on a stream of its own

    def __hash__(self) -> int:
        return 0

    def record_event(self, event: object = None) -> NoStream:
        return self

    def synchronize(self, *other: object) -> None:
        """Does nothing."""

    wait_stream = wait_event = record = synchronize


def _returning(value: object) -> AnyCallable:
    return lambda *args, **kwargs: value


def _replace_cuda() -> None:
    """Replaces the part of ``torch.cuda``, and of tensors, that fairscale's FSDP and checkpoint_wrapper call."""
    cuda: Any = torch.cuda
    for name, value in {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "current_stream": NoStream(),
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "get_rng_state": None,  # the CPU's generator is saved beside it
        "set_rng_state": None,
        "set_device": None,
        "synchronize": None,
        "empty_cache": None,
    }.items():
        setattr(cuda, name, _returning(value))
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.Stream = cuda.Event = NoStream
    tensor: Any = torch.Tensor
    tensor.cuda = tensor.pin_memory = lambda self, *args, **kwargs: self
    tensor.record_stream = _returning(None)
    # From a real device, this is a copy.
    tensor.cpu = lambda self, *args, **kwargs: self.clone()


def start_rank(rank: int, world_size: int, rendezvous: str, backend: str) -> None:
    """Makes this process a rank for fairscale."""
    from shardkit.backends.processes import join_ranks

    join_ranks(rank, world_size, rendezvous, backend)
    _replace_cuda()
    collectives: Tree = dist
    original = collectives._reduce_scatter_base

    @functools.wraps(original)
    def flat(output: torch.Tensor, tensor: torch.Tensor, *args: Tree, **kwargs: Tree) -> Tree:
        return original(output.view(-1), tensor.reshape(-1), *args, **kwargs)

    collectives._reduce_scatter_base = flat  # gloo's one-piece reduce-scatter takes vectors only
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
