"""Pipelines over ranks against the plain module, on 4 ranks of which 1 to 4 are stages."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardkit import model_parallel as mp
from shardkit.errors import LifecycleError, RankLostError, RankMismatchError
from shardkit.model_parallel import groups
from shardkit.nn.pipe import AsyncPipe, LazyModule
from tests.pipeline.test_pipe import Pop, Stash
from tests.pools import free_port, on_ranks, rank_pool

WORLD = 4
assert_close = torch.testing.assert_close


def run(program: Callable[..., Any], *args: Any) -> list[Any]:
    return rank_pool(WORLD).run(program, *args)


class Pair(nn.Module):
    """One tensor in; it and integers out."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x, torch.arange(len(x)), x.detach() > 0


class Unpair(nn.Module):
    def forward(self, value: tuple[torch.Tensor, ...]) -> torch.Tensor:
        x, numbers, positive = value
        return x * (numbers.view(-1, 1) + 1) + positive


LAYERS: list[Callable[[], nn.Module]] = [
    lambda: nn.Linear(5, 7), nn.Tanh, Pair, Unpair, lambda: nn.Linear(7, 6), lambda: nn.Dropout(0.0),
    lambda: nn.LayerNorm(6), lambda: nn.Linear(6, 3),
]  # fmt: skip


def plain(seed: int = 0) -> nn.Sequential:
    """Layers with weights that don't depend on who makes them."""
    return nn.Sequential(*(seeded(i, seed) for i in range(len(LAYERS))))


def seeded(i: int, seed: int = 0) -> nn.Module:
    torch.manual_seed(100 * seed + i)
    return LAYERS[i]()


def make(balance: list[int], *, lazy: bool = False, **arguments: Any) -> AsyncPipe:
    layers = [LazyModule(lambda i=i: seeded(i)) for i in range(len(LAYERS))] if lazy else plain()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AsyncPipe(layers, balance, group=dist.group.WORLD, **arguments)


def truth(x: torch.Tensor, chunks: int) -> tuple[nn.Sequential, torch.Tensor]:
    module = plain()
    output = torch.cat([module(part) for part in x.chunk(chunks)])  # Unpair counts within micro-batches
    return module, output


# ------------------------------------------------------------------------------------------ training
def train(rank: int, balance: list[int], chunks: int, checkpoint: str, lazy: bool) -> None:
    pipe = make(balance, lazy=lazy, chunks=chunks, checkpoint=checkpoint)
    rank = dist.get_rank()
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1) if list(pipe.parameters()) else None
    module = plain()
    expected_optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(2):
        torch.manual_seed(7 + step)
        x = torch.randn(7 - step, 5)
        expected = torch.cat([module(part) for part in x.chunk(chunks)])
        expected.square().mean().backward()
        # Other ranks' inputs are of no consequence.
        output = pipe(x if rank == 0 else torch.zeros(1))
        if pipe.final_stage:
            assert_close(output, expected)
            output.square().mean().backward()
        elif pipe.partition is not None:
            pipe.back_helper(output)
        own = dict(module.named_parameters())
        for name, parameter in pipe.named_parameters():
            assert_close(parameter.grad, own[name.removeprefix("0.")].grad)
        for o in (optimizer, expected_optimizer):
            if o is not None:
                o.step()
                o.zero_grad()
    with torch.no_grad():
        pipe.eval()
        output = pipe(x)
        if pipe.final_stage:
            assert_close(output, torch.cat([module(part) for part in x.chunk(chunks)]))
            assert not output.requires_grad


@pytest.mark.parametrize(
    ("balance", "chunks", "checkpoint", "lazy"),
    [
        ([2, 2, 3, 1], 3, "except_last", False),
        ([3, 1, 4], 4, "always", True),
        ([3, 5], 7, "never", True),
        ([8], 2, "except_last", False),
        ([1, 1, 1, 5], 1, "always", False),
    ],
)
def test_training(balance: list[int], chunks: int, checkpoint: str, lazy: bool) -> None:
    """Stages may pass on several tensors, of integers and booleans too; ranks left over give their input back."""
    run(train, balance, chunks, checkpoint, lazy)


@on_ranks(WORLD)
def test_what_an_async_pipe_is(rank: int) -> None:
    pipe, rank = make([3, 5]), dist.get_rank()
    if rank > 1:
        assert (len(pipe), pipe.partition, pipe.final_stage, list(pipe)) == (0, None, False, [])
        x = torch.zeros(2)
        assert pipe(x) is x
        with pytest.warns(UserWarning, match="More ranks than partitions"):
            AsyncPipe(plain(), [3, 5], group=dist.group.WORLD)
        return
    first = [0, 3][rank]
    assert len(pipe) == [3, 5][rank]
    assert pipe.final_stage == (rank == 1)
    assert pipe.partition is not None
    assert pipe[0] is pipe.partition[0]
    assert list(pipe) == list(pipe.partition)
    names = [n for n in plain().state_dict() if first <= int(n.split(".")[0]) < first + 5 - 2 * (rank == 0)]
    # fairscale has a rank's layers under two names.
    assert list(pipe.state_dict()) == [f"0.{n}" for n in names] + [f"partition.{n}" for n in names]
    if rank == 1:
        with pytest.raises(ValueError, match="only be called on non-final stages"):
            pipe.back_helper([])


