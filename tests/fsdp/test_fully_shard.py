"""fully_shard: sharded in place; the module keeps class, signature, methods and names. The truth is one process."""

from __future__ import annotations

import contextlib
import copy
import inspect
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.nn.utils.parametrizations import spectral_norm
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

from shardkit import FSDP, PrecisionPolicy, ReshardPolicy, ShardedDDP, fully_shard, sharding_of
from shardkit.errors import ConfigurationError, LifecycleError
from shardkit.oss import OSS
from tests.beside import assert_same, reread, steps_beside, train_beside, whole
from tests.doors import through
from tests.pools import on_ranks, rank_pool

WORLDS = [(1, "gloo"), (2, "gloo"), (3, "simulated")]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        if self.training:
            self.calls += 1
        return x + scale * self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Weights of embedding and head are one; sizes are uneven."""

    def __init__(self, vocabulary: int = 13, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor, recompute: bool = False) -> torch.Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x, scale=0.5)
        return self.head(x)

    def generate(self, tokens: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], 1)
        return tokens


def shard(model: Any, **options: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randint(0, 13, (2, 5), generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model: nn.Module, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens, **options).flatten(0, 1), tokens.flatten())


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Decay by name, as trainers do it."""
    decayed = [p for n, p in model.named_parameters() if "norm" not in n and "bias" not in n]
    rest = [p for n, p in model.named_parameters() if "norm" in n or "bias" in n]
    return [{"params": decayed, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0}]


def two_steps(
    rank: int, world_size: int, model: nn.Module, plain: Any, params_of: Callable[[nn.Module], Any]
) -> None:
    """The same on both, with SGD; buffers count this rank's forwards."""
    optimizers = [torch.optim.SGD(params_of(m), lr=0.5) for m in (model, plain)]
    steps_beside(
        rank, world_size, model, plain, lambda m, r, step: loss_of(m, batch(r, step)), optimizers, range(2)
    )
    for block in plain.blocks:
        block.calls.fill_(2)
    assert_same(model, plain)


