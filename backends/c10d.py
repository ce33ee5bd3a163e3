"""Groups on top of torch.distributed: what gloo and NCCL share.

The C++ process group is called directly: ``torch.distributed``'s functions spend ten and more Python calls on each
collective. Names of that class that differ between torch versions are avoided.
"""

from __future__ import annotations

import atexit
import ctypes
import datetime
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore  # type: ignore[attr-defined]

from shardkit.backend import Backend, ReduceOp
from shardkit.errors import OutOfStepError, RankLostError

from . import objects
from .local_part import Accumulate, Exchange, Finish
from .sizes import check_exchange, check_member, check_members, check_op, check_parts
from .watch import Call, Watch

_OPS = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.AVG: dist.ReduceOp.SUM,  # gloo has no AVG: divided afterwards
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.MIN: dist.ReduceOp.MIN,
}
PIECE = 2**20  # most elements that a rank receives in a round
SLICE = datetime.timedelta(seconds=2)
_LOST = (
    "Connection closed",
    "Connection reset",
    "Broken pipe",
    "Socket closed",
    "closed by peer",
    "ncclRemoteError",
)


# Every process group in use, and what uses it. gloo's destructor waits until nothing is in flight, which after an error
# of one rank may be never: then they are kept from being destroyed, and the process can end.
_process_groups: weakref.WeakSet[Any] = weakref.WeakSet()
_groups: weakref.WeakSet[C10dGroup] = weakref.WeakSet()
_EXIT_SECONDS = 1.0
_broken = False


def _never_destroy() -> None:
    global _broken
    _broken = True
    for process_group in list(_process_groups):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(process_group))
    _process_groups.clear()


@atexit.register
def _end_threads() -> None:
    """Destroys gloo's groups while Python still runs, if that needs no other rank.

    Shortly after a collective a thread of gloo may still be about to release its tensors. It needs the interpreter's
    lock for that, and without an interpreter it aborts the process.
    """
    if not _broken:
        helper = threading.Thread(target=_destroy, name="shardkit-exit", daemon=True)
        helper.start()
        helper.join(_EXIT_SECONDS)
    _never_destroy()


def _destroy() -> None:
    for group in list(_groups):
        if group.ends_at_exit:
            group.process_group = None


# What gloo knows by name; everything else is broadcast as bytes.
_DTYPES = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.int8,
    }
)


class Done:
    """A collective that needs no waiting."""

    def wait(self) -> None:
        return


DONE = Done()


class C10dWork:
    """Collectives in flight that were issued as one call, and what is left to do on this rank afterwards."""

    __slots__ = ("_after", "_call", "_group", "_works")

    def __init__(
        self, group: C10dGroup, works: list[Any], call: tuple[Any, ...], after: Callable[[], None] | None
    ) -> None:
        self._group, self._works, self._call, self._after = group, works, call, after

    def wait(self) -> None:
        for work in self._works:
            try:
                work.wait(SLICE)
            except RuntimeError as error:
                self._group.wait_on(work, error, Call(*self._call))
        self._works = []
        after, self._after = self._after, None
        if after is not None:
            after()