@on_ranks(WORLD)
def test_the_pipeline_group_of_model_parallelism(rank: int) -> None:
    mp.initialize_model_parallel(1, pipeline_length=2)
    try:
        pipe = AsyncPipe(plain(), [4, 4], chunks=2)
        assert pipe.group is mp.get_pipeline_parallel_group()
        x = torch.ones(4, 5) * (dist.get_rank() + 1)  # two pipelines: ranks 0 and 1, 2 and 3
        output = pipe(x)
        if pipe.final_stage:
            assert_close(output, truth(torch.ones(4, 5) * dist.get_rank(), 2)[1])
            output.sum().backward()
    finally:
        mp.destroy_model_parallel()


@on_ranks(WORLD)
def test_batch_norms(rank: int) -> None:
    norm = nn.BatchNorm1d(4)
    x = torch.arange(32.0).view(8, 4).sin()
    for deferred in (True, False):
        pipe = AsyncPipe(
            nn.Sequential(nn.Identity(), nn.BatchNorm1d(4)), [1, 1], group=dist.group.WORLD, chunks=5,
            checkpoint="always", deferred_batch_norm=deferred,
        ) if dist.get_rank() < 2 else None  # fmt: skip
        if pipe is None:
            continue
        output = pipe(x)
        if pipe.final_stage:
            output.square().sum().backward()
            for part in [x] if deferred else x.chunk(5):
                norm.train()(part)
            assert_close(pipe[0].running_mean, norm.running_mean)
            assert_close(pipe[0].running_var, norm.running_var)
            norm.reset_running_stats()


# ------------------------------------------------------------------------------------------ refusals


@on_ranks(WORLD)
def test_refusals(rank: int) -> None:
    group = dist.group.WORLD
    layer = nn.Linear(1, 1)
    for arguments, error, match in (
        ((plain(), [1, 2]), ValueError, "different length"),
        ((plain(), [9, -1]), ValueError, "positive integer"),
        ((plain(), [1, 1, 1, 1, 4]), IndexError, r"too few ranks .*\(ranks: 4, partitions: 5\)"),
        (([layer, layer], [1, 1]), ValueError, "duplicate children"),
        ((nn.Sequential(Stash(), Pop()), [1, 1]), ValueError, r"skip connections between ranks .*'skip'"),
    ):
        with pytest.raises(error, match=match):
            AsyncPipe(*arguments, group=group)
    with pytest.raises(ValueError, match="checkpoint is not one of"):
        AsyncPipe(plain(), [8], group=group, checkpoint="often")
    if dist.get_rank() == 0:
        with pytest.raises(TypeError, match=r"must be nn\.Module or callable"):
            AsyncPipe([3], [1], group=group)  # type: ignore[list-item]
        with pytest.raises(ValueError, match="lazy construction"):
            AsyncPipe([LazyModule(Stash), LazyModule(Pop)], [2], group=group)
        layers = nn.Sequential(Stash(2), Pop())
        pipe = AsyncPipe(layers, [2], group=group)
        x = torch.ones(2)
        assert_close(pipe(x), layers[0].module.linear(x) + 9)  # within a rank they work
        with pytest.raises(TypeError, match="got list"):
            pipe([torch.ones(2)])


