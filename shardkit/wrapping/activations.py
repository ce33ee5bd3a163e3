"""Activations computed again (activation checkpointing), or kept on the host, from forward to backward.

``checkpoint_wrapper(module)`` keeps a module's inputs and computes its activations again. The module stays the same
object, so names, hooks and state dicts do too. Forward runs without a graph; backward runs it again, with one, and
goes through that graph at once.

[Note: what happens once] Random numbers are drawn alike both times. Running statistics of batch norms are updated in
the first run and left alone in the second, so that they are those of the plain module, also where no backward
follows. Other side effects can ask ``is_recomputing()``.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from ..backend import DONE, Backend, Copy, backend_for, not_compiled
from ..errors import LifecycleError
from ..torch_seams.hooks import in_fields
from ..torch_seams.wrappers import check_modules

__all__ = ["checkpoint_wrapper"]

_T = TypeVar("_T")


# ------------------------------------------------------------------------------------------ state
@dataclasses.dataclass
class ThreadLocalCheckpointingState(threading.local):
    """Tells what this thread is doing.

    Attributes:
        is_checkpointing: the first run, without a graph.
        is_recomputing: the second run, within backward.
        is_checkpointing_disabled: checkpointed modules run as plain ones.
        kept: (first run) where :func:`once` puts what it computes.
        kept_before: (second run) where it takes that from.
    """

    is_checkpointing: bool = False
    is_recomputing: bool = False
    is_checkpointing_disabled: bool = False
    kept: list[Any] | None = None
    kept_before: Iterator[Any] | None = None


thread_local = ThreadLocalCheckpointingState()


@contextlib.contextmanager
def _set(name: str, value: Any = True) -> Iterator[None]:
    before = getattr(thread_local, name)
    setattr(thread_local, name, value)
    try:
        yield
    finally:
        setattr(thread_local, name, before)


def disable_checkpointing() -> contextlib.AbstractContextManager[None]:
    """Makes checkpointed modules run as plain ones within this block."""
    return _set("is_checkpointing_disabled")


def enable_checkpointing() -> contextlib.AbstractContextManager[None]:
    """Makes :func:`is_checkpointing` True within this block."""
    return _set("is_checkpointing")


def enable_recomputing() -> contextlib.AbstractContextManager[None]:
    """Makes :func:`is_recomputing` True within this block."""
    return _set("is_recomputing")


def is_checkpointing() -> bool:
    """Says whether this is the first run of a checkpointed forward, which keeps no activations."""
    return thread_local.is_checkpointing


def is_recomputing() -> bool:
    """Says whether a checkpointed forward runs again, for backward; side effects should then be left out."""
    return thread_local.is_recomputing


def once(compute: Callable[[], _T]) -> _T:
    """Returns what ``compute()`` does; in the second run of a checkpointed forward what it returned in the first.

    For layers that talk to other ranks. Calls of one forward are told apart by their order, as random numbers are;
    tensors in the result must not carry a graph.
    """
    before, kept = thread_local.kept_before, thread_local.kept
    value: _T = compute() if before is None else next(before)
    if kept is not None:
        kept.append(value)
    return value


# ------------------------------------------------------------------------------------------ batch norms
def patch_batchnorm(module: nn.Module) -> list[RemovableHandle]:
    """Lets batch and instance norms (of torch's kinds) in a module leave running statistics alone in a second run.

    Those with an attribute ``disable_patch_batchnorm`` are left out, and those that are patched already.

    Returns:
        Handles of the hooks, two for each.
    """
    handles = []
    for child in module.modules():
        if not isinstance(child, _NormBase) or hasattr(child, "disable_patch_batchnorm"):
            continue
        if _suspend_tracking not in child._forward_pre_hooks.values():
            handles.append(child.register_forward_pre_hook(_suspend_tracking))
            handles.append(child.register_forward_hook(_resume_tracking, always_call=True))
    return handles


def _suspend_tracking(module: nn.Module, inputs: Any) -> None:
    if thread_local.is_recomputing and module.track_running_stats:
        # instance norms go by the mode alone, and write to what they have
        name, still = ("track_running_stats", False) if isinstance(module, _BatchNorm) else ("momentum", 0.0)
        module.__dict__["_suspended"] = (name, getattr(module, name))
        setattr(module, name, still)


def _resume_tracking(module: nn.Module, inputs: Any, output: Any) -> None:
    if (suspended := module.__dict__.pop("_suspended", None)) is not None:
        setattr(module, *suspended)


# ------------------------------------------------------------------------------------------ surroundings of a run
class Surroundings:
    """Random state and autocast settings of the host and of the tensors' devices, to be had again later."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        one_each = {t.device: t for t in tensors if not (t.is_cpu or t.is_meta)}
        self._generators = [_generator(t) for t in one_each.values()]
        self._generators.append((torch.get_rng_state, torch.set_rng_state))
        self._random = [get() for get, _ in self._generators]
        self._autocast: list[dict[str, Any]] = [
            {
                "device_type": kind,
                "enabled": torch.is_autocast_enabled(kind),
                "dtype": torch.get_autocast_dtype(kind),
                "cache_enabled": torch.is_autocast_cache_enabled(),
            }
            for kind in {"cpu", *(device.type for device in one_each)}
            if torch.amp.is_autocast_available(kind)
        ]

    def _set_random_states(self, states: list[torch.Tensor]) -> None:
        for (_, put), state in zip(self._generators, states, strict=True):
            put(state)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Makes all as it was when this object was made, within this block."""
        now = [get() for get, _ in self._generators]
        self._set_random_states(self._random)
        try:
            with contextlib.ExitStack() as stack:
                for arguments in self._autocast:
                    stack.enter_context(torch.autocast(**arguments))
                yield
        finally:
            self._set_random_states(now)


def _generator(tensor: torch.Tensor) -> tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], Any]]:
    """Finds how to get and set the random state of a tensor's device."""
    module = getattr(torch, tensor.device.type, None)
    if module is None or not hasattr(module, "get_rng_state"):
        backend = backend_for([tensor])
        return backend.rng_state, backend.set_rng_state
    generators = getattr(module, "default_generators", ())
    if (index := tensor.device.index or 0) < len(generators):  # get_rng_state may be torch's alone to call
        return generators[index].get_state, generators[index].set_state
    if not hasattr(module, "get_rng_state_all"):  # one device only, and nowhere to say which
        return module.get_rng_state, module.set_rng_state
    device = tensor.device
    return lambda: module.get_rng_state(device), lambda state: module.set_rng_state(state, device)


# ------------------------------------------------------------------------------------------ the two runs
@contextlib.contextmanager
def no_autocast_cache() -> Iterator[None]:
    """Casts made here don't go into autocast's cache: they have no graph, and a later use of the weight needs one."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


class CheckpointFunction(torch.autograd.Function):
    """Runs a function of tensors without a graph, and again, with one, in backward.

    ``apply(anchor, run, offload, surroundings, *tensors)``: ``run`` maps a list of tensors to a tuple of tensors.
    The anchor requires a gradient, so that backward comes also where no other input does.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        anchor: torch.Tensor,
        run: Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]],
        offload: bool,
        surroundings: Surroundings,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.run, ctx.surroundings = run, surroundings
        ctx.places = [(t.device, t.requires_grad) for t in tensors]
        # To pinned memory and not waited for: what reads it is a copy back, later on the same stream.
        ctx.save_for_backward(*(t.to("cpu", non_blocking=True) if offload else t for t in tensors))
        # Outputs without a gradient stay without one: zeros would become gradients of parameters.
        ctx.set_materialize_grads(False)
        ctx.kept = []
        with torch.no_grad(), no_autocast_cache(), enable_checkpointing(), _set("kept", ctx.kept):
            return run(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        if not torch.autograd._is_checkpoint_valid():
            raise LifecycleError(
                "a checkpointed call computes its gradients within backward(); torch.autograd.grad() and "
                "backward(inputs=...) can't reach through it. Call backward(), or run the forward within "
                "disable_checkpointing()"
            )
        inputs = [
            saved.detach().to(device, non_blocking=True).requires_grad_(requires_grad)
            for saved, (device, requires_grad) in zip(ctx.saved_tensors, ctx.places, strict=True)
        ]
        with ctx.surroundings.again(), torch.enable_grad(), enable_recomputing():
            with _set("kept_before", iter(ctx.kept)), _set("kept", None):
                outputs = ctx.run(inputs)
        wanted = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad]
        if wanted:
            torch.autograd.backward([o for o, _ in wanted], [g for _, g in wanted])
        return (None, None, None, None, *(x.grad for x in inputs))


