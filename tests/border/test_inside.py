"""Modules inside of an FSDP module, asked themselves; methods, attributes and items through the wrapper."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardkit import FSDP, PrecisionPolicy, fully_shard
from shardkit.errors import LifecycleError
from tests.beside import assert_same, mean_square, reread, steps_beside, train_beside
from tests.border.strategies import GLOO, batch, loss_of, make_model, wrapped
from tests.doors import through
from tests.fsdp_models import build
from tests.pools import on_ranks


class Net(nn.Module):
    """Uneven sizes, a unit inside, weights tied over both, and methods that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 7)
        self.blocks = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7, bias=False)])
        self.head = nn.Linear(7, 3)
        self.blocks[1].weight = self.blocks[0].weight

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.parameters() if p.is_floating_point())

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Not forward, and with parameters of the root's own."""
        x = self.embed(x.to(self.device, self.dtype))
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encode(x))

    @torch.no_grad()
    def generate(self, x: torch.Tensor, steps: int = 3) -> torch.Tensor:
        """Calls itself again and again."""
        for _ in range(steps):
            x = torch.cat([x[:, 3:], self(x)], 1)
        return x

    def describe(self) -> int:
        """Computes nothing."""
        return sum(p.numel() for p in self.parameters())

    def saved(self) -> dict[str, torch.Tensor]:
        """As ``save_pretrained``."""
        return self.state_dict()


def plain() -> Net:
    torch.manual_seed(0)
    return Net()


def units(flatten: bool = True, nested: bool = True, **options: Any) -> FSDP:
    model = plain()
    if nested:
        model.blocks[0] = FSDP(model.blocks[0], flatten=flatten, **options)
    return FSDP(model, flatten=flatten, **options)


LAYOUTS = [(True, True), (True, False), (False, True), (False, False)]


def train(
    model: nn.Module, truth: nn.Module, rank: int, world: int, call: Callable[..., torch.Tensor]
) -> None:
    """Three steps of each."""
    optimizers = [
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
        for m in (model, truth)
    ]
    steps_beside(
        rank, world, model, truth, lambda m, r, step: call(m, batch(r, step)).pow(2).sum(), optimizers
    )


# ------------------------------------------------------------------------------------ methods
@pytest.mark.parametrize(("nested", "flatten"), LAYOUTS)
@on_ranks(1, 2, 3)
def test_methods_through_the_wrapper(rank: int, world_size: int, nested: bool, flatten: bool) -> None:
    model, truth = units(flatten, nested), plain()
    torch.testing.assert_close(model.generate(batch(rank)), truth.generate(batch(rank)), rtol=0, atol=1e-6)
    train(model, truth, rank, world_size, lambda m, x: m.encode(x))
    assert_same(model, truth, rtol=0, atol=1e-6)
    train(model, truth, rank, world_size, lambda m, x: m(x))  # and forward after that
    assert_same(model, truth, rtol=0, atol=1e-6)
    torch.testing.assert_close(
        model.generate(batch(0), steps=2), truth.generate(batch(0), steps=2), rtol=0, atol=1e-6
    )
    saved = model.saved()
    assert list(saved) == list(truth.state_dict())
    for name, value in truth.state_dict().items():
        torch.testing.assert_close(saved[name], value, rtol=0, atol=1e-6)
    if rank == 0:  # computes nothing, so that other ranks need not
        model.describe()


@on_ranks(2)
def test_a_method_that_raises(rank: int) -> None:
    model, truth = units(), plain()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model.encode(torch.ones(2, 4))
    train(model, truth, rank, 2, lambda m, x: m.encode(x))
    assert_same(model, truth, rtol=0, atol=1e-6)
    assert model.generate.__name__ == "generate"
    twin = fully_shard(plain())
    hook = twin.register_forward_pre_hook(lambda *_: 1 // 0, prepend=True)  # before the unit's own
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ZeroDivisionError):
            twin(batch(rank))
    hook.remove()
    torch.testing.assert_close(twin(batch(rank)), plain()(batch(rank)), rtol=0, atol=1e-6)


