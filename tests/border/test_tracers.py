"""Tracers and transforms that would see shards: refused by name on all ranks, or right."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

import shardkit
from shardkit import FSDP, OSS, ShardedDDP
from shardkit.errors import ConfigurationError, LifecycleError
from shardkit.training.whole_parameters import WholeParameters
from tests.beside import batch
from tests.doors import DOORS, linears, through
from tests.pools import on_ranks

X = torch.ones(2, 6)


_net = partial(linears, 6, 5, 4)


def _units() -> FSDP:
    return through("FSDP", _net(), "0")  # type: ignore[no-any-return]


def _compiled_backward(model: FSDP, with_forward: bool) -> None:
    import torch._dynamo.compiled_autograd as compiled

    loss = None if with_forward else model(X).sum()
    with compiled._enable(lambda graph: graph):
        (model(X).sum() if loss is None else loss).backward()


def _gradient_of_shards(model: FSDP) -> None:
    x = X.clone().requires_grad_()
    torch.autograd.grad(model(x).sum(), [x, *model.parameters()], allow_unused=True)


def _functional_gradient(model: FSDP) -> None:
    params = dict(model.named_parameters())
    torch.func.grad(lambda p: functional_call(model, p, (X,)).sum())(params)


# What is tried, and what the error says.
REFUSED: dict[str, tuple[Callable[[FSDP], Any], str]] = {
    "jit.trace": (lambda m: torch.jit.trace(m, X), "jit.trace .* load this one's state_dict"),
    "jit.script": (torch.jit.script, "jit.script of an FSDP module"),
    "fx": (torch.fx.symbolic_trace, "tracing with torch.fx"),
    "make_fx": (lambda m: make_fx(m)(X), "tracing with torch.fx"),
    "onnx": (lambda m: torch.onnx.export(m, (X,), io.BytesIO(), dynamo=False), "torch.onnx.export too"),
    "export": (lambda m: torch.export.export(m, (X,), strict=False), "torch.export .* torch.compile works"),
    "strict export": (lambda m: torch.export.export(m, (X,), strict=True), "torch.export .* torch.compile works"),
    "compiled autograd": (lambda m: _compiled_backward(m, True), "compiled autograd of an FSDP module"),
    "compiled backward": (lambda m: _compiled_backward(m, False), "compiled autograd of a sharded module"),
    "unit's name": (
        lambda m: functional_call(m, {k: v.detach() for k, v in _net().named_parameters()}, (X,)),
        "'weight' is a parameter or buffer of the module that FSDP wraps",
    ),
    "inner name": (
        lambda m: functional_call(m, {"2.weight": torch.zeros(4, 5)}, (X,)),
        r"'2\.weight' of an FSDP module is replaced",
    ),
    "grad of functional_call": (_functional_gradient, "functional_call does this|torch.func.grad"),
    "grad of shards": (_gradient_of_shards, r"Call loss\.backward\(\)"),
}  # fmt: skip


@on_ranks(1, 2)
def test_tracers(rank: int, world_size: int) -> None:
    """Refused on each rank, and the model trains as ever afterwards."""
    for name, (attempt, words) in REFUSED.items():
        model, plain = _units(), _net()
        with pytest.raises(LifecycleError, match=words):
            attempt(model)
        if name == "unit's name":  # torch has replaced some already, and does not put them back
            with pytest.raises(LifecycleError, match="is replaced by another tensor"):
                model(X)
            continue
        for m in (model, plain):
            m.zero_grad()
            m(X).sum().backward()
            torch.optim.SGD(m.parameters(), lr=0.1).step()
        torch.testing.assert_close(model(X), plain(X), rtol=0, atol=1e-6)


@on_ranks(1, 2)
def test_transforms(rank: int, world_size: int) -> None:
    """vmap, and gradients of inputs, are right; transforms that differentiate are refused where ranks share."""
    model, plain = _units(), _net()
    torch.testing.assert_close(torch.func.vmap(model)(X), torch.func.vmap(plain)(X), rtol=0, atol=1e-6)
    x = X.clone().requires_grad_()
    mine, truth = (torch.autograd.grad(m(x).sum(), x)[0] for m in (model, plain))
    torch.testing.assert_close(mine, truth, rtol=0, atol=1e-6)
    for transform in (torch.func.jacrev, lambda m: torch.func.grad(lambda v: m(v).sum())):
        if world_size > 1:
            with pytest.raises(LifecycleError, match=r"torch\.func\.grad .* Use torch\.autograd\.grad"):
                transform(model)(X)
        else:
            torch.testing.assert_close(transform(model)(X), transform(plain)(X), rtol=0, atol=1e-6)
    for door in DOORS:  # the root has no parameters of its own
        root = through(door, _net(), "0", "2")
        with pytest.raises(LifecycleError, match=REFUSED["grad of functional_call"][1]):
            _functional_gradient(root)
    with model.summon_full_params():
        mine = functional_call(model.module[2], {"weight": torch.zeros(4, 5)}, (torch.ones(1, 5),))  # type: ignore[index]
    torch.testing.assert_close(mine, plain[2].bias.detach()[None], rtol=0, atol=1e-6)


@on_ranks(2)
def test_compiled_autograd_of_sharded_ddp(rank: int) -> None:
    inner = _net()
    optimizer = OSS(inner.parameters(), torch.optim.SGD, lr=0.1)
    model: Any = ShardedDDP(inner, optimizer)
    for with_forward in (True, False):
        with pytest.raises(LifecycleError, match="compiled autograd of a sharded module"):
            _compiled_backward(model, with_forward)
        optimizer.zero_grad()
    model(X).sum().backward()
    optimizer.step()


class _Net(nn.Module):
    """torch compiles the forward of classes that are not its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(6, 5), nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.tanh(self.inner(x)))


