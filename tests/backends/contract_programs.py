"""What every backend has to do, as functions that run on each rank and check the results there.

Values are small whole numbers, so that sums are exact in every dtype and in every order.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardkit.backend import Backend, Group, ReduceOp, get_backend
from shardkit.errors import ConfigurationError
from tests.backends.streams_device import current_device

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.uint8)
OPS = tuple(ReduceOp)
WAYS = ((False, False), (True, True), (False, True), (True, False))  # in place, async_op
Rank = int


class Ranks:
    """A group, and what the tensors of its ranks hold."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.backend: Backend = group.backend
        self.rank, self.world_size = group.rank, group.world_size
        self.device = self.backend.device()

    def values(self, rank: int, numel: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
        """On the CPU; the same wherever it is computed."""
        numbers = (torch.arange(numel) * 7 + 3 * rank + 5 * salt) % 11
        return (numbers if dtype is torch.uint8 else numbers - 5).to(dtype)

    def mine(self, numel: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
        return self.values(self.rank, numel, dtype, salt).to(self.device)

    def blank(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((numel,), 77, dtype=dtype).to(self.device)

    def combined(self, numel: int, dtype: torch.dtype, op: ReduceOp, salt: int = 0) -> torch.Tensor:
        """Over all ranks."""
        stacked = torch.stack([self.values(r, numel, dtype, salt) for r in range(self.world_size)])
        exact = stacked.double() if dtype.is_floating_point else stacked
        if op is ReduceOp.MAX:
            result = exact.amax(0)
        elif op is ReduceOp.MIN:
            result = exact.amin(0)
        else:
            result = exact.sum(0)
            result = result / self.world_size if op is ReduceOp.AVG else result
        return result.to(dtype)

    def check(self, got: torch.Tensor, expected: torch.Tensor, where: object, exact: bool = True) -> None:
        tolerance = {"rtol": 0, "atol": 0} if exact else {}
        torch.testing.assert_close(
            got.cpu(), expected, **tolerance, msg=lambda m: f"rank {self.rank}, {where}: {m}"
        )

    def size_patterns(self) -> list[list[int] | None]:
        """Numels of the shards; None: even ones. Uneven ones where the backend takes them."""
        w = self.world_size
        even: list[list[int] | None] = [None, [4] * w, [0] * w, [1] * w]
        if self.backend.even_shards_only:
            return even
        return [
            *even,
            [3, 0, 5, 1][:w],
            [0] * (w - 1) + [7],
            [7] + [0] * (w - 1),
            [1000 + r for r in range(w)],
        ]


def ranks(backend: str) -> Ranks:
    return Ranks(get_backend(backend).group())


def ops_for(dtype: torch.dtype) -> Sequence[ReduceOp]:
    return [op for op in OPS if op is not ReduceOp.AVG or dtype.is_floating_point]


# ------------------------------------------------------------------ tensors
def all_gather(rank: Rank, backend: str) -> None:
    r = ranks(backend)
    check_all_gather(r, DTYPES)


def check_all_gather(r: Ranks, dtypes: Sequence[torch.dtype]) -> None:
    works = []
    for dtype, pattern, (in_place, async_op) in itertools.product(dtypes, r.size_patterns(), WAYS):
        if dtype is not torch.float32 and in_place != async_op:
            continue
        sizes = pattern or [6] * r.world_size
        output = r.blank(sum(sizes), dtype)
        start = sum(sizes[: r.rank])
        shard = r.mine(sizes[r.rank], dtype)
        if in_place:
            own = output[start : start + sizes[r.rank]]
            own.copy_(shard)
            shard = own
        work = r.group.all_gather_into(output, shard, pattern, async_op=async_op, label="contract")
        expected = torch.cat([r.values(k, n, dtype) for k, n in enumerate(sizes)])
        if async_op:
            works.append((work, output, expected))
        else:
            work.wait()
            r.check(output, expected, (dtype, sizes, in_place))
    for work, output, expected in works:
        work.wait()
        r.check(output, expected, "async")


def reduce_scatter(rank: Rank, backend: str) -> None:
    r = ranks(backend)
    check_reduce_scatter(r, DTYPES)


def check_reduce_scatter(r: Ranks, dtypes: Sequence[torch.dtype]) -> None:
    works = []
    for dtype, pattern, async_op in itertools.product(dtypes, r.size_patterns(), (False, True)):
        for op in ops_for(dtype):
            sizes = pattern or [6] * r.world_size
            shard = r.blank(sizes[r.rank], dtype)
            input = r.mine(sum(sizes), dtype, salt=1)
            work = r.group.reduce_scatter_into(shard, input, pattern, op=op, async_op=async_op)
            start = sum(sizes[: r.rank])
            expected = r.combined(sum(sizes), dtype, op, salt=1)[start : start + sizes[r.rank]]
            if async_op:
                works.append((work, shard, expected, op))
            else:
                r.check(shard, expected, (dtype, sizes, op), exact=op is not ReduceOp.AVG)
    for work, shard, expected, op in works:
        work.wait()
        r.check(shard, expected, ("async", op), exact=op is not ReduceOp.AVG)


def large(rank: Rank, backend: str) -> None:
    """More than is moved at once."""
    r = ranks(backend)
    cases = [([100_000] * r.world_size, op) for op in OPS]
    if not r.backend.even_shards_only:
        cases.append(([1_100_000, 7, 0, 120_000][: r.world_size], ReduceOp.SUM))
    for sizes, op in cases:
        input = r.mine(sum(sizes), torch.float32, salt=1)
        shard = r.blank(sizes[r.rank], torch.float32)
        r.group.reduce_scatter_into(shard, input, sizes, op=op, async_op=True).wait()
        start = sum(sizes[: r.rank])
        expected = r.combined(sum(sizes), torch.float32, op, salt=1)[start : start + sizes[r.rank]]
        r.check(shard, expected, (sizes, op), exact=op is not ReduceOp.AVG)
        output = r.blank(sum(sizes), torch.float32)
        r.group.all_gather_into(output, r.mine(sizes[r.rank], torch.float32), sizes, async_op=True).wait()
        r.check(output, torch.cat([r.values(k, n, torch.float32) for k, n in enumerate(sizes)]), sizes)


def all_to_all(rank: Rank, backend: str) -> None:
    r = ranks(backend)
    w = r.world_size
    matrices: list[Callable[[int, int], int]] = [lambda i, j: 3, lambda i, j: 0]
    if not r.backend.even_shards_only:
        matrices += [
            lambda i, j: (2 * i + 3 * j) % 4,
            lambda i, j: 5 * (i == 0),
            lambda i, j: 5 * (j == w - 1),
        ]
    for dtype, (index, sent), async_op in itertools.product(DTYPES, enumerate(matrices), (False, True)):
        go, come = [sent(r.rank, j) for j in range(w)], [sent(i, r.rank) for i in range(w)]
        output, input = r.blank(sum(come), dtype), r.mine(sum(go), dtype)
        given = (None, None) if index < 2 and async_op else (come, go)
        r.group.all_to_all(output, input, *given, async_op=async_op).wait()
        pieces = []
        for i in range(w):
            theirs = [sent(i, j) for j in range(w)]
            start = sum(theirs[: r.rank])
            pieces.append(r.values(i, sum(theirs), dtype)[start : start + theirs[r.rank]])
        r.check(output, torch.cat(pieces), (dtype, index))


def all_reduce(rank: Rank, backend: str) -> None:
    r = ranks(backend)
    for dtype, shape, async_op in itertools.product(
        DTYPES, [(), (6,), (2, 3), (0,), (1, 1, 5)], (False, True)
    ):
        for op in ops_for(dtype):
            numel = torch.Size(shape).numel()
            tensor = r.mine(numel, dtype).view(shape)
            r.group.all_reduce(tensor, op=op, async_op=async_op).wait()
            expected = r.combined(numel, dtype, op).view(shape)
            r.check(tensor, expected, (dtype, shape, op), exact=op is not ReduceOp.AVG)
    strided = r.mine(6, torch.float32).view(2, 3).t()
    r.group.all_reduce(strided)
    r.check(strided, r.combined(6, torch.float32, ReduceOp.SUM).view(2, 3).t(), "strided")


def reduce_and_broadcast(rank: Rank, backend: str) -> None:
    r = ranks(backend)
    for dtype, root, async_op in itertools.product(DTYPES, range(r.world_size), (False, True)):
        for op in ops_for(dtype):
            tensor = r.mine(6, dtype).view(2, 3)
            r.group.reduce(tensor, root, op=op, async_op=async_op).wait()
            got = tensor.cpu()  # read everywhere: ranks of a lazy device have to do the same
            if r.rank == root:
                r.check(got, r.combined(6, dtype, op).view(2, 3), (dtype, op), exact=op is not ReduceOp.AVG)
        for shape in [(), (2, 3), (0,)]:
            numel = torch.Size(shape).numel()
            tensor = r.mine(numel, dtype, salt=2).view(shape)
            r.group.broadcast(tensor, root, async_op=async_op).wait()
            r.check(tensor, r.values(root, numel, dtype, salt=2).view(shape), (dtype, root, shape))
        strided = r.mine(6, dtype).view(2, 3).t()
        r.group.broadcast(strided, root, async_op=async_op).wait()
        r.check(strided, r.values(root, 6, dtype).view(2, 3).t(), "strided")


def in_flight(rank: Rank, backend: str) -> None:
    """Different operations at once, waited for in another order, and while others are issued."""
    r = ranks(backend)
    group, w = r.group, r.world_size
    float32 = torch.float32
    total, whole, part = r.mine(5, float32), r.blank(2 * w, float32), r.blank(3, float32)
    shard, input = r.mine(2, float32), r.mine(3 * w, float32)
    works = [
        group.all_reduce(total, async_op=True, label="a"),
        group.all_gather_into(whole, shard, async_op=True, label="b"),
        group.reduce_scatter_into(part, input, async_op=True, label="c"),
    ]
    works.pop().wait()
    group.barrier(label="in between")
    now = r.mine(1, float32)
    group.all_reduce(now)
    for work in reversed(works):
        work.wait()
        work.wait()  # a second time changes nothing
    everything = r.combined(3 * w, float32, ReduceOp.SUM)
    r.check(part, everything[3 * r.rank : 3 * r.rank + 3], "reduce_scatter")
    r.check(whole, torch.cat([r.values(k, 2, float32) for k in range(w)]), "all_gather")
    r.check(total, r.combined(5, float32, ReduceOp.SUM), "all_reduce")
    r.check(now, r.combined(1, float32, ReduceOp.SUM), "in between")


def autograd_is_left_alone(rank: Rank, backend: str) -> None:
    """Leaves that require gradients are written in place, without a trace in the graph."""
    r = ranks(backend)
    leaf = r.mine(4, torch.float32).requires_grad_()
    with torch.no_grad():
        r.group.broadcast(leaf, 0)
        r.group.all_reduce(leaf)
    assert leaf.is_leaf
    assert leaf.requires_grad
    r.check(leaf.detach(), r.values(0, 4, torch.float32) * r.world_size, "leaf")


# ------------------------------------------------------------------ objects
def objects(rank: Rank, backend: str) -> None:
    r = ranks(backend)
    group, w = r.group, r.world_size
    for make in (_nested, _long, _nothing):
        assert group.all_gather_object(make(r.rank), label="o") == [make(k) for k in range(w)]
        for root in {0, w - 1}:
            gathered = group.gather_object(make(r.rank), root)
            assert gathered == ([make(k) for k in range(w)] if r.rank == root else None)
            assert group.broadcast_object(make(r.rank), root) == make(root)
            assert group.broadcast_object(make(root) if r.rank == root else None, root) == make(root)
    sent = [b"" if k == 1 else bytes([k, 0, 255]) * (1 + 30_000 * k) for k in range(w)]
    assert group.all_gather_bytes(sent[r.rank], label="b") == sent
    tensors = group.all_gather_object({"state": torch.full((r.rank, 2), 1.5)})
    assert [t["state"].shape for t in tensors] == [(k, 2) for k in range(w)]
    group.barrier(label="end")


def _nested(rank: int) -> Any:
    return {"rank": rank, "list": [None, 1.5, "x" * rank], (1, 2): {"a": b"\0\1"}}


def _long(rank: int) -> Any:
    return bytes([rank]) * (100_000 * rank + 1)


def _nothing(rank: int) -> Any:
    return None


# ------------------------------------------------------------------ groups
def sub_groups(rank: Rank, backend: str) -> None:
    r = ranks(backend)
    w = r.world_size
    assert r.group.ranks == tuple(range(w))
    assert r.group.rank == rank
    for partition in _partitions(r):
        groups = [(members, r.group.new_group(members)) for members in partition]
        assert [sub is not None for _, sub in groups] == [r.rank in members for members in partition]
        for members, sub in groups:
            if sub is None:
                continue
            assert sub.backend is r.backend
            assert (sub.ranks, sub.rank, sub.world_size) == (members, members.index(r.rank), len(members))
            check_group(Ranks(sub))
            assert sub.all_gather_object(r.rank) == list(members)
    r.group.barrier()


def _partitions(r: Ranks) -> list[list[tuple[int, ...]]]:
    """Groups that are made together. Ranks that share a compiled graph need the same everywhere."""
    w = r.world_size
    if not r.backend.even_shards_only:
        sizes = range(1, w + 1)
        return [[members] for n in sizes for members in itertools.combinations(range(w), n)]
    whole = tuple(range(w))
    halves = [] if w % 2 else [[whole[: w // 2], whole[w // 2 :]], [whole[::2], whole[1::2]]]
    return [[whole], [(k,) for k in whole], *halves]


def nested_groups(rank: Rank, backend: str) -> None:
    """Ranks in calls are ranks of the group; ``ranks`` are those of the job."""
    r = ranks(backend)
    outer = r.group.new_group([1, 2, 3])
    inner = outer.new_group([0, 2]) if outer is not None else None
    assert (inner is None) == (rank not in (1, 3))
    if inner is not None:
        assert inner.ranks == (1, 3)
        assert inner.rank == (rank == 3)
        check_group(Ranks(inner))
        tensor = torch.tensor([float(rank)]).to(r.device)
        inner.broadcast(tensor, 1)
        assert tensor.item() == 3.0
        assert r.backend.group(inner) is inner
    r.group.barrier()


def signatures(rank: Rank, backend: str) -> None:
    """Methods take what the protocol says."""
    chosen = get_backend(backend)
    check_signatures(type(chosen), Backend)
    check_signatures(type(chosen.group()), Group)
    for fact in ("name", "device_type", "even_shards_only", "has_storage"):
        assert hasattr(chosen, fact), fact


def check_signatures(implementation: type, protocol: type) -> None:
    for name, function in vars(protocol).items():
        if not name.startswith("_") and inspect.isfunction(function):
            assert _parameters(getattr(implementation, name)) == _parameters(function), name


def _parameters(function: Any) -> list[tuple[str, Any]]:
    return [(p.name, p.kind) for p in inspect.signature(function).parameters.values()]


def check_group(r: Ranks) -> None:
    """A call of each kind."""
    check_all_gather(r, (torch.float32,))
    check_reduce_scatter(r, (torch.bfloat16,))
    w = r.world_size
    for root in range(w):
        tensor = r.mine(3, torch.int64)
        r.group.broadcast(tensor, root)
        r.check(tensor, r.values(root, 3, torch.int64), "broadcast")
    output = r.blank(2 * w, torch.float32)
    r.group.all_to_all(output, r.mine(2 * w, torch.float32))
    expected = [r.values(k, 2 * w, torch.float32)[2 * r.rank : 2 * r.rank + 2] for k in range(w)]
    r.check(output, torch.cat(expected), "all_to_all")
    r.group.barrier()


def channels(rank: Rank, backend: str) -> None:
    r = ranks(backend)
    one, two = r.group.channel("one"), r.group.channel("two")
    assert r.group.channel("one") is one
    for channel in (one, two):
        assert (channel.rank, channel.world_size, channel.ranks) == (r.rank, r.world_size, r.group.ranks)
        assert channel.backend is r.backend
        check_group(Ranks(channel))
    a, b, c = (r.mine(4, torch.float32, salt) for salt in (1, 2, 3))
    calls = [lambda: one.all_reduce(a, async_op=True), lambda: two.all_reduce(b, async_op=True),
             lambda: r.group.all_reduce(c, async_op=True)]  # fmt: skip
    # Connections of their own: in which order ranks use them does not matter (streams of a device do order them).
    shift = r.rank if backend in ("gloo", "simulated") and current_device() is None else 0
    works = [calls[(i + shift) % 3]() for i in range(3)]
    for work in works:
        work.wait()
    for salt, tensor in ((1, a), (2, b), (3, c)):
        r.check(tensor, r.combined(4, torch.float32, ReduceOp.SUM, salt), f"channel {salt}")
    parent = r.group.new_group(range(r.world_size))
    assert parent is not None
    check_group(Ranks(parent.channel("one")))  # of another group: another channel


class OneRank:
    """What tests of single processes pass as a process group."""

    def __init__(self, size: int = 1) -> None:
        self._size = size

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self._size


def group_arguments(rank: Rank, backend: str) -> None:
    chosen = get_backend(backend)
    everyone = chosen.group(None)
    assert chosen.group(everyone) is everyone
    assert chosen.group(None).channel("one") is everyone.channel("one")
    alone = Ranks(chosen.group(OneRank()))
    assert (alone.rank, alone.world_size) == (0, 1)
    assert backend != "xla" or alone.group.ranks == (rank,)
    check_group(alone)
    check_group(Ranks(alone.group.channel("one")))
    assert alone.group.gather_object("x", 0) == ["x"]
    for wrong in ("everyone", 3, object(), OneRank(everyone.world_size + 1)):
        _refused(lambda wrong=wrong: chosen.group(wrong))


# ------------------------------------------------------------------ what can't work
def refusals(rank: Rank, backend: str) -> None:
    r = ranks(backend)
    group, w = r.group, r.world_size
    t = r.blank(4 * w, torch.float32)
    shard = r.blank(4, torch.float32)
    short, integers = r.blank(3, torch.float32), r.blank(4, torch.int64)
    wrong: list[Callable[[], Any]] = [
        lambda: group.all_gather_into(t, short),
        lambda: group.all_gather_into(t, shard, [4] * (w + 1)),
        lambda: group.all_gather_into(t, shard, [4] * (w - 1)),
        lambda: group.all_gather_into(t, shard, [5] * w),
        lambda: group.all_gather_into(t, r.blank(1, torch.float32), [4] * w),
        lambda: group.all_gather_into(t, integers),
        lambda: group.reduce_scatter_into(short, t),
        lambda: group.reduce_scatter_into(shard, t, [4] * (w + 1)),
        lambda: group.reduce_scatter_into(shard, t, [3] * w),
        lambda: group.reduce_scatter_into(integers, t),
        lambda: group.reduce_scatter_into(integers, r.blank(4 * w, torch.int64), op=ReduceOp.AVG),
        lambda: group.all_to_all(t, t.clone(), [4] * (w + 1), [4] * w),
        lambda: group.all_to_all(t, t.clone(), [4] * w, [5] * w),
        lambda: group.all_to_all(t, r.blank(4 * w, torch.int32)),
        lambda: group.all_reduce(integers, op=ReduceOp.AVG),
        lambda: group.reduce(t, w),
        lambda: group.reduce(integers, 0, op=ReduceOp.AVG),
        lambda: group.broadcast(t, -1),
        lambda: group.broadcast(t, w),
        lambda: group.gather_object(1, w),
        lambda: group.broadcast_object(1, -1),
        lambda: group.new_group([]),
        lambda: group.new_group([0, w]),
        lambda: group.new_group([0, 0]),
        lambda: group.new_group([-1]),
    ]
    if w > 1:
        wrong.append(lambda: group.all_to_all(r.blank(w + 1, torch.float32), r.blank(w + 1, torch.float32)))
    if backend == "xla":
        wrong.append(lambda: group.all_reduce(torch.zeros(4)))
    if r.backend.has_storage:
        grid = r.blank(8 * w, torch.float32).view(4 * w, 2)
        wrong += [
            lambda: group.all_gather_into(t.view(w, 4), shard),
            lambda: group.all_gather_into(grid[:, 0], shard),
            lambda: group.reduce_scatter_into(shard, grid[:, 0]),
            lambda: group.reduce_scatter_into(shard.view(2, 2), t),
            lambda: group.all_to_all(grid[:, 0], t),
        ]
    said = [_refused(call, index) for index, call in enumerate(wrong)]
    assert all(f"rank {r.rank}" in text for text in said), said
    for words in ("fit this rank's shard", "use SUM", "not global ones", "distinct ranks"):
        assert any(words in text for text in said), words
    check_group(r)  # nothing was sent, so the group still works


def _refused(call: Callable[[], Any], index: int = 0) -> str:
    try:
        call()
    except ConfigurationError as error:
        return str(error)
    raise AssertionError(f"call {index} was not refused")


# ------------------------------------------------------------------ a rank's device
def device(rank: Rank, backend: str) -> None:
    b = get_backend(backend)
    assert b.name == backend
    assert b.is_available()
    assert b.device().type == b.device_type
    assert torch.ones(1).to(b.device()).device.type == b.device_type
    source = torch.arange(5.0)
    pinned = b.pin(source)
    assert pinned.device.type == "cpu"
    assert torch.equal(pinned.to(b.device(), non_blocking=True).cpu(), source)
    doubled = source.to(b.device()) * 2
    more = doubled + 1
    b.synchronize()
    b.tie([doubled, more, source])
    b.mark_step()
    b.mark_step(wait=True)
    assert more.cpu().tolist() == [1, 3, 5, 7, 9]
    down, up = b.pinned(5, torch.float32), torch.zeros(5).to(b.device())
    copy = b.copy_down(down, more)
    copy.wait_on_host()
    assert copy.is_done()
    assert down.tolist() == [1, 3, 5, 7, 9]
    b.copy_up(up, down, at_once=True).wait()
    up += 1
    assert up.tolist() == [2, 4, 6, 8, 10]


def storage(rank: Rank, backend: str) -> None:
    b = get_backend(backend)
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        tensor = torch.ones(10, dtype=dtype).to(b.device())
        view = tensor[2:6]
        b.release_storage(tensor)
        b.release_storage(tensor)
        if b.has_storage:
            assert tensor.untyped_storage().nbytes() == 0
            assert view.shape == (4,)
        b.take_storage(tensor)
        b.take_storage(tensor)
        tensor.fill_(3)
        assert tensor.tolist() == [3] * 10
        if b.has_storage:
            assert view.tolist() == [3] * 4
            assert tensor.untyped_storage().nbytes() == 10 * dtype.itemsize


def random_numbers(rank: Rank, backend: str) -> tuple[list[float], list[float]]:
    b = get_backend(backend)
    state = b.rng_state()
    assert state.device.type == "cpu"
    first = torch.rand(3, device=b.device()).tolist()
    b.group().barrier()
    second = torch.rand(3, device=b.device()).tolist()
    b.set_rng_state(state)
    assert torch.rand(3, device=b.device()).tolist() == first
    b.group().barrier()
    assert torch.rand(3, device=b.device()).tolist() == second
    assert first != second
    return first, second


CONTRACT: tuple[Callable[[Rank, str], object], ...] = (
    all_gather,
    reduce_scatter,
    large,
    all_to_all,
    all_reduce,
    reduce_and_broadcast,
    in_flight,
    autograd_is_left_alone,
    objects,
    sub_groups,
    channels,
    group_arguments,
    refusals,
    device,
    storage,
    random_numbers,
    signatures,
)
