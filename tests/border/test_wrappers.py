"""Wrappers around wrappers, and what is put into a module after it was wrapped: right, or refused on all ranks."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils import parametrizations, prune

from shardkit import (
    FSDP,
    OSS,
    Compression,
    OffloadPolicy,
    PrecisionPolicy,
    ReducePolicy,
    ShardedDDP,
    fully_shard,
)
from shardkit.backend import get_backend
from shardkit.errors import ConfigurationError, ShardkitError
from shardkit.nn import FullyShardedDataParallel, ShardedDataParallel
from tests.beside import train_beside
from tests.border.strategies import batch, needs_xla
from tests.doors import linears, through
from tests.pools import on_ranks

plain = partial(linears, 5, 7, 5)


def units(**options: Any) -> FSDP:
    """The model as a root with a unit inside."""
    return through("FSDP", plain(), "2", **options)  # type: ignore[no-any-return]


def sharded_ddp(model: nn.Module) -> ShardedDDP:
    """With an optimizer of its own."""
    return ShardedDDP(model, OSS(model.parameters(), torch.optim.SGD, lr=0.1))


def fsdp1(module: nn.Module) -> nn.Module:
    """Torch's first FSDP."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(module, device_id=torch.device("cpu"))


def fsdp2(module: nn.Module) -> nn.Module:
    """Torch's second FSDP."""
    from torch.distributed.fsdp import fully_shard

    return fully_shard(module)  # type: ignore[return-value]


def distributed(module: nn.Module) -> nn.Module:
    """Parameters are DTensors."""
    from torch.distributed.tensor import distribute_module, init_device_mesh

    return distribute_module(module, init_device_mesh("cpu", (dist.get_world_size(),)))


def replicated(module: nn.Module) -> nn.Module:
    """Torch's wrapper without a wrapper, around a list of parameters."""
    return DistributedDataParallel(nn.ParameterList(list(module.parameters())))


def with_wrapped_layer(wrap: Callable[[nn.Module], nn.Module] = FSDP) -> nn.Sequential:
    """Only the last layer is wrapped."""
    model = plain()
    model[2] = wrap(model[2])
    return model


NESTED: dict[str, Callable[[], Any]] = {
    "DDP of FSDP": lambda: DistributedDataParallel(units()),
    "DDP of FSDP, not flat": lambda: DistributedDataParallel(units(flatten=False)),
    "DDP of a part": lambda: DistributedDataParallel(with_wrapped_layer()),
    "DDP of shards": lambda: replicated(units()),
    "DDP of DTensors": lambda: DistributedDataParallel(fully_shard(plain(), dtensors=True)),
    "DDP of ShardedDDP": lambda: DistributedDataParallel(sharded_ddp(plain())),
    "DataParallel of FSDP": lambda: DataParallel(units()),
    "FSDP1 of FSDP": lambda: fsdp1(units()),
    "FSDP1 of a part": lambda: fsdp1(with_wrapped_layer()),
    "FSDP2 of FSDP": lambda: fsdp2(units()),
    "FSDP2 of a part": lambda: fsdp2(with_wrapped_layer()),
    "FSDP of DDP": lambda: FSDP(DistributedDataParallel(plain())),
    "FSDP of a DDP part": lambda: FSDP(with_wrapped_layer(DistributedDataParallel)),
    "FSDP of ShardedDDP": lambda: FSDP(sharded_ddp(plain())),
    "FSDP of FSDP1": lambda: FSDP(fsdp1(plain())),
    "FSDP of an FSDP2 part": lambda: FSDP(with_wrapped_layer(fsdp2)),
    "FSDP of DTensors": lambda: FSDP(distributed(plain())),
    "ShardedDDP of DDP": lambda: sharded_ddp(DistributedDataParallel(plain())),
    "ShardedDDP of FSDP": lambda: sharded_ddp(units()),
    "ShardedDDP of FSDP, with another OSS": lambda: ShardedDDP(units(), OSS(plain().parameters(), lr=0.1)),
    "ShardedDDP of an FSDP part": lambda: sharded_ddp(with_wrapped_layer()),
    "ShardedDDP of DTensors": lambda: sharded_ddp(fully_shard(plain(), dtensors=True)),
    "ShardedDDP of others' DTensors": lambda: sharded_ddp(distributed(plain())),
    "ShardedDDP of ShardedDDP": lambda: sharded_ddp(sharded_ddp(plain())),
}


