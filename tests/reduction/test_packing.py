"""The packed form of gradients: written and joined, whole and cut, with every combination of what a rank had."""

from __future__ import annotations

import itertools
import math
import tracemalloc

import torch

from shardkit.backend import get_backend
from shardkit.layout import Piece, ShardLayout, segment_layout
from shardkit.reduction.packing import JoinedPack, PackedForm, WrittenPack
from tests.pools import on_ranks

SHAPES = [(2, 2), (5,), (1,)]
NUMELS = [4, 5, 1]
WORLD = 2


def _forms() -> list[PackedForm]:
    shards = ShardLayout(tuple(NUMELS), WORLD)
    forms = [
        PackedForm(
            [p for p in shards.pieces() if p.item not in frozen], [shards.shard_numel] * WORLD, even=True
        )
        for frozen in [(), (0,), (1,)]
    ]
    for owners, even in itertools.product(itertools.product(range(WORLD), repeat=3), [False, True]):
        segments = segment_layout(NUMELS, owners, WORLD, even=even)
        forms.append(PackedForm(segments.pieces, segments.sizes, even=even))
    return forms


def _expected(form: PackedForm, gradients: list[torch.Tensor | None]) -> torch.Tensor:
    parts = [torch.zeros(size) for size in form.sizes]
    for p in form.pieces:
        g = gradients[p.item]
        if g is not None:
            parts[p.rank][p.offset : p.offset + p.numel] = g.reshape(-1)[p.start : p.start + p.numel]
            parts[p.rank][form.first_flag[p.rank] + form.items[p.rank].index(p.item)] = 1
    return torch.cat(parts)


def test_what_is_packed_lies_in_its_rank_s_part_with_flags() -> None:
    for form in _forms():
        placed = {p.item for p in form.pieces}
        packed = torch.full((form.starts[-1],), float("nan"))
        written = WrittenPack(form, packed, SHAPES)
        joined = JoinedPack(form, NUMELS)
        for had in itertools.product([False, True], repeat=3):
            gradients = [
                torch.arange(n, dtype=torch.float64).view(shape) + 10 * i if there else None
                for i, (n, shape, there) in enumerate(zip(NUMELS, SHAPES, had, strict=True))
            ]
            expected = _expected(form, gradients)
            had_all = all(had[i] for i in placed)
            packed.fill_(float("nan"))
            written.write(gradients, None if had_all else had)
            assert torch.equal(packed, expected)
            assert torch.equal(joined.join(gradients, had, torch.empty(0)), expected)
            without = [expected[s : s + n] for s, n in zip(form.starts, form.first_flag, strict=False)]
            assert torch.equal(joined.join(gradients, None, torch.empty(0)), torch.cat(without))
            for rank in range(WORLD):
                part = expected[form.starts[rank] : form.starts[rank + 1]]
                nobody = form.anywhere([False] * 3, part, rank)
                assert nobody == [h and i in form.items[rank] for i, h in enumerate(had)]
                assert form.anywhere(had, torch.zeros_like(part), rank) == list(had)


@on_ranks((WORLD, "gloo"))
def test_two_ranks_get_the_mean_of_what_one_sent_and_one_kept(rank: int) -> None:
    """Whatever each rank had, in every form; padding comes as zeros also where nothing else is sent."""
    group = get_backend("gloo").group()
    for form in _forms():
        packed = torch.full((form.starts[-1],), float("nan"))
        pack = WrittenPack(form, packed, SHAPES, mean_over=group)
        for had in itertools.product(itertools.product([False, True], repeat=3), repeat=WORLD):
            gradients: list[list[torch.Tensor | None]] = [
                [
                    torch.arange(n, dtype=torch.float32).view(shape) + 10 * i + 100 * r if there else None
                    for i, (n, shape, there) in enumerate(zip(NUMELS, SHAPES, had[r], strict=True))
                ]
                for r in range(WORLD)
            ]
            packed.fill_(float("nan"))
            had_all = all(had[rank][p.item] for p in form.pieces)
            kept = pack.write(gradients[rank], None if had_all else had[rank])
            mean, work = pack.exchange(group, kept, "gradients")
            work.wait()
            part = slice(form.starts[rank], form.starts[rank + 1])
            whole = sum(_expected(form, each)[part] for each in gradients) / WORLD
            numel = form.first_flag[rank]
            assert torch.equal(mean[:numel], whole[:numel]), (rank, had)
            assert form.anywhere(had[rank], mean, rank) == [
                here or (there and i in form.items[rank])
                for i, (here, there) in enumerate(zip(had[rank], had[1 - rank], strict=True))
            ]


