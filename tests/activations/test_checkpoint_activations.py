"""checkpoint_wrapper against the plain module: results, gradients, statistics, random numbers, memory, copies."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import threading
import weakref
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardkit.errors import LifecycleError
from shardkit.flattening.wrapper import FlattenParamsWrapper
from shardkit.wrapping.activations import (
    checkpoint_wrapper,
    disable_checkpointing,
    enable_checkpointing,
    enable_recomputing,
    is_checkpointing,
    is_recomputing,
    patch_batchnorm,
)

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass(frozen=True)
class Result:
    value: torch.Tensor
    note: str


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 4))


def both(make: Callable[[], nn.Module] = block, offload: bool = False) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = make()
    return plain, checkpoint_wrapper(copy.deepcopy(plain), offload)


def same_grads(plain: nn.Module, other: nn.Module) -> None:
    for (name, p), q in zip(plain.named_parameters(), other.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, rtol=0, atol=0)


def same_buffers(plain: nn.Module, other: nn.Module) -> None:
    for (name, p), q in zip(plain.named_buffers(), other.buffers(), strict=True):
        assert torch.equal(p, q), name


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("input_grad", [False, True])
def test_results_gradients_statistics_and_random_numbers(offload: bool, input_grad: bool) -> None:
    plain, other = both(offload=offload)
    for step in range(3):
        drawn = []
        for model in (plain, other):
            torch.manual_seed(step)
            x = torch.randn(5, 4, requires_grad=input_grad)
            out = model(x)
            after_forward = torch.rand(1)
            out.square().sum().backward()
            drawn.append((out.detach(), x.grad, after_forward, torch.rand(1)))
        for mine, theirs in zip(*drawn, strict=True):
            assert mine is theirs is None or torch.equal(mine, theirs)
        same_grads(plain, other)
        same_buffers(plain, other)


def test_activations_are_not_kept() -> None:
    class Saved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

    plain, other = both(Saved)
    kept = []
    for model in (plain, other):
        numel = 0

        def pack(t: torch.Tensor) -> torch.Tensor:
            nonlocal numel
            numel += 0 if isinstance(t, nn.Parameter) or t._base is not None else t.numel()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = model(torch.randn(32, 64))
        kept.append(numel)
        out.sum().backward()
    assert kept[1] == 32 * 64, "the input"
    assert kept[0] >= 8 * 32 * 64


class Anything(nn.Module):
    """Tensors in containers and dataclasses, with keyword arguments and other objects among them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4)
        self.other = nn.Linear(4, 4)

    def forward(self, pair: Pair, *rest: Any, scale: float = 1.0, named: dict[str, Any] | None = None) -> Any:
        named = named or {}
        value = self.net(pair.left) * scale + named["deep"][0].value
        return {
            "first": value,
            "list": [value.relu(), "text", None],
            "pair": Pair(self.other(pair.right), 3),
            "result": Result(value.sigmoid(), named["deep"][0].note),
            "index": value.argmax(-1),
            "rest": rest,
        }


def test_any_arguments_and_results() -> None:
    plain, other = both(Anything)
    grads, outputs = [], []
    for model in (plain, other):
        torch.manual_seed(1)
        a, b, c = (torch.randn(2, 4, requires_grad=True) for _ in range(3))
        out = model(Pair(a, b), "x", [1], scale=2.0, named={"deep": [Result(c, "hello")]})
        (out["list"][0].sum() + out["pair"].left.sum() + out["result"].value.sum()).backward()
        grads.append([a.grad, b.grad, c.grad])
        outputs.append(out)
    for mine, theirs in zip(*grads, strict=True):
        assert torch.equal(mine, theirs)
    same_grads(plain, other)
    mine, theirs = outputs
    assert list(mine) == list(theirs)
    assert type(mine["pair"]) is Pair
    assert mine["list"][1:] == ["text", None]
    assert mine["rest"] == ("x", [1])
    assert mine["result"].note == "hello"
    assert torch.equal(mine["index"], theirs["index"])
    assert not mine["index"].requires_grad


def test_outputs_that_are_not_used_give_no_gradients() -> None:
    plain, other = both(Anything)
    for model in (plain, other):
        out = model(Pair(torch.ones(2, 4), torch.ones(2, 4)), named={"deep": [Result(torch.ones(2, 4), "")]})
        out["first"].sum().backward()
    assert plain.other.weight.grad is None
    same_grads(plain, other)


def test_no_tensor_in_the_result() -> None:
    class Nothing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(1, 1)

        def forward(self, x: torch.Tensor) -> str:
            return f"{x.shape[0]} rows"

    assert checkpoint_wrapper(Nothing())(torch.ones(2, 1)) == "2 rows"


def test_the_module_stays_the_same_object() -> None:
    module = block()
    keys = list(module.state_dict())
    assert checkpoint_wrapper(module) is module
    assert list(module.state_dict()) == keys
    seen: list[str] = []
    module.register_forward_hook(lambda *_: seen.append("after"))
    module.register_forward_pre_hook(lambda *_: seen.append("before"))
    module(torch.randn(2, 4)).sum().backward()
    assert seen == ["before", "after"]


