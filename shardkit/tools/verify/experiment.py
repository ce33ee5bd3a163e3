"""Experiments to be verified: a model, its data, its loss, its optimizer, as functions that every process can call."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from shardkit.errors import ConfigurationError

from ...types import SavedState, Tree
from .comparing import Moment, Trace

Unit = Callable[[nn.Module], nn.Module]


@dataclass(frozen=True)
class Experiment:
    """Some steps of training, said so that one process, fairscale and shardkit can all do them.

    Attributes:
        model: makes the model, on the CPU. Called after ``torch.manual_seed(seed)``; every call has to give the same
            values. It may call fairscale's or shardkit's ``wrap``: with FSDP it runs inside ``enable_wrap``.
        batch: a rank's batch at a step, ``batch(step, rank)``; the same values whenever it is called.
        loss: ``loss(model, batch)``, a scalar tensor; ranks' gradients are averaged.
        optimizer: class of the optimizer.
        wrap: ``wrap(model, unit)`` makes units of parts of the model, by ``parent.part = unit(parent.part)``, before
            the whole is made one; None: only the whole is one.
        clip: gradients are clipped to this 2-norm before each optimizer step; None: they are not.
        seed: of start values; dropout masks depend on it, the step and the rank.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[int, int], Tree]
    loss: Callable[[nn.Module, Tree], torch.Tensor]
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD
    optimizer_options: SavedState = field(default_factory=lambda: {"lr": 0.1})
    wrap: Callable[[nn.Module, Unit], None] | None = None
    clip: float | None = None
    seed: int = 0

    def build(self) -> nn.Module:
        """Returns the model with its start values."""
        torch.manual_seed(self.seed)
        return self.model()

    def loss_of(self, model: nn.Module, step: int, rank: int) -> torch.Tensor:
        """Returns the loss of a rank's batch, with dropout masks of its own."""
        batch = self.batch(step, rank)
        torch.manual_seed((self.seed * 1009 + step) * 1009 + rank)
        return self.loss(model, batch)

    def optimizer_over(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Returns the plain optimizer."""
        return self.optimizer(parameters, **self.optimizer_options)  # type: ignore[arg-type]


def load_experiment(target: str) -> Experiment:
    """Loads what ``script.py:name`` or ``package.module:name`` gives: an Experiment, or a function that makes one."""
    source, colon, name = target.rpartition(":")
    if not colon or not source or not name:
        raise ConfigurationError(f"{target!r} has to be script.py:name or package.module:name")
    found = _module(source)
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigurationError(f"{source} has no {name!r}; name a function that returns an Experiment")
        found = getattr(found, part)
    made = found if isinstance(found, Experiment) else found() if callable(found) else found
    if not isinstance(made, Experiment):
        raise ConfigurationError(
            f"{target} gives a {type(made).__name__}; it has to give a shardkit.tools.verify.Experiment"
        )
    return made


def _module(source: str) -> ModuleType:
    if not source.endswith(".py"):
        try:
            return importlib.import_module(source)
        except ModuleNotFoundError as error:
            if error.name is not None and not source.startswith(error.name):
                raise  # something that it imports
            raise ConfigurationError(f"no module {source!r}; for a file, write {source}.py:name") from error
    path = Path(source).resolve()
    if not path.is_file():
        raise ConfigurationError(f"no file {source!r}")
    name = f"_verified_{path.stem}"
    if name not in sys.modules:
        if str(path.parent) not in sys.path:
            sys.path.insert(0, str(path.parent))  # as Python does for a script
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ConfigurationError(f"{source!r} is no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


# ------------------------------------------------------------ the truth
def run_in_one_process(
    experiment: Experiment, world_size: int, steps: int, buffers_follow_rank_0: bool
) -> Trace:
    """Shows what ranks should see: gradients are the mean over their batches, buffers are each rank's own.

    Args:
        buffers_follow_rank_0: as DistributedDataParallel and ShardedDataParallel keep them.
    """
    model = experiment.build()
    shared = {id(p): p for p in model.parameters()}
    models = [model, *(copy.deepcopy(model, dict(shared)) for _ in range(world_size - 1))]
    optimizer = experiment.optimizer_over(model.parameters())
    named = dict(model.named_parameters())
    trace = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=True)
        if buffers_follow_rank_0:
            source = dict(model.named_buffers())
            for name, buffer in (item for replica in models[1:] for item in replica.named_buffers()):
                buffer.data.copy_(source[name])
        losses = []
        for rank, replica in enumerate(models):
            loss = experiment.loss_of(replica, step, rank)
            (loss / world_size).backward()
            losses.append(loss.item())
        gradients = {
            n: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for n, p in named.items()
        }
        if experiment.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), experiment.clip)
        optimizer.step()
        parameters = {n: p.detach().clone() for n, p in named.items()}
        trace.append(Moment(losses, gradients, parameters, persistent_buffers(model)))
    return trace


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies the buffers that state dicts have."""
    names = {n for n, _ in model.named_parameters(remove_duplicate=False)}
    state = model.state_dict()
    return {n: v.detach().clone() for n, v in state.items() if n not in names and isinstance(v, torch.Tensor)}
