"""FSDP against one process: models with one trait each, what users do between steps, and what they do wrong."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import shardkit
from shardkit import FSDP, OffloadPolicy, PrecisionPolicy, ReducePolicy, ReshardPolicy, hybrid_groups
from shardkit.backend import get_backend
from shardkit.errors import ConfigurationError, LifecycleError, RankMismatchError
from tests.beside import assert_same, reread, steps_beside, train_beside, whole
from tests.doors import linears, through
from tests.fsdp_models import MODELS, WIDTH, batch, build
from tests.pools import on_ranks, rank_pool

SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}


def mean_loss(model: nn.Module, xs: torch.Tensor) -> torch.Tensor:
    """What all ranks' losses come to."""
    return torch.stack([model(x).pow(2).mean() for x in xs]).mean()


def wrapped(model: nn.Sequential, **options: Any) -> FSDP:
    """Every second linear layer is a unit, and the rest belongs to the root."""
    return through("FSDP", model, *map(str, range(2, len(model), 4)), **options)  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------ training
def _train(rank: int, world_size: int, name: str, flatten: bool, options: dict[str, Any]) -> None:
    make, wrap = MODELS[name]
    plain = build(make)
    model = wrap(build(make), lambda m: FSDP(m, flatten=flatten, **options))
    # the statistics of batch norm are each rank's own
    plains = [plain] if name != "norms" else None
    first = torch.optim.SGD(plain.parameters(), **SGD)
    second = torch.optim.SGD(model.parameters(), **SGD)
    for step in range(5):
        xs = batch(step, world_size)
        first.zero_grad()
        second.zero_grad()
        if step == 2:  # forgotten again
            with model.no_sync():
                model(xs[rank]).pow(2).mean().backward()
            second.zero_grad()
        if step == 3:  # accumulated with and without exchange
            with model.no_sync():
                model(xs[rank]).pow(2).mean().backward()
            model(xs[rank] * 0.5).pow(2).mean().backward()
            mean_loss(plain, xs).backward()
            mean_loss(plain, xs * 0.5).backward()
        if step == 4:  # two forwards before one backward, after an evaluation
            with torch.no_grad():
                model(xs[rank])
                plain(xs[rank])
            (model(xs[rank]).pow(2).mean() + model(xs[rank] * 2).pow(2).mean()).backward()
            (mean_loss(plain, xs) + mean_loss(plain, xs * 2)).backward()
        else:
            model(xs[rank]).pow(2).mean().backward()
            mean_loss(plain, xs).backward()
        if step == 1:
            a = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
            b = model.clip_grad_norm_(0.05)
            torch.testing.assert_close(b, a.to(b.dtype), rtol=1e-5, atol=1e-6)
        first.step()
        second.step()
        if plains is not None:
            assert_same(model, plain, f"{name}, rank {rank} of {world_size}, step {step}")
    if plains is None:
        for (n, p), (_, q) in zip(model.state_dict().items(), plain.state_dict().items(), strict=True):
            if "running" not in n and "tracked" not in n:
                torch.testing.assert_close(p, q, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("flatten", [True, False], ids=["flat", "each"])
@pytest.mark.parametrize("name", MODELS)
def test_trains_as_one_process(name: str, flatten: bool, world_size: int) -> None:
    rank_pool(world_size).run(_train, world_size, name, flatten, {})


@pytest.mark.parametrize("name", ["tied_across", "checkpoint_reentrant", "twice", "adapted"])
@pytest.mark.parametrize(
    "options",
    [
        {"reshard": ReshardPolicy(after_forward=False)},
        {"reshard": ReshardPolicy(root=True, prefetch=0)},
        {"reshard": ReshardPolicy(prefetch=2)},
        {"offload": OffloadPolicy(parameters=True)},
        {"offload": OffloadPolicy(masters=True, activations=True)},
        {"reduce": ReducePolicy(predivide=1.0)},
        {"reduce": ReducePolicy(dtype=torch.float64)},
    ],
    ids=["keep", "root reshards", "prefetch 2", "offload", "masters", "postdivide", "fp64 reduce"],
)
def test_options_change_no_numbers(name: str, options: dict[str, Any]) -> None:
    rank_pool(2).run(_train, 2, name, True, options)


@pytest.mark.parametrize("mode", ["hybrid", "post-forward mesh"])
@on_ranks(4)
def test_two_by_two_ranks(rank: int, world_size: int, mode: str) -> None:
    """Shards over two of four ranks; or over four, and over two between forward and backward."""
    plain, start = (linears(WIDTH, 7, 5, 3, 1, seed=seed) for seed in range(2))
    if rank == 0:
        start.load_state_dict(plain.state_dict())
    options: dict[str, Any] = {"reshard": ReshardPolicy(after_forward=2)}
    if mode == "hybrid":
        group, replicas = hybrid_groups(2)
        options = {"group": group, "replicas": replicas}
    model = wrapped(start, **options)
    first, second = torch.optim.SGD(plain.parameters(), **SGD), torch.optim.SGD(model.parameters(), **SGD)
    for step in range(4):
        xs = batch(step, world_size)
        first.zero_grad()
        second.zero_grad()
        mean_loss(plain, xs).backward()
        model(xs[rank]).pow(2).mean().backward()
        norms = nn.utils.clip_grad_norm_(plain.parameters(), 0.5), model.clip_grad_norm_(0.5)
        torch.testing.assert_close(norms[1], norms[0])
        first.step()
        second.step()
        assert_same(model, plain, f"rank {rank}, step {step}")
    numel = sum(p.numel() for p in plain.parameters())
    assert sum(p.numel() for p in model.parameters()) < numel / (2 if mode == "hybrid" else 4) + 8


class Centred(nn.Linear):
    """Looks at the data of its weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) - self.weight.data.mean() * self.weight.detach().norm()


@pytest.mark.parametrize("door", ["FSDP", "fully_shard", "dtensors"])
@pytest.mark.parametrize("mode", ["inside a unit", "inside the root", "outside"])
@on_ranks(2)
def test_torch_compile(rank: int, mode: str, door: str) -> None:
    plain, model = (linears(WIDTH, 7, 5, 1) for _ in range(2))
    plain[2].__class__ = model[2].__class__ = Centred
    if mode == "inside a unit":
        model[2] = through(door, torch.compile(model[2], backend="aot_eager"))
        sharded = through(door, model)
    elif mode == "inside the root":
        model[2] = through(door, model[2])
        sharded = through(door, torch.compile(model, backend="aot_eager"))
    else:
        sharded = through(door, model, "2")
    run = torch.compile(sharded, backend="aot_eager") if mode == "outside" else sharded

    def loss(m: Any, r: int, step: int) -> torch.Tensor:
        return (run if m is sharded else m)(batch(step, 2)[r]).pow(2).mean()

    steps_beside(
        rank, 2, sharded, plain, loss, [torch.optim.SGD(m.parameters(), **SGD) for m in (sharded, plain)]
    )
    for a, b in zip(whole(sharded.state_dict()).values(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------ between steps
def assert_equal_state(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """Two state dicts agree exactly."""
    assert list(a) == list(b)
    for name in a:
        assert torch.equal(a[name], b[name]), name


@on_ranks(2)
def test_summoned_parameters_are_real_and_written_back(rank: int) -> None:
    model = wrapped(linears(WIDTH, 7, 5, 1))
    before = model.state_dict()
    shards = [p.detach().clone() for p in model.parameters()]
    with model.summon_full_params(writeback=False):
        assert [n for n, _ in model.module.named_parameters() if n == "0.weight"] == ["0.weight"]
        with torch.no_grad():
            model.module[0].weight.fill_(7.0)
    assert_equal_state(model.state_dict(), before)
    with model.summon_full_params():
        nn.init.constant_(model.module[0].weight, 7.0)
        model.module[0].bias = nn.Parameter(torch.full((7,), 3.0))
    after = model.state_dict()
    assert bool((after["0.weight"] == 7).all())
    assert bool((after["0.bias"] == 3).all())
    assert [p.shape for p in model.parameters()] == [s.shape for s in shards]
    model.apply(lambda m: nn.init.zeros_(m.weight) if isinstance(m, nn.Linear) else None)
    assert all(bool((v == 0).all()) for k, v in model.state_dict().items() if k.endswith("weight"))
    outside = model(batch(0, 2)[rank])
    with model.summon_full_params():
        assert torch.equal(model(batch(0, 2)[rank]), outside)


@on_ranks(2)
def test_casts_attributes_and_inference(rank: int) -> None:
    model = wrapped(linears(WIDTH, 7, 5, 1))
    x = batch(0, 2)[rank].double()
    assert model.to(torch.float64) is model
    assert model(x).dtype is torch.float64
    model(x).sum().backward()
    assert all(p.grad is not None and p.grad.dtype is torch.float64 for p in model.parameters())
    assert model[0].in_features == WIDTH  # passed on to the wrapped module
    assert model.module[0].weight.shape == (7, WIDTH)
    with torch.inference_mode():
        model(x)
    model(x).sum().backward()


@on_ranks(2)
def test_a_program_may_begin_with_an_evaluation(rank: int) -> None:
    """Under inference mode, in units too large to travel together: what training writes to is made for training."""
    plain = linears(WIDTH, 400, 300, 1)
    model = wrapped(linears(WIDTH, 400, 300, 1))
    with torch.inference_mode():
        torch.testing.assert_close(model(batch(0, 2)[rank]), plain(batch(0, 2)[rank]))
    train_beside(rank, 2, model, plain, lambda m, r, step: m(batch(step, 2)[r]).pow(2).mean())


def _local(rank: int) -> tuple[Any, Any, Any]:
    model = wrapped(linears(WIDTH, 7, 5, 1))
    local = copy.deepcopy(model.local_state_dict())
    loaded = reread({"state": local, "metadata": model.local_metadata_dict()})  # weights_only
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    model.load_local_state_dict(loaded["state"])
    return loaded["state"], loaded["metadata"], model.state_dict()


def test_local_state_dicts_consolidate_without_a_process_group() -> None:
    parts = rank_pool(3).run(_local)
    weights, metadata = [p[0] for p in parts], [p[1] for p in parts]
    for order in ([0, 1, 2], [2, 0, 1]):  # a folder lists files in any order
        full = FSDP.consolidate_shard_weights([weights[k] for k in order], [metadata[k] for k in order])
        assert_equal_state(dict(sorted(full.items())), dict(sorted(parts[0][2].items())))
    with pytest.raises(ConfigurationError, match="in rank order"):
        FSDP.consolidate_shard_weights([weights[k] for k in order], metadata)


class _UsedNow(nn.Sequential):
    """Most of it, all that the last ranks have, has no gradient in two steps of three."""

    count: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[0](x) + (self[1](x).sum() if self.count == 1 else 0)  # type: ignore[no-any-return]


@pytest.mark.parametrize("used", ["all", "some"])
@on_ranks(2, 3)
def test_hooks_on_shards_get_reduced_gradients(rank: int, world_size: int, used: str) -> None:
    """An optimizer that steps in backward, as soon as a shard has its gradient; and a hook that halves gradients."""
    some = lambda: _UsedNow(nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 30))  # noqa: E731
    plain, model = (build(some) if used == "some" else linears(WIDTH, 7, 5, 1) for _ in range(2))
    sharded = wrapped(model)
    for p in sharded.parameters():
        optimizer = torch.optim.SGD([p], lr=0.1)

        def step(q: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        p.register_hook(lambda g: g * 0.5)
        p.register_post_accumulate_grad_hook(step)
    first = torch.optim.SGD(plain.parameters(), lr=0.05)
    for count in range(3):
        xs = batch(count, world_size)
        plain.count = model.count = count
        first.zero_grad()
        mean_loss(plain, xs).backward()
        first.step()
        sharded(xs[rank]).pow(2).mean().backward()
        assert_same(sharded, plain, f"step {count}")


BEGIN_WITH_VALUES: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "nesterov": True, "momentum": 0.9},
    "Rprop": {"lr": 0.01},
    "Adagrad": {"lr": 0.05, "initial_accumulator_value": 0.1},
}


class _UsedLater(nn.Module):
    """Its second layer has no gradient in the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.second(self.first(x)) if self.calls > 1 else self.first(x)


@pytest.mark.parametrize("name", BEGIN_WITH_VALUES)
@on_ranks(2)
def test_state_of_a_member_begins_with_its_first_gradient(rank: int, name: str) -> None:
    plain, model = (build(_UsedLater) for _ in range(2))
    sharded = FSDP(model)
    first, second = (
        getattr(torch.optim, name)(m.parameters(), **BEGIN_WITH_VALUES[name]) for m in (plain, sharded)
    )
    for step in range(3):
        x = batch(step, 1)[0]
        for m, o in ((plain, first), (sharded, second)):
            o.zero_grad()
            m(x).pow(2).mean().backward()
            o.step()
    assert_same(sharded, plain, name, atol=1e-5)


# ------------------------------------------------------------------------------------ what users do wrong
@pytest.mark.parametrize(
    "case",
    ["values", "shapes", "frozen", "no_sync below the root", "uneven hybrid", "foreign optimizer state"],
)
@on_ranks(2)
def test_mistakes_are_named_on_every_rank(rank: int, case: str) -> None:
    torch.manual_seed(rank)
    if case == "values":
        with pytest.raises(RankMismatchError, match="has other values on rank 1"):
            FSDP(nn.Linear(3, 3), sync_module_states=False)
        model = FSDP(nn.Linear(3, 3))  # by default rank 0's count
        states = get_backend("gloo").group().all_gather_object(model.state_dict())  # torch's own needs numpy
        assert_equal_state(*states)
    elif case == "shapes":
        with pytest.raises(RankMismatchError, match="weight"):
            FSDP(nn.Linear(3, 3 + rank))
    elif case == "frozen":
        layer = nn.Linear(3, 3)
        layer.bias.requires_grad_(rank == 0)
        with pytest.raises(RankMismatchError, match="bias"):
            FSDP(layer)
    elif case == "no_sync below the root":
        model = wrapped(linears(WIDTH, 7, 5, 1))
        model(torch.randn(2, WIDTH))
        with pytest.raises(LifecycleError, match="outermost"), model.module[2].no_sync():
            pass
        with pytest.raises(LifecycleError, match="outermost"):
            model.module[2].clip_grad_norm_(1.0)
    elif case == "uneven hybrid":
        with pytest.raises(ConfigurationError, match="can't be divided"):
            hybrid_groups(3)
    elif case == "foreign optimizer state":
        model, other = wrapped(linears(WIDTH, 7, 5, 1)), FSDP(nn.Linear(3, 3))
        state = other.gather_full_optim_state_dict(torch.optim.Adam(other.parameters()))
        words = (
            "this optimizer state is of a model" if rank == 0 else "gather_full_optim_state_dict on rank 0"
        )
        with pytest.raises(ConfigurationError, match=words):
            model.get_shard_from_optim_state_dict(state)
        with pytest.raises(ConfigurationError, match="Adam has none of the model's shards"):
            model.gather_full_optim_state_dict(torch.optim.Adam(other.parameters()))
        plain = linears(WIDTH, 7, 5, 1)
        groups = torch.optim.Adam([{"params": list(layer.parameters())} for layer in plain[::2]]).state_dict()
        with pytest.raises(ConfigurationError, match="several groups does not say"):
            model.get_shard_from_optim_state_dict(groups)


def test_policies_refuse_what_can_not_be() -> None:
    for make in (
        lambda: PrecisionPolicy(compute=torch.int32),
        lambda: PrecisionPolicy(compute="bf16"),  # type: ignore[arg-type]
        lambda: ReshardPolicy(after_forward=0),
        lambda: ReshardPolicy(prefetch=-1),
        lambda: OffloadPolicy(parameters=True, gradients=False),
        lambda: ReducePolicy(predivide=0.0),
    ):
        with pytest.raises(shardkit.ConfigurationError):
            make()
