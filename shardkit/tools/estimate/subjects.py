"""Subjects of estimates, an Experiment or a model by its Hugging Face configuration; and how each can be sharded."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager as ContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

from ...backend import Backend
from ...errors import ConfigurationError
from ...fsdp import FSDP, fully_shard
from ...fsdp.masters import Mirrored
from ...fsdp.originals import as_tensors
from ...fsdp.state import state_of
from ...integrations.sharding import Sharding
from ...layout import greedy_owners
from ...oss.optimizer import OSS
from ...oss.sharded_ddp import ShardedDDP
from ...policy import Frozen, OffloadPolicy, PrecisionPolicy, ReducePolicy, ReshardPolicy
from ...types import Kwargs, Tree
from ..verify import load_experiment

Units = Callable[[nn.Module, Callable[[nn.Module], nn.Module]], None]


@dataclass(frozen=True)
class Subject:
    """A training.

    Attributes:
        name: what it is called in reports.
        model: makes the model; called on the meta device.
        loss: ``loss(model, batch_size)``: a scalar of a batch of so many samples.
        optimizer: class and arguments.
        units: makes units of parts of the model, before the whole is made one.
        compute: dtype of computation; None: the parameters'.
        reduce: dtype in which gradients travel; None: their own.
        tokens: of a sample; 0: samples are counted.
        frozen: what becomes of weights that are not trained, see :class:`~shardkit.ReshardPolicy`.
    """

    name: str
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int], torch.Tensor]
    optimizer: tuple[type[torch.optim.Optimizer], Kwargs]
    units: Units
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    tokens: int = 0
    frozen: Frozen = "reshard"

    def over(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Returns the optimizer of these."""
        kind, options = self.optimizer
        return kind([p for p in params if p.requires_grad], **options)


class Sharded(NamedTuple):
    """A model that is ready to be trained."""

    model: nn.Module
    optimizer: torch.optim.Optimizer


def _in_units(
    subject: Subject,
    model: nn.Module,
    backend: Backend,
    shard: Callable[..., nn.Module],
    after_forward: bool = True,
    offload: OffloadPolicy | None = None,
) -> Sharded:
    options: Kwargs = {
        "backend": backend,
        "precision": PrecisionPolicy(compute=subject.compute),
        "reduce": ReducePolicy(dtype=subject.reduce),
        "reshard": ReshardPolicy(after_forward=after_forward, frozen=subject.frozen),
        "offload": offload,
    }
    subject.units(model, lambda part: shard(part, **options))
    model = shard(model, **options)
    return Sharded(model, subject.over(model.parameters()))


def _sharded_ddp(subject: Subject, model: nn.Module, backend: Backend) -> Sharded:
    kind, options = subject.optimizer
    if subject.frozen != "reshard":
        raise ConfigurationError(
            f"frozen={subject.frozen!r}: with sharded_ddp every rank has all weights; leave it out"
        )
    model = model if subject.compute is None else model.to(subject.compute)
    optimizer = OSS(model.parameters(), kind, backend=backend, **options)
    policy = ReducePolicy(dtype=subject.reduce)
    return Sharded(ShardedDDP(model, optimizer, reduce=policy, backend=backend), optimizer)


STRATEGIES: dict[str, Callable[..., Sharded]] = {
    "fsdp": partial(_in_units, shard=FSDP),
    "fsdp-kept": partial(_in_units, shard=FSDP, after_forward=False),
    "fsdp-masters": partial(_in_units, shard=FSDP, offload=OffloadPolicy(masters=True)),
    "fully_shard": partial(_in_units, shard=fully_shard),
    "sharded_ddp": _sharded_ddp,
}


def fullest_rank(strategy: str, model: nn.Module, world_size: int) -> int:
    if strategy != "sharded_ddp":
        return 0
    params = list(model.parameters())
    loads = [0] * world_size
    greedy_owners([p.numel() for p in params], [p.requires_grad for p in params], loads)
    return loads.index(max(loads))


