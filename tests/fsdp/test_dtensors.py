"""``fully_shard(module, dtensors=True)``: what torch's own functions do with shards, beside FSDP2 and one process."""

from __future__ import annotations

import copy
import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.nn.utils import clip_grad

import shardkit
from shardkit import FSDP, fully_shard, sharding_of
from shardkit.errors import ConfigurationError, LifecycleError, OutOfStepError, RankMismatchError
from shardkit.fsdp.state import state_of
from tests.beside import assert_same, reread, train_parts, whole
from tests.fsdp.test_fully_shard import twins
from tests.pools import on_ranks, rank_pool


class Model(nn.Module):
    """Rows that two and three ranks divide unevenly, fewer rows than ranks, a tied weight, something frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6))
        self.again = nn.Linear(6, 6, bias=False)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.again.weight
        self.fixed = nn.Linear(6, 5).requires_grad_(False)
        self.head = nn.Linear(5, 1, bias=False)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tied(self.again(self.inner(x)))
        return self.head(self.fixed(x)) * self.scale


def _sharded(**options: Any) -> Model:
    model = Model().double()
    model.tied = nn.Linear(6, 6, bias=False).double()
    for part in (model.inner, model):
        fully_shard(part, dtensors=True, **options)
    model.tied.weight = model.again.weight  # for the first time here, as torchtitan and accelerate do
    return model


def _batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def _same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """But for norms of DTensors, which older torch forms in single precision."""
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def _alone(ranks: int, steps: range) -> tuple[Model, torch.optim.Optimizer, list[float]]:
    model = Model().double()
    optimizer = _adam(model)
    return model, optimizer, train_parts(model, optimizer, range(ranks), _batch, steps)


@on_ranks(2, 3)
@pytest.mark.parametrize("order", [2.0, math.inf])
def test_training_with_torchs_clipping(rank: int, world_size: int, order: float) -> None:
    """Of any order where ranks have no row of a parameter, the reduced gradient added to what no_sync kept."""
    found, models = [], (_sharded(), Model().double())
    for model, parts in zip(models, ([rank], range(world_size)), strict=True):
        # torch_xla puts another function in the place of torch.nn.utils.clip_grad_norm_
        clip = functools.partial(clip_grad.clip_grad_norm_, list(model.parameters()), norm_type=order)
        if world_size == 3:  # gradients are added to one by one
            model.head.weight.register_hook(lambda g: 2 * g)
        found.append(train_parts(model, _adam(model), parts, _batch, range(3), clip))
    model, one = models
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in one.named_parameters()]
    _same(whole(model.state_dict()), dict(one.state_dict()))
    with sharding_of(model).summon_full_params(writeback=True):
        _same({"": model.inner[0].weight.detach()}, {"": one.inner[0].weight.detach()})
        model.head.weight.data.zero_()
    assert not whole(model.state_dict())["head.weight"].any()
    loss = model(_batch(0, rank)).square().mean()
    assert loss.item() == 0.0


@on_ranks(3)
def test_checkpoints_go_to_fsdp2_and_back(rank: int, world_size: int, tmp_path: Path) -> None:
    model = _sharded()
    optimizer = _adam(model)
    train_parts(model, optimizer, [rank], _batch, range(2))
    saved, state = get_state_dict(model, optimizer)
    dcp.save({"model": saved, "optimizer": state}, checkpoint_id=f"{tmp_path}/ours")
    theirs = Model().double()
    for part in (theirs.inner, theirs):
        fsdp2(part, mesh=init_device_mesh("cpu", (world_size,)))
    other = _adam(theirs)
    into = dict(zip(("model", "optimizer"), get_state_dict(theirs, other), strict=True))
    dcp.load(into, checkpoint_id=f"{tmp_path}/ours")
    set_state_dict(theirs, other, model_state_dict=into["model"], optim_state_dict=into["optimizer"])
    train_parts(theirs, other, [rank], _batch, range(2, 3))
    into = dict(zip(("model", "optimizer"), get_state_dict(theirs, other), strict=True))
    dcp.save(into, checkpoint_id=f"{tmp_path}/theirs")
    back = _sharded()
    optimizer = _adam(back)
    into = dict(zip(("model", "optimizer"), get_state_dict(back, optimizer), strict=True))
    dcp.load(into, checkpoint_id=f"{tmp_path}/theirs")
    set_state_dict(back, optimizer, model_state_dict=into["model"], optim_state_dict=into["optimizer"])
    train_parts(back, optimizer, [rank], _batch, range(3, 4))
    one, alone, _ = _alone(world_size, range(4))
    _same(whole(back.state_dict()), dict(one.state_dict()))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full, moments = get_state_dict(back, optimizer, options=options)
    if rank == 0:
        _same(full, dict(one.state_dict()))
        names = [n for n, p in one.named_parameters() if p.requires_grad]
        assert names[0] in moments["state"]
        key = "exp_avg"
        _same({key: moments["state"]["inner.0.weight"][key]}, {key: alone.state[one.inner[0].weight][key]})


def _saved_while_training(rank: int, world_size: int, folder: str) -> None:
    model = _sharded()
    optimizer = _adam(model)
    train_parts(model, optimizer, [rank], _batch, range(2))
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    messages = dist.new_group(backend="gloo")  # which training's do not meet
    saving: Any = dcp.async_save(state, checkpoint_id=folder, process_group=messages)
    train_parts(model, optimizer, [rank], _batch, range(2, 5))
    saving.result()
    _same(whole(model.state_dict()), dict(_alone(world_size, range(5))[0].state_dict()))
    dist.destroy_process_group(messages)


def _gone_on_with(rank: int, world_size: int, folder: str, ranks: int) -> None:
    model = _sharded()
    optimizer = _adam(model)
    into = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(into, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=into["model"], optim_state_dict=into["optimizer"])
    one, alone, _ = _alone(ranks, range(2))
    _same(whole(model.state_dict()), dict(one.state_dict()))
    train_parts(model, optimizer, [rank], _batch, range(2, 4))
    train_parts(one, alone, range(world_size), _batch, range(2, 4))
    _same(whole(model.state_dict()), dict(one.state_dict()))


@pytest.mark.parametrize(("saves", "loads"), [(2, 3), (3, 2)])
def test_saved_while_training_goes_on(saves: int, loads: int, tmp_path: Path) -> None:
    """``dcp.async_save``: values and moments are those at the call, on another number of ranks too."""
    rank_pool(saves).run(_saved_while_training, saves, str(tmp_path))
    rank_pool(loads).run(_gone_on_with, loads, str(tmp_path), saves)


@on_ranks(2)
def test_torchs_scaler(rank: int) -> None:
    """An overflow on one rank: torch's scaler skips the step on all."""
    model = _sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = whole(copy.copy(model.state_dict()))
    before = {k: v.clone() for k, v in before.items()}
    for overflows in (True, False):
        optimizer.zero_grad()
        loss = model(_batch(0, rank)).square().mean()
        scaler.scale(loss * float("inf") if overflows and rank == 1 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        now = whole(model.state_dict())
        changed = any(not torch.equal(now[k], before[k]) for k in now)
        assert changed != overflows
    assert scaler.get_scale() == 2.0


@on_ranks(2)
def test_gradients_as_loops_treat_them(rank: int) -> None:
    """Gradients in every state that a loop brings them into."""
    model = _sharded()
    called: list[torch.Size] = []
    listed = dict(model.named_parameters())["head.weight"]
    assert model.head.weight is listed  # outside of forward; inside it is what is computed with
    handles = [listed.register_hook(lambda g: called.append(g.shape)),
               listed.register_post_accumulate_grad_hook(lambda p: called.append(p.grad.shape))]  # fmt: skip
    model(_batch(0, rank)).sum().backward()
    assert called == [torch.Size([1, 5])] * 2
    for handle in handles:
        handle.remove()
    first = whole({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    first = {k: v.clone() for k, v in first.items()}
    assert "fixed.weight" not in first
    model(_batch(0, rank)).sum().backward()  # accumulates
    twice = whole({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    torch.testing.assert_close(twice, {k: 2 * v for k, v in first.items()})
    model.zero_grad(set_to_none=False)
    model(_batch(0, rank)).sum().backward()
    again = whole({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    torch.testing.assert_close(again, first)
    for p in model.parameters():
        p.grad = None if p.grad is None else p.grad * 3  # another tensor
    model(_batch(0, rank)).sum().backward()
    fourth = whole({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    torch.testing.assert_close(fourth, {k: 4 * v for k, v in first.items()})
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    listed.requires_grad_(False)
    model(_batch(0, rank)).sum().backward()
    assert listed.grad is None
    listed.requires_grad_(True)
    model.zero_grad()
    model(_batch(0, rank)).sum().backward()
    torch.testing.assert_close(listed.grad.full_tensor(), first["head.weight"])  # type: ignore[union-attr]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.zero_grad()
    with sharding_of(model).no_sync():
        model(_batch(0, rank)).sum().backward()
    with pytest.raises(LifecycleError, match="after a backward inside of no_sync"):
        optimizer.step()


@on_ranks(2)
def test_being_moved_loaded_and_copied(rank: int) -> None:
    model = _sharded()
    before = {k: v.clone() for k, v in whole(model.state_dict()).items()}
    model(_batch(0, rank)).sum().backward()
    model.float()
    torch.testing.assert_close(whole(model.state_dict()), {k: v.float() for k, v in before.items()})
    model(_batch(0, rank).float()).sum().backward()
    assert all(p.grad.dtype is torch.float32 for p in model.parameters() if p.grad is not None)
    weight = model.head.weight
    for _ in range(2):
        weight.data = weight.data * 2  # torch replaces what the DTensor has, not what it holds
        with pytest.raises(LifecycleError, match=r"setting data of .*head\.weight"):
            model(_batch(0, rank).float())
    torch.testing.assert_close(whole(model.state_dict())["head.weight"], before["head.weight"].float())
    with torch.no_grad():
        weight.copy_(weight * 2)
    model(_batch(0, rank).float())
    torch.testing.assert_close(whole(model.state_dict())["head.weight"], 2 * before["head.weight"].float())
    with torch.device("meta"):
        empty = Model().double()
    fully_shard(empty.inner, dtensors=True)
    fully_shard(empty, dtensors=True)
    empty.to_empty(device="cpu")
    empty.load_state_dict(_sharded().state_dict())
    torch.testing.assert_close(empty(_batch(0, rank)), Model().double()(_batch(0, rank)))
    norm = sharding_of(empty).clip_grad_norm_(1.0)
    assert norm == 0.0
    plain = Model().double()
    with torch.no_grad():
        plain.head.weight.fill_(2)
    empty.load_state_dict(plain.state_dict())  # plain tensors
    torch.testing.assert_close(whole(empty.state_dict()), dict(plain.state_dict()))
    with torch.inference_mode(), pytest.raises(LifecycleError, match=r"under torch\.no_grad"):
        empty.state_dict()
    empty.load_state_dict(reread(empty.state_dict(), weights_only=False))
    torch.testing.assert_close(whole(empty.state_dict()), dict(plain.state_dict()))
    twins(rank, 2, dtensors=True)
    with pytest.raises(ConfigurationError, match="get_optimizer_state_dict"):
        sharding_of(empty).gather_full_optim_state_dict(_adam(empty))


@on_ranks(1, 2, 3)
def test_memory_that_is_shared_between_processes(rank: int, world_size: int) -> None:
    """Torch ends the process at DTensors: refused, through a module around it too; rows have memory of their own."""
    model, rows = _sharded(), nn.Sequential(fully_shard(Model()))
    for module in (model, nn.Sequential(model), *model.modules()):
        with pytest.raises(ConfigurationError, match=r"param\.to_local\(\)\.share_memory_\(\)"):
            module.share_memory()
    rows.share_memory()
    for module in (model, rows):
        module(_batch(0, rank).to(next(module.parameters()).dtype)).sum().backward()


@on_ranks(4)
def test_a_mesh_of_replicas_and_shards(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    model = _sharded(mesh=mesh)
    optimizer = _adam(model)
    train_parts(model, optimizer, [rank], _batch, range(2))
    one, _, _ = _alone(4, range(2))
    _values_of_one_rank(rank, mesh)
    assert next(iter(model.parameters())).placements[1].is_shard()
    torch.testing.assert_close(whole(model.state_dict()), dict(one.state_dict()))


class Scaled(nn.Module):
    """CLIP's ``logit_scale``: a parameter without dimensions."""

    def __init__(self, alone: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Identity() if alone else nn.Linear(6, 5)
        self.logit_scale = nn.Parameter(torch.tensor(1.5))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x) * self.logit_scale.exp()


@pytest.mark.parametrize("alone", [False, True])
@on_ranks(1, 2, 3)
def test_parameters_without_dimensions(rank: int, world_size: int, alone: bool, tmp_path: Path) -> None:
    one, model = Scaled(alone), fully_shard(Scaled(alone), dtensors=True)
    optimizers = [_adam(one), _adam(model)]

    def train(model: Scaled, optimizer: torch.optim.Optimizer, clip: Any) -> None:
        for step in range(3):
            optimizer.zero_grad()
            train_parts(
                model, torch.optim.SGD(model.parameters(), lr=0.0), [rank], _batch, range(step, step + 1)
            )
            for p in one.parameters():
                p.grad = None
            for r in range(world_size):
                for micro in range(2):
                    (one(_batch(2 * step + micro, r)).square().mean() / world_size).backward()
            nn.utils.clip_grad_norm_(one.parameters(), 0.05)
            assert clip(0.04) == pytest.approx(
                nn.utils.clip_grad_norm_(one.parameters(), 0.04).item(), rel=1e-5
            )
            optimizer.step()
            optimizers[0].step()
        _same(whole(dict(model.named_parameters())), dict(one.named_parameters()))
        _same(whole(model.state_dict()), dict(one.state_dict()))

    train(model, optimizers[1], sharding_of(model).clip_grad_norm_)
    saved, state = get_state_dict(model, optimizers[1])
    dcp.save({"model": saved, "optimizer": state}, checkpoint_id=f"{tmp_path}/dcp")
    shardkit.save_training(f"{tmp_path}/ours", step=3, model=model, optimizer=optimizers[1])
    for k, make in enumerate((_adam, lambda m: shardkit.WholeParameters(m, torch.optim.AdamW, lr=0.1))):
        again = fully_shard(Scaled(alone), dtensors=True)
        optimizer = make(again)
        if k:
            shardkit.restore_training(f"{tmp_path}/ours", model=again, optimizer=optimizer)
        else:
            saved, state = get_state_dict(again, optimizer)
            into = {"model": saved, "optimizer": state}
            dcp.load(into, checkpoint_id=f"{tmp_path}/dcp")
            set_state_dict(again, optimizer, model_state_dict=saved, optim_state_dict=state)
        before = copy.deepcopy((one.state_dict(), optimizers[0].state_dict()))
        train(again, optimizer, sharding_of(again).clip_grad_norm_)
        one.load_state_dict(before[0])
        optimizers[0].load_state_dict(before[1])


@on_ranks(1, 2)
def test_loading_by_assignment(rank: int) -> None:
    model, one = fully_shard(Scaled(False), dtensors=True), Scaled(False)
    listed = list(model.parameters())
    with torch.no_grad():
        for p in one.parameters():
            p.add_(1)
    for own in (False, True):
        state = {k: v + 0 for k, v in (model if own else one).state_dict().items()}
        model.load_state_dict(state, assign=True)
        assert all(a is b for a, b in zip(model.parameters(), listed, strict=True))  # an optimizer has them
        torch.testing.assert_close(model(_batch(0, rank)), one(_batch(0, rank)))
    with torch.device("meta"):
        empty = fully_shard(Scaled(False), dtensors=True)
        half = copy.deepcopy(empty)
    with pytest.raises(ConfigurationError, match="gave values to some of its parameters alone"):
        half.load_state_dict(dict(list(one.state_dict().items())[:1]), assign=True, strict=False)
    cut = model.state_dict()
    wrong = {k: v.redistribute(placements=[Replicate()]) for k, v in cut.items()}
    with pytest.raises(RuntimeError, match=r"not cut as it is|cut as state_dict"):
        copy.deepcopy(empty).load_state_dict(wrong, assign=True)
    for given in (one.state_dict(), cut):
        filled = copy.deepcopy(empty)
        filled.load_state_dict(given, assign=True)
        optimizer = torch.optim.SGD(filled.parameters(), lr=0.1)
        torch.testing.assert_close(filled(_batch(0, rank)), one(_batch(0, rank)))
        filled(_batch(0, rank)).sum().backward()
        optimizer.step()
        assert not torch.equal(filled(_batch(0, rank)), one(_batch(0, rank)))
    _replaced(rank)
    _computed_of_others(rank)
    _filled_by_parts(rank)
    if dist.get_world_size() == 2:
        _values_of_one_rank(rank, init_device_mesh("cpu", (2,)))
    _swapped(rank)


class Ends(nn.Module):
    """An embedding and a head that may be tied."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mid = nn.Embedding(7, 6), nn.Linear(6, 6)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 7, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.mid(self.embed(x.argmax(1))).tanh()))

    def tie(self, keeps_head: bool = True) -> None:
        kept, other = (self.head, self.embed) if keeps_head else (self.embed, self.head)
        other.weight = kept.weight

    def shard(self, units: str, **options: Any) -> Ends:
        chosen: dict[str, Any] = {"embed": self.embed, "head": self.head, "mid": self.mid}
        chosen.update(tail=[self.norm, self.head], all=[self.embed, self.norm, self.head])
        for name in units.split():
            fully_shard(chosen[name], dtensors=True, **options)
        return fully_shard(self, dtensors=True, **options)


def _bytes_of(model: nn.Module) -> int:
    return sum(flat.param.untyped_storage().nbytes() for flat in state_of(model).all_flats())  # type: ignore[union-attr]


# units beside the root; which weight is kept; how values come; whether the optimizer is older than the tie
_TIES = [
    ("", True, "to_empty", False),
    ("mid", False, "load", True),
    ("head", True, "here", False),
    ("head", False, "load", False),
    ("embed tail", True, "load", True),
    ("embed tail", False, "to_empty", False),
    ("all mid", True, "load", True),
]


@on_ranks(1, 2, 3)
def test_weights_that_are_tied_between_sharding_and_the_first_forward(rank: int, world_size: int) -> None:
    """As torchtitan's ``init_weights`` and transformers' ``tie_weights()`` do: as if they had been before."""
    for units, keeps_head, how, is_older in _TIES:
        one, before, where = Ends().double(), Ends().double(), f"{units}, {keeps_head}, {how}"
        with torch.device("cpu" if how == "here" else "meta"):
            model = Ends().double().shard(units)
        if how == "to_empty":
            model.to_empty(device="cpu")
        model.load_state_dict(one.state_dict(), assign=how == "load")
        held = _bytes_of(model)
        optimizers = [_adam(m) for m in (model, one)] if is_older else []
        for m in (model, one, before, model):
            m.tie(keeps_head)
        before.shard(units)
        assert _bytes_of(model) == _bytes_of(before) < held, where
        if units == "mid":
            assert sharding_of(model).local_metadata_dict() == sharding_of(before).local_metadata_dict()
        assert_same(model, one, where)
        before.load_state_dict(one.state_dict(), assign=True)
        before.tie(keeps_head)  # once more, and of a unit whose other modules are called first
        optimizers = [*(optimizers or map(_adam, (model, one))), _adam(before)]
        before.head.unshard() if "all" in units else before.unshard()  # type: ignore[operator]
        for m, optimizer in zip((model, one, before), optimizers, strict=True):
            train_parts(m, optimizer, range(world_size) if m is one else [rank], _batch, range(2))
        for m in (model, before):
            assert_same(m, one, where)
            assert [n for n, _ in m.named_parameters()] == [n for n, _ in one.named_parameters()], where
        with pytest.raises(ConfigurationError, match=r"tied weights\) before it is wrapped"):
            model.norm.bias = model.mid.bias
    _not_tied(rank, world_size)


class Two(Ends):
    """A second head."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(6, 7, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.mid(self.embed(x.argmax(1))).tanh())
        return self.head(hidden) + self.other(hidden)


# units beside the root; which weights give way, and to which, in order; what is unsharded between steps
_AGAIN = [
    ("", "embed head, embed other, head other", ""),
    ("head", "head embed, head other, other embed, head embed", "head"),
    ("mid", "head embed, embed other, head embed", ""),
    ("embed head", "head embed", "head"),  # what borrows it, and its owner is called first
    ("all", "embed head, other head, embed other", "embed"),
]


@on_ranks(2, 3)
def test_weights_that_are_tied_again_and_optimizers_from_before(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    """Each place has the weight that was put there last; an older optimizer is saved and loaded without the rest."""
    for units, ties, unsharded in _AGAIN:
        one, model, where = Two().double(), Two().double().shard(units), f"{units}: {ties}"
        resumed = Two().double().shard("mid")
        optimizers = [_adam(m) for m in (model, one, resumed)]
        for m in (model, one, resumed):
            for tie in ties.split(", "):
                gives_way, kept = map(m.get_submodule, tie.split())
                gives_way.weight = kept.weight
        if unsharded:
            model.get_submodule(unsharded).unshard()  # type: ignore[operator]
        for m, optimizer in zip((model, one), optimizers, strict=False):
            train_parts(m, optimizer, range(world_size) if m is one else [rank], _batch, range(2))
        assert_same(model, one, where)
        shardkit.save_training(tmp_path, step=1, model=model, optimizer=optimizers[0])
        shardkit.restore_training(tmp_path, model=resumed, optimizer=optimizers[2])
        for m, optimizer in zip((model, one, resumed), optimizers, strict=True):
            train_parts(m, optimizer, range(world_size) if m is one else [rank], _batch, range(2, 4))
        for m in (model, resumed):
            assert_same(m, one, where)
            assert [n for n, _ in m.named_parameters()] == [n for n, _ in one.named_parameters()], where


@pytest.mark.parametrize("is_late", [False, True])
@on_ranks(2, 3)
def test_two_roots_that_share_a_weight(rank: int, world_size: int, is_late: bool) -> None:
    """In one backward, in one each in either order, and where the weight's own root is in none."""
    ones, roots = [Ends().double() for _ in range(2)], [Ends().double() for _ in range(2)]
    for pair in (ones, roots):
        for m in pair if pair is roots and is_late else ():
            m.shard("mid")
        pair[1].head.weight = pair[0].head.weight
        for m in pair if pair is roots and not is_late else ():
            m.shard("mid")
    optimizers = [_adam(nn.ModuleList(pair)) for pair in (ones, roots)]
    for step, order in enumerate(["both", "01", "10", "1"]):
        for pair, optimizer, ranks in zip(
            (ones, roots), optimizers, (range(world_size), [rank]), strict=True
        ):
            optimizer.zero_grad()
            for r in ranks:
                losses = [m(_batch(step, r)).square().mean() / len(ranks) for m in pair]
                for k in order if order != "both" else ():
                    losses[int(k)].backward()
                if order == "both":
                    sum(losses).backward()
            optimizer.step()
        for m, one in zip(roots, ones, strict=True):
            assert_same(m, one, order)


def _not_tied(rank: int, world_size: int) -> None:
    """What would not be one process's is refused by name."""
    optimized, gathered = Ends().shard("tail"), Ends().shard("tail")
    shardkit.WholeParameters(optimized, torch.optim.AdamW, lr=0.1)
    with pytest.raises(ConfigurationError, match="make the optimizer afterwards"):
        optimized.tie()
    gathered.unshard()
    with pytest.raises(ConfigurationError, match=r"tied weights\) before it is wrapped"):
        gathered.tie()
    away = Two().shard("embed head")
    for gives_way, kept in ((away.head, away.embed), (away.embed, away.other)):
        gives_way.weight = kept.weight
    with pytest.raises(ConfigurationError, match="in other units alone"):
        sharding_of(away).local_metadata_dict()
    if world_size > 1:  # a group of its own, which the error ends
        mesh = DeviceMesh.from_group(dist.new_group(list(range(world_size))), "cpu")
        model = Ends().shard("all", mesh=mesh)
        model.tie(keeps_head=rank > 0)
        with pytest.raises(OutOfStepError, match="without"):
            model(_batch(0, rank).float())
    policy = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    late, early = Ends().shard("embed tail", **policy), Ends()
    for m in (late, early):
        m.tie()
    early.shard("embed tail", **policy)
    for m in (late, early):
        train_parts(m, torch.optim.SGD(m.parameters(), lr=0.1), [rank], _batch, range(2))
    assert_same(late, early)


def _replaced(rank: int) -> None:
    """As code for start values does it before the first forward."""
    one, model = Scaled(False), fully_shard(Scaled(False), dtensors=True)
    for m in (one, model):
        m.head.weight = nn.Parameter(m.head.weight.detach() * 2)
        with torch.no_grad():
            m.head.weight.add_(1)
    for m in (one, model):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        m(_batch(0, 0)).square().mean().backward()
        optimizer.step()
    _same(whole(dict(model.named_parameters())), dict(one.named_parameters()))
    with pytest.raises(ConfigurationError, match="'weight' is put into"):
        model.head.weight = nn.Parameter(model.head.weight * 2)
    for m in (one, model):  # a module inside gets other memory
        m.head.to_empty(device="cpu")
        for p in m.head.parameters():
            nn.init.constant_(p, 0.25)
    torch.testing.assert_close(model(_batch(0, rank)), one(_batch(0, rank)))
    model.head.to_empty(device="cpu")
    one.head.weight = nn.Parameter(torch.full_like(one.head.weight, 0.5))
    nn.init.constant_(model.head.weight, 0.5)
    nn.init.constant_(model.head.bias, 0.25)
    _same(dict(sharding_of(model).export()), one.state_dict())


class Magnitudes(nn.Module):
    """Parameters that start as what is computed of others, as DoRA's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 7, bias=False), nn.Linear(7, 7, bias=False)
        self.magnitude, self.offset = nn.Parameter(torch.empty(7)), nn.Parameter(torch.empty(7))
        self.double()

    def begin(self) -> None:
        for k, m in enumerate((self.first, self.second)):
            m.to_empty(device="cpu")
            nn.init.constant_(m.weight, k / 8 + 0.25)
        with torch.no_grad():
            made = torch.linalg.norm(self.second.weight, dim=1)
        self.magnitude, self.offset = nn.Parameter(made), nn.Parameter(made * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) * self.magnitude + self.offset


def _computed_of_others(rank: int) -> None:
    """They leave the meta device by being replaced, after the others."""
    one = Magnitudes()
    with torch.device("meta"):
        model = Magnitudes()
    for part in (model.first, model.second, model):
        fully_shard(part, dtensors=True)
    for m in (one, model):
        m.begin()
        optimizer = torch.optim.Adam(m.parameters(), lr=0.1)
        for step in range(2):
            m(_batch(step, 0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    _same(whole(dict(model.named_parameters())), dict(one.named_parameters()))
    with torch.device("meta"):
        model = fully_shard(Magnitudes(), dtensors=True)
    with pytest.raises(ConfigurationError, match="'magnitude' is put into"):
        model.magnitude = nn.Parameter(torch.ones(7).double())  # which part of it is this rank's?


def _values_of_one_rank(rank: int, mesh: DeviceMesh) -> None:
    """As verl loads models: on the meta device, except for the first of the ranks that share a copy."""

    def on_meta(lacks: bool) -> Model:
        with torch.device("meta" if lacks else "cpu"):
            return Model()

    one = Model()
    for lacks in (rank > 0, rank % 2 > 0):
        model = on_meta(lacks)
        for part in (model.inner, model):
            fully_shard(part, mesh=mesh)
        torch.testing.assert_close(whole(model.state_dict()), dict(one.state_dict()))
        for m, ranks in ((model, [rank]), (one, range(mesh.size()))):
            sum(m(_batch(0, r).float()).square().mean() for r in ranks).backward()  # type: ignore[union-attr]
        grad: Any = model.head.weight.grad
        torch.testing.assert_close(grad.full_tensor() * mesh.size(), one.head.weight.grad)
        one.zero_grad()
    rows = fully_shard(on_meta(rank > 0))
    torch.testing.assert_close(rows.state_dict(), one.state_dict())
    with pytest.raises(ConfigurationError, match=r"meta device on the ranks \[0"):
        fully_shard(on_meta(rank == 0), mesh=mesh)


def _filled_by_parts(rank: int) -> None:
    """Modules inside leave the meta device one by one, as trainers' ``init_weights`` makes them."""

    def empty(*moved: str) -> Scaled:
        with torch.device("meta"):
            made = fully_shard(Scaled(False), dtensors=True)
        for name in moved:
            made.get_submodule(name).to_empty(device="cpu", recurse=False)
        return made

    one = Scaled(False)
    names = [n for n, _ in one.named_modules()]
    model = empty(*names)
    for m in (model, one):
        for k, p in enumerate(m.parameters()):
            nn.init.constant_(p, k / 8)
        optimizer = torch.optim.Adam(m.parameters(), lr=0.1)
        m(_batch(0, 0)).square().mean().backward()
        optimizer.step()
    _same(whole(dict(model.named_parameters())), dict(one.named_parameters()))
    with pytest.raises(LifecycleError, match="left the meta device one by one"):
        empty("head")(_batch(0, rank))
    with torch.device("meta"):
        late = fully_shard(nn.Sequential(nn.Linear(6, 5).double()), dtensors=True)
    with pytest.raises(ConfigurationError, match=r"still on meta device: \['0.weight', '0.bias'\]"):
        late(_batch(0, rank).to("meta"))
    late[0].to_empty(device="cpu")
    with pytest.raises(LifecycleError, match="or after a forward"):
        late(_batch(0, rank))


def _swapped(rank: int) -> None:
    """torch puts what it moves, casts and loads into the parameters that there are."""
    one, model = Scaled(False), fully_shard(Scaled(False), dtensors=True)
    listed, values = list(model.parameters()), {k: v + 1 for k, v in one.state_dict().items()}
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for m in (one, model):
            optimizer = torch.optim.Adam(m.parameters(), lr=0.1)
            for step in range(3):
                m(_batch(step, 0)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 0:
                    m.float().double()
                if step == 1:
                    m.load_state_dict(values)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert all(a is b for a, b in zip(model.parameters(), listed, strict=True))
    _same(whole(dict(model.named_parameters())), dict(one.named_parameters()))


@on_ranks(2)
def test_dtensors_of_other_libraries_in_the_same_optimizer(rank: int) -> None:
    """Of another library's DTensors the gradients may be sums that are not made yet."""
    mesh = init_device_mesh("cpu", (2,))
    model = fully_shard(Scaled(False), dtensors=True, mesh=mesh)
    theirs = nn.Parameter(distribute_tensor(torch.ones(2, dtype=torch.float64), mesh, [Replicate()]))
    optimizer = torch.optim.SGD([*model.parameters(), theirs], lr=1.0)
    model(_batch(0, rank)).square().mean().backward()
    theirs.grad = DTensor.from_local(torch.full((2,), 0.25, dtype=torch.float64), mesh, [Partial()])
    wanted = {
        n: p.full_tensor() - p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None
    }
    optimizer.step()
    assert theirs.full_tensor().tolist() == [0.5, 0.5]
    torch.testing.assert_close(whole(dict(model.named_parameters())), wanted)


class DTensorHolder(nn.Module):
    """Has a parameter that another library has cut."""

    def __init__(self) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.weight = nn.Parameter(torch.distributed.tensor.distribute_tensor(torch.ones(4, 4), mesh))


@on_ranks(2)
def test_what_can_not_be_listed(rank: int) -> None:
    with pytest.raises(RankMismatchError, match="layout"):
        fully_shard(nn.Linear(2, 2), dtensors=rank == 0)
    shards, replicas = shardkit.hybrid_groups(1)
    with pytest.raises(ConfigurationError, match="needs mesh=, with two dimensions"):
        fully_shard(nn.Linear(2, 2), dtensors=True, group=shards, replicas=replicas)
    inner = fully_shard(nn.Linear(2, 2), dtensors=True)
    with pytest.raises(ConfigurationError, match="named dimensions of one mesh"):
        fully_shard(nn.Sequential(DTensorHolder()), dtensors=True)
    with pytest.raises(ConfigurationError, match=r"its part .0. is a torch\.distributed\.fsdp\.FSDPModule"):
        FSDP(nn.Sequential(inner, nn.Linear(2, 1)))


@on_ranks((2, "simulated"))
def test_ranks_that_torch_does_not_know(rank: int) -> None:
    with pytest.raises(ConfigurationError, match=r"torch\.distributed knows"):
        fully_shard(nn.Linear(2, 2), dtensors=True)
