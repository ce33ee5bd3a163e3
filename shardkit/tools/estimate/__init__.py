"""Estimates what a training would take, without any memory: the real wrapping and a real step, on meta tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager as ContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

from ...backend import Backend
from ...errors import ConfigurationError, ShardkitError
from ...fsdp import FSDP, fully_shard
from ...fsdp.flat_param import Mirrored
from ...fsdp.originals import as_tensors
from ...fsdp.state import state_of
from ...integrations.sharding import Sharding
from ...layout import greedy_owners
from ...oss.optimizer import OSS
from ...oss.sharded_ddp import ShardedDDP
from ...policy import Frozen, OffloadPolicy, PrecisionPolicy, ReducePolicy, ReshardPolicy
from ...torch_seams.tensors import LiveTensors
from ...tracing.tables import counted, in_bytes, in_time, plain_table
from ...types import Args, Kwargs, StateDict, Tree
from ..trace import new_figure
from ..verify import load_experiment
from .devices import DEVICES as DEVICES
from .devices import CountingBackend, Device, Mark, Tape, Times, as_fsdp2, clocked
from .devices import device_named as device_named

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["DEVICES", "STRATEGIES", "Device", "Estimate", "Subject", "device_named", "estimate"]
__all__ += ["from_experiment", "from_hugging_face", "smallest_ranks", "with_adapters"]


# ------------------------------------------------------------ subjects
# An Experiment, or a model by its Hugging Face configuration; and how each can be sharded.

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


class _Adapted(nn.Module):
    """A layer beside a product of two matrices of low rank."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        like: Kwargs = {"bias": False, "device": base.weight.device, "dtype": base.weight.dtype}
        self.base = base
        self.down = nn.Linear(base.in_features, rank, **like)
        self.up = nn.Linear(rank, base.out_features, **like)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


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
        return found(input_ids=tokens, labels=tokens, use_cache=False).loss  # type: ignore[no-any-return]

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


# ------------------------------------------------------------ memory of one rank's steps on meta tensors
KINDS = ("parameters", "gathered", "gradients", "optimizer state", "activations")
Kinds = Mapping[str, Iterable[torch.Tensor]]


class MemoryWatch(LiveTensors):
    """Counts what operations inside of it use, and looks at it after some of them.

    Args:
        kinds: tells which tensors are of which kind, but activations, which is everything else.
        moments: after which operations to look at the kinds, in order.
        tape: records the operations.

    Attributes:
        peak_at: the number of the operation after which most was alive.
        seen: what :attr:`moments` showed: bytes by kind.
        elsewhere: storages in the host's memory, which does not count.
        is_elsewhere: what is computed now is.
    """

    def __init__(
        self, kinds: Callable[[], Kinds], moments: Iterable[int] = (), tape: Tape | None = None
    ) -> None:
        super().__init__()
        self._tape = tape
        self._kinds, self._moments = kinds, iter(moments)
        self._next = next(self._moments, -1)
        self.operations = 0
        self.peak_at = -1
        self.seen: list[dict[str, int]] = []
        self.elsewhere: set[int] = set()
        self.is_elsewhere = False

    def count(self, storage: torch.UntypedStorage) -> None:
        if not self.is_elsewhere and storage._cdata not in self.elsewhere:
            super().count(storage)

    def grown(self) -> None:
        """Does nothing: what is alive within an operation does not count."""

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> Tree:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self._tape is not None:
            made = {t.untyped_storage()._cdata for t in tree_leaves(result) if isinstance(t, torch.Tensor)}
            on_host = self.is_elsewhere or not made.isdisjoint(self.elsewhere)
            self._tape.operation(func, args, kwargs or {}, result, on_host)
        if self.bytes > self.peak:
            self.peak, self.peak_at = self.bytes, self.operations
        if self.operations == self._next:
            self._next = next(self._moments, -1)
            self.seen.append(self.by_kind())
        self.operations += 1
        return result

    def by_kind(self) -> dict[str, int]:
        """Counts bytes now."""
        found, counted = dict.fromkeys(KINDS, 0), set()
        for kind, tensors in self._kinds().items():
            for tensor in tensors:
                key = tensor.untyped_storage()._cdata
                if key in self._sizes and key not in counted:
                    counted.add(key)
                    found[kind] += self._sizes[key]
        found["activations"] = self.bytes - sum(found.values())
        return found


