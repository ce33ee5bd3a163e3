"""What programs do with an FSDP module outside of its own forward: it is right, or refused by name on all ranks."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from shardkit import FSDP, PrecisionPolicy, ReshardPolicy
from shardkit.errors import ConfigurationError, LifecycleError
from tests.fsdp_models import WIDTH, batch, build
from tests.pools import rank_pool

pytestmark = pytest.mark.timeout(180)


THERE = "inside of summon_full_params, or through a forward that was run there, is not possible"


class Net(nn.Module):
    """Two units below the root; a layer of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh())
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.block(x)))

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = torch.cat([self(x), self.forward(x)], 1)
        return x


def _wrap(model: Any, **options: Any) -> Any:
    model.block, model.norm = FSDP(model.block, **options), FSDP(model.norm, **options)
    return FSDP(model, **options)


def _everywhere(program: Callable[..., None], *args: Any) -> None:
    for backend, worlds in (("gloo", (1, 2, 3)), ("simulated", (2,))):
        for world_size in worlds:
            rank_pool(world_size, backend).run(program, *args)


def _same(sharded: Any, plain: nn.Module) -> None:
    for (name, mine), truth in zip(sharded.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, truth, msg=lambda m, n=name: f"{n}: {m}")


# ------------------------------------------------------------------ inside of summon_full_params
def _evaluates_alone(rank: int, options: dict[str, Any]) -> None:
    """Rank 0 alone runs forward, generate and the wrapped module; others go on to a barrier and to training."""
    model = _wrap(build(Net), **options)
    x = batch(0, 1)[0]
    model.train()(x).sum().backward()
    expected = model.eval()(x)
    before = model.state_dict()
    with model.summon_full_params():
        if rank == 0:
            for grad in (False, True):
                with torch.set_grad_enabled(grad):
                    assert torch.equal(model(x), expected)
            if "precision" not in options:  # the wrapped module's own forward casts nothing
                with torch.no_grad():
                    once = torch.cat([expected, expected], 1)
                    assert torch.equal(model.generate(x), torch.cat([model(once), model(once)], 1))
            _trained_inside(model, x)
    model._group.barrier(label="after evaluation")
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    model.train()(x).sum().backward()


def _trained_inside(model: Any, x: torch.Tensor) -> None:
    with pytest.raises(LifecycleError, match=THERE):
        model(x).sum().backward()


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unflattened": {"flatten": False},
    "bf16": {"precision": PrecisionPolicy(compute=torch.bfloat16, buffers=torch.bfloat16)},
    "kept": {"reshard": ReshardPolicy(after_forward=False)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_evaluation_on_one_rank_when_summoned(options: dict[str, Any]) -> None:
    _everywhere(_evaluates_alone, options)


def _graphs(rank: int, options: dict[str, Any]) -> None:
    """A graph from before is as good as ever, unless parameters were changed; one from inside is refused."""
    plain, model = build(Net).eval(), _wrap(build(Net), **options).eval()
    world = model._group.world_size
    first, second = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model))
    for step in range(2):
        xs = batch(step, world)
        first.zero_grad()
        second.zero_grad()
        torch.stack([plain(x).pow(2).mean() for x in xs]).mean().backward()
        loss = model(xs[rank]).pow(2).mean()
        _same(model, plain)
        loss.backward()
        first.step()
        second.step()
    _same(model, plain)
    with model.summon_full_params():
        inside, past = (m(xs[rank]).sum() for m in (model, model.module))
        with pytest.raises(LifecycleError, match=THERE):
            inside.backward(retain_graph=True)
    with pytest.raises(LifecycleError, match=THERE):
        inside.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        past.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        _squared(model).backward()
    loss = model(xs[rank]).sum()
    with model.summon_full_params(), torch.no_grad():
        model.module.head.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    model.zero_grad()
    model(xs[rank]).sum().backward()


def _squared(model: Any) -> torch.Tensor:
    """Saves a parameter of the root's for backward, past the FSDP module."""
    with model.summon_full_params():
        return model.module.head.weight.pow(2).sum()


def test_graphs_and_summon() -> None:
    for options in (OPTIONS["plain"], OPTIONS["unflattened"]):
        _everywhere(_graphs, options)


def _changes_are_computed_with(rank: int, compute: torch.dtype | None) -> None:
    model = _wrap(build(Net), precision=PrecisionPolicy(compute=compute, buffers=compute)).eval()
    x = batch(0, 1)[0]
    with torch.no_grad():
        with model.summon_full_params():
            model.module.head.weight.mul_(2.0)
            model.module.head.bias.data = torch.zeros(3)
            model.module.block.module[0].weight.fill_(0.1)
            inside = model(x)
        assert torch.equal(model(x), inside)
        assert model.state_dict()["block.0.weight"].eq(0.1).all()


