"""Gradients of which each rank holds a part, their norms, and the class that tells them apart from others.

torch's own functions know nothing of ranks: ``torch.nn.utils.clip_grad_norm_`` would scale each rank's gradients by
another factor, and ``torch.amp.GradScaler`` would skip a step on one rank alone. So between backward and step a
gradient whose other parts are on other ranks has a class of its own, which answers these two with what is true over
all ranks. Everything else sees a plain tensor: a norm that somebody takes by hand is that of this rank's part, as code
written for shards expects (a warning says so). In a step the class is ``torch.Tensor`` again, and costs nothing.

[Note: unfinished norms] torch takes the norm of each gradient, stacks these, and takes the norm of the stack. The
first norms stay this rank's; only that of the stack sums over ranks: one collective, however many gradients there are.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import sys
import weakref
from collections.abc import Iterable, Sequence
from types import FunctionType
from typing import ClassVar, NamedTuple

import torch
from torch.amp import GradScaler
from torch.linalg import vector_norm
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from ..backend import Group, ReduceOp, backend_for_device
from ..errors import BackendError, ConfigurationError, LifecycleError
from ..optimizers.shards import shard_behind, take_part
from ..torch_seams.tensors import (
    MarkedTensor,
    alike,
    as_plain,
    is_dtensor,
    like_dtensor,
    local_of,
    of_dtensors,
    stays_marked,
)
from ..tracing import ranges
from ..tracing.ranges import CLIP
from ..types import AnyCallable, Args, Kwargs, Memo, StateDict, Tree
from .ordered import exact_norm


class Portion(NamedTuple):
    """Gradients that lie on several ranks, each on one of them.

    Attributes:
        groups: where the others are; none: every rank has these same ones. Several: what the ranks of the first have
            together is one part of what those of the second have together, and so on.
    """

    gradients: list[torch.Tensor]
    groups: Sequence[Group]


# Groups whose ranks may have come through different numbers of a step's micro-batches: one for each open block of
# shardkit.uneven. What ranks tell each other there goes over the channel that norms take.
in_parts: list[Group] = []


def check_whole(groups: Iterable[Group]) -> None:
    """Raises LifecycleError where gradients are those of some micro-batches, and ranks don't meet over them."""
    for group, open_one in itertools.product(groups, in_parts):
        is_this_rank = group.ranks[group.rank] == open_one.ranks[open_one.rank]  # ranks may be threads
        if is_this_rank and len({*group.ranks} & {*open_one.ranks}) > 1:
            raise asked_in_parts()


def asked_in_parts() -> LifecycleError:
    """Says what is not possible before all micro-batches are through."""
    return LifecycleError(
        "a norm or an overflow of gradients was asked for inside of uneven(), where they are those of some "
        "micro-batches. Unscale, clip and step after the block, where gradients are those of all micro-batches"
    )


