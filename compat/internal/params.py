"""fairscale.internal, but for ``torch_version``: its modules containers, object, parallel, params, state_dict and
reduce_scatter_bucketer are all this one.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import os
import pickle
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from shardkit.backend import Group, ReduceOp, backend_for, backend_for_device, backend_of_job
from shardkit.errors import BackendError, ConfigurationError, LifecycleError
from shardkit.flattening.wrapper import rename_prefix
from shardkit.reduction.shard_gradients import local_norm
from shardkit.torch_seams.tensors import alike
from shardkit.types import AnyCallable, Args, Kwargs, StateDict, Tree


@dataclasses.dataclass
class Workhandle:
    """A collective in flight and what to call when it is done."""

    handle: object
    callback: AnyCallable | None = None


def get_global_rank(group: dist.ProcessGroup | None, rank: int) -> int:
    """Returns the global rank of a group's rank; None stands for all ranks."""
    if group is None or group is dist.group.WORLD:
        return rank
    return dist.get_global_rank(group, rank)


def calc_grad_norm(parameters: torch.Tensor | Iterable[torch.Tensor], p: float) -> torch.Tensor:
    """Returns the p-norm of parameters' gradients as one vector, [], computed in fp32 at least (no collective).

    Parameters without a gradient count as zero. Its dtype is that of the first parameter with one.
    """
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    gradients = [x.grad.detach() for x in parameters if x.grad is not None]
    if not gradients:
        return torch.tensor(0.0)
    first = gradients[0]
    wide = [g.to(torch.promote_types(g.dtype, torch.float32)) for g in gradients]
    return local_norm(wide, float(p), wide[0].new_zeros(())).to(first)


# ------------------------------------------------------------ means over ranks
BUCKET_NUMEL = 2**23


@torch.no_grad()
def average_together(tensors: Iterable[torch.Tensor], group: Group, label: str) -> None:
    """Makes each tensor the mean over all ranks, in place; every rank calls it with the same shapes."""
    for bucket in alike(tensors, BUCKET_NUMEL):
        flat = torch.cat([t.detach().reshape(-1) for t in bucket])
        group.all_reduce(flat, op=ReduceOp.AVG, label=label)
        for t, new in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
            t.copy_(new.view(t.shape))


@torch.no_grad()
def average_gradients(params: Iterable[torch.Tensor], group: Group) -> None:
    """Replaces gradients by their means over ranks.

    Those that some ranks have not count as zeros there; those that no rank has stay None.
    """
    for bucket in alike(params, BUCKET_NUMEL) if group.world_size > 1 else ():
        used = [p.grad is not None for p in bucket]
        rows = [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in bucket]
        flat = torch.cat([*rows, torch.tensor(used).to(rows[0])])
        group.all_reduce(flat, op=ReduceOp.AVG, label="gradients")
        *means, shares = flat.split([*(p.numel() for p in bucket), len(bucket)])
        # what this rank has needs no look; but where ranks share a program, all of them look
        if group.backend.even_shards_only or not all(used):
            used = [share > 0 for share in shares.tolist()]
        for p, mean, some_rank_has_it in zip(bucket, means, used, strict=True):
            p.grad = mean.view_as(p).to(p.dtype) if some_rank_has_it else None


def broadcast_object(
    obj: Tree, src_rank: int, group: dist.ProcessGroup | None = None, dist_device: torch.device | None = None
) -> Tree:
    """Returns the object of the (global) source rank, on every rank; its tensors are on the CPU (collective).

    Args:
        obj: used on the source rank only.
        group: process group; None for all ranks.
        dist_device: device through which the bytes travel; by default the group's.
    """
    mine = dist.get_rank() == src_rank
    sent = recursive_copy_to_device(obj, non_blocking=False, device=torch.device("cpu")) if mine else None
    backend = backend_of_job() if dist_device is None else backend_for_device(torch.device(dist_device).type)
    members = backend.group(group)
    return members.broadcast_object(sent, members.ranks.index(src_rank), label="broadcast_object")


# ------------------------------------------------------------ process groups by name, and chunks of equal size
def enable_pytorch_sync_bn(module: nn.Module) -> None:
    """Does nothing: older torch needed to be told of SyncBatchNorm's device count; today's does not."""


class ProcessGroupName(str, enum.Enum):
    """Names of process groups that exist once."""

    default = "default"
    reduce_scatter = "reduce_scatter"


# By the default group under which they were made; a user may destroy that and make another one.
_groups: weakref.WeakKeyDictionary[
    dist.ProcessGroup, dict[tuple[ProcessGroupName, tuple[int, ...] | None], dist.ProcessGroup]
] = weakref.WeakKeyDictionary()


