"""torch_xla's ZeRO stage 1 and shardkit's, with the same options in the same replicas; and shardkit's on gloo."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from shardkit import OSS, ShardedDDP
from shardkit.errors import ConfigurationError, LifecycleError
from shardkit.xla import xla_model as xm
from shardkit.xla.fsdp import XlaFullyShardedDataParallel as FSDP
from shardkit.xla.zero_redundancy_optimizer import ZeroRedundancyOptimizer, rows_of
from shardkit.xla.zero_redundancy_optimizer import ZeroRedundancyOptimizer as Ours
from tests.backends.environments import environments
from tests.doors import linears
from tests.pools import on_ranks, rank_pool

EACH = [p for p in environments("gloo", "xla") if p.values[1] == 2]
SGD = {"optimizer_class": torch.optim.SGD, "lr": 0.1, "momentum": 0.9}
ADAM = {"optimizer_class": torch.optim.AdamW, "lr": 0.01, "weight_decay": 0.1}


def _model(dtype: torch.dtype) -> nn.Module:
    model = linears(5, 7, 3).to(dtype)
    model[0].bias.requires_grad_(False)
    return model.to(xm.xla_device())


def _backward(model: nn.Module, rank: int, step: int) -> None:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))
    model(x.to(model[0].weight)).float().square().mean().backward()


CASES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "plain": (torch.float32, {**SGD, "grad_clipping": False}),
    "buckets": (
        torch.float32,
        {**ADAM, "bucket_cap_mb_all_gather": 1, "bucket_cap_mb_reduce_scatter": 1, "grad_clipping": False},
    ),
    "clipped": (torch.float32, {**SGD, "max_norm": 0.1, "save_master_weights": True}),
    "half": (torch.bfloat16, {**ADAM, "grad_clipping": False}),
    "half, wide sums": (
        torch.bfloat16,
        {
            **SGD,
            "use_grad_acc_hook": True,
            "higher_cc_precision": True,
            "save_master_weights": True,
            "lazy_init": True,
        },
    ),
    "half throughout": (torch.bfloat16, {**SGD, "optimizer_dtype": torch.bfloat16, "grad_clipping": False}),
}


# Sums in another order; the compiler's functions of other shapes; bf16 that it keeps in fp32 on the way. Else none.
TOLERANCES = {"clipped": 1e-6, "buckets": 1e-6, "half, wide sums": 1e-6, "half": 1e-2}


def _train(cls: Any, rank: int, name: str) -> Iterator[Any]:
    """Two micro-batches, a step; state into a fresh optimizer, as a resumed run has it; on from there."""
    dtype, options = CASES[name]
    model = _model(dtype)
    if options.get("use_grad_acc_hook"):
        model.requires_grad_()  # torch_xla fails with frozen ones there
    make = functools.partial(cls, [*model.parameters()], pin_layout=False, **options)
    optimizer = make()
    if options.get("lazy_init"):
        optimizer.sharding_groups = [[*range(optimizer.global_world_size)]]
        optimizer.init_zero()
    for step in range(4):
        optimizer.zero_grad()
        _backward(model, rank, 2 * step)
        _backward(model, rank, 2 * step + 1)
        local = [None if p.grad is None else p.grad.cpu() for p in model.parameters()]
        optimizer.step()
        xm.mark_step()
        after = [None if p.grad is None else p.grad.cpu() for p in model.parameters()]
        if cls is Ours:  # as torch_xla's: local gradients stay
            assert all(a is b is None or torch.equal(a, b) for a, b in zip(local, after, strict=True))
        yield {k: v.cpu() for k, v in model.state_dict().items()}
        yield _masters(optimizer)
        if options.get("grad_clipping", True):
            yield optimizer.grad_norm.cpu()
        if step == 1:
            state = optimizer.state_dict()
            yield _on_cpu(state)
            optimizer.remove_hooks()
            optimizer = make()
            optimizer.load_state_dict(copy.deepcopy(state))
    yield optimizer.get_shape_info()
    yield [
        optimizer.global_world_size,
        optimizer.local_world_size,
        optimizer.local_rank,
        optimizer.sharding_groups,
    ]


def _masters(optimizer: Any) -> list[torch.Tensor]:
    """What the inner optimizer updates: this rank's rows of every parameter."""
    return [p.detach().cpu() for g in optimizer.base_optimizer.param_groups for p in g["params"]]


def _on_cpu(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _on_cpu(v) for k, v in value.items() if k != "sharding"}
    if isinstance(value, list):
        return [_on_cpu(v) for v in value]
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _both(rank: int) -> list[tuple[str, list[Any], list[Any]]]:
    from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer as Theirs

    return [(name, list(_train(Theirs, rank, name)), list(_train(Ours, rank, name))) for name in CASES]


