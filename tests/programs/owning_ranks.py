"""A rank of OSS with ShardedDataParallel (or DistributedDataParallel): parameters are whole, and have owners."""

from __future__ import annotations

import copy
import importlib
import pickle
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from .models import Model, Tree
from .ranks import Rank, tensors
from .result import Checkpoint, Moment, RankRun
from .spec import AddGroup, AnyStep, Clip, Program, Reload, Save, Sharded, Step, Train


class Library:
    """The constructors of one library, from module paths: ``fairscale`` and ``shardkit`` share them."""

    def __init__(self, name: str) -> None:
        self._oss = importlib.import_module(f"{name}.optim.oss").OSS
        self._wrapper = importlib.import_module(f"{name}.nn.data_parallel").ShardedDataParallel

    def oss(self, options: Sharded, cls: Any, params: Any, arguments: dict[str, Any]) -> Any:
        return self._oss(params, optim=cls, broadcast_fp16=options.broadcast_fp16, **arguments)

    def wrap(self, options: Sharded, model: Model, optimizers: list[Any]) -> Any:
        return self._wrapper(
            model,
            optimizers if len(optimizers) > 1 else optimizers[0],
            broadcast_buffers=options.broadcast_buffers,
            reduce_buffer_size=options.reduce_buffer_size,
            reduce_fp16=options.reduce_fp16,
        )


class Core(Library):
    """shardkit's own API."""

    def __init__(self) -> None:
        self._kit = importlib.import_module("shardkit")
        self._policy = importlib.import_module("shardkit.policy")

    def oss(self, options: Sharded, cls: Any, params: Any, arguments: dict[str, Any]) -> Any:
        more = {"partition": options.partition} if options.partition else {}
        dtype = torch.float16 if options.broadcast_fp16 else None
        return self._kit.OSS(params, optim=cls, broadcast_dtype=dtype, **more, **arguments)

    def wrap(self, options: Sharded, model: Model, optimizers: list[Any]) -> Any:
        half = torch.float16 if options.reduce_fp16 else None
        return self._kit.ShardedDDP(
            model,
            optimizers,
            broadcast_buffers=options.broadcast_buffers,
            reduce=self._policy.ReducePolicy(options.reduce_buffer_size, half),
        )


def _on_host(state: dict[str, Any]) -> dict[str, Any]:
    """A copy of an optimizer's state."""
    return tree_map(lambda v: v.cpu().clone() if isinstance(v, torch.Tensor) else v, state)  # type: ignore[no-any-return]


def library(name: str) -> Library:
    """Of "fairscale", "shardkit" (its paths) or "core"."""
    return Core() if name == "core" else Library(name)


class OwningRank(Rank):
    """See :class:`.ranks.Rank`; with ``start`` it goes on from another run's checkpoint."""

    sharded: Sharded

    def __init__(self, library_name: str, program: Program, start: Checkpoint | None = None) -> None:
        super().__init__(library_name, program)
        self._make = library(library_name)
        self._build(start)

    def _build(self, start: Checkpoint | None) -> None:
        options = self.sharded
        # Ranks start apart on purpose: only rank 0 has the right values until the wrapper brings them around.
        self.tree = Tree(self.program.model, None if self.rank == 0 else 1000 + self.rank)
        self.tree.to(self.device)
        if start is not None:
            self.model.load_state_dict(start.model)
        self.named = dict(self.model.named_parameters())
        self.freeze_late(self.named)
        for step in self.frozen_later:
            self.freeze(step)
        self.make_optimizers(
            self.named, lambda cls, params, arguments: self._make.oss(options, cls, params, arguments)
        )
        if options.wrapper == "ddp":
            self.wrapper = torch.nn.parallel.DistributedDataParallel(
                self.model, broadcast_buffers=options.broadcast_buffers, find_unused_parameters=True
            )
        else:
            self.wrapper = self._make.wrap(options, self.model, list(self.optimizers))
        if start is not None:
            if start.late_added:
                self.add_late(self.named)
            for optimizer, state in zip(self.optimizers, start.optimizers, strict=True):
                self._load(optimizer, state)

    def _load(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        if self.library == "fairscale":
            optimizer.load_state_dict(copy.deepcopy(state))  # it empties what it is given
            return
        before = pickle.dumps(state)
        optimizer.load_state_dict(state)
        if pickle.dumps(state) != before:
            raise AssertionError("load_state_dict changed the caller's dict")

    @property
    def _oss(self) -> list[Any]:
        return list(self.optimizers)

    # ------------------------------------------------------------------ what is looked at
    def _grads(self) -> dict[str, torch.Tensor | None] | None:
        """Gradients of what this rank owns; of all ranks' parameters only it has to have them.

        None on XLA, where ranks have segments, which are not to be read.
        """
        if self.device.type == "xla":
            return None
        owned = {p for o in self._oss for g in o.partition_parameters()[self.rank] for p in g["params"]}
        return {
            n: None if p.grad is None else p.grad.detach().clone()
            for n, p in self.named.items()
            if p in owned
        }

    def _partition(self) -> list[list[list[str]]]:
        names = {p: n for n, p in self.named.items()}
        return [
            [[names[p] for g in groups for p in g["params"]] for groups in o.partition_parameters()]
            for o in self._oss
        ]

    def _states(self, recipient: int) -> list[dict[str, Any]] | None:
        for o in self._oss:
            o.consolidate_state_dict(recipient)
        if recipient not in (-1, self.rank):
            return None
        return [_on_host(o.state_dict()) for o in self._oss]

    def _checkpoint(self) -> Checkpoint:
        states = [_on_host(o.state_dict(all_ranks=True)) for o in self._oss]
        return Checkpoint(tensors(self.model.state_dict()), states, self.late_added)

    def _values(self, moment: Moment) -> None:
        moment.params = tensors(self.named)
        moment.buffers = tensors(dict(self.model.named_buffers()))

    def run(self) -> RankRun:
        partition = self._partition()
        run = super().run()
        last = Moment(len(self.program.steps), "end")
        self._values(last)
        run.partition, run.saved = partition, self._checkpoint()
        if self.device.type != "xla":  # whose segments have state of what never had a gradient, too
            last.states = run.saved.optimizers
        run.moments.append(last)
        return run

    # ------------------------------------------------------------------ steps
    def look(self, step: AnyStep, moment: Moment) -> None:
        if isinstance(step, Train) and not step.no_sync:
            moment.grads = self._grads()
        elif isinstance(step, Step):
            self._values(moment)
        elif isinstance(step, Save):
            moment.states = self._states(step.recipient)
        elif isinstance(step, AddGroup):
            self.add_late(self.named)

    def clip(self, step: Clip) -> list[float]:
        return [float(o.clip_grad_norm(step.max_norm, step.norm_type)) for o in self._oss]

    def reload(self, step: Reload) -> None:
        checkpoint, states = self._checkpoint(), self.scheduler_states()
        self._build(checkpoint)
        self.load_schedulers(states)
