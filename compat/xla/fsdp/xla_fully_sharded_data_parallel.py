"""torch_xla.distributed.fsdp.XlaFullyShardedDataParallel on shardkit's FSDP, on XLA and on other backends."""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from shardkit.errors import ConfigurationError
from shardkit.fsdp.inside import begin_loading_shards, collecting, end_loading_shards
from shardkit.fsdp.state import Options, modules_outside_units
from shardkit.layout import ShardLayout
from shardkit.nn.data_parallel import TrainingState
from shardkit.reduction.norms import Portion, clip_by_global_norm, norm_like
from shardkit.xla.ranks import current_backend, group_among

from . import shard_states
from .wrap import recursive_wrap

__all__ = ["TrainingState", "XlaFullyShardedDataParallel"]

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class XlaFullyShardedDataParallel(shard_states.ShardHolder):
    """torch_xla's FSDP: see :class:`shardkit.FSDP` for what it does. Rank 0's initial values count.

    ``state_dict()`` is this rank's part of the model, under torch_xla's names and with its padding. Together with
    :meth:`get_shard_metadata` it makes a checkpoint that torch_xla's FSDP loads, and the other way round; optimizer
    states fit too. ``load_state_dict`` also takes full state dicts.

    Args:
        module: on any device; XLA ranks move it to theirs.
        reshard_after_forward: give gathered parameters back after forward.
        flatten_parameters: one flat parameter for each wrapper (two if some parameters are frozen).
        execute_sharding_on_init: run the recorded graph once the module is sharded.
        optimization_barrier_in_forward, optimization_barrier_in_backward: accepted; units are kept apart by the
            order of their collectives.
        sync_on_finalization: run the recorded graph at the end of each backward (of the root's option).
        disable_reshard_on_root: the outermost wrapper keeps its parameters until backward.
        compute_dtype: dtype of gathered parameters, inputs and gradients; shards keep the parameters' own.
        buffer_dtype: ``compute_dtype`` by default.
        fp32_reduce_scatter: reduce gradients in fp32.
        sharding_groups: partition of all ranks; parameters are sharded, and gradients averaged, within a part.
        sharding_rank, sharding_world_size: this rank's place in it; needed with ``sharding_groups``.
        shard_param_on_dim_0: without ``flatten_parameters``: shards are whole rows. State dicts hold them as rows;
            ``parameters()`` lists them as flat parameters, which is the same to element-wise optimizers.
        pin_layout_in_collective_ops, reduce_scatter_bucket_size_mb, coalesce_all_gather_ops: accepted; how a unit's
            tensors travel is the backend's business.
        auto_wrap_policy: wraps submodules first, see :mod:`shardkit.xla.fsdp.wrap`.
        auto_wrapper_callable: in place of this class for them.
        param_init_fn: initialises a module with parameters on the meta device; default: its ``reset_parameters()``.
        mark_step_on_finalization: older name of ``sync_on_finalization``.
        _shard_size_multiple: shards are padded to a multiple of so many elements.
        _use_xla_patched_linear, _debug_msg, _debug_print: accepted; no effect.

    Raises:
        ConfigurationError: wrapped already; no forward; ``sharding_groups`` without or against the place in it; a
            dtype that is no float; a ``_debug_dummy_...`` option, whose results would be wrong.
    """

    def __init__(
        self,
        module: nn.Module,
        reshard_after_forward: bool = True,
        flatten_parameters: bool = False,
        execute_sharding_on_init: bool = True,
        optimization_barrier_in_forward: bool = True,
        optimization_barrier_in_backward: bool = True,
        sync_on_finalization: bool = False,
        disable_reshard_on_root: bool = True,
        compute_dtype: torch.dtype | None = None,
        buffer_dtype: torch.dtype | None = None,
        fp32_reduce_scatter: bool = False,
        sharding_groups: Sequence[Sequence[int]] | None = None,
        sharding_rank: int | None = None,
        sharding_world_size: int | None = None,
        shard_param_on_dim_0: bool = False,
        pin_layout_in_collective_ops: bool = True,
        reduce_scatter_bucket_size_mb: int | None = 0,
        coalesce_all_gather_ops: bool = False,
        auto_wrap_policy: Callable[..., bool] | None = None,
        auto_wrapper_callable: Callable[..., nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], Any] | None = None,
        _shard_size_multiple: int = 128,
        _use_xla_patched_linear: bool = True,
        _debug_dummy_forward_pass: bool = False,
        _debug_msg: str = "xla_fsdp",
        _debug_print: bool = False,
        _debug_dummy_all_gather_op: bool = False,
        _debug_dummy_all_reduce_op: bool = False,
        _debug_dummy_reduce_scatter_op: bool = False,
        _debug_dummy_optimization_barrier_op: bool = False,
        *,
        mark_step_on_finalization: bool = False,
    ) -> None:
        options = dict(
            locals()
        )  # before anything else is one: they go to the wrappers of submodules as they are
        for name in ("self", "module", "__class__", "auto_wrap_policy", "auto_wrapper_callable"):
            options.pop(name, None)
        _check(module, options)
        if auto_wrap_policy is not None:
            wrapper = auto_wrapper_callable or XlaFullyShardedDataParallel
            recursive_wrap(module, auto_wrap_policy, wrapper, [], [], only_wrap_children=True, **options)
        _materialize(module, param_init_fn)
        backend = current_backend()
        on_xla = backend.device_type == "xla"
        group = backend.group() if on_xla else None
        if sharding_groups is not None:
            group = group_among(sharding_groups)
            _check_place(group, sharding_rank, sharding_world_size)
        self._row_shards = shard_param_on_dim_0 and not flatten_parameters
        self._shard_size_multiple = 1 if self._row_shards else _shard_size_multiple
        self.sync_on_finalization = sync_on_finalization or mark_step_on_finalization
        half = compute_dtype not in (None, torch.float32)
        super().__init__(
            module,
            process_group=group,
            reshard_after_forward=reshard_after_forward,
            disable_reshard_on_root=disable_reshard_on_root,
            mixed_precision=compute_dtype is not None,
            fp32_reduce_scatter=fp32_reduce_scatter and half,
            flatten_parameters=flatten_parameters,
            compute_dtype=compute_dtype,
            buffer_dtype=buffer_dtype,
            compute_device=backend.device() if on_xla else None,
        )
        self.register_load_state_dict_post_hook(end_loading_shards)
        self.sharding_groups = sharding_groups
        self.optimization_barrier_in_forward = optimization_barrier_in_forward
        self.optimization_barrier_in_backward = optimization_barrier_in_backward
        self.coalesce_all_gather_ops = coalesce_all_gather_ops
        self._shards = shard_states.shards_of(self)
        self._state.cast_buffers()
        if on_xla:
            _move_buffers(self.module, backend.device())
        if execute_sharding_on_init:
            backend.mark_step()

    # ------------------------------------------------------------ shards
    def _adapted(self, options: Options) -> Options:
        cut = functools.partial(_layout, self._shard_size_multiple, self._row_shards)
        return dataclasses.replace(options, layout=cut, mark_step=self.sync_on_finalization)

    @property
    def sharded_params(self) -> list[nn.Parameter]:
        """This wrapper's own shards; those of trainable parameters first."""
        return [shard.flat.param for shard in self._shards]

    @property
    def xla_device(self) -> torch.device:
        """Where this wrapper computes."""
        return self.compute_device

    def get_original_names_and_sharded_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Shards of this wrapper and those below, with the paths of their parameters in the wrapped module."""
        return shard_states.original_names(self)

    def named_parameters(  # type: ignore[override]
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Shards in torch_xla's order (a wrapper's own come first) and under its names."""
        if self._state.summoned is not None:
            yield from super().named_parameters(prefix, recurse, remove_duplicate)
            return
        listed = set()
        for name, param in shard_states.named_shards(self, recurse):
            listed.add(param)
            yield (f"{prefix}.{name}" if prefix else name), param
        for name, param in nn.Module.named_parameters(self, prefix, recurse, remove_duplicate):
            if param not in listed:
                yield name, param

    # ------------------------------------------------------------ checkpoints
    def get_shard_metadata(self) -> dict[str, Any]:
        """What consolidation needs to know; save it beside ``state_dict()``."""
        return shard_states.metadata(self)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """This rank's shards, and all buffers."""
        given = {**dict(zip(("destination", "prefix", "keep_vars"), args, strict=False)), **kwargs}
        destination: Any = given.get("destination")
        prefix = given.get("prefix", "")
        if destination is None:
            destination = OrderedDict()
            destination._metadata = OrderedDict()
        found: Any = OrderedDict()
        found._metadata = OrderedDict()
        with collecting():
            nn.Module.state_dict(
                self, destination=found, prefix=prefix, keep_vars=given.get("keep_vars", False)
            )
        shard_states.rename_saved(self, found, prefix)
        destination.update(found)
        if hasattr(destination, "_metadata"):
            destination._metadata.update(found._metadata)
        return destination

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        self._state.state_is_local = shard_states.rename_loaded(self, state_dict, prefix)
        if self._state.state_is_local:
            begin_loading_shards(self)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self._state.state_is_local = False

    # ------------------------------------------------------------ steps
    @torch.no_grad()
    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        groups: Sequence[Sequence[int]] | None = None,
    ) -> torch.Tensor:
        """Scales all gradients so that their norm is at most ``max_norm`` (collective).

        Args:
            max_norm, norm_type: the limit and the norm.
            groups: partition of all ranks; the norm is over the ranks of this rank's part, by default over all.

        Returns:
            The norm before, 0-dim.

        Raises:
            LifecycleError: called on a unit below the root.
        """
        if groups is None and self.sharding_groups is None:
            return super().clip_grad_norm_(max_norm, norm_type)
        group = current_backend().group() if groups is None else group_among(groups)
        params = list(self.parameters())
        like = norm_like(params).to(self.compute_device)
        gradients = [p.grad for p in params if p.grad is not None]
        portions = [Portion(gradients, (group,))]
        return clip_by_global_norm(portions, gradients, like, float(max_norm), float(norm_type))

    def extra_repr(self) -> str:
        """Place and main options."""
        return (
            f"world_size={self.world_size}, rank={self.rank}, compute_dtype={self.compute_dtype}, "
            f"buffer_dtype={self.buffer_dtype}, flatten_parameters={self.flatten_parameters}, "
            f"reshard_after_forward={self.reshard_after_forward}, sharding_groups={self.sharding_groups}"
        )


