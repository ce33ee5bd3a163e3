"""Which ranks hold parts of the same model, which hold the same part, and which are stages of one pipeline.

Ranks form a grid [data, pipeline, model]; neighbouring ranks are neighbours in the last dimension, so that the ranks
that talk most are on one machine. A group is a line of the grid.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from typing import Any

import torch
import torch.distributed as dist

from ..backend import Group, backend_for
from ..errors import ConfigurationError, LifecycleError, RankMismatchError
from .partition import ensure_divisibility

_log = logging.getLogger("shardkit.model_parallel")


class GroupsError(LifecycleError, AssertionError):
    """Model-parallel groups don't exist, or exist already. (An AssertionError too, as in fairscale.)"""


@dataclasses.dataclass(frozen=True)
class Grid:
    """The ranks of every group, in the order in which the groups are made."""

    data: list[list[int]]
    model: list[list[int]]
    pipeline: list[list[int]]


def grid(world_size: int, model_parallel_size: int, pipeline_length: int) -> Grid:
    """All groups of a job.

    Raises:
        ConfigurationError: the sizes are no positive numbers.
        PartitionError: their product does not divide the world size.
    """
    if model_parallel_size < 1 or pipeline_length < 1:
        raise ConfigurationError(
            f"model_parallel_size is {model_parallel_size} and pipeline_length is {pipeline_length}; both must be at "
            "least 1"
        )
    ensure_divisibility(world_size, model_parallel_size * pipeline_length)
    replicas = range(world_size // (model_parallel_size * pipeline_length))
    stages, parts = range(pipeline_length), range(model_parallel_size)

    def rank(replica: int, stage: int, part: int) -> int:
        return (replica * pipeline_length + stage) * model_parallel_size + part

    return Grid(
        data=[[rank(r, s, p) for r in replicas] for s, p in itertools.product(stages, parts)],
        model=[[rank(r, s, p) for p in parts] for r, s in itertools.product(replicas, stages)],
        pipeline=[[rank(r, s, p) for s in stages] for r, p in itertools.product(replicas, parts)],
    )


@dataclasses.dataclass(frozen=True)
class _Groups:
    """This rank's groups.

    Attributes:
        world: the default group under which they were made; without it they are worth nothing.
    """

    world: Any
    data: dist.ProcessGroup
    model: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    pipeline_ranks: list[int]


_current: _Groups | None = None
_calls = 0  # of initialize_model_parallel in this process; the ranks of a job make them together


def initialize_model_parallel(
    model_parallel_size_: int,
    pipeline_length: int = 1,
    *,
    model_parallel_backend: str | None = None,
    pipeline_backend: str | None = None,
    ddp_backend: str | None = None,
) -> None:
    """Makes the groups of model, data and pipeline parallelism (collective; torch.distributed is initialized before).

    With 8 ranks and a model-parallel size of 2 the model-parallel groups are (0, 1), (2, 3), (4, 5), (6, 7), the
    data-parallel ones (0, 2, 4, 6), (1, 3, 5, 7).

    Nothing is sent over the default group, so devices may be selected afterwards.

    Args:
        model_parallel_size_: ranks that share a model, at most all there are.
        pipeline_length: stages of a pipeline.
        model_parallel_backend: torch.distributed's backend of those groups; default: that of the default group.
        pipeline_backend: the same for the stages of a pipeline.
        ddp_backend: the same for the ranks that hold the same part.

    Raises:
        GroupsError: torch.distributed is not initialized, or these groups exist already.
        PartitionError: the sizes don't divide the world size.
        RankMismatchError: ranks called with different sizes; raised on all ranks.
    """
    global _current
    if not dist.is_initialized():
        raise GroupsError(
            "initialize_model_parallel needs torch.distributed; call torch.distributed.init_process_group(...) first, "
            "or start the ranks with shardkit.launch(fn, world_size)"
        )
    if model_parallel_is_initialized():
        raise GroupsError(
            f"rank {dist.get_rank()}: model parallel groups of size {get_model_parallel_world_size()} exist already; "
            "call destroy_model_parallel() before you make others"
        )
    world_size = dist.get_world_size()
    size = int(min(model_parallel_size_, world_size))
    _check_agreement(f"model_parallel_size_={size}, pipeline_length={pipeline_length}")
    all_groups = grid(world_size, size, pipeline_length)
    data, _ = _make(all_groups.data, ddp_backend)
    model, _ = _make(all_groups.model, model_parallel_backend)
    pipeline, pipeline_ranks = _make(all_groups.pipeline, pipeline_backend)
    _current = _Groups(dist.group.WORLD, data, model, pipeline, pipeline_ranks)
    if dist.get_rank() == 0:
        counts = (size, len(all_groups.data[0]), pipeline_length)
        _log.info("model parallel size %d, data parallel size %d, pipeline length %d", *counts)


def _check_agreement(arguments: str) -> None:
    """Compares what ranks were called with, through the job's store: no rank has to have selected its device."""
    global _calls
    _calls += 1
    store: Any = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
    rank, world_size, prefix = dist.get_rank(), dist.get_world_size(), f"shardkit/model_parallel/{_calls}"
    first = store.compare_set(f"{prefix}/arguments", "", arguments).decode()
    if first != arguments:
        store.set(f"{prefix}/difference", f"rank {rank} has {arguments}, another rank {first}")
    if store.add(f"{prefix}/here", 1) == world_size:
        store.set(f"{prefix}/all", "1")
    store.wait([f"{prefix}/all"])
    if store.check([f"{prefix}/difference"]):
        raise RankMismatchError(
            f"rank {rank}: ranks call initialize_model_parallel with different arguments: "
            f"{store.get(f'{prefix}/difference').decode()}; pass the same on all ranks"
        )


def _make(lines: list[list[int]], backend: str | None) -> tuple[dist.ProcessGroup, list[int]]:
    """Makes a group of each of these lists of ranks, on all ranks; the one that this rank is in, and its ranks."""
    rank = dist.get_rank()
    groups = [dist.new_group(ranks, backend=backend) for ranks in lines]
    return next((g, ranks) for g, ranks in zip(groups, lines, strict=True) if rank in ranks)


def destroy_model_parallel() -> None:
    """Forgets the groups, so that others can be made. Whoever still holds one can go on using it."""
    global _current
    _current = None


def model_parallel_is_initialized() -> bool:
    """Whether :func:`initialize_model_parallel` has made groups (and the default group is still the one it saw)."""
    return _current is not None and dist.is_initialized() and _current.world is dist.group.WORLD


def _groups() -> _Groups:
    if _current is None or not model_parallel_is_initialized():
        raise GroupsError(
            "there are no model parallel groups (yet); call initialize_model_parallel(model_parallel_size_) on every "
            "rank, after torch.distributed.init_process_group"
        )
    return _current


def get_model_parallel_group() -> dist.ProcessGroup:
    """The ranks that hold the parts of this rank's model.

    This and what follows raises GroupsError where no groups have been made.
    """
    return _groups().model


def get_data_parallel_group() -> dist.ProcessGroup:
    """The ranks that hold the same part as this rank."""
    return _groups().data


def get_pipeline_parallel_group() -> dist.ProcessGroup:
    """The stages of this rank's pipeline."""
    return _groups().pipeline


def get_pipeline_parallel_ranks() -> list[int]:
    """Global ranks of the stages of this rank's pipeline."""
    return _groups().pipeline_ranks


def get_model_parallel_world_size() -> int:
    """Number of parts of the model."""
    return dist.get_world_size(group=get_model_parallel_group())


def get_model_parallel_rank() -> int:
    """Which part this rank holds."""
    return dist.get_rank(group=get_model_parallel_group())


def get_model_parallel_src_rank() -> int:
    """Global rank of the first rank of this rank's model-parallel group."""
    return dist.get_process_group_ranks(get_model_parallel_group())[0]


def get_data_parallel_world_size() -> int:
    """Number of ranks that hold the same part as this rank."""
    return dist.get_world_size(group=get_data_parallel_group())


def get_data_parallel_rank() -> int:
    """This rank's place among them."""
    return dist.get_rank(group=get_data_parallel_group())


def group_of(tensor: torch.Tensor) -> Group:
    """The model-parallel group as this tensor's device has it."""
    return backend_for([tensor]).group(get_model_parallel_group())