def _wrapped(door: str) -> tuple[Any, Any]:
    model, adam = _Net(), torch.optim.AdamW
    if door == "ShardedDDP":
        optimizer = OSS(model.parameters(), adam, lr=0.1)
        return ShardedDDP(model, optimizer), optimizer
    if door == "WholeParameters":
        whole = through("fully_shard", model, "inner")
        return whole, WholeParameters(whole, adam, lr=0.1)
    sharded = through(door, model, "inner")
    return sharded, adam(sharded.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("door", "clips"),
    [
        *((door, False) for door in ("ShardedDDP", *DOORS, "WholeParameters") if door != "torch_fsdp"),
        ("ShardedDDP", True),
    ],
)
@on_ranks(2)
def test_a_whole_step_is_compiled_around_collectives(rank: int, door: str, clips: bool) -> None:
    """The numbers of one process; the model and the update are compiled, and nothing that communicates."""
    torch._dynamo.reset()
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(graph.print_readable(print_output=False))
        return graph.forward

    model, optimizer = _wrapped(door)
    plain = _Net()
    truth = torch.optim.AdamW(plain.parameters(), lr=0.1)

    @torch.compile(backend=backend)
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        if clips:
            optimizer.clip_grad_norm(0.1)
        optimizer.step()
        model.zero_grad()
        return loss

    for k in range(3):
        x = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(k))
        step(x[rank])
        truth.zero_grad()
        plain(x.flatten(0, 1)).square().mean().backward()
        if clips:
            nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        truth.step()
        with torch.no_grad():
            torch.testing.assert_close(model(X), plain(X), rtol=0, atol=1e-5)
    assert any("tanh" in graph for graph in graphs)
    assert any("exp_avg_sq" in graph for graph in graphs) or door == "WholeParameters"
    package = f"{Path(shardkit.__file__).parent}/"  # a checkout may have the same name
    assert package not in "".join(graphs)


@on_ranks(2)
def test_parameters_are_not_swapped(rank: int) -> None:
    model = _units()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with pytest.raises(
            ConfigurationError, match="list DTensors can't be moved, cast or loaded by swapping"
        ):
            model.to(torch.float64)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert model.to(torch.float64)(X.double()).dtype == torch.float64


# ------------ What torch can do with a plain module and not with a wrapped one: refused by name, on all ranks.
def _halve(p: nn.Parameter) -> None:
    assert p.grad is not None
    p.grad.mul_(0.5)


@on_ranks(1, 2)
def test_hooks_on_wrapped_parameters(rank: int, world_size: int) -> None:
    """They are refused where no gradient would be; on shards they run."""
    truth, model = _net(), _units()
    for p in (model.module[2].weight, model.module[0].module.bias):  # type: ignore[index]
        with pytest.raises(ConfigurationError, match=r"shards that the FSDP module's parameters\(\) lists"):
            p.register_post_accumulate_grad_hook(_halve)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(_halve)
    model(batch(rank)).sum().backward()
    sum(truth(batch(r)).sum() / (2 * world_size) for r in range(world_size)).backward()  # type: ignore[union-attr]
    norm = torch.stack([p.grad.norm() for p in truth.parameters() if p.grad is not None]).norm()
    torch.testing.assert_close(model.clip_grad_norm_(1e9), norm)

    inner = _net()
    # the first one, on this rank's gradient
    kept = inner[0].weight.register_post_accumulate_grad_hook(_halve)
    wrapped: ShardedDDP | None = ShardedDDP(inner, OSS(inner.parameters(), torch.optim.SGD, lr=0.1))
    if world_size > 1:
        with pytest.raises(ConfigurationError, match="between backward and step"):
            inner[2].weight.register_post_accumulate_grad_hook(_halve)
    assert wrapped is not None
    wrapped(batch(rank)).sum().backward()
    kept.remove()
    del wrapped
    inner[2].weight.register_post_accumulate_grad_hook(_halve)  # a plain module again
    inner.zero_grad()
    truth.zero_grad()
    inner(batch(0)).sum().backward()
    truth(batch(0)).sum().backward()
    for p, q, factor in zip(inner.parameters(), truth.parameters(), (1, 1, 2, 1), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        torch.testing.assert_close(p.grad * factor, q.grad)


# ------------------------------------------------------------ lazy modules
class _Partly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ready, self.norm = nn.Linear(3, 3), nn.LazyBatchNorm1d(affine=False)


@on_ranks(2)
def test_lazy_modules(rank: int) -> None:
    arguments: Any = ([*nn.LazyLinear(3).parameters()], torch.optim.SGD)
    with pytest.raises(ConfigurationError, match=r"OSS was given parameter 0 of group 0.*one forward"):
        OSS(*arguments, lr=0.1)
    optimizer = OSS(nn.Linear(2, 2).parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(ConfigurationError, match=r"OSS was given parameter 0 of group 1.*one forward"):
        optimizer.add_param_group({"params": arguments[0]})
    model = _Partly()
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(ConfigurationError, match=r"ShardedDDP was given norm.running_mean.*one forward"):
        ShardedDDP(model, optimizer)
