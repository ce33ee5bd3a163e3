"""Subjects of estimates: an Experiment, or a model by its Hugging Face configuration."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager as ContextManager
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

from ...errors import ConfigurationError
from ...integrations.sharding import Sharding
from ...types import Kwargs, Tree
from ..verify.experiment import load_experiment
from .stepping import tree_on_meta
from .strategies import Subject


def optimizer_named(name: str) -> tuple[type[torch.optim.Optimizer], Kwargs]:
    """A class of torch.optim with its defaults."""
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
    """``script.py:name`` or ``package.module:name`` that gives a :class:`shardkit.tools.verify.Experiment`.

    Batches get the number of samples that is asked for in the first dimension of each of their tensors.
    """
    experiment = load_experiment(target)
    chosen = (experiment.optimizer, dict(experiment.optimizer_options))

    def units(model: nn.Module, unit: Callable[[nn.Module], nn.Module]) -> None:
        if experiment.wrap is not None:
            experiment.wrap(model, unit)

    def loss(model: nn.Module, batch: int) -> torch.Tensor:
        with torch.device("cpu"):
            example = experiment.batch(0, 0)
        return experiment.loss(model, tree_on_meta(example, batch))

    kind = optimizer_named(optimizer) if optimizer else chosen
    return Subject(target, lambda: experiment.build().to("meta"), loss, kind, units, compute, reduce)


def from_hugging_face(
    config: str | Path, optimizer: str | None = None, compute: torch.dtype | None = None,
    sequence: int = 2048, checkpointing: str | bool = False, reduce: torch.dtype | None = None,
) -> Subject:  # fmt: skip
    """A language model by its ``config.json``; units are the blocks that transformers does not split.

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

    return Subject(path.stem if path.stem != "config" else made.model_type, model, loss,
                   optimizer_named(optimizer or "AdamW"), blocks_of, compute, reduce, sequence)  # fmt: skip


def _selective() -> tuple[ContextManager[None], ContextManager[None]]:
    """Contexts that keep what takes long to compute again: attention, and every other matrix product."""
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


_CHECKPOINTING: dict[str | bool, Kwargs] = {
    True: {}, "full": {}, "selective": {"context_fn": _selective}
}  # fmt: skip


def blocks_of(model: nn.Module, unit: Callable[[nn.Module], nn.Module]) -> None:
    """Makes a unit of each part of a model that the integrations take as one."""
    blocks = {id(m) for m in Sharding().units_of(model)}
    found = [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in parent.named_children()
        if id(child) in blocks
    ]
    for parent, name, child in found:
        setattr(parent, name, unit(child))
