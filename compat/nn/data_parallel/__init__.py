"""fairscale.nn.data_parallel, with all of its modules: its wrappers with fairscale's arguments."""

from __future__ import annotations

import contextlib
import enum
import logging
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from shardkit.backend import backend_of_job, size_of
from shardkit.backends.eager import RanksInName
from shardkit.errors import ConfigurationError, LifecycleError, without_arguments
from shardkit.fsdp.construct import reconnect
from shardkit.fsdp.flat_param import FULL, FlatParam
from shardkit.fsdp.originals import managing
from shardkit.fsdp.state import Options, clean, summoned
from shardkit.fsdp.submodule_api import Answer, is_collecting
from shardkit.fsdp.unit import predivide_factor
from shardkit.fsdp.wrapper import Door
from shardkit.fsdp.wrapper import built_together as _built_together
from shardkit.internal.params import ProcessGroupName, get_process_group_cached
from shardkit.layout import AlignedLayout, EachAlone
from shardkit.nn.wrap.auto_wrap import auto_wrap, config_auto_wrap_policy, enable_wrap
from shardkit.optim import OSS
from shardkit.optimizers.shards import shard_behind
from shardkit.oss.sharded_ddp import ShardedDDP
from shardkit.policy import OffloadPolicy, PrecisionPolicy, ReducePolicy, ReshardPolicy
from shardkit.torch_seams.hooks import NO_BACKWARD
from shardkit.torch_seams.wrappers import check_modules
from shardkit.training.adascale import AdaScale
from shardkit.types import Args, Kwargs, Memo, ProcessGroup, StateDict, Tree

__all__ = [
    "FullyShardedDataParallel",
    "OffloadConfig",
    "ShardedDataParallel",
    "TrainingState",
    "auto_wrap_bn",
    "get_fsdp_instances",
    "no_pre_load_state_dict_hook",
]

logger = logging.getLogger("shardkit")


class ShardedDataParallel(ShardedDDP):
    """fairscale's ShardedDataParallel: see :class:`shardkit.ShardedDDP` for what it does.

    Args:
        sharded_optimizer: the OSS that owns the parameters, an AdaScale around it, or a list of them.
        process_group: ranks that train together; None for all.
        broadcast_buffers: keep rank 0's buffers on all ranks.
        sync_models_at_startup: begin with rank 0's parameters and buffers.
        reduce_buffer_size: most elements in a gradient bucket; 0 reduces each gradient alone.
        auto_refresh_trainable: notice freezing and unfreezing at each forward.
        reduce_fp16: reduce in fp16; as in fairscale only with ``reduce_buffer_size=0``, else a warning is logged
            (``shardkit.ReducePolicy(dtype=torch.float16)`` does it with buckets).
        warn_on_trainable_params_changed: log a warning when that happens.
    """

    def __init__(
        self,
        module: nn.Module,
        sharded_optimizer: OSS | AdaScale | list[OSS | AdaScale],
        process_group: ProcessGroup = None,
        broadcast_buffers: bool = True,
        sync_models_at_startup: bool = True,
        reduce_buffer_size: int = 2**23,
        auto_refresh_trainable: bool = True,
        reduce_fp16: bool = False,
        warn_on_trainable_params_changed: bool = True,
    ) -> None:
        if reduce_fp16 and reduce_buffer_size > 0:
            logger.warning("reduce_fp16 needs reduce_buffer_size=0; gradients are reduced in their own dtype")
            reduce_fp16 = False
        super().__init__(
            module,
            sharded_optimizer,
            group=process_group,
            broadcast_buffers=broadcast_buffers,
            sync_module_states=sync_models_at_startup,
            reduce=ReducePolicy(reduce_buffer_size, torch.float16 if reduce_fp16 else None),
            watch_trainable=auto_refresh_trainable,
        )
        self._warn_on_change = warn_on_trainable_params_changed
        # as DistributedDataParallel shows them; trainers read both
        self.is_multi_device_module = False
        self.device_type = next((p.device.type for p in module.parameters()), "cpu")

    def to(  # type: ignore[override]
        self,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
    ) -> ShardedDataParallel:
        """Casts the module, or moves it within its device type; returns the wrapper (fairscale: None).

        Raises:
            ConfigurationError: another device type: the optimizer's state would stay behind.
        """
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        target = None if device is None else torch.empty((), device=device).device
        if target is not None and target.type != self.device_type:
            raise ConfigurationError(
                f"the module is on {self.device_type} and its optimizer state stays there; move it to {target.type} "
                "before building OSS and ShardedDataParallel"
            )
        self.module.to(device=target, dtype=dtype, non_blocking=non_blocking)
        self.refresh_trainable()
        return self

    _trainable_params = property(
        lambda self: [p for o in self._sharded_optimizers for p in o._parameters() if p.requires_grad]
    )
    _should_accumulate_grads = property(lambda self: self._connected().state.accumulating)
    _grad_hooks = property(lambda self: self._connected().hooks.after)
    _buckets = property(lambda self: self._connected().buckets)


