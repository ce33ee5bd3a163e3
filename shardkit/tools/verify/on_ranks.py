"""An experiment on real ranks, with fairscale or with shardkit at fairscale's paths: this process is one of them."""

from __future__ import annotations

import importlib
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from ...backend import backend_of_job
from ...fsdp import FSDP, fully_shard, sharding_of
from ...oss.sharded_ddp import ShardedDDP
from ...types import Kwargs, SavedState, Tree
from .comparing import Moment, Tensors, Trace
from .experiment import Experiment, persistent_buffers

Strategy = Literal["oss", "sharded_ddp", "fsdp", "fully_shard"]
Library = Literal["fairscale", "shardkit"]


def run_on_ranks(
    experiment: Experiment,
    library: Library,
    strategy: Strategy,
    options: SavedState,
    steps: int,
    microbatches: int,
) -> Trace:
    """Returns what the ranks saw, the same on each of them. Needs a process group.

    Args:
        options: arguments of OSS ("oss"), ShardedDataParallel or FullyShardedDataParallel, under fairscale's names, or
            of fully_shard, which is shardkit's alone. With ``reduce`` among them, of shardkit's own wrappers.
        microbatches: of a step, over all ranks.
    """
    kinds: dict[str, type[_Wholes | _Shards | _FullySharded]] = {
        "fsdp": _Shards,
        "fully_shard": _FullySharded,
    }
    run = kinds.get(strategy, _Wholes)(experiment, library, strategy, dict(options))
    rank, world, trace = dist.get_rank(), dist.get_world_size(), []
    for step in range(steps):
        run.wrapper.zero_grad(set_to_none=True)
        losses = []
        for k in range(rank, microbatches, world):
            loss = experiment.loss_of(run.wrapper, step, k)
            loss.backward()
            losses.append(loss.item())
        losses = [loss for one_of_each in zip(*_of_all(losses), strict=True) for loss in one_of_each]
        gradients = run.gradients()
        if experiment.clip is not None:
            run.clip(experiment.clip)
        run.optimizer.step()
        trace.append(Moment(losses, gradients, *run.values()))
    return trace


class _Wholes:
    """OSS under DistributedDataParallel or ShardedDataParallel: whole parameters, each with an owner."""

    def __init__(self, experiment: Experiment, library: str, strategy: Strategy, options: Kwargs) -> None:
        self.module = experiment.build()
        oss = importlib.import_module(f"{library}.optim.oss").OSS
        more = options if strategy == "oss" else {}
        self.optimizer: Any = oss(
            self.module.parameters(), optim=experiment.optimizer, **more, **experiment.optimizer_options
        )
        self.wrapper: nn.Module
        if strategy == "oss":
            self.wrapper = nn.parallel.DistributedDataParallel(self.module, find_unused_parameters=True)
        else:
            fairscales = importlib.import_module(f"{library}.nn.data_parallel").ShardedDataParallel
            wrapper = ShardedDDP if "reduce" in options else fairscales
            self.wrapper = wrapper(self.module, self.optimizer, **options)

    def gradients(self) -> Tensors:
        owners, rank = self.optimizer._param_to_rank, dist.get_rank()
        mine = {
            n: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
            for n, p in self.module.named_parameters()
            if owners.get(p, 0) == rank
        }
        found = {n: g for part in _of_all(mine) for n, g in part.items()}
        return {n: found[n] for n, _ in self.module.named_parameters()}

    def clip(self, norm: float) -> None:
        self.optimizer.clip_grad_norm(norm)

    def values(self) -> tuple[Tensors, Tensors]:
        parameters = {n: p.detach().clone() for n, p in self.module.named_parameters()}
        return parameters, _of_rank_0(persistent_buffers(self.module))


