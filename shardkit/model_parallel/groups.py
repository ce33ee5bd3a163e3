"""Which ranks hold parts of the same model, which hold the same part, and which are stages of one pipeline.

Ranks form a grid [data, pipeline, context, model]; neighbouring ranks are neighbours in the last dimension, so that the
ranks that talk most are on one machine. A group is a line of the grid.

How sizes, vocabularies and tensors are cut into equal parts is here, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..backend import Backend, Group, backend_for, backend_for_device, not_compiled
from ..errors import BackendError, ConfigurationError, LifecycleError, RankMismatchError
from ..types import AnyCallable, Tree
from ..wrapping.activations import call_checkpointed

__all__ = [
    "checkpoint",
    "destroy_model_parallel",
    "get_context_parallel_group",
    "get_context_parallel_rank",
    "get_context_parallel_ranks",
    "get_context_parallel_world_size",
    "get_cuda_rng_tracker",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_ranks",
    "get_data_parallel_world_size",
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_src_rank",
    "get_model_parallel_world_size",
    "get_pipeline_parallel_group",
    "get_pipeline_parallel_ranks",
    "initialize_model_parallel",
    "model_parallel_cuda_manual_seed",
    "model_parallel_is_initialized",
]


class PartitionError(ConfigurationError):
    """Sizes that can't be cut into equal parts."""


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Checks that parts have equal size.

    Raises:
        PartitionError: they have not.
    """
    if numerator % denominator:
        raise PartitionError(
            f"{numerator} is not divisible by {denominator}: parts would have different sizes; choose a size that is "
            f"a multiple of {denominator} (such as {-(-numerator // denominator) * denominator}), or fewer ranks"
        )


def divide_and_check_no_remainder(numerator: int, denominator: int) -> int:
    """Returns the size of a part.

    Raises:
        PartitionError: parts would have different sizes.
    """
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def split_tensor_along_last_dim(
    tensor: torch.Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[torch.Tensor, ...]:
    """[..., n] -> ``num_partitions`` views [..., n / num_partitions].

    Args:
        tensor: at least one dimension.
        num_partitions: divides the last dimension.
        contiguous_split_chunks: copies in place of views where these are not contiguous.

    Raises:
        PartitionError: ``num_partitions`` does not divide the last dimension.
    """
    parts = torch.split(tensor, divide_and_check_no_remainder(tensor.size(-1), num_partitions), dim=-1)
    return tuple(part.contiguous() if contiguous_split_chunks else part for part in parts)


class VocabUtility:
    """Finds which part [first, last) of a vocabulary is a rank's."""

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """Finds it by the size of a part."""
        return rank * per_partition_vocab_size, (rank + 1) * per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(
        global_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """Finds it by the size of the whole.

        Raises:
            PartitionError: ``world_size`` does not divide the vocabulary.
        """
        size = divide_and_check_no_remainder(global_vocab_size, world_size)
        return VocabUtility.vocab_range_from_per_partition_vocab_size(size, rank, world_size)


_log = logging.getLogger("shardkit.model_parallel")


class GroupsError(LifecycleError):
    """Model-parallel groups don't exist, or exist already."""


class Grid(NamedTuple):
    """The ranks of every group, by the dimensions of the grid; in the order in which the groups are made."""

    data: list[list[int]]
    pipeline: list[list[int]]
    context: list[list[int]]
    model: list[list[int]]


def grid(
    world_size: int, model_parallel_size: int, pipeline_length: int, context_parallel_size: int = 1
) -> Grid:
    """Returns all groups of a job.

    Raises:
        ConfigurationError: the sizes are no positive numbers.
        PartitionError: their product does not divide the world size.
    """
    sizes = {
        "pipeline_length": pipeline_length,
        "context_parallel_size": context_parallel_size,
        "model_parallel_size": model_parallel_size,
    }
    if min(sizes.values()) < 1:
        given = ", ".join(f"{name} is {size}" for name, size in sizes.items())
        raise ConfigurationError(f"{given}; all must be at least 1")
    ensure_divisibility(world_size, math.prod(sizes.values()))
    ranks = torch.arange(world_size).reshape(-1, *sizes.values())
    return Grid(*(ranks.movedim(dimension, -1).flatten(0, -2).tolist() for dimension in range(4)))


class _RankLine(NamedTuple):
    """A group that this rank is in, and its global ranks."""

    group: dist.ProcessGroup
    ranks: list[int]


@dataclasses.dataclass(frozen=True)
class _Groups:
    """This rank's groups, made under the default group ``world``, without which they are worth nothing."""

    world: Any
    model: _RankLine
    context: _RankLine
    pipeline: _RankLine
    data: _RankLine


_current: _Groups | None = None
_calls = 0  # of initialize_model_parallel in this process; the ranks of a job make them together


def initialize_model_parallel(
    model_parallel_size_: int,
    pipeline_length: int = 1,
    context_parallel_size: int = 1,
    *,
    model_parallel_backend: str | None = None,
    pipeline_backend: str | None = None,
    cp_backend: str | None = None,
    ddp_backend: str | None = None,
    timeout: timedelta | None = None,
) -> None:
    """Makes the groups of model, context, pipeline and data parallelism (collective).

    torch.distributed is initialized before. With 8 ranks and a model-parallel size of 2 the model-parallel groups are
    (0, 1), (2, 3), (4, 5), (6, 7), the data-parallel ones (0, 2, 4, 6), (1, 3, 5, 7). Nothing is sent over the
    default group, so devices may be selected afterwards.

    Args:
        model_parallel_size_: ranks that share a model, at most all there are.
        pipeline_length: stages of a pipeline.
        context_parallel_size: ranks that hold the same part of a model and share each sequence.
        model_parallel_backend, pipeline_backend, cp_backend, ddp_backend: torch.distributed's backends of the groups of
            model, pipeline, context and data parallelism; default: that of the default group.
        timeout: of collectives in these groups; default: the backend's.

    Raises:
        GroupsError: torch.distributed is not initialized, or these groups exist already.
        PartitionError: the sizes don't divide the world size.
        RankMismatchError: ranks called with different sizes; raised on all ranks.

    Source: fairscale 0.4.13, and its later head for context parallelism and the timeout.
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
    _check_agreement(f"model_parallel_size_={size}, {pipeline_length=}, {context_parallel_size=}")
    all_groups = grid(world_size, size, pipeline_length, context_parallel_size)
    _current = _Groups(
        dist.group.WORLD,
        model=_make(all_groups.model, model_parallel_backend, timeout),
        context=_make(all_groups.context, cp_backend, timeout),
        pipeline=_make(all_groups.pipeline, pipeline_backend, timeout),
        data=_make(all_groups.data, ddp_backend, timeout),
    )
    if dist.get_rank() == 0:
        counts = (size, context_parallel_size, pipeline_length, len(all_groups.data[0]))
        _log.info("model parallel size %d, context %d, pipeline length %d, data parallel size %d", *counts)


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


def _make(lines: list[list[int]], backend: str | None, timeout: timedelta | None) -> _RankLine:
    """Makes a group of each of these lists of ranks, on all ranks; the one that this rank is in."""
    rank = dist.get_rank()
    made = [_RankLine(dist.new_group(ranks, timeout, backend), ranks) for ranks in lines]
    return next(line for line in made if rank in line.ranks)


def destroy_model_parallel() -> None:
    """Forgets the groups, so that others can be made. Whoever still holds one can go on using it."""
    global _current
    _current = None


def model_parallel_is_initialized() -> bool:
    """Says whether :func:`initialize_model_parallel` has made groups (and the default group is the one it saw)."""
    return _current is not None and dist.is_initialized() and _current.world is dist.group.WORLD


def _groups() -> _Groups:
    if _current is None or not model_parallel_is_initialized():
        raise GroupsError(
            "there are no model parallel groups (yet); call initialize_model_parallel(model_parallel_size_) on every "
            "rank, after torch.distributed.init_process_group"
        )
    return _current


def get_model_parallel_group() -> dist.ProcessGroup:
    """Returns the ranks that hold the parts of this rank's model.

    This and what follows raises GroupsError where no groups have been made.
    """
    return _groups().model.group


def get_context_parallel_group() -> dist.ProcessGroup:
    """Returns the ranks that hold the same part as this rank, at the same stage, and share its sequences."""
    return _groups().context.group


def get_data_parallel_group() -> dist.ProcessGroup:
    """Returns the ranks that hold the same part as this rank, and other sequences."""
    return _groups().data.group


def get_pipeline_parallel_group() -> dist.ProcessGroup:
    """Returns the stages of this rank's pipeline."""
    return _groups().pipeline.group


def get_pipeline_parallel_ranks() -> list[int]:
    """Returns the global ranks of the stages of this rank's pipeline."""
    return _groups().pipeline.ranks


def get_context_parallel_ranks() -> list[int]:
    """Returns the global ranks of those that share this rank's sequences."""
    return _groups().context.ranks


def get_data_parallel_ranks() -> list[int]:
    """Returns the global ranks of this rank's data-parallel group."""
    return _groups().data.ranks


def get_model_parallel_world_size() -> int:
    """Returns the number of parts of the model."""
    return len(_groups().model.ranks)


def get_model_parallel_rank() -> int:
    """Tells which part this rank holds."""
    return _place(_groups().model)


def get_model_parallel_src_rank() -> int:
    """Returns the global rank of the first rank of this rank's model-parallel group."""
    return _groups().model.ranks[0]


def get_context_parallel_world_size() -> int:
    """Returns the number of ranks that share this rank's sequences."""
    return len(_groups().context.ranks)


def get_context_parallel_rank() -> int:
    """Returns this rank's place among them."""
    return _place(_groups().context)


def get_data_parallel_world_size() -> int:
    """Returns the number of ranks in this rank's data-parallel group."""
    return len(_groups().data.ranks)


def get_data_parallel_rank() -> int:
    """Returns this rank's place among them."""
    return _place(_groups().data)


def _place(line: _RankLine) -> int:
    return line.ranks.index(dist.get_rank())


def group_of(tensor: torch.Tensor) -> Group:
    """Returns the model-parallel group as this tensor's device has it."""
    return backend_for([tensor]).group(get_model_parallel_group())


# ------------------------------------------------------------ random numbers, and checkpoints that draw the same again
# Outside of model-parallel regions all ranks of a model draw alike; inside, where each rank has its own part of an
# activation, each has a stream of its own. fairscale tracks the generator of the CUDA device; here it is that of the
# accelerator, and of the CPU where there is none.
_TRACKER_NAME = "model-parallel-rng"
# How far the seeds within regions are from those outside: fairscale's number, so that the same values are drawn.
_OFFSET = 2718


def device_backend() -> Backend:
    """Returns the accelerator's, where there is one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        with contextlib.suppress(BackendError):
            return backend_for_device(accelerator.type)
    return backend_for_device("cpu")


def seeded_state(seed: int) -> Tree:
    """Returns the state of the device's generator after it was seeded."""
    return torch.Generator(device=device_backend().device()).manual_seed(seed).get_state()


class CudaRNGStatesTracker:
    """Streams of random numbers by name, beside the generator's own.

    Attributes:
        states_: name -> state of the generator.
        seeds_: those that are taken.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets all streams."""
        self.states_: dict[str, torch.ByteTensor] = {}
        self.seeds_: set[int] = set()

    def get_states(self) -> dict[str, torch.ByteTensor]:
        """Returns the name -> state; a dict of its own."""
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.ByteTensor]) -> None:
        """Takes what :meth:`get_states` has returned."""
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """Adds a stream; the generator's own goes on as if nothing had been.

        Raises:
            ConfigurationError: the name or the seed is taken.
        """
        if seed in self.seeds_:
            raise ConfigurationError(
                f"seed {seed} already exists; streams with the same seed would draw the same numbers"
            )
        if name in self.states_:
            raise ConfigurationError(
                f"a random state named {name!r} already exists; choose another name or reset()"
            )
        self.seeds_.add(seed)
        self.states_[name] = seeded_state(seed)

    @contextlib.contextmanager
    def fork(self, name: str = _TRACKER_NAME) -> Iterator[None]:
        """Draws random numbers, within this block, from the stream of that name, and goes on there the next time.

        Raises:
            ConfigurationError: there is none.
        """
        if name not in self.states_:
            raise ConfigurationError(
                f"no random state named {name!r}; call model_parallel_cuda_manual_seed(seed), or add(name, seed) first"
            )
        backend = device_backend()
        outside = backend.rng_state()
        backend.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = backend.rng_state()  # type: ignore[assignment]
            backend.set_rng_state(outside)