def test_nothing_keeps_the_module() -> None:
    module = checkpoint_wrapper(block())
    module(torch.randn(2, 4)).sum().backward()
    alive = weakref.ref(module)
    forward = module.forward
    gc.disable()
    try:
        del module
        assert alive() is None
    finally:
        gc.enable()
    with pytest.raises(LifecycleError, match="no longer exists"):
        forward(torch.randn(2, 4))


class Watching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)
        self.seen: list[tuple[bool, bool, bool]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append((is_checkpointing(), is_recomputing(), torch.is_grad_enabled()))
        return self.net(x)


def test_what_a_run_is_told() -> None:
    module = checkpoint_wrapper(Watching())
    out = module(torch.ones(1, 2))
    assert not is_checkpointing()
    out.sum().backward()
    assert not is_recomputing()
    assert module.seen == [(True, False, False), (False, True, True)]
    module.seen.clear()
    with torch.no_grad():
        module(torch.ones(1, 2))
    with disable_checkpointing():
        module(torch.ones(1, 2)).sum().backward()
    assert module.seen == [(False, False, False), (False, False, True)]
    with enable_checkpointing(), enable_recomputing():
        assert (is_checkpointing(), is_recomputing()) == (True, True)
        others: list[bool] = []
        thread = threading.Thread(target=lambda: others.extend([is_checkpointing(), is_recomputing()]))
        thread.start()
        thread.join()
        assert others == [False, False]


def test_an_error_in_either_run_leaves_no_trace() -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.fail = nn.BatchNorm1d(2), "never"

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.fail == ("second" if is_recomputing() else "first"):
                raise KeyError(self.fail)
            return self.net(x)

    module = checkpoint_wrapper(Failing())
    for when in ("first", "second"):
        module.fail = when
        with pytest.raises(KeyError):
            module(torch.randn(3, 2)).sum().backward()
        assert not is_checkpointing()
        assert not is_recomputing()
        assert module.net.track_running_stats
        assert torch.is_grad_enabled()
        assert torch.is_autocast_cache_enabled()
    module.fail = "never"
    module(torch.randn(3, 2)).sum().backward()


def test_nested_wrappers() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = block(), block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x))

    plain, other = both(Outer)
    checkpoint_wrapper(other.a)
    checkpoint_wrapper(other.b, True)
    checkpoint_wrapper(other)  # once more
    for step in range(2):
        for model in (plain, other):
            torch.manual_seed(step)
            model(torch.randn(5, 4)).square().sum().backward()
    same_grads(plain, other)
    same_buffers(plain, other)
    assert all(m.track_running_stats for m in other.modules() if isinstance(m, nn.BatchNorm1d))


def test_several_forwards_before_backwards_and_one_without() -> None:
    plain, other = both()
    for model in (plain, other):
        torch.manual_seed(3)
        first, second = model(torch.randn(5, 4)), model(torch.randn(5, 4))
        model(torch.randn(5, 4))
        with torch.no_grad():
            model(torch.randn(5, 4))
        first.sum().backward(retain_graph=True)
        first.sum().backward()
        second.sum().backward()
        model.eval()(torch.randn(5, 4)).sum().backward()
    same_grads(plain, other)
    same_buffers(plain, other)


def test_frozen_modules() -> None:
    plain, other = both()
    for model in (plain, other):
        model.requires_grad_(False)
    assert not other(torch.randn(5, 4)).requires_grad
    for model in (plain, other):
        torch.manual_seed(0)
        x = torch.randn(5, 4, requires_grad=True)
        model(x).sum().backward()
        assert x.grad is not None
    same_grads(plain, other)


@pytest.mark.parametrize("train", [True, False])
def test_running_statistics_of_all_kinds_of_norms(train: bool) -> None:
    """They are what one forward makes of them; those of instance norms were updated in the second run too."""

    def norms() -> nn.Sequential:
        kinds = [
            nn.BatchNorm1d(4),
            nn.BatchNorm1d(4, momentum=None),
            nn.BatchNorm1d(4, track_running_stats=False),
        ]
        more = [
            nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
            nn.InstanceNorm1d(4),
            nn.GroupNorm(2, 4),
        ]
        return nn.Sequential(nn.Conv1d(4, 4, 1), *kinds, *more).train(train)

    plain, other = both(norms)
    for step in range(3):
        for model in (plain, other):
            torch.manual_seed(step)
            model(torch.randn(5, 4, 3)).square().sum().backward()
        same_buffers(plain, other)
    same_grads(plain, other)
    assert all(
        getattr(a, "momentum", 0) == getattr(b, "momentum", 0) for a, b in zip(plain, other, strict=True)
    )