def _layout(multiple: int, by_rows: bool, shapes: Sequence[torch.Size], world_size: int) -> ShardLayout:
    """torch_xla's shards: whole rows, or padded to a multiple."""
    if world_size == 1:
        multiple = 1  # nothing is cut; state dicts add the padding
    elif by_rows and shapes[0]:
        multiple = max(1, shapes[0][1:].numel())
    return ShardLayout(tuple(shape.numel() for shape in shapes), world_size, multiple)


def _check(module: nn.Module, options: dict[str, Any]) -> None:
    if isinstance(module, XlaFullyShardedDataParallel):
        raise ConfigurationError(
            "the module is an FSDP module already; to nest, wrap submodules before the module that holds them"
        )
    if getattr(type(module), "forward", None) is nn.Module.forward and "forward" not in vars(module):
        raise ConfigurationError(
            f"{type(module).__name__} has no forward (a ModuleList, for example); FSDP acts when a module is called: "
            "wrap modules that are"
        )
    for name in ("compute_dtype", "buffer_dtype"):
        if options[name] is not None and options[name] not in _FLOATS:
            raise ConfigurationError(f"{name} is {options[name]}; choose one of {list(_FLOATS)}")
    dummies = [k for k, v in options.items() if k.startswith("_debug_dummy") and v]
    if dummies:
        raise ConfigurationError(f"{', '.join(dummies)}: there are no dummy operations here; leave it out")


def _check_place(group: Any, rank: int | None, world_size: int | None) -> None:
    if (group.rank, group.world_size) != (rank, world_size):
        raise ConfigurationError(
            f"sharding_groups put this rank at place {group.rank} of {group.world_size}; pass sharding_rank="
            f"{group.rank} and sharding_world_size={group.world_size} (got {rank} and {world_size})"
        )


def _materialize(module: nn.Module, init: Callable[[nn.Module], Any] | None) -> None:
    """Gives parameters on the meta device their initial values."""
    own = [m for _, m in modules_outside_units(module)]
    if not any(p is not None and p.is_meta for m in own for p in m._parameters.values()):
        return
    if init is not None:
        init(module)
        return
    reset = getattr(module, "reset_parameters", None)
    if reset is None:
        raise ConfigurationError(
            f"parameters of {type(module).__name__} are on the meta device and it has no reset_parameters() to "
            "initialise them; pass param_init_fn"
        )
    module.to_empty(device="cpu")
    with torch.no_grad():
        reset()


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    for m in module.modules():
        for name, buffer in m._buffers.items():
            if buffer is not None and buffer.device != device:
                m._buffers[name] = buffer.to(device)