def _compare(name: str, a: Any, b: Any, path: str = "") -> None:
    if isinstance(a, dict):
        assert set(a) - set(b) <= {1}, (name, path, a.keys(), b.keys())  # torch_xla has state of frozen ones
        for key in b:
            _compare(name, a[key], b[key], f"{path}.{key}")
    elif isinstance(a, torch.Tensor):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), (name, path)
        tolerance = TOLERANCES.get(name, 0.0)
        torch.testing.assert_close(
            b, a, rtol=tolerance, atol=tolerance / 10, msg=lambda m: f"{name} {path}: {m}"
        )
    elif isinstance(a, list):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            _compare(name, x, y, f"{path}[{i}]")
    elif not path.endswith("]"):
        assert a == b, (name, path)


@pytest.mark.xla
def test_the_same_numbers_and_state_as_torch_xla() -> None:
    pytest.importorskip("torch_xla")
    for world_size in (1, 2):
        for results in rank_pool(world_size, "xla").run(_both):
            for name, theirs, ours in results:
                _compare(name, theirs, ours)


def _crossed(rank: int) -> None:
    """Each library goes on from the other's state, and from that of a run whose gradients were not cleared."""
    from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer as Theirs

    states, models = [], []
    for cls in (Theirs, Ours, Theirs, Ours):
        model = _model(torch.float32)
        optimizer = cls(model.parameters(), pin_layout=False, grad_clipping=False, **SGD)
        _backward(model, rank, 0)
        optimizer.step()
        xm.mark_step()
        if len(states) >= 2:
            optimizer.load_state_dict(states[3 - len(states)])
        optimizer.step()  # again with the same gradients
        xm.mark_step()
        states.append(optimizer.state_dict())
        models.append([p.detach().cpu() for p in model.parameters()])
    for first, second in ((0, 1), (2, 3)):
        for a, b in zip(models[first], models[second], strict=True):
            assert torch.equal(a, b)


@pytest.mark.xla
def test_each_goes_on_from_the_others_state() -> None:
    pytest.importorskip("torch_xla")
    rank_pool(2, "xla").run(_crossed)