# ------------------------------------------------------------------------------------ asked themselves
@on_ranks(2)
def test_modules_inside_list_what_they_were_written_with(rank: int) -> None:
    truth = plain()
    names = [n for n, _ in truth.named_parameters()]
    for nested in (True, False):
        model = units(nested=nested)
        inner: Any = model.module
        assert (inner.device, inner.dtype) == (truth.device, truth.dtype)
        assert model.describe() == truth.describe()
        assert [n for n, _ in inner.named_parameters()] == names
        assert [n for n, _ in inner.named_parameters("a")] == [f"a.{n}" for n in names]
        assert [n for n, _ in inner.head.named_parameters()] == ["weight", "bias"]
        assert [n for n, _ in inner.named_parameters(recurse=False)] == []
        assert dict(inner.named_modules()).keys() == dict(truth.named_modules()).keys()
        assert [tuple(p.shape) for p in inner.parameters()] == [tuple(p.shape) for p in truth.parameters()]
        # what is around sees shards alone
        assert all("flat_param" in n for n, _ in model.named_parameters())
        assert len(list(nn.Sequential(model).parameters())) == 1 + nested
        with model.summon_full_params():
            assert [n for n, _ in inner.named_parameters()] == names
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            first = next(iter(twin.module.head.parameters()))
            assert first is twin.module.head.weight
            assert [n for n, _ in twin.module.named_parameters()] == names
            assert_same(twin, truth, rtol=0, atol=0)
        with model.summon_full_params():
            alone = copy.deepcopy(inner.head)
        assert next(alone.parameters()) is alone.weight
        alone.load_state_dict(alone.state_dict())


@pytest.mark.parametrize("how", ["module", "loop"])
@on_ranks(1, 2, 3)
def test_freezing_through_modules_inside(rank: int, world_size: int, how: str) -> None:
    model, truth = units(), plain()
    for m in (model.module, truth):
        if how == "module":
            m.head.requires_grad_(False)
            m.blocks.requires_grad_(False)
        else:
            for name, p in m.named_parameters():
                p.requires_grad = not name.startswith(("head", "blocks.0"))
    train(model, truth, rank, world_size, lambda m, x: m(x))
    assert_same(model, truth, rtol=0, atol=1e-6)
    torch.testing.assert_close(model.module.head.bias.requires_grad, False)


@pytest.mark.parametrize("flatten", [True, False])
@on_ranks(1, 2)
def test_state_dicts_of_modules_inside_are_refused(rank: int, world_size: int, flatten: bool) -> None:
    model, truth = units(flatten), plain()
    inner: Any = model.module
    values = truth.state_dict()
    if flatten or world_size > 1:
        for m in (inner, inner.head, nn.Sequential(inner)):
            with pytest.raises(LifecycleError, match=r"state_dict\(\) of a .* inside of an FSDP module"):
                m.state_dict()
        with pytest.raises(LifecycleError, match="sharded over"):
            inner.load_state_dict(values, strict=False)
        with pytest.raises(LifecycleError, match="sharded over"):
            inner.head.load_state_dict(truth.head.state_dict())
    with model.summon_full_params():
        assert list(inner.state_dict()) == list(values)
        inner.head.load_state_dict({n: v * 2 for n, v in truth.head.state_dict().items()})
    torch.testing.assert_close(model.state_dict()["head.weight"], values["head.weight"] * 2)
    model.load_local_state_dict(model.local_state_dict())
    around = nn.Sequential(model)
    around.load_state_dict({f"0.{n}": v for n, v in values.items()})
    assert_same(model, truth, rtol=0, atol=0)


@on_ranks(2)
def test_dtype_in_forward_is_that_of_compute(rank: int) -> None:
    model = units(precision=PrecisionPolicy(compute=torch.bfloat16))
    assert model(batch(rank)).dtype == torch.bfloat16