class Fails(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("on purpose")


class FailsBackward(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def fail(_: torch.Tensor) -> None:
            raise ZeroDivisionError("on purpose")

        x = x * 1
        if x.requires_grad:
            x.register_hook(fail)
        return x


def _failing(rank: int, failing: type[nn.Module], place: int) -> tuple[str, str]:
    group = dist.new_group(list(range(WORLD)))  # what is on its way when ranks fail stays there
    layers = [failing() if i == place else nn.Linear(2, 2) for i in range(WORLD)]
    pipe = AsyncPipe(layers, [1] * WORLD, group=group, chunks=2)  # type: ignore[arg-type]
    try:
        output = pipe(torch.randn(4, 2))
        if pipe.final_stage:
            output.sum().backward()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_rank_that_fails_in_forward(place: int) -> None:
    """All ranks hear of it, with the error; none waits."""
    found = run(_failing, Fails, place)
    for rank, (kind, message) in enumerate(found):
        assert kind == ("ZeroDivisionError" if rank == place else "RankLostError"), found
        assert "on purpose" in message
        assert rank == place or f"stage {place} of the pipeline failed" in message


@pytest.mark.parametrize("place", [1, 2])
def test_a_rank_that_fails_in_backward(place: int) -> None:
    found = run(_failing, FailsBackward, place)
    assert found[place][0] == "ZeroDivisionError", found
    assert found[-1] == ("", "")
    for kind, message in found[:place]:
        assert kind == "RankLostError", found
        assert f"stage {place} of the pipeline failed: ZeroDivisionError: on purpose" in message


def _modes_differ(rank: int) -> str:
    group = dist.new_group(list(range(WORLD)))
    pipe = (
        AsyncPipe([nn.Linear(2, 2) for _ in range(2)], [1, 1], group=group) if dist.get_rank() < 2 else None
    )
    if pipe is None:
        return ""
    pipe.train(dist.get_rank() == 0)
    with pytest.raises((RankMismatchError, RankLostError)) as caught:
        pipe(torch.randn(4, 2))
    return str(caught.value)


def test_some_ranks_in_training_mode() -> None:
    found = run(_modes_differ)
    assert all(
        "stages 0 and 1 of a pipeline disagree whether backward follows (True and False)" in f
        for f in found[:2]
    )


@on_ranks(WORLD)
def test_backward_twice(rank: int) -> None:
    if dist.get_rank() < 2:
        pipe = AsyncPipe([nn.Linear(2, 2) for _ in range(2)], [1, 1], group=dist.group.WORLD)
        output = pipe(torch.randn(4, 2))
        if pipe.final_stage:
            loss = output.sum()
            loss.backward(retain_graph=True)
            with pytest.raises(LifecycleError, match="once for each forward"):
                loss.backward()


# ------------------------------------------------------------------------------------------ driven by one rank
def _make_optimizer(ctx: dict[str, float], model: Any) -> None:
    parameters = list(model.parameters())
    model.optimizer = torch.optim.SGD(parameters or [torch.zeros(1)], **ctx)


def _step(ctx: Any, model: Any) -> None:
    model.optimizer.step()
    model.optimizer.zero_grad()


def _fail(ctx: Any, model: Any) -> None:
    raise ZeroDivisionError("of a callback")


class Module(nn.Module):
    """Two results."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x), x.argmax(1)


def _driven(rank: int, port: int) -> None:
    from torch.distributed import rpc

    from shardkit.nn import PipeRPCWrapper

    rank = dist.get_rank()
    rpc.init_rpc(
        f"worker{rank}", rank=rank, world_size=WORLD,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}"),
    )  # fmt: skip
    mp.initialize_model_parallel(1, pipeline_length=WORLD)
    try:
        names = {r: f"worker{r}" for r in range(WORLD)}
        if rank == 0:
            _drive(PipeRPCWrapper, names)
        elif rank == 1:
            with pytest.raises(ValueError, match="made by the first rank"):
                PipeRPCWrapper(nn.Sequential(), [], worker_map=names)
        rpc.shutdown()
    finally:
        mp.destroy_model_parallel()


def _drive(wrapper: Any, names: dict[int, str]) -> None:
    def module() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), Module())

    pipe = wrapper(module(), [1, 1, 2], worker_map=names, chunks=3)  # the last rank is left over
    assert not pipe.final_stage
    pipe.foreach_worker(_make_optimizer, {"lr": 0.1}, include_self=True)
    plainly = module()
    optimizer = torch.optim.SGD(plainly.parameters(), lr=0.1)
    for _ in range(3):
        x = torch.randn(7, 5)
        expected, best = plainly(x)
        found, found_best = pipe(x)
        assert_close(found, expected)
        assert_close(found_best, best)
        for output in (expected, found):
            output.square().sum().backward()
        pipe.foreach_worker(_step, include_self=True)
        optimizer.step()
        optimizer.zero_grad()
    pipe.eval()
    assert_close(pipe(x), plainly(x))
    pipe.train()
    with torch.no_grad():
        assert_close(pipe(x), plainly(x))
    with pytest.raises(Exception, match="of a callback"):
        pipe.foreach_worker(_fail)


def test_driven_by_one_rank() -> None:
    run(_driven, free_port())


@on_ranks(WORLD)
def test_driven_by_a_rank_that_is_early(rank: int, port: int) -> None:
    """Rank 0 calls before the others' ``initialize_model_parallel`` has come back."""
    initialize = mp.initialize_model_parallel

    def late(*args: Any, **kwargs: Any) -> None:
        initialize(*args, **kwargs)
        if dist.get_rank():
            made, groups._current = groups._current, None
            dist.barrier()
            time.sleep(0.5)
            groups._current = made
        else:
            dist.barrier()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mp, "initialize_model_parallel", late)
        _driven(rank, port)