def get_process_group_cached(
    name: ProcessGroupName = ProcessGroupName.default, ranks: Sequence[int] | None = None
) -> dist.ProcessGroup:
    """Returns a process group of these ranks (default: all), made at the first call for a name.

    Every rank calls at the same point.

    Raises:
        BackendError: torch.distributed is not initialized.
    """
    if dist.group.WORLD is None:
        raise BackendError("get_process_group_cached needs torch.distributed; call init_process_group first")
    made = _groups.setdefault(dist.group.WORLD, {})
    chosen = None if ranks is None else tuple(sorted(set(ranks)))
    if chosen == tuple(range(dist.get_world_size())):
        chosen = None
    key = (ProcessGroupName(name), chosen)
    if key not in made:
        made[key] = dist.new_group(ranks=None if chosen is None else list(chosen))
    return made[key]


def chunk_and_pad(tensor: torch.Tensor, num_chunks: int) -> list[torch.Tensor]:
    """Returns the flattened tensor in chunks of equal size, the last ones padded with zeros (new where padded)."""
    flat = tensor.reshape(-1)
    size = -(-flat.numel() // num_chunks)
    chunks = [flat[i * size : (i + 1) * size] for i in range(num_chunks)]
    return [c if c.numel() == size else nn.functional.pad(c, [0, size - c.numel()]) for c in chunks]


def validate_process_group(device: torch.device, process_group: dist.ProcessGroup) -> None:
    """Checks that the group's ranks reach each other with tensors on this device (collective).

    Raises:
        BackendError: they do not.
    """
    if not hasattr(process_group, "allgather"):  # in name only
        return
    ones = torch.ones(1, device=device)
    dist.all_reduce(ones, group=process_group)
    if ones.item() != process_group.size():
        raise BackendError(
            f"a collective over {process_group.size()} ranks reached {int(ones.item())}; check that each rank uses its "
            "own device"
        )


# ------------------------------------------------------------ nested containers, their tensors, argument lists
def apply_to_type(type_fn: Callable[[Tree], bool], fn: Callable[[Tree], Tree], container: Tree) -> Tree:
    """Copies nested dicts, lists, tuples and sets with ``fn(x)`` in place of each ``x`` that ``type_fn`` accepts.

    Keys are kept. OrderedDicts and namedtuples keep their class; of a PackedSequence the data is replaced (fairscale
    calls ``fn`` on it and returns the sequence as it was).
    """

    def again(x: Tree) -> Tree:
        return apply_to_type(type_fn, fn, x)

    if type_fn(container):
        return fn(container)
    if isinstance(container, PackedSequence):
        data = again(container.data)
        return container if data is None else container._replace(data=data)  # a function that only looks
    if isinstance(container, dict):
        whole = type(container) if isinstance(container, OrderedDict) else dict
        return whole((k, again(v)) for k, v in container.items())
    if isinstance(container, tuple) and hasattr(container, "_fields"):
        return type(container)(*map(again, container))
    for kind in (list, tuple, set):
        if isinstance(container, kind):
            return kind(again(x) for x in container)
    return container


def apply_to_tensors(fn: Callable[[torch.Tensor], Tree], container: Tree) -> Tree:
    return apply_to_type(torch.is_tensor, fn, container)


def recursive_copy_to_device(value: Tree, non_blocking: bool, device: torch.device) -> Tree:
    """Returns nested lists, tuples and mappings (as dicts) with their tensors on a device."""
    again = functools.partial(recursive_copy_to_device, non_blocking=non_blocking, device=device)
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=non_blocking)
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(map(again, value))
    if isinstance(value, Mapping):
        return {k: again(v) for k, v in value.items()}
    return value


def to_np(tensor_or_container: Tree) -> Tree:
    return apply_to_tensors(lambda t: t.detach().cpu().numpy(), tensor_or_container)


def from_np(ndarray_or_container: Tree) -> Tree:
    """Returns numpy arrays as tensors that share their memory."""
    import numpy as np  # the only use; torch runs without it

    return apply_to_type(lambda x: isinstance(x, np.ndarray), torch.from_numpy, ndarray_or_container)


def pack_kwargs(*args: Tree, **kwargs: Tree) -> tuple[tuple[str, ...], Args]:
    """Returns the names of keyword arguments, and all values: ``pack_kwargs(1, a=2) == (("a",), (1, 2))``."""
    return tuple(kwargs), (*args, *kwargs.values())


