"""Runs a program on real ranks: this process is one of them.

The same interpreter drives fairscale, shardkit at fairscale's paths, and shardkit's own API; only the constructors
differ. It needs a process group (or a backend whose rank is this thread).
"""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.optim import Optimizer

from .build import Course, build_optimizers, late_names, scheduler_for
from .models import Deliberate, Model, batch, build_model, loss_of, route
from .result import Checkpoint, Moment, RankRun, Tensors
from .spec import (
    AddGroup,
    AnyStep,
    Clip,
    Evaluate,
    FailInBackward,
    FailInNoSync,
    Options,
    Program,
    Reload,
    Save,
    Schedule,
    SetTrainable,
    Step,
    Train,
    ZeroGrad,
)


def distributed_data_parallel(options: Options, model: Model) -> Any:
    return torch.nn.parallel.DistributedDataParallel(
        model, broadcast_buffers=options.broadcast_buffers, find_unused_parameters=True
    )


class Library:
    """The constructors of one library, from module paths: ``fairscale`` and ``shardkit`` share them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._oss = importlib.import_module(f"{name}.optim.oss").OSS
        self._wrapper = importlib.import_module(f"{name}.nn.data_parallel").ShardedDataParallel

    def oss(self, options: Options, cls: Any, params: Any, arguments: dict[str, Any]) -> Any:
        return self._oss(params, optim=cls, broadcast_fp16=options.broadcast_fp16, **arguments)

    def wrap(self, options: Options, model: Model, optimizers: list[Any]) -> Any:
        if options.wrapper == "ddp":
            return distributed_data_parallel(options, model)
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
        self.name = "core"
        self._kit = importlib.import_module("shardkit")
        self._policy = importlib.import_module("shardkit.policy")

    def oss(self, options: Options, cls: Any, params: Any, arguments: dict[str, Any]) -> Any:
        more = {"partition": options.partition} if options.partition else {}
        dtype = torch.float16 if options.broadcast_fp16 else None
        return self._kit.OSS(params, optim=cls, broadcast_dtype=dtype, **more, **arguments)

    def wrap(self, options: Options, model: Model, optimizers: list[Any]) -> Any:
        if options.wrapper == "ddp":
            return distributed_data_parallel(options, model)
        return self._kit.ShardedDDP(
            model,
            optimizers,
            broadcast_buffers=options.broadcast_buffers,
            reduce=self._policy.ReducePolicy(
                options.reduce_buffer_size, torch.float16 if options.reduce_fp16 else None
            ),
        )


def library(name: str) -> Library:
    return Core() if name == "core" else Library(name)


class Rank(Course):
    """This rank's course through a program."""

    def __init__(self, lib: Library, program: Program, start: Checkpoint | None) -> None:
        super().__init__(program)
        self.lib = lib
        self._build(start)

    def _build(self, start: Checkpoint | None) -> None:
        options = self.program.options
        # Ranks start apart on purpose: only rank 0 has the right values until the wrapper brings them around.
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        model = build_model(self.program.model, None if rank == 0 else 1000 + rank)
        if start is not None:
            model.load_state_dict(start.model)
        self.model = model
        self.named = dict(model.named_parameters())
        if options.late == "frozen":
            for name in late_names(self.program, model):
                self.named[name].requires_grad_(False)
        self.apply_trainable(model)
        self.optimizers: list[Optimizer] = build_optimizers(
            self.program, model, lambda cls, p, kw: self.lib.oss(options, cls, p, kw)
        )
        first: Any = self.optimizers[0]
        self.rank: int = first.rank
        self.schedulers = [scheduler_for(self.program, o) for o in self.optimizers]
        self.wrapper = self.lib.wrap(options, model, list(self.optimizers))
        if start is not None:
            if start.late_added:
                self.add_late(model, self.optimizers)
            for optimizer, state in zip(self.optimizers, start.optimizers, strict=True):
                self._load(optimizer, state)

    def _load(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        if self.lib.name == "fairscale":
            optimizer.load_state_dict(copy.deepcopy(state))  # it empties what it is given
            return
        before = pickle.dumps(state)
        optimizer.load_state_dict(state)
        if pickle.dumps(state) != before:
            raise AssertionError("load_state_dict changed the caller's dict")

    # ------------------------------------------------------------------ what is looked at
    def _params(self) -> Tensors:
        return {n: p.detach().clone() for n, p in self.named.items()}

    def _buffers(self) -> Tensors:
        return {n: b.detach().clone() for n, b in self.model.named_buffers()}

    def _grads(self) -> dict[str, torch.Tensor | None]:
        """Gradients of what this rank owns; of all ranks' parameters only it has to have them."""
        owned: set[torch.nn.Parameter] = set()
        for optimizer in self.optimizers:
            part: Any = optimizer
            owned |= {p for g in part.partition_parameters()[self.rank] for p in g["params"]}
        return {
            n: None if p.grad is None else p.grad.detach().clone()
            for n, p in self.named.items()
            if p in owned
        }

    def _partition(self) -> list[list[list[str]]]:
        names = {p: n for n, p in self.named.items()}
        parts: list[Any] = list(self.optimizers)
        return [
            [[names[p] for g in groups for p in g["params"]] for groups in o.partition_parameters()]
            for o in parts
        ]

    def _states(self, recipient: int) -> list[dict[str, Any]] | None:
        parts: list[Any] = list(self.optimizers)
        for o in parts:
            o.consolidate_state_dict(recipient)
        if recipient not in (-1, self.rank):
            return None
        return [copy.deepcopy(o.state_dict()) for o in parts]

    def _checkpoint(self) -> Checkpoint:
        model = {k: v.detach().clone() for k, v in self.model.state_dict().items()}
        parts: list[Any] = list(self.optimizers)
        return Checkpoint(
            model, [copy.deepcopy(o.state_dict(all_ranks=True)) for o in parts], self.late_added
        )

    # ------------------------------------------------------------------ steps
    def run(self) -> RankRun:
        run = RankRun([], self._partition())
        for index, step in enumerate(self.program.steps):
            moment = Moment(index, type(step).__name__)
            self._step(step, moment)
            run.moments.append(moment)
        last = Moment(len(self.program.steps), "end")
        last.params, last.buffers = self._params(), self._buffers()
        run.checkpoint = self._checkpoint()
        last.states = run.checkpoint.optimizers
        run.moments.append(last)
        return run

    def _step(self, step: AnyStep, moment: Moment) -> None:
        if isinstance(step, Train):
            self._train(step, moment)
        elif isinstance(step, FailInNoSync):
            try:
                with self.wrapper.no_sync():
                    raise Deliberate
            except Deliberate:
                pass
        elif isinstance(step, FailInBackward):
            self._fail_in_backward()
        elif isinstance(step, ZeroGrad):
            self._zero_grad(step)
        elif isinstance(step, Step):
            self._optimize(step, moment)
        elif isinstance(step, Clip):
            parts: list[Any] = list(self.optimizers)
            moment.norms = [float(o.clip_grad_norm(step.max_norm, step.norm_type)) for o in parts]
        elif isinstance(step, SetTrainable):
            self.set_trainable(self.model, step)
        elif isinstance(step, AddGroup):
            self.add_late(self.model, self.optimizers)
        elif isinstance(step, Evaluate):
            self._evaluate(step, moment)
        elif isinstance(step, Save):
            moment.states = self._states(step.recipient)
        elif isinstance(step, Reload):
            self._reload()
        elif isinstance(step, Schedule):
            for scheduler in self.schedulers:
                if scheduler is not None:
                    scheduler.step()
            moment.lrs = [g["lr"] for o in self.optimizers for g in o.param_groups]

    def _forward(self, count: int) -> torch.Tensor:
        x, y = batch(self.program.model, self.program.data_seed, count, self.rank)
        self.seed(count, self.rank)
        return loss_of(self.wrapper(x, route=route(self.program.routing, count, self.rank)), y)

    def _train(self, step: Train, moment: Moment) -> None:
        with self.wrapper.no_sync() if step.no_sync else nullcontext():
            losses = [
                self._forward(self.next_count()) for _ in range(2 if step.mode in ("two", "sum") else 1)
            ]
            if step.mode == "sum":
                (losses[0] + losses[1]).backward()
            elif step.mode == "twice":
                losses[0].backward(retain_graph=True)
                losses[0].backward()
            else:
                for loss in losses:
                    loss.backward()
        moment.losses = [loss.item() for loss in losses]
        if not step.no_sync:
            moment.grads = self._grads()

    def _fail_in_backward(self) -> None:
        self.model.fail = True
        try:
            self._forward(self.next_count()).backward()
        except Deliberate:
            pass
        else:
            raise AssertionError("the backward was meant to fail")
        finally:
            self.model.fail = False
        self.wrapper.zero_grad(set_to_none=True)

    def _zero_grad(self, step: ZeroGrad) -> None:
        if step.target == "wrapper":
            self.wrapper.zero_grad(set_to_none=step.set_to_none)
        elif step.target == "module":
            self.model.zero_grad(set_to_none=step.set_to_none)
        else:
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=step.set_to_none)

    def _optimize(self, step: Step, moment: Moment) -> None:
        if step.closure:
            count = self.next_count()
            for optimizer in self.optimizers:
                optimizer.step(self._closure(count, moment))
        else:
            for optimizer in self.optimizers:
                optimizer.step()
        moment.params, moment.buffers = self._params(), self._buffers()

    def _closure(self, count: int, moment: Moment) -> Callable[[], torch.Tensor]:
        def closure() -> torch.Tensor:
            self.wrapper.zero_grad(set_to_none=True)
            loss = self._forward(count)
            loss.backward()
            moment.losses.append(loss.item())
            return loss.detach()

        return closure

    def _evaluate(self, step: Evaluate, moment: Moment) -> None:
        count = self.next_count()
        if step.only_rank_0 and self.rank != 0:
            return
        self.wrapper.eval()
        with torch.no_grad():
            moment.losses = [self._forward(count).item()]
        self.wrapper.train()

    def _reload(self) -> None:
        checkpoint = self._checkpoint()
        states = [None if s is None else s.state_dict() for s in self.schedulers]
        self._build(checkpoint)
        for scheduler, state in zip(self.schedulers, states, strict=True):
            if scheduler is not None and state is not None:
                scheduler.load_state_dict(state)


def run_rank(rank: int, library_name: str, program: Program, start: bytes | None = None) -> bytes:
    """This rank's course as pickled bytes (of a :class:`RankRun`); ``start`` is a pickled :class:`Checkpoint`.

    Bytes: tensors in a queue between processes would travel as file descriptors.
    """
    checkpoint: Checkpoint | None = None if start is None else pickle.loads(start)
    return pickle.dumps(Rank(library(library_name), program, checkpoint).run())