@pytest.mark.parametrize("after_forward", [True, False])
@pytest.mark.parametrize("recompute", [False, True])
@on_ranks(*WORLDS)
def test_training_is_that_of_one_process(
    rank: int, world_size: int, after_forward: bool, recompute: bool
) -> None:
    plain = Model().double()  # Adam makes much of the last bits of small gradients
    model = shard(Model().double(), reshard=ReshardPolicy(after_forward=after_forward))
    mine, truth = torch.optim.AdamW(groups(model), lr=0.05), torch.optim.AdamW(groups(plain), lr=0.05)
    for step in range(3):
        mine.zero_grad(set_to_none=step == 1)
        truth.zero_grad()
        if step == 2:  # two micro-batches
            with sharding_of(model).no_sync():
                loss_of(model, batch(rank, 7)).backward()
            torch.stack([loss_of(plain, batch(r, 7)) for r in range(world_size)]).mean().backward()
        loss_of(model, batch(rank, step), recompute=recompute).backward()
        torch.stack(
            [loss_of(plain, batch(r, step), recompute=recompute) for r in range(world_size)]
        ).mean().backward()
        ours = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        torch.testing.assert_close(ours, torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
        mine.step()
        truth.step()
    for block in plain.blocks:  # this rank's calls, not those of all
        block.calls.copy_(model.blocks[0].calls)
    assert_same(model, plain)


@on_ranks(*WORLDS)
def test_the_module_stays_what_it_was(rank: int, world_size: int) -> None:
    plain = Model().eval()
    model = shard(Model()).eval()
    assert type(model) is Model
    assert type(model.blocks[0]) is Block
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    if world_size > 1:
        assert sum(p.numel() for p in model.parameters()) < sum(p.numel() for p in plain.parameters())
        block = model.blocks[0]
        loss_of(model, batch(rank, 0)).backward()
        for views in ([*block.parameters()], [p.grad for p in block.parameters() if p.grad is not None]):
            assert (
                len({t.untyped_storage().data_ptr() for t in views if t.numel()}) == 1
            )  # the unit's one shard
        assert all(p.grad is not None for p in block.parameters())
    tokens = batch(0, 0)
    with torch.no_grad():
        torch.testing.assert_close(model.generate(tokens), plain.generate(tokens))
        torch.testing.assert_close(model.blocks[1](torch.ones(2, 6)), plain.blocks[1](torch.ones(2, 6)))
    with sharding_of(model).summon_full_params():
        assert model.words.weight is model.head.weight
        torch.testing.assert_close(model.words.weight, plain.words.weight)
        torch.testing.assert_close(model(tokens), plain(tokens))
    if world_size > 1:
        with pytest.raises(LifecycleError, match=r"words\.weight"):
            model.words.weight.sum()


@pytest.mark.parametrize("summoned", [False, True])
@pytest.mark.parametrize("door", ["FSDP", "unflattened", "fully_shard", "dtensors"])
@on_ranks(1, 2, 3)
def test_a_parametrization_of_a_sharded_module(rank: int, world_size: int, door: str, summoned: bool) -> None:
    """torch takes the weight out, and changes the class, before it registers anything."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = through(door, copy.deepcopy(plain))
    inner = getattr(model, "module", model)
    for change in (
        spectral_norm,
        nn.utils.parametrizations.orthogonal,
        nn.utils.spectral_norm,
        nn.utils.weight_norm,
        nn.utils.parametrizations.weight_norm,
        partial(
            nn.utils.parametrize.register_parametrization, tensor_name="weight", parametrization=nn.Tanh()
        ),
        *(
            [partial(register_parametrization, tensor_name="weight", parametrization=nn.Tanh())]
            if summoned or door != "FSDP"  # torch has no such parameter where it is imported so
            else ()
        ),
    ):
        with pytest.raises(
            ConfigurationError, match=r"'weight\.original' is put into a Linear whose parameters"
        ):
            with sharding_of(model).summon_full_params() if summoned else contextlib.nullcontext():
                change(inner[1])
        assert type(inner[1]) is nn.Linear
    for m in (model, plain):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        m(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
    assert_same(model, plain)


@pytest.mark.parametrize("door", ["FSDP", "fully_shard", "dtensors"])
@on_ranks(2)
def test_a_parameter_of_another_shape_in_a_summoned_module(rank: int, door: str) -> None:
    """The first one is on one rank alone. All else is kept, and the module trains on."""
    plain: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    models = plain, through(door, copy.deepcopy(plain))
    for ranks in ((0,), (0, 1)):
        words = r"'1\.weight' has shape \(3, 4\), was \(4, 4\)"
        inside = pytest.raises(ConfigurationError, match=words) if rank in ranks else contextlib.nullcontext()
        with inside, sharding_of(models[1]).summon_full_params():
            inner = getattr(models[1], "module", models[1])
            if rank in ranks:
                inner[1].weight = nn.Parameter(torch.ones(3, 4))
            inner[0].weight = nn.Parameter(torch.ones(4, 4) * len(ranks))
    plain[0].weight.data.fill_(2.0)
    for m in models:
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        m(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
    assert_same(models[1], plain)


@on_ranks(*WORLDS)
def test_files_of_one_process_load_and_the_other_way_round(rank: int, world_size: int) -> None:
    other = Model()
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1)
    model = shard(Model())
    wrong = {k: v for k, v in other.state_dict().items() if k != "blocks.1.up.bias"}
    with pytest.raises(RuntimeError, match=r"blocks\.1\.up\.bias"):
        model.load_state_dict(wrong)
    assert not any(model.load_state_dict(other.state_dict()))
    assert_same(model, other)
    loss_of(model, batch(rank, 0)).backward()  # and it trains
    back = Model()
    back.load_state_dict(model.state_dict())
    assert_same(model, back)
    block = model.blocks[0].state_dict()  # a unit's own
    torch.testing.assert_close(block["up.weight"], other.blocks[0].up.weight.detach())
    local = copy.deepcopy(sharding_of(model).local_state_dict())
    with sharding_of(model).summon_full_params(), torch.no_grad():
        model.words.weight.zero_()
    sharding_of(model).load_local_state_dict(local)
    assert_same(model, back)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer.step()
    full = sharding_of(model).gather_full_optim_state_dict(optimizer)
    assert (full is None) == (rank != 0)


@on_ranks(*WORLDS)
def test_mixed_precision_and_moving(rank: int, world_size: int) -> None:
    model = shard(Model(), precision=PrecisionPolicy(compute=torch.bfloat16))
    seen: list[torch.dtype] = []
    model.blocks[0].up.register_forward_hook(lambda m, i, o: seen.append(o.dtype))
    loss_of(model, batch(rank, 0)).backward()
    assert seen == [torch.bfloat16]
    assert all(p.grad.dtype == p.dtype == torch.float32 for p in model.parameters())
    double, truth = shard(Model()).double(), Model().double()
    assert_same(double, truth)
    torch.testing.assert_close(double(batch(0, 0)), truth(batch(0, 0)))


def _trained_narrow(
    model: nn.Module, rank: int, door: Callable[..., Any], **precision: Any
) -> dict[str, torch.Tensor]:
    model.blocks[1].requires_grad_(False)
    model = door(model, precision=PrecisionPolicy(**precision))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for step in range(3):
        loss_of(model, batch(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(p.dtype == torch.float32 and p.grad is None for p in model.parameters() if p.requires_grad)
    return copy.deepcopy(whole(model.state_dict()))


@on_ranks(*WORLDS)
def test_a_model_of_16_bits_has_masters(rank: int, world_size: int) -> None:
    """As one of fp32 that is computed in 16 bits, to the bit; what is frozen keeps its dtype."""
    doors = [shard, FSDP] + [partial(shard, dtensors=True)] * (world_size == 2)
    for door in doors:
        narrow = _trained_narrow(Model().bfloat16(), rank, door, masters=True)
        wide = _trained_narrow(Model().bfloat16().float(), rank, door, compute=torch.bfloat16)
        for name, value in narrow.items():
            is_frozen = name.startswith("blocks.1") and value.is_floating_point()
            assert value.dtype == (torch.bfloat16 if is_frozen else wide[name].dtype)
            assert torch.equal(value.to(wide[name].dtype), wide[name])


@on_ranks(*WORLDS)
def test_doors_in_one_another(rank: int, world_size: int) -> None:
    plain, inner = Model(), Model()
    fully_shard(inner.blocks[0])
    inner.blocks[2] = FSDP(inner.blocks[2])
    model = FSDP(inner)
    two_steps(rank, world_size, model, plain, nn.Module.parameters)


@on_ranks(*WORLDS)
def test_copies(rank: int, world_size: int) -> None:
    truth, model = Model(), shard(Model())
    loss_of(model, batch(rank, 0)).backward()
    around = FSDP(nn.Sequential(shard(Model()), nn.Linear(13, 2)))
    both = copy.deepcopy(around)
    torch.testing.assert_close(both(batch(0, 1)), around(batch(0, 1)))
    second = copy.deepcopy(copy.deepcopy(model))  # of one that never ran
    assert all(p.grad is None for p in second.parameters())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (second, truth)]
    steps_beside(
        rank, world_size, second, truth, lambda m, r, step: loss_of(m, batch(r, step)), optimizers, [1]
    )
    for block in truth.blocks:
        block.calls.copy_(second.blocks[0].calls)
    assert_same(second, truth)


@on_ranks(*WORLDS)
def test_what_is_refused(rank: int, world_size: int) -> None:
    model = shard(Model())
    for again in (model, model.blocks[0]):
        with pytest.raises(ConfigurationError, match="sharded already"):
            fully_shard(again)
    with pytest.raises(ConfigurationError, match="not sharded by itself"):
        sharding_of(model.words)
    with sharding_of(model).summon_full_params(), pytest.raises(LifecycleError, match="copying or pickling"):
        pickle.dumps(model)
    if world_size > 1:
        with pytest.raises(LifecycleError, match="Call state_dict"):
            model.words.state_dict()
    with pytest.raises(ConfigurationError):
        ShardedDDP(model, OSS(model.parameters(), torch.optim.SGD, lr=0.1))
    asking = fully_shard(Asking())
    asking(torch.ones(1, 3)).sum().backward()
    if world_size > 1:  # what was refused has left nothing behind
        with pytest.raises(LifecycleError, match="Call state_dict"):
            asking.inner.state_dict()
    assert asking.state_dict()["inner.weight"].shape == (3, 3)
    failing = Failing()
    fully_shard(failing.inner)
    fully_shard(failing)
    if world_size == 1:  # on several ranks the group is told, and ends
        for _ in range(2):
            with pytest.raises(KeyError, match="in forward"):
                failing(torch.ones(1, 3), True)
            failing(torch.ones(1, 3), False).sum().backward()


class Asking(nn.Module):
    """Asks for its own state dict in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(LifecycleError, match="inside of forward"):
            self.state_dict()
        return self.inner(x)


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, fails: bool) -> torch.Tensor:
        y = self.inner(x)
        if fails:
            raise KeyError("in forward")
        return y


