"""The core's interface to a device family: :class:`Backend`, :class:`Group` and :class:`Work`, and the registry.

Legend of shapes: W world size, S one rank's shard numel, N = sum of all shards' numel.

The core knows devices only through these classes. A backend is picked by the device of the parameters or by name;
others add one by entry point ``shardkit.backends`` (name -> a callable that returns a Backend). A device for which
nobody has done so is served as torch.accelerator and torch.distributed describe it.
"""

from __future__ import annotations

import abc
import atexit
import enum
import importlib
import importlib.metadata
import inspect
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import TYPE_CHECKING, TypeAlias, TypeGuard, TypeVar

import torch
from torch import Tensor

from .errors import BackendError, ConfigurationError
from .progress import listen_to_errors
from .types import AnyCallable, Args, ProcessGroup, T, Timer, Tree

if TYPE_CHECKING:
    from typing_extensions import Self

F = TypeVar("F", bound=AnyCallable)
Sizes: TypeAlias = list[int]  # a numel for each rank
_eval_frame = torch._C._dynamo.eval_frame


class ReduceOp(enum.Enum):
    """Names how ranks' contributions are combined. AVG (of real or complex numbers) divides the sum by their number."""

    SUM = "sum"
    AVG = "avg"
    MAX = "max"
    MIN = "min"


def not_compiled(function: F) -> F:
    """Says to ``torch.compile`` that a function and all that it calls run as they are, outside of every graph.

    ``torch.compiler.disable`` says the same, but imports the whole compiler (seconds) whether it is used or not. These
    marks are what it leaves on a function.
    """
    skip = _eval_frame._FrameAction.SKIP
    plain = inspect.unwrap(function) if hasattr(function, "__wrapped__") else function
    _eval_frame.set_code_exec_strategy(plain.__code__, _eval_frame._FrameExecStrategy(skip, skip))
    function._torchdynamo_disable = function._torchdynamo_disable_recursive = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "shardkit runs it outside of the graph"  # type: ignore[attr-defined]
    return function


def callees_compiled(function: F) -> F:
    """Leaves the function itself as it is; functions that it calls may be compiled."""
    not_compiled(function)
    actions = _eval_frame._FrameAction
    strategy = _eval_frame._FrameExecStrategy(actions.SKIP, actions.DEFAULT)
    _eval_frame.set_code_exec_strategy(inspect.unwrap(function).__code__, strategy)
    function._torchdynamo_disable_recursive = False  # type: ignore[attr-defined]
    return function


_as_written = threading.RLock()  # torch's switch is the process's, and ranks may be threads of one


@contextmanager
def as_written() -> Iterator[None]:
    """Runs functions that torch would compile when they are called as they were written, inside."""
    with _as_written, torch.compiler.set_stance("force_eager"):
        yield


