"""Arguments and methods of torch's ``fully_shard`` (FSDP2), as this one takes and has them.

Some methods tell torch what is found out here: the order of units, which is that of the last forward, or when an
optimizer has stepped. That is taken, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial, update_wrapper
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TypedDict

import torch
from torch import nn

from ..errors import ConfigurationError, LifecycleError
from ..policy import OffloadPolicy, PrecisionPolicy, ReducePolicy, ReshardPolicy
from ..torch_seams.compiling import not_compiled
from ..types import AnyCallable, Args, Kwargs, Tree
from .construct import wake
from .forward import MethodCall, become_root, cast_inputs, enter, fail, input_dtype, leave, watched
from .state import ShardingState, end_unshard, enter_summon, state_of

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.fsdp import OffloadPolicy as TorchsOffloadPolicy


class TorchsArguments(TypedDict, total=False):
    """What may be passed; see :class:`TorchsWords`."""

    reshard_after_forward: bool | int | None
    mp_policy: MixedPrecisionPolicy | None
    offload_policy: TorchsOffloadPolicy | None
    ignored_params: set[nn.Parameter] | None
    shard_placement_fn: object


class TorchsWords(NamedTuple):
    """What was said in torch's words; None where nothing was."""

    reshard_after_forward: bool | int | None = None
    mp_policy: MixedPrecisionPolicy | None = None
    offload_policy: TorchsOffloadPolicy | None = None
    ignored_params: set[nn.Parameter] | None = None
    shard_placement_fn: object = None

    def check(self) -> None:
        """Raises ConfigurationError for what has no counterpart."""
        if self.ignored_params:
            raise ConfigurationError(
                f"ignored_params ({len(self.ignored_params)} parameters): fully_shard takes all those of a module. "
                "Leave the modules that hold them out: call fully_shard on the others, one by one"
            )
        if self.shard_placement_fn is not None:
            raise ConfigurationError(
                "shard_placement_fn: shards are even parts of flat parameters here, not rows of a dimension; leave it "
                "out. Values are the same"
            )
        mp = self.mp_policy
        if mp is not None and mp.param_dtype is not None and not mp.cast_forward_inputs:
            raise ConfigurationError(
                f"cast_forward_inputs=False with param_dtype={mp.param_dtype}: inputs are cast to the dtype of compute "
                "here. Leave cast_forward_inputs out, and cast inside of the module what has to stay as it is"
            )

    def precision(self, given: PrecisionPolicy | None) -> PrecisionPolicy | None:
        """Dtypes of compute."""
        if self.mp_policy is None:
            return given
        _refuse_both("mp_policy", "precision", given)
        return PrecisionPolicy(compute=self.mp_policy.param_dtype)

    def reduce(self, given: ReducePolicy | None) -> ReducePolicy | None:
        """The dtype on the wire."""
        if self.mp_policy is None or self.mp_policy.reduce_dtype is None:
            return given
        _refuse_both("mp_policy.reduce_dtype", "reduce", given)
        return ReducePolicy(dtype=self.mp_policy.reduce_dtype)

    def reshard(self, given: ReshardPolicy | None) -> ReshardPolicy | None:
        """When parameters are given back; True and numbers are for a root too, as in torch."""
        if self.reshard_after_forward is None:
            return given
        _refuse_both("reshard_after_forward", "reshard", given)
        return ReshardPolicy(after_forward=self.reshard_after_forward, root=True)

    def offload(self, given: OffloadPolicy | None) -> OffloadPolicy | None:
        """What is on the host."""
        if self.offload_policy is None:
            return given
        from torch.distributed.fsdp import CPUOffloadPolicy

        _refuse_both("offload_policy", "offload", given)
        return OffloadPolicy(parameters=isinstance(self.offload_policy, CPUOffloadPolicy))

    def cast_outputs_of(self, module: nn.Module) -> None:
        """Outputs of its forward have ``output_dtype`` from now on."""
        if self.mp_policy is not None and self.mp_policy.output_dtype is not None:
            module.register_forward_hook(partial(_cast_outputs, self.mp_policy.output_dtype))


