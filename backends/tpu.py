"""TPUs through TorchTPU (the package torch_tpu): one process a chip, eager operations, process groups of torch's.

[Note: a process's chip] TorchTPU binds a process to the chip of its LOCAL_RANK when the device is first used; it can't
take another one later. Processes of one job, be it one, find each other's chips by variables that have to be the same
in all of them before they begin: ``launch`` sets them, and ``python -m torch.tpu.distributed`` prints them for
torchrun (without ``export``).
Functions of ``torch.tpu`` that torch.accelerator has too raise when others than torch call them.

[Note: TorchTPU] What torch_tpu's ProcessGroupTpu does, as far as it decides what is done here (read in version 0.2.0):

- A collective is a compiled XLA program, on the one stream that a device has. So further connections between the same
  ranks would separate nothing, and channels share what their group has.
- Process groups smaller than the job are made by all ranks at once, and have to partition them: every rank says in
  which one it is, in the job's store, and waits for all. The first process group has all ranks.
- There is no reduce to one rank, and no split of a process group; parts of an all-gather or a reduce-scatter have one
  size; what the ranks of an all-to-all send, and what they receive, has one size too.
- Each shape is compiled. Objects of any length would be a program each, so they travel in buffers whose size is a power
  of two.
- Process groups, those of one rank too, want the variables of [Note: a process's chip].
- Its name is "tpu_dist", whichever name it was asked for by. It has no options, so no timeout that could be read.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from shardkit.backend import DONE, Copy, ReduceOp, Sizes, Work, WorkThen, check_member, check_members
from shardkit.errors import BackendError, ConfigurationError
from shardkit.types import T

from .accelerator import AcceleratorBackend, StreamGroup, is_even
from .c10d.group import NUMBERS, C10dGroup, as_bytes, as_real
from .connections import process_group_over

ADDRESSES = "TORCH_TPU_SLICEBUILDER_ADDRESSES"
TOPOLOGY = "TORCH_TPU_TOPOLOGY"
_SECONDS = 120.0
_TELL = "shardkit: environment "
# In a process of its own: what TorchTPU has found out once it keeps, and it reads the program's own arguments.
_ASK = f"""
import json, os, sys
import torch
before, ranks = dict(os.environ), int(sys.argv.pop())
from torch.tpu import distributed
distributed.set_tpu_launch_env(nproc_per_node=ranks)
changed = {{k: v for k, v in os.environ.items() if before.get(k) != v and k.startswith(("TORCH_TPU_", "TPU_"))}}
print({_TELL!r} + json.dumps(changed))
"""


class TpuBackend(AcceleratorBackend):
    """TPU tensors, one process a rank; see [Note: a process's chip]."""

    name = "tpu"
    device_type = "tpu"
    process_group_backend = "cpu:gloo,tpu:tpu"
    advice = (
        "install torch_tpu and libtpu on a machine with TPUs. Where they are installed, "
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from loading them, and  python -c 'import torch_tpu'  says what "
        "else is missing"
    )

    def _select_device(self) -> None:
        """Looks at what the process, which has its chip, needs to find the others'."""
        unset = [name for name in (ADDRESSES, TOPOLOGY) if not os.environ.get(name)]
        if unset and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigurationError(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, and {' and '.join(unset)} is not set: TPU processes can't "
                'find each other\'s chips. Run  set -a; eval "$(python -m torch.tpu.distributed)"; set +a  before '
                "torchrun or shardkit run, or start the ranks with shardkit.launch(fn, world_size, backend='tpu')"
            )

    def settle(self, device: torch.device) -> None:
        """Does nothing: the process has its chip."""

    def device_count(self) -> int:
        """Counts one for each rank of the machine: a process that has taken its chip sees that one alone."""
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) if os.environ.get(ADDRESSES) else 0
        return max(super().device_count(), ranks)

    def pinned(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        try:
            return super().pinned(numel, dtype)
        except RuntimeError:  # XLA's runtime for another processor has no such memory
            return torch.empty(numel, dtype=dtype, device="cpu")

    def _copied(self, out: torch.Tensor, tensor: torch.Tensor, at_once: bool = False) -> Copy:
        """Copies and waits: the runtime orders no streams by events yet."""
        out.copy_(tensor)
        return DONE

    def _group_type(self, serves: str) -> type[C10dGroup]:
        return C10dGroup if serves == "gloo" else TpuGroup

    def _generator(self) -> torch.Generator:
        generators: tuple[torch.Generator, ...] = torch.get_device_module(self.device_type).default_generators
        return generators[self.device().index]

    def rng_state(self) -> torch.Tensor:
        return self._generator().get_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        self._generator().set_state(state)

    def _environment_of_ranks(self, world_size: int) -> dict[str, str]:
        """See [Note: a process's chip]."""
        told = subprocess.run(
            [sys.executable, "-c", _ASK, str(world_size)],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        for line in told.stdout.splitlines():
            if line.startswith(_TELL):
                return json.loads(line.removeprefix(_TELL))  # type: ignore[no-any-return]
        why = told.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise BackendError(
            f"torch_tpu can't arrange {world_size} ranks on this machine's TPUs: {why[0]}. Launch as many ranks as the "
            "machine has chips, or another number that it has a topology for (often 1, 4 and 8)"
        )


# ------------------------------------------------------------ groups
class TpuGroup(StreamGroup):
    """Ranks of a process group of TorchTPU's; see [Note: TorchTPU]."""

    # ------------------------------------------------------------ groups
    def new_group(self, ranks: Sequence[int]) -> TpuGroup | None:
        """Makes a sub-group of these ranks; None on the others, which make groups of that size among themselves."""
        members = check_members(self, ranks)
        if len(members) < self.world_size:
            self._check_partition(members)
            others = [r for r in range(self.world_size) if r not in members]
            size = len(members)
            parts = [members, *(others[k : k + size] for k in range(0, len(others), size))]
            members = next(part for part in parts if self.rank in part)
        made = super().new_group(members)
        return made if self.rank in ranks else None  # type: ignore[return-value]

    def _check_partition(self, members: Sequence[int]) -> None:
        what = f"rank {self.rank}: a group of ranks {[self.ranks[r] for r in members]} of {list(self.ranks)}"
        if self.world_size < dist.get_world_size():
            raise ConfigurationError(
                f"{what} is not possible on TPUs: all {dist.get_world_size()} ranks of the job have to make their "
                "groups at once; make it from the group of all ranks"
            )
        if self.world_size % len(members):
            raise ConfigurationError(
                f"{what} is not possible on TPUs: groups have to partition the ranks into parts of one size; choose a "
                f"size that divides {self.world_size}"
            )

    def _connect(self, store: Store, name: str, members: Sequence[int]) -> dist.ProcessGroup:
        """Returns the group's own connections for all its ranks; for fewer, one that all ranks make at once."""
        process_group = self.of_torch()
        if process_group is not None and len(members) == self.world_size:
            return process_group
        rank, size = members.index(self.rank), len(members)
        plugin = dist.Backend._plugins["TPU"]
        kind = dist.ProcessGroup.BackendType.CUSTOM
        connected = plugin.creator_fn(store, rank, size, self._timeout)
        return process_group_over(connected, kind, store, rank, size, torch.device(self.backend.device_type))

    # ------------------------------------------------------------ tensors
    def _all_gather(self, output: Tensor, shard: Tensor, parts: Sizes, async_op: bool, label: str) -> Work:
        """Issues one all-gather, or for uneven sizes one broadcast a rank."""
        if is_even(parts):
            return super()._all_gather(output, shard, parts, async_op, label)
        numel = output.numel()
        self._follow("all_gather_into", numel, label)
        if output.dtype not in NUMBERS:
            parts = [n * output.element_size() for n in parts]
            output, shard = as_bytes(output), as_bytes(shard)
        pieces = torch.split_with_sizes(output.detach(), parts)
        if pieces[self.rank].data_ptr() != shard.data_ptr():
            pieces[self.rank].copy_(shard.detach())
        works = [self._start(self.process_group.broadcast, p, r) for r, p in enumerate(pieces) if parts[r]]
        return self._issue(works, "all_gather_into", numel, label, async_op)

    def _reduce_scatter(
        self, shard: Tensor, input: Tensor, parts: Sizes, op: ReduceOp, async_op: bool, label: str
    ) -> Work:
        """Issues one reduce-scatter, or for uneven sizes an all-reduce in place, of which the own part is taken.

        Padded to the fullest rank's size, the parts would be more bytes, and would have to be held.
        """
        if is_even(parts):
            return super()._reduce_scatter(shard, input, parts, op, async_op, label)
        work = self._all_reduce(input, op, True, label)
        start = sum(parts[: self.rank])
        return _then(work, [(shard, input.detach()[start : start + parts[self.rank]])], async_op)

    def _reduce(self, tensor: Tensor, dst: int, op: ReduceOp, async_op: bool, label: str) -> Work:
        """Works in place on ``dst``, and on the others."""
        return self._all_reduce(tensor, op, async_op, label)

    def _all_to_all(
        self, output: Tensor, input: Tensor, come: Sizes, go: Sizes, even: bool, async_op: bool, label: str
    ) -> Work:
        """Pads parts to the largest of all, which the host waits for, where sizes are given."""
        world = self.world_size
        if even:
            return super()._all_to_all(output, input, come, go, even, async_op, label)
        if input.is_complex():
            come, go = [2 * n for n in come], [2 * n for n in go]
            output, input = as_real(output), as_real(input)
        largest = torch.tensor([max(*come, *go)]).to(input.device)
        self._all_reduce(largest, ReduceOp.MAX, False, label)
        most = int(largest.item())
        if not most:
            return DONE
        sent, received = input.new_zeros(world, most), input.new_empty(world, most)
        for row, part in zip(sent, torch.split_with_sizes(input.detach(), go), strict=True):
            row[: part.numel()].copy_(part)
        each = [most] * world
        work = super()._all_to_all(received.view(-1), sent.view(-1), each, each, True, True, label)
        parts = torch.split_with_sizes(output.detach(), come)
        return _then(work, [(p, row[: p.numel()]) for p, row in zip(parts, received, strict=True)], async_op)

    # ------------------------------------------------------------ objects
    def gather_object(self, obj: T, dst: int, *, label: str = "") -> list[T] | None:
        check_member(self, "gather_object", dst)
        everything = self.all_gather_object(obj, label=label)
        return everything if self.rank == dst else None

    def _widths(self, sizes: Sequence[int]) -> Sequence[int]:
        """Returns a power of two, the same for all."""
        return [1 << (max(1, *sizes) - 1).bit_length()] * len(sizes)


def _then(work: Work, copies: list[tuple[Tensor, Tensor]], async_op: bool) -> Work:
    """Copies from the second tensors to the first when the work was waited for."""
    taken = WorkThen(work, lambda: [to.copy_(source) for to, source in copies])
    if not async_op:
        taken.wait()
    return taken
