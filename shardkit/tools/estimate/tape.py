"""A tape of what a rank's device is given in a step, in order: kernels, collectives, and waits for collectives."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from shardkit.backend import DONE, Copy, ReduceOp, Work
from shardkit.backends.c10d.group import PIECE, ReduceScatterPlan
from shardkit.backends.eager import ImaginedBackend, ImaginedGroup

from ...types import Args, Kwargs, Tree

_aten = torch.ops.aten
_ATTENTION = {  # matrix products, each as large as all queries by all keys; what meta tensors run: see as_on_devices
    _aten._scaled_dot_product_flash_attention_for_cpu.default: 2,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: 5,
}
_FEW = {
    _aten.embedding.default,
    _aten.index_select.default,
    _aten.gather.default,
    _aten.nll_loss_forward.default,
}
_EMPTY = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
}


class Kernel(NamedTuple):
    """Computation: operations on floating-point numbers of so many bytes, and bytes read and written."""

    flops: float
    itemsize: int
    moved: float
    on_host: bool = False


class Issue(NamedTuple):
    """A collective, or a copy, is given to its stream, where it follows those before it and what was computed so far.

    Attributes:
        number: of this one, from 0.
        after: follows the wait for this collective instead of what was computed so far; -1: nothing.
    """

    number: int
    operation: str
    nbytes: float
    label: str = ""
    after: int | None = None


class Wait(NamedTuple):
    """Computation from now on needs that collective, or copy; ``on_host`` the host goes on when it is through."""

    number: int
    on_host: bool = False


class Mark(NamedTuple):
    """A place in the program: "step" where one ends, "backward" where it begins."""

    name: str


Event: TypeAlias = "Kernel | Issue | Wait | Mark"


class TapedWork(Copy):
    """A collective or a copy whose wait is recorded, once."""

    def __init__(self, tape: Tape, number: int) -> None:
        self._tape, self._number, self._waits = tape, number, True

    def is_done(self) -> bool:
        return not self._waits

    def wait(self, on_host: bool = False) -> None:
        if self._waits:
            self._waits = False
            self._tape.add(Wait(self._number, on_host))

    def wait_on_host(self) -> None:
        self.wait(on_host=True)


class Tape:
    """Records them.

    Args:
        fuses: a compiler makes one kernel of what lies between two matrix products: it reads what was there before and
            writes what is there after.
    """

    def __init__(self, fuses: bool = False) -> None:
        self.events: list[Event] = []
        self._fuses = fuses
        self._issued = 0
        self._read: dict[int, int] = {}  # bytes by storage, of the kernel that is being fused
        self._written: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def add(self, event: Event) -> None:
        """Records an event, after the kernel that was being fused."""
        stay = sum(size for storage, size in self._written.values() if storage() is not None)
        moved = sum(self._read.values()) + stay
        self._read, self._written = {}, {}
        self.events += [Kernel(0, 4, moved), event] if moved else [event]

    def issue(self, operation: str, nbytes: float, label: str = "", after: int | None = None) -> Copy:
        """Notes that a collective on so many bytes, of all ranks together, is issued, or a copy of them."""
        self.add(Issue(self._issued, operation, nbytes, label, after))
        self._issued += 1
        return TapedWork(self, self._issued - 1)

    def operation(
        self, func: torch._ops.OpOverload, args: Args, kwargs: Kwargs, result: Tree, on_host: bool = False
    ) -> None:
        """Notes that an operation of torch was run."""
        outputs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        before = {_key(t) for t in inputs}
        if func in _EMPTY or (not func._schema.is_mutable and all(_key(t) in before for t in outputs)):
            return
        flops = _flops(func, args, kwargs, result)
        reads = {_key(t): _nbytes(t) for t in inputs}
        if func in _FEW:  # not all of what they look into
            reads = {key: min(size, sum(map(_nbytes, outputs))) for key, size in reads.items()}
        if flops or on_host or not self._fuses:
            moved = sum(reads.values()) + sum(map(_nbytes, outputs))
            self.add(Kernel(flops, outputs[0].element_size() if outputs else 4, moved, on_host))
            return
        for key, size in reads.items():
            if key not in self._written:
                self._read[key] = max(size, self._read.get(key, 0))
        for t in outputs:
            self._written[_key(t)] = weakref.ref(t.untyped_storage()), _nbytes(t)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _nbytes(tensor: torch.Tensor) -> int:
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _flops(func: torch._ops.OpOverload, args: Args, kwargs: Kwargs, result: Tree) -> float:
    if func in _ATTENTION:
        first = func is not next(iter(_ATTENTION))  # the gradient comes before the queries
        query, key = args[first], args[first + 1]
        causal = next((a for a in args if isinstance(a, bool)), kwargs.get("is_causal", False))
        products = _ATTENTION[func] * 2 * query.numel() * key.shape[-2]
        return products / 2 if causal else products
    count: Callable[..., int] | None = flop_registry.get(func._overloadpacket)
    return 0 if count is None else count(*args, **kwargs, out_val=result)


# ------------------------------------------------------------ a rank of many that don't exist
Resized = Callable[[torch.Tensor], None]


class Arriving(Work):
    """A reduction that holds memory until somebody waits for it."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory: torch.Tensor | None = memory

    def is_done(self) -> bool:
        return False

    def wait(self) -> None:
        self._memory = None