class OutsideGraphs:
    """Implementations of abstract methods are :func:`not_compiled`: what communicates is part of no graph."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        declared = {name for base in cls.__mro__[1:] for name in getattr(base, "__abstractmethods__", ())}
        for name in declared & vars(cls).keys():
            if isinstance(vars(cls)[name], FunctionType):
                not_compiled(vars(cls)[name])


class Work(OutsideGraphs, abc.ABC):
    """A collective in flight."""

    __slots__ = ()

    @abc.abstractmethod
    def wait(self) -> None:
        """Returns when the result may be used by what this rank runs next.

        Raises:
            OutOfStepError: another rank of the group waits in a different call.
            RankLostError: another rank died.
        """

    @abc.abstractmethod
    def is_done(self) -> bool:
        """Says whether :meth:`wait` would return at once, without waiting."""


class WorkThen(Work):
    """A collective in flight, and what this rank does with the result when it has been waited for."""

    __slots__ = ("_after", "_work")

    def __init__(self, work: Work, after: Callable[[], object]) -> None:
        self._work = work
        self._after: Callable[[], object] | None = after

    def is_done(self) -> bool:
        return self._work.is_done()

    def wait(self) -> None:
        self._work.wait()
        after, self._after = self._after, None  # with the memory that it keeps alive
        if after is not None:
            with torch.no_grad():
                after()


class Copy(Work):
    """A copy between host and device on its way, beside what is computed."""

    __slots__ = ()

    @abc.abstractmethod
    def wait_on_host(self) -> None:
        """Returns when it is done, which :meth:`wait` says of what the device runs next."""


class _Done(Copy):
    __slots__ = ()

    def wait(self) -> None:
        return

    def wait_on_host(self) -> None:
        return

    def is_done(self) -> bool:
        return True


DONE: Copy = _Done()
"""A work that needs no waiting."""


_parts: weakref.WeakKeyDictionary[Group, dict[object, Group]] = weakref.WeakKeyDictionary()


class Group(OutsideGraphs, abc.ABC):
    """Ranks that communicate; every method below is a collective: all ranks call it in the same order.

    ``src`` and ``dst`` are ranks within the group. Buffers are 1-D and contiguous where a shape is
    given, of any dtype in {fp32, fp64, bf16, fp16, complex64, complex128, int64, int32, uint8}. ``sizes`` holds each
    rank's numel (default: even); backends with ``even_shards_only`` refuse uneven ones. With ``async_op=False`` the
    result is ready on return and the returned work is done. ``label`` says what the call is for and
    appears in errors.

    Arguments of collectives are checked here, alike on every backend, which implements the methods with an underscore.
    Those get each rank's numel in a list, whether sizes were given or not. Every check raises a ConfigurationError.

    Attributes:
        rank: this rank's place in the group.
        world_size: number of members.
        ranks: global rank of each member, in group order.
        exchange: where a group ``exchanges``, brings two ranks the other's part of a reduce-scatter; ``after`` adds up.
    """

    exchanges = False
    exchange: Callable[..., Work]  # (output, input, *, after=None, async_op=False, label="")
    backend: Backend
    rank: int
    world_size: int
    ranks: tuple[int, ...]

    @abc.abstractmethod
    def channel(self, name: str) -> Group:
        """Returns the same ranks over a separate connection: calls in different channels never meet.

        The first call for a name is a collective; later ones return the same group.
        """

    @abc.abstractmethod
    def channels(self) -> Sequence[Group]:
        """Lists those that there are so far (no collective)."""

    @abc.abstractmethod
    def new_group(self, ranks: Sequence[int]) -> Group | None:
        """Makes a sub-group of these ranks, in ascending order (collective over this group); None on ranks outside."""

    def part_of(self, parts: Iterable[Sequence[int]]) -> Group:
        """Returns the sub-group of that one of these parts that this rank is in (collective; made once).

        Raises:
            ConfigurationError: it is in none of them.
        """
        known, key = _parts.setdefault(self, {}), tuple(map(tuple, parts))
        if key not in known:
            mine = [made for part in key if (made := self.new_group(part)) is not None]
            if not mine:
                raise ConfigurationError(
                    f"rank {self.rank} is in none of the groups {[*map(list, key)]}; each rank has to be in one"
                )
            known[key] = mine[0]
        return known[key]

    @not_compiled
    def all_gather_into(
        self,
        output: Tensor,  # [N]
        shard: Tensor,  # [S]; may be this rank's own slice of output (then nothing is copied)
        sizes: Sequence[int] | None = None,
        *,
        async_op: bool = False,
        label: str = "",
        with_own: bool = True,
    ) -> Work:
        """Gathers all shards in ``output``, in group order; where this saves a copy, its own only if ``with_own``."""
        own, world_size = shard.numel(), self.world_size
        # as check_parts, which costs a call
        flat = output.dim() == shard.dim() == 1 and output.is_contiguous() and shard.is_contiguous()
        if sizes is None and flat and output.numel() == own * world_size and shard.dtype == output.dtype:
            parts = [own] * world_size
        else:
            parts = check_parts(self, "all_gather_into", output, shard, sizes)
        if with_own:
            return self._all_gather(output, shard, parts, async_op, label)
        return self._all_gather_others(output, shard, parts, async_op, label)

    @not_compiled
    def reduce_scatter_into(
        self,
        shard: Tensor,  # [S]; must not alias input
        input: Tensor,  # [N]; its contents are undefined afterwards
        sizes: Sequence[int] | None = None,
        *,
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        label: str = "",
    ) -> Work:
        """Reduces the inputs; each rank gets its part."""
        parts = check_parts(self, "reduce_scatter_into", input, shard, sizes)
        if op is ReduceOp.AVG and not input.is_floating_point():
            self._check_op("reduce_scatter_into", op, input.dtype)
        return self._reduce_scatter(shard, input, parts, op, async_op, label)

    @not_compiled
    def all_to_all(
        self,
        output: Tensor,  # [sum(output_sizes)]
        input: Tensor,  # [sum(input_sizes)]
        output_sizes: Sequence[int] | None = None,
        input_sizes: Sequence[int] | None = None,
        *,
        async_op: bool = False,
        label: str = "",
    ) -> Work:
        """Sends a part of ``input`` to each rank, and receives one from each.

        Raises:
            ConfigurationError: sizes or dtypes don't fit.
        """
        if output.dtype != input.dtype:
            raise ConfigurationError(
                f"rank {self.rank}: all_to_all got an input of {input.dtype} and an output of {output.dtype}; they "
                "have to be the same"
            )
        come, go = self._split(output, output_sizes), self._split(input, input_sizes)
        even = output_sizes is None and input_sizes is None
        return self._all_to_all(output, input, come, go, even, async_op, label)

    @not_compiled
    def all_reduce(
        self, tensor: Tensor, *, op: ReduceOp = ReduceOp.SUM, async_op: bool = False, label: str = ""
    ) -> Work:
        """Works in place, on any shape."""
        self._check_op("all_reduce", op, tensor.dtype)
        return self._all_reduce(tensor, op, async_op, label)

    @not_compiled
    def reduce(
        self,
        tensor: Tensor,
        dst: int,
        *,
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        label: str = "",
    ) -> Work:
        """Works in place on ``dst``; on other ranks the contents are undefined afterwards."""
        check_member(self, "reduce", dst)
        self._check_op("reduce", op, tensor.dtype)
        return self._reduce(tensor, dst, op, async_op, label)

    @not_compiled
    def broadcast(self, tensor: Tensor, src: int, *, async_op: bool = False, label: str = "") -> Work:
        """Works in place, on any shape."""
        check_member(self, "broadcast", src)
        return self._broadcast(tensor, src, async_op, label)

    @abc.abstractmethod
    def barrier(self, *, label: str = "") -> None: ...

    @abc.abstractmethod
    def all_gather_bytes(self, data: bytes, *, label: str = "") -> list[bytes]:
        """Returns each rank's bytes, of any length, in rank order, on every rank."""

    @abc.abstractmethod
    def all_gather_object(self, obj: T, *, label: str = "") -> list[T]:
        """Returns each rank's picklable object, in rank order, on every rank."""

    @abc.abstractmethod
    def gather_object(self, obj: T, dst: int, *, label: str = "") -> list[T] | None:
        """Returns each rank's picklable object, in rank order, on ``dst``; None elsewhere."""

    @abc.abstractmethod
    def broadcast_object(self, obj: T, src: int, *, label: str = "") -> T: ...

    @abc.abstractmethod
    def agree(self, what: str) -> None:
        """Returns when all ranks have called it with the same text, apart from anything that is in flight.

        For turns that a rank may take alone by mistake; out of band, so that no other call can be met. In the channel
        for parameters, which keeps the order of its calls, one that follows the last call as it did before is only
        noted: a rank that does something else instead is in a different call.

        Raises:
            OutOfStepError: another rank is in a different call.
        """

    @abc.abstractmethod
    def abort(self, why: str = ...) -> None:
        """Notes that an error took this rank out of what all do together: others that wait for it fail soon.

        Those that have to wait anyway look for this, so it costs nothing where all ranks raise the same. It is
        forgotten when this rank issues a collective again.
        """

    # ------------------------------------------------------------ what a backend implements
    @abc.abstractmethod
    def _all_gather(self, output: Tensor, shard: Tensor, parts: Sizes, async_op: bool, label: str) -> Work:
        """Gathers [S] to [N]."""

    def _all_gather_others(
        self, output: Tensor, shard: Tensor, parts: Sizes, async_op: bool, label: str
    ) -> Work:
        """Gathers [S] to [N], of which this rank's own slice may stay as it is."""
        return self._all_gather(output, shard, parts, async_op, label)

    @abc.abstractmethod
    def _reduce_scatter(
        self, shard: Tensor, input: Tensor, parts: Sizes, op: ReduceOp, async_op: bool, label: str
    ) -> Work:
        """Reduces [N] to [S]."""

    @abc.abstractmethod
    def _all_to_all(
        self, output: Tensor, input: Tensor, come: Sizes, go: Sizes, even: bool, async_op: bool, label: str
    ) -> Work:
        """Sends [sum(go)], receives [sum(come)]; ``even``: no sizes were given, so that ranks know each other's."""

    @abc.abstractmethod
    def _all_reduce(self, tensor: Tensor, op: ReduceOp, async_op: bool, label: str) -> Work:
        """Works in place, on any shape."""

    @abc.abstractmethod
    def _reduce(self, tensor: Tensor, dst: int, op: ReduceOp, async_op: bool, label: str) -> Work:
        """Works in place on ``dst``, on any shape."""

    @abc.abstractmethod
    def _broadcast(self, tensor: Tensor, src: int, async_op: bool, label: str) -> Work:
        """Works in place, on any shape."""

    # ------------------------------------------------------------ checks
    def _check_op(self, operation: str, op: ReduceOp, dtype: torch.dtype) -> None:
        """Refuses an average of integers, which every device would round differently."""
        if op is ReduceOp.AVG and not (dtype.is_floating_point or dtype.is_complex):
            raise ConfigurationError(
                f"rank {self.rank}: {operation} with AVG of {dtype} is not defined; use SUM and divide"
            )

    def _split(self, tensor: Tensor, sizes: Sequence[int] | None) -> list[int]:
        """Returns each rank's numel in a tensor that all_to_all cuts over them."""
        world = self.world_size
        if sizes is None and tensor.numel() % world:
            raise ConfigurationError(
                f"rank {self.rank}: all_to_all: {tensor.numel()} elements can't be split evenly over {world} ranks; "
                "pass the sizes"
            )
        parts = [tensor.numel() // world] * world if sizes is None else list(sizes)
        if len(parts) != world or sum(parts) != tensor.numel():
            raise ConfigurationError(
                f"rank {self.rank}: all_to_all over {world} ranks got {tensor.numel()} elements and sizes {parts}; "
                "sizes need one entry a rank and have to add up to all elements"
            )
        _check_flat("all_to_all", self.rank, tensor)
        return parts


def check_parts(
    group: Group, operation: str, whole: Tensor, shard: Tensor, sizes: Sequence[int] | None
) -> list[int]:
    """Returns each rank's numel in ``whole`` [N], ``shard`` [S] being this rank's, or raises ConfigurationError."""
    own, rank, world_size = shard.numel(), group.rank, group.world_size
    parts = [own] * world_size if sizes is None else list(sizes)
    fit = len(parts) == world_size and parts[rank] == own and sum(parts) == whole.numel()
    flat = whole.dim() == shard.dim() == 1 and whole.is_contiguous() and shard.is_contiguous()
    if fit and flat and shard.dtype == whole.dtype:
        return parts
    if shard.dtype != whole.dtype:
        raise ConfigurationError(
            f"rank {rank}: {operation} got {whole.dtype} and a shard of {shard.dtype}; they have to be the same"
        )
    _check_flat(operation, rank, whole)
    _check_flat(operation, rank, shard)
    raise ConfigurationError(
        f"rank {rank}: {operation} over {world_size} ranks got {whole.numel()} elements, a shard of {own} and sizes "
        f"{parts if sizes is not None else '(none: even)'}; sizes need one entry a rank, have to "
        "add up to all elements and fit this rank's shard"
    )


def _check_flat(operation: str, rank: int, tensor: Tensor) -> None:
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ConfigurationError(
            f"rank {rank}: {operation} needs 1-D contiguous tensors, got shape {tuple(tensor.shape)} with strides "
            f"{tensor.stride()}"
        )


def check_member(group: Group, operation: str, other: int) -> None:
    """Raises ConfigurationError unless ``other`` is a rank of the group."""
    if not 0 <= other < group.world_size:
        raise ConfigurationError(
            f"rank {group.rank}: {operation} with rank {other}, but the group's ranks are 0 to {group.world_size - 1} "
            "(ranks within the group, not global ones)"
        )


def check_members(group: Group, ranks: Sequence[int]) -> list[int]:
    """Returns the group ranks of a sub-group, in ascending order; or raises a ConfigurationError."""
    chosen, world_size = sorted(ranks), group.world_size
    if not chosen or len(set(chosen)) != len(chosen) or chosen[0] < 0 or chosen[-1] >= world_size:
        raise ConfigurationError(
            f"rank {group.rank}: a sub-group of {world_size} ranks can't have the ranks {list(ranks)}; give "
            f"distinct ranks of this group, 0 to {world_size - 1}"
        )
    return chosen


def is_group(thing: object) -> TypeGuard[Group]:
    """Says whether it is one of our groups, or wraps one."""
    return callable(getattr(thing, "all_gather_into", None))


def size_of(process_group: object) -> int | None:
    """Returns how many ranks an object with ``rank()`` and ``size()`` has; None for all other objects."""
    size = getattr(process_group, "size", None)
    return size() if callable(size) and callable(getattr(process_group, "rank", None)) else None


class Pool(abc.ABC):
    """Ranks that stay alive between calls, and end with this process. A context manager.

    Args:
        timeout: seconds a call may take; None: no limit.
        start_timeout: seconds in which the ranks have to be ready; None: no limit.
    """

    def __init__(self, world_size: int, timeout: float | None, start_timeout: float | None) -> None:
        if world_size < 1:
            raise ConfigurationError(f"world_size must be at least 1, got {world_size}")
        self.world_size, self.timeout, self._start_timeout = world_size, timeout, start_timeout
        _pools.add(self)

    @abc.abstractmethod
    def run(self, fn: Callable[..., T], *args: object) -> list[T]:
        """Calls ``fn(rank, *args)`` on every rank; returns results in rank order."""

    @abc.abstractmethod
    def close(self, kill: bool = False) -> None:
        """Ends the ranks; with ``kill`` at once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(kill=error is not None)


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


@atexit.register
def _close_pools() -> None:
    for pool in list(_pools):
        pool.close(kill=True)


class Backend(abc.ABC):
    """A device family: where tensors live, what may overlap, how ranks start and meet.

    Attributes:
        device_type: ``torch.device(...).type`` of the tensors it serves.
        even_shards_only: shards of a collective have one size, and every rank must issue the same operations on the
            same shapes (a compiled graph that all ranks share).
        one_order: all ranks must issue the collectives of all groups in one order, for they may wait for each other.
        has_storage: tensors own memory that can be viewed, taken and released (false for lazy tensors).
        process_group_backend: what ``torch.distributed.init_process_group`` calls it; None where ranks have no process
            group of torch's.
    """

    name: str
    device_type: str
    even_shards_only: bool = False
    one_order: bool = False
    has_storage: bool = True
    process_group_backend: str | None = None

    @abc.abstractmethod
    def is_available(self) -> bool:
        """Says whether this machine has such a device, and what it needs is installed."""

    @abc.abstractmethod
    def device(self) -> torch.device:
        """Returns this rank's device."""

    def device_count(self) -> int:
        """Accelerators of this machine that ranks can have; 0: as torch.accelerator counts them."""
        return 0

    def settle(self, device: torch.device) -> None:
        """Makes ``device``, where parameters of this rank are, the rank's, if none has been selected yet."""
        return

    @abc.abstractmethod
    def group(self, process_group: ProcessGroup = None) -> Group:
        """Returns the :class:`Group` for what a user passes as ``process_group``: None (all ranks), a
        torch.distributed group, a Group, or an object with ``rank()`` and ``size()``.

        Raises:
            ConfigurationError: no process group exists yet, or this rank is no member.
        """

    def take_storage(self, tensor: Tensor) -> None:
        """Gives a tensor whose storage was released its memory back (contents undefined)."""
        numel = int(tensor.storage_offset()) + tensor.numel()  # it owns its whole storage
        tensor.untyped_storage().resize_(numel * tensor.element_size())

    def release_storage(self, tensor: Tensor) -> None:
        """Gives the memory of a tensor that owns its whole storage back; views of it stay valid objects.

        It goes to the current stream's pool: other streams that use it have to be waited for before.
        """
        tensor.untyped_storage().resize_(0)

    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Takes host memory that the device can copy from and to beside what it computes."""
        return torch.empty(numel, dtype=dtype, device="cpu")

    def pin(self, tensor: Tensor) -> Tensor:
        """Returns a copy in such memory."""
        return self.pinned(tensor.numel(), tensor.dtype).view(tensor.shape).copy_(tensor.detach())

    def copy_down(self, out: Tensor, tensor: Tensor) -> Copy:
        """Copies a tensor of the device to pinned memory, after what is computed now and beside what follows.

        Until it is done or was waited for, neither may change.
        """
        return self._copied(out, tensor)

    def copy_up(self, out: Tensor, tensor: Tensor, *, at_once: bool = False) -> Copy:
        """Copies pinned memory to the device, as :meth:`copy_down` does.

        With ``at_once`` nothing that is computed now uses ``out``, and nothing has to come first.
        """
        return self._copied(out, tensor, at_once)

    def _copied(self, out: Tensor, tensor: Tensor, at_once: bool = False) -> Copy:
        out.copy_(tensor)
        return DONE

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Blocks until all work of this rank's device is done."""

    def timer(self) -> Timer | None:
        """Makes the timer of the current stream of this rank's device; None where devices tell no times."""
        return None

    # lazy execution
    def mark_step(self, *, wait: bool = False) -> None:
        """Runs what was recorded so far, where execution is lazy; else nothing."""
        return

    def tie(self, tensors: Sequence[Tensor]) -> None:
        """Orders, where a compiler decides, whatever uses one of these from now on after all of them; else nothing.

        Values stay the same. Tensors on other devices are left out.
        """
        return

    @abc.abstractmethod
    def rng_state(self) -> Tensor: ...

    @abc.abstractmethod
    def set_rng_state(self, state: Tensor) -> None: ...

    def launch(
        self,
        fn: Callable[..., T],
        world_size: int,
        args: Args = (),
        *,
        timeout: float | None = None,
        start_timeout: float | None = 180.0,
    ) -> list[T]:
        """Runs ``fn(rank, *args)`` on that many ranks; returns each rank's (picklable) result.

        ``timeout`` and ``start_timeout``: seconds that ``fn`` may take, and that ranks may take before it.

        Raises:
            RankFailedError: the first failing rank's error, at once; no process is left behind.
            BackendError: this backend starts no ranks, or its library is not installed.
            ConfigurationError: the machine can't have so many ranks.
        """
        with self._pool(world_size, timeout, start_timeout) as pool:
            return pool.run(fn, *args)

    def _pool(self, world_size: int, timeout: float | None, start_timeout: float | None) -> Pool:
        """Makes ranks; they may begin with the first call."""
        raise BackendError(f"ranks of backend {self.name!r} can't be launched; use backend='simulated'")


_BUILT_IN = {
    "gloo": "shardkit.backends.gloo:GlooBackend",
    "cuda": "shardkit.backends.cuda:CudaBackend",
    "tpu": "shardkit.backends.tpu:TpuBackend",
    "xla": "shardkit.backends.xla:XlaBackend",
    "simulated": "shardkit.backends.simulated:SimulatedBackend",
}
_ENTRY_POINTS = "shardkit.backends"
# Makes a backend of the name of a device type, where torch itself knows enough of it; else None.
_OF_TORCH = "shardkit.backends.accelerator:of_torch"
_instances: dict[str, Backend] = {}
# A backend whose ranks share one process (threads) puts a function here that returns the backend of the
# calling rank, or None outside of its ranks; it then wins over the device of the parameters.
_current: list[Callable[[], Backend | None]] = []


def _load(name: str) -> Backend:
    if name in _BUILT_IN:
        return _named(_BUILT_IN[name])()  # type: ignore[no-any-return]
    entries = {entry.name: entry for entry in importlib.metadata.entry_points(group=_ENTRY_POINTS)}
    if name in entries:
        return entries[name].load()()  # type: ignore[no-any-return]
    backend: Backend | None = _named(_OF_TORCH)(name)
    if backend is not None:
        return backend
    known = ", ".join([*_BUILT_IN, *sorted(entries.keys() - _BUILT_IN.keys())])
    raise BackendError(
        f"no backend named {name!r}; there are: {known}. A device that torch.accelerator knows "
        f"({torch.accelerator.current_accelerator() or 'none here'}) is one too, once a package has registered its "
        "collectives with torch.distributed"
    )


def _named(path: str) -> AnyCallable:
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)  # type: ignore[no-any-return]