def in_torchs_words(given: TorchsArguments) -> TorchsWords:
    """What was said, checked.

    Raises:
        TypeError: a word of nobody's.
        ConfigurationError: it has no counterpart.
    """
    unknown = [name for name in given if name not in TorchsWords._fields]
    if unknown:
        raise TypeError(f"fully_shard() got an unexpected keyword argument {unknown[0]!r}")
    words = TorchsWords(**given)
    words.check()
    return words


def _cast_outputs(dtype: torch.dtype, module: nn.Module, args: object, outputs: Tree) -> Tree:
    return cast_inputs(outputs, dtype)


def _refuse_both(torchs: str, ours: str, given: object) -> None:
    if given is not None:
        raise ConfigurationError(
            f"both {torchs} and {ours} were passed, which say the same thing; leave one out"
        )


def modules_of(module: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """One module, or several: torch's function takes a list too."""
    return [module] if isinstance(module, nn.Module) else list(module)


_NEEDLESS = (
    "set_is_last_backward", "set_requires_all_reduce", "set_reshard_after_backward", "set_unshard_in_backward",
    "set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch", "set_post_optim_event",
    "set_force_sum_reduction_for_comms", "set_allocate_memory_from_process_group_for_comm", "set_symm_mem_for_comm",
    "set_reduce_scatter_unused_params", "set_reduce_scatter_max_input_buffers", "set_separate_reduce_scatter_group",
    "reset_iter_state",
)  # fmt: skip
_REFUSED = ("set_custom_all_gather", "set_custom_reduce_scatter", "set_all_reduce_hook")


class UnshardHandle:
    """What ``unshard(async_op=True)`` and ``finalize_backward(async_op=True)`` return: it has happened already."""

    def wait(self) -> None:
        """Returns at once."""


class TorchsMethods:
    """These methods of one module."""

    def __init__(self, state: ShardingState) -> None:
        self._state = state

    def install(self) -> None:
        """The module has them, except those that its class has itself."""
        module = self._state.door
        own: dict[str, AnyCallable] = {
            "unshard": self.unshard,
            "reshard": self.reshard,
            "set_requires_gradient_sync": self.set_requires_gradient_sync,
            "set_reshard_after_forward": self.set_reshard_after_forward,
            "set_gradient_divide_factor": self.set_gradient_divide_factor,
            "set_reduce_scatter_divide_factor": self.set_gradient_divide_factor,
            **dict.fromkeys(_NEEDLESS, self._needless),
            "set_manual_backward_finalization": self.set_manual_backward_finalization,
            "finalize_backward": self.finalize_backward,
            "set_keep_unsharded_storage": self.set_keep_unsharded_storage,
            **{name: partial(self._refuse, name) for name in _REFUSED},
        }
        for name, method in own.items():
            if not hasattr(type(module), name):
                module.__dict__[name] = method
        if callable(
            getattr(type(module), "generate", None)
        ):  # may call a part of the module: an encoder, say
            register_fsdp_forward_method(module, "generate")

    # ------------------------------------------------------------ values between steps
    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """The unit's own parameters are there under their names until :meth:`reshard` or the next forward (collective).

        Changes to them are lost; ``summon_full_params`` keeps them. Inside of forward and backward, where the next unit
        is gathered anyway, it does nothing.
        """
        state = self._state
        wake(state)
        engine = state.engine
        if state.summoned is None and (engine is None or engine.forwards == 0):
            enter_summon(state, writeback=False)
            state.is_unsharded = True
        return UnshardHandle() if async_op else None

    def reshard(self) -> None:
        """Ends :meth:`unshard`. What forward has gathered is given back by itself."""
        end_unshard(self._state)

    # ------------------------------------------------------------ gradients
    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """With False, backwards only accumulate this rank's gradients, as in ``no_sync``; called on the root.

        Raises:
            LifecycleError: called on a unit below the root.
            ConfigurationError: ``recurse=False`` with units below.
        """
        state = self._state
        engine = state.engine or become_root(state)
        if not state.is_root:
            raise LifecycleError(
                "set_requires_gradient_sync is for the outermost module that fully_shard was called on; call it there"
            )
        if not recurse and len(state.states()) > 1:
            raise ConfigurationError(
                "set_requires_gradient_sync(recurse=False): all units of a root accumulate, or none; leave recurse out"
            )
        engine.set_accumulating(not requires_gradient_sync)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """The sum of gradients over ranks (replicas included) is divided by this, in place of their number."""
        state = self._state
        before = min(state.divisors[0], factor)
        copies = 1 if state.replicas is None else state.replicas.world_size
        state.unit.divisors = (before, factor / (before * copies))
        state.unit.attach()

    # ------------------------------------------------------------ memory
    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether parameters are given back after forward, from the next one on."""
        for state in self._state.states() if recurse else [self._state]:
            policy = replace(
                state.options.reshard, after_forward=reshard_after_forward, root=reshard_after_forward
            )
            state.options = replace(state.options, reshard=policy)
            state.unit.keep_after_forward = not reshard_after_forward

    def _needless(self, *args: object, **kwargs: object) -> None:
        """Found out here."""

    def _refuse(self, name: str, *args: object, **kwargs: object) -> NoReturn:
        raise ConfigurationError(
            f"{name}: collectives are the backend's here. Derive a backend (shardkit.backend) whose Group has others, "
            "and pass it as backend="
        )

    # ------------------------------------------------------------ switches of torch 2.15; off is what happens here
    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Refused when switched on."""
        if enabled:
            raise ConfigurationError(
                "set_manual_backward_finalization: each backward reduces its gradients by its end here. Leave it out, "
                "and finalize_backward() with it; with set_requires_gradient_sync(False), gradients add up until a "
                "backward that reduces them"
            )

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Refused when switched on."""
        if keep:
            raise ConfigurationError(
                "set_keep_unsharded_storage: the memory of gathered parameters is released with them here, and lies "
                "elsewhere the next time. Leave it out"
            )

    def finalize_backward(self, *, async_op: bool = False) -> UnshardHandle | None:
        """Nothing is left to do after a backward."""
        return UnshardHandle() if async_op else None

    # ------------------------------------------------------------ other methods that compute
    def call_where_needed(self, method: AnyCallable, *args: object, **kwargs: object) -> Tree:
        """The same where a part of the module is called, and in the mode in which that is: without gradients, say."""
        state = self._state
        wake(state)
        end_unshard(state)
        if state.summoned is not None or state.is_computing:
            return method(state.module, *args, **kwargs)
        return MethodCall(state).run(partial(method, state.module), args, kwargs)

    @not_compiled
    def call(self, method: AnyCallable, *args: object, **kwargs: object) -> Tree:
        """A method of the module, run as its forward is; what calls the module itself inside included."""
        state = self._state
        wake(state)
        end_unshard(state)
        if state.summoned is not None or state.is_computing:
            return method(state.module, *args, **kwargs)
        given: tuple[Args, Kwargs] = (args, kwargs)
        dtype = input_dtype(state)
        if dtype is not None:
            given = cast_inputs(given, dtype)
        entered = watched(enter(state, *given), state, given)
        state.is_computing = True
        try:
            outputs = method(state.module, *given[0], **given[1])
        except BaseException as error:
            fail(state, entered, error)
            raise
        finally:
            state.is_computing = False
        return leave(state, entered, outputs)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """A method of a module that :func:`~shardkit.fully_shard` has sharded has its parameters, as forward has.

    It is needed for methods that use the module's own parameters without calling it. Wrappers (:class:`~shardkit.FSDP`)
    do this by themselves; of other modules nothing changes, as in torch.

    Raises:
        ConfigurationError: there is no such method.

    Source: torch.distributed.fsdp.register_fsdp_forward_method.
    """
    method = getattr(type(module), method_name, None)
    if not callable(method):
        raise ConfigurationError(f"{type(module).__name__} has no method {method_name!r} to register")
    state = state_of(module)
    if state is not None and state.door is state.module:
        methods = TorchsMethods(state)
        call = methods.call_where_needed if method_name == "generate" else methods.call
        called = partial(call, method)
        module.__dict__[method_name] = update_wrapper(called, getattr(module, method_name))
