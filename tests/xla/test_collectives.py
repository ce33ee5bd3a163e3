"""torch_xla's collectives on replicas, as its own programs call them: lists, outputs, buckets, groups, gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.pools import rank_pool

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.xla

WORLD = 4
GROUPS = [[0, 2], [1, 3]]
SHAPES = [(4, 8, 3), (8, 4), (16, 4, 2)]


def _values(rank: int, shapes: list[tuple[int, ...]] = SHAPES) -> list[torch.Tensor]:
    """Whole numbers: sums are the same in any order."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(-8, 8, s, generator=generator).float() for s in shapes]


def _partners(rank: int, groups: list[list[int]] | None) -> list[int]:
    return next(g for g in groups if rank in g) if groups else list(range(WORLD))


def _is(found: Any, wanted: Any) -> None:
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a.cpu(), b), (a, b)


def _gathered(rank: int, index: int, dim: int, groups: list[list[int]] | None) -> torch.Tensor:
    return torch.cat([_values(r)[index] for r in _partners(rank, groups)], dim)


def _scattered(rank: int, index: int, dim: int, groups: list[list[int]] | None, scale: float) -> torch.Tensor:
    ranks = _partners(rank, groups)
    total = torch.stack([_values(r)[index] for r in ranks]).sum(0) * scale
    return total.chunk(len(ranks), dim)[ranks.index(rank)]


def _lists(rank: int) -> None:
    import torch_xla
    import torch_xla.core.xla_model as xm

    everybody, two = range(len(SHAPES)), None
    for groups in (two, GROUPS):
        count = len(_partners(rank, groups))
        mine = [v.to("xla") for v in _values(rank)]
        for dim in (0, 1, -1):
            wanted = [_gathered(rank, i, dim, groups) for i in everybody]
            one = [xm.all_gather(v, dim=dim, groups=groups) for v in mine]
            listed = xm.all_gather(mine, dim=dim, groups=groups, pin_layout=False)
            small = xm.all_gather_bucketized(mine, dim=dim, groups=groups, bucket_cap_mb=0)
            into = [torch.zeros(3, device="xla") for _ in mine]  # of any shape: it is replaced
            back = xm.all_gather(mine, dim=dim, groups=groups, output=into, pin_layout=False)
            assert back is into
            for found in (one, listed, small, into):
                _is(found, wanted)
            torch_xla.sync()
        for dim in (0, 1):
            arguments = (xm.REDUCE_SUM, 1 / count, dim, count)

            def scatter(call: Callable[..., Any], value: Any, given: Any = arguments, **more: Any) -> Any:
                return call(given[0], value, *given[1:], groups=groups, **more)  # noqa: B023

            wanted = [_scattered(rank, i, dim, groups, 1 / count) for i in everybody]
            _is([scatter(xm.reduce_scatter, v) for v in mine], wanted)
            _is(scatter(xm.reduce_scatter, mine, pin_layout=False), wanted)
            _is(scatter(xm.reduce_scatter_bucketized, mine, bucket_cap_mb=0), wanted)
            for call in (xm.reduce_scatter, xm.reduce_scatter_bucketized):
                into = [torch.zeros_like(v) for v in mine]
                back = scatter(call, mine, output=into, pin_layout=False)
                assert all(a is b for a, b in zip(back, into, strict=True))
                _is(into, wanted)
            one = torch.zeros(1, device="xla")
            assert scatter(xm.reduce_scatter, mine[0], output=one) is one
            _is([one], wanted[:1])
            torch_xla.sync()
    _is(mine, _values(rank))