def unpack_kwargs(kwarg_keys: tuple[str, ...], flat_args: Args) -> tuple[Args, Kwargs]:
    """Returns arguments and keyword arguments from what :func:`pack_kwargs` returned.

    Raises:
        ConfigurationError: there are more names than values.
    """
    positional = len(flat_args) - len(kwarg_keys)
    if positional < 0:
        raise ConfigurationError(
            f"{len(kwarg_keys)} names {kwarg_keys} for {len(flat_args)} values; pass what pack_kwargs returned"
        )
    return flat_args[:positional], dict(zip(kwarg_keys, flat_args[positional:], strict=True))


def split_non_tensors(mixed: torch.Tensor | Args) -> tuple[tuple[torch.Tensor, ...], StateDict | None]:
    """Returns the tensors of a tuple, and ``{"is_tensor": one bool an element, "objects": the others}``.

    One tensor gives itself and None.
    """
    if isinstance(mixed, torch.Tensor):
        return (mixed,), None
    is_tensor = [isinstance(x, torch.Tensor) for x in mixed]
    tensors = tuple(x for x, t in zip(mixed, is_tensor, strict=True) if t)
    objects = [x for x, t in zip(mixed, is_tensor, strict=True) if not t]
    return tensors, {"is_tensor": is_tensor, "objects": objects}


def unpack_non_tensors(tensors: tuple[torch.Tensor, ...], packed_non_tensors: StateDict | None) -> Args:
    """Returns the tuple that :func:`split_non_tensors` split.

    Raises:
        ConfigurationError: the parts don't belong together.
    """
    if packed_non_tensors is None:
        return tensors
    if not isinstance(packed_non_tensors, dict):
        raise ConfigurationError(
            f"packed_non_tensors is a {type(packed_non_tensors).__name__}; pass what split_non_tensors returned"
        )
    is_tensor, objects = packed_non_tensors["is_tensor"], packed_non_tensors["objects"]
    if (len(tensors), len(objects)) != (sum(is_tensor), len(is_tensor) - sum(is_tensor)):
        raise ConfigurationError(
            f"{len(tensors)} tensors and {len(objects)} other objects for a tuple of {sum(is_tensor)} tensors and "
            f"{len(is_tensor) - sum(is_tensor)} others; pass what split_non_tensors returned"
        )
    next_tensor, next_object = iter(tensors), iter(objects)
    return tuple(next(next_tensor if t else next_object) for t in is_tensor)


# ------------------------------------------------------------ objects as bytes
def pyobject_to_tensor(obj: object, fixed_buffer_size: int = 0) -> torch.Tensor:
    """Returns the pickled object as a uint8 tensor [numel], zeros up to ``fixed_buffer_size`` if that is given.

    Raises:
        ConfigurationError: it is longer than ``fixed_buffer_size``.
    """
    pickled = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
    missing = fixed_buffer_size - pickled.numel()
    if not fixed_buffer_size:
        return pickled
    if missing < 0:
        raise ConfigurationError(
            f"the pickled object has {pickled.numel()} bytes; increase fixed_buffer_size ({fixed_buffer_size})"
        )
    return torch.nn.functional.pad(pickled, (0, missing))


def tensor_to_pyobject(tensor: torch.Tensor) -> Tree:
    """Unpickles the object of :func:`pyobject_to_tensor`, running what it says: only for tensors of own ranks."""
    return pickle.loads(bytes(tensor.cpu().tolist()))