# ------------------------------------------------------------ FullyShardedDataParallel
class TrainingState(enum.Enum):
    IDLE = enum.auto()
    FORWARD = enum.auto()
    BACKWARD_PRE = enum.auto()
    BACKWARD_POST = enum.auto()
    SUMMON_FULL_PARAMS = enum.auto()


class PassedGroup:
    """Holds what was passed as a process group: copies of a module have the same, pickled ones have none.

    Called with the output and this rank's shard of an all-gather, it tells a ProcessGroupTracker.
    """

    def __init__(self, value: ProcessGroup = None) -> None:
        self.value = value
        self._tell: Callable[[torch.Tensor, torch.Tensor], None] | None = getattr(
            value, "hear_of_gathering", None
        )

    def hear(self, flats: Iterable[FlatParam]) -> None:
        """Is told of what these gather, if there is a tracker to tell."""
        if self._tell is not None:
            for flat in flats:
                flat.on_gather = self

    def __call__(self, output: torch.Tensor, shard: torch.Tensor) -> None:
        if self._tell is not None:
            self._tell(output, shard)

    def __deepcopy__(self, memo: Memo) -> PassedGroup:
        return self

    def __reduce__(self) -> tuple[type[PassedGroup], tuple[()]]:
        return PassedGroup, ()


class InnerStateDict(Answer):
    """``state_dict`` of ``fsdp.module``: with one rank the full one, unflattened this rank's shards; else refused."""

    def __call__(self, *args: Tree, **kwargs: Tree) -> StateDict:
        door: Tree = self.module
        if is_collecting() or (door.world_size > 1 and door.flatten_parameters):
            return nn.Module.state_dict(door.module, *args, **kwargs)
        return (door.state_dict if door.world_size == 1 else door.local_state_dict)(*args, **kwargs)


class StandIn(Door):
    """A wrapper that stands for fairscale's or torch's: its state, as far as both have it under the same names."""

    _passed_group: PassedGroup
    training_state: enum.Enum

    _is_root = property(attrgetter("_state.is_root"))
    compute_device = property(attrgetter("_state.compute_device"))  # on which parameters are gathered

    @property
    def params(self) -> list[nn.Parameter]:
        """Lists this wrapper's own parameters (shards)."""
        return [listing.param for listing in self._state.listings]

    def assert_state(self, state: enum.Enum | list[enum.Enum]) -> None:
        """Raises unless the module is in one of these states.

        Raises:
            LifecycleError: it is in another one.
        """
        wanted = [state] if isinstance(state, enum.Enum) else state
        if self.training_state not in wanted:
            raise LifecycleError(
                f"expected to be in states {wanted} but current state is {self.training_state}"
            )


# ------------------------------------------------------------ the wrapper
# What the wrapper shows as it was passed.
_SHOWN = (
    "reshard_after_forward disable_reshard_on_root mixed_precision fp32_reduce_scatter flatten_parameters "
    "bucket_cap_mb state_dict_device clear_autocast_cache force_input_to_fp32 verbose state_dict_on_rank_0_only "
    "allow_reset_parameters"
)
_REPR = "world_size flatten_parameters mixed_precision"
_VERBOSE_REPR = (
    "reshard_after_forward compute_dtype buffer_dtype fp32_reduce_scatter compute_device move_params_to_cpu "
    "move_grads_to_cpu bucket_cap_mb clear_autocast_cache force_input_to_fp32"
)


