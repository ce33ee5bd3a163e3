"""How groups over NCCL are named, connected and ended, with gloo in NCCL's place: it needs no device."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardkit.backend import get_backend
from shardkit.backends import cuda
from shardkit.backends.c10d.group import C10dGroup
from shardkit.backends.gloo import GlooBackend
from shardkit.errors import ConfigurationError, LifecycleError
from tests.pools import on_ranks, rank_pool


class _Options:
    """Of ProcessGroupNCCL."""

    group_name = ""
    global_ranks_in_group: list[int]
    _timeout: Any = None


class _Gloo:
    """A class like ProcessGroupNCCL, whose objects are gloo's."""

    Options = _Options

    def __init__(self) -> None:
        self.made: list[_Options] = []
        self.done: list[str] = []

    def __call__(self, store: Any, rank: int, size: int, options: _Options) -> Any:
        self.made.append(options)
        gloo = dist.ProcessGroupGloo._Options()
        gloo._devices, gloo._timeout = [dist.ProcessGroupGloo.create_default_device()], options._timeout
        backend = dist.ProcessGroupGloo(store, rank, size, gloo)
        return _Connecting(backend, self.done)


class _Connecting:
    def __init__(self, backend: Any, done: list[str]) -> None:
        self.backend, self._done = backend, done

    def eager_connect_single_device(self, device: torch.device) -> None:
        self._done.append(f"connect {device}")


@contextmanager
def _gloo_as_nccl() -> Iterator[_Gloo]:
    fake = _Gloo()
    register = dist.ProcessGroup._register_backend

    def unwrapped(group: Any, device: Any, kind: Any, backend: Any) -> None:
        register(group, device, kind, getattr(backend, "backend", backend))

    with (
        mock.patch.object(dist, "ProcessGroupNCCL", fake, create=True),
        mock.patch.object(cuda, "_CUDA", torch.device("cpu")),
        mock.patch.object(torch.accelerator, "current_stream"),
        mock.patch.object(torch.cuda, "synchronize", side_effect=lambda device: fake.done.append("flush")),
        mock.patch.object(dist.ProcessGroup, "_register_backend", unwrapped),
        mock.patch.object(dist.ProcessGroup, "abort", lambda group: fake.done.append(group.group_name)),
    ):
        yield fake


class _AsNccl(GlooBackend):
    def _make_group(self, process_group: Any, ranks: Sequence[int], rank: int) -> C10dGroup:
        return cuda.NcclGroup(self, process_group, ranks, rank)


def _life(rank: int) -> list[str]:
    with _gloo_as_nccl() as fake:
        process_group = dist.new_group([0, 1])
        parent = process_group.group_name
        known = _AsNccl()
        group: Any = known.group(process_group)
        channel = group.channel("parameters")
        group.channel("gradients")
        sub = group.new_group([1])
        assert channel.all_gather_object(rank) == [0, 1]

        names = [f"shardkit/{parent}/channel/{name}" for name in ("parameters/1", "gradients/2")]
        if rank == 1:
            names.append(f"shardkit/{parent}/group/1/3")
            assert sub.channel("x").process_group.group_name == f"shardkit/{parent}/group/1/3/channel/x/1"
            names.append(sub.channel("x").process_group.group_name)
        assert [o.group_name for o in fake.made] == names
        assert channel.process_group.group_name == names[0]
        assert channel.process_group.group_desc == "shardkit: channel/parameters"
        assert fake.made[0].global_ranks_in_group == [0, 1]
        assert fake.made[0]._timeout == dist.default_pg_timeout
        assert fake.done == ["connect cpu"] * len(names)  # before anything is sent

        gc.collect()
        ours = {g.group_name for g in cuda._communicators}
        assert ours >= set(names)  # what would be ended at exit

        fake.done.clear()
        dist.destroy_process_group(process_group)
        del process_group
        gc.collect()
        assert fake.done[0] == "flush"
        assert sorted(fake.done[1:]) == sorted(names)
        assert not {g.group_name for g in cuda._communicators} & set(names)
        with pytest.raises(LifecycleError):
            group.barrier()

        fake.done.clear()  # at exit
        last: Any = known.group(dist.new_group([0, 1]))
        name = last.channel("control").process_group.group_name
        cuda._end_communicators()
        return [*fake.done[-2:], name]


def test_communicators_have_names_and_end() -> None:
    for done in rank_pool(2).run(_life):
        assert done[0] == "flush"
        assert done[1] == done[2]


@on_ranks(2)
def test_a_cpu_module_over_a_group_for_devices_alone(rank: int) -> None:
    """A group that carries nothing on the CPU, as "nccl" alone is."""
    group = dist.new_group([0, 1], backend="cuda:gloo")
    with pytest.raises(
        ConfigurationError, match=r"can't carry CPU tensors .* before it is wrapped.*'cpu:gloo,cuda:nccl'"
    ):
        get_backend("gloo").group(group)
    host = dist.new_group([0, 1], backend="cpu:gloo")
    with pytest.raises(
        ConfigurationError, match=r"can't carry CUDA tensors .* make it with backend 'cpu:gloo,cuda:nccl'"
    ):
        get_backend("cuda").group(host)
    import shardkit

    for wrap in (shardkit.FSDP, lambda m, **kw: shardkit.OSS(m.parameters(), torch.optim.SGD, lr=0.1, **kw)):
        with pytest.raises(ConfigurationError, match="can't carry CPU tensors"):
            wrap(torch.nn.Linear(2, 2), group=group)