def test_changes_when_summoned() -> None:
    for compute in (None, torch.bfloat16):
        _everywhere(_changes_are_computed_with, compute)


def _copies_when_summoned(rank: int) -> None:
    model = _wrap(build(Net)).eval()
    with model.summon_full_params():
        for part in (model, model.module):
            with pytest.raises(
                LifecycleError, match="copying or pickling an FSDP module inside of summon_full"
            ):
                copy.deepcopy(part)
        plain = copy.deepcopy(model.module.head)
    assert type(plain.weight) is nn.Parameter
    copied = copy.deepcopy(model)
    x = batch(0, 1)[0]
    assert torch.equal(copied(x), model(x))


def test_copies_when_summoned() -> None:
    _everywhere(_copies_when_summoned)


# ------------------------------------------------------------------ methods other than forward
def _methods(rank: int) -> None:
    model = _wrap(build(Net)).eval()
    x = batch(0, 1)[0]
    with torch.no_grad():
        expected = model(x)
        if model._group.world_size > 1:
            with pytest.raises(LifecycleError, match=r"parameter 'head\.weight'"):
                model.module(x)
        assert torch.equal(model(x), expected)
    other = _wrap(build(Net))
    if model._group.world_size == 1:  # values are there, but nobody would hand gradients over
        with pytest.raises(
            LifecycleError, match=r"'head\.\w+', but the FSDP module that holds it was never called"
        ):
            other.module.head(torch.ones(2, 5)).sum().backward()


def test_methods_other_than_forward() -> None:
    _everywhere(_methods)


class Encoder(nn.Module):
    """The guide's model: torch's fast path would read the layers' weights without calling them."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.encoder(x))


def _fast_path(rank: int, parts: tuple[str, ...]) -> None:
    plain = build(Encoder).eval()
    model: Any = build(Encoder)
    for layer in model.encoder.layers:
        for name in parts:
            layer.set_submodule(name, FSDP(layer.get_submodule(name)))
    model = FSDP(model).eval()
    x = batch(0, 1, 6)
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(model(x), plain(x))
        torch.testing.assert_close(model(x), plain(x))


@pytest.mark.parametrize("parts", [("linear1", "linear2", "norm1"), ("self_attn",), ("norm2", "self_attn")])
def test_paths_past_the_modules(parts: tuple[str, ...]) -> None:
    _everywhere(_fast_path, parts)


# ------------------------------------------------------------------ outputs that are parameters
@dataclass
class Held:
    weight: torch.Tensor


class Lends(nn.Module):
    """Returns its weight for somebody else to use."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, WIDTH))
        self.how = how

    def forward(self, x: torch.Tensor) -> Any:
        views = {"itself": self.weight, "view": self.weight[1:], "detached": self.weight.detach()}
        if self.how == "held":
            return x * 2, Held(self.weight)
        return x * 2, {"weight": views[self.how]}


class Borrows(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.lends, self.layer = Lends(how), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, found = self.lends(x)
        return self.layer(torch.tanh(x)) @ found["weight"].t()


def _lends(rank: int, how: str) -> None:
    plain, model = (build(lambda: Borrows(how)) for _ in range(2))
    model.lends = FSDP(model.lends)
    model = FSDP(model)
    world = model._group.world_size
    if how == "held":
        if world > 1:
            with pytest.raises(
                LifecycleError, match="'lends' returns a parameter, or a view of one, inside a tuple"
            ):
                model(batch(0, 1)[0])
        return
    first, second = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model))
    for step in range(3):
        xs = batch(step, world)
        with torch.no_grad():
            torch.testing.assert_close(model(xs[0]), plain(xs[0]))
        first.zero_grad()
        second.zero_grad()
        torch.stack([plain(x).pow(2).mean() for x in xs]).mean().backward()
        model(xs[rank]).pow(2).mean().backward()
        first.step()
        second.step()
    _same(model, plain)


@pytest.mark.parametrize("how", ["itself", "view", "detached", "held"])
def test_outputs_that_are_parameters(how: str) -> None:
    _everywhere(_lends, how)