class _Shards:
    """FullyShardedDataParallel: nothing is whole but while it computes."""

    def __init__(self, experiment: Experiment, library: str, strategy: Strategy, options: Kwargs) -> None:
        plain = experiment.build()
        self._parameters = [n for n, _ in plain.named_parameters()]
        self._buffers = list(persistent_buffers(plain))
        fairscales = importlib.import_module(f"{library}.nn.data_parallel").FullyShardedDataParallel
        fsdp: Any = FSDP if "reduce" in options else fairscales
        if library == "fairscale":
            options["compute_device"] = torch.device("cpu")  # it would look for another one
        wrapping = importlib.import_module(f"{library}.nn.wrap")
        with wrapping.enable_wrap(wrapper_cls=fsdp, **options):
            module = experiment.build()
            if experiment.wrap is not None:
                experiment.wrap(module, wrapping.wrap)
        self.wrapper: Any = module if isinstance(module, fsdp) else fsdp(module, **options)
        self.optimizer = experiment.optimizer_over(self.wrapper.parameters())

    def gradients(self) -> Tensors:
        """Returns what a checkpoint of the shards would hold, were they gradients, made whole."""
        shard, metadata = dict(self.wrapper.local_state_dict()), self.wrapper.local_metadata_dict()
        world_size = dist.get_world_size()
        grads = {
            n.replace("_fsdp_wrapped_module.", "").replace("_fpw_module.", ""): p.grad
            for n, p in self.wrapper.named_parameters()
        }
        for unit in metadata["param_metadata"]:
            for name, info in unit["params"].items():
                key = ".".join(filter(None, (unit["fsdp_path"], name)))
                numel = -(-sum(info["numels"]) // world_size)
                grad = grads[key]
                shard[key] = shard[key].new_zeros(numel) if grad is None else grad.detach().cpu()
        shards, all_metadata = zip(*_of_all((shard, metadata)), strict=True)
        whole = type(self.wrapper).consolidate_shard_weights(list(shards), list(all_metadata))
        return {n: _plain(whole[n]) for n in self._parameters}

    def clip(self, norm: float) -> None:
        self.wrapper.clip_grad_norm_(norm)

    def values(self) -> tuple[Tensors, Tensors]:
        state = self.wrapper.state_dict()
        if not state:  # state_dict_on_rank_0_only
            state = dict.fromkeys([*self._parameters, *self._buffers], torch.empty(0))
        state = {n: _plain(v) for n, v in state.items()}
        parameters = _of_rank_0({n: state[n] for n in self._parameters})
        return parameters, _of_rank_0({n: state[n] for n in self._buffers})


class _FullySharded:
    """fully_shard: what ``summon_full_params`` shows of the shards is whole."""

    def __init__(self, experiment: Experiment, library: str, strategy: Strategy, options: Kwargs) -> None:
        self.wrapper: nn.Module = experiment.build()
        if experiment.wrap is not None:
            experiment.wrap(self.wrapper, lambda part, **more: fully_shard(part, **{**options, **more}))
        fully_shard(self.wrapper, **options)
        self.optimizer = experiment.optimizer_over(self.wrapper.parameters())

    @torch.no_grad()
    def gradients(self) -> Tensors:
        """They take the place of the parameters for as long as it takes to see them whole."""
        shards = list(self.wrapper.parameters())
        values = [p.detach().clone() for p in shards]
        for p in shards:
            p.zero_() if p.grad is None else p.copy_(p.grad)
        found, _ = self.values()
        for p, value in zip(shards, values, strict=True):
            p.copy_(value)
        return found

    def clip(self, norm: float) -> None:
        sharding_of(self.wrapper).clip_grad_norm_(norm)

    def values(self) -> tuple[Tensors, Tensors]:
        with sharding_of(self.wrapper).summon_full_params(writeback=False):
            parameters = {n: p.detach().clone() for n, p in self.wrapper.named_parameters()}
        buffers = {n: b.detach().clone() for n, b in self.wrapper.named_buffers()}
        return parameters, _of_rank_0(buffers)


def _plain(t: torch.Tensor) -> torch.Tensor:
    """Returns a copy on the CPU without the attributes that libraries put on tensors."""
    return torch.empty_like(t, device="cpu").copy_(t.detach())


def _of_all(value: object) -> list[Tree]:
    return backend_of_job().group().all_gather_object(value)


def _of_rank_0(tensors: Tensors) -> Tensors:
    return backend_of_job().group().broadcast_object(tensors, 0)