def test_batch_norms_that_are_to_be_left_alone() -> None:
    net = block()
    net[1].disable_patch_batchnorm = True
    assert patch_batchnorm(net) == []
    del net[1].disable_patch_batchnorm
    handles = patch_batchnorm(net)
    assert len(handles) == 2
    assert patch_batchnorm(net) == []
    for handle in handles:
        handle.remove()
    assert not net[1]._forward_hooks


@pytest.mark.parametrize("shared", [False, True])
def test_autocast_is_the_same_both_times(shared: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
            self.b = nn.Linear(4, 4)
            if shared:
                self.b.weight = self.a[0].weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x))

    torch.manual_seed(0)
    plain = Model()
    other = copy.deepcopy(plain)
    checkpoint_wrapper(other.a)
    x = torch.randn(8, 4)
    for model in (plain, other):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
        assert out.dtype == torch.bfloat16
        out.float().sum().backward()
    for p, q in zip(plain.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=2e-2, atol=1e-2)

    # And autocast in backward only changes nothing.
    out = other(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out.sum().backward()


def test_autograd_grad_is_refused_clearly() -> None:
    module = checkpoint_wrapper(nn.Linear(2, 2))
    x = torch.ones(1, 2, requires_grad=True)
    with pytest.raises(LifecycleError, match="disable_checkpointing"):
        torch.autograd.grad(module(x).sum(), x)
    with disable_checkpointing():
        torch.autograd.grad(module(x).sum(), x)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_checkpoint_themselves(how: str) -> None:
    module = nn.Sequential(checkpoint_wrapper(Watching()))
    made = copy.deepcopy(module) if how == "deepcopy" else pickle.loads(pickle.dumps(module))
    with torch.no_grad():
        made[0].net.weight.zero_()
        made[0].net.bias.fill_(7)
    assert made(torch.ones(1, 2)).tolist() == [[7, 7]]
    assert made[0].seen == [(True, False, False)]
    assert module[0].seen == []
    del module
    gc.collect()
    made(torch.ones(1, 2)).sum().backward()
    assert made[0].net.bias.grad is not None


def test_a_forward_of_the_instance_is_kept() -> None:
    module = Watching()
    module.forward = lambda x: module.net(x) * 2  # type: ignore[method-assign]
    expected = module(torch.ones(1, 2))
    checkpoint_wrapper(checkpoint_wrapper(module))
    assert torch.equal(module(torch.ones(1, 2)), expected)


@pytest.mark.parametrize("order", ["inside", "outside", "part"])
def test_with_flattened_parameters(order: str) -> None:
    plain, other = both()
    flat: nn.Module
    if order == "outside":
        flat = checkpoint_wrapper(FlattenParamsWrapper(copy.deepcopy(plain)))
    elif order == "inside":
        flat = FlattenParamsWrapper(other)
    else:
        inner = copy.deepcopy(plain)
        checkpoint_wrapper(inner[0])
        flat = FlattenParamsWrapper(inner)
    for model in (plain, flat):
        torch.manual_seed(0)
        model(torch.randn(5, 4)).square().sum().backward()
    views = flat.get_param_views([p.grad for p in flat.flat_params])
    for grad, param in zip(views, plain.parameters(), strict=True):
        torch.testing.assert_close(grad, param.grad)
    copy.deepcopy(flat)(torch.randn(5, 4)).sum().backward()


def test_parameters_that_no_module_lists() -> None:
    """Their gradients arrive too; fairscale's results don't require any."""

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = [nn.Parameter(torch.ones(2))]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.hidden[0]

    module = checkpoint_wrapper(Hidden())
    module(torch.ones(2)).sum().backward()
    assert module.hidden[0].grad is not None


def test_offloaded_inputs_are_on_the_host() -> None:
    """On a device without storage of its own (meta), so that copies to the host would be seen."""
    copies: list[torch.device] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func is torch.ops.aten._to_copy.default:
                copies.append(kwargs["device"])
                return torch.empty(args[0].shape, device=kwargs["device"])
            return func(*args, **kwargs)

    with torch.device("meta"):
        module = checkpoint_wrapper(nn.Linear(2, 2), offload_to_cpu=True)
        x = torch.ones(1, 2, requires_grad=True)
    with Watch():
        module(x).sum().backward()
    assert [c.type for c in copies] == ["cpu", "meta"]


def test_compiled() -> None:
    plain, other = both(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    compiled: Any = torch.compile(other, backend="eager")
    x = torch.randn(2, 4)
    for model in (plain, compiled):
        model(x).sum().backward()
    same_grads(plain, other)
    torch._dynamo.reset()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("offload", [False, True])
def test_on_cuda(offload: bool) -> None:
    plain, other = both(offload=offload)
    plain.cuda()
    other.cuda()
    for step in range(2):
        for model in (plain, other):
            torch.manual_seed(step)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                out = model(torch.randn(5, 4, device="cuda"))
            out.float().square().sum().backward()
    for p, q in zip(plain.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=2e-2, atol=1e-2)
    same_buffers(plain, other)
