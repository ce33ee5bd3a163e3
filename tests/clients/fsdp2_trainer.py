"""A trainer in torchtitan's manner, with the loops of prime-rl and verl: it knows torch's FSDP2, and nothing else.

What ``torch.distributed.fsdp`` has is looked up when it is called, as a program does that is started anew.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as fsdp
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from tests.llama import PlainLayers, RMSNorm, Size, Transformer


@dataclasses.dataclass(frozen=True)
class Job:
    """What its configuration files say.

    Attributes:
        replicas: of the model; the other ranks shard it.
        names_dims: the whole mesh is passed, and names of its dimensions.
        chunks: the loss is formed from so many parts of the hidden values.
        registered: what is sharded says a strategy that is found by the model's class.
    """

    replicas: int = 1
    names_dims: bool = False
    selective: bool = False
    compiled: bool = False
    chunks: int = 1
    micro: int = 1
    casts: bool = False
    registered: bool = False


class Llama(Transformer):
    def __init__(self) -> None:
        super().__init__(Size(), PlainLayers)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def forward(self, tokens: torch.Tensor, skip_head: bool = False) -> torch.Tensor:
        x = self.hidden(tokens)
        return x if skip_head else self.output(x)

    def init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.trunc_normal_(module.weight, std=0.02)
            elif isinstance(module, RMSNorm):
                nn.init.ones_(module.weight)


def plain() -> Llama:
    torch.manual_seed(0)
    return Llama()


def mesh_of(job: Job) -> DeviceMesh:
    world = dist.get_world_size()
    whole = init_device_mesh(
        "cpu", (job.replicas, world // job.replicas), mesh_dim_names=("dp_replicate", "dp_shard")
    )
    return whole if job.replicas > 1 or job.names_dims or job.registered else whole["dp_shard"]


STRATEGIES: dict[str, Callable[..., Any]] = {}


def register_parallel_strategy(*, name: str) -> Callable[[type], None]:
    """Decorates a class, as NeMo Automodel has it."""
    return lambda strategy: STRATEGIES.update({name: strategy().parallelize})


@register_parallel_strategy(name="Llama")
class ByLists:
    """Members of lists are units, of which the last keeps its parameters for backward, as the root does."""

    def parallelize(self, model: nn.Module, **words: Any) -> nn.Module:
        self.shard_lists(model, **words)
        return fsdp.fully_shard(model, **words, reshard_after_forward=False)

    def shard_lists(self, module: nn.Module, **words: Any) -> None:
        for name, child in module.named_children():
            if isinstance(module, nn.ModuleList):
                is_last = int(name) + 1 == len(module)
                module[int(name)] = fsdp.fully_shard(child, **words, reshard_after_forward=not is_last)
            else:
                self.shard_lists(child, **words)


def parallelize(model: Llama, job: Job) -> Llama:
    if job.selective:

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            saved = op == torch.ops.aten.mm.default
            return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

        for name, layer in model.layers.named_children():
            contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
            setattr(model.layers, name, checkpoint_wrapper(layer, context_fn=contexts))
    if job.compiled:
        for layer in model.layers:
            layer.compile(backend="eager", fullgraph=True)
    words: dict[str, Any] = {"mesh": mesh_of(job)}
    dtype = torch.bfloat16 if job.casts else torch.float32
    words["mp_policy"] = fsdp.MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    if job.names_dims:
        replicate = "dp_replicate" if job.replicas > 1 else None
        words["dp_mesh_dims"] = fsdp.DataParallelMeshDims(shard="dp_shard", replicate=replicate)
    if job.registered:
        model = STRATEGIES[type(model).__name__](model, **words)
    else:
        fsdp.fully_shard(model.tok_embeddings, **words, reshard_after_forward=True)
        for layer in model.layers:
            fsdp.fully_shard(layer, **words, reshard_after_forward=True)
        fsdp.fully_shard([model.norm, model.output], **words, reshard_after_forward=False)
        fsdp.fully_shard(model, **words)
        model.tok_embeddings.set_modules_to_forward_prefetch([model.layers[0]])  # type: ignore[operator]
    units = [m for m in model.modules() if isinstance(m, fsdp.FSDPModule)]
    assert len(units) == 6 - 3 * job.registered
    for unit in units:
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # torch's on gloo needs it
    return model


class Trainer:
    """Sums of losses over tokens, and of gradients over ranks."""

    def __init__(self, job: Job, weights: dict[str, torch.Tensor]) -> None:
        self.job, self.rank, self.world = job, dist.get_rank(), dist.get_world_size()
        with torch.device("meta"):
            model = Llama()
        self.model = parallelize(model, job)
        self.model.to_empty(device="cpu")
        with torch.no_grad():
            self.model.init_weights()
        drawn = self.model.layers[0].attention.wq.weight  # type: ignore[union-attr]
        assert 0 < drawn.full_tensor().std() < 0.03  # type: ignore[operator]
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(self.model, weights if self.rank == 0 else {}, options=options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, eps=1e-3)

    def batches(self, step: int) -> Iterator[torch.Tensor]:
        for micro in range(self.job.micro):
            yield batch(step, micro, self.rank)

    def step(self, step: int) -> tuple[float, float]:
        model, job = self.model, self.job
        self.optimizer.zero_grad()
        total = torch.zeros(())
        count = self.world * job.micro * batch(0, 0, 0)[:, 1:].numel()
        for micro, tokens in enumerate(self.batches(step)):
            is_last = micro + 1 == job.micro
            model.set_is_last_backward(is_last)  # type: ignore[operator]
            model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
            model.set_reshard_after_backward(is_last)  # type: ignore[operator]
            total += self.backward(tokens, count, is_last)
        dist.all_reduce(total)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm: Any = nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor()
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, norm)
        self.optimizer.step()
        return float(total), float(norm)

    def backward(self, tokens: torch.Tensor, count: int, is_last: bool) -> torch.Tensor:
        if self.job.chunks == 1:
            loss = loss_of(self.model(tokens[:, :-1]), tokens[:, 1:], count)
            loss.backward()
            return loss.detach()
        hidden = self.model(tokens[:, :-1], skip_head=True)
        inputs, total = hidden.detach().requires_grad_(), torch.zeros(())
        head: Any = self.model.output
        parts = zip(inputs.chunk(self.job.chunks, 1), tokens[:, 1:].chunk(self.job.chunks, 1), strict=True)
        head.set_requires_gradient_sync(False, recurse=False)
        for k, (part, targets) in enumerate(parts):
            if k + 1 == self.job.chunks:
                head.set_requires_gradient_sync(is_last, recurse=False)
            loss = loss_of(head(part), targets, count)
            loss.backward()
            total += loss.detach()
        hidden.backward(inputs.grad)
        return total

    def export(self) -> dict[str, torch.Tensor]:
        """As it hands weights to an engine that generates, between phases: off the device, and whole."""
        for module in self.model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.reshard()
        self.model.to("cpu", non_blocking=True)
        state = self.model.state_dict()
        found = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in state.items()}
        return {n.replace("_checkpoint_wrapped_module.", ""): p for n, p in found.items()}

    def save(self, folder: str) -> None:
        dcp.save(self.state(), checkpoint_id=folder)

    def state(self) -> dict[str, Any]:
        optimizer = get_optimizer_state_dict(self.model, self.optimizer)
        return {"model": get_model_state_dict(self.model), "optimizer": optimizer}

    def load(self, folder: str) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])


def loss_of(logits: torch.Tensor, targets: torch.Tensor, count: int) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum") / count


def batch(step: int, micro: int, rank: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randint(0, Size().vocabulary, (2, Size().length + 1), generator=draw)


def alone(job: Job, world: int, steps: int) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """The same in one process, which has never heard of ranks."""
    model, found = plain(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    count = world * job.micro * batch(0, 0, 0)[:, 1:].numel()
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for micro in range(job.micro):
            for rank in range(world):
                tokens = batch(step, micro, rank)
                loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:], count)
                loss.backward()
                total += float(loss)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        found.append((total, float(norm)))
    return found, dict(model.state_dict())