def test_blocks_hold_nothing_that_nobody_wrote() -> None:
    """Their scale is that of all numbers in them; flags were lost where memory had held large ones."""
    form = PackedForm([Piece(0, 0, 0, 0, 3), Piece(1, 0, 1, 0, 2)], [16, 16], even=False, step=16)
    packed = torch.full((form.starts[-1],), math.nan)
    WrittenPack(form, packed, [(3,), (2,)], in_blocks=True).write([torch.ones(3), torch.ones(2)], None)
    assert packed.sum() == 3 + 2 + 2  # and two flags


def test_flags_of_elements_and_what_was_joined_in_parts() -> None:
    form = PackedForm([Piece(0, 0, 0, 0, 2), Piece(0, 2, 1, 0, 1), Piece(1, 0, 1, 1, 0)], [3, 3], even=True)
    pack = JoinedPack(form, [3, 0])
    joined = pack.join([torch.tensor([1.0, 2, 3]), torch.zeros(0)], None, torch.empty(0))
    assert joined.tolist() == [1, 2, 0, 3, 0, 0]
    assert pack.used_elements(torch.tensor([2.0, 0]), 0).tolist() == [True, True, False]

    segments = segment_layout(NUMELS, [1, 0, 1], WORLD, even=True)
    pack = JoinedPack(PackedForm(segments.pieces, segments.sizes, even=True), NUMELS)
    values = [torch.rand(n) for n in NUMELS]
    for got, value in zip(pack.split(pack.join(values, None, torch.empty(0))), values, strict=True):
        assert torch.equal(got, value)


def test_sparse_gradients_are_packed_as_dense_ones() -> None:
    dense = torch.tensor([[0.0, 0], [3, 4]])
    form = PackedForm([Piece(0, 0, 0, 0, 3), Piece(0, 3, 1, 0, 1)], [3, 3], even=True)
    packed = torch.empty(form.starts[-1])
    WrittenPack(form, packed, [(2, 2)]).write([dense.to_sparse()], None)
    assert packed.tolist() == [0, 0, 3, 1, 4, 0, 0, 1]
    assert torch.equal(JoinedPack(form, [4]).join([dense.to_sparse()], [True], torch.empty(0)), packed)


def test_gradients_without_elements() -> None:
    form = PackedForm([], [0] * WORLD, even=True)
    WrittenPack(form, torch.empty(0), [(0,)]).write([torch.zeros(0)], None)
    assert JoinedPack(form, [0]).join([torch.zeros(0)], None, torch.empty(0)).numel() == 0


def test_no_python_object_is_made_for_each_element() -> None:
    numel, traced = 4_000_000, 0
    form = PackedForm([Piece(0, 0, 0, 0, numel - 1), Piece(1, 0, 0, numel - 1, 1)], [numel], even=True)
    pack = JoinedPack(form, [numel - 1, 1])
    tracemalloc.start()
    try:
        used = pack.used_elements(torch.tensor([0.0, 1.0]), 0)
        traced = tracemalloc.get_traced_memory()[1]  # a tensor's elements do not count
    finally:
        tracemalloc.stop()
    assert used.sum() == 1 == used[-1]
    assert traced < 100_000
    elements = pack._elements
    assert elements is not None
    assert elements.element_size() == 4  # and it goes to the device
