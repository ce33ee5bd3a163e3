"""Groups on top of torch.distributed: what gloo and NCCL share.

The C++ process group is called directly: ``torch.distributed``'s functions spend ten and more Python calls on each
collective. Names of that class that differ between torch versions are avoided.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore  # type: ignore[attr-defined]

from shardkit.backend import DONE, Backend, ReduceOp, Work

from ..arguments import check_exchange, check_member, check_members, check_op, check_parts
from ..diagnosis.calls import AGREEMENT, Call
from ..diagnosis.store_thread import NoAnswer
from ..diagnosis.watch import Watch
from ..forked import LeftBehind, belongs_here
from ..torch_types import Store
from .agreement import Agreement
from .call_order import ORDERED_CHANNELS, CallOrder, Key
from .connections import DESTROYED, connect_gloo, register, timeout_of
from .local_reduction import Accumulate, Exchange, Finish
from .object_collectives import ObjectsOverTensors
from .waiting import C10dWork, TorchWork, Waiting
from .wire import NUMBERS, as_bytes, as_real

OPS = {
    ReduceOp.SUM: dist.ReduceOp(dist.ReduceOp.SUM),
    ReduceOp.AVG: dist.ReduceOp(dist.ReduceOp.SUM),  # gloo has no AVG: divided afterwards
    ReduceOp.MAX: dist.ReduceOp(dist.ReduceOp.MAX),
    ReduceOp.MIN: dist.ReduceOp(dist.ReduceOp.MIN),
}
PIECE = 2**20  # most elements that a rank receives in a round
SMALL = 2**15  # bytes that more than two ranks gather in one exchange
MAIN = "main"  # the name of what is no channel


class C10dGroup(Waiting, ObjectsOverTensors):
    """Ranks of a torch.distributed process group.

    Args:
        backend: whose group this is.
        process_group: torch's object; None for a single rank that never communicates.
        ranks: global rank of each member.
        name: of the channel.
        parent: the group that this is a channel or a sub-group of.
    """

    ends_at_exit = True
    _ops = OPS
    _dtypes = NUMBERS  # that it can carry

    def __init__(
        self, backend: Backend, process_group: dist.ProcessGroup | None, ranks: Sequence[int], rank: int,
        name: str = MAIN, parent: C10dGroup | None = None,
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
        self._meetings = 0
        self._subgroups: weakref.WeakSet[C10dGroup] = weakref.WeakSet()
        if process_group is not None:
            register(process_group, self if self.ends_at_exit else None)
            belongs_here(self)
            if parent is None:  # the user's, which lasts as long as torch has it
                self._timeout = timeout_of(process_group, backend.device_type)
                self.process_group = weakref.proxy(process_group)
            else:
                self._timeout = parent._timeout
        self._watch: Watch = self._new_watch() if parent is None or name == MAIN else parent._watch
        self._order = CallOrder() if name in ORDERED_CHANNELS and process_group is not None else None
        self._root: C10dGroup = self if parent is None else parent._root  # all its ranks are connected
        self._agreements = 0
        self._probes = []

    def _new_watch(self) -> Watch:
        store = None if self.process_group is None else self.process_group.get_group_store()
        return Watch(store, self.rank, self.world_size, "watch", self.ranks)

    # ------------------------------------------------------------ groups
    def channel(self, name: str) -> C10dGroup:
        """The same ranks over their own connections: calls in different channels never meet."""
        if self.process_group is None:
            return self
        if name not in self._channels:
            pg = self._meet(f"channel {name!r}", f"channel/{name}", list(range(self.world_size)))
            self._channels[name] = type(self)(self.backend, pg, self.ranks, self.rank, name, self)
        return self._channels[name]

    def channels(self) -> list[C10dGroup]:
        return list(self._channels.values())

    def new_group(self, ranks: Sequence[int]) -> C10dGroup | None:
        """A sub-group of these group ranks; None on the others."""
        members = check_members(self.rank, self.world_size, ranks)
        global_ranks = [self.ranks[r] for r in members]
        if self.process_group is None:
            return type(self)(self.backend, None, global_ranks, 0)
        pg = self._meet(f"a group of ranks {members}", f"group/{'_'.join(map(str, members))}", members)
        if pg is None:
            return None
        group = type(self)(self.backend, pg, global_ranks, members.index(self.rank), parent=self)
        self._subgroups.add(group)
        return group

    def _meet(self, what: str, name: str, members: Sequence[int]) -> dist.ProcessGroup | None:
        """A process group of these group ranks, known to them alone; None on the others."""
        self._meetings += 1  # for the same members may meet again
        self.barrier(label=f"connecting {what}")  # a rank that does not come shows here
        if self.rank not in members:
            return None
        name = f"{name}/{self._meetings}"
        store = PrefixStore(f"shardkit/{name}", self.process_group.get_group_store())
        return self._connect(store, name, members)

    def _connect(self, store: Store, name: str, members: Sequence[int]) -> dist.ProcessGroup:
        """A process group of the ranks that call this."""
        return connect_gloo(store, members.index(self.rank), len(members), self._timeout)

    def close(self) -> None:
        """Ends the connections of all channels and sub-groups; from now on every call raises a LifecycleError.

        Called when torch destroys the process group that all of them were made from.
        """
        for group in (*self._channels.values(), *self._subgroups):
            group.close()
        self._channels.clear()
        self._watch.close()
        self.process_group = DESTROYED

    def left_behind(self) -> None:
        """See forked.py."""
        self.process_group = LeftBehind(self.ranks[self.rank])

    # ------------------------------------------------------------ agreements
    def agree(self, what: str) -> None:
        if self._order is not None:
            self._follow("agreement", 0, what)
        elif self.process_group is not None:
            self._agree(("agreement", 0, what))

    def _agree(self, key: tuple[str, int, str]) -> None:
        """Returns when all ranks have come here with the same ``key``."""
        self._agreements += 1
        name = f"{self._name} {AGREEMENT}"
        call = (name, self._agreements, *key)
        self._watch.issued[name] = self._agreements
        self._watch.recent.append(call)
        store = self.process_group.get_group_store()
        try:
            agreement = self._start(
                Agreement, store, self._name, self._agreements, key, self.world_size, self._timeout
            )
        except NoAnswer:
            self._give_up(Call(*call))
        C10dWork(self, [agreement], call, None).wait()

    def _follow(self, operation: str, numel: int, label: str) -> None:
        """A call is about to be issued, in a channel that may keep an order; see [Note: call order]."""
        if self._order is not None and not self._order.expects(key := (operation, numel, label)):
            self._turn(key)

    def _turn(self, key: Key) -> None:
        """A call that this rank's order of calls has not predicted."""
        self._agree(key)
        if self._order is not None:
            self._order.turn(key)

    # ------------------------------------------------------------ bookkeeping of calls
    def _issue(
        self, works: list[TorchWork], operation: str, numel: int, label: str, async_op: bool,
        after: Callable[[], None] | None = None,
    ) -> Work:  # fmt: skip
        self._sequence += 1
        call = (self._name, self._sequence, operation, numel, label)
        self._watch.issued[self._name] = self._sequence
        self._watch.recent.append(call)
        work = C10dWork(self, works, call, after)
        if not async_op:
            work.wait()
        return work

    def abort(self, why: str = "the rank gave up") -> None:
        """Ranks that wait for this one hear why it has left, unless it goes on to issue something."""
        self._watch.give_up(why)

    # ------------------------------------------------------------ collectives
    def all_gather_into(
        self, output: torch.Tensor, shard: torch.Tensor, sizes: Sequence[int] | None = None, *,
        async_op: bool = False, label: str = "",
    ) -> Work:  # fmt: skip
        """Each rank broadcasts its slice of ``output`` in place: nothing is copied, no buffer is needed.

        Two ranks exchange theirs, which costs gloo half of what two broadcasts do. So do more ranks where slices are
        small, and copies of them cost less than a broadcast each.
        """
        counts = check_parts("all_gather_into", self.rank, self.world_size, output, shard, sizes)
        if output.requires_grad or shard.requires_grad:
            output, shard = output.detach(), shard.detach()
        pieces = torch.split_with_sizes(output, counts)
        own = pieces[self.rank]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        if self.process_group is None:
            return DONE
        if self._order is not None and not self._order.expects(  # here, for it would cost a call
            key := ("all_gather_into", output.numel(), label)
        ):
            self._turn(key)
        if output.is_complex():
            pieces = tuple(as_real(p) for p in pieces)
        group, numel, own = self.process_group, output.numel(), pieces[self.rank]
        works: list[TorchWork]
        try:
            if 0 in counts:
                works = [group.broadcast(piece, r) for r, piece in enumerate(pieces) if counts[r]]
            elif self.world_size == 2:
                other = 1 - self.rank
                send, receive = [0, 0], [0, 0]
                send[other], receive[other] = own.numel(), pieces[other].numel()
                works = [group.alltoall_base(pieces[other], own, receive, send)]
            elif output.nbytes <= SMALL and not output.is_complex():
                sent = own.repeat(self.world_size)
                works = [group.alltoall_base(output, sent, counts, [own.numel()] * self.world_size)]
            else:  # without a call of Python's for each
                works = list(map(group.broadcast, pieces, range(self.world_size)))
        except RuntimeError as error:
            self._raise(error, Call(self._name, self._sequence + 1, "all_gather_into", numel, label))
        return self._issue(works, "all_gather_into", numel, label, async_op)

    def reduce_scatter_into(
        self, shard: torch.Tensor, input: torch.Tensor, sizes: Sequence[int] | None = None, *,
        op: ReduceOp = ReduceOp.SUM, async_op: bool = False, label: str = "",
    ) -> Work:  # fmt: skip
        """Sends each rank its part and adds up locally: half the bytes of gloo's own reduce-scatter."""
        counts = tuple(check_parts("reduce_scatter_into", self.rank, self.world_size, input, shard, sizes))
        check_op("reduce_scatter_into", self.rank, op, input.dtype)
        if input.is_complex():
            doubled = [2 * c for c in counts]
            return self.reduce_scatter_into(
                as_real(shard), as_real(input), doubled, op=op, async_op=async_op, label=label
            )
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
        if (
            self.world_size == 2
        ):  # the own part stays where it is, and the other's is added to where it arrives
            parts = torch.split_with_sizes(input, counts)
            local, other, received = parts[self.rank], parts[1 - self.rank], shard
        else:  # the own part is copied, so that the input need not be taken apart
            local, other, received = None, input, input.new_empty(plan.own * self.world_size)
        try:
            work = self.process_group.alltoall_base(received, other, plan.receive, plan.send)
        except RuntimeError as error:
            self._raise(error, Call(self._name, self._sequence + 1, "reduce_scatter_into", plan.numel, label))
        after = Accumulate(shard, local, received, op, self.world_size)
        return self._issue([work], "reduce_scatter_into", plan.numel, label, async_op, after)

    def _reduce_scatter_in_rounds(
        self, shard: torch.Tensor, input: torch.Tensor, plan: Exchange, op: ReduceOp, async_op: bool, label: str
    ) -> Work:  # fmt: skip
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
    ) -> Work:  # fmt: skip
        receive, send = check_exchange(
            "all_to_all", self.rank, self.world_size, output, input, output_sizes, input_sizes
        )
        if self.process_group is None:
            output.copy_(input)
            return DONE
        if input.is_complex():
            receive, send = [2 * n for n in receive], [2 * n for n in send]
            output, input = as_real(output), as_real(input)
        work = self._start(self.process_group.alltoall_base, output, input, receive, send)
        return self._issue([work], "all_to_all", input.numel(), label, async_op)

    def all_reduce(
        self, tensor: torch.Tensor, *, op: ReduceOp = ReduceOp.SUM, async_op: bool = False, label: str = ""
    ) -> Work:
        """In place, any shape."""
        check_op("all_reduce", self.rank, op, tensor.dtype)
        if self.process_group is None or not tensor.numel():
            return DONE
        wire, sent = self._to_sum("all_reduce", tensor)
        self._follow("all_reduce", tensor.numel(), label)
        options = dist.AllreduceOptions()
        options.reduceOp = self._ops[op]
        work = self._start(self.process_group.allreduce, [sent], options)
        after = self._back(tensor, wire, op)
        return self._issue([work], "all_reduce", tensor.numel(), label, async_op, after)

    def reduce(
        self, tensor: torch.Tensor, dst: int, *, op: ReduceOp = ReduceOp.SUM, async_op: bool = False, label: str = ""
    ) -> Work:  # fmt: skip
        """In place on ``dst``."""
        check_member("reduce", self.rank, self.world_size, dst)
        check_op("reduce", self.rank, op, tensor.dtype)
        if self.process_group is None or not tensor.numel():
            return DONE
        wire, sent = self._to_sum("reduce", tensor)
        options = dist.ReduceOptions()
        options.reduceOp, options.rootRank = self._ops[op], dst
        work = self._start(self.process_group.reduce, [sent], options)
        after = self._back(tensor, wire, op)
        return self._issue([work], f"reduce(dst={dst})", tensor.numel(), label, async_op, after)

    def broadcast(self, tensor: torch.Tensor, src: int, *, async_op: bool = False, label: str = "") -> Work:
        """In place, any shape."""
        check_member("broadcast", self.rank, self.world_size, src)
        if self.process_group is None or not tensor.numel():
            return DONE
        wire = tensor.contiguous()
        sent = wire if wire.dtype in self._dtypes else as_bytes(wire)
        work = self._start(self.process_group.broadcast, sent, src)
        after = self._back(tensor, wire)
        return self._issue([work], f"broadcast(src={src})", tensor.numel(), label, async_op, after)

    def _to_sum(self, operation: str, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The tensor in one piece, and as numbers that the library adds up."""
        wire = tensor.contiguous()
        sent = as_real(wire) if wire.is_complex() else wire
        self._check_sum(operation, sent)
        return wire, sent

    def _check_sum(self, operation: str, tensor: torch.Tensor) -> None:
        """Raises for numbers that the library can't add up."""

    def _back(self, tensor: torch.Tensor, wire: torch.Tensor, op: ReduceOp = ReduceOp.SUM) -> Finish | None:
        """What is left to do, for means and for tensors that could not travel as they are."""
        divisor = self.world_size if op is ReduceOp.AVG and self._ops is OPS else 1
        return None if wire is tensor and divisor == 1 else Finish(tensor, wire, divisor)

    def barrier(self, *, label: str = "") -> None:
        if self.process_group is not None:
            self._issue([self._start(self.process_group.barrier)], "barrier", 0, label, False)