# ------------------------------------------------------------------ threads
class Meets(nn.Module):
    """Lets another thread in while it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3)
        self.meanwhile: list[Callable[[], Any]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.meanwhile:
            other = threading.Thread(target=self.meanwhile.pop(), name="other")
            other.start()
            other.join()
        return _Interrupted.apply(self.layer(x), self)


class _Interrupted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: Meets) -> torch.Tensor:
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        for action in ctx.module.meanwhile:
            other = threading.Thread(target=action, name="other")
            other.start()
            other.join()
        return gradient, None


def _threads(rank: int, during: str) -> None:
    plain, inner = build(Meets), build(Meets)
    model = FSDP(inner)
    x = batch(0, 1)[0]
    errors: list[BaseException] = []
    kept = model(x).sum()  # its backward may be tried by the other thread
    attempts: dict[str, Callable[[], Any]] = {
        "forward": lambda: model(x),
        "backward": kept.backward,
        "summon_full_params": model.state_dict,
    }

    def attempt(action: Callable[[], Any]) -> None:
        try:
            action()
        except LifecycleError as error:
            errors.append(error)

    for name, action in attempts.items():
        del errors[:]
        loss = None if during == "forward" else model(x).sum()
        inner.meanwhile[:] = [lambda action=action: attempt(action)]
        if loss is None:
            loss = model(x).sum()
        else:
            model.zero_grad()
            loss.backward()
        inner.meanwhile.clear()
        torch.testing.assert_close(loss, plain(x).sum())
        assert len(errors) == 1, name
        assert "thread" in str(errors[0]) or "inside of forward or backward" in str(errors[0])
    plain(x).sum().backward()
    model.zero_grad()
    model(x).sum().backward()
    gradient = torch.cat([p.grad.view(-1) for p in plain.parameters()])
    mine = next(model.parameters()).grad  # its part of the mean; all ranks had the same batch
    size = mine.numel()
    truth = nn.functional.pad(gradient, (0, size * model._group.world_size - gradient.numel()))
    torch.testing.assert_close(mine.view(-1), truth[rank * size : (rank + 1) * size])


@pytest.mark.parametrize("during", ["forward", "backward"])
def test_another_thread_is_refused(during: str) -> None:
    """Nothing of the first thread's is freed by it: what is in progress comes out right."""
    for world_size in (2, 3):
        rank_pool(world_size).run(_threads, during)


# ------------------------------------------------------------------ construction
def _optimizer_from_before(rank: int, part: bool) -> None:
    model: Any = build(Net)
    if part:
        model.block = FSDP(model.block)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = copy.deepcopy(optimizer.state_dict())
    model = FSDP(model)
    model(batch(0, 1)[0]).sum().backward()
    with pytest.raises(LifecycleError, match="of this AdamW were taken over by FSDP modules"):
        optimizer.step()
    assert optimizer.state_dict() == before
    after = torch.optim.AdamW(model.parameters(), lr=0.1)
    after.step()
    if not part:
        after.add_param_group({"params": [model.module.head.weight]})
        with pytest.raises(LifecycleError, match=r"\('head\.weight'\): it would never change"):
            after.step()


def test_optimizers_from_before_wrapping() -> None:
    for part in (False, True):
        _everywhere(_optimizer_from_before, part)


class Named(nn.Module):
    """Has something by the name under which shards are listed."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.flat_param_0: Any
        if kind == "parameter":
            self.flat_param_0 = nn.Parameter(torch.full((WIDTH,), 0.5))
        elif kind == "buffer":
            self.register_buffer("flat_param_0", torch.full((WIDTH,), 0.5))
        elif kind == "module":
            self.flat_param_0 = nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        found = self.flat_param_0
        return found(y) if isinstance(found, nn.Module) else y * found


def _names(rank: int, kind: str) -> None:
    with pytest.raises(ConfigurationError, match=r"Named has an attribute 'flat_param_0'.*flatten=False"):
        FSDP(build(lambda: Named(kind)))
    plain, model = build(lambda: Named(kind)), FSDP(build(lambda: Named(kind)), flatten=False)
    x = batch(0, 1)[0]
    first, second = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model))
    for m, optimizer in ((plain, first), (model, second)):
        m(x).pow(2).sum().backward()
        optimizer.step()
    _same(model, plain)
    model.load_state_dict(plain.state_dict())
    model.load_local_state_dict(model.local_state_dict())
    _same(model, plain)


@pytest.mark.parametrize("kind", ["parameter", "buffer", "module"])
def test_names_of_shards_that_are_taken(kind: str) -> None:
    _everywhere(_names, kind)


def _lazy(rank: int, on_rank: int | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(5), nn.LazyBatchNorm1d(), nn.Linear(5, 2))
    x = batch(0, 1)[0]
    if on_rank == rank:
        model(x)
    match = "no shape before its first forward" if on_rank is None else "no shape yet|differ|has"
    with pytest.raises((ConfigurationError, RuntimeError), match=match):
        FSDP(model)
    if on_rank != rank:
        model(x)
    expected = model.eval()(x)
    torch.testing.assert_close(FSDP(model)(x), expected)


def test_lazy_modules() -> None:
    """Refused on all ranks, also if one of them knows the shapes; right once they are known."""
    _everywhere(_lazy, None)
    for world_size in (2, 3):
        rank_pool(world_size).run(_lazy, 0)


def _meta(rank: int) -> None:
    """Without values: shapes can be inferred, values can't; ``to_empty`` and loading make it a model."""
    truth = build(Net).eval()
    with torch.device("meta"):
        model = _wrap(Net()).eval()
    x = batch(0, 1)[0]
    assert model(x.to("meta")).shape == (4, 3)
    with pytest.raises(
        LifecycleError, match=r"parameter '\S*weight', which is on the meta device .* to_empty\(\)"
    ):
        model(x)
    model.to_empty(device="cpu")
    model.load_state_dict(truth.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model(x), truth(x))