def get_backend(name: str) -> Backend:
    """Returns the backend of that name (one instance a process).

    Raises:
        BackendError: no such backend, or it is not available on this machine.
    """
    if name not in _instances:
        _instances.setdefault(name, _load(name))  # ranks may be threads
    return _instances[name]


def register_rank_provider(provider: Callable[[], Backend | None]) -> None:
    """Registers what names the calling rank's backend, where ranks are threads of one process."""
    if provider not in _current:
        _current.append(provider)


def backend_for(tensors: Iterable[Tensor], name: str | Backend | None = None) -> Backend:
    """Returns the backend for these tensors: the named one, the one whose rank is calling, or by device type.

    Raises:
        BackendError: tensors of a device type that no backend serves.
    """
    device = next((t.device for t in tensors), torch.device("cpu"))
    chosen = get_backend(name) if isinstance(name, str) else name
    for backend in (provider() for provider in _current if chosen is None):
        if backend is not None and device.type in (backend.device_type, "meta"):
            chosen = backend
            break
    chosen = chosen or backend_for_device(device.type)
    if device.index is not None and device.type == chosen.device_type:
        chosen.settle(device)
    return chosen


def backend_of_job(name: str | Backend | None = None) -> Backend:
    """Chooses where there are no tensors: the named one, or that of the default group's device, else the CPU's."""
    if name is not None:
        return backend_for((), name)
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized():
        serves = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
        for device_type, library in serves.items():  # gloo alone serves several
            if library != serves.get("cpu"):
                backend = _serving(device_type)
                if backend is not None:
                    return backend
    return backend_for([])


