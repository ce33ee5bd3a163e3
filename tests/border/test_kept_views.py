"""What a forward leaves behind: views of parameters, and units that stay gathered for backward."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardkit import FSDP, ReshardPolicy, sharding_of
from shardkit.errors import LifecycleError
from tests.beside import steps_beside
from tests.border.strategies import Net, wrap
from tests.doors import through
from tests.fsdp_models import batch, build
from tests.pools import on_ranks

WIDTH = 6


class Named(dict[str, Any]):
    """As outputs of models: their parts are found, too."""


VIEWS: dict[str, Callable[[nn.Parameter], Any]] = {
    "t": lambda w: w.t(),
    "detach": lambda w: w.detach(),
    "data": lambda w: w.data,
    "chunk": lambda w: w.chunk(2)[0],
    "in a list": lambda w: [Named(w=w.view(-1))],
    "parameter": lambda w: [{"w": nn.Parameter(w.detach())}],
}


class Keeping(nn.Module):
    """Keeps a view of its weight, or only uses one."""

    def __init__(self, view: Callable[[nn.Parameter], Any] | None = None) -> None:
        super().__init__()
        self.linear, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.view, self.kept = view, None
        self.cycle: list[Any] = [{}]
        self.cycle[0]["again"] = self.cycle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.view is not None:
            self.kept = self.view(self.linear.weight)
        else:
            x = x @ self.linear.weight.t()
        return self.down(self.linear(x))


def _kept(module: Keeping) -> torch.Tensor:
    found: Any = module.kept
    return found[0]["w"] if isinstance(found, list) else found  # type: ignore[no-any-return]


def _reads(rank: int, world: int, name: str) -> None:
    """Refused by name after forward, after backward and after forwards without gradients; right within forward."""
    plain, inner = build(Keeping), build(Keeping)
    inner.view = plain.view = VIEWS[name]
    model = FSDP(nn.Sequential(FSDP(inner), nn.Linear(3, 3)))
    x = batch(0, 1)[0]
    first, second = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain))
    for step in range(3):
        with torch.set_grad_enabled(step < 2):
            y = model(x)
        plain(x)
        if world > 1:
            view = _kept(inner)
            for read in (
                lambda v: v + 0,
                lambda v: v.sum(),
                lambda v: v.tolist(),
                lambda v: v.numpy(),
            ):
                with pytest.raises(
                    LifecycleError, match=r"a view of parameter '0\.linear\.weight' that was kept"
                ):
                    read(view)
            assert view.shape == _kept(plain).shape
        else:
            assert torch.equal(_kept(inner), _kept(plain))
        if step < 2:
            y.sum().backward()
        if world > 1:
            with pytest.raises(LifecycleError, match=f"rank {rank}: .* kept"):
                _kept(inner) * 2
    first.step()
    second.zero_grad()
    if world > 1:
        # the next forward finds it alive, if it keeps it
        seen: list[torch.Tensor] = []
        inner.view = None
        keep = inner.kept
        inner.linear.register_forward_hook(lambda m, i, o: seen.append(_kept(inner).clone()))
        model(x)
        assert inner.kept is keep
        with model.summon_full_params():
            truth = VIEWS[name](inner.linear.weight)
            truth = truth[0]["w"] if isinstance(truth, list) else truth
            assert torch.equal(seen[0], truth)


@on_ranks(1, 2, (2, "simulated"))
def test_views_that_are_kept(rank: int, world_size: int) -> None:
    for name in VIEWS:
        _reads(rank, world_size, name)


@on_ranks(2)
def test_views_that_hooks_keep(rank: int) -> None:
    """Kept by a hook, long ago; what autograd alone keeps is no concern."""
    inner = build(Keeping)
    model = FSDP(nn.Sequential(FSDP(inner), nn.Linear(3, 3)))
    x = batch(0, 1)[0]
    for _ in range(2):
        model(x).sum().backward()
    handle = inner.register_forward_hook(lambda m, i, o: setattr(m, "kept", m.linear.weight.data))
    with torch.no_grad():
        model(x)
    handle.remove()
    for _ in range(2):
        model(x).sum().backward()
        with pytest.raises(LifecycleError, match="Keep a clone"):
            _kept(inner).norm()
    with pytest.raises(LifecycleError, match="a view of parameter"):
        copy.deepcopy(inner.kept)


@on_ranks(1, 2, 3)
def test_units_that_stay_gathered_without_a_backward(rank: int, world_size: int) -> None:
    """Units that stay gathered for a backward that does not come: the next forward has the new values."""
    for flatten in (True, False):
        for reshard in (ReshardPolicy(), ReshardPolicy(after_forward=False), ReshardPolicy(root=False)):
            plain, model = build(Keeping), build(Keeping)
            model.linear = FSDP(model.linear, flatten=flatten, reshard=reshard)
            model.view = plain.view = lambda w: None  # type: ignore[assignment]
            model = FSDP(model, flatten=flatten, reshard=reshard)
            both = [(m, torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)) for m in (plain, model)]
            for step in range(2):
                for m, optimizer in both:
                    m.zero_grad()
                    m(batch(step, 1)[0]).pow(2).sum().backward()
                    m(batch(step, 1)[0])
                    optimizer.step()
                if world_size > 1:
                    down = model.module.down
                    for use in (lambda d=down: d.weight.sum(), lambda d=down: d.weight.data.zero_()):
                        with pytest.raises(LifecycleError, match=r"parameter 'down\.weight'"):
                            use()
                for use in (lambda m: m(batch(7, 1)[0]), lambda m: m.linear(batch(7, 1)[0])):
                    torch.testing.assert_close(use(model), use(plain), rtol=0, atol=1e-6)


# ------------ A tensor with a graph leaves a module, which nothing says.
class Leaving(nn.Module):
    """Gives on its input, and leaves what it has computed outside."""

    def __init__(self, leave: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 300), nn.Linear(300, WIDTH)
        self.leave = leave

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.leave(self.down(torch.tanh(self.up(x))))
        return x.detach()


LEAVING: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "list": (lambda h: h, lambda left: left),
    "generator": (lambda h: (t for t in [h]), next),
    "closure": (lambda h: lambda: h, lambda left: left()),
}


DOORS = ["FSDP", "unflattened", "fully_shard", "dtensors"]


def in_front(first: nn.Module, door: str | None) -> Any:
    """In front of two layers, each of which is a unit."""
    model: Any = nn.Sequential(first, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))
    return through(door, model, "0", "1", "2") if door else model


@pytest.mark.parametrize("how", LEAVING)
@pytest.mark.parametrize("door", DOORS)
@on_ranks(2, 3)
def test_a_tensor_that_leaves_otherwise(rank: int, world_size: int, door: str, how: str) -> None:
    """Backward through it alone is refused by name; steps before and after are those of one process."""
    leave, take = LEAVING[how]
    left: list[Any] = []

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Leaving(lambda h: left.append(leave(h)))

    truth, model = in_front(make(), None), in_front(make(), door)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, truth)]

    def loss(m: Any, r: int, step: int) -> torch.Tensor:
        return m(batch(step, world_size)[r].requires_grad_(step == 1)).sum()  # type: ignore[no-any-return]

    for step in range(3):
        left.clear()
        steps_beside(rank, world_size, model, truth, loss, optimizers, [step])
        named = rf"^rank {rank}: backward came to parameter '0\.(up|down)\.(weight|bias)', .* left its FSDP module in a"
        with pytest.raises(LifecycleError, match=named):
            take(left[0]).sum().backward()
    x = batch(7, world_size)[rank]
    torch.testing.assert_close(model(x), truth(x))


class Lending(nn.Linear):
    """Gives a view of its weight to whoever wants it, and what it has computed of them."""

    def __init__(self, take: Callable[[torch.Tensor, torch.Tensor], None], how: str) -> None:
        super().__init__(WIDTH, WIDTH)
        self.take, self.how = take, how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        data = LENT[self.how](self.weight)
        self.take(data, x @ data.reshape(-1, WIDTH).t())
        return super().forward(x)


LENT: dict[str, Callable[[nn.Parameter], torch.Tensor]] = {
    "data": lambda w: w.data,
    "detach": lambda w: w.detach().cpu(),
    "data.view": lambda w: w.data.view(-1),
    "t": lambda w: w.t(),
    "row": lambda w: w[0],
}


FINDS_ALL = torch.__version__ >= "2.10"  # before that not all objects can be looked at


@pytest.mark.parametrize("how", LENT if FINDS_ALL else ["data", "detach"])
@pytest.mark.parametrize("door", DOORS)
@on_ranks(1, 2, 3)
def test_data_that_a_program_keeps_elsewhere(rank: int, world_size: int, door: str, how: str) -> None:
    """Read between forwards, come to by backward, or written in a later forward: the process ended, or it was lost."""
    kept: list[Any] = []
    model = in_front(build(lambda: Lending(lambda *given: kept.append(given), how)), door)
    x = batch(0, world_size)[rank].requires_grad_()
    if world_size == 1:
        model(x)
        data = weakref.ref(kept.pop()[0])
        assert data() is None  # nobody else keeps it
        return
    for step in range(2):
        model(x).sum().backward()
        view, left = kept[0]
        for read in (torch.sum, torch.Tensor.tolist, lambda v: v.add_(1)):
            with pytest.raises(LifecycleError, match=r"a view of parameter '0\.weight' that was kept"):
                read(view)
        if step:
            with pytest.raises(
                LifecycleError, match=rf"rank {rank}: .* parameter '0\.weight', which is sharded"
            ):
                left.sum().backward()
    inner = model.module[0].module if isinstance(model, FSDP) else model[0]
    for _ in range(2):
        seen: list[torch.Tensor] = []
        inner.take = lambda data, _, seen=seen: seen.append(data - view)
        with torch.no_grad():
            model(x)
        assert not seen[0].any()  # alive while it is gathered
    inner.take = lambda *_: view.mul_(0.5)
    with pytest.raises(LifecycleError, match=r"parameter '0\.weight' was written to while it was gathered"):
        with torch.no_grad():
            model(x), model(x)
    taken: list[weakref.ref[torch.Tensor]] = []
    inner.take = lambda data, _: taken.append(weakref.ref(data))
    with torch.no_grad(), sharding_of(model).summon_full_params():
        model(x)
        assert taken.pop()() is None  # what many forwards take in there does not add up


# ------------ A parameter that is not gathered tells what it is, and says so by name if somebody needs its values.
def _wrapped() -> FSDP:
    return wrap(build(Net)).eval()  # type: ignore[no-any-return]


def _written(change: Callable[[torch.Tensor], Any]) -> Callable[[nn.Parameter], Any]:
    """In place, and what is there afterwards."""

    def run(w: nn.Parameter) -> Any:
        with torch.no_grad():
            change(w)
        return w.detach().clone()

    return run


# What programs do with a parameter outside of forward; each returns what it saw.
IDIOMS: dict[str, Callable[[nn.Parameter], Any]] = {
    "sum": lambda w: w.sum(),
    "isnan": lambda w: w.isnan().any(),
    "clone": lambda w: w.clone(),
    "detach": lambda w: w.detach() + 0,
    "data": lambda w: w.data + 0,
    "numpy": lambda w: torch.from_numpy(w.detach().numpy().copy()),
    "tolist": lambda w: w.tolist(),
    "item": lambda w: w[0, 0].item(),
    "iterate": lambda w: [row.sum() for row in w],
    "product": lambda w: torch.ones(1, w.shape[0]) @ w,
    "function": lambda w: nn.functional.linear(torch.ones(1, w.shape[1]), w),
    "compare": lambda w: w == 0,
    "bool": lambda w: bool((w > 0).any()),
    "norm": lambda w: torch.nn.utils.get_total_norm([w]),
    "foreach": lambda w: torch._foreach_norm([w]),
    "to": lambda w: w.to(torch.float64),
    "view": lambda w: w.view(-1) + 0,
    "transpose": lambda w: w.T + 0,
    "ema": lambda w: torch.zeros_like(w).lerp_(w, 0.5),
    "copied from": lambda w: torch.zeros(w.shape).copy_(w),
    "stacked": lambda w: torch.stack([w, w]),
    "fill": _written(lambda w: w.fill_(0.25)),
    "fill data": _written(lambda w: w.data.fill_(0.25)),
    "set data": _written(lambda w: setattr(w, "data", torch.ones(w.shape))),
    "copied into": _written(lambda w: w.copy_(torch.ones(w.shape))),
    "init": _written(lambda w: nn.init.constant_(w, 0.25)),
    "random init": _written(lambda w: (torch.manual_seed(0), nn.init.xavier_uniform_(w))),
    "row": _written(lambda w: w[0].zero_()),
    "set item": _written(lambda w: w.__setitem__(0, 0.5)),
    "optimizer's update": _written(lambda w: w.add_(torch.ones(w.shape), alpha=-0.1)),
    "foreach in place": _written(lambda w: torch._foreach_mul_([w], 0.5)),
    "vector": lambda w: torch.nn.utils.parameters_to_vector([w]),
}


def _inner(model: FSDP) -> nn.Module:
    """The wrapped module; what it wraps below is reached through its attributes."""

    class View(nn.Module):
        def get_submodule(self, target: str) -> nn.Module:
            found: Any = model.module
            for part in target.split("."):
                found = found[int(part)] if part.isdigit() else getattr(found, part)
            return found  # type: ignore[no-any-return]

    return View()


@pytest.mark.parametrize("name", IDIOMS)
@on_ranks(1, 2, (3, "simulated"))
def test_values_outside_of_forward(rank: int, name: str) -> None:
    """Refused by name on each rank (right where the shard is everything), and nothing has changed."""
    plain, model = build(Net), _wrapped()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    idiom = IDIOMS[name]
    alone = model._state.group.world_size == 1
    for step in range(2):
        for path in ("block.0.weight", "head.weight"):
            module, _, attribute = path.rpartition(".")
            mine, truth = (getattr(m.get_submodule(module), attribute) for m in (_inner(model), plain))
            if alone:
                torch.testing.assert_close(idiom(mine), idiom(truth))
                continue
            with pytest.raises(LifecycleError, match=f"rank {rank}: .*parameter '{path if step else ''}"):
                idiom(mine)
        model(batch(0, 1)[0]).sum().backward()  # ends released again
    if not alone:
        for key, value in model.state_dict().items():
            assert torch.equal(value, before[key]), key


@on_ranks(1, 2, (3, "simulated"))
def test_facts(rank: int) -> None:
    """What is known without values is what it is in one process, and costs no gathering."""
    plain, model = build(Net), _wrapped()
    model(batch(0, 1)[0]).sum().backward()
    mine, truth = model.module.head.weight, plain.head.weight
    for read in (
        lambda w: (
            w.shape,
            w.size(),
            w.size(1),
            w.numel(),
            w.dim(),
            w.ndim,
            len(w),
            w.stride(),
            w.is_contiguous(),
        ),
        lambda w: (
            w.dtype,
            w.layout,
            w.requires_grad,
            w.is_leaf,
            w.grad_fn,
            w.element_size(),
            w.nbytes,
            w.itemsize,
        ),
        lambda w: (
            w.is_floating_point(),
            w.is_complex(),
            w.is_sparse,
            w.is_cuda,
            w.is_meta,
            w.device.type == "cpu",
        ),
        lambda w: (isinstance(w, nn.Parameter), isinstance(w, torch.Tensor), hash(w) == id(w)),
        lambda w: (torch.zeros_like(w).shape, w.new_empty(2, 3).dtype, torch.ones_like(w).sum().item()),
    ):
        assert read(mine) == read(truth)
    assert mine in {mine}
    printed = f"{mine} {mine!r} {mine!s}"
    if model._state.group.world_size > 1:
        assert printed.count("'head.weight' of shape (3, 5), torch.float32, sharded") == 3
    mine.requires_grad_(False)
    assert not mine.requires_grad
    model(batch(0, 1)[0]).sum().backward()
    mine.requires_grad = True
    seen: list[Any] = []
    handle = mine.register_hook(lambda g: seen.append(g.shape))
    model(batch(0, 1)[0]).sum().backward()
    handle.remove()
    assert seen == [truth.shape]


@on_ranks(1, 2, (3, "simulated"))
def test_copies(rank: int) -> None:
    """Copies of inner modules are refused, or say on use what they lack; FSDP modules are copied."""
    model = _wrapped()
    x = batch(0, 1)[0]
    with torch.no_grad():
        expected = model(x)
        for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(made(x), expected)
        hidden = torch.ones(2, 5)
        with model.summon_full_params():
            for part in (model, model.module):
                with pytest.raises(
                    LifecycleError, match="copying or pickling an FSDP module inside of summon_full"
                ):
                    copy.deepcopy(part)
            truth = model.module.head(hidden)
            copied = copy.deepcopy(model.module.head)
            saved = pickle.dumps(model.module.head)
        assert type(copied.weight) is nn.Parameter
        assert [n for n, _ in copied.named_parameters()] == ["weight", "bias"]
        assert torch.equal(copied(hidden), truth)
        assert torch.equal(pickle.loads(saved)(hidden), truth)
        if model._state.group.world_size == 1:
            assert torch.equal(copy.deepcopy(model.module.head)(hidden), truth)
            assert torch.equal(pickle.loads(pickle.dumps(model.module.head))(hidden), truth)
            return
        for part in (model.module, model.module.head, model.module.head.bias):
            with pytest.raises(LifecycleError, match=r"a copy needs the values of parameter 'head\."):
                copy.deepcopy(part)
        loaded = pickle.loads(pickle.dumps(model.module.head))
        with pytest.raises(
            LifecycleError, match=r"'head\.weight', but this is a copy of it without the FSDP module"
        ):
            loaded(hidden)