def dense(gradients: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Returns gradients as dense tensors; of sparse ones the values (after summing what stands twice)."""
    return [g.coalesce()._values() if g.is_sparse else g for g in gradients]


def is_exact(norm_type: float) -> bool:
    """Says whether a norm whose bits don't depend on ranks is :func:`exact_norm`'s; the largest number is always such.

    Raises:
        ConfigurationError: there is none of this order.
    """
    if norm_type != 2.0 and not math.isinf(norm_type):
        raise ConfigurationError(
            f'a norm of order {norm_type:g} with order="fixed": of other orders than 2 and inf it is rounded as the '
            "shards are cut. Clip by one of these"
        )
    return norm_type == 2.0


def order_of(
    norm_type: float | str = 2.0, *, p: float | str | None = None, ord: float | None = None, **others: object
) -> float:
    """Returns the order of a norm from what a function of torch's was called with after the tensor."""
    return float(next(given for given in (p, ord, norm_type) if given is not None))


def nothing(norm_type: float) -> float:
    """Returns the norm of no gradients: what changes no other norm that it is combined with."""
    return math.inf if norm_type < 0 else 0.0


def local_norm(
    gradients: Sequence[torch.Tensor], norm_type: float, like: torch.Tensor, foreach: bool | None = None
) -> torch.Tensor:
    """Returns the norm of this rank's gradients seen as one; 0-dim.

    Device and dtype are those of ``like``: they have to be the same on all ranks, whatever gradients these hold.
    """
    with torch._C.DisableTorchFunctionSubclass():  # gradients of shards answer torch with norms over ranks
        there = [g if type(g) is torch.Tensor else g.as_subclass(torch.Tensor) for g in dense(gradients)]
        there = [g for g in there if g.numel()]
        if not there:
            return torch.full_like(like, nothing(norm_type))
        norm = torch.nn.utils.get_total_norm(there, norm_type, foreach=foreach)
    return norm.to(device=like.device, dtype=like.dtype)


def norm_like(params: Sequence[torch.Tensor], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Makes a 0-dim tensor with the parameters' device and the widest of their dtypes, real and ``dtype`` at least."""
    for p in params:
        dtype = torch.promote_types(dtype, p.dtype.to_real() if p.dtype.is_complex else p.dtype)
    return torch.zeros((), dtype=dtype, device=params[0].device)


def global_norm(local: torch.Tensor, norm_type: float, group: Group, label: str = "") -> torch.Tensor:
    """Returns the norm over all ranks of the group from each rank's :func:`local_norm`; every rank calls it."""
    if in_parts:
        check_whole((group,))
    if group.world_size == 1:
        return local
    # gradients are offloaded, and the library takes no host tensors
    if local.device.type != group.backend.device_type:
        return global_norm(local.to(group.backend.device()), norm_type, group, label).to(local.device)
    control, label = group.channel("control"), label or "norm of gradients"
    if math.isinf(norm_type):
        total, op = local.clone(), ReduceOp.MAX if norm_type > 0 else ReduceOp.MIN
        with CLIP.norm():
            control.all_reduce(total, op=op, label=label)
        return total
    total = local.clone() if norm_type == 0 else local.pow(norm_type)  # of order 0: how many are not zero
    with CLIP.norm():
        control.all_reduce(total, label=label)
    return total if norm_type == 0 else total.pow(1.0 / norm_type)


def combined(norms: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Returns the norm of everything from those of its parts."""
    if len(norms) == 1:
        return norms[0]
    stacked = torch.stack(list(norms))
    return stacked.sum() if norm_type == 0 else torch.linalg.vector_norm(stacked, norm_type)


# By group of ranks, what they have clipped to lately: told once, since nobody waits for a number that stays.
_clipped_to: weakref.WeakKeyDictionary[Group, set[str]] = weakref.WeakKeyDictionary()
_LATELY = 8  # numbers; those of an adaptive norm are other ones in each step


def _agree_on_clipping(groups: Iterable[Group], max_norm: object, norm_type: float) -> None:
    """Refuses ranks that clip to other norms (collective, where they have not clipped to these before)."""
    for group in groups if isinstance(max_norm, int | float) else ():
        known, what = _clipped_to.setdefault(group, set()), f"clipping to {max_norm:g}, norm {norm_type:g}"
        if what not in known and group.world_size > 1:
            group.channel("control").agree(what)
            if len(known) == _LATELY:
                known.clear()
            known.add(what)


@torch.no_grad()
def clip_by_global_norm(
    portions: Sequence[Portion],
    clipped: Sequence[torch.Tensor],
    like: torch.Tensor,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    in_order: bool = False,
) -> torch.Tensor:
    """Scales ``clipped`` so that the norm of all ``portions`` is at most ``max_norm``; returns that norm (0-dim).

    Every rank calls it with portions of the same groups in the same order.
    """
    among = [group for _, groups in portions for group in groups]
    if in_parts:
        check_whole(among)
    _agree_on_clipping(among, max_norm, norm_type)
    with CLIP.clip():
        if in_order and is_exact(norm_type):
            total = exact_norm([(dense(map(local_of, each)), groups) for each, groups in portions], like)
        else:
            norms = []
            for gradients, groups in portions:
                norm = local_norm(gradients, norm_type, like, foreach)
                for group in groups:
                    norm = global_norm(norm, norm_type, group)
                norms.append(norm)
            total = combined(norms, norm_type)
    if ranges.listening:
        ranges.report_number("gradient_norm", total)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"The total norm of order {norm_type} of the gradients is {total.item()}, so it can't be clipped. Pass "
            "error_if_nonfinite=False to scale by it anyway."
        )
    # no branch on the value: it would wait for the device
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    tensors = [g._values() if g.is_sparse else g for g in clipped]
    for same in alike(tensors):
        torch._foreach_mul_(same, coefficient.to(same[0].device))
    return total


# ------------------------------------------------------------ gradients with a class of their own
_NORM, _NORMS = frozenset({torch.linalg.vector_norm, torch.norm}), torch._foreach_norm
_ANY_NORM = _NORM | {_NORMS, torch.Tensor.norm, torch.linalg.norm, torch.linalg.matrix_norm}
_MAX, _UNSCALE = torch.Tensor.max, torch._amp_foreach_non_finite_check_and_unscale_
_CLIPPING, _FUNCTIONAL, _OVERRIDES = clip_grad.__dict__, torch.functional.__dict__, torch.overrides.__dict__
_THROUGH_MODE = "__torch_function__"
_warned_of_parts: weakref.WeakSet[Group] = weakref.WeakSet()
_classes: weakref.WeakKeyDictionary[Group, dict[str, type[torch.Tensor]]] = weakref.WeakKeyDictionary()


class ShardGradient(MarkedTensor):
    """A gradient whose other parts are on other ranks; made by :func:`gradient_class`.

    Attributes:
        group_of: the ranks, None once they are gone.
        has_padding: zeros may stand among the elements that are no gradient's.
        instead: the call that takes any norm.
        kept: parameters, held weakly, of which each has its gradient on one rank alone; empty where each rank has a
            part of every gradient.
        in_order: norms are to have the same bits on any number of ranks.
    """

    group_of: ClassVar[weakref.ref[Group]]
    has_padding: ClassVar[bool]
    instead: ClassVar[str]
    kept: ClassVar[Sequence[weakref.ref[torch.Tensor]]]
    in_order: ClassVar[bool]

    @classmethod
    def __torch_function__(
        cls, func: AnyCallable, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Tree:
        kwargs = kwargs or {}
        if func in _ANY_NORM:
            if (func in _NORM or func is _NORMS) and is_clipping():
                with as_plain():
                    return _unfinished_norms(func is _NORMS, args[0], order_of(*args[1:], **kwargs))
            _warn_of_part(cls, args[0][0] if func is _NORMS else args[0])
        if func is _MAX and is_clipping():
            raise ConfigurationError(
                "what stands in the place of torch.nn.utils.clip_grad_norm_ here takes the largest element of each "
                f"gradient, of which this rank has a part; call {cls.instead} with norm_type=inf"
            )
        with as_plain():
            result = func(*args, **kwargs)
            if func is _UNSCALE:
                shards = (g for g in args[0] if isinstance(g, ShardGradient) and not is_dtensor(g))
                agree_on_overflow({_group_of(g) for g in shards}, args[1])
            elif stays_marked(result, args, ShardGradient):
                result.__class__ = cls  # a clone, a detached or a scaled one is such a gradient too
        return result

    def __deepcopy__(self, memo: Memo) -> torch.Tensor:
        with as_plain():
            copied = memo[id(self)] = local_of(self).as_subclass(torch.Tensor).clone()
            if is_dtensor(self):
                copied = memo[id(self)] = like_dtensor(copied, self)
        return copied


class RowlessGradient(torch.Tensor):
    """A DTensor's gradient of which some ranks have no rows, and so no largest element.

    torch's norm raises on these ranks alone, and the others wait for them.
    """

    @classmethod
    def __torch_function__(
        cls, func: AnyCallable, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Tree:
        with as_plain():
            if func in _NORM or func is _NORMS:
                value = nothing(order_of(*args[1:], **(kwargs or {})))
                there = [_with_rows(g, value) for g in ([args[0]] if func in _NORM else args[0])]
                args = (there[0] if func in _NORM else there, *args[1:])
            return func(*args, **(kwargs or {}))


def _with_rows(gradient: Tree, value: float) -> torch.Tensor:
    local = local_of(gradient)
    if local.numel() or not is_dtensor(gradient):
        return gradient  # type: ignore[no-any-return]
    return like_dtensor(local.new_full([1] * local.dim(), value), gradient)


class GradientInParts(MarkedTensor):
    """A gradient of some of a step's micro-batches, over which ranks don't meet.

    torch would unscale and clip what a rank has by now, and over DTensors wait for ranks that are elsewhere.
    """

    @classmethod
    def __torch_function__(
        cls, func: AnyCallable, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Tree:
        if func is _UNSCALE or ((func in _NORM or func is _NORMS) and is_clipping()):
            raise asked_in_parts()
        with as_plain():
            result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.detach:  # torch_xla's clipping takes norms of detached ones
            mark_in_parts(result)
        return result


def mark_in_parts(gradient: torch.Tensor) -> None:
    """Makes a gradient refuse what needs all of a step's micro-batches, until it has its class back."""
    kind = of_dtensors(GradientInParts, type(gradient)) if is_dtensor(gradient) else GradientInParts
    gradient.__class__ = kind  # type: ignore[assignment]


def mark(gradients: Iterable[torch.Tensor | None], kind: type[torch.Tensor]) -> None:
    """Gives plain gradients a class that says what is true over ranks.

    A DTensor's norm becomes exact, or right without rows; all else torch itself knows of one.
    """
    is_of_dtensors = getattr(kind, "in_order", True)
    for g in gradients if kind is not torch.Tensor else ():
        if type(g) is torch.Tensor:
            g.__class__ = kind
        elif g is not None and is_of_dtensors and is_dtensor(g) and not isinstance(g, ShardGradient | kind):
            g.__class__ = of_dtensors(kind, type(g))  # type: ignore[assignment]


def is_clipping() -> bool:
    """Says whether it is torch's clipping that asks, or what another package put in its place."""
    frame = sys._getframe(2)
    # torch.norm is no builtin, and modes (of a default device, of a rehearsal) call what they are called for
    while (
        frame.f_globals is _FUNCTIONAL
        or frame.f_globals is _OVERRIDES
        or frame.f_code.co_name == _THROUGH_MODE
    ):
        frame = frame.f_back  # type: ignore[assignment]
    asking, clipping = frame.f_globals, torch.nn.utils.clip_grad_norm_
    return asking is _CLIPPING or (isinstance(clipping, FunctionType) and asking is clipping.__globals__)


def gradient_class(
    group: Group, instead: str, has_padding: bool, kept: Sequence[torch.Tensor] = (), in_order: bool = False
) -> type[torch.Tensor]:
    """Makes the class of gradients that have parts on a group's ranks; the plain one where there is one rank.

    Args:
        group: the ranks; not kept alive.
        instead: the call that clips by any norm.
        has_padding: zeros may stand among the elements that are no gradient's.
        kept, in_order: see :class:`ShardGradient`.
    """
    if group.world_size == 1 and not in_order:
        return torch.Tensor
    made = _classes.setdefault(group, {})
    name = f"{instead}, in order" if in_order else instead
    if name in made and not kept:
        return made[name]
    take_part(_in_steps)
    _meet_in_scalers()
    _reduced_among.update((p, weakref.ref(group)) for p in kept)
    facts: StateDict = {"group_of": weakref.ref(group), "has_padding": has_padding, "instead": instead}
    # whose gradients have the class
    facts["kept"], facts["in_order"] = [weakref.ref(p) for p in kept], in_order
    kind = type("ShardGradient", (ShardGradient,), facts)
    if not kept:  # else the class would keep these parameters as long as there is the group
        made[name] = kind
    return kind


def _group_of(gradient: ShardGradient | type[ShardGradient]) -> Group:
    if (group := gradient.group_of()) is None:
        raise LifecycleError("the ranks that hold the other parts of this gradient are gone")
    return group


def _warn_of_part(kind: type[ShardGradient], of: torch.Tensor) -> None:
    """Warns, once, of a norm that a program takes by itself: it may add the other ranks' parts, or forget them."""
    group = kind.group_of()
    if group is not None and group not in _warned_of_parts and not is_dtensor(of):  # whose norms are whole
        _warned_of_parts.add(group)
        logging.getLogger("shardkit").warning(
            f"rank {group.rank}: a norm of gradients was taken of which other ranks hold parts: it is of this rank's "
            f"part alone. torch.nn.utils.clip_grad_norm_, get_total_norm and {kind.instead} give that over all ranks"
        )


# ------------------------------------------------------------ torch.nn.utils.clip_grad_norm_ and get_total_norm
class _UnfinishedNorm(torch.Tensor):
    """This rank's part of a norm, 0-dim, or several of them; see [Note: unfinished norms]."""

    of: list[ShardGradient | None]  # the gradients whose norms these are; None for plain ones

    @classmethod
    def __torch_function__(
        cls, func: AnyCallable, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Tree:
        with as_plain():
            if func in _NORM:
                return _finished_norm(args[0], order_of(*args[1:], **(kwargs or {})))
            result = func(*args, **(kwargs or {}))
            if func is torch.stack:
                of = [g for t in args[0] for g in (t.of if isinstance(t, _UnfinishedNorm) else [None])]
                return _unfinished(result, of)
            if isinstance(result, torch.Tensor):  # on its way to another device
                return _unfinished(result, args[0].of)
            return result


def _unfinished(norm: torch.Tensor, of: list[ShardGradient | None]) -> torch.Tensor:
    made = norm.as_subclass(_UnfinishedNorm)
    made.of = of
    return made


def _unfinished_norms(several: bool, gradients: Tree, norm_type: float) -> Tree:
    each = gradients if several else [gradients]
    here = each
    for g in each:
        if isinstance(g, ShardGradient) and g.in_order and here is each:
            here = list(map(local_of, each))
        if isinstance(g, ShardGradient) and (norm_type == 0 or (norm_type < 0 and g.has_padding)):
            raise ConfigurationError(
                f"a norm of order {norm_type:g} is changed by zeros that pad shards, or counts what other ranks have; "
                f"{g.instead} takes it right, or says that there is none"
            )
    # a shard may have no rows here, and nothing has no largest element
    there = [g for g in here if g.numel()]
    taken = _NORMS(there, norm_type) if several and there else [vector_norm(g, norm_type) for g in there]
    norms = iter(taken)
    marked = [
        _unfinished(n, [g]) if isinstance(g, ShardGradient) else n
        for g, local in zip(each, here, strict=True)
        for n in [next(norms) if local.numel() else local.new_full((), nothing(norm_type))]
    ]
    return marked if several else marked[0]


def _finished_norm(norms: _UnfinishedNorm, norm_type: float) -> torch.Tensor:
    """Returns the norm over all ranks (collective) of a stack of norms."""
    order, kinds = norm_type, [None if g is None else type(g) for g in norms.of]
    values = norms.as_subclass(torch.Tensor).to(torch.promote_types(norms.dtype, torch.float32))
    for kind in {k for k in kinds if k is not None}:
        asked, kept = kinds.count(kind), [p for ref in kind.kept if (p := ref()) is not None]
        held = sum(type(p.grad) is kind for p in kept)
        # each rank knows its own part of the parameters alone, and would take the norm of another part
        if kept and asked != held:
            raise ConfigurationError(
                f"the norm of {asked} of the {held} gradients that this rank has: the gradients of other parameters "
                f"are on other ranks. Clip all parameters in one call, or with {kind.instead}, which clips them all"
            )
        if kept:  # other ranks may have gradients of other dtypes
            values = values.to(torch.promote_types(values.dtype, norm_like(kept).dtype))
    groups = [None if k is None else _group_of(k) for k in kinds]
    own = [values[k] for k, g in enumerate(groups) if g is None]
    finished = [combined(own, order)] if own else []
    in_order = [g for g in norms.of if g is not None and g.in_order]
    for group in sorted({g for g in groups if g is not None}, key=lambda g: g.ranks):
        exact = [local_of(g).as_subclass(torch.Tensor) for g in in_order if _group_of(g) is group]
        if exact and is_exact(order):
            check_whole((group,))
            finished.append(exact_norm([(exact, (group,))], values[0]))
            continue
        local = combined([values[k] for k, g in enumerate(groups) if g is group], order)
        # whatever modules a rank has gradients of; on XLA ranks run one program, of devices that may have no fp64
        sent = local.double() if group.backend.has_storage else local
        norm = global_norm(sent, order, group, "norm of gradients, for torch.nn.utils")
        finished.append(norm.to(values.dtype))
    total = combined(finished, order)
    if ranges.listening:
        ranges.report_number("gradient_norm", total)
    return total


# ------------------------------------------------------------ torch.amp.GradScaler
def lacks_kernel(operation: str, device: torch.device) -> bool:
    """Says whether a device has no kernel of its own for one of torch's operations."""
    key = torch._C._dispatch_key_for_device(device.type)
    return not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operation}", key)


def _is_lazy(device: torch.device) -> bool:
    try:
        return not backend_for_device(device.type).has_storage
    except BackendError:  # a device of which only torch knows
        return False


@torch.no_grad()
def unscale(gradients: Iterable[torch.Tensor], inv_scale: torch.Tensor, found_inf: torch.Tensor) -> None:
    """Multiplies in place by ``inv_scale`` [], and sets ``found_inf`` [] to 1 if anything is inf or nan."""
    for values in alike(g._values() if g.is_sparse else g for g in gradients):
        device = values[0].device
        here = device == found_inf.device
        found = found_inf if here else torch.zeros_like(found_inf, device=device)
        inv = inv_scale.to(device)
        if _is_lazy(device) or lacks_kernel(_UNSCALE.__name__, device):
            # in operations that any device has and any compiler fuses; lazy devices have it for fp32 alone
            for v in values:
                found.copy_(torch.maximum(found, (~torch.isfinite(v)).any().to(found.dtype)))
                # in fp32 at least: 1/scale of fp16 would be a subnormal number, or zero
                wide = torch.promote_types(v.dtype, torch.float32)
                v.copy_((v.to(wide) * inv.to(wide)).to(v.dtype))
        else:
            _UNSCALE(values, found, inv)
        if not here:
            found_inf.copy_(torch.maximum(found_inf, found.to(found_inf.device)))


def agree_on_overflow(groups: Iterable[Group], found_inf: torch.Tensor) -> None:
    """Makes an overflow on one rank one on all ranks (collective)."""
    ordered = sorted(groups, key=lambda g: g.ranks)
    check_whole(ordered)
    for group in ordered:
        label = "whether a gradient overflowed, for torch.amp.GradScaler"
        group.channel("control").all_reduce(found_inf, op=ReduceOp.MAX, label=label)


# by parameter, the ranks of which one alone gets its gradient
_reduced_among: WeakIdKeyDictionary = WeakIdKeyDictionary()


@functools.cache
def _meet_in_scalers() -> None:
    """Makes ranks meet once in an optimizer's unscaling: they may have gradients of one dtype, of several, or none."""
    theirs = GradScaler._unscale_grads_

    @functools.wraps(theirs)
    def met(self: GradScaler, optimizer: Optimizer, inv_scale: Tree, found_inf: Tree, fp16: bool) -> Tree:
        params = [p for g in optimizer.param_groups for p in g["params"]]
        groups = {s.group for p in params if (s := shard_behind(p)) is not None and s.group.world_size > 1}
        groups.update(g for p in params if (g := _reduced_among.get(p, type(None))()) is not None)
        if not groups:
            return theirs(self, optimizer, inv_scale, found_inf, fp16)
        check_whole(groups)
        with torch._C.DisableTorchFunctionSubclass():
            if all(g.backend.has_storage for g in groups):
                found = theirs(self, optimizer, inv_scale, found_inf, fp16)
                found_inf = sum([f.to(found_inf.device) for f in found.values()], found_inf)
            else:
                unscale([p.grad for p in params if p.grad is not None], inv_scale, found_inf)
        agree_on_overflow(groups, found_inf)
        return {found_inf.device: found_inf}

    GradScaler._unscale_grads_ = met  # type: ignore[method-assign, assignment]


# ------------------------------------------------------------ steps
class PlainInSteps:
    """Shows gradients to a step as the plain tensors that they are."""

    def __init__(self) -> None:
        self._shown: weakref.WeakKeyDictionary[Optimizer, list[tuple[torch.Tensor, type]]] = (
            weakref.WeakKeyDictionary()
        )

    def before(self, optimizer: Optimizer) -> None:
        shown: list[tuple[torch.Tensor, type]] = []
        with as_plain():  # parameters may refuse to show theirs
            for group in optimizer.param_groups:
                for p in group["params"]:
                    gradient = p.grad
                    if isinstance(gradient, ShardGradient | RowlessGradient):
                        shown.append((gradient, gradient.__class__))
                        over_dtensor = not isinstance(gradient, ShardGradient) or (
                            gradient.in_order and is_dtensor(gradient)
                        )
                        gradient.__class__ = type(gradient).__bases__[-1] if over_dtensor else torch.Tensor
        if shown:
            self._shown[optimizer] = shown

    def after(self, optimizer: Optimizer) -> None:
        if optimizer in self._shown:
            for gradient, its_class in self._shown.pop(optimizer):
                gradient.__class__ = its_class  # type: ignore[assignment]


_in_steps = PlainInSteps()


# ------------------------------------------------------------ gradients that stand for others
class StandingGradient:
    """The ``grad`` of one parameter, by which the clearing of others' gradients is noticed.

    Every form of ``zero_grad`` removes that gradient or writes to it, and so says that what it stands for is cleared.

    Attributes:
        gradient: what stands now; None if nothing does.
    """

    def __init__(self) -> None:
        self.gradient: torch.Tensor | None = None
        self._version = 0

    def stand(self, param: torch.Tensor, gradient: torch.Tensor) -> None:
        """Lets this gradient stand for others from now on; it becomes the parameter's if it is not."""
        if param.grad is not gradient:
            param.grad = gradient
        self.gradient, self._version = gradient, gradient._version

    def was_touched(self, param: torch.Tensor) -> bool:
        """Says whether somebody has removed, replaced or written to it since."""
        mark = self.gradient
        return mark is not None and (param.grad is not mark or mark._version != self._version)

    def stands(self, param: torch.Tensor) -> bool:
        """Says whether it stands for something, and nobody has cleared that."""
        return self.gradient is not None and not self.was_touched(param)

    def forget(self) -> None:
        """Notes that it stands for nothing any more, whoever carries it."""
        self.gradient = None