@on_ranks(*EACH)
def test_beside_a_plain_optimizer(rank: int) -> None:
    """A plain optimizer and this one step by turns on one model, with the gradients of one backward."""
    model, x = _model(torch.float32), torch.ones(4, 5)
    model(x.to(model[0].weight)).sum().backward()
    plain = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    zero = Ours(model.parameters(), torch.optim.SGD, lr=0.01, momentum=0.9, grad_clipping=False)

    def compare() -> None:
        state, rows = plain.state_dict()["state"], zero.state_dict()["base_state"]
        assert {i for i, s in state.items() if s} == {i for i, s in rows.items() if s}
        for i, mine in rows.items():
            whole = state[i]["momentum_buffer"].cpu()
            size = -(-len(whole) // zero.world_size)
            own = whole[rank * size : (rank + 1) * size]
            assert torch.equal(mine["momentum_buffer"][: len(own)], own)

    for _ in range(2):
        plain.step()
        zero.step()
        compare()
        states = copy.deepcopy(plain.state_dict()), zero.state_dict()
        plain.load_state_dict(states[0])
        zero.load_state_dict(states[1])
        compare()
    assert zero.base_optimizer.state_dict()["state"].keys() == states[1]["base_state"].keys()
    with torch.no_grad():
        for p in zero.base_optimizer.param_groups[0]["params"]:
            p.fill_(rank + 1.0)  # as torch_xla's, what parameters are after the next step
    zero.param_groups[0]["lr"] = 0.0
    zero.step()
    for p in (q.detach().cpu() for q in model.parameters() if q.requires_grad):
        wanted = [torch.full_like(rows_of(p, r, zero.world_size), r + 1.0) for r in range(zero.world_size)]
        assert torch.equal(p, torch.cat(wanted)[: len(p)])
    with pytest.raises(ConfigurationError, match="FSDP has averaged the gradients"):
        xm.optimizer_step(torch.optim.SGD(FSDP(nn.Linear(2, 2)).parameters(), lr=0.1))


@on_ranks(*EACH)
def test_updates_in_another_dtype(rank: int, world_size: int) -> None:
    """fp32 copies of bf16 parameters are what a plain optimizer over fp32 copies has."""
    for name in ("half", "half, wide sums"):
        dtype, options = CASES[name]
        model, wide = _model(dtype), _model(dtype).float()
        options = {**options, "grad_clipping": True, "max_norm": 0.5}
        optimizer = Ours(model.parameters(), **options)
        optimizer.init_zero()
        cls = options.pop("optimizer_class")
        plain = cls(
            [p for p in wide.parameters() if p.requires_grad],
            **{k: options[k] for k in options if k in SGD or k in ADAM},
        )
        for step in range(2):
            optimizer.zero_grad()
            _backward(model, rank, step)
            plain.zero_grad()
            parts = []
            for r in range(world_size):
                copied = _model(dtype)
                copied.load_state_dict(model.state_dict())
                _backward(copied, r, step)
                parts.append([p.grad.float() for p in copied.parameters() if p.requires_grad])
            trained = [p for p in wide.parameters() if p.requires_grad]
            for p, *gradients in zip(trained, *parts, strict=True):
                p.grad = torch.stack(gradients).mean(0)
            nn.utils.clip_grad.clip_grad_norm_(trained, 0.5)
            optimizer.step()
            plain.step()
            xm.mark_step()
            if step == 0:
                state = optimizer.state_dict()
                optimizer = Ours(model.parameters(), optimizer_class=cls, **options)
                optimizer.load_state_dict(state)
        masters = _masters(optimizer)
        for p, w, master in zip(model.parameters(), wide.parameters(), masters, strict=True):
            if p.requires_grad and "wide" in name:
                mine = rows_of(w.detach().cpu(), rank, world_size)
                torch.testing.assert_close(master, mine, rtol=1e-5, atol=1e-6)
            assert torch.equal(rows_of(p.detach().cpu(), rank, world_size), master.to(dtype))


@on_ranks(*EACH)
def test_mistakes(rank: int) -> None:
    model = _model(torch.float32)
    lazy = Ours(model.parameters(), lazy_init=True, **SGD)
    for early in (lazy.step, lazy.state_dict):
        with pytest.raises(LifecycleError, match="init_zero"):
            early()
    lazy.zero_grad()
    lazy.init_zero()
    with pytest.raises(LifecycleError, match="sharded already"):
        lazy.sharding_groups = [[0, 1]]
    with pytest.raises(ConfigurationError, match="sharding_scheme"):
        lazy.step(sharding_scheme=[])
    _backward(model, rank, 0)
    lazy.step()
    state = lazy.state_dict()
    wrong = copy.deepcopy(state)
    wrong["sharding"]["rank"] = 0
    with pytest.raises(ConfigurationError, match="rank 1: the state is rank 0's of 2"):
        lazy.load_state_dict(wrong)
    del wrong["sharding"]
    wrong["base_state"][0]["momentum_buffer"] = torch.zeros(2, 5)
    with pytest.raises(ConfigurationError, match="other rows than the 4 of each of 2 ranks"):
        lazy.load_state_dict(wrong)
    whole = lazy.whole_state_dict()
    assert whole["state"][0]["momentum_buffer"].shape == (7, 5)
    lazy.load_state_dict(whole)
    half = _model(torch.bfloat16)
    with pytest.raises(ConfigurationError, match="not known to be element-wise"):
        Ours(half.parameters(), type("Unknown", (torch.optim.SGD,), {}), lr=0.1)


@pytest.mark.xla
def test_every_argument_is_there() -> None:
    pytest.importorskip("torch_xla")
    from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer as Theirs

    there, wanted = (
        [(p.name, p.default) for p in inspect.signature(c).parameters.values()] for c in (Ours, Theirs)
    )
    assert there == wanted


# ------------ Parameters that are written after the optimizer was made: it goes on from what they are, as torch's do.


def _loss(model: Any, device: Any) -> torch.Tensor:
    return model(torch.linspace(-1, 1, 12).view(4, 3).to(device)).square().mean()


def _programs(rank: int) -> list[tuple[str, dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    found = []
    for kind in ("oss", "sharded_ddp", "sharded_ddp of other values", "zero"):
        plain, device = linears(3, 5, 2, seed=0), xm.xla_device()
        model: Any = linears(3, 5, 2, seed=rank if "other" in kind else 0).to(device)
        options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
        if kind == "zero":
            optimizer: Any = ZeroRedundancyOptimizer(
                model.parameters(), torch.optim.SGD, grad_clipping=False, **options
            )
        else:
            optimizer = OSS(model.parameters(), torch.optim.SGD, **options)
        whole = ShardedDDP(model, optimizer) if "ddp" in kind else model
        reference = torch.optim.SGD(plain.parameters(), **options)
        for step in range(3):
            if step == 1:
                model.load_state_dict(linears(3, 5, 2, seed=5).state_dict())
                plain.load_state_dict(linears(3, 5, 2, seed=5).state_dict())
            if step == 2:
                with torch.no_grad():
                    model[0].weight.mul_(2)
                    plain[0].weight.mul_(2)
            for m, o, where in ((whole, optimizer, device), (plain, reference, "cpu")):
                o.zero_grad()
                _loss(m, where).backward()
                o.step()
            xm.mark_step()
        state = {k: v.detach().cpu() for k, v in model.state_dict().items()}
        found.append((kind, state, {k: v.clone() for k, v in plain.state_dict().items()}))
    return found


@pytest.mark.parametrize(("backend", "world_size"), EACH)
def test_the_optimizer_goes_on_from_what_was_written(backend: str, world_size: int) -> None:
    for results in rank_pool(world_size, backend).run(_programs):
        for kind, found, wanted in results:
            for key, value in wanted.items():
                torch.testing.assert_close(
                    found[key], value, rtol=1e-5, atol=1e-6, msg=lambda m, k=kind, n=key: f"{k} {n}: {m}"
                )