_tracker = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """Returns the tracker that layers share."""
    return _tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seeds the accelerator's generator alike on all ranks, and a stream for model-parallel regions, one for each rank
    of a model.

    Without an accelerator the CPU's generator is left as it is, as by fairscale; it gets the stream all the same.

    Args:
        seed: the same on all ranks.

    Raises:
        GroupsError: model parallelism is not initialized.
    """
    own = seed + _OFFSET + get_model_parallel_rank()
    if dist.get_rank() == 0:
        _log.info(
            "seeds on rank 0 (data parallel rank %d): %d within model-parallel regions, %d outside",
            get_data_parallel_rank(),
            own,
            seed,
        )
    backend = device_backend()
    if backend.device_type != "cpu":
        backend.set_rng_state(seeded_state(seed))
    _tracker.reset()
    _tracker.add(_TRACKER_NAME, own)


@not_compiled
def checkpoint(function: AnyCallable, *args: object) -> Tree:
    """Runs ``function(*args)``, keeps its arguments only, and computes its activations again in backward.

    Random numbers, also those of the tracker's streams, are the same both times.

    Args:
        function: returns a tensor or a tuple of tensors.
        *args: tensors, or anything without a gradient.
    """
    before: dict[str, torch.ByteTensor] | None = None  # the streams, before the first run

    def run(*args: object) -> Tree:
        nonlocal before
        if before is None:
            before = _tracker.get_states()
            return function(*args)
        now = _tracker.get_states()
        _tracker.set_states(dict(before))
        try:
            return function(*args)
        finally:
            _tracker.set_states(now)

    # A parameter beside the arguments: backward comes also where only the function's own parameters want a gradient,
    # and the generator of its device, from which the streams draw, is put back.
    device = nn.ParameterList([torch.empty(0, device=device_backend().device())])
    return call_checkpointed(run, args, {}, near=device)
