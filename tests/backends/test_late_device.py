"""Devices that torch knows through PrivateUse1: one that shardkit has no class for, and one under TorchTPU's rules.

Their streams complete late: what is not waited for has old values (see tests/late_device).
"""

from __future__ import annotations

import copy
import functools
import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardkit import FSDP, OffloadPolicy, fully_shard, sharding_of, torch_fsdp2
from shardkit.backend import get_backend
from shardkit.errors import ConfigurationError, OutOfStepError
from tests.backends import cuda_programs as programs
from tests.backends.environments import environments, family
from tests.beside import batch
from tests.late_device import ranks
from tests.late_device.build import missing
from tests.pools import ForkedPool, on_ranks, rank_pool

everywhere = pytest.mark.parametrize(
    ("backend", "world_size"), [e for e in environments("late", "tpu", "torch_tpu") if e.values[1] > 1]
)


@everywhere
@pytest.mark.parametrize("options", programs.OPTIONS)
def test_fsdp_trains_as_one_process(backend: str, world_size: int, options: str) -> None:
    name = "checkpoint_reentrant" if options == "kept" else "tied_across"
    rank_pool(world_size, backend).run(programs.train_fsdp, world_size, name, options, family(backend))


@everywhere
def test_sharded_ddp_trains_as_one_process(backend: str, world_size: int) -> None:
    rank_pool(world_size, backend).run(programs.train_sharded_ddp, family(backend))


@everywhere
def test_ranks_that_differ(backend: str, world_size: int) -> None:
    rank_pool(world_size, backend).run(programs.one_rank_leaves_a_parameter_out, family(backend))
    rank_pool(world_size, backend).run(programs.a_late_rank, 0.1, family(backend))


class Sent:
    """Sends as the library does."""

    def allocate(self, size: Any, **options: Any) -> torch.Tensor:
        return torch.empty(size, **options)

    def __call__(self, group: Any, op: Any = None, async_op: bool = False, **tensors: torch.Tensor) -> Any:
        output, given = tensors["output_tensor"], tensors["input_tensor"]
        if op is None:
            return group._allgather_base(output, given)  # whatever async_op says
        options = dist.ReduceScatterOptions()
        options.reduceOp = op
        group._reduce_scatter_base(output, given, options).wait()
        return None


def _sends_itself(rank: int) -> None:
    device = get_backend("late").device()
    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])
    model: Any = copy.deepcopy(plain)  # which is on the host, and goes to the mesh's device
    model[0].register_buffer("steps", torch.zeros(1))
    if rank > 0:
        model[1].to("meta")
    aside = torch.Stream(device)
    for part in (*model, model):
        torch_fsdp2.fully_shard(
            part, **({"mesh": init_device_mesh(device.type, (2,))} if part is model[1] else {})
        )
        part.set_custom_all_gather(Sent())
        part.set_custom_reduce_scatter(Sent())
        part.set_all_reduce_hook(lambda mean: mean.mul_(2), stream=aside)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for step in range(4):
        model(batch(rank, step).to(device)).square().mean().backward()
        sum(plain(batch(r, step)).square().mean() for r in range(2)).backward()  # type: ignore[union-attr]
        optimizers[1].step()
        aside.wait_stream(torch.accelerator.current_stream())
        with aside:
            optimizers[0].step()
            event = aside.record_event()
        model.set_post_optim_event(event)
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {device.type}
    with sharding_of(model).summon_full_params():
        for layer, truth in zip(model, plain, strict=True):
            torch.testing.assert_close(layer.weight.cpu(), truth.weight)
            torch.testing.assert_close(layer.bias.cpu(), truth.bias)


@pytest.mark.skipif(bool(missing()), reason="the device can't be compiled")
def test_messages_and_steps_that_the_user_orders() -> None:
    rank_pool(2, "late").run(_sends_itself)


@pytest.mark.skipif(bool(missing()), reason="the device can't be compiled")
def test_moved_after_wrapping_and_offloaded() -> None:
    rank_pool(2, "late").run(programs.moved_after_wrapping, "late")
    rank_pool(2, "late").run(_offloaded_and_moved)
    rank_pool(2, "late").run(
        programs.train_fsdp, 2, "adapted", "offloaded", "late"
    )  # two dtypes in one message


def _offloaded_and_moved(rank: int) -> None:
    """What is offloaded where it is built computes there: elsewhere it is refused, and goes on when back."""
    torch.manual_seed(0)
    device, one = get_backend("late").device(), nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))
    for options in ({"parameters": True}, {"masters": True}):
        for given in (None, device):
            for door in (FSDP, fully_shard, functools.partial(fully_shard, dtensors=True)):
                plain = copy.deepcopy(one)
                model = door(copy.deepcopy(one), offload=OffloadPolicy(**options), device=given)
                if given is None:
                    with pytest.raises(ConfigurationError, match="that computes on cpu was moved to 'late'"):
                        model.to(device)
                    model.to("cpu")
                else:
                    model.to(device)
                optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
                for step in range(2):
                    x = torch.linspace(-1, 1 + step, 15).view(3, 5)
                    model(x.to(given or "cpu")).square().mean().backward()
                    plain(x).square().mean().backward()
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
                exported: Any = sharding_of(model).export()
                for name, value in exported:
                    torch.testing.assert_close(value.cpu(), plain.get_parameter(name).detach())


@pytest.mark.skipif(bool(missing()), reason="the device can't be compiled")
@on_ranks((2, "late"), (3, "late"))
def test_what_is_kept_of_offloaded_dtensors(rank: int, world_size: int) -> None:
    """What an optimizer keeps of DTensors stays on the host with them."""
    device = get_backend("late").device()
    torch.manual_seed(0)
    plain = nn.Linear(6, 6)
    model = copy.deepcopy(plain).to(device)
    fully_shard(model, dtensors=True, offload=OffloadPolicy(parameters=True))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, plain)]
    for step in range(3):
        model(batch(rank, step).to(device)).square().mean().backward()
        for r in range(world_size):
            (plain(batch(r, step)).square().mean() / world_size).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    kept = [value for state in optimizers[0].state.values() for value in state.values()]
    assert {value.device.type for value in kept} == {"cpu"}
    for name, value in sharding_of(model).export():
        torch.testing.assert_close(value.cpu(), plain.state_dict()[name])


def _in_another_order(rank: int, backend: str) -> str:
    device = get_backend(backend).device()
    torch.manual_seed(0)
    first, second = (FSDP(nn.Linear(6, 6).to(device)) for _ in range(2))
    try:
        for step in range(1500):
            swapped = step > 3 and rank == 1
            for model in (second, first) if swapped else (first, second):
                model(torch.ones(1, 6, device=device)).sum().backward()  # nothing that the host waits for
            time.sleep(0.02)
    except OutOfStepError as error:
        return str(error)
    return ""


@pytest.mark.skipif(bool(missing()), reason="the device can't be compiled")
def test_roots_of_equal_shapes_in_another_order() -> None:
    """Nothing waits on the host here, where ranks could notice that they are in different calls."""
    pool = ForkedPool(2, "late", start=ranks.start_late)
    try:
        for end in pool.run(_in_another_order, "late"):
            assert {f"parameters 0 of the root, unit {number}" for number in (1, 2)} <= set(
                re.findall("parameters 0 of the root, unit .", end)
            ), end
    finally:
        pool.close(kill=True)  # the device waits for a collective that will not come to its end
