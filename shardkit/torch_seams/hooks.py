"""The only place that touches autograd's hooks: when a backward starts, gets a gradient ready, and ends.

[Note: when a backward ends] Autograd runs callbacks queued inside a backward when that backward is through. With
re-entrant activation checkpointing, backwards nest: an inner one ends long before the outer one. The outer one
is recognised by a hook on the outputs of forward, which runs first and in the outer backward. Where the
loss does not depend on those outputs, the first gradient queues the callback; if that happens inside an inner
backward, the rest of the outer one counts as a further backward, whose gradients add up as they should.

[Note: gradients asked for] Autograd finds out by itself that a tensor is in no graph: nothing runs, no hook is called,
and ``backward(inputs=)`` just leaves it without a gradient. Whether it asks the tensor's class depends on torch's
version. So what ``torch.autograd``'s functions call to run the engine is replaced, as ``torch.compiler`` does it.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import itertools
import re
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import CodeType, FrameType, FunctionType, MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from ..backend import callees_compiled, not_compiled
from ..errors import ConfigurationError, LifecycleError
from ..progress import observe
from ..types import AnyCallable, Tree

COMPILED_AUTOGRAD = "torch._dynamo.compiled_autograd"
NO_BACKWARD = -1
# Versions of parameters whose memory has been given back, one for each: no count of writes gets to the first.
FIRST_GIVEN_BACK = 2**31
versions_given_back = itertools.count(FIRST_GIVEN_BACK)
# Begin the error of a backward that came to the parameter of such a version; "" where none has it.
of_given_back: list[Callable[[int], str]] = []
DROPPED = "a backward that raised an error is dropped"  # on all ranks, or they are out of step
# Id of the backward that runs in this thread, or NO_BACKWARD. (The C function itself: no Python call a gradient.)
current_backward: Callable[[], int] = torch._C._current_graph_task_id

GradientHook = Callable[[torch.Tensor], None]
# Of each backward in progress, by id, what it has come to.
_reached: dict[int, list[weakref.ref[BackwardState]]] = {}
moments = itertools.count(1)


def in_compiled_autograd() -> bool:
    """Says whether autograd's graph is compiled."""
    compiled: Any = sys.modules.get(COMPILED_AUTOGRAD)
    return compiled is not None and (
        compiled.compiled_autograd_enabled or compiled.in_compiled_autograd_region
    )


def after_backward(call: Callable[[], None]) -> None:
    """Calls this when the running backward is through, and after what was asked for before."""
    Variable._execution_engine.queue_callback(call)  # type: ignore[attr-defined]