class C10dGroup:
    """Ranks of a torch.distributed process group.

    Args:
        backend: whose group this is.
        process_group: torch's object; None for a single rank that never communicates.
        ranks: global rank of each member.
    """

    ends_at_exit = True

    def __init__(
        self, backend: Backend, process_group: Any, ranks: Sequence[int], rank: int, name: str = "main",
        watch: Watch | None = None,
    ) -> None:  # fmt: skip
        self.backend = backend
        self.process_group = process_group
        self.ranks = tuple(ranks)
        self.rank = rank
        self.world_size = len(self.ranks)
        self._name = name
        self._sequence = 0
        self._exchanges: dict[tuple[int, ...], Exchange] = {}
        self._channels: dict[str, C10dGroup] = {}
        self._subgroups = 0
        if process_group is not None:
            _process_groups.add(process_group)
            _groups.add(self)
        self._watch = watch if watch is not None else self._new_watch()

    def _new_watch(self) -> Watch:
        store = None if self.process_group is None else self.process_group.get_group_store()
        return Watch(store, self.rank, self.world_size, "watch")

    # ------------------------------------------------------------ groups
    def channel(self, name: str) -> C10dGroup:
        """The same ranks over their own connections: calls in different channels never meet."""
        if self.process_group is None:
            return self
        if name not in self._channels:
            self.barrier(label=f"connecting channel {name!r}")  # a rank that does not come shows here
            pg = self._connect(f"channel/{name}", list(range(self.world_size)))
            self._channels[name] = type(self)(self.backend, pg, self.ranks, self.rank, name, self._watch)
        return self._channels[name]

    def new_group(self, ranks: Sequence[int]) -> C10dGroup | None:
        """A sub-group of these group ranks; None on the others."""
        members = check_members(self.rank, self.world_size, ranks)
        self._subgroups += 1
        self.barrier(label=f"connecting a group of ranks {members}")
        if self.rank not in members:
            return None
        pg = None
        if self.process_group is not None:
            pg = self._connect(f"group/{self._subgroups}/{'_'.join(map(str, members))}", members)
        return type(self)(self.backend, pg, [self.ranks[r] for r in members], members.index(self.rank))

    def _connect(self, name: str, members: Sequence[int]) -> Any:
        """A process group of these group ranks, known to them alone.

        torch's ``new_group`` wants every rank of the job, or names groups by how many this rank knows already, and
        then waits for ever if ranks know different numbers of them. The name under which ranks meet is ours.
        """
        store = PrefixStore(f"shardkit/{name}", self.process_group.get_group_store())
        rank, size = members.index(self.rank), len(members)
        pg = dist.ProcessGroup(store, rank, size)
        gloo = dist.ProcessGroupGloo(store, rank, size, dist.distributed_c10d.default_pg_timeout)
        kind = dist.ProcessGroup.BackendType.GLOO
        for device_type in ("cpu", "cuda"):
            pg._register_backend(torch.device(device_type), kind, gloo)
        pg._set_default_backend(kind)
        return pg

    # ------------------------------------------------------------ bookkeeping of calls
    def _issue(
        self, works: list[Any], operation: str, numel: int, label: str, async_op: bool,
        after: Callable[[], None] | None = None,
    ) -> C10dWork:  # fmt: skip
        self._sequence += 1
        call = (self._name, self._sequence, operation, numel, label)
        self._watch.issued[self._name] = self._sequence
        self._watch.recent.append(call)
        work = C10dWork(self, works, call, after)
        if not async_op:
            work.wait()
        return work

    def wait_on(self, work: Any, error: RuntimeError, call: Call) -> None:
        """Goes on waiting for a work that did not come through at once."""
        waited = SLICE
        limit = dist.distributed_c10d.default_pg_timeout
        while True:
            if "timed out" not in str(error).lower():
                self._raise(error, call)
            try:
                self._watch.look(call)
            except OutOfStepError:
                _never_destroy()
                raise
            if waited > limit:
                _never_destroy()
                message = f"rank {self.rank} waited {waited} in {call.describe()}, and no rank says why"
                self._watch.fail(message)
                raise OutOfStepError(message)
            try:
                work.wait(SLICE)
                self._watch.arrived()
                return
            except RuntimeError as again:
                error = again
                waited += SLICE

    def _raise(self, error: RuntimeError, call: Call) -> NoReturn:
        _never_destroy()
        lost = any(sign in str(error) for sign in _LOST)
        said = self._watch.last_words() if lost else ""
        self._watch.fail(said or f"{error} in {call.describe()}", lost=lost and not said)
        if said:  # it left because of an error that concerns this rank too
            raise OutOfStepError(f"rank {self.rank} was in {call.describe()}, but {said}") from error
        if lost:
            raise RankLostError(
                f"rank {self.rank} lost another rank of the group (ranks {list(self.ranks)}) during {call.describe()}. "
                f"That rank died or left; its own output says why. ({error})"
            ) from error
        raise error

    def abort(self) -> None:
        """Tells waiting ranks that this one won't come."""
        self._watch.fail("the rank gave up")

    def _start(self, call: Callable[..., Any], *args: Any) -> Any:
        """Issues on the process group; connections that broke before show here."""
        try:
            return call(*args)
        except RuntimeError as error:
            self._raise(error, Call(self._name, self._sequence + 1, "collective", 0, ""))

    # ------------------------------------------------------------ collectives
    def all_gather_into(
        self, output: torch.Tensor, shard: torch.Tensor, sizes: Sequence[int] | None = None, *,
        async_op: bool = False, label: str = "",
    ) -> Any:  # fmt: skip
        """Each rank broadcasts its slice of ``output`` in place: nothing is copied, no buffer is needed."""
        counts = check_parts("all_gather_into", self.rank, self.world_size, output, shard, sizes)
        if output.requires_grad or shard.requires_grad:
            output, shard = output.detach(), shard.detach()
        pieces = torch.split_with_sizes(output, counts)
        own = pieces[self.rank]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        if self.process_group is None:
            return DONE
        broadcast = self.process_group.broadcast
        works = [broadcast(piece, r) for r, piece in enumerate(pieces) if counts[r]]
        return self._issue(works, "all_gather_into", output.numel(), label, async_op)

    def reduce_scatter_into(
        self, shard: torch.Tensor, input: torch.Tensor, sizes: Sequence[int] | None = None, *,
        op: ReduceOp = ReduceOp.SUM, async_op: bool = False, label: str = "",
    ) -> Any:  # fmt: skip
        """Sends each rank its part and adds up locally: half the bytes of gloo's own reduce-scatter."""
        counts = tuple(check_parts("reduce_scatter_into", self.rank, self.world_size, input, shard, sizes))
        check_op("reduce_scatter_into", self.rank, op, input.dtype)
        if shard.requires_grad or input.requires_grad:
            shard, input = shard.detach(), input.detach()
        plan = self._exchanges.get(counts)
        if plan is None:
            plan = self._exchanges[counts] = Exchange(self.rank, counts)
        if self.process_group is None:
            shard.copy_(input)
            return DONE
        if plan.in_rounds:
            return self._reduce_scatter_in_rounds(shard, input, plan, op, async_op, label)
        if self.world_size == 2:  # the own part stays where it is
            local = input[plan.start : plan.end]
            other = input[plan.own :] if self.rank == 0 else input[: plan.start]
            received = input.new_empty(plan.own)
        else:  # the own part is copied, so that the input need not be taken apart
            local, other = None, input
            received = input.new_empty(plan.own * self.world_size)
        try:
            work = self.process_group.alltoall_base(received, other, plan.receive, plan.send)
        except RuntimeError as error:
            self._raise(error, Call(self._name, self._sequence + 1, "reduce_scatter_into", plan.numel, label))
        after = Accumulate(shard, local, received, op, self.world_size)
        return self._issue([work], "reduce_scatter_into", plan.numel, label, async_op, after)

    def _reduce_scatter_in_rounds(
        self,
        shard: torch.Tensor,
        input: torch.Tensor,
        plan: Exchange,
        op: ReduceOp,
        async_op: bool,
        label: str,
    ) -> Any:
        """One partner after the other and in pieces, so that little memory holds what has just arrived."""
        parts = torch.split_with_sizes(input, plan.sizes)
        own = parts[self.rank]
        received = own.new_empty(min(plan.own, PIECE))
        part_op = ReduceOp.SUM if op is ReduceOp.AVG else op
        for first in range(0, plan.largest, PIECE):
            local, result, arrived = own, shard, received
            if plan.largest > PIECE:
                local, result = own[first : first + PIECE], shard[first : first + PIECE]
                arrived = received[: local.numel()]
            for to, source in plan.partners:
                sent = parts[to] if plan.largest <= PIECE else parts[to][first : first + PIECE]
                send, receive = [0] * self.world_size, [0] * self.world_size
                send[to], receive[source] = sent.numel(), arrived.numel()
                work = self._start(self.process_group.alltoall_base, arrived, sent, receive, send)
                is_last_partner = source == plan.partners[-1][1]
                divisor = self.world_size if is_last_partner else 2
                after = Accumulate(result, local, arrived, op if is_last_partner else part_op, divisor)
                is_last = is_last_partner and first + PIECE >= plan.largest
                done = self._issue(
                    [work], "reduce_scatter_into", plan.numel, label, async_op and is_last, after
                )
                local = result
        return done

    def all_to_all(
        self, output: torch.Tensor, input: torch.Tensor, output_sizes: Sequence[int] | None = None,
        input_sizes: Sequence[int] | None = None, *, async_op: bool = False, label: str = "",
    ) -> Any:  # fmt: skip
        receive, send = check_exchange(
            "all_to_all", self.rank, self.world_size, output, input, output_sizes, input_sizes
        )
        if self.process_group is None:
            output.copy_(input)
            return DONE
        work = self._start(self.process_group.alltoall_base, output, input, receive, send)
        return self._issue([work], "all_to_all", input.numel(), label, async_op)

    def all_reduce(
        self, tensor: torch.Tensor, *, op: ReduceOp = ReduceOp.SUM, async_op: bool = False, label: str = ""
    ) -> Any:
        check_op("all_reduce", self.rank, op, tensor.dtype)
        if self.process_group is None:
            return DONE
        wire = tensor if tensor.is_contiguous() else tensor.contiguous()
        work = self._start(self.process_group.allreduce, [wire], _options(dist.AllreduceOptions(), op))
        after = Finish(tensor, wire, self.world_size if op is ReduceOp.AVG else 1)
        return self._issue([work], "all_reduce", tensor.numel(), label, async_op, after)

    def reduce(
        self,
        tensor: torch.Tensor,
        dst: int,
        *,
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        label: str = "",
    ) -> Any:
        check_member("reduce", self.rank, self.world_size, dst)
        check_op("reduce", self.rank, op, tensor.dtype)
        if self.process_group is None:
            return DONE
        options = _options(dist.ReduceOptions(), op)
        options.rootRank = dst
        wire = tensor if tensor.is_contiguous() else tensor.contiguous()
        work = self._start(self.process_group.reduce, [wire], options)
        after = Finish(tensor, wire, self.world_size if op is ReduceOp.AVG else 1)
        return self._issue([work], f"reduce(dst={dst})", tensor.numel(), label, async_op, after)

    def broadcast(self, tensor: torch.Tensor, src: int, *, async_op: bool = False, label: str = "") -> Any:
        check_member("broadcast", self.rank, self.world_size, src)
        if self.process_group is None:
            return DONE
        wire = tensor if tensor.is_contiguous() else tensor.contiguous()
        sent = wire if wire.dtype in _DTYPES else wire.detach().view(-1).view(torch.uint8)
        work = self._start(self.process_group.broadcast, sent, src)
        return self._issue(
            [work], f"broadcast(src={src})", tensor.numel(), label, async_op, Finish(tensor, wire, 1)
        )

    def barrier(self, *, label: str = "") -> None:
        if self.process_group is not None:
            self._issue([self._start(self.process_group.barrier)], "barrier", 0, label, False)

    # ------------------------------------------------------------ objects
    def all_gather_object(self, obj: Any, *, label: str = "") -> list[Any]:
        if self.process_group is None:
            return [obj]
        return objects.all_gather_object(self, obj, label)

    def gather_object(self, obj: Any, dst: int, *, label: str = "") -> list[Any] | None:
        check_member("gather_object", self.rank, self.world_size, dst)
        if self.process_group is None:
            return [obj]
        return objects.gather_object(self, obj, dst, label)

    def broadcast_object(self, obj: Any, src: int, *, label: str = "") -> Any:
        check_member("broadcast_object", self.rank, self.world_size, src)
        if self.process_group is None:
            return obj
        return objects.broadcast_object(self, obj, src, label)


def _options(options: Any, op: ReduceOp) -> Any:
    options.reduceOp = _OPS[op]
    return options