def call_checkpointed(
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    near: nn.Module,
    offload_to_cpu: bool = False,
) -> Any:
    """Calls ``call(*args, **kwargs)``, of which only the tensors in the arguments are kept; backward calls it again.

    A plain call where nothing requires a gradient, without grad mode and within :func:`disable_checkpointing`.

    Args:
        near: holds the parameters that it uses; random states of their devices are put back for the second call.
        offload_to_cpu: keep the arguments in host memory.
    """
    if not torch.is_grad_enabled() or thread_local.is_checkpointing_disabled:
        return call(*args, **kwargs)
    tensors: list[torch.Tensor] = []
    arguments, first = take_tensors((args, kwargs), tensors), list[Any]()  # what the first run returned

    def run(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        args, kwargs = put_tensors(arguments, tensors)
        returned: list[torch.Tensor] = []
        output = take_tensors(call(*args, **kwargs), returned)
        if is_checkpointing():
            first.append(output)
        return tuple(returned)

    attributes = (value for module in near.modules() for value in vars(module).values())
    # wrappers keep some parameters as plain attributes
    around = [*tensors, *near.parameters(), *(a for a in attributes if isinstance(a, torch.Tensor))]
    if not any(t.requires_grad for t in around):
        return call(*args, **kwargs)  # no activations would be kept
    anchor = torch.empty(0, requires_grad=True)
    outputs = CheckpointFunction.apply(anchor, run, offload_to_cpu, Surroundings(around), *tensors)
    return put_tensors(first.pop(), outputs)


class _CheckpointedForward:
    """``forward`` of a checkpointed module; an attribute of the instance."""

    def __init__(self, module: nn.Module, offload_to_cpu: bool, inner: Callable[..., Any] | None) -> None:
        # Weak: module -> forward -> module would keep it from being freed as soon as nobody refers to it.
        self._module = weakref.ref(module)
        self._offload = offload_to_cpu
        self._inner = inner

    @not_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        if module is None:
            raise LifecycleError(
                "the checkpointed module of this forward no longer exists; call the module itself"
            )
        inner = self._inner or type(module).forward.__get__(module)
        return call_checkpointed(inner, args, kwargs, near=module, offload_to_cpu=self._offload)

    def __deepcopy__(self, memo: dict[int, Any]) -> _CheckpointedForward:
        module: Any = self._module()
        return _CheckpointedForward(
            memo.get(id(module), module), self._offload, copy.deepcopy(self._inner, memo)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _CheckpointedForward, (self._module(), self._offload, self._inner)


def checkpoint_wrapper(module: nn.Module, offload_to_cpu: bool = False) -> nn.Module:
    """Makes calls of this module keep their inputs only; backward computes the activations again.

    Arguments and results may be anything, with tensors in any nesting of containers and dataclasses.

    Args:
        module: changed in place: it gets a ``forward`` of its own. Wrapping it again changes the option only.
        offload_to_cpu: keep the inputs in host memory.

    Returns:
        The same module.
    """
    check_modules([module], "checkpoint_wrapper()")
    patch_batchnorm(module)
    before = vars(module).get("forward")
    inner = before._inner if isinstance(before, _CheckpointedForward) else before
    module.forward = _CheckpointedForward(module, offload_to_cpu, inner)
    return module


# ------------------------------------------------------------------------------------------ tensors within values
class _Slot:
    """Stands for the tensor with this index."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


def take_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Returns the value with slots in place of tensors, which go into the list; within containers and dataclasses."""

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensors.append(leaf)
        return _Slot(len(tensors) - 1)

    return _replaced(take, value)


def put_tensors(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Reverses :func:`take_tensors`."""
    return _replaced(lambda leaf: tensors[leaf.index] if isinstance(leaf, _Slot) else leaf, value)


def _replaced(replace: Callable[[Any], Any], value: Any) -> Any:
    """Returns the value with something else in place of all in it that is no container."""

    def replaced(leaf: Any) -> Any:
        if isinstance(leaf, PackedSequence):  # its constructor would look at what is in it
            return PackedSequence._make(_replaced(replace, part) for part in leaf)
        if dataclasses.is_dataclass(leaf):
            return in_fields(lambda field: _replaced(replace, field), leaf)
        return replace(leaf)

    return tree_map(replaced, value, is_leaf=lambda x: isinstance(x, PackedSequence))


# ------------------------------------------------------------ what is kept on the host
# Keeps what autograd saves in forward in host memory until backward, by unit, both ways ahead of what is computed.
#
# While a unit computes, what the one before it has saved goes to the host; the device has that of two units. The
# last unit's stays on the device, for backward begins with it, and so does what the root saves around its units. In
# backward, when the first tensor of a unit is asked for, that of the unit before it is asked for, too.
#
# Memory is moved as it is, storage by storage, each once, however many operations have saved a part of it. Views of
# original parameters are left alone (they come back with a gather), as is what is small, or a small part of its
# storage.
#
# [Note: changed in place] Autograd refuses a tensor that was changed after it was saved. Until the copy is through, the
# tensor is still there and its version is looked at; afterwards the copy has what was saved.
_SMALL = 2**16  # bytes; to copy less takes as long
_PART = 4  # less than a fourth of a storage is not worth its copy
_push = torch._C._autograd._push_saved_tensors_default_hooks
_pop = torch._C._autograd._pop_saved_tensors_default_hooks
_hooks_here = torch._C._autograd._top_saved_tensors_default_hooks


class _SavedStorage:
    """Moves one storage that autograd has saved views of: ``uses`` counts them, ``views`` has those on the device."""

    def __init__(self, backend: Backend, tensor: torch.Tensor) -> None:
        self._backend, self._device = backend, tensor.device
        memory = tensor.untyped_storage()
        self._bytes: torch.Tensor | None = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
            memory
        )
        self.views: list[tuple[torch.Tensor, int]] = []
        self.uses = self._given = 0
        self._host = torch.empty(0, device="cpu")
        self._copy: Copy = DONE
        self._changed: list[bool] = []  # of each view, once these are gone

    def leave(self) -> None:
        """Begins to go to the host."""
        saved, memory = sum(tensor.numel() * tensor.element_size() for tensor, _ in self.views), self._bytes
        if memory is None or memory.untyped_storage().nbytes() < memory.numel():
            return  # parameters of another model, released by now
        if saved * _PART >= memory.numel():
            self._host = self._backend.pinned(memory.numel(), torch.uint8)
            self._copy = self._backend.copy_down(self._host, memory)

    def settle(self) -> None:
        """Gives the device's memory back, as soon as it has been copied."""
        if self._host.numel() and self.views:
            self._copy.wait()
            self._changed = [tensor._version != version for tensor, version in self.views]
            self.views, self._bytes = [], None

    def come(self) -> torch.Tensor:
        """Begins to come back; returns where to."""
        self.settle()
        if self._bytes is None:
            self._bytes = torch.empty(self._host.numel(), dtype=torch.uint8, device=self._device)
            self._copy = self._backend.copy_up(self._bytes, self._host)
        return self._bytes

    def view(self, saved: _SavedView) -> torch.Tensor:
        tensor, version = self.views[saved.number] if self.views else (None, 0)
        if self._changed[saved.number] if tensor is None else tensor._version != version:
            raise LifecycleError(
                "a tensor that backward needs was changed in place after forward had computed with it, in a unit with "
                "OffloadPolicy(activations=True); autograd refuses that elsewhere, too. Change a copy"
            )
        if tensor is not None:
            return tensor
        there = self.come()
        self._copy.wait()
        given = torch.empty(0, dtype=saved.dtype, device=self._device)
        with torch.no_grad():
            given.set_(there.untyped_storage(), saved.offset, saved.shape, saved.stride)
        self._given += 1
        if self._given == self.uses:  # a second backward takes it from the host again
            self._given, self._bytes = 0, None
        return given


class _SavedView(NamedTuple):
    page: SavedInCall
    storage: _SavedStorage
    number: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class SavedInCall:
    """Collects what autograd saves in one call of a unit, from now on until :meth:`close`."""

    def __init__(self, backend: Backend, before: SavedInCall | None, parameters: set[int]) -> None:
        self._backend, self._before, self._parameters = backend, before, parameters
        self._storages: dict[int, _SavedStorage] = {}
        self._all: list[_SavedStorage] = []
        self._has_come = False
        _push(self._pack, self._unpack)
        self._is_open = True

    def close(self) -> None:
        """Notes that the unit is through."""
        if self._is_open:
            self._is_open = False
            _pop()
            self._storages = {}

    def _pack(self, tensor: torch.Tensor) -> object:
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return tensor
        if tensor.device.type != self._backend.device_type or tensor.is_conj() or tensor.is_neg():
            return tensor  # the memory of a conjugate holds other values
        if tensor.numel() * tensor.element_size() < _SMALL:
            return tensor
        key = tensor.untyped_storage()._cdata
        if key in self._parameters:
            return tensor
        storage = self._storages.get(key)
        if storage is None:
            storage = self._storages[key] = _SavedStorage(self._backend, tensor)
            self._all.append(storage)
        storage.views.append((tensor.detach(), tensor._version))
        storage.uses += 1
        place = tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())
        return _SavedView(self, storage, storage.uses - 1, *place)

    def _unpack(self, saved: object) -> torch.Tensor:
        if not isinstance(saved, _SavedView):
            return saved  # type: ignore[return-value]
        saved.page.come()
        if (before := saved.page._before) is not None:
            before.come()
        return saved.storage.view(saved)

    def come(self) -> None:
        """Begins to come back; a second backward asks for each storage."""
        if not self._has_come:
            self._has_come = True
            for storage in self._all:
                storage.come()

    def leave(self) -> None:
        """Begins to go to the host."""
        for storage in self._all:
            storage.leave()

    def settle(self) -> None:
        """Gives the device's memory back."""
        for storage in self._all:
            storage.settle()


class Activations:
    """Keeps the pages of one forward of a root: of each call of a unit, what autograd has saved in it.

    Args:
        parameters: what its units gather into.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = {p.untyped_storage()._cdata for p in parameters}
        self._last: SavedInCall | None = None  # of the unit that was called last, on the device
        self._leaving: SavedInCall | None = None

    def enter(self, backend: Backend) -> SavedInCall | None:
        """Notes that a unit is called; None where somebody else's hooks for saved tensors win."""
        hooks = _hooks_here(True)
        if hooks is not None and not isinstance(getattr(hooks[0], "__self__", None), SavedInCall):
            return None
        if self._last is not None:
            self.settle()
            self._leaving = self._last
            self._leaving.leave()
        return SavedInCall(backend, self._last, self._parameters)

    def leave(self, page: SavedInCall | None) -> None:
        """Notes that the unit is through; None where somebody else's hooks had won."""
        self.settle()
        if page is not None:
            page.close()
            self._last = page

    def settle(self) -> None:
        """Gives the memory back of what was on its way to the host."""
        if self._leaving is not None:
            self._leaving.settle()
            self._leaving = None