class _Recomputing(nn.Module):
    """Runs a part of itself in two re-entrant checkpoints, between which backward has all of its gradients once."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def _part(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.b(torch.tanh(self.a(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self._part, x, use_reentrant=True)
        return x


@on_ranks((2, "simulated"), (3, "simulated"))
def test_a_part_of_a_unit_in_several_reentrant_checkpoints(rank: int, world_size: int) -> None:
    def made() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), *[_Recomputing() for _ in range(3)], nn.Linear(4, 2))

    def loss_of(model: nn.Module, rank: int, forwards: int) -> torch.Tensor:
        xs = torch.randn(forwards, 2, 4, generator=torch.Generator().manual_seed(rank))
        return torch.stack([model(x).exp() for x in xs]).prod(0).sum()

    for forwards in (1, 2):  # two: preferences, contrasts, R-Drop
        for door in ("fully_shard", "FSDP"):
            plain, model = made(), through(door, made(), "1", "2", "3", reshard=ReshardPolicy(root=True))
            train_beside(
                rank, world_size, model, plain, lambda m, r, _, n=forwards: loss_of(m, r, n), steps=range(2)
            )


@on_ranks(2, (2, "simulated"))
def test_offloaded_shards_of_a_model_on_the_meta_device(rank: int, backend: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    for part in (model[0], model):
        fully_shard(part, offload_policy=CPUOffloadPolicy(), dtensors=backend == "gloo")
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    model.load_state_dict(plain.state_dict())
    for m in (plain, model):
        optimizer = torch.optim.AdamW(m.parameters(), lr=0.1)
        m(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(whole(model.state_dict()), dict(plain.state_dict()))


def tied_units(**options: Any) -> tuple[nn.Sequential, nn.Sequential]:
    """One process's, and one whose first two units share a weight."""
    torch.manual_seed(0)
    plain = nn.Sequential(
        *[nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4)) for _ in range(2)], nn.Linear(4, 3)
    )
    plain[1][0].weight = plain[0][0].weight  # type: ignore[index]
    model = copy.deepcopy(plain.double())
    for unit in (model[0], model[1], model):
        fully_shard(unit, **options)
    return plain, model