class FullyShardedDataParallel(StandIn):
    """fairscale's FullyShardedDataParallel: see :class:`shardkit.FSDP` for what it does.

    Args:
        module: model or layer.
        process_group: ranks among which parameters are sharded; None for all.
        process_group_reduce_scatter: accepted; gradients always travel over connections of their own.
        reshard_after_forward: free full parameters after forward.
        disable_reshard_on_root: the root keeps full parameters between forward and backward.
        mixed_precision: compute and communicate in half precision, with shards in full precision.
        fp32_reduce_scatter: reduce gradients in fp32 (with ``mixed_precision``).
        flatten_parameters: one flat parameter for each wrapper.
        move_params_to_cpu: shards live on the CPU.
        compute_dtype: fp16 with ``mixed_precision``, else the parameters'.
        buffer_dtype: ``compute_dtype`` by default.
        move_grads_to_cpu: ``move_params_to_cpu`` by default.
        bucket_cap_mb: accepted; a unit's gradients travel together.
        compute_device: by default where the parameters are; with ``move_params_to_cpu`` and parameters on the CPU the
            device that the job's process group serves.
        no_broadcast_optim_state: leave this wrapper out of ``gather_full_optim_state_dict``.
        state_dict_device: where full state dicts are made; by default where the parameters are.
        clear_autocast_cache: clear it after forward.
        force_input_to_fp32: cast half-precision inputs (without ``mixed_precision``).
        verbose: a longer ``repr``.
        cpu_offload: old name of ``move_params_to_cpu``.
        state_dict_on_rank_0_only: ``state_dict()`` is empty on other ranks.
        gradient_predivide_factor: gradients are divided by it before their sum; default: a power of two near the
            root of the world size.
        allow_reset_parameters: else ``reset_parameters()`` raises.

    Raises:
        ConfigurationError: options that exclude each other.
    """

    _passed_for_gradients: PassedGroup
    flatten_parameters: bool
    move_params_to_cpu: bool

    @without_arguments(offload_config="parameters are kept on the CPU with move_params_to_cpu=True")
    def __init__(
        self,
        module: nn.Module,
        process_group: ProcessGroup = None,
        process_group_reduce_scatter: ProcessGroup = ProcessGroupName.reduce_scatter,
        reshard_after_forward: bool = True,
        disable_reshard_on_root: bool = True,
        mixed_precision: bool = False,
        fp32_reduce_scatter: bool = False,
        flatten_parameters: bool = True,
        move_params_to_cpu: bool = False,
        compute_dtype: torch.dtype | None = None,
        buffer_dtype: torch.dtype | None = None,
        move_grads_to_cpu: bool | None = None,
        bucket_cap_mb: int = 25,
        compute_device: torch.device | None = None,
        no_broadcast_optim_state: bool | None = False,
        state_dict_device: torch.device | None = None,
        clear_autocast_cache: bool = False,
        force_input_to_fp32: bool = False,
        verbose: bool = False,
        cpu_offload: bool = False,
        state_dict_on_rank_0_only: bool = False,
        gradient_predivide_factor: float | None = None,
        allow_reset_parameters: bool = False,
    ) -> None:
        given, offloads = dict(locals()), move_params_to_cpu or cpu_offload
        if offloads and move_grads_to_cpu is False:
            raise ConfigurationError("move_params_to_cpu requires move_grads_to_cpu, which is its default")
        if fp32_reduce_scatter and not mixed_precision:
            raise ConfigurationError("fp32_reduce_scatter requires mixed_precision=True")
        self._passed_group = PassedGroup(process_group)
        check_modules([module], type(self).__name__)
        self._passed_for_gradients = PassedGroup(process_group_reduce_scatter)
        precision = PrecisionPolicy(
            buffers=buffer_dtype, inputs=torch.float32 if force_input_to_fp32 else None
        )
        if mixed_precision:
            compute = compute_dtype or torch.float16
            precision = PrecisionPolicy(compute=compute, buffers=buffer_dtype or compute, inputs=compute)
        options = Options(
            group=group_for(getattr(process_group, "group", process_group)),  # of a ProcessGroupTracker
            precision=precision,
            reshard=ReshardPolicy(bool(reshard_after_forward), root=not disable_reshard_on_root),
            offload=OffloadPolicy(offloads, move_grads_to_cpu),
            reduce=ReducePolicy(
                dtype=torch.float32 if fp32_reduce_scatter else None, predivide=gradient_predivide_factor
            ),
            flatten=flatten_parameters,
            layout=AlignedLayout(None) if flatten_parameters else EachAlone(AlignedLayout(None)),
            device=device_for(module.parameters(), compute_device, offloads),
            state_dict_device=state_dict_device,
            state_dict_on_rank_0_only=state_dict_on_rank_0_only,
            clears_autocast_cache=clear_autocast_cache,
            keeps_optimizer_state=bool(no_broadcast_optim_state),
        )
        self._shard(module, self._adapted(options))
        self._answer_inside()
        self.__dict__.update({name: given[name] for name in _SHOWN.split()})
        self._orig_reshard_after_forward = reshard_after_forward
        self.move_params_to_cpu = offloads
        self.move_grads_to_cpu = move_grads_to_cpu or offloads
        self.no_broadcast_optim_state = options.keeps_optimizer_state

    built_together = staticmethod(_built_together)

    def _sharded(self) -> None:
        self._passed_group.hear(self._state.flats)
        self.gradient_predivide_factor, self.gradient_postdivide_factor = self._state.divisors

    def _adapted(self, options: Options) -> Options:
        """Returns what the core gets; torch_xla's class adds to it."""
        return options

    def _answer_inside(self) -> None:
        self._fsdp_wrapped_module.__dict__["state_dict"] = InnerStateDict(self)

    def __setstate__(self, state: StateDict) -> None:
        super().__setstate__(state)
        self._answer_inside()

    # ------------------------------------------------------------ what existing code reads, private names included
    # the wrapper's inner part, which forwards to the wrapped module
    module = property(attrgetter("_fsdp_wrapped_module"))
    cpu_offload = property(attrgetter("move_params_to_cpu"))
    rank = property(attrgetter("_state.group.rank"))
    world_size = property(attrgetter("_state.group.world_size"))
    # state of parameters that are this rank's alone, as of the last gather_full_optim_state_dict
    uncollected_opt_state = property(attrgetter("_state.uncollected"))

    @property
    def process_group(self) -> ProcessGroup:
        """Returns the group as it was passed, or as torch knows it."""
        if self._passed_group.value is not None:
            return self._passed_group.value
        return getattr(self._state.group, "process_group", None) or torch.distributed.group.WORLD

    @process_group.setter
    def process_group(self, group: ProcessGroup) -> None:
        """Takes a group after unpickling, from the outermost module on; until then it is that of all ranks.

        Raises:
            ConfigurationError: the shards are of another number of ranks, or of another rank.
            LifecycleError: the module's forward or backward is under way, or the root has run.
        """
        self.assert_state(TrainingState.IDLE)
        reconnect(self._state, getattr(group, "group", group))
        self._passed_group = PassedGroup(group)
        self._passed_group.hear(self._state.flats)

    @property
    def process_group_reduce_scatter(self) -> ProcessGroup:
        """Returns what was passed, if that is a group of as many ranks; gradients have their own connections anyway."""
        passed: Tree = self._passed_for_gradients.value
        fits = callable(getattr(passed, "size", None)) and passed.size() == self.world_size
        return passed if fits else self.process_group

    @process_group_reduce_scatter.setter
    def process_group_reduce_scatter(self, group: ProcessGroup) -> None:
        size, own = size_of(getattr(group, "group", group)), self._state.group
        if None not in (size, own) and size != own.world_size:
            raise ConfigurationError(
                f"a group of {size} ranks: gradients travel among the {own.world_size} that have shards; leave it out"
            )
        self._passed_for_gradients = PassedGroup(group)

    @property
    def compute_dtype(self) -> torch.dtype:
        chosen, flats = self._state.options.precision.compute, self._state.flats
        return chosen or (flats[0].param.dtype if flats else torch.float32)

    buffer_dtype = property(lambda self: self._state.options.precision.buffers or self.compute_dtype)

    @property
    def numel_padded_per_param(self) -> list[int]:
        """Returns the padding at the end of each of this rank's shards."""
        return [listing.layout.padding(self.rank) for listing in self._state.listings]

    @property
    def has_full_params(self) -> bool:
        """Says whether this wrapper's parameters are gathered."""
        return self._state.summoned is not None or any(f.store.state in FULL for f in self._state.flats)

    @property
    def training_state(self) -> TrainingState:  # type: ignore[override]
        """Tells what the module is doing."""
        if self._state.summoned is not None:
            return TrainingState.SUMMON_FULL_PARAMS
        engine = self._state.engine
        if engine is not None and engine.state.task != NO_BACKWARD:
            return TrainingState.BACKWARD_PRE
        if engine is not None and engine.forwards:
            return TrainingState.FORWARD
        return TrainingState.IDLE

    @property
    def _require_backward_grad_sync(self) -> bool:
        engine = self._state.engine
        return engine is None or not engine.state.accumulating

    # Collectives have streams of their own; a unit's gradients are reduced together, without buckets.
    _streams = property(lambda _: {})
    _reducer = property(lambda _: None)
    _num_flatten_params = property(lambda self: len(self._state.flats) if self.flatten_parameters else 0)

    def non_shared_params(self) -> list[nn.Parameter]:
        """Returns this wrapper's own parameters; those of other wrappers that it uses are theirs."""
        return self.params

    def append_shared_param(self, p: nn.Parameter) -> None:
        """Accepts it: weights that wrappers share are found when they are wrapped.

        Raises:
            ConfigurationError: ``p`` belongs to no FSDP module.
        """
        if shard_behind(p) is None and managing(p) is None:
            raise ConfigurationError("append_shared_param takes a parameter that another FSDP module owns")

    def _reset_lazy_init(self) -> None:
        """Lets the next forward find out anew which modules are below this one; its units keep what they have.

        Raises:
            LifecycleError: its forward or backward is under way.
        """
        self.assert_state(TrainingState.IDLE)
        self._state.forget_root()

    # VISSL sets None before it wraps what is around; the next forward finds out anew, whatever is set.
    _is_root = property(attrgetter("_state.is_root"), lambda door, _: door._reset_lazy_init())

    # ------------------------------------------------------------ methods
    @contextlib.contextmanager
    def summon_full_params(  # type: ignore[override]
        self, recurse: bool = True, volatile: bool = False
    ) -> Iterator[None]:
        """Shows, inside, full parameters under their own names; changes are kept unless ``volatile``."""
        with summoned(self._state, recurse, writeback=not volatile):
            yield

    def set_gradient_divide_factors(self, pre: float, post: float, recursive: bool) -> None:
        """Divides gradients by ``pre`` before and by ``post`` after their sum over ranks."""
        for m in self.modules() if recursive else [self]:
            if isinstance(m, FullyShardedDataParallel):
                m.gradient_predivide_factor, m.gradient_postdivide_factor = pre, post
                m.set_divisors(pre, post)

    def _get_gradient_predivide_factor(self, world_size: int) -> float:
        return float(predivide_factor(world_size))

    def reset_parameters(self) -> object:
        """Calls the wrapped module's, with full parameters.

        Raises:
            ConfigurationError: without ``allow_reset_parameters``.
        """
        if not self.allow_reset_parameters:
            raise ConfigurationError(
                "reset_parameters() is called on an FSDP instance, which would change the parameters of a model that "
                "may be trained already; allow it by allow_reset_parameters=True"
            )
        with summoned(self._state, recurse=False, writeback=True):
            return self._state.module.reset_parameters()  # type: ignore[operator]

    def named_parameters(self, *args: Tree, **kwargs: Tree) -> Iterator[tuple[str, nn.Parameter]]:
        """Names them as fairscale: raw where flattened, clean otherwise and inside of ``summon_full_params``."""
        for name, param in super().named_parameters(*args, **kwargs):
            yield (name if self.flatten_parameters and self._state.summoned is None else clean(name)), param

    def extra_repr(self) -> str:
        """Shows world size and the main options."""
        begin = f"self={id(self)} is_root={self._state.is_root}, rank={self.rank}, " if self.verbose else ""
        names = f"{_REPR} {_VERBOSE_REPR if self.verbose else ''}".split()
        return begin + "".join(f"{name}={getattr(self, name)}, " for name in names)


