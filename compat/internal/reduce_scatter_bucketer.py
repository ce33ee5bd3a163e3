"""fairscale.internal.reduce_scatter_bucketer: small reduce-scatters collected into larger ones."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import torch
import torch.distributed as dist

from shardkit.backend import backend_for
from shardkit.errors import ConfigurationError, LifecycleError

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
        bucket = self._get_bucket(first, group)
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

    def _get_bucket(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> Bucket:
        key = (tensor.dtype, tensor.device, group)
        if key not in self.buckets:
            world_size = group.size()
            shape = (world_size, self._get_shard_size(tensor.element_size(), world_size))
            self.buckets[key] = Bucket(tensor.new_zeros(shape), group)
        self.buckets[key].setup()
        return self.buckets[key]
