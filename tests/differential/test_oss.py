"""OSS beside the real fairscale: owners, every optimizer, and state dicts between the two and torch."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.differential.keeping import kept
from tests.pools import rank_pool
from tests.programs.fairscale_limits import SCALAR_STATE, fairscale_limit
from tests.programs.optimizers import OPTIMIZERS
from tests.programs.result import Checkpoint, RankRun, compare, tolerance_for
from tests.programs.running import examples, run_ranks
from tests.programs.spec import OptimizerSpec, Program, Schedule, Sharded, Step, Train, ZeroGrad, stack
from tests.programs.strategies import DENSE_OPTIMIZERS, PLAIN_LEAVES, optimizers, stacks
from tests.programs.truth import run_truth

pytest.importorskip("fairscale.optim.oss")
pytestmark = pytest.mark.oracle
ITERATION = (ZeroGrad(), Train(), Step())


def run_with(
    library: str, program: Program, world_size: int, start: Checkpoint | None = None
) -> tuple[list[RankRun], Checkpoint]:
    """A run with "torch" (one process), "fairscale" or "shardkit", and the checkpoint that rank 0 leaves."""
    if library == "torch":
        runs = run_truth(program, world_size, start)
    else:
        runs = run_ranks(library, program, world_size, start)
    checkpoint = runs[0].saved
    assert isinstance(checkpoint, Checkpoint)
    # through bytes, as through a file
    return runs, pickle.loads(pickle.dumps(checkpoint))


# ------------------------------------------------------------------------------------------------ owners
def owners(rank: int, library: str, sizes: list[tuple[int, bool]], groups: int) -> list[list[list[int]]]:
    """Per rank and group the indices of the parameters it owns."""
    from tests.programs.owning_ranks import library as load

    params = [torch.nn.Parameter(torch.zeros(n), requires_grad=trainable) for n, trainable in sizes]
    index = {id(p): i for i, p in enumerate(params)}
    parts: list[Any] = [{"params": params[i::groups]} for i in range(groups)]
    optimizer = load(library).oss(Sharded(), torch.optim.SGD, parts, {"lr": 0.1})
    return [[[index[id(p)] for p in g["params"]] for g in part] for part in optimizer.partition_parameters()]


drawn_sizes = st.lists(
    st.tuples(st.integers(1, 40), st.sampled_from([True, True, True, False])), min_size=3, max_size=12
)


@pytest.mark.parametrize("world_size", [2, 3])
@examples(25)
@given(sizes=drawn_sizes, groups=st.integers(1, 3))
def test_same_owners(world_size: int, sizes: list[tuple[int, bool]], groups: int) -> None:
    sizes[0] = (sizes[0][0], True)  # an optimizer over frozen parameters alone has nothing to do
    check_owners(world_size, sizes, groups)


@kept
def check_owners(world_size: int, sizes: list[tuple[int, bool]], groups: int) -> None:
    pool = rank_pool(world_size)
    assert pool.run(owners, "shardkit", sizes, groups) == pool.run(owners, "fairscale", sizes, groups)


# ------------------------------------------------------------------------------------------------ optimizers
@pytest.mark.parametrize("wrapper", ["sharded", "ddp"])
@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n not in ("lbfgs", "sparse_adam")])
def test_every_optimizer_same_as_fairscale(name: str, wrapper: str) -> None:
    spec = OptimizerSpec(name, groups=2, form="groups", scheduler="step")
    steps = (*ITERATION, Schedule()) * 3
    program = Program(stack("mlp", "odd", "conv"), Sharded(wrapper=wrapper), spec, steps)
    assert fairscale_limit(program, 2) is None
    theirs = run_ranks("fairscale", program, 2)
    compare(run_ranks("shardkit", program, 2), theirs, tolerance_for(program), buffers_of=[0], partition=True)


# ------------------------------------------------------------------------------------------------ state dicts
@st.composite
def checkpointed(draw: st.DrawFn) -> Program:
    """Some iterations within fairscale's limits.

    Without "odd": fairscale makes parameters contiguous, and then hands fused kernels state that is not.
    """
    model = draw(stacks(tuple(b for b in PLAIN_LEAVES if b not in ("running_mean", "odd"))))
    spec = draw(optimizers(model, tuple(n for n in DENSE_OPTIMIZERS if n not in SCALAR_STATE), True))
    options = Sharded(optimizers=draw(st.sampled_from([1, 2])))
    spec = dataclasses.replace(spec, scheduler="")
    return Program(model, options, spec, ITERATION * draw(st.integers(1, 2)), draw(st.integers(0, 9)))


WAYS = [
    ("fairscale", 2, "shardkit", 2),
    ("shardkit", 2, "fairscale", 2),
    ("fairscale", 2, "shardkit", 3),
    ("shardkit", 3, "fairscale", 2),
    ("shardkit", 2, "shardkit", 3),
    ("torch", 1, "shardkit", 2),
    ("shardkit", 2, "torch", 1),
    ("shardkit", 1, "shardkit", 2),
]


@pytest.mark.parametrize(("writer", "before", "reader", "after"), WAYS)
@examples(8)
@given(program=checkpointed())
def test_state_dicts_travel(writer: str, before: int, reader: str, after: int, program: Program) -> None:
    """Written by one at one world size, read by the other at another: the course goes on as if nothing had happened."""
    check_travel(writer, before, reader, after, program)


@kept
def check_travel(writer: str, before: int, reader: str, after: int, program: Program) -> None:
    _, checkpoint = run_with(writer, program, before)
    _, true_checkpoint = run_with("torch", program, before)
    runs, _ = run_with(reader, program, after, checkpoint)
    true_runs, _ = run_with("torch", program, after, true_checkpoint)
    compare(runs, true_runs, tolerance_for(program), buffers_of=[0])


@pytest.mark.parametrize("writer", ["torch", "fairscale", "shardkit"])
@pytest.mark.parametrize("name", ["adamw_fused", "adam_foreach", "sgd_fused"])
def test_state_of_parameters_that_are_not_contiguous(name: str, writer: str) -> None:
    """fairscale's state is contiguous even if the parameter is not; fused kernels walk memory."""
    program = Program(stack("odd"), Sharded(), OptimizerSpec(name), ITERATION * 2)
    _, checkpoint = run_with(writer, program, 2)
    _, true_checkpoint = run_with("torch", program, 2)
    compare(
        run_with("shardkit", program, 2, checkpoint)[0],
        run_with("torch", program, 2, true_checkpoint)[0],
        tolerance_for(program),
    )