def _in_place(rank: int) -> None:
    import torch_xla
    import torch_xla.core.functions as xf
    import torch_xla.core.xla_model as xm

    def total(fold: Callable[[torch.Tensor], torch.Tensor], ranks: list[int]) -> list[torch.Tensor]:
        return [fold(torch.stack([_values(r)[i] for r in ranks])) for i in range(len(SHAPES))]

    folds: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        xm.REDUCE_SUM: lambda t: t.sum(0), xm.REDUCE_MUL: lambda t: t.prod(0),
        xm.REDUCE_MAX: lambda t: t.amax(0), xm.REDUCE_MIN: lambda t: t.amin(0),
    }  # fmt: skip
    for kind, fold in folds.items():
        for groups in (None, GROUPS):
            mine = [v.to("xla") for v in _values(rank)]
            wanted = total(fold, _partners(rank, groups))
            _is([xm.all_reduce(kind, mine[0], groups=groups)], wanted[:1])
            _is(mine[:1], _values(rank)[:1])  # one tensor: a new one
            assert xm.all_reduce(kind, mine, scale=0.5, groups=groups) is mine  # a list: in place
            _is(mine, [w * 0.5 for w in wanted])
    flags = torch.tensor([rank > 0, True, rank == 2]).to("xla")
    _is([xm.all_reduce(xm.REDUCE_AND, flags.to(torch.int32))], [torch.tensor([0, 1, 0], dtype=torch.int32)])
    _is([xm.all_reduce(xm.REDUCE_OR, flags.to(torch.int32))], [torch.tensor([1, 1, 1], dtype=torch.int32)])
    mine = [v.to("xla") for v in _values(rank)]
    xm.collective_broadcast(mine, root_ordinal=2)
    _is(mine, _values(2))
    scalar = torch.tensor(float(rank)).to("xla")
    _is([xm.all_reduce(xm.REDUCE_SUM, scalar)], [torch.tensor(6.0)])
    x = torch.arange(8.0).view(8, 1).to("xla") + 10 * rank
    exchanged = xm.all_to_all(x, split_dimension=0, concat_dimension=1, split_count=WORLD)
    _is([exchanged], [torch.cat([torch.arange(2.0).view(2, 1) + 2 * rank + 10 * r for r in range(WORLD)], 1)])
    ring = [[r, (r + 1) % WORLD] for r in range(WORLD)]
    _is([xm.collective_permute(x, ring)], [torch.arange(8.0).view(8, 1) + 10 * ((rank - 1) % WORLD)])
    # through autograd
    x = torch.full((2, 3), float(rank + 1), device="xla", requires_grad=True)
    (xf.all_gather(x, dim=1) * torch.arange(12.0, device="xla")).sum().backward()
    _is([x.grad], [(torch.arange(3.0) + 3 * rank).expand(2, 3)])
    x.grad = None
    (xf.all_reduce(xm.REDUCE_SUM, x, scale=0.25) * 8).sum().backward()
    _is([x.grad], [torch.full((2, 3), 2.0)])
    torch_xla.sync()
    # on the host
    assert xm.rendezvous("tag", str(rank).encode()) == [b"0", b"1", b"2", b"3"]
    assert xm.mesh_reduce("mean", float(rank), lambda values: sum(values) / len(values)) == 1.5
    assert xm.do_on_ordinals(lambda a: a.sum().item(), (torch.ones(3, device="xla"),), [1]) == (
        3.0 if rank == 1 else None
    )


def _refused(rank: int) -> None:
    """What torch_xla refuses, before a rank has issued anything."""
    import torch_xla.core.xla_model as xm

    values = [v.to("xla") for v in _values(rank)]
    with pytest.raises(RuntimeError, match="pin_layout"):
        xm.all_gather(values)
    with pytest.raises(RuntimeError, match="pin_layout"):
        xm.all_gather_bucketized(values, pin_layout=True)
    for call, arguments in (
        (xm.all_gather, (values,)),
        (xm.reduce_scatter, (xm.REDUCE_SUM, values, 1.0, 0, WORLD)),
    ):
        with pytest.raises(ValueError, match="length"):
            call(*arguments, output=values[:1], pin_layout=False)
        with pytest.raises(TypeError, match="output, got a Tensor"):
            call(*arguments, output=values[0], pin_layout=False)
    with pytest.raises(TypeError, match="a tensor or a list of tensors"):
        xm.all_gather(("a",), pin_layout=False)
    with pytest.raises(TypeError, match="a tensor or a list of tensors"):
        xm.reduce_scatter(xm.REDUCE_SUM, ["a"], 1.0, 0, WORLD)
    with pytest.raises(AssertionError, match="of one size"):
        xm.all_gather(values[0], groups=[[0, 1, 2], [3]], pin_layout=False)