FairscaleFacts = FullyShardedDataParallel  # what held these attributes up to 0.2


def group_for(given: Tree) -> ProcessGroup:
    """Marks a group of several ranks that can't communicate: it is for the structure, as in fairscale's tests."""
    size = size_of(given)
    if size is None or size == 1 or hasattr(given, "allgather"):
        return given
    return RanksInName(given.rank(), size)


def device_for(
    params: Iterable[nn.Parameter], given: torch.device | None, offloads: bool
) -> torch.device | None:
    """Chooses where to compute: what stays on the CPU between steps on the GPU, where the job has some."""
    if given is not None:
        return torch.device(given)
    if not offloads or any(p.device.type != "cpu" for p in params):
        return None
    backend = backend_of_job()
    return backend.device() if backend.device_type != "cpu" and backend.has_storage else None


def check_param_counts_before_sharding(full_optim_state_dict: StateDict, n_instances: int) -> None:
    """Checks that a full optimizer state was saved from as many FSDP instances.

    Raises:
        ConfigurationError: it was not.
    """
    saved = len(set(full_optim_state_dict["param_id_map"].values()))
    if full_optim_state_dict["state"] and saved != n_instances:
        raise ConfigurationError(
            f"the optimizer state was saved from {saved} FSDP instances, this model has {n_instances} (itself "
            "included); wrap it as it was when the state was saved"
        )