def backend_for_device(device_type: str) -> Backend:
    """Returns the backend that serves a device type ("cpu" and "meta": gloo); a BackendError if none does."""
    backend = _serving(device_type)
    if backend is None:
        raise BackendError(
            f"no backend serves tensors on {device_type!r}; import the package that registers the device and its "
            f"collectives with torch, install a backend (entry-point group {_ENTRY_POINTS!r}), or move the module "
            "to another device first"
        )
    return backend


def _serving(device_type: str) -> Backend | None:
    if device_type in ("cpu", "meta"):
        return get_backend("gloo")
    if device_type in _BUILT_IN:
        return get_backend(device_type)
    known = _instances.get(device_type)
    if known is not None and known.device_type == device_type:
        return known
    for entry in importlib.metadata.entry_points(group=_ENTRY_POINTS):
        backend = get_backend(entry.name)
        if backend.device_type == device_type:
            return backend
    of_torch: Backend | None = _named(_OF_TORCH)(device_type)
    if of_torch is not None:
        _instances[device_type] = of_torch
    return of_torch


def _be_heard(_: BaseException) -> None:
    """Notes an error before the first object of ours exists: others may wait in that one's construction."""
    dist = torch.distributed
    is_gloo = dist.is_available() and dist.is_initialized() and dist.get_backend() == "gloo"
    if is_gloo and "gloo" not in _instances:
        get_backend("gloo").group()


listen_to_errors(_be_heard)


# ------------------------------------------------------------ generators of random numbers on the host
# torch's, Python's, and numpy's where it is imported.
HostRandomStates = tuple[torch.Tensor, tuple[object, ...], Tree]


def host_random_states() -> HostRandomStates:
    """Returns the states that they have now."""
    numpy = sys.modules.get("numpy")
    return torch.get_rng_state(), random.getstate(), None if numpy is None else numpy.random.get_state()


def set_host_random_states(states: HostRandomStates) -> None:
    """Gives them states that they had before."""
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    if states[2] is not None:
        sys.modules["numpy"].random.set_state(states[2])


def seed_host(seed: int) -> None:
    """Seeds them; a device's stays as it is."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