def _process_group(rank: int, *, named: bool = True) -> None:
    """torch.distributed's collectives over torch_xla's backend, on all ranks and on half of them."""
    import torch.distributed as dist
    import torch_xla
    import torch_xla.distributed.xla_backend

    dist.init_process_group("xla", init_method="xla://")
    try:
        options = {"pg_options": {"xla_pg_options": {"mesh": GROUPS}}} if named else {}
        halves: list[Any] = [dist.new_group(ranks, **options) for ranks in GROUPS]
        for group, ranks in ((None, list(range(WORLD))), (halves[rank % 2], GROUPS[rank % 2])):
            place, count, total = ranks.index(rank), len(ranks), float(sum(ranks))
            everything = torch.arange(2.0 * count)
            mine = torch.full((2,), float(rank), device="xla")
            parts = [torch.zeros(2, device="xla") for _ in ranks]
            dist.all_gather(parts, mine, group=group)
            _is(parts, [torch.full((2,), float(r)) for r in ranks])
            joined = torch.zeros(2 * count, device="xla")
            dist.all_gather_into_tensor(joined, mine, group=group)
            _is([joined], [torch.tensor(ranks).repeat_interleave(2).float()])
            for op, wanted in ((dist.ReduceOp.SUM, total), (dist.ReduceOp.MAX, float(ranks[-1]))):
                value = mine.clone()
                dist.all_reduce(value, op, group=group)
                _is([value], [torch.full((2,), wanted)])
            value = mine.clone()
            dist.broadcast(value, ranks[1], group=group)
            _is([value], [torch.full((2,), float(ranks[1]))])
            whole = (everything + rank).to("xla")
            wanted_part = (everything * count + total).view(count, 2)[place]
            value = torch.zeros(2, device="xla")
            dist.reduce_scatter_tensor(value, whole, group=group)
            _is([value], [wanted_part])
            value = torch.zeros(2, device="xla")
            dist.reduce_scatter(value, list(whole.split(2)), group=group)
            _is([value], [wanted_part])
            torch_xla.sync()
        mine = torch.full((2,), float(rank), device="xla")
        swapped = torch.zeros(WORLD, device="xla")
        dist.all_to_all_single(swapped, torch.arange(float(WORLD)).to("xla") + 10 * rank)
        _is([swapped], [torch.tensor([10.0 * r + rank for r in range(WORLD)])])
        parts = [torch.zeros(2, device="xla") for _ in range(WORLD)]
        dist.all_to_all(parts, [mine + 10 * r for r in range(WORLD)])
        _is(parts, [torch.full((2,), 10.0 * rank + r) for r in range(WORLD)])
        value = mine.clone()
        dist.reduce(value, 2)
        torch_xla.sync()
        _is([value], [torch.full((2,), 6.0 if rank == 2 else float(rank))])
        parts = [torch.zeros(2, device="xla") for _ in range(WORLD)]
        dist.gather(mine, parts if rank == 1 else None, 1)
        torch_xla.sync()
        _is(parts, [torch.full((2,), float(r) * (rank == 1)) for r in range(WORLD)])
        value = torch.zeros(2, device="xla")
        dist.scatter(
            value, [torch.full((2,), 3.0 * r, device="xla") for r in range(WORLD)] if rank == 1 else None, 1
        )
        torch_xla.sync()
        _is([value], [torch.full((2,), 3.0 * rank)])
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _others_left_out(rank: int) -> None:
    import torch.distributed as dist
    import torch_xla.distributed.xla_backend  # noqa: F401

    dist.init_process_group("xla", init_method="xla://")
    halves = [dist.new_group(ranks) for ranks in GROUPS]
    with pytest.raises(ValueError, match="name all "):
        dist.all_reduce(torch.ones(2, device="xla"), group=halves[rank % 2])
    dist.destroy_process_group()


def test_groups_that_leave_out_ranks() -> None:
    """The program of a TPU has to name all."""
    rank_pool(WORLD, "xla").run(_others_left_out)
    rank_pool(WORLD, "xla without rules").run(functools.partial(_process_group, named=False))


@pytest.mark.parametrize("program", [_lists, _in_place, _refused, _process_group])
def test_as_torch_xlas_own_programs_call_them(program: Callable[[int], None]) -> None:
    rank_pool(WORLD, "xla").run(program)