def inputs(rank: int) -> torch.Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def twins(rank: int, ranks: int, **options: Any) -> None:
    """Copies, of copies too, and files are models of their own that train as one process's."""
    plain, model = tied_units(**options)
    model(inputs(rank)).sum().backward()  # copies have no gradients
    copies = [copy.deepcopy(model), reread(model, weights_only=False), pickle.loads(pickle.dumps(model))]
    copies.append(copy.deepcopy(copies[0]))
    torch.testing.assert_close(copies[3][1](inputs(7)), plain[1](inputs(7)))  # what borrows runs first
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    for twin in copies:
        assert type(twin) is type(model)
        assert isinstance(twin, FSDPModule) == bool(options.get("dtensors"))
        assert all(p.grad is None for p in twin.parameters())
        truth = copy.deepcopy(plain)
        for m, steps in ((twin, [rank]), (truth, list(range(ranks)))):
            optimizer = torch.optim.AdamW(m.parameters(), lr=0.1)
            for r in steps:
                (m(inputs(r)).square().sum() / len(steps)).backward()
            optimizer.step()
        found = whole(twin.state_dict())
        torch.testing.assert_close(found, dict(truth.state_dict()))
        plain_twin = copy.deepcopy(plain)
        assert list(found) == list(plain_twin.state_dict())  # the tied weight under both names
        plain_twin.load_state_dict(found)