class BackwardState:
    """Knows what hooks ask at every gradient.

    See [Note: several roots] in ``engine.py`` for what comes before what.

    Attributes:
        task: id of the backward in progress, NO_BACKWARD between backwards.
        thread: the thread that noticed it.
        accumulating: inside ``no_sync``: gradients stay local.
        unreduced: local gradients wait for a reduction.
        asked: gradients are handed out, and ``.grad`` stays what it is.
        is_due: a forward has ended whose backward has not begun.
        count: how many backwards have begun; of ShardedDDP those outside of ``no_sync``, or that are watched.
        raised: the error of the last forward, if it raised one; else "".
        left_out: of ShardedDDP, numbers of forwards without a backward so far: of errors that were caught, say.
        before: those that this backward has come to before.
        began: when the first forward did that this backward may go through, among those of all modules.
        ended: when the last one did.
        watcher: its ``begin()`` is called where each begins, and ``end()`` when gradients are where the optimizer will
            find them, or kept for a reduction.
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        self.before: Sequence[BackwardState] = ()
        self.began = self.ended = self.count = 0
        self.task = NO_BACKWARD
        self.thread = 0
        self.accumulating = False
        self.unreduced = self.asked = False
        self.is_due = False
        self.raised = ""
        self.left_out = set[int]()
        self.watcher: Any = None
        self._on_end = on_end
        observe(self)

    def unfinished(self, in_backward: bool) -> str:
        if self.task != NO_BACKWARD:
            return "" if in_backward else "a backward that raised an error"
        if self.raised:
            return f"a forward that raised {self.raised}"
        return "a step whose backward has not begun" if self.is_due and not in_backward else ""

    def begin(self) -> None:
        """Marks the running backward as the one whose end counts; called from inside of it."""
        if in_compiled_autograd():
            raise LifecycleError(
                "compiled autograd of a sharded module is not possible: gradients are reduced while backward runs. Use "
                "torch.compile without it (torch._dynamo.config.compiled_autograd = False)"
            )
        if self.watcher is not None:
            self.watcher.begin()
        self.task = current_backward()
        self.is_due = False
        self.count += 1
        self.thread = threading.get_ident()
        after_backward(self._end)
        reached = _reached.get(self.task)
        if reached is None:
            _reached[self.task] = [weakref.ref(self)]
        else:
            self.before = [state for ref in reached if (state := ref()) is not None]
            reached.append(weakref.ref(self))

    def follow(self, begin: Callable[[], None]) -> None:
        """Runs a backward that computes nothing, and begins so; the rest of one that raised, if that is so."""

        def reached(_: torch.Tensor) -> None:
            if self.task == NO_BACKWARD:
                begin()
            else:
                _reached.pop(self.task, None)
                self.task = current_backward()
                after_backward(self._end)

        with torch.enable_grad():
            nothing = torch.zeros((), requires_grad=True).clone()
        nothing.register_hook(reached)
        nothing.backward()  # at its end comes what a backward did not reach, which is everything

    @property
    def owner(self) -> Tree:
        """Returns whose method it calls at the end; it tells whether it ``has_sent`` all, and can ``send_rest``."""
        return self._on_end.__self__  # type: ignore[attr-defined]

    def sends_last(self) -> bool:
        """Has those before send what is left where backward has left them; whether all have sent, on all ranks."""
        for state in self.before:
            if state.began > self.ended:
                state.owner.send_rest()
        return all(state.began > self.ended and state.owner.has_sent for state in self.before)

    def leave(self) -> None:
        """Notes that the step has ended here, wherever it was."""
        self.task = NO_BACKWARD
        self.unreduced = self.is_due = False
        self.left_out.clear()
        self.raised = ""

    @not_compiled
    def on_output(self, number: int, _: torch.Tensor) -> None:
        """Hears, as a hook of outputs of the forward of this number, that their backward has begun."""
        self.left_out.discard(number)
        if self.task == NO_BACKWARD and (not self.accumulating or self.watcher is not None):
            self.begin()

    @not_compiled
    def _end(self) -> None:
        _reached.pop(self.task, None)
        self.task, self.before = NO_BACKWARD, ()
        self._on_end()
        if self.watcher is not None:
            after_backward(self.watcher.end)


class _Kept(OrderedDict[int, AnyCallable]):
    """Hooks for when a parameter has got its gradient, the last of which takes the gradient away.

    Autograd would call later ones in vain: they would find no gradient. So torch can't put any here (it is this dict
    that ``register_post_accumulate_grad_hook`` writes into), until ours are removed.
    """

    refusals: Mapping[int, str] = MappingProxyType({})  # of ours

    def __setitem__(self, key: int, hook: AnyCallable) -> None:
        for refusal in self.refusals.values():
            raise ConfigurationError(refusal)
        super().__setitem__(key, hook)

    def __delitem__(self, key: int) -> None:
        self.refusals = {k: refusal for k, refusal in self.refusals.items() if k != key}
        super().__delitem__(key)


_not_compiled: set[CodeType] = set()  # closures have that of the function which makes them


class GradientHooks:
    """Hooks on parameters, removable together; they end with this object.

    A parameter keeps its hooks in a way that no garbage collector sees through, and hooks know whom they tell. So
    parameters get weak proxies (calling one adds no call of Python's), or neither would ever be freed.

    Args:
        refusal: what is raised where a hook is registered that would run after ours, and find no gradient; "" where
            ours leave gradients alone.

    Attributes:
        before, after: handles of the hooks for when a parameter is about to get a gradient, and has it.
    """

    def __init__(self, refusal: str = "") -> None:
        self.before: list[RemovableHandle] = []
        self.after: list[RemovableHandle] = []
        self._hooks: list[GradientHook] = []
        self._refusal = refusal

    def attach(self, param: nn.Parameter, before: GradientHook | None, after: GradientHook) -> None:
        """Calls ``before`` when ``param`` is about to get a gradient, ``after`` when ``param.grad`` holds it."""
        for hook in (before, after):
            if isinstance(hook, FunctionType) and hook.__code__ not in _not_compiled:
                _not_compiled.add(not_compiled(hook).__code__)
        if before is not None:
            self._hooks.append(before)
            self.before.append(param.register_hook(weakref.proxy(before)))
        self._hooks.append(after)
        after = weakref.proxy(after)
        hooks: Any = param._post_accumulate_grad_hooks
        if hooks is None and self._refusal:
            hooks = param._post_accumulate_grad_hooks = _Kept()
        if isinstance(hooks, _Kept):
            handle = RemovableHandle(hooks)
            super(_Kept, hooks).__setitem__(handle.id, after)
            if self._refusal:
                hooks.refusals = {**hooks.refusals, handle.id: self._refusal}
        else:  # somebody's hooks were there first, and handles to remove them with
            handle = param.register_post_accumulate_grad_hook(after)
        self.after.append(handle)

    def remove(self) -> None:
        for handles in (self.before, self.after):
            for handle in handles:
                handle.remove()
            handles.clear()
        self._hooks.clear()

    def __del__(self) -> None:
        self.remove()


_run_backward: AnyCallable = torch.autograd.graph._engine_run_backward
_RUN_BACKWARD = _run_backward.__code__
_RUN_NODE = torch.autograd.function.BackwardCFunction.apply.__code__


def frame_of_backward(frame: FrameType | None) -> FrameType | None:
    """Finds where a Python stack, from this frame on, has called a backward that is still running; None if nowhere."""
    while frame is not None and frame.f_code is not _RUN_BACKWARD:
        frame = frame.f_back
    return frame


def callers() -> Iterator[FrameType]:
    """Yields the frames around the function that iterates: that of its caller, of the caller of that, and so on."""
    frame = sys._getframe(1).f_back
    while frame is not None:
        yield frame
        frame = frame.f_back


def inside_another_backward() -> bool:
    """Says whether the running backward was started by the backward of a function (a re-entrant checkpoint).

    Autograd doesn't tell, but the Python stack does: this thread's, where device threads run nested backwards too.
    """
    started = False
    for frame in callers():
        if frame.f_code is _RUN_BACKWARD:
            started = True
        elif started and frame.f_code is _RUN_NODE:
            return True
    return False


AskedCheck = Callable[[Sequence[torch.Tensor], bool], AbstractContextManager[None]]
_asked_checks: list[AskedCheck] = []


@callees_compiled
@functools.wraps(_run_backward)
def _run_checked(t_outputs: object, *args: Any, **kwargs: object) -> Tree:
    try:
        if len(args) < 4 or not args[3]:  # behind the gradients of the outputs, retain_graph and create_graph
            return _run_backward(t_outputs, *args, **kwargs)
        with contextlib.ExitStack() as around:
            for check in _asked_checks:
                # no edges of the graph
                tensors = [asked for asked in args[3] if isinstance(asked, torch.Tensor)]
                around.enter_context(check(tensors, bool(kwargs.get("accumulate_grad"))))
            return _run_backward(t_outputs, *args, **kwargs)
    except RuntimeError as error:
        at = re.search(r"is at version (\d+)", str(error))
        if at is None or int(at[1]) < FIRST_GIVEN_BACK:
            raise
        begun = "".join(say(int(at[1])) for say in of_given_back) or "backward came to parameters that are"
        raise LifecycleError(
            f"{begun} sharded and not gathered now, by a graph of summon_full_params(), or a tensor that left its FSDP "
            "module in a generator, a closure or a list (return it from forward)"
        ) from error


def check_asked_gradients(check: AskedCheck) -> None:
    """Shows ``check``, before anything runs, tensors that a backward shall give gradients of, and no others.

    These are the inputs of ``torch.autograd.grad``, or (then it is told True) of ``backward(inputs=)``, which puts them
    into ``.grad``. The backward runs in what it returns. See [Note: gradients asked for].
    """
    if check not in _asked_checks:
        _asked_checks.append(check)
        if len(_asked_checks) == 1:
            for module in (torch.autograd, torch.autograd.graph):
                module._engine_run_backward = _run_checked  # type: ignore[attr-defined]


def watch_halves(is_shard: Callable[[torch.Tensor], object]) -> None:
    """Lets torch's pipelines compute gradients of weights with those of a stage's inputs where the weights are shards.

    Schedules without bubbles ask for them later, and look for the weights in the graph, where no shard is.
    """
    stage: Tree = sys.modules.get("torch.distributed.pipelining.stage")
    theirs = getattr(stage, "stage_backward_input", None)
    if theirs is None or hasattr(theirs, "__wrapped__"):
        return

    @functools.wraps(theirs)
    def run(outputs: Sequence[Tree], gradients: Tree, inputs: Tree, weights: Iterator[torch.Tensor]) -> Tree:
        listed = list(weights)
        if any(map(is_shard, listed)):  # without gradients it is a loss
            return stage.stage_backward(outputs[0] if gradients is None else outputs, gradients, inputs), []
        return theirs(outputs, gradients, inputs, iter(listed))

    stage.stage_backward_input = run


@functools.cache
def _is_of_a_function(forward: CodeType) -> bool:
    """Says whether an autograd function's forward runs this."""
    kinds = [torch.autograd.Function]
    for kind in kinds:
        kinds += kind.__subclasses__()
        if getattr(inspect.unwrap(kind.forward), "__code__", None) is forward:
            return True
    return False


def surrounding_checkpoint() -> object:
    """Returns the activation checkpoint that will run in backward again what is called now; None outside of one.

    An object that is the same for all calls within the outermost checkpoint. torch's own kind is known by its hooks for
    saved tensors; re-entrant ones (torch's, fairscale's, this library's) are autograd functions, whose forward is on
    the Python stack (``apply`` itself is not there from torch 2.14 on).
    """
    if torch.is_grad_enabled():
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        pack = None if hooks is None else hooks[0]
        return (
            pack
            if isinstance(pack, FunctionType) and pack.__qualname__.startswith("_checkpoint_hook.")
            else None
        )
    outermost = None
    for frame in callers():
        if frame.f_code.co_name == "forward" and _is_of_a_function(frame.f_code):
            outermost = frame
    return outermost


def is_noted_by_checkpoint() -> bool:
    """Says whether a selective activation checkpoint notes the operations that run now, or gives what it has kept."""
    if torch._C._len_torch_dispatch_stack() == 0:
        return False
    return type(_get_current_dispatch_mode()).__module__ == "torch.utils.checkpoint"


@contextlib.contextmanager
def unnoted() -> Iterator[None]:
    """Runs what is no part of a computation: a selective checkpoint counts operations, and those of a gather differ."""
    modes = []
    while is_noted_by_checkpoint():
        modes.append(_pop_mode())
    try:
        yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


@not_compiled
def watch_outputs(outputs: Sequence[torch.Tensor], hook: GradientHook, passed: Container[int] = ()) -> bool:
    """Calls ``hook`` when a backward through any of these outputs starts; whether there can be one.

    Args:
        passed: by ``id``, what was passed in, and maybe through: its gradient is there after the backward of all that
            was made of it.
    """
    found = False
    for tensor in outputs:
        if tensor.requires_grad and tensor.grad_fn is not None and id(tensor) not in passed:
            tensor.register_hook(hook)
            found = True
    return found


@not_compiled
def tensors_in(value: object, depth: int = 4) -> list[torch.Tensor]:
    """Returns all tensors inside nested tuples, lists, dicts, dataclasses and objects with attributes."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[torch.Tensor] = []
    leaves: Sequence[object] = tree_leaves(value)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif depth > 0 and hasattr(leaf, "__dict__") and not isinstance(leaf, type | nn.Module):
            found.extend(tensors_in(dict(vars(leaf)), depth - 1))
    return found


def in_fields(function: AnyCallable, leaf: Tree) -> Tree:
    """Returns a dataclass with the function applied to its fields; other objects as they are."""
    if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
        return leaf
    made = copy.copy(leaf)
    for field in dataclasses.fields(leaf):
        if hasattr(leaf, field.name):
            object.__setattr__(made, field.name, function(getattr(leaf, field.name)))
    return made