class Penalized(nn.Module):
    """Looks at its own parameters while it computes: at their dtype, and (again in backward) at their norms."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def _penalty(self, x: torch.Tensor) -> torch.Tensor:
        norms = [p.norm() for p in self.layer.parameters()]
        return torch.tanh(self.layer(x)) * torch.stack([*norms, *norms]).sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(next(self.parameters()).dtype)
        assert self.layer.weight.dtype == x.dtype
        out: torch.Tensor = checkpoint(self._penalty, x, use_reentrant=False)
        return out


def _in_units(how: str, precision: PrecisionPolicy) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(Penalized(), Penalized())
    return through(how, model, "0", "1", precision=precision)


@pytest.mark.parametrize("how", ["FSDP", "unflattened", "fully_shard", "dtensors"])
@on_ranks(2, 3)
def test_a_module_that_computes_lists_what_it_computes_with(rank: int, world_size: int, how: str) -> None:
    """Also where the computation is run again in backward; before and after, shards."""
    torch.manual_seed(0)
    truth, model = nn.Sequential(Penalized(), Penalized()), _in_units(how, PrecisionPolicy())
    listed = list(map(id, model.parameters()))
    train_beside(rank, world_size, model, truth, lambda m, r, step: m(batch(r, step)).square().mean())
    kept = model(batch(rank))  # the root is gathered until backward
    assert list(map(id, model.parameters())) == listed
    kept.sum().backward()
    copied = copy.deepcopy(model)
    assert_same(copied, model)
    torch.testing.assert_close(copied(batch(rank)), model(batch(rank)))
    assert _in_units(how, PrecisionPolicy(compute=torch.bfloat16))(batch(rank)).dtype == torch.bfloat16


# ------------------------------------------------------------------------------------ containers
@on_ranks(2)
def test_containers(rank: int) -> None:
    layers = [nn.Linear(2, 2), nn.ReLU()]
    row, table = FSDP(nn.Sequential(*layers)), FSDP(nn.ModuleDict({"a": nn.Linear(2, 2)}))
    assert len(row) == 2
    assert list(row) == layers
    assert list(reversed(row)) == layers[::-1]
    assert row[-1] is layers[1]
    assert isinstance(row[:1], nn.Sequential)
    assert layers[0] in row
    assert "a" in table
    assert "b" not in table
    assert list(table) == ["a"]
    row[1] = nn.Tanh()
    assert isinstance(row.module[1], nn.Tanh)  # type: ignore[index]
    linear = FSDP(nn.Linear(2, 2))
    assert linear
    for wrong in (len, iter, lambda m: 0 in m):
        with pytest.raises(TypeError, match="Linear"):
            wrong(linear)


@on_ranks(1, 2, (2, "simulated"))
def test_modules_inside_are_not_moved_alone(rank: int) -> None:
    model: Any = FSDP(nn.Sequential(FSDP(nn.Linear(5, 7)), nn.Tanh(), nn.Linear(7, 3)))
    for inner in (model.module, model.module[2]):
        inner.float()  # nothing to do
        inner.to("cpu")
        with pytest.raises(
            LifecycleError, match=r"Linear inside of an FSDP module can't be moved or cast by itself"
        ):
            inner.double()
    twin = copy.deepcopy(model)
    for m in (model, twin):
        m.double()
        m(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
        assert {p.dtype for p in m.parameters()} == {torch.float64}
    with model.summon_full_params():
        model.module[2].to(torch.float64)


@on_ranks(2)
def test_copies_keep_their_groups_and_pickles_do_not(rank: int) -> None:
    import torch.distributed as dist

    from shardkit.errors import ConfigurationError

    alone = [dist.new_group([r]) for r in range(2)][rank]
    model, truth = FSDP(plain(), group=alone), plain()
    twin = copy.deepcopy(model)
    for step in range(2):
        for m, batches in ((twin, [rank]), (truth, [rank])):
            m.zero_grad()
            torch.stack([m(batch(r, step)).pow(2).sum() for r in batches]).mean().backward()
            torch.optim.SGD(m.parameters(), lr=0.1).step()
    assert_same(twin, truth, rtol=0, atol=1e-6)
    file = pickle.dumps(model)
    with pytest.raises(ConfigurationError, match="a shard of 1 and is loaded by 2 ranks"):
        pickle.loads(file)
    hybrid = FSDP(plain(), group=alone, replicas=dist.group.WORLD)
    with pytest.raises(ConfigurationError, match="replicas can't be pickled"):
        pickle.dumps(hybrid)
    twin, truth = copy.deepcopy(hybrid), plain()
    train(twin, truth, rank, 2, lambda m, x: m(x))
    assert_same(twin, truth, rtol=0, atol=1e-6)


# ------------ Gradients, dtypes and files of a module inside of a unit: its values and gradients are
# elsewhere, on all ranks.
@on_ranks(*GLOO)
def test_reduced_gradients_are_not_taken_for_none(rank: int, world_size: int) -> None:
    for strategy in ("fsdp", "units"):  # without flattening, modules inside list the shards
        model = wrapped(strategy, make_model())
        inner: nn.Module = model.module  # type: ignore[assignment]
        assert inner[0].weight.grad is None  # type: ignore[index]
        loss_of(model, rank).backward()
        for module in (inner, inner[0]):  # type: ignore[index]
            with pytest.raises(LifecycleError, match=r"gradient of parameter .*reduced.*parameters\(\)"):
                nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            for param in module.parameters():
                with pytest.raises(LifecycleError, match="reduced"):  # it would clear nothing
                    param.grad = None
        assert nn.utils.clip_grad_norm_(model.parameters(), 0.1) > 0.1
        if strategy == "fsdp":  # a part of the one shard
            with pytest.raises(LifecycleError, match="reduced"):
                inner[0].zero_grad()  # type: ignore[index]
        inner.zero_grad()  # all of it, as Lightning does that holds the module inside
        assert inner[0].weight.grad is None  # type: ignore[index]
        assert all(p.grad is None for p in model.parameters())


@on_ranks(2)
def test_an_inner_module_from_a_file_says_that_it_has_no_values(rank: int, world_size: int) -> None:
    model = FSDP(make_model())
    inner: nn.Module = model.module  # type: ignore[assignment]
    for copied in (reread(inner, weights_only=False), pickle.loads(pickle.dumps(inner))):
        with pytest.raises(LifecycleError, match=r"weight'.*without the FSDP module"):
            copied.state_dict()
        with pytest.raises(LifecycleError, match="without the FSDP module"):
            copied.load_state_dict(make_model().state_dict())


class Interrupted(nn.Linear):
    """Is interrupted where it is told to be."""

    is_due = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_due:
            self.is_due = False
            raise KeyboardInterrupt
        return super().forward(x)


@pytest.mark.parametrize("dtensors", [False, True])
@on_ranks(1, 2, 3)
def test_an_interrupted_forward(rank: int, world_size: int, dtensors: bool) -> None:
    """What is called, saved or trained next is right: torch calls no hooks of modules after KeyboardInterrupt."""
    plain, model = (build(lambda: nn.Sequential(nn.Linear(6, 5), Interrupted(5, 6))) for _ in range(2))
    for unit in (*model, model):
        fully_shard(unit, dtensors=dtensors)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain)]

    def interrupt(*called: nn.Module) -> None:
        for unit in called:
            model[1].is_due = True
            with pytest.raises(KeyboardInterrupt):
                unit(torch.ones(2, 6 if unit is model else 5))

    for step in range(2):
        interrupt(model)
        assert_same(model, plain)
        interrupt(model, model[1], model)
        with torch.no_grad():
            torch.testing.assert_close(model(torch.ones(2, 6)), plain(torch.ones(2, 6)))
        interrupt(model[1])
        mean_square(model, rank, step).backward()
        interrupt(model)
        model.zero_grad()  # of what is listed again, though nothing was called since
        assert all(p.grad is None for p in optimizers[0].param_groups[0]["params"])
        steps_beside(rank, world_size, model, plain, mean_square, optimizers, [step])
    assert_same(model, plain)


class Catching(nn.Module):
    """Catches an interrupt of its middle layer, and goes on without it or calls it again."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 5), Interrupted(5, 5), nn.Linear(5, 6)
        self.again = again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        try:
            return self.last(self.middle(x))  # type: ignore[no-any-return]
        except KeyboardInterrupt:
            return self.last(self.middle(x) if self.again else x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("door", ["FSDP", "fully_shard", "dtensors"])
@on_ranks(1, 2, 3)
def test_an_interrupt_that_an_outer_forward_catches(
    rank: int, world_size: int, door: str, again: bool
) -> None:
    """Without gradients and with, in steps before and after others."""
    plain, inner = (build(lambda: Catching(again)) for _ in range(2))
    middle = inner.middle
    model = through(door, inner, "first", "middle", "last")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain)]
    for step in range(4):
        for layer in (middle, plain.middle):
            layer.is_due = step % 2 == 0
        with torch.no_grad():
            torch.testing.assert_close(model(torch.ones(2, 6)), plain(torch.ones(2, 6)))
        middle.is_due = step > 1
        mean_square(model, rank, step).backward()
        for other in range(world_size):
            plain.middle.is_due = step > 1
            (mean_square(plain, other, step) / world_size).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(model, plain)


@pytest.mark.parametrize("door", ["FSDP", "fully_shard", "dtensors"])
@pytest.mark.parametrize("with_gradients", [False, True])
@on_ranks(1, 2, 3)
def test_an_interrupt_of_a_unit_that_is_its_own_root(
    rank: int, world_size: int, door: str, with_gradients: bool
) -> None:
    """It is called before the module around it was, and next as a part of that."""
    plain, inner = (build(lambda: Catching(True)) for _ in range(2))
    middle = inner.middle
    model = through(door, inner, "first", "middle", "last")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain)]
    for step in range(3):
        with torch.set_grad_enabled(with_gradients):
            middle.is_due = True
            with pytest.raises(KeyboardInterrupt):
                inner.middle(torch.ones(2, 5))
        steps_beside(rank, world_size, model, plain, mean_square, optimizers, [step])
        assert_same(model, plain)