def test_a_forward_without_values() -> None:
    for world_size in (1, 2, 3):
        rank_pool(world_size).run(_meta)


# ------------------------------------------------------------------ other ways to give or take parameters
def _functional(rank: int) -> None:
    model = _wrap(build(Net)).eval()
    x = batch(0, 1)[0]
    expected = model(x)
    call = torch.func.functional_call
    assert torch.equal(call(model, dict(model.named_parameters()), (x,)), expected)
    others = {k: v.detach() * 2 for k, v in model.named_parameters()}
    with pytest.raises(LifecycleError, match="there is another Tensor, which forward would ignore"):
        call(model, others, (x,))
    assert torch.equal(model(x), expected)
    unit = model.block._fsdp_wrapped_module
    unit.flat_param_0 = nn.Parameter(unit.flat_param_0.detach() * 2)
    with pytest.raises(LifecycleError, match="parameters 0 of block there is another Parameter"):
        model(x)


def test_functional_call() -> None:
    _everywhere(_functional)


def _assigned(rank: int, options: dict[str, Any]) -> None:
    plain, model = build(Net, 1), _wrap(build(Net), **options)
    assert not model.load_state_dict(plain.state_dict(), assign=True).missing_keys
    _same(model, plain)
    x = batch(0, 1)[0]
    for m in (plain, model):
        m(x).pow(2).sum().backward()
        torch.optim.SGD(m.parameters(), lr=0.1).step()
    _same(model, plain)


def test_load_state_dict_assign() -> None:
    for options in (OPTIONS["plain"], OPTIONS["unflattened"]):
        _everywhere(_assigned, options)


class Counted(nn.Module):
    """A function for ``apply`` that notes what it was given, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __call__(self, module: nn.Module) -> None:
        self.seen.append(type(module).__name__)
        if hasattr(module, "weight"):
            nn.init.normal_(module.weight)
        if hasattr(module, "bias"):
            nn.init.uniform_(module.bias)


def _applied(rank: int) -> None:
    plain, model = build(Net), _wrap(build(Net))
    mine, truth = Counted(), Counted()
    torch.manual_seed(3)
    assert plain.apply(truth) is plain
    torch.manual_seed(3)
    assert model.apply(mine) is model
    assert mine.seen == truth.seen
    _same(model, plain)
    outer, truth = nn.Sequential(_wrap(build(Net))), Counted()
    torch.manual_seed(3)
    outer.apply(truth)
    assert truth.seen == [*mine.seen, "Sequential"]
    _same(outer[0], plain)


def test_apply_initializes_once() -> None:
    _everywhere(_applied)


def _exported(rank: int) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(3, 2)
    plain, model = copy.deepcopy(linear), FSDP(linear)
    taken: list[Any] = []
    linear.register_forward_hook(lambda m, args, out: taken.append(m.weight.detach().numpy()))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    for _ in range(3):
        before = plain.weight.detach().clone()
        for m, optimizer in zip((plain, model), optimizers, strict=True):
            m(torch.ones(2, 3)).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(torch.from_numpy(taken[-1]), before)
    torch.testing.assert_close(model.state_dict()["weight"], plain.weight.detach())


def test_memory_given_to_numpy_stays_with_it() -> None:
    rank_pool(2).run(_exported)