_MOST = 2**20  # ranks that are tried


@dataclass(frozen=True)
class Estimate:
    """Describes what the fullest rank needs. Bytes.

    Attributes:
        strategy, ranks, batch: of what; samples on each rank.
        parameters: of the whole model, their number.
        peak: most in tensors at once, during a step that is not the first.
        kinds: what that is, by kind (see ``memory.KINDS``).
        resident: between steps.
        sent: on the wire in a step, by each rank, if every collective is done as well as possible.
        collectives: how many, by name.
        course: over a step, (operations so far, bytes by kind); empty unless asked for.
        times: on a device, if one was named, by schedule: the strategy's, and with "fsdp" also FSDP2's.
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
    times: dict[str, Times] = field(default_factory=dict)


def estimate(
    subject: Subject,
    strategy: str,
    ranks: int,
    batch: int = 1,
    *,
    points: int = 0,
    on_host: bool = False,
    device: Device | None = None,
    compiled: bool = False,
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
        device: says how long a step takes there.
        compiled: a compiler fuses what lies between matrix products.

    Raises:
        ConfigurationError: no such strategy, times of ranks on CPUs, or a model that needs values to make a step.
    """
    if strategy not in STRATEGIES:
        raise ConfigurationError(f"no strategy {strategy!r}; choose of {', '.join(map(repr, STRATEGIES))}")
    if ranks < 1 or batch < 1:
        raise ConfigurationError(f"ranks={ranks}, batch={batch}: both have to be 1 or more")
    if on_host and device is not None:
        raise ConfigurationError(
            f"times on {device.name} are not those of ranks on CPUs; ask for one of the two"
        )
    try:
        with torch.device("meta"), as_on_devices(on_host):
            return _MetaTraining(subject, strategy, ranks, batch, on_host).run(points, device, compiled)
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