class CountingGroup(ImaginedGroup):
    """See above.

    Attributes:
        collectives: name -> number since :meth:`reset`.
        sent: bytes that a rank has to send for them, averaged over ranks.
        tape: records them, if there is one.
    """

    def __init__(self, backend: CountingBackend, world_size: int, rank: int, on_host: bool) -> None:
        super().__init__(backend, range(world_size))
        self.rank, self._on_host = rank, on_host
        self.tape: Tape | None = None
        self.reset()

    def reset(self) -> None:
        self.collectives: Counter[str] = Counter()
        self.sent = 0.0

    def _reduce_scatter(
        self,
        shard: torch.Tensor,
        input: torch.Tensor,
        parts: list[int],
        op: ReduceOp,
        async_op: bool,
        label: str,
    ) -> Work:
        work = self._carry("reduce_scatter", input, async_op, label)
        if not self._on_host or self.world_size == 1:
            return work
        # gloo has no reduce-scatter of its own: what arrives may lie beside what it is added to
        exchange = ReduceScatterPlan(self.rank, tuple(parts))
        arrived = 0 if self.world_size == 2 else exchange.own * self.world_size  # two add where it arrives
        return Arriving(shard.new_empty(min(exchange.own, PIECE) if exchange.in_rounds else arrived))

    def _carry(self, operation: str, tensor: torch.Tensor, async_op: bool, label: str) -> Work:
        twice = 2 if operation == "all_reduce" else 1
        self.collectives[operation] += 1
        nbytes = tensor.numel() * tensor.element_size()
        self.sent += twice * nbytes * (self.world_size - 1) / self.world_size
        work = DONE if self.tape is None else self.tape.issue(operation, nbytes, label)
        if not async_op:
            work.wait()
        return work


class CountingBackend(ImaginedBackend):
    """Serves meta tensors.

    Args:
        rank: which of them this is.
        resized: is told of tensors whose memory was taken or given back; None: nobody is.
        on_host: ranks are processes on CPUs, over gloo; else on devices.

    Attributes:
        pinned_storages: memory of the host.
    """

    name = "counting"

    def __init__(
        self, world_size: int, rank: int = 0, resized: Resized | None = None, on_host: bool = False
    ) -> None:
        self.counted = self._group = CountingGroup(self, world_size, rank, on_host)
        self._resized = resized
        self.pinned_storages: set[int] = set()

    def pinned(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        made = torch.empty(numel, dtype=dtype, device="meta")
        self.pinned_storages.add(made.untyped_storage()._cdata)
        return made

    def copy_down(self, out: torch.Tensor, tensor: torch.Tensor) -> Copy:
        tape = self.counted.tape
        return DONE if tape is None else tape.issue("copy_down", out.nbytes)

    def copy_up(self, out: torch.Tensor, tensor: torch.Tensor, *, at_once: bool = False) -> Copy:
        tape = self.counted.tape
        return DONE if tape is None else tape.issue("copy_up", out.nbytes, after=-1 if at_once else None)

    def device(self) -> torch.device:
        """Tells where that is made which ranks tell each other: it has values, which no other rank changes."""
        return torch.device("cpu")

    def take_storage(self, tensor: torch.Tensor) -> None:
        super().take_storage(tensor)
        self._note(tensor)

    def release_storage(self, tensor: torch.Tensor) -> None:
        super().release_storage(tensor)
        self._note(tensor)

    def _note(self, tensor: torch.Tensor) -> None:
        if self._resized is not None:
            self._resized(tensor)
