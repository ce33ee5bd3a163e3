"""What torch's own tests of FSDP2 look at, on torch's FSDP2 and here: the same programs give the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.tensor import DTensor

from shardkit import fully_shard
from tests.fsdp.test_torch_words import Net, loss_of
from tests.pools import on_ranks

Shards = Callable[..., Any]


def sharded(shards: Shards, model: Any, **words: Any) -> Any:
    for layer in model.layers:
        shards(layer, **words)
    return shards(model, **words)


def gradients(model: nn.Module) -> list[Any]:
    return [None if p.grad is None else cast("DTensor", p.grad).full_tensor() for p in model.parameters()]


def tied(shards: Shards, rank: int) -> Iterator[object]:
    for reshard in (True, False, None):
        model = Net()
        model.output.weight = model.words.weight
        sharded(shards, model, reshard_after_forward=reshard)
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        for step in range(3):
            loss = loss_of(model, rank, step)
            loss.backward()
            yield loss.detach(), gradients(model), sorted(model.state_dict())
            optimizer.step()
            optimizer.zero_grad()


def several_forwards(shards: Shards, rank: int) -> Iterator[object]:
    """Before a backward through all, before backwards in either order, and of a module inside by itself."""
    for reshard in (True, False):
        model = sharded(shards, Net(), reshard_after_forward=reshard)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(4):
            losses = [loss_of(model, rank, step + 10 * k) for k in range(3)]
            if step == 3:
                losses.append(model.layers[1](torch.full((2, 6), 0.1 + rank)).square().mean())
            summed = [torch.stack(losses).sum()]
            for loss in (losses, losses[::-1], summed, summed)[step]:
                loss.backward()
            yield torch.stack(losses).detach(), gradients(model)
            optimizer.step()
            optimizer.zero_grad()


def accumulated(shards: Shards, rank: int) -> Iterator[object]:
    """With gradient synchronization off for all units, for some, or the root alone, and memory kept or given back."""
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for reshard, back, which, policy in product(
        (True, False), (True, False), ("all", "some", "root"), (MixedPrecisionPolicy(), low)
    ):
        model: Any = sharded(shards, Net(), reshard_after_forward=reshard, mp_policy=policy)
        for micro in range(3):
            is_last = micro == 2
            for unit in model.layers[:2] if which == "some" else (model,):
                unit.set_requires_gradient_sync(is_last, recurse=which != "root")
            model.set_is_last_backward(is_last)
            model.set_reshard_after_backward(is_last or back)
            (loss_of(model, rank, micro) / 3).backward()
        yield gradients(model)


def in_dtypes(shards: Shards, rank: int) -> Iterator[object]:
    """What forward sees and gives, and gradients, for all dtypes that a policy names."""
    low, full = torch.bfloat16, torch.float32
    seen: list[torch.dtype] = []

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.inside = nn.Linear(5, 5)
            self.register_buffer("shift", torch.ones(5))

        def forward(self, x: torch.Tensor, *, also: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            seen[:] = [x.dtype, also["x"].dtype, self.inside.weight.dtype, self.get_buffer("shift").dtype]
            x = self.inside(x.to(self.inside.weight.dtype))
            return {"x": x + self.get_buffer("shift").to(x.dtype), "number": torch.ones(2, dtype=torch.long)}

    for computed, reduced, given, casts in product(
        (low, None), (None, full, low), (None, full), (True, False)
    ):
        model = shards(Module(), mp_policy=MixedPrecisionPolicy(computed, reduced, given, casts))
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))
        outputs = model(x, also={"x": x.double()})
        outputs["x"].float().square().mean().backward()
        kinds = [*seen, outputs["x"].dtype, outputs["number"].dtype]
        yield kinds, [p.grad.dtype for p in model.parameters()], gradients(model)


class Point(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclass
class Outputs:
    x: torch.Tensor
    others: dict[str, torch.Tensor]


OUTPUTS: dict[str, tuple[Callable[..., Any], Callable[[Any], torch.Tensor]]] = {
    "with others": (lambda x, y, z: (y, None, "name", 3), lambda o: o[0]),
    "nested": (lambda x, y, z: {"y": y, "z": [z, {"q": y * 2}]}, lambda o: o["y"] + o["z"][1]["q"].square()),
    "dataclass": (lambda x, y, z: Outputs(y, {"z": z}), lambda o: o.x + o.others["z"]),
    "named tuple": (lambda x, y, z: Point(y, z), lambda o: o.x * o.y),
    "detached": (lambda x, y, z: (y, z.detach()), lambda o: o[0]),
    "unused": (lambda x, y, z: (y, z), lambda o: o[1]),
    "an input": (lambda x, y, z: (x, y), lambda o: o[0] * 2),
    "views": (lambda x, y, z: (y[0], y.t()), lambda o: o[0].sum() + o[1].square()),
}


def returned(shards: Shards, rank: int) -> Iterator[object]:
    class Module(nn.Module):
        def __init__(self, made: Callable[..., Any]) -> None:
            super().__init__()
            self.first, self.second, self.made = nn.Linear(4, 4), nn.Linear(4, 4), made

        def forward(self, x: torch.Tensor) -> Any:
            return self.made(x, self.first(x), self.second(x))

    for (made, used), reshard in product(OUTPUTS.values(), (True, False)):
        if made is OUTPUTS["dataclass"][0] and torch.__version__ < "2.13":
            continue  # FSDP2 looked for tensors in none
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(4, 4), Module(made))
        shards(model[1], reshard_after_forward=reshard)
        shards(model, reshard_after_forward=reshard)
        for step in range(2):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank + step))
            outputs = model(x)
            used(outputs).square().mean().backward()
            yield type(outputs).__name__, gradients(model)


# bf16 may round sums of another order otherwise
SUBJECTS = {tied: 5e-6, several_forwards: 5e-6, accumulated: 2e-3, in_dtypes: 2e-3, returned: 5e-6}


def check(ours: Any, theirs: Any, atol: float) -> None:
    if isinstance(ours, torch.Tensor):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)
    elif isinstance(ours, (list, tuple)):
        for one, other in zip(ours, theirs, strict=True):
            check(one, other, atol)
    else:
        assert ours == theirs


@pytest.mark.parametrize("subject", SUBJECTS)
@on_ranks(2)
def test_the_same_program(rank: int, subject: Callable[[Shards, int], Iterator[object]]) -> None:
    """A program of the kind that torch's own tests have gives FSDP2's numbers."""
    for ours, theirs in zip(subject(fully_shard, rank), subject(torchs_fully_shard, rank), strict=True):
        check(ours, theirs, SUBJECTS[subject])
