"""One rank's steps on meta tensors, watched."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ..errors import ConfigurationError, ShardkitError
from ..types import Kwargs, Tree
from .as_on_devices import as_on_devices
from .counting import CountingBackend
from .memory import MemoryWatch
from .strategies import STRATEGIES, Recipe, Sharded, Units, fullest_rank, kinds_of


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
    """

    name: str
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int], torch.Tensor]
    optimizer: tuple[type[torch.optim.Optimizer], Kwargs]
    units: Units
    compute: torch.dtype | None = None


@dataclass(frozen=True)
class Estimate:
    """What one rank needs: the fullest one. Bytes.

    Attributes:
        strategy, ranks, batch: of what; samples on each rank.
        parameters: of the whole model, their number.
        peak: most in tensors at once, during a step that is not the first.
        kinds: what that is, by kind (see ``memory.KINDS``).
        resident: between steps.
        sent: on the wire in a step, by each rank, if every collective is done as well as possible.
        collectives: how many, by name.
        course: over a step, (operations so far, bytes by kind); empty unless asked for.
    """

    strategy: str
    ranks: int
    batch: int
    parameters: int
    peak: int
    kinds: dict[str, int]
    resident: int
    sent: float
    collectives: dict[str, int]
    course: list[tuple[int, dict[str, int]]] = field(default_factory=list)


def estimate(
    subject: Subject, strategy: str, ranks: int, batch: int = 1, *, points: int = 0, on_host: bool = False
) -> Estimate:
    """Wraps the subject's model as ``strategy`` says, and runs steps of the fullest of so many ranks.

    Tensors are on the meta device: nothing is computed, and no memory is used. What an operation needs within itself, a
    device's allocator loses between blocks, and its libraries take, is not counted.

    Args:
        strategy: one of :data:`STRATEGIES`.
        ranks: world size, from 1.
        batch: samples on each rank.
        points: how many points of the course of a step are wanted.
        on_host: ranks train on CPUs, over gloo, which holds what arrives; else on devices.

    Raises:
        ConfigurationError: no such strategy, or a model that needs values to make a step.
    """
    if strategy not in STRATEGIES:
        raise ConfigurationError(f"no strategy {strategy!r}; choose of {', '.join(map(repr, STRATEGIES))}")
    if ranks < 1 or batch < 1:
        raise ConfigurationError(f"ranks={ranks}, batch={batch}: both have to be 1 or more")
    with _without_values(subject), torch.device("meta"), as_on_devices(on_host):
        return _Rehearsal(subject, strategy, ranks, batch, on_host).run(points)


@contextlib.contextmanager
def _without_values(subject: Subject) -> Iterator[None]:
    try:
        yield
    except (NotImplementedError, RuntimeError, ValueError) as error:
        if isinstance(error, ShardkitError):
            raise
        if "meta tensor" in str(error):
            raise ConfigurationError(
                f"{subject.name} can't be estimated: building it or one of its steps needs values, which the meta "
                f"device does not have ({error}). Leave out what reads values (item(), data-dependent shapes, loaded "
                "weights)"
            ) from error
        raise ConfigurationError(
            f"{subject.name} can't be estimated: building it or one of its steps raised {type(error).__name__}: "
            f"{error}. Kernels that want another dtype run with one of computation (--dtype bfloat16)"
        ) from error


class _Rehearsal:
    def __init__(self, subject: Subject, strategy: str, ranks: int, batch: int, on_host: bool) -> None:
        self._subject, self._strategy, self._ranks, self._batch = subject, strategy, ranks, batch
        self._watch: MemoryWatch | None = None
        self._resized: dict[int, torch.Tensor] = {}
        model = subject.model()
        self._numel = sum(p.numel() for p in model.parameters())
        fullest = fullest_rank(strategy, model, ranks)
        self._backend = CountingBackend(ranks, fullest, self._note_resized, on_host)
        recipe = Recipe(model, subject.units, subject.optimizer, subject.compute, self._backend)
        self._sharded: Sharded = STRATEGIES[strategy](recipe)

    def _note_resized(self, tensor: torch.Tensor) -> None:
        self._resized[tensor.untyped_storage()._cdata] = tensor
        if self._watch is not None:
            self._watch.watch(tensor)

    def _kinds(self) -> dict[str, list[torch.Tensor]]:
        return kinds_of(self._sharded, self._resized.values())

    def run(self, points: int) -> Estimate:
        self._step()  # state is made, and the order of units is learned
        group = self._backend.counted
        group.reset()
        watch = self._watched(())
        sent, collectives = group.sent, dict(group.collectives)
        moments = {watch.peak_at}
        if points:
            moments |= set(range(0, watch.operations, max(1, watch.operations // points)))
        ordered = sorted(moments)
        seen = self._watched(ordered).seen
        course = list(zip(ordered, seen, strict=True))
        return Estimate(
            self._strategy, self._ranks, self._batch, self._numel, watch.peak, dict(course)[watch.peak_at],
            watch.bytes, sent, collectives, course if points else [],
        )  # fmt: skip

    def _watched(self, moments: Sequence[int]) -> MemoryWatch:
        watch = MemoryWatch(self._kinds, moments)
        for tensors in self._kinds().values():
            for tensor in tensors:
                watch.watch(tensor)
        self._watch = watch
        with watch:
            self._step()
        self._watch = None
        return watch

    def _step(self) -> None:
        model, optimizer = self._sharded
        optimizer.zero_grad(set_to_none=True)
        self._subject.loss(model, self._batch).backward()
        with torch.device("cpu"):  # for its own counters, which have values
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def tree_on_meta(tree: Tree, batch: int | None) -> Tree:
    """The same without values, with so many samples in the first dimension of each tensor."""

    def on_meta(value: Tree) -> Tree:
        if not isinstance(value, torch.Tensor):
            return value
        shape = list(value.shape)
        if batch is not None and shape:
            shape[0] = batch
        return torch.empty(shape, dtype=value.dtype, device="meta")

    return tree_map(on_meta, tree)