# ------------------------------------------------------------ keys of state dicts
def find_module_instances(module: nn.Module, search_class: type[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Returns all modules of a class in the tree, with their prefixes in a state dict (``"0.linear."``).

    A module that has several names within its parent is listed once there.
    """
    found = [("", module)] if isinstance(module, search_class) else []
    for name, child in module.named_children():
        found += [(f"{name}.{prefix}", m) for prefix, m in find_module_instances(child, search_class)]
    return found


def replace_by_prefix_(state_dict: StateDict, old_prefix: str, new_prefix: str) -> None:
    """Makes keys that begin with ``old_prefix`` begin with ``new_prefix``, in place.

    Raises:
        ConfigurationError: the prefixes are equal.
    """
    if old_prefix == new_prefix:
        raise ConfigurationError(f"old_prefix and new_prefix are both {old_prefix!r}; they have to differ")
    rename_prefix(state_dict, old_prefix, new_prefix)


# ------------------------------------------------------------ small reduce-scatters collected into larger ones
# Read by code of fairscale's time. Nothing depends on it here: every backend has the collective on one buffer.
enable_nccl_base_collectives = os.getenv("ENABLE_NCCL_BASE_COLLECTIVES", "1") != "0"


def _reduce_scatter(shard: torch.Tensor, rows: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Returns the sum over ranks of this rank's row: shard [n], rows [W, n] (its contents are undefined afterwards)."""
    flat = rows.contiguous().view(-1)  # reshape(-1) of [W, 1] may be a view with gaps
    backend_for([rows]).group(group).reduce_scatter_into(shard, flat, label="ReduceScatterBucketer")


class Bucket:
    """Rows for each rank, filled from the left.

    Args:
        data: [world size, most elements of a rank].
    """

    def __init__(self, data: torch.Tensor, group: dist.ProcessGroup) -> None:
        self.data = data
        self.group = group
        self.offset = 0
        self.callbacks: list[Callable[[], object]] = []
        self.output_shard = torch.zeros_like(data[0])
        self._shape = data.shape

    def flush(self) -> None:
        """Reduces what is there and calls back (collective; nothing happens if the bucket is empty)."""
        if not self.offset:
            return
        _reduce_scatter(self.output_shard[: self.offset], self.data[:, : self.offset], self.group)
        # Before the callbacks, which may put new tensors in. Results of this round keep their own memory.
        callbacks, self.callbacks, self.offset = self.callbacks, [], 0
        self.output_shard = torch.zeros_like(self.data[0])
        for callback in callbacks:
            callback()

    def setup(self) -> None:
        """Takes memory, unless it has it."""
        if self.data.shape != self._shape:
            self.data = self.data.new_zeros(self._shape)
            self.output_shard = torch.zeros_like(self.data[0])

    def teardown(self) -> None:
        """Gives the memory back.

        Raises:
            LifecycleError: something in it was not flushed.
        """
        if self.offset:
            raise LifecycleError(
                f"{self.offset} elements were not reduced yet; call flush() before teardown()"
            )
        self.data = self.data.new_empty((self._shape[0], 0))
        self.output_shard = self.data.new_empty(0)


class ReduceScatterBucketer:
    """Collects reduce-scatters of small tensors.

    Args:
        bucket_cap_mb: size of a bucket in MiB, a fraction too, all ranks' rows together; 0 or less: none is collected.
    """

    def __init__(self, bucket_cap_mb: float = 25) -> None:
        self.bucket_cap_mb = bucket_cap_mb
        self.buckets: dict[tuple[torch.dtype, torch.device, dist.ProcessGroup], Bucket] = {}

    @torch.no_grad()
    def reduce_scatter_async(
        self,
        input_list: list[torch.Tensor],
        group: dist.ProcessGroup,
        callback_fn: Callable[[torch.Tensor], object] | None = None,
    ) -> None:
        """Sums ``input_list[r]`` over ranks for rank ``r``, now or at a later :meth:`flush` (collective).

        What is larger than a bucket is reduced at once.

        Args:
            input_list: a tensor for each rank of the group, alike in shape, dtype and device.
            callback_fn: called with this rank's sum.

        Raises:
            ConfigurationError: not as many tensors as ranks.
        """
        world_size = group.size()
        if len(input_list) != world_size:
            raise ConfigurationError(
                f"reduce_scatter_async got {len(input_list)} tensors for {world_size} ranks; it needs one for each"
            )
        first = input_list[0]
        rows = torch.stack(input_list).view(world_size, -1)  # [W, n]
        numel = first.numel()
        if numel > self._get_shard_size(first.element_size(), world_size):
            output = torch.empty_like(first, memory_format=torch.contiguous_format)
            _reduce_scatter(output.view(-1), rows, group)
            if callback_fn is not None:
                callback_fn(output)
            return
        key = (first.dtype, first.device, group)
        if key not in self.buckets:
            shape = (world_size, self._get_shard_size(first.element_size(), world_size))
            self.buckets[key] = Bucket(first.new_zeros(shape), group)
        bucket = self.buckets[key]
        bucket.setup()
        if numel > bucket.data.size(1) - bucket.offset:
            bucket.flush()
        end = bucket.offset + numel
        bucket.data[:, bucket.offset : end].copy_(rows)
        if callback_fn is not None:
            result = bucket.output_shard[bucket.offset : end].view(first.shape)
            bucket.callbacks.append(functools.partial(callback_fn, result))
        bucket.offset = end

    @torch.no_grad()
    def flush(self) -> None:
        """Reduces what waits in the buckets (collective)."""
        for bucket in self.buckets.values():
            bucket.flush()

    @torch.no_grad()
    def teardown(self) -> None:
        """Gives the buckets' memory back; they take it again when needed.

        Raises:
            LifecycleError: something was not flushed.
        """
        for bucket in self.buckets.values():
            bucket.teardown()

    def _get_shard_size(self, element_size: int, num_shards: int) -> int:
        return int(max(self.bucket_cap_mb, 0) * 2**20 // element_size // num_shards)