def fsdp2_padding(model: nn.Module, world_size: int) -> dict[str, float]:
    """Tells by label of a unit how much more of it travels where FSDP2 pads the first dimension of each parameter."""
    found = {}
    state = state_of(model)
    for flat in state.all_flats() if state is not None else ():
        rows = [(o.shape[0] if o.shape else 1, o.shape.numel()) for o in flat.originals]
        padded = sum(math.ceil(n / world_size) * world_size * (numel // max(1, n)) for n, numel in rows)
        found[flat.label] = padded / flat.layout.padded_numel
    return found


def kinds_of(sharded: Sharded, resized: Iterable[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
    """Lists its tensors now, but activations; ``resized`` had their memory taken or given back.

    What is on the host is left out.
    """
    model, optimizer = sharded
    params: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
    gradients = [p.grad for p in params if p.grad is not None]
    gathered: list[torch.Tensor] = []
    state = state_of(model)
    flats = state.all_flats() if state is not None else []
    copies = [flat.store.copy for flat in flats if isinstance(flat.store, Mirrored)]
    if copies:
        params, gradients = [*copies, *model.buffers()], []
    for flat in flats:
        gathered.append(flat.store.gathered)
        with as_tensors():
            gradients += [o.param.grad for o in flat.originals if o.param.grad is not None]
    inner = optimizer.optim if isinstance(optimizer, OSS) else optimizer
    entries = [] if copies else inner.state.values()
    moments = [v for entry in entries for v in entry.values() if isinstance(v, torch.Tensor)]
    kinds = {"parameters": params, "gathered": gathered, "gradients": [*gradients, *resized]}
    return {**kinds, "optimizer state": moments}


# ------------------------------------------------------------ subjects
class _Adapted(nn.Module):
    """A layer beside a product of two matrices of low rank."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        like: Kwargs = {"bias": False, "device": base.weight.device, "dtype": base.weight.dtype}
        self.base = base
        self.down = nn.Linear(base.in_features, rank, **like)
        self.up = nn.Linear(rank, base.out_features, **like)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(x) + self.up(self.down(x))
        return result


def with_adapters(subject: Subject, rank: int, frozen: Frozen = "reshard") -> Subject:
    """Returns the same with frozen weights and adapters (LoRA) of all linear layers, but those that give the output."""

    def model() -> nn.Module:
        found = subject.model().requires_grad_(False)
        output = getattr(found, "get_output_embeddings", lambda: None)()
        for parent in list(found.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear and child is not output:
                    setattr(parent, name, _Adapted(child, rank))
        return found

    return replace(subject, name=f"{subject.name} with LoRA of rank {rank}", model=model, frozen=frozen)


def optimizer_named(name: str) -> tuple[type[torch.optim.Optimizer], Kwargs]:
    """Returns a class of torch.optim with its defaults."""
    kind = getattr(torch.optim, name, None)
    if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):
        raise ConfigurationError(f"torch.optim has no optimizer {name!r}")
    return kind, {"lr": 1e-3}


def from_experiment(
    target: str,
    optimizer: str | None = None,
    compute: torch.dtype | None = None,
    reduce: torch.dtype | None = None,
) -> Subject:
    """Loads ``script.py:name`` or ``package.module:name`` that gives a :class:`shardkit.tools.verify.Experiment`.

    Batches get the number of samples that is asked for in the first dimension of each of their tensors.
    """
    experiment = load_experiment(target)
    chosen = (experiment.optimizer, dict(experiment.optimizer_options))

    def units(model: nn.Module, unit: Callable[[nn.Module], nn.Module]) -> None:
        if experiment.wrap is not None:
            experiment.wrap(model, unit)

    def loss(model: nn.Module, batch: int) -> torch.Tensor:
        def on_meta(value: Tree) -> Tree:
            if not isinstance(value, torch.Tensor):
                return value
            shape = (batch, *value.shape[1:]) if value.dim() else ()
            return torch.empty(shape, dtype=value.dtype, device="meta")

        with torch.device("cpu"):
            example = experiment.batch(0, 0)
        return experiment.loss(model, tree_map(on_meta, example))

    kind = optimizer_named(optimizer) if optimizer else chosen
    return Subject(target, lambda: experiment.build().to("meta"), loss, kind, units, compute, reduce)


def from_hugging_face(
    config: str | Path,
    optimizer: str | None = None,
    compute: torch.dtype | None = None,
    sequence: int = 2048,
    checkpointing: str | bool = False,
    reduce: torch.dtype | None = None,
) -> Subject:
    """Returns a language model by its ``config.json``; units are the blocks that transformers does not split.

    Args:
        sequence: tokens of a sample.
        checkpointing: "full": blocks are computed again in backward; "selective": all of them but attention and every
            other matrix product. True: "full"; False: nothing is.

    Raises:
        ConfigurationError: transformers is missing, or the file is no configuration.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigurationError("--hf needs transformers: pip install transformers") from error
    if checkpointing and checkpointing not in _CHECKPOINTING:
        raise ConfigurationError(f"checkpointing is {checkpointing!r}; it is 'full', 'selective' or False")
    path = Path(config)
    try:
        given = json.loads(path.read_text())
        made = transformers.AutoConfig.for_model(**given)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigurationError(
            f"{path} is no config.json of a model that transformers knows: {error}"
        ) from error

    def model() -> nn.Module:
        found = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.float32)
        if checkpointing:
            found.gradient_checkpointing_enable({"use_reentrant": False, **_CHECKPOINTING[checkpointing]})
        found.train()
        return found  # type: ignore[no-any-return]

    def loss(found: nn.Module, batch: int) -> torch.Tensor:
        tokens = torch.empty(batch, sequence, dtype=torch.int64, device="meta")
        result: torch.Tensor = found(input_ids=tokens, labels=tokens, use_cache=False).loss
        return result

    name = path.stem if path.stem != "config" else made.model_type
    chosen = optimizer_named(optimizer or "AdamW")
    return Subject(name, model, loss, chosen, blocks_of, compute, reduce, sequence)


def _selective() -> tuple[ContextManager[None], ContextManager[None]]:
    """Makes contexts that keep what takes long to compute again: attention, and every other matrix product."""
    products = dict.fromkeys((False, True), 0)  # so far, in forward and when computed again

    def keeps(
        context: SelectiveCheckpointContext, func: torch._ops.OpOverload, *args: Tree, **kwargs: Tree
    ) -> CheckpointPolicy:
        if func is torch.ops.aten.mm.default:
            products[context.is_recompute] += 1
            keep = products[context.is_recompute] % 2 == 1
        else:
            keep = "scaled_dot_product" in func.name()
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(keeps)  # type: ignore[no-any-return]


_CHECKPOINTING: dict[str | bool, Kwargs] = {True: {}, "full": {}, "selective": {"context_fn": _selective}}


def blocks_of(model: nn.Module, unit: Callable[[nn.Module], nn.Module]) -> None:
    """Makes a unit of each part of a model that the integrations take as one."""
    blocks = {id(m) for m in Sharding().units_of(model)}
    children = [(m, *named) for m in model.modules() for named in m.named_children()]
    for parent, name, child in reversed(children):  # a unit within another one comes first
        if id(child) in blocks:
            setattr(parent, name, unit(child))
