"""One rank's steps on meta tensors, watched."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ...errors import ConfigurationError, ShardkitError
from ...torch_seams.tensors import LiveTensors
from ...types import Args, Kwargs, Tree
from .devices import CountingBackend, Device, Mark, Tape, Times, as_fsdp2, clocked
from .subjects import STRATEGIES, Sharded, Subject, fsdp2_padding, fullest_rank, kinds_of

# ------------------------------------------------------------ memory
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
        fullest = fullest_rank(strategy, model, ranks)
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
            times=self._times(group.tape, device),
        )

    def _times(self, tape: Tape | None, device: Device | None) -> dict[str, Times]:
        if tape is None or device is None:
            return {}
        times = {self._strategy: clocked(tape.events, device, self._ranks)}
        if self._strategy == "fsdp":
            theirs = as_fsdp2(tape.events, fsdp2_padding(self._sharded.model, self._ranks))
            times["FSDP2"] = clocked(theirs, device, self._ranks)
        return times

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
        tape = self._backend.counted.tape
        if tape is not None:
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