def test_copies_and_files_of_tied_units() -> None:
    rank_pool(2, "simulated").run(twins, 2)
    rank_pool(3).run(twins, 3)


@on_ranks((2, "simulated"), (6, "simulated"))
def test_gradients_that_moved_with_their_parameters(rank: int) -> None:
    """``module.to()`` gives each gradient other memory, and leaves it a view of what it was a view of."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(2, 3), nn.Linear(3, 1))
    model = fully_shard(copy.deepcopy(plain))
    tokens = torch.tensor([0, 1, 1])
    for m in (plain, model):
        for dtype in (torch.float32, torch.float64, torch.float32):
            m.to(dtype)
            m(tokens).square().sum().backward()
        m.to(torch.float64).float()
        m(tokens).square().sum().backward()
        torch.optim.SGD(m.parameters(), lr=0.01).step()
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))


@pytest.mark.parametrize("dtensors", [False, True])
@on_ranks(2)
def test_what_needs_whole_parameters_is_refused_by_name(rank: int, dtensors: bool) -> None:
    _, model = tied_units(dtensors=dtensors)
    loss = model(inputs(rank)).sum()
    with pytest.raises(LifecycleError, match="these are shards"):
        torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    loss.backward()
    for of in (partial(torch.optim.LBFGS, line_search_fn="strong_wolfe"), torch.optim.Adafactor):
        with pytest.raises(ConfigurationError, match=r"WholeParameters|updates every element by itself"):
            of(model.parameters()).step(lambda: loss)  # type: ignore[operator]


def _narrow_micro_batches(rank: int, ranks: int, dtensors: bool) -> None:
    """Gradients of 64 narrow backwards add up in the dtype in which they travel."""

    def batch(rank: int, micro: int) -> torch.Tensor:
        return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * rank + micro)).bfloat16()

    torch.manual_seed(0)
    plain = nn.Linear(8, 9, bias=False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model: Any = fully_shard(copy.deepcopy(plain), mp_policy=policy, dtensors=dtensors)
    wanted = torch.zeros(9, 8)
    for micro in range(64):
        for r in range(ranks):
            narrow = plain.weight.detach().bfloat16().requires_grad_()
            (batch(r, micro) @ narrow.T).float().square().sum().backward()
            assert narrow.grad is not None
            wanted += narrow.grad.float() / ranks
        model.set_requires_gradient_sync(micro == 63)
        model(batch(rank, micro)).float().square().sum().backward()
    for m, gradient in ((model, None), (plain, wanted)):
        optimizer = torch.optim.SGD(m.parameters(), lr=1.0)
        plain.weight.grad = gradient
        optimizer.step()
    found = whole(model.state_dict())["weight"]
    assert (found - plain.weight.detach()).abs().max() <= 1e-6 * wanted.abs().max()


@pytest.mark.parametrize("dtensors", [False, True])
def test_unsynchronised_gradients_add_up_in_the_dtype_in_which_they_travel(dtensors: bool) -> None:
    rank_pool(2, "gloo" if dtensors else "simulated").run(_narrow_micro_batches, 2, dtensors)