def is_singleton_tensor(x: object) -> bool:
    """Says whether it is a tensor without dimensions."""
    return isinstance(x, torch.Tensor) and x.dim() == 0


def p_assert(cond: object, s: object) -> None:
    """Prints and raises if a condition does not hold."""
    if not cond:
        print(s)
        raise AssertionError(s)


def get_fsdp_instances(mod: nn.Module, skip_empty: bool = False) -> list[FullyShardedDataParallel]:
    """Returns all FSDP modules in a module, itself included, the outermost first.

    Args:
        skip_empty: leave out those without parameters of their own.
    """
    found = [m for m in mod.modules() if isinstance(m, FullyShardedDataParallel)]
    return [m for m in found if m.non_shared_params()] if skip_empty else found


def auto_wrap_bn(
    module: nn.Module,
    single_rank_pg: bool = False,
    process_group: ProcessGroup = None,
    fsdp_config: Kwargs | None = None,
    wrap_it: bool = True,
    assert_on_collision: bool = True,
) -> nn.Module:
    """Wraps all batch norms in FSDP modules of their own: full precision, not flattened, not resharded.

    Args:
        module: where to look for batch norms.
        single_rank_pg: each rank keeps its own, unsharded and not synchronised.
        process_group: ranks to shard over.
        fsdp_config: arguments in place of these.
        wrap_it: False only sets ``wrapper_config``, for a later ``auto_wrap``.
        assert_on_collision: a batch norm that has a ``wrapper_config`` already is an error.

    Returns:
        The module, with its batch norms wrapped.

    Raises:
        ConfigurationError: see ``assert_on_collision``.
    """
    if single_rank_pg:
        process_group = get_process_group_cached(ranks=[torch.distributed.get_rank()])
    if fsdp_config is None:
        fsdp_config = {
            "process_group": process_group,
            "mixed_precision": False,
            "flatten_parameters": False,
            "reshard_after_forward": False,
            "bucket_cap_mb": 0,
            "force_input_to_fp32": False,
        }
    for m in module.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm):
            if assert_on_collision and hasattr(m, "wrapper_config"):
                raise ConfigurationError(
                    "Module shouldn't already have a wrapper_config. Is it tagged already by another policy?"
                )
            m.wrapper_config = fsdp_config  # type: ignore[assignment]
    if not wrap_it:
        return module
    with enable_wrap(config_auto_wrap_policy, wrapper_cls=FullyShardedDataParallel):
        return auto_wrap(module)


def alloc_storage_(data: torch.Tensor, size: torch.Size) -> None:
    """Gives a tensor that owns its storage the memory for ``size``, unless it has it."""
    wanted = size.numel() * data.element_size()
    if data.untyped_storage().size() != wanted:
        data.untyped_storage().resize_(wanted)


def free_storage_(data: torch.Tensor) -> None:
    """Gives the memory of a tensor that owns its storage back."""
    data.untyped_storage().resize_(0)


def cast_floats_to_right_precision(
    to_fp16: bool, no_grad: bool, *args: Tree, **kwargs: Tree
) -> tuple[Args, Kwargs]:
    """Returns arguments with fp32 tensors cast to fp16, or the other way round.

    Args:
        to_fp16: which way.
        no_grad: cast without autograd, but keep ``requires_grad``.
    """
    source, target = (torch.float32, torch.float16) if to_fp16 else (torch.float16, torch.float32)

    def cast(x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not source:
            return x
        with torch.no_grad() if no_grad else contextlib.nullcontext():
            y = x.to(target)
        return y.requires_grad_(x.requires_grad) if y.is_leaf else y

    return tree_map_only(torch.Tensor, cast, (args, kwargs))  # type: ignore[no-any-return]