class _MetaTraining:
    def __init__(self, subject: Subject, strategy: str, ranks: int, batch: int, on_host: bool) -> None:
        self._subject, self._strategy, self._ranks, self._batch = subject, strategy, ranks, batch
        self._watch: MemoryWatch | None = None
        self._resized: dict[int, torch.Tensor] = {}
        model = subject.model()
        self._numel = sum(p.numel() for p in model.parameters())
        loads, params = [0] * ranks, list(model.parameters())
        if strategy == "sharded_ddp":
            greedy_owners([p.numel() for p in params], [p.requires_grad for p in params], loads)
        fullest = loads.index(max(loads))
        self._backend = CountingBackend(ranks, fullest, self._note_resized, on_host)
        self._sharded: Sharded = STRATEGIES[strategy](subject, model, self._backend)
        self._is_on_host = strategy == "fsdp-masters"

    def _note_resized(self, tensor: torch.Tensor) -> None:
        self._resized[tensor.untyped_storage()._cdata] = tensor
        if self._watch is not None:
            self._watch.add(tensor)

    def _kinds(self) -> dict[str, list[torch.Tensor]]:
        return kinds_of(self._sharded, self._resized.values())

    def run(self, points: int, device: Device | None, compiled: bool) -> Estimate:
        self._step()  # state is made, and the order of units is learned
        group = self._backend.counted
        group.reset()
        if device is not None:
            group.tape = Tape(compiled)
        watch = self._watched(())
        sent, collectives = group.sent, dict(group.collectives)
        moments = {watch.peak_at}
        if points:
            moments |= set(range(0, watch.operations, max(1, watch.operations // points)))
        ordered = sorted(moments)
        seen = self._watched(ordered).seen
        course = list(zip(ordered, seen, strict=True))
        schedules = {} if group.tape is None else {self._strategy: group.tape.events}
        if group.tape is not None and self._strategy == "fsdp":
            padding = fsdp2_padding(self._sharded.model, self._ranks)
            schedules["FSDP2"] = as_fsdp2(group.tape.events, padding)
        return Estimate(
            strategy=self._strategy,
            ranks=self._ranks,
            batch=self._batch,
            parameters=self._numel,
            peak=watch.peak,
            kinds=dict(course)[watch.peak_at],
            resident=watch.bytes,
            sent=sent,
            collectives=collectives,
            course=course if points else [],
            times={}
            if device is None
            else {k: clocked(v, device, self._ranks) for k, v in schedules.items()},
        )

    def _watched(self, moments: Sequence[int]) -> MemoryWatch:
        watch = MemoryWatch(self._kinds, moments, self._backend.counted.tape)
        watch.elsewhere = self._backend.pinned_storages
        if self._is_on_host:
            watch.elsewhere |= {p.untyped_storage()._cdata for p in self._sharded.model.parameters()}
        watch.add(self._kinds())
        self._watch = watch
        with watch:
            self._step()
        self._watch = None
        return watch

    def _step(self) -> None:
        model, optimizer = self._sharded
        optimizer.zero_grad(set_to_none=True)
        loss = self._subject.loss(model, self._batch)
        if (tape := self._backend.counted.tape) is not None:
            tape.add(Mark("backward"))
        loss.backward()
        if self._watch is not None:
            self._watch.is_elsewhere = self._is_on_host
        with torch.device("cpu"):  # for its own counters, which have values
            optimizer.step()
        if self._watch is not None:
            self._watch.is_elsewhere = False
        optimizer.zero_grad(set_to_none=True)
        if tape is not None:
            tape.add(Mark("step"))


def smallest_ranks(subject: Subject, strategy: str, batch: int, limit: int) -> Estimate | None:
    """Estimates the fewest ranks whose peak is at most ``limit`` bytes; None if no number of ranks is enough.

    What every rank holds whole (activations, a gathered unit) does not shrink with ranks: where doubling them changes
    the peak by less than 1 %, more are not tried.
    """
    found = estimate(subject, strategy, 1, batch)
    too_few = 0
    while found.peak > limit:
        before, too_few = found.peak, found.ranks
        found = estimate(subject, strategy, 2 * too_few, batch)
        if found.peak > limit and (found.peak > 0.99 * before or found.ranks >= _MOST):
            return None
    while found.ranks - too_few > 1:
        middle = estimate(subject, strategy, (found.ranks + too_few) // 2, batch)
        if middle.peak <= limit:
            found = middle
        else:
            too_few = middle.ranks
    return found


# ------------------------------------------------------------ meta tensors as on devices
_attention = F.scaled_dot_product_attention
_ALL = (torch.all, torch.Tensor.all)
_ANY = (torch.any, torch.Tensor.any)


class _ChecksPass(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Tree], types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Tree:
        result = func(*args, **(kwargs or {}))
        is_check = (func in _ALL or func in _ANY) and isinstance(result, torch.Tensor)
        if is_check and result.is_meta and not result.dim():
            return torch.tensor(func in _ALL, device="cpu")
        return result


@contextlib.contextmanager
def as_on_devices(on_host: bool) -> Iterator[None]:
    """Makes meta tensors do, inside, what tensors of a device would.

    - ``scaled_dot_product_attention`` keeps its inputs, its output and one number for each row. For meta tensors torch
      would choose operations that make the matrix of all queries and keys, which no device does that has a fused one.
    - Code that asks whether a condition holds for all values, or for any (is there padding? is something NaN?), finds
      that it does, or that it doesn't.

    Args:
        on_host: the device is a CPU, whose fused attention knows no dropout.
    """
    attention = partial(_fused, knows_dropout=not on_host)
    # no function mode: what a backward computes again is called without
    with mock.patch.object(F, "scaled_dot_product_attention", attention), _ChecksPass():
        yield


def _fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    knows_dropout: bool,
) -> Tree:
    fits = query.is_meta and query.dim() == 4 and query.shape[-1] == value.shape[-1]
    if not fits or (dropout_p and not knows_dropout) or (attn_mask is not None and attn_mask.requires_grad):
        return _attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.empty((), dtype=query.dtype, device="meta").expand(attn_mask.shape)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]


# ------------------------------------------------------------ reports, for people and as data


def as_text(subject: Subject, estimates: Sequence[Estimate], limit: float | None = None) -> str:
    """Returns a table, a line for each estimate; ``limit`` is what a device has, in bytes."""
    head = ("strategy", "ranks", "batch", "peak", *KINDS, "sent a step", "fits")
    rows = []
    for e in estimates:
        sizes = map(in_bytes, (e.peak, *(e.kinds[kind] for kind in KINDS), e.sent))
        fits = "" if limit is None else "yes" if e.peak <= limit else "no"
        rows.append((e.strategy, f"{e.ranks:,}", f"{e.batch:,}", *sizes, fits))
    title = f"{subject.name}: {counted(estimates[0].parameters, 'parameter')}; the fullest rank, at the peak of a step"
    return f"{title}\n{plain_table(head, rows, right=range(1, 10))}"


def times_as_text(subject: Subject, estimates: Sequence[Estimate], device: Device) -> str:
    """Returns a table of times, a line for each schedule of each estimate."""
    what = "tokens" if subject.tokens else "samples"
    times_of = ("step", "exposed", "of it", "collectives", "in flight")
    head = ("schedule", "ranks", "batch", *times_of, f"{what}/s a rank", "all ranks")
    rows = []
    for e in estimates:
        for name, t in e.times.items():
            rate = e.batch * max(1, subject.tokens) / t.step
            step, exposed, busy = (in_time(1e6 * time) for time in (t.step, t.exposed, t.communicating))
            times = (step, exposed, f"{100 * t.exposed / t.step:.1f} %", busy, in_bytes(t.in_flight))
            numbers = [f"{n:,.0f}" for n in (e.ranks, e.batch, rate, rate * e.ranks)]
            rows.append((name, *numbers[:2], *times, *numbers[2:]))
    title = f"a step on {device.name}; {device.source or 'no source is given'}"
    return f"{title}\n{plain_table(head, rows, right=range(1, 10))}"


def as_data(subject: Subject, estimates: Sequence[Estimate]) -> StateDict:
    """Returns what JSON takes: bytes, numbers of collectives, seconds."""
    return {"subject": subject.name, "estimates": [dataclasses.asdict(e) for e in estimates]}


def in_words(strategy: str, batch: int, limit: int, found: Estimate | None) -> str:
    if found is None:
        return f"{strategy}, batch {batch}: no number of ranks is enough for {in_bytes(limit)} on each"
    return (
        f"{strategy}, batch {batch}: {counted(found.ranks, 'rank')} {'is' if found.ranks == 1 else 'are'} enough for "
        f"{in_bytes(limit)} on each ({in_bytes(found.peak)})"
    )


_SIZES = (8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 128, 141, 180, 192, 288)  # GB that devices are sold with


def device_in_words(found: Estimate) -> str:
    """Names the smallest device that has room, and a tenth more."""
    enough = [size for size in _SIZES if 1.1 * found.peak <= size * 1e9]
    what = f"a device of {enough[0]} GB is enough" if enough else "no single device is enough"
    return f"{found.strategy}, {counted(found.ranks, 'rank')}, batch {found.batch}: {what} ({in_bytes(found.peak)})"


# ------------------------------------------------------------ pictures
_GIB = 2**30
_MARKERS = "osD^v*"
Points = Sequence[tuple[int, float, float]]  # ranks, value, what of it is shaded


def plot(
    subject: Subject, estimates: Sequence[Estimate], path: str | Path, limit: float | None = None
) -> None:
    """Writes a picture (SVG, PNG or PDF, by the file's name).

    On the left is the first estimate's memory over a step (it has to have its course), then what a rank sends in a step
    for each strategy, beside DDP's two and FSDP2's three parts of the parameters in the same precision, then how long
    a step takes, if estimates have times.

    Args:
        limit: what a device has, in bytes.
    """
    first = estimates[0]
    alike = sorted((e for e in estimates if e.batch == first.batch), key=lambda e: e.ranks)
    times: dict[str, list[tuple[int, float, float]]] = {}
    for e in alike:
        for name, t in e.times.items():
            times.setdefault(name, []).append((e.ranks, t.step, t.exposed))
    figure = new_figure(6.5 * (3 if times else 2), 5)
    memory, wire, *clock = figure.subplots(1, 3 if times else 2)
    _over_a_step(memory, first, limit)
    sent: dict[str, list[tuple[int, float, float]]] = {}
    for e in alike:
        sent.setdefault(e.strategy, []).append((e.ranks, e.sent / _GIB, 0.0))
    _lines(wire, sent)
    ranks = sorted({e.ranks for e in alike})
    dtype = subject.compute or torch.float32
    for name, parts, style in (("DDP", 2, ":"), ("FSDP2", 3, "--")):
        theirs = [parts * dtype.itemsize * first.parameters * (w - 1) / w / _GIB for w in ranks]
        label = f"{name} in {str(dtype).removeprefix('torch.')}"
        wire.plot(ranks, theirs, linestyle=style, color="grey", label=label)
    wire.set(title="sent in a step", ylabel="GiB from each rank")
    for axes in clock:
        _lines(axes, times)
        axes.set(title="time of a step, and what of it is exposed", ylabel="seconds")
    for axes in (wire, *clock):
        axes.set(xlabel="ranks", xscale="log", ylim=(0, None))
        axes.set_xticks(ranks, labels=[f"{w:,}" for w in ranks])
        axes.minorticks_off()
        axes.legend()
    figure.suptitle(subject.name)
    figure.savefig(path)


def _over_a_step(axes: Axes, first: Estimate, limit: float | None) -> None:
    steps = [at for at, _ in first.course]
    axes.stackplot(steps, [[kinds[k] / _GIB for _, kinds in first.course] for k in KINDS], labels=KINDS)
    if limit is not None:
        axes.axhline(limit / _GIB, color="black", linestyle="--", label="the device's memory")
    axes.set(
        title=f"{first.strategy}, {first.ranks} ranks, batch {first.batch}",
        xlabel="operations of a step",
        ylabel="GiB on the fullest rank",
        ylim=(0, None),
    )
    axes.legend(loc="upper left")


def _lines(axes: Axes, series: Mapping[str, Points]) -> None:
    """Draws a line for each; the first ones are wide, so that none that lies on them hides them."""
    ours = iter(range(10))
    for k, ((name, points), marker) in enumerate(zip(series.items(), cycle(_MARKERS), strict=False)):
        ranks, values, parts = zip(*points, strict=True)
        width = 1 + 2 * (len(series) - 1 - k)
        color = "grey" if name == "FSDP2" else f"C{next(ours)}"  # the same in each picture
        axes.plot(
            ranks, values, marker=marker, linewidth=width, markersize=4 + width, label=name, color=color
        )
        if any(parts):
            below = [value - part for value, part in zip(values, parts, strict=True)]
            axes.fill_between(ranks, below, values, alpha=0.3, color=color, label=f"{name}, exposed")