def _refused(rank: int, cases: dict[str, Callable[[], Any]], error: type[Exception]) -> dict[str, str]:
    """What each case came to; the text of an error of this type, else what happened instead."""
    seen = {}
    for name, case in cases.items():
        try:
            case()
            seen[name] = "nothing was raised"
        except error as e:
            seen[name] = f"refused: {e}"
        except Exception as e:
            seen[name] = f"{type(e).__name__}: {e}"
    return seen


@on_ranks(1, 2, 3)
def test_wrappers_refuse_each_other(rank: int) -> None:
    seen = _refused(rank, NESTED, ShardkitError)
    assert {n: s for n, s in seen.items() if not s.startswith("refused: ")} == {}
    for name in ("DDP of FSDP", "DDP of a part", "DDP of ShardedDDP"):
        assert "DistributedDataParallel can't wrap" in seen[name], seen[name]
        assert "prepare_model(model, evaluation_mode=True)" in seen[name], seen[name]
    assert "its part '2' is a torch.nn.parallel.DistributedDataParallel" in seen["FSDP of a DDP part"]
    assert "it is a FSDP, which" in seen["ShardedDDP of FSDP, with another OSS"]


@on_ranks(2)
def test_a_refused_wrapper_leaves_the_shards_alone(rank: int) -> None:
    model = units()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ConfigurationError):
        DistributedDataParallel(model)
    assert all(map(torch.equal, before, model.parameters()))


@on_ranks(2, 3)
def test_ddp_that_ignores_the_shards_takes_the_rest(rank: int) -> None:
    """DDP averages the first layer, FSDP the last: names that DDP is told to ignore are nobody else's business."""
    world = dist.get_world_size()
    model, truth = with_wrapped_layer(), plain()
    last: Any = model[2]
    names = [n for path, m in last.named_modules(prefix="2") for n, _ in m.named_parameters(path, False)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    wrapped = DistributedDataParallel(model)
    train_beside(rank, world, wrapped, truth, lambda m, r, step: m(batch(r, step)).pow(2).sum())


def _last(model: FSDP) -> Any:
    return model.module[2].module  # type: ignore[index]


def _summoned(change: Callable[[FSDP], Any]) -> Callable[[FSDP], Any]:
    def run(model: FSDP) -> None:
        with model.summon_full_params():
            change(model)

    return run


def _with_more(model: FSDP) -> nn.Sequential:
    model.module.more = nn.Sequential()
    return model.module.more


CHANGES: dict[str, Callable[[FSDP], Any]] = {
    "parameter": lambda m: m.module.register_parameter("extra", nn.Parameter(torch.ones(3))),
    "attribute": lambda m: setattr(m.module[0], "scale", nn.Parameter(torch.ones(3))),
    "other weight": lambda m: setattr(m.module[0], "weight", nn.Parameter(torch.ones(7, 5))),
    "module": lambda m: setattr(m.module, "head", nn.Linear(2, 2)),
    "appended": lambda m: m.append(nn.Linear(5, 5)),
    "item": lambda m: m.module.__setitem__(0, nn.Linear(5, 7)),
    "parameter of the wrapper": lambda m: setattr(m, "extra", nn.Parameter(torch.ones(3))),
    "module of the wrapper": lambda m: setattr(m.module[0], "head", nn.Linear(2, 2)),
    "module of what lists": lambda m: setattr(m._fsdp_wrapped_module, "head", nn.Linear(2, 2)),
    "below what was empty": lambda m: _with_more(m).append(nn.Linear(1, 1)),
    "spectral norm": _summoned(lambda m: parametrizations.spectral_norm(_last(m))),
    "old weight norm": _summoned(lambda m: nn.utils.weight_norm(_last(m))),
    "prune": _summoned(lambda m: prune.l1_unstructured(_last(m), "weight", 0.4)),
}


@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.filterwarnings("ignore::FutureWarning")
@on_ranks(1, 2)
def test_parameters_put_into_a_wrapped_module(rank: int, flatten: bool) -> None:
    cases = {name: (lambda c=change: c(units(flatten=flatten))) for name, change in CHANGES.items()}
    seen = _refused(rank, cases, ConfigurationError)
    assert {n: s for n, s in seen.items() if not s.startswith("refused: ")} == {}
    assert "'extra' is put into a Sequential" in seen["parameter"]


@on_ranks(2)
def test_what_may_be_put_into_a_wrapped_module(rank: int) -> None:
    """Modules without parameters, other values inside of summon, a unit of its own, a tie that is there already."""
    model, truth = units(), plain()
    model.module[1] = truth[1] = nn.ReLU()
    weight = torch.full((7, 5), 0.3)
    with model.summon_full_params():
        model.module[0].weight = nn.Parameter(weight.clone())
    truth[0].weight = nn.Parameter(weight.clone())
    torch.manual_seed(1)
    truth.append(nn.Linear(5, 3))
    torch.manual_seed(1)
    model.module.append(FSDP(nn.Linear(5, 3)))
    train_beside(rank, 2, model, truth, lambda m, r, step: m(batch(r, step)).pow(2).sum(), steps=range(2))
    hooked, truth = FullyShardedDataParallel(plain()), plain()
    for hooks in (hooked.module, truth):
        hooks.register_forward_hook(lambda module, args, outputs: outputs * 2)
    train_beside(rank, 2, hooked, truth, lambda m, r, step: m(batch(r, step)).pow(2).sum(), steps=range(2))
    doors: list[Any] = [partial(FSDP, flatten=False), fully_shard, partial(fully_shard, dtensors=True)]
    for door in doors:
        truth = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
        truth[2].weight = truth[0].weight
        tied: Any = door(copy.deepcopy(truth))
        names = [name for name, _ in tied.named_parameters()]
        tied[2].weight = tied[0].weight
        assert [name for name, _ in tied.to("cpu").named_parameters()] == names
        train_beside(rank, 2, tied, truth, lambda m, r, step: m(batch(r, step)).pow(2).sum(), steps=range(2))


class Named(nn.Module):
    """With parameters that have names, kinds and defaults."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, /, labels: int = 3, *, scale: float = 1.0) -> torch.Tensor:
        outputs: torch.Tensor = self.inner(x) * scale + labels
        return outputs


@on_ranks(2)
def test_forward_has_the_signature_of_the_wrapped_module(rank: int) -> None:
    truth = inspect.signature(Named().forward)
    model = Named()
    wrappers: list[Any] = [ShardedDDP(model, OSS(model.parameters(), lr=0.1)), FSDP(Named())]
    model = Named()
    model.inner = FSDP(model.inner)  # type: ignore[assignment]
    wrappers.append(FSDP(model))
    for wrapper in wrappers:
        assert inspect.signature(wrapper.forward) == truth
        assert inspect.signature(type(wrapper).forward) != truth  # of all of them
        assert wrapper.forward.__self__ is wrapper
        x = torch.ones(1, 2)
        torch.testing.assert_close(wrapper.forward(x, scale=2.0), wrapper(x, 3, scale=2.0))
        wrapper.forward = lambda *args, **kwargs: "mine"  # as libraries do that add to it
        assert wrapper(x) == "mine"


# ------------ Options that would have no effect are refused, not accepted silently.
@on_ranks(2)
def test_options_that_are_the_other_wrappers(rank: int, world_size: int) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ConfigurationError, match="bucket_numel=100 is for ShardedDDP"):
        FSDP(model, reduce=ReducePolicy(bucket_numel=100))
    oss = OSS(model.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(ConfigurationError, match=r"predivide=2.0 is for FSDP"):
        ShardedDDP(model, oss, reduce=ReducePolicy(predivide=2.0))
    # what fairscale takes is taken, and on the host gradients are where they are asked to be
    ShardedDataParallel(model, oss, reduce_buffer_size=100)
    FullyShardedDataParallel(nn.Linear(3, 2), bucket_cap_mb=1, move_grads_to_cpu=True)
    FSDP(nn.Linear(3, 2), offload=OffloadPolicy(gradients=True))


@pytest.mark.xla
@needs_xla
@on_ranks((2, "xla"))
def test_gradients_cannot_be_elsewhere_than_their_parameters(rank: int, world_size: int) -> None:
    model = nn.Linear(3, 2).to(get_backend("xla").device())
    with pytest.raises(ConfigurationError, match="the shards are on xla"):
        FSDP(model, offload=OffloadPolicy(gradients=True))
    for options in (
        {"precision": PrecisionPolicy(compression=Compression())},
        {"reduce": ReducePolicy(compression=Compression())},
    ):
        with pytest.raises(ConfigurationError, match="on xla all ranks run one compiled program"):
            FSDP(model, **options)
    with pytest.raises(ConfigurationError, match="on xla all ranks run one compiled program"):
        ShardedDDP(
            model,
            OSS(model.parameters(), torch.optim.SGD, lr=0.1),
            reduce=ReducePolicy(compression=Compression()),
        )
